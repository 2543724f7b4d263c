"""Claims of loading to devices: batches within a budget, parts of files, blocks of several hosts, casts, reports.

One process with eight devices; several processes are in test_many_processes.py.
"""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from safeload import agreeing, assembling, cli, distributing, loading, memory, publishing, staging
from safeload.assembling import partition_rules
from safeload.decoding import PartialTensor, arrays, decode
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FileSetError,
    PolicyError,
    ShardingError,
    StagingError,
)
from safeload.formats.safetensors_writing import write_safetensors
from safeload.placing import SLACK_BYTES, Join, join_blocks
from safeload.policy import load_policy
from safeload.records import QuantizedWeight8bit
from safeload.scanning import admit
from safeload.staging import stream
from safeload.tally import LoadReport
from safeload.trust.keys import SecretKey
from safeload.trust.store import TrustStore
from safeload.verifying import verify_manifest
from tests.simulator import MODEL, pickled
from tests.tensorflow_sample import Tensor, bundle

P: Any = PartitionSpec  # untyped in jax
MIB = 1024 * 1024
REPOSITORY = Path(__file__).parents[2]


class Checkpoint:
    """A signed directory of whatever values."""

    def __init__(self, folder: Path, values: Mapping[str, Any], **options: Any) -> None:
        self.directory = folder / "checkpoint"
        self.values = dict(values)
        for name, value in values.items():
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value if isinstance(value, bytes) else pickled(value))
        self.key = SecretKey.generate()
        self.manifest = publishing.sign(self.directory, keys=[self.key], model=MODEL, revision="r1", **options)

    def load(self, **options: Any) -> Mapping[str, Any]:
        return loading.load(self.directory, manifest=self.manifest, trust=self.key.public, **options)

    def report(self, **options: Any) -> tuple[Mapping[str, Any], LoadReport]:
        return loading.load_and_report(self.directory, manifest=self.manifest, trust=self.key.public, **options)

    def damage(self, name: str, offset: int = -20) -> None:
        data = bytearray((self.directory / name).read_bytes())
        data[offset] ^= 1
        (self.directory / name).write_bytes(data)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def noise(shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def assert_equal(found: Any, expected: np.ndarray) -> None:
    assert isinstance(found, jax.Array)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.asarray(found).tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Twelve files of 2 MiB, in each order, and what is no array."""
    values: dict[str, Any] = {f"w{n:02d}": noise((512, 1024), n) for n in range(10)}
    values["fortran"] = np.asfortranarray(noise((512, 1024), 90))
    values["big"] = noise((512, 1024), 91).astype(">f4")
    values["README.md"] = b"# A model\n"
    values["nested"] = {"a": [noise((8, 8), 92)], "step": 3, "q": noise((16,), 93)}
    return Checkpoint(tmp_path_factory.mktemp("several"), values)


def native(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).astype(value.dtype.newbyteorder("="))


def assert_several(tree: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    assert list(tree) == sorted(name for name in checkpoint.values if name != "README.md")
    for name, value in checkpoint.values.items():
        if isinstance(value, np.ndarray):
            assert_equal(tree[name], native(value))
    nested = checkpoint.values["nested"]
    assert tree["nested"]["step"] == 3
    assert_equal(tree["nested"]["a"][0], nested["a"][0])
    assert_equal(tree["nested"]["q"], nested["q"])


# ---------------------------------------------------------------- within a budget


SHARDINGS = ["rows", "columns", "grid", "replicated", "default"]


def place_of(mesh: Mesh, name: str) -> Any:
    specs = {"rows": P(("data", "model")), "columns": P(None, "model"), "grid": P("data", "model"), "replicated": P()}

    def place(_path: str, shape: tuple[int, ...]) -> NamedSharding | None:
        if name == "default":
            return None
        return NamedSharding(mesh, specs[name] if len(shape) == 2 else P())

    return place


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("budget", ["256MiB", "8MiB"])
def test_the_values_are_those_of_the_files_whatever_the_budget(
    several: Checkpoint, mesh: Mesh, name: str, budget: str
) -> None:
    tree, report = several.report(shardings=place_of(mesh, name), memory_budget=budget)
    assert_several(tree, several)
    assert (report.batches > 3) == (budget == "8MiB")
    assert report.bytes_read == report.bytes_total
    assert report.files_read == report.files_total == len(several.values)


def test_memory_that_was_used_again_is_in_no_array(several: Checkpoint, mesh: Mesh) -> None:
    # Arrays of the first batches must not be views of what later batches were staged in.
    tree = several.load(shardings=place_of(mesh, "rows"), memory_budget="8MiB")
    pointers = [shard.data.unsafe_buffer_pointer() for n in range(10) for shard in tree[f"w{n:02d}"].addressable_shards]
    assert len(set(pointers)) == 80


def test_a_budget_that_no_file_fits_says_what_would(several: Checkpoint, mesh: Mesh) -> None:
    with pytest.raises(StagingError, match=r"takes [0-9,]+ bytes at once, and there are 1,048,576") as caught:
        several.load(shardings=place_of(mesh, "rows"), memory_budget="1MiB")
    assert "give a memory budget of" in str(caught.value.hint)
    # A file of one chunk never has digests of its chunks: to sign it again would change nothing.
    assert "signed with digests" not in str(caught.value.hint)


def test_a_file_without_tensors_that_does_not_fit_says_so(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {"README.md": b"# A model\n" * 10_000, "w": noise((4,))})
    with pytest.raises(StagingError, match=rf"README\.md takes {100_000 + SLACK_BYTES:,} bytes"):
        checkpoint.load(shardings=lambda _path, _shape: None, memory_budget=50_000)


def test_what_the_arrays_take_of_the_host_is_not_there_to_stage_in(
    several: Checkpoint, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributing, "available_memory", lambda: 20 * MIB)
    with pytest.raises(
        StagingError, match=r"the arrays take 25,166,\d+ bytes of the host's memory, and 20,971,520 are available"
    ):
        several.load(shardings=place_of(mesh, "rows"))
    monkeypatch.setattr(staging, "stage", lambda *_, **__: pytest.fail("staged at once"))
    tree = several.load(shardings=place_of(mesh, "rows"), cast={"": "bfloat16"})
    assert tree["w00"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("budget", ["256MiB", "8MiB"])
def test_nothing_is_left_of_what_is_refused_in_the_end(tmp_path: Path, mesh: Mesh, budget: str) -> None:
    checkpoint = Checkpoint(tmp_path, {f"w{n:02d}": noise((512, 1024), n) for n in range(10)})
    checkpoint.damage("w09")
    gc.collect()
    before = len(jax.live_arrays())
    caught: list[BaseException] = []
    try:
        checkpoint.load(shardings=place_of(mesh, "rows"), memory_budget=budget)
    except DigestMismatchError as err:
        caught.append(err)  # with its traceback, whose frames live on
    assert [finding.file for error in caught for finding in error.findings] == ["w09"]  # type: ignore[attr-defined]
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_what_the_policy_refuses_in_the_last_batch_is_refused(tmp_path: Path, mesh: Mesh) -> None:
    checkpoint = Checkpoint(tmp_path, {f"w{n:02d}": noise((512, 1024), n) for n in range(10)} | {"x": [noise((2,))]})
    with pytest.raises(PolicyError) as caught:
        checkpoint.load(shardings=place_of(mesh, "rows"), memory_budget="8MiB", policy="grok-1")
    assert caught.value.findings


def test_an_unlisted_file_is_found_before_any_is_read(several: Checkpoint, mesh: Mesh) -> None:
    extra = several.directory / "extra"
    extra.write_bytes(b"x")
    try:
        with pytest.raises(FileSetError) as caught:
            several.load(shardings=place_of(mesh, "rows"), memory_budget="8MiB")
    finally:
        extra.unlink()
    assert [finding.code for finding in caught.value.findings] == ["unlisted-file"]


# ---------------------------------------------------------------- devices with memory of their own


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the devices copy what is put on them, as those with memory of their own do."""
    genuine = jax.device_put

    def put(data: Any, *where: Any) -> Any:
        return genuine([np.array(part) for part in data] if isinstance(data, list) else np.array(data), *where)

    monkeypatch.setattr(jax, "device_put", put)
    monkeypatch.setattr(assembling, "COPYING_PLATFORMS", frozenset({"cpu"}))


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("budget", ["256MiB", "8MiB"])
def test_devices_with_memory_of_their_own_are_fed_from_the_stage(
    several: Checkpoint, mesh: Mesh, name: str, budget: str
) -> None:
    tree, report = several.report(shardings=place_of(mesh, name), memory_budget=budget)
    assert_several(tree, several)
    # What is put is released, so that a second copy on the host is never needed.
    assert report.batches > 1


@pytest.mark.usefixtures("accelerator")
def test_pieces_that_wait_for_others_count_as_memory(
    tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = noise((2048, 2048))
    checkpoint, join = hosts_checkpoint(tmp_path, value, 4, 2)
    place = lambda _path, _shape: NamedSharding(mesh, P("data"))  # noqa: E731
    budgets: list[int | None] = []
    genuine = staging.stream

    def spy(*args: Any, **options: Any) -> Any:
        budgets.append(options["memory_budget"])
        return genuine(*args, **options)

    monkeypatch.setattr(staging, "stream", spy)
    tree = checkpoint.load(shardings=place, joins=[join], memory_budget="22MiB")
    assert_equal(tree["w"], value)
    assert budgets == [6 * MIB]
    # So do copies on their way: a column of a file is not contiguous.
    columns = lambda _path, _shape: NamedSharding(mesh, P(None, "model"))  # noqa: E731
    checkpoint.load(shardings=columns, memory_budget="22MiB")
    assert budgets[1:] == [22 * MIB - 512 * 256 * 4]
    # Two shards of 8 MiB wait for their pieces, and what is left is too little for a block.
    with pytest.raises(StagingError, match="bytes at once"):
        checkpoint.load(shardings=place, joins=[join], memory_budget="17MiB")


# ---------------------------------------------------------------- a tensor larger than the budget


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A record of 80 MiB: six chunks, two tensors."""
    record = QuantizedWeight8bit(  # type: ignore[call-arg] # made at run time
        weight=np.random.default_rng(0).integers(-128, 128, (8, 2560, 4096), dtype=np.int8),
        scales=noise((8, 8, 4096), 1, ml_dtypes.bfloat16),
    )
    return Checkpoint(tmp_path_factory.mktemp("large"), {"q": record, "small": noise((8, 8))})


@pytest.mark.parametrize(("spec", "budget"), [(P(("data", "model")), "60MiB"), (P("data"), "72MiB")])
def test_a_file_larger_than_the_budget_goes_shard_by_shard(
    large: Checkpoint, mesh: Mesh, spec: Any, budget: str
) -> None:
    place = lambda _path, shape: NamedSharding(mesh, spec if len(shape) == 3 else P())  # noqa: E731
    tree, report = large.report(shardings=place, memory_budget=budget)
    assert_equal(tree["q"].weight, large.values["q"].weight)
    assert_equal(tree["q"].scales, large.values["q"].scales)
    assert_equal(tree["small"], large.values["small"])
    assert report.batches > 1


def saved(kind: str, value: np.ndarray) -> bytes:
    """Return a file of one large and one small tensor, or of the large one alone."""
    small = noise((3,), 7)
    if kind == "safetensors":
        header: dict[str, Any] = {}
        at = 0
        for name, array in (("large", value), ("small", small)):
            header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + value.tobytes() + small.tobytes()
    buffer = io.BytesIO()
    if kind == "npy":
        np.save(buffer, value)
    else:
        np.savez(buffer, large=value, small=small)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
def test_every_container_can_be_read_in_parts(tmp_path: Path, mesh: Mesh, kind: str) -> None:
    value = noise((2048, 8192))
    name = f"model.{kind}"
    checkpoint = Checkpoint(tmp_path, {name: saved(kind, value)}, policy="numpy-quantized")
    place = lambda _path, shape: NamedSharding(mesh, P(("data", "model")) if len(shape) == 2 else P())  # noqa: E731
    tree, report = checkpoint.report(shardings=place, memory_budget="56MiB")
    assert report.batches > 1
    if kind == "npy":
        assert_equal(jax.tree_util.tree_leaves(tree[name])[0], value)
    else:
        assert_equal(tree[name]["large"], value)
        assert_equal(tree[name]["small"], noise((3,), 7))


DT_FLOAT = 1


def test_a_bundle_goes_through_a_budget_by_its_index(tmp_path: Path, mesh: Mesh) -> None:
    values = {f"w{n}": noise((256, 1024), n) for n in range(8)}
    tensors = {name: Tensor(DT_FLOAT, value.shape, value.tobytes(), int(name[1])) for name, value in values.items()}
    # Names that make the index longer than what is allowed for pages.
    tensors |= {f"{n:02d}{'x' * 1000}": Tensor(DT_FLOAT, (1,), bytes(4)) for n in range(30)}
    # Two bundles, in folders that sort before and behind each other's files.
    files = {f"{folder}/{name}": data for folder in "ab" for name, data in bundle("m", tensors, n_shards=8).items()}
    checkpoint = Checkpoint(tmp_path, files)
    tree, report = checkpoint.report(shardings=place_of(mesh, "rows"), memory_budget="3MiB")
    assert report.batches > 8
    for folder in "ab":
        for n in range(8):
            assert_equal(tree[f"{folder}/m.data-{n:05d}-of-00008"][f"w{n}"], values[f"w{n}"])
    with pytest.raises(StagingError, match=r"takes 1,06[0-9],[0-9]{3} bytes at once") as caught:
        checkpoint.load(shardings=place_of(mesh, "rows"), memory_budget="1MiB")
    hint = str(caught.value.hint)
    enough = int(hint.partition("budget of ")[2].partition(" bytes")[0].replace(",", ""))
    assert_equal(
        checkpoint.load(shardings=place_of(mesh, "rows"), memory_budget=enough)["b/m.data-00007-of-00008"]["w7"],
        values["w7"],
    )


def test_a_large_file_of_a_bundle_is_split_into_passes_each_with_the_index(tmp_path: Path, mesh: Mesh) -> None:
    values = {f"w{n}": noise((1024, 1024, 3), n) for n in range(7)}
    files = bundle("m", {name: Tensor(DT_FLOAT, v.shape, v.tobytes()) for name, v in values.items()})
    checkpoint = Checkpoint(tmp_path, files)
    tree, report = checkpoint.report(shardings=place_of(mesh, "default"), memory_budget="68MiB")
    assert report.batches > 2
    for name, value in values.items():
        assert_equal(tree["m.data-00000-of-00001"][name], value)


def test_a_shard_larger_than_the_budget_says_what_would_fit(large: Checkpoint, mesh: Mesh) -> None:
    with pytest.raises(
        StagingError, match=r"q/weight: the signed chunks that cover a shard of shape \(8, 2560, 4096\) "
    ) as err:
        large.load(shardings=place_of(mesh, "default"), memory_budget="60MiB")
    assert "give a memory budget of" in str(err.value.hint)


def test_the_memory_of_all_passes_over_one_file_stays_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 68 * MIB
    values = {f"w{n}": noise((1024, 1024, 3), n) for n in range(7)}
    data = io.BytesIO()
    write_safetensors(data, values)
    checkpoint = Checkpoint(tmp_path, {"m.safetensors": data.getvalue()})
    alive: list[tuple[weakref.ref[Any], int]] = []
    most: list[int] = []

    class Counted(memory.Arena):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            alive.append((weakref.ref(self._mapping), self.cost))
            most.append(sum(cost for mapping, cost in alive if (there := mapping()) is not None and not there.closed))

    monkeypatch.setattr(memory, "Arena", Counted)
    # What only a dead cycle holds is to be freed by the load, not by luck.
    gc.disable()
    try:
        tree, report = checkpoint.report(shardings=lambda _path, _shape: None, memory_budget=budget)
    finally:
        gc.enable()
    assert report.batches > 2
    assert max(most) <= budget
    for key, value in values.items():
        assert_equal(tree["m.safetensors"][key], value)


def test_damage_in_one_chunk_is_found_whichever_pass_reads_it(large: Checkpoint, mesh: Mesh) -> None:
    place = lambda _path, shape: NamedSharding(mesh, P(("data", "model")) if len(shape) == 3 else P())  # noqa: E731
    large.damage("q", 50 * MIB)
    try:
        with pytest.raises(DigestMismatchError) as caught:
            large.load(shardings=place, memory_budget="60MiB")
    finally:
        large.damage("q", 50 * MIB)
    assert [(finding.file, finding.code) for finding in caught.value.findings] == [("q", "digest-mismatch")]


def test_bytes_that_were_not_read_cannot_be_had(large: Checkpoint) -> None:
    trusted = verify_manifest(large.manifest, TrustStore.of_keys([large.key.public]))
    with stream(large.directory, trusted, wanted={"q": (range(1),)}) as batches:
        for staged in batches:
            tree = decode(admit(staged, policy=load_policy("numpy-quantized")))
            weight = tree["q"].weight
            assert type(weight) is PartialTensor
            assert weight.part((range(1), range(100), range(4096))).tobytes() == (
                large.values["q"].weight[:1, :100].tobytes()
            )
            with pytest.raises(StagingError, match=r"q/weight: bytes [0-9]+ to [0-9]+ of its file are needed"):
                weight.part((range(2, 4), range(2560), range(4096)))
            with pytest.raises(StagingError, match="only a part of it was read"):
                arrays(tree)
            del weight, tree


def test_shardings_that_change_their_mind_are_not_asked_twice(large: Checkpoint, mesh: Mesh) -> None:
    asked: list[str] = []

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding:
        asked.append(path)
        return NamedSharding(mesh, P(("data", "model")) if len(shape) == 3 and len(asked) < 4 else P())

    large.load(shardings=place, memory_budget="60MiB")
    assert sorted(asked) == ["q/scales", "q/weight", "small"]


# ---------------------------------------------------------------- shardings


def test_a_prefix_of_the_tree_says_where_things_go(several: Checkpoint, mesh: Mesh) -> None:
    rows, all_of_it = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    prefix = dict.fromkeys((name for name in several.values if name != "README.md"), rows)
    for budget in ("256MiB", "8MiB"):
        tree = several.load(
            shardings={**prefix, "nested": {"a": [rows], "step": None, "q": all_of_it}}, memory_budget=budget
        )
        assert_several(tree, several)
        assert (tree["nested"]["a"][0].sharding, tree["nested"]["q"].sharding) == (rows, all_of_it)
        with pytest.raises(ShardingError, match="expected shardings for"):
            several.load(shardings=prefix | {"more": rows}, memory_budget=budget)
        with pytest.raises(ShardingError, match="the tree/nested: expected shardings for a, step, q, found a"):
            several.load(shardings={**prefix, "nested": {"a": rows}}, memory_budget=budget)


def test_keys_that_a_name_does_not_tell_apart_go_where_they_belong(tmp_path: Path, mesh: Mesh) -> None:
    one, other = noise((8, 8), 1), noise((8, 8), 2)
    checkpoint = Checkpoint(tmp_path, {"f": {"a/b": one, "a": {"c": other}}, "g": {1: one, "2": other}})
    rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model"))
    tree = checkpoint.load(shardings={"f": {"a/b": rows, "a": {"c": columns}}, "g": {1: columns, "2": rows}})
    assert_equal(tree["f"]["a/b"], one)
    assert_equal(tree["f"]["a"]["c"], other)
    assert (tree["f"]["a/b"].sharding, tree["f"]["a"]["c"].sharding) == (rows, columns)
    assert_equal(tree["g"][1], one)
    assert (tree["g"][1].sharding, tree["g"]["2"].sharding) == (columns, rows)


def test_partition_rules_go_by_the_parameter_where_the_manifest_binds_one(tmp_path: Path, mesh: Mesh) -> None:
    names = {"tensor00000_000": "params/attention/query/w", "tensor00001_000": "params/norm/scale"}
    values = {"tensor00000_000": noise((8, 8)), "tensor00001_000": noise((8,)), "other": noise((8, 4))}
    checkpoint = Checkpoint(tmp_path, values, parameters=names)
    rules = [(("attention", "(query|key)", "w"), P("data", "model")), ("scale$", None), ("^other$", P("model"))]
    tree = checkpoint.load(shardings=partition_rules(mesh, rules))
    assert tree["tensor00000_000"].sharding.spec == P("data", "model")
    assert tree["tensor00001_000"].sharding.is_fully_replicated
    assert tree["other"].sharding.spec == P("model")
    with pytest.raises(ShardingError, match=r"^params/norm/scale: no partition rule matches"):
        checkpoint.load(shardings=partition_rules(mesh, [rules[0], rules[2]]))
    with pytest.raises(ShardingError, match=r"params/norm/scale: \(8,\) does not fit"):
        checkpoint.load(shardings=partition_rules(mesh, [("", P("data", "model"))]))


def test_a_tensor_that_does_not_fit_is_told_before_anything_is_read(
    several: Checkpoint, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "stage", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr(staging, "stream", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ShardingError, match=r"^big: .* the spec has 3 entries"):
        several.load(shardings=lambda _path, _shape: NamedSharding(mesh, P(None, None, "data")))
    with pytest.raises(ShardingError, match="it has no place: KeyError"):
        several.load(shardings=lambda path, _shape: {}[path])


# ---------------------------------------------------------------- blocks of several hosts


def blocks_of(value: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    return [
        np.ascontiguousarray(block)
        for half in np.split(value, rows, axis=0)
        for block in np.split(half, columns, axis=1)
    ]


def hosts_checkpoint(folder: Path, value: np.ndarray, rows: int, columns: int) -> tuple[Checkpoint, Join]:
    """Return what hosts of a mesh of rows and columns saved of one tensor under P("data", "model"), and the join."""
    names = [f"tensor00000_{n:03d}" for n in range(rows * columns)]
    checkpoint = Checkpoint(folder, dict(zip(names, blocks_of(value, rows, columns), strict=True)))
    hosts, local = {"data": rows, "model": columns}, {"data": 1, "model": 1}
    return checkpoint, join_blocks("w", names, ("data", "model"), hosts=hosts, local=local)


@pytest.mark.parametrize("spec", [P("data", "model"), P("model", "data"), P(), P(("data", "model")), P(None, "model")])
@pytest.mark.parametrize("grid", [(2, 2), (1, 4), (8, 1), (1, 6)])
def test_blocks_of_hosts_are_put_on_another_mesh(tmp_path: Path, mesh: Mesh, spec: Any, grid: tuple[int, int]) -> None:
    value = noise((16, 24))
    checkpoint, join = hosts_checkpoint(tmp_path, value, *grid)
    tree = checkpoint.load(shardings=partition_rules(mesh, [("^w$", spec)]), joins=[join])
    assert list(tree) == ["w"]
    assert_equal(tree["w"], value)
    assert tree["w"].sharding == NamedSharding(mesh, spec)


def test_blocks_are_joined_and_cast_within_a_budget(tmp_path: Path, mesh: Mesh) -> None:
    value = noise((2048, 2048))
    checkpoint, join = hosts_checkpoint(tmp_path, value, 4, 2)
    tree, report = checkpoint.report(
        shardings=lambda _path, _shape: NamedSharding(mesh, P("model", "data")),
        joins=[join],
        memory_budget="6MiB",
        cast={"^w$": "bfloat16"},
    )
    assert report.batches > 1
    assert_equal(tree["w"], value.astype(ml_dtypes.bfloat16))


def test_a_record_of_blocks_is_a_record(tmp_path: Path, mesh: Mesh) -> None:
    weights, scales = blocks_of(noise((8, 16), 1).astype(np.int8), 1, 2), blocks_of(noise((2, 16), 2), 1, 2)
    values = {
        f"t_{n:03d}": QuantizedWeight8bit(weight=weights[n], scales=scales[n].astype(ml_dtypes.bfloat16))  # type: ignore[call-arg]
        for n in range(2)
    }
    checkpoint = Checkpoint(tmp_path, values)
    join = join_blocks("q", list(values), (None, "model"), hosts={"model": 2}, local={"model": 4})
    tree = checkpoint.load(shardings={"q": NamedSharding(mesh, P(None, "model"))}, joins=[join])
    assert type(tree["q"]) is QuantizedWeight8bit
    quantized: Any = dict(tree)["q"]
    assert_equal(quantized.weight, np.concatenate(weights, axis=1))
    assert_equal(quantized.scales, np.concatenate(scales, axis=1).astype(ml_dtypes.bfloat16))


def test_only_one_of_two_replicas_is_read(tmp_path: Path, mesh: Mesh) -> None:
    value = noise((8, 8))
    checkpoint = Checkpoint(tmp_path, {"a": value, "b": value})
    join = join_blocks("w", ["a", "b"], None, hosts={"data": 2}, local={"data": 4})
    (checkpoint.directory / "b").unlink()  # another host has it
    tree, report = checkpoint.report(shardings=lambda _path, _shape: NamedSharding(mesh, P()), joins=[join])
    assert_equal(tree["w"], value)
    assert report.files_read == 1


def test_a_block_that_is_needed_may_not_be_missing(tmp_path: Path, mesh: Mesh) -> None:
    checkpoint, join = hosts_checkpoint(tmp_path, noise((8, 8)), 2, 1)
    (checkpoint.directory / "tensor00000_001").unlink()
    with pytest.raises(FileSetError) as caught:
        checkpoint.load(shardings=lambda _path, _shape: NamedSharding(mesh, P()), joins=[join])
    assert [(f.file, f.code) for f in caught.value.findings] == [("tensor00000_001", "missing-file")]


@pytest.mark.parametrize(
    ("values", "join", "code"),
    [
        ({"a": noise((4, 8)), "b": noise((4, 9))}, Join("w", {"a": (0,), "b": (1,)}, (2,)), "blocks-differ"),
        (
            {"a": noise((4, 8)), "b": noise((4, 8)).astype("f2")},
            Join("w", {"a": (0,), "b": (1,)}, (2,)),
            "blocks-differ",
        ),
        ({"a": noise((4, 8)), "b": noise((4, 8), 2)}, Join("w", {"a": (), "b": ()}, ()), "replicas-differ"),
        ({"a": noise((4, 8))}, Join("w", {"a": (0,), "b": (1,)}, (2,)), "missing-block"),
        ({"a": noise((4, 8))}, Join("w", {"b": (0,)}, (1,)), "missing-block"),
        ({"a": noise((4, 8)), "b": noise((4, 8))}, Join("w", {"a": (0,), "b": (2,)}, (2,)), "blocks-differ"),
        ({"a": noise((4, 8))}, Join("w", {"a": (0,)}, (2,)), "blocks-differ"),
    ],
)
def test_blocks_that_make_no_whole_are_refused_by_name(
    tmp_path: Path, values: Mapping[str, Any], join: Join, code: str
) -> None:
    checkpoint = Checkpoint(tmp_path, values)
    with pytest.raises(PolicyError) as caught:
        checkpoint.load(shardings=lambda _path, _shape: None, joins=[join])
    assert caught.value.findings[0].code == code


@pytest.mark.parametrize(
    ("joins", "says"),
    [
        ([Join("w", {"a": ()}, ()), Join("v", {"a": ()}, ())], "a is a block of w and v"),
        ([Join("w", {"a": ()}, ()), Join("w", {"b": ()}, ())], "a name of its own"),
        ([Join("b", {"a": ()}, ())], "b, which is a file"),
    ],
)
def test_joins_that_contradict_each_other_are_a_config_error(tmp_path: Path, joins: list[Join], says: str) -> None:
    checkpoint = Checkpoint(tmp_path, {"a": noise((2,)), "b": noise((2,))})
    with pytest.raises(ConfigError, match=says):
        checkpoint.load(shardings=lambda _path, _shape: None, joins=joins)


def test_joins_need_shardings(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {"a": noise((2,))})
    with pytest.raises(ConfigError, match="joins need shardings"):
        checkpoint.load(joins=[Join("w", {"a": ()}, ())])


# ---------------------------------------------------------------- what another process says


class Refusing:
    """The store of a job in which the other process refuses, once this one has loaded everything."""

    outcome = json.dumps(
        {"process": 1, "ended": "rejected", "error": "DigestMismatchError", "findings": [{"code": "c", "message": "m"}]}
    )

    def __init__(self) -> None:
        self.is_done = False

    def key_value_set(self, key: str, _value: str) -> None:
        self.is_done = self.is_done or "/ended/0" in key

    def key_value_try_get(self, key: str) -> str:
        if not self.is_done:
            raise RuntimeError(f"NOT_FOUND: {key}")
        return self.outcome

    def blocking_key_value_get(self, key: str, _milliseconds: int) -> str:
        return "1" if "/seen/" in key else self.outcome


@pytest.mark.parametrize("entrance", ["load", "load_placed"])
def test_nothing_is_left_of_what_another_process_refuses(
    several: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entrance: str
) -> None:
    history = tmp_path / "history"
    options: dict[str, Any] = {"manifest": several.manifest, "trust": several.key.public, "history": history}
    store = Refusing()
    monkeypatch.setattr(agreeing, "_connect", lambda: (store, 0, 2))
    gc.collect()
    before = len(jax.live_arrays())
    caught: list[BaseException] = []
    try:
        if entrance == "load":
            loading.load(several.directory, shardings=lambda _path, _shape: None, **options)
        else:
            held = loading.hold(several.directory, **options)
            loading.load_placed(several.directory, held, policy="numpy-quantized", memory_budget=None, place=None)
    except DigestMismatchError as err:
        caught.append(err)
    assert store.is_done
    assert len(caught) == 1
    gc.collect()
    assert len(jax.live_arrays()) == before
    assert not history.exists()  # which remembers what was accepted


def test_processes_agree_on_the_manifest_and_on_what_becomes_of_the_tensors(
    several: Checkpoint, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[dict[str, str]] = []
    monkeypatch.setattr(agreeing.Agreement, "settle", lambda self: claims.append(self._claims))
    for cast in ({}, {}, {"w00": "float16"}):
        several.load(shardings=place_of(mesh, "rows"), cast=cast)
    assert [set(one) for one in claims] == [{"manifest", "set of tensors"}] * 3
    assert len({one["manifest"] for one in claims}) == 1
    assert claims[0] == claims[1] != claims[2]


# ---------------------------------------------------------------- casts


@pytest.mark.parametrize("budget", ["256MiB", "8MiB"])
def test_only_what_is_asked_for_is_cast(several: Checkpoint, mesh: Mesh, budget: str) -> None:
    casts = {r"^w0[0-4]$": "bfloat16", "nested/a": "float16"}
    tree = several.load(shardings=place_of(mesh, "grid"), memory_budget=budget, cast=casts)
    for n in range(10):
        value = several.values[f"w{n:02d}"]
        assert_equal(tree[f"w{n:02d}"], value.astype(ml_dtypes.bfloat16) if n < 5 else value)
    assert_equal(tree["nested"]["a"][0], several.values["nested"]["a"][0].astype(np.float16))
    assert tree["nested"]["q"].dtype == np.float32


def test_numpy_arrays_are_cast_as_well(several: Checkpoint) -> None:
    tree = several.load(cast={"^w00$": "float16"})
    assert (tree["w00"].dtype, tree["w01"].dtype) == (np.float16, np.float32)
    assert tree["w00"].tobytes() == several.values["w00"].astype(np.float16).tobytes()
    assert not tree["w00"].flags.writeable


def test_copies_that_a_cast_makes_of_numpy_arrays_count_against_the_budget(several: Checkpoint) -> None:
    size = sum(path.stat().st_size for path in several.directory.iterdir())
    with pytest.raises(StagingError, match="what is cast takes 50,332,288 beside them") as caught:
        several.load(cast={"": "float64"}, memory_budget=size + 40 * MIB)
    assert "--memory-budget" in str(caught.value.hint)
    assert several.load(cast={"": "float64"}, memory_budget=size + 52 * MIB)["w00"].dtype == np.float64
    several.load(cast={"": "float32"}, memory_budget=size + 4 * MIB)


def test_a_cast_makes_room_for_what_jax_would_narrow(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {"w": noise((4,)).astype(np.float64) * 1e300})
    with pytest.raises(ShardingError, match="narrow"):
        checkpoint.load(shardings=lambda _path, _shape: None)
    tree = checkpoint.load(shardings=lambda _path, _shape: None, cast={"": "float32"})
    assert np.isinf(np.asarray(tree["w"])).all()  # out of range, without a warning


def test_a_cast_that_is_none_is_a_config_error(several: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="expected a floating-point dtype, found 'int8'"):
        several.load(cast={"w": "int8"})


# ---------------------------------------------------------------- reports


def test_the_report_says_what_it_took(several: Checkpoint, mesh: Mesh) -> None:
    for options in ({}, {"shardings": place_of(mesh, "rows")}):
        _, report = several.report(**options)
        assert report.bytes_read == report.bytes_total == sum(f.stat().st_size for f in several.directory.iterdir())
        assert report.algorithms == ("sha256",)
        assert report.batches == 1
        assert set(report.seconds) >= {"manifest", "stage", "scan", "assemble", "total"}
        assert 0 < sum(s for phase, s in report.seconds.items() if phase != "total") <= report.seconds["total"]
        assert report.memory_peak >= report.memory_before > 0
        assert json.loads(json.dumps(report.to_json()))["bytes_read"] == report.bytes_read


PEAK = """
import gc, json, os, sys
import jax
import jax.numpy as jnp
from safeload import loading
from safeload.trust.store import load_trust
directory, manifest, key = sys.argv[1:]
jax.block_until_ready(jnp.ones(8) + 1)
import safeload.distributing
loading.load(sys.argv[1] + "/../warm", manifest=manifest + ".warm", trust=key, shardings=lambda p, s: None)
gc.collect()
tree, report = loading.load_and_report(
    directory, manifest=manifest, trust=key, shardings=lambda p, s: None, memory_budget="32MiB", cast={"": "bfloat16"}
)
result = sum(a.nbytes for a in tree.values())
print(json.dumps({"growth": report.memory_peak - report.memory_before, "result": result, "batches": report.batches}))
"""


def test_a_budget_bounds_the_memory_that_a_load_takes_beside_its_result(tmp_path: Path) -> None:
    n_files, budget = 24, 32 * MIB
    checkpoint = Checkpoint(tmp_path, {f"w{n:02d}": noise((1024, 2048), n) for n in range(n_files)})
    warm = tmp_path / "warm"
    warm.mkdir()
    (warm / "w").write_bytes(pickled(noise((4, 4))))
    key = tmp_path / "key.pub"
    key.write_bytes(checkpoint.key.public.to_pem())
    manifest = tmp_path / "manifest"
    manifest.write_bytes(checkpoint.manifest)
    (tmp_path / "manifest.warm").write_bytes(publishing.sign(warm, keys=[checkpoint.key], model=MODEL, revision="r1"))
    command = [sys.executable, "-c", PEAK, str(checkpoint.directory), str(manifest), str(key)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["result"] == n_files * 4 * MIB
    assert found["batches"] > 4
    # 16 MiB for the interpreter's and the allocator's own; the files are 192 MiB.
    assert found["growth"] <= found["result"] + 1.05 * budget + 16 * MIB


def test_the_command_tells_what_a_load_took(
    several: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, key = tmp_path / "manifest", tmp_path / "key.pub"
    manifest.write_bytes(several.manifest)
    key.write_bytes(several.key.public.to_pem())
    arguments = ["load", str(several.directory), "--manifest", str(manifest), "--trust", str(key), "--jax", "--json"]
    assert cli.main([*arguments, "--memory-budget", "8MiB"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "accepted"
    assert shown["load"]["bytes_read"] == shown["load"]["bytes_total"] > 24 * MIB
    assert shown["load"]["batches"] > 3
    assert shown["load"]["memory_peak"] > 0
    assert shown["seconds"] == shown["load"]["seconds"]["total"]
