"""GPT-2 from three kinds of checkpoint is one tree, bit for bit, and computes what the published code computes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safeload import load, sign
from safeload.decoding import Array
from safeload.errors import ConfigError, DigestMismatchError, PolicyError
from safeload.fingerprinting import Fingerprint, check_fingerprint, fingerprint
from safeload.gpt2 import CONFIGS, GPT2Config, remap_gpt2, target
from safeload.loading import load_host
from safeload.saving import save
from safeload.trust.keys import SecretKey
from tests import gpt2_sample as sample
from tests.gpt2_sample import CONFIG, TOKENS, Arrays

KEY = SecretKey.generate("ed25519")
EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt2.py"


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from leaves(child, f"{path}/{key}".lstrip("/"))
    else:
        yield path, tree


def assert_same_bits(one: Any, other: Any) -> None:
    left, right = dict(leaves(one)), dict(leaves(other))
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        assert array.shape == right[name].shape, name
        assert array.tobytes() == right[name].tobytes(), name


def loaded(directory: Path) -> Any:
    envelope = sign(directory, keys=[KEY], model="gpt2", revision="r1")
    return load(directory, manifest=envelope, trust=KEY.public)


def from_tensorflow(directory: Path) -> Any:
    sample.write_tensorflow(directory, sample.published())
    return remap_gpt2(loaded(directory), CONFIG, source="tensorflow")


def from_safetensors(directory: Path) -> Any:
    sample.write_safe(directory, sample.huggingface(sample.published()))
    return remap_gpt2(loaded(directory), CONFIG, source="huggingface")


def from_safetensors_without_prefix(directory: Path) -> Any:
    arrays = sample.huggingface(sample.published(), prefix="")
    sample.write_safe(directory, arrays | sample.buffers(prefix="", dtype=np.float32))
    return remap_gpt2(loaded(directory), CONFIG, source="huggingface")


def from_torch(directory: Path) -> Any:
    arrays = sample.huggingface(sample.published()) | sample.buffers()
    sample.write_torch(directory, arrays, head="lm_head.weight")
    return remap_gpt2(loaded(directory), CONFIG, source="huggingface")


def from_conversion(directory: Path) -> Any:
    """What `save` wrote of a mapped tree, head and masks included."""
    first = directory / "tensorflow"
    first.mkdir()
    manifest = save(
        from_tensorflow(first), directory / "converted", layout="safetensors", keys=[KEY], model="gpt2", revision="r1"
    )
    again = load(directory / "converted", manifest=manifest, trust=KEY.public)
    return remap_gpt2(again, CONFIG, source="nested")


@pytest.fixture(scope="module")
def reference() -> Any:
    return remap_gpt2({"model.ckpt": sample.published()}, CONFIG, source="tensorflow")


@pytest.mark.parametrize(
    "make", [from_tensorflow, from_safetensors, from_safetensors_without_prefix, from_torch, from_conversion]
)
def test_each_input_gives_the_same_tree_bit_for_bit(make: Any, reference: Any, tmp_path: Path) -> None:
    assert_same_bits(make(tmp_path), reference)


def test_the_tree_computes_what_the_published_code_computes(reference: Any) -> None:
    np.testing.assert_allclose(
        sample.logits(reference, TOKENS), sample.published_logits(sample.published(), TOKENS), rtol=1e-9, atol=1e-9
    )


def test_a_weight_is_out_by_in_and_a_part_of_the_one_that_was_split(reference: Any) -> None:
    arrays = sample.published()
    joined = arrays["model/h1/attn/c_attn/w"][0]
    width = CONFIG.n_embd
    for part, name in enumerate(("query", "key", "value")):
        found = reference["blocks"]["1"]["attention"][name]
        np.testing.assert_array_equal(found["weight"], joined[:, part * width : (part + 1) * width].T)
        np.testing.assert_array_equal(
            found["bias"], arrays["model/h1/attn/c_attn/b"][part * width : (part + 1) * width]
        )
    expand = reference["blocks"]["0"]["feed_forward"]["expand"]["weight"]
    np.testing.assert_array_equal(expand, arrays["model/h0/mlp/c_fc/w"][0].T)


def test_the_head_is_the_token_embedding_itself(reference: Any) -> None:
    assert reference["output_head"]["weight"] is reference["token_embedding"]


def test_nothing_but_the_masks_is_copied(tmp_path: Path) -> None:
    sample.write_safe(tmp_path, sample.huggingface(sample.published()))
    held = loaded(tmp_path)
    source = held["model.safetensors"]["transformer.h.0.attn.c_attn.weight"]
    tree = remap_gpt2(held, CONFIG, source="huggingface")
    assert np.shares_memory(tree["blocks"]["0"]["attention"]["key"]["weight"], source)
    masks = [tree["blocks"][str(number)]["attention"]["mask"] for number in range(CONFIG.n_layer)]
    assert masks[0] is masks[1]
    assert not any(array.flags.writeable for _, array in leaves(tree))


def test_a_model_that_is_not_tied_is_refused(tmp_path: Path) -> None:
    arrays = sample.huggingface(sample.published())
    arrays["lm_head.weight"] = arrays["transformer.wte.weight"] + np.float32(1)
    sample.write_safe(tmp_path, arrays)
    with pytest.raises(PolicyError) as caught:
        remap_gpt2(loaded(tmp_path), CONFIG, source="huggingface")
    assert [finding.code for finding in caught.value.findings] == ["tie-differs"]


# ---------------------------------------------------------------- buffers


def test_one_wrong_mask_changes_the_logits_and_is_refused(reference: Any) -> None:
    arrays = sample.huggingface(sample.published()) | sample.buffers()
    wrong = arrays["transformer.h.1.attn.bias"].copy()
    wrong[0, 0, 2, 5] = 1  # one token sees one that comes after it
    # Whoever takes the mask from the file computes something else, with every parameter right:
    blocks = reference["blocks"]
    attention = {**blocks["1"]["attention"], "mask": wrong[0, 0]}
    broken = {**reference, "blocks": {**blocks, "1": {**blocks["1"], "attention": attention}}}
    right = sample.logits(reference, TOKENS)
    assert np.abs(sample.logits(broken, TOKENS) - right).max() > 1e-3
    # We refuse it, and name it.
    arrays["transformer.h.1.attn.bias"] = wrong
    with pytest.raises(PolicyError) as caught:
        remap_gpt2({"pytorch_model.bin": arrays}, CONFIG, source="huggingface")
    (finding,) = caught.value.findings
    assert finding.code == "buffer-differs"
    assert "blocks/1/attention/mask" in finding.message
    assert finding.file == "pytorch_model.bin"


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.float32])
def test_a_right_mask_of_the_file_is_accepted_in_any_dtype(dtype: Any, reference: Any) -> None:
    arrays = sample.huggingface(sample.published()) | sample.buffers(dtype=dtype)
    assert_same_bits(remap_gpt2({"f": arrays}, CONFIG, source="huggingface"), reference)


def test_a_mask_of_another_length_is_refused() -> None:
    longer = GPT2Config(n_layer=2, n_head=4, n_embd=32, n_vocab=101, n_ctx=17)
    arrays = sample.huggingface(sample.published()) | sample.buffers(longer)
    with pytest.raises(PolicyError) as caught:
        remap_gpt2({"f": arrays}, CONFIG, source="huggingface")
    assert {finding.code for finding in caught.value.findings} == {"shape-mismatch"}


def test_code_that_makes_its_masks_itself_gets_none_and_they_are_compared_all_the_same() -> None:
    arrays = sample.huggingface(sample.published()) | sample.buffers()
    tree = remap_gpt2({"f": arrays}, CONFIG, source="huggingface", mask_dtype=None)
    assert "mask" not in tree["blocks"]["0"]["attention"]
    arrays["transformer.h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.uint8)
    with pytest.raises(PolicyError) as caught:
        remap_gpt2({"f": arrays}, CONFIG, source="huggingface", mask_dtype=None)
    assert [finding.code for finding in caught.value.findings] == ["buffer-differs"]


# ---------------------------------------------------------------- what is not a GPT-2 of this size


def test_everything_that_is_wrong_is_told_at_once() -> None:
    arrays: Arrays = sample.published()
    del arrays["model/h0/ln_1/g"]
    arrays["model/h1/ln_2/gain"] = arrays.pop("model/h1/ln_2/g")
    arrays["model/wpe"] = arrays["model/wpe"][:8]
    arrays["model/ln_f/b"] = arrays["model/ln_f/b"].astype(np.float64)
    with pytest.raises(PolicyError) as caught:
        remap_gpt2({"f": arrays}, CONFIG, source="tensorflow")
    codes = [finding.code for finding in caught.value.findings]
    assert sorted(codes) == [
        "dtype-mismatch",
        "missing-tensor",
        "missing-tensor",
        "shape-mismatch",
        "unexpected-tensor",
    ]


def test_another_size_is_refused() -> None:
    with pytest.raises(PolicyError):
        remap_gpt2({"f": sample.published()}, CONFIGS["124M"], source="tensorflow")


def test_a_source_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensorflow or huggingface or nested"):
        remap_gpt2({}, CONFIG, source="keras")  # type: ignore[arg-type] # that is the claim


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("size", CONFIGS)
def test_a_published_size_demands_as_many_numbers_as_it_is_named_after(size: str) -> None:
    config = CONFIGS[size]
    demanded = dict(leaves(target(config, mask_dtype=None)))
    del demanded["output_head/weight"]  # tied
    assert sum(int(np.prod(demand.shape)) for demand in demanded.values()) == config.n_parameters
    assert f"{round(config.n_parameters / 1e6)}M" == size


@pytest.mark.parametrize("size", CONFIGS)
def test_every_published_size_is_mapped_from_its_shapes(size: str) -> None:
    # Of one element each, so that no memory is needed: what is mapped are views.
    config = CONFIGS[size]
    one = GPT2Config(config.n_layer, 1, 1, 1, 1)
    arrays = {
        name: np.broadcast_to(np.float32(0), _full_shape(array.shape, name, config))
        for name, array in sample.published(one).items()
    }
    tree = remap_gpt2({"model.ckpt": arrays}, config, source="tensorflow")
    assert len(tree["blocks"]) == config.n_layer


def _full_shape(shape: tuple[int, ...], name: str, config: GPT2Config) -> tuple[int, ...]:
    if name == "model/wte":
        return config.n_vocab, config.n_embd
    if name == "model/wpe":
        return config.n_ctx, config.n_embd
    return tuple(n if n == 1 and axis == 0 and len(shape) == 3 else n * config.n_embd for axis, n in enumerate(shape))


def test_the_configuration_of_either_origin_is_read() -> None:
    small = GPT2Config(n_layer=2, n_head=4, n_embd=32, n_vocab=101, n_ctx=16)
    openai = {"n_vocab": 101, "n_ctx": 16, "n_embd": 32, "n_head": 4, "n_layer": 2}
    transformers = {
        "vocab_size": 101,
        "n_ctx": 16,
        "n_positions": 16,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "layer_norm_epsilon": 1e-05,
    }
    assert GPT2Config.parse(json.dumps(openai).encode()) == small
    assert GPT2Config.parse(json.dumps(transformers).encode()) == small


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '"n_layer n_head n_embd n_vocab n_ctx"',
        "{}",
        '{"n_layer": NaN}',
        '{"n_layer": 2, "n_head": 4, "n_embd": 32, "n_vocab": 101, "n_ctx": 16, "n_positions": 17}',
        '{"n_layer": true, "n_head": 4, "n_embd": 32, "n_vocab": 101, "n_ctx": 16}',
        '{"n_layer": 2, "n_head": 5, "n_embd": 32, "n_vocab": 101, "n_ctx": 16}',
        '{"n_layer": 2, "n_head": 4, "n_embd": 32, "n_vocab": 101, "n_ctx": 99999999999}',
        "[" * 100_000,
    ],
)
def test_a_configuration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        GPT2Config.parse(text.encode())


def test_a_configuration_of_a_megabyte_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most"):
        GPT2Config.parse(b" " * (1024 * 1024 + 1))


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype"):
        target(CONFIG, dtype="float31")


# ---------------------------------------------------------------- what no shape can tell


def test_a_swap_of_query_and_key_has_the_right_shapes_and_other_values(reference: Any) -> None:
    expected = fingerprint(reference)
    arrays = sample.published()
    width = CONFIG.n_embd
    for part in ("w", "b"):
        joined = arrays[f"model/h0/attn/c_attn/{part}"]
        query, key, value = np.split(joined, 3, axis=-1)
        arrays[f"model/h0/attn/c_attn/{part}"] = np.concatenate([key, query, value], axis=-1)
    swapped = remap_gpt2({"f": arrays}, CONFIG, source="tensorflow")
    assert swapped["blocks"]["0"]["attention"]["query"]["weight"].shape == (width, width)
    with pytest.raises(DigestMismatchError) as caught:
        check_fingerprint(swapped, expected)
    hints = [finding.hint or "" for finding in caught.value.findings]
    assert len(hints) == 4
    assert all("swapped" in hint for hint in hints)


def test_the_manifest_of_a_conversion_is_the_fingerprint_of_the_tree(reference: Any, tmp_path: Path) -> None:
    manifest = save(reference, tmp_path / "c", layout="safetensors", keys=[KEY], model="gpt2", revision="r1")
    trusted, held = load_host(tmp_path / "c", manifest=manifest, trust=KEY.public)
    tree = remap_gpt2(held, CONFIG, source="nested")
    expected = Fingerprint.of_manifest(trusted)
    assert "output_head/weight" in expected.tensors
    assert check_fingerprint(tree, expected).n_tensors == len(dict(leaves(tree)))


# ---------------------------------------------------------------- the example


def example(*arguments: str) -> str:
    command = [sys.executable, str(EXAMPLE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_maps_three_sources_to_one_fingerprint() -> None:
    *rows, last = example().splitlines()
    assert [row.split()[0] for row in rows] == ["tensorflow", "huggingface", "nested"]
    assert len({row.split()[-1] for row in rows}) == 1
    assert last == "all three are equal, and so is what they compute"


def test_the_example_maps_a_signed_checkpoint_of_a_published_size(tmp_path: Path) -> None:
    # Another size is refused, which is as far as a test can go without half a gigabyte of weights.
    (tmp_path / "gpt2").mkdir()
    sample.write_safe(tmp_path / "gpt2", sample.huggingface(sample.published()))
    (tmp_path / "gpt2.json").write_bytes(sign(tmp_path / "gpt2", keys=[KEY], model="gpt2", revision="r1"))
    (tmp_path / "key.pub").write_bytes(KEY.public.to_pem())
    command = [sys.executable, str(EXAMPLE), *(str(tmp_path / name) for name in ("gpt2", "gpt2.json", "key.pub"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "PolicyError" in done.stderr
