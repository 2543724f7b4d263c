"""A pickle assembler: streams built opcode by opcode, from bytes, so that hostile ones need no pickler and no gadget.

The opcodes' bytes and the encodings of their arguments come from CPython's `pickletools`, not from the package that
is tested. Everything is deterministic.
"""

from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from safeload.errors import RejectedError
from safeload.formats import MemorySource, Parsed
from safeload.formats.pickles import parse_pickle
from safeload.policy import AllowedGlobals, Limits, PickleRules, Policy, load_policy

_TABLE = {info.name: info for info in pickletools.opcodes}
_UNSIGNED = {"uint1": 1, "uint2": 2, "uint4": 4, "uint8": 8}
_COUNTED = {
    "string1": 1,
    "string4": 4,
    "bytes1": 1,
    "bytes4": 4,
    "bytes8": 8,
    "bytearray8": 8,
    "unicodestring1": 1,
    "unicodestring4": 4,
    "unicodestring8": 8,
    "long1": 1,
    "long4": 4,
}


def two_complement(number: int) -> bytes:
    """The shortest little-endian form, as `pickle.encode_long` writes it."""
    return b"" if number == 0 else number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


def _argument(kind: str, values: tuple[Any, ...], length: int | None) -> bytes:
    if kind in _UNSIGNED:
        return int(values[0]).to_bytes(_UNSIGNED[kind], "little")
    if kind == "int4":
        return struct.pack("<i", values[0])
    if kind == "float8":
        return struct.pack(">d", values[0])
    if kind in _COUNTED:
        value = values[0]
        data = two_complement(value) if isinstance(value, int) else _raw(value)
        return (len(data) if length is None else length).to_bytes(_COUNTED[kind], "little") + data
    # What is left are lines: numbers, names, text.
    return b"".join(_raw(value) + b"\n" for value in values)


def _raw(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class _Opcodes:
    """`op.BININT1(7)`: the bytes of one opcode and its argument; `length=` lets a counted argument lie."""

    def __getattr__(self, name: str) -> Callable[..., bytes]:
        if name not in _TABLE:
            raise AttributeError(name)
        info = _TABLE[name]
        code = info.code.encode("latin-1")

        def encode(*values: Any, length: int | None = None) -> bytes:
            if info.arg is None:
                assert not values
                return code
            return code + _argument(info.arg.name, values, length)

        return encode


op = _Opcodes()


def _replace(parts: dict[str, bytes], replaced: Mapping[str, bytes]) -> list[bytes]:
    assert {f"{name}_" for name in parts} >= replaced.keys()
    return [replaced.get(f"{name}_", value) for name, value in parts.items()]


@dataclass(frozen=True)
class Writer:
    """Opcodes for values, in the forms that one protocol has.

    Attributes:
        protocol: 0 to 5; 5 writes arrays by `_frombuffer`.
        python2: Write strings as Python 2's `str`.
        core: The module that holds numpy's C core.
    """

    protocol: int = 4
    python2: bool = False
    core: str = "numpy.core"

    def text(self, value: str) -> bytes:
        if self.python2:
            return op.STRING(repr(value)) if self.protocol == 0 else op.SHORT_BINSTRING(value)
        if self.protocol == 0:
            return op.UNICODE(value.encode("raw-unicode-escape"))
        short = self.protocol >= 4 and len(value.encode()) < 256
        return op.SHORT_BINUNICODE(value) if short else op.BINUNICODE(value)

    def integer(self, value: int) -> bytes:
        if self.protocol == 0:
            return op.INT(value) if abs(value) < 1 << 31 else op.LONG(f"{value}L")
        if 0 <= value < 256:
            return op.BININT1(value)
        if -(1 << 31) <= value < 1 << 31:
            return op.BININT(value)
        return op.LONG(f"{value}L") if self.protocol < 2 else op.LONG1(value)

    def boolean(self, value: bool) -> bytes:
        if self.protocol < 2:
            return op.INT("01" if value else "00")
        return op.NEWTRUE() if value else op.NEWFALSE()

    def tuple_(self, *items: bytes) -> bytes:
        if not items and self.protocol > 0:
            return op.EMPTY_TUPLE()
        short = {1: op.TUPLE1, 2: op.TUPLE2, 3: op.TUPLE3}.get(len(items)) if self.protocol >= 2 else None
        return b"".join(items) + short() if short else op.MARK() + b"".join(items) + op.TUPLE()

    def ints(self, *values: int) -> bytes:
        return self.tuple_(*map(self.integer, values))

    def glob(self, module: str, name: str) -> bytes:
        if self.protocol < 4:
            return op.GLOBAL(module, name)
        return self.text(module) + self.text(name) + op.STACK_GLOBAL()

    def call(self, module: str, name: str, *args: bytes) -> bytes:
        return self.glob(module, name) + self.tuple_(*args) + op.REDUCE()

    def data(self, value: bytes) -> bytes:
        if self.python2:
            return op.STRING(repr(value)[1:]) if self.protocol == 0 else op.BINSTRING(value)
        if self.protocol < 3:
            if not value:
                return self.call("__builtin__", "bytes")
            text = value.decode("latin-1")
            # CPython escapes what a line cannot hold.
            line = text.replace("\\", "\\u005c").replace("\0", "\\u0000").replace("\n", "\\u000a")
            line = line.replace("\r", "\\u000d").replace("\x1a", "\\u001a")
            written = op.UNICODE(line.encode("latin-1")) if self.protocol == 0 else op.BINUNICODE(text)
            return self.call("_codecs", "encode", written, self.text("latin1"))
        return op.SHORT_BINBYTES(value) if len(value) < 256 else op.BINBYTES(value)

    def dtype_state(
        self, order: str = "<", itemsize: int = -1, alignment: int = -1, flags: int = 0, **replaced: bytes
    ) -> bytes:
        """`replaced` puts opcodes in place of a part: `version_`, `order_`, and so on."""
        default = {
            "version": self.integer(3),
            "order": self.text(order),
            "subarray": op.NONE(),
            "names": op.NONE(),
            "fields": op.NONE(),
            "itemsize": self.integer(itemsize),
            "alignment": self.integer(alignment),
            "flags": self.integer(flags),
        }
        return self.tuple_(*_replace(default, replaced))

    def dtype(
        self, code: str = "f4", *, args: bytes | None = None, state: bytes | None = None, flags: int = 64
    ) -> bytes:
        """A dtype with its state; `code` is numpy's, with `>` before it for big-endian, or a name of ml_dtypes."""
        big, plain = code.startswith(">"), code.lstrip("<>")
        ml = len(plain) > 3
        if args is None:
            kind = self.glob("ml_dtypes", plain) if ml else self.text(plain)
            no, yes = (self.integer(0), self.integer(1)) if self.python2 else (self.boolean(False), self.boolean(True))
            args = self.tuple_(kind, no, yes)
        if state is None:
            size = 2 if plain == "bfloat16" else 1
            single = not ml and plain.endswith("1")
            state = (
                self.dtype_state("<", size, size, flags)
                if ml
                else self.dtype_state("|" if single else ">" if big else "<")
            )
        build = state + op.BUILD() if state else b""
        return self.glob("numpy", "dtype") + args + op.REDUCE() + build

    def array(
        self,
        code: str = "f4",
        shape: tuple[int, ...] = (1,),
        payload: bytes = b"abcd",
        order: str = "C",
        **replaced: bytes,
    ) -> bytes:
        """An array; `replaced` puts opcodes in place of a part: `version_`, `shape_`, `dtype_`, `payload_`, ..."""
        shape_op, dtype_op = self.ints(*shape), self.dtype(code)
        if self.protocol == 5:
            made = {"payload": self.data(payload), "dtype": dtype_op, "shape": shape_op, "order": self.text(order)}
            return self.call(f"{self.core}.numeric", "_frombuffer", *_replace(made, replaced))
        fortran = self.boolean(order == "F")
        state = {
            "version": self.integer(1),
            "shape": shape_op,
            "dtype": dtype_op,
            "fortran": fortran,
            "payload": self.data(payload),
        }
        return self.empty_array() + self.tuple_(*_replace(state, replaced)) + op.BUILD()

    def empty_array(self) -> bytes:
        """An ndarray that still has to get its state."""
        args = (self.glob("numpy", "ndarray"), self.ints(0), self.data(b"b"))
        return self.call(f"{self.core}.multiarray", "_reconstruct", *args)

    def record(self, *fields: tuple[str, bytes], module: str = "__main__", name: str = "QuantizedWeight8bit") -> bytes:
        """An instance, written as the protocol writes one."""
        state = op.MARK() + b"".join(self.text(key) + value for key, value in fields) + op.DICT()
        return self.new(module, name) + state + op.BUILD()

    def new(self, module: str = "__main__", name: str = "QuantizedWeight8bit") -> bytes:
        """An instance that still has to get its fields."""
        cls = self.glob(module, name)
        if self.protocol < 2:
            base = self.glob("__builtin__", "object")
            return self.call("copy_reg", "_reconstructor", cls, base, op.NONE())
        return cls + self.tuple_() + op.NEWOBJ()

    def quantized(
        self,
        weight: tuple[int, ...] = (4, 2),
        scales: tuple[int, ...] = (1, 2),
        weight_code: str = "i1",
        scales_code: str = "f4",
        **where: str,
    ) -> bytes:
        return self.record(
            ("weight", self.array(weight_code, weight, bytes(math.prod(weight) * itemsize(weight_code)))),
            ("scales", self.array(scales_code, scales, bytes(math.prod(scales) * itemsize(scales_code)))),
            **where,
        )

    def stream(self, *body: bytes, frame: bool = True) -> bytes:
        """A whole pickle: PROTO where there is one, the body in one frame where there are frames, STOP."""
        inner = b"".join(body) + op.STOP()
        if self.protocol >= 4 and frame:
            inner = op.FRAME(len(inner)) + inner
        return (op.PROTO(self.protocol) if self.protocol >= 2 else b"") + inner


def itemsize(code: str) -> int:
    """Bytes an element of a dtype code as `Writer.dtype` takes it."""
    plain = code.lstrip("<>")
    return 2 if plain == "bfloat16" else 1 if len(plain) > 3 else int(plain[1:])


def array_stream(
    dtype: str = "f4",
    shape: tuple[int, ...] = (2, 3),
    payload: bytes | None = None,
    protocol: int = 4,
    order: str = "C",
    **replaced: bytes,
) -> bytes:
    """A pickle of one array; `replaced` as in `Writer.array`."""
    data = bytes(i % 251 for i in range(math.prod(shape) * itemsize(dtype))) if payload is None else payload
    writer = Writer(protocol)
    return writer.stream(writer.array(dtype, shape, data, order, **replaced))


def quantized_stream(
    weight: tuple[int, ...] = (4, 2), scales: tuple[int, ...] = (1, 2), protocol: int = 4, **options: str
) -> bytes:
    """A pickle of one quantised weight; `options` as in `Writer.quantized`."""
    writer = Writer(protocol)
    return writer.stream(writer.quantized(weight, scales, **options))


def honest_streams() -> Mapping[int, bytes]:
    """For each protocol a pickle with a record, arrays of several kinds and plain values; all are accepted."""
    streams: dict[int, bytes] = {}
    for protocol in range(6):
        w = Writer(protocol)
        items = (
            (w.text("w"), w.quantized()),
            (w.text("fortran"), w.array("f2", (2, 2), b"\0\n\\'\r\x1a\x80\xff", "F")),
            (w.text("empty"), w.array("i8", (0,), b"")),
            (w.text("scalar"), w.array(">f8", (), b"12345678")),
            (w.text("bf"), w.array("bfloat16", (1,), b"ab")),
            (w.text("plain"), w.tuple_(op.NONE(), w.boolean(True), w.integer(-3), w.integer(1 << 40))),
        )
        streams[protocol] = w.stream(op.MARK(), *(key + value for key, value in items), op.DICT())
    return streams


DEFAULT = load_policy("numpy-quantized")


def policy_with(*more_globals: str, limits: Mapping[str, int] | None = None) -> Policy:
    """The default policy with more globals or other limits."""
    extra = (AllowedGlobals(names=more_globals, reason="a test asks for it"),) if more_globals else ()
    rules = PickleRules(
        protocols=DEFAULT.pickle.protocols,
        globals=(*DEFAULT.pickle.globals, *extra),
        records=DEFAULT.pickle.records,
    )
    return DEFAULT.model_copy(
        update={"pickle": rules, "limits": Limits(**{**DEFAULT.limits.model_dump(), **(limits or {})})}
    )


def parse(stream: bytes, policy: Policy = DEFAULT) -> Parsed:
    """Parse bytes in memory."""
    return parse_pickle(MemorySource(stream), policy)


def refusal(stream: bytes, policy: Policy = DEFAULT) -> RejectedError:
    """Parse, and return why the bytes are refused."""
    parsed = parse(stream, policy)
    assert parsed.refusal is not None, f"accepted as {str(parsed.value)[:200]}"
    assert parsed.value is None
    assert parsed.tensors == ()
    return parsed.refusal


def refused(stream: bytes, policy: Policy = DEFAULT) -> tuple[type[RejectedError], str, int | None]:
    """Parse, and return the class, the first finding's code and its offset."""
    error = refusal(stream, policy)
    return type(error), error.findings[0].code, error.findings[0].offset
