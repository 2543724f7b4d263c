"""The steps of `safeload demo`: a small checkpoint in Grok-1's layout, five attacks on it, a load over virtual devices.

Nothing here prints; `cli/demo.py` tells the story. All files are the demo's own, in a folder of its own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from safeload import loading, publishing
from safeload.canonical import numpy_dtype
from safeload.errors import ConfigError
from safeload.files import publish
from safeload.formats.pickles.writing import write_shard
from safeload.grok1 import GrokConfig, Shard, name_shards, shard_file, shard_table
from safeload.records import QuantizedWeight8bit
from safeload.tensors import DType
from safeload.trust.keys import SecretKey

POLICY = "grok-1"
MODEL = "demo"

N_DEVICES = 8
"""Grok-1's own mesh: 1 x 8 over the axes data and model."""

CONFIG = GrokConfig(
    vocab_size=2048, emb_size=256, key_size=32, num_q_heads=8, num_kv_heads=8, num_layers=1, widening_factor=8
)
"""Every kind of tensor that Grok-1 has, with dimensions that 8 devices divide, in about 10 MiB."""

_SEED = 20240317
"""Of the random weights: each run writes the same checkpoint."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One thing that is done to the copy.

    Attributes:
        file: The file that it is done to.
        what: What is done, for people.
        codes: The findings that must come out for that file, no more and no fewer.
    """

    file: str
    what: str
    codes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """One row of the final table.

    Attributes:
        name: Name of the parameter.
        part: `weight` or `scales` of a quantized weight; empty for a plain array.
        dtype: Element type.
        shape: Global shape.
        sharding: Mesh axis of each dimension, `-` for none.
        nbytes: Bytes of the whole tensor.
        device_nbytes: Bytes of it on the first device.
    """

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    sharding: str
    nbytes: int
    device_nbytes: int


def write_checkpoint(folder: Path) -> tuple[Shard, ...]:
    """Make a folder with the pickles of a checkpoint of `CONFIG`, and return its layout."""
    random = np.random.default_rng(_SEED)
    bfloat16 = numpy_dtype(DType("bfloat16"))
    shards = shard_table(CONFIG)
    folder.mkdir()
    for shard in shards:
        value: Any
        if shard.scales_shape is None:
            value = random.standard_normal(shard.shape, dtype=np.float32)
        else:
            weight = random.integers(-127, 128, shard.shape, dtype=np.int8)
            scales = random.random(shard.scales_shape, dtype=np.float32).astype(bfloat16)
            value = QuantizedWeight8bit(weight, scales)  # type: ignore[call-arg] # made by make_dataclass
        with (folder / shard.file).open("wb") as file:
            write_shard(file, value)
    return shards


def sign_checkpoint(checkpoint: Path, manifest: Path, public_key: Path) -> str:
    """Write the signed manifest of a checkpoint and the public key that verifies it, and return the keyid.

    The secret key is never written: it signs once, and is gone.
    """
    key = SecretKey.generate("ed25519")
    parameters = name_shards(path.name for path in checkpoint.iterdir())
    envelope = publishing.sign(
        checkpoint, keys=[key], model=MODEL, revision="demo", policy=POLICY, parameters=parameters
    )
    publish(manifest, envelope)
    publish(public_key, key.public.to_pem())
    return key.public.keyid


def poison(good: Path, poisoned: Path, shards: Sequence[Shard], sentinel: Path) -> tuple[Attack, ...]:
    """Copy a checkpoint and do five things to the copy.

    Args:
        good: The checkpoint.
        poisoned: Where to put the copy.
        shards: The layout of the checkpoint.
        sentinel: The file that exists afterwards if the hostile pickle was run.

    Returns:
        What was done; the hostile pickle is the first.
    """
    shutil.copytree(good, poisoned)
    hostile, flipped, missing, copied, linked = (shards[index].file for index in (8, 2, 13, 12, 6))

    size = (poisoned / hostile).stat().st_size
    command = f"echo 'this could have been any program' > {shlex.quote(str(sentinel.absolute()))}"
    (poisoned / hostile).write_bytes(hostile_pickle(command, size))

    content = bytearray((poisoned / flipped).read_bytes())
    content[len(content) // 2] ^= 1
    (poisoned / flipped).write_bytes(content)

    (poisoned / missing).unlink()
    extra = shard_file(len(shards))
    shutil.copy(poisoned / copied, poisoned / extra)

    elsewhere = poisoned.parent / "elsewhere"
    (poisoned / linked).rename(elsewhere)
    (poisoned / linked).symlink_to(elsewhere.absolute())
    return (
        Attack(hostile, "replaced by a pickle that runs a program", ("digest-mismatch", "global-not-allowed")),
        Attack(flipped, "one bit of one weight flipped", ("digest-mismatch",)),
        Attack(missing, "deleted", ("missing-file",)),
        Attack(extra, "added, a copy of another file", ("unlisted-file",)),
        Attack(linked, "moved elsewhere, and a symbolic link to it put in its place", ("symlink",)),
    )


def hostile_pickle(command: str, size: int) -> bytes:
    """Return an attacker's pickle, written by hand: `pickle.load` of it runs `command` in a shell.

    Protocol 2: the global `os.system`, one string, TUPLE1, REDUCE (which calls), STOP.

    Args:
        command: What to run.
        size: Length of the pickle in bytes, that of the file it replaces; the command is padded with blanks.
    """
    head, tail = b"\x80\x02cos\nsystem\nX", b"\x85R."
    argument = os.fsencode(command).ljust(size - len(head) - 4 - len(tail))
    return head + struct.pack("<I", len(argument)) + argument + tail


def ask_for_devices() -> None:
    """Ask JAX, which looks when it starts, for virtual CPU devices; a GPU is left alone."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={N_DEVICES}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"


def load_over_devices(
    checkpoint: Path, manifest: Path, public_key: Path, shards: Sequence[Shard]
) -> tuple[list[LoadedTensor], float]:
    """Load a checkpoint as global arrays over the devices that `ask_for_devices` asked for.

    Returns:
        A row for each tensor, in the order of the files, and the seconds that verifying and loading took; the start of
        JAX is not in it.

    Raises:
        ConfigError: JAX was started before, with fewer devices.
    """
    from safeload import assembling

    jax: Any = assembling.jax  # type: ignore[attr-defined] # that module alone imports jax; this is its jax
    devices = jax.devices("cpu")
    if len(devices) < N_DEVICES:
        raise ConfigError(
            f"JAX was started with {len(devices)} CPU device(s), and the demo needs {N_DEVICES}",
            hint="run `safeload demo` in a process of its own",
        )
    mesh = assembling.Mesh(np.asarray(devices[:N_DEVICES]).reshape(1, N_DEVICES), ("data", "model"))
    by_file = {shard.file: shard for shard in shards}

    def place(path: str, shape: tuple[int, ...]) -> Any:
        spec = jax.sharding.PartitionSpec(*by_file[path.partition("/")[0]].partition)
        return assembling.fit(mesh, spec, path=path, shape=shape)

    started = time.perf_counter()
    tree = loading.load(checkpoint, manifest=manifest, trust=[public_key], policy=POLICY, shardings=place)
    seconds = time.perf_counter() - started
    return [row for shard in shards for row in _rows(shard, tree[shard.file])], seconds


def _rows(shard: Shard, value: Any) -> list[LoadedTensor]:
    fields = {"": value} if shard.scales_shape is None else dict(value.items())
    axes = ("+".join(axis) if isinstance(axis, tuple) else axis or "-" for axis in shard.partition)
    sharding = f"({', '.join(axes)})"
    return [
        LoadedTensor(
            name=shard.parameter.removeprefix("params/"),
            part=field,
            dtype=str(array.dtype),
            shape=tuple(array.shape),
            sharding=sharding,
            nbytes=int(array.nbytes),
            device_nbytes=int(array.addressable_shards[0].data.nbytes),
        )
        for field, array in fields.items()
    ]
