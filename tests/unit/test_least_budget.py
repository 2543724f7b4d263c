"""A plan says the least memory budget of a load: at it a real load works, and at one byte less it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from safeload import assembling, loading, planning
from safeload.digests import CHUNK_BYTES
from safeload.errors import StagingError
from safeload.formats.safetensors_writing import write_safetensors
from safeload.manifest import Manifest
from safeload.placing import SLACK_BYTES
from safeload.publishing import sign
from safeload.records import QuantizedWeight8bit
from safeload.signing import sign_manifest
from safeload.trust.dsse import Envelope
from safeload.trust.keys import SecretKey
from tests.simulator import pickled
from tests.tensorflow_sample import Tensor, bundle

KEY = SecretKey.generate()
MESH = {"data": 2, "model": 4}
SPECS: Mapping[str, tuple[Any, ...]] = {
    "rows": (("data", "model"),),
    "columns": (None, "model"),
    "grid": ("data", "model"),
    "replicated": (),
}


LARGE = (2048, 8192)
"""64 MiB of float32: with the header and the tail, parts of five chunks."""


def values(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape).astype(dtype, copy=False)


def npy(value: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type] # numpy's stub wants another keyword
    return buffer.getvalue()


def safetensors(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    write_safetensors(buffer, arrays)
    return buffer.getvalue()


def shards() -> dict[str, bytes]:
    """Return two files with their index, as transformers writes them, and one that is no tensor's."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    return {
        names[0]: safetensors(a=values((2048, 6144))),
        names[1]: safetensors(b=values((1024, 2048))),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": b"{}",
    }


def record() -> Any:
    weight = np.zeros((8, 2048, 4096), np.int8)
    return QuantizedWeight8bit(weight=weight, scales=values((8, 8, 4096), ml_dtypes.bfloat16))  # type: ignore[call-arg]


CHECKPOINTS: Mapping[str, Callable[[], dict[str, bytes]]] = {
    "npy": lambda: {"x.npy": npy(values(LARGE))},
    "fortran": lambda: {"x.npy": npy(np.asfortranarray(values(LARGE)))},
    "big-endian": lambda: {"x.npy": npy(values(LARGE, ">f4"))},
    "npz": lambda: {"x.npz": npz(large=values(LARGE), small=values((8,)))},
    "safetensors": lambda: {"x.safetensors": safetensors(a=values((512, 8192)), b=values((8,)), c=values(LARGE))},
    "pickle": lambda: {"x": pickled(record())},
    "bundle": lambda: bundle("m", {n: Tensor(1, (1024, 4096), values((1024, 4096)).tobytes()) for n in "uvw"}),
    "shards": shards,
    "small": lambda: {"x.npy": npy(values((8, 8))), "y.npy": npy(values((64, 64)))},
    "no tensors": lambda: {"x.npy": npy(values((8, 8))), "README.md": b"# A model\n" * 5000},
}


@dataclasses.dataclass(frozen=True)
class Signed:
    """A checkpoint and its manifest."""

    directory: Path
    envelope: bytes

    def load(self, spec: tuple[Any, ...], budget: int) -> Any:
        """Load it with a real sharding over eight devices."""
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), tuple(MESH))
        place = lambda _path, shape: NamedSharding(mesh, PartitionSpec(*fitting(spec, shape)))  # noqa: E731
        return loading.load(
            self.directory, manifest=self.envelope, trust=KEY.public, shardings=place, memory_budget=budget
        )

    def plan(self, spec: tuple[Any, ...], budget: int | None = None) -> planning.LoadPlan:
        """Plan the same load."""
        inventory = planning.inventory_of_manifest(self.manifest, source="a test")
        shapes = {tensor.rule_path: tensor.shape for tensor in inventory.tensors}
        rules = lambda path: fitting(spec, shapes[path])  # noqa: E731
        return planning.plan(inventory, mesh=MESH, rules=rules, memory_budget=budget)

    @property
    def manifest(self) -> Manifest:
        """What was signed."""
        return Manifest.parse(Envelope.parse(self.envelope).payload)


def fitting(spec: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the spec for what has dimensions to cut, along its last ones; all else is replicated."""
    return () if len(shape) < 2 else (None,) * (len(shape) - 2) + spec


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Signed:
    directory = tmp_path_factory.mktemp("least") / "checkpoint"
    directory.mkdir()
    for name, data in CHECKPOINTS[request.param]().items():
        (directory / name).write_bytes(data)
    return Signed(directory, sign(directory, keys=[KEY], model="m", revision="1"))


def assert_least(signed: Signed, spec: tuple[Any, ...], least: int) -> None:
    with pytest.raises(StagingError, match="bytes at once") as caught:
        signed.load(spec, least - 1)
    # What the refusal asks for is what the plan says.
    assert f"give a memory budget of {least:,} bytes" in str(caught.value.hint)
    assert signed.load(spec, least)


@pytest.mark.parametrize("name", SPECS)
def test_a_load_works_with_the_planned_budget_and_not_with_a_byte_less(checkpoint: Signed, name: str) -> None:
    spec = SPECS[name]
    least = checkpoint.plan(spec).least_budget
    assert_least(checkpoint, spec, least.on_host)
    assert checkpoint.plan(spec, least.nbytes).findings == ()
    findings = checkpoint.plan(spec, least.on_host - 1).findings
    assert {finding.code for finding in findings} == {"does-not-fit-budget"}
    assert any(f"raise the budget to {least.nbytes} bytes or more" in str(finding.hint) for finding in findings)


@pytest.mark.parametrize("name", ["columns"])
def test_so_it_is_with_devices_that_have_memory_of_their_own(
    checkpoint: Signed, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = jax.device_put

    def put(data: Any, *where: Any) -> Any:
        return genuine([np.array(part) for part in data] if isinstance(data, list) else np.array(data), *where)

    monkeypatch.setattr(jax, "device_put", put)
    monkeypatch.setattr(assembling, "COPYING_PLATFORMS", frozenset({"cpu"}))
    spec = SPECS[name]
    least = checkpoint.plan(spec).least_budget
    assert_least(checkpoint, spec, least.nbytes)
    assert checkpoint.plan(spec, least.nbytes - 1).findings


def test_without_digests_of_chunks_a_file_is_read_whole(tmp_path: Path) -> None:
    data = npy(values(LARGE))
    (tmp_path / "x.npy").write_bytes(data)
    manifest = Signed(tmp_path, sign(tmp_path, keys=[KEY], model="m", revision="1")).manifest
    files = tuple(dataclasses.replace(file, chunks=None) for file in manifest.files)
    without = manifest.model_copy(update={"files": files, "hash": None})
    signed = Signed(tmp_path, sign_manifest(without, [KEY]))
    least = signed.plan(SPECS["rows"]).least_budget
    assert least.nbytes == len(data) + SLACK_BYTES
    assert_least(signed, SPECS["rows"], least.nbytes)
    (finding,) = signed.plan(SPECS["rows"], least.nbytes - 1).findings
    assert "no digests of its chunks" in finding.message
    assert "sign the file again" in str(finding.hint)


def test_the_refusal_of_a_column_cut_says_that_its_chunks_are_what_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(npy(values(LARGE)))
    signed = Signed(tmp_path, sign(tmp_path, keys=[KEY], model="m", revision="1"))
    budget = 32 * 1024 * 1024  # twice and four times a device's part
    with pytest.raises(StagingError, match=r"the signed chunks that cover a shard of shape \(2048, 2048\)") as caught:
        signed.load(SPECS["columns"], budget)
    assert "along an earlier dimension alone" in str(caught.value.hint)
    with pytest.raises(StagingError, match=r"the signed chunks that cover a shard of shape \(256, 8192\)") as caught:
        signed.load(SPECS["rows"], budget)
    assert "dimension" not in str(caught.value.hint)


def test_rows_take_less_than_all_and_columns_take_all(tmp_path: Path) -> None:
    data = npy(values(LARGE))
    (tmp_path / "x.npy").write_bytes(data)
    signed = Signed(tmp_path, sign(tmp_path, keys=[KEY], model="m", revision="1"))
    assert signed.plan(SPECS["columns"]).least_budget.on_host == len(data) + SLACK_BYTES
    # Two chunks that a part of 8 MiB lies in, and those of the header and of the tail: of these, two are neighbors.
    tail = len(data) % CHUNK_BYTES
    assert signed.plan(SPECS["rows"]).least_budget.on_host == 3 * CHUNK_BYTES + tail + 2 * SLACK_BYTES
