"""Quarantine: where refused files wait for somebody to look at them, under names that no loader picks up."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from safeload.errors import ConfigError, Finding, StagingError, escape, reason
from safeload.fetching.partial import target_of
from safeload.files import publish

MAX_RECORD_BYTES: Final = 1024 * 1024
"""Longest record that is read."""

MAX_ITEMS: Final = 10_000
"""Most records that are listed; beyond that somebody should purge."""

_MAX_FINDINGS: Final = 100
"""Findings that a record keeps: the first ones say why, and a hostile file can have any number."""

_ID: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}")
_CONTENT: Final = "content.quarantined"
_RECORD: Final = "record.json"


class Reason(BaseModel):
    """One finding, as a record keeps it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    code: str = Field(max_length=200)
    message: str = Field(max_length=4000)


class Record(BaseModel):
    """Why a file, or a piece of one, was refused.

    Attributes:
        id: What to call it: its time and a random part.
        path: What the file should have become.
        mirrors: Where it came from.
        expected: SHA-256 that was signed; None where nobody signed anything.
        found: SHA-256 that was found.
        offset: Where the refused piece begins; None for a whole file.
        time: When, UTC.
        reasons: The findings.
        kept: Whether the content is kept beside the record.
        unsigned: Whether it was fetched without a manifest.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    id: str
    path: str = Field(max_length=4096)
    mirrors: list[str]
    expected: str | None
    found: str | None
    offset: int | None = None
    time: str
    reasons: list[Reason]
    kept: bool
    unsigned: bool = False


def quarantine_of(directory: str | Path) -> Path:
    """Return where the quarantine of a directory is: beside it, and hidden."""
    target = target_of(directory)
    return target.parent / f".{target.name}.quarantine"


class Quarantine:
    """The quarantine of one directory. Nothing is made before the first file is put there."""

    def __init__(self, directory: str | Path) -> None:
        """Name the directory that the files were fetched for."""
        self.path = quarantine_of(directory)

    def add(
        self,
        path: str,
        *,
        mirrors: Sequence[str],
        findings: Sequence[Finding],
        expected: str | None,
        found: str | None,
        offset: int | None = None,
        move: Callable[[Path], object] | None = None,
        unsigned: bool = False,
    ) -> Record:
        """Put a file away, or only the record of one, and return the record.

        Args:
            path: What the file should have become.
            mirrors: Where it came from, by name.
            findings: Why it is refused.
            expected: SHA-256 that was signed.
            found: SHA-256 that was found.
            offset: Where the refused piece begins; None for a whole file.
            move: Puts the content to the path that it is told, on the same file system; None to keep none.
            unsigned: Whether it was fetched without a manifest.

        Raises:
            ConfigError: There is something else in the quarantine's place.
            StagingError: The system refuses.
        """
        now = datetime.now(UTC)
        name = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        record = Record(
            id=name,
            path=path,
            mirrors=list(mirrors),
            expected=expected,
            found=found,
            offset=offset,
            time=f"{now:%Y-%m-%dT%H:%M:%SZ}",
            reasons=[Reason(code=f.code, message=escape(f.message, limit=2000)) for f in findings[:_MAX_FINDINGS]],
            kept=move is not None,
            unsigned=unsigned,
        )
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._require_private()
            place = self.path / name
            place.mkdir(mode=0o700)
            if move is not None:
                content = place / _CONTENT
                move(content)
                content.chmod(0o600)
        except OSError as err:
            raise StagingError(f"cannot put {escape(path)} into {escape(str(self.path))}: {reason(err)}") from err
        publish(place / _RECORD, record.model_dump_json(indent=2).encode(), mode=0o600)
        return record

    def records(self) -> tuple[Record, ...]:
        """Return every record, oldest first; empty where there is no quarantine.

        Raises:
            ConfigError: A record, or the quarantine itself, is none of ours.
        """
        # One without a record was left by a process that died between the two; it is shown by its name all the same.
        return tuple(self._record(name) for name in self._names()[:MAX_ITEMS])

    def record(self, name: str) -> Record:
        """Return one record.

        Raises:
            ConfigError: There is none of this name, or it is none of ours.
        """
        return self._record(self._found(name))

    def content(self, name: str) -> Path | None:
        """Return where the content of an item is, None where none was kept. It is as dangerous as it was."""
        place = self.path / self.record(name).id / _CONTENT
        return place if place.is_file() else None

    def purge(self, names: Sequence[str] | None = None) -> int:
        """Remove items for good, and return how many. What their records say does not matter.

        Args:
            names: Which; None for all.

        Raises:
            ConfigError: There is none of such a name, or the quarantine is none of ours.
            StagingError: The system refuses.
        """
        chosen = self._names() if names is None else list(dict.fromkeys(self._found(name) for name in names))
        try:
            for name in chosen:
                shutil.rmtree(self.path / name)
            if names is None and self.path.is_dir() and not any(self.path.iterdir()):
                self.path.rmdir()
        except OSError as err:
            raise StagingError(f"cannot remove from {escape(str(self.path))}: {reason(err)}") from err
        return len(chosen)

    def _names(self) -> list[str]:
        if not self.path.is_dir():
            return []
        self._require_private()
        try:
            return sorted(place.name for place in self.path.iterdir() if _ID.fullmatch(place.name))
        except OSError as err:
            raise ConfigError(f"cannot read {escape(str(self.path))}: {reason(err)}") from err

    def _found(self, name: str) -> str:
        """Return the name of an item if there is one, so that nothing else can be named."""
        if not _ID.fullmatch(name) or not (self.path / name).is_dir():
            raise ConfigError(
                f"there is nothing called {escape(name)} in {escape(str(self.path))}",
                hint="`safeload quarantine list` names what there is",
            )
        self._require_private()
        return name

    def _require_private(self) -> None:
        try:
            status = self.path.lstat()
        except OSError as err:
            raise ConfigError(f"cannot look at {escape(str(self.path))}: {reason(err)}") from err
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not is_ours or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"expected {escape(str(self.path))} to be a directory of ours alone, found something else",
                hint="remove it, or put it elsewhere",
            )

    def _record(self, name: str) -> Record:
        place = self.path / name / _RECORD
        try:
            with place.open("rb") as file:
                data = file.read(MAX_RECORD_BYTES + 1)
        except FileNotFoundError:
            reasons = [Reason(code="no-record", message="the process ended before it wrote why")]
            kept = (self.path / name / _CONTENT).is_file()
            return Record(
                id=name, path="?", mirrors=[], expected=None, found=None, time=name[:16], reasons=reasons, kept=kept
            )
        except OSError as err:
            raise ConfigError(f"cannot read {escape(str(place))}: {reason(err)}") from err
        try:
            parsed: Any = json.loads(data)
            return Record.model_validate({**parsed, "id": name})
        except (ValidationError, ValueError, TypeError, RecursionError) as err:
            raise ConfigError(
                f"{escape(str(place))} is no record of a quarantine",
                hint=f"remove the item: safeload quarantine purge DIR {name}",
            ) from err
