"""Directory and trusted manifest -> `StagedCheckpoint`: every byte read once, hashed on the way, and frozen.

What is handed out can not be reached by another process, nor changed by this one: private anonymous memory, made
read-only after the last digest in it matched. The files on disk do not matter from then on.

`stage` takes everything at once; `stream` a batch at a time, in memory that is used again, so that a checkpoint of any
size goes through a fixed budget, and reads only the files, or the chunks of files, that are wanted.

Where the manifest has digests of a file's chunks, several threads read and check one file at a time, so that a large
one leaves no processor idle. Then the digest of the whole is not computed: the signed chunks cover each byte, in their
order, and the signed size says how many there are, so that a file whose chunks all match has exactly the bytes that
were hashed when it was signed. `safeload sign` takes both digests in one pass over the same bytes.

So it is with BLAKE3, which is signed beside SHA-256 and takes a third of the time: where a manifest has it and its
package is installed, it alone is computed. Whoever signs can sign two digests of different files, and so give one file
to those who have the package and another to those who have not; that is within a signer's power to begin with.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final, NoReturn, Self

from safeload.digests import CHUNK_BYTES, HASH_CHUNK_BYTES, Algorithm, has_blake3, new_hasher
from safeload.errors import ConfigError, DigestMismatchError, FileSetError, Finding, StagingError, escape
from safeload.files import Root, WalkedFile, hard_link, read_into
from safeload.formats import WINDOW_BYTES
from safeload.manifest import FileEntry, Manifest, TrustedManifest, fold_path
from safeload.memory import Arena, ArenaPool, available_memory, collect_garbage, page_bytes
from safeload.parallel import Crew, Lot, Meter, n_processors
from safeload.report import Progress

ALIGNMENT_BYTES = 64
"""Where a file's first payload begins, modulo this: XLA's CPU client takes such a buffer over without copying it."""

SMALL_FILE_BYTES = 1024 * 1024
"""Files up to this long share an arena, because pages and threads cost more than their bytes do."""

SLAB_BYTES = 32 * 1024 * 1024
"""Fill of such a shared arena. One thread fills it: threads that take turns at small files only wait for each other."""

BATCH_BYTES = 64 * 1024 * 1024
"""Most bytes of a streamed batch that holds several files. The sooner pages are used again, the fewer fresh ones are
touched: 256 MiB took a tenth more processor time; below 64 there was nothing more to gain."""

BATCHES_AHEAD = 2
"""Batches that are read while another is used, memory permitting: with one alone, threads idle at the end of each."""

_SHARD_NAME = re.compile(r"tensor([0-9]{5,})_([0-9]{3,})")
"""How Grok-1's checkpoints name shards: index of the tensor, and of the process that wrote the shard."""

_NOTHING: Final[Mapping[str, bytes]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file whose bytes are the signed ones.

    Attributes:
        entry: What was signed.
        view: The file's bytes, read-only; whatever is made from the view keeps the memory alive.
        present: The byte ranges of the file that were read, in order; None for all. What lies between is not there:
            to touch it ends the process (SIGSEGV), but for what shares a page with what was read, which is zero.
        algorithm: Of the digest that its bytes were held against.
    """

    entry: FileEntry
    view: memoryview
    present: tuple[range, ...] | None = None
    algorithm: Algorithm = "sha256"


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """Proof that files of a trusted manifest are in private read-only memory, with the digests that were signed.

    Attributes:
        trusted: The manifest, and who signed it.
        files: The files by their path, in the manifest's order: all of them, or those of one batch of `stream`.
        indexes: The bytes of every index that is or was among the files, by its path: other files are read by them.
    """

    trusted: TrustedManifest
    files: Mapping[str, StagedFile]
    indexes: Mapping[str, bytes] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A file, what to hold it against, and the byte ranges of it to read: whole chunks, or None for all of it."""

    entry: FileEntry
    algorithm: Algorithm = "sha256"
    present: tuple[range, ...] | None = None

    @property
    def nbytes(self) -> int:
        return self.entry.size if self.present is None else sum(map(len, self.present))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The files of one arena and where each begins in it.

    Attributes:
        nbytes: Length of the arena, in whole pages.
        slots: The files.
        parts: The bytes of the arena that are used, where the one file in it is not read whole.
    """

    nbytes: int
    slots: tuple[tuple[_Wanted, int], ...]
    parts: tuple[range, ...] | None = None

    @property
    def cost(self) -> int:
        """Most bytes of it that can be resident."""
        return self.nbytes if self.parts is None else page_bytes(self.parts)


@dataclass(frozen=True, slots=True)
class _Work:
    """What one thread does without a break: how many bytes it reads, and how; that returns what is wrong with them."""

    nbytes: int
    do: Callable[[Meter], list[Finding]]


class _Split:
    """One file that several threads read chunk by chunk: opened once, closed when the last of its chunks is done."""

    def __init__(self, root: Root, arena: Arena, wanted: _Wanted, start: int) -> None:
        self._wanted = wanted
        self._entry = wanted.entry
        self._start = start
        self._root = root
        self._arena = arena
        entry, blake3 = wanted.entry, wanted.algorithm == "blake3"
        self._signed = entry.blake3_chunk_digests if blake3 else entry.chunk_digests
        present = (range(self._entry.size),) if wanted.present is None else wanted.present
        self._chunks = [index for part in present for index in _chunks_of(part)]
        self._left = len(self._chunks)
        self._lock = threading.Lock()
        self._fd = -1
        self._refusal: FileSetError | None = None
        self._differ: dict[int, str] = {}

    def work(self) -> Iterator[_Work]:
        """Yield the chunks."""
        for index in self._chunks:
            yield _Work(len(self._range(index)), partial(self._check, index))

    def close(self) -> None:
        """Close the file, if it is open. No thread may be at work on it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _range(self, index: int) -> range:
        return range(index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self._entry.size))

    def _check(self, index: int, meter: Meter) -> list[Finding]:
        found = b""
        refusal: FileSetError | None = None
        try:
            found = self._read(self._open(), index, meter)
        except FileSetError as err:
            refusal = err
        with self._lock:
            if refusal is None and found != self._signed[index]:
                self._differ[index] = found.hex()
            self._refusal = self._refusal or refusal
            self._left -= 1
            if self._left:
                return []
        self.close()
        if self._refusal is not None:
            return list(self._refusal.findings)
        return [self._mismatch()] if self._differ else []

    def _open(self) -> int:
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if self._fd < 0:
                self._fd = self._root.open(self._entry.path)
            return self._fd

    def _read(self, fd: int, index: int, meter: Meter) -> bytes:
        """Read a chunk to its place, and return the digest of what stands there then."""
        where = self._range(index)
        with self._arena.writable(self._start + where.start, len(where)) as target:
            digest = _read(fd, self._wanted, target, where.start, meter)
        if where.stop == self._entry.size:
            _require_end(fd, self._entry)
        return digest

    def _mismatch(self) -> Finding:
        first = min(self._differ)
        where, name = self._range(first), self._wanted.algorithm
        message = f"expected {name}:{self._signed[first].hex()} of bytes {where.start} to {where.stop}, "
        message += f"found {name}:{self._differ[first]}; {len(self._differ)} of {len(self._chunks)} chunks differ"
        return _digest_mismatch(self._entry, message, where.start)


def _fill(root: Root, arena: Arena, slots: Sequence[tuple[_Wanted, int]], meter: Meter) -> list[Finding]:
    """Read, hash and compare some whole files of an arena."""
    found: list[Finding] = []
    for wanted, start in slots:
        try:
            with arena.writable(start, wanted.entry.size) as target:
                finding = _compare_whole(root, wanted, target, meter)
        except FileSetError as err:
            found.extend(err.findings)
        else:
            found.extend([] if finding is None else [finding])
    return found


def _compare_whole(root: Root, wanted: _Wanted, target: memoryview, meter: Meter) -> Finding | None:
    entry, algorithm = wanted.entry, wanted.algorithm
    fd = root.open(entry.path)
    try:
        found = _read(fd, wanted, target, 0, meter).hex()
        _require_end(fd, entry)
    finally:
        os.close(fd)
    expected = entry.sha256 if algorithm == "sha256" else entry.blake3
    if found != expected:
        return _digest_mismatch(entry, f"expected {algorithm}:{expected}, found {algorithm}:{found}")
    return None


def _read(fd: int, wanted: _Wanted, target: memoryview, start: int, meter: Meter) -> bytes:
    """Fill `target` with the file's bytes from `start` on, and return the digest of what stands there then."""
    entry, digest = wanted.entry, new_hasher(wanted.algorithm)
    filled, nbytes = 0, target.nbytes
    while filled < nbytes:
        with target[filled : filled + HASH_CHUNK_BYTES] as room:
            got = read_into(fd, room, start + filled, path=entry.path)
            if not got:
                raise FileSetError(_size_mismatch(entry, f"{start + filled} bytes"))
            with room[:got] as fresh:
                digest.update(fresh)
        filled += got
        meter.advance(got)
    return digest.digest()


def _algorithm(entry: FileEntry, *, blake3: bool) -> Algorithm:
    """Return which digest to hold a file against: of each chunk before that of the whole, and BLAKE3 if it is there."""
    signed = entry.blake3 if entry.chunks is None else entry.blake3_chunks
    return "blake3" if blake3 and signed is not None else "sha256"


def _require_end(fd: int, entry: FileEntry) -> None:
    if read_into(fd, memoryview(bytearray(1)), entry.size, path=entry.path):
        raise FileSetError(_size_mismatch(entry, "more"))


def _digest_mismatch(entry: FileEntry, message: str, offset: int | None = None) -> Finding:
    hint = "the file is not the one that was signed; fetch it again"
    return Finding("digest-mismatch", message, file=entry.path, offset=offset, hint=hint)


class _Batch:
    """The arenas of some plans, and the work of filling them, which has begun."""

    def __init__(self, root: Root, crew: Crew, filling: Sequence[tuple[_Plan, Arena]]) -> None:
        self._crew = crew
        self._filling = filling
        self._splits: list[_Split] = []
        items: list[_Work] = []
        for plan, arena in filling:
            together: list[tuple[_Wanted, int]] = []
            for slot in plan.slots:
                wanted, start = slot
                if wanted.entry.chunks is not None:
                    self._splits.append(_Split(root, arena, wanted, start))
                    items.extend(self._splits[-1].work())
                elif wanted.entry.size > SMALL_FILE_BYTES:
                    items.append(_Work(wanted.nbytes, partial(_fill, root, arena, [slot])))
                else:
                    together.append(slot)
            items += [_Work(nbytes, partial(_fill, root, arena, few)) for nbytes, few in _slabs(together)]
        self._lot: Lot[list[Finding]] = crew.begin(
            items, lambda item, meter: item.do(meter), size=lambda item: item.nbytes
        )

    @property
    def arenas(self) -> list[Arena]:
        """The arenas."""
        return [arena for _, arena in self._filling]

    def close(self) -> None:
        """Close what is open. No thread may be at work on it."""
        for split in self._splits:
            split.close()

    def finish(self, tell: Callable[[int], None]) -> dict[str, StagedFile]:
        """Wait until all is read, raise what was found once every file was looked at, freeze, and hand out."""
        results = self._crew.finish(self._lot, tell)
        findings = sorted((f for result in results for f in result), key=lambda finding: finding.file or "")
        if any(finding.code != "digest-mismatch" for finding in findings):
            raise FileSetError(*findings)
        if findings:
            raise DigestMismatchError(*findings)
        for arena in self.arenas:
            arena.freeze()
        return {
            wanted.entry.path: StagedFile(
                wanted.entry, arena.readable(start, wanted.entry.size), wanted.present, wanted.algorithm
            )
            for plan, arena in self._filling
            for wanted, start in plan.slots
        }


def _slabs(slots: Iterable[tuple[_Wanted, int]]) -> Iterator[tuple[int, list[tuple[_Wanted, int]]]]:
    """Divide small files among threads, and say how many bytes each part has."""
    few: list[tuple[_Wanted, int]] = []
    filled = 0
    for slot in slots:
        if few and filled + slot[0].nbytes > SLAB_BYTES:
            yield filled, few
            few, filled = [], 0
        few.append(slot)
        filled += slot[0].nbytes
    if few:
        yield filled, few


class _Reader:
    """Reads lots of plans, one batch after the other, within a limit of memory. Called from one thread."""

    def __init__(
        self,
        root: Root,
        trusted: TrustedManifest,
        lots: Sequence[Sequence[_Plan]],
        *,
        limit: int,
        arena_bytes: int = 0,
        threads: int,
        progress: Progress | None,
    ) -> None:
        self._root = root
        self._trusted = trusted
        self._lots = deque(lots)
        self._arena_bytes = arena_bytes
        self._pool = ArenaPool(limit)
        self._crew = Crew(threads)
        self._ahead: deque[_Batch] = deque()
        self._lent: tuple[_Batch, dict[str, StagedFile]] | None = None
        self._total = sum(wanted.nbytes for lot in lots for plan in lot for wanted, _ in plan.slots)
        self._progress = progress or (lambda *_: None)
        self._indexes: dict[str, bytes] = {}
        self._is_left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        # From the last to the first: nothing is closed, or given back, that a thread is at work on.
        with ExitStack() as stack:
            stack.callback(self._pool.close)
            for batch in self._ahead:
                stack.callback(batch.close)
            stack.push(self._crew)

    def batches(self) -> Iterator[StagedCheckpoint]:
        """Yield one batch after the other; each ends when the next is asked for."""
        while self._lots or self._ahead:
            if self._is_left:
                # To end here would look as if every file had been verified.
                raise RuntimeError("the context of this stream was left before its last batch")
            yield self.next_batch()
            self.end_batch()

    def next_batch(self) -> StagedCheckpoint:
        """Return the next batch once it is verified, while those behind it are read."""
        self._read_ahead(BATCHES_AHEAD)
        if not self._ahead:
            collect_garbage()
            self._read_ahead(1)
        if not self._ahead:
            needed = sum(plan.cost for plan in self._lots[0])
            message = f"the next batch takes {needed} bytes, of {self._pool.limit} bytes {self._pool.lent} are in use"
            raise StagingError(
                f"{message} by what was made from batches before",
                hint="let go of it, or copy it, before the next batch; or raise --memory-budget",
            )
        batch = self._ahead[0]
        files = batch.finish(lambda done: self._progress("staging", done, self._total))
        self._ahead.popleft()
        self._lent = batch, files
        self._read_ahead(BATCHES_AHEAD)
        in_order = {path: files[path] for path in sorted(files)}
        for path, file in files.items():
            if file.entry.format == "index":
                self._indexes[path] = bytes(file.view)
        return StagedCheckpoint(self._trusted, MappingProxyType(in_order), MappingProxyType(self._indexes))

    def end_batch(self) -> None:
        """Take the views of the last batch back, and its memory, as far as nobody made anything of them."""
        if self._lent is None:
            return
        (batch, files), self._lent = self._lent, None
        for file in files.values():
            # Refused where something was made from it, which keeps the memory: the pool sees that.
            with contextlib.suppress(BufferError):
                file.view.release()
        for arena in batch.arenas:
            self._pool.give_back(arena)

    def _read_ahead(self, most: int) -> None:
        while self._lots and len(self._ahead) < most:
            filling: list[tuple[_Plan, Arena]] = []
            for plan in self._lots[0]:
                arena = self._pool.take(max(plan.nbytes, self._arena_bytes), parts=plan.parts)
                if arena is None:
                    for _, taken in filling:
                        self._pool.give_back(taken)
                    return
                filling.append((plan, arena))
            self._lots.popleft()
            self._ahead.append(_Batch(self._root, self._crew, filling))


def stage(
    directory: str | Path,
    trusted: TrustedManifest,
    *,
    memory_budget: int | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    ignore: Mapping[str, bytes] = _NOTHING,
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
    threads = _threads(threads)
    with Root(directory) as root:
        _require_file_set(root, trusted.manifest, ignore)
        plans = _plan(_wanted_files(trusted.manifest), room=SLAB_BYTES, alone=SMALL_FILE_BYTES)
        needed = sum(plan.cost for plan in plans)
        _require_memory(needed, memory_budget)
        with _Reader(root, trusted, [plans], limit=needed, threads=threads, progress=progress) as reader:
            return reader.next_batch()


@contextlib.contextmanager
def stream(
    directory: str | Path,
    trusted: TrustedManifest,
    *,
    wanted: Mapping[str, tuple[range, ...] | None] | None = None,
    memory_budget: int | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    ignore: Mapping[str, bytes] = _NOTHING,
    absent: Callable[[str], bool] | None = None,
) -> Iterator[Iterator[StagedCheckpoint]]:
    """Prove what `stage` does, a batch of files at a time, in memory that is bounded and used again.

    The file set is checked first, and then the memory that the largest file takes. While one batch is used, the next
    are read as far as the budget allows. A batch, with every view that it handed out, ends when the next is asked for
    or the context is left; its memory is written to again only if nobody has any of it any more. What was made from a
    view, a slice or an array, stays valid as long as somebody has it, and counts against the budget as long.

    Indexes come first, as others are read by them, then other files without tensors, then the largest: their threads
    end close together if only small ones are left.

    Args:
        directory: Where the checkpoint's files are.
        trusted: The verified manifest.
        wanted: The files to read, by path, each with the byte ranges that are needed of it, or None for all. Ranges
            are widened to chunks that have a digest of their own, and to the whole file where there are none; what lies
            outside of the listed tensors is always among them, as a scan cannot do without it. None for all files.
        memory_budget: Most bytes of all memory that files are staged in, at any time; None for what is available.
        progress: Told of the phase "staging" from the thread that asks for batches.
        threads: How many to read with; None for as many as this process may use processors.
        ignore: Files that may lie in the directory unlisted, with exactly these bytes: the manifest itself.
        absent: Whether a file, by path, is one that other hosts hold: it may be missing here, and is not read unless
            `wanted` names it.

    Yields:
        An iterator of batches, in which every wanted file is exactly once.

    Raises:
        FileSetError: files are missing, unlisted, no regular files, or of another length; every one is a finding.
        DigestMismatchError: files of a batch are not the signed ones; every one of that batch is a finding.
        StagingError: a file does not fit the budget, or could not be read; or what was made from batches before
            leaves no room for the next.
        ConfigError: `threads` is less than 1, or `wanted` names what the manifest does not list.
    """
    threads = _threads(threads)
    files = _wanted_files(trusted.manifest, wanted, absent)
    named = frozenset(wanted or ())
    with Root(directory) as root:
        _require_file_set(
            root, trusted.manifest, ignore, lambda path: bool(absent and absent(path)) and path not in named
        )
        # Indexes are kept until the end, beside what is staged.
        kept = sum(file.nbytes for file in files if file.entry.format == "index")
        limit = max(0, _memory(memory_budget)[0] - kept)
        # Two batches shall fit, so that one is read while the other is used.
        room = max(1, min(BATCH_BYTES, limit // 2) // mmap.PAGESIZE) * mmap.PAGESIZE
        # Indexes before all: a data file of a bundle can be without tensors, and is read by one as well.
        plans = _plan([file for file in files if file.entry.format == "index"], room=room, alone=room)
        bare = [file for file in files if not file.entry.tensors and file.entry.format != "index"]
        plans += _plan(bare, room=room, alone=room)
        rest = sorted((file for file in files if file.entry.tensors), key=lambda file: -file.nbytes)
        plans += _plan(rest, room=room, alone=room)
        for plan in plans:
            if plan.cost > limit:
                _refuse_file(plan, kept, memory_budget)
        # All alike, so that each can take the place of another; but no larger than what there is.
        arena_bytes = room if len(plans) > 1 else 0
        with _Reader(
            root,
            trusted,
            [[plan] for plan in plans],
            limit=limit,
            arena_bytes=arena_bytes,
            threads=threads,
            progress=progress,
        ) as reader:
            try:
                yield reader.batches()
            finally:
                reader.end_batch()


def _threads(threads: int | None) -> int:
    if threads is None:
        return n_processors()
    if threads < 1:
        raise ConfigError(f"expected at least 1 thread to stage with, found {threads}")
    return threads


def _require_file_set(
    root: Root, manifest: Manifest, ignore: Mapping[str, bytes], absent: Callable[[str], bool] | None = None
) -> None:
    findings = check_file_set(root, manifest, ignore=ignore, absent=absent)
    if findings:
        raise FileSetError(*findings)


def _wanted_files(
    manifest: Manifest,
    wanted: Mapping[str, tuple[range, ...] | None] | None = None,
    absent: Callable[[str], bool] | None = None,
) -> list[_Wanted]:
    algorithm = partial(_algorithm, blake3=has_blake3())
    if wanted is None:
        here = (entry for entry in manifest.files if absent is None or not absent(entry.path))
        return [_Wanted(entry, algorithm(entry)) for entry in here]
    listed = manifest.by_path
    if unlisted := [path for path in wanted if path not in listed]:
        raise ConfigError(f"expected files that the manifest lists, found {escape(unlisted[0])}")
    entries = ((listed[path], ranges) for path, ranges in wanted.items())
    return [_Wanted(entry, algorithm(entry), _needed(entry, ranges)) for entry, ranges in entries]


def _needed(entry: FileEntry, ranges: tuple[range, ...] | None) -> tuple[range, ...] | None:
    """Widen ranges to chunks, with those that a scan of the file cannot do without; None for the whole file."""
    if ranges is None or entry.chunks is None:
        return None
    for part in ranges:
        if part.step != 1 or part.start < 0 or part.stop > entry.size:
            raise ConfigError(f"expected ranges of the {entry.size} bytes of {escape(entry.path)}, found {part}")
    chunks = {index for part in (*ranges, *_scanned(entry)) for index in _chunks_of(part)}
    if len(chunks) == -(-entry.size // CHUNK_BYTES):
        return None
    joined: list[range] = []
    for index in sorted(chunks):
        start, stop = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, entry.size)
        if joined and joined[-1].stop == start:
            joined[-1] = range(joined[-1].start, stop)
        else:
            joined.append(range(start, stop))
    return tuple(joined)


def _scanned(entry: FileEntry) -> Iterator[range]:
    """Yield what a scan reads: both ends, by which it knows formats, and what is outside of the listed payloads.

    What is written inline is outside of them; and parsers read by the window, so beyond the byte that they need.
    """
    yield from (range(1), range(entry.size - 1, entry.size))
    position = 0
    for tensor in sorted((t for t in entry.tensors if not t.inline), key=lambda tensor: tensor.offset):
        if tensor.offset > position:
            yield range(position, min(tensor.offset + WINDOW_BYTES, entry.size))
        position = max(position, tensor.offset + tensor.nbytes)
    if position < entry.size:
        yield range(position, entry.size)


def _chunks_of(part: range) -> range:
    """Return the indices of the chunks that a range of a file's bytes touches."""
    return range(part.start // CHUNK_BYTES, -(-part.stop // CHUNK_BYTES)) if part else range(0)


def check_file_set(
    root: Root,
    manifest: Manifest,
    *,
    ignore: Mapping[str, bytes] = _NOTHING,
    absent: Callable[[str], bool] | None = None,
) -> list[Finding]:
    """Compare what lies below `root` with what the manifest lists, by path, kind and length; empty where they agree.

    All that is wrong is found in one run, in hidden directories too, and nothing is opened but directories.

    Args:
        root: The open directory.
        manifest: What shall be in it.
        ignore: Files that may be there without being listed, with exactly these bytes.
        absent: Whether a listed file, by path, may be missing.

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
    missing = [entry for path, entry in listed.items() if path not in present and not (absent and absent(path))]
    # Nobody knows what is below a directory that could not be entered.
    closed = {finding.file for finding in findings if finding.code in {"unreadable", "too-deep", "too-many-files"}}
    shards = _count_shards(manifest) if missing else {}
    renamed = _renamed(missing, unlisted)
    findings += [_missing(root, entry, closed, shards, renamed.get(entry.path)) for entry in missing]
    now_called = {new: old for old, new in renamed.items()}
    for walked in unlisted:
        message = "expected only files that the manifest lists, found another"
        old = now_called.get(walked.path)
        if old is not None:
            hint = f"if it is {escape(old)} renamed, give it that name"
        elif walked.path.endswith(".json"):
            # Publishers put the manifest there; the one that is given may lie beside what it lists, a copy may not.
            hint = "move it out of the directory; or, if it is the manifest, give this one with -m"
        else:
            hint = "move it out of the directory"
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


def _size_mismatch(entry: FileEntry, found: str) -> Finding:
    message = f"expected the signed {entry.size} bytes, found {found}"
    return Finding("size-mismatch", message, file=entry.path, hint="fetch the file again from its publisher")


def _plan(files: Iterable[_Wanted], *, room: int, alone: int) -> list[_Plan]:
    """Decide where each file goes, in their order.

    Args:
        files: The files.
        room: Most bytes of an arena that several share.
        alone: Longest file that shares one; so does none that is read in part.
    """
    plans: list[_Plan] = []
    slab: list[tuple[_Wanted, int]] = []
    filled = 0
    for file in files:
        entry = file.entry
        # The offset is a hint that the scan checks again: a wrong one costs a copy later on, nothing else.
        payload = entry.tensors[0].offset if entry.tensors else 0
        if entry.size > alone or file.present is not None:
            start = -payload % ALIGNMENT_BYTES
            parts = file.present and tuple(range(start + part.start, start + part.stop) for part in file.present)
            plans.append(_plan_of([(file, start)], start + entry.size, parts))
            continue
        start = filled + -(filled + payload) % ALIGNMENT_BYTES
        if slab and start + entry.size > room:
            plans.append(_plan_of(slab, filled))
            slab, start = [], -payload % ALIGNMENT_BYTES
        slab.append((file, start))
        filled = start + entry.size
    if slab:
        plans.append(_plan_of(slab, filled))
    return plans


def _plan_of(slots: Sequence[tuple[_Wanted, int]], nbytes: int, parts: tuple[range, ...] | None = None) -> _Plan:
    return _Plan(page_bytes([range(max(1, nbytes))]), tuple(slots), parts)


def _memory(budget: int | None) -> tuple[int, str]:
    """Return how many bytes may be taken, and what that limit is called."""
    return (available_memory(), "available memory") if budget is None else (budget, "the memory budget")


def _require_memory(needed: int, budget: int | None) -> None:
    limit, name = _memory(budget)
    if needed > limit:
        message = f"staging all files at once takes {needed} bytes, {name} is {limit} bytes"
        raise StagingError(message, hint=_more_room(needed, budget))


def _more_room(needed: int, budget: int | None) -> str:
    """Say what helps: only who set no budget is short of the machine's memory."""
    if budget is not None:
        return f"give --memory-budget {needed} or more"
    return f"free memory, or give --memory-budget {needed} if you know that there is as much"


def _refuse_file(plan: _Plan, kept: int, budget: int | None) -> NoReturn:
    """Refuse a file that does not fit beside the bytes of the indexes, which are kept."""
    file, _ = max(plan.slots, key=lambda slot: slot[0].nbytes)
    limit, name = _memory(budget)
    beside = f" beside {kept} bytes of indexes" if kept else ""
    message = f"staging {escape(file.entry.path)} takes {plan.cost} bytes{beside}, {name} is {limit} bytes"
    raise StagingError(message, hint=_more_room(plan.cost + kept, budget))
