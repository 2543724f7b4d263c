"""Claims of `safeload.parallel`: largest first, results in order, and the cause of an end is what is raised."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from safeload import parallel
from safeload.errors import StagingError
from safeload.parallel import Crew, Meter, run


def test_results_are_in_the_order_of_the_items_and_the_largest_is_begun_first() -> None:
    begun: list[int] = []

    def work(item: int, meter: Meter) -> int:
        begun.append(item)
        meter.advance(item)
        return -item

    told: list[tuple[str, int, int]] = []
    items = [3, 1, 9, 5]
    results = run(
        items, work, size=lambda item: item, threads=1, phase="test", progress=lambda *told_: told.append(told_)
    )
    assert results == [-3, -1, -9, -5]
    assert begun == [9, 5, 3, 1]
    assert told[-1] == ("test", 18, 18)


def test_a_lot_is_worked_on_while_another_is_used_and_in_the_order_in_which_they_were_begun() -> None:
    done: list[str] = []

    def work(item: str, meter: Meter) -> str:
        meter.advance(1)
        done.append(item)
        return item

    with Crew(1) as crew:
        first = crew.begin(["a", "b"], work, size=len)
        second = crew.begin(["c"], work, size=len)
        counts: list[int] = []
        assert crew.finish(first, counts.append) == ["a", "b"]
        deadline = time.monotonic() + 10
        while done != ["a", "b", "c"] and time.monotonic() < deadline:
            time.sleep(0.001)
        assert done == ["a", "b", "c"]  # though nobody waits for it yet
        assert crew.finish(second, counts.append) == ["c"]
        assert counts[-1] == 3


@pytest.mark.parametrize("awaited", ["first", "second"])
def test_what_is_raised_is_the_cause_whichever_lot_it_was_in(awaited: str) -> None:
    failed = threading.Event()

    def work(item: str, meter: Meter) -> None:
        if item == "fails":
            try:
                raise OSError(5, "Input/output error")
            finally:
                failed.set()
        failed.wait(10)
        time.sleep(0.05)
        meter.advance(1)  # ends here, because of the other

    with Crew(2) as crew:
        lots = {
            "first": crew.begin(["waits"], work, size=len),
            "second": crew.begin(["fails"], work, size=len),
        }
        with pytest.raises(OSError, match="Input/output error"):
            crew.finish(lots[awaited], lambda _: None)


def test_leaving_a_crew_stops_what_is_not_done_and_waits_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    begun = threading.Event()

    def work(item: int, meter: Meter) -> None:
        for _ in range(1000):
            pieces.append(item)
            begun.set()
            time.sleep(0.01)
            meter.advance(1)

    monkeypatch.setattr(parallel, "_POLL_SECONDS", 0.01)
    with Crew(1) as crew:
        crew.begin([1, 2, 3], work, size=lambda item: item)
        begun.wait(10)
    assert set(pieces) == {3}
    assert len(pieces) < 100
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("safeload")]


def test_an_interruption_of_the_calling_thread_stops_the_others() -> None:
    pieces: list[int] = []

    def work(item: int, meter: Meter) -> None:
        for _ in range(1000):
            pieces.append(item)
            time.sleep(0.01)
            meter.advance(1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([1, 2], work, size=lambda item: item, threads=2, phase="test", progress=interrupt)
    assert len(pieces) < 200


INTERRUPTED = """
import _thread, random, sys, threading, time
from safeload.parallel import run

def work(item, meter):
    meter.advance(1)
    return item

# Where Python itself ignores an interruption, as in a finalizer, it says so, and the run goes on.
sys.unraisablehook = lambda _: None
random.seed(7)
ended = {"interrupted": 0, "done": 0}
for _ in range(150):
    timer = threading.Timer(random.random() * 0.02, _thread.interrupt_main)
    try:
        timer.start()
        run(range(2000), work, size=lambda item: 1, threads=2, phase="test", progress=None)
        ended["done"] += 1
        timer.cancel()
        timer.join()
        time.sleep(0.001)
    except KeyboardInterrupt:
        ended["interrupted"] += 1
print(ended["interrupted"])
"""


@pytest.mark.slow
def test_an_interruption_at_any_moment_ends_the_run() -> None:
    """Nothing that a thread needs may stay taken: it would wait for ever, and so would who waits for it."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 20


@pytest.mark.parametrize("n_given", [0, 1])
def test_what_the_system_gives_of_threads_has_to_do(monkeypatch: pytest.MonkeyPatch, n_given: int) -> None:
    start = threading.Thread.start
    given: list[threading.Thread] = []

    def stingy(thread: threading.Thread) -> None:
        if len(given) == n_given:
            raise RuntimeError("can't start new thread")
        given.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", stingy)
    options: dict[str, Any] = {"size": int, "threads": 4, "phase": "counting", "progress": None}
    if n_given:
        assert run([1, 2, 3], lambda item, _: item * 2, **options) == [2, 4, 6]
    else:
        with pytest.raises(StagingError, match="no thread") as caught:
            run([1, 2, 3], lambda item, _: item * 2, **options)
        assert caught.value.hint is not None
