"""An npy array is read as numpy reads it, or refused. Refusals by cause are in tests/vectors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safeload.canonical import canonical_bytes
from safeload.digests import sha256_hex
from safeload.errors import FormatError, LimitError, PolicyError
from safeload.formats import MemorySource
from safeload.formats.npy import MAX_HEADER_BYTES, parse_npy
from safeload.scanning import scan
from tests.containers_sample import arrays_of, damaged, npy, same_arrays
from tests.streams import DEFAULT

Array = np.ndarray[Any, np.dtype[Any]]


def saved(array: Array, version: tuple[int, int] | None = None) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=version)
    return out.getvalue()


def loaded(raw: bytes) -> Array:
    array: Array = np.load(io.BytesIO(raw), allow_pickle=False)
    return array


DTYPES = ["?", "i1", "u1", "<i2", ">i2", "<u2", "<i4", ">u4", "<i8", "<u8", "<f2", "<f4", ">f4", "<f8", "<c8", ">c16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (1, 1, 2)])
def test_an_array_is_what_numpy_loads(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    raw = saved(array)
    assert same_arrays(arrays_of(parse_npy(MemorySource(raw), DEFAULT), raw), {"": loaded(raw)})


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_is_read(version: tuple[int, int]) -> None:
    raw = saved(np.arange(5.0), version)
    assert same_arrays(arrays_of(parse_npy(MemorySource(raw), DEFAULT), raw), {"": np.arange(5.0)})


def test_fortran_order_is_kept_and_not_copied() -> None:
    array = np.asfortranarray(np.arange(24.0).reshape(2, 3, 4))
    raw = saved(array)
    parsed = parse_npy(MemorySource(raw), DEFAULT)
    (spec,) = parsed.tensors
    assert (spec.order, spec.extent.offset, spec.extent.inline) == ("F", len(raw) - array.nbytes, None)
    assert np.array_equal(arrays_of(parsed, raw)[""], array)
    assert parsed.value is spec


@pytest.mark.parametrize(
    "header",
    [
        "{'shape': (2L, 3L), 'fortran_order': False, 'descr': '<f4'}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3,), }",
        "{ 'descr' : '<f4','fortran_order':False,'shape':( 2,3 ) }",
    ],
    ids=["python-2", "comma", "spaces"],
)
def test_other_honest_spellings_are_read(header: str) -> None:
    raw = npy(header)
    (spec,) = parse_npy(MemorySource(raw), DEFAULT).tensors
    assert (spec.dtype.name, spec.shape) == ("float32", (2, 3))


def test_an_integer_of_python_2_is_read_where_numpy_reads_it() -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }"
    assert parse_npy(MemorySource(npy(header, version=(2, 0))), DEFAULT).refusal is None
    refusal = parse_npy(MemorySource(npy(header, version=(3, 0))), DEFAULT).refusal
    assert refusal is not None
    assert refusal.findings[0].code == "npy-bad-header"
    with pytest.raises(ValueError, match="Cannot parse header"):
        loaded(npy(header, version=(3, 0)))


def test_the_longest_header_is_that_which_numpy_reads() -> None:
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
    longest = (text + " " * (MAX_HEADER_BYTES - len(text) - 1) + "\n").encode()
    raw = npy(longest)
    assert parse_npy(MemorySource(raw), DEFAULT).refusal is None
    assert loaded(raw).shape == (2, 3)
    refusal = parse_npy(MemorySource(npy(b" " + longest)), DEFAULT).refusal
    assert refusal is not None
    assert refusal.findings[0].code == "npy-bad-header"


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype="<f4").reshape(2, 3), np.asfortranarray(np.eye(2)), np.ones(2, "?"), np.arange(3, dtype=">i2")],
    ids=["plain", "fortran", "bool", "big-endian"],
)  # fmt: skip
def test_a_cut_or_changed_file_is_refused_or_read_as_numpy_reads_it(array: Array) -> None:
    for raw in damaged(saved(array)):
        parsed = parse_npy(MemorySource(raw), DEFAULT)
        if parsed.refusal is None:
            assert same_arrays(arrays_of(parsed, raw), {"": loaded(raw)})
        else:
            assert type(parsed.refusal) in {FormatError, PolicyError}
            assert all(f.offset is not None and 0 <= f.offset <= len(raw) for f in parsed.refusal.findings)
            assert (parsed.value, parsed.tensors) == (None, ())


PIECES = [
    "{", "}", "(", ")", ",", ":", " ", "'descr'", "'fortran_order'", "'shape'", "'<f4'", "'|O'", "True", "False", "0",
    "1", "6", "2L", "-1", "None", "[", "]", "'", '"', "\\", "\n", "#", "1_0", "0x2", "u'a'", "b''", "__import__", "\0",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=24), st.integers(0, 48))
def test_any_header_is_refused_or_means_what_it_means_to_numpy(pieces: list[str], n_bytes: int) -> None:
    raw = npy("".join(pieces), bytes(n_bytes))
    parsed = parse_npy(MemorySource(raw), DEFAULT)
    if parsed.refusal is None:
        assert same_arrays(arrays_of(parsed, raw), {"": loaded(raw)})
    else:
        assert type(parsed.refusal) in {FormatError, PolicyError, LimitError}


@given(
    st.sampled_from(["'<f4'", "'|b1'", "'>i2'", "'<U1'", "'|O'", "'f4'"]),
    st.sampled_from(["True", "False", "0"]),
    st.lists(st.integers(-1, 4), max_size=3),
    st.integers(0, 40),
)
def test_a_plausible_header_is_refused_or_means_what_it_means_to_numpy(
    descr: str, order: str, shape: list[int], n_bytes: int
) -> None:
    raw = npy(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {tuple(shape)}, }}", bytes(n_bytes))
    parsed = parse_npy(MemorySource(raw), DEFAULT)
    if parsed.refusal is None:
        assert same_arrays(arrays_of(parsed, raw), {"": loaded(raw)})


def test_a_file_on_disk_has_the_digest_of_its_canonical_bytes(tmp_path: Path) -> None:
    for array in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.eye(3)[:2]), np.arange(4, dtype=">i4")):
        np.save(tmp_path / "a.npy", array)
        report = scan(tmp_path, digests=True)
        assert report.is_accepted, report.all_findings
        (file,) = report.files
        (spec,) = file.tensors
        assert file.format == "npy"
        assert file.sha256 == sha256_hex((tmp_path / "a.npy").read_bytes())
        expected = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
        assert spec.sha256 == sha256_hex(expected)
        raw = (tmp_path / "a.npy").read_bytes()[spec.extent.offset :]
        assert bytes(canonical_bytes(raw, spec)) == expected
