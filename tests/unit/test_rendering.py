import json

import pytest

from safeload.errors import Finding
from safeload.rendering import text
from safeload.rendering.json import no_verdict_json, object_json, report_json
from safeload.report import FileReport, Report
from safeload.tensors import DType, Extent, TensorSpec

WEIGHT = TensorSpec("weight", DType("int8"), (2, 3), "C", Extent(163, 6))
GOOD = FileReport("good", "pickle", 200, tensors=(WEIGHT,))
BAD = FileReport(
    "bad", "pickle", 10, findings=(Finding("trailing-bytes", "expected the end", offset=9, hint="cut it"),)
)

HOSTILE = {
    "\x1b[2J\x1b]0;title\x07": r"\x1b[2J\x1b]0;title\x07",
    "a\nrejected: no\r": r"a\nrejected: no\r",
    "safe\u202egnp.lkp": r"safe\u202egnp.lkp",
    "caf\udcff": r"caf\udcff",
    "\x9b31m\x7f": r"\x9b31m\x7f",
    "back\\slash": r"back\\slash",
    "[bold red]markup[/]": "[bold red]markup[/]",
}
"""Names from a hostile directory, and how they must be shown."""


# --- text ---------------------------------------------------------------------------------------------------------


def test_a_finding_says_file_reason_code_place_and_what_to_do() -> None:
    assert list(
        text.error_lines(Finding("trailing-bytes", "expected the end", file="a/b", offset=9, hint="cut it"))
    ) == [
        "safeload: error: a/b: expected the end [trailing-bytes]",
        "safeload:   at byte 9",
        "safeload: hint: cut it",
    ]


def test_a_finding_without_a_place_takes_one_line() -> None:
    assert list(text.error_lines(Finding("untrusted-key", "nobody signed"))) == [
        "safeload: error: nobody signed [untrusted-key]"
    ]


@pytest.mark.parametrize(("name", "shown"), HOSTILE.items())
def test_a_hostile_name_is_shown_and_never_obeyed(name: str, shown: str) -> None:
    refused = FileReport(name, "unknown", None, findings=(Finding("symlink", "found a link"),))
    accepted = FileReport(name, "pickle", 1, tensors=(TensorSpec(name, DType("int8"), (1,), "C", Extent(0, 1)),))
    report = Report((refused, accepted))
    rows = text.table_lines(["file", "tensor"], (row[:2] for row in text.tensor_rows(report)), width=10)
    errors = [line for finding in report.all_findings for line in text.error_lines(finding)]
    lines = [*errors, *text.summary_lines(report), *rows, text.verdict_line(report)]
    assert all(line.isprintable() for line in lines)
    assert sum(shown in line for line in lines) == 5


def test_what_a_message_quotes_cannot_reach_the_terminal_either() -> None:
    finding = Finding("bad-code", "found \x1b[2J", hint="type \u202e this\n")
    assert all(line.isprintable() for line in text.error_lines(finding))


def test_a_long_name_is_shown_whole() -> None:
    name = "d/" * 500 + "tensor00000_000"
    assert name in next(text.error_lines(Finding("symlink", "a link", file=name)))


def test_few_accepted_files_are_listed_and_many_are_counted() -> None:
    few, many = (Report((GOOD,) * n) for n in (text.MAX_LISTED_FILES, text.MAX_LISTED_FILES + 1))
    assert sum(line.startswith("accepted  good") for line in text.summary_lines(few)) == text.MAX_LISTED_FILES
    assert not any(line.startswith("accepted  good") for line in text.summary_lines(many))
    assert sum(line.startswith("accepted  good") for line in text.summary_lines(many, verbose=True)) == len(many.files)
    assert "21 files, 4.1 KiB: 21 accepted, 0 rejected" in list(text.summary_lines(many))


def test_the_summary_counts_each_file_that_was_not_read_once_and_as_rejected() -> None:
    named = [("missing-file", "gone"), ("symlink", "link"), ("unlisted-file", "link"), ("size-mismatch", "bad")]
    findings = (*(Finding(code, "no", file=file) for code, file in named), Finding("of-the-whole", "no"))
    # A manifest that is refused is no file of the checkpoint.
    signed = Finding("untrusted-key", "nobody signed", file="m.json")
    assert "2 files, 210 B: 1 accepted, 1 rejected" in list(text.summary_lines(Report((GOOD, BAD), (signed,))))
    assert "4 files, 210 B: 1 accepted, 3 rejected (2 not read)" in list(
        text.summary_lines(Report((GOOD, BAD), findings))
    )


def test_the_summary_says_what_the_run_was_held_against() -> None:
    facts = {
        "policy": {"name": "grok-1", "sha256": "aa"},
        "manifest": {
            "sha256": "bb",
            "model": "demo",
            "revision": "r1",
            "version": 3,
            "signers": [{"name": "alice", "keyid": "cc"}, {"name": "", "keyid": "dd"}],
        },
    }
    assert list(text.summary_lines(Report((GOOD,), (), facts)))[-4:] == [
        "policy    grok-1  sha256:aa",
        "manifest  demo, revision r1, version 3  sha256:bb",
        "signed by alice  keyid cc",
        "signed by keyid dd",
    ]


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (Report((GOOD,)), "accepted"),
        (Report(()), "rejected: no file was found"),
        (Report((GOOD, BAD)), "rejected: trailing-bytes in bad"),
        (Report((), (Finding("untrusted-key", "nobody"),)), "rejected: untrusted-key"),
        (
            Report((BAD, BAD), (Finding("missing-file", "gone"),)),
            "rejected: 3 findings: trailing-bytes, missing-file",
        ),
        (
            Report((), tuple(Finding(code, "no") for code in "abcd")),
            "rejected: 4 findings: a, b, c, ...",
        ),
    ],
)
def test_the_verdict_is_one_line_with_the_reason_in_a_few_words(report: Report, line: str) -> None:
    assert text.verdict_line(report) == line


def test_a_row_for_each_tensor() -> None:
    scalar = TensorSpec("", DType("float32", big_endian=True), (), "F", Extent(7, 4), "ab" * 32)
    decoded = TensorSpec("w", DType("int8"), (3,), "C", Extent(7, 3, inline=b"abc"))
    report = Report((GOOD, FileReport("s", "pickle", 11, tensors=(scalar, decoded))))
    assert list(text.tensor_rows(report)) == [
        ("good", "weight", "int8", "2x3", "C", "163", "6"),
        ("s", "-", "float32 (big-endian)", "scalar", "F", "7", "4", "ab" * 32),
        ("s", "w", "int8", "3", "C", "-", "3 (decoded)"),
    ]


ROWS = [["first", "w", "1"], ["first", "scales", "1000"], ["второй 日本", "w", "20"]]


def test_a_table_is_aligned_with_numbers_to_the_right() -> None:
    assert list(text.table_lines(["file", "tensor", ">bytes"], ROWS)) == [
        "file         tensor  bytes",
        "first        w           1",
        "first        scales   1000",
        "второй 日本  w          20",
    ]


def test_a_table_that_is_too_wide_gives_its_first_column_lines_of_its_own() -> None:
    assert list(text.table_lines(["file", "tensor", ">bytes"], ROWS, width=17, indent=" ")) == [
        " file",
        "   tensor  bytes",
        " first",
        "   w           1",
        "   scales   1000",
        " второй 日本",
        "   w          20",
    ]


def test_in_the_narrowest_terminal_each_cell_has_a_line() -> None:
    assert list(text.table_lines(["file", "tensor", ">bytes"], ROWS[:1], width=5)) == [
        "file",
        "first",
        "  tensor w",
        "  bytes 1",
    ]


def test_a_table_without_rows_is_its_heading() -> None:
    assert list(text.table_lines(["file", ">bytes"], [])) == ["file  bytes"]


# --- JSON ---------------------------------------------------------------------------------------------------------


def test_a_report_is_one_object_of_the_contract() -> None:
    shown = json.loads(report_json(Report((GOOD, BAD)), {"seconds": 1.5}))
    assert (shown["schema"], shown["verdict"], shown["findings"], shown["seconds"]) == (1, "rejected", [], 1.5)
    assert [file["verdict"] for file in shown["files"]] == ["accepted", "rejected"]
    assert shown["files"][0]["tensors"] == [
        {"name": "weight", "dtype": "int8", "shape": [2, 3], "order": "C", "offset": 163, "nbytes": 6}
    ]
    assert shown["files"][1]["findings"] == [
        {"code": "trailing-bytes", "message": "expected the end", "offset": 9, "hint": "cut it"}
    ]


def test_no_verdict_is_an_object_too() -> None:
    assert json.loads(no_verdict_json([Finding("usage", "no such option", hint="try --help")])) == {
        "schema": 1,
        "verdict": "none",
        "files": [],
        "findings": [{"code": "usage", "message": "no such option", "offset": None, "hint": "try --help"}],
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_json_is_one_line_of_printable_ascii_that_says_the_same(name: str) -> None:
    shown = object_json({"path": name})
    assert shown.isascii()
    assert shown.isprintable()
    assert json.loads(shown) == {"path": name}


def test_json_has_no_number_that_json_has_not() -> None:
    with pytest.raises(ValueError, match="JSON"):
        object_json({"seconds": float("nan")})


def test_lines_to_paste_are_indented_and_none_of_them_passes_for_ours() -> None:
    lines = list(text.error_lines(Finding("a-b", "no", hint="write:\n[[x]]\ny = 1\x1b\nrejected: no")))
    assert lines[1:] == ["safeload: hint: write:", "  [[x]]", r"  y = 1\x1b", "  rejected: no"]
    assert text.one_line("a\nb\x1b") == r"a b\x1b"
