"""How fast staging is, against SHA-256 alone over the same files: `python -m benchmarks.bench_stage [--mib 1024]`.

`stage` takes everything at once, `stream` goes through it in memory that it uses again; both also with a manifest that
has BLAKE3 digests. Each run is a process of its own, the kinds of run alternate, and the medians are compared: on a
shared machine only the ratios of one table mean anything. The files are in the page cache, so that the disk is not
measured, unless `--cold` has them dropped from it before each run.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from safeload import staging
from safeload.digests import CHUNK_BYTES, HASH_CHUNK_BYTES, Hasher, has_blake3, new_hasher
from safeload.manifest import FileEntry, Manifest, ManifestTensor, TrustedManifest, encode_chunks
from safeload.sizes import human_size

MIB = 1024 * 1024
PAYLOAD_OFFSET = 163  # where numpy's payload begins in such a pickle: never on a boundary of anything
# Sizes of shards and how many of each in 1024 MiB: the proportions of Grok-1, a sixth of its largest.
SHARDS = [(256 * MIB, 2), (64 * MIB, 4), (16 * MIB, 8), (4 * MIB, 16), (MIB, 32), (256 * 1024, 48), (24 * 1024, 128)]


def main() -> None:
    """Make the files, run every kind of run in turn, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_stage", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the checkpoint in MiB (default 1024)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each kind (default 7)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[], metavar="KIB", help="other piece sizes to try")
    parser.add_argument("--threads", type=int, nargs="+", default=[], metavar="N", help="other thread counts to try")
    parser.add_argument("--small", action="store_true", help="6000 files of 6 KB instead")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each run")
    parser.add_argument("--run", nargs=4, metavar=("KIND", "CHUNK", "THREADS", "DIRECTORY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        kind, chunk, threads, directory = options.run
        print(*run(kind, int(chunk), int(threads), Path(directory)))
        return

    cores, chunk = len(os.sched_getaffinity(0)), HASH_CHUNK_BYTES
    names = ["stage", "stream", *(["stage-blake3", "stream-blake3"] if has_blake3() else [])]
    kinds = [("sha256", MIB, cores), *((name, chunk, cores) for name in names)]
    kinds += [(name, kib * 1024, cores) for kib in options.chunks for name in names]
    kinds += [(name, chunk, n) for n in options.threads for name in names]
    with tempfile.TemporaryDirectory(prefix="safeload-bench-") as directory:
        sizes = [6000] * 6000 if options.small else list(shard_sizes(options.mib))
        total = make_checkpoint(Path(directory), sizes)
        runs: dict[tuple[str, int, int], list[list[float]]] = {kind: [] for kind in kinds}
        for round_ in range(options.rounds):
            for kind in kinds if round_ % 2 == 0 else reversed(kinds):
                if options.cold:
                    drop(Path(directory))
                touch(total + 64 * MIB)
                command = [sys.executable, "-m", "benchmarks.bench_stage", "--run", *map(str, kind), directory]
                output = subprocess.run(command, check=True, capture_output=True).stdout
                runs[kind].append([float(number) for number in output.split()])
    print(f"{len(sizes)} files, {human_size(total)}, {cores} cores, {options.rounds} alternating rounds\n")
    print("                                                                      sha256 / this, wall and CPU time:")
    print("run             piece  threads  median s   best s    GB/s  us/file    median    best  least CPU")
    base = runs[kinds[0]]
    for kind, times in runs.items():
        name, piece, threads = kind
        wall, median = [seconds for seconds, _ in times], statistics.median(seconds for seconds, _ in times)
        # Of neighbors in time, so that what else the machine did in that round counts for both.
        paired = statistics.median(b[0] / t[0] for b, t in zip(base, times, strict=True))
        best, cpu = min(base)[0] / min(wall), min(b[1] for b in base) / min(t[1] for t in times)
        speed = total / median / 1e9
        row = f"{name:<13} {piece // 1024:>5} KiB {threads:>7} {median:>9.3f} {min(wall):>8.3f} {speed:>7.2f}"
        print(f"{row} {median / len(sizes) * 1e6:>8.0f} {paired:>9.2f} {best:>7.2f} {cpu:>10.2f}")


def shard_sizes(mib: int) -> Iterator[int]:
    """Yield sizes in bytes that sum up to `mib` MiB, about."""
    for nbytes, count in SHARDS:
        if mib >= 1024:
            yield from [nbytes] * (count * mib // 1024)
        else:
            yield from [max(1, nbytes * mib // 1024)] * count


def make_checkpoint(directory: Path, sizes: list[int]) -> int:
    """Write files of random bytes and, beside their directory, two manifests of them; return the sum of the sizes."""
    block = random.Random(0).randbytes(MIB)  # noqa: S311 - nothing here is a secret
    shards = directory / "ckpt-0"
    shards.mkdir()
    entries = []
    for index, payload in enumerate(sizes):
        path, size = f"tensor{index:05d}_000", PAYLOAD_OFFSET + payload
        left = size
        with (shards / path).open("wb") as file:
            while left:
                left -= file.write(block[: min(left, MIB)])
        tensor = ManifestTensor(
            name="", dtype="uint8", shape=(payload,), order="C", offset=PAYLOAD_OFFSET, nbytes=payload, sha256="0" * 64
        )
        entries.append(described(shards / path, tensor))
    made = Manifest.of(entries, stream="bench/model", revision="1", issued=datetime.now(UTC), tool_version="0")
    (directory / "manifest-blake3").write_bytes(made.to_payload())
    plain = [replace(entry, blake3=None, blake3_chunks=None) for entry in entries]
    made = Manifest.of(plain, stream="bench/model", revision="1", issued=datetime.now(UTC), tool_version="0")
    (directory / "manifest").write_bytes(made.to_payload())
    return made.totals.bytes


def described(path: Path, tensor: ManifestTensor) -> FileEntry:
    """Return what a manifest with every digest says of a file."""
    size = path.stat().st_size
    algorithms = {name: new_hasher(name) for name in ("sha256", "blake3") if name == "sha256" or has_blake3()}
    chunks: dict[str, list[bytes]] = {name: [] for name in algorithms}
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            for name, whole in algorithms.items():
                whole.update(memoryview(data))
                chunk: Hasher = new_hasher("sha256" if name == "sha256" else "blake3")
                chunk.update(memoryview(data))
                chunks[name].append(chunk.digest())
    encoded = {name: encode_chunks(b"".join(digests)) for name, digests in chunks.items() if size > CHUNK_BYTES}
    return FileEntry(
        path=path.name,
        size=size,
        sha256=algorithms["sha256"].hexdigest(),
        chunks=encoded.get("sha256"),
        blake3=algorithms["blake3"].hexdigest() if "blake3" in algorithms else None,
        blake3_chunks=encoded.get("blake3"),
        format="pickle",
        role="weights",
        tensors=(tensor,),
    )


def drop(directory: Path) -> None:
    """Have the files read from the disk again."""
    for path in directory.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        try:
            if path.is_file():
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def touch(nbytes: int) -> None:
    """Have the host of a virtual machine back its free memory, so that the next run does not pay for that."""
    script = f"import mmap; m = mmap.mmap(-1, {nbytes}, flags=mmap.MAP_PRIVATE); m.madvise(mmap.MADV_HUGEPAGE)\n"
    script += f"for i in range(0, {nbytes}, {mmap.PAGESIZE}): m[i] = 1"
    subprocess.run([sys.executable, "-c", script], check=True)


def run(kind: str, chunk: int, threads: int, directory: Path) -> tuple[float, float]:
    """Run once in this process and return wall and CPU seconds, without imports and reading the manifest."""
    step, _, digest = kind.partition("-")
    manifest = Manifest.parse((directory / ("manifest-blake3" if digest else "manifest")).read_bytes())
    shards = directory / "ckpt-0"
    # A proof without signatures, as only a benchmark may make one: verifying them is not what is measured.
    trusted = TrustedManifest(manifest, "0" * 64, (), 1)
    setattr(staging, "HASH_CHUNK_BYTES", chunk)  # noqa: B010 - to find the best one
    wall, cpu = time.perf_counter(), time.process_time()
    if kind == "sha256":
        found = hash_only(shards, manifest, chunk, threads)
    elif step == "stage":
        found = digests(staging.stage(shards, trusted, threads=threads))
    else:
        found = {}
        with staging.stream(shards, trusted, threads=threads) as batches:
            for batch in batches:
                found |= digests(batch)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    assert found == {file.path: file.sha256 for file in manifest.files}
    return seconds


def digests(staged: staging.StagedCheckpoint) -> dict[str, str]:
    """Return what was staged, by path, with the digests that its bytes are known to have."""
    return {path: file.entry.sha256 for path, file in staged.files.items()}


def hash_only(directory: Path, manifest: Manifest, chunk: int, threads: int) -> dict[str, str]:
    """Hash the files, the largest first, with one reused buffer a thread: the floor, as it keeps and checks nothing."""
    todo: queue.SimpleQueue[FileEntry] = queue.SimpleQueue()
    for entry in sorted(manifest.files, key=lambda entry: entry.size, reverse=True):
        todo.put(entry)
    found: dict[str, str] = {}

    def work() -> None:
        buffer = memoryview(bytearray(chunk))
        while True:
            try:
                path = todo.get_nowait().path
            except queue.Empty:
                return
            digest = hashlib.sha256()
            with (directory / path).open("rb", buffering=0) as file:
                while got := file.readinto(buffer):
                    digest.update(buffer[:got])
            found[path] = digest.hexdigest()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


if __name__ == "__main__":
    main()
