"""What every table of tensors must hold to: shapes that an array can have, and names that are no burden."""

from __future__ import annotations

import math

from safeload.errors import Finding, FormatError, escape
from safeload.formats.pickles.constructors import MAX_ARRAY_BYTES, MAX_DIMENSIONS
from safeload.formats.pickles.results import MAX_NAME_CHARACTERS


def tensor_nbytes(shape: tuple[int, ...], bits: int, *, offset: int, name: str = "") -> int:
    """Return how many bytes a tensor's elements take, packed where one takes less than a byte.

    Args:
        shape: Length of each dimension, as the file states it.
        bits: Size of an element in bits.
        offset: Where the file states the shape.
        name: What to call the tensor in a finding.

    Raises:
        FormatError: code "bad-shape": there are too many dimensions, they are out of range or too large together, or
            the elements do not fill whole bytes.
    """
    of = f"{escape(name, limit=80)}: " if name else ""
    if len(shape) > MAX_DIMENSIONS:
        message = f"{of}a shape has at most {MAX_DIMENSIONS} dimensions, found {len(shape)}"
        raise FormatError(Finding("bad-shape", message, offset=offset))
    # Their number and length are bounded before they are multiplied. One of zero counts as one, as numpy has it.
    if any(not 0 <= n <= MAX_ARRAY_BYTES for n in shape) or (
        math.prod(n or 1 for n in shape) * bits > MAX_ARRAY_BYTES * 8
    ):
        message = f"{of}a tensor has at most 2**63 - 1 bytes, found the shape {str(list(shape))[:80]}"
        raise FormatError(Finding("bad-shape", message, offset=offset))
    n_bits = math.prod(shape) * bits
    if n_bits % 8:
        message = f"{of}expected elements that fill whole bytes, found {n_bits} bits"
        raise FormatError(Finding("bad-shape", message, offset=offset))
    return n_bits // 8


def check_name(name: str, *, offset: int) -> None:
    """Refuse a tensor's name that is longer than any honest one.

    Raises:
        FormatError: code "name-too-long".
    """
    if len(name) > MAX_NAME_CHARACTERS:
        message = f"a tensor's name has at most {MAX_NAME_CHARACTERS} characters, found {len(name)}"
        raise FormatError(Finding("name-too-long", message, offset=offset))
