"""Plan: what a load will take of each device and of the host, from shapes and partition rules alone.

Nothing here reads a tensor or knows JAX. The arithmetic is that of `jax.sharding.NamedSharding`, which gives every
device a part of the same shape, or refuses: so one number says what each device holds.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
import tomllib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from safeload.digests import CHUNK_BYTES, HASH_CHUNK_BYTES
from safeload.errors import ConfigError, Finding, escape, reason
from safeload.manifest import Manifest
from safeload.parallel import n_processors
from safeload.placing import (
    SLACK_BYTES,
    Block,
    byte_ranges,
    compile_rules,
    copied_bytes,
    framing,
    is_contiguous,
    spec_of,
    staged_bytes,
)
from safeload.report import Report
from safeload.sizes import human_size
from safeload.tensors import DTYPE_ITEMSIZE, TensorSpec

Partition: TypeAlias = tuple[str | tuple[str, ...] | None, ...]
"""Mesh axes of each dimension, as the arguments of a `jax.sharding.PartitionSpec`; dimensions beyond it are whole."""

MAX_RULES_BYTES: Final = 1024 * 1024
"""Longest file of rules: a few hundred bytes a rule, and models have tens of kinds of parameters."""

MAX_DEVICES: Final = 1_000_000
"""Most devices of a mesh; more is a typing mistake."""

_PROBE_BYTES: Final = 32 * 1024 * 1024
"""What one thread hashes or copies to find a rate: some 20 ms, longer than a processor takes to speed up."""

_DEFAULT_AXES: Final = {1: ("model",), 2: ("data", "model")}
"""Names of the axes of a mesh that is given by its sizes alone: those of Grok-1's."""

_AXIS: Final = re.compile(r"(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)=)?(?P<size>[0-9]{1,7})")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor to load.

    Attributes:
        name: What to call it.
        rule_path: The `/`-joined path that rules are matched against: the parameter's, also for a field of a record.
        file: The file that it lies in.
        spec: Its type and global shape, and where in the file it lies.
    """

    name: str
    rule_path: str
    file: str
    spec: TensorSpec

    @property
    def dtype(self) -> str:
        """Element type by numpy's or ml_dtypes' name."""
        return self.spec.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.spec.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * DTYPE_ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file to read.

    Attributes:
        path: Its path in the checkpoint.
        size: Length in bytes.
        has_chunks: Whether the manifest has digests of its chunks, so that parts of it can be verified by themselves.
        is_index: Whether it is an index of other files, which a load keeps until the end.
    """

    path: str
    size: int
    has_chunks: bool
    is_index: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """What there is to load.

    Attributes:
        source: What the numbers are taken from, for people.
        tensors: Every tensor, by file and then in stored order.
        files: Every file, those without tensors included.
    """

    source: str
    tensors: tuple[PlannedTensor, ...]
    files: tuple[PlannedFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor, and what each device will hold of it.

    Attributes:
        tensor: The tensor.
        partition: Mesh axes of each dimension.
        device_shape: Shape of each device's part; None where the tensor does not divide.
    """

    tensor: PlannedTensor
    partition: Partition
    device_shape: tuple[int, ...] | None

    @property
    def device_nbytes(self) -> int:
        """Bytes of each device's part; 0 where there is none."""
        if self.device_shape is None:
            return 0
        return math.prod(self.device_shape) * DTYPE_ITEMSIZE[self.tensor.dtype]

    def blocks(self) -> Iterator[Block]:
        """Yield each part that a device holds; none where it does not divide."""
        if self.device_shape is None:
            return
        sides = zip(self.tensor.shape, self.device_shape, strict=True)
        starts = (range(0, length, step) if step else range(1) for length, step in sides)
        for origin in product(*starts):
            yield tuple(range(at, at + n) for at, n in zip(origin, self.device_shape, strict=True))

    @property
    def is_spread(self) -> bool:
        """Whether a device's part lies in the file with the bytes of other parts between its own."""
        first = next(self.blocks(), None)
        return first is not None and self.tensor.spec.strides is None and not is_contiguous(self.tensor.spec, first)


@dataclass(frozen=True, slots=True)
class LeastBudget:
    """The smallest memory budget with which one host loads all of it: `load` refuses one byte less.

    Attributes:
        staged: Bytes of whichever file takes most, on whole pages: of the signed chunks that cover one device's part of
            a tensor, or of a file that has to be read whole.
        indexes: Bytes of the indexes, which are kept beside that.
        copies: The largest part that is put together on the host, before a device with memory of its own takes it.
    """

    staged: int
    indexes: int
    copies: int

    @property
    def nbytes(self) -> int:
        """The budget for devices with memory of their own."""
        return self.on_host + self.copies

    @property
    def on_host(self) -> int:
        """The budget where the devices are the host's own processors, and what is put together is the array."""
        return self.staged + self.indexes


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine did in a short probe just now.

    Attributes:
        hash_bytes_per_second: SHA-256 over memory, in all threads together.
        copy_bytes_per_second: Copying memory, in one thread.
        threads: How many threads hashed.
    """

    hash_bytes_per_second: float
    copy_bytes_per_second: float
    threads: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load will take, and why it cannot be done, if it cannot.

    Attributes:
        inventory: What there is to load.
        mesh: Devices along each axis.
        placed: Every tensor, placed.
        device_bytes: What each device will hold; of those tensors that divide.
        device_memory: What a device has, where that was said.
        host_peak_bytes: Most memory that one host stages and copies in, if it loads everything.
        least_budget: The smallest bound on that with which a load works.
        memory_budget: The bound on that, where one was given.
        rates: What the machine can do; None where nobody measured.
        findings: Everything that stands in the way.
    """

    inventory: Inventory
    mesh: Mapping[str, int]
    placed: tuple[PlacedTensor, ...]
    device_bytes: int
    device_memory: int | None
    host_peak_bytes: int
    least_budget: LeastBudget
    memory_budget: int | None
    rates: Rates | None
    findings: tuple[Finding, ...]

    @property
    def n_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def seconds(self) -> float | None:
        """Time to hash every file and to copy every device's bytes once, at the measured rates; None without them."""
        if self.rates is None:
            return None
        copied = self.device_bytes * self.n_devices
        hashing = self.inventory.nbytes / self.rates.hash_bytes_per_second
        return hashing + copied / self.rates.copy_bytes_per_second

    def to_json(self) -> dict[str, Any]:
        """Return the plan as one JSON object in the style of the command's contract."""
        seconds, rates = self.seconds, self.rates
        return {
            "verdict": "rejected" if self.findings else "accepted",
            "source": self.inventory.source,
            "mesh": dict(self.mesh),
            "devices": self.n_devices,
            "files": len(self.inventory.files),
            "bytes": self.inventory.nbytes,
            "device_bytes": self.device_bytes,
            "device_memory": self.device_memory,
            "host_peak_bytes": self.host_peak_bytes,
            "memory_budget": self.memory_budget,
            "least_memory_budget": self.least_budget.nbytes,
            "least_memory_budget_on_host": self.least_budget.on_host,
            "seconds": None if seconds is None else round(seconds, 3),
            "rates": None
            if rates is None
            else {
                "hash_bytes_per_second": round(rates.hash_bytes_per_second),
                "copy_bytes_per_second": round(rates.copy_bytes_per_second),
                "threads": rates.threads,
            },
            "tensors": [
                {
                    "name": placed.tensor.name,
                    "file": placed.tensor.file,
                    "dtype": placed.tensor.dtype,
                    "shape": list(placed.tensor.shape),
                    "partition": [list(entry) if isinstance(entry, tuple) else entry for entry in placed.partition],
                    "device_shape": None if placed.device_shape is None else list(placed.device_shape),
                    "device_bytes": placed.device_nbytes,
                }
                for placed in self.placed
            ],
        }


def plan(
    inventory: Inventory,
    *,
    mesh: Mapping[str, int],
    rules: Callable[[str], Partition],
    device_memory: int | None = None,
    memory_budget: int | None = None,
    rates: Rates | None = None,
) -> LoadPlan:
    """Say what a load will take of each device and of one host, and what stands in its way.

    A device holds its parts of the tensors and nothing else is counted: no activations, no cache, no compiler.

    Args:
        inventory: What there is to load.
        mesh: Devices along each axis, by the axes' names.
        rules: The partition of a tensor, by its path.
        device_memory: Bytes that a device has.
        memory_budget: Bytes that a host may stage in. A plan for one that loads all is enough for one that loads a
            part.
        rates: What the machine can do, to say how long it takes.

    Raises:
        ShardingError: No rule matches a tensor.
    """
    findings: list[Finding] = []
    placed = tuple(_place(tensor, mesh, rules(tensor.rule_path), findings) for tensor in inventory.tensors)
    device_bytes = sum(tensor.device_nbytes for tensor in placed)
    if device_memory is not None and device_bytes > device_memory:
        largest = max(placed, key=lambda tensor: tensor.device_nbytes)
        findings.append(
            Finding(
                "does-not-fit-device",
                f"expected at most {device_memory:,} bytes ({human_size(device_memory)}) on a device, found "
                f"{device_bytes:,} ({human_size(device_bytes)}), the most of one tensor "
                f"{human_size(largest.device_nbytes)} of {escape(largest.tensor.name)}",
                hint="use more devices, or rules that cut more of the tensors",
            )
        )
    peak = inventory.nbytes if memory_budget is None else min(memory_budget, inventory.nbytes)
    needs = _needs(inventory, placed)
    least = LeastBudget(
        staged=max((need.staged for need in needs), default=0),
        indexes=sum(file.size for file in inventory.files if file.is_index),
        copies=max((_copied(tensor) for tensor in placed), default=0),
    )
    if memory_budget is not None:
        findings += _beyond_budget(needs, least, memory_budget)
    return LoadPlan(
        inventory,
        MappingProxyType(dict(mesh)),
        placed,
        device_bytes,
        device_memory,
        peak,
        least,
        memory_budget,
        rates,
        tuple(findings),
    )


@dataclass(frozen=True, slots=True)
class _Need:
    """What a load stages at once of a file: bytes, and the tensor whose part takes them; None for no single one."""

    file: PlannedFile
    staged: int
    tensor: PlacedTensor | None = None


def _needs(inventory: Inventory, placed: Sequence[PlacedTensor]) -> list[_Need]:
    by_file: dict[str, list[PlacedTensor]] = {}
    for tensor in placed:
        by_file.setdefault(tensor.tensor.file, []).append(tensor)
    # Layers have the same layout, and a mesh can have thousands of parts of each.
    known: dict[Hashable, tuple[int, int | None]] = {}
    needs: list[_Need] = []
    for file in inventory.files:
        tensors = by_file.get(file.path, [])
        layout = (file.size, file.has_chunks, tuple((each.tensor.spec, each.device_shape) for each in tensors))
        if layout not in known:
            known[layout] = _least(file, tensors)
        staged, position = known[layout]
        needs.append(_Need(file, staged, None if position is None else tensors[position]))
    return needs


def _least(file: PlannedFile, tensors: Sequence[PlacedTensor]) -> tuple[int, int | None]:
    """Return the least that a load stages at once of a file, and the position of the tensor that asks for it."""
    specs = [tensor.tensor.spec for tensor in tensors]
    everything = staged_bytes(None, file.size, has_chunks=file.has_chunks)
    # Without names that tell its tensors apart, a load reads it whole.
    if not file.has_chunks or len({(spec.name, spec.extent.offset) for spec in specs}) < len(specs):
        return everything, None
    frame = framing(specs, file.size)
    alone = staged_bytes(frame, file.size, has_chunks=True)
    most, position = alone, None
    for at, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
        if spec.extent.inline is not None or (first := next(tensor.blocks(), None)) is None:
            continue
        # No part takes more than all of the tensor does, or than its runs of bytes where they lie worst: each ends in
        # another chunk. The first part that takes as much ends the search, as there can be thousands of each of many.
        payload = range(spec.extent.offset, spec.extent.offset + spec.extent.nbytes)
        runs = [(len(run) - 2) // CHUNK_BYTES + 2 for run in byte_ranges(spec, first)]
        bound = min(
            staged_bytes((*frame, payload), file.size, has_chunks=True),
            alone + sum(n_chunks * CHUNK_BYTES + SLACK_BYTES for n_chunks in runs),
        )
        if bound <= most:
            continue
        for block in tensor.blocks():
            needed = staged_bytes((*frame, *byte_ranges(spec, block)), file.size, has_chunks=True)
            if needed > most:
                most, position = needed, at
            if most >= bound:
                break
    return most, position


def _copied(placed: PlacedTensor) -> int:
    """Return what a part takes beside its staged bytes; the parts of a tensor are alike in that."""
    first = next(placed.blocks(), None)
    return 0 if first is None else copied_bytes(placed.tensor.spec, first, placed.tensor.spec.dtype)


def _beyond_budget(needs: Iterable[_Need], least: LeastBudget, memory_budget: int) -> Iterator[Finding]:
    """Yield the files that a load within the budget refuses, with what it would take."""
    for need in needs:
        on_host = need.staged + least.indexes
        total = on_host + least.copies
        if total <= memory_budget:
            continue
        if need.tensor is not None:
            shape = need.tensor.device_shape
            what = f"for the signed chunks that cover a part {shape} of {escape(need.tensor.tensor.name)}"
        elif need.file.has_chunks:
            what = "for this file, which is read at once"
        else:
            what = "for this file, which is read at once, as there are no digests of its chunks"
        beside = f", {least.indexes:,} of them for indexes" if least.indexes else ""
        beside += f", {least.copies:,} of them to put a part together for its device" if least.copies else ""
        hint = f"raise the budget to {least.nbytes} bytes or more"
        if least.copies and on_host <= memory_budget:
            hint += f"; where the devices are the host's own processors, {least.on_host} will do"
        if not need.file.has_chunks:
            hint += "; or sign the file again, which takes digests of its chunks"
        elif need.tensor is not None and need.tensor.is_spread:
            other = "an earlier" if need.tensor.tensor.spec.order == "C" else "a later"
            hint += f"; or cut it along {other} dimension alone, as these parts are spread over the chunks of others"
        message = f"expected a memory budget of {total:,} bytes or more {what}{beside}, found {memory_budget:,}"
        yield Finding("does-not-fit-budget", message, file=need.file.path, hint=hint)


def _place(
    tensor: PlannedTensor, mesh: Mapping[str, int], partition: Partition, findings: list[Finding]
) -> PlacedTensor:
    axes = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in partition]
    used = [axis for entry in axes for axis in entry]
    problem: str | None = None
    hint = "use another mesh, or another rule for it"
    if unknown := [axis for axis in used if axis not in mesh]:
        problem = f"expected axes of the mesh ({', '.join(mesh)}), found {escape(unknown[0])!r}"
    elif len(set(used)) != len(used):
        problem = f"expected each axis at most once, found {_shown(partition)}"
    elif len(axes) > len(tensor.shape):
        problem = f"expected at most one entry for each of {len(tensor.shape)} dimensions, found {_shown(partition)}"
    else:
        cuts = [math.prod(mesh[axis] for axis in entry) for entry in axes] + [1] * (len(tensor.shape) - len(axes))
        for dimension, (length, cut) in enumerate(zip(tensor.shape, cuts, strict=True)):
            if length % cut:
                problem = f"expected dimension {dimension} of {tensor.shape} to divide by {cut}, found {length}"
                break
        else:
            shape = tuple(length // cut for length, cut in zip(tensor.shape, cuts, strict=True))
            return PlacedTensor(tensor, partition, shape)
    findings.append(Finding("does-not-divide", f"{escape(tensor.name)}: {problem}", file=tensor.file, hint=hint))
    return PlacedTensor(tensor, partition, None)


def _shown(partition: Partition) -> str:
    return escape(str(partition))


# ---------------------------------------------------------------- what there is to load


def inventory_of_manifest(manifest: Manifest, *, source: str) -> Inventory:
    """Return what a manifest lists. A plan is no verdict: whether anybody signed it makes no difference here.

    Args:
        manifest: The manifest.
        source: What to call it.
    """
    tensors = tuple(
        _tensor(file.path, file.parameter, spec_of(tensor)) for file in manifest.files for tensor in file.tensors
    )
    files = tuple(
        PlannedFile(
            file.path,
            file.size,
            has_chunks=file.chunks is not None or file.size <= CHUNK_BYTES,
            is_index=file.format == "index",
        )
        for file in manifest.files
    )
    return Inventory(source, tensors, files)


def inventory_of_report(
    report: Report, paths: Sequence[str], *, source: str, parameters: Mapping[str, str]
) -> Inventory:
    """Return what a scan found in a directory; `safeload sign` takes digests of chunks of such files.

    Args:
        report: An accepted report.
        paths: What to call its files, one by one: their paths below the directory.
        source: What to call the directory.
        parameters: Names of the parameters of files that carry none, by path.
    """
    named = tuple(zip(paths, report.files, strict=True))
    tensors = tuple(_tensor(path, parameters.get(path), spec) for path, file in named for spec in file.tensors)
    files = (PlannedFile(p, file.size or 0, has_chunks=True, is_index=file.format == "index") for p, file in named)
    return Inventory(source, tensors, tuple(files))


def _tensor(file: str, parameter: str | None, spec: TensorSpec) -> PlannedTensor:
    whole = "/".join(part for part in (file if parameter is None else parameter, spec.name) if part)
    return PlannedTensor(whole, whole if parameter is None else parameter, file, spec)


# ---------------------------------------------------------------- what a caller says


def parse_mesh(text: str) -> Mapping[str, int]:
    """Return the devices along each axis that `text` states: `1x8` (data, model), `8` (model) or `data=1,model=8`.

    Raises:
        ConfigError: It is no mesh.
    """
    hint = "write for example 1x8, or data=1,model=8"
    parts = [_AXIS.fullmatch(part.strip()) for part in (text.split(",") if "=" in text else text.lower().split("x"))]
    found = [part for part in parts if part is not None]
    names = [part["name"] for part in found if part["name"]] or list(_DEFAULT_AXES.get(len(parts), ()))
    sizes = [int(part["size"]) for part in found]
    if len(found) != len(parts) or len(names) != len(parts) or len(set(names)) != len(names):
        raise ConfigError(f"--mesh: {escape(text)!r} is no mesh", hint=hint)
    if not all(sizes) or math.prod(sizes) > MAX_DEVICES:
        raise ConfigError(f"--mesh: expected 1 to {MAX_DEVICES:,} devices, found {escape(text)}", hint=hint)
    return MappingProxyType(dict(zip(names, sizes, strict=True)))


class _Rule(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    pattern: str | Annotated[list[str], Field(min_length=1)]
    spec: list[str | list[str]]


class _Rules(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: Literal[1]
    rules: Annotated[list[_Rule], Field(min_length=1)]


def read_rules(path: str | Path) -> tuple[tuple[str | tuple[str, ...], Partition], ...]:
    """Return the partition rules of a TOML file, as `compile_rules` takes them.

    Each `[[rules]]` has a `pattern`, which is a regular expression that is found anywhere in the `/`-joined path, or a
    list of them for as many neighboring components; and a `spec` with one entry for each dimension: the name of an
    axis, a list of names, or an empty list for a dimension that is not cut. `version = 1` stands before them.

    Raises:
        ConfigError: The file cannot be read, is no TOML, or says something else.
    """
    what = f"the rules {escape(str(path))}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_RULES_BYTES + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read {what}: {reason(err)}", hint="check the path") from err
    if len(data) > MAX_RULES_BYTES:
        raise ConfigError(f"{what} are longer than {MAX_RULES_BYTES} bytes")
    try:
        read = _Rules.model_validate(tomllib.loads(data.decode("utf-8")))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as err:
        raise ConfigError(f"{what} are no TOML: {escape(str(err))}") from err
    except ValidationError as err:
        problem = err.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        # A `[[rules]]` takes a line for each key, and a hint is one line: this is the same as TOML on two.
        example = '`rules = [{ pattern = "moe/linear/w", spec = [[], "data", "model"] }]`'
        hint = f"write for example `version = 1`, and on the next line {example}"
        raise ConfigError(f"{what}: {escape(place)}: {problem['msg']}", hint=hint) from err
    return tuple(
        (rule.pattern if isinstance(rule.pattern, str) else tuple(rule.pattern), _partition(rule.spec))
        for rule in read.rules
    )


def _partition(spec: Sequence[str | Sequence[str]]) -> Partition:
    return tuple(entry if isinstance(entry, str) else tuple(entry) or None for entry in spec)


def partitions(rules: Iterable[tuple[str | tuple[str, ...], Partition]]) -> Callable[[str], Partition]:
    """Return what finds a tensor's partition by its path; see `compile_rules`, whose errors it raises."""
    return compile_rules(tuple(rules))


def replicated(_path: str) -> Partition:
    """Return the partition of a tensor that every device holds whole."""
    return ()


# ---------------------------------------------------------------- how fast it is


def measure_rates(*, threads: int | None = None, n_bytes: int = _PROBE_BYTES) -> Rates:
    """Return what this machine does now: a probe of some 50 ms, and no promise. Disks and devices are not measured.

    Args:
        threads: How many threads hash; None for as many as this process may use processors.
        n_bytes: Bytes that each thread hashes, and that are copied.
    """
    threads = n_processors() if threads is None else threads
    source = bytearray(n_bytes)
    target = bytearray(n_bytes)  # touched before it is timed: a first touch costs more than the copy
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(_hash, [source] * threads))
        hashing = time.perf_counter() - started
    started = time.perf_counter()
    target[:] = source
    copying = time.perf_counter() - started
    # A clock that did not move says nothing; a nanosecond keeps the division whole.
    return Rates(threads * n_bytes / max(hashing, 1e-9), n_bytes / max(copying, 1e-9), threads)


def _hash(data: bytearray) -> None:
    digest = hashlib.sha256()
    with memoryview(data) as view:
        for start in range(0, len(view), HASH_CHUNK_BYTES):
            digest.update(view[start : start + HASH_CHUNK_BYTES])
