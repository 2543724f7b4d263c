"""Claims of `safeload.fetching.fetch`: the signed checkpoint whole, or nothing, whatever the mirrors do."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FetchError,
    FileSetError,
    ManifestError,
    RejectedError,
    SignatureError,
    StagingError,
)
from safeload.fetching import fetch as fetching
from safeload.fetching import partial
from safeload.fetching.fetch import FetchEvent, fetch, fetch_and_report, plan
from safeload.fetching.http import Client, Timing
from safeload.fetching.mirrors import Pacing
from safeload.fetching.partial import work_area_of
from safeload.fetching.quarantine import Quarantine, quarantine_of
from safeload.files import read_into
from safeload.loading import verify
from safeload.report import Report
from safeload.trust.dsse import pae
from safeload.trust.keys import SecretKey
from tests.fetching_sample import (
    CHUNK_BYTES,
    Sample,
    array_pickle,
    files_of,
    make_sample,
    read_all,
    shrink_chunks,
)
from tests.hostile_server import Behavior, HostileServer, Reply, Request, honest

BIG = "ckpt-0/tensor00000_000"
HASTY = Pacing(tries=3, first_delay=0.01, longest_delay=0.02, cooldown=0.05)
FAST = Timing(connect=2, read=1, headers=1, min_rate=1024, rate_window=1)


@dataclass(frozen=True)
class Web:
    """A folder on a server, as a mirror."""

    client: Client
    url: str

    @property
    def name(self) -> str:
        return self.url

    def read(self, path: str, start: int, stop: int, size: int, /) -> Iterator[bytes]:
        return self.client.read(f"{self.url}/{path}", start, stop, size=size)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_chunks(monkeypatch)


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(allow_private={"127.0.0.1"}, timing=FAST) as made:
        yield made


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return make_sample(tmp_path / "published", files_of())


def bring(
    sample: Sample,
    target: Path,
    client: Client,
    servers: Sequence[HostileServer],
    *,
    trust: Any = None,
    manifest: bytes | None = None,
    **more: Any,
) -> Report:
    first, *others = [Web(client, server.url) for server in servers]
    settings: dict[str, Any] = {"pacing": HASTY, **more}
    return fetch(
        first,
        target,
        manifest=manifest or sample.manifest,
        trust=trust or sample.trust,
        mirrors=others,
        **settings,
    )


def assert_nothing_published(target: Path) -> None:
    assert not target.exists()
    assert [p.name for p in target.parent.iterdir() if target.name in p.name and not p.name.startswith(".")] == []


# --- the whole ----------------------------------------------------------------------------------------------------


def test_an_honest_mirror_brings_exactly_the_signed_files(tmp_path: Path, sample: Sample, client: Client) -> None:
    target = tmp_path / "model"
    with HostileServer(sample.files) as server:
        report = bring(sample, target, client, [server])
    assert report.is_accepted
    assert read_all(target) == sample.files
    assert report.facts["fetch"]["fetched_bytes"] == sum(map(len, sample.files.values()))
    assert report.facts["fetch"]["mirrors"][0]["wrong_pieces"] == 0
    assert verify(target, manifest=sample.manifest, trust=sample.trust).is_accepted
    assert not work_area_of(target).exists()
    assert not quarantine_of(target).exists()


@pytest.mark.parametrize("has_ranges", [True, False])
def test_large_pieces_share_a_few_rooms_and_come_out_right(
    tmp_path: Path, sample: Sample, client: Client, monkeypatch: pytest.MonkeyPatch, has_ranges: bool
) -> None:
    made: list[int] = []

    def counted(nbytes: int) -> mmap.mmap:
        made.append(nbytes)
        return partial.aligned_memory(nbytes)

    monkeypatch.setattr("safeload.fetching.fetch.aligned_memory", counted)
    behavior = honest if has_ranges else ignoring_ranges
    with HostileServer(sample.files, behavior) as server:
        bring(sample, tmp_path / "model", client, [server], connections=8)
    assert read_all(tmp_path / "model") == sample.files
    assert 1 <= len(made) <= 3
    assert set(made) == {CHUNK_BYTES}


def test_pieces_are_hashed_for_their_file_without_being_read_again(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()

    def counted(fd: int, target: memoryview, offset: int, *, path: str) -> int:
        got = read_into(fd, target, offset, path=path)
        read[path] += got
        return got

    big = make_sample(tmp_path / "published", {BIG: array_pickle(1, 60 * CHUNK_BYTES)})
    monkeypatch.setattr("safeload.files.read_into", counted)
    with HostileServer(big.files) as server:
        assert bring(big, tmp_path / "model", client, [server], connections=1).is_accepted
    # The last chunk came first.
    assert read[BIG] <= CHUNK_BYTES
    assert read_all(tmp_path / "model") == big.files


@pytest.mark.parametrize("connections", [1, 4])
def test_a_piece_that_is_late_keeps_no_other_from_coming(tmp_path: Path, connections: int) -> None:
    """All rooms hold pieces that come after it: one is taken, and what was in it comes back from disk."""
    n_chunks = 12
    big = make_sample(tmp_path / "published", {BIG: array_pickle(1, n_chunks * CHUNK_BYTES - 1000)})
    left = set(range(n_chunks))
    others_are_there = threading.Event()

    def first_last(request: Request, reply: Reply, data: bytes | None) -> None:
        start, _ = request.range(1 << 30) or (0, 0)
        index = start // CHUNK_BYTES
        if index == 0 and connections > 1:
            assert others_are_there.wait(20)
        reply.honest(request, data)
        left.discard(index)
        if left <= {0}:
            others_are_there.set()

    timing = Timing(read=30, headers=30)
    with HostileServer(big.files, first_last) as server, Client(allow_private={"127.0.0.1"}, timing=timing) as patient:
        assert bring(big, tmp_path / "model", patient, [server], connections=connections).is_accepted
    assert read_all(tmp_path / "model") == big.files
    assert left == set()


def test_rooms_of_files_that_cannot_be_had_are_free_for_others(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[fetching._Rooms] = []
    made = fetching._Rooms

    def noted() -> fetching._Rooms:
        taken.append(made())
        return taken[-1]

    monkeypatch.setattr(fetching, "_Rooms", noted)
    both = make_sample(
        tmp_path / "published", {f"tensor0000{i}_000": array_pickle(i, 9 * CHUNK_BYTES) for i in range(6)}
    )

    def lying(request: Request, reply: Reply, data: bytes | None) -> None:
        is_lie = request.path < "tensor00004" and "bytes=65536-" in request.headers["range"]
        reply.honest(request, bytes(len(data or b"")) if is_lie else data)

    with HostileServer(both.files, lying) as server:
        settings: dict[str, Any] = {"pacing": Pacing(lies=100, first_delay=0.01), "connections": 8, "incremental": True}
        report = fetch_and_report(
            Web(client, server.url), tmp_path / "model", manifest=both.manifest, trust=both.trust, **settings
        )
    assert [file.path for file in report.files if not file.findings] == ["tensor00004_000", "tensor00005_000"]
    assert {finding.code for finding in report.all_findings} == {"digest-mismatch"}
    (rooms,) = taken
    assert len(rooms._free) + rooms._n_unmade == 3


def impatient(seconds: float) -> Callable[..., None]:
    """Return a `progress` that ends a fetch which goes on for too long."""
    until = time.monotonic() + seconds

    def look(*_: object) -> None:
        assert time.monotonic() < until, "nothing ended it"

    return look


@pytest.mark.parametrize("error", [StagingError("cannot take 16 MiB of memory"), MemoryError()])
def test_a_fetch_ends_where_there_is_no_memory_for_a_piece(
    tmp_path: Path, sample: Sample, client: Client, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def none(_: int) -> mmap.mmap:
        raise error

    monkeypatch.setattr(fetching, "aligned_memory", none)
    target = tmp_path / "model"
    with HostileServer(sample.files) as server, pytest.raises(type(error)) as caught:
        bring(sample, target, client, [server], progress=impatient(10))
    assert caught.value is error
    assert_nothing_published(target)


def test_a_room_that_could_not_be_made_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: int) -> mmap.mmap:
        raise StagingError("no memory")

    rooms = fetching._Rooms()
    with monkeypatch.context() as patch:
        patch.setattr(fetching, "aligned_memory", none)
        with pytest.raises(StagingError):
            rooms.take(lambda: None)
    made = [rooms.take(impatient(5)) for _ in range(3)]
    assert len({id(room) for room in made}) == 3


def test_a_system_without_threads_for_us_is_told_in_our_words(
    tmp_path: Path, sample: Sample, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "safeload-fetch_1":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    target = tmp_path / "model"
    with HostileServer(sample.files) as server, pytest.raises(StagingError, match="can't start new thread"):
        bring(sample, target, client, [server], progress=impatient(10))
    assert_nothing_published(target)


def test_pieces_that_a_second_interruption_canceled_are_not_waited_for() -> None:
    """Of two, one is being fetched and one waits; the pool is shut down while both are waited for."""
    begun, go_on = threading.Event(), threading.Event()

    def ended() -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    def work() -> None:
        begun.set()
        assert go_on.wait(10)

    def wait_for_all(futures: Sequence[Future[None]]) -> None:
        with pytest.raises(KeyboardInterrupt):
            fetching._wait_for(futures, ended)

    pool = ThreadPoolExecutor(1)
    futures = [pool.submit(work), pool.submit(work)]
    assert begun.wait(10)
    pool.shutdown(wait=False, cancel_futures=True)
    waiting = threading.Thread(target=wait_for_all, args=(futures,), daemon=True)
    waiting.start()
    waiting.join(0.3)
    # The one that is being fetched still writes to its file.
    assert waiting.is_alive()
    go_on.set()
    waiting.join(5)
    assert not waiting.is_alive()


def test_what_is_fetched_has_ordinary_permissions(tmp_path: Path, sample: Sample, client: Client) -> None:
    target = tmp_path / "model"
    before = os.umask(0o022)
    try:
        with HostileServer(sample.files) as server:
            bring(sample, target, client, [server])
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in target.rglob("*") if p.is_file()} == {"0o644"}
    assert {oct(p.stat().st_mode & 0o777) for p in (target, target / "ckpt-0")} == {"0o755"}
    assert {p.stat().st_nlink for p in target.rglob("*") if p.is_file()} == {1}


def test_a_manifest_by_another_key_is_refused_before_anything_is_asked_or_made(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    target = tmp_path / "model"
    with HostileServer(sample.files) as server, pytest.raises(SignatureError):
        bring(sample, target, client, [server], trust=SecretKey.generate().public)
    assert server.requests == []
    assert [p.name for p in tmp_path.iterdir()] == ["published"]


def test_a_server_is_asked_for_what_the_manifest_lists_and_for_nothing_else(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    more = {**sample.files, "../evil": b"x", "extra.bin": b"x", "Config.json": b"x"}
    with HostileServer(more) as server:
        bring(sample, tmp_path / "model", client, [server])
    assert {request.path for request in server.requests} == set(sample.files)
    assert read_all(tmp_path / "model") == sample.files


def test_progress_ends_at_the_total_and_events_tell_of_each_file(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    told: list[tuple[str, int, int]] = []
    events: list[FetchEvent] = []
    with HostileServer(sample.files) as server:
        bring(
            sample,
            tmp_path / "model",
            client,
            [server],
            progress=lambda *step: told.append(step),
            watch=events.append,
        )
    total = sum(map(len, sample.files.values()))
    assert told[-1] == ("fetching", total, total)
    assert all(step[2] == total for step in told)
    assert {event.path for event in events if event.kind == "file"} == set(sample.files)
    assert max(event.done for event in events if event.path == BIG) == len(sample.files[BIG])
    assert events[-1].kind == "published"
    assert all(json.dumps(event.to_json()) for event in events)


def resigned(sample: Sample, key: SecretKey, change: Callable[[str], str]) -> bytes:
    """Return the sample's manifest with another text, signed as well as the first."""
    envelope = json.loads(sample.manifest)
    payload = change(base64.b64decode(envelope["payload"]).decode()).encode()
    signature = key.sign(pae(envelope["payloadType"], payload))
    envelope["payload"] = base64.b64encode(payload).decode()
    envelope["signatures"] = [{"keyid": key.public.keyid, "sig": base64.b64encode(signature).decode()}]
    return json.dumps(envelope).encode()


def test_a_file_whose_chunks_are_right_and_whose_own_digest_is_not_is_refused(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    key = SecretKey.generate()
    signed = hashlib.sha256(sample.files[BIG]).hexdigest()

    def lie(text: str) -> str:
        other = text.replace(signed, "0" * 64)
        files = json.loads(other)["predicate"]["files"]
        lines = [f"{len(f['path'].encode())} {f['path']} {f['size']} {f['sha256']}\n" for f in files]
        tree = hashlib.sha256("".join(["safeload-tree-v1\n", *lines]).encode()).hexdigest()
        return other.replace(json.loads(text)["subject"][0]["digest"]["sha256"], tree)

    manifest = resigned(sample, key, lie)
    target = tmp_path / "model"
    with HostileServer(sample.files) as server, pytest.raises(DigestMismatchError) as refused:
        bring(sample, target, client, [server], manifest=manifest, trust=key.public)
    assert [(finding.file, finding.code) for finding in refused.value.findings] == [(BIG, "digest-mismatch")]
    assert f"sha256:{signed}" in refused.value.findings[0].message
    assert_nothing_published(target)


@pytest.mark.parametrize(
    "name",
    [
        *("../../evil", "/etc/evil", "C:/evil", "a\\\\b", "a\\u0000b", "a//b", "a/./b", "a/../b", ".git/hooks", ""),
        *("e\\u0301vil", "evil.", "evil ", "a\\u202eb", "ckpt-0/TENSOR00000_000", "Config.json", "config.json"),
    ],
)
def test_a_signed_name_that_is_no_path_or_anothers_twin_is_refused_before_anything_is_asked_or_made(
    tmp_path: Path, sample: Sample, client: Client, name: str
) -> None:
    key = SecretKey.generate()
    same = resigned(sample, key, lambda text: text)
    with HostileServer(sample.files) as server:
        target = tmp_path / "some" / "where"
        target.parent.mkdir()
        manifest = resigned(sample, key, lambda text: text.replace("ckpt-0/tensor00001_000", name))
        with pytest.raises(ManifestError):
            bring(sample, target, client, [server], manifest=manifest, trust=key.public)
        assert server.requests == []
        assert list(target.parent.iterdir()) == []
        assert bring(sample, target, client, [server], manifest=same, trust=key.public).is_accepted


def test_a_mirror_below_which_no_file_can_lie_is_refused_before_anything_is_made(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    with HostileServer(sample.files) as server:
        with pytest.raises(ConfigError, match="expected the URL of a folder"):
            fetch(
                Web(client, server.url),
                tmp_path / "model",
                manifest=sample.manifest,
                trust=sample.trust,
                mirrors=["https://mirror.example/x?token=1"],
            )
        assert server.requests == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["published"]


def test_nothing_has_a_name_before_it_is_on_disk(
    tmp_path: Path, sample: Sample, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a power cut leaves: of a file what was synced, of a directory the names that it had when it was synced.
    target = tmp_path / "model"
    steps: list[tuple[str, int]] = []
    fsync, pwrite, replace, rename = os.fsync, os.pwrite, os.replace, Path.rename

    def inode(fd: int) -> int:
        return os.fstat(fd).st_ino

    def record_write(fd: int, data: bytes, offset: int) -> int:
        steps.append(("write", inode(fd)))
        return pwrite(fd, data, offset)

    def record_fsync(fd: int) -> None:
        fsync(fd)
        steps.append(("sync", inode(fd)))

    def record_replace(source: str, last: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        steps.extend(
            [
                ("name", os.stat(source, dir_fd=src_dir_fd).st_ino),
                ("write", inode(dst_dir_fd)),  # a directory has other names now
            ]
        )
        replace(source, last, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def record_rename(source: Path, last: Path) -> Path:
        steps.append(("publish", source.stat().st_ino))
        return rename(source, last)

    def tell(event: FetchEvent) -> None:
        if event.kind == "piece" and event.path == BIG:
            told.append(event)

    told: list[FetchEvent] = []
    with monkeypatch.context() as patch, HostileServer(sample.files) as server:
        patch.setattr(os, "pwrite", record_write)
        patch.setattr(os, "fsync", record_fsync)
        patch.setattr(os, "fdatasync", record_fsync)
        patch.setattr(os, "replace", record_replace)
        patch.setattr(Path, "rename", record_rename)
        bring(sample, target, client, [server], watch=tell, connections=1)
    published = [step for step, _ in steps].index("publish")
    for path in (target, *target.rglob("*")):
        here = path.stat().st_ino
        mine = [(at, step) for at, (step, whose) in enumerate(steps) if whose == here]
        written = max((at for at, step in mine if step == "write"), default=-1)
        named = next((at for at, step in mine if step == "name"), published)
        assert any(written < at < named for at, step in mine if step == "sync"), path
    assert steps[published + 1] == ("sync", tmp_path.stat().st_ino)
    # And each piece of a long file by itself, so that it is there for the next run.
    big = (target / BIG).stat().st_ino
    of_big = [step for step, whose in steps if whose == big]
    assert len(told) == of_big.count("write") == 6
    assert of_big.count("sync") == 7


# --- mirrors that lie ---------------------------------------------------------------------------------------------


def lying(change: Callable[[bytes], bytes], path: str = BIG) -> Behavior:
    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        reply.honest(request, change(data) if data is not None and request.path == path else data)

    return behave


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_wrong_bytes_of_the_right_length_are_a_verdict_that_names_the_mirror(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    target = tmp_path / "model"
    at = 2 * CHUNK_BYTES + 5
    with HostileServer(sample.files, lying(flipped(at))) as server, pytest.raises(DigestMismatchError) as caught:
        bring(sample, target, client, [server])
    (finding,) = caught.value.findings
    assert (finding.code, finding.file, finding.offset) == ("digest-mismatch", BIG, 2 * CHUNK_BYTES)
    assert server.url in finding.message
    assert_nothing_published(target)
    (left,) = (work_area_of(target) / "partial").iterdir()
    whole = sample.files[BIG]
    expected = whole[: 2 * CHUNK_BYTES] + bytes(CHUNK_BYTES) + whole[3 * CHUNK_BYTES :]
    assert left.read_bytes() == expected  # not one byte of the wrong piece was written
    (record,) = Quarantine(target).records()
    assert (record.path, record.mirrors, record.offset, record.kept) == (BIG, [server.url], 2 * CHUNK_BYTES, False)


def test_a_bad_piece_is_fetched_again_from_another_mirror_and_only_that_piece(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    target = tmp_path / "model"
    events: list[FetchEvent] = []
    with HostileServer(sample.files, lying(flipped(CHUNK_BYTES))) as liar, HostileServer(sample.files) as other:
        report = bring(sample, target, client, [liar, other], watch=events.append)
    assert read_all(target) == sample.files
    first, second = report.facts["fetch"]["mirrors"]
    assert (first["wrong_pieces"], second["wrong_pieces"]) in {(1, 0), (0, 0)}
    assert {event.mirror for event in events if event.kind == "wrong-bytes"} <= {liar.url}
    asked = [r.headers["range"] for r in (*liar.requests, *other.requests) if r.path == BIG]
    assert len(asked) == len(set(asked)) + first["wrong_pieces"]


def test_a_mirror_that_always_lies_is_given_up_and_the_other_brings_all(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    def all_wrong(request: Request, reply: Reply, data: bytes | None) -> None:
        reply.honest(request, bytes(len(data or b"")))

    with HostileServer(sample.files, all_wrong) as liar, HostileServer(sample.files) as other:
        report = bring(sample, tmp_path / "model", client, [liar, other], connections=1)
    assert read_all(tmp_path / "model") == sample.files
    first, second = report.facts["fetch"]["mirrors"]
    assert first["bytes"] == 0
    assert first["wrong_pieces"] >= 1
    assert second["bytes"] == sum(map(len, sample.files.values()))


def saying(status: int, body: bytes = b"", **headers: object) -> Behavior:
    def behave(_: Request, reply: Reply, __: bytes | None) -> None:
        reply.head(status, **{"Content_Length": len(body), **headers})
        reply.raw(body)

    return behave


def ignoring_ranges(_: Request, reply: Reply, data: bytes | None) -> None:
    reply.head(200, Content_Length=len(data or b""))
    reply.raw(data or b"")


BROKEN: dict[str, Behavior] = {
    "a page of html": saying(200, b"<a/>", Content_Type="text/html"),
    "always truncated": saying(206, b"123", Content_Length=9, Content_Range="bytes 0-8/9"),
    "no such file": saying(404),
    "an error": saying(500),
    "nothing": lambda *_: None,
    "compressed": saying(206, Content_Encoding="gzip"),
    "elsewhere": saying(302, Location="http://169.254.169.254/"),
    "the whole file": ignoring_ranges,
}


@pytest.mark.parametrize("case", [case for case in BROKEN if case != "the whole file"])
def test_a_mirror_that_cannot_serve_is_no_verdict_and_publishes_nothing(
    tmp_path: Path, sample: Sample, client: Client, case: str
) -> None:
    target = tmp_path / "model"
    with (
        HostileServer(sample.files, BROKEN[case]) as server,
        pytest.raises(FetchError, match="files could not be fetched"),
    ):
        bring(sample, target, client, [server])
    assert_nothing_published(target)
    assert len(server.requests) <= 3 * 8  # every piece as often as `HASTY` says, and no more


def test_a_page_in_the_place_of_every_file_is_not_asked_for_again(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    def login(_: Request, reply: Reply, __: bytes | None) -> None:
        reply.head(200, Content_Length=18, Content_Type="text/html")
        reply.raw(b"<html>Login</html>")

    with HostileServer(sample.files, login) as server, pytest.raises(FetchError) as caught:
        bring(sample, tmp_path / "model", client, [server], connections=1, pacing=Pacing(first_delay=0.01))
    assert "another file, or a page, is at that URL" in (caught.value.hint or "")
    # Each file once, and the long one first for a range.
    assert len(server.requests) == len(sample.files) + 1


def test_a_mirror_without_ranges_is_not_told_of_as_if_it_had_failed(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    events: list[FetchEvent] = []
    with HostileServer(sample.files, ignoring_ranges) as server:
        bring(sample, tmp_path / "model", client, [server], watch=events.append)
    (told,) = {event.message for event in events if event.kind == "retry"}
    assert told is not None
    assert told.endswith("sends no ranges of this file: it is read whole where no other mirror has it")


def test_what_would_help_with_a_mirror_is_said_at_the_end(tmp_path: Path, sample: Sample, client: Client) -> None:
    with HostileServer(sample.files, saying(401)) as server, pytest.raises(FetchError) as caught:
        bring(sample, tmp_path / "model", client, [server])
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("give a token that may read it")
    assert "--mirror" in caught.value.hint


@pytest.mark.parametrize("case", BROKEN)
def test_another_mirror_makes_up_for_one_that_cannot_serve(
    tmp_path: Path, sample: Sample, client: Client, case: str
) -> None:
    with HostileServer(sample.files, BROKEN[case]) as broken, HostileServer(sample.files) as good:
        bring(sample, tmp_path / "model", client, [broken, good])
    assert read_all(tmp_path / "model") == sample.files


def cuts() -> list[int]:
    """Return how many bytes of the response to the big file's first piece come before the connection is cut."""
    head = len(
        f"HTTP/1.1 206 x\r\nContent-Length: {CHUNK_BYTES}\r\nContent-Range: bytes 0-{CHUNK_BYTES - 1}/328154\r\n\r\n"
    )
    return [0, 1, 8, 12, 16, head - 2, head - 1, head, head + 1, head + CHUNK_BYTES // 2, head + CHUNK_BYTES - 1]


@pytest.mark.parametrize("n", cuts())
def test_a_connection_that_is_cut_at_any_byte_is_tried_again(
    tmp_path: Path, sample: Sample, client: Client, n: int
) -> None:
    cut: list[str] = []

    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        key = f"{request.path} {request.headers['range']}"
        if key in cut or data is None:
            reply.honest(request, data)
            return
        cut.append(key)
        left = n
        inner = reply.raw

        def limited(piece: bytes) -> None:
            nonlocal left
            inner(piece[:left])
            left -= len(piece[:left])
            if not left:
                raise BrokenPipeError

        setattr(reply, "raw", limited)  # noqa: B010 - mypy takes an assignment for a mistake
        reply.honest(request, data)

    target = tmp_path / "model"
    # Each range is cut once, and a mirror of whom nothing was heard but that is given up after three looks.
    pacing = Pacing(tries=3, first_delay=0.001, longest_delay=0.002, breaker=99, looks=99)
    with HostileServer(sample.files, behave) as server:
        bring(sample, target, client, [server], pacing=pacing)
    assert read_all(target) == sample.files


def test_an_overloaded_mirror_is_left_alone_for_as_long_as_it_asks(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    first: list[float] = []

    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        if not first:
            first.append(time.monotonic())
            reply.head(503, Content_Length=0, Retry_After=1)
        else:
            first.append(time.monotonic())
            reply.honest(request, data)

    with HostileServer(sample.files, behave) as server:
        bring(sample, tmp_path / "model", client, [server], connections=1)
    assert first[1] - first[0] >= 1


def test_no_more_connections_are_used_than_allowed(tmp_path: Path, sample: Sample, client: Client) -> None:
    def slow(request: Request, reply: Reply, data: bytes | None) -> None:
        time.sleep(0.02)
        reply.honest(request, data)

    with HostileServer(sample.files, slow) as server:
        bring(sample, tmp_path / "one", client, [server], connections=1)
        assert server.most_at_once == 1
        bring(sample, tmp_path / "several", client, [server], connections=3)
        assert 1 < server.most_at_once <= 3


def test_the_bandwidth_is_kept(tmp_path: Path, sample: Sample, client: Client) -> None:
    total = sum(map(len, sample.files.values()))
    before = time.monotonic()
    with HostileServer(sample.files) as server:
        bring(sample, tmp_path / "model", client, [server], bandwidth=total)
    assert 0.8 < time.monotonic() - before < 5


# --- mirrors without ranges ---------------------------------------------------------------------------------------


def asked_whole(server: HostileServer, sample: Sample) -> int:
    """Return how often the big file was asked for from its start to its end."""
    asked = [request.headers["range"] for request in server.requests if request.path == BIG]
    return asked.count(f"bytes=0-{len(sample.files[BIG]) - 1}")


def ignoring_ranges_and(change: Callable[[bytes], bytes], *, cut: int | None = None) -> Behavior:
    """Send files whole, the big one changed; and no more of it than `cut` where it is asked for to its end."""

    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        if request.path != BIG or data is None:
            ignoring_ranges(request, reply, data)
            return
        reply.head(200, Content_Length=len(data))
        reply.raw(change(data)[: cut if request.range(len(data)) == (0, len(data)) else None])

    return behave


@pytest.mark.parametrize("connections", [1, 4])
def test_a_mirror_without_ranges_brings_a_long_file_in_one_answer(
    tmp_path: Path, sample: Sample, client: Client, connections: int
) -> None:
    told: list[tuple[str, int, int]] = []
    with HostileServer(sample.files, ignoring_ranges) as server:
        report = bring(
            sample,
            tmp_path / "model",
            client,
            [server],
            connections=connections,
            progress=lambda *step: told.append(step),
        )
    assert read_all(tmp_path / "model") == sample.files
    total = sum(map(len, sample.files.values()))
    assert report.facts["fetch"]["fetched_bytes"] == total
    (line,) = report.facts["fetch"]["mirrors"]
    assert (line["bytes"], line["failures"]) == (total, 0)
    assert told[-1] == ("fetching", total, total)
    assert asked_whole(server, sample) == 1
    # Besides, each connection may find out once that there are no ranges, after one of several brought the start.
    n_asked = len([request for request in server.requests if request.path == BIG])
    assert n_asked <= 1 + connections + (connections > 1)


@pytest.mark.parametrize("has_some", [True, False])
def test_only_who_has_something_is_told_that_it_is_kept(
    tmp_path: Path, sample: Sample, client: Client, has_some: bool
) -> None:
    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        reply.honest(request, data if has_some and request.path != BIG else None)

    with (
        HostileServer(sample.files, behave) as server,
        pytest.raises(FetchError, match="could not be fetched") as caught,
    ):
        bring(sample, tmp_path / "model", client, [server])
    assert ("is kept" in (caught.value.hint or "")) is has_some
    assert "--mirror" in (caught.value.hint or "")


def test_why_a_mirror_was_given_up_is_told_for_files_that_it_was_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        name = "gone.example"

        def read(self, *_: object) -> Iterator[bytes]:
            raise FetchError("gone.example: nobody there", mirror=self.name)

    # The largest file is the first to be asked for, and the last of the report.
    monkeypatch.setattr(fetching, "_FILES_AT_A_TIME", 1)
    pair = make_sample(tmp_path / "published", {"a.pkl": array_pickle(1, 10), "b.pkl": array_pickle(2, 1000)})
    pacing = Pacing(first_delay=0.01, longest_delay=0.02)
    with pytest.raises(FetchError, match=r"a\.pkl: every mirror was given up \(gone\.example: it never answered"):
        fetch(Gone(), tmp_path / "model", manifest=pair.manifest, trust=pair.trust, pacing=pacing, connections=1)


def test_the_start_of_a_whole_file_is_left_once_another_answer_brings_it(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    events: list[FetchEvent] = []
    is_on_its_way = threading.Event()

    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        asked = request.range(len(data or b""))
        if request.path == BIG and data is not None and asked == (0, CHUNK_BYTES):
            reply.head(200, Content_Length=len(data))
            reply.raw(data[:99])
            is_on_its_way.wait(5)
            reply.raw(bytes(len(data) - 99))
            return
        if request.path == BIG and data is not None and asked == (0, len(data)):
            is_on_its_way.set()
        ignoring_ranges(request, reply, data)

    with HostileServer(sample.files, behave) as server:
        bring(sample, tmp_path / "model", client, [server], watch=events.append)
    assert read_all(tmp_path / "model") == sample.files
    assert [event for event in events if event.kind == "wrong-bytes"] == []
    assert asked_whole(server, sample) == 1


def test_a_wrong_chunk_of_a_whole_file_is_named_and_its_mirror_is_not_asked_again(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    target = tmp_path / "model"
    behavior = ignoring_ranges_and(flipped(2 * CHUNK_BYTES + 5))
    with HostileServer(sample.files, behavior) as server, pytest.raises(DigestMismatchError) as caught:
        bring(sample, target, client, [server])
    (finding,) = caught.value.findings
    assert (finding.code, finding.file, finding.offset) == ("digest-mismatch", BIG, 2 * CHUNK_BYTES)
    assert server.url in finding.message
    assert asked_whole(server, sample) == 1
    assert_nothing_published(target)
    (left,) = (work_area_of(target) / "partial").iterdir()
    whole = sample.files[BIG]
    assert left.read_bytes() == whole[: 2 * CHUNK_BYTES] + bytes(len(whole) - 2 * CHUNK_BYTES)
    (record,) = Quarantine(target).records()
    assert (record.path, record.mirrors, record.offset) == (BIG, [server.url], 2 * CHUNK_BYTES)


def test_another_mirror_without_ranges_brings_what_a_lying_one_did_not(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    events: list[FetchEvent] = []
    with (
        HostileServer(sample.files, ignoring_ranges_and(flipped(2 * CHUNK_BYTES))) as liar,
        HostileServer(sample.files, ignoring_ranges) as other,
    ):
        bring(sample, tmp_path / "model", client, [liar, other], watch=events.append)
    assert read_all(tmp_path / "model") == sample.files
    assert {event.mirror for event in events if event.kind == "wrong-bytes"} <= {liar.url}
    assert asked_whole(other, sample) == 1
    assert asked_whole(liar, sample) <= 1


def test_a_whole_file_that_is_cut_is_read_again_and_only_what_is_missing_is_written(
    tmp_path: Path, sample: Sample, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    behavior = ignoring_ranges_and(bytes, cut=2 * CHUNK_BYTES + 99)
    with HostileServer(sample.files, behavior) as server, pytest.raises(FetchError, match="could not be fetched"):
        bring(sample, target, client, [server])
    assert asked_whole(server, sample) == HASTY.tries
    assert_nothing_published(target)
    (left,) = (work_area_of(target) / "partial").iterdir()
    whole = sample.files[BIG]
    assert left.read_bytes() == whole[: 2 * CHUNK_BYTES] + bytes(len(whole) - 2 * CHUNK_BYTES)

    written: list[int] = []
    write = partial.PartialFile.write

    def noted(self: partial.PartialFile, offset: int, data: memoryview, *, is_aligned: bool) -> None:
        written.append(offset)
        write(self, offset, data, is_aligned=is_aligned)

    monkeypatch.setattr(partial.PartialFile, "write", noted)
    with HostileServer(sample.files, ignoring_ranges) as server:
        report = bring(sample, target, client, [server])
    assert read_all(target) == sample.files
    assert report.facts["fetch"]["kept_bytes"] >= 2 * CHUNK_BYTES
    assert written == [index * CHUNK_BYTES for index in (2, 3, 4, 5)]


def test_a_mirror_with_ranges_is_preferred_to_one_without(tmp_path: Path, sample: Sample, client: Client) -> None:
    with HostileServer(sample.files, ignoring_ranges) as without, HostileServer(sample.files) as other:
        report = bring(sample, tmp_path / "model", client, [without, other])
    assert read_all(tmp_path / "model") == sample.files
    assert asked_whole(without, sample) == 0
    _, second = report.facts["fetch"]["mirrors"]
    # The first piece is the start of the whole file, and does from either.
    assert second["bytes"] >= len(sample.files[BIG]) - CHUNK_BYTES


def test_a_mirror_without_ranges_makes_up_for_a_wrong_chunk_of_one_with(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    is_sent = threading.Event()
    last = 5 * CHUNK_BYTES

    def lying_and_slow(request: Request, reply: Reply, data: bytes | None) -> None:
        asked = request.range(len(data or b""))
        if request.path == BIG and asked is not None and asked[0] != last:
            # Its pieces come when the whole file has brought them already, and count once.
            is_sent.wait(0.5)
            time.sleep(0.2)
        lying(flipped(last))(request, reply, data)

    def noted(request: Request, reply: Reply, data: bytes | None) -> None:
        ignoring_ranges(request, reply, data)
        if data is not None and request.path == BIG and request.range(len(data)) == (0, len(data)):
            is_sent.set()

    with HostileServer(sample.files, lying_and_slow) as liar, HostileServer(sample.files, noted) as without:
        report = bring(sample, tmp_path / "model", client, [liar, without])
    assert read_all(tmp_path / "model") == sample.files
    assert [line["wrong_pieces"] for line in report.facts["fetch"]["mirrors"]] == [1, 0]
    assert report.facts["fetch"]["fetched_bytes"] == sum(map(len, sample.files.values()))


def test_a_whole_file_without_an_end_is_left_at_the_signed_size(tmp_path: Path, sample: Sample, client: Client) -> None:
    target = tmp_path / "model"

    def endless(request: Request, reply: Reply, data: bytes | None) -> None:
        if request.path != BIG or data is None:
            reply.honest(request, data)
            return
        reply.head(200)
        reply.raw(data + bytes(CHUNK_BYTES))
        while True:
            reply.raw(bytes(CHUNK_BYTES))

    whole = sample.files[BIG]
    message = f"expected {len(whole)} bytes, found more"
    with HostileServer(sample.files, endless) as server, pytest.raises(FetchError, match=message):
        bring(sample, target, client, [server])
    assert asked_whole(server, sample) == HASTY.tries
    assert_nothing_published(target)
    (left,) = (work_area_of(target) / "partial").iterdir()
    found = left.read_bytes()
    assert len(found) == len(whole)
    for start in range(0, len(whole), CHUNK_BYTES):
        piece = slice(start, start + CHUNK_BYTES)
        assert found[piece] in {whole[piece], bytes(len(whole[piece]))}


def test_a_mirror_that_ignores_one_range_has_ranges_all_the_same(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    ignored: list[str] = []

    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        if request.headers["range"].startswith(f"bytes={CHUNK_BYTES}-") and not ignored:
            ignored.append(request.path)
            ignoring_ranges(request, reply, data)
        else:
            reply.honest(request, data)

    with HostileServer(sample.files, behave) as server:
        bring(sample, tmp_path / "model", client, [server], connections=1)
    assert read_all(tmp_path / "model") == sample.files
    assert ignored == [BIG]
    assert len([request for request in server.requests if request.path == BIG]) == 6 + 1
    assert asked_whole(server, sample) == 0


# --- long files without digests of their chunks -------------------------------------------------------------------


@pytest.fixture
def unchunked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """A checkpoint whose long file has one digest only: signed as if chunks were longer than it."""
    with monkeypatch.context() as patch:
        for module in ("files", "manifest"):
            patch.setattr(f"safeload.{module}.CHUNK_BYTES", 1024 * CHUNK_BYTES)
        return make_sample(tmp_path / "unchunked", files_of())


def test_a_long_file_without_chunks_is_checked_as_a_whole(tmp_path: Path, unchunked: Sample, client: Client) -> None:
    with HostileServer(unchunked.files) as server:
        bring(unchunked, tmp_path / "model", client, [server])
    assert read_all(tmp_path / "model") == unchunked.files
    assert [r.headers["range"] for r in server.requests if r.path == BIG] == [
        f"bytes=0-{len(unchunked.files[BIG]) - 1}"
    ]


def test_a_long_file_without_chunks_is_fetched_again_as_a_whole(
    tmp_path: Path, unchunked: Sample, client: Client
) -> None:
    with HostileServer(unchunked.files, lying(flipped(7))) as liar, HostileServer(unchunked.files) as other:
        report = bring(unchunked, tmp_path / "model", client, [liar, other], connections=1)
    assert read_all(tmp_path / "model") == unchunked.files
    assert report.is_accepted


# --- what an interrupted run leaves -------------------------------------------------------------------------------


def failing_after(n: int) -> Behavior:
    """Serve so many pieces of the big file, and then nothing of it."""
    served: list[str] = []

    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        if request.path == BIG and len(served) >= n:
            reply.head(500, Content_Length=0)
            return
        served.append(request.path) if request.path == BIG else None
        reply.honest(request, data)

    return behave


@pytest.mark.parametrize("n", range(6))
def test_verified_pieces_are_not_fetched_again(tmp_path: Path, sample: Sample, client: Client, n: int) -> None:
    target = tmp_path / "model"
    with HostileServer(sample.files, failing_after(n)) as server, pytest.raises(FetchError):
        bring(sample, target, client, [server])
    assert_nothing_published(target)
    with HostileServer(sample.files) as server:
        report = bring(sample, target, client, [server])
    assert read_all(target) == sample.files
    assert len([r for r in server.requests if r.path == BIG]) == 6 - n
    assert report.facts["fetch"]["kept_bytes"] >= n * 321


def test_what_was_left_is_believed_only_where_it_still_has_the_digest(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    target = tmp_path / "model"
    with HostileServer(sample.files, failing_after(5)) as server, pytest.raises(FetchError):
        bring(sample, target, client, [server], connections=1)
    (left,) = (work_area_of(target) / "partial").iterdir()
    data = bytearray(left.read_bytes())
    data[CHUNK_BYTES + 9] ^= 1
    left.write_bytes(data)
    (config,) = (work_area_of(target) / "files").rglob("config.json")
    config.write_bytes(b'{"layers": 3}\n')
    with HostileServer(sample.files) as server:
        bring(sample, target, client, [server])
    assert read_all(target) == sample.files
    asked = {(r.path, r.headers["range"].partition("-")[0]) for r in server.requests}
    assert (BIG, f"bytes={CHUNK_BYTES}") in asked
    assert ("config.json", "bytes=0") in asked
    assert len(asked) == 3


def test_what_another_manifest_left_is_removed(tmp_path: Path, sample: Sample, client: Client) -> None:
    target = tmp_path / "model"
    with HostileServer(sample.files, failing_after(2)) as server, pytest.raises(FetchError):
        bring(sample, target, client, [server])
    other = make_sample(tmp_path / "other", {"only.json": b"{}", "a": array_pickle(9, 100)})
    with HostileServer(other.files) as server:
        bring(other, target, client, [server])
    assert read_all(target) == other.files
    assert not work_area_of(target).exists()


SCRIPT = """
    import json, os, shutil, signal, sys
    from pathlib import Path
    import pytest
    from safeload.fetching.fetch import fetch
    from tests.fetching_sample import read_all, shrink_chunks

    folder = Path(sys.argv[1])
    target = folder / "model"
    report, written = os.pipe()

    class Mirror:
        name = "disk"
        n_read = 0

        def read(self, path, start, stop, size):
            Mirror.n_read += 1
            with (folder / "published" / path).open("rb") as file:
                file.seek(start)
                yield file.read(stop - start)

    def forked(work):
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), json.loads(os.read(report, 100))
        try:
            work()
        finally:
            os._exit(9)

    def bring():
        fetch(Mirror(), target, manifest=folder / "manifest", trust=folder / "key.pub", connections=1)

    def die_at(k):
        # Before the k-th call that changes anything on the disk, in whatever thread.
        calls, done = [], []
        def counted(owner, name):
            inner = getattr(owner, name)
            def call(*args, **more):
                calls.append(name)
                if len(calls) == k:
                    os.write(written, json.dumps([done.count("pwrite"), name]).encode())
                    os.kill(os.getpid(), signal.SIGKILL)
                result = inner(*args, **more)
                done.append(name)
                return result
            setattr(owner, name, call)
        for name in ("fdatasync", "fsync", "ftruncate", "mkdir", "pwrite", "rename", "replace", "rmdir", "unlink"):
            counted(os, name)
        bring()
        os.write(written, b'[0, "end"]')
        os._exit(0)

    def go_on():
        bring()
        os.write(written, json.dumps(Mirror.n_read).encode())
        os._exit(0)

    shrink_chunks(pytest.MonkeyPatch())
    for k in range(1, 1000):
        code, (n_written, name) = forked(lambda: die_at(k))
        seen = sorted(read_all(target)) if target.exists() else None
        again, n_read = forked(go_on)
        same = read_all(target) == read_all(folder / "published")
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        print(json.dumps([code, name, n_written, seen, again, n_read, same, left]), flush=True)
        shutil.rmtree(target)
        for path in left:
            shutil.rmtree(folder / path)
        if name == "end":
            break
"""


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_point_loses_no_verified_piece_and_publishes_nothing_partial(
    tmp_path: Path, sample: Sample
) -> None:
    (tmp_path / "manifest").write_bytes(sample.manifest)
    (tmp_path / "key.pub").write_bytes(sample.trust.to_pem())
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    n_pieces = 8
    assert {"pwrite", "fsync", "replace", "rename", "unlink", "end"} <= {name for _, name, *_ in runs}
    for code, name, n_written, seen, again, n_read, same, left in runs:
        place = f"{name} after {n_written} pieces"
        assert code == (0 if name == "end" else -signal.SIGKILL), place
        assert seen in (None, sorted(sample.files)), place
        assert (again, same) == (0, True), place
        # One that another thread was just writing may be there as well.
        left_to_read = n_pieces - n_written
        assert n_read == 0 if seen else left_to_read - 1 <= n_read <= left_to_read, place
        assert left == [], place


# --- the directory ------------------------------------------------------------------------------------------------


def test_a_complete_directory_is_verified_and_nothing_is_asked(tmp_path: Path, sample: Sample, client: Client) -> None:
    with HostileServer(sample.files) as server:
        report = bring(sample, tmp_path / "published", client, [server])
    assert report.is_accepted
    assert server.requests == []


def test_a_directory_with_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    target = tmp_path / "published"
    (target / BIG).write_bytes(flipped(9)(sample.files[BIG]))
    before = read_all(target)
    with HostileServer(sample.files) as server, pytest.raises(ConfigError, match="--incremental"):
        bring(sample, target, client, [server])
    assert read_all(target) == before
    assert server.requests == []


def test_incremental_repairs_in_place_with_the_pieces_that_are_wrong_alone(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    target = tmp_path / "published"
    (target / BIG).write_bytes(flipped(3 * CHUNK_BYTES)(sample.files[BIG]))
    (target / "config.json").unlink()
    with HostileServer(sample.files) as server:
        report = bring(sample, target, client, [server], incremental=True)
    assert report.is_accepted
    assert read_all(target) == sample.files
    asked = sorted((r.path, r.headers["range"]) for r in server.requests)
    assert asked == [(BIG, f"bytes={3 * CHUNK_BYTES}-{4 * CHUNK_BYTES - 1}"), ("config.json", "bytes=0-13")]


def test_a_mirror_that_lacks_one_file_for_now_is_asked_for_the_others(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    patient = Pacing(tries=99, first_delay=0.01, longest_delay=0.02, cooldown=0.05)
    target = tmp_path / "model"
    with HostileServer(sample.files, failing_after(0)) as server, pytest.raises(FetchError, match="1 of 3 files"):
        bring(sample, target, client, [server], incremental=True, pacing=patient)
    assert read_all(target) == {path: data for path, data in sample.files.items() if path != BIG}


def test_incremental_shows_each_file_as_soon_as_it_is_whole(tmp_path: Path, sample: Sample, client: Client) -> None:
    target = tmp_path / "model"
    with HostileServer(sample.files, failing_after(2)) as server, pytest.raises(FetchError):
        bring(sample, target, client, [server], incremental=True)
    assert read_all(target) == {path: data for path, data in sample.files.items() if path != BIG}


def plant_file(target: Path) -> None:
    (target / "extra").write_bytes(b"x")


def plant_link(target: Path) -> None:
    (target / BIG).unlink()
    (target / BIG).symlink_to("/etc/hostname")


def plant_directory_link(target: Path) -> None:
    (target.parent / "elsewhere").mkdir()
    (target / "ckpt-0").rename(target.parent / "old")
    (target / "ckpt-0").symlink_to(target.parent / "elsewhere")


def plant_hard_link(target: Path) -> None:
    os.link(target / BIG, target.parent / "other-name")


def plant_fifo(target: Path) -> None:
    (target / BIG).unlink()
    os.mkfifo(target / BIG)


@pytest.mark.parametrize("plant", [plant_file, plant_link, plant_directory_link, plant_hard_link, plant_fifo])
def test_what_was_planted_in_the_directory_is_refused_and_not_followed(
    tmp_path: Path, sample: Sample, client: Client, plant: Callable[[Path], None]
) -> None:
    target = tmp_path / "published"
    plant(target)
    with HostileServer(sample.files) as server, pytest.raises(FileSetError):
        bring(sample, target, client, [server], incremental=True)
    assert server.requests == []
    assert not any((tmp_path / "elsewhere").glob("*"))


def test_a_link_that_takes_a_directorys_place_meanwhile_is_not_followed(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    target = tmp_path / "model"
    outside = tmp_path / "outside"
    outside.mkdir()

    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        if not (target / "ckpt-0").exists():
            (target / "ckpt-0").symlink_to(outside)
        reply.honest(request, data)

    with HostileServer(sample.files, behave) as server, pytest.raises(StagingError, match="cannot put ckpt-0"):
        bring(sample, target, client, [server], incremental=True)
    assert list(outside.iterdir()) == []


def test_a_work_area_that_others_can_use_is_refused(tmp_path: Path, sample: Sample, client: Client) -> None:
    target = tmp_path / "model"
    work_area_of(target).mkdir(mode=0o755)
    work_area_of(target).chmod(0o755)
    with HostileServer(sample.files) as server, pytest.raises(ConfigError, match="ours alone"):
        bring(sample, target, client, [server])
    work_area_of(target).rmdir()
    work_area_of(target).symlink_to(tmp_path / "published")
    with HostileServer(sample.files) as server, pytest.raises(StagingError):
        bring(sample, target, client, [server])
    assert server.requests == []


def test_a_second_fetch_of_the_same_directory_waits_for_nobody_and_spoils_nothing(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    target = tmp_path / "model"
    second: list[Exception] = []

    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        if not second:
            second.append(KeyError())
            with pytest.raises(FetchError, match="another fetch is at work") as caught:
                bring(sample, target, client, [server])
            second[0] = caught.value
        reply.honest(request, data)

    with HostileServer(sample.files, behave) as server:
        bring(sample, target, client, [server])
    assert isinstance(second[0], FetchError)
    assert read_all(target) == sample.files


def test_two_fetches_where_locks_do_nothing_publish_the_signed_files_or_fail(
    tmp_path: Path, sample: Sample, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuses)
    target = tmp_path / "model"
    outcomes: list[object] = []

    def go() -> None:
        try:
            outcomes.append(bring(sample, target, client, [server]).verdict)
        except (ConfigError, FetchError, StagingError) as err:
            outcomes.append(type(err))

    with HostileServer(sample.files) as server:
        threads = [threading.Thread(target=go) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if not target.exists():
            bring(sample, target, client, [server])
    assert len(outcomes) == 2
    assert read_all(target) == sample.files


def test_a_disk_without_room_is_told_before_the_first_byte(
    tmp_path: Path, sample: Sample, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "MARGIN_BYTES", 2**62)
    with HostileServer(sample.files) as server, pytest.raises(StagingError, match="free disk space"):
        bring(sample, tmp_path / "model", client, [server])
    assert server.requests == []


def test_a_disk_that_fills_up_keeps_what_was_verified(
    tmp_path: Path, sample: Sample, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    writes: list[int] = []
    inner = os.pwrite

    def fills(fd: int, data: bytes, offset: int) -> int:
        writes.append(offset)
        if len(writes) > 4:
            raise OSError(28, "No space left on device")
        return inner(fd, data, offset)

    with monkeypatch.context() as patch, HostileServer(sample.files) as server:
        patch.setattr(os, "pwrite", fills)
        with pytest.raises(StagingError, match="No space left"):
            bring(sample, target, client, [server], connections=1)
    assert_nothing_published(target)
    with HostileServer(sample.files) as server:
        bring(sample, target, client, [server])
    assert read_all(target) == sample.files
    assert len(server.requests) == 8 - 4


def test_another_revision_saves_what_is_unchanged_and_is_not_linked_to(
    tmp_path: Path, sample: Sample, client: Client
) -> None:
    old = tmp_path / "published"
    (old / "config.json").write_bytes(b"{}")
    (old / BIG).rename(old / "renamed")
    (old / "renamed").write_bytes(flipped(4 * CHUNK_BYTES)(sample.files[BIG]))
    target = tmp_path / "model"
    with HostileServer(sample.files) as server:
        bring(sample, target, client, [server], reuse=[old])
    assert read_all(target) == sample.files
    assert sorted((r.path, r.headers["range"].partition("-")[0]) for r in server.requests) == [
        (BIG, f"bytes={4 * CHUNK_BYTES}"),
        ("config.json", "bytes=0"),
    ]
    assert {p.stat().st_nlink for p in target.rglob("*") if p.is_file()} == {1}


def test_many_files_are_looked_at_in_other_revisions_with_memory_for_a_few(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = partial._read
    most = at_work = 0
    lock = threading.Lock()

    def slow(fd: int, memory: memoryview, offset: int, path: str) -> int:
        nonlocal most, at_work
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.05)
        try:
            return real(fd, memory, offset, path)
        finally:
            with lock:
                at_work -= 1

    monkeypatch.setattr(partial, "_read", slow)
    files = {f"tensor0000{i}_000": array_pickle(i, 3 * CHUNK_BYTES) for i in range(6)}
    published = make_sample(tmp_path / "published", files)
    with HostileServer(published.files) as server:
        report = bring(published, tmp_path / "model", client, [server], reuse=[tmp_path / "published"])
        assert server.requests == []
    assert report.facts["fetch"]["kept_bytes"] == sum(map(len, files.values()))
    assert read_all(tmp_path / "model") == files
    assert 1 <= most <= 3


def test_a_plan_asks_nobody_writes_nothing_and_believes_no_file(tmp_path: Path, sample: Sample) -> None:
    whole = plan(tmp_path / "model", manifest=sample.manifest, trust=sample.trust)
    assert whole.nbytes == sum(map(len, sample.files.values()))
    assert [p.name for p in tmp_path.iterdir()] == ["published"]
    (tmp_path / "published" / BIG).write_bytes(flipped(5)(sample.files[BIG]))
    part = plan(tmp_path / "published", manifest=sample.manifest, trust=sample.trust)
    assert part.missing == ((BIG, len(sample.files[BIG])),)
    assert set(part.present) == set(sample.files) - {BIG}


@pytest.mark.parametrize("place", ["absent/model", "/", "file/model"])
def test_a_place_that_nothing_can_be_fetched_to_is_an_error(
    tmp_path: Path, sample: Sample, client: Client, place: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with HostileServer(sample.files) as server, pytest.raises(ConfigError):
        bring(sample, tmp_path / place, client, [server])
    assert server.requests == []


# --- quarantine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hostile(tmp_path: Path) -> Sample:
    """A checkpoint that a trusted key signed under a looser policy than the default one."""
    text = Path("policies/numpy-quantized.toml")
    loose = tmp_path / "loose.toml"
    shipped = (Path(__file__).parents[2] / text).read_text(encoding="utf-8")
    loose.write_text(shipped + '\n[[files.inert]]\npatterns = ["*.evil"]\ncontent = "text"\nreason = "for this test"\n')
    return make_sample(tmp_path / "hostile", files_of(**{"run.evil": b"import os\n"}), policy=loose)


def test_a_signed_file_that_the_policy_refuses_goes_to_quarantine_and_nothing_is_published(
    tmp_path: Path, hostile: Sample, client: Client
) -> None:
    target = tmp_path / "model"
    with HostileServer(hostile.files) as server:
        with pytest.raises(RejectedError) as caught:
            bring(hostile, target, client, [server])
        assert {finding.file for finding in caught.value.findings} == {"run.evil"}
        assert_nothing_published(target)
        (record,) = Quarantine(target).records()
        assert (record.path, record.mirrors, record.kept) == ("run.evil", [server.url], True)
        assert record.found == record.expected
        content = Quarantine(target).content(record.id)
        assert content is not None
        assert content.read_bytes() == b"import os\n"
        assert {oct(p.stat().st_mode & 0o777) for p in (quarantine_of(target), content.parent)} == {"0o700"}
        assert oct(content.stat().st_mode & 0o777) == "0o600"
        # The others were verified, and are not fetched again by a policy that allows it.
        before = len(server.requests)
        assert bring(hostile, target, client, [server], policy=tmp_path / "loose.toml").is_accepted
    assert [request.path for request in server.requests[before:]] == ["run.evil"]


def test_a_report_has_a_verdict_for_every_file_also_where_some_are_refused(
    tmp_path: Path, hostile: Sample, client: Client
) -> None:
    with HostileServer(hostile.files, failing_after(0)) as server:
        report = fetch_and_report(
            Web(client, server.url),
            tmp_path / "model",
            manifest=hostile.manifest,
            trust=hostile.trust,
            pacing=HASTY,
        )
    codes = {file.path: [finding.code for finding in file.findings] for file in report.files}
    assert codes[BIG] == ["not-fetched"]
    assert codes["config.json"] == []
    assert len(codes["run.evil"]) == 1
    assert report.verdict == "rejected"
