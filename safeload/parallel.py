"""Work on many files with a few threads: largest first, with progress, and an end within one piece of a file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Generic, Self, TypeVar, cast

from safeload.errors import StagingError
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
        self._is_stopped = False

    def advance(self, nbytes: int) -> None:
        """Count bytes that were dealt with.

        Raises:
            Exception: The run was given up; let it pass.
        """
        if self._is_stopped:
            raise _StoppedError
        with self._lock:
            self.nbytes += nbytes

    def stop(self) -> None:
        """Make every thread end at its next `advance`."""
        self._is_stopped = True


def n_processors() -> int:
    """Return how many processors this process may use: as many threads as can hash at the same time."""
    return len(os.sched_getaffinity(0))


class Lot(Generic[R]):
    """Items that were begun together, and what became of them so far. Made by `Crew.begin`."""

    def __init__(self, n_items: int) -> None:
        self.results: list[R | None] = [None] * n_items
        self.n_left = n_items
        # Threads only put, and the thread that waits only gets. A SimpleQueue does either without a lock that Python
        # code takes: an interruption in the middle of one would leave it taken, and all that need it waiting for ever.
        self.ended: SimpleQueue[tuple[int, R | None, BaseException | None]] = SimpleQueue()


class Crew:
    """Threads that work on one lot of items after another, so that one lot can be begun while another is used.

    Use it as a context manager: leaving it stops what is not done, and waits until no thread works any more.

    Attributes:
        meter: Counts what was done of all lots.
    """

    def __init__(self, threads: int) -> None:
        """Say how many threads; they start with the first work."""
        self.meter = Meter()
        self._n_threads = threads
        self._threads: list[threading.Thread] = []
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        """Return the crew itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Have every thread end after the piece that it is at, and wait for that."""
        self.meter.stop()
        for _thread in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            if thread.ident is not None:  # else an interruption came before it was started
                thread.join()

    def begin(self, items: Sequence[T], work: Callable[[T, Meter], R], *, size: Callable[[T], int]) -> Lot[R]:
        """Begin the work on a lot of items, and return what `finish` waits for.

        The largest item goes first, so that no thread is left alone with it at the end. Lots are worked on in the order
        in which they were begun.

        Args:
            items: What to work on.
            work: Told the item and the meter, whose `advance` it calls after each piece.
            size: Bytes of an item.

        Raises:
            StagingError: The system gives not even one thread.
        """
        lot: Lot[R] = Lot(len(items))
        for index in sorted(range(len(items)), key=lambda index: size(items[index]), reverse=True):
            self._todo.put(partial(self._do, lot, index, items[index], work))
        while len(self._threads) < self._n_threads:
            thread = threading.Thread(target=self._work, name=f"safeload_{len(self._threads)}")
            # Listed first: an interruption leaves no thread that nobody ends.
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as err:
                self._threads.pop()
                if self._threads:
                    break  # fewer take longer
                hint = "end other programs, or raise the limit of processes (ulimit -u)"
                raise StagingError("the system gives no thread to work with", hint=hint) from err
        return lot

    def finish(self, lot: Lot[R], tell: Callable[[int], None]) -> list[R]:
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
            raise
        return cast("list[R]", lot.results)

    def _await(self, lot: Lot[R], tell: Callable[[int], None]) -> None:
        told = monotonic()
        while lot.n_left:
            try:
                index, result, error = lot.ended.get(timeout=_POLL_SECONDS)
            except Empty:
                pass
            else:
                if error is not None:
                    # What stopped this item may have happened to one of another lot, which was begun ahead.
                    raise self._error or error
                lot.results[index] = result
                lot.n_left -= 1
            if monotonic() - told >= _POLL_SECONDS or not lot.n_left:
                told = monotonic()
                tell(self.meter.nbytes)

    def _work(self) -> None:
        """Take what comes next, until there is nothing for this thread any more."""
        while (task := self._todo.get()) is not None:
            task()

    def _do(self, lot: Lot[R], index: int, item: T, work: Callable[[T, Meter], R]) -> None:
        try:
            self.meter.advance(0)
            result = work(item, self.meter)
        except BaseException as err:  # noqa: BLE001 - it is raised where the lot is waited for
            if not isinstance(err, _StoppedError):
                self._error = self._error or err
            # Stopped here and not by the thread that waits: this one would begin its next item before that wakes.
            self.meter.stop()
            lot.ended.put((index, None, err))
        else:
            lot.ended.put((index, result, None))


def run(
    items: Sequence[T],
    work: Callable[[T, Meter], R],
    *,
    size: Callable[[T], int],
    threads: int,
    phase: str,
    progress: Progress | None,
    order: Callable[[T], int] | None = None,
) -> list[R]:
    """Do `work` for each item and return the results in the order of the items; see `Crew`.

    Args:
        items: What to work on.
        work: Told the item and the meter, whose `advance` it calls after each piece.
        size: Bytes of an item.
        threads: How many to use; 0 for the calling thread, where there is nothing to gain from others.
        phase: What progress calls it.
        progress: Told from the calling thread.
        order: The item with the largest number is begun first; by size if it is not given.

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
        return crew.finish(crew.begin(items, work, size=order or size), lambda done: tell(phase, done, total))
