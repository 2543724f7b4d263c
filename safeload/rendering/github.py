"""GitHub annotations: workflow commands that a runner shows beside the files that they name.

A runner reads commands from whatever a step prints, so what comes from a checkpoint is escaped twice: as text for a
terminal, and as the value of a command.
"""

from __future__ import annotations

from collections.abc import Iterator

from safeload.rendering.rules import is_known, known_reasons, rule_of
from safeload.rendering.text import count, one_line, printable, shown
from safeload.report import Report

MAX_ANNOTATIONS = 50
"""Most annotations of a run: a runner shows 10 of each kind for a step, and 50 of a job."""


def annotation_lines(report: Report) -> Iterator[str]:
    """Yield one command for each finding: errors for new ones, then warnings for those that the baseline lists."""
    reasons = known_reasons(report)
    findings = sorted(report.all_findings, key=lambda finding: is_known(finding, reasons))
    for finding in findings[:MAX_ANNOTATIONS]:
        level = "warning" if is_known(finding, reasons) else "error"
        place = "" if finding.file is None else f"file={_value(shown(finding.file))},"
        where = "" if finding.offset is None else f" (at byte {finding.offset})"
        hint = "" if finding.hint is None else f"; {one_line(finding.hint)}"
        text = f"{printable(finding.message)}{where}{hint} [{finding.code}]"
        yield f"::{level} {place}title={_value(rule_of(finding.code).title)}::{_data(text)}"
    left = len(findings) - MAX_ANNOTATIONS
    if left > 0:
        yield f"::notice title=safeload::and {_data(count(left, 'finding'))} more; the other reports have all of them"


def stop_commands(token: str) -> str:
    """Return the command that makes a runner print what follows, and obey none of it, until `resume_commands`.

    Args:
        token: Something that nobody who wrote a file name could know.
    """
    return f"::stop-commands::{token}"


def resume_commands(token: str) -> str:
    """Return the command that ends what `stop_commands` began."""
    return f"::{token}::"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
