"""Files that are data and no tensors: checked for being what they claim. The loader never opens them."""

from __future__ import annotations

import json
import re
from typing import Literal

from safeload.errors import Finding, FormatError, LimitError
from safeload.formats import Parsed, Source
from safeload.formats.detection import HEAD_BYTES, detect
from safeload.formats.pickles.machine import Machine, parse_pickle
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
            hint=policy.admits_by("[limits]", "`max_inert_bytes` with a larger number, if the file is honest"),
        )
        return Parsed(refusal=LimitError(finding))
    kind = detect(source.read(0, HEAD_BYTES), source.size)
    if kind is not None:
        hint = kind.advice or "a pickle belongs in a file of tensors, where it is scanned as one"
        return _refuse("name-contradicts-content", f"expected {_NOUN[content]}, found {kind.noun}", hint=hint)
    refused = Parsed() if content == "opaque" else _check_text(source, content)
    return refused if refused.refusal is not None else _check_for_pickle(source, content, policy)


_NOUN = {"json": "JSON", "text": "text", "opaque": "a tokenizer or other plain data"}


def _check_text(source: Source, content: Literal["json", "text"]) -> Parsed:
    data = source.read(0, source.size)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as err:
        return _refuse("name-contradicts-content", f"expected UTF-8, found byte {data[err.start]:#04x}", err.start)
    body = text.removeprefix("\ufeff")

    def offset(index: int) -> int:
        """Turn an index into `body` into an offset in the file."""
        return len(text[: index + len(text) - len(body)].encode())

    if content == "json":
        try:
            json.loads(body)
        except json.JSONDecodeError as err:
            message = f"expected JSON, found: {err.msg} in line {err.lineno}"
            return _refuse("name-contradicts-content", message, offset(err.pos))
        except (RecursionError, ValueError):
            # ValueError: an integer of more digits than Python is willing to convert.
            return _refuse("name-contradicts-content", "expected JSON of ordinary depth and numbers, found neither")
        return Parsed()
    control = _CONTROL.search(body)
    if control is not None:
        message = f"expected text, found the control character {control[0]!r}"
        return _refuse("name-contradicts-content", message, offset(control.start()))
    return Parsed()


def _check_for_pickle(source: Source, content: Literal["json", "text", "opaque"], policy: Policy) -> Parsed:
    """Refuse a pickle of protocol 0 or 1: it has no signature, and may be plain text.

    Its name keeps our loader away from it, and not another's. What breaks before its end may have called something by
    then, so a call of what is refused counts as much as an end.

    NOTE: the machine stops at more than other readers do, so a text can be made that it gives up before a call that
    they would reach. Nothing here loads such a file; that somebody else unpickles a README is outside the threat model.
    """
    machine = Machine(source, policy)
    parsed = parse_pickle(source, policy, machine=machine)
    reached_stop = parsed.refusal is None or (parsed.globals and parsed.refusal.findings[-1].code in _REACHED_STOP)
    if reached_stop or machine.refused_calls:
        message = f"expected {_NOUN[content]}, found a pickle of protocol 0 or 1"
        return _refuse("name-contradicts-content", message, 0)
    return Parsed()


_REACHED_STOP = {"global-not-allowed", "data-after-stop", "bad-stop"}


def _refuse(code: str, message: str, offset: int | None = None, hint: str | None = None) -> Parsed:
    return Parsed(refusal=FormatError(Finding(code, message, offset=offset, hint=hint)))
