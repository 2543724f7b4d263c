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
    """A `collections.OrderedDict`; a type of its own so that BUILD and calls can tell it from a plain dict.

    Attributes:
        has_attributes: Whether BUILD gave it attributes, as PyTorch gives `_metadata` to a state dict.
        is_sealed: Whether a call took it on the condition that it is empty, so that nothing may be stored in it.
    """

    __slots__ = ("has_attributes", "is_sealed")

    has_attributes: bool
    is_sealed: bool

    def __init__(self) -> None:
        """Make an empty one."""
        super().__init__()
        self.has_attributes = self.is_sealed = False


@dataclass(slots=True)
class Storage:
    """A run of elements that PyTorch tensors are views of: what a persistent id stands for.

    Attributes:
        key: Name of the storage in its file.
        type_name: Name of its storage class without the module ("FloatStorage").
        location: Device that it was saved from; not acted upon.
        n_elements: Number of elements, as the persistent id says; of bytes in an `UntypedStorage`.
        itemsize: Bytes an element.
        offset: Byte offset in the file of its first element, once that is known.
    """

    key: str
    type_name: str
    location: str
    n_elements: int
    itemsize: int
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.n_elements * self.itemsize


@dataclass(slots=True)
class PendingTensor:
    """A PyTorch tensor: a view of a storage, whose place in the file may be found after the pickle.

    Attributes:
        storage: What it is a view of.
        dtype: Element type.
        shape: Length of each dimension.
        order: "C" or "F" where it is contiguous so; "C" where it is in neither order.
        strides: Steps along each dimension in elements where it is contiguous in neither order, else None.
        first: Index in the storage of its first element, in elements of `dtype`; 0 where it has none.
        span: Elements from its first to its last, both counted; 0 where it has none.
        offset: Where in the file the call stands that made it.
    """

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    strides: tuple[int, ...] | None
    first: int
    span: int
    offset: int


@dataclass(slots=True)
class PendingQuantized:
    """A quantized PyTorch tensor: the integers that are stored, and how they stand for numbers.

    Attributes:
        values: The stored integers.
        parameters: `scale` and `zero_point` for the whole tensor, or `scales`, `zero_points` and `axis`.
    """

    values: PendingTensor
    parameters: dict[str, object]
