"""What was accepted before: the newest manifest of each stream. Bytes in, bytes out; `verifying` reads and writes them.

Signatures say who made a manifest and never whether there is a newer one, so a mirror can serve last year's. Whoever
keeps a history, or pins a digest, is safe from that; nobody else is.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from safeload.errors import ConfigError, Finding, ManifestError, RollbackError, escape
from safeload.trust import strict_json

MAX_HISTORY_BYTES: Final = 8 * 1024 * 1024
"""Longest history that is read; `MAX_STREAMS` streams with the longest names take about 5 MB."""

MAX_STREAMS: Final = 10_000
"""Most streams of one history."""

MAX_VERSION_JUMP: Final = 1000
"""Most versions between two manifests of one epoch. Whoever steals a key could sign the last version there is, after
which every honest manifest were a rollback; then the trust store's root raises the epoch, and counting starts anew."""

CLOCK_SKEW_SECONDS: Final = 300
"""How far a clock may move back without being mentioned: more than what setting it by network does, less than what
would make an expired manifest valid."""

_MAX_DEPTH: Final = 4
"""History, streams, stream make three."""

_FORMAT: Final = "%Y-%m-%dT%H:%M:%SZ"


def _real_instant(text: str) -> str:
    parse_instant(text)
    return text


def parse_instant(text: str) -> datetime:
    """Return the time that `2026-11-30T00:00:00Z` stands for.

    Raises:
        ValueError: It is of another form, or no such time exists.
    """
    return datetime.strptime(text, _FORMAT).replace(tzinfo=UTC)


def format_instant(time: datetime) -> str:
    """Return a time, with its zone, as `2026-11-30T00:00:00Z`; what is less than a second is dropped."""
    return time.astimezone(UTC).strftime(_FORMAT)


_Instant = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"),
    AfterValidator(_real_instant),
]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Stream = Annotated[str, StringConstraints(min_length=1, max_length=255)]
_Number = Annotated[int, Field(ge=1, le=strict_json.MAX_INTEGER)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Seen(_Model):
    """The newest manifest of a stream that was accepted.

    Attributes:
        epoch: Raised by the trust store's root, to start counting versions anew.
        version: Of the manifest, within its epoch.
        manifest: SHA-256 of its payload.
        trust_version: Of the newest trust store that it was accepted by; 0 if only keys were named one by one.
        seen_at: When, UTC.
    """

    epoch: _Number
    version: _Number
    manifest: _Sha256
    trust_version: Annotated[int, Field(ge=0, le=strict_json.MAX_INTEGER)]
    seen_at: _Instant


class History(_Model):
    """Proves that a history is well formed. It is not signed: who may write the file decides what is new.

    Attributes:
        spec: Version of this schema.
        clock: The latest time at which anything was accepted, UTC; None in an empty history.
        streams: What was accepted of each stream.
    """

    spec: Literal["1.0"] = "1.0"
    clock: _Instant | None = None
    streams: Annotated[dict[_Stream, Seen], Field(max_length=MAX_STREAMS)] = Field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes, *, source: str = "history") -> History:
        """Return the history that a file states.

        Args:
            data: The file's bytes: strict JSON.
            source: What to call it in messages.

        Raises:
            ConfigError: It is no such file, has an unknown field or a wrong type, or is too long.
        """
        try:
            value = strict_json.loads(data, max_bytes=MAX_HISTORY_BYTES, max_depth=_MAX_DEPTH)
            if not isinstance(value, dict) or "spec" not in value:
                raise _unusable(source, 'expected a JSON object with "spec"')
            return cls.model_validate(value)
        except ManifestError as err:
            raise _unusable(source, err.findings[0].message) from err
        except ValidationError as err:
            problem = err.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(part) for part in problem["loc"])
            raise _unusable(source, f"{escape(place)}: {escape(problem['msg'])}") from err

    def to_bytes(self) -> bytes:
        """Return the history as `parse` reads it: indented, so that a person can."""
        return json.dumps(self.model_dump(), indent=1, sort_keys=True).encode("ascii") + b"\n"

    def check(self, stream: str, *, epoch: int, version: int, manifest: str, trust_version: int = 0) -> None:
        """Return if a manifest may follow what was accepted of its stream before: that very one, or a later one.

        Args:
            stream: The manifest's.
            epoch: The manifest's.
            version: The manifest's.
            manifest: SHA-256 of its payload.
            trust_version: Of the trust store that vouches for it; 0 if there is none, which then is not compared.

        Raises:
            RollbackError: "rollback": it is older. "equivocation": it is another of the same epoch and version.
                "fast-forward": it is later by more than `MAX_VERSION_JUMP` versions. "trust-rollback": the trust store
                is older than the one that was used before, and may still trust what was revoked since.
        """
        seen = self.streams.get(stream)
        if seen is None:
            return
        name = escape(stream)
        if 0 < trust_version < seen.trust_version:
            raise _refusal(
                "trust-rollback",
                f"expected version {seen.trust_version} or later of the trust store, as used for {name} before, "
                f"found version {trust_version}",
                "name the newest trust store with --trust; `safeload trust show` says which version it is",
            )
        if (epoch, version) < (seen.epoch, seen.version):
            raise _refusal(
                "rollback",
                f"expected {_numbered(seen.epoch, seen.version)} or later of {name}, accepted on {seen.seen_at}, "
                f"found {_numbered(epoch, version)}: an older manifest",
                "get the newest manifest from its publisher; to go back on purpose, leave out --history and give "
                f"--pin sha256:{manifest}",
            )
        if (epoch, version) == (seen.epoch, seen.version) and manifest != seen.manifest:
            raise _refusal(
                "equivocation",
                f"expected sha256:{seen.manifest} as {_numbered(epoch, version)} of {name}, accepted on "
                f"{seen.seen_at}, found sha256:{manifest}: two manifests with one number",
                "show both to their publisher: one is a mistake, or a key is in other hands",
            )
        if epoch == seen.epoch and version > seen.version + MAX_VERSION_JUMP:
            raise _refusal(
                "fast-forward",
                f"expected {_numbered(epoch, seen.version + MAX_VERSION_JUMP)} of {name} at most, "
                f"found {_numbered(epoch, version)}",
                "ask its publisher; if the jump is honest, they sign with a higher epoch, which the trust store grants",
            )

    def advanced(
        self, stream: str, *, epoch: int, version: int, manifest: str, now: datetime, trust_version: int = 0
    ) -> History:
        """Return the history after a manifest was accepted that `check` lets pass.

        Args:
            stream: The manifest's.
            epoch: The manifest's.
            version: The manifest's.
            manifest: SHA-256 of its payload.
            now: The time, with its zone.
            trust_version: Of the trust store; what was recorded never falls.

        Raises:
            ConfigError: There is no room for another stream.
        """
        before = self.streams.get(stream)
        if before is None and len(self.streams) >= MAX_STREAMS:
            raise ConfigError(
                f"the history has {MAX_STREAMS} streams, and no room for {escape(stream)}",
                hint="keep another for it: --history FILE",
            )
        time = format_instant(now)
        seen = Seen(
            epoch=epoch,
            version=version,
            manifest=manifest,
            trust_version=max(trust_version, before.trust_version if before else 0),
            seen_at=time,
        )
        # Equal lengths and one zone: the order of the texts is that of the times.
        return History(clock=max(time, self.clock or time), streams={**self.streams, stream: seen})

    def clock_moved_back(self, now: datetime) -> int:
        """Return by how many seconds the clock is behind the latest time on record; 0 within `CLOCK_SKEW_SECONDS`."""
        if self.clock is None:
            return 0
        behind = int((parse_instant(self.clock) - now).total_seconds())
        return behind if behind > CLOCK_SKEW_SECONDS else 0


def _numbered(epoch: int, version: int) -> str:
    return f"epoch {epoch}, version {version}"


def _refusal(code: str, message: str, hint: str) -> RollbackError:
    return RollbackError(Finding(code, message, hint=hint))


def _unusable(source: str, message: str) -> ConfigError:
    return ConfigError(
        f"history {escape(source)}: {message}",
        hint="restore it from a copy; without it nothing is known of older manifests, so do not just delete it",
    )
