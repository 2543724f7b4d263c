"""How near to hashing alone each container is loaded: `python -m benchmarks.bench_formats [--mib 512]`.

The same tensors in every container, signed. Verifying, scanning and loading as numpy arrays is compared with SHA-256
alone over the same chunks in as many threads, both in the same process, in turn. The files are in the page cache. What
counts is that the share is that of pickle: then a format costs nothing beyond its bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_stage import touch
from safeload.digests import CHUNK_BYTES, HASH_CHUNK_BYTES
from safeload.formats.safetensors_writing import write_safetensors
from safeload.loading import load
from safeload.publishing import sign
from safeload.sizes import human_size
from safeload.trust.keys import PublicKey, SecretKey
from tests import containers_sample, tensorflow_sample, torch_sample

MIB = 1024 * 1024
N_TENSORS = 16

Arrays = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


def main() -> None:
    """Make the checkpoints, run each in turn, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_formats", description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of each checkpoint in MiB (default 512)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run)))
        return
    with tempfile.TemporaryDirectory(prefix="safeload-bench-") as folder:
        made = {name: make(Path(folder, name), name, options.mib) for name in WRITERS}
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in WRITERS}
        for round_ in range(options.rounds):
            for name in list(WRITERS) if round_ % 2 == 0 else reversed(WRITERS):
                touch(2 * options.mib * MIB)
                command = [sys.executable, "-m", "benchmarks.bench_formats", "--run", str(Path(folder, name))]
                runs[name].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    print(f"{human_size(options.mib * MIB)} in {N_TENSORS} tensors, {options.rounds} alternating rounds\n")
    print("container      files   load s   SHA-256 alone / load   that share / pickle's")
    shares = {name: statistics.median(bound / loaded for loaded, bound in times) for name, times in runs.items()}
    for name, times in runs.items():
        seconds = statistics.median(loaded for loaded, _ in times)
        relative = shares[name] / shares["pickle"]
        print(f"{name:13} {made[name]:6}   {seconds:6.3f}   {shares[name]:20.2f}   {relative:21.2f}")


def run(folder: Path) -> tuple[float, float]:
    """Return the seconds of loading a checkpoint, and of hashing its files and nothing else."""
    manifest = (folder / "manifest").read_bytes()
    trust = PublicKey.from_pem((folder / "key.pub").read_bytes())
    files = sorted((folder / "files").iterdir())
    pieces = [(file, start) for file in files for start in range(0, file.stat().st_size, CHUNK_BYTES)]
    began = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(hash_chunk, pieces))
    bound = time.perf_counter() - began
    began = time.perf_counter()
    loaded = load(folder / "files", manifest=manifest, trust=trust)
    seconds = time.perf_counter() - began
    assert loaded
    return seconds, bound


def hash_chunk(piece: tuple[Path, int]) -> str:
    """Hash one chunk of a file through a buffer that stays in the cache."""
    path, start = piece
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASH_CHUNK_BYTES))
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(start, start + CHUNK_BYTES, HASH_CHUNK_BYTES):
            digest.update(buffer[: os.preadv(fd, [buffer], at)])
    finally:
        os.close(fd)
    return digest.hexdigest()


def make(folder: Path, name: str, mib: int) -> int:
    """Write and sign the checkpoint of one container, and return how many files it has."""
    files = folder / "files"
    files.mkdir(parents=True)
    random = np.random.default_rng(7)
    n_rows = mib * MIB // N_TENSORS // 4 // 1024
    WRITERS[name](files, {f"layer_{n}": random.random((n_rows, 1024), np.float32) for n in range(N_TENSORS)})
    key = SecretKey.generate()
    (folder / "manifest").write_bytes(sign(files, keys=[key], model="bench", revision="1"))
    (folder / "key.pub").write_bytes(key.public.to_pem())
    return len(list(files.iterdir()))


def as_pickle(folder: Path, arrays: Arrays) -> None:
    """Write one dict, in protocol 4."""
    with (folder / "weights.pkl").open("wb") as file:
        pickle.dump(arrays, file, 4)


def as_npy(folder: Path, arrays: Arrays) -> None:
    """Write a file for each tensor."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def as_npz(folder: Path, arrays: Arrays) -> None:
    """Write one archive of stored arrays."""
    np.savez(folder / "weights.npz", **arrays)  # type: ignore[arg-type] # names of tensors, none of an option


def as_safetensors(folder: Path, arrays: Arrays) -> None:
    """Write one file."""
    with (folder / "model.safetensors").open("wb") as file:
        write_safetensors(file, arrays, {})


def as_pytorch(folder: Path, arrays: Arrays) -> None:
    """Write a state dict as `torch.save` does."""
    storages = [
        torch_sample.Storage(str(n), "FloatStorage", array.tobytes()) for n, array in enumerate(arrays.values())
    ]
    torch = torch_sample.Torch()
    rows = zip(arrays.items(), storages, strict=True)
    value = torch.state_dict({name: torch.tensor(storage, array.shape) for (name, array), storage in rows})
    (folder / "model.pt").write_bytes(torch_sample.torch_zip(torch.pickle(value), storages))


def as_tensorflow(folder: Path, arrays: Arrays) -> None:
    """Write a bundle of one shard."""
    tensors = {
        name: tensorflow_sample.Tensor(tensorflow_sample.FLOAT, array.shape, array.tobytes())
        for name, array in arrays.items()
    }
    for name, data in tensorflow_sample.bundle("model.ckpt", tensors).items():
        (folder / name).write_bytes(data)


def as_gguf(folder: Path, arrays: Arrays) -> None:
    """Write a model of plain floats."""
    rows, at = [], 0
    for name, array in arrays.items():
        rows.append(containers_sample.info(name, array.shape[::-1], 0, at))
        at += array.nbytes
    head = containers_sample.gguf(rows)
    with (folder / "model.gguf").open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for array in arrays.values():
            file.write(array.tobytes())


WRITERS: dict[str, Callable[[Path, Arrays], None]] = {
    "pickle": as_pickle,
    "npy": as_npy,
    "npz": as_npz,
    "safetensors": as_safetensors,
    "pytorch": as_pytorch,
    "tensorflow": as_tensorflow,
    "gguf": as_gguf,
}


if __name__ == "__main__":
    main()
