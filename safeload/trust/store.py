"""Which keys are trusted, for which streams, how many of them must have signed, and what was taken back.

A store has three forms. Keys that the caller names make one that scopes nothing. A plain JSON file is a person's own
configuration: who may write it decides what is trusted. A signed file is a DSSE envelope over the same JSON with a
root: the keys that sign every version of the store, so that version N hands trust on to version N + 1.

A signed file that is read from a path is configuration too, and as far as the caller is concerned it is trusted because
they named it: its own signatures show that it is whole and that its root stands behind it, not who that root is. What
makes it trusted is the digest that the caller pins, or an older store, already trusted, that `update` starts from.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from safeload.digests import SHA256_HEX, sha256_hex
from safeload.errors import (
    ConfigError,
    Finding,
    ManifestError,
    RollbackError,
    SignatureError,
    VerificationError,
    escape,
    reason,
)
from safeload.trust import strict_json
from safeload.trust.dsse import MAX_SIGNATURES, Envelope, Signature, decode_base64
from safeload.trust.history import format_instant, parse_instant
from safeload.trust.keys import PUBLIC_PEM_MARK, KeyKind, PublicKey, SecretKey

PAYLOAD_TYPE: Final = "application/vnd.safeload.trust.v1+json"
"""What the envelope of a signed store says that it holds; a signature over a manifest is never one over a store."""

MAX_TRUST_BYTES: Final = 1024 * 1024
"""Longest JSON of a trust store: 1 MiB is room for some thousand keys."""

MAX_TRUST_FILE_BYTES: Final = 2 * MAX_TRUST_BYTES
"""Longest trust file: base64 takes a third more than the JSON, and 256 signatures take 50 KB."""

MAX_ROOT_KEYS: Final = 32
"""Most root keys. Each of 256 signatures that fit none may be tried against all; people who can meet are fewer."""

MAX_HASHED_BYTES: Final = 2 * 1024**3
"""Most bytes that are hashed to find whose the signatures of one envelope are: anybody can add some, and each is tried
with one trusted key after another. Ed25519 hashes the message anew each time (RFC 8032, 5.1.7); 2 GiB take seconds."""

_TRY_BYTES: Final = 64 * 1024
"""What the arithmetic of one signature counts for beside them: 100 microseconds, in which as many bytes are hashed."""

MAX_HOPS: Final = 256
"""Most versions of one update: one a day for most of a year."""

PIN_PREFIX: Final = "sha256:"
"""What a pin starts with: it names its algorithm."""

_WHAT_FITS: Final = (
    "a name has 1 to 255 characters and a reason up to 1,000; a model's name or glob has letters, digits and ._:/@+-, "
    "a glob also * and ?"
)

_STORE_MARK: Final = b'"publishers"'
"""What every plain trust store has, and hardly any other JSON file."""

_SIGNED_MARK: Final = b"vnd.safeload.trust.v1+json"
"""What every signed trust store has."""

_MAX_DEPTH: Final = 8
"""File, list of publishers, publisher, list of globs make four."""

GIVEN_KEYS: Final = "keys given"
"""Name of the publisher that stands for keys which the caller named one by one."""

Trust: TypeAlias = (
    "TrustStore | str | Path | PublicKey | SigstoreIdentity"
    " | Sequence[str | Path | PublicKey | TrustStore | SigstoreIdentity]"
)
"""What a caller may name as trusted."""


@dataclass(frozen=True, slots=True)
class SigstoreIdentity:
    """Whom to accept where a bundle is signed without a long-lived key, and who vouches for that.

    Attributes:
        identity: What the certificate must name: an e-mail address, or the URI of a workflow.
        issuer: Who must have authenticated it: the URL of an OpenID Connect provider.
        trusted_root: File with the authorities' and logs' keys (Sigstore's `trusted_root.json`). There is no default,
            and nothing is fetched.
    """

    identity: str
    issuer: str
    trusted_root: Path


@dataclass(frozen=True, slots=True)
class Publisher:
    """Somebody who may sign some streams.

    Attributes:
        name: What to call them.
        streams: Globs over stream names: `*` stands for any run of characters, `/` included, `?` for any one.
        threshold: How many of their keys must have signed.
        keyids: Their keys, each once.
    """

    name: str
    streams: tuple[str, ...]
    threshold: int
    keyids: tuple[str, ...]

    def may_sign(self, stream: str) -> bool:
        """Whether one of the globs fits the stream's whole name; case matters."""
        return any(fnmatchcase(stream, glob) for glob in self.streams)


@dataclass(frozen=True, slots=True)
class Root:
    """Who signs the store itself.

    Attributes:
        threshold: How many of the keys must have signed.
        keyids: The keys, each once.
    """

    threshold: int
    keyids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Validity:
    """When signatures of a key count: by the verifier's clock, as nothing trustworthy says when they were made.

    Attributes:
        not_before: First instant, UTC; None for always.
        not_after: Last instant, UTC; None for ever.
    """

    not_before: datetime | None = None
    not_after: datetime | None = None


@dataclass(frozen=True, slots=True)
class Revocation:
    """Why a key does not count any more.

    Attributes:
        reason: In the words of whoever revoked it.
        since: When it fell into other hands, UTC, as far as is known; None otherwise. For people: whoever has the key
            can date a signature as they like, so none of its signatures counts.
    """

    reason: str
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class TrustStore:
    """Proves that every threshold in it can be met by distinct keys that are all at hand; not that it is trusted.

    Attributes:
        keys: Every key, by its keyid.
        publishers: At least one; the first that fits a manifest is the one that is named in reports.
        version: Counts the store's revisions; 0 where it was made of keys alone.
        issued: When this version was made, UTC; None where nobody said.
        root: Who may sign the next version; None in a store that is not signed.
        validity: Limits in time, by keyid.
        revoked_keys: What does not count, by keyid, whether or not it is among the keys.
        revoked_manifests: Why a manifest was taken back, by the SHA-256 of its payload.
        epochs: What epoch the manifests of a stream must have, where it is not 1.
        sha256: Of the bytes that were signed, or of the plain file; empty where there were none.

    Raises:
        ConfigError: A keyid is not that of its key, unknown or listed twice, a threshold is not within 1 and the
            number of keys, a validity is empty, there are too many root keys, or there is no publisher.
    """

    keys: Mapping[str, PublicKey]
    publishers: tuple[Publisher, ...]
    version: int = 0
    issued: datetime | None = None
    root: Root | None = None
    validity: Mapping[str, Validity] = field(default_factory=dict)
    revoked_keys: Mapping[str, Revocation] = field(default_factory=dict)
    revoked_manifests: Mapping[str, str] = field(default_factory=dict)
    epochs: Mapping[str, int] = field(default_factory=dict)
    sha256: str = ""

    def __post_init__(self) -> None:
        limited = {keyid: valid for keyid, valid in self.validity.items() if valid != Validity()}
        object.__setattr__(self, "validity", limited)
        for name in ("keys", "validity", "revoked_keys", "revoked_manifests", "epochs"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        for keyid, key in self.keys.items():
            if keyid != key.keyid:
                raise ConfigError(f"expected keyid {key.keyid} for key {escape(key.name)!r}, found {escape(keyid)}")
        if not self.publishers:
            raise ConfigError("expected at least one trusted key", hint="name one with --trust KEY.pub")
        for publisher in self.publishers:
            self._check(f"publisher {escape(publisher.name)!r}", publisher)
        if self.root is not None:
            self._check("root", self.root)
            if len(self.root.keyids) > MAX_ROOT_KEYS:
                raise ConfigError(
                    f"root: expected up to {MAX_ROOT_KEYS} keys, found {len(self.root.keyids)}",
                    hint="leave to the root the keys of those who can meet",
                )
        for keyid, valid in self.validity.items():
            if keyid not in self.keys:
                raise ConfigError(
                    f"validity: keyid {escape(keyid)} is not among the keys",
                    hint="list the key itself under `keys` too",
                )
            if valid.not_before is not None and valid.not_after is not None and valid.not_before > valid.not_after:
                raise ConfigError(
                    f"key {keyid}: expected not_before to be before not_after, found it after",
                    hint="exchange the two times",
                )

    def _check(self, who: str, role: Publisher | Root) -> None:
        distinct = set(role.keyids)
        if len(distinct) != len(role.keyids):
            raise ConfigError(f"{who}: expected each keyid once, found one twice", hint="name each key once")
        if unknown := sorted(distinct - self.keys.keys()):
            raise ConfigError(
                f"{who}: keyid {escape(unknown[0])} is not among the keys", hint="list the key itself under `keys` too"
            )
        if not 1 <= role.threshold <= len(distinct):
            raise ConfigError(
                f"{who}: expected a threshold within 1 and {len(distinct)}, found {role.threshold}",
                hint="name more keys, or ask for fewer signatures; two keys in one file count once",
            )

    def inactive_reason(self, keyid: str, now: datetime | None) -> str | None:
        """Return why signatures of a key do not count, or None if they do.

        Args:
            keyid: The key's.
            now: The time, with its zone; None to look at revocations only.
        """
        revoked = self.revoked_keys.get(keyid)
        if revoked is not None:
            since = "" if revoked.since is None else f" since {format_instant(revoked.since)}"
            return f"revoked{since}: {revoked.reason}"
        valid = self.validity.get(keyid)
        if now is None or valid is None:
            return None
        if valid.not_before is not None and now < valid.not_before:
            return f"not valid before {format_instant(valid.not_before)}"
        if valid.not_after is not None and now > valid.not_after:
            return f"not valid after {format_instant(valid.not_after)}"
        return None

    def active_keys(self, now: datetime) -> Mapping[str, PublicKey]:
        """Return the keys whose signatures count at a time (with its zone): neither revoked nor out of validity."""
        return {keyid: key for keyid, key in self.keys.items() if self.inactive_reason(keyid, now) is None}

    @classmethod
    def of_keys(cls, keys: Iterable[PublicKey]) -> TrustStore:
        """Return a store in which any one of the keys may sign any stream.

        Raises:
            ConfigError: There is no key.
        """
        by_keyid = {key.keyid: key for key in keys}
        return cls(by_keyid, (Publisher(GIVEN_KEYS, ("*",), 1, tuple(by_keyid)),) if by_keyid else ())

    @classmethod
    def parse(cls, data: bytes, *, source: str = "trust store") -> TrustStore:
        """Return the store that a trust file states, signed or plain.

        A signed one must have its root's threshold of signatures, by keys that it does not revoke. Their validity is
        not looked at: a key may be at its end while what it signed in time stands.

        Args:
            data: The file's bytes.
            source: What to call it in messages.

        Raises:
            ConfigError: It is no such file, has an unknown field or a wrong type, breaks a rule of `TrustStore`, or
                lacks signatures of its root.
        """
        try:
            if _SIGNED_MARK not in data:
                return _parse(data)
            signed = SignedStore.parse(data)
            _require_root(signed.envelope, signed.store, None, "its own root")
        except VerificationError as err:
            found = err.findings[0]
            raise ConfigError(f"{escape(source)}: {found.message}", hint=found.hint) from err
        return signed.store

    def to_payload(self) -> bytes:
        """Return the store as the JSON to sign, always the same for equal stores.

        Raises:
            ConfigError: It has no root, no date or no version, or what it says does not read back as what it is.
        """
        if self.root is None or self.issued is None or self.version < 1:
            raise ConfigError(
                "expected a trust store with a root, a date and a version", hint="see `safeload trust init --help`"
            )
        payload = json.dumps(_as_json(self), ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            again = _parse(payload)
        except ManifestError as err:
            raise ConfigError(err.findings[0].message, hint=_WHAT_FITS) from err
        if again != replace(self, sha256=again.sha256):
            raise ConfigError(
                "expected times of whole seconds in a trust store", hint="leave out fractions: microsecond=0"
            )
        return payload


@dataclass(frozen=True, slots=True)
class SignedStore:
    """A store in its envelope, whoever signed it by now: nothing to trust yet, something to show and to sign.

    Attributes:
        envelope: As it was read.
        store: What its payload says.
        signers: Keys of the store's root that signed it, by keyid, in the order of the signatures; revoked ones too.
    """

    envelope: Envelope
    store: TrustStore
    signers: tuple[str, ...]

    @classmethod
    def parse(cls, data: bytes) -> SignedStore:
        """Return what an envelope holds, without asking for a threshold.

        Raises:
            ManifestError: It is no envelope, holds something else ("bad-trust-store"), or the store has no root.
            SignatureError: There is no signature.
        """
        envelope = _envelope(data)
        store = _parse_signed(envelope)
        return cls(envelope, store, tuple(fitting_keys(envelope, _root_keys(store))))

    def missing(self, now: datetime | None = None, *, before: TrustStore | None = None) -> int:
        """Return how many signatures of root keys it still needs, at least.

        Args:
            now: The time, with its zone, at which the keys have to be valid; None to look at revocations only.
            before: The store that this one succeeds, whose root has to sign as well; None to leave it out.
        """
        stores = (self.store,) if before is None else (self.store, before)
        return max(max(0, _threshold(each) - len(_counting(each, self.signers, now))) for each in stores)

    def serialize(self) -> bytes:
        """Return the envelope as the bytes of a trust file."""
        return self.envelope.serialize()

    def signed(self, *keys: SecretKey) -> SignedStore:
        """Return it with one more signature for each key.

        Raises:
            ConfigError: A key is none of the store's root, has signed already, or there are too many.
        """
        root = self.store.root
        added: dict[str, Signature] = {}
        for key in keys:
            keyid = key.public.keyid
            if root is None or keyid not in root.keyids:
                raise ConfigError(
                    f"key {keyid[:16]} is not in the root of this trust store, which alone may sign it",
                    hint="`safeload trust show STORE` lists the keys of the root",
                )
            if keyid in self.signers or keyid in added:
                raise ConfigError(f"key {keyid[:16]} has signed this trust store already", hint="use another root key")
            added[keyid] = Signature(key.sign(self.envelope.signed_bytes), keyid)
        signatures = (*self.envelope.signatures, *added.values())
        if len(signatures) > MAX_SIGNATURES:
            raise ConfigError(
                f"expected up to {MAX_SIGNATURES} signatures, found {len(signatures)}",
                hint="make the next version, which begins without any: safeload trust add STORE -o NEW",
            )
        return replace(self, envelope=replace(self.envelope, signatures=signatures), signers=(*self.signers, *added))


def sign_store(store: TrustStore, keys: Sequence[SecretKey]) -> SignedStore:
    """Sign a store by keys of its root. They may be fewer than its threshold: the others sign the result.

    Raises:
        ConfigError: There is no key, one is none of the root's or comes twice, or the store cannot be written.
    """
    if not keys:
        raise ConfigError("expected at least one root key to sign with", hint="name one with --sign KEY")
    payload = store.to_payload()
    unsigned = SignedStore(Envelope(payload, PAYLOAD_TYPE, ()), replace(store, sha256=sha256_hex(payload)), ())
    return unsigned.signed(*keys)


def update(
    store: TrustStore, *envelopes: bytes, now: datetime | None = None, sources: Sequence[str] | None = None
) -> TrustStore:
    """Prove that trust in `store` extends to the last of its successors, and return that.

    Each successor has the next version and is signed by the root thresholds of both, the one before and its own, by
    distinct keys that are neither revoked nor out of validity there. It is parsed only after the first of the two
    was met. None is skipped: each says who may sign the next.

    Args:
        store: What is trusted already. It has a root.
        envelopes: Its successors, in the order of their versions.
        now: The time, with its zone, at which root keys have to be valid; None for the clock's.
        sources: What to call each envelope in findings; its path, where it has one.

    Raises:
        SignatureError: "root-threshold-not-met": too few root keys of one of the two signed, that count. Who signed and
            does not count is named. Or there is no signature at all.
        RollbackError: "version-not-next": the version is not one more than that before.
        ManifestError: "bad-trust-store": one is no signed trust store, or there are more than `MAX_HOPS`.
        ConfigError: `store` has no root, or nothing was offered.
    """
    if store.root is None:
        raise ConfigError(
            "this trust store has no root, so that nobody can sign its successor",
            hint="make a signed one with `safeload trust init`",
        )
    if not envelopes:
        raise ConfigError(
            "expected at least one trust store to update to", hint="name every version after yours, in order"
        )
    if len(envelopes) > MAX_HOPS:
        raise _bad(
            f"expected up to {MAX_HOPS} versions in one update, found {len(envelopes)}",
            hint=f"update {MAX_HOPS} versions at a time",
        )
    time = datetime.now(UTC) if now is None else now
    names = sources or [f"update {number}" for number in range(1, len(envelopes) + 1)]
    for data, source in zip(envelopes, names, strict=True):
        try:
            store = _successor(store, data, time)
        except VerificationError as err:
            raise type(err)(*(finding.in_file(source) for finding in err.findings)) from err
    return store


def _successor(old: TrustStore, data: bytes, now: datetime) -> TrustStore:
    envelope = _envelope(data)
    _require_root(envelope, old, now, f"the root of version {old.version}")
    new = _parse_signed(envelope)
    if new.version != old.version + 1:
        raise RollbackError(
            Finding(
                "version-not-next",
                f"expected version {old.version + 1} of the trust store, found version {new.version}",
                hint=_next_hint(old, new),
            )
        )
    _require_root(envelope, new, now, f"its own root, of version {new.version}")
    return new


def _next_hint(old: TrustStore, new: TrustStore) -> str:
    if new.version > old.version:
        return "name every version after yours, in order: each says who may sign the next"
    if new.version < old.version:
        return f"there is nothing to do: yours is newer, version {old.version}"
    if new.sha256 == old.sha256:
        return f"this is version {old.version} itself: leave it out, and name only what comes after it"
    return f"this is another version {old.version} than yours: ask its publisher which of the two is theirs"


def is_version(store: TrustStore, data: bytes) -> bool:
    """Whether an envelope holds exactly this store, whoever signed it: then there is nothing to take over from it.

    Args:
        store: What is trusted already.
        data: The envelope's bytes.
    """
    try:
        envelope = _envelope(data)
    except VerificationError:
        return False
    return sha256_hex(envelope.payload) == store.sha256


def fitting_keys(envelope: Envelope, keys: Mapping[str, PublicKey]) -> dict[str, PublicKey]:
    """Return the keys of which at least one signature fits, by keyid, in the order of the signatures.

    Signatures that fit none are ignored (DSSE): anybody can add one, and it must not make a good envelope a bad one, as
    long as there is an end to trying them.

    Args:
        envelope: What was signed.
        keys: Whom to look for, by keyid: distinct ones, as a keyid is the digest of the key.

    Raises:
        ManifestError: "too-much-to-hash": what `MAX_HASHED_BYTES` allow was tried, and signatures are left.
    """
    message = envelope.signed_bytes
    limit = MAX_HASHED_BYTES // (len(message) + _TRY_BYTES)
    n_tries = 0
    found: dict[str, PublicKey] = {}
    for signature in {each.sig: each for each in envelope.signatures}.values():
        # The hinted key first; the hint itself proves nothing, and a wrong one does no harm.
        for keyid in sorted(keys, key=signature.keyid.__ne__):
            if n_tries == limit:
                raise ManifestError(
                    Finding(
                        "too-much-to-hash",
                        f"expected to know whose {len(envelope.signatures)} signatures on {len(message):,} bytes are "
                        f"after trying keys {limit:,} times, found more to try",
                        hint="take out the signatures of keys that you do not trust: they prove nothing",
                    )
                )
            n_tries += 1
            if _fits(keys[keyid], signature.sig, message):
                found[keyid] = keys[keyid]
                break
    return found


def _fits(key: PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except SignatureError:
        return False
    return True


def trust_items(trust: Trust) -> Sequence[str | Path | PublicKey | TrustStore | SigstoreIdentity]:
    """Return what a caller named as trusted, one by one.

    Raises:
        ConfigError: It is something else.
    """
    kinds = (str, Path, PublicKey, TrustStore, SigstoreIdentity)
    named: object = (trust,) if isinstance(trust, kinds) else trust
    # No iterator, which would be empty for whoever asks next, and then nobody would be trusted.
    items = tuple(named) if isinstance(named, Collection) and not isinstance(named, bytes | Mapping) else (named,)
    for item in items:
        if not isinstance(item, kinds):
            raise ConfigError(
                f"trust: expected public keys, trust stores, or paths of them, found {type(item).__name__}",
                hint="name the public key of who signed it, such as trust=Path('publisher.key.pub')",
            )
    return items


def load_trust(trust: Trust, *, pin: str | None = None) -> TrustStore:
    """Return who is trusted: any of the keys that were named, and whom a trust file scopes.

    Without a pin a trust file, signed or not, is trusted as a key file is: because the caller named its path.

    Args:
        trust: Keys, paths of PEM public keys and at most one trust file or store, alone or in a sequence; what a file
            is shows from its content. A `TrustStore` alone is returned as it is.
        pin: The one trust store that is accepted: `sha256:` and its digest (`TrustStore.sha256`).

    Raises:
        ConfigError: A file cannot be read, holds a private key or is neither of the two, a trust file is not valid
            or not the only one, nothing was named, or the store is not the one that was pinned.
    """
    pinned = None if pin is None else _pinned(pin)
    keys: list[PublicKey] = []
    stores: list[TrustStore] = []
    for item in trust_items(trust):
        if isinstance(item, SigstoreIdentity):
            raise ConfigError(
                "a Sigstore identity signs bundles of OpenSSF Model Signing, and no manifests",
                hint="name the key that signed the manifest: --trust KEY.pub",
            )
        found = item if isinstance(item, (PublicKey, TrustStore)) else _read(Path(item))
        if isinstance(found, TrustStore):
            stores.append(found)
        else:
            keys.append(found)
    if len(stores) > 1:
        raise ConfigError(f"expected at most one trust file, found {len(stores)}", hint="put all publishers in one")
    if pinned is not None:
        _require_pinned(stores, pinned)
        if keys:
            raise ConfigError("a pinned trust store says alone who may sign", hint="leave out the keys beside it")
    if not stores:
        return TrustStore.of_keys(keys)
    if not keys:
        return stores[0]
    # What the store says of a key that was named as well still holds: its limits, and that it was revoked.
    given = TrustStore.of_keys(keys)
    return replace(stores[0], keys={**given.keys, **stores[0].keys}, publishers=stores[0].publishers + given.publishers)


def _pinned(pin: object) -> str:
    digest = str(pin).removeprefix(PIN_PREFIX)
    if digest == pin or SHA256_HEX.fullmatch(digest) is None:
        raise ConfigError(
            f"trust pin: expected {PIN_PREFIX} and 64 lower-case hexadecimal digits, found {escape(str(pin))!r}",
            hint="`safeload trust show STORE` shows the digest",
        )
    return digest


def _require_pinned(stores: Sequence[TrustStore], pinned: str) -> None:
    if not stores:
        raise ConfigError("a trust store was pinned, and none was named", hint="name it with --trust STORE")
    if stores[0].sha256 != pinned:
        raise ConfigError(
            f"expected the pinned trust store sha256:{pinned}, found sha256:{stores[0].sha256 or '(none)'}",
            hint="get the pinned store; if this one is meant to replace it, check it and pin this one",
        )


def _read(path: Path) -> PublicKey | TrustStore:
    shown = escape(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TRUST_FILE_BYTES + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read trust file {shown}: {reason(err)}", hint="check the path") from err
    # Not every JSON object: a manifest or a model's config would be told which fields of a trust store it lacks.
    if data.lstrip().startswith(b"{") and (_STORE_MARK in data or _SIGNED_MARK in data):
        return TrustStore.parse(data, source=str(path))
    if b"-----BEGIN " in data:
        try:
            return PublicKey.from_pem(data, name=path.stem)
        except ConfigError as err:
            raise ConfigError(f"{shown}: {err.message}", hint=err.hint) from err
    raise ConfigError(
        f"{shown}: expected a public key (PEM, {PUBLIC_PEM_MARK.decode()}) or a trust store (JSON with "
        f"{_STORE_MARK.decode()}), found neither",
        hint="name the .pub file that the publisher gave you; a manifest goes to -m",
    )


# ---------------------------------------------------------------- the root's signatures


def _envelope(data: bytes) -> Envelope:
    if len(data) > MAX_TRUST_FILE_BYTES:
        raise _bad(f"expected at most {MAX_TRUST_FILE_BYTES} bytes, found {len(data)}")
    try:
        envelope = Envelope.parse(data)
    except ManifestError as err:
        raise _bad(err.findings[0].message.replace("a signed manifest", "a signed trust store")) from err
    if envelope.payload_type != PAYLOAD_TYPE:
        raise _bad(f"expected a payload of type {PAYLOAD_TYPE}, found {escape(envelope.payload_type)}")
    return envelope


def _root_keys(store: TrustStore) -> dict[str, PublicKey]:
    return {} if store.root is None else {keyid: store.keys[keyid] for keyid in store.root.keyids}


def _threshold(store: TrustStore) -> int:
    # Without a root there are no root keys either, so that one signature can never be had.
    return 1 if store.root is None else store.root.threshold


def _counting(store: TrustStore, keyids: Iterable[str], now: datetime | None) -> list[str]:
    root = _root_keys(store)
    return [keyid for keyid in keyids if keyid in root and store.inactive_reason(keyid, now) is None]


def _require_root(envelope: Envelope, store: TrustStore, now: datetime | None, whose: str) -> None:
    """Refuse an envelope that less than the threshold of a store's root signed, and name what does not count."""
    threshold = _threshold(store)
    fitting = fitting_keys(envelope, _root_keys(store))
    counting = _counting(store, fitting, now)
    if len(counting) >= threshold:
        return
    idle = "".join(
        f"; that of {escape(key.name)} ({keyid[:16]}) does not count: {escape(store.inactive_reason(keyid, now) or '')}"
        for keyid, key in fitting.items()
        if keyid not in counting
    )
    raise SignatureError(
        Finding(
            "root-threshold-not-met",
            f"expected {threshold} signatures of {whose}, found {len(counting)}{idle}",
            hint="have more of its keys sign: `safeload trust sign STORE --key KEY`",
        )
    )


# ---------------------------------------------------------------- the document


def _real_instant(text: str) -> str:
    parse_instant(text)
    return text


_Name = Annotated[str, StringConstraints(min_length=1, max_length=255)]
_Glob = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:/@+*?-]{1,255}$")]
_Stream = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:/@+-]{1,255}$")]
_Reason = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Ordinal = Annotated[int, Field(ge=1)]
_Instant = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"),
    AfterValidator(_real_instant),
]
_Lax = Field(strict=False)  # JSON has lists, a frozen model has tuples; what is in them stays strict


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class _KeyEntry(_Model):
    type: KeyKind
    spki: str
    name: _Name
    not_before: _Instant | None = None
    not_after: _Instant | None = None


class _RootEntry(_Model):
    threshold: int
    keyids: Annotated[tuple[str, ...], _Lax]


class _PublisherEntry(_Model):
    name: _Name
    streams: Annotated[tuple[_Glob, ...], _Lax, Field(min_length=1)]
    threshold: int
    keyids: Annotated[tuple[str, ...], _Lax]


class _RevokedKeyEntry(_Model):
    keyid: _Sha256
    reason: _Reason
    since: _Instant | None = None


class _RevokedManifestEntry(_Model):
    sha256: _Sha256
    reason: _Reason


class _StoreFile(_Model):
    spec: Literal["1.0"]
    version: _Ordinal
    issued: _Instant | None = None
    keys: dict[str, _KeyEntry]
    root: _RootEntry | None = None
    publishers: Annotated[tuple[_PublisherEntry, ...], _Lax]
    revoked_keys: Annotated[tuple[_RevokedKeyEntry, ...], _Lax] = ()
    revoked_manifests: Annotated[tuple[_RevokedManifestEntry, ...], _Lax] = ()
    epochs: dict[_Stream, _Ordinal] = Field(default_factory=dict)


def _parse(data: bytes) -> TrustStore:
    """Return the store that JSON states.

    Raises:
        ManifestError: "bad-trust-store", whatever is wrong with it.
    """
    try:
        value = strict_json.loads(data, max_bytes=MAX_TRUST_BYTES, max_depth=_MAX_DEPTH)
        file = _StoreFile.model_validate(value)
        return TrustStore(
            keys={keyid: _key(keyid, entry) for keyid, entry in file.keys.items()},
            publishers=tuple(Publisher(p.name, p.streams, p.threshold, p.keyids) for p in file.publishers),
            version=file.version,
            issued=_time(file.issued),
            root=None if file.root is None else Root(file.root.threshold, file.root.keyids),
            validity={
                keyid: Validity(_time(entry.not_before), _time(entry.not_after))
                for keyid, entry in file.keys.items()
                if (entry.not_before, entry.not_after) != (None, None)
            },
            revoked_keys={
                keyid: Revocation(entry.reason, _time(entry.since))
                for keyid, entry in _each_once("revoked_keys", ((e.keyid, e) for e in file.revoked_keys)).items()
            },
            revoked_manifests=_each_once("revoked_manifests", ((e.sha256, e.reason) for e in file.revoked_manifests)),
            epochs=file.epochs,
            sha256=sha256_hex(data),
        )
    except ManifestError as err:
        raise _bad(err.findings[0].message) from err
    except ValidationError as err:
        problem = err.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"]) or "the file"
        raise _bad(f"{escape(place)}: {escape(problem['msg'])}") from err
    except ConfigError as err:
        raise _bad(err.message, hint=err.hint) from err


def _parse_signed(envelope: Envelope) -> TrustStore:
    store = _parse(envelope.payload)
    for field_name, value in (("root", store.root), ("issued", store.issued)):
        if value is None:
            raise _bad(f'expected "{field_name}" in a trust store that is signed')
    return store


def _as_json(store: TrustStore) -> dict[str, Any]:
    """Return what `_parse` reads, with every field, so that whoever reads the file sees what it could say."""

    def key(keyid: str, public: PublicKey) -> dict[str, Any]:
        valid = store.validity.get(keyid, Validity())
        limits = {"not_before": _text(valid.not_before), "not_after": _text(valid.not_after)}
        return {"type": public.kind, "spki": base64.b64encode(public.der).decode("ascii"), "name": public.name} | {
            name: limit for name, limit in limits.items() if limit is not None
        }

    def role(holder: Publisher | Root) -> dict[str, Any]:
        return {"threshold": holder.threshold, "keyids": list(holder.keyids)}

    return {
        "spec": "1.0",
        "version": store.version,
        "issued": _text(store.issued),
        "keys": {keyid: key(keyid, public) for keyid, public in store.keys.items()},
        "root": None if store.root is None else role(store.root),
        "publishers": [{"name": p.name, "streams": list(p.streams), **role(p)} for p in store.publishers],
        "revoked_keys": [
            {"keyid": keyid, "reason": revoked.reason, "since": _text(revoked.since)}
            for keyid, revoked in store.revoked_keys.items()
        ],
        "revoked_manifests": [
            {"sha256": sha256, "reason": reason} for sha256, reason in store.revoked_manifests.items()
        ],
        "epochs": dict(store.epochs),
    }


_Value = TypeVar("_Value")


def _each_once(what: str, pairs: Iterable[tuple[str, _Value]]) -> dict[str, _Value]:
    listed = list(pairs)
    found = dict(listed)
    if len(found) != len(listed):
        raise ConfigError(f"{what}: expected each digest once, found one twice", hint="leave out the second")
    return found


def _time(text: str | None) -> datetime | None:
    return None if text is None else parse_instant(text)


def _text(time: datetime | None) -> str | None:
    return None if time is None else format_instant(time)


def _bad(message: str, *, hint: str | None = None) -> ManifestError:
    return ManifestError(
        Finding("bad-trust-store", message, hint=hint or "get the trust store from whoever publishes it again")
    )


def _key(keyid: str, entry: _KeyEntry) -> PublicKey:
    try:
        key = PublicKey(decode_base64(entry.spki), name=entry.name)
    except ValueError as err:
        raise ConfigError(f"key {escape(keyid)}: spki: {escape(str(err))}") from err
    except ConfigError as err:
        raise ConfigError(f"key {escape(keyid)}: {err.message}", hint=err.hint) from err
    if key.kind != entry.type:
        raise ConfigError(
            f"key {escape(keyid)}: expected type {key.kind}, found {entry.type}",
            hint="write the type that the key is of",
        )
    return key
