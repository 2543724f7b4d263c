"""PyTorch files made from bytes: both containers as PyTorch's writers lay them out, each part replaceable by a bad one.

Nothing here imports torch. That the good ones are what torch writes was seen by hand: it loads them, to these values.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.streams import Writer, op

ITEMSIZE = {
    "DoubleStorage": 8,
    "FloatStorage": 4,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "LongStorage": 8,
    "IntStorage": 4,
    "ShortStorage": 2,
    "CharStorage": 1,
    "ByteStorage": 1,
    "BoolStorage": 1,
    "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8,
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QInt32Storage": 4,
    "UntypedStorage": 1,
}
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL_2 = Writer(2)
"""What `torch.save` writes where it is not told another."""
RECORDS = {
    ".format_version": b"1",
    ".storage_alignment": b"64",
    "byteorder": b"little",
    "version": b"3\n",
    ".data/serialization_id": b"1306957282387717882700000000000000000000",
}
"""What PyTorch 2.13 writes beside the pickle and the storages."""


@dataclass(frozen=True)
class Storage:
    """A storage of a sample: its bytes, and what its persistent id says of it."""

    key: str
    kind: str
    data: bytes
    location: str = "cpu"
    n_elements: int | None = None

    @property
    def count(self) -> int:
        return len(self.data) // ITEMSIZE[self.kind] if self.n_elements is None else self.n_elements


@dataclass(frozen=True)
class Torch:
    """Opcodes for PyTorch's calls, in the forms of one protocol and one container."""

    w: Writer = PROTOCOL_2
    legacy: bool = False

    def storage(self, storage: Storage, **replaced: bytes) -> bytes:
        """A storage by its persistent id; `replaced` puts opcodes in place of a part: `kind_`, `key_`, ..."""
        module = "torch.storage" if storage.kind == "UntypedStorage" else "torch"
        parts = {
            "typename": self.w.text("storage"),
            "kind": self.w.glob(module, storage.kind),
            "key": self.w.text(storage.key),
            "location": self.w.text(storage.location),
            "count": self.w.integer(storage.count),
        }
        if self.legacy:
            parts["view"] = op.NONE()
        assert {f"{name}_" for name in parts} >= replaced.keys()
        return self.w.tuple_(*(replaced.get(f"{name}_", part) for name, part in parts.items())) + op.BINPERSID()

    def hooks(self) -> bytes:
        return self.w.call("collections", "OrderedDict")

    def tensor(
        self,
        storage: Storage | bytes,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        first: int = 0,
        *,
        dtype: str | None = None,
        **replaced: bytes,
    ) -> bytes:
        """A tensor: by `_rebuild_tensor_v3` where `dtype` is given, else by `_rebuild_tensor_v2`."""
        parts = {
            "storage": storage if isinstance(storage, bytes) else self.storage(storage),
            "first": self.w.integer(first),
            "size": self.w.ints(*shape),
            "stride": self.w.ints(*(dense(shape) if strides is None else strides)),
            "grad": self.w.boolean(False),
            "hooks": self.hooks(),
        }
        if dtype is not None:
            parts["dtype"] = self.w.glob("torch", dtype)
        parts["metadata"] = b""
        assert {f"{name}_" for name in parts} >= replaced.keys()
        name = "_rebuild_tensor_v2" if dtype is None else "_rebuild_tensor_v3"
        args = [replaced.get(f"{name}_", part) for name, part in parts.items()]
        return self.w.call("torch._utils", name, *(arg for arg in args if arg))

    def quantized(self, storage: Storage, shape: Sequence[int], quantizer: bytes, **replaced: bytes) -> bytes:
        parts = {
            "storage": self.storage(storage),
            "first": self.w.integer(0),
            "size": self.w.ints(*shape),
            "stride": self.w.ints(*dense(shape)),
            "quantizer": quantizer,
            "grad": self.w.boolean(False),
            "hooks": self.hooks(),
        }
        args = (replaced.get(f"{name}_", part) for name, part in parts.items())
        return self.w.call("torch._utils", "_rebuild_qtensor", *args)

    def mapping(self, items: Mapping[str, bytes]) -> bytes:
        pairs = b"".join(self.w.text(key) + value for key, value in items.items())
        return op.EMPTY_DICT() + op.MARK() + pairs + op.SETITEMS()

    def state_dict(self, items: Mapping[str, bytes], metadata: bytes | None = None) -> bytes:
        """An `OrderedDict`, with `_metadata` as `Module.state_dict` gives it."""
        pairs = b"".join(self.w.text(key) + value for key, value in items.items())
        made = self.w.call("collections", "OrderedDict") + op.MARK() + pairs + op.SETITEMS()
        if metadata is None:
            return made
        return made + self.mapping({"_metadata": metadata}) + op.BUILD()

    def pickle(self, value: bytes) -> bytes:
        return op.PROTO(self.w.protocol) + value + op.STOP()


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a C-contiguous tensor, as PyTorch writes them: an empty dimension counts as 1."""
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


# ---------------------------------------------------------------- zip


@dataclass(frozen=True)
class Member:
    """One member of an archive; what is `None` is taken from the data."""

    name: str
    data: bytes
    method: int = 0
    crc32: int | None = None


def members(
    pickle: bytes,
    storages: Sequence[Storage] = (),
    *,
    root: str = "archive",
    records: Mapping[str, bytes] = RECORDS,
    more: Sequence[Member] = (),
) -> list[Member]:
    """The members of a file in the order in which PyTorch 2.13 writes them."""
    before = [".format_version", ".storage_alignment", "byteorder"]
    made = [Member(f"{root}/data.pkl", pickle)]
    made += [Member(f"{root}/{name}", records[name]) for name in before if name in records]
    made += [Member(f"{root}/data/{storage.key}", storage.data) for storage in storages]
    made += [Member(f"{root}/{name}", data) for name, data in records.items() if name not in before]
    return [*made, *more]


def zipped(made: Sequence[Member], *, alignment: int = 64) -> bytes:
    """An archive as miniz lays it out for PyTorch: data aligned by an `FB` field, and descriptors behind data."""
    body, directory = bytearray(), bytearray()
    for member in made:
        name = member.name.encode()
        crc = zlib.crc32(member.data) if member.crc32 is None else member.crc32
        stored = member.data
        if member.method == 8:
            deflater = zlib.compressobj(wbits=-15)
            stored = deflater.compress(member.data) + deflater.flush()
        header, start = len(body), len(body) + 30 + len(name) + 4
        padding = -start % alignment
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        flags = 0x0808 if member.data else 0x0800
        sizes = (0, 0, 0) if member.data else (crc, 0, 0)
        body += struct.pack("<4s5H3I2H", b"PK\3\4", 0, flags, member.method, 0, 0, *sizes, len(name), len(extra))
        body += name + extra + stored
        if member.data:
            body += struct.pack("<4s3I", b"PK\7\10", crc, len(stored), len(member.data))
        central = (
            0,
            0,
            flags,
            member.method,
            0,
            0,
            crc,
            len(stored),
            len(member.data),
            len(name),
            0,
            0,
            0,
            0,
            0,
            header,
        )
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", *central) + name
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(made), len(made), len(directory), len(body), 0)
    return bytes(body + directory + end)


def torch_zip(pickle: bytes, storages: Sequence[Storage] = (), **options: object) -> bytes:
    """A file as `torch.save` writes it since version 1.6; `options` are those of `members`."""
    return zipped(members(pickle, storages, **options))  # type: ignore[arg-type] # passed on


# ---------------------------------------------------------------- several pickles


def preamble(w: Writer, **replaced: bytes) -> list[bytes]:
    """The first three pickles of a legacy file: magic number, version, facts of the system."""
    torch = Torch(w)
    sizes = torch.mapping({"short": w.integer(2), "int": w.integer(4), "long": w.integer(4)})
    facts = {"protocol_version": w.integer(1001), "little_endian": w.boolean(True), "type_sizes": sizes}
    parts = {"magic": w.integer(MAGIC), "version": w.integer(1001), "system": torch.mapping(facts)}
    return [torch.pickle(replaced.get(name, part)) for name, part in parts.items()]


def torch_legacy(
    pickle: bytes,
    storages: Sequence[Storage] = (),
    *,
    w: Writer = PROTOCOL_2,
    keys: bytes | None = None,
    counts: Callable[[Storage], int] = lambda storage: storage.count,
    **replaced: bytes,
) -> bytes:
    """A file as `torch.save` wrote it before version 1.6."""
    if keys is None:
        keys = op.EMPTY_LIST() + op.MARK() + b"".join(w.text(storage.key) for storage in storages) + op.APPENDS()
    parts = [*preamble(w, **replaced), pickle, Torch(w).pickle(keys)]
    return b"".join(parts) + b"".join(struct.pack("<q", counts(storage)) + storage.data for storage in storages)


# ---------------------------------------------------------------- honest files


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


WEIGHT = Storage("0", "FloatStorage", floats(*range(6)))


def each_container() -> Iterator[tuple[str, Callable[[Callable[[Torch], bytes], Sequence[Storage]], bytes]]]:
    """Yield a name and a function that makes a file, for each container and protocol that PyTorch can write."""
    for protocol in (2, 3, 4, 5):
        w = Writer(protocol)

        def as_zip(value: Callable[[Torch], bytes], storages: Sequence[Storage], w: Writer = w) -> bytes:
            torch = Torch(w)
            return torch_zip(torch.pickle(value(torch)), storages)

        def as_legacy(value: Callable[[Torch], bytes], storages: Sequence[Storage], w: Writer = w) -> bytes:
            torch = Torch(w, legacy=True)
            return torch_legacy(torch.pickle(value(torch)), storages, w=w)

        yield f"zip-{protocol}", as_zip
        yield f"legacy-{protocol}", as_legacy


def with_data(storage: Storage, data: bytes) -> Storage:
    """The same persistent id over other bytes."""
    return replace(storage, data=data, n_elements=storage.count)
