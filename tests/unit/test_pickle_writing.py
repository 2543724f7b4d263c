"""What we write is what CPython's own pickler writes, byte for byte, and what numpy reads back."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from safeload.formats.pickles.writing import pickle_shard, shard_layout, write_shard
from safeload.records import QuantizedWeight8bit, Record, record_class
from safeload.tensors import DTYPE_ITEMSIZE

GOLDEN = (
    "80049592000000000000008c156e756d70792e636f72652e6d756c74696172726179948c0c5f7265636f6e73747275637494"
    "93948c056e756d7079948c076e6461727261799493944b0085944301629487945294284b014b014b02869468038c05647479"
    "70659493948c02663494898887945294284b038c013c944e4e4e4affffffff4affffffff4b007494628943080000803f0000"
    "00c0947494622e"
)
"""`[[1, -2]]` as float32, pickled with protocol 4 by numpy 1.26 and CPython."""

ORACLE = """
import json, pickle, sys
import ml_dtypes
import numpy as np
from dataclasses import dataclass

# numpy 2 still reads numpy 1's name; here it also writes it.
getattr(np, "_core", np.core).multiarray._reconstruct.__module__ = "numpy.core.multiarray"


class QuantizedWeight8bit:
    def __init__(self, **fields):
        self.__dict__.update(fields)


def array(dtype, shape, fill):
    return np.full(shape, fill, np.uint8).view(getattr(ml_dtypes, dtype, None) or dtype)


with open(sys.argv[1]) as file:
    cases = json.load(file)
for number, case in enumerate(cases):
    made = {name: array(*parts) for name, parts in case.items()}
    value = made[""] if "" in made else QuantizedWeight8bit(**made)
    expected = pickle.dumps(value, 4)
    with open(f"{sys.argv[1]}.{number}", "rb") as file:
        written = file.read()
    assert written == expected, (case, len(written), len(expected))
    back = pickle.loads(written)
    for name, array_ in made.items():
        read = back if name == "" else getattr(back, name)
        assert (read.dtype, read.shape, read.tobytes()) == (array_.dtype, array_.shape, array_.tobytes()), case
print(len(cases))
"""
"""Runs in a process of its own, on files that this test wrote: pickle again, compare, load, compare."""

Quantized: Any = QuantizedWeight8bit

Case = dict[str, tuple[str, tuple[int, ...], int]]
"""Dtype, shape in bytes (the last dimension is viewed as the dtype) and the byte to fill with, by field."""


def build(case: Case) -> np.ndarray | Record:
    made = {
        name: np.full(shape, fill, np.uint8).view(getattr(ml_dtypes, dtype, None) or dtype)
        for name, (dtype, shape, fill) in case.items()
    }
    return made[""] if "" in made else QuantizedWeight8bit(**made)


def bare(dtype: str, *shape: int, fill: int = 1) -> Case:
    return {"": (dtype, shape, fill)}


def quantized(weight: tuple[int, ...], scales: tuple[int, ...], dtype: str = "bfloat16", fill: int = 1) -> Case:
    return {"weight": ("int8", weight, fill), "scales": (dtype, scales, fill)}


CASES: list[Case] = [
    *(bare(dtype, 3, 32) for dtype in DTYPE_ITEMSIZE),
    # every rank with an opcode of its own, no elements, and the sizes at which numbers and payloads change their form
    *(
        bare("int8", *shape)
        for shape in [(1,), (2, 3), (2, 1, 3), (1, 2, 1, 2), (0,), (0, 70000), (255,), (256,), (65535,)]
    ),
    *(bare("uint8", n) for n in (65_536 - 200, 65_536 - 1, 65_536, 65_537, 200_000)),
    # one byte, once equal to the one that every array's constructor is called with
    bare("int8", 1, fill=ord("b")),
    bare("int8", 1, fill=ord("c")),
    quantized((4, 3), (1, 6)),
    quantized((8, 64, 344), (8, 1, 688)),
    quantized((300, 300), (4, 40_000)),
    # the first frame is full: it ends at the next object, before the second field's name
    quantized((65_530,), (60_000,)),
    quantized((60_000,), (65_400,)),
    quantized((60_000,), (70_000,)),
    # what the two arrays share: their dtype, its byte order, their empty or one-byte payloads
    quantized((4,), (4,), "int8"),
    quantized((0, 3), (0, 6)),
    quantized((1,), (1,), "uint8"),
    {"weight": ("float32", (3, 8), 1), "scales": ("float64", (1, 8), 1)},
]


def test_a_small_array_is_written_as_it_always_was() -> None:
    assert b"".join(pickle_shard(np.array([[1, -2]], np.float32))).hex() == GOLDEN


def test_files_equal_those_of_the_c_pickler_and_load_as_the_same_arrays(tmp_path: Path) -> None:
    (tmp_path / "cases").write_text(json.dumps(CASES))
    for number, case in enumerate(CASES):
        with (tmp_path / f"cases.{number}").open("wb") as file:
            assert write_shard(file, build(case)) == file.tell()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ORACLE, tmp_path / "cases"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(len(CASES))), done.stderr


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_layout_is_where_the_bytes_are(case: Case) -> None:
    value = build(case)
    arrays = {"": value} if isinstance(value, np.ndarray) else dict(value.items())
    written = b"".join(pickle_shard(value))
    layout = shard_layout({name: (array.dtype.name, array.shape) for name, array in arrays.items()})
    if all(array.nbytes > 1 for array in arrays.values()):  # shorter payloads may be written once for two arrays
        assert layout.size == len(written)
        for spec, array in zip(layout.tensors, arrays.values(), strict=True):
            start = spec.extent.offset
            assert written[start : start + spec.extent.nbytes] == array.tobytes()
            assert (spec.dtype.name, spec.shape, spec.order) == (array.dtype.name, array.shape, "C")
    assert [spec.name for spec in layout.tensors] == list(arrays)


@pytest.mark.parametrize(
    ("tensors", "size", "offsets"),
    [
        ({"": ("float32", (131_072, 6_144))}, 3_221_225_637, [151]),
        ({"": ("float32", (6_144, 8))}, 196_770, [148]),
        ({"": ("float32", (6_144,))}, 24_727, [146]),
        ({"weight": ("int8", (6_144, 1_024)), "scales": ("bfloat16", (1, 1_024))}, 6_293_814, [199, 6_291_759]),
        ({"weight": ("int8", (6_144, 6_144)), "scales": ("bfloat16", (1, 6_144))}, 37_761_334, [199, 37_749_039]),
        ({"weight": ("int8", (6_144, 6_144)), "scales": ("bfloat16", (8, 6_144))}, 37_847_359, [199, 37_749_039]),
        (
            {"weight": ("int8", (8, 6_144, 32_768)), "scales": ("bfloat16", (8, 1, 32_768))},
            1_611_137_347,
            [201, 1_610_613_043],
        ),
        (
            {"weight": ("int8", (8, 32_768, 6_144)), "scales": ("bfloat16", (8, 8, 6_144))},
            1_611_399_491,
            [201, 1_610_613_043],
        ),
    ],
)
def test_the_published_sizes_follow_from_the_shapes(
    tensors: dict[str, tuple[str, tuple[int, ...]]], size: int, offsets: list[int]
) -> None:
    layout = shard_layout(tensors)
    assert layout.size == size
    assert [spec.extent.offset for spec in layout.tensors] == offsets


def test_dimensions_and_payloads_past_32_bits_have_a_form() -> None:
    # BINBYTES8 is 4 bytes longer than BINBYTES; LONG1 of 5 bytes is 2 longer than BININT.
    below, above = shard_layout({"": ("int8", (2**31 - 1,))}), shard_layout({"": ("int8", (2**33,))})
    assert above.size - 2**33 == below.size - (2**31 - 1) + 4 + 2


def test_large_payloads_are_not_copied() -> None:
    array = np.arange(100_000, dtype=np.float32)
    views = [piece for piece in pickle_shard(array) if isinstance(piece, memoryview)]
    assert [np.shares_memory(np.asarray(view), array) for view in views] == [True]


def test_flags_80_differ_from_64_in_one_byte() -> None:
    value = Quantized(np.ones((4, 4), np.int8), np.ones((1, 4), ml_dtypes.bfloat16))
    new, old = (b"".join(pickle_shard(value, bfloat16_flags=flags)) for flags in (64, 80))
    assert [(a, b) for a, b in zip(new, old, strict=True) if a != b] == [(64, 80)]


def test_a_record_of_one_field_is_one_item() -> None:
    single: Any = record_class("Single", ("only",))
    record = single(np.ones(2, np.float32))
    assert b"".join(pickle_shard(record)).endswith(b"b" + b"s" + b"b" + b".")


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        None,
        np.float32(1),
        np.zeros((4, 4), np.float32, order="F"),
        np.zeros(8, np.float32)[::2],
        np.zeros(2, ">f4"),
        np.zeros(2, object),
        np.zeros(2, "U1"),
        np.zeros(2, "f4,f4"),
        np.ma.zeros(2),
        Quantized(np.zeros(2, np.int8), 1.0),
        Quantized(np.zeros(2, np.int8), np.zeros(2, object)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_written_is_a_type_error_and_nothing_is_written(value: object) -> None:
    file = io.BytesIO()
    with pytest.raises(TypeError):
        write_shard(file, value)  # type: ignore[arg-type] # that is the claim
    assert file.getvalue() == b""


def test_unknown_flags_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="64 or 80"):
        pickle_shard(np.zeros(1, np.float32), bfloat16_flags=63)  # type: ignore[arg-type] # that is the claim


@pytest.mark.parametrize("tensors", [{}, {"": ("object", (1,))}, {"": ("int8", (1,)), "weight": ("int8", (1,))}])
def test_no_layout_for_what_is_no_shard(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    with pytest.raises(TypeError):
        shard_layout(tensors)
