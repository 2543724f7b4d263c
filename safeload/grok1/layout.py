"""Which file of a Grok-1 checkpoint holds which parameter, of what shape, and how it lies on a mesh.

The published files carry no names. Tensor i is leaf i of the training state as JAX flattens it, and JAX sorts the keys
of a dict as strings, so layer 10 comes before layer 2, and nothing in a shape tells them apart. So the signed manifest
binds each file to its parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

from safeload.errors import ConfigError, escape
from safeload.formats.pickles.writing import shard_file, shard_layout

CHECKPOINT_FOLDER = "ckpt-0"
"""The folder below `checkpoint_path` that the published code reads; 0 is the training step."""

TENSORS_BEFORE_LAYERS = 2
"""The embedding and the final norm."""

TENSORS_PER_LAYER = 12
"""Three expert matrices, four attention matrices, four norms, one router."""

ROW_PARALLEL_GROUPS = 8
"""Groups of rows with scales of their own where the rows were split over devices when the weights were quantised: the
width of the model axis. Everywhere else one scale serves a whole column."""

Partition: TypeAlias = tuple[str | tuple[str, ...] | None, ...]
"""The arguments of a `jax.sharding.PartitionSpec`: mesh axes for each dimension."""

PARTITION_RULES: Final[tuple[tuple[tuple[str, ...], Partition], ...]] = (
    (("in_out_embed", "embeddings"), (None, ("data", "model"))),
    (("multi_head_attention", "(query|key|value)", "w"), ("data", "model")),
    (("multi_head_attention", "linear", "w"), ("model", "data")),
    (("moe", "(linear|linear_v)", "w"), (None, "data", "model")),
    (("moe", "linear_1", "w"), (None, "model", "data")),
    (("router", "w"), ("data",)),
    (("rms_norm(_[0-9]+)?", "scale"), (None,)),
)
"""How every parameter of Grok-1 is cut, as rules: each pattern matches as many neighboring components of its path, each
in full. `partition_rules` takes them, with a `PartitionSpec` made of each right-hand side."""

SHARD_PATH = re.compile(r"(?P<folder>(?:.*/)?)tensor(?P<index>[0-9]{5})_(?P<process>[0-9]{3})")


@dataclass(frozen=True, slots=True)
class GrokConfig:
    """The sizes of a model of Grok-1's architecture. The defaults are the published model's.

    Attributes:
        vocab_size: Rows of the embedding.
        emb_size: Width of the residual stream.
        key_size: Width of one attention head.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        num_layers: Decoder layers.
        num_experts: Experts a layer.
        widening_factor: Width of an expert's hidden layer before the gate takes its third, in units of `emb_size`.
        quantized: Whether the matrices are int8 with bfloat16 scales, as published, or float32.
    """

    vocab_size: int = 131_072
    emb_size: int = 6_144
    key_size: int = 128
    num_q_heads: int = 48
    num_kv_heads: int = 8
    num_layers: int = 64
    num_experts: int = 8
    widening_factor: float = 8
    quantized: bool = True

    @property
    def ffn_size(self) -> int:
        """Width of an expert's hidden layer: two thirds of the widened width, rounded up to a multiple of 8."""
        return -(-(int(self.widening_factor * self.emb_size) * 2 // 3) // 8) * 8


@dataclass(frozen=True, slots=True)
class Shard:
    """One row of the layout: a file, the parameter it holds, and how that lies on the mesh.

    Attributes:
        index: Position in the flattened training state.
        file: Name of the file.
        parameter: Name of the parameter, `/`-joined.
        shape: Global shape of the array, or of the int8 weight.
        scales_shape: Global shape of the weight's scales; None for a plain float32 array.
        partition: Mesh axes of each dimension, for the weight and its scales alike.
    """

    index: int
    file: str
    parameter: str
    shape: tuple[int, ...]
    scales_shape: tuple[int, ...] | None
    partition: Partition

    @property
    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor in the file, by its name there."""
        if self.scales_shape is None:
            return {"": ("float32", self.shape)}
        return {"weight": ("int8", self.shape), "scales": ("bfloat16", self.scales_shape)}

    @property
    def size(self) -> int:
        """Length of the file in bytes, as the published writer makes it."""
        return shard_layout(self.tensors).size


def shard_table(config: GrokConfig | None = None) -> tuple[Shard, ...]:
    """Return the whole layout of a checkpoint, in index order.

    Args:
        config: The model's sizes; the published Grok-1 where None.
    """
    config = GrokConfig() if config is None else config
    # By module, then by parameter: JAX sorts the keys of each dict of the state.
    rows = sorted(_parameters(config), key=lambda row: row[:2])
    return tuple(
        Shard(index, shard_file(index), f"params/{module}/{name}", shape, scales, partition)
        for index, (module, name, shape, scales, partition) in enumerate(rows)
    )


def parameter_names(n_layers: int = 64) -> tuple[str, ...]:
    """Return the name of each parameter in the order of the files: two, then twelve for each layer.

    Args:
        n_layers: Number of decoder layers; 64 makes the 770 names of the published model.
    """
    return tuple(shard.parameter for shard in shard_table(GrokConfig(num_layers=n_layers)))


def _parameters(config: GrokConfig) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, ...] | None, Partition]]:
    emb, ffn, experts = config.emb_size, config.ffn_size, config.num_experts
    queries, keys = config.num_q_heads * config.key_size, config.num_kv_heads * config.key_size
    yield "language_model/in_out_embed", "embeddings", (config.vocab_size, emb), None, (None, ("data", "model"))
    yield "language_model/rms_norm", "scale", (emb,), None, (None,)
    column, row = ("data", "model"), ("model", "data")
    matrices: tuple[tuple[str, tuple[int, ...], int, Partition], ...] = (
        ("moe/linear", (experts, emb, ffn), 1, (None, *column)),
        ("moe/linear_v", (experts, emb, ffn), 1, (None, *column)),
        ("moe/linear_1", (experts, ffn, emb), ROW_PARALLEL_GROUPS, (None, *row)),
        ("multi_head_attention/query", (emb, queries), 1, column),
        ("multi_head_attention/key", (emb, keys), 1, column),
        ("multi_head_attention/value", (emb, keys), 1, column),
        ("multi_head_attention/linear", (queries, emb), ROW_PARALLEL_GROUPS, row),
    )
    for layer in range(config.num_layers):
        module = f"transformer/decoder_layer_{layer}"
        for name, shape, groups, partition in matrices:
            scales = (*shape[:-2], groups, shape[-1]) if config.quantized else None
            yield f"{module}/{name}", "w", shape, scales, partition
        for norm in ("rms_norm", "rms_norm_1", "rms_norm_2", "rms_norm_3"):
            yield f"{module}/{norm}", "scale", (emb,), None, (None,)
        yield f"{module}/router", "w", (emb, experts), None, ("data",)


def name_shards(paths: Iterable[str]) -> Mapping[str, str]:
    """Return the parameter of each tensor file of a Grok-1 checkpoint, for its manifest, from the paths alone.

    Files that are not called like a tensor are left out. Where several processes saved, each file is a block of its
    parameter. Whether a file holds the tensor that its index promises is the
    signer's claim: shapes are equal from layer to layer and cannot show it.

    Args:
        paths: Relative paths of a directory's files: the tensors lie at the top or in `ckpt-0/`.

    Raises:
        ConfigError: The tensor files are not all in one of these two places, leave a gap in their numbers or those of
            their processes, or are not two and twelve for each layer.
    """
    shards = {path: match for path in paths if (match := SHARD_PATH.fullmatch(path))}
    folders = sorted({match["folder"] for match in shards.values()})
    hint = "the layout grok-1 is that of the published checkpoint: give its folder, or the one above its ckpt-0"
    if len(folders) != 1 or folders[0] not in ("", f"{CHECKPOINT_FOLDER}/"):
        found = ", ".join(escape(folder or ".") for folder in folders) or "none at all"
        raise ConfigError(f"expected tensor files at the top or in {CHECKPOINT_FOLDER}/, found {found}", hint=hint)
    by_number = {(int(match["index"]), int(match["process"])): path for path, match in shards.items()}
    n_tensors = len({index for index, _ in by_number})
    n_processes = 1 + max(process for _, process in by_number)
    for number in product(range(n_tensors), range(n_processes)):
        if number not in by_number:
            of = f"{n_tensors} tensors of {n_processes} process(es)"
            raise ConfigError(f"expected {of} without a gap, found no {shard_file(*number)}", hint=hint)
    n_layers, rest = divmod(n_tensors - TENSORS_BEFORE_LAYERS, TENSORS_PER_LAYER)
    if rest or n_layers < 1:
        raise ConfigError(
            f"expected {TENSORS_BEFORE_LAYERS} tensors and {TENSORS_PER_LAYER} for each layer, found {n_tensors}",
            hint=hint,
        )
    names = parameter_names(n_layers)
    return {by_number[number]: names[number[0]] for number in sorted(by_number)}
