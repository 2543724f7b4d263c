"""The pickle machine: runs a pickle on symbols, and says where its tensors lie.

It decides all 68 opcodes of protocols 0 to 5. It executes the stack and the memo exactly, so the global that is
judged is the global that `pickle.load` would resolve; but it imports nothing, calls nothing and builds no object of
the file's choosing. Payloads are jumped over, not read. It is the only pickle reader of safeload, so there is no second
one to disagree with it.

Time is linear in the number of opcodes, memory is bounded by the policy's limits, whatever the bytes are.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, NoReturn, TypeAlias

from safeload.errors import Finding, FormatError, LimitError, PolicyError, RejectedError, escape
from safeload.formats import WINDOW_BYTES, Parsed, Source
from safeload.formats.pickles.constructors import (
    CONSTRUCTORS,
    NAME,
    Constructor,
    build_array,
    build_dtype,
    build_record,
    describe,
    new_record,
    refuse,
    set_item,
)
from safeload.formats.pickles.opcodes import OPCODES
from safeload.formats.pickles.results import Results
from safeload.formats.pickles.symbols import (
    REFUSED,
    Global,
    OrderedMapping,
    Payload,
    PendingArray,
    PendingDType,
    PendingRecord,
    Refused,
)
from safeload.policy import Policy
from safeload.tensors import Extent, Value

HEAD_BYTES = 256
"""Byte strings up to this length are kept as well as pointed at: they may be names, codes or plain values."""

PYTHON_2_HEAD_BYTES = 4096
"""The same for Python 2's strings, each of which may be text."""

MAX_NAME_CHARACTERS = 512
"""Length of a module or class name. The longest allowed one has 45."""

MAX_NUMBER_BYTES = 128
"""How much of a number's text is looked at to say whether other readers would take it; it is refused either way."""

MAX_FINDINGS = 64
"""Findings a file after which it is not looked at further: its author could make any number of them."""

MAX_INTEGER_BYTES = 32
"""Size of an integer: 256 bits, twice what the largest honest one (a random generator's state) has."""

_INSTEAD: Final = {
    "collections.Counter": "save `dict(x)` instead",
    "collections.defaultdict": "save `dict(x)` instead: what it makes of a key that is not there is code",
    "collections.deque": "save `list(x)` instead",
}
"""Containers of the standard library that hold plain data and are none."""

_BUILTINS = frozenset({"__builtin__", "builtins"})
"""What Python 2 and Python 3 call the module of what needs no import."""

_UNSET = object()

_NO_FRAME = 1 << 64
"""Where the current frame ends while there is none: behind every offset that a file can have."""

# Decimal, without sign tricks, leading zeros, spaces or underscores. CPython reads these opcodes with `strtol(.., 0)`
# or `int(.., 0)`, depending on the version, so that `0x10`, `010` or `1_0` mean different numbers to different
# readers; no pickler writes them.
_DECIMAL = re.compile(rb"(?:-?[1-9][0-9]{0,77}|0)")
_FLOAT = re.compile(rb"(?:-?[0-9]{1,20}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,3})?|-?inf|nan)")
# What `repr` of a Python 2 string writes. Other escapes mean different things to different versions.
# Possessive, so that a long string costs no memory to match.
_ESCAPED = rb"""(?:\\(?:[\\'"nrtabfv]|x[0-9a-f]{2})[^\\%s]*+)*+"""
_QUOTED = re.compile(b"|".join(rb"%s[^\\%s]*+%s%s" % (q, q, _ESCAPED % q, q) for q in (b"'", b'"')))

_Handler: TypeAlias = "Callable[[Machine], None]"

FIRST_WINDOW_BYTES = 2 * 1024
"""How much is read first, at the start and behind each payload: a shard's opcodes have a few hundred bytes."""


class Machine:
    """One run over one pickle. Use `parse_pickle`."""

    constructors: ClassVar[Mapping[tuple[str, str], tuple[Constructor | None, range]]] = CONSTRUCTORS
    """The calls that it knows, as `CONSTRUCTORS` describes them."""

    def __init__(self, source: Source, policy: Policy, *, first: int = 0) -> None:
        """Get ready to run.

        Args:
            source: The file's bytes; the pickle ends where they do.
            policy: What is allowed, and the limits.
            first: Byte offset at which the pickle begins.
        """
        self.source = source
        self.policy = policy
        self.globals: dict[tuple[str, str], Global | Refused] = {}
        self.findings: list[Finding] = []
        self._rules = policy.pickle
        self._limits = policy.limits
        self._window = b""
        self._first = first
        self._base = first  # offset of the window's first byte
        self._at = 0  # index in the window of the next byte to read
        self._step = FIRST_WINDOW_BYTES  # how much the next window takes
        self._start = first  # offset of the opcode that is being run
        self._frame_end = _NO_FRAME
        self._protocol: int | None = None
        self._stack: list[object] = []
        self._outer: list[list[object]] = []  # the stacks below each open mark
        # A list, as in CPython: in a dict, indices of the file's choice can be made to collide a million times each.
        self._memo: list[object] = []
        self._n_memo = 0
        self._n_payloads = 0
        self._inline_bytes = 0
        self._n_stored = 0
        self._n_charged = 0
        self.refused_calls = 0  # what `pickle.load` would have called, or gone on behind, and is refused here

    # ---------------------------------------------------------------- reading

    def _fail(self, code: str, message: str, hint: str | None = None) -> NoReturn:
        refuse(code, message, self._start, hint)

    def _limit(self, name: str, asked: str) -> NoReturn:
        bound = getattr(self._limits, name)
        raise LimitError(
            Finding(
                "limit-exceeded",
                f"{asked}; the policy allows {bound:,}",
                offset=self._start,
                hint=self.policy.admits_by("[limits]", f"`{name}` with a larger number, if the file is honest"),
            )
        )

    def _refill(self, nbytes: int) -> None:
        """Make the window begin at the next byte, and hold at least `nbytes`."""
        here = self._base + self._at
        if nbytes > self.source.size - here:
            left = max(self.source.size - here, 0)
            self._fail("truncated", f"expected {nbytes} more byte(s), found the end of the file after {left}")
        if self._at > len(self._window):
            # Behind a payload: what follows may be the last few opcodes, which a source far away need not pay more for.
            self._step = FIRST_WINDOW_BYTES
        self._window = self.source.read(here, max(nbytes, self._step))
        self._step = min(2 * self._step, WINDOW_BYTES)
        self._base, self._at = here, 0
        if len(self._window) < nbytes:
            self._fail("truncated", f"expected {nbytes} more byte(s), found {len(self._window)}")
        # Each opcode adds at most one value, and a window holds at most so many opcodes: often enough.
        self._check_memory()

    def _check_memory(self) -> None:
        items = len(self._stack) + sum(map(len, self._outer))
        if items > self._limits.max_stack_items:
            self._limit("max_stack_items", f"{items:,} values on the stack")
        if self._n_payloads > self._limits.max_values:
            self._limit("max_values", f"{self._n_payloads:,} byte strings")

    def _take(self, nbytes: int) -> bytes:
        if self._at + nbytes > len(self._window):
            self._refill(nbytes)
        start = self._at
        self._at = start + nbytes
        return self._window[start : self._at]

    def _byte(self) -> int:
        if self._at >= len(self._window):
            self._refill(1)
        self._at += 1
        return self._window[self._at - 1]

    def _length(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _charge(self, n_operations: int) -> None:
        """Count work that one opcode makes proportional to something else than its own length."""
        self._n_charged += n_operations
        if self._n_charged > self._limits.max_operations:
            self._limit("max_operations", f"calls that handle {self._n_charged:,} values")

    def _store(self, n_values: int) -> None:
        """Count values that containers hold: each will be one of the result's."""
        self._n_stored += n_values
        if self._n_stored > self._limits.max_values:
            self._limit("max_values", f"{self._n_stored:,} values in containers")

    def _inline(self, nbytes: int) -> None:
        self._inline_bytes += nbytes
        if self._inline_bytes > self._limits.max_inline_bytes:
            self._limit("max_inline_bytes", f"{self._inline_bytes:,} bytes of text and escaped data")

    def _line(self) -> bytes:
        """Return the bytes up to the next line feed, and go behind it."""
        parts: list[bytes] = []
        while (end := self._window.find(b"\n", self._at)) < 0:
            part = self._window[self._at :]
            self._inline(len(part))
            parts.append(part)
            self._at = len(self._window)
            self._refill(1)
        parts.append(self._window[self._at : end])
        self._inline(end - self._at)
        self._at = end + 1
        return b"".join(parts)

    def _text(self, nbytes: int) -> str:
        if nbytes > self.source.size - self._base - self._at:
            self._refill(nbytes)  # raises: there are not so many bytes
        self._inline(nbytes)
        try:
            text = str(self._take(nbytes), "utf-8")
        except UnicodeDecodeError as err:
            raise FormatError(
                Finding(
                    "not-utf-8",
                    f"a string must be UTF-8, found byte {err.object[err.start]:#04x} at its byte {err.start}",
                    offset=self._start,
                )
            ) from err
        if not text.isascii():
            # One character beyond U+00FF makes each of them take two bytes or four.
            self._inline(max(sys.getsizeof(text) - nbytes, 0))
        return text

    def _payload(self, nbytes: int, kind: str) -> None:
        here = self._base + self._at
        if nbytes > self.source.size - here:
            self._refill(nbytes)  # raises: there are not so many bytes
        self._n_payloads += 1
        self.source.payload(here, nbytes)
        if nbytes <= (PYTHON_2_HEAD_BYTES if kind == "str" else HEAD_BYTES):
            self._inline(nbytes)
            self._push(Payload(Extent(here, nbytes), kind, self._take(nbytes)))  # type: ignore[arg-type] # one of three
            return
        self._push(Payload(Extent(here, nbytes), kind, None))  # type: ignore[arg-type] # one of three
        self._at += nbytes
        if self._at > len(self._window):
            self._window, self._base, self._at = b"", here + nbytes, 0

    # ---------------------------------------------------------------- the stack

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _pop(self) -> object:
        if not self._stack:
            self._fail("stack-underflow", "expected a value on the stack, found none above the mark")
        return self._stack.pop()

    def _top(self) -> object:
        if not self._stack:
            self._fail("stack-underflow", "expected a value on the stack, found none above the mark")
        return self._stack[-1]

    def _pop_mark(self) -> list[object]:
        if not self._outer:
            self._fail("no-mark", "expected an open mark, found none")
        items = self._stack
        self._stack = self._outer.pop()
        return items

    # ---------------------------------------------------------------- running

    def run(self) -> object:
        """Run to STOP and return the one value that is left.

        Raises:
            RejectedError: The bytes are no well-formed pickle of allowed opcodes, or exceed a limit.
        """
        handlers = self._handlers(self._header())
        for _ in range(self._limits.max_operations):
            at = self._at
            self._start = start = self._base + at
            if start >= self._frame_end:
                self._close_frame()
            if at >= len(self._window):
                self._refill(1)
                at = 0
            handler = handlers[self._window[at]]
            self._at = at + 1
            if handler is None:  # STOP
                return self._stop()
            handler(self)
        self._start = self._base + self._at
        return self._limit("max_operations", f"more than {self._limits.max_operations:,} opcodes")

    def _handlers(self, newest: int) -> tuple[_Handler | None, ...]:
        return _HANDLERS[newest]

    def _header(self) -> int:
        """Read PROTO, where there is one, and return the newest protocol whose opcodes may follow."""
        if self.source.size == self._first:
            self._fail("empty-file", "expected a pickle, found an empty file")
        self._refill(1)
        if self._window[0] != _PROTO:
            # Protocols 0 and 1 have no header. Protocol 2's opcodes are let through without one, as CPython does
            # and as its own tests write them; framing and STACK_GLOBAL are not.
            allowed, found, newest = bool({0, 1} & set(self._rules.protocols)), "0 or 1 (no PROTO header)", 2
        else:
            self._at = 1
            self._protocol = newest = self._byte()
            if newest > max(_HANDLERS):
                self._fail("unknown-protocol", f"expected a protocol from 2 to 5, found {newest}")
            allowed, found = newest in self._rules.protocols, str(newest)
        if not allowed:
            self.findings.append(
                Finding(
                    "protocol-not-allowed",
                    f"policy {self.policy.name} allows pickle protocols "
                    f"{', '.join(map(str, self._rules.protocols))}; found {found}",
                    offset=self._first,
                    hint=self.policy.admits_by(
                        "[pickle]", f"with {0 if self._protocol is None else newest} in `protocols`"
                    ),
                )
            )
        return newest

    def _close_frame(self) -> None:
        if self._base + self._at > self._frame_end:
            self._fail("frame-straddled", f"an opcode must lie inside its frame, which ended at byte {self._frame_end}")
        self._frame_end = _NO_FRAME

    def _stop(self) -> object:
        end = self._base + self._at
        if end > self._frame_end:
            self._close_frame()
        if self._outer or len(self._stack) != 1:
            self._fail(
                "bad-stop",
                f"expected one value and no open mark at the end, found {len(self._stack)} value(s) and "
                f"{len(self._outer)} mark(s)",
            )
        self._check_end(end)
        return self._stack[0]

    def _check_end(self, end: int) -> None:
        """Refuse what follows the pickle, which ended before byte `end`."""
        if end != self.source.size:
            self._start = end
            self._fail(
                "data-after-stop",
                f"expected the end of the file, found {self.source.size - end} more byte(s)",
                "a shard is exactly one pickle; what follows it would be loaded by some readers and not by others",
            )

    def _not_an_opcode(self) -> None:
        byte = self._window[self._at - 1]
        if self._start == 0:
            self._fail(
                "not-a-pickle",
                f"expected a pickle, found a file that begins {self._window[:8]!r}",
                "move it out of the directory",
            )
        self._fail("unknown-opcode", f"expected a pickle opcode, found byte {byte:#04x}")

    def _too_new(self) -> None:
        opcode = OPCODES[self._window[self._at - 1]]
        declared = "no protocol" if self._protocol is None else f"protocol {self._protocol}"
        self._fail("opcode-too-new", f"the file declares {declared}, found {opcode.name} of protocol {opcode.protocol}")

    def _refused_opcode(self) -> None:
        opcode = OPCODES[self._window[self._at - 1]]
        if opcode.name == "INST":
            module, name = self._name_line(), self._name_line()
            self._push(self._resolve(module, name))
            # Text may begin with this opcode's letter; what no module can be called is no call.
            self.refused_calls += all(NAME.fullmatch(part) is not None for part in f"{module}.{name}".split("."))
        elif opcode.name in {"OBJ", "NEWOBJ_EX"}:
            self.refused_calls += any(value is REFUSED for value in self._stack)
        elif opcode.name in {"EMPTY_SET", "ADDITEMS", "FROZENSET"}:
            self.refused_calls += 1  # no call, but others go on behind it to whatever comes
        raise PolicyError(
            Finding(
                "opcode-not-allowed",
                f"opcode {opcode.name} is never allowed: {opcode.refused}",
                offset=self._start,
                hint="write the tensors again, as plain arrays, with a tool that you trust",
            )
        )

    # ---------------------------------------------------------------- opcodes: structure

    def _proto(self) -> None:
        self._fail("misplaced-proto", "PROTO stands at the beginning and nowhere else")

    def _frame(self) -> None:
        length = self._length(8)
        here = self._base + self._at
        if self._frame_end != _NO_FRAME:
            self._fail("nested-frame", f"expected no frame inside a frame, which ends at byte {self._frame_end}")
        if length > self.source.size - here:
            self._fail("truncated", f"a frame of {length} bytes does not fit in the {self.source.size - here} left")
        self._frame_end = here + length

    def _mark(self) -> None:
        # Every container under construction holds one mark, and its state another.
        if len(self._outer) >= 2 * self._limits.max_depth:
            self._limit("max_depth", f"{len(self._outer) + 1} open marks, two for each level of containers")
        self._outer.append(self._stack)
        self._stack = []

    def _pop_value(self) -> None:
        # CPython's POP on an empty stack takes the mark below it.
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _drop_mark(self) -> None:
        self._pop_mark()

    def _dup(self) -> None:
        self._push(self._top())

    def _memoize(self) -> None:
        self._put(self._n_memo)

    def _put(self, index: int) -> None:
        # CPython's memo is an array as long as its largest index, so an index costs there what entries cost here.
        if index >= self._limits.max_memo_entries:
            self._limit("max_memo_entries", f"memo index {index:,}")
        value = self._top()
        memo = self._memo
        if index >= len(memo):
            memo += [_UNSET] * (index - len(memo) + 1)
        self._n_memo += memo[index] is _UNSET
        memo[index] = value

    def _index_line(self) -> int:
        index = self._decimal(self._line())
        if index < 0:
            self._fail("bad-memo-index", f"a memo index is not negative, found {index}")
        return index

    def _put_line(self) -> None:
        self._put(self._index_line())

    def _binput(self) -> None:
        self._put(self._byte())

    def _long_binput(self) -> None:
        self._put(self._length(4))

    def _get(self, index: int) -> None:
        value = self._memo[index] if index < len(self._memo) else _UNSET
        if value is _UNSET:
            self._fail("unknown-memo-index", f"expected a memo index that was stored before, found {index}")
        self._stack.append(value)

    def _get_line(self) -> None:
        self._get(self._index_line())

    def _binget(self) -> None:
        self._get(self._byte())

    def _long_binget(self) -> None:
        self._get(self._length(4))

    # ---------------------------------------------------------------- opcodes: plain values

    def _none(self) -> None:
        self._stack.append(None)

    def _newtrue(self) -> None:
        self._stack.append(True)

    def _newfalse(self) -> None:
        self._stack.append(False)

    def _binint1(self) -> None:
        self._stack.append(self._byte())

    def _binint2(self) -> None:
        self._stack.append(self._length(2))

    def _binint(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _decimal(self, line: bytes) -> int:
        if not _DECIMAL.fullmatch(line):
            self._bad_number(line, "integer", int, lambda text: int(text, 0))
        return int(line)

    def _bad_number(self, line: bytes, kind: str, *readers: Callable[[bytes], object]) -> NoReturn:
        """Refuse a number, and say whether any reader would take it for one."""
        message = f"expected a plain decimal {kind}, found {line[:40]!r}"
        for read in readers:
            with contextlib.suppress(ValueError):
                read(line[:MAX_NUMBER_BYTES])
                self._fail("ambiguous-number", f"{message}, which readers differ about")
        self._fail("bad-number", message)

    def _int(self) -> None:
        line = self._line()
        self._push(line == b"01" if line in {b"00", b"01"} else self._decimal(line))

    def _long(self) -> None:
        line = self._line()
        self._push(self._decimal(line[:-1] if line.endswith(b"L") else line))

    def _long_bytes(self, nbytes: int) -> None:
        if nbytes > MAX_INTEGER_BYTES:
            self._fail("integer-too-long", f"an integer has at most {MAX_INTEGER_BYTES} bytes, found {nbytes}")
        self._push(int.from_bytes(self._take(nbytes), "little", signed=True))

    def _long1(self) -> None:
        self._long_bytes(self._byte())

    def _long4(self) -> None:
        self._long_bytes(self._length(4))  # a negative length, in CPython an error, is a very long one here

    def _float(self) -> None:
        line = self._line()
        if not _FLOAT.fullmatch(line):
            self._bad_number(line, "float", float)
        value = float(line)
        if math.isinf(value) and not line.endswith(b"inf"):
            # An overflow is an error to CPython's C reader and infinity to its Python one.
            self._bad_number(line, "float of 64 bits", float)
        self._push(value)

    def _binfloat(self) -> None:
        self._push(struct.unpack(">d", self._take(8))[0])

    def _short_binunicode(self) -> None:
        self._stack.append(self._text(self._byte()))

    def _binunicode(self) -> None:
        self._stack.append(self._text(self._length(4)))

    def _binunicode8(self) -> None:
        self._stack.append(self._text(self._length(8)))

    def _unicode(self) -> None:
        line = self._line()
        try:
            text = str(line, "raw-unicode-escape")
        except UnicodeDecodeError:
            self._fail("bad-text", "expected text with well-formed \\u escapes")
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            self._fail("not-utf-8", "a string must be Unicode, found an unpaired surrogate")
        self._push(text)

    def _string(self) -> None:
        line = self._line()
        if not _QUOTED.fullmatch(line):
            message = f"expected a quoted string as Python 2 writes it, found {line[:40]!r}"
            if len(line) > 1 and line[0] == line[-1] and line[:1] in {b"'", b'"'}:
                self._fail("ambiguous-text", f"{message}, which readers differ about")
            self._fail("bad-text", message)
        data = codecs.escape_decode(line[1:-1])[0]
        self._push(Payload(Extent(self._start, len(data), data), "str", data))

    def _binstring(self) -> None:
        length = self._length(4)
        if length >= 1 << 31:
            self._fail("bad-length", f"a length of 4 bytes is signed here, found {length - (1 << 32)}")
        self._payload(length, "str")

    def _short_binstring(self) -> None:
        self._payload(self._byte(), "str")

    def _binbytes(self) -> None:
        self._payload(self._length(4), "bytes")

    def _short_binbytes(self) -> None:
        self._payload(self._byte(), "bytes")

    def _binbytes8(self) -> None:
        self._payload(self._length(8), "bytes")

    def _bytearray8(self) -> None:
        self._payload(self._length(8), "bytearray")

    # ---------------------------------------------------------------- opcodes: containers

    def _empty_tuple(self) -> None:
        self._push(())

    def _tuple(self) -> None:
        items = self._pop_mark()
        self._push(tuple(items))

    def _tuple1(self) -> None:
        self._push((self._pop(),))

    def _tuple2(self) -> None:
        second = self._pop()
        self._push((self._pop(), second))

    def _tuple3(self) -> None:
        third = self._pop()
        second = self._pop()
        self._push((self._pop(), second, third))

    def _empty_list(self) -> None:
        self._push([])

    def _list(self) -> None:
        items = self._pop_mark()
        self._store(len(items))
        self._push(items)

    def _append(self) -> None:
        value = self._pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self._pop_mark())

    def _extend(self, values: list[object]) -> None:
        target = self._top()
        if target is REFUSED:
            return
        if type(target) is not list:
            self._fail("bad-append", f"expected a list to append to, found {describe(target)}")
        self._store(len(values))
        target.extend(values)

    def _empty_dict(self) -> None:
        self._push({})

    def _dict(self) -> None:
        items = self._pop_mark()
        self._push({})
        self._update(items)

    def _setitem(self) -> None:
        value = self._pop()
        key = self._pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self._pop_mark())

    def _update(self, items: list[object]) -> None:
        target = self._top()
        if len(items) % 2:
            self._fail("bad-items", f"expected keys and values in pairs, found {len(items)} items")
        if target is REFUSED:
            return
        if type(target) is not dict and type(target) is not OrderedMapping:
            self._fail("bad-setitem", f"expected a dict to store in, found {describe(target)}")
        if type(target) is OrderedMapping and target.is_sealed:
            self._fail("bad-setitem", "expected backward hooks to stay empty, found an item for them")
        self._store(len(items) // 2)
        for index in range(0, len(items), 2):
            set_item(target, items[index], items[index + 1], self._start)

    # ---------------------------------------------------------------- opcodes: names, calls and state

    def _name_line(self) -> str:
        line = self._line()
        try:
            return str(line, "utf-8")
        except UnicodeDecodeError:
            self._fail("not-utf-8", f"a module or class name must be UTF-8, found {line[:40]!r}")

    def _global(self) -> None:
        module = self._name_line()
        self._push(self._resolve(module, self._name_line()))

    def _stack_global(self) -> None:
        name = self._pop()
        module = self._pop()
        if type(module) is not str or type(name) is not str:
            self._fail("bad-global", f"a global is named by two strings, found {describe(module)} and {describe(name)}")
        self._push(self._resolve(module, name))

    def _resolve(self, module: str, name: str) -> Global | Refused:
        known = self.globals.get((module, name))
        if known is None:
            known = self._judge(module, name)
            self.globals[module, name] = known
        return known

    def _judge(self, module: str, name: str) -> Global | Refused:
        if max(len(module), len(name)) > MAX_NAME_CHARACTERS:
            self._fail("bad-global", f"a module or class name has at most {MAX_NAME_CHARACTERS} characters")
        full = f"{module}.{name}"
        whole = NAME.fullmatch(name) is not None
        if whole and (record := self._rules.records_by_global.get(full)) is not None:
            return Global(module, name, record)
        known = self.constructors.get((module, name))
        spoken = (self._protocol or 0) in known[1] if known is not None else False
        if known is not None and spoken and full in self._rules.global_names:
            return Global(module, name)
        hint: str | None
        if known is not None and not spoken:
            hint = "this is Python 2's name, which only protocols 0 to 2 may use"
        elif known is not None:
            why = 'reason = "say here why it is harmless"'
            hint = self.policy.admits_by("[[pickle.globals]]", f'names = ["{full}"]', why)
        elif full in self._rules.global_names:
            hint = "only PyTorch's own files may name it, as `torch.save` writes them"
        elif (advice := self._advice(full)) is not None:
            hint = advice
        elif module in _BUILTINS:
            # Never a class of plain fields, and what is near to it in spelling is not so in meaning.
            is_set = name in {"set", "frozenset"}
            hint = "a set is no data that a checkpoint needs; save a list instead" if is_set else None
        else:
            import difflib

            close = difflib.get_close_matches(
                full[:100], [*self._rules.global_names, *self._rules.records_by_global], n=1, cutoff=0.75
            )
            hint = (
                f"the nearest that policy {self.policy.name} allows is {close[0]}; if this is a class of plain fields, "
                f"a policy can declare it under {self.policy.table_to_widen('[[pickle.records]]')}"
                if close
                else None
            )
        self.findings.append(
            Finding(
                "global-not-allowed",
                f"policy {self.policy.name} does not allow the global {escape(full)}",
                offset=self._start,
                hint=hint,
            )
        )
        if len(self.findings) >= MAX_FINDINGS:
            self._fail(
                "too-many-findings", f"{MAX_FINDINGS} findings are enough; the rest of the file was not looked at"
            )
        return REFUSED

    def _advice(self, full: str) -> str | None:
        """Say what to do about a global that no policy can allow, where that is known."""
        return _INSTEAD.get(full)

    def _reduce(self) -> None:
        args = self._pop()
        function = self._pop()
        if function is REFUSED or args is REFUSED:
            self.refused_calls += function is REFUSED
            self._push(REFUSED)
            return
        if type(function) is not Global:
            self._fail("bad-call", f"only an allowed global can be called, found {describe(function)}")
        if type(args) is not tuple:
            self._fail("bad-call", f"arguments must be a tuple, found {describe(args)}")
        self._charge(len(args))
        if any(arg is REFUSED for arg in args):
            self._push(REFUSED)
            return
        if function.record is not None:
            record = PendingRecord(function.record, self._start)
            if len(args) != len(function.record.fields):
                self._fail(
                    "bad-arguments",
                    f"{function.name} takes its {len(function.record.fields)} fields, found {len(args)}",
                )
            build_record(record, dict(zip(function.record.fields, args, strict=True)), self._start)
            self._push(record)
            return
        construct = self.constructors[function.module, function.name][0]
        if construct is None:
            self._fail("bad-call", f"{function} is only ever an argument, found a call of it")
        if args and type(args[0]) is list:
            self._store(len(args[0]))
        elif args and type(args[0]) is str:
            self._inline(len(args[0]))
        self._push(construct(args, self._start))

    def _newobj(self) -> None:
        args = self._pop()
        cls = self._pop()
        if cls is REFUSED or args is REFUSED:
            self.refused_calls += cls is REFUSED
            self._push(REFUSED)
            return
        if type(cls) is not Global:
            self._fail("bad-call", f"only a declared record can be instantiated, found {describe(cls)}")
        self._push(new_record(cls, args, self._start))

    def _build(self) -> None:
        state = self._pop()
        target = self._top()
        if target is REFUSED or state is REFUSED:
            return
        if type(target) is PendingArray:
            build_array(target, state, self._start)
        elif type(target) is PendingDType:
            build_dtype(target, state, self._start)
        elif type(target) is PendingRecord:
            build_record(target, state, self._start)
        else:
            self._build_other(target, state)

    def _build_other(self, target: object, state: object) -> None:  # noqa: ARG002 - a kind of file may take one
        self._fail("bad-build", f"expected an array, a dtype or a record to give a state to, found {describe(target)}")


_PROTO = 0x80

_METHODS: dict[str, _Handler] = {
    "POP": Machine._pop_value,
    "POP_MARK": Machine._drop_mark,
    "PUT": Machine._put_line,
    "GET": Machine._get_line,
    **{
        name: getattr(Machine, f"_{name.lower()}")
        for name in (opcode.name for opcode in OPCODES.values() if opcode.refused is None)
        if name not in {"POP", "POP_MARK", "PUT", "GET", "STOP"}
    },
}


def _handlers(newest: int) -> tuple[_Handler | None, ...]:
    """Return what each byte does in a file that may use opcodes up to protocol `newest`; None is STOP."""
    table: list[_Handler | None] = [Machine._not_an_opcode] * 256
    for byte, opcode in OPCODES.items():
        if opcode.protocol > newest:
            table[byte] = Machine._too_new
        elif opcode.refused is not None:
            table[byte] = Machine._refused_opcode
        else:
            table[byte] = None if opcode.name == "STOP" else _METHODS[opcode.name]
    return tuple(table)


_HANDLERS = {newest: _handlers(newest) for newest in range(6)}


def parse_pickle(source: Source, policy: Policy, *, machine: Machine | None = None) -> Parsed:
    """Say what tensors a pickle holds and where they lie, or why it is refused.

    The claim: for any bytes, either the result carries a refusal, or `pickle.load` would give the same value with
    bit-identical arrays (numpy scalars and jax arrays are read as the numpy arrays that they hold). Nothing is
    imported, nothing is called, and time and memory stay within the policy's limits.

    Args:
        source: The file's bytes.
        policy: Which globals, records and protocols are allowed, and the limits.
        machine: What runs it, made of the same two; None for the plain one.
    """
    machine = machine or Machine(source, policy)
    value = None
    results = Results(policy)
    error: RejectedError | None = None
    try:
        value = results.convert(machine.run(), has_refusals=bool(machine.findings))
    except RejectedError as err:
        error = err
    return concluded((machine,), value, results, error)


def concluded(machines: Sequence[Machine], value: Value, results: Results, error: RejectedError | None) -> Parsed:
    """Return what the runs over one file come to.

    Args:
        machines: Each run over a pickle in it, in order.
        value: What the file holds, if it is not refused.
        results: What converted the value.
        error: What ended the parsing, if something did.
    """
    found = tuple(finding for machine in machines for finding in machine.findings)
    findings = (*found, *(error.findings if error is not None else ()))
    refusal = None
    if findings:
        # A global that is not allowed is the cause; what breaks behind it is a consequence.
        refusal = PolicyError(*findings) if found or error is None else error
    names = tuple(dict.fromkeys(f"{module}.{name}" for machine in machines for module, name in machine.globals))
    if refusal is not None:
        return Parsed(globals=names, refusal=refusal)
    return Parsed(value=value, tensors=tuple(results.tensors), globals=names)
