"""Files that are data and no tensors: checked for being what they claim. The loader never opens them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

from safeload.errors import Finding, FormatError, LimitError, RejectedError, escape
from safeload.formats import MemorySource, Parsed, Source
from safeload.formats.detection import HEAD_BYTES, detect
from safeload.formats.pickles.constructors import NAME
from safeload.formats.pickles.machine import Machine, parse_pickle
from safeload.policy import Policy

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufffe\uffff]")
"""Characters that no text file needs and that a terminal may obey. Tab, line feed, form feed and return may stay."""


_STORED = frozenset({"ocdbt", "zstd"})
"""What a part of an array store may begin like: TensorStore's key-value store, and a chunk as Zarr compresses it."""

_PREFIX_BYTES = 64 * 1024
"""How much of such a part is looked at. They are as large as the tensors in them, and nothing of ours reads them."""


def check_inert(source: Source, content: Literal["json", "text", "opaque", "store"], policy: Policy) -> Parsed:
    """Say whether a file is the inert data that the policy takes it for, by its name.

    Args:
        source: The file's bytes.
        content: "json": UTF-8 and one JSON value; "text": UTF-8 without control characters; "opaque": any bytes
            that are not those of a pickle, nor begin as an archive or a program does (a picture may); "store": the
            same of the beginning of a file of any size, which may be a part of TensorStore's OCDBT or compressed by
            zstd.
        policy: Its limits bound the size.
    """
    if content == "store":
        return _check_stored(source, policy)
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
    if kind is not None and not (kind.is_plain and content == "opaque"):
        hint = kind.advice or "a pickle belongs in a file of tensors, where it is scanned as one"
        return _refuse("name-contradicts-content", f"expected {_NOUN[content]}, found {kind.noun}", hint=hint)
    refused = Parsed() if content == "opaque" else _check_text(data, content, limit=policy.limits.max_values)
    return refused if refused.refusal is not None else _check_for_pickle(data, content, policy)


def _check_stored(source: Source, policy: Policy) -> Parsed:
    data = source.read(0, _PREFIX_BYTES)
    kind = detect(data[:HEAD_BYTES], source.size)
    if kind is None or kind.is_plain:
        if not data or is_no_pickle(data, policy, whole=source.size <= _PREFIX_BYTES):
            return Parsed()
        message = "expected a part of an array store, found what some readers would run as a pickle"
        return _refuse("name-contradicts-content", message, 0)
    if kind.name in _STORED:
        return Parsed()
    return _refuse("name-contradicts-content", f"expected a part of an array store, found {kind.noun}", 0)


class _DuplicateKeyError(Exception):
    """Raised inside of `json.loads`, and caught around it."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(key)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON, each of whose keys has one value: RFC 8259 leaves it open which of two counts."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return made


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
            json.loads(body, object_pairs_hook=_without_duplicates)
        except _DuplicateKeyError as err:
            message = f"expected each key once in an object, found {escape(err.key, limit=80)!r} twice"
            return _refuse("duplicate-key", message, hint="leave one of the two: readers differ in which they take")
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
    if is_no_pickle(data, policy):
        return Parsed()
    message = f"expected {_NOUN[content]}, found what some readers would run as a pickle"
    return _refuse("name-contradicts-content", message, 0)


def is_no_pickle(data: bytes, policy: Policy, *, whole: bool = True) -> bool:
    """Whether every reader of pickles stops within these bytes, before it has called anything.

    Args:
        data: A file, or its first bytes.
        policy: Its limits bound the work.
        whole: Whether `data` is all of the file. If not, a reader that comes to its end has not stopped.
    """
    machine = _AnyProtocol(MemorySource(data), policy)
    parsed = parse_pickle(machine.source, policy, machine=machine)
    stopped_by = None if parsed.refusal is None else parsed.refusal.findings[-1].code
    stopped = stopped_by in _NO_PICKLE_TO_ANY_READER and (whole or stopped_by != "truncated")
    return stopped and not machine.refused_calls


def may_be_pickle(head: bytes, policy: Policy, *, whole: bool) -> bool:
    """Whether a file in the format of safetensors or GGUF was made to be a pickle as well.

    An honest one may begin with any opcode, as the length of a header comes first, or `G`, and stops every reader of
    pickles at the zeros of that length, or of the number of tensors, or soon after. So it counts only if something was
    named or refused to be called, or if nobody can say what a reader does that went past the first number.

    Args:
        head: The file, or its first bytes.
        policy: Its limits bound the work.
        whole: Whether `head` is all of the file. If not, a reader that comes to its end has not stopped.
    """
    machine = _AnyProtocol(MemorySource(head), policy)
    parsed = parse_pickle(machine.source, policy, machine=machine)
    if parsed.refusal is None or parsed.globals:
        return True
    stop = parsed.refusal.findings[-1]
    if stop.code == "truncated" and not whole:
        return True
    harmless = stop.code in _NO_PICKLE_TO_ANY_READER | {"bad-stop", "data-after-stop"} and not machine.refused_calls
    return not harmless and (stop.offset or 0) >= _LENGTH_BYTES


def stopped_at_once(machine: Machine, refusal: RejectedError) -> bool:
    """Whether what was run as a pickle is rather none: nothing was named, nothing called, and no value came of it.

    It is refused either way. This tells the two reasons apart that a person may be given: "this pickle is broken or
    hostile", and "this is no format that is known".

    Args:
        machine: What ran it.
        refusal: What it ended with.
    """
    named = any(all(NAME.fullmatch(part) for part in f"{m}.{name}".split(".")) for m, name in machine.globals)
    last = refusal.findings[-1]
    return not named and not machine.refused_calls and (last.code in _NO_SIGN_OF_A_PICKLE or last.offset == 0)


_LENGTH_BYTES = 8
"""Length of the number that a safetensors file begins with; a GGUF file begins with a number of 4 after 4 letters."""


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


_NO_SIGN_OF_A_PICKLE = _NO_PICKLE_TO_ANY_READER | {
    "ambiguous-number",
    "ambiguous-text",
    "bad-append",
    "bad-build",
    "bad-call",
    "bad-global",
    "bad-items",
    "bad-length",
    "bad-memo-index",
    "bad-setitem",
    "bad-stop",
    "global-not-allowed",
    "integer-too-long",
    "not-utf-8",
}
"""What a text, or any bytes, that are run as opcodes end with."""


class _AnyProtocol(Machine):
    """Runs the opcodes of every protocol, whatever the file declares, as CPython does."""

    def _handlers(self, newest: int) -> tuple[Callable[[Machine], None] | None, ...]:
        return super()._handlers(max(newest, 5))


def _refuse(code: str, message: str, offset: int | None = None, hint: str | None = None) -> Parsed:
    return Parsed(refusal=FormatError(Finding(code, message, offset=offset, hint=hint)))
