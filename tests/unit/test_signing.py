"""What is signed is what a verifier reads, and a signature from elsewhere is as good as one made here."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from safeload.errors import ConfigError, ManifestError, SignatureError
from safeload.manifest import PAYLOAD_TYPE, FileEntry, Manifest
from safeload.signing import attach_signature, payload_to_sign, sign_manifest
from safeload.trust.dsse import MAX_SIGNATURES, Envelope, Signature, pae
from safeload.trust.keys import SecretKey
from safeload.trust.store import TrustStore
from safeload.verifying import verify_manifest

A, B, P256 = SecretKey.generate(), SecretKey.generate(), SecretKey.generate("ecdsa-p256")


def manifest(version: int = 1) -> Manifest:
    entry = FileEntry(path="a", size=1, sha256="0" * 64, format="opaque", role="other")
    issued = datetime(2026, 1, 1, tzinfo=UTC)
    return Manifest.of([entry], stream="s", revision="r", issued=issued, tool_version="1", version=version)


def test_a_manifest_is_signed_by_each_key_in_their_order() -> None:
    envelope = Envelope.parse(sign_manifest(manifest(), [B, P256, A]))
    assert [signature.keyid for signature in envelope.signatures] == [key.public.keyid for key in (B, P256, A)]
    assert envelope.payload == manifest().to_payload()


@pytest.mark.parametrize("keys", [[], [A, A], [A, B, A]])
def test_no_key_and_one_key_twice_are_mistakes(keys: list[SecretKey]) -> None:
    with pytest.raises(ConfigError, match="each once"):
        sign_manifest(manifest(), keys)


def test_what_would_not_be_read_is_not_signed() -> None:
    broken = manifest().model_copy(update={"version": 0})
    with pytest.raises(ManifestError, match="version"):
        sign_manifest(broken, [A])
    with pytest.raises(ManifestError, match="version"):
        payload_to_sign(broken)


def test_the_bytes_to_sign_are_the_encoding_of_payload_and_type() -> None:
    payload = manifest().to_payload()
    assert payload_to_sign(manifest()) == b"DSSEv1 28 application/vnd.in-toto+json %d %b" % (len(payload), payload)


@pytest.mark.parametrize("key", [A, P256])
def test_a_signature_that_was_made_elsewhere_makes_the_envelope(key: SecretKey) -> None:
    message = payload_to_sign(manifest())
    envelope = attach_signature(message, key.sign(message), key.public)
    trusted = verify_manifest(envelope, TrustStore.of_keys([key.public]))
    assert trusted.manifest == manifest()
    if key is A:  # Ed25519 is deterministic
        assert envelope == sign_manifest(manifest(), [key])


def test_further_signatures_join_the_envelope_and_the_first_stay() -> None:
    message = payload_to_sign(manifest())
    envelope = attach_signature(sign_manifest(manifest(), [A]), P256.sign(message), P256.public)
    assert [s.keyid for s in Envelope.parse(envelope).signatures] == [A.public.keyid, P256.public.keyid]
    for key in (A, P256):
        assert verify_manifest(envelope, TrustStore.of_keys([key.public])).manifest == manifest()


def test_a_signature_that_does_not_fit_is_never_attached() -> None:
    message = payload_to_sign(manifest())
    payload = manifest().to_payload()
    for data, signature, key in (
        (message, A.sign(message), B),
        (message, A.sign(message + b" "), A),
        (message, A.sign(payload), A),  # over the payload without its type
        (message, b"", A),
        (message, A.sign(message)[:-1], A),
        (payload_to_sign(manifest(version=2)), A.sign(message), A),
        (sign_manifest(manifest(version=2), [B]), A.sign(message), A),
    ):
        with pytest.raises(SignatureError) as refused:
            attach_signature(data, signature, key.public)
        assert refused.value.findings[0].code == "bad-signature"


def test_one_key_signs_once() -> None:
    message = payload_to_sign(manifest())
    with pytest.raises(ConfigError, match="already"):
        attach_signature(sign_manifest(manifest(), [A, B]), B.sign(message), B.public)


def test_an_envelope_is_not_filled_beyond_what_a_reader_takes() -> None:
    payload = manifest().to_payload()
    full = Envelope(payload, PAYLOAD_TYPE, tuple(Signature(b"x") for _ in range(MAX_SIGNATURES))).serialize()
    with pytest.raises(ConfigError, match="at most"):
        attach_signature(full, A.sign(payload_to_sign(manifest())), A.public)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "bad-envelope"),
        (b"{}", "bad-envelope"),
        (b"DSSEv1 ", "bad-payload"),
        (b"DSSEv1 028 application/vnd.in-toto+json 2 {}", "bad-payload"),
        (b"DSSEv1 28 application/vnd.in-toto+json 3 {}", "bad-payload"),
        (b"DSSEv1 27 application/vnd.in-toto+json 2 {}", "bad-payload"),
        (b"DSSEv1 28 application/vnd.in-toto+json 2 {}", "bad-manifest"),
        (pae("text/plain", b"{}"), "payload-type"),
        (manifest().to_payload(), "bad-envelope"),
        (Envelope(b"{}", "text/plain", (Signature(b"x"),)).serialize(), "payload-type"),
    ],
)
def test_nothing_but_a_manifest_gets_a_signature(data: bytes, code: str) -> None:
    with pytest.raises(ManifestError) as refused:
        attach_signature(data, A.sign(data), A.public)
    assert [finding.code for finding in refused.value.findings] == [code]


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_bytes_to_sign_that_were_changed_on_their_way_are_refused(where: str) -> None:
    message = bytearray(payload_to_sign(manifest()))
    message[{"first": 0, "middle": len(message) // 2, "last": -1}[where]] ^= 1
    with pytest.raises((ManifestError, SignatureError)):
        attach_signature(bytes(message), A.sign(payload_to_sign(manifest())), A.public)


def test_the_envelope_is_one_line_of_json() -> None:
    data = attach_signature(payload_to_sign(manifest()), A.sign(payload_to_sign(manifest())), A.public)
    assert data.count(b"\n") == 1
    assert list(json.loads(data)) == ["payloadType", "payload", "signatures"]
