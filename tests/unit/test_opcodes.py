"""Each of the 68 opcodes has an explicit decision, and a stream that shows it."""

from __future__ import annotations

import pickletools

import pytest

from safeload.errors import PolicyError
from safeload.formats.pickles.machine import _HANDLERS, Machine
from safeload.formats.pickles.opcodes import OPCODES
from safeload.tensors import Extent
from tests.streams import Writer, op, parse, refused

P2, P3, P4, P5 = (op.PROTO(n) for n in (2, 3, 4, 5))
ORDERED = Writer(2).glob("collections", "OrderedDict")

ADMITTED: dict[str, tuple[bytes, object]] = {
    "MARK": (b"(t.", ()),
    "STOP": (b"N.", None),
    "POP": (b"NI5\n0.", None),
    "POP_MARK": (b"I7\n(NN1.", 7),
    "DUP": (b"I7\n2\x86.", (7, 7)),
    "FLOAT": (b"F-1.5e3\n.", -1500.0),
    "INT": (b"I-12\n.", -12),
    "BININT": (b"J\xfe\xff\xff\xff.", -2),
    "BININT1": (b"K\xff.", 255),
    "LONG": (b"L-12L\n.", -12),
    "BININT2": (b"M\x01\x02.", 513),
    "NONE": (b"N.", None),
    "REDUCE": (ORDERED + b")R.", {}),
    "STRING": (rb"S'a\n\x41\\'" + b"\n.", "a\nA\\"),
    "BINSTRING": (b"T\x01\0\0\0a.", "a"),
    "SHORT_BINSTRING": (b"U\x01a.", "a"),
    "UNICODE": (rb"V\u00e9" + b"\n.", "é"),
    "BINUNICODE": (b"X\x02\0\0\0\xc3\xa9.", "é"),
    "APPEND": (b"]Na.", [None]),
    "BUILD": (P2 + Writer(2).array("u1", (1,), b"a") + b"0N.", None),
    "GLOBAL": (b"cnumpy\ndtype\n0N.", None),
    "DICT": (b"(K\1Nd.", {1: None}),
    "EMPTY_DICT": (b"}.", {}),
    "APPENDS": (b"](K\1Ne.", [1, None]),
    "GET": (b"K\1p7\n0g7\n.", 1),
    "BINGET": (b"K\1q\xff0h\xff.", 1),
    "LONG_BINGET": (b"K\1r\0\1\0\0000j\0\1\0\0.", 1),
    "LIST": (b"(K\1Nl.", [1, None]),
    "EMPTY_LIST": (b"].", []),
    "PUT": (b"K\1p0\n0g0\n.", 1),
    "BINPUT": (b"K\1q\0000h\0.", 1),
    "LONG_BINPUT": (b"K\1r\0\0\0\0000h\0.", 1),
    "SETITEM": (b"}K\1Ns.", {1: None}),
    "TUPLE": (b"(K\1Nt.", (1, None)),
    "EMPTY_TUPLE": (b").", ()),
    "SETITEMS": (b"}(K\1NK\2Nu.", {1: None, 2: None}),
    "BINFLOAT": (b"G\x3f\xf8\0\0\0\0\0\0.", 1.5),
    "PROTO": (b"\x80\x02N.", None),
    "NEWOBJ": (P2 + Writer(2).quantized() + b"0N.", None),
    "TUPLE1": (P2 + b"K\1\x85.", (1,)),
    "TUPLE2": (P2 + b"K\1K\2\x86.", (1, 2)),
    "TUPLE3": (P2 + b"K\1K\2K\3\x87.", (1, 2, 3)),
    "NEWTRUE": (P2 + b"\x88.", True),
    "NEWFALSE": (P2 + b"\x89.", False),
    "LONG1": (P2 + b"\x8a\x01\xff.", -1),
    "LONG4": (P2 + b"\x8b\x02\0\0\0\0\x01.", 256),
    "BINBYTES": (P3 + b"B\x01\0\0\0a.", Extent(7, 1)),
    "SHORT_BINBYTES": (P3 + b"C\x01a.", Extent(4, 1)),
    "SHORT_BINUNICODE": (P4 + b"\x8c\x02\xc3\xa9.", "é"),
    "BINUNICODE8": (P4 + b"\x8d\x01\0\0\0\0\0\0\0a.", "a"),
    "BINBYTES8": (P4 + b"\x8e\x01\0\0\0\0\0\0\0a.", Extent(11, 1)),
    "STACK_GLOBAL": (P4 + Writer(4).glob("numpy", "dtype") + b"0N.", None),
    "MEMOIZE": (P4 + b"K\1\x940h\0.", 1),
    "FRAME": (P4 + b"\x95\x02\0\0\0\0\0\0\0N.", None),
    "BYTEARRAY8": (P5 + op.BYTEARRAY8(b"a") + b"0N.", None),
}
"""For an opcode that is interpreted: a stream with it, and what comes out."""

REFUSED: dict[str, bytes] = {
    "PERSID": b"Px\n.",
    "BINPERSID": b"NQ.",
    "INST": b"(icollections\nOrderedDict\n.",
    "OBJ": b"(" + ORDERED + b"o.",
    "EXT1": P2 + b"\x82\x01.",
    "EXT2": P2 + b"\x83\x01\0.",
    "EXT4": P2 + b"\x84\x01\0\0\0.",
    "EMPTY_SET": P4 + b"\x8f.",
    "ADDITEMS": P4 + b"](\x90.",
    "FROZENSET": P4 + b"(\x91.",
    "NEWOBJ_EX": P4 + ORDERED + b")}\x92.",
    "NEXT_BUFFER": P5 + b"\x97.",
    "READONLY_BUFFER": P5 + b"N\x98.",
}
"""For an opcode that is never interpreted: a stream with it that CPython would run."""


def test_the_table_is_that_of_cpython() -> None:
    table = {info.name: (info.code.encode("latin-1")[0], info.proto) for info in pickletools.opcodes}
    assert {row.name: (row.byte, row.protocol) for row in OPCODES.values()} == table
    assert len(table) == 68
    assert all(byte == row.byte for byte, row in OPCODES.items())


def test_each_opcode_is_decided_and_shown_here() -> None:
    assert {row.name for row in OPCODES.values() if row.refused is None} == set(ADMITTED)
    assert {row.name for row in OPCODES.values() if row.refused is not None} == set(REFUSED)


@pytest.mark.parametrize("name", ADMITTED)
def test_an_admitted_opcode_does_what_cpython_does(name: str) -> None:
    stream, value = ADMITTED[name]
    seen = {info.name for info, _, _ in pickletools.genops(stream)}
    assert name in seen
    parsed = parse(stream)
    assert parsed.refusal is None
    assert parsed.value == value
    assert type(parsed.value) is type(value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_opcode_is_refused_where_it_stands(name: str) -> None:
    stream = REFUSED[name]
    at = next(position for info, _, position in pickletools.genops(stream) if info.name == name)
    assert refused(stream) == (PolicyError, "opcode-not-allowed", at)


def test_each_byte_has_a_handler_in_each_protocol() -> None:
    for newest, handlers in _HANDLERS.items():
        assert len(handlers) == 256
        for byte, handler in enumerate(handlers):
            row = OPCODES.get(byte)
            if row is None:
                assert handler is Machine._not_an_opcode
            elif row.protocol > newest:
                assert handler is Machine._too_new
            elif row.refused is not None:
                assert handler is Machine._refused_opcode
            else:
                assert (handler is None) == (row.name == "STOP")
                assert handler not in {Machine._not_an_opcode, Machine._too_new, Machine._refused_opcode}


@pytest.mark.parametrize("row", OPCODES.values(), ids=lambda row: row.name)
def test_an_opcode_newer_than_the_declared_protocol_is_refused(row: object) -> None:
    code = next(byte for byte, known in OPCODES.items() if known is row)
    protocol = OPCODES[code].protocol
    if protocol > 0 and OPCODES[code].name != "PROTO":
        assert refused(op.PROTO(protocol - 1) + bytes([code]))[1:] == ("opcode-too-new", 2)
    if protocol > 2:
        assert refused(b"N0" + bytes([code]))[1:] == ("opcode-too-new", 2)


@pytest.mark.parametrize("byte", sorted(set(range(256)) - set(OPCODES)))
def test_a_byte_that_is_no_opcode_is_refused(byte: int) -> None:
    assert refused(P5 + bytes([byte]))[1:] == ("unknown-opcode", 2)
