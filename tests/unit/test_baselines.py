"""Baselines are read strictly, and name a finding by code, path and digest."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from safeload import baselines
from safeload.baselines import MAX_BASELINE_BYTES, NOT_REVIEWED, baseline_json, never_known, read_baseline
from safeload.errors import ConfigError, Finding
from safeload.report import FileReport, Report
from tests.reports_sample import accepted, digest, refused

ENTRY = {"code": "a-b", "path": "m/x", "sha256": "0" * 64, "reason": "looked at it"}


def write(folder: Path, value: object) -> Path:
    path = folder / "baseline.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_what_is_written_is_read_and_nothing_of_it_was_reviewed(tmp_path: Path) -> None:
    report = Report((refused("m/a"), accepted("m/b"), refused("m/c", "bad-call")))
    baseline = read_baseline(write(tmp_path, baseline_json(report)))
    assert list(baseline.known) == [
        ("global-not-allowed", "m/a", digest("m/a")),
        ("bad-call", "m/c", digest("m/c")),
    ]
    assert {entry.reason for entry in baseline.known.values()} == {NOT_REVIEWED}


def test_a_path_that_no_json_can_state_is_left_out_and_named(tmp_path: Path) -> None:
    report = Report((refused("m\udcff/a"), refused("m/b")))
    assert [path for _, path, _ in read_baseline(write(tmp_path, baseline_json(report))).known] == ["m/b"]
    assert [finding.file for finding in never_known(report)] == ["m\udcff/a"]


@pytest.mark.parametrize("schema", [True, 0, 2, 1.0, "1", None])
def test_a_baseline_is_of_schema_1(tmp_path: Path, schema: object) -> None:
    with pytest.raises(ConfigError, match="the baseline"):
        read_baseline(write(tmp_path, {"schema": schema, "findings": []}))


def test_two_findings_of_one_code_are_one_entry() -> None:
    findings = (Finding("a-b", "m", offset=1), Finding("a-b", "m", offset=2))
    report = Report((FileReport("x", "pickle", 1, "0" * 64, findings),))
    assert len(json.loads(baseline_json(report))["findings"]) == 1


def test_reasons_are_kept_when_a_baseline_is_written_again(tmp_path: Path) -> None:
    entry = {**ENTRY, "code": "global-not-allowed", "path": "m/a", "sha256": digest("m/a")}
    earlier = read_baseline(write(tmp_path, {"schema": 1, "findings": [entry, ENTRY]}))
    again = json.loads(baseline_json(Report((refused("m/a"), refused("m/n"))), earlier))
    assert [each["reason"] for each in again["findings"]] == ["looked at it", NOT_REVIEWED]


def test_a_finding_is_known_by_code_path_and_digest(tmp_path: Path) -> None:
    file = refused("m/a")
    baseline = read_baseline(write(tmp_path, baseline_json(Report((file,)))))
    assert len(baseline.split(Report((file,)))[0]) == 1
    for other in (
        refused("m/b"),
        refused("m/a", "bad-call"),
        FileReport("m/a", "pickle", 1, "0" * 64, file.findings),
        FileReport("m/a", "pickle", None, None, file.findings),
    ):
        known, stale = baseline.split(Report((other,)))
        assert (known, len(stale)) == ((), 1)


WRONG: dict[str, tuple[object, str]] = {
    "not JSON": ("{", "expected JSON"),
    "a list": ([], "the whole"),
    "no schema": ({"findings": []}, "schema"),
    "schema by its name here": ({"version": 1, "findings": []}, "schema"),
    "another schema": ({"schema": 2, "findings": []}, "schema"),
    "no findings": ({"schema": 1}, "findings"),
    "findings no list": ({"schema": 1, "findings": {}}, "findings"),
    "unknown key": ({"schema": 1, "findings": [], "all": True}, "all"),
    "unknown key of a finding": ({"schema": 1, "findings": [{**ENTRY, "x": 1}]}, "findings.0.x"),
    "no digest": ({"schema": 1, "findings": [{**ENTRY, "sha256": None}]}, "findings.0.sha256"),
    "short digest": ({"schema": 1, "findings": [{**ENTRY, "sha256": "ab"}]}, "findings.0.sha256"),
    "no reason": ({"schema": 1, "findings": [{**ENTRY, "reason": ""}]}, "findings.0.reason"),
    "a pattern for a code": ({"schema": 1, "findings": [{**ENTRY, "code": "*"}]}, "findings.0.code"),
    "twice": ({"schema": 1, "findings": [ENTRY, {**ENTRY, "reason": "another one"}]}, "twice"),
    "a key twice": ('{"schema": 1, "schema": 1, "findings": []}', "twice"),
}


@pytest.mark.parametrize(("value", "message"), WRONG.values(), ids=list(WRONG))
def test_what_is_no_baseline_is_refused(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_baseline(write(tmp_path, value))
    assert caught.value.hint is not None


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[Any] = [tmp_path / "nowhere", tmp_path, "a\0b"]
    os.mkfifo(tmp_path / "fifo")
    for path in paths:
        with pytest.raises(ConfigError, match="cannot read the baseline"):
            read_baseline(path)
    with pytest.raises(ConfigError):
        read_baseline(tmp_path / "fifo")
    monkeypatch.setattr("safeload.baselines.MAX_BASELINE_BYTES", 20)
    with pytest.raises(ConfigError, match="at most 20 bytes"):
        read_baseline(write(tmp_path, {"schema": 1, "findings": [ENTRY]}))
    assert MAX_BASELINE_BYTES > 20


def test_a_path_that_a_report_has_twice_is_known_only_if_both_files_are(tmp_path: Path) -> None:
    file = refused("m/a")
    baseline = read_baseline(write(tmp_path, baseline_json(Report((file,)))))
    other = FileReport("m/a", "pickle", 1, "0" * 64, file.findings)
    assert [entry.path for entry in baseline.split(Report((file, file)))[0]] == ["m/a"]
    assert baseline.split(Report((file, other))) == ((), ())
    assert baseline.split(Report((file,), (file.findings[0].in_file("m/a"),))) == ((), ())


def test_no_baseline_is_written_that_could_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MAX_BASELINE_BYTES", 300)
    baseline_json(Report((refused("m/a"),)))
    with pytest.raises(ConfigError, match="expected a baseline of at most 300 bytes, found 2 findings"):
        baseline_json(Report((refused("m/a"), refused("m/b"))))
