"""Sign a manifest: the one step that makes something for others to trust."""

from __future__ import annotations

from collections.abc import Sequence

from safeload.errors import ConfigError
from safeload.manifest import PAYLOAD_TYPE, Manifest
from safeload.trust.dsse import MAX_SIGNATURES, Envelope, Signature, pae
from safeload.trust.keys import SecretKey


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
    envelope = Envelope(payload, PAYLOAD_TYPE, signatures).serialize()
    Envelope.parse(envelope)
    return envelope
