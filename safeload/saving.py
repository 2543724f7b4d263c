"""Save: arrays to a signed checkpoint that appears whole or not at all.

Everything is written to a directory beside the target, brought to disk, signed, and put in the target's place by one
rename; where there is a checkpoint already, the two are exchanged in one step (renameat2 with RENAME_EXCHANGE). So
whatever ends the process, at any moment, the target is the old checkpoint or the new one, and with its manifest in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np

from safeload.errors import ConfigError, DigestMismatchError, Finding, StagingError, escape, reason
from safeload.files import lies_in, publish
from safeload.formats.pickles.writing import Sink, shard_file, write_shard
from safeload.formats.safetensors_writing import SAFETENSORS_NAMES, write_safetensors
from safeload.manifest import RestoreKind, Role
from safeload.policy import DEFAULT_POLICY, Policy
from safeload.publishing import describe
from safeload.records import QuantizedWeight8bit, Record
from safeload.report import Progress
from safeload.signing import sign_manifest
from safeload.tensors import DTYPE_ITEMSIZE

if TYPE_CHECKING:
    from safeload.trust.keys import SecretKey

MANIFEST_NAME = "manifest.json"
"""What the manifest is called that lies in the directory which it lists."""

SHARD_BYTES = 5_000_000_000
"""Tensors of one safetensors file, at most: what Hugging Face's `save_pretrained` has for `max_shard_size` ("5GB")."""

GROK1_FOLDER = "ckpt-0"
"""The folder that Grok-1's published code reads, below the path that it is given; 0 is the training step."""

_MAX_GROK1_TENSORS = 100_000
"""Five digits of a file's name count them."""

_PARTIAL = ".partial"

_RENAME_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_AT_FDCWD = -100  # of fcntl.h: paths are relative to the working directory

_LIBC = ctypes.CDLL(None, use_errno=True)


class Stated(TypedDict, total=False):
    """What a manifest states besides its files; see `safeload.sign`, which takes the same.

    Attributes:
        version: Counts the manifests of the model, from 1.
        epoch: Goes before `version`.
        expires: When it stops to be current, with its time zone.
        previous: SHA-256 of the payload of the manifest that this one replaces.
        kind: What a restore is for.
        require: Roles that such a restore needs besides.
        policy: What may be in the files; what it refuses is not published.
        blake3: Whether to add the BLAKE3 digest of each file.
        progress: Told how far the hashing has come.
    """

    version: int
    epoch: int
    expires: datetime | None
    previous: str | None
    kind: RestoreKind
    require: Sequence[Role]
    policy: str | Path | Policy
    blake3: bool
    progress: Progress | None


def save(
    tree: Any,
    directory: str | Path,
    *,
    layout: Literal["grok-1", "safetensors"],
    keys: Sequence[SecretKey],
    model: str,
    revision: str,
    manifest: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
    **stated: Unpack[Stated],
) -> Path:
    """Write a pytree of arrays as a signed checkpoint, which appears whole or not at all, and return the manifest.

    The manifest is `manifest.json` in the directory, and comes and goes with it in one step: a reader who opens both
    while a checkpoint is being replaced finds the old files, the new ones, or a refusal if it took the manifest of the
    one and the files of the other; never a mixture that is accepted. Killed at any moment, the directory is the old
    checkpoint or the new one. A directory `.NAME.*.partial` that a killed process left beside it goes with the next
    save. The parent directory must be one where nobody else can write.

    Args:
        tree: Dicts, lists, tuples and records of numpy or jax arrays, named by their `/`-joined paths in JAX's order.
            Any other pytree that JAX knows will do where JAX is installed. None is nothing. What lies on devices is
            copied to the host for one file at a time; big-endian and Fortran-ordered arrays are written as
            little-endian ones in C order. Every array must be of this process alone.
        directory: What to make.
        layout: "grok-1": `ckpt-0/tensor00000_000` and so on, one file for each array or quantized weight, as the
            published code reads them, bound to their names by the manifest. "safetensors": `model.safetensors`, or
            several and `model.safetensors.index.json`; a record is one tensor for each field, `name/field`.
        keys: Private keys to sign with, one signature each.
        model: Name of the model.
        revision: Which state of it.
        manifest: Where to write the manifest in place of that: outside the directory, after it is there. Only for a
            directory that is new, as two places cannot be exchanged in one step.
        shard_bytes: Most bytes of tensors in one safetensors file, unless one tensor has more.
        replace: Whether a directory that is there may be replaced; what is in it is removed.
        **stated: What the manifest says besides; see `Stated`.

    Returns:
        The path of the manifest.

    Raises:
        ConfigError: An argument is wrong, a leaf is no array that the layout can hold, or the directory is there and
            is not to be replaced.
        PolicyError: The policy refuses what was written; nothing was published.
        ManifestError: A role that the kind needs is missing; nothing was published.
        DigestMismatchError: What was read back to be signed is not what was written; nothing was published.
        StagingError: A file could not be written, or the file system cannot exchange two directories.
        ShardingError: JAX cannot flatten the tree.
    """
    if layout not in ("grok-1", "safetensors"):
        raise ConfigError(f"layout: expected grok-1 or safetensors, found {escape(str(layout))!r}")
    require_writable(keys, shard_bytes)
    directory = Path(directory)
    inside = directory / MANIFEST_NAME if manifest is None else Path(manifest)
    try:
        is_inside = _same_place(inside.parent, directory)
    except ValueError as err:
        raise ConfigError(f"expected paths, found one that is none: {reason(err)}", hint="check the paths") from err
    if not is_inside and lies_in(inside, directory):
        raise ConfigError(
            f"expected a manifest at the top of the directory or outside, found {escape(str(inside))}",
            hint=f"leave `manifest` out, and it is {MANIFEST_NAME} at the top",
        )
    if not is_inside and not inside.parent.is_dir():
        # Told now: once the files are there, what is wrong with the manifest's place would leave them without one.
        raise ConfigError(f"expected a directory for the manifest, found none at {escape(str(inside.parent))}")
    if replace and not is_inside:
        raise ConfigError(
            "a manifest outside cannot be replaced in one step with its directory",
            hint="leave `manifest` out, and it is written into the directory; or save to a new directory",
        )
    leaves = _leaves(tree)
    if not leaves:
        raise ConfigError("expected a tree with at least one array, found none")
    with publishing_directory(directory, replace=replace) as fresh:
        writer = _Writer(fresh)
        parameters = _write_grok1(writer, leaves) if layout == "grok-1" else {}
        if layout == "safetensors":
            _write_safetensors(writer, leaves, shard_bytes)
        made, _ = describe(
            fresh,
            model=model,
            revision=revision,
            parameters=parameters,
            **{"policy": DEFAULT_POLICY, **stated},  # type: ignore[arg-type] # a TypedDict of describe's own arguments
        )
        require_equal_digests(writer.sha256, {file.path: file.sha256 for file in made.files})
        envelope = sign_manifest(made, keys)
        if is_inside:
            if inside.name in {path.split("/")[0] for path in writer.sha256}:
                raise ConfigError(f"manifest: {escape(inside.name)} is the name of a file of the checkpoint")
            publish(fresh / inside.name, envelope)
    if not is_inside:
        publish(inside, envelope)
    return inside


def _same_place(first: Path, second: Path) -> bool:
    return os.path.realpath(first) == os.path.realpath(second)


def require_writable(keys: Sequence[SecretKey], shard_bytes: int) -> None:
    """Refuse what no signed checkpoint can be written with.

    Raises:
        ConfigError: There is no key to sign with, or a shard would hold nothing.
    """
    if not keys:
        raise ConfigError("keys: expected at least one secret key to sign with, found none")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes: expected at least 1, found {shard_bytes}")


def require_equal_digests(written: Mapping[str, str], read: Mapping[str, str]) -> None:
    """Refuse to sign what is not what was written: whatever came between, the signature would vouch for it.

    Args:
        written: SHA-256 of each file as it was written, by path.
        read: SHA-256 of each file as it was read back to be signed.

    Raises:
        DigestMismatchError: Two differ, or one is missing on either side.
    """
    findings = [
        Finding(
            "digest-mismatch",
            f"expected sha256:{written.get(path)}, which was written; found sha256:{read.get(path)}",
            file=path,
            hint="nothing was published; check the disk, and who else writes there",
        )
        for path in sorted(written.keys() | read.keys())
        if written.get(path) != read.get(path)
    ]
    if findings:
        raise DigestMismatchError(*findings)


# ---------------------------------------------------------------- files of the two layouts


class _Hashing:
    """A sink that hashes what it passes on."""

    def __init__(self, file: Sink) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes | memoryview, /) -> None:
        self.digest.update(data)
        self._file.write(data)


class _Writer:
    """Writes new files below a directory, and remembers the digest of each.

    Attributes:
        sha256: Digest of what was written to each file, by its path below the directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.sha256: dict[str, str] = {}

    def write(self, path: str, put: Callable[[Sink], object]) -> None:
        """Make the file `path` with what `put` writes.

        Raises:
            StagingError: The file could not be written.
        """
        target = self._directory / path
        try:
            target.parent.mkdir(exist_ok=True)
            with target.open("xb") as file:
                sink = _Hashing(file)
                put(sink)
        except OSError as err:
            raise StagingError(f"cannot write {escape(path)}: {reason(err)}", hint="is there room?") from err
        self.sha256[path] = sink.digest.hexdigest()


def _write_grok1(writer: _Writer, leaves: Sequence[tuple[str, Any]]) -> Mapping[str, str]:
    """Write one file for each leaf, and return the parameter of each file."""
    if len(leaves) > _MAX_GROK1_TENSORS:
        raise ConfigError(f"the layout grok-1 has room for {_MAX_GROK1_TENSORS} tensors, found {len(leaves)}")
    parameters: dict[str, str] = {}
    for index, (name, leaf) in enumerate(leaves):
        file = f"{GROK1_FOLDER}/{shard_file(index)}"
        if isinstance(leaf, Record):
            value: Any = type(leaf)(**{field: host_array(f"{name}/{field}", child) for field, child in leaf.items()})
        else:
            value = host_array(name, leaf)
        writer.write(file, partial(write_shard, value=value))
        parameters[file] = name
    return parameters


def _write_safetensors(writer: _Writer, leaves: Sequence[tuple[str, Any]], shard_bytes: int) -> None:
    """Write one file, or several and their index (transformers: `SAFE_WEIGHTS_INDEX_NAME`)."""
    tensors: dict[str, Any] = {}
    for name, leaf in leaves:
        fields = (
            {f"{name}/{field}": child for field, child in leaf.items()} if isinstance(leaf, Record) else {name: leaf}
        )
        for path, child in fields.items():
            if path in tensors:
                raise ConfigError(f"expected a name for each tensor, found {escape(path)} twice")
            if child.dtype.name not in SAFETENSORS_NAMES:
                raise ConfigError(f"{escape(path)}: safetensors has no dtype {child.dtype.name}")
            tensors[path] = child
    shards: list[list[str]] = [[]]
    filled = 0
    for name, leaf in tensors.items():
        if shards[-1] and filled + leaf.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += leaf.nbytes
    of = len(shards)
    files = [f"model-{i:05d}-of-{of:05d}.safetensors" for i in range(1, of + 1)] if of > 1 else ["model.safetensors"]
    for file, names in zip(files, shards, strict=True):
        arrays = {name: host_array(name, tensors[name]) for name in names}
        try:
            writer.write(file, partial(write_safetensors, arrays=arrays))
        except TypeError as err:  # a name that the format cannot hold
            raise ConfigError(f"safetensors: {escape(str(err))}") from err
    if of > 1:
        index = {
            "metadata": {"total_size": sum(leaf.nbytes for leaf in tensors.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        writer.write("model.safetensors.index.json", lambda sink: sink.write(text.encode("ascii")))


# ---------------------------------------------------------------- what there is to write


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the arrays and records of a tree with their names, in JAX's order: the keys of a dict sorted."""
    leaves = list(_walk(tree, ()))
    twice = [name for name, times in Counter(name for name, _ in leaves).items() if times > 1]
    if twice:
        raise ConfigError(f"expected a name for each leaf, found {escape(twice[0])} twice")
    return leaves


_MAX_DEPTH = 64
"""Most levels of a tree; a deeper one is one that holds itself."""


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    name = "/".join(path)
    if len(path) > _MAX_DEPTH:
        raise ConfigError(f"expected at most {_MAX_DEPTH} levels in a tree, found more", hint="does it hold itself?")
    if node is None:
        return
    if hasattr(node, "dtype") and hasattr(node, "shape"):
        _require_writable(name, node)
        yield name, node
    elif isinstance(node, Record):
        for field, child in node.items():
            _require_writable(f"{name}/{field}", child)
        yield name, node
    elif isinstance(node, Mapping):
        for key in _ordered(node, name):
            yield from _walk(node[key], (*path, str(key)))
    elif isinstance(node, tuple) and hasattr(node, "_fields"):
        for field in node._fields:
            yield from _walk(getattr(node, field), (*path, field))
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from _walk(child, (*path, str(index)))
    elif type(node).__name__ == QuantizedWeight8bit.__name__ and hasattr(node, "weight") and hasattr(node, "scales"):
        # Model code has a class of its own for it, of which we know no more than that.
        made: Any = QuantizedWeight8bit
        yield from _walk(made(node.weight, node.scales), path)
    else:
        yield from _walk_foreign(node, path)


def _ordered(node: Mapping[Any, Any], name: str) -> list[Any]:
    keys = list(node)
    if isinstance(node, OrderedDict):
        return keys  # as JAX keeps it
    try:
        return sorted(keys)
    except TypeError as err:
        raise ConfigError(f"{escape(name) or 'the tree'}: expected keys that have an order, found others") from err


def _walk_foreign(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    name = "/".join(path)
    found = type(node).__name__
    refusal = ConfigError(
        f"{escape(name) or 'the tree'}: expected arrays in dicts, lists, tuples and records, found {found}",
        hint="a number has to be an array: numpy.float32(0.1)",
    )
    try:
        # Late: only a pytree of somebody's own needs JAX.
        from safeload import assembling
    except ImportError:
        raise refusal from None
    leaves, _ = assembling.named_leaves(node)
    if any(leaf is node for _, leaf in leaves):
        raise refusal
    for below, leaf in leaves:
        yield from _walk(leaf, (*path, *below.split("/")))


def _require_writable(name: str, leaf: Any) -> None:
    dtype = getattr(leaf, "dtype", None)
    if getattr(dtype, "name", None) not in DTYPE_ITEMSIZE or not hasattr(leaf, "nbytes"):
        found = type(leaf).__name__ if dtype is None else dtype
        raise ConfigError(f"{escape(name)}: expected an array of a dtype that safeload reads, found {found}")
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise ConfigError(
            f"{escape(name)}: expected an array, found one with values masked out, which no layout can say",
            hint="fill it first: numpy.ma.filled",
        )
    if not getattr(leaf, "is_fully_addressable", True):
        raise ConfigError(
            f"{escape(name)}: other processes hold parts of it",
            hint="gather it first: jax.experimental.multihost_utils.process_allgather",
        )


def host_array(name: str, leaf: Any) -> np.ndarray:
    """Return an array as the writers take it: in this process's memory, little-endian, in C order.

    Args:
        name: What to call it in an error.
        leaf: A numpy or a jax array; of the latter, this is when it is copied from its devices.

    Raises:
        ConfigError: It cannot be copied to the host.
    """
    try:
        array = np.asarray(leaf)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        # asarray and not ascontiguousarray, which makes a scalar one-dimensional.
        array = np.asarray(array, order="C")
    except Exception as err:  # JAX has errors that share no other base: a deleted or a donated array
        raise ConfigError(f"{escape(name)}: cannot be copied to the host: {escape(str(err))}") from err
    return array.view(np.ndarray)


# ---------------------------------------------------------------- a file or a directory, whole or not at all


@contextlib.contextmanager
def publishing_file(target: str | Path) -> Iterator[Path]:
    """Lend the path of a new file beside `target`, which takes its place when the context is left.

    It is brought to disk and renamed, and replaces a regular file that is there. With an exception it vanishes.

    Yields:
        The path, at which there is an empty file.

    Raises:
        StagingError: The file could not be made, brought to disk or renamed; or what is at `target` is no regular file.
    """
    target = Path(target)
    fresh = target.with_name(f".{secrets.token_hex(8)}.tmp") if target.name else target
    try:
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise StagingError(f"cannot replace {escape(str(target))}: it is no regular file")
        fresh.touch(exist_ok=False)
    except (OSError, ValueError) as err:
        raise StagingError(f"cannot write {escape(str(target))}: {reason(err)}") from err
    try:
        yield fresh
        try:
            _sync(fresh)
            fresh.replace(target)
            _sync(target.parent)
        except OSError as err:
            raise StagingError(f"cannot write {escape(str(target))}: {reason(err)}") from err
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


@contextlib.contextmanager
def publishing_directory(target: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Lend a new directory beside `target`, which takes its place when the context is left without an exception.

    When the context is left, every file and directory in it is brought to disk, and then it becomes `target` in one
    step; before that step nothing is at `target`, or what was there. With an exception it vanishes instead. It holds
    regular files and directories only.

    Args:
        target: What the directory shall be called. Its parent must exist.
        replace: Whether a directory with something in it may be there. The two are exchanged in one step, and the old
            one is removed.

    Yields:
        The new, empty directory. One that a killed process left behind for the same target is removed before.

    Raises:
        ConfigError: `target` is no name, or it is there, and is no directory that may be replaced.
        StagingError: A directory could not be made, brought to disk or renamed, or what is in it is no regular file;
            or the file system cannot exchange two directories.
    """
    target = Path(target)
    if target.name in ("", ".."):
        raise ConfigError(f"expected the name of a directory to make, found {escape(str(target))!r}")
    _require_replaceable(target, replace=replace)
    with _fresh(target) as fresh:
        yield fresh
        try:
            _sync_tree(fresh)
            if not _renamed(fresh, target):
                _require_replaceable(target, replace=replace)
                _exchange(fresh, target)
            _sync(target.parent)
        except (OSError, ValueError) as err:
            raise StagingError(f"cannot publish {escape(str(target))}: {reason(err)}") from err


def _require_replaceable(target: Path, *, replace: bool) -> None:
    try:
        mode = target.lstat().st_mode
        if not stat.S_ISDIR(mode):
            raise ConfigError(f"{escape(str(target))} is there, and is no directory", hint="name another, or remove it")
        if not replace and any(target.iterdir()):
            raise ConfigError(
                f"the directory {escape(str(target))} is there, and is not empty",
                hint="name another; to put a new checkpoint in its place, say replace=True",
            )
    except FileNotFoundError:
        return
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot look at {escape(str(target))}: {reason(err)}", hint="check the path") from err


@contextlib.contextmanager
def _fresh(target: Path) -> Iterator[Path]:
    """Lend a new directory beside `target`, locked for as long as this process lives, and remove what is left of it."""
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(8)}{_PARTIAL}")
    try:
        with contextlib.ExitStack() as stack:
            parent = _opened(target.parent, stack)
            # Without this lock, another process could take a directory for a dead one's before it is locked.
            fcntl.flock(parent, fcntl.LOCK_EX)
            _sweep(target)
            fresh.mkdir()
            lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except (OSError, ValueError) as err:
        raise StagingError(
            f"cannot make a directory beside {escape(str(target))}: {reason(err)}", hint="check the path of its parent"
        ) from err
    try:
        yield fresh
    finally:
        # What is at this name now is what was not published, or the old checkpoint that was exchanged for the new one.
        shutil.rmtree(fresh, ignore_errors=True)
        os.close(lock)


def _sweep(target: Path) -> None:
    """Remove what killed processes left of their attempts at `target`: nobody holds its lock any more."""
    for left in target.parent.iterdir():
        middle = left.name.removeprefix(f".{target.name}.").removesuffix(_PARTIAL)
        if left.name != f".{target.name}.{middle}{_PARTIAL}" or not _is_token(middle) or left.is_symlink():
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            fcntl.flock(_opened(left, stack), fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)


def _is_token(text: str) -> bool:
    return len(text) == 16 and set(text) <= set("0123456789abcdef")


def _opened(directory: Path, stack: contextlib.ExitStack) -> int:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _sync_tree(directory: Path) -> None:
    """Bring every file and directory to disk, what is below a directory before itself."""
    for entry in sorted(directory.iterdir()):
        mode = entry.lstat().st_mode
        if stat.S_ISDIR(mode):
            _sync_tree(entry)
        elif stat.S_ISREG(mode):
            _sync(entry)
        else:
            raise StagingError(f"expected regular files and directories only, found {escape(entry.name)}")
    _sync(directory)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _renamed(fresh: Path, target: Path) -> bool:
    """Rename a directory to `target`, if nothing is there, or an empty directory; False if there is more."""
    try:
        # rename(2) replaces an empty directory, and nothing else, by a directory.
        fresh.rename(target)
    except OSError as err:
        if err.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            return False
        raise
    return True


def _exchange(fresh: Path, target: Path) -> None:
    """Let two directories change places in one step: there is no moment at which `target` is not there."""
    call = getattr(_LIBC, "renameat2", None)
    number = errno.ENOSYS
    if call is not None:
        done = call(_AT_FDCWD, os.fsencode(fresh), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE)
        number = 0 if done == 0 else ctypes.get_errno()
    if number in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        raise StagingError(
            f"the file system of {escape(str(target))} cannot exchange two directories in one step",
            hint="save to a new directory, and remove the old one when nobody reads it any more",
        )
    if number:
        raise OSError(number, os.strerror(number))
