"""`restore`, to put in place of the published `checkpoint.restore`; and JAX's compilation cache, kept private."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from safeload import loading
from safeload.agreeing import together
from safeload.errors import ConfigError, Finding, ShardingError, escape, reason
from safeload.expecting import Expectations
from safeload.formats.pickles.writing import shard_file
from safeload.grok1 import reading
from safeload.grok1.layout import SHARD_PATH
from safeload.grok1.published import RenameRules, by_name, get_load_path_str, say_restored
from safeload.grok1.reading import HeldFolder, Wanted, listed
from safeload.placing import Join, join_blocks
from safeload.policy import Policy
from safeload.tensors import TENSOR_FORMATS
from safeload.trust.store import Trust

if TYPE_CHECKING:
    from safeload.assembling import Mesh


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of the state, and where it comes from.

    Attributes:
        wanted: What it asks for.
        source: Its parameter's name in the checkpoint; None where it is taken from `init_state`.
    """

    wanted: Wanted
    source: str | None


def restore(  # noqa: PLR0917 - the published signature
    checkpoint_path: str | Path,
    state_shapes: Any,
    mesh: Mesh,
    between_hosts_config: tuple[int, ...],
    params_only: bool,  # noqa: FBT001 - see above
    state_sharding: Any,
    init_state: Any = None,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = "grok-1",
    memory_budget: int | str | None = None,
    quantized_class: type[Any] | None = None,
    load_rename_rules: RenameRules | None = None,
    load_exclude_rules: Sequence[str] | None = None,
    saved_between_hosts_config: tuple[int, ...] | None = None,
    saved_mesh_config: tuple[int, ...] | None = None,
    **expected: Unpack[Expectations],
) -> Any:
    """Return the training state of a checkpoint whose every byte a trusted key signed, as global `jax.Array`s.

    It takes what the published `checkpoint.restore` takes, by position or by keyword, and needs a manifest and trusted
    keys besides. Leaf i of `state_shapes` comes from `tensor{i}_000`, if the manifest names that file's parameter as
    the leaf is named, and the tensor has the leaf's shape and dtype. Everything that the specs, the mesh and the
    manifest can tell is held together before the first tensor is read.

    With `init_state` or with rules, leaves are found by the names that the manifest binds to files, and not by index.

    Args:
        checkpoint_path: The folder above `ckpt-0`. The manifest may have been signed for either of the two.
        state_shapes: The state with a shape and a dtype at each leaf (`jax.eval_shape` makes it), also where the file
            holds a quantised weight: then the shape is the weight's, and the dtype a float.
        mesh: The mesh; `(1, 8)` with axes `data`, `model` is what the published weights run on.
        between_hosts_config: Hosts along each axis of the mesh.
        params_only: Whether to return `state.params` alone.
        state_sharding: A `PartitionSpec`, or None for a replicated leaf, at each leaf of the state. One spec serves a
            weight and its scales.
        init_state: The state that the code begins with. Where the checkpoint lacks a parameter, or a rule excludes it,
            the leaf is taken from here; without it, either is an error. What the checkpoint has and the code lacks
            stays an error unless a rule excludes it.
        manifest: The manifest's envelope or its path, as `load` takes it.
        trust: The keys to trust, as `load` takes them.
        policy: The policy to hold the files against.
        memory_budget: The most bytes to stage; see `load`.
        quantized_class: The class for a quantised weight, called with `weight` and `scales` and known to JAX as a
            pytree; by default that of `safeload.records`.
        load_rename_rules: Pairs of a regular expression and a replacement, which turn a leaf's name into the
            checkpoint's; the first that is found counts.
        load_exclude_rules: Regular expressions; a leaf whose name one of them is found in is not loaded, nor is a
            parameter of the checkpoint.
        saved_between_hosts_config: Hosts along each axis of the mesh when the checkpoint was saved, if each of several
            wrote its block of every tensor; as `between_hosts_config` where None.
        saved_mesh_config: Devices along each axis of the mesh when it was saved; as `mesh` where None.
        **expected: What to hold the manifest against, as for `load`: a pin, a history, a revision.

    Raises:
        PolicyError: The files are not the tensors of this state: one finding lists the parameters that are missing in
            the checkpoint or in the code, and there is one for each that is missing, unexpected, otherwise named, or
            of another shape or dtype; or the policy does not allow what the files hold.
        VerificationError: The manifest is not signed by the trusted keys, or the files are not what it lists.
        FormatError: A file breaks its format.
        LimitError: A file asks for more than the policy's limits.
        ConfigError: An argument is not what is written above.
        StagingError: There is no room, or a file could not be read.
        ShardingError: The specs do not have the names of the state or do not fit the mesh; or blocks of several hosts
            do not make the tensors.
        HostError: Another process of the job did not answer.
    """
    # Late, so that names and layouts work without JAX, and signing starts fast.
    from safeload import assembling

    # What one process refuses, all do: also what is wrong with its arguments, or what it finds in the manifest.
    with together():
        if params_only and not hasattr(state_shapes, "params"):
            raise ConfigError("params_only: state_shapes has no attribute params")
        leaves, unflatten = assembling.named_leaves(state_shapes)
        wanted = [Wanted.of(name, leaf) for name, leaf in leaves]
        by_name(leaves, "state_shapes")
        specs = dict(assembling.named_leaves(state_sharding)[0])
        _require_equal_names([want.name for want in wanted], specs)
        shardings = {
            want.name: assembling.fit(mesh, specs[want.name], path=want.name, shape=want.shape) for want in wanted
        }
        hosts = saved_between_hosts_config or between_hosts_config
        saved_hosts = _axes("between_hosts_config", mesh, hosts)
        _require_processes(_axes("between_hosts_config", mesh, between_hosts_config), assembling.process_count())
        init = None
        if init_state is not None:
            init = by_name(assembling.named_leaves(init_state, is_leaf=reading.is_quantized)[0], "init_state")
        by_index = init is None and not load_rename_rules and not load_exclude_rules
        folder = reading.hold_folder(checkpoint_path, manifest=manifest, trust=trust, **expected)
        blocks = _blocks(folder)
        chosen = [
            _choose(want, blocks, init, load_rename_rules=load_rename_rules, load_exclude_rules=load_exclude_rules)
            for want in wanted
        ]
        _require_one_leaf_each(chosen)
        joins, files = _joins(chosen, blocks, specs, mesh, saved_hosts, saved_mesh_config)
        # By the manifest's word, so that hundreds of gigabytes are not read for nothing; the scan holds files to it.
        exclude = load_exclude_rules or ()
        reading.require_none(_findings(chosen, folder, blocks, joins, by_index=by_index, exclude=exclude))
        for leaf in chosen:
            say_restored(leaf.wanted.name, leaf.source, found=leaf.source in blocks)
        joined = {file for join in joins.values() for file in join.files}
        # What a rule excludes is verified with the rest, and left on the default device until this ends.
        place: dict[str, Any] = dict.fromkeys(
            path for path, entry in folder.entries.items() if entry.format in TENSOR_FORMATS and path not in joined
        )
        place |= {files[leaf.source]: shardings[leaf.wanted.name] for leaf in chosen if leaf.source is not None}
        loaded = loading.load_placed(
            folder.root,
            folder.held,
            policy=policy,
            memory_budget=memory_budget,
            place=place,
            joins=tuple(joins.values()),
        )
        reading.require_whole_values(loaded)
    made = [
        _initial(leaf.wanted, init or {}, shardings[leaf.wanted.name])
        if leaf.source is None
        else reading.with_class(loaded[files[leaf.source]], quantized_class)
        for leaf in chosen
    ]
    state = unflatten(made)
    return state.params if params_only else state


# ---------------------------------------------------------------- which file is which leaf's

Blocks = Mapping[str, Mapping[int, str]]
"""The files of each parameter that the manifest names, by the number of the process that saved them."""


def _blocks(folder: HeldFolder) -> Blocks:
    blocks: dict[str, dict[int, str]] = {}
    twice: list[Finding] = []
    for path, entry in folder.entries.items():
        if entry.parameter is None:
            continue
        match = SHARD_PATH.fullmatch(path)
        process = 0 if match is None else int(match["process"])
        other = blocks.setdefault(entry.parameter, {}).setdefault(process, path)
        if other != path:
            message = f"expected one file for {escape(entry.parameter)}, found {escape(other)} as well"
            twice.append(Finding("parameter-twice", message, file=path, hint="sign the checkpoint again"))
    reading.require_none(twice)
    return {name: dict(sorted(files.items())) for name, files in blocks.items()}


def _choose(
    wanted: Wanted,
    blocks: Blocks,
    init: Mapping[str, Any] | None,
    *,
    load_rename_rules: RenameRules | None,
    load_exclude_rules: Sequence[str] | None,
) -> _Leaf:
    source = get_load_path_str(wanted.name, load_rename_rules, load_exclude_rules)
    if source is not None and (source in blocks or init is None):
        return _Leaf(wanted, source)
    if init is None or wanted.name not in init:
        raise ConfigError(
            f"{escape(wanted.name)} is not loaded, and init_state does not have it",
            hint="give an init_state that has every parameter, or no rule that excludes this one",
        )
    return _Leaf(wanted, None)


def _require_one_leaf_each(chosen: Sequence[_Leaf]) -> None:
    takers: dict[str, str] = {}
    for leaf in chosen:
        if leaf.source is not None and takers.setdefault(leaf.source, leaf.wanted.name) != leaf.wanted.name:
            raise ConfigError(
                f"load_rename_rules give {escape(leaf.source)} to {escape(takers[leaf.source])} and to "
                f"{escape(leaf.wanted.name)}",
                hint="rename one of them only; let your code share the array",
            )


def _findings(
    chosen: Sequence[_Leaf],
    folder: HeldFolder,
    blocks: Blocks,
    joins: Mapping[str, Join],
    *,
    by_index: bool,
    exclude: Sequence[str],
) -> Iterator[Finding]:
    """Yield every way in which the listed files are not the leaves, in order of index, then the files left over."""
    asked = [leaf.source for leaf in chosen if leaf.source is not None]
    there = {name for name in blocks if name in asked or get_load_path_str(name, None, exclude) is not None}
    # Without any name, there is nothing to compare: each file says so below.
    differ = bool(blocks) and set(asked) != there
    if differ:
        yield reading.parameters_differ(asked, there)
    told: set[str] = set()
    for index, leaf in enumerate(chosen):
        if leaf.source is None:
            continue
        want, file = leaf.wanted, folder.prefix + shard_file(index)
        here = folder.entries.get(file)
        found = blocks.get(leaf.source)
        if found is None:
            told.add(file)
            if by_index and here is not None:
                yield reading.misnamed(file, want, here)
            else:
                yield reading.missing(file, want)
            continue
        told.update(found.values())
        # Where a parameter too many or too few has moved all that come after it, that is told once.
        if by_index and not differ and file not in found.values() and here is not None:
            yield reading.misnamed(file, want, here)
        yield from _unfit(want, folder, found, joins.get(leaf.source))
    for path, entry in folder.entries.items():
        if path not in told and entry.format in TENSOR_FORMATS and entry.parameter in {None, *there}:
            yield reading.unexpected(path, entry, len(chosen))


def _unfit(wanted: Wanted, folder: HeldFolder, found: Mapping[int, str], join: Join | None) -> Iterator[Finding]:
    first, *others = found.values()
    tensors = reading.promised(folder.entries[first])
    if join is None:
        yield from reading.differences(first, wanted, tensors)
        return
    whole = {name: (dtype, join.shape(shape)) for name, (dtype, shape) in tensors.items()}
    yield from reading.differences(first, wanted, whole)
    for other in others:
        if reading.promised(folder.entries[other]) != tensors:
            message = f"expected a block of {escape(wanted.name)} of the same dtype and shape as {escape(first)} has"
            yield Finding("shape-mismatch", f"{message}; found another", file=other)


# ---------------------------------------------------------------- blocks of several hosts


def _axes(what: str, mesh: Mesh, counts: Iterable[int]) -> Mapping[str, int]:
    """Return the counts by the names of the mesh's axes."""
    numbers = tuple(counts)
    if len(numbers) != len(mesh.axis_names) or not all(n > 0 for n in numbers):
        raise ShardingError(
            f"{what}: expected a positive number for each axis of the mesh ({listed(mesh.axis_names)}), found {numbers}"
        )
    return dict(zip(mesh.axis_names, numbers, strict=True))


def _require_processes(hosts: Mapping[str, int], n_processes: int) -> None:
    n_hosts = 1
    for count in hosts.values():
        n_hosts *= count
    if n_hosts != n_processes:
        raise ShardingError(
            f"expected between_hosts_config for {n_processes} process(es), found {tuple(hosts.values())}",
            hint="it says how many hosts run now; saved_between_hosts_config says how many saved the checkpoint",
        )


def _joins(  # noqa: PLR0917 - the parts of one call of `restore`
    chosen: Sequence[_Leaf],
    blocks: Blocks,
    specs: Mapping[str, Any],
    mesh: Mesh,
    hosts: Mapping[str, int],
    saved_mesh_config: tuple[int, ...] | None,
) -> tuple[Mapping[str, Join], Mapping[str, str]]:
    """Return how the blocks of each parameter make it, where there are several, and what each is called when loaded."""
    saved_mesh = dict(mesh.shape) if saved_mesh_config is None else _axes("saved_mesh_config", mesh, saved_mesh_config)
    joins: dict[str, Join] = {}
    files: dict[str, str] = {}
    for leaf in chosen:
        found = blocks.get(leaf.source or "", {})
        if leaf.source is None or not found:
            continue
        if len(found) == 1:
            (files[leaf.source],) = found.values()
            continue
        if indivisible := [axis for axis, count in hosts.items() if saved_mesh[axis] % count]:
            raise ShardingError(
                f"expected a mesh that {hosts[indivisible[0]]} hosts divide along {indivisible[0]}, found "
                f"{saved_mesh[indivisible[0]]}",
                hint="say with saved_mesh_config how the mesh was when the checkpoint was saved",
            )
        local = {axis: saved_mesh[axis] // count for axis, count in hosts.items()}
        spec = specs[leaf.wanted.name]
        joins[leaf.source] = join_blocks(
            leaf.source, tuple(found.values()), None if spec is None else tuple(spec), hosts=hosts, local=local
        )
        files[leaf.source] = leaf.source
    return joins, files


def _initial(wanted: Wanted, init: Mapping[str, Any], sharding: Any) -> Any:
    """Return a leaf of `init_state`, placed as the loaded ones are."""
    from safeload import assembling

    value = init[wanted.name]
    first = value.weight if reading.is_quantized(value) else value
    found = str(getattr(first, "dtype", type(first).__name__)), tuple(getattr(first, "shape", ()))
    dtype = wanted.dtype if first is value else "int8"
    if found != (dtype, wanted.shape):
        raise ConfigError(
            f"init_state: {escape(wanted.name)}: expected {dtype} {wanted.shape}, found {found[0]} {found[1]}"
        )
    return assembling.put(value, sharding, path=wanted.name)


def _require_equal_names(state: Iterable[str], sharding: Iterable[str]) -> None:
    in_state, in_sharding = set(state), set(sharding)
    if in_state != in_sharding:
        raise ShardingError(
            "state_shapes and state_sharding do not name the same parameters: "
            f"without a shape: {listed(in_sharding - in_state)}; without a sharding: {listed(in_state - in_sharding)}"
        )


# ---------------------------------------------------------------- compiled programs


def enable_compilation_cache(directory: str | Path) -> None:
    """Let JAX keep compiled programs in a directory of the user's own, so that the next start need not compile them.

    What lies there is run as it is: whoever can write there runs code in every process that uses it. So the directory
    must belong to the user of this process, and nobody else may so much as look into it. It is made if it is not there.
    JAX keeps what takes a second and more to compile.

    Args:
        directory: Where to keep them; not in the checkpoint, nor anywhere that others can write to.

    Raises:
        ConfigError: It cannot be made, is no directory, belongs to somebody else, or others have rights in it.
    """
    path = Path(os.path.abspath(directory))  # noqa: PTH100 - resolving would follow a link that is refused below
    hint = f"choose another, or make it yours alone: chmod 700 {escape(str(path))}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot make {escape(str(path))}: {reason(err)}", hint=hint) from err
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"expected a directory at {escape(str(path))}, found something else", hint=hint)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        found = f"owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):o}"
        raise ConfigError(
            f"expected {escape(str(path))} to be of user {os.geteuid()} with mode 700, found {found}", hint=hint
        )
    # Late: a wrong directory is told without JAX.
    from safeload import assembling

    assembling.use_compilation_cache(str(path))
