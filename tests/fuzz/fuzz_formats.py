"""Fuzz targets for the containers of tensors: any bytes are refused, or every tensor lies in the file and is readable.

What numpy can read as well is held against numpy. Imported by `fuzz_pickles`, whose runner starts these targets too.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.containers_sample import (
    Member,
    arrays_of,
    gguf,
    gguf_sample,
    npy,
    safetensors,
    safetensors_sample,
    same_arrays,
    zip_file,
)
from tests.fuzz.fuzz_checkpoints import CHECKPOINT_TARGETS, checkpoint_seeds

Target = Callable[[bytes], None]


def _npy(_: Path) -> Target:
    from safeload.formats import MemorySource
    from safeload.formats.npy import parse_npy
    from safeload.policy import load_policy

    policy = load_policy("numpy-quantized")

    def target(data: bytes) -> None:
        parsed = parse_npy(MemorySource(data), policy)
        if parsed.refusal is None:
            assert same_arrays(arrays_of(parsed, data), {"": np.load(io.BytesIO(data), allow_pickle=False)})

    return target


def _npz(_: Path) -> Target:
    from safeload.formats import MemorySource
    from safeload.formats.npz import parse_npz
    from safeload.policy import load_policy

    policy = load_policy("numpy-quantized")

    def target(data: bytes) -> None:
        parsed = parse_npz(MemorySource(data), policy)
        if parsed.refusal is None:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                read = {name: archive[name] for name in archive.files}
            found = arrays_of(parsed, data)
            assert same_arrays({name: found[name] for name in read}, read)
            assert len(found) == len(read)

    return target


def _safetensors(_: Path) -> Target:
    from safeload.formats import MemorySource
    from safeload.formats.safetensors import parse_safetensors
    from safeload.policy import load_policy

    policy = load_policy("numpy-quantized")

    def target(data: bytes) -> None:
        parsed = parse_safetensors(MemorySource(data), policy)
        if parsed.refusal is None:
            arrays_of(parsed, data)
            header_bytes = 8 + int.from_bytes(data[:8], "little")
            assert header_bytes + sum(spec.extent.nbytes for spec in parsed.tensors) == len(data)

    return target


def _gguf(_: Path) -> Target:
    from safeload.formats import MemorySource
    from safeload.formats.gguf import parse_gguf
    from safeload.policy import load_policy

    policy = load_policy("numpy-quantized")

    def target(data: bytes) -> None:
        parsed = parse_gguf(MemorySource(data), policy)
        if parsed.refusal is None:
            arrays_of(parsed, data)
            ends = [0, *(spec.extent.offset + spec.extent.nbytes for spec in parsed.tensors)]
            assert all(spec.extent.offset >= end for spec, end in zip(parsed.tensors, ends, strict=False))

    return target


def _index(_: Path) -> Target:
    from safeload.formats import MemorySource
    from safeload.formats.shard_index import parse_index
    from safeload.policy import load_policy

    policy = load_policy("numpy-quantized")

    def target(data: bytes) -> None:
        parsed = parse_index(MemorySource(data), policy)
        assert (parsed.index is None) is (parsed.refusal is not None)

    return target


FORMAT_TARGETS: dict[str, Callable[[Path], Target]] = {
    "npy": _npy,
    "npz": _npz,
    "safetensors": _safetensors,
    "gguf": _gguf,
    "shard-index": _index,
    **CHECKPOINT_TARGETS,
}
"""What makes each target, by its name."""


def format_seeds(name: str) -> list[bytes]:
    """Return honest files to begin with."""
    match name:
        case "npy":
            return [npy(), npy(version=(2, 0)), npy("{'descr': '>i2', 'fortran_order': True, 'shape': (1L,), }", b"ab")]
        case "npz":
            return [zip_file([Member(), Member("b.npy", method=8)]), zip_file(end64={})]
        case "safetensors":
            return [safetensors_sample()[0], safetensors({})]
        case "gguf":
            return [gguf_sample()[0], gguf()]
        case name if name in CHECKPOINT_TARGETS:
            return checkpoint_seeds(name)
        case _:
            return [b'{"metadata":{"total_size":8},"weight_map":{"a":"model-00001-of-00001.safetensors"}}']
