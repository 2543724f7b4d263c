"""Claims of `safeload.__main__`: whenever a run is interrupted, it ends with no verdict, quietly."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from safeload import __main__, cli

INTERRUPTED_WHILE_IMPORTING = """\
import contextlib, os, signal, sys

class Killer:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            # As code that is imported may do, or a callback of the import machinery does.
            with contextlib.suppress(BaseException):
                os.kill(os.getpid(), {number})
                for _ in range(1000):
                    pass

{before}
from safeload.__main__ import main
sys.meta_path.insert(0, Killer())
sys.argv = ["safeload", *{arguments!r}]
main()
"""


def run(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, **options
    )


def interrupted(
    *arguments: str, module: str, number: int = signal.SIGINT, before: str = ""
) -> subprocess.CompletedProcess[str]:
    return run(
        INTERRUPTED_WHILE_IMPORTING.format(module=module, number=int(number), arguments=list(arguments), before=before)
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["safeload.cli", "typer", "safeload.cli.trust"])
def test_a_signal_while_the_command_is_imported_ends_it_quietly_without_a_verdict(module: str, number: int) -> None:
    done = interrupted("policy", "list", module=module, number=number)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "safeload: interrupted\n")


def test_the_one_object_of_json_is_printed_even_then() -> None:
    done = interrupted("scan", "--json", ".", module="typer")
    assert (done.returncode, done.stderr) == (2, "safeload: interrupted\n")
    assert json.loads(done.stdout)["findings"][0]["code"] == "interrupted"


def test_what_is_printed_while_importing_is_what_is_printed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("safeload.scanning.scan", _raise_interrupt)
    assert cli.main(["scan", "--json", str(tmp_path)]) == 2
    assert capsys.readouterr() == (__main__._INTERRUPTED_JSON.decode(), "safeload: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "wants"),
    [
        (["scan", "x"], False),
        (["scan", "x", "--json"], True),
        (["scan", "--", "--json"], False),
        (["audit", "x", "--json", "report.json"], False),
        (["-v", "audit", "x", "--json", "report.json"], False),
        (["--verbose", "scan", "audit", "--json"], True),
        ([], False),
    ],
)
def test_both_know_who_wants_json(
    arguments: list[str], wants: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("safeload.cli._narrowed", _raise_interrupt)
    assert cli.main(arguments) == 2
    assert __main__._wants_json(arguments) is wants
    assert bool(capsys.readouterr().out) is wants


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    done = interrupted("policy", "list", module="typer", before="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (done.returncode, done.stderr) == (0, "")
    assert "grok-1" in done.stdout


def test_an_interrupt_outside_the_run_itself_is_no_traceback() -> None:
    """Such as one that comes while the last line is flushed."""
    done = run(
        "from safeload import __main__, cli\n"
        "def interrupted():\n    raise KeyboardInterrupt\n"
        "cli.main = interrupted\n__main__.main()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "safeload: interrupted\n")


def test_an_interrupt_within_a_callback_is_not_lost() -> None:
    done = run(
        "import os, signal, time\n"
        "from safeload import __main__, cli\n"
        "class Slow:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        for _ in range(1000):\n            pass\n"
        "def work():\n    Slow()\n    time.sleep(20)\n    return 0\n"
        "cli.main = work\n__main__.main()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "safeload: interrupted\n")


def test_another_error_within_a_callback_is_shown_as_ever() -> None:
    done = run(
        "from safeload import __main__, cli\n"
        "class Bad:\n    def __del__(self):\n        raise ZeroDivisionError('mine')\n"
        "def work():\n    Bad()\n    return 0\n"
        "cli.main = work\n__main__.main()\n"
    )
    assert done.returncode == 0
    assert "ZeroDivisionError: mine" in done.stderr


def test_an_error_that_a_library_makes_of_an_interrupt_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scan(*_: object, **__: object) -> NoReturn:
        try:
            _raise_interrupt()
        except KeyboardInterrupt as err:
            raise ImportError("a module is half there") from err

    monkeypatch.setattr("safeload.scanning.scan", scan)
    assert cli.main(["scan", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", "safeload: interrupted\n")


def test_nothing_stands_before_the_handlers_that_takes_time() -> None:
    done = run("import sys\nbefore = set(sys.modules)\nimport safeload.__main__\nprint(*set(sys.modules) - before)\n")
    assert {"safeload", "safeload.__main__"} <= set(done.stdout.split())
    assert {name for name in done.stdout.split() if name.startswith("safeload.")} == {"safeload.__main__"}
    assert not {"typer", "pydantic", "rich", "json", "pathlib"} & set(done.stdout.split())


def test_a_closed_stdout_and_stderr_leave_the_exit_code() -> None:
    script = INTERRUPTED_WHILE_IMPORTING.format(
        module="typer", number=int(signal.SIGTERM), arguments=["scan", "--json"], before="os.close(1); os.close(2)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False, env=os.environ).returncode == 2


def _raise_interrupt(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt
