"""Claims of `safeload.canonical`: C order, little-endian, no padding, whatever the file's order is."""

from __future__ import annotations

import sys
from typing import Literal

import ml_dtypes
import numpy as np
import pytest

from safeload.canonical import canonical_bytes, numpy_dtype, view
from safeload.tensors import DTYPE_ITEMSIZE, ML_DTYPES_ITEMSIZE, DType, Extent, TensorSpec


def spec_of(dtype: str, shape: tuple[int, ...], order: Literal["C", "F"] = "C", *, big: bool = False) -> TensorSpec:
    nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPE_ITEMSIZE[dtype]
    return TensorSpec("", DType(dtype, big_endian=big), shape, order, Extent(0, nbytes))


@pytest.mark.parametrize("name", DTYPE_ITEMSIZE)
def test_the_table_of_dtypes_has_the_item_sizes_of_numpy_and_ml_dtypes(name: str) -> None:
    if name in ML_DTYPES_ITEMSIZE and not hasattr(ml_dtypes, name):
        pytest.skip(f"this ml_dtypes has no {name}")
    assert numpy_dtype(DType(name)).itemsize == DTYPE_ITEMSIZE[name]
    assert numpy_dtype(DType(name)).name == name


@pytest.mark.parametrize("dtype", [f"{kind}{bits}" for kind in ("int", "uint") for bits in (16, 32, 64)] + ["float64"])
def test_the_byte_order_of_the_file_is_that_of_the_view(dtype: str) -> None:
    value = np.arange(6).astype(np.dtype(dtype).newbyteorder(">")).reshape(2, 3)
    spec = spec_of(dtype, (2, 3), big=True)
    np.testing.assert_array_equal(view(value.tobytes(), spec), value)
    assert bytes(canonical_bytes(value.tobytes(), spec)) == value.astype(np.dtype(dtype).newbyteorder("<")).tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (0, 3), (3, 0, 2), (2, 3), (1, 4, 1), (2, 3, 4)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "bool", "float32", "complex128"])
def test_canonical_bytes_are_those_of_numpy(
    dtype: str, shape: tuple[int, ...], order: Literal["C", "F"], *, big: bool
) -> None:
    rng = np.random.default_rng(1)
    value = rng.integers(0, 2, shape).astype(np.dtype(dtype).newbyteorder(">" if big else "<"))
    payload = value.tobytes(order)
    spec = spec_of(dtype, shape, order, big=big)
    expected = np.ascontiguousarray(value).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    assert bytes(canonical_bytes(payload, spec)) == expected
    np.testing.assert_array_equal(view(payload, spec), value)


def test_a_narrow_float_keeps_its_bits() -> None:
    payload = bytes(range(256))
    for name in ("bfloat16", "float8_e4m3fn"):
        shape = (4, 256 // DTYPE_ITEMSIZE[name] // 4)
        fortran = view(payload, spec_of(name, shape, "F"))
        assert fortran.tobytes("F") == payload
        assert bytes(canonical_bytes(payload, spec_of(name, shape, "F"))) == fortran.tobytes("C") != payload


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("int16", (2, 3)),
        spec_of("int16", (6,), "F"),
        spec_of("int16", (1, 6, 1), "F"),
        spec_of("int8", (2, 3), big=True),
    ],
)
def test_what_is_canonical_already_is_not_copied(spec: TensorSpec) -> None:
    payload = memoryview(bytes(range(spec.extent.nbytes)))
    assert canonical_bytes(payload, spec) is payload


def test_a_view_is_no_copy_and_read_only_even_of_writable_memory() -> None:
    memory = bytearray(8)
    array = view(memoryview(memory), spec_of("uint8", (2, 4)))
    memory[5] = 7
    assert array[1, 1] == 7
    assert not array.flags.writeable


def test_a_view_of_unaligned_bytes_has_the_right_values() -> None:
    memory = b"\0" + np.arange(4, dtype="<f8").tobytes()
    np.testing.assert_array_equal(view(memoryview(memory)[1:], spec_of("float64", (4,))), np.arange(4.0))


@pytest.mark.skipif(sys.byteorder != "little", reason="numpy shows the machine's own order as =")
def test_an_ml_dtype_is_the_registered_one_and_never_changed() -> None:
    assert numpy_dtype(DType("bfloat16")) is np.dtype(ml_dtypes.bfloat16)
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2
