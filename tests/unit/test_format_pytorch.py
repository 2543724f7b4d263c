"""Claims of `safeload.formats.pytorch`: PyTorch's files come out as the tensors that it would load, or not at all.

The samples are bytes. That PyTorch 2.9.1 and 2.13.0 load such files to the same values was seen by hand.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safeload.canonical import canonical_bytes
from safeload.digests import sha256_hex
from safeload.errors import FormatError, LimitError, PolicyError, RejectedError
from safeload.formats import MemorySource, Parsed
from safeload.formats.pickles import parse_pickle, results
from safeload.formats.pickles.torch_constructors import (
    QUANTIZED_DTYPES,
    STORAGE_DTYPES,
    TORCH_CONSTRUCTORS,
    UNTYPED_DTYPES,
    layout,
)
from safeload.formats.pytorch import is_legacy, parse_pytorch, parse_pytorch_legacy
from safeload.policy import Policy, load_policy
from safeload.scanning import parse as parse_file
from safeload.scanning import scan
from safeload.tensors import RecordValue, TensorSpec, Value, span
from tests import torch_sample
from tests.streams import Writer, op, policy_with
from tests.torch_sample import (
    ITEMSIZE,
    WEIGHT,
    Storage,
    Torch,
    dense,
    each_container,
    floats,
    members,
    torch_legacy,
    torch_zip,
    zipped,
)

POLICY = load_policy("numpy-quantized")
CONTAINERS = list(each_container())
Make = Callable[[Callable[[Torch], bytes], Sequence[Storage]], bytes]
each = pytest.mark.parametrize("make", [make for _, make in CONTAINERS], ids=[name for name, _ in CONTAINERS])
w = Writer(2)
t = Torch(w)


def parse(data: bytes, policy: Policy = POLICY) -> Parsed:
    kind, parsed = parse_file(MemorySource(data), "model.bin", policy)
    assert kind == "pytorch"
    return parsed


def accepted(data: bytes) -> Parsed:
    parsed = parse(data)
    assert parsed.refusal is None
    return parsed


def refusal(data: bytes, policy: Policy = POLICY) -> RejectedError:
    parsed = parse(data, policy)
    assert parsed.refusal is not None
    assert (parsed.value, parsed.tensors) == (None, ())
    return parsed.refusal


def zip_of(value: bytes, *storages: Storage) -> bytes:
    return torch_zip(t.pickle(value), storages)


def content(spec: TensorSpec, data: bytes) -> bytes:
    """The value's C-order little-endian bytes."""
    extent = spec.extent
    return bytes(canonical_bytes(data[extent.offset : extent.offset + extent.nbytes], spec))


# ---------------------------------------------------------------- values


@each
def test_each_container_and_protocol_holds_the_same_tensors(make: Make) -> None:
    data = make(lambda t: t.mapping({"w": t.tensor(WEIGHT, (2, 3))}), [WEIGHT])
    parsed = accepted(data)
    (spec,) = parsed.tensors
    assert parsed.value == {"w": spec}
    assert (spec.name, spec.dtype.name, spec.shape, spec.order, spec.strides) == ("w", "float32", (2, 3), "C", None)
    assert data[spec.extent.offset :][: spec.extent.nbytes] == WEIGHT.data
    assert {"torch._utils._rebuild_tensor_v2", "torch.FloatStorage"} <= set(parsed.globals)


@each
def test_views_share_their_storage_and_ties_their_extent(make: Make) -> None:
    def value(t: Torch) -> bytes:
        return t.mapping(
            {
                "whole": t.tensor(WEIGHT, (2, 3)),
                "tie": t.tensor(WEIGHT, (2, 3)),
                "turned": t.tensor(WEIGHT, (3, 2), (1, 3)),
                "corner": t.tensor(WEIGHT, (2, 2), (3, 1), 1),
                "column": t.tensor(WEIGHT, (2,), (3,), 2),
                "row": t.tensor(WEIGHT, (3,), first=3),
            }
        )

    data = make(value, [WEIGHT])
    specs = {spec.name: spec for spec in accepted(data).tensors}
    assert specs["whole"].extent == specs["tie"].extent == specs["turned"].extent
    assert (specs["turned"].order, specs["turned"].strides) == ("F", None)
    assert (specs["corner"].strides, specs["column"].strides, specs["row"].strides) == ((3, 1), (3,), None)
    start = specs["whole"].extent.offset
    assert (specs["corner"].extent.offset, specs["corner"].extent.nbytes) == (start + 4, 20)
    found = {name: struct.unpack(f"<{spec.n_elements}f", content(spec, data)) for name, spec in specs.items()}
    assert found == {
        "whole": (0, 1, 2, 3, 4, 5),
        "tie": (0, 1, 2, 3, 4, 5),
        "turned": (0, 3, 1, 4, 2, 5),
        "corner": (1, 2, 4, 5),
        "column": (2, 5),
        "row": (3, 4, 5),
    }


@pytest.mark.parametrize(("kind", "dtype"), STORAGE_DTYPES.items())
def test_each_storage_class_is_read_as_its_dtype(kind: str, dtype: str) -> None:
    storage = Storage("0", kind, bytes(range(2 * ITEMSIZE[kind])))
    data = zip_of(t.tensor(storage, (2,)), storage)
    (spec,) = accepted(data).tensors
    assert (spec.dtype.name, spec.extent.nbytes) == (dtype, len(storage.data))
    assert content(spec, data) == storage.data


@pytest.mark.parametrize("dtype", sorted(UNTYPED_DTYPES))
def test_each_newer_dtype_is_read_over_an_untyped_storage(dtype: str) -> None:
    itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    storage = Storage("0", "UntypedStorage", bytes(range(3 * itemsize)))
    data = zip_of(t.tensor(storage, (2,), first=1, dtype=dtype), storage)
    (spec,) = accepted(data).tensors
    assert (spec.dtype.name, content(spec, data)) == (dtype, storage.data[itemsize:])


def test_an_untyped_storage_is_measured_in_elements_of_the_tensor() -> None:
    storage = Storage("0", "UntypedStorage", bytes(7))
    assert accepted(zip_of(t.tensor(storage, (3,), dtype="uint16"), storage)).refusal is None
    assert refusal(zip_of(t.tensor(storage, (4,), dtype="uint16"), storage)).findings[0].code == "view-out-of-bounds"


def test_tensors_of_rank_0_and_without_elements() -> None:
    empty = Storage("1", "FloatStorage", b"")
    value = t.mapping(
        {
            "scalar": t.tensor(WEIGHT, (), first=5),
            "empty": t.tensor(empty, (0, 4)),
            "none": t.tensor(WEIGHT, (2, 0), (7, 9), 6),
            "far": t.tensor(WEIGHT, (0,), first=1000),
        }
    )
    data = zip_of(value, WEIGHT, empty)
    specs = {spec.name: spec for spec in accepted(data).tensors}
    assert content(specs["scalar"], data) == floats(5)
    assert all(specs[name].extent.nbytes == 0 and specs[name].strides is None for name in ("empty", "none", "far"))
    assert all(specs[name].extent.offset <= len(data) for name in specs)


def test_a_stride_along_a_dimension_of_length_1_counts_for_nothing() -> None:
    for strides in ((1, 6, 1), (1 << 40, 6, 1), (0, 6, 1)):
        (spec,) = accepted(zip_of(t.tensor(WEIGHT, (1, 1, 6), strides), WEIGHT)).tensors
        assert (spec.order, spec.strides) == ("C", None)
    (spec,) = accepted(zip_of(t.tensor(WEIGHT, (2, 1, 2), (3, 1 << 40, 1)), WEIGHT)).tensors
    assert spec.strides == (3, 0, 1)


def test_an_expanded_tensor_is_a_view_with_a_stride_of_0() -> None:
    data = zip_of(t.tensor(WEIGHT, (2, 3), (1, 0)), WEIGHT)
    (spec,) = accepted(data).tensors
    assert (spec.strides, spec.extent.nbytes) == ((1, 0), 8)
    assert content(spec, data) == floats(0, 0, 0, 1, 1, 1)


@each
def test_a_quantized_tensor_is_a_record_of_integers_and_scale(make: Make) -> None:
    integers = Storage("1", "QUInt8Storage", bytes(range(6)))

    def value(t: Torch) -> bytes:
        affine = t.w.tuple_(t.w.glob("torch", "per_tensor_affine"), op.BINFLOAT(0.5), t.w.integer(3))
        return t.mapping({"q": t.quantized(integers, (2, 3), affine)})

    parsed = accepted(make(value, [integers]))
    (spec,) = parsed.tensors
    assert (spec.name, spec.dtype.name, spec.shape) == ("q/values", "uint8", (2, 3))
    assert parsed.value == {"q": RecordValue("QuantizedTensor", {"values": spec, "scale": 0.5, "zero_point": 3})}


def test_a_tensor_quantized_by_channel_has_its_scales_as_tensors() -> None:
    integers = Storage("0", "QInt8Storage", bytes(range(6)))
    scales, zeros = Storage("1", "DoubleStorage", bytes(24)), Storage("2", "LongStorage", bytes(24))
    channels = w.glob("torch", "per_channel_affine"), t.tensor(scales, (3,)), t.tensor(zeros, (3,)), w.integer(1)
    parsed = accepted(zip_of(t.quantized(integers, (2, 3), w.tuple_(*channels)), integers, scales, zeros))
    values, scale, zero = parsed.tensors
    assert [spec.name for spec in parsed.tensors] == ["values", "scales", "zero_points"]
    fields: dict[str, Value] = {"values": values, "scales": scale, "zero_points": zero, "axis": 1}
    assert parsed.value == RecordValue("QuantizedTensor", fields)


@pytest.mark.parametrize(("kind", "dtype"), QUANTIZED_DTYPES.items())
def test_each_kind_of_quantized_integer_is_read(kind: str, dtype: str) -> None:
    storage = Storage("0", kind, bytes(2 * ITEMSIZE[kind]))
    affine = w.tuple_(w.glob("torch", "per_tensor_affine"), op.BINFLOAT(1.0), w.integer(0))
    (spec,) = accepted(zip_of(t.quantized(storage, (2,), affine), storage)).tensors
    assert spec.dtype.name == dtype


@each
def test_a_state_dict_beside_an_optimizers_numbers(make: Make) -> None:
    def value(t: Torch) -> bytes:
        w = t.w
        versions = t.state_dict({"": t.mapping({"version": w.integer(1)})})
        step = t.mapping({"step": w.integer(7), "exp_avg": t.tensor(WEIGHT, (6,))})
        group = t.mapping(
            {"lr": op.BINFLOAT(0.5), "params": op.EMPTY_LIST() + w.integer(0) + op.APPEND(), "x": op.NONE()}
        )
        state = op.EMPTY_DICT() + w.integer(0) + step + op.SETITEM()
        return t.mapping(
            {
                "model": t.state_dict({"fc.weight": t.tensor(WEIGHT, (2, 3))}, versions),
                "optimizer": t.mapping(
                    {"state": state, "group": group, "betas": w.tuple_(op.BINFLOAT(0.9), op.NEWTRUE())}
                ),
            }
        )

    parsed = accepted(make(value, [WEIGHT]))
    weight, average = parsed.tensors
    assert [weight.name, average.name] == ["model/fc.weight", "optimizer/state/0/exp_avg"]
    assert parsed.value == {
        "model": {"fc.weight": weight},
        "optimizer": {
            "state": {0: {"step": 7, "exp_avg": average}},
            "group": {"lr": 0.5, "params": [0], "x": None},
            "betas": (0.9, True),
        },
    }


def test_parameters_and_shapes_are_what_they_wrap() -> None:
    inner = t.tensor(WEIGHT, (2, 3), grad_=op.NEWTRUE())
    parameter = w.call("torch._utils", "_rebuild_parameter", inner, op.NEWTRUE(), t.hooks())
    stateless = w.call("torch._utils", "_rebuild_parameter_with_state", inner, op.NEWTRUE(), t.hooks(), op.EMPTY_DICT())
    shape = w.call("torch", "Size", w.ints(2, 3))
    oldest = w.call("torch._utils", "_rebuild_tensor", t.storage(WEIGHT), w.integer(0), shape, w.ints(3, 1))
    value = t.mapping({"p": parameter, "s": stateless, "old": oldest, "shape": shape})
    parsed = accepted(zip_of(value, WEIGHT))
    assert {spec.name: spec.shape for spec in parsed.tensors} == {"p": (2, 3), "s": (2, 3), "old": (2, 3)}
    assert len({spec.extent for spec in parsed.tensors}) == 1
    assert isinstance(parsed.value, dict)
    assert parsed.value["shape"] == (2, 3)


def test_integers_that_require_a_gradient_are_refused_as_pytorch_refuses_them() -> None:
    storage = Storage("0", "LongStorage", bytes(8))
    found = refusal(zip_of(t.tensor(storage, (1,), grad_=op.NEWTRUE()), storage)).findings[0]
    assert found.code == "bad-arguments"
    assert "int64" in found.message


def test_python_2_strings_name_storages_as_well() -> None:
    old = Torch(Writer(2, python2=True))
    data = torch_zip(old.pickle(old.mapping({"w": old.tensor(WEIGHT, (2, 3))})), [WEIGHT])
    assert [spec.name for spec in accepted(data).tensors] == ["w"]


@pytest.mark.parametrize("make", [make for name, make in CONTAINERS if not name.endswith("2")])
def test_a_numpy_array_in_the_pickle_lies_where_the_file_has_it(make: Make) -> None:
    # Protocol 2 writes bytes as text, so those have no place of their own.
    data = make(
        lambda t: t.mapping({"a": t.w.array("f4", (2,), floats(1.5, 2.5)), "w": t.tensor(WEIGHT, (6,))}), [WEIGHT]
    )
    array, weight = accepted(data).tensors
    assert content(array, data) == floats(1.5, 2.5)
    assert content(weight, data) == WEIGHT.data


@pytest.mark.parametrize("location", ["cpu", "cuda:0", "cuda:15", "mps:0", "xpu"])
def test_the_device_of_the_writer_does_not_matter(location: str) -> None:
    storage = replace(WEIGHT, location=location)
    assert len(accepted(zip_of(t.tensor(storage, (6,)), storage)).tensors) == 1


def test_older_archives_have_fewer_records() -> None:
    # Version 1.6 wrote the pickle, the storages and `version`.
    data = torch_zip(t.pickle(t.tensor(WEIGHT, (6,))), [WEIGHT], records={"version": b"3\n"})
    assert len(accepted(data).tensors) == 1


def test_members_may_lie_in_any_order(tmp_path: Path) -> None:
    """The table is peeked at, so a hashing scan digests each tensor wherever it lies."""
    value = t.mapping(
        {"w": t.tensor(WEIGHT, (2, 3)), "turned": t.tensor(WEIGHT, (3, 2), (1, 3)), "row": t.tensor(WEIGHT, (3,))}
    )
    made = members(t.pickle(value), [WEIGHT])
    for name, order in (("a.pt", made), ("b.pt", made[::-1])):
        (tmp_path / name).write_bytes(zipped(order))
    report = scan(tmp_path, digests=True)
    assert report.is_accepted
    turned = floats(0, 3, 1, 4, 2, 5)
    for file in report.files:
        assert [spec.sha256 for spec in file.tensors] == [
            sha256_hex(WEIGHT.data),
            sha256_hex(turned),
            sha256_hex(WEIGHT.data[:12]),
        ]


def test_a_legacy_file_is_digested_while_it_streams(tmp_path: Path) -> None:
    more = Storage("1", "FloatStorage", floats(*range(100_000)))
    legacy = Torch(w, legacy=True)
    value = legacy.mapping({"b": legacy.tensor(more, (100_000,)), "a": legacy.tensor(WEIGHT, (2, 3))})
    (tmp_path / "a.pt").write_bytes(torch_legacy(legacy.pickle(value), [WEIGHT, more]))
    (file,) = scan(tmp_path, digests=True).files
    assert [spec.sha256 for spec in file.tensors] == [sha256_hex(more.data), sha256_hex(WEIGHT.data)]


class Jumping(MemorySource):
    """A file that counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.n_peeked = 0
        self.told: list[tuple[int, int]] = []

    def read(self, offset: int, nbytes: int) -> bytes:
        raise AssertionError(f"{nbytes} bytes were read forward at {offset}")

    def peek(self, offset: int, nbytes: int) -> bytes:
        self.n_peeked += nbytes
        return super().read(offset, nbytes)

    def payload(self, offset: int, nbytes: int) -> None:
        self.told.append((offset, nbytes))


@pytest.mark.parametrize("legacy", [False, True])
def test_storages_are_jumped_over_and_told_once(legacy: bool) -> None:
    storage = Storage("0", "FloatStorage", bytes(4 << 20))
    torch = Torch(w, legacy=legacy)
    value = torch.pickle(
        torch.mapping({"a": torch.tensor(storage, (1 << 20,)), "b": torch.tensor(storage, (1 << 20,))})
    )
    source = Jumping(torch_legacy(value, [storage]) if legacy else torch_zip(value, [storage]))
    parsed = (parse_pytorch_legacy if legacy else parse_pytorch)(source, POLICY)
    assert parsed.refusal is None
    assert source.n_peeked < 512 * 1024
    extent = parsed.tensors[0].extent
    assert source.told == [(extent.offset, extent.nbytes)]


# ---------------------------------------------------------------- layouts


@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.integers(1, 2), min_size=4, max_size=4),
)
def test_a_layout_gives_back_the_view_that_it_was_taken_from(shape: list[int], order: Any, steps: list[int]) -> None:
    base = np.arange(math.prod(shape), dtype="<i4").reshape(shape)
    axes = list(range(len(shape)))
    order.shuffle(axes)
    array = base.transpose(axes)[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    strides = tuple(step // 4 for step in array.strides)
    kind, effective = layout(array.shape, strides)
    if effective is None:
        assert array.flags.c_contiguous if kind == "C" else array.flags.f_contiguous
    else:
        assert not array.flags.forc
        assert span(array.shape, effective) == span(array.shape, strides)
    storage = Storage("0", "IntStorage", base.tobytes())
    data = zip_of(t.tensor(storage, array.shape, strides), storage)
    (spec,) = accepted(data).tensors
    assert content(spec, data) == array.tobytes()


def test_what_is_written_dense_is_read_as_contiguous() -> None:
    for shape in ((), (3,), (2, 3), (0, 4), (2, 1, 3)):
        assert layout(shape, dense(shape)) == ("C", None)


# ---------------------------------------------------------------- what may be named


@pytest.mark.parametrize("pair", TORCH_CONSTRUCTORS, ids=".".join)
def test_a_pair_is_refused_where_the_policy_does_not_name_it(pair: tuple[str, str]) -> None:
    full = ".".join(pair)
    kept = [
        entry.model_copy(update={"names": tuple(n for n in entry.names if n != full)})
        for entry in POLICY.pickle.globals
    ]
    rules = type(POLICY.pickle)(
        protocols=POLICY.pickle.protocols, globals=tuple(entry for entry in kept if entry.names), records=()
    )
    narrow = POLICY.model_copy(update={"pickle": rules})
    found = refusal(zip_of(w.glob(*pair)), narrow)
    assert type(found) is PolicyError
    assert [finding.code for finding in found.findings] == ["global-not-allowed"]
    assert full in found.findings[0].message
    assert f'names = ["{full}"]' in (found.findings[0].hint or "")


@pytest.mark.parametrize("pair", TORCH_CONSTRUCTORS, ids=".".join)
def test_a_pair_is_refused_in_any_other_pickle(pair: tuple[str, str]) -> None:
    parsed = parse_pickle(MemorySource(t.pickle(w.glob(*pair))), POLICY)
    assert parsed.refusal is not None
    first = parsed.refusal.findings[0]
    assert (first.code, "PyTorch's own files" in (first.hint or "")) == ("global-not-allowed", True)


@pytest.mark.parametrize("pair", TORCH_CONSTRUCTORS, ids=".".join)
def test_a_pair_by_itself_is_no_value(pair: tuple[str, str]) -> None:
    assert refusal(zip_of(w.glob(*pair))).findings[0].code == "not-data"


@pytest.mark.parametrize(
    "pair",
    [pair for pair, (constructor, _) in TORCH_CONSTRUCTORS.items() if constructor is None],
    ids=lambda pair: pair[1],
)
def test_what_is_only_an_argument_is_not_called(pair: tuple[str, str]) -> None:
    assert refusal(zip_of(w.call(*pair, w.integer(1)))).findings[0].code == "bad-call"


@pytest.mark.parametrize(
    "pair", [pair for pair, (make, _) in TORCH_CONSTRUCTORS.items() if make], ids=lambda pair: pair[1]
)
def test_a_call_without_arguments_or_with_too_many_is_refused(pair: tuple[str, str]) -> None:
    for args in ([], [op.NONE()] * 9):
        assert refusal(zip_of(w.call(*pair, *args))).findings[0].code == "bad-arguments"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("torch._utils _rebuild_sparse_tensor", "sparse"),
        ("torch._utils _rebuild_nested_tensor", "nested"),
        ("torch._utils _rebuild_meta_tensor_no_storage", "meta"),
        ("torch._tensor _rebuild_from_type_v2", "subclasses"),
        ("torch QUInt4x2Storage", "less than a byte"),
        ("torch complex32", "complex"),
        ("torch.nn.modules.linear Linear", "state_dict"),
        ("torch.storage _load_from_bytes", "unpickles"),
        ("torch device", "only tensors"),
    ],
)
def test_what_is_not_read_is_refused_by_name_with_what_to_save(name: str, word: str) -> None:
    module, _, member = name.partition(" ")
    finding = refusal(zip_of(w.glob(module, member))).findings[0]
    assert finding.code == "global-not-allowed"
    assert f"{module}.{member}" in finding.message
    assert word in (finding.hint or "")


@each
def test_code_in_a_file_is_refused_and_each_global_is_told(make: Make) -> None:
    def value(t: Torch) -> bytes:
        w = t.w
        calls = w.call("posix", "system", w.text("true")), w.call("builtins", "eval", w.text("1"))
        return t.mapping({"w": t.tensor(WEIGHT, (6,)), "x": calls[0], "y": calls[1]})

    found = refusal(make(value, [WEIGHT]))
    assert type(found) is PolicyError
    assert ["posix.system" in f.message for f in found.findings] == [True, False]
    assert "builtins.eval" in found.findings[1].message


def test_a_refused_storage_class_makes_no_second_finding() -> None:
    pid = t.storage(WEIGHT, kind_=w.glob("torch", "NoStorage"))
    assert [finding.code for finding in refusal(zip_of(t.tensor(pid, (6,)), WEIGHT)).findings] == ["global-not-allowed"]


def test_a_magic_number_that_is_computed_is_no_magic_number() -> None:
    eval_ = op.PROTO(2) + w.call("builtins", "eval", w.text("0")) + op.STOP()
    data = torch_legacy(Torch(w, legacy=True).pickle(op.EMPTY_DICT()))
    hostile = eval_ + data[data.index(op.STOP()) + 1 :]
    assert not is_legacy(hostile[:64])
    parsed = parse_pytorch_legacy(MemorySource(hostile), POLICY)
    assert type(parsed.refusal) is PolicyError
    assert "builtins.eval" in parsed.refusal.findings[0].message


def test_protocol_0_has_no_storages() -> None:
    """Its persistent ids are lines of text, which PyTorch does not write."""
    parsed = parse_pytorch(MemorySource(torch_zip(op.PERSID("storage") + op.STOP())), POLICY)
    assert parsed.refusal is not None
    assert parsed.refusal.findings[0].code == "opcode-not-allowed"


def test_a_protocol_that_the_policy_refuses_is_refused_in_each_pickle() -> None:
    rules = POLICY.pickle.model_copy(update={"protocols": (4,)})
    narrow = POLICY.model_copy(update={"pickle": rules})
    legacy = Torch(w, legacy=True)
    for data in (zip_of(op.EMPTY_DICT()), torch_legacy(legacy.pickle(op.EMPTY_DICT()))):
        assert {finding.code for finding in refusal(data, narrow).findings} == {"protocol-not-allowed"}


def test_the_first_pickles_of_a_legacy_file_are_short() -> None:
    many = op.EMPTY_LIST() + op.MARK() + op.NONE() * 5000 + op.APPENDS()
    data = torch_legacy(Torch(w, legacy=True).pickle(op.EMPTY_DICT()), system=many)
    assert type(refusal(data)) is FormatError


def test_a_policy_without_pytorch_refuses_its_files() -> None:
    rules = POLICY.formats.model_copy(update={"allow": ("pickle",)})
    found = refusal(zip_of(op.EMPTY_DICT()), POLICY.model_copy(update={"formats": rules}))
    assert found.findings[0].code == "format-not-allowed"


def test_views_of_views_are_bounded_together() -> None:
    limits = POLICY.limits.model_copy(update={"max_inline_bytes": 2000})
    narrow = POLICY.model_copy(update={"limits": limits})
    some = {str(n): t.tensor(WEIGHT, (300 - n,), (0,)) for n in range(3)}
    assert type(refusal(zip_of(t.mapping(some), WEIGHT), narrow)) is LimitError
    # The same view again costs nothing.
    same = {str(n): t.tensor(WEIGHT, (300,), (0,)) for n in range(3)}
    assert len(parse(zip_of(t.mapping(same), WEIGHT), narrow).tensors) == 3


# ---------------------------------------------------------------- bad bytes


def sample(legacy: bool) -> bytes:
    torch = Torch(Writer(2), legacy=legacy)
    value = torch.pickle(
        torch.state_dict({"w": torch.tensor(WEIGHT, (2, 3)), "v": torch.tensor(WEIGHT, (2,))}, torch.hooks())
    )
    return torch_legacy(value, [WEIGHT]) if legacy else torch_zip(value, [WEIGHT])


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_is_cut_anywhere_is_refused(legacy: bool) -> None:
    data = sample(legacy)
    run = parse_pytorch_legacy if legacy else parse_pytorch
    for end in range(len(data)):
        assert run(MemorySource(data[:end]), POLICY).refusal is not None, end
    assert run(MemorySource(data + b"\0"), POLICY).refusal is not None


def test_a_byte_of_an_archive_that_is_changed_is_one_of_a_storage_or_the_file_is_refused() -> None:
    data = sample(legacy=False)
    whole = parse_pytorch(MemorySource(data), POLICY)
    for index in range(len(data)):
        for bits in (0x01, 0x20, 0x80, 0xFF):
            changed = data[:index] + bytes([data[index] ^ bits]) + data[index + 1 :]
            parsed = parse_pytorch(MemorySource(changed), POLICY)
            # Where it is not refused, its table is the same: the pickle is held against its checksum.
            assert parsed.refusal is not None or parsed.tensors == whole.tensors, index


def test_any_byte_of_a_legacy_file_may_change_and_nothing_else_is_raised() -> None:
    data = sample(legacy=True)
    for index in range(len(data)):
        for bits in (0x01, 0x20, 0x80, 0xFF):
            changed = data[:index] + bytes([data[index] ^ bits]) + data[index + 1 :]
            for spec in parse_pytorch_legacy(MemorySource(changed), POLICY).tensors:
                assert spec.extent.offset + spec.extent.nbytes <= len(changed)


def test_strided_views_that_span_far_more_than_they_hold_are_refused() -> None:
    storage = Storage("0", "ByteStorage", bytes(100_000))

    def views(count: int) -> bytes:
        items = {str(i): t.tensor(storage, (2,), (99_999 - i,), first=0) for i in range(count)}
        return torch_zip(t.pickle(t.mapping(items)), [storage])

    policy = policy_with(limits={"max_inline_bytes": 1_000_000})
    for count, code in ((64, None), (80, "limit-exceeded")):
        found = parse_pytorch(MemorySource(views(count)), policy).refusal
        assert (None if found is None else found.findings[0].code) == code
        assert found is None or "from their first elements to their last" in found.findings[0].message


def test_views_that_overlap_in_too_many_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_CROSSINGS", 10_000)
    storage = Storage("0", "ByteStorage", bytes(100_000))
    for step, code in ((500, None), (1, "limit-exceeded")):
        items = {str(i): t.tensor(storage, (500,), (1,), first=i * step) for i in range(200)}
        data = torch_zip(t.pickle(t.mapping(items)), [storage])
        found = parse_pytorch(MemorySource(data), POLICY).refusal
        assert (None if found is None else found.findings[0].code) == code


def test_the_checksum_of_a_storage_is_compared_where_bytes_are_hashed(tmp_path: Path) -> None:
    torch = torch_sample.Torch()
    raw = torch_sample.torch_zip(torch.pickle(torch.tensor(torch_sample.WEIGHT, (2, 3))), [torch_sample.WEIGHT])
    at = raw.index(torch_sample.WEIGHT.data)
    path = tmp_path / "model.pt"
    path.write_bytes(raw)
    assert scan(path, digests=True).is_accepted
    path.write_bytes(raw[: at + 4] + bytes([raw[at + 4] ^ 1]) + raw[at + 5 :])
    assert scan(path).is_accepted  # which jumps over payloads
    (file,) = scan(path, digests=True).files
    assert [(finding.code, finding.offset) for finding in file.findings] == [("zip-checksum", at)]
