"""Files of each container, made from bytes, with every field open to a test that wants a wrong one."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from safeload.canonical import view
from safeload.formats import Parsed

NPY_F4 = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


def npy(header: str | bytes = NPY_F4, data: bytes = bytes(24), version: tuple[int, int] = (1, 0)) -> bytes:
    """An npy file; a header given as str is padded and ended as numpy does."""
    n_before = 10 if version == (1, 0) else 12
    if isinstance(header, str):
        header += " " * (-(n_before + len(header) + 1) % 64) + "\n"
        header = header.encode("latin-1")
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header + data


@dataclass
class Member:
    """A member of a zip archive. `local` and `central` replace fields of its headers, by the names used below."""

    name: str | bytes = "a.npy"
    data: bytes = field(default_factory=npy)
    method: int = 0
    flags: int = 0
    local: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)
    local_extra: bytes = b""
    central_extra: bytes = b""
    behind: bytes = b""
    """What stands behind the data: a descriptor, or what does not belong there."""

    @property
    def stored(self) -> bytes:
        if self.method != 8:
            return self.data
        deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
        return deflater.compress(self.data) + deflater.flush()


def descriptor(member: Member, *, wide: bool = False, **changed: Any) -> bytes:
    fields = {"signature": b"PK\7\10", "crc32": zlib.crc32(member.data), "stored": len(member.stored)}
    fields |= {"nbytes": len(member.data)} | changed
    return struct.pack("<4sIQQ" if wide else "<4sIII", *fields.values())


def zip64(*numbers: int) -> bytes:
    """A zip64 extra field."""
    return extra(1, struct.pack(f"<{len(numbers)}Q", *numbers))


def extra(number: int, data: bytes) -> bytes:
    return struct.pack("<HH", number, len(data)) + data


def zip_file(
    members: Sequence[Member] = (Member(),),
    *,
    before: bytes = b"",
    before_directory: bytes = b"",
    before_end: bytes = b"",
    behind: bytes = b"",
    end: dict[str, Any] | None = None,
    end64: dict[str, Any] | None = None,
    locator: dict[str, Any] | None = None,
    order: Sequence[int] | None = None,
) -> bytes:
    """An archive; `end64` and `locator` are written if they are not None, `order` is that of the central directory."""
    made = before
    headers = []
    for member in members:
        name = member.name.encode() if isinstance(member.name, str) else member.name
        stored = member.stored
        fields: dict[str, Any] = {"version": 20, "flags": member.flags, "method": member.method, "time": 0, "date": 33}
        fields |= {"crc32": zlib.crc32(member.data), "stored": len(stored), "nbytes": len(member.data)}
        local = {
            "signature": b"PK\3\4",
            **fields,
            "name": name,
            "n_name": len(name),
            "n_extra": len(member.local_extra),
        }
        local |= member.local
        central = {"signature": b"PK\1\2", "made_by": 20, **fields, "name": name, "n_comment": 0, "disk": 0}
        central["attributes"] = 0
        central |= {"header": len(made), "n_name": len(name), "n_extra": len(member.central_extra)} | member.central
        numbers = [local[key] for key in ("signature", "version", "flags", "method", "time", "date", "crc32")]
        numbers += [local[key] for key in ("stored", "nbytes", "n_name", "n_extra")]
        made += struct.pack("<4sHHHHHIIIHH", *numbers) + local["name"] + member.local_extra + stored + member.behind
        numbers = [central[key] for key in ("signature", "made_by", "version", "flags", "method", "time", "date")]
        numbers += [central[key] for key in ("crc32", "stored", "nbytes", "n_name", "n_extra", "n_comment", "disk")]
        packed = struct.pack("<4sHHHHHHIIIHHHHHII", *numbers, 0, central["attributes"], central["header"])
        headers.append(packed + central["name"] + member.central_extra)
    made += before_directory
    directory = b"".join(headers[index] for index in order or range(len(headers)))
    start = len(made)
    made += directory
    n = len(members)
    if end64 is not None or locator is not None:
        fields64 = {"signature": b"PK\6\6", "rest": 44, "by": 45, "version": 45, "disk": 0, "first": 0, "n_here": n}
        fields64 |= {"n_all": n, "length": len(directory), "start": start} | (end64 or {})
        at = len(made)
        made += struct.pack("<4sQHHIIQQQQ", *fields64.values())
        stated = {"signature": b"PK\6\7", "disk": 0, "at": at, "n_disks": 1} | (locator or {})
        made += struct.pack("<4sIQI", *stated.values())
    made += before_end
    last = {"signature": b"PK\5\6", "disk": 0, "first": 0, "n_here": n, "n_all": n, "length": len(directory)}
    last |= {"start": start, "n_comment": 0} | (end or {})
    return made + struct.pack("<4sHHHHIIH", *last.values()) + behind


def safetensors(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file; a header that is no text is written as JSON without padding."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def stated(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, object]:
    """What a safetensors header says of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def text(value: str | bytes) -> bytes:
    """A string of GGUF."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key and a value of GGUF."""
    return text(key) + struct.pack("<I", kind) + value


def info(name: str | bytes, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
    """A row of GGUF's table; dimensions with the fastest first, as the file has them."""
    n = len(dimensions)
    return text(name) + struct.pack(f"<I{n}QIQ", n, *dimensions, kind, offset)


def gguf(
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    pairs: Sequence[bytes] = (),
    *,
    version: int = 3,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file of rows made by `info` and pairs made by `pair`; `data` begins at the next aligned byte."""
    counts = struct.pack(
        "<QQ", len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs
    )
    head = b"GGUF" + struct.pack("<I", version) + counts + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) * bool(data) + data


def safetensors_sample() -> tuple[bytes, dict[str, np.ndarray[Any, np.dtype[Any]]]]:
    """A file of several types, in another order than its header has, and what it holds."""
    values: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
        "b": np.arange(6, dtype="<f4").reshape(2, 3),
        "a/x": np.array(7, dtype="<i8"),
        "é": np.array([1, 2], dtype=ml_dtypes.bfloat16),
        "none": np.zeros((0, 3), dtype="<f2"),
    }
    places, at = {}, 0
    for name, dtype in (("b", "F32"), ("a/x", "I64"), ("é", "BF16"), ("none", "F16")):
        array = values[name]
        places[name] = stated(dtype, array.shape, at, at + array.nbytes)
        at += array.nbytes
    header = {"__metadata__": {"format": "np"}, **{name: places[name] for name in sorted(places)}}
    return safetensors(header, b"".join(array.tobytes() for array in values.values())), values


def gguf_sample() -> tuple[bytes, dict[str, np.ndarray[Any, np.dtype[Any]]]]:
    """A model of plain and quantised tensors behind metadata of every type, and what it holds."""
    values: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
        "a": np.arange(6, dtype="<f4").reshape(2, 3),
        "b": np.array([1, 2, 3], dtype="<f2"),
        "q/blocks": np.arange(2 * 36, dtype="u1").reshape(2, 36),
        "c": np.array([[[-1]], [[5]]], dtype="<i8"),
        "d": np.array([0.5], dtype=ml_dtypes.bfloat16),
        "s": np.array(1.5, dtype="<f8"),
    }
    rows, data = [], b""
    for (name, array), kind in zip(values.items(), (0, 1, 2, 27, 30, 28), strict=True):
        dimensions = (64, 2) if kind == 2 else array.shape[::-1]
        rows.append(info(name.removesuffix("/blocks"), dimensions, kind, len(data)))
        data += array.tobytes() + bytes(-array.nbytes % 64)
    numbers = (b"\1", b"\1", b"\1\0", b"\1\0", bytes(4), bytes(4), bytes(4), b"\1", text("v"))
    pairs = [pair("general.alignment", 4, struct.pack("<I", 64))]
    pairs += [pair(f"k.{kind}", kind, value) for kind, value in enumerate(numbers)]
    pairs += [pair(f"k.{kind}", kind, bytes(8)) for kind in (10, 11, 12)]
    items = {7: b"\0\1", 8: text("a") + text(""), 4: bytes(8)}
    for kind, value in items.items():
        pairs.append(pair(f"array.{kind}", 9, struct.pack("<IQ", kind, 2) + value))
    nested = struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 3) + b"abc"
    pairs.append(pair("array.nested", 9, nested))
    return gguf(rows, data, pairs, alignment=64), values


def arrays_of(parsed: Parsed, raw: bytes) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """What a parser found, made into arrays, after a look at whether each lies in the file and fits its shape."""
    assert parsed.refusal is None, parsed.refusal
    found = {}
    for spec in parsed.tensors:
        extent = spec.extent
        assert extent.nbytes == spec.n_elements * spec.dtype.itemsize
        assert 0 <= extent.offset <= len(raw)
        if extent.inline is None:
            assert extent.offset + extent.nbytes <= len(raw)
        payload = raw[extent.offset : extent.offset + extent.nbytes] if extent.inline is None else extent.inline
        found[spec.name] = view(payload, spec)
    assert len(found) == len(parsed.tensors)
    return found


def same_arrays(
    found: Mapping[str, np.ndarray[Any, np.dtype[Any]]], expected: Mapping[str, np.ndarray[Any, np.dtype[Any]]]
) -> bool:
    """Whether names, types, shapes and bits are the same; NaN equals itself."""
    return list(found) == list(expected) and all(
        (array.dtype, array.shape, array.tobytes()) == (other.dtype, other.shape, other.tobytes())
        for array, other in zip(found.values(), expected.values(), strict=True)
    )


def damaged(raw: bytes) -> Iterator[bytes]:
    """The file cut at each byte, and each byte of it changed in four ways."""
    for n in range(len(raw)):
        yield raw[:n]
        for change in (0x01, 0x20, 0x80, 0xFF):
            yield raw[:n] + bytes([raw[n] ^ change]) + raw[n + 1 :]
