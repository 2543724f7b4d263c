"""Vectors of files that are no tensors, and of TensorFlow's bundles. See `tests.vectors.generate`."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

from tests import tensorflow_sample as tf
from tests.vectors.generate import FORMAT, HERE, POLICY, Vector, vector

# ---------------------------------------------------------------- known and not read


def graph(start: bytes = b"") -> bytes:
    """A `MetaGraphDef` with one operation."""
    operations = tf.field(1, tf.field(1, b"Const") + tf.field(3, b"\x0a\x06output"))
    return start + tf.field(1, tf.field(2, operations) + tf.field(5, b"2.21.0"))


def foreign_files() -> dict[str, bytes]:
    """The beginning of a file of each kind that is recognized and not read, by the kind's name."""
    tarred = io.BytesIO()
    with tarfile.open(fileobj=tarred, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("a"))
    return {
        "7z": b"7z\xbc\xaf\x27\x1c\x00\x04",
        "ar": b"!<arch>\n",
        "arrow": b"ARROW1\x00\x00",
        "bzip2": b"BZh91AY&SY",
        "cab": b"MSCF\x00\x00\x00\x00",
        "compress": b"\x1f\x9d\x90",
        "cpio": b"070701",
        "ds-store": b"\0\0\0\1Bud1\0",
        "gzip": b"\x1f\x8b\x08\x00",
        "hdf5": b"\x89HDF\r\n\x1a\n\x00",
        "lz4": b"\x04\x22\x4d\x18\x64",
        "lzma": b"]\x00\x00\x80\x00",
        "ocdbt-manifest": b"\x0c\xdb\x3a\x2a\x00",
        "ocdbt-node": b"\x0c\xdb\x20\xde\x00",
        "parquet": b"PAR1\x15\x04",
        "pdf": b"%PDF-1.7\n",
        "pem": b"-----BEGIN PRIVATE KEY-----\n",
        "picture-gif": b"GIF89a",
        "picture-jpeg": b"\xff\xd8\xff\xe0",
        "picture-png": b"\x89PNG\r\n\x1a\n",
        "picture-webp": b"RIFF\x04\0\0\0WEBP",
        "program-elf": b"\x7fELF\x02\x01\x01",
        "program-java": b"\xca\xfe\xba\xbe\x00\x00",
        "program-macos": b"\xcf\xfa\xed\xfe\x07\x00",
        "program-macos-32": b"\xce\xfa\xed\xfe\x07\x00",
        "program-python": b"\xa7\r\r\n\x00\x00\x00\x00",
        "program-python-3.14": b"\x2b\x0e\r\n\x00\x00\x00\x00",
        "program-wasm": b"\x00asm\x01\x00\x00\x00",
        "program-windows": b"MZ\x90\x00",
        "rar": b"Rar!\x1a\x07\x01\x00",
        "script": b"#!/bin/sh\n",
        "sqlite": b"SQLite format 3\x00",
        "tar": tarred.getvalue()[:512],
        "tensorflow-graph": graph(),
        "tensorflow-saved-model": b"\x08\x01" + tf.field(2, graph()),
        "tensorflow-frozen": tf.field(1, tf.field(1, b"x") + tf.field(2, b"Placeholder")),
        "tflite": b"\x1c\x00\x00\x00TFL3",
        "xz": b"\xfd7zXZ\x00",
        "zlib": b"x\x9c\x03\x00",
        "zlib-joblib": b"ZF0x1",
        "zstd": b"\x28\xb5\x2f\xfd\x04",
    }


def foreign() -> Iterator[Vector]:
    for name, data in foreign_files().items():
        yield vector(f"foreign-{name}", POLICY, "format-not-supported", "", HERE, data, file="model.bin")
    cut = b"\x40\0\0\0\0\0\0\0" + b'{"w":'
    yield vector("unknown-safetensors", FORMAT, "damaged-file", "cut short", HERE, cut, file="model.safetensors")
    prefixed = b"0123456789PK\3\4"
    yield vector("unknown-pytorch", FORMAT, "damaged-file", "bytes before it", HERE, prefixed, file="model.pt")
    yield vector("unknown-text", FORMAT, "not-a-pickle", "", HERE, b"config:\n  a: 1\n", file="c.yaml")
    yield vector("unknown-bytes", FORMAT, "not-a-pickle", "", HERE, b"DIRC\0\0\0\2", file="index")
    yield vector("unknown-old-pickle", POLICY, "global-not-allowed", "", HERE, b"cos\ngetcwd\n(tR.", file="c.yaml")
    twice = b'{"a": {"k": 1, "k": 2}}'
    yield vector("inert-json-twice", FORMAT, "duplicate-key", "", twice, file="config.json")


# ---------------------------------------------------------------- bundles

VALID = tf.entry(tf.FLOAT, tf.shape_of(2), nbytes=8)
BLOCK = tf.block([(b"", tf.header()), (b"w", VALID)])
DATA = "m.data-00000-of-00001"


def index(*rows: tuple[bytes, bytes]) -> bytes:
    return tf.table([(b"", tf.header()), *rows])


def bundles() -> Iterator[Vector]:
    def bad(name: str, code: str, comment: str, *parts: object, expect: str = FORMAT) -> Vector:
        return vector(f"bundle-{name}", expect, code, comment, *parts, file="m.index")

    def entry(name: str, code: str, value: bytes, *, expect: str = FORMAT, ahead: int = 0) -> Vector:
        """An index with one entry, which is refused `ahead` bytes behind its start."""
        whole = index((b"w", value))
        at = whole.index(value) + ahead
        return bad(name, code, "", whole[:at], HERE, whole[at:], expect=expect)

    whole = tf.table_of_blocks([(b"w", BLOCK)])
    behind = len(whole[:-8].rstrip(b"\0"))
    yield bad(
        "footer", "bad-table", "a byte in its padding", whole[:behind], HERE, whole[behind:-9] + b"\1" + whole[-8:]
    )
    yield bad("checksum", "table-checksum", "one bit of a name", HERE, whole.replace(b"w\x08", b"v\x08", 1))
    snappy = BLOCK + tf.trailer(BLOCK, 1) + whole[len(BLOCK) + 5 :]
    yield bad("snappy", "format-not-supported", "a compressed table", HERE, snappy, expect=POLICY)
    yield bad("no-header", "bad-bundle", "the first key is not the empty one", HERE, tf.table([(b"w", VALID)]))
    yield entry("field-twice", "bad-protobuf", VALID + tf.field(1, 1), ahead=len(VALID))
    yield entry("varint-long", "bad-varint", b"\x08\x81\x00", ahead=1)
    yield entry("strings", "bundle-dtype", tf.entry(tf.STRING, b"", nbytes=6), expect=POLICY)
    yield entry("sliced", "bundle-sliced", VALID + tf.field(7, b""), expect=POLICY)
    yield entry("size", "bundle-extent", tf.entry(tf.FLOAT, tf.shape_of(2), nbytes=9))
    inside = tf.entry(tf.FLOAT, b"", offset=4, nbytes=4)
    both = index((b"a", VALID), (b"b", inside))
    at = both.index(inside)
    yield bad("overlap", "bundle-overlap", "", both[:at], HERE, both[at:])
    yield vector(
        "bundle-index-name", FORMAT, "bundle-file-name", "an index", index((b"w", VALID)), file="tensor00000_000"
    )

    def data(name: str, code: str, comment: str, *parts: object, beside: str, file: str = DATA) -> Vector:
        return vector(f"bundle-data-{name}", FORMAT, code, comment, *parts, beside=beside, file=file)

    beside = f"m.index {index((b'w', VALID)).hex()}"
    yield data("alone", "bundle-index-missing", "", bytes(8), beside="")
    yield data("number", "bundle-file-name", "", bytes(8), beside=beside, file="m.data-00001-of-00001")
    yield data("cut", "bundle-extent", "", HERE, bytes(7), beside=beside)
    yield data("pickle", "bundle-unlisted-bytes", "hidden behind the tensors", bytes(8), HERE, b"N.", beside=beside)


def stores() -> Iterator[Vector]:
    """What no part of an array store begins like."""
    said = (FORMAT, "name-contradicts-content")
    pickled = b"\x80\x04]."
    yield vector("store-pickle", *said, "", HERE, pickled, policy="orbax", file="manifest.ocdbt")
    yield vector("store-old-pickle", *said, "protocol 0", HERE, b"cos\ngetcwd\n(tR.", policy="orbax", file="0.0")
    yield vector("store-program", *said, "", HERE, b"\x7fELF\x02", policy="orbax", file="0123456789abcdef" * 2)
    yield vector("store-json", *said, "", b"[", HERE, policy="orbax", file="_METADATA")


def vectors() -> Iterator[Vector]:
    """Yield every vector of this section."""
    yield from foreign()
    yield from stores()
    yield from bundles()
