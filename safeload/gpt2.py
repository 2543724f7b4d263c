"""GPT-2 of any size, from three kinds of checkpoint to one nested dict: what it demands, and which rules go with what.

The names and layouts are those of code that teaches the model: a weight is [out, in] and computes x @ w.T, and query,
key and value are three layers. The causal mask of each block is demanded as well: it decides about every logit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from safeload.errors import ConfigError, escape
from safeload.remapping import remap
from safeload.tensors import DTYPE_ITEMSIZE, DType

Source: TypeAlias = Literal["tensorflow", "huggingface", "nested"]
"""What a checkpoint comes from: OpenAI's TensorFlow, the transformers library, or a conversion to `target`'s names."""

_SOURCES: Final = ("tensorflow", "huggingface", "nested")

_MAX_CONFIG_BYTES: Final = 1024 * 1024
"""A configuration is half a page; a longer file is a mistake."""

_MAX_LENGTH: Final = 1 << 24
"""Largest number in a configuration. GPT-2's are up to 50,257; a mask of the square of one is built in memory."""


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The size of a GPT-2.

    Attributes:
        n_layer: Blocks.
        n_head: Heads of each block's attention.
        n_embd: Width: elements of an embedding.
        n_vocab: Tokens.
        n_ctx: Positions.
    """

    n_layer: int
    n_head: int
    n_embd: int
    n_vocab: int = 50_257
    n_ctx: int = 1024

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: One is not positive, or the heads do not divide the width.
        """
        for name in self.__slots__:
            number = getattr(self, name)
            if type(number) is not int or not 0 < number <= _MAX_LENGTH:
                raise ConfigError(f"{name}: expected a number from 1 to {_MAX_LENGTH}, found {escape(repr(number))}")
        if self.n_embd % self.n_head:
            raise ConfigError(f"expected heads that divide the width {self.n_embd}, found {self.n_head}")

    @property
    def n_parameters(self) -> int:
        """How many numbers are learned; the tied head counts once."""
        width = self.n_embd
        block = 12 * width * width + 13 * width
        return (self.n_vocab + self.n_ctx) * width + self.n_layer * block + 2 * width

    @classmethod
    def parse(cls, data: bytes) -> GPT2Config:
        """Read a `config.json` of transformers or an `hparams.json` of OpenAI.

        Only the five numbers are taken; that they fit the tensors is what `target` holds the tensors to.

        Args:
            data: The file's bytes, verified: `load` them, or list them in the manifest.

        Raises:
            ConfigError: It is no JSON object, or lacks a number.
        """
        if len(data) > _MAX_CONFIG_BYTES:
            raise ConfigError(f"expected a configuration of at most {_MAX_CONFIG_BYTES} bytes, found {len(data)}")
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"expected a configuration as JSON: {escape(str(err))}") from err
        if not isinstance(found, dict):
            raise ConfigError("expected a configuration as a JSON object, found none")
        numbers = {}
        for name, keys in _KEYS.items():
            values = [found[key] for key in keys if key in found]
            if not values or any(value != values[0] for value in values):
                raise ConfigError(f"expected one number for {' or '.join(keys)}, found {escape(repr(values))}")
            numbers[name] = values[0]
        return cls(**numbers)


_KEYS: Final = {
    "n_layer": ("n_layer",),
    "n_head": ("n_head",),
    "n_embd": ("n_embd",),
    "n_vocab": ("n_vocab", "vocab_size"),
    "n_ctx": ("n_ctx", "n_positions"),
}
"""The names that OpenAI and transformers have for the same number."""


CONFIGS: Final[Mapping[str, GPT2Config]] = MappingProxyType(
    {
        "124M": GPT2Config(n_layer=12, n_head=12, n_embd=768),
        "355M": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
        "774M": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
        "1558M": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
    }
)
"""The published sizes, by the names of OpenAI's folders."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A shape and a dtype, as `jax.ShapeDtypeStruct` has them; a leaf of `target`."""

    shape: tuple[int, ...]
    dtype: DType


def target(config: GPT2Config, *, dtype: str = "float32", mask_dtype: str | None = "bool") -> dict[str, Any]:
    """Return what a GPT-2 demands, as a nested dict of shapes and dtypes.

    Args:
        config: Its size.
        dtype: Of the parameters.
        mask_dtype: Of each block's causal mask [n_ctx, n_ctx], 1 where attention may look; None for code that makes
            its masks itself.

    Raises:
        ConfigError: There is no such dtype.
    """
    for name in (dtype, mask_dtype):
        if name is not None and name not in DTYPE_ITEMSIZE:
            raise ConfigError(f"expected a dtype that safeload reads, found {escape(name)!r}")
    width, hidden = config.n_embd, 4 * config.n_embd

    def of(*shape: int) -> Demand:
        return Demand(shape, DType(dtype))

    def layer(n_out: int, n_in: int) -> dict[str, Demand]:
        return {"weight": of(n_out, n_in), "bias": of(n_out)}

    def norm() -> dict[str, Demand]:
        return {"scale": of(width), "shift": of(width)}

    def block() -> dict[str, Any]:
        attention: dict[str, Any] = {name: layer(width, width) for name in ("query", "key", "value", "output")}
        if mask_dtype is not None:
            attention["mask"] = Demand((config.n_ctx, config.n_ctx), DType(mask_dtype))
        return {
            "norm_1": norm(),
            "attention": attention,
            "norm_2": norm(),
            "feed_forward": {"expand": layer(hidden, width), "contract": layer(width, hidden)},
        }

    return {
        "token_embedding": of(config.n_vocab, width),
        "position_embedding": of(config.n_ctx, width),
        "blocks": {str(number): block() for number in range(config.n_layer)},
        "final_norm": norm(),
        "output_head": {"weight": of(config.n_vocab, width)},
    }


def remap_gpt2(
    loaded: Mapping[str, Any],
    config: GPT2Config,
    *,
    source: Source,
    dtype: str = "float32",
    mask_dtype: str | None = "bool",
) -> dict[str, Any]:
    """Return a loaded GPT-2 as the nested dict of `target`: equal, bit for bit, from whichever source.

    The output head is the token embedding: one array. The masks are built, once; one that a file has is compared.

    Args:
        loaded: What each file holds, by path, as `load` returns it.
        config: The size that it has to have.
        source: What it comes from.
        dtype: Of the parameters; nothing is cast.
        mask_dtype: As for `target`.

    Raises:
        PolicyError: The files are not a GPT-2 of this size; every difference is in it.
        LimitError: A name is too long.
        ConfigError: There is no such source or dtype.
        StagingError: A tensor was read in part only.
    """
    if source not in _SOURCES:
        raise ConfigError(f"source: expected {' or '.join(_SOURCES)}, found {escape(str(source))!r}")
    demanded = target(config, dtype=dtype, mask_dtype=mask_dtype)
    return remap(loaded, f"gpt2-{source}", target=demanded)
