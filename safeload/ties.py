"""Ties: which parameters are one, at three levels that are not the same claim.

- `values`: their elements are equal now. Two norms of ones are equal and have nothing to do with each other.
- `storage`: they are read from the same bytes, of a file or of memory: a write to one is a write to the other.
- `parameter`: they are one object. Only this survives an update by an optimizer that makes new arrays.

A manifest proves the first two of the files before one of them is read. The third is a claim about a tree in memory.
What is tied by storage in a file comes out of `load`, without shardings, as one array. With shardings each name has an
array of its own, and so it has where a format has no way to say that two names are one tensor. There, `tie` puts one
object in both places, once it is shown that their values are equal.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from safeload.decoding import HostTensor
from safeload.errors import ConfigError, ShardingError, escape
from safeload.manifest import FileEntry, Manifest, ManifestTensor, TrustedManifest
from safeload.naming import NamedFile, name_tensors
from safeload.trees import map_leaves, memory_of, named_leaves, same_leaves

Level: TypeAlias = Literal["values", "storage", "parameter"]


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters that are one, and in which sense.

    Attributes:
        level: "values", "storage" or "parameter"; see the module.
        names: Two or more, in stored order.
    """

    level: Level
    names: tuple[str, ...]


def ties(manifest: Manifest | TrustedManifest) -> tuple[Tie, ...]:
    """Show which tensors of a checkpoint are one, by its manifest alone; no file is opened.

    Equal values are those of one dtype and shape with the same digest. Storage is the same if file, bytes, order and
    strides are. A tie by storage is not listed again as one by values, unless more tensors have these values.

    Args:
        manifest: The manifest.

    Returns:
        Ties by storage, then ties by values, with the names of `safeload.naming.name_tensors`. What has no elements is
        tied to nothing.

    Raises:
        ConfigError: Two tensors have one name.
    """
    listed = manifest.manifest if isinstance(manifest, TrustedManifest) else manifest
    names = name_tensors(NamedFile(e.path, e.parameter, tuple(t.name for t in e.tensors)) for e in listed.files)
    tensors = [
        (names[entry.path, tensor.name], entry, tensor)
        for entry in listed.files
        for tensor in entry.tensors
        if 0 not in tensor.shape
    ]
    stored = _grouped((name, _place(entry, tensor)) for name, entry, tensor in tensors)
    equal = _grouped((name, (tensor.dtype, tensor.shape, tensor.sha256)) for name, _, tensor in tensors)
    more = [group for group in equal if group not in stored]
    return (*(Tie("storage", group) for group in stored), *(Tie("values", group) for group in more))


def tree_ties(tree: Any) -> tuple[Tie, ...]:
    """Return which leaves of a tree are one object, and which are several objects on the same memory.

    Equal values are not looked for, as that would read every array; `ties` has them from digests.

    Args:
        tree: Any tree of arrays of numpy or JAX or tensors of torch; see `safeload.trees.named_leaves`. Names are
            `/`-joined paths.

    Raises:
        ConfigError: It is no such tree.
    """
    leaves = named_leaves(tree)
    objects = [tuple(names) for names in same_leaves(leaves) if len(names) > 1]
    memory = _grouped((name, place) for name, leaf in leaves.items() if (place := memory_of(leaf)) is not None)
    views = [names for names in memory if names not in objects]
    return (*(Tie("parameter", names) for names in objects), *(Tie("storage", names) for names in views))


def tie(tree: Any, groups: Iterable[Tie | Sequence[str]]) -> Any:
    """Return the same tree in which each group of leaves is one object: the first that the group names.

    Args:
        tree: A tree of arrays, as for `tree_ties`.
        groups: Names of leaves that are one parameter, such as a `Tie` whose names are paths of this tree. It is the
            caller who says so: a tie by values may be a coincidence.

    Raises:
        ConfigError: It is no tree of arrays, or has no elements to compare: a description, or a typed key of JAX.
        ShardingError: A name is none of the tree, is in two groups, or the leaves of a group are not equal.
    """
    leaves = named_leaves(tree)
    first: dict[str, str] = {}
    for group in groups:
        names = group.names if isinstance(group, Tie) else tuple(group)
        for name in names:
            if name not in leaves:
                raise ShardingError(f"tie: expected a leaf of the tree, found {escape(name)}, which is none")
            if first.setdefault(name, names[0]) != names[0]:
                raise ShardingError(f"tie: {escape(name)} is in two groups", hint="give one group with all their names")
            try:
                is_equal = _are_equal(leaves[names[0]], leaves[name])
            except Exception as err:  # JAX and torch have errors that share no other base
                raise ConfigError(
                    f"tie: expected arrays with elements to compare, found {escape(name)} without: {escape(str(err))}"
                ) from err
            if not is_equal:
                raise ShardingError(
                    f"tie: {escape(name)} is not equal to {escape(names[0])}, so they are not one parameter"
                )
    return map_leaves(tree, lambda name, leaf: leaves[first[name]] if name in first else leaf)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two arrays have the same bits; NaN is equal to itself here, and a zero not to the negative one."""
    if one is other:
        return True
    one, other = (leaf.array if isinstance(leaf, HostTensor) else leaf for leaf in (one, other))
    if one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
        return False
    place = memory_of(one)
    return (place is not None and place == memory_of(other)) or _bits(one) == _bits(other)


def _bits(leaf: Any) -> bytes:
    if hasattr(leaf, "data_ptr"):
        # Whoever has a tensor has imported torch; the package never does. By way of bytes, as numpy has no bfloat16.
        leaf = leaf.detach().cpu().contiguous().flatten().view(sys.modules["torch"].uint8).numpy()
    array = leaf if hasattr(leaf, "tobytes") else leaf.__array__()
    made: bytes = array.tobytes()
    return made


def _place(entry: FileEntry, tensor: ManifestTensor) -> Hashable:
    return (entry.path, tensor.offset, tensor.nbytes, tensor.dtype, tensor.shape, tensor.order, tensor.strides)


def _grouped(pairs: Iterable[tuple[str, Hashable]]) -> list[tuple[str, ...]]:
    """Return the names of each key that more than one has, in the order of their first."""
    groups: dict[Hashable, list[str]] = {}
    for name, key in pairs:
        groups.setdefault(key, []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]
