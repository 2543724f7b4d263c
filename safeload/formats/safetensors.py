"""safetensors: a header of JSON, and the payloads without a gap (safetensors' README, "Format").

The tensors tile the file behind the header, which begins with `{`, ends with spaces at most, and says nothing twice.
Its length may be any: the text asks for no alignment, files with odd lengths are published, and an array is a view
wherever it lies; only its speed depends on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn, cast

from safeload.errors import Finding, FormatError, LimitError, ManifestError, PolicyError, escape
from safeload.formats import Parsed, Source
from safeload.formats.shapes import check_name, tensor_nbytes
from safeload.policy import Policy
from safeload.tensors import DType, Extent, RecordValue, TensorSpec, Value
from safeload.trust import strict_json

MAX_HEADER_BYTES: Final = 100_000_000
"""Longest header that the safetensors library reads (MAX_HEADER_SIZE)."""

_DTYPES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    **{
        f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""The format's dtypes of whole bytes, and ours."""

_PACKED_BITS: Final[Mapping[str, int]] = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits an element of those that the format packs. numpy has one element in each byte, so they stay as they are."""

_METADATA = "__metadata__"
_MAX_DEPTH = 3  # the header, a tensor, its shape


def parse_safetensors(source: Source, policy: Policy) -> Parsed:
    """Say what tensors the file holds; see `safeload.formats`.

    The value is a dict of the tensors by name, in stored order. One of F4, F6_E2M3 or F6_E3M2 is a record
    `PackedTensor` of its dtype, its shape, and its bytes as they are in the file.
    """
    try:
        return _parse(source, policy)
    except (FormatError, LimitError, PolicyError) as err:
        return Parsed(refusal=err)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the header has it, its range counted from the header's end."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _parse(source: Source, policy: Policy) -> Parsed:
    if source.size < 8:
        _fail("truncated", f"expected the header's length in 8 bytes, found {source.size}", source.size)
    length = int.from_bytes(source.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        message = f"expected a header of at most {MAX_HEADER_BYTES:,} bytes, found {length:,}"
        _fail("safetensors-bad-header", message, 0)
    if length > source.size - 8:
        _fail("truncated", f"expected a header of {length:,} bytes, found {source.size - 8:,}", source.size)
    if length > policy.limits.max_inline_bytes:
        message = f"a header of {length:,} bytes; the policy allows {policy.limits.max_inline_bytes:,}"
        hint = policy.admits_by("[limits]", "`max_inline_bytes` with a larger number, if the file is honest")
        raise LimitError(Finding("limit-exceeded", message, offset=0, hint=hint))
    base = 8 + length
    position = 0
    value: dict[str | int | float | None, Value] = {}
    specs: list[TensorSpec] = []
    entries = sorted(_header(source.read(8, length), policy), key=lambda entry: (entry.start, entry.end))
    for entry in entries:
        shown = escape(entry.name, limit=80)
        bits = _PACKED_BITS.get(entry.dtype) or DType(_DTYPES[entry.dtype]).itemsize * 8
        nbytes = tensor_nbytes(entry.shape, bits, offset=8, name=entry.name)
        if entry.end - entry.start != nbytes:
            message = f"{shown}: dtype and shape need {nbytes:,} bytes, found {entry.end - entry.start:,}"
            _fail("safetensors-bad-offsets", message, 8)
        if entry.start != position:
            message = f"{shown}: expected it to begin at {position:,}, where the one before ends, found {entry.start:,}"
            _fail("safetensors-bad-offsets", message, 8, hint="tensors overlap, or bytes lie between them")
        position = entry.end
        extent = Extent(base + entry.start, nbytes)
        if entry.dtype in _PACKED_BITS:
            spec = TensorSpec(f"{entry.name}/packed", DType("uint8"), (nbytes,), "C", extent)
            fields: dict[str, Value] = {"dtype": entry.dtype, "shape": entry.shape, "packed": spec}
            value[entry.name] = RecordValue("PackedTensor", fields)
        else:
            spec = TensorSpec(entry.name, DType(_DTYPES[entry.dtype]), entry.shape, "C", extent)
            value[entry.name] = spec
        specs.append(spec)
    if base + position > source.size:
        message = f"expected {position:,} bytes of tensors, found {source.size - base:,}"
        _fail("truncated", message, source.size)
    if base + position < source.size:
        message = f"expected the file to end with its last tensor, found {source.size - base - position:,} bytes more"
        _fail("safetensors-data-behind", message, base + position)
    if len({spec.name for spec in specs}) != len(specs):
        _fail("ambiguous-name", "each tensor has a name of its own, found one that is that of a packed one's bytes", 8)
    for spec in specs:
        source.payload(spec.extent.offset, spec.extent.nbytes)
    return Parsed(value, tuple(specs))


def _header(text: bytes, policy: Policy) -> list[_Entry]:
    """Return the tensors that a header lists, its offsets being those of the file."""
    body = text.rstrip(b" ")
    if body[:1] != b"{" or body[-1:] != b"}":
        _fail("safetensors-bad-header", "expected a header from { to } and spaces behind, found something else", 8)
    try:
        read = strict_json.loads(
            body,
            max_bytes=MAX_HEADER_BYTES,
            max_depth=_MAX_DEPTH,
            max_values=policy.limits.max_values,
            max_keys=policy.limits.max_values,
        )
    except ManifestError as err:
        # The words are right for any document, the class is not: nobody signed this one.
        found = err.findings[0]
        at = 8 + (found.offset or 0)
        raise FormatError(Finding("safetensors-bad-header", found.message, offset=at)) from err
    header = cast("dict[str, object]", read)  # as it begins with a brace
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        _fail("safetensors-bad-header", f"expected {_METADATA} to be text by name, found something else", 8)
    return [_entry(name, stated) for name, stated in header.items()]


def _entry(name: str, stated: object) -> _Entry:
    check_name(name, offset=8)
    shown = escape(name, limit=80)
    match stated:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, end], **rest} if not rest:
            pass
        case _:
            expected = "a dtype, a shape and two data_offsets"
            _fail("safetensors-bad-header", f"{shown}: expected {expected} and nothing else, found others", 8)
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        _fail("safetensors-bad-header", f"{shown}: expected integers from 0 in shape and data_offsets", 8)
    if dtype not in _DTYPES and dtype not in _PACKED_BITS:
        known = ", ".join([*_DTYPES, *_PACKED_BITS])
        _fail("safetensors-bad-header", f"{shown}: expected one of {known}, found {escape(dtype, limit=40)!r}", 8)
    return _Entry(name, dtype, tuple(shape), start, end)


def _fail(code: str, message: str, offset: int, *, hint: str | None = None) -> NoReturn:
    raise FormatError(Finding(code, message, offset=offset, hint=hint))
