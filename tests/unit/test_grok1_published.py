"""The smaller functions of the published `checkpoint.py`: as the originals on good input, and what they refuse."""

import collections
import dataclasses
import inspect
import logging
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from safeload import grok1
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FileSetError,
    PolicyError,
    SignatureError,
    StagingError,
)
from safeload.grok1 import (
    copy_from_shm,
    copy_to_shm,
    enable_compilation_cache,
    fast_pickle,
    fast_unpickle,
    get_load_path_str,
    load_tensors,
    name_shards,
    path_tuple_to_string,
    replace_with_load_state,
    shard_table,
)
from safeload.publishing import sign
from safeload.records import QuantizedWeight8bit, Record
from safeload.trust.keys import SecretKey
from tests.grok_sample import TINY, sample_value, write_blocks, write_checkpoint

KEY = SecretKey.generate("ed25519")
TABLE = shard_table(TINY)
NORM, GATE = 1, 2
Quantized: Any = QuantizedWeight8bit


def signed(directory: Path) -> bytes:
    return sign(directory, keys=[KEY], model="tiny", revision="1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grok")
    write_checkpoint(folder / "ckpt-0")
    return folder


@pytest.fixture(scope="module")
def manifest(checkpoint: Path) -> bytes:
    return signed(checkpoint)


# --- signatures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("copy_to_shm", "file"),
        ("copy_from_shm", "file"),
        ("fast_unpickle", "path"),
        ("fast_pickle", "obj, path"),
        ("load_tensors", "shaped_arrays, directory, mesh_config, tensor_indices=None"),
        ("path_tuple_to_string", "path"),
        ("get_load_path_str", "init_path_str, load_rename_rules=None, load_exclude_rules=None"),
        (
            "replace_with_load_state",
            "init_state, load_state, load_rename_rules=None, load_exclude_rules=None, mesh_config=(1, 1)",
        ),
        (
            "restore",
            "checkpoint_path, state_shapes, mesh, between_hosts_config, params_only, state_sharding, init_state=None",
        ),
    ],
)
def test_arguments_are_the_published_ones_and_all_more_are_by_keyword(name: str, published: str) -> None:
    parameters = inspect.signature(getattr(grok1, name)).parameters.values()
    positional = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    plain = [p.name if p.default is inspect.Parameter.empty else f"{p.name}={p.default}" for p in positional]
    assert ", ".join(plain) == published


# --- fast_unpickle and fast_pickle --------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [NORM, GATE])
def test_a_file_is_read_as_pickle_would_read_it(checkpoint: Path, manifest: bytes, index: int) -> None:
    expected = sample_value(TABLE[index])
    made = fast_unpickle(str(checkpoint / "ckpt-0" / TABLE[index].file), manifest=manifest, trust=KEY.public)
    if isinstance(expected, Record):
        assert type(made) is QuantizedWeight8bit
        pairs = list(zip(dict(made.items()).values(), dict(expected.items()).values(), strict=True))
    else:
        pairs = [(made, expected)]
    for array, values in pairs:
        assert (array.dtype, array.shape, array.tobytes()) == (values.dtype, values.shape, values.tobytes())


def test_a_file_may_lie_in_the_signed_directory_itself(checkpoint: Path) -> None:
    folder = checkpoint / "ckpt-0"
    made = fast_unpickle(folder / TABLE[NORM].file, manifest=signed(folder), trust=KEY.public)
    np.testing.assert_array_equal(made, sample_value(TABLE[NORM]))


def test_plain_containers_are_read_with_the_users_class(tmp_path: Path) -> None:
    class Mine(NamedTuple):
        weight: Any
        scales: Any

    (tmp_path / "c").mkdir()
    weight = sample_value(TABLE[GATE])
    fast_pickle(weight, tmp_path / "c" / "weight")
    value = {"a": [np.ones(2, np.float32), 3], "b": (None, "text")}
    (tmp_path / "c" / "plain").write_bytes(pickle.dumps(value, 4))
    envelope = signed(tmp_path / "c")
    made = fast_unpickle(tmp_path / "c" / "weight", manifest=envelope, trust=KEY.public, quantized_class=Mine)
    assert type(made) is Mine
    plain = fast_unpickle(tmp_path / "c" / "plain", manifest=envelope, trust=KEY.public, quantized_class=Mine)
    assert (plain["a"][1], plain["b"]) == (3, (None, "text"))
    np.testing.assert_array_equal(plain["a"][0], np.ones(2))


def test_only_the_file_that_is_asked_for_is_read(checkpoint: Path, manifest: bytes, tmp_path: Path) -> None:
    # Another file of the right length is not the one that was signed; nobody asks for it.
    for path in (checkpoint / "ckpt-0").iterdir():
        target = tmp_path / "ckpt-0" / path.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes() if path.name == TABLE[NORM].file else bytes(path.stat().st_size))
    folder = tmp_path / "ckpt-0"
    made = fast_unpickle(folder / TABLE[NORM].file, manifest=manifest, trust=KEY.public)
    np.testing.assert_array_equal(made, sample_value(TABLE[NORM]))
    with pytest.raises(DigestMismatchError):
        fast_unpickle(folder / TABLE[GATE].file, manifest=manifest, trust=KEY.public)


def test_a_file_that_the_manifest_does_not_list_is_refused(checkpoint: Path, manifest: bytes) -> None:
    with pytest.raises(FileSetError) as caught:
        fast_unpickle(checkpoint / "ckpt-0" / "other", manifest=manifest, trust=KEY.public)
    assert [(f.code, f.file) for f in caught.value.findings] == [("unlisted-file", "ckpt-0/other")]


def test_a_file_that_nobody_signed_or_that_is_no_pickle_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "ckpt-0" / TABLE[NORM].file
    stranger = SecretKey.generate("ed25519")
    with pytest.raises(SignatureError):
        fast_unpickle(file, manifest=signed(checkpoint), trust=stranger.public)
    (tmp_path / "c").mkdir()
    fast_pickle(np.ones(2), tmp_path / "c" / "x")
    (tmp_path / "c" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no file of tensors"):
        fast_unpickle(tmp_path / "c" / "config.json", manifest=signed(tmp_path / "c"), trust=KEY.public)


def test_the_policy_decides_what_a_signed_file_may_hold(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    fast_pickle(np.ones(2, np.float64), tmp_path / "c" / "tensor00000_000")
    with pytest.raises(PolicyError) as caught:
        fast_unpickle(
            tmp_path / "c" / "tensor00000_000", manifest=signed(tmp_path / "c"), trust=KEY.public, policy="grok-1"
        )
    assert [finding.code for finding in caught.value.findings] == ["shard-dtype"]


@dataclasses.dataclass
class Like:
    weight: Any
    scales: Any


Like.__name__ = "QuantizedWeight8bit"


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.float32(3),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.ones(40_000, ml_dtypes.bfloat16),
    ],
)
def test_an_array_is_written_so_that_pickle_reads_it(tmp_path: Path, value: Any) -> None:
    fast_pickle(value, str(tmp_path / "file"))
    made = pickle.loads((tmp_path / "file").read_bytes())
    assert made.dtype == np.asarray(value).dtype.newbyteorder("<")
    np.testing.assert_array_equal(made, value)


def test_jax_arrays_and_quantized_weights_of_any_class_are_written(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    fast_pickle(jax.numpy.arange(3), tmp_path / "c" / "jax")
    fast_pickle(Like(jax.numpy.ones((2, 2), "int8"), np.ones((1, 2), np.float32)), tmp_path / "c" / "weight")
    envelope = signed(tmp_path / "c")
    assert fast_unpickle(tmp_path / "c" / "jax", manifest=envelope, trust=KEY.public).tolist() == [0, 1, 2]
    made = fast_unpickle(tmp_path / "c" / "weight", manifest=envelope, trust=KEY.public)
    assert type(made) is QuantizedWeight8bit
    assert [path.name for path in sorted((tmp_path / "c").iterdir())] == ["jax", "weight"]


@pytest.mark.parametrize("value", [print, {"a": 1}, "text", None, np.array([object()])])
def test_nothing_else_is_written(tmp_path: Path, value: Any) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(ConfigError):
        fast_pickle(value, tmp_path / "file")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr("safeload.grok1.published.write_shard", full)
    with pytest.raises(StagingError, match="No space left"):
        fast_pickle(np.ones(3), tmp_path / "file")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]
    for place in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(StagingError):
            fast_pickle(np.ones(3), place)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(StagingError, match="no regular file"):
        fast_pickle(np.ones(3), tmp_path / "link")


def test_no_copy_passes_through_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()  # noqa: PTH208, S108
    with copy_to_shm(str(tmp_path / "file")) as path:
        assert Path(path).read_bytes() == b"old"
    with copy_from_shm(str(tmp_path / "file")) as path:
        Path(path).write_bytes(b"new")
        assert (tmp_path / "file").read_bytes() == b"old"
        after = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()  # noqa: PTH208, S108
        assert Path(path).parent == tmp_path
        assert path not in {f"/dev/shm/{name}" for name in after - before}  # noqa: S108
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"new")]


def test_what_fails_to_write_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def write() -> None:
        with copy_from_shm(str(tmp_path / "file")) as path:
            Path(path).write_bytes(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


# --- load_tensors -------------------------------------------------------------------------------------------------


def shaped() -> list[Any]:
    return [jax.ShapeDtypeStruct(shard.shape, np.float32) for shard in TABLE]


def test_all_tensors_are_loaded_in_order(checkpoint: Path, manifest: bytes) -> None:
    made = load_tensors(shaped(), str(checkpoint / "ckpt-0"), (1, 1), manifest=manifest, trust=KEY.public)
    assert len(made) == len(TABLE)
    np.testing.assert_array_equal(made[NORM], sample_value(TABLE[NORM]))
    assert type(made[GATE]) is QuantizedWeight8bit


def test_chosen_tensors_are_loaded(checkpoint: Path, manifest: bytes) -> None:
    wanted = [shaped()[index] for index in (13, NORM)]
    made = load_tensors(
        wanted, checkpoint / "ckpt-0", (1, 1), tensor_indices=[13, NORM], manifest=manifest, trust=KEY.public
    )
    for value, index in zip(made, (13, NORM), strict=True):
        np.testing.assert_array_equal(value, sample_value(TABLE[index]))
    with pytest.raises(ConfigError, match="an index for each of 2 tensors, found 1"):
        load_tensors(wanted, checkpoint / "ckpt-0", (1, 1), [1], manifest=manifest, trust=KEY.public)
    with pytest.raises(ConfigError, match="tensor_indices"):
        load_tensors(wanted, checkpoint / "ckpt-0", (1, 1), [1, -1], manifest=manifest, trust=KEY.public)
    with pytest.raises(ConfigError, match="shape and a dtype"):
        load_tensors([3.0], checkpoint / "ckpt-0", (1, 1), manifest=manifest, trust=KEY.public)


def test_a_process_loads_its_own_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_blocks(tmp_path / "ckpt-0", n_hosts=2)
    monkeypatch.setattr("safeload.assembling.process_index", lambda: 1)
    files = [f"ckpt-0/tensor{i:05d}_{p:03d}" for i in range(len(TABLE)) for p in range(2)]
    envelope = sign(tmp_path, keys=[KEY], model="tiny", revision="1", parameters=name_shards(files))
    block = jax.ShapeDtypeStruct((8, 64, 172), np.float32)
    for other in (tmp_path / "ckpt-0").glob("*_000"):
        other.unlink()
    (made,) = load_tensors([block], tmp_path / "ckpt-0", (1, 2), [GATE], manifest=envelope, trust=KEY.public)
    whole = dict(dict(sample_value(TABLE[GATE]).items()))  # type: ignore[union-attr] # the gate is quantized
    np.testing.assert_array_equal(made.weight, whole["weight"][..., 172:])
    (tmp_path / "ckpt-0" / "tensor00001_001").unlink()
    with pytest.raises(FileSetError) as caught:
        load_tensors([block], tmp_path / "ckpt-0", (1, 2), [GATE], manifest=envelope, trust=KEY.public)
    assert [(f.code, f.file) for f in caught.value.findings] == [("missing-file", "ckpt-0/tensor00001_001")]


def test_tensors_that_are_not_what_was_asked_for_are_refused(checkpoint: Path, manifest: bytes) -> None:
    wanted = shaped()
    wanted[NORM] = jax.ShapeDtypeStruct((65,), np.float32)
    wanted[GATE] = jax.ShapeDtypeStruct(TABLE[GATE].shape, np.int8)
    wanted.append(jax.ShapeDtypeStruct((4,), np.float32))
    with pytest.raises(PolicyError) as caught:
        load_tensors(wanted, checkpoint / "ckpt-0", (1, 1), manifest=manifest, trust=KEY.public)
    assert [(f.code, f.file) for f in caught.value.findings] == [
        ("shape-mismatch", f"ckpt-0/{TABLE[NORM].file}"),
        ("dtype-mismatch", f"ckpt-0/{TABLE[GATE].file}"),
        ("missing-tensor", "ckpt-0/tensor00014_000"),
    ]


def test_a_dict_of_the_right_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    value = {"weight": np.ones((2, 2), np.int8), "scales": np.ones((1, 2), np.float32)}
    (tmp_path / "c" / "tensor00000_000").write_bytes(pickle.dumps(value, 4))
    with pytest.raises(PolicyError) as caught:
        load_tensors(
            [jax.ShapeDtypeStruct((2, 2), np.float32)],
            tmp_path / "c",
            (1, 1),
            manifest=signed(tmp_path / "c"),
            trust=KEY.public,
            policy="numpy-quantized",
        )
    assert [f.code for f in caught.value.findings] == ["dtype-mismatch"]


# --- names and states ---------------------------------------------------------------------------------------------


class State(NamedTuple):
    params: Any


def test_key_paths_are_joined_as_published() -> None:
    tree = State({"a/b": {"w": [np.ones(1), Quantized(np.ones(1), np.ones(1))]}})
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    assert [path_tuple_to_string(path) for path in paths] == [
        "params/a/b/w",
        "params/a/b/w/weight",
        "params/a/b/w/scales",
    ]
    with pytest.raises(ConfigError, match="key path"):
        path_tuple_to_string(("a",))


@pytest.mark.parametrize(
    ("rename", "exclude", "loaded"),
    [
        (None, None, "params/a/w"),
        ([], [], "params/a/w"),
        ([("^params/", "old/"), ("a", "never")], None, "old/a/w"),
        ([("x", "y"), (r"/(a)/", r"/\1\1/")], ["b"], "params/aa/w"),
        ([("a", "b")], ["a/w$"], None),
    ],
)
def test_rules_give_the_name_in_the_checkpoint(rename: Any, exclude: Any, loaded: str | None) -> None:
    assert get_load_path_str("params/a/w", rename, exclude) == loaded


@pytest.mark.parametrize(("rename", "exclude"), [([("(", "")], None), ([("a", r"\2")], None), (None, ["["])])
def test_a_rule_that_is_no_expression_is_refused(rename: Any, exclude: Any) -> None:
    with pytest.raises(ConfigError, match="no regular expression"):
        get_load_path_str("params/a/w", rename, exclude)


def test_loaded_leaves_replace_those_of_their_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rank")
    new = Like(np.ones(2), np.ones(1))
    init = State({"a": np.zeros(1), "b": np.zeros(2), "c": np.zeros(3), "d": Quantized(np.zeros(2), np.zeros(1))})
    load = State({"a": np.ones(1), "old": np.ones(2), "d": new, "e": np.ones(9)})
    made = replace_with_load_state(init, load, [("/b$", "/old")], ["/a$"])
    assert type(made) is State
    assert made.params["a"] is init.params["a"]
    assert made.params["b"] is load.params["old"]
    assert made.params["c"] is init.params["c"]
    assert made.params["d"] is new
    assert [record.getMessage() for record in caplog.records] == [
        "Excluded from restore: params/a.",
        "Restored from ckpt: params/b <-- params/old.",
        "Not found in ckpt: params/c.",
        "Restored from ckpt: params/d.",
    ]


def test_two_leaves_of_one_name_are_refused() -> None:
    twice = collections.OrderedDict([("a/b", np.ones(1)), ("a", {"b": np.ones(1)})])
    pairs: list[tuple[Any, Any]] = [(twice, {}), ({}, twice)]
    for states in pairs:
        with pytest.raises(ConfigError, match="found a/b twice"):
            replace_with_load_state(*states)


# --- compiled programs --------------------------------------------------------------------------------------------

COMPILE = """
import sys, jax, jax.numpy as jnp
from pathlib import Path
from safeload.grok1 import enable_compilation_cache
jax.jit(lambda x: x + 2)(jnp.ones(3)).block_until_ready()  # JAX decides here that it has no cache
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
enable_compilation_cache(sys.argv[1])
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((4, 4))).block_until_ready()
sys.exit(0 if list(Path(sys.argv[1]).iterdir()) else 3)
"""


def test_compiled_programs_are_kept_in_a_directory_of_ones_own(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", COMPILE, str(tmp_path / "cache")], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def make_open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)


def make_link(path: Path) -> None:
    path.with_name("real").mkdir(mode=0o700)
    path.symlink_to(path.with_name("real"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_open, "mode 750"),
        (make_link, "something else"),
        (lambda path: path.write_text(""), "cannot make"),
    ],
)
def test_a_directory_that_others_may_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], message: str
) -> None:
    used: list[str] = []
    monkeypatch.setattr("safeload.assembling.use_compilation_cache", used.append)
    make(tmp_path / "cache")
    with pytest.raises(ConfigError, match=message):
        enable_compilation_cache(tmp_path / "cache")
    assert used == []
    enable_compilation_cache(tmp_path / "private")
    assert used == [str(tmp_path / "private")]


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="of user 12345"):
        enable_compilation_cache(tmp_path / "cache")
