"""Files that are data and no tensors: checked for being what they claim. The loader never opens them."""

from __future__ import annotations

import json
import re
from typing import Literal

from safeload.errors import Finding, FormatError, LimitError
from safeload.formats import Parsed, Source
from safeload.formats.detection import HEAD_BYTES, detect
from safeload.formats.pickles import parse_pickle
from safeload.policy import Policy

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufffe\uffff]")
"""Characters that no text file needs and that a terminal may obey. Tab, line feed, form feed and return may stay."""


def check_inert(source: Source, content: Literal["json", "text", "opaque"], policy: Policy) -> Parsed:
    """Say whether a file is the inert data that the policy takes it for, by its name.

    Args:
        source: The file's bytes.
        content: "json": UTF-8 and one JSON value; "text": UTF-8 without control characters; "opaque": any bytes
            that are not those of a pickle, an archive or a program.
        policy: Its limits bound the size.
    """
    limit = policy.limits.max_inert_bytes
    if source.size > limit:
        finding = Finding(
            "limit-exceeded",
            f"a file of {source.size:,} bytes that is no tensor; the policy allows {limit:,}",
            hint="an honest file that needs more can be admitted by `max_inert_bytes` under [limits] in the policy",
        )
        return Parsed(refusal=LimitError(finding))
    kind = detect(source.read(0, HEAD_BYTES), source.size)
    if kind is not None:
        hint = kind.advice or "a pickle belongs in a file of tensors, where it is scanned as one"
        return _refuse("name-contradicts-content", f"expected {_NOUN[content]}, found {kind.noun}", hint=hint)
    return Parsed() if content == "opaque" else _check_text(source, content, policy)


_NOUN = {"json": "JSON", "text": "text", "opaque": "a tokenizer or other plain data"}


def _check_text(source: Source, content: Literal["json", "text"], policy: Policy) -> Parsed:
    data = source.read(0, source.size)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        return _refuse("name-contradicts-content", f"expected UTF-8, found byte {data[err.start]:#04x}", err.start)
    if content == "json":
        try:
            json.loads(text)
        except json.JSONDecodeError as err:
            return _refuse("name-contradicts-content", f"expected JSON, found: {err.msg} in line {err.lineno}", err.pos)
        except (RecursionError, ValueError):
            # ValueError: an integer of more digits than Python is willing to convert.
            return _refuse("name-contradicts-content", "expected JSON of ordinary depth and numbers, found neither")
        return Parsed()
    control = _CONTROL.search(text)
    if control is not None:
        offset = len(text[: control.start()].encode())
        return _refuse("name-contradicts-content", f"expected text, found the control character {control[0]!r}", offset)
    # A pickle of protocol 0 is text. Its name keeps our loader away from it, and not another's.
    pickle = parse_pickle(source, policy)
    if pickle.refusal is None or (pickle.globals and pickle.refusal.findings[-1].code in _REACHED_STOP):
        return _refuse("name-contradicts-content", "expected text, found a pickle of protocol 0 or 1", 0)
    return Parsed()


_REACHED_STOP = {"global-not-allowed", "data-after-stop", "bad-stop"}


def _refuse(code: str, message: str, offset: int | None = None, hint: str | None = None) -> Parsed:
    return Parsed(refusal=FormatError(Finding(code, message, offset=offset, hint=hint)))
