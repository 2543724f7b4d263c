"""The table of tensors: what every format is parsed into, and all that a loader needs to know.

A `TensorSpec` says where a tensor lies and what it is. It holds no array and needs no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

_NUMPY_ITEMSIZE = {
    "bool": 1,
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""`longdouble` is left out on purpose: its bytes mean different numbers on different machines."""

ML_DTYPES_ITEMSIZE: Mapping[str, int] = {
    "bfloat16": 2,
    # numpy keeps one element of a narrow ml_dtypes type in one byte, and so do the files written from it.
    "int2": 1,
    "int4": 1,
    "uint2": 1,
    "uint4": 1,
    "float4_e2m1fn": 1,
    "float6_e2m3fn": 1,
    "float6_e3m2fn": 1,
    "float8_e3m4": 1,
    "float8_e4m3": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Bytes an element for the types that come from the ml_dtypes package and not from numpy itself."""

DTYPE_ITEMSIZE: Mapping[str, int] = {**_NUMPY_ITEMSIZE, **ML_DTYPES_ITEMSIZE}
"""Bytes an element as stored, for every dtype that safeload reads, by numpy's or ml_dtypes' name."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: a name of `DTYPE_ITEMSIZE` and the byte order in which the file holds it."""

    name: str
    big_endian: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes an element, as stored."""
        return DTYPE_ITEMSIZE[self.name]

    def __str__(self) -> str:
        return f"{self.name} (big-endian)" if self.big_endian else self.name


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a payload lies in its file.

    Attributes:
        offset: Byte offset of the payload in the file; for inline bytes, of the opcode that carries them.
        nbytes: Length of the decoded payload in bytes.
        inline: The decoded payload itself, where the file holds it in an encoding of its own (text-protocol
            pickles escape their bytes), or None where the file holds it as it is.
    """

    offset: int
    nbytes: int
    inline: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file: its name there, its type and shape, and where its bytes lie.

    Attributes:
        name: Path inside the file, `/`-joined (`weight`, `a/0`); empty for a file that is one bare array.
        dtype: Element type, with the byte order of the file.
        shape: Length of each dimension.
        order: "C" where the last index varies fastest in the payload, "F" where the first does.
        extent: Where the payload lies; its `nbytes` equals the product of `shape` times the itemsize, but for a view
            with strides.
        strides: Steps between neighbors along each dimension, in elements, for a view that is contiguous in neither
            order; None for all others. The extent is then the span from the view's first element to its last.
        sha256: SHA-256 of the value's C-order little-endian bytes, where it was asked for. It does not depend
            on the container, so it survives a conversion to another format.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    extent: Extent
    sha256: str | None = None
    strides: tuple[int, ...] | None = None

    @property
    def is_canonical(self) -> bool:
        """Whether the payload already is the value's C-order little-endian bytes."""
        flat = self.order == "C" or sum(n > 1 for n in self.shape) <= 1
        return flat and self.strides is None and not (self.dtype.big_endian and self.dtype.itemsize > 1)

    @property
    def n_elements(self) -> int:
        """Number of elements: the product of `shape`, 1 for a tensor of rank 0."""
        return math.prod(self.shape)


TENSOR_FORMATS = ("pickle", "npy", "npz", "safetensors", "pytorch", "tensorflow", "gguf")
"""The containers of tensors that safeload reads."""


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements lie from the first element of a strided view to its last, both counted.

    Args:
        shape: Length of each dimension.
        strides: Steps between neighbors along each dimension, in elements, none negative.
    """
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """What an index file says of the files beside it: which tensor lies in which.

    Attributes:
        files: Name of the file that holds each tensor, by the tensor's name; both as the index has them.
        total_size: Bytes of all tensors together, where the index says so.
    """

    files: Mapping[str, str]
    total_size: int | None = None


@dataclass(frozen=True, slots=True)
class RecordValue:
    """An instance of a record that the policy declares: its name, and its fields' values in declared order."""

    record: str
    fields: Mapping[str, Value]


Value: TypeAlias = (
    "bool | int | float | str | Extent | list[Value] | tuple[Value, ...] | dict[str | int | float | None, Value]"
    " | TensorSpec | RecordValue | None"
)
"""What a file holds: plain data whose leaves may be tensors and records. Acyclic, and only of exactly these types."""


def children(value: Value) -> Iterator[tuple[str, Value]]:
    """Yield the name and the value of each direct child of a container, in stored order; nothing for a leaf."""
    if isinstance(value, dict):
        yield from ((key if isinstance(key, str) else repr(key), child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), child) for index, child in enumerate(value))
    elif isinstance(value, RecordValue):
        yield from value.fields.items()
