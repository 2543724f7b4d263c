"""How fast a scan is, as a whole process, against other scanners of pickles: `python -m benchmarks.bench_scan`.

Every run is a process of its own, start-up included; kinds alternate, and medians are compared. The peers are taken
from `.venv-peers`, which `make bench-peers` creates; those that are not there are left out. What they conclude differs:
picklescan and modelscan go by lists of what is forbidden, fickling decompiles. Only time and memory are compared.
"""

from __future__ import annotations

import argparse
import pickle
import pickletools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from safeload.formats import MemorySource
from safeload.formats.pickles import parse_pickle
from safeload.formats.pickles.writing import write_shard
from safeload.policy import load_policy

GIB = 1024**3
ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers" / "bin"

LAUNCHER = """
import os, sys, time
quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
began = time.perf_counter()
_, _, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet), 0)
print(time.perf_counter() - began, usage.ru_maxrss)
"""
"""Starts a command and prints its seconds and KiB. Linux counts what a process had before `exec` to its peak, and that
is its parent's memory: so the parent is this small process (10 MiB), and not the one that made the files."""


def main() -> None:
    """Make the files, run everything in turn, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_scan", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each command (default 7)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="safeload-bench-") as directory:
        cases = dict(make_cases(Path(directory)))
        for title, path in cases.items():
            print(f"\n{title}")
            compare(commands(path, is_large=path.name == "large"), options.rounds)
        print("\nthe machine alone, in one process: microseconds an opcode")
        machine(options.rounds)


def make_cases(directory: Path) -> Iterator[tuple[str, Path]]:
    """Write the files that are scanned, and yield what each case is.

    They end in `.pkl`: in a directory, the peers skip files whose names do not tell what they are, as Grok-1's do not.
    """
    small = directory / "small"
    small.mkdir()
    generator = np.random.default_rng(7)
    for index in range(500):
        array = generator.standard_normal(1500).astype(np.float32)
        (small / f"tensor{index:05d}.pkl").write_bytes(pickle.dumps(array, protocol=4))
    yield "500 pickles of 6 KB", small
    large = directory / "large"
    large.mkdir()
    with (large / "tensor00000.pkl").open("wb") as file:
        write_shard(file, np.zeros(GIB, np.int8))  # without the copy in memory that a pickler makes
    yield "one pickle of 1 GiB", large
    single = directory / "single"
    single.mkdir()
    (single / "tensor00000.pkl").write_bytes(pickle.dumps(np.zeros(1500, np.float32), protocol=4))
    yield "one pickle of 6 KB: what starting costs", single


def commands(path: Path, *, is_large: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each command that can be run here, ours first."""
    yield "safeload scan", [str(Path(sys.executable).with_name("safeload")), "scan", str(path)]
    if is_large:
        yield "safeload scan --digest", [str(Path(sys.executable).with_name("safeload")), "scan", "--digest", str(path)]
    for name, arguments in (
        ("picklescan", ["-p", str(path)]),
        ("modelscan", ["scan", "-p", str(path)]),
    ):
        if (PEERS / name).exists():
            yield name, [str(PEERS / name), *arguments]
    if (PEERS / "fickling").exists() and not is_large:
        # Its command takes one file, so 500 files are 500 processes; the library is called once instead.
        program = (
            "import sys, pathlib\n"
            "from fickling.analysis import check_safety\nfrom fickling.fickle import Pickled\n"
            "for p in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
            "    check_safety(Pickled.load(p.read_bytes()))\n"
        )
        yield "fickling (library)", [str(PEERS / "python"), "-c", program, str(path)]


def compare(kinds: Iterator[tuple[str, list[str]]], rounds: int) -> None:
    """Run the commands in turn and print the median of each, and its ratio to ours."""
    runs: dict[str, tuple[list[str], list[tuple[float, float]]]] = {name: (command, []) for name, command in kinds}
    for round_ in range(rounds + 1):
        for command, results in runs.values():
            result = measure(command)
            if round_:  # the first run of each is a warm-up
                results.append(result)
    ours = None
    for name, (_, results) in runs.items():
        seconds = statistics.median(s for s, _ in results)
        mib = statistics.median(m for _, m in results)
        ours = ours or seconds
        print(f"  {name:24} {seconds:8.3f} s  {mib:7.0f} MiB  {seconds / ours:6.2f} x ours")


def measure(command: list[str]) -> tuple[float, float]:
    """Run a command once; return its wall time in seconds and its peak resident memory in MiB."""
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, *command]
    seconds, kib = subprocess.run(launcher, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    return float(seconds), int(kib) / 1024


def machine(rounds: int) -> None:
    """Time the pickle machine on a million small items of each kind."""
    policy = load_policy("numpy-quantized")
    for name, value in (
        ("a million integers", list(range(1_000_000))),
        ("half a million strings", [str(n) for n in range(500_000)]),
        ("200,000 pairs", [(n, n) for n in range(200_000)]),
    ):
        data = pickle.dumps(value, protocol=4)
        n_opcodes = sum(1 for _ in pickletools.genops(data))
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            parsed = parse_pickle(MemorySource(data), policy)
            times.append((time.perf_counter() - began) / n_opcodes * 1e6)
            assert parsed.refusal is None
        print(f"  {name:24} {statistics.median(times):8.2f} us")
    print(f"  peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
