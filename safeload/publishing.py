"""Publish: a directory to a signed manifest. The publisher's side of the chain; `loading` is the consumer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from safeload import __version__
from safeload.digests import sha256_hex
from safeload.errors import ConfigError, Finding, ManifestError, PolicyError, escape
from safeload.manifest import (
    FileEntry,
    Manifest,
    ManifestTensor,
    RestoreKind,
    Role,
    encode_chunks,
    first_problem,
    required_roles,
    role_of,
)
from safeload.policy import DEFAULT_POLICY, Policy
from safeload.report import FileReport, Progress, Report
from safeload.scanning import manifest_facts, scan_to_sign
from safeload.signing import sign_manifest
from safeload.trust.store import TrustStore
from safeload.verifying import verify_manifest

if TYPE_CHECKING:
    from safeload.trust.keys import SecretKey


def sign(
    directory: str | Path,
    *,
    keys: Sequence[SecretKey],
    model: str,
    revision: str,
    version: int = 1,
    epoch: int = 1,
    expires: datetime | None = None,
    previous: str | None = None,
    kind: RestoreKind = "inference",
    require: Sequence[Role] = (),
    policy: str | Path | Policy = DEFAULT_POLICY,
    parameters: Mapping[str, str] | None = None,
    blake3: bool = False,
    progress: Progress | None = None,
) -> bytes:
    """Make a signed manifest of a directory: every file, its digests, and the tensors in it with theirs.

    A directory that the policy refuses is not signed: a signature says "these are the weights", and nobody should
    have to ask whether they were looked at. Nor is one that lacks what a restore of its kind needs.

    Args:
        directory: The checkpoint.
        keys: Private keys to sign with, one signature each.
        model: Name of the model ("xai-org/grok-1"); what publishers are scoped to.
        revision: Which state of it: a commit, a date, a step.
        version: Counts the manifests of the model, from 1; a later one replaces an earlier one.
        epoch: Goes before `version`; one more when versions have to start anew.
        expires: When it stops to be current, with its time zone; None for never.
        previous: SHA-256 of the payload of the manifest that this one replaces.
        kind: What a restore is for. To go on training takes weights, optimizer, step and random state.
        require: Roles that such a restore needs besides; a file says by its name what its role is.
        policy: What may be in the files.
        parameters: For shards that carry no names, the parameter that each holds, by path.
        blake3: Whether to add BLAKE3 digests of each file and chunk, by which loading is faster.
        progress: Told how far it has come.

    Returns:
        The envelope's bytes, to be written to a file beside the directory.

    Raises:
        PolicyError: The policy refuses a file; every finding is in it.
        ManifestError: A path cannot stand in a manifest, or a role is missing.
        ConfigError: An argument is wrong.
        StagingError: The directory cannot be read.
    """
    envelope, _ = sign_and_report(
        directory,
        keys=keys,
        model=model,
        revision=revision,
        version=version,
        epoch=epoch,
        expires=expires,
        previous=previous,
        kind=kind,
        require=require,
        policy=policy,
        parameters=parameters,
        blake3=blake3,
        progress=progress,
    )
    return envelope


def sign_and_report(directory: str | Path, *, keys: Sequence[SecretKey], **stated: Any) -> tuple[bytes, Report]:
    """Do what `sign` does, and return the report of what was signed beside the envelope.

    Args:
        directory: The checkpoint.
        keys: Private keys to sign with.
        **stated: As `sign` takes it.
    """
    manifest, report = describe(directory, **stated)
    envelope = sign_manifest(manifest, keys)
    # Read back, so that the report says what the envelope says and not what was meant. Its expiry may have passed.
    trusted = verify_manifest(
        envelope,
        TrustStore.of_keys(key.public for key in keys),
        pin=f"sha256:{sha256_hex(manifest.to_payload())}",
    )
    return envelope, replace(report, facts={**report.facts, **manifest_facts(trusted)})


def describe(
    directory: str | Path,
    *,
    model: str,
    revision: str,
    version: int = 1,
    epoch: int = 1,
    expires: datetime | None = None,
    previous: str | None = None,
    kind: RestoreKind = "inference",
    require: Sequence[Role] = (),
    policy: str | Path | Policy = DEFAULT_POLICY,
    parameters: Mapping[str, str] | None = None,
    blake3: bool = False,
    progress: Progress | None = None,
) -> tuple[Manifest, Report]:
    """Do what `sign` does but for the signing: return the manifest, for a signer elsewhere, and the report."""
    report = scan_to_sign(directory, policy=policy, blake3=blake3, progress=progress)
    if report.verdict == "rejected":
        raise PolicyError(*report.all_findings)
    root = Path(directory)
    names = dict(parameters or {})
    listed = [replace(file, path=Path(file.path).relative_to(root).as_posix()) for file in report.files]
    files = [_entry(file, names) for file in listed]
    if names:
        raise ConfigError(
            f"parameters name files that are not there: {escape(', '.join(sorted(names)))}",
            hint="leave them out, or put the files into the directory",
        )
    manifest = Manifest.of(
        files,
        stream=model,
        revision=revision,
        version=version,
        epoch=epoch,
        expires=expires,
        previous=previous,
        kind=kind,
        requires=_required(kind, require, {file.role for file in files}),
        issued=datetime.now(UTC),
        tool_version=__version__,
    )
    return manifest, replace(report, files=tuple(listed))


def _required(kind: RestoreKind, more: Sequence[Role], present: set[Role]) -> tuple[Role, ...]:
    if kind not in get_args(RestoreKind):
        raise ConfigError(f"kind: expected {' or '.join(get_args(RestoreKind))}, found {escape(str(kind))!r}")
    if unknown := [role for role in more if role not in get_args(Role)]:
        raise ConfigError(f"require: expected roles out of {', '.join(get_args(Role))}, found {escape(unknown[0])!r}")
    roles = required_roles(kind, present, more=more)
    missing = [role for role in roles if role not in present]
    if missing:
        raise ManifestError(
            *(
                Finding(
                    "role-missing",
                    f"expected a file of role {role}, which a restore for {kind} needs, found none",
                    hint=f"put the file of its {role} into the directory, under a name that says so",
                )
                for role in missing
            )
        )
    return roles


def _entry(file: FileReport, parameters: dict[str, str]) -> FileEntry:
    path = file.path
    if file.sha256 is None or file.size is None:
        raise TypeError("a file goes into a manifest with its digest")
    try:
        return FileEntry(
            path=path,
            size=file.size,
            sha256=file.sha256,
            chunks=None if file.chunks is None else encode_chunks(file.chunks),
            blake3=file.blake3,
            blake3_chunks=None if file.blake3_chunks is None else encode_chunks(file.blake3_chunks),
            format=file.format,
            role=role_of(file.format, PurePosixPath(path).name),
            parameter=parameters.pop(path, None),
            tensors=tuple(ManifestTensor.of(tensor) for tensor in file.tensors),
            globals=file.globals,
        )
    except ValidationError as err:
        raise ManifestError(
            Finding("bad-manifest", f"{escape(path)} cannot stand in a manifest: {escape(first_problem(err))}")
        ) from err
