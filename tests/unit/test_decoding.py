"""Claims of `safeload.decoding`: arrays are views on the staged bytes, and containers are as in the file."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safeload.decoding import HostTensor, arrays, decode
from safeload.policy import load_policy
from safeload.records import QuantizedWeight8bit, Record
from safeload.scanning import AdmittedCheckpoint, admit
from safeload.staging import stage
from tests.simulator import NESTED, PLAIN, QUANTIZED, CheckpointSimulator, pickled


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointSimulator:
    return CheckpointSimulator(tmp_path)


def admitted(checkpoint: CheckpointSimulator) -> AdmittedCheckpoint:
    staged = stage(checkpoint.directory, checkpoint.trusted())
    return admit(staged, policy=load_policy(checkpoint.policy))


def address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def tensors(tree: Any) -> list[HostTensor]:
    match tree:
        case HostTensor():
            return [tree]
        case dict() | Record():
            return [tensor for _, child in tree.items() for tensor in tensors(child)]
        case list() | tuple():
            return [tensor for child in tree for tensor in tensors(child)]
        case _:
            return []


def test_every_array_lies_in_the_stage_where_its_row_says(checkpoint: CheckpointSimulator) -> None:
    proof = admitted(checkpoint)
    found = tensors(decode(proof))
    assert len(found) == 6
    for tensor in found:
        stage_start = address(proof.staged.files[tensor.file].view)
        assert tensor.array.__array_interface__["data"][0] == stage_start + tensor.spec.extent.offset
        assert tensor.array.nbytes == tensor.spec.extent.nbytes
        assert not tensor.array.flags.owndata
        assert not tensor.array.flags.writeable


def test_an_array_is_of_the_dtype_shape_and_order_of_its_row(checkpoint: CheckpointSimulator) -> None:
    tree = decode(admitted(checkpoint))[NESTED]
    fortran, big = tree["fortran"].array, tree["big"].array
    assert fortran.flags.f_contiguous
    assert not fortran.flags.c_contiguous
    assert big.dtype == np.dtype(">i4")
    np.testing.assert_array_equal(fortran, checkpoint.values[NESTED]["fortran"])
    np.testing.assert_array_equal(big, checkpoint.values[NESTED]["big"])


def test_a_text_protocol_gives_the_same_array(checkpoint: CheckpointSimulator) -> None:
    value = np.asfortranarray(np.arange(256, dtype=">u2").reshape(16, 16))
    for protocol in range(6):
        checkpoint.write("a", pickled(value, protocol))
        checkpoint.sign()
        array = decode(admitted(checkpoint))["a"].array
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, value)


def test_a_tensor_is_named_by_its_file_and_its_place_in_it(checkpoint: CheckpointSimulator) -> None:
    tree = decode(admitted(checkpoint))
    assert [tensor.path for tensor in tensors(tree)] == [
        f"{NESTED}/fortran",
        f"{NESTED}/big",
        f"{NESTED}/parts/0",
        PLAIN,
        f"{QUANTIZED}/weight",
        f"{QUANTIZED}/scales",
    ]


def test_a_record_is_an_instance_of_its_record_class(checkpoint: CheckpointSimulator) -> None:
    record = decode(admitted(checkpoint))[QUANTIZED]
    assert type(record) is QuantizedWeight8bit
    assert isinstance(record.weight, HostTensor)  # type: ignore[attr-defined] # made at run time
    loaded = arrays(record)
    assert type(loaded) is QuantizedWeight8bit
    assert loaded.shape == (8, 24)


def test_containers_and_plain_values_are_as_in_the_file(checkpoint: CheckpointSimulator) -> None:
    plain = {"t": (1, [2.5, None], {3: True, None: "x", 0.5: b"bytes"}), "empty": [(), {}, []], "big": 2**200, "b": b""}
    checkpoint.write("plain", pickled({**plain, "o": OrderedDict(k=1), "a": np.ones(2)}))
    checkpoint.sign()
    tree = decode(admitted(checkpoint))["plain"]
    assert {key: tree[key] for key in plain} == plain
    assert type(tree["t"]) is tuple
    assert type(tree["o"]) is dict
    assert tree["o"] == {"k": 1}


def test_arrays_takes_a_tree_apart_and_leaves_the_rest_as_it_is(checkpoint: CheckpointSimulator) -> None:
    tree = decode(admitted(checkpoint))[NESTED]
    loaded = arrays(tree)
    assert loaded["step"] == 12
    assert loaded["parts"][1] == ("adam", None, True, 0.5)
    assert loaded["parts"][0] is tree["parts"][0].array


def test_one_array_in_two_places_is_one_memory(checkpoint: CheckpointSimulator) -> None:
    shared = np.arange(5.0)
    checkpoint.write("tied", pickled({"a": shared, "b": shared}))
    checkpoint.sign()
    tree = decode(admitted(checkpoint))["tied"]
    assert np.shares_memory(tree["a"].array, tree["b"].array)
    assert (tree["a"].path, tree["b"].path) == ("tied/a", "tied/b")


def test_a_host_tensor_is_frozen(checkpoint: CheckpointSimulator) -> None:
    tensor = decode(admitted(checkpoint))[PLAIN]
    with pytest.raises(dataclasses.FrozenInstanceError):
        tensor.array = np.zeros(1)


def test_decoding_opens_no_file(checkpoint: CheckpointSimulator) -> None:
    proof = admitted(checkpoint)
    checkpoint.directory.rename(checkpoint.outside)
    np.testing.assert_array_equal(decode(proof)[PLAIN].array, checkpoint.values[PLAIN])


def test_bytes_in_many_places_are_one_object(tmp_path: Path) -> None:
    checkpoint = CheckpointSimulator(tmp_path)
    shared = b"x" * 1000
    checkpoint.add("shared.pkl", pickled([shared, [shared, shared]]))
    checkpoint.sign()
    tree = arrays(
        decode(admit(stage(checkpoint.directory, checkpoint.trusted()), policy=load_policy("numpy-quantized")))
    )
    first, (second, third) = tree["shared.pkl"]
    assert first == shared
    assert first is second is third
