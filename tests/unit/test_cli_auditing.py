"""The command `safeload audit`: every report from one run, an exit code for CI, and stdout that a runner can read."""

import json
import os
import pickle
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from safeload import cli, sign
from safeload.trust.keys import SecretKey

HOSTILE = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."


class Done(NamedTuple):
    """What one run of the command gave."""

    code: int
    stdout: str
    stderr: str

    @property
    def last(self) -> str:
        return self.stdout.splitlines()[-1]


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        code = cli.main(["audit", *(str(argument) for argument in arguments)])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "a").write_bytes(pickle.dumps({"w": np.arange(6, dtype=np.int8).reshape(2, 3)}))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def signed(tmp_path: Path, checkpoint: Path) -> list[str | Path]:
    key = SecretKey.generate()
    (tmp_path / "manifest.json").write_bytes(sign(checkpoint, keys=[key], model="m", revision="r"))
    (tmp_path / "key.pub").write_bytes(key.public.to_pem())
    return ["-m", tmp_path / "manifest.json", "--trust", tmp_path / "key.pub"]


def test_what_is_signed_and_whole_is_accepted(run: Run, checkpoint: Path, signed: list[str | Path]) -> None:
    done = run(checkpoint, *signed)
    assert (done.code, done.last, done.stderr) == (0, "accepted", "")
    assert "checked   who signed the directory, which files belong there, and the SHA-256 of each" in done.stdout
    assert "unchecked what the numbers do: a model that was trained to misbehave is well formed" in done.stdout


def test_every_report_comes_from_one_run(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    names = {"--sarif": "o.sarif", "--junit": "o.xml", "--html": "o.html", "--json": "o.json", "--write-baseline": "b"}
    done = run(checkpoint, "--github", *(x for option, name in names.items() for x in (option, tmp_path / name)))
    assert done.code == 1
    sarif = json.loads((tmp_path / "o.sarif").read_text())
    assert [result["ruleId"] for result in sarif["runs"][0]["results"]] == ["global-not-allowed"]
    assert ET.parse(tmp_path / "o.xml").getroot().get("failures") == "1"  # noqa: S314 - we wrote it
    assert "STACK_GLOBAL" in (tmp_path / "o.html").read_text()
    assert json.loads((tmp_path / "o.json").read_text())["verdict"] == "rejected"
    assert json.loads((tmp_path / "b").read_text())["findings"][0]["code"] == "global-not-allowed"
    assert done.stdout.startswith(f"::error file={checkpoint}/bad,title=")
    assert done.last == "rejected: 1 finding: global-not-allowed"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_known_findings_pass_and_are_not_called_accepted(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    baseline = tmp_path / "baseline.json"
    assert run(checkpoint, "--write-baseline", baseline).code == 1
    done = run(checkpoint, "--baseline", baseline)
    assert done.code == 0
    assert done.last == "passed: nothing new; 1 known finding, still refused by load and verify"
    assert "safeload: error" not in done.stderr
    assert run(checkpoint, "--baseline", baseline, "--fail-on", "known").code == 1
    (checkpoint / "worse").write_bytes(HOSTILE)
    assert run(checkpoint, "--baseline", baseline).code == 1


def test_reasons_in_a_baseline_survive_its_renewal(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    baseline = tmp_path / "baseline.json"
    run(checkpoint, "--write-baseline", baseline)
    text = json.loads(baseline.read_text())
    text["findings"][0]["reason"] = "looked at by hand"
    baseline.write_text(json.dumps(text))
    (checkpoint / "worse").write_bytes(HOSTILE)
    run(checkpoint, "--baseline", baseline, "--write-baseline", baseline)
    reasons = [finding["reason"] for finding in json.loads(baseline.read_text())["findings"]]
    assert reasons[0] == "looked at by hand"
    assert len(reasons) == 2


def test_a_directory_without_a_manifest_can_be_a_failure(run: Run, checkpoint: Path) -> None:
    assert run(checkpoint).code == 0
    done = run(checkpoint, "--fail-on", "unverified")
    assert done.code == 1
    assert done.last.startswith("rejected: nothing was found, but a directory has no manifest")


def test_many_directories_with_a_manifest_for_some(
    run: Run, checkpoint: Path, signed: list[str | Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a").write_bytes(HOSTILE)
    done = run(checkpoint, other, *signed, "-m", "-")
    assert done.code == 1
    assert f"accepted  {checkpoint}  (verified of m; 2 files)" in done.stdout
    assert f"rejected  {other}  (scanned, nobody vouches for it; 1 file)" in done.stdout


HOSTILE_NAMES = ["##[error]pwned", "::error::pwned", "a\n::error::pwned", "\x1b[2J", "x::stop-commands::y"]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_runner_obeys_our_lines_only(run: Run, checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_bytes(HOSTILE)
    stdout = run(checkpoint, "--github").stdout
    lines = stdout.splitlines()
    stop = next(i for i, line in enumerate(lines) if line.startswith("::stop-commands::"))
    token = lines[stop].removeprefix("::stop-commands::")
    resume = lines.index(f"::{token}::")
    obeyed = [*lines[:stop], *lines[resume + 1 :]]
    # What a runner takes for a command: two colons at the start of a line, or ##[ anywhere in one that has none.
    commands = [line for line in obeyed if line.lstrip().startswith("::") or "##[" in line]
    assert len(commands) == 1
    assert re.match(r"::error file=", commands[0])
    assert re.fullmatch(r"[0-9a-f]{32}", token)


def test_the_token_is_another_one_each_time(run: Run, checkpoint: Path) -> None:
    tokens = {line for _ in range(2) for line in run(checkpoint, "--github").stdout.splitlines() if "stop-comm" in line}
    assert len(tokens) == 2


def test_without_the_option_there_are_no_commands(run: Run, checkpoint: Path) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    assert "::" not in run(checkpoint).stdout


def test_wrong_usage_is_no_verdict_and_is_text(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([tmp_path / "nowhere"], "is no directory"),
        ([checkpoint, "--json", tmp_path / "no" / "o.json"], "cannot write"),
        ([checkpoint, "--json", tmp_path], "cannot write"),
        ([checkpoint, "--json", tmp_path / "o", "--html", tmp_path / "o"], "two reports"),
        ([checkpoint, "-m", "a", "-m", "b"], "expected a manifest for each"),
        ([checkpoint, "--fail-on", "nothing"], "fail_on"),
        ([checkpoint, "--baseline", tmp_path / "nowhere"], "cannot read the baseline"),
        ([checkpoint, "--json"], "--json"),
    ):
        done = run(*arguments)
        assert done.code == 2, arguments
        assert message in done.stderr
        assert done.stdout == ""


def test_nothing_is_written_where_there_is_no_verdict(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    done = run(checkpoint, "--html", tmp_path / "o.html", "--baseline", tmp_path / "nowhere")
    assert done.code == 2
    assert not (tmp_path / "o.html").exists()


def test_a_report_that_lies_in_a_checkpoint_is_said(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    assert "lies in a checkpoint" in run(checkpoint, "--json", checkpoint / "report.json").stderr
    assert "lies in a checkpoint" not in run(checkpoint, "--json", tmp_path / "report.json").stderr


def test_a_report_never_takes_the_place_of_what_is_audited_or_read(
    run: Run, checkpoint: Path, signed: list[str | Path], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    run(checkpoint, "--write-baseline", tmp_path / "known.json")
    (tmp_path / "link").symlink_to(tmp_path)
    files = [checkpoint / "a", signed[1], signed[3], key, tmp_path / "known.json"]
    before = [Path(path).read_bytes() for path in files]
    reads = [*signed, "--cache", tmp_path / "cache", "--cache-key", key, "--baseline", tmp_path / "known.json"]
    for path in files:
        for named in (path, tmp_path / "link" / Path(path).relative_to(tmp_path)):
            done = run(checkpoint, *reads, "--json", named)
            assert (done.code, done.stdout) == (2, ""), named
            assert "a report would replace it" in done.stderr
    assert [Path(path).read_bytes() for path in files] == before
    # A baseline that is renewed is meant to be replaced, and so is an earlier report.
    renewed = tmp_path / "link" / "known.json"
    assert run(checkpoint, "--baseline", tmp_path / "known.json", "--write-baseline", renewed).code == 0
    for _ in range(2):
        assert run(checkpoint, "--json", tmp_path / "report.json").code == 0


def test_what_cannot_be_a_report_is_said_before_anything_is_read(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safeload.auditing.audit", lambda *_, **__: pytest.fail("an audit was begun"))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "here").symlink_to(".")
    for arguments, message in (
        (["--json", tmp_path / "fifo"], "no regular file"),
        (["--json", tmp_path / "link"], "no regular file"),
        (["--json", tmp_path / ("n" * 300)], "File name too long"),
        (["--json", checkpoint / "a" / "o"], "Not a directory"),
        (["--json", tmp_path / "o", "--html", tmp_path / "here" / "o"], "two reports"),
    ):
        done = run(checkpoint, *arguments)
        assert (done.code, done.stdout) == (2, ""), arguments
        assert message in done.stderr


def test_a_cache_is_said(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    run(checkpoint, "--cache", tmp_path / "cache", "--cache-key", key)
    done = run(checkpoint, "--cache", tmp_path / "cache", "--cache-key", key)
    assert "cache     2 reused, 0 parsed" in done.stdout
    assert "unchecked 2 files were not parsed again" in done.stdout


def test_an_audit_without_numbers_loads_nothing_heavy(checkpoint: Path) -> None:
    code = (
        "import sys\nfrom safeload import cli\n"
        f"code = cli.main(['audit', {str(checkpoint)!r}])\n"
        "print(code, sorted({'jax', 'torch', 'distributed', 'fickling'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_what_a_baseline_cannot_hold_is_said_and_only_the_new_is_counted(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    (checkpoint / "link").symlink_to("bad")
    baseline = tmp_path / "baseline.json"
    first = run(checkpoint, "--write-baseline", baseline)
    assert f"symlink in {checkpoint}/link has no digest or no name, so no baseline can hold it" in first.stderr
    second = run(checkpoint, "--baseline", baseline)
    assert (second.code, second.last) == (1, "rejected: 1 new finding: symlink; 1 known")
