"""Only what enough distinct trusted keys signed, for a stream that they may sign, becomes a trusted manifest."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from safeload import verifying
from safeload.digests import sha256_hex
from safeload.errors import (
    ConfigError,
    ExpiredError,
    ManifestError,
    RevokedError,
    RollbackError,
    SafeloadError,
    SignatureError,
    VerificationError,
)
from safeload.manifest import PAYLOAD_TYPE, FileEntry, Manifest, Signer, TrustedManifest
from safeload.signing import sign_manifest
from safeload.trust import store as store_module
from safeload.trust.dsse import Envelope, Signature, pae
from safeload.trust.history import History
from safeload.trust.keys import PublicKey, SecretKey
from safeload.trust.store import GIVEN_KEYS, Publisher, Revocation, TrustStore, Validity
from safeload.verifying import HistoryFile, is_expired, parse_pin, verify_manifest

A, B, C = SecretKey.generate("ed25519"), SecretKey.generate("ecdsa-p256"), SecretKey.generate("ed25519")


ISSUED = datetime(2026, 1, 1, tzinfo=UTC)
NOW = datetime(2026, 6, 1, tzinfo=UTC)


def manifest(stream: str = "grok-1", **options: Any) -> Manifest:
    entry = FileEntry(path="a", size=1, sha256="0" * 64, format="opaque", role="other")
    return Manifest.of([entry], stream=stream, revision="r", issued=ISSUED, tool_version="1", **options)


def digest(made: Manifest) -> str:
    return sha256_hex(made.to_payload())


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
        publisher=GIVEN_KEYS,
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


def test_what_is_hashed_to_try_signatures_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_module.MAX_HASHED_BYTES == 2 * 1024**3
    tried: list[bytes] = []
    verify = PublicKey.verify

    def counting(self: PublicKey, signature: bytes, message: bytes) -> None:
        tried.append(signature)
        verify(self, signature, message)

    monkeypatch.setattr(PublicKey, "verify", counting)
    length = len(pae(PAYLOAD_TYPE, manifest().to_payload()))
    monkeypatch.setattr(store_module, "MAX_HASHED_BYTES", 7 * (length + 64 * 1024))
    trust = TrustStore.of_keys([A.public, B.public, C.public])
    junk = [Signature(bytes([number]) * 64) for number in range(3)]
    # Two pieces of junk are tried with three keys each, however often they come, and a hinted key is tried first.
    assert verify_manifest(envelope(*junk[:2] * 40, keys=[A]), trust).signers == (Signer("", A.public.keyid),)
    assert len(tried) == 7
    tried.clear()
    message = refused(envelope(*junk, keys=[A]), trust, ManifestError, "too-much-to-hash")
    assert f"4 signatures on {length:,} bytes" in message
    assert len(tried) == 7


def test_short_messages_are_not_tried_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    junk = [Signature(number.to_bytes(64, "big")) for number in range(256)]
    keys = {f"{number:064x}": A.public for number in range(1000)}
    tried = iter(range(store_module.MAX_HASHED_BYTES // (64 * 1024)))
    monkeypatch.setattr(store_module, "_fits", lambda *_: next(tried) < 0)
    with pytest.raises(ManifestError, match="after trying keys 32,"):
        store_module.fitting_keys(Envelope(b"", PAYLOAD_TYPE, tuple(junk)), keys)


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


# ---------------------------------------------------------------- what the trust store takes back


def findings(data: bytes, trust: TrustStore, kind: type[SafeloadError], **options: Any) -> list[tuple[str, str]]:
    """Return code and message of each finding of a refusal of exactly one class; each says what to do."""
    with pytest.raises(VerificationError) as caught:
        verify_manifest(data, trust, **{"now": NOW, **options})
    assert type(caught.value) is kind
    assert all(finding.hint is not None for finding in caught.value.findings)
    return [(finding.code, finding.message) for finding in caught.value.findings]


def codes(data: bytes, trust: TrustStore, kind: type[SafeloadError], **options: Any) -> list[str]:
    return [code for code, _ in findings(data, trust, kind, **options)]


REVOKED_A = {A.public.keyid: Revocation("laptop stolen")}


def test_a_revoked_key_does_not_count_and_is_named() -> None:
    trust = replace(store(publisher(1, A, B)), version=3, revoked_keys=REVOKED_A)
    (code, message), (second, _) = findings(envelope(keys=[A]), trust, RevokedError)
    assert (code, second) == ("revoked-key", "threshold-not-met")
    assert "alice" in message
    assert "laptop stolen" in message


def test_a_revoked_key_that_is_not_needed_is_reported_and_nothing_else() -> None:
    trust = replace(store(publisher(1, A, B)), version=3, revoked_keys=REVOKED_A)
    trusted = verify_manifest(envelope(keys=[A, B]), trust, now=NOW)
    assert trusted.signers == (Signer("bob", B.public.keyid),)
    assert trusted.ignored == (Signer("alice", A.public.keyid),)


def test_a_revoked_key_does_not_help_to_meet_a_threshold() -> None:
    trust = replace(store(publisher(2, A, B, C)), version=3, revoked_keys=REVOKED_A)
    assert codes(envelope(keys=[A, B]), trust, RevokedError) == ["revoked-key", "threshold-not-met"]
    assert len(verify_manifest(envelope(keys=[A, B, C]), trust, now=NOW).signers) == trust.publishers[0].threshold


def test_a_revoked_key_is_named_also_where_others_may_sign_another_stream_only() -> None:
    trust = replace(
        store(publisher(1, A, name="x"), publisher(1, B, name="y", streams=["llama"])), revoked_keys=REVOKED_A
    )
    assert codes(envelope(keys=[A, B]), trust, RevokedError) == ["revoked-key", "threshold-not-met"]


@pytest.mark.parametrize(
    "valid", [Validity(not_after=NOW - timedelta(seconds=1)), Validity(not_before=NOW + timedelta(seconds=1))]
)
def test_a_key_counts_only_while_it_is_valid(valid: Validity) -> None:
    trust = replace(store(publisher(1, A)), validity={A.public.keyid: valid})
    assert codes(envelope(keys=[A]), trust, SignatureError) == ["key-not-valid", "threshold-not-met"]
    for now in (valid.not_after, valid.not_before):
        if now is not None:
            assert verify_manifest(envelope(keys=[A]), trust, now=now).signers == (Signer("alice", A.public.keyid),)


def test_without_a_time_the_clock_is_asked() -> None:
    past = Validity(not_after=datetime(2020, 1, 1, tzinfo=UTC))
    trust = replace(store(publisher(1, A)), validity={A.public.keyid: past})
    assert codes(envelope(keys=[A]), trust, SignatureError, now=None) == ["key-not-valid", "threshold-not-met"]


def test_a_revoked_manifest_is_refused_pinned_or_not() -> None:
    taken_back = digest(manifest())
    trust = replace(store(publisher(1, A)), version=3, revoked_manifests={taken_back: "wrong tokenizer"})
    for pin in (None, f"sha256:{taken_back}"):
        ((code, message),) = findings(envelope(keys=[A]), trust, RevokedError, pin=pin)
        assert code == "revoked-manifest"
        assert "wrong tokenizer" in message
    verify_manifest(envelope(keys=[A], payload=manifest(version=2).to_payload()), trust, now=NOW)


# ---------------------------------------------------------------- what the caller expects

TRUST = TrustStore.of_keys([A.public])


def test_a_pin_accepts_one_manifest() -> None:
    data = envelope(keys=[A])
    trusted = verify_manifest(data, TRUST, now=NOW, pin=f"sha256:{digest(manifest())}")
    assert trusted.sha256 == digest(manifest())
    assert codes(data, TRUST, ManifestError, pin="sha256:" + "0" * 64) == ["pin-mismatch"]


def test_a_pin_does_not_replace_a_signature() -> None:
    assert codes(envelope(keys=[C]), TRUST, SignatureError, pin=f"sha256:{digest(manifest())}") == ["untrusted-key"]


@pytest.mark.parametrize(
    "pin", ["", "0" * 64, "sha256:", "sha256:" + "0" * 63, "sha256:" + "A" * 64, "sha256:" + "0" * 64 + "\n", "sha1:0"]
)
def test_a_pin_of_another_form_gives_no_verdict(pin: str) -> None:
    for make in (lambda: parse_pin(pin), lambda: verify_manifest(envelope(keys=[A]), TRUST, pin=pin)):
        with pytest.raises(ConfigError, match="pin: expected"):
            make()


def test_model_and_revision_are_those_that_were_expected() -> None:
    data = envelope(keys=[A])
    verify_manifest(data, TRUST, now=NOW, model="grok-1", revision="r")
    for wrong in ("grok", "grok-1 ", "Grok-1", "grok-*", ""):
        assert codes(data, TRUST, ManifestError, model=wrong) == ["model-mismatch"]
    for wrong in ("r2", "R", "*", ""):
        assert codes(data, TRUST, ManifestError, revision=wrong) == ["revision-mismatch"]


def test_a_pin_does_not_overrule_what_else_is_expected() -> None:
    data, pin = envelope(keys=[A]), f"sha256:{digest(manifest())}"
    assert codes(data, TRUST, ManifestError, pin=pin, model="x") == ["model-mismatch"]
    assert codes(data, TRUST, ManifestError, pin=pin, revision="x") == ["revision-mismatch"]


# ---------------------------------------------------------------- time


def test_an_expired_manifest_is_refused_unless_it_is_pinned() -> None:
    made = manifest(expires=NOW)
    data = envelope(payload=made.to_payload(), keys=[A])
    verify_manifest(data, TRUST, now=NOW - timedelta(seconds=1))
    ((code, message),) = findings(data, TRUST, ExpiredError)
    assert code == "expired"
    assert "2026-06-01T00:00:00Z" in message
    assert verify_manifest(data, TRUST, now=NOW, pin=f"sha256:{digest(made)}").manifest == made
    assert codes(data, TRUST, ManifestError, pin="sha256:" + "0" * 64) == ["pin-mismatch"]
    assert is_expired(made, NOW)
    assert not is_expired(made, NOW - timedelta(seconds=1))
    assert not is_expired(manifest(), NOW)


def epochs(**granted: int) -> TrustStore:
    return replace(store(publisher(1, A)), version=3, epochs={name.replace("_", "-"): n for name, n in granted.items()})


def test_the_epoch_is_the_one_that_the_trust_store_grants() -> None:
    second = envelope(payload=manifest(epoch=2).to_payload(), keys=[A])
    verify_manifest(second, epochs(grok_1=2), now=NOW)
    assert codes(second, epochs(grok_1=3), RollbackError) == ["rollback"]
    assert codes(second, epochs(grok_1=1), RollbackError) == ["fast-forward"]
    # What the store does not name has epoch 1; keys alone have no root that could grant one.
    assert codes(second, epochs(), RollbackError) == ["fast-forward"]
    verify_manifest(second, TRUST, now=NOW)


def test_a_pinned_manifest_may_be_of_an_epoch_that_is_over() -> None:
    verify_manifest(envelope(keys=[A]), epochs(grok_1=2), now=NOW, pin=f"sha256:{digest(manifest())}")


# ---------------------------------------------------------------- history


def remembered(made: Manifest, trust_version: int = 0) -> History:
    return History().advanced(
        made.stream,
        epoch=made.epoch,
        version=made.version,
        manifest=digest(made),
        now=NOW,
        trust_version=trust_version,
    )


def test_what_was_accepted_before_is_held_against_a_manifest() -> None:
    first, second = (envelope(payload=manifest(version=n).to_payload(), keys=[A]) for n in (1, 2))
    history = remembered(manifest(version=2))
    verify_manifest(second, TRUST, now=NOW, history=history)
    verify_manifest(first, TRUST, now=NOW, history=History())
    assert codes(first, TRUST, RollbackError, history=history) == ["rollback"]
    # Both expectations hold: to go back on purpose, leave one out.
    assert codes(first, TRUST, RollbackError, history=history, pin=f"sha256:{digest(manifest())}") == ["rollback"]
    other = envelope(payload=manifest(version=2, kind="training").to_payload(), keys=[A])
    assert codes(other, TRUST, RollbackError, history=history) == ["equivocation"]
    far = envelope(payload=manifest(version=2000).to_payload(), keys=[A])
    assert codes(far, TRUST, RollbackError, history=history) == ["fast-forward"]


def test_an_older_trust_store_is_refused() -> None:
    trust = replace(store(publisher(1, A)), version=3)
    history = remembered(manifest(), trust_version=4)
    assert codes(envelope(keys=[A]), trust, RollbackError, history=history) == ["trust-rollback"]
    verify_manifest(envelope(keys=[A]), replace(trust, version=4), now=NOW, history=history)


def test_the_order_of_refusals_is_from_who_to_what_to_when() -> None:
    """Each check is reached only if those before it passed: a refusal never says more than is known."""
    made = manifest(expires=NOW)
    data = envelope(payload=made.to_payload(), keys=[A])
    history = remembered(manifest(version=2))
    trust = replace(store(publisher(1, A)), revoked_manifests={digest(made): "bad"})
    wrong = {"pin": "sha256:" + "0" * 64, "model": "x", "revision": "x", "history": history}
    assert codes(envelope(payload=made.to_payload(), keys=[C]), trust, SignatureError, **wrong) == ["threshold-not-met"]
    assert codes(data, trust, RevokedError, **wrong) == ["revoked-manifest"]
    assert codes(data, TRUST, ManifestError, **wrong) == ["pin-mismatch"]
    del wrong["pin"]
    assert codes(data, TRUST, ManifestError, **wrong) == ["model-mismatch"]
    del wrong["model"]
    assert codes(data, TRUST, ManifestError, **wrong) == ["revision-mismatch"]
    del wrong["revision"]
    assert codes(data, TRUST, ExpiredError, **wrong) == ["expired"]
    assert codes(data, TRUST, RollbackError, **wrong, now=NOW - timedelta(seconds=1)) == ["rollback"]


# ---------------------------------------------------------------- the history's file


def trusted_of(made: Manifest) -> TrustedManifest:
    return verify_manifest(envelope(payload=made.to_payload(), keys=[A]), TRUST, now=NOW)


def test_a_history_begins_with_the_first_manifest_that_is_recorded(tmp_path: Path) -> None:
    file = HistoryFile.open(tmp_path / "h.json")
    assert file.is_new
    assert not (tmp_path / "h.json").exists()
    file.record(trusted_of(manifest()), TRUST, NOW)
    again = HistoryFile.open(tmp_path / "h.json")
    assert not again.is_new
    assert again.history == remembered(manifest())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h.json", "h.json.lock"]


def test_what_another_run_recorded_meanwhile_is_kept_and_holds(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    first, second = HistoryFile.open(path), HistoryFile.open(path)
    second.record(trusted_of(manifest("other")), TRUST, NOW)
    second.record(trusted_of(manifest(version=2)), TRUST, NOW)
    with pytest.raises(RollbackError) as caught:
        first.record(trusted_of(manifest()), TRUST, NOW)
    assert caught.value.findings[0].code == "rollback"
    first.record(trusted_of(manifest(version=3)), TRUST, NOW)
    streams = HistoryFile.open(path).history.streams
    assert {stream: seen.version for stream, seen in streams.items()} == {"other": 1, "grok-1": 3}


def test_a_history_that_vanishes_is_no_first_use(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    HistoryFile.open(path).record(trusted_of(manifest()), TRUST, NOW)
    file = HistoryFile.open(path)
    path.unlink()
    with pytest.raises(ConfigError, match="is gone"):
        file.record(trusted_of(manifest()), TRUST, NOW)
    assert not path.exists()


def make_link(path: Path) -> None:
    (path.parent / "target").write_bytes(History().to_bytes())
    path.symlink_to(path.parent / "target")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"{}"), "spec"),
        (lambda path: path.mkdir(), "no regular file|directory"),
        (os.mkfifo, "no regular file"),
        (make_link, "cannot read it"),
    ],
)
def test_what_cannot_be_a_history_gives_no_verdict(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "h.json")
    with pytest.raises(ConfigError, match=message) as caught:
        HistoryFile.open(tmp_path / "h.json")
    assert caught.value.hint is not None


@pytest.mark.parametrize("path", ["missing/h.json", "nul\0byte"])
def test_a_history_that_cannot_be_locked_gives_no_verdict(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="cannot open its lock"):
        HistoryFile.open(tmp_path / path)


def test_a_lock_that_is_never_released_gives_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.verifying._LOCK_SECONDS", 0.1)
    with (tmp_path / "h.json.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run has held its lock"):
            HistoryFile.open(tmp_path / "h.json")
    HistoryFile.open(tmp_path / "h.json")


def test_the_lock_is_held_while_the_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(path: Path, data: bytes) -> None:
        with (tmp_path / "h.json.lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        path.write_bytes(data)

    file = HistoryFile.open(tmp_path / "h.json")
    monkeypatch.setattr("safeload.verifying.publish", publish)
    file.record(trusted_of(manifest()), TRUST, NOW)
    assert (tmp_path / "h.json").exists()


# ---------------------------------------------------------------- hostile envelopes, one by one

L = 2**252 + 27742317777372353535851937790883648493
"""Order of the base point of edwards25519 (RFC 8032, 5.1)."""


def rewritten(edit: Any, key: SecretKey = A) -> bytes:
    """Return a good envelope after somebody changed its JSON."""
    value = json.loads(envelope(keys=[key]))
    edit(value, value["signatures"])
    return json.dumps(value).encode()


def good_signature() -> bytes:
    return A.sign(pae(PAYLOAD_TYPE, manifest().to_payload()))


def plus_order() -> bytes:
    """Another encoding of the same signature: S + L (RFC 8032, 5.1.7 asks for S < L)."""
    good = good_signature()
    return good[:32] + (int.from_bytes(good[32:], "little") + L).to_bytes(32, "little")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


HOSTILE: dict[str, tuple[Any, type[VerificationError], str]] = {
    "wrong payload type": (lambda v, _: v.update(payloadType="text/plain"), SignatureError, "bad-signature"),
    "no signatures": (lambda _, s: s.clear(), SignatureError, "no-signatures"),
    "signatures missing": (lambda v, _: v.pop("signatures"), ManifestError, "bad-envelope"),
    "junk alone": (lambda _, s: s[0].update(sig=b64(b"junk"), keyid=""), SignatureError, "untrusted-key"),
    "payload without padding": (
        lambda v, _: v.update(payload=v["payload"].rstrip("=") + "A"),
        ManifestError,
        "bad-envelope",
    ),
    "payload with white space": (lambda v, _: v.update(payload=v["payload"] + "\n"), ManifestError, "bad-envelope"),
    "payload in two alphabets": (lambda v, _: v.update(payload="+_+_"), ManifestError, "bad-envelope"),
    "signature with stray bits": (lambda _, s: s[0].update(sig="YR=="), ManifestError, "bad-envelope"),
    "signature of the payload without PAE": (
        lambda _, s: s[0].update(sig=b64(A.sign(manifest().to_payload()))),
        SignatureError,
        "bad-signature",
    ),
    "R of order 1, S of 0": (
        lambda _, s: s[0].update(sig=b64((1).to_bytes(32, "little") + bytes(32))),
        SignatureError,
        "bad-signature",
    ),
    "R of order 4, S of 0": (lambda _, s: s[0].update(sig=b64(bytes(64))), SignatureError, "bad-signature"),
    "S beyond the order": (lambda _, s: s[0].update(sig=b64(plus_order())), SignatureError, "bad-signature"),
    "signature too long": (
        lambda _, s: s[0].update(sig=b64(good_signature() + b"\0")),
        SignatureError,
        "bad-signature",
    ),
    "10,000 signatures": (lambda _, s: s.extend(s * 9999), ManifestError, "too-many-signatures"),
    "deep": (lambda v, _: v.update(x=json.loads("[" * 40 + "]" * 40)), ManifestError, "bad-envelope"),
    "many values": (lambda v, _: v.update(x=[0] * 70_000), ManifestError, "bad-envelope"),
    "a long hint": (lambda _, s: s[0].update(keyid="k" * 10**6, sig=""), SignatureError, "untrusted-key"),
    "a long payload type": (lambda v, _: v.update(payloadType="t" * 10**6), SignatureError, "bad-signature"),
    "a long signature": (lambda _, s: s[0].update(sig=b64(bytes(10**6))), SignatureError, "bad-signature"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_envelope_is_refused_by_name(name: str) -> None:
    edit, kind, code = HOSTILE[name]
    message = refused(rewritten(edit), TRUST, kind, code)
    assert len(message) < 1000


def test_an_envelope_that_is_too_long_is_not_looked_at() -> None:
    assert "bytes" in refused(b" " * (64 * 1024 * 1024 + 1), TRUST, ManifestError, "bad-envelope")


def test_the_other_alphabet_of_base64_says_the_same() -> None:
    def to_url_safe(value: dict[str, Any], signatures: list[dict[str, str]]) -> None:
        table = str.maketrans("+/", "-_")
        value["payload"] = value["payload"].translate(table)
        signatures[0]["sig"] = signatures[0]["sig"].translate(table)

    assert verify_manifest(rewritten(to_url_safe), TRUST, now=NOW).sha256 == digest(manifest())


@pytest.mark.parametrize("y", [0, 1, 2**255 - 20])
def test_a_key_of_low_order_cannot_be_trusted(y: int) -> None:
    # Under such a key R = A, S = 0 fits about every eighth message.
    with pytest.raises(ConfigError, match="small order"):
        PublicKey(A.public.der[:-32] + y.to_bytes(32, "little"))


def test_a_lock_that_somebody_deleted_is_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    with verifying._locked(path):
        held = Path(f"{path}.lock").stat().st_ino
    taken = os.open(f"{path}.lock", os.O_RDWR)
    Path(f"{path}.lock").unlink()
    try:
        assert not verifying._is_still_there(taken, path)
    finally:
        os.close(taken)
    with verifying._locked(path):
        assert Path(f"{path}.lock").exists()
    assert held


@pytest.mark.parametrize("name", [".", "folder", "/dev/null"])
def test_what_is_no_history_leaves_no_lock_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError):
        HistoryFile.open(name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert not Path("/dev/null.lock").exists()
