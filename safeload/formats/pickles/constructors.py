"""The allow-listed calls: for each pair, the exact arguments that an honest pickle has, and the symbol that results.

Nothing here imports or calls what the file names. A policy says which of these pairs may be used; it cannot add one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Literal, NoReturn

from safeload.errors import Finding, FormatError
from safeload.formats.pickles.symbols import (
    Global,
    OrderedMapping,
    Payload,
    PendingArray,
    PendingDType,
    PendingQuantized,
    PendingRecord,
    PendingTensor,
    Refused,
    Storage,
)
from safeload.tensors import DTYPE_ITEMSIZE, ML_DTYPES_ITEMSIZE, DType, Extent

MAX_DIMENSIONS = 32
"""numpy's own bound up to 1.26; 64 since 2.0, which no tensor needs."""

MAX_NUMBER_KEYS = 4096
"""Keys of a dict that may be numbers: their hashes are the file's choice, and so is how long each takes to find. Those
of strings are not. An optimizer's state has one such key for each parameter."""

MAX_ARRAY_BYTES = (1 << 63) - 1
"""numpy counts an array's bytes in a signed 64-bit integer, and leaves dimensions of zero out when it does."""

_NUMERIC_CODES: Mapping[str, str] = {
    "b1": "bool",
    **{
        f"{letter}{bits // 8}": f"{kind}{bits}"
        for letter, kind in (("i", "int"), ("u", "uint"))
        for bits in (8, 16, 32, 64)
    },
    **{f"f{bits // 8}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"c{bits // 8}": f"complex{bits}" for bits in (64, 128)},
}
"""Type codes as `numpy.dtype.__reduce__` writes them: kind and item size, no byte order."""

_ML_FLAGS = frozenset({64, 80})
"""`flags` in the state of an ml_dtypes type: 80 up to version 0.5.1, 64 since. Both are honest; the difference
(NPY_USE_GETITEM and NPY_NEEDS_PYAPI) says nothing about the bytes."""


def refuse(code: str, message: str, offset: int | None, hint: str | None = None) -> NoReturn:
    """Raise a `FormatError` with one finding at `offset`."""
    raise FormatError(Finding(code, message, offset=offset, hint=hint))


def describe(value: object) -> str:
    """Say what a value on the stack is, in a few words and without its content."""
    match value:
        case Global():
            return f"the global {value}"
        case Refused():
            return "what was refused before"
        case Payload():
            return f"{value.kind} of {value.extent.nbytes} bytes"
        case PendingDType():
            return f"a dtype {value.name}"
        case PendingArray():
            return "an array" if value.dtype is None else f"an array of {value.dtype}, shape {list(value.shape)}"
        case PendingRecord():
            return f"a {value.rule.name}"
        case Storage():
            return f"a {value.type_name} of {value.n_elements}"
        case PendingTensor():
            return f"a tensor of {value.dtype}, shape {list(value.shape)}"
        case PendingQuantized():
            return f"a quantized tensor of {value.values.dtype}, shape {list(value.values.shape)}"
        case None | bool():
            return repr(value)
        case int() if -(1 << 63) <= value < 1 << 64:
            return f"the integer {value}"
        case str():
            return f"the string {value[:40]!r}"
        case tuple() | list() | dict():
            return f"a {type(value).__name__.replace('OrderedMapping', 'OrderedDict')} of {len(value)}"
        case _:
            return f"a value of type {type(value).__name__}"


def short_text(value: object) -> str | None:
    """Return a short string, which Python 2 writes as bytes; None if it is neither or not ASCII."""
    if type(value) is str:
        return value
    if type(value) is Payload and value.kind == "str" and value.head is not None and value.head.isascii():
        return value.head.decode("ascii")
    return None


def _is_int(value: object, wanted: int) -> bool:
    # `True == 1` in Python, and a pickle can write either.
    return type(value) is int and value == wanted


def _shape(value: object, offset: int) -> tuple[int, ...]:
    """Return a shape whose every dimension is an integer that numpy can count with."""
    if type(value) is not tuple:
        refuse("bad-shape", f"a shape must be a tuple of integers, found {describe(value)}", offset)
    if len(value) > MAX_DIMENSIONS:
        refuse("bad-shape", f"a shape has at most {MAX_DIMENSIONS} dimensions, found {len(value)}", offset)
    for n in value:
        if type(n) is not int or not 0 <= n < 1 << 63:
            refuse("bad-shape", f"a dimension must be an integer from 0 to 2**63 - 1, found {describe(n)}", offset)
    return value


def _complete(
    array: PendingArray, dtype: object, shape: object, payload: object, offset: int, *, order: Literal["C", "F"] = "C"
) -> None:
    """Give `array` its state, after checking that the payload holds exactly what dtype and shape say."""
    lengths = _shape(shape, offset)
    if array.extent is not None:
        refuse("state-twice", "an array's state is set once, found a second BUILD", offset)
    if type(dtype) is not PendingDType or dtype.dtype is None:
        refuse("bad-dtype", f"an array needs a dtype with its state, found {describe(dtype)}", offset)
    if type(payload) is not Payload:
        refuse("bad-payload", f"an array's data must be bytes, found {describe(payload)}", offset)
    # Dimensions and their number are bounded, so the product is an integer of some hundred bytes at most: nothing
    # overflows here, and nothing is allocated from it.
    itemsize = dtype.dtype.itemsize
    if math.prod(n or 1 for n in lengths) * itemsize > MAX_ARRAY_BYTES:
        found = f"{dtype.dtype} of shape {str(lengths)[:80]}"
        refuse("bad-shape", f"an array has at most 2**63 - 1 bytes, found {found}", offset)
    nbytes = math.prod(lengths) * itemsize
    if payload.extent.nbytes != nbytes:
        refuse(
            "payload-size",
            f"shape and dtype {dtype.dtype} need {nbytes} bytes, the payload has {payload.extent.nbytes}",
            offset,
        )
    array.dtype, array.shape, array.order, array.extent = dtype.dtype, lengths, order, payload.extent


def _reconstruct(args: tuple[object, ...], offset: int) -> PendingArray:
    """`_reconstruct(ndarray, (0,), b"b")`: an empty array whose state follows by BUILD (numpy `array_reduce`)."""
    match args:
        case (Global(module="numpy", name="ndarray"), tuple(shape), Payload(head=b"b", kind="bytes" | "str")):
            if len(shape) == 1 and _is_int(shape[0], 0):
                return PendingArray(offset)
    refuse("bad-arguments", "_reconstruct takes exactly (numpy.ndarray, (0,), b'b')", offset)


def _frombuffer(args: tuple[object, ...], offset: int) -> PendingArray:
    """`_frombuffer(bytes, dtype, shape, order)`: an array in protocol 5 (numpy `_core/numeric.py`)."""
    if len(args) != 4 or type(args[3]) is not str or args[3] not in {"C", "F"}:
        refuse("bad-arguments", "_frombuffer takes exactly (bytes, dtype, shape, 'C' or 'F')", offset)
    payload, dtype, shape, order = args
    if type(payload) is Payload and payload.kind == "str":
        refuse("bad-payload", "_frombuffer takes bytes, found a Python 2 string", offset)
    array = PendingArray(offset)
    _complete(array, dtype, shape, payload, offset, order="F" if order == "F" else "C")
    return array


def _scalar(args: tuple[object, ...], offset: int) -> PendingArray:
    """`scalar(dtype, bytes)`: one element, read as an array of rank 0 (numpy `multiarray.scalar`)."""
    if len(args) != 2:
        refuse("bad-arguments", "scalar takes exactly (dtype, bytes)", offset)
    dtype, payload = args
    if type(payload) is Payload and payload.kind == "bytearray":
        refuse("bad-payload", "scalar takes bytes, found a bytearray", offset)
    array = PendingArray(offset)
    _complete(array, dtype, (), payload, offset)
    # numpy makes True of every byte but 0 here, where an array keeps the byte.
    if array.dtype == DType("bool") and (type(payload) is not Payload or payload.head not in {b"\0", b"\1"}):
        refuse("bad-payload", "a scalar bool is the byte 0 or 1, found another", offset)
    return array


def _dtype(args: tuple[object, ...], offset: int) -> PendingDType:
    """`dtype(code, False, True)` with a numeric code or an ml_dtypes type (numpy `arraydescr_reduce`)."""
    if len(args) != 3 or not (args[1] is False or _is_int(args[1], 0)) or not (args[2] is True or _is_int(args[2], 1)):
        refuse("bad-arguments", "numpy.dtype takes exactly (code, False, True)", offset)
    code = args[0]
    if type(code) is Global and code.module == "ml_dtypes" and code.name in ML_DTYPES_ITEMSIZE:
        return PendingDType(code.name)
    text = short_text(code)
    if text is None:
        refuse("bad-dtype", f"a dtype is given by its code or an ml_dtypes type, found {describe(code)}", offset)
    if text not in _NUMERIC_CODES:
        refuse(
            "dtype-not-numeric",
            f"expected a numeric type code such as 'f4' or 'i1', found {text[:40]!r}",
            offset,
            "object, string, structured, date and platform-dependent types are never loaded; convert the array first",
        )
    return PendingDType(_NUMERIC_CODES[text])


def _encode(args: tuple[object, ...], offset: int) -> Payload:
    """`_codecs.encode(text, "latin1")`: how protocols 0 to 2 write bytes (CPython `save_bytes`)."""
    match args:
        case (str() as text, "latin1"):
            try:
                data = text.encode("latin-1")
            except UnicodeEncodeError:
                refuse("bad-payload", "bytes written as text may hold only the characters U+0000 to U+00FF", offset)
            return Payload(Extent(offset, len(data), data), "bytes", data)
        case _:
            refuse("bad-arguments", "_codecs.encode takes exactly (text, 'latin1')", offset)


def _bytes(args: tuple[object, ...], offset: int) -> Payload:
    """`bytes()`: how protocols 0 to 2 write empty bytes (CPython `save_bytes`)."""
    if args:
        refuse("bad-arguments", f"bytes takes no arguments here, found {len(args)}", offset)
    return Payload(Extent(offset, 0, b""), "bytes", b"")


def _reconstructor(args: tuple[object, ...], offset: int) -> PendingRecord:
    """`_reconstructor(record, object, None)`: how protocols 0 and 1 create an instance (CPython `copyreg`)."""
    match args:
        case (Global(record=rule), Global(module="__builtin__" | "builtins", name="object"), None) if rule is not None:
            return PendingRecord(rule, offset)
        case _:
            refuse("bad-arguments", "_reconstructor takes exactly (a declared record, object, None)", offset)


def _ordered_dict(args: tuple[object, ...], offset: int) -> OrderedMapping:
    """`OrderedDict()`, or with a list of pairs as Python 2 writes it (CPython `collections`)."""
    if not args:
        return OrderedMapping()
    if len(args) != 1 or type(args[0]) is not list:
        refuse("bad-arguments", "OrderedDict takes nothing or one list of pairs", offset)
    ordered = OrderedMapping()
    for pair in args[0]:
        if type(pair) not in {list, tuple} or len(pair) != 2:
            refuse("bad-arguments", f"OrderedDict takes pairs of key and value, found {describe(pair)}", offset)
        set_item(ordered, pair[0], pair[1], offset)
    return ordered


def _jax_array(args: tuple[object, ...], offset: int) -> PendingArray:
    """`_reconstruct_array(function, arguments, state, aval state)`: the numpy array that a jax array wraps.

    Source: jax `_src/array.py`. `function` and `arguments` are those of the wrapped array's own `__reduce__`.
    """
    match args:
        case (
            Global(name="_reconstruct", module="numpy.core.multiarray" | "numpy._core.multiarray"),
            tuple() as inner,
            tuple() as state,
            dict() as aval,
        ):
            pass
        case _:
            refuse("bad-arguments", "a jax array is written as (_reconstruct, arguments, state, aval state)", offset)
    for key, value in aval.items():
        # `weak_type` only matters for type promotion; `named_shape` was always empty outside of xmap.
        if not ((key == "weak_type" and type(value) is bool) or (key == "named_shape" and value == {})):
            refuse("bad-arguments", "a jax array's aval state holds weak_type and an empty named_shape only", offset)
    array = _reconstruct(inner, offset)
    build_array(array, state, offset)
    return array


def build_array(array: PendingArray, state: object, offset: int) -> None:
    """Apply `(1, shape, dtype, is_fortran, bytes)`, the state of `ndarray.__setstate__` (numpy `array_setstate`)."""
    if type(state) is not tuple or len(state) != 5 or not _is_int(state[0], 1) or type(state[3]) is not bool:
        refuse("bad-state", "an array's state is exactly (1, shape, dtype, True or False, bytes)", offset)
    _, shape, dtype, is_fortran, payload = state
    if type(payload) is Payload and payload.kind == "bytearray":
        refuse("bad-payload", "an array's state holds bytes, found a bytearray", offset)
    _complete(array, dtype, shape, payload, offset, order="F" if is_fortran else "C")


def build_dtype(dtype: PendingDType, state: object, offset: int) -> None:
    """Compare a dtype's state with what its type implies. It is never applied.

    numpy takes item size, flags, fields and metadata from this tuple; a hostile one turns raw bytes into object
    pointers, or makes the process-wide `ml_dtypes.bfloat16` read out of bounds. Only the byte order is news.
    """
    if dtype.dtype is not None:
        refuse("state-twice", "a dtype's state is set once, found a second BUILD", offset)
    if type(state) is not tuple or len(state) != 8:
        refuse("bad-dtype-state", f"a numeric dtype's state is a tuple of 8, found {describe(state)}", offset)
    version, order_symbol, subarray, names, fields, itemsize, alignment, flags = state
    order = short_text(order_symbol)
    size = DTYPE_ITEMSIZE[dtype.name]
    if not _is_int(version, 3) or (subarray, names, fields) != (None, None, None):
        refuse("bad-dtype-state", "a numeric dtype's state begins (3, byte order, None, None, None)", offset)
    if dtype.name in ML_DTYPES_ITEMSIZE:
        expected = order == "<" and _is_int(itemsize, size) and _is_int(alignment, size)
        expected = expected and type(flags) is int and flags in _ML_FLAGS
        wanted = f"'<', item size {size}, alignment {size} and flags 64 or 80"
    else:
        expected = order in ({"|"} if size == 1 else {"<", ">"})
        expected = expected and _is_int(itemsize, -1) and _is_int(alignment, -1) and _is_int(flags, 0)
        wanted = f"{repr('|') if size == 1 else repr('<') + ' or ' + repr('>')}, item size -1, alignment -1 and flags 0"
    if not expected:
        found = ", ".join(describe(part) for part in (order_symbol, itemsize, alignment, flags))
        refuse("bad-dtype-state", f"the state of a {dtype.name} dtype has byte order {wanted}; found {found}", offset)
    dtype.dtype = DType(dtype.name, big_endian=order == ">")


def build_record(record: PendingRecord, state: object, offset: int) -> None:
    """Apply a dict with exactly the record's fields (CPython `load_build`, without `__setstate__` and slots)."""
    if record.fields is not None:
        refuse("state-twice", f"a {record.rule.name}'s state is set once, found a second BUILD", offset)
    if type(state) is not dict:
        refuse("bad-state", f"a {record.rule.name}'s state is a dict of its fields, found {describe(state)}", offset)
    if set(state) != set(record.rule.fields):
        found = [repr(key)[:40] for key in islice(state, 8)] + ["..."] * (len(state) > 8)
        refuse(
            "bad-record-fields",
            f"a {record.rule.name} has exactly the fields {', '.join(record.rule.fields)}; "
            f"found {', '.join(found) or 'none'}",
            offset,
        )
    record.fields = {name: state[name] for name in record.rule.fields}


def new_record(rule: Global, args: object, offset: int) -> PendingRecord:
    """`cls.__new__(cls)`: an instance whose state follows by BUILD (CPython `load_newobj`)."""
    if rule.record is None:
        refuse("bad-arguments", f"only a declared record can be instantiated, found {rule}", offset)
    if args != ():
        refuse("bad-arguments", f"a {rule.name} is created without arguments, found {describe(args)}", offset)
    return PendingRecord(rule.record, offset)


def set_item(mapping: dict[object, object], key: object, value: object, offset: int) -> None:
    """Store one item, as SETITEM does; the key must be plain, and new."""
    if type(key) is Payload:
        text = short_text(key)
        key = key if text is None else text
    # A tuple is refused as a key: hashing one that shares its parts over and over takes exponential time.
    # An integer of more than 64 bits is refused too: any number of those can be made to share one hash.
    plain = key is None or type(key) in {str, float, bool} or (type(key) is int and -(1 << 63) <= key < 1 << 63)
    if not plain:
        refuse("bad-key", f"a key must be a string, a number of 64 bits or None, found {describe(key)}", offset)
    if type(key) is not str and len(mapping) > MAX_NUMBER_KEYS:
        refuse(
            "too-many-number-keys", f"a dict has at most {MAX_NUMBER_KEYS} keys before one that is no string", offset
        )
    if key in mapping:
        refuse("duplicate-key", f"each key appears once, found a second {key!r:.40}", offset)
    mapping[key] = value


Constructor = Callable[[tuple[object, ...], int], object]

_PYTHON_2_NAMES = range(3)
"""Protocols in which `pickle.load` maps Python 2's module names (`__builtin__`, `copy_reg`) to today's."""
_ANY_PROTOCOL = range(6)

CONSTRUCTORS: Mapping[tuple[str, str], tuple[Constructor | None, range]] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): (_reconstruct, _ANY_PROTOCOL) for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): (_scalar, _ANY_PROTOCOL) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): (_frombuffer, _ANY_PROTOCOL) for core in ("core", "_core")},
    ("numpy", "ndarray"): (None, _ANY_PROTOCOL),
    ("numpy", "dtype"): (_dtype, _ANY_PROTOCOL),
    **{("ml_dtypes", name): (None, _ANY_PROTOCOL) for name in ML_DTYPES_ITEMSIZE},
    ("_codecs", "encode"): (_encode, _ANY_PROTOCOL),
    ("__builtin__", "bytes"): (_bytes, _PYTHON_2_NAMES),
    ("builtins", "bytes"): (_bytes, _ANY_PROTOCOL),
    ("copy_reg", "_reconstructor"): (_reconstructor, _PYTHON_2_NAMES),
    ("copyreg", "_reconstructor"): (_reconstructor, _ANY_PROTOCOL),
    ("__builtin__", "object"): (None, _PYTHON_2_NAMES),
    ("builtins", "object"): (None, _ANY_PROTOCOL),
    ("collections", "OrderedDict"): (_ordered_dict, _ANY_PROTOCOL),
    ("jax._src.array", "_reconstruct_array"): (_jax_array, _ANY_PROTOCOL),
    # The same call as jax wrote it before 0.4.1 (`jax/_src/device_array.py`).
    ("jax._src.device_array", "reconstruct_device_array"): (_jax_array, _ANY_PROTOCOL),
}
"""Every pair that any policy can allow: what a call of it makes (None where it is only ever an argument), and the
protocols in which `pickle.load` would find it."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""A name that can match an allowed pair. A dot would walk attributes (CPython `_getattribute`)."""
