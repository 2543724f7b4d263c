"""Claims of `safeload.staging`: exactly the signed bytes, read once, in memory that nobody can change any more."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import mmap
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import safeload.manifest
from safeload import files, memory, parallel, staging
from safeload.digests import HASH_CHUNK_BYTES
from safeload.errors import ConfigError, DigestMismatchError, FileSetError, Finding, StagingError
from safeload.files import Root
from safeload.manifest import FileEntry, Manifest, ManifestTensor, TrustedManifest, encode_chunks
from safeload.staging import check_file_set, stage

MIB = 1024 * 1024


def content(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def entry(path: str, data: bytes, payload: int | None = None) -> FileEntry:
    tensors: tuple[ManifestTensor, ...] = ()
    if payload is not None:
        n = len(data) - payload
        tensors = (
            ManifestTensor(name="", dtype="uint8", shape=(n,), order="C", offset=payload, nbytes=n, sha256="0" * 64),
        )
    digest = hashlib.sha256(data).hexdigest()
    return FileEntry(path=path, size=len(data), sha256=digest, format="pickle", role="weights", tensors=tensors)


def manifest_of(contents: Mapping[str, bytes], payloads: Mapping[str, int] | None = None) -> Manifest:
    entries = [entry(path, data, (payloads or {}).get(path)) for path, data in contents.items()]
    issued = datetime(2025, 1, 1, tzinfo=UTC)
    return Manifest.of(entries, stream="test/model", revision="1", issued=issued, tool_version="0")


def trust(manifest: Manifest) -> TrustedManifest:
    """The proof, without the signatures that are another module's matter."""
    return TrustedManifest(manifest, hashlib.sha256(manifest.to_payload()).hexdigest(), (), 1)


def lay_out(directory: Path, contents: Mapping[str, bytes]) -> None:
    for path, data in contents.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def whole_plan(manifest: Manifest) -> list[staging._Plan]:
    """How `stage` lays a checkpoint out."""
    files = staging._wanted_files(manifest)
    return staging._plan(files, room=staging.SLAB_BYTES, alone=staging.SMALL_FILE_BYTES)


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """Every memory mapping that staging makes, so that a test sees whether it was given back."""
    made: list[mmap.mmap] = []

    def recorded(*args: int, **kwargs: int) -> mmap.mmap:
        made.append(mmap.mmap(*args, **kwargs))
        return made[-1]

    class Recording:
        def __getattr__(self, name: str) -> object:
            return recorded if name == "mmap" else getattr(mmap, name)

    monkeypatch.setattr(memory, "mmap", Recording())
    return made


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


CONTENTS = {
    "ckpt-0/big": content(1, 3 * MIB + 17),
    "ckpt-0/small": content(2, 5000),
    "ckpt-0/sub/other": content(3, 2 * MIB),
    "config.json": b"{}",
    "empty": b"",
}


# --- what is staged -----------------------------------------------------------------------------------------------


def test_staged_files_hold_the_bytes_of_the_directory_in_the_manifests_order(tmp_path: Path) -> None:
    lay_out(tmp_path, CONTENTS)
    trusted = trust(manifest_of(CONTENTS))
    staged = stage(tmp_path, trusted)
    assert staged.trusted is trusted
    assert list(staged.files) == [file.path for file in trusted.manifest.files]
    for path, file in staged.files.items():
        assert file.entry is trusted.manifest.by_path[path]
        assert file.view == CONTENTS[path]
        assert file.view.nbytes == file.entry.size


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_small_files_over_several_slabs_come_out_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(staging, "SLAB_BYTES", 20_000)
    contents = {f"{i:03d}": content(i, (i * 997) % 9000) for i in range(60)}
    lay_out(tmp_path, contents)
    staged = stage(tmp_path, trust(manifest_of(contents)), threads=threads)
    assert {path: bytes(file.view) for path, file in staged.files.items()} == contents


def test_small_files_share_slabs_of_bounded_size_and_large_ones_stand_alone() -> None:
    contents = {f"{i:02d}": bytes(MIB) for i in range(70)} | {"large": bytes(MIB + 1)}
    plans = whole_plan(manifest_of(contents))
    assert [len(plan.slots) for plan in plans if plan.slots[0][0].entry.path != "large"] == [32, 32, 6]
    assert all(plan.nbytes <= staging.SLAB_BYTES for plan in plans)
    assert [len(plan.slots) for plan in plans if plan.slots[0][0].entry.path == "large"] == [1]


def test_each_first_payload_is_aligned_to_64_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLAB_BYTES", 10_000)
    payloads = {f"{i:03d}": i * 7 + 1 for i in range(40)} | {"large": 163}
    contents = {path: content(i, 2000 + i) for i, path in enumerate(payloads)} | {"large": content(99, 2 * MIB)}
    lay_out(tmp_path, contents)
    staged = stage(tmp_path, trust(manifest_of(contents, payloads)))
    for path, offset in payloads.items():
        payload = np.frombuffer(staged.files[path].view, np.uint8, offset=offset)
        assert payload.ctypes.data % 64 == 0
        assert payload.tobytes() == contents[path][offset:]


def test_views_are_read_only_and_so_is_what_numpy_makes_of_them(tmp_path: Path) -> None:
    lay_out(tmp_path, CONTENTS)
    staged = stage(tmp_path, trust(manifest_of(CONTENTS)))
    for file in staged.files.values():
        assert file.view.readonly
    array = np.frombuffer(staged.files["ckpt-0/big"].view, np.uint8)
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_a_view_keeps_the_memory_alive_and_nothing_else_does(tmp_path: Path) -> None:
    contents = {"file": content(1, 64 * MIB)}
    lay_out(tmp_path, contents)
    view = stage(tmp_path, trust(manifest_of(contents))).files["file"].view
    arena = weakref.ref(view.obj)
    array = np.frombuffer(view, np.uint8)
    del view
    gc.collect()
    assert arena() is not None
    assert array.tobytes() == contents["file"]
    del array
    gc.collect()
    assert arena() is None  # and with the mapping its memory


@pytest.mark.parametrize("path", ["ckpt-0/big", "ckpt-0/small"])
@pytest.mark.parametrize("alias", ["the mapping below the view", "the address"])
def test_writing_through_any_alias_ends_the_process(tmp_path: Path, path: str, alias: str) -> None:
    lay_out(tmp_path / "checkpoint", CONTENTS)
    (tmp_path / "payload").write_bytes(manifest_of(CONTENTS).to_payload())
    write = {
        "the mapping below the view": "memoryview(view.obj)[0] = 1",
        "the address": "ctypes.memset(np.frombuffer(view, np.uint8).ctypes.data, 1, 1)",
    }[alias]
    script = f"""
        import ctypes, pathlib
        import numpy as np
        from safeload.manifest import Manifest, TrustedManifest
        from safeload.staging import stage
        manifest = Manifest.parse(pathlib.Path("payload").read_bytes())
        view = stage("checkpoint", TrustedManifest(manifest, "0" * 64, (), 1)).files[{path!r}].view
        print("staged", flush=True)
        {write}
        print("written", flush=True)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (run.stdout, run.returncode) == ("staged\n", -signal.SIGSEGV), run.stderr


def test_the_files_on_disk_do_not_matter_after_staging(tmp_path: Path) -> None:
    lay_out(tmp_path, CONTENTS)
    staged = stage(tmp_path, trust(manifest_of(CONTENTS)))
    for path in CONTENTS:
        with (tmp_path / path).open("r+b") as on_disk:
            on_disk.write(b"\0" * 4096)
    for path, file in staged.files.items():
        assert file.view == CONTENTS[path]


def test_each_file_is_opened_once_and_each_byte_read_once_in_bounded_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path, CONTENTS)
    opened: list[str] = []
    read = 0
    real_open, real_preadv = Root.open, os.preadv

    def counted_open(root: Root, path: str) -> int:
        opened.append(path)
        return real_open(root, path)

    def counted_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        assert len(buffers[0]) <= HASH_CHUNK_BYTES
        got = real_preadv(fd, buffers, offset)
        read += got
        return got

    monkeypatch.setattr(Root, "open", counted_open)
    monkeypatch.setattr(os, "preadv", counted_preadv)
    stage(tmp_path, trust(manifest_of(CONTENTS)), threads=1)
    assert sorted(opened) == sorted(CONTENTS)
    assert read == sum(map(len, CONTENTS.values()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def test_resident_memory_is_bounded_by_the_data(tmp_path: Path) -> None:
    contents = {f"{i}": content(i, 40 * MIB) for i in range(3)} | {f"s{i}": content(i, 100_000) for i in range(100)}
    lay_out(tmp_path, contents)
    trusted = trust(manifest_of(contents))
    contents.clear()
    gc.collect()
    before = resident_bytes()
    staged = stage(tmp_path, trusted)
    assert resident_bytes() - before < 1.05 * trusted.manifest.totals.bytes + 8 * MIB
    assert len(staged.files) == 103


# --- what is refused ----------------------------------------------------------------------------------------------


def test_every_problem_of_the_file_set_is_a_finding_and_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {**CONTENTS, "gone": b"x", "linked": b"y", "piped": b"z"}
    lay_out(tmp_path, contents)
    trusted = trust(manifest_of(contents))
    (tmp_path / "gone").unlink()
    (tmp_path / "linked").unlink()
    (tmp_path / "linked").symlink_to("config.json")
    (tmp_path / "piped").unlink()
    os.mkfifo(tmp_path / "piped")
    (tmp_path / "config.json").write_bytes(b"{ }")
    (tmp_path / "ckpt-0" / "extra").write_bytes(b"")
    (tmp_path / "zz-link").symlink_to("/etc")
    monkeypatch.setattr(Root, "open", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(FileSetError) as caught:
        stage(tmp_path, trusted)
    assert [(f.file, f.code) for f in caught.value.findings] == [
        ("ckpt-0/extra", "unlisted-file"),
        ("config.json", "size-mismatch"),
        ("gone", "missing-file"),
        ("linked", "symlink"),
        ("piped", "not-a-regular-file"),
        ("zz-link", "symlink"),
    ]
    assert "2 bytes" in caught.value.findings[1].message
    assert "3 bytes" in caught.value.findings[1].message


def test_only_the_ignored_file_may_be_there_unlisted_and_a_listed_one_still_counts(tmp_path: Path) -> None:
    lay_out(tmp_path, {**CONTENTS, "manifest.json": b"signed", "other.json": b"signed"})
    ignore = {"manifest.json": b"signed"}
    with Root(tmp_path) as root:
        findings = check_file_set(root, manifest_of(CONTENTS), ignore=ignore)
        assert [(f.file, f.code) for f in findings] == [("other.json", "unlisted-file")]
        listed = manifest_of({**CONTENTS, "manifest.json": b"signed?", "other.json": b"signed"})
        findings = check_file_set(root, listed, ignore=ignore)
        assert [(f.file, f.code) for f in findings] == [("manifest.json", "size-mismatch")]
        for other in (b"", b"signe", b"signed!", b"Signed"):
            findings = check_file_set(root, manifest_of(CONTENTS), ignore={"manifest.json": other})
            assert [f.file for f in findings] == ["manifest.json", "other.json"]
    (tmp_path / "other.json").unlink()
    assert len(stage(tmp_path, trust(manifest_of(CONTENTS)), ignore=ignore).files) == len(CONTENTS)


def test_all_mismatching_files_are_reported_and_no_memory_stays(tmp_path: Path, mappings: list[mmap.mmap]) -> None:
    lay_out(tmp_path, CONTENTS)
    for path, offset in (("ckpt-0/big", 3 * MIB), ("ckpt-0/small", 0), ("config.json", 1)):
        flip(tmp_path / path, offset)
    with pytest.raises(DigestMismatchError) as caught:
        stage(tmp_path, trust(manifest_of(CONTENTS)), threads=1)
    assert [(f.file, f.code) for f in caught.value.findings] == [
        ("ckpt-0/big", "digest-mismatch"),
        ("ckpt-0/small", "digest-mismatch"),
        ("config.json", "digest-mismatch"),
    ]
    for finding in caught.value.findings:
        assert finding.file is not None
        assert hashlib.sha256(CONTENTS[finding.file]).hexdigest() in finding.message
        assert hashlib.sha256((tmp_path / finding.file).read_bytes()).hexdigest() in finding.message
    assert [mapping.closed for mapping in mappings] == [True] * 3


@pytest.mark.parametrize("change", ["grown", "shrunk"])
@pytest.mark.parametrize("path", ["ckpt-0/big", "ckpt-0/small"])
def test_a_file_whose_length_changes_after_the_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, change: str
) -> None:
    lay_out(tmp_path, CONTENTS)
    real = staging._require_memory

    def race(needed: int, budget: int | None) -> None:
        real(needed, budget)
        os.truncate(tmp_path / path, len(CONTENTS[path]) + (1 if change == "grown" else -1))

    monkeypatch.setattr(staging, "_require_memory", race)
    with pytest.raises(FileSetError) as caught:
        stage(tmp_path, trust(manifest_of(CONTENTS)))
    assert [(f.file, f.code) for f in caught.value.findings] == [(path, "size-mismatch")]


@pytest.mark.parametrize("swapped", ["ckpt-0/small", "ckpt-0"])
def test_a_file_or_directory_swapped_for_a_link_after_the_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappings: list[mmap.mmap], swapped: str
) -> None:
    top = tmp_path / "top"
    lay_out(top, CONTENTS)
    # Directories are cached as the walk met them, and a cached one is still the right one: here none is.
    monkeypatch.setattr(files, "MAX_CACHED_DIRECTORIES", 0)
    real = staging._require_memory

    def race(needed: int, budget: int | None) -> None:
        real(needed, budget)
        (top / swapped).rename(tmp_path / "moved")
        (top / swapped).symlink_to(tmp_path / "moved")

    monkeypatch.setattr(staging, "_require_memory", race)
    with pytest.raises(FileSetError) as caught:
        stage(top, trust(manifest_of(CONTENTS)))
    assert {f.code for f in caught.value.findings} == {"symlink"}
    assert [f.file for f in caught.value.findings] == [p for p in sorted(CONTENTS) if p.startswith(swapped)]
    assert all(mapping.closed for mapping in mappings)


def test_a_file_swapped_for_another_of_the_same_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path, CONTENTS)
    real = staging._require_memory

    def race(needed: int, budget: int | None) -> None:
        real(needed, budget)
        (tmp_path / "other").write_bytes(content(77, 5000))
        (tmp_path / "other").replace(tmp_path / "ckpt-0" / "small")

    monkeypatch.setattr(staging, "_require_memory", race)
    with pytest.raises(DigestMismatchError) as caught:
        stage(tmp_path, trust(manifest_of(CONTENTS)))
    assert [f.file for f in caught.value.findings] == ["ckpt-0/small"]


@pytest.mark.parametrize("budget", [None, 4 * MIB])
def test_the_budget_is_checked_before_a_byte_is_read_or_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappings: list[mmap.mmap], budget: int | None
) -> None:
    lay_out(tmp_path, CONTENTS)
    monkeypatch.setattr(staging, "available_memory", lambda: 4 * MIB)
    monkeypatch.setattr(Root, "open", lambda *_: pytest.fail("a file was opened"))
    manifest = manifest_of(CONTENTS)
    needed = sum(plan.nbytes for plan in whole_plan(manifest))
    with pytest.raises(StagingError) as caught:
        stage(tmp_path, trust(manifest), memory_budget=budget)
    assert str(needed) in caught.value.message
    assert str(4 * MIB) in caught.value.message
    assert f"give --memory-budget {needed}" in str(caught.value.hint)
    # Who set a budget is not short of memory.
    assert ("free memory" in str(caught.value.hint)) == (budget is None)
    assert mappings == []


def test_a_budget_of_exactly_what_is_needed_is_enough(tmp_path: Path) -> None:
    lay_out(tmp_path, CONTENTS)
    manifest = manifest_of(CONTENTS)
    needed = sum(plan.nbytes for plan in whole_plan(manifest))
    assert stage(tmp_path, trust(manifest), memory_budget=needed).files
    with pytest.raises(StagingError):
        stage(tmp_path, trust(manifest), memory_budget=needed - 1)


def test_memory_that_the_system_does_not_give_is_operational(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path, CONTENTS)
    mappings: list[mmap.mmap] = []
    left = [1]

    def failing(*args: int, **kwargs: int) -> mmap.mmap:
        if not left:
            raise OSError(12, "Cannot allocate memory")
        left.pop()
        mappings.append(mmap.mmap(*args, **kwargs))
        return mappings[-1]

    class Failing:
        def __getattr__(self, name: str) -> object:
            return failing if name == "mmap" else getattr(mmap, name)

    monkeypatch.setattr(memory, "mmap", Failing())
    with pytest.raises(StagingError, match="Cannot allocate memory"):
        stage(tmp_path, trust(manifest_of(CONTENTS)))
    assert [mapping.closed for mapping in mappings] == [True]


def test_pages_that_cannot_be_frozen_are_operational_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappings: list[mmap.mmap]
) -> None:
    class Refusing:
        @staticmethod
        def mprotect(*_: object) -> int:
            ctypes.set_errno(13)
            return -1

    monkeypatch.setattr(memory, "_LIBC", Refusing)
    lay_out(tmp_path, CONTENTS)
    with pytest.raises(StagingError, match="Permission denied") as caught:
        stage(tmp_path, trust(manifest_of(CONTENTS)))
    assert caught.tb is not None
    assert all(mapping.closed for mapping in mappings)


def test_fewer_threads_than_one_is_a_configuration_error(tmp_path: Path) -> None:
    lay_out(tmp_path, CONTENTS)
    with pytest.raises(ConfigError):
        stage(tmp_path, trust(manifest_of(CONTENTS)), threads=0)


# --- how it ends --------------------------------------------------------------------------------------------------


def test_the_first_read_error_stops_the_others_and_gives_all_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappings: list[mmap.mmap]
) -> None:
    contents = {"0-bad": content(0, 3 * MIB), "1-slow": content(1, 2 * MIB), "2-waiting": content(2, 2 * MIB - 1)}
    lay_out(tmp_path, contents)
    bad = (tmp_path / "0-bad").stat().st_ino
    slow = (tmp_path / "1-slow").stat().st_ino
    real, slow_begun, raised = os.preadv, threading.Event(), threading.Event()
    read: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        inode = os.fstat(fd).st_ino
        if inode == bad:
            slow_begun.wait(10)
            raised.set()
            raise OSError(5, "Input/output error")
        read.append(inode)
        if inode == slow:
            slow_begun.set()
            raised.wait(10)
            threading.Event().wait(0.5)
        return real(fd, buffers, offset)

    awaited = parallel.Crew._await

    def late(*args: Any) -> None:
        threading.Event().wait(0.2)  # the thread that waits is no help: it looks when all is over
        awaited(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(parallel.Crew, "_await", late)
    with pytest.raises(StagingError, match=r"0-bad at byte 0: Input/output error"):
        stage(tmp_path, trust(manifest_of(contents)), threads=2)
    assert read == [slow]
    assert [mapping.closed for mapping in mappings] == [True] * 3
    assert not [t for t in threading.enumerate() if t.name.startswith("safeload")]


def test_an_interruption_ends_the_threads_promptly_and_gives_all_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappings: list[mmap.mmap]
) -> None:
    contents = {"big": content(1, 20 * MIB), "big2": content(2, 20 * MIB)}
    lay_out(tmp_path, contents)
    monkeypatch.setattr(parallel, "_POLL_SECONDS", 0.01)
    real, pieces = os.preadv, []

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        pieces.append(offset)
        threading.Event().wait(0.2)
        return real(fd, buffers, offset)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", slow)
    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path, trust(manifest_of(contents)), progress=interrupt, threads=2)
    assert len(pieces) <= 4
    assert [mapping.closed for mapping in mappings] == [True] * 2
    assert not [t for t in threading.enumerate() if t.name.startswith("safeload")]


def test_progress_counts_up_to_the_total_from_the_calling_thread(tmp_path: Path) -> None:
    lay_out(tmp_path, CONTENTS)
    total = sum(map(len, CONTENTS.values()))
    told: list[tuple[str, int, int, int]] = []
    stage(
        tmp_path,
        trust(manifest_of(CONTENTS)),
        progress=lambda phase, done, of: told.append((phase, done, of, threading.get_ident())),
    )
    assert told[-1] == ("staging", total, total, threading.get_ident())
    assert [done for _, done, _, _ in told] == sorted(done for _, done, _, _ in told)


def test_no_descriptor_stays_open_whether_it_succeeds_or_not(tmp_path: Path) -> None:
    lay_out(tmp_path, CONTENTS)
    trusted = trust(manifest_of(CONTENTS))
    before = sorted(Path("/proc/self/fd").iterdir())
    stage(tmp_path, trusted)
    flip(tmp_path / "config.json", 0)
    with pytest.raises(DigestMismatchError):
        stage(tmp_path, trusted)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


# --- several threads at one file ----------------------------------------------------------------------------------

CHUNK = 4096


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (staging, safeload.manifest):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(staging, "SMALL_FILE_BYTES", CHUNK)
    monkeypatch.setattr(staging, "HASH_CHUNK_BYTES", 1000)


def chunked_entry(path: str, data: bytes) -> FileEntry:
    digests = b"".join(hashlib.sha256(data[start : start + CHUNK]).digest() for start in range(0, len(data), CHUNK))
    return replace(entry(path, data, 100), chunks=encode_chunks(digests) if len(data) > CHUNK else None)


def chunked_manifest(contents: Mapping[str, bytes]) -> Manifest:
    entries = [chunked_entry(path, data) for path, data in contents.items()]
    issued = datetime(2025, 1, 1, tzinfo=UTC)
    return Manifest.of(entries, stream="test/model", revision="1", issued=issued, tool_version="0")


LARGE = {
    "a": content(1, 11 * CHUNK),
    "b": content(2, 9 * CHUNK + 1),
    "c": content(3, CHUNK + 5),
    "small": content(4, CHUNK),
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_file_in_chunks_is_opened_once_read_once_and_comes_out_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    lay_out(tmp_path, LARGE)
    opened: list[str] = []
    read: list[tuple[int, int]] = []
    real_open, real_preadv = Root.open, os.preadv

    def counted_open(root: Root, path: str) -> int:
        opened.append(path)
        return real_open(root, path)

    def counted_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = real_preadv(fd, buffers, offset)
        read.append((os.fstat(fd).st_ino, got))
        return got

    monkeypatch.setattr(Root, "open", counted_open)
    monkeypatch.setattr(os, "preadv", counted_preadv)
    before = sorted(Path("/proc/self/fd").iterdir())
    told: list[int] = []
    staged = stage(
        tmp_path, trust(chunked_manifest(LARGE)), threads=threads, progress=lambda _, done, __: told.append(done)
    )
    assert {path: bytes(file.view) for path, file in staged.files.items()} == LARGE
    assert all(file.view.readonly for file in staged.files.values())
    assert sorted(opened) == sorted(LARGE)
    for path, data in LARGE.items():
        inode = (tmp_path / path).stat().st_ino
        assert sum(got for ino, got in read if ino == inode) == len(data)
    assert told[-1] == sum(map(len, LARGE.values()))
    assert sorted(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.usefixtures("small_chunks")
def test_threads_share_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"a": content(1, 11 * CHUNK)}
    lay_out(tmp_path, contents)
    real, meeting = os.preadv, threading.Barrier(2, timeout=10)
    met: set[int] = set()

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            meeting.wait()  # passes only if a second thread reads at the same time
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert stage(tmp_path, trust(chunked_manifest(contents)), threads=2).files["a"].view == contents["a"]
    assert len(met) == 2


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("offset", [0, CHUNK - 1, CHUNK, 5 * CHUNK + 7, 11 * CHUNK - 1])
def test_one_changed_byte_in_any_chunk_is_refused_with_its_place(
    tmp_path: Path, mappings: list[mmap.mmap], offset: int, threads: int
) -> None:
    lay_out(tmp_path, LARGE)
    flip(tmp_path / "a", offset)
    with pytest.raises(DigestMismatchError) as caught:
        stage(tmp_path, trust(chunked_manifest(LARGE)), threads=threads)
    (finding,) = caught.value.findings
    start = offset // CHUNK * CHUNK
    assert (finding.file, finding.code, finding.offset) == ("a", "digest-mismatch", start)
    for data in (LARGE["a"], (tmp_path / "a").read_bytes()):
        assert hashlib.sha256(data[start : start + CHUNK]).hexdigest() in finding.message
    assert "1 of 11 chunks differ" in finding.message
    assert all(mapping.closed for mapping in mappings)


@pytest.mark.usefixtures("small_chunks")
def test_chunks_in_another_order_are_refused_and_each_file_has_one_finding(tmp_path: Path) -> None:
    data = LARGE["a"]
    swapped = data[:CHUNK] + data[7 * CHUNK : 8 * CHUNK] + data[2 * CHUNK : 7 * CHUNK] + data[CHUNK : 2 * CHUNK]
    lay_out(tmp_path, {**LARGE, "a": swapped + data[8 * CHUNK :], "b": bytes(len(LARGE["b"]))})
    with pytest.raises(DigestMismatchError) as caught:
        stage(tmp_path, trust(chunked_manifest(LARGE)))
    assert [(f.file, f.offset) for f in caught.value.findings] == [("a", CHUNK), ("b", 0)]
    assert "2 of 11 chunks differ" in caught.value.findings[0].message
    assert "10 of 10 chunks differ" in caught.value.findings[1].message


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("change", ["grown", "shrunk", "linked"])
def test_a_file_in_chunks_that_changes_after_the_check_is_refused_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappings: list[mmap.mmap], change: str, threads: int
) -> None:
    top = tmp_path / "top"
    lay_out(top, LARGE)
    real = staging._require_memory

    def race(needed: int, budget: int | None) -> None:
        real(needed, budget)
        if change == "linked":
            (top / "a").rename(tmp_path / "moved")
            (top / "a").symlink_to(tmp_path / "moved")
        else:
            os.truncate(top / "a", len(LARGE["a"]) + (1 if change == "grown" else -1))

    monkeypatch.setattr(staging, "_require_memory", race)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(FileSetError) as caught:
        stage(top, trust(chunked_manifest(LARGE)), threads=threads)
    code = "symlink" if change == "linked" else "size-mismatch"
    assert [(f.file, f.code) for f in caught.value.findings] == [("a", code)]
    assert all(mapping.closed for mapping in mappings)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.usefixtures("small_chunks")
def test_a_file_in_chunks_that_cannot_be_read_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappings: list[mmap.mmap]
) -> None:
    lay_out(tmp_path, LARGE)
    real = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= 5 * CHUNK:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(StagingError, match="Input/output error"):
        stage(tmp_path, trust(chunked_manifest(LARGE)), threads=2)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert all(mapping.closed for mapping in mappings)


@pytest.mark.usefixtures("small_chunks")
def test_a_file_in_chunks_is_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[memory.Arena] = []
    real = memory.Arena.freeze

    def freeze(arena: memory.Arena) -> None:
        frozen.append(arena)
        real(arena)

    monkeypatch.setattr(memory.Arena, "freeze", freeze)
    lay_out(tmp_path, LARGE)
    stage(tmp_path, trust(chunked_manifest(LARGE)), threads=2)
    assert len(set(map(id, frozen))) == len(frozen) == 4
    flip(tmp_path / "b", 0)
    frozen.clear()
    with pytest.raises(DigestMismatchError):
        stage(tmp_path, trust(chunked_manifest(LARGE)), threads=2)
    assert frozen == []  # nothing of it is handed out


# --- the file set -------------------------------------------------------------------------------------------------


def file_set(directory: Path, contents: Mapping[str, bytes]) -> dict[tuple[str | None, str], Finding]:
    with Root(directory) as root:
        return {(f.file, f.code): f for f in check_file_set(root, manifest_of(contents))}


def test_each_way_of_being_incomplete_is_a_finding_of_its_own_and_all_come_in_one_run(tmp_path: Path) -> None:
    names = ("empty", "fifo", "folder", "grown", "gone", "link", "renamed", "twice")
    contents = {name: content(n, 100 + n) for n, name in enumerate(names)} | {"ok": b""}
    lay_out(tmp_path, {**contents, "empty": b"", "grown": bytes(1000), ".hidden/.deep/file": b"x", "ok (copy)": b"y"})
    for name in ("fifo", "folder", "gone", "link"):
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("ok")
    (tmp_path / "renamed").rename(tmp_path / "elsewhere")
    os.link(tmp_path / "twice", tmp_path / "second name")
    found = file_set(tmp_path, contents)
    assert sorted(found) == [
        (".hidden/.deep/file", "unlisted-file"),
        ("elsewhere", "unlisted-file"),
        ("empty", "empty-file"),
        ("fifo", "not-a-regular-file"),
        ("folder", "not-a-regular-file"),
        ("gone", "missing-file"),
        ("grown", "size-mismatch"),
        ("link", "symlink"),
        ("ok (copy)", "unlisted-file"),
        ("renamed", "missing-file"),
        ("second name", "unlisted-file"),
        ("twice", "hard-link"),
    ]
    assert "elsewhere" in str(found["renamed", "missing-file"].hint)
    assert "renamed" in str(found["elsewhere", "unlisted-file"].hint)
    assert "renamed" not in str(found["gone", "missing-file"].hint)
    assert "a directory" in found["folder", "not-a-regular-file"].message


def test_a_missing_shard_is_named_by_tensor_and_place(tmp_path: Path) -> None:
    shards = {f"ckpt-0/tensor{index:05d}_{part:03d}": b"x" for index in (416, 417) for part in range(8)}
    shards |= {"ckpt-0/tensor00418_000": b"x", "other/tensor00417_000": b"x"}
    lay_out(tmp_path, shards)
    (tmp_path / "ckpt-0" / "tensor00417_003").unlink()
    (tmp_path / "ckpt-0" / "tensor00418_000").unlink()
    found = file_set(tmp_path, shards)
    assert sorted(found) == [
        ("ckpt-0/tensor00417_003", "missing-file"),
        ("ckpt-0/tensor00418_000", "missing-file"),
    ]
    messages = {file: finding.message for (file, _), finding in found.items()}
    assert "tensor 417, shard 3 of 8 " in messages["ckpt-0/tensor00417_003"]
    assert "tensor 418, shard 0 of 1 " in messages["ckpt-0/tensor00418_000"]


def test_a_file_that_is_spelled_otherwise_is_taken_for_renamed_and_two_alike_are_not(tmp_path: Path) -> None:
    lay_out(tmp_path, {"CONFIG.json": b"{ }", "x": b"12", "y": b"34"})
    found = file_set(tmp_path, {"config.json": b"{}", "a": b"12", "b": b"34"})
    assert "CONFIG.json" in str(found["config.json", "missing-file"].hint)
    for name in ("a", "b"):
        assert "renamed" not in str(found[name, "missing-file"].hint)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every directory")
def test_what_is_behind_an_unreadable_directory_is_not_said_to_be_gone(tmp_path: Path) -> None:
    lay_out(tmp_path, CONTENTS)
    (tmp_path / "ckpt-0").chmod(0)
    try:
        found = file_set(tmp_path, CONTENTS)
    finally:
        (tmp_path / "ckpt-0").chmod(0o755)
    assert ("ckpt-0", "unreadable") in found
    assert "no way to its directory" in found["ckpt-0/big", "missing-file"].message


def test_what_is_behind_a_directory_that_cannot_be_entered_is_not_said_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path, CONTENTS)
    real = os.scandir

    def scandir(fd: int) -> Any:
        if Path(f"/proc/self/fd/{fd}").readlink().name == "ckpt-0":
            raise PermissionError(13, "Permission denied")
        return real(fd)

    monkeypatch.setattr(os, "scandir", scandir)
    found = file_set(tmp_path, CONTENTS)
    assert ("ckpt-0", "unreadable") in found
    assert "no way to its directory" in found["ckpt-0/big", "missing-file"].message
