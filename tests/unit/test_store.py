"""A trust store says who may sign what, and cannot say it ambiguously."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, ManifestError, RejectedError, RollbackError, SignatureError
from safeload.trust.dsse import Envelope, Signature, pae
from safeload.trust.keys import KeyKind, PublicKey, SecretKey
from safeload.trust.store import (
    GIVEN_KEYS,
    MAX_HOPS,
    MAX_ROOT_KEYS,
    MAX_TRUST_BYTES,
    MAX_TRUST_FILE_BYTES,
    PAYLOAD_TYPE,
    Publisher,
    Revocation,
    Root,
    SignedStore,
    TrustStore,
    Validity,
    load_trust,
    sign_store,
    update,
)

ALICE, BOB = SecretKey.generate("ed25519").public, SecretKey.generate("ecdsa-p256").public


def store(change: Callable[[dict[str, Any]], None] = lambda _: None) -> bytes:
    value: dict[str, Any] = {
        "spec": "1.0",
        "version": 3,
        "keys": {
            key.keyid: {"type": key.kind, "spki": base64.b64encode(key.der).decode(), "name": name}
            for key, name in ((ALICE, "alice"), (BOB, "bob"))
        },
        "publishers": [
            {"name": "xai", "streams": ["hf:xai-org/*"], "threshold": 2, "keyids": [ALICE.keyid, BOB.keyid]},
            {"name": "bob", "streams": ["bob/a", "bob/?b"], "threshold": 1, "keyids": [BOB.keyid]},
        ],
    }
    change(value)
    return json.dumps(value).encode()


def test_a_trust_file_is_read() -> None:
    read = TrustStore.parse(store())
    assert read.version == 3
    assert dict(read.keys) == {ALICE.keyid: ALICE, BOB.keyid: BOB}
    assert read.keys[ALICE.keyid].name == "alice"
    assert read.publishers[0] == Publisher("xai", ("hf:xai-org/*",), 2, (ALICE.keyid, BOB.keyid))
    with pytest.raises(TypeError):
        read.keys["x"] = ALICE  # type: ignore[index]


@pytest.mark.parametrize(
    ("stream", "fits"),
    [("bob/a", True), ("bob/xb", True), ("bob/A", False), ("bob/ab/c", False), ("xbob/a", False), ("bob/a\n", False)],
)
def test_a_glob_fits_the_whole_name_and_case_matters(stream: str, fits: bool) -> None:
    assert TrustStore.parse(store()).publishers[1].may_sign(stream) is fits


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v.update(extra=1), "extra"),
        (lambda v: v.update(spec="2.0"), "spec"),
        (lambda v: v.update(version=0), "version"),
        (lambda v: v.update(version=True), "version"),
        (lambda v: v.pop("keys"), "keys"),
        (lambda v: v["publishers"].clear(), "at least one trusted key"),
        (lambda v: v["publishers"][0].update(extra=1), "extra"),
        (lambda v: v["publishers"][0].update(threshold=0), "threshold within 1 and 2"),
        (lambda v: v["publishers"][0].update(threshold=-1), "threshold within 1 and 2"),
        (lambda v: v["publishers"][0].update(threshold=3), "threshold within 1 and 2"),
        (lambda v: v["publishers"][0].update(threshold=True), "threshold"),
        (lambda v: v["publishers"][0].update(keyids=[]), "threshold within 1 and 0"),
        (lambda v: v["publishers"][0].update(keyids=[ALICE.keyid] * 2), "found one twice"),
        (lambda v: v["publishers"][0].update(keyids=[ALICE.keyid, "0" * 64]), "not among the keys"),
        (lambda v: v["publishers"][0].update(streams=[]), "streams"),
        (lambda v: v["publishers"][0].update(streams=["[a-z]*"]), "streams"),
        (lambda v: v["publishers"][0].update(streams="*"), "streams"),
        (lambda v: v["publishers"][0].update(name=""), "name"),
        (lambda v: v["keys"].update({"0" * 64: v["keys"][ALICE.keyid]}), "expected keyid"),
        (lambda v: v["keys"].update({ALICE.keyid.upper(): v["keys"].pop(ALICE.keyid)}), "expected keyid"),
        (lambda v: v["keys"].update({ALICE.keyid: v["keys"][BOB.keyid]}), "expected keyid"),
        (lambda v: v["keys"][ALICE.keyid].update(extra=1), "extra"),
        (lambda v: v.update(root={"threshold": 3, "keyids": [ALICE.keyid, BOB.keyid]}), "root: expected a threshold"),
        (lambda v: v.update(root={"threshold": 0, "keyids": [ALICE.keyid]}), "root: expected a threshold"),
        (lambda v: v.update(root={"threshold": 2, "keyids": [ALICE.keyid] * 2}), "root: expected each keyid once"),
        (lambda v: v.update(root={"threshold": 1, "keyids": ["0" * 64]}), "root: keyid"),
        (lambda v: v.update(root={"threshold": 1, "keyids": [ALICE.keyid], "extra": 1}), "root.extra"),
        (lambda v: v.update(issued="2026-02-30T00:00:00Z"), "issued"),
        (lambda v: v.update(issued="2026-02-03"), "issued"),
        (lambda v: v["keys"][ALICE.keyid].update(not_after="2026-01-01T00:00:00+00:00"), "not_after"),
        (
            lambda v: v["keys"][ALICE.keyid].update(
                not_before="2026-01-01T00:00:01Z", not_after="2026-01-01T00:00:00Z"
            ),
            "not_before to be before",
        ),
        (lambda v: v.update(revoked_keys=[{"keyid": "A" * 64, "reason": "r"}]), "revoked_keys.0.keyid"),
        (lambda v: v.update(revoked_keys=[{"keyid": "a" * 64, "reason": ""}]), "revoked_keys.0.reason"),
        (lambda v: v.update(revoked_keys=[{"keyid": "a" * 64, "reason": "r"}] * 2), "revoked_keys: expected each"),
        (lambda v: v.update(revoked_manifests=[{"sha256": "a" * 63, "reason": "r"}]), "revoked_manifests.0.sha256"),
        (
            lambda v: v.update(revoked_manifests=[{"sha256": "a" * 64, "reason": "r"}] * 2),
            "revoked_manifests: expected each",
        ),
        (lambda v: v.update(epochs={"hf:a": 0}), "epochs"),
        (lambda v: v.update(epochs={"hf:*": 2}), "epochs"),
        (lambda v: v.update(epochs={"hf:a": True}), "epochs"),
        (lambda v: v["keys"][ALICE.keyid].update(type="ecdsa-p256"), "expected type ed25519"),
        (lambda v: v["keys"][ALICE.keyid].update(type="rsa"), "type"),
        (lambda v: v["keys"][ALICE.keyid].update(spki="AAAA"), "found bytes that are none"),
        (lambda v: v["keys"][ALICE.keyid].update(spki="A"), "spki"),
        (lambda v: v["keys"][ALICE.keyid].update(spki=v["keys"][ALICE.keyid]["spki"] + "\n"), "spki"),
    ],
)
def test_a_trust_file_that_breaks_a_rule_is_refused(change: Callable[[dict[str, Any]], None], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrustStore.parse(store(change), source="my\x1b.json")
    assert says in str(caught.value)
    assert str(caught.value).startswith("my\\x1b.json: ")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"\xff", store()[:-1], store().replace(b'"spec"', b'"spec": "1.0", "spec"', 1)],
    ids=["empty", "list", "null", "not UTF-8", "cut", "key twice"],
)
def test_what_is_no_strict_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="trust store: "):
        TrustStore.parse(data)


def test_a_store_made_in_code_obeys_the_same_rules() -> None:
    with pytest.raises(ConfigError, match="expected keyid"):
        TrustStore({"a": ALICE, "b": ALICE}, (Publisher("p", ("*",), 2, ("a", "b")),))
    with pytest.raises(ConfigError, match="threshold"):
        TrustStore({ALICE.keyid: ALICE}, (Publisher("p", ("*",), 2, (ALICE.keyid,)),))


def test_any_given_key_may_sign_any_stream_and_counts_once() -> None:
    made = TrustStore.of_keys([ALICE, PublicKey(ALICE.der, name="again"), BOB])
    assert made.publishers == (Publisher(GIVEN_KEYS, ("*",), 1, (ALICE.keyid, BOB.keyid)),)
    assert made.publishers[0].may_sign("hf:any/thing")
    with pytest.raises(ConfigError, match="at least one trusted key"):
        TrustStore.of_keys([])


def test_load_trust_knows_keys_and_a_trust_file_by_their_content(tmp_path: Path) -> None:
    pem, file = tmp_path / "alice.json", tmp_path / "trust.pub"
    pem.write_bytes(ALICE.to_pem())
    file.write_bytes(b"\n " + store())
    carol = SecretKey.generate().public
    for alone in (pem, str(pem), [pem], [str(pem)], ALICE, [ALICE]):
        assert load_trust(alone) == TrustStore.of_keys([ALICE])
    assert load_trust(pem).keys[ALICE.keyid].name == "alice"
    assert load_trust(file) == TrustStore.parse(b"\n " + store())
    both = load_trust([carol, file, pem])
    assert both.publishers[:2] == TrustStore.parse(store()).publishers
    assert both.publishers[2] == Publisher(GIVEN_KEYS, ("*",), 1, (carol.keyid, ALICE.keyid))
    assert both.version == 3
    ready = TrustStore.of_keys([BOB])
    assert load_trust(ready) is ready


@pytest.mark.parametrize(
    "trust", [None, 3, b"x", {}, [None], [[]], {"a": 1}, iter([])], ids=lambda wrong: type(wrong).__name__
)
def test_what_is_no_key_nor_path_is_a_wrong_argument(trust: Any) -> None:
    with pytest.raises(ConfigError, match=r"trust: expected|expected at least one trusted key") as caught:
        load_trust(trust)
    assert caught.value.hint


@pytest.mark.parametrize("pin", [3, b"sha256:" + b"0" * 64, [], object()])
def test_a_pin_is_a_word(pin: Any) -> None:
    with pytest.raises(ConfigError, match="trust pin: expected sha256:"):
        load_trust(SecretKey.generate().public, pin=pin)


def test_what_cannot_be_trusted_is_refused(tmp_path: Path) -> None:
    def file(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    one, two = file("1", store()), file("2", store())
    for trust, says in (
        ([], "at least one trusted key"),
        ([one, two], "at most one trust file"),
        (tmp_path / "none", f"cannot read trust file {tmp_path}/none: No such file or directory; check the path"),
        (tmp_path, f"cannot read trust file {tmp_path}: Is a directory; check the path"),
        ("nul\0", "null"),
        (file("secret", SecretKey.generate().to_pem(None)), "secret: expected a public key, found a private key; "),
        (file("sealed", SecretKey.generate().to_pem(b"x")), "found a private key"),
        (file("text", b"hello"), "found neither"),
        (file("empty", b""), "found neither"),
        (file("m.json", b'{"payload": "", "payloadType": "x", "signatures": []}'), "found neither; name the .pub file"),
        (file("config.json", b'{"spec": 1.5}'), "(PEM, -----BEGIN PUBLIC KEY-----) or a trust store (JSON with "),
        (file("cert", b"-----BEGIN CERTIFICATE-----\n"), "one PEM block PUBLIC KEY"),
        (file("long", store() + b" " * MAX_TRUST_BYTES), "at most"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_trust(trust)
        assert says in str(caught.value)
        assert caught.value.exit_code == 2


# ---------------------------------------------------------------- the signed form

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
KINDS: tuple[KeyKind, ...] = ("ed25519", "ecdsa-p256", "ecdsa-p384", "ecdsa-p521")
ROOTS = tuple(SecretKey.generate(kind) for kind in KINDS)
R1, R2, R3, R4 = ROOTS
IDS = tuple(key.public.keyid for key in ROOTS)
NAMES = {keyid: f"root{number}" for number, keyid in enumerate(IDS, 1)}


def rooted(
    version: int = 1, *, threshold: int = 2, roots: Sequence[SecretKey] = (R1, R2, R3), **more: Any
) -> TrustStore:
    publics = [PublicKey(key.public.der, name=NAMES.get(key.public.keyid, "other")) for key in roots]
    return TrustStore(
        keys={key.keyid: key for key in [*publics, PublicKey(ALICE.der, name="alice")]},
        publishers=(Publisher("xai", ("hf:xai-org/*",), 1, (ALICE.keyid,)),),
        version=version,
        issued=NOW,
        root=Root(threshold, tuple(key.keyid for key in publics)),
        **more,
    )


def sealed(store: TrustStore, *keys: SecretKey, payload: bytes | None = None, kind: str = PAYLOAD_TYPE) -> bytes:
    """An envelope signed by any keys, whether or not they may: what an attacker can make."""
    body = store.to_payload() if payload is None else payload
    return Envelope(
        body, kind, tuple(Signature(key.sign(pae(kind, body)), key.public.keyid) for key in keys)
    ).serialize()


def says(data: bytes, *, where: str = "trust store") -> str:
    with pytest.raises(ConfigError) as caught:
        TrustStore.parse(data)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"{where}: ")
    return caught.value.message


def refused(old: TrustStore, *offered: bytes, kind: type[RejectedError], code: str, now: datetime = NOW) -> str:
    with pytest.raises(RejectedError) as caught:
        update(old, *offered, now=now)
    assert type(caught.value) is kind
    assert caught.value.findings[0].code == code
    return caught.value.findings[0].message


def trusted(version: int = 1, **more: Any) -> TrustStore:
    store = rooted(version, **more)
    return replace(store, sha256=sha256_hex(store.to_payload()))


FULL: Mapping[str, Any] = {
    "validity": {ALICE.keyid: Validity(NOW, NOW + timedelta(days=1)), IDS[2]: Validity(not_after=NOW)},
    "revoked_keys": {BOB.keyid: Revocation("lost", NOW), IDS[2]: Revocation("left")},
    "revoked_manifests": {"ab" * 32: "poisoned \u00fc"},
    "epochs": {"hf:xai-org/grok-1": 3},
}


def test_a_signed_store_reads_back_as_what_was_signed() -> None:
    store = rooted(7, **FULL)
    signed = sign_store(store, [R1, R2])
    read = TrustStore.parse(signed.serialize())
    assert read == replace(store, sha256=sha256_hex(store.to_payload())) == signed.store
    assert [key.name for key in read.keys.values()] == ["root1", "root2", "root3", "alice"]
    assert SignedStore.parse(signed.serialize()) == signed
    assert signed.signers == IDS[:2]


def test_any_kinds_of_key_meet_a_threshold_together() -> None:
    store = rooted(threshold=4, roots=ROOTS)
    signed = sign_store(store, [R4, R2])
    assert signed.missing() == 2
    assert "expected 4 signatures of its own root, found 2" in says(signed.serialize())
    done = SignedStore.parse(signed.serialize()).signed(R3, R1)
    assert done.missing() == 0
    assert TrustStore.parse(done.serialize()).root == store.root


def test_a_key_that_signs_twice_or_has_two_names_counts_once() -> None:
    assert "found 1" in says(sealed(rooted(), R1, R1, R1))
    # ECDSA is randomized: these are two different signatures of one key.
    assert "found 1" in says(sealed(rooted(), R2, R2))
    value = json.loads(rooted().to_payload())
    value["root"]["keyids"] = [IDS[0], "0" * 64]
    value["keys"] = {**value["keys"], "0" * 64: {**value["keys"][IDS[0]], "name": "twin"}}
    assert f"expected keyid {IDS[0]} for key 'twin'" in says(sealed(rooted(), R1, payload=json.dumps(value).encode()))


def test_a_hint_at_a_root_key_is_no_signature_of_it() -> None:
    store = rooted()
    body = store.to_payload()
    forged = tuple(Signature(R4.sign(pae(PAYLOAD_TYPE, body)), keyid) for keyid in IDS[:2])
    assert "found 0" in says(Envelope(body, PAYLOAD_TYPE, forged).serialize())
    hidden = tuple(Signature(key.sign(pae(PAYLOAD_TYPE, body)), "nobody") for key in (R4, R1, R2))
    assert TrustStore.parse(Envelope(body, PAYLOAD_TYPE, hidden).serialize()).version == 1


def test_signatures_of_a_revoked_root_key_do_not_count_and_are_named() -> None:
    store = rooted(revoked_keys={IDS[1]: Revocation("stolen", NOW)})
    said = says(sealed(store, R1, R2))
    assert f"found 1; that of root2 ({IDS[1][:16]}) does not count: revoked since 2026-11-30T12:00:00Z: stolen" in said
    assert TrustStore.parse(sealed(store, R1, R2, R3)).version == 1


def test_a_publisher_cannot_sign_the_store_that_names_it() -> None:
    alice = SecretKey.generate()
    store = rooted()
    store = replace(
        store,
        keys={**store.keys, alice.public.keyid: alice.public},
        publishers=(Publisher("a", ("*",), 1, (alice.public.keyid,)),),
    )
    store = replace(store, keys={k: PublicKey(v.der, name=v.name or "alice") for k, v in store.keys.items()})
    assert "found 1" in says(sealed(store, alice, R1))
    with pytest.raises(ConfigError, match="is not in the root"):
        sign_store(store, [alice])


def test_reading_a_store_does_not_look_at_the_clock() -> None:
    store = rooted(validity={keyid: Validity(not_after=datetime(2001, 1, 1, tzinfo=UTC)) for keyid in IDS[:3]})
    assert TrustStore.parse(sealed(store, R1, R2)).version == 1


@pytest.mark.parametrize("field", ["root", "issued"])
def test_a_signed_store_needs_its_root_and_its_date(field: str) -> None:
    value = json.loads(rooted().to_payload())
    del value[field]
    payload = json.dumps(value).encode()
    assert f'expected "{field}"' in says(sealed(rooted(), R1, R2, payload=payload))
    # Without a signature it is a person's own configuration, and they need neither.
    assert TrustStore.parse(payload).version == 1


def test_an_envelope_around_something_else_is_refused() -> None:
    good = sealed(rooted(), R1, R2)
    for data, part in (
        (sealed(rooted(), R1, R2, kind="application/vnd.safeload.trust.v1+json+x"), "expected a payload of type"),
        (sealed(rooted(), R1, R2, payload=b"{}"), "spec"),
        (sealed(rooted(), R1, R2, payload=b"[]"), "the file"),
        (sealed(rooted(), R1, R2, payload=b'{"spec":"1.0","spec":"1.0"}'), "each key once"),
        (
            sealed(rooted(), R1, R2, payload=rooted().to_payload().replace(b'"threshold": 2', b'"threshold": 2.0')),
            "2.0",
        ),
        (sealed(rooted(), R1, R2, payload=b" " * MAX_TRUST_BYTES + rooted().to_payload()), "at most 1048576 bytes"),
        (good + b" " * MAX_TRUST_FILE_BYTES, "at most 2097152 bytes"),
        (good[:-3], "not a signed trust store"),
        (sealed(rooted()), "at least one signature"),
    ):
        assert part in says(data)


def test_a_store_that_cannot_be_read_back_is_not_signed() -> None:
    for store, part in (
        (TrustStore.of_keys([ALICE]), "a root, a date and a version"),
        (replace(rooted(), issued=None), "a root, a date and a version"),
        (replace(rooted(), root=None), "a root, a date and a version"),
        (replace(rooted(), version=0), "a root, a date and a version"),
        (replace(rooted(), issued=NOW.replace(microsecond=1)), "whole seconds"),
        (replace(rooted(), publishers=(Publisher("x", ("[a]",), 1, (ALICE.keyid,)),)), "streams"),
        (replace(rooted(), publishers=(Publisher("\ud800", ("*",), 1, (ALICE.keyid,)),)), "UTF-8"),
        (replace(rooted(), epochs={"a": 2**53 + 1}), "integers up to"),
        (replace(rooted(), revoked_manifests={"ab": "x"}), "sha256"),
    ):
        with pytest.raises(ConfigError, match=part):
            sign_store(store, [R1])


def test_who_signs_a_store_is_of_its_root_and_new() -> None:
    signed = sign_store(rooted(), [R1])
    for keys, part in (([R4], "is not in the root"), ([R1], "has signed this"), ([R2, R2], "has signed this")):
        with pytest.raises(ConfigError, match=part):
            signed.signed(*keys)
    with pytest.raises(ConfigError, match="at least one root key"):
        sign_store(rooted(), [])
    crowd = replace(signed.envelope, signatures=signed.envelope.signatures * 256)
    with pytest.raises(ConfigError, match="up to 256 signatures"):
        replace(signed, envelope=crowd).signed(R2)


def test_there_are_few_root_keys() -> None:
    many = [SecretKey.generate() for _ in range(MAX_ROOT_KEYS + 1)]
    assert rooted(roots=many[:-1]).root is not None
    with pytest.raises(ConfigError, match="up to 32 keys, found 33"):
        rooted(roots=many)


# ---------------------------------------------------------------- who counts, and when


def test_a_key_counts_within_its_validity_and_until_it_is_revoked() -> None:
    second = timedelta(seconds=1)
    store = rooted(
        validity={ALICE.keyid: Validity(NOW, NOW + second), IDS[0]: Validity()},
        revoked_keys={IDS[1]: Revocation("lost"), "0" * 64: Revocation("old")},
    )
    assert store.validity == {ALICE.keyid: Validity(NOW, NOW + second)}
    for now, why in (
        (NOW - second, "not valid before 2026-11-30T12:00:00Z"),
        (NOW, None),
        (NOW + second, None),
        (NOW + 2 * second, "not valid after 2026-11-30T12:00:01Z"),
    ):
        assert store.inactive_reason(ALICE.keyid, now) == why
        assert store.active_keys(now).keys() == {IDS[0], IDS[2]} | ({ALICE.keyid} if why is None else set())
    assert store.inactive_reason(IDS[1], NOW) == "revoked: lost"
    assert store.inactive_reason("0" * 64, NOW) == "revoked: old"
    assert store.inactive_reason(IDS[0], NOW) is None


def test_a_validity_is_of_a_key_at_hand() -> None:
    with pytest.raises(ConfigError, match=r"validity: keyid 0+ is not among the keys"):
        rooted(validity={"0" * 64: Validity(NOW)})


def test_keys_alone_make_a_store_with_nothing_taken_back() -> None:
    made = TrustStore.of_keys([ALICE, BOB])
    assert (made.version, made.sha256, made.root, made.issued) == (0, "", None, None)
    assert not made.revoked_keys
    assert not made.revoked_manifests
    assert not made.epochs
    assert made.active_keys(NOW) == made.keys


def test_naming_a_key_does_not_undo_that_the_store_revoked_it() -> None:
    store = rooted(
        revoked_keys={BOB.keyid: Revocation("stolen")}, validity={ALICE.keyid: Validity(not_after=NOW)}, version=5
    )
    both = load_trust([store, BOB, ALICE])
    assert both.publishers[-1] == Publisher(GIVEN_KEYS, ("*",), 1, (BOB.keyid, ALICE.keyid))
    assert both.active_keys(NOW + timedelta(1)).keys() == set(IDS[:3])
    assert (both.version, both.root) == (5, store.root)


# ---------------------------------------------------------------- pins


def test_a_pinned_store_is_that_one_and_no_other(tmp_path: Path) -> None:
    one, two, plain = tmp_path / "one", tmp_path / "two", tmp_path / "plain"
    one.write_bytes(sealed(rooted(1), R1, R2))
    two.write_bytes(sealed(rooted(2), R1, R2))
    plain.write_bytes(store())
    pin = f"sha256:{sha256_hex(rooted(1).to_payload())}"
    assert load_trust(one).version == load_trust(one, pin=pin).version == 1
    with pytest.raises(ConfigError, match="says alone who may sign"):
        load_trust([BOB, one], pin=pin)
    assert load_trust(TrustStore.parse(one.read_bytes()), pin=pin).version == 1
    assert load_trust(plain, pin=f"sha256:{sha256_hex(store())}").version == 3
    for trust, wrong, part in (
        (two, pin, "expected the pinned trust store sha256:"),
        (TrustStore.parse(two.read_bytes()), pin, "expected the pinned trust store"),
        (plain, pin, "expected the pinned trust store"),
        (BOB, pin, "a trust store was pinned, and none was named"),
        (one, pin[7:], "trust pin: expected sha256:"),
        (one, pin.upper(), "trust pin: expected sha256:"),
        (one, pin + "\n", "trust pin: expected sha256:"),
        (TrustStore.of_keys([BOB]), pin, "found sha256:(none)"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_trust(trust, pin=wrong)
        assert part in str(caught.value)


def test_load_trust_refuses_a_signed_store_that_is_not_whole(tmp_path: Path) -> None:
    file = tmp_path / "trust.json"
    file.write_bytes(sealed(rooted(), R1))
    with pytest.raises(ConfigError, match=f"{file}: expected 2 signatures of its own root, found 1"):
        load_trust(file)


# ---------------------------------------------------------------- updates


def test_the_next_version_is_trusted_if_both_roots_signed_it() -> None:
    moved = rooted(2, roots=(R2, R3, R4))
    assert update(trusted(), sealed(moved, R2, R3), now=NOW) == trusted(2, roots=(R2, R3, R4))
    # A root that is replaced as a whole hands over with signatures of both.
    assert update(trusted(roots=(R1, R2)), sealed(rooted(2, roots=(R3, R4)), R1, R2, R3, R4), now=NOW).version == 2


def test_a_chain_hands_trust_on_from_root_to_root() -> None:
    first = trusted(roots=(R1, R2))
    chain = [sealed(rooted(2, roots=(R2, R3)), R2, R3, R1), sealed(rooted(3, roots=(R3, R4)), R4, R3, R2)]
    assert update(first, *chain, now=NOW).version == 3
    assert update(trusted(2, roots=(R2, R3)), chain[1], now=NOW).version == 3
    for offered in (chain[1:], chain[::-1]):
        said = refused(first, *offered, kind=SignatureError, code="root-threshold-not-met")
        assert said == "expected 2 signatures of the root of version 1, found 1"


def test_no_version_is_skipped_repeated_or_gone_back_to() -> None:
    old = trusted(5)
    for version in (1, 4, 5, 7, 2**53):
        said = refused(old, sealed(rooted(version), R1, R2), kind=RollbackError, code="version-not-next")
        assert said == f"expected version 6 of the trust store, found version {version}"
    other = sealed(rooted(5, epochs={"a": 9}), R1, R2)
    refused(old, other, kind=RollbackError, code="version-not-next")
    six = sealed(rooted(6), R1, R2)
    refused(old, six, six, kind=RollbackError, code="version-not-next")
    refused(old, six, sealed(rooted(5), R1, R2), kind=RollbackError, code="version-not-next")


def test_a_version_that_is_named_twice_is_not_called_a_fork() -> None:
    old, six = trusted(5), sealed(rooted(6), R1, R2)
    for offered, told in (([six, six], "version 6 itself"), ([six, sealed(rooted(6, epochs={"a": 9}), R1, R2)], "ask")):
        with pytest.raises(RollbackError) as caught:
            update(old, *offered, now=NOW)
        assert [(f.code, told in (f.hint or "")) for f in caught.value.findings] == [("version-not-next", True)]


def test_the_old_root_must_sign() -> None:
    usurped = rooted(2, roots=(R3, R4))
    said = refused(
        trusted(roots=(R1, R2)), sealed(usurped, R3, R4, R1), kind=SignatureError, code="root-threshold-not-met"
    )
    assert said == "expected 2 signatures of the root of version 1, found 1"


def test_the_new_root_must_sign() -> None:
    moved = rooted(2, roots=(R3, R4))
    said = refused(
        trusted(roots=(R1, R2)), sealed(moved, R1, R2, R3), kind=SignatureError, code="root-threshold-not-met"
    )
    assert said == "expected 2 signatures of its own root, of version 2, found 1"
    # A threshold that rises is met by the version that raises it.
    raised = rooted(2, threshold=3)
    refused(trusted(), sealed(raised, R1, R2), kind=SignatureError, code="root-threshold-not-met")
    # One that falls still needs what the old root asks for.
    refused(trusted(), sealed(rooted(2, threshold=1), R1), kind=SignatureError, code="root-threshold-not-met")


def test_one_key_is_not_two_in_an_update() -> None:
    refused(trusted(), sealed(rooted(2), R2, R2), kind=SignatureError, code="root-threshold-not-met")


@pytest.mark.parametrize("revoked_in", [1, 2])
def test_a_revoked_root_key_signs_no_update(revoked_in: int) -> None:
    gone: dict[str, Any] = {"revoked_keys": {IDS[0]: Revocation("stolen")}}
    old, new = trusted(**(gone if revoked_in == 1 else {})), rooted(2, **(gone if revoked_in == 2 else {}))
    said = refused(old, sealed(new, R1, R2), kind=SignatureError, code="root-threshold-not-met")
    assert f"that of root1 ({IDS[0][:16]}) does not count: revoked: stolen" in said
    assert ("version 1" in said) == (revoked_in == 1)
    assert update(old, sealed(new, R1, R2, R3), now=NOW).version == 2


def test_a_root_that_was_taken_back_cannot_bring_itself_back() -> None:
    old = trusted(threshold=1, revoked_keys={IDS[0]: Revocation("stolen")})
    said = refused(old, sealed(rooted(2, threshold=1), R1), kind=SignatureError, code="root-threshold-not-met")
    assert "revoked: stolen" in said


def test_a_root_key_out_of_its_validity_signs_no_update() -> None:
    limits: dict[str, Any] = {"validity": {IDS[0]: Validity(NOW, NOW)}}
    old, new = trusted(**limits), rooted(2)
    offered = sealed(new, R1, R2)
    assert update(old, offered, now=NOW).version == 2
    for now, why in ((NOW + timedelta(seconds=1), "not valid after"), (NOW - timedelta(seconds=1), "not valid before")):
        said = refused(old, offered, kind=SignatureError, code="root-threshold-not-met", now=now)
        assert f"that of root1 ({IDS[0][:16]}) does not count: {why} 2026-11-30T12:00:00Z" in said
    # Nor does a new version lengthen the life of the key that it was signed with.
    late = NOW + timedelta(days=1)
    refused(
        trusted(), sealed(rooted(2, **limits), R1, R2), kind=SignatureError, code="root-threshold-not-met", now=late
    )


def test_junk_beside_the_signatures_changes_nothing() -> None:
    body = rooted(2).to_payload()
    good = [Signature(key.sign(pae(PAYLOAD_TYPE, body)), "") for key in (R1, R2)]
    junk = [Signature(b"", IDS[2]), Signature(bytes(64), "\x1b"), Signature(R3.sign(body), IDS[2])]
    assert update(trusted(), Envelope(body, PAYLOAD_TYPE, (*junk, *good)).serialize(), now=NOW).version == 2
    refused(
        trusted(),
        Envelope(body, PAYLOAD_TYPE, (*junk, good[0])).serialize(),
        kind=SignatureError,
        code="root-threshold-not-met",
    )


def test_nothing_is_parsed_before_the_old_root_signed_it() -> None:
    bad = b"no JSON at all"
    refused(trusted(), sealed(rooted(), R1, R4, payload=bad), kind=SignatureError, code="root-threshold-not-met")
    refused(trusted(), sealed(rooted(), R1, R2, payload=bad), kind=ManifestError, code="bad-trust-store")


def test_what_is_no_signed_store_is_no_update() -> None:
    plain = rooted(2).to_payload()
    for data in (
        b"",
        plain,
        sealed(rooted(2), R1, R2, kind="application/vnd.in-toto+json"),
        sealed(rooted(2), R1, R2, payload=plain.replace(b'"spec": "1.0"', b'"spec": "1.1"')),
        sealed(rooted(2), R1, R2, payload=plain.replace(b'"epochs"', b'"more": 1, "epochs"')),
        b" " * MAX_TRUST_FILE_BYTES + sealed(rooted(2), R1, R2),
    ):
        refused(trusted(), data, kind=ManifestError, code="bad-trust-store")
    refused(trusted(), sealed(rooted(2)), kind=SignatureError, code="no-signatures")


@pytest.mark.parametrize("field", ["root", "issued"])
def test_an_update_does_not_drop_the_root_or_the_date(field: str) -> None:
    value = json.loads(rooted(2).to_payload())
    del value[field]
    offered = sealed(rooted(2), R1, R2, R3, payload=json.dumps(value).encode())
    said = refused(trusted(), offered, kind=ManifestError, code="bad-trust-store")
    assert said == f'expected "{field}" in a trust store that is signed'


def test_an_update_has_at_most_256_versions() -> None:
    only = trusted(threshold=1, roots=(R1,))
    chain = [sealed(rooted(version, threshold=1, roots=(R1,)), R1) for version in range(2, MAX_HOPS + 3)]
    assert update(only, *chain[:MAX_HOPS], now=NOW).version == MAX_HOPS + 1
    refused(only, *chain, kind=ManifestError, code="bad-trust-store")


def test_an_update_starts_from_a_store_with_a_root_and_goes_somewhere() -> None:
    for old, offered, part in (
        (TrustStore.of_keys([ALICE]), [sealed(rooted(1), R1, R2)], "has no root"),
        (TrustStore.parse(store()), [sealed(rooted(4), R1, R2)], "has no root"),
        (trusted(), [], "at least one"),
    ):
        with pytest.raises(ConfigError, match=part):
            update(old, *offered, now=NOW)


def test_a_refused_update_names_its_file() -> None:
    with pytest.raises(RollbackError) as caught:
        update(trusted(), sealed(rooted(2), R1, R2), sealed(rooted(2), R1, R2), now=NOW, sources=["a", "b"])
    assert caught.value.findings[0].file == "b"
    with pytest.raises(SignatureError) as unnamed:
        update(trusted(), sealed(rooted(2), R1, R4), now=NOW)
    assert unnamed.value.findings[0].file == "update 1"


def test_any_changed_byte_of_a_signed_store_ends_its_trust() -> None:
    body = bytearray(rooted(2).to_payload())
    signatures = tuple(Signature(key.sign(pae(PAYLOAD_TYPE, bytes(body))), key.public.keyid) for key in (R1, R2))
    for place in range(0, len(body), 37):
        body[place] ^= 1
        changed = Envelope(bytes(body), PAYLOAD_TYPE, signatures).serialize()
        refused(trusted(), changed, kind=SignatureError, code="root-threshold-not-met")
        body[place] ^= 1
