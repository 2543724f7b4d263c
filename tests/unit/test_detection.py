"""A file is what its first bytes say, whatever it is called; and a pickle is never taken for anything else."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import io
import lzma
import tarfile
import zipfile
import zlib

import numpy as np
import pytest

from safeload.formats.detection import _MAGIC, HEAD_BYTES, detect, is_tar, other_reading
from tests import tensorflow_sample as tf
from tests.streams import honest_streams
from tests.vectors.foreign import foreign_files, graph


def name_of(data: bytes) -> str | None:
    kind = detect(data[:HEAD_BYTES], len(data))
    return None if kind is None else kind.name


def made() -> dict[str, bytes]:
    """Files that the standard library and numpy themselves write."""
    zipped, tarred, npy = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("a", "b")
    with tarfile.open(fileobj=tarred, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a"))
    np.save(npy, np.zeros(3))
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    return {
        "zip": zipped.getvalue(),
        "tar": tarred.getvalue(),
        "npy": npy.getvalue(),
        "gzip": gzip.compress(b"a"),
        "xz": lzma.compress(b"a"),
        "lzma": lzma.compress(b"a", lzma.FORMAT_ALONE),
        "bzip2": bz2.compress(b"a"),
        "program": importlib.util.MAGIC_NUMBER + bytes(12),
        "zlib": zlib.compress(b"a"),
        "safetensors": len(header).to_bytes(8, "little") + header + bytes(4),
        "html": b"\r\n  <!DOCTYPE HTML><html>",
        "git-lfs-pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "script": b"#!/bin/sh\n",
    }


@pytest.mark.parametrize("name", made())
def test_files_as_they_are_written_are_recognized(name: str) -> None:
    data = made()[name]
    assert name_of(data) == name
    assert name_of(b"\0" + data) is None or name == "html"


def test_an_empty_archive_is_an_archive() -> None:
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    assert name_of(empty.getvalue()) == "zip"


@pytest.mark.parametrize(
    ("offset", "magic", "kind"), _MAGIC, ids=lambda value: repr(value) if isinstance(value, bytes) else ""
)
def test_each_signature_is_recognized_where_it_stands_and_only_whole(offset: int, magic: bytes, kind: object) -> None:
    assert detect(bytes(offset) + magic, offset + len(magic)) is kind
    assert detect(bytes(offset) + magic[:-1], offset + len(magic) - 1) is not kind
    assert detect(bytes(offset + 1) + magic, offset + 1 + len(magic)) is not kind
    assert offset + len(magic) <= HEAD_BYTES


@pytest.mark.parametrize("level", [1, 6, 9])
def test_zlib_is_recognized_at_any_level(level: int) -> None:
    assert name_of(zlib.compress(b"a" * 100, level)) == "zlib"


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_is_a_pickle_or_nothing_known(protocol: int) -> None:
    assert name_of(honest_streams()[protocol]) == ("pickle" if protocol >= 2 else None)


def test_a_pickle_that_looks_like_an_archive_behind_its_header_is_a_pickle() -> None:
    assert name_of(b"\x80\x04" + bytes(255) + b"ustar") == "pickle"


def test_each_foreign_kind_says_what_it_is_and_what_to_do() -> None:
    for _, _, kind in _MAGIC:
        assert kind.noun.startswith(("a ", "an ", "gzip", "bzip2", "xz", "zstd", "lz4", "lzma", "zlib"))
        assert len(kind.advice) > 8


@pytest.mark.parametrize("data", [b"", b"\0", b"{}", b"hello", b"\x1f", b"<h", bytes(8), bytes(8) + b"["])
def test_anything_else_is_nothing_known(data: bytes) -> None:
    assert name_of(data) is None


def test_a_safetensors_header_must_fit_the_file() -> None:
    assert name_of((1 << 40).to_bytes(8, "little") + b"{") is None
    assert name_of((1).to_bytes(8, "little") + b"{") == "safetensors"
    assert name_of((2).to_bytes(8, "little") + b"{") is None


@pytest.mark.parametrize("name", foreign_files())
def test_each_foreign_file_is_recognized_as_what_it_is(name: str) -> None:
    found = name_of(foreign_files()[name])
    assert found is not None
    assert name.startswith((found, "tensorflow-"))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(graph(), id="meta"),
        pytest.param(tf.field(1, tf.field(1, b"v1") + graph()[2:]), id="meta with a version"),
        pytest.param(b"\x08\x01" + tf.field(2, graph()), id="saved model"),
        pytest.param(tf.field(1, tf.field(1, b"a/b:0") + tf.field(2, b"Const")), id="graph"),
    ],
)
def test_a_graph_of_tensorflow_is_recognized_and_only_if_its_messages_nest(data: bytes) -> None:
    assert name_of(data) == "tensorflow-graph"
    assert detect(data[:HEAD_BYTES], len(data) - 1) is None
    assert name_of(data[:6] + bytes(100)) is None


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(tf.field(1, tf.field(1, b"<unk>") + b"\x15\0\0\0\0" + tf.field(3, 2)), id="sentencepiece"),
        pytest.param(b"\n\n\n\nOnly newlines, then text", id="text"),
        pytest.param(b"\n" * 600, id="newlines"),
        pytest.param(b"\x0a" + b"\x80" * 100, id="a length without an end"),
        pytest.param(tf.field(1, tf.field(1, b"x") + tf.field(2, b"not an operation")), id="no name"),
        pytest.param(tf.field(1, b""), id="empty"),
    ],
)
def test_other_protocol_buffers_and_text_are_no_graph(data: bytes) -> None:
    assert name_of(data) is None


def test_a_line_of_two_characters_does_not_make_a_program_of_a_text() -> None:
    assert name_of(b"{}\r\n") is None


def test_what_another_reader_looks_for_first_is_told() -> None:
    for length, other in ((b"PK\3\4", "a zip archive"), (b"\x1f\x8b\x08\0", "gzip-compressed data")):
        assert other_reading(length + bytes(4) + b'{"w":') == other
    assert other_reading(b"PK\2\4" + bytes(4) + b'{"w":') is None


@pytest.mark.parametrize("form", ["%06o\0 ", "%o \0", "0_%05o\0", "signed", "binary", "negative"])
def test_a_header_of_tar_is_found_as_tarfile_finds_it(form: str) -> None:
    block = bytearray(512)
    block[:14] = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
    block[100:124] = b"0000644\0" * 3
    block[124:148] = b"00000000000\0" * 2
    block[148:156] = b" " * 8
    block[156:157] = b"0"
    if form == "negative":
        block[157:400] = b"\x80" * 243
    unsigned = sum(block)
    signed = unsigned - 256 * sum(byte > 0x7F for byte in block)
    written = {
        "signed": b"%06o\0 " % abs(signed),
        "binary": b"\x80" + unsigned.to_bytes(7, "big"),
        "negative": b"\xff" + (signed % (1 << 56)).to_bytes(7, "big"),
    }
    block[148:156] = (written[form] if form in written else (form % unsigned).encode()).ljust(8, b"\0")
    with tarfile.open(fileobj=io.BytesIO(bytes(block) + bytes(1024)), mode="r:") as archive:
        assert len(archive.getmembers()) == 1
    assert is_tar(bytes(block))
    block[0] ^= 1
    assert not is_tar(bytes(block))
    assert not is_tar(bytes(block[:511]))
