"""What is converted is verified first, is equal after, and can be brought back byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from safeload import converting, load, scanning, sign
from safeload.converting import SHARDS_KEY, Converted, convert, copy_verified
from safeload.diffing import diff
from safeload.digests import sha256_hex
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FileSetError,
    FormatError,
    PolicyError,
    SignatureError,
    StagingError,
)
from safeload.formats.pickles.writing import write_shard
from safeload.formats.safetensors_writing import write_safetensors
from safeload.grok1 import name_shards, parameter_names
from safeload.manifest import Manifest
from safeload.policy import Policy
from safeload.records import Record
from safeload.staging import StagedCheckpoint
from safeload.trust.dsse import Envelope
from safeload.trust.keys import SecretKey
from tests import tensorflow_sample as tf
from tests.grok_sample import write_checkpoint
from tests.streams import Writer, op

KEY = SecretKey.generate("ed25519")
OTHER = SecretKey.generate("ed25519")


class Source:
    """A signed checkpoint in a directory, and where to put what is made of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "source"
        self.directory.mkdir(parents=True)
        self.tmp_path = tmp_path
        self.envelope = b""

    def sign(self, **stated: Any) -> Source:
        self.envelope = sign(self.directory, keys=[KEY], **{"model": "m", "revision": "r1", **stated})
        return self

    def to(self, layout: Any, name: str = "target", **options: Any) -> Converted:
        return convert(
            self.directory,
            self.tmp_path / name,
            to=layout,
            manifest=self.envelope,
            trust=KEY.public,
            keys=[OTHER],
            **options,
        )

    def next(self, name: str = "target") -> Source:
        """What was made, as the source of another conversion; signed by `KEY` again."""
        found = Source.__new__(Source)
        found.directory, found.tmp_path = self.tmp_path / name, self.tmp_path
        manifest = found.directory / "manifest.json"
        parameters = {f.path: f.parameter for f in manifest_of(manifest).files if f.parameter}
        manifest.unlink()
        return found.sign(parameters=parameters)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


def manifest_of(path: Path) -> Manifest:
    return Manifest.parse(Envelope.parse(path.read_bytes()).payload)


def grok(source: Source) -> Mapping[str, np.ndarray | Record]:
    values = write_checkpoint(source.directory / "ckpt-0")
    (source.directory / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0")
    (source.directory / "README.md").write_text("tiny\n")
    paths = [path.relative_to(source.directory).as_posix() for path in source.directory.rglob("*")]
    source.sign(parameters=name_shards(paths))
    return values


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def loaded(directory: Path) -> dict[str, Any]:
    """What the published chain loads of what was made, by file."""
    return dict(load(directory, manifest=directory / "manifest.json", trust=OTHER.public))


def named_arrays(source: Source, **arrays: Any) -> Source:
    with (source.directory / "model.safetensors").open("wb") as file:
        write_safetensors(file, arrays)
    return source.sign()


# ---------------------------------------------------------------- Grok-1 and back


def test_the_order_of_shards_is_that_of_their_names_part_by_part() -> None:
    names = list(parameter_names(64))
    assert sorted(names, key=lambda name: name.split("/")) == names


def test_a_grok_checkpoint_becomes_safetensors_with_the_names_of_its_parameters(source: Source) -> None:
    values = grok(source)
    made = source.to("safetensors")
    target = source.tmp_path / "target"
    assert set(contents(target)) == {"model.safetensors", "tokenizer.model", "README.md", "manifest.json"}
    parameters = name_shards([f"ckpt-0/{name}" for name in values])
    expected: dict[str, Any] = {}
    for file, value in values.items():
        name = parameters[f"ckpt-0/{file}"]
        if isinstance(value, Record):
            expected |= {f"{name}/{part}": array for part, array in value.items()}
        else:
            expected[name] = value
    found = loaded(target)["model.safetensors"]
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    assert made.n_tensors == len(expected)
    assert made.nbytes == sum(array.nbytes for array in expected.values())
    assert made.left_out == ()


def test_the_new_manifest_names_the_one_that_it_was_made_from(source: Source) -> None:
    grok(source)
    made = source.to("safetensors")
    manifest = manifest_of(made.manifest)
    old = Envelope.parse(source.envelope)
    assert manifest.derived_from == made.derived_from == sha256_hex(old.payload)
    assert (manifest.stream, manifest.revision) == ("m+safetensors", "r1")
    with pytest.raises(SignatureError):
        load(source.tmp_path / "target", manifest=made.manifest, trust=KEY.public)


@pytest.mark.parametrize("shard_bytes", [200_000, 5_000_000_000])
def test_grok_comes_back_byte_for_byte(source: Source, shard_bytes: int) -> None:
    grok(source)
    before = contents(source.directory)
    source.to("safetensors", shard_bytes=shard_bytes)
    assert (source.tmp_path / "target" / "model.safetensors.index.json").exists() == (shard_bytes == 200_000)
    source.next().to("grok-1", "back")
    after = contents(source.tmp_path / "back")
    parameters = {f.path: f.parameter for f in manifest_of(source.tmp_path / "back" / "manifest.json").files}
    del after["manifest.json"]
    assert after == before
    assert parameters["ckpt-0/tensor00001_000"] == "params/language_model/rms_norm/scale"
    assert not diff(source.tmp_path / "back", source.directory).renamed


def test_both_flags_of_bfloat16_come_back(source: Source) -> None:
    values = grok(source)
    quantized = next(name for name, value in values.items() if isinstance(value, Record))
    with (source.directory / "ckpt-0" / quantized).open("wb") as file:
        write_shard(file, values[quantized], bfloat16_flags=80)
    before = contents(source.directory)
    source.sign(parameters=name_shards([f"ckpt-0/{name}" for name in values]))
    source.to("safetensors")
    source.next().to("grok-1", "back")
    after = contents(source.tmp_path / "back")
    assert {path: after[path] for path in before} == before


def test_a_shard_that_another_pickler_wrote_keeps_its_values_and_not_its_bytes(source: Source) -> None:
    (source.directory / "tensor00000_000").write_bytes(
        op.PROTO(2) + Writer(2).array("f4", (2,), b"abcdefgh", "C") + op.STOP()
    )
    source.sign(parameters={"tensor00000_000": "w"})
    source.to("safetensors")
    text = (source.tmp_path / "target" / "model.safetensors").read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    assert json.loads(header["__metadata__"][SHARDS_KEY])["w"]["bfloat16_flags"] == "--"
    source.next().to("grok-1", "back")
    assert diff(source.directory, source.tmp_path / "back").is_equal
    assert (source.tmp_path / "back" / "tensor00000_000").read_bytes().startswith(b"\x80\x04")


# ---------------------------------------------------------------- other ways


def test_named_tensors_become_shards_by_their_names(source: Source) -> None:
    weight, scales = np.ones((4, 2), np.int8), np.ones((1, 2), ml_dtypes.bfloat16)
    named_arrays(source, **{"p/a/weight": weight, "p/a/scales": scales, "p/b": np.arange(3.0), "c/weight": weight})
    source.to("grok-1")
    found = loaded(source.tmp_path / "target")
    assert sorted(found) == [f"ckpt-0/tensor0000{i}_000" for i in range(3)]
    assert found["ckpt-0/tensor00000_000"].tobytes() == weight.tobytes()
    assert isinstance(found["ckpt-0/tensor00001_000"], Record)
    assert found["ckpt-0/tensor00002_000"].tolist() == [0, 1, 2]
    manifest = manifest_of(source.tmp_path / "target" / "manifest.json")
    assert [f.parameter for f in manifest.files] == ["c/weight", "p/a", "p/b"]


@pytest.mark.parametrize("layout", ["npy", "safetensors"])
def test_odd_shapes_orders_and_byte_orders_keep_their_values(source: Source, layout: Any) -> None:
    arrays = {
        "scalar": np.array(2.5),
        "none": np.zeros((0, 3), np.float32),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        "big": np.arange(3, dtype=">i8"),
        "bool": np.array([True, False]),
    }
    for name, array in arrays.items():
        np.save(source.directory / f"{name}.npy", array)
    source.sign().to(layout)
    found = loaded(source.tmp_path / "target")
    found = found["model.safetensors"] if layout == "safetensors" else found
    for name, array in arrays.items():
        got = found[name if layout == "safetensors" else f"{name}.npy"]
        assert (got.dtype.name, got.shape) == (array.dtype.newbyteorder("<").name, array.shape)
        assert got.tolist() == array.tolist()


def test_npy_files_are_those_that_numpy_writes(source: Source) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    named_arrays(source, **{"a/b": array, "a/c": array[0]}).to("npy")
    np.save(source.tmp_path / "by-numpy.npy", array)
    target = source.tmp_path / "target"
    assert (target / "a" / "b.npy").read_bytes() == (source.tmp_path / "by-numpy.npy").read_bytes()
    assert np.load(target / "a" / "c.npy", allow_pickle=False).tolist() == [0, 1, 2, 3]


def test_a_tensorflow_bundle_becomes_safetensors_and_its_index_is_left_out(source: Source) -> None:
    tensors = {
        "h0/w": tf.Tensor(tf.FLOAT, (2,), np.array([1, 2], "<f4").tobytes()),
        "h0/b": tf.Tensor(tf.BFLOAT16, (1,), b"\xc0\x3f", shard=1),
    }
    for name, data in tf.bundle("model.ckpt", tensors, n_shards=2).items():
        (source.directory / name).write_bytes(data)
    # So little that its index and its data files are in different batches.
    made = source.sign().to("safetensors", memory_budget=16_384)
    found = loaded(source.tmp_path / "target")["model.safetensors"]
    assert {name: array.tolist() for name, array in found.items()} == {"h0/w": [1, 2], "h0/b": [1.5]}
    assert made.left_out == ("model.ckpt.index",)


def test_files_of_other_roles_are_copied(source: Source) -> None:
    state = op.PROTO(4) + Writer(4).array("f4", (1,), b"abcd", "C") + op.STOP()
    (source.directory / "optimizer.pkl").write_bytes(state)
    (source.directory / "config.json").write_text("{}")
    named_arrays(source, w=np.ones(2)).to("npy")
    assert (source.tmp_path / "target" / "optimizer.pkl").read_bytes() == state
    assert (source.tmp_path / "target" / "config.json").read_text() == "{}"


def test_memory_is_bounded_by_the_budget_and_not_by_the_checkpoint(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    grok(source)
    batches: list[set[str]] = []
    real = scanning.admit

    def admit(staged: StagedCheckpoint, *, policy: Policy) -> scanning.AdmittedCheckpoint:
        batches.append(set(staged.files))
        return real(staged, policy=policy)

    monkeypatch.setattr(converting, "admit", admit)
    source.to("safetensors", memory_budget=600_000)
    assert len(batches) > 2
    total = sum(len(batch) for batch in batches)
    assert total == len(set().union(*batches)) == len(contents(source.directory))


def test_the_parts_of_a_record_may_come_in_different_batches(source: Source) -> None:
    weight, scales = np.ones((4, 2), np.int8), np.full((1, 2), 3, ml_dtypes.bfloat16)
    for name, array in (("a", weight), ("b", scales)):
        with (source.directory / f"{name}.safetensors").open("wb") as file:
            write_safetensors(file, {"w/weight" if name == "a" else "w/scales": array})
    source.sign().to("grok-1", memory_budget=16_384)
    found = loaded(source.tmp_path / "target")["ckpt-0/tensor00000_000"]
    assert found.weight.tobytes() == weight.tobytes()
    assert found.scales.tobytes() == scales.tobytes()


# ---------------------------------------------------------------- refusals: nothing is published


def nothing_there(source: Source) -> None:
    assert [p.name for p in source.tmp_path.iterdir()] == ["source"]


def test_what_was_changed_is_not_converted(source: Source) -> None:
    grok(source)
    path = source.directory / "ckpt-0" / "tensor00000_000"
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatchError):
        source.to("safetensors")
    nothing_there(source)


def test_an_unlisted_file_and_a_foreign_key_are_refused(source: Source) -> None:
    named_arrays(source, w=np.ones(2))
    with pytest.raises(SignatureError):
        convert(
            source.directory,
            source.tmp_path / "t",
            to="npy",
            manifest=source.envelope,
            trust=OTHER.public,
            keys=[OTHER],
        )
    (source.directory / "more").write_bytes(b"")
    with pytest.raises(FileSetError):
        source.to("npy")
    nothing_there(source)


def test_a_value_that_changes_on_the_way_is_not_signed(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    named_arrays(source, w=np.ones(2), v=np.ones(3))
    monkeypatch.setattr(converting, "host_array", lambda name, array: array + 1 if name == "v.npy" else array)
    with pytest.raises(DigestMismatchError) as caught:
        source.to("npy")
    assert [(f.code, f.file) for f in caught.value.findings] == [("value-changed", "v.npy")]
    nothing_there(source)


def test_a_copied_file_that_changes_on_the_way_is_not_signed(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    (source.directory / "config.json").write_text("{}")
    named_arrays(source, w=np.ones(2))
    real = converting._new_file

    def changing(directory: Path, path: str, *pieces: bytes | memoryview) -> None:
        real(directory, path, *([b"[]"] if path == "config.json" else pieces))

    monkeypatch.setattr(converting, "_new_file", changing)
    with pytest.raises(DigestMismatchError) as caught:
        source.to("npy")
    assert [(f.code, f.file) for f in caught.value.findings] == [("digest-mismatch", "config.json")]
    nothing_there(source)


def test_a_tensor_that_appears_on_the_way_is_not_signed(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    named_arrays(source, w=np.ones(2))
    monkeypatch.setattr(
        converting._Npy, "finish", lambda self: np.save(self.directory / "more.npy", np.ones(1)), raising=True
    )
    with pytest.raises(DigestMismatchError) as caught:
        source.to("npy")
    assert [f.code for f in caught.value.findings] == ["value-changed"]
    nothing_there(source)


@pytest.mark.parametrize(
    ("layout", "array"),
    [("npy", np.ones(1, ml_dtypes.bfloat16)), ("safetensors", np.ones(1, np.complex128))],
)
def test_a_type_that_the_format_lacks_is_refused_before_a_byte_is_read(
    source: Source, layout: Any, array: np.ndarray
) -> None:
    with (source.directory / "w").open("wb") as file:
        write_shard(file, array)
    source.sign()
    (source.directory / "w").write_bytes(b"changed: would be refused if it were read")
    with pytest.raises(ConfigError, match="cannot say"):
        source.to(layout)
    nothing_there(source)


def test_numbers_beside_tensors_are_left_out_only_if_asked(source: Source) -> None:
    w = Writer(4)
    both = op.EMPTY_DICT() + op.MARK() + w.text("w") + w.array("f4", (1,), b"abcd", "C")
    both += w.text("step") + op.BININT1(7) + w.text("none") + op.NONE() + op.SETITEMS()
    (source.directory / "model.pkl").write_bytes(op.PROTO(4) + both + op.STOP())
    source.sign()
    with pytest.raises(ConfigError, match=r"model\.pkl/step is no tensor"):
        source.to("safetensors")
    nothing_there(source)
    assert source.to("safetensors", tensors_only=True).left_out == ("model.pkl/step",)
    assert list(loaded(source.tmp_path / "target")["model.safetensors"]) == ["w"]


@pytest.mark.parametrize("name", ["../w", "/w", "a//b", "x\\y"])
def test_a_name_that_is_no_path_makes_no_file(source: Source, name: str) -> None:
    named_arrays(source, **{name: np.ones(1)})
    with pytest.raises(ConfigError, match="no file can be called"):
        source.to("npy")
    nothing_there(source)


def test_a_file_to_copy_is_never_overwritten(source: Source) -> None:
    named_arrays(source, optimizer=np.ones(1))
    np.save(source.directory / "optimizer.npy", np.ones(2))
    source.sign()
    with pytest.raises(ConfigError, match="a file to copy"):
        source.to("npy")


def test_the_target_is_new_and_outside(source: Source) -> None:
    named_arrays(source, w=np.ones(1))
    with pytest.raises(ConfigError, match="lies in the checkpoint"):
        source.to("npy", "source/below")
    (source.tmp_path / "target").mkdir()
    (source.tmp_path / "target" / "mine").write_bytes(b"")
    with pytest.raises(ConfigError):
        source.to("npy")
    assert contents(source.tmp_path / "target") == {"mine": b""}


def test_metadata_that_safeload_does_not_write_is_refused(source: Source) -> None:
    for text in ("{", "[]", '{"w": {}}', '{"w": {"file": "../x", "record": "", "fields": [], "bfloat16_flags": "64"}}'):
        with (source.directory / "model.safetensors").open("wb") as file:
            write_safetensors(file, {"w": np.ones(1)}, {SHARDS_KEY: text})
        source.sign()
        with pytest.raises(ConfigError, match=SHARDS_KEY):
            source.to("grok-1")
    nothing_there(source)


def origin(file: str, *fields: str) -> dict[str, Any]:
    record = "QuantizedWeight8bit" if fields else ""
    return {"file": file, "record": record, "fields": list(fields), "bfloat16_flags": "64"}


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"v": origin("tensor00000_000")}, "does not say which shard w was"),
        ({"w": origin("tensor00000_000", "weight", "scales")}, "does not say which shard w was"),
        ({"w": origin("tensor00000_000"), "v": origin("tensor00000_000")}, "twice"),
    ],
)
def test_metadata_that_does_not_fit_the_tensors_is_refused(source: Source, told: dict[str, Any], message: str) -> None:
    with (source.directory / "model.safetensors").open("wb") as file:
        write_safetensors(file, {"w": np.ones(1)}, {SHARDS_KEY: json.dumps(told)})
    source.sign()
    with pytest.raises(ConfigError, match=message):
        source.to("grok-1")


def test_a_record_that_lacks_a_field_is_not_written(source: Source) -> None:
    told = {"w": origin("tensor00000_000", "weight", "scales")}
    with (source.directory / "model.safetensors").open("wb") as file:
        write_safetensors(file, {"w/weight": np.ones((1, 1), np.int8)}, {SHARDS_KEY: json.dumps(told)})
    source.sign()
    with pytest.raises(ConfigError, match="all fields of its record"):
        source.to("grok-1")
    nothing_there(source)


def test_a_policy_refuses_on_the_way_in_and_on_the_way_out(source: Source) -> None:
    grok(source)
    with pytest.raises(PolicyError):
        source.to("safetensors", as_policy="grok-1")
    nothing_there(source)
    named = Source(source.tmp_path / "other")
    named_arrays(named, w=np.ones(1))
    with pytest.raises(PolicyError):
        named.to("npy", policy="grok-1")


@pytest.mark.parametrize(
    "options",
    [{"to": "zip"}, {"to": "npy", "shard_bytes": 0}, {"to": "npy", "keys": []}],
)
def test_arguments_that_are_wrong_are_refused(source: Source, options: dict[str, Any]) -> None:
    named_arrays(source, w=np.ones(1))
    with pytest.raises(ConfigError, match=r"to: |shard_bytes: |keys: "):
        convert(
            source.directory,
            source.tmp_path / "target",
            **{"manifest": source.envelope, "trust": KEY.public, "keys": [KEY], **options},
        )


def test_a_disk_that_is_full_is_an_error_of_ours(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    named_arrays(source, w=np.ones(1))

    real = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "xb":
            raise OSError(28, "No space left on device")
        return real(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(StagingError, match="No space left"):
        source.to("npy")


def test_two_files_that_claim_one_shard_are_refused(source: Source) -> None:
    for name in "vw":
        with (source.directory / f"{name}.safetensors").open("wb") as file:
            write_safetensors(file, {name: np.ones(1)}, {SHARDS_KEY: json.dumps({name: origin("tensor00000_000")})})
    source.sign()
    with pytest.raises(ConfigError, match="two parameters would be tensor00000_000"):
        source.to("grok-1")


def test_what_has_a_quantization_of_its_own_is_not_torn_apart(source: Source) -> None:
    header = b'{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (source.directory / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x12\x34")
    source.sign()
    with pytest.raises(ConfigError, match="a PackedTensor is more than its tensors"):
        source.to("npy")
    nothing_there(source)


def test_the_layout_counts_no_further_than_its_names(source: Source) -> None:
    named_arrays(source, w=np.ones(1))
    plan = converting._plan(Manifest.parse(Envelope.parse(source.envelope).payload))
    (item,) = plan.items.values()
    items = {("f", str(n)): replace(item, name=str(n)) for n in range(100_001)}
    with pytest.raises(ConfigError, match="counts to 99999"):
        converting._Grok1(source.tmp_path, replace(plan, items=items))


# ---------------------------------------------------------------- a private copy for other readers


OCDBT = {
    "_METADATA": b'{"tree_metadata": {}}',
    "_CHECKPOINT_METADATA": b"{}",
    "manifest.ocdbt": b"\x0c\xdb\x3a\x2a" + bytes(20),
    "d/0123456789abcdef0123456789abcdef": b"\x0c\xdb\x20\xde" + bytes(100),
    "ocdbt.process_0/d/00000000000000000000000000000000": b"\x28\xb5\x2f\xfd" + bytes(100),
    "array_metadatas/process_0": b"{}",
    "w/.zarray": b"{}",
    "w/0.0": b"\0\0\x80\x3f",
}


def orbax(source: Source) -> Source:
    for name, data in OCDBT.items():
        path = source.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return source.sign(policy="orbax")


def copied(source: Source, policy: str = "orbax") -> Path:
    return copy_verified(
        source.directory,
        source.tmp_path / "copy",
        manifest=source.envelope,
        trust=KEY.public,
        policy=policy,
        memory_budget=65_536,
    )


def test_an_orbax_directory_is_signed_as_files_and_copied_for_orbax_to_read(source: Source) -> None:
    copy = copied(orbax(source))
    assert contents(copy) == OCDBT
    assert copy.stat().st_mode & 0o777 == 0o700


def test_an_orbax_directory_has_nothing_that_could_be_converted(source: Source) -> None:
    with pytest.raises(ConfigError, match="files of weights"):
        orbax(source).to("npy", policy="orbax")


def test_what_was_changed_is_not_copied(source: Source) -> None:
    orbax(source)
    (source.directory / "w" / "0.0").write_bytes(b"\0\0\x80\x40")
    with pytest.raises(DigestMismatchError):
        copied(source)
    nothing_there(source)


def test_the_default_policy_does_not_take_orbax_for_anything(source: Source) -> None:
    orbax(source)
    with pytest.raises((FormatError, PolicyError)):
        copied(source, policy="numpy-quantized")
    nothing_there(source)


@pytest.mark.parametrize("name", ["manifest.json", "Manifest.json"])
def test_the_new_manifest_takes_no_copied_files_place(tmp_path: Path, name: str) -> None:
    source = Source(tmp_path)
    (source.directory / name).write_text("{}")
    with (source.directory / "a.safetensors").open("wb") as file:
        write_safetensors(file, {"a": np.ones(3, np.float32)})
    source.sign()
    with pytest.raises(ConfigError, match="name of the new manifest and of a file to copy"):
        source.to("safetensors")
    assert not (tmp_path / "target").exists()
    made = source.to("safetensors", output=tmp_path / "beside.json")
    assert name in made.files


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("model.safetensors", "name of the new manifest and of a file of tensors"),
        ("sub/manifest.json", "below the new directory's first level"),
    ],
)
def test_the_new_manifest_has_a_place_of_its_own(tmp_path: Path, output: str, message: str) -> None:
    source = Source(tmp_path)
    with (source.directory / "a.safetensors").open("wb") as file:
        write_safetensors(file, {"a": np.ones(3, np.float32)})
    source.sign()
    with pytest.raises(ConfigError, match=message):
        source.to("safetensors", output=tmp_path / "target" / output)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [(("A", "a"), "one file on some systems"), (("a", "a.npy/b"), "would be a file, and the folder of")],
)
def test_tensors_whose_files_cannot_lie_side_by_side_are_refused(
    tmp_path: Path, names: tuple[str, str], message: str
) -> None:
    source = Source(tmp_path)
    with (source.directory / "w.safetensors").open("wb") as file:
        write_safetensors(file, {name: np.ones(3, np.float32) for name in names})
    source.sign()
    with pytest.raises(ConfigError, match=message):
        source.to("npy")
    assert not (tmp_path / "target").exists()
    assert source.to("safetensors").n_tensors == 2
