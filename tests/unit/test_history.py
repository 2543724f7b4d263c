"""What was accepted before is never forgotten, and nothing older or contradicting follows it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from safeload.errors import ConfigError, RollbackError
from safeload.trust import history as module
from safeload.trust.history import MAX_HISTORY_BYTES, MAX_STREAMS, MAX_VERSION_JUMP, History, Seen, format_instant
from safeload.trust.strict_json import MAX_INTEGER

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
A, B = "a" * 64, "b" * 64
STREAM = "hf:xai-org/grok-1"


def after(epoch: int = 2, version: int = 5, manifest: str = A, trust_version: int = 3, now: datetime = NOW) -> History:
    found = {"epoch": epoch, "version": version, "manifest": manifest, "trust_version": trust_version}
    return History().advanced(STREAM, now=now, **found)  # type: ignore[arg-type] # a table of keywords


def refused(code: str, history: History, **changes: Any) -> str:
    with pytest.raises(RollbackError) as caught:
        history.check(STREAM, **{"epoch": 2, "version": 5, "manifest": A, "trust_version": 3, **changes})
    (finding,) = caught.value.findings
    assert finding.code == code
    assert finding.hint is not None
    return finding.message


def test_the_first_manifest_of_a_stream_may_be_any() -> None:
    History().check(STREAM, epoch=7, version=MAX_INTEGER, manifest=A, trust_version=9)
    after().check("another", epoch=1, version=1, manifest=B, trust_version=1)


def test_a_time_is_written_in_ascii() -> None:
    text = after().to_bytes()
    assert History.parse(text).clock == "2026-11-30T12:00:00Z"
    with pytest.raises(ConfigError, match="clock"):
        History.parse(text.replace(b'"clock": "2026', b'"clock": "\\uff12026'))


def test_the_same_manifest_may_come_again_and_a_later_one_may_follow() -> None:
    history = after()
    history.check(STREAM, epoch=2, version=5, manifest=A, trust_version=3)
    history.check(STREAM, epoch=2, version=6, manifest=B, trust_version=4)
    history.check(STREAM, epoch=2, version=5 + MAX_VERSION_JUMP, manifest=B, trust_version=3)


@pytest.mark.parametrize(("epoch", "version"), [(2, 4), (2, 1), (1, 5), (1, 6), (1, MAX_INTEGER)])
def test_an_older_manifest_is_refused_and_named(epoch: int, version: int) -> None:
    message = refused("rollback", after(), epoch=epoch, version=version, manifest=B)
    assert "expected epoch 2, version 5 or later of hf:xai-org/grok-1" in message
    assert f"found epoch {epoch}, version {version}" in message


def test_a_manifest_that_came_before_is_as_old_as_any_other() -> None:
    history = after(version=4, manifest=B).advanced(STREAM, epoch=2, version=5, manifest=A, now=NOW)
    refused("rollback", history, version=4, manifest=B)


def test_two_manifests_with_one_number_are_refused() -> None:
    message = refused("equivocation", after(), manifest=B)
    assert A in message
    assert B in message


def test_a_jump_of_versions_is_refused_unless_the_epoch_rises() -> None:
    last = 5 + MAX_VERSION_JUMP
    assert f"version {last} " in refused("fast-forward", after(), version=last + 1)
    refused("fast-forward", after(), version=MAX_INTEGER)
    after().check(STREAM, epoch=3, version=MAX_INTEGER, manifest=B, trust_version=3)


def test_after_a_jump_a_higher_epoch_starts_anew() -> None:
    history = after(version=MAX_INTEGER)
    history.check(STREAM, epoch=3, version=1, manifest=B, trust_version=3)
    history = history.advanced(STREAM, epoch=3, version=1, manifest=B, now=NOW, trust_version=3)
    refused("rollback", history, version=MAX_INTEGER)


def test_an_older_trust_store_is_refused_and_keys_alone_are_not_compared() -> None:
    assert "version 3 or later of the trust store" in refused("trust-rollback", after(), trust_version=2)
    after().check(STREAM, epoch=2, version=5, manifest=A, trust_version=0)


def test_what_is_recorded_of_the_trust_store_never_falls() -> None:
    history = after().advanced(STREAM, epoch=2, version=6, manifest=B, now=NOW, trust_version=0)
    refused("trust-rollback", history, version=6, manifest=B, trust_version=2)


def test_each_stream_has_its_own_line() -> None:
    history = after().advanced("other", epoch=1, version=1, manifest=B, now=NOW)
    assert history.streams == {
        STREAM: Seen(epoch=2, version=5, manifest=A, trust_version=3, seen_at="2026-11-30T12:00:00Z"),
        "other": Seen(epoch=1, version=1, manifest=B, trust_version=0, seen_at="2026-11-30T12:00:00Z"),
    }
    refused("rollback", history, version=4)


def test_a_history_survives_its_own_text() -> None:
    history = after().advanced("é", epoch=1, version=1, manifest=B, now=NOW)
    assert History.parse(history.to_bytes()) == history
    assert History.parse(History().to_bytes()) == History()
    assert json.loads(history.to_bytes())["streams"][STREAM] == {
        "epoch": 2,
        "version": 5,
        "manifest": A,
        "trust_version": 3,
        "seen_at": "2026-11-30T12:00:00Z",
    }


def test_advancing_leaves_the_older_history_as_it_was() -> None:
    history = after()
    text = history.to_bytes()
    history.advanced(STREAM, epoch=2, version=6, manifest=B, now=NOW)
    assert history.to_bytes() == text


def test_the_clock_never_falls_and_tells_when_it_was_turned_back() -> None:
    history = after()
    history = history.advanced(STREAM, epoch=2, version=6, manifest=B, now=NOW - timedelta(days=1))
    assert history.clock == format_instant(NOW)
    assert history.streams[STREAM].seen_at == format_instant(NOW - timedelta(days=1))
    assert history.clock_moved_back(NOW) == 0
    assert history.clock_moved_back(NOW + timedelta(days=1)) == 0
    assert history.clock_moved_back(NOW - timedelta(seconds=300)) == 0
    assert history.clock_moved_back(NOW - timedelta(seconds=301)) == 301
    assert History().clock_moved_back(NOW) == 0


def seen(**changes: Any) -> dict[str, Any]:
    known = {"epoch": 1, "version": 1, "manifest": A, "trust_version": 0, "seen_at": "2026-01-01T00:00:00Z"}
    return {name: value for name, value in (known | changes).items() if value is not ...}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        b"[]",
        b"null",
        b"{}",
        b'{"spec":"1.0","spec":"1.0"}',
        b'{"spec":"1.0","streams":{"s":1.0}}',
        *(
            json.dumps(value).encode()
            for value in (
                {"spec": "2.0"},
                {"spec": "1.0", "more": 1},
                {"spec": "1.0", "clock": "2026-02-30T00:00:00Z"},
                {"spec": "1.0", "clock": "2026-01-01"},
                {"spec": "1.0", "clock": 7},
                {"spec": "1.0", "streams": []},
                {"spec": "1.0", "streams": {"": seen()}},
                {"spec": "1.0", "streams": {"s" * 256: seen()}},
                {"spec": "1.0", "streams": {"s": seen(epoch=0)}},
                {"spec": "1.0", "streams": {"s": seen(version=True)}},
                {"spec": "1.0", "streams": {"s": seen(version="1")}},
                {"spec": "1.0", "streams": {"s": seen(trust_version=-1)}},
                {"spec": "1.0", "streams": {"s": seen(manifest=A.upper())}},
                {"spec": "1.0", "streams": {"s": seen(manifest=A + "\n")}},
                {"spec": "1.0", "streams": {"s": seen(seen_at="now")}},
                {"spec": "1.0", "streams": {"s": seen(more=1)}},
                {"spec": "1.0", "streams": {"s": seen(version=...)}},
            )
        ),
    ],
)
def test_what_is_no_history_gives_no_verdict(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"history h\.json: ") as caught:
        History.parse(data, source="h.json")
    assert caught.value.hint is not None


def test_a_history_is_limited() -> None:
    with pytest.raises(ConfigError, match="at most"):
        History.parse(b" " * (MAX_HISTORY_BYTES + 1))
    one = Seen(**seen())
    full = History(streams={f"{n:0255d}": one for n in range(MAX_STREAMS)})
    assert len(full.to_bytes()) < MAX_HISTORY_BYTES
    again = full.advanced("0" * 255, epoch=1, version=2, manifest=B, now=NOW)
    assert len(again.streams) == MAX_STREAMS
    with pytest.raises(ConfigError, match="no room for another"):
        full.advanced("another", epoch=1, version=1, manifest=B, now=NOW)


def test_the_constants_are_those_that_were_decided() -> None:
    assert (module.MAX_VERSION_JUMP, module.CLOCK_SKEW_SECONDS, module.MAX_STREAMS) == (1000, 300, 10_000)
