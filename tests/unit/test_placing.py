"""Claims of `safeload.placing`: which bytes a part of a tensor lies in, which rule a path meets, how blocks tile."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safeload.digests import CHUNK_BYTES
from safeload.errors import ConfigError, ShardingError
from safeload.placing import (
    SLACK_BYTES,
    Block,
    Casts,
    Join,
    block_of,
    byte_ranges,
    compile_rules,
    copied_bytes,
    framing,
    is_contiguous,
    join_blocks,
    merged,
    moved,
    overlap,
    preferred,
    staged_bytes,
    whole,
    widened,
    within,
)
from safeload.tensors import DType, Extent, TensorSpec


def spec(shape: tuple[int, ...], order: Literal["C", "F"] = "C", dtype: str = "int16", offset: int = 100) -> TensorSpec:
    made = DType(dtype)
    return TensorSpec("w", made, shape, order, Extent(offset, math.prod(shape) * made.itemsize))


# ---------------------------------------------------------------- bytes


@st.composite
def parts(draw: st.DrawFn) -> tuple[TensorSpec, Block]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    block = []
    for length in shape:
        start = draw(st.integers(0, length - 1))
        block.append(range(start, draw(st.integers(start + 1, length))))
    return spec(shape, draw(st.sampled_from(["C", "F"]))), tuple(block)


@given(parts(), st.integers(1, 40))
def test_the_byte_ranges_of_a_part_hold_each_of_its_bytes_and_leave_out_what_is_worth_it(
    part: tuple[TensorSpec, Block], gap: int
) -> None:
    tensor, block = part
    # Where each element lies, by numpy.
    places = np.arange(tensor.n_elements).reshape(tensor.shape, order=tensor.order) * 2 + 100
    taken = places[within(block, (0,) * len(block))].ravel()
    needed = {int(byte) for place in taken for byte in (place, place + 1)}
    found = byte_ranges(tensor, block, gap=gap)
    assert needed <= {byte for one in found for byte in one}
    assert found[0].start == min(needed)
    assert found[-1].stop == max(needed) + 1
    for one, other in pairwise(found):
        assert other.start - one.stop >= gap
        assert {one.stop - 1, other.start} <= needed
    if gap == 1:
        assert {byte for one in found for byte in one} == needed
    assert is_contiguous(tensor, block) == (max(needed) - min(needed) + 1 == len(needed))


def test_a_part_of_each_expert_is_a_range_of_its_own() -> None:
    # Grok-1's moe/linear_1 over 8 devices: rows of each of 8 experts.
    tensor = spec((8, 32768, 6144), dtype="int8", offset=151)
    block = (range(8), range(4096, 8192), range(6144))
    found = byte_ranges(tensor, block)
    assert len(found) == 8
    assert sum(map(len, found)) == 8 * 4096 * 6144
    assert found[1].start == 151 + (32768 + 4096) * 6144
    # Columns are everywhere.
    columns = (range(8), range(32768), range(768, 1536))
    (one,) = byte_ranges(tensor, columns)
    assert len(one) > 0.99 * tensor.extent.nbytes


def test_nothing_lies_in_no_bytes() -> None:
    assert byte_ranges(spec((3, 0)), (range(3), range(0))) == ()
    assert byte_ranges(spec((3, 4)), (range(2, 2), range(4))) == ()
    inline = TensorSpec("w", DType("int8"), (2,), "C", Extent(5, 2, b"ab"))
    assert byte_ranges(inline, whole((2,))) == ()


def test_of_a_strided_view_all_is_needed() -> None:
    strided = TensorSpec("w", DType("int8"), (2, 2), "C", Extent(10, 6), strides=(4, 1))
    assert byte_ranges(strided, (range(1), range(2))) == (range(10, 16),)
    assert not is_contiguous(strided, (range(1), range(2)))


def test_the_framing_is_all_that_is_no_payload() -> None:
    tensors = [spec((1000,), offset=300_000), spec((200_000,), offset=400_000)]
    found = {byte for part in framing(tensors, 900_000) for byte in part}
    payload = set(range(300_000, 302_000)) | set(range(400_000, 800_000))
    assert set(range(900_000)) - payload <= found
    assert max(found & set(range(400_000, 800_000))) < 400_000 + 65536


def test_ranges_cost_the_chunks_that_they_touch() -> None:
    size = 3 * CHUNK_BYTES + 10
    assert widened((), size, has_chunks=True) == 0
    assert widened((range(1), range(2, 4)), size, has_chunks=True) == CHUNK_BYTES
    assert widened((range(CHUNK_BYTES - 1, CHUNK_BYTES + 1),), size, has_chunks=True) == 2 * CHUNK_BYTES
    assert widened((range(size - 1, size),), size, has_chunks=True) == 10
    assert widened((range(1),), size, has_chunks=False) == size


def test_what_is_staged_is_whole_chunks_and_each_run_of_them_has_pages_of_its_own() -> None:
    size = 5 * CHUNK_BYTES + 10
    assert staged_bytes(None, size, has_chunks=True) == size + SLACK_BYTES
    assert staged_bytes((range(1),), size, has_chunks=False) == size + SLACK_BYTES
    assert staged_bytes((range(1),), size, has_chunks=True) == CHUNK_BYTES + SLACK_BYTES
    ends = (range(size - 1, size), range(1))
    assert staged_bytes(ends, size, has_chunks=True) == CHUNK_BYTES + 10 + 2 * SLACK_BYTES
    # Neighbors are one run, however far apart the bytes in them are.
    apart = (range(1), range(2 * CHUNK_BYTES - 1, 2 * CHUNK_BYTES))
    assert staged_bytes(apart, size, has_chunks=True) == 2 * CHUNK_BYTES + SLACK_BYTES


@given(st.lists(st.tuples(st.integers(0, 8 * CHUNK_BYTES), st.integers(0, 3 * CHUNK_BYTES)), max_size=6))
def test_more_ranges_never_take_less(found: list[tuple[int, int]]) -> None:
    size = 11 * CHUNK_BYTES + 7
    ranges = [range(start, start + length) for start, length in found]
    sums = [staged_bytes(ranges[:n], size, has_chunks=True) for n in range(len(ranges) + 1)]
    assert sums == sorted(sums)


@pytest.mark.parametrize(
    ("tensor", "block", "dtype", "nbytes"),
    [
        (spec((4, 6)), (range(2), range(6)), "int16", 0),
        (spec((4, 6)), (range(4), range(3)), "int16", 24),
        (spec((4, 6), order="F"), (range(4), range(3)), "int16", 24),
        (spec((4, 6)), (range(2), range(6)), "float32", 48),
    ],
)
def test_a_copy_is_made_of_what_is_no_native_array_in_the_file(
    tensor: TensorSpec, block: Any, dtype: str, nbytes: int
) -> None:
    assert copied_bytes(tensor, block, DType(dtype)) == nbytes


def test_ranges_are_joined_that_overlap_or_touch() -> None:
    assert merged([range(5, 9), range(3), range(3, 5), range(7, 8), range(0)]) == (range(9),)
    assert merged([range(2), range(4, 5)]) == (range(2), range(4, 5))
    assert merged([range(2), range(4, 5)], gap=3) == (range(5),)


def test_blocks_are_cut_and_moved() -> None:
    assert block_of((slice(None), slice(2, 4)), (3, 5)) == (range(3), range(2, 4))
    assert overlap((range(4), range(2, 6)), (range(2, 9), range(3))) == (range(2, 4), range(2, 3))
    assert overlap((range(4),), (range(4, 6),)) is None
    assert overlap((), ()) == ()
    assert moved((range(4, 6),), (3,)) == (range(1, 3),)


# ---------------------------------------------------------------- rules

GROK_RULES = [
    (("multi_head_attention", "(query|key|value)", "w"), "attention"),
    (("linear.*", "w"), "linear"),
    (("scale",), "norm"),
]


@pytest.mark.parametrize(
    ("path", "meaning"),
    [
        ("params/transformer/decoder_layer_0/multi_head_attention/query/w", "attention"),
        ("params/transformer/decoder_layer_10/moe/linear_1/w", "linear"),
        ("language_model/rms_norm/scale", "norm"),
        ("scale", "norm"),
    ],
)
def test_a_rule_of_components_matches_neighbors_in_full(path: str, meaning: str) -> None:
    assert compile_rules(GROK_RULES)(path) == meaning


@pytest.mark.parametrize(
    "path", ["multi_head_attention/queryx/w", "multi_head_attention/x/query/w", "linear/x/w", "rescale", "scales", ""]
)
def test_a_rule_of_components_does_not_match_parts_of_them(path: str) -> None:
    with pytest.raises(ShardingError, match="no partition rule matches"):
        compile_rules(GROK_RULES)(path)


def test_a_rule_of_one_string_is_searched_for_and_the_first_match_counts() -> None:
    find = compile_rules([("layer_1/", 1), ("layer", 2), (r"^w$", 3)])
    assert [find(path) for path in ("a/layer_1/w", "a/layer_10/w", "w")] == [1, 2, 3]
    with pytest.raises(ShardingError, match=r"^v\\x1b: no partition rule"):
        find("v\x1b")


@pytest.mark.parametrize("pattern", ["(", ("a", "["), (), (1,), 5])
def test_a_pattern_that_is_none_is_a_config_error(pattern: Any) -> None:
    with pytest.raises((ConfigError, TypeError), match=r"pattern|iterable"):
        compile_rules([(pattern, None)])


# ---------------------------------------------------------------- joins


def test_the_hosts_of_a_mesh_hold_blocks_in_the_order_of_their_numbers() -> None:
    files = [f"t_{n:03d}" for n in range(4)]
    hosts, local = {"data": 2, "model": 2}, {"data": 1, "model": 4}
    join = join_blocks("t", files, ("model", None, "data"), hosts=hosts, local=local)
    assert join.grid == (2, 1, 2)
    assert dict(join.files) == {"t_000": (0, 0, 0), "t_001": (1, 0, 0), "t_002": (0, 0, 1), "t_003": (1, 0, 1)}
    assert join.shape((3, 5, 7, 9)) == (6, 5, 14, 9)
    assert join.origin("t_003", (3, 5, 7, 9)) == (3, 0, 7, 0)


def test_a_dimension_over_two_axes_counts_the_second_first() -> None:
    join = join_blocks(
        "t", list("abcd"), [("data", "model")], hosts={"data": 2, "model": 2}, local={"data": 1, "model": 4}
    )
    assert [join.files[file] for file in "abcd"] == [(0,), (1,), (2,), (3,)]


def test_hosts_that_share_a_dimension_hold_replicas() -> None:
    join = join_blocks("t", list("abcd"), (None, "model"), hosts={"data": 2, "model": 2}, local={"data": 4, "model": 1})
    assert list(preferred(join, None)) == ["a", "b"]
    assert list(preferred(join, 3)) == ["d", "a"]
    nowhere = join_blocks("t", list("ab"), None, hosts={"data": 2}, local={"data": 4})
    assert (nowhere.grid, list(preferred(nowhere, 1))) == ((), ["b"])


@pytest.mark.parametrize(
    ("files", "partition", "local", "says"),
    [
        ("abc", ("data",), {"data": 1, "model": 1}, "one block of each of 4 hosts, found 3"),
        ("abcd", ("expert",), {"data": 1, "model": 1}, "expected axes of the mesh"),
        ("abcd", (("data", "model"),), {"data": 2, "model": 2}, "do not tile"),
    ],
)
def test_blocks_that_do_not_tile_are_refused_by_name(
    files: str, partition: Any, local: dict[str, int], says: str
) -> None:
    with pytest.raises(ShardingError, match=rf"^t: .*{says}"):
        join_blocks("t", list(files), partition, hosts={"data": 2, "model": 2}, local=local)


def test_a_block_of_too_few_dimensions_is_refused() -> None:
    with pytest.raises(ShardingError, match="blocks of 2 dimensions or more"):
        Join("t", {"a": (0, 0)}, (1, 1)).shape((3,))


# ---------------------------------------------------------------- casts


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"])
def test_every_float_of_whole_bytes_can_be_cast_to(name: str) -> None:
    assert Casts({"": name}).dtype("w", DType("float32")) == DType(name)


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e2m3fn", "int8", "complex64", "float128"])
def test_what_quantizes_or_is_no_float_cannot_be_cast_to(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a floating-point dtype"):
        Casts({"": name})


def test_the_first_cast_that_is_found_in_a_path_counts_and_nothing_else_is_cast() -> None:
    casts = Casts({"norm": "float32", "w$": "bfloat16"})
    stored = DType("float16")
    found = [casts.dtype(path, stored).name for path in ("norm/w", "a/w", "a/scale")]
    assert found == ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize(
    "casts", [{"(": "float32"}, {"w": "int8"}, {"w": "complex64"}, {"w": "float4_e2m1fn"}, {"w": 5}]
)
def test_a_cast_to_what_is_no_float_is_a_config_error(casts: Any) -> None:
    with pytest.raises(ConfigError, match=r"^cast: "):
        Casts(casts)


def test_a_complex_tensor_is_not_cast() -> None:
    with pytest.raises(ConfigError, match="complex64, which float32 cannot hold"):
        Casts({"": "float32"}).dtype("w", DType("complex64"))
