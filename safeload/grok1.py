"""Grok-1: which file holds which parameter, and a `restore` to put in place of the published `checkpoint.restore`.

The published files carry no names. Tensor i is leaf i of the training state as JAX flattens it, and JAX sorts the keys
of a dict as strings, so layer 10 comes before layer 2, and nothing in a shape tells them apart. So the signed manifest
binds each file to its parameter, and `restore` refuses a checkpoint where the two orders disagree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from safeload import loading
from safeload.decoding import HostTensor
from safeload.errors import ConfigError, Finding, PolicyError, ShardingError, escape
from safeload.expecting import Expectations
from safeload.formats.pickles.writing import shard_layout
from safeload.policy import Policy
from safeload.records import QuantizedWeight8bit, Record
from safeload.trust.store import Trust

if TYPE_CHECKING:
    from safeload.assembling import Mesh

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

_FLOATS = ("float32", "bfloat16", "float16")

_SHARD_PATH = re.compile(r"(?P<folder>(?:.*/)?)tensor(?P<index>[0-9]{5})_(?P<process>[0-9]{3})")


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


def shard_file(index: int, process: int = 0) -> str:
    """Return the file name of tensor `index` as written by process `process`: `tensor00026_000`.

    Raises:
        ValueError: A number does not fit its digits.
    """
    if not (0 <= index < 100_000 and 0 <= process < 1_000):
        raise ValueError(f"no shard is called tensor {index} of process {process}")
    return f"tensor{index:05d}_{process:03d}"


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

    Files that are not called like a tensor are left out. Whether a file holds the tensor that its index promises is the
    signer's claim: shapes are equal from layer to layer and cannot show it.

    Args:
        paths: Relative paths of a directory's files: the tensors lie at the top or in `ckpt-0/`.

    Raises:
        ConfigError: The tensor files are not all in one of these two places, do not come from one process, leave a gap,
            or are not two and twelve for each layer.
    """
    shards = {path: match for path in paths if (match := _SHARD_PATH.fullmatch(path))}
    folders = sorted({match["folder"] for match in shards.values()})
    hint = "the layout grok-1 is that of the published checkpoint: give its folder, or the one above its ckpt-0"
    if len(folders) != 1 or folders[0] not in ("", f"{CHECKPOINT_FOLDER}/"):
        found = ", ".join(escape(folder or ".") for folder in folders) or "none at all"
        raise ConfigError(f"expected tensor files at the top or in {CHECKPOINT_FOLDER}/, found {found}", hint=hint)
    foreign = sorted(path for path, match in shards.items() if match["process"] != "000")
    if foreign:
        raise ConfigError(f"expected the tensors of process 000 only, found {escape(foreign[0])}", hint=hint)
    by_index = {int(match["index"]): path for path, match in shards.items()}
    n_layers, rest = divmod(len(by_index) - TENSORS_BEFORE_LAYERS, TENSORS_PER_LAYER)
    gap = next((index for index in range(len(by_index)) if index not in by_index), None)
    if gap is not None:
        raise ConfigError(f"expected {len(by_index)} tensors without a gap, found no {shard_file(gap)}", hint=hint)
    if rest or n_layers < 1:
        raise ConfigError(
            f"expected {TENSORS_BEFORE_LAYERS} tensors and {TENSORS_PER_LAYER} for each layer, found {len(by_index)}",
            hint=hint,
        )
    return {by_index[index]: name for index, name in enumerate(parameter_names(n_layers))}


def restore(  # noqa: PLR0917 - the published signature
    checkpoint_path: str | Path,
    state_shapes: Any,
    mesh: Mesh,
    between_hosts_config: tuple[int, int],
    params_only: bool,  # noqa: FBT001 - see above
    state_sharding: Any,
    init_state: Any = None,  # noqa: ARG001 - see its description
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = "grok-1",
    memory_budget: int | str | None = None,
    quantized_class: type[Any] | None = None,
    **expected: Unpack[Expectations],
) -> Any:
    """Return the training state of a checkpoint whose every byte a trusted key signed, as global `jax.Array`s.

    It takes what the published `checkpoint.restore` takes, by position or by keyword, and needs a manifest and trusted
    keys besides. Leaf i of `state_shapes` comes from `tensor{i}_000`, if the manifest names that file's parameter as
    the leaf is named, and the tensor has the leaf's shape and dtype. Everything that the specs, the mesh and the
    manifest can tell is held together before the first tensor is read.

    Args:
        checkpoint_path: The folder above `ckpt-0`. The manifest may have been signed for either of the two.
        state_shapes: The state with a shape and a dtype at each leaf (`jax.eval_shape` makes it), also where the file
            holds a quantised weight: then the shape is the weight's, and the dtype a float.
        mesh: The mesh; `(1, 8)` with axes `data`, `model` is what the published weights run on.
        between_hosts_config: `(1, 1)`: one process.
        params_only: Whether to return `state.params` alone.
        state_sharding: A `PartitionSpec`, or None for a replicated leaf, at each leaf of the state. One spec serves a
            weight and its scales.
        init_state: Not used. The published code skips its comparison of names if it is given; here nothing skips it.
        manifest: The manifest's envelope or its path, as `load` takes it.
        trust: The keys to trust, as `load` takes them.
        policy: The policy to hold the files against.
        memory_budget: The most bytes to stage; see `load`.
        quantized_class: The class for a quantised weight, called with `weight` and `scales` and known to JAX as a
            pytree; by default that of `safeload.records`.
        **expected: What to hold the manifest against, as for `load`: a pin, a history, a revision.

    Raises:
        PolicyError: The files are not the tensors of this state: a finding for each one that is missing, unexpected,
            otherwise named, or of another shape or dtype; or the policy does not allow what they hold.
        VerificationError: The manifest is not signed by the trusted keys, or the files are not what it lists.
        FormatError: A file breaks its format.
        LimitError: A file asks for more than the policy's limits.
        ConfigError: An argument is not what is written above.
        StagingError: There is no room, or a file could not be read.
        ShardingError: The specs do not have the names of the state or do not fit the mesh, or more than one process
            runs.
    """
    # Late, so that names and layouts work without JAX, and signing starts fast.
    from safeload import assembling

    if tuple(between_hosts_config) != (1, 1) or assembling.process_count() != 1:
        raise ShardingError(
            f"expected one process and between_hosts_config (1, 1), found {assembling.process_count()} process(es) and "
            f"{tuple(between_hosts_config)}",
            hint="loading on several hosts is not supported yet",
        )
    if params_only and not hasattr(state_shapes, "params"):
        raise ConfigError("params_only: state_shapes has no attribute params")
    leaves, unflatten = assembling.named_leaves(state_shapes)
    for name, leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ConfigError(f"state_shapes: {escape(name)}: expected a shape and a dtype, found {escape(repr(leaf))}")
    names = [name for name, _ in leaves]
    if len(set(names)) != len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise ConfigError(f"state_shapes: expected a name for each leaf, found {escape(twice)} twice")
    specs = dict(assembling.named_leaves(state_sharding)[0])
    _require_equal_names(names, specs)
    shardings = [assembling.fit(mesh, specs[name], path=name, shape=tuple(leaf.shape)) for name, leaf in leaves]

    held = loading.hold(checkpoint_path, manifest=manifest, trust=trust, **expected)
    entries = held.trusted.manifest.by_path
    prefix = f"{CHECKPOINT_FOLDER}/"
    if not any(path.startswith(prefix) for path in entries):
        checkpoint_path, prefix = Path(checkpoint_path) / CHECKPOINT_FOLDER, ""
    files = [prefix + shard_file(index) for index in range(len(leaves))]
    wanted = dict(zip(files, leaves, strict=True))
    # Once by the manifest's word, so that hundreds of gigabytes are not read for nothing, and once by the files' own.
    promised = {
        path: _Held(entry.parameter, {t.name: (t.dtype, t.shape) for t in entry.tensors})
        for path, entry in entries.items()
        if entry.tensors
    }
    _require_no_differences(wanted, promised)
    loaded = loading.load_held(checkpoint_path, held, policy=policy, memory_budget=memory_budget)
    _require_no_differences(
        wanted, {path: _Held(entries[path].parameter, _tensors(value)) for path, value in loaded.items()}
    )

    arrays = assembling.assemble([loaded[file] for file in files], shardings)
    made: Any = QuantizedWeight8bit if quantized_class is None else quantized_class
    state = unflatten([made(**dict(array.items())) if isinstance(array, Record) else array for array in arrays])
    return state.params if params_only else state


def _require_equal_names(state: Iterable[str], sharding: Iterable[str]) -> None:
    in_state, in_sharding = set(state), set(sharding)
    if in_state != in_sharding:
        raise ShardingError(
            "state_shapes and state_sharding do not name the same parameters: "
            f"without a shape: {_listed(in_sharding - in_state)}; without a sharding: {_listed(in_state - in_sharding)}"
        )


def _listed(names: Iterable[str]) -> str:
    return escape(", ".join(sorted(names))) or "none"


@dataclass(frozen=True, slots=True)
class _Held:
    """What a file holds: the parameter that the manifest binds it to, and its tensors' dtypes and shapes by name."""

    parameter: str | None
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


def _tensors(value: Any) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor of an array or a record; no tensor for any other value."""
    fields = {"": value} if isinstance(value, HostTensor) else dict(value.items()) if isinstance(value, Record) else {}
    return {
        name: (field.spec.dtype.name, field.spec.shape)
        for name, field in fields.items()
        if isinstance(field, HostTensor)
    }


def _require_no_differences(expected: Mapping[str, tuple[str, Any]], found: Mapping[str, _Held]) -> None:
    findings = tuple(_differences(expected, found))
    if findings:
        raise PolicyError(*findings)


def _differences(expected: Mapping[str, tuple[str, Any]], found: Mapping[str, _Held]) -> Iterator[Finding]:
    """Yield every way in which the files are not the leaves, in order of index, then the files that no leaf asks for.

    Args:
        expected: Name and leaf (a shape and a dtype) by the file's path.
        found: What there is, by path.
    """
    for file, (name, leaf) in expected.items():
        shape, dtype = tuple(leaf.shape), str(leaf.dtype)
        held = found.get(file)
        if held is None:
            yield _finding("missing-tensor", file, f"{name}, {dtype} {shape}", "no such file")
            continue
        if held.parameter != name:
            yield _finding("parameter-name-mismatch", file, name, held.parameter or "no name in the manifest")
        if held.tensors.keys() == {""}:
            found_dtype, found_shape = held.tensors[""]
            fits, ungrouped = found_dtype == dtype, None
        elif held.tensors.keys() == {"weight", "scales"}:
            (weight_dtype, found_shape), (scales_dtype, scales_shape) = held.tensors["weight"], held.tensors["scales"]
            found_dtype = f"{weight_dtype} with {scales_dtype} scales"
            fits = weight_dtype == "int8" and dtype in _FLOATS and scales_dtype in _FLOATS
            ungrouped = None if _are_grouped(scales_shape, found_shape) else scales_shape
        else:
            yield _finding("dtype-mismatch", file, f"one tensor, {dtype} or quantized, for {name}", "something else")
            continue
        if not fits:
            yield _finding("dtype-mismatch", file, f"{dtype}, or int8 with float scales, for {name}", found_dtype)
        if found_shape != shape:
            yield _finding("shape-mismatch", file, f"{shape} for {name}", f"{found_shape}")
        elif ungrouped is not None:
            yield _finding("shape-mismatch", file, f"scales of groups of rows of {shape} for {name}", f"{ungrouped}")
    for file in sorted(found.keys() - expected.keys()):
        yield _finding("unexpected-tensor", file, f"{len(expected)} tensors", found[file].parameter or "one more")


def _finding(code: str, file: str, expected: str, found: str) -> Finding:
    hint = "sign the checkpoint with `safeload sign --layout grok-1`" if code == "parameter-name-mismatch" else None
    return Finding(code, f"expected {escape(expected)}; found {escape(found)}", file=file, hint=hint)


def _are_grouped(scales: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether scales `[.., G, N]` have one row for each of G groups of the rows of a weight `[.., K, N]`."""
    if len(scales) != len(weight) or len(weight) < 2 or scales[-2] == 0:
        return False
    return (*scales[:-2], scales[-1]) == (*weight[:-2], weight[-1]) and weight[-2] % scales[-2] == 0
