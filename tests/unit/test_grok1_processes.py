"""Claims of `grok1.restore` in a job of two real processes: whole files and blocks of hosts, and one verdict."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safeload.grok1 import name_shards, shard_table
from safeload.publishing import sign
from safeload.records import Record
from safeload.trust.keys import SecretKey
from tests.grok_sample import TINY, sample_value, write_blocks, write_checkpoint
from tests.processes import Ended, run_processes

pytestmark = pytest.mark.slow

KEY = SecretKey.generate("ed25519")

RESTORE = """
import hashlib
from typing import Any, NamedTuple
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from safeload.errors import SafeloadError
from safeload.grok1 import restore, shard_table
from tests.grok_sample import TINY

class State(NamedTuple):
    params: Any

def nested(leaves):
    params = {}
    for name, leaf in leaves.items():
        module, parameter = name.removeprefix("params/").rsplit("/", 1)
        params.setdefault(module, {})[parameter] = leaf
    return State(params)

table = shard_table(TINY)
mesh = Mesh(np.array(jax.devices()).reshape(1, 8), ("data", "model"))
try:
    params = restore(
        checkpoint_path=ARGUMENTS["directory"],
        state_shapes=nested({s.parameter: jax.ShapeDtypeStruct(s.shape, np.float32) for s in table}),
        mesh=mesh,
        between_hosts_config=(1, 2),
        params_only=True,
        state_sharding=nested({s.parameter: P(*s.partition) for s in table}),
        manifest=ARGUMENTS["manifest"],
        trust=ARGUMENTS["key"],
    )
except SafeloadError as err:
    found = [[f.code, f.file] for f in getattr(err, "findings", ())]
    answer({"error": type(err).__name__, "text": str(err), "findings": found})
else:
    shards = {}
    for shard in table:
        module, parameter = shard.parameter.removeprefix("params/").rsplit("/", 1)
        leaf = params[module][parameter]
        for name, array in {"": leaf}.items() if shard.scales_shape is None else leaf.items():
            for part in array.addressable_shards:
                where = [[s.start or 0, n if s.stop is None else s.stop] for s, n in zip(part.index, array.shape)]
                shards[f"{shard.index} {name} {where}"] = hashlib.sha256(np.asarray(part.data).tobytes()).hexdigest()
    answer({"shards": shards})
"""


def expected() -> dict[str, str]:
    """Return the digest of every device's part of every tensor, with the mesh 1x8."""
    digests: dict[str, str] = {}
    for shard in shard_table(TINY):
        value = sample_value(shard)
        for name, array in value.items() if isinstance(value, Record) else [("", value)]:
            for device in range(8):
                where = [[0, length] for length in array.shape]
                for dimension, axes in enumerate(shard.partition):
                    if axes is not None and "model" in axes:
                        length = array.shape[dimension] // 8
                        where[dimension] = [device * length, (device + 1) * length]
                part = np.ascontiguousarray(array[tuple(slice(*pair) for pair in where)])
                digests[f"{shard.index} {name} {where}"] = hashlib.sha256(part.tobytes()).hexdigest()
    return digests


def argument(folder: Path, directory: Path) -> dict[str, str]:
    files = [path.relative_to(directory).as_posix() for path in directory.rglob("tensor*")]
    envelope = sign(directory, keys=[KEY], model="tiny", revision="1", parameters=name_shards(files))
    (folder / "manifest").write_bytes(envelope)
    (folder / "key.pub").write_bytes(KEY.public.to_pem())
    return {"directory": str(directory), "manifest": str(folder / "manifest"), "key": str(folder / "key.pub")}


def answers(ended: list[Ended]) -> list[Any]:
    assert [process.code for process in ended] == [0, 0], [process.output[-2000:] for process in ended]
    return [process.answer for process in ended]


def test_two_hosts_restore_the_published_files_bit_for_bit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c" / "ckpt-0")
    first, second = answers(run_processes(RESTORE, [argument(tmp_path, tmp_path / "c")] * 2))
    assert first["shards"] | second["shards"] == expected()
    assert first["shards"].keys() != second["shards"].keys()


def test_a_damaged_block_on_one_host_stops_both_with_the_reason(tmp_path: Path) -> None:
    write_blocks(tmp_path / "c" / "ckpt-0", n_hosts=2)
    first = argument(tmp_path, tmp_path / "c")
    # The second host has only its own blocks, and one of them is damaged.
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "c", other)
    damaged = other / "ckpt-0" / "tensor00002_001"
    data = bytearray(damaged.read_bytes())
    data[-50] ^= 1
    damaged.write_bytes(data)
    for answer in answers(run_processes(RESTORE, [first, first | {"directory": str(other)}])):
        assert answer["error"] == "DigestMismatchError"
        assert [code for code, _ in answer["findings"]] == ["digest-mismatch"]
        assert "tensor00002_001" in answer["text"]


def test_two_hosts_restore_what_each_of_them_saved_and_has_alone(tmp_path: Path) -> None:
    write_blocks(tmp_path / "all" / "ckpt-0", n_hosts=2)
    arguments = argument(tmp_path, tmp_path / "all")
    directories = []
    for host in range(2):
        shutil.copytree(tmp_path / "all", tmp_path / f"host{host}")
        for path in (tmp_path / f"host{host}").rglob(f"tensor*_00{1 - host}"):
            path.unlink()
        directories.append(arguments | {"directory": str(tmp_path / f"host{host}")})
    first, second = answers(run_processes(RESTORE, directories))
    assert first.get("shards", {}) | second.get("shards", {}) == expected(), (first, second)
