"""Sizes in bytes, as people type them and as people read them."""

from __future__ import annotations

import re
from fractions import Fraction

from safeload.errors import ConfigError, escape

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
"""Bytes a unit, by its lower-case spelling. A bare "G" is left out: people mean 1000**3 and 1024**3 by it."""

_SIZE = re.compile(r"(?P<number>([0-9]{1,20}|[0-9]{1,3}(,[0-9]{3}){1,6})(\.[0-9]{1,9})?)\s?(?P<unit>[A-Za-z]*)")

MAX_SIZE_BYTES = 2**63 - 1
"""What the operating system can count; more is a mistake."""


def parse_size(text: str | int) -> int:
    """Return the number of bytes that `text` states: `8GiB`, `500MB`, `1.5 TiB` or a plain number of bytes.

    Args:
        text: A number and a unit, in any case: kB, MB, GB, TB, PB are powers of 1000, KiB ... PiB of 1024. Commas may
            divide thousands, as in our own messages.

    Raises:
        ConfigError: It is no size, is not a whole number of bytes, is zero, or is more than 2**63 - 1.
    """
    match = _SIZE.fullmatch(str(text).strip())
    factor = None if match is None else _UNITS.get(match["unit"].lower())
    if match is None or factor is None:
        raise ConfigError(
            f"{escape(str(text))!r} is no size", hint="write for example 8GiB, 500MB or a number of bytes"
        )
    size = Fraction(match["number"].replace(",", "")) * factor
    if size.denominator != 1 or not 0 < size <= MAX_SIZE_BYTES:
        raise ConfigError(
            f"{escape(str(text))!r} is no size: expected a whole number of bytes from 1 to 2**63 - 1",
            hint="write for example 8GiB, 500MB or a number of bytes",
        )
    return int(size)


def human_size(n_bytes: int) -> str:
    """Return `n_bytes` for people: at most four digits and a binary unit ("1.5 GiB"); exact below 1 KiB."""
    if n_bytes < 1024:
        return f"{n_bytes} B"
    amount = float(n_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        # Compared as it will be shown, so that 1048575 bytes are "1.0 MiB" and not "1024.0 KiB".
        if round(amount, 1) < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} PiB"
