"""Agree: several processes of one JAX job load together, and all of them accept, or none does.

Each process verifies what it reads itself. What it says to the others is only how that ended, through the key-value
store of the job's coordination service, which needs no array and no collective: one that raises while others wait in a
collective would leave them there for ever. A process believes another when that one refuses, and never takes its word
for bytes that it uses itself. The other processes of the job are no adversaries here: they run the same program, and
could end the job by other means.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from safeload import errors
from safeload.errors import ConfigError, Finding, HostError, ManifestError, OperationalError, RejectedError, escape
from safeload.report import Progress
from safeload.trust import strict_json

HOST_TIMEOUT_SECONDS: Final = 600.0
"""How long a process that is done waits for the slowest one: hosts read at different speeds, and a job that waits for
longer than this for one of them is better started again."""

_SLICE_SECONDS: Final = 1.0
"""How long a process waits at a time, so that it can be interrupted, and sees that another one refused."""

_FAREWELL_SECONDS: Final = 20.0
"""How long a process that refuses stays, so that the others can read why: it may be the one that runs the service."""

_MAX_OUTCOME_BYTES: Final = 256 * 1024
_MAX_FINDINGS: Final = 8
_MAX_TEXT: Final = 1024
"""What one process says to the others is for people to read; all findings are in its own error."""

_numbers = count()
"""Each load of a job has a number; all processes load the same in the same order, as they do all things in JAX."""

_Text = Annotated[str, Field(max_length=_MAX_TEXT)]


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class _SaidFinding(_Said):
    code: _Text
    message: _Text
    file: _Text | None = None
    offset: Annotated[int, Field(ge=0)] | None = None
    hint: _Text | None = None


class _Outcome(_Said):
    """How a load ended in one process.

    Attributes:
        process: Its number.
        ended: "accepted"; "rejected", with findings; "failed", with a message; "stopped" because another one was not
            accepted.
        error: Name of the class of error.
        message: Why there is no verdict.
        findings: The first findings.
        claims: What has to be the same in all processes, by what it is called.
    """

    process: Annotated[int, Field(ge=0)]
    ended: Literal["accepted", "rejected", "failed", "stopped"]
    error: _Text | None = None
    message: _Text | None = None
    findings: Annotated[list[_SaidFinding], Field(max_length=_MAX_FINDINGS)] = []
    claims: dict[str, _Text] = {}


class Agreement:
    """One load of all processes of a job.

    Attributes:
        process: Number of this process.
        n_processes: How many there are; with one there is nothing to agree on.
    """

    def __init__(self, client: Any, process: int, n_processes: int, *, seconds: float = HOST_TIMEOUT_SECONDS) -> None:
        """Begin.

        Args:
            client: The client of the job's coordination service; None in a job of one process.
            process: Number of this process.
            n_processes: How many there are.
            seconds: How long to wait for another process once this one is done.
        """
        self.process, self.n_processes = process, n_processes
        self._client = client
        self._seconds = seconds
        self._folder = f"safeload/{next(_numbers)}" if client is not None else ""
        self._claims: dict[str, str] = {}
        self._looked = time.monotonic()
        self._stopped = False

    @property
    def _others(self) -> list[int]:
        return [process for process in range(self.n_processes) if process != self.process]

    def claim(self, what: str, value: str) -> None:
        """State something that has to be the same in all processes.

        Args:
            what: What it is, for people.
            value: A digest, or some other short text.
        """
        self._claims[what] = value

    def look(self) -> None:
        """Raise what another process raised, if there is one by now. At most once a second it costs anything.

        Raises:
            RejectedError: Another process refused; the same class and findings as there.
            HostError: Another process has no verdict.
        """
        now = time.monotonic()
        if self._client is None or now - self._looked < _SLICE_SECONDS:
            return
        self._looked = now
        self._raise_if_stopped()

    def watching(self, progress: Progress | None) -> Progress | None:
        """Return a progress callback that looks for the other processes as well."""
        if self._client is None:
            return progress

        def watched(phase: str, done: int, total: int) -> None:
            self.look()
            if progress is not None:
                progress(phase, done, total)

        return watched

    def settle(self) -> None:
        """Say that this process accepts, and return once all the others have said the same.

        Raises:
            RejectedError: Another process refused; the same class and findings as there.
            HostError: Another process did not answer in time, has no verdict, or loads something else.
        """
        if self._client is None:
            return
        self._say(_Outcome(process=self.process, ended="accepted", claims=self._claims))
        deadline = time.monotonic() + self._seconds
        for other in self._others:
            outcome = self._parse(self._await(f"{self._folder}/ended/{other}", other, deadline), f"process {other}")
            if outcome.ended != "accepted":
                # It says itself why, or was stopped by the one that does.
                self._raise_if_stopped()
                raise self._error(outcome)
            for what, value in self._claims.items():
                if outcome.claims.get(what) != value:
                    raise HostError(
                        f"process {other} loads another {what} than process {self.process}",
                        hint="give every process the same manifest, shardings and options",
                    )

    def refuse(self, err: BaseException) -> None:
        """Tell the other processes that this one does not accept, and stay until they know."""
        if self._client is None:
            return
        with suppress(Exception):  # what counts is the error that is on its way
            outcome = self._outcome_of(err)
            if not self._stopped:
                self._set(f"{self._folder}/stop", _dump(outcome))
            self._say(outcome)
            self._set(f"{self._folder}/seen/{self.process}", "1")
            if isinstance(err, Exception) and not self._stopped:
                deadline = time.monotonic() + max(0.0, min(_FAREWELL_SECONDS, self._seconds))
                for other in self._others:
                    self._await(f"{self._folder}/seen/{other}", other, deadline, stops=False)

    # ---------------------------------------------------------------- what is said

    def _outcome_of(self, err: BaseException) -> _Outcome:
        name = type(err).__name__
        if self._stopped:
            return _Outcome(process=self.process, ended="stopped")
        if isinstance(err, RejectedError):
            findings = [
                _SaidFinding(
                    code=_short(f.code),
                    message=_short(f.message),
                    file=None if f.file is None else _short(f.file),
                    offset=f.offset,
                    hint=None if f.hint is None else _short(f.hint),
                )
                for f in err.findings[:_MAX_FINDINGS]
            ]
            return _Outcome(process=self.process, ended="rejected", error=name, findings=findings)
        message = err.message if isinstance(err, OperationalError) else name
        return _Outcome(process=self.process, ended="failed", error=name, message=_short(message))

    def _error(self, outcome: _Outcome) -> RejectedError | HostError:
        """Return what this process raises for what another one said."""
        self._stopped = True
        where = f"process {outcome.process}"
        rejection = _REJECTIONS.get(outcome.error or "")
        if outcome.ended == "rejected" and rejection is not None and outcome.findings:
            return rejection(
                *(
                    Finding(f.code, f"{f.message} (found by {where})", file=f.file, offset=f.offset, hint=f.hint)
                    for f in outcome.findings
                )
            )
        why = escape(f"{outcome.error}: {outcome.message}" if outcome.error else outcome.ended, limit=_MAX_TEXT)
        return HostError(f"{where} has no verdict: {why}", hint=f"look at the output of {where}")

    def _parse(self, text: str, where: str) -> _Outcome:
        try:
            said = strict_json.loads(text.encode(), max_bytes=_MAX_OUTCOME_BYTES, max_depth=4)
            outcome = _Outcome.model_validate(said)
        except (ManifestError, ValidationError, UnicodeEncodeError) as err:
            self._stopped = True
            raise HostError(
                f"{where} said what is no outcome of a load", hint="run the same safeload in all processes"
            ) from err
        return outcome

    # ---------------------------------------------------------------- the store

    def _say(self, outcome: _Outcome) -> None:
        self._set(f"{self._folder}/ended/{self.process}", _dump(outcome))

    def _set(self, key: str, value: str) -> None:
        try:
            self._client.key_value_set(key, value)
        except Exception as err:
            if "ALREADY_EXISTS" not in str(err):  # two processes refused at one time, and the first counts
                raise self._unreachable(err) from err

    def _raise_if_stopped(self) -> None:
        try:
            text = self._client.key_value_try_get(f"{self._folder}/stop")
        except AttributeError:  # a JAX before 0.4.36: then it is seen at the end
            return
        except Exception as err:
            if "NOT_FOUND" in str(err):
                return
            raise self._unreachable(err) from err
        raise self._error(self._parse(text, "another process"))

    def _await(self, key: str, process: int, deadline: float, *, stops: bool = True) -> str:
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                value: str = self._client.blocking_key_value_get(key, max(1, int(min(left, _SLICE_SECONDS) * 1000)))
            except Exception as err:
                if "DEADLINE_EXCEEDED" not in str(err):
                    raise self._unreachable(err) from err
                if left <= 0:
                    raise HostError(
                        f"process {process} did not answer within {self._seconds:g} seconds",
                        hint="look at its output; it may have ended, or read from a slower disk",
                    ) from err
                if stops:
                    self._raise_if_stopped()
            else:
                return value

    def _unreachable(self, err: Exception) -> HostError:
        return HostError(
            f"the coordination service of the job cannot be reached: {escape(str(err))}",
            hint="look at the output of process 0, which runs it",
        )


def _short(text: str) -> str:
    """Return what can be said of a text: names of files may have bytes in them that are no text."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")[:_MAX_TEXT]


def _dump(outcome: _Outcome) -> str:
    return json.dumps(outcome.model_dump(mode="json"))


def _below(cls: type[RejectedError]) -> Iterator[type[RejectedError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _below(child)


_REJECTIONS: Final = {cls.__name__: cls for cls in _below(errors.RejectedError)}
"""What another process can make this one raise: a rejection of ours, and nothing else."""

_current: ContextVar[Agreement | None] = ContextVar("agreement", default=None)


@contextmanager
def together(*, seconds: float = HOST_TIMEOUT_SECONDS, connect: Callable[[], Any] | None = None) -> Iterator[Agreement]:
    """Let all processes of the job do what is in the context, and leave it only if all of them accept.

    Every process has to enter it, in the same order as other such contexts. One within another is the outer one. In a
    job of one process it does nothing.

    Args:
        seconds: How long to wait for another process once this one is done.
        connect: Returns the client, this process's number and how many there are; for tests.

    Raises:
        RejectedError: Another process refused; the same class and findings as there, naming the process.
        HostError: Another process did not answer in time, has no verdict, or loads something else.
        ConfigError: The time to wait is none.
    """
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    client, process, n_processes = (connect or _connect)()
    agreement = Agreement(client, process, n_processes, seconds=seconds)
    token = _current.set(agreement)
    try:
        _require_time(seconds)
        yield agreement
        agreement.settle()
    except BaseException as err:
        agreement.refuse(err)
        raise
    finally:
        _current.reset(token)


def _require_time(seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"expected a number of seconds to wait for other processes, found {seconds}")


def _connect() -> tuple[Any, int, int]:
    try:
        # JAX has no public name for it; `jax.experimental.multihost_utils` reads it from here as well.
        from jax._src import distributed

        state = distributed.global_state
        found = state.client, state.process_id, state.num_processes
    except (AttributeError, ImportError) as err:
        raise ConfigError(
            f"this JAX does not show its coordination service: {escape(str(err))}", hint="use another version of JAX"
        ) from err
    return (None, 0, 1) if found[0] is None or found[2] < 2 else found
