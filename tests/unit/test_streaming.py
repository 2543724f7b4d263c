"""Claims of `safeload.staging.stream`: what `stage` proves, a batch at a time, in memory that is bounded and reused."""

from __future__ import annotations

import gc
import hashlib
import mmap
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import safeload.manifest
from safeload import memory, staging
from safeload.errors import ConfigError, DigestMismatchError, FileSetError, LimitError, StagingError
from safeload.files import Root
from safeload.formats import MemorySource
from safeload.manifest import FileEntry, Manifest, ManifestTensor, TrustedManifest, encode_chunks
from safeload.policy import load_policy
from safeload.publishing import describe
from safeload.scanning import admit
from safeload.staging import StagedCheckpoint, stage, stream

MIB = 1024 * 1024
CHUNK = 4 * mmap.PAGESIZE
PAYLOAD = 100  # where the one tensor of each file begins


def content(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def entry(path: str, data: bytes, *, has_tensor: bool = True, blake3: bool = False) -> FileEntry:
    tensors: tuple[ManifestTensor, ...] = ()
    if has_tensor:
        n = len(data) - PAYLOAD
        tensors = (
            ManifestTensor(name="", dtype="uint8", shape=(n,), order="C", offset=PAYLOAD, nbytes=n, sha256="0" * 64),
        )
    pieces = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    found = FileEntry(
        path=path,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        chunks=encode_chunks(b"".join(hashlib.sha256(p).digest() for p in pieces)) if len(pieces) > 1 else None,
        format="pickle" if has_tensor else "json",
        role="weights" if has_tensor else "config",
        tensors=tensors,
    )
    if not blake3:
        return found
    from blake3 import blake3 as b3

    chunks = encode_chunks(b"".join(b3(p).digest() for p in pieces)) if len(pieces) > 1 else None
    return replace(found, blake3=b3(data).hexdigest(), blake3_chunks=chunks)


def trusted_of(entries: list[FileEntry]) -> TrustedManifest:
    """The proof, without the signatures that are another module's matter."""
    issued = datetime(2025, 1, 1, tzinfo=UTC)
    manifest = Manifest.of(entries, stream="test/model", revision="1", issued=issued, tool_version="0")
    return TrustedManifest(manifest, hashlib.sha256(manifest.to_payload()).hexdigest(), (), 1)


def lay_out(directory: Path, contents: Mapping[str, bytes]) -> None:
    for path, data in contents.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


SIZES = [9 * CHUNK + 5, 3 * CHUNK, 7 * CHUNK - 1, CHUNK, CHUNK - 1, 5000, 200, 101, 2 * CHUNK + 1, 6 * CHUNK]
CONTENTS = {f"ckpt-0/{i:02d}": content(i, size) for i, size in enumerate(SIZES)}
INERT = {"config.json": b"{}", "z.json": b"[]"}
ALL = {**CONTENTS, **INERT}
LARGEST = 10 * CHUNK
"""Bytes of memory, in whole pages, that the largest file takes."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, slabs and batches of some pages, so that a few kilobytes go through all that gigabytes do."""
    for module in (staging, safeload.manifest):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(staging, "SMALL_FILE_BYTES", CHUNK)
    monkeypatch.setattr(staging, "SLAB_BYTES", 2 * CHUNK)
    monkeypatch.setattr(staging, "HASH_CHUNK_BYTES", 1000)
    monkeypatch.setattr(staging, "WINDOW_BYTES", 64)
    monkeypatch.setattr(staging, "BATCH_BYTES", 10 * CHUNK)


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """Every memory mapping that staging makes."""
    made: list[mmap.mmap] = []

    def recorded(*args: int, **kwargs: int) -> mmap.mmap:
        made.append(mmap.mmap(*args, **kwargs))
        return made[-1]

    class Recording:
        def __getattr__(self, name: str) -> object:
            return recorded if name == "mmap" else getattr(mmap, name)

    monkeypatch.setattr(memory, "mmap", Recording())
    return made


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    lay_out(tmp_path / "checkpoint", ALL)
    return tmp_path / "checkpoint"


def trusted(*, blake3: bool = False) -> TrustedManifest:
    entries = [entry(path, data, blake3=blake3) for path, data in CONTENTS.items()]
    return trusted_of([*entries, *(entry(path, data, has_tensor=False, blake3=blake3) for path, data in INERT.items())])


def contents_of(batches: Iterator[StagedCheckpoint]) -> list[dict[str, bytes]]:
    return [{path: bytes(file.view) for path, file in batch.files.items()} for batch in batches]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("safeload")]


# --- batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("budget", [LARGEST, 2 * LARGEST, 3 * LARGEST + 4096, 1000 * CHUNK, None])
def test_every_file_is_in_exactly_one_batch_in_the_manifests_order(
    checkpoint: Path, budget: int | None, n_threads: int
) -> None:
    manifest = trusted()
    with stream(checkpoint, manifest, memory_budget=budget, threads=n_threads) as batches:
        seen = contents_of(batches)
    assert len(seen) > 2
    assert [list(batch) for batch in seen] == [sorted(batch) for batch in seen]
    assert sorted(path for batch in seen for path in batch) == sorted(ALL)
    assert {path: data for batch in seen for path, data in batch.items()} == ALL


def test_each_batch_is_a_proof_with_its_files_as_signed(checkpoint: Path) -> None:
    manifest = trusted()
    with stream(checkpoint, manifest) as batches:
        for batch in batches:
            assert batch.trusted is manifest
            for path, file in batch.files.items():
                assert file.entry is manifest.manifest.by_path[path]
                assert (file.present, file.algorithm, file.view.readonly) == (None, "sha256", True)
                if file.entry.tensors:
                    assert np.frombuffer(file.view, np.uint8, offset=PAYLOAD).ctypes.data % 64 == 0


def test_files_without_tensors_come_first_and_then_the_largest(checkpoint: Path) -> None:
    with stream(checkpoint, trusted(), memory_budget=2 * LARGEST) as batches:
        seen = [list(batch) for batch in contents_of(batches)]
    assert seen[0] == sorted(INERT)
    assert seen[1] == ["ckpt-0/00"]
    assert "ckpt-0/07" in seen[-1]


def test_indexes_come_before_what_may_be_read_by_them(tmp_path: Path) -> None:
    # A data file of a bundle without a tensor in it, which sorts before its index and has a batch of its own.
    contents = {"b.data": content(1, 200_000), "b.index": content(2, 10)}
    lay_out(tmp_path, contents)
    listed = [
        replace(entry("b.data", contents["b.data"], has_tensor=False), format="tensorflow", role="weights"),
        replace(entry("b.index", contents["b.index"], has_tensor=False), format="index"),
    ]
    with stream(tmp_path, trusted_of(listed), memory_budget=300_000) as batches:
        found = [(list(staged.files), set(staged.indexes)) for staged in batches]
    assert found == [(["b.index"], {"b.index"}), (["b.data"], {"b.index"})]


@pytest.mark.parametrize("budget", [LARGEST, 2 * LARGEST, 2 * LARGEST + CHUNK, 3 * LARGEST, 50 * CHUNK])
def test_the_sum_of_all_memory_never_exceeds_the_budget(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mappings: list[mmap.mmap], budget: int
) -> None:
    alive: list[int] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        alive.append(sum(len(mapping) for mapping in list(mappings) if not mapping.closed))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with stream(checkpoint, trusted(), memory_budget=budget) as batches:
        assert sum(map(len, contents_of(batches))) == len(ALL)
    assert 0 < max(alive) <= budget
    assert all(mapping.closed for mapping in mappings)


def test_memory_is_used_again(checkpoint: Path, mappings: list[mmap.mmap]) -> None:
    with stream(checkpoint, trusted(), memory_budget=2 * LARGEST) as batches:
        assert len(contents_of(batches)) > 4
    assert len(mappings) == 2


@pytest.mark.parametrize("n_batches", [1, 2, 3, 4])
def test_the_next_two_batches_are_read_while_one_is_used_as_far_as_the_budget_allows(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, n_batches: int
) -> None:
    read = read_of(monkeypatch, checkpoint)
    large = ["ckpt-0/00", "ckpt-0/02", "ckpt-0/09", "ckpt-0/01"]
    monkeypatch.setattr(staging, "BATCH_BYTES", mmap.PAGESIZE)
    wanted = dict.fromkeys(large)
    with stream(checkpoint, trusted(), memory_budget=n_batches * LARGEST, wanted=wanted) as batches:
        assert list(next(batches).files) == large[:1]
        expected = set(large[: min(n_batches, 3)])
        deadline = time.monotonic() + 10
        while set(read) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert set(read) == expected


# --- what becomes of a batch ----------------------------------------------------------------------------------------


def test_a_batch_ends_when_the_next_is_asked_for_or_the_context_is_left(checkpoint: Path) -> None:
    with stream(checkpoint, trusted(), memory_budget=2 * LARGEST) as batches:
        first = next(batches)
        second = next(batches)
        for file in first.files.values():
            with pytest.raises(ValueError, match="released"):
                bytes(file.view)
        assert {path: bytes(file.view) for path, file in second.files.items()}
    for file in second.files.values():
        with pytest.raises(ValueError, match="released"):
            bytes(file.view)


def test_what_was_made_from_a_batch_stays_as_it_is_and_its_memory_is_not_used_again(
    checkpoint: Path, mappings: list[mmap.mmap]
) -> None:
    kept: dict[str, Any] = {}
    with stream(checkpoint, trusted(), memory_budget=4 * LARGEST) as batches:
        for batch in batches:
            if not kept:
                kept = {path: np.frombuffer(file.view, np.uint8) for path, file in batch.files.items()}
            if "ckpt-0/00" in batch.files:
                kept["slice"] = batch.files["ckpt-0/00"].view[7:70]
    expected = {path: ALL[path] for path in INERT} | {"slice": CONTENTS["ckpt-0/00"][7:70]}
    assert {path: bytes(data) for path, data in kept.items()} == expected
    assert [mapping.closed for mapping in mappings].count(False) == 2
    kept.clear()
    gc.collect()
    assert sum(sys.getrefcount(mapping) for mapping in mappings)  # only the fixture has them now
    for mapping in mappings:
        mapping.close()


def test_memory_that_is_kept_counts_against_the_budget_and_is_refused_by_name(checkpoint: Path) -> None:
    with stream(checkpoint, trusted(), memory_budget=2 * LARGEST) as batches:
        kept: list[memoryview] = []
        with pytest.raises(StagingError) as caught:
            kept.extend(file.view[0:1] for batch in batches for file in batch.files.values())
    assert str(2 * LARGEST) in caught.value.message
    assert "in use by what was made from batches before" in caught.value.message
    assert "--memory-budget" in str(caught.value.hint)


def test_memory_that_was_let_go_of_late_is_used_again(checkpoint: Path) -> None:
    kept: list[Any] = []
    with stream(checkpoint, trusted(), memory_budget=2 * LARGEST) as batches:
        for batch in batches:
            # As a loop does whose variables live until they are assigned again.
            kept = [file.view[0:1] for file in batch.files.values()]
    assert kept


def test_memory_that_only_a_dead_cycle_holds_is_found(checkpoint: Path) -> None:
    gc.disable()
    try:
        with stream(checkpoint, trusted(), memory_budget=LARGEST) as batches:
            for batch in batches:
                cycle: list[Any] = [file.view[0:1] for file in batch.files.values()]
                cycle.append(cycle)
                del cycle
    finally:
        gc.enable()


def test_a_batch_cannot_be_written_to(tmp_path: Path) -> None:
    lay_out(tmp_path / "checkpoint", {"a": content(1, 3 * MIB), "b": content(2, 2 * MIB)})
    script = """
        import ctypes, hashlib, resource
        import numpy as np
        from datetime import UTC, datetime
        from pathlib import Path
        from safeload.manifest import FileEntry, Manifest, TrustedManifest
        from safeload.staging import stream
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        entries = []
        for path in ("a", "b"):
            data = Path("checkpoint", path).read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            entries.append(FileEntry(path=path, size=len(data), sha256=digest, format="json", role="config"))
        manifest = Manifest.of(entries, stream="a/b", revision="1", issued=datetime.now(UTC), tool_version="0")
        with stream("checkpoint", TrustedManifest(manifest, "0" * 64, (), 1), memory_budget=3 << 20) as batches:
            for number, batch in enumerate(batches):
                (file,) = batch.files.values()
                print(number, flush=True)
                if number:  # in memory that was used before
                    ctypes.memset(np.frombuffer(file.view, np.uint8).ctypes.data, 1, 1)
                    print("written", flush=True)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (run.stdout, run.returncode) == ("0\n1\n", -signal.SIGSEGV), run.stderr


# --- what is wanted -----------------------------------------------------------------------------------------------


def read_of(monkeypatch: pytest.MonkeyPatch, directory: Path) -> dict[str, list[range]]:
    """What is read of each file, once something was."""
    names = {path.stat().st_ino: path.relative_to(directory).as_posix() for path in directory.rglob("*")}
    read: dict[str, list[range]] = {}
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = real(fd, buffers, offset)
        if got:
            read.setdefault(names[os.fstat(fd).st_ino], []).append(range(offset, offset + got))
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    return read


def test_only_wanted_files_are_opened_and_all_are_looked_for(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_of(monkeypatch, checkpoint)
    wanted = {"ckpt-0/01": None, "config.json": None}
    with stream(checkpoint, trusted(), wanted=wanted) as batches:
        seen = contents_of(batches)
    assert {path: data for batch in seen for path, data in batch.items()} == {path: ALL[path] for path in wanted}
    assert sorted(read) == sorted(wanted)
    (checkpoint / "ckpt-0" / "05").unlink()
    with pytest.raises(FileSetError), stream(checkpoint, trusted(), wanted=wanted) as batches:
        next(batches)


@pytest.mark.parametrize(
    ("ranges", "chunks"),
    [
        ((), [0, 9]),
        ((range(3 * CHUNK, 3 * CHUNK + 1),), [0, 3, 9]),
        ((range(3 * CHUNK - 1, 3 * CHUNK + 1),), [0, 2, 3, 9]),
        ((range(5 * CHUNK, 5 * CHUNK),), [0, 9]),
        ((range(6 * CHUNK, 8 * CHUNK), range(CHUNK, CHUNK + 9)), [0, 1, 6, 7, 9]),
    ],
)
def test_ranges_are_widened_to_chunks_and_to_what_a_scan_reads_and_nothing_else_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ranges: tuple[range, ...], chunks: list[int]
) -> None:
    read = read_of(monkeypatch, checkpoint)
    data = CONTENTS["ckpt-0/00"]
    with stream(checkpoint, trusted(), wanted={"ckpt-0/00": ranges}) as batches:
        (file,) = next(batches).files.values()
        assert file.present is not None
        assert [i for i in range(10) if any(i * CHUNK in part for part in file.present)] == chunks
        assert all(part.start % CHUNK == 0 and part.stop % CHUNK in {0, len(data) % CHUNK} for part in file.present)
        assert file.view.nbytes == len(data)
        for part in file.present:
            assert file.view[part.start : part.stop] == data[part.start : part.stop]
    got = {byte for part in read["ckpt-0/00"] for byte in part}
    assert len(got) == sum(map(len, read["ckpt-0/00"])) == sum(map(len, file.present))


def test_parts_count_by_what_is_read_and_not_by_the_files_length(checkpoint: Path) -> None:
    wanted = {"ckpt-0/00": ()}
    with stream(checkpoint, trusted(), wanted=wanted, memory_budget=3 * CHUNK) as batches:
        assert next(batches).files["ckpt-0/00"].present == (range(CHUNK), range(9 * CHUNK, SIZES[0]))


def test_without_chunk_digests_or_with_all_chunks_the_whole_file_is_read(checkpoint: Path) -> None:
    wanted = {"ckpt-0/05": (range(1),), "ckpt-0/01": (range(1), range(CHUNK, 2 * CHUNK + 1))}
    with stream(checkpoint, trusted(), wanted=wanted) as batches:
        assert [f.present for batch in batches for f in batch.files.values()] == [None, None]


@pytest.mark.parametrize("index", [0, 3, 9])
def test_a_changed_byte_in_a_chunk_that_is_read_is_refused_and_in_another_is_not_met(
    checkpoint: Path, index: int
) -> None:
    flip(checkpoint / "ckpt-0" / "00", index * CHUNK + 2)
    with stream(checkpoint, trusted(), wanted={"ckpt-0/00": (range(4 * CHUNK, 4 * CHUNK + 1),)}) as batches:
        if index == 3:
            assert next(batches).files
            return
        with pytest.raises(DigestMismatchError) as caught:
            next(batches)
    (finding,) = caught.value.findings
    assert (finding.code, finding.file, finding.offset) == ("digest-mismatch", "ckpt-0/00", index * CHUNK)
    assert "1 of 3 chunks differ" in finding.message


@pytest.mark.parametrize(
    "wanted",
    [
        {"nothing": None},
        {"ckpt-0/00": (range(-1, 5),)},
        {"ckpt-0/00": (range(SIZES[0], SIZES[0] + 1),)},
        {"ckpt-0/00": (range(0, 10, 2),)},
    ],
)
def test_what_the_manifest_does_not_list_cannot_be_wanted(checkpoint: Path, wanted: Any) -> None:
    with pytest.raises(ConfigError), stream(checkpoint, trusted(), wanted=wanted):
        pass


def test_bytes_that_were_not_read_are_not_parsed() -> None:
    source = MemorySource(bytes(100), (range(10), range(90, 100)))
    assert (source.read(0, 10), source.read(90, 99), source.read(100, 5)) == (bytes(10), bytes(10), b"")
    for offset, nbytes in ((5, 6), (10, 1), (89, 2), (0, 100)):
        with pytest.raises(LimitError) as caught:
            source.read(offset, nbytes)
        assert caught.value.findings[0].code == "not-staged"
        with pytest.raises(LimitError):
            source.peek(offset, nbytes)


def test_what_is_read_of_a_file_in_parts_is_enough_to_admit_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real sizes
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    array = np.frombuffer(content(5, 70 * MIB), np.float32).reshape(-1, 256)
    (directory / "tensor00000_000").write_bytes(pickle.dumps(array, protocol=4))
    manifest, _ = describe(directory, model="test/model", revision="1", blake3=True)
    proof = TrustedManifest(manifest, hashlib.sha256(manifest.to_payload()).hexdigest(), (), 1)
    (tensor,) = manifest.files[0].tensors
    row = 40 * MIB // 1024
    rows = range(tensor.offset + row * 1024, tensor.offset + (row + 7) * 1024)
    with stream(directory, proof, wanted={"tensor00000_000": (rows,)}) as batches:
        (batch,) = [next(batches)]
        assert admit(batch, policy=load_policy("numpy-quantized")).values
        (file,) = batch.files.values()
        assert sum(map(len, file.present or ())) < 60 * MIB
        read = np.frombuffer(file.view[rows.start : rows.stop], np.float32).reshape(7, 256)
        np.testing.assert_array_equal(read, array[row : row + 7])
        assert file.algorithm == "blake3"


def test_a_file_of_another_host_may_be_missing_and_is_not_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_of(monkeypatch, checkpoint)
    for name in ("02", "03"):
        (checkpoint / "ckpt-0" / name).unlink()
    others = {"ckpt-0/02", "ckpt-0/03", "ckpt-0/05"}
    with stream(checkpoint, trusted(), absent=others.__contains__) as batches:
        seen = {path for batch in contents_of(batches) for path in batch}
    assert seen == set(ALL) - others
    assert set(read) == seen
    with pytest.raises(FileSetError) as caught, stream(checkpoint, trusted(), absent={"ckpt-0/02"}.__contains__):
        pass
    assert [(f.code, f.file) for f in caught.value.findings] == [("missing-file", "ckpt-0/03")]


def test_a_file_of_another_host_is_held_to_its_length_if_it_is_there_and_must_be_there_if_it_is_wanted(
    checkpoint: Path,
) -> None:
    os.truncate(checkpoint / "ckpt-0" / "05", 7)
    with pytest.raises(FileSetError) as caught, stream(checkpoint, trusted(), absent={"ckpt-0/05"}.__contains__):
        pass
    assert [(f.code, f.file) for f in caught.value.findings] == [("size-mismatch", "ckpt-0/05")]
    (checkpoint / "ckpt-0" / "05").unlink()
    wanted = {"ckpt-0/05": None}
    with (
        pytest.raises(FileSetError) as caught,
        stream(checkpoint, trusted(), wanted=wanted, absent={"ckpt-0/05"}.__contains__),
    ):
        pass
    assert [(f.code, f.file) for f in caught.value.findings] == [("missing-file", "ckpt-0/05")]


# --- BLAKE3 -------------------------------------------------------------------------------------------------------


def test_blake3_is_what_is_computed_where_it_is_signed_and_installed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("blake3")
    manifest = trusted(blake3=True)
    monkeypatch.setattr(hashlib, "sha256", lambda *_: pytest.fail("SHA-256 was computed"))
    staged = stage(checkpoint, manifest)
    assert {path: bytes(file.view) for path, file in staged.files.items()} == ALL
    assert {file.algorithm for file in staged.files.values()} == {"blake3"}


@pytest.mark.parametrize(("path", "offset"), [("ckpt-0/00", 5 * CHUNK), ("ckpt-0/05", 0), ("config.json", 1)])
def test_a_changed_byte_is_refused_by_blake3_too(checkpoint: Path, path: str, offset: int) -> None:
    pytest.importorskip("blake3")
    flip(checkpoint / path, offset)
    with pytest.raises(DigestMismatchError) as caught:
        stage(checkpoint, trusted(blake3=True))
    (finding,) = caught.value.findings
    assert (finding.code, finding.file) == ("digest-mismatch", path)
    assert "expected blake3:" in finding.message
    assert "found blake3:" in finding.message


def test_without_its_package_a_manifest_with_blake3_is_held_by_sha256(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("blake3")
    manifest = trusted(blake3=True)
    monkeypatch.setitem(sys.modules, "blake3", None)
    staged = stage(checkpoint, manifest)
    assert {file.algorithm for file in staged.files.values()} == {"sha256"}
    flip(checkpoint / "ckpt-0" / "00", 7)
    with pytest.raises(DigestMismatchError, match="expected sha256:"):
        stage(checkpoint, manifest)


def test_a_file_in_chunks_whose_chunks_have_no_blake3_is_held_by_their_sha256(checkpoint: Path) -> None:
    pytest.importorskip("blake3")
    files = [replace(file, blake3_chunks=None) for file in trusted(blake3=True).manifest.files]
    staged = stage(checkpoint, trusted_of(files))
    assert {path for path, file in staged.files.items() if file.algorithm == "sha256"} == {
        file.path for file in files if file.chunks is not None
    }


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_file_larger_than_the_budget_is_refused_by_name_before_a_byte_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mappings: list[mmap.mmap]
) -> None:
    monkeypatch.setattr(Root, "open", lambda *_: pytest.fail("a file was opened"))
    budget = 9 * CHUNK + 4096 - 1
    with pytest.raises(StagingError) as caught, stream(checkpoint, trusted(), memory_budget=budget):
        pass
    assert "ckpt-0/00" in caught.value.message
    assert str(budget) in caught.value.message
    assert str(9 * CHUNK + 4096) in caught.value.message
    assert str(9 * CHUNK + 4096) in str(caught.value.hint)
    assert mappings == []


def test_what_indexes_take_is_in_the_budget_that_a_refusal_asks_for(tmp_path: Path) -> None:
    data = {"a.safetensors": b"x" * 10_000, "i.json": b"{" * 5000}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    formats = {"a.safetensors": "safetensors", "i.json": "index"}
    listed = trusted_of(
        [
            FileEntry(
                path=name,
                size=len(content),
                sha256=hashlib.sha256(content).hexdigest(),
                format=formats[name],
                role="weights",
            )
            for name, content in data.items()
        ]
    )
    beside = "beside 5000 bytes of indexes, the memory budget is 14000"
    with pytest.raises(StagingError, match=beside) as caught, stream(tmp_path, listed, memory_budget=14_000):
        pass
    enough = int(str(caught.value.hint).removeprefix("give --memory-budget ").removesuffix(" or more"))
    with stream(tmp_path, listed, memory_budget=enough) as batches:
        assert {path for batch in batches for path in batch.files} == data.keys()


@pytest.mark.parametrize("budget", [0, 1, 4095])
def test_a_budget_of_less_than_a_page_is_refused(checkpoint: Path, budget: int) -> None:
    with (
        pytest.raises(StagingError, match="the memory budget is"),
        stream(checkpoint, trusted(), wanted=dict.fromkeys(INERT), memory_budget=budget),
    ):
        pass


def test_the_whole_file_set_is_checked_before_anything_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "ckpt-0" / "07").unlink()
    (checkpoint / "more").write_bytes(b"")
    monkeypatch.setattr(Root, "open", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(FileSetError) as caught, stream(checkpoint, trusted(), wanted={"config.json": None}):
        pass
    assert [(f.code, f.file) for f in caught.value.findings] == [
        ("missing-file", "ckpt-0/07"),
        ("unlisted-file", "more"),
    ]


def test_a_batch_that_is_not_the_signed_one_is_refused_with_all_that_is_wrong_in_it_and_nothing_stays(
    checkpoint: Path, mappings: list[mmap.mmap]
) -> None:
    for name in ("06", "07"):
        flip(checkpoint / "ckpt-0" / name, 3)
    before = sorted(Path("/proc/self/fd").iterdir())
    seen: list[str] = []
    with (
        pytest.raises(DigestMismatchError) as caught,
        stream(checkpoint, trusted(), memory_budget=2 * LARGEST) as batches,
    ):
        seen.extend(path for batch in batches for path in batch.files)
    assert [f.file for f in caught.value.findings] == ["ckpt-0/06", "ckpt-0/07"]
    assert seen
    assert not {"ckpt-0/06", "ckpt-0/07"} & set(seen)
    assert all(mapping.closed for mapping in mappings)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert threads() == []


def test_a_read_error_in_a_batch_ahead_is_the_error_and_no_other(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = (checkpoint / "ckpt-0" / "02").stat().st_ino
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(fd).st_ino == bad:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    seen: list[str] = []
    monkeypatch.setattr(os, "preadv", preadv)
    with (
        pytest.raises(StagingError, match=r"ckpt-0/02 at byte \d+: Input/output error"),
        stream(checkpoint, trusted(), memory_budget=4 * LARGEST, threads=3) as batches,
    ):
        seen.extend(path for batch in batches for path in batch.files)
    assert "ckpt-0/02" not in seen
    assert threads() == []


# --- how it ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["left", "error", "interrupted"])
def test_however_the_context_is_left_nothing_stays(
    checkpoint: Path, mappings: list[mmap.mmap], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    real = os.preadv

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        time.sleep(0.002)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    before = sorted(Path("/proc/self/fd").iterdir())

    def use() -> None:
        with stream(checkpoint, trusted(), memory_budget=3 * LARGEST) as batches:
            next(batches)
            if ending == "error":
                raise ZeroDivisionError
            if ending == "interrupted":
                raise KeyboardInterrupt

    if ending == "left":
        use()
    else:
        with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
            use()
    assert mappings
    assert all(mapping.closed for mapping in mappings)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert threads() == []


def test_an_iterator_that_outlives_its_context_does_not_look_complete(checkpoint: Path) -> None:
    with stream(checkpoint, trusted(), memory_budget=2 * LARGEST) as batches:
        next(batches)
    with pytest.raises(RuntimeError, match="was left"):
        next(batches)


def test_progress_counts_what_is_wanted_up_to_the_total_from_the_calling_thread(checkpoint: Path) -> None:
    told: list[tuple[str, int, int, int]] = []
    with stream(
        checkpoint,
        trusted(),
        wanted={"ckpt-0/00": (), "config.json": None},
        progress=lambda phase, done, of: told.append((phase, done, of, threading.get_ident())),
    ) as batches:
        assert sum(len(batch.files) for batch in batches) == 2
    total = CHUNK + 5 + 2
    assert total == SIZES[0] - 8 * CHUNK + 2
    assert told[-1] == ("staging", total, total, threading.get_ident())
    assert [done for _, done, _, _ in told] == sorted(done for _, done, _, _ in told)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


STREAMING = """
    import hashlib, sys, time
    from datetime import UTC, datetime
    from pathlib import Path
    from safeload.manifest import FileEntry, Manifest, TrustedManifest
    from safeload.memory import track
    from safeload.staging import stream

    entries = []
    for file in sorted(Path("checkpoint").iterdir()):
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        size = file.stat().st_size
        entries.append(FileEntry(path=file.name, size=size, sha256=digest, format="json", role="config"))
    manifest = Manifest.of(entries, stream="a/b", revision="1", issued=datetime.now(UTC), tool_version="0")
    trusted = TrustedManifest(manifest, "0" * 64, (), 1)
"""


def test_peak_memory_of_a_stream_is_bounded_by_the_budget_and_not_by_the_data(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    for number in range(24):
        (tmp_path / "checkpoint" / f"{number:02d}").write_bytes(content(number, 8 * MIB))
    script = (
        STREAMING
        + """
    n = 0
    with track(seconds=0.001) as use:
        with stream("checkpoint", trusted, memory_budget=32 << 20) as batches:
            for batch in batches:
                n += sum(file.view.nbytes for file in batch.files.values())
    print(n, use.growth)
    """
    )
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    n, growth = map(int, run.stdout.split())
    assert n == 192 * MIB
    # The constant is what threads, descriptors and the objects of 24 files take.
    assert 16 * MIB < growth < 1.05 * 32 * MIB + 4 * MIB


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_nothing_behind(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "tmp").mkdir()
    for number in range(6):
        (tmp_path / "checkpoint" / f"{number:02d}").write_bytes(content(number, 4 * MIB))
    script = (
        STREAMING
        + """
    with stream("checkpoint", trusted, memory_budget=16 << 20) as batches:
        for batch in batches:
            print("ready", flush=True)
            time.sleep(60)
    """
    )
    shared = Path("/dev/shm")  # noqa: S108 - looked at, not written to
    before = set(shared.iterdir()) if shared.is_dir() else set()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path, env={**environment(), "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        open_files = {os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()}  # noqa: PTH115
        process.send_signal(how)
        process.wait(10)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert not [name for name in open_files if "memfd" in name or "/dev/shm" in name or "deleted" in name]  # noqa: S108
    mine = {path for path in (set(shared.iterdir()) if shared.is_dir() else set()) - before if "safeload" in path.name}
    assert mine == set()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [f"{n:02d}" for n in range(6)]
