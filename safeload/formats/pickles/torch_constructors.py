"""The calls by which PyTorch writes tensors, known only to the machine that reads PyTorch's own files.

As with the others: for each pair the exact arguments that an honest file has, and the symbol that results. Source:
`torch/_utils.py`, `torch/_tensor.py` and `torch/storage.py`, from version 1.0 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from safeload.errors import Finding, PolicyError
from safeload.formats.pickles.constructors import CONSTRUCTORS, MAX_DIMENSIONS, Constructor, describe, refuse
from safeload.formats.pickles.symbols import Global, OrderedMapping, PendingQuantized, PendingTensor, Storage
from safeload.tensors import DTYPE_ITEMSIZE, DType, span

_BIGGEST = (1 << 63) - 1
"""PyTorch counts bytes and elements in signed 64-bit integers."""

STORAGE_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "DoubleStorage": "float64",
        "FloatStorage": "float32",
        "HalfStorage": "float16",
        "BFloat16Storage": "bfloat16",
        "LongStorage": "int64",
        "IntStorage": "int32",
        "ShortStorage": "int16",
        "CharStorage": "int8",
        "ByteStorage": "uint8",
        "BoolStorage": "bool",
        "ComplexDoubleStorage": "complex128",
        "ComplexFloatStorage": "complex64",
    }
)
"""Element type of each storage class of module `torch`."""

QUANTIZED_DTYPES: Mapping[str, str] = MappingProxyType(
    {"QInt8Storage": "int8", "QUInt8Storage": "uint8", "QInt32Storage": "int32"}
)
"""The same for integers that stand for numbers by a scale; those of less than a byte (QUInt4x2) are not read."""

UNTYPED = "UntypedStorage"
"""Storage class of module `torch.storage` for element types that came after those above; it counts bytes."""

UNTYPED_DTYPES: frozenset[str] = frozenset(
    {
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    }
)
"""Element types that are written over an untyped storage, by their names in module `torch`; the float8 types are those
of ml_dtypes. The others of this kind (`bits8`, `complex32`, `float4_e2m1fn_x2`) have no counterpart there."""

_IN_STEAD: Mapping[str, str] = MappingProxyType(
    {
        "torch._utils._rebuild_sparse_tensor": "sparse tensors are not read; save `tensor.to_dense()`",
        "torch.serialization._get_layout": "sparse tensors are not read; save `tensor.to_dense()`",
        "torch._utils._rebuild_nested_tensor": "nested tensors are not read; save a list of tensors",
        "torch.nested._internal.nested_tensor._rebuild_njt": "nested tensors are not read; save a list of tensors",
        "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor has no data; give the model data, then save it",
        "torch._utils._rebuild_wrapper_subclass": "subclasses of tensors are not read; save plain tensors",
        "torch._tensor._rebuild_from_type_v2": "subclasses of tensors, and tensors with attributes, are not read; "
        "save plain tensors",
        "torch._utils._rebuild_device_tensor_from_numpy": "tensors of XLA devices are not read; save `tensor.cpu()`",
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": "tensors of XLA devices are not read; "
        "save `tensor.cpu()`",
        "torch.storage._load_from_bytes": "it unpickles what it is given; save the tensors in one file",
        "torch.jit._pickle.restore_type_tag": "TorchScript is a program; save a state dict instead",
        **{
            f"torch.{name}": "elements of less than a byte are not read; save them as uint8"
            for name in ("QUInt4x2Storage", "QUInt2x4Storage", "float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2")
        },
        "torch.complex32": "complex numbers of 32 bits are not read; save them as complex64",
    }
)


def advice(full: str) -> str | None:
    """Say what to save instead of what a global `module.name` belongs to, where that is known."""
    if full.startswith(("torch.nn.modules.", "torch.nn.parallel.")):
        return "the file holds a model and not its state: save `model.state_dict()`"
    if full.startswith("torch."):
        return _IN_STEAD.get(full, "of PyTorch only tensors, parameters and shapes are read; save those and plain data")
    return None


def storage_type(value: object, offset: int) -> tuple[str, int]:
    """Return name and itemsize of the storage class that a persistent id names."""
    match value:
        case Global(module="torch", name=name) if name in STORAGE_DTYPES or name in QUANTIZED_DTYPES:
            return name, DTYPE_ITEMSIZE[STORAGE_DTYPES.get(name) or QUANTIZED_DTYPES[name]]
        case Global(module="torch.storage", name=name) if name == UNTYPED:
            return name, 1
    return refuse("bad-storage", f"a storage has one of PyTorch's storage classes, found {describe(value)}", offset)


def _numbers(value: object, what: str, offset: int) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > MAX_DIMENSIONS:
        refuse("bad-shape", f"a {what} is a tuple of at most {MAX_DIMENSIONS}, found {describe(value)}", offset)
    for number in value:
        if type(number) is not int or not 0 <= number <= _BIGGEST:
            refuse("bad-shape", f"a {what} has integers from 0 to 2**63 - 1, found {describe(number)}", offset)
    return value


def layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Literal["C", "F"], tuple[int, ...] | None]:
    """Return the order of a view, and its strides where it is contiguous in neither.

    A dimension of length 1 has a stride that never counts, and PyTorch writes any number there: it comes out as 0.

    Args:
        shape: Length of each dimension.
        strides: Steps along each, in elements.
    """
    if 0 in shape or strides == _contiguous(shape):
        return "C", None
    effective = tuple(step if length > 1 else 0 for length, step in zip(shape, strides, strict=True))
    for order, dense in (("C", _contiguous(shape)), ("F", _contiguous(shape[::-1])[::-1])):
        if effective == tuple(step if length > 1 else 0 for length, step in zip(shape, dense, strict=True)):
            return ("C" if order == "C" else "F"), None
    return "C", effective


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _view(storage: Storage, dtype: str, view: tuple[object, object, object], offset: int) -> PendingTensor:
    """Return a view of a storage, given by storage offset, size and stride, that lies inside it.

    Source: ATen `checkInBoundsForStorage`.
    """
    first, size, stride = view
    shape, strides = _numbers(size, "shape", offset), _numbers(stride, "stride", offset)
    if len(shape) != len(strides):
        refuse("bad-shape", f"a stride for each dimension, found {len(strides)} for {len(shape)}", offset)
    if type(first) is not int or not 0 <= first <= _BIGGEST:
        refuse("bad-view", f"a view begins at an index from 0 on, found {describe(first)}", offset)
    itemsize = DTYPE_ITEMSIZE[dtype]
    if math.prod(n or 1 for n in shape) * itemsize > _BIGGEST:
        refuse("bad-shape", f"a tensor has at most 2**63 - 1 bytes, found shape {str(shape)[:80]}", offset)
    n_spanned = span(shape, strides)
    have = storage.nbytes // itemsize
    if n_spanned and first + n_spanned > have:
        refuse(
            "view-out-of-bounds",
            f"a view lies inside its storage of {have} elements, found one that ends at {first + n_spanned}",
            offset,
        )
    order, steps = layout(shape, strides)
    return PendingTensor(storage, DType(dtype), shape, order, steps, first if n_spanned else 0, n_spanned, offset)


def _check_grad(dtype: str, requires_grad: object, hooks: object, offset: int) -> None:
    if type(requires_grad) is not bool:
        refuse("bad-arguments", f"requires_grad is True or False, found {describe(requires_grad)}", offset)
    if requires_grad and not dtype.startswith(("float", "bfloat", "complex")):
        refuse("bad-arguments", f"only floating-point tensors require a gradient, found one of {dtype}", offset)
    # Note [Don't serialize hooks] in torch/_utils.py: what is written is always empty. A hook would be a function.
    if type(hooks) is not OrderedMapping or hooks or hooks.has_attributes:
        refuse("bad-arguments", f"backward hooks are an empty OrderedDict, found {describe(hooks)}", offset)
    hooks.is_sealed = True


def _rebuild_tensor(args: tuple[object, ...], offset: int) -> PendingTensor:
    """`_rebuild_tensor(storage, storage offset, size, stride)`, as before version 0.4."""
    match args:
        case (Storage(type_name=name) as storage, first, size, stride) if name in STORAGE_DTYPES:
            return _view(storage, STORAGE_DTYPES[name], (first, size, stride), offset)
    return refuse(
        "bad-arguments", "_rebuild_tensor takes exactly (typed storage, storage offset, size, stride)", offset
    )


def _refuse_metadata(args: tuple[object, ...], n_plain: int, offset: int) -> None:
    if len(args) == n_plain + 1 and type(args[-1]) is dict and args[-1]:
        raise PolicyError(
            Finding(
                "view-not-resolved",
                "a tensor is its stored numbers, found one marked to be conjugated or negated when it is read",
                offset=offset,
                hint="save `tensor.resolve_conj().resolve_neg()`",
            )
        )


def _rebuild_tensor_v2(args: tuple[object, ...], offset: int) -> PendingTensor:
    """`_rebuild_tensor_v2(storage, storage offset, size, stride, requires_grad, hooks)`: since version 0.4."""
    _refuse_metadata(args, 6, offset)
    match args:
        case (Storage(type_name=name) as storage, first, size, stride, grad, hooks) if name in STORAGE_DTYPES:
            _check_grad(STORAGE_DTYPES[name], grad, hooks, offset)
            return _view(storage, STORAGE_DTYPES[name], (first, size, stride), offset)
    return refuse(
        "bad-arguments",
        "_rebuild_tensor_v2 takes exactly (typed storage, storage offset, size, stride, requires_grad, hooks)",
        offset,
    )


def _rebuild_tensor_v3(args: tuple[object, ...], offset: int) -> PendingTensor:
    """`_rebuild_tensor_v3(.., dtype)`: the same over an untyped storage, for element types since version 2.1."""
    _refuse_metadata(args, 7, offset)
    match args:
        case (Storage(type_name=name) as storage, first, size, stride, grad, hooks, dtype) if name == UNTYPED:
            pass
        case _:
            refuse(
                "bad-arguments",
                "_rebuild_tensor_v3 takes exactly (untyped storage, storage offset, size, stride, requires_grad, "
                "hooks, dtype)",
                offset,
            )
    if type(dtype) is not Global or dtype.module != "torch" or dtype.name not in UNTYPED_DTYPES:
        found = describe(dtype)
        refuse("bad-dtype", f"an untyped storage is read as one of PyTorch's newer dtypes, found {found}", offset)
    _check_grad(dtype.name, grad, hooks, offset)
    return _view(storage, dtype.name, (first, size, stride), offset)


def _rebuild_qtensor(args: tuple[object, ...], offset: int) -> PendingQuantized:
    """`_rebuild_qtensor(storage, storage offset, size, stride, quantizer, requires_grad, hooks)`."""
    match args:
        case (Storage(type_name=name) as storage, first, size, stride, quantizer, grad, hooks) if (
            name in QUANTIZED_DTYPES
        ):
            _check_grad(QUANTIZED_DTYPES[name], grad, hooks, offset)
            values = _view(storage, QUANTIZED_DTYPES[name], (first, size, stride), offset)
        case _:
            refuse(
                "bad-arguments",
                "_rebuild_qtensor takes exactly (storage of quantized integers, storage offset, size, stride, "
                "quantizer, requires_grad, hooks)",
                offset,
            )
    match quantizer:
        case (Global(module="torch", name="per_tensor_affine"), float() as scale, int() as zero_point) if (
            type(zero_point) is int and scale > 0 and math.isfinite(scale) and -(1 << 63) <= zero_point < 1 << 63
        ):
            return PendingQuantized(values, {"scale": scale, "zero_point": zero_point})
        case (
            Global(module="torch", name="per_channel_affine"),
            PendingTensor() as scales,
            PendingTensor() as zero_points,
            int() as axis,
        ) if type(axis) is int and 0 <= axis < len(values.shape):
            length = (values.shape[axis],)
            whole = scales.dtype.name in {"float32", "float64"} and zero_points.dtype.name in {"int32", "int64"}
            if whole and scales.shape == zero_points.shape == length:
                return PendingQuantized(values, {"scales": scales, "zero_points": zero_points, "axis": axis})
    return refuse(
        "bad-quantizer",
        "a quantizer is exactly (per_tensor_affine, positive scale, zero point), or (per_channel_affine, scales, "
        f"zero points, axis) with one of each along the axis; found {describe(quantizer)}",
        offset,
    )


def _parameter(data: object, requires_grad: object, hooks: object, offset: int) -> PendingTensor | PendingQuantized:
    match data:
        case PendingTensor(dtype=dtype):
            name = dtype.name
        case PendingQuantized(values=PendingTensor(dtype=dtype)):
            name = dtype.name
        case _:
            refuse("bad-arguments", f"a parameter is made from a tensor, found {describe(data)}", offset)
    _check_grad(name, requires_grad, hooks, offset)
    return data


def _rebuild_parameter(args: tuple[object, ...], offset: int) -> PendingTensor | PendingQuantized:
    """`_rebuild_parameter(tensor, requires_grad, hooks)`: read as its tensor."""
    if len(args) != 3:
        refuse("bad-arguments", "_rebuild_parameter takes exactly (tensor, requires_grad, hooks)", offset)
    return _parameter(*args, offset)


def _rebuild_parameter_with_state(args: tuple[object, ...], offset: int) -> PendingTensor | PendingQuantized:
    """`_rebuild_parameter_with_state(tensor, requires_grad, hooks, state)`: only without a state."""
    if len(args) != 4 or type(args[3]) not in {dict, tuple} or args[3]:
        refuse(
            "bad-arguments",
            "_rebuild_parameter_with_state takes exactly (tensor, requires_grad, hooks, an empty state)",
            offset,
            "attributes of a parameter are not read; save plain tensors",
        )
    return _parameter(*args[:3], offset)


def _size(args: tuple[object, ...], offset: int) -> tuple[int, ...]:
    """`torch.Size((..))`: a shape, read as a tuple."""
    if len(args) != 1:
        refuse("bad-arguments", "torch.Size takes exactly one tuple of integers", offset)
    return _numbers(args[0], "shape", offset)


_ANY_PROTOCOL = range(6)

TORCH_CONSTRUCTORS: Mapping[tuple[str, str], tuple[Constructor | None, range]] = MappingProxyType(
    {
        ("torch._utils", "_rebuild_tensor"): (_rebuild_tensor, _ANY_PROTOCOL),
        ("torch._utils", "_rebuild_tensor_v2"): (_rebuild_tensor_v2, _ANY_PROTOCOL),
        ("torch._utils", "_rebuild_tensor_v3"): (_rebuild_tensor_v3, _ANY_PROTOCOL),
        ("torch._utils", "_rebuild_parameter"): (_rebuild_parameter, _ANY_PROTOCOL),
        ("torch._utils", "_rebuild_parameter_with_state"): (_rebuild_parameter_with_state, _ANY_PROTOCOL),
        ("torch._utils", "_rebuild_qtensor"): (_rebuild_qtensor, _ANY_PROTOCOL),
        ("torch", "Size"): (_size, _ANY_PROTOCOL),
        **{
            ("torch", name): (None, _ANY_PROTOCOL)
            for name in (*STORAGE_DTYPES, *QUANTIZED_DTYPES, *sorted(UNTYPED_DTYPES))
        },
        **{("torch", name): (None, _ANY_PROTOCOL) for name in ("per_tensor_affine", "per_channel_affine")},
        ("torch.storage", UNTYPED): (None, _ANY_PROTOCOL),
    }
)
"""The pairs that only PyTorch's own files may use, as `CONSTRUCTORS` has those of all pickles."""

ALL_CONSTRUCTORS: Mapping[tuple[str, str], tuple[Constructor | None, range]] = MappingProxyType(
    {**CONSTRUCTORS, **TORCH_CONSTRUCTORS}
)
