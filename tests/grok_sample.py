"""A tiny checkpoint in Grok-1's layout, made from nothing: same files, same order, same opcodes, other sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from safeload.formats.pickles.writing import write_shard
from safeload.grok1 import GrokConfig, Partition, Shard, shard_file, shard_table
from safeload.records import QuantizedWeight8bit, Record

TINY = GrokConfig(vocab_size=64, emb_size=64, key_size=4, num_q_heads=16, num_kv_heads=8, num_layers=1)
"""14 files of at most 178 kB; every sharded axis divides by 8, and an expert matrix is larger than a pickle's frame."""


def sample_value(shard: Shard, seed: int = 0) -> np.ndarray | Record:
    """Return the array or the record of one row of the layout: reproducible, and different for each index."""
    rng = np.random.default_rng([seed, shard.index])
    arrays = {name: _array(rng, dtype, shape) for name, (dtype, shape) in shard.tensors.items()}
    return arrays[""] if "" in arrays else QuantizedWeight8bit(**arrays)


def _array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "int8":
        return np.frombuffer(rng.bytes(math.prod(shape)), np.int8).reshape(shape)
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def write_value(path: Path, value: np.ndarray | Record) -> None:
    """Write one file of tensors, in place of any that is there."""
    with path.open("wb") as file:
        write_shard(file, value)


def write_checkpoint(folder: Path, config: GrokConfig = TINY) -> Mapping[str, np.ndarray | Record]:
    """Write a checkpoint to `folder` (a `ckpt-0`), which is made, and return what each file holds."""
    folder.mkdir(parents=True)
    values = {shard.file: sample_value(shard) for shard in shard_table(config)}
    for name, value in values.items():
        write_value(folder / name, value)
    return values


def write_blocks(folder: Path, *, n_hosts: int, config: GrokConfig = TINY) -> None:
    """Write what `n_hosts` hosts along the model axis save, each the block of every tensor that its devices hold."""
    folder.mkdir(parents=True)
    for shard in shard_table(config):
        value = sample_value(shard)
        for host in range(n_hosts):
            if isinstance(value, Record):
                fields = {name: _block(array, shard.partition, host, n_hosts) for name, array in value.items()}
                block: np.ndarray | Record = type(value)(**fields)
            else:
                block = _block(value, shard.partition, host, n_hosts)
            write_value(folder / shard_file(shard.index, host), block)


def _block(array: np.ndarray, partition: Partition, host: int, n_hosts: int) -> np.ndarray:
    for dimension, axes in enumerate(partition):
        if axes is not None and "model" in axes:
            array = np.split(array, n_hosts, axis=dimension)[host]
    return np.ascontiguousarray(array)
