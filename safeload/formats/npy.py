"""npy: one array behind a header of text (numpy.lib.format, "Format Version 1.0" to "3.0").

numpy reads the header as a Python literal. Here it is read by a grammar of exactly the dict that numpy writes, so
nothing of the file's choosing is evaluated, and no header means one thing here and another there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from safeload.errors import Finding, FormatError, LimitError, PolicyError, escape
from safeload.formats import Parsed, Source
from safeload.formats.shapes import tensor_nbytes
from safeload.policy import Policy
from safeload.tensors import DType, Extent, TensorSpec

MAX_HEADER_BYTES: Final = 10_000
"""Longest header that numpy reads of a file that it does not trust (`max_header_size`)."""

MAGIC: Final = b"\x93NUMPY"

_DTYPES: Final[Mapping[str, str]] = {
    "b1": "bool",
    **{f"{sign[:1] or 'i'}{bits // 8}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"f{bits // 8}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"c{bits // 8}": f"complex{bits}" for bits in (64, 128)},
}
"""dtype by kind and item size, as `numpy.dtype.str` spells them behind the byte order."""

_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "O": ("Python objects, which are a pickle", "save numeric arrays, with allow_pickle=False"),
    "S": ("byte strings", "keep text in a file of its own, such as JSON"),
    "a": ("byte strings", "keep text in a file of its own, such as JSON"),
    "U": ("text", "keep text in a file of its own, such as JSON"),
    "M": ("dates", 'save them as integers: array.view("int64")'),
    "m": ("time spans", 'save them as integers: array.view("int64")'),
    "V": ("raw bytes of no type", "save bfloat16 and float8 as safetensors, which has names for them"),
    "f": ("a floating-point type of this machine only", 'save it as "float64"'),
    "c": ("a complex type of this machine only", 'save it as "complex128"'),
}
"""What else numpy writes, by its letter, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of an array says.

    Attributes:
        dtype: Element type.
        shape: Length of each dimension.
        order: "F" where the first index varies fastest.
        start: Where the elements begin, in bytes from the magic number.
        nbytes: Bytes that they take.
    """

    dtype: DType
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    start: int
    nbytes: int


def parse_npy(source: Source, policy: Policy) -> Parsed:  # noqa: ARG001 - every parser takes one; a header is short
    """Say what array the file holds; see `safeload.formats`.

    The array is a tensor without a name. Its bytes are where the file has them, whatever their order.
    """
    try:
        header = read_header(source.read, 0, source.size)
    except (FormatError, LimitError, PolicyError) as err:
        return Parsed(refusal=err)
    source.payload(header.start, header.nbytes)
    spec = TensorSpec("", header.dtype, header.shape, header.order, Extent(header.start, header.nbytes))
    return Parsed(spec, (spec,))


def read_header(read: Callable[[int, int], bytes], start: int, size: int) -> Header:
    """Return what the header of an array says; the array fills the `size` bytes from `start` exactly.

    Args:
        read: Returns bytes of the file, from an offset and of a length, or fewer at its end.
        start: Where the magic number is, in bytes of the file.
        size: Bytes from there to the array's end.

    Raises:
        FormatError: The header is none that numpy writes, or the elements are fewer or more than it says.
        PolicyError: The elements are no numbers.
    """
    if size < 10:
        _fail("truncated", f"expected an npy header, found {size} bytes", start)
    head = read(start, 12)[:size]
    version = head[6], head[7]
    if head[:6] != MAGIC:
        _fail("npy-bad-header", "expected an npy array, found something else", start)
    if version not in {(1, 0), (2, 0), (3, 0)}:
        message = f"expected an npy array of version 1.0, 2.0 or 3.0, found version {version[0]}.{version[1]}"
        _fail("npy-bad-header", message, start)
    begin = 10 if version == (1, 0) else 12
    length = int.from_bytes(head[8:begin], "little")
    if length > MAX_HEADER_BYTES:
        message = f"expected a header of at most {MAX_HEADER_BYTES:,} bytes, found {length:,}"
        _fail("npy-bad-header", message, start + 8)
    if begin + length > size:
        _fail("truncated", f"expected a header of {length:,} bytes, found the file's end", start + size)
    text = _Text(read(start + begin, length).decode("latin-1"), start + begin, is_python3=version == (3, 0))
    descr, order, shape = text.header()
    dtype = _dtype(descr, start + begin)
    nbytes = tensor_nbytes(shape, dtype.itemsize * 8, offset=start + begin)
    found = size - begin - length
    if found != nbytes:
        message = f"expected {nbytes:,} bytes of {dtype}, shape {str(list(shape))[:80]}, found {found:,}"
        if found < nbytes:
            _fail("truncated", message, start + size)
        _fail("npy-data-behind", message, start + begin + length + nbytes)
    return Header(dtype, shape, order, start + begin + length, nbytes)


def _dtype(descr: str, offset: int) -> DType:
    order, code = descr[:1], descr[1:]
    if code in _DTYPES and order in {"<", ">", "|"}:
        dtype = DType(_DTYPES[code], big_endian=order == ">")
        if (order == "|") == (dtype.itemsize == 1):
            return dtype
    what, hint = _KINDS.get(descr.lstrip("<>|=")[:1], ("something else", "save numeric arrays"))
    known = re.fullmatch(r"[<>|=]?[a-zA-Z]\w*(\[\w+\])?", descr) is not None
    message = f"expected numbers, found {what if known else 'something else'}: {escape(descr, limit=60)!r}"
    raise PolicyError(Finding("npy-dtype", message, offset=offset, hint=hint))


_LENGTH = re.compile(r"0|[1-9][0-9]{0,18}")
_STRING = re.compile(r"'([^'\\\n]*)'")


class _Text:
    """A header's text, taken from the left; anything but what is expected refuses it where it stands."""

    def __init__(self, text: str, base: int, *, is_python3: bool) -> None:
        self._text = text
        self._base = base
        self._is_python3 = is_python3
        self._at = 0

    def header(self) -> tuple[str, Literal["C", "F"], tuple[int, ...]]:
        """Return dtype, order and shape: `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }` and spaces."""
        descr: str | None = None
        order: Literal["C", "F"] | None = None
        shape: tuple[int, ...] | None = None
        self._expect("{")
        while not self._take("}"):
            at = self._at
            key = self._string()
            self._expect(":")
            if key == "descr" and descr is None:
                descr = self._descr()
            elif key == "fortran_order" and order is None:
                order = self._order()
            elif key == "shape" and shape is None:
                shape = self._shape()
            else:
                self._at = at
                self._want("each of descr, fortran_order and shape once")
            if not self._take(","):
                self._expect("}")
                break
        if descr is None or order is None or shape is None:
            self._want("descr, fortran_order and shape")
        if self._text[self._at :].strip(" ") != "\n" or not self._text.endswith("\n"):
            self._want("only spaces and a line feed behind the dict")
        return descr, order, shape

    def _descr(self) -> str:
        if self._peek() == "[":
            message = "expected numbers, found a record of several fields"
            hint = "save each field as an array of its own: numpy.savez"
            raise PolicyError(Finding("npy-dtype", message, offset=self._base + self._at, hint=hint))
        return self._string()

    def _order(self) -> Literal["C", "F"]:
        self._skip()
        if self._text.startswith("True", self._at):
            self._at += len("True")
            return "F"
        if self._text.startswith("False", self._at):
            self._at += len("False")
            return "C"
        return self._want("True or False")

    def _shape(self) -> tuple[int, ...]:
        shape: list[int] = []
        self._expect("(")
        while not self._take(")"):
            self._skip()
            match = _LENGTH.match(self._text, self._at)
            if match is None:
                self._want("the length of a dimension")
            self._at = match.end()
            if not self._is_python3 and self._text.startswith("L", self._at):
                self._at += 1  # what Python 2 writes behind a long integer; numpy takes it in versions 1 and 2
            shape.append(int(match[0]))
            if not self._take(","):
                if len(shape) == 1:
                    # `(3)` is a number to Python.
                    self._want("a comma behind the only dimension")
                self._expect(")")
                break
        return tuple(shape)

    def _string(self) -> str:
        self._skip()
        match = _STRING.match(self._text, self._at)
        if match is None:
            self._want("a string in single quotes")
        self._at = match.end()
        return match[1]

    def _skip(self) -> None:
        while self._text.startswith(" ", self._at):
            self._at += 1

    def _peek(self) -> str:
        self._skip()
        return self._text[self._at : self._at + 1]

    def _take(self, sign: str) -> bool:
        if self._peek() != sign:
            return False
        self._at += 1
        return True

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            self._want(f"'{sign}'")

    def _want(self, expected: str) -> NoReturn:
        found = self._text[self._at : self._at + 20]
        message = f"expected {expected} in the header, found '{escape(found)}'" if found else f"expected {expected}"
        _fail("npy-bad-header", message, self._base + self._at)


def _fail(code: str, message: str, offset: int) -> NoReturn:
    raise FormatError(Finding(code, message, offset=offset))
