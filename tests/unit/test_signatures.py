"""Claims of `safeload sign --payload-only` and `safeload attach-signature`: signing by who is not on this machine."""

from __future__ import annotations

import base64
import json
import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safeload import cli
from safeload.cli import signatures
from safeload.digests import sha256_hex
from safeload.errors import ConfigError, ManifestError, SignatureError
from safeload.manifest import Manifest
from safeload.trust.dsse import Envelope
from safeload.trust.keys import SecretKey
from safeload.trust.store import TrustStore
from safeload.verifying import verify_manifest

KEY, OTHER = SecretKey.generate(), SecretKey.generate("ecdsa-p256")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "weights").write_bytes(pickle.dumps({"w": np.arange(6, dtype=np.int8)}))
    (folder / "config.json").write_text("{}")
    for name, key in (("key", KEY), ("other", OTHER)):
        (tmp_path / name).write_bytes(key.to_pem(None))
        (tmp_path / f"{name}.pub").write_bytes(key.public.to_pem())
    return folder


@pytest.fixture
def payload(tmp_path: Path, checkpoint: Path) -> Path:
    assert sign(checkpoint, "--payload-only", "-o", tmp_path / "payload") == 0
    return tmp_path / "payload"


def sign(*arguments: object) -> int:
    return cli.main(["sign", *map(str, arguments)])


def attach(payload: Path, signature: bytes, key: str = "key", output: str = "manifest.json", **more: Any) -> int:
    folder = payload.parent
    (folder / "sig").write_bytes(signature)
    return signatures.attach_signature(payload, folder / "sig", folder / f"{key}.pub", folder / output, **more)


def test_what_was_signed_elsewhere_verifies_like_any_other(
    payload: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attach(payload, KEY.sign(payload.read_bytes())) == 0
    verify = ["verify", str(checkpoint), "-m", str(payload.parent / "manifest.json"), "--trust"]
    assert cli.main([*verify, str(payload.parent / "key.pub")]) == 0
    assert cli.main([*verify, str(payload.parent / "other.pub")]) == 1
    capsys.readouterr()


@pytest.mark.parametrize("text", [base64.b64encode, lambda raw: base64.b64encode(raw) + b"\n"])
@pytest.mark.parametrize("name", ["key", "other"])
def test_a_signature_may_come_in_base64(payload: Path, text: Any, name: str) -> None:
    key = {"key": KEY, "other": OTHER}[name]
    assert attach(payload, text(key.sign(payload.read_bytes())), name) == 0
    envelope = (payload.parent / "manifest.json").read_bytes()
    assert verify_manifest(envelope, TrustStore.of_keys([key.public])).signers[0].keyid == key.public.keyid


def test_a_second_signer_adds_to_the_first(payload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = payload.read_bytes()
    attach(payload, KEY.sign(message))
    capsys.readouterr()
    assert attach(payload.parent / "manifest.json", OTHER.sign(message), "other", "both.json", json=True) == 0
    envelope = Envelope.parse((payload.parent / "both.json").read_bytes())
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "output": str(payload.parent / "both.json"),
        "manifest": {"sha256": sha256_hex(envelope.payload)},
        "signer": {"name": "other", "keyid": OTHER.public.keyid},
        "signatures": 2,
    }


@pytest.mark.parametrize("signature", [b"", b"x", b"!" * 88, base64.b64encode(b"x" * 64), bytes(64)])
def test_a_signature_that_does_not_fit_leaves_no_manifest(payload: Path, signature: bytes) -> None:
    with pytest.raises(SignatureError):
        attach(payload, signature)
    assert not (payload.parent / "manifest.json").exists()


def test_a_payload_that_was_changed_leaves_no_manifest(payload: Path) -> None:
    signature = KEY.sign(payload.read_bytes())
    payload.write_bytes(payload.read_bytes() + b" ")
    with pytest.raises(ManifestError):
        attach(payload, signature)
    assert not (payload.parent / "manifest.json").exists()


def test_nothing_is_overwritten_and_what_cannot_be_read_is_said(payload: Path) -> None:
    signature = KEY.sign(payload.read_bytes())
    with pytest.raises(ConfigError, match="exists already"):
        attach(payload, signature, output="payload")
    with pytest.raises(ConfigError, match="cannot read the public key"):
        attach(payload, signature, key="absent")
    with pytest.raises(ConfigError, match="the signature of at most"):
        attach(payload, bytes(70_000))
    (payload.parent / "secret.pub").write_bytes(KEY.to_pem(None))
    with pytest.raises(ConfigError, match="found a private key"):
        attach(payload, signature, key="secret")


def test_the_payload_says_what_to_do_with_it(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sign(checkpoint, "--payload-only", "-o", tmp_path / "p") == 0
    shown = capsys.readouterr().out
    assert "not signed yet" in shown
    assert f"safeload attach-signature {tmp_path / 'p'} --signature SIG --public-key KEY.pub -o MANIFEST" in shown
    assert sign(checkpoint, "--payload-only", "-o", tmp_path / "q", "--json") == 0
    described = json.loads(capsys.readouterr().out)["payload"]
    data = (tmp_path / "q").read_bytes()
    assert described == {"sha256": sha256_hex(data), "bytes": len(data)}


@pytest.mark.parametrize("both", [True, False])
def test_somebody_signs_and_only_one(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], *, both: bool
) -> None:
    options = ["--payload-only", "--key", tmp_path / "key"] if both else []
    assert sign(checkpoint, *options, "-o", tmp_path / "m") == 2
    assert "expected either --key KEY or --payload-only" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_the_options_of_sign_reach_the_manifest(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("blake3")
    for name in ("optimizer.json", "rng.json", "step.json"):
        (checkpoint / name).write_text("{}")
    options = ["--kind", "training", "--require", "config", "--epoch", "2", "--expires", "2100-12-31", "--blake3"]
    assert sign(checkpoint, "--key", tmp_path / "key", "-o", tmp_path / "m", *options) == 0
    manifest = Manifest.parse(Envelope.parse((tmp_path / "m").read_bytes()).payload)
    assert (manifest.kind, manifest.epoch, manifest.expires) == ("training", 2, "2100-12-31T23:59:59Z")
    assert manifest.requires == ("weights", "optimizer", "step", "rng", "config")
    assert all(entry.blake3 for entry in manifest.files)
    capsys.readouterr()
    (checkpoint / "rng.json").unlink()
    assert sign(checkpoint, "--key", tmp_path / "key", "-o", tmp_path / "n", *options) == 1
    assert "role rng" in capsys.readouterr().err
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("2027-12-31", datetime(2027, 12, 31, 23, 59, 59, tzinfo=UTC)),
        ("2027-12-31T12:00Z", datetime(2027, 12, 31, 12, tzinfo=UTC)),
        ("2027-12-31T12:00", datetime(2027, 12, 31, 12, tzinfo=UTC)),
        ("2027-12-31T12:00+02:00", datetime(2027, 12, 31, 10, tzinfo=UTC)),
    ],
)
def test_an_expiry_is_a_day_or_an_instant(text: str | None, expected: datetime | None) -> None:
    assert signatures.parse_expiry(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "2027-02-30", "31.12.2027"])
def test_an_expiry_that_is_no_date_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--expires"):
        signatures.parse_expiry(text)
