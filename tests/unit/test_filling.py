from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

import safeload
from safeload import filling, staging
from safeload.assembling import fresh
from safeload.canonical import numpy_dtype
from safeload.digests import CHUNK_BYTES
from safeload.errors import ConfigError, DigestMismatchError, PolicyError, RollbackError, ShardingError, StagingError
from safeload.filling import assign, fill, load_into, named_tensors
from safeload.formats.safetensors_writing import write_safetensors
from safeload.loading import load_host
from safeload.publishing import sign
from safeload.records import QuantizedWeight8bit
from safeload.remapping import remap
from safeload.saving import save
from safeload.tensors import DType
from safeload.trees import map_leaves, named_leaves
from safeload.trust.keys import SecretKey

KEY = SecretKey.generate("ed25519")
Quantized: Any = QuantizedWeight8bit


class Norm(NamedTuple):
    scale: Any
    bias: Any


def model(start: int = 0) -> dict[str, Any]:
    """A tree of every container, with values that differ from each other and between starts."""
    return {
        "norm": Norm(np.arange(3, dtype=np.float32) + start, np.ones(3, np.float32) + start),
        "layers": [
            {"w": np.arange(6, dtype=np.float32).reshape(2, 3) * (start + 2)},
            {"w": (np.arange(6) + start).reshape(2, 3).astype(ml_dtypes.bfloat16)},
        ],
        "q": Quantized(np.full((2, 2), start % 100, np.int8), np.full((1, 2), start, ml_dtypes.bfloat16)),
        "count": np.array(start, np.int32),
        "nothing": None,
    }


def empty() -> dict[str, Any]:
    made: dict[str, Any] = map_leaves(model(), lambda _, leaf: np.zeros_like(leaf))
    return made


def described(tree: Any = None) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model() if tree is None else tree)


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same structure, dtypes and bits."""
    ours, theirs = named_leaves(one), named_leaves(other)
    return ours.keys() == theirs.keys() and all(
        np.asarray(ours[n]).dtype == np.asarray(theirs[n]).dtype
        and np.asarray(ours[n]).tobytes() == np.asarray(theirs[n]).tobytes()
        for n in ours
    )


def saved(tree: Any, directory: Path, layout: Any = "safetensors", **stated: Any) -> Path:
    return save(tree, directory, layout=layout, keys=[KEY], model="tiny", revision="1", **stated)


def filled(target: Any, directory: Path, manifest: Any = None, **options: Any) -> Any:
    return fill(target, directory, manifest=manifest or directory / "manifest.json", trust=KEY.public, **options)


# ---------------------------------------------------------------- in place


def test_load_into_writes_into_the_arrays_that_are_there() -> None:
    target = empty()
    before = named_leaves(target)
    load_into(target, model(5))
    assert same(target, model(5))
    assert all(leaf is before[name] for name, leaf in named_leaves(target).items())


def test_load_into_takes_flat_names_and_what_load_returns(tmp_path: Path) -> None:
    target = empty()
    load_into(target, named_leaves(model(7)))
    assert same(target, model(7))
    for layout in ("safetensors", "grok-1"):
        manifest = saved(model(9), tmp_path / layout, layout)
        trusted, loaded = load_host(tmp_path / layout, manifest=manifest, trust=KEY.public)
        load_into(target, named_tensors(loaded, manifest=trusted))
        assert same(target, model(9)), layout
        load_into(target, empty())


def test_names_that_would_hide_a_tensor_are_refused() -> None:
    one = np.ones(1, np.float32)
    with pytest.raises(ConfigError, match="found 1 twice"):
        named_tensors({"a.pkl": {1: one, "1": one}})
    with pytest.raises(ConfigError, match="manifest"):
        named_tensors({"a.pkl": one}, roles=["weights"])
    both = named_tensors({"a.pkl": {"w": one, "epochs": 3}, "b.pkl": {"w": one}})
    assert sorted(both) == ["a/w", "b/w"]


def test_load_into_reads_fortran_order_big_endian_and_jax_arrays() -> None:
    target: dict[str, Any] = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros(2, np.int16),
        "c": np.zeros(2, np.float32),
    }
    source = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    load_into(target, {"a": source, "b": np.array([1, 258], ">i2"), "c": jax.numpy.ones(2)})
    assert target["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert target["b"].tolist() == [1, 258]
    assert target["c"].tolist() == [1, 1]


def test_all_that_differs_is_told_at_once_and_nothing_is_written() -> None:
    target: dict[str, Any] = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32), "c": np.zeros(1, np.int8)}
    given = {"a": np.ones(2, np.float32), "b": np.ones(4, np.float32), "d": np.ones(1, np.int8)}
    with pytest.raises(ShardingError) as caught:
        load_into(target, given)
    for told in ("missing c: int8 (1,)", "unexpected d: int8 (1,)", "b: expected float32 (3,), found float32 (4,)"):
        assert told in str(caught.value)
    assert target["a"].tolist() == [0, 0]


def test_a_dtype_is_never_cast() -> None:
    for dtype in ("float64", "float16", "int32"):
        with pytest.raises(ShardingError, match="expected float32"):
            load_into({"a": np.zeros(2, np.float32)}, {"a": np.ones(2, dtype)})


@pytest.mark.parametrize("kind", ["read-only", "repeated", "jax", "described"])
def test_what_cannot_be_written_to_is_told_before_anything_is_written(kind: str) -> None:
    frozen = np.zeros(2, np.float32)
    frozen.flags.writeable = False
    repeated = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2,), (0,))
    leaf: Any = {
        "read-only": frozen,
        "repeated": repeated,
        "jax": jax.numpy.zeros(2),
        "described": jax.ShapeDtypeStruct((2,), np.float32),
    }[kind]
    first = np.zeros(2, np.float32)
    with pytest.raises(ConfigError, match="b: expected an array that can be written to"):
        load_into({"a": first, "b": leaf}, {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)})
    assert first.tolist() == [0, 0]


def test_arrays_that_share_some_memory_are_refused() -> None:
    memory = np.zeros(6, np.float32)
    ones = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    with pytest.raises(ConfigError, match="share memory"):
        load_into({"a": memory[:4], "b": memory[2:]}, ones)
    square = np.zeros((2, 2), np.float32)
    with pytest.raises(ConfigError, match="share memory"):
        load_into({"a": square, "b": square.T}, {k: v.reshape(2, 2) for k, v in ones.items()})
    columns = np.zeros((2, 2), np.float32)
    load_into({"a": columns[:, 0], "b": columns[:, 1]}, {"a": np.ones(2, np.float32), "b": np.full(2, 2, np.float32)})
    assert columns.tolist() == [[1, 2], [1, 2]]


def test_arrays_that_change_places_do() -> None:
    target = {name: np.full((2, 2), value, np.float32) for value, name in enumerate("abc")}
    load_into(target, {"a": target["b"].T, "b": target["c"], "c": target["a"]})
    assert {name: array[0, 0] for name, array in target.items()} == {"a": 1, "b": 2, "c": 0}
    # Columns lie apart, though each begins before the other ends.
    matrix = np.array([[1, 2], [3, 4]], np.float32)
    load_into({"a": matrix[:, 0], "b": matrix[:, 1]}, {"a": matrix[:, 1], "b": matrix[:, 0]})
    assert matrix.tolist() == [[2, 1], [4, 3]]


def test_an_array_without_elements_can_be_written_to() -> None:
    none = np.empty_like(np.zeros((0, 3), np.float32))
    load_into({"a": none, "b": np.zeros(1, np.float32)}, {"a": none.copy(), "b": np.ones(1, np.float32)})


def test_records_are_compared_by_their_fields() -> None:
    target = {"a": np.zeros(2, [("x", "f4"), ("y", "f4")])}
    with pytest.raises(ShardingError, match="expected"):
        load_into(target, {"a": np.ones(2, [("y", "f4"), ("x", "f4")])})


def test_leaves_that_are_one_are_given_once_or_with_equal_values() -> None:
    shared = np.zeros(2, np.float32)
    target = {"head": shared, "embedding": shared, "view": shared[:]}
    load_into(target, {"head": np.ones(2, np.float32)})
    assert shared.tolist() == [1, 1]
    load_into(target, {name: np.full(2, 3, np.float32) for name in target})
    assert shared.tolist() == [3, 3]
    with pytest.raises(ShardingError, match="head and view are one in the model"):
        load_into(target, {"head": np.ones(2, np.float32), "view": np.zeros(2, np.float32)})
    assert shared.tolist() == [3, 3]


@pytest.mark.parametrize(
    "target",
    [{}, {"a": 1.0}, {"a": object()}, [], {"a": {"b": np.zeros(1)}, "a/b": np.zeros(1)}],
    ids=["empty", "number", "object", "list", "one name twice"],
)
def test_what_is_no_tree_of_arrays_is_refused(target: Any) -> None:
    with pytest.raises(ConfigError):
        load_into(target, {"a": np.zeros(1)})


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(ConfigError, match="does it hold itself"):
        load_into(tree, {"a": np.zeros(1)})


def test_what_rules_made_is_loaded_with_its_ties(tmp_path: Path) -> None:
    saved({"wte": np.arange(6, dtype=np.float32).reshape(2, 3), "k": np.ones((3, 2), np.float32)}, tmp_path / "m")
    rules = tmp_path / "rules.toml"
    rules.write_text(
        """version = 1
name = "small"
description = "A tied embedding and a kernel"
rename = [{ name = "wte", to = "embedding" }, { name = "k", to = "block/kernel" }]
transpose = [{ name = "block/kernel", axes = [1, 0] }]
tie = [{ name = "embedding", also = "head" }]
""",
        encoding="utf-8",
    )
    mapped = remap(safeload.load(tmp_path / "m", manifest=tmp_path / "m" / "manifest.json", trust=KEY.public), rules)
    shared = np.zeros((2, 3), np.float32)
    target = {"embedding": shared, "head": shared, "block": {"kernel": np.zeros((2, 3), np.float32)}}
    load_into(target, mapped)
    assert shared.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert assign(described(target), mapped)["head"].tolist() == shared.tolist()


# ---------------------------------------------------------------- anew


def test_assign_returns_new_arrays_and_leaves_the_old_ones() -> None:
    target, source = empty(), model(5)
    result = assign(target, source)
    assert same(result, source)
    assert same(target, empty())
    assert type(result["norm"]) is Norm
    olds = named_leaves(target).values()
    for name, leaf in named_leaves(result).items():
        assert not any(np.shares_memory(leaf, other) for other in (*olds, named_leaves(source)[name])), name
        assert leaf.flags.writeable


def test_assign_fills_a_description_with_arrays_that_jax_may_take_over() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    target = {"a": jax.ShapeDtypeStruct((2, 3), np.float32, sharding=place), "b": jax.numpy.zeros(2)}
    result = assign(target, {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)})
    assert result["a"].sharding == place
    assert isinstance(result["b"], jax.Array)
    donating = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    assert donating(result)["a"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_arrays_of_jax_do_not_share_the_memory_that_was_loaded() -> None:
    # As JAX takes over without a copy where it may.
    source = fresh((64,), np.dtype(np.float32))
    source[:] = 1
    result = assign({"a": jax.ShapeDtypeStruct((64,), np.float32)}, {"a": source})
    source[:] = 2
    assert result["a"].tolist() == [1] * 64


def test_assign_keeps_ties_and_containers() -> None:
    shared = np.zeros(2, np.float32)
    target = OrderedDict([("z", shared), ("a", (shared, None))])
    result = assign(target, {"z": np.ones(2, np.float32)})
    assert list(result) == ["z", "a"]
    assert result["z"] is result["a"][0]
    assert result["z"] is not shared


def test_a_shape_that_is_described_once_is_not_one_parameter() -> None:
    shape = jax.ShapeDtypeStruct((2,), np.float32)
    with pytest.raises(ShardingError, match="missing b"):
        assign({"a": shape, "b": shape}, {"a": np.ones(2, np.float32)})
    result = assign({"a": shape, "b": shape}, {"a": np.ones(2, np.float32), "b": np.zeros(2, np.float32)})
    assert (result["a"].tolist(), result["b"].tolist()) == ([1, 1], [0, 0])


def test_optimizers_without_a_module_are_refused() -> None:
    with pytest.raises(ConfigError, match="optimizers"):
        assign(empty(), model(), optimizers=[object()])


# ---------------------------------------------------------------- tensor by tensor


@pytest.mark.parametrize("layout", ["safetensors", "grok-1"])
def test_fill_reads_into_arrays_and_into_descriptions(tmp_path: Path, layout: str) -> None:
    saved(model(5), tmp_path / "m", layout)
    target = empty()
    assert filled(target, tmp_path / "m") is target
    assert same(target, model(5))
    made = filled(described(), tmp_path / "m")
    assert same(made, model(5))
    assert all(isinstance(leaf, jax.Array) for leaf in named_leaves(made).values())


Large = tuple[dict[str, Any], Path, Path]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    """One file of five chunks, of which a budget of three has to read some tensors at a time."""
    folder = tmp_path_factory.mktemp("large")
    tensors = {f"t{i}": np.full(CHUNK_BYTES // 2 + i, i + 1, np.uint8) for i in range(8)}
    (folder / "m").mkdir()
    with (folder / "m" / "model.safetensors").open("wb") as file:
        write_safetensors(file, tensors)
    (folder / "manifest.json").write_bytes(sign(folder / "m", keys=[KEY], model="large", revision="1"))
    return tensors, folder / "m", folder / "manifest.json"


def test_a_file_larger_than_the_budget_is_read_some_tensors_at_a_time(
    large: Large, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, directory, manifest = large
    most: list[int] = []
    stream = staging.stream

    def watched(*args: Any, **options: Any) -> Any:
        wanted: Mapping[str, tuple[range, ...] | None] = options["wanted"]
        most.extend(sum(map(len, ranges)) for ranges in wanted.values() if ranges is not None)
        return stream(*args, **options)

    monkeypatch.setattr(staging, "stream", watched)
    target = {name: np.zeros_like(array) for name, array in tensors.items()}
    filled(target, directory, manifest, memory_budget=3 * CHUNK_BYTES + 2**20)
    assert all(np.array_equal(target[name], array) for name, array in tensors.items())
    assert len(most) > 1
    assert max(most) <= 3 * CHUNK_BYTES


def test_a_tensor_that_does_not_fit_is_named_with_what_it_takes(large: Large) -> None:
    tensors, directory, manifest = large
    target = {name: np.zeros_like(array) for name, array in tensors.items()}
    with pytest.raises(StagingError, match=r"the tensor t\d+ takes [0-9,]+ bytes at once"):
        filled(target, directory, manifest, memory_budget=1000)


def test_fill_compares_before_it_opens_a_file(tmp_path: Path) -> None:
    manifest = saved(model(), tmp_path / "m").read_bytes()
    for file in (tmp_path / "m").iterdir():
        file.unlink()
    target = empty()
    target["count"] = np.zeros(4, np.int32)
    with pytest.raises(ShardingError, match=r"count: expected int32 \(4,\), found int32 \(\)"):
        filled(target, tmp_path / "m", manifest)


def damaged(directory: Path) -> bytes:
    """Two files, of which the one that is read second is not the signed one."""
    (directory / "sub").mkdir(parents=True)
    for name, size in (("model-1.safetensors", 5000), ("sub/model-2.safetensors", 10)):
        with (directory / name).open("wb") as file:
            write_safetensors(file, {name[-13]: np.ones(size, np.float32)})
    envelope = sign(directory, keys=[KEY], model="two", revision="1")
    path = directory / "sub/model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    return envelope


def test_what_was_written_of_a_refused_checkpoint_is_set_to_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Batches of one page, so that the first file is written before the second is known to be another.
    monkeypatch.setattr(staging, "BATCH_BYTES", 4096)
    envelope = damaged(tmp_path / "m")
    target = {"1": np.full(5000, 7, np.float32), "2": np.full(10, 7, np.float32)}
    writes: list[str] = []
    write = filling._Writer.write

    def watched(writer: Any, array: Any) -> None:
        writes.append(writer.name)
        write(writer, array)

    monkeypatch.setattr(filling._Writer, "write", watched)
    with pytest.raises(DigestMismatchError):
        filled(target, tmp_path / "m", envelope, memory_budget=100_000)
    assert writes == ["1", "1"]
    assert not target["1"].any()
    assert target["2"].tolist() == [7] * 10


def test_fill_renames_leaves_out_and_refuses_two_of_one_name(tmp_path: Path) -> None:
    saved({"old": {"a": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}}, tmp_path / "m")
    target = {"a": np.zeros(2, np.float32)}
    filled(target, tmp_path / "m", names=lambda name: "a" if name.endswith("/a") else None)
    assert target["a"].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="found a twice"):
        filled(target, tmp_path / "m", names=lambda _: "a")


def test_fill_holds_equal_what_is_one_in_the_target(tmp_path: Path) -> None:
    shared = np.zeros(2, np.float32)
    saved({"a": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}, tmp_path / "m")
    with pytest.raises(ShardingError, match="a and b are one in the model"):
        filled({"a": shared, "b": shared}, tmp_path / "m")
    saved({"a": np.ones(2, np.float32)}, tmp_path / "n")
    filled({"a": shared, "b": shared}, tmp_path / "n")
    assert shared.tolist() == [1, 1]
    shape = jax.ShapeDtypeStruct((2,), np.float32)
    made = filled({"a": shape, "b": shape}, tmp_path / "n", tied=[("a", "b")])
    assert made["a"] is made["b"]
    with pytest.raises(ShardingError, match="tied"):
        filled({"a": shape, "b": shape}, tmp_path / "n", tied=[("a", "c")])


def test_arrays_that_are_two_are_not_tied_by_name_as_only_one_would_be_written(tmp_path: Path) -> None:
    saved({name: np.ones(2, np.float32) for name in "ab"}, tmp_path / "m")
    target = {name: np.full(2, 7, np.float32) for name in "ab"}
    with pytest.raises(ShardingError, match="tied: a, b are one in the checkpoint, and arrays of their own"):
        filled(target, tmp_path / "m", tied=[("a", "b")])
    assert all(array.tolist() == [7, 7] for array in target.values())
    target["b"] = target["a"]
    filled(target, tmp_path / "m", tied=[("a", "b")])
    assert target["a"].tolist() == [1, 1]


def test_fill_is_held_to_policy_history_and_purpose(tmp_path: Path) -> None:
    saved(model(1), tmp_path / "one", version=1)
    saved(model(2), tmp_path / "two", version=2)
    history = tmp_path / "history.json"
    target = empty()
    filled(target, tmp_path / "two", history=history)
    with pytest.raises(RollbackError):
        filled(target, tmp_path / "one", history=history)
    with pytest.raises(PolicyError, match="optimizer"):
        filled(target, tmp_path / "two", purpose="training")
    assert same(target, model(2))


def test_a_policy_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    saved(model(), tmp_path / "m")
    policy = tmp_path / "m" / "policy.toml"
    policy.write_text("version = 1\nname = 'own'\ndescription = 'One that the checkpoint brings'\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="policy"):
        filled(empty(), tmp_path / "m", policy=policy)


def test_a_leaf_for_which_nothing_came_is_never_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(model(), tmp_path / "m")
    monkeypatch.setattr(filling, "decode", lambda _: {})
    with pytest.raises(ShardingError, match="nothing was read for"):
        filled(empty(), tmp_path / "m")


def test_a_refused_checkpoint_is_not_remembered(tmp_path: Path) -> None:
    envelope = damaged(tmp_path / "m")
    history = tmp_path / "history.json"
    target = {"1": np.zeros(5000, np.float32), "2": np.zeros(10, np.float32)}
    with pytest.raises(DigestMismatchError):
        filled(target, tmp_path / "m", envelope, history=history)
    assert not history.exists()


# ---------------------------------------------------------------- optax


def test_optax_goes_on_with_what_assign_returns_and_copies_are_not_told() -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed: it is part of the extra dev")
    old = {"w": jax.numpy.zeros(3)}
    optimizer = optax.lookahead(optax.sgd(0.5, momentum=0.9), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(old)
    state = optimizer.init(params)
    new = assign(old, {"w": np.ones(3, np.float32)})
    # The old tree is as it was: an update of it would not see what was loaded.
    assert old["w"].tolist() == [0, 0, 0]
    plain = optax.sgd(0.5, momentum=0.9)
    updates, _ = plain.update({"w": jax.numpy.ones(3)}, plain.init(new), new)
    assert optax.apply_updates(new, updates)["w"].tolist() == [0.5] * 3
    # What has copied the parameters keeps the old ones, as the module says.
    assert params.slow["w"].tolist() == [0, 0, 0]
    updates, _ = optimizer.update({"w": jax.numpy.ones(3)}, state, params)
    assert optax.apply_updates(params, updates).fast["w"].tolist() == [-0.5] * 3


def test_optax_sees_arrays_that_were_loaded_in_place() -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed: it is part of the extra dev")
    params = {"w": np.zeros(3, np.float32)}
    optimizer = optax.sgd(0.5, momentum=0.9)
    state = optimizer.init(params)
    load_into(params, {"w": np.ones(3, np.float32)})
    updates, _ = optimizer.update({"w": np.ones(3, np.float32)}, state, params)
    assert optax.apply_updates(params, updates)["w"].tolist() == [0.5] * 3


# ---------------------------------------------------------------- torch


def network() -> Any:
    """A small network of torch whose head is tied to its embedding, with a buffer."""
    torch = pytest.importorskip("torch", reason="torch is not installed: `pip install torch` runs these tests")

    class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(4, 3)
            self.norm = torch.nn.LayerNorm(3, dtype=torch.bfloat16)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool))

    return torch, Network


def values(module: Any) -> dict[str, Any]:
    """Values for a network, without the head, as a checkpoint of a tied one has them."""
    return {
        "embedding.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
        "norm.weight": np.full(3, 2, ml_dtypes.bfloat16),
        "norm.bias": np.full(3, 3, ml_dtypes.bfloat16),
        "mask": np.tri(3, dtype=bool),
    } | ({"head.weight": np.arange(12, dtype=np.float32).reshape(4, 3)} if module else {})


def check(module: Any) -> None:
    assert module.embedding.weight.tolist() == values(None)["embedding.weight"].tolist()
    assert module.norm.weight.tolist() == [2, 2, 2]
    assert module.mask.int().tolist() == np.tri(3, dtype=int).tolist()
    assert module.head.weight is module.embedding.weight


def test_load_into_keeps_the_parameters_of_torch_that_an_optimizer_has() -> None:
    torch, network_class = network()
    module = network_class()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    before = dict(module.named_parameters())
    load_into(module, values(None))
    check(module)
    assert all(parameter is before[name] for name, parameter in module.named_parameters())
    module.embedding.weight.sum().backward()
    optimizer.step()
    assert module.embedding.weight.tolist() == (values(None)["embedding.weight"] - 0.5).tolist()


def test_torch_refuses_a_backward_pass_over_values_that_load_into_replaced() -> None:
    torch, _ = network()
    weight = torch.ones(2, requires_grad=True)
    result = (weight * weight).sum()
    load_into({"w": weight}, {"w": np.zeros(2, np.float32)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_assign_leaves_an_optimizer_behind_unless_it_is_named() -> None:
    torch, network_class = network()
    for named in (False, True):
        module = network_class()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        module.embedding.weight.sum().backward()
        optimizer.step()
        old = module.embedding.weight
        moments = optimizer.state[old]
        assign(module, values(module), optimizers=[optimizer] if named else [])
        check(module)
        assert module.embedding.weight is not old
        module.embedding.weight.sum().backward()
        optimizer.step()
        moved = module.embedding.weight.tolist() != values(None)["embedding.weight"].tolist()
        assert moved is named
        assert (module.embedding.weight in optimizer.state) is named
        if named:
            assert optimizer.state[module.embedding.weight] is moments
            assert old not in optimizer.state


def test_a_module_on_meta_is_filled_from_a_checkpoint_tensor_by_tensor(tmp_path: Path) -> None:
    torch, network_class = network()
    saved(values(None), tmp_path / "m")
    with torch.device("meta"):
        module = network_class()
    assert filled(module, tmp_path / "m") is module
    check(module)
    assert module.embedding.weight.requires_grad
    assert {parameter.device.type for parameter in (*module.parameters(), *module.buffers())} == {"cpu"}
    # What is real stays the object that it is.
    before = module.embedding.weight
    filled(module, tmp_path / "m")
    assert module.embedding.weight is before


def test_load_into_refuses_a_module_on_meta_and_nothing_leaves_a_buffer_without_values() -> None:
    torch, network_class = network()
    with torch.device("meta"):
        module = network_class()
    with pytest.raises(ConfigError, match="can be written to"):
        load_into(module, values(None))
    module.register_buffer("cache", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(ShardingError, match="cache: buffers on the device meta"):
        assign(module, values(None))


def test_a_buffer_that_is_missing_is_told_like_a_parameter() -> None:
    _, network_class = network()
    given = values(None)
    del given["mask"]
    with pytest.raises(ShardingError, match=r"missing mask: bool \(3, 3\)"):
        load_into(network_class(), given)


def test_torch_tensors_with_strides_and_every_dtype_are_written() -> None:
    torch, _ = network()
    dtypes = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    dtypes += ["complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]
    target = {name: torch.zeros((3, 2), dtype=getattr(torch, name)).t() for name in dtypes}
    given = {name: (np.arange(6).reshape(2, 3) % 2).astype(numpy_dtype(DType(name))) for name in dtypes}
    load_into(target, given)
    for name, tensor in target.items():
        assert tensor.to(torch.complex128).real.tolist() == [[0, 1, 0], [1, 0, 1]], name


def test_tensors_that_change_places_in_one_module_do() -> None:
    torch, _ = network()
    module = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1, bias=False) for name in "ab"})
    state = module.state_dict()
    before = {name: tensor.tolist() for name, tensor in state.items()}
    load_into(module, {"a.weight": state["b.weight"], "b.weight": state["a.weight"]})
    assert module["a"].weight.tolist() == before["b.weight"]
    assert module["b"].weight.tolist() == before["a.weight"]


def test_an_optimizer_that_keeps_a_second_list_of_parameters_follows() -> None:
    torch, _ = network()
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(module.parameters())
    assign(module, {"weight": np.ones((1, 2), np.float32), "bias": np.ones(1, np.float32)}, optimizers=[optimizer])

    def loss() -> Any:
        optimizer.zero_grad()
        result = (module(torch.ones(1, 2)) ** 2).sum()
        result.backward()
        return result

    optimizer.step(loss)
    assert module.weight.tolist() != [[1, 1]]


def test_what_cannot_follow_a_module_is_told_before_the_module_is_changed() -> None:
    torch, _ = network()
    module = torch.nn.Linear(2, 1)
    before = module.weight
    given = {"weight": np.ones((1, 2), np.float32), "bias": np.ones(1, np.float32)}
    with pytest.raises(ConfigError, match="expected optimizers of torch, found dict"):
        assign(module, given, optimizers=[{"momentum": 1}])
    with pytest.raises(ConfigError, match="found one that has none of them"):
        assign(module, given, optimizers=[torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1)])
    assert module.weight is before


def test_a_module_that_refuses_a_parameter_keeps_all_of_its_own(tmp_path: Path) -> None:
    torch, _ = network()

    class Stubborn(torch.nn.Linear):  # type: ignore[misc, name-defined, unused-ignore]
        def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("no")

    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), Stubborn(2, 2, bias=False, device="meta"))
    before = module[0].weight
    given = {name: np.ones((2, 2), np.float32) for name in ("0.weight", "1.weight")}
    with pytest.raises(ShardingError, match="does not take its new parameters: no"):
        assign(module, given)
    assert module[0].weight is before
    # What was written in place before the refusal is no model either.
    saved({"0": {"weight": given["0.weight"]}, "1": {"weight": given["1.weight"]}}, tmp_path / "m")
    with pytest.raises(ShardingError, match="does not take its new parameters: no"):
        filled(module, tmp_path / "m")
    assert module[0].weight is before
    assert before.tolist() == [[0, 0], [0, 0]]


def test_tensors_without_elements_are_no_one_parameter_and_odd_ones_are_refused() -> None:
    torch, _ = network()
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(0)) for name in "ab"})
    with pytest.raises(ShardingError, match="missing b"):
        load_into(module, {"a": np.zeros(0, np.float32)})
    assign(module, {name: np.zeros(0, np.float32) for name in "ab"})
    assert module["a"] is not module["b"]
    with pytest.raises(ConfigError, match="of a lazy module"):
        load_into(torch.nn.LazyLinear(2), {"weight": np.ones((2, 2), np.float32)})
    with pytest.raises(ConfigError, match="plain array"):
        load_into({"a": torch.eye(2).to_sparse()}, {"a": np.ones((2, 2), np.float32)})
