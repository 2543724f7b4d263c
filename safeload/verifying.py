"""Verify a manifest: from bytes that anybody may have written to a `TrustedManifest`, or a refusal."""

from __future__ import annotations

import shlex

from safeload.digests import sha256_hex
from safeload.errors import Finding, ManifestError, SignatureError, VerificationError, escape
from safeload.manifest import PAYLOAD_TYPE, Manifest, Signer, TrustedManifest
from safeload.trust.dsse import Envelope
from safeload.trust.keys import PublicKey
from safeload.trust.store import Publisher, TrustStore


def verify_manifest(envelope: bytes, trust: TrustStore, *, source: str = "manifest") -> TrustedManifest:
    """Prove that enough keys of a trusted publisher signed this manifest, for a stream that they may sign.

    The payload is parsed only after its signatures were checked, from the same bytes in memory.

    Args:
        envelope: A DSSE envelope, as it was read once from wherever it lay.
        trust: Who may sign what.
        source: What to call the envelope in findings; its path, where it has one.

    Raises:
        SignatureError: No publisher's threshold of distinct keys is met, or none that may sign the manifest's stream.
        ManifestError: The envelope or the payload is malformed, too long or of another type.
    """
    try:
        return _verify(envelope, trust, source)
    except VerificationError as err:
        raise type(err)(*(finding.in_file(source) for finding in err.findings)) from err


def _verify(data: bytes, trust: TrustStore, source: str) -> TrustedManifest:
    envelope = Envelope.parse(data)
    signers = _signers(envelope, trust)
    satisfied = [publisher for publisher in trust.publishers if _met(publisher, signers)]
    if not satisfied:
        raise SignatureError(_why_untrusted(envelope, trust, signers, source))
    if envelope.payload_type != PAYLOAD_TYPE:
        raise ManifestError(
            Finding(
                "payload-type",
                f"expected a payload of type {PAYLOAD_TYPE}, found {escape(envelope.payload_type)}",
                hint="make a manifest with `safeload sign DIR --key KEY`",
            )
        )
    manifest = Manifest.parse(envelope.payload)
    for publisher in satisfied:
        if publisher.may_sign(manifest.stream):
            return TrustedManifest(
                manifest=manifest,
                sha256=sha256_hex(envelope.payload),
                signers=tuple(
                    Signer(name=key.name, keyid=keyid) for keyid, key in signers.items() if keyid in publisher.keyids
                ),
                threshold=publisher.threshold,
            )
    raise SignatureError(_why_out_of_scope(manifest.stream, trust, signers, source))


def _signers(envelope: Envelope, trust: TrustStore) -> dict[str, PublicKey]:
    """Return the trusted keys of which at least one signature fits, by keyid, in the order of the signatures.

    A keyid is the digest of the key's DER and `TrustStore` holds it to that, so these are distinct keys. A signature
    that fits no trusted key is ignored (DSSE): anybody can add one, and it must not turn a good manifest into a bad
    one.
    """
    message = envelope.signed_bytes
    found: dict[str, PublicKey] = {}
    for signature in envelope.signatures:
        # The hinted key first; the hint itself proves nothing, and a wrong one does no harm.
        for keyid in sorted(trust.keys, key=signature.keyid.__ne__):
            if _fits(trust.keys[keyid], signature.sig, message):
                found[keyid] = trust.keys[keyid]
                break
    return found


def _fits(key: PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except SignatureError:
        return False
    return True


def _met(publisher: Publisher, signers: dict[str, PublicKey]) -> bool:
    return len(signers.keys() & set(publisher.keyids)) >= publisher.threshold


def _shortfall(publisher: Publisher, signers: dict[str, PublicKey], source: str) -> Finding:
    found = len(signers.keys() & set(publisher.keyids))
    return Finding(
        "threshold-not-met",
        f"expected {publisher.threshold} signatures of {escape(publisher.name)}, found {found}",
        hint=f"have {publisher.threshold - found} more of its keys sign, then: {_command(source)}",
    )


def _why_untrusted(envelope: Envelope, trust: TrustStore, signers: dict[str, PublicKey], source: str) -> Finding:
    if signers:
        nearest = min(trust.publishers, key=lambda p: p.threshold - len(signers.keys() & set(p.keyids)))
        return _shortfall(nearest, signers, source)
    hints = [signature.keyid for signature in envelope.signatures if signature.keyid]
    if broken := [keyid for keyid in hints if keyid in trust.keys]:
        return Finding(
            "bad-signature",
            f"expected a signature by trusted key {broken[0][:16]}, found one that does not fit: "
            "the manifest was changed after it was signed",
            hint=f"get the manifest from its publisher again, then: {_command(source)}",
        )
    claimed = f"; it names {', '.join(escape(keyid[:16]) for keyid in hints[:4])}" if hints else ""
    return Finding(
        "untrusted-key",
        f"expected a signature by one of {len(trust.keys)} trusted key(s), found none{claimed}",
        hint=f"if you trust who signed it, get their public key from them, then: {_command(source)}",
    )


def _why_out_of_scope(stream: str, trust: TrustStore, signers: dict[str, PublicKey], source: str) -> Finding:
    entitled = [publisher for publisher in trust.publishers if publisher.may_sign(stream)]
    if entitled:
        return _shortfall(entitled[0], signers, source)
    return Finding(
        "stream-not-in-scope",
        f"expected a stream that its signers may sign, found {escape(stream)}",
        hint=f"check which model you meant; to trust one key for any: {_command(source)}",
    )


def _command(source: str) -> str:
    return f"safeload verify DIR --manifest {escape(shlex.quote(source))} --trust KEY.pub"
