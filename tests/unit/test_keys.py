"""Keys are of four kinds, equal by their bytes, and never weak."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa, x25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, SignatureError
from safeload.trust.keys import KeyKind, PublicKey, SecretKey

KINDS: tuple[KeyKind, ...] = ("ed25519", "ecdsa-p256", "ecdsa-p384", "ecdsa-p521")
P = 2**255 - 19
ED25519_DER = bytes.fromhex("302a300506032b6570032100")  # RFC 8410, 4: the algorithm, then 32 bytes of key
BASE_POINT = bytes.fromhex("58" + "66" * 31)  # RFC 8032, 5.1: a point of large order


@pytest.mark.parametrize("kind", KINDS)
def test_a_signature_fits_its_key_and_message_and_no_other(kind: KeyKind) -> None:
    key = SecretKey.generate(kind)
    signature = key.sign(b"message")
    assert key.public.kind == kind
    key.public.verify(signature, b"message")
    for public, signed, message in (
        (key.public, signature, b"massage"),
        (SecretKey.generate(kind).public, signature, b"message"),
        (key.public, signature[:-1], b"message"),
        (key.public, signature + b"\0", b"message"),
        (key.public, b"", b"message"),
        (key.public, bytes(64), b"message"),
    ):
        with pytest.raises(SignatureError) as caught:
            public.verify(signed, message)
        assert caught.value.findings[0].code == "bad-signature"


def test_the_rfc_8032_test_vector_verifies() -> None:
    # RFC 8032, 7.1, test 2.
    key = PublicKey(ED25519_DER + bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"))
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
        "387b2eaeb4302aeeb00d291612bb0c00"
    )
    key.verify(signature, b"\x72")


@pytest.mark.parametrize("kind", KINDS)
def test_a_public_key_survives_its_pem_and_is_itself_under_any_name(kind: KeyKind) -> None:
    key = SecretKey.generate(kind).public
    again = PublicKey.from_pem(key.to_pem(), name="alice")
    assert again == key
    assert len({again, key}) == 1
    assert again.name == "alice"
    assert again.keyid == sha256_hex(key.der)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_a_private_key_survives_its_pem(kind: KeyKind, passphrase: bytes | None) -> None:
    key = SecretKey.generate(kind)
    pem = key.to_pem(passphrase)
    assert (b"ENCRYPTED" in pem) == (passphrase is not None)
    assert SecretKey.from_pem(pem, passphrase).public == key.public


def test_the_same_point_in_two_encodings_is_one_key() -> None:
    point = ec.generate_private_key(ec.SECP256R1()).public_key()
    compressed = point.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    prefix = bytes.fromhex(
        "3039301306072a8648ce3d020106082a8648ce3d030107032200"
    )  # RFC 5480, 2: P-256, 33 bytes of key
    with pytest.raises(ConfigError, match="another encoding"):
        PublicKey(prefix + compressed)
    assert PublicKey.from_pem(point.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).kind == "ecdsa-p256"


@pytest.mark.parametrize(
    ("kind", "curve", "fits"),
    [
        ("ecdsa-p256", ec.SECP256R1(), hashes.SHA256()),
        ("ecdsa-p384", ec.SECP384R1(), hashes.SHA384()),
        ("ecdsa-p521", ec.SECP521R1(), hashes.SHA512()),
    ],
)
def test_the_curve_decides_the_hash(kind: KeyKind, curve: ec.EllipticCurve, fits: hashes.HashAlgorithm) -> None:
    theirs = ec.generate_private_key(curve)
    pem = theirs.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    key = PublicKey.from_pem(pem)
    assert key.kind == kind
    for algorithm in (hashes.SHA1(), hashes.SHA256(), hashes.SHA384(), hashes.SHA512()):  # noqa: S303 - must be refused
        signature = theirs.sign(b"message", ec.ECDSA(algorithm))
        if algorithm.name == fits.name:
            key.verify(signature, b"message")
        else:
            with pytest.raises(SignatureError) as caught:
                key.verify(signature, b"message")
            assert caught.value.findings[0].code == "bad-signature"
    ours = SecretKey.generate(kind)
    load_pem_public_key(ours.public.to_pem()).verify(ours.sign(b"m"), b"m", ec.ECDSA(fits))  # type: ignore[union-attr, call-arg, arg-type]


def other_kinds() -> list[object]:
    return [
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP224R1()),
        ec.generate_private_key(ec.SECP256K1()),
        ec.generate_private_key(ec.BrainpoolP384R1()),
        ed448.Ed448PrivateKey.generate(),
        x25519.X25519PrivateKey.generate(),
    ]


def test_every_other_kind_of_key_is_refused() -> None:
    for key in other_kinds():
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="another kind"):
            PublicKey.from_pem(public)
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="another kind"):
            SecretKey.from_pem(secret, None)


def test_generating_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind of key"):
        SecretKey.generate("rsa")  # type: ignore[arg-type]


def test_a_private_key_is_never_taken_for_a_public_one_nor_the_reverse() -> None:
    key = SecretKey.generate()
    for pem in (key.to_pem(None), key.to_pem(b"secret"), key.public.to_pem() + key.to_pem(None)):
        with pytest.raises(ConfigError, match="found a private key"):
            PublicKey.from_pem(pem)
    with pytest.raises(ConfigError, match="found a public key"):
        SecretKey.from_pem(key.public.to_pem(), None)


def test_a_pem_file_holds_one_block() -> None:
    one, two = SecretKey.generate(), SecretKey.generate()
    with pytest.raises(ConfigError, match="one PEM block"):
        PublicKey.from_pem(one.public.to_pem() + two.public.to_pem())
    with pytest.raises(ConfigError, match="one PEM block"):
        SecretKey.from_pem(one.to_pem(None) + two.to_pem(None), None)


@pytest.mark.parametrize("pem", [b"", b"no key", b"-----BEGIN PUBLIC KEY-----", b"\xff" * 100])
def test_bytes_that_are_no_key_are_refused(pem: bytes) -> None:
    with pytest.raises(ConfigError, match="expected"):
        PublicKey.from_pem(pem)
    with pytest.raises(ConfigError, match="expected"):
        SecretKey.from_pem(pem, None)


def test_a_damaged_key_is_refused() -> None:
    pem = SecretKey.generate().to_pem(None)
    with pytest.raises(ConfigError, match="damaged"):
        SecretKey.from_pem(pem.replace(b"MC4CAQ", b"MC4CAg"), None)
    with pytest.raises(ConfigError, match="found bytes that are none"):
        PublicKey(b"\x30\x00")


def test_each_mistake_with_a_passphrase_has_its_own_words() -> None:
    key = SecretKey.generate()
    with pytest.raises(ConfigError, match="passphrase is wrong"):
        SecretKey.from_pem(key.to_pem(b"right"), b"wrong")
    with pytest.raises(ConfigError, match="no passphrase was given"):
        SecretKey.from_pem(key.to_pem(b"right"), None)
    with pytest.raises(ConfigError, match="is not encrypted"):
        SecretKey.from_pem(key.to_pem(None), b"right")
    with pytest.raises(ConfigError, match="1 to 1,023 bytes"):
        key.to_pem(b"")


def test_a_private_key_does_not_show_itself() -> None:
    key = SecretKey.generate()
    assert repr(key) == str(key) == f"SecretKey(public={key.public.keyid})"


def add(p: tuple[int, int], q: tuple[int, int]) -> tuple[int, int]:
    """RFC 8032, 5.1.4, in affine coordinates."""
    d = -121665 * pow(121666, -1, P)
    (x1, y1), (x2, y2) = p, q
    t = d * x1 * x2 * y1 * y2
    return (x1 * y2 + x2 * y1) * pow(1 + t, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - t, -1, P) % P


def small_order_points() -> set[tuple[int, int]]:
    """All eight multiples of a point of order 8, found from the curve's equation and not from the code's list."""
    d = -121665 * pow(121666, -1, P)
    y = 2
    while True:
        square = (y * y - 1) * pow(d * y * y + 1, -1, P) % P
        x = pow(square, (P + 3) // 8, P)
        if x * x % P != square:
            x = x * pow(2, (P - 1) // 4, P) % P
        if x * x % P == square:
            order = 2**252 + 27742317777372353535851937790883648493  # of the base point; what is left has order 1 to 8
            point, result, n = (x, y), (0, 1), order
            while n:
                if n & 1:
                    result = add(result, point)
                point, n = add(point, point), n >> 1
            multiples = [result]
            while multiples[-1] != (0, 1):
                multiples.append(add(multiples[-1], result))
            if len(multiples) == 8:
                return set(multiples)
        y += 1


def test_every_encoding_of_every_small_order_point_is_refused() -> None:
    encodings = {
        (y + reduced * P | sign << 255).to_bytes(32, "little")
        for _, y in small_order_points()
        for reduced in (0, 1)
        for sign in (0, 1)
        if y + reduced * P < 2**255
    }
    # Eight proper ones, and those with y not reduced or a sign on x = 0.
    assert len(encodings) == 14
    for encoded in encodings:
        with pytest.raises(ConfigError, match="small order"):
            PublicKey(ED25519_DER + encoded)


def test_a_point_that_is_not_reduced_is_refused_and_a_good_one_is_not() -> None:
    for y in range(P, 2**255):
        with pytest.raises(ConfigError, match="not reduced"):
            PublicKey(ED25519_DER + y.to_bytes(32, "little"))
    assert PublicKey(ED25519_DER + BASE_POINT).kind == "ed25519"


def test_importing_keys_the_store_and_the_steps_loads_no_cryptography() -> None:
    code = (
        "import sys, safeload.manifest, safeload.report, safeload.trust.keys, safeload.trust.store, safeload.signing,"
        " safeload.verifying; sys.exit('cryptography' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
