"""How long the command takes to start, each run a process of its own: `python -m benchmarks.bench_startup`.

Kinds of run alternate, and each gets the fastest and the middle of its times. The processor's time is what a run costs;
the clock's time is what one waits for, and grows with whatever else runs: compare it on an idle machine. Scanners of
`.venv-peers` (see `make bench-peers`) that are there scan the same file.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SAFELOAD = Path(sys.executable).with_name("safeload")
PEERS = Path(__file__).resolve().parent.parent / ".venv-peers" / "bin"

TARGET_SECONDS = 0.25
"""What the first two kinds of run may take of the clock on an idle machine."""

ACCEPTED = frozenset({0})
PEERS_CODES = frozenset({0, 3})
"""modelscan exits with 3 where it finds no file that it supports, which is no failure to start."""


def main() -> None:
    """Make the files, run everything in turn, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="runs of each command (default 21)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="safeload-bench-") as directory:
        kinds = commands(Path(directory))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for number in range(rounds + 1):
            for name, (command, codes) in kinds.items():
                taken = measure(command, codes)
                if number:  # the first run of each fills the page cache
                    times[name].append(taken)
    print(f"{'seconds':28}  {'processor':>17}  {'clock':>17}")
    print(f"{'':28}  {'fastest':>8} {'middle':>8}  {'fastest':>8} {'middle':>8}")
    for name, taken_all in times.items():
        columns = [(min(column), statistics.median(column)) for column in zip(*taken_all, strict=True)]
        print(f"{name:28}  " + "  ".join(f"{best:8.3f} {middle:8.3f}" for best, middle in columns))
    load = os.getloadavg()[0]
    print(f"target: --help and scan below {TARGET_SECONDS} s of the clock; load average here and now: {load:.1f}")


def commands(folder: Path) -> dict[str, tuple[list[str], frozenset[int]]]:
    """Make a signed checkpoint of one small file; return what is run on it, and the exit codes that are expected."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    weights = checkpoint / "weights.pkl"
    weights.write_bytes(pickle.dumps({"w": np.zeros(1500, np.float32)}, protocol=4))
    key, manifest, public = folder / "key", folder / "manifest.json", folder / "key.pub"
    for arguments in (
        ["keygen", "-o", str(key), "--no-passphrase"],
        ["sign", str(checkpoint), "--key", str(key), "-o", str(manifest), "--model", "m", "--revision", "r1"],
    ):
        subprocess.run([SAFELOAD, *arguments], check=True, stdout=subprocess.DEVNULL)
    signed = [str(checkpoint), "-m", str(manifest), "--trust", str(public)]
    ours = {
        "safeload --help": ["--help"],
        "safeload scan FILE": ["scan", str(weights)],
        "safeload verify DIR": ["verify", *signed],
        "safeload load DIR": ["load", *signed],
    }
    kinds = {name: ([str(SAFELOAD), *arguments], ACCEPTED) for name, arguments in ours.items()}
    kinds["python -c pass"] = ([sys.executable, "-c", "pass"], ACCEPTED)
    kinds["python -c 'import typer'"] = ([sys.executable, "-c", "import typer"], ACCEPTED)
    kinds["python -c 'import pydantic'"] = ([sys.executable, "-c", "import pydantic.main"], ACCEPTED)
    for name, arguments in (("picklescan", ["-p", str(weights)]), ("modelscan", ["scan", "-p", str(weights)])):
        if (PEERS / name).exists():
            kinds[f"{name} FILE"] = ([str(PEERS / name), *arguments], PEERS_CODES)
    return kinds


def measure(command: list[str], codes: frozenset[int]) -> tuple[float, float]:
    """Run a command once; return the seconds of processor and clock that it took."""
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    began = time.perf_counter()
    _, status, usage = os.wait4(os.posix_spawn(command[0], command, os.environ, file_actions=quiet), 0)
    clock = time.perf_counter() - began
    assert os.waitstatus_to_exitcode(status) in codes, command
    return usage.ru_utime + usage.ru_stime, clock


if __name__ == "__main__":
    main()
