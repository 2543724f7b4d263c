"""JUnit XML: a test case for each file, for the CI systems that show nothing else.

XML 1.0 has no way to write most control characters, so names are escaped as for a terminal before they become markup.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from safeload.errors import Finding
from safeload.rendering.rules import is_known, known_reasons, rule_of
from safeload.rendering.text import printable, shown
from safeload.report import Report

_OF_NO_FILE = "the run as a whole"


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    outcome: Literal["passed", "failed", "skipped"]
    lines: tuple[str, ...]


def junit_xml(report: Report) -> str:
    """Return a report as one XML document: a suite for each directory of an audit, and a case for each file.

    A file with a new finding is a failure. One whose findings are all in the baseline is skipped, which is how CI
    systems show what is not right, and not new either.
    """
    audit: Any = report.facts.get("audit") or {}
    roots = [str(root["path"]) for root in audit.get("roots", ())]
    suites: dict[str, list[_Case]] = {root: [] for root in roots or ["safeload"]}
    for case, path in _cases(report):
        inside = [root for root in roots if path == root or path.startswith(f"{root.rstrip('/')}/")]
        suites[max(inside, key=len, default=next(iter(suites)))].append(case)
    return "\n".join(_document(suites, report)) + "\n"


def _cases(report: Report) -> Iterator[tuple[_Case, str]]:
    """Yield each case and the path that says which suite it belongs to."""
    reasons = known_reasons(report)
    by_file: dict[str | None, list[Finding]] = {}
    for finding in report.findings:
        by_file.setdefault(finding.file, []).append(finding)
    for file in report.files:
        own = [finding.in_file(file.path) for finding in file.findings]
        yield _case(shown(file.path), [*own, *by_file.pop(file.path, [])], reasons), file.path
    for path, findings in by_file.items():
        yield _case(_OF_NO_FILE if path is None else shown(path), findings, reasons), path or ""


def _case(name: str, findings: Sequence[Finding], reasons: Mapping[tuple[str, str], str]) -> _Case:
    new = [finding for finding in findings if not is_known(finding, reasons)]
    if new:
        return _Case(name, "failed", tuple(_lines(new)))
    known = tuple(f"known: {f.code}: {printable(reasons[f.file or '', f.code])}" for f in findings)
    return _Case(name, "skipped" if known else "passed", known)


def _lines(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        where = "" if finding.offset is None else f" (at byte {finding.offset})"
        yield f"{finding.code}: {printable(finding.message)}{where}"
        if finding.hint is not None:
            first, *to_paste = finding.hint.split("\n")
            yield f"  hint: {printable(first)}"
            yield from (f"    {printable(line)}" for line in to_paste)


def _document(suites: Mapping[str, Sequence[_Case]], report: Report) -> Iterator[str]:
    counts = Counter[str](case.outcome for cases in suites.values() for case in cases)
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield f'<testsuites name="safeload" {_counts(counts)}>'
    for root, cases in suites.items():
        own = Counter[str](case.outcome for case in cases)
        yield f'  <testsuite name="{html.escape(shown(root))}" {_counts(own)}>'
        yield "    <properties>"
        yield f'      <property name="verdict" value="{report.verdict}"/>'
        policy: Any = report.facts.get("policy")
        if policy:
            value = f"{printable(str(policy['name']))} sha256:{printable(str(policy['sha256']))}"
            yield f'      <property name="policy" value="{html.escape(value)}"/>'
        yield "    </properties>"
        for case in cases:
            yield from _case_lines(case, html.escape(shown(root)))
        yield "  </testsuite>"
    yield "</testsuites>"


def _counts(counts: Counter[str]) -> str:
    return f'tests="{counts.total()}" failures="{counts["failed"]}" errors="0" skipped="{counts["skipped"]}"'


def _case_lines(case: _Case, root: str) -> Iterator[str]:
    start = f'    <testcase classname="{root}" name="{html.escape(case.name)}"'
    if case.outcome == "passed":
        yield f"{start}/>"
        return
    text = html.escape("\n".join(case.lines))
    yield f"{start}>"
    if case.outcome == "skipped":
        yield f'      <skipped message="{html.escape(case.lines[0])}"/>'
    else:
        code = case.lines[0].partition(":")[0]
        yield f'      <failure type="{html.escape(code)}" message="{html.escape(rule_of(code).title)}">{text}</failure>'
    yield "    </testcase>"
