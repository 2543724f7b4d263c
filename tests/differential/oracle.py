"""What `pickle.load` makes of a stream, asked in a throw-away process, and what safeload makes of it, in one language.

Run as a script, it is the worker: pickles in, one JSON line out for each. Only streams that the tests generated from
harmless parts are given to it, only those that safeload accepted, and it resolves no other globals than those parts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import time
import types
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from safeload.formats import Parsed
    from safeload.policy import Policy
    from tests.differential.generator import Stream

Normal: TypeAlias = list[Any]
"""A value in terms that JSON keeps apart: `[kind, ...]`."""

BATCH = 500
"""Streams a worker process. What one of them does to numpy's process-wide state ends with it."""

MEMORY_BYTES = 2 << 30
SECONDS = 60
"""What a worker may use: address space, and processor time for a batch that takes one second."""

SLOW_SECONDS = 2.0
"""A generated stream has a few kilobytes, and takes a millisecond. This long means superlinear work."""


BY_CHANCE = frozenset(
    {
        *("ambiguous-name", "bad-key", "ambiguous-number", "bad-payload", "bad-shape"),
        *("duplicate-key", "integer-too-long", "payload-size"),
    }
)
"""Why a stream may be refused that nothing was broken in: the generator also writes lengths of 2**63, floats beyond a
double, integers of 33 bytes, bools of bytes but 0 and 1, keys of 300 bytes, `1` and `True` as keys
of one dict, and `a/b` beside `a` with a `b`."""


@dataclass
class QuantizedWeight8bit:
    """What the streams' records are to the worker: Grok-1's class, as `checkpoint.py` of that release has it."""

    weight: Any
    scales: Any


def _array(array: np.ndarray[Any, np.dtype[Any]]) -> Normal:
    # The byte order is no part of the value: numpy keeps it for `_frombuffer`, and swaps what `__setstate__` brings.
    big = array.dtype.byteorder == ">"
    # By way of integers, because a cast of floats or narrow integers might normalize their bits.
    width = min(array.dtype.itemsize, 8)
    flat = np.frombuffer(array.tobytes("C"), dtype=f"u{width}")
    if big and array.dtype.kind == "c" and array.dtype.itemsize == 8:
        flat = np.frombuffer(array.tobytes("C"), dtype="u4")
    data = flat.byteswap().tobytes() if big else flat.tobytes()
    return ["array", array.dtype.name, list(array.shape), hashlib.sha256(data).hexdigest()]


def normal(value: Any) -> Normal:
    """Return a value in terms that can be compared across processes."""
    kind = type(value)
    if value is None:
        return ["none"]
    if kind is bool or kind is str:
        return [kind.__name__, value]
    if kind is int:
        return ["int", str(value)]
    if kind is float:
        return ["float", struct.pack(">d", value).hex()]
    if kind is bytes or kind is bytearray:
        return [kind.__name__, value.hex()]
    if kind is list or kind is tuple:
        return [kind.__name__, [normal(child) for child in value]]
    if kind is dict or kind is OrderedDict:
        return ["dict", [[normal(key), normal(child)] for key, child in value.items()]]
    if kind is np.ndarray:
        return _array(value)
    if isinstance(value, np.generic):
        return _array(np.asarray(value))
    if kind is QuantizedWeight8bit:
        return ["record", "QuantizedWeight8bit", sorted([key, normal(child)] for key, child in vars(value).items())]
    return ["other", f"{kind.__module__}.{kind.__qualname__}"]


# ---------------------------------------------------------------- the worker


def _reconstruct_array(function: Any, arguments: Any, state: Any, aval: dict[str, Any]) -> Any:
    """Stand in for jax's function of that name (`jax/_src/array.py`), less the transfer to a device."""
    array = function(*arguments)
    array.__setstate__(state)
    if not set(aval) <= {"weak_type", "named_shape"}:
        raise TypeError(f"unexpected aval state {aval}")
    return array


def _serve() -> None:
    from safeload.formats.pickles.constructors import CONSTRUCTORS
    from tests.differential.generator import HARMLESS

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    for name in ("model", "jax", "jax._src", "jax._src.array", "jax._src.device_array"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["model"].__dict__["QuantizedWeight8bit"] = QuantizedWeight8bit
    sys.modules["jax._src.array"].__dict__["_reconstruct_array"] = _reconstruct_array
    sys.modules["jax._src.device_array"].__dict__["reconstruct_device_array"] = _reconstruct_array
    resolvable = {*CONSTRUCTORS, *HARMLESS, ("__main__", "QuantizedWeight8bit"), ("model", "QuantizedWeight8bit")}

    def guarded(base: Any) -> Any:
        class Guarded(base):  # type: ignore[misc] # either of the two unpicklers
            def find_class(self, module: str, name: str) -> Any:
                if (module, name) not in resolvable:
                    raise pickle.UnpicklingError("not one of the harmless parts")
                return super().find_class(module, name)

        return Guarded

    in_c, in_python = guarded(pickle.Unpickler), guarded(pickle._Unpickler)  # the Python one
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    while header := sys.stdin.buffer.read(4):
        stream = sys.stdin.buffer.read(int.from_bytes(header, "little"))
        forms = []
        for unpickler in (in_c, in_python):
            try:
                forms.append(normal(unpickler(io.BytesIO(stream), encoding="latin1").load()))
            except Exception as err:  # noqa: BLE001 - whatever the stream provokes is the answer
                forms.append(["error", type(err).__name__, str(err)[:200]])
        sys.stdout.write(json.dumps(forms) + "\n")
        sys.stdout.flush()


def ask(streams: Sequence[bytes]) -> Iterator[tuple[Normal, Normal]]:
    """Yield what the C unpickler and the Python one make of each stream: its normal form, an error, or a crash."""
    start = 0
    while start < len(streams):
        batch = streams[start : start + BATCH]
        root = Path(__file__).parents[2]
        worker = subprocess.run(
            [sys.executable, "-B", __file__],
            input=b"".join(len(stream).to_bytes(4, "little") + stream for stream in batch),
            capture_output=True,
            check=False,
            timeout=10 * SECONDS,
            env={"PATH": os.defpath, "PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )
        lines = worker.stdout.splitlines()
        for line in lines:
            in_c, in_python = json.loads(line)
            yield in_c, in_python
        start += len(lines)
        if len(lines) < len(batch):
            # It answered each stream before it read the next, so the first without an answer is the culprit.
            crash = ["crash", worker.returncode, worker.stderr[-300:].decode(errors="replace")]
            yield crash, crash
            start += 1


# ---------------------------------------------------------------- our side


@dataclass(frozen=True, slots=True)
class Problem:
    """A stream that breaks the claim of `parse_pickle`.

    Attributes:
        stream: Its bytes.
        what: What went wrong, in one line.
    """

    stream: bytes
    what: str

    def __str__(self) -> str:
        return f"{self.what}: {self.stream[:300]!r}"


@dataclass
class Tally:
    """What became of the streams that were checked."""

    n_streams: int = 0
    n_accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seen: set[tuple[str, str]] = field(default_factory=set)  # globals, dtypes and protocols among the accepted ones
    problems: list[Problem] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.n_streams += other.n_streams
        self.n_accepted += other.n_accepted
        self.refused += other.refused
        self.seen |= other.seen
        self.problems += other.problems


WIDE = b"""
version = 1
name = "wide"
description = "Everything that a constructor exists for."
extends = "numpy-quantized"

[[widen.pickle.globals]]
names = [
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
    "builtins.bytes", "copyreg._reconstructor", "builtins.object",
]
reason = "So that the differential test reaches every constructor."
"""


def wide_policy() -> Policy:
    """Return a policy that allows every pair for which there is a constructor."""
    from safeload.policy import Policy

    return Policy.parse(WIDE, source="wide")


def _through_window(data: bytes, policy: Policy, window: int) -> Parsed:
    """Parse, asking for `window` bytes at a time where a real file is asked for 64 KiB."""
    from safeload.formats import MemorySource
    from safeload.formats.pickles import machine

    sizes = ("FIRST_WINDOW_BYTES", "WINDOW_BYTES")
    before = {name: machine.__dict__[name] for name in sizes}
    try:
        machine.__dict__.update(dict.fromkeys(sizes, window))
        return machine.parse_pickle(MemorySource(data), policy)
    finally:
        machine.__dict__.update(before)


def _verdict(parsed: Parsed) -> str:
    refusal = parsed.refusal
    codes = () if refusal is None else (type(refusal).__name__, *((f.code, f.offset) for f in refusal.findings))
    return repr((parsed.value, parsed.tensors, parsed.globals, codes))


def _decoded(stream: bytes, parsed: Parsed) -> Normal:
    from safeload.canonical import canonical_bytes
    from safeload.decoding import HostTensor, _File
    from safeload.manifest import FileEntry
    from safeload.staging import StagedFile

    data = memoryview(stream).toreadonly()
    entry = FileEntry(path="stream", size=len(data), sha256="0" * 64, format="pickle", role="weights")
    staged = StagedFile(entry, data)

    def form(value: Any) -> Normal:
        if isinstance(value, HostTensor):
            spec = value.spec
            payload = (
                data[spec.extent.offset :][: spec.extent.nbytes] if spec.extent.inline is None else spec.extent.inline
            )
            if value.array.flags.writeable:
                raise AssertionError("a decoded array is writable")
            found, digest = _array(value.array), hashlib.sha256(canonical_bytes(payload, spec)).hexdigest()
            if found[3] != digest:
                raise AssertionError("the value digest is not that of the array")
            return found
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, [form(child) for child in value]]
        if isinstance(value, dict):
            return ["dict", [[normal(key), form(child)] for key, child in value.items()]]
        if dataclasses.is_dataclass(value):
            fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
            return ["record", type(value).__name__, sorted([name, form(child)] for name, child in fields)]
        return normal(value)

    return form(_File("stream", staged).decode(parsed.value))


def check(streams: Sequence[bytes], policy: Policy, *, origins: Sequence[Stream] = ()) -> Tally:
    """Hold `parse_pickle` to its claim: each stream is refused, or read as `pickle.load` reads it, bit by bit.

    It never raises, takes no longer than a stream of that length may, and says the same whatever the size of the window
    through which it reads, and while it is traced.

    Args:
        streams: Pickles made of harmless parts.
        policy: What is allowed.
        origins: What the generator says of each stream, where it wrote them: an intact one must not be refused, but for
            what chance may have written into it; one that breaks a stricter rule than `pickle.load` has must be.
    """
    from safeload.formats import MemorySource
    from safeload.formats.pickles import parse_pickle
    from safeload.formats.pickles.tracing import TracingMachine

    tally = Tally(n_streams=len(streams))
    accepted: list[tuple[bytes, Normal]] = []
    for index, stream in enumerate(streams):
        source = MemorySource(stream)
        start = time.perf_counter()
        try:
            parsed = parse_pickle(source, policy)
            seconds = time.perf_counter() - start
            # Every other stream is read again, in turns through a narrow window and traced; more would cost too much.
            again = parsed
            if index % 4 == 0:
                again = parse_pickle(source, policy, machine=TracingMachine(source, policy, lambda _: None))
            elif index % 2 == 0:
                again = _through_window(stream, policy, 1 + index // 4 % 31)
        except Exception as err:  # noqa: BLE001 - that it raises anything is the finding
            tally.problems.append(Problem(stream, f"parse_pickle raised {type(err).__name__}: {err}"))
            continue
        if seconds > SLOW_SECONDS:
            tally.problems.append(Problem(stream, f"parse_pickle took {seconds:.1f} s"))
        if again is not parsed and _verdict(parsed) != _verdict(again):
            tally.problems.append(Problem(stream, "the verdict depends on the window, or on being traced"))
        origin = origins[index] if origins else None
        if parsed.refusal is not None:
            code = parsed.refusal.findings[0].code
            tally.refused[code] += 1
            if origin is not None and origin.intact and code not in BY_CHANCE:
                tally.problems.append(Problem(stream, f"an intact stream is refused: {parsed.refusal}"))
            continue
        if origin is not None and origin.stricter is not None:
            tally.problems.append(Problem(stream, f"accepted against the rule: {origin.stricter}"))
        tally.n_accepted += 1
        tally.seen |= {("global", name) for name in parsed.globals}
        tally.seen |= {("dtype", tensor.dtype.name) for tensor in parsed.tensors}
        tally.seen |= {("protocol", str(origin.protocol))} if origin is not None else set()
        try:
            accepted.append((stream, _decoded(stream, parsed)))
        except Exception as err:  # noqa: BLE001 - as above
            tally.problems.append(
                Problem(stream, f"an accepted stream could not be decoded: {type(err).__name__}: {err}")
            )
    theirs = ask([stream for stream, _ in accepted])
    for (stream, form), (in_c, in_python) in zip(accepted, theirs, strict=True):
        for reader, read in (("C", in_c), ("Python", in_python)):
            if read != json.loads(json.dumps(form)):
                ours, found = _first_difference(form, read)
                tally.problems.append(Problem(stream, f"we read {ours}, the {reader} unpickler reads {found}"))
                break
    return tally


def _first_difference(ours: Any, theirs: Any) -> tuple[str, str]:
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs) and ours[:1] == theirs[:1]:
        for mine, other in itertools.zip_longest(ours, theirs):
            if mine != other:
                return _first_difference(mine, other)
    return repr(ours)[:300], repr(theirs)[:300]


if __name__ == "__main__":
    _serve()
