"""Hold a directory against a bundle of OpenSSF Model Signing: the file set, and each digest as bytes stream past."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

from safeload.digests import Hasher
from safeload.errors import FileSetError, Finding, FormatError, StagingError, escape, reason
from safeload.files import Root, StreamSource, hard_link
from safeload.oms import SINGLE_FILE, OmsFile, OmsManifest, new_hasher
from safeload.parallel import Meter, n_processors, run
from safeload.report import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ComparedFile(Generic[T]):
    """One signed file that is there.

    Attributes:
        path: As it was signed; the file's own name where the signature gives none.
        size: Length in bytes; None where the file could not be read.
        sha256: Of the whole file, whatever it was signed by; None where it could not be read.
        findings: Why it is not the signed file; empty where it is.
        refusal: What is wrong with the first bytes that did not have their checksum; see `StreamSource`.
        looked: What `look` returned; None where the file could not be read.
    """

    path: str
    size: int | None = None
    sha256: str | None = None
    findings: tuple[Finding, ...] = ()
    refusal: FormatError | None = None
    looked: T | None = None


@dataclass(frozen=True, slots=True)
class Comparison(Generic[T]):
    """What a directory is, next to what was signed. It is the signed one exactly if there is no finding anywhere.

    Attributes:
        files: The signed files that are there, in the order of their paths.
        findings: Of the file set: codes "missing-file", "unlisted-file", "size-mismatch", and those of the walk.
        ignored: Paths that are there and that the signature says it does not cover. Nothing below them was opened.
    """

    files: tuple[ComparedFile[T], ...]
    findings: tuple[Finding, ...]
    ignored: tuple[str, ...]


class ComparedSource(StreamSource):
    """A hashing source that takes the signed digests, too, of the same bytes in the same pass."""

    def __init__(self, fd: int, path: str, signed: OmsFile, *, peek_limit: int, advance: Callable[[int], None]) -> None:
        """Take over `fd`, and close it when the context is left.

        Args:
            fd: Descriptor from `Root.open`.
            path: What to call the file in errors.
            peek_limit: Most bytes to peek at.
            signed: What it is held against.
            advance: Told how many bytes were hashed; what it raises ends the reading.
        """
        super().__init__(fd, path, hashing=True, peek_limit=peek_limit, advance=advance)
        self._signed = signed
        # The whole file's SHA-256 is taken anyway; a second one of the same bytes would tell nothing new.
        self._digests = None if _is_plain(signed) else _Digests(signed)

    def _hash_next(self, digest: hashlib._Hash, end: int, *, is_seen: bool) -> memoryview:
        piece = super()._hash_next(digest, end, is_seen=is_seen)
        if self._digests is not None:
            self._digests.update(piece)
        return piece

    def compare(self, sha256: str) -> Finding | None:
        """Return why the file is not the signed one, or None.

        Args:
            sha256: What `finish` returned; before it, nothing is known.
        """
        found = (sha256,) if self._digests is None else self._digests.finish()
        if found == self._signed.digests:
            return None
        signed = self._signed.digests
        differ = [n for n, pair in enumerate(zip(signed, found, strict=False)) if pair[0] != pair[1]]
        n = differ[0] if differ else min(len(signed), len(found))
        shard = "" if self._signed.shard_size is None else f" in shard {n}"
        expected, other = (digests[n] if n < len(digests) else "none" for digests in (signed, found))
        return Finding(
            "digest-mismatch",
            f"expected {self._signed.algorithm}:{expected}{shard}, found {self._signed.algorithm}:{other}",
            offset=None if self._signed.shard_size is None else n * self._signed.shard_size,
            hint="the file is not the one that was signed; fetch it again",
        )


class _Digests:
    """The digests of a stream: of each of its shards, or of all of it."""

    def __init__(self, signed: OmsFile) -> None:
        self._signed = signed
        self._room = signed.shard_size  # bytes until the shard is full; None without an end
        self._hasher: Hasher | None = None if signed.shard_size else new_hasher(signed.algorithm)
        self._done: list[str] = []

    def update(self, piece: memoryview) -> None:
        while piece:
            self._hasher = self._hasher or new_hasher(self._signed.algorithm)
            part = piece if self._room is None else piece[: self._room]
            self._hasher.update(part)
            piece = piece[len(part) :]
            if self._room is not None:
                self._room -= len(part)
                if not self._room:
                    self._end_shard(self._hasher)

    def finish(self) -> tuple[str, ...]:
        if self._hasher is not None:
            self._end_shard(self._hasher)
        return tuple(self._done)

    def _end_shard(self, hasher: Hasher) -> None:
        self._done.append(hasher.hexdigest())
        self._hasher = None
        self._room = self._signed.shard_size


def compare_files(
    target: str | Path,
    oms: OmsManifest,
    *,
    look: Callable[[Root, StreamSource, str], T],
    max_bytes: int,
    peek_limit: int = 0,
    ignore: Mapping[str, bytes] = MappingProxyType({}),
    progress: Progress | None = None,
) -> Comparison[T]:
    """Hold what is in a directory against what was signed. Every file is read once, and nothing is kept.

    Args:
        target: The model: a directory, or a file where one was signed by itself. Untrusted; a link to it is followed,
            and none below it.
        oms: The verified bundle.
        look: Told the directory, each file as a source, and its path, before the rest of it is hashed: what it parses
            is what is hashed. It is called from several threads.
        max_bytes: Length of the longest file that is read to its end. A bundle may state no sizes, and a hole has any.
            What `look` says of a longer one has to refuse it.
        peek_limit: Most bytes of a file that `look` may peek at.
        ignore: Files that may lie in the directory unsigned, with exactly these bytes: the bundle itself.
        progress: Told of the bytes that were hashed.

    Raises:
        StagingError: The directory could not be opened.
    """
    real, is_file = _resolve(Path(target))
    with Root(real.parent if is_file else real) as root:
        if is_file:
            listed = {real.name: oms.files[SINGLE_FILE]} if SINGLE_FILE in oms.files else dict(oms.files)
            findings = [_missing(path) for path in listed if path != real.name]
            if real.name not in listed:
                findings.append(_unlisted(real.name))
            sizes: dict[str, int] = {real.name: 0}
            ignored: list[str] = []
        else:
            listed = dict(oms.files)
            findings, sizes, ignored = _compare_file_set(root, oms, ignore)
        files = run(
            [(path, listed[path]) for path in sorted(listed.keys() & sizes.keys())],
            lambda item, meter: _compare_file(root, *item, look, meter, max_bytes=max_bytes, peek_limit=peek_limit),
            size=lambda item: sizes[item[0]],
            threads=n_processors(),
            phase="verifying",
            progress=progress,
        )
    return Comparison(tuple(files), tuple(sorted(findings, key=lambda finding: finding.file or "")), tuple(ignored))


def _compare_file_set(
    root: Root, oms: OmsManifest, ignore: Mapping[str, bytes]
) -> tuple[list[Finding], dict[str, int], list[str]]:
    """Return the findings, the size of each signed file that can be read, and what is there and is not covered.

    The bundle's own list is the only one that leaves anything out. That its reference verifier also passes over `.git`
    and its like is no reason to: a signature that does not say so does not cover them.
    """
    findings: list[Finding] = []
    sizes: dict[str, int] = {}
    ignored: list[str] = []
    present: set[str] = set()
    for walked in root.walk():
        present.add(walked.path)
        signed = oms.files.get(walked.path)
        if walked.path != "." and oms.is_ignored(walked.path):
            ignored.append(walked.path)
        elif walked.finding is not None:
            findings.append(walked.finding)
        elif signed is None:
            if walked.path not in ignore or not root.holds(walked.path, ignore[walked.path]):
                findings.append(_unlisted(walked.path))
        elif signed.size is not None and signed.size != walked.size:
            message = f"expected the signed {signed.size} bytes, found {walked.size} bytes"
            hint = "fetch the file again from its publisher"
            findings.append(Finding("size-mismatch", message, file=walked.path, hint=hint))
        else:
            sizes[walked.path] = walked.size
        if signed is not None and walked.finding is None and walked.n_links > 1:
            findings.append(hard_link(walked))
    findings += [_missing(path) for path in oms.files if path not in present]
    return findings, sizes, ignored


def _compare_file(
    root: Root,
    path: str,
    signed: OmsFile,
    look: Callable[[Root, StreamSource, str], T],
    meter: Meter,
    *,
    max_bytes: int,
    peek_limit: int,
) -> ComparedFile[T]:
    try:
        with ComparedSource(root.open(path), path, signed, peek_limit=peek_limit, advance=meter.advance) as source:
            looked = look(root, source, path)
            if source.size > max_bytes:
                meter.advance(source.size)
                return ComparedFile(path, source.size, looked=looked)
            sha256 = source.finish()
            finding = source.compare(sha256)
    except FileSetError as err:
        return ComparedFile(path, findings=err.findings)
    except StagingError as err:
        # A file that cannot be read has no verdict of its own to give: it is refused, and the run goes on.
        return ComparedFile(path, findings=(Finding("unreadable", err.message, file=path),))
    findings = () if finding is None else (finding.in_file(path),)
    return ComparedFile(path, source.size, sha256, findings, source.refusal, looked)


def _resolve(target: Path) -> tuple[Path, bool]:
    """Return where the path that the user typed leads, and whether that is a file."""
    try:
        real = target.resolve(strict=True)
        return real, not real.is_dir()
    except (OSError, ValueError, RuntimeError) as err:
        why = reason(err)
        raise StagingError(f"cannot open {escape(str(target))}: {why}", hint="check the path") from err


def _is_plain(signed: OmsFile) -> bool:
    return signed.shard_size is None and signed.algorithm == "sha256"


def _unlisted(path: str) -> Finding:
    message = "expected only files that the signature covers, found another"
    return Finding("unlisted-file", message, file=path, hint="move it out of the directory")


def _missing(path: str) -> Finding:
    message = "expected this file, which was signed, found none"
    return Finding("missing-file", message, file=path, hint="fetch it from its publisher")
