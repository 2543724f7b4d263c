"""Fill: verified arrays into a model that is there, or into the description of one.

Three ways, and what each does to the objects that are there:

- `load_into` writes into the arrays that are there. They stay the same objects, so an optimizer, a tie or a compiled
  function that has them has the new values too.
- `assign` makes new arrays. Whoever has an old one keeps the old one; torch's optimizers can be told, see there.
- `fill` reads a signed checkpoint tensor by tensor into either, so that the checkpoint is never in memory as a whole.

All three are strict: what is demanded is given, what is given is demanded, and shapes and dtypes are equal. All that
differs is told at once, before anything is written. Buffers count as parameters do. Nothing is ever cast.

What has copied values is not told of new ones, by any of them: averages of weights, slow weights, float32 masters.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeAlias, Unpack

import numpy as np

from safeload import staging
from safeload.agreeing import HOST_TIMEOUT_SECONDS, together
from safeload.canonical import numpy_dtype
from safeload.decoding import HostTensor, PartialTensor, decode
from safeload.errors import ConfigError, ShardingError, StagingError, escape
from safeload.expecting import Expectations
from safeload.loading import Held, hold
from safeload.manifest import FileEntry, ManifestTensor, Role, TrustedManifest
from safeload.memory import collect_garbage
from safeload.naming import NamedFile, name_tensors
from safeload.placing import byte_ranges, framing, merged, whole, widened
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import Progress
from safeload.scanning import admit, require_policy_outside
from safeload.sizes import parse_size
from safeload.tensors import DType, Extent, TensorSpec
from safeload.trees import map_leaves, memory_of, named_leaves
from safeload.trust.store import Trust
from safeload.verifying import manifest_in

LEAST_BYTES: Final = 2 * staging.BATCH_BYTES
"""Memory that `fill` stages in where nobody says how much, unless one tensor takes more: two batches, so that one is
read while the other is used. Less than this saves little and costs time."""

_SLACK_BYTES: Final = 3 * 4096
"""What a file can take in memory beyond its bytes: it is aligned, and ends with its page."""

_MAX_TOLD: Final = 20
"""Differences that a message lists. More than that is another model, and the first few say so."""

_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


# ---------------------------------------------------------------- names


def named_tensors(
    loaded: Mapping[str, Any], *, manifest: TrustedManifest | None = None, roles: Sequence[Role] = ()
) -> dict[str, Any]:
    """Return the tensors of a checkpoint by name, whatever files they lie in; names are those of `name_tensors`.

    Numbers, texts and None that stand beside tensors in a file are left out.

    Args:
        loaded: What `load` or `load_host` returns: what each file holds, by its path.
        manifest: The manifest of it, which may bind files to parameters.
        roles: Files of which roles to take; all where there is none. This needs the manifest.

    Raises:
        ConfigError: Two tensors have one name, or roles are asked for without a manifest.
    """
    if roles and manifest is None:
        raise ConfigError("roles: expected the manifest as well, which says what each file is for")
    entries = {} if manifest is None else manifest.manifest.by_path
    files = {
        path: _tensors_of(tree)
        for path, tree in loaded.items()
        if not roles or (path in entries and entries[path].role in roles)
    }
    parameters = {path: entries[path].parameter for path in files if path in entries}
    names = name_tensors(NamedFile(path, parameters.get(path), tuple(tensors)) for path, tensors in files.items())
    return {names[path, name]: leaf for path, tensors in files.items() for name, leaf in tensors.items()}


def _tensors_of(tree: Any) -> dict[str, Any]:
    """Return the tensors of one file, without the plain values beside them."""
    found: dict[str, Any] = {}

    def take(name: str, leaf: Any) -> None:
        if name in found:
            raise ConfigError(f"expected a name for each tensor of a file, found {escape(name)} twice")
        found[name] = leaf

    map_leaves(tree, take, plain=lambda _, value: value)
    return found


# ---------------------------------------------------------------- in place, and anew


def load_into(target: Any, loaded: Any) -> None:
    """Write loaded arrays into the arrays of a model that is there; each stays the object that it is.

    Everything is compared before the first write, so that a model is either as it was or wholly new. Leaves of the
    target that are one object, or one place in memory, are written once: they may be given once, or with equal values.

    Args:
        target: A tree of writable numpy arrays or tensors of torch, or a module of torch. Of a module it is all that
            its `state_dict` has, buffers too, on any device.
        loaded: A tree of arrays with the same names: nested, or flat with `/`-joined names, or for a module with names
            joined by dots. See `named_tensors` for what `load` returns.

    Raises:
        ShardingError: The trees do not agree in names, shapes or dtypes, or arrays that are one in the target would
            have to be different; nothing was written.
        ConfigError: A leaf of the target cannot be written to: it is read-only, only a description (torch's meta
            device, a ShapeDtypeStruct), or an array of JAX, which never changes.
    """
    model = _Model(target)
    given = {name: _host(leaf) for name, leaf in named_leaves(loaded, separator=model.separator).items()}
    model.require({name: _Facts.of(array) for name, array in given.items()})
    model.require_equal(given, lambda one, other: one.tobytes() == other.tobytes())
    writers = {name: _Writer(name, model.leaves[name]) for name in model.taken(given)}
    _require_apart(writers.values())
    given = _out_of_the_way({name: given[name] for name in writers}, writers.values())
    for name, writer in writers.items():
        writer.write(given[name])


def assign(target: Any, loaded: Any, *, optimizers: Iterable[Any] = ()) -> Any:
    """Return the target with new arrays in the place of its own, which are only looked at, and left as they are.

    The arrays are copies, in memory of their own that may be written to and donated. Leaves that are one object in the
    target are one new object.

    Args:
        target: As for `load_into`; arrays may as well be read-only or JAX's, or only describe some: a
            `jax.ShapeDtypeStruct`, with the sharding that it has, or a tensor of torch on the device "meta". What
            becomes of a leaf is an array of the same kind. A module is changed: its parameters become new objects.
        loaded: As for `load_into`.
        optimizers: Optimizers of torch that have the module's parameters: they get the new objects in their place, and
            what they remember of each goes with it. An optimizer that is not named stays on the old parameters, and
            goes on changing those. Those of optax hold no parameters and need nothing.

    Returns:
        A tree like the target, or the module.

    Raises:
        ShardingError: As for `load_into`, or a tensor does not fit its sharding.
        ConfigError: A leaf of the target is of no kind that is known, optimizers are given without a module, or one of
            them is none of torch or has none of the module's parameters.
    """
    model = _Model(target)
    optimizers = list(optimizers)
    if optimizers and not model.is_module:
        raise ConfigError("optimizers: expected a module of torch as the target, found another tree")
    _require_followers(optimizers, model.leaves.values())
    given = {name: _host(leaf) for name, leaf in named_leaves(loaded, separator=model.separator).items()}
    model.require({name: _Facts.of(array) for name, array in given.items()})
    model.require_equal(given, lambda one, other: one.tobytes() == other.tobytes())
    made: dict[str, Any] = {}
    for name in model.taken(given):
        sink = _sink(name, model.leaves[name], anew=True)
        sink.write(given[name])
        made[name] = sink.finish()
    return model.with_leaves(made, optimizers)


def fill(
    target: Any,
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    memory_budget: int | str | None = None,
    names: Callable[[str], str | None] | None = None,
    roles: Sequence[Role] = ("weights",),
    tied: Iterable[Sequence[str]] = (),
    host_timeout: float = HOST_TIMEOUT_SECONDS,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> Any:
    """Load a signed checkpoint into a model tensor by tensor; what is staged at one time is bounded.

    What the manifest lists is compared with what the target demands before any file is opened. Then files are staged,
    admitted, decoded and copied a part at a time. Of a file that is larger than the budget, some tensors at a time are
    read, by the signed digests of chunks.

    Each process of a JAX job reads all of it; `load` with shardings reads only what its devices hold.

    What was only described, a `ShapeDtypeStruct` or a tensor on torch's device "meta", becomes a new array. Arrays that
    are there are written in place. Nothing is returned, and no description is filled, before all was accepted; where
    a file is refused after others were written in place, what was written is set to zero, as the old values are gone
    and a mixture must not be used.

    Args:
        target: A tree of `jax.ShapeDtypeStruct`s, which say by their sharding where each goes; or of writable numpy
            arrays; or of tensors of torch; or a module of torch.
        directory: Where the files are. Untrusted.
        manifest: The signed manifest: a path, or the bytes of the envelope.
        trust: Who may sign.
        policy: What may be in the files.
        memory_budget: Most bytes to stage in; the model itself does not count. None for as little as it takes, see
            `LEAST_BYTES`.
        names: Tells what a tensor is called in the target, by its name as `named_tensors` has it; None leaves it out.
            Without, it is the same name, for a module with dots for slashes.
        roles: Files of which roles to read; those without tensors are verified as well.
        tied: Names in the target of leaves that become one array, a group each. Needed only for `ShapeDtypeStruct`s,
            which cannot tell: of real arrays and parameters, those that are one object are tied, and others are refused
            here, as one of them would be left without values.
        host_timeout: As for `load`.
        progress: Told how far it has come.
        **expected: What to hold the manifest against; see `load`.

    Returns:
        The target if all of it was written in place, or a tree like it. A module is always the same object, and what
        was on "meta" in it is new.

    Raises:
        RejectedError: As `load`.
        ShardingError: As for `load_into`; nothing was read.
        ConfigError: A leaf of the target is of no kind that can be filled, or another argument is wrong.
        StagingError: A tensor does not fit the budget, or a file could not be read.
        HostError: As `load`.
    """
    with ExitStack() as stack:
        if needs_agreement(target):
            stack.enter_context(together(seconds=host_timeout))
        held = hold(directory, manifest=manifest, trust=trust, **expected)
        filled = fill_held(
            target,
            directory,
            held,
            policy=policy,
            memory_budget=memory_budget,
            names=names,
            roles=roles,
            tied=tied,
            progress=progress,
        )
    held.expectation.record(held.trusted)
    return filled


def needs_agreement(target: Any) -> bool:
    """Whether arrays of JAX are among the leaves, which may be global: all processes of the job have to fill them.

    Raises:
        ConfigError: It is no target.
    """
    return any(_kind(leaf) == "jax" for leaf in _Model(target).leaves.values())


def fill_held(
    target: Any,
    directory: str | Path,
    held: Held,
    *,
    policy: str | Path | Policy,
    memory_budget: int | str | None,
    names: Callable[[str], str | None] | None = None,
    roles: Sequence[Role] = ("weights",),
    tied: Iterable[Sequence[str]] = (),
    progress: Progress | None = None,
) -> Any:
    """Do what `fill` does with a manifest that is held already, but for letting a history know of it.

    A caller with arrays of JAX in the target does this within `safeload.agreeing.together`.

    Raises:
        RejectedError: As `fill`; so for the others.
        ShardingError: See there.
        ConfigError: See there.
        StagingError: See there.
    """
    require_policy_outside(policy, directory)
    rules = load_policy(policy)
    budget = parse_size(memory_budget) if isinstance(memory_budget, str) else memory_budget
    model = _Model(target, tied)
    plan = _Plan(model, held, names, roles)
    filler = _Filler(model, plan.sources)
    try:
        for wanted, only in plan.rounds(budget):
            with staging.stream(
                directory,
                held.trusted,
                wanted=wanted,
                memory_budget=plan.budget(budget),
                progress=progress,
                ignore=manifest_in(directory, held.manifest, held.envelope),
            ) as batches:
                # In a call of its own, so that nobody has a batch when the next one is asked for, or the next round.
                filler.take_all(batches, rules, only)
            # Each round has memory of its own, and that of the one before must be gone: a cycle may still hold it.
            collect_garbage()
        filled = model.with_leaves(filler.finish(), ())
    except BaseException:
        filler.undo()
        raise
    return filled


# ---------------------------------------------------------------- what is demanded


@dataclass(frozen=True, slots=True)
class _Facts:
    """What has to be equal of a leaf and of what is put there."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Any) -> _Facts:
        return cls(_dtype_name(leaf), tuple(int(length) for length in leaf.shape))

    def __str__(self) -> str:
        return f"{escape(self.dtype)} {self.shape}"


def _dtype_name(leaf: Any) -> str:
    if getattr(leaf.dtype, "names", None):
        return str(leaf.dtype)  # a record's name tells no more than its length
    # torch's dtypes have no name, and show as `torch.float32`.
    return str(getattr(leaf.dtype, "name", None) or str(leaf.dtype).removeprefix("torch."))


def _is_module(target: Any) -> bool:
    return all(callable(getattr(target, name, None)) for name in ("state_dict", "load_state_dict", "named_buffers"))


def _identity(name: str, leaf: Any) -> object:
    """Return what is the same for leaves that are one: one object, or one place in memory."""
    if _kind(leaf) == "jax" and not hasattr(leaf, "__array__"):
        return name  # a description is no object that could be two parameters; a shape is often described only once
    return memory_of(leaf) or ("object", id(leaf))


class _Model:
    """A target: its leaves by name, and which of them are one.

    Attributes:
        target: What the caller gave.
        is_module: Whether it is a module of torch.
        separator: What joins the keys on the way to a leaf.
        leaves: The leaves.
    """

    def __init__(self, target: Any, tied: Iterable[Sequence[str]] = ()) -> None:
        self.target = target
        self.is_module = _is_module(target)
        self.separator = "." if self.is_module else "/"
        self.leaves: dict[str, Any] = (
            dict(target.state_dict(keep_vars=True)) if self.is_module else named_leaves(target)
        )
        if not self.leaves:
            raise ConfigError("expected a target with at least one array, found none")
        for name, leaf in self.leaves.items():
            _kind(leaf, name)
        places: dict[object, str] = {}
        self._first = {name: places.setdefault(_identity(name, leaf), name) for name, leaf in self.leaves.items()}
        for group in tied:
            self._tie(group)
        self._require_buffers()

    def _tie(self, group: Sequence[str]) -> None:
        for name in group:
            if name not in self.leaves or _Facts.of(self.leaves[name]) != _Facts.of(self.leaves[group[0]]):
                raise ShardingError(
                    f"tied: expected leaves of the target of one shape and dtype, found {escape(', '.join(group))}"
                )
        whole_group = {self._first[name] for name in group}
        if len(whole_group) > 1 and any(_kind(self.leaves[name]) in {"numpy", "torch"} for name in group):
            raise ShardingError(
                f"tied: {escape(', '.join(group))} are one in the checkpoint, and arrays of their own in the target: "
                "what is written in place reaches only one of them",
                hint="make them one first: `safeload.ties.tie`",
            )
        for name, first in self._first.items():
            if first in whole_group:
                self._first[name] = self._first[group[0]]

    def _require_buffers(self) -> None:
        """Refuse a module with buffers that no file has and that have no memory: they would stay without values."""
        if not self.is_module:
            return
        lost = [
            name
            for name, buffer in self.target.named_buffers()
            if name not in self.leaves and _kind(buffer, name) == "meta"
        ]
        if lost:
            raise ShardingError(
                f"{escape(', '.join(lost))}: buffers on the device meta that a state_dict does not have, so that no "
                "checkpoint gives them values",
                hint="build them on a real device before, or register them with persistent=True",
            )

    def require(self, given: Mapping[str, _Facts]) -> None:
        """Raise all that differs."""
        firsts = {self._first[name] for name in given if name in self._first}
        told = [
            f"missing {escape(name)}: {_Facts.of(leaf)}"
            for name, leaf in self.leaves.items()
            if self._first[name] not in firsts
        ]
        told += [f"unexpected {escape(name)}: {facts}" for name, facts in given.items() if name not in self.leaves]
        for name, facts in given.items():
            if name in self.leaves and facts != (demanded := _Facts.of(self.leaves[name])):
                told.append(f"{escape(name)}: expected {demanded}, found {facts}")
        if told:
            more = f"; and {len(told) - _MAX_TOLD} more" if len(told) > _MAX_TOLD else ""
            hint = "a dtype is cast where it is loaded, names and layouts are mapped by rules"
            raise ShardingError(
                f"the checkpoint is not what the model demands: {'; '.join(told[:_MAX_TOLD])}{more}", hint=hint
            )

    def taken(self, given: Iterable[str]) -> list[str]:
        """Return one given name for each leaf that is another object or place."""
        return list({self._first[name]: name for name in reversed(list(given))}.values())[::-1]

    def require_equal(self, given: Mapping[str, Any], is_equal: Callable[[Any, Any], bool]) -> None:
        """Refuse different values for leaves that are one."""
        seen: dict[str, str] = {}
        for name, value in given.items():
            other = seen.setdefault(self._first[name], name)
            if other != name and not is_equal(value, given[other]):
                raise ShardingError(
                    f"{escape(other)} and {escape(name)} are one in the model, and have different values in the "
                    "checkpoint",
                    hint="one of them would be lost: untie them, or take the checkpoint of a model that ties them",
                )

    def with_leaves(self, made: Mapping[str, Any], optimizers: Iterable[Any]) -> Any:
        """Return the target with new leaves in the place of those that `made` names, and of what is one with them."""
        new = {self._first[name]: leaf for name, leaf in made.items()}
        if not new:
            return self.target
        if self.is_module:
            _assign_module(
                self.target, {n: new.get(self._first[n], leaf) for n, leaf in self.leaves.items()}, self.leaves
            )
            _follow(optimizers, self.leaves, dict(self.target.state_dict(keep_vars=True)))
            return self.target
        return map_leaves(self.target, lambda name, leaf: new.get(self._first[name], leaf))


# ---------------------------------------------------------------- kinds of leaves


def _kind(leaf: Any, name: str = "") -> str:
    """Return what a leaf is: an array of numpy, a tensor of torch, one on "meta", or JAX's, described or real."""
    if isinstance(leaf, np.ndarray):
        return "numpy"
    if hasattr(leaf, "data_ptr") and hasattr(leaf, "detach"):
        if hasattr(leaf, "materialize"):
            hint = "run the module once"
            raise ConfigError(
                f"{escape(name)}: expected a tensor, found one of a lazy module, without shape", hint=hint
            )
        return "meta" if leaf.device.type == "meta" else "torch"
    # An array of JAX, a ShapeDtypeStruct, or whatever else says by its sharding where it goes.
    if hasattr(leaf, "sharding"):
        return "jax"
    raise ConfigError(
        f"{escape(name)}: expected an array of numpy or JAX, a tensor of torch or a ShapeDtypeStruct, found "
        f"{escape(type(leaf).__name__)}"
    )


def _host(leaf: Any) -> _Array:
    """Return a loaded leaf as an array of numpy."""
    if isinstance(leaf, HostTensor):
        return leaf.array
    try:
        return np.asarray(leaf)
    except Exception as err:  # JAX and torch have errors that share no other base
        raise ConfigError(f"expected arrays to load, found {escape(type(leaf).__name__)}: {escape(str(err))}") from err


class _Writer:
    """Writes to an array that is there, past its dtype where numpy has none for it."""

    def __init__(self, name: str, leaf: Any) -> None:
        self._leaf, self._kind = leaf, _kind(leaf, name)
        self.name = name
        if self._kind in {"meta", "jax"}:
            raise ConfigError(
                f"{escape(name)}: expected an array that can be written to, found {escape(type(leaf).__name__)}",
                hint="`assign` makes new arrays; `fill` does so tensor by tensor",
            )
        self.view = leaf if self._kind == "numpy" else self._torch_view()
        writable = self.view is None or self.view.flags.writeable
        steps = leaf.stride() if self._kind == "torch" else leaf.strides
        repeats = any(step == 0 and length > 1 for step, length in zip(steps, leaf.shape, strict=True))
        # Where there is no element, numpy's steps may be 0 and mean nothing.
        if not writable or (repeats and 0 not in leaf.shape):
            raise ConfigError(
                f"{escape(name)}: expected an array that can be written to, found one that is read-only or repeats its "
                "elements",
                hint="`assign` makes new arrays",
            )

    def _torch_view(self) -> _Array | None:
        """Return the tensor's memory as integers of its elements' size; None where it is not the host's."""
        if self._leaf.device.type != "cpu":
            return None
        torch = sys.modules["torch"]
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
        try:
            view: _Array = self._leaf.detach().view(integers[self._leaf.element_size()]).numpy()
        except Exception as err:  # sparse, quantized and other tensors that are no array
            raise ConfigError(
                f"{escape(self.name)}: expected a tensor that is a plain array, found another: {escape(str(err))}"
            ) from err
        return view

    def write(self, array: _Array) -> None:
        """Write the values of an array of the same shape and dtype."""
        if self._kind == "numpy":
            np.copyto(self._leaf, array, casting="equiv")
            return
        torch = sys.modules["torch"]
        native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        integers = np.dtype({1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}[array.dtype.itemsize])
        if self.view is not None:
            np.copyto(self.view, native.view(integers), casting="equiv")
            # As torch's own `copy_` does: a backward pass that still needs the old values is refused by torch.
            torch.autograd.graph.increment_version(self._leaf)
            return
        copied = torch.from_numpy(np.array(native.view(integers), order="C"))
        self._leaf.detach().copy_(copied.view(self._leaf.dtype))

    def clear(self) -> None:
        """Write zeros."""
        self.write(np.zeros(self._leaf.shape, _numpy_dtype(self._leaf)))


def _numpy_dtype(leaf: Any) -> np.dtype[Any]:
    return numpy_dtype(DType(_dtype_name(leaf)))


class _Host:
    """A new array of numpy."""

    def __init__(self, leaf: Any) -> None:
        self._array: _Array = np.empty(leaf.shape, leaf.dtype)

    def write(self, array: _Array) -> None:
        np.copyto(self._array, array, casting="equiv")

    def finish(self) -> _Array:
        return self._array


class _Torch:
    """A new tensor of torch, on the CPU where the old one is on "meta"."""

    def __init__(self, name: str, leaf: Any) -> None:
        torch = sys.modules["torch"]
        device = "cpu" if leaf.device.type == "meta" else leaf.device
        try:
            self._tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        except Exception as err:  # torch's errors of memory and of devices share no other base
            raise StagingError(f"{escape(name)}: torch has no memory for it: {escape(str(err))}") from err
        if isinstance(leaf, torch.nn.Parameter):
            self._tensor = torch.nn.Parameter(self._tensor, requires_grad=leaf.requires_grad)
        self._writer = _Writer(name, self._tensor)

    def write(self, array: _Array) -> None:
        self._writer.write(array)

    def finish(self) -> Any:
        return self._tensor


class _Jax:
    """A new array of JAX, where the old one is, or is said to be; it owns its memory, so that it can be donated."""

    def __init__(self, name: str, leaf: Any) -> None:
        # Late: numpy and torch do without it.
        from safeload.assembling import GlobalArray

        self._name = name
        self._array = GlobalArray(name, tuple(leaf.shape), np.dtype(leaf.dtype), leaf.sharding, owned=True)

    def write(self, array: _Array) -> None:
        self._array.take(_Part(self._name, array))  # type: ignore[arg-type] # it asks for a shape and for parts
        self._array.wait()

    def finish(self) -> Any:
        return self._array.finish()


class _Part:
    """What `GlobalArray` asks of a tensor, for any array of numpy."""

    def __init__(self, name: str, array: _Array) -> None:
        self.path, self.spec, self._array = name, array, array

    def part(self, block: Sequence[range]) -> _Array:
        return self._array[tuple(slice(side.start, side.stop) for side in block)]


def _sink(name: str, leaf: Any, *, anew: bool) -> Any:
    """Return what takes the values of a leaf: a new array, or the one that is there."""
    kind = _kind(leaf, name)
    if kind == "jax":
        return _Jax(name, leaf)
    if kind == "meta" or (anew and kind == "torch"):
        return _Torch(name, leaf)
    return _Host(leaf) if anew else _Writer(name, leaf)


def _require_apart(writers: Iterable[_Writer]) -> None:
    """Refuse arrays that share some memory and are not one: what is written to one would be damaged by the other."""
    spans: list[tuple[int, int, _Writer]] = []
    for writer in writers:
        if writer.view is not None and writer.view.size:
            low, high = _bounds(writer.view)
            spans.append((low, high, writer))
    spans.sort(key=lambda item: item[:2])
    alive: list[tuple[int, int, _Writer]] = []
    for low, high, writer in spans:
        alive = [item for item in alive if item[1] > low]
        for _, _, other in alive:
            if writer.view is not None and other.view is not None and _overlap(writer.view, other.view):
                raise ConfigError(
                    f"{escape(other.name)} and {escape(writer.name)} share memory, and are not the same elements of it",
                    hint="give each an array of its own, or make them one",
                )
        alive.append((low, high, writer))


def _out_of_the_way(given: Mapping[str, _Array], writers: Iterable[_Writer]) -> dict[str, _Array]:
    """Copy what lies in memory that will be written to: two arrays that change places would both be one of them."""
    targets = sorted(_bounds(writer.view) for writer in writers if writer.view is not None and writer.view.size)
    # What lies apart still may have bounds that meet, as two columns of a matrix: then the latest end counts.
    starts, ends = [low for low, _ in targets], list(accumulate((high for _, high in targets), max))

    def meets(array: _Array) -> bool:
        if not array.size:
            return False
        low, high = _bounds(array)
        before = bisect_left(starts, high)
        return before > 0 and ends[before - 1] > low

    return {name: array.copy() if meets(array) else array for name, array in given.items()}


def _bounds(array: _Array) -> tuple[int, int]:
    """Return the addresses of an array's first byte and of the one behind its last."""
    steps = [(length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)]
    start = array.ctypes.data
    return start + sum(min(0, step) for step in steps), start + sum(max(0, step) for step in steps) + array.itemsize


def _overlap(one: _Array, other: _Array) -> bool:
    try:
        return bool(np.shares_memory(one, other, max_work=10_000))  # type: ignore[arg-type] # it takes any number
    except np.exceptions.TooHardError:
        return True


# ---------------------------------------------------------------- modules of torch


def _assign_module(module: Any, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Put tensors in their places in a module. A tensor that is there already stays what it is."""
    try:
        module.load_state_dict(dict(new), strict=True, assign=True)
    except Exception as err:
        # A part that refuses the new may refuse the old as well; those that took the new come before it.
        with suppress(Exception):
            module.load_state_dict(dict(old), strict=False, assign=True)
        raise ShardingError(f"the module does not take its new parameters: {escape(str(err), limit=400)}") from err
    now = module.state_dict(keep_vars=True)
    if lost := [name for name in new if now[name].device.type == "meta"]:
        raise ShardingError(f"the module kept {escape(lost[0])} on the device meta")


def _require_followers(optimizers: Iterable[Any], parameters: Iterable[Any]) -> None:
    """Refuse what cannot follow a module to its new parameters, before it has any."""
    own = set(map(id, parameters))
    for optimizer in optimizers:
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
            found = escape(type(optimizer).__name__)
            raise ConfigError(f"optimizers: expected optimizers of torch, found {found}")
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                "optimizers: expected one that has parameters of the module, found one that has none of them",
                hint="was it left out when the module got the parameters that it has now?",
            )


def _follow(optimizers: Iterable[Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Let optimizers have the new parameters in the place of the old ones, with what they remember of each."""
    became = {id(old[name]): new[name] for name in old}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # The same list: LBFGS goes by a second reference to it.
            group["params"][:] = [became.get(id(parameter), parameter) for parameter in group["params"]]
        state = [(became.get(id(parameter), parameter), kept) for parameter, kept in optimizer.state.items()]
        optimizer.state.clear()
        optimizer.state.update(state)


# ---------------------------------------------------------------- tensor by tensor


_Key: TypeAlias = tuple[str, str]
"""A tensor of a checkpoint: its file's path, and its name there."""


class _Plan:
    """Which tensors go where, and what is read together, from the manifest alone.

    Attributes:
        sources: Name in the target of each tensor that is wanted.
    """

    def __init__(
        self, model: _Model, held: Held, names: Callable[[str], str | None] | None, roles: Sequence[Role]
    ) -> None:
        self.sources: dict[_Key, str] = {}
        given: dict[str, ManifestTensor] = {}
        files = held.trusted.manifest.files
        self._entries = [entry for entry in files if not entry.tensors]
        holding = [entry for entry in files if entry.tensors and entry.role in roles]
        full = name_tensors(NamedFile(e.path, e.parameter, tuple(t.name for t in e.tensors)) for e in holding)
        for entry in holding:
            n_before = len(self.sources)
            for tensor in entry.tensors:
                own = full[entry.path, tensor.name]
                name = own.replace("/", model.separator) if names is None else names(own)
                if name is None:
                    continue
                if name in given:
                    raise ConfigError(f"expected a name for each tensor, found {escape(name)} twice")
                given[name] = tensor
                self.sources[entry.path, tensor.name] = name
            if len(self.sources) > n_before:
                self._entries.append(entry)
        model.require({name: _Facts(tensor.dtype, tensor.shape) for name, tensor in given.items()})
        model.require_equal(given, lambda one, other: one.sha256 == other.sha256)
        taken = set(model.taken(given))
        self.sources = {key: name for key, name in self.sources.items() if name in taken}
        self._least = max([LEAST_BYTES, *(self._least_of(entry) for entry in self._entries)])

    def budget(self, budget: int | None) -> int:
        """Return how many bytes to stage in."""
        return self._least if budget is None else budget

    def _least_of(self, entry: FileEntry) -> int:
        if entry.size + _SLACK_BYTES <= LEAST_BYTES or not self._can_split(entry):
            return entry.size + _SLACK_BYTES
        return max(self._bytes(entry, [tensor]) for tensor in self._tensors(entry))

    def _can_split(self, entry: FileEntry) -> bool:
        # A bundle's data is read by an index beside it; a file without wanted tensors has no part to take.
        return entry.chunks is not None and entry.format not in {"tensorflow", "index"} and bool(self._tensors(entry))

    def _tensors(self, entry: FileEntry) -> list[ManifestTensor]:
        wanted = (t for t in entry.tensors if (entry.path, t.name) in self.sources)
        return sorted(wanted, key=lambda tensor: tensor.offset)

    def _ranges(self, entry: FileEntry, tensors: Iterable[ManifestTensor]) -> tuple[range, ...]:
        frame = framing(map(_spec_of, entry.tensors), entry.size)
        own = (part for t in tensors for part in byte_ranges(_spec_of(t), whole(t.shape)))
        return merged((*frame, *own))

    def _bytes(self, entry: FileEntry, tensors: Iterable[ManifestTensor]) -> int:
        ranges = self._ranges(entry, tensors)
        return widened(ranges, entry.size, has_chunks=True) + len(ranges) * _SLACK_BYTES

    def rounds(
        self, budget: int | None
    ) -> Iterator[tuple[dict[str, tuple[range, ...] | None], frozenset[_Key] | None]]:
        """Yield what to read in one pass, and which tensors that pass is for; None for all that are read."""
        room = self.budget(budget)
        large = [entry for entry in self._entries if entry.size + _SLACK_BYTES > room and self._can_split(entry)]
        together: dict[str, tuple[range, ...] | None] = {e.path: None for e in self._entries if e not in large}
        if together:
            yield together, None
        for entry in large:
            some: list[ManifestTensor] = []
            for tensor in self._tensors(entry):
                if (least := self._bytes(entry, [tensor])) > room:
                    raise StagingError(
                        f"{escape(entry.path)}: the tensor {escape(tensor.name)} takes {least:,} bytes at once, and "
                        f"there are {room:,} for it",
                        hint=f"give a memory budget of {least:,} bytes",
                    )
                if some and self._bytes(entry, [*some, tensor]) > room:
                    yield self._round(entry, some)
                    some = []
                some.append(tensor)
            yield self._round(entry, some)

    def _round(
        self, entry: FileEntry, tensors: Sequence[ManifestTensor]
    ) -> tuple[dict[str, tuple[range, ...] | None], frozenset[_Key]]:
        keys = frozenset((entry.path, tensor.name) for tensor in tensors)
        return {entry.path: self._ranges(entry, tensors)}, keys


class _Filler:
    """Puts tensors where they belong as they come."""

    def __init__(self, model: _Model, sources: Mapping[_Key, str]) -> None:
        self._sources = sources
        # All of them now: what cannot be written to is told before anything is.
        self._sinks = {name: _sink(name, model.leaves[name], anew=False) for name in sources.values()}
        _require_apart(sink for sink in self._sinks.values() if isinstance(sink, _Writer))
        self._written: list[str] = []

    def take_all(
        self, batches: Iterator[staging.StagedCheckpoint], policy: Policy, only: frozenset[_Key] | None
    ) -> None:
        """Take batch after batch."""
        for staged in batches:
            self._take(staged, policy, only)

    def _take(self, staged: staging.StagedCheckpoint, policy: Policy, only: frozenset[_Key] | None) -> None:
        """Admit a batch, and copy what is wanted of it."""
        for path, tree in decode(admit(staged, policy=policy)).items():
            for tensor in _host_tensors(tree):
                key = path, tensor.spec.name
                if key in self._sources and (only is None or key in only):
                    name = self._sources[key]
                    self._written.append(name)
                    # Of a tensor without dimensions, a part is a number and no array.
                    self._sinks[name].write(np.asarray(tensor.part(whole(tensor.spec.shape))))

    def finish(self) -> dict[str, Any]:
        """Return the new arrays; what was written in place is none."""
        left = self._sinks.keys() - set(self._written)
        if left:
            raise ShardingError(f"nothing was read for {escape(min(left))}")
        return {name: sink.finish() for name, sink in self._sinks.items() if not isinstance(sink, _Writer)}

    def undo(self) -> None:
        """Leave nothing of a checkpoint that was refused."""
        for name in self._written:
            sink = self._sinks[name]
            if isinstance(sink, _Writer):
                sink.clear()
        self._sinks.clear()


def _host_tensors(node: Any) -> Iterator[HostTensor | PartialTensor]:
    """Yield the tensors of what a file holds, in stored order."""
    if isinstance(node, (HostTensor, PartialTensor)):
        yield node
    elif hasattr(node, "items"):
        # A record has no `values`.
        for _, child in node.items():  # noqa: PERF102
            yield from _host_tensors(child)
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from _host_tensors(child)


def _spec_of(tensor: ManifestTensor) -> TensorSpec:
    """Return a row of the manifest as a row of the table; of inline bytes it is not known what they are."""
    dtype = DType(tensor.dtype, big_endian=tensor.byteorder == "big")
    extent = Extent(tensor.offset, tensor.nbytes, b"" if tensor.inline else None)
    return TensorSpec(tensor.name, dtype, tensor.shape, tensor.order, extent, strides=tensor.strides)
