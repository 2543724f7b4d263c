"""Names of tensors over a whole checkpoint, whatever its files are: what conversion and comparison go by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from safeload.errors import ConfigError, escape

_BARE_SUFFIXES = frozenset({".npy", ".pkl", ".pickle"})
"""Endings of files that often hold one bare array: they say what the file is, and belong to no name."""


class NamedFile(NamedTuple):
    """A file of tensors, as far as names go.

    Attributes:
        path: Of the file, relative to the checkpoint.
        parameter: The parameter that it holds, where a manifest says so.
        tensors: Names of the tensors in it; the empty name for one bare array.
    """

    path: str
    parameter: str | None
    tensors: tuple[str, ...]


def name_tensors(files: Iterable[NamedFile]) -> Mapping[tuple[str, str], str]:
    """Return a name of its own for each tensor of a checkpoint, by its file's path and its name in the file.

    It is the parameter's name, and the tensor's name behind it; without a parameter, the name in the file; and for a
    file that is one bare array, the file's path. Where these are not all different, as in a directory of files that
    have equal names in them, a name in a file stands behind the file's path.

    Raises:
        ConfigError: Two tensors would have one name all the same.
    """
    listed = list(files)
    named = {(file.path, tensor): _name(file, tensor) for file in listed for tensor in file.tensors}
    n_tensors = sum(len(file.tensors) for file in listed)
    if len(set(named.values())) != n_tensors:
        named = {(f.path, tensor): _name(f, tensor, prefix=f"{_stem(f)}/") for f in listed for tensor in f.tensors}
    twice = [name for name, times in Counter(named.values()).items() if times > 1]
    if twice or len(named) != n_tensors:
        shown = escape(twice[0]) if twice else "one in the same file"
        raise ConfigError(
            f"expected a name for each tensor, found {shown} twice",
            hint="files of several processes are not one tensor",
        )
    return named


def _name(file: NamedFile, tensor: str, *, prefix: str = "") -> str:
    if file.parameter is not None:
        return f"{file.parameter}/{tensor}" if tensor else file.parameter
    return f"{prefix}{tensor}" if tensor else _stem(file)


def _stem(file: NamedFile) -> str:
    path = PurePosixPath(file.path)
    return str(path.with_suffix("")) if path.suffix in _BARE_SUFFIXES else file.path
