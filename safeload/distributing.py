"""Distribute: what a signed manifest lists becomes global `jax.Array`s; each process reads what its devices hold.

The plan is made from the manifest alone, which says where in its file each tensor lies: which files, and which bytes
of them, this process needs. Then files flow from disk to device a batch at a time: stage, admit, decode, put, release.
The plan decides what is read and nothing else. What a tensor is, and where it goes, is told by the file once it was
verified and admitted; bytes that the plan left out cannot be reached by mistake (see `PartialTensor`).

Where everything fits into memory and the devices are the host's, nothing is copied: the arrays are the staged memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from time import perf_counter
from typing import Any, Final

from safeload import assembling, staging
from safeload.agreeing import Agreement
from safeload.assembling import GlobalArray, Shardings
from safeload.canonical import numpy_dtype
from safeload.decoding import HostTensor, PartialTensor, decode, tensor_path
from safeload.digests import CHUNK_BYTES
from safeload.errors import ConfigError, Finding, PolicyError, ShardingError, StagingError, escape
from safeload.formats.tensorflow import index_file_of
from safeload.manifest import FileEntry, TrustedManifest
from safeload.memory import available_memory, collect_garbage
from safeload.placing import (
    Block,
    Casts,
    Join,
    block_shape,
    byte_ranges,
    copied_bytes,
    framing,
    is_contiguous,
    merged,
    moved,
    n_elements,
    overlap,
    preferred,
    spec_of,
    staged_bytes,
    widened,
)
from safeload.policy import Policy
from safeload.report import Progress
from safeload.scanning import admit
from safeload.staging import StagedCheckpoint
from safeload.tally import Tally
from safeload.tensors import TENSOR_FORMATS, DType, TensorSpec

_RESERVED_SHARE: Final = 4
"""One part in so many of a budget is for pieces of tensors that wait on the host for their other pieces."""

_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Source:
    """One file of a whole: its entry in the manifest, and where its block begins, by the shape of the block."""

    entry: FileEntry
    origin: Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(slots=True)
class _Whole:
    """One entry of the result: a file of tensors, or what several hosts wrote, block by block.

    Attributes:
        path: What it is called in the result.
        label: What its tensors' paths begin with where rules are asked.
        sources: The files, of which the first gives the structure.
        is_joined: Whether there may be several files.
        shardings: What stands for it.
        arrays: What becomes of each tensor whose place the name alone tells, by name and offset.
        is_told: Whether that is so of all of them; if not, files are read whole.
        tree: The result, as soon as a file of it was decoded, with `GlobalArray`s as leaves.
    """

    path: str
    label: str
    sources: list[_Source]
    is_joined: bool
    shardings: Shardings
    arrays: dict[_Key, GlobalArray] = field(default_factory=dict)
    is_told: bool = True
    tree: Any = None
    has_tree: bool = False

    def key(self, name: str, offset: int) -> _Key:
        """Return what a tensor goes by: blocks of one tensor may lie at different offsets."""
        return name, 0 if self.is_joined else offset


@dataclass(frozen=True, slots=True)
class _Shard:
    """A block of a tensor that a device of this process needs, as far as one file has it.

    Attributes:
        key: The tensor.
        block: The block, in the whole tensor.
        spec: What the file holds of the tensor.
        own: What of the block is in the file, in indices of the file's own part.
        ranges: The bytes of the file that this lies in.
    """

    key: _Key
    block: Block
    spec: TensorSpec
    own: Block
    ranges: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class _Need:
    """What has to be in memory at once of a file: bytes, and the shard that takes them; None for no single one."""

    path: str
    nbytes: int
    shard: _Shard | None = None


@dataclass(frozen=True, slots=True)
class _Round:
    """One pass over some files, in memory of its own.

    Attributes:
        wanted: What to read.
        only: For files that do not fit at once, the blocks that this pass is for, by the tensor's key.
        reserve: Bytes of the budget that are kept free for pieces that wait for others.
    """

    wanted: Mapping[str, tuple[range, ...] | None]
    only: Mapping[str, Mapping[_Key, Collection[Block]]]
    reserve: int = 0


def distribute(
    directory: str | Path,
    trusted: TrustedManifest,
    *,
    policy: Policy,
    memory_budget: int | None,
    place: Shardings,
    joins: Sequence[Join],
    casts: Casts,
    agreement: Agreement,
    tally: Tally,
    progress: Progress | None,
    ignore: Mapping[str, bytes],
) -> Mapping[str, Any]:
    """Return what each file of tensors, and each join of several, holds, with each tensor as a global `jax.Array`.

    Args:
        directory: Where the files are.
        trusted: The verified manifest.
        policy: What may be in the files.
        memory_budget: Most bytes of staged memory and of copies on the host; None for what is available.
        place: Where the tensors go: see `assembling.Shardings`.
        joins: Which files are blocks of one tensor.
        casts: What is cast.
        agreement: The load that all processes of the job do together.
        tally: Counts what it took.
        progress: Told of the phase "staging".
        ignore: Files that may lie in the directory unlisted, with exactly these bytes.

    Raises:
        RejectedError: As `staging.stream` and `scanning.admit`; or, as a PolicyError, the blocks of a join are not
            there, or do not fit together.
        StagingError: The memory is not enough for the signed chunks that cover a shard of a tensor, or a file could
            not be read.
        ShardingError: A tensor does not fit its sharding.
        ConfigError: The joins contradict each other.
    """
    started = perf_counter()
    plan = _Plan(trusted, place, joins, casts)
    agreement.claim("manifest", trusted.sha256)
    agreement.claim("set of tensors", plan.digest())
    limit = available_memory() if memory_budget is None else memory_budget
    is_aliasing = plan.fits_as_it_is(limit)
    if memory_budget is None and not is_aliasing:
        # What the arrays take of the host's memory is not there to stage in.
        if limit <= plan.result_bytes:
            raise StagingError(
                f"the arrays take {plan.result_bytes:,} bytes of the host's memory, and {limit:,} are available",
                hint="free memory, load on more hosts, or cast to a smaller dtype",
            )
        limit -= plan.result_bytes
    watched = agreement.watching(progress)
    plan.make_owned(not is_aliasing)
    rounds = [_Round(plan.wanted, {})] if is_aliasing else list(plan.rounds(limit))
    tally.spend("plan", started)
    try:
        if is_aliasing and plan.is_everything:
            started = perf_counter()
            staged = staging.stage(directory, trusted, memory_budget=memory_budget, progress=watched, ignore=ignore)
            tally.spend("stage", started)
            plan.feed(staged, {}, policy, tally)
        else:
            for one in rounds:
                budget = None if memory_budget is None and is_aliasing else limit - plan.copies - one.reserve
                plan.run(
                    one,
                    directory,
                    policy=policy,
                    budget=budget,
                    tally=tally,
                    progress=watched,
                    ignore=ignore,
                )
                # A parser's exception and its frames can hold each other, and so what they looked at, beyond this pass.
                collect_garbage()
        if agreement.n_processes > 1:
            # Only now: where names do not tell, a tensor's sharding is known once its file was read.
            agreement.claim("set of shardings", plan.layout_digest())
        started = perf_counter()
        result = {whole.path: assembling.finish(whole.tree) for whole in plan.wholes}
        tally.spend("assemble", started)
    except BaseException:
        # A traceback keeps what its frames can see: nothing of a refused checkpoint is to be had from there.
        plan.drop()
        raise
    return result


class _Plan:
    """Who needs what, from the manifest alone; then the arrays as they come about."""

    def __init__(self, trusted: TrustedManifest, place: Shardings, joins: Sequence[Join], casts: Casts) -> None:
        self._trusted = trusted
        self._entries = trusted.manifest.by_path
        self._casts = casts
        self._is_by_parameter = getattr(place, "by_parameter", False)
        self._joined = _joined_files(joins)
        self._sources: dict[str, tuple[_Whole, _Source]] = {}
        self._owned = False
        self.wholes = list(self._find_wholes(joins))
        below = assembling.shardings_of_files(place, [whole.path for whole in self.wholes])
        for whole in self.wholes:
            whole.shardings = below[whole.path]
            self._plan_arrays(whole)
        self.wanted: dict[str, tuple[range, ...] | None] = dict(self._find_wanted())
        # The data of a bundle are read by its index, in each pass.
        self._index_of = dict(self._find_indexes())
        # Of every kind: `staging.stream` keeps each index that it is asked for beside what it stages.
        index_bytes = sum(entry.size for entry in self._entries.values() if entry.format == "index")
        self.copies = max((self._copy_bytes(whole) for whole in self.wholes), default=0)
        self._beside = self.copies + index_bytes

    # ---------------------------------------------------------------- who needs what

    @property
    def is_everything(self) -> bool:
        """Whether every byte of every file is needed."""
        return self.wanted.keys() == self._entries.keys() and all(ranges is None for ranges in self.wanted.values())

    @property
    def result_bytes(self) -> int:
        """Bytes of the arrays that this process will have in the host's memory."""
        return sum(_result_bytes(whole) for whole in self.wholes)

    def digest(self) -> str:
        """Return a digest of what every process has to agree on: names, shapes and dtypes."""
        listed = [
            [whole.path, name, offset, array.shape, array.dtype.name]
            for whole in self.wholes
            for (name, offset), array in whole.arrays.items()
        ]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def layout_digest(self) -> str:
        """Return a digest of what lies on which device: two processes that differ there make arrays of two meanings."""
        listed = [
            [whole.path, name, offset, array.layout]
            for whole in self.wholes
            for (name, offset), array in sorted(whole.arrays.items())
        ]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def fits_as_it_is(self, limit: int) -> bool:
        """Whether to keep everything that is staged, as the arrays: it fits, and the devices use the host's memory."""
        arrays = [array for whole in self.wholes for array in whole.arrays.values()]
        if not all(array.is_on_host for array in arrays):
            return False
        needed = sum(self._needed_bytes(path, ranges) for path, ranges in self.wanted.items())
        # Files that are streamed do not fill the memory that they are staged in: half of it, or the last part, is lost.
        return (needed if self.is_everything else 4 * needed) <= limit

    def rounds(self, limit: int) -> Iterator[_Round]:
        """Yield the passes over the files, so that each fits the limit.

        Raises:
            StagingError: A part of a file that is needed at once does not fit.
        """
        room = limit - self._beside
        together: dict[str, tuple[range, ...] | None] = {}
        waiting: list[tuple[_Whole, int]] = []
        large: list[str] = []
        for path, ranges in self.wanted.items():
            whole = self._sources[path][0] if path in self._sources else None
            if whole is not None and (pending := _pending_bytes(whole)):
                if all(whole is not other for other, _ in waiting):
                    waiting.append((whole, pending))
            elif self._needed_bytes(path, ranges) > room:
                large.append(path)
            else:
                together[path] = ranges
        self._require_room(large, room, 0)
        if together:
            yield _Round(together, {})
        for group, reserve in _grouped(waiting, max(1, room // _RESERVED_SHARE)):
            paths = (source.entry.path for whole in group for source in whole.sources)
            files = [path for path in paths if path in self.wanted]
            fitting = [path for path in files if self._needed_bytes(path, self.wanted[path]) <= room - reserve]
            others = [path for path in files if path not in fitting]
            self._require_room(others, room - reserve, reserve)
            if fitting:
                yield _Round({path: self.wanted[path] for path in fitting}, {}, reserve)
            for path in others:
                yield from self._split(path, room - reserve, reserve)
        for path in large:
            yield from self._split(path, room, 0)

    def _require_room(self, paths: Sequence[str], room: int, reserve: int) -> None:
        """Refuse files that do not fit shard by shard either; what is said is enough for all of them."""
        needs = [need for path in paths for need in self._least(path)]
        most = max(needs, key=lambda need: need.nbytes, default=None)
        if most is None or most.nbytes <= room:
            return
        entry = self._entries[most.path]
        there = f"at once, and there are {max(0, room):,} for it"
        hint = f"give a memory budget of {most.nbytes + reserve + self._beside:,} bytes"
        if most.shard is None:
            if entry.tensors and entry.chunks is None and entry.size > CHUNK_BYTES:
                hint += "; or have it signed with digests of its chunks"
            raise StagingError(f"{escape(most.path)} takes {most.nbytes:,} bytes {there}", hint=hint)
        shard = most.shard
        if shard.spec.strides is None and not is_contiguous(shard.spec, shard.own):
            other = "an earlier" if shard.spec.order == "C" else "a later"
            hint += f"; or cut it along {other} dimension alone, as this part is spread over the chunks of others"
        raise StagingError(
            f"{escape(tensor_path(most.path, shard.key[0]))}: the signed chunks that cover a shard of shape "
            f"{block_shape(shard.block)} take {most.nbytes:,} bytes {there}",
            hint=hint,
        )

    def _least(self, path: str) -> Iterator[_Need]:
        """Yield what of a file has to be in memory at once, however small the passes over it are."""
        if path not in self._sources:
            yield _Need(path, self._needed_bytes(path, None))
            return
        whole, source = self._sources[path]
        if source.entry.chunks is None or not whole.is_told:
            yield _Need(path, self._needed_bytes(path, self.wanted[path]))
            return
        frame = framing(map(spec_of, source.entry.tensors), source.entry.size)
        yield _Need(path, self._needed_bytes(path, frame))
        for shard in self._shards(whole, source):
            yield _Need(path, self._needed_bytes(path, (*frame, *shard.ranges)), shard)

    def _split(self, path: str, room: int, reserve: int) -> Iterator[_Round]:
        """Yield passes over one file that fits shard by shard, each for some shards of its tensors."""
        whole, source = self._sources[path]
        frame = framing(map(spec_of, source.entry.tensors), source.entry.size)
        some: dict[_Key, list[Block]] = {}
        ranges: tuple[range, ...] = frame
        for shard in self._shards(whole, source):
            more = merged((*ranges, *shard.ranges))
            if self._needed_bytes(path, more) > room:
                yield _Round({path: ranges}, {path: some}, reserve)
                some, more = {}, merged((*frame, *shard.ranges))
            some.setdefault(shard.key, []).append(shard.block)
            ranges = more
        yield _Round({path: ranges}, {path: some}, reserve)

    def _shards(self, whole: _Whole, source: _Source) -> Iterator[_Shard]:
        """Yield each block that is needed of a file's tensors, with the bytes that it lies in."""
        for tensor in source.entry.tensors:
            spec = spec_of(tensor)
            key = whole.key(tensor.name, tensor.offset)
            origin = source.origin(spec.shape)
            region = tuple(range(at, at + n) for at, n in zip(origin, spec.shape, strict=True))
            for block in whole.arrays[key].needed:
                common = overlap(block, region)
                if common is not None:
                    own = moved(common, origin)
                    yield _Shard(key, block, spec, own, byte_ranges(spec, own))
                elif not n_elements(block):
                    yield _Shard(key, block, spec, moved(block, origin), ())

    def _needed_bytes(self, path: str, ranges: tuple[range, ...] | None) -> int:
        entry = self._entries[path]
        return staged_bytes(ranges, entry.size, has_chunks=entry.chunks is not None)

    def _copy_bytes(self, whole: _Whole) -> int:
        """Return the most that a shard takes on the host beside its staged bytes, on its way to a device."""
        most = 0
        for source in whole.sources:
            for tensor in source.entry.tensors:
                array = whole.arrays.get(whole.key(tensor.name, tensor.offset))
                if array is None or array.is_on_host:
                    # What is copied there is the array.
                    continue
                spec = spec_of(tensor)
                origin = source.origin(spec.shape)
                region = tuple(range(at, at + n) for at, n in zip(origin, spec.shape, strict=True))
                for block in array.needed:
                    # One that takes pieces of several files is in `_pending_bytes`.
                    if overlap(block, region) == block:
                        most = max(most, copied_bytes(spec, moved(block, origin), DType(array.dtype.name)))
        return most

    # ---------------------------------------------------------------- the plan itself

    def _find_wholes(self, joins: Sequence[Join]) -> Iterator[_Whole]:
        done: set[str] = set()
        for entry in self._trusted.manifest.files:
            if entry.format not in TENSOR_FORMATS:
                continue
            join = self._joined.get(entry.path)
            if join is None:
                label = entry.parameter if self._is_by_parameter and entry.parameter else entry.path
                source = _Source(entry, lambda shape: (0,) * len(shape))
                whole = _Whole(entry.path, label, [source], is_joined=False, shardings=None)
            elif join.path in done:
                continue
            else:
                done.add(join.path)
                whole = self._join(join)
            for source in whole.sources:
                self._sources[source.entry.path] = whole, source
            yield whole
        if missing := [join for join in joins if join.path not in done]:
            file = next(iter(missing[0].files), missing[0].path)
            raise PolicyError(_block_finding("missing-block", file, "a file of tensors in the manifest", "none"))
        paths = [entry.path for entry in self._trusted.manifest.files if entry.path not in self._joined]
        if clash := [join.path for join in joins if join.path in paths]:
            raise ConfigError(f"joins: expected names of their own, found {escape(clash[0])}, which is a file")

    def _join(self, join: Join) -> _Whole:
        findings = list(_check_join(join, self._entries))
        if findings:
            raise PolicyError(*findings)
        n_processes = assembling.process_count()
        own = assembling.process_index() if len(join.files) == n_processes else None
        sources = [_Source(self._entries[file], partial(join.origin, file)) for file in preferred(join, own)]
        return _Whole(join.path, join.path, sources, is_joined=True, shardings=None)

    def _plan_arrays(self, whole: _Whole) -> None:
        join = self._joined.get(whole.sources[0].entry.path)
        for tensor in whole.sources[0].entry.tensors:
            found = assembling.sharding_by_name(whole.shardings, tensor.name)
            key = whole.key(tensor.name, tensor.offset)
            if found is None or key in whole.arrays:
                whole.is_told = False
                if whole.is_joined:
                    name = escape(tensor.name)
                    raise ShardingError(f"{escape(whole.path)}: expected one tensor to be called {name!r}, found two")
                continue
            shape = tensor.shape if join is None else join.shape(tensor.shape)
            whole.arrays[key] = self._array(whole, tensor.name, spec_of(tensor).dtype, shape, found[0])

    def _array(self, whole: _Whole, name: str, stored: DType, shape: tuple[int, ...], place: Shardings) -> GlobalArray:
        path = tensor_path(whole.label, name)
        dtype = self._casts.dtype(path, stored)
        return GlobalArray(path, shape, numpy_dtype(dtype), assembling.ask(place, path, shape), owned=self._owned)

    def _find_wanted(self) -> Iterator[tuple[str, tuple[range, ...] | None]]:
        for path, entry in self._entries.items():
            if path not in self._sources:
                if path not in self._joined:
                    yield path, None
                continue
            whole, source = self._sources[path]
            if not whole.is_told or entry.chunks is None:
                # Blocks of other hosts are read if a part of them is needed here.
                if source is whole.sources[0] or any(True for _ in self._shards(whole, source)):
                    yield path, None
                continue
            shards = list(self._shards(whole, source))
            if not shards and source is not whole.sources[0]:
                continue
            frame = framing(map(spec_of, entry.tensors), entry.size)
            ranges = merged((*frame, *(part for shard in shards for part in shard.ranges)))
            is_whole = widened(ranges, entry.size, has_chunks=True) == entry.size
            yield path, None if is_whole else ranges

    def _find_indexes(self) -> Iterator[tuple[str, str]]:
        """Yield each data file of a bundle with its index, both by path; a scan says where there is none."""
        for path, entry in self._entries.items():
            name = index_file_of(PurePosixPath(path).name) if entry.format == "tensorflow" else None
            index = name and str(PurePosixPath(path).with_name(name))
            if index and index in self._entries:
                yield path, index

    # ---------------------------------------------------------------- the load

    def make_owned(self, owned: bool) -> None:  # noqa: FBT001 - said once, to all arrays
        """Decide whether arrays own their memory; before the first of them is made."""
        self._owned = owned
        for whole in self.wholes:
            for array in whole.arrays.values():
                array.owned = owned

    def run(
        self,
        one: _Round,
        directory: str | Path,
        *,
        policy: Policy,
        budget: int | None,
        tally: Tally,
        progress: Progress | None,
        ignore: Mapping[str, bytes],
    ) -> None:
        """Do one pass."""
        indexes = {index: None for path, index in self._index_of.items() if path in one.wanted}
        with staging.stream(
            directory,
            self._trusted,
            wanted={**indexes, **one.wanted},
            memory_budget=budget,
            progress=progress,
            ignore=ignore,
            absent=lambda path: path not in self.wanted,
        ) as batches:
            started = perf_counter()
            for staged in batches:
                tally.spend("stage", started)
                self.feed(staged, one.only, policy, tally)
                started = perf_counter()

    def feed(
        self,
        staged: StagedCheckpoint,
        only: Mapping[str, Mapping[_Key, Collection[Block]]],
        policy: Policy,
        tally: Tally,
    ) -> None:
        """Admit a batch, and put what is needed of it on the devices."""
        started = perf_counter()
        tally.count(staged)
        admitted = admit(staged, policy=policy)
        started = tally.spend("scan", started)
        touched: list[GlobalArray] = []
        for path, value in decode(admitted).items():
            whole, source = self._sources[path]
            if not whole.has_tree:
                make = partial(self._leaf, whole)
                whole.tree = assembling.walk(value, whole.shardings, make, where=f"the tree/{escape(path)}")
                whole.has_tree = True
            blocks = only.get(path)
            for tensor in assembling.host_leaves(value):
                key = whole.key(tensor.spec.name, tensor.spec.extent.offset)
                array = whole.arrays[key]
                if blocks is None or key in blocks:
                    array.take(tensor, source.origin(tensor.spec.shape), only=None if blocks is None else blocks[key])
                    touched.append(array)
        for array in touched:
            array.wait()
        tally.spend("assemble", started)

    def _leaf(self, whole: _Whole, tensor: HostTensor | PartialTensor, place: Shardings) -> GlobalArray:
        """Return what becomes of a tensor: what was planned, or what its place in the file says if names did not."""
        spec = tensor.spec
        key = whole.key(spec.name, spec.extent.offset)
        if key not in whole.arrays:
            whole.arrays[key] = self._array(whole, spec.name, spec.dtype, spec.shape, place)
        return whole.arrays[key]

    def drop(self) -> None:
        """Let go of all arrays."""
        for whole in self.wholes:
            whole.tree = None
            whole.arrays.clear()


# ---------------------------------------------------------------- joins


def _joined_files(joins: Sequence[Join]) -> dict[str, Join]:
    found: dict[str, Join] = {}
    for join in joins:
        for file in join.files:
            if file in found:
                both = f"{escape(found[file].path)} and {escape(join.path)}"
                raise ConfigError(f"joins: {escape(file)} is a block of {both}")
            found[file] = join
    if len({join.path for join in joins}) != len(joins):
        raise ConfigError("joins: expected a name of its own for each")
    return found


def _check_join(join: Join, entries: Mapping[str, FileEntry]) -> Iterator[Finding]:
    """Yield every way in which the blocks that the manifest lists do not make one whole."""
    first: FileEntry | None = None
    at: dict[tuple[int, ...], FileEntry] = {}
    for file, coordinates in join.files.items():
        entry = entries.get(file)
        if entry is None or entry.format not in TENSOR_FORMATS:
            yield _block_finding("missing-block", file, f"a block of {join.path}", "no such file of tensors")
            continue
        first = first or entry
        if _table(entry) != _table(first):
            yield _block_finding("blocks-differ", file, f"tensors as in {first.path}", "other names, dtypes or shapes")
        twin = at.setdefault(coordinates, entry)
        if [t.sha256 for t in twin.tensors] != [t.sha256 for t in entry.tensors]:
            yield _block_finding("replicas-differ", file, f"the values of {twin.path}, which is its replica", "others")
    cells = 1
    for count in join.grid:
        cells *= count
    inside = {c for c in at if len(c) == len(join.grid) and all(0 <= i < n for i, n in zip(c, join.grid, strict=True))}
    if first is not None and (len(inside) != cells or len(at) != cells):
        yield _block_finding("blocks-differ", first.path, f"{cells} blocks that tile {join.path}", f"{len(at)}")


def _table(entry: FileEntry) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in entry.tensors]


def _block_finding(code: str, file: str, expected: str, found: str) -> Finding:
    hint = "sign all blocks of one save, each host's, in one directory"
    return Finding(code, f"expected {escape(expected)}, found {escape(found)}", file=file, hint=hint)


def _grouped(waiting: Sequence[tuple[_Whole, int]], room: int) -> Iterator[tuple[list[_Whole], int]]:
    """Put together what can wait on the host at one time."""
    group: list[_Whole] = []
    reserve = 0
    for whole, pending in waiting:
        if group and reserve + pending > room:
            yield group, reserve
            group, reserve = [], 0
        group.append(whole)
        reserve += pending
    if group:
        yield group, reserve


def _pending_bytes(whole: _Whole) -> int:
    """Return how many bytes of shards wait on the host for pieces from several files, on their way to a device."""
    if len(whole.sources) == 1:
        return 0
    total = 0
    for tensor in whole.sources[0].entry.tensors:
        array = whole.arrays[whole.key(tensor.name, tensor.offset)]
        for block in array.needed:
            sides = zip(block, tensor.shape, strict=True)
            straddles = n_elements(block) and any(side.start // n != (side.stop - 1) // n for side, n in sides)
            if straddles and not array.is_on_host:
                total += n_elements(block) * array.dtype.itemsize
    return total


def _result_bytes(whole: _Whole) -> int:
    """Return how many bytes of arrays this process will have in the host's memory."""
    return sum(
        n_elements(block) * array.dtype.itemsize
        for array in whole.arrays.values()
        if array.is_on_host
        for block in array.needed
    )
