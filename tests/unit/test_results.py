"""A file's value: plain data, whole arrays and whole records, each tensor with one name of its own."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from safeload.errors import FormatError, LimitError, PolicyError
from safeload.formats.pickles.results import MAX_NAME_CHARACTERS
from safeload.policy import GroupedScales, PickleRules, RecordRule
from safeload.tensors import Extent, RecordValue
from tests.streams import DEFAULT, Writer, honest_streams, op, parse, policy_with, refusal, refused

_reconstruct = np.empty(0).__reduce__()[0]  # numpy 2 moved its module
w = Writer(4)
P4 = op.PROTO(4)
ARRAY = w.array()


def build(*parts: bytes) -> bytes:
    return P4 + b"".join(parts) + op.STOP()


# ---------------------------------------------------------------- values and names


@pytest.mark.parametrize("protocol", range(6))
def test_a_file_of_everything_has_its_tensors_in_stored_order(protocol: int) -> None:
    parsed = parse(honest_streams()[protocol])
    assert [t.name for t in parsed.tensors] == ["w/weight", "w/scales", "fortran", "empty", "scalar", "bf"]
    assert [t.dtype.name for t in parsed.tensors] == ["int8", "float32", "float16", "int64", "float64", "bfloat16"]
    assert [t.shape for t in parsed.tensors] == [(4, 2), (1, 2), (2, 2), (0,), (), (1,)]
    assert [t.order for t in parsed.tensors] == ["C", "C", "F", "C", "C", "C"]
    assert [t.dtype.big_endian for t in parsed.tensors] == [False, False, False, False, True, False]
    assert isinstance(parsed.value, dict)
    assert parsed.value["plain"] == (None, True, -3, 1 << 40)
    assert parsed.value["fortran"] is parsed.tensors[2]


def test_a_bare_array_has_the_empty_name() -> None:
    assert [t.name for t in parse(build(ARRAY)).tensors] == [""]


def test_names_follow_the_path() -> None:
    items = op.EMPTY_LIST() + ARRAY + op.APPEND()
    body = (
        op.EMPTY_DICT() + w.text("a") + items + op.SETITEM() + w.integer(7) + w.tuple_(ARRAY, op.NONE()) + op.SETITEM()
    )
    assert [t.name for t in parse(build(body)).tensors] == ["a/0", "7/0"]


def test_an_array_in_two_places_is_two_tensors_of_the_same_bytes() -> None:
    first, second = parse(build(ARRAY, op.DUP(), op.TUPLE2())).tensors
    assert (first.name, second.name) == ("0", "1")
    assert first.extent == second.extent


@pytest.mark.parametrize(
    "items",
    [
        w.text("0") + ARRAY + w.integer(0) + ARRAY,
        w.text("True") + ARRAY + op.NEWTRUE() + ARRAY,
        w.text("None") + ARRAY + op.NONE() + ARRAY,
        w.text("a/0") + ARRAY + w.text("a") + w.tuple_(ARRAY),
        w.text("") + w.tuple_(ARRAY) + w.text("/0") + ARRAY,
    ],
    ids=range(5),
)
def test_two_tensors_of_one_name_are_refused(items: bytes) -> None:
    assert refused(build(op.MARK(), items, op.DICT())) == (FormatError, "ambiguous-name", None)


def test_a_name_is_bounded() -> None:
    most = op.BINUNICODE("k" * MAX_NAME_CHARACTERS)
    assert len(parse(build(op.EMPTY_DICT(), most, ARRAY, op.SETITEM())).tensors[0].name) == MAX_NAME_CHARACTERS
    more = op.BINUNICODE("k" * (MAX_NAME_CHARACTERS + 1))
    assert refused(build(op.EMPTY_DICT(), more, ARRAY, op.SETITEM()))[:2] == (FormatError, "name-too-long")
    deep = op.BINUNICODE("k" * (MAX_NAME_CHARACTERS - 1))
    assert refused(build(op.EMPTY_DICT(), deep, w.tuple_(ARRAY), op.SETITEM()))[:2] == (FormatError, "name-too-long")


def test_bytes_are_pointed_at_and_text_is_kept() -> None:
    assert parse(build(w.data(b"abc"))).value == Extent(4, 3)
    assert parse(build(op.SHORT_BINSTRING(b"abc"))).value == "abc"


@pytest.mark.parametrize(
    ("body", "offset"),
    [
        (op.SHORT_BINSTRING(b"\xff"), 4),
        (op.EMPTY_LIST() + op.SHORT_BINSTRING(b"\xff") + op.APPEND(), 5),
        (w.glob("numpy", "ndarray"), None),
        (w.glob("__main__", "QuantizedWeight8bit"), None),
        (w.dtype(), None),
        (w.dtype(state=b""), None),
        (w.tuple_(w.dtype()), None),
    ],
    ids=range(7),
)
def test_what_is_no_data_is_refused(body: bytes, offset: int | None) -> None:
    assert refused(build(body)) == (FormatError, "not-data", offset)


def test_a_bytearray_is_no_data() -> None:
    assert refused(op.PROTO(5) + op.BYTEARRAY8(b"a") + b".") == (FormatError, "not-data", 11)


def test_a_long_python_2_string_is_text_as_a_short_one_is() -> None:
    for n in (256, 257, 1000):
        assert parse(op.PROTO(2) + op.BINSTRING(b"a" * n) + b".").value == "a" * n


# ---------------------------------------------------------------- cycles, depth, size


@pytest.mark.parametrize(
    "body",
    [
        op.EMPTY_LIST() + op.DUP() + op.APPEND(),
        op.EMPTY_DICT() + op.MEMOIZE() + op.NONE() + op.BINGET(0) + op.SETITEM(),
        op.EMPTY_LIST() + op.MEMOIZE() + w.tuple_(op.BINGET(0)) + op.APPEND(),
        w.call("collections", "OrderedDict") + op.MEMOIZE() + op.NONE() + op.BINGET(0) + op.SETITEM(),
        w.new() + op.MEMOIZE() + op.MARK() + w.text("weight") + op.BINGET(0) + w.text("scales") + ARRAY + b"db",
    ],
    ids=["list", "dict", "tuple-in-list", "ordered", "record"],
)
def test_a_cycle_is_refused(body: bytes) -> None:
    assert refused(build(body)) == (FormatError, "cycle", None)


def test_sharing_is_no_cycle() -> None:
    assert parse(build(op.EMPTY_LIST(), op.DUP(), op.DUP(), op.TUPLE3())).value == ([], [], [])


@pytest.mark.parametrize(
    "nest",
    [
        lambda n: op.EMPTY_LIST() * n + op.APPEND() * (n - 1),
        lambda n: op.EMPTY_TUPLE() + op.TUPLE1() * (n - 1),
        lambda n: (op.EMPTY_DICT() + op.NONE()) * (n - 1) + op.EMPTY_DICT() + op.SETITEM() * (n - 1),
    ],
    ids=["lists", "tuples", "dicts"],
)
def test_depth_is_bounded_exactly(nest: object) -> None:
    assert callable(nest)
    assert parse(build(nest(DEFAULT.limits.max_depth))).refusal is None
    error = refusal(build(nest(DEFAULT.limits.max_depth + 1)))
    assert type(error) is LimitError
    assert "`max_depth`" in (error.findings[0].hint or "")


@pytest.mark.parametrize("depth", [100, 300, 2000])
def test_a_policy_of_great_depth_makes_no_recursion_error(depth: int) -> None:
    stream = build(op.EMPTY_LIST() * depth, op.APPEND() * (depth - 1))
    try:
        policy = policy_with(limits={"max_depth": 10_000})
    except ValueError:
        return  # a policy that refuses such a bound is an answer too
    parse(stream, policy)


def test_shared_values_are_counted_in_each_place() -> None:
    body = op.EMPTY_LIST() + op.DUP() + op.DUP() + op.TUPLE3()
    assert parse(build(body), policy_with(limits={"max_values": 4})).refusal is None
    error = refusal(build(body), policy_with(limits={"max_values": 3}))
    assert type(error) is LimitError
    assert "`max_values`" in (error.findings[0].hint or "")


# ---------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("weight", "scales"),
    [
        ((4, 2), (1, 2)),
        ((4, 2), (2, 2)),
        ((4, 2), (4, 2)),
        ((3, 4, 2), (3, 2, 2)),
        ((0, 2), (0, 2)),
        ((0, 2), (1, 2)),
        ((4, 0), (1, 0)),
    ],
)
def test_scales_that_fit_are_accepted(weight: tuple[int, ...], scales: tuple[int, ...]) -> None:
    parsed = parse(build(w.quantized(weight, scales)))
    assert isinstance(parsed.value, RecordValue)
    assert [t.shape for t in parsed.tensors] == [weight, scales]


@pytest.mark.parametrize(
    ("weight", "scales"),
    [
        ((4, 2), (3, 2)),
        ((4, 2), (8, 2)),
        ((4, 2), (0, 2)),
        ((4, 2), (1, 3)),
        ((4, 2), (1, 1)),
        ((4, 2), (2,)),
        ((4, 2), (1, 1, 2)),
        ((4,), (4,)),
        ((), ()),
        ((2, 4, 2), (1, 1, 2)),
        ((2, 4, 2), (1, 2)),
    ],
)
def test_scales_that_do_not_fit_are_refused(weight: tuple[int, ...], scales: tuple[int, ...]) -> None:
    stream = build(w.quantized(weight, scales))
    assert refused(stream) == (PolicyError, "bad-record", 2 + len(w.new()) - 1)
    assert "[.., G, N]" in refusal(stream).findings[0].message


@pytest.mark.parametrize("code", ["f4", "f2", "bfloat16"])
def test_scales_are_of_the_declared_dtypes(code: str) -> None:
    assert parse(build(w.quantized(scales_code=code))).refusal is None


@pytest.mark.parametrize(
    ("weight", "scales"),
    [
        ("u1", "f4"),
        ("b1", "f4"),
        ("int4", "f4"),
        ("i2", "f4"),
        ("i1", "f8"),
        ("i1", ">f4"),
        ("i1", "i4"),
        ("i1", ">f2"),
    ],
)
def test_a_field_of_another_dtype_or_byte_order_is_refused(weight: str, scales: str) -> None:
    assert refused(build(w.quantized(weight_code=weight, scales_code=scales)))[:2] == (PolicyError, "bad-record")


@pytest.mark.parametrize(
    "value", [op.NONE(), w.data(b"abcd"), w.text("x"), op.EMPTY_LIST(), w.quantized()], ids=range(5)
)
def test_a_field_that_is_no_array_is_refused(value: bytes) -> None:
    body = w.record(("weight", w.array("i1", (4, 2), bytes(8))), ("scales", value))
    assert refused(build(body))[:2] == (PolicyError, "bad-record")


def test_a_record_whose_array_never_got_its_state_is_refused() -> None:
    body = w.record(("weight", w.empty_array()), ("scales", ARRAY))
    assert refused(build(body))[:2] == (FormatError, "incomplete-array")


def test_a_record_without_a_rule_for_scales_needs_none() -> None:
    rule = RecordRule(
        name="Pair", modules=("m",), fields={"b": ("float32",), "a": ("float32",)}, reason="made for this test"
    )
    rules = PickleRules(protocols=(4,), globals=DEFAULT.pickle.globals, records=(rule,))
    policy = DEFAULT.model_copy(update={"pickle": rules})
    parsed = parse(build(w.record(("a", ARRAY), ("b", ARRAY), module="m", name="Pair")), policy)
    assert isinstance(parsed.value, RecordValue)
    assert parsed.value.record == "Pair"
    # Declared order, whatever the file's.
    assert [t.name for t in parsed.tensors] == ["b", "a"]
    grouped = rule.model_copy(update={"grouped_scales": GroupedScales(weight="a", scales="b")})
    strict = policy.model_copy(
        update={"pickle": PickleRules(protocols=(4,), globals=rules.globals, records=(grouped,))}
    )
    assert refused(build(w.record(("a", ARRAY), ("b", ARRAY), module="m", name="Pair")), strict)[1] == "bad-record"


def test_arrays_that_share_one_payload_are_bounded() -> None:
    """Each is put in C order where its digest is taken, so a megabyte could cost as many seconds as it has names."""
    payload = bytes(1 << 20)

    class Shared:
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def __reduce__(self) -> tuple[object, ...]:
            state = (1, (self.rows, (1 << 20) // self.rows), np.dtype("u1"), True, payload)
            return _reconstruct, (np.ndarray, (0,), b"b"), state

    policy = policy_with(limits={"max_inline_bytes": 1 << 20})
    few = pickle.dumps([Shared(1 << bits) for bits in range(1, 17)], 4)
    many = pickle.dumps([Shared(1 << bits) for bits in range(1, 19)], 4)
    assert parse(few, policy).refusal is None
    found = parse(many, policy).refusal
    assert type(found) is LimitError
    assert [finding.code for finding in found.findings] == ["limit-exceeded"]
