"""Interchange: directories that are signed by a bundle of OpenSSF Model Signing, verified and written.

A bundle lists names and digests, and no sizes, tensors, revision or version. So it can be verified, and a directory can
be scanned while its bytes are compared; but to load one, sign a manifest of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from safeload.comparing import ComparedFile, compare_files
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FileSetError,
    Finding,
    FormatError,
    PolicyError,
    RollbackError,
    escape,
    reason,
)
from safeload.files import Root, StreamSource
from safeload.formats import Siblings
from safeload.oms import OmsManifest, verify_bundle, write_bundle
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import FileReport, Progress, Report
from safeload.scanning import (
    Job,
    LastRead,
    SiblingsOnDisk,
    check_indexes,
    file_report,
    parse,
    peek_limit,
    policy_facts,
    scan,
)
from safeload.trust.certificates import CertificateRoots
from safeload.trust.store import SigstoreIdentity, Trust, load_trust, trust_items

if TYPE_CHECKING:
    from safeload.trust.keys import SecretKey

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


def trusted_bundle(
    bundle: bytes, source: str, trust: Trust, *, now: datetime, pin: str | None, model: str | None
) -> OmsManifest:
    """Prove that a trusted key or certificate signed a bundle; see `verify_bundle`, whose errors it raises.

    Args:
        bundle: As it was read once from wherever it lay.
        source: What to call it in findings.
        trust: As `load` takes it; a file of PEM certificates names authorities whose certificates may sign, and a
            `SigstoreIdentity` somebody who signs without a key of their own.
        now: The moment at which keys and certificates must be valid.
        pin: The digest of the one statement that is accepted.
        model: The name that it must state.
    """
    items = trust_items(trust)
    certificates = {item: pem for item in items if isinstance(item, str | Path) and (pem := _certificates(item))}
    identity = next((item for item in items if isinstance(item, SigstoreIdentity)), None)
    keys = [item for item in items if not isinstance(item, SigstoreIdentity)]
    others = [item for item in keys if not isinstance(item, str | Path) or item not in certificates]
    roots = CertificateRoots.from_pem(b"\n".join(certificates.values())) if certificates else None
    store = load_trust(others) if others or (roots is None and identity is None) else None
    signed = verify_bundle(bundle, store, roots=roots, identity=identity, now=now, pin=pin, model=model, source=source)
    if store is not None and pin is None and store.epochs.get(signed.name, 1) > 1:
        # A bundle states no epoch, so it cannot be of the one that the root has raised the model to.
        message = f"expected epoch {store.epochs[signed.name]}, which the trust store grants to {escape(signed.name)}, "
        hint = f"get the newest manifest; to use exactly this bundle, pin it: --pin sha256:{signed.sha256}"
        raise RollbackError(Finding("rollback", f"{message}found a bundle, which has none", file=source, hint=hint))
    return signed


def _certificates(path: str | Path) -> bytes | None:
    """Return what a trust file holds if it holds certificates, None otherwise; `load_trust` reads all others."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(1 << 20)
    except (OSError, ValueError) as err:
        message = f"cannot read trust file {escape(str(path))}: {reason(err)}"
        raise ConfigError(message, hint="check the path") from err
    return head if head.lstrip().startswith(_CERTIFICATE) else None


def verify_bundle_files(
    directory: str | Path,
    bundle: OmsManifest,
    *,
    policy: Policy,
    ignore: Mapping[str, bytes] = MappingProxyType({}),
    progress: Progress | None = None,
) -> Report:
    """Hold a directory against a trusted bundle: the file set, each digest, and what the policy allows.

    Every file is read once, and the bytes that are parsed are the bytes that are hashed.

    Args:
        directory: Where the files are, or the one file that was signed. Untrusted.
        bundle: What should be there.
        policy: What is allowed, signed or not.
        ignore: Files that may lie there unsigned, with exactly these bytes: the bundle itself.
        progress: Told of the bytes that were hashed.

    Raises:
        StagingError: The directory could not be opened.
    """
    used: dict[str, set[str]] = {}
    last: LastRead = {}

    def look(root: Root, source: StreamSource, path: str) -> FileReport:
        siblings = SiblingsOnDisk(Job(path, path, source.size, root), used, last)
        kind, parsed = parse(source, path, policy, _Signed(siblings, path, bundle))
        return file_report(path, kind, source.size, parsed)

    found = compare_files(
        Path(directory),
        bundle,
        look=look,
        max_bytes=policy.limits.max_file_bytes,
        peek_limit=peek_limit(policy),
        ignore=ignore,
        progress=progress,
    )
    unlooked = {finding.file for finding in found.findings if finding.file is not None}
    files = check_indexes([_report(file) for file in found.files], used, unlooked)
    facts = {**policy_facts(policy), **_bundle_facts(bundle), "ignored": list(found.ignored)}
    return Report(tuple(files), found.findings, facts)


class _Signed:
    """The files beside one that the bundle lists: what it leaves out judges nothing."""

    def __init__(self, siblings: Siblings, path: str, bundle: OmsManifest) -> None:
        self._siblings = siblings
        self._folder = path[: len(path) - len(PurePosixPath(path).name)]
        self._bundle = bundle

    def read(self, name: str, limit: int) -> bytes | None:
        """See `Siblings.read`."""
        return self._siblings.read(name, limit) if self._folder + name in self._bundle.files else None


def _report(file: ComparedFile[FileReport]) -> FileReport:
    looked = file.looked or FileReport(file.path, "unknown", None)
    findings, error = looked.findings, looked.error
    if file.refusal is not None and not findings:
        findings, error = file.refusal.findings, FormatError
    if file.findings:
        findings, error = (*file.findings, *findings), DigestMismatchError if file.looked else FileSetError
    known = replace(looked, size=file.size, sha256=file.sha256, findings=findings, error=error)
    return replace(known, tensors=(), index=None) if findings else known


def _bundle_facts(bundle: OmsManifest) -> dict[str, Any]:
    signer = bundle.signer
    return {
        "bundle": {
            "format": "oms",
            "sha256": bundle.sha256,
            "model": bundle.name,
            "method": signer.method,
            "signers": [{"name": signer.name, "keyid": signer.keyid}],
        }
    }


def sign_bundle(
    directory: str | Path,
    *,
    key: SecretKey,
    model: str,
    policy: str | Path | Policy = DEFAULT_POLICY,
    progress: Progress | None = None,
) -> tuple[bytes, Report]:
    """Sign a directory as a bundle that `model_signing verify key` accepts, and return it with the report.

    Args:
        directory: The model.
        key: An ECDSA key; the format has no Ed25519.
        model: What to call the model; informational in this format.
        policy: What may be in the files. A directory that it refuses is not signed.
        progress: Told how far it has come.

    Raises:
        PolicyError: The policy refuses a file; every finding is in it.
        ManifestError: A path cannot stand in a bundle.
        ConfigError: The key is of another kind, or another argument is wrong.
        StagingError: The directory cannot be read.
    """
    rules = load_policy(policy)
    report = scan([directory], policy=rules, digests=True, progress=progress)
    if not report.is_accepted:
        raise PolicyError(*report.all_findings)
    listed = [(Path(file.path).relative_to(directory).as_posix(), str(file.sha256)) for file in report.files]
    return write_bundle(listed, key, model), report
