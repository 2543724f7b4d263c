"""Decode: admitted bytes to numpy arrays, as views. No byte is copied, and no file is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from safeload.canonical import numpy_dtype, view
from safeload.errors import StagingError, escape
from safeload.manifest import Manifest
from safeload.placing import Block, Casts, byte_ranges, within
from safeload.records import record_class
from safeload.scanning import AdmittedCheckpoint
from safeload.staging import StagedFile
from safeload.tensors import DType, Extent, RecordValue, TensorSpec, Value

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """A tensor in host memory: proof that its bytes were verified, scanned and admitted. Only `decode` makes one.

    Attributes:
        file: Path of the file that it comes from, as the manifest lists it.
        spec: What the table of tensors says of it.
        array: Read-only view on the staged bytes, of the dtype, shape and order that the file has. It keeps the
            staged memory alive for as long as it, or a view of it, lives.
    """

    file: str
    spec: TensorSpec
    array: Array

    @property
    def path(self) -> str:
        """The file's path and the name in the file, `/`-joined."""
        return tensor_path(self.file, self.spec.name)

    def part(self, block: Block) -> Array:
        """Return the view of a block."""
        return self.array[within(block, (0,) * len(block))]


@dataclass(frozen=True, slots=True, eq=False)
class PartialTensor:
    """A tensor of which only some bytes were staged: the same proof, for these. Only `decode` makes one.

    It has no array, because what is not there was not verified; whoever wants a part asks for it.

    Attributes:
        file: As for a `HostTensor`.
        spec: As for a `HostTensor`.
        present: The bytes of the file that are there, in order.
    """

    file: str
    spec: TensorSpec
    present: tuple[range, ...]
    _view: Array

    @property
    def path(self) -> str:
        """The file's path and the name in the file, `/`-joined."""
        return tensor_path(self.file, self.spec.name)

    def part(self, block: Block) -> Array:
        """Return the view of a block.

        Raises:
            StagingError: Some of its bytes are not there.
        """
        for wanted in byte_ranges(self.spec, block):
            if not _covers(self.present, wanted):
                raise StagingError(
                    f"{escape(self.path)}: bytes {wanted.start} to {wanted.stop} of its file are needed, and were not "
                    "read",
                    hint="shardings have to say the same of a tensor each time that they are asked",
                )
        return self._view[within(block, (0,) * len(block))]


def tensor_path(file: str, name: str) -> str:
    """Return what a tensor is called: its file's path and its name in the file, `/`-joined."""
    return f"{file}/{name}" if name else file


def _covers(present: tuple[range, ...], wanted: range) -> bool:
    return any(part.start <= wanted.start and wanted.stop <= part.stop for part in present)


def decode(admitted: AdmittedCheckpoint) -> Mapping[str, Any]:
    """Return what each file of tensors holds, by path, with each tensor as a `HostTensor`.

    Containers and plain values are as in the file; a record is an instance of its record class. Of a file that was
    staged in part, a tensor that is not all there is a `PartialTensor`.
    """
    return {path: _File(path, admitted.staged.files[path]).decode(value) for path, value in admitted.values.items()}


class _File:
    """One file's bytes, made into what it holds."""

    def __init__(self, path: str, staged: StagedFile) -> None:
        self._path = path
        self._data = staged.view
        self._present: tuple[range, ...] | None = staged.present
        self._bytes: dict[Extent, bytes] = {}
        self._arrays: dict[tuple[object, ...], Array] = {}

    def decode(self, value: Value) -> Any:
        match value:
            case TensorSpec():
                return self._tensor(value)
            case Extent():
                # Once for each place in the file, however often it is referred to.
                if value not in self._bytes:
                    self._bytes[value] = bytes(self._payload(value))
                return self._bytes[value]
            case RecordValue(record, fields):
                made = record_class(record, tuple(fields))
                return made(**{name: self.decode(child) for name, child in fields.items()})
            case dict():
                return {key: self.decode(child) for key, child in value.items()}
            case list():
                return [self.decode(child) for child in value]
            case tuple():
                return tuple(self.decode(child) for child in value)
            case _:
                return value

    def _tensor(self, spec: TensorSpec) -> HostTensor | PartialTensor:
        # One array for one place in the file: parameters that were tied when they were saved stay tied.
        key = spec.extent, spec.dtype, spec.shape, spec.order, spec.strides
        if key not in self._arrays:
            self._arrays[key] = view(self._payload(spec.extent), spec)
        extent, present = spec.extent, self._present
        is_whole = present is None or extent.inline is not None or not extent.nbytes
        if is_whole or _covers(present or (), range(extent.offset, extent.offset + extent.nbytes)):
            return HostTensor(self._path, spec, self._arrays[key])
        return PartialTensor(self._path, spec, present or (), self._arrays[key])

    def _payload(self, extent: Extent) -> memoryview | bytes:
        return self._data[extent.offset : extent.offset + extent.nbytes] if extent.inline is None else extent.inline


def arrays(tree: Any, casts: Casts | None = None) -> Any:
    """Return the same tree with each `HostTensor` replaced by its array, cast where that was asked for.

    Args:
        tree: The tree.
        casts: What is cast, and to what; such an array is a copy.

    Raises:
        StagingError: A tensor is there in part only.
    """
    match tree:
        case HostTensor():
            return tree.array if casts is None else _cast(tree, casts)
        case PartialTensor():
            raise StagingError(f"{escape(tree.path)}: only a part of it was read")
        case dict():
            return {key: arrays(child, casts) for key, child in tree.items()}
        case list():
            return [arrays(child, casts) for child in tree]
        case tuple():
            return tuple(arrays(child, casts) for child in tree)
        case _ if hasattr(tree, "items"):
            return type(tree)(**{name: arrays(child, casts) for name, child in tree.items()})
        case _:
            return tree


def cast_bytes(manifest: Manifest, casts: Casts) -> int:
    """Return how many bytes of copies `arrays` will make of what a manifest lists, for what is cast."""
    total = 0
    for entry in manifest.files:
        for tensor in entry.tensors:
            made = casts.dtype(tensor_path(entry.path, tensor.name), DType(tensor.dtype))
            total += 0 if made.name == tensor.dtype else math.prod(tensor.shape) * made.itemsize
    return total


def _cast(tensor: HostTensor, casts: Casts) -> Array:
    stored = tensor.spec.dtype
    wanted = casts.dtype(tensor.path, stored)
    if wanted.name == stored.name:
        return tensor.array
    # Values that the new type has no number for become infinite or nan, as whoever asked for it knows.
    with np.errstate(all="ignore"):
        made = tensor.array.astype(numpy_dtype(wanted))
    made.flags.writeable = False
    return made
