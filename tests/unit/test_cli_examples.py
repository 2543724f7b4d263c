"""The examples below each command's help are run, as one story in one folder."""

import contextlib
import io
import json
import pickle
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main

from safeload import cli
from safeload.cli.examples import EXAMPLES, add_examples
from safeload.formats.pickles.writing import write_shard
from safeload.trust.keys import PublicKey
from tests.readme_blocks import run

CODES = {"safeload explain evil.pkl": 1}
"""The examples that end with anything but 0."""

SLOW = {"safeload demo"}
"""Run by its own test."""

NETWORK = re.compile(r"\b(hf|https)://")


def leaves(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command that is no group, by what one types."""
    for name, child in command.commands.items():
        if hasattr(child, "commands"):
            yield from leaves(child, f"{path}{name} ")
        else:
            yield f"{path}{name}", child


COMMANDS = dict(leaves(typer.main.get_command(cli.app)))


def test_every_command_has_an_example_and_every_example_a_command() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    for path, lines in EXAMPLES.items():
        assert any(re.search(rf"\bsafeload {path}\b", line) for line in lines), path


@pytest.mark.parametrize("path", EXAMPLES)
def test_help_shows_the_examples(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main([*path.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in EXAMPLES[path] if line not in shown] == []


def test_a_bracket_in_an_example_is_shown() -> None:
    app = typer.Typer()

    @app.command("scan")
    def scan() -> None:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("safeload.cli.examples.EXAMPLES", {"scan": ("safeload scan [bold]",)})
        add_examples(app)
    assert app.registered_commands[0].epilog == "Example:\n\nsafeload scan \\[bold]"


def make_world(folder: Path) -> dict[str, Callable[[], object]]:
    """Write what the story begins with; return what has to happen before an example, by its command."""

    def weights(path: str, value: float) -> None:
        (folder / path).mkdir(parents=True)
        (folder / path / "weights.pkl").write_bytes(pickle.dumps({"w": np.full((8, 4), value, np.float32)}))

    for path, value in (("checkpoint", 1), ("models/a", 2), ("models/b", 3), ("mirror/unknown", 4)):
        weights(path, value)
    (folder / "checkpoint" / "config.json").write_text("{}")
    (folder / "ckpt-0").mkdir()
    with (folder / "ckpt-0" / "tensor00000_000").open("wb") as file:
        write_shard(file, np.ones(4, np.float32))
    (folder / "evil.pkl").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    (folder / "passphrase.txt").write_text("six random words make a passphrase\n")
    shutil.copytree(folder / "checkpoint", folder / "mirror" / "my-model")
    (folder / "mine.toml").write_text(
        'version = 1\nname = "mine"\ndescription = "Less than the default."\nextends = "numpy-quantized"\n'
        "[narrow.pickle]\nprotocols = [0]\n"
    )
    for command in (
        "openssl ecparam -name prime256v1 -genkey -noout -out hsm.pem",
        "openssl ec -in hsm.pem -pubout -out hsm.pub",
    ):
        subprocess.run(shlex.split(command), cwd=folder, check=True, capture_output=True)
    return {"trust sign": lambda: second_root(folder)}


def second_root(folder: Path) -> None:
    """Make the trust store need another signature, so that there is one to add."""
    for command in (
        "safeload keygen -o root-2.key --no-passphrase",
        "safeload trust add trust-2.json -o trust-3.json --root root-2.key.pub --threshold 2 --sign root.key",
    ):
        (folder / "trust-3.json").unlink(missing_ok=True)
        code, printed = tell(command, folder)
        assert code == 0, printed


def tell(line: str, folder: Path) -> tuple[int, str]:
    """Run an example: ours in this process, as forty others would take half a minute; another program's in a shell."""
    if not line.startswith("safeload "):
        printed, code = run(line, folder)
        return code, printed
    arguments = [argument.replace("/mirror/", "mirror/") for argument in shlex.split(line)[1:]]
    text = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        return cli.main(arguments), text.getvalue()


def filled(line: str, folder: Path) -> str:
    """Return an example with what earlier ones printed in the place of KEYID and ID."""
    if "KEYID" in line:
        line = line.replace("KEYID", PublicKey.from_pem((folder / "hsm.pub").read_bytes()).keyid)
    if re.search(r"\bID\b", line):
        _, printed = tell("safeload quarantine list looked-at --json", folder)
        line = re.sub(r"\bID\b", json.loads(printed)["items"][0]["id"], line)
    return line


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and the output of every example that was run."""
    folder = tmp_path_factory.mktemp("examples")
    before = make_world(folder)
    told: dict[str, tuple[int, str]] = {}
    for path, lines in EXAMPLES.items():
        before.get(path, lambda: None)()
        for line in lines:
            if line not in SLOW and not NETWORK.search(line):
                told[line] = tell(filled(line, folder), folder)
    assert not (folder / "pwned").exists()
    return told


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_does_what_its_command_is_for(line: str, story: dict[str, tuple[int, str]]) -> None:
    if line in SLOW:
        pytest.skip("tests/unit/test_demo.py runs the demo")
    if NETWORK.search(line):
        _, *arguments = shlex.split(line)
        # What is required is there, and every option exists: more cannot be shown without the network.
        typer.main.get_command(cli.app).make_context("safeload", arguments).close()
        COMMANDS[arguments[0]].make_context(arguments[0], arguments[1:]).close()
        return
    code, printed = story[line]
    assert code == CODES.get(line, 0), printed
