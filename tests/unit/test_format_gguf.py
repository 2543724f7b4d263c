"""A GGUF model is a strictly bounded table of tensors, or refused. Refusals by cause are in tests/vectors."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safeload.digests import sha256_hex
from safeload.errors import FormatError, LimitError, PolicyError
from safeload.formats import MemorySource
from safeload.formats.gguf import parse_gguf
from safeload.formats.inert import may_be_pickle
from safeload.scanning import parse, scan
from safeload.tensors import RecordValue
from tests.containers_sample import arrays_of, damaged, gguf, gguf_sample, info, pair, same_arrays, text
from tests.streams import DEFAULT, op, policy_with


def test_tensors_come_in_stored_order_with_their_values() -> None:
    raw, values = gguf_sample()
    assert same_arrays(arrays_of(parse_gguf(MemorySource(raw), DEFAULT), raw), values)


def test_a_shape_has_the_fastest_dimension_last() -> None:
    raw = gguf([info("a", (4, 3, 2), 24, 0)], bytes(range(24)))
    (spec,) = parse_gguf(MemorySource(raw), DEFAULT).tensors
    assert (spec.shape, spec.order, spec.extent.offset) == ((2, 3, 4), "C", len(raw) - 24)


def test_a_quantised_tensor_is_a_record_of_its_blocks() -> None:
    raw = gguf([info("a", (64, 3), 8, 0)], bytes(3 * 2 * 34))
    parsed = parse_gguf(MemorySource(raw), DEFAULT)
    (spec,) = parsed.tensors
    assert (spec.name, spec.dtype.name, spec.shape) == ("a/blocks", "uint8", (3, 68))
    assert parsed.value == {"a": RecordValue("QuantizedBlocks", {"type": "Q8_0", "shape": (3, 64), "blocks": spec})}


@pytest.mark.parametrize(
    ("kind", "name", "n_elements", "nbytes"),
    [
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56),
        (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    ],
)  # fmt: skip
def test_each_quantised_type_has_its_block(kind: int, name: str, n_elements: int, nbytes: int) -> None:
    raw = gguf([info("a", (n_elements,), kind, 0)], bytes(nbytes))
    parsed = parse_gguf(MemorySource(raw), DEFAULT)
    assert isinstance(parsed.value, dict)
    record = parsed.value["a"]
    assert isinstance(record, RecordValue)
    assert record.fields["type"] == name
    longer = gguf([info("a", (n_elements,), kind, 0)], bytes(nbytes - 1))
    assert parse_gguf(MemorySource(longer), DEFAULT).refusal is not None


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(version: int) -> None:
    raw = gguf([info("a", (2,), 24, 0)], b"\1\2", version=version)
    assert arrays_of(parse_gguf(MemorySource(raw), DEFAULT), raw)["a"].tolist() == [1, 2]


def test_padding_behind_the_last_tensor_may_be_there() -> None:
    row = info("a", (2,), 24, 0)
    for padding in (0, 30):
        assert parse_gguf(MemorySource(gguf([row], b"\1\2" + bytes(padding))), DEFAULT).refusal is None
    refusal = parse_gguf(MemorySource(gguf([row], b"\1\2" + bytes(29) + b"x")), DEFAULT).refusal
    assert refusal is not None
    assert [finding.code for finding in refusal.findings] == ["gguf-data-behind"]


def test_padding_between_tensors_is_zeros() -> None:
    rows = [info("a", (2,), 24, 0), info("b", (2,), 24, 32)]
    assert parse_gguf(MemorySource(gguf(rows, b"\1\2" + bytes(30) + b"\3\4")), DEFAULT).refusal is None
    raw = gguf(rows, b"\1\2" + bytes(29) + b"x" + b"\3\4")
    refusal = parse_gguf(MemorySource(raw), DEFAULT).refusal
    assert refusal is not None
    assert [(f.code, f.offset) for f in refusal.findings] == [("gguf-data-behind", len(raw) - 3)]


def test_a_vocabulary_without_tensors_is_read() -> None:
    parsed = parse_gguf(MemorySource(gguf(pairs=[pair("a", 8, text("b"))])), DEFAULT)
    assert (parsed.refusal, parsed.value, parsed.tensors) == (None, {}, ())


def test_strings_are_bounded_and_arrays_of_numbers_are_passed_over() -> None:
    n = 100_000
    numbers = pair("n", 9, struct.pack("<IQ", 4, n) + bytes(4 * n))
    policy = policy_with(limits={"max_values": 10})
    assert parse_gguf(MemorySource(gguf(pairs=[numbers])), policy).refusal is None
    strings = pair("s", 9, struct.pack("<IQ", 8, 11) + text("") * 11)
    assert type(parse_gguf(MemorySource(gguf(pairs=[strings])), policy).refusal) is LimitError


@pytest.mark.parametrize("kind", range(13))
def test_a_claimed_number_of_items_costs_nothing(kind: int) -> None:
    giant = pair("x", 9, struct.pack("<IQ", kind, 2**64 - 1) + bytes(64))
    refusal = parse_gguf(MemorySource(gguf(pairs=[giant])), DEFAULT).refusal
    assert type(refusal) in {FormatError, LimitError}


def test_keys_are_bounded_in_all() -> None:
    pairs = [pair(f"{n:040}", 0, b"\0") for n in range(5)]
    assert parse_gguf(MemorySource(gguf(pairs=pairs)), policy_with(limits={"max_inline_bytes": 200})).refusal is None
    refusal = parse_gguf(MemorySource(gguf(pairs=pairs)), policy_with(limits={"max_inline_bytes": 199})).refusal
    assert type(refusal) is LimitError
    assert "`max_inline_bytes`" in (refusal.findings[0].hint or "")


def test_metadata_longer_than_a_window_are_passed_over() -> None:
    pairs = [pair("long", 8, text(b"x" * 200_000)), pair("bools", 9, struct.pack("<IQ", 7, 150_000) + b"\1" * 150_000)]
    pairs += [pair("k" * 60_000, 8, text(b"y" * 30_000)), pair("k" * 65_535, 0, b"\0")]
    raw = gguf([info("a", (2,), 24, 0)], b"\1\2", pairs)
    assert arrays_of(parse_gguf(MemorySource(raw), DEFAULT), raw)["a"].tolist() == [1, 2]


def test_a_cut_or_changed_model_is_refused_or_lies_in_the_file() -> None:
    raw, values = gguf_sample()
    for other in damaged(raw):
        parsed = parse_gguf(MemorySource(other), DEFAULT)
        if parsed.refusal is None:
            assert len(arrays_of(parsed, other)) == len(values)
            end = 0
            for spec in parsed.tensors:
                assert spec.extent.offset >= end
                end = spec.extent.offset + spec.extent.nbytes
        else:
            assert type(parsed.refusal) in {FormatError, PolicyError, LimitError}
            assert all(f.offset is not None and 0 <= f.offset <= len(other) for f in parsed.refusal.findings)


NUMBERS = st.integers(0, 40) | st.sampled_from([2**31, 2**32 - 1, 2**63, 2**64 - 1])
ROWS = st.builds(info, st.text(max_size=2), st.lists(NUMBERS, max_size=5), st.integers(0, 42), NUMBERS)
PAIRS = st.builds(pair, st.text(max_size=2) | st.just("general.alignment"), st.integers(0, 13), st.binary(max_size=24))


@given(st.lists(ROWS, max_size=3), st.lists(PAIRS, max_size=3), st.binary(max_size=80))
def test_any_table_is_refused_or_lies_in_the_file(rows: list[bytes], pairs: list[bytes], data: bytes) -> None:
    raw = gguf(rows, data, pairs)
    parsed = parse_gguf(MemorySource(raw), DEFAULT)
    if parsed.refusal is None:
        arrays_of(parsed, raw)
    else:
        assert type(parsed.refusal) in {FormatError, LimitError}


def test_a_file_on_disk_has_the_digests_of_its_tensors(tmp_path: Path) -> None:
    raw, values = gguf_sample()
    (tmp_path / "model.gguf").write_bytes(raw)
    report = scan(tmp_path, digests=True)
    assert report.is_accepted, report.all_findings
    (file,) = report.files
    assert (file.format, file.sha256) == ("gguf", sha256_hex(raw))
    expected = {name: sha256_hex(array.tobytes()) for name, array in values.items()}
    assert {spec.name: spec.sha256 for spec in file.tensors} == expected


def test_a_model_that_is_a_pickle_as_well_is_refused() -> None:
    """`G` is an opcode, and of so many tensors the number's second byte begins a text that ends where one pleases."""
    call = b"\n" + op.GLOBAL("builtins", "print") + op.EMPTY_TUPLE() + op.REDUCE() + op.STOP()
    count = ord("V") << 8
    table = [info(str(number), (1,), 24, 32 * number) for number in range(count)]
    raw = gguf(table, bytes(32 * (count - 1) + 1), [pair("general.name", 8, text(call))])
    assert parse_gguf(MemorySource(raw), DEFAULT).refusal is None
    for name in ("w", "model.gguf"):
        kind, parsed = parse(MemorySource(raw), name, DEFAULT)
        assert kind == "gguf"
        assert isinstance(parsed.refusal, FormatError)
        assert [finding.code for finding in parsed.refusal.findings] == ["ambiguous-format"]


@pytest.mark.parametrize("count", [0, 1, 40, 255, 256, 291, 9999, 30_000, 2_000_000])
def test_an_honest_model_is_taken_for_no_pickle(count: int) -> None:
    raw = gguf((), bytes(1000), [pair("a.chat_template", 8, text("{{ bos }}\n(cos\nsystem\n"))], n_tensors=count)
    assert not may_be_pickle(raw, DEFAULT, whole=False)
