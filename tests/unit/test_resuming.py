import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import safeload
from safeload import resuming
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FormatError,
    ManifestError,
    PolicyError,
    RollbackError,
    ShardingError,
)
from safeload.loading import load_host
from safeload.publishing import describe, sign
from safeload.resuming import TrainingState, restore_training, save_training
from safeload.saving import save
from safeload.trees import named_leaves
from safeload.trust.keys import SecretKey
from tests.processes import run_processes

KEY = SecretKey.generate("ed25519")


def state(**changes: Any) -> TrainingState:
    shared = np.arange(6, dtype=np.float32).reshape(2, 3)
    made: dict[str, Any] = {
        "params": {"embedding": shared, "head": shared, "norm": np.ones(3, ml_dtypes.bfloat16)},
        "optimizer": ({"mu": {"w": np.full(3, 0.25, np.float32)}, "count": np.array(3, np.int32)}, ()),
        "step": 3,
        "rng": {"dropout": np.array([1, 2], np.uint32)},
    }
    return TrainingState(**(made | changes))


def saved(what: TrainingState, directory: Path, **options: Any) -> Path:
    return save_training(what, directory, keys=[KEY], model="tiny", revision="step-3", **options)


def restored(directory: Path, like: TrainingState, **options: Any) -> TrainingState:
    return restore_training(directory, like, trust=KEY.public, **options)


def zeros(like: TrainingState) -> TrainingState:
    trees = {part: jax.tree.map(np.zeros_like, getattr(like, part)) for part in ("optimizer", "rng")}
    shared = np.zeros_like(like.params["embedding"])
    norm = np.zeros_like(like.params["norm"])
    return TrainingState(params={"embedding": shared, "head": shared, "norm": norm}, step=0, **trees)


def bits(tree: Any) -> dict[str, bytes]:
    def raw(leaf: Any) -> Any:
        return jax.random.key_data(leaf) if str(leaf.dtype).startswith("key<") else leaf

    return {name: np.asarray(raw(leaf)).tobytes() for name, leaf in named_leaves(tree).items()}


# ---------------------------------------------------------------- a run


def test_step_4_is_bit_identical_with_and_without_the_restore_and_not_without_the_moments(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed: it is part of the extra dev")
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    data = np.random.default_rng(5).normal(size=(10, 4, 3)).astype(np.float32)

    def loss(params: Any, batch: Any, key: Any) -> Any:
        hidden = jax.numpy.tanh(batch @ params["in"]) * jax.random.bernoulli(key, 0.8, (4, 5))
        return ((hidden @ params["out"] - batch) ** 2).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, moments: Any, batch: Any, key: Any) -> Any:
        grads = jax.grad(loss)(params, batch, key)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    def train(run: TrainingState) -> TrainingState:
        key, own = jax.random.split(run.rng)
        batch = data[run.data_progress["batches"]]
        # Copies, because the update takes its arguments over.
        params, moments = update(*jax.tree.map(jax.numpy.copy, (run.params, run.optimizer)), batch, own)
        return TrainingState(
            params, moments, run.step + 1, key, data_progress={"batches": run.data_progress["batches"] + 1}
        )

    def begin() -> TrainingState:
        keys = jax.random.split(jax.random.key(0), 3)
        params = {"in": jax.random.normal(keys[0], (3, 5)), "out": jax.random.normal(keys[1], (5, 3))}
        return TrainingState(params, optimizer.init(params), 0, keys[2], data_progress={"batches": 0})

    run = begin()
    for _ in range(3):
        run = train(run)
    saved(run, tmp_path / "run")
    trees = ("params", "optimizer", "rng")
    params, moments, key = jax.eval_shape(lambda: (begin().params, begin().optimizer, begin().rng))
    like = TrainingState(params, moments, 0, key)
    back = restored(tmp_path / "run", like)
    assert (back.step, back.data_progress) == (3, {"batches": 3})

    def all_bits(of: TrainingState) -> dict[str, bytes]:
        return bits((of.params, of.optimizer, jax.random.key_data(of.rng)))

    assert all_bits(back) == all_bits(run)
    assert all_bits(train(back)) == all_bits(train(run))
    others = {
        "optimizer": optimizer.init(back.params),
        "rng": jax.random.key(1),
        "data_progress": {"batches": 0},
    }
    for part, other in others.items():
        fields = {name: getattr(back, name) for name in (*trees, "step", "data_progress")}
        wrong = train(TrainingState(**(fields | {part: other})))
        assert bits(wrong.params) != bits(train(run).params), part


class Pair(NamedTuple):
    weight: Any
    bias: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "bias"], meta_fields=["tag"])
@dataclasses.dataclass(frozen=True)
class Layer:
    weight: Any
    bias: Any
    tag: str = "dense"


class FrozenMapping(Mapping[str, Any]):
    """A mapping that is a pytree of its own, as flax and haiku have one."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


jax.tree_util.register_pytree_with_keys(
    FrozenMapping,
    lambda node: ([(jax.tree_util.DictKey(key), node[key]) for key in sorted(node)], tuple(sorted(node))),
    lambda keys, children: FrozenMapping(dict(zip(keys, children, strict=True))),
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Holder:
    """A node of a tree that answers as the array which it holds, as variables of flax do."""

    value: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


TREES: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda w, b: {"weight": w, "bias": b},
    "OrderedDict": lambda w, b: collections.OrderedDict(weight=w, bias=b),
    "defaultdict": lambda w, b: collections.defaultdict(list, weight=w, bias=b),
    "a mapping of its own": lambda w, b: FrozenMapping({"weight": w, "bias": b}),
    "below a mapping of its own": lambda w, b: FrozenMapping({"0": collections.defaultdict(list, weight=w, bias=b)}),
    "list": lambda w, b: [w, b],
    "tuple": lambda w, b: (w, (), {"none": None, "bias": b}),
    "named tuple": Pair,
    "dataclass": Layer,
    "numbers as keys": lambda w, b: {0: w, 1: b},
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "masked": lambda optax: optax.masked(optax.adamw(1e-2), lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)),
    "multi_transform": lambda optax: optax.multi_transform(
        {"a": optax.adam(1e-2, mu_dtype=jax.numpy.bfloat16), "b": optax.sgd(0.1, momentum=0.9)},
        lambda p: jax.tree.map(lambda leaf: "ab"[leaf.ndim % 2], p),
    ),
    "inject_hyperparams": lambda optax: optax.inject_hyperparams(optax.sgd)(learning_rate=1e-2),
    "MultiSteps": lambda optax: optax.MultiSteps(optax.sgd(1e-2), 2),
    "noise": lambda optax: optax.add_noise(0.1, 0.5, 0),
}


@pytest.mark.parametrize("tree", TREES)
def test_a_tree_comes_back_as_what_it_was_and_a_compiled_step_knows_it(tree: str, tmp_path: Path) -> None:
    traces: list[int] = []

    @jax.jit
    def step(params: Any) -> Any:
        traces.append(1)
        return params

    params = step(TREES[tree](jax.numpy.ones((3, 3)), jax.numpy.zeros(3)))
    saved(state(params=params), tmp_path / "run")
    for like in (params, jax.eval_shape(lambda: params)):
        back = restored(tmp_path / "run", TrainingState(like, zeros(state()).optimizer, 0, zeros(state()).rng)).params
        assert repr(jax.tree.structure(back)) == repr(jax.tree.structure(params))
        assert bits(step(back)) == bits(params)
    assert traces == [1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_by_bit_with_the_step_that_is_compiled(optimizer: str, tmp_path: Path) -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed: it is part of the extra dev")
    transform = OPTIMIZERS[optimizer](optax)
    traces: list[int] = []

    @jax.jit
    def step(params: Any, moments: Any) -> Any:
        traces.append(1)
        updates, moments = transform.update(jax.tree.map(lambda leaf: leaf / 3 + 1, params), moments, params)
        return optax.apply_updates(params, updates), moments

    @jax.jit
    def begin() -> Any:
        params = {"weight": jax.numpy.ones((3, 3)), "bias": jax.numpy.zeros(3)}
        return params, transform.init(params)

    run = begin()
    for _ in range(3):
        run = step(*run)
    saved(state(params=run[0], optimizer=run[1]), tmp_path / "run")
    expected = step(*run)
    n_traces = len(traces)
    for like in (run, begin(), jax.eval_shape(begin)):
        back = restored(tmp_path / "run", TrainingState(like[0], like[1], 0, zeros(state()).rng))
        assert repr(jax.tree.structure((back.params, back.optimizer))) == repr(jax.tree.structure(run))
        assert bits((back.params, back.optimizer)) == bits(run)
        assert bits(step(back.params, back.optimizer)) == bits(expected)
    assert bits(expected) != bits(run)
    assert len(traces) == n_traces


def test_a_restored_mapping_makes_what_is_missing_as_before(tmp_path: Path) -> None:
    params: Any = collections.defaultdict(list, w=np.ones(2, np.float32))
    saved(state(params=params), tmp_path / "run")
    like = zeros(state())
    fresh: Any = collections.defaultdict(list, w=np.zeros(2, np.float32))
    back = restored(tmp_path / "run", TrainingState(fresh, like.optimizer, 0, like.rng))
    assert back.params["another"] == []


def test_weak_types_are_as_they_were_saved_so_that_a_step_rounds_alike(tmp_path: Path) -> None:
    special = np.array([0x7FC00123, 0x80000000, 0x00000001, 0x3F8CCCCD], np.uint32).view(np.float32)
    weak = {
        "step": jax.numpy.asarray(3),
        "scale": jax.numpy.asarray(0.1),
        "some": jax.numpy.full(4, 0.0).at[...].set(special),
        "strong": jax.numpy.asarray(np.float32(0.1)),
    }
    weak["same"] = weak["some"]
    assert [leaf.weak_type for leaf in weak.values()] == [True, True, True, False, True]
    saved(state(optimizer=weak), tmp_path / "run")
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    kind = max(memory.kind for memory in jax.devices()[0].addressable_memories())  # not the default, if there are two
    places = {name: NamedSharding(mesh, P(*"x"[: leaf.ndim]), memory_kind=kind) for name, leaf in weak.items()}
    placed = {name: jax.device_put(leaf, places[name]) for name, leaf in weak.items()}
    # Whatever the types of what it is told to be like: at first they may be others.
    for like in (weak, jax.eval_shape(lambda: weak), jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), weak), placed):
        numpy = zeros(state())
        back = restored(tmp_path / "run", TrainingState(numpy.params, like, 0, numpy.rng)).optimizer
        assert {name: leaf.weak_type for name, leaf in back.items()} == {n: leaf.weak_type for n, leaf in weak.items()}
        assert bits(back) == bits(weak)
        assert back["same"] is back["some"]
        assert back["some"].sharding == (placed if like is placed else weak)["some"].sharding
        if like is placed:
            continue
        half = jax.numpy.ones(3, jax.numpy.bfloat16)
        assert (back["scale"] * half).dtype == half.dtype
        assert (back["strong"] * half).dtype == np.float32
    in_place = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in weak.items()}
    in_place["same"] = in_place["some"]
    numpy = zeros(state())
    restored(tmp_path / "run", TrainingState(numpy.params, in_place, 0, numpy.rng))
    assert bits(in_place) == bits(weak)


def test_a_bool_that_comes_of_comparing_a_weak_type_is_restored_with_its_own(tmp_path: Path) -> None:
    losses = jax.numpy.full((3,), 2.0)
    params = {"finite": jax.numpy.isfinite(losses.sum()), "above": losses.at[1].set(0.5) > 1, "loss": losses}
    assert [leaf.weak_type for leaf in params.values()] == [False, True, True]
    saved(TrainingState(params, (), 3, np.zeros(2, np.uint32)), tmp_path / "run")
    like = TrainingState(jax.eval_shape(lambda: params), (), 0, np.zeros(2, np.uint32))
    back = restored(tmp_path / "run", like).params
    for name, leaf in params.items():
        assert (back[name].dtype, back[name].weak_type) == (leaf.dtype, leaf.weak_type)
    assert back["above"].tolist() == [True, False, True]
    assert bits(back) == bits(params)


def test_a_number_of_python_stands_for_an_array_where_it_is_restored(tmp_path: Path) -> None:
    # As in the state that flax begins with, of which a compiled step makes an array.
    saved(state(optimizer={"step": jax.numpy.asarray(3), "on": jax.numpy.asarray(True)}), tmp_path / "run")
    like = zeros(state())
    back = restored(tmp_path / "run", TrainingState(like.params, {"step": 0, "on": False}, 0, like.rng))
    assert (int(back.optimizer["step"]), back.optimizer["step"].weak_type) == (3, True)
    assert back.optimizer["on"].dtype == np.bool_
    with pytest.raises(ConfigError, match="optimizer/step: expected an array, or what describes one, found str"):
        restored(tmp_path / "run", TrainingState(like.params, {"step": "0"}, 0, like.rng))


def test_what_jax_was_free_to_place_is_so_again(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, P("x"))
    weights = jax.device_put(jax.numpy.ones((8, 2)), rows)
    # As `init` of optax makes it: the moments are where the parameters are, and the count is nowhere in particular.
    like = {"count": jax.numpy.zeros((), np.int32), "mu": jax.numpy.zeros_like(weights)}
    numpy = zeros(state())
    saved(state(params={"w": weights}, optimizer=like), tmp_path / "run")
    back = restored(tmp_path / "run", TrainingState({"w": weights}, like, 0, numpy.rng))
    assert back.params["w"].sharding == back.optimizer["mu"].sharding == rows
    moved = jax.jit(lambda w, s: w + s["mu"] + s["count"])(back.params["w"], back.optimizer)
    assert np.asarray(moved).tolist() == [[1, 1]] * 8


RESUME = """
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from safeload.resuming import TrainingState, restore_training
from safeload.trust.keys import PublicKey

mesh = Mesh(np.array(jax.devices()), ("x",))
like = jax.eval_shape(lambda: ({"w": jax.numpy.ones((8, 2))}, {"n": 0, "w": 0.0 * jax.numpy.full(8, 1.0)}))
keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))

def on(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(*"x"[: leaf.ndim])))

params, optimizer = jax.tree.map(on, like)
state = TrainingState(params, optimizer, 0, on(keys))
back = restore_training(ARGUMENTS["directory"], state, trust=PublicKey.from_pem(ARGUMENTS["key"].encode()))
leaves = [back.params["w"], back.optimizer["n"], back.optimizer["w"], jax.random.key_data(back.rng)]
answer([
    [[leaf.weak_type, leaf.is_fully_addressable] for leaf in leaves],
    [np.asarray(leaf.addressable_shards[0].data).tolist() for leaf in leaves],
    back.rng.sharding == state.rng.sharding,
])
"""


@pytest.mark.slow
def test_several_processes_take_up_one_state_between_them(tmp_path: Path) -> None:
    params = {"w": jax.numpy.arange(16, dtype=np.float32).reshape(8, 2)}
    optimizer = {"n": jax.numpy.asarray(3), "w": jax.numpy.full(8, 0.0).at[...].set(np.arange(8, dtype=np.float32))}
    keys = jax.random.split(jax.random.key(4), 8)
    saved(TrainingState(params, optimizer, 3, keys), tmp_path / "run")
    argument = {"directory": str(tmp_path / "run"), "key": KEY.public.to_pem().decode()}
    words = np.asarray(jax.random.key_data(keys))
    for process, ended in enumerate(run_processes(RESUME, [argument, argument])):
        assert ended.code == 0, ended.output
        facts, values, is_placed = ended.answer
        row = 4 * process
        assert facts == [[False, False], [True, False], [True, False], [False, False]]
        assert values == [[[2 * row, 2 * row + 1]], 3, [row], [words[row].tolist()]]
        assert is_placed


def test_arrays_that_were_one_at_first_are_no_tie(tmp_path: Path) -> None:
    # As of optimizers that remember where the parameters began.
    begun = jax.numpy.zeros(3)
    saved(state(params={"w": begun + 1}, optimizer={"begun": begun, "sum": begun + 2}), tmp_path / "run")
    numpy = zeros(state())
    like = TrainingState({"w": begun}, {"begun": begun, "sum": begun}, 0, numpy.rng)
    back = restored(tmp_path / "run", like)
    assert np.asarray(back.params["w"]).tolist() == [1, 1, 1]
    assert np.asarray(back.optimizer["begun"]).tolist() == [0, 0, 0]
    assert np.asarray(back.optimizer["sum"]).tolist() == [2, 2, 2]


# ---------------------------------------------------------------- what is saved


def test_a_state_comes_back_bit_by_bit_in_place_and_with_its_ties(tmp_path: Path) -> None:
    progress = {
        "epoch": 2,
        "files": ["a", "b\N{SNOWMAN}"],
        "rate": 0.1,
        "least": 5e-324,
        "endless": float("inf"),
        "sampler": np.random.default_rng(3).bit_generator.state,
        "none": None,
        "on": True,
    }
    manifest = saved(state(schedule={"plateau": [1, -0.0]}, data_progress=progress), tmp_path / "run")
    like = zeros(state())
    back = restored(tmp_path / "run", like)
    assert manifest == tmp_path / "run" / "manifest.json"
    for part in ("params", "optimizer", "rng"):
        assert bits(getattr(back, part)) == bits(getattr(state(), part)), part
    assert back.params["norm"] is like.params["norm"]
    assert back.params["embedding"] is back.params["head"]
    assert back.step == 3
    assert repr(back.schedule) == "{'plateau': [1, -0.0]}"
    assert back.data_progress == progress
    assert type(back.data_progress["on"]) is bool


def test_each_part_is_a_file_of_its_role_in_a_checkpoint_of_kind_training(tmp_path: Path) -> None:
    manifest = saved(state(schedule={}, data_progress=[]), tmp_path / "run")
    trusted, _ = load_host(tmp_path / "run", manifest=manifest, trust=KEY.public, purpose="training")
    assert trusted.manifest.kind == "training"
    assert {file.path: file.role for file in trusted.manifest.files} == {
        "model.safetensors": "weights",
        "optimizer.safetensors": "optimizer",
        "rng.safetensors": "rng",
        "step.json": "step",
        "schedule.json": "schedule",
        "data_progress.json": "data-progress",
    }
    assert set(trusted.manifest.requires) == {"weights", "optimizer", "step", "rng"}


def test_ties_of_descriptions_come_from_the_checkpoint(tmp_path: Path) -> None:
    saved(state(), tmp_path / "run")
    params, moments, keys = jax.eval_shape(lambda: (state().params, state().optimizer, state().rng))
    back = restored(tmp_path / "run", TrainingState(params, moments, 0, keys))
    assert back.params["embedding"] is back.params["head"]
    assert bits(back.params) == bits(state().params)


def test_typed_keys_come_back_with_their_generator(tmp_path: Path) -> None:
    keys = {"a": jax.random.key(3, impl="rbg"), "b": jax.random.split(jax.random.key(4), 2)}
    saved(state(rng=keys), tmp_path / "run")
    back = restored(tmp_path / "run", state(rng=jax.eval_shape(lambda: keys)))
    for name, key in keys.items():
        assert back.rng[name].dtype == key.dtype
        assert jax.random.key_data(back.rng[name]).tolist() == jax.random.key_data(key).tolist()
    with pytest.raises(ShardingError, match="typed keys"):
        restored(tmp_path / "run", state(rng={"a": np.zeros(4, np.uint32), "b": np.zeros((2, 2), np.uint32)}))
    other = {"a": jax.random.key(3, impl="unsafe_rbg"), "b": keys["b"]}
    with pytest.raises(ShardingError, match="another generator"):
        restored(tmp_path / "run", state(rng=other))


def test_keys_of_a_generator_without_a_name_are_refused_when_they_are_saved(tmp_path: Path) -> None:
    from jax.extend.random import define_prng_impl

    def never(*_: Any) -> Any:
        return jax.numpy.zeros(5, np.uint32)

    own: Any = define_prng_impl(
        key_shape=(5,), seed=never, split=never, random_bits=never, fold_in=never, name="own", tag="own"
    )
    with pytest.raises(ConfigError, match="rng: expected keys of threefry2x32, rbg, unsafe_rbg, found key<own>"):
        saved(state(rng=jax.random.key(0, impl=own)), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_typed_keys_come_back_to_their_devices(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    each = jax.random.split(jax.random.key(4), 8)
    keys = {
        "rows": jax.device_put(each, NamedSharding(mesh, P("x"))),
        "all": jax.device_put(each, NamedSharding(mesh, P())),
        "one": jax.device_put(each, jax.devices()[3]),
        "free": each,
    }
    saved(state(rng=keys), tmp_path / "run")
    back = restored(tmp_path / "run", state(rng=keys))
    for name, key in keys.items():
        assert (back.rng[name].sharding, back.rng[name].committed) == (key.sharding, key.committed), name
        assert jax.random.key_data(back.rng[name]).tolist() == jax.random.key_data(key).tolist()


def test_an_optimizer_without_arrays_still_has_its_role(tmp_path: Path) -> None:
    saved(state(optimizer=((), None)), tmp_path / "run")
    back = restored(tmp_path / "run", state(optimizer=((), None)))
    assert back.optimizer == ((), None)


def test_a_later_state_takes_the_place_of_an_earlier_one_and_the_history_minds(tmp_path: Path) -> None:
    saved(state(), tmp_path / "run", version=1)
    with pytest.raises(ConfigError, match="replace=True"):
        saved(state(step=4), tmp_path / "run", version=2)
    saved(state(), tmp_path / "old", version=1)
    saved(state(step=4), tmp_path / "run", version=2, replace=True)
    history = tmp_path / "history.json"
    assert restored(tmp_path / "run", zeros(state()), history=history).step == 4
    with pytest.raises(RollbackError):
        restored(tmp_path / "old", zeros(state()), history=history)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"step": np.int64(3)}, "step"),
        ({"params": {}}, "params"),
        ({"params": {"a": 1.0}}, "expected arrays"),
        ({"params": {"a": np.zeros(2, ml_dtypes.int4)}}, "safetensors has no dtype int4"),
        ({"schedule": {"a": np.zeros(1)}}, "schedule"),
        ({"schedule": {"a": np.float32(1)}}, "schedule"),
        ({"data_progress": {1: 2}}, "data_progress"),
        ({"data_progress": {"$float": 2}}, "data_progress"),
        ({"data_progress": (1, 2)}, "data_progress"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_nothing_is_left(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        saved(state(**changes), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "progress", ["\ud800", {"\ud800": 1}, "x" * (16 << 20), {str(n): n for n in range(20_000)}], ids=range(4)
)
def test_what_no_restore_could_read_is_refused_when_it_is_saved(progress: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data_progress\.json: it could not be restored"):
        saved(state(data_progress=progress), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_what_other_processes_hold_parts_of_is_refused(tmp_path: Path) -> None:
    part = SimpleNamespace(dtype=np.dtype(np.float32), shape=(2,), is_fully_addressable=False)
    with pytest.raises(ConfigError, match="params/w: other processes hold parts of it; gather it first"):
        saved(state(params={"w": part}), tmp_path / "run")


def test_data_that_hold_themselves_are_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="hold itself"):
        saved(state(data_progress=endless), tmp_path / "run")


def test_other_kinds_purposes_and_no_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind"):
        saved(state(), tmp_path / "run", kind="inference")
    with pytest.raises(ConfigError, match="keys"):
        save_training(state(), tmp_path / "run", keys=[], model="tiny", revision="1")
    with pytest.raises(ManifestError, match="tokenizer"):
        saved(state(), tmp_path / "run", require=["tokenizer"])
    saved(state(), tmp_path / "run")
    with pytest.raises(ConfigError, match="purpose"):
        restored(tmp_path / "run", zeros(state()), purpose="inference")


def test_a_checkpoint_for_inference_is_none_to_resume_from(tmp_path: Path) -> None:
    save(state().params, tmp_path / "m", layout="safetensors", keys=[KEY], model="tiny", revision="1")
    with pytest.raises(PolicyError) as caught:
        restored(tmp_path / "m", zeros(state()))
    assert {finding.code for finding in caught.value.findings} == {"role-missing"}
    assert len(caught.value.findings) == 3


def resigned(directory: Path, file: str, text: str) -> Path:
    """Replace a file of a state by another, and sign that."""
    (directory / file).write_text(text, encoding="utf-8")
    (directory / "manifest.json").unlink()
    manifest = directory.parent / "resigned.json"
    manifest.write_bytes(sign(directory, keys=[KEY], model="tiny", revision="1", kind="training"))
    return manifest


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("step.json", "{}"),
        ("step.json", '{"schema": 2, "step": 3}'),
        ("step.json", '{"schema": 1, "step": true}'),
        ("step.json", '{"schema": 1, "step": -1}'),
        ("step.json", '{"schema": 1, "step": 3, "more": 1}'),
        ("step.json", '{"schema": 1, "step": 3, "ties": [["params/head"]]}'),
        ("step.json", '{"schema": 1, "step": 3, "weak": "params/head"}'),
        ("step.json", '{"schema": 1, "step": 3, "weak": ["params/norm", "params/norm"]}'),
        ("step.json", '{"schema": 1, "step": 3, "ties": [["params/head", "params/head"]]}'),
        ("step.json", '{"schema": 1, "step": 3, "ties": [["params/head", "params/embedding"], ["params/head", "a"]]}'),
        ("schedule.json", '{"a": {"$float": "x"}}'),
        ("schedule.json", '{"a": {"$float": "0x1p99999"}}'),
        ("schedule.json", '{"a": {"$int": 1}}'),
        ("schedule.json", '{"a": 0.5}'),
    ],
)
def test_a_signed_state_that_says_something_else_is_refused(file: str, text: str, tmp_path: Path) -> None:
    saved(state(schedule={}), tmp_path / "run")
    manifest = resigned(tmp_path / "run", file, text)
    with pytest.raises(FormatError) as caught:
        restored(tmp_path / "run", zeros(state()), manifest=manifest)
    assert [(finding.code, finding.file) for finding in caught.value.findings] == [("bad-training-state", file)]


@pytest.mark.parametrize("ties", [[["params/head", "params/none"]], [["params/norm", "params/embedding"]]])
def test_ties_of_what_is_no_parameter_or_another_shape_are_refused(ties: Any, tmp_path: Path) -> None:
    saved(state(), tmp_path / "run")
    text = json.dumps({"schema": 1, "step": 3, "ties": ties})
    with pytest.raises(ShardingError, match="tied"):
        restored(tmp_path / "run", zeros(state()), manifest=resigned(tmp_path / "run", "step.json", text))


def test_weak_types_of_what_is_no_leaf_or_that_jax_has_none_of_are_refused(tmp_path: Path) -> None:
    described = jax.eval_shape(lambda: {"a": jax.numpy.zeros(2), "b": jax.numpy.zeros(2, jax.numpy.bfloat16)})
    params = {"a": np.zeros(2, np.float32), "b": np.zeros(2, ml_dtypes.bfloat16)}
    like = TrainingState(described, (), 0, np.zeros(2, np.uint32))
    for weak, told in ((["params/c"], "weak types: .* found params/c"), (["params/b"], "params/b: .*weak type")):
        directory = tmp_path / weak[0].rpartition("/")[2]
        directory.mkdir()
        saved(TrainingState(params, (), 3, np.zeros(2, np.uint32)), directory / "run")
        text = json.dumps({"schema": 1, "step": 3, "weak": weak})
        with pytest.raises(ShardingError, match=told):
            restored(directory / "run", like, manifest=resigned(directory / "run", "step.json", text))


def test_what_only_holds_an_array_is_refused_and_not_put_in_its_place(tmp_path: Path) -> None:
    def of(leaf: Any) -> TrainingState:
        return state(params={"w": leaf}, optimizer=(), rng=())

    saved(of(jax.numpy.ones(2)), tmp_path / "run")
    for attempt in (
        lambda: saved(of(Holder(jax.numpy.ones(2))), tmp_path / "other"),
        lambda: restored(tmp_path / "run", of(Holder(jax.numpy.ones(2)))),
    ):
        with pytest.raises(ConfigError, match="params/w: expected an array, found Holder, which only holds one"):
            attempt()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_changed_byte_in_any_file_is_refused_and_nothing_is_left_of_the_rest(tmp_path: Path) -> None:
    manifest = saved(state(schedule={}), tmp_path / "run").read_bytes()
    (tmp_path / "run" / "manifest.json").unlink()
    for path in sorted((tmp_path / "run").iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        like = zeros(state())
        with pytest.raises(DigestMismatchError):
            restored(tmp_path / "run", like, manifest=manifest)
        assert not any(np.asarray(leaf).any() for leaf in named_leaves(like.params).values())
        path.write_bytes(whole)


def test_a_key_of_another_generator_is_told_before_anything_is_written(tmp_path: Path) -> None:
    # Both have keys of four words, so that no shape tells one from the other.
    saved(state(rng=jax.random.key(0, impl="rbg")), tmp_path / "run")
    like = zeros(state())
    with pytest.raises(ShardingError, match="another generator"):
        restored(tmp_path / "run", TrainingState(like.params, like.optimizer, 0, jax.random.key(0, impl="unsafe_rbg")))
    assert not any(np.asarray(leaf).any() for leaf in named_leaves(like.params).values())
    assert any(np.asarray(leaf).any() for leaf in named_leaves(state().params).values())


def test_ties_are_refused_where_the_target_has_two_arrays(tmp_path: Path) -> None:
    shared = np.ones(2, np.float32)
    saved(state(params={"a": shared, "b": shared}), tmp_path / "run")
    like = zeros(state())
    params = {name: np.zeros(2, np.float32) for name in "ab"}
    with pytest.raises(ShardingError, match="tied: params/a, params/b are one in the checkpoint"):
        restored(tmp_path / "run", TrainingState(params, like.optimizer, 0, like.rng))
    assert not params["a"].any()


def test_an_empty_key_is_a_level_of_the_tree(tmp_path: Path) -> None:
    saved(state(params={"": np.ones(2, np.float32)}), tmp_path / "run")
    like = zeros(state())
    found = restored(tmp_path / "run", TrainingState({"": np.zeros(2, np.float32)}, like.optimizer, 0, like.rng))
    assert found.params[""].tolist() == [1, 1]


def test_a_state_of_another_structure_is_told_before_anything_is_written(tmp_path: Path) -> None:
    saved(state(), tmp_path / "run")
    like = zeros(state())
    with pytest.raises(ShardingError, match=r"missing optimizer/nu: float32 \(3,\); unexpected optimizer/0"):
        restored(tmp_path / "run", TrainingState(like.params, {"nu": np.zeros(3, np.float32)}, 0, like.rng))


def test_what_is_read_back_to_be_signed_must_be_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tampering(directory: Path, **options: Any) -> Any:
        (directory / "step.json").write_text('{"schema": 1, "step": 9}', encoding="utf-8")
        return describe(directory, **options)

    monkeypatch.setattr(resuming, "describe", tampering)
    with pytest.raises(DigestMismatchError) as caught:
        saved(state(), tmp_path / "run")
    assert [finding.file for finding in caught.value.findings] == ["step.json"]
    assert not (tmp_path / "run").exists()


def test_the_weights_of_a_run_load_as_any_others_do(tmp_path: Path) -> None:
    manifest = saved(state(), tmp_path / "run")
    tree = safeload.load(tmp_path / "run", manifest=manifest, trust=KEY.public)
    assert sorted(tree["model.safetensors"]) == ["params/embedding", "params/norm"]
