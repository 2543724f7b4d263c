"""Decode: admitted bytes to numpy arrays, as views. No byte is copied, and no file is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from safeload.canonical import view
from safeload.records import record_class
from safeload.scanning import AdmittedCheckpoint
from safeload.tensors import Extent, RecordValue, TensorSpec, Value


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
    array: np.ndarray[Any, np.dtype[Any]]

    @property
    def path(self) -> str:
        """The file's path and the name in the file, `/`-joined."""
        return f"{self.file}/{self.spec.name}" if self.spec.name else self.file


def decode(admitted: AdmittedCheckpoint) -> Mapping[str, Any]:
    """Return what each file of tensors holds, by path, with each tensor as a `HostTensor`.

    Containers and plain values are as in the file; a record is an instance of its record class.
    """
    return {
        path: _File(path, admitted.staged.files[path].view).decode(value) for path, value in admitted.values.items()
    }


class _File:
    """One file's bytes, made into what it holds."""

    def __init__(self, path: str, data: memoryview) -> None:
        self._path = path
        self._data = data
        self._bytes: dict[Extent, bytes] = {}

    def decode(self, value: Value) -> Any:
        match value:
            case TensorSpec(extent=extent):
                return HostTensor(self._path, value, view(self._payload(extent), value))
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

    def _payload(self, extent: Extent) -> memoryview | bytes:
        return self._data[extent.offset : extent.offset + extent.nbytes] if extent.inline is None else extent.inline


def arrays(tree: Any) -> Any:
    """Return the same tree with each `HostTensor` replaced by its array."""
    match tree:
        case HostTensor():
            return tree.array
        case dict():
            return {key: arrays(child) for key, child in tree.items()}
        case list():
            return [arrays(child) for child in tree]
        case tuple():
            return tuple(arrays(child) for child in tree)
        case _ if hasattr(tree, "items"):
            return type(tree)(**{name: arrays(child) for name, child in tree.items()})
        case _:
            return tree
