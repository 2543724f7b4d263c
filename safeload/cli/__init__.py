"""The command. The only code that prints; it decides nothing.

Exit codes: 0 accepted, 1 rejected, 2 no verdict. The last line on stdout is the verdict; `--json` prints one object.
Every command imports what it needs when it runs, so that `--help` and `scan` start without numpy, jax and cryptography.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
import typer.main

from safeload import __version__
from safeload.cli import (
    auditing,
    checkpoints,
    completion,
    converting,
    demo,
    doctor,
    examples,
    explanations,
    fetching,
    fingerprinting,
    keys,
    options,
    planning,
    policies,
    signatures,
    trust,
)
from safeload.cli.output import Output, flush, silence_stdout
from safeload.errors import OperationalError, RejectedError, escape

_EPILOG = """\
Exit codes: 0 accepted, 1 rejected, 2 no verdict (wrong usage, unreadable configuration, no room, an interruption).
See `safeload demo` for the whole story in a few seconds."""


def _new_app() -> typer.Typer:
    return typer.Typer(
        name="safeload",
        cls=options.Group,
        help="Verify a model checkpoint, then load exactly the verified bytes into JAX.",
        epilog=_EPILOG,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
    )


app = _new_app()
app.command(cls=options.Command)(keys.keygen)
app.command(cls=options.Command)(checkpoints.sign)
app.command("attach-signature", cls=options.Command)(signatures.attach_signature)
app.command(cls=options.Command)(checkpoints.verify)
app.command(cls=options.Command)(checkpoints.scan)
app.command(cls=options.Command)(checkpoints.inspect)
app.command(cls=options.Command)(explanations.explain)
app.command(cls=options.Command)(auditing.audit)
app.command(cls=options.Command)(checkpoints.load)
app.command(cls=options.Command)(planning.plan)
app.command(cls=options.Command)(converting.convert)
app.command(cls=options.Command)(converting.diff)
app.command(cls=options.Command)(fingerprinting.fingerprint)
app.command(cls=options.Command)(fetching.fetch)
app.add_typer(fetching.quarantine, name="quarantine")
app.add_typer(policies.app, name="policy")
app.add_typer(trust.app, name="trust")
app.command(cls=options.Command)(demo.demo)
app.command(cls=options.Command)(doctor.doctor)
app.command(cls=options.Command)(completion.completion)
examples.add_examples(app)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer calls it with the option's value
    if asked:
        Output().line(f"safeload {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("-V", "--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="show the traceback of a crash; before any command")
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Never raises.

    Args:
        argv: The arguments; those of the process where None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    # The audit's `--json` names a file, and stdout stays text.
    is_json = "--json" in flags and next((flag for flag in flags if flag not in _FLAGS), None) != "audit"
    out = Output(json=is_json, verbose=not _FLAGS.isdisjoint(flags))
    try:
        with _sigterm_interrupts():
            code = _run(arguments, out)
        flush()
    except OperationalError as err:
        # Only stdout itself can fail here (a full disk behind `>`): whatever was found, nobody has read it.
        code = _complain(out, err)
    return code


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, so that whoever stops a job leaves nothing half-written either."""
    if (
        signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        or threading.current_thread() is not threading.main_thread()
    ):
        yield  # Somebody decided about it already, or we are called by a program from a thread that may not.
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(arguments: list[str], out: Output) -> int:
    try:
        if not arguments and completion.is_asked():
            return completion.answer(app)
        # Not `app()`: that turns an interrupt into exit code 130 and a broken pipe into 1, which is a verdict here.
        asked = _narrowed(arguments)
        # In fewer columns the panels of `--help` cut the names of options to `--al...`; plain help wraps.
        is_wide = shutil.get_terminal_size().columns >= _MIN_PANEL_COLUMNS
        asked.rich_markup_mode = "rich" if is_wide or asked is app else None
        command = typer.main.get_command(asked)
        with command.make_context("safeload", arguments) as context:
            return int(command.invoke(context) or 0)
    except RejectedError as err:
        return out.rejected(err)
    except OperationalError as err:
        return out.no_verdict(_code(err), err.message, hint=err.hint)
    except typer.Exit as err:
        return err.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(out)
    except BrokenPipeError:
        # Typer prints its help itself; a reader that has seen enough of it is no fault.
        silence_stdout()
        return 0
    except SystemExit as err:
        return 0 if not err.code else OperationalError.exit_code
    except MemoryError:
        return out.no_verdict("out-of-memory", "there is not enough memory", hint="set or lower --memory-budget")
    except Exception as err:  # noqa: BLE001 - Python's own exit code for it is 1, which would read as a verdict
        if hasattr(err, "format_message"):  # What typer raises for wrong usage; where its class lies has changed.
            return _usage_error(out, err, arguments)
        if _comes_of_interrupt(err):
            return _interrupted(out)
        if out.verbose:
            out.note(traceback.format_exc())
        what = f"{type(err).__name__}: {escape(str(err))}" if str(err) else type(err).__name__
        return out.no_verdict(
            "unexpected",
            f"unexpected {what}; please report",
            hint="`safeload --verbose` before the command shows where",
        )


def _narrowed(arguments: Sequence[str]) -> typer.Typer:
    """Return the command with only the one subcommand that is asked for: building all takes 25 ms of each run.

    Whatever else stands there (an option, a name that is none) gets the whole command, which helps or complains.
    """
    asked = arguments[0] if arguments else ""
    narrow = _new_app()
    narrow.registered_callback = app.registered_callback
    narrow.registered_commands = [info for info in app.registered_commands if examples.name_of(info) == asked]
    narrow.registered_groups = [group for group in app.registered_groups if group.name == asked]
    return narrow if narrow.registered_commands or narrow.registered_groups else app


_MIN_PANEL_COLUMNS = 70
"""The fewest columns in which the panels of help show the longest names of our options whole."""

_FLAGS = frozenset({"-v", "--verbose"})
"""What may stand before a command."""

_INTERRUPTED = {"code": "interrupted", "message": "the run was interrupted", "offset": None, "hint": None}


def _interrupted(out: Output) -> int:
    out.note("safeload: interrupted")
    if out.json:
        out.object({"schema": 1, "verdict": "none", "files": [], "findings": [_INTERRUPTED]})
    return OperationalError.exit_code


def _comes_of_interrupt(err: BaseException) -> bool:
    """Whether an interrupt is what began it: a library that is being imported may make another error of it."""
    seen: list[BaseException] = []
    cause: BaseException | None = err
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(isinstance(each, KeyboardInterrupt) for each in seen)


def _complain(out: Output, err: OperationalError) -> int:
    # If stderr is gone as well, the exit code is all that is left.
    with contextlib.suppress(OperationalError):
        out.note(f"safeload: error: {err.message}")
    return OperationalError.exit_code


def _usage_error(out: Output, err: Any, arguments: Sequence[str]) -> int:
    context = getattr(err, "ctx", None)
    message = _in_our_words(str(err.format_message()), err)
    if type(err).__name__ == "NoArgsIsHelpError":
        # A group without a command: the help is the answer. Typer has printed it, or click has made it the message.
        if message:
            out.note(message)
        return OperationalError.exit_code
    path = _command_path(arguments) if context is None else context.command_path
    hint = f"try `{path} --help`"
    if path.endswith(" audit") and message.startswith("Option '--json' requires"):
        hint = "the audit writes its report to a file: --json audit.json"  # the other commands' `--json` takes none
    return out.no_verdict("usage", escape(message[:1].lower() + message[1:].rstrip("."), limit=1000), hint=hint)


def _in_our_words(message: str, err: Any) -> str:
    """Return the complaint of a value without pydantic's phrases, by which typer converts values."""
    if type(err.__cause__).__name__ != "ValidationError":
        return message
    start, _, complaint = message.partition(": ")
    complaint = complaint.removeprefix("Value error, ").split(", unable to parse", 1)[0]
    return f"{start}: {re.sub('^Input should be ', 'expected ', complaint)}"


def _command_path(arguments: Sequence[str]) -> str:
    """Return `safeload` and the command that the arguments begin with, as far as there is such a command."""
    path, command = ["safeload"], typer.main.get_command(app)
    for name in (argument for argument in arguments if argument not in _FLAGS):
        child = getattr(command, "commands", {}).get(name)
        if child is None:
            break
        path.append(name)
        command = child
    return " ".join(path)


def _code(err: OperationalError) -> str:
    """`ConfigError` as `config-error`: a name for machines, in the style of the findings' codes."""
    name = type(err).__name__
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")
