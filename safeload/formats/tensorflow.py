"""TensorFlow's checkpoint bundles: `P.index`, a sorted table of protocol buffers, and `P.data-0000i-of-0000n`.

The table (tensorflow/core/lib/io/table, that of LevelDB) and the messages (tensor_bundle.proto, tensor_shape.proto,
versions.proto) are read by a reader of our own that knows these messages and nothing else. The index is checked whole:
each block's CRC32C, the order of its keys, the places at which a search may begin, and that its blocks lie one behind
the other. A data file has no structure but what the index says of it: each of its bytes belongs to exactly one entry,
or is a zero that pads one.

Not checked is the CRC32C that an entry has of its payload. It finds accidents and no intent, and Python without help
takes minutes for what SHA-256 does in one second; a manifest's digests stand for the same bytes, and more.
"""

from __future__ import annotations

import math
import re
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from safeload.errors import Finding, FormatError, LimitError, PolicyError, RejectedError, escape
from safeload.formats import Parsed, Siblings, Source
from safeload.formats.pickles.constructors import MAX_DIMENSIONS
from safeload.formats.shapes import check_name
from safeload.policy import Policy
from safeload.tensors import DTYPE_ITEMSIZE, ML_DTYPES_ITEMSIZE, DType, Extent, ShardIndex, TensorSpec

MAX_INDEX_BYTES: Final = 16 * 1024 * 1024
"""Longest index that is read, in bytes. One entry takes about 60, so that this is a quarter of a million tensors; the
CRC32C of as much takes Python two seconds."""

MAX_PADDING_BYTES: Final = 4095
"""Most zeros between two payloads. The writer pads to `data_alignment`, which is 1 if nobody asks for more, and
nothing is aligned to more than a page of memory."""

TABLE_MAGIC: Final = (0xDB4775248B80FB57).to_bytes(8, "little")
"""Last bytes of the table (table/format.h, kTableMagicNumber)."""

OBJECT_GRAPH_KEY: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""The one string that is let by: `tf.train.Checkpoint` (TensorFlow 2, Keras) writes the names of its Python objects
under this key. It is no tensor: it is measured, and neither decoded nor handed out."""

_FOOTER_BYTES: Final = 48  # two handles padded to 20 bytes each, and the magic number
_TRAILER_BYTES: Final = 5  # compression type, and CRC32C of the block and the type
_MAX_KEY_BYTES: Final = 4096  # of a name of as many characters as are read, each of four bytes at most
_BUNDLE_VERSION: Final = 1  # tensor_bundle.h, kTensorBundleVersion: the only one there has been
_CRC_MASK_DELTA: Final = 0xA282EAD8

_COMPRESSIONS: Final = {1: "Snappy", 2: "zlib"}

# tensorflow/core/framework/types.proto. Quantized types are not here: their numbers mean nothing without a range that
# lies elsewhere; nor are those narrower than a byte, of which no two versions agree how they are stored.
_DTYPES: Final = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    8: "complex64",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
    26: "float8_e4m3fnuz",
    27: "float8_e4m3b11fnuz",
    28: "float8_e5m2fnuz",
}
_STRING: Final = 7
_OTHER_DTYPES: Final = {
    _STRING: "strings",
    11: "qint8, a quantized type",
    12: "quint8, a quantized type",
    13: "qint32, a quantized type",
    15: "qint16, a quantized type",
    16: "quint16, a quantized type",
    20: "resources",
    21: "variants",
    29: "int4",
    30: "uint4",
}

_DATA_NAME: Final = re.compile(r"(?P<prefix>.+)\.data-(?P<shard>[0-9]{5})-of-(?P<total>[0-9]{5})", re.DOTALL)

_SAVE_AGAIN: Final = "save it again from TensorFlow, or convert it there to safetensors"


def data_file(prefix: str, shard: int, n_shards: int) -> str:
    """Return the name of a bundle's data file: `model.ckpt.data-00000-of-00001`."""
    return f"{prefix}.data-{shard:05d}-of-{n_shards:05d}"


def index_file_of(name: str) -> str | None:
    """Return the name of the index that a data file of this name belongs to; None for other names."""
    named = _DATA_NAME.fullmatch(name)
    return None if named is None else f"{named['prefix']}.index"


def parse_bundle_index(source: Source, policy: Policy, name: str = "") -> Parsed:
    """Say what the index of a bundle says: which tensor lies in which data file.

    Args:
        source: The bytes of `P.index`.
        policy: Its limits bound how much is read.
        name: The file's name, which names its data files too; without it the result has no `index`.
    """
    try:
        bundle = _read_bundle(_whole(source, policy), policy)
        for shard in bundle.places:
            bundle.check_places(shard)
        if name and not name.endswith(".index"):
            # Nobody looks for an index there, nor could its data files be found by it.
            message = f"expected a name that ends in .index, found {escape(name[-40:])!r}"
            raise _refuse("bundle-file-name", message, None, "give it back the name that TensorFlow wrote it under")
    except RejectedError as err:
        return Parsed(refusal=err)
    if not name:
        return Parsed()
    prefix = name.removesuffix(".index")
    files = {entry.name: data_file(prefix, entry.shard, bundle.n_shards) for entry in bundle.entries if entry.dtype}
    return Parsed(index=ShardIndex(files))


def parse_bundle_data(source: Source, name: str, policy: Policy, siblings: Siblings) -> Parsed:
    """Say what lies in a data file of a bundle, by its index, which is read whole from beside it.

    Args:
        source: The file's bytes.
        name: Its name: `P.data-0000i-of-0000n`.
        policy: Its limits bound how much is read.
        siblings: Where `P.index` is.
    """
    try:
        return _parse_data(source, name, policy, siblings)
    except RejectedError as err:
        return Parsed(refusal=err)


def _parse_data(source: Source, name: str, policy: Policy, siblings: Siblings) -> Parsed:
    named = _DATA_NAME.fullmatch(name)
    if named is None:
        message = f"expected a name that ends like .data-00000-of-00001, found {name[-40:]!r}"
        raise _refuse("bundle-file-name", message, None, "give it back the name that TensorFlow wrote it under")
    index_name = f"{named['prefix']}.index"
    data = siblings.read(index_name, _index_limit(policy))
    if data is None:
        message = f"expected the index {escape(index_name)} beside it, found none"
        raise _refuse("bundle-index-missing", message, None, "without it nothing says what is in this file; fetch it")
    try:
        bundle = _read_bundle(data, policy)
        shard = int(named["shard"])
        entries = bundle.check_places(shard)
    except RejectedError as err:
        # The places are those of another file.
        findings = (Finding(f.code, f"its index: {f.message}", hint=f.hint) for f in err.findings)
        raise type(err)(*findings) from err
    if bundle.n_shards != int(named["total"]) or shard >= bundle.n_shards:
        message = f"expected the name of one of {bundle.n_shards} data files, found number {shard} of {named['total']}"
        raise _refuse("bundle-file-name", message, None, "give it back the name that TensorFlow wrote it under")
    specs: list[TensorSpec] = []
    position = 0
    # A source that hashes takes payloads as they stream past once it was read from, and what is read between them as
    # well; it would put them off until the end if the first thing that it heard of were a payload.
    source.read(0, 1)
    for entry in entries:
        if entry.offset + entry.nbytes > source.size:
            message = f"{escape(entry.name)!r} ends at byte {entry.offset + entry.nbytes} of a file of {source.size}"
            raise _refuse("bundle-extent", message, entry.offset, "the file is cut short, or its index is another's")
        _require_padding(source, position, entry.offset)
        if entry.dtype is None:
            _require_string(source, entry)
        else:
            specs.append(_spec(entry, entry.dtype))
            source.payload(entry.offset, entry.nbytes)
        position = entry.offset + entry.nbytes
    _require_padding(source, position, source.size)
    tensors = tuple(specs)
    return Parsed({spec.name: spec for spec in tensors}, tensors)


def _spec(entry: _Entry, dtype: DType) -> TensorSpec:
    return TensorSpec(entry.name, dtype, entry.shape, "C", Extent(entry.offset, entry.nbytes))


def _require_padding(source: Source, start: int, end: int) -> None:
    """Refuse bytes that belong to no tensor, so that nothing can hide between them."""
    if start == end:
        return
    found = source.read(start, min(end - start, MAX_PADDING_BYTES + 1))
    if end - start > MAX_PADDING_BYTES or found.strip(b"\0"):
        kind = "more" if not found.strip(b"\0") else "other bytes"
        message = f"expected at most {MAX_PADDING_BYTES} zeros between payloads and behind the last, found {kind}"
        raise _refuse("bundle-unlisted-bytes", message, start, _SAVE_AGAIN)


def _require_string(source: Source, entry: _Entry) -> None:
    """Check the frame of a single string: its length, a checksum of that, and as many bytes as it says."""
    head = source.read(entry.offset, min(entry.nbytes, 10))
    try:
        length, at = _varint(head, 0, len(head))
    except FormatError:
        length, at = -1, 0
    if at + 4 + length != entry.nbytes:
        message = f"expected one string of {entry.nbytes} bytes with its length, found another length"
        raise _refuse("bundle-extent", message, entry.offset, _SAVE_AGAIN)


# ---------------------------------------------------------------- the bundle


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the index says of one tensor: its name, and where it lies. `dtype` is None for the object graph."""

    name: str
    dtype: DType | None
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True)
class _Bundle:
    """What an index says; `places` has the entries of each shard that has any, by their place in it."""

    n_shards: int
    entries: tuple[_Entry, ...]
    places: Mapping[int, Sequence[_Entry]]

    def check_places(self, shard: int) -> Sequence[_Entry]:
        """Return a shard's entries by their place in it, none of which reaches into the next."""
        placed = self.places.get(shard, ())
        for first, second in pairwise(placed):
            if first.offset + first.nbytes > second.offset:
                message = f"expected payloads one behind the other, found {escape(second.name)!r} in the one before it"
                raise _refuse("bundle-overlap", message, second.at, _SAVE_AGAIN)
        return placed


def _index_limit(policy: Policy) -> int:
    return min(MAX_INDEX_BYTES, policy.limits.max_inline_bytes)


def _whole(source: Source, policy: Policy) -> bytes:
    limit = _index_limit(policy)
    if source.size > limit:
        message = f"an index of {source.size:,} bytes; at most {limit:,} are read"
        hint = policy.admits_by("[limits]", f"`max_inline_bytes` with a larger number, up to {MAX_INDEX_BYTES:,}")
        raise LimitError(Finding("limit-exceeded", message, hint=hint))
    return source.read(0, source.size)


def _read_bundle(data: bytes, policy: Policy) -> _Bundle:
    """Return what an index says.

    Raises:
        FormatError: It breaks its format.
        PolicyError: It holds what is no tensor, or is compressed.
        LimitError: It has too many entries, or keys that are too long in all.
    """
    limits = policy.limits
    bundle = _REMEMBERED.outcome(data, limits.max_values, limits.max_inline_bytes)
    if isinstance(bundle, RejectedError):
        # Of a fresh one, as what was raised before keeps its traceback.
        raise type(bundle)(*bundle.findings)
    return bundle


MAX_REMEMBERED_ENTRIES: Final = 250_000
"""Entries of all indexes that are remembered, at about 400 bytes each: those of one bundle of the longest index with
names of ordinary length, or of 25 bundles of 10,000 tensors."""

_LEAST_WEIGHT: Final = 100  # entries that an index counts for at least, so that small ones have a bound as well
_ENTRY_BYTES: Final = 60  # of an index, for each of which it counts for an entry: it is held with what it says


class _Reading:
    """What one index says under some limits, once somebody has read it."""

    def __init__(self, nbytes: int) -> None:
        self.lock = threading.Lock()
        self.outcome: _Bundle | RejectedError | None = None
        self._nbytes = nbytes

    @property
    def weight(self) -> int:
        """How many entries it counts for."""
        n_entries = len(self.outcome.entries) if isinstance(self.outcome, _Bundle) else 0
        return max(_LEAST_WEIGHT, n_entries, self._nbytes // _ENTRY_BYTES)


class _Remembered:
    """What the last indexes said: every file of a bundle asks for the same one, which is read once for all of them.

    Whoever begins the files of one bundle one after another has each index read once, however many bundles there are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: dict[tuple[bytes, int, int], _Reading] = {}  # the one asked for last is the last

    def outcome(self, data: bytes, max_entries: int, max_key_bytes: int) -> _Bundle | RejectedError:
        """Return what an index says under these limits, or why it is refused."""
        # Bytes keep their hash once it was asked for: it costs nothing where the next file hands over the same object.
        key = data, max_entries, max_key_bytes
        with self._lock:
            reading = self._readings.pop(key, None) or _Reading(len(data))
            self._readings[key] = reading
        # Threads that come to shards of one bundle at the same time wait here for the first of them, and have what it
        # read even if it is forgotten by then.
        with reading.lock:
            found = reading.outcome
            if found is None:
                try:
                    found = _bundle(data, max_entries, max_key_bytes)
                except RejectedError as err:
                    found = type(err)(*err.findings)
                reading.outcome = found
        self._forget()
        return found

    def _forget(self) -> None:
        """Forget those that were not asked for the longest, and never the last one."""
        with self._lock:
            excess = sum(reading.weight for reading in self._readings.values()) - MAX_REMEMBERED_ENTRIES
            for key in list(self._readings)[:-1]:
                if excess <= 0:
                    return
                excess -= self._readings.pop(key).weight


_REMEMBERED: Final = _Remembered()


def _bundle(data: bytes, max_entries: int, max_key_bytes: int) -> _Bundle:
    n_shards, big_endian = 0, False
    entries: list[_Entry] = []
    room = max_key_bytes
    for number, row in enumerate(_rows(data)):
        room -= len(row.key)
        if number > max_entries or room < 0:
            name, bound = ("max_values", max_entries) if room >= 0 else ("max_inline_bytes", max_key_bytes)
            message = f"an index of more entries or longer names than {bound:,} (`{name}`) allows"
            raise LimitError(Finding("limit-exceeded", message, offset=row.at, hint=f"the limit is `{name}`"))
        if number == 0:
            n_shards, big_endian = _header(row)
        else:
            entries.append(_entry(row, n_shards, big_endian=big_endian))
    if not n_shards:
        raise _refuse("bad-bundle", "expected an entry with the bundle's header, found an empty table", 0)
    # Divided once: a bundle may claim 99,999 shards, each of which would go through all entries otherwise.
    places: dict[int, list[_Entry]] = {}
    # An empty tensor stands before the one that begins at the same byte.
    for entry in sorted(entries, key=lambda entry: (entry.shard, entry.offset, entry.nbytes)):
        places.setdefault(entry.shard, []).append(entry)
    return _Bundle(n_shards, tuple(entries), places)


def _header(row: _Row) -> tuple[int, bool]:
    """Return how many data files a bundle has, and whether its numbers are big-endian."""
    if row.key:
        raise _refuse("bad-bundle", "expected the bundle's header under the empty key, found another key", row.at)
    header = _Message(row.data, row.start, row.end, {1: "varint", 2: "varint", 3: "message"})
    n_shards, endianness = header.number(1), header.number(2)
    if not 1 <= n_shards <= 99_999 or endianness > 1:  # five digits of a name; LITTLE, BIG
        raise _refuse("bad-bundle", f"expected 1 to 99999 data files, found {n_shards}", row.start)
    version = _Message(row.data, *header.part(3), {1: "varint", 2: "varint", 3: "varint"})
    if version.number(1) > _BUNDLE_VERSION or version.number(2) > _BUNDLE_VERSION or version.has(3):
        message = f"expected a bundle of version {_BUNDLE_VERSION}, found one of {version.number(1)}"
        raise PolicyError(Finding("format-not-supported", message, offset=row.start, hint=_SAVE_AGAIN))
    return n_shards, endianness == 1


def _entry(row: _Row, n_shards: int, *, big_endian: bool) -> _Entry:
    if row.key.startswith(b"\0"):
        # saved_tensor_slice_util.cc: the key of a piece begins with an ordered 0, and no variable's name does.
        raise PolicyError(
            Finding(
                "bundle-sliced",
                "expected whole tensors, found a piece of a partitioned variable",
                offset=row.at,
                hint="save it again from TensorFlow without a partitioner",
            )
        )
    try:
        name = row.key.decode("utf-8")
    except UnicodeDecodeError as err:
        raise _refuse("bad-bundle", "expected a tensor's name in UTF-8, found other bytes", row.at) from err
    check_name(name, offset=row.at)
    entry = _Message(row.data, row.start, row.end, _ENTRY_FIELDS)
    if entry.has(7):
        raise PolicyError(
            Finding(
                "bundle-sliced",
                f"expected whole tensors, found {escape(name)!r} in pieces (a partitioned variable)",
                offset=row.start,
                hint="save it again from TensorFlow without a partitioner",
            )
        )
    shape = _shape(row.data, *entry.part(2))
    shard, offset, nbytes = entry.number(3), entry.number(4), entry.number(5)
    if shard >= n_shards or offset + nbytes >= 1 << 63:
        message = f"{escape(name)!r}: expected a place in one of {n_shards} data files, found file {shard}"
        raise _refuse("bundle-extent", message, row.start)
    dtype = _dtype(entry.number(1), name, shape, row, big_endian=big_endian)
    if dtype is not None and _n_bytes(shape, dtype) != nbytes:
        message = f"{escape(name)!r}: expected {_n_bytes(shape, dtype)} bytes by type and shape, found {nbytes}"
        raise _refuse("bundle-extent", message, row.start)
    return _Entry(name, dtype, shape, shard, offset, nbytes, row.start)


def _dtype(code: int, name: str, shape: tuple[int, ...], row: _Row, *, big_endian: bool) -> DType | None:
    known = _DTYPES.get(code)
    if known is None:
        if code == _STRING and name == OBJECT_GRAPH_KEY and not shape:
            return None
        noun = _OTHER_DTYPES.get(code, f"the unknown type {code}")
        message = f"{escape(name)!r}: expected a tensor of plain numbers, found {noun}"
        hint = "save the weights alone, without what is no number"
        raise PolicyError(Finding("bundle-dtype", message, offset=row.start, hint=hint))
    if big_endian and known in ML_DTYPES_ITEMSIZE and DTYPE_ITEMSIZE[known] > 1:
        # ml_dtypes has no big-endian types, so nobody could say what the values are.
        message = f"{escape(name)!r}: expected little-endian {known}, found big-endian"
        raise PolicyError(Finding("bundle-dtype", message, offset=row.start, hint=_SAVE_AGAIN))
    return DType(known, big_endian and DTYPE_ITEMSIZE[known] > 1)


def _shape(data: bytes, start: int, end: int) -> tuple[int, ...]:
    message = _Message(data, start, end, _SHAPE_FIELDS)
    if message.number(3):
        raise _refuse("bad-bundle", "expected a tensor's shape, found one of unknown rank", start)
    dimensions = message.parts(2)
    if len(dimensions) > MAX_DIMENSIONS:
        raise _refuse("bad-bundle", f"a shape has at most {MAX_DIMENSIONS} dimensions, found more", start)
    lengths = tuple(_Message(data, *part, _LENGTH_FIELDS).number(1) for part in dimensions)
    if math.prod(filter(None, lengths)) >= 1 << 59:
        # numpy counts bytes in 63 bits, of elements of up to 16 bytes, and leaves dimensions of zero out. A negative
        # length is a varint of 2**63 and more.
        raise _refuse("bad-bundle", "expected a shape of fewer than 2**59 elements, zeros aside, found more", start)
    return lengths


def _n_bytes(shape: tuple[int, ...], dtype: DType) -> int:
    return math.prod(shape) * dtype.itemsize


# ---------------------------------------------------------------- protocol buffers


_Kind = Literal["varint", "fixed32", "bytes", "message", "messages"]
_WIRE_TYPES: Final = {"varint": 0, "fixed32": 5, "bytes": 2, "message": 2, "messages": 2}

_ENTRY_FIELDS: Final[Mapping[int, _Kind]] = {
    1: "varint",  # dtype
    2: "message",  # shape
    3: "varint",  # shard_id
    4: "varint",  # offset
    5: "varint",  # size
    6: "fixed32",  # crc32c
    7: "messages",  # slices
}
_SHAPE_FIELDS: Final[Mapping[int, _Kind]] = {2: "messages", 3: "varint"}  # dim, unknown_rank
_LENGTH_FIELDS: Final[Mapping[int, _Kind]] = {1: "varint", 2: "bytes"}  # size, name


class _Message:
    """The fields of one message, of which every one is known, and there once unless it may repeat.

    Other readers take the last of several, and skip what they do not know; here there is nothing to disagree about.
    """

    def __init__(self, data: bytes, start: int, end: int, kinds: Mapping[int, _Kind]) -> None:
        self._start = start
        self._numbers: dict[int, int] = {}
        self._parts: dict[int, list[tuple[int, int]]] = {}
        position = start
        while position < end:
            at = position
            tag, position = _varint(data, position, end)
            kind = kinds.get(tag >> 3)
            if kind is None or _WIRE_TYPES[kind] != tag & 7:
                raise _refuse("bad-protobuf", f"expected fields {sorted(kinds)}, found the tag {tag}", at)
            if kind != "messages" and (tag >> 3 in self._numbers or tag >> 3 in self._parts):
                raise _refuse("bad-protobuf", f"expected field {tag >> 3} once, found it again", at)
            if kind == "varint":
                self._numbers[tag >> 3], position = _varint(data, position, end)
                continue
            length = 4
            if kind != "fixed32":
                length, position = _varint(data, position, end)
            if length > end - position:
                raise _refuse("bad-protobuf", f"field {tag >> 3} ends behind its message", at)
            parts = self._parts.setdefault(tag >> 3, [])
            if len(parts) <= MAX_DIMENSIONS:
                # A part may take two bytes. No message has more than this, and its reader refuses one too many.
                parts.append((position, position + length))
            position += length

    def has(self, field: int) -> bool:
        return field in self._numbers or field in self._parts

    def number(self, field: int) -> int:
        # proto3 leaves out what is 0.
        return self._numbers.get(field, 0)

    def part(self, field: int) -> tuple[int, int]:
        return self._parts.get(field, [(self._start, self._start)])[0]

    def parts(self, field: int) -> list[tuple[int, int]]:
        return self._parts.get(field, [])


def _varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the number at `start`, and where it ends: 7 bits a byte, in at most 64 bits and no byte too many."""
    if start < end and data[start] < 0x80:  # as nearly all are
        return data[start], start + 1
    value = 0
    for index in range(min(10, end - start)):
        byte = data[start + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:  # the bit that says that more follow
            if value >> 64 or (index and not byte):
                break
            return value, start + index + 1
    raise _refuse("bad-varint", "expected a number of at most 64 bits in its shortest form, found none", start)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class _Row:
    """One entry of the table: its key, where it stands, and where its value lies in the file."""

    key: bytes
    at: int
    data: bytes
    start: int
    end: int


def _rows(data: bytes) -> Iterator[_Row]:
    """Yield the entries of a whole table, in the ascending order of their keys.

    None is kept: a key may be 4096 bytes long and take 5 in the file, so that only who counts their lengths may hold
    them. What comes after an entry may be refused still.
    """
    footer = len(data) - _FOOTER_BYTES
    if footer < 0 or data[-8:] != TABLE_MAGIC:
        raise _refuse("bad-table", "expected a table with its magic number at the end, found none", max(0, footer))
    *metaindex, position = _handle(data, footer, len(data) - 8)
    *index, position = _handle(data, position, len(data) - 8)
    if data[position:-8].strip(b"\0"):
        raise _refuse("bad-table", "expected zeros behind the footer's handles, found other bytes", position)
    follow = 0
    last: bytes | None = None
    for row in _block(data, index[0], index[1]):
        start, end, behind = _handle(data, row.start, row.end)
        if behind != row.end or start != follow:
            raise _refuse("bad-table", "expected blocks one behind the other, found another order", row.start)
        before, key = last, None
        for entry in _block(data, start, end):
            if before is not None and entry.key <= before:
                raise _refuse("bad-table", _BLOCK_ORDER, start)
            yield entry
            before, key = None, entry.key
        if key is None or row.key < key:
            # The index says where to search: a reader that searches must find what one that goes through all finds.
            raise _refuse("bad-table", _BLOCK_ORDER, start)
        last, follow = row.key, end + _TRAILER_BYTES
    if metaindex[0] != follow or index[0] != metaindex[1] + _TRAILER_BYTES:
        raise _refuse("bad-table", "expected the two index blocks behind the others, found them elsewhere", footer)
    if index[1] + _TRAILER_BYTES != footer:
        raise _refuse("bad-table", "expected the footer behind the last block, found other bytes", footer)
    for _ in _block(data, metaindex[0], metaindex[1]):
        raise _refuse("bad-table", "expected a table without filters, found a block of them", metaindex[0])


_BLOCK_ORDER: Final = "expected keys in ascending order over all blocks, found another"


def _handle(data: bytes, start: int, end: int) -> tuple[int, int, int]:
    """Return where a block begins and ends, by its handle, and where the handle ends."""
    offset, position = _varint(data, start, end)
    size, position = _varint(data, position, end)
    if offset + size + _TRAILER_BYTES > len(data) - _FOOTER_BYTES:
        raise _refuse("bad-table", "expected a block inside the file, found one that ends behind it", start)
    return offset, offset + size, position


def _block(data: bytes, start: int, end: int) -> Iterator[_Row]:
    """Yield the entries of one block, whose checksum is right and whose keys ascend."""
    compression = data[end]
    stored = int.from_bytes(data[end + 1 : end + _TRAILER_BYTES], "little")
    if _masked_crc32c(data[start : end + 1]) != stored:
        raise _refuse("table-checksum", "expected a block with its CRC32C, found another checksum", start)
    if compression:
        noun = _COMPRESSIONS.get(compression, f"type {compression}")
        message = f"expected a table that is not compressed, found a block compressed by {noun}"
        raise PolicyError(Finding("format-not-supported", message, offset=start, hint=_SAVE_AGAIN))
    if end - start < 8:  # one place, and the number of places
        raise _refuse("bad-table", "expected a block with a place to start from, found a shorter one", start)
    (n_restarts,) = struct.unpack_from("<I", data, end - 4)
    body = end - 4 * (n_restarts + 1)
    if not n_restarts or body < start:
        raise _refuse("bad-table", "expected as many places to start from as the block says, found others", start)
    restarts = (start + restart for (restart,) in struct.iter_unpack("<I", data[body : end - 4]))
    waiting: int | None = next(restarts)
    if waiting != start:
        raise _refuse("bad-table", "expected the first place to start from at the first entry, found another", body)
    key: bytes | None = None
    position = start
    while position < body:
        at = position
        shared, position = _varint(data, position, body)
        fresh, position = _varint(data, position, body)
        nbytes, position = _varint(data, position, body)
        before = b"" if key is None else key
        if shared > len(before) or fresh + nbytes > body - position or shared + fresh > _MAX_KEY_BYTES:
            raise _refuse("bad-table", f"expected an entry inside its block, with a key of {_MAX_KEY_BYTES} bytes", at)
        if at == waiting:
            if shared:
                raise _refuse("bad-table", "expected a whole key where a search may start, found a part of one", at)
            waiting = next(restarts, None)
        found = before[:shared] + data[position : position + fresh]
        if key is not None and found <= key:
            raise _refuse("bad-table", "expected keys in ascending order, each once, found another order", at)
        key = found
        position += fresh
        yield _Row(key, at, data, position, position + nbytes)
        position += nbytes
    # A block without entries has the one place that every block has.
    if (waiting if body > start else next(restarts, None)) is not None:
        raise _refuse("bad-table", "expected an entry at each place to start from, in their order, found none", body)


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901 - one bit at a time
        table.append(value)
    return tuple(table)


_CRC32C: Final = _crc32c_table()
"""CRC of each byte by the polynomial of Castagnoli, bits reversed (RFC 3720, B.4)."""


def crc32c(data: bytes) -> int:
    """Return the CRC32C of `data` (RFC 3720, B.4), 32 bits."""
    crc = 0xFFFFFFFF
    table = _CRC32C
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked_crc32c(data: bytes) -> int:
    """Return the CRC as the table stores it: turned and moved, because data that holds its own CRC has a CRC of 0."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _CRC_MASK_DELTA) & 0xFFFFFFFF


def _refuse(code: str, message: str, offset: int | None, hint: str | None = None) -> FormatError:
    return FormatError(Finding(code, message, offset=offset, hint=hint))
