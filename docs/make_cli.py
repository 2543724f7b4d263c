# ruff: noqa: INP001
"""Writes docs/cli.md from the command itself: `python docs/make_cli.py`; with `--check`, says whether it is current."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from safeload import cli
from safeload.cli.examples import EXAMPLES

PAGE = Path(__file__).with_name("cli.md")

HEAD = """\
# The command

Made by `python docs/make_cli.py` from the command's own help; a test holds the two together.

`safeload [-V | --version] [-h | --help] COMMAND ...`

{help}

## Exit codes and streams

| code | means |
|---|---|
| 0 | accepted, or done |
| 1 | rejected, malformed input included; or, for a comparison, not equal |
| 2 | no verdict: wrong usage, an unreadable configuration, no room, an interruption (Ctrl-C, SIGTERM) |

Results and the verdict go to stdout, and the verdict is its last line; reasons and progress go to stderr. With `--json`
stdout is one object, whatever the code: [spec.md](spec.md) says which. Names from a checkpoint are printed escaped.

## Environment

`NO_COLOR` and `TERM=dumb` turn colors off, `CI` turns the progress bar off, and `_SAFELOAD_COMPLETE` is how a shell
asks for completions. No variable changes what is checked.

## Commands

The examples of all commands are one story, which a test runs in the order of its telling. In it, `publisher.key` is a
key pair, `checkpoint` a directory, and `KEYID` and `ID` are what an earlier command printed.
"""


def main() -> int:
    """Write the page, or with `--check` compare it; return the exit code."""
    page = page_text()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def page_text() -> str:
    """Return the page as it should be."""
    root: Any = typer.main.get_command(cli.app)
    commands = dict(_leaves(root))
    parts = [HEAD.format(help=root.help)]
    parts += [
        f"- [`{path}`](#safeload-{path.replace(' ', '-')}): {_summary(command)}" for path, command in commands.items()
    ]
    for path, command in commands.items():
        parts += ["", *_section(root, path, command)]
    return "\n".join(parts) + "\n"


def _leaves(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(command.help or "").split("\n\n")]


def _summary(command: Any) -> str:
    return _paragraphs(command)[0]


def _section(root: Any, path: str, command: Any) -> Iterator[str]:
    # With a context, as for a run: our commands leave out the types that their help leaves out.
    context = command.make_context(path, [], parent=root.make_context("safeload", [path]), resilient_parsing=True)
    params = command.get_params(context)
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option"]
    yield f"### safeload {path}\n"
    yield f"`safeload {path} [OPTIONS] {' '.join(argument.metavar for argument in arguments)}".rstrip() + "`\n"
    for paragraph in _paragraphs(command):
        yield f"{paragraph}\n"
    yield "| | |\n|---|---|"
    yield from (f"| `{_cell(argument.metavar)}` | {_cell(argument.help)} |" for argument in arguments)
    for option in options:
        # Short before long: click keeps those of --help in a set, whose order differs from run to run.
        given = sorted((*option.opts, *option.secondary_opts), key=lambda name: (name.startswith("--"), name))
        names = ", ".join(f"`{name}`" for name in given)
        value = "" if option.is_flag else f" `{_cell(option.metavar or option.display_type_rich(context).strip('<>'))}`"
        yield f"| {names}{value} | {_cell(option.help)}{_note(option)} |"
    yield "\n```sh"
    yield from EXAMPLES[path]
    yield "```"


def _note(option: Any) -> str:
    if option.required:
        return " (required)"
    shown = option.show_default and not option.is_flag and option.default not in {None, ()}
    return f" (default: {option.default})" if shown else ""


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
