"""What lies on the pickle machine's stack beside plain values: symbols, which stand for objects and are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from safeload.policy import RecordRule
from safeload.tensors import DType, Extent


class Refused:
    """Stands for whatever a refused global or call would have made; the machine goes on only to find out more."""

    __slots__ = ()


REFUSED = Refused()


@dataclass(frozen=True, slots=True)
class Global:
    """An allowed (module, name) pair. Nothing was imported; it is worth what a constructor makes of it.

    Attributes:
        module: Module as the file writes it.
        name: Name as the file writes it; never dotted.
        record: The record rule that it stands for, if it is one.
    """

    module: str
    name: str
    record: RecordRule | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True)
class Payload:
    """A run of bytes: a `bytes`, a `bytearray`, or a Python 2 `str`.

    Attributes:
        extent: Where it lies.
        kind: The type that `pickle.load` would make of it.
        head: All of its bytes where they are few (`HEAD_BYTES`) or inline, else None.
    """

    extent: Extent
    kind: Literal["bytes", "bytearray", "str"]
    head: bytes | None


@dataclass(slots=True)
class PendingDType:
    """A `numpy.dtype` that was constructed, and its state once BUILD has shown it.

    Attributes:
        name: Key of `DTYPE_ITEMSIZE`.
        dtype: The whole element type, once the state is known.
    """

    name: str
    dtype: DType | None = None


@dataclass(slots=True)
class PendingArray:
    """An array under construction: complete once BUILD, or its constructor, has given its state."""

    offset: int
    dtype: DType | None = None
    shape: tuple[int, ...] = ()
    order: Literal["C", "F"] = "C"
    extent: Extent | None = None


@dataclass(slots=True)
class PendingRecord:
    """An instance of a declared record: complete once it has its fields."""

    rule: RecordRule
    offset: int
    fields: dict[str, object] | None = None


class OrderedMapping(dict[object, object]):
    """A `collections.OrderedDict`; a type of its own only so that BUILD and calls can tell it from a plain dict."""

    __slots__ = ()
