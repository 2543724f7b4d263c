"""The chain on one screen: verify the manifest, stage the bytes, admit what is in them, decode, assemble.

Each step takes the proof that the step before made, so there is no way to skip one. Read this first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from safeload import __version__
from safeload.decoding import arrays, decode
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FileSetError,
    Finding,
    ManifestError,
    PolicyError,
    RejectedError,
    escape,
    reason,
)
from safeload.manifest import FileEntry, Manifest, ManifestTensor, TrustedManifest
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import FileReport, Progress, Report
from safeload.scanning import admit, manifest_facts, scan, verify_files
from safeload.signing import sign_manifest
from safeload.sizes import parse_size
from safeload.staging import stage
from safeload.trust.dsse import MAX_ENVELOPE_BYTES
from safeload.trust.store import Trust, TrustStore, load_trust
from safeload.verifying import verify_manifest

if TYPE_CHECKING:
    from safeload.trust.keys import SecretKey


def load(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    shardings: Any = None,
    memory_budget: int | str | None = None,
    progress: Progress | None = None,
) -> Mapping[str, Any]:
    """Load a checkpoint, but only the bytes that trusted keys signed and the policy allows.

    Args:
        directory: Where the files are. Untrusted; it may change while it is read.
        manifest: The signed manifest: a path, or the bytes of the envelope.
        trust: Who may sign: a trust store, one or more public keys, or paths of either.
        policy: What may be in the files: a shipped policy's name, a path to your own, or a `Policy`.
        shardings: None for numpy arrays. Otherwise where each tensor goes, and the result holds jax Arrays: a pytree
            of `jax.sharding.Sharding` that is a prefix of the result, or a function of a tensor's path and shape.
        memory_budget: Most bytes to stage in ("8GiB", or a number); None for what the machine has available.
        progress: Told how far it has come.

    Returns:
        What each file of tensors holds, by its path in the manifest. Containers are as in the file, tensors are
        read-only arrays that share the staged memory, records are frozen classes with the declared fields.

    Raises:
        SignatureError: Not enough trusted keys signed this manifest.
        ManifestError: The manifest breaks its schema.
        FileSetError: The directory does not hold exactly the listed files.
        DigestMismatchError: A file's bytes are not those that were signed.
        FormatError: A file breaks its format.
        LimitError: A file asks for more than the policy's limits.
        PolicyError: A file holds what the policy does not allow.
        ConfigError: An argument is wrong.
        StagingError: There is no room, or a file cannot be read.
        ShardingError: A tensor does not fit its sharding.
    """
    _, tree = load_host(
        directory, manifest=manifest, trust=trust, policy=policy, memory_budget=memory_budget, progress=progress
    )
    if shardings is None:
        return {path: arrays(value) for path, value in tree.items()}
    # The only late import: jax takes half a second to import and claims devices, which verifying must not.
    try:
        from safeload.assembling import assemble
    except ImportError as err:
        raise ConfigError("JAX is not installed, and shardings need it", hint="install safeload's extra `jax`") from err
    assembled: Mapping[str, Any] = assemble(tree, shardings)
    return assembled


def load_host(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    memory_budget: int | str | None = None,
    progress: Progress | None = None,
) -> tuple[TrustedManifest, Mapping[str, Any]]:
    """Return the trusted manifest, and what each file holds with every tensor as a `HostTensor`; see `load`."""
    rules = load_policy(policy)
    budget = parse_size(memory_budget) if isinstance(memory_budget, str) else memory_budget
    envelope, source, itself = read_manifest(manifest)
    trusted = verify_manifest(envelope, load_trust(trust), source=source)
    staged = stage(directory, trusted, memory_budget=budget, progress=progress, ignore=itself)
    return trusted, decode(admit(staged, policy=rules))


def verify(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    progress: Progress | None = None,
) -> Report:
    """Prove that a directory is what trusted keys signed and the policy allows, without loading it.

    Every file is read once, hashed and scanned; memory stays small whatever the size. The result says what was true of
    the bytes that were read: to use them, `load` them, which verifies what it loads.

    Args:
        directory: Where the files are. Untrusted.
        manifest: The signed manifest: a path, or the bytes of the envelope.
        trust: Who may sign: a trust store, one or more public keys, or paths of either.
        policy: What may be in the files.
        progress: Told how far it has come.

    Returns:
        The report, whose verdict is "accepted".

    Raises:
        RejectedError: As `load`; every finding of every file is in it.
        ConfigError: An argument is wrong.
        StagingError: The directory cannot be read.
    """
    report = check(directory, manifest=manifest, trust=trust, policy=policy, progress=progress)
    if report.verdict == "rejected":
        raise _as_error(report)
    return report


def check(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    progress: Progress | None = None,
) -> Report:
    """Return the report of `verify`, also where its verdict is "rejected"; an untrusted manifest still raises."""
    rules = load_policy(policy)
    envelope, source, itself = read_manifest(manifest)
    trusted = verify_manifest(envelope, load_trust(trust), source=source)
    return verify_files(directory, trusted, policy=rules, ignore=itself, progress=progress)


def _as_error(report: Report) -> RejectedError:
    findings = report.all_findings
    if report.findings:
        return FileSetError(*findings)
    errors = [file.error for file in report.files if file.error is not None]
    # Bytes that are not the signed ones explain whatever else is wrong with them.
    error = DigestMismatchError if DigestMismatchError in errors else errors[0]
    return error(*findings)


def sign(
    directory: str | Path,
    *,
    keys: Sequence[SecretKey],
    model: str,
    revision: str,
    version: int = 1,
    policy: str | Path | Policy = DEFAULT_POLICY,
    parameters: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> bytes:
    """Make a signed manifest of a directory: every file, its digest, and the tensors in it with theirs.

    A directory that the policy refuses is not signed: a signature says "these are the weights", and nobody should
    have to ask whether they were looked at.

    Args:
        directory: The checkpoint.
        keys: Private keys to sign with, one signature each.
        model: Name of the model ("xai-org/grok-1"); what publishers are scoped to.
        revision: Which state of it: a commit, a date, a step.
        version: Counts the manifests of the model, from 1; a later one replaces an earlier one.
        policy: What may be in the files.
        parameters: For shards that carry no names, the parameter that each holds, by path.
        progress: Told how far it has come.

    Returns:
        The envelope's bytes, to be written to a file beside the directory.

    Raises:
        PolicyError: The policy refuses a file; every finding is in it.
        ManifestError: A path cannot stand in a manifest.
        ConfigError: An argument is wrong.
        StagingError: The directory cannot be read.
    """
    envelope, _ = sign_and_report(
        directory,
        keys=keys,
        model=model,
        revision=revision,
        version=version,
        policy=policy,
        parameters=parameters,
        progress=progress,
    )
    return envelope


def sign_and_report(
    directory: str | Path,
    *,
    keys: Sequence[SecretKey],
    model: str,
    revision: str,
    version: int = 1,
    policy: str | Path | Policy = DEFAULT_POLICY,
    parameters: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> tuple[bytes, Report]:
    """Do what `sign` does, and return the report of what was signed beside the envelope."""
    report = scan([directory], policy=policy, digests=True, progress=progress)
    if report.verdict == "rejected":
        raise PolicyError(*report.all_findings)
    root = Path(directory)
    names = dict(parameters or {})
    listed = [replace(file, path=Path(file.path).relative_to(root).as_posix()) for file in report.files]
    files = [_entry(file, names) for file in listed]
    if names:
        raise ConfigError(f"parameters name files that are not there: {escape(', '.join(sorted(names)))}")
    manifest = Manifest.of(
        files,
        stream=model,
        revision=revision,
        version=version,
        issued=datetime.now(UTC),
        tool_version=__version__,
    )
    envelope = sign_manifest(manifest, keys)
    # Read back, so that the report says what the envelope says and not what was meant.
    trusted = verify_manifest(envelope, TrustStore.of_keys(key.public for key in keys))
    return envelope, Report(tuple(listed), (), {**report.facts, **manifest_facts(trusted)})


def _entry(file: FileReport, parameters: dict[str, str]) -> FileEntry:
    path = file.path
    if file.sha256 is None or file.size is None:
        raise TypeError("a file goes into a manifest with its digest")
    try:
        return FileEntry(
            path=path,
            size=file.size,
            sha256=file.sha256,
            format=file.format,  # type: ignore[arg-type] # an accepted file has one of the manifest's formats
            role=_role(file.format, PurePosixPath(path).name),
            parameter=parameters.pop(path, None),
            tensors=tuple(ManifestTensor.of(tensor) for tensor in file.tensors),
            globals=file.globals,
        )
    except ValueError as err:
        raise ManifestError(
            Finding("bad-manifest", f"{escape(path)} cannot stand in a manifest: {escape(str(err))}")
        ) from err


def _role(kind: str, name: str) -> Literal["weights", "tokenizer", "config", "docs", "other"]:
    if kind == "pickle":
        return "weights"
    if name.startswith(("tokenizer", "vocab", "merges", "special_tokens")):
        return "tokenizer"
    return {"json": "config", "text": "docs"}.get(kind, "other")  # type: ignore[return-value] # three of the five


def read_manifest(manifest: str | Path | bytes) -> tuple[bytes, str, frozenset[tuple[int, int]]]:
    """Return a manifest's envelope, what to call it, and which file it is: (device, inode), empty for bytes.

    Raises:
        ConfigError: The file cannot be read.
    """
    if isinstance(manifest, bytes):
        return manifest, "manifest", frozenset()
    try:
        with Path(manifest).open("rb") as file:
            status = os.fstat(file.fileno())
            # One byte more than is allowed, so that the verifier sees that it is too long.
            return file.read(MAX_ENVELOPE_BYTES + 1), str(manifest), frozenset({(status.st_dev, status.st_ino)})
    except (OSError, ValueError) as err:
        message = f"cannot read the manifest {escape(str(manifest))}: {reason(err)}"
        raise ConfigError(message, hint="check the path") from err
