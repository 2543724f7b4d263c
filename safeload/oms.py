"""OpenSSF Model Signing: from a bundle that anybody may have written to an `OmsManifest`, and back.

The format lists names and digests: no sizes, no tensors, no version. So what it proves is less than a manifest of
safeload does: which files there are and what is in them, and nothing of which state of the model is the newest.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Final, Literal, NoReturn, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from safeload.digests import Hasher, new_blake3, sha256_hex
from safeload.errors import (
    ConfigError,
    Finding,
    ManifestError,
    RevokedError,
    SignatureError,
    VerificationError,
    escape,
)
from safeload.manifest import MAX_FILES, check_path
from safeload.trust import oms as bundles
from safeload.trust.certificates import CertificateRoots
from safeload.trust.dsse import pae
from safeload.trust.keys import SecretKey
from safeload.trust.oms import Bundle, BundleSigner
from safeload.trust.store import Publisher, SigstoreIdentity, TrustStore

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://model_signing/signature/v1.0"

SINGLE_FILE: Final = "."
"""What `model_signing` calls the file where the model is one file and no directory."""

MAX_IGNORED: Final = 10_000
"""Most paths that a signature may leave out; real bundles have five."""

_NEVER_HASHED: Final = frozenset({".git", ".gitattributes", ".github", ".gitignore"})
"""What `model_signing` passes over at the top of a model, whatever a signature says. We do not: see `OmsManifest`."""

_MAX_DEPTH: Final = 8
"""Statement, predicate, resources, resource make four."""

_RANGE: Final = re.compile(r"(.+):(0|[1-9][0-9]{0,15}):([1-9][0-9]{0,15})", re.DOTALL)
"""A shard's name: path, first byte, and the byte behind the last; read from the right, as a path may have colons."""

Algorithm: TypeAlias = Literal["sha256", "blake2b", "blake3"]
"""BLAKE2b with 512 bits, the others with 256."""

_DIGEST_BYTES: Final[Mapping[Algorithm, int]] = MappingProxyType({"sha256": 32, "blake2b": 64, "blake3": 32})


def new_hasher(algorithm: Algorithm) -> Hasher:
    """Return a hasher that has seen nothing yet.

    Raises:
        ConfigError: It is BLAKE3, which is not installed.
    """
    if algorithm == "blake3":
        return new_blake3()
    return hashlib.sha256() if algorithm == "sha256" else hashlib.blake2b()


@dataclass(frozen=True, slots=True)
class OmsFile:
    """One file, as it was signed.

    Attributes:
        path: Relative to the model's directory, as `check_path` allows it; `SINGLE_FILE` where there is none.
        algorithm: Of the digests.
        digests: In hexadecimal: one of the whole file, or one of each shard in order.
        shard_size: Bytes of each shard but the last; None where the file is hashed whole.
        size: Length in bytes where the shards say it; None where it was not signed.
    """

    path: str
    algorithm: Algorithm
    digests: tuple[str, ...]
    shard_size: int | None = None
    size: int | None = None


@dataclass(frozen=True, slots=True)
class OmsManifest:
    """Proves that a trusted signer signed this closed list of files. Only `verify_bundle` makes one.

    Attributes:
        name: What the signer called the model: the name of a directory, which scopes refer to.
        sha256: Of the signed statement: what to pin.
        signer: Who it was, and how that was found.
        files: By their path, at least one.
        ignored: Paths whose files, and all below them, the signer left out. They may be there and are never opened.
            Nothing else is left out, `.git` included, unless it is among these.
    """

    name: str
    sha256: str
    signer: BundleSigner
    files: Mapping[str, OmsFile]
    ignored: frozenset[str]

    def is_ignored(self, path: str) -> bool:
        """Whether the signature says that it does not cover `path`: it, or a directory above it, is in `ignored`."""
        return _is_below(path, self.ignored)


def verify_bundle(
    data: bytes,
    trust: TrustStore | None,
    *,
    roots: CertificateRoots | None = None,
    identity: SigstoreIdentity | None = None,
    now: datetime,
    pin: str | None = None,
    model: str | None = None,
    source: str = "bundle",
) -> OmsManifest:
    """Prove that a trusted signer signed this bundle, and that what it lists is well formed.

    The statement is parsed only after its signature was checked, from the same bytes in memory.

    Args:
        data: The bundle, as it was read once from wherever it lay.
        trust: Keys that may sign. A bundle has one signature, so only publishers with a threshold of 1 can be met,
            and the name that it states must be a stream that one of them may sign.
        roots: Authorities whose certificates may sign anything. There are none by default.
        identity: A Sigstore identity that may sign anything.
        now: The moment at which keys and certificates must be valid.
        pin: "sha256:" and the digest of the one statement to accept. The format has no version, so that nothing else
            keeps a mirror from serving an older model with its older signature.
        model: The name that it must state.
        source: What to call the bundle in findings; its path, where it has one.

    Raises:
        SignatureError: The signer is not trusted, or not for this model; or there is no signature.
        RevokedError: The trust store takes back the signer's key, or the statement.
        ManifestError: The bundle or the statement is malformed or signs less than it seems to; or it is another one.
        ConfigError: BLAKE3 or Sigstore is needed, and not installed.
    """
    try:
        bundle = Bundle.parse(data)
        signer = bundles.authenticate(bundle, trust, roots=roots, identity=identity, now=now)
        name, files, ignored = _parse(bundle.envelope.payload)
        manifest = OmsManifest(name, sha256_hex(bundle.envelope.payload), signer, files, ignored)
        if trust is not None:
            _check_trust(manifest, trust)
        if pin is not None and pin != f"sha256:{manifest.sha256}":
            hint = "get the bundle that you pinned, or check what changed and pin this one"
            message = f"expected the pinned statement {escape(pin)}, found sha256:{manifest.sha256}"
            raise ManifestError(Finding("pin-mismatch", message, hint=hint))
        if model is not None and model != name:
            message = f"expected the model {escape(model)!r}, found {escape(name)!r}"
            raise ManifestError(Finding("model-mismatch", message, hint="check which model you meant"))
    except VerificationError as err:
        raise type(err)(*(finding.in_file(source) for finding in err.findings)) from err
    new_hasher(next(iter(manifest.files.values())).algorithm)  # better now than after 300 GB
    return manifest


def write_bundle(files: Iterable[tuple[str, str]], key: SecretKey, name: str) -> bytes:
    """Return a bundle that lists the files and is signed with the key, as `model_signing verify key` reads it.

    No path is left out: what `model_signing` never hashes, such as `.gitattributes`, must not be among the files.

    Args:
        files: Path and SHA-256 (hexadecimal) of every file of the model.
        key: An ECDSA key.
        name: What to call the model.

    Raises:
        ConfigError: The key is of a kind that the format does not have.
        ManifestError: The files cannot stand in one bundle.
    """
    if not key.public.kind.startswith("ecdsa"):
        message = f"expected an ECDSA key, as OpenSSF Model Signing has no others, found {key.public.kind}"
        raise ConfigError(message, hint="make one with `safeload keygen --kind ecdsa-p256 -o KEY`")
    listed = sorted(files)
    for path, _ in listed:
        if path.split("/")[0] in _NEVER_HASHED:
            message = (
                "expected no file that model_signing passes over, as it would call the model incomplete, found one"
            )
            hint = "move it out of the directory, or sign in safeload's own format"
            raise ManifestError(Finding("never-hashed", message, file=path, hint=hint))
    try:
        root = hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in listed)).hexdigest()
    except ValueError as err:
        _refuse("bad-manifest", "expected digests in hexadecimal, found something else", err)
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": []},
            "resources": [{"name": path, "algorithm": "sha256", "digest": digest} for path, digest in listed],
        },
    }
    payload = json.dumps(statement).encode("ascii")
    _parse(payload)  # nothing is signed that would not be accepted
    return bundles.write(payload, key.sign(pae(bundles.PAYLOAD_TYPE, payload)), key.public)


def _check_trust(manifest: OmsManifest, trust: TrustStore) -> None:
    """Return if the statement was not taken back, and a publisher whom one key satisfies may sign what it names."""
    why = trust.revoked_manifests.get(manifest.sha256)
    if why is not None:
        message = f"expected a statement that holds, found one that was taken back: {escape(why)}"
        raise RevokedError(Finding("revoked-manifest", message, hint="get the model's newer bundle from its publisher"))
    if manifest.signer.method != "key":
        return  # whoever names an authority or an identity trusts it with any model
    name, keyid = manifest.name, manifest.signer.keyid
    theirs = [publisher for publisher in trust.publishers if keyid in publisher.keyids]
    entitled = [publisher for publisher in theirs if publisher.may_sign(name)]
    if any(publisher.threshold == 1 for publisher in entitled):
        return
    if entitled:
        nearest: Publisher = min(entitled, key=lambda publisher: publisher.threshold)
        message = f"expected {nearest.threshold} signatures of {escape(nearest.name)}, found the one that a bundle has"
        hint = "ask for a manifest of safeload, which several keys can sign"
        raise SignatureError(Finding("threshold-not-met", message, hint=hint))
    message = f"expected a model that its signer may sign, found {escape(name)!r}"
    hint = "check which model you meant; to trust one key for any, name its .pub file with --trust"
    raise SignatureError(Finding("stream-not-in-scope", message, hint=hint))


# ---------------------------------------------------------------- the statement


def _parse(payload: bytes) -> tuple[str, Mapping[str, OmsFile], frozenset[str]]:
    """Return the name, the files and the ignored paths that a statement has, if it agrees with itself."""
    try:
        value = bundles.load_protobuf_json(payload, max_bytes=bundles.MAX_BUNDLE_BYTES, max_depth=_MAX_DEPTH)
        statement = _Statement.model_validate(value)
    except ManifestError as err:
        _refuse("bad-manifest", err.findings[0].message, err)
    except ValidationError as err:
        _refuse("bad-manifest", bundles.first_problem(err), err)
    subject, predicate = statement.subject[0], statement.predicate
    how = predicate.serialization
    if not predicate.resources:
        _refuse("empty-model", "expected at least one file, found none")
    if how.allow_symlinks:
        # What lies behind a link was hashed as if it were here, and a linked directory's files were not even listed.
        _refuse("symlinks-signed", "expected a model without symbolic links, found one signed with links followed")
    _check_resources(predicate, subject.digest.sha256)
    files = {file.path: file for file in (_whole(predicate) if how.method == "files" else _sharded(predicate))}
    ignored = frozenset(how.ignore_paths)
    _check_paths(files, ignored)
    return subject.name, MappingProxyType(files), ignored


def _check_resources(predicate: _Predicate, signed_root: str) -> None:
    """Hold each digest, and the root over all of them in the order in which they are listed, to what was signed."""
    how = predicate.serialization
    if (how.shard_size is None) != (how.method == "files"):
        _refuse("bad-manifest", "expected a shard_size exactly where the method is shards")
    # The reference writes the second form for shards; its specification has the first.
    algorithms = {how.hash_type} | (set() if how.shard_size is None else {f"{how.hash_type}-sharded-{how.shard_size}"})
    n_digits = 2 * _DIGEST_BYTES[how.hash_type]
    root = hashlib.sha256()
    for resource in predicate.resources:
        if resource.algorithm not in algorithms:
            _refuse("bad-manifest", f"{resource.name}: expected {how.hash_type}, found {resource.algorithm}")
        if len(resource.digest) != n_digits:
            _refuse("bad-manifest", f"{resource.name}: expected {n_digits} digits, found {len(resource.digest)}")
        root.update(bytes.fromhex(resource.digest))
    if root.hexdigest() != signed_root:
        _refuse("root-digest", f"expected the root digest {root.hexdigest()} of what is listed, found {signed_root}")


def _whole(predicate: _Predicate) -> Iterator[OmsFile]:
    seen: set[str] = set()
    for resource in predicate.resources:
        if resource.name in seen:
            _refuse("bad-manifest", f"expected each file once, found {resource.name} twice")
        seen.add(resource.name)
        yield OmsFile(resource.name, predicate.serialization.hash_type, (resource.digest,))


def _sharded(predicate: _Predicate) -> Iterator[OmsFile]:
    """Yield the files that the shards make up, each covered from its first byte to its last without a gap."""
    how = predicate.serialization
    size = how.shard_size or 0
    shards: dict[str, list[tuple[int, int, str]]] = {}
    for resource in predicate.resources:
        found = _RANGE.fullmatch(resource.name)
        if found is None:
            _refuse("bad-manifest", f"expected a shard's name as path:start:end, found {resource.name}")
        path, start, end = found[1], int(found[2]), int(found[3])
        shards.setdefault(path, []).append((start, end, resource.digest))
    for path, ranges in shards.items():
        ranges.sort()
        length = ranges[-1][1]
        expected = [(start, min(start + size, length)) for start in range(0, len(ranges) * size, size)]
        if [(start, end) for start, end, _ in ranges] != expected or ranges[-1][0] == length:
            _refuse("bad-manifest", f"{path}: expected shards of {size} bytes that cover it once, found others")
        yield OmsFile(path, how.hash_type, tuple(digest for _, _, digest in ranges), size, length)


def _check_paths(files: Mapping[str, OmsFile], ignored: frozenset[str]) -> None:
    if len(files) > MAX_FILES:
        _refuse("bad-manifest", f"expected at most {MAX_FILES} files, found {len(files)}")
    if set(files) == {SINGLE_FILE}:
        return
    for path in files:
        try:
            check_path(path)
        except ValueError as err:
            _refuse("bad-manifest", f"{path}: {err}", err)
    if len({_fold(path) for path in files}) != len(files):
        _refuse("bad-manifest", "two paths differ only in case or normalization")
    for path in sorted(ignored):
        if any(part in {"", ".", ".."} for part in path.split("/")):
            # "." would leave out everything that is not listed.
            _refuse("bad-manifest", f"expected ignore_paths of plain relative paths, found {path}")
    for path in files:
        if _is_below(path, ignored):
            _refuse("bad-manifest", f"expected a file to be signed or ignored, found both of {path}")


def _is_below(path: str, paths: frozenset[str]) -> bool:
    parts = path.split("/")
    return any("/".join(parts[:n]) in paths for n in range(1, len(parts) + 1))


def _fold(path: str) -> str:
    """Caseless matching of canonical equivalents (Unicode, 3.13, D145)."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())


def _refuse(code: str, message: str, cause: Exception | None = None) -> NoReturn:
    raise ManifestError(
        Finding(
            code,
            f"not a usable statement of OpenSSF Model Signing: {escape(message)}",
            hint="have its publisher sign the model again",
        )
    ) from cause


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


_Lax = Field(strict=False)  # JSON has lists, a frozen model has tuples; what is in them stays strict
_Name = Annotated[str, StringConstraints(min_length=1, max_length=8192)]
_Hex = Annotated[str, StringConstraints(pattern=r"^(?:[0-9a-f]{2})+$", max_length=128)]


class _Digest(_Model):
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Subject(_Model):
    name: Annotated[str, StringConstraints(max_length=4096)]
    digest: _Digest


class _Resource(_Model):
    name: _Name
    algorithm: Annotated[str, StringConstraints(max_length=64)]
    digest: _Hex


class _Serialization(_Model):
    method: Literal["files", "shards"]
    hash_type: Algorithm
    allow_symlinks: bool
    shard_size: Annotated[int, Field(ge=1)] | None = None
    ignore_paths: Annotated[tuple[_Name, ...], _Lax, Field(max_length=MAX_IGNORED)] = ()


class _Predicate(_Model):
    serialization: _Serialization
    resources: Annotated[tuple[_Resource, ...], _Lax]


class _Statement(_Model):
    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: Annotated[tuple[_Subject, ...], _Lax, Field(min_length=1, max_length=1)]
    predicateType: Literal["https://model_signing/signature/v1.0"]  # noqa: N815 - the field's name in the file
    predicate: _Predicate
