import gc
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from safeload.assembling import assemble, fit, named_leaves
from safeload.decoding import HostTensor
from safeload.errors import ShardingError
from safeload.records import QuantizedWeight8bit, record_class
from safeload.tensors import DType, Extent, TensorSpec

NARROW = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)

P: Any = PartitionSpec  # untyped in jax
Quantized: Any = QuantizedWeight8bit


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def host(array: np.ndarray, name: str = "", file: str = "a/file") -> HostTensor:
    order: Literal["C", "F"] = "C" if array.flags.c_contiguous else "F"
    dtype = DType(array.dtype.name, big_endian=not array.dtype.isnative)
    return HostTensor(file, TensorSpec(name, dtype, array.shape, order, Extent(0, array.nbytes)), array)


def aligned(shape: tuple[int, ...], dtype: Any = np.float32, *, shift: int = 0) -> np.ndarray:
    """Return a read-only view of memory as the stage hands it out: a payload at a 64-byte boundary, plus `shift`."""
    count = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    memory = bytearray(count + 128)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % 64 + shift
    memory[start : start + count] = bytes(i % 100 for i in range(count))
    array: np.ndarray = np.frombuffer(memory, np.uint8, count, start).view(dtype).reshape(shape)
    array.flags.writeable = False
    return array


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def counting(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.arange(int(np.prod(shape, dtype=int))).reshape(shape).astype(dtype)


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int16", "int32", "float16", "float32", "complex64", *NARROW]
)
def test_the_values_are_the_host_tensors(mesh: Mesh, dtype: Any) -> None:
    array = counting((8, 4), dtype)
    for sharding in (None, NamedSharding(mesh, P("data", "model"))):
        made = assemble(host(array), sharding)
        assert isinstance(made, jax.Array)
        assert made.dtype == array.dtype
        assert np.asarray(made).tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_scalars_and_empty_tensors_keep_their_shape(mesh: Mesh, shape: tuple[int, ...]) -> None:
    for sharding in (None, NamedSharding(mesh, P())):
        assert assemble(host(counting(shape)), sharding).shape == shape


def test_the_array_is_global_and_lies_as_asked(mesh: Mesh) -> None:
    array = counting((8, 12))
    sharding = NamedSharding(mesh, P("data", "model"))
    made = assemble(host(array), sharding)
    assert made.sharding == sharding
    assert made.shape == (8, 12)
    assert len(made.addressable_shards) == 8
    for shard in made.addressable_shards:
        assert shard.data.shape == (4, 3)
        np.testing.assert_array_equal(shard.data, array[shard.index])


@pytest.mark.parametrize(
    "change", [np.asfortranarray, lambda a: a.astype(">f4"), lambda a: np.asfortranarray(a, ">f4")]
)
def test_order_and_byte_order_of_the_file_do_not_show(mesh: Mesh, change: Callable[[np.ndarray], np.ndarray]) -> None:
    array = counting((8, 4))
    for sharding in (None, NamedSharding(mesh, P("model"))):
        made = assemble(host(change(array)), sharding)
        assert made.dtype == np.float32
        np.testing.assert_array_equal(made, array)


# --- memory -------------------------------------------------------------------------------------------------------


def test_an_aligned_tensor_is_not_copied(mesh: Mesh) -> None:
    array = aligned((16, 64))
    assert assemble(host(array)).unsafe_buffer_pointer() == address(array)
    # each device's rows are contiguous, and 256 bytes long
    rows = assemble(host(array), NamedSharding(mesh, P(("data", "model"))))
    pointers = sorted(shard.data.unsafe_buffer_pointer() for shard in rows.addressable_shards)
    assert pointers == [address(array) + 2 * 256 * i for i in range(8)]


def test_an_unaligned_tensor_is_copied_and_right() -> None:
    array = aligned((16, 64), shift=4)  # jaxlib 0.4.34 takes over what is aligned to 16
    made = assemble(host(array))
    assert made.unsafe_buffer_pointer() != address(array)
    np.testing.assert_array_equal(made, array)


def test_an_aliasing_array_keeps_the_staged_memory_alive() -> None:
    array = aligned((1024, 64))
    expected, where = array.copy(), address(array)
    made = assemble(host(array))
    assert made.unsafe_buffer_pointer() == where
    del array
    gc.collect()
    scribbled = [bytearray(b"\xff" * (1024 * 64 * 4 + 128)) for _ in range(8)]
    np.testing.assert_array_equal(made, expected)
    del scribbled


# --- trees and shardings ------------------------------------------------------------------------------------------


def test_containers_and_plain_leaves_stay_as_they_are() -> None:
    tree = {"b": [host(counting((2,)), "b/0"), 1, None], "a": (True, "text", b"bytes", 1.5, {}), 3: {"x": []}, None: ()}
    made = assemble({"file": tree})["file"]
    assert list(made) == ["b", "a", 3, None]
    np.testing.assert_array_equal(made["b"].pop(0), [0, 1])
    assert made == {"b": [1, None], "a": (True, "text", b"bytes", 1.5, {}), 3: {"x": []}, None: ()}


def quantized() -> Any:
    weight, scales = counting((8, 8), np.int8), counting((4, 8), ml_dtypes.bfloat16)
    return Quantized(weight=host(weight, "weight"), scales=host(scales, "scales"))


def test_one_sharding_for_a_record_is_that_of_its_fields(mesh: Mesh) -> None:
    row, column = NamedSharding(mesh, P("model")), NamedSharding(mesh, P(None, "model"))
    made = assemble({"q": quantized(), "r": [quantized()]}, {"q": row, "r": [{"weight": row, "scales": column}]})
    assert type(made["q"]) is Quantized
    assert (made["q"].weight.sharding, made["q"].scales.sharding) == (row, row)
    assert (made["r"][0].weight.sharding, made["r"][0].scales.sharding) == (row, column)
    assert (made["q"].weight.dtype, made["q"].scales.dtype) == (np.int8, ml_dtypes.bfloat16)


def test_a_sharding_or_none_stands_for_everything_below(mesh: Mesh) -> None:
    everywhere = NamedSharding(mesh, P())
    tree = {"a": [host(counting((2,)))], "b": {"c": host(counting((2,)))}}
    assert {leaf.sharding for leaf in jax.tree_util.tree_leaves(assemble(tree, everywhere))} == {everywhere}
    made = assemble(tree, {"a": None, "b": everywhere})
    assert made["a"][0].devices() == {jax.devices()[0]}
    assert made["b"]["c"].sharding == everywhere


def test_a_function_is_asked_by_path_and_shape(mesh: Mesh) -> None:
    asked: dict[str, tuple[int, ...]] = {}

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding | None:
        asked[path] = shape
        return NamedSharding(mesh, P("model")) if PurePosixPath(path).name == "weight" else None

    made = assemble({"x": host(counting((2, 3))), "q": quantized()}, place)
    assert asked == {"a/file": (2, 3), "a/file/weight": (8, 8), "a/file/scales": (4, 8)}
    assert made["q"].weight.sharding.spec == P("model")
    assert made["q"].scales.devices() == {jax.devices()[0]}


def test_records_are_pytrees_with_named_fields() -> None:
    late: Any = record_class("MadeAfterwards", ("first", "second"))
    for cls, names in ((Quantized, ["weight", "scales"]), (late, ["first", "second"])):
        leaves, structure = jax.tree_util.tree_flatten_with_path(cls(1, 2))
        assert [(path[0].name, leaf) for path, leaf in leaves] == list(zip(names, (1, 2), strict=True))
        again = jax.tree_util.tree_unflatten(structure, [3, 4])
        assert (type(again), list(again.items())) == (cls, list(zip(names, (3, 4), strict=True)))


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float64, np.complex128, ">f8"])
def test_a_dtype_that_jax_would_narrow_is_refused(mesh: Mesh, dtype: Any) -> None:
    for sharding in (None, NamedSharding(mesh, P())):
        with pytest.raises(ShardingError, match=r"a/file.*narrow") as caught:
            assemble(host(np.ones(8, dtype)), sharding)
        assert "jax_enable_x64" in str(caught.value.hint)


def test_a_64_bit_dtype_is_kept_where_jax_keeps_it() -> None:
    update: Any = jax.config.update
    update("jax_enable_x64", True)
    try:
        made = assemble(host(np.array([2**40 + 1], np.int64)))
        assert (made.dtype, int(made[0])) == (np.int64, 2**40 + 1)
    finally:
        update("jax_enable_x64", False)


@pytest.mark.parametrize("dtype", ["M8[s]", "U1", object])
def test_a_dtype_that_jax_lacks_is_refused(mesh: Mesh, dtype: Any) -> None:
    for sharding in (None, NamedSharding(mesh, P())):
        with pytest.raises(ShardingError, match="a/file"):
            assemble(host(np.zeros(8, dtype)), sharding)


@pytest.mark.parametrize(("shape", "spec"), [((6, 8), P("model")), ((8,), P(None, "model")), ((), P("model"))])
def test_a_tensor_that_does_not_divide_is_refused_with_path_shape_and_spec(
    mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec
) -> None:
    with pytest.raises(ShardingError) as caught:
        assemble(host(counting(shape), "w"), NamedSharding(mesh, spec))
    for part in ("a/file/w", str(shape), "model"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "spec", "says"),
    [
        ((8,), P(None, "model"), "the spec has 2 entries, the tensor 1 dimension"),
        ((), P("model"), "the spec has 1 entry, the tensor 0 dimensions"),
    ],
)
def test_a_spec_that_is_longer_than_the_shape_is_refused_in_words(
    mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec, says: str
) -> None:
    with pytest.raises(ShardingError, match=says):
        assemble(host(counting(shape)), NamedSharding(mesh, spec))
    with pytest.raises(ShardingError, match=says):
        fit(mesh, spec, path="w", shape=shape)


@pytest.mark.parametrize("wrong", [P("model"), "model", 3, [P()]])
def test_what_is_no_sharding_is_refused(wrong: Any) -> None:
    with pytest.raises(ShardingError, match="Sharding"):
        assemble(host(counting((8,))), wrong)
    with pytest.raises(ShardingError, match="a/file"):
        assemble({"x": host(counting((8,)))}, lambda _path, _shape: wrong)


@pytest.mark.parametrize(
    "shardings",
    [{}, {"a": None, "b": None}, [None], {"a": [None]}, {"a": {"x": None}}, P(), "model"],
)
def test_shardings_of_another_structure_are_refused(shardings: Any) -> None:
    tree = {"a": [host(counting((2,))), host(counting((2,)))]}
    with pytest.raises(ShardingError, match=r"^the tree.*expected shardings for "):
        assemble(tree, shardings)


def test_what_the_devices_say_late_is_ours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def block_until_ready(self) -> None:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(jax, "device_put", lambda _: Failing())
    with pytest.raises(ShardingError, match="out of memory"):
        assemble(host(counting((8,))))


# --- names and specs ----------------------------------------------------------------------------------------------


def test_leaves_are_named_by_keys_attributes_and_positions_in_jax_order() -> None:
    tree: Any = {"b/c": {"w": 1}, "a": [2, (3,)], "q": Quantized(4, 5), "n": None, "p": P("x")}
    leaves, unflatten = named_leaves(tree)
    assert leaves == [
        ("a/0", 2),
        ("a/1/0", 3),
        ("b/c/w", 1),
        ("n", None),
        ("p", P("x")),
        ("q/weight", 4),
        ("q/scales", 5),
    ]
    again = unflatten([leaf for _, leaf in leaves])
    assert list(again.pop("q").items()) == list(tree.pop("q").items())
    assert again == tree


def test_a_tree_that_jax_cannot_order_is_refused() -> None:
    with pytest.raises(ShardingError, match="no tree of parameters"):
        named_leaves({"a": 1, 2: 3})


def test_none_is_replicated(mesh: Mesh) -> None:
    assert fit(mesh, None, path="w", shape=(3, 5)).is_fully_replicated


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (P("model"), (6,)),
        (P(None, "model"), (8,)),
        (P("absent"), (8,)),
        (P("model", "model"), (8, 8)),
        ("model", (8,)),
    ],
)
def test_a_spec_that_does_not_fit_the_mesh_is_refused_by_name(mesh: Mesh, spec: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShardingError, match="params/w"):
        fit(mesh, spec, path="params/w", shape=shape)
