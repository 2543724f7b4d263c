"""Directory and trusted manifest -> `StagedCheckpoint`: every byte read once, hashed on the way, and frozen.

What is handed out can not be reached by another process, nor changed by this one: private anonymous memory, made
read-only after the last digest in it matched. The files on disk do not matter from then on.

Where the manifest has digests of a file's chunks, several threads read and check one file at a time, so that a large
one leaves no processor idle. Then the digest of the whole is not computed: the signed chunks cover each byte, in their
order, and the signed size says how many there are, so that a file whose chunks all match has exactly the bytes that
were hashed when it was signed. `safeload sign` takes both digests in one pass over the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from safeload.digests import CHUNK_BYTES, HASH_CHUNK_BYTES
from safeload.errors import ConfigError, DigestMismatchError, FileSetError, Finding, StagingError, escape
from safeload.files import Root, WalkedFile, hard_link, read_into
from safeload.manifest import FileEntry, Manifest, TrustedManifest, fold_path
from safeload.parallel import Meter, n_processors, run
from safeload.report import Progress

ALIGNMENT_BYTES = 64
"""Where a file's first payload begins, modulo this: XLA's CPU client takes such a buffer over without copying it."""

SMALL_FILE_BYTES = 1024 * 1024
"""Files up to this long share an arena, because pages and threads cost more than their bytes do."""

SLAB_BYTES = 32 * 1024 * 1024
"""Fill of such a shared arena. One thread fills it: threads that take turns at small files only wait for each other."""

RUN_CHUNKS = 4
"""Chunks that one thread takes of a file at a time: 64 MiB are hashed in 40 ms, so that threads end close together."""

_SHARD_NAME = re.compile(r"tensor([0-9]{5,})_([0-9]{3,})")
"""How Grok-1's checkpoints name shards: index of the tensor, and of the process that wrote the shard."""

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


@dataclass(frozen=True, slots=True)
class _Work:
    """What one thread does without a break: how many bytes it reads, and how; that returns what is wrong with them."""

    nbytes: int
    do: Callable[[Meter], list[Finding]]


class _Split:
    """One file that several threads read, alone in its arena: opened once, frozen when the last of its runs is done."""

    def __init__(self, root: Root, arena: _Arena) -> None:
        ((self._entry, self._start),) = arena.plan.slots
        self._root = root
        self._arena = arena
        self._signed = self._entry.chunk_digests
        self._runs = range(0, len(self._signed), RUN_CHUNKS)
        self._left = len(self._runs)
        self._lock = threading.Lock()
        self._fd = -1
        self._refusal: FileSetError | None = None
        self._differ: dict[int, str] = {}

    def work(self) -> Iterator[_Work]:
        """Yield the runs."""
        for first in self._runs:
            end = min(first + RUN_CHUNKS, len(self._signed))
            nbytes = min(end * CHUNK_BYTES, self._entry.size) - first * CHUNK_BYTES
            yield _Work(nbytes, partial(self._run, range(first, end)))

    def close(self) -> None:
        """Close the file, if it is open. No thread may be at work on it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _run(self, chunks: range, meter: Meter) -> list[Finding]:
        differ: dict[int, str] = {}
        refusal: FileSetError | None = None
        try:
            differ = self._compare(self._open(), chunks, meter)
        except FileSetError as err:
            refusal = err
        with self._lock:
            self._differ |= differ
            self._refusal = self._refusal or refusal
            self._left -= 1
            if self._left:
                return []
        self.close()
        if self._refusal is None and not self._differ:
            self._arena.freeze()
            return []
        return list(self._refusal.findings) if self._refusal is not None else [self._mismatch()]

    def _open(self) -> int:
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if self._fd < 0:
                self._fd = self._root.open(self._entry.path)
            return self._fd

    def _compare(self, fd: int, chunks: range, meter: Meter) -> dict[int, str]:
        """Read some chunks, and return the digests of those that are not as signed, by their index."""
        entry = self._entry
        differ: dict[int, str] = {}
        with self._arena.writable(self._start, entry.size) as target:
            for index in chunks:
                end = min((index + 1) * CHUNK_BYTES, entry.size)
                digest = _read(fd, entry, target, range(index * CHUNK_BYTES, end), meter)
                if digest != self._signed[index]:
                    differ[index] = digest.hex()
        if chunks.stop == len(self._signed):
            _require_end(fd, entry)
        return differ

    def _mismatch(self) -> Finding:
        first = min(self._differ)
        start, end = first * CHUNK_BYTES, min((first + 1) * CHUNK_BYTES, self._entry.size)
        message = f"expected sha256:{self._signed[first].hex()} of bytes {start} to {end}, "
        message += f"found sha256:{self._differ[first]}; {len(self._differ)} of {len(self._signed)} chunks differ"
        return _digest_mismatch(self._entry, message, start)


def _fill(root: Root, arena: _Arena, meter: Meter) -> list[Finding]:
    """Read, hash and compare the files of one arena, and freeze it if all of them are the signed ones."""
    found: list[Finding] = []
    for entry, start in arena.plan.slots:
        try:
            with arena.writable(start, entry.size) as target:
                finding = _compare_whole(root, entry, target, meter)
        except FileSetError as err:
            found.extend(err.findings)
        else:
            found.extend([] if finding is None else [finding])
    if not found:
        arena.freeze()
    return found


def _compare_whole(root: Root, entry: FileEntry, target: memoryview, meter: Meter) -> Finding | None:
    fd = root.open(entry.path)
    try:
        found = _read(fd, entry, target, range(entry.size), meter).hex()
        _require_end(fd, entry)
    finally:
        os.close(fd)
    if found != entry.sha256:
        return _digest_mismatch(entry, f"expected sha256:{entry.sha256}, found sha256:{found}")
    return None


def _read(fd: int, entry: FileEntry, target: memoryview, where: range, meter: Meter) -> bytes:
    """Read some bytes of a file to where they belong in `target`, and return the SHA-256 of what stands there then."""
    digest = hashlib.sha256()
    position = where.start
    while position < where.stop:
        with target[position : min(position + HASH_CHUNK_BYTES, where.stop)] as room:
            got = read_into(fd, room, position, path=entry.path)
            if not got:
                raise FileSetError(_size_mismatch(entry, f"{position} bytes"))
            with room[:got] as fresh:
                digest.update(fresh)
        position += got
        meter.advance(got)
    return digest.digest()


def _require_end(fd: int, entry: FileEntry) -> None:
    if read_into(fd, memoryview(bytearray(1)), entry.size, path=entry.path):
        raise FileSetError(_size_mismatch(entry, "more"))


def _digest_mismatch(entry: FileEntry, message: str, offset: int | None = None) -> Finding:
    hint = "the file is not the one that was signed; fetch it again"
    return Finding("digest-mismatch", message, file=entry.path, offset=offset, hint=hint)


def stage(
    directory: str | Path,
    trusted: TrustedManifest,
    *,
    memory_budget: int | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    ignore: Mapping[str, bytes] = MappingProxyType({}),
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
        ignore: Files that may lie in the directory unlisted, with exactly these bytes: the manifest itself.

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
    root: Root, manifest: Manifest, *, ignore: Mapping[str, bytes] = MappingProxyType({})
) -> list[Finding]:
    """Compare what lies below `root` with what the manifest lists, by path, kind and length; empty where they agree.

    All that is wrong is found in one run, in hidden directories too, and nothing is opened but directories.

    Args:
        root: The open directory.
        manifest: What shall be in it.
        ignore: Files that may be there without being listed, with exactly these bytes.

    Returns:
        The findings sorted by path: those of the walk, and codes "missing-file", "unlisted-file", "empty-file",
        "size-mismatch", "hard-link", and "not-a-regular-file" for a directory where a file is listed.
    """
    listed = manifest.by_path
    present: set[str] = set()
    unlisted: list[WalkedFile] = []
    findings: list[Finding] = []
    for walked in root.walk():
        present.add(walked.path)
        entry = listed.get(walked.path)
        if walked.finding is not None:
            findings.append(walked.finding)
        elif entry is not None:
            findings.extend(_differences(entry, walked))
        elif walked.path not in ignore or not root.holds(walked.path, ignore[walked.path]):
            unlisted.append(walked)
    missing = [entry for path, entry in listed.items() if path not in present]
    # Nobody knows what is below a directory that could not be entered.
    closed = {finding.file for finding in findings if finding.code in {"unreadable", "too-deep", "too-many-files"}}
    shards = _count_shards(manifest) if missing else {}
    renamed = _renamed(missing, unlisted)
    findings += [_missing(root, entry, closed, shards, renamed.get(entry.path)) for entry in missing]
    now_called = {new: old for old, new in renamed.items()}
    for walked in unlisted:
        message = "expected only files that the manifest lists, found another"
        old = now_called.get(walked.path)
        hint = "move it out of the directory" if old is None else f"if it is {escape(old)} renamed, give it that name"
        findings.append(Finding("unlisted-file", message, file=walked.path, hint=hint))
    return sorted(findings, key=lambda finding: finding.file or "")


def _differences(entry: FileEntry, walked: WalkedFile) -> Iterator[Finding]:
    if walked.n_links > 1:
        yield hard_link(walked)
    if entry.size and not walked.size:
        message = f"expected the signed {entry.size} bytes, found an empty file"
        yield Finding("empty-file", message, file=entry.path, hint="fetch the file again from its publisher")
    elif entry.size != walked.size:
        yield _size_mismatch(entry, f"{walked.size} bytes")


def _missing(
    root: Root, entry: FileEntry, closed: set[str | None], shards: Mapping[str, int], renamed: str | None
) -> Finding:
    path = entry.path
    if root.holds_directory(path):
        return Finding("not-a-regular-file", "expected a regular file, found a directory", file=path, hint="remove it")
    parents = {str(parent) for parent in PurePosixPath(path).parents}
    if parents & closed:
        message, hint = "expected this file, found no way to its directory", "make all directories readable"
        return Finding("missing-file", message, file=path, hint=hint)
    hint = "fetch it from its publisher"
    if renamed is not None:
        hint = f"if {escape(renamed)} is this file renamed, give it its name back; else {hint}"
    message = f"expected this file, which the manifest lists{_shard(path, shards)}, found none"
    return Finding("missing-file", message, file=path, hint=hint)


def _shard(path: str, shards: Mapping[str, int]) -> str:
    """Say which part of which tensor a shard is, by its name; nothing for other names."""
    named = _SHARD_NAME.fullmatch(PurePosixPath(path).name)
    if named is None:
        return ""
    total = shards[path.rpartition("_")[0]]
    return f" as tensor {int(named[1])}, shard {int(named[2])} of {total} (counted from 0)"


def _count_shards(manifest: Manifest) -> Mapping[str, int]:
    """Return how many shards each tensor has, by what their paths have in common."""
    shards = (path for path in manifest.by_path if _SHARD_NAME.fullmatch(PurePosixPath(path).name))
    return Counter(path.rpartition("_")[0] for path in shards)


def _renamed(missing: Iterable[FileEntry], unlisted: Iterable[WalkedFile]) -> dict[str, str]:
    """Guess which unlisted file is which missing one: spelled alike, or alone with its length on both sides.

    A guess is good enough for a hint; whether the bytes are the same would take reading them.
    """
    spelled = {fold_path(walked.path): walked.path for walked in unlisted}
    as_long: dict[int, list[str]] = {}
    for walked in unlisted:
        as_long.setdefault(walked.size, []).append(walked.path)
    lengths = Counter(entry.size for entry in missing)
    found: dict[str, str] = {}
    for entry in missing:
        alike = as_long.get(entry.size, []) if entry.size else []
        if (other := spelled.get(fold_path(entry.path))) is not None:
            found[entry.path] = other
        elif len(alike) == 1 and lengths[entry.size] == 1:
            found[entry.path] = alike[0]
    return found


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
    splits: list[_Split] = []
    items: list[_Work] = []
    for arena in arenas:
        if arena.plan.slots[0][0].chunks is not None:
            splits.append(_Split(root, arena))
            items.extend(splits[-1].work())
        else:
            nbytes = sum(entry.size for entry, _ in arena.plan.slots)
            items.append(_Work(nbytes, partial(_fill, root, arena)))
    try:
        results = run(
            items,
            lambda item, meter: item.do(meter),
            size=lambda item: item.nbytes,
            threads=threads,
            phase="staging",
            progress=progress,
        )
    finally:
        for split in splits:
            split.close()
    findings = sorted((f for result in results for f in result), key=lambda finding: finding.file or "")
    if any(finding.code != "digest-mismatch" for finding in findings):
        raise FileSetError(*findings)
    if findings:
        raise DigestMismatchError(*findings)
