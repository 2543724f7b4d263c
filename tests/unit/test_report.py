"""Claims of `safeload.report`: one verdict a file and one in all, and the JSON object of the command's contract."""

from __future__ import annotations

import json

import pytest

from safeload.errors import Finding
from safeload.report import SCHEMA_VERSION, FileReport, Report, tensor_json
from safeload.tensors import DType, Extent, TensorSpec

CLEAN = FileReport("a", "pickle", 3)
FINDING = Finding("some-code", "expected this, found that", offset=17, hint="do so")
REFUSED = FileReport("b", "pickle", 4, findings=(FINDING,))
SPEC = TensorSpec("weight", DType("int8"), (2, 3), "C", Extent(163, 6))


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (Report((CLEAN,)), "accepted"),
        (Report((CLEAN, CLEAN)), "accepted"),
        (Report((CLEAN, REFUSED)), "rejected"),
        (Report((REFUSED, CLEAN)), "rejected"),
        (Report((CLEAN,), (FINDING,)), "rejected"),
        (Report((), (FINDING,)), "rejected"),
        (Report(()), "rejected"),
    ],
)
def test_a_run_is_accepted_only_if_something_was_looked_at_and_nothing_found(report: Report, verdict: str) -> None:
    assert report.verdict == verdict
    assert report.to_json()["verdict"] == verdict


def test_a_file_is_accepted_exactly_if_it_has_no_finding() -> None:
    assert (CLEAN.verdict, REFUSED.verdict) == ("accepted", "rejected")


def test_findings_of_the_run_come_first_then_those_of_the_files_in_order() -> None:
    run, other = Finding("run", "r"), Finding("other", "o")
    report = Report((FileReport("z", "pickle", 1, findings=(FINDING, other)), CLEAN, REFUSED), (run,))
    assert report.all_findings == (run, FINDING.in_file("z"), other.in_file("z"), FINDING.in_file("b"))


def test_the_object_has_exactly_the_keys_of_the_contract() -> None:
    shown = Report((CLEAN, REFUSED)).to_json()
    assert set(shown) == {"schema", "verdict", "files", "findings"}
    assert shown["schema"] == SCHEMA_VERSION == 1
    for file in shown["files"]:
        assert set(file) == {"path", "verdict", "format", "size", "sha256", "findings", "tensors", "globals"}
    assert shown["files"][1]["verdict"] == "rejected"
    assert shown["files"][1]["findings"] == [
        {"code": "some-code", "message": "expected this, found that", "offset": 17, "hint": "do so"}
    ]


def test_a_finding_of_the_run_names_its_file_where_it_has_one() -> None:
    shown = Report((), (FINDING.in_file("sub/x"), FINDING)).to_json()["findings"]
    assert shown[0] == {"code": "some-code", "message": FINDING.message, "offset": 17, "hint": "do so", "path": "sub/x"}
    assert "path" not in shown[1]


def test_the_facts_stand_beside_the_verdict() -> None:
    assert Report((CLEAN,), facts={"policy": {"name": "p"}}).to_json()["policy"] == {"name": "p"}


def test_a_row_has_exactly_the_keys_of_the_contract() -> None:
    row = {"name": "weight", "dtype": "int8", "shape": [2, 3], "order": "C", "offset": 163, "nbytes": 6}
    assert tensor_json(SPEC) == row
    digested = TensorSpec("weight", DType("int8"), (2, 3), "C", Extent(163, 6), sha256="ab")
    assert tensor_json(digested) == {**row, "sha256": "ab"}
    big = TensorSpec("weight", DType("int16", big_endian=True), (3,), "F", Extent(163, 6))
    assert tensor_json(big) == {**row, "dtype": "int16", "shape": [3], "order": "F", "byteorder": "big"}


def test_the_object_is_json() -> None:
    odd = FileReport("a\udcff\x1b", "pickle", None, "ab" * 32, (FINDING,), (SPEC,), ("numpy.dtype",))
    report = Report((odd,), (FINDING,), {"policy": {"name": "p"}})
    shown = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert shown == report.to_json()
    assert shown["files"][0]["globals"] == ["numpy.dtype"]
    assert shown["files"][0]["tensors"] == [tensor_json(SPEC)]
