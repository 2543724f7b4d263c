"""Work on many files with a few threads: largest first, with progress, and an end within one piece of a file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

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


def run(
    items: Sequence[T],
    work: Callable[[T, Meter], R],
    *,
    size: Callable[[T], int],
    threads: int,
    phase: str,
    progress: Progress | None,
) -> list[R]:
    """Do `work` for each item and return the results in the order of the items.

    The largest item goes first, so that no thread is left alone with it at the end. When one fails, or the calling
    thread is interrupted, the others end after the piece that they are at.

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
    meter = Meter()
    tell = progress or (lambda *_: None)
    if not threads:
        results: list[R] = []
        for item in items:
            results.append(work(item, meter))
            tell(phase, meter.nbytes, total)
        return results
    order = sorted(range(len(items)), key=lambda index: size(items[index]), reverse=True)
    with ThreadPoolExecutor(threads, thread_name_prefix="safeload") as pool:
        try:
            futures = {index: pool.submit(_stopping, items[index], work, meter) for index in order}
            _await(futures.values(), lambda: tell(phase, meter.nbytes, total))
        except BaseException:
            # Leaving the pool waits for its threads; they end at their next piece.
            meter.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [futures[index].result() for index in range(len(items))]


def _stopping(item: T, work: Callable[[T, Meter], R], meter: Meter) -> R:
    try:
        meter.advance(0)
        return work(item, meter)
    except BaseException:
        # Set here and not by the thread that waits: this one would begin with the next item before that wakes.
        meter.stop()
        raise


def _await(futures: Iterable[Future[R]], tell: Callable[[], None]) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
        for future in done:
            error = future.exception()
            # What stopped the others is in another future, which may be done a moment later.
            if error is not None and not isinstance(error, _StoppedError):
                raise error
        tell()
