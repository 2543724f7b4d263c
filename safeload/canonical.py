"""A tensor's canonical bytes: C order, little-endian, without padding. What value digests are taken of."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from safeload.tensors import ML_DTYPES_ITEMSIZE, DType, TensorSpec


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype of an element type, made from its name and never from a file's state."""
    if dtype.name in ML_DTYPES_ITEMSIZE:
        scalar: type[np.generic] = getattr(ml_dtypes, dtype.name)
        return np.dtype(scalar)
    native: np.dtype[Any] = np.dtype(dtype.name)
    return native.newbyteorder(">" if dtype.big_endian else "<")


def view(payload: memoryview | bytes | bytearray, spec: TensorSpec) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a read-only array over `payload`, of shape and dtype of `spec`, without a copy.

    Args:
        payload: Exactly the bytes of the tensor's extent.
        spec: What they are.
    """
    flat = np.frombuffer(payload, dtype=numpy_dtype(spec.dtype))
    if spec.strides is None:
        array = flat.reshape(spec.shape, order=spec.order)
    else:
        steps = tuple(step * flat.itemsize for step in spec.strides)
        # The parser has shown that the view's last element is the payload's last.
        array = np.ndarray(spec.shape, flat.dtype, buffer=flat, strides=steps)
    array.flags.writeable = False
    return array


def canonical_bytes(payload: memoryview | bytes | bytearray, spec: TensorSpec) -> memoryview | bytes | bytearray:
    """Return the value's C-order little-endian bytes: `payload` itself where it already is just that, else a copy."""
    if spec.is_canonical:
        return payload
    array = view(payload, spec)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).tobytes()
