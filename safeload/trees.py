"""Trees of arrays: the names of their leaves, and the same tree with other leaves.

A leaf is what has a dtype and a shape: an array of numpy, JAX or torch, or what only describes one. Nothing here makes
or copies an array.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from safeload.decoding import HostTensor
from safeload.errors import ConfigError, ShardingError, escape
from safeload.records import Record

_MAX_DEPTH = 64
"""Most levels of a tree; a deeper one is one that holds itself."""


def is_leaf(node: Any) -> bool:
    """Whether a node of a tree is a tensor, or describes one."""
    is_array = hasattr(node, "dtype") and hasattr(node, "shape")
    return isinstance(node, HostTensor) or (is_array and not isinstance(node, Record))


def named_leaves(tree: Any, *, separator: str = "/") -> dict[str, Any]:
    """Return the leaves of a tree by name, in its order: the keys on the way to each, joined.

    Args:
        tree: Dicts, lists, tuples, named tuples and records; any other pytree that JAX knows, where JAX is installed.
            None holds nothing.
        separator: What joins them.

    Raises:
        ConfigError: Two leaves have one name, something is no array, or the tree holds itself.
    """
    found: dict[str, Any] = {}

    def take(name: str, leaf: Any) -> Any:
        if name in found:
            raise ConfigError(f"expected a name for each leaf, found {escape(name)} twice")
        found[name] = leaf
        return leaf

    map_leaves(tree, take, separator=separator)
    return found


def map_leaves(
    tree: Any, make: Callable[[str, Any], Any], *, separator: str = "/", plain: Callable[[str, Any], Any] | None = None
) -> Any:
    """Return the same tree with each leaf replaced by what `make` returns for its name and it.

    Args:
        tree: As for `named_leaves`.
        make: Told a name and a leaf, in the tree's order.
        separator: As for `named_leaves`.
        plain: Told the name and value of a number, text or None that stands where an array may; None to refuse them
            and keep None.

    Raises:
        ConfigError: Something is no array, or the tree holds itself.
    """
    return _Mapper(make, separator, plain).map(tree, ())


class _Mapper:
    def __init__(
        self, make: Callable[[str, Any], Any], separator: str, plain: Callable[[str, Any], Any] | None
    ) -> None:
        self._make, self._separator, self._plain = make, separator, plain

    def map(self, node: Any, path: tuple[str, ...]) -> Any:
        if len(path) > _MAX_DEPTH:
            message = f"expected at most {_MAX_DEPTH} levels in a tree, found more"
            raise ConfigError(message, hint="does it hold itself?")
        if is_leaf(node):
            return self._make(self._separator.join(path), node)
        if self._plain is not None and isinstance(node, (bool, int, float, str, type(None))):
            return self._plain(self._separator.join(path), node)
        if node is None:
            return None
        if isinstance(node, Record):
            return type(node)(**{field: self.map(child, (*path, field)) for field, child in node.items()})
        if isinstance(node, Mapping) and not _is_own_kind(node):
            return self._map_mapping(node, path)
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return type(node)(*(self.map(getattr(node, field), (*path, field)) for field in node._fields))
        if isinstance(node, (list, tuple)):
            return type(node)(self.map(child, (*path, str(index))) for index, child in enumerate(node))
        return self._map_foreign(node, path)

    def _map_mapping(self, node: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        done = {key: self.map(child, (*path, str(key))) for key, child in node.items()}
        if isinstance(node, defaultdict):
            return defaultdict(node.default_factory, done)
        return OrderedDict(done) if isinstance(node, OrderedDict) else done

    def _map_foreign(self, node: Any, path: tuple[str, ...]) -> Any:
        name = self._separator.join(path)
        refusal = ConfigError(
            f"{escape(name) or 'the tree'}: expected arrays in dicts, lists, tuples and records, found "
            f"{escape(type(node).__name__)}",
            hint="a number has to be an array: numpy.float32(0.1)",
        )
        try:
            # Late: only a pytree of somebody's own needs JAX.
            from safeload import assembling
        except ImportError:
            raise refusal from None
        try:
            leaves, rebuild = assembling.named_leaves(node)
        except ShardingError as err:
            raise ConfigError(f"{escape(name) or 'the tree'}: {err.message}") from err
        if any(leaf is node for _, leaf in leaves):
            raise refusal
        return rebuild([self.map(leaf, (*path, *below.split("/"))) for below, leaf in leaves])


def _is_own_kind(node: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a pytree that somebody taught JAX, such as a FrozenDict of flax: only JAX can rebuild it."""
    # Whoever taught it has imported JAX.
    if type(node) in {dict, OrderedDict, defaultdict} or "jax" not in sys.modules:
        return False
    return not sys.modules["jax"].tree_util.all_leaves([node])


def memory_of(leaf: Any) -> tuple[object, ...] | None:
    """Return what tells one place in memory from another, with the layout that it is read by; None where nobody can.

    Two leaves for which it is the same show the same elements in the same order, and a write to one is one to the
    other. It holds for as long as both are alive.

    Args:
        leaf: An array of numpy, or a tensor of torch in memory. Of an array of JAX, whose memory is never written to,
            nothing is said.
    """
    if isinstance(leaf, HostTensor):
        leaf = leaf.array
    if 0 in getattr(leaf, "shape", ()):
        return None  # of no elements, none is the same
    interface = getattr(leaf, "__array_interface__", None) if not hasattr(leaf, "data_ptr") else None
    if isinstance(interface, dict) and type(leaf).__module__.split(".")[0] == "numpy":
        return ("host", interface["data"][0], str(leaf.dtype), tuple(leaf.shape), tuple(leaf.strides))
    if hasattr(leaf, "data_ptr") and hasattr(leaf, "stride"):
        try:
            address, steps = leaf.data_ptr(), tuple(leaf.stride())
        except (RuntimeError, ValueError):  # what torch has for sparse and lazy tensors
            return None
        # What has no memory of its own, on "meta" or as a wrapper of other tensors, all has the address 0.
        return (str(leaf.device), address, str(leaf.dtype), tuple(leaf.shape), steps) if address else None
    return None


def same_leaves(leaves: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the names of each group of leaves that are one object."""
    groups: dict[int, list[str]] = {}
    for name, leaf in leaves.items():
        groups.setdefault(id(leaf), []).append(name)
    yield from groups.values()
