"""A bundle of OpenSSF Model Signing is what a trusted signer signed, or is refused for a reason that it states."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, ManifestError, RevokedError, SafeloadError, SignatureError, VerificationError
from safeload.manifest import FileEntry, Manifest
from safeload.oms import OmsFile, OmsManifest, verify_bundle, write_bundle
from safeload.signing import sign_manifest
from safeload.trust.dsse import Envelope
from safeload.trust.keys import KeyKind, PublicKey, SecretKey
from safeload.trust.oms import BundleSigner, is_bundle
from safeload.trust.store import Publisher, Revocation, SigstoreIdentity, TrustStore, Validity
from tests.oms_sample import DEFAULT_IGNORES, NOW, Edit, bundle, hint_of, resource, seal, shards, statement

KINDS: tuple[KeyKind, ...] = ("ecdsa-p256", "ecdsa-p384", "ecdsa-p521")
KEY, OTHER = SecretKey.generate("ecdsa-p256"), SecretKey.generate("ecdsa-p256")
PUBLIC = PublicKey(KEY.public.der, name="alice")
TRUST = TrustStore.of_keys([PUBLIC])
FILES = {"a/x": b"1", "config.json": b"{}", "weights": b"0123456789"}
RESOURCES = [resource(path, data) for path, data in FILES.items()]


def verified(data: bytes, trust: TrustStore | None = TRUST) -> OmsManifest:
    return verify_bundle(data, trust, now=NOW)


def refused(
    data: bytes,
    kind: type[VerificationError] = ManifestError,
    code: str = "bad-manifest",
    trust: TrustStore | None = TRUST,
) -> str:
    with pytest.raises(VerificationError) as caught:
        verify_bundle(data, trust, now=NOW, source="model.sig")
    assert type(caught.value) is kind
    (finding,) = caught.value.findings
    assert finding.code == code
    assert finding.file == "model.sig"
    assert finding.hint is not None
    return finding.message


def good(edit: Edit = lambda _: None) -> bytes:
    return bundle(statement(RESOURCES), KEY, edit)


def signed(edit: Edit) -> bytes:
    """Return a bundle whose signer signed a statement that was edited before."""
    return bundle(statement(RESOURCES, edit), KEY)


# ---------------------------------------------------------------- who signed


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_trusted_key_signed_is_its_list_of_files(kind: KeyKind) -> None:
    key = SecretKey.generate(kind)
    payload = statement(RESOURCES)
    found = verified(bundle(payload, key), TrustStore.of_keys([PublicKey(key.public.der, name="bob")]))
    assert found.name == "model"
    assert found.sha256 == sha256_hex(payload)
    assert found.signer == BundleSigner("key", "bob", key.public.keyid)
    assert found.files == {path: OmsFile(path, "sha256", (sha256_hex(data),)) for path, data in FILES.items()}
    assert found.ignored == frozenset(DEFAULT_IGNORES)


def test_the_signed_bytes_are_the_type_and_the_payload_and_not_the_payload_alone() -> None:
    payload = statement(RESOURCES)
    refused(
        good(lambda v: v["dsseEnvelope"]["signatures"][0].update(sig=base64.b64encode(KEY.sign(payload)).decode())),
        SignatureError,
        "bad-signature",
    )


def test_a_changed_payload_is_refused() -> None:
    changed = base64.b64encode(statement([resource("weights", b"other")])).decode()
    refused(good(lambda v: v["dsseEnvelope"].update(payload=changed)), SignatureError, "bad-signature")


def test_the_key_of_nobody_that_is_trusted_is_refused() -> None:
    message = refused(bundle(statement(RESOURCES), OTHER), SignatureError, "untrusted-key")
    assert hint_of(OTHER.public)[:16] in message
    refused(good(), SignatureError, "untrusted-key", None)
    refused(good(), SignatureError, "untrusted-key", TrustStore.of_keys([SecretKey.generate("ed25519").public]))


def test_a_hint_that_names_another_key_is_refused_although_the_signature_fits() -> None:
    def point_elsewhere(value: dict[str, Any]) -> None:
        value["verificationMaterial"]["publicKey"]["hint"] = hint_of(OTHER.public)

    refused(good(point_elsewhere), SignatureError, "untrusted-key")
    refused(good(point_elsewhere), SignatureError, "bad-signature", TrustStore.of_keys([PUBLIC, OTHER.public]))


@pytest.mark.parametrize("material", [{}, {"hint": ""}, {"rawBytes": "AAAA", "keyDetails": "PKIX_ECDSA_P256_SHA_256"}])
def test_without_a_hint_only_the_keys_that_the_caller_named_are_tried(material: dict[str, str]) -> None:
    data = seal(statement(RESOURCES), KEY, {"publicKey": material})
    trust = TrustStore.of_keys([OTHER.public, PUBLIC, SecretKey.generate("ecdsa-p384").public])
    assert verified(data, trust).signer.keyid == PUBLIC.keyid
    refused(data, SignatureError, "bad-signature", TrustStore.of_keys([OTHER.public]))


@pytest.mark.parametrize("keyid", ["", "junk", OTHER.public.keyid, None], ids=["empty", "junk", "other-key", "none"])
def test_a_keyid_is_never_looked_at(keyid: str | None) -> None:
    data = good(lambda v: v["dsseEnvelope"]["signatures"][0].update(keyid=keyid))
    assert verified(data).signer.keyid == PUBLIC.keyid


def test_a_key_that_was_revoked_or_is_out_of_its_validity_does_not_count() -> None:
    revoked = replace(TRUST, revoked_keys={PUBLIC.keyid: Revocation("laptop stolen")})
    assert "laptop stolen" in refused(good(), RevokedError, "revoked-key", revoked)
    expired = replace(TRUST, validity={PUBLIC.keyid: Validity(not_after=NOW - timedelta(days=1))})
    refused(good(), SignatureError, "key-not-valid", expired)
    assert verified(good(), replace(TRUST, validity={PUBLIC.keyid: Validity(not_after=NOW)})).name == "model"


def test_a_statement_that_was_taken_back_is_refused() -> None:
    trust = replace(TRUST, revoked_manifests={sha256_hex(statement(RESOURCES)): "poisoned"})
    assert "poisoned" in refused(good(), RevokedError, "revoked-manifest", trust)


def test_an_older_statement_is_refused_where_another_is_pinned() -> None:
    # Nothing in the format says which of two is the newer: the old files with their old signature are as good.
    old, new = bundle(statement(RESOURCES[:1]), KEY), good()
    pin = f"sha256:{verified(new).sha256}"
    assert verify_bundle(new, TRUST, now=NOW, pin=pin, model="model").name == "model"
    for data, more, code in (
        (old, {"pin": pin}, "pin-mismatch"),
        (new, {"pin": pin.removeprefix("sha256:")}, "pin-mismatch"),
        (new, {"model": "Model"}, "model-mismatch"),
    ):
        with pytest.raises(ManifestError) as caught:
            verify_bundle(data, TRUST, now=NOW, pin=more.get("pin"), model=more.get("model"))
        assert [finding.code for finding in caught.value.findings] == [code]


def test_a_signer_is_held_to_the_models_that_they_may_sign() -> None:
    keys = {key.keyid: key for key in (PUBLIC, OTHER.public)}

    def trust(threshold: int, stream: str, *keyids: str) -> TrustStore:
        return TrustStore(keys, (Publisher("p", (stream,), threshold, keyids),))

    assert verified(good(), trust(1, "mod*", PUBLIC.keyid)).name == "model"
    refused(good(), SignatureError, "stream-not-in-scope", trust(1, "grok", PUBLIC.keyid))
    refused(good(), SignatureError, "stream-not-in-scope", trust(1, "*", OTHER.public.keyid))
    refused(good(), SignatureError, "threshold-not-met", trust(2, "*", *keys))


# ---------------------------------------------------------------- the bundle

MALFORMED: dict[str, Edit] = {
    "two signatures, the first is junk": lambda v: v["dsseEnvelope"]["signatures"].insert(0, {"sig": "AAAA"}),
    "two signatures, the second is junk": lambda v: v["dsseEnvelope"]["signatures"].append({"sig": "AAAA"}),
    "field at the top": lambda v: v.update(extra=1),
    "field in the envelope": lambda v: v["dsseEnvelope"].update(extra=1),
    "field in the signature": lambda v: v["dsseEnvelope"]["signatures"][0].update(extra=1),
    "field in the material": lambda v: v["verificationMaterial"].update(extra=1),
    "version 0.2": lambda v: v.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.2"),
    "payload type": lambda v: v["dsseEnvelope"].update(payloadType="application/json"),
    "no envelope": lambda v: v.pop("dsseEnvelope"),
    "no material": lambda v: v.pop("verificationMaterial"),
    "empty material": lambda v: v["verificationMaterial"].pop("publicKey"),
    "two materials": lambda v: v["verificationMaterial"].update(certificate={"rawBytes": "AAAA"}, tlogEntries=[{}]),
    "unchecked log": lambda v: v["verificationMaterial"].update(tlogEntries=[{}]),
    "unchecked time stamp": lambda v: v["verificationMaterial"].update(
        timestampVerificationData={"rfc3161Timestamps": []}
    ),
    "Sigstore without a log": lambda v: v.update(verificationMaterial={"certificate": {"rawBytes": "AAAA"}}),
    "no certificates": lambda v: v.update(verificationMaterial={"x509CertificateChain": {"certificates": []}}),
    "base64 without padding": lambda v: v["dsseEnvelope"]["signatures"][0].update(sig="AAA"),
    "base64 with a line break": lambda v: v["dsseEnvelope"].update(payload=v["dsseEnvelope"]["payload"] + "\n"),
    "payload of another type": lambda v: v["dsseEnvelope"].update(payload=1),
}


@pytest.mark.parametrize("edit", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_bundle_is_refused_whoever_signed_it(edit: Edit) -> None:
    refused(good(edit), code="bad-bundle")


def test_no_signature_is_refused() -> None:
    refused(good(lambda v: v["dsseEnvelope"].update(signatures=[])), SignatureError, "no-signatures")


def test_json_that_two_readers_could_take_for_two_things_is_refused() -> None:
    for data in (
        good().replace(b'{"mediaType"', b'{"mediaType": "x", "mediaType"', 1),
        b"",
        b"[]",
        good()[:-1],
        b"\xef\xbb\xbf" + good(),
        good().replace(b'"tlogEntries": []', b'"tlogEntries": ' + b"[" * 50 + b"]" * 50),
        good().replace(b'"tlogEntries": []', b'"tlogEntries": [' + b"{}," * 5000 + b"{}]"),
    ):
        refused(data, code="bad-bundle")


def test_a_bundle_longer_than_64_mib_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.trust.oms.MAX_BUNDLE_BYTES", len(good()) - 1)
    assert "bytes of JSON" in refused(good(), code="bad-bundle")


def test_both_alphabets_of_base64_are_read() -> None:
    def url_safe(value: dict[str, Any]) -> None:
        sealed = value["dsseEnvelope"]
        sealed["payload"] = sealed["payload"].replace("+", "-").replace("/", "_")

    payload = statement([resource("~~~???>>>", b"")])
    data = bundle(payload, KEY, url_safe)
    assert b"-" in json.loads(data)["dsseEnvelope"]["payload"].encode() or b"_" in data
    assert verified(data).sha256 == sha256_hex(payload)


def test_a_bundle_is_told_from_our_own_envelope_and_neither_passes_for_the_other() -> None:
    entry = FileEntry(path="a", size=1, sha256="0" * 64, format="opaque", role="other")
    ours = sign_manifest(Manifest.of([entry], stream="model", revision="r", issued=NOW, tool_version="1"), [KEY])
    assert is_bundle(good())
    assert is_bundle(b" \n" + json.dumps(json.loads(good()), indent=4).encode())
    assert not is_bundle(ours)
    assert not is_bundle(b'["dsseEnvelope":')
    # Both are signed under one media type, so only the type of the statement keeps them apart.
    refused(bundle(Envelope.parse(ours).payload, KEY))


# ---------------------------------------------------------------- the statement

BROKEN: dict[str, Edit] = {
    "type": lambda v: v.update(_type="https://in-toto.io/Statement/v0.1"),
    "predicate type": lambda v: v.update(predicateType="https://example.com/wrong-predicate/v1.0"),
    "no subject": lambda v: v.update(subject=[]),
    "two subjects": lambda v: v["subject"].append(v["subject"][0]),
    "field": lambda v: v.update(extra=1),
    "field in the predicate": lambda v: v["predicate"].update(extra=1),
    "field in a resource": lambda v: v["predicate"]["resources"][0].update(extra=1),
    "another digest of the subject": lambda v: v["subject"][0]["digest"].update(sha512="00"),
    "no serialization": lambda v: v["predicate"].pop("serialization"),
    "symlinks unsaid": lambda v: v["predicate"]["serialization"].pop("allow_symlinks"),
    "method": lambda v: v["predicate"]["serialization"].update(method="tree"),
    "hash": lambda v: v["predicate"]["serialization"].update(hash_type="md5"),
    "shard size without shards": lambda v: v["predicate"]["serialization"].update(shard_size=5),
    "algorithm": lambda v: v["predicate"]["resources"][0].update(algorithm="blake2b"),
    "algorithm of shards": lambda v: v["predicate"]["resources"][0].update(algorithm="sha256-sharded-5"),
    "short digest": lambda v: v["predicate"]["resources"][0].update(digest="00"),
    "upper-case digest": lambda v: v["predicate"]["resources"][0].update(digest="A" * 64),
    "file twice": lambda v: v["predicate"]["resources"].append(v["predicate"]["resources"][0]),
    "everything ignored": lambda v: v["predicate"]["serialization"].update(ignore_paths=["."]),
    "ignored above": lambda v: v["predicate"]["serialization"].update(ignore_paths=["../x"]),
    "ignored absolute": lambda v: v["predicate"]["serialization"].update(ignore_paths=["/x"]),
    "signed and ignored": lambda v: v["predicate"]["serialization"].update(ignore_paths=["weights"]),
    "signed below what is ignored": lambda v: v["predicate"]["serialization"].update(ignore_paths=["a"]),
    "fraction": lambda v: v["predicate"]["serialization"].update(shard_size=1.5),
}


@pytest.mark.parametrize("edit", BROKEN.values(), ids=BROKEN)
def test_a_broken_statement_is_refused_though_a_trusted_key_signed_it(edit: Edit) -> None:
    def with_root(value: dict[str, Any]) -> None:
        edit(value)
        for subject in value["subject"]:
            digests = "".join(each["digest"] for each in value["predicate"]["resources"])
            subject["digest"]["sha256"] = hashlib.sha256(bytes.fromhex(digests)).hexdigest()

    refused(signed(with_root))


@pytest.mark.parametrize(
    "name",
    [
        "/a",
        "../a",
        "a/../b",
        "a//b",
        "./a",
        "a/",
        "a\\b",
        "C:a",
        ".git/config",
        "x/.GIT/y",
        "a\n",
        "a.",
        "e\u0301",
        ".",
    ],
)
def test_a_name_that_could_be_another_file_is_refused(name: str) -> None:
    # "." is the name of a model that is one file, and so never one of several.
    refused(bundle(statement([resource("b", b""), resource(name, b"")]), KEY))


def test_more_files_than_a_manifest_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.oms.MAX_FILES", len(FILES) - 1)
    assert "at most 2 files" in refused(good())


def test_a_duplicate_key_in_the_statement_is_refused() -> None:
    payload = statement(RESOURCES).replace(b'"method":', b'"method": "shards", "method":')
    refused(bundle(payload, KEY))


def test_the_root_digest_is_over_the_resources_in_the_order_in_which_they_are_listed() -> None:
    assert verified(bundle(statement(RESOURCES[::-1]), KEY)).files.keys() == FILES.keys()
    refused(signed(lambda v: v["predicate"]["resources"].reverse()), code="root-digest")
    refused(signed(lambda v: v["predicate"]["resources"].pop()), code="root-digest")


def test_a_model_without_files_is_refused() -> None:
    refused(bundle(statement([]), KEY), code="empty-model")


def test_a_model_that_was_signed_with_links_followed_is_refused() -> None:
    refused(bundle(statement(RESOURCES, allow_symlinks=True), KEY), code="symlinks-signed")


@pytest.mark.parametrize("names", [("Weights", "weights"), ("\u00e9", "\u00c9"), ("\u00df", "ss"), ("\u017f", "s")])
def test_names_that_some_systems_take_for_one_are_refused(names: tuple[str, str]) -> None:
    refused(bundle(statement([resource(name, b"") for name in names]), KEY))


def test_a_name_and_its_decomposed_twin_are_refused() -> None:
    refused(bundle(statement([resource("\u00e9", b"1"), resource("e\u0301", b"2")]), KEY))


def test_digests_of_512_bits_are_read() -> None:
    data = bundle(statement([resource("a", b"1", "blake2b")], hash_type="blake2b"), KEY)
    assert verified(data).files["a"] == OmsFile("a", "blake2b", (hashlib.blake2b(b"1").hexdigest(),))


def test_blake3_is_refused_with_a_hint_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    listed = [{"name": "a", "algorithm": "blake3", "digest": "00" * 32}]
    with pytest.raises(ConfigError, match="blake3 is not installed") as caught:
        verified(bundle(statement(listed, hash_type="blake3"), KEY))
    assert caught.value.hint is not None


# ---------------------------------------------------------------- shards


def sharded(resources: list[dict[str, str]], size: object = 4) -> bytes:
    return bundle(statement(resources, method="shards", shard_size=size), KEY)


@pytest.mark.parametrize("size", [4, 4.0])
def test_shards_make_up_their_file_and_its_length(size: float) -> None:
    # Protobuf's JSON writes each number of a free-form structure as a binary64: 4.0.
    found = verified(sharded(shards({"w": b"0123456789"}, 4), size))
    digests = tuple(sha256_hex(part) for part in (b"0123", b"4567", b"89"))
    assert found.files == {"w": OmsFile("w", "sha256", digests, shard_size=4, size=10)}


def test_a_number_in_a_name_is_no_number() -> None:
    files = {'v1.0,"2.0]': b"0123", "3.0": b"4"}
    assert verified(sharded(shards(files, 4), 4.0)).files.keys() == files.keys()


@pytest.mark.parametrize("size", ["4.5", "4e0", "4.00", "-4.0", "0.0", "true", '"4"', "1e400", "NaN"])
def test_a_shard_size_that_is_no_positive_integer_is_refused(size: str) -> None:
    payload = statement(shards({"w": b"0123"}, 4), method="shards", shard_size="SIZE").replace(b'"SIZE"', size.encode())
    refused(bundle(payload, KEY))


def test_the_algorithm_may_name_the_shards_as_the_reference_does() -> None:
    listed = [{**each, "algorithm": "sha256-sharded-4"} for each in shards({"w": b"0123456789"}, 4)]
    assert verified(sharded(listed)).files["w"].algorithm == "sha256"
    refused(sharded([{**each, "algorithm": "sha256-sharded-8"} for each in listed]))


def test_a_name_with_colons_is_read_from_the_right() -> None:
    assert verified(sharded(shards({"ab:1:2": b"01234"}, 4))).files["ab:1:2"].size == 5


def test_shards_are_put_in_order_but_the_root_is_over_the_list() -> None:
    listed = shards({"w": b"0123456789"}, 4)
    assert verified(sharded(listed[::-1])).files == verified(sharded(listed)).files


COVERAGE: dict[str, Callable[[list[dict[str, str]]], object]] = {
    "gap": lambda s: s.pop(1),
    "no beginning": lambda s: s.pop(0),
    "twice": lambda s: s.append(s[0]),
    "overlap": lambda s: s[1].update(name="w:2:8"),
    "short in the middle": lambda s: (s[0].update(name="w:0:3"), s[1].update(name="w:3:8")),
    "too long": lambda s: (s[1].update(name="w:4:10"), s.pop(2)),
    "empty at the end": lambda s: s[2].update(name="w:8:8"),
    "backwards": lambda s: s[2].update(name="w:8:5"),
    "no range": lambda s: s[0].update(name="w"),
    "negative": lambda s: s[0].update(name="w:-4:0"),
    "leading zero": lambda s: s[0].update(name="w:00:4"),
    "other digits": lambda s: s[0].update(name="w:0:\u0664"),
    "no path": lambda s: s[0].update(name=":0:4"),
    "huge": lambda s: s[2].update(name="w:8:99999999999999999"),
}


@pytest.mark.parametrize("edit", COVERAGE.values(), ids=COVERAGE)
def test_shards_that_do_not_cover_a_file_exactly_are_refused(edit: Callable[[list[dict[str, str]]], object]) -> None:
    listed = shards({"w": b"0123456789"}, 4)
    edit(listed)
    refused(sharded(listed))


def test_shards_without_their_size_are_refused() -> None:
    refused(bundle(statement(shards({"w": b"0123"}, 4), method="shards"), KEY))


# ---------------------------------------------------------------- Sigstore

ALICE = SigstoreIdentity("alice@example.com", "https://issuer.example.com", Path("trusted_root.json"))


def keyless() -> bytes:
    def entry(value: dict[str, Any]) -> None:
        value["verificationMaterial"]["tlogEntries"] = [{"logIndex": "1"}]

    return seal(statement(RESOURCES), KEY, {"certificate": {"rawBytes": "AAAA"}}, entry)


def test_a_sigstore_identity_that_nobody_named_is_refused() -> None:
    refused(keyless(), SignatureError, "sigstore")


def test_sigstore_is_asked_for_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sigstore", "sigstore.models", "sigstore.verify", "sigstore.errors"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="sigstore is not installed") as caught:
        verify_bundle(keyless(), None, identity=ALICE, now=NOW)
    assert caught.value.hint is not None
    assert "sigstore" in caught.value.hint


class SigstoreError(Exception):
    """What the stand-in raises."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put a verifier in Sigstore's place, so that what it is asked and what is done with its answer can be seen."""
    seen = SimpleNamespace(
        asked=[], answer=("application/vnd.in-toto+json", statement(RESOURCES)), error=None, root=None
    )

    def trusted_root(path: str) -> str:
        if seen.root is not None:
            raise seen.root
        return path

    def verify_dsse(raw: bytes, wanted: object) -> object:
        seen.asked.append((raw, wanted))
        if seen.error is not None:
            raise seen.error
        return seen.answer

    models, verify, errors = ModuleType("models"), ModuleType("verify"), ModuleType("errors")
    errors.Error = SigstoreError  # type: ignore[attr-defined]
    models.TrustedRoot = SimpleNamespace(from_file=trusted_root)  # type: ignore[attr-defined]
    models.Bundle = SimpleNamespace(from_json=lambda raw: raw)  # type: ignore[attr-defined]
    verify.Verifier = lambda *, trusted_root: SimpleNamespace(  # type: ignore[attr-defined]
        verify_dsse=lambda raw, wanted: verify_dsse(raw, (trusted_root, wanted))
    )
    verify.policy = SimpleNamespace(  # type: ignore[attr-defined]
        Identity=lambda *, identity, issuer: (identity, issuer)
    )
    for name, module in (("models", models), ("verify", verify), ("errors", errors)):
        monkeypatch.setitem(sys.modules, f"sigstore.{name}", module)
    monkeypatch.setitem(sys.modules, "sigstore", ModuleType("sigstore"))
    return seen


def test_sigstore_is_asked_for_the_identity_issuer_and_root_that_the_caller_named(stand_in: SimpleNamespace) -> None:
    found = verify_bundle(keyless(), None, identity=ALICE, now=NOW)
    assert found.signer == BundleSigner("sigstore", "alice@example.com", sha256_hex(b"\0\0\0"))
    ((raw, asked),) = stand_in.asked
    assert json.loads(raw)["verificationMaterial"]["certificate"] == {"rawBytes": "AAAA"}
    assert asked == ("trusted_root.json", ("alice@example.com", "https://issuer.example.com"))


def test_what_sigstore_refuses_or_reads_otherwise_is_refused(stand_in: SimpleNamespace) -> None:
    def refusal() -> str:
        with pytest.raises(SignatureError) as caught:
            verify_bundle(keyless(), None, identity=ALICE, now=NOW)
        assert [finding.code for finding in caught.value.findings] == ["sigstore"]
        return str(caught.value)

    stand_in.answer = ("application/vnd.in-toto+json", statement(RESOURCES[:1]))
    assert "one reading" in refusal()
    stand_in.answer = ("text/plain", statement(RESOURCES))
    assert "one reading" in refusal()
    stand_in.error = SigstoreError("no \x1b[2J certificate")
    assert "\\x1b" in refusal()


@pytest.mark.parametrize("error", [FileNotFoundError("no file"), ValueError("no JSON"), SigstoreError("no root")])
def test_a_trusted_root_that_cannot_be_used_is_no_verdict(stand_in: SimpleNamespace, error: Exception) -> None:
    stand_in.root = error
    with pytest.raises(ConfigError, match=r"trusted_root\.json"):
        verify_bundle(keyless(), None, identity=ALICE, now=NOW)


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_and_is_what_the_format_says(kind: KeyKind) -> None:
    key = SecretKey.generate(kind)
    listed = [(path, sha256_hex(data)) for path, data in FILES.items()]
    data = write_bundle(reversed(listed), key, "m\u00f6del")
    assert verified(data, TrustStore.of_keys([key.public])).files == {
        path: OmsFile(path, "sha256", (digest,)) for path, digest in listed
    }
    assert data.count(b"\n") == 1
    value = json.loads(data)
    assert list(value) == ["mediaType", "verificationMaterial", "dsseEnvelope"]
    assert value["verificationMaterial"] == {"publicKey": {"hint": hint_of(key.public)}, "tlogEntries": []}
    assert list(value["dsseEnvelope"]) == ["payloadType", "payload", "signatures"]
    assert [each["keyid"] for each in value["dsseEnvelope"]["signatures"]] == [""]
    stated = json.loads(base64.b64decode(value["dsseEnvelope"]["payload"]))
    root = hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in sorted(listed))).hexdigest()
    assert stated["subject"] == [{"name": "m\u00f6del", "digest": {"sha256": root}}]
    assert stated["predicate"]["serialization"] == {
        "method": "files",
        "hash_type": "sha256",
        "allow_symlinks": False,
        "ignore_paths": [],
    }
    assert [each["name"] for each in stated["predicate"]["resources"]] == sorted(FILES)


def test_nothing_is_written_that_would_not_be_read() -> None:
    digest = sha256_hex(b"")
    for files, code in (
        ([], "empty-model"),
        ([("a", digest), ("a", digest)], "bad-manifest"),
        ([("a", digest), ("A", digest)], "bad-manifest"),
        ([("../a", digest)], "bad-manifest"),
        ([("a", "x")], "bad-manifest"),
        ([("a", digest.upper())], "bad-manifest"),
        ([("\ud800", digest)], "bad-manifest"),
        ([(".gitattributes", digest)], "never-hashed"),
        ([(".github/x", digest)], "never-hashed"),
    ):
        with pytest.raises(ManifestError) as caught:
            write_bundle(files, KEY, "m")
        assert caught.value.findings[0].code == code


def test_a_key_that_the_format_does_not_have_signs_nothing() -> None:
    with pytest.raises(ConfigError, match="ECDSA"):
        write_bundle([("a", sha256_hex(b""))], SecretKey.generate("ed25519"), "m")


def test_any_byte_that_is_changed_turns_the_verdict_or_nothing() -> None:
    data = write_bundle([("a", sha256_hex(b""))], KEY, "m")
    found = verified(data)
    for at in range(0, len(data), 7):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            assert verified(changed) == found
        except SafeloadError as err:
            assert isinstance(err, VerificationError)  # noqa: PT017 - either outcome is right, nothing else is
