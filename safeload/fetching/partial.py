"""What is on disk while a fetch goes on: a private work area beside the target, temporary files, and their chunks.

Only bytes that a digest vouches for are written to a temporary file whose manifest entry has chunks, so nothing in such
a file is wrong whoever else writes to it; and yet a later run believes none of it without hashing it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import re
import secrets
import shutil
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, Self

from safeload.digests import CHUNK_BYTES, HASH_CHUNK_BYTES
from safeload.errors import ConfigError, FetchError, StagingError, escape, reason
from safeload.files import read_into
from safeload.manifest import FileEntry
from safeload.sizes import human_size

MARGIN_BYTES: Final = 64 * 1024 * 1024
"""Disk space to leave beside what is fetched: for directories, for the file system's own tables, for others."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_BLOCK_BYTES: Final = 4096
"""Of what offset, length and address have to be multiples where the page cache is passed by (open(2), O_DIRECT): more
than most disks ask for. One that asks for more says so, and is written to through the cache."""

_FAST_BYTES_PER_SECOND: Final = 250_000_000
"""What one thread has to get written for a disk to be fast. Where it is slower, the copy into the page cache costs
nothing beside the writing, and saves whoever loads the checkpoint next from reading it at that speed."""

_TRIAL_BYTES: Final = 64 * 1024 * 1024
"""Written before it is said of a disk that it is slow."""

_PARTIAL_NAME: Final = re.compile(r"(?P<sha256>[0-9a-f]{64})\.[0-9a-f]{16}")

_FICLONERANGE: Final = 0x4020940D
"""`_IOW(0x94, 13, struct file_clone_range)` of linux/fs.h: share blocks with another file until one of them changes."""


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_FALLOCATE: Final = getattr(_LIBC, "fallocate", None)
if _FALLOCATE is not None:
    _FALLOCATE.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_SYNC_FILE_RANGE: Final = getattr(_LIBC, "sync_file_range", None)
if _SYNC_FILE_RANGE is not None:
    _SYNC_FILE_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE: Final = 2
"""Of linux/fs.h: begin to write dirty pages of the range."""


def chunk_digests(entry: FileEntry) -> tuple[bytes, ...]:
    """Return the digests that pieces of a file are checked by: its chunks', or its own where it is one piece.

    Empty for an empty file, and for one of several pieces whose manifest has no digests of them: that is checked whole.
    """
    if not entry.size:
        return ()
    if entry.chunks is None:
        return (bytes.fromhex(entry.sha256),) if entry.size <= CHUNK_BYTES else ()
    return entry.chunk_digests


def chunk_range(entry: FileEntry, index: int) -> range:
    """Return the bytes of a file that a chunk covers."""
    return range(index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, entry.size))


def aligned_memory(nbytes: int) -> mmap.mmap:
    """Return memory that can be written to disk past the page cache: it begins with a page.

    Raises:
        StagingError: There is none.
    """
    try:
        return mmap.mmap(-1, nbytes)
    except OSError as err:
        raise StagingError(f"cannot take {human_size(nbytes)} of memory: {reason(err)}") from err


class Disk:
    """How fast writes past the page cache were so far, over all files of a run, and so whether to go on with them."""

    def __init__(self) -> None:
        """Begin with a fast one."""
        self.is_fast = True
        self._nbytes = 0
        self._seconds = 0.0
        self._lock = threading.Lock()

    def wrote(self, nbytes: int, seconds: float) -> None:
        """Count what one thread wrote, and the time that it took."""
        with self._lock:
            self._nbytes += nbytes
            self._seconds += seconds
            if self._nbytes >= _TRIAL_BYTES and self._nbytes < _FAST_BYTES_PER_SECOND * self._seconds:
                self.is_fast = False


@dataclass(slots=True)
class PartialFile:
    """One temporary file, as long as the whole from the start.

    Attributes:
        entry: What it is to become.
        name: In the work area's directory of such files.
        fd: Open for reading and writing.
        disk: The one that it is on.
    """

    entry: FileEntry
    name: str
    fd: int
    disk: Disk
    _direct: int = field(init=False, default=-1)
    _is_direct: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Open the file a second time, for writing past the page cache, where the file system does that."""
        if hasattr(os, "O_DIRECT"):
            # By its descriptor: the same file, whatever has its name by now. Without /proc the cache has to do.
            with contextlib.suppress(OSError):
                self._direct = os.open(f"/proc/self/fd/{self.fd}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
                self._is_direct = True

    def write(self, offset: int, data: bytes | memoryview, *, is_aligned: bool = False) -> None:
        """Write bytes, and have the disk begin with them.

        A fast disk is written to past the page cache: to copy a checkpoint there takes longer than to write it, and
        pushes out what others need, such as the weights of the model that is being served meanwhile.

        Args:
            offset: Where they belong.
            data: The bytes.
            is_aligned: Whether they are in `aligned_memory`, from its start: only such bytes can pass the cache by.

        Raises:
            StagingError: There is no room, or the disk does not take them.
        """
        try:
            with memoryview(data) as left:
                at = cached_from = self._write_directly(offset, left) if is_aligned else 0
                while at < len(left):
                    at += os.pwrite(self.fd, left[at:], offset + at)
        except OSError as err:
            raise _no_room(self.entry.path, err) from err
        if at > cached_from:
            _begin_writeback(self.fd, offset + cached_from, at - cached_from)

    def _write_directly(self, offset: int, data: memoryview) -> int:
        """Write as many bytes past the page cache as can be, and return how many."""
        at = 0
        whole = len(data) - len(data) % _BLOCK_BYTES if offset % _BLOCK_BYTES == 0 else 0
        while self._is_direct and self.disk.is_fast and at < whole and at % _BLOCK_BYTES == 0:
            before = time.monotonic()
            try:
                written = os.pwrite(self._direct, data[at:whole], offset + at)
            except OSError as err:
                if err.errno != errno.EINVAL:
                    raise
                # It does not after all. Other threads may be writing: the descriptor stays open until the end.
                self._is_direct = False
            else:
                self.disk.wrote(written, time.monotonic() - before)
                at += written
        return at

    def recheck(self, alive: Callable[[], object]) -> set[int]:
        """Hash what is there, and return the chunks that are the signed ones. Holes are not looked at.

        Args:
            alive: Called after each piece; what it raises ends the work.

        Raises:
            StagingError: It cannot be read.
        """
        digests = chunk_digests(self.entry)
        good: set[int] = set()
        for index, expected in enumerate(digests):
            where = chunk_range(self.entry, index)
            if _has_data(self.fd, where) and _sha256(self.fd, where, self.name, alive) == expected:
                good.add(index)
        return good

    def seed(
        self,
        other: int,
        missing: Iterable[int],
        alive: Callable[[], object],
        room: Callable[[], contextlib.AbstractContextManager[memoryview]],
    ) -> set[int]:
        """Take chunks from another file where they have the signed digest, and return which.

        Blocks are shared where the file system can do that (reflink), else copied. A hard link is never made: whoever
        writes to the other file would write to this one.

        Args:
            other: Descriptor of a file of the same length.
            missing: Chunks to look for, each at its own place.
            alive: Called after each chunk; what it raises ends the work.
            room: Lends memory for the longest chunk, for as long as one is looked at.

        Raises:
            StagingError: There is no room, or the other file cannot be read.
        """
        digests = chunk_digests(self.entry)
        taken: set[int] = set()
        for index in missing:
            alive()
            where = chunk_range(self.entry, index)
            with room() as memory, memory[: len(where)] as chunk:
                if _read(other, chunk, where.start, self.entry.path) != len(where):
                    continue
                if hashlib.sha256(chunk).digest() != digests[index]:
                    continue
                if not _clone(other, self.fd, where):
                    self.write(where.start, chunk)
            taken.add(index)
        return taken

    def sync(self) -> None:
        """Bring the content to disk: after a power cut it is there, for a later run to find.

        Raises:
            StagingError: The disk does not take it.
        """
        try:
            # Not `fsync`: that writes the time of the last change as well, for each chunk, and nobody reads it.
            os.fdatasync(self.fd)
        except OSError as err:
            raise _no_room(self.entry.path, err) from err

    def close(self) -> None:
        """Close the file; it stays where it is."""
        for fd in (self.fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self.fd = self._direct = -1


class Tree:
    """A directory that finished files are put into, and its directories, none of them reached through a link."""

    def __init__(self, fd: int, shown: str) -> None:
        """Take over the descriptor of the directory."""
        self.fd = fd
        self._shown = shown

    def place(self, source: int, name: str, path: str, *, sync: bool) -> None:
        """Move a finished file to where it belongs, in the place of whatever is there.

        Args:
            source: Descriptor of the directory that it is in.
            name: Its name there.
            path: Where it belongs, below this directory.
            sync: Whether to bring the directories to disk as well.

        Raises:
            StagingError: The system refuses, or there is a link or a file where a directory should be.
        """
        *parents, last = path.split("/")
        try:
            with contextlib.ExitStack() as stack:
                above = self.fd
                for parent in parents:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(parent, dir_fd=above)
                    below = os.open(parent, _DIRECTORY, dir_fd=above)
                    stack.callback(os.close, below)
                    if sync:
                        os.fsync(above)
                    above = below
                os.replace(name, last, src_dir_fd=source, dst_dir_fd=above)
                if sync:
                    os.fsync(above)
        except OSError as err:
            raise StagingError(f"cannot put {escape(path)} into {escape(self._shown)}: {reason(err)}") from err

    def sync_all(self) -> None:
        """Bring every directory to disk.

        Raises:
            StagingError: The system refuses.
        """
        try:
            for _, _, _, fd in os.fwalk(".", dir_fd=self.fd, follow_symlinks=False):
                os.fsync(fd)
        except OSError as err:
            raise StagingError(f"cannot bring {escape(self._shown)} to disk: {reason(err)}") from err

    def close(self) -> None:
        """Close the directory."""
        # A thread that a second Ctrl-C left behind must not take what gets this number next for it.
        fd, self.fd = self.fd, -1
        os.close(fd)


class WorkArea:
    """The private directory beside the target where a fetch keeps what it has so far. Use it as a context manager.

    In it are `files/`, which becomes the target, `partial/` with the temporary files, and `lock`. Its name follows from
    the target's, so that a later run finds it.

    Attributes:
        path: Where it is.
        files: Where finished files wait for the others.
    """

    def __init__(self, target: Path) -> None:
        """Name the target; entering makes the work area.

        Args:
            target: The directory that the checkpoint is to be in.
        """
        self.target = target
        self.path = work_area_of(target)
        self.files = self.path / "files"
        self._lock = -1
        self._partial = -1
        self._old: dict[str, list[str]] = {}
        self._disk = Disk()

    def __enter__(self) -> Self:
        """Make or find it, and take the lock.

        Raises:
            ConfigError: There is something else in its place.
            FetchError: Another fetch is at work on the same target.
            StagingError: The system refuses.
        """
        try:
            self._enter()
        except OSError as err:
            self.__exit__()
            where = escape(str(self.path))
            raise StagingError(f"cannot make the work area {where}: {reason(err)}", hint="check permissions") from err
        except BaseException:
            self.__exit__()
            raise
        return self

    def _enter(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        area = os.open(self.path, _DIRECTORY)
        try:
            status = os.fstat(area)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(
                    f"expected {escape(str(self.path))} to be ours alone, found a directory that others can use",
                    hint="remove it",
                )
            self._lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=area)
            self._take_lock()
            for name, mode in (("files", 0o777), ("partial", 0o700)):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, mode, dir_fd=area)
            self._partial = os.open("partial", _DIRECTORY, dir_fd=area)
        finally:
            os.close(area)
        with os.scandir(self._partial) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            if found := _PARTIAL_NAME.fullmatch(name):
                self._old.setdefault(found["sha256"], []).append(name)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            message = f"another fetch is at work on {escape(str(self.target))}"
            raise FetchError(message, hint="wait until it ends") from err
        except OSError:
            # A file system without locks: then names that no two processes share keep them apart.
            return

    def __exit__(self, *_: object) -> None:
        """Close everything; what was fetched stays for a later run."""
        for fd in (self._partial, self._lock):
            if fd >= 0:
                os.close(fd)
        self._partial = self._lock = -1

    @property
    def partial_fd(self) -> int:
        """Descriptor of the directory of temporary files."""
        return self._partial

    def open_partial(self, entry: FileEntry) -> PartialFile:
        """Return a temporary file for an entry: what an earlier run left of it, under a name of this one, or a new one.

        What is in it has to be rechecked.

        Raises:
            StagingError: The system refuses.
        """
        name = f"{entry.sha256}.{secrets.token_hex(8)}"
        try:
            left = self._old.get(entry.sha256, [])
            while left:
                fd = self._adopt(left.pop(), name, entry)
                if fd is not None:
                    return PartialFile(entry, name, fd, self._disk)
            fd = os.open(name, _NEW, 0o644, dir_fd=self._partial)
            try:
                os.ftruncate(fd, entry.size)
                _reserve(fd, entry.size)
            except BaseException:
                os.close(fd)
                raise
        except OSError as err:
            raise _no_room(entry.path, err) from err
        return PartialFile(entry, name, fd, self._disk)

    def allocated(self, entry: FileEntry) -> int:
        """Return how many bytes of disk an earlier run left for an entry, as far as that can be told."""
        names = self._old.get(entry.sha256, [])
        try:
            return 512 * os.stat(names[-1], dir_fd=self._partial, follow_symlinks=False).st_blocks if names else 0
        except OSError:
            return 0

    def _adopt(self, old: str, name: str, entry: FileEntry) -> int | None:
        """Take over what a dead process left, where it can be of use; one of two that try gets it."""
        if not chunk_digests(entry):
            self._remove(old)
            return None
        try:
            os.rename(old, name, src_dir_fd=self._partial, dst_dir_fd=self._partial)
            fd = os.open(name, _OLD, dir_fd=self._partial)
        except FileNotFoundError:
            return None
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_size == entry.size and status.st_nlink == 1:
            return fd
        os.close(fd)
        self._remove(name)
        return None

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._partial)

    def discard(self, partial: PartialFile) -> None:
        """Remove a temporary file that is of no use."""
        partial.close()
        with contextlib.suppress(OSError):
            self._remove(partial.name)

    def clean(self, wanted: Iterable[FileEntry]) -> None:
        """Remove what an earlier run for another manifest left, and files that nobody lists.

        Raises:
            StagingError: The system refuses.
        """
        entries = list(wanted)
        digests, paths = {entry.sha256 for entry in entries}, {entry.path for entry in entries}
        try:
            for sha256 in sorted(set(self._old) - digests):
                for name in self._old.pop(sha256):
                    self._remove(name)
            for folder, _, names in os.walk(self.files):
                for name in names:
                    path = PurePosixPath(folder, name).relative_to(self.files).as_posix()
                    if path not in paths:
                        Path(folder, name).unlink()
            for folder, _, _ in sorted(os.walk(self.files), reverse=True):
                if folder != str(self.files):
                    with contextlib.suppress(OSError):
                        Path(folder).rmdir()  # only where it is empty
        except OSError as err:
            raise StagingError(f"cannot clean {escape(str(self.path))}: {reason(err)}") from err

    def publish(self) -> None:
        """Make the finished files the target, by one rename, with everything on disk before and after.

        Raises:
            StagingError: The system refuses, or something is there by now.
        """
        parent = self.target.parent
        try:
            self.files.rename(self.target)
            fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as err:
            raise StagingError(
                f"cannot publish {escape(str(self.target))}: {reason(err)}",
                hint="what was fetched is kept; run again when nothing is in its place",
            ) from err
        self.remove()

    def remove(self) -> None:
        """Remove the work area: all of it is published."""
        shutil.rmtree(self.path, ignore_errors=True)


def target_of(directory: str | Path) -> Path:
    """Return where a directory really is, or will be, so that what lies beside it is on its file system.

    Raises:
        ConfigError: That cannot be told, or it is the root of a file system, beside which nothing can be.
    """
    try:
        target = Path(directory).resolve()
    except (OSError, ValueError, RuntimeError) as err:  # a loop of links is a RuntimeError up to Python 3.12
        raise ConfigError(f"cannot tell where {escape(str(directory))} lies: {reason(err)}") from err
    if not target.name:
        raise ConfigError(f"nothing can be fetched to {escape(str(target))}", hint="name a directory in it")
    return target


def work_area_of(target: Path) -> Path:
    """Return where a fetch of a directory keeps what it has so far: beside it, hidden, on the same file system."""
    return target.parent / f".{target.name}.safeload-partial"


def require_space(directory: Path, sizes: Sequence[int]) -> None:
    """Check that the file system has room for files, in blocks and in entries, and some to spare.

    Args:
        directory: A directory on it.
        sizes: Bytes of each file that is missing, or of what is missing of it.

    Raises:
        StagingError: It has not, or does not say.
    """
    try:
        found = os.statvfs(directory)
    except OSError as err:
        raise StagingError(f"cannot look at {escape(str(directory))}: {reason(err)}") from err
    block = found.f_frsize or 4096
    needed = sum(-(-size // block) * block for size in sizes) + (MARGIN_BYTES if sizes else 0)
    free = found.f_bavail * block
    if needed > free:
        raise StagingError(
            f"expected {human_size(needed)} of free disk space for {escape(str(directory))}, found {human_size(free)}",
            hint="free some, or fetch to another disk",
        )
    # Some file systems make entries as they go, and say 0 of 0.
    if found.f_files and found.f_favail < len(sizes):
        message = f"expected room for {len(sizes)} files in {escape(str(directory))}, found {found.f_favail}"
        raise StagingError(message, hint="remove some files, or fetch to another disk")


def _no_room(path: str, err: OSError) -> StagingError:
    hint = "free some disk space and run again: what was verified is kept" if err.errno == errno.ENOSPC else None
    return StagingError(f"cannot write {escape(path)}: {reason(err)}", hint=hint)


def _reserve(fd: int, nbytes: int) -> None:
    """Take the disk space of a file before its bytes come, where the file system can; what is not written stays a hole.

    Not by `os.posix_fallocate`, which writes zeros itself where the file system cannot: that takes as long as the file
    is, and a later run would take them for what an earlier one fetched.

    Raises:
        OSError: There is no room.
    """
    if _FALLOCATE is not None and nbytes and _FALLOCATE(fd, 0, 0, nbytes):
        number = ctypes.get_errno()
        if number in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OSError(number, os.strerror(number))


def _begin_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Ask for bytes to be brought to disk, without waiting: then little is left for the `fsync` at the end."""
    # A hint, whose failure costs time and nothing else.
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def _has_data(fd: int, where: range) -> bool:
    try:
        return os.lseek(fd, where.start, os.SEEK_DATA) < where.stop
    except OSError as err:
        # ENXIO: nothing but a hole up to the end. Anything else: a file system that does not know.
        return err.errno != errno.ENXIO


def _sha256(fd: int, where: range, name: str, alive: Callable[[], object]) -> bytes:
    digest = hashlib.sha256()
    for piece in _pieces(fd, where, name):
        digest.update(piece)
        alive()
    return digest.digest()


def _pieces(fd: int, where: range, name: str) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(HASH_CHUNK_BYTES, len(where))))
    at = where.start
    while at < where.stop:
        got = read_into(fd, buffer[: min(len(buffer), where.stop - at)], at, path=name)
        if not got:
            return
        yield buffer[:got]
        at += got


def _read(fd: int, target: memoryview, offset: int, path: str) -> int:
    at = 0
    while at < len(target) and (got := read_into(fd, target[at:], offset + at, path=path)):
        at += got
    return at


def _clone(source: int, target: int, where: range) -> bool:
    """Share the blocks of a range between two files, and return whether that worked."""
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, where.start, len(where), where.start))
    except OSError:
        return False
    return True
