"""What `bench_load` compares with, each run as a script in a process of its own: `python load_peers.py KIND DIRECTORY`.

It imports nothing of safeload, so that it runs in an environment that has only the peer. A run prints one JSON object:
seconds until everything is loaded, seconds until every page of it was read as well, and the process's peak of resident
memory in bytes. Everything here unpickles or maps files that the benchmark itself made, and checks nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
RECIPE_THREADS = 32  # as published
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - as published


@dataclass
class QuantizedWeight8bit:
    """What the pickles of the benchmark name as `__main__.QuantizedWeight8bit`."""

    weight: Any
    scales: Any


def recipe(directory: Path) -> Iterable[Any]:
    """Load as xai-org/grok-1 does: copy each file to shared memory and unpickle the copy, in 32 threads."""

    def load(path: Path) -> Any:
        fd, copy = tempfile.mkstemp(dir=SHARED_MEMORY)
        try:
            shutil.copyfile(path, copy)
            with open(copy, "rb") as file:  # noqa: PTH123 - as published
                return pickle.load(file)
        finally:
            os.remove(copy)  # noqa: PTH107 - as published
            os.close(fd)

    with ThreadPoolExecutor(RECIPE_THREADS) as pool:
        values = list(pool.map(load, sorted((directory / "ckpt-0").iterdir())))
    for value in values:
        yield from (value.weight, value.scales) if isinstance(value, QuantizedWeight8bit) else (value,)


def hashing(directory: Path, new: Callable[[], Any]) -> Iterable[Any]:
    """Hash every file, the largest first, in as many threads as there are processors; keep nothing."""
    todo: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for path in sorted((directory / "ckpt-0").iterdir(), key=lambda path: path.stat().st_size, reverse=True):
        todo.put(path)

    def work() -> None:
        buffer = memoryview(bytearray(MIB))
        while True:
            try:
                path = todo.get_nowait()
            except queue.Empty:
                return
            digest = new()
            with path.open("rb", buffering=0) as file:
                while got := file.readinto(buffer):
                    digest.update(buffer[:got])
            digest.hexdigest()

    workers = [threading.Thread(target=work) for _ in os.sched_getaffinity(0)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return ()


def load(kind: str, directory: Path) -> Callable[[], Iterable[Any]]:
    """Return what to time; everything that it needs is imported before."""
    if kind == "recipe":
        import ml_dtypes
        import numpy as np

        np.dtype(ml_dtypes.bfloat16)
        return lambda: list(recipe(directory))
    if kind == "sha256":
        return lambda: hashing(directory, hashlib.sha256)
    if kind == "blake3":
        from blake3 import blake3

        return lambda: hashing(directory, blake3)
    if kind == "safetensors-numpy":
        import_module("ml_dtypes")  # numpy knows bfloat16 from here on
        load_file = import_module("safetensors.numpy").load_file
        return lambda: list(load_file(directory / "model.safetensors").values())
    if kind == "safetensors-torch":
        load_file = import_module("safetensors.torch").load_file
        return lambda: list(load_file(directory / "model.safetensors").values())
    if kind == "torch-mmap":
        torch = import_module("torch")
        return lambda: list(torch.load(directory / "model.pt", mmap=True, weights_only=True).values())
    if kind == "orbax":
        checkpointer = import_module("orbax.checkpoint").PyTreeCheckpointer()
        return lambda: list(checkpointer.restore((directory / "orbax").absolute()).values())
    raise SystemExit(f"no such peer: {kind}")


def prepare(kind: str, directory: Path) -> None:
    """Write the tensors of `model.safetensors` in a peer's own format."""
    if kind == "torch-mmap":
        load_file = import_module("safetensors.torch").load_file
        import_module("torch").save(load_file(directory / "model.safetensors"), directory / "model.pt")
    elif kind == "orbax":
        import_module("ml_dtypes")  # numpy knows bfloat16 from here on
        load_file = import_module("safetensors.numpy").load_file
        checkpointer = import_module("orbax.checkpoint").PyTreeCheckpointer()
        checkpointer.save((directory / "orbax").absolute(), load_file(directory / "model.safetensors"))
    else:
        load(kind, directory)  # what it needs is there, or this says that it is not


def touch(array: Any) -> int:
    """Read a byte of every cache line of an array of numpy, torch or jax."""
    import numpy as np

    if hasattr(array, "untyped_storage"):
        array = array.view(import_module("torch").uint8).numpy()
    flat = np.asarray(array).reshape(-1).view(np.uint8)
    return int(flat[::64].sum())


def report(begin: Callable[[], Iterable[Any]]) -> None:
    """Time a load, and print what came of it."""
    start = time.perf_counter()
    arrays = begin()
    loaded = time.perf_counter() - start
    for array in arrays:
        touch(array)
    touched = time.perf_counter() - start
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    print(json.dumps({"loaded": loaded, "touched": touched, "peak": int(status["VmHWM"].split()[0]) * 1024}))


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2], Path(sys.argv[3]))
    else:
        report(load(sys.argv[1], Path(sys.argv[2])))
