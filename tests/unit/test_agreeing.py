"""Claims of `safeload.agreeing`, with a store in the place of the coordination service; the real one is tested in
test_many_processes.py."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from safeload import agreeing
from safeload.agreeing import Agreement, together
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    Finding,
    HostError,
    PolicyError,
    RejectedError,
    SafeloadError,
    StagingError,
)


class Store:
    """A key-value store as the coordination service has it, errors included."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            if key in self.values:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        with self._changed:
            if key not in self.values:
                raise RuntimeError(f"NOT_FOUND: {key}")
            return self.values[key]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(agreeing, "_SLICE_SECONDS", 0.05)
    return Store()


def job(store: Any, *works: Callable[[Agreement], object], seconds: float = 5.0) -> list[Any]:
    """Do one work for each process, all at once; return what each returned or raised."""

    def one(process: int, work: Callable[[Agreement], object]) -> object:
        agreement = Agreement(store, process, len(works), seconds=seconds)
        agreement._folder = "safeload/0"
        try:
            try:
                result = work(agreement)
                agreement.settle()
            except BaseException as err:
                agreement.refuse(err)
                raise
        except SafeloadError as err:
            return err
        return result

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, range(len(works)), works))


FINDING = Finding("digest-mismatch", "expected this, found that", file="a/file", offset=7, hint="fetch it again")


def refuse(_: Agreement) -> object:
    raise DigestMismatchError(FINDING)


def test_all_accept(store: Store) -> None:
    assert job(store, lambda _: 1, lambda _: 2, lambda _: 3) == [1, 2, 3]


def test_one_refusal_is_everybodys_with_class_and_finding(store: Store) -> None:
    first, second, third = job(store, lambda _: 1, refuse, lambda _: 3)
    assert second.findings == (FINDING,)
    for other in (first, third):
        assert type(other) is DigestMismatchError
        (found,) = other.findings
        assert (found.code, found.file, found.offset, found.hint) == ("digest-mismatch", "a/file", 7, "fetch it again")
        assert found.message == "expected this, found that (found by process 1)"


def test_a_refusal_is_seen_by_those_that_are_still_at_work(store: Store) -> None:
    def work(agreement: Agreement) -> object:
        progress = agreement.watching(None)
        assert progress is not None
        for _ in range(200):
            time.sleep(0.02)
            progress("staging", 1, 2)
        return "went on"

    started = time.monotonic()
    first, _ = job(store, work, refuse)
    assert type(first) is DigestMismatchError
    assert time.monotonic() - started < 3


def test_who_waits_for_one_hears_of_the_refusal_of_another(store: Store) -> None:
    ends: list[float] = []

    def slow(_: Agreement) -> object:
        time.sleep(1.5)
        return "slow"

    def quick(agreement: Agreement) -> object:
        try:
            agreement.settle()
        finally:
            ends.append(time.monotonic())
        return "quick"

    started = time.monotonic()
    first, *_ = job(store, quick, slow, refuse)
    assert type(first) is DigestMismatchError
    assert ends[0] - started < 1


def test_who_refuses_stays_until_the_others_know_why(store: Store) -> None:
    agreement = Agreement(store, 0, 2, seconds=5)
    known = threading.Timer(0.4, store.key_value_set, (f"{agreement._folder}/seen/1", "1"))
    started = time.monotonic()
    known.start()
    agreement.refuse(PolicyError(FINDING))
    assert 0.3 < time.monotonic() - started < 3
    known.join()


def test_two_that_refuse_at_once_each_raise_their_own(store: Store) -> None:
    def other(_: Agreement) -> object:
        raise PolicyError(Finding("role-missing", "expected a role"))

    first, second, third = job(store, refuse, other, lambda _: 1)
    assert (type(first), type(second)) == (DigestMismatchError, PolicyError)
    assert type(third) in {DigestMismatchError, PolicyError}


def test_no_verdict_elsewhere_is_no_verdict_here(store: Store) -> None:
    def fail(_: Agreement) -> object:
        raise StagingError("no room\x1b")

    first, second = job(store, lambda _: 1, fail)
    assert type(first) is HostError
    assert first.message == r"process 1 has no verdict: StagingError: no room\x1b"
    assert type(second) is StagingError


def test_an_error_that_is_none_of_ours_stops_the_others_too(store: Store) -> None:
    def crash(_: Agreement) -> object:
        raise MemoryError

    def one(work: Callable[[Agreement], object]) -> Any:
        return work

    with pytest.raises(MemoryError):
        job(store, lambda _: 1, one(crash))
    stop = json.loads(store.values["safeload/0/stop"])
    assert (stop["ended"], stop["error"]) == ("failed", "MemoryError")


def test_who_does_not_answer_is_waited_for_so_long_and_no_longer(store: Store) -> None:
    started = time.monotonic()
    agreement = Agreement(store, 0, 2, seconds=0.3)
    with pytest.raises(HostError, match=r"process 1 did not answer within 0\.3 seconds"):
        agreement.settle()
    assert 0.25 < time.monotonic() - started < 3


def test_processes_that_load_different_things_do_not_go_on(store: Store) -> None:
    def of(digest: str) -> Callable[[Agreement], object]:
        return lambda agreement: agreement.claim("manifest", digest)

    for found in job(store, of("a"), of("b")):
        assert type(found) is HostError


def test_a_service_that_is_gone_is_a_host_error() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            def call(*_: object) -> str:
                raise RuntimeError("UNAVAILABLE: connection refused")

            return call

    agreement = Agreement(Gone(), 0, 2, seconds=1)
    with pytest.raises(HostError, match="coordination service of the job cannot be reached: UNAVAILABLE"):
        agreement.settle()
    agreement.refuse(StagingError("no room"))  # and never hides the error that is on its way


GOOD = {"process": 1, "ended": "accepted", "error": None, "message": None, "findings": [], "claims": {}}


@pytest.mark.parametrize(
    "said",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({**GOOD, "ended": "perhaps"}),
        json.dumps({**GOOD, "more": 1}),
        json.dumps({**GOOD, "process": -1}),
        json.dumps({**GOOD, "process": "1"}),
        json.dumps({**GOOD, "message": "x" * 2000}),
        json.dumps({**GOOD, "findings": [{"code": "c", "message": "m"}] * 9}),
        '{"process": 1, "process": 1, "ended": "accepted"}',
        json.dumps({**GOOD, "claims": {str(n): "x" * 900 for n in range(300)}}),
    ],
)
def test_what_is_no_outcome_is_no_verdict(store: Store, said: str) -> None:
    agreement = Agreement(store, 0, 2, seconds=1)
    store.values[f"{agreement._folder}/ended/1"] = said
    with pytest.raises(HostError, match="process 1 said what is no outcome"):
        agreement.settle()


@pytest.mark.parametrize("name", ["SystemExit", "StagingError", "Exception", "", "RejectedError.__init__"])
def test_another_process_chooses_no_class_but_a_rejection(store: Store, name: str) -> None:
    agreement = Agreement(store, 0, 2, seconds=1)
    finding = {"code": "c", "message": "m"}
    said = {**GOOD, "ended": "rejected", "error": name, "findings": [finding]}
    store.values[f"{agreement._folder}/ended/1"] = json.dumps(said)
    with pytest.raises(HostError, match="no verdict"):
        agreement.settle()


def test_what_is_said_is_cut_short(store: Store) -> None:
    def refuse_at_length(_: Agreement) -> object:
        raise DigestMismatchError(*[Finding("c", "m" * 5000, file="f" * 9000, hint="h" * 5000)] * 50)

    first, second = job(store, lambda _: 1, refuse_at_length)
    assert len(second.findings) == 50
    assert type(first) is DigestMismatchError
    assert len(first.findings) == 8
    assert max(map(len, store.values.values())) < 64 * 1024


def test_a_name_that_is_no_text_does_not_hide_the_reason(store: Store) -> None:
    def refuse_odd(_: Agreement) -> object:
        raise DigestMismatchError(Finding("c", "m", file="odd\udcff"))

    first, _ = job(store, lambda _: 1, refuse_odd)
    assert type(first) is DigestMismatchError
    assert first.findings[0].file == "odd\\udcff"


def test_one_process_has_nothing_to_agree_on() -> None:
    with together(connect=lambda: (None, 0, 1)) as agreement:
        assert agreement.watching(None) is None
        agreement.look()
    with pytest.raises(RejectedError), together(connect=lambda: (None, 0, 1)):
        raise PolicyError(Finding("c", "m"))


def test_a_context_in_another_is_the_same_one(store: Store) -> None:
    def enter_twice() -> None:
        with together(seconds=0.2, connect=lambda: (store, 0, 2)) as outer:
            with together(connect=lambda: pytest.fail("connected again")) as inner:
                assert inner is outer
            assert not store.values

    with pytest.raises(HostError, match="did not answer"):
        enter_twice()


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_time_to_wait_is_one(seconds: float) -> None:
    with pytest.raises(ConfigError, match="number of seconds"), together(seconds=seconds):
        pytest.fail("entered")


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_time_to_wait_that_is_none_is_told_to_the_others(store: Store, seconds: float) -> None:
    with (
        pytest.raises(ConfigError, match="expected a number of seconds"),
        together(seconds=seconds, connect=lambda: (store, 1, 2)),
    ):
        pass
    (stop,) = (json.loads(value) for key, value in store.values.items() if key.endswith("/stop"))
    assert (stop["process"], stop["error"]) == (1, "ConfigError")
