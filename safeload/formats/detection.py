"""What a file is, by its first bytes and never by its name."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A recognized format.

    Attributes:
        name: Short name for reports ("zip", "gzip").
        noun: What to call it in a sentence.
        advice: What to do about a file of this kind, which this version does not load.
        is_plain: Whether it is data to everybody, such as a picture: a policy may admit it as opaque.
    """

    name: str
    noun: str
    advice: str
    is_plain: bool = False


_UNPACK = "unpack it, and verify and scan what comes out"
_CONVERT = "safeload does not read it; convert it to safetensors with the software that wrote it"
_REMOVE = "it does not belong in a checkpoint; move it out of the directory"
_TENSORS = "it holds tensors, and belongs under a name that no pattern of [[files.inert]] fits"
_GRAPH = "a graph is a program that TensorFlow runs; the weights do not need it: move it out of the directory"
_PICTURE = "move it out of the directory, or admit its name with content opaque under [[files.inert]] of a policy"
_ORBAX = "verify the directory under policy orbax, which takes its files for opaque data, and let orbax read a copy"

_MAGIC: tuple[tuple[int, bytes, Kind], ...] = (
    (0, b"PK\x03\x04", Kind("zip", "a zip archive (npz, PyTorch or Keras)", _CONVERT)),
    (0, b"PK\x05\x06", Kind("zip", "an empty zip archive", _REMOVE)),
    (0, b"\x93NUMPY", Kind("npy", "an npy array", _TENSORS)),
    (0, b"GGUF", Kind("gguf", "a GGUF model", _TENSORS)),
    (0, b"\x89HDF\r\n\x1a\n", Kind("hdf5", "an HDF5 file (Keras)", _CONVERT)),
    (4, b"TFL3", Kind("tflite", "a TensorFlow Lite model", _CONVERT)),
    (0, b"PAR1", Kind("parquet", "a Parquet table", _REMOVE)),
    (0, b"ARROW1", Kind("arrow", "an Arrow table", _REMOVE)),
    (0, b"SQLite format 3\x00", Kind("sqlite", "an SQLite database", _REMOVE)),
    (0, b"\x0c\xdb\x3a\x2a", Kind("ocdbt", "a manifest of TensorStore's OCDBT (Orbax)", _ORBAX)),
    (0, b"\x0c\xdb\x20\xde", Kind("ocdbt", "a tree node of TensorStore's OCDBT (Orbax)", _ORBAX)),
    (0, b"\x1f\x8b", Kind("gzip", "gzip-compressed data", _UNPACK)),
    (0, b"\x1f\x9d", Kind("compress", "a file compressed by compress (.Z)", _UNPACK)),
    (0, b"BZh", Kind("bzip2", "bzip2-compressed data", _UNPACK)),
    (0, b"\xfd7zXZ\x00", Kind("xz", "xz-compressed data", _UNPACK)),
    (0, b"]\x00\x00", Kind("lzma", "lzma-compressed data (joblib)", _UNPACK)),
    (0, b"\x28\xb5\x2f\xfd", Kind("zstd", "zstd-compressed data", _UNPACK)),
    (0, b"\x04\x22\x4d\x18", Kind("lz4", "lz4-compressed data", _UNPACK)),
    (0, b"7z\xbc\xaf\x27\x1c", Kind("7z", "a 7z archive", _UNPACK)),
    (0, b"Rar!\x1a\x07", Kind("rar", "a rar archive", _UNPACK)),
    (0, b"!<arch>\n", Kind("ar", "an ar archive (a static library or a Debian package)", _REMOVE)),
    (0, b"070701", Kind("cpio", "a cpio archive", _UNPACK)),
    (0, b"MSCF", Kind("cab", "a cab archive", _UNPACK)),
    (257, b"ustar", Kind("tar", "a tar archive", _UNPACK)),
    (0, b"x\x01", Kind("zlib", "zlib-compressed data (joblib)", _UNPACK)),
    (0, b"x\x5e", Kind("zlib", "zlib-compressed data (joblib)", _UNPACK)),
    (0, b"x\x9c", Kind("zlib", "zlib-compressed data (joblib)", _UNPACK)),
    (0, b"x\xda", Kind("zlib", "zlib-compressed data (joblib)", _UNPACK)),
    (0, b"ZF0x", Kind("zlib", "zlib-compressed data (joblib)", _UNPACK)),
    (0, b"\x7fELF", Kind("program", "an ELF program", _REMOVE)),
    (0, b"MZ", Kind("program", "a Windows program", _REMOVE)),
    (0, b"\xcf\xfa\xed\xfe", Kind("program", "a macOS program", _REMOVE)),
    (0, b"\xce\xfa\xed\xfe", Kind("program", "a macOS program of 32 bits", _REMOVE)),
    (0, b"\xca\xfe\xba\xbe", Kind("program", "a macOS program or a Java class", _REMOVE)),
    (0, b"\x00asm", Kind("program", "a WebAssembly program", _REMOVE)),
    (1, b"\r\r\n", Kind("program", "a Python program in bytecode", _REMOVE)),
    (1, b"\x0e\r\n", Kind("program", "a Python program in bytecode", _REMOVE)),
    (0, b"%PDF-", Kind("pdf", "a PDF document", _REMOVE)),
    (0, b"-----BEGIN ", Kind("pem", "a PEM file (a key or a certificate)", "keep keys apart from what they sign")),
    (0, b"#!", Kind("script", "a script", _REMOVE)),
    (0, b"\x89PNG\r\n\x1a\n", Kind("picture", "a picture (PNG)", _PICTURE, is_plain=True)),
    (0, b"GIF8", Kind("picture", "a picture (GIF)", _PICTURE, is_plain=True)),
    (0, b"\xff\xd8\xff", Kind("picture", "a picture (JPEG)", _PICTURE, is_plain=True)),
    (8, b"WEBP", Kind("picture", "a picture (WebP)", _PICTURE, is_plain=True)),
    (0, b"\0\0\0\1Bud1", Kind("ds-store", "a .DS_Store of macOS", "delete it: it says how a folder was shown")),
    (
        0,
        b"version https://git-lfs",
        Kind("git-lfs-pointer", "a Git LFS pointer and not the file itself", "fetch the file: git lfs pull"),
    ),
)

HEAD_BYTES = 512
"""How many of a file's first bytes `detect` looks at: enough for every magic number above."""

_PICKLE_PROTO = 0x80
_HTML = (b"<!doctype html", b"<html", b"<?xml")


def looks_like_text(head: bytes) -> bool:
    """Whether the first bytes of a file are printable UTF-8."""
    # A character may be cut at the end of the head.
    text = head.decode("utf-8", "ignore")
    whole = len(head) - len(text.encode()) < 4
    return whole and bool(text) and all(c.isprintable() or c in "\t\r\n" for c in text)


def detect(head: bytes, size: int) -> Kind | None:
    """Return what the file is, or None where its first bytes are those of no format that has a signature.

    A pickle of protocol 0 or 1 has no signature; so None may still be one, or text.

    Args:
        head: The first `HEAD_BYTES` bytes, or all where there are fewer.
        size: Length of the file in bytes.
    """
    header_bytes = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and header_bytes <= size - 8:
        # Before pickles, as the length of a header may begin with any byte.
        return Kind("safetensors", "a safetensors file", _TENSORS)
    if head[:1] == bytes([_PICKLE_PROTO]):
        return Kind("pickle", "a pickle", "")
    for offset, magic, kind in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return kind
    if head.lstrip().lower().startswith(_HTML):
        return Kind("html", "a web page (an error page of a mirror?)", "fetch the file again")
    if _is_graph(head, size):
        return Kind("tensorflow-graph", "a graph of TensorFlow (.meta, .pb)", _GRAPH)
    return None


def other_reading(head: bytes) -> str | None:
    """Return what else a file is to a reader that looks for it first, whatever its first bytes say; None if nothing.

    PyTorch takes for a zip archive what begins as one, and for a tar archive what has the checksum of one, before it
    looks for a pickle; a length of safetensors' header can be the one, and the name of a tar's first member the other.

    Args:
        head: The first `HEAD_BYTES` bytes, or all where there are fewer.
    """
    if head[8:9] == b"{":
        # Of a header of 67 MB, and of one in 16 million of those that are shorter.
        if head.startswith(b"PK\x03\x04"):
            return "a zip archive"
        if head.startswith(b"\x1f\x8b\x08"):
            return "gzip-compressed data"
    return "a tar archive" if is_tar(head) else None


def is_tar(head: bytes) -> bool:
    """Whether a file begins with a header of tar, as Python's tarfile sees it, with or without a magic number.

    Args:
        head: The first 512 bytes, or all where there are fewer.
    """
    if len(head) < _TAR_HEADER_BYTES:
        return False
    block = head[:_TAR_HEADER_BYTES]
    field = block[148:156]
    if field[0] in {0x80, 0xFF}:  # GNU: a binary number, negative where it begins with 0xFF
        stated = int.from_bytes(field[1:], "big") - ((1 << 56) if field[0] == 0xFF else 0)
    else:
        try:
            stated = int(field.partition(b"\0")[0].decode("ascii").strip() or "0", 8)
        except ValueError:
            return False
    # POSIX: the sum of the header's bytes, its own field taken as spaces. Some writers took them for signed.
    rest = block[:148] + block[156:]
    unsigned = sum(rest) + 8 * ord(" ")
    return stated in {unsigned, unsigned - 256 * sum(byte > 0x7F for byte in rest)}


_TAR_HEADER_BYTES = 512


def _is_graph(head: bytes, size: int) -> bool:
    """Whether this begins like a `SavedModel`, a `MetaGraphDef` or a `GraphDef` of TensorFlow.

    Protocol buffers have no signature, so it takes the first messages within messages, each inside the one around it,
    down to the name of an operation (saved_model.proto, meta_graph.proto, op_def.proto, graph.proto). A tokenizer's
    model, which is a protocol buffer as well, begins otherwise.
    """
    start = 2 if head[:3] == b"\x08\x01\x12" else 0
    room = size - start
    if start:
        start, room = _enter(head, start, 0x12, room)
    start, room = _enter(head, start, 0x0A, room)  # MetaGraphDef.meta_info_def, or GraphDef.node
    named, nbytes = _enter(head, start, 0x0A, room)
    if nbytes:  # MetaInfoDef.meta_graph_version, or NodeDef.name; behind it an operation's list, or name
        start, room = named + nbytes, room - (named + nbytes - start)
        if _is_name(head, *_enter(head, start, 0x12, room)):
            return True
    for tag in (0x12, 0x0A, 0x0A):  # MetaInfoDef.stripped_op_list, OpList.op, OpDef.name
        start, room = _enter(head, start, tag, room)
    return _is_name(head, start, room)


def _enter(head: bytes, start: int, tag: int, room: int) -> tuple[int, int]:
    """Return where the message of this tag begins and its length: 0 where it is not there, or not within `room`."""
    length, shift, at = 0, 0, start + 1
    while head[start : start + 1] == bytes([tag]) and at < len(head) and shift < 64:
        length |= (head[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if head[at - 1] < 0x80:
            return (at, length) if at - start + length <= room else (at, 0)
    return at, 0


def _is_name(head: bytes, start: int, length: int) -> bool:
    return re.fullmatch(rb"[A-Z_][A-Za-z0-9_>]*", head[start : start + length]) is not None
