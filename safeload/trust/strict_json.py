"""JSON read so strictly that no two readers can disagree on what a signed document says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from safeload.errors import Finding, ManifestError, escape

MAX_INTEGER = 2**53
"""Largest magnitude of an integer: beyond it, readers that hold numbers as binary64 no longer agree (RFC 8259, 6)."""

MAX_VALUES = 10_000_000
"""Values a document. An empty list costs two bytes of text and 64 of memory, so bytes alone do not bound memory."""

MAX_KEYS = 16_384
"""Keys an object; ours have a dozen, or up to 10,000 streams. A schema complains of each that it does not know, in some
kilobyte of memory."""

MAX_WIDE_BYTES = 16 * 1024 * 1024
"""Longest document with a character beyond U+FFFF: Python holds each other one of the same text in four bytes then."""

_PIECE_BYTES = 1024 * 1024
"""How much is split at its quotes at one time: what `bytes.split` returns takes up to 30 times as much memory."""

_LONG_STRING = 1024
"""Bytes between two quotes, on average, from which on it is faster to look for quotes than at every byte."""

_ESCAPED_BACKSLASH = rb"\\"
_ESCAPED_QUOTE = rb"\""
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL)
"""Half a pair, in text without escaped backslashes: a first half before no second, or a second behind no first."""
_LEADS_OF_WIDE = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")
"""What the UTF-8 of a character beyond U+FFFF begins with (RFC 3629, 3)."""
_LONG_NUMBER = re.compile(rb"[0-9]{%d,}" % len(str(MAX_INTEGER)))
_DIGITS = b"0123456789"
_STRUCTURE = b'"[]{},:'
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_NO_STRUCTURE_NOR_DIGITS = bytes(set(_NO_STRUCTURE) - set(_DIGITS))
_ONE_KIND_OF_BRACKET = bytes.maketrans(b"{}", b"[]")
_MARK_NUMBERS = bytes.maketrans(_DIGITS + b":[, \n\r\t-", b"0" * len(_DIGITS) + b":" * 8)
"""Makes every digit a 0, and a colon of whatever can stand before a number."""
_NO_NUMBERS = bytes(set(range(256)) - set(_DIGITS + b':[, \n\r\t-"'))
"""What can be left out then: a number and what stands before it stay together, and quotes keep strings apart."""
_MARK_OF_LONG_NUMBER = b":" + b"0" * len(str(MAX_INTEGER))


class _RefusedError(ValueError):
    """What a hook of the decoder objects to; never leaves this module."""


def loads(
    data: bytes,
    *,
    max_bytes: int,
    max_depth: int,
    max_values: int = MAX_VALUES,
    max_keys: int | None = None,
    whole_floats: bool = False,
) -> object:
    """Return what a JSON document says, as dict, list, str, int, bool and None.

    Every limit is checked before the decoder runs, and nothing before it makes an object of each quote or escape: a
    hostile document of few values costs some four times its own length.

    Args:
        data: The document: UTF-8 without a byte order mark.
        max_bytes: Longest document that is looked at.
        max_depth: Deepest nesting of lists and objects; a bare number has depth 0.
        max_values: Most values, containers included; an empty container counts as two.
        max_keys: Most keys of one object; `MAX_KEYS` if it is None.
        whole_floats: Whether a number such as `144.0` is read as the integer that it is. Only documents that others
            write have such numbers.

    Raises:
        ManifestError: It breaks RFC 8259 or a limit, `MAX_KEYS` and `MAX_WIDE_BYTES` among them, repeats a key of an
            object, or holds a float, NaN, an infinity, an integer beyond `MAX_INTEGER`, or text that is no Unicode
            (bad UTF-8, a lone surrogate).
    """
    if len(data) > max_bytes:
        _refuse(f"expected at most {max_bytes} bytes of JSON, found {len(data)}")
    if len(data) > MAX_WIDE_BYTES and _is_wide(data):
        _refuse(f"expected at most {MAX_WIDE_BYTES} bytes of JSON with characters beyond U+FFFF, found {len(data)}")
    n_keys = _check_structure(data, max_depth, max_values)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as err:
        _refuse("expected UTF-8, found bytes that are not", err.start, err)
    try:
        keys = _KeyCounter(MAX_KEYS if max_keys is None else max_keys)
        numbers = {**_NO_FLOATS, "parse_float": _whole} if whole_floats else _NO_FLOATS
        value: object = json.JSONDecoder(object_hook=keys.count, **numbers).decode(text)
        if keys.found != n_keys:
            _refuse_twin(text)
    except json.JSONDecodeError as err:
        _refuse(f"expected JSON: {err.msg}", len(text[: err.pos].encode("utf-8")), err)
    except (_RefusedError, RecursionError) as err:
        _refuse(str(err), None, err)
    # Each backslash is one of an escape now, or the decoder would have objected.
    if _has_surrogate_escape(data) and _LONE_SURROGATE.search(data.replace(_ESCAPED_BACKSLASH, b"  ")):
        _refuse("expected Unicode text, found a lone surrogate")
    return value


def _has_surrogate_escape(data: bytes) -> bool:
    return b"\\" in data and _SURROGATE_ESCAPE.search(data) is not None


def _is_wide(data: bytes) -> bool:
    return _has_surrogate_escape(data) or (not data.isascii() and any(lead in data for lead in _LEADS_OF_WIDE))


def _check_structure(data: bytes, max_depth: int, max_values: int) -> int:
    """Bound the number of values, their depth and the integers without parsing them, and return the number of keys.

    What it makes of bytes that are no JSON does not matter, as long as it bounds them: the decoder refuses those.
    """
    unescaped = data
    if b"\\" in data:
        # Backslashes first, in pairs from the left of each run: one that is left escapes what stands behind it.
        unescaped = data.replace(_ESCAPED_BACKSLASH, b"  ").replace(_ESCAPED_QUOTE, b"  ")
    if unescaped.count(b'"') < len(unescaped) // _LONG_STRING:
        # A few long strings, such as an envelope's payload: to jump from quote to quote takes no time at all.
        unescaped = data = b"".join(_between_strings(unescaped))
    outside = _outside_strings(unescaped, _NO_STRUCTURE).translate(_ONE_KIND_OF_BRACKET)
    # Every value but the first stands after a comma or is the first of its container.
    if outside.count(b",") + outside.count(b"[") + 1 > max_values:
        _refuse(f"expected at most {max_values} values")
    # A hook that is called for each integer would take a third of the whole time, and so would looking at all of them.
    if _LONG_NUMBER.match(data) or _MARK_OF_LONG_NUMBER in data.translate(_MARK_NUMBERS, _NO_NUMBERS):
        for match in _LONG_NUMBER.finditer(_outside_strings(unescaped, _NO_STRUCTURE_NOR_DIGITS)):
            n_digits = match.end() - match.start()
            if n_digits > len(str(MAX_INTEGER)) or int(match[0]) > MAX_INTEGER:
                _refuse(f"expected integers up to {MAX_INTEGER}, found one of {n_digits} digits")
    brackets = outside.translate(None, b",:")
    for _ in range(max_depth):  # each pass takes away the innermost level
        if b"[]" not in brackets:
            break
        brackets = brackets.replace(b"[]", b"")
    # Brackets without a partner are the decoder's to report, unless there are enough of them to exhaust its stack.
    if b"[]" in brackets or brackets.count(b"[") > max_depth:
        _refuse(f"expected nesting of at most {max_depth}, found deeper")
    return outside.count(b":")


def _outside_strings(unescaped: bytes, without: bytes) -> bytes:
    """Return what stands outside strings, less the bytes `without`."""
    # Two quotes side by side are a string with nothing left in it, or the border of two strings with nothing left
    # between them: without both, what is inside a string still is, and hardly a string is left to look for.
    kept = unescaped.translate(None, without).replace(b'""', b"")
    outside: list[bytes] = []
    inside = 0  # 1 where a piece begins within a string
    for start in range(0, len(kept), _PIECE_BYTES):
        parts = kept[start : start + _PIECE_BYTES].split(b'"')
        outside.append(b"".join(parts[inside::2]))
        inside ^= (len(parts) - 1) % 2
    return b"".join(outside)


def _between_strings(unescaped: bytes) -> Iterator[bytes]:
    """Yield what stands outside strings, the quotes of each around nothing, so that two numbers never touch."""
    start = 0
    while (quote := unescaped.find(b'"', start)) >= 0:
        yield unescaped[start:quote] + b'""'
        end = unescaped.find(b'"', quote + 1)
        if end < 0:
            return
        start = end + 1
    yield unescaped[start:]


class _KeyCounter:
    """Counts the keys that the decoder's objects have, which are fewer than were written where one stands twice."""

    def __init__(self, max_keys: int) -> None:
        self.found = 0
        self._max_keys = max_keys

    def count(self, decoded: dict[str, object]) -> dict[str, object]:
        self.found += len(decoded)
        if len(decoded) > self._max_keys:
            raise _RefusedError(f"expected at most {self._max_keys} keys in one object, found {len(decoded)}")
        return decoded


def _refuse_twin(text: str) -> NoReturn:
    """Find the key that stands twice in one object, which takes longer than finding that there is one."""
    _FINDER_OF_TWINS.decode(text)
    raise _RefusedError("expected each key once")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _RefusedError(f'expected each key once, found "{escape(twice, limit=60)}" twice in one object')
    return found


def _no_float(digits: str) -> NoReturn:
    raise _RefusedError(f"expected integers only, found the number {escape(digits, limit=30)}")


def _whole(digits: str) -> int:
    whole, _, rest = digits.partition(".")
    if rest.strip("0") or not whole.isdecimal() or int(whole) > MAX_INTEGER:
        _no_float(digits)
    return int(whole)


_NO_FLOATS: dict[str, Any] = {"parse_float": _no_float, "parse_constant": _no_float}
_FINDER_OF_TWINS = json.JSONDecoder(object_pairs_hook=_object, **_NO_FLOATS)


def _refuse(message: str, offset: int | None = None, cause: Exception | None = None) -> NoReturn:
    raise ManifestError(Finding("bad-json", message, offset=offset)) from cause
