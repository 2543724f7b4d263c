"""Directory and trusted manifest -> `StagedCheckpoint`: every byte read once, hashed on the way, and frozen.

What is handed out can not be reached by another process, nor changed by this one: private anonymous memory, made
read-only after the last digest in it matched. The files on disk do not matter from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from safeload.digests import HASH_CHUNK_BYTES
from safeload.errors import ConfigError, DigestMismatchError, FileSetError, Finding, StagingError
from safeload.files import Root, read_into
from safeload.manifest import FileEntry, Manifest, TrustedManifest
from safeload.parallel import Meter, n_processors, run
from safeload.report import Progress

ALIGNMENT_BYTES = 64
"""Where a file's first payload begins, modulo this: XLA's CPU client takes such a buffer over without copying it."""

SMALL_FILE_BYTES = 1024 * 1024
"""Files up to this long share an arena, because pages and threads cost more than their bytes do."""

SLAB_BYTES = 32 * 1024 * 1024
"""Fill of such a shared arena. One thread fills it: threads that take turns at small files only wait for each other."""

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mprotect.restype = ctypes.c_int


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file whose bytes are the signed ones.

    Attributes:
        entry: What was signed.
        view: The file's bytes, read-only; whatever is made from the view keeps the memory alive.
    """

    entry: FileEntry
    view: memoryview


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """Proof that each file of a trusted manifest is in private read-only memory, with the digest that was signed.

    Attributes:
        trusted: The manifest, and who signed it.
        files: The files by their path, in the manifest's order.
    """

    trusted: TrustedManifest
    files: Mapping[str, StagedFile]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The files of one arena and where each begins in it."""

    nbytes: int
    slots: tuple[tuple[FileEntry, int], ...]


class _Arena:
    """Private anonymous memory of one plan."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self._mapping = mmap.mmap(-1, plan.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Small pages would cost as much to touch as the bytes cost to hash. It is a hint: kernels may lack it.
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)

    def writable(self, start: int, nbytes: int) -> memoryview:
        """Lend bytes to write to; the borrower releases them."""
        with memoryview(self._mapping) as everything:
            return everything[start : start + nbytes]

    def freeze(self) -> None:
        """Make the pages read-only: from here on a write through any alias ends the process (SIGSEGV)."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        if _LIBC.mprotect(address, self.plan.nbytes, mmap.PROT_READ):
            number = ctypes.get_errno()
            raise StagingError(f"cannot make staged memory read-only: {os.strerror(number)}")

    def staged(self) -> Iterator[StagedFile]:
        """Hand out the files of the frozen arena."""
        everything = memoryview(self._mapping).toreadonly()
        for entry, start in self.plan.slots:
            yield StagedFile(entry, everything[start : start + entry.size])

    def close(self) -> None:
        """Give the memory back."""
        # Refused while a thread still writes there, which a second Ctrl-C leaves behind: it goes when that one ends.
        with contextlib.suppress(BufferError):
            self._mapping.close()


def _fill(root: Root, arena: _Arena, meter: Meter) -> list[Finding]:
    """Read, hash and compare the files of one arena, and freeze it if all of them are the signed ones."""
    found: list[Finding] = []
    for entry, start in arena.plan.slots:
        try:
            with arena.writable(start, entry.size) as target:
                finding = _read(root, entry, target, meter)
        except FileSetError as err:
            found.extend(err.findings)
        else:
            found.extend([] if finding is None else [finding])
    if not found:
        arena.freeze()
    return found


def _read(root: Root, entry: FileEntry, target: memoryview, meter: Meter) -> Finding | None:
    fd = root.open(entry.path)
    try:
        digest = hashlib.sha256()
        position = 0
        while position < entry.size:
            with target[position : position + HASH_CHUNK_BYTES] as room:
                got = read_into(fd, room, position, path=entry.path)
                if not got:
                    return _size_mismatch(entry, f"{position} bytes")
                with room[:got] as fresh:
                    digest.update(fresh)
            position += got
            meter.advance(got)
        if read_into(fd, memoryview(bytearray(1)), entry.size, path=entry.path):
            return _size_mismatch(entry, "more")
    finally:
        os.close(fd)
    if digest.hexdigest() != entry.sha256:
        message = f"expected sha256:{entry.sha256}, found sha256:{digest.hexdigest()}"
        hint = "the file is not the one that was signed; fetch it again"
        return Finding("digest-mismatch", message, file=entry.path, hint=hint)
    return None


def stage(
    directory: str | Path,
    trusted: TrustedManifest,
    *,
    memory_budget: int | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    ignore: frozenset[tuple[int, int]] = frozenset(),
) -> StagedCheckpoint:
    """Prove that `directory` holds exactly the signed files, by reading each once into private read-only memory.

    The file set is checked, then the memory that it takes, and only then is a byte read. On any refusal, error or
    interruption the memory is given back; nothing is ever written to disk or named shared memory.

    Args:
        directory: Where the checkpoint's files are.
        trusted: The verified manifest.
        memory_budget: Most bytes of memory to take; None for what the machine and the cgroup have available.
        progress: Told of the phase "staging" from the calling thread.
        threads: How many to read with; None for as many as this process may use processors.
        ignore: (device, inode) of files that may lie in the directory unlisted: the manifest itself.

    Raises:
        FileSetError: files are missing, unlisted, no regular files, or of another length; every one is a finding.
        DigestMismatchError: files are not the signed ones; every one is a finding.
        StagingError: they do not fit in memory, or could not be read.
        ConfigError: `threads` is less than 1.
    """
    if threads is None:
        threads = n_processors()
    if threads < 1:
        raise ConfigError(f"expected at least 1 thread to stage with, found {threads}")
    with Root(directory) as root:
        findings = check_file_set(root, trusted.manifest, ignore=ignore)
        if findings:
            raise FileSetError(*findings)
        plans = _plan(trusted.manifest.files)
        _require_memory(sum(plan.nbytes for plan in plans), memory_budget)
        arenas: list[_Arena] = []
        try:
            _allocate(plans, arenas)
            _fill_all(root, arenas, threads, progress)
        except BaseException:
            for arena in arenas:
                arena.close()
            raise
    staged = {file.entry.path: file for arena in arenas for file in arena.staged()}
    return StagedCheckpoint(trusted, MappingProxyType({e.path: staged[e.path] for e in trusted.manifest.files}))


def check_file_set(
    root: Root, manifest: Manifest, *, ignore: frozenset[tuple[int, int]] = frozenset()
) -> list[Finding]:
    """Compare what lies below `root` with what the manifest lists, by path and length; empty where they agree.

    Args:
        root: The open directory.
        manifest: What shall be in it.
        ignore: (device, inode) of regular files that may be there without being listed.

    Returns:
        The findings sorted by path: those of the walk, and codes "missing-file", "unlisted-file", "size-mismatch".
    """
    listed = manifest.by_path
    present: set[str] = set()
    findings: list[Finding] = []
    for walked in root.walk():
        present.add(walked.path)
        entry = listed.get(walked.path)
        if walked.finding is not None:
            findings.append(walked.finding)
        elif entry is None:
            if (walked.device, walked.inode) not in ignore:
                message = "expected only files that the manifest lists, found another"
                hint = "move it out of the directory"
                findings.append(Finding("unlisted-file", message, file=walked.path, hint=hint))
        elif entry.size != walked.size:
            findings.append(_size_mismatch(entry, f"{walked.size} bytes"))
    for path in listed.keys() - present:
        message = "expected this file, which the manifest lists, found none"
        findings.append(Finding("missing-file", message, file=path, hint="fetch it from its publisher"))
    return sorted(findings, key=lambda finding: finding.file or "")


def available_memory() -> int:
    """Return how many bytes this process can still take: the machine's or its cgroup's, whichever is less.

    Memory that caches files counts as available, as the kernel takes it back. The machine's number is MemAvailable
    of `/proc/meminfo`; a cgroup's (v2, or the memory controller of v1) is its limit less its use, for the process's
    own group and every one above it.

    Raises:
        StagingError: the kernel does not say.
    """
    machine = _table(_PROC / "meminfo").get("MemAvailable:")
    if machine is None:
        message = "cannot tell how much memory is available"
        raise StagingError(message, hint="say how much to use with --memory-budget")
    return min([machine * 1024, *_cgroup_room()])


def _cgroup_room() -> Iterator[int]:
    for line in _read_text(_PROC / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, limit, use, prefix = _CGROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit, use, prefix = _CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        # In a container the path may be one of the host's, which is not mounted: the top then is our own group.
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            most, used = _read_text(top / group / limit).strip(), _read_text(top / group / use).strip()
            if most.isdecimal() and used.isdecimal():
                kinds = _table(top / group / "memory.stat")
                cached = sum(kinds.get(f"{prefix}{kind}", 0) for kind in ("active_file", "inactive_file"))
                yield max(0, int(most) - int(used) + cached)


def _table(path: Path) -> dict[str, int]:
    """Read a kernel's table of lines that begin with a name and a number."""
    rows = (line.split() for line in _read_text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _size_mismatch(entry: FileEntry, found: str) -> Finding:
    message = f"expected the signed {entry.size} bytes, found {found}"
    return Finding("size-mismatch", message, file=entry.path, hint="fetch the file again from its publisher")


def _plan(entries: Iterable[FileEntry]) -> list[_Plan]:
    """Decide where each file goes: a large one into an arena of its own, small ones together, in their order."""
    plans: list[_Plan] = []
    slab: list[tuple[FileEntry, int]] = []
    filled = 0
    for entry in entries:
        # The offset is a hint that the scan checks again: a wrong one costs a copy later on, nothing else.
        payload = entry.tensors[0].offset if entry.tensors else 0
        if entry.size > SMALL_FILE_BYTES:
            start = -payload % ALIGNMENT_BYTES
            plans.append(_plan_of([(entry, start)], start + entry.size))
            continue
        start = filled + -(filled + payload) % ALIGNMENT_BYTES
        if slab and start + entry.size > SLAB_BYTES:
            plans.append(_plan_of(slab, filled))
            slab, start = [], -payload % ALIGNMENT_BYTES
        slab.append((entry, start))
        filled = start + entry.size
    if slab:
        plans.append(_plan_of(slab, filled))
    return plans


def _plan_of(slots: Sequence[tuple[FileEntry, int]], nbytes: int) -> _Plan:
    pages = max(1, -(-nbytes // mmap.PAGESIZE))
    return _Plan(pages * mmap.PAGESIZE, tuple(slots))


def _require_memory(needed: int, budget: int | None) -> None:
    limit, name = (available_memory(), "available memory") if budget is None else (budget, "the memory budget")
    if needed > limit:
        message = f"staging takes {needed} bytes, {name} is {limit} bytes"
        raise StagingError(message, hint="free memory, or name the bytes to use with --memory-budget")


def _allocate(plans: Iterable[_Plan], arenas: list[_Arena]) -> None:
    for plan in plans:
        try:
            arenas.append(_Arena(plan))
        except OSError as err:
            message = f"cannot take {plan.nbytes} bytes of memory: {err.strerror}"
            raise StagingError(message, hint="free memory, or raise the process's limit (ulimit -v)") from err


def _fill_all(root: Root, arenas: Sequence[_Arena], threads: int, progress: Progress | None) -> None:
    """Fill and freeze the arenas; raise what was found once every file was looked at."""
    results = run(
        arenas,
        lambda arena, meter: _fill(root, arena, meter),
        size=lambda arena: sum(entry.size for entry, _ in arena.plan.slots),
        threads=threads,
        phase="staging",
        progress=progress,
    )
    findings = sorted((f for result in results for f in result), key=lambda finding: finding.file or "")
    if any(finding.code != "digest-mismatch" for finding in findings):
        raise FileSetError(*findings)
    if findings:
        raise DigestMismatchError(*findings)
