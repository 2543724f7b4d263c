"""An npz archive is read as numpy reads it, or refused. Refusals by cause are in tests/vectors."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safeload.auditing import audit
from safeload.digests import sha256_hex
from safeload.errors import FormatError, LimitError, PolicyError
from safeload.formats import MemorySource, npz
from safeload.formats.npz import parse_npz
from safeload.scanning import scan
from tests.containers_sample import Member, arrays_of, damaged, npy, same_arrays, zip_file
from tests.streams import DEFAULT, policy_with

Array = np.ndarray[Any, np.dtype[Any]]

VALUES: dict[str, Array] = {
    "b": np.arange(6, dtype="<f4").reshape(2, 3),
    "a/x": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "é": np.array(3, dtype=">i2"),
    "none": np.zeros((0, 2), dtype="u1"),
}
SAVERS = pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])


def saved(save: Callable[..., None]) -> bytes:
    out = io.BytesIO()
    save(out, **VALUES)
    return out.getvalue()


def loaded(raw: bytes) -> dict[str, Array]:
    with np.load(io.BytesIO(raw), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@SAVERS
def test_an_archive_is_what_numpy_loads(save: Callable[..., None]) -> None:
    raw = saved(save)
    parsed = parse_npz(MemorySource(raw), DEFAULT)
    assert same_arrays(arrays_of(parsed, raw), VALUES)
    assert isinstance(parsed.value, dict)
    assert parsed.value == {spec.name: spec for spec in parsed.tensors}


def test_a_stored_array_lies_in_the_file_and_a_deflated_one_beside_it() -> None:
    for save, is_inline in ((np.savez, False), (np.savez_compressed, True)):
        parsed = parse_npz(MemorySource(saved(save)), DEFAULT)
        assert {spec.extent.inline is not None for spec in parsed.tensors} == {is_inline}


def test_a_report_of_many_bombs_does_not_hold_what_came_of_them(tmp_path: Path) -> None:
    zeros = np.zeros(8 << 20, np.int8)
    for number in range(4):
        np.savez_compressed(tmp_path / f"{number}.npz", zeros)
    digest = sha256_hex(zeros.tobytes())
    del zeros
    for look in (scan, partial(scan, digests=True), lambda path: audit(path, jobs=1).report):
        tracemalloc.start()
        report = look(tmp_path)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert report.is_accepted
        assert {spec.extent.nbytes for file in report.files for spec in file.tensors} == {8 << 20}
        assert {spec.extent.inline for file in report.files for spec in file.tensors} == {b""}  # decoded, as before
        assert {spec.sha256 for file in report.files for spec in file.tensors} <= {None, digest}
        assert held < 4 << 20
        assert peak < 40 << 20


@SAVERS
def test_a_cut_or_changed_archive_is_refused_or_read_as_numpy_reads_it(save: Callable[..., None]) -> None:
    out = io.BytesIO()
    save(out, a=VALUES["b"], b=VALUES["é"])
    n_accepted = 0
    for raw in damaged(out.getvalue()):
        parsed = parse_npz(MemorySource(raw), DEFAULT)
        if parsed.refusal is None:
            n_accepted += 1
            assert same_arrays(arrays_of(parsed, raw), loaded(raw))
        else:
            assert type(parsed.refusal) in {FormatError, PolicyError}
            assert all(f.offset is not None and 0 <= f.offset <= len(raw) for f in parsed.refusal.findings)
    assert n_accepted < 100  # what the headers say of the system that made it


def test_what_inflates_is_bounded_in_all() -> None:
    members = [Member(f"{name}.npy", method=8) for name in "abc"]
    raw = zip_file(members)
    total = 3 * len(npy())
    assert parse_npz(MemorySource(raw), policy_with(limits={"max_inline_bytes": total})).refusal is None
    refusal = parse_npz(MemorySource(raw), policy_with(limits={"max_inline_bytes": total - 1})).refusal
    assert type(refusal) is LimitError
    assert f"inflate to {total}" in refusal.findings[0].message
    assert "`max_inline_bytes`" in (refusal.findings[0].hint or "")


def test_a_large_stored_array_is_jumped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    flipped = {"crc32": 1}
    raw = zip_file([Member(local=flipped, central=flipped)])
    refusal = parse_npz(MemorySource(raw), DEFAULT).refusal
    assert refusal is not None
    assert refusal.findings[0].code == "zip-checksum"
    monkeypatch.setattr(npz, "MAX_CHECKED_BYTES", len(npy()) - 1)
    peeked: list[tuple[int, int]] = []

    class Watched(MemorySource):
        def peek(self, offset: int, nbytes: int) -> bytes:
            peeked.append((offset, nbytes))
            return super().peek(offset, nbytes)

    parsed = parse_npz(Watched(raw), DEFAULT)
    (spec,) = parsed.tensors
    start, end = spec.extent.offset, spec.extent.offset + spec.extent.nbytes
    assert not any(at < end and at + n > start for at, n in peeked)


def test_a_member_that_is_no_array_is_refused() -> None:
    raw = zip_file([Member(), Member("notes.txt", b"text")])
    parsed = parse_npz(MemorySource(raw), DEFAULT)
    assert type(parsed.refusal) is PolicyError
    assert [f.code for f in parsed.refusal.findings] == ["format-not-supported"]
    assert "notes.txt" in parsed.refusal.findings[0].message


@SAVERS
def test_a_file_on_disk_has_the_digests_of_its_arrays(save: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(saved(save))
    report = scan(tmp_path, digests=True)
    assert report.is_accepted, report.all_findings
    (file,) = report.files
    assert file.format == "npz"
    assert file.sha256 == sha256_hex(saved(save))
    little = {name: array.astype(array.dtype.newbyteorder("<")) for name, array in VALUES.items()}
    expected = {name: sha256_hex(np.ascontiguousarray(array).tobytes()) for name, array in little.items()}
    assert {spec.name: spec.sha256 for spec in file.tensors} == expected


def test_an_array_that_numpy_gives_for_another_is_refused() -> None:
    first, second = npy(data=bytes(24)), npy(data=b"\1" * 24)
    raw = zip_file([Member("a.npy", first), Member("a.npy.npy", second)])
    assert not loaded(raw)["a.npy"].any()  # the member of this name, and not the array
    refusal = parse_npz(MemorySource(raw), DEFAULT).refusal
    assert type(refusal) is FormatError
    assert [f.code for f in refusal.findings] == ["ambiguous-name"]
    alone = zip_file([Member("a.npy.npy", second)])
    assert [spec.name for spec in parse_npz(MemorySource(alone), DEFAULT).tensors] == ["a.npy"]
