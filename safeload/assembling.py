"""Host tensors become `jax.Array`s. The only module that imports jax, beside what agrees with other processes.

On CPU a native, C-ordered, 64-byte-aligned host tensor is not copied: the `jax.Array` is a view of the staged memory
and keeps it alive, and that memory is read-only and never reused. So is each device's part of it where that part is
contiguous and aligned (rows, or all of it). Everything else is copied to its device, and the stage is freed with the
last host tensor. Whoever wants the stage back earlier asks for arrays that own their memory.

No collective is needed, and none may be: a host that refuses what it read must not leave others waiting in one.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from safeload.decoding import Array, HostTensor, PartialTensor
from safeload.errors import SafeloadError, ShardingError, escape
from safeload.placing import (
    Block,
    Pattern,
    block_of,
    block_shape,
    compile_rules,
    moved,
    n_elements,
    overlap,
    whole,
    within,
)
from safeload.records import Record, on_record_class

__all__ = [
    "GlobalArray",
    "Mesh",
    "PartitionRules",
    "Place",
    "Shardings",
    "assemble",
    "fit",
    "host_leaves",
    "named_leaves",
    "partition_rules",
    "process_count",
    "process_index",
    "put",
    "use_compilation_cache",
]

Place: TypeAlias = Callable[[str, tuple[int, ...]], Sharding | None]
"""Says where a tensor goes, from its shape and its path (of the file, then `/` and its name there if it has one)."""

Shardings: TypeAlias = Any
"""A `Place`, or a prefix of the tree: a `Sharding` or None stands for everything below it, so one for a record is that
of each of its fields; a mapping, list, tuple or record is followed by its keys. None is JAX's default device."""


def _register(made: type[Record]) -> None:
    """Make a record class a pytree node whose fields are children, and attributes in key paths."""
    fields = [field.name for field in dataclasses.fields(made)]  # type: ignore[arg-type] # made by make_dataclass
    jax.tree_util.register_dataclass(made, data_fields=fields, meta_fields=[])


on_record_class(_register)


ALIGNMENT_BYTES = 64
"""Alignment at which XLA's CPU client takes a buffer over without copying it once more."""

COPYING_PLATFORMS = frozenset({"cuda", "gpu", "rocm", "tpu"})
"""Platforms whose devices have memory of their own, so that an array there never is a view of the host's."""


def assemble(tree: Any, shardings: Shardings = None) -> Any:
    """Return the same tree with each host tensor as a global `jax.Array`, ready on its devices.

    Args:
        tree: A tree as `decode` returns it: mappings, lists, tuples and records, with `HostTensor`s as leaves. Other
            leaves stay as they are. Big-endian and Fortran-ordered tensors are copied once on the host, to native C
            order.
        shardings: Where the tensors go; see `Shardings`.

    Raises:
        ShardingError: The shardings do not have the tree's structure, a tensor does not fit its sharding or its
            devices, or JAX has no such dtype. A 64-bit dtype is refused unless JAX is told to keep them, as it would
            narrow the values.
    """
    made: list[GlobalArray] = []

    def make(tensor: HostTensor | PartialTensor, place: Shardings) -> jax.Array:
        if isinstance(tensor, PartialTensor):
            raise ShardingError(f"{escape(tensor.path)}: only a part of it was read")
        array = GlobalArray(
            tensor.path, tensor.array.shape, tensor.array.dtype, ask(place, tensor.path, tensor.array.shape)
        )
        array.take(tensor)
        made.append(array)
        return array.finish()

    result = walk(tree, shardings, make, where="the tree")
    for array in made:
        array.wait()
    return result


def walk(
    node: Any, shardings: Shardings, make: Callable[[HostTensor | PartialTensor, Shardings], Any], *, where: str
) -> Any:
    """Return the same tree with each tensor replaced by what `make` returns for it and what stands for it in shardings.

    Args:
        node: The tree.
        shardings: A prefix of it; see `Shardings`.
        make: Told a tensor, and a `Place`, a `Sharding` or None.
        where: What to call the tree in messages.

    Raises:
        ShardingError: The shardings do not have the tree's structure, or are none.
    """
    if isinstance(node, (HostTensor, PartialTensor)):
        return make(node, shardings)
    children = _children(node)
    if children is None:
        return node
    below = _below(shardings, children, where)
    done = {key: walk(child, below[key], make, where=f"{where}/{escape(str(key))}") for key, child in children.items()}
    if isinstance(node, Record):
        return type(node)(**done)
    return done if isinstance(node, Mapping) else type(node)(done.values())


def _below(shardings: Shardings, children: Collection[Any], where: str) -> Mapping[Any, Shardings]:
    """Return what stands for each child."""
    if stands_for_all_below(shardings):
        return dict.fromkeys(children, shardings)
    below = _children(shardings) or {}
    if below.keys() != set(children):
        raise ShardingError(
            f"{where}: expected shardings for {_listed(children)}, found {_listed(below)}",
            hint="give one Sharding for all of it, or one for each",
        )
    return below


def shardings_of_files(shardings: Shardings, paths: Collection[str]) -> Mapping[str, Shardings]:
    """Return what stands for each file of a checkpoint, before any was read.

    Raises:
        ShardingError: They are for other files.
    """
    return _below(shardings, paths, "the tree")


def sharding_by_name(shardings: Shardings, name: str) -> tuple[Shardings] | None:
    """Return what stands for a tensor of a file, going by the name that the file's table has for it.

    Args:
        shardings: What stands for the file.
        name: Keys on the way to the tensor, `/`-joined.

    Returns:
        It, alone in a tuple; None where a name is not enough to tell, as for keys that have a slash in them.
    """
    while not stands_for_all_below(shardings):
        keys = [
            (key, shown)
            for key, shown in ((key, key if isinstance(key, str) else repr(key)) for key in _children(shardings) or {})
            if name == shown or name.startswith(f"{shown}/")
        ]
        if len(keys) != 1:
            return None
        ((key, shown),) = keys
        shardings, name = (_children(shardings) or {})[key], name[len(shown) + 1 :]
    return (shardings,)


def host_leaves(node: Any) -> Iterator[HostTensor | PartialTensor]:
    """Yield the tensors of a tree, in stored order."""
    if isinstance(node, (HostTensor, PartialTensor)):
        yield node
    else:
        for child in (_children(node) or {}).values():
            yield from host_leaves(child)


def finish(node: Any) -> Any:
    """Return the same tree with each `GlobalArray` as the `jax.Array` that it has become."""
    if isinstance(node, GlobalArray):
        return node.finish()
    children = _children(node)
    if children is None:
        return node
    done = {key: finish(child) for key, child in children.items()}
    if isinstance(node, Record):
        return type(node)(**done)
    return done if isinstance(node, Mapping) else type(node)(done.values())


def stands_for_all_below(shardings: Shardings) -> bool:
    """Whether a node of a prefix stands for all tensors below it."""
    return shardings is None or isinstance(shardings, Sharding) or callable(shardings)


def _children(node: Any) -> dict[Any, Any] | None:
    """Children by key; None for a leaf."""
    if isinstance(node, (Record, Mapping)):
        return dict(node.items())
    return dict(enumerate(node)) if isinstance(node, (list, tuple)) else None


def _listed(children: Collection[Any]) -> str:
    return escape(", ".join(str(key) for key in children)) or "none"


def ask(place: Shardings, path: str, shape: tuple[int, ...]) -> Sharding | None:
    """Return where a tensor goes, having asked if there is somebody to ask.

    Raises:
        ShardingError: The answer is no `Sharding`, or what was asked failed.
    """
    if callable(place) and not isinstance(place, Sharding):
        try:
            place = place(path, shape)
        except SafeloadError:
            raise
        except Exception as err:
            raise ShardingError(f"{escape(path)}: it has no place: {escape(repr(err))}") from err
    if not (place is None or isinstance(place, Sharding)):
        raise ShardingError(
            f"{escape(path)}: expected a jax.sharding.Sharding, found {escape(repr(place))}",
            hint="a PartitionSpec needs its mesh: NamedSharding(mesh, spec)",
        )
    return place


class GlobalArray:
    """A global `jax.Array` in the making: device by device, from whichever blocks of it pass by.

    Attributes:
        path: What the tensor is called.
        shape: Its global shape.
        dtype: Its dtype on the devices, native.
        sharding: Where it goes; None for JAX's default device.
        needed: The distinct blocks that devices of this process hold.
        owned: Whether the arrays have to own their memory.
    """

    def __init__(
        self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding | None, *, owned: bool = False
    ) -> None:
        """Find out which device needs what.

        Args:
            path: What the tensor is called.
            shape: Its global shape.
            dtype: What it becomes; a part of another dtype is cast.
            sharding: Where it goes; None for JAX's default device.
            owned: Whether the arrays have to own their memory, as the memory of the parts will be used again.

        Raises:
            ShardingError: It does not fit the sharding, or JAX has no such dtype or would narrow it.
        """
        self.path, self.shape, self.sharding = path, tuple(shape), sharding
        self.dtype = dtype if dtype.isnative else dtype.newbyteorder("=")
        self._require_dtype()
        self._devices = self._find_devices()
        self.needed = tuple(self._devices)
        self.owned = owned
        self._made: dict[Block, list[jax.Array]] = {}
        self._buffers: dict[Block, tuple[Array, list[int]]] = {}
        self._finished: jax.Array | None = None

    @property
    def _described(self) -> str:
        place = escape(str(self.sharding or "the default device"))
        return f"{escape(self.path)}: {self.dtype.name} {self.shape} with {place}"

    @property
    def is_on_host(self) -> bool:
        """Whether the arrays are, or may be, in the host's memory."""
        devices = [device for block in self._devices.values() for device in block]
        return any(device is None or device.platform not in COPYING_PLATFORMS for device in devices) and not (
            self.sharding is None and jax.default_backend() in COPYING_PLATFORMS
        )

    def _require_dtype(self) -> None:
        try:
            kept = jax.dtypes.canonicalize_dtype(self.dtype)
        except Exception as err:  # JAX has errors that share no other base; so below
            raise ShardingError(f"{self._described}: {escape(str(err))}") from err
        if kept.itemsize != self.dtype.itemsize:
            raise ShardingError(
                f"{self._described}: JAX would narrow it to {kept}",
                hint="call jax.config.update('jax_enable_x64', True), or load it as numpy",
            )

    @property
    def layout(self) -> str:
        """Which device of the job holds what, as a digest; nothing for devices of one process, which are its affair."""
        devices: list[Any] = [] if self.sharding is None else list(self.sharding.device_set)
        if self.sharding is None or len({device.process_index for device in devices}) < 2:
            return ""
        try:
            return _layout(self.sharding, self.shape)
        except Exception as err:
            raise ShardingError(f"{self._described}: {escape(str(err))}") from err

    def _find_devices(self) -> dict[Block, list[Any]]:
        if self.sharding is None:
            return {whole(self.shape): [None]}
        try:
            self.sharding.shard_shape(self.shape)  # which says what does not divide
            found: dict[Block, list[Any]] = {}
            for device, index in self.sharding.addressable_devices_indices_map(self.shape).items():
                found.setdefault(block_of(index or (), self.shape), []).append(device)
        except Exception as err:
            why = _why_unfit(getattr(self.sharding, "spec", None), self.shape, err)
            raise ShardingError(f"{self._described}: {why}") from err
        return found

    def take(
        self,
        tensor: HostTensor | PartialTensor,
        origin: tuple[int, ...] | None = None,
        *,
        only: Collection[Block] | None = None,
    ) -> None:
        """Take what is needed out of a tensor, which is this one or a block of it.

        Args:
            tensor: The tensor.
            origin: Where in the whole its first element is; None for the beginning.
            only: The needed blocks to look at; None for all.

        Raises:
            ShardingError: A device does not take its part.
            StagingError: Bytes that are needed were not read.
        """
        start = (0,) * len(self.shape) if origin is None else origin
        length = tensor.array.shape if isinstance(tensor, HostTensor) else tensor.spec.shape
        region = tuple(range(at, at + n) for at, n in zip(start, length, strict=True))
        parts: dict[Block, Array] = {}
        for block in self.needed if only is None else only:
            if block in self._made:
                continue
            if block == (common := overlap(block, region)) or not n_elements(block):
                part = tensor.part(moved(block, start))
                if self.is_copied_first(part):
                    # One at a time, so that there is one copy at a time.
                    self._put({block: self._copied(part)})
                else:
                    parts[block] = part
            elif common is not None:
                self._collect(block, common, tensor.part(moved(common, start)))
        self._put(parts)

    def _collect(self, block: Block, common: Block, part: Array) -> None:
        """Keep a piece of a block until the others came."""
        if block not in self._buffers:
            self._buffers[block] = fresh(block_shape(block), self.dtype), [n_elements(block)]
        buffer, left = self._buffers[block]
        _copy(buffer[within(common, [side.start for side in block])], part)
        left[0] -= n_elements(common)
        if not left[0]:
            del self._buffers[block]
            self._put({block: buffer})

    def is_copied_first(self, part: Array) -> bool:
        """Whether a part does not go to its device as it lies in memory."""
        return (self.owned and self.is_on_host) or part.dtype != self.dtype or not part.flags.c_contiguous

    def _copied(self, part: Array) -> Array:
        copied = fresh(part.shape, self.dtype)
        _copy(copied, part)
        return copied

    def _put(self, parts: Mapping[Block, Array]) -> None:
        """Put blocks on all devices that need them, in one call, which takes less time than one for each."""
        if not parts:
            return
        try:
            if self.sharding is None:
                for block, data in parts.items():
                    self._made[block] = [jax.device_put(data)]
                return
            pairs = [(data, device) for block, data in parts.items() for device in self._devices[block]]
            arrays = iter(jax.device_put([data for data, _ in pairs], [self._target(device) for _, device in pairs]))
            for block in parts:
                self._made[block] = [next(arrays) for _ in self._devices[block]]
        except Exception as err:
            raise ShardingError(f"{self._described}: {escape(str(err))}") from err

    def _target(self, device: Any) -> Any:
        kind = getattr(self.sharding, "memory_kind", None)
        return device if kind is None else SingleDeviceSharding(device, memory_kind=kind)

    def wait(self) -> None:
        """Return once all parts that were put so far are on their devices, so that their memory on the host is free.

        Raises:
            ShardingError: A device did not take its part.
        """
        try:
            for arrays in self._made.values():
                for array in arrays:
                    array.block_until_ready()
        except Exception as err:
            raise ShardingError(f"the devices did not take the tensors: {escape(str(err))}") from err

    def finish(self) -> jax.Array:
        """Return the array; the same one each time.

        Raises:
            ShardingError: A part of it never came, or JAX does not put the parts together.
        """
        if self._finished is None:
            self._finished = self._combine()
        return self._finished

    def _combine(self) -> jax.Array:
        missing = [block for block in self.needed if block not in self._made]
        if missing:
            raise ShardingError(f"{self._described}: nothing was read for {missing[0]}")
        if self.sharding is None:
            ((array,),) = self._made.values()
            return array
        by_device = {
            device: array
            for block, devices in self._devices.items()
            for device, array in zip(devices, self._made[block], strict=True)
        }
        order = self.sharding.addressable_devices_indices_map(self.shape)
        # A process without a device of the sharding has no array to tell the dtype by; an old JAX does not take it.
        more = {} if by_device else {"dtype": self.dtype}
        try:
            return jax.make_array_from_single_device_arrays(
                self.shape, self.sharding, [by_device[device] for device in order], **more
            )
        except Exception as err:
            raise ShardingError(f"{self._described}: {escape(str(err))}") from err


@lru_cache(maxsize=1024)
def _layout(sharding: Sharding, shape: tuple[int, ...]) -> str:
    # Thousands of tensors have few shardings and shapes, and a mesh may have thousands of devices.
    placed: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    listed = sorted((device.id, str(block_of(index or (), shape))) for device, index in placed.items())
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def fresh(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return new memory as XLA's CPU client takes it over without copying; nothing is in it yet."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def _copy(target: Array, source: Array) -> None:
    # Values that the target's type has no number for become infinite or nan, as whoever asked for the cast knows.
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


def named_leaves(
    tree: Any, *, is_leaf: Callable[[Any], bool] = lambda _: False
) -> tuple[list[tuple[str, Any]], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of any pytree with their names, in JAX's order, and what puts new leaves in their places.

    A name is the `/`-joined path of keys, attributes and positions: `params/language_model/rms_norm/scale`.
    `PartitionSpec` and None are leaves.

    Args:
        tree: Any pytree, such as the shapes or the specs of a training state.
        is_leaf: Whether a node is a leaf though JAX could look into it.

    Raises:
        ShardingError: JAX cannot flatten it, such as for keys that have no order.
    """
    try:
        leaves, structure = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda node: node is None or isinstance(node, PartitionSpec) or is_leaf(node)
        )
    except Exception as err:
        raise ShardingError(f"this is no tree of parameters: {escape(str(err))}") from err
    named = [("/".join(_key_name(key) for key in path), leaf) for path, leaf in leaves]
    return named, lambda new: jax.tree_util.tree_unflatten(structure, new)


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):  # DictKey and FlattenedIndexKey, GetAttrKey, SequenceKey
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def fit(mesh: Mesh, spec: PartitionSpec | None, *, path: str, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of a parameter over a mesh, having shown that the shape divides as the spec says.

    Args:
        mesh: The mesh.
        spec: Mesh axes for each dimension; None for a replicated parameter.
        path: The parameter's name, for messages.
        shape: Its global shape.

    Raises:
        ShardingError: The spec is none, names no axis of the mesh, is longer than the shape, or does not divide it.
    """
    try:
        sharding = NamedSharding(mesh, PartitionSpec() if spec is None else spec)
        sharding.shard_shape(shape)
    except Exception as err:
        why = _why_unfit(spec, shape, err)
        raise ShardingError(f"{escape(path)}: {shape} does not fit {escape(str(spec))}: {why}") from err
    return sharding


def _why_unfit(spec: Any, shape: tuple[int, ...], err: Exception) -> str:
    """JAX's words, but where the spec is longer than the shape: that may end in an IndexError of its own."""
    if not isinstance(spec, PartitionSpec) or len(spec) <= len(shape):
        return escape(str(err))
    entries = "1 entry" if len(spec) == 1 else f"{len(spec)} entries"
    dimensions = "1 dimension" if len(shape) == 1 else f"{len(shape)} dimensions"
    return f"the spec has {entries}, the tensor {dimensions}"


def process_count() -> int:
    """Return how many processes take part in this JAX job."""
    count: int = jax.process_count()
    return count


def process_index() -> int:
    """Return the number of this process in its JAX job."""
    index: int = jax.process_index()
    return index


def use_compilation_cache(directory: str) -> None:
    """Let JAX keep what it compiles in a directory, and take it from there; see `grok1.enable_compilation_cache`."""
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", directory)
    # What was compiled before has made JAX decide that there is no cache, once for all.
    compilation_cache.reset_cache()


def put(tree: Any, sharding: NamedSharding, *, path: str) -> Any:
    """Return a tree of arrays that are in memory already, each laid out as a sharding says.

    Args:
        tree: An array, or a pytree of arrays.
        sharding: Where they go.
        path: What to call them in an error.

    Raises:
        ShardingError: They do not fit.
    """
    try:
        return jax.device_put(tree, sharding)
    except Exception as err:
        raise ShardingError(f"{escape(path)}: does not fit {escape(str(sharding))}: {escape(str(err))}") from err


class PartitionRules:
    """Where tensors go by rules on their paths: a `Place`.

    It goes by the name of the parameter where the signed manifest binds a file to one, as for Grok-1, whose files are
    only numbered; else by the path of the file and the name in it.
    """

    by_parameter = True

    def __init__(self, mesh: Mesh, rules: Sequence[tuple[Pattern, PartitionSpec | None]]) -> None:
        self._mesh = mesh
        self._find = compile_rules(rules)

    def __call__(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of the first rule that matches; see `Place`."""
        return fit(self._mesh, self._find(path), path=path, shape=shape)


def partition_rules(mesh: Mesh, rules: Sequence[tuple[Pattern, PartitionSpec | None]]) -> PartitionRules:
    """Return the `Place` of a list of partition rules, as models publish them.

    Args:
        mesh: The mesh.
        rules: Pairs of a pattern and a `PartitionSpec`, or None for a replicated tensor. A string is searched for in
            the `/`-joined path as a regular expression; a tuple of strings matches that many neighboring components of
            the path, each in full. The first match counts.

    Raises:
        ConfigError: A pattern is no regular expression. That no rule matches a tensor, or that the tensor does not
            divide, is a ShardingError when it is asked for.
    """
    return PartitionRules(mesh, rules)
