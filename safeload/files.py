"""The only module that touches directories which somebody else filled: walk, open, stream, and publish our own files.

Below the directory that the user typed nothing is followed: every component is opened relative to the directory
above it, so a link that is swapped in while we work is met, and refused, and never walked through.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from safeload.digests import CHUNK_BYTES, HASH_CHUNK_BYTES, Crc32, Hasher, new_blake3
from safeload.errors import ConfigError, FileSetError, Finding, FormatError, LimitError, StagingError, escape, reason

MAX_DEPTH = 64
"""Deepest directory that a walk enters, in components below the root: twice what a manifest may name."""

MAX_ENTRIES = 1_000_000
"""Most directory entries that a walk looks at: a thousand times the files of Grok-1, and some 400 MB of our memory."""

MAX_CACHED_DIRECTORIES = 16
"""Directory descriptors that a `Root` keeps open beside its own; some systems let a process hold 256 in all."""

WINDOW_BYTES = 128 * 1024
"""Bytes behind its position that a hashing source can still serve: two of the 64 KiB windows that parsers read."""

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: a FIFO that took the file's place after we looked must not hang us; it does nothing to a regular file.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


@dataclass(frozen=True, slots=True)
class WalkedFile:
    """One entry that a walk met and did not enter.

    Attributes:
        path: Path below the root, with `/` between the components; `.` for the root itself.
        size: Length in bytes as the directory says; 0 where it does not.
        device: Number of the device that holds it; 0 where unknown.
        inode: Its number there; 0 where unknown.
        n_links: How many names the file has, wherever they are.
        finding: Why it can not be read as a regular file, or None.
    """

    path: str
    size: int = 0
    device: int = 0
    inode: int = 0
    n_links: int = 1
    finding: Finding | None = None


def hard_link(walked: WalkedFile) -> Finding:
    """Return the finding for a file that has another name as well."""
    message = f"expected a file with one name, found {walked.n_links} hard links to it"
    hint = "put a copy in its place: whoever has the other name can change what is read under this one"
    return Finding("hard-link", message, file=walked.path, hint=hint)


def lies_in(path: str | Path, directory: str | Path) -> bool:
    """Whether a path leads to somewhere in a directory.

    Raises:
        ConfigError: That cannot be told.
    """
    try:
        return Path(path).resolve().is_relative_to(Path(directory).resolve())
    except (OSError, ValueError, RuntimeError) as err:  # a loop of links is a RuntimeError up to Python 3.12
        raise ConfigError(f"cannot tell where {escape(str(path))} lies: {reason(err)}", hint="check the path") from err


def require_outside(what: str, path: str | Path, directory: str | Path) -> None:
    """Refuse a file of ours that lies in the checkpoint, where others decide what is in it.

    Raises:
        ConfigError: It does, or that cannot be told.
    """
    if lies_in(path, directory):
        raise ConfigError(
            f"the {what} {escape(str(path))} lies in the checkpoint, where others decide what is in it",
            hint="name one that lies where only you can write",
        )


class Root:
    """A directory held open, so that what is below it is found from there and from nowhere else.

    The directory itself may be reached through links, because the user named it; below it none is followed.
    `open` may be called from several threads. Use it as a context manager, and leave it after those threads ended.
    """

    def __init__(self, directory: str | Path) -> None:
        """Name the directory; entering the context opens it."""
        self.directory = Path(directory)
        self._fd = -1
        # Never evicted before `__exit__`: a descriptor closed while another thread uses it may by then name another
        # file.
        self._cache: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Open the directory.

        Raises:
            StagingError: it is not there, no directory, or may not be read.
        """
        try:
            self._fd = os.open(self.directory, _DIRECTORY_FLAGS)
        except (OSError, ValueError) as err:
            message = f"cannot open the directory {escape(str(self.directory))}: {reason(err)}"
            raise StagingError(message, hint="check the path") from err
        return self

    def __exit__(self, *_: object) -> None:
        """Close the directory and all that is cached below it."""
        cached, self._cache = self._cache, {}
        for fd in cached.values():
            os.close(fd)
        os.close(self._fd)
        self._fd = -1

    def walk(self) -> Iterator[WalkedFile]:
        """Yield every entry below the root that is no directory, sorted by path.

        Whatever can not be read as a regular file comes with a finding, and the walk goes on: codes "symlink",
        "not-a-regular-file", "unreadable", "undecodable-name", "too-deep", and "too-many-files", which ends it.
        Nothing is opened but directories.
        """
        found: list[WalkedFile] = []
        pending: list[tuple[str, ...]] = [()]
        seen = 0
        while pending:
            parents = pending.pop()
            here = "/".join(parents) or "."
            try:
                with self._directory(parents) as fd, os.scandir(fd) as entries:
                    for entry in entries:
                        seen += 1
                        if seen > MAX_ENTRIES:
                            message = f"expected at most {MAX_ENTRIES} directory entries, found more"
                            found.append(WalkedFile(".", finding=Finding("too-many-files", message, file=".")))
                            pending.clear()
                            break
                        walked = _look(entry, (*parents, entry.name))
                        if walked is None:
                            pending.append((*parents, entry.name))
                        else:
                            found.append(walked)
            except FileSetError as err:
                found.append(WalkedFile(here, finding=err.findings[0].in_file(here)))
            except (OSError, StagingError) as err:
                found.append(WalkedFile(here, finding=_unreadable(here, err)))
        yield from sorted(found, key=lambda walked: walked.path)

    def open(self, path: str) -> int:
        """Open the regular file at `path`, without following a link anywhere, and return its descriptor.

        The caller closes it.

        Args:
            path: Path below the root, with `/` between the components.

        Raises:
            FileSetError: codes "symlink" (also for a directory on the way), "not-a-regular-file", "missing-file", and
                "bad-path" for a path that is empty, absolute, or has an empty, `.` or `..` component.
            StagingError: the system refused for another reason.
        """
        *parents, name = _components(path)
        try:
            with self._directory(tuple(parents)) as directory:
                # A device is never opened, not even to look at it: opening alone can act on it. What is swapped in
                # after this look needs the right to make device nodes, and with that nobody needs our help.
                _require_regular(os.lstat(name, dir_fd=directory).st_mode)
                fd = os.open(name, _FILE_FLAGS, dir_fd=directory)
            try:
                _require_regular(os.fstat(fd).st_mode)
            except BaseException:
                os.close(fd)
                raise
        except FileSetError as err:
            raise FileSetError(err.findings[0].in_file(path)) from err
        except OSError as err:
            raise _open_error(err, path) from err
        return fd

    def holds_directory(self, path: str) -> bool:
        """Whether there is a directory at `path`, reached without following a link; False where nobody can tell."""
        *parents, name = path.split("/")
        try:
            with self._directory(tuple(parents)) as directory:
                return stat.S_ISDIR(os.lstat(name, dir_fd=directory).st_mode)
        except (FileSetError, OSError, ValueError):
            return False

    def holds(self, path: str, data: bytes) -> bool:
        """Whether the regular file at `path` has exactly these bytes; False for whatever cannot be read as one."""
        try:
            fd = self.open(path)
        except (FileSetError, StagingError):
            return False
        try:
            found = bytearray(len(data) + 1)
            at = 0
            with memoryview(found) as view:
                while at < len(found) and (got := read_into(fd, view[at:], at, path=path)):
                    at += got
            return found[:at] == data
        except StagingError:
            return False
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _directory(self, parts: tuple[str, ...]) -> Iterator[int]:
        """Lend the descriptor of the directory at `parts`. Raises OSError, or FileSetError for a link on the way."""
        if not parts:
            yield self._fd
            return
        with self._lock:
            cached = self._cache.get(parts)
        if cached is not None:
            yield cached
            return
        fd = self._descend(parts)
        with self._lock:
            keep = parts not in self._cache and len(self._cache) < MAX_CACHED_DIRECTORIES
            if keep:
                self._cache[parts] = fd
        try:
            yield fd
        finally:
            if not keep:
                os.close(fd)

    def _descend(self, parts: tuple[str, ...]) -> int:
        above = self._fd
        try:
            for name in parts:
                try:
                    below = os.open(name, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=above)
                except NotADirectoryError:
                    # Linux says so of a link as well: O_DIRECTORY is looked at before O_NOFOLLOW is.
                    if stat.S_ISLNK(os.lstat(name, dir_fd=above).st_mode):
                        raise FileSetError(_symlink()) from None
                    raise
                if above != self._fd:
                    os.close(above)
                above = below
        except BaseException:
            if above != self._fd:
                os.close(above)
            raise
        return above


def _components(path: str) -> list[str]:
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts) or "\0" in path or not _is_decodable(path):
        message = "expected a relative path of plain components, found another"
        raise FileSetError(Finding("bad-path", message, file=path))
    return parts


def _is_decodable(name: str) -> bool:
    # The system's names are bytes; Python shows those that are no UTF-8 as unpaired surrogates.
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _look(entry: os.DirEntry[str], parts: tuple[str, ...]) -> WalkedFile | None:
    """Describe one directory entry without opening it; None for a directory to enter."""
    path = "/".join(parts)
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError as err:
        return WalkedFile(path, finding=_unreadable(path, err))
    finding: Finding | None = None
    is_directory = stat.S_ISDIR(status.st_mode)
    if not _is_decodable(entry.name):
        finding = Finding("undecodable-name", "expected a name in UTF-8, found other bytes", hint="rename the file")
    elif is_directory and len(parts) > MAX_DEPTH:
        finding = Finding("too-deep", f"expected at most {MAX_DEPTH} nested directories, found more")
    elif is_directory:
        return None
    else:
        finding = _irregular(status.st_mode)
    placed = None if finding is None else finding.in_file(path)
    return WalkedFile(path, status.st_size, status.st_dev, status.st_ino, status.st_nlink, placed)


def _irregular(mode: int) -> Finding | None:
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISLNK(mode):
        return _symlink()
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return Finding("not-a-regular-file", f"expected a regular file, found {kind}", hint="remove it")


def _symlink() -> Finding:
    message = "expected regular files and directories only, found a symbolic link"
    return Finding("symlink", message, hint="put a copy of the link's target in its place (cp -L)")


def _require_regular(mode: int) -> None:
    finding = _irregular(mode)
    if finding is not None:
        raise FileSetError(finding)


def _unreadable(path: str, err: OSError | StagingError) -> Finding:
    return Finding("unreadable", f"expected to read it, found: {reason(err)}", file=path, hint="check its permissions")


def _open_error(err: OSError, path: str) -> FileSetError | StagingError:
    if err.errno == errno.ELOOP:
        return FileSetError(_symlink().in_file(path))
    if err.errno in {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}:
        return FileSetError(Finding("missing-file", "expected a regular file, found none", file=path))
    if err.errno == errno.ENXIO:
        message = "expected a regular file, found a socket"
        return FileSetError(Finding("not-a-regular-file", message, file=path, hint="remove it"))
    return StagingError(f"cannot open {escape(path)}: {reason(err)}")


def read_into(fd: int, target: memoryview, offset: int, *, path: str) -> int:
    """Read bytes at `offset` of an open file into `target`, and return how many: 0 exactly at or after the end.

    Args:
        fd: Descriptor from `Root.open`.
        target: Writable bytes, not empty; fewer than they can hold may be read.
        offset: Byte offset in the file.
        path: What to call the file in an error.

    Raises:
        StagingError: the bytes could not be read.
    """
    try:
        return os.preadv(fd, [target], offset)
    except OSError as err:
        raise StagingError(f"cannot read {escape(path)} at byte {offset}: {reason(err)}") from err


class StreamSource:
    """One open file, read without being held: the source of a scan that loads nothing.

    Without hashing, `read` reads wherever it is told. With hashing, the file is read once from its start to its end,
    every byte enters the digest, those that are jumped over included, and `read` returns only bytes that did: what
    was parsed is what was hashed, even while somebody writes to the file. Such a source goes forward; of what lies
    behind its position it keeps at least the last `WINDOW_BYTES`, for windows that overlap.

    All digests are taken in that one pass, each piece while it is in the processor's cache, and by one thread: those
    of the chunks cost as much again as that of the file does, and so do those of payloads. Several files are hashed at
    a time, the largest first, which is what keeps the processors busy.

    Attributes:
        path: What the file is called in errors.
        size: Length in bytes when it was opened.
        digests: SHA-256 of each payload that was met, by its offset and length, where that was asked for; complete
            after `finish`.
        chunk_digests: SHA-256 of each `CHUNK_BYTES` of a file that is longer, as far as it was read, where that was
            asked for; complete after `finish`.
        blake3_chunk_digests: BLAKE3 of each of the same chunks, where both were asked for.
        blake3: BLAKE3 of the file after `finish`, 64 lower-case hexadecimal digits, where that was asked for.
        refusal: What is wrong with the first bytes that did not have their checksum, after `finish`.
    """

    def __init__(
        self,
        fd: int,
        path: str,
        *,
        hashing: bool = False,
        payload_digests: bool = False,
        chunk_digests: bool = False,
        blake3: bool = False,
        peek_limit: int = 0,
        advance: Callable[[int], None] = lambda _: None,
        at_hand: Callable[[int, int], memoryview | None] = lambda _, __: None,
    ) -> None:
        """Take over `fd`, and close it when the context is left.

        Args:
            fd: Descriptor from `Root.open`.
            path: What to call the file in errors.
            hashing: Whether to hash every byte on the way to `finish`.
            payload_digests: Whether to take the digest of each payload that a parser meets, into `digests`.
            chunk_digests: With `hashing`, whether to take the digest of each chunk of a file that has several.
            blake3: With `hashing`, whether to take BLAKE3 beside every SHA-256, of the file and of its chunks.
            peek_limit: With `hashing`, most bytes to peek at, which are kept until they stream past.
            advance: Told how many bytes were hashed, after each piece; what it raises ends the reading.
            at_hand: With `hashing`, told an offset and a number of bytes, and lends as many of them or fewer, None if
                it has them not, until `advance` is told of the last. For who wrote the file and has some of it still.

        Raises:
            StagingError: the file's length could not be found.
            ConfigError: the package that computes BLAKE3 is not installed.
        """
        self.path = path
        self.digests: dict[tuple[int, int], str] = {}
        self.chunk_digests: list[bytes] = []
        self.blake3_chunk_digests: list[bytes] = []
        self.blake3: str | None = None
        self._payload_digests = payload_digests
        self._payloads: list[tuple[int, int]] = []
        self._checksums: dict[tuple[int, int], int] = {}
        self.refusal: FormatError | None = None
        self._peeked: list[tuple[int, bytes]] = []
        self._kept: dict[tuple[int, int], bytes] = {}
        self._peek_room = peek_limit
        self._peek_limit = peek_limit
        self._advance = advance
        self._at_hand = at_hand
        self._fd = fd
        try:
            self.size = os.fstat(fd).st_size
        except OSError as err:
            os.close(fd)
            raise StagingError(f"cannot read {escape(path)}: {reason(err)}") from err
        self._hash = hashlib.sha256() if hashing else None
        self._chunk_hash = hashlib.sha256() if hashing and chunk_digests and self.size > CHUNK_BYTES else None
        try:
            self._blake3 = new_blake3() if hashing and blake3 else None
            self._blake3_chunk = new_blake3() if self._blake3 is not None and self._chunk_hash is not None else None
        except ConfigError:
            os.close(fd)
            raise
        # The buffer holds the bytes [_start, _start + _filled) of the file: all were hashed, none is read again.
        self._buffer = memoryview(bytearray(min(self.size, WINDOW_BYTES + HASH_CHUNK_BYTES) if hashing else 0))
        self._start = 0
        self._filled = 0

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        os.close(self._fd)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes [offset, offset + nbytes), fewer only where the file ends.

        Raises:
            FileSetError: code "changed-while-read": the file is shorter than when it was opened.
            StagingError: the bytes could not be read, or lie further behind than a hashing source keeps.
        """
        return b"".join(map(bytes, self._pieces(offset, min(offset + nbytes, self.size))))

    def payload(self, offset: int, nbytes: int) -> None:
        """Take a payload's digest while it streams past, where that was asked for.

        Raises:
            FileSetError: code "changed-while-read": the file is shorter than when it was opened.
            StagingError: the bytes could not be read.
        """
        if self._payload_digests and self._hash is not None and not self._position:
            # A table that was peeked at names payloads in any order, and they may overlap: `finish` puts them in order.
            self._payloads.append((offset, nbytes))
        elif self._payload_digests:
            self.digests[offset, nbytes] = self.payload_sha256(offset, nbytes)

    def checksum(self, offset: int, nbytes: int, crc32: int) -> None:
        """Compare the CRC-32 of bytes ahead of the stream as they pass, if this source hashes; see `refusal`."""
        if self._hash is not None:
            self._checksums[offset, nbytes] = crc32

    def peek(self, offset: int, nbytes: int) -> bytes:
        """Return bytes ahead of the stream. A hashing source keeps them, and compares them when they stream past.

        Raises:
            FileSetError: code "changed-while-read": the file is shorter than when it was opened.
            LimitError: more bytes than `peek_limit` were asked for.
            StagingError: the bytes could not be read, or were passed already.
        """
        end = min(offset + nbytes, self.size)
        if self._hash is not None:
            if offset < self._position:
                raise StagingError(f"{escape(self.path)}: byte {offset} was passed, and is to be peeked at")
            kept = self._kept.get((offset, end))
            if kept is not None:
                return kept
            self._peek_room -= max(0, end - offset)
            if self._peek_room < 0:
                message = f"expected tables of at most {self._peek_limit:,} bytes in all, found more"
                raise LimitError(Finding("too-much-inline", message, offset=offset))
        pieces: list[bytes] = []
        position = offset
        while position < end:
            pieces.append(self._pread(position, min(end - position, HASH_CHUNK_BYTES)))
            position += len(pieces[-1])
        data = b"".join(pieces)
        if self._hash is not None and data:
            bisect.insort(self._peeked, (offset, data))
            self._kept[offset, end] = data
        return data

    def read_again(self, offset: int, nbytes: int) -> bytearray:
        """Return a payload that was hashed, read a second time and, where its digest is known, held against that.

        Raises:
            FileSetError: code "changed-while-read": other bytes are there now.
            StagingError: the bytes could not be read.
        """
        data = bytearray(nbytes)
        at = 0
        with memoryview(data) as view:
            while at < nbytes and (got := read_into(self._fd, view[at:], offset + at, path=self.path)):
                at += got
        if at < nbytes:
            raise self._changed("fewer")
        known = self.digests.get((offset, nbytes))
        if known is not None and hashlib.sha256(data).hexdigest() != known:
            raise self._changed("other bytes")
        return data

    def payload_sha256(self, offset: int, nbytes: int) -> str:
        """Return the SHA-256 of the bytes [offset, offset + nbytes), 64 lower-case hexadecimal digits.

        With hashing they enter the digest of the file in the same pass.

        Raises:
            FileSetError: code "changed-while-read": the file is shorter than when it was opened.
            StagingError: the bytes could not be read, end after the file does, or lie further behind than is kept.
        """
        if offset + nbytes > self.size:
            raise StagingError(f"{escape(self.path)} has {self.size} bytes, asked for up to {offset + nbytes}")
        digest = hashlib.sha256()
        for piece in self._pieces(offset, offset + nbytes):
            digest.update(piece)
        return digest.hexdigest()

    def finish(self) -> str:
        """Hash what is left of the file and return its SHA-256, 64 lower-case hexadecimal digits.

        Raises:
            FileSetError: code "changed-while-read": the file is shorter or longer than when it was opened.
            StagingError: the bytes could not be read, or the source does not hash.
        """
        if self._hash is None:
            raise StagingError(f"{escape(self.path)} was opened without hashing")
        self._kept.clear()
        self._hash_payloads()
        for _ in self._pieces(self.size, self.size):
            pass
        if read_into(self._fd, memoryview(bytearray(1)), self.size, path=self.path):
            raise self._changed("more")
        if self._chunk_hash is not None and self.size % CHUNK_BYTES:
            self._end_chunk(self._chunk_hash)
            self._chunk_hash = None
        if self._blake3 is not None:
            self.blake3 = self._blake3.hexdigest()
        return self._hash.hexdigest()

    def _hash_payloads(self) -> None:
        """Take the digests of payloads that were told of ahead of the stream, each once, overlapping ones together."""
        if (self._payloads or self._checksums) and self._position:
            raise StagingError(f"{escape(self.path)}: payloads were told of ahead, and then bytes were read")
        open_now: dict[tuple[int, int], list[Hasher]] = {}
        wanted = set(self._payloads)
        waiting = sorted(wanted | self._checksums.keys(), reverse=True)
        while waiting or open_now:
            if not open_now:
                for _ in self._pieces(waiting[-1][0], waiting[-1][0]):
                    pass
            while waiting and waiting[-1][0] <= self._position:
                where = waiting.pop()
                open_now[where] = [hashlib.sha256()] * (where in wanted) + [Crc32()] * (where in self._checksums)
            ends = [offset + nbytes for offset, nbytes in open_now]
            for piece in self._pieces(self._position, min([*ends, *(w[0] for w in waiting[-1:])])):
                for digests in open_now.values():
                    for digest in digests:
                        digest.update(memoryview(piece))
            for where in [payload for payload in open_now if sum(payload) <= self._position]:
                digests = open_now.pop(where)
                if where in wanted:
                    self.digests[where] = digests[0].hexdigest()
                if where in self._checksums and digests[-1].hexdigest() != f"{self._checksums[where]:08x}":
                    expected, found = f"{self._checksums[where]:08x}", digests[-1].hexdigest()
                    message = f"expected CRC-32 {expected} of {where[1]:,} bytes, as the archive has it, found {found}"
                    finding = Finding("zip-checksum", message, offset=where[0], hint="fetch the file again")
                    self.refusal = self.refusal or FormatError(finding)

    @property
    def _position(self) -> int:
        return self._start + self._filled

    def _pieces(self, offset: int, end: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes [offset, end) in order, each piece good until the next is asked for."""
        if offset < self._start:
            raise StagingError(f"{escape(self.path)}: byte {offset} was passed, bytes from {self._start} on are kept")
        if self._hash is None:
            while offset < end:
                piece = self._pread(offset, min(end - offset, HASH_CHUNK_BYTES))
                yield piece
                offset += len(piece)
            return
        while self._position < min(offset, self.size):
            self._hash_next(self._hash, min(offset, self.size), is_seen=False)
        kept = min(end, self._position)
        if offset < kept:
            yield self._buffer[offset - self._start : kept - self._start]
        while self._position < end:
            yield self._hash_next(self._hash, end, is_seen=True)

    def _pread(self, offset: int, nbytes: int) -> bytes:
        try:
            piece = os.pread(self._fd, nbytes, offset)
        except OSError as err:
            raise StagingError(f"cannot read {escape(self.path)} at byte {offset}: {reason(err)}") from err
        if not piece:
            raise self._changed("fewer")
        return piece

    def _hash_next(self, digest: hashlib._Hash, end: int, *, is_seen: bool) -> memoryview:
        """Hash the next piece, up to `end` at most, and return it; only where somebody is to see it is it good then."""
        position = self._position
        wanted = min(end - position, CHUNK_BYTES - position % CHUNK_BYTES)
        lent = self._at_hand(position, wanted)
        if lent is None:
            # Read and hashed while it is in the processor's cache.
            free = self._room(min(wanted, HASH_CHUNK_BYTES))
            piece = free[: read_into(self._fd, free, position, path=self.path)]
            if not piece:
                raise self._changed("fewer")
        elif is_seen or len(lent) < WINDOW_BYTES:
            # Copied: who lends it may use its memory again before the piece is looked at.
            piece = self._room(min(len(lent), HASH_CHUNK_BYTES))
            piece[:] = lent[: len(piece)]
        else:
            piece = lent
        digest.update(piece)
        if self._peeked:
            self._compare_peeked(piece, position)
        if self._chunk_hash is not None:
            self._chunk_hash.update(piece)
            if self._blake3_chunk is not None:
                self._blake3_chunk.update(piece)
            if (position + len(piece)) % CHUNK_BYTES == 0:
                self._end_chunk(self._chunk_hash)
                self._chunk_hash = hashlib.sha256()
        if self._blake3 is not None:
            self._blake3.update(piece)
        if piece is lent:
            self._buffer[:WINDOW_BYTES] = piece[-WINDOW_BYTES:]
            self._start, self._filled = position + len(piece) - WINDOW_BYTES, WINDOW_BYTES
        else:
            self._filled += len(piece)
        self._advance(len(piece))
        return piece

    def _room(self, nbytes: int) -> memoryview:
        """Return where in the buffer the next bytes go, with what has to be kept before them."""
        if self._filled + nbytes > len(self._buffer):
            self._buffer[:WINDOW_BYTES] = self._buffer[self._filled - WINDOW_BYTES : self._filled]
            self._start += self._filled - WINDOW_BYTES
            self._filled = WINDOW_BYTES
        return self._buffer[self._filled : self._filled + nbytes]

    def _end_chunk(self, digest: hashlib._Hash) -> None:
        self.chunk_digests.append(digest.digest())
        if self._blake3_chunk is not None:
            self.blake3_chunk_digests.append(self._blake3_chunk.digest())
            self._blake3_chunk = new_blake3()

    def _compare_peeked(self, piece: memoryview, position: int) -> None:
        """Hold what streams past against what was peeked at: a file must not be one thing to a parser, another here."""
        end = position + len(piece)
        for offset, data in self._peeked:
            if offset >= end:
                break
            start, stop = max(offset, position), min(offset + len(data), end)
            if start < stop and data[start - offset : stop - offset] != piece[start - position : stop - position]:
                raise self._changed("other bytes")
        passed = next((i for i, (at, data) in enumerate(self._peeked) if at + len(data) > end), len(self._peeked))
        del self._peeked[:passed]

    def _changed(self, found: str) -> FileSetError:
        message = f"expected {self.size} bytes as when it was opened, found {found}"
        hint = "wait until nothing writes to the directory, then run again"
        return FileSetError(Finding("changed-while-read", message, file=self.path, hint=hint))


def publish(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write `data` to `path` whole or not at all, and on disk when this returns.

    A file that is there is replaced; a directory, a link, a device or a FIFO is not. Whatever ends the writing,
    Ctrl-C included, no temporary file stays.

    Args:
        path: Where the file shall be; its directory must exist.
        data: The file's content.
        mode: Permission bits, less what the process's umask takes away.

    Raises:
        StagingError: the file could not be written, or `path` is something other than a regular file.
    """
    temporary = f".{secrets.token_hex(8)}.tmp"
    try:
        directory = os.open(path.parent, _DIRECTORY_FLAGS)
        try:
            with contextlib.suppress(FileNotFoundError):
                _require_regular(os.lstat(path.name, dir_fd=directory).st_mode)
            try:
                _write_new(temporary, data, mode, directory)
                os.replace(temporary, path.name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
                raise
            os.fsync(directory)
        finally:
            os.close(directory)
    except FileSetError as err:
        raise StagingError(f"cannot replace {escape(str(path))}: {err.findings[0].message}") from err
    except (OSError, ValueError) as err:
        raise StagingError(f"cannot write {escape(str(path))}: {reason(err)}") from err


def _write_new(name: str, data: bytes, mode: int, directory: int) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
