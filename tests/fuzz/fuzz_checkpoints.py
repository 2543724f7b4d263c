"""Fuzz targets for PyTorch's and TensorFlow's files, and for whatever a directory may hold.

What holds for any bytes: they are refused with a finding, or every tensor lies in the file and is readable; and the
second reading says what the first said. Time and memory are bounded by atheris, which calls more of them a finding.

Checksums stand in the way of any fuzzer: no change of a byte would ever come past them. Where a target says so, each
is taken to be right, and everything behind it is fuzzed.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests import tensorflow_sample as tf
from tests.containers_sample import Member, gguf_sample, npy, safetensors_sample, zip_file
from tests.streams import Writer, op
from tests.torch_sample import WEIGHT, Storage, Torch, each_container, floats, torch_zip, with_data

if TYPE_CHECKING:
    from safeload.formats import Parsed

Target = Callable[[bytes], None]

POLICY = "numpy-quantized"
INDEX = "m.index"
DATA = "m.data-00000-of-00001"
LONGS = Storage("1", "LongStorage", bytes(range(32)))
UNTYPED = Storage("2", "UntypedStorage", bytes(range(4)))
QUANTIZED = Storage("3", "QUInt8Storage", bytes(range(4)))
STORED = ((WEIGHT,), (WEIGHT, LONGS), (WEIGHT, LONGS, UNTYPED), (QUANTIZED,))


class _AnyChecksum(int):
    """Equals every number."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class _Beside:
    """The files of a directory, in memory."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def read(self, name: str, limit: int) -> bytes | None:
        data = self._files.get(name)
        return data if data is None or len(data) <= limit else None


def _facts(parsed: Parsed) -> tuple[Any, ...]:
    refusal = parsed.refusal
    said = None if refusal is None else (type(refusal), refusal.findings)
    return said, parsed.tensors, parsed.globals, parsed.index, repr(parsed.value)


def _check(parse: Callable[[], Parsed], data: bytes) -> Parsed:
    """Return what a parser says, after a look at whether it says it twice, and accepts only what can be read."""
    parsed = parse()
    assert _facts(parsed) == _facts(parse())
    if parsed.refusal is not None:
        assert parsed.refusal.findings
        assert not parsed.tensors
    for spec in parsed.tensors:
        _read_tensor(spec, data)
    return parsed


def _read_tensor(spec: Any, data: bytes) -> None:
    """Make the view that a loader makes, and read it at both ends."""
    from safeload.canonical import view

    extent = spec.extent
    assert 0 <= extent.offset <= extent.offset + (extent.nbytes if extent.inline is None else 0) <= len(data)
    payload = data[extent.offset : extent.offset + extent.nbytes] if extent.inline is None else extent.inline
    assert len(payload) == extent.nbytes
    array = view(payload, spec)
    assert array.shape == spec.shape
    assert not array.flags.writeable
    if array.size:
        array[(0,) * array.ndim].tobytes()
        array[(-1,) * array.ndim].tobytes()


def _ignore_zip_checksums() -> None:
    from safeload.formats import zips

    vars(zips)["zlib"] = SimpleNamespace(**{**vars(zlib), "crc32": lambda _: _AnyChecksum()})


def _pytorch_zip(_: Path) -> Target:
    from safeload.formats import MemorySource
    from safeload.formats.pytorch import parse_pytorch
    from safeload.policy import load_policy

    policy = load_policy(POLICY)
    _ignore_zip_checksums()

    def target(data: bytes) -> None:
        _check(lambda: parse_pytorch(MemorySource(data), policy), data)

    return target


def _pytorch_pickle(_: Path) -> Target:
    """The bytes are the pickle of an archive that has some storages, and all of whose headers are right."""
    from safeload.formats import MemorySource
    from safeload.formats.pytorch import parse_pytorch
    from safeload.policy import load_policy

    policy = load_policy(POLICY)

    def target(data: bytes) -> None:
        for storages in STORED:
            archive = torch_zip(data, storages)
            parsed = _check(lambda archive=archive: parse_pytorch(MemorySource(archive), policy), archive)  # type: ignore[misc]
            if parsed.refusal is None or not parsed.refusal.findings[0].code.startswith("storage-"):
                break

    return target


def _pytorch_legacy(_: Path) -> Target:
    from safeload.formats import MemorySource
    from safeload.formats.pytorch import parse_pytorch_legacy
    from safeload.policy import load_policy

    policy = load_policy(POLICY)

    def target(data: bytes) -> None:
        _check(lambda: parse_pytorch_legacy(MemorySource(data), policy), data)

    return target


def _bundle_reader() -> Callable[[str, Mapping[str, bytes]], Parsed]:
    """Return what parses one file of a bundle, remembers no index, and takes each block's checksum to be right."""
    from safeload.formats import MemorySource, tensorflow
    from safeload.policy import load_policy

    policy = load_policy(POLICY)
    module = vars(tensorflow)
    module["_masked_crc32c"] = lambda _: _AnyChecksum()

    def read(name: str, files: Mapping[str, bytes]) -> Parsed:
        module["_REMEMBERED"] = module["_Remembered"]()
        source = MemorySource(files[name])
        if name == INDEX:
            return tensorflow.parse_bundle_index(source, policy, name)
        return tensorflow.parse_bundle_data(source, name, policy, _Beside(files))

    return read


def _tensorflow_index(_: Path) -> Target:
    read = _bundle_reader()

    def target(data: bytes) -> None:
        _check(lambda: read(INDEX, {INDEX: data}), data)

    return target


def _tensorflow_table(_: Path) -> Target:
    """The bytes are entries, each behind the lengths of its key and its value, of a table that is right otherwise."""
    read = _bundle_reader()

    def target(data: bytes) -> None:
        rows, at = [], 0
        while at + 2 <= len(data):
            key_end = at + 2 + data[at] % 16
            value_end = key_end + data[at + 1] % 64
            rows.append((data[at + 2 : key_end], data[key_end:value_end]))
            at = value_end
        table = tf.table(rows or [(b"", b"")], per_block=3)
        _check(lambda: read(INDEX, {INDEX: table}), table)

    return target


def _tensorflow_data(_: Path) -> Target:
    """The bytes are the length of an index in two bytes, the index, and the data file that belongs to it."""
    read = _bundle_reader()

    def target(data: bytes) -> None:
        end = 2 + int.from_bytes(data[:2], "little")
        files = {INDEX: data[2:end], DATA: data[end:]}
        _check(lambda: read(DATA, files), files[DATA])
        parsed = read(DATA, files)
        at = 0
        for spec in parsed.tensors:
            assert spec.extent.offset >= at
            at = spec.extent.offset + spec.extent.nbytes
        if parsed.refusal is None:
            assert read(INDEX, files).refusal is None

    return target


NAMES = ("m.pt", "m.bin", "w", "m.safetensors", "m.npz", INDEX, "config.json", "notes.txt", "tokenizer.model")


def _any_file(_: Path) -> Target:
    """The first byte chooses a name, the rest is the file. In memory and streamed past, it is the same file."""
    from safeload.digests import sha256_hex
    from safeload.files import StreamSource
    from safeload.formats import MemorySource
    from safeload.policy import load_policy
    from safeload.scanning import parse, peek_limit

    policy = load_policy(POLICY)

    def target(data: bytes) -> None:
        name, content = NAMES[data[0] % len(NAMES) if data else 0], data[1:]
        kind, parsed = parse(MemorySource(content), name, policy)
        for spec in parsed.tensors:
            _read_tensor(spec, content)
        fd = os.memfd_create("fuzz")
        os.write(fd, content)
        with StreamSource(fd, name, hashing=True, payload_digests=True, peek_limit=peek_limit(policy)) as stream:
            streamed_kind, streamed = parse(stream, name, policy)
            assert stream.finish() == sha256_hex(content)
            assert (kind, _facts(parsed)) == (streamed_kind, _facts(streamed))
            if parsed.refusal is not None or stream.refusal is not None:
                return
            for extent in {spec.extent for spec in parsed.tensors if spec.extent.inline is None}:
                payload = content[extent.offset : extent.offset + extent.nbytes]
                assert stream.digests[extent.offset, extent.nbytes] == sha256_hex(payload)

    return target


CHECKPOINT_TARGETS: dict[str, Callable[[Path], Target]] = {
    "pytorch-zip": _pytorch_zip,
    "pytorch-pickle": _pytorch_pickle,
    "pytorch-legacy": _pytorch_legacy,
    "tensorflow-index": _tensorflow_index,
    "tensorflow-table": _tensorflow_table,
    "tensorflow-data": _tensorflow_data,
    "any-file": _any_file,
}
"""What makes each target, by its name."""


# ---------------------------------------------------------------- honest files to begin with


Made = tuple[bytes, list[Storage]]


def _values(torch: Torch) -> list[Made]:
    """Opcodes of values, and the storages that they name: state dicts, views, ties, parameters, quantized tensors."""
    w = torch.w
    weight = torch.tensor(WEIGHT, (2, 3))
    longs = torch.tensor(LONGS, (2,), (2,), 1)
    version = torch.mapping({"": torch.mapping({"version": w.integer(1)})})
    parameter = w.call("torch._utils", "_rebuild_parameter", weight, w.boolean(True), torch.hooks())
    affine = w.tuple_(w.glob("torch", "per_tensor_affine"), op.BINFLOAT(0.5), w.integer(3))
    halves = torch.tensor(UNTYPED, (2, 2), dtype="float8_e5m2")
    return [
        (torch.state_dict({"weight": weight, "tied": weight, "longs": longs}, version), [WEIGHT, LONGS]),
        (torch.mapping({"view": torch.tensor(WEIGHT, (3, 2), (1, 3)), "epoch": w.integer(3)}), [WEIGHT]),
        (torch.mapping({"parameter": parameter, "list": op.EMPTY_LIST(), "longs": longs}), [WEIGHT, LONGS]),
        (torch.mapping({"weight": weight, "halves": halves, "longs": longs}), [WEIGHT, UNTYPED, LONGS]),
        (torch.mapping({"quantized": torch.quantized(QUANTIZED, (4,), affine)}), [QUANTIZED]),
        (torch.mapping({"weight": weight, "array": w.array("i2", (2, 2), b"abcdefgh")}), [WEIGHT]),
    ]


def _torch_files() -> dict[str, bytes]:
    files = {}
    for name, make in each_container():
        for number, (_, storages) in enumerate(_values(Torch())):
            files[f"{name}-{number}"] = make(lambda torch, number=number: _values(torch)[number][0], storages)  # type: ignore[misc]
    return files


def _bundles() -> list[dict[str, bytes]]:
    weights = {
        "a/kernel": tf.Tensor(tf.FLOAT, (2, 3), floats(*range(6))),
        "a/bias": tf.Tensor(tf.BFLOAT16, (2,), b"\xc0\x3f\x20\x40"),
        "b": tf.Tensor(tf.INT64, (), bytes(8)),
        "none": tf.Tensor(tf.HALF, (0, 3), b""),
    }
    text = b"graph" * 4
    string = bytes([len(text)]) + b"crc!" + text
    graph = [
        (b"", tf.header()),
        (b"_CHECKPOINTABLE_OBJECT_GRAPH", tf.entry(tf.STRING, b"", 0, 4, len(string))),
        (b"w", tf.entry(tf.FLOAT, tf.shape_of(1), 0, 0, 4)),
    ]
    return [
        tf.bundle("m", weights),
        tf.bundle("m", weights, align=16, per_block=2),
        {INDEX: tf.table(graph), DATA: floats(1) + string},
    ]


def checkpoint_seeds(name: str) -> list[bytes]:
    """Return honest inputs of a target to begin with."""
    match name:
        case "pytorch-zip":
            return [data for name, data in _torch_files().items() if name.startswith("zip")]
        case "pytorch-pickle":
            writers = [Writer(protocol) for protocol in (2, 3, 4, 5)]
            return [Torch(w).pickle(value) for w in writers for value, _ in _values(Torch(w))]
        case "pytorch-legacy":
            return [data for name, data in _torch_files().items() if name.startswith("legacy")]
        case "tensorflow-index":
            return [files[INDEX] for files in _bundles()]
        case "tensorflow-table":
            rows = [(b"", tf.header()), (b"a", tf.entry(tf.FLOAT, tf.shape_of(2, 3), 0, 0, 24))]
            return [b"".join(bytes([len(key), len(value)]) + key + value for key, value in rows)]
        case "tensorflow-data":
            return [len(files[INDEX]).to_bytes(2, "little") + files[INDEX] + files[DATA] for files in _bundles()]
        case _:
            torch = _torch_files()
            files = {
                0: [torch["zip-2-0"], torch["legacy-2-0"], torch["zip-4-2"]],
                3: [safetensors_sample()[0]],
                4: [zip_file([Member(), Member("b.npy", method=8)])],
                2: [gguf_sample()[0], npy(), with_data(WEIGHT, b"").data],
                5: [files[INDEX] for files in _bundles()],
                6: [b'{"a": [1, 2.5, null]}'],
                7: [b"plain text\n"],
            }
            return [bytes([number]) + data for number, contents in files.items() for data in contents]
