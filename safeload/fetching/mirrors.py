"""Several mirrors of the same files: which to ask next, how often, how fast, and when to give one up."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from safeload.errors import FetchError

_POLL_SECONDS: Final = 0.1
"""How long somebody who waits for a mirror or for the bandwidth goes without looking whether to stop."""

_JITTER: Final = random.SystemRandom()


class Mirror(Protocol):
    """Somewhere that claims to have the files.

    Attributes:
        name: What to call it in reports; no credentials in it.
    """

    @property
    def name(self) -> str:
        """What to call it in reports; no credentials in it."""
        ...

    def read(self, path: str, start: int, stop: int, size: int, /) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of a file of `size` bytes, in pieces.

        Raises:
            FetchError: It cannot, or will not. Of status 200 where `start` is not 0 and it has no ranges: then it is
                asked for the bytes from 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class Pacing:
    """How patient to be with a mirror. Times are in seconds.

    Attributes:
        tries: How often to ask one mirror for one piece.
        first_delay: Wait after its first failure; twice as long after each further one, less a random part.
        longest_delay: Longest such wait.
        retry_after: Longest wait that a mirror may ask for; one that asks for more is given up.
        breaker: Failures without a success between them, after which it is left alone for `cooldown`.
        cooldown: How long that is; then one connection tries whether it is back.
        openings: How often that may happen without a success between, before it is given up.
        looks: How often to look for a mirror that never answered, before it is given up: most likely its URL is wrong.
        lies: Pieces with wrong bytes, after which it is given up.
    """

    tries: int = 5
    first_delay: float = 0.5
    longest_delay: float = 30.0
    retry_after: float = 300.0
    breaker: int = 8
    cooldown: float = 30.0
    openings: int = 2
    looks: int = 3
    lies: int = 3


@dataclass(slots=True)
class Line:
    """What is known of one mirror in this run; `Mirrors` alone changes it.

    Attributes:
        mirror: The mirror.
        nbytes: Bytes that came from it and were right.
        has_answered: Whether it ever said anything, be it no.
        failures: How often it failed, in all.
        lies: How many pieces it sent with wrong bytes.
        gone: Why it is not asked any more, or None.
    """

    mirror: Mirror
    nbytes: int = 0
    has_answered: bool = False
    failures: int = 0
    lies: int = 0
    gone: str | None = None
    in_use: int = 0
    in_a_row: int = 0
    looks: int = 0
    openings: int = 0
    ready_at: float = 0.0


@dataclass(slots=True)
class Attempts:
    """What was tried for one piece of one file.

    Attributes:
        excluded: Mirrors that are not asked for this piece again, by their index.
        excluded_for_all: Those that are not asked for any piece of the file; shared by all of them, and may grow.
        tries: How often each was asked.
        errors: What went wrong, in order.
    """

    excluded: set[int] = field(default_factory=set)
    excluded_for_all: set[int] = field(default_factory=set)
    tries: Counter[int] = field(default_factory=Counter)
    errors: list[FetchError] = field(default_factory=list)


class Mirrors:
    """Lends mirrors to threads, so many connections to each at a time. Thread-safe."""

    def __init__(
        self,
        mirrors: Sequence[Mirror],
        *,
        connections: int,
        pacing: Pacing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with every mirror in good standing.

        Args:
            mirrors: In the order of preference.
            connections: Most connections to each at a time.
            pacing: How patient to be.
            clock: Seconds since whenever.
        """
        self.lines = tuple(Line(mirror) for mirror in mirrors)
        self._connections = connections
        self._pacing = pacing or Pacing()
        self._clock = clock
        self._changed = threading.Condition()

    @property
    def most_refusals(self) -> int:
        """How many answers without a piece of one file are enough: one fewer than would end it for every file."""
        return max(1, self._pacing.breaker * self._pacing.openings - 1)

    def borrow(self, attempts: Attempts, alive: Callable[[], object]) -> int | None:
        """Return the index of a mirror to ask now, waiting for one where that helps; None where none is left.

        Who borrows ends with exactly one of `succeeded`, `failed`, `lied` and `give_back`.

        Args:
            attempts: What was tried for this piece so far.
            alive: Called from time to time while waiting; what it raises ends that.
        """
        while True:
            alive()
            with self._changed:
                now = self._clock()
                left = [i for i in range(len(self.lines)) if self._is_left(i, attempts)]
                if not left:
                    return None
                ready = [i for i in left if self._is_ready(self.lines[i], now)]
                if ready:
                    # The least busy; among those the one that failed least, then the one that was named first.
                    chosen = min(ready, key=lambda i: (self.lines[i].in_use, self.lines[i].in_a_row, i))
                    self.lines[chosen].in_use += 1
                    attempts.tries[chosen] += 1
                    return chosen
                self._changed.wait(_POLL_SECONDS)

    def succeeded(self, index: int, nbytes: int) -> None:
        """Record that so many right bytes came."""
        with self._changed:
            self.brought(index, nbytes)
            self._release(self.lines[index])

    def brought(self, index: int, nbytes: int) -> None:
        """Record that so many right bytes came, and that more are to come from the same answer."""
        with self._changed:
            line = self.lines[index]
            line.nbytes += nbytes
            line.has_answered = True
            line.in_a_row = line.openings = 0

    def failed(self, index: int, attempts: Attempts, error: FetchError) -> None:
        """Record that nothing usable came, and leave the mirror alone for a while."""
        with self._changed:
            line = self.lines[index]
            attempts.errors.append(error)
            line.failures += 1
            line.has_answered = line.has_answered or error.status is not None
            if error.lasting:
                # It answered, and knows no such file: no reason to think ill of it otherwise.
                attempts.excluded.add(index)
                self._release(line)
                return
            line.in_a_row += 1
            pacing = self._pacing
            if not line.has_answered and line.in_use == 1:
                # What was asked at the same time as this is one look, however many failed: this is the last of them.
                line.looks += 1
                if line.looks >= pacing.looks:
                    line.gone = f"it never answered; looked for {line.looks} times"
            n_failures = line.in_a_row if line.has_answered else max(1, line.looks)
            delay = min(pacing.first_delay * 2 ** min(n_failures - 1, 30), pacing.longest_delay)
            delay *= _JITTER.uniform(0.5, 1.0)
            if line.has_answered and line.in_a_row % pacing.breaker == 0:
                line.openings += 1
                delay = max(delay, pacing.cooldown)
                if line.openings >= pacing.openings:
                    line.gone = f"it failed {line.in_a_row} times in a row"
            if error.retry_after is not None:
                delay = max(delay, error.retry_after)
                if error.retry_after > pacing.retry_after:
                    line.gone = f"it asks to be left alone for {error.retry_after:.0f} s"
            line.ready_at = max(line.ready_at, self._clock() + delay)
            self._release(line)

    def lied(self, index: int, attempts: Attempts) -> None:
        """Record that it sent wrong bytes: it is not asked for this piece again."""
        with self._changed:
            line = self.lines[index]
            line.has_answered = True
            line.lies += 1
            attempts.excluded.add(index)
            if line.lies >= self._pacing.lies:
                line.gone = f"it sent wrong bytes {line.lies} times"
            self._release(line)

    def give_back(self, index: int) -> None:
        """Record nothing: the work was given up."""
        with self._changed:
            self._release(self.lines[index])

    def _release(self, line: Line) -> None:
        line.in_use -= 1
        self._changed.notify_all()

    def _is_left(self, index: int, attempts: Attempts) -> bool:
        is_tired = attempts.tries[index] >= self._pacing.tries
        is_excluded = index in attempts.excluded or index in attempts.excluded_for_all
        return not is_excluded and not is_tired and self.lines[index].gone is None

    def _is_ready(self, line: Line, now: float) -> bool:
        is_on_trial = line.in_a_row >= (self._pacing.breaker if line.has_answered else 1)
        return line.in_use < (1 if is_on_trial else self._connections) and line.ready_at <= now


def pause(seconds: float, alive: Callable[[], object]) -> None:
    """Wait, and look from time to time whether to stop.

    Args:
        seconds: How long.
        alive: Called meanwhile; what it raises ends the waiting.
    """
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        alive()
        time.sleep(min(left, _POLL_SECONDS))


class Throttle:
    """Holds all threads together to so many bytes a second."""

    def __init__(
        self,
        rate: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Begin with no debt.

        Args:
            rate: Bytes a second; None for no limit.
            clock: Seconds since whenever.
            sleep: Waits so many seconds.
        """
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def take(self, nbytes: int, alive: Callable[[], object]) -> None:
        """Wait until bytes that came may count as due.

        Args:
            nbytes: How many came.
            alive: Called from time to time while waiting; what it raises ends that.
        """
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            self._free_at = until = max(self._free_at, now) + nbytes / self._rate
        while (left := until - self._clock()) > 0:
            alive()
            self._sleep(min(left, _POLL_SECONDS))
