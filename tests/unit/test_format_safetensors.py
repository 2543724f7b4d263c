"""A safetensors file is read by every rule of the format, or refused. Refusals by cause are in tests/vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safeload.digests import sha256_hex
from safeload.errors import FormatError
from safeload.formats import MemorySource
from safeload.formats.safetensors import MAX_HEADER_BYTES, parse_safetensors
from safeload.formats.safetensors_writing import SAFETENSORS_NAMES
from safeload.scanning import scan
from safeload.tensors import RecordValue
from tests.containers_sample import arrays_of, damaged, safetensors, safetensors_sample, same_arrays, stated
from tests.streams import DEFAULT, policy_with


def test_tensors_come_in_stored_order_with_their_values() -> None:
    raw, values = safetensors_sample()
    parsed = parse_safetensors(MemorySource(raw), DEFAULT)
    assert same_arrays(arrays_of(parsed, raw), values)
    assert parsed.value == {spec.name: spec for spec in parsed.tensors}


@pytest.mark.parametrize(
    ("dtype", "ours", "nbytes"),
    [
        ("BOOL", "bool", 1), ("U8", "uint8", 1), ("I8", "int8", 1), ("U16", "uint16", 2), ("I16", "int16", 2),
        ("U32", "uint32", 4), ("I32", "int32", 4), ("U64", "uint64", 8), ("I64", "int64", 8), ("F16", "float16", 2),
        ("BF16", "bfloat16", 2), ("F32", "float32", 4), ("F64", "float64", 8), ("C64", "complex64", 8),
        ("F8_E4M3", "float8_e4m3fn", 1), ("F8_E5M2", "float8_e5m2", 1), ("F8_E8M0", "float8_e8m0fnu", 1),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz", 1), ("F8_E5M2FNUZ", "float8_e5m2fnuz", 1),
    ],
)  # fmt: skip
def test_each_dtype_of_whole_bytes_is_read(dtype: str, ours: str, nbytes: int) -> None:
    raw = safetensors({"a": stated(dtype, (3,), 0, 3 * nbytes)}, bytes(range(3 * nbytes)))
    (spec,) = parse_safetensors(MemorySource(raw), DEFAULT).tensors
    assert (spec.dtype.name, spec.shape, spec.extent.nbytes) == (ours, (3,), 3 * nbytes)


def test_what_is_written_has_the_names_that_are_read() -> None:
    for ours, dtype in SAFETENSORS_NAMES.items():
        parsed = parse_safetensors(MemorySource(safetensors({"a": stated(dtype, (0,), 0, 0)})), DEFAULT)
        assert [spec.dtype.name for spec in parsed.tensors] == [ours]


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"), [("F4", (3, 2), 3), ("F6_E2M3", (4,), 3), ("F6_E3M2", (2, 4), 6)]
)
def test_a_dtype_of_less_than_a_byte_is_a_record_of_its_bytes(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    raw = safetensors({"a": stated(dtype, shape, 0, nbytes)}, bytes(range(nbytes)))
    parsed = parse_safetensors(MemorySource(raw), DEFAULT)
    (spec,) = parsed.tensors
    assert (spec.name, spec.dtype.name, spec.shape) == ("a/packed", "uint8", (nbytes,))
    assert parsed.value == {"a": RecordValue("PackedTensor", {"dtype": dtype, "shape": shape, "packed": spec})}
    assert arrays_of(parsed, raw)["a/packed"].tobytes() == bytes(range(nbytes))


@pytest.mark.parametrize("padding", range(9))
def test_a_header_may_have_any_length(padding: int) -> None:
    text = json.dumps({"a": stated("F32", (2,), 0, 8)}).encode() + b" " * padding
    (spec,) = parse_safetensors(MemorySource(safetensors(text, bytes(8))), DEFAULT).tensors
    assert spec.extent.offset == 8 + len(text)


def test_an_empty_file_of_no_tensors_is_read() -> None:
    parsed = parse_safetensors(MemorySource(safetensors({})), DEFAULT)
    assert (parsed.refusal, parsed.value, parsed.tensors) == (None, {}, ())


def test_more_keys_than_any_signed_document_has_are_read() -> None:
    header = {f"layer.{n}": stated("U8", (), n, n + 1) for n in range(20_000)}
    raw = safetensors(header, bytes(20_000))
    assert len(parse_safetensors(MemorySource(raw), DEFAULT).tensors) == 20_000
    refusal = parse_safetensors(MemorySource(raw), policy_with(limits={"max_values": 19_999})).refusal
    assert type(refusal) is FormatError
    assert refusal.findings[0].code == "safetensors-bad-header"


@pytest.mark.parametrize(
    ("length", "code"),
    [
        (3, "truncated"),
        (MAX_HEADER_BYTES, "truncated"),
        (MAX_HEADER_BYTES + 1, "safetensors-bad-header"),
        (2**63, "safetensors-bad-header"),
        (2**64 - 1, "safetensors-bad-header"),
    ],
)
def test_a_claimed_length_is_held_against_the_file_and_the_format(length: int, code: str) -> None:
    refusal = parse_safetensors(MemorySource(safetensors({}, length=length)), DEFAULT).refusal
    assert type(refusal) is FormatError
    (finding,) = refusal.findings
    assert finding.code == code
    assert f"found {length:,}" in finding.message or f"a header of {length:,} bytes, found 2" in finding.message


@pytest.mark.parametrize("size", range(8))
def test_a_file_shorter_than_its_length_field_is_refused(size: int) -> None:
    refusal = parse_safetensors(MemorySource(bytes(size)), DEFAULT).refusal
    assert refusal is not None
    assert refusal.findings[0].code == "truncated"
    assert refusal.findings[0].message == f"expected the header's length in 8 bytes, found {size}"


def naive(raw: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """What a reader that checks nothing makes of a file."""
    n = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + n])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        found[name] = entry["dtype"], entry["shape"], raw[8 + n + start : 8 + n + end]
    return found


def as_naive(raw: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    names = {**SAFETENSORS_NAMES, "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}
    found = arrays_of(parse_safetensors(MemorySource(raw), DEFAULT), raw)
    return {name: (names[array.dtype.name], list(array.shape), array.tobytes()) for name, array in found.items()}


def test_a_cut_or_changed_file_is_refused_or_says_what_every_reader_sees() -> None:
    raw, _ = safetensors_sample()
    n_accepted = 0
    for other in damaged(raw):
        parsed = parse_safetensors(MemorySource(other), DEFAULT)
        if parsed.refusal is None:
            n_accepted += 1
            assert as_naive(other) == naive(other)
            assert len(other) == len(raw)
        else:
            assert type(parsed.refusal) is FormatError
            assert all(f.offset is not None and 0 <= f.offset <= len(other) for f in parsed.refusal.findings)
    assert n_accepted  # a changed payload, name or text is as good as the first one


TEXTS = st.text(max_size=3)
NUMBERS = st.integers(-1, 9) | st.sampled_from([2**31, 2**53, 2**63, 2**64, True, None, 1.0])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "F4", "X"]),
        "shape": st.lists(NUMBERS, max_size=3),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
    }
)


@given(st.dictionaries(TEXTS | st.just("__metadata__"), ENTRIES | TEXTS | NUMBERS, max_size=3), st.binary(max_size=20))
def test_any_header_is_refused_or_describes_the_whole_file(header: dict[str, Any], data: bytes) -> None:
    raw = safetensors(json.dumps(header).encode(), data)
    parsed = parse_safetensors(MemorySource(raw), DEFAULT)
    if parsed.refusal is None:
        assert sum(spec.extent.nbytes for spec in parsed.tensors) == len(data)
        assert {spec.name.removesuffix("/packed") for spec in parsed.tensors} == header.keys() - {"__metadata__"}
        arrays_of(parsed, raw)
    else:
        assert type(parsed.refusal) is FormatError


@given(st.binary(max_size=40))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    parsed = parse_safetensors(MemorySource(safetensors(data, b"", length=len(data))), DEFAULT)
    assert parsed.refusal is None or type(parsed.refusal) is FormatError


def test_a_file_on_disk_has_the_digests_of_its_tensors(tmp_path: Path) -> None:
    raw, values = safetensors_sample()
    (tmp_path / "model.safetensors").write_bytes(raw)
    report = scan(tmp_path, digests=True)
    assert report.is_accepted, report.all_findings
    (file,) = report.files
    assert (file.format, file.sha256) == ("safetensors", sha256_hex(raw))
    expected = {name: sha256_hex(array.tobytes()) for name, array in values.items()}
    assert {spec.name: spec.sha256 for spec in file.tensors} == expected
