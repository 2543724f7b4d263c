"""A certificate speaks for a key only below a root that the caller named, now, and for signing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ObjectIdentifier

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, RevokedError, SignatureError
from safeload.oms import OmsManifest, verify_bundle
from safeload.trust.certificates import MAX_CERTIFICATE_BYTES, MAX_CHAIN, CertificateRoots
from safeload.trust.keys import SecretKey
from safeload.trust.store import Revocation, TrustStore
from tests.oms_sample import (
    CODE_SIGNING,
    FROM,
    NOW,
    SERVER_AUTH,
    TO,
    Certified,
    authority,
    certified,
    purpose,
    resource,
    statement,
    usage,
)

ROOT = Certified("root", authority(), usage(certify=True), key=ec.generate_private_key(ec.SECP384R1()))
MIDDLE = Certified("middle", authority(path_length=0), usage(certify=True), by=ROOT)
SIGNER = Certified("alice", usage(sign=True), purpose(CODE_SIGNING), by=ROOT)
ROOTS = CertificateRoots((ROOT.der,))
PAYLOAD = statement([resource("a", b"1")])


def verified(signer: Certified, *others: Certified, roots: CertificateRoots = ROOTS) -> OmsManifest:
    data = certified(PAYLOAD, signer, [signer.der, *(each.der for each in others)])
    return verify_bundle(data, None, roots=roots, now=NOW)


def refused(signer: Certified, *others: Certified, roots: CertificateRoots = ROOTS, now: datetime = NOW) -> str:
    data = certified(PAYLOAD, signer, [signer.der, *(each.der for each in others)])
    with pytest.raises(SignatureError) as caught:
        verify_bundle(data, None, roots=roots, now=now)
    (finding,) = caught.value.findings
    assert finding.code == "certificate"
    assert finding.hint is not None
    return finding.message


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1()])
def test_the_signer_is_whom_the_certificate_names(curve: ec.EllipticCurve) -> None:
    key = ec.generate_private_key(curve)
    spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    found = verified(Certified("alice", usage(sign=True), by=ROOT, key=key)).signer
    assert (found.method, found.name, found.keyid) == ("certificate", "CN=alice", sha256_hex(spki))


def test_certificates_between_the_signer_and_the_root_come_with_the_bundle() -> None:
    signer = Certified("alice", usage(sign=True), by=MIDDLE)
    assert verified(signer, MIDDLE).signer.name == "CN=alice"
    assert verified(signer, ROOT, MIDDLE).signer.name == "CN=alice"
    assert "lead to a trusted root" in refused(signer)


def test_a_signature_by_another_key_than_the_certified_one_is_refused() -> None:
    with pytest.raises(SignatureError) as caught:
        verify_bundle(certified(PAYLOAD, MIDDLE, [SIGNER.der]), None, roots=ROOTS, now=NOW)
    assert caught.value.findings[0].code == "bad-signature"


def test_there_are_no_default_roots_and_the_keys_that_are_trusted_are_none() -> None:
    data = certified(PAYLOAD, SIGNER, [SIGNER.der, ROOT.der])
    trust = TrustStore.of_keys([SecretKey.generate("ecdsa-p256").public])
    for given in (None, trust):
        with pytest.raises(SignatureError) as caught:
            verify_bundle(data, given, now=NOW)
        assert caught.value.findings[0].code == "certificate"


def test_a_root_that_comes_with_the_bundle_is_not_trusted_for_that() -> None:
    other = Certified("root", authority(), usage(certify=True))
    signer = Certified("alice", usage(sign=True), by=other)
    assert "lead to a trusted root" in refused(signer, other)


def test_a_certificate_that_nobody_else_signed_is_refused() -> None:
    refused(Certified("alice", usage(sign=True)))


def test_a_certificate_counts_from_its_first_to_its_last_second_by_the_verifiers_clock() -> None:
    data = certified(PAYLOAD, SIGNER, [SIGNER.der])
    for now in (FROM, TO):
        assert verify_bundle(data, None, roots=ROOTS, now=now).name == "model"
    second = timedelta(seconds=1)
    for now in (FROM - second, TO + second):
        assert "2026-01-01 to 2027-01-01" in refused(SIGNER, now=now)


def test_an_expired_signer_is_refused_although_the_certificate_was_valid_when_it_was_made() -> None:
    # The reference takes the certificate's own first day for the time of signing.
    first, last = datetime(2020, 1, 1, tzinfo=UTC), datetime(2020, 2, 1, tzinfo=UTC)
    old = Certified("old root", authority(), usage(certify=True), not_before=datetime(2019, 1, 1, tzinfo=UTC))
    signer = Certified("alice", usage(sign=True), by=old, not_before=first, not_after=last)
    assert "2020-02-01" in refused(signer, roots=CertificateRoots((old.der,)))


def test_every_certificate_on_the_way_must_be_valid() -> None:
    last = FROM + timedelta(days=1)
    middle = Certified("middle", authority(), usage(certify=True), by=ROOT, not_after=last)
    refused(Certified("alice", usage(sign=True), by=middle), middle)
    root = Certified("old root", authority(), usage(certify=True), not_after=last)
    signer = Certified("alice", usage(sign=True), by=root)
    assert "lead to a trusted root" in refused(signer, roots=CertificateRoots((root.der,)))


def test_the_certificate_must_be_for_signing() -> None:
    assert verified(Certified("a", usage(sign=True), by=ROOT)).signer.name == "CN=a"
    assert verified(Certified("a", purpose(CODE_SIGNING), by=ROOT)).signer.name == "CN=a"
    assert verified(Certified("a", purpose(SERVER_AUTH, CODE_SIGNING), by=ROOT)).signer.name == "CN=a"
    for extensions, why in (
        ([], "names no usage"),
        ([usage()], "digitalSignature"),
        ([usage(), purpose(CODE_SIGNING)], "digitalSignature"),
        ([purpose(SERVER_AUTH)], "codeSigning"),
        ([usage(sign=True), purpose(SERVER_AUTH)], "codeSigning"),
        ([authority(), usage(sign=True, certify=True)], "authority"),
        ([authority(), purpose(CODE_SIGNING)], "authority"),
    ):
        assert why in refused(Certified("a", *extensions, by=ROOT))


def test_only_an_authority_certifies_and_no_deeper_than_it_may() -> None:
    plain = Certified("plain", usage(sign=True), by=ROOT)
    refused(Certified("alice", usage(sign=True), by=plain), plain)
    denied = x509.BasicConstraints(ca=False, path_length=None), True
    no_authority = Certified("no authority", denied, usage(certify=True), by=ROOT)
    refused(Certified("alice", usage(sign=True), by=no_authority), no_authority)
    no_certifier = Certified("no certifier", authority(), usage(sign=True), by=ROOT)
    refused(Certified("alice", usage(sign=True), by=no_certifier), no_certifier)
    below = Certified("below", authority(), usage(certify=True), by=MIDDLE)  # whose path length is 0
    refused(Certified("alice", usage(sign=True), by=below), below, MIDDLE)


def test_a_critical_extension_that_nobody_knows_is_refused() -> None:
    unknown = x509.UnrecognizedExtension(ObjectIdentifier("1.2.3.4.5"), b"\x05\x00")
    assert verified(Certified("alice", usage(sign=True), (unknown, False), by=ROOT)).signer.name == "CN=alice"
    refused(Certified("alice", usage(sign=True), (unknown, True), by=ROOT))


def test_a_name_that_the_authority_may_not_certify_is_refused() -> None:
    limits = x509.NameConstraints([x509.DNSName("example.com")], None)
    middle = Certified("middle", authority(), usage(certify=True), (limits, True), by=ROOT)
    for name, allowed in (("models.example.com", True), ("models.example.org", False)):
        host = x509.SubjectAlternativeName([x509.DNSName(name)]), False
        signer = Certified("alice", usage(sign=True), host, by=middle)
        if allowed:
            assert verified(signer, middle).signer.name == "CN=alice"
        else:
            refused(signer, middle)


@pytest.mark.parametrize(
    "key", [rsa.generate_private_key(65537, 2048), ed25519.Ed25519PrivateKey.generate()], ids=["rsa", "ed25519"]
)
def test_a_signer_has_a_key_that_the_format_knows(key: rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> None:
    refused(Certified("alice", usage(sign=True), by=ROOT, key=key))


def test_bytes_that_are_no_certificate_and_chains_without_end_are_refused() -> None:
    for chain in ([b""], [b"\x30\x00"], [SIGNER.der + b"\0"], [SIGNER.der[:-1]], [SIGNER.der, b"junk"]):
        with pytest.raises(SignatureError) as caught:
            verify_bundle(certified(PAYLOAD, SIGNER, chain), None, roots=ROOTS, now=NOW)
        assert caught.value.findings[0].code == "certificate"
    assert f"1 to {MAX_CHAIN} certificates" in refused(SIGNER, *[MIDDLE] * MAX_CHAIN)
    with pytest.raises(SignatureError, match=str(MAX_CERTIFICATE_BYTES)):
        verify_bundle(certified(PAYLOAD, SIGNER, [bytes(MAX_CERTIFICATE_BYTES + 1)]), None, roots=ROOTS, now=NOW)


def test_a_certified_key_can_be_revoked() -> None:
    keyid = verified(SIGNER).signer.keyid
    some = TrustStore.of_keys([SecretKey.generate().public])
    assert verify_bundle(certified(PAYLOAD, SIGNER, [SIGNER.der]), some, roots=ROOTS, now=NOW).name == "model"
    trust = TrustStore(some.keys, some.publishers, revoked_keys={keyid: Revocation("left the company")})
    with pytest.raises(RevokedError, match="left the company"):
        verify_bundle(certified(PAYLOAD, SIGNER, [SIGNER.der]), trust, roots=ROOTS, now=NOW)


def test_what_a_certificate_says_is_escaped_where_it_is_shown() -> None:
    assert "\x1b" not in refused(Certified("\x1b[2J", by=ROOT))


def pem(*certificates: Certified) -> bytes:
    return b"".join(x509.load_der_x509_certificate(each.der).public_bytes(Encoding.PEM) for each in certificates)


def test_roots_are_read_from_pem() -> None:
    assert CertificateRoots.from_pem(pem(ROOT)) == ROOTS
    assert CertificateRoots.from_pem(pem(ROOT, MIDDLE)).certificates == (ROOT.der, MIDDLE.der)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        pem(SIGNER),
        pem(ROOT, SIGNER),
        pem(ROOT) + SecretKey.generate().public.to_pem(),
        pem(ROOT) + SecretKey.generate().to_pem(None),
        pem(ROOT).replace(b"M", b"N"),
    ],
    ids=["empty", "junk", "no authority", "one of them no authority", "a key", "a secret key", "no certificate"],
)
def test_what_is_no_list_of_authorities_gives_no_roots(data: bytes) -> None:
    with pytest.raises(ConfigError):
        CertificateRoots.from_pem(data)


def test_no_roots_are_none() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        CertificateRoots(())
