"""How fast a verified load is, against loads that verify nothing: `python -m benchmarks.bench_load [--mib 2048]`.

The files are in Grok-1's layout and proportions, of random bytes, and in the page cache. Each run is a process of its
own and its imports are not counted; the kinds of run alternate, and the medians are compared: on a shared machine only
the ratios of one table mean anything. The time is until every page of every array was read, as some peers map a file
and read nothing before. The peers are installed by `make bench-peers`; what is not installed is said, and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import safeload
from benchmarks import load_peers
from benchmarks.bench_stage import drop, touch
from safeload.digests import has_blake3
from safeload.formats.pickles.writing import write_shard
from safeload.formats.safetensors_writing import write_safetensors
from safeload.publishing import sign
from safeload.records import QuantizedWeight8bit, Record
from safeload.sizes import human_size
from safeload.trust.keys import PublicKey, SecretKey

MIB = 1024 * 1024
COLUMNS = 1024
# Bytes of a matrix and how many of each in 2 GiB: the proportions of Grok-1, a twentieth of its largest.
QUANTIZED = [(256 * MIB, 4), (64 * MIB, 8), (16 * MIB, 16), (4 * MIB, 32), (MIB, 64), (256 * 1024, 64)]
PLAIN = [(24 * 1024, 256)]

OURS = ("safeload", "safeload-blake3", "safeload-stream")
PEERS = ("recipe", "sha256", "blake3", "safetensors-numpy", "safetensors-torch", "torch-mmap", "orbax")
STREAM_BYTES = 600 * MIB
"""Budget of the streamed run: a fourth of the data, and two of its largest files."""


def main() -> None:
    """Make the files, run every kind of run in turn, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_load", description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="size of the checkpoint in MiB (default 2048)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each run")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers/bin/python"), help="interpreter of the peers")
    parser.add_argument("--only", nargs="+", metavar="KIND", default=[*OURS, *PEERS], help="kinds of run (default all)")
    parser.add_argument("--run", nargs=2, metavar=("KIND", "DIRECTORY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_ours(options.run[0], Path(options.run[1]))
        return
    with tempfile.TemporaryDirectory(prefix="safeload-bench-") as name:
        directory = Path(name)
        total, n_files = make_checkpoint(directory, options.mib)
        kinds = []
        for kind in options.only:
            why = missing(kind, options.peers, directory)
            if why is None:
                kinds.append(kind)
            else:
                print(f"left out: {kind}: {why}")
        measured: dict[str, Measured] = {kind: Measured() for kind in kinds}
        for round_ in range(options.rounds):
            for kind in kinds if round_ % 2 == 0 else reversed(kinds):
                if options.cold:
                    drop(directory)
                touch(2 * total)
                arguments = command(kind, options.peers, directory)
                output = subprocess.run(arguments, check=True, stdout=subprocess.PIPE).stdout
                measured[kind].add(json.loads(output.splitlines()[-1]))
            print(f"round {round_ + 1} of {options.rounds} is done", file=sys.stderr)
    print(f"\n{n_files} files, {human_size(total)}, {options.rounds} alternating rounds\n")
    print("                        until all pages were read                 peak of     the recipe, SHA-256")
    print("kind               loaded s   median s   best s   GB/s   memory / data   / this   / this")
    for kind, found in measured.items():
        median = statistics.median(found.touched)
        row = f"{kind:<18} {statistics.median(found.loaded):>8.3f} {median:>10.3f} {min(found.touched):>8.3f}"
        row += f" {total / median / 1e9:>6.2f} {statistics.median(found.peak) / total:>15.2f}"
        print(row + "".join(f" {paired(measured.get(base), found):>8}" for base in ("recipe", "sha256")))


@dataclass
class Measured:
    """What the runs of one kind took: seconds, seconds with every page read, and bytes."""

    loaded: list[float] = field(default_factory=list)
    touched: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)

    def add(self, run: dict[str, Any]) -> None:
        """Add one run."""
        self.loaded.append(run["loaded"])
        self.touched.append(run["touched"])
        self.peak.append(run["peak"])


def paired(base: Measured | None, found: Measured) -> str:
    """Return the median of the ratios of neighbors in time, so that what else the machine did counts for both."""
    if base is None:
        return "-"
    return f"{statistics.median(b / t for b, t in zip(base.touched, found.touched, strict=True)):.2f}"


def values(mib: int) -> Iterator[np.ndarray | Record]:
    """Yield the value of each file: quantized matrices, and vectors as they are."""
    random = np.random.default_rng(0)
    noise = random.integers(-127, 128, (512, COLUMNS), np.int8)
    for nbytes, count in QUANTIZED:
        rows = max(1, (nbytes if mib >= 2048 else nbytes * mib // 2048) // COLUMNS)
        for _ in range(count * mib // 2048 if mib >= 2048 else count):
            weight = np.resize(noise, (rows, COLUMNS))
            scales = random.random((1, COLUMNS), np.float32).astype(ml_dtypes.bfloat16)
            yield QuantizedWeight8bit(weight, scales)  # type: ignore[call-arg] # made by make_dataclass
    for nbytes, count in PLAIN:
        for _ in range(count):
            yield random.standard_normal(nbytes // 4, np.float32)


def make_checkpoint(directory: Path, mib: int) -> tuple[int, int]:
    """Write the pickles, the same tensors as one safetensors file, a key and two manifests; return bytes and files."""
    shards = directory / "ckpt-0"
    shards.mkdir()
    arrays: dict[str, np.ndarray] = {}
    n_files = 0
    for index, value in enumerate(values(mib)):
        with (shards / f"tensor{index:05d}_000").open("wb") as file:
            write_shard(file, value)
        fields: Iterable[tuple[str, Any]] = value.items() if isinstance(value, Record) else [("weight", value)]
        arrays |= {f"{index:05d}.{name}": array for name, array in fields}
        n_files += 1
    with (directory / "model.safetensors").open("wb") as file:
        write_safetensors(file, arrays, {})
    del arrays
    key = SecretKey.generate("ed25519")
    (directory / "key.pub").write_bytes(key.public.to_pem())
    for name in ("safeload", *(["safeload-blake3"] if has_blake3() else [])):
        envelope = sign(shards, keys=[key], model="bench/model", revision="1", blake3=name == "safeload-blake3")
        (directory / f"{name}.dsse").write_bytes(envelope)
    return sum(path.stat().st_size for path in shards.iterdir()), n_files


def missing(kind: str, peers: Path, directory: Path) -> str | None:
    """Have a peer write its own format; return why it cannot run, None if it can."""
    if kind in OURS:
        return "the package blake3 is not installed" if kind == "safeload-blake3" and not has_blake3() else None
    made = subprocess.run(
        [interpreter(kind, peers), load_peers.__file__, "prepare", kind, str(directory)],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode == 0:
        return None
    return f"{made.stderr.strip().splitlines()[-1]} (make bench-peers)"


def command(kind: str, peers: Path, directory: Path) -> list[str]:
    """Return how to start one run."""
    if kind in OURS:
        return [sys.executable, "-m", "benchmarks.bench_load", "--run", kind, str(directory)]
    return [interpreter(kind, peers), load_peers.__file__, kind, str(directory)]


def interpreter(kind: str, peers: Path) -> str:
    """Return the interpreter that has what a kind of run needs: ours for what needs no package of a peer."""
    return sys.executable if kind in {"recipe", "sha256", "blake3"} or not peers.exists() else str(peers)


def run_ours(kind: str, directory: Path) -> None:
    """Load once in this process, from the signed manifest to arrays, and print what came of it."""
    trust = PublicKey.from_pem((directory / "key.pub").read_bytes())
    shards = directory / "ckpt-0"
    if kind == "safeload-stream":
        load_peers.report(lambda: streamed(shards, directory / "safeload.dsse", trust))
        return
    load_peers.report(
        lambda: list(leaves(safeload.load(shards, manifest=directory / f"{kind}.dsse", trust=trust).values()))
    )


def streamed(shards: Path, manifest: Path, trust: PublicKey) -> Iterable[Any]:
    """Verify and scan everything in a budget, a batch at a time, and keep nothing."""
    from safeload.loading import hold
    from safeload.policy import DEFAULT_POLICY, load_policy
    from safeload.scanning import admit
    from safeload.staging import stream

    held = hold(shards, manifest=manifest, trust=trust)
    policy = load_policy(DEFAULT_POLICY)
    with stream(shards, held.trusted, memory_budget=STREAM_BYTES) as batches:
        for batch in batches:
            admit(batch, policy=policy)
    return ()


def leaves(loaded: Iterable[Any]) -> Iterator[Any]:
    """Yield the arrays of what was loaded."""
    for value in loaded:
        if isinstance(value, Record):
            yield from (array for _, array in value.items())
        else:
            yield value


if __name__ == "__main__":
    main()
