import collections
import ctypes
import dataclasses
import errno
import fcntl
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

import safeload
from safeload import saving
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FileSetError,
    ManifestError,
    PolicyError,
    StagingError,
)
from safeload.formats.pickles.writing import pickle_shard
from safeload.loading import load_host
from safeload.publishing import describe
from safeload.records import QuantizedWeight8bit
from safeload.saving import publishing_directory, publishing_file, save
from safeload.trust.keys import SecretKey

KEY = SecretKey.generate("ed25519")
Quantized: Any = QuantizedWeight8bit

TREE: dict[str, Any] = {
    "params": {
        "layer_2": {"w": Quantized(np.ones((4, 6), np.int8), np.full((2, 6), 0.5, ml_dtypes.bfloat16))},
        "layer_10": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
        "norm": [np.ones(3, np.float32), None, np.float32(2)],
    }
}
NAMES = ["params/layer_10/w", "params/layer_2/w", "params/norm/0", "params/norm/2"]


def saved(tree: Any, directory: Path, **changes: Any) -> Path:
    options: dict[str, Any] = {"layout": "grok-1", "keys": [KEY], "model": "tiny", "revision": "1"}
    return save(tree, directory, **(options | changes))


def loaded(directory: Path, manifest: Path | None = None) -> Mapping[str, Any]:
    return safeload.load(directory, manifest=manifest or directory / "manifest.json", trust=KEY.public)


def files(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


# --- the layout grok-1 --------------------------------------------------------------------------------------------


def test_each_leaf_is_one_file_in_jaxs_order_and_the_manifest_names_it(tmp_path: Path) -> None:
    assert saved(TREE, tmp_path / "c") == tmp_path / "c" / "manifest.json"
    trusted, tree = load_host(tmp_path / "c", manifest=tmp_path / "c" / "manifest.json", trust=KEY.public)
    assert {path: entry.parameter for path, entry in trusted.manifest.by_path.items()} == {
        f"ckpt-0/tensor{index:05d}_000": name for index, name in enumerate(NAMES)
    }
    assert list(tree) == [f"ckpt-0/tensor{index:05d}_000" for index in range(4)]
    values = loaded(tmp_path / "c")
    np.testing.assert_array_equal(values["ckpt-0/tensor00000_000"], TREE["params"]["layer_10"]["w"])
    made: Any = values["ckpt-0/tensor00001_000"]
    assert isinstance(made, QuantizedWeight8bit)
    for field, array in TREE["params"]["layer_2"]["w"].items():
        assert dict(made.items())[field].tobytes() == array.tobytes()
    assert values["ckpt-0/tensor00003_000"].shape == ()


def test_the_order_is_jaxs(tmp_path: Path) -> None:
    ordered = collections.OrderedDict([("z", np.ones(1)), ("a", np.ones(2))])
    tree = {"b": ordered, "a": (np.ones(3), {"10": np.ones(4), "9": np.ones(5)}), "c": [np.ones(6)]}
    saved(tree, tmp_path / "c")
    sizes = [value.size for value in loaded(tmp_path / "c").values()]
    assert sizes == [leaf.size for leaf in jax.tree_util.tree_leaves(tree)]


class State(NamedTuple):
    params: Any
    step: Any


def test_jax_arrays_named_tuples_and_the_users_own_classes_are_written(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class QuantizedWeight8bit:  # as the published model code has it, unknown to us
        weight: Any
        scales: Any

    @functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=[])
    @dataclasses.dataclass
    class Block:
        w: Any
        b: Any

    quantized = QuantizedWeight8bit(np.ones((2, 2), np.int8), np.ones((1, 2), np.float32))
    state = State({"q": quantized, "block": Block(jax.numpy.ones(2), jax.numpy.zeros(3))}, jax.numpy.int32(7))
    manifest = saved(state, tmp_path / "c")
    trusted, _ = load_host(tmp_path / "c", manifest=manifest, trust=KEY.public)
    parameters = [entry.parameter for entry in trusted.manifest.files]
    assert parameters == ["params/block/w", "params/block/b", "params/q", "step"]
    values = list(loaded(tmp_path / "c").values())
    assert type(values[2]) is Quantized
    assert values[3] == 7


def test_other_orders_of_bytes_and_of_indices_are_written_as_values(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3, order="F")
    saved({"x": array}, tmp_path / "c")
    (made,) = loaded(tmp_path / "c").values()
    assert (made.dtype, made.flags.c_contiguous) == (np.dtype("<f4"), True)
    np.testing.assert_array_equal(made, array)


def test_a_file_is_what_the_writer_of_pickles_makes(tmp_path: Path) -> None:
    saved({"x": TREE["params"]["layer_2"]["w"]}, tmp_path / "c")
    expected = b"".join(map(bytes, pickle_shard(TREE["params"]["layer_2"]["w"])))
    assert (tmp_path / "c" / "ckpt-0" / "tensor00000_000").read_bytes() == expected


# --- the layout safetensors ---------------------------------------------------------------------------------------


def test_safetensors_are_one_file_if_they_fit(tmp_path: Path) -> None:
    saved(TREE, tmp_path / "c", layout="safetensors")
    assert files(tmp_path / "c") == ["manifest.json", "model.safetensors"]
    (tensors,) = loaded(tmp_path / "c").values()
    assert set(tensors) == {*NAMES[:1], f"{NAMES[1]}/weight", f"{NAMES[1]}/scales", *NAMES[2:]}
    np.testing.assert_array_equal(tensors["params/layer_10/w"], TREE["params"]["layer_10"]["w"])


def test_safetensors_are_split_where_they_would_be_too_long(tmp_path: Path) -> None:
    saved(TREE, tmp_path / "c", layout="safetensors", shard_bytes=40)
    of = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert files(tmp_path / "c") == ["manifest.json", *of, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 24 + 24 + 24 + 12 + 4},
        "weight_map": {
            "params/layer_10/w": of[0],
            "params/layer_2/w/weight": of[1],
            "params/layer_2/w/scales": of[2],
            "params/norm/0": of[2],
            "params/norm/2": of[2],
        },
    }
    values = loaded(tmp_path / "c")
    assert sorted(name for tensors in values.values() for name in tensors) == sorted(index["weight_map"])


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "at least one array"),
        ({"a": None}, "at least one array"),
        ({"a": 1.0}, "a: expected arrays"),
        ({"a": "text"}, "a: expected arrays"),
        ({"a": np.array(["text"])}, "a: expected an array of a dtype"),
        ({"a": np.array([object()])}, "a: expected an array of a dtype"),
        ({"a": Quantized(np.ones(1), 1.0)}, "a/scales: expected an array"),
        ({"a": jax.random.key(0)}, "a: expected an array of a dtype"),
        ({"a": {"b": np.ones(1)}, "a/b": np.ones(1)}, "found a/b twice"),
        ({1: np.ones(1), "a": np.ones(1)}, "keys that have an order"),
        ({"a": np.ma.masked_array(np.ones(2), mask=[True, False])}, "a: expected an array, found one with values mask"),
    ],
)
def test_a_tree_that_is_not_of_arrays_is_refused(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        saved(tree, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_masked_array_without_a_masked_value_is_an_array(tmp_path: Path) -> None:
    value = np.arange(6, dtype=np.float32)
    manifest = saved({"a": np.ma.masked_array(value, mask=False)}, tmp_path / "c")
    (found,) = loaded(tmp_path / "c", manifest).values()
    assert found.tobytes() == value.tobytes()


def test_a_tree_that_holds_itself_is_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    tree["a"] = tree
    with pytest.raises(ConfigError, match="64 levels"):
        saved(tree, tmp_path / "c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "other"}, "layout"),
        ({"keys": []}, "secret key"),
        ({"shard_bytes": 0}, "shard_bytes"),
        ({"model": "no good name"}, "stream"),
        ({"directory": "a\0b"}, "embedded null"),
        ({"manifest": "a\0b/manifest.json"}, "embedded null"),
        ({"manifest": "absent/manifest.json"}, "expected a directory for the manifest"),
    ],
)
def test_an_argument_that_is_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        saved(TREE, **{"directory": tmp_path / "c", **changes})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["int4", "complex128"])
def test_what_safetensors_has_no_name_for_is_refused(tmp_path: Path, name: str) -> None:
    array = np.ones(2, getattr(ml_dtypes, name, None) or name)
    with pytest.raises(ConfigError, match=f"a: safetensors has no dtype {name}"):
        saved({"a": array}, tmp_path / "c", layout="safetensors")
    with pytest.raises(ConfigError, match="__metadata__"):
        saved({"__metadata__": np.ones(1)}, tmp_path / "c", layout="safetensors")
    tree = {"a": Quantized(np.ones(1), np.ones(1)), "a/weight": np.ones(1)}
    with pytest.raises(ConfigError, match="a/weight twice"):
        saved(tree, tmp_path / "c", layout="safetensors")
    assert list(tmp_path.iterdir()) == []


def test_what_the_policy_refuses_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        saved({"a": np.ones(2, np.float64)}, tmp_path / "c", policy="grok-1")
    assert list(tmp_path.iterdir()) == []


def test_what_the_kind_needs_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ManifestError):
        saved(TREE, tmp_path / "c", kind="training")
    assert list(tmp_path.iterdir()) == []


def test_what_was_changed_before_it_is_signed_is_not_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def described(directory: Path, **stated: Any) -> Any:
        first = directory / "ckpt-0" / "tensor00000_000"
        first.write_bytes(b"".join(map(bytes, pickle_shard(np.zeros((2, 3), np.float32)))))
        return describe(directory, **stated)

    monkeypatch.setattr(saving, "describe", described)
    with pytest.raises(DigestMismatchError) as caught:
        saved(TREE, tmp_path / "c")
    assert [(f.code, f.file) for f in caught.value.findings] == [("digest-mismatch", "ckpt-0/tensor00000_000")]
    assert list(tmp_path.iterdir()) == []


def test_more_tensors_than_names_count_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="room for 100000 tensors, found 100001"):
        saved([np.ones(1)] * 100_001, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_without_jax_only_plain_trees_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("safeload.assembling", raising=False)
    monkeypatch.setitem(sys.modules, "safeload.assembling", None)
    saved(TREE, tmp_path / "c")
    with pytest.raises(ConfigError, match="a: expected arrays"):
        saved({"a": {1.0}}, tmp_path / "d")


def test_an_array_that_other_processes_hold_is_refused(tmp_path: Path) -> None:
    class Partial:
        dtype, shape, nbytes, is_fully_addressable = np.dtype("f4"), (4,), 16, False

    with pytest.raises(ConfigError, match="a: other processes hold"):
        saved({"a": Partial()}, tmp_path / "c")


def test_a_deleted_jax_array_is_refused(tmp_path: Path) -> None:
    array = jax.numpy.ones(3)
    array.delete()
    with pytest.raises(ConfigError, match="a: cannot be copied"):
        saved({"a": array}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "write_shard", full)
    with pytest.raises(StagingError, match="No space left"):
        saved(TREE, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


# --- in the place of another --------------------------------------------------------------------------------------

NEW = {"params": {"norm": np.full(5, 7, np.float32)}}


def test_a_checkpoint_is_replaced_whole_with_its_manifest(tmp_path: Path) -> None:
    saved(TREE, tmp_path / "c")
    old = (tmp_path / "c" / "manifest.json").read_bytes()
    saved(NEW, tmp_path / "c", replace=True)
    assert files(tmp_path) == ["c/ckpt-0/tensor00000_000", "c/manifest.json"]
    (made,) = loaded(tmp_path / "c").values()
    np.testing.assert_array_equal(made, NEW["params"]["norm"])
    with pytest.raises(FileSetError):
        safeload.load(tmp_path / "c", manifest=old, trust=KEY.public)


def test_nothing_is_replaced_that_was_not_to_be(tmp_path: Path) -> None:
    saved(TREE, tmp_path / "c")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="not empty") as caught:
        saved(NEW, tmp_path / "c")
    assert "replace=True" in str(caught.value)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="no directory"):
            saved(NEW, tmp_path / name, replace=True)
    assert files(tmp_path) == [*before, "file"]
    for odd in ("..", "/", ""):
        with pytest.raises(ConfigError, match="name of a directory"), publishing_directory(odd):
            pass


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    saved(NEW, tmp_path / "c")
    assert loaded(tmp_path / "c")


def test_a_manifest_outside_is_written_when_the_directory_is_there(tmp_path: Path) -> None:
    assert saved(NEW, tmp_path / "c", manifest=tmp_path / "m.json") == tmp_path / "m.json"
    assert files(tmp_path) == ["c/ckpt-0/tensor00000_000", "m.json"]
    assert loaded(tmp_path / "c", tmp_path / "m.json")
    with pytest.raises(ConfigError, match="one step"):
        saved(TREE, tmp_path / "c", manifest=tmp_path / "m.json", replace=True)
    assert loaded(tmp_path / "c", tmp_path / "m.json")


def test_a_manifest_cannot_be_where_it_would_come_late_or_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at the top of the directory or outside"):
        saved(NEW, tmp_path / "c", manifest=tmp_path / "c" / "sub" / "m.json")
    for name, layout in (("ckpt-0", "grok-1"), ("model.safetensors", "safetensors")):
        with pytest.raises(ConfigError, match=f"{name} is the name of a file"):
            saved(NEW, tmp_path / "c", manifest=tmp_path / "c" / name, layout=layout)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_may_have_another_name_inside(tmp_path: Path) -> None:
    saved(TREE, tmp_path / "c", manifest=tmp_path / "c" / "signed.json")
    saved(NEW, tmp_path / "c", manifest=tmp_path / "c" / "signed.json", replace=True)
    assert files(tmp_path / "c") == ["ckpt-0/tensor00000_000", "signed.json"]
    assert loaded(tmp_path / "c", tmp_path / "c" / "signed.json")


def test_a_file_system_that_cannot_exchange_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(TREE, tmp_path / "c")

    class Libc:
        @staticmethod
        def renameat2(*_: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(saving, "_LIBC", Libc)
    with pytest.raises(StagingError, match="cannot exchange two directories"):
        saved(NEW, tmp_path / "c", replace=True)
    assert len(loaded(tmp_path / "c")) == len(NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    monkeypatch.setattr(saving, "_LIBC", object())
    with pytest.raises(StagingError, match="cannot exchange two directories"):
        saved(NEW, tmp_path / "c", replace=True)


def test_an_error_of_the_file_system_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(TREE, tmp_path / "c")

    class Libc:
        @staticmethod
        def renameat2(*_: object) -> int:
            ctypes.set_errno(errno.EACCES)
            return -1

    def failing(*_: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(saving, "_LIBC", Libc)
    with pytest.raises(StagingError, match="Permission denied"):
        saved(NEW, tmp_path / "c", replace=True)
    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(StagingError, match="Permission denied"):
        saved(NEW, tmp_path / "d")
    assert len(loaded(tmp_path / "c")) == len(NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_refusal_comes_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "c" / "full").mkdir(parents=True)
    entered = []
    for target in (tmp_path / "c", tmp_path / "a\0b"):
        with pytest.raises(ConfigError), publishing_directory(target):
            entered.append(target)
    assert entered == []


def test_two_processes_take_turns_at_the_parent(tmp_path: Path) -> None:
    # While one makes its directory and locks it, another must not take it for what a dead process left.
    made = threading.Event()

    def publish() -> None:
        with publishing_directory(tmp_path / "c"):
            made.set()

    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    thread = threading.Thread(target=publish)
    thread.start()
    try:
        assert not made.wait(0.3)
        assert list(tmp_path.iterdir()) == []
    finally:
        os.close(lock)
        thread.join(10)
    assert made.is_set()


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def publish() -> None:
        with publishing_directory(tmp_path / "c") as fresh:
            (fresh / "ours").write_text("")
            (tmp_path / "c").mkdir()
            (tmp_path / "c" / "theirs").write_text("")

    with pytest.raises(ConfigError, match="not empty"):
        publish()
    assert files(tmp_path) == ["c/theirs"]


# --- the directory that becomes the target ------------------------------------------------------------------------


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def publish(error: type[BaseException]) -> None:
        with publishing_directory(tmp_path / "c") as fresh:
            (fresh / "sub").mkdir()
            (fresh / "sub" / "file").write_text("half")
            raise error

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            publish(error)
        assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_published(tmp_path: Path) -> None:
    def publish() -> None:
        with publishing_directory(tmp_path / "c") as fresh:
            (fresh / "link").symlink_to("/etc/hostname")

    with pytest.raises(StagingError, match="regular files and directories only"):
        publish()
    assert list(tmp_path.iterdir()) == []


def test_there_is_no_parent(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match="cannot make a directory"), publishing_directory(tmp_path / "no" / "c"):
        pass


def test_everything_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        sync(fd)

    def renamed(source: Any, target: Any) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    with publishing_directory(tmp_path / "c") as fresh:
        (fresh / "sub").mkdir()
        (fresh / "sub" / "file").write_text("whole")
    base = str(fresh)
    assert events == [f"{base}/sub/file", f"{base}/sub", base, "rename", str(tmp_path)]


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        sync(fd)

    def replaced(source: Any, target: Any) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    with publishing_file(tmp_path / "file") as fresh:
        fresh.write_text("whole")
    assert events == [str(fresh), "rename", str(tmp_path)]
    assert files(tmp_path) == ["file"]

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StagingError, match="Input/output error"), publishing_file(tmp_path / "file") as fresh:
        fresh.write_text("half")
    assert (tmp_path / "file").read_text() == "whole"
    assert files(tmp_path) == ["file"]
    with pytest.raises(StagingError, match="Input/output error"), publishing_directory(tmp_path / "c"):
        pass
    assert files(tmp_path) == ["file"]


def test_what_a_dead_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    left = tmp_path / f".c.{'0' * 16}.partial"
    (left / "ckpt-0").mkdir(parents=True)
    others = [tmp_path / f".d.{'0' * 16}.partial", tmp_path / ".c.notes.partial", tmp_path / f".c.{'1' * 16}"]
    for other in others:
        other.mkdir()
    with publishing_directory(tmp_path / "c") as first:
        (first / "a").write_text("")
        assert not left.exists()
        with publishing_directory(tmp_path / "c", replace=True) as second:
            (second / "b").write_text("")
            assert first.exists()
            (tmp_path / "c").mkdir()
        assert first.exists()
        (tmp_path / "c" / "b").unlink()
    assert all(other.exists() for other in others)
    assert files(tmp_path / "c") == ["a"]


# Forks from a process without JAX, whose threads would not survive it: each child starts warm and dies at one call.
_KILLED_EVERYWHERE = """
import os, shutil, signal, sys
from pathlib import Path
import numpy as np
from safeload import loading, saving
from safeload.trust.keys import SecretKey

base, outside = Path(sys.argv[1]), sys.argv[2] == "outside"
KEY = SecretKey.generate("ed25519")
OLD, NEW = {"a": np.zeros(40_000, np.int8), "b": np.zeros(3, np.int8)}, {"a": np.ones(40_000, np.int8)}
target, manifest = base / "c", base / ("m.json" if outside else "c/manifest.json")

def save(tree):
    saving.save(tree, target, layout="grok-1", keys=[KEY], model="m", revision="1", replace=not outside,
                manifest=manifest if outside else None)

def child(stop):
    count = 0
    def dying(call):
        def wrapped(*args, **options):
            nonlocal count
            count += 1
            if count == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)
        return wrapped
    for name in ("open", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))
    saving._exchange = dying(saving._exchange)
    saving._Hashing.write = dying(saving._Hashing.write)
    save(NEW)

seen = {"old": 0, "new": 0, "none": 0}
for stop in range(1, 2000):
    shutil.rmtree(base)
    base.mkdir()
    if not outside:
        save(OLD)
    pid = os.fork()
    if not pid:
        try:
            child(stop)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if outside and not manifest.exists():
        seen["none"] += 1
    else:
        tree = loading.load(target, manifest=manifest, trust=KEY.public)
        values = {int(value[0]) for value in tree.values()}
        assert (values, len(tree)) in (({0}, 2), ({1}, 1)), (stop, values, len(tree))
        seen["new" if values == {1} else "old"] += 1
    if not os.WIFSIGNALED(status):
        assert os.waitstatus_to_exitcode(status) == 0
        break
    if stop % 4:
        continue
    if outside:
        shutil.rmtree(target, ignore_errors=True)
    save(NEW)
    left = [path.name for path in base.iterdir() if path.name.endswith(".partial")]
    assert left == [], (stop, left)
    loading.load(target, manifest=manifest, trust=KEY.public)
print(stop, seen["old"], seen["new"], seen["none"])
"""


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_killed_at_any_call_the_old_or_the_new_verifies_and_the_next_save_works(tmp_path: Path, place: str) -> None:
    command = [sys.executable, "-c", _KILLED_EVERYWHERE, str(tmp_path / "base"), place]
    (tmp_path / "base").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    points, old, new, none = map(int, done.stdout.split())
    assert points > 20
    assert new >= 2  # killed after the last step, and not killed at all
    assert (old > 20, none > 10) == ((True, False) if place == "inside" else (False, True))
