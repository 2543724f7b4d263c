"""Files that are data and no tensors: checked for being what they claim. The loader never opens them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

from safeload.errors import Finding, FormatError, LimitError
from safeload.formats import MemorySource, Parsed, Source
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
            that are not those of a pickle, nor begin as an archive or a program does.
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
    data = source.read(0, source.size)
    kind = detect(data[:HEAD_BYTES], source.size)
    if kind is not None:
        hint = kind.advice or "a pickle belongs in a file of tensors, where it is scanned as one"
        return _refuse("name-contradicts-content", f"expected {_NOUN[content]}, found {kind.noun}", hint=hint)
    refused = Parsed() if content == "opaque" else _check_text(data, content, limit=policy.limits.max_values)
    return refused if refused.refusal is not None else _check_for_pickle(data, content, policy)


_NOUN = {"json": "JSON", "text": "text", "opaque": "a tokenizer or other plain data"}


def _check_text(data: bytes, content: Literal["json", "text"], *, limit: int) -> Parsed:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as err:
        return _refuse("name-contradicts-content", f"expected UTF-8, found byte {data[err.start]:#04x}", err.start)
    body = text.removeprefix("\ufeff")

    def offset(index: int) -> int:
        """Turn an index into `body` into an offset in the file."""
        return len(text[: index + len(text) - len(body)].encode())

    if content == "json":
        # Every value but the first stands after a comma or opens a container; strings only make this more.
        n_values = data.count(b",") + data.count(b"[") + data.count(b"{")
        if n_values > limit:
            message = f"JSON of up to {n_values:,} values; the policy allows {limit:,} (`max_values`)"
            return Parsed(refusal=LimitError(Finding("limit-exceeded", message)))
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


def _check_for_pickle(data: bytes, content: Literal["json", "text", "opaque"], policy: Policy) -> Parsed:
    """Refuse what another reader might run as a pickle.

    A pickle of protocol 0 or 1 has no signature, and may be plain text. Its name keeps our loader away from it, and not
    another's. It is let through only if the machine stops where every reader stops, before anything was called.
    """
    machine = _AnyProtocol(MemorySource(data), policy)
    parsed = parse_pickle(machine.source, policy, machine=machine)
    stopped_by = None if parsed.refusal is None else parsed.refusal.findings[-1].code
    if stopped_by in _NO_PICKLE_TO_ANY_READER and not machine.refused_calls:
        return Parsed()
    message = f"expected {_NOUN[content]}, found what some readers would run as a pickle"
    return _refuse("name-contradicts-content", message, 0)


_NO_PICKLE_TO_ANY_READER = {
    "bad-number",
    "bad-text",
    "empty-file",
    "no-mark",
    "opcode-not-allowed",
    "not-a-pickle",
    "stack-underflow",
    "truncated",
    "unknown-memo-index",
    "unknown-opcode",
}
"""Where CPython stops as well. At everything else only this machine may have stopped, because it is stricter."""


class _AnyProtocol(Machine):
    """Runs the opcodes of every protocol, whatever the file declares, as CPython does."""

    def _handlers(self, newest: int) -> tuple[Callable[[Machine], None] | None, ...]:
        return super()._handlers(max(newest, 5))


def _refuse(code: str, message: str, offset: int | None = None, hint: str | None = None) -> Parsed:
    return Parsed(refusal=FormatError(Finding(code, message, offset=offset, hint=hint)))
