"""A trust store says who may sign what, and cannot say it ambiguously."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safeload.errors import ConfigError
from safeload.trust.keys import PublicKey, SecretKey
from safeload.trust.store import GIVEN_KEYS, MAX_TRUST_BYTES, Publisher, TrustStore, load_trust

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
    "data", [b"", b"[]", b"null", b"\xff", store()[:-1], store().replace(b'"spec"', b'"spec": "1.0", "spec"', 1)]
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
    assert load_trust(file) == TrustStore.parse(store())
    both = load_trust([carol, file, pem])
    assert both.publishers[:2] == TrustStore.parse(store()).publishers
    assert both.publishers[2] == Publisher(GIVEN_KEYS, ("*",), 1, (carol.keyid, ALICE.keyid))
    assert both.version == 3
    ready = TrustStore.of_keys([BOB])
    assert load_trust(ready) is ready


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
