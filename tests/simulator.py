"""A small honest checkpoint, and every way to break it: what a mirror, a proxy or an insider may do to a directory."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from safeload import loading, publishing
from safeload.digests import sha256_hex
from safeload.formats.pickles.writing import pickle_shard
from safeload.manifest import PAYLOAD_TYPE, TrustedManifest
from safeload.records import QuantizedWeight8bit, Record
from safeload.report import Report
from safeload.trust.dsse import Envelope, Signature, pae
from safeload.trust.keys import SecretKey
from safeload.trust.store import TrustStore
from safeload.verifying import verify_manifest

MODEL: Final = "test/model"

PLAIN: Final = "tensor00000_000"
"""One float32 array, larger than the files that staging puts together."""

QUANTIZED: Final = "tensor00001_000"
"""One record of int8 and bfloat16."""

NESTED: Final = "optimizer/state"
"""A dict of arrays in both orders and byte orders, and plain values."""

CONFIG: Final = "config.json"
README: Final = "README.md"
TOKENIZER: Final = "tokenizer.model"


def pickled(value: object, protocol: int = 4) -> bytes:
    """Return what `pickle.dump` writes, or for a record what the class in the running script would give."""
    if isinstance(value, Record):
        return b"".join(bytes(piece) for piece in pickle_shard(value))
    return pickle.dumps(value, protocol)


class CheckpointSimulator:
    """One checkpoint directory, its key and its manifest beside it."""

    def __init__(self, folder: Path, *, grok: bool = False) -> None:
        """Write the files and sign them; with `grok` only those that the grok-1 policy allows."""
        rng = np.random.default_rng(7)
        self.directory = folder / "checkpoint"
        self.manifest = folder / "checkpoint.manifest"
        self.outside = folder / "outside"
        self.policy = "grok-1" if grok else "numpy-quantized"
        self.key = SecretKey.generate()
        weight = rng.integers(-128, 128, (8, 24), dtype=np.int8)
        scales = rng.standard_normal((2, 24), dtype=np.float32).astype(ml_dtypes.bfloat16)
        self.values: dict[str, Any] = {
            PLAIN: rng.standard_normal((600, 500), dtype=np.float32),
            QUANTIZED: QuantizedWeight8bit(weight=weight, scales=scales),  # type: ignore[call-arg] # made at run time
        }
        if not grok:
            self.values[NESTED] = {
                "fortran": np.asfortranarray(rng.standard_normal((3, 5))),
                "big": rng.integers(0, 1000, (2, 3)).astype(">i4"),
                "step": 12,
                "parts": [np.arange(4, dtype=np.uint16), ("adam", None, True, 0.5)],
            }
        contents = {path: pickled(value) for path, value in self.values.items()}
        contents |= {
            CONFIG: b'{"layers": 2}\n',
            README: b"# A model\n",
            TOKENIZER: b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02",
        }
        for path, data in contents.items():
            self.write(path, data)
        self.sign()

    def path(self, name: str) -> Path:
        """Return where a file of the checkpoint is."""
        return self.directory / name

    def write(self, name: str, data: bytes) -> None:
        """Write a file, in place of what is there."""
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_bytes(data)

    def snapshot(self) -> dict[str, bytes]:
        """Return the content of every regular file."""
        found = (f for f in self.directory.rglob("*") if f.is_file() and not f.is_symlink())
        return {f.relative_to(self.directory).as_posix(): f.read_bytes() for f in found}

    # ---------------------------------------------------------------- what the user does

    def sign(self, **options: Any) -> bytes:
        """Sign the directory as it is, and keep the manifest."""
        options = {"keys": [self.key], "model": MODEL, "revision": "r1", "policy": self.policy, **options}
        envelope = publishing.sign(self.directory, **options)
        self.manifest.write_bytes(envelope)
        return envelope

    def resign(self, edit: Callable[[dict[str, Any]], object]) -> None:
        """Change the manifest and sign it again: what only a holder of the key can do."""
        statement = json.loads(Envelope.parse(self.manifest.read_bytes()).payload)
        edit(statement["predicate"])
        files = sorted(statement["predicate"]["files"], key=lambda entry: entry["path"].encode())
        statement["predicate"]["files"] = files
        statement["predicate"]["totals"] = {"files": len(files), "bytes": sum(entry["size"] for entry in files)}
        tree = b"safeload-tree-v1\n" + b"".join(
            b"%d %b %d %b\n" % (len(e["path"].encode()), e["path"].encode(), e["size"], e["sha256"].encode())
            for e in files
        )
        statement["subject"][0]["digest"]["sha256"] = sha256_hex(tree)
        payload = json.dumps(statement).encode()
        signature = Signature(self.key.sign(pae(PAYLOAD_TYPE, payload)), self.key.public.keyid)
        self.manifest.write_bytes(Envelope(payload, PAYLOAD_TYPE, (signature,)).serialize())

    def edit_entry(self, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
        """Change what the manifest says of one file, and sign it again."""
        self.resign(lambda predicate: edit(next(e for e in predicate["files"] if e["path"] == name)))

    def bless(self, name: str, data: bytes, *, table: bool = False) -> None:
        """Write other bytes and sign their digest; with `table` also the tensors and globals that were there before."""
        self.write(name, data)
        self.edit_entry(name, lambda entry: entry.update(size=len(data), sha256=sha256_hex(data)))
        if not table:
            self.edit_entry(name, lambda entry: (entry.pop("tensors", None), entry.pop("globals", None)))

    def load(self, **options: Any) -> Mapping[str, Any]:
        """Load it."""
        return loading.load(self.directory, **self._options(options))

    def verify(self, **options: Any) -> Report:
        """Verify it."""
        return loading.verify(self.directory, **self._options(options))

    def check(self, **options: Any) -> Report:
        """Return the report of verifying it, whatever the verdict."""
        return loading.check(self.directory, **self._options(options))

    def trusted(self) -> TrustedManifest:
        """Return the proof that the manifest is signed."""
        return verify_manifest(self.manifest.read_bytes(), TrustStore.of_keys([self.key.public]))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"manifest": self.manifest, "trust": self.key.public, "policy": self.policy, **options}

    # ---------------------------------------------------------------- what others do

    def flip_bit(self, name: str, offset: int = -20) -> None:
        """Change one bit; by default near the end, in a payload or in the text."""
        data = bytearray(self.path(name).read_bytes())
        data[max(offset, -len(data))] ^= 1
        self.write(name, bytes(data))

    def truncate(self, name: str, nbytes: int = 1) -> None:
        """Take bytes away at the end."""
        os.truncate(self.path(name), self.path(name).stat().st_size - nbytes)

    def append(self, name: str, data: bytes = b"\0") -> None:
        """Add bytes at the end."""
        self.write(name, self.path(name).read_bytes() + data)

    def swap(self, one: str, other: str) -> None:
        """Exchange two files."""
        first, second = self.path(one).read_bytes(), self.path(other).read_bytes()
        self.write(one, second)
        self.write(other, first)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.path(name).unlink()

    def add(self, name: str = "extra", data: bytes = b"{}") -> None:
        """Add a file that nobody signed."""
        self.write(name, data)

    def replace_by_symlink(self, name: str) -> None:
        """Move a file out of the directory and link to it: the same bytes, by another way."""
        self.path(name).rename(self.outside)
        self.path(name).symlink_to(self.outside)

    def replace_by_hard_link(self, name: str, data: bytes | None = None) -> None:
        """Let the name stand for a file outside, with the same or other bytes."""
        self.outside.write_bytes(self.path(name).read_bytes() if data is None else data)
        self.remove(name)
        self.path(name).hardlink_to(self.outside)

    def replace_by_fifo(self, name: str) -> None:
        """Put a FIFO in a file's place: opening it waits for ever."""
        self.remove(name)
        os.mkfifo(self.path(name))

    def replace_by_directory(self, name: str) -> None:
        """Put an empty directory in a file's place."""
        self.remove(name)
        self.path(name).mkdir()


class Exploit:
    """Pickles into a call of `os.system`."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("exit 3",)
