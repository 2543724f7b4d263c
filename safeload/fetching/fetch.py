"""Fetch: a signed manifest and mirrors that nobody trusts -> a directory, whole or not at all.

The manifest decides names, sizes and digests. A piece is written only after its digest matched; a file is scanned and
hashed as a whole, in one pass that follows the pieces as they arrive, before it gets its name; the directory gets its
name when every file in it has one.

A mirror without ranges sends a file whole or not at all. It is read only for what no mirror with ranges brought: one
answer at a time, from the file's start, chunk by chunk, and what is there already is passed over.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, TypeAlias, Unpack

from safeload.digests import CHUNK_BYTES
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FetchError,
    FileSetError,
    Finding,
    FormatError,
    LimitError,
    PolicyError,
    RejectedError,
    StagingError,
    escape,
    reason,
)
from safeload.expecting import Expectations, Expected, evidence, require_trust_outside
from safeload.fetching.http import watched
from safeload.fetching.mirrors import Attempts, Mirror, Mirrors, Pacing, Throttle
from safeload.fetching.partial import (
    PartialFile,
    Tree,
    WorkArea,
    aligned_memory,
    chunk_digests,
    chunk_range,
    require_space,
    target_of,
    work_area_of,
)
from safeload.fetching.quarantine import Quarantine
from safeload.fetching.sources import Access, HttpSource, open_source
from safeload.files import Root, StreamSource
from safeload.manifest import FileEntry, Manifest, TrustedManifest
from safeload.parallel import Meter, run
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import FileReport, Progress, Report
from safeload.scanning import (
    check_against,
    check_digest,
    file_report,
    index_findings,
    parse,
    peek_limit,
    policy_facts,
    refused,
    require_policy_outside,
    signed_tables,
    verify_files,
)
from safeload.staging import check_file_set
from safeload.trust.oms import is_bundle
from safeload.trust.store import Trust
from safeload.verifying import manifest_in, read_manifest

MAX_WORKERS: Final = 8
"""Pieces that are fetched at a time, over all mirrors."""

_ROOMS: Final = 3
"""Pieces of more than `_SMALL_BYTES` among them. Each is held in memory until its digest is known: 48 MiB in all."""

_NEAR_PIECES: Final = 8
"""How far behind what arrives the reader of a file may be to have pieces kept in memory for it. One that is further
behind hashes what was on disk before, and that can take long."""

_SMALL_BYTES: Final = 1024 * 1024
"""Up to here a piece takes memory of its own; with many small files it is the waiting that costs, not the bytes."""

_FILES_AT_A_TIME: Final = 6
"""Files that are worked on at a time: those whose pieces arrive, and some that are only hashed or being named."""

_POLL_SECONDS: Final = 0.1

_WHOLE_STATUS: Final = 200
"""What a server answers that sends a file whole whichever range of it is asked for (RFC 9110, 14.2)."""

_REPAIRED: Final = frozenset({"empty-file", "missing-file", "size-mismatch"})
"""Findings about a directory that fetching puts right. Anything else in it is for its owner to look at."""

EventKind: TypeAlias = Literal["kept", "piece", "retry", "wrong-bytes", "file", "refused", "published"]


@dataclass(frozen=True, slots=True)
class FetchEvent:
    """Something that happened, for whoever watches.

    Attributes:
        kind: "kept": bytes of a file were there already, and right. "piece": some of it arrived, and is right.
            "retry": a mirror failed and is asked again, or another. "wrong-bytes": a mirror sent others than were
            signed. "file": it is whole, scanned, and has its name. "refused": it is not what the policy allows or the
            manifest says. "published": the directory is complete, and has its name.
        path: The file, as the manifest names it; the directory for "published".
        done: Bytes of the file that are there and right.
        size: Its length in bytes.
        mirror: The mirror that it is about, by name, or None.
        message: What to tell people, or None.
    """

    kind: EventKind
    path: str
    done: int = 0
    size: int = 0
    mirror: str | None = None
    message: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the event as an object for a line of JSON."""
        shown = {"path": self.path, "done": self.done, "size": self.size, "mirror": self.mirror}
        return {"event": self.kind, **shown, "message": self.message}


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What a fetch would do now.

    Attributes:
        trusted: The manifest, and who signed it.
        present: Files that are there and right, by path.
        missing: Files to fetch, and how many bytes each takes at most.
        facts: What a report would say of the run.
    """

    trusted: TrustedManifest
    present: tuple[str, ...]
    missing: tuple[tuple[str, int], ...]
    facts: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes to fetch at most."""
        return sum(nbytes for _, nbytes in self.missing)


def fetch(
    source: str | Path | Mirror,
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    mirrors: Sequence[str | Path | Mirror] = (),
    policy: str | Path | Policy = DEFAULT_POLICY,
    access: Access | None = None,
    incremental: bool = False,
    reuse: Sequence[str | Path] = (),
    connections: int = 4,
    bandwidth: int | None = None,
    pacing: Pacing | None = None,
    progress: Progress | None = None,
    watch: Callable[[FetchEvent], None] | None = None,
    **expected: Unpack[Expectations],
) -> Report:
    """Bring a checkpoint whole, or not at all, from mirrors that may lie.

    What was verified before an interruption is kept beside the directory, hashed again by the next run, and not fetched
    again. Refused files go to the directory's quarantine.

    Args:
        source: Where the files are: a URL, a directory, or anything that can be asked for ranges.
        directory: Where they shall be. It must not exist, or be empty; or see `incremental`.
        manifest: The signed manifest: a path, or the bytes of the envelope.
        trust: Who may sign.
        mirrors: Other places with the same files.
        policy: What may be in the files.
        access: How sources that are given as text may be reached.
        incremental: Whether to put each file into the directory as soon as it is whole and scanned, and to complete
            and repair what is there. Otherwise the directory appears when it is complete.
        reuse: Directories with other revisions: what has the signed digest there is taken from there.
        connections: Most connections to each mirror at a time.
        bandwidth: Most bytes a second in all; None for no limit.
        pacing: How patient to be with mirrors.
        progress: Told of the phase "fetching".
        watch: Told what happens, from the calling thread.
        **expected: What to hold the manifest against, as for `load`.

    Returns:
        The report, whose verdict is "accepted". Its fact "fetch" says what came from which mirror, and which lied.

    Raises:
        SignatureError: Not enough trusted keys signed this manifest.
        ManifestError: The manifest breaks its schema, or is not the one that was pinned or expected.
        RevokedError: The manifest, or a key that it needs, was revoked.
        ExpiredError: The manifest is past its expiry, and not pinned.
        RollbackError: The manifest is older than one that was accepted before, or contradicts it.
        FileSetError: The directory has files that the manifest does not list.
        DigestMismatchError: No mirror has the signed bytes of a file, and one had others.
        FormatError: A file breaks its format.
        LimitError: A file asks for more than the policy's limits.
        PolicyError: A file holds what the policy does not allow, or the purpose needs files that are not there.
        ConfigError: An argument is wrong, or the directory holds something else.
        FetchError: Files could not be had from any mirror, or another fetch is at work on the directory.
        StagingError: There is no room on the disk, or it cannot be written to.
    """
    report = fetch_and_report(
        source,
        directory,
        manifest=manifest,
        trust=trust,
        mirrors=mirrors,
        policy=policy,
        access=access,
        incremental=incremental,
        reuse=reuse,
        connections=connections,
        bandwidth=bandwidth,
        pacing=pacing,
        progress=progress,
        watch=watch,
        **expected,
    )
    if report.is_accepted:
        return report
    errors = [file.error for file in report.files if file.error is not None]
    kind = DigestMismatchError if DigestMismatchError in errors else next(iter(errors), FileSetError)
    raise kind(*report.all_findings)


def fetch_and_report(
    source: str | Path | Mirror,
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    mirrors: Sequence[str | Path | Mirror] = (),
    policy: str | Path | Policy = DEFAULT_POLICY,
    access: Access | None = None,
    incremental: bool = False,
    reuse: Sequence[str | Path] = (),
    connections: int = 4,
    bandwidth: int | None = None,
    pacing: Pacing | None = None,
    progress: Progress | None = None,
    watch: Callable[[FetchEvent], None] | None = None,
    **expected: Unpack[Expectations],
) -> Report:
    """Do what `fetch` does, and return the report also where files were refused; nothing is published then.

    What is wrong with the manifest, the arguments, the directory or the disk is raised all the same.
    """
    if connections < 1 or (bandwidth is not None and bandwidth < 1):
        raise ConfigError("expected at least one connection, and one byte a second")
    wanted = _prepare(directory, manifest, trust, policy, expected)
    with contextlib.ExitStack() as stack:
        if (found := _already_there(wanted, incremental=incremental, progress=progress)) is not None:
            return found
        opened = [_opened(item, access, stack) for item in (source, *mirrors)]
        area = stack.enter_context(WorkArea(wanted.target))
        seeds = [stack.enter_context(Root(folder)) for folder in reuse]
        job = _Fetch(
            wanted=wanted,
            area=area,
            mirrors=Mirrors(opened, connections=connections, pacing=pacing),
            workers=min(MAX_WORKERS, connections * len(opened)),
            throttle=Throttle(bandwidth),
            seeds=seeds,
            incremental=incremental,
        )
        return job.run(progress or (lambda *_: None), watch or (lambda _: None))


def plan(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    **expected: Unpack[Expectations],
) -> FetchPlan:
    """Say what a fetch would bring, without asking any mirror and without writing anything.

    Files that are there already, in the directory or from an interrupted run, are hashed, not believed.

    Args:
        directory: Where the files shall be.
        manifest: The signed manifest.
        trust: Who may sign.
        policy: What may be in the files.
        **expected: What to hold the manifest against.

    Raises:
        RejectedError: The manifest is refused; see `fetch`.
        ConfigError: An argument is wrong.
        StagingError: A directory that is there cannot be read.
    """
    wanted = _prepare(directory, manifest, trust, policy, expected)
    entries = wanted.manifest.files
    present: dict[str, None] = {}
    for folder in (wanted.target, work_area_of(wanted.target) / "files"):
        if not folder.is_dir():
            continue
        with Root(folder) as root:
            for entry in entries:
                if entry.path not in present and _is_right(root, entry):
                    present[entry.path] = None
    missing = tuple((entry.path, entry.size) for entry in entries if entry.path not in present)
    return FetchPlan(wanted.trusted, tuple(present), missing, wanted.facts())


# ---------------------------------------------------------------- before the first byte


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to be fetched, and what it is held against."""

    target: Path
    trusted: TrustedManifest
    rules: Policy
    expectation: Expected
    itself: Mapping[str, bytes]

    @property
    def manifest(self) -> Manifest:
        return self.trusted.manifest

    def facts(self) -> dict[str, Any]:
        expectation = self.expectation
        return {
            **policy_facts(self.rules),
            **expectation.facts(self.trusted),
            **evidence(self.trusted, expectation.now),
        }


def _prepare(
    directory: str | Path,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy,
    expected: Expectations,
) -> _Wanted:
    target = target_of(directory)
    require_trust_outside(trust, directory)
    require_policy_outside(policy, directory)
    rules = load_policy(policy)
    envelope, shown = read_manifest(manifest)
    if is_bundle(envelope):
        raise ConfigError(
            f"{escape(shown)} is a bundle, which lists no sizes: nothing can be fetched by it",
            hint="get a manifest of safeload from its publisher",
        )
    expectation = Expected.of(directory, trust, **expected)
    trusted = expectation.verify(envelope, shown)
    if lacking := expectation.lacking(trusted):
        raise PolicyError(*lacking)
    return _Wanted(target, trusted, rules, expectation, manifest_in(target, manifest, envelope))


def _opened(item: str | Path | Mirror, access: Access | None, stack: contextlib.ExitStack) -> Mirror:
    if isinstance(item, str | Path):
        source = stack.enter_context(open_source(str(item), access or Access()))
        if isinstance(source, HttpSource):
            source.require_folder()
        return source
    return item


def _already_there(wanted: _Wanted, *, incremental: bool, progress: Progress | None) -> Report | None:
    """Return the report of a directory that is complete, None where there is something to do.

    Raises:
        ConfigError: There is something else in the directory's place, and it is not to be completed.
    """
    target = wanted.target
    shown = escape(str(target))
    try:
        if not target.parent.is_dir():
            message = f"expected a directory to fetch into, found no {escape(str(target.parent))}"
            raise ConfigError(message, hint="make it first")
        if not os.path.lexists(target):
            return None
        if not target.is_dir():
            raise ConfigError(f"{shown} is no directory", hint="name another")
        if target.stat().st_dev != target.parent.stat().st_dev:
            # Nothing can be renamed from beside it.
            raise ConfigError(f"{shown} is where a file system begins", hint="name a directory in it")
        is_empty = not any(target.iterdir())
    except OSError as err:
        raise ConfigError(f"cannot look at {shown}: {reason(err)}", hint="check the path") from err
    if incremental or is_empty:
        return None
    with Root(target) as root:
        findings = check_file_set(root, wanted.manifest, ignore=wanted.itself)
    if not findings:
        report = verify_files(target, wanted.trusted, policy=wanted.rules, ignore=wanted.itself, progress=progress)
        if report.is_accepted:
            wanted.expectation.record(wanted.trusted)
            if work_area_of(target).is_dir():
                # Of a run that was ended after the directory had its name.
                with contextlib.suppress(ConfigError, FetchError, StagingError), WorkArea(target) as left:
                    left.remove()
            return Report(report.files, (), {**wanted.facts(), "fetch": _fetch_facts(0, wanted.manifest.totals.bytes)})
        findings = list(report.all_findings)
    first = findings[0]
    raise ConfigError(
        f"{shown} is there already and is not this checkpoint: {escape(first.file or '')}: {first.message}",
        hint="--incremental completes and repairs it in place; or name another directory",
    )


def _is_right(root: Root, entry: FileEntry) -> bool:
    try:
        with StreamSource(root.open(entry.path), entry.path, hashing=True) as stream:
            return stream.size == entry.size and stream.finish() == entry.sha256
    except (FileSetError, StagingError):
        return False


def _fetch_facts(fetched: int, kept: int, mirrors: Mirrors | None = None) -> dict[str, Any]:
    lines = () if mirrors is None else mirrors.lines
    return {
        "fetched_bytes": fetched,
        "kept_bytes": kept,
        "mirrors": [
            {
                "name": line.mirror.name,
                "bytes": line.nbytes,
                "failures": line.failures,
                "wrong_pieces": line.lies,
                "given_up": line.gone,
            }
            for line in lines
        ],
    }


# ---------------------------------------------------------------- one file's pieces


class _Arrival:
    """Which pieces of a file are there, for a reader that follows them and must not see what is not verified."""

    def __init__(
        self,
        entry: FileEntry,
        good: Collection[int],
        alive: Callable[[], object],
        passed: Callable[[int], object],
    ) -> None:
        digests = chunk_digests(entry)
        self.size = entry.size
        self._piece_bytes = CHUNK_BYTES if digests or not entry.size else entry.size
        self._missing = set(range(-(-entry.size // self._piece_bytes))) - set(good)
        self._failure: Exception | None = None
        self._alive = alive
        self._passed = passed
        self._position = 0
        self._is_read = True
        self._changed = threading.Condition()
        self._refusals: Counter[int] = Counter()
        self._is_claimed = False
        # Mirrors, by index. Those without ranges are excluded too: from pieces, not from sending the file whole.
        self.excluded: set[int] = set()
        self.with_ranges: set[int] = set()
        self.without_ranges: set[int] = set()
        self.lies: list[Finding] = []

    @property
    def missing(self) -> list[int]:
        """The pieces to fetch: first the last, which a parser may look at, and which shows whether there are ranges."""
        with self._changed:
            found = sorted(self._missing)
        return [*found[-1:], *found[:-1]]

    def lacks(self, index: int) -> bool:
        """Whether a piece is missing."""
        with self._changed:
            return index in self._missing

    @property
    def done(self) -> int:
        """Bytes that are there, about: the last piece counts as if it were as long as the others."""
        return max(0, self.size - len(self._missing) * self._piece_bytes)

    def arrived(self, index: int) -> bool:
        """Record that a piece is there and verified, and return whether it was missing."""
        with self._changed:
            was_missing = index in self._missing
            self._missing.discard(index)
            self._changed.notify_all()
            return was_missing

    def claim_the_whole(self) -> bool:
        """Whether to fetch what is missing from mirrors without ranges; True for the first who asks, and no other."""
        with self._changed:
            is_claimed, self._is_claimed = self._is_claimed, True
            return not is_claimed and self._failure is None

    def count_refusals(self, mirror: int, *, refused: bool) -> int:
        """Count how often in a row a mirror answered, and not with a piece of this file; return that number."""
        with self._changed:
            self._refusals[mirror] = self._refusals[mirror] + 1 if refused else 0
            return self._refusals[mirror]

    def failed(self, error: Exception) -> None:
        """Record that a piece will not come."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def require(self, where: range) -> None:
        """Wait until some bytes are there.

        Raises:
            Exception: What `failed` was told.
        """
        stop = min(where.stop, self.size)
        if where.start >= stop:
            return
        needed = range(where.start // self._piece_bytes, (stop - 1) // self._piece_bytes + 1)
        while True:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if not any(index in self._missing for index in needed):
                    return
                self._changed.wait(_POLL_SECONDS)
            self._alive()

    def is_soon_read(self, index: int) -> bool:
        """Whether the reader comes to a piece soon, as far as can be told."""
        with self._changed:
            # The last piece comes first where it can, for the parser to peek at, and is read at the end. Where it
            # comes last nothing is read before.
            is_in_turn = (index + 1) * self._piece_bytes < self.size or self._missing == {index}
            is_near = index <= self._position // self._piece_bytes + _NEAR_PIECES
            return self._is_read and is_in_turn and is_near and not self.without_ranges

    def not_read(self) -> None:
        """Be told that nobody reads the file any more."""
        with self._changed:
            self._is_read = False

    def advance(self, nbytes: int) -> None:
        """Be told that so many bytes were read and hashed, and wait until the next ones are there."""
        self._position += nbytes
        self._passed(self._position)
        self.require(range(self._position, self._position + 1))


@dataclass(slots=True)
class _Room:
    """Memory that one piece is put into while it arrives.

    Attributes:
        memory: The memory, at least as long as the piece.
        is_large: Whether it is of those that there are few of, and that begin with a page.
        piece: The file and the index of the verified piece in it, for whoever hashes that file next; or None.
    """

    memory: bytearray | mmap.mmap
    is_large: bool = False
    piece: tuple[str, int] | None = None


class _Rooms:
    """The memory for large pieces, used again and again: fresh pages cost more than the hash does. Thread-safe.

    A verified piece that is soon hashed as part of its file stays in its room until it was, so that it need not come
    back from disk; what arrives waits for that. Where nothing moves, for example because the piece before it is stuck
    on its way, the room is taken from it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_unmade = _ROOMS
        self._free: list[_Room] = []
        self._kept: dict[tuple[str, int], _Room] = {}
        self._lent: dict[str, _Room] = {}
        # First come, first served: of two pieces of a file the later one must not have the last room.
        self._waiting: deque[object] = deque()
        self._moved_at = 0.0

    def take(self, alive: Callable[[], object]) -> _Room:
        """Return a room, waiting for one; what `alive` raises ends that.

        Raises:
            StagingError: There is no memory for it.
        """
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._moved_at = time.monotonic()
            try:
                while True:
                    alive()
                    if self._waiting[0] is ticket and (room := self._next()) is not None:
                        return room
                    self._changed.wait(_POLL_SECONDS)
            finally:
                self._waiting.remove(ticket)
                self._moved_at = time.monotonic()
                self._changed.notify_all()

    def _next(self) -> _Room | None:
        if self._free:
            return self._free.pop()
        if self._n_unmade:
            # Made with its first use, so that what fetches little takes little.
            room = _Room(aligned_memory(CHUNK_BYTES), is_large=True)
            self._n_unmade -= 1
            return room
        if self._kept and time.monotonic() - self._moved_at > _POLL_SECONDS:
            # The last one kept is the one that is read last.
            _, room = self._kept.popitem()
            room.piece = None
            return room
        return None

    def give(self, room: _Room) -> None:
        """Have a room back, or keep it for the reader of the piece that is in it."""
        with self._changed:
            # Two may have fetched the same piece.
            if room.piece is not None and room.piece not in self._kept:
                self._kept[room.piece] = room
            else:
                self._free_again(room)
            self._moved_at = time.monotonic()

    def _free_again(self, room: _Room) -> None:
        room.piece = None
        self._free.append(room)
        self._changed.notify_all()

    def lend(self, path: str, offset: int, nbytes: int) -> memoryview | None:
        """Return bytes of a file from an offset on, as `StreamSource` asks for them, None where they are not kept.

        They stay what they are until `pass_by` says that their piece was read to its end.
        """
        index, at = divmod(offset, CHUNK_BYTES)
        with self._changed:
            room = self._lent.get(path)
            if room is None or room.piece != (path, index):
                room = self._kept.pop((path, index), None)
                if room is None:
                    return None
                self._lent[path] = room
            self._moved_at = time.monotonic()
        return memoryview(room.memory)[at : at + nbytes]

    def pass_by(self, path: str, position: int, size: int) -> None:
        """Be told how far a file was read: what was lent of it is free where that is the end of a piece."""
        if position % CHUNK_BYTES and position < size:
            return
        with self._changed:
            if (room := self._lent.pop(path, None)) is not None:
                self._free_again(room)

    def forget(self, path: str) -> None:
        """Have back the rooms that were kept for the reader of a file."""
        with self._changed:
            for piece in [piece for piece in self._kept if piece[0] == path]:
                self._free_again(self._kept.pop(piece))
            if (room := self._lent.pop(path, None)) is not None:
                self._free_again(room)


class _Following:
    """A `formats.Source` over a file that is still arriving."""

    def __init__(self, stream: StreamSource, arrival: _Arrival) -> None:
        self.size = stream.size
        self._stream = stream
        self._arrival = arrival
        arrival.advance(0)

    def read(self, offset: int, nbytes: int) -> bytes:
        # The stream hashes what lies between, piece by piece, and waits for each in `_Arrival.advance`.
        return self._stream.read(offset, nbytes)

    def payload(self, offset: int, nbytes: int) -> None:
        self._stream.payload(offset, nbytes)

    def checksum(self, offset: int, nbytes: int, crc32: int) -> None:
        self._stream.checksum(offset, nbytes, crc32)

    def peek(self, offset: int, nbytes: int) -> bytes:
        self._arrival.require(range(offset, offset + nbytes))
        return self._stream.peek(offset, nbytes)


class _Siblings:
    """The accepted files of one directory of the checkpoint."""

    def __init__(self, job: _Fetch, path: str) -> None:
        self._job = job
        self._folder = path[: len(path) - len(PurePosixPath(path).name)]

    def read(self, name: str, limit: int) -> bytes | None:
        entry = self._job.accepted.get(self._folder + name)
        if entry is None:
            return None
        if entry.size > limit:
            message = f"expected at most {limit} bytes of {escape(name)}, found {entry.size}"
            raise LimitError(Finding("too-much-inline", message))
        with StreamSource(self._job.root.open(entry.path), entry.path) as stream:
            data = stream.read(0, entry.size)
        return data if hashlib.sha256(data).hexdigest() == entry.sha256 else None


@dataclass(frozen=True, slots=True)
class _Lie:
    """Bytes that a mirror sent instead of those that were signed; digests in hexadecimal."""

    where: range
    expected: str
    found: str


@dataclass(slots=True)
class _Outcome:
    """What became of one file: a report, or the reason why there is none."""

    report: FileReport | None = None
    error: FetchError | None = None


@dataclass(slots=True)
class _Counts:
    """Bytes that were fetched and kept."""

    fetched: int = 0
    kept: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, fetched: int = 0, kept: int = 0) -> None:
        with self.lock:
            self.fetched += fetched
            self.kept += kept


# ---------------------------------------------------------------- the run


class _Fetch:
    """One run, from the first look at what is there to the directory's name."""

    def __init__(
        self,
        *,
        wanted: _Wanted,
        area: WorkArea,
        mirrors: Mirrors,
        workers: int,
        throttle: Throttle,
        seeds: Sequence[Root],
        incremental: bool,
    ) -> None:
        self._wanted = wanted
        self._area = area
        self._mirrors = mirrors
        self._throttle = throttle
        self._seeds = seeds
        self._incremental = incremental
        self._quarantine = Quarantine(wanted.target)
        self._events: queue.SimpleQueue[FetchEvent] = queue.SimpleQueue()
        self._counts = _Counts()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="safeload-fetch")
        self._rooms = _Rooms()
        self._tables = signed_tables(wanted.trusted)
        self._place = wanted.target if incremental else area.files
        self.root = Root(self._place)
        self.accepted: dict[str, FileEntry] = {}
        self._walked: dict[int, dict[int, list[str]]] = {}

    def run(self, progress: Progress, watch: Callable[[FetchEvent], None]) -> Report:
        """Bring every file, then publish, or say what is wrong."""
        entries = self._wanted.manifest.files
        # An index says what its neighbors are, so it comes first.
        first = [entry for entry in entries if entry.format == "index"]
        lots = [lot for lot in (first, [entry for entry in entries if entry.format != "index"]) if lot]
        total = self._wanted.manifest.totals.bytes
        outcomes: dict[str, _Outcome] = {}
        try:
            with contextlib.ExitStack() as stack:
                # Whatever ends this, no thread goes on; what they are at is given up at its next piece.
                stack.callback(self._pool.shutdown, wait=True, cancel_futures=True)
                tree = self._prepare_place(stack)
                before = 0
                for lot in lots:
                    found = run(
                        lot,
                        lambda entry, meter: self._bring(tree, entry, meter),
                        size=lambda entry: entry.size,
                        threads=_FILES_AT_A_TIME,
                        phase="fetching",
                        progress=self._telling(progress, watch, before, total),
                    )
                    outcomes |= {entry.path: outcome for entry, outcome in zip(lot, found, strict=True)}
                    before += sum(entry.size for entry in lot)
                report = self._report(outcomes)
                if report.is_accepted:
                    self._publish(tree)
            return report
        finally:
            self._drain(watch)

    def _prepare_place(self, stack: contextlib.ExitStack) -> Tree:
        wanted = self._wanted
        if self._incremental:
            try:
                wanted.target.mkdir(exist_ok=True)
            except OSError as err:
                raise StagingError(f"cannot make {escape(str(wanted.target))}: {reason(err)}") from err
        stack.enter_context(self.root)
        if self._incremental:
            found = check_file_set(self.root, wanted.manifest, ignore=wanted.itself)
            if foreign := [finding for finding in found if finding.code not in _REPAIRED]:
                raise FileSetError(*foreign)
        self._area.clean(wanted.manifest.files)
        require_space(self._area.path, self._missing_sizes())
        try:
            fd = os.open(self._place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as err:
            raise StagingError(f"cannot open {escape(str(self._place))}: {reason(err)}") from err
        tree = Tree(fd, str(wanted.target))
        stack.callback(tree.close)
        return tree

    def _missing_sizes(self) -> list[int]:
        """Return how much disk each file takes that is not there, less what an earlier run left of it."""
        sizes = []
        for entry in self._wanted.manifest.files:
            try:
                fd = self.root.open(entry.path)
            except (FileSetError, StagingError):
                sizes.append(max(0, entry.size - self._area.allocated(entry)))
                continue
            try:
                if os.fstat(fd).st_size != entry.size:
                    sizes.append(entry.size)
            finally:
                os.close(fd)
        return sizes

    def _telling(
        self, progress: Progress, watch: Callable[[FetchEvent], None], before: int, total: int
    ) -> Callable[[str, int, int], None]:
        def tell(phase: str, done: int, _: int) -> None:
            self._drain(watch)
            progress(phase, before + done, total)

        return tell

    def _drain(self, watch: Callable[[FetchEvent], None]) -> None:
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            watch(event)

    def _report(self, outcomes: Mapping[str, _Outcome]) -> Report:
        errors = {path: outcome.error for path, outcome in outcomes.items() if outcome.error is not None}
        reports = [outcome.report for outcome in outcomes.values() if outcome.report is not None]
        if errors and not any(report.findings for report in reports):
            path, error = next(iter(errors.items()))
            again = "--mirror names another place to ask"
            if self._counts.fetched or self._counts.kept:
                again = f"run again to go on: what was verified is kept; {again}"
            raise FetchError(
                f"{len(errors)} of {len(outcomes)} files could not be fetched; {escape(path)}: {error.message}",
                mirror=error.mirror,
                status=error.status,
                hint=again if error.hint is None else f"{error.hint}; {again}",
            ) from error
        files = []
        for entry in self._wanted.manifest.files:
            outcome = outcomes[entry.path]
            if outcome.report is not None:
                files.append(outcome.report)
            elif outcome.error is not None:
                message = f"expected to fetch it, found no mirror that has it: {outcome.error.message}"
                finding = Finding("not-fetched", message, hint="run again to go on")
                files.append(FileReport(entry.path, "unknown", None, findings=(finding,), error=FileSetError))
        counts = _fetch_facts(self._counts.fetched, self._counts.kept, self._mirrors)
        return Report(tuple(files), (), {**self._wanted.facts(), "fetch": counts})

    def _publish(self, tree: Tree) -> None:
        if not self._incremental:
            tree.sync_all()
        # Recorded before, so that a history that cannot be written leaves nothing published.
        self._wanted.expectation.record(self._wanted.trusted)
        if self._incremental:
            self._area.remove()
        else:
            self._area.publish()
        total = self._wanted.manifest.totals.bytes
        self._tell("published", str(self._wanted.target), done=total, size=total)

    def _tell(
        self,
        kind: EventKind,
        path: str,
        *,
        done: int = 0,
        size: int = 0,
        mirror: str | None = None,
        message: str | None = None,
    ) -> None:
        self._events.put(FetchEvent(kind, path, done, size, mirror, message))

    # ------------------------------------------------------------ one file

    def _bring(self, tree: Tree, entry: FileEntry, meter: Meter) -> _Outcome:
        """Bring one file to its place; what goes wrong with it is returned, what goes wrong with the run is raised."""
        try:
            report = self._found(entry, meter) or self._fetched(tree, entry, meter)
        except FetchError as err:
            return _Outcome(error=err)
        except RejectedError as err:
            findings = tuple(Finding(f.code, f.message, None, f.offset, f.hint) for f in err.findings)
            report = FileReport(entry.path, "unknown", None, findings=findings, error=type(err))
        if not report.findings:
            self.accepted[entry.path] = entry
        return _Outcome(report)

    def _found(self, entry: FileEntry, meter: Meter) -> FileReport | None:
        """Return the report of a file that is in its place with the signed bytes; None where there is none."""
        counted = 0

        def count(nbytes: int) -> None:
            nonlocal counted
            counted += nbytes
            meter.advance(nbytes)

        report = None
        try:
            stream = self._stream(self.root.open(entry.path), entry, count)
        except FileSetError:
            return None
        with stream:
            if stream.size == entry.size:
                report = self._judge(entry, stream, stream)
        if report is None or report.sha256 != entry.sha256:
            meter.advance(-counted)
            return None
        self._counts.add(kept=entry.size)
        self._tell("kept", entry.path, done=entry.size, size=entry.size)
        if report.findings and not self._incremental:
            # It was accepted by another policy than this one. It is put away as if it had come just now.
            self._put_away(entry, report, (self._area.files / entry.path).rename)
        return report

    def _fetched(self, tree: Tree, entry: FileEntry, meter: Meter) -> FileReport:
        def alive() -> None:
            meter.advance(0)

        partial = self._area.open_partial(entry)
        try:
            good = partial.recheck(alive)
            good |= self._seeded(partial, good, meter)
            arrival = _Arrival(entry, good, alive, lambda at: self._rooms.pass_by(entry.path, at, entry.size))
            kept = sum(len(chunk_range(entry, index)) for index in good)
            meter.advance(kept)
            self._counts.add(kept=kept)
            if kept:
                self._tell("kept", entry.path, done=kept, size=entry.size)
            work = self._piece if chunk_digests(entry) else self._whole
            futures: list[Future[None]] = []
            at_hand = functools.partial(self._rooms.lend, entry.path)
            try:
                # One by one: those that were begun are waited for also where another cannot be.
                futures.extend(self._submit(work, partial, index, arrival, meter) for index in arrival.missing)
                with self._stream(os.dup(partial.fd), entry, arrival.advance, at_hand) as stream:
                    report = self._judge(entry, _Following(stream, arrival), stream)
            finally:
                # Pieces that can be had are worth having even if another can not: the next run keeps them.
                arrival.not_read()
                self._rooms.forget(entry.path)
                _wait_for(futures, alive)
                self._rooms.forget(entry.path)
            if report.findings:
                sender = lambda place: os.rename(partial.name, place, src_dir_fd=self._area.partial_fd)  # noqa: E731
                self._put_away(entry, report, sender)
                return report
            partial.sync()
            tree.place(self._area.partial_fd, partial.name, entry.path, sync=self._incremental)
            self._tell("file", entry.path, done=entry.size, size=entry.size)
            return report
        finally:
            partial.close()

    def _submit(
        self,
        work: Callable[[PartialFile, int, _Arrival, Meter], None],
        partial: PartialFile,
        index: int,
        arrival: _Arrival,
        meter: Meter,
    ) -> Future[None]:
        """Have a piece fetched by some thread; whatever ends that early ends the waiting for the piece too."""

        def told() -> None:
            try:
                work(partial, index, arrival, meter)
            except BaseException as err:
                # Nobody looks at this thread before the file was read, and who reads it waits for this piece.
                arrival.failed(err if isinstance(err, Exception) else StagingError("interrupted"))
                raise

        try:
            return self._pool.submit(told)
        except RuntimeError as err:  # the system has no thread for us
            raise StagingError(f"cannot begin to fetch {escape(partial.entry.path)}: {reason(err)}") from err

    def _stream(
        self,
        fd: int,
        entry: FileEntry,
        advance: Callable[[int], None],
        at_hand: Callable[[int, int], memoryview | None] = lambda _, __: None,
    ) -> StreamSource:
        limit = peek_limit(self._wanted.rules)
        return StreamSource(fd, entry.path, hashing=True, peek_limit=limit, advance=advance, at_hand=at_hand)

    def _judge(self, entry: FileEntry, source: StreamSource | _Following, stream: StreamSource) -> FileReport:
        """Scan and hash a file in one pass, and hold it against the manifest and the policy."""
        kind, parsed = parse(source, entry.path, self._wanted.rules, _Siblings(self, entry.path))
        sha256 = stream.finish()
        if stream.refusal is not None and parsed.refusal is None:
            parsed = refused(parsed, stream.refusal)
        parsed = check_digest(entry, sha256, stream.size, check_against(entry, kind, parsed))
        if parsed.index is not None and (findings := index_findings(entry.path, parsed.index, self._tables)):
            parsed = refused(parsed, FormatError(*findings))
        return file_report(entry.path, kind, stream.size, parsed, sha256)

    def _seeded(self, partial: PartialFile, good: Collection[int], meter: Meter) -> set[int]:
        """Take what has the signed digest from the file in this one's place, and from other revisions."""
        entry = partial.entry

        @contextlib.contextmanager
        def lend() -> Iterator[memoryview]:
            # Of the same few as for what arrives: one for each file at a time would be twice the memory.
            with self._room(min(CHUNK_BYTES, entry.size), meter) as room, memoryview(room.memory) as memory:
                yield memory

        missing = set(range(len(chunk_digests(entry)))) - set(good)
        taken: set[int] = set()
        for root in (self.root, *self._seeds):
            if not missing:
                break
            for path in self._same_length(root, entry):
                try:
                    fd = root.open(path)
                except (FileSetError, StagingError):
                    continue
                try:
                    if os.fstat(fd).st_size == entry.size:
                        found = partial.seed(fd, sorted(missing), lambda: meter.advance(0), lend)
                        taken |= found
                        missing -= found
                finally:
                    os.close(fd)
                if not missing:
                    break
        return taken

    def _same_length(self, root: Root, entry: FileEntry) -> Iterator[str]:
        """Yield where a file's bytes may be: at its own path, then elsewhere under the length that it has."""
        yield entry.path
        if root is self.root:
            return
        for walked in self._walks(root).get(entry.size, ()):
            if walked != entry.path:
                yield walked

    def _walks(self, root: Root) -> Mapping[int, Sequence[str]]:
        with self._counts.lock:
            known = self._walked.get(id(root))
            if known is None:
                known = {}
                for walked in root.walk():
                    if walked.finding is None and walked.size:
                        known.setdefault(walked.size, []).append(walked.path)
                self._walked[id(root)] = known
            return known

    def _put_away(self, entry: FileEntry, report: FileReport, move: Callable[[Path], object]) -> None:
        used = [line.mirror.name for line in self._mirrors.lines if line.nbytes]
        record = self._quarantine.add(
            entry.path,
            mirrors=used,
            findings=report.findings,
            expected=entry.sha256,
            found=report.sha256,
            move=move,
        )
        message = f"{report.findings[0].message}; it is in quarantine as {record.id}"
        self._tell("refused", entry.path, size=entry.size, message=message)

    # ------------------------------------------------------------ one piece

    def _piece(self, partial: PartialFile, index: int, arrival: _Arrival, meter: Meter) -> None:
        """Fetch one chunk until its digest is the signed one, from whichever mirror has it, and write it."""
        entry = partial.entry
        where = chunk_range(entry, index)
        if not arrival.lacks(index):
            return  # it came with the whole file
        with self._room(len(where), meter) as room, memoryview(room.memory) as memory:

            def pull(line: int) -> _Lie | None:
                mirror = self._mirrors.lines[line].mirror
                digest = hashlib.sha256()
                at = 0
                with contextlib.closing(self._pull(mirror, entry, where, meter)) as pieces:
                    for piece in pieces:
                        if not where.start and line in arrival.without_ranges:
                            # The start of the whole file, as another piece found out: one such answer is enough.
                            raise FetchError(f"{escape(mirror.name)}: expected ranges, found none", mirror=mirror.name)
                        memory[at : at + len(piece)] = piece
                        digest.update(piece)
                        at += len(piece)
                if lie := _lie(entry, index, digest.digest()):
                    return lie
                self._write_piece(partial, index, room, arrival)
                return None

            is_there = self._until_right(
                entry, where, Attempts(excluded_for_all=arrival.excluded), pull, arrival, meter
            )
        # Only now: who is told so looks for the piece where it is kept.
        if is_there:
            self._has_come(partial, index, len(where), arrival, meter)
        elif arrival.without_ranges and arrival.claim_the_whole():
            self._rest(partial, arrival, meter)

    def _rest(self, partial: PartialFile, arrival: _Arrival, meter: Meter) -> None:
        """Fetch every chunk that is missing from mirrors without ranges: from one answer at a time, in its order."""
        entry = partial.entry
        others = set(range(len(self._mirrors.lines))) - arrival.without_ranges

        def pull(line: int) -> _Lie | None:
            mirror = self._mirrors.lines[line].mirror
            wanted = range(max(arrival.missing, default=-1) + 1)
            stop = chunk_range(entry, len(wanted) - 1).stop if wanted else 0
            with contextlib.closing(self._pull(mirror, entry, range(stop), meter)) as pieces:
                parts = _split(pieces, CHUNK_BYTES)
                for index in wanted:
                    if not arrival.missing:
                        break
                    if lie := self._next_piece(partial, index, parts, line, arrival, meter):
                        return lie
            return None

        self._until_right(entry, None, Attempts(excluded=others), pull, arrival, meter)

    def _next_piece(  # noqa: PLR0917 - the parts of one call
        self,
        partial: PartialFile,
        index: int,
        parts: Iterator[memoryview],
        line: int,
        arrival: _Arrival,
        meter: Meter,
    ) -> _Lie | None:
        """Take the next chunk of a file that comes whole, and write it if it is missing and right."""
        entry = partial.entry
        where = chunk_range(entry, index)
        is_wanted = False
        with self._room(len(where), meter) as room, memoryview(room.memory) as memory:
            at = 0
            while at < len(where):
                part = next(parts)
                memory[at : at + len(part)] = part
                at += len(part)
            # What is there was verified when it came, and is not looked at again.
            if is_wanted := arrival.lacks(index):
                if lie := _lie(entry, index, hashlib.sha256(memory[:at]).digest()):
                    return lie
                self._write_piece(partial, index, room, arrival)
        if is_wanted:
            self._mirrors.brought(line, at)
            self._has_come(partial, index, at, arrival, meter)
        return None

    def _write_piece(self, partial: PartialFile, index: int, room: _Room, arrival: _Arrival) -> None:
        """Write a verified piece; leave it in its room, and the page cache as it is, where it is hashed from there."""
        entry = partial.entry
        where = chunk_range(entry, index)
        is_kept = room.is_large and arrival.is_soon_read(index)
        with memoryview(room.memory) as memory:
            partial.write(where.start, memory[: len(where)], is_aligned=is_kept)
        if is_kept:
            room.piece = entry.path, index

    def _has_come(self, partial: PartialFile, index: int, nbytes: int, arrival: _Arrival, meter: Meter) -> None:
        """Tell of a piece that was written, which two may have done: of the file whole, and of a range."""
        entry = partial.entry
        if not arrival.arrived(index):
            return
        self._counts.add(fetched=nbytes)
        meter.advance(nbytes)
        if chunk_digests(entry):
            if entry.size > CHUNK_BYTES:
                # Now, and not at the file's end: a power cut takes no piece that was told of.
                partial.sync()
            self._tell("piece", entry.path, done=arrival.done, size=entry.size)

    @contextlib.contextmanager
    def _room(self, nbytes: int, meter: Meter) -> Iterator[_Room]:
        """Lend memory for one piece."""
        if nbytes <= _SMALL_BYTES:
            yield _Room(bytearray(nbytes))
            return
        room = self._rooms.take(lambda: meter.advance(0))
        try:
            yield room
        finally:
            self._rooms.give(room)

    def _whole(self, partial: PartialFile, index: int, arrival: _Arrival, meter: Meter) -> None:
        """Fetch a long file whose manifest has no digests of its chunks: one mirror has to bring all of it."""
        entry = partial.entry

        def pull(line: int) -> _Lie | None:
            digest = hashlib.sha256()
            at = 0
            mirror = self._mirrors.lines[line].mirror
            with contextlib.closing(self._pull(mirror, entry, range(entry.size), meter)) as pieces:
                for piece in pieces:
                    digest.update(piece)
                    partial.write(at, piece)
                    at += len(piece)
            found = digest.hexdigest()
            return None if found == entry.sha256 else _Lie(range(entry.size), entry.sha256, found)

        attempts = Attempts(excluded_for_all=arrival.excluded)
        if self._until_right(entry, range(entry.size), attempts, pull, arrival, meter):
            self._has_come(partial, index, entry.size, arrival, meter)

    def _until_right(  # noqa: PLR0917 - the parts of one call from three places
        self,
        entry: FileEntry,
        where: range | None,
        attempts: Attempts,
        pull: Callable[[int], _Lie | None],
        arrival: _Arrival,
        meter: Meter,
    ) -> bool:
        """Ask mirrors until one brings the signed bytes, and return whether one did; if not, the arrival was told.

        It was not where some mirror has no ranges: then the caller sees to it.

        Args:
            entry: The file.
            where: The bytes that are asked for; None for all that are missing, from mirrors without ranges.
            attempts: Which mirrors not to ask.
            pull: Asks one, by its index.
            arrival: Told of mirrors, and of failure.
            meter: Called meanwhile.
        """
        lies = arrival.lies if where is None else []
        try:
            while (index := self._mirrors.borrow(attempts, lambda: meter.advance(0))) is not None:
                mirror = self._mirrors.lines[index].mirror
                try:
                    lie = pull(index)
                except FetchError as err:
                    if where is not None and self._has_no_ranges(index, where, arrival, err, entry.path):
                        self._mirrors.give_back(index)
                        continue
                    self._mirrors.failed(index, attempts, err)
                    n_refusals = arrival.count_refusals(index, refused=err.status is not None)
                    # Given up for this file before it is given up for all: the others it may well have.
                    if err.lasting or n_refusals >= self._mirrors.most_refusals:
                        attempts.excluded_for_all.add(index)
                    self._tell("retry", entry.path, size=entry.size, mirror=mirror.name, message=err.message)
                except BaseException:
                    self._mirrors.give_back(index)
                    raise
                else:
                    if lie is None:
                        self._mirrors.succeeded(index, len(where or ()))
                        arrival.count_refusals(index, refused=False)
                        if where is not None and where.start:
                            arrival.with_ranges.add(index)
                        return True
                    self._mirrors.lied(index, attempts)
                    lies.append(self._record_lie(entry, lie, mirror))
            if where is not None and arrival.without_ranges:
                arrival.lies += lies
                return False
            raise self._none_left(entry, attempts, lies)  # noqa: TRY301 - whatever ends this, those who wait are told
        except BaseException as err:
            arrival.failed(err if isinstance(err, Exception) else StagingError("interrupted"))
            if not isinstance(err, FetchError | RejectedError):
                raise
            return False

    def _none_left(
        self, entry: FileEntry, attempts: Attempts, lies: Sequence[Finding]
    ) -> FetchError | DigestMismatchError:
        """Return why no mirror is left to ask: wrong bytes are a verdict, silence is none."""
        if lies:
            return DigestMismatchError(*(finding.in_file(entry.path) for finding in lies))
        if attempts.errors:
            last = attempts.errors[-1]
            return FetchError(last.message, mirror=last.mirror, status=last.status, hint=last.hint)
        given_up = [f"{escape(line.mirror.name)}: {line.gone}" for line in self._mirrors.lines if line.gone is not None]
        return FetchError(f"every mirror was given up ({'; '.join(given_up)})", hint="name another mirror")

    def _has_no_ranges(self, index: int, where: range, arrival: _Arrival, err: FetchError, path: str) -> bool:
        """Whether a mirror failed as one does that sends files whole; then it is not asked for pieces of this one."""
        is_known = index in arrival.without_ranges
        # One that did send a range of this file has ranges, and answered so for another reason.
        if not is_known and where.start and err.status == _WHOLE_STATUS and index not in arrival.with_ranges:
            arrival.without_ranges.add(index)
            arrival.excluded.add(index)
            name = self._mirrors.lines[index].mirror.name
            message = f"{escape(name)} sends no ranges of this file: it is read whole where no other mirror has it"
            self._tell("retry", path, size=arrival.size, mirror=name, message=message)
            return True
        return is_known

    def _record_lie(self, entry: FileEntry, lie: _Lie, mirror: Mirror) -> Finding:
        where, expected, found = lie.where, lie.expected, lie.found
        message = (
            f"expected sha256:{expected} of bytes {where.start} to {where.stop}, "
            f"found sha256:{found} from {escape(mirror.name)}"
        )
        finding = Finding("digest-mismatch", message, offset=where.start, hint="fetch it from another mirror")
        self._tell("wrong-bytes", entry.path, size=entry.size, mirror=mirror.name, message=message)
        self._quarantine.add(
            entry.path,
            mirrors=[mirror.name],
            findings=[finding],
            expected=expected,
            found=found,
            offset=where.start,
        )
        return finding

    def _pull(self, mirror: Mirror, entry: FileEntry, where: range, meter: Meter) -> Generator[bytes]:
        """Yield exactly the bytes of a range as a mirror sends them.

        Raises:
            FetchError: It sends more or fewer, or fails.
        """
        got = 0
        shown = escape(mirror.name)
        try:
            pieces = mirror.read(entry.path, where.start, where.stop, entry.size)
            with contextlib.ExitStack() as stack:
                stack.enter_context(watched(lambda: meter.advance(0)))
                if hasattr(pieces, "close"):
                    stack.callback(pieces.close)
                for piece in pieces:
                    meter.advance(0)
                    self._throttle.take(len(piece), lambda: meter.advance(0))
                    got += len(piece)
                    if got > len(where):
                        raise FetchError(f"{shown}: expected {len(where)} bytes, found more", mirror=mirror.name)
                    yield piece
        except (FileSetError, StagingError, OSError) as err:  # of a source on this machine
            raise FetchError(f"{shown}: {escape(str(err))}", mirror=mirror.name) from err
        if got < len(where):
            raise FetchError(f"{shown}: expected {len(where)} bytes, found {got}", mirror=mirror.name)


def _wait_for(futures: Sequence[Future[None]], alive: Callable[[], object]) -> None:
    """Wait until all pieces of a file were dealt with, or, where something ends that, until none is being written."""
    pending = set(futures)
    try:
        while pending:
            done, pending = wait(pending, timeout=_POLL_SECONDS)
            for future in done:
                future.result()
            alive()
    finally:
        # The file is closed next, and its number may then be another file's. Those that could be canceled never
        # begin: to wait for one would have no end where a second Ctrl-C had the pool forget it first.
        wait([future for future in pending if not future.cancel()])


def _lie(entry: FileEntry, index: int, found: bytes) -> _Lie | None:
    """Return what is wrong with a chunk that has some digest, None where that is the signed one."""
    expected = chunk_digests(entry)[index]
    return None if found == expected else _Lie(chunk_range(entry, index), expected.hex(), found.hex())


def _split(pieces: Iterable[bytes], nbytes: int) -> Iterator[memoryview]:
    """Yield bytes as they come, but cut at each multiple of a length."""
    at = 0
    for piece in pieces:
        left = memoryview(piece)
        while left:
            part = left[: nbytes - at % nbytes]
            yield part
            at += len(part)
            left = left[len(part) :]
