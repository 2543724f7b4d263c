"""The machine runs what CPython would run, byte for byte; refuses the rest; and stays within its limits."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from safeload.errors import Finding, FormatError, LimitError, PolicyError
from safeload.formats import WINDOW_BYTES, MemorySource
from safeload.formats.pickles import parse_pickle
from safeload.formats.pickles.machine import MAX_INTEGER_BYTES, MAX_NAME_CHARACTERS
from safeload.policy import PickleRules, RecordRule, load_policy
from tests.streams import DEFAULT, Writer, array_stream, honest_streams, op, parse, policy_with, refusal, refused
from tests.vectors.generate import vectors

w = Writer(4)
P4 = op.PROTO(4)


# ---------------------------------------------------------------- cuts, tails and damage


@pytest.mark.parametrize("protocol", range(6))
def test_a_stream_that_is_cut_anywhere_is_refused(protocol: int) -> None:
    stream = honest_streams()[protocol]
    assert parse(stream).refusal is None
    for length in range(len(stream)):
        kind, code, offset = refused(stream[:length])
        assert kind is FormatError
        assert code == ("empty-file" if length == 0 else "truncated"), length
        assert offset is not None
        assert offset <= length


@pytest.mark.parametrize("protocol", range(6))
def test_a_stream_with_any_byte_behind_stop_is_refused(protocol: int) -> None:
    stream = honest_streams()[protocol]
    for tail in (b"\0", b"\n", b".", b"N.", stream):
        assert refused(stream + tail) == (FormatError, "data-after-stop", len(stream))


@pytest.mark.parametrize("protocol", range(6))
def test_damage_never_raises_anything_and_never_moves_a_payload_out_of_the_file(protocol: int) -> None:
    stream = honest_streams()[protocol]
    rng = random.Random(protocol)  # noqa: S311 - reproducible damage, not a secret
    for _ in range(300):
        damaged = bytearray(stream)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        parsed = parse(bytes(damaged))
        assert (parsed.refusal is None) or parsed.refusal.findings
        for tensor in parsed.tensors:
            inline = tensor.extent.inline
            assert tensor.extent.nbytes == tensor.n_elements * tensor.dtype.itemsize
            assert tensor.extent.offset + (tensor.extent.nbytes if inline is None else 1) <= len(damaged)


def test_a_finding_comes_before_the_end_of_a_broken_stream() -> None:
    stream = P4 + w.call("os", "getcwd") + b"\xff"
    assert [f.code for f in refusal(stream).findings] == ["global-not-allowed", "unknown-opcode"]
    assert type(refusal(stream)) is PolicyError


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("collections.defaultdict", "save `dict(x)` instead"),
        ("collections.deque", "save `list(x)` instead"),
        ("model.QuantizedWeight8bits", "[[widen.pickle.records]]"),
    ],
)
def test_a_refused_global_comes_with_what_to_do(path: str, hint: str) -> None:
    module, _, name = path.rpartition(".")
    (finding,) = refusal(op.GLOBAL(module, name) + b".").findings
    assert hint in (finding.hint or "")


def test_all_globals_are_told_in_order_of_first_use_and_once() -> None:
    stream = P4 + w.glob("b", "c") + w.glob("a", "b") + w.glob("b", "c") + w.glob("numpy", "dtype") + b"000."
    parsed = parse(stream)
    assert parsed.globals == ("b.c", "a.b", "numpy.dtype")
    assert parsed.refusal is not None
    assert [f.code for f in parsed.refusal.findings] == ["global-not-allowed"] * 2


# ---------------------------------------------------------------- stack, memo, marks


@pytest.mark.parametrize(
    "body",
    [
        b"K\1K\2\x86",
        b"K\1K\2K\3\x87",
        b"(K\1K\2(K\3ttK\x01\x86",
        b"](K\1K\2e(K\3K\4e",
        b"K\5(0",  # POP with nothing above the mark takes the mark
        b"(K\1(K\2K\3t0t",
        b"K\1\x94K\2\x94\x86h\0h\1\x86\x86",
        b"K\1q\5K\2\x94\x86h\5h\1\x86\x86",  # MEMOIZE counts entries, not indexes
        b"K\1q\0K\2q\0\x86h\0\x86",  # a slot may be written again
        b"]\x94K\1ah\0K\2a0K\3a",
        b"}(\x8c\1aK\1\x8c\1bK\2uK\0Ns",
        b"(K\1Nd",
        b"]2\x86",
        b"N2\x862\x862\x86",
    ],
    ids=repr,
)
def test_stack_memo_and_marks_are_those_of_cpython(body: bytes) -> None:
    stream = P4 + body + op.STOP()
    parsed = parse(stream)
    assert parsed.refusal is None
    assert parsed.value == pickle.loads(stream)


@pytest.mark.parametrize(
    "body",
    [b"0", b"2", b"a", b"Na", b"s", b"NNs", b"\x85", b"N\x86", b"NN\x87", b"R", b"NR", b"b", b"Nb", b"\x93", b"\x81"],
    ids=repr,
)
@pytest.mark.parametrize("below", [b"", b"NNN("], ids=["bottom", "mark"])
def test_no_opcode_reaches_below_the_bottom_or_a_mark(body: bytes, below: bytes) -> None:
    if below and body == b"0":
        return  # POP takes the mark itself; see above
    _, code, offset = refused(P4 + below + body + b".")
    assert code == ("no-mark" if body == b"0" else "stack-underflow")
    assert offset == 2 + len(below) + len(body) - 1


@pytest.mark.parametrize("code", [b"t", b"l", b"d", b"e", b"u", b"1"])
def test_what_takes_a_mark_needs_one(code: bytes) -> None:
    assert refused(P4 + b"]" + code + b".") == (FormatError, "no-mark", 3)


@pytest.mark.parametrize("put", [op.PUT(2**70), op.PUT(5_000_000), op.LONG_BINPUT(2**32 - 1)], ids=repr)
def test_a_memo_index_is_bounded_like_the_entries(put: bytes) -> None:
    kind, code, offset = refused(b"N" + put + b".")
    assert (kind, code, offset) == (LimitError, "limit-exceeded", 1)
    last = DEFAULT.limits.max_memo_entries - 1
    assert parse(b"N" + op.PUT(last) + op.GET(last) + b"\x86.").refusal is None
    assert refused(b"N" + op.PUT(last + 1) + b".")[1] == "limit-exceeded"


# ---------------------------------------------------------------- frames and the header


@pytest.mark.parametrize(
    "stream",
    [
        op.FRAME(0) + op.FRAME(0) + b"N.",
        op.FRAME(2) + b"N.",
        op.FRAME(1) + b"N" + op.FRAME(1) + b".",
        op.FRAME(1) + b"N.",
        op.FRAME(2) + b"K\1" + op.BINBYTES(bytes(70_000)) + op.FRAME(2) + b"0.",
    ],
    ids=["empty", "whole", "two", "part", "payload-between"],
)
def test_frames_that_fit_are_accepted(stream: bytes) -> None:
    assert parse(P4 + stream).refusal is None


@pytest.mark.parametrize("length", [0, 1, 2])
def test_an_argument_lies_inside_its_frame(length: int) -> None:
    stream = P4 + op.FRAME(length + 1) + op.BINBYTES(b"ab")[: length + 1] + op.BINBYTES(b"ab")[length + 1 :] + b"."
    assert refused(stream)[1:] == ("frame-straddled", len(stream) - 1)


def test_a_frame_that_ends_in_front_of_stop_and_text_behind_is_data() -> None:
    assert refused(P4 + op.FRAME(2) + b"N.X") == (FormatError, "data-after-stop", 13)


@pytest.mark.parametrize("protocol", range(6))
def test_a_declared_protocol_is_read_and_held_against_the_policy(protocol: int) -> None:
    assert parse(op.PROTO(protocol) + b"N.").refusal is None
    narrow = load_policy("grok-1")
    parsed = parse(op.PROTO(protocol) + b"N.", narrow)
    assert (parsed.refusal is None) == (protocol in narrow.pickle.protocols)


def test_a_file_without_header_is_protocol_0_or_1() -> None:
    assert refused(b"N.", load_policy("grok-1")) == (PolicyError, "protocol-not-allowed", 0)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("line", ["0", "7", "-7", "2147483648", "9" * 77])
def test_plain_integers_mean_what_cpython_says(line: str) -> None:
    for stream in (op.INT(line) + b".", op.LONG(line) + b".", op.LONG(line + "L") + b"."):
        assert parse(stream).value == pickle.loads(stream)


@pytest.mark.parametrize("line", ["1.5", "-1.5e-10", "1e5", "3.", "inf", "-inf"])
def test_plain_floats_mean_what_cpython_says(line: str) -> None:
    assert parse(op.FLOAT(line) + b".").value == pickle.loads(op.FLOAT(line) + b".")


def test_booleans_of_the_text_protocol_are_booleans() -> None:
    assert parse(b"I01\n.").value is True
    assert parse(b"I00\n.").value is False
    assert type(parse(b"I1\n.").value) is int


@pytest.mark.parametrize("line", ["0x1", "1_0", "01", "00L", " 1", "1 ", "+1", "-0", "", "-", "1.0", "\uff11", "1e3"])
def test_integers_that_readers_disagree_about_are_refused(line: str) -> None:
    for stream in (op.INT(line), op.LONG(line), b"N" + op.PUT(line), b"N" + op.GET(line)):
        if stream != op.INT("01"):
            assert refused(stream + b".")[1] in {"bad-number", "ambiguous-number"}


@pytest.mark.parametrize("line", ["0x1p1", "1_0.0", " 1.0", "+1.0", "", ".5", "infinity", "-nan", "1e9999", "1e400"])
def test_floats_that_readers_disagree_about_are_refused(line: str) -> None:
    error, code, offset = refused(op.FLOAT(line) + b".")
    assert (error, offset) == (FormatError, 0)
    assert code in {"bad-number", "ambiguous-number"}


def test_an_integer_has_at_most_so_many_bytes() -> None:
    most = op.LONG1(b"\x7f" * MAX_INTEGER_BYTES)
    assert parse(P4 + most + b".").value == int.from_bytes(b"\x7f" * MAX_INTEGER_BYTES, "little")
    assert refused(P4 + op.LONG1(bytes(MAX_INTEGER_BYTES + 1)) + b".")[1] == "integer-too-long"
    assert refused(P4 + op.LONG4(bytes(MAX_INTEGER_BYTES + 1)) + b".")[1] == "integer-too-long"


def test_a_name_has_at_most_so_many_characters() -> None:
    name = "a" * MAX_NAME_CHARACTERS
    assert refused(op.GLOBAL(name, name) + b".")[1] == "global-not-allowed"
    assert refused(op.GLOBAL(name + "a", "b") + b".")[1] == "bad-global"
    assert refused(op.GLOBAL("b", name + "a") + b".")[1] == "bad-global"


@pytest.mark.parametrize("code", ["BINUNICODE8", "BINBYTES8", "BYTEARRAY8"])
@pytest.mark.parametrize("length", [1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_length_beyond_the_file_is_refused_before_anything_is_read(code: str, length: int) -> None:
    stream = op.PROTO(5) + getattr(op, code)(b"", length=length)
    source = Counting(len(stream), stream)
    parsed = parse_pickle(source, DEFAULT)
    assert parsed.refusal is not None
    assert parsed.refusal.findings[0].code == "truncated"
    assert parsed.refusal.findings[0].offset == 2
    assert max(source.asked) <= WINDOW_BYTES


@pytest.mark.parametrize("opcode", [b"T", b"\x8b"])
def test_a_negative_length_is_refused_even_where_the_file_is_that_long(opcode: bytes) -> None:
    head = b"\x80\x02" + b"]" + opcode + (2**32 - 8).to_bytes(4, "little")
    source = Counting(len(head) + 2**32 - 8 + 2, head, b"0.")
    parsed = parse_pickle(source, DEFAULT)
    assert parsed.refusal is not None
    assert parsed.refusal.findings[0].offset == 3


# ---------------------------------------------------------------- large files


@dataclass
class Counting:
    """A file that exists only at its two ends, and counts what is read of it."""

    size: int
    head: bytes
    tail: bytes = b""
    asked: list[int] = field(default_factory=lambda: [0])
    payloads: list[tuple[int, int]] = field(default_factory=list)

    def peek(self, offset: int, nbytes: int) -> bytes:  # noqa: ARG002 - see `Source`; so below
        raise AssertionError("a pickle is read from its start to its end")

    def checksum(self, offset: int, nbytes: int, crc32: int) -> None:  # noqa: ARG002
        raise AssertionError("a pickle has no checksums")

    def read(self, offset: int, nbytes: int) -> bytes:
        self.asked.append(nbytes)
        nbytes = max(0, min(nbytes, self.size - offset))
        at = self.size - len(self.tail)
        assert nbytes <= 1_000_000
        whole = bytearray(self.head[offset : offset + nbytes].ljust(nbytes, b"x"))
        for index in range(max(offset, at), offset + nbytes):
            whole[index - offset] = self.tail[index - at]
        return bytes(whole)

    def payload(self, offset: int, nbytes: int) -> None:
        self.payloads.append((offset, nbytes))


def test_an_array_of_300_gb_is_described_without_being_read() -> None:
    shape = (75, 1_000_000, 1000)
    nbytes = 300_000_000_000
    body = w.array("f4", shape, b"", payload_=op.BINBYTES8(b"", length=nbytes))
    head, tail = P4 + body[:-2], body[-2:] + b"."
    source = Counting(len(head) + nbytes + len(tail), head, tail)
    parsed = parse_pickle(source, DEFAULT)
    assert parsed.refusal is None
    (tensor,) = parsed.tensors
    assert (tensor.shape, tensor.extent.offset, tensor.extent.nbytes) == (shape, len(head), nbytes)
    assert sum(source.asked) < 1_000_000
    assert source.payloads[-1] == (len(head), nbytes)


@pytest.mark.parametrize("gap", [0, 1, 255, 256, 257, WINDOW_BYTES - 1, WINDOW_BYTES, WINDOW_BYTES + 1])
def test_a_payload_of_any_length_lies_where_it_is_said_to_lie(gap: int) -> None:
    filler = op.BINBYTES(b"f" * gap) + b"0"
    payload = bytes(range(256)) * 300
    for nbytes in (0, 1, 256, 257, WINDOW_BYTES - 30, WINDOW_BYTES, len(payload)):
        stream = P4 + filler + w.array("u1", (nbytes,), payload[:nbytes]) + op.STOP()
        parsed = parse(stream)
        assert parsed.refusal is None
        extent = parsed.tensors[0].extent
        assert stream[extent.offset : extent.offset + extent.nbytes] == payload[:nbytes]


def test_a_source_that_is_shorter_than_it_says_is_refused() -> None:
    class Short(MemorySource):
        def read(self, offset: int, nbytes: int) -> bytes:
            return super().read(offset, nbytes)[:3]

    parsed = parse_pickle(Short(P4 + op.BINUNICODE("abcdef") + b"."), DEFAULT)
    assert parsed.refusal is not None
    assert parsed.refusal.findings[0].code == "truncated"


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("limit", "bound", "fits", "exceeds"),
    [
        ("max_operations", 4, b"N0N.", b"N0NN."),
        ("max_depth", 3, b"]]]aa.", b"]]]]aaa."),
        ("max_inline_bytes", 6, op.BINUNICODE("abc") + b"0V12\n.", op.BINUNICODE("abcdefg") + b"."),
        ("max_inline_bytes", 3, b"U\3abc.", b"U\4abcd."),
        ("max_inline_bytes", 3, b"I123\n.", b"I1234\n."),
        ("max_values", 3, b"]2\x862.", b"N"),
        ("max_values", 4, b"](NNNe.", b"](NNNNe."),
        ("max_memo_entries", 2, b"Nq\0q\1.", b"N" + op.PUT(2) + b"."),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_limit_is_exact(limit: str, bound: int, fits: bytes, exceeds: bytes) -> None:
    policy = policy_with(limits={limit: bound})
    if limit == "max_values" and exceeds == b"N":
        fits, exceeds = b"]]a.", b"]]]]aaa."
    parsed = parse(fits, policy)
    assert parsed.refusal is None
    error = refusal(exceeds, policy)
    assert type(error) is LimitError
    assert f"`{limit}`" in (error.findings[0].hint or "")


@pytest.mark.parametrize("limit", ["max_stack_items", "max_memo_entries"])
def test_stack_and_memo_are_bounded_to_one_window(limit: str) -> None:
    n = 3 * WINDOW_BYTES
    stream = P4 + b"N" + {"max_stack_items": b"N", "max_memo_entries": op.MEMOIZE()}[limit] * n
    error = refusal(stream, policy_with(limits={limit: 1000}))
    assert type(error) is LimitError
    assert f"`{limit}`" in (error.findings[0].hint or "")
    offset = error.findings[0].offset
    assert offset is not None
    assert offset <= 2 * WINDOW_BYTES


def test_marks_are_bounded_before_they_cost_anything() -> None:
    assert parse(P4 + b"(" * 128 + b"t" * 128 + b".").refusal is not None
    assert refused(P4 + b"(" * 1_000_000) == (LimitError, "limit-exceeded", 2 + 128)


BOMBS = r"""
import json, os, resource, sys
from tests.streams import Writer, op, parse, policy_with

w = Writer(4)
P4, DROP, DUP2, PUT = op.PROTO(4), op.POP(), op.DUP() + op.TUPLE2(), op.MEMOIZE()
ARRAY = w.array() + PUT + DROP
AGAIN = op.BINGET(0) + op.BINGET(1) + op.REDUCE()


def function(module, name):
    return P4 + w.glob(module, name) + PUT + DROP


def numbered(n, value):
    return b"".join(w.text(f"{1000 + i}") + value for i in range(n))


BOMBS = {
    "lists": lambda: P4 + b"]" * 60_000 + b"a" * 59_999 + b".",
    "tuples": lambda: P4 + b")" + op.TUPLE1() * 60_000 + b".",
    "records": lambda: function("__main__", "QuantizedWeight8bit")
    + b"N" + (op.BINPUT(1) + DROP + op.BINGET(0) + op.BINGET(1) + b"N\x86R") * 60_000 + b".",
    "marks": lambda: P4 + b"(" * 60_000,
    "list-doubling": lambda: P4
    + b"(]" + PUT + b"".join(b"](" + op.BINGET(n) * 2 + b"e" + PUT for n in range(60)) + b"t.",
    "dup-doubling": lambda: P4 + b"N" + DUP2 * 60 + b".",
    "tuple-key": lambda: P4 + b"})" + DUP2 * 60 + b"Ns.",
    "tuple-as-order": lambda: function("numpy.core.numeric", "_frombuffer") + b"h\0(NNN)" + DUP2 * 60 + b"tR.",
    "tuple-as-codec": lambda: function("_codecs", "encode") + b"h\0" + w.text("a") + b")" + DUP2 * 60 + b"\x86R.",
    "dup": lambda: P4 + b"N" + op.DUP() * 400_000 + b".",
    "memo": lambda: P4 + b"N" + PUT * 600_000 + b".",
    "memo-index": lambda: P4 + b"N" + op.LONG_BINPUT(2**32 - 1) + b".",
    "integer": lambda: P4 + op.LONG4(b"", length=2**31 - 1) + b".",
    "digits": lambda: op.INT("9" * 1_000_000) + b".",
    "same-hash": lambda: P4 + b"}(" + b"".join(op.LONG1(i * (2**61 - 1)) + b"N" for i in range(5, 20_000)) + b"u.",
    "size-of-bytes": lambda: Writer(2).stream(Writer(2).call("__builtin__", "bytes", op.BININT(2**31 - 1))),
    "shape": lambda: P4 + w.array(shape_=w.ints(2**62), payload_=w.data(b"")) + b".",
    "line-without-end": lambda: b"V" + b"a" * 1_000_000,
    "quoted": lambda: b"S'" + rb"a\x00" * 200_000 + b"'\n\xff",
    "globals": lambda: op.PROTO(2) + b"".join(op.GLOBAL("a", f"b{n}") + DROP for n in range(30_000)) + b"N.",
    "ordered-dict-again": lambda: function("collections", "OrderedDict")
    + b"](" + numbered(20_000, b"N\x86") + b"e\x85" + PUT + DROP + AGAIN * 40 + b".",
    "encode-again": lambda: function("_codecs", "encode")
    + op.BINUNICODE("a" * 2_000_000) + w.text("latin1") + b"\x86" + PUT + DROP + AGAIN * 40 + b".",
    "refused-arguments": lambda: function("numpy", "dtype")
    + b"(" + b"N" * 50_000 + w.glob("os", "x") + b"t" + PUT + DROP + (AGAIN + DROP) * 20_000 + b"N.",
    "long-key": lambda: P4 + ARRAY + b"}" + op.BINUNICODE("k" * 1_000_000) + b"](" + b"h\0" * 3000 + b"es.",
    "shared-names": lambda: P4 + ARRAY + b"}" + op.BINUNICODE("k" * 1000) + b"](" + b"h\0" * 60_000 + b"es.",
    "ambiguous-last": lambda: P4 + ARRAY + b"}(K\0h\0" + numbered(30_000, b"h\0") + w.text("0") + b"h\0u.",
    "items": lambda: P4 + b"](" + (b"}" * 60_000 + b"e(") * 12 + b"e.",
}
SECONDS = 4
# A tenth of the default limits, so that a tenth of the time shows the same.
LIMITS = {
    "max_values": 200_000,
    "max_memo_entries": 400_000,
    "max_stack_items": 100_000,
    "max_inline_bytes": 1 << 24,
}
POLICY = policy_with(limits=LIMITS)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def run(stream):
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    before = peak()
    refusal = parse(stream, POLICY).refusal
    verdict = f"{type(refusal).__name__} {refusal.findings[0].code}" if refusal else "accepted"
    return verdict, peak() - before


parse(P4 + b"N.")
for name, make in BOMBS.items():
    stream = make()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(run(stream)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        print(json.dumps([name, json.loads(answer.read() or '["killed or crashed", 0]')]))
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="session")
def bombs() -> dict[str, tuple[str, int]]:
    """What became of each bomb, and how many MiB its process grew by; each with bounded memory and processor time."""
    command = [sys.executable, "-c", BOMBS]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


LIMIT = "LimitError limit-exceeded"


@pytest.mark.parametrize(
    ("bomb", "mib", "expected"),
    [
        ("lists", 20, LIMIT),
        ("tuples", 20, LIMIT),
        ("records", 30, LIMIT),
        ("marks", 10, LIMIT),
        ("list-doubling", 50, LIMIT),
        ("dup-doubling", 50, LIMIT),
        ("tuple-key", 20, "FormatError bad-key"),
        ("tuple-as-order", 20, "FormatError bad-arguments"),
        ("tuple-as-codec", 20, "FormatError bad-arguments"),
        ("dup", 20, LIMIT),
        ("memo", 60, LIMIT),
        ("memo-index", 20, LIMIT),
        ("integer", 20, "FormatError integer-too-long"),
        ("digits", 40, "FormatError ambiguous-number"),
        ("same-hash", 40, "FormatError bad-key"),
        ("size-of-bytes", 20, "FormatError bad-arguments"),
        ("shape", 20, "FormatError bad-shape"),
        ("line-without-end", 40, "FormatError truncated"),
        ("quoted", 20, "FormatError unknown-opcode"),
        ("globals", 20, "PolicyError global-not-allowed"),
        ("ordered-dict-again", 60, LIMIT),
        ("encode-again", 60, LIMIT),
        ("refused-arguments", 20, "PolicyError global-not-allowed"),
        ("long-key", 60, "FormatError name-too-long"),
        ("shared-names", 60, LIMIT),
        ("ambiguous-last", 60, "FormatError ambiguous-name"),
        ("items", 30, LIMIT),
    ],
)
def test_a_bomb_costs_no_more_than_its_limit(
    bombs: dict[str, tuple[str, int]], bomb: str, mib: int, expected: str
) -> None:
    verdict, grown = bombs[bomb]
    assert verdict == expected
    assert grown <= mib


def test_time_is_linear_in_opcodes() -> None:
    counted = {}
    # Windows grow up to 64 KiB; from there on each of them is one read.
    for n in (100_000, 200_000):
        stream = P4 + b"](" + b"K\1" * n + b"e."
        source = Counting(len(stream), stream)
        assert parse_pickle(source, DEFAULT).refusal is None
        counted[n] = len(source.asked)
    assert counted[200_000] <= counted[100_000] + 100_000 * 2 // WINDOW_BYTES + 1


# ---------------------------------------------------------------- nothing of the process is touched


def test_no_stream_touches_the_processwide_bfloat16() -> None:
    shared = np.dtype(ml_dtypes.bfloat16)
    facts = (
        hash(shared),
        shared.itemsize,
        shared.alignment,
        shared.flags,
        str(shared),
        shared.byteorder,
        shared.hasobject,
    )
    streams = [vector.raw for vector in vectors()] + list(honest_streams().values())
    loaded = set(sys.modules)
    policies = (DEFAULT, load_policy("grok-1"))
    for stream in streams:
        for policy in policies:
            parsed = parse(stream, policy)
            assert parsed.refusal is None or isinstance(parsed.refusal.findings[0], Finding)
    after = np.dtype(ml_dtypes.bfloat16)
    assert after is shared
    assert facts == (
        hash(after),
        after.itemsize,
        after.alignment,
        after.flags,
        str(after),
        after.byteorder,
        after.hasobject,
    )
    assert np.array([1.5], ml_dtypes.bfloat16).tobytes() == b"\xc0\x3f"
    assert {name for name in set(sys.modules) - loaded if not name.startswith("safeload")} <= {"difflib"}


def test_a_refused_stream_has_neither_value_nor_tensors() -> None:
    parsed = parse(P4 + b"]" + w.array() + b"a" + w.glob("os", "getcwd") + b"0.")
    assert (parsed.value, parsed.tensors) == (None, ())
    assert parsed.globals[-1] == "os.getcwd"


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("protocol", range(6))
def test_what_is_parsed_is_what_cpython_and_numpy_load(protocol: int, order: str) -> None:
    core = "numpy._core" if hasattr(np, "_core") else "numpy.core"
    writer = Writer(protocol, core=core)
    payload = bytes(range(100, 124))
    stream = writer.stream(writer.array("f4", (2, 3), payload, order))
    loaded = pickle.loads(stream)
    (tensor,) = parse(stream).tensors
    inline = tensor.extent.inline
    data = inline if inline is not None else stream[tensor.extent.offset : tensor.extent.offset + tensor.extent.nbytes]
    assert data == payload
    assert loaded.tobytes(order) == payload
    assert (tensor.shape, tensor.order, tensor.dtype.name) == (loaded.shape, order, loaded.dtype.name)


def test_array_stream_is_what_it_says() -> None:
    (tensor,) = parse(array_stream("f4", (2, 3), protocol=4)).tensors
    assert (tensor.shape, tensor.dtype.name, tensor.extent.nbytes) == ((2, 3), "float32", 24)


# ---------------------------------------------------------------- names


def test_a_record_of_a_submodule_is_not_reached_by_a_dotted_name() -> None:
    rule = RecordRule(name="C", modules=("a.b",), fields={"x": ("float32",)}, reason="made for this test")
    rules = PickleRules(protocols=(2, 4), globals=DEFAULT.pickle.globals, records=(rule,))
    policy = DEFAULT.model_copy(update={"pickle": rules})
    assert parse(P4 + w.record(("x", w.array()), module="a.b", name="C") + b".", policy).refusal is None
    assert refused(P4 + w.glob("a", "b.C") + b"0N.", policy)[1] == "global-not-allowed"
    assert refused(op.PROTO(2) + op.GLOBAL("a", "b.C") + b"0N.", policy)[1] == "global-not-allowed"


@pytest.mark.parametrize(
    "other", [b"N", b"K\1", b")", b"]", b"C\1a", b"U\1a", w.glob("numpy", "dtype"), w.array()], ids=range(8)
)
def test_both_parts_of_a_global_are_text(other: bytes) -> None:
    for names in (other + w.text("dtype"), w.text("numpy") + other):
        assert refused(P4 + names + op.STACK_GLOBAL() + b".") == (FormatError, "bad-global", 2 + len(names))


def test_memo_indices_of_the_file_s_choice_do_not_collide() -> None:
    # In a dict, an index whose probes follow these would take a million steps at each GET.
    mask, index, chosen = (1 << 17) - 1, 12345, []
    for _ in range(86_000):
        chosen.append(index)
        index = (5 * index + 1) & mask
    stream = op.PROTO(2) + b"N" + b"".join(op.LONG_BINPUT(i) for i in chosen) + op.LONG_BINPUT(mask + 6)
    stream += (op.LONG_BINGET(mask + 6) + op.POP()) * 20_000 + b"."
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (8, 9)); from tests.streams import parse; "
    code += "sys.exit(parse(sys.stdin.buffer.read()).refusal is not None)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], input=stream, cwd=root, timeout=60, check=False)
    assert done.returncode == 0


def test_keys_whose_hashes_are_the_file_s_choice_are_few() -> None:
    for keys in ([op.BININT(n) for n in range(5000)], [op.BINFLOAT(float(n)) for n in range(5000)]):
        items = [key + b"N" for key in keys]
        assert refused(op.PROTO(4) + b"}(" + b"".join(items) + b"u.")[1] == "too-many-number-keys"
        assert parse(op.PROTO(4) + b"}(" + b"".join(items[:4000]) + b"u.").refusal is None


def test_wide_text_counts_for_what_it_takes() -> None:
    wide = "a" * 1000 + "\U0001f600"
    assert (
        parse(op.PROTO(4) + op.BINUNICODE(wide) + b".", policy_with(limits={"max_inline_bytes": 5000})).refusal is None
    )
    error = refusal(op.PROTO(4) + op.BINUNICODE(wide) + b".", policy_with(limits={"max_inline_bytes": 2000}))
    assert type(error) is LimitError


def test_byte_strings_are_counted_though_nothing_holds_them() -> None:
    stream = P4 + op.SHORT_BINBYTES(b"") + op.POP()
    many = P4 + (op.SHORT_BINBYTES(b"") + op.POP()) * (2 * WINDOW_BYTES)
    assert parse(stream + b"N.", policy_with(limits={"max_values": 1000})).refusal is None
    error = refusal(many + b"N.", policy_with(limits={"max_values": 1000}))
    assert type(error) is LimitError
    assert "byte strings" in error.findings[0].message
