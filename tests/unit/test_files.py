"""Claims of `safeload.files`: nothing below the root is followed, and what a source returns is what it hashed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import stat
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safeload import files
from safeload.digests import HASH_CHUNK_BYTES
from safeload.errors import ConfigError, FileSetError, LimitError, StagingError
from safeload.files import Root, StreamSource, publish


def walk(directory: Path) -> dict[str, str | None]:
    with Root(directory) as root:
        return {w.path: None if w.finding is None else w.finding.code for w in root.walk()}


def refusal(directory: Path, path: str) -> str:
    with Root(directory) as root, pytest.raises(FileSetError) as caught:
        os.close(root.open(path))
    (finding,) = caught.value.findings
    assert finding.file == path
    return finding.code


def write(path: Path, data: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def swap_at_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Callable[[], None]], None]]:
    """Run something at the last moment before a name is opened, as another process would."""
    real = os.open

    def arrange(name: str, swap: Callable[[], None]) -> None:
        waiting = [swap]

        def racing(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if path == name and waiting:
                waiting.pop()()
            return real(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(os, "open", racing)

    yield arrange
    monkeypatch.undo()


# --- walk ---------------------------------------------------------------------------------------------------------


def test_walk_yields_regular_files_sorted_by_path_with_size_and_identity(tmp_path: Path) -> None:
    for name in ("b", "a/z", "a-b", "a/b/c", "a.txt"):
        write(tmp_path / name, name.encode())
    (tmp_path / "empty").mkdir()
    with Root(tmp_path) as root:
        walked = list(root.walk())
    assert [w.path for w in walked] == ["a-b", "a.txt", "a/b/c", "a/z", "b"]
    for w in walked:
        status = (tmp_path / w.path).stat()
        assert (w.size, w.device, w.inode, w.finding) == (len(w.path), status.st_dev, status.st_ino, None)


def test_walk_reports_links_fifos_sockets_and_goes_on(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside" / "secret").parent
    top = tmp_path / "top"
    write(top / "last")
    (top / "a-link").symlink_to(outside)
    (top / "b-link").symlink_to(outside / "secret")
    (top / "c-dangling").symlink_to("nowhere")
    (top / "d-loop").symlink_to(".")
    os.mkfifo(top / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(top / "socket"))
        assert walk(top) == {
            "a-link": "symlink",
            "b-link": "symlink",
            "c-dangling": "symlink",
            "d-loop": "symlink",
            "fifo": "not-a-regular-file",
            "last": None,
            "socket": "not-a-regular-file",
        }


def test_walk_reports_names_that_are_no_utf8_and_does_not_enter_them(tmp_path: Path) -> None:
    write(tmp_path / "\udcff" / "inside")
    write(tmp_path / "good")
    assert walk(tmp_path) == {"\udcff": "undecodable-name", "good": None}


def test_walk_reports_an_unreadable_directory_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "closed" / "hidden")
    write(tmp_path / "open" / "seen")
    closed, real = (tmp_path / "closed").stat().st_ino, os.scandir

    def scandir(fd: int) -> Iterator[os.DirEntry[str]]:
        if os.fstat(fd).st_ino == closed:
            raise PermissionError(13, "Permission denied")
        return real(fd)

    monkeypatch.setattr(os, "scandir", scandir)
    assert walk(tmp_path) == {"closed": "unreadable", "open/seen": None}


def test_walk_is_bounded_in_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_DEPTH", 2)
    write(tmp_path / "1" / "2" / "file")
    write(tmp_path / "1" / "2" / "3" / "file")
    assert walk(tmp_path) == {"1/2/3": "too-deep", "1/2/file": None}


def test_walk_of_a_very_deep_directory_neither_recurses_nor_fails(tmp_path: Path) -> None:
    above = os.open(tmp_path, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=above)
        below = os.open("d", os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
    os.close(above)
    assert walk(tmp_path) == {"/".join("d" * (files.MAX_DEPTH + 1)): "too-deep"}


def test_walk_is_bounded_in_entries_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ENTRIES", 3)
    for name in "abcd":
        write(tmp_path / name)
    walked = walk(tmp_path)
    assert walked["."] == "too-many-files"
    assert len(walked) == 4


def test_a_directory_swapped_for_a_link_during_the_walk_is_not_entered(
    tmp_path: Path, swap_at_open: Callable[[str, Callable[[], None]], None]
) -> None:
    write(tmp_path / "elsewhere" / "secret")
    write(tmp_path / "top" / "sub" / "file")

    def swap() -> None:
        (tmp_path / "top" / "sub").rename(tmp_path / "moved")
        (tmp_path / "top" / "sub").symlink_to(tmp_path / "elsewhere")

    swap_at_open("sub", swap)
    assert walk(tmp_path / "top") == {"sub": "symlink"}


def test_the_root_may_be_a_link_that_the_user_named(tmp_path: Path) -> None:
    write(tmp_path / "real" / "file")
    (tmp_path / "named").symlink_to("real")
    assert walk(tmp_path / "named") == {"file": None}


@pytest.mark.parametrize("name", ["absent", "file", "nul\0byte"])
def test_a_root_that_is_no_directory_is_an_operational_error(tmp_path: Path, name: str) -> None:
    write(tmp_path / "file")
    with pytest.raises(StagingError), Root(tmp_path / name):
        pass


# --- open ---------------------------------------------------------------------------------------------------------


def test_open_returns_the_file_that_the_path_names(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "file", b"content")
    with Root(tmp_path) as root:
        for _ in range(2):
            fd = root.open("a/b/file")
            assert os.pread(fd, 100, 0) == b"content"
            assert not os.get_inheritable(fd)
            os.close(fd)


@pytest.mark.parametrize("path", ["../secret", "a/../secret", "/etc/passwd", "", ".", "a//file", "a/", "x\0", "\udcff"])
def test_open_refuses_a_path_that_could_lead_elsewhere(tmp_path: Path, path: str) -> None:
    write(tmp_path / "top" / "a" / "file")
    write(tmp_path / "secret")
    assert refusal(tmp_path / "top", path) == "bad-path"


def test_open_refuses_links_whether_last_or_on_the_way(tmp_path: Path) -> None:
    write(tmp_path / "real" / "sub" / "file")
    (tmp_path / "link").symlink_to("real/sub/file")
    (tmp_path / "dir").symlink_to("real")
    assert refusal(tmp_path, "link") == "symlink"
    assert refusal(tmp_path, "dir/sub/file") == "symlink"


@pytest.mark.parametrize("path", ["absent", "absent/file", "file/below", "n" * 300])
def test_open_says_that_a_file_is_missing(tmp_path: Path, path: str) -> None:
    write(tmp_path / "file")
    assert refusal(tmp_path, path) == "missing-file"


def test_open_never_waits_for_a_fifo_and_refuses_directories_and_sockets(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "sub").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("fifo", "sub", "socket"):
            assert refusal(tmp_path, name) == "not-a-regular-file"


def test_open_never_opens_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.mknod(tmp_path / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making device nodes needs a privilege")
    opened: list[object] = []
    real = os.open

    def recording(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        opened.append(path)
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", recording)
    assert refusal(tmp_path, "device") == "not-a-regular-file"
    assert walk(tmp_path) == {"device": "not-a-regular-file"}
    assert "device" not in opened


def test_a_file_swapped_for_a_link_at_the_last_moment_is_refused(
    tmp_path: Path, swap_at_open: Callable[[str, Callable[[], None]], None]
) -> None:
    secret = write(tmp_path / "secret")
    target = write(tmp_path / "top" / "file")

    def swap() -> None:
        target.unlink()
        target.symlink_to(secret)

    swap_at_open("file", swap)
    assert refusal(tmp_path / "top", "file") == "symlink"


def test_a_file_swapped_for_a_fifo_at_the_last_moment_neither_blocks_nor_passes(
    tmp_path: Path, swap_at_open: Callable[[str, Callable[[], None]], None]
) -> None:
    target = write(tmp_path / "file")

    def swap() -> None:
        target.unlink()
        os.mkfifo(target)

    swap_at_open("file", swap)
    codes: list[str] = []
    thread = threading.Thread(target=lambda: codes.append(refusal(tmp_path, "file")), daemon=True)
    thread.start()
    thread.join(timeout=5)
    assert codes == ["not-a-regular-file"]


def test_an_error_of_the_system_is_operational(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "file")
    real = os.open

    def failing(path: str, *args: int, dir_fd: int | None = None) -> int:
        if path == "file":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", failing)
    with Root(tmp_path) as root, pytest.raises(StagingError, match="Permission denied"):
        root.open("file")


def test_a_root_holds_a_bounded_number_of_descriptors_and_returns_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_CACHED_DIRECTORIES", 3)
    for index in range(10):
        write(tmp_path / f"{index}" / "sub" / "file")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Root(tmp_path) as root:
        assert len(list(root.walk())) == 10
        for index in range(10):
            os.close(root.open(f"{index}/sub/file"))
        with pytest.raises(FileSetError):
            root.open("0/absent/file")
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1 + 3
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_walk_counts_the_names_of_each_file_and_a_directory_is_told_from_a_file(tmp_path: Path) -> None:
    write(tmp_path / "in" / "one")
    write(tmp_path / "in" / "two")
    os.link(tmp_path / "in" / "one", tmp_path / "other")
    (tmp_path / "link").symlink_to("in")
    with Root(tmp_path) as root:
        assert {w.path: w.n_links for w in root.walk()} == {"in/one": 2, "in/two": 1, "link": 1, "other": 2}
        assert [root.holds_directory(path) for path in ("in", "in/one", "link", "link/one", "absent", "absent/x")] == [
            True, False, False, False, False, False
        ]  # fmt: skip


# --- StreamSource -------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(0, 120),
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 130), st.integers(0, 60))),
)
def test_chunk_digests_and_blake3_are_those_of_the_file_however_it_was_read(
    tmp_path_factory: pytest.TempPathFactory, *, size: int, calls: list[tuple[bool, int, int]]
) -> None:
    blake3 = pytest.importorskip("blake3").blake3
    data = bytes(range(size))
    path = write(tmp_path_factory.getbasetemp() / "chunked", data)
    read: list[tuple[int, int]] = []
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {"WINDOW_BYTES": 16, "HASH_CHUNK_BYTES": 7, "CHUNK_BYTES": 30}.items():
            patch.setattr(files, name, value)
        real = os.preadv

        def recorded(fd: int, buffers: list[memoryview], offset: int) -> int:
            got = real(fd, buffers, offset)
            read.append((offset, got))
            return got

        patch.setattr(os, "preadv", recorded)
        root = stack.enter_context(Root(path.parent))
        stream = stack.enter_context(
            StreamSource(root.open(path.name), "chunked", hashing=True, chunk_digests=True, blake3=True)
        )
        for digest, offset, nbytes in calls:
            with contextlib.suppress(StagingError):
                (stream.payload_sha256 if digest else stream.read)(offset, nbytes)
        assert stream.finish() == hashlib.sha256(data).hexdigest()
        starts = range(0, size, 30) if size > 30 else ()
        assert stream.chunk_digests == [hashlib.sha256(data[start : start + 30]).digest() for start in starts]
        assert stream.blake3_chunk_digests == [blake3(data[start : start + 30]).digest() for start in starts]
        assert stream.blake3 == blake3(data).hexdigest()
        assert stream.finish() == hashlib.sha256(data).hexdigest()
        assert len(stream.chunk_digests) == len(starts)
    # One pass for all of them, each byte once.
    assert sum(got for _, got in read) == size


def test_digests_that_nobody_asked_for_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 30)
    with source(write(tmp_path / "file", bytes(100)), hashing=True) as stream:
        stream.finish()
        assert (stream.chunk_digests, stream.blake3_chunk_digests, stream.blake3) == ([], [], None)


def test_a_source_that_cannot_take_blake3_closes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with Root(write(tmp_path / "file").parent) as root:
        fd = root.open("file")
        with pytest.raises(ConfigError, match="blake3"):
            StreamSource(fd, "file", hashing=True, blake3=True)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def source(path: Path, *, hashing: bool) -> StreamSource:
    with Root(path.parent) as root:
        return StreamSource(root.open(path.name), path.name, hashing=hashing)


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(0, 120),
    hashing=st.booleans(),
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 130), st.integers(0, 60))),
)
def test_a_source_returns_the_bytes_of_the_file_however_windows_jump_and_overlap(
    tmp_path_factory: pytest.TempPathFactory, *, size: int, hashing: bool, calls: list[tuple[bool, int, int]]
) -> None:
    data = bytes(range(size))
    path = write(tmp_path_factory.getbasetemp() / "streamed", data)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(files, "WINDOW_BYTES", 16)
        patch.setattr(files, "HASH_CHUNK_BYTES", 7)
        stream = stack.enter_context(source(path, hashing=hashing))
        assert stream.size == len(data)
        position = 0
        for digest, offset, nbytes in calls:
            expected = data[offset : offset + nbytes]
            outside = digest and offset + nbytes > len(data)
            try:
                got = stream.payload_sha256(offset, nbytes) if digest else stream.read(offset, nbytes)
            except StagingError:
                assert outside or (hashing and offset < position - 16)
                continue
            assert not outside
            assert got == (hashlib.sha256(expected).hexdigest() if digest else expected)
            position = max(position, min(offset + nbytes, len(data)), min(offset, len(data)))
        if hashing:
            assert stream.finish() == hashlib.sha256(data).hexdigest()


@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 3 * 1024 * 1024), jumps=st.lists(st.integers(1, 900_000), max_size=8))
def test_windows_of_64_kib_over_real_piece_sizes_agree_with_the_file(
    tmp_path_factory: pytest.TempPathFactory, size: int, jumps: list[int]
) -> None:
    data = (b"0123456789abcdefghijklmnopqrstuvwxyz" * (size // 36 + 1))[:size]
    path = write(tmp_path_factory.getbasetemp() / "streamed", data)
    with source(path, hashing=True) as stream:
        offset = 0
        for jump in jumps:
            assert stream.read(offset, 65536) == data[offset : offset + 65536]
            # As a parser does it: the payload begins within the window and ends behind it.
            inside = min(offset + 1000, size)
            end = min(inside + jump, size)
            assert stream.payload_sha256(inside, end - inside) == hashlib.sha256(data[inside:end]).hexdigest()
            offset = end
        assert stream.finish() == hashlib.sha256(data).hexdigest()


def test_a_hashing_source_keeps_a_window_behind_its_position_and_refuses_to_go_further_back(tmp_path: Path) -> None:
    data = b"".join(n.to_bytes(4, "little") for n in range(500_000))
    position = 1_900_000
    with source(write(tmp_path / "file", data), hashing=True) as stream:
        stream.read(position - 10, 10)
        kept = position - files.WINDOW_BYTES
        assert stream.read(kept, 1000) == data[kept : kept + 1000]
        assert stream.payload_sha256(kept, 200_000) == hashlib.sha256(data[kept : kept + 200_000]).hexdigest()
        for call in (stream.read, stream.payload_sha256):
            with pytest.raises(StagingError, match="was passed"):
                call(0, 10)
        assert stream.finish() == hashlib.sha256(data).hexdigest()


def test_a_hashing_source_returns_the_bytes_that_it_hashed_even_if_they_change_meanwhile(tmp_path: Path) -> None:
    path = write(tmp_path / "file", b"a" * 100_000)
    with source(path, hashing=True) as stream:
        assert stream.read(0, 65536) == b"a" * 65536
        path.write_bytes(b"b" * 100_000)
        assert stream.read(1000, 65536) == b"a" * 64536 + b"b" * 1000
        assert stream.finish() == hashlib.sha256(b"a" * 65536 + b"b" * 34464).hexdigest()


def test_a_hashing_source_reads_each_byte_once_and_in_bounded_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 5 * HASH_CHUNK_BYTES + 3
    path = write(tmp_path / "file", bytes(size))
    pieces: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        pieces.append((offset, len(buffers[0])))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with source(path, hashing=True) as stream:
        stream.read(0, 65536)
        stream.read(size - 70_000, 65536)
        stream.finish()
    assert sum(nbytes for offset, nbytes in pieces if offset < size) == size
    assert max(nbytes for _, nbytes in pieces) <= HASH_CHUNK_BYTES


@pytest.mark.parametrize("hashing", [False, True])
def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, *, hashing: bool) -> None:
    path = write(tmp_path / "file", bytes(100_000))
    with source(path, hashing=hashing) as stream:
        stream.read(0, 1000)
        os.truncate(path, 50_000)
        with pytest.raises(FileSetError) as caught:
            stream.read(40_000, 20_000)
    assert [f.code for f in caught.value.findings] == ["changed-while-read"]


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "file", bytes(1000))
    with source(path, hashing=True) as stream:
        assert stream.read(0, 1000) == bytes(1000)
        os.truncate(path, 1001)
        assert stream.read(999, 10) == b"\0"
        with pytest.raises(FileSetError) as caught:
            stream.finish()
    assert [f.code for f in caught.value.findings] == ["changed-while-read"]


def test_a_source_that_does_not_hash_gives_no_digest_of_the_file(tmp_path: Path) -> None:
    with source(write(tmp_path / "file"), hashing=False) as stream, pytest.raises(StagingError):
        stream.finish()


@pytest.mark.parametrize("hashing", [False, True])
def test_a_read_error_is_operational(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, hashing: bool) -> None:
    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with source(write(tmp_path / "file"), hashing=hashing) as stream:
        monkeypatch.setattr(os, "preadv", failing)
        monkeypatch.setattr(os, "pread", failing)
        with pytest.raises(StagingError, match="Input/output error"):
            stream.read(0, 1)


# --- publish ------------------------------------------------------------------------------------------------------


def test_publish_writes_and_replaces_whole_files_with_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    publish(path, b"first")
    publish(path, b"second", mode=0o600)
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["directory", "symlink", "fifo"])
def test_publish_replaces_regular_files_only(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "target"
    other = write(tmp_path / "other", b"untouched")
    if kind == "directory":
        path.mkdir()
    elif kind == "symlink":
        path.symlink_to("other")
    else:
        os.mkfifo(path)
    before = os.lstat(path)
    with pytest.raises(StagingError, match="cannot replace"):
        publish(path, b"data")
    assert os.lstat(path).st_ino == before.st_ino
    assert other.read_bytes() == b"untouched"
    assert names(tmp_path) == ["other", "target"]


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), StagingError)]
)
def test_publish_leaves_no_temporary_file_and_the_old_content_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    path = write(tmp_path / "file", b"old")

    def fsync(_: int) -> None:
        assert len(names(tmp_path)) == 2
        raise error

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(raised):
        publish(path, b"new")
    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


def test_publish_puts_content_on_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(fd: int) -> None:
        steps.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"file of {os.fstat(fd).st_size}")
        fsync(fd)

    def traced_replace(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        steps.append("replace")
        replace(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    publish(tmp_path / "file", b"12345")
    assert steps == ["file of 5", "replace", "directory"]


def test_publish_into_no_directory_is_operational(tmp_path: Path) -> None:
    with pytest.raises(StagingError):
        publish(tmp_path / "absent" / "file", b"")


# ---------------------------------------------------------------- a table at the end


def peeking(path: Path, *, limit: int = 1000, payload_digests: bool = False) -> StreamSource:
    with Root(path.parent) as root:
        fd = root.open(path.name)
    return StreamSource(fd, path.name, hashing=True, payload_digests=payload_digests, peek_limit=limit)


def test_what_is_peeked_at_ahead_of_the_stream_is_what_is_hashed(tmp_path: Path) -> None:
    data = os.urandom(3 * HASH_CHUNK_BYTES)
    path = write(tmp_path / "file", data)
    with peeking(path) as source:
        assert source.peek(len(data) - 20, 100) == data[-20:]
        assert source.peek(5, 10) == data[5:15]
        assert source.peek(8, 400) == data[8:408]
        assert source.finish() == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("at", [5, 40, 2 * HASH_CHUNK_BYTES - 1, 2 * HASH_CHUNK_BYTES, 3 * HASH_CHUNK_BYTES - 1])
def test_a_file_that_differs_from_what_was_peeked_at_is_refused(tmp_path: Path, at: int) -> None:
    path = write(tmp_path / "file", bytes(3 * HASH_CHUNK_BYTES))
    with peeking(path) as source:
        source.peek(3 * HASH_CHUNK_BYTES - 8, 8)
        source.peek(0, 50)
        source.peek(4, 2)
        source.peek(2 * HASH_CHUNK_BYTES - 10, 20)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        with pytest.raises(FileSetError) as caught:
            source.finish()
    assert caught.value.findings[0].code == "changed-while-read"


def test_peeking_is_bounded_and_only_ahead_of_the_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "file", bytes(3000))
    with peeking(path) as source:
        assert source.peek(0, 600) is source.peek(0, 600)  # kept, and counted, once
        with pytest.raises(LimitError) as caught:
            source.peek(1000, 401)
        assert caught.value.findings[0].code == "too-much-inline"
    with peeking(path) as source:
        source.read(0, 10)
        with pytest.raises(StagingError, match="was passed"):
            source.peek(9, 1)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000)), max_size=12),
    st.integers(0, 2**32),
)
def test_payloads_told_of_ahead_of_the_stream_get_their_digests_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[tuple[int, int]], seed: int
) -> None:
    # Pieces are 256 KiB, so the payloads are spread over a few of those.
    scale = HASH_CHUNK_BYTES // 1000
    data = hashlib.shake_256(str(seed).encode()).digest(2 * HASH_CHUNK_BYTES + 77)
    path = write(tmp_path_factory.mktemp("payloads") / "file", data)
    told = [(min(a, b) * scale, (max(a, b) - min(a, b)) * scale) for a, b in payloads]
    with peeking(path, payload_digests=True) as source:
        source.peek(0, 1)
        for offset, nbytes in told:
            source.payload(offset, nbytes)
        assert source.finish() == hashlib.sha256(data).hexdigest()
        assert source.digests == {(o, n): hashlib.sha256(data[o : o + n]).hexdigest() for o, n in told}


def test_a_payload_read_again_is_held_against_its_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "file", b"0123456789")
    with peeking(path, payload_digests=True) as source:
        source.peek(0, 1)
        source.payload(2, 4)
        source.finish()
        assert source.read_again(2, 4) == b"2345"
        path.write_bytes(b"0123x56789")
        with pytest.raises(FileSetError) as caught:
            source.read_again(2, 4)
    assert caught.value.findings[0].code == "changed-while-read"


def test_a_checksum_is_compared_as_its_bytes_stream_past(tmp_path: Path) -> None:
    data = os.urandom(3 * HASH_CHUNK_BYTES)
    path = write(tmp_path / "file", data)
    part = data[100 : 2 * HASH_CHUNK_BYTES]
    with peeking(path, payload_digests=True) as source:
        source.peek(0, 1)
        source.checksum(100, len(part), zlib.crc32(part))
        source.payload(100, len(part))
        assert source.finish() == hashlib.sha256(data).hexdigest()
        assert source.refusal is None
        assert source.digests == {(100, len(part)): hashlib.sha256(part).hexdigest()}
    with peeking(path) as source:
        source.checksum(100, len(part), zlib.crc32(part) ^ 1)
        assert source.finish() == hashlib.sha256(data).hexdigest()
        assert source.refusal is not None
        (finding,) = source.refusal.findings
    assert (finding.code, finding.offset) == ("zip-checksum", 100)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_at_hand_is_hashed_and_seen_as_it_was_lent(tmp_path: Path, seed: int) -> None:
    """Whoever lends memory uses it again as soon as it was told that the bytes were read."""
    dice = random.Random(seed)  # noqa: S311 - the same on each run
    data = dice.randbytes(1 << 21)
    lent: list[bytearray] = []

    def at_hand(offset: int, nbytes: int) -> memoryview | None:
        if dice.random() < 0.3:
            return None
        longest = dice.choice([1000, 65_535, 65_536, 150_000, 1 << 20])
        lent.append(bytearray(data[offset : offset + min(nbytes, longest)]))
        return memoryview(lent[-1])

    def use_again(_: int) -> None:
        for memory in lent:
            memory[:] = bytes(len(memory))
        lent.clear()

    path = write(tmp_path / "file", data)
    with (
        Root(path.parent) as root,
        StreamSource(root.open("file"), "file", hashing=True, at_hand=at_hand, advance=use_again) as source,
    ):
        at = 0
        while at < len(data):
            offset = max(0, at + dice.choice([-(1 << 16), -100, 100, 1 << 17, 1 << 18]))
            nbytes = dice.choice([1, 100, 70_000, 200_000])
            assert source.read(offset, nbytes) == data[offset : offset + nbytes]
            at = max(at, offset + nbytes)
        assert source.finish() == hashlib.sha256(data).hexdigest()


def test_what_is_at_hand_is_not_read_from_disk(tmp_path: Path) -> None:
    data = os.urandom(1 << 18)
    path = write(tmp_path / "file", bytes(len(data)))
    with Root(path.parent) as root:
        at_hand = lambda offset, nbytes: memoryview(data)[offset : offset + nbytes]  # noqa: E731
        with StreamSource(root.open("file"), "file", hashing=True, at_hand=at_hand) as source:
            assert source.read(0, 100) == data[:100]
            assert source.finish() == hashlib.sha256(data).hexdigest()
