"""Host tensors become `jax.Array`s. The only module that imports jax.

On CPU a native, C-ordered, 64-byte-aligned host tensor is not copied: the `jax.Array` is a view of the staged memory
and keeps it alive, and that memory is read-only and never reused. So is each device's part of it where that part is
contiguous and aligned (rows, or all of it). Everything else is copied to its device, and the stage is freed with the
last host tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from safeload.decoding import HostTensor
from safeload.errors import ShardingError, escape
from safeload.records import Record, on_record_class

__all__ = ["Mesh", "Place", "Shardings", "assemble", "fit", "named_leaves", "process_count"]

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
    made: list[jax.Array] = []
    result = _assemble(tree, shardings, "the tree", made)
    try:
        for array in made:
            array.block_until_ready()
    except Exception as err:  # JAX has errors that share no other base; so below
        raise ShardingError(f"the devices did not take the tensors: {escape(str(err))}") from err
    return result


def _assemble(node: Any, shardings: Shardings, where: str, made: list[jax.Array]) -> Any:
    if isinstance(node, HostTensor):
        made.append(_array(node, shardings))
        return made[-1]
    children = _children(node)
    if children is None:
        return node
    if _stands_for_all_below(shardings):
        below = dict.fromkeys(children, shardings)
    else:
        below = _children(shardings) or {}
        if below.keys() != children.keys():
            raise ShardingError(
                f"{where}: expected shardings for {_listed(children)}, found {_listed(below)}",
                hint="give one Sharding for all of it, or one for each",
            )
    done = {key: _assemble(child, below[key], f"{where}/{escape(str(key))}", made) for key, child in children.items()}
    if isinstance(node, Record):
        return type(node)(**done)
    return done if isinstance(node, Mapping) else type(node)(done.values())


def _stands_for_all_below(shardings: Shardings) -> bool:
    return shardings is None or isinstance(shardings, Sharding) or callable(shardings)


def _children(node: Any) -> dict[Any, Any] | None:
    """Children by key; None for a leaf."""
    if isinstance(node, (Record, Mapping)):
        return dict(node.items())
    return dict(enumerate(node)) if isinstance(node, (list, tuple)) else None


def _listed(children: Mapping[Any, Any]) -> str:
    return escape(", ".join(str(key) for key in children)) or "none"


def _array(tensor: HostTensor, place: Shardings) -> jax.Array:
    path, array = tensor.path, tensor.array
    if callable(place) and not isinstance(place, Sharding):
        place = place(path, array.shape)
    if not (place is None or isinstance(place, Sharding)):
        raise ShardingError(
            f"{escape(path)}: expected a jax.sharding.Sharding, found {escape(repr(place))}",
            hint="a PartitionSpec needs its mesh: NamedSharding(mesh, spec)",
        )
    described = f"{escape(path)}: {array.dtype.name} {array.shape} with {escape(str(place or 'the default device'))}"
    dtype = array.dtype.newbyteorder("=") if not array.dtype.isnative else array.dtype
    # asarray and not ascontiguousarray, which makes a scalar one-dimensional.
    native = np.asarray(array, dtype=dtype, order="C")
    try:
        kept = jax.dtypes.canonicalize_dtype(dtype)
        if kept.itemsize == dtype.itemsize:
            if place is not None:
                return jax.make_array_from_callback(native.shape, place, lambda index: native[index])
            single: jax.Array = jax.device_put(native)
            return single
    except Exception as err:
        why = _why_unfit(getattr(place, "spec", None), array.shape, err)
        raise ShardingError(f"{described}: {why}") from err
    raise ShardingError(
        f"{described}: JAX would narrow it to {kept}",
        hint="call jax.config.update('jax_enable_x64', True), or load it as numpy",
    )


def named_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of any pytree with their names, in JAX's order, and what puts new leaves in their places.

    A name is the `/`-joined path of keys, attributes and positions: `params/language_model/rms_norm/scale`.
    `PartitionSpec` and None are leaves.

    Args:
        tree: Any pytree, such as the shapes or the specs of a training state.

    Raises:
        ShardingError: JAX cannot flatten it, such as for keys that have no order.
    """
    try:
        leaves, structure = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda node: node is None or isinstance(node, PartitionSpec)
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
