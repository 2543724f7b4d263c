"""Ed25519 keys, ECDSA keys on three NIST curves, and nothing else. A key's first use imports `cryptography`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, Finding, SignatureError, escape

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        ECDSA,
        EllipticCurve,
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    _Public: TypeAlias = Ed25519PublicKey | EllipticCurvePublicKey
    _Secret: TypeAlias = Ed25519PrivateKey | EllipticCurvePrivateKey

KeyKind: TypeAlias = Literal["ed25519", "ecdsa-p256", "ecdsa-p384", "ecdsa-p521"]
"""The kinds of key: RFC 8032 (pure Ed25519), and FIPS 186-5 ECDSA with the hash that fits the curve: SHA-256 with
P-256, SHA-384 with P-384, SHA-512 with P-521. The key decides the hash; nothing in an envelope is asked."""

_KIND_BY_CURVE: Final[dict[str, KeyKind]] = {
    "secp256r1": "ecdsa-p256",
    "secp384r1": "ecdsa-p384",
    "secp521r1": "ecdsa-p521",
}
"""By the names of SEC 2."""

_KINDS_SHOWN: Final = "Ed25519 or ECDSA P-256, P-384 or P-521"

PUBLIC_PEM_MARK: Final = b"-----BEGIN PUBLIC KEY-----"
"""First line of a public key's PEM file (RFC 7468, 13)."""

_SECRET_PEM_MARKS: Final = (b"-----BEGIN PRIVATE KEY-----", b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
_ANY_SECRET: Final = b"PRIVATE KEY-----"

_MAKE_A_KEY: Final = "make a key pair with `safeload keygen -o KEY`"

_P: Final = 2**255 - 19
"""The field of edwards25519 (RFC 8032, 5.1)."""

_Y_OF_ORDER_8: Final = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER_Y: Final = frozenset({0, 1, _P - 1, _Y_OF_ORDER_8, _P - _Y_OF_ORDER_8})
"""The y of the eight points whose order divides the cofactor 8: (0, 1), (0, -1), (+-sqrt(-1), 0) and the four of
order 8. Under such a "key" one signature fits many messages, and OpenSSL does not refuse it. A test does the sums."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Proves that the bytes are a usable public key of a known kind, in its one DER form.

    Two keys are equal if their DER is, whatever they are called, so that no key counts twice.

    Attributes:
        der: SubjectPublicKeyInfo (RFC 5280, 4.1.2.7), uncompressed where it is a point of a NIST curve.
        name: What people call the key; not part of its identity.
        kind: Found from the DER.

    Raises:
        ConfigError: It is no such key, or not in that form, or an Ed25519 point of small order or not reduced.
    """

    der: bytes
    name: str = field(default="", compare=False)
    kind: KeyKind = field(init=False, compare=False)

    def __post_init__(self) -> None:
        key = _load_public(self.der, pem=False)
        if _der(key) != self.der:
            raise ConfigError(
                "expected a public key in DER as safeload writes it, found another encoding of it",
                hint="read it with `PublicKey.from_pem`",
            )
        object.__setattr__(self, "kind", _kind(key))
        if self.kind == "ed25519":
            _refuse_weak_point(self.der[-32:])

    @classmethod
    def from_pem(cls, pem: bytes, *, name: str = "") -> PublicKey:
        """Return the public key in a PEM file (SubjectPublicKeyInfo).

        Args:
            pem: The file's bytes, with one PEM block in them.
            name: What to call the key in reports.

        Raises:
            ConfigError: It holds a private key, several blocks, another kind of key or no key at all.
        """
        if _ANY_SECRET in pem:
            raise ConfigError(
                "expected a public key, found a private key",
                hint="trust the .pub file that `safeload keygen` wrote beside it, and keep this one to its signer",
            )
        if pem.count(b"-----BEGIN ") != 1 or PUBLIC_PEM_MARK not in pem:
            raise ConfigError("expected one PEM block PUBLIC KEY", hint=_MAKE_A_KEY)
        return cls(_der(_load_public(pem, pem=True)), name=name)

    @property
    def keyid(self) -> str:
        """SHA-256 of the DER, in hexadecimal."""
        return sha256_hex(self.der)

    def to_pem(self) -> bytes:
        """Return the key as PEM SubjectPublicKeyInfo, as `from_pem` takes it."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return _load_public(self.der, pem=False).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def verify(self, signature: bytes, message: bytes) -> None:
        """Return if the holder of this key signed exactly `message`.

        Raises:
            SignatureError: The signature does not fit, or is none at all.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

        key = _load_public(self.der, pem=False)
        try:
            if isinstance(key, EllipticCurvePublicKey):
                key.verify(signature, message, _ecdsa(key.curve))
            else:
                key.verify(signature, message)
        except InvalidSignature as err:
            raise SignatureError(
                Finding(
                    "bad-signature",
                    f"expected a signature by key {self.keyid[:16]}, found one that does not fit",
                    hint="have exactly these bytes signed by the other half of this public key",
                )
            ) from err


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SecretKey:
    """A private key, to sign with. Its `repr` shows the public half only."""

    _key: _Secret

    @classmethod
    def generate(cls, kind: KeyKind = "ed25519") -> SecretKey:
        """Return a fresh key from the operating system's random source.

        Raises:
            ConfigError: There is no such kind of key.
        """
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        curves: dict[str, ec.EllipticCurve] = {
            _KIND_BY_CURVE[curve.name]: curve for curve in (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1())
        }
        if kind not in get_args(KeyKind):
            raise ConfigError(
                f"expected a kind of key out of {', '.join(get_args(KeyKind))}, found {escape(str(kind))}",
                hint="leave it out for ed25519",
            )
        return cls(Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(curves[kind]))

    @classmethod
    def from_pem(cls, pem: bytes, passphrase: bytes | None) -> SecretKey:
        """Return the private key in a PEM file (PKCS #8).

        Args:
            pem: The file's bytes.
            passphrase: What the file is encrypted with; None exactly if it is not.

        Raises:
            ConfigError: The passphrase is wrong, missing or not called for, or the file holds a public key, another
                kind of key or no key at all.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        if PUBLIC_PEM_MARK in pem and _ANY_SECRET not in pem:
            raise ConfigError("expected a private key, found a public key", hint="sign with the other file of the pair")
        plain, encrypted = (mark in pem for mark in _SECRET_PEM_MARKS)
        if pem.count(b"-----BEGIN ") != 1 or not (plain or encrypted):
            raise ConfigError("expected one PEM block with a PKCS #8 private key", hint=_MAKE_A_KEY)
        if encrypted and passphrase is None:
            raise ConfigError("the private key is encrypted, and no passphrase was given", hint="give its passphrase")
        if plain and passphrase is not None:
            raise ConfigError("a passphrase was given, but the private key is not encrypted", hint="give none")
        try:
            key = load_pem_private_key(pem, passphrase)
        except (ValueError, TypeError, UnsupportedAlgorithm) as err:
            reason = "the passphrase is wrong, or the file is damaged" if encrypted else "the file is damaged"
            hint = "try the passphrase again; nobody can recover it" if encrypted else "take a copy of it"
            raise ConfigError(f"the private key cannot be read: {reason}", hint=hint) from err
        if isinstance(key, Ed25519PrivateKey) or (
            isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _KIND_BY_CURVE
        ):
            return cls(key)
        raise ConfigError(f"expected a private key of {_KINDS_SHOWN}, found another kind", hint=_MAKE_A_KEY)

    def to_pem(self, passphrase: bytes | None) -> bytes:
        """Return the key as PEM PKCS #8, encrypted if there is a passphrase.

        Raises:
            ConfigError: The passphrase is empty, or longer than the library takes.
        """
        from cryptography.hazmat.primitives.serialization import (
            BestAvailableEncryption,
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        try:
            encryption = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase)
            return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
        except ValueError as err:
            raise ConfigError("expected a passphrase of 1 to 1,023 bytes", hint="choose another, of six words") from err

    @property
    def public(self) -> PublicKey:
        """The public half, without a name."""
        return PublicKey(_der(self._key.public_key()))

    def sign(self, message: bytes) -> bytes:
        """Return the signature of `message`: 64 bytes for Ed25519, DER (RFC 3279, 2.2.3) for ECDSA."""
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

        if isinstance(self._key, EllipticCurvePrivateKey):
            return self._key.sign(message, _ecdsa(self._key.curve))
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"SecretKey(public={self.public.keyid})"


def _load_public(data: bytes, *, pem: bool) -> _Public:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_public_key

    try:
        key = load_pem_public_key(data) if pem else load_der_public_key(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as err:
        raise ConfigError("expected a public key, found bytes that are none", hint=_MAKE_A_KEY) from err
    if isinstance(key, Ed25519PublicKey) or (
        isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _KIND_BY_CURVE
    ):
        return key
    raise ConfigError(f"expected a public key of {_KINDS_SHOWN}, found another kind", hint=_MAKE_A_KEY)


def _kind(key: _Public) -> KeyKind:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    return _KIND_BY_CURVE[key.curve.name] if isinstance(key, EllipticCurvePublicKey) else "ed25519"


def _ecdsa(curve: EllipticCurve) -> ECDSA:
    """The hash is as long as the curve, which OMS asks for as well: a shorter one would be the weaker half."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, HashAlgorithm

    by_curve: dict[str, HashAlgorithm] = {"secp256r1": SHA256(), "secp384r1": SHA384(), "secp521r1": SHA512()}
    return ECDSA(by_curve[curve.name])


def _der(key: _Public) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _refuse_weak_point(encoded: bytes) -> None:
    # The sign bit of x is left out: both signs of each y are of small order, and a y that is not reduced, which
    # RFC 8032, 5.1.3 says cannot be decoded but OpenSSL does, would be a second encoding of the same key.
    y = int.from_bytes(encoded, "little") & (2**255 - 1)
    if y >= _P or y in _SMALL_ORDER_Y:
        raise ConfigError(
            "expected an Ed25519 public key, found a point of small order or one that is not reduced",
            hint="do not trust who gave it to you as a key: no tool makes such a one by mistake",
        )
