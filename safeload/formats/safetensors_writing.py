"""Write safetensors files, and say where each tensor will lie in one, from dtypes and shapes alone.

The layout is the one that the safetensors library makes (its README, "Format"): eight bytes with the length of the
header, the header as JSON padded with spaces to a multiple of 8, then the tensors without a gap, those with the widest
elements first and by name among equals, so that each begins at a multiple of its element's size.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from safeload.formats.pickles.writing import Sink
from safeload.tensors import DTYPE_ITEMSIZE

SAFETENSORS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "uint32": "U32",
        "int32": "I32",
        "uint64": "U64",
        "int64": "I64",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
    }
)
"""The format's name of each dtype that it can hold as numpy stores it. Types of less than a byte are left out: the
format packs them, numpy does not."""

MAX_HEADER_BYTES = 100_000_000
"""Longest header that the safetensors library reads (MAX_HEADER_SIZE)."""

_HEADER_ALIGNMENT_BYTES = 8

_METADATA = "__metadata__"
"""The one key of a header that is no tensor: a map of strings."""


def safetensors_layout(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] = MappingProxyType({})
) -> tuple[bytes, Mapping[str, tuple[int, int]]]:
    """Return the first bytes of a file, up to its first tensor, and where each tensor lies.

    Args:
        tensors: Dtype (numpy's or ml_dtypes' name) and shape of each tensor by name.
        metadata: Free text to put into the header.

    Returns:
        The header with its length in front, and for each tensor, in stored order, the byte offset in the file at which
        it begins and its length in bytes. The last one ends where the file does.

    Raises:
        TypeError: The format has no such dtype, a name is taken or is no Unicode text, metadata is no text, or the
            header would be longer than readers allow.
    """
    foreign = sorted({dtype for dtype, _ in tensors.values()} - SAFETENSORS_NAMES.keys())
    if foreign or _METADATA in tensors:
        raise TypeError(f"safetensors has no {f'dtype {foreign[0]}' if foreign else f'tensor called {_METADATA}'}")
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise TypeError("the metadata of safetensors is a map of str to str")
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-DTYPE_ITEMSIZE[item[1][0]], item[0])):
        start, end = end, end + math.prod(shape) * DTYPE_ITEMSIZE[dtype]
        header[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        places[name] = start, end - start
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as err:
        raise TypeError("a name or the metadata is no Unicode text") from err
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise TypeError(f"a header of {len(text)} bytes is longer than the {MAX_HEADER_BYTES} that readers allow")
    before = 8 + len(text)  # behind the header's length, a 64-bit number
    return len(text).to_bytes(8, "little") + text, {name: (before + at, n) for name, (at, n) in places.items()}


def write_safetensors(
    file: Sink, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Write a safetensors file, and return its length in bytes.

    Args:
        file: Where to write; a buffered file, as a raw one may take less than it is given.
        arrays: C-contiguous little-endian arrays by name, each of a dtype that the format has.
        metadata: Free text to put into the header.

    Raises:
        TypeError: An array is anything else, or as for `safetensors_layout`; nothing was written.
    """
    for name, array in arrays.items():
        if type(array) is not np.ndarray:
            raise TypeError(f"{name!r}: safetensors holds arrays, not {type(array).__name__}")
        little = array.dtype.byteorder in "|<" or (array.dtype.byteorder == "=" and sys.byteorder == "little")
        if not (little and array.flags.c_contiguous):
            raise TypeError(f"{name!r}: only C-contiguous little-endian arrays are written")
    header, places = safetensors_layout({name: (a.dtype.name, a.shape) for name, a in arrays.items()}, metadata)
    file.write(header)
    written = len(header)
    for name, (_, nbytes) in places.items():
        # By way of uint8, because ml_dtypes' types have no buffer format of their own.
        file.write(arrays[name].reshape(-1).view(np.uint8).data)
        written += nbytes
    return written
