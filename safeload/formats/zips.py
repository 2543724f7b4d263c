"""Zip archives, so strictly that no two readers see different members in one file.

Readers differ on which of two headers they believe, on where an archive begins, and on which of two equal names wins.
Here the members must tile the file: local headers, data and descriptors from byte 0 to the central directory, that to
the end records, and those to the last byte. Nothing lies between, before or behind, and both headers of a member agree.

References are to APPNOTE.TXT 6.3.10, the specification of the format.
"""

from __future__ import annotations

import struct
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from safeload.errors import Finding, FormatError, LimitError, PolicyError, escape
from safeload.formats import Source
from safeload.policy import Policy

MAX_ENTRIES: Final = 100_000
"""Members of an archive. The largest checkpoints have some ten thousand tensors, and each is one member."""

MAX_NAME_BYTES: Final = 1024
"""Bytes of a member's name, the same bound as for a tensor's, which is a path of attributes of 100 bytes or so."""

STORED: Final = 0
DEFLATED: Final = 8

_LOCAL = struct.Struct("<4sHHHHHIIIHH")  # 4.3.7
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")  # 4.3.12
_DOS_DIRECTORY = 0x10  # 4.4.15, by MS-DOS: the low byte of the external attributes
_END = struct.Struct("<4sHHHHIIH")  # 4.3.16
_END64 = struct.Struct("<4sQHHIIQQQQ")  # 4.3.14
_LOCATOR = struct.Struct("<4sIQI")  # 4.3.15
_LOCATOR_SIGNATURE = b"PK\6\7"
_DESCRIPTOR = struct.Struct("<4sIII")  # 4.3.9
_DESCRIPTOR64 = struct.Struct("<4sIQQ")  # 4.3.9.2

_MAX16 = 0xFFFF
_MAX32 = 0xFFFFFFFF
"""Stand where the real number is in a zip64 field (4.4.1.4)."""

_FLAG_LEVEL = 0x0006  # how hard the writer tried to compress (4.4.4, bits 1 and 2); it changes nothing for a reader
_FLAG_DESCRIPTOR = 0x0008
_FLAG_UTF8 = 0x0800
_FLAGS_ENCRYPTED = 0x2041  # bits 0, 6 and 13

_ZIP64 = 0x0001
_INERT_EXTRAS: Final = frozenset({0x000A, 0x4246, 0x5455, 0x5855, 0x7855, 0x7875, 0xD935})
"""Fields that say nothing of name, place or content (4.5, 4.6): times (NTFS, Unix), owners, and the padding with which
PyTorch ("FB") and Android align data. Others do: 0x7075 is a second name, 0x9901 is encryption."""


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One member of an archive, as both of its headers describe it.

    Attributes:
        name: Its name; `/`-joined, relative, without `.` and `..`; that of a directory ends with `/`.
        offset: Where its data begin, in bytes of the file.
        nbytes_stored: Bytes that the data take in the file.
        nbytes: Bytes that they are when read; the same where they are stored as they are.
        method: 0 for stored, 8 for deflated (4.4.5).
        crc32: Checksum of what is read.
    """

    name: str
    offset: int
    nbytes_stored: int
    nbytes: int
    method: Literal[0, 8]
    crc32: int

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory, which has no data."""
        return self.name.endswith("/")


@dataclass(frozen=True, slots=True)
class ZipTable:
    """The members of an archive.

    Attributes:
        entries: In the order in which their data lie in the file.
    """

    entries: tuple[ZipEntry, ...]


def read_zip(source: Source, policy: Policy) -> ZipTable:
    """Return the members of an archive, each of whose bytes belongs to exactly one of them or to their headers.

    Nothing but headers is read. A member's checksum is held against its data by `entry_bytes`.

    Args:
        source: The file's bytes.
        policy: Its limits bound what is read.

    Raises:
        FormatError: The archive breaks the format, or two readers could see different members in it.
        LimitError: There are more members, longer names or more headers than are read.
        PolicyError: A member is encrypted or compressed by a method that is not read.
    """
    n_entries, directory, end = _read_end(source)
    if n_entries > MAX_ENTRIES:
        hint = "split the checkpoint into several files"
        _exceeds(f"a zip archive of {n_entries:,} members; at most {MAX_ENTRIES:,} are read", directory, hint)
    if end - directory > policy.limits.max_inline_bytes:
        message = f"headers of {end - directory:,} bytes; the policy allows {policy.limits.max_inline_bytes:,}"
        hint = policy.admits_by("[limits]", "`max_inline_bytes` with a larger number, if the file is honest")
        _exceeds(message, directory, hint)
    found = sorted(_central(_peek(source, directory, end - directory), directory, n_entries), key=lambda c: c.header)
    _check_names(found)
    entries = []
    at = 0
    for index, member in enumerate(found):
        following = found[index + 1].header if index + 1 < len(found) else directory
        entries.append(_local(source, member, start=at, end=following))
        at = following
    if at != directory:
        _fail("zip-gap", f"expected the central directory behind the last member, found {directory - at:,} bytes", at)
    return ZipTable(tuple(entries))


def entry_bytes(source: Source, entry: ZipEntry, policy: Policy) -> bytes:
    """Return a member's data as they are read, of exactly the length and the checksum that its headers state.

    No more is inflated than the declared length, so the ratio of a bomb does not matter, and no more is read than the
    policy allows to be held. A caller that reads many members bounds their sum.

    Args:
        source: The file's bytes.
        entry: One of the members that `read_zip` returned of it.
        policy: Its limits bound the length.

    Raises:
        FormatError: The data are not what the headers state.
        LimitError: They are longer than the policy allows, as they are stored or as they are read.
    """
    # What is stored may be longer than what comes of it, without end: an empty block inflates to nothing (RFC 1951).
    held = max(entry.nbytes, entry.nbytes_stored)
    if held > policy.limits.max_inline_bytes:
        message = f"a member of {held:,} bytes that must be held; the policy allows "
        hint = policy.admits_by("[limits]", "`max_inline_bytes` with a larger number, if the file is honest")
        _exceeds(f"{message}{policy.limits.max_inline_bytes:,}", entry.offset, hint)
    data = _peek(source, entry.offset, entry.nbytes_stored)
    if entry.method == DEFLATED:
        data = _inflate(data, entry)
    found = zlib.crc32(data)
    if found != entry.crc32:
        message = f"expected data with the checksum {entry.crc32:08x}, found {found:08x}"
        _fail("zip-checksum", f"{escape(entry.name)}: {message}", entry.offset, hint="fetch the file again")
    return data


def _inflate(data: bytes, entry: ZipEntry) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # One byte more than declared shows a longer stream; and 0 would mean "no bound" to zlib.
        inflated = inflater.decompress(data, entry.nbytes + 1)
    except zlib.error as err:
        message = f"{escape(entry.name)}: expected deflated data, found something else: {escape(str(err))}"
        raise FormatError(Finding("zip-bad-data", message, offset=entry.offset)) from err
    if len(inflated) != entry.nbytes or not inflater.eof or inflater.unused_data:
        found = "more" if len(inflated) > entry.nbytes else f"{len(inflated):,}"
        if len(inflated) == entry.nbytes:
            found = "something behind them" if inflater.eof else "a stream that is not ended"
        message = f"{escape(entry.name)}: expected data that inflate to {entry.nbytes:,} bytes, found {found}"
        _fail("zip-bad-data", message, entry.offset)
    return inflated


# ---------------------------------------------------------------- end records


def _read_end(source: Source) -> tuple[int, int, int]:
    """Return the number of members and where the central directory begins and ends."""
    at = source.size - _END.size
    if at < 0:
        _fail("zip-bad-end", f"expected a zip archive, found {source.size:,} bytes", 0)
    signature, disk, first_disk, n_here, n_all, length, start, n_comment = _END.unpack(_peek(source, at, _END.size))
    if signature != b"PK\5\6":
        _fail(
            "zip-bad-end",
            "expected the end record in the last 22 bytes, found something else",
            at,
            hint="the file is cut, something was appended to it, or it has a comment, where readers look elsewhere",
        )
    if n_comment:
        _fail("zip-bad-end", f"expected an end record without a comment, found one of {n_comment:,} bytes", at)
    if disk or first_disk or n_here != n_all:
        _fail("zip-bad-end", "expected an archive in one part, found one of several", at)
    has_zip64 = start + length != at
    if has_zip64:
        n_all, length, start, at = _read_end64(source, at, (n_all, length, start))
    elif n_all == _MAX16 or _MAX32 in {length, start}:
        _fail("zip-bad-end", "expected a zip64 end record, because the end record refers to it; found none", at)
    elif at >= _LOCATOR.size and _peek(source, at - _LOCATOR.size, 4) == _LOCATOR_SIGNATURE:
        # The last member's extra field ends here, and may hold anything. Python's zipfile and miniz look for a locator
        # in these bytes whatever the end record says, and would read the directory that it leads them to.
        message = "expected the central directory in front of the end record, found a zip64 locator in its last bytes"
        _fail("zip-bad-end", message, at - _LOCATOR.size, hint="readers differ on which directory they believe")
    return n_all, start, at


def _read_end64(source: Source, end: int, short: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Return number, length and start of the central directory, and where the zip64 end record begins."""
    locator_at = end - _LOCATOR.size
    at = locator_at - _END64.size
    if at < 0 or (found := _LOCATOR.unpack(_peek(source, locator_at, _LOCATOR.size)))[0] != _LOCATOR_SIGNATURE:
        start, length = short[2], short[1]
        message = f"expected the central directory to end at byte {end:,}, where the end record is, found {start:,} + "
        _fail("zip-bad-end", f"{message}{length:,}", end, hint="something lies before or between; write the file again")
    _, disk, stated, n_disks = found
    if disk or n_disks != 1 or stated != at:
        _fail("zip-bad-end", f"expected a zip64 end record at byte {at:,}, found one stated at {stated:,}", locator_at)
    fields = _END64.unpack(_peek(source, at, _END64.size))
    signature, rest, _, _, disk, first_disk, n_here, n_all, length, start = fields
    # 4.3.14.1: the stated size leaves out the first 12 bytes; more than 44 would be an extensible data sector.
    if signature != b"PK\6\6" or rest != _END64.size - 12 or disk or first_disk or n_here != n_all:
        _fail("zip-bad-end", "expected a plain zip64 end record of one part, found something else", at)
    for one, other, maximum in zip(short, (n_all, length, start), (_MAX16, _MAX32, _MAX32), strict=True):
        if one not in {other, maximum}:
            _fail("zip-bad-end", f"the end record says {one:,} where the zip64 end record says {other:,}", end)
    if start + length != at:
        message = f"expected the central directory to end at byte {at:,}, found {start:,} + {length:,}"
        _fail("zip-bad-end", message, at)
    return n_all, length, start, at


# ---------------------------------------------------------------- members


@dataclass(frozen=True, slots=True)
class _Central:
    """What the central directory says of a member; `at` is where it says so, `header` where its local header is."""

    at: int
    raw_name: bytes
    name: str
    version: int
    flags: int
    method: Literal[0, 8]
    time: int
    date: int
    crc32: int
    nbytes_stored: int
    nbytes: int
    header: int


def _central(data: bytes, base: int, n_entries: int) -> Iterator[_Central]:
    """Yield the members that the central directory lists; `base` is where it begins."""
    at = 0
    for _ in range(n_entries):
        here = base + at
        if at + _CENTRAL.size > len(data):
            _fail("zip-bad-entry", f"expected {n_entries:,} members in the central directory, found fewer", here)
        fields = _CENTRAL.unpack_from(data, at)
        signature, _, version, flags, method, time, date, crc32, stored, nbytes = fields[:10]
        n_name, n_extra, n_comment, disk, _, attributes, header = fields[10:]
        end = at + _CENTRAL.size + n_name + n_extra
        if signature != b"PK\1\2" or end > len(data):
            _fail("zip-bad-entry", "expected a member in the central directory, found something else", here)
        if n_comment or disk:
            _fail("zip-bad-entry", "expected a member without comment and in this part, found another", here)
        raw_name = data[at + _CENTRAL.size : at + _CENTRAL.size + n_name]
        name = _name(raw_name, flags, here)
        method = _method(name, flags, method, here)
        zip64 = _extras(data[at + _CENTRAL.size + n_name : end], here).get(_ZIP64)
        # 4.5.3: the field holds exactly the numbers that are saturated in the header, in this order.
        sizes = [nbytes, stored, header]
        saturated = [index for index, size in enumerate(sizes) if size == _MAX32]
        if len(zip64 or b"") != 8 * len(saturated) or (zip64 is not None and not saturated):
            message = f"expected a zip64 field for {len(saturated)} number(s), found {len(zip64 or b'')} bytes"
            _fail("zip-bad-entry", message, here)
        for index, size in zip(saturated, struct.unpack(f"<{len(saturated)}Q", zip64 or b""), strict=True):
            sizes[index] = size
        nbytes, stored, header = sizes
        if method == STORED and stored != nbytes:
            message = f"{escape(name)}: expected as many bytes stored as are read, found {stored:,} and {nbytes:,}"
            _fail("zip-bad-entry", message, here)
        if attributes & _DOS_DIRECTORY and not name.endswith("/"):
            # Some readers take it for a directory whatever its name is, and hand out memory that nobody wrote to.
            _fail("zip-bad-entry", f"{escape(name)}: expected a file, found the attributes of a directory", here)
        if name.endswith("/") and nbytes:
            _fail("zip-bad-entry", f"{escape(name)}: expected a directory without data, found {nbytes:,} bytes", here)
        yield _Central(here, raw_name, name, version, flags, method, time, date, crc32, stored, nbytes, header)
        at = end
    if at != len(data):
        message = f"expected {n_entries:,} members in the central directory, found {len(data) - at:,} bytes more"
        _fail("zip-bad-entry", message, base + at)


def _name(raw: bytes, flags: int, at: int) -> str:
    if len(raw) > MAX_NAME_BYTES:
        _exceeds(f"a name of {len(raw):,} bytes; at most {MAX_NAME_BYTES:,} are read", at, "use shorter names")
    if not raw.isascii() and not flags & _FLAG_UTF8:
        # Appendix D: without the flag the name is in code page 437, or in whatever the writer's system used.
        _fail("zip-bad-name", "expected a name in ASCII, or flagged as UTF-8, found neither", at)
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError as err:
        raise FormatError(Finding("zip-bad-name", "expected a name in UTF-8, found other bytes", offset=at)) from err
    parts = name.removesuffix("/").split("/")
    if "\\" in name or "\0" in name or any(part in {"", ".", ".."} for part in parts):
        message = f"expected a relative path of plain parts, found '{escape(name, limit=100)}'"
        _fail("zip-bad-name", message, at, hint="a name must not lead out of the archive, nor be spelled in two ways")
    return name


def _method(name: str, flags: int, method: int, at: int) -> Literal[0, 8]:
    if flags & _FLAGS_ENCRYPTED:
        message = f"{escape(name)}: expected plain data, found encrypted ones"
        raise PolicyError(Finding("zip-encrypted", message, offset=at, hint="what cannot be read cannot be checked"))
    if method not in {STORED, DEFLATED}:
        message = f"{escape(name)}: expected stored (0) or deflated (8) data, found method {method}"
        raise PolicyError(Finding("zip-method", message, offset=at, hint="pack the archive again without compression"))
    allowed = _FLAG_DESCRIPTOR | _FLAG_UTF8 | (_FLAG_LEVEL if method == DEFLATED else 0)
    if flags & ~allowed:
        _fail("zip-bad-entry", f"{escape(name)}: expected no other flags than {allowed:#06x}, found {flags:#06x}", at)
    return DEFLATED if method == DEFLATED else STORED


def _extras(data: bytes, at: int) -> dict[int, bytes]:
    """Return the extra fields by their number (4.5.1), each of which may stand once."""
    found: dict[int, bytes] = {}
    position = 0
    while position < len(data):
        if position + 4 > len(data):
            _fail("zip-bad-entry", f"expected a whole extra field, found {len(data) - position} byte(s)", at)
        number, length = struct.unpack_from("<HH", data, position)
        position += 4
        if position + length > len(data):
            _fail("zip-bad-entry", f"expected an extra field of {length:,} bytes, found fewer", at)
        if number != _ZIP64 and number not in _INERT_EXTRAS:
            message = f"expected extra fields for sizes, times and padding, found {number:#06x}"
            _fail("zip-bad-entry", message, at, hint="such a field may name or encode the member in another way")
        if number in found:
            _fail("zip-bad-entry", f"expected each extra field once, found {number:#06x} twice", at)
        found[number] = data[position : position + length]
        position += length
    return found


def _check_names(found: Sequence[_Central]) -> None:
    """Refuse names that one reader or another takes for the same."""
    seen: dict[str, str] = {}
    for member in found:
        # PyTorch's reader looks names up without regard to case, and some file systems unpack so.
        key = unicodedata.normalize("NFC", member.name).casefold().removesuffix("/")
        if key in seen:
            message = f"expected each name once, found '{escape(member.name)}' beside '{escape(seen[key])}'"
            _fail("zip-duplicate-name", message, member.at, hint="readers differ on which of the two they return")
        seen[key] = member.name


def _local(source: Source, member: _Central, *, start: int, end: int) -> ZipEntry:
    """Hold a member's local header and its descriptor against the central directory; it must fill [start, end)."""
    if member.header != start:
        message = f"expected a member at byte {start:,}, found the next at {member.header:,}"
        _fail("zip-gap", message, min(start, member.header), hint="nothing may lie before or between members")
    at = member.header
    shown = escape(member.name)
    head = _peek(source, at, _LOCAL.size)
    fields = _LOCAL.unpack(head)
    signature, version, flags, method, time, date, crc32, stored, nbytes, n_name, n_extra = fields
    if signature != b"PK\3\4":
        _fail("zip-headers-disagree", f"{shown}: expected its local header, found something else", at)
    offset = at + _LOCAL.size + n_name + n_extra
    rest = _peek(source, at + _LOCAL.size, n_name + n_extra)
    if rest[:n_name] != member.raw_name:
        message = f"expected the name '{shown}' in both headers, found '{escape(rest[:n_name].decode('latin-1'))}'"
        _fail("zip-headers-disagree", message, at, hint="readers differ on which of the two they believe")
    if (version, flags, method, time, date) != (
        member.version, member.flags, member.method, member.time, member.date,
    ):  # fmt: skip
        message = f"{shown}: expected the same version, flags, method and time in both headers, found others"
        _fail("zip-headers-disagree", message, at)
    zip64 = _extras(rest[n_name:], at).get(_ZIP64)
    if not _sizes_agree(member, (crc32, stored, nbytes), zip64):
        message = f"{shown}: expected the same checksum and sizes in both headers, found others"
        _fail("zip-headers-disagree", message, at)
    data_end = offset + member.nbytes_stored
    if flags & _FLAG_DESCRIPTOR:
        layout = _DESCRIPTOR if zip64 is None else _DESCRIPTOR64
        descriptor = _peek(source, data_end, layout.size)
        expected = b"PK\7\10", member.crc32, member.nbytes_stored, member.nbytes
        if layout.unpack(descriptor) != expected:
            message = f"{shown}: expected a descriptor that repeats its checksum and sizes, found something else"
            _fail("zip-headers-disagree", message, data_end)
        data_end += layout.size
    if data_end != end:
        message = f"{shown}: expected it to end at byte {end:,}, found {data_end:,}"
        _fail("zip-gap", message, min(data_end, end), hint="members overlap, or something lies between them")
    return ZipEntry(member.name, offset, member.nbytes_stored, member.nbytes, member.method, member.crc32)


def _sizes_agree(member: _Central, local: tuple[int, int, int], zip64: bytes | None) -> bool:
    """Whether a local header states the checksum and sizes of the central one, as far as it states any."""
    crc32, stored, nbytes = local
    true = member.crc32, member.nbytes_stored, member.nbytes
    if zip64 is not None and len(zip64) not in {8, 16, 24}:
        return False
    numbers = () if zip64 is None else struct.unpack(f"<{len(zip64) // 8}Q", zip64)
    if member.flags & _FLAG_DESCRIPTOR:
        # 4.4.4, bit 3: zeros here, and the numbers behind the data. Beyond 4 GiB PyTorch's writer has a zip64 field
        # here all the same, with the length, a zero, and its own offset, or only that.
        if len(numbers) in {1, 3}:
            if numbers[-1] != member.header:
                return False
            numbers = numbers[:-1]
        are_zero_or_true = all(n in {0, size} for n, size in zip(numbers, (true[2], true[1]), strict=False))
        if numbers and (stored, nbytes) == (_MAX32, _MAX32):
            return are_zero_or_true and crc32 in {0, true[0]}
        return are_zero_or_true and local in {(0, 0, 0), true}
    if zip64 is not None:
        # 4.5.3: in a local header both sizes are there. Python before 3.11.4 states them in the header as well.
        return (crc32, *numbers) == (true[0], true[2], true[1]) and (stored, nbytes) in {(_MAX32, _MAX32), true[1:]}
    return local == true and _MAX32 not in {stored, nbytes}


def _peek(source: Source, offset: int, nbytes: int) -> bytes:
    """Return exactly these bytes of the file."""
    if offset < 0 or nbytes > source.size - offset:
        message = f"expected {nbytes:,} bytes at byte {offset:,}, found the file's end"
        _fail("truncated", message, min(max(offset, 0), source.size))
    return source.peek(offset, nbytes)


def _fail(code: str, message: str, offset: int, *, hint: str | None = None) -> NoReturn:
    raise FormatError(Finding(code, message, offset=offset, hint=hint))


def _exceeds(message: str, offset: int, hint: str) -> NoReturn:
    raise LimitError(Finding("limit-exceeded", message, offset=offset, hint=hint))
