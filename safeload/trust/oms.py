"""Bundles of OpenSSF Model Signing: who signed which bytes. What the bytes say is read in `safeload.oms`.

A bundle (Sigstore bundle v0.3) holds a DSSE envelope and a word on whose signature it is: a public key, a chain of
X.509 certificates, or a Sigstore identity. All of that word is the attacker's until it meets what the caller trusts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Literal, NoReturn, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, Finding, ManifestError, RevokedError, SignatureError, escape, reason
from safeload.trust import strict_json
from safeload.trust.certificates import CertificateRoots, certified_key
from safeload.trust.dsse import MAX_ENVELOPE_BYTES, Envelope, Signature, decode_base64
from safeload.trust.keys import PublicKey
from safeload.trust.store import SigstoreIdentity, TrustStore

MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"

MAX_BUNDLE_BYTES: Final = MAX_ENVELOPE_BYTES
"""Longest bundle that is looked at: 64 MiB, room for the digests of some 200,000 files."""

_MAX_DEPTH: Final = 8
"""Bundle, material, entries, entry, proof, hashes make six."""

_MAX_VALUES: Final = 4096
"""A bundle has few values whatever its length, because the list of files is one string; nothing in it is authentic."""

_BUNDLE_MARK: Final = re.compile(rb'"dsseEnvelope"\s*:')

_FLOAT: Final = re.compile(rb"[0-9]\.0\s*[,}\]]")
# Possessive, and content with a string that does not end, so that no text makes it go back over what it has read.
_STRING_OR_FLOAT: Final = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+"?)|\b([0-9]+)\.0\b', re.DOTALL)

_HINT_ROOTS: Final = "name the root's certificate (PEM) with --trust ROOT.pem"
_HINT_ECDSA: Final = "ask for a signature with an ECDSA key"
_HINT_SIGSTORE: Final = "name the identity, its issuer and a trusted root file"

Method: TypeAlias = Literal["key", "certificate", "sigstore"]


@dataclass(frozen=True, slots=True)
class BundleSigner:
    """Who signed a bundle, found by checking the signature.

    Attributes:
        method: How the signature is tied to them.
        name: What the trusted key is called, whom the certificate names, or the Sigstore identity.
        keyid: SHA-256 of the DER public key; for Sigstore, whose keys live for minutes, of the certificate.
    """

    method: Method
    name: str
    keyid: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """A well-formed bundle. Nothing in it is authentic before `authenticate` has returned.

    Attributes:
        envelope: With exactly one signature.
        method: What the bundle says it was signed with.
        key_hint: SHA-256 of the key's PEM text in hexadecimal; "" where there is none, or another method.
        chain: Certificates in DER, the signer's first; empty for the method "key".
        raw: The bundle's own bytes, for Sigstore's verifier.
    """

    envelope: Envelope
    method: Method
    key_hint: str
    chain: tuple[bytes, ...]
    raw: bytes

    @classmethod
    def parse(cls, data: bytes) -> Bundle:
        """Return the bundle in `data`.

        Raises:
            ManifestError: Code "bad-bundle": it is too long, no strict JSON, of another version or type, has an unknown
                or missing field, or more than one signature.
            SignatureError: Code "no-signatures".
        """
        try:
            value = strict_json.loads(data, max_bytes=MAX_BUNDLE_BYTES, max_depth=_MAX_DEPTH, max_values=_MAX_VALUES)
            file = _BundleFile.model_validate(value)
        except ManifestError as err:
            _refuse_bundle(err.findings[0].message, err.findings[0].offset, err)
        except ValidationError as err:
            _refuse_bundle(first_problem(err), None, err)
        sealed, material = file.dsseEnvelope, file.verificationMaterial
        if not sealed.signatures:
            message = "expected one signature, found none"
            raise SignatureError(Finding("no-signatures", message, hint="get the bundle from its publisher again"))
        if len(sealed.signatures) > 1:
            # The format gives one signer, and its own verifier looks at the first only: more would be for show.
            _refuse_bundle(f"expected one signature, found {len(sealed.signatures)}")
        given = [each for each in (material.publicKey, material.x509CertificateChain, material.certificate) if each]
        if len(given) != 1:
            _refuse_bundle(
                f"expected one of publicKey, x509CertificateChain and certificate as verification material, "
                f"found {len(given)}"
            )
        if material.certificate is None and (material.tlogEntries or material.timestampVerificationData):
            _refuse_bundle("expected no log entries or time stamps beside a key or certificates, found some")
        if material.certificate is not None and not material.tlogEntries:
            _refuse_bundle("expected at least one log entry beside a Sigstore certificate, found none")
        try:
            envelope = Envelope(
                payload=decode_base64(sealed.payload),
                payload_type=sealed.payloadType,
                signatures=(Signature(decode_base64(sealed.signatures[0].sig)),),
            )
            chain = tuple(decode_base64(each.rawBytes) for each in material.chain)
        except ValueError as err:
            _refuse_bundle(str(err), None, err)
        hint = material.publicKey.hint if material.publicKey else ""
        return cls(envelope, material.method, hint, chain, data)


def is_bundle(data: bytes) -> bool:
    """Whether `data` is for this reader rather than that of DSSE envelopes; it says nothing of whether it is valid.

    Either reader takes only what a trusted key signed as its own type of statement, so who fools this gains nothing.
    """
    return data.lstrip()[:1] == b"{" and _BUNDLE_MARK.search(data) is not None


def key_hint(key: PublicKey) -> str:
    """Return how a bundle refers to a key: SHA-256 of its PEM text, in hexadecimal."""
    return sha256_hex(key.to_pem())


def authenticate(
    bundle: Bundle,
    trust: TrustStore | None,
    *,
    roots: CertificateRoots | None = None,
    identity: SigstoreIdentity | None = None,
    now: datetime,
) -> BundleSigner:
    """Return who signed the bundle's payload, if it is one whom the caller trusts.

    Args:
        bundle: The parsed bundle.
        trust: The keys that are trusted, for the method "key", and those that are not any more, for each method.
        roots: The authorities that are trusted, for the method "certificate". There is no default.
        identity: Who is trusted, for the method "sigstore".
        now: The moment at which keys and certificates must be valid.

    Raises:
        SignatureError: It is not; codes "untrusted-key", "key-not-valid", "bad-signature", "certificate", "sigstore".
        RevokedError: It is a key that the trust store takes back; code "revoked-key".
        ConfigError: The method needs something that is not installed or not readable.
    """
    if bundle.method == "key":
        key = _trusted_key(bundle, trust)
        _require_active(key, trust, now)
        return BundleSigner("key", key.name, key.keyid)
    if bundle.method == "sigstore":
        if identity is None:
            _refuse("sigstore", "expected a signer whom you named, found a Sigstore identity", _HINT_SIGSTORE)
        return _check_sigstore(bundle, identity)
    if roots is None:
        _refuse("certificate", "expected root certificates to hold the signer's against, found none", _HINT_ROOTS)
    certified = certified_key(bundle.chain, roots, now=now)
    try:
        key = PublicKey(certified.spki, name=certified.subject)
    except ConfigError as err:
        _refuse("certificate", f"the signer's certificate: {err.message}", _HINT_ECDSA, err)
    if not key.kind.startswith("ecdsa"):
        _refuse("certificate", f"the signer's certificate: expected an ECDSA key, found {key.kind}", _HINT_ECDSA)
    _check_fits(bundle, key)
    _require_active(key, trust, now)
    return BundleSigner("certificate", certified.subject, key.keyid)


def write(payload: bytes, signature: bytes, key: PublicKey) -> bytes:
    """Return a bundle of the method "key" as one line of JSON.

    Args:
        payload: The statement.
        signature: Over the payload's pre-authentication encoding.
        key: Whose signature it is.
    """
    envelope = json.loads(Envelope(payload, PAYLOAD_TYPE, (Signature(signature),)).serialize())
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": key_hint(key)}, "tlogEntries": []},
        "dsseEnvelope": envelope,
    }
    return json.dumps(bundle).encode("ascii") + b"\n"


def load_protobuf_json(data: bytes, *, max_bytes: int, max_depth: int) -> object:
    """Return what `strict_json.loads` does, but take 1048576.0 for the integer that it is.

    Protobuf's JSON writes every number of a free-form structure as a binary64, and `model_signing` writes with it.

    Raises:
        ManifestError: As `strict_json.loads`; a number with a fraction or an exponent is still none.
    """
    if _FLOAT.search(data) is None:
        return strict_json.loads(data, max_bytes=max_bytes, max_depth=max_depth)
    # Strings are matched whole, so that what looks like a number in one stays. No text that was not JSON becomes JSON
    # of integers: what is taken away is the fraction of a number that the reader would have refused.
    integral = _STRING_OR_FLOAT.sub(lambda found: found[1] or found[2], data)
    return strict_json.loads(integral, max_bytes=max_bytes, max_depth=max_depth)


def first_problem(err: ValidationError) -> str:
    """Return the first thing that pydantic found wrong, with its place."""
    problem = err.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else problem["msg"]


def _trusted_key(bundle: Bundle, trust: TrustStore | None) -> PublicKey:
    """Return the trusted key that signed. Ed25519 keys are left out: the format's registry has ECDSA only."""
    keys = [key for key in (trust.keys.values() if trust else ()) if key.kind.startswith("ecdsa")]
    if bundle.key_hint:
        # A hint that fits nothing is not overlooked: the bundle then is for somebody else's eyes, or was meddled with.
        keys = [key for key in keys if key_hint(key) == bundle.key_hint]
    if not keys:
        named = f"; it names sha256:{escape(bundle.key_hint[:16])} (of the key's PEM)" if bundle.key_hint else ""
        _refuse(
            "untrusted-key",
            f"expected a signature by a trusted ECDSA key, found none{named}",
            "if you trust who signed it, get their public key from them and name it with --trust KEY.pub",
        )
    for key in keys[:-1]:
        try:
            key.verify(bundle.envelope.signatures[0].sig, bundle.envelope.signed_bytes)
        except SignatureError:
            continue
        return key
    _check_fits(bundle, keys[-1])
    return keys[-1]


def _check_fits(bundle: Bundle, key: PublicKey) -> None:
    try:
        key.verify(bundle.envelope.signatures[0].sig, bundle.envelope.signed_bytes)
    except SignatureError as err:
        _refuse(
            "bad-signature",
            f"expected a signature by {escape(key.name) or 'the trusted key'}, found one that does not fit: the bundle "
            "was changed after it was signed",
            "get the bundle from its publisher again",
            err,
        )


def _require_active(key: PublicKey, trust: TrustStore | None, now: datetime) -> None:
    why = trust.inactive_reason(key.keyid, now) if trust else None
    if trust is None or why is None:
        return
    message = (
        f"expected a signature by a key that counts, found one by {escape(key.name) or key.keyid[:16]}: {escape(why)}"
    )
    hint = "get a bundle that another key of its publisher signed"
    if key.keyid in trust.revoked_keys:
        raise RevokedError(Finding("revoked-key", message, hint=hint))
    _refuse("key-not-valid", message, hint)


def _check_sigstore(bundle: Bundle, identity: SigstoreIdentity) -> BundleSigner:
    """Let Sigstore's own verifier decide, offline, and take nothing from it but that our payload is the signed one."""
    try:
        from sigstore.errors import Error
        from sigstore.models import Bundle as SigstoreBundle
        from sigstore.models import TrustedRoot
        from sigstore.verify import Verifier, policy
    except ImportError as err:
        raise ConfigError(
            "the bundle is signed by a Sigstore identity, and sigstore is not installed",
            hint="install safeload with its extra `sigstore`",
        ) from err
    shown = escape(str(identity.trusted_root))
    try:
        verifier = Verifier(trusted_root=TrustedRoot.from_file(str(identity.trusted_root)))
    except OSError as err:
        raise ConfigError(f"cannot read the trusted root {shown}: {reason(err)}", hint="check the path") from err
    except (ValueError, Error) as err:
        raise ConfigError(
            f"{shown}: expected Sigstore's trusted_root.json, found something else",
            hint="get the file again, from where you trust it to be the right one",
        ) from err
    try:
        wanted = policy.Identity(identity=identity.identity, issuer=identity.issuer)
        kind, payload = verifier.verify_dsse(SigstoreBundle.from_json(bundle.raw), wanted)
    except (ValueError, Error) as err:
        found = escape(str(err))
        message = f"expected a signature by {escape(identity.identity)}, found one that does not hold: {found}"
        _refuse("sigstore", message, "check the identity, its issuer and the trusted root", err)
    if (kind, payload) != (bundle.envelope.payload_type, bundle.envelope.payload):
        _refuse("sigstore", "expected one reading of the bundle, found two", "get the bundle from its publisher again")
    return BundleSigner("sigstore", identity.identity, sha256_hex(bundle.chain[0]))


def _refuse(code: str, message: str, hint: str, cause: Exception | None = None) -> NoReturn:
    raise SignatureError(Finding(code, message, hint=hint)) from cause


def _refuse_bundle(message: str, offset: int | None = None, cause: Exception | None = None) -> NoReturn:
    raise ManifestError(
        Finding(
            "bad-bundle",
            f"not a bundle of OpenSSF Model Signing: {escape(message)}",
            offset=offset,
            hint="get the bundle from its publisher again",
        )
    ) from cause


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


_Lax = Field(strict=False)  # JSON has lists, a frozen model has tuples; what is in them stays strict


class _SignatureFile(_Model):
    sig: str
    keyid: str | None = None  # never looked at


class _EnvelopeFile(_Model):
    payload: str
    payloadType: Literal["application/vnd.in-toto+json"]  # noqa: N815 - fields are called as in the file, here and below
    signatures: Annotated[tuple[_SignatureFile, ...], _Lax]


class _KeyFile(_Model):
    hint: str = ""
    # Bundles of before 1.1 brought the key along. It is what is to be proved, so it is not read.
    rawBytes: str | None = None  # noqa: N815
    keyDetails: str | None = None  # noqa: N815


class _CertificateFile(_Model):
    rawBytes: str  # noqa: N815


class _ChainFile(_Model):
    certificates: Annotated[tuple[_CertificateFile, ...], _Lax, Field(min_length=1)]


class _MaterialFile(_Model):
    publicKey: _KeyFile | None = None  # noqa: N815
    x509CertificateChain: _ChainFile | None = None  # noqa: N815
    certificate: _CertificateFile | None = None
    tlogEntries: Annotated[tuple[dict[str, Any], ...], _Lax] = ()  # noqa: N815 - Sigstore's verifier reads them
    timestampVerificationData: dict[str, Any] | None = None  # noqa: N815 - so does it these

    @property
    def chain(self) -> tuple[_CertificateFile, ...]:
        if self.x509CertificateChain is not None:
            return self.x509CertificateChain.certificates
        return () if self.certificate is None else (self.certificate,)

    @property
    def method(self) -> Method:
        if self.publicKey is not None:
            return "key"
        return "certificate" if self.certificate is None else "sigstore"


class _BundleFile(_Model):
    mediaType: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]  # noqa: N815
    verificationMaterial: _MaterialFile  # noqa: N815
    dsseEnvelope: _EnvelopeFile  # noqa: N815
