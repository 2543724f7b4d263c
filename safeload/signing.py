"""Sign a manifest: the one step that makes something for others to trust.

Either with a key at hand, or by a signer elsewhere (KMS, HSM, a machine without a network): `payload_to_sign` gives the
bytes to sign there, and `attach_signature` takes the signature back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from safeload.errors import ConfigError, Finding, ManifestError, escape
from safeload.manifest import PAYLOAD_TYPE, Manifest
from safeload.trust.dsse import MAX_ENVELOPE_BYTES, MAX_SIGNATURES, Envelope, Signature, pae
from safeload.trust.keys import PublicKey, SecretKey

_PAE_START: Final = b"DSSEv1 "
_PAE: Final = re.compile(rb"DSSEv1 (?:0|[1-9][0-9]{0,8}) ([!-~]+) (?:0|[1-9][0-9]{0,8}) ", re.ASCII)


def sign_manifest(manifest: Manifest, keys: Sequence[SecretKey]) -> bytes:
    """Make the envelope of a manifest, signed by each key, in the order of the keys.

    What is signed is read back first, so that nothing is published that `verify_manifest` would refuse to parse.

    Args:
        manifest: What to sign.
        keys: At least one, each once.

    Returns:
        One line of JSON: a DSSE envelope over an in-toto Statement.

    Raises:
        ConfigError: There is no key, too many, or one twice.
        ManifestError: The manifest breaks its own schema, or is longer than a reader accepts.
    """
    publics = [key.public for key in keys]
    if not 1 <= len(set(publics)) == len(publics) <= MAX_SIGNATURES:
        raise ConfigError(
            f"expected 1 to {MAX_SIGNATURES} keys to sign with, each once", hint="name one with --key KEY"
        )
    payload = manifest.to_payload()
    Manifest.parse(payload)
    message = pae(PAYLOAD_TYPE, payload)
    signatures = tuple(Signature(key.sign(message), public.keyid) for key, public in zip(keys, publics, strict=True))
    return _serialized(Envelope(payload, PAYLOAD_TYPE, signatures))


def payload_to_sign(manifest: Manifest) -> bytes:
    """Return exactly the bytes that a signer elsewhere has to sign: the manifest and its type, as DSSE encodes them.

    A signature over them is Ed25519 over the bytes themselves (RFC 8032, not prehashed: 64 bytes), or ECDSA with the
    hash that goes with the curve, SHA-256 for P-256, SHA-384 for P-384 and SHA-512 for P-521, as ASN.1 DER. A service
    that signs digests is given the digest of these bytes, so their length does not matter there.

    Raises:
        ManifestError: The manifest breaks its own schema, or is longer than a reader accepts.
    """
    payload = manifest.to_payload()
    Manifest.parse(payload)
    return pae(PAYLOAD_TYPE, payload)


def attach_signature(data: bytes, signature: bytes, public_key: PublicKey) -> bytes:
    """Make an envelope of what was signed elsewhere, or add one more signature to an envelope.

    Args:
        data: What `payload_to_sign` gave, or an envelope that others have signed already.
        signature: Over those bytes, or over what the envelope says was signed.
        public_key: Of the signer.

    Returns:
        One line of JSON, as of `sign_manifest`.

    Raises:
        SignatureError: The signature is not that key's over these bytes.
        ManifestError: The bytes are neither of the two, or what was signed is no manifest.
        ConfigError: The key's signature is there already, or there are too many.
    """
    envelope = _unpack(data) if data.startswith(_PAE_START) else Envelope.parse(data)
    if envelope.payload_type != PAYLOAD_TYPE:
        message = f"expected a payload of type {PAYLOAD_TYPE}, found {escape(envelope.payload_type)}"
        raise ManifestError(Finding("payload-type", message))
    Manifest.parse(envelope.payload)
    public_key.verify(signature, envelope.signed_bytes)
    # By the hint, which may lie: then a verifier finds two signatures of one key, and counts them once.
    if public_key.keyid in {each.keyid for each in envelope.signatures}:
        raise ConfigError(
            f"the manifest has a signature of key {public_key.keyid[:16]} already", hint="there is nothing to add"
        )
    if len(envelope.signatures) >= MAX_SIGNATURES:
        raise ConfigError(
            f"expected at most {MAX_SIGNATURES} signatures in one envelope",
            hint="make another manifest with `safeload sign DIR --key KEY -o MANIFEST`",
        )
    signatures = (*envelope.signatures, Signature(signature, public_key.keyid))
    return _serialized(Envelope(envelope.payload, envelope.payload_type, signatures))


def _serialized(envelope: Envelope) -> bytes:
    data = envelope.serialize()
    Envelope.parse(data)
    return data


def _unpack(data: bytes) -> Envelope:
    """Return the envelope, without signatures yet, that these bytes are the pre-authentication encoding of."""
    head = _PAE.match(data) if len(data) <= MAX_ENVELOPE_BYTES else None
    if head is not None:
        unsigned = Envelope(data[head.end() :], head[1].decode("ascii"), ())
        if unsigned.signed_bytes == data:
            return unsigned
    message = "expected the bytes to sign, as `safeload sign --payload-only` wrote them, found them changed"
    raise ManifestError(Finding("bad-payload", message, hint="write them again, and sign what is written then"))
