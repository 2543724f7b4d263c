# ruff: noqa: INP001, T201
"""Restore a checkpoint in Grok-1's layout onto eight devices, by the arguments that the published code takes.

    python examples/grok1_restore.py

It makes a small checkpoint of that architecture and eight devices of this machine's CPU. For the published weights the
call to `restore` is the same: with the folder above `ckpt-0`, the manifest that you signed or were given, the key that
you trust, and the state that the model code evaluates the shapes of.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

# Before JAX looks: how many devices it makes of the CPU.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import safeload
from safeload import grok1
from safeload.grok1 import GrokConfig, Shard
from safeload.saving import save

CONFIG = GrokConfig(vocab_size=64, emb_size=64, key_size=4, num_q_heads=16, num_kv_heads=8, num_layers=2)


class TrainingState(NamedTuple):
    """The state of the published code, as far as it is restored."""

    params: dict[str, dict[str, Any]]


def state_of(leaves: dict[str, Any]) -> TrainingState:
    """Return leaves by name as the model code nests them: modules, and the parameters of each."""
    params: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        module, parameter = name.removeprefix("params/").rsplit("/", 1)
        params.setdefault(module, {})[parameter] = leaf
    return TrainingState(params)


def random_value(shard: Shard, rng: np.random.Generator) -> Any:
    """Return what a file of the layout holds: a float32 array, or an int8 weight with its scales."""
    if shard.scales_shape is None:
        return rng.standard_normal(shard.shape, np.float32)
    quantized: Any = safeload.QuantizedWeight8bit
    weight = rng.integers(-127, 128, shard.shape, np.int8)
    return quantized(weight=weight, scales=rng.random(shard.scales_shape, np.float32).astype(ml_dtypes.bfloat16))


def main() -> None:
    """Make, sign and restore a checkpoint."""
    table = grok1.shard_table(CONFIG)
    rng = np.random.default_rng(0)
    key = safeload.SecretKey.generate("ed25519")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "grok-small"
        saved = state_of({shard.parameter: random_value(shard, rng) for shard in table})
        manifest = save(saved, directory, layout="grok-1", keys=[key], model="grok-small", revision="1")
        specs: Any = PartitionSpec
        params = grok1.restore(
            str(directory),
            state_shapes=state_of({s.parameter: jax.ShapeDtypeStruct(s.shape, np.float32) for s in table}),
            mesh=Mesh(np.array(jax.devices()[:8]).reshape(1, 8), ("data", "model")),
            between_hosts_config=(1, 1),
            params_only=True,
            state_sharding=state_of({s.parameter: specs(*s.partition) for s in table}),
            manifest=manifest,
            trust=key.public,
        )
    n_equal = sum(
        np.array_equal(np.asarray(mine), np.asarray(theirs))
        for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(saved.params), strict=True)
    )
    gate = params["transformer/decoder_layer_0/moe/linear"]["w"].weight
    print(f"{len(table)} files, {n_equal} arrays equal to what was saved")
    print(
        f"each of {len(gate.sharding.device_set)} devices holds {gate.addressable_shards[0].data.shape} of {gate.shape}"
    )


if __name__ == "__main__":
    main()
