"""The manifest: the closed list of a checkpoint's files, and what is in each. Data only; whose it is, `verifying` says.

On disk it is the predicate of an in-toto Statement v1. Nothing is ever canonicalized: the bytes that were signed are
the bytes that are parsed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from safeload.errors import ConfigError, Finding, ManifestError, escape
from safeload.tensors import DTYPE_ITEMSIZE, TensorSpec
from safeload.trust import strict_json

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
"""Media type under which the statement is signed (in-toto attestation framework, envelope layer)."""

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://safeload.dev/manifest/v1"

MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024
"""Longest payload; an envelope of the same limit holds three quarters of it."""

MAX_FILES: Final = 100_000
"""Most files of one checkpoint. Grok-1 has 770."""

MAX_RANK: Final = 64
"""Most dimensions of a tensor: what numpy 2 can hold (NPY_MAXDIMS)."""

MAX_PATH_BYTES: Final = 4096
"""Longest path in UTF-8: PATH_MAX of Linux."""

MAX_COMPONENT_BYTES: Final = 255
"""Longest name in UTF-8: NAME_MAX of common file systems."""

MAX_PATH_DEPTH: Final = 32
"""Most components of a path; real checkpoints have two or three."""

_MAX_DEPTH: Final = 16
"""Statement, predicate, files, file, tensors, tensor, shape make seven."""

_DRIVE: Final = re.compile(r"[A-Za-z]:")


def check_path(path: str) -> None:
    """Return if `path` names the same file below a directory on every file system, and no other.

    Args:
        path: Relative, with `/` between its components.

    Raises:
        ValueError: It is empty, absolute, not NFC or too long or deep; it has a backslash, a drive, or a character that
            cannot be seen (controls, bidirectional marks, odd spaces, unpaired surrogates); or a component that is
            empty, `.`, `..` or `.git`, or ends in a dot or a space.
    """
    if not path.isprintable():
        raise ValueError("a path has a character that cannot be shown")
    if not unicodedata.is_normalized("NFC", path):
        raise ValueError("a path is not in Unicode normalization form C")
    if "\\" in path:
        raise ValueError("a path has a backslash, which some systems take for a separator")
    if path.startswith("/") or _DRIVE.match(path):
        raise ValueError("a path is absolute, or starts like a drive")
    if len(path.encode("utf-8")) > MAX_PATH_BYTES:
        raise ValueError(f"a path is longer than {MAX_PATH_BYTES} bytes")
    components = path.split("/")
    if len(components) > MAX_PATH_DEPTH:
        raise ValueError(f"a path is deeper than {MAX_PATH_DEPTH}")
    for component in components:
        if component in ("", ".", ".."):
            raise ValueError("a path has a component that is empty, . or ..")
        if component[-1] in ". ":
            raise ValueError("a component of a path ends in a dot or a space, which Windows drops")
        if component.casefold() == ".git":
            raise ValueError("a component of a path is .git, whose hooks run")
        if len(component.encode("utf-8")) > MAX_COMPONENT_BYTES:
            raise ValueError(f"a component of a path is longer than {MAX_COMPONENT_BYTES} bytes")


def _checked_path(path: str) -> str:
    check_path(path)
    return path


def _real_instant(text: str) -> str:
    datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return text


Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}$")]
"""A name that can be typed and matched by a glob, and shows as it is: `hf:xai-org/grok-1`, a commit, a version."""
Instant = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"),
    AfterValidator(_real_instant),
]
Text = Annotated[str, StringConstraints(max_length=4096)]
"""Free text of a file's own. The limit also makes pydantic look inside: it refuses what UTF-8 cannot spell."""
NonEmptyText = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Count = Annotated[int, Field(ge=0, le=strict_json.MAX_INTEGER)]
DTypeName = Literal[tuple(DTYPE_ITEMSIZE)]  # type: ignore[valid-type] # one table of dtypes, not a second list
_Lax = Field(strict=False)  # JSON has lists, a frozen model has tuples; what is in them stays strict


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ManifestTensor(_Model):
    """One tensor of a file, as its publisher saw it.

    Attributes:
        name: Path inside the file, `/`-joined; empty for a file that is one bare array.
        dtype: Element type, by numpy's or ml_dtypes' name.
        shape: Length of each dimension.
        order: Which index varies fastest in the payload: the last ("C") or the first ("F").
        offset: Byte offset of the payload in the file.
        nbytes: Length of the decoded payload in bytes.
        byteorder: Of the elements in the file.
        inline: Whether the file holds the payload in an encoding of its own, so that `nbytes` is no length in the file.
        sha256: Of the value's C-order little-endian bytes, whatever the file's order is.
    """

    name: Text
    dtype: DTypeName  # type: ignore[valid-type] # see DTypeName
    shape: Annotated[tuple[Count, ...], _Lax, Field(max_length=MAX_RANK)]
    order: Literal["C", "F"]
    offset: Count
    nbytes: Count
    byteorder: Literal["little", "big"] = "little"
    inline: bool = False
    sha256: Sha256

    @classmethod
    def of(cls, spec: TensorSpec) -> ManifestTensor:
        """Return what the manifest says of a tensor that was found; equal exactly if nothing of it has changed.

        Raises:
            TypeError: The spec has no digest: it has to be asked for where the file is read.
            ManifestError: The tensor cannot be written down, e.g. its name is no Unicode text.
        """
        if spec.sha256 is None:
            raise TypeError("a tensor goes into a manifest with the digest of its value")
        try:
            return cls(
                name=spec.name,
                dtype=spec.dtype.name,
                shape=spec.shape,
                order=spec.order,
                offset=spec.extent.offset,
                nbytes=spec.extent.nbytes,
                byteorder="big" if spec.dtype.big_endian else "little",
                inline=spec.extent.inline is not None,
                sha256=spec.sha256,
            )
        except ValidationError as err:
            raise _refusal(f"tensor {spec.name!r}: {_first_problem(err)}") from err


class FileEntry(_Model):
    """One file of the checkpoint, and all that a scan of it must find again.

    Attributes:
        path: Relative to the checkpoint's directory, as `check_path` allows it.
        size: Length in bytes.
        sha256: Of the whole file.
        format: What its content is.
        role: What it is for.
        parameter: Name of the parameter that this shard holds in the checkpoint's tree, for files that carry no names
            of their own; None where it is not known.
        tensors: In stored order.
        globals: Every global that a pickle names, as `module.name`, in order of first use.
    """

    path: Annotated[str, AfterValidator(_checked_path)]
    size: Count
    sha256: Sha256
    format: Literal["pickle", "json", "text", "opaque"]
    role: Literal["weights", "tokenizer", "config", "docs", "other"]
    parameter: NonEmptyText | None = None
    tensors: Annotated[tuple[ManifestTensor, ...], _Lax] = ()
    globals: Annotated[tuple[NonEmptyText, ...], _Lax] = ()


class Totals(_Model):
    """How much there is: the number of files, and the sum of their sizes in bytes."""

    files: Count
    bytes: Count


class Tool(_Model):
    """What wrote the manifest."""

    name: Label
    version: Label


class Manifest(_Model):
    """Proves that a list of files is well formed and agrees with itself. Who stands for it is another question.

    Attributes:
        spec: Version of this schema.
        stream: Which model this is: what publishers are scoped to.
        revision: Which state of it, in the publisher's own terms.
        version: Counts the manifests of the stream, from 1.
        issued: When it was made, UTC.
        previous: SHA-256 of the payload that this one replaces, None for the first.
        totals: Count and sum over `files`.
        files: By the bytes of their UTF-8 paths; no two are one file where case and normalization do not count.
        tool: What wrote it.
    """

    spec: Literal["1.0"]
    stream: Label
    revision: Label
    version: Annotated[int, Field(ge=1, le=strict_json.MAX_INTEGER)]
    issued: Instant
    previous: Sha256 | None
    totals: Totals
    files: Annotated[tuple[FileEntry, ...], _Lax, Field(min_length=1, max_length=MAX_FILES)]
    tool: Tool

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Manifest:
        # One pass here: a validator for each entry would cost more than everything else together.
        before = b""
        folded: set[str] = set()
        for file in self.files:
            encoded = file.path.encode("utf-8")
            if encoded <= before:
                raise ValueError(f"files are not in order of their paths' bytes, each once: {file.path!r}")
            before = encoded
            folded.add(_fold(file.path))
            if file.format in ("json", "text", "opaque") and (file.tensors or file.globals or file.parameter):
                raise ValueError(f"{file.path!r}: a file of format {file.format} has no tensors, globals or parameter")
            for tensor in file.tensors:
                _check_tensor(file, tensor)
        if len(folded) != len(self.files):
            raise ValueError("two paths differ only in case or normalization")
        totals = Totals(files=len(self.files), bytes=sum(file.size for file in self.files))
        if self.totals != totals:
            raise ValueError(f"totals are not those of the files: expected {totals}, found {self.totals}")
        return self

    @classmethod
    def of(
        cls,
        files: Iterable[FileEntry],
        *,
        stream: str,
        revision: str,
        issued: datetime,
        tool_version: str,
        version: int = 1,
        previous: str | None = None,
    ) -> Manifest:
        """Return a manifest of the files, put in order and summed up.

        Args:
            files: The whole checkpoint.
            stream: Name of the model.
            revision: Which state of it.
            issued: Now, with its time zone.
            tool_version: Of safeload.
            version: One more than that of the manifest that it replaces.
            previous: SHA-256 of that manifest's payload.

        Raises:
            ManifestError: The files cannot stand in one manifest.
            ConfigError: Another argument is not of the form that a manifest has it in.
        """
        entries = tuple(sorted(files, key=lambda file: file.path.encode("utf-8")))
        try:
            return cls(
                spec="1.0",
                stream=stream,
                revision=revision,
                version=version,
                issued=issued.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                previous=previous,
                totals=Totals(files=len(entries), bytes=sum(file.size for file in entries)),
                files=entries,
                tool=Tool(name="safeload", version=tool_version),
            )
        except ValidationError as err:
            place = err.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]
            if place and place[0] in ("stream", "revision", "version", "previous"):
                raise ConfigError(f"manifest: {_first_problem(err)}") from err
            raise _refusal(_first_problem(err)) from err

    @classmethod
    def parse(cls, payload: bytes) -> Manifest:
        """Return the manifest that a payload states.

        Args:
            payload: The bytes of an in-toto Statement v1, exactly as they were verified.

        Raises:
            ManifestError: It is no strict JSON, not of the schema, or does not agree with itself.
        """
        try:
            value = strict_json.loads(payload, max_bytes=MAX_PAYLOAD_BYTES, max_depth=_MAX_DEPTH)
            statement = _Statement.model_validate(value)
        except ManifestError as err:
            raise _refusal(err.findings[0].message, err.findings[0].offset) from err
        except ValidationError as err:
            raise _refusal(_first_problem(err)) from err
        subject, manifest = statement.subject[0], statement.predicate
        if subject.name != manifest.stream:
            raise _refusal(f"expected the subject {manifest.stream}, found {subject.name}")
        if subject.digest.sha256 != manifest.tree_sha256:
            raise _refusal(f"expected the tree digest {manifest.tree_sha256}, found {subject.digest.sha256}")
        return manifest

    def to_payload(self) -> bytes:
        """Return the manifest as the bytes to sign, always the same for equal manifests."""
        statement = {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": self.stream, "digest": {"sha256": self.tree_sha256}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": self.model_dump(mode="json", exclude_defaults=True),
        }
        return json.dumps(statement, ensure_ascii=False, separators=(",", ":")).encode("utf-8")

    @cached_property
    def by_path(self) -> Mapping[str, FileEntry]:
        """The files by their paths, in the manifest's order."""
        return MappingProxyType({file.path: file for file in self.files})

    @cached_property
    def tree_sha256(self) -> str:
        """One digest that binds the number of files and each one's path, size and content, in hexadecimal.

        SHA-256 over `safeload-tree-v1` LF, then for each file: length of the path in bytes, path, size and SHA-256 in
        hexadecimal, with a space between them and LF after them.
        """
        tree = hashlib.sha256(b"safeload-tree-v1\n")
        for file in self.files:
            path = file.path.encode("utf-8")
            tree.update(b"%d %b %d %b\n" % (len(path), path, file.size, file.sha256.encode("ascii")))
        return tree.hexdigest()


class _Digest(_Model):
    sha256: Sha256


class _Subject(_Model):
    name: str
    digest: _Digest


class _Statement(_Model):
    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: Annotated[tuple[_Subject, ...], _Lax, Field(min_length=1, max_length=1)]
    predicateType: Literal["https://safeload.dev/manifest/v1"]  # noqa: N815 - the field's name in the file
    predicate: Manifest


@dataclass(frozen=True, slots=True)
class Signer:
    """A key whose signature was checked: what it is called where it is trusted, and its keyid."""

    name: str
    keyid: str


@dataclass(frozen=True, slots=True)
class TrustedManifest:
    """Proves that enough trusted keys signed this manifest for its stream. Made by `verifying` and nowhere else.

    Attributes:
        manifest: Parsed from exactly the bytes that were verified.
        sha256: Of those bytes: what to pin, and what a successor names as `previous`.
        signers: The publisher's keys that signed, each once.
        threshold: How many of them were needed.
    """

    manifest: Manifest
    sha256: str
    signers: tuple[Signer, ...]
    threshold: int


def _check_tensor(file: FileEntry, tensor: ManifestTensor) -> None:
    expected = math.prod(tensor.shape) * DTYPE_ITEMSIZE[tensor.dtype]
    if tensor.nbytes != expected:
        raise ValueError(f"{file.path!r}: tensor {tensor.name!r}: expected nbytes {expected}, found {tensor.nbytes}")
    if tensor.offset + (0 if tensor.inline else tensor.nbytes) > file.size:
        raise ValueError(f"{file.path!r}: tensor {tensor.name!r} ends behind the file")


def _fold(path: str) -> str:
    """Caseless matching of canonical equivalents (Unicode, 3.13, D145)."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())


def _first_problem(err: ValidationError) -> str:
    problem = err.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else problem["msg"]


def _refusal(message: str, offset: int | None = None) -> ManifestError:
    return ManifestError(Finding("bad-manifest", f"not a manifest of safeload: {escape(message)}", offset=offset))
