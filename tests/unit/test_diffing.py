"""Two checkpoints are compared by their values, whatever the formats, names and files are."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safeload import sign
from safeload.diffing import ComparedTensor, Difference, compare, diff
from safeload.errors import ConfigError, ManifestError, PolicyError, SignatureError
from safeload.formats.pickles.writing import write_shard
from safeload.formats.safetensors_writing import write_safetensors
from safeload.trust.keys import SecretKey
from tests.oms_sample import bundle, resource, statement

KEY = SecretKey.generate("ed25519")
ONE, TWO, THREE = (ComparedTensor("float32", (2,), digit * 64) for digit in "123")


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    return first, second


def safetensors(directory: Path, **arrays: Any) -> None:
    with (directory / "model.safetensors").open("wb") as file:
        write_safetensors(file, arrays)


def test_equal_values_are_the_same_in_any_format_and_order(sides: tuple[Path, Path]) -> None:
    first, second = sides
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(first / "w.npy", np.asfortranarray(array))
    np.save(first / "b.npy", array[0].astype(">f4"))
    safetensors(second, w=array, b=array[0])
    found = diff(first, second)
    assert found.is_equal
    assert found.same == ("b", "w")


def test_each_tensor_is_in_one_list(sides: tuple[Path, Path]) -> None:
    first, second = sides
    ones = np.ones(2, np.float32)
    safetensors(first, kept=ones, changed=ones * 2, old=ones * 3, gone=ones * 4)
    safetensors(second, kept=ones, changed=ones * 5, new=ones * 3, come=ones * 6)
    found = diff(first, second)
    assert not found.is_equal
    assert found.same == ("kept",)
    assert list(found.changed) == ["changed"]
    assert found.renamed == (("old", "new"),)
    assert list(found.missing) == ["gone"]
    assert list(found.added) == ["come"]


@pytest.mark.parametrize("other", [np.zeros(2, np.int32), np.zeros((1, 2), np.float32), -np.zeros(2, np.float32)])
def test_a_value_is_its_type_its_shape_and_its_bits(sides: tuple[Path, Path], other: np.ndarray) -> None:
    safetensors(sides[0], w=np.zeros(2, np.float32))
    safetensors(sides[1], w=other)
    assert list(diff(*sides).changed) == ["w"]


def test_a_manifest_is_compared_by_the_names_of_its_parameters(sides: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = sides
    with (first / "tensor00000_000").open("wb") as file:
        write_shard(file, np.ones(3, np.float32))
    manifest = tmp_path / "m.json"
    manifest.write_bytes(
        sign(first, keys=[KEY], model="m", revision="1", parameters={"tensor00000_000": "layer/scale"})
    )
    safetensors(second, **{"layer/scale": np.ones(3, np.float32)})
    assert diff(manifest, second, trust=KEY.public).is_equal
    assert diff(first, second).renamed == (("tensor00000_000", "layer/scale"),)
    with pytest.raises(SignatureError):
        diff(manifest, second, trust=SecretKey.generate("ed25519").public)
    with pytest.raises(ConfigError, match="only if a trusted key signed it"):
        diff(second, manifest)


def test_what_is_no_manifest_is_named(sides: tuple[Path, Path], tmp_path: Path) -> None:
    safetensors(sides[0], w=np.ones(1))
    evil = tmp_path / "evil.pkl"
    evil.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ManifestError) as caught:
        diff(sides[0], evil, trust=KEY.public)
    assert [(finding.code, finding.file) for finding in caught.value.findings] == [("bad-envelope", str(evil))]
    stranger = tmp_path / "stranger.json"
    stranger.write_bytes(sign(sides[0], keys=[SecretKey.generate("ed25519")], model="m", revision="1"))
    with pytest.raises(SignatureError) as unsigned:
        diff(sides[0], stranger, trust=KEY.public)
    assert {finding.file for finding in unsigned.value.findings} == {str(stranger)}


@pytest.mark.parametrize("trust", [None, KEY.public])
def test_a_bundle_is_called_one(sides: tuple[Path, Path], tmp_path: Path, trust: Any) -> None:
    safetensors(sides[0], w=np.ones(1))
    path = tmp_path / "model.sig"
    path.write_bytes(bundle(statement([resource("model.safetensors", b"x")]), KEY))
    with pytest.raises(ConfigError, match=r"model\.sig is a bundle, which lists no tensors"):
        diff(sides[0], path, trust=trust)


def test_what_a_policy_refuses_is_not_compared(sides: tuple[Path, Path]) -> None:
    safetensors(sides[0], w=np.ones(1))
    safetensors(sides[1], w=np.ones(1))
    (sides[1] / "evil.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(PolicyError) as caught:
        diff(*sides)
    assert caught.value.findings[0].code == "global-not-allowed"


def test_a_path_that_is_not_there_is_an_error_and_no_difference(sides: tuple[Path, Path]) -> None:
    safetensors(sides[0], w=np.ones(1))
    with pytest.raises(ConfigError):
        diff(sides[0], sides[1] / "none", trust=KEY.public)


def test_equal_values_under_several_names_are_paired_in_order_and_only_once() -> None:
    found = compare({"a": ONE, "b": ONE, "c": ONE}, {"x": ONE, "y": ONE})
    assert found.renamed == (("a", "x"), ("b", "y"))
    assert list(found.missing) == ["c"]
    assert not found.added


def test_a_name_that_stayed_is_never_a_new_name_of_another() -> None:
    found = compare({"a": ONE, "b": TWO}, {"a": TWO, "b": ONE})
    assert list(found.changed) == ["a", "b"]
    assert found.renamed == ()


def test_nothing_equals_nothing() -> None:
    assert compare({}, {}).is_equal
    assert not compare({"a": ONE}, {}).is_equal
    assert not compare({}, {"a": ONE}).is_equal
    assert not compare({"a": ONE}, {"b": ONE}).is_equal


def test_it_is_plain_data_for_machines() -> None:
    found = compare({"a": ONE, "b": TWO, "c": THREE}, {"a": TWO, "d": THREE, "e": TWO})
    assert isinstance(found, Difference)
    told = json.loads(json.dumps(found.to_json()))
    assert told == {
        "equal": False,
        "same": [],
        "changed": {
            "a": [
                {"dtype": "float32", "shape": [2], "sha256": "1" * 64},
                {"dtype": "float32", "shape": [2], "sha256": "2" * 64},
            ]
        },
        "renamed": [["b", "e"], ["c", "d"]],
        "missing": {},
        "added": {},
    }
