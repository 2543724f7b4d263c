"""Claims of `safeload.fetching.partial`: what is on disk meanwhile is private, and believed only where it is hashed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safeload.errors import ConfigError, StagingError
from safeload.fetching import partial
from safeload.fetching.partial import (
    MARGIN_BYTES,
    Tree,
    WorkArea,
    chunk_digests,
    chunk_range,
    require_space,
    target_of,
    work_area_of,
)
from safeload.manifest import FileEntry, encode_chunks
from tests.fetching_sample import CHUNK_BYTES, shrink_chunks

DATA = bytes(range(251)) * 1000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_chunks(monkeypatch)


@pytest.fixture
def area(tmp_path: Path) -> Iterator[WorkArea]:
    with WorkArea(tmp_path / "model") as made:
        yield made


def entry(data: bytes = DATA, *, chunked: bool = True) -> FileEntry:
    chunks = [hashlib.sha256(data[at : at + CHUNK_BYTES]).digest() for at in range(0, len(data), CHUNK_BYTES)]
    joined = encode_chunks(b"".join(chunks)) if chunked and len(chunks) > 1 else None
    sha256 = hashlib.sha256(data).hexdigest()
    return FileEntry(path="a/b", size=len(data), sha256=sha256, chunks=joined, format="opaque", role="other")


def nothing() -> None:
    pass


def test_pieces_are_checked_by_the_digests_that_the_manifest_has() -> None:
    assert len(chunk_digests(entry())) == 4
    assert chunk_digests(entry(b"x")) == (hashlib.sha256(b"x").digest(),)
    assert chunk_digests(entry(b"")) == ()
    assert chunk_digests(entry(chunked=False)) == ()
    assert sum(len(chunk_range(entry(), i)) for i in range(4)) == len(DATA)


def test_the_work_area_is_private_beside_the_target_and_hidden(tmp_path: Path, area: WorkArea) -> None:
    assert area.path == work_area_of(tmp_path / "model") == tmp_path / ".model.safeload-partial"
    assert oct(area.path.stat().st_mode & 0o777) == "0o700"


def test_only_chunks_that_are_the_signed_ones_are_good(area: WorkArea) -> None:
    made = area.open_partial(entry())
    assert made.recheck(nothing) == set()
    made.write(0, DATA)
    assert made.recheck(nothing) == {0, 1, 2, 3}
    made.write(CHUNK_BYTES, b"!")
    made.write(len(DATA) - 1, b"!")
    assert made.recheck(nothing) == {0, 2}
    made.close()


def is_cached(path: Path, offset: int, nbytes: int) -> bool:
    """Whether bytes can be read without asking the disk."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(nbytes)], offset, os.RWF_NOWAIT) == nbytes
        except BlockingIOError:
            return False


def passes_the_cache_by(folder: Path) -> bool:
    """Whether the file system of a folder has direct I/O that is direct."""
    path = folder / "probe"
    path.write_bytes(b"")
    with partial.aligned_memory(8192) as memory:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
        except OSError:
            return False
        try:
            os.write(fd, memory)
        except OSError:
            return False
        finally:
            os.close(fd)
    return not is_cached(path, 0, 4096)


def test_verified_chunks_leave_the_page_cache_as_it_is(tmp_path: Path, area: WorkArea) -> None:
    if not passes_the_cache_by(tmp_path):
        pytest.skip("this file system has no direct I/O")
    made = area.open_partial(entry())
    path = area.path / "partial" / made.name
    with partial.aligned_memory(CHUNK_BYTES) as memory:
        for at in range(0, len(DATA), CHUNK_BYTES):
            data = DATA[at : at + CHUNK_BYTES]
            memory[: len(data)] = data
            with memoryview(memory) as view:
                made.write(at, view[: len(data)], is_aligned=True)
    made.sync()
    assert not any(is_cached(path, at, 4096) for at in range(0, len(DATA) - 4096, CHUNK_BYTES))
    # The last bytes are no whole block, and went the other way.
    assert len(DATA) % 4096
    assert path.read_bytes() == DATA
    assert made.recheck(nothing) == {0, 1, 2, 3}
    made.close()


def test_memory_that_there_is_not_is_an_error_of_ours() -> None:
    with pytest.raises(StagingError, match=r"cannot take .* of memory"):
        partial.aligned_memory(1 << 62)


def test_nothing_is_put_into_a_tree_that_is_closed(tmp_path: Path, area: WorkArea) -> None:
    made = area.open_partial(entry())
    tree = Tree(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), "model")
    number = tree.fd
    tree.close()
    # Something else gets its number.
    other = os.open(area.path, os.O_RDONLY | os.O_DIRECTORY)
    if other != number:
        os.dup2(other, number)
        os.close(other)
    with pytest.raises(StagingError, match="cannot put a"):
        tree.place(area.partial_fd, made.name, "a", sync=False)
    assert not (area.path / "a").exists()
    os.close(number)
    made.close()


@pytest.mark.parametrize("at_once", [0, 1000, 4096, CHUNK_BYTES])
def test_a_disk_that_takes_no_direct_writes_or_a_part_gets_the_bytes_through_the_cache(
    area: WorkArea, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    made = area.open_partial(entry())
    real = os.pwrite
    asked: list[int] = []

    def reluctant(fd: int, data: memoryview, offset: int) -> int:
        if fd == made.fd:
            return real(fd, data, offset)
        asked.append(offset)
        if not at_once:
            raise OSError(errno.EINVAL, "no")
        return real(made.fd, data[:at_once], offset)

    monkeypatch.setattr(os, "pwrite", reluctant)
    with partial.aligned_memory(CHUNK_BYTES) as memory:
        for at in range(0, 2 * CHUNK_BYTES, CHUNK_BYTES):
            memory[:] = DATA[at : at + CHUNK_BYTES]
            with memoryview(memory) as view:
                made.write(at, view, is_aligned=True)
    assert made.recheck(nothing) == {0, 1}
    if made._direct >= 0:
        # Who says that it cannot is not asked again.
        assert len(asked) == {0: 1, 1000: 2, 4096: 2 * CHUNK_BYTES // 4096, CHUNK_BYTES: 2}[at_once]
    made.close()


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_slow_disk_is_written_to_through_the_cache_for_who_loads_next(
    area: WorkArea, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    made = area.open_partial(entry())
    other = area.open_partial(entry())
    if made._direct < 0:
        pytest.skip("this file system has no direct I/O")
    real = os.pwrite
    asked: list[int] = []

    def slow(fd: int, data: memoryview, offset: int) -> int:
        asked.append(fd)
        time.sleep(seconds)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(partial, "_TRIAL_BYTES", 2 * CHUNK_BYTES)
    monkeypatch.setattr(partial, "_FAST_BYTES_PER_SECOND", 2 * CHUNK_BYTES / 0.1 if seconds else 1)
    memory = memoryview(partial.aligned_memory(CHUNK_BYTES))
    for at in range(0, 3 * CHUNK_BYTES, CHUNK_BYTES):
        memory[:] = DATA[at : at + CHUNK_BYTES]
        made.write(at, memory, is_aligned=True)
    memory[:] = DATA[:CHUNK_BYTES]
    other.write(0, memory, is_aligned=True)
    # It is one disk for all files.
    expected = [made._direct] * 3 + [other._direct]
    assert asked == (expected if not seconds else [made._direct] * 2 + [made.fd, other.fd])
    assert made.recheck(nothing) == {0, 1, 2}
    made.close()
    other.close()


def test_a_full_disk_is_told_of_past_the_cache_too(area: WorkArea, monkeypatch: pytest.MonkeyPatch) -> None:
    made = area.open_partial(entry())
    if made._direct < 0:
        pytest.skip("this file system has no direct I/O")
    real = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if fd == made._direct:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    memory = memoryview(partial.aligned_memory(CHUNK_BYTES))
    with pytest.raises(StagingError, match="cannot write a/b") as caught:
        made.write(0, memory, is_aligned=True)
    assert "kept" in (caught.value.hint or "")
    made.close()


def test_what_a_dead_process_left_is_taken_over_once(tmp_path: Path) -> None:
    with WorkArea(tmp_path / "model") as area:
        made = area.open_partial(entry())
        made.write(CHUNK_BYTES, DATA[CHUNK_BYTES : 2 * CHUNK_BYTES])
        made.close()
    with WorkArea(tmp_path / "model") as area:
        assert area.allocated(entry()) >= CHUNK_BYTES
        first, second = area.open_partial(entry()), area.open_partial(entry())
        assert (first.recheck(nothing), second.recheck(nothing)) == ({1}, set())
        assert len(list((area.path / "partial").iterdir())) == 2
        first.close()
        second.close()


def make_shorter(path: Path) -> None:
    path.write_bytes(b"x")


def make_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def make_hard_link(path: Path) -> None:
    os.link(path, path.parent.parent / "other")


@pytest.mark.parametrize("spoil", [make_shorter, make_hard_link])
def test_what_was_left_and_is_not_alone_or_not_as_long_is_not_taken(tmp_path: Path, spoil: Any) -> None:
    with WorkArea(tmp_path / "model") as area:
        made = area.open_partial(entry())
        made.write(0, DATA)
        made.close()
        spoil(area.path / "partial" / made.name)
    with WorkArea(tmp_path / "model") as area:
        again = area.open_partial(entry())
        assert again.recheck(nothing) == set()
        assert os.fstat(again.fd).st_size == len(DATA)
        assert [path.name for path in (area.path / "partial").iterdir()] == [again.name]
        again.close()


def test_a_link_in_the_place_of_what_was_left_is_not_followed(tmp_path: Path) -> None:
    with WorkArea(tmp_path / "model") as area:
        made = area.open_partial(entry())
        made.close()
        make_link(area.path / "partial" / made.name)
    with WorkArea(tmp_path / "model") as area, pytest.raises(StagingError, match="cannot write a/b"):
        area.open_partial(entry())


def test_a_file_without_chunks_begins_anew(tmp_path: Path) -> None:
    whole = entry(chunked=False)
    with WorkArea(tmp_path / "model") as area:
        made = area.open_partial(whole)
        made.write(0, DATA)
        made.close()
    with WorkArea(tmp_path / "model") as area:
        again = area.open_partial(whole)
        assert os.pread(again.fd, 10, 0) == bytes(10)
        again.close()


@pytest.mark.parametrize("clones", [True, False])
def test_chunks_of_another_file_are_taken_where_they_are_the_signed_ones(
    tmp_path: Path, area: WorkArea, monkeypatch: pytest.MonkeyPatch, clones: bool
) -> None:
    if not clones:
        monkeypatch.setattr(partial, "_clone", lambda *_: False)
    other = bytearray(DATA)
    other[2 * CHUNK_BYTES + 1] ^= 1
    (tmp_path / "other").write_bytes(other)
    made = area.open_partial(entry())
    with (tmp_path / "other").open("rb") as file:
        memory = memoryview(bytearray(CHUNK_BYTES))
        taken = made.seed(file.fileno(), range(4), nothing, lambda: contextlib.nullcontext(memory))
    assert taken == {0, 1, 3}
    assert made.recheck(nothing) == {0, 1, 3}
    assert os.fstat(made.fd).st_ino != (tmp_path / "other").stat().st_ino
    made.close()


def room(monkeypatch: pytest.MonkeyPatch, *, free: int, files: int = 100, favail: int = 100) -> None:
    class Found:
        f_frsize = 4096
        f_bavail = free // 4096
        f_files = files
        f_favail = favail

    monkeypatch.setattr(os, "statvfs", lambda _: Found)


def test_room_is_counted_in_blocks_and_entries_with_some_to_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(monkeypatch, free=MARGIN_BYTES + 3 * 4096)
    require_space(tmp_path, [1, 4096, 4095])
    with pytest.raises(StagingError, match="free disk space"):
        require_space(tmp_path, [1, 4096, 4097])
    room(monkeypatch, free=0)
    require_space(tmp_path, [])
    room(monkeypatch, free=2 * MARGIN_BYTES, favail=2)
    with pytest.raises(StagingError, match="room for 3 files"):
        require_space(tmp_path, [1, 1, 1])
    room(monkeypatch, free=2 * MARGIN_BYTES, files=0, favail=0)
    require_space(tmp_path, [1, 1, 1])


def test_the_room_of_a_file_is_taken_before_its_bytes_come_and_counts_as_nothing_fetched(area: WorkArea) -> None:
    made = area.open_partial(entry())
    try:
        status = os.fstat(made.fd)
        assert status.st_size == len(DATA)
        assert 512 * status.st_blocks >= len(DATA)
        assert made.recheck(lambda: pytest.fail("read what was never written")) == set()
    finally:
        made.close()


def test_a_disk_without_room_for_a_file_is_told_before_its_bytes_come(
    area: WorkArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(partial, "_FALLOCATE", is_full)
    with pytest.raises(StagingError, match="No space left") as caught:
        area.open_partial(entry())
    assert caught.value.hint is not None

    def is_unable(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(partial, "_FALLOCATE", is_unable)
    area.open_partial(entry()).close()


def test_the_root_of_everything_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing can be fetched to"):
        target_of("/")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match="cannot tell"):
        target_of("\0")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert target_of(tmp_path / "link") == tmp_path / "real"
