"""Claims of `safeload.records`: one frozen class for each declared record, with its fields and nothing else."""

from __future__ import annotations

import dataclasses
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from safeload import records
from safeload.records import QuantizedWeight8bit, Record, on_record_class, record_class


def test_a_declaration_has_one_class() -> None:
    assert record_class("QuantizedWeight8bit", ("weight", "scales")) is QuantizedWeight8bit


def test_other_fields_or_another_name_make_another_class() -> None:
    made = {record_class(name, fields) for name in ("A", "B") for fields in (("x",), ("y",), ("x", "y"), ("y", "x"))}
    assert len(made) == 8


def test_a_record_has_its_fields_in_declared_order_and_no_dict() -> None:
    record = record_class("Pair", ("second", "first"))(second=1, first=2)  # type: ignore[call-arg]
    assert list(record.items()) == [("second", 1), ("first", 2)]
    assert not hasattr(record, "__dict__")
    assert type(record).__name__ == "Pair"
    assert isinstance(record, Record)


def test_a_record_is_frozen() -> None:
    record = QuantizedWeight8bit(weight=1, scales=2)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.weight = 3  # type: ignore[attr-defined]
    # Which of the two it is depends on the Python: the name is neither a field nor a slot.
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        record.other = 3  # type: ignore[attr-defined]


def test_records_are_compared_by_identity_because_arrays_have_no_truth() -> None:
    array = np.ones(2)
    one, other = (QuantizedWeight8bit(weight=array, scales=array) for _ in range(2))  # type: ignore[call-arg]
    assert one != other
    assert one == one  # noqa: PLR0124 - that is the claim
    assert len({one, other}) == 2


def test_the_shape_is_that_of_the_first_field() -> None:
    record = QuantizedWeight8bit(weight=np.ones((4, 3)), scales=np.ones((2, 3)))  # type: ignore[call-arg]
    assert record.shape == (4, 3)


def test_threads_get_the_same_class() -> None:
    gate = threading.Barrier(8)

    def make(_: int) -> type[Record]:
        gate.wait()
        return record_class("Raced", ("a", "b"))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make, range(8)))) == 1


def test_an_observer_sees_each_class_once_early_or_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_observers", [])
    monkeypatch.setattr(records, "_classes", {})
    seen: list[type[Record]] = []
    early = record_class("Early", ("a",))
    on_record_class(seen.append)
    late = record_class("Late", ("a",))
    record_class("Late", ("a",))
    assert seen == [early, late]


def test_a_record_keeps_nothing_else_alive() -> None:
    array = np.ones(3)
    record = QuantizedWeight8bit(weight=array, scales=array)  # type: ignore[call-arg]
    assert set(map(id, gc.get_referents(record))) <= {id(array), id(QuantizedWeight8bit)}


def test_a_field_may_have_the_name_of_what_every_record_has() -> None:
    packed: Any = record_class("PackedTensor", ("dtype", "shape", "packed"))
    made = packed(dtype="F4", shape=(2, 3), packed=np.zeros(3, np.uint8))
    assert made.shape == (2, 3)
    assert [name for name, _ in made.items()] == ["dtype", "shape", "packed"]
