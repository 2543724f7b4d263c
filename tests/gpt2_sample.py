"""A small GPT-2: the same values in each container that it comes in, and what the model computes, twice over.

`published_logits` is written after OpenAI's `model.py`, on the arrays as its checkpoint has them; `logits` is written
for the nested dict of `safeload.gpt2.target`. That the two agree is what a mapping is for.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from safeload.formats.safetensors_writing import write_safetensors
from safeload.gpt2 import GPT2Config
from tests import tensorflow_sample as tf
from tests.torch_sample import Storage, Torch, torch_zip

CONFIG = GPT2Config(n_layer=2, n_head=4, n_embd=32, n_vocab=101, n_ctx=16)
TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int64)
Arrays = dict[str, np.ndarray[Any, Any]]


def published(config: GPT2Config = CONFIG, seed: int = 0) -> Arrays:
    """The arrays as OpenAI's checkpoint names and shapes them; no two parts of one are equal."""
    rng = np.random.default_rng(seed)
    width = config.n_embd

    def some(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(np.float32) * np.float32(0.2)

    arrays = {"model/wte": some(config.n_vocab, width), "model/wpe": some(config.n_ctx, width)}
    for layer in range(config.n_layer):
        at = f"model/h{layer}"
        for name, n_in, n_out in (
            ("attn/c_attn", width, 3 * width),
            ("attn/c_proj", width, width),
            ("mlp/c_fc", width, 4 * width),
            ("mlp/c_proj", 4 * width, width),
        ):
            arrays[f"{at}/{name}/w"] = some(1, n_in, n_out)
            arrays[f"{at}/{name}/b"] = some(n_out)
        for norm in ("ln_1", "ln_2"):
            arrays[f"{at}/{norm}/g"] = 1 + some(width)
            arrays[f"{at}/{norm}/b"] = some(width)
    return {**arrays, "model/ln_f/g": 1 + some(width), "model/ln_f/b": some(width)}


def huggingface(arrays: Arrays, *, prefix: str = "transformer.") -> Arrays:
    """The same under the names of transformers, whose `Conv1D` has a kernel of two dimensions."""
    ends = {"w": "weight", "b": "bias", "g": "weight"}
    renamed = {}
    for name, array in arrays.items():
        parts = name.split("/")[1:]
        if len(parts) == 1:
            renamed[f"{prefix}{parts[0]}.weight"] = array
            continue
        if parts[0].startswith("h"):
            parts = ["h", parts[0][1:], *parts[1:]]
        value = array[0] if parts[-1] == "w" else array
        renamed[prefix + ".".join([*parts[:-1], ends[parts[-1]]])] = np.ascontiguousarray(value)
    return renamed


def buffers(config: GPT2Config = CONFIG, *, prefix: str = "transformer.", dtype: Any = np.uint8) -> Arrays:
    """The buffers that older versions of transformers wrote into their files."""
    mask = np.tri(config.n_ctx, dtype=dtype)[None, None]
    made = {}
    for layer in range(config.n_layer):
        made[f"{prefix}h.{layer}.attn.bias"] = mask
        made[f"{prefix}h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    return made


def write_tensorflow(directory: Path, arrays: Arrays) -> None:
    tensors = {name: tf.Tensor(tf.FLOAT, array.shape, array.tobytes()) for name, array in arrays.items()}
    for name, data in tf.bundle("model.ckpt", tensors).items():
        (directory / name).write_bytes(data)


def write_safe(directory: Path, arrays: Arrays) -> None:
    made = io.BytesIO()
    write_safetensors(made, arrays)
    (directory / "model.safetensors").write_bytes(made.getvalue())


def write_torch(directory: Path, arrays: Arrays, *, head: str | None = None) -> None:
    """A state dict; with `head`, a second name for the token embedding's storage, as `torch.save` writes a tied one."""
    kinds = {"float32": "FloatStorage", "uint8": "ByteStorage", "bool": "BoolStorage"}
    torch = Torch()
    storages: list[Storage] = []
    items: dict[str, bytes] = {}
    for name, array in arrays.items():
        storage = Storage(str(len(storages)), kinds[array.dtype.name], array.tobytes())
        storages.append(storage)
        items[name] = torch.tensor(storage, array.shape)
        if head is not None and name.endswith("wte.weight"):
            items[head] = torch.tensor(storage, array.shape)
    (directory / "pytorch_model.bin").write_bytes(torch_zip(torch.pickle(torch.state_dict(items)), storages))


# ---------------------------------------------------------------- what it computes


def _norm(x: Any, scale: Any, shift: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * scale + shift


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _attention(query: Any, key: Any, value: Any, mask: Any, n_head: int) -> Any:
    n, width = query.shape
    q, k, v = (x.reshape(n, n_head, width // n_head).swapaxes(0, 1) for x in (query, key, value))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(width // n_head)
    scores = np.where(mask[:n, :n], scores, -1e10)
    return (_softmax(scores) @ v).swapaxes(0, 1).reshape(n, width)


def logits(tree: Mapping[str, Any], tokens: Any, *, n_head: int = CONFIG.n_head) -> Any:
    """Logits [tokens, vocabulary] of the nested dict, in float64."""

    def columns(weight: Any) -> Any:
        # In one order whatever the file's was: a view that lies otherwise in memory is summed otherwise.
        return np.ascontiguousarray(weight.T, dtype=np.float64)

    def layer(x: Any, at: Mapping[str, Any]) -> Any:
        return x @ columns(at["weight"]) + at["bias"]

    x = tree["token_embedding"][tokens].astype(np.float64) + tree["position_embedding"][: len(tokens)]
    for number in range(len(tree["blocks"])):
        block = tree["blocks"][str(number)]
        attention = block["attention"]
        h = _norm(x, block["norm_1"]["scale"], block["norm_1"]["shift"])
        query, key, value = (layer(h, attention[name]) for name in ("query", "key", "value"))
        x = x + layer(_attention(query, key, value, attention["mask"].astype(bool), n_head), attention["output"])
        h = _norm(x, block["norm_2"]["scale"], block["norm_2"]["shift"])
        forward = block["feed_forward"]
        x = x + layer(_gelu(layer(h, forward["expand"])), forward["contract"])
    x = _norm(x, tree["final_norm"]["scale"], tree["final_norm"]["shift"])
    return x @ columns(tree["output_head"]["weight"])


def published_logits(arrays: Arrays, tokens: Any, config: GPT2Config = CONFIG) -> Any:
    """The same after OpenAI's code: x @ w, and one layer that is split into query, key and value."""
    n = len(tokens)

    def conv1d(x: Any, name: str) -> Any:
        return x @ arrays[f"{name}/w"][0].astype(np.float64) + arrays[f"{name}/b"]

    x = arrays["model/wte"][tokens].astype(np.float64) + arrays["model/wpe"][:n]
    mask = np.arange(n)[:, None] >= np.arange(n)
    for number in range(config.n_layer):
        at = f"model/h{number}"
        h = _norm(x, arrays[f"{at}/ln_1/g"], arrays[f"{at}/ln_1/b"])
        query, key, value = np.split(conv1d(h, f"{at}/attn/c_attn"), 3, axis=1)
        x = x + conv1d(_attention(query, key, value, mask, config.n_head), f"{at}/attn/c_proj")
        h = _norm(x, arrays[f"{at}/ln_2/g"], arrays[f"{at}/ln_2/b"])
        x = x + conv1d(_gelu(conv1d(h, f"{at}/mlp/c_fc")), f"{at}/mlp/c_proj")
    x = _norm(x, arrays["model/ln_f/g"], arrays["model/ln_f/b"])
    return x @ arrays["model/wte"].T.astype(np.float64)
