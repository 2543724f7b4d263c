"""Pickles, written opcode by opcode from a source of choices: well formed ones, and ones that are slightly broken.

One generator serves three drivers: `random.Random`, hypothesis and atheris. Every stream is made of harmless parts: the
globals that some policy can allow, and a few others that do nothing when they are called.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from safeload.tensors import DTYPE_ITEMSIZE, ML_DTYPES_ITEMSIZE

T = TypeVar("T")
Emit = Callable[[], None]


class Choices(Protocol):
    """Where decisions come from. A dry source gives the lowest value, which ends every recursion."""

    def integer(self, low: int, high: int) -> int: ...
    def choice(self, options: Sequence[T]) -> T: ...
    def data(self, nbytes: int) -> bytes: ...
    def chance(self, probability: float) -> bool: ...


class RandomChoices:
    """Decisions of a seeded generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def integer(self, low: int, high: int) -> int:
        return self._rng.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._rng.random() * len(options))]

    def data(self, nbytes: int) -> bytes:
        return self._rng.randbytes(nbytes)

    def chance(self, probability: float) -> bool:
        return self._rng.random() < probability


class DrawnChoices:
    """Decisions of hypothesis, by the `draw` of a composite strategy, so that a failing stream shrinks."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        from hypothesis import strategies as st

        self._draw, self._st = draw, st

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(self._st.integers(low, high)))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def data(self, nbytes: int) -> bytes:
        return bytes(self._draw(self._st.binary(min_size=nbytes, max_size=nbytes)))

    def chance(self, probability: float) -> bool:
        return self.integer(0, 999) >= 1000 - probability * 1000


class ProvidedChoices:
    """Decisions of atheris' `FuzzedDataProvider`, steered by coverage."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def integer(self, low: int, high: int) -> int:
        return int(self._provider.ConsumeIntInRange(low, high))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def data(self, nbytes: int) -> bytes:
        return bytes(self._provider.ConsumeBytes(nbytes)).ljust(nbytes, b"\0")

    def chance(self, probability: float) -> bool:
        return self.integer(0, 999) >= 1000 - probability * 1000


@dataclass(frozen=True, slots=True)
class Stream:
    """One generated pickle.

    Attributes:
        data: Its bytes.
        protocol: The protocol whose opcodes it was written with.
        intact: Whether nothing was broken on purpose, so that it ought to be accepted.
        stricter: The rule that it breaks, where `pickle.load` would let it pass and safeload must not; or None.
    """

    data: bytes
    protocol: int
    intact: bool
    stricter: str | None = None


HARMLESS = (
    ("collections", "Counter"),
    ("builtins", "complex"),
    ("__builtin__", "complex"),
    ("builtins", "list"),
    ("builtins", "int"),
    ("numpy", "matrix"),
    ("numpy", "float32"),
    ("datetime", "timedelta"),
    ("fractions", "Fraction"),
    ("ml_dtypes", "finfo"),
    ("model", "QuantizedWeight9bit"),
    ("numpy.core.multiarray", "_reconstruct.__call__"),
    ("copy_reg", "__newobj__"),
)
"""Globals that no policy of the tests allows, and that do nothing if they are called after all."""

_CODES = {
    "bool": "b1",
    **{f"{sign}int{bits}": f"{'u' if sign else 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"f{bits // 8}" for bits in (16, 32, 64)},
    **{f"complex{bits}": f"c{bits // 8}" for bits in (64, 128)},
}
_DTYPES = (*_CODES, *ML_DTYPES_ITEMSIZE)
_OTHER_CODES = ("O", "V4", "S4", "U1", "M8[s]", "f16", "c32", "i3", "<f4", "float32", "f4,f4", "O8", "f4 ", "F4", "")
_ORDER_SYMBOLS = ("<", ">", "|", "=", "", "F", "<\n")
_KEYS = ("weight", "a", "b", "scales", "", "0", "a/b", "\u00e9", "\U0001f600", "x" * 300, "__class__")
_TEXTS = (
    "",
    "a",
    "weight",
    "latin1",
    "numpy",
    "\u00ff",
    "\u0100\\u",
    "\U0001f600",
    "a\nb\r",
    "\\",
    "'\"",
    "\0",
    "y" * 300,
)
_INTEGERS = (
    *(0, 1, 2, 255, 256, 65535, 65536, -1, -128, 127, 128),
    *(2**31 - 1, -(2**31), 2**31, 2**32, 2**63 - 1, -(2**63), 2**63, 2**64, 2**200, -(2**255)),
)
_FLOATS = (0.0, -0.0, 1.5, -1e300, 1e-320, math.inf, -math.inf, math.nan)
_FLOAT_LINES = (
    b"0",
    b"-0",
    b"1.",
    b"1e3",
    b"1E-5",
    b"inf",
    b"-inf",
    b"nan",
    b"1e308",
    b"1e309",
    b"-9e999",
    b"1e-999",
    b"0.1",
)
_PY2_STRINGS = (b"", b"a", b"weight", b"C", b"latin1", b"\\'\"\n\r\t\a\0", b"\x7f", b"f4", b"z" * 256)


def raw_unicode_escape(text: str) -> bytes:
    """Return `text` as the UNICODE opcode has it (CPython `save_str`, protocol 0)."""
    for char in "\\\0\n\r\x1a":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("raw-unicode-escape")


class Writer:
    """Writes one value, as opcodes of one protocol. `slips` is how many things may still be broken."""

    def __init__(self, choices: Choices, protocol: int, slips: int) -> None:
        self.choices = choices
        self.protocol = protocol
        self.slips = slips
        self.ops: list[bytes] = []
        self.memo: dict[int, object] = {}
        self.stricter: str | None = None
        # Places that stay whole first: otherwise the slips would be used up before the first array is written.
        self._quiet = choices.integer(0, 150) if slips and choices.chance(0.6) else 0
        self._room = 24  # values that may still be written, so that streams stay small

    # ------------------------------------------------------------ opcodes

    def op(self, *pieces: bytes) -> None:
        self.ops.append(b"".join(pieces))

    def slip(self, probability: float = 0.04) -> bool:
        """Whether to break something here."""
        self._quiet -= 1
        if self.slips and self._quiet < 0 and self.choices.chance(probability):
            self.slips -= 1
            return True
        return False

    def pick(self, *options: tuple[int, T]) -> T:
        """Choose among what the protocol has: pairs of the protocol that introduced it and the option."""
        return self.choices.choice([option for since, option in options if since <= self.protocol])

    def noise(self) -> None:
        """Leave the stack as it is, by a detour. Something must lie above the last mark."""
        if not self.choices.chance(0.04):
            return
        what = self.choices.integer(0, 5)
        if what == 0:
            self.op(b"20")  # DUP POP
        elif what == 1:
            self.op(b"(0")  # MARK POP, which takes the mark
        elif what == 2 and self.protocol >= 1:
            self.op(b"(I1\nI2\n1")  # POP_MARK
        elif what == 3:
            self.op(b"N")
            self.put("data")
            self.op(b"0")
        elif what == 4:
            self.name("numpy", "ndarray")
            self.op(b"0")
        elif self.protocol >= 1:
            self.op(b"(](Ne)1" if self.choices.chance(0.5) else b"(]q\x63})1")  # containers that are thrown away
            if self.ops[-1].startswith(b"(]q"):
                self.memo[0x63] = "data"

    def put(self, kind: object) -> int | None:
        """Store what is on top, perhaps, as something that `get` can find again."""
        if not self.choices.chance(0.5):
            return None
        return self.store(kind)

    def store(self, kind: object) -> int:
        if self.protocol >= 4 and self.choices.chance(0.7):
            index = len(self.memo)
            self.op(b"\x94")
        else:
            index = len(self.memo) if self.choices.chance(0.9) else self.choices.integer(0, 300)
            self.op(
                self.pick(
                    (0, b"p%d\n" % index),
                    (1, b"q%c" % index if index < 256 else b"r" + struct.pack("<I", index)),
                    (1, b"r" + struct.pack("<I", index)),
                )
            )
        self.memo[index] = kind
        return index

    def get(self, index: int) -> None:
        if self.slip():
            index += self.choices.choice((1, -1, 1000))
        self.op(
            self.pick(
                (0, b"g%d\n" % index),
                (1, b"h%c" % index if 0 <= index < 256 else b"j" + struct.pack("<I", max(index, 0))),
                (1, b"j" + struct.pack("<I", max(index, 0))),
            )
        )

    def recall(self, kind: object, probability: float = 0.5) -> bool:
        """Fetch an earlier value of this kind, perhaps."""
        known = [index for index, stored in self.memo.items() if stored == kind]
        if not known or not self.choices.chance(probability):
            return False
        self.get(self.choices.choice(known))
        return True

    # ------------------------------------------------------------ plain values

    def boolean(self, value: bool) -> None:
        if self.slip(0.02):
            self.integer(int(value))
        else:
            self.op(self.pick((0, b"I01\n" if value else b"I00\n"), (2, b"\x88" if value else b"\x89")))

    def integer(self, value: int) -> None:
        options = [(0, b"I%d\n" % value), (0, b"L%dL\n" % value), (0, b"L%d\n" % value)]
        if 0 <= value < 1 << 8:
            options.append((1, b"K%c" % value))
        if 0 <= value < 1 << 16:
            options.append((1, b"M" + struct.pack("<H", value)))
        if -(1 << 31) <= value < 1 << 31:
            options.append((1, b"J" + struct.pack("<i", value)))
        length = (value.bit_length() + 8) // 8
        packed = value.to_bytes(length, "little", signed=True)
        if value == 0 and self.choices.chance(0.5):
            packed = b""
        options += [(2, b"\x8a%c" % len(packed) + packed), (2, b"\x8b" + struct.pack("<i", len(packed)) + packed)]
        line = self.pick(*options)
        if self.slip(0.01):
            line = self.choices.choice(
                (b"I0x1\n", b"I010\n", b"L1_0L\n", b"I+1\n", b"I 1\n", b"I1 \n", b"I\n", b"I-0\n")
            )
        self.op(line)

    def number(self, value: int) -> None:
        """An integer that means something, so that it is worth getting wrong."""
        if not self.slip(0.03):
            self.integer(value)
            return
        wrong = self.choices.integer(0, 9)
        if wrong < 4 and value in {0, 1}:
            self.stricter = "True is not 1"
            self.op(b"I01\n" if value else b"I00\n")
        elif wrong == 4:
            self.op(b"F%d\n" % value)
        elif wrong == 5:
            self.op(b"N")
        else:
            self.integer(
                self.choices.choice((value - 1, value + 1, -value, -1, 0, 1, 16, 63, 64, 80, 1 << 62, 1 << 63))
            )

    def real(self) -> None:
        if self.choices.chance(0.3):
            self.op(b"F", self.choices.choice(_FLOAT_LINES), b"\n")
            return
        value = self.choices.choice(_FLOATS)
        options = [(0, b"F%s\n" % repr(value).encode()), (1, b"G" + struct.pack(">d", value))]
        if self.choices.chance(0.3):
            options.append((1, b"G" + self.choices.data(8)))
        self.op(self.pick(*options))

    def text(self, value: str) -> None:
        if self.slip(0.01):
            value += self.choices.choice((" ", "\0", "\r", "2"))
        if self.recall(("text", value), 0.4):
            return
        encoded = value.encode("utf-8", "surrogatepass")
        options = [(0, b"V" + raw_unicode_escape(value) + b"\n"), (1, b"X" + struct.pack("<I", len(encoded)) + encoded)]
        options.append((4, b"\x8d" + struct.pack("<Q", len(encoded)) + encoded))
        if len(encoded) < 256:
            options.append((4, b"\x8c%c" % len(encoded) + encoded))
        self.op(self.pick(*options))
        self.put(("text", value))

    def py2_string(self, value: bytes) -> None:
        quoted = repr(value)[1:].encode()
        options = [(0, b"S" + quoted + b"\n"), (1, b"T" + struct.pack("<i", len(value)) + value)]
        if len(value) < 256:
            options.append((1, b"U%c" % len(value) + value))
        self.op(self.pick(*options))

    def text_or_py2(self, value: str) -> None:
        if value.isascii() and self.choices.chance(0.15):
            self.py2_string(value.encode())
        else:
            self.text(value)

    def payload(self, value: bytes, *, py2: bool = True, mutable: bool = False) -> None:
        """Bytes, in one of the ways in which pickles have them."""
        if self.slip(0.04):
            value = self.choices.choice((value[:-1], value + b"\0", value + value, b""))
        if self.protocol >= 5 and (self.slip(0.02) or (mutable and self.choices.chance(0.4))):
            self.op(b"\x96" + struct.pack("<Q", len(value)) + value)
        elif py2 and self.choices.chance(0.1):
            self.py2_string(value)
        elif self.protocol < 3 or self.choices.chance(0.1):
            self.encoded(value)
        else:
            options = [
                (3, b"B" + struct.pack("<I", len(value)) + value),
                (4, b"\x8e" + struct.pack("<Q", len(value)) + value),
            ]
            if len(value) < 256:
                options += [(3, b"C%c" % len(value) + value)] * 2
            self.op(self.pick(*options))

    def encoded(self, value: bytes) -> None:
        if not value and self.choices.chance(0.7):
            self.name(self.choices.choice(("__builtin__", "builtins")) if self.protocol < 3 else "builtins", "bytes")
            self.arguments()
        else:
            self.name("_codecs", "encode")
            codec = self.choices.choice(("latin-1", "utf-8", "utf-16", "rot13", "hex")) if self.slip(0.03) else "latin1"
            self.arguments(lambda: self.text(value.decode("latin-1")), lambda: self.text(codec))
        self.op(b"R")
        self.put("bytes")

    def key(self) -> None:
        if self.slip(0.02):
            what = self.choices.integer(0, 2)
            if what == 0:
                self.op(b"(t")
            elif what == 1:
                self.op(b"(l")
            else:
                self.payload(b"k")
        elif self.choices.chance(0.75):
            self.text_or_py2(self.choices.choice(_KEYS))
        else:
            self.plain()

    def plain(self) -> None:
        """A value that may be a key."""
        what = self.choices.integer(0, 3)
        if what == 0:
            self.op(b"N")
        elif what == 1:
            self.boolean(self.choices.chance(0.5))
        elif what == 2:
            self.integer(self.choices.integer(-300, 70000))
        else:
            self.real()

    # ------------------------------------------------------------ names, tuples and state

    def name(self, module: str, name: str) -> None:
        if self.slip(0.03):
            if self.choices.chance(0.7):
                module, name = self.choices.choice(HARMLESS)
            else:
                module, name = self.choices.choice(
                    (("numpy", "dtype"), ("numpy", "ndarray"), ("model", "QuantizedWeight8bit"))
                )
        if self.recall(("global", module, name), 0.6):
            return
        if self.protocol >= 4 and self.choices.chance(0.7):
            self.text(module)
            self.noise()
            self.text(name)
            self.noise()
            self.op(b"\x93")
        else:
            self.op(b"c", module.encode(), b"\n", name.encode(), b"\n")
        self.put(("global", module, name))
        self.noise()

    def arguments(self, *items: Emit) -> None:
        """A tuple of what `items` write."""
        parts = list(items)
        if self.slip(0.05):
            at = self.choices.integer(0, max(len(parts) - 1, 0))
            what = self.choices.integer(0, 3)
            if what == 0 and parts:
                del parts[at]
            elif what == 1 and parts:
                parts.insert(at, parts[at])
            elif what == 2 and parts:
                parts[at], parts[at - 1] = parts[at - 1], parts[at]
            else:
                parts.append(self.junk)
        short = {0: (1, b")"), 1: (2, b"\x85"), 2: (2, b"\x86"), 3: (2, b"\x87")}.get(len(parts))
        if short is not None and short[0] <= self.protocol and self.choices.chance(0.7):
            for part in parts:
                part()
            self.op(short[1])
        else:
            self.op(b"(")
            for part in parts:
                part()
            self.op(b"l" if self.slip(0.02) else b"t")
        self.put("arguments")
        self.noise()

    def junk(self) -> None:
        """Something small that does not belong where it is put."""
        what = self.choices.integer(0, 7)
        if what == 0:
            self.op(b"N")
        elif what == 1:
            self.integer(self.choices.choice(_INTEGERS))
        elif what == 2:
            self.op(b"(l")
        elif what == 3:
            self.op(b"(d")
        elif what == 4:
            self.op(b"(t")
        elif what == 5:
            self.py2_string(b"C")
        elif what == 6:
            self.text("F")
        elif self.memo:
            self.get(self.choices.choice(list(self.memo)))
        else:
            self.op(b"I01\n")

    def build(self, state: Emit, slips: float = 0.03) -> None:
        """A state for what is on top, usually once."""
        if self.slip(slips):
            return
        state()
        self.op(b"b")
        if self.slip(slips):
            state()
            self.op(b"b")
            self.stricter = "a state is set once"

    # ------------------------------------------------------------ arrays

    def dtype(self, name: str, *, big: bool) -> None:
        if self.recall(("dtype", name, big), 0.6):
            return
        foreign, size = name in ML_DTYPES_ITEMSIZE, DTYPE_ITEMSIZE[name]
        self.name("numpy", "dtype")

        def code() -> None:
            if foreign:
                self.name("ml_dtypes", name)
            else:
                self.text_or_py2(self.choices.choice(_OTHER_CODES) if self.slip(0.05) else _CODES[name])

        def flag(value: bool) -> Emit:
            return lambda: self.boolean(value) if self.choices.chance(0.5) else self.integer(int(value))

        self.arguments(code, flag(False), flag(True))
        self.op(b"R")
        index = self.put(marker := ("unfinished", len(self.ops)))
        self.noise()

        def state() -> None:
            symbol = ">" if big else "|" if size == 1 and not foreign else "<"
            if self.slip(0.06):
                symbol = self.choices.choice(_ORDER_SYMBOLS)
            wide = size if foreign else -1
            flags = self.choices.choice((64, 80)) if foreign else 0
            self.arguments(
                lambda: self.number(3),
                lambda: self.text_or_py2(symbol),
                *[lambda: self.junk() if self.slip(0.02) else self.op(b"N")] * 3,
                *[lambda: self.number(wide)] * 2,
                lambda: (
                    self.integer(self.choices.choice((0, 16, 63, 64, 80, 81))) if self.slip() else self.number(flags)
                ),
            )

        before = self.slips
        self.build(state)
        if index is not None and before == self.slips and self.memo[index] == marker:
            self.memo[index] = ("dtype", name, big)

    def shape(self, size: int) -> tuple[int, ...]:
        ndim = self.choices.choice((1, 0, 2, 3, 2, 4, 5, self.choices.integer(6, 64)))
        if ndim > 5:
            return (1,) * (ndim - 1) + (2,)
        shape = tuple(
            self.choices.integer(0, 4) if self.choices.chance(0.2) else self.choices.integer(1, 4) for _ in range(ndim)
        )
        if self.choices.chance(0.02):
            shape += self.choices.choice(
                ((0, 1 << 62, 1 << 62), (1 << 31, 0), (1 << 63, 0), (1 << 32, 1 << 32), (1 << 40,))
            )
        return (300,) if math.prod(shape) * size > 4096 and 0 not in shape and max(shape) < 5 else shape

    def dims(self, shape: tuple[int, ...]) -> Emit:
        return lambda: self.arguments(*[lambda n=n: self.number(n) for n in shape])

    def core(self) -> str:
        return self.choices.choice(("numpy.core", "numpy._core"))

    def array(self, dtypes: Sequence[str] = _DTYPES, shape: tuple[int, ...] | None = None) -> None:
        name = self.choices.choice(dtypes)
        size = DTYPE_ITEMSIZE[name]
        big = len(dtypes) > 3 and name in _CODES and size > 1 and self.choices.chance(0.25)
        how = self.choices.choice(
            ("reconstruct", "frombuffer", "scalar", "jax") if shape is None else ("reconstruct", "frombuffer")
        )
        if how == "scalar":
            shape = ()
        elif shape is None:
            shape = self.shape(size)
        fits = math.prod(shape) < 1 << 16
        nbytes = math.prod(shape) * size if fits else 0
        payload = self.choices.data(min(nbytes, 64)) * (nbytes // 64 + 1)
        payload = payload[:nbytes]
        fortran = self.choices.chance(0.3)
        before = self.slips
        if how == "reconstruct":
            self.name(f"{self.core()}.multiarray", "_reconstruct")
            self.empty()
            self.op(b"R")
            index = self.put(marker := ("unfinished", len(self.ops)))
            self.build(self.state(name, payload, shape, big=big, fortran=fortran))
            if index is not None and before == self.slips and self.memo[index] == marker:
                self.memo[index] = "data"
            return
        if how == "frombuffer":
            self.name(f"{self.core()}.numeric", "_frombuffer")
            order = self.choices.choice(("A", "K", "c", "")) if self.slip(0.03) else "F" if fortran else "C"
            as_py2 = self.slip(0.02)
            self.arguments(
                lambda: self.payload(payload, py2=self.slip(0.02), mutable=True),
                lambda: self.dtype(name, big=big),
                self.dims(shape),
                lambda: self.py2_string(order.encode()) if as_py2 else self.text(order),
            )
        elif how == "scalar":
            self.name(f"{self.core()}.multiarray", "scalar")
            self.arguments(lambda: self.dtype(name, big=big), lambda: self.payload(payload))
        else:
            older = self.choices.chance(0.3)
            self.name(
                "jax._src.device_array" if older else "jax._src.array",
                "reconstruct_device_array" if older else "_reconstruct_array",
            )
            self.arguments(
                lambda: self.name(f"{self.core()}.multiarray", "_reconstruct"),
                self.empty,
                self.state(name, payload, shape, big=big, fortran=fortran),
                self.aval,
            )
        self.op(b"R")
        if before == self.slips:
            self.put("data")

    def empty(self) -> None:
        self.arguments(
            lambda: self.name("numpy", "ndarray"),
            lambda: self.arguments(lambda: self.number(0)),
            lambda: self.payload(b"i" if self.slip(0.02) else b"b"),
        )

    def aval(self) -> None:
        self.op(b"(")
        if self.choices.chance(0.8):
            self.text("weak_type")
            self.boolean(self.choices.chance(0.5))
        if self.choices.chance(0.2):
            self.text("named_shape")
            self.op(b"(d")
        self.op(b"d")

    def state(self, name: str, payload: bytes, shape: tuple[int, ...], *, big: bool, fortran: bool) -> Emit:
        return lambda: self.arguments(
            lambda: self.number(1),
            self.dims(shape),
            lambda: self.dtype(name, big=big),
            lambda: self.boolean(fortran),
            lambda: self.payload(payload),
        )

    # ------------------------------------------------------------ records and containers

    def record(self) -> None:
        lead = tuple(self.choices.integer(1, 2) for _ in range(self.choices.integer(0, 1)))
        groups, per_group, n = self.choices.integer(1, 2), self.choices.integer(1, 3), self.choices.integer(1, 3)
        if self.slip(0.03):
            groups += 1
        weights = ("int8",) if not self.slip(0.03) else ("uint8",)
        scales = ("float32", "bfloat16", "float16")
        parts: list[tuple[str, Emit]] = [
            ("weight", lambda: self.array(weights, (*lead, groups * per_group, n))),
            ("scales", lambda: self.array(scales, (*lead, groups + (1 if self.slip(0.03) else 0), n))),
        ]
        module = self.choices.choice(("__main__", "model"))
        how = self.choices.choice(("newobj" if self.protocol >= 2 else "reconstructor", "reconstructor", "reduce"))
        before = self.slips
        if how == "reduce":
            self.name(module, "QuantizedWeight8bit")
            self.arguments(*(emit for _, emit in parts))
            self.op(b"R")
            if before == self.slips:
                self.put("data")
            return
        if how == "newobj":
            self.name(module, "QuantizedWeight8bit")
            self.arguments()
            self.op(b"\x81")
        else:
            old = self.protocol < 3 and self.choices.chance(0.6)
            self.name("copy_reg" if old else "copyreg", "_reconstructor")
            self.arguments(
                lambda: self.name(module, "QuantizedWeight8bit"),
                lambda: self.name("__builtin__" if old else "builtins", "object"),
                lambda: self.junk() if self.slip(0.02) else self.op(b"N"),
            )
            self.op(b"R")
        index = self.put(marker := ("unfinished", len(self.ops)))
        if self.choices.chance(0.2):
            parts.reverse()

        def fields() -> None:
            written = list(parts)
            if self.slip(0.04):
                change = self.choices.integer(0, 2)
                if change == 0:
                    del written[-1]
                elif change == 1:
                    written.append((self.choices.choice(("__class__", "extra", "shape")), lambda: self.op(b"N")))
                else:
                    written[-1] = (written[-1][0], self.junk)
            self.items([(lambda n=n: self.text_or_py2(n), emit) for n, emit in written])  # type: ignore[misc] # bound early

        self.build(fields, slips=0.12)
        if index is not None and before == self.slips and self.memo[index] == marker:
            self.memo[index] = "data"

    def mapping(self, depth: int) -> None:
        ordered = self.choices.chance(0.3)
        keys = list(_KEYS)
        used: list[str] = []
        pairs: list[tuple[Emit, Emit]] = []
        for _ in range(self.choices.integer(0, 3)):
            key = keys.pop(self.choices.integer(0, len(keys) - 1))
            if used and self.slip(0.2):
                key, self.stricter = used[-1], "each key appears once"
            as_text: Emit = lambda key=key: self.text_or_py2(key)  # type: ignore[misc] # noqa: E731 - bound early
            other = self.choices.chance(0.1) and not self.stricter
            used += [] if other else [key]
            pairs.append((self.key if other else as_text, lambda: self.value(depth - 1)))
        if not ordered:
            self.items(pairs)
            return
        self.name("collections", "OrderedDict")
        if self.choices.chance(0.5):
            self.arguments(lambda: self.sequence([lambda p=p: self.arguments(*p) for p in pairs]))  # type: ignore[misc] # bound early
            self.op(b"R")
        else:
            self.arguments()
            self.op(b"R")
            self.put("unfinished")
            self.store_items(pairs)

    def items(self, pairs: list[tuple[Emit, Emit]]) -> None:
        """A dict of what `pairs` write."""
        if self.choices.chance(0.2):
            self.op(b"(")
            for key, value in pairs:
                key()
                value()
            self.op(b"d")
            return
        self.op(b"}" if self.protocol >= 1 and not self.slip(0.02) else b"(d")
        self.put("unfinished")
        self.noise()
        self.store_items(pairs)

    def store_items(self, pairs: list[tuple[Emit, Emit]]) -> None:
        if self.protocol >= 1 and self.choices.chance(0.6):
            self.op(b"(")
            for key, value in pairs:
                key()
                value()
            if self.slip(0.02):
                self.junk()
            self.op(b"e" if self.slip(0.02) else b"u")
            return
        for key, value in pairs:
            key()
            value()
            self.op(b"a" if self.slip(0.01) else b"s")

    def sequence(self, parts: list[Emit]) -> None:
        """A list of what `parts` write."""
        if self.choices.chance(0.3):
            self.op(b"(")
            for part in parts:
                part()
            self.op(b"l")
            return
        self.op(b"]" if self.protocol >= 1 else b"(l")
        index = self.put("unfinished")
        if index is not None and self.slip(0.05):
            parts = [*parts, lambda: self.get(index)]
        self.noise()
        if self.protocol >= 1 and self.choices.chance(0.6):
            self.op(b"(")
            for part in parts:
                part()
            self.op(b"u" if self.slip(0.02) else b"e")
            return
        for part in parts:
            part()
            self.op(b"s" if self.slip(0.01) else b"a")

    def value(self, depth: int) -> None:
        """Any value."""
        self._room -= 1
        kinds = (
            *("plain", "text", "array", "array", "array", "bytes", "py2", "integer", "real", "again", "record"),
            *("list", "tuple", "dict", "dict"),
        )
        kind = self.choices.choice(kinds if depth > 0 and self._room > 0 else kinds[:9])
        children: list[Emit] = [lambda: self.value(depth - 1)] * (
            self.choices.integer(0, 4) if kind in {"list", "tuple"} else 0
        )
        if kind == "array":
            self.array()
        elif kind == "record":
            self.record()
        elif kind == "again":
            if not self.recall("data", 1.0):
                self.plain()
        elif kind == "list":
            self.sequence(children)
        elif kind == "tuple":
            self.arguments(*children)
        elif kind == "dict":
            self.mapping(depth)
        elif kind == "text":
            self.text(self.choices.choice(_TEXTS))
        elif kind == "bytes":
            self.payload(self.choices.data(self.choices.choice((0, 1, 7, 255, 256, 257))), py2=False)
        elif kind == "py2":
            self.py2_string(self.choices.choice(_PY2_STRINGS))
        elif kind == "integer":
            self.integer(self.choices.choice(_INTEGERS))
        elif kind == "real":
            self.real()
        else:
            self.plain()
        if kind in {"integer", "real", "text", "list", "dict", "tuple", "plain"} and self.choices.chance(0.3):
            self.store("data")
        self.noise()


_INSERTS = (
    *(b"%c" % byte for byte in b"N02(1RbaesutldN)]}.\x81\x85\x86\x93\x94"),
    *(b"h\0", b"q\0", b"\x80\x04", b"\x95" + bytes(8), b"K\x01", b"I01\n"),
)


def generate(choices: Choices) -> Stream:
    """Write one stream: more than half of them intact, the others with one or two things wrong."""
    protocol = choices.integer(0, 5)
    breaks = choices.chance(0.45)
    inside = breaks and choices.chance(0.7)
    writer = Writer(choices, protocol, slips=choices.integer(1, 2) if inside else 0)
    slips = writer.slips
    writer.value(3)
    used = slips - writer.slips
    # With two things wrong, the one may have undone the other.
    stricter = writer.stricter if used == 1 else None
    ops = [*writer.ops, b"."]
    if not breaks or (inside and choices.chance(0.8)):
        return Stream(_framed(choices, ops, protocol), protocol, intact=used == 0, stricter=stricter)
    what = choices.integer(0, 4)
    if what == 0 and protocol >= 4:
        body = b"\x95" + (len(ops[0])).to_bytes(8, "little") + b"".join(ops)
        nested = b"\x80%c\x95" % protocol + len(body).to_bytes(8, "little") + body
        return Stream(nested, protocol, intact=False, stricter="no frame in a frame")
    single = [i for i, op in enumerate(ops) if len(op) > 1 and op[0] in b"cXVILU\x8c\x8d"]
    if what == 1 and protocol >= 4 and single:
        at = choices.choice(single)
        inside_op = sum(map(len, ops[:at])) + choices.integer(1, len(ops[at]) - 1)
        straddled = b"\x80%c\x95" % protocol + inside_op.to_bytes(8, "little") + b"".join(ops)
        return Stream(straddled, protocol, intact=False, stricter="an opcode lies inside its frame")
    if what in {0, 1}:
        behind = choices.choice((b"\n", b"\0", b".", b"N.", b"\x80\x02N."))
        return Stream(_framed(choices, ops, protocol) + behind, protocol, intact=False, stricter="nothing behind STOP")
    if what == 2:
        return Stream(_break_bytes(choices, _framed(choices, ops, protocol)), protocol, intact=False)
    _break_ops(choices, ops)
    return Stream(_framed(choices, ops, protocol), protocol, intact=False)


def _framed(choices: Choices, ops: list[bytes], protocol: int) -> bytes:
    """Join opcodes behind a PROTO, in frames or without."""
    header = b"\x80%c" % protocol if protocol > 2 or choices.chance(0.9 if protocol == 2 else 0.1) else b""
    if protocol < 4 or choices.chance(0.3):
        return header + b"".join(ops)
    out, rest = [header], list(ops)
    while rest:
        n = len(rest) if choices.chance(0.4) else choices.integer(1, len(rest))
        body, rest = b"".join(rest[:n]), rest[n:]
        if choices.chance(0.8):
            out.append(b"\x95" + struct.pack("<Q", len(body)))
        out.append(body)
    return b"".join(out)


def _break_ops(choices: Choices, ops: list[bytes]) -> None:
    at = choices.integer(0, len(ops) - 1)
    what = choices.integer(0, 3)
    if what == 0:
        del ops[at]
    elif what == 1:
        ops.insert(at, ops[at])
    elif what == 2:
        ops[at], ops[at - 1] = ops[at - 1], ops[at]
    else:
        ops.insert(at, choices.choice(_INSERTS))


def _break_bytes(choices: Choices, data: bytes) -> bytes:
    what = choices.integer(0, 5)
    at = choices.integer(0, max(len(data) - 1, 0))
    if what == 0:
        return data + choices.choice((b"\n", b"\0", b".", b"N.", b"\x80\x02N.", data))
    if what == 1:
        return data[:at]
    if what == 2 and data[:1] == b"\x80":
        return b"\x80%c" % choices.choice((0, 1, 2, 3, 4, 5, 6, 255)) + data[2:]
    if what == 3 and (frames := [i for i in range(len(data) - 8) if data[i] == 0x95]):
        at = choices.choice(frames)
        length = int.from_bytes(data[at + 1 : at + 9], "little") + choices.choice((1, -1, 9, -9, 1 << 40))
        return data[: at + 1] + (length % (1 << 64)).to_bytes(8, "little") + data[at + 9 :]
    if what == 4 and data:
        return data[:at] + bytes([data[at] ^ (1 << choices.integer(0, 7))]) + data[at + 1 :]
    return data[:at] + choices.data(1) + data[at + choices.integer(0, 1) :]


def mutate(choices: Choices, data: bytes, other: bytes) -> bytes:
    """Damage an honest pickle at the level of bytes; `other` is a second one, to splice from."""
    for _ in range(choices.choice((1, 1, 2, 3))):
        at = choices.integer(0, max(len(data) - 1, 0))
        length = choices.integer(1, 12)
        what = choices.integer(0, 9)
        if what == 0:
            start = choices.integer(0, max(len(other) - 1, 0))
            data = data[:at] + other[start : start + length] + data[at:]
        elif what == 1:
            data = data[:at] + data[at + length :]
        elif what == 2:
            data = data[: at + length] + data[at:]
        elif what == 3:
            data = _break_bytes(choices, data)
        elif data:
            changed = (
                (data[at] + choices.choice((1, 255))) % 256
                if choices.chance(0.5)
                else data[at] ^ (1 << choices.integer(0, 7))
            )
            data = data[:at] + bytes([changed]) + data[at + 1 :]
    return data
