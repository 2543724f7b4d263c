"""Baselines: findings of an audit that somebody has looked at, so that a later audit can tell the new ones.

A finding is known by its code, its file's path and its file's digest, all three: another file under the same name is
new, and so is whatever has no digest because it was not read. Nothing else looks at a baseline: a file that it lists is
refused all the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, Finding, ManifestError, escape, reason
from safeload.report import FileReport, Report
from safeload.trust.strict_json import loads

MAX_BASELINE_BYTES: Final = 16 * 1024 * 1024
"""Longest baseline that is read: some 50,000 findings. Whoever has more needs a policy rather than a list."""

_MAX_DEPTH: Final = 3
NOT_REVIEWED: Final = "recorded by safeload audit; nobody has looked at it yet"
"""The reason that a baseline gives for what was recorded, until somebody writes a better one."""

_Key = tuple[str, str, str]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class KnownFinding(_Model):
    """One finding that was looked at, and why it may stay for now."""

    code: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    path: Annotated[str, StringConstraints(min_length=1)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    reason: Annotated[str, StringConstraints(min_length=8, max_length=1000)]


class _Document(_Model):
    # `schema` is a method of pydantic's models, and a Literal[1] would take `true` as well.
    version: Annotated[int, Field(alias="schema", ge=1, le=1)]
    findings: tuple[KnownFinding, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """The known findings of one file.

    Attributes:
        path: Where it was read from.
        sha256: Of the file's bytes.
        known: Each known finding by its code, path and digest.
    """

    path: str
    sha256: str
    known: Mapping[_Key, KnownFinding]

    def split(self, report: Report) -> tuple[tuple[KnownFinding, ...], tuple[KnownFinding, ...]]:
        """Return the known findings that a report has, and those that it has no more, each in the baseline's order.

        Where a report has one path twice, as of a directory in another that is audited too, and one of the two files is
        not the known one, the finding is not known: what shows it goes by code and path.
        """
        found = {(f.code, file.path, file.sha256) for file in report.files for f in file.findings}
        others: set[tuple[str, str | None]] = {
            (code, path) for code, path, sha256 in found if (code, path, sha256) not in self.known
        }
        others |= {(finding.code, finding.file) for finding in report.findings}
        known = tuple(e for key, e in self.known.items() if key in found and (e.code, e.path) not in others)
        return known, tuple(entry for key, entry in self.known.items() if key not in found)


def read_baseline(path: str | Path) -> Baseline:
    """Return the baseline in a file.

    Raises:
        ConfigError: It cannot be read, or is no baseline: unknown or missing keys, a finding twice, not strict JSON.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            data = file.read(MAX_BASELINE_BYTES + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"cannot read the baseline {escape(str(path))}: {reason(err)}", hint="check the path"
        ) from err
    hint = "make one with `safeload audit DIR --write-baseline FILE`"
    try:
        value = loads(data, max_bytes=MAX_BASELINE_BYTES, max_depth=_MAX_DEPTH)
        if isinstance(value, dict) and isinstance(value.get("findings"), list):
            value["findings"] = tuple(value["findings"])  # JSON has no tuples
        document = _Document.model_validate(value)
    except ManifestError as err:
        raise ConfigError(f"the baseline {escape(str(path))}: {err.findings[0].message}", hint=hint) from err
    except ValidationError as err:
        problem = err.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the whole"
        message = f"the baseline {escape(str(path))}: {escape(where)}: {escape(problem['msg'])}"
        raise ConfigError(message, hint=hint) from err
    known = {(entry.code, entry.path, entry.sha256): entry for entry in document.findings}
    if len(known) != len(document.findings):
        raise ConfigError(f"the baseline {escape(str(path))}: expected each finding once, found one twice", hint=hint)
    return Baseline(str(path), sha256_hex(data), known)


def never_known(report: Report) -> tuple[Finding, ...]:
    """Return the findings that no baseline can hold: those of no file, and of files without a digest or a real name."""
    others = (f.in_file(file.path) for file in report.files if not _can_be_known(file) for f in file.findings)
    return (*report.findings, *others)


def _can_be_known(file: FileReport) -> bool:
    """Whether the file has a digest and a path that JSON can state; one that is no UTF-8 would not be read again."""
    return file.sha256 is not None and not any("\ud800" <= c <= "\udfff" for c in file.path)


def baseline_json(report: Report, earlier: Baseline | None = None) -> str:
    """Return a baseline of all that one can hold (see `never_known`), with the reasons that an earlier one has.

    Args:
        report: What an audit found.
        earlier: Whose reasons are kept, where the finding is still there.

    Raises:
        ConfigError: There are more findings than `read_baseline` reads.
    """
    reasons = {} if earlier is None else {key: entry.reason for key, entry in earlier.known.items()}
    keys = {
        (finding.code, file.path, file.sha256): None
        for file in report.files
        if file.sha256 is not None and _can_be_known(file)
        for finding in file.findings
    }
    findings = [
        {"code": code, "path": path, "sha256": sha256, "reason": reasons.get((code, path, sha256), NOT_REVIEWED)}
        for code, path, sha256 in keys
    ]
    made = json.dumps({"schema": 1, "findings": findings}, indent=1, ensure_ascii=True) + "\n"
    if len(made) > MAX_BASELINE_BYTES:
        raise ConfigError(
            f"expected a baseline of at most {MAX_BASELINE_BYTES} bytes, found {len(findings)} findings to write down",
            hint="a policy may allow what is everywhere; a baseline is for what is looked at one by one",
        )
    return made
