"""GGUF: metadata, a table of tensors, and their payloads (ggml's docs/gguf.md, versions 2 and 3).

Metadata are passed over and none is kept: a chat template in them is a program to some readers, and no tensor. The
tensors lie in the order of the table, each at the next multiple of the alignment, with zeros between.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, NoReturn

from safeload.errors import Finding, FormatError, LimitError, PolicyError, escape
from safeload.formats import WINDOW_BYTES, Parsed, Source
from safeload.formats.shapes import check_name, tensor_nbytes
from safeload.policy import Policy
from safeload.tensors import DType, Extent, RecordValue, TensorSpec, Value

MAX_DIMENSIONS: Final = 4
"""Dimensions of a ggml tensor (GGML_MAX_DIMS)."""

MAX_NESTING: Final = 4
"""Arrays within arrays; writers make one level."""

MAX_TEXT_BYTES: Final = 65_535
"""Bytes of a key (docs/gguf.md, gguf_metadata_kv_t); of a tensor's name far fewer."""

MAX_ALIGNMENT: Final = 1024 * 1024
"""Bytes; writers use 32. No more than this is read to see that padding is zeros."""

_DEFAULT_ALIGNMENT = 32
_ALIGNMENT_KEY = b"general.alignment"

_SCALAR_BYTES: Final[Mapping[int, int]] = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each type of metadata of a fixed size, by its number (gguf_metadata_value_type)."""
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9

_PLAIN: Final[Mapping[int, str]] = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}
"""Types whose elements stand for themselves (ggml_type)."""

_BLOCKS: Final[Mapping[int, tuple[str, int, int]]] = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Name, elements and bytes of a block of each quantized type. The numbers left out were given up, or are too new."""


def parse_gguf(source: Source, policy: Policy) -> Parsed:
    """Say what tensors the file holds; see `safeload.formats`.

    The value is a dict of the tensors by name. A shape has the slowest dimension first, as numpy has it; the file has
    it last. A quantized tensor is a record `QuantizedBlocks` of its type, its shape, and its blocks as bytes, those of
    a row in a row.
    """
    try:
        return _parse(_Cursor(source), policy)
    except (FormatError, LimitError, PolicyError) as err:
        return Parsed(refusal=err)


class _Cursor:
    """Reads a file from its start, a window at a time, and jumps over what nobody needs."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.at = 0
        self._window = b""
        self._window_at = 0

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes, exactly so many."""
        self.require(nbytes)
        start = self.at - self._window_at
        if start + nbytes > len(self._window):
            self._window, self._window_at, start = self.source.read(self.at, max(nbytes, WINDOW_BYTES)), self.at, 0
        self.at += nbytes
        return self._window[start : start + nbytes]

    def skip(self, nbytes: int) -> None:
        """Go over the next bytes."""
        self.require(nbytes)
        self.at += nbytes

    def require(self, nbytes: int) -> None:
        """Refuse where the file has fewer bytes left."""
        if nbytes > self.source.size - self.at:
            message = f"expected {nbytes:,} bytes at byte {self.at:,}, found {self.source.size - self.at:,}"
            _fail("truncated", message, self.source.size)

    def u32(self) -> int:
        """Return the next number of 4 bytes."""
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        """Return the next number of 8 bytes."""
        return int.from_bytes(self.take(8), "little")

    def text(self, code: str) -> bytes:
        """Return the next string, which is a key or a name."""
        at = self.at
        length = self.u64()
        if length > MAX_TEXT_BYTES:
            raise FormatError(
                Finding(code, f"expected a name of at most {MAX_TEXT_BYTES:,} bytes, found {length:,}", offset=at)
            )
        return self.take(length)


def _parse(cursor: _Cursor, policy: Policy) -> Parsed:
    magic, version = cursor.take(4), cursor.u32()
    if magic != b"GGUF" or version not in {2, 3}:
        # The number's low bytes are zero in a big-endian file (docs/gguf.md, "version").
        found = "a big-endian file" if version and not version & 0xFFFF else f"{escape(repr(magic)[2:-1])} {version}"
        message = f"expected GGUF 2 or 3, little-endian, found {found}"
        hint = "convert it with the tools of llama.cpp: gguf-py has convert-endian, and rewrites version 1"
        raise PolicyError(Finding("gguf-version", message, offset=4, hint=hint))
    n_tensors, n_pairs = cursor.u64(), cursor.u64()
    # Every tensor takes 24 bytes of the file at least, and every pair 13, before they take memory here.
    if n_tensors * 24 + n_pairs * 13 > cursor.source.size:
        message = f"expected {n_tensors:,} tensors and {n_pairs:,} metadata, found a file too short for them"
        _fail("truncated", message, 8)
    if n_tensors + n_pairs > policy.limits.max_values:
        _exceeds(f"{n_tensors:,} tensors and {n_pairs:,} metadata", 8, policy)
    alignment = _Metadata(cursor, policy).read(n_pairs)
    table = [_info(cursor, alignment) for _ in range(n_tensors)]
    names = [spec.name for _, spec, _ in table]
    if len(set(names)) != len(names) or len({name for name, _, _ in table}) != len(table):
        _fail("ambiguous-name", "each tensor has a name of its own, found one twice", cursor.at)
    return _placed(cursor, alignment, table)


def _placed(cursor: _Cursor, alignment: int, table: list[tuple[str, TensorSpec, RecordValue | None]]) -> Parsed:
    """Return what the file holds, now that it is known where the tensors begin: behind the table."""
    source, at = cursor.source, cursor.at
    base = at + -at % alignment if table else at
    value: dict[str | int | float | None, Value] = {}
    specs: list[TensorSpec] = []
    for name, stated, record in table:
        start, nbytes = base + stated.extent.offset, stated.extent.nbytes
        expected = at + -at % alignment
        if start != expected:
            message = f"{escape(name, limit=80)}: expected it at byte {expected:,}, where the one before ends, found "
            hint = "tensors lie in the order of the table and without gaps"
            _fail("gguf-bad-tensor", f"{message}{start:,}", min(start, source.size), hint=hint)
        if start + nbytes > source.size:
            message = f"{escape(name, limit=80)}: expected {nbytes:,} bytes at byte {start:,}, found the file's end"
            _fail("truncated", message, source.size)
        _check_padding(source, at, start)
        source.payload(start, nbytes)
        spec = TensorSpec(stated.name, stated.dtype, stated.shape, "C", Extent(start, nbytes))
        specs.append(spec)
        value[name] = RecordValue(record.record, {**record.fields, "blocks": spec}) if record else spec
        at = start + nbytes
    if source.size > at + -at % alignment:
        message = f"expected the file to end with its last tensor, found {source.size - at:,} bytes more"
        _fail("gguf-data-behind", message, at)
    _check_padding(source, at, source.size)
    return Parsed(value, tuple(specs))


def _check_padding(source: Source, start: int, end: int) -> None:
    padding = source.read(start, end - start) if end > start else b""
    if padding.strip(b"\0"):
        offset = start + len(padding) - len(padding.lstrip(b"\0"))
        _fail("gguf-data-behind", f"expected zeros up to byte {end:,}, found something else", offset)


class _Metadata:
    """The pairs of key and value in front of the table, passed over but for the alignment."""

    def __init__(self, cursor: _Cursor, policy: Policy) -> None:
        self._cursor = cursor
        self._policy = policy
        self._n_strings = 0

    def read(self, n_pairs: int) -> int:
        """Pass over the pairs, and return the alignment of tensors in bytes."""
        cursor = self._cursor
        alignment = _DEFAULT_ALIGNMENT
        keys: set[bytes] = set()
        n_characters = 0
        for _ in range(n_pairs):
            at = cursor.at
            key = cursor.text("gguf-bad-metadata")
            if key in keys or not key.isascii() or not key:
                _fail("gguf-bad-metadata", f"expected a new key in ASCII, found {escape(repr(key)[1:], limit=80)}", at)
            n_characters += len(key)
            if n_characters > self._policy.limits.max_inline_bytes:
                message = f"keys of more than {self._policy.limits.max_inline_bytes:,} bytes in all"
                hint = self._policy.admits_by("[limits]", "`max_inline_bytes` with a larger number")
                raise LimitError(Finding("limit-exceeded", message, offset=at, hint=hint))
            keys.add(key)
            kind = cursor.u32()
            if key == _ALIGNMENT_KEY:
                if kind != _UINT32:
                    _fail("gguf-bad-metadata", f"expected general.alignment as uint32, found type {kind}", at)
                alignment = cursor.u32()
                if alignment % 8 or alignment & (alignment - 1) or not 0 < alignment <= MAX_ALIGNMENT:
                    message = f"expected an alignment of 8 to {MAX_ALIGNMENT:,}, a power of 2, found {alignment:,}"
                    _fail("gguf-bad-metadata", message, at)
            else:
                self._value(kind, 1, depth=0)
        return alignment

    def _value(self, kind: int, count: int, *, depth: int) -> None:
        """Pass over so many values of one type."""
        cursor = self._cursor
        at = cursor.at
        if kind == _BOOL:
            # Counted at once, and in pieces, so that no claimed length is read whole.
            for start in range(0, count, WINDOW_BYTES):
                if cursor.take(min(WINDOW_BYTES, count - start)).strip(b"\0\1"):
                    _fail("gguf-bad-metadata", "expected a bool as 0 or 1, found another byte", at)
        elif kind in _SCALAR_BYTES:
            cursor.skip(count * _SCALAR_BYTES[kind])
        elif kind in {_STRING, _ARRAY}:
            self._n_strings += count
            if self._n_strings > self._policy.limits.max_values:
                _exceeds(f"{self._n_strings:,} strings and arrays", at, self._policy)
            for _ in range(count):
                if kind == _STRING:
                    cursor.skip(cursor.u64())
                else:
                    if depth == MAX_NESTING:
                        _fail("gguf-bad-metadata", f"expected at most {MAX_NESTING} arrays in each other", cursor.at)
                    inner, length = cursor.u32(), cursor.u64()
                    self._value(inner, length, depth=depth + 1)
        else:
            _fail("gguf-bad-metadata", f"expected a type from 0 to 12, found {kind}", at)


def _info(cursor: _Cursor, alignment: int) -> tuple[str, TensorSpec, RecordValue | None]:
    """Return a tensor's name, its place counted from the first one, and its record without that place, if it is one."""
    at = cursor.at
    raw = cursor.text("gguf-bad-tensor")
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError as err:
        raise FormatError(Finding("gguf-bad-tensor", "expected a name in UTF-8, found other bytes", offset=at)) from err
    check_name(name, offset=at)
    shown = escape(name, limit=80)
    n_dimensions = cursor.u32()
    if n_dimensions > MAX_DIMENSIONS:
        _fail("gguf-bad-tensor", f"{shown}: expected up to {MAX_DIMENSIONS} dimensions, found {n_dimensions:,}", at)
    shape = struct.unpack(f"<{n_dimensions}Q", cursor.take(8 * n_dimensions))[::-1]
    if 0 in shape:
        _fail("gguf-bad-tensor", f"{shown}: expected dimensions of at least 1, found {list(shape)}", at)
    kind, offset = cursor.u32(), cursor.u64()
    if offset % alignment:
        _fail("gguf-bad-tensor", f"{shown}: expected an offset that {alignment} divides, found {offset:,}", at)
    if kind in _PLAIN:
        dtype = DType(_PLAIN[kind])
        nbytes = tensor_nbytes(shape, dtype.itemsize * 8, offset=at, name=name)
        return name, TensorSpec(name, dtype, shape, "C", Extent(offset, nbytes)), None
    if kind not in _BLOCKS:
        hint = "it was given up, or is newer than this version of safeload"
        _fail("gguf-bad-tensor", f"{shown}: expected a known type, found {kind:,}", at, hint=hint)
    type_name, n_elements, n_bytes = _BLOCKS[kind]
    row = shape[-1] if shape else 1
    if row % n_elements:
        message = f"{shown}: expected rows of whole blocks of {n_elements} elements, found rows of {row:,}"
        _fail("gguf-bad-tensor", message, at)
    blocks = (*shape[:-1], row // n_elements * n_bytes)
    nbytes = tensor_nbytes(blocks, 8, offset=at, name=name)
    spec = TensorSpec(f"{name}/blocks", DType("uint8"), blocks, "C", Extent(offset, nbytes))
    return name, spec, RecordValue("QuantizedBlocks", {"type": type_name, "shape": shape})


def _exceeds(what: str, offset: int, policy: Policy) -> NoReturn:
    hint = policy.admits_by("[limits]", "`max_values` with a larger number, if the file is honest")
    message = f"{what}; the policy allows {policy.limits.max_values:,}"
    raise LimitError(Finding("limit-exceeded", message, offset=offset, hint=hint))


def _fail(code: str, message: str, offset: int, *, hint: str | None = None) -> NoReturn:
    raise FormatError(Finding(code, message, offset=offset, hint=hint))
