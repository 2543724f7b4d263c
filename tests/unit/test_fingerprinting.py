"""A fingerprint tells what no shape can: swapped, transposed and changed values, and another forward pass."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from safeload import cli, sign
from safeload.errors import ConfigError, DigestMismatchError, Finding
from safeload.fingerprinting import (
    MAX_OUTPUT_BYTES,
    Compared,
    Fingerprint,
    check_fingerprint,
    fingerprint,
    value_of,
)
from safeload.formats.safetensors_writing import write_safetensors
from safeload.gpt2 import remap_gpt2
from safeload.loading import load_host
from safeload.manifest import Manifest
from safeload.mapping_rules import shipped_mappings
from safeload.records import QuantizedWeight8bit
from safeload.trust.keys import SecretKey
from tests import gpt2_sample as sample

KEY = SecretKey.generate("ed25519")
INPUT = np.array([1.0, 2.0, 3.0], np.float32)


def tree() -> dict[str, Any]:
    square = np.arange(9, dtype=np.float32).reshape(3, 3)
    return {"a": {"query": square, "key": square + 1}, "b": np.float32(2.0)}


def forward(values: Any, x: Any) -> Any:
    return x @ values["a"]["query"].T + values["b"] * (x @ values["a"]["key"].T)


def differences(found: Any, expected: Fingerprint, **more: Any) -> tuple[Finding, ...]:
    with pytest.raises(DigestMismatchError) as caught:
        check_fingerprint(found, expected, **more)
    return caught.value.findings


def test_a_value_is_its_dtype_its_shape_and_the_digest_of_its_canonical_bytes() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    value = value_of(array)
    assert (value.dtype, value.shape) == ("float32", (2, 3))
    assert value.sha256 == hashlib.sha256(array.tobytes()).hexdigest()
    assert value_of(np.asfortranarray(array)) == value
    assert value_of(array.astype(">f4")) == value
    assert value_of(jnp.asarray(array)) == value
    assert value_of(array.T) != value
    assert value_of(np.zeros(2, ml_dtypes.bfloat16)).dtype == "bfloat16"


def test_equal_trees_compare_equal_in_any_layout() -> None:
    expected = fingerprint(tree())
    other = {"b": np.float32(2.0), "a": {name: np.asfortranarray(x) for name, x in tree()["a"].items()}}
    assert check_fingerprint(other, expected) == Compared(3, "not compared", 0.0)


def test_two_values_that_were_swapped_are_told_as_that() -> None:
    swapped = tree()
    swapped["a"] = {"query": swapped["a"]["key"], "key": swapped["a"]["query"]}
    told = differences(swapped, fingerprint(tree()))
    assert [(f.code, f.hint) for f in told] == [
        ("value-mismatch", "it is the value of a/key: were the two swapped?"),
        ("value-mismatch", "it is the value of a/query: were the two swapped?"),
    ]


def test_a_missed_transpose_of_a_square_is_told_as_that() -> None:
    turned = tree()
    turned["a"]["key"] = turned["a"]["key"].T
    (finding,) = differences(turned, fingerprint(tree()))
    assert "a/key" in finding.message
    assert "transpose" in (finding.hint or "")


def test_every_difference_is_told_at_once() -> None:
    other = tree()
    del other["b"]
    other["c"] = np.zeros(1)
    other["a"]["key"] = other["a"]["key"].astype(np.float64)
    other["a"]["query"] = other["a"]["query"] * np.float32(1.0000001)
    told = differences(other, fingerprint(tree()))
    assert sorted(f.code for f in told) == ["value-mismatch", "value-mismatch", "value-missing", "value-unexpected"]


def test_a_sign_of_zero_is_a_difference() -> None:
    (finding,) = differences({"w": np.array([-0.0])}, fingerprint({"w": np.array([0.0])}))
    assert finding.code == "value-mismatch"


def test_records_and_lists_are_named_by_field_and_index() -> None:
    made: Any = QuantizedWeight8bit
    value = made(weight=np.ones((2, 2), np.int8), scales=np.ones((1, 2), np.float32))
    assert list(fingerprint({"w": value, "l": [np.ones(1), None]}).tensors) == ["w/weight", "w/scales", "l/0"]


def test_host_tensors_have_the_values_that_the_manifest_lists(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        write_safetensors(file, {"x": np.arange(3.0), "y": np.ones((2, 2), np.float16)})
    envelope = sign(tmp_path, keys=[KEY], model="m", revision="r")
    trusted, held = load_host(tmp_path, manifest=envelope, trust=KEY.public)
    expected = Fingerprint.of_manifest(trusted)
    assert check_fingerprint(held["model.safetensors"], expected).n_tensors == 2
    other = {"x": np.arange(3.0), "y": np.zeros((2, 2), np.float16)}
    assert [f.code for f in differences(other, expected)] == ["value-mismatch"]


def test_a_manifest_without_tensors_is_no_fingerprint() -> None:
    empty = Manifest.model_construct(files=())  # type: ignore[call-arg] # it looks at nothing else
    with pytest.raises(ConfigError, match="lists tensors"):
        Fingerprint.of_manifest(empty)


# ---------------------------------------------------------------- forward pass


def test_the_same_forward_pass_is_equal() -> None:
    expected = fingerprint(tree(), forward=forward, inputs=INPUT)
    assert check_fingerprint(tree(), expected, forward=forward, inputs=INPUT) == Compared(3, "equal", 0.0)
    # Without the model it is not compared, and that is said.
    assert check_fingerprint(tree(), expected).forward == "not compared"


def test_other_code_on_the_right_values_is_told() -> None:
    expected = fingerprint(tree(), forward=forward, inputs=INPUT)

    def other(values: Any, x: Any) -> Any:
        return x @ values["a"]["query"] + values["b"] * (x @ values["a"]["key"].T)

    (finding,) = differences(tree(), expected, forward=other, inputs=INPUT)
    assert finding.code == "output-mismatch"


def test_a_tolerance_is_for_outputs_and_not_for_values() -> None:
    expected = fingerprint(tree(), forward=forward, inputs=INPUT)

    def rounded(values: Any, x: Any) -> Any:
        return forward(values, x) + np.float32(0.25)

    found = check_fingerprint(tree(), expected, forward=rounded, inputs=INPUT, tolerance=0.3)
    assert found == Compared(3, "close", 0.25)
    assert [f.code for f in differences(tree(), expected, forward=rounded, inputs=INPUT, tolerance=0.2)] == [
        "output-mismatch"
    ]
    assert [f.code for f in differences(tree(), expected, forward=rounded, inputs=INPUT)] == ["output-mismatch"]
    other = tree()
    other["b"] = np.float32(2.0001)
    told = differences(other, expected, forward=forward, inputs=INPUT, tolerance=1e9)
    assert [f.code for f in told] == ["value-mismatch"]


@pytest.mark.parametrize("wrong", [np.full(3, np.nan, np.float32), np.zeros((3, 1), np.float32), np.full(3, np.inf)])
def test_no_tolerance_covers_what_is_no_number_or_has_another_shape(wrong: Any) -> None:
    expected = fingerprint(tree(), forward=forward, inputs=INPUT)
    told = differences(tree(), expected, forward=lambda _tree, _x: wrong, inputs=INPUT, tolerance=1e30)
    assert [f.code for f in told] == ["output-mismatch"]


def test_another_input_is_no_comparison() -> None:
    expected = fingerprint(tree(), forward=forward, inputs=INPUT)
    with pytest.raises(ConfigError, match="inputs"):
        check_fingerprint(tree(), expected, forward=forward, inputs=INPUT + 1)


def test_a_model_that_raises_is_a_wrong_argument() -> None:
    def broken(_tree: Any, _x: Any) -> Any:
        raise KeyError("weights")

    with pytest.raises(ConfigError, match="KeyError"):
        fingerprint(tree(), forward=broken, inputs=INPUT)
    with pytest.raises(ConfigError, match="at most"):
        fingerprint(tree(), forward=lambda _tree, _x: np.zeros(MAX_OUTPUT_BYTES + 1, np.int8), inputs=INPUT)
    with pytest.raises(ConfigError, match="dtype"):
        fingerprint(tree(), forward=lambda _tree, _x: None, inputs=INPUT)


def test_gpt_2_is_held_by_its_values_and_by_what_it_computes() -> None:
    made = remap_gpt2({"f": sample.published()}, sample.CONFIG, source="tensorflow")
    expected = fingerprint(made, forward=sample.logits, inputs=sample.TOKENS)
    found = check_fingerprint(made, expected, forward=sample.logits, inputs=sample.TOKENS)
    assert found.forward == "equal"
    output = made["blocks"]["1"]["attention"]["output"]
    output["weight"] = output["weight"].T  # square: no shape tells
    told = differences(made, expected, forward=sample.logits, inputs=sample.TOKENS, tolerance=1e-6)
    assert [f.code for f in told] == ["value-mismatch", "output-mismatch"]


# ---------------------------------------------------------------- trees that are none


@pytest.mark.parametrize(
    "wrong", [{}, None, {"a": 1}, {"a": "text"}, {"a": np.array(["text"])}, {1: np.ones(1), "1": np.ones(1)}]
)
def test_what_is_no_tree_of_arrays_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        fingerprint(wrong)


def test_a_tree_that_holds_itself_and_a_deleted_array_are_refused() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(ConfigError, match="levels"):
        fingerprint(endless)
    deep: Any = np.ones(1)
    for _ in range(64):
        deep = {"a": deep}
    assert len(fingerprint(deep).tensors) == 1
    with pytest.raises(ConfigError, match="levels"):
        fingerprint({"a": deep})
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(ConfigError, match="copied"):
        fingerprint({"w": gone})


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize("name", ["n" * 4097, "\udcff"])
def test_a_name_that_no_file_could_hold_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected names of text of at most 4096 characters"):
        fingerprint({name: np.ones(2)})


def test_a_model_that_writes_to_its_weights_is_fingerprinted_before_it_does() -> None:
    def doubles(values: Any, _: Any) -> Any:
        values["w"] *= 2
        return values["w"]

    made = fingerprint({"w": np.ones(2)}, forward=doubles, inputs=np.ones(1))
    assert made.tensors == fingerprint({"w": np.ones(2)}).tensors


def test_a_file_says_the_same_again_and_has_one_digest() -> None:
    made = fingerprint(tree(), forward=forward, inputs=INPUT)
    data = made.to_json()
    assert Fingerprint.parse(data) == made
    assert Fingerprint.parse(data).to_json() == data
    assert made.sha256 == hashlib.sha256(data).hexdigest()
    assert data.isascii()
    reordered = dict(reversed(tree().items()))
    assert fingerprint(reordered, forward=forward, inputs=INPUT).to_json() == data


def edited(**changes: Any) -> bytes:
    """A file with some of its forward pass, or of the whole, replaced."""
    table = json.loads(fingerprint(tree(), forward=forward, inputs=INPUT).to_json())
    for key, value in changes.items():
        place = table
        *above, last = key.split("__")
        for name in above:
            place = place[name]
        place[last] = value
    return json.dumps(table).encode()


def test_an_edit_that_changes_nothing_is_read() -> None:
    assert Fingerprint.parse(edited(fingerprint=1)).fingerprint == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        edited(fingerprint=2),
        edited(fingerprint=True),
        edited(more=1),
        edited(tensors={}),
        edited(tensors__b={"dtype": "float32", "shape": [], "sha256": "0" * 63}),
        edited(tensors__b={"dtype": "object", "shape": [], "sha256": "0" * 64}),
        edited(tensors__b={"dtype": "float32", "shape": [-1], "sha256": "0" * 64}),
        edited(forward__numbers="!"),
        edited(forward__numbers=base64.b64encode(b"other").decode()),
        # A length that is claimed: the digest is right, and the shape has more than there is.
        edited(forward__output__shape=[1 << 40]),
        edited(forward__output__sha256="0" * 64),
        edited()[:-1],
        edited().replace(b'"tensors": {', b'"tensors": {"b": 1.5, ', 1),
        edited().replace(b'"fingerprint": 1', b'"fingerprint": 1, "fingerprint": 1', 1),
        b'{"a":' * 50 + b"1" + b"}" * 50,
    ],
)
def test_a_file_that_is_no_fingerprint_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        Fingerprint.parse(data)


def test_a_file_that_cannot_be_read_is_a_wrong_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        Fingerprint.read(tmp_path / "nowhere.json")


# ---------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A signed GPT-2 in a folder where the command is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    sample.write_safe(tmp_path / "gpt2", sample.huggingface(sample.published()))
    assert cli.main(["keygen", "-o", "key", "--no-passphrase"]) == 0
    assert cli.main(["sign", "gpt2", "-o", "gpt2.json", "--key", "key"]) == 0
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["fingerprint", "gpt2", "-m", "gpt2.json", "--trust", "key.pub", *more])
    return code, *capsys.readouterr()


def test_the_command_writes_and_compares(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--map", "gpt2-huggingface", "-o", "gpt2.fp")
    assert (code, out.splitlines()) == (0, ["wrote     gpt2.fp", "37 tensors written down", "accepted"])
    made = Fingerprint.read(folder / "gpt2.fp")
    assert "blocks/1/attention/query/weight" in made.tensors
    code, out, _ = run(capsys, "--map", "gpt2-huggingface", "--against", "gpt2.fp")
    assert (code, out.splitlines()) == (0, ["37 tensors compared, all equal", "accepted"])
    code, out, _ = run(capsys, "--map", "gpt2-huggingface", "--against", "gpt2.fp", "--json")
    told = json.loads(out)
    assert (code, told["verdict"], told["fingerprint"]["sha256"]) == (0, "accepted", made.sha256)
    assert told["fingerprint"]["ties"] == {"output_head/weight": "token_embedding"}


def test_the_command_refuses_other_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--map", "gpt2-huggingface", "-o", "gpt2.fp")[0] == 0
    # Rules that take the key for the query, and the query for the key: every shape is right.
    text = dict(shipped_mappings())["gpt2-huggingface"].read_text()
    swapped = text.replace("query/\\2', 'blocks/\\1/attention/key", "key/\\2', 'blocks/\\1/attention/query")
    assert swapped != text
    (folder / "mine.toml").write_text(swapped)
    code, out, err = run(capsys, "--map", "mine.toml", "--against", "gpt2.fp")
    assert code == 1
    assert out.splitlines()[-1].startswith("rejected")
    assert "were the two swapped?" in err
    # Nothing that exists is written over.
    assert run(capsys, "-o", "gpt2.fp")[0] == 2


def test_the_command_says_what_it_did_not_compare(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {"transformer." + name: value for name, value in sample.huggingface(sample.published(), prefix="").items()}
    made = fingerprint(plain, forward=lambda _tree, x: x, inputs=INPUT)
    (folder / "fp").write_bytes(made.to_json())
    code, out, _ = run(capsys, "--against", "fp")
    assert code == 0
    assert "forward pass was not compared" in out


@pytest.mark.parametrize("more", [(), ("-o", "x", "--against", "y"), ("--map", "nothing", "-o", "x")])
def test_the_command_needs_to_know_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    assert run(capsys, *more)[0] == 2
    assert not (folder / "x").exists()


def test_rules_that_know_none_of_the_names_write_nothing_down(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--map", "gpt2-tensorflow", "-o", "gpt2.fp")
    assert (code, out.splitlines()[-1]) == (1, "rejected: rules-do-not-fit")
    assert "found none in" in err
    assert not (folder / "gpt2.fp").exists()
