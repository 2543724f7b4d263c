"""A cache of what parsers found, so that an audit that was interrupted, or runs every night, need not parse again.

A result is found by the digest of the file's bytes, and counts for one policy, one version of safeload and one file
name, because a parser looks at all three. To know the digest, a file is read: the cache saves parsing, never reading,
and never goes by name, length or time. It does look whether a file of that name and length is known at all, and if so
hashes before it parses; where the digest then is another, that file is read a second time.

Whoever can write to the cache could call a hostile file harmless, so each part has a message authentication code
(HMAC-SHA256, RFC 2104) under a key of the user's; a part whose code does not fit is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from safeload import __version__
from safeload.errors import (
    ConfigError,
    FileSetError,
    Finding,
    FormatError,
    LimitError,
    ManifestError,
    PolicyError,
    RejectedError,
    StagingError,
    escape,
    reason,
)
from safeload.files import Root, publish, read_into
from safeload.formats import Parsed
from safeload.policy import Policy
from safeload.tensors import DTYPE_ITEMSIZE, DType, Extent, TensorSpec
from safeload.trust.strict_json import loads

MIN_KEY_BYTES: Final = 32
"""Shortest key: as long as the digest (RFC 2104, 3)."""

MAX_KEY_BYTES: Final = 4096
MAX_PART_BYTES: Final = 16 * 1024 * 1024
"""Longest part that is read or written."""

MAX_CACHE_BYTES: Final = 256 * 1024 * 1024
"""Most that is read of a cache in all: it is held in memory, in some four times the room."""

_RESULTS_IN_A_PART: Final = 256
_PART_SECONDS: Final = 5.0
"""A part is written when it has this many results, or this long after the last: what an interruption can cost."""

_MAX_PARTS: Final = 32
"""More parts than this are joined into one at the end of a run."""

_SUFFIX: Final = ".results"
_MAC_BYTES: Final = hashlib.sha256().digest_size
_CONTEXT: Final = b"safeload result cache 1\0"
"""Begins what is authenticated, so that the key can serve for nothing else by mistake."""

_MAX_DEPTH: Final = 6

_REFUSALS: Final[Mapping[str, type[RejectedError]]] = {
    cls.__name__: cls for cls in (FormatError, LimitError, PolicyError)
}
"""What depends on nothing but the bytes, the name and the policy. That a file changed while it was read is not here."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class _Finding(_Model):
    code: str
    message: str
    offset: int | None
    hint: str | None


class _Tensor(_Model):
    name: str
    dtype: str
    big_endian: bool
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None


class CachedResult(_Model):
    """What a parser found in one file.

    Attributes:
        name: The file's last component.
        size: Its length in bytes.
        sha256: Its digest.
        kind: Its format.
        refusal: Name of the class of error that it is refused with, or None.
        findings: Why it is refused.
        tensors: Its table of tensors.
        globals: The pickle globals that it names.
    """

    name: str
    size: int
    sha256: str
    kind: str
    refusal: Literal["FormatError", "LimitError", "PolicyError"] | None
    findings: tuple[_Finding, ...]
    tensors: tuple[_Tensor, ...]
    globals: tuple[str, ...]

    @classmethod
    def of(cls, path: str, size: int, sha256: str, kind: str, parsed: Parsed) -> CachedResult | None:
        """Return what is to be remembered of a file; None where that would say less than was found."""
        refusal = None if parsed.refusal is None else type(parsed.refusal).__name__
        # Bytes that a text protocol escapes lie nowhere in the file; an index is held against files beside it.
        inline = any(spec.extent.inline is not None or spec.sha256 is not None for spec in parsed.tensors)
        if inline or parsed.index is not None or refusal not in {None, *_REFUSALS}:
            return None
        findings = () if parsed.refusal is None else parsed.refusal.findings
        return cls.model_validate(
            {
                "name": PurePosixPath(path).name,
                "size": size,
                "sha256": sha256,
                "kind": kind,
                "refusal": refusal,
                "findings": tuple(
                    _Finding(code=f.code, message=f.message, offset=f.offset, hint=f.hint) for f in findings
                ),
                "tensors": tuple(_tensor(spec) for spec in parsed.tensors),
                "globals": parsed.globals,
            }
        )

    def parsed(self) -> Parsed:
        """Return it as the parser did, but for the value that nobody asks an audit for."""
        if self.refusal is None:
            return Parsed(tensors=tuple(map(_spec, self.tensors)), globals=self.globals)
        findings = (Finding(f.code, f.message, offset=f.offset, hint=f.hint) for f in self.findings)
        return Parsed(globals=self.globals, refusal=_REFUSALS[self.refusal](*findings))


def _tensor(spec: TensorSpec) -> _Tensor:
    return _Tensor(
        name=spec.name,
        dtype=spec.dtype.name,
        big_endian=spec.dtype.big_endian,
        shape=spec.shape,
        order=spec.order,
        offset=spec.extent.offset,
        nbytes=spec.extent.nbytes,
        strides=spec.strides,
    )


def _spec(tensor: _Tensor) -> TensorSpec:
    extent = Extent(tensor.offset, tensor.nbytes)
    return TensorSpec(
        tensor.name,
        DType(tensor.dtype, big_endian=tensor.big_endian),
        tensor.shape,
        tensor.order,
        extent,
        strides=tensor.strides,
    )


class _Part(_Model):
    version: str
    policy: str
    results: tuple[CachedResult, ...]


@dataclass(slots=True)
class CacheUse:
    """What a run had of its cache.

    Attributes:
        reused: Files whose result was there.
        parsed: Files that were parsed.
        damaged: Parts that were not used, because their authentication code did not fit or they broke their format.
        unread: Parts that were not read, because the cache is larger than is held in memory.
    """

    reused: int = 0
    parsed: int = 0
    damaged: int = 0
    unread: int = 0


class ResultCache:
    """The results of one policy and one version, in one directory; use it as a context manager.

    `add` may be called from several threads. What was added is on disk a few seconds later, and all of it when the
    context is left, whatever ends it.

    Attributes:
        use: What the run had of it.
    """

    def __init__(self, directory: str | Path, key_file: str | Path, policy: Policy) -> None:
        """Say where the cache lies, who may write to it and what it is for; entering the context reads it."""
        self.use = CacheUse()
        self._top = Path(directory)
        self._key = _read_key(key_file)
        self._policy = policy.sha256
        self._directory = self._top / f"{policy.sha256[:32]}-{__version__}"
        self._known: dict[tuple[str, int], dict[str, CachedResult]] = {}
        self._parts: list[str] = []
        self._fresh: list[CachedResult] = []
        self._written = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Read what is there.

        Raises:
            StagingError: The directory cannot be made or read, or is a link.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as err:
            message = f"cannot make the cache {escape(str(self._directory))}: {reason(err)}"
            raise StagingError(message, hint="name a folder that you can write to") from err
        if self._directory.is_symlink():
            # Whoever can write to the cache would choose where parts are written, and which are deleted.
            raise StagingError(f"the cache {escape(str(self._directory))} is a symbolic link", hint="remove it")
        room = MAX_CACHE_BYTES
        with Root(self._directory) as root:
            for walked in root.walk():
                if walked.finding is not None or not walked.path.endswith(_SUFFIX):
                    continue
                if walked.size > MAX_PART_BYTES:
                    self.use.damaged += 1  # none that we wrote, and no reason to leave those behind it unread
                    continue
                room -= walked.size
                if room < 0:
                    self.use.unread += 1
                    continue
                results = self._read(root, walked.path)
                if results is None:
                    self.use.damaged += 1
                    continue
                self._parts.append(walked.path)
                for result in results:
                    self._known.setdefault((result.name, result.size), {})[result.sha256] = result
        return self

    def __exit__(self, *_: object) -> None:
        """Write what is new, and join the parts if there are many.

        Raises:
            StagingError: The cache cannot be written.
        """
        self._flush()
        if len(self._parts) > _MAX_PARTS:
            self._join()

    def candidates(self, path: str, size: int) -> Mapping[str, CachedResult]:
        """Return the results for files of this name and length, by digest: what is worth hashing before parsing."""
        return self._known.get((PurePosixPath(path).name, size), {})

    def add(self, result: CachedResult | None) -> None:
        """Remember a result; None, of a file that cannot be remembered, is counted only.

        Raises:
            StagingError: The cache cannot be written.
        """
        with self._lock:
            self.use.parsed += 1
            if result is None:
                return
            self._fresh.append(result)
            is_due = len(self._fresh) >= _RESULTS_IN_A_PART or time.monotonic() - self._written > _PART_SECONDS
        if is_due:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            fresh, self._fresh = self._fresh, []
            self._written = time.monotonic()
        for result in fresh:
            self._known.setdefault((result.name, result.size), {})[result.sha256] = result
        for part in self._encoded(fresh):
            self._publish(part)

    def _join(self) -> None:
        """Write every result that is known into as few parts as hold them, then remove the old ones."""
        old, self._parts = self._parts, []
        for part in self._encoded([result for same in self._known.values() for result in same.values()]):
            self._publish(part)
        for name in old:
            with contextlib.suppress(OSError):  # another run may have done the same
                (self._directory / name).unlink()

    def _publish(self, part: bytes) -> None:
        name = f"{secrets.token_hex(8)}{_SUFFIX}"
        publish(self._directory / name, part, mode=0o600)
        self._parts.append(name)

    def _encoded(self, results: list[CachedResult]) -> Iterator[bytes]:
        """Yield results as parts of a length that is read again; a result that is longer alone is left out."""
        waiting = [results] if results else []
        while waiting:
            some = waiting.pop()
            part = _Part(version=__version__, policy=self._policy, results=tuple(some))
            data = json.dumps(part.model_dump(), ensure_ascii=True, separators=(",", ":")).encode()
            if len(data) + _MAC_BYTES <= MAX_PART_BYTES:
                yield self._mac(data) + data
            elif len(some) > 1:
                waiting += [some[: len(some) // 2], some[len(some) // 2 :]]

    def _mac(self, data: bytes) -> bytes:
        return hmac.digest(self._key, _CONTEXT + data, "sha256")

    def _read(self, root: Root, name: str) -> tuple[CachedResult, ...] | None:
        """Return the results of a part, or None if it is not one that the key's holder wrote for this policy."""
        try:
            data = _read_part(root, name)
        except (FileSetError, StagingError):
            return None
        body = data[_MAC_BYTES:]
        if len(data) > MAX_PART_BYTES or not hmac.compare_digest(data[:_MAC_BYTES], self._mac(body)):
            return None
        # From here on it is what this program wrote, and is looked at all the same: by another version, or by mistake.
        try:
            value = _tuples(loads(body, max_bytes=MAX_PART_BYTES, max_depth=_MAX_DEPTH))
            part = _Part.model_validate(value)
        except (ManifestError, ValidationError):
            return None
        known = all(tensor.dtype in DTYPE_ITEMSIZE for result in part.results for tensor in result.tensors)
        whole = all((result.refusal is None) != bool(result.findings) for result in part.results)
        fits = part.version == __version__ and part.policy == self._policy
        return part.results if known and whole and fits else None


def _read_part(root: Root, name: str) -> bytes:
    fd = root.open(name)
    try:
        size = min(os.fstat(fd).st_size, MAX_PART_BYTES + 1)
        data = bytearray(size)
        at = 0
        with memoryview(data) as view:
            while at < size and (got := read_into(fd, view[at:], at, path=name)):
                at += got
    except OSError as err:
        raise StagingError(f"cannot read {escape(name)}: {reason(err)}") from err
    finally:
        os.close(fd)
    return bytes(data[:at])


def _read_key(path: str | Path) -> bytes:
    hint = "make one with: (umask 077 && head -c 32 /dev/urandom > FILE)"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            key = file.read(MAX_KEY_BYTES + 1) if stat.S_ISREG(mode) else b""
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read the cache's key {escape(str(path))}: {reason(err)}", hint=hint) from err
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        message = f"the cache's key {escape(str(path))}: expected a file of {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes"
        raise ConfigError(f"{message}, found {len(key)}", hint=hint)
    if mode & 0o077:
        message = f"the cache's key {escape(str(path))} can be read or written by others"
        raise ConfigError(message, hint="let only yourself read it: chmod 600 FILE; if others may have, make a new one")
    return key


def _tuples(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(child) for key, child in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
