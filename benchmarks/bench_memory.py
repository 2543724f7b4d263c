"""How much memory each way into a model takes at most: `python -m benchmarks.bench_memory [--mib 1024]`.

Each run is a process of its own, which loads one signed safetensors file, or several, and reads every value of what it
got. Its peak is the kernel's own mark (VmHWM) less what was resident when the loading began, in units of the model's
size: 1.00 is the model itself. The kinds of run alternate, and medians are told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np

import safeload
from safeload.filling import assign, fill, load_into, named_tensors
from safeload.formats.safetensors_writing import write_safetensors
from safeload.memory import track
from safeload.sizes import human_size
from safeload.trust.keys import PublicKey, SecretKey

MIB = 1024 * 1024
TENSOR_BYTES = 16 * MIB
BUDGET = 128 * MIB
"""Of the budgeted runs: eight of the tensors."""

FILES: Mapping[str, int] = {"one": 1, "eight": 8}


def main() -> None:
    """Make the checkpoints, run every kind of run in turn, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_memory", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the model in MiB (default 1024)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--python", default=sys.executable, help="interpreter, such as one that has torch")
    parser.add_argument("--run", nargs=2, metavar=("KIND", "DIRECTORY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run[0], Path(options.run[1]))))
        return
    n_tensors = max(8, options.mib * MIB // TENSOR_BYTES)
    with tempfile.TemporaryDirectory(prefix="safeload-bench-") as folder:
        for name, n_files in FILES.items():
            make(Path(folder) / name, n_tensors, n_files)
        total = n_tensors * TENSOR_BYTES
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        for round_ in range(options.rounds):
            pairs = [(kind, name) for kind in KINDS for name in FILES]
            for pair in pairs if round_ % 2 == 0 else reversed(pairs):
                command = [options.python, "-m", "benchmarks.bench_memory", "--run", pair[0], f"{folder}/{pair[1]}"]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
                found.setdefault(pair, []).append(json.loads(done.splitlines()[-1]))
            print(f"round {round_ + 1} of {options.rounds} is done", file=sys.stderr)
    print(
        f"\n{n_tensors} tensors, {human_size(total)}, {options.rounds} alternating rounds; budget {human_size(BUDGET)}"
    )
    print("\n                        peak / model           seconds")
    print("way                 one file   8 files   one file   8 files")
    for kind in KINDS:
        cells = [found[kind, file] for file in FILES]
        if any("missing" in one for runs in cells for one in runs):
            print(f"{kind:<20} left out: {cells[0][0]['missing']} is not installed")
            continue
        peaks = [statistics.median(one["peak"] for one in runs) / total for runs in cells]
        seconds = [statistics.median(one["seconds"] for one in runs) for runs in cells]
        print(f"{kind:<20}{peaks[0]:>8.2f}{peaks[1]:>10.2f}{seconds[0]:>11.2f}{seconds[1]:>10.2f}")


def make(directory: Path, n_tensors: int, n_files: int) -> None:
    """Write and sign a model of random bfloat16 matrices, so many to a file."""
    (directory / "model").mkdir(parents=True)
    rng = np.random.default_rng(0)
    shape = (TENSOR_BYTES // 2 // 2048, 2048)
    each = n_tensors // n_files
    for file in range(n_files):
        arrays = {
            f"layer_{file * each + i:03d}/w": rng.integers(0, 1 << 14, shape, np.uint16).view(ml_dtypes.bfloat16)
            for i in range(each)
        }
        with (directory / "model" / f"model-{file}.safetensors").open("wb") as sink:
            write_safetensors(sink, arrays)
    key = SecretKey.generate("ed25519")
    (directory / "key.pub").write_bytes(key.public.to_pem())
    manifest = safeload.sign(directory / "model", keys=[key], model="bench", revision="1")
    (directory / "manifest.json").write_bytes(manifest)


# ---------------------------------------------------------------- the ways


def _load(directory: Path, **options: Any) -> dict[str, Any]:
    loaded = safeload.load(directory / "model", **_signed(directory), **options)
    return named_tensors(loaded)


def _signed(directory: Path) -> dict[str, Any]:
    key = PublicKey.from_pem((directory / "key.pub").read_bytes())
    return {"manifest": directory / "manifest.json", "trust": key}


def _empty(directory: Path) -> dict[str, Any]:
    """Return arrays to be written to; their memory is not there before."""
    return {name: np.empty(shape, ml_dtypes.bfloat16) for name, shape in _shapes(directory).items()}


def _described(directory: Path) -> dict[str, Any]:
    import jax

    return {name: jax.ShapeDtypeStruct(shape, ml_dtypes.bfloat16) for name, shape in _shapes(directory).items()}


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted((directory / "model").iterdir()):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name: tuple(row["shape"]) for name, row in header.items()}
    return found


def _whole_file(directory: Path) -> Callable[[], Any]:
    return lambda: _load(directory)


def _whole_file_in_place(directory: Path) -> Callable[[], Any]:
    target = _empty(directory)

    def go() -> Any:
        load_into(target, _load(directory))
        return target

    return go


def _whole_file_anew(directory: Path) -> Callable[[], Any]:
    target = _described(directory)
    return lambda: assign(target, _load(directory))


def _per_tensor(directory: Path) -> Callable[[], Any]:
    target = _described(directory)
    return lambda: fill(target, directory / "model", **_signed(directory))


def _per_tensor_in_place(directory: Path) -> Callable[[], Any]:
    target = _empty(directory)
    return lambda: fill(target, directory / "model", **_signed(directory))


def _per_tensor_torch(directory: Path) -> Callable[[], Any]:
    # By a name that no checker follows: torch is nothing that this project depends on.
    torch: Any = __import__("torch")
    with torch.device("meta"):
        target = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in _shapes(directory).items()}
    return lambda: fill(target, directory / "model", **_signed(directory))


def _budgeted(directory: Path) -> Callable[[], Any]:
    import jax

    jax.numpy.zeros(1).block_until_ready()
    return lambda: _load(directory, shardings=lambda *_: None, memory_budget=BUDGET)


def _aliased(directory: Path) -> Callable[[], Any]:
    import jax

    jax.numpy.zeros(1).block_until_ready()
    return lambda: _load(directory, shardings=lambda *_: None)


KINDS: Mapping[str, Callable[[Path], Callable[[], Any]]] = {
    "load": _whole_file,
    "load, shardings": _aliased,
    "load, budget": _budgeted,
    "load + load_into": _whole_file_in_place,
    "load + assign": _whole_file_anew,
    "fill, numpy": _per_tensor_in_place,
    "fill, JAX": _per_tensor,
    "fill, torch meta": _per_tensor_torch,
}


def run(kind: str, directory: Path) -> dict[str, Any]:
    """Load in one way, read every value, and return the peak in bytes and the seconds."""
    try:
        go = KINDS[kind](directory)
    except ImportError as err:
        return {"missing": err.name}
    shapes = _shapes(directory)
    started = perf_counter()
    with track() as memory:
        made = go()
        seconds = perf_counter() - started
        assert made.keys() == shapes.keys()
        for leaf in made.values():
            array = np.asarray(leaf) if not hasattr(leaf, "data_ptr") else leaf.view(__import__("torch").int16).numpy()
            # A page at a time would do; all of it is what a model reads.
            assert array.view(np.uint16).max() < 1 << 14
    return {"peak": memory.high_water - memory.before, "seconds": seconds}


if __name__ == "__main__":
    main()
