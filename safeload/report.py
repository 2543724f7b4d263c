"""What a run found: one verdict for each file, and one for the whole. Data only; `rendering` prints it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from safeload.errors import Finding, RejectedError
from safeload.tensors import ShardIndex, TensorSpec

SCHEMA_VERSION = 1
"""Version of the JSON object that `Report.to_json` makes."""

Verdict: TypeAlias = Literal["accepted", "rejected"]

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told how far long work has come: the phase ("hashing", "staging", ...), bytes done, bytes in total. It is called
from one thread at a time, and may raise KeyboardInterrupt to stop the work."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """What is known of one file. Its verdict is "accepted" exactly if there is no finding.

    Attributes:
        path: Path as the user would type it, or as the manifest lists it.
        format: Format found by content ("pickle", "json", "text", ...); "unknown" where none was.
        size: Length in bytes, or None where the file could not be opened.
        sha256: Digest of the whole file, where it was asked for and the file could be read.
        chunks: SHA-256 of each of the file's chunks, 32 bytes each, joined; None for one chunk, or if nobody asked.
        blake3: BLAKE3 of the whole file, where that was asked for.
        blake3_chunks: BLAKE3 of each of the file's chunks, as `chunks` has them, where that was asked for.
        index: What the file says of others, if it is an index.
        findings: Every reason to refuse.
        tensors: The table of tensors, in stored order; empty where the file was refused before it was known.
        globals: The pickle globals that the file names, as `module.name`, in order of first use.
        error: The class that a caller who needs the file is to get; None where it is accepted.
    """

    path: str
    format: str
    size: int | None
    sha256: str | None = None
    findings: tuple[Finding, ...] = ()
    tensors: tuple[TensorSpec, ...] = ()
    globals: tuple[str, ...] = ()
    error: type[RejectedError] | None = None
    chunks: bytes | None = None
    blake3: str | None = None
    blake3_chunks: bytes | None = None
    index: ShardIndex | None = None

    @property
    def verdict(self) -> Verdict:
        """The file's verdict."""
        return "rejected" if self.findings else "accepted"


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The outcome of one run.

    Attributes:
        files: One entry for each file that was met, accepted or not.
        findings: Reasons to refuse that belong to no single file (a signature, a missing file).
        facts: What the run was held against, for the record: policy and manifest digests, signers, revision.
    """

    files: tuple[FileReport, ...]
    findings: tuple[Finding, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Rejected if there is any finding anywhere; also if nothing at all was looked at."""
        refused = self.findings or not self.files or any(file.findings for file in self.files)
        return "rejected" if refused else "accepted"

    @property
    def is_accepted(self) -> bool:
        """Whether the verdict is "accepted"."""
        return self.verdict == "accepted"

    def __bool__(self) -> bool:
        """Refuse to be taken for a verdict: `if scan(path):` would be true of every report."""
        raise TypeError("a report is neither true nor false; ask for its `is_accepted` or `verdict`")

    def __repr__(self) -> str:
        n_findings = len(self.all_findings)
        return f"<Report: {self.verdict}, {len(self.files)} file(s), {n_findings} finding(s)>"

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """The findings of the run, then those of each file, each naming its file."""
        return self.findings + tuple(f.in_file(file.path) for file in self.files for f in file.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the report as the object of the command's contract (schema 1), ready for `json.dumps`."""
        return {
            "schema": SCHEMA_VERSION,
            "verdict": self.verdict,
            "files": [_file_json(file) for file in self.files],
            "findings": [finding_json(finding) for finding in self.findings],
            **self.facts,
        }


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return one finding as the command's contract has it."""
    shown = {"code": finding.code, "message": finding.message, "offset": finding.offset, "hint": finding.hint}
    return shown if finding.file is None else {**shown, "path": finding.file}


def _file_json(file: FileReport) -> dict[str, Any]:
    return {
        "path": file.path,
        "verdict": file.verdict,
        "format": file.format,
        "size": file.size,
        "sha256": file.sha256,
        "findings": [finding_json(finding) for finding in file.findings],
        "tensors": [tensor_json(tensor) for tensor in file.tensors],
        "globals": list(file.globals),
    }


def tensor_json(tensor: TensorSpec) -> dict[str, Any]:
    """Return one row of the table of tensors as the command's contract has it."""
    shown: dict[str, Any] = {
        "name": tensor.name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "order": tensor.order,
        "offset": tensor.extent.offset,
        "nbytes": tensor.extent.nbytes,
    }
    if tensor.dtype.big_endian:
        shown["byteorder"] = "big"
    if tensor.extent.inline is not None:
        # Then `offset` is that of the opcode which carries the payload in an encoding of its own.
        shown["inline"] = True
    if tensor.strides is not None:
        shown["strides"] = list(tensor.strides)
    if tensor.sha256 is not None:
        shown["sha256"] = tensor.sha256
    return shown
