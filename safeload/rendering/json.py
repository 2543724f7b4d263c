"""The command's JSON: one object on one line of plain ASCII."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from safeload.errors import Finding
from safeload.report import SCHEMA_VERSION, Report


def report_json(report: Report, extra: Mapping[str, Any] | None = None) -> str:
    """Return a report as the object of the command's contract.

    Args:
        report: What to show.
        extra: More keys for this command (a time, a path that was written).
    """
    return object_json({**report.to_json(), **(extra or {})})


def no_verdict_json(findings: Sequence[Finding]) -> str:
    """Return the object for a run that reached no verdict: `"verdict": "none"` and the reasons."""
    shown = [{"code": f.code, "message": f.message, "offset": f.offset, "hint": f.hint} for f in findings]
    return object_json({"schema": SCHEMA_VERSION, "verdict": "none", "files": [], "findings": shown})


def object_json(value: Mapping[str, Any]) -> str:
    r"""Return `value` as JSON in printable ASCII: names from a hostile directory stay `\u001b` on any terminal."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False)
