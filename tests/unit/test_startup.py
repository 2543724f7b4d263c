"""What a run does before its work: it imports little, builds one subcommand, and answers a shell that completes.

Times are for `benchmarks/bench_startup.py`; what they come from is held here, where nothing else can slow it down.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from safeload import cli
from safeload.cli import completion

BIN = Path(sys.executable).parent


def loaded_by(*arguments: str) -> set[str]:
    """Return the modules that a run of the command loads."""
    code = (
        "import json, sys\nfrom safeload.cli import main\n"
        f"main({list(arguments)!r})\nsys.stderr.write('\\n' + json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stderr.splitlines()[-1]))


SLOW = {"cryptography", "httpx", "jax", "ml_dtypes", "numpy"}
"""Packages that take long to import, and that neither help nor a scan has any use for."""


def test_help_loads_no_models_and_nothing_slow() -> None:
    # Typer imports pydantic to convert arguments, of which help has none.
    assert loaded_by("--help") & (SLOW | {"pydantic"}) == set()


def test_scan_loads_nothing_slow_and_draws_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    loaded = loaded_by("scan", str(tmp_path))
    assert "safeload.scanning" in loaded
    # Nor what only a signed checkpoint has use for: building its models would take a tenth of the run.
    assert loaded & (SLOW | {"rich", "safeload.manifest", "safeload.staging"}) == set()


@pytest.mark.parametrize("name", ["scan", "attach-signature", "trust"])
def test_only_the_command_that_is_asked_for_is_built(name: str) -> None:
    built = typer.main.get_command(cli._narrowed([name, "--json"]))
    assert list(built.commands) == [name]  # type: ignore[attr-defined] # it is a group


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-V"], ["no-such-command"], ["--", "scan"]])
def test_anything_else_gets_the_whole_command(arguments: list[str]) -> None:
    assert cli._narrowed(arguments) is cli.app


def test_each_command_is_the_same_built_alone_or_with_all() -> None:
    whole = typer.main.get_command(cli.app)
    for name, command in whole.commands.items():  # type: ignore[attr-defined] # see above
        alone = typer.main.get_command(cli._narrowed([name])).commands[name]  # type: ignore[attr-defined] # see above
        assert (type(alone), alone.help, alone.epilog) == (type(command), command.help, command.epilog)
        assert [p.name for p in alone.params] == [p.name for p in command.params]


# ---------------------------------------------------------------- completion


WORDS = {
    "safeload verif": {"verify"},
    "safeload verify --trust": {"--trust", "--trust-pin"},
    "safeload verify --for inf": {"inference"},
    "safeload scan --policy grok": {"grok-1"},
    "safeload policy show or": {"orbax"},
    "safeload policy diff grok-1 num": {"numpy-quantized"},
    "safeload trust rev": {"revoke"},
}
"""What bash offers for the last of some words."""


def test_bash_completes() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    script = ['eval "$(safeload completion bash)"']
    for words in WORDS:
        script += [
            f"COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))",
            '_safeload_completion safeload; echo "${COMPREPLY[*]}"',
        ]
    done = subprocess.run(
        [bash, "--norc", "-c", "\n".join(script)],
        env={"PATH": f"{BIN}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert [set(line.split()) for line in done.stdout.splitlines()] == list(WORDS.values())
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert completion._VARIABLE in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_the_script(shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell}")
    script = subprocess.run([BIN / "safeload", "completion", shell], capture_output=True, check=True, timeout=60).stdout
    subprocess.run([program, "-n", "/dev/stdin"], input=script, check=True, timeout=60)


def test_an_unknown_shell_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err


def test_a_shell_that_asks_nonsense_gets_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, completion._VARIABLE, "complete_tcsh")
    assert cli.main([]) == 2


@pytest.mark.parametrize("asks", ["complete_bash", "complete_zsh", "source_bash"])
def test_the_variable_of_completion_changes_no_verdict(
    tmp_path: Path, asks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Answering a shell ends with 0. A variable that was left in a job's environment must not let everything pass.
    (tmp_path / "evil.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for name, value in {completion._VARIABLE: asks, "COMP_WORDS": "safeload", "COMP_CWORD": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    assert cli.main(["scan", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("rejected")
