"""Write a tensor the way CPython's C pickler writes it, and say where the payload will lie, without any pickler.

The bytes are those of protocol 4 for a numpy 1 array (`numpy.core.multiarray._reconstruct`), and for an instance of
`__main__.<Record>` whose fields are such arrays: what Grok-1's published files hold. The same code lays out a file
from shapes alone, so the sizes and offsets of a 300 GB checkpoint can be computed without one byte of it.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from safeload.records import Record
from safeload.tensors import DTYPE_ITEMSIZE, ML_DTYPES_ITEMSIZE, DType, Extent, TensorSpec

FRAME_TARGET_BYTES = 64 * 1024
"""CPython's FRAME_SIZE_TARGET: a frame is closed at the first object boundary past it, and a payload of this length
or more is written outside any frame."""

FRAME_MIN_BYTES = 4
"""CPython's FRAME_SIZE_MIN: shorter frames are written without a FRAME opcode."""

FRAME_HEADER_BYTES = 9
"""The FRAME opcode and its 8-byte length."""

MlDtypesFlags: TypeAlias = Literal[64, 80]
"""The `flags` of a pickled ml_dtypes element type: 80 up to ml_dtypes 0.5.1, 64 since. Both are honest."""


def shard_file(index: int, process: int = 0) -> str:
    """Return the file name of tensor `index` as written by process `process`: `tensor00026_000`.

    Raises:
        ValueError: A number does not fit its digits.
    """
    if not (0 <= index < 100_000 and 0 <= process < 1_000):
        raise ValueError(f"no shard is called tensor {index} of process {process}")
    return f"tensor{index:05d}_{process:03d}"


class Sink(Protocol):
    """Anything that takes bytes: a file opened for writing, a socket's file, a hash."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Take all of `data`."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """What a shard's file will look like.

    Attributes:
        size: Length of the file in bytes.
        tensors: Its tensors in stored order, each with the extent of its payload.
    """

    size: int
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | None  # None: only the layout is asked for

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_ITEMSIZE[self.dtype]


def pickle_shard(value: np.ndarray | Record, *, bfloat16_flags: MlDtypesFlags = 64) -> list[bytes | memoryview]:
    """Return the protocol 4 pickle of one array or record, in pieces that joined are the file.

    Payloads of 64 KiB and more are views of the array's own memory: nothing large is copied.

    Args:
        value: A C-contiguous little-endian array of a dtype that safeload reads, or a record of such arrays.
        bfloat16_flags: The `flags` written for bfloat16 and the other types of ml_dtypes.

    Raises:
        TypeError: `value` is anything else. Convert with `numpy.ascontiguousarray` first.
    """
    if bfloat16_flags not in (64, 80):
        raise TypeError(f"bfloat16_flags is 64 or 80, not {bfloat16_flags!r}")
    if isinstance(value, Record):
        fields = {name: _tensor(child) for name, child in value.items()}
        return _Pickler(bfloat16_flags).record(type(value).__name__, fields).pieces
    return _Pickler(bfloat16_flags).array(_tensor(value)).pieces


def write_shard(file: Sink, value: np.ndarray | Record, *, bfloat16_flags: MlDtypesFlags = 64) -> int:
    """Write the protocol 4 pickle of one array or record to `file`, and return its length in bytes.

    Args:
        file: Where to write; a buffered file, as a raw one may take less than it is given.
        value: As `pickle_shard` takes it.
        bfloat16_flags: As `pickle_shard` takes it.

    Raises:
        TypeError: `value` is not what `pickle_shard` takes; nothing was written.
    """
    pieces = pickle_shard(value, bfloat16_flags=bfloat16_flags)
    for piece in pieces:
        file.write(piece)
    return sum(len(piece) for piece in pieces)


def shard_layout(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], *, record: str = "QuantizedWeight8bit"
) -> ShardLayout:
    """Return the size and the payload offsets of a shard's file, from shapes alone.

    Args:
        tensors: Dtype and shape by field name, in the record's order; the empty name alone stands for a bare array.
        record: The record's class name; not used for a bare array.

    Raises:
        TypeError: A dtype is unknown, or the empty name has company.
    """
    unknown = sorted({dtype for dtype, _ in tensors.values()} - DTYPE_ITEMSIZE.keys())
    if unknown or not tensors or ("" in tensors and len(tensors) > 1):
        raise TypeError(f"no shard is made of {dict(tensors)!r}")
    fields = {name: _Tensor(dtype, tuple(shape), None) for name, (dtype, shape) in tensors.items()}
    pickler = _Pickler(64)  # 64 and 80 are equally long
    made = pickler.array(fields[""]) if "" in fields else pickler.record(record, fields)
    specs = (
        TensorSpec(name, DType(field.dtype), field.shape, "C", Extent(offset, field.nbytes))
        for (name, field), offset in zip(fields.items(), made.payload_offsets, strict=True)
    )
    return ShardLayout(made.size, tuple(specs))


def _tensor(array: object) -> _Tensor:
    if type(array) is not np.ndarray:
        raise TypeError(f"a shard holds arrays, not {type(array).__name__}")
    little = array.dtype.byteorder in "|<" or (array.dtype.byteorder == "=" and sys.byteorder == "little")
    if array.dtype.name not in DTYPE_ITEMSIZE or not little:
        raise TypeError(f"no shard is written with dtype {array.dtype!r}")
    if not array.flags.c_contiguous:
        raise TypeError("only C-contiguous arrays are written")
    # By way of uint8, because ml_dtypes' types have no buffer format of their own.
    return _Tensor(array.dtype.name, array.shape, array.reshape(-1).view(np.uint8).data)


_NUMPY_CODE = {
    name: f"{np.dtype(name).kind}{size}" for name, size in DTYPE_ITEMSIZE.items() if name not in ML_DTYPES_ITEMSIZE
}


class _Pickler:
    """The part of CPython's C pickler that arrays exercise: frames, the memo, and the short forms of opcodes.

    The memo is keyed by value. CPython keys it by identity, which is the same for what is met here: its one-character
    strings, its bytes of length 0 and 1, its dtypes and its functions are singletons, everything else is met once.
    """

    def __init__(self, flags: MlDtypesFlags) -> None:
        self.pieces: list[bytes | memoryview] = []
        self.payload_offsets: list[int] = []
        self.size = 0
        self._flags = flags
        self._memo: dict[object, int] = {}
        self._frame = bytearray()
        self._emit(b"\x80\x04")  # PROTO 4, ahead of the first frame

    def array(self, tensor: _Tensor) -> _Pickler:
        self._array(tensor)
        return self._stop()

    def record(self, name: str, fields: Mapping[str, _Tensor]) -> _Pickler:
        self._boundary()
        self._global("__main__", name)
        self._boundary()
        self._frame += b")\x81"  # EMPTY_TUPLE NEWOBJ
        self._memoize()
        self._boundary()
        self._frame += b"}"  # EMPTY_DICT
        self._memoize()
        self._frame += b"" if len(fields) == 1 else b"("  # MARK
        for field, tensor in fields.items():
            self._string(field)
            self._array(tensor)
        self._frame += b"s" if len(fields) == 1 else b"u"  # SETITEM, SETITEMS
        self._frame += b"b"  # BUILD
        return self._stop()

    def _stop(self) -> _Pickler:
        self._frame += b"."
        self._close_frame()
        return self

    def _array(self, tensor: _Tensor) -> None:
        self._boundary()
        self._global("numpy.core.multiarray", "_reconstruct")
        self._boundary()
        self._global("numpy", "ndarray")
        self._tuple((0,))
        self._payload(memoryview(b"b"), 1)
        self._frame += b"\x87"  # TUPLE3
        self._memoize()
        self._frame += b"R"  # REDUCE
        self._memoize()
        self._boundary()
        self._frame += b"("
        self._int(1)  # version of the array's state
        self._tuple(tensor.shape)
        self._dtype(tensor.dtype)
        self._boundary()
        self._frame += b"\x89"  # NEWFALSE: not in Fortran order
        self._boundary()
        self.payload_offsets.append(self._payload(tensor.data, tensor.nbytes))
        self._frame += b"t"  # TUPLE
        self._memoize()
        self._frame += b"b"  # BUILD

    def _dtype(self, name: str) -> None:
        self._boundary()
        if self._recall(("dtype", name)):
            return
        foreign = name in ML_DTYPES_ITEMSIZE
        self._global("numpy", "dtype")
        self._boundary()
        if foreign:
            self._global("ml_dtypes", name)
        else:
            self._string(_NUMPY_CODE[name])
        self._frame += b"\x89\x88\x87"  # NEWFALSE NEWTRUE TUPLE3: align=False, copy=True
        self._memoize()
        self._frame += b"R"
        self._memoize(("dtype", name))
        self._frame += b"("
        self._int(3)  # version of the dtype's state
        # numpy gives its own one-byte types no byte order, and ml_dtypes gives all of its types one.
        self._string("|" if DTYPE_ITEMSIZE[name] == 1 and not foreign else "<")
        self._frame += b"NNN"
        size = DTYPE_ITEMSIZE[name] if foreign else -1
        for number in (size, size, self._flags if foreign else 0):  # itemsize, alignment, flags
            self._int(number)
        self._frame += b"t"
        self._memoize()
        self._frame += b"b"

    def _global(self, module: str, name: str) -> None:
        if self._recall(("global", module, name)):
            return
        self._string(module)
        self._string(name)
        self._frame += b"\x93"  # STACK_GLOBAL
        self._memoize(("global", module, name))

    def _string(self, text: str) -> None:
        self._boundary()
        if self._recall(text):
            return
        encoded = text.encode()
        self._frame += b"\x8c" + bytes([len(encoded)]) + encoded  # SHORT_BINUNICODE
        self._memoize(text)

    def _tuple(self, numbers: tuple[int, ...]) -> None:
        self._boundary()
        if not numbers:
            self._frame += b")"  # EMPTY_TUPLE, which is not memoized
            return
        self._frame += b"(" if len(numbers) > 3 else b""
        for number in numbers:
            self._int(number)
        self._frame += {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(numbers), b"t")
        self._memoize()

    def _int(self, number: int) -> None:
        self._boundary()
        if 0 <= number <= 0xFF:
            self._frame += b"K" + bytes([number])  # BININT1
        elif 0 <= number <= 0xFFFF:
            self._frame += b"M" + number.to_bytes(2, "little")  # BININT2
        elif -(2**31) <= number < 2**31:
            self._frame += b"J" + struct.pack("<i", number)  # BININT
        else:
            length = number.bit_length() // 8 + 1
            self._frame += b"\x8a" + bytes([length]) + number.to_bytes(length, "little", signed=True)  # LONG1

    def _payload(self, data: memoryview | None, nbytes: int) -> int:
        """Write bytes, and return the offset in the file at which they begin."""
        self._boundary()
        singleton = bytes(data) if data is not None and nbytes <= 1 else b"" if nbytes == 0 else None
        if singleton is not None and self._recall(singleton):
            return self._position()
        if nbytes <= 0xFF:
            header = b"C" + bytes([nbytes])  # SHORT_BINBYTES
        elif nbytes <= 0xFFFFFFFF:
            header = b"B" + struct.pack("<I", nbytes)  # BINBYTES
        else:
            header = b"\x8e" + struct.pack("<Q", nbytes)  # BINBYTES8
        if nbytes >= FRAME_TARGET_BYTES:
            self._close_frame()
            self._emit(header)
            offset = self.size
            self._emit(b"" if data is None else data)
            self.size = offset + nbytes
        else:
            self._frame += header
            offset = self._position()
            self._frame += data if data is not None else bytes(nbytes)
        self._memoize(singleton)
        return offset

    def _position(self) -> int:
        return self.size + FRAME_HEADER_BYTES + len(self._frame)

    def _recall(self, key: object) -> bool:
        index = self._memo.get(key)
        if index is None:
            return False
        self._frame += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)  # BINGET, LONG_BINGET
        return True

    def _memoize(self, key: object = None) -> None:
        self._frame += b"\x94"  # MEMOIZE: the next free index
        self._memo[object() if key is None else key] = len(self._memo)

    def _boundary(self) -> None:
        """Where CPython's `save` begins: the only places at which a full frame is closed."""
        if len(self._frame) >= FRAME_TARGET_BYTES:
            self._close_frame()

    def _close_frame(self) -> None:
        if len(self._frame) >= FRAME_MIN_BYTES:
            self._emit(b"\x95" + struct.pack("<Q", len(self._frame)))
        self._emit(bytes(self._frame))
        self._frame.clear()

    def _emit(self, piece: bytes | memoryview) -> None:
        self.size += len(piece)
        if piece:
            self.pieces.append(piece)
