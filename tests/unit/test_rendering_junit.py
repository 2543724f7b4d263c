"""JUnit XML that every reader can parse, whatever a file is called."""

import xml.etree.ElementTree as ET

import pytest

from safeload.errors import Finding
from safeload.rendering.junit import junit_xml
from safeload.report import FileReport, Report
from tests.reports_sample import HOSTILE_NAMES, RUN, accepted, audited, hostile, large, refused


def parsed(report: Report) -> ET.Element:
    return ET.fromstring(junit_xml(report))  # noqa: S314 - we wrote it


def test_a_file_is_a_case_and_a_directory_a_suite() -> None:
    tree = parsed(audited(accepted("m/a"), refused("m/b"), accepted("other/c"), accepted("mine/d")))
    suites = {suite.get("name"): [case.get("name") for case in suite.iter("testcase")] for suite in tree}
    # "mine" begins with "m", and lies in none of the two: the first suite takes it, so that no file is left out.
    assert suites == {"m": ["m/a", "m/b", "mine/d"], "other": ["other/c"]}


def test_a_refused_file_is_a_failure_with_its_reasons() -> None:
    tree = parsed(audited(accepted("m/a"), refused("m/b")))
    (failure,) = tree.iter("failure")
    assert failure.get("type") == "global-not-allowed"
    assert failure.text == (
        "global-not-allowed: policy grok-1 does not allow os.system (at byte 17)\n  hint: safeload explain it"
    )
    assert (tree.get("tests"), tree.get("failures"), tree.get("skipped")) == ("2", "1", "0")


def test_what_is_to_be_pasted_keeps_its_lines() -> None:
    finding = Finding("not-a-pickle", "of no known format", hint='write:\n[[files.inert]]\npatterns = ["a\x1b\\n"]')
    tree = parsed(audited(FileReport("m/a", "unknown", 1, "0" * 64, (finding,))))
    (failure,) = tree.iter("failure")
    assert (failure.text or "").splitlines() == [
        "not-a-pickle: of no known format",
        "  hint: write:",
        "    [[files.inert]]",
        '    patterns = ["a\\x1b\\n"]',
    ]


def test_a_file_with_known_findings_only_is_skipped_and_one_with_a_new_one_fails() -> None:
    old = refused("m/old")
    tree = parsed(audited(old, refused("m/new"), known=(old,)))
    (skipped,) = tree.iter("skipped")
    assert skipped.get("message") == "known: global-not-allowed: looked at by hand"
    assert (tree.get("failures"), tree.get("skipped")) == ("1", "1")


def test_what_belongs_to_no_file_and_what_is_missing_are_failures_too() -> None:
    findings = (Finding("untrusted-key", "nobody"), Finding("missing-file", "gone", file="m/gone"))
    tree = parsed(audited(accepted("m/a"), findings=findings))
    failed = [case.get("name") for case in tree.iter("testcase") if case.find("failure") is not None]
    assert failed == ["the run as a whole", "m/gone"]


def test_a_finding_of_the_run_about_a_file_fails_that_file() -> None:
    tree = parsed(audited(accepted("m/a"), findings=(Finding("hard-link", "two names", file="m/a"),)))
    (case,) = tree.iter("testcase")
    assert case.find("failure") is not None


@pytest.mark.parametrize("report", [hostile(), large(2000), Report((), ()), Report((accepted("x"),), (), RUN)])
def test_every_file_is_there_once_and_the_counts_are_right(report: Report) -> None:
    tree = parsed(report)
    names = {file.path for file in report.files} | {finding.file for finding in report.findings}
    cases = list(tree.iter("testcase"))
    assert len(cases) == len(names)
    assert tree.get("failures") == str(len(list(tree.iter("failure"))))
    assert len(list(tree.iter("failure"))) == len({finding.file for finding in report.all_findings})


def test_hostile_names_stay_names() -> None:
    tree = parsed(hostile())
    assert {element.tag for element in tree.iter()} == {
        *("testsuites", "testsuite", "properties", "property", "testcase", "failure"),
    }
    names = [case.get("name") or "" for case in tree.iter("testcase")]
    assert all(name.isprintable() for name in names)
    assert "m/bad<script>document.title='pwned'</script>" in names
    assert len(set(names)) == 3 * len(HOSTILE_NAMES)
