"""Bundles of OpenSSF Model Signing, good and hostile, and certificates for them: all made here, none by a tool."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from safeload.trust.dsse import pae
from safeload.trust.keys import PublicKey, SecretKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
DEFAULT_IGNORES = (".git", ".gitattributes", ".github", ".gitignore")
"""What `model_signing` writes into each bundle that it makes."""

NOW = datetime(2026, 6, 1, tzinfo=UTC)
FROM, TO = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)

Edit = Callable[[dict[str, Any]], object]
"""Changes a bundle or a statement in place."""


class Signs(Protocol):
    """A key of ours, or one that a certificate is for."""

    def sign(self, message: bytes, /) -> bytes:
        """Return the signature."""


def unchanged(_: dict[str, Any]) -> None:
    """Leave it as it is."""


def resource(name: str, data: bytes, algorithm: str = "sha256") -> dict[str, str]:
    """Return what a statement says of a file or of a shard."""
    return {"name": name, "algorithm": algorithm, "digest": hashlib.new(algorithm, data).hexdigest()}


def shards(files: Mapping[str, bytes], size: int, algorithm: str = "sha256") -> list[dict[str, str]]:
    """Return what a statement says of files in shards of `size` bytes."""
    return [
        resource(f"{path}:{start}:{min(start + size, len(data))}", data[start : start + size], algorithm)
        for path, data in sorted(files.items())
        for start in range(0, len(data), size)
    ]


def statement(
    resources: Sequence[Mapping[str, str]],
    edit: Edit = unchanged,
    *,
    name: str = "model",
    ignore_paths: Sequence[str] = DEFAULT_IGNORES,
    **serialization: object,
) -> bytes:
    """Return a statement that lists the resources; its root digest is that of the list before `edit` changes it."""
    root = hashlib.sha256(b"".join(bytes.fromhex(each["digest"]) for each in resources)).hexdigest()
    how = {
        "method": "files",
        "hash_type": "sha256",
        "allow_symlinks": False,
        "ignore_paths": list(ignore_paths),
        **serialization,
    }
    value: dict[str, Any] = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"serialization": how, "resources": [dict(each) for each in resources]},
    }
    edit(value)
    return json.dumps(value, indent=2).encode()


def seal(payload: bytes, key: Signs, material: Mapping[str, Any], edit: Edit = unchanged) -> bytes:
    """Return a bundle of a payload, with any verification material."""
    signature = base64.b64encode(key.sign(pae(PAYLOAD_TYPE, payload))).decode()
    value: dict[str, Any] = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {**material, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": signature, "keyid": ""}],
        },
    }
    edit(value)
    return json.dumps(value).encode()


def hint_of(key: PublicKey) -> str:
    """Return how a bundle refers to a key."""
    return hashlib.sha256(key.to_pem()).hexdigest()


def bundle(payload: bytes, key: SecretKey, edit: Edit = unchanged) -> bytes:
    """Return a bundle of the method "key"."""
    return seal(payload, key, {"publicKey": {"hint": hint_of(key.public)}}, edit)


def certified(payload: bytes, key: Signs, chain: Sequence[bytes], edit: Edit = unchanged) -> bytes:
    """Return a bundle of the method "certificate"; `chain` is in DER, the signer's first."""
    entries = [{"rawBytes": base64.b64encode(der).decode()} for der in chain]
    return seal(payload, key, {"x509CertificateChain": {"certificates": entries}}, edit)


AnyKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


class Certified:
    """A key and a certificate for it, by an authority or by itself."""

    def __init__(
        self,
        name: str,
        *extensions: tuple[x509.ExtensionType, bool],
        by: Certified | None = None,
        key: AnyKey | None = None,
        not_before: datetime = FROM,
        not_after: datetime = TO,
    ) -> None:
        self.key: AnyKey = key or ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = by or self
        builder = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(issuer.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(not_before)
            .not_valid_after(not_after)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        assert not isinstance(issuer.key, ed25519.Ed25519PrivateKey)
        self.der = builder.sign(issuer.key, hashes.SHA256()).public_bytes(Encoding.DER)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, with SHA-256 on any curve but P-384."""
        if isinstance(self.key, ec.EllipticCurvePrivateKey):
            curve = self.key.curve.name
            return self.key.sign(message, ec.ECDSA(hashes.SHA384() if curve == "secp384r1" else hashes.SHA256()))
        return self.key.sign(message) if isinstance(self.key, ed25519.Ed25519PrivateKey) else b"of another kind"


def usage(*, sign: bool = False, certify: bool = False) -> tuple[x509.ExtensionType, bool]:
    """Return a critical key usage."""
    no = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    more = {"decipher_only": False, "crl_sign": certify}
    return x509.KeyUsage(digital_signature=sign, key_cert_sign=certify, **no, **more), True


def purpose(*oids: x509.ObjectIdentifier) -> tuple[x509.ExtensionType, bool]:
    """Return an extended key usage."""
    return x509.ExtendedKeyUsage(oids), False


def authority(*, path_length: int | None = None) -> tuple[x509.ExtensionType, bool]:
    """Return the basic constraints of an authority."""
    return x509.BasicConstraints(ca=True, path_length=path_length), True


CODE_SIGNING = ExtendedKeyUsageOID.CODE_SIGNING
SERVER_AUTH = ExtendedKeyUsageOID.SERVER_AUTH
