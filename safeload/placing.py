"""Place: which part of a tensor goes where, as data. Partition rules, blocks of several hosts, and bytes of a file.

Nothing here knows JAX or opens a file: a part of a tensor is a `Block`, and all there is to say of one is arithmetic.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from safeload.digests import CHUNK_BYTES
from safeload.errors import ConfigError, ShardingError, escape
from safeload.formats import WINDOW_BYTES
from safeload.tensors import DTYPE_ITEMSIZE, DType, Extent, TensorSpec

if TYPE_CHECKING:
    from safeload.manifest import ManifestTensor

Block: TypeAlias = tuple[range, ...]
"""A part of a tensor: the indices that it has of each dimension, step 1."""

Pattern: TypeAlias = str | Sequence[str]
"""What a rule goes by. A string is a regular expression that is found anywhere in the `/`-joined path. A sequence of
strings stands for as many neighboring components of the path, each of which its expression matches in full: the form
of Grok-1's published rules."""


# ---------------------------------------------------------------- rules


def compile_rules(rules: Sequence[tuple[Pattern, Any]]) -> Callable[[str], Any]:
    """Return what finds the first rule that a path matches, and returns what that rule says.

    Args:
        rules: Pairs of a pattern and whatever it stands for; the first match counts.

    Raises:
        ConfigError: A pattern is none, or is no regular expression.
    """
    compiled = [(_compile(pattern), meaning) for pattern, meaning in rules]

    def find(path: str) -> Any:
        for matches, meaning in compiled:
            if matches(path):
                return meaning
        raise ShardingError(
            f"{escape(path)}: no partition rule matches",
            hint="add a rule for it; a last one with the pattern '' and an empty spec (`spec = []` in TOML, "
            "`PartitionSpec()` in Python) replicates all that is left",
        )

    return find


def _compile(pattern: Pattern) -> Callable[[str], bool]:
    texts = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"expected a pattern, or one for each component of a path, found {escape(repr(pattern))}")
    try:
        expressions = [re.compile(text) for text in texts]
    except re.error as err:
        raise ConfigError(
            f"a partition rule's pattern {escape(repr(pattern))} is no regular expression: {escape(str(err))}",
            hint="write it as Python's `re` reads it",
        ) from err
    if isinstance(pattern, str):
        (anywhere,) = expressions
        return lambda path: anywhere.search(path) is not None
    return lambda path: _has_window(expressions, path.split("/"))


def _has_window(expressions: Sequence[re.Pattern[str]], components: Sequence[str]) -> bool:
    starts = range(len(components) - len(expressions) + 1)
    return any(all(e.fullmatch(c) for e, c in zip(expressions, components[start:], strict=False)) for start in starts)


# ---------------------------------------------------------------- blocks


def whole(shape: Sequence[int]) -> Block:
    """Return the block that is all of a tensor."""
    return tuple(range(length) for length in shape)


def block_of(index: Sequence[slice], shape: Sequence[int]) -> Block:
    """Return the block that slices take of a tensor, as `jax.sharding.Sharding` hands them out."""
    return tuple(range(*part.indices(length)) for part, length in zip(index, shape, strict=True))


def block_shape(block: Block) -> tuple[int, ...]:
    """Return the length of each dimension of a block."""
    return tuple(map(len, block))


def n_elements(block: Block) -> int:
    """Return how many elements a block has."""
    return math.prod(map(len, block))


def overlap(one: Block, other: Block) -> Block | None:
    """Return what two blocks of one tensor have in common; None for nothing."""
    common = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return common if all(map(len, common)) else None


def within(block: Block, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that take a block out of an array whose first element is at `origin`."""
    return tuple(slice(part.start - start, part.stop - start) for part, start in zip(block, origin, strict=True))


def moved(block: Block, origin: Sequence[int]) -> Block:
    """Return a block as seen from `origin`."""
    return tuple(range(part.start - start, part.stop - start) for part, start in zip(block, origin, strict=True))


# ---------------------------------------------------------------- bytes

_EDGE_BYTES: Final = 64
"""How much of both ends of a file is looked at to tell its format."""

SLACK_BYTES: Final = 3 * mmap.PAGESIZE
"""What a run of a file's bytes can take in memory beyond its length: it is aligned, and begins and ends with a page."""


def spec_of(tensor: ManifestTensor) -> TensorSpec:
    """Return a row of the manifest as a row of the table; of inline bytes it is not known what they are."""
    dtype = DType(tensor.dtype, big_endian=tensor.byteorder == "big")
    extent = Extent(tensor.offset, tensor.nbytes, b"" if tensor.inline else None)
    return TensorSpec(tensor.name, dtype, tensor.shape, tensor.order, extent, strides=tensor.strides)


def byte_ranges(spec: TensorSpec, block: Block, *, gap: int = CHUNK_BYTES) -> tuple[range, ...]:
    """Return the bytes of its file that a block of a tensor lies in, in order, apart by at least `gap` bytes.

    Files are verified by chunks, so that less than a chunk between two ranges is read anyway. What is cut by columns
    comes out as one range from its first byte to its last.

    Args:
        spec: The tensor. Of an inline one there are no bytes to take a part of.
        block: The part.
        gap: Fewest bytes that are worth leaving out.
    """
    extent = spec.extent
    if extent.inline is not None or not n_elements(block):
        return ()
    if spec.strides is not None:
        return (range(extent.offset, extent.offset + extent.nbytes),)
    sizes = spec.shape if spec.order == "C" else spec.shape[::-1]
    parts = block if spec.order == "C" else block[::-1]
    itemsize = spec.dtype.itemsize
    steps = [math.prod(sizes[dim + 1 :]) * itemsize for dim in range(len(sizes))]
    # From the innermost dimension outwards: as long as what it leaves out is short, it is taken together.
    low, high, split = 0, itemsize, len(sizes)
    while split and steps[split - 1] - (high - low) < gap:
        split -= 1
        low += parts[split].start * steps[split]
        high += (parts[split].stop - 1) * steps[split]
    outer = product(*parts[:split])
    starts = (extent.offset + sum(i * step for i, step in zip(at, steps, strict=False)) for at in outer)
    return merged((range(start + low, start + high) for start in starts), gap=gap)


def is_contiguous(spec: TensorSpec, block: Block) -> bool:
    """Whether the elements of a block lie in the file one behind the other."""
    if spec.strides is not None:
        return False
    dims = list(zip(block, spec.shape, strict=True))
    if spec.order == "F":
        dims.reverse()
    first = next((dim for dim, (part, _) in enumerate(dims) if len(part) > 1), len(dims))
    return all(len(part) == length for part, length in dims[first + 1 :])


def copied_bytes(spec: TensorSpec, block: Block, dtype: DType) -> int:
    """Return what a block takes on the host beside its staged bytes on its way to a device with memory of its own.

    Args:
        spec: The tensor.
        block: The part.
        dtype: What it becomes there. What is no native array of it in the file is put together first.
    """
    is_there = spec.is_canonical and dtype.name == spec.dtype.name and is_contiguous(spec, block)
    return 0 if is_there else n_elements(block) * dtype.itemsize


def merged(ranges: Iterable[range], *, gap: int = 1) -> tuple[range, ...]:
    """Return ranges in order, those joined that overlap, touch, or are less than `gap` bytes apart."""
    found: list[range] = []
    for part in sorted((part for part in ranges if part), key=lambda part: part.start):
        if found and part.start - found[-1].stop < gap:
            found[-1] = range(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return tuple(found)


def framing(specs: Iterable[TensorSpec], size: int) -> tuple[range, ...]:
    """Return the bytes of a file that its parser looks at: all that is no payload, and some more.

    A parser asks for a window at a time, which may reach into a payload, and looks at the first and the last bytes to
    tell the format.

    Args:
        specs: The file's table of tensors.
        size: Its length in bytes.
    """
    payloads = merged(
        range(spec.extent.offset, spec.extent.offset + spec.extent.nbytes)
        for spec in specs
        if spec.extent.inline is None
    )
    edges = [range(min(size, _EDGE_BYTES)), range(max(0, size - _EDGE_BYTES), size)]
    position = 0
    for payload in (*payloads, range(size, size)):
        edges.append(range(position, min(size, payload.start + WINDOW_BYTES)) if payload.start > position else range(0))
        position = payload.stop
    return merged(edges)


def widened(ranges: Sequence[range], size: int, *, has_chunks: bool) -> int:
    """Return how many bytes of a file are read so that the ranges of it can be verified.

    Args:
        ranges: What is needed, in order.
        size: The file's length.
        has_chunks: Whether the manifest has digests of its chunks; without, a file is verified whole.
    """
    if not has_chunks:
        return size
    chunks = {chunk for part in ranges for chunk in range(part.start // CHUNK_BYTES, -(-part.stop // CHUNK_BYTES))}
    return sum(min(size, (chunk + 1) * CHUNK_BYTES) - chunk * CHUNK_BYTES for chunk in chunks)


def staged_bytes(ranges: Iterable[range] | None, size: int, *, has_chunks: bool) -> int:
    """Return how much memory it takes to stage a file, or what covers ranges of it: whole chunks, on whole pages.

    More ranges never take less. A load goes by this number, and so does a plan of one.

    Args:
        ranges: What is needed, in any order; None for all.
        size: The file's length.
        has_chunks: Whether the manifest has digests of its chunks; without, a file is staged whole.
    """
    if ranges is None or not has_chunks:
        return size + SLACK_BYTES
    chunks = (
        range(part.start // CHUNK_BYTES * CHUNK_BYTES, min(size, -(-part.stop // CHUNK_BYTES) * CHUNK_BYTES))
        for part in ranges
    )
    runs = merged(chunks)
    return sum(map(len, runs)) + len(runs) * SLACK_BYTES


# ---------------------------------------------------------------- tensors that several hosts wrote


@dataclass(frozen=True, slots=True)
class Join:
    """How the files that several hosts wrote, each with its block, make one global tensor, or one record of them.

    Attributes:
        path: What the whole is called in the result.
        files: Coordinates in the grid of blocks by the file's path. Files with equal coordinates are replicas, and the
            reader takes the first that it prefers.
        grid: Number of blocks along each leading dimension; dimensions beyond it are whole in each block.
    """

    path: str
    files: Mapping[str, tuple[int, ...]]
    grid: tuple[int, ...]

    def origin(self, file: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return where the block of a file, of this shape, begins in the whole."""
        at = self.files[file]
        return tuple((at[dim] if dim < len(at) else 0) * length for dim, length in enumerate(shape))

    def shape(self, block: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole, of blocks of this shape.

        Raises:
            ShardingError: A block has fewer dimensions than are cut.
        """
        if len(block) < len(self.grid):
            raise ShardingError(
                f"{escape(self.path)}: expected blocks of {len(self.grid)} dimensions or more, found {tuple(block)}"
            )
        return tuple(length * count for length, count in zip(block, self._counts(len(block)), strict=True))

    def _counts(self, rank: int) -> tuple[int, ...]:
        return (*self.grid, *(1,) * (rank - len(self.grid)))


def join_blocks(
    path: str,
    files: Sequence[str],
    partition: Sequence[str | Sequence[str] | None] | None,
    *,
    hosts: Mapping[str, int],
    local: Mapping[str, int],
) -> Join:
    """Return how blocks make one tensor: one file of each process that saved, in the processes' order.

    The mesh of a job over several hosts is a grid of the hosts' own meshes, with the hosts numbered along its last
    axis first (`jax.experimental.mesh_utils.create_hybrid_device_mesh` with processes as granules). A host holds, and
    saves, what its devices hold.

    Args:
        path: What the tensor is called.
        files: Paths in the manifest.
        partition: Mesh axes of each dimension, as in a `PartitionSpec`; None for a replicated tensor.
        hosts: Hosts along each axis of the mesh, in the mesh's order: Grok-1's `between_hosts_config`.
        local: Devices of one host along each axis: its `local_mesh_config`.

    Raises:
        ShardingError: There is not one file for each host, the partition names no axis of the mesh, or the blocks of
            the hosts are no grid: a dimension that is cut along two axes is one only if a host has one device along
            the first, or all of the second.
    """
    n_hosts = math.prod(hosts.values())
    if len(files) != n_hosts:
        raise ShardingError(f"{escape(path)}: expected one block of each of {n_hosts} hosts, found {len(files)}")
    axes = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in partition or ()]
    for axis in (axis for entry in axes for axis in entry):
        if axis not in hosts or axis not in local:
            known = ", ".join(hosts)
            raise ShardingError(f"{escape(path)}: expected axes of the mesh ({escape(known)}), found {escape(axis)!r}")
    for entry in axes:
        _require_grid(path, entry, hosts, local)
    grid = tuple(math.prod(hosts[axis] for axis in entry) for entry in axes)
    coordinates: dict[str, tuple[int, ...]] = {}
    for file, at in zip(files, product(*map(range, hosts.values())), strict=True):
        place = dict(zip(hosts, at, strict=True))
        coordinates[file] = tuple(_combined(entry, place, hosts) for entry in axes)
    return Join(path, coordinates, grid)


def _require_grid(path: str, entry: Sequence[str], hosts: Mapping[str, int], local: Mapping[str, int]) -> None:
    for position, axis in enumerate(entry):
        split = [earlier for earlier in entry[:position] if local[earlier] > 1]
        if hosts[axis] > 1 and split:
            raise ShardingError(
                f"{escape(path)}: the blocks of the hosts do not tile it: along {escape(split[0])} a host has "
                f"{local[split[0]]} devices, and {escape(axis)}, which comes after it, goes over {hosts[axis]} hosts",
                hint="save it with a mesh that cuts each dimension between hosts first",
            )


def _combined(entry: Sequence[str], place: Mapping[str, int], hosts: Mapping[str, int]) -> int:
    number = 0
    for axis in entry:
        number = number * hosts[axis] + place[axis]
    return number


def preferred(join: Join, own: int | None) -> Iterator[str]:
    """Yield one file for each block of a whole: that of this process where there is a choice, else the first.

    Args:
        join: The whole.
        own: Position of this process's file in it, None where other processes saved it.
    """
    files = list(join.files)
    order = files if own is None or own >= len(files) else [files[own], *files]
    seen: set[tuple[int, ...]] = set()
    for file in order:
        if join.files[file] not in seen:
            seen.add(join.files[file])
            yield file


# ---------------------------------------------------------------- casts


_FLOATS: Final = frozenset(
    name
    for name in DTYPE_ITEMSIZE
    if name.startswith(("bfloat", "float")) and not name.startswith(("float4_", "float6_"))
)
"""What can be cast to. To make integers of floats is to quantize, which is the model's business."""


class Casts:
    """Which dtype a tensor is to become, by regular expressions on its path; the first that is found in it counts."""

    def __init__(self, casts: Mapping[str, str] | None) -> None:
        """Check the expressions and the names.

        Raises:
            ConfigError: One is no regular expression, or no floating-point dtype.
        """
        self._rules: list[tuple[re.Pattern[str], DType]] = []
        for pattern, name in (casts or {}).items():
            try:
                expression = re.compile(pattern)
            except (re.error, TypeError) as err:
                why = escape(str(err))
                raise ConfigError(f"cast: {escape(repr(pattern))} is no regular expression: {why}") from err
            if name not in _FLOATS:
                raise ConfigError(
                    f"cast: expected a floating-point dtype, found {escape(repr(name))}",
                    hint=f"one of {', '.join(sorted(_FLOATS))}",
                )
            self._rules.append((expression, DType(name)))

    def dtype(self, path: str, stored: DType) -> DType:
        """Return what a tensor becomes: what it is stored as, if no rule says otherwise.

        Raises:
            ConfigError: It is complex, and would lose half of its values.
        """
        for expression, dtype in self._rules:
            if expression.search(path):
                if stored.name.startswith("complex"):
                    raise ConfigError(f"cast: {escape(path)} is {stored.name}, which {dtype.name} cannot hold")
                return dtype
        return stored
