"""The tally of a load: what it read, by which digests, how long each phase took, and how much memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import MappingProxyType
from typing import Any

from safeload.manifest import TrustedManifest
from safeload.memory import MemoryUse
from safeload.staging import StagedCheckpoint


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load took in this process.

    Attributes:
        bytes_read: Bytes that were read and verified; fewer than there are where other hosts read the rest.
        bytes_total: Bytes of all files of the manifest.
        files_read: Files that were read, whole or in part.
        files_total: Files of the manifest.
        algorithms: The digests that bytes were held against: "sha256", "blake3" or both.
        batches: How many times staged memory was filled and handed on.
        seconds: Time by phase: "manifest", "plan", "stage" (waiting for verified bytes), "scan", "assemble", "agree",
            and "total".
        memory_before: Resident memory of the process when it began, in bytes.
        memory_peak: The most that was resident while it lasted, in bytes, as sampled.
    """

    bytes_read: int
    bytes_total: int
    files_read: int
    files_total: int
    algorithms: tuple[str, ...]
    batches: int
    seconds: Mapping[str, float]
    memory_before: int
    memory_peak: int

    def to_json(self) -> dict[str, Any]:
        """Return it as an object for `json.dumps`."""
        made = {name: getattr(self, name) for name in self.__slots__}
        return {**made, "algorithms": list(self.algorithms), "seconds": dict(self.seconds)}


@dataclass(slots=True)
class Tally:
    """What one load took, of this process alone.

    Attributes:
        bytes_total: Bytes of all files of the manifest.
        files_total: Files of the manifest.
        bytes_read: Bytes that were read and verified.
        files: Files that were read.
        batches: How many times staged memory was filled and handed on.
        algorithms: The digests that bytes were held against.
        seconds: By phase: "plan", "stage" (waiting for verified bytes), "scan", "assemble", "agree".
    """

    bytes_total: int = 0
    files_total: int = 0
    bytes_read: int = 0
    files: set[str] = field(default_factory=set)
    batches: int = 0
    algorithms: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)

    def spend(self, phase: str, since: float) -> float:
        """Count the time since then to a phase, and return the time now."""
        now = perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - since
        return now

    def count(self, staged: StagedCheckpoint) -> None:
        """Count a batch."""
        self.batches += 1
        self.files.update(staged.files)
        for file in staged.files.values():
            self.bytes_read += file.entry.size if file.present is None else sum(map(len, file.present))
            self.algorithms.add(file.algorithm)

    def expect(self, trusted: TrustedManifest) -> None:
        """Note how much there is."""
        self.bytes_total = trusted.manifest.totals.bytes
        self.files_total = trusted.manifest.totals.files

    def report(self, memory: MemoryUse) -> LoadReport:
        """Return what to tell of it."""
        return LoadReport(
            bytes_read=self.bytes_read,
            bytes_total=self.bytes_total,
            files_read=len(self.files),
            files_total=self.files_total,
            algorithms=tuple(sorted(self.algorithms)),
            batches=self.batches,
            seconds=MappingProxyType(dict(self.seconds)),
            memory_before=memory.before,
            memory_peak=memory.peak,
        )
