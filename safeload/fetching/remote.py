"""Scan without downloading: a parser reads the table of tensors by range requests, and jumps over the payloads.

What is learned this way is what a server chose to send just then. Nothing ties it to the bytes that a later download
brings, and no digest was checked: it tells what a checkpoint claims to be, before anybody spends a day on fetching it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Final

from safeload.errors import FetchError, FileSetError, Finding, LimitError, RejectedError, escape
from safeload.fetching.http import watched
from safeload.fetching.mirrors import pause as pause_for
from safeload.fetching.sources import (
    DEFAULT_ACCESS,
    Access,
    HttpSource,
    RemoteSize,
    Source,
    open_source,
)
from safeload.formats import Parsed
from safeload.parallel import Meter, run
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import FileReport, Progress, Report
from safeload.scanning import check_indexes, file_report, parse, peek_limit, policy_facts

MAX_BYTES_A_FILE: Final = 64 * 1024 * 1024
"""Most bytes of one file that a remote scan asks for. The table of a real file takes kilobytes, the largest tokenizers
35 MB; a file that needs more could as well be downloaded."""

LEAST_BYTES: Final = 2 * 1024
"""Fewest bytes to ask for at a time. A request and its answer cost some hundred bytes of headers and a round trip, so
that small reads next to each other are better had together; and a shard that is one array takes two such pieces."""

_KEPT_BYTES: Final = 4 * 1024 * 1024
"""How much of what came is kept for each file that is being read: parsers read windows that overlap."""

_TRIES: Final = 4
"""How often a range is asked for, before a whole scan is given up for it."""

_FIRST_PAUSE_SECONDS: Final = 0.5
"""Wait before the second try; each later one takes three times as long."""

_MAX_PAUSE_SECONDS: Final = 30.0
"""Longest wait that a server can ask for. Who waits for a scan would rather know."""


_OF_A_PAGE: Final = (
    "the page of a folder? name the URL of a file; or bring what a manifest lists: "
    "safeload fetch URL DIR -m MANIFEST --trust KEY.pub"
)
"""What to do about a web page that a URL leads to. What a parser would say, to fetch it again, nobody did yet."""


@dataclass(slots=True)
class Traffic:
    """What a scan asked its sources for.

    Attributes:
        requests: Ranges that were asked for, each try counted.
        nbytes: Bytes that came, without headers.
    """

    requests: int = 0
    nbytes: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False)

    def count(self, nbytes: int) -> None:
        """Count one request and what it brought."""
        with self._lock:
            self.requests += 1
            self.nbytes += nbytes


class RangeSource:
    """One file of a source, read by ranges: what a parser sees of a file that nobody downloaded.

    Attributes:
        size: Length in bytes, as the source says. A range of a file of another length is refused.
    """

    def __init__(
        self,
        source: Source,
        path: str,
        stat: RemoteSize,
        *,
        traffic: Traffic | None = None,
        max_bytes: int = MAX_BYTES_A_FILE,
        peek_limit: int = MAX_BYTES_A_FILE,
        alive: Callable[[], object] = lambda: None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """Name the file.

        Args:
            source: Where it lies.
            path: Its path there.
            stat: What the source says of it.
            traffic: Counts what is asked for.
            max_bytes: Most bytes to ask for.
            peek_limit: Most bytes to peek at, as the policy has it.
            alive: Called before each request; what it raises ends the reading.
            sleep: Waits between tries; None to look meanwhile whether to stop.
        """
        self.size = stat.size
        self._source = source
        self._path = path
        self._etag = stat.etag
        self._traffic = traffic or Traffic()
        self._max_bytes = max_bytes
        self._room = max_bytes
        self._peek_room = self._peek_limit = peek_limit
        self._peeked: set[tuple[int, int]] = set()
        self._alive = alive
        self._sleep = sleep or (lambda seconds: pause_for(seconds, alive))
        self._kept: list[tuple[int, bytes]] = []  # pieces by offset, the one that came last at the end

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes [offset, offset + nbytes), fewer only where the file ends.

        Raises:
            FetchError: The source cannot be reached, has no ranges, or answers with something else.
            LimitError: code "too-much-to-read": the file's table takes more than is asked for without downloading.
        """
        end = min(offset + nbytes, self.size)
        pieces: list[bytes] = []
        at = offset
        while at < end:
            piece = self._from_kept(at, end)
            if piece is None:
                piece = self._ask(at, self._stop(at, end))[: end - at]
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    def peek(self, offset: int, nbytes: int) -> bytes:
        """Return bytes from anywhere.

        Raises:
            FetchError: As for `read`.
            LimitError: As for `read`; or code "too-much-inline": tables take more than the policy allows.
        """
        end = min(offset + nbytes, self.size)
        if (offset, end) not in self._peeked:  # as `StreamSource` counts
            self._peeked.add((offset, end))
            self._peek_room -= max(0, end - offset)
        if self._peek_room < 0:
            message = f"expected tables of at most {self._peek_limit:,} bytes in all, found more"
            raise LimitError(Finding("too-much-inline", message, offset=offset))
        if end == self.size and self._from_kept(offset, end) is None:
            # A table at the end is read from its end: first a few bytes that say where it begins, then all of it.
            start = max(0, min(offset, self.size - LEAST_BYTES))
            return self.read(start, end - start)[offset - start :]
        return self.read(offset, nbytes)

    def payload(self, offset: int, nbytes: int) -> None:
        """Do nothing: a payload is what is not asked for."""

    def checksum(self, offset: int, nbytes: int, crc32: int) -> None:
        """Do nothing: what has such a checksum is a payload, too."""

    def _stop(self, start: int, end: int) -> int:
        """Return where to end a request for [start, end): behind what else is worth having, before what is there."""
        stop = min(max(end, start + LEAST_BYTES), self.size)
        later = [offset for offset, _ in self._kept if start < offset < stop]
        return min(later, default=stop)

    def _from_kept(self, at: int, end: int) -> bytes | None:
        for start, data in reversed(self._kept):
            if start <= at < start + len(data):
                return data[at - start : end - start]
        return None

    def _ask(self, start: int, stop: int) -> bytes:
        if stop - start > self._room:
            raise LimitError(
                Finding(
                    "too-much-to-read",
                    f"expected the file's table to take at most {self._max_bytes:,} bytes, found that it takes more",
                    offset=start,
                    hint="fetch it, then scan it",
                )
            )
        self._room -= stop - start
        data = self._patiently(start, stop)
        self._kept.append((start, data))
        while sum(len(piece) for _, piece in self._kept) > _KEPT_BYTES and len(self._kept) > 1:
            del self._kept[0]
        return data

    def _patiently(self, start: int, stop: int) -> bytes:
        pause = _FIRST_PAUSE_SECONDS
        for tries_left in reversed(range(_TRIES)):
            self._alive()
            data = b""
            try:
                with watched(self._alive):
                    data = b"".join(self._source.read(self._path, start, stop, self.size, etag=self._etag))
            except FetchError as err:
                if err.status == 200 and start > 0:  # RFC 9110, 15.3.1: all of the file
                    raise self._no_ranges(err) from err
                if err.lasting or not tries_left:
                    raise
                self._sleep(max(pause, min(err.retry_after or 0.0, _MAX_PAUSE_SECONDS)))
                pause *= 3
            else:
                return data
            finally:
                self._traffic.count(len(data))
        raise AssertionError  # the last try returned or raised

    def _no_ranges(self, err: FetchError) -> FetchError:
        where = err.mirror or escape(self._source.name)
        return FetchError(
            f"expected {where} to serve ranges of the file as they were at first, found that it sends the whole file",
            mirror=err.mirror,
            status=err.status,
            lasting=True,
            hint="it has no range requests, or the file changed meanwhile; to scan it, fetch it first",
        )


def scan_remote(
    sources: str | Sequence[str],
    *,
    policy: str | Path | Policy = DEFAULT_POLICY,
    access: Access = DEFAULT_ACCESS,
    connections: int = 8,
    max_bytes_a_file: int = MAX_BYTES_A_FILE,
    progress: Progress | None = None,
) -> Report:
    """Describe files that lie elsewhere, without downloading them: what is in them, and every reason to refuse them.

    Of each file only its table is read, and of that a bounded number of bytes. The report says what the sources sent
    this time. It holds no digest, and a file that is accepted here still has to be verified or scanned once it is
    there.

    Args:
        sources: URLs: of one file (`https://host/model.safetensors`), or of all that a repository or a store lists
            (`hf://org/name@revision`, `s3://bucket/folder`).
        policy: What is allowed.
        access: How the sources may be reached.
        connections: How many files to look at at a time.
        max_bytes_a_file: Most bytes of a file to ask for; what takes more is refused.
        progress: Told of the bytes that were dealt with, those that were jumped over among them.

    Raises:
        FetchError: A source cannot be reached, has no range requests, or does not do what its protocol says.
        ConfigError: A source's name makes no sense, or the policy is not valid.
        StagingError: A local directory that was named cannot be opened.
    """
    chosen = [sources] if isinstance(sources, str) else sources
    rules = load_policy(policy)
    traffic = Traffic()
    findings: list[Finding] = []
    jobs: list[_Job] = []
    with ExitStack() as stack:
        opened = [stack.enter_context(open_source(text, access)) for text in chosen]
        for source in opened:
            found = list(_jobs(source))
            if not found:
                message = "expected files, found an empty listing"
                findings.append(Finding("nothing-to-scan", message, file=source.name, hint="check the name"))
            jobs += found
        files = run(
            jobs,
            lambda job, meter: _scan(job, rules, _Reading(traffic, max_bytes_a_file, peek_limit(rules), meter), meter),
            size=lambda job: job.stat.size,
            threads=connections,
            phase="scanning",
            progress=progress,
        )
    facts = {
        **policy_facts(rules),
        "remote": {
            "sources": [source.facts() for source in opened],
            "requests": traffic.requests,
            "bytes_read": traffic.nbytes,
            "bytes_in_all": sum(job.stat.size for job in jobs),
            "digests_checked": False,
        },
    }
    return Report(tuple(check_indexes(files, {})), tuple(findings), facts)


@dataclass(frozen=True, slots=True)
class _Job:
    """One file to look at.

    Attributes:
        shown: Its name in the report.
        source: Where it lies.
        path: Its path there.
        stat: What the source says of it.
        beside: Sizes of the files of the same source by path, or None where it has no listing.
        finding: Why it is not read, or None.
    """

    shown: str
    source: Source
    path: str
    stat: RemoteSize
    beside: dict[str, int] | None = None
    finding: Finding | None = None


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the files of one scan are read by: what counts, and what bounds."""

    traffic: Traffic
    max_bytes: int
    peek_limit: int
    meter: Meter

    def open(self, job: _Job, path: str, stat: RemoteSize) -> RangeSource:
        return RangeSource(
            job.source,
            path,
            stat,
            traffic=self.traffic,
            max_bytes=self.max_bytes,
            peek_limit=self.peek_limit,
            alive=lambda: self.meter.advance(0),
        )


def _jobs(source: Source) -> Iterator[_Job]:
    if isinstance(source, HttpSource):
        yield _Job(source.name, source, "", source.stat(""))
        return
    listed = source.files()
    beside = {file.path: file.size for file in listed if file.finding is None}
    for file in listed:
        shown = f"{source.name.rstrip('/')}/{file.path}"
        yield _Job(shown, source, file.path, RemoteSize(file.size), beside, file.finding)


def _scan(job: _Job, policy: Policy, reading: _Reading, meter: Meter) -> FileReport:
    if job.finding is not None:
        kind, parsed = "unknown", Parsed(refusal=FileSetError(job.finding))
    else:
        try:
            ranges = reading.open(job, job.path, job.stat)
            kind, parsed = parse(ranges, job.shown, policy, _RemoteSiblings(job, reading))
        except RejectedError as err:
            kind, parsed = "unknown", Parsed(refusal=err)
    meter.advance(job.stat.size)
    report = file_report(job.shown, kind, job.stat.size, parsed)
    if parsed.refusal is None:
        return report
    # The report names the file already; and to `explain` it takes a file that is here.
    hint = _OF_A_PAGE if kind == "html" and not job.path else None
    return FileReport(
        job.shown,
        kind,
        job.stat.size,
        findings=tuple(
            Finding(f.code, f.message, offset=f.offset, hint=hint or f.hint) for f in parsed.refusal.findings
        ),
        globals=parsed.globals,
        error=type(parsed.refusal),
    )


class _RemoteSiblings:
    """The files beside one that is scanned; each is read as it is now, whatever was read of it before."""

    def __init__(self, job: _Job, reading: _Reading) -> None:
        self._job = job
        self._reading = reading

    def read(self, name: str, limit: int) -> bytes | None:
        job = self._job
        path = job.path[: len(job.path) - len(PurePosixPath(job.path).name)] + name
        if job.beside is None or path not in job.beside:
            return None
        size = job.beside[path]
        if size > limit:
            message = f"expected {escape(name)} to have at most {limit:,} bytes, found {size:,}"
            raise LimitError(Finding("too-much-inline", message))
        return self._reading.open(job, path, RemoteSize(size)).read(0, size)
