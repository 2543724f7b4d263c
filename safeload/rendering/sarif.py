"""SARIF 2.1.0 (OASIS Standard, Static Analysis Results Interchange Format): a report for code scanning."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping
from typing import Any, Final

from safeload.errors import Finding
from safeload.rendering.json import object_json
from safeload.rendering.rules import is_known, known_reasons, rule_of
from safeload.rendering.text import one_line, printable, shown
from safeload.report import FileReport, Report

_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

_UNRESERVED: Final = frozenset((string.ascii_letters + string.digits + "-._~/").encode())
"""What stands in a path of a URI as it is (RFC 3986, 2.3), and the slash between its components."""

_FINGERPRINT: Final = "safeload/v1"


def sarif_json(report: Report) -> str:
    """Return a report as one SARIF log of one run: a result for each finding, at its file and byte.

    What the baseline of an audit lists is a result as well, suppressed and with the reason that the baseline has.
    """
    reasons = known_reasons(report)
    findings = report.all_findings
    codes = {code: index for index, code in enumerate(sorted({finding.code for finding in findings}))}
    files = {file.path: file for file in report.files}
    results = [_result(f, codes[f.code], files.get(f.file or ""), report, reasons) for f in findings]
    # Each place once (SARIF 3.14.15): where one directory of an audit lies in another, a file is reported twice.
    refused = {uri(file.path): file for file in report.files if file.findings}
    tool: Any = report.facts.get("tool") or {}
    version = {"version": str(tool["version"])} if "version" in tool else {}
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "safeload", **version, "rules": [_rule(code) for code in codes]}},
        "automationDetails": {"id": "safeload/"},
        "invocations": [_invocation(report)],
        "artifacts": [_artifact(file) for file in refused.values()],
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
            "security-severity": _SEVERITY.get(rule.kind, "5.0"),
            "precision": "very-high",
        },
    }


_SEVERITY: Final[Mapping[str, str]] = {"code": "9.3", "authenticity": "8.1", "integrity": "8.1", "rollback": "8.1"}
"""On the scale of CVSS, from 0.0 to 10.0, as GitHub's code scanning reads it; for others "5.0"."""


def _sentence(title: str) -> str:
    return f"{title[:1].upper()}{title[1:]}."


def _result(
    finding: Finding, index: int, file: FileReport | None, report: Report, reasons: Mapping[tuple[str, str], str]
) -> dict[str, Any]:
    known = is_known(finding, reasons)
    where = "" if finding.offset is None else f" (at byte {finding.offset})"
    hint = "" if finding.hint is None else f" Hint: {one_line(finding.hint)}."
    name = f"{shown(finding.file)}: " if finding.file is not None else ""
    digest = (file.sha256 if file is not None else None) or ""
    identity = "\0".join([finding.code, finding.file or "", digest, str(finding.offset)])
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": "error",
        "message": {"text": _message(f"{name}{printable(finding.message)}{where}.{hint}")},
        "partialFingerprints": {_FINGERPRINT: hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()},
    }
    audit: Any = report.facts.get("audit") or {}
    if finding.file is not None:
        result["locations"] = [_location(finding.file, finding.offset)]
    if audit.get("baseline") is not None:
        result["baselineState"] = "unchanged" if known else "new"
    if known:
        reason = printable(reasons[finding.file or "", finding.code])
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": reason}]
    return result


def _message(text: str) -> str:
    """Return text as a message without links and placeholders (SARIF 3.11.5 and 3.11.6), whatever a name in it is."""
    return text.replace("[", "\\[").replace("]", "\\]").replace("{", "{{").replace("}", "}}")


def _location(path: str, offset: int | None) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": uri(path)}}
    if offset is not None:
        # A binary region (SARIF 3.30.3). How far the cause reaches is not known, so it is the byte it was met at.
        place["region"] = {"byteOffset": offset, "byteLength": 1}
    return {"physicalLocation": place}


def _artifact(file: FileReport) -> dict[str, Any]:
    shown_file: dict[str, Any] = {"location": {"uri": uri(file.path)}, "roles": ["analysisTarget"]}
    if file.size is not None:
        shown_file["length"] = file.size
    if file.sha256 is not None:
        shown_file["hashes"] = {"sha-256": file.sha256}
    return shown_file


def _invocation(report: Report) -> dict[str, Any]:
    # A run that found something to refuse has succeeded; one that reached no verdict writes no log at all.
    shown_run: dict[str, Any] = {"executionSuccessful": True}
    if isinstance(report.facts.get("time"), str):
        shown_run["startTimeUtc"] = report.facts["time"]
    return shown_run


def uri(path: str) -> str:
    """Return a path as a URI reference: relative where the path is, else of scheme `file` (RFC 3986, 4.2 and 3).

    A byte of the name that is no unreserved character is percent-encoded, those that are no UTF-8 included.
    """
    try:
        name = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # of no file's name, but a string can be that
        name = path.encode("utf-8", "surrogatepass")
    quoted = "".join(chr(byte) if byte in _UNRESERVED else f"%{byte:02X}" for byte in name)
    return f"file://{quoted}" if quoted.startswith("/") else quoted.removeprefix("./")
