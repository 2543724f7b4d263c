"""Convert: a signed checkpoint of one format to a signed checkpoint of another, with the same values.

Files are verified, scanned and written a batch at a time, so that memory is bounded by the budget and not by the
checkpoint. What was written is read back to be signed, and each tensor's digest, which does not depend on the format,
has to be the one that the first manifest has; only then does the new directory appear, whole and in one step. The new
manifest names the one that it was made from.

Weights are converted; every other file (tokenizer, configuration, optimizer, random state) is copied as it is, and an
index of the old files is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, TypeAlias, Unpack

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic import Field as Bounded

from safeload.decoding import HostTensor, decode
from safeload.errors import ConfigError, DigestMismatchError, Finding, ManifestError, StagingError, escape, reason
from safeload.expecting import Expectations
from safeload.files import publish, require_outside
from safeload.formats.pickles.writing import pickle_shard, shard_file, write_shard
from safeload.formats.safetensors_writing import MAX_HEADER_BYTES, SAFETENSORS_NAMES, safetensors_layout
from safeload.loading import Held, hold
from safeload.manifest import FileEntry, Manifest, ManifestTensor, check_path
from safeload.naming import NamedFile, name_tensors
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.publishing import describe
from safeload.records import Record, record_class
from safeload.report import Progress
from safeload.saving import (
    GROK1_FOLDER,
    MANIFEST_NAME,
    SHARD_BYTES,
    host_array,
    publishing_directory,
    require_writable,
)
from safeload.scanning import admit, require_policy_outside
from safeload.signing import sign_manifest
from safeload.sizes import parse_size
from safeload.staging import StagedCheckpoint, stream
from safeload.tensors import DTYPE_ITEMSIZE, ML_DTYPES_ITEMSIZE, TENSOR_FORMATS
from safeload.trust import strict_json
from safeload.trust.store import Trust
from safeload.verifying import manifest_in

if TYPE_CHECKING:
    from safeload.trust.keys import SecretKey

Layout: TypeAlias = Literal["safetensors", "npy", "grok-1"]
"""What a checkpoint can be converted to."""

_FORMATS: Final[Mapping[Layout, str]] = {"safetensors": "safetensors", "npy": "npy", "grok-1": "pickle"}
"""The format of the files of each layout."""

SHARDS_KEY: Final = "safeload.shards"
"""Where the metadata of a safetensors file says which shard of Grok-1's layout each parameter was: JSON, a map from the
parameter's name to an `Origin`. Files without it can be read by anybody, and not be brought back byte for byte."""

_SHARD_PATH: Final = re.compile(rf"(?:{GROK1_FOLDER}/)?tensor[0-9]{{5}}_000")

_QUANTIZED: Final = ("weight", "scales")
_RECORD: Final = "QuantizedWeight8bit"


class Origin(BaseModel):
    """The shard that a parameter was, as far as its values do not say it.

    Attributes:
        file: Path of the shard.
        record: Name of the record that it holds; empty for a bare array.
        fields: Names of the record's fields in their order.
        bfloat16_flags: What the shard's writer wrote for `flags` of bfloat16 (80 up to ml_dtypes 0.5.1, 64 since);
            "--" where our writer would write other bytes than the shard has, whatever it is given.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    file: Annotated[str, Bounded(pattern=rf"^{_SHARD_PATH.pattern}$")]
    record: Annotated[str, Bounded(pattern=r"^(?:[A-Za-z_][A-Za-z0-9_]*)?$")]
    fields: Annotated[tuple[Annotated[str, Bounded(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")], ...], Bounded(strict=False)]
    bfloat16_flags: Literal["64", "80", "--"]


_ORIGINS: Final = TypeAdapter(dict[str, Origin])


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion made.

    Attributes:
        manifest: Path of the new manifest.
        derived_from: SHA-256 of the payload of the manifest that it was made from.
        n_tensors: Number of tensors, each with the same type, shape and value digest before and after.
        nbytes: Length of their values in bytes.
        files: Paths of the new checkpoint's files.
        left_out: Paths of files, and of what is no tensor in files, that have no place in the new checkpoint.
    """

    manifest: Path
    derived_from: str
    n_tensors: int
    nbytes: int
    files: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor to convert: its name over the checkpoint, where it is, and what was signed of it."""

    name: str
    file: str
    signed: ManifestTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.signed.shape)

    @property
    def nbytes(self) -> int:
        # Not `signed.nbytes`, which for a view with strides is the span that it lies in.
        return math.prod(self.signed.shape) * DTYPE_ITEMSIZE[self.signed.dtype]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Layout,
    manifest: str | Path | bytes,
    trust: Trust,
    keys: Sequence[SecretKey],
    output: str | Path | None = None,
    as_model: str | None = None,
    as_revision: str | None = None,
    policy: str | Path | Policy = DEFAULT_POLICY,
    as_policy: str | Path | Policy = DEFAULT_POLICY,
    tensors_only: bool = False,
    memory_budget: int | str | None = None,
    shard_bytes: int = SHARD_BYTES,
    blake3: bool = False,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> Converted:
    """Prove that a checkpoint is what a trusted key signed, and make the same values in another format, signed anew.

    Args:
        source: The checkpoint.
        target: The directory to make, which must not be there.
        to: "safetensors": `model.safetensors`, or several and their index. "npy": one file for each tensor. "grok-1":
            one pickle for each parameter, as Grok-1's published code reads them; shards that were converted to
            safetensors come back byte for byte.
        manifest: The checkpoint's manifest, as `load` takes it.
        trust: The keys to trust, as `load` takes them.
        keys: Private keys to sign the new manifest with.
        output: Where to write the new manifest; by default `manifest.json` in the new directory.
        as_model: Name of the model in the new manifest. By default the old name, a plus and the layout: under the old
            one the two manifests would contradict each other to whoever remembers what was accepted.
        as_revision: Revision in the new manifest; by default the old one.
        policy: What is allowed in the source.
        as_policy: What is allowed in the new files, which are scanned before they are signed.
        tensors_only: Whether numbers and text that a file of weights holds beside its tensors may be left out.
        memory_budget: Most bytes to stage in at any time; a tensor that is not in C order takes its own length more.
        shard_bytes: Most bytes of tensors in one safetensors file, unless one parameter has more.
        blake3: Whether to add the BLAKE3 digest of each file.
        progress: Told of the bytes that were staged, then of those that were read back.
        **expected: What to hold the source's manifest against, as for `load`.

    Returns:
        What was made.

    Raises:
        VerificationError: The manifest is not signed by the trusted keys, or the files are not what it lists; or what
            was read back has other values than what was read, and nothing was published.
        PolicyError: A policy does not allow what is in a file.
        FormatError: A file breaks its format.
        LimitError: A file asks for more than the policy's limits.
        ConfigError: The new format cannot hold a tensor, or an argument is wrong.
        StagingError: There is no room in memory or on disk, or a file cannot be read or written.
    """
    if to not in _FORMATS:
        raise ConfigError(f"to: expected {', '.join(_FORMATS)}, found {escape(str(to))!r}")
    require_writable(keys, shard_bytes)
    target = Path(target)
    _require_new(target)
    new_manifest = target / MANIFEST_NAME if output is None else Path(output)
    require_policy_outside(policy, source)
    require_outside("new directory", target, source)
    require_outside("new manifest", new_manifest, source)
    rules = load_policy(policy)
    budget = parse_size(memory_budget) if isinstance(memory_budget, str) else memory_budget
    held = hold(source, manifest=manifest, trust=trust, **expected)
    old = held.trusted.manifest
    plan = _plan(old)
    is_inside = _is_inside(new_manifest, target, plan)
    with publishing_directory(target) as fresh:
        layout = _layout(to, fresh, plan, rules, shard_bytes)
        with _batches(source, held, budget, progress) as batches:
            left_out = _write(layout, batches, plan, rules, tensors_only=tensors_only)
        made, _ = describe(
            fresh,
            model=f"{old.stream}+{to}" if as_model is None else as_model,
            revision=old.revision if as_revision is None else as_revision,
            version=old.version,
            epoch=old.epoch,
            kind=old.kind,
            require=old.requires,
            policy=as_policy,
            parameters=layout.parameters,
            blake3=blake3,
            progress=progress,
        )
        made = made.model_copy(update={"derived_from": held.trusted.sha256})
        _require_same_values(plan, layout, made)
        envelope = sign_manifest(made, keys)
        if is_inside:
            if new_manifest.name in made.by_path:
                raise ConfigError(
                    f"{escape(new_manifest.name)} is the name of the new manifest and of a file of tensors"
                )
            publish(fresh / new_manifest.name, envelope)
    if not is_inside:
        publish(new_manifest, envelope)
    held.expectation.record(held.trusted)
    return Converted(
        new_manifest,
        held.trusted.sha256,
        len(plan.items),
        sum(item.nbytes for item in plan.items.values()),
        tuple(file.path for file in made.files),
        (*plan.dropped, *left_out),
    )


def _require_new(target: Path) -> None:
    """Refuse to go into a directory that holds something: neither of the two verbs replaces what is there."""
    try:
        is_taken = target.is_dir() and any(target.iterdir())
    except (OSError, ValueError):
        return  # Whoever makes the directory says why it cannot be looked at.
    if is_taken:
        raise ConfigError(
            f"the directory {escape(str(target))} is there, and is not empty",
            hint="name another, or move it away: what is there is not replaced",
        )


def _is_inside(new_manifest: Path, target: Path, plan: _Plan) -> bool:
    """Return whether the new manifest is to lie in the new directory, where it is nobody else's name."""
    parent, directory = new_manifest.parent.resolve(), target.resolve()
    if parent != directory:
        if parent.is_relative_to(directory):
            message = f"the new manifest {escape(str(new_manifest))} would lie below the new directory's first level"
            raise ConfigError(message, hint="put it into the directory itself, or beside it")
        return False
    if new_manifest.name.casefold() in {path.casefold() for path in plan.copied}:
        message = f"{escape(new_manifest.name)} is the name of the new manifest and of a file to copy"
        raise ConfigError(message, hint="put the new manifest beside the new directory: -o MANIFEST")
    return True


def copy_verified(
    source: str | Path,
    target: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    memory_budget: int | str | None = None,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> Path:
    """Prove that a checkpoint is what a trusted key signed, and make a private copy of exactly the proven bytes.

    It is for readers that open files themselves, such as Orbax under the policy "orbax": they must not be given a
    directory that was verified, because whoever can write to it can change a file between the verification and the
    reading. The copy is written from the memory in which the bytes were verified, and only its owner can enter its
    directory; so what such a reader finds there is what was signed, unless the owner's own processes change it.

    Args:
        source: The checkpoint.
        target: The directory to make, which must not be there, below one where nobody else can write.
        manifest: The checkpoint's manifest, as `load` takes it.
        trust: The keys to trust, as `load` takes them.
        policy: What is allowed.
        memory_budget: Most bytes to stage in at any time; at least the longest file.
        progress: Told of the bytes that were staged.
        **expected: What to hold the manifest against, as for `load`.

    Returns:
        The path of the copy. It holds the manifest's files and no manifest.

    Raises:
        VerificationError: The manifest is not signed by the trusted keys, or the files are not what it lists.
        PolicyError: The policy does not allow what is in a file.
        FormatError: A file breaks its format.
        LimitError: A file asks for more than the policy's limits.
        ConfigError: An argument is wrong, or the target is there already.
        StagingError: There is no room in memory or on disk, or a file cannot be read or written.
    """
    target = Path(target)
    _require_new(target)
    require_policy_outside(policy, source)
    require_outside("new directory", target, source)
    rules = load_policy(policy)
    budget = parse_size(memory_budget) if isinstance(memory_budget, str) else memory_budget
    held = hold(source, manifest=manifest, trust=trust, **expected)
    with publishing_directory(target) as fresh:
        try:
            fresh.chmod(0o700)
        except OSError as err:
            raise StagingError(f"cannot make {escape(str(target))} private: {reason(err)}") from err
        with _batches(source, held, budget, progress) as batches:
            for staged in batches:
                admitted = admit(staged, policy=rules)
                for path, file in admitted.staged.files.items():
                    _new_file(fresh, path, file.view)
    held.expectation.record(held.trusted)
    return target


# ---------------------------------------------------------------- what there is to do


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the manifest says is to be done, before any file is read.

    Attributes:
        items: The tensors to convert, by file and name in it, in the manifest's order.
        weights: The files that they are in, by path.
        copied: The files to copy, by path.
        dropped: The files that have no place in the new checkpoint.
    """

    items: Mapping[tuple[str, str], _Item]
    weights: Mapping[str, FileEntry]
    copied: Mapping[str, FileEntry]
    dropped: tuple[str, ...]


def _plan(manifest: Manifest) -> _Plan:
    weights: dict[str, FileEntry] = {}
    copied: dict[str, FileEntry] = {}
    dropped: list[str] = []
    for entry in manifest.files:
        if entry.role != "weights":
            copied[entry.path] = entry
        elif entry.format in TENSOR_FORMATS and entry.tensors:
            weights[entry.path] = entry
        else:
            dropped.append(entry.path)
    if not weights:
        raise ConfigError("expected files of weights in the manifest, found none", hint="there is nothing to convert")
    named = name_tensors(
        NamedFile(e.path, e.parameter, tuple(tensor.name for tensor in e.tensors)) for e in weights.values()
    )
    items = {
        (entry.path, tensor.name): _Item(named[entry.path, tensor.name], entry.path, tensor)
        for entry in weights.values()
        for tensor in entry.tensors
    }
    return _Plan(items, weights, copied, tuple(dropped))


def _write(
    layout: _Target, batches: Iterable[StagedCheckpoint], plan: _Plan, rules: Policy, *, tensors_only: bool
) -> tuple[str, ...]:
    """Write all files of the new checkpoint but its manifest, and return the paths of what is no tensor."""
    others: list[str] = []
    for staged in batches:
        trees = decode(admit(staged, policy=rules))
        for path, file in staged.files.items():
            if path in plan.copied:
                _new_file(layout.directory, path, file.view)
            if path not in plan.weights:
                continue
            found = list(_tensors(trees[path], path, others))
            if others and not tensors_only:
                raise ConfigError(
                    f"{escape(others[0])} is no tensor, and {layout.noun} hold nothing else",
                    hint="--tensors-only leaves numbers and text out",
                )
            layout.put(path, {tensor.spec.name: tensor for tensor in found}, trees[path], file.view)
        layout.end_batch()
    layout.finish()
    return tuple(others)


@contextmanager
def _batches(
    source: str | Path, held: Held, budget: int | None, progress: Progress | None
) -> Iterator[Iterable[StagedCheckpoint]]:
    trusted, itself = held.trusted, manifest_in(source, held.manifest, held.envelope)
    with stream(source, trusted, memory_budget=budget, progress=progress, ignore=itself) as batches:
        yield batches


def _tensors(node: Any, path: str, others: list[str]) -> Iterator[HostTensor]:
    """Yield the tensors of what a file holds; the paths of everything else go to `others`.

    The depth is that of the scan's result, which the policy bounds.
    """
    if isinstance(node, HostTensor):
        yield node
        return
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(node, Record):
        pairs = list(node.items())
        if not all(isinstance(child, HostTensor) for _, child in pairs):
            # Blocks of a quantization of their own, say: as bytes without what they mean they would be worth nothing.
            raise ConfigError(
                f"{escape(path)}: a {type(node).__name__} is more than its tensors, and only its own format holds it",
                hint="dequantize it with the software that wrote it",
            )
    elif isinstance(node, dict):
        pairs = node.items()
    elif isinstance(node, (list, tuple)):
        pairs = enumerate(node)
    else:
        if node is not None:
            others.append(path)
        return
    for key, child in pairs:
        yield from _tensors(child, f"{path}/{key}", others)


def _require_same_values(plan: _Plan, layout: _Target, made: Manifest) -> None:
    """Refuse to sign what is not what was read: one digest for each tensor, and one for each file that was copied."""
    new = {(file.path, tensor.name): tensor for file in made.files for tensor in file.tensors}
    findings: list[Finding] = []
    for key, item in plan.items.items():
        place = layout.places.get(key, ("", ""))
        found = new.get(place)
        if found is None or (found.dtype, found.shape, found.sha256) != (
            item.signed.dtype,
            item.signed.shape,
            item.signed.sha256,
        ):
            message = f"{escape(item.name)}: expected sha256:{item.signed.sha256} as it was signed, found another value"
            hint = "nothing was published; check the disk, and who else writes there"
            findings.append(Finding("value-changed", message, file=place[0], hint=hint))
    by_path = made.by_path
    for path, entry in plan.copied.items():
        if path not in by_path or by_path[path].sha256 != entry.sha256:
            message = f"expected sha256:{entry.sha256} as it was signed, found another"
            findings.append(Finding("digest-mismatch", message, file=path, hint="nothing was published"))
    n_new = sum(file.path not in plan.copied for file in made.files for _ in file.tensors)
    if n_new != len(plan.items):
        message = f"expected {len(plan.items)} tensors, found {n_new}"
        findings.append(Finding("value-changed", message, hint="nothing was published"))
    if findings:
        raise DigestMismatchError(*findings)


# ---------------------------------------------------------------- what is made of it


class _Target(Protocol):
    """The files of one layout."""

    @property
    def directory(self) -> Path:
        """Where they are made."""

    @property
    def noun(self) -> str:
        """What to call them."""

    @property
    def places(self) -> Mapping[tuple[str, str], tuple[str, str]]:
        """Path and name in the file of each tensor, by its old path and name; complete after `finish`."""

    @property
    def parameters(self) -> Mapping[str, str]:
        """The parameter of each file whose tensors carry no names, by path; complete after `finish`."""

    def put(self, path: str, tensors: Mapping[str, HostTensor], tree: Any, view: memoryview) -> None:
        """Take the tensors of one file, by their names in it, and all that it holds, and its bytes."""

    def end_batch(self) -> None:
        """Let go of everything that was put."""

    def finish(self) -> None:
        """Write what is left."""


def _layout(to: Layout, fresh: Path, plan: _Plan, rules: Policy, shard_bytes: int) -> _Target:
    if to == "npy":
        return _Npy(fresh, plan)
    return _Safetensors(fresh, plan, rules, shard_bytes) if to == "safetensors" else _Grok1(fresh, plan)


def _new_file(directory: Path, path: str, *pieces: bytes | memoryview) -> None:
    """Make a file of these bytes."""
    try:
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            for piece in pieces:
                file.write(piece)
    except OSError as err:
        raise StagingError(f"cannot write {escape(path)}: {reason(err)}", hint="is there room?") from err


def _bytes(array: Any) -> memoryview:
    """Return the bytes of a contiguous array; ml_dtypes' types have no buffer format of their own."""
    return memoryview(array.reshape(-1).view("uint8"))


class _Npy:
    """One file for each tensor, called as the tensor is (numpy.lib.format, version 1.0)."""

    noun = "npy files"

    def __init__(self, directory: Path, plan: _Plan) -> None:
        self.directory = directory
        self.parameters: Mapping[str, str] = {}
        foreign = next((i for i in plan.items.values() if i.signed.dtype in ML_DTYPES_ITEMSIZE), None)
        if foreign is not None:
            raise ConfigError(
                f"{escape(foreign.name)} is of {foreign.signed.dtype}, which npy cannot say",
                hint="convert to safetensors",
            )
        self.places = {key: (_path(f"{item.name}.npy", plan), "") for key, item in plan.items.items()}
        _require_apart([*(path for path, _ in self.places.values()), *plan.copied])

    def put(self, path: str, tensors: Mapping[str, HostTensor], tree: Any, view: memoryview) -> None:  # noqa: ARG002
        for name, tensor in tensors.items():
            target, _ = self.places[path, name]
            array = host_array(target, tensor.array)
            _new_file(self.directory, target, _npy_header(array), _bytes(array))

    def end_batch(self) -> None:
        pass

    def finish(self) -> None:
        pass


def _require_apart(paths: Sequence[str]) -> None:
    """Refuse paths that cannot be files of one directory everywhere: one twice but for case, one below another."""
    seen: dict[str, str] = {}
    for path in paths:
        other = seen.setdefault(path.casefold(), path)
        if other is not path:
            raise ConfigError(
                f"{escape(path)} and {escape(other)} would be one file on some systems", hint="convert to safetensors"
            )
    for path in paths:
        for folder in PurePosixPath(path.casefold()).parents:
            if str(folder) in seen:
                raise ConfigError(
                    f"{escape(seen[str(folder)])} would be a file, and the folder of {escape(path)}",
                    hint="convert to safetensors",
                )


def _npy_header(array: Any) -> bytes:
    """Return what stands before the values of an npy file: the payload begins at a multiple of 64."""
    text = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {array.shape!r}, }}"
    header = text.encode("ascii")
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def _path(path: str, plan: _Plan) -> str:
    """Return a path that was made of a tensor's name, if a file can have it."""
    try:
        check_path(path)
    except ValueError as err:
        raise ConfigError(f"no file can be called {escape(path)!r}: {err}") from err
    if path in plan.copied:
        raise ConfigError(f"{escape(path)} is the name of a tensor's file and of a file to copy")
    return path


@dataclass(slots=True)
class _Shard:
    """One safetensors file to be: its tensors, where each lies, and what its metadata says."""

    items: list[tuple[tuple[str, str], _Item]] = field(default_factory=list)
    path: str = ""
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)

    def header(self) -> tuple[bytes, Mapping[str, tuple[int, int]]]:
        metadata = {}
        if self.origins:
            told = {name: origin.model_dump(mode="json") for name, origin in self.origins.items()}
            metadata[SHARDS_KEY] = json.dumps(told, separators=(",", ":"), sort_keys=True)
        try:
            return safetensors_layout({i.name: (i.signed.dtype, i.shape) for _, i in self.items}, metadata)
        except TypeError as err:
            raise ConfigError(f"safetensors: {escape(str(err))}") from err


class _Safetensors:
    """`model.safetensors`, or several and an index. Each tensor is written to its place when it comes by."""

    noun = "safetensors files"

    def __init__(self, directory: Path, plan: _Plan, rules: Policy, shard_bytes: int) -> None:
        self.directory = directory
        self.parameters: Mapping[str, str] = {}
        foreign = next((i for i in plan.items.values() if i.signed.dtype not in SAFETENSORS_NAMES), None)
        if foreign is not None:
            raise ConfigError(f"{escape(foreign.name)} is of {foreign.signed.dtype}, which safetensors cannot say")
        self._shards = self._divide(plan, rules, shard_bytes)
        self._shard_of: dict[tuple[str, str], _Shard] = {}
        self.places: dict[tuple[str, str], tuple[str, str]] = {}
        self._names = {key: item.name for key, item in plan.items.items()}
        self._parameter_of = {path: entry.parameter for path, entry in plan.weights.items()}
        of = len(self._shards)
        for number, shard in enumerate(self._shards, 1):
            name = f"model-{number:05d}-of-{of:05d}.safetensors" if of > 1 else "model.safetensors"
            shard.path = _path(name, plan)
            header, shard.places = shard.header()
            _new_file(directory, shard.path, header)
            for key, item in shard.items:
                self._shard_of[key] = shard
                self.places[key] = shard.path, item.name
        if of > 1:
            total = sum(item.nbytes for item in plan.items.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {self._names[key]: path for key, (path, _) in self.places.items()},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            _new_file(directory, _path("model.safetensors.index.json", plan), text.encode("ascii"))

    @staticmethod
    def _divide(plan: _Plan, rules: Policy, shard_bytes: int) -> list[_Shard]:
        """Divide the tensors by size, in the manifest's order; those of one shard of Grok-1 stay together."""
        shards = [_Shard()]
        filled = 0
        for entry in plan.weights.values():
            origin = _origin(entry, rules)
            own = [(key, item) for key, item in plan.items.items() if key[0] == entry.path]
            for group in [own] if origin is not None else [[pair] for pair in own]:
                nbytes = sum(item.nbytes for _, item in group)
                if shards[-1].items and filled + nbytes > shard_bytes:
                    shards.append(_Shard())
                    filled = 0
                shards[-1].items += group
                filled += nbytes
            if origin is not None and entry.parameter is not None:
                shards[-1].origins[entry.parameter] = origin
        return shards

    def put(self, path: str, tensors: Mapping[str, HostTensor], tree: Any, view: memoryview) -> None:
        for name, tensor in tensors.items():
            key = path, name
            shard = self._shard_of[key]
            at, _ = shard.places[self._names[key]]
            data = _bytes(host_array(self._names[key], tensor.array))
            try:
                with (self.directory / shard.path).open("r+b") as file:
                    file.seek(at)
                    file.write(data)
            except OSError as err:
                raise StagingError(f"cannot write {shard.path}: {reason(err)}", hint="is there room?") from err
        parameter = self._parameter_of[path]
        for shard in self._shards:
            if parameter in shard.origins:
                # As long as what it takes the place of, so that the header keeps its length.
                told = shard.origins[parameter].model_copy(update={"bfloat16_flags": _flags(tree, view)})
                shard.origins[parameter] = told

    def end_batch(self) -> None:
        pass

    def finish(self) -> None:
        for shard in self._shards:
            header, _ = shard.header()  # as long as the first one, as what it says of flags is
            try:
                with (self.directory / shard.path).open("r+b") as file:
                    file.write(header)
            except OSError as err:
                raise StagingError(f"cannot write {shard.path}: {reason(err)}", hint="is there room?") from err


def _origin(entry: FileEntry, rules: Policy) -> Origin | None:
    """Return what a shard of Grok-1 was, by the manifest alone; None for other files."""
    if entry.format != "pickle" or entry.parameter is None or not _SHARD_PATH.fullmatch(entry.path):
        return None
    names = tuple(tensor.name for tensor in entry.tensors)
    if names == ("",):
        return Origin(file=entry.path, record="", fields=(), bfloat16_flags="--")
    known = (rules.pickle.records_by_global.get(name) for name in entry.globals)
    for rule in known:
        if rule is not None and set(names) == set(rule.fields):
            return Origin(file=entry.path, record=rule.name, fields=tuple(rule.fields), bfloat16_flags="--")
    return None


def _flags(tree: Any, view: memoryview) -> Literal["64", "80", "--"]:
    """Return the `flags` with which our writer makes exactly these bytes of what they hold; "--" if with none."""
    value = _arrays(tree)
    for flags, text in ((64, "64"), (80, "80")):
        at = 0
        try:
            for piece in pickle_shard(value, bfloat16_flags=flags):  # type: ignore[arg-type] # 64 or 80
                if view[at : at + len(piece)] != piece:
                    break
                at += len(piece)
            else:
                if at == len(view):
                    return text  # type: ignore[return-value] # one of the three
        except TypeError:  # an array that is written in another order than ours
            break
    return "--"


def _arrays(tree: Any) -> Any:
    if isinstance(tree, Record):
        return type(tree)(**{name: child.array for name, child in tree.items()})
    return tree.array if isinstance(tree, HostTensor) else tree


class _Grok1:
    """One pickle for each parameter, numbered in the order in which JAX flattens a tree: each key sorted as text."""

    noun = "shards of Grok-1"

    def __init__(self, directory: Path, plan: _Plan) -> None:
        self.directory = directory
        self.parameters: dict[str, str] = {}
        self.places: dict[tuple[str, str], tuple[str, str]] = {}
        self._plan = plan
        self._by_name = {item.name: key for key, item in plan.items.items()}
        if len(self._by_name) > 100_000:
            raise ConfigError(f"the layout grok-1 counts to 99999 tensors, found {len(self._by_name)}")
        self._guessed = self._guess()
        self._waiting: dict[str, dict[str, Any]] = {}

    def _guess(self) -> Mapping[str, Origin]:
        """Return what shard each parameter is to be where no metadata says it, by the names alone."""
        fields: dict[str, tuple[str, ...]] = {}
        for name in self._by_name:
            stem, _, last = name.rpartition("/")
            pair = [self._item(f"{stem}/{part}") for part in _QUANTIZED] if last in _QUANTIZED else [None]
            weight, scales = pair[0], pair[-1]
            if weight is None or scales is None or weight.dtype != "int8" or len(weight.shape) != len(scales.shape):
                fields[name] = ()
            else:
                fields[stem] = _QUANTIZED
        ordered = sorted(fields, key=lambda name: name.split("/"))
        return {
            name: Origin(
                file=f"{GROK1_FOLDER}/{shard_file(index)}",
                record=_RECORD if fields[name] else "",
                fields=fields[name],
                bfloat16_flags="64",
            )
            for index, name in enumerate(ordered)
        }

    def _item(self, name: str) -> ManifestTensor | None:
        key = self._by_name.get(name)
        return None if key is None else self._plan.items[key].signed

    def put(self, path: str, tensors: Mapping[str, HostTensor], tree: Any, view: memoryview) -> None:  # noqa: ARG002
        told = _read_origins(path, view) if self._plan.weights[path].format == "safetensors" else {}
        for name, tensor in tensors.items():
            key = path, name
            full = self._plan.items[key].name
            stem, _, last = full.rpartition("/")
            origins = told or self._guessed
            whole, part = (full, "") if full in origins else (stem, last)
            origin = origins.get(whole)
            if origin is None or part not in (origin.fields or ("",)):
                raise ConfigError(
                    f"{escape(path)}: its metadata does not say which shard {escape(full)} was",
                    hint="the files were changed by other software since; convert to safetensors or npy",
                )
            self.places[key] = origin.file, part
            self._add(whole, origin, part, host_array(full, tensor.array))

    def _add(self, parameter: str, origin: Origin, part: str, array: Any) -> None:
        arrays = self._waiting.setdefault(parameter, {})
        arrays[part] = array
        if origin.fields and set(arrays) != set(origin.fields):
            return
        value = array
        if origin.fields:
            value = record_class(origin.record, origin.fields)(**{name: arrays[name] for name in origin.fields})
        if origin.file in self.parameters:
            raise ConfigError(f"two parameters would be {origin.file}", hint="convert one checkpoint at a time")
        del self._waiting[parameter]
        self.parameters[_path(origin.file, self._plan)] = parameter
        flags: Literal[64, 80] = 80 if origin.bfloat16_flags == "80" else 64
        target = self.directory / origin.file
        try:
            target.parent.mkdir(exist_ok=True)
            with target.open("xb") as file:
                write_shard(file, value, bfloat16_flags=flags)
        except OSError as err:
            raise StagingError(f"cannot write {origin.file}: {reason(err)}", hint="is there room?") from err

    def end_batch(self) -> None:
        # The other part comes in a later batch; memory that somebody holds is lost to the budget.
        self._waiting = {
            name: {part: array.copy() for part, array in arrays.items()} for name, arrays in self._waiting.items()
        }

    def finish(self) -> None:
        if self._waiting:
            name = next(iter(self._waiting))
            raise ConfigError(f"{escape(name)}: expected all fields of its record, found some", hint="see its metadata")


def _read_origins(path: str, view: memoryview) -> Mapping[str, Origin]:
    """Return what the metadata of an admitted safetensors file says of shards; empty where it says nothing."""
    length = int.from_bytes(view[:8], "little")
    loads = partial(strict_json.loads, max_depth=3, max_values=10_000_000, max_keys=10_000_000)
    try:
        header: Any = loads(bytes(view[8 : 8 + length]).rstrip(b" "), max_bytes=MAX_HEADER_BYTES)
        text = header.get("__metadata__", {}).get(SHARDS_KEY)
        if text is None:
            return {}
        told = _ORIGINS.validate_python(loads(text.encode(), max_bytes=MAX_HEADER_BYTES))
    except (ManifestError, ValidationError) as err:
        raise ConfigError(f"{escape(path)}: its metadata {SHARDS_KEY} is not what safeload writes") from err
    twice = [file for file, times in Counter(origin.file for origin in told.values()).items() if times > 1]
    if twice:
        raise ConfigError(f"{escape(path)}: its metadata has {twice[0]} twice")
    return told
