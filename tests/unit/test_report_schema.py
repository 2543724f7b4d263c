"""The published schema of a report, against what the commands print."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped] # its types are a package of their own
import numpy as np
import pytest

from safeload import cli
from safeload.rendering.json import no_verdict_json, report_json
from safeload.report import SCHEMA_VERSION
from tests.reports_sample import accepted, audited, hostile, large, refused

ROOT = Path(__file__).parent.parent.parent
SCHEMA = json.loads((ROOT / "schemas" / f"report-{SCHEMA_VERSION}.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def errors(value: object) -> list[str]:
    return [f"{error.json_path}: {error.message}"[:300] for error in VALIDATOR.iter_errors(value)]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def printed(*arguments: str | Path) -> Any:
        capsys.readouterr()
        cli.main([str(argument) for argument in arguments])
        return json.loads(capsys.readouterr().out)

    return printed


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "a").write_bytes(pickle.dumps({"w": np.arange(6, dtype=">i4").reshape(2, 3)}))
    (folder / "text").write_bytes(pickle.dumps(np.arange(3, dtype=np.int8), protocol=0))
    (folder / "config.json").write_text("{}")
    return folder


def test_the_schema_is_one() -> None:
    VALIDATOR.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema"] == {"const": SCHEMA_VERSION}


def test_every_command_that_reports_prints_what_the_schema_says(
    checkpoint: Path, tmp_path: Path, printed: Callable[..., Any]
) -> None:
    manifest = tmp_path / "manifest.json"
    trust = ("-m", manifest, "--trust", tmp_path / "key.pub")
    printed("keygen", "-o", tmp_path / "key", "--no-passphrase", "--json")
    reports = [
        printed("sign", checkpoint, "--key", tmp_path / "key", "-o", manifest, "--json"),
        printed("scan", checkpoint, "--json"),
        printed("inspect", checkpoint, "--digest", "--json"),
        printed("verify", checkpoint, *trust, "--history", tmp_path / "history", "--json"),
        printed("explain", checkpoint / "a", "--json"),
    ]
    (checkpoint / "a").write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.")
    (checkpoint / "link").symlink_to("a")
    reports += [
        printed("scan", checkpoint, "--json"),
        printed("verify", checkpoint, *trust, "--json"),
        printed("explain", checkpoint / "a", "--json"),
        printed("scan", tmp_path / "nowhere", "--json"),
        printed("verify", checkpoint, "-m", manifest, "--trust", tmp_path / "nowhere", "--json"),
    ]
    assert [error for report in reports for error in errors(report)] == []
    assert [report["verdict"] for report in reports] == ["accepted"] * 5 + ["rejected"] * 3 + ["none"] * 2


def test_an_audit_writes_what_the_schema_says(checkpoint: Path, tmp_path: Path) -> None:
    key, out = tmp_path / "key", tmp_path / "report.json"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    (checkpoint / "a").write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.")
    cache = ["--cache", str(tmp_path / "cache"), "--cache-key", str(key)]
    assert (
        cli.main(["audit", str(checkpoint), "--json", str(out), "--write-baseline", str(tmp_path / "b"), *cache]) == 1
    )
    assert errors(json.loads(out.read_text())) == []
    assert cli.main(["audit", str(checkpoint), "--json", str(out), "--baseline", str(tmp_path / "b"), *cache]) == 0
    report = json.loads(out.read_text())
    assert errors(report) == []
    assert (report["verdict"], report["audit"]["gate"]) == ("rejected", "passed")


@pytest.mark.parametrize("report", [hostile(), large(500), audited(accepted("m/a"))])
def test_made_reports_are_what_the_schema_says(report: Any) -> None:
    assert errors(json.loads(report_json(report))) == []


WRONG: dict[str, Callable[[Any], object]] = {
    "no verdict": lambda r: r.pop("verdict"),
    "an accepted run with a refused file": lambda r: r.update(verdict="accepted"),
    "an accepted file with a finding": lambda r: r["files"][0].update(verdict="accepted"),
    "a refused file without a finding": lambda r: r["files"][0].update(findings=[]),
    "an unknown key of a file": lambda r: r["files"][0].update(sha512="x"),
    "an upper-case digest": lambda r: r["files"][0].update(sha256="AB" * 32),
    "a negative offset": lambda r: r["files"][0]["findings"][0].update(offset=-1),
    "a code with spaces": lambda r: r["files"][0]["findings"][0].update(code="a b"),
    "no verdict with files": lambda r: r.update(verdict="none"),
    "an unknown gate": lambda r: r["audit"].update(gate="maybe"),
    "another schema": lambda r: r.update(schema=2),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_the_schema_refuses(change: Callable[[Any], object]) -> None:
    report = json.loads(report_json(audited(refused("m/a"))))
    assert errors(report) == []
    change(report)
    assert errors(report) != []


def test_a_run_without_a_verdict_has_a_reason() -> None:
    assert errors(json.loads(no_verdict_json([]))) != []
