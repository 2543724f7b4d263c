"""What a file is, by its first bytes and never by its name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A recognized format.

    Attributes:
        name: Short name for reports ("zip", "gzip").
        noun: What to call it in a sentence.
        advice: What to do about a file of this kind, which this version does not load.
    """

    name: str
    noun: str
    advice: str


_UNPACK = "unpack it, and verify and scan what comes out"
_CONVERT = "other containers are not read yet; convert it to a pickle of a dict of numpy arrays"
_REMOVE = "it does not belong in a checkpoint; move it out of the directory"

_MAGIC: tuple[tuple[int, bytes, Kind], ...] = (
    (0, b"PK\x03\x04", Kind("zip", "a zip archive (npz, PyTorch or Keras)", _CONVERT)),
    (0, b"PK\x05\x06", Kind("zip", "an empty zip archive", _REMOVE)),
    (0, b"\x93NUMPY", Kind("npy", "an npy array", _CONVERT)),
    (0, b"GGUF", Kind("gguf", "a GGUF model", _CONVERT)),
    (0, b"\x89HDF\r\n\x1a\n", Kind("hdf5", "an HDF5 file (Keras)", _CONVERT)),
    (0, b"\x1f\x8b", Kind("gzip", "gzip-compressed data", _UNPACK)),
    (0, b"BZh", Kind("bzip2", "bzip2-compressed data", _UNPACK)),
    (0, b"\xfd7zXZ\x00", Kind("xz", "xz-compressed data", _UNPACK)),
    (0, b"\x28\xb5\x2f\xfd", Kind("zstd", "zstd-compressed data", _UNPACK)),
    (0, b"\x04\x22\x4d\x18", Kind("lz4", "lz4-compressed data", _UNPACK)),
    (0, b"7z\xbc\xaf\x27\x1c", Kind("7z", "a 7z archive", _UNPACK)),
    (0, b"Rar!\x1a\x07", Kind("rar", "a rar archive", _UNPACK)),
    (257, b"ustar", Kind("tar", "a tar archive", _UNPACK)),
    (0, b"x\x01", Kind("zlib", "zlib-compressed data (joblib)", _UNPACK)),
    (0, b"x\x5e", Kind("zlib", "zlib-compressed data (joblib)", _UNPACK)),
    (0, b"x\x9c", Kind("zlib", "zlib-compressed data (joblib)", _UNPACK)),
    (0, b"x\xda", Kind("zlib", "zlib-compressed data (joblib)", _UNPACK)),
    (0, b"ZF0x", Kind("zlib", "zlib-compressed data (joblib)", _UNPACK)),
    (0, b"\x7fELF", Kind("program", "an ELF program", _REMOVE)),
    (0, b"MZ", Kind("program", "a Windows program", _REMOVE)),
    (0, b"\xcf\xfa\xed\xfe", Kind("program", "a macOS program", _REMOVE)),
    (0, b"-----BEGIN ", Kind("pem", "a PEM file (a key or a certificate)", "keep keys apart from what they sign")),
    (0, b"#!", Kind("script", "a script", _REMOVE)),
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
    if head[:1] == bytes([_PICKLE_PROTO]):
        return Kind("pickle", "a pickle", "")
    for offset, magic, kind in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return kind
    if head.lstrip().lower().startswith(_HTML):
        return Kind("html", "a web page (an error page of a mirror?)", "fetch the file again")
    header_bytes = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and header_bytes <= size - 8:
        return Kind("safetensors", "a safetensors file", _CONVERT)
    return None
