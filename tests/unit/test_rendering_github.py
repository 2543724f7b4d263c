"""Annotations: what a runner is told, and that no file name can tell it anything."""

import re

import pytest

from safeload.errors import Finding
from safeload.rendering.github import MAX_ANNOTATIONS, annotation_lines, resume_commands, stop_commands
from tests.reports_sample import HOSTILE_NAMES, accepted, audited, hostile, refused


def test_a_finding_is_an_error_at_its_file() -> None:
    (line,) = annotation_lines(audited(accepted("m/a"), refused("m/b")))
    assert line == (
        "::error file=m/b,title=a pickle names something that the policy does not allow::"
        "policy grok-1 does not allow os.system (at byte 17); safeload explain it [global-not-allowed]"
    )


def test_a_finding_of_no_file_has_no_place() -> None:
    (line,) = annotation_lines(audited(findings=(Finding("untrusted-key", "nobody"),)))
    assert line == "::error title=no trusted key signed the manifest::nobody [untrusted-key]"


def test_known_findings_are_warnings_and_come_last() -> None:
    old = refused("m/a")
    lines = list(annotation_lines(audited(old, refused("m/b"), known=(old,))))
    assert [line.split(",")[0] for line in lines] == ["::error file=m/b", "::warning file=m/a"]


def test_values_are_escaped_as_a_runner_unescapes_them() -> None:
    (line,) = annotation_lines(audited(refused("m/100%:,")))
    assert line.startswith("::error file=m/100%25%3A%2C,title=")


def test_text_is_escaped_as_well() -> None:
    finding = Finding("symlink", "100% sure:\r\n::error::no", file="m/a", hint="50%")
    (line,) = annotation_lines(audited(findings=(finding,)))
    assert line.endswith(r"100%25 sure:\r\n::error::no; 50%25 [symlink]")


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_no_name_ends_a_line_or_a_value(name: str) -> None:
    (line,) = annotation_lines(audited(refused(f"m/{name}")))
    assert line.isprintable()
    match = re.fullmatch(r"::error file=([^:,]*),title=([^:,]*)::(.*)", line)
    assert match is not None
    assert match[2] == "a pickle names something that the policy does not allow"


def test_more_than_a_runner_shows_are_counted() -> None:
    report = hostile()
    lines = list(annotation_lines(audited(*report.files * 4, findings=report.findings)))
    assert len(lines) == MAX_ANNOTATIONS + 1
    left = len(HOSTILE_NAMES) * 5 - MAX_ANNOTATIONS
    assert lines[-1] == f"::notice title=safeload::and {left} findings more; the other reports have all of them"


def test_commands_can_be_stopped_and_resumed() -> None:
    assert (stop_commands("abc"), resume_commands("abc")) == ("::stop-commands::abc", "::abc::")


def test_lines_to_paste_are_words_of_one_line() -> None:
    finding = Finding("not-a-pickle", "of no known format", file="m/a", hint="write:\n[[x]]\ny = 1")
    (line,) = annotation_lines(audited(findings=(finding,)))
    assert line.endswith("; write: [[x]] y = 1 [not-a-pickle]")
