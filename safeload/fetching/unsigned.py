"""Fetch what nobody signed: into quarantine and nowhere else, for people to look at."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safeload.errors import FetchError, FileSetError, Finding, StagingError, escape, reason
from safeload.fetching.http import watched
from safeload.fetching.mirrors import Throttle, pause
from safeload.fetching.partial import require_space
from safeload.fetching.quarantine import Quarantine, Record
from safeload.fetching.sources import HttpSource, RemoteSize, Source
from safeload.files import StreamSource, WalkedFile
from safeload.parallel import Meter, run
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import Progress
from safeload.scanning import parse

_TRIES: Final = 4
"""How often in a row a source may fail before it is given up; what came is kept, and asking goes on behind it."""

_FIRST_PAUSE_SECONDS: Final = 0.5
"""Wait after the first failure; each further one without progress between takes three times as long."""

_MAX_PAUSE_SECONDS: Final = 60.0
"""Longest wait that a server can ask for."""

_RECOVERED_BYTES: Final = 1024 * 1024
"""How much has to come after a failure for the next one to count as the first again."""

_UNSIGNED: Final = Finding("unsigned", "expected a signed manifest that lists the file, found none")


@dataclass(frozen=True, slots=True)
class _Job:
    path: str
    stat: RemoteSize


def fetch_unsigned(
    source: Source,
    directory: str | Path,
    *,
    policy: str | Path | Policy = DEFAULT_POLICY,
    connections: int = 4,
    throttle: Throttle | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], None] | None = None,
) -> tuple[Record, ...]:
    """Put every file of a source into the quarantine of a directory, and return the records.

    For looking before anybody signs: each record says what a scan found. Nothing is put where a loader would find it,
    each file is called by its record and not by its name, and no later run takes it for verified.

    Args:
        source: Where the files are. What it lists decides what is fetched, once the names were checked.
        directory: Where a signed checkpoint would go; nothing in it is touched.
        policy: What the scan holds the files against.
        connections: How many files to fetch at a time.
        throttle: Bounds the rate.
        progress: Told how far it has come.
        sleep: Waits between tries; None to look meanwhile whether to stop.

    Raises:
        FileSetError: A name that the source lists is no path, or it lists nothing.
        FetchError: The source cannot be reached, or sends something else than it says.
        StagingError: There is no room, or the system refuses.
        ConfigError: There is something else in the quarantine's place, or the policy is not valid.
    """
    rules = load_policy(policy)
    jobs = _jobs(source)
    store = Quarantine(directory)
    require_space(store.path.parent, [job.stat.size for job in jobs])
    together = _Run(source, store, rules, throttle or Throttle(None), sleep)
    return tuple(
        run(
            jobs,
            together.fetch,
            size=lambda job: job.stat.size,
            threads=connections,
            phase="fetching",
            progress=progress,
        )
    )


def list_files(source: Source) -> tuple[tuple[str, int], ...]:
    """Return path and size of each file that `fetch_unsigned` would fetch; it raises the same errors."""
    return tuple((_name(job, source), job.stat.size) for job in _jobs(source))


def _name(job: _Job, source: Source) -> str:
    """Return what to call a file: a web server's own is called by the end of its URL."""
    return job.path or source.name.rpartition("/")[2] or "file"


def _jobs(source: Source) -> Sequence[_Job]:
    if isinstance(source, HttpSource):
        return [_Job("", source.stat(""))]
    listed: tuple[WalkedFile, ...] = source.files()
    findings = [file.finding for file in listed if file.finding is not None]
    if not listed:
        findings = [Finding("nothing-to-fetch", "expected files, found an empty listing", file=source.name)]
    if findings:
        raise FileSetError(*findings)
    return [_Job(file.path, RemoteSize(file.size)) for file in listed]


@dataclass(frozen=True, slots=True)
class _Run:
    """What the files of one run share; see `fetch_unsigned`."""

    source: Source
    store: Quarantine
    policy: Policy
    throttle: Throttle
    sleep: Callable[[float], None] | None

    def fetch(self, job: _Job, meter: Meter) -> Record:
        """Download one file, scan it, and put it away."""
        name = _name(job, self.source)
        place = self.store.path
        try:
            # Beside the quarantine, so that a rename puts it there; of mode 0600, under a name that says what it is.
            fd, temporary = tempfile.mkstemp(prefix=f"{place.name}-", suffix=".partial", dir=place.parent)
        except OSError as err:
            raise StagingError(f"cannot write to {escape(str(place.parent))}: {reason(err)}") from err
        try:
            try:
                digest = self._download(fd, job, meter)
                # `StreamSource` closes what it is given.
                with StreamSource(os.dup(fd), name) as stream:
                    _, parsed = parse(stream, name, self.policy)
            finally:
                os.close(fd)
            return self.store.add(
                name,
                mirrors=[self.source.name],
                findings=[_UNSIGNED, *(() if parsed.refusal is None else parsed.refusal.findings)],
                expected=None,
                found=digest,
                move=lambda content: os.rename(temporary, content),  # noqa: PTH104 - one call, two paths
                unsigned=True,
            )
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _download(self, fd: int, job: _Job, meter: Meter) -> str:
        """Write a file as it comes, and return its SHA-256."""

        def alive() -> None:
            meter.advance(0)

        digest = hashlib.sha256()
        at, size = 0, job.stat.size
        failures, failed_at = 0, 0
        while at < size:
            try:
                with watched(alive):
                    for piece in self.source.read(job.path, at, size, size, etag=job.stat.etag):
                        _write(fd, piece, job.path)
                        digest.update(piece)
                        at += len(piece)
                        meter.advance(len(piece))
                        self.throttle.take(len(piece), alive)
            except FetchError as err:
                # A byte between two failures is no recovery, or a server could keep us here a byte at a time.
                failures = 1 if at - failed_at >= _RECOVERED_BYTES else failures + 1
                failed_at = at
                if err.lasting or failures == _TRIES:
                    raise
                asked_for = min(err.retry_after or 0.0, _MAX_PAUSE_SECONDS)
                seconds = max(_FIRST_PAUSE_SECONDS * 3 ** (failures - 1), asked_for)
                if self.sleep is None:
                    pause(seconds, alive)
                else:
                    self.sleep(seconds)
        return digest.hexdigest()


def _write(fd: int, data: bytes, path: str) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as err:
        raise StagingError(f"cannot write {escape(path)}: {reason(err)}") from err
