"""Vectors of PyTorch's files. See `tests.vectors.generate`."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from tests.streams import Writer, op
from tests.torch_sample import (
    MAGIC,
    RECORDS,
    WEIGHT,
    Member,
    Storage,
    Torch,
    members,
    torch_legacy,
    torch_zip,
    with_data,
    zipped,
)
from tests.torch_sample import (
    preamble as preamble_pickles,
)
from tests.vectors.generate import FORMAT, HERE, LIMIT, POLICY, Vector

w = Writer(2)
t = Torch(w)
old = Torch(w, legacy=True)
WHOLE = t.pickle(t.tensor(WEIGHT, (2, 3)))
INTEGERS = Storage("1", "QInt8Storage", bytes(range(6)))
UNTYPED = Storage("2", "UntypedStorage", bytes(8))


def _joined(parts: Sequence[object]) -> tuple[bytes, int]:
    assert parts.count(HERE) == 1
    at = parts.index(HERE)
    before, behind = (
        b"".join(part for part in some if isinstance(part, bytes)) for some in (parts[:at], parts[at + 1 :])
    )
    return op.PROTO(2) + before + behind + op.STOP(), 2 + len(before)


def in_zip(
    name: str,
    expect: str,
    code: str,
    comment: str,
    *parts: object,
    storages: Sequence[Storage] = (WEIGHT,),
    change: str = "",
) -> Vector:
    """A zip file whose pickle is refused at `HERE`."""
    pickle, at = _joined(parts)
    raw = torch_zip(pickle, storages)
    return Vector(f"torch-{name}", expect, code, comment, raw, raw.index(pickle) + at, file="a.pt", change=change)


def in_legacy(name: str, expect: str, code: str, comment: str, *parts: object) -> Vector:
    """A file of several pickles whose fourth is refused at `HERE`."""
    pickle, at = _joined(parts)
    raw = torch_legacy(pickle, [WEIGHT])
    return Vector(f"torch-{name}", expect, code, comment, raw, raw.index(pickle) + at, file="a.pt")


def calls() -> Iterator[Vector]:
    """Calls that are refused where they are made."""

    def call(
        name: str, code: str, comment: str, body: bytes, expect: str = FORMAT, *, over: Sequence[Storage] = (WEIGHT,)
    ) -> Vector:
        return in_zip(name, expect, code, comment, body[:-1], HERE, body[-1:], storages=over)

    def quantizer(*parts: bytes) -> bytes:
        return t.quantized(INTEGERS, (2, 3), w.tuple_(*parts))

    affine, channels = w.glob("torch", "per_tensor_affine"), w.glob("torch", "per_channel_affine")
    bad = "bad-arguments"
    yield call("view-longer", "view-out-of-bounds", "one row more than there is", t.tensor(WEIGHT, (3, 3)))
    yield call("view-behind", "view-out-of-bounds", "", t.tensor(WEIGHT, (2, 3), first=1))
    yield call("view-strided", "view-out-of-bounds", "the last row", t.tensor(WEIGHT, (2, 2), (5, 1)))
    yield call("view-before", "bad-view", "before the storage", t.tensor(WEIGHT, (1,), first=-1))
    yield call("view-bool", "bad-view", "True for 1", t.tensor(WEIGHT, (1,), first_=op.NEWTRUE()))
    yield call("stride-negative", "bad-shape", "", t.tensor(WEIGHT, (2,), (-1,), 1))
    yield call("stride-missing", "bad-shape", "", t.tensor(WEIGHT, (2, 3), (1,)))
    yield call("shape-negative", "bad-shape", "", t.tensor(WEIGHT, (-2, 3)))
    yield call("shape-list", "bad-shape", "", t.tensor(WEIGHT, (2, 3), size_=op.EMPTY_LIST()))
    yield call("shape-overflow", "bad-shape", "", t.tensor(WEIGHT, (1 << 62, 1 << 62), (0, 0)))
    yield call("dimensions", "bad-shape", "33", t.tensor(WEIGHT, (1,) * 33))
    yield call("hooks", bad, "a hook", t.tensor(WEIGHT, (2, 3), hooks_=t.state_dict({"a": op.NONE()})))
    yield call("hooks-dict", bad, "a plain dict", t.tensor(WEIGHT, (2, 3), hooks_=op.EMPTY_DICT()))
    yield call("grad", bad, "1 for True", t.tensor(WEIGHT, (2, 3), grad_=w.integer(1)))
    yield call("of-bytes", bad, "an array's bytes for a storage", t.tensor(w.text("0"), (2, 3)), over=())
    conjugated = t.mapping({"conj": op.NEWTRUE()})
    yield call(
        "conjugated",
        "view-not-resolved",
        "values differ from bytes",
        t.tensor(WEIGHT, (2, 3), metadata_=conjugated),
        POLICY,
    )
    of_quantized = t.tensor(INTEGERS, (6,))
    yield call("plain-of-quantized", bad, "without its scale", of_quantized, over=[INTEGERS])
    yield call("untyped-as-plain", bad, "no dtype", t.tensor(UNTYPED, (8,)), over=[UNTYPED])
    size = t.tensor(UNTYPED, (8,), dtype="Size")
    yield call("untyped-dtype", "bad-dtype", "a global that is no dtype", size, over=[UNTYPED])
    parameter = w.call("torch._utils", "_rebuild_parameter", op.NONE(), w.boolean(False), t.hooks())
    yield call("parameter-of-none", bad, "", parameter, over=())
    state = t.mapping({"tag": w.integer(1)})
    weight = t.tensor(WEIGHT, (2, 3))
    with_state = w.call("torch._utils", "_rebuild_parameter_with_state", weight, w.boolean(False), t.hooks(), state)
    yield call("parameter-with-state", bad, "an attribute", with_state)
    for name, quantized in (
        ("scale-zero", quantizer(affine, op.BINFLOAT(0.0), w.integer(0))),
        ("scale-infinite", quantizer(affine, op.BINFLOAT(float("inf")), w.integer(0))),
        ("scale-missing", quantizer(affine, w.integer(0))),
        ("scales-fewer", quantizer(channels, t.tensor(WEIGHT, (1,)), t.tensor(WEIGHT, (1,)), w.integer(0))),
        ("scheme", quantizer(w.glob("torch", "Size"), op.BINFLOAT(1.0), w.integer(0))),
    ):
        yield call(f"quantizer-{name}", "bad-quantizer", "", quantized, over=[WEIGHT, INTEGERS])


def storages() -> Iterator[Vector]:
    """Persistent ids that are refused."""
    bad = "bad-persistent-id"

    def named(name: str, code: str, comment: str, **replaced: bytes) -> Vector:
        pid = t.storage(WEIGHT, **replaced)
        return in_zip(name, FORMAT, code, comment, pid[:-1], HERE, pid[-1:])

    yield named("storage-kind", bad, "another typename", typename_=w.text("tensor"))
    yield named("storage-class", "bad-storage", "a global that is no storage", kind_=w.glob("torch", "Size"))
    yield named("storage-key-int", bad, "", key_=w.integer(0))
    yield named("storage-key-long", bad, "", key_=w.text("0" * 65))
    yield named("storage-location", bad, "", location_=w.text("/dev/sda"))
    yield named("storage-meta", bad, "no data", location_=w.text("meta"))
    yield named("storage-negative", bad, "", count_=w.integer(-1))
    yield named("storage-huge", bad, "", count_=op.LONG1(1 << 62))
    yield in_zip("storage-none", FORMAT, bad, "", op.NONE(), HERE, op.BINPERSID())
    yield in_zip("storage-text", FORMAT, bad, "", w.text("0"), HERE, op.BINPERSID())
    other = t.storage(Storage("0", "IntStorage", WEIGHT.data))
    first = t.storage(WEIGHT)
    yield in_zip("storage-twice", FORMAT, "storage-differs", "of two types", first + other[:-1], HERE, other[-1:])
    untyped = old.storage(UNTYPED)
    yield in_legacy("storage-untyped", FORMAT, "bad-storage", "", untyped[:-1], HERE, untyped[-1:])
    view = w.tuple_(w.text("1"), w.integer(0), w.integer(2))
    pid = Torch(w).storage(WEIGHT)
    yield in_legacy("legacy-zip-id", FORMAT, bad, "five parts", pid[:-1], HERE, pid[-1:])
    as_view = w.tuple_(
        *(w.text("storage"), w.glob("torch", "FloatStorage"), w.text("0"), w.text("cpu"), w.integer(6), view)
    )
    yield in_legacy("legacy-view", FORMAT, bad, "a view of a storage", as_view, HERE, op.BINPERSID())
    module = w.tuple_(w.text("module"), w.glob("collections", "OrderedDict"), w.text("a.py"), w.text("import os"))
    yield in_legacy("legacy-module", POLICY, "pytorch-module", "a class and its source", module, HERE, op.BINPERSID())


def attributes() -> Iterator[Vector]:
    """What is stored in or given to an `OrderedDict`."""
    empty = t.hooks()
    bad = "bad-state"
    yield in_zip("attribute", FORMAT, bad, "not `_metadata`", empty + t.mapping({"items": op.NONE()}), HERE, op.BUILD())
    state = t.mapping({"_metadata": op.NONE()})
    yield in_zip("attribute-twice", FORMAT, bad, "", empty + state + op.BUILD() + state, HERE, op.BUILD())
    item = op.BINGET(0) + w.text("a") + op.NONE()
    hooked = t.tensor(WEIGHT, (2, 3), hooks_=empty + op.BINPUT(0))
    yield in_zip("hooks-later", FORMAT, "bad-setitem", "behind the check", hooked + item, HERE, op.SETITEM())
    raw = torch_zip(t.pickle(t.state_dict({}, t.tensor(WEIGHT, (2, 3)))), [WEIGHT])
    yield Vector("torch-attribute-tensor", FORMAT, "not-data", "a tensor that no value shows", raw, None, file="a.pt")


def archives() -> Iterator[Vector]:
    """Archives that hold something else than PyTorch writes."""

    def archive(name: str, why: tuple[str, str], comment: str, made: list[Member], at: bytes | None) -> Vector:
        raw = zipped(made)
        return Vector(f"torch-{name}", *why, comment, raw, 0 if at is None else raw.index(at), file="a.pt")

    def other(name: str, **options: object) -> list[Member]:
        return members(WHOLE, [WEIGHT], more=[Member(name, b"other bytes")], **options)  # type: ignore[arg-type]

    def record(name: str, data: bytes) -> list[Member]:
        return members(WHOLE, [WEIGHT], records={**RECORDS, name: data})

    member = "pytorch-member"
    yield archive("script", (POLICY, "torchscript"), "", other("archive/constants.pkl"), b"other bytes")
    yield archive("script-code", (POLICY, "torchscript"), "", other("archive/code/a.py"), b"other bytes")
    yield archive("other-member", (FORMAT, member), "", other("archive/hidden.pkl"), b"other bytes")
    yield archive("other-root", (FORMAT, member), "", other("brchive/data.pkl"), b"other bytes")
    unversioned = {name: data for name, data in RECORDS.items() if name != "version"}
    yield archive("no-version", (FORMAT, member), "", members(WHOLE, [WEIGHT], records=unversioned), None)
    unused = other("archive/data/1")
    yield archive("storage-unused", (FORMAT, "storage-unused"), "bytes that nobody sees", unused, b"other bytes")
    raw = torch_zip(WHOLE)
    yield Vector("torch-storage-missing", FORMAT, "storage-missing", "", raw, raw.index(WHOLE), file="a.pt")
    for name, data in (("short", WEIGHT.data[:20]), ("long", WEIGHT.data + b"more")):
        raw = torch_zip(WHOLE, [with_data(WEIGHT, data)])
        at = raw.index(data)
        yield Vector(f"torch-storage-{name}", FORMAT, "storage-size", "", raw, at, file="a.pt")
    big = record("byteorder", b"big")
    yield archive("big-endian", (POLICY, "pytorch-big-endian"), "", big, b"big")
    yield archive("byteorder", (FORMAT, "pytorch-record"), "", record("byteorder", b"middle"), b"middle")
    yield archive("version", (FORMAT, "pytorch-record"), "", record("version", b"11\n"), b"11\n")
    yield archive("alignment", (FORMAT, "pytorch-record"), "", record(".storage_alignment", b"-64"), b"-64")
    compressed = [Member(m.name, m.data, 8 if m.name.endswith("data/0") else 0) for m in members(WHOLE, [WEIGHT])]
    raw = zipped(compressed)
    at = raw.index(b"archive/data/0") + len("archive/data/0")
    at += 4 + struct.unpack_from("<H", raw, at + 2)[0]
    yield Vector("torch-compressed", POLICY, "pytorch-compressed", "a storage", raw, at, file="a.pt")
    wrong = [Member(m.name, m.data, crc32=1 if m.name.endswith("data.pkl") else None) for m in members(WHOLE, [WEIGHT])]
    yield archive("checksum", (FORMAT, "zip-checksum"), "of the pickle", wrong, WHOLE)


def legacy() -> Iterator[Vector]:
    """Files of several pickles."""
    value = old.pickle(old.tensor(WEIGHT, (2, 3)))

    def whole(name: str, code: str, comment: str, at: int, **options: object) -> Vector:
        raw = torch_legacy(value, [WEIGHT], **options)  # type: ignore[arg-type]
        at = at if at >= 0 else len(raw) + at
        return Vector(f"torch-legacy-{name}", FORMAT, code, comment, raw, at, file="a.pt")

    end = len(torch_legacy(value, [WEIGHT])) - 8 - len(WEIGHT.data)
    preamble = "pytorch-preamble"
    yield whole("version", preamble, "", 15, version=w.integer(1002))
    system = Torch(w).mapping({"protocol_version": w.integer(1001), "little_endian": op.NEWFALSE()})
    at = len(b"".join(preamble_pickles(w)[:2]))
    yield whole("big-endian", preamble, "", at, system=system)
    keys = op.EMPTY_LIST() + op.MARK()
    bad = "storage-keys"
    yield whole("keys-none", bad, "", -8 - len(WEIGHT.data), keys=op.EMPTY_LIST())
    yield whole("keys-other", bad, "", -8 - len(WEIGHT.data), keys=keys + w.text("1") + op.APPENDS())
    yield whole("keys-twice", bad, "", -8 - len(WEIGHT.data), keys=keys + w.text("0") * 2 + op.APPENDS())
    yield whole("keys-dict", bad, "", -8 - len(WEIGHT.data), keys=t.mapping({"0": op.NONE()}))
    yield whole("count", "storage-size", "", end, counts=lambda storage: storage.count + 1)
    raw = torch_legacy(value, [WEIGHT])
    yield Vector("torch-legacy-more", FORMAT, "data-after-storages", "", raw + b"more", len(raw), file="a.pt")
    yield Vector("torch-legacy-cut", FORMAT, "truncated", "in the storage", raw[:-1], end, file="a.pt")
    yield Vector("torch-legacy-cut-count", FORMAT, "truncated", "before it", raw[: end + 7], end, file="a.pt")
    # A tar archive whose first member's name is the beginning of such a file: PyTorch would read it as that.
    block = bytearray(raw[:148] + b" " * 8 + raw[156:512].ljust(356, b"\0"))
    block[148:156] = b"%06o\0 " % sum(block)
    magic = Torch(w).pickle(w.integer(MAGIC))
    assert bytes(block).startswith(magic)
    yield Vector("torch-legacy-tar", FORMAT, "two-formats", "", bytes(block) + bytes(1024), 0, file="a.pt")


def limits() -> Iterator[Vector]:
    """Views that repeat bytes without end."""
    change = "limits = {max_inline_bytes = 4000}"
    repeated = t.tensor(WEIGHT, (1000, 2), (0, 1))
    yield in_zip(
        "expanded", LIMIT, "limit-exceeded", "8,000 bytes of 24", repeated[:-1], HERE, repeated[-1:], change=change
    )
    some = {str(n): t.tensor(WEIGHT, (500 - n, 2), (0, 1)) for n in range(4)}
    raw = torch_zip(t.pickle(t.mapping(some)), [WEIGHT])
    comment = "each is allowed, and all are not"
    yield Vector("torch-views", LIMIT, "limit-exceeded", comment, raw, None, file="a.pt", change=change)


def vectors() -> Iterator[Vector]:
    """Yield every vector of this section."""
    for group in (calls, storages, attributes, archives, legacy, limits):
        yield from group()
