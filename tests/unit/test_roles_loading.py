import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest

from safeload import companions, scanning, staging
from safeload.companions import load_companions, load_model
from safeload.errors import ConfigError, DigestMismatchError, FormatError, ManifestError, PolicyError
from safeload.formats.safetensors_writing import write_safetensors
from safeload.manifest import FileEntry, Manifest, Role
from safeload.publishing import sign
from safeload.signing import sign_manifest
from safeload.trust.keys import SecretKey

KEY = SecretKey.generate("ed25519")
TOKENIZER = b'{"model": {"vocab": {"a": 0, "b": 1}}}\n'
CONFIG = b'{"n_layer": 2}\n'
TEMPLATE = b'{"chat_template": "{{ messages }}"}\n'


def checkpoint(directory: Path, *, tokenizer: bytes = TOKENIZER, revision: str = "1") -> Path:
    """A model with all that belongs to it, and its manifest beside it."""
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        write_safetensors(file, {"w": np.arange(6, dtype=np.float32)})
    for name, data in {
        "tokenizer.json": tokenizer,
        "config.json": CONFIG,
        "chat_template.json": TEMPLATE,
        "README.md": b"# A model\n",
    }.items():
        (directory / name).write_bytes(data)
    manifest = directory.parent / f"{directory.name}.manifest.json"
    manifest.write_bytes(sign(directory, keys=[KEY], model="tiny", revision=revision))
    return manifest


def test_a_model_comes_with_its_tokenizer_and_configuration(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path / "m", revision="r7")
    model = load_model(tmp_path / "m", manifest=manifest, trust=KEY.public)
    assert model.revision == "r7"
    assert model.tensors["model.safetensors"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert {path: (found.role, found.data) for path, found in model.companions.items()} == {
        "chat_template.json": ("template", TEMPLATE),
        "config.json": ("config", CONFIG),
        "tokenizer.json": ("tokenizer", TOKENIZER),
    }
    assert [found.path for found in model.of_role("tokenizer")] == ["tokenizer.json"]


def test_a_model_on_devices_comes_with_them_too(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path / "m")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = load_model(tmp_path / "m", manifest=manifest, trust=KEY.public, shardings=place, roles=["tokenizer"])
    assert isinstance(model.tensors["model.safetensors"]["w"], jax.Array)
    assert list(model.companions) == ["tokenizer.json"]


@pytest.mark.parametrize("shardings", [None, "default"])
def test_a_tokenizer_of_another_revision_is_refused_though_it_is_signed_there(tmp_path: Path, shardings: Any) -> None:
    # As long as the other, so that nothing but its digest tells.
    other = TOKENIZER.replace(b'"a": 0, "b": 1', b'"a": 1, "b": 0')
    manifest = checkpoint(tmp_path / "one")
    checkpoint(tmp_path / "two", tokenizer=other, revision="2")
    load_model(tmp_path / "one", manifest=manifest, trust=KEY.public)
    (tmp_path / "one" / "tokenizer.json").write_bytes((tmp_path / "two" / "tokenizer.json").read_bytes())
    place = None if shardings is None else lambda *_: None
    with pytest.raises(DigestMismatchError) as caught:
        load_model(tmp_path / "one", manifest=manifest, trust=KEY.public, shardings=place)
    assert [(finding.code, finding.file) for finding in caught.value.findings] == [
        ("digest-mismatch", "tokenizer.json")
    ]
    with pytest.raises(DigestMismatchError):
        load_companions(tmp_path / "one", manifest=manifest, trust=KEY.public)


def test_weights_that_changed_are_refused_with_a_tokenizer_that_did_not(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DigestMismatchError):
        load_model(tmp_path / "m", manifest=manifest, trust=KEY.public)
    # No claim is made of files that were not asked for.
    assert set(load_companions(tmp_path / "m", manifest=manifest, trust=KEY.public)) == {
        "chat_template.json",
        "config.json",
        "tokenizer.json",
    }


def test_what_is_returned_are_the_bytes_that_were_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = checkpoint(tmp_path / "m")
    admit = scanning.admit

    def swapping(staged: staging.StagedCheckpoint, **options: Any) -> Any:
        for path in staged.files:
            (tmp_path / "m" / path).write_bytes(b"swapped after it was hashed")
        return admit(staged, **options)

    monkeypatch.setattr(companions, "admit", swapping)
    found = load_companions(tmp_path / "m", manifest=manifest, trust=KEY.public)
    assert found["tokenizer.json"].data == TOKENIZER


def test_companions_are_scanned_by_the_policy(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path / "m")
    policy = tmp_path / "none.toml"
    policy.write_text(
        "version = 1\nname = 'none'\ndescription = 'Takes no file beside the weights'\n", encoding="utf-8"
    )
    with pytest.raises(FormatError) as caught:  # which it is to a policy that knows no such file
        load_companions(tmp_path / "m", manifest=manifest, trust=KEY.public, policy=policy)
    assert caught.value.findings[0].code == "not-a-pickle"
    own = tmp_path / "m" / "policy.toml"
    own.write_bytes(policy.read_bytes())
    with pytest.raises(ConfigError, match="policy"):
        load_companions(tmp_path / "m", manifest=manifest, trust=KEY.public, policy=own)


def test_roles_are_any_of_the_manifests_and_no_others(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path / "m")
    found = load_companions(tmp_path / "m", manifest=manifest, trust=KEY.public, roles=get_args(Role))
    assert "README.md" in found
    assert "model.safetensors" not in found
    assert load_companions(tmp_path / "m", manifest=manifest, trust=KEY.public, roles=["rng"]) == {}
    wrong: Any = ["tokeniser"]
    with pytest.raises(ConfigError, match="tokeniser"):
        load_companions(tmp_path / "m", manifest=manifest, trust=KEY.public, roles=wrong)


def test_a_manifest_without_weights_is_no_model(tmp_path: Path) -> None:
    checkpoint(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    files = [
        FileEntry(
            path=path.name,
            size=path.stat().st_size,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            format="json" if path.suffix == ".json" else "text",
            role="tokenizer" if path.suffix == ".json" else "docs",
        )
        for path in (tmp_path / "m").iterdir()
    ]
    made = Manifest.of(files, stream="tiny", revision="1", issued=datetime.now(UTC), tool_version="0")
    with pytest.raises(PolicyError) as caught:
        load_model(tmp_path / "m", manifest=sign_manifest(made, [KEY]), trust=KEY.public)
    assert [finding.code for finding in caught.value.findings] == ["role-missing"]


def test_a_model_is_held_to_what_is_expected_and_to_the_roles_it_requires(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path / "m")
    with pytest.raises(ManifestError):
        load_model(tmp_path / "m", manifest=manifest, trust=KEY.public, revision="2")
    with pytest.raises(PolicyError, match="optimizer"):
        load_model(tmp_path / "m", manifest=manifest, trust=KEY.public, purpose="training")
