"""Parsers: bytes in, facts out. A parser builds nothing of the file's choosing and imports no name that it reads.

Each format module has one function that takes a `Source` and a `Policy` and returns `Parsed`. It raises nothing
for bad input: a refusal is part of what it returns, beside everything that was learned before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from safeload.errors import Finding, LimitError, RejectedError
from safeload.tensors import ShardIndex, TensorSpec, Value

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

    def checksum(self, offset: int, nbytes: int, crc32: int) -> None:
        """Be told what the CRC-32 of bytes is that were not read: a source that streams past them compares it."""
        ...

    def peek(self, offset: int, nbytes: int) -> bytes:
        """Return bytes from anywhere in the file, before any are read: for formats whose table lies at the end.

        A source that hashes keeps them, and proves that they are what it hashes when it comes to them.
        """
        ...


class Siblings(Protocol):
    """The other files of a file's directory, for formats of several files."""

    def read(self, name: str, limit: int) -> bytes | None:
        """Return all bytes of the file of this name; None where there is none.

        Args:
            name: One component of a path.
            limit: Most bytes that the caller takes.

        Raises:
            LimitError: The file is longer.
        """
        ...


class MemorySource:
    """A file that is in memory already, all of it or the parts that are needed."""

    def __init__(self, view: memoryview | bytes, present: tuple[range, ...] | None = None) -> None:
        """Take the file's bytes.

        Args:
            view: As many bytes as the file has.
            present: Which of them were read, in order; None for all.
        """
        self._view = memoryview(view)
        self._present = present
        self.size = self._view.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of the bytes from `offset`; see `Source.read`.

        Raises:
            LimitError: Some of them were not read, so that nobody knows what they are.
        """
        stop = min(offset + nbytes, self.size)
        parts = self._present
        if parts is not None and offset < stop and not any(p.start <= offset and stop <= p.stop for p in parts):
            message = f"expected to need only the bytes outside of the listed tensors, found {nbytes} bytes asked for"
            hint = "the manifest was made by other rules; sign the directory again, or load all of it"
            raise LimitError(Finding("not-staged", message, offset=offset, hint=hint))
        return bytes(self._view[offset : offset + nbytes])

    def payload(self, offset: int, nbytes: int) -> None:
        """Do nothing: every byte stays in reach."""

    def checksum(self, offset: int, nbytes: int, crc32: int) -> None:
        """Do nothing: what is in memory has the digest that was signed, or is not handed out."""

    def peek(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of the bytes from `offset`; see `Source.peek`."""
        return self.read(offset, nbytes)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a parser learned of one file.

    Attributes:
        value: The whole value, with tensors as `TensorSpec`; None where the file was refused.
        tensors: The table of tensors, in stored order; empty where the file was refused.
        globals: The pickle globals that the file names, as `module.name`, in order of first use.
        refusal: Why the file is refused, with every finding; None where it is not.
        index: What the file says of others, if it is an index.
    """

    value: Value = None
    tensors: tuple[TensorSpec, ...] = ()
    globals: tuple[str, ...] = ()
    refusal: RejectedError | None = None
    index: ShardIndex | None = None
