"""The 68 opcodes of pickle protocols 0 to 5, each with an explicit decision.

Source: CPython's `Lib/pickle.py` and `Lib/pickletools.py` (3.11), which define the protocol; PEP 307, 3154 and 574.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Opcode:
    """One opcode.

    Attributes:
        name: Its name in CPython's source; the machine's method for it has the same name in lower case.
        byte: The byte that stands for it.
        protocol: The protocol that introduced it.
        refused: Why no policy can admit it, or None where the machine interprets it.
    """

    name: str
    byte: int
    protocol: int
    refused: str | None = None


_EXTENSION = "it takes a name from the reading process's extension registry, which the file does not show"
_PERSISTENT = "it asks the loader for an object from outside the file"
_BUFFER = "it takes its bytes from outside the file"
_SET = "a set holds no tensors, and its order is not defined"
_INSTANCE = "it creates an instance by calling a class with arguments of the file's choice"

_ROWS: tuple[tuple[str, bytes, int, str | None], ...] = (
    ("MARK", b"(", 0, None),
    ("STOP", b".", 0, None),
    ("POP", b"0", 0, None),
    ("POP_MARK", b"1", 1, None),
    ("DUP", b"2", 0, None),
    ("FLOAT", b"F", 0, None),
    ("INT", b"I", 0, None),
    ("BININT", b"J", 1, None),
    ("BININT1", b"K", 1, None),
    ("LONG", b"L", 0, None),
    ("BININT2", b"M", 1, None),
    ("NONE", b"N", 0, None),
    ("PERSID", b"P", 0, _PERSISTENT),
    ("BINPERSID", b"Q", 1, _PERSISTENT),
    ("REDUCE", b"R", 0, None),
    ("STRING", b"S", 0, None),
    ("BINSTRING", b"T", 1, None),
    ("SHORT_BINSTRING", b"U", 1, None),
    ("UNICODE", b"V", 0, None),
    ("BINUNICODE", b"X", 1, None),
    ("APPEND", b"a", 0, None),
    ("BUILD", b"b", 0, None),
    ("GLOBAL", b"c", 0, None),
    ("DICT", b"d", 0, None),
    ("EMPTY_DICT", b"}", 1, None),
    ("APPENDS", b"e", 1, None),
    ("GET", b"g", 0, None),
    ("BINGET", b"h", 1, None),
    ("INST", b"i", 0, _INSTANCE),
    ("LONG_BINGET", b"j", 1, None),
    ("LIST", b"l", 0, None),
    ("EMPTY_LIST", b"]", 1, None),
    ("OBJ", b"o", 1, _INSTANCE),
    ("PUT", b"p", 0, None),
    ("BINPUT", b"q", 1, None),
    ("LONG_BINPUT", b"r", 1, None),
    ("SETITEM", b"s", 0, None),
    ("TUPLE", b"t", 0, None),
    ("EMPTY_TUPLE", b")", 1, None),
    ("SETITEMS", b"u", 1, None),
    ("BINFLOAT", b"G", 1, None),
    ("PROTO", b"\x80", 2, None),
    ("NEWOBJ", b"\x81", 2, None),
    ("EXT1", b"\x82", 2, _EXTENSION),
    ("EXT2", b"\x83", 2, _EXTENSION),
    ("EXT4", b"\x84", 2, _EXTENSION),
    ("TUPLE1", b"\x85", 2, None),
    ("TUPLE2", b"\x86", 2, None),
    ("TUPLE3", b"\x87", 2, None),
    ("NEWTRUE", b"\x88", 2, None),
    ("NEWFALSE", b"\x89", 2, None),
    ("LONG1", b"\x8a", 2, None),
    ("LONG4", b"\x8b", 2, None),
    ("BINBYTES", b"B", 3, None),
    ("SHORT_BINBYTES", b"C", 3, None),
    ("SHORT_BINUNICODE", b"\x8c", 4, None),
    ("BINUNICODE8", b"\x8d", 4, None),
    ("BINBYTES8", b"\x8e", 4, None),
    ("EMPTY_SET", b"\x8f", 4, _SET),
    ("ADDITEMS", b"\x90", 4, _SET),
    ("FROZENSET", b"\x91", 4, _SET),
    ("NEWOBJ_EX", b"\x92", 4, _INSTANCE),
    ("STACK_GLOBAL", b"\x93", 4, None),
    ("MEMOIZE", b"\x94", 4, None),
    ("FRAME", b"\x95", 4, None),
    ("BYTEARRAY8", b"\x96", 5, None),
    ("NEXT_BUFFER", b"\x97", 5, _BUFFER),
    ("READONLY_BUFFER", b"\x98", 5, _BUFFER),
)

OPCODES: Mapping[int, Opcode] = {
    code[0]: Opcode(name, code[0], protocol, refused) for name, code, protocol, refused in _ROWS
}
"""Every opcode by its byte. A byte that is not here is no pickle opcode."""
