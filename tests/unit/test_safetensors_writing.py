import io
import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from safeload.formats import safetensors_writing
from safeload.formats.safetensors_writing import SAFETENSORS_NAMES, safetensors_layout, write_safetensors
from safeload.tensors import DTYPE_ITEMSIZE


def written(arrays: dict[str, Any], **metadata: str) -> bytes:
    file = io.BytesIO()
    assert write_safetensors(file, arrays, metadata) == len(file.getvalue())
    return file.getvalue()


def test_a_file_is_byte_for_byte_what_the_safetensors_library_makes() -> None:
    # `safetensors.numpy.save` of version 0.8.0, of the same arrays.
    arrays = {
        "b": np.arange(3, dtype=np.int8),
        "a": np.arange(2, dtype=np.float32),
        "é": np.array(7, np.int64),
        "c": np.zeros((0, 4), np.float32),
    }
    header = (
        '{"é":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},'
        '"c":{"dtype":"F32","shape":[0,4],"data_offsets":[16,16]},"b":{"dtype":"I8","shape":[3],"data_offsets":[16,19]}}'
    ).encode()
    header += b" " * (-len(header) % 8)
    data = struct.pack("<q2f3b", 7, 0.0, 1.0, 0, 1, 2)
    assert written(arrays) == struct.pack("<Q", len(header)) + header + data


def test_the_layout_says_where_each_tensor_lies_without_one() -> None:
    shapes = {"weight": ("int8", (3, 5)), "scales": ("bfloat16", (1, 5)), "norm": ("float32", (7,))}
    header, places = safetensors_layout(shapes, {"step": "3"})
    file = written({name: np.ones(shape, _dtype(dtype)) for name, (dtype, shape) in shapes.items()}, step="3")
    assert file.startswith(header)
    assert list(places) == ["norm", "scales", "weight"]
    assert {name: file[at : at + n] for name, (at, n) in places.items()} == {
        "norm": np.ones(7, np.float32).tobytes(),
        "scales": np.ones(5, ml_dtypes.bfloat16).tobytes(),
        "weight": b"\1" * 15,
    }
    assert sum(places["weight"]) == len(file)
    assert json.loads(header[8:])["__metadata__"] == {"step": "3"}


def _dtype(name: str) -> Any:
    return getattr(ml_dtypes, name, None) or np.dtype(name)


@pytest.mark.parametrize("name", SAFETENSORS_NAMES)
def test_every_dtype_of_the_format_begins_at_a_multiple_of_its_size(name: str) -> None:
    arrays = {"odd": np.ones(3, np.int8), "x": np.ones(3, _dtype(name)), "z": np.ones(3, np.float64)}
    _, places = safetensors_layout({key: (a.dtype.name, a.shape) for key, a in arrays.items()})
    assert all(at % DTYPE_ITEMSIZE[arrays[key].dtype.name] == 0 for key, (at, _) in places.items())
    at, n = places["x"]
    assert written(arrays)[at : at + n] == arrays["x"].tobytes()


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn", "complex128", "object"])
def test_a_dtype_that_the_format_lacks_is_refused(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"no dtype {dtype}"):
        safetensors_layout({"x": (dtype, (2,))})


def test_what_a_header_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="no tensor called __metadata__"):
        safetensors_layout({"__metadata__": ("int8", (1,))})
    with pytest.raises(TypeError, match="no Unicode text"):
        safetensors_layout({"\udcff": ("int8", (1,))})
    number: Any = 3
    with pytest.raises(TypeError, match="map of str"):
        safetensors_layout({}, {"step": number})


def test_a_header_that_no_reader_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writing, "MAX_HEADER_BYTES", 63)
    with pytest.raises(TypeError, match="a header of 64 bytes"):
        safetensors_layout({"x" * 9: ("int8", (1,))})


@pytest.mark.parametrize(
    "array",
    [
        np.ones((2, 3), np.float32).T,
        np.ones(3, ">f4"),
        [1.0],
        np.ma.masked_array([1.0]),
    ],
)
def test_what_is_no_plain_array_is_refused_before_a_byte_is_written(array: Any) -> None:
    file = io.BytesIO()
    with pytest.raises(TypeError):
        write_safetensors(file, {"a": np.ones(2), "x": array})
    assert file.getvalue() == b""
