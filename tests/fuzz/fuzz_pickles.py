"""Fuzzing with a budget: random pickles, damaged honest ones, and whatever coverage leads atheris to.

A finding is a stream that is accepted and read otherwise by `pickle.load`, an exception that is no verdict, or one that
costs more than its length. Each is saved as a file of its own, and the run goes on.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, RejectedError
from safeload.tensors import DTYPE_ITEMSIZE, ML_DTYPES_ITEMSIZE
from tests.differential.generator import ProvidedChoices, RandomChoices, generate, mutate
from tests.differential.oracle import Problem, QuantizedWeight8bit, Tally, check, wide_policy
from tests.fuzz.fuzz_formats import FORMAT_TARGETS, format_seeds

CHUNK = 1000
"""Streams a task: large enough that the oracle's start is lost in it, small enough to end near the budget."""

KEPT = 40_000
"""Accepted inputs that atheris hands to the oracle. Distinct ones; more would take the oracle too long."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may use: whichever ends first.

    Attributes:
        seconds: Wall-clock time for all of it.
        streams: Random and damaged pickles, together.
        seed: What they are derived from.
        processes: Worker processes.
    """

    seconds: float
    streams: int
    seed: int
    processes: int


def honest_pickles() -> list[bytes]:
    """Return what CPython's two picklers write, in each protocol, for arrays of every dtype, records and containers."""
    module = types.ModuleType("model")
    record_class = type("QuantizedWeight8bit", (QuantizedWeight8bit,), {"__module__": "model"})
    module.__dict__["QuantizedWeight8bit"] = record_class
    before = sys.modules.get("model")
    sys.modules["model"] = module
    try:
        values: list[Any] = []
        for name in DTYPE_ITEMSIZE:
            dtype = np.dtype(getattr(ml_dtypes, name) if name in ML_DTYPES_ITEMSIZE else name)
            values.append(np.zeros((2, 3), dtype))
        values += [
            np.asfortranarray(values[9]),
            values[9][0, 0],
            values[9][:0],
            np.arange(6, dtype=">u2").reshape(2, 3).T,
        ]
        record = record_class(np.ones((4, 2), np.int8), np.ones((2, 2), np.float32))
        values += [record, {"a": [record, (1, 2.5, None)], "b": b"\0", 3: True}, OrderedDict(x=values[0], y="\u00e9")]
        pickles = []
        for protocol in range(6):
            for value in values:
                pickles.append(pickle.dumps(value, protocol))
                out = io.BytesIO()
                pickle._Pickler(out, protocol).dump(value)
                pickles.append(out.getvalue())
        return list(dict.fromkeys(pickles))
    finally:
        if before is None:
            del sys.modules["model"]
        else:
            sys.modules["model"] = before


# ---------------------------------------------------------------- random streams


def _task(numbered: tuple[str, int, int]) -> tuple[str, Tally]:
    kind, seed, number = numbered
    choices = RandomChoices(random.Random(f"{kind} {seed} {number}"))  # noqa: S311 - repeatable, no secret
    policy = wide_policy()
    if kind == "generated":
        streams = [generate(choices) for _ in range(CHUNK)]
        return kind, check([s.data for s in streams], policy, origins=streams)
    honest = honest_pickles()
    return kind, check([mutate(choices, choices.choice(honest), choices.choice(honest)) for _ in range(CHUNK)], policy)


def _tasks(budget: Budget, deadline: float) -> Iterator[tuple[str, int, int]]:
    for number in range(max(budget.streams // CHUNK, 1)):
        if time.monotonic() > deadline:
            return
        # Three generated streams to one damaged one: most of the damaged ones break at once.
        yield ("damaged" if number % 4 == 3 else "generated"), budget.seed, number


def run_random(budget: Budget, deadline: float, tell: Callable[[str], None]) -> dict[str, Tally]:
    """Check random streams until the budget is used up, on all processes."""
    tallies = {"generated": Tally(), "damaged": Tally()}
    context = multiprocessing.get_context("spawn")
    told = time.monotonic()
    with context.Pool(budget.processes) as pool:
        pending: list[Any] = []
        for task in _tasks(budget, deadline):
            pending.append(pool.apply_async(_task, (task,)))
            while len(pending) >= 2 * budget.processes:
                kind, tally = pending.pop(0).get()
                tallies[kind].add(tally)
            if time.monotonic() - told > 30:
                told = time.monotonic()
                tell(", ".join(summary(kind, tally) for kind, tally in tallies.items()))
        for result in pending:
            kind, tally = result.get()
            tallies[kind].add(tally)
    return tallies


def summary(kind: str, tally: Tally) -> str:
    """Say what became of the streams of one kind."""
    return f"{kind}: {tally.n_streams:,} streams, {tally.n_accepted:,} accepted, {len(tally.problems)} findings"


# ---------------------------------------------------------------- atheris

Target = Callable[[bytes], None]


def _keep(folder: Path) -> Callable[[bytes], None]:
    """Return what appends a distinct accepted stream to the folder's list, for the oracle."""
    seen: set[bytes] = set()
    out = (folder / "accepted").open("ab")

    def keep(stream: bytes) -> None:
        if len(seen) < KEPT and stream not in seen and len(stream) < 1 << 16:
            seen.add(stream)
            out.write(len(stream).to_bytes(4, "little") + stream)
            out.flush()

    return keep


def _pickle_bytes(folder: Path) -> Target:
    from safeload.formats import MemorySource
    from safeload.formats.pickles import parse_pickle

    policy, keep = wide_policy(), _keep(folder)

    def target(data: bytes) -> None:
        if parse_pickle(MemorySource(data), policy).refusal is None:
            keep(data)

    return target


def _pickle_opcodes(folder: Path) -> Target:
    atheris = importlib.import_module("atheris")

    from safeload.formats import MemorySource
    from safeload.formats.pickles import parse_pickle

    policy, keep = wide_policy(), _keep(folder)

    def target(data: bytes) -> None:
        stream = generate(ProvidedChoices(atheris.FuzzedDataProvider(data))).data
        if parse_pickle(MemorySource(stream), policy).refusal is None:
            keep(stream)

    return target


def _inert(_: Path) -> Target:
    from safeload.formats import MemorySource
    from safeload.formats.detection import detect
    from safeload.formats.inert import check_inert
    from safeload.policy import load_policy

    policy = load_policy("numpy-quantized")

    def target(data: bytes) -> None:
        detect(data[:512], len(data))
        check_inert(MemorySource(data), "json", policy)
        check_inert(MemorySource(data), "text", policy)
        check_inert(MemorySource(data), "opaque", policy)

    return target


def _policy(_: Path) -> Target:
    from safeload.policy import Policy

    def target(data: bytes) -> None:
        try:
            policy = Policy.parse(data, source="fuzz")
        except ConfigError:
            return
        assert Policy.parse(policy.to_toml().encode(), source="fuzz").sha256 == policy.sha256

    return target


def _manifest(_: Path) -> Target:
    from safeload.manifest import Manifest

    def target(data: bytes) -> None:
        try:
            manifest = Manifest.parse(data)
        except RejectedError:
            return
        assert Manifest.parse(manifest.to_payload()) == manifest

    return target


def _envelope(_: Path) -> Target:
    from safeload.trust.dsse import Envelope

    def target(data: bytes) -> None:
        try:
            envelope = Envelope.parse(data)
        except RejectedError:
            return
        assert Envelope.parse(envelope.serialize()).payload == envelope.payload

    return target


def _trust_store(_: Path) -> Target:
    from safeload.trust.store import TrustStore

    def target(data: bytes) -> None:
        try:
            TrustStore.parse(data, source="fuzz")
        except ConfigError:
            return

    return target


TARGETS: dict[str, tuple[float, Callable[[Path], Target]]] = {
    "pickle-bytes": (0.15, _pickle_bytes),
    "pickle-opcodes": (0.15, _pickle_opcodes),
    "inert": (0.05, _inert),
    "policy": (0.05, _policy),
    "manifest": (0.05, _manifest),
    "envelope": (0.05, _envelope),
    "trust-store": (0.05, _trust_store),
    **{name: (0.45 / len(FORMAT_TARGETS), make) for name, make in FORMAT_TARGETS.items()},
}
"""Each target's share of atheris' time, and what makes it."""


def _seeds(name: str) -> list[bytes]:
    if name in {"pickle-bytes", "inert"}:
        return [*honest_pickles(), b'{"a": [1, 2.5, null]}', b"# plain text\n"]
    if name == "policy":
        from safeload.policy import shipped_policies

        return [path.read_bytes() for _, path in shipped_policies()]
    if name == "manifest":
        return [_SEED_MANIFEST]
    if name == "envelope":
        return [
            b'{"payload":"e30=","payloadType":"application/vnd.in-toto+json","signatures":[{"keyid":"a","sig":"AA=="}]}'
        ]
    if name == "trust-store":
        return [_SEED_STORE]
    if name in FORMAT_TARGETS:
        return format_seeds(name)
    return [bytes(400), bytes(range(256)) * 4]


_SEED_MANIFEST = (
    b'{"_type":"https://in-toto.io/Statement/v1","subject":[],"predicateType":"https://safeload.dev/manifest/v1",'
    b'"predicate":{"spec":"1.0","stream":"m","revision":"1","version":1,"issued":"2024-01-01T00:00:00Z","previous":null,'
    b'"totals":{"files":0,"bytes":0},"files":[],"tool":{"name":"safeload","version":"1"}}}'
)


_SEED_STORE = (
    b'{"spec":"1.0","version":1,"keys":{"00":{"type":"ed25519","name":"a","spki":"AA=="}},'
    b'"publishers":[{"name":"p","streams":["*"],"threshold":1,"keyids":["00"]}]}'
)


def fuzz_target(name: str, seconds: int, seed: int, folder: Path) -> None:
    """Run atheris on one target until the time is over; called in a process of its own, which it ends."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["safeload"]):
        make = TARGETS[name][1]
        target = make(folder)
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for data in _seeds(name):
        (corpus / sha256_hex(data)[:16]).write_bytes(data)
    arguments = [
        *(
            "fuzz",
            str(corpus),
            f"-max_total_time={seconds}",
            f"-seed={seed % (1 << 31) or 1}",
            "-max_len=4096",
            "-timeout=10",
        ),
        *("-rss_limit_mb=2048", f"-artifact_prefix={folder}/", "-verbosity=0", "-print_final_stats=1"),
    ]
    atheris.Setup(arguments, target)
    atheris.Fuzz()


def run_atheris(name: str, seconds: float, seed: int, folder: Path) -> Tally:
    """Fuzz one target with coverage feedback in a process of its own, then ask the oracle about what was accepted.

    Args:
        name: Key of `TARGETS`.
        seconds: For atheris; the oracle comes on top.
        seed: What its mutations are derived from.
        folder: Where its corpus, its crashes and what was accepted go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--target",
        name,
        "--seconds",
        str(max(int(seconds), 1)),
        "--seed",
        str(seed),
    ]
    run = subprocess.run([*command, "--artifacts", str(folder)], capture_output=True, check=False, env=_environment())
    log = run.stderr.decode(errors="replace")
    executed = [line.split()[-1] for line in log.splitlines() if line.startswith("stat::number_of_executed_units")]
    tally = Tally()
    accepted = folder / "accepted"
    if accepted.exists():
        tally = check(list(_read_kept(accepted.read_bytes())), wide_policy())
    tally.n_streams = int(executed[0]) if executed else 0
    crashes = [path for path in folder.iterdir() if path.name.startswith(("crash-", "timeout-", "oom-", "slow-unit-"))]
    for path in crashes:
        tally.problems.append(Problem(path.read_bytes(), f"{name}: {_last_exception(log)}"))
    if run.returncode != 0 and not crashes:
        ended = signal.Signals(-run.returncode).name if run.returncode < 0 else run.returncode
        tally.problems.append(Problem(b"", f"{name}: atheris ended with {ended}: {log[-500:]}"))
    return tally


def _environment() -> dict[str, str]:
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _read_kept(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        yield data[at + 4 : at + 4 + length]
        at += 4 + length


def _last_exception(log: str) -> str:
    lines = [line for line in log.splitlines() if line[:1].isalpha() and "Error" in line.split(":")[0]]
    return lines[-1][:300] if lines else "see the log of the target"
