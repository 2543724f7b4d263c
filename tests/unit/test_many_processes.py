"""Claims of loading in a job of several processes, each a real one: equal results, one verdict, and never a hang."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from safeload import publishing
from safeload.trust.keys import SecretKey
from tests.processes import run_processes
from tests.simulator import pickled

pytestmark = pytest.mark.slow

LARGE = "tensor00000_000"
"""Four chunks and a bit: 64 MiB of float32, so that a process can leave some of it unread."""

SMALL = "tensor00001_000"

JOINED = "parameter"
"""What the blocks of several hosts are called together."""

MESH = (2, 4)
HOSTS = {2: {"data": 2, "model": 1}, 4: {"data": 2, "model": 2}}
LOCAL = {2: {"data": 1, "model": 4}, 4: {"data": 1, "model": 2}}
"""How the processes of a job of 2 and of 4 lie on that mesh, each with its devices side by side along `model`."""

LOAD = """
import hashlib, os, time
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P, SingleDeviceSharding
from safeload import loading
from safeload.assembling import partition_rules
from safeload.errors import SafeloadError
from safeload.placing import join_blocks

RULES = [("tensor00000_000$", P(("data", "model"))), ("parameter$", P("data", "model")), ("", P(None, "model"))]

def load(case):
    devices = jax.devices()[::-1] if case.get("reversed") else jax.devices()
    mesh = Mesh(np.array(devices).reshape(case["mesh"]), ("data", "model"))
    if case.get("leaves"):
        time.sleep(6)
        os._exit(0)
    blocks = case.get("blocks")
    joins = () if not blocks else [
        join_blocks("parameter", blocks["files"], P("data", "model"), hosts=blocks["hosts"], local=blocks["local"])
    ]
    started = time.monotonic()
    try:
        tree, report = loading.load_and_report(
            case["directory"],
            manifest=case["manifest"],
            trust=case["key"],
            shardings=SingleDeviceSharding(jax.devices()[0]) if case.get("on_one") else partition_rules(mesh, RULES),
            joins=joins,
            cast=case.get("cast"),
            memory_budget=case.get("budget"),
            host_timeout=case.get("timeout", 60),
        )
    except SafeloadError as err:
        found = [[f.code, f.file, f.message] for f in getattr(err, "findings", ())]
        return {"error": type(err).__name__, "text": str(err), "findings": found, "seconds": time.monotonic() - started}
    shards = {}
    for path, array in tree.items():
        for shard in array.addressable_shards:
            where = [[s.start or 0, n if s.stop is None else s.stop] for s, n in zip(shard.index, array.shape)]
            shards[f"{path} {where}"] = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
    if case.get("on_one"):
        return {"shards": shards, "read": report.bytes_read, "shapes": {p: list(a.shape) for p, a in tree.items()}}
    # A collective, which every process has to reach.
    total = float(jax.jit(lambda x: x.sum())(tree["tensor00001_000"]))
    return {"error": None, "shards": shards, "total": total, "read": report.bytes_read, "of": report.bytes_total,
            "batches": report.batches, "shapes": {path: list(array.shape) for path, array in tree.items()}}

found = [load(case) for case in ARGUMENTS]
answer(found)
if any(case.get("leaves_others") for case in ARGUMENTS):
    os._exit(0)  # JAX waits at its exit for processes that are gone
"""


class Checkpoint:
    """A large file, a small one, and one that a job of several hosts wrote in blocks; their manifest and key."""

    def __init__(self, folder: Path, n_hosts: int, *, revision: str = "r1") -> None:
        self.directory = folder / "checkpoint"
        self.directory.mkdir(parents=True)
        self.n_hosts = n_hosts
        rng = np.random.default_rng(5)
        self.values = {
            LARGE: rng.standard_normal((2048, 8192), dtype=np.float32),
            SMALL: rng.integers(0, 100, (16, 8)).astype(np.float32),
            JOINED: rng.standard_normal((8, 16), dtype=np.float32),
        }
        rows, columns = HOSTS[n_hosts].values()
        blocks = [
            block for half in np.split(self.values[JOINED], rows, axis=0) for block in np.split(half, columns, axis=1)
        ]
        self.blocks = [f"tensor00002_{number:03d}" for number in range(n_hosts)]
        contents = {LARGE: self.values[LARGE], SMALL: self.values[SMALL], **dict(zip(self.blocks, blocks, strict=True))}
        for name, value in contents.items():
            (self.directory / name).write_bytes(pickled(np.ascontiguousarray(value)))
        key = SecretKey.generate()
        self.manifest = folder / "manifest"
        self.manifest.write_bytes(publishing.sign(self.directory, keys=[key], model="test/model", revision=revision))
        self.key = folder / "key.pub"
        self.key.write_bytes(key.public.to_pem())

    def copy(self, to: Path) -> Path:
        """Return another copy of the directory."""
        shutil.copytree(self.directory, to)
        return to

    def case(self, directory: Path | None = None, **more: Any) -> dict[str, Any]:
        """Return what one process is told to load."""
        hosts, local = HOSTS[self.n_hosts], LOCAL[self.n_hosts]
        return {
            "directory": str(directory or self.directory),
            "manifest": str(self.manifest),
            "key": str(self.key),
            "mesh": MESH,
            "blocks": {"files": self.blocks, "hosts": hosts, "local": local},
            **more,
        }

    def digest(self, where: str) -> str:
        """Return the digest of one shard, by what a process calls it: `path [[start, stop], [start, stop]]`."""
        path, _, ranges = where.partition(" ")
        numbers = [int(part) for part in ranges.replace("[", " ").replace("]", " ").replace(",", " ").split()]
        index = tuple(slice(*numbers[at : at + 2]) for at in range(0, len(numbers), 2))
        return hashlib.sha256(np.ascontiguousarray(self.values[path][index]).tobytes()).hexdigest()


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("count", [2, 4])
def test_a_job_of_several_processes_loads_as_one_and_refuses_as_one(tmp_path: Path, count: int) -> None:
    checkpoint = Checkpoint(tmp_path / "good", count)
    # Each host has the blocks that it wrote, and no others.
    own = [checkpoint.copy(tmp_path / f"host{number}") for number in range(count)]
    for number, directory in enumerate(own):
        for other, block in enumerate(checkpoint.blocks):
            if other != number:
                (directory / block).unlink()
    damaged = checkpoint.copy(tmp_path / "damaged")
    damage(damaged / SMALL)
    stranger = tmp_path / "stranger.pub"
    stranger.write_bytes(SecretKey.generate().public.to_pem())
    different = Checkpoint(tmp_path / "different", count, revision="r2")

    last = count - 1
    cases = [
        [
            checkpoint.case(own[number]),
            checkpoint.case(own[number], budget="64MiB"),
            checkpoint.case(damaged if number == last else own[number]),
            checkpoint.case(key=str(stranger) if number == 0 else str(checkpoint.key)),
            (different if number == last else checkpoint).case(),
            checkpoint.case(),
            checkpoint.case(on_one=True),
        ]
        for number in range(count)
    ]
    ended = run_processes(LOAD, cases)
    assert [process.code for process in ended] == [0] * count, [process.output[-3000:] for process in ended]
    plain, tight, tampered, untrusted, mixed, after, on_one = (
        [process.answer[position] for process in ended] for position in range(7)
    )
    for loaded in (plain, tight, after):
        assert [one["error"] for one in loaded] == [None] * count, loaded
        shards: dict[str, str] = {}
        for one in loaded:
            shards |= one["shards"]
        assert len([where for where in shards if where.startswith(LARGE)]) == 8
        assert shards == {where: checkpoint.digest(where) for where in shards}
        assert {one["total"] for one in loaded} == {float(checkpoint.values[SMALL].sum())}
        assert {tuple(one["shapes"][JOINED]) for one in loaded} == {(8, 16)}
    # Of four chunks each process needs one or two, and the first for the scan.
    assert all(one["read"] < 0.8 * one["of"] for one in (*plain, *tight))

    assert [one["error"] for one in tampered] == ["DigestMismatchError"] * count
    for number, one in enumerate(tampered):
        ((code, file, message),) = one["findings"]
        assert (code, file) == ("digest-mismatch", SMALL)
        assert (f"(found by process {last})" in message) == (number != last)
    assert [one["error"] for one in untrusted] == ["SignatureError"] * count
    assert {one["findings"][0][0] for one in untrusted} == {"untrusted-key"}
    assert "(found by process 0)" in untrusted[last]["findings"][0][2]
    assert [one["error"] for one in mixed] == ["HostError"] * count
    assert all("another manifest" in one["text"] or "no verdict" in one["text"] for one in mixed)
    assert all(one["seconds"] < 30 for one in (*tampered, *untrusted, *mixed))

    if jax.__version_info__ <= (0, 7, 0):
        # It has no array of which a process holds no part, and says so to all of them.
        assert {one["error"] for one in on_one} == {"ShardingError", "HostError"}
        return
    # Of what lies on one process's device, the others have an array with no part, and read what a scan needs.
    assert [len(one["shards"]) for one in on_one] == [3, *[0] * last]
    assert {tuple(one["shapes"][LARGE]) for one in on_one} == {(2048, 8192)}
    assert all(one["read"] < 0.6 * on_one[0]["read"] for one in on_one[1:])


def test_a_host_that_ends_without_a_word_is_missed_in_time(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "good", 2)
    cases = [[checkpoint.case(timeout=2, leaves_others=True)], [checkpoint.case(leaves=True)]]
    first, _ = run_processes(LOAD, cases)
    (found,) = first.answer
    assert found["error"] == "HostError", first.output[-2000:]
    assert "process 1 did not answer within 2 seconds" in found["text"]
    assert found["seconds"] < 20


def test_processes_that_were_told_different_things_are_told_so_and_none_waits(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, 2)
    plain = {**checkpoint.case(timeout=20), "blocks": None}
    cases = [
        [
            {**plain, "mesh": MESH if number == 0 else MESH[::-1]},
            {**plain, "reversed": number == 1},
            {**plain, "cast": None if number == 0 else {"": "int8"}},
            {**plain, "timeout": 20 if number == 0 else -1},
            plain,
        ]
        for number in range(2)
    ]
    ended = run_processes(LOAD, cases)
    assert [process.code for process in ended] == [0, 0], [process.output[-3000:] for process in ended]
    mesh, order, cast, time, after = ([process.answer[position] for process in ended] for position in range(5))
    for found in (mesh, order):
        # Each array alone is well-formed: only together are they two meanings of one global array.
        assert [one["error"] for one in found] == ["HostError", "HostError"]
        assert all("another set of shardings" in one["text"] for one in found)
    for found in (cast, time):
        assert [one["error"] for one in found] == ["HostError", "ConfigError"]
        assert "process 1 has no verdict: ConfigError" in found[0]["text"]
    assert [one["error"] for one in after] == [None, None]
    assert all(one["seconds"] < 15 for one in (*mesh, *order, *cast, *time))
