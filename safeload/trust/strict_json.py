"""JSON read so strictly that no two readers can disagree on what a signed document says."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from safeload.errors import Finding, ManifestError, escape

MAX_INTEGER = 2**53
"""Largest magnitude of an integer: beyond it, readers that hold numbers as binary64 no longer agree (RFC 8259, 6)."""

MAX_VALUES = 10_000_000
"""Values a document. An empty list costs two bytes of text and 64 of memory, so bytes alone do not bound memory."""

_ESCAPE_PAIR = re.compile(rb"\\.", re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONG_NUMBER = re.compile(rb"[0-9]{%d,}" % len(str(MAX_INTEGER)))
_NOT_KEPT = bytes(set(range(256)) - set(b'"[]{},0123456789'))
_DIGITS = b"0123456789"
_ONE_KIND_OF_BRACKET = bytes.maketrans(b"{}", b"[]")


class _RefusedError(ValueError):
    """What a hook of the decoder objects to; never leaves this module."""


def loads(data: bytes, *, max_bytes: int, max_depth: int, max_values: int = MAX_VALUES) -> object:
    """Return what a JSON document says, as dict, list, str, int, bool and None.

    Every limit is checked before the decoder runs, so that a hostile document costs no more than its own length.

    Args:
        data: The document: UTF-8 without a byte order mark.
        max_bytes: Longest document that is looked at.
        max_depth: Deepest nesting of lists and objects; a bare number has depth 0.
        max_values: Most values, containers included; an empty container counts as two.

    Raises:
        ManifestError: It breaks RFC 8259 or a limit, repeats a key of an object, or holds a float, NaN, an
            infinity, an integer beyond `MAX_INTEGER`, or text that is no Unicode (bad UTF-8, a lone surrogate).
    """
    if len(data) > max_bytes:
        _refuse(f"expected at most {max_bytes} bytes of JSON, found {len(data)}")
    _check_structure(data, max_depth, max_values)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as err:
        _refuse("expected UTF-8, found bytes that are not", err.start, err)
    try:
        value: object = _DECODER.decode(text)
        if _SURROGATE_ESCAPE.search(data):
            # Escapes can spell half a pair. Writing the value back is the exact check, and rarely needed.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as err:
        _refuse("expected Unicode text, found a lone surrogate", None, err)
    except json.JSONDecodeError as err:
        _refuse(f"expected JSON: {err.msg}", len(text[: err.pos].encode("utf-8")), err)
    except (_RefusedError, RecursionError) as err:
        _refuse(str(err), None, err)
    return value


def _check_structure(data: bytes, max_depth: int, max_values: int) -> None:
    """Bound the number of values, their depth and the integers without parsing them.

    What it makes of bytes that are no JSON does not matter, as long as it bounds them: the decoder refuses those.
    """
    # With escapes gone, every second piece between quotes lies outside strings.
    unescaped = _ESCAPE_PAIR.sub(b"", data) if b"\\" in data else data
    outside = b"".join(unescaped.translate(None, _NOT_KEPT).split(b'"')[::2]).translate(_ONE_KIND_OF_BRACKET)
    # Every value but the first stands after a comma or is the first of its container.
    if outside.count(b",") + outside.count(b"[") + 1 > max_values:
        _refuse(f"expected at most {max_values} values")
    # A hook that is called for each integer would take a third of the whole time; two numbers never touch in JSON.
    for digits in _LONG_NUMBER.findall(outside):
        if len(digits) > len(str(MAX_INTEGER)) or int(digits) > MAX_INTEGER:
            _refuse(f"expected integers up to {MAX_INTEGER}, found one of {len(digits)} digits")
    brackets = outside.translate(None, _DIGITS + b",")
    for _ in range(max_depth):  # each pass takes away the innermost level
        if b"[]" not in brackets:
            break
        brackets = brackets.replace(b"[]", b"")
    # Brackets without a partner are the decoder's to report, unless there are enough of them to exhaust its stack.
    if b"[]" in brackets or brackets.count(b"[") > max_depth:
        _refuse(f"expected nesting of at most {max_depth}, found deeper")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _RefusedError(f'expected each key once, found "{escape(twice, limit=60)}" twice in one object')
    return found


def _no_float(digits: str) -> NoReturn:
    raise _RefusedError(f"expected integers only, found the number {escape(digits, limit=30)}")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_no_float, parse_constant=_no_float)


def _refuse(message: str, offset: int | None = None, cause: Exception | None = None) -> NoReturn:
    raise ManifestError(Finding("bad-json", message, offset=offset)) from cause
