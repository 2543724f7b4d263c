"""Reports to render: of a quiet run, of a hostile one, and of a large one. Nothing here is read from a disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from safeload.errors import Finding, FormatError, PolicyError
from safeload.report import FileReport, Report
from safeload.tensors import DType, Extent, TensorSpec

HOSTILE_NAMES = (
    "<script>document.title='pwned'</script>",
    "</style></title><img src=x onerror=\"document.title='pwned'\">",
    '" onmouseover="document.title=1" x="',
    "]]>--><b>&amp;'",
    "a\nb\r::error::pwned",
    "##[error]pwned",
    "\x1b[2J\x1b]0;title\x07",
    "safe\u202egnp.lkp",
    "caf\udcff",
    "[click](https://example.org)",
    "{0}{{7*7}}",
    "100%25:,",
    "javascript:void(0)",
    "日本 語",
    "\x00\x0b\ufffe",
)
"""What somebody could call a file."""

WEIGHT = TensorSpec("weight", DType("int8"), (2, 3), "C", Extent(163, 6))
POLICY = {"name": "grok-1", "source": "grok-1", "sha256": "ab" * 32}
SIGNER = {"name": "Release key <i>", "keyid": "ef" * 32}
MANIFEST = {
    "sha256": "cd" * 32,
    "model": "xai-org/grok-1",
    "revision": "2024-03-17",
    "version": 3,
    "signers": [SIGNER],
    "threshold": 1,
}
RUN = {"policy": POLICY, "time": "2026-11-30T11:00:00Z", "tool": {"name": "safeload", "version": "0.1.0"}}


def digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def accepted(name: str, size: int = 1000) -> FileReport:
    return FileReport(name, "pickle", size, digest(name), tensors=(WEIGHT,))


def refused(name: str, code: str = "global-not-allowed", size: int = 900) -> FileReport:
    finding = Finding(code, "policy grok-1 does not allow os.system", offset=17, hint="safeload explain it")
    error = PolicyError if code == "global-not-allowed" else FormatError
    return FileReport(name, "pickle", size, digest(name), (finding,), (), ("os.system",), error)


def audited(
    *files: FileReport, findings: tuple[Finding, ...] = (), known: tuple[FileReport, ...] = (), **more: object
) -> Report:
    """Return the report of an audit of two directories, `m` with a manifest and `other` without."""
    listed = [
        {"code": f.code, "path": file.path, "sha256": file.sha256, "reason": "looked at by hand"}
        for file in known
        for f in file.findings
    ]
    refusing = bool(findings) or any(file.findings for file in files if file not in known)
    audit: Mapping[str, Any] = {
        "gate": "failed" if refusing else "passed",
        "fail_on": ["new"],
        "roots": [
            _root("m", "verified", len(files), MANIFEST),
            _root("other", "scanned", 0, None),
        ],
        "checked": ["what is in 3 files"],
        "not_checked": ["what the numbers do"],
        "new": 1,
        "known": listed,
        "baseline": {"path": "base.json", "sha256": "00" * 32, "entries": len(listed), "stale": []} if known else None,
        "cache": None,
        **more,
    }
    return Report(files, findings, {**RUN, "audit": audit})


def _root(path: str, mode: str, files: int, manifest: object) -> dict[str, object]:
    facts = {"files": files, "bytes": 0, "manifest": manifest, "bundle": None}
    return {"path": path, "mode": mode, "verdict": "rejected", **facts}


def hostile() -> Report:
    """Return a report with every hostile name as that of a refused file, of an accepted one and of a missing one."""
    files = [file for name in HOSTILE_NAMES for file in (refused(f"m/bad{name}"), accepted(f"m/good{name}"))]
    missing = tuple(Finding("missing-file", "expected this file", file=f"m/gone{name}") for name in HOSTILE_NAMES)
    return audited(*files, findings=missing)


def large(n_files: int = 10_000) -> Report:
    """Return a report of many files, each 37th of them refused, and under hostile names."""
    files = []
    for number in range(n_files):
        name = f"m/{number // 100:03d}/{HOSTILE_NAMES[number % len(HOSTILE_NAMES)] if number % 37 == 0 else 'tensor'}"
        make = refused if number % 37 == 0 else accepted
        files.append(make(f"{name}{number:05d}_000", size=1000 + number % 5 * 1_000_000))
    return audited(*files)
