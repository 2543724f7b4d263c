"""A writer of TensorFlow's checkpoint bundles, from the format's description, which writes broken ones as readily."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FLOAT, STRING, INT8, INT64, QINT8, BFLOAT16, HALF = 1, 7, 6, 9, 11, 14, 19


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def shape_of(*lengths: int) -> bytes:
    return b"".join(field(2, field(1, n) if n else b"") for n in lengths)


def header(n_shards: int = 1, *, endianness: int = 0, version: bytes = field(1, 1)) -> bytes:
    return field(1, n_shards) + (field(2, endianness) if endianness else b"") + field(3, version)


def entry(  # noqa: PLR0917 - in the order of the message's fields
    dtype: int, shape: bytes, shard: int = 0, offset: int = 0, nbytes: int = 0, extra: bytes = b""
) -> bytes:
    numbers = b"".join(field(at, n) for at, n in ((3, shard), (4, offset), (5, nbytes)) if n)
    return field(1, dtype) + field(2, shape) + numbers + b"\x35abcd" + extra


def block(rows: Iterable[tuple[bytes, bytes]], *, interval: int = 16) -> bytes:
    """Entries whose keys share prefixes, a whole key every `interval` entries."""
    out, restarts, before = b"", [], b""
    for number, (key, value) in enumerate(rows):
        shared = 0
        if number % interval == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(before), len(key)) and before[shared] == key[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    restarts = restarts or [0]
    return out + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def trailer(body: bytes, compression: int = 0) -> bytes:
    kind = bytes([compression])
    return kind + struct.pack("<I", masked(crc32c(body + kind)))


def handle(offset: int, size: int) -> bytes:
    return varint(offset) + varint(size)


def table_of_blocks(blocks: Sequence[tuple[bytes, bytes]], *, meta: bytes | None = None, tail: bytes = b"") -> bytes:
    """A table of finished blocks, each with the key that the index has for it."""
    out, index = b"", []
    for key, body in blocks:
        index.append((key, handle(len(out), len(body))))
        out += body + trailer(body)
    meta = block([]) if meta is None else meta
    handles = handle(len(out), len(meta))
    out += meta + trailer(meta)
    index_block = block(index, interval=1)
    handles += handle(len(out), len(index_block))
    out += index_block + trailer(index_block)
    return out + (handles + tail).ljust(40, b"\0") + MAGIC


def table(rows: Sequence[tuple[bytes, bytes]], *, per_block: int = 1000) -> bytes:
    parts = [rows[start : start + per_block] for start in range(0, len(rows), per_block)]
    return table_of_blocks([(part[-1][0], block(part)) for part in parts])


@dataclass(frozen=True)
class Tensor:
    dtype: int
    shape: tuple[int, ...]
    data: bytes
    shard: int = 0


def bundle(
    prefix: str, tensors: Mapping[str, Tensor], *, n_shards: int = 1, align: int = 1, per_block: int = 1000
) -> dict[str, bytes]:
    """The files of a bundle by their names, as TensorFlow's writer makes them."""
    shards = [b""] * n_shards
    rows = [(b"", header(n_shards))]
    for name, tensor in sorted(tensors.items()):
        shards[tensor.shard] += bytes(-len(shards[tensor.shard]) % align)
        at = len(shards[tensor.shard])
        rows.append((name.encode(), entry(tensor.dtype, shape_of(*tensor.shape), tensor.shard, at, len(tensor.data))))
        shards[tensor.shard] += tensor.data
    files = {f"{prefix}.data-{i:05d}-of-{n_shards:05d}": data for i, data in enumerate(shards)}
    return {**files, f"{prefix}.index": table(rows, per_block=per_block)}
