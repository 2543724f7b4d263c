"""A small signed checkpoint to fetch, with chunks of a size that tests can afford."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import safeload.files
import safeload.manifest
from safeload.fetching import fetch, partial
from safeload.publishing import sign
from safeload.trust.keys import PublicKey, SecretKey

CHUNK_BYTES = 64 * 1024


def shrink_chunks(patch: pytest.MonkeyPatch) -> None:
    """Make chunks 64 KiB instead of 16 MiB, for whoever signs, reads and fetches."""
    for module in (safeload.files, safeload.manifest, partial, fetch):
        patch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)
    # So that chunks are as large beside it as they are in earnest.
    patch.setattr(fetch, "_SMALL_BYTES", CHUNK_BYTES // 16)


@dataclass(frozen=True)
class Sample:
    """A checkpoint, and who signed it."""

    files: dict[str, bytes]
    manifest: bytes
    trust: PublicKey


def array_pickle(seed: int, nbytes: int) -> bytes:
    return pickle.dumps(np.frombuffer(np.random.default_rng(seed).bytes(nbytes), dtype=np.uint8), protocol=4)


def files_of(**more: bytes) -> dict[str, bytes]:
    return {
        "config.json": b'{"layers": 2}\n',
        "ckpt-0/tensor00000_000": array_pickle(1, 5 * CHUNK_BYTES + 321),
        "ckpt-0/tensor00001_000": array_pickle(2, 2000),
        **more,
    }


def lay_out(directory: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def make_sample(folder: Path, files: dict[str, bytes], *, policy: str | Path = "numpy-quantized") -> Sample:
    key = SecretKey.generate()
    lay_out(folder, files)
    manifest = sign(folder, keys=[key], model="test/model", revision="1", policy=policy)
    return Sample(files, manifest, key.public)


def read_all(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
