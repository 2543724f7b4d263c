"""Claims of `safeload.fetching.mirrors`: who is asked, how often, and when somebody is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from safeload.errors import FetchError
from safeload.fetching.mirrors import Attempts, Mirrors, Pacing, Throttle


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, path: str, start: int, stop: int, size: int, /) -> Iterator[bytes]:
        raise NotImplementedError


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class WouldWaitError(Exception):
    pass


def waiting(clock: Clock) -> object:
    """Return an `alive` that fails if the borrower had to come back for a second look."""
    looks = []

    def alive() -> None:
        looks.append(clock.now)
        if len(looks) > 1:
            raise WouldWaitError

    return alive


def borrow(mirrors: Mirrors, clock: Clock, attempts: Attempts | None = None) -> int | None:
    alive = waiting(clock)
    assert callable(alive)
    return mirrors.borrow(attempts or Attempts(), alive)


def made(n: int, clock: Clock, *, connections: int = 2, **pacing: float) -> Mirrors:
    return Mirrors(
        [Named(str(i)) for i in range(n)],
        connections=connections,
        pacing=Pacing(**pacing),  # type: ignore[arg-type] # counts and times alike
        clock=clock,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


def error(*, lasting: bool = False, retry_after: float | None = None, status: int | None = None) -> FetchError:
    return FetchError("no", lasting=lasting, retry_after=retry_after, status=status)


def test_the_least_busy_is_asked_and_none_more_often_than_allowed(clock: Clock) -> None:
    mirrors = made(2, clock)
    assert [borrow(mirrors, clock) for _ in range(4)] == [0, 1, 0, 1]
    with pytest.raises(WouldWaitError):
        borrow(mirrors, clock)
    mirrors.succeeded(1, 10)
    assert borrow(mirrors, clock) == 1
    assert mirrors.lines[1].nbytes == 10


def test_a_failure_is_waited_out_longer_each_time_with_jitter(clock: Clock) -> None:
    mirrors = made(1, clock, first_delay=1.0, longest_delay=4.0, breaker=99, tries=99)
    attempts = Attempts()
    delays = []
    for _ in range(6):
        assert borrow(mirrors, clock, attempts) == 0
        mirrors.failed(0, attempts, error(status=503))
        delays.append(mirrors.lines[0].ready_at - clock.now)
        with pytest.raises(WouldWaitError):
            borrow(mirrors, clock, attempts)
        clock.now = mirrors.lines[0].ready_at
    for delay, most in zip(delays, [1, 2, 4, 4, 4, 4], strict=True):
        assert most / 2 <= delay <= most


def test_one_piece_is_asked_for_so_often_and_then_not_again(clock: Clock) -> None:
    mirrors = made(1, clock, tries=3, first_delay=0.0)
    attempts = Attempts()
    for _ in range(3):
        assert borrow(mirrors, clock, attempts) == 0
        mirrors.failed(0, attempts, error(status=503))
    assert borrow(mirrors, clock, attempts) is None
    assert borrow(mirrors, clock) == 0  # another piece may still be had


def test_a_retry_after_is_kept_and_one_that_is_too_long_ends_it(clock: Clock) -> None:
    mirrors = made(2, clock, first_delay=0.0, retry_after=60.0)
    attempts = Attempts()
    assert borrow(mirrors, clock, attempts) == 0
    mirrors.failed(0, attempts, error(retry_after=50.0))
    assert mirrors.lines[0].ready_at == 50
    assert borrow(mirrors, clock, attempts) == 1
    mirrors.failed(1, attempts, error(retry_after=61.0))
    assert mirrors.lines[1].gone is not None
    with pytest.raises(WouldWaitError):
        borrow(mirrors, clock, attempts)
    clock.now = 50.0
    assert borrow(mirrors, clock, attempts) == 0


def test_the_breaker_lets_one_try_through_after_a_while_and_closes_on_success(clock: Clock) -> None:
    mirrors = made(1, clock, first_delay=0.0, breaker=3, cooldown=10.0, openings=2, tries=99)
    for _ in range(3):
        assert borrow(mirrors, clock) == 0
        mirrors.failed(0, Attempts(), error(status=500))
    with pytest.raises(WouldWaitError):
        borrow(mirrors, clock)
    clock.now = 10.0
    assert borrow(mirrors, clock) == 0
    with pytest.raises(WouldWaitError):
        borrow(mirrors, clock)  # one connection tries, not two
    mirrors.succeeded(0, 1)
    assert [borrow(mirrors, clock) for _ in range(2)] == [0, 0]
    assert mirrors.lines[0].in_a_row == 0


def test_a_mirror_that_never_comes_back_is_given_up(clock: Clock) -> None:
    mirrors = made(1, clock, first_delay=0.0, breaker=3, cooldown=10.0, openings=2, tries=99)
    for _ in range(6):
        assert borrow(mirrors, clock) == 0
        mirrors.failed(0, Attempts(), error(status=500))
        clock.now += 10.0
    assert borrow(mirrors, clock) is None
    assert mirrors.lines[0].gone == "it failed 6 times in a row"


def test_a_mirror_that_never_answered_is_given_up_after_a_few_looks_within_seconds(clock: Clock) -> None:
    mirrors = made(1, clock, connections=5)
    for _ in range(5):
        assert borrow(mirrors, clock) == 0
    for _ in range(5):
        mirrors.failed(0, Attempts(), error())
    for _ in range(2):
        assert mirrors.lines[0].gone is None  # what was asked at the same time is one look
        with pytest.raises(WouldWaitError):
            borrow(mirrors, clock)
        clock.now = mirrors.lines[0].ready_at
        assert borrow(mirrors, clock) == 0
        with pytest.raises(WouldWaitError):
            borrow(mirrors, clock)  # one connection looks, not five
        mirrors.failed(0, Attempts(), error())
    assert mirrors.lines[0].gone == "it never answered; looked for 3 times"
    assert borrow(mirrors, clock) is None
    assert clock.now < 2


def brought_something(mirrors: Mirrors) -> None:
    mirrors.succeeded(0, 1)


def said_no(mirrors: Mirrors) -> None:
    mirrors.failed(0, Attempts(), error(status=503))


def knew_no_such_file(mirrors: Mirrors) -> None:
    mirrors.failed(0, Attempts(), error(status=404, lasting=True))


def lied(mirrors: Mirrors) -> None:
    mirrors.lied(0, Attempts())


@pytest.mark.parametrize("answered", [brought_something, said_no, knew_no_such_file, lied])
def test_a_mirror_that_answered_once_is_waited_for(clock: Clock, answered: Callable[[Mirrors], None]) -> None:
    mirrors = made(1, clock, first_delay=0.0, cooldown=30.0)
    assert borrow(mirrors, clock) == 0
    answered(mirrors)
    for _ in range(7):
        clock.now += 30.0
        assert borrow(mirrors, clock) == 0
        mirrors.failed(0, Attempts(), error())
    assert mirrors.lines[0].gone is None


def test_a_mirror_without_the_file_is_not_asked_for_it_again_and_is_no_worse_for_others(clock: Clock) -> None:
    mirrors = made(1, clock)
    attempts = Attempts()
    assert borrow(mirrors, clock, attempts) == 0
    mirrors.failed(0, attempts, error(lasting=True))
    assert borrow(mirrors, clock, attempts) is None
    assert borrow(mirrors, clock) == 0


def test_a_liar_is_not_asked_for_that_piece_again_and_is_given_up_after_some(clock: Clock) -> None:
    mirrors = made(2, clock, lies=2)
    attempts = Attempts()
    assert borrow(mirrors, clock, attempts) == 0
    mirrors.lied(0, attempts)
    assert borrow(mirrors, clock, attempts) == 1
    mirrors.give_back(1)
    assert borrow(mirrors, clock) == 0
    mirrors.lied(0, Attempts())
    assert mirrors.lines[0].gone == "it sent wrong bytes 2 times"
    assert borrow(mirrors, clock) == 1


def test_a_throttle_makes_bytes_take_their_time(clock: Clock) -> None:
    looks = []

    def sleep(seconds: float) -> None:
        clock.now += seconds

    throttle = Throttle(100, clock=clock, sleep=sleep)
    for _ in range(5):
        throttle.take(50, lambda: looks.append(clock.now))
    assert clock.now == pytest.approx(2.5)
    assert len(looks) >= 25  # somebody who waits looks whether to stop, ten times a second


def test_no_limit_takes_no_time(clock: Clock) -> None:
    throttle = Throttle(None, clock=clock, sleep=lambda _: pytest.fail("waited"))
    throttle.take(10**12, lambda: pytest.fail("waited"))
