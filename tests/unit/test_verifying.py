"""Only what enough distinct trusted keys signed, for a stream that they may sign, becomes a trusted manifest."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, ManifestError, SignatureError, VerificationError
from safeload.manifest import PAYLOAD_TYPE, FileEntry, Manifest, Signer, TrustedManifest
from safeload.signing import sign_manifest
from safeload.trust.dsse import Envelope, Signature, pae
from safeload.trust.keys import PublicKey, SecretKey
from safeload.trust.store import Publisher, TrustStore
from safeload.verifying import verify_manifest

A, B, C = SecretKey.generate("ed25519"), SecretKey.generate("ecdsa-p256"), SecretKey.generate("ed25519")


def manifest(stream: str = "grok-1") -> Manifest:
    entry = FileEntry(path="a", size=1, sha256="0" * 64, format="opaque", role="other")
    return Manifest.of([entry], stream=stream, revision="r", issued=datetime(2026, 1, 1, tzinfo=UTC), tool_version="1")


def envelope(
    *signatures: Signature, payload: bytes | None = None, kind: str = PAYLOAD_TYPE, keys: Sequence[SecretKey] = ()
) -> bytes:
    payload = manifest().to_payload() if payload is None else payload
    signed = tuple(Signature(key.sign(pae(kind, payload)), key.public.keyid) for key in keys)
    return Envelope(payload, kind, signatures + signed).serialize()


def publisher(threshold: int, *keys: SecretKey, streams: Sequence[str] = ("*",), name: str = "p") -> Publisher:
    return Publisher(name, tuple(streams), threshold, tuple(key.public.keyid for key in keys))


def store(*publishers: Publisher) -> TrustStore:
    return TrustStore({key.public.keyid: PublicKey(key.public.der, name=name) for key, name in NAMES}, publishers)


NAMES = ((A, "alice"), (B, "bob"), (C, "carol"))


def refused(data: bytes, trust: TrustStore, kind: type[VerificationError], code: str) -> str:
    with pytest.raises(VerificationError) as caught:
        verify_manifest(data, trust, source="m.json")
    assert type(caught.value) is kind
    (finding,) = caught.value.findings
    assert finding.code == code
    assert finding.file == "m.json"
    if kind is SignatureError:
        assert finding.hint is not None
    return finding.message


@pytest.mark.parametrize("key", [A, B])
def test_what_was_signed_is_trusted(key: SecretKey) -> None:
    data = sign_manifest(manifest(), [key])
    assert verify_manifest(data, TrustStore.of_keys([key.public])) == TrustedManifest(
        manifest=manifest(),
        sha256=sha256_hex(manifest().to_payload()),
        signers=(Signer("", key.public.keyid),),
        threshold=1,
    )


def test_an_envelope_is_one_line_of_what_the_standards_say() -> None:
    data = sign_manifest(manifest(), [A, B])
    assert data.count(b"\n") == 1
    value = json.loads(data)
    assert list(value) == ["payloadType", "payload", "signatures"]
    assert base64.b64decode(value["payload"]) == manifest().to_payload()
    assert [each["keyid"] for each in value["signatures"]] == [A.public.keyid, B.public.keyid]


def test_signing_needs_keys_each_once() -> None:
    for keys in ([], [A, A], [A, SecretKey.from_pem(A.to_pem(None), None)]):
        with pytest.raises(ConfigError, match="each once"):
            sign_manifest(manifest(), keys)


def test_nothing_is_signed_that_could_not_be_verified() -> None:
    broken = manifest().model_copy(update={"version": 0})
    with pytest.raises(ManifestError, match="version"):
        sign_manifest(broken, [A])


def test_the_key_of_nobody_that_is_trusted_is_refused() -> None:
    message = refused(envelope(keys=[C]), TrustStore.of_keys([A.public]), SignatureError, "untrusted-key")
    assert C.public.keyid[:16] in message
    no_hint = Signature(C.sign(pae(PAYLOAD_TYPE, manifest().to_payload())))
    refused(envelope(no_hint), TrustStore.of_keys([A.public]), SignatureError, "untrusted-key")


def test_the_hint_of_a_refusal_can_be_typed() -> None:
    with pytest.raises(SignatureError) as caught:
        verify_manifest(envelope(keys=[C]), TrustStore.of_keys([A.public]), source="my dir/m.json")
    hint = caught.value.findings[0].hint
    assert hint is not None
    typed = shlex.split(hint[hint.index("safeload verify") :])
    assert typed == ["safeload", "verify", "DIR", "--manifest", "my dir/m.json", "--trust", "KEY.pub"]


@pytest.mark.parametrize("key", [A, B])
def test_a_payload_or_type_that_was_changed_is_refused(key: SecretKey) -> None:
    good = Envelope.parse(envelope(keys=[key]))
    for changed in (
        Envelope(good.payload + b" ", PAYLOAD_TYPE, good.signatures),
        Envelope(manifest("grok-2").to_payload(), PAYLOAD_TYPE, good.signatures),
        Envelope(good.payload, "text/plain", good.signatures),
        Envelope(good.payload, PAYLOAD_TYPE, (Signature(b"", key.public.keyid),)),
    ):
        said = refused(changed.serialize(), TrustStore.of_keys([key.public]), SignatureError, "bad-signature")
        assert "the manifest or its signature was changed after it was signed" in said


def test_a_signature_is_over_type_and_payload_and_not_over_the_payload_alone() -> None:
    payload = manifest().to_payload()
    refused(envelope(Signature(A.sign(payload))), TrustStore.of_keys([A.public]), SignatureError, "untrusted-key")


def test_no_signature_is_refused() -> None:
    refused(envelope(), TrustStore.of_keys([A.public]), SignatureError, "no-signatures")


@pytest.mark.parametrize("hint", ["", "junk", B.public.keyid], ids=["empty", "junk", "other-key"])
def test_a_keyid_is_a_hint_and_decides_nothing(hint: str) -> None:
    signature = Signature(A.sign(pae(PAYLOAD_TYPE, manifest().to_payload())), hint)
    trusted = verify_manifest(envelope(signature), TrustStore.of_keys([B.public, A.public]))
    assert trusted.signers == (Signer("", A.public.keyid),)


def test_junk_beside_a_good_signature_is_ignored() -> None:
    junk = (Signature(b"junk"), Signature(bytes(64), A.public.keyid), Signature(b"\x30" * 70, "x"))
    data = envelope(*junk, keys=[C, A])
    assert verify_manifest(data, TrustStore.of_keys([A.public])).signers == (Signer("", A.public.keyid),)


def test_one_key_counts_once_however_often_it_signs() -> None:
    trust = store(publisher(2, A, B, C))
    message = pae(PAYLOAD_TYPE, manifest().to_payload())
    # ECDSA signatures differ each time, and each may be given another keyid.
    often = [Signature(B.sign(message), hint) for hint in (B.public.keyid, A.public.keyid, "", C.public.keyid)]
    text = refused(envelope(*often), trust, SignatureError, "threshold-not-met")
    assert "expected 2 signatures of p, found 1" in text
    trusted = verify_manifest(envelope(*often, keys=[A]), trust)
    assert trusted.signers == (Signer("bob", B.public.keyid), Signer("alice", A.public.keyid))
    assert trusted.threshold == 2


def test_only_a_publishers_own_keys_count_towards_its_threshold() -> None:
    trust = store(publisher(2, A, B, name="ab"), publisher(2, B, C, name="bc"))
    refused(envelope(keys=[A, C]), trust, SignatureError, "threshold-not-met")
    assert verify_manifest(envelope(keys=[A, B, C]), trust).signers == (
        Signer("alice", A.public.keyid),
        Signer("bob", B.public.keyid),
    )


def test_a_publisher_may_sign_its_own_streams_only() -> None:
    trust = store(publisher(1, A, streams=["hf:*"]), publisher(1, B, streams=["grok-?"], name="b"))
    assert verify_manifest(envelope(keys=[B]), trust).signers == (Signer("bob", B.public.keyid),)
    assert "expected 1 signatures of b" in refused(envelope(keys=[A]), trust, SignatureError, "threshold-not-met")
    elsewhere = envelope(payload=manifest("llama").to_payload(), keys=[A, B])
    assert "llama" in refused(elsewhere, trust, SignatureError, "stream-not-in-scope")


def test_a_signed_payload_of_another_type_or_form_is_refused() -> None:
    trust = TrustStore.of_keys([A.public])
    assert "text/x" in refused(envelope(kind="text/x", keys=[A]), trust, ManifestError, "payload-type")
    refused(envelope(payload=b"{}", keys=[A]), trust, ManifestError, "bad-manifest")
    refused(b"no envelope", trust, ManifestError, "bad-envelope")


def test_nothing_is_parsed_before_it_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(_: bytes) -> Any:
        pytest.fail("the payload was parsed")

    monkeypatch.setattr(Manifest, "parse", parse)
    refused(envelope(keys=[C]), TrustStore.of_keys([A.public]), SignatureError, "untrusted-key")
    refused(envelope(keys=[A]), store(publisher(2, A, B)), SignatureError, "threshold-not-met")
    refused(envelope(kind="text/x", keys=[A]), TrustStore.of_keys([A.public]), ManifestError, "payload-type")


def test_a_refusal_shows_untrusted_text_escaped() -> None:
    data = envelope(Signature(b"x", "\x1b[2J"))
    text = refused(data, TrustStore.of_keys([A.public]), SignatureError, "untrusted-key")
    assert "\x1b" not in text
    assert "\x1b" not in refused(
        envelope(kind="\x1b[2J", keys=[A]), TrustStore.of_keys([A.public]), ManifestError, "payload-type"
    )
