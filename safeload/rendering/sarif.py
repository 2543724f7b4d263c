"""SARIF 2.1.0 (OASIS Standard, Static Analysis Results Interchange Format): a report for code scanning.

What GitHub's code scanning asks for beyond the standard is held as well: a place for every result, the one fingerprint
that it looks at, the same rules in every log, and its limits. It also asks for lines and columns, which no standard log
can give for a binary file (SARIF 3.30.4 has them mean line 1); without them GitHub shows the file.
"""

from __future__ import annotations

import hashlib
import string
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from safeload.errors import Finding
from safeload.rendering.json import object_json
from safeload.rendering.rules import RULES, is_known, known_reasons, rule_of
from safeload.rendering.text import one_line, printable, shown
from safeload.report import FileReport, Report

_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

_UNRESERVED: Final = frozenset((string.ascii_letters + string.digits + "-._~/").encode())
"""What stands in a path of a URI as it is (RFC 3986, 2.3), and the slash between its components."""

_FINGERPRINTS: Final = ("safeload/v1", "primaryLocationLineHash")
"""The second is the only one by which GitHub knows an alert again; who uploads a log computes it of the file's first
line where it is missing, and then all findings of one code in one file are one alert."""

MAX_RESULTS: Final = 25_000
"""Most results of a run: GitHub refuses a log with more, and keeps 5,000, the most severe."""

MAX_COMPRESSED_BYTES: Final = 9_500_000
"""Longest log, compressed: GitHub refuses one of more than 10 MB."""


def sarif_json(report: Report, *, root: str | None = None) -> str:
    """Return a report as one SARIF log of one run: a result for each finding, at its file and byte.

    What the baseline of an audit lists is a result as well, suppressed and with the reason that the baseline has. Where
    there are more results than are taken, known and less severe ones are left out, and the log says how many.

    Args:
        report: What to show.
        root: Of the repository, as an absolute path: what lies in it is named from there, as code scanning asks.
    """
    reasons = known_reasons(report)
    findings: Sequence[Finding] = report.all_findings
    if len(findings) > MAX_RESULTS:
        findings = _most_severe(findings, reasons)
    n_results = min(len(findings), MAX_RESULTS)
    log = _log(report, findings[:n_results], reasons, root)
    while n_results and len(log) > MAX_COMPRESSED_BYTES < len(zlib.compress(log.encode("ascii"))):
        findings = _most_severe(findings, reasons)
        n_results //= 2
        log = _log(report, findings[:n_results], reasons, root)
    return log


def _most_severe(findings: Sequence[Finding], reasons: Mapping[tuple[str, str], str]) -> Sequence[Finding]:
    return sorted(findings, key=lambda f: (is_known(f, reasons), -float(_severity(f.code))))


def _log(report: Report, findings: Sequence[Finding], reasons: Mapping[tuple[str, str], str], root: str | None) -> str:
    codes = sorted({*RULES, *(finding.code for finding in findings)})
    index = {code: number for number, code in enumerate(codes)}
    files = {file.path: file for file in report.files}
    seen = Counter[str]()
    results = []
    for finding in findings:
        file = files.get(finding.file or "")
        identity = _identity(finding, file, root)
        seen[identity] += 1
        prints = dict.fromkeys(_FINGERPRINTS, f"{identity}:{seen[identity]}")
        results.append(_result(finding, index[finding.code], report, reasons, root) | {"partialFingerprints": prints})
    # Each place once (SARIF 3.14.15): where one directory of an audit lies in another, a file is reported twice.
    refused = {uri(path, root): files[path] for path in dict.fromkeys(f.file or "" for f in findings) if path in files}
    tool: Any = report.facts.get("tool") or {}
    version = {"version": str(tool["version"])} if "version" in tool else {}
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "safeload", **version, "rules": [_rule(code) for code in codes]}},
        "automationDetails": {"id": "safeload/"},
        "invocations": [_invocation(report, len(report.all_findings) - len(findings))],
        "artifacts": [_artifact(place, file) for place, file in refused.items()],
        "results": results,
        "properties": {"verdict": report.verdict, "files": len(report.files)},
    }
    return object_json({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}) + "\n"


def _rule(code: str) -> dict[str, Any]:
    rule = rule_of(code)
    name = "".join(part.capitalize() for part in code.split("-"))
    return {
        "id": code,
        "name": name,
        "shortDescription": {"text": _sentence(rule.title)},
        "fullDescription": {"text": f"{_sentence(rule.title)} {rule.help}"},
        "help": {"text": rule.help, "markdown": rule.help},
        "defaultConfiguration": {"level": "error"},
        # GitHub sorts by the number: a file that runs code, and bytes that nobody signed, are worse than a broken one.
        "properties": {
            "tags": ["security", "supply-chain", rule.kind],
            "security-severity": _severity(code),
            "precision": "very-high",
        },
    }


_SEVERITY: Final[Mapping[str, str]] = {"code": "9.3", "authenticity": "8.1", "integrity": "8.1", "rollback": "8.1"}
"""On the scale of CVSS, from 0.0 to 10.0, as GitHub's code scanning reads it; for others "5.0"."""


def _severity(code: str) -> str:
    return _SEVERITY.get(rule_of(code).kind, "5.0")


def _sentence(title: str) -> str:
    return f"{title[:1].upper()}{title[1:]}."


def _identity(finding: Finding, file: FileReport | None, root: str | None) -> str:
    """Return what stays the same while the finding does: its code, and the place and the digest of its file."""
    place = "" if finding.file is None else uri(finding.file, root)
    digest = (file.sha256 if file is not None else None) or ""
    identity = "\0".join([finding.code, place, digest, str(finding.offset)])
    return hashlib.sha256(identity.encode("ascii")).hexdigest()


def _result(
    finding: Finding, index: int, report: Report, reasons: Mapping[tuple[str, str], str], root: str | None
) -> dict[str, Any]:
    known = is_known(finding, reasons)
    where = "" if finding.offset is None else f" (at byte {finding.offset})"
    hint = "" if finding.hint is None else f" Hint: {one_line(finding.hint)}."
    name = f"{shown(finding.file)}: " if finding.file is not None else ""
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": "error",
        "message": {"text": _message(f"{name}{printable(finding.message)}{where}.{hint}")},
    }
    audit: Any = report.facts.get("audit") or {}
    # A result without a place is not shown: what is wrong with the whole is shown at the directory.
    if finding.file is not None:
        result["locations"] = [_location(uri(finding.file, root), finding.offset)]
    elif audit.get("roots"):
        result["locations"] = [_location(uri(str(audit["roots"][0]["path"]), root), None)]
    if audit.get("baseline") is not None:
        result["baselineState"] = "unchanged" if known else "new"
    if known:
        reason = printable(reasons[finding.file or "", finding.code])
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": reason}]
    return result


def _message(text: str) -> str:
    """Return text as a message without links and placeholders (SARIF 3.11.5 and 3.11.6), whatever a name in it is."""
    return text.replace("[", "\\[").replace("]", "\\]").replace("{", "{{").replace("}", "}}")


def _location(where: str, offset: int | None) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": where}}
    if offset is not None:
        # A binary region (SARIF 3.30.3). How far the cause reaches is not known, so it is the byte it was met at.
        place["region"] = {"byteOffset": offset, "byteLength": 1}
    return {"physicalLocation": place}


def _artifact(where: str, file: FileReport) -> dict[str, Any]:
    shown_file: dict[str, Any] = {"location": {"uri": where}, "roles": ["analysisTarget"]}
    if file.size is not None:
        shown_file["length"] = file.size
    if file.sha256 is not None:
        shown_file["hashes"] = {"sha-256": file.sha256}
    return shown_file


def _invocation(report: Report, n_left_out: int) -> dict[str, Any]:
    # A run that found something to refuse has succeeded; one that reached no verdict writes no log at all.
    shown_run: dict[str, Any] = {"executionSuccessful": True}
    if isinstance(report.facts.get("time"), str):
        shown_run["startTimeUtc"] = report.facts["time"]
    if n_left_out:
        message = f"{n_left_out} more findings are not in this log; the JSON report has all of them"
        shown_run["toolExecutionNotifications"] = [{"level": "warning", "message": {"text": message}}]
    return shown_run


def uri(path: str, root: str | None = None) -> str:
    """Return a path as a URI reference: relative where the path is, else of scheme `file` (RFC 3986, 4.2 and 3).

    A byte of the name that is no unreserved character is percent-encoded, those that are no UTF-8 included.

    Args:
        path: What to refer to.
        root: An absolute path: what lies in it is named from there.
    """
    if root is not None:
        path = path.removeprefix(f"{root.rstrip('/')}/")
    try:
        name = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # of no file's name, but a string can be that
        name = path.encode("utf-8", "surrogatepass")
    quoted = "".join(chr(byte) if byte in _UNRESERVED else f"%{byte:02X}" for byte in name)
    return f"file://{quoted}" if quoted.startswith("/") else quoted.removeprefix("./")
