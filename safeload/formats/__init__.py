"""Parsers: bytes in, facts out. A parser builds nothing of the file's choosing and imports no name that it reads.

Each format module has one function that takes a `Source` and a `Policy` and returns `Parsed`. It raises nothing
for bad input: a refusal is part of what it returns, beside everything that was learned before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from safeload.errors import RejectedError
from safeload.tensors import TensorSpec, Value

WINDOW_BYTES = 64 * 1024
"""How much a parser asks for at a time. Large enough that the 60 opcodes of a shard need one read for each payload
between them, small enough that jumping over a payload wastes nothing that can be measured."""


class Source(Protocol):
    """The bytes of one file, read forward.

    Attributes:
        size: Length of the file in bytes.
    """

    size: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes from `offset`, `nbytes` of them or fewer where the file ends before."""
        ...

    def payload(self, offset: int, nbytes: int) -> None:
        """Be told that a payload lies here, before anything behind it is read."""
        ...


class MemorySource:
    """A file that is in memory already."""

    def __init__(self, view: memoryview | bytes) -> None:
        self._view = memoryview(view)
        self.size = self._view.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of the bytes from `offset`; see `Source.read`."""
        return bytes(self._view[offset : offset + nbytes])

    def payload(self, offset: int, nbytes: int) -> None:
        """Do nothing: every byte stays in reach."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a parser learned of one file.

    Attributes:
        value: The whole value, with tensors as `TensorSpec`; None where the file was refused.
        tensors: The table of tensors, in stored order; empty where the file was refused.
        globals: The pickle globals that the file names, as `module.name`, in order of first use.
        refusal: Why the file is refused, with every finding; None where it is not.
    """

    value: Value = None
    tensors: tuple[TensorSpec, ...] = ()
    globals: tuple[str, ...] = ()
    refusal: RejectedError | None = None
