"""How fast trust is established: `python -m benchmarks.bench_trust [--mib 4096]`.

Three questions. How long it takes from the bytes of a signed manifest of 6,000 files and 300 GB to a `TrustedManifest`
(it is to be under 0.1 s). How fast `safeload verify` hashes a directory against plain `hashlib` threads over the same
files (it is to reach 95 %), and against `model_signing` where `.venv-peers` has it (`make bench-peers`). And what
digests of chunks are good for when a checkpoint is one large file: every processor then works on it.

Each run is a process of its own, the kinds of run alternate, and medians are compared: on a shared machine only the
ratios of one table mean anything, and that of processor times more than that of wall times. The files are in the page
cache, so the disk is not measured.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.bench_stage import hash_only, touch
from safeload.digests import CHUNK_BYTES, HASH_CHUNK_BYTES
from safeload.manifest import FileEntry, Manifest, ManifestTensor, TrustedManifest, encode_chunks
from safeload.policy import load_policy
from safeload.publishing import describe
from safeload.scanning import verify_files
from safeload.signing import sign_manifest
from safeload.sizes import human_size
from safeload.staging import stage
from safeload.trust.keys import SecretKey
from safeload.trust.store import TrustStore
from safeload.verifying import verify_manifest

MIB = 1024 * 1024
N_FILES = 6000
FILE_BYTES = 50_000_000
N_SHARDS = 8
ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / ".venv-peers" / "bin" / "python"

PEER_SCRIPT = """
import sys, time
from pathlib import Path
from model_signing import hashing
wall, cpu = time.perf_counter(), time.process_time()
found = hashing.Config().use_file_serialization(hashing_algorithm="sha256").hash(Path(sys.argv[1]))
print(time.perf_counter() - wall, time.process_time() - cpu)
assert len(list(found.resource_descriptors())) == int(sys.argv[2])
"""
"""What `model_signing verify key` does with the files, in its own threads, and without its start of half a second."""


def main() -> None:
    """Make the inputs, run every kind of run in turn, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_trust", description=__doc__)
    parser.add_argument("--mib", type=int, default=4096, help="size of the directory to hash in MiB (default 4096)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--run", nargs=2, metavar=("KIND", "DIRECTORY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(*run(options.run[0], Path(options.run[1])))
        return

    with tempfile.TemporaryDirectory(prefix="safeload-bench-") as folder:
        directory = Path(folder)
        make_manifest(directory)
        payload = (directory / "payload").stat().st_size
        times = alternate(["parse"], directory, max(options.rounds, 9))["parse"]
        print(
            f"a signed manifest of {N_FILES:,} files and {N_FILES * FILE_BYTES / 1e9:.0f} GB, {payload / 1e6:.1f} MB:"
        )
        print("from bytes to a trusted manifest, seconds")
        print(f"  wall: median {statistics.median(w for w, _ in times):.3f}, best {min(w for w, _ in times):.3f}")
        print(f"  CPU:  median {statistics.median(c for _, c in times):.3f}, best {min(c for _, c in times):.3f}")

        make_checkpoint(directory, N_SHARDS, options.mib)
        kinds = ["hashlib", "verify"] + (["model_signing"] if has_peer() else [])
        table(f"{N_SHARDS} files of {human_size(options.mib // N_SHARDS * MIB)}", kinds, directory, options.rounds)

        make_checkpoint(directory, 1, min(1024, options.mib))
        kinds = ["hashlib", "stage whole", "stage chunks", "sign"]
        table(f"one file of {human_size(min(1024, options.mib) * MIB)}", kinds, directory, options.rounds)


def table(title: str, kinds: Sequence[str], directory: Path, rounds: int) -> None:
    """Run the kinds in turn and print how they compare with the first."""
    total = sum(file.stat().st_size for file in (directory / "files").iterdir())
    runs = alternate(kinds, directory, rounds)
    print(f"\n{title}, {len(os.sched_getaffinity(0))} cores, {rounds} alternating rounds")
    print(f"                 median s   best s    GB/s   speed of this / {kinds[0]}: median   best   CPU")
    base = runs[kinds[0]]
    for kind, times in runs.items():
        median, best = statistics.median(w for w, _ in times), min(w for w, _ in times)
        # Of neighbors in time, so that what else the machine did in that round counts for both.
        paired = statistics.median(b[0] / t[0] for b, t in zip(base, times, strict=True))
        cpu = min(c for _, c in base) / min(c for _, c in times)
        row = f"{kind:<16} {median:>8.3f} {best:>8.3f} {total / median / 1e9:>7.2f}"
        print(f"{row} {paired:>38.2f} {min(w for w, _ in base) / best:>6.2f} {cpu:>5.2f}")


def alternate(kinds: Sequence[str], directory: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of each run, by kind."""
    runs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for round_ in range(rounds):
        for kind in kinds if round_ % 2 == 0 else reversed(kinds):
            command = [sys.executable, "-m", "benchmarks.bench_trust", "--run", kind, str(directory)]
            if kind == "model_signing":
                files = directory / "files"
                command = [str(PEER), "-c", PEER_SCRIPT, str(files), str(len(list(files.iterdir())))]
            if kind.startswith("stage"):
                touch(sum(file.stat().st_size for file in (directory / "files").iterdir()) + 64 * MIB)
            wall, cpu = subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout.split()
            runs[kind].append((float(wall), float(cpu)))
    return runs


def has_peer() -> bool:
    """Whether `model_signing` can be imported in the environment of the peers."""
    command = [str(PEER), "-c", "import model_signing"]
    return PEER.exists() and subprocess.run(command, check=False, capture_output=True).returncode == 0


def make_manifest(directory: Path) -> None:
    """Write a signed manifest of a checkpoint that does not exist, and the key that signed it."""
    rows = FILE_BYTES // 4000 - 1
    n_chunks = -(-FILE_BYTES // CHUNK_BYTES)
    entries = [
        FileEntry(
            path=f"ckpt-0/tensor{index:05d}_000",
            size=FILE_BYTES,
            sha256=digest_of(f"file {index}").hex(),
            chunks=encode_chunks(b"".join(digest_of(f"chunk {index} {chunk}") for chunk in range(n_chunks))),
            format="pickle",
            role="weights",
            parameter=f"params/language_model/transformer/decoder_layer_{index}/linear",
            tensors=(
                ManifestTensor(
                    name="", dtype="float32", shape=(rows, 1000), order="C", offset=163, nbytes=rows * 4000,
                    sha256=digest_of(f"tensor {index}").hex(),
                ),
            ),
            globals=("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"),
        )
        for index in range(N_FILES)
    ]  # fmt: skip
    manifest = Manifest.of(entries, stream="bench/model", revision="1", issued=datetime.now(UTC), tool_version="0")
    key = SecretKey.generate()
    (directory / "signed").write_bytes(sign_manifest(manifest, [key]))
    (directory / "payload").write_bytes(manifest.to_payload())
    (directory / "key").write_bytes(key.to_pem(None))


def digest_of(text: str) -> bytes:
    """Return 32 bytes that look like a digest."""
    return hashlib.sha256(text.encode()).digest()


def make_checkpoint(directory: Path, n_files: int, mib: int) -> None:
    """Write files of one array each, in place of those that are there, and the manifest of them."""
    files = directory / "files"
    files.mkdir(exist_ok=True)
    for old in files.iterdir():
        old.unlink()
    for index in range(n_files):
        array = np.random.default_rng(index).integers(0, 256, mib // n_files * MIB, np.uint8)
        with (files / f"tensor{index:05d}_000").open("wb") as file:
            pickle.dump(array, file, protocol=4)
    manifest, _ = describe(files, model="bench/model", revision="1")
    (directory / "manifest").write_bytes(manifest.to_payload())


def run(kind: str, directory: Path) -> tuple[float, float]:
    """Run once in this process and return wall and CPU seconds, without imports and reading the manifest."""
    files = directory / "files"
    if kind == "parse":
        data = (directory / "signed").read_bytes()
        trust = TrustStore.of_keys([SecretKey.from_pem((directory / "key").read_bytes(), None).public])
        load_cryptography(trust)
        wall, cpu = time.perf_counter(), time.process_time()
        assert len(verify_manifest(data, trust).manifest.files) == N_FILES
        return time.perf_counter() - wall, time.process_time() - cpu
    manifest = Manifest.parse((directory / "manifest").read_bytes())
    if kind == "stage whole":
        entries = [replace(entry, chunks=None) for entry in manifest.files]
        manifest = manifest.model_copy(update={"files": tuple(entries)})
    # A proof without signatures, as only a benchmark may make one: verifying them is not what is measured here.
    trusted = TrustedManifest(manifest, "0" * 64, (), 1)
    policy = load_policy("numpy-quantized")
    wall, cpu = time.perf_counter(), time.process_time()
    if kind == "hashlib":
        found = hash_only(files, manifest, HASH_CHUNK_BYTES, len(os.sched_getaffinity(0)))
        assert found == {file.path: file.sha256 for file in manifest.files}
    elif kind == "verify":
        assert verify_files(files, trusted, policy=policy).is_accepted
    elif kind == "sign":
        assert describe(files, model="bench/model", revision="1")[0].files == manifest.files
    else:
        assert len(stage(files, trusted).files) == len(manifest.files)
    return time.perf_counter() - wall, time.process_time() - cpu


def load_cryptography(trust: TrustStore) -> None:
    """Import what a first signature imports."""
    key = SecretKey.generate()
    key.public.verify(key.sign(b""), b"")
    assert trust.keys


if __name__ == "__main__":
    main()
