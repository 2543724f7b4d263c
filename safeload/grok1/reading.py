"""What the files of a checkpoint must be for the leaves of a state, and reading some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Unpack

from safeload import loading
from safeload.decoding import arrays, decode
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FileSetError,
    Finding,
    PolicyError,
    escape,
)
from safeload.expecting import Expectations, hinted, mixture_hint
from safeload.grok1.layout import CHECKPOINT_FOLDER, SHARD_PATH
from safeload.manifest import FileEntry
from safeload.policy import Policy, load_policy
from safeload.records import QuantizedWeight8bit, Record
from safeload.scanning import admit, require_policy_outside
from safeload.sizes import parse_size
from safeload.staging import stream
from safeload.trust.store import Trust
from safeload.verifying import manifest_in

FLOATS: Final = ("float32", "bfloat16", "float16")
"""Dtypes of a state's leaf for which the file may hold an int8 weight with scales, and dtypes of those scales."""

_MAX_LISTED = 20
"""Names in one message; a wrong model differs in all of them."""


@dataclass(frozen=True, slots=True)
class HeldFolder:
    """A manifest that met what was expected of it, and where its files are.

    Attributes:
        held: The manifest.
        root: The directory that it lists: the folder of the tensors, or the one above it.
        prefix: What comes before the name of a tensor's file in the manifest: "ckpt-0/", or nothing.
    """

    held: loading.Held
    root: Path
    prefix: str

    @property
    def entries(self) -> Mapping[str, FileEntry]:
        """What the manifest lists, by path."""
        return self.held.trusted.manifest.by_path


def hold_folder(
    above: str | Path, *, manifest: str | Path | bytes, trust: Trust, **expected: Unpack[Expectations]
) -> HeldFolder:
    """Verify a manifest that was signed for a folder, or for the `ckpt-0` in it; see `loading.hold`.

    Args:
        above: The folder that has, or would have, `ckpt-0` in it.
        manifest: As `load` takes it.
        trust: As `load` takes it.
        **expected: As `load` takes it.
    """
    held = loading.hold(above, manifest=manifest, trust=trust, **expected)
    prefix = f"{CHECKPOINT_FOLDER}/"
    if any(path.startswith(prefix) for path in held.trusted.manifest.by_path):
        return HeldFolder(held, Path(above), prefix)
    return HeldFolder(held, Path(above) / CHECKPOINT_FOLDER, "")


def hold_folder_of(
    directory: Path, *, manifest: str | Path | bytes, trust: Trust, **expected: Unpack[Expectations]
) -> HeldFolder:
    """Do what `hold_folder` does, from the directory in which the files themselves are."""
    if directory.name == CHECKPOINT_FOLDER:
        return hold_folder(directory.parent, manifest=manifest, trust=trust, **expected)
    return HeldFolder(loading.hold(directory, manifest=manifest, trust=trust, **expected), directory, "")


def read_files(
    folder: HeldFolder,
    paths: Sequence[str],
    *,
    policy: str | Path | Policy,
    memory_budget: int | str | None,
    process: int | None = None,
) -> Mapping[str, Any]:
    """Return what some files hold, as numpy arrays and records on verified memory; nothing else is read.

    Args:
        folder: Where they are.
        paths: Their paths in the manifest.
        policy: What may be in them.
        memory_budget: Most bytes to stage in.
        process: Number of this process, where the blocks of others may be missing; None where all must be there.

    Raises:
        FileSetError: The manifest does not list one of them, or the directory is not what it lists.
        DigestMismatchError: A file's bytes are not those that were signed.
        FormatError: A file breaks its format.
        LimitError: A file asks for more than the policy's limits.
        PolicyError: A file holds what the policy does not allow.
        ConfigError: The policy is none, or lies in the directory.
        StagingError: There is no room, or a file could not be read.
    """
    unlisted = [path for path in paths if path not in folder.entries]
    if unlisted:
        message = "expected a file that the manifest lists, found another"
        raise FileSetError(*(Finding("unlisted-file", message, file=path) for path in unlisted))
    require_policy_outside(policy, folder.root)
    rules = load_policy(policy)
    held, trusted = folder.held, folder.held.trusted
    itself = manifest_in(folder.root, held.manifest, held.envelope)
    values: dict[str, Any] = {}
    try:
        with stream(
            folder.root,
            trusted,
            wanted=dict.fromkeys(paths),
            memory_budget=parse_size(memory_budget) if isinstance(memory_budget, str) else memory_budget,
            ignore=itself,
            absent=None if process is None else partial(_is_of_another, process),
        ) as batches:
            for staged in batches:
                values |= arrays(decode(admit(staged, policy=rules)))
    except (DigestMismatchError, FileSetError) as err:
        raise type(err)(*hinted(err.findings, mixture_hint(err.findings, trusted))) from err
    held.expectation.record(trusted)
    return values


def _is_of_another(process: int, path: str) -> bool:
    match = SHARD_PATH.fullmatch(path)
    return match is not None and int(match["process"]) != process


def is_quantized(value: Any) -> bool:
    """Whether a value is a quantized weight: ours, or of the model code's own class."""
    named = type(value).__name__ == QuantizedWeight8bit.__name__
    return isinstance(value, QuantizedWeight8bit) or (named and hasattr(value, "weight") and hasattr(value, "scales"))


def with_class(value: Any, quantized_class: type[Any] | None) -> Any:
    """Return a value with every quantized weight in it made of the caller's own class, if there is one."""
    if quantized_class is None:
        return value
    if isinstance(value, QuantizedWeight8bit):
        return quantized_class(**dict(value.items()))
    if isinstance(value, dict):
        return {key: with_class(child, quantized_class) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_class(child, quantized_class) for child in value)
    return value


# ---------------------------------------------------------------- what a leaf asks for, and what is there


@dataclass(frozen=True, slots=True)
class Wanted:
    """A leaf of the state.

    Attributes:
        name: Its parameter's name; for a leaf without one, what to call it.
        shape: Its global shape.
        dtype: Its dtype by name; a float also stands for a quantized weight.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, leaf: Any) -> Wanted:
        """Return what a leaf with a shape and a dtype asks for.

        Raises:
            ConfigError: It has none.
        """
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ConfigError(f"state_shapes: {escape(name)}: expected a shape and a dtype, found {escape(repr(leaf))}")
        return cls(name, tuple(leaf.shape), str(leaf.dtype))


Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor of a file, by its name there."""


def promised(entry: FileEntry) -> Tensors:
    """Return the tensors that the manifest says a file has."""
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in entry.tensors}


def differences(file: str, wanted: Wanted, found: Tensors) -> Iterator[Finding]:
    """Yield every way in which a file's tensors are not what a leaf asks for.

    Args:
        file: The file's path in the manifest.
        wanted: The leaf.
        found: The file's tensors, with their global shapes.
    """
    name, shape, dtype = wanted.name, wanted.shape, wanted.dtype
    ungrouped = None
    if found.keys() == {""}:
        found_dtype, found_shape = found[""]
        fits = found_dtype == dtype
    elif found.keys() == {"weight", "scales"}:
        (weight_dtype, found_shape), (scales_dtype, scales_shape) = found["weight"], found["scales"]
        found_dtype = f"{weight_dtype} with {scales_dtype} scales"
        fits = weight_dtype == "int8" and dtype in FLOATS and scales_dtype in FLOATS
        ungrouped = None if _are_grouped(scales_shape, found_shape) else scales_shape
    else:
        expected = f"one tensor, {dtype} or quantized, for {name}"
        found_text = f"tensors called {listed(found)}" if found else "no tensor"
        yield _finding("dtype-mismatch", file, expected, found_text)
        return
    if not fits:
        yield _finding("dtype-mismatch", file, f"{dtype}, or int8 with float scales, for {name}", found_dtype)
    if found_shape != shape:
        yield _finding("shape-mismatch", file, f"{shape} for {name}", f"{found_shape}")
    elif ungrouped is not None:
        yield _finding("shape-mismatch", file, f"scales of groups of rows of {shape} for {name}", f"{ungrouped}")


def _are_grouped(scales: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether scales `[.., G, N]` have one row for each of G groups of the rows of a weight `[.., K, N]`."""
    if len(scales) != len(weight) or len(weight) < 2 or scales[-2] == 0:
        return False
    return (*scales[:-2], scales[-1]) == (*weight[:-2], weight[-1]) and weight[-2] % scales[-2] == 0


def missing(file: str, wanted: Wanted) -> Finding:
    """Return the finding for a leaf that no file is there for."""
    return _finding("missing-tensor", file, f"{wanted.name}, {wanted.dtype} {wanted.shape}", "no such file")


def misnamed(file: str, wanted: Wanted, entry: FileEntry) -> Finding:
    """Return the finding for a file that the manifest binds to another parameter than its index stands for."""
    return _finding("parameter-name-mismatch", file, wanted.name, entry.parameter or "no name in the manifest")


def unexpected(file: str, entry: FileEntry, n_leaves: int) -> Finding:
    """Return the finding for a tensor that no leaf asks for."""
    return _finding("unexpected-tensor", file, f"{n_leaves} tensors", entry.parameter or "one more")


def parameters_differ(in_code: Iterable[str], in_checkpoint: Iterable[str]) -> Finding:
    """Return the finding that says which parameters the one has and the other lacks, by their nested paths."""
    code, checkpoint = set(in_code), set(in_checkpoint)
    return Finding(
        "parameters-differ",
        "the parameters of the code are not those of the checkpoint; missing in the checkpoint: "
        f"{listed(code - checkpoint)}; missing in the code: {listed(checkpoint - code)}",
        hint="use the configuration that the checkpoint was made with, or give init_state or rules for loading",
    )


def _finding(code: str, file: str, expected: str, found: str) -> Finding:
    hint = "sign the checkpoint with `safeload sign --layout grok-1`" if code == "parameter-name-mismatch" else None
    return Finding(code, f"expected {escape(expected)}; found {escape(found)}", file=file, hint=hint)


def listed(names: Iterable[str]) -> str:
    """Return names for a message, sorted and escaped; "none" for none."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_LISTED} more" if len(ordered) > _MAX_LISTED else ""
    return (", ".join(map(escape, ordered[:_MAX_LISTED])) or "none") + more


def require_none(findings: Iterable[Finding]) -> None:
    """Refuse if there is any finding.

    Raises:
        PolicyError: There is.
    """
    found = tuple(findings)
    if found:
        raise PolicyError(*found)


def require_whole_values(loaded: Mapping[str, Any]) -> None:
    """Refuse a file that holds its tensors in another container than an array or a quantized weight.

    The manifest says which tensors a file has, and what they are; only the file says what they are in.

    Raises:
        PolicyError: There is one.
    """
    require_none(
        _finding("dtype-mismatch", file, "one array or quantized weight", f"a {type(value).__name__}")
        for file, value in sorted(loaded.items())
        if not (isinstance(value, Record) or hasattr(value, "dtype"))
    )
