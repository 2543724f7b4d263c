"""X.509: who a certificate is for, if it leads to a root that the caller named. There are no default roots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NoReturn

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, Finding, SafeloadError, SignatureError, escape

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.x509.verification import ExtensionPolicy, Policy

CERTIFICATE_PEM_MARK: Final = b"-----BEGIN CERTIFICATE-----"
"""First line of a certificate's PEM file (RFC 7468, 5)."""

MAX_CERTIFICATE_BYTES: Final = 64 * 1024
"""Longest certificate in DER that is looked at: real ones have 500 to 4,000 bytes."""

MAX_CHAIN: Final = 8
"""Most certificates that come with a signature, the signer's own included: each may be tried below each other."""

_NAME_ROOTS: Final = "name a PEM file with the certificate of the root, and nothing else in it"


@dataclass(frozen=True, slots=True)
class CertificateRoots:
    """Proves that the bytes are certificates of authorities. That they are trusted is the caller's word.

    Attributes:
        certificates: At least one, in DER.

    Raises:
        ConfigError: There is none, or one is no certificate, or not that of an authority.
    """

    certificates: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not self.certificates:
            raise ConfigError("expected at least one root certificate, found none", hint=_NAME_ROOTS)
        for der in self.certificates:
            if not _is_authority(_load(der)):
                raise ConfigError(
                    "expected the certificate of an authority (basicConstraints CA:TRUE), found another",
                    hint="name the root's certificate, not the signer's",
                )

    @classmethod
    def from_pem(cls, pem: bytes) -> CertificateRoots:
        """Return the certificates in a PEM file.

        Raises:
            ConfigError: It holds something else, or none, or one that is not that of an authority.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding

        if pem.count(b"-----BEGIN ") != pem.count(CERTIFICATE_PEM_MARK) or CERTIFICATE_PEM_MARK not in pem:
            raise ConfigError("expected PEM blocks CERTIFICATE and no others", hint=_NAME_ROOTS)
        try:
            found = x509.load_pem_x509_certificates(pem)
        except ValueError as err:
            raise ConfigError("expected certificates, found bytes that are none", hint=_NAME_ROOTS) from err
        return cls(tuple(each.public_bytes(Encoding.DER) for each in found))


@dataclass(frozen=True, slots=True)
class CertifiedKey:
    """Proves that a trusted root vouches, at one moment, for a key that may sign. `certified_key` makes it.

    Attributes:
        spki: The key, as DER SubjectPublicKeyInfo.
        subject: Who it belongs to, by the certificate (RFC 4514), and not escaped.
        fingerprint: SHA-256 of the certificate in hexadecimal.
    """

    spki: bytes
    subject: str
    fingerprint: str


def certified_key(chain: Sequence[bytes], roots: CertificateRoots, *, now: datetime) -> CertifiedKey:
    """Return the key of the first certificate, if the others lead from it to a root and each is valid `now`.

    Signatures, validity, path lengths, name constraints and unknown critical extensions are for `cryptography` to
    check, which does not believe that a certificate is a root because it comes with the signature.

    Args:
        chain: Certificates in DER as they came with a signature: the signer's, then any others.
        roots: Whom the caller trusts.
        now: The moment that counts. There is no trusted time stamp in this format, so it is not the time of signing.

    Raises:
        SignatureError: Code "certificate": one is malformed, out of its validity, not for signing, or does not lead to
            a root.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from cryptography.x509.verification import ExtensionPolicy, PolicyBuilder, Store, VerificationError

    if not 1 <= len(chain) <= MAX_CHAIN:
        _refuse(f"expected 1 to {MAX_CHAIN} certificates, found {len(chain)}")
    try:
        leaf, *others = (_load(der) for der in chain)
        anchors = [_load(der) for der in roots.certificates]
    except ConfigError as err:
        _refuse(err.message, err)
    at = f"at {now.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    for each in (leaf, *others):
        # The library says no more than "not valid at validation time"; who renews a certificate wants the date.
        first, last = each.not_valid_before_utc, each.not_valid_after_utc
        if not first <= now <= last:
            _refuse(f"expected a certificate that is valid {at}, found one from {first:%Y-%m-%d} to {last:%Y-%m-%d}")
    verifier = (
        PolicyBuilder()
        .store(Store(anchors))
        .time(now.astimezone(UTC).replace(tzinfo=None))
        .max_chain_depth(MAX_CHAIN)
        .extension_policies(ca_policy=_authorities(), ee_policy=ExtensionPolicy.permit_all())
        .build_client_verifier()
    )
    try:
        verifier.verify(leaf, others)
    except VerificationError as err:
        _refuse(f"expected certificates that lead to a trusted root {at}, found others ({err})", err)
    try:
        _require_signer(leaf)
        spki = leaf.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        subject = leaf.subject.rfc4514_string()
    except (ValueError, TypeError) as err:
        _refuse(f"the signer's certificate cannot be used: {err}", err)
    return CertifiedKey(spki, subject, sha256_hex(chain[0]))


def _authorities() -> ExtensionPolicy:
    """What every certificate above the signer's must say: that it is an authority, and may sign certificates.

    That basic constraints which are there must say so is the library's own rule, whatever the policy is.
    """
    from cryptography import x509
    from cryptography.x509.verification import Criticality, ExtensionPolicy

    def may_certify(_policy: Policy, _certificate: x509.Certificate, found: x509.KeyUsage | None) -> None:
        if found is not None and not found.key_cert_sign:
            raise ValueError("the key usage is not to sign certificates")

    return (
        ExtensionPolicy.permit_all()
        .require_present(x509.BasicConstraints, Criticality.AGNOSTIC, None)
        .may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, may_certify)
    )


def _require_signer(leaf: x509.Certificate) -> None:
    """Hold the signer's certificate to RFC 5280, 4.2.1.3 and 4.2.1.12.

    One of the two extensions must be there, and none may say that the key is for something else: a web server's key
    must not sign models because the same authority certified it. An authority's own key must not either.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    by_class = {type(extension.value): extension.value for extension in leaf.extensions}
    usage = by_class.get(x509.KeyUsage)
    purposes = by_class.get(x509.ExtendedKeyUsage)
    if usage is None and purposes is None:
        raise ValueError("it names no usage, expected digitalSignature or codeSigning")
    if isinstance(usage, x509.KeyUsage):
        if not usage.digital_signature:
            raise ValueError("its key usage lacks digitalSignature")
        if usage.key_cert_sign:
            raise ValueError("it is that of an authority (keyCertSign)")
    elif _is_authority(leaf):
        raise ValueError("it is that of an authority")
    if isinstance(purposes, x509.ExtendedKeyUsage) and ExtendedKeyUsageOID.CODE_SIGNING not in purposes:
        raise ValueError("its extended key usage lacks codeSigning")


def _is_authority(certificate: x509.Certificate) -> bool:
    from cryptography import x509

    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return False


def _load(der: bytes) -> x509.Certificate:
    from cryptography import x509

    if len(der) > MAX_CERTIFICATE_BYTES:
        raise ConfigError(
            f"expected a certificate of at most {MAX_CERTIFICATE_BYTES} bytes, found {len(der)}", hint=_NAME_ROOTS
        )
    try:
        certificate = x509.load_der_x509_certificate(der)
        # These are parsed when they are first asked for; asking here keeps ValueError in one place.
        _ = certificate.extensions, certificate.subject, certificate.issuer
    except (ValueError, TypeError, x509.DuplicateExtension) as err:
        raise ConfigError("expected an X.509 certificate in DER, found bytes that are none", hint=_NAME_ROOTS) from err
    return certificate


def _refuse(message: str, cause: SafeloadError | Exception | None = None) -> NoReturn:
    raise SignatureError(
        Finding(
            "certificate",
            escape(message, limit=500),
            hint="ask who signed for a bundle whose certificate is valid now, under a root that you trust",
        )
    ) from cause
