import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from safeload import loading
from safeload.cli import main
from safeload.errors import ConfigError, DigestMismatchError, FileSetError, FormatError, PolicyError, SignatureError
from safeload.files import StreamSource
from safeload.interchange import sign_bundle, trusted_bundle
from safeload.publishing import sign
from safeload.trust.keys import SecretKey
from safeload.trust.store import SigstoreIdentity, TrustStore
from tests import oms_sample as oms
from tests import tensorflow_sample as tf
from tests.simulator import pickled

KEY = SecretKey.generate("ecdsa-p256")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights.pkl").write_bytes(pickled({"w": np.arange(6.0, dtype=np.float32)}))
    (folder / "config.json").write_bytes(b'{"layers": 1}')
    return folder


@pytest.fixture
def bundle(model: Path) -> bytes:
    return sign_bundle(model, key=KEY, model="model")[0]


def test_a_bundle_is_taken_in_the_place_of_a_manifest(model: Path, bundle: bytes) -> None:
    report = loading.verify(model, manifest=bundle, trust=KEY.public)
    assert [(file.path, file.verdict) for file in report.files] == [
        ("config.json", "accepted"),
        ("weights.pkl", "accepted"),
    ]
    assert report.facts["bundle"]["signers"] == [{"name": "", "keyid": KEY.public.keyid}]


def test_each_damage_is_refused_by_its_own_name(model: Path, bundle: bytes) -> None:
    (model / "config.json").write_bytes(b'{"layers": 2}')
    with pytest.raises(DigestMismatchError):
        loading.verify(model, manifest=bundle, trust=KEY.public)
    (model / "config.json").unlink()
    (model / "extra.json").write_bytes(b"{}")
    with pytest.raises(FileSetError) as refused:
        loading.verify(model, manifest=bundle, trust=KEY.public)
    assert [(f.file, f.code) for f in refused.value.findings] == [
        ("config.json", "missing-file"),
        ("extra.json", "unlisted-file"),
    ]


def test_a_signature_of_another_key_is_refused(model: Path, bundle: bytes) -> None:
    with pytest.raises(SignatureError):
        loading.verify(model, manifest=bundle, trust=SecretKey.generate("ecdsa-p256").public)


def test_the_policy_holds_though_the_files_are_signed(model: Path, bundle: bytes) -> None:
    assert loading.check(model, manifest=bundle, trust=KEY.public, policy="grok-1").verdict == "rejected"
    (model / "evil.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(PolicyError):
        sign_bundle(model, key=KEY, model="model")


def test_a_pin_and_a_model_are_held_and_the_rest_is_refused(model: Path, bundle: bytes) -> None:
    signed = trusted_bundle(bundle, "b", KEY.public, now=datetime.now(UTC), pin=None, model=None)
    pin = f"sha256:{signed.sha256}"
    assert loading.verify(model, manifest=bundle, trust=KEY.public, pin=pin, model="model").is_accepted
    other = loading.check(model, manifest=bundle, trust=KEY.public, pin="sha256:" + "0" * 64)
    assert [f.code for f in other.findings] == ["pin-mismatch"]
    other = loading.check(model, manifest=bundle, trust=KEY.public, model="another")
    assert [f.code for f in other.findings] == ["model-mismatch"]


def test_a_bundle_does_not_get_out_of_what_was_asked_for(model: Path, bundle: bytes, tmp_path: Path) -> None:
    for asked in ({"revision": "r1"}, {"history": tmp_path / "h"}, {"purpose": "training"}):
        report = loading.check(model, manifest=bundle, trust=KEY.public, **asked)
        assert [f.code for f in report.findings] == ["bundle-says-less"]
        assert report.verdict == "rejected"
    assert not (tmp_path / "h").exists()


def test_a_bundle_has_no_epoch_and_is_refused_where_the_root_raised_it(model: Path, bundle: bytes) -> None:
    given = TrustStore.of_keys([KEY.public])
    store = replace(given, version=2, epochs={"model": 2})
    report = loading.check(model, manifest=bundle, trust=store)
    assert [f.code for f in report.findings] == ["rollback"]
    signed = trusted_bundle(bundle, "b", given, now=datetime.now(UTC), pin=None, model=None)
    assert loading.verify(model, manifest=bundle, trust=store, pin=f"sha256:{signed.sha256}").is_accepted


def test_a_file_of_two_names_is_refused_as_with_a_manifest(model: Path, bundle: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").hardlink_to(model / "weights.pkl")
    report = loading.check(model, manifest=bundle, trust=KEY.public)
    assert [(f.file, f.code) for f in report.findings] == [("weights.pkl", "hard-link")]


def tensorflow_files() -> dict[str, bytes]:
    weights = {f"w{i}": tf.Tensor(tf.INT8, (10,), bytes(10), shard=i) for i in range(2)}
    return tf.bundle("m.ckpt", weights, n_shards=2)


def test_files_that_belong_together_are_held_against_each_other(tmp_path: Path) -> None:
    files = tensorflow_files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    signed, _ = sign_bundle(tmp_path, key=KEY, model="model")
    report = loading.verify(tmp_path, manifest=signed, trust=KEY.public)
    assert [(file.format, len(file.tensors)) for file in report.files] == [
        ("tensorflow", 1),
        ("tensorflow", 1),
        ("index", 0),
    ]
    # Signed by somebody who did not look.
    del files["m.ckpt.data-00001-of-00002"]
    (tmp_path / "m.ckpt.data-00001-of-00002").unlink()
    careless = oms.bundle(oms.statement(oms.shards(files, 1 << 20, "sha256"), method="shards", shard_size=1 << 20), KEY)
    with pytest.raises(FormatError) as refused:
        loading.verify(tmp_path, manifest=careless, trust=KEY.public)
    assert [(f.file, f.code) for f in refused.value.findings] == [("m.ckpt.index", "index-file-missing")]


def test_what_the_bundle_leaves_out_judges_nothing(tmp_path: Path) -> None:
    files = tensorflow_files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    del files["m.ckpt.index"]
    listed = oms.shards(files, 1 << 20, "sha256")
    statement = oms.statement(listed, method="shards", shard_size=1 << 20, ignore_paths=["m.ckpt.index"])
    with pytest.raises(FormatError) as refused:
        loading.verify(tmp_path, manifest=oms.bundle(statement, KEY), trust=KEY.public)
    assert {f.code for f in refused.value.findings} == {"bundle-index-missing"}


def test_a_signed_file_that_became_a_hole_is_not_read_to_its_end(
    model: Path, bundle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (model / "weights.pkl").open("r+b") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(StreamSource, "finish", lambda source: pytest.fail(f"{source.path} is read to its end"))
    (model / "config.json").unlink()
    with pytest.raises(FileSetError) as refused:
        loading.verify(model, manifest=bundle, trust=KEY.public)
    assert {f.code for f in refused.value.findings} == {"missing-file", "limit-exceeded"}


def test_a_bundle_cannot_be_loaded(model: Path, bundle: bytes) -> None:
    with pytest.raises(ConfigError, match="verified and not loaded"):
        loading.load(model, manifest=bundle, trust=KEY.public)


def test_the_command_signs_and_verifies_a_bundle(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "k"
    assert main(["keygen", "-o", str(key), "--kind", "ecdsa-p256", "--no-passphrase"]) == 0
    sign = ["sign", str(model), "--key", str(key), "-o", str(tmp_path / "b.sig"), "--format", "oms"]
    assert main(sign) == 0
    verify = ["verify", str(model), "-m", str(tmp_path / "b.sig"), "--trust", f"{key}.pub"]
    capsys.readouterr()
    assert main([*verify, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["verdict"], shown["bundle"]["method"], shown["ignored"]) == ("accepted", "key", [])
    assert main(verify) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("a bundle has no version")
    assert lines[-1] == "accepted"
    assert main([*sign[:-2], "--revision", "r1", "--format", "oms"]) == 2


def test_certificates_are_told_from_keys_by_their_content(bundle: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        trusted_bundle(bundle, "b", tmp_path / "none", now=datetime.now(UTC), pin=None, model=None)
    pem = tmp_path / "ca.crt"
    pem.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError):
        trusted_bundle(bundle, "b", pem, now=datetime.now(UTC), pin=None, model=None)


def test_a_sigstore_identity_is_taken_with_all_that_vouches_for_it_and_for_bundles_only(
    model: Path, bundle: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.sig").write_bytes(bundle)
    verify = ["verify", str(model), "-m", str(tmp_path / "b.sig")]
    who = ["--sigstore-identity", "alice@example.com", "--sigstore-issuer", "https://issuer.example"]
    assert main([*verify, *who]) == 2
    assert "go together" in capsys.readouterr().err
    assert main(verify) == 2
    assert "--trust" in capsys.readouterr().err
    # This bundle is signed by a key, which nobody named.
    assert main([*verify, *who, "--sigstore-root", str(tmp_path / "root.json")]) == 1
    envelope = sign(model, keys=[KEY], model="model", revision="r1")
    identity = SigstoreIdentity("alice@example.com", "https://issuer.example", tmp_path / "root.json")
    with pytest.raises(ConfigError, match="and no manifests"):
        loading.verify(model, manifest=envelope, trust=[KEY.public, identity])
