import pickle
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import safeload
from safeload.errors import ConfigError, ShardingError
from safeload.formats.pickles.writing import pickle_shard
from safeload.formats.safetensors_writing import write_safetensors
from safeload.loading import load_host
from safeload.publishing import sign
from safeload.saving import save
from safeload.ties import Tie, tie, ties, tree_ties
from safeload.trust.keys import SecretKey

KEY = SecretKey.generate("ed25519")


def signed(directory: Path) -> bytes:
    return sign(directory, keys=[KEY], model="tied", revision="1")


def listed(directory: Path, manifest: bytes | Path) -> tuple[Tie, ...]:
    trusted, _ = load_host(directory, manifest=manifest, trust=KEY.public)
    return ties(trusted)


def tied_pickle(directory: Path) -> bytes:
    """A pickle in which two names are one array, and a third has equal values."""
    directory.mkdir()
    shared = np.arange(6, dtype=np.float32).reshape(2, 3)
    tree = {"embedding": shared, "head": shared, "copy": shared.copy(), "other": shared + 1}
    (directory / "model.pkl").write_bytes(pickle.dumps(tree, protocol=4))
    return signed(directory)


def test_shared_storage_is_told_from_equal_values(tmp_path: Path) -> None:
    envelope = tied_pickle(tmp_path / "m")
    storage, equal = listed(tmp_path / "m", envelope)
    assert storage == Tie("storage", ("embedding", "head"))
    assert equal == Tie("values", ("embedding", "head", "copy"))


def test_equal_bits_of_another_dtype_or_shape_are_no_equal_values(tmp_path: Path) -> None:
    zeros: dict[str, Any] = {
        "f": np.zeros(4, np.float32),
        "i": np.zeros(4, np.int32),
        "square": np.zeros((2, 2), np.float32),
        "none": np.zeros(0, np.float32),
        "none too": np.zeros(0, np.float32),
    }
    save(zeros, tmp_path / "m", layout="safetensors", keys=[KEY], model="z", revision="1")
    assert listed(tmp_path / "m", tmp_path / "m" / "manifest.json") == ()


def test_what_is_tied_over_several_files_is_equal_in_values(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for name in ("a", "b"):
        with (tmp_path / "m" / f"{name}.safetensors").open("wb") as file:
            write_safetensors(file, {name: np.ones(3, np.float32)})
    assert listed(tmp_path / "m", signed(tmp_path / "m")) == (Tie("values", ("a", "b")),)


def test_load_keeps_what_the_file_ties_as_one_array(tmp_path: Path) -> None:
    envelope = tied_pickle(tmp_path / "m")
    tree = safeload.load(tmp_path / "m", manifest=envelope, trust=KEY.public)["model.pkl"]
    assert tree["embedding"] is tree["head"]
    assert tree["copy"] is not tree["head"]
    assert tree_ties(tree) == (Tie("parameter", ("embedding", "head")),)
    _, verified = load_host(tmp_path / "m", manifest=envelope, trust=KEY.public)
    host = verified["model.pkl"]
    assert tree_ties(host) == (Tie("storage", ("embedding", "head")),)
    assert tie(host, [("copy", "head")])["head"] is host["copy"]
    with pytest.raises(ShardingError):
        tie(host, [("other", "head")])


def test_tie_makes_one_object_of_equal_arrays_on_devices(tmp_path: Path) -> None:
    envelope = tied_pickle(tmp_path / "m")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tree = safeload.load(tmp_path / "m", manifest=envelope, trust=KEY.public, shardings=place)["model.pkl"]
    storage, _ = listed(tmp_path / "m", envelope)
    result = tie(tree, [storage])
    assert result["head"] is result["embedding"]
    assert result["copy"] is tree["copy"]
    assert Tie("parameter", ("embedding", "head")) in tree_ties(result)


def test_a_tree_tells_one_object_from_two_on_one_memory() -> None:
    shared = np.zeros(3, np.float32)
    tree = {"x": (shared, shared), "view": shared[:], "half": shared[:2], "equal": shared.copy()}
    assert tree_ties(tree) == (
        Tie("parameter", ("x/0", "x/1")),
        Tie("storage", ("x/0", "x/1", "view")),
    )


def test_only_one_parameter_survives_an_update() -> None:
    shared = np.ones(2, np.float32)
    tree = {"a": shared, "b": shared[:]}
    stepped = jax.tree.map(lambda leaf: leaf - 1, tree)
    assert tree_ties(tree) == (Tie("storage", ("a", "b")),)
    assert tree_ties(stepped) == ()


def test_tie_refuses_what_is_not_equal_bit_by_bit() -> None:
    nan = np.array([np.nan, 0.0], np.float32)
    for other, is_equal in ((nan.copy(), True), (np.array([np.nan, -0.0], np.float32), False)):
        tree = {"a": nan, "b": other}
        if is_equal:
            assert tie(tree, [("a", "b")])["b"] is nan
        else:
            with pytest.raises(ShardingError, match="b is not equal to a"):
                tie(tree, [("a", "b")])
    unequal: list[Any] = [np.zeros(2, np.int32), np.zeros((1, 2), np.float32)]
    for leaf in unequal:
        with pytest.raises(ShardingError, match="not equal"):
            tie({"a": np.zeros(2, np.float32), "b": leaf}, [("a", "b")])


def test_tie_refuses_names_that_are_none_and_groups_that_meet() -> None:
    tree = {name: np.zeros(2, np.float32) for name in "abc"}
    with pytest.raises(ShardingError, match="expected a leaf of the tree, found d"):
        tie(tree, [("a", "d")])
    with pytest.raises(ShardingError, match="b is in two groups"):
        tie(tree, [("a", "b"), ("c", "b")])
    with pytest.raises(ConfigError):
        tie({"a": 1}, [])


def test_what_has_no_elements_is_tied_to_nothing_in_memory_either() -> None:
    memory = np.zeros(3, np.float32)
    assert tree_ties({"a": memory[:0], "b": memory[:0]}) == ()


@pytest.mark.parametrize("make", [lambda: jax.ShapeDtypeStruct((2,), np.float32), lambda: jax.random.key(0)])
def test_tie_refuses_what_cannot_be_compared(make: Any) -> None:
    with pytest.raises(ConfigError, match="elements to compare, found b"):
        tie({"a": make(), "b": make()}, [("a", "b")])


def test_bound_shards_are_named_by_their_parameters(tmp_path: Path) -> None:
    (tmp_path / "m" / "ckpt-0").mkdir(parents=True)
    for index in range(2):
        shard = b"".join(pickle_shard(np.ones(2, ml_dtypes.bfloat16)))
        (tmp_path / "m" / "ckpt-0" / f"tensor0000{index}_000").write_bytes(shard)
    names = {f"ckpt-0/tensor0000{index}_000": name for index, name in enumerate(("in", "out"))}
    envelope = sign(tmp_path / "m", keys=[KEY], model="tied", revision="1", parameters=names)
    assert listed(tmp_path / "m", envelope) == (Tie("values", ("in", "out")),)


def test_ties_of_torch_are_told_and_made() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: `pip install torch` runs this test")
    one = torch.ones(2, dtype=torch.bfloat16)
    state = {"a": one, "b": one, "c": one.detach(), "d": one.clone(), "meta": torch.ones(2, device="meta")}
    state["meta too"] = torch.ones(2, device="meta")
    assert tree_ties(state) == (Tie("parameter", ("a", "b")), Tie("storage", ("a", "b", "c")))
    assert tie(state, [("a", "d")])["d"] is one
    with pytest.raises(ShardingError):
        tie({"a": one, "d": one + 1}, [("a", "d")])
    with pytest.raises(ConfigError, match="elements to compare"):
        tie(state, [("meta", "meta too")])
    sparse = torch.eye(2).to_sparse()
    assert tree_ties({"a": sparse, "b": torch.eye(2).to_sparse()}) == ()
    assert tree_ties({"a": torch.ones(0), "b": torch.ones(0)}) == ()
