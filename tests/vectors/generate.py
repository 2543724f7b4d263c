"""Make the vectors: one small file for each refused cause, with the exact error and offset that it must give.

`python -m tests.vectors.generate` writes them; the test beside them makes them again and compares each byte.
A vector is text lines `key: value`, a blank line, and the raw bytes. Keys: `expect` (class), `code` and `at` (of the
first finding; `-` for no offset), `policy`, `file` (the name it is scanned under), `change` (a TOML fragment that
replaces values of the policy; absent where there is none), `beside` (name and bytes in hexadecimal of one file beside
it; absent where there is none), `comment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.containers_sample import Member, zip_file
from tests.streams import Writer, array_stream, honest_streams, op, quantized_stream

FOLDER = Path(__file__).parent
HERE = object()
"""Stands among the parts of a stream where the refusal must point; without it the refusal points nowhere."""

w = Writer(4)
P4 = op.PROTO(4)
STOP = op.STOP()
SYSTEM = w.text("os") + w.text("system") + op.STACK_GLOBAL()
LIMIT = "LimitError"
FORMAT = "FormatError"
POLICY = "PolicyError"


@dataclass(frozen=True)
class Vector:
    name: str
    expect: str
    code: str
    comment: str
    raw: bytes
    at: int | None
    policy: str = "numpy-quantized"
    file: str = "shard.pkl"
    change: str = ""
    beside: str = ""

    def to_bytes(self) -> bytes:
        lines = [
            f"expect: {self.expect}",
            f"code: {self.code}",
            f"at: {'-' if self.at is None else self.at}",
            f"policy: {self.policy}",
            f"file: {self.file}",
            *([f"change: {self.change}"] if self.change else []),
            *([f"beside: {self.beside}"] if self.beside else []),
            f"comment: {self.comment}",
        ]
        return "\n".join(lines).encode() + b"\n\n" + self.raw


def vector(name: str, expect: str, code: str, comment: str, *parts: object, **options: str) -> Vector:
    at, raw = None, b""
    for part in parts:
        if isinstance(part, bytes):
            raw += part
        else:
            assert part is HERE
            at = len(raw)
    return Vector(name, expect, code, comment, raw, at, **options)


def array_parts(**replaced: bytes) -> tuple[object, ...]:
    """A protocol 4 array with parts replaced, split before the BUILD that must refuse it."""
    body = w.array("f4", (1,), b"abcd", "C", **replaced)
    return P4, body[:-1], HERE, body[-1:], STOP


def dtype_parts(**replaced: bytes) -> tuple[object, ...]:
    """A dtype whose state has parts replaced, split before the BUILD that must refuse it."""
    body = w.dtype("f4", state=w.dtype_state("<", -1, -1, 0, **replaced))
    return P4, body[:-1], HERE, body[-1:], STOP


def call_parts(module: str, name: str, *args: bytes) -> tuple[object, ...]:
    """A call that must be refused where it is made."""
    body = w.call(module, name, *args)
    return P4, body[:-1], HERE, body[-1:], STOP


def bfloat16_parts(order: str, itemsize: int, alignment: int, flags: int) -> tuple[object, ...]:
    body = w.dtype("bfloat16", state=w.dtype_state(order, itemsize, alignment, flags))
    return P4, body[:-1], HERE, body[-1:], STOP


def record_parts(*fields: tuple[str, bytes]) -> tuple[object, ...]:
    body = w.record(*fields)
    return P4, body[:-1], HERE, body[-1:], STOP


def calls() -> Iterator[Vector]:
    """Calls of what is not allowed, however they are written and wherever they are hidden. Harmless names."""
    refused = (POLICY, "global-not-allowed")
    body = w.call("os", "getcwd")
    before = w.text("os") + w.text("getcwd")
    yield vector("call-reduce", *refused, "REDUCE", P4, before, HERE, body[len(before) :], STOP)
    yield vector("call-reduce-popped", *refused, "the result is dropped", P4, before, HERE, body[len(before) :], b"0N.")
    rest = body[len(before) :]
    yield vector("call-pop-mark", *refused, "dropped with a mark", P4, b"N(", before, HERE, rest, b"1.")
    yield vector("call-memo", *refused, "kept in the memo only", P4, before, HERE, rest, op.MEMOIZE(), b"0N.")
    yield vector("call-dict-key", *refused, "as a dict's key", P4, b"}", before, HERE, rest, b"Ns.")
    state = P4 + w.call("numpy", "dtype", w.text("f4"), op.NEWFALSE(), op.NEWTRUE()) + b"(" + w.integer(3)
    yield vector("call-dtype-state", *refused, "in a dtype's state", state, before, HERE, rest, b"NNNNNNtb.")
    yield vector("call-newobj", *refused, "NEWOBJ", P4, before, HERE, op.STACK_GLOBAL(), b")", op.NEWOBJ(), STOP)
    newobj_ex = (op.STACK_GLOBAL(), b")}", op.NEWOBJ_EX(), STOP)
    yield vector("call-newobj-ex", *refused, "NEWOBJ_EX", P4, before, HERE, *newobj_ex)
    yield vector("call-obj", *refused, "OBJ", P4, b"(", before, HERE, op.STACK_GLOBAL(), op.OBJ(), STOP)
    yield vector("call-inst", *refused, "INST", b"(", HERE, op.INST("os", "getcwd"), STOP)
    yield vector("call-build", *refused, "BUILD on a class", P4, before, HERE, op.STACK_GLOBAL(), b"}b.")
    yield vector("call-never-made", *refused, "named and not called", P4, before, HERE, op.STACK_GLOBAL(), STOP)

    never = (POLICY, "opcode-not-allowed")
    allowed = w.glob("collections", "OrderedDict")
    yield vector(
        "opcode-inst", *never, "INST of an allowed name", b"(", HERE, op.INST("collections", "OrderedDict"), STOP
    )
    yield vector("opcode-obj", *never, "OBJ of an allowed name", P4, b"(", allowed, HERE, op.OBJ(), STOP)
    yield vector("opcode-newobj-ex", *never, "of an allowed name", P4, allowed, b")}", HERE, op.NEWOBJ_EX(), STOP)
    yield vector("opcode-ext1", *never, "a name from the extension registry", P4, HERE, op.EXT1(1), STOP)
    yield vector("opcode-ext2", *never, "the same, two bytes", P4, HERE, op.EXT2(1), STOP)
    yield vector("opcode-ext4", *never, "the same, four bytes", P4, HERE, op.EXT4(1), STOP)
    yield vector("opcode-persid", *never, "the loader's callback", b"N0", HERE, op.PERSID("x"), STOP)
    yield vector("opcode-binpersid", *never, "the loader's callback", P4, b"N", HERE, op.BINPERSID(), STOP)
    yield vector("opcode-empty-set", *never, "a set", P4, HERE, op.EMPTY_SET(), STOP)
    yield vector("opcode-additems", *never, "items of a set", P4, b"](", HERE, op.ADDITEMS(), STOP)
    yield vector("opcode-frozenset", *never, "a frozen set", P4, b"(", HERE, op.FROZENSET(), STOP)
    p5 = op.PROTO(5)
    yield vector("opcode-next-buffer", *never, "bytes from outside", p5, HERE, op.NEXT_BUFFER(), STOP)
    yield vector(
        "opcode-readonly-buffer", *never, "a view of bytes from outside", p5, b"N", HERE, op.READONLY_BUFFER(), STOP
    )

    bad = (FORMAT, "bad-call")
    yield vector("call-of-argument-only", *bad, "numpy.ndarray is never called", *call_parts("numpy", "ndarray"))
    yield vector("call-of-string", *bad, "a string is no callable", P4, w.text("os"), b")", HERE, op.REDUCE(), STOP)
    yield vector("call-without-tuple", *bad, "arguments in a list", P4, allowed, b"]", HERE, op.REDUCE(), STOP)
    yield vector("newobj-of-string", *bad, "NEWOBJ of no class", P4, w.text("os"), b")", HERE, op.NEWOBJ(), STOP)


def names() -> Iterator[Vector]:
    """Names that look like an allowed one and are not."""
    for title, module, name in (
        ("dotted", "numpy", "core.multiarray._reconstruct"),
        ("split-differently", "numpy.core", "multiarray._reconstruct"),
        ("walks-attributes", "numpy", "dtype.__class__"),
        ("dunder", "numpy", "__builtins__"),
        ("trailing-nul", "numpy", "dtype\0"),
        ("trailing-space", "numpy", "dtype "),
        ("leading-space", " numpy", "dtype"),
        ("look-alike", "numpy", "dt\u0443pe"),
        ("fullwidth", "numpy", "\uff44type"),
        ("subclass", "numpy", "matrix"),
        ("record-look-alike", "__main__", "QuantizedWeight9bit"),
        ("record-elsewhere", "evil", "QuantizedWeight8bit"),
        ("record-dotted", "__main__", "QuantizedWeight8bit.__init__"),
        ("case", "Numpy", "dtype"),
        ("empty", "", ""),
    ):
        text = w.text(module) + w.text(name)
        comment = "resembles an allowed name" if title != "empty" else "no name at all"
        yield vector(f"name-{title}", POLICY, "global-not-allowed", comment, P4, text, HERE, op.STACK_GLOBAL(), STOP)
    carriage = op.GLOBAL("numpy", "dtype\r")
    yield vector(
        "name-trailing-cr", POLICY, "global-not-allowed", "a line that ends in CR LF", op.PROTO(2), HERE, carriage, STOP
    )
    python2 = w.text("__builtin__") + w.text("bytes")
    comment = "Python 2's name in a protocol that no longer maps it"
    yield vector("name-python2-in-4", POLICY, "global-not-allowed", comment, P4, python2, HERE, op.STACK_GLOBAL(), STOP)
    memo = w.text("os") + op.MEMOIZE() + w.text("getcwd") + op.MEMOIZE() + b"00" + op.BINGET(0) + op.BINGET(1)
    yield vector(
        "name-memoised",
        POLICY,
        "global-not-allowed",
        "both parts from the memo",
        P4,
        memo,
        HERE,
        op.STACK_GLOBAL(),
        STOP,
    )
    twice = w.text("os") + op.DUP()
    yield vector(
        "name-duplicated",
        POLICY,
        "global-not-allowed",
        "one string is both parts",
        P4,
        twice,
        HERE,
        op.STACK_GLOBAL(),
        STOP,
    )
    decoy = w.text("os") + w.text("numpy") + op.POP() + w.text("getcwd") + w.text("dtype") + op.POP()
    yield vector(
        "name-decoys", POLICY, "global-not-allowed", "decoys are popped", P4, decoy, HERE, op.STACK_GLOBAL(), STOP
    )

    bad = (FORMAT, "bad-global")
    python2_text = op.SHORT_BINSTRING("numpy") + op.SHORT_BINSTRING("dtype")
    yield vector("name-no-string", *bad, "a number for a name", P4, w.text("os"), b"K\1", HERE, op.STACK_GLOBAL(), STOP)
    yield vector(
        "name-python2-string", *bad, "Python 2's strings for names", P4, python2_text, HERE, op.STACK_GLOBAL(), STOP
    )
    long = w.text("a" * 513) + w.text("b")
    yield vector("name-long", *bad, "more characters than any name has", P4, long, HERE, op.STACK_GLOBAL(), STOP)
    yield vector("name-not-utf-8", FORMAT, "not-utf-8", "GLOBAL", op.PROTO(2), HERE, op.GLOBAL(b"n\xff", "dtype"), STOP)
    many = b"".join(op.GLOBAL("a", f"b{n}") + op.POP() for n in range(64))
    yield vector(
        "name-many", POLICY, "global-not-allowed", "more findings than anyone reads", op.PROTO(2), HERE, many, b"N."
    )


def numbers_and_text() -> Iterator[Vector]:
    bad, ambiguous = (FORMAT, "bad-number"), (FORMAT, "ambiguous-number")
    none = {"empty", "nul", "arabic"}
    """What no reader of this Python takes for a number."""
    for title, line in (
        ("hex", "0xf"),
        ("underscore", "1_0"),
        ("octal", "010"),
        ("space", " 1"),
        ("plus", "+1"),
        ("minus-zero", "-0"),
        ("empty", ""),
        ("cr", "1\r"),
        ("nul", "1\0"),
        ("arabic", "٣"),
    ):
        yield vector(f"int-{title}", *(bad if title in none else ambiguous), "INT", HERE, op.INT(line), STOP)
    yield vector("long-hex", *ambiguous, "LONG", HERE, op.LONG("0xfL"), STOP)
    yield vector("long-huge", *ambiguous, "LONG of 79 digits", HERE, op.LONG("9" * 79), STOP)
    yield vector("float-hex", *bad, "FLOAT", HERE, op.FLOAT("0x1p3"), STOP)
    yield vector("float-overflow", *ambiguous, "CPython raises OverflowError", HERE, op.FLOAT("1e999"), STOP)
    yield vector("put-hex", *ambiguous, "PUT", b"N", HERE, op.PUT("0x1"), STOP)
    yield vector("put-negative", FORMAT, "bad-memo-index", "PUT", b"N", HERE, op.PUT("-1"), STOP)
    yield vector("get-negative", FORMAT, "bad-memo-index", "GET", b"N", HERE, op.GET("-1"), STOP)
    yield vector("long1-giant", FORMAT, "integer-too-long", "LONG1 of 255 bytes", P4, HERE, op.LONG1(bytes(255)), STOP)
    yield vector("long4-giant", FORMAT, "integer-too-long", "LONG4 of 33 bytes", P4, HERE, op.LONG4(bytes(33)), STOP)
    yield vector(
        "long4-negative", FORMAT, "integer-too-long", "length -1", P4, HERE, op.LONG4(b"", length=2**32 - 1), STOP
    )
    yield vector("text-not-utf-8", FORMAT, "not-utf-8", "", P4, HERE, op.SHORT_BINUNICODE(b"\xff"), STOP)
    surrogate = op.BINUNICODE(b"\xed\xa0\x80")
    yield vector("text-surrogate", FORMAT, "not-utf-8", "an unpaired surrogate", P4, HERE, surrogate, STOP)
    yield vector("unicode-surrogate", FORMAT, "not-utf-8", "an unpaired surrogate", HERE, op.UNICODE(rb"\ud800"), STOP)
    yield vector("unicode-escape", FORMAT, "bad-text", "a broken escape", HERE, op.UNICODE(rb"\u12"), STOP)
    for title, line in (
        ("unquoted", "abc"),
        ("half-quoted", "'abc"),
        ("octal", r"'\101'"),
        ("name", r"'\N{DASH}'"),
        ("one", "'"),
    ):
        code = "ambiguous-text" if title in {"octal", "name"} else "bad-text"
        yield vector(f"string-{title}", FORMAT, code, "STRING", HERE, op.STRING(line), STOP)


def structure() -> Iterator[Vector]:
    yield vector("empty-file", FORMAT, "empty-file", "", HERE)
    honest = honest_streams()[4]
    yield vector("cut-before-stop", FORMAT, "truncated", "no STOP; the frame shows it", honest[:2], HERE, honest[2:-1])
    yield vector("no-stop", FORMAT, "truncated", "no STOP and no frame", P4, b"N", HERE)
    yield vector("cut-in-payload", FORMAT, "truncated", "", P4, HERE, op.BINBYTES(b"abc", length=4))
    yield vector("cut-in-line", FORMAT, "truncated", "a line without an end", HERE, b"I12")
    yield vector("cut-in-proto", FORMAT, "truncated", "", HERE, b"\x80")
    cut = (FORMAT, "truncated")
    yield vector("binbytes8-2-63", *cut, "length 2**63", P4, HERE, op.BINBYTES8(b"", length=2**63), STOP)
    yield vector("binbytes8-2-64", *cut, "length 2**64 - 1", P4, HERE, op.BINBYTES8(b"", length=2**64 - 1), STOP)
    yield vector("bytearray8-2-63", *cut, "length 2**63", op.PROTO(5), HERE, op.BYTEARRAY8(b"", length=2**63), STOP)
    yield vector("binunicode8-2-64", *cut, "length 2**64 - 1", P4, HERE, op.BINUNICODE8(b"", length=2**64 - 1), STOP)
    yield vector(
        "binstring-negative", FORMAT, "bad-length", "length -1", P4, HERE, op.BINSTRING(b"", length=2**32 - 1), STOP
    )
    yield vector("frame-2-64", *cut, "length 2**64 - 1", P4, HERE, b"\x95" + b"\xff" * 8, b"N.")
    yield vector("frame-one-too-long", *cut, "one byte behind the file", P4, HERE, op.FRAME(3), b"N.")
    yield vector("frame-nested", FORMAT, "nested-frame", "", P4, op.FRAME(11), HERE, op.FRAME(2), b"N.")
    yield vector(
        "frame-straddled",
        FORMAT,
        "frame-straddled",
        "a payload leaves its frame",
        P4,
        op.FRAME(2),
        b"C\3abc",
        HERE,
        b"0N.",
    )
    yield vector(
        "frame-argument", FORMAT, "frame-straddled", "an argument leaves its frame", P4, op.FRAME(1), b"K\1", HERE, STOP
    )
    yield vector("stop-empty", FORMAT, "bad-stop", "nothing is left", P4, HERE, STOP)
    yield vector("stop-two", FORMAT, "bad-stop", "two values are left", P4, b"NN", HERE, STOP)
    yield vector("stop-mark", FORMAT, "bad-stop", "a mark is open", P4, b"(N", HERE, STOP)
    yield vector("data-behind-stop", FORMAT, "data-after-stop", "", P4, b"N.", HERE, b"\n")
    second = array_stream()
    yield vector("second-pickle", FORMAT, "data-after-stop", "a benign one first", P4, b"N.", HERE, second)
    yield vector(
        "frame-behind-stop", FORMAT, "data-after-stop", "the frame is longer", P4, op.FRAME(3), b"N.", HERE, b"N"
    )
    yield vector("junk-before-proto", FORMAT, "not-a-pickle", "", HERE, b"\n", second)
    yield vector("comment-before-proto", FORMAT, "not-a-pickle", "", HERE, b"# x\n", second)
    yield vector("proto-twice", FORMAT, "misplaced-proto", "", P4, HERE, P4, b"N.")
    yield vector("proto-in-the-middle", FORMAT, "misplaced-proto", "behind a text opcode", b"N", HERE, P4, STOP)
    yield vector("proto-6", FORMAT, "unknown-protocol", "", HERE, op.PROTO(6), b"N.")
    yield vector("proto-255", FORMAT, "unknown-protocol", "", HERE, op.PROTO(255), b"N.")
    yield vector("opcode-unknown", FORMAT, "unknown-opcode", "", P4, b"N", HERE, b"\xff.")
    yield vector("opcode-too-new", FORMAT, "opcode-too-new", "protocol 4 in 2", op.PROTO(2), HERE, w.text("a"), STOP)
    yield vector(
        "opcode-undeclared", FORMAT, "opcode-too-new", "protocol 4 without PROTO", b"N0", HERE, b"\x8c\1a", STOP
    )
    under = (FORMAT, "stack-underflow")
    yield vector("underflow-append", *under, "APPEND", P4, b"N", HERE, b"a.")
    yield vector("underflow-mark", *under, "values lie below the mark", P4, b"NN(", HERE, b"\x86.")
    yield vector("underflow-dup", *under, "DUP", P4, HERE, b"2.")
    yield vector("no-mark", FORMAT, "no-mark", "TUPLE", P4, b"N", HERE, b"t.")
    yield vector("pop-nothing", FORMAT, "no-mark", "POP of neither value nor mark", P4, HERE, b"0N.")
    yield vector("memo-unknown", FORMAT, "unknown-memo-index", "", P4, HERE, op.BINGET(0), STOP)
    yield vector("append-to-dict", FORMAT, "bad-append", "", P4, b"}N", HERE, b"a.")
    yield vector("append-to-tuple", FORMAT, "bad-append", "", P4, b")(N", HERE, b"e.")
    yield vector("append-to-array", FORMAT, "bad-append", "", P4, w.array(), b"N", HERE, b"a.")
    yield vector("setitem-on-list", FORMAT, "bad-setitem", "", P4, b"]K\0N", HERE, b"s.")
    yield vector("setitem-on-class", FORMAT, "bad-setitem", "", P4, w.glob("numpy", "ndarray"), b"K\0N", HERE, b"s.")
    yield vector("setitems-odd", FORMAT, "bad-items", "", P4, b"}(N", HERE, b"u.")
    yield vector("dict-odd", FORMAT, "bad-items", "", P4, b"(N", HERE, b"d.")
    for title, body in (
        ("list", b"]"),
        ("dict", b"}"),
        ("none", b"N"),
        ("class", w.glob("numpy", "ndarray")),
        ("record-class", w.glob("__main__", "QuantizedWeight8bit")),
        ("ordered-dict", w.call("collections", "OrderedDict")),
    ):
        yield vector(f"build-on-{title}", FORMAT, "bad-build", "", P4, body, b"}", HERE, b"b.")
    key = (FORMAT, "bad-key")
    many = b"".join(op.BININT(n) + b"N" for n in range(4098))
    yield vector("key-numbers", FORMAT, "too-many-number-keys", "4098 integers", P4, b"}(", many, HERE, b"u", STOP)
    yield vector("key-tuple", *key, "hashing it could take exponential time", P4, b"})N", HERE, b"s.")
    yield vector("key-list", *key, "not hashable", P4, b"}]N", HERE, b"s.")
    yield vector("key-bytes", *key, "bytes are no key", P4, b"}C\1aN", HERE, b"s.")
    yield vector("key-global", *key, "a class is no key", P4, b"}", w.glob("numpy", "ndarray"), b"N", HERE, b"s.")
    yield vector(
        "key-giant", *key, "any number of integers can share a hash", P4, b"}", op.LONG1(1 << 64), b"N", HERE, b"s."
    )
    twice = (FORMAT, "duplicate-key")
    yield vector("key-twice", *twice, "", P4, b"}(", w.text("a") + b"N" + w.text("a") + b"N", HERE, b"u.")
    yield vector("key-true-and-1", *twice, "equal and not the same", P4, b"}(", op.NEWTRUE(), b"NK\1N", HERE, b"u.")
    yield vector("key-python2-twice", *twice, "str and unicode", P4, b"}(U\1aN", w.text("a"), b"N", HERE, b"u.")


def arrays() -> Iterator[Vector]:
    shape = (FORMAT, "bad-shape")
    for title, ops in (
        ("list", b"]" + w.integer(1) + b"a"),
        ("none", b"N"),
        ("bool", w.tuple_(op.NEWTRUE())),
        ("negative", w.ints(-1)),
        ("two-negative", w.ints(-2, -2)),
        ("2-63", w.ints(1 << 63)),
        ("string", w.tuple_(w.text("1"))),
        ("float", w.tuple_(op.BINFLOAT(1.0))),
        ("nested", w.tuple_(w.ints(1))),
        ("33-dimensions", op.MARK() + b"K\1" * 33 + op.TUPLE()),
    ):
        yield vector(f"shape-{title}", *shape, "", *array_parts(shape_=ops))
    yield vector("shape-wraps", *shape, "2**32 * 2**32 elements", *array_parts(shape_=w.ints(1 << 32, 1 << 32)))
    wraps = w.ints(1 << 62, 4)
    yield vector(
        "shape-wraps-to-0", *shape, "2**64 bytes are 0 of them", *array_parts(shape_=wraps, payload_=w.data(b""))
    )
    huge = op.MARK() + op.LONG1(2**63 - 1) * 32 + op.TUPLE()
    yield vector("shape-huge-product", *shape, "32 dimensions of 2**63 - 1", *array_parts(shape_=huge))
    size = (FORMAT, "payload-size")
    yield vector("payload-one-short", *size, "", *array_parts(payload_=w.data(b"abc")))
    yield vector("payload-one-long", *size, "", *array_parts(payload_=w.data(b"abcde")))
    most = w.ints(1 << 40)
    yield vector("payload-terabytes", *size, "4 TB are asked for", *array_parts(shape_=most))
    empty = array_parts(shape_=w.ints(1 << 62, 0), payload_=w.data(b""))
    yield vector("shape-overflows-but-0", *shape, "empty, and still too big for numpy", *empty)
    bad = (FORMAT, "bad-payload")
    yield vector("payload-list", *bad, "a list, as object arrays have", *array_parts(payload_=b"]"))
    yield vector("payload-text", *bad, "", *array_parts(payload_=w.text("abcd")))
    body = Writer(5).empty_array() + Writer(5).tuple_(
        b"K\1", b"K\1\x85", Writer(5).dtype(), op.NEWFALSE(), op.BYTEARRAY8(b"abcd")
    )
    yield vector("payload-bytearray", *bad, "in an array's state", op.PROTO(5), body, HERE, b"b.")
    latin = call_parts("_codecs", "encode", w.text("Ā"), w.text("latin1"))
    yield vector("encode-not-latin1", *bad, "a character above U+00FF", *latin)
    state = (FORMAT, "bad-state")
    yield vector("state-version-0", *state, "", *array_parts(version_=w.integer(0)))
    yield vector("state-version-true", *state, "True is not 1", *array_parts(version_=op.NEWTRUE()))
    yield vector("state-fortran-int", *state, "7 for True", *array_parts(fortran_=w.integer(7)))
    yield vector("state-short", *state, "", P4, w.empty_array(), w.ints(1), HERE, b"b.")
    yield vector("state-dict", *state, "", P4, w.empty_array(), b"}", HERE, b"b.")
    array = w.array()
    state_op = w.tuple_(w.integer(1), w.ints(1), w.dtype(), op.NEWFALSE(), w.data(b"abcd"))
    yield vector("array-state-twice", FORMAT, "state-twice", "", P4, array, state_op, HERE, b"b.")
    array_at = len(w.empty_array()) - 1
    no_state = (w.empty_array()[:array_at], HERE, w.empty_array()[array_at:])
    yield vector("array-no-state", FORMAT, "incomplete-array", "", P4, *no_state, STOP)
    arguments = (FORMAT, "bad-arguments")
    core = ("numpy.core.multiarray", "_reconstruct")
    nd = w.glob("numpy", "ndarray")
    b = w.data(b"b")
    yield vector(
        "reconstruct-shape", *arguments, "allocates before any state", *call_parts(*core, nd, w.ints(1 << 40), b)
    )
    yield vector("reconstruct-shape-list", *arguments, "a list", *call_parts(*core, nd, b"]K\0a", b))
    yield vector(
        "reconstruct-bool-shape", *arguments, "False is not 0", *call_parts(*core, nd, w.tuple_(op.NEWFALSE()), b)
    )
    yield vector("reconstruct-object", *arguments, "dtype O", *call_parts(*core, nd, w.ints(0), w.data(b"O")))
    other = w.glob("numpy", "dtype")
    yield vector("reconstruct-subtype", *arguments, "another class", *call_parts(*core, other, w.ints(0), b))
    yield vector("reconstruct-extra", *arguments, "a fourth argument", *call_parts(*core, nd, w.ints(0), b, b"N"))
    frombuffer = ("numpy.core.numeric", "_frombuffer")
    args = (w.data(b"abcd"), w.dtype(), w.ints(1))
    yield vector("frombuffer-order", *arguments, "order K", *call_parts(*frombuffer, *args, w.text("K")))
    yield vector(
        "frombuffer-order-list", *arguments, "an order that has no hash", *call_parts(*frombuffer, *args, b"]")
    )
    yield vector("encode-codec", *arguments, "rot13", *call_parts("_codecs", "encode", w.text("a"), w.text("rot13")))
    yield vector("encode-no-codec", *arguments, "", *call_parts("_codecs", "encode", w.text("a")))
    size_call = Writer(2).call("__builtin__", "bytes", w.integer(1))
    yield vector("bytes-size", *arguments, "bytes(n) allocates", op.PROTO(2), size_call[:-1], HERE, b"R.")
    yield vector("ordered-dict-tuple", *arguments, "", *call_parts("collections", "OrderedDict", b")"))
    yield vector("ordered-dict-pair", *arguments, "no pairs", *call_parts("collections", "OrderedDict", b"])a"))
    cls = w.glob("numpy", "ndarray")
    yield vector("newobj-array", *arguments, "no record", P4, cls, b")", HERE, op.NEWOBJ(), STOP)
    jax = ("jax._src.array", "_reconstruct_array")
    yield vector("jax-other-function", *arguments, "not numpy's", *call_parts(*jax, nd, b")", b")", b"}"))
    inner = (w.glob(*core), w.tuple_(nd, w.ints(0), b), state_op)
    aval = b"}" + w.text("dtype") + b"Ns"
    yield vector("jax-aval", *arguments, "an unknown key", *call_parts(*jax, *inner, aval))


def dtypes() -> Iterator[Vector]:
    for code in (
        "O",
        "O8",
        "V8",
        "U4",
        "S4",
        "M8",
        "m8",
        "f16",
        "c32",
        "g",
        "l",
        "i4,O",
        "(2,)i4",
        "f4,f4",
        ">f4",
        "float32",
    ):
        body = call_parts("numpy", "dtype", w.text(code), op.NEWFALSE(), op.NEWTRUE())
        title = "".join(c if c.isalnum() else "-" for c in code)
        yield vector(f"dtype-code-{title}", FORMAT, "dtype-not-numeric", "", *body)
    bad = (FORMAT, "bad-dtype")
    for title, ops in (
        ("list", b"]"),
        ("none", b"N"),
        ("class", w.glob("numpy", "ndarray")),
        ("dtype", w.dtype()),
        ("bytes", w.data(b"f4")),
    ):
        yield vector(f"dtype-of-{title}", *bad, "", *call_parts("numpy", "dtype", ops, op.NEWFALSE(), op.NEWTRUE()))
    yield vector("dtype-no-state", *bad, "the array comes first", *array_parts(dtype_=w.dtype(state=b"")))
    yield vector("dtype-is-code", *bad, "a string where a dtype should be", *array_parts(dtype_=w.text("f4")))
    arguments = (FORMAT, "bad-arguments")
    f4 = w.text("f4")
    yield vector("dtype-align", *arguments, "align=True", *call_parts("numpy", "dtype", f4, op.NEWTRUE(), op.NEWTRUE()))
    yield vector(
        "dtype-copy", *arguments, "copy=False", *call_parts("numpy", "dtype", f4, op.NEWFALSE(), op.NEWFALSE())
    )
    metadata = (f4, op.NEWFALSE(), op.NEWTRUE(), b"}")
    yield vector("dtype-metadata", *arguments, "a fourth argument", *call_parts("numpy", "dtype", *metadata))
    state = (FORMAT, "bad-dtype-state")
    minus = w.integer(-1)
    for title, parts in (
        ("version-4", {"version": w.integer(4)}),
        ("version-bool", {"version": op.NEWTRUE()}),
        ("order-native", {"order": w.text("=")}),
        ("order-none", {"order": w.text("|")}),
        ("order-number", {"order": minus}),
        ("subarray", {"subarray": w.tuple_(w.dtype(), w.ints(2))}),
        ("names", {"names": w.tuple_(w.text("a"))}),
        ("fields", {"fields": b"}"}),
        ("itemsize", {"itemsize": w.integer(4096)}),
        ("alignment", {"alignment": w.integer(64)}),
        ("flags-hasobject", {"flags": w.integer(1)}),
        ("flags-63", {"flags": w.integer(63)}),
        ("flags-bool", {"flags": op.NEWFALSE()}),
    ):
        yield vector(
            f"dtype-state-{title}", *state, "", *dtype_parts(**{f"{part}_": ops for part, ops in parts.items()})
        )
    nine = w.dtype_state()[:-1] + b"}t"
    yield vector("dtype-state-metadata", *state, "a ninth item", P4, w.dtype(state=b""), nine, HERE, b"b.")
    yield vector("dtype-state-list", *state, "", P4, w.dtype(state=b""), b"]", HERE, b"b.")
    for title, parts_ in (
        ("elsize-4096", ("<", 4096, 2, 64)),
        ("elsize-1", ("<", 1, 2, 64)),
        ("elsize-negative", ("<", -1, -1, 64)),
        ("alignment", ("<", 2, 4, 64)),
        ("big-endian", (">", 2, 2, 64)),
        ("hasobject", ("<", 2, 2, 65)),
        ("flags-0", ("<", 2, 2, 0)),
    ):
        yield vector(f"bfloat16-{title}", *state, "would change the process-wide dtype", *bfloat16_parts(*parts_))
    yield vector("dtype-state-twice", FORMAT, "state-twice", "", P4, w.dtype(), w.dtype_state(), HERE, b"b.")


def records() -> Iterator[Vector]:
    weight = ("weight", w.array("i1", (4, 2), bytes(8)))
    scales = ("scales", w.array("f4", (1, 2), bytes(8)))
    fields = (FORMAT, "bad-record-fields")
    yield vector("record-missing", *fields, "", *record_parts(weight))
    yield vector("record-extra", *fields, "", *record_parts(weight, scales, ("bias", b"N")))
    yield vector("record-class", *fields, "sets __class__", *record_parts(weight, scales, ("__class__", b"N")))
    yield vector("record-setstate", *fields, "sets __setstate__", *record_parts(weight, ("__setstate__", b"N")))
    yield vector("record-case", *fields, "", *record_parts(weight, ("Scales", scales[1])))
    yield vector("record-empty", *fields, "", *record_parts())
    state = (FORMAT, "bad-state")
    made = w.record(weight, scales)
    yield vector("record-slots", *state, "slot state sets attributes", P4, w.new(), b"N}\x86", HERE, b"b.")
    yield vector("record-list", *state, "", P4, w.new(), b"]", HERE, b"b.")
    yield vector("record-state-twice", FORMAT, "state-twice", "", P4, made, b"}", HERE, b"b.")
    new = w.new()
    yield vector("record-no-state", FORMAT, "incomplete-record", "", P4, new[:-1], HERE, new[-1:], STOP)
    arguments = (FORMAT, "bad-arguments")
    cls = w.glob("__main__", "QuantizedWeight8bit")
    yield vector("record-new-arguments", *arguments, "", P4, cls, w.ints(1), HERE, op.NEWOBJ(), STOP)
    yield vector("record-call-arguments", *arguments, "", P4, cls, b")", HERE, op.REDUCE(), STOP)
    three = Writer(2).glob("copy_reg", "_reconstructor") + op.MARK() + Writer(2).glob("__main__", "QuantizedWeight8bit")
    three += Writer(2).glob("__builtin__", "object") + b"K\1t"
    yield vector("reconstructor-state", *arguments, "a third argument", op.PROTO(2), three, HERE, b"R.")

    bad = (POLICY, "bad-record")
    at = len(w.new()) - 1
    for title, options in (
        ("weight-dtype", {"weight_code": "u1"}),
        ("scales-dtype", {"scales_code": "f8"}),
        ("scales-big-endian", {"scales_code": ">f4"}),
        ("scales-columns", {"scales": (1, 3)}),
        ("scales-groups", {"scales": (3, 2)}),
        ("scales-no-groups", {"scales": (0, 2)}),
        ("scales-rank", {"scales": (2,)}),
        ("scales-batch", {"weight": (2, 4, 2), "scales": (3, 1, 2)}),
        ("rank-1", {"weight": (4,), "scales": (1,)}),
    ):
        body = w.quantized(**options)
        yield vector(f"record-{title}", *bad, "", P4, body[:at], HERE, body[at:], STOP)
    body = w.record(weight, ("scales", b"N"))
    yield vector("record-field-type", *bad, "None for an array", P4, body[:at], HERE, body[at:], STOP)


def results() -> Iterator[Vector]:
    yield vector("cycle", FORMAT, "cycle", "a list in itself", P4, b"]2a.")
    yield vector("cycle-dict", FORMAT, "cycle", "a dict in itself", P4, b"}", op.MEMOIZE(), b"K\0h\0s.")
    yield vector("not-data-global", FORMAT, "not-data", "a class is no value", P4, w.glob("numpy", "ndarray"), STOP)
    yield vector("not-data-dtype", FORMAT, "not-data", "a dtype is no value", P4, b"]", w.dtype(), b"a.")
    yield vector("not-data-bytearray", FORMAT, "not-data", "", op.PROTO(5), op.BYTEARRAY8(b""), HERE, STOP)
    yield vector("not-data-python2", FORMAT, "not-data", "bytes that are no text", P4, b"U\1", HERE, b"\xff.")
    same = w.array()
    keys = w.text("0") + same + b"K\0" + same
    yield vector("name-ambiguous", FORMAT, "ambiguous-name", "keys '0' and 0", P4, b"}(", keys, b"u.")
    at = len(w.empty_array()) - 1
    long = b"}" + w.text("k" * 1025)
    yield vector("name-of-tensor-long", FORMAT, "name-too-long", "", P4, long, same[:at], HERE, same[at:], b"s.")


def limits() -> Iterator[Vector]:
    limit = (LIMIT, "limit-exceeded")
    yield vector("limit-operations", *limit, "one more", P4, b"N0N0N", HERE, STOP, change="limits.max_operations = 5")
    yield vector("limit-depth", *limit, "nested lists", P4, b"]" * 65, b"a" * 64, STOP)
    yield vector("limit-depth-tuples", *limit, "nested tuples", P4, b")", b"\x85" * 65, STOP)
    yield vector("limit-marks", *limit, "open marks", P4, b"(" * 128, HERE, b"(", STOP)
    yield vector("limit-memo-index", *limit, "2**31", P4, b"N", HERE, op.LONG_BINPUT(2**31), STOP)
    yield vector("limit-memo-text-index", *limit, "2**62", b"N", HERE, op.PUT(2**62), STOP)
    memo = b"N" + op.MEMOIZE() * 4
    change = "limits.max_memo_entries = 4"
    yield vector("limit-memo-entries", *limit, "MEMOIZE", P4, memo, HERE, op.MEMOIZE(), STOP, change=change)
    change = "limits.max_stack_items = 4"
    yield vector("limit-stack", *limit, "values", P4, b"N" * 5, op.BINBYTES(bytes(1 << 16)), HERE, b"0.", change=change)
    yield vector("limit-inline", *limit, "text", P4, HERE, w.text("a" * 9), STOP, change="limits.max_inline_bytes = 8")
    doubling = b"]" + op.MEMOIZE() + b"".join(b"](" + op.BINGET(n) * 2 + b"e" + op.MEMOIZE() for n in range(12))
    shared = P4 + op.MARK() + doubling + op.TUPLE()
    yield vector("limit-values", *limit, "2**12 values by sharing", shared, STOP, change="limits.max_values = 1000")
    yield vector(
        "limit-inert", *limit, "a file that is no tensor", b"{}    ", file="a.json", change="limits.max_inert_bytes = 5"
    )
    yield vector("limit-file", *limit, "any file", array_stream("f4"), change="limits.max_file_bytes = 5")


def policies() -> Iterator[Vector]:
    grok = {"policy": "grok-1"}
    array, quantized = array_stream("f4"), quantized_stream()
    shard = "tensor00000_000"
    yield vector("protocol-0", POLICY, "protocol-not-allowed", "", HERE, b"N.", file=shard, **grok)
    yield vector(
        "protocol-0-declared", POLICY, "protocol-not-allowed", "", HERE, op.PROTO(0), b"N.", file=shard, **grok
    )
    yield vector("shard-name", POLICY, "shard-name", "", array, file="tensor00000_000.bak", **grok)
    yield vector(
        "shard-name-newline", POLICY, "shard-name", "ends in a line feed", array, file="tensor0000_000", **grok
    )
    yield vector("shard-dict", POLICY, "shard-content", "", HERE, P4, b"}.", file=shard, **grok)
    yield vector("shard-dtype", POLICY, "shard-dtype", "", HERE, array_stream("f8"), file=shard, **grok)
    yield vector("shard-big-endian", POLICY, "shard-dtype", "", HERE, array_stream(">f4"), file=shard, **grok)
    yield vector("pickles-not-allowed", POLICY, "format-not-allowed", "", quantized, change="formats.allow = []")
    yield vector(
        "name-other-format", POLICY, "name-contradicts-content", "a pickle", HERE, quantized, file="model.safetensors"
    )
    # BINUNICODE, whose length is a part of the header's, takes five bytes, and LONG_BINPUT the rest of the name.
    header = b'{"rzzzz":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.ljust(0x0558)
    both = len(header).to_bytes(8, "little") + header
    yield vector("two-formats", FORMAT, "ambiguous-format", "", HERE, both, file="model.safetensors")
    archive = zip_file([Member("a.txt", b"text")])
    yield vector("format-zip", POLICY, "format-not-supported", "of no arrays", HERE, archive, file=shard, **grok)
    yield vector(
        "format-html", POLICY, "format-not-supported", "an error page", HERE, b" <!DOCTYPE html>", file=shard, **grok
    )
    yield vector(
        "format-lfs", POLICY, "format-not-supported", "", HERE, b"version https://git-lfs.github.com/spec/v1\n"
    )
    contradicts = (FORMAT, "name-contradicts-content")
    yield vector("inert-pickle", *contradicts, "a pickle named as JSON", quantized, file="config.json")
    yield vector("inert-json-not-utf-8", *contradicts, "", b'{"a": "', HERE, b'\xff"}', file="config.json")
    yield vector("inert-json", *contradicts, "", b'{"a": ', HERE, b"}", file="config.json")
    yield vector("inert-json-deep", *contradicts, "", b"[" * 100_000, file="config.json")
    yield vector("inert-json-number", *contradicts, "5,000 digits", b"9" * 5000, file="config.json")
    yield vector(
        "inert-text-control", *contradicts, "a terminal would obey it", b"a", HERE, b"\x1b[2J", file="README.md"
    )
    yield vector(
        "inert-text-pickle",
        *contradicts,
        "protocol 0 is text",
        HERE,
        op.GLOBAL("os", "getcwd"),
        b"(tR.",
        file="notes.txt",
    )
    yield vector("inert-opaque", *contradicts, "an archive", b"PK\x03\x04", file="tokenizer.model")


def vectors() -> Iterator[Vector]:
    """Yield every vector."""
    # Late, because each section takes `vector` from here.
    from tests.vectors import containers, foreign, pytorch

    for group in (calls, names, numbers_and_text, structure, arrays, dtypes, records, results, limits, policies):
        yield from group()
    yield from foreign.vectors()
    yield from containers.vectors()
    yield from pytorch.vectors()


def main() -> None:
    for old in FOLDER.glob("*.vector"):
        old.unlink()
    for made in vectors():
        (FOLDER / f"{made.name}.vector").write_bytes(made.to_bytes())


if __name__ == "__main__":
    main()
