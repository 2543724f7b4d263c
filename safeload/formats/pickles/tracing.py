"""The pickle machine with a protocol of what it did: the very run that gives the verdict, one step an opcode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from safeload.errors import RejectedError, escape
from safeload.formats import Source
from safeload.formats.pickles.constructors import describe
from safeload.formats.pickles.machine import Machine
from safeload.formats.pickles.opcodes import OPCODES
from safeload.formats.pickles.symbols import REFUSED, Global, Payload
from safeload.formats.pickles.torch_machine import TorchMachine
from safeload.policy import Policy

_MAX_SHOWN: Final = 80
"""Characters of a string that a step shows: a command line fits."""


@dataclass(frozen=True, slots=True)
class Step:
    """One opcode that was run, or the one that could not be.

    Attributes:
        offset: Where it stands, in bytes.
        opcode: Its name; the byte where it is none.
        nbytes: How long it is with its argument, payload included.
        marks: How many marks were open before it.
        before: How many values lay above the last mark before it.
        after: How many after it.
        result: What lies on top of the stack after it, in a few words; empty where it left nothing new.
        refusal: Why the run, or what was named, is refused here; None where it is not.
    """

    offset: int
    opcode: str
    nbytes: int
    marks: int
    before: int
    after: int
    result: str
    refusal: str | None


class TracingMachine(Machine):
    """Runs as `Machine` does, and tells each step."""

    def __init__(self, source: Source, policy: Policy, tell: Callable[[Step], None], **how: Any) -> None:
        super().__init__(source, policy, **how)
        self._tell = tell

    def _handlers(self, newest: int) -> tuple[Callable[[Machine], None] | None, ...]:
        if self._at:
            self._report("PROTO", (0, 0, 0), f"protocol {newest}")
        plain = super()._handlers(newest)
        return tuple(handler and partial(self._traced, handler) for handler in plain)

    def _traced(self, handler: Callable[[Machine], None], _: Machine) -> None:
        before = self._start, len(self._outer), len(self._stack)
        byte = self._window[self._at - 1]
        name = OPCODES[byte].name if byte in OPCODES else f"{byte:#04x}"
        n_findings = len(self.findings)
        try:
            handler(self)
        except RejectedError as err:
            self._report(name, before, refusal=err.findings[0].message)
            raise
        refused = self.findings[n_findings].message if len(self.findings) > n_findings else None
        self._report(name, before, self._result(name), refused)

    def _stop(self) -> object:
        before = self._start, len(self._outer), len(self._stack)
        try:
            result = super()._stop()
        except RejectedError as err:
            self._report("STOP", before, refusal=err.findings[0].message)
            raise
        self._report("STOP", before, describe(result))
        return result

    def _report(self, opcode: str, before: tuple[int, int, int], result: str = "", refusal: str | None = None) -> None:
        start, marks, values = before
        nbytes = self._base + self._at - start
        self._tell(Step(start, opcode, nbytes, marks, values, len(self._stack), result, refusal))

    def _result(self, opcode: str) -> str:
        if not self._stack:
            return ""
        top = self._stack[-1]
        if top is REFUSED:
            return "what was refused"
        shown = describe(top)
        if isinstance(top, Payload) and top.extent.inline is not None:
            # A string of Python 2, for people to read: what a hostile pickle hands on is often one.
            return f"{shown}: '{escape(top.extent.inline.decode('latin-1'), limit=_MAX_SHOWN)}'"
        if opcode in {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}:
            return f"remembers {shown}"
        if opcode in {"GLOBAL", "STACK_GLOBAL"} and isinstance(top, Global):
            reasons = (entry.reason for entry in self._rules.globals if str(top) in entry.names)
            return f"{shown}: {top.record.reason if top.record is not None else next(reasons, '')}"
        return shown


class TracingTorchMachine(TracingMachine, TorchMachine):
    """Runs as `TorchMachine` does, and tells each step."""
