"""Records: the frozen classes that stand for the classes a policy declares as data.

A record has exactly the declared fields and no behavior of the class that the file names. `assembling` registers
every record class as a JAX pytree, so that a record's fields are leaves.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Record:
    """Base of all record classes: frozen, compared by identity, iterable as (field, value) pairs."""

    __slots__ = ()

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield each field's name and value, in declared order."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type] # every subclass is made a dataclass below
            yield field.name, getattr(self, field.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first field; that of the weight for a quantised one, as model code expects of a parameter."""
        _, first = next(self.items())
        return tuple(first.shape)


_classes: dict[tuple[str, tuple[str, ...]], type[Record]] = {}
_observers: list[Callable[[type[Record]], None]] = []
_lock = threading.Lock()


def record_class(name: str, fields: tuple[str, ...]) -> type[Record]:
    """Return the record class of this name and these fields; the same class each time.

    Args:
        name: The class's name, as the policy declares it.
        fields: Its fields, in declared order.
    """
    with _lock:
        made = _classes.get((name, fields))
        if made is None:
            # Each with a field of its own, or what the base has under that name (`shape`) would be its default.
            stated = [(field, Any, dataclasses.field()) for field in fields]
            made = dataclasses.make_dataclass(name, stated, bases=(Record,), frozen=True, eq=False, slots=True)
            made.__module__ = __name__
            made.__doc__ = f"A record with the fields {', '.join(fields)}."
            _classes[name, fields] = made
            for observe in _observers:
                observe(made)
        return made


def on_record_class(observe: Callable[[type[Record]], None]) -> None:
    """Call `observe` for every record class made so far, and for each that will be made."""
    with _lock:
        _observers.append(observe)
        for made in _classes.values():
            observe(made)


QuantizedWeight8bit = record_class("QuantizedWeight8bit", ("weight", "scales"))
"""Grok-1's quantised weight: `weight` int8 `[.., K, N]` and `scales` float `[.., G, N]`, one scale for each of G
groups of rows: the value is `weight * repeat(scales, K // G, axis=-2)`."""
