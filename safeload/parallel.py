"""Work on many files with a few threads: largest first, with progress, and an end within one piece of a file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Self, TypeVar

from safeload.report import Progress

_POLL_SECONDS = 0.1
"""How often progress is told, and how long Ctrl-C may go unseen by the main thread: seldom enough to cost nothing."""

T = TypeVar("T")
R = TypeVar("R")


class _StoppedError(Exception):
    """Ends a thread whose work nobody waits for any more. Never leaves this module."""


class Meter:
    """What the threads of one run share: how many bytes are done, and whether to go on."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def advance(self, nbytes: int) -> None:
        """Count bytes that were dealt with.

        Raises:
            Exception: The run was given up; let it pass.
        """
        if self._stop.is_set():
            raise _StoppedError
        with self._lock:
            self.nbytes += nbytes

    def stop(self) -> None:
        """Make every thread end at its next `advance`."""
        self._stop.set()


def n_processors() -> int:
    """Return how many processors this process may use: as many threads as can hash at the same time."""
    return len(os.sched_getaffinity(0))


class Crew:
    """Threads that work on one lot of items after another, so that one lot can be begun while another is used.

    Use it as a context manager: leaving it stops what is not done, and waits until no thread works any more.

    Attributes:
        meter: Counts what was done of all lots.
    """

    def __init__(self, threads: int) -> None:
        """Say how many threads; they start with the first work."""
        self.meter = Meter()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="safeload")
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Return the crew itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Have every thread end after the piece that it is at, and wait for that."""
        self.meter.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def begin(self, items: Sequence[T], work: Callable[[T, Meter], R], *, size: Callable[[T], int]) -> list[Future[R]]:
        """Begin the work on a lot of items, and return what `finish` waits for.

        The largest item goes first, so that no thread is left alone with it at the end. Lots are worked on in the order
        in which they were begun.

        Args:
            items: What to work on.
            work: Told the item and the meter, whose `advance` it calls after each piece.
            size: Bytes of an item.
        """
        order = sorted(range(len(items)), key=lambda index: size(items[index]), reverse=True)
        futures = {index: self._threads.submit(self._do, items[index], work) for index in order}
        return [futures[index] for index in range(len(items))]

    def finish(self, lot: Sequence[Future[R]], tell: Callable[[int], None]) -> list[R]:
        """Wait until a lot is done, and return its results in the order of its items.

        When an item fails, or the calling thread is interrupted, all work stops after the pieces that it is at.

        Args:
            lot: What `begin` returned.
            tell: Told from time to time, by the calling thread, how many bytes of all lots are done.

        Raises:
            BaseException: The first that a `work` raised.
        """
        try:
            self._await(lot, tell)
        except BaseException:
            # Leaving the context waits for the threads; they end at their next piece.
            self.meter.stop()
            self._threads.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in lot]

    def _await(self, lot: Sequence[Future[R]], tell: Callable[[int], None]) -> None:
        pending = set(lot)
        while pending:
            done, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            error = next(filter(None, (future.exception() for future in done)), None)
            if error is not None:
                # What stopped this item may have happened to one of another lot, which was begun ahead.
                raise self._error or error
            tell(self.meter.nbytes)

    def _do(self, item: T, work: Callable[[T, Meter], R]) -> R:
        try:
            self.meter.advance(0)
            return work(item, self.meter)
        except _StoppedError:
            raise  # the cause has told of itself, below
        except BaseException as err:
            with self._lock:
                self._error = self._error or err
            # Stopped here and not by the thread that waits: this one would begin its next item before that wakes.
            self.meter.stop()
            raise


def run(
    items: Sequence[T],
    work: Callable[[T, Meter], R],
    *,
    size: Callable[[T], int],
    threads: int,
    phase: str,
    progress: Progress | None,
) -> list[R]:
    """Do `work` for each item and return the results in the order of the items; see `Crew`.

    Args:
        items: What to work on.
        work: Told the item and the meter, whose `advance` it calls after each piece.
        size: Bytes of an item.
        threads: How many to use; 0 for the calling thread, where there is nothing to gain from others.
        phase: What progress calls it.
        progress: Told from the calling thread.

    Raises:
        BaseException: The first that a `work` raised.
    """
    total = sum(map(size, items))
    tell = progress or (lambda *_: None)
    if not threads:
        meter = Meter()
        results: list[R] = []
        for item in items:
            results.append(work(item, meter))
            tell(phase, meter.nbytes, total)
        return results
    with Crew(threads) as crew:
        return crew.finish(crew.begin(items, work, size=size), lambda done: tell(phase, done, total))
