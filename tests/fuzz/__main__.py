"""`python -m tests.fuzz`: fuzz for a time, print what became of the inputs, and exit with 1 if there is a finding."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safeload.digests import sha256_hex
from tests.differential.oracle import Tally
from tests.fuzz.fuzz_pickles import TARGETS, Budget, fuzz_target, run_atheris, run_random, summary


def tell(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - this is a command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="wall-clock time for all of it")
    parser.add_argument("--streams", type=int, default=10_000_000, help="end the random part after so many streams")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="what everything is derived from")
    parser.add_argument("--artifacts", type=Path, help="folder for findings; a new temporary one by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-atheris", action="store_true", help="only the random part")
    parser.add_argument("--target", choices=[*TARGETS], help="only atheris, in this process, on one target")
    args = parser.parse_args()
    folder = args.artifacts or Path(tempfile.mkdtemp(prefix="safeload-fuzz-"))
    if args.target:
        fuzz_target(args.target, args.seconds, args.seed, folder)
        return 0
    tell(f"seed {args.seed}, findings go to {folder}")
    start = time.monotonic()
    with_atheris = not args.no_atheris and importlib.util.find_spec("atheris") is not None
    if not with_atheris and not args.no_atheris:
        tell("atheris is not installed: no coverage feedback, only random streams (pip install atheris)")
    # A second for each ten is left for what runs past its time: the last chunks, and the oracle behind atheris.
    share = 0.45 if with_atheris else 0.9
    budget = Budget(args.seconds, args.streams, args.seed, args.processes)
    tallies = run_random(budget, start + share * args.seconds, tell)
    if with_atheris:
        left = max(0.9 * args.seconds - (time.monotonic() - start), len(TARGETS))
        with ThreadPoolExecutor(args.processes) as pool:
            runs = {
                name: pool.submit(run_atheris, name, left * part * args.processes, args.seed, folder / name)
                for name, (part, _) in TARGETS.items()
            }
            for name, run in runs.items():
                tallies[name] = run.result()
                tell(summary(name, tallies[name]))
    return report(tallies, folder, time.monotonic() - start)


def report(tallies: dict[str, Tally], folder: Path, seconds: float) -> int:
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    tell(f"\n{seconds:.0f} s")
    for kind, tally in tallies.items():
        tell(summary(kind, tally))
    tell("refused: " + ", ".join(f"{code} {n:,}" for code, n in total.refused.most_common()))
    for problem in total.problems:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"finding-{sha256_hex(problem.stream)[:16]}"
        path.write_bytes(problem.stream)
        tell(f"FINDING {path}: {problem}")
    tell("no finding" if not total.problems else f"{len(total.problems)} finding(s)")
    return 1 if total.problems else 0


if __name__ == "__main__":
    sys.exit(main())
