"""The smaller functions of the published `checkpoint.py`: by the same names, with the same arguments.

They differ where the originals trust what they read: a pickle is parsed and never executed, and needs a manifest and
trusted keys; nothing passes through named shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from safeload.errors import ConfigError, StagingError, escape, reason
from safeload.expecting import Expectations
from safeload.formats.pickles.writing import shard_file, write_shard
from safeload.grok1 import reading
from safeload.policy import DEFAULT_POLICY, Policy
from safeload.records import QuantizedWeight8bit, Record
from safeload.saving import host_array, publishing_file
from safeload.trust.store import Trust

logger = logging.getLogger("rank")
"""Where the published code says what became of each parameter."""

RenameRules = Sequence[tuple[str, str]]
"""Pairs of a regular expression and its replacement, as `re.sub` takes them; the first that is found counts."""


@contextlib.contextmanager
def copy_to_shm(file: str) -> Iterator[str]:
    """Yield the file's own path: what is read is staged in private memory, and a copy under a name gains nothing.

    The published function copies the file to /dev/shm, where a container has 64 MB, and reads that.
    """
    yield file


@contextlib.contextmanager
def copy_from_shm(file: str) -> Iterator[str]:
    """Yield the path of a new file to write, which becomes `file` whole, and on disk, if no exception is raised.

    The published function writes to /dev/shm and copies from there, so that a full disk leaves half a file.

    Raises:
        StagingError: The file could not be made or put in its place.
    """
    with publishing_file(file) as fresh:
        yield str(fresh)


def fast_unpickle(
    path: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    memory_budget: int | str | None = None,
    quantized_class: type[Any] | None = None,
    **expected: Unpack[Expectations],
) -> Any:
    """Return what a pickle of tensors holds, once its bytes are those that a trusted key signed.

    It is parsed, and nothing in it is called: what the published function runs, this one refuses. Arrays are read-only
    views of private memory.

    Args:
        path: The file. Its directory, or the one above a `ckpt-0`, is what the manifest lists; of its other files only
            names and lengths are looked at.
        manifest: The manifest's envelope or its path, as `load` takes it.
        trust: The keys to trust, as `load` takes them.
        policy: What may be in the file.
        memory_budget: Most bytes to stage in.
        quantized_class: The class for a quantized weight, called with `weight` and `scales`.
        **expected: What to hold the manifest against, as for `load`.

    Raises:
        VerificationError: The manifest is not signed by the trusted keys, does not list the file, or the file or its
            directory is not what it lists.
        FormatError: The file breaks its format.
        LimitError: The file asks for more than the policy's limits.
        PolicyError: The file holds what the policy does not allow.
        ConfigError: An argument is wrong.
        StagingError: There is no room, or the file could not be read.
    """
    path = Path(path)
    folder = reading.hold_folder_of(path.parent, manifest=manifest, trust=trust, **expected)
    file = folder.prefix + path.name
    values = reading.read_files(folder, [file], policy=policy, memory_budget=memory_budget)
    if file not in values:
        raise ConfigError(f"{escape(str(path))} is no file of tensors", hint="name a file that holds a pickle")
    return reading.with_class(values[file], quantized_class)


def fast_pickle(obj: Any, path: str | Path) -> None:
    """Write an array or a quantized weight as a pickle, whole or not at all: the bytes that CPython's pickler makes.

    Args:
        obj: A numpy or jax array, or a quantized weight of any class with that name. Nothing else is written, as
            nothing else is read.
        path: The file to make or to replace.

    Raises:
        ConfigError: `obj` is something else.
        StagingError: The file could not be written.
    """
    if reading.is_quantized(obj):
        made: Any = QuantizedWeight8bit
        value: Any = made(host_array("weight", obj.weight), host_array("scales", obj.scales))
    elif isinstance(obj, Record):
        value = type(obj)(**{name: host_array(name, field) for name, field in obj.items()})
    elif hasattr(obj, "dtype") and hasattr(obj, "shape"):
        value = host_array("the array", obj)
    else:
        raise ConfigError(f"expected an array or a quantized weight to write, found {type(obj).__name__}")
    with publishing_file(path) as fresh:
        try:
            with fresh.open("wb") as file:
                write_shard(file, value)
        except TypeError as err:
            raise ConfigError(f"cannot write it: {escape(str(err))}") from err
        except OSError as err:
            raise StagingError(f"cannot write {escape(str(path))}: {reason(err)}") from err


def load_tensors(
    shaped_arrays: Sequence[Any],
    directory: str | Path,
    mesh_config: Sequence[int],  # noqa: ARG001 - see its description
    tensor_indices: Sequence[int] | None = None,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = "grok-1",
    memory_budget: int | str | None = None,
    quantized_class: type[Any] | None = None,
    **expected: Unpack[Expectations],
) -> list[Any]:
    """Return the tensors that this process has to load, verified, in host memory: `tensor{index}_{process}` of each.

    The tensors carry no names here, so nothing can hold them against any but their shape and dtype; `restore` does.

    Args:
        shaped_arrays: A shape and a dtype for each; those of the block, where several processes saved.
        directory: The folder of the files.
        mesh_config: Not used, as the published number of replicas is 1, with which it cancels out.
        tensor_indices: The index of each; 0, 1, 2, ... where None.
        manifest: The manifest's envelope or its path, as `load` takes it.
        trust: The keys to trust, as `load` takes them.
        policy: What may be in the files.
        memory_budget: Most bytes to stage in.
        quantized_class: The class for a quantized weight, called with `weight` and `scales`.
        **expected: What to hold the manifest against, as for `load`.

    Returns:
        An array or a quantized weight for each: read-only views of private memory.

    Raises:
        PolicyError: A file is missing, or a tensor has another shape or dtype; or the policy refuses a file.
        VerificationError: The manifest is not signed by the trusted keys, or the files are not what it lists.
        FormatError: A file breaks its format.
        LimitError: A file asks for more than the policy's limits.
        ConfigError: An argument is wrong.
        StagingError: There is no room, or a file could not be read.
    """
    # Late, so that names and layouts work without JAX.
    from safeload import assembling

    shaped = list(shaped_arrays)
    indices = range(len(shaped)) if tensor_indices is None else list(tensor_indices)
    if len(indices) != len(shaped):
        raise ConfigError(f"expected an index for each of {len(shaped)} tensors, found {len(indices)}")
    folder = reading.hold_folder_of(Path(directory), manifest=manifest, trust=trust, **expected)
    try:
        process = assembling.process_index()
        files = [folder.prefix + shard_file(index, process) for index in indices]
    except ValueError as err:
        raise ConfigError(f"tensor_indices: {escape(str(err))}") from err
    wanted = {}
    for index, file, leaf in zip(indices, files, shaped, strict=True):
        entry = folder.entries.get(file)
        name = f"tensor {index}" if entry is None or entry.parameter is None else entry.parameter
        wanted[file] = reading.Wanted.of(name, leaf)
    reading.require_none(
        finding
        for file, want in wanted.items()
        for finding in (
            reading.differences(file, want, reading.promised(folder.entries[file]))
            if file in folder.entries
            else [reading.missing(file, want)]
        )
    )
    values = reading.read_files(folder, files, policy=policy, memory_budget=memory_budget, process=process)
    reading.require_whole_values(values)
    return [reading.with_class(values[file], quantized_class) for file in files]


def path_tuple_to_string(path: Sequence[Any]) -> str:
    """Return a key path of JAX as `a/b/c`: keys of dicts and names of attributes, without positions.

    Raises:
        ConfigError: A key is of another kind.
    """
    kinds = {"DictKey": "key", "GetAttrKey": "name"}
    pieces = []
    for element in path:
        kind = type(element).__name__
        if kind in kinds:
            pieces.append(str(getattr(element, kinds[kind])))
        elif kind not in {"FlattenedIndexKey", "SequenceKey"}:
            raise ConfigError(f"expected a key path of JAX, found {escape(kind)} in it")
    return "/".join(pieces)


def get_load_path_str(
    init_path_str: str,
    load_rename_rules: RenameRules | None = None,
    load_exclude_rules: Sequence[str] | None = None,
) -> str | None:
    """Return the name in the checkpoint of a parameter of the code; None for one that is not to be loaded.

    Args:
        init_path_str: Its name in the code.
        load_rename_rules: The first whose expression is found renames it.
        load_exclude_rules: Expressions; one that is found leaves it out.

    Raises:
        ConfigError: An expression is none, or its replacement does not fit it.
    """
    try:
        if any(re.search(pattern, init_path_str) for pattern in load_exclude_rules or ()):
            return None
        for pattern, replacement in load_rename_rules or ():
            if re.search(pattern, init_path_str):
                return re.sub(pattern, replacement, init_path_str)
    except (re.error, IndexError) as err:
        raise ConfigError(f"a rule for loading is no regular expression: {escape(str(err))}") from err
    return init_path_str


def replace_with_load_state(
    init_state: Any,
    load_state: Any,
    load_rename_rules: RenameRules | None = None,
    load_exclude_rules: Sequence[str] | None = None,
    mesh_config: tuple[int, ...] = (1, 1),  # noqa: ARG001 - as for `load_tensors`
) -> Any:
    """Return `init_state` with every leaf replaced by the loaded one of its name, where there is one.

    A quantized weight is one leaf. Both states are in memory already, so that nothing is read or verified here.

    Args:
        init_state: What gives the structure, and the leaves that are excluded or not found.
        load_state: What was loaded.
        load_rename_rules: See `get_load_path_str`.
        load_exclude_rules: See `get_load_path_str`.
        mesh_config: Not used.

    Raises:
        ConfigError: Two leaves of a state have one name, or a rule is no regular expression.
        ShardingError: JAX cannot flatten a state.
    """
    from safeload import assembling

    wanted, unflatten = assembling.named_leaves(init_state, is_leaf=reading.is_quantized)
    loaded = by_name(assembling.named_leaves(load_state, is_leaf=reading.is_quantized)[0], "load_state")
    by_name(wanted, "init_state")
    replaced = []
    for name, leaf in wanted:
        source = get_load_path_str(name, load_rename_rules, load_exclude_rules)
        say_restored(name, source, found=source in loaded)
        replaced.append(loaded[source] if source is not None and source in loaded else leaf)
    return unflatten(replaced)


def by_name(leaves: Sequence[tuple[str, Any]], what: str) -> Mapping[str, Any]:
    """Return leaves by their names.

    Raises:
        ConfigError: Two have one name.
    """
    twice = [name for name, times in Counter(name for name, _ in leaves).items() if times > 1]
    if twice:
        raise ConfigError(f"{what}: expected a name for each leaf, found {escape(twice[0])} twice")
    return dict(leaves)


def say_restored(name: str, source: str | None, *, found: bool) -> None:
    """Log what becomes of a parameter, as the published code does."""
    shown = escape(name)
    if source is None:
        logger.info("Excluded from restore: %s.", shown)
    elif not found:
        logger.info("Not found in ckpt: %s.", shown)
    elif source == name:
        logger.info("Restored from ckpt: %s.", shown)
    else:
        logger.info("Restored from ckpt: %s <-- %s.", shown, escape(source))
