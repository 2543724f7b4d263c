"""The manifest: the closed list of a checkpoint's files, and what is in each. Data only; whose it is, `verifying` says.

On disk it is the predicate of an in-toto Statement v1. Nothing is ever canonicalized: the bytes that were signed are
the bytes that are parsed.
"""

from __future__ import annotations

import binascii
import gc
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from operator import lt
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    Strict,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass as record

from safeload.digests import CHUNK_BYTES
from safeload.errors import ConfigError, Finding, ManifestError, escape
from safeload.tensors import DTYPE_ITEMSIZE, TENSOR_FORMATS, TensorSpec, span
from safeload.trust import strict_json
from safeload.trust.dsse import decode_base64

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

_SHA256_BYTES: Final = 32

_MAX_DEPTH: Final = 16
"""Statement, predicate, files, file, tensors, tensor, shape make seven."""

_BLANK: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""What shows nothing and `str.isprintable` lets pass, so that two paths could look the same: the marks and letters that
have Default_Ignorable_Code_Point (Unicode, DerivedCoreProperties.txt), and the blank of Braille."""

_DRIVE: Final = re.compile(r"[A-Za-z]:")

_PLAIN_COMPONENT: Final = r"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9_-])?"
_PLAIN_PATH: Final = re.compile(rf"{_PLAIN_COMPONENT}(?:/{_PLAIN_COMPONENT}){{0,{MAX_PATH_DEPTH - 1}}}")
"""Paths that keep every rule of `check_path` but the length of the whole: nearly all there are, told at one look."""

Role: TypeAlias = Literal[
    "weights",
    "config",
    "tokenizer",
    "template",
    "optimizer",
    "schedule",
    "step",
    "rng",
    "data-progress",
    "docs",
    "other",
]
"""What a file of a checkpoint is for."""

RestoreKind: TypeAlias = Literal["inference", "training"]
"""What a checkpoint is restored for: to run the model, or to go on training it as if nothing had happened."""

_NEEDED: Final[Mapping[RestoreKind, tuple[Role, ...]]] = MappingProxyType(
    {"inference": ("weights",), "training": ("weights", "optimizer", "step", "rng")}
)
"""The least that a restore of each kind takes. A manifest can ask for more, and for less never."""

_WHERE_PRESENT: Final[tuple[Role, ...]] = ("config", "tokenizer", "template")
"""What a model that has them does not run right without: required of any restore if they were there when signing."""

_STATE_NAMES: Final[tuple[tuple[Role, re.Pattern[str]], ...]] = (
    ("optimizer", re.compile(r"(?:optimizers?|optim|opt_state)(?![a-z])")),
    ("schedule", re.compile(r"(?:lr_)?schedule(?:rs?)?(?![a-z])")),
    ("rng", re.compile(r"(?:p?rng|random_state)(?![a-z])")),
    ("data-progress", re.compile(r"data_?(?:progress|state|loader|iterator)(?![a-z])|sampler(?![a-z])")),
    # The whole stem, because `step_1000` is how the weights of one step are called.
    ("step", re.compile(r"(?:trainer_state|(?:global_|training_)?step)(?:\.|$)")),
)
_MODEL_NAMES: Final[tuple[tuple[Role, re.Pattern[str]], ...]] = (
    ("template", re.compile(r"chat_template(?![a-z])")),
    ("tokenizer", re.compile(r"tokenizer|vocab|merges|special_tokens|added_tokens|sentencepiece|spiece")),
)
"""How the names of files of each role begin, in lower case. The second table is not asked about tensors:
`vocab_embedding` is a tensor."""


def check_path(path: str) -> None:
    """Return if `path` names one file below a directory wherever safeload runs, and shows as it is.

    Names to which only Windows gives a meaning, such as `NUL` or `a:b`, are names like others.

    Args:
        path: Relative, with `/` between its components.

    Raises:
        ValueError: It is empty, absolute, not NFC or too long or deep; it has a backslash, a drive, or a character that
            cannot be seen (controls, bidirectional marks, odd spaces, unpaired surrogates, variation selectors and
            others that are ignored where text is shown); or a component that is empty, `.`, `..` or `.git`, or ends in
            a dot or a space.
    """
    if len(path) <= MAX_PATH_BYTES and _PLAIN_PATH.fullmatch(path):
        return
    if not path.isprintable() or _BLANK.search(path):
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


def role_of(kind: str, name: str) -> Role:
    """Return what a file is for, by its format and its name without directories.

    Args:
        kind: Format of its content, one of `FORMATS`.
        name: The last component of its path.
    """
    holds_tensors = kind in TENSOR_FORMATS or kind == "index"
    tables = _STATE_NAMES if holds_tensors else _STATE_NAMES + _MODEL_NAMES
    lower = name.lower()
    for role, pattern in tables:
        if pattern.match(lower):
            return role
    by_kind: dict[str, Role] = {"json": "config", "text": "docs", "store": "weights"}
    return "weights" if holds_tensors else by_kind.get(kind, "other")


def required_roles(kind: RestoreKind, present: Iterable[Role], *, more: Iterable[Role] = ()) -> tuple[Role, ...]:
    """Return the roles that a manifest of a kind requires, each once: the least, what the model has, and `more`.

    Args:
        kind: What the checkpoint is to be restored for.
        present: Roles of the files that are there.
        more: What its publisher wants besides.
    """
    there = set(present)
    return tuple(dict.fromkeys((*_NEEDED[kind], *(role for role in _WHERE_PRESENT if role in there), *more)))


def missing_roles(manifest: Manifest, purpose: RestoreKind) -> tuple[Role, ...]:
    """Return the roles that a restore for `purpose` needs and no file of the manifest has; empty where it is complete.

    It goes by the files, and not by the kind that the manifest claims: a checkpoint that was signed for inference and
    has all that a resume needs lacks nothing. What the manifest itself requires is needed as well, where it is of that
    kind.
    """
    more = manifest.requires if manifest.kind == purpose else ()
    present = {file.role for file in manifest.files}
    return tuple(role for role in required_roles(purpose, present, more=more) if role not in present)


def _checked_path(path: str) -> str:
    check_path(path)
    return path


def _real_instant(text: str) -> str:
    datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return text


Sha256 = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{64}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}$")]
"""A name that can be typed and matched by a glob, and shows as it is: `hf:xai-org/grok-1`, a commit, a version."""
Instant = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"),
    AfterValidator(_real_instant),
]
Chunks = Annotated[
    str,
    # The one base64 text of its bytes (RFC 4648, 3.5), checked in a hundredth of the time that decoding it takes here.
    StringConstraints(
        strict=True,
        pattern=r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$",
    ),
]
Text = Annotated[str, StringConstraints(strict=True, max_length=4096)]
"""Free text of a file's own. The limit also makes pydantic look inside: it refuses what UTF-8 cannot spell."""
NonEmptyText = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=4096)]
Count = Annotated[int, Field(strict=True, ge=0, le=strict_json.MAX_INTEGER)]
Ordinal = Annotated[int, Field(ge=1, le=strict_json.MAX_INTEGER)]
FORMATS: Final = (*TENSOR_FORMATS, "index", "json", "text", "opaque", "store")
"""What a file's content can be: a container of tensors, an index of such files, data beside them, or a part of an array
store (Orbax) that safeload verifies and does not read."""
DTypeName = Literal[tuple(DTYPE_ITEMSIZE)]  # type: ignore[valid-type] # one table of dtypes, not a second list
_Lax = Field(strict=False)  # JSON has lists, a frozen model has tuples; what is in them stays strict
_First = FailFast()  # one thing that is wrong in a list is told, and a million are not collected


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


# What a manifest has thousands of takes half of a model's memory, and of the collector's time, as a record with slots.
# A strict record would want to be handed an instance, and no object of JSON, so here each field is strict by its type.
@record(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ManifestTensor:
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
        strides: Steps between neighbors along each dimension, in elements, for a view that is contiguous in neither
            order; `nbytes` is then the span from its first element to its last.
        sha256: Of the value's C-order little-endian bytes, whatever the file's order is.
    """

    name: Text
    dtype: DTypeName  # type: ignore[valid-type] # see DTypeName
    shape: Annotated[tuple[Count, ...], _Lax, _First, Field(max_length=MAX_RANK)]
    order: Literal["C", "F"]
    offset: Count
    nbytes: Count
    byteorder: Literal["little", "big"] = "little"
    inline: Annotated[bool, Strict()] = False
    strides: Annotated[tuple[Count, ...], _Lax, Field(max_length=MAX_RANK)] | None = None
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
                strides=spec.strides,
                sha256=spec.sha256,
            )
        except ValidationError as err:
            raise _refusal(f"tensor {spec.name!r}: {first_problem(err)}") from err


@record(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FileEntry:
    """One file of the checkpoint, and all that a scan of it must find again.

    Attributes:
        path: Relative to the checkpoint's directory, as `check_path` allows it.
        size: Length in bytes.
        sha256: Of the whole file.
        chunks: SHA-256 of each piece of `CHUNK_BYTES` of it, the last one shorter, one behind the other, in base64;
            None for a file of one piece, or where nobody took them. They cover each byte, and the size bounds their
            number: a file whose chunks all match is the signed one as surely as one whose `sha256` does.
        blake3: Of the whole file, where its publisher wanted one beside SHA-256.
        blake3_chunks: BLAKE3 of each chunk, written as `chunks` are; only beside `chunks` and `blake3`.
        format: What its content is.
        role: What it is for.
        parameter: Name of the parameter that this shard holds in the checkpoint's tree, for files that carry no names
            of their own; None where it is not known.
        tensors: In stored order.
        globals: Every global that a pickle names, as `module.name`, in order of first use.
    """

    path: Annotated[str, Strict(), AfterValidator(_checked_path)]
    size: Count
    sha256: Sha256
    chunks: Chunks | None = None
    blake3: Sha256 | None = None
    blake3_chunks: Chunks | None = None
    format: Literal[FORMATS]  # type: ignore[valid-type] # one table of formats
    role: Role
    parameter: NonEmptyText | None = None
    tensors: Annotated[tuple[ManifestTensor, ...], _Lax, _First] = ()
    globals: Annotated[tuple[NonEmptyText, ...], _Lax, _First] = ()

    @property
    def chunk_digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each chunk, 32 bytes each, in order; empty where the manifest has none."""
        return _split_digests(self.chunks)

    @property
    def blake3_chunk_digests(self) -> tuple[bytes, ...]:
        """BLAKE3 of each chunk, 32 bytes each, in order; empty where the manifest has none."""
        return _split_digests(self.blake3_chunks)


def _split_digests(chunks: str | None) -> tuple[bytes, ...]:
    joined = b"" if chunks is None else decode_base64(chunks)
    return tuple(joined[start : start + _SHA256_BYTES] for start in range(0, len(joined), _SHA256_BYTES))


def encode_chunks(digests: bytes) -> str:
    """Return what `FileEntry.chunks` holds for these digests, 32 bytes each, joined in order."""
    return binascii.b2a_base64(digests, newline=False).decode("ascii")


class Hashing(_Model):
    """How the digests were taken. There is one way so far; a reader need not know it by heart.

    Attributes:
        file: Of whole files.
        chunk: Of their chunks.
        chunk_size: Bytes of each chunk but the last.
    """

    file: Literal["sha256"] = "sha256"
    chunk: Literal["sha256"] = "sha256"
    chunk_size: Literal[16777216] = 16777216


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
        crit: Extensions that a reader must know. This one knows none, so that any is refused.
        stream: Which model this is: what publishers are scoped to.
        revision: Which state of it, in the publisher's own terms.
        epoch: Goes before `version`: counts the times that versions had to start anew.
        version: Counts the manifests of the stream, from 1.
        issued: When it was made, UTC.
        expires: When it stops to be current, UTC; None for never.
        previous: SHA-256 of the payload that this one replaces, None for the first.
        derived_from: SHA-256 of the payload of the manifest whose checkpoint was converted to this one; None if none
            was.
        kind: What a restore of it is for.
        requires: Roles that such a restore needs; each is the role of a file.
        hash: How chunks were hashed; there exactly if a file has chunks.
        totals: Count and sum over `files`.
        files: By the bytes of their UTF-8 paths; no two are one file where case and normalization do not count.
        tool: What wrote it.
    """

    spec: Literal["1.0"]
    crit: Annotated[tuple[NonEmptyText, ...], _Lax, _First] = ()
    stream: Label
    revision: Label
    epoch: Ordinal = 1
    version: Ordinal
    issued: Instant
    expires: Instant | None = None
    previous: Sha256 | None
    derived_from: Sha256 | None = None
    kind: RestoreKind = "inference"
    requires: Annotated[tuple[Role, ...], _Lax, _First] = ()
    hash: Hashing | None = None
    totals: Totals
    files: Annotated[tuple[FileEntry, ...], _Lax, _First, Field(min_length=1, max_length=MAX_FILES)]
    tool: Tool

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Manifest:
        if self.crit:
            raise ValueError(f"it has critical extensions that this version does not know: {', '.join(self.crit)}")
        if self.expires is not None and self.expires <= self.issued:
            raise ValueError(f"it expires before it is issued: {self.expires}, and {self.issued}")
        _check_paths([file.path for file in self.files])
        # One pass here: a validator for each entry would cost more than everything else together.
        for file in self.files:
            if file.chunks is not None:
                _check_chunks(file, file.chunks)
            if file.blake3_chunks is not None:
                if file.chunks is None or file.blake3 is None:
                    raise ValueError(f"{file.path!r}: expected `blake3_chunks` only beside `chunks` and `blake3`")
                _check_chunks(file, file.blake3_chunks)
            if file.format not in TENSOR_FORMATS and (file.tensors or file.globals or file.parameter):
                message = f"a file of format {file.format} has no tensors, globals or parameter"
                raise ValueError(f"{file.path!r}: {message}")
            for tensor in file.tensors:
                _check_tensor(file, tensor)
        n_bytes = sum(file.size for file in self.files)
        if self.totals.files != len(self.files) or self.totals.bytes != n_bytes:
            expected = Totals(files=len(self.files), bytes=n_bytes)
            raise ValueError(f"totals are not those of the files: expected {expected}, found {self.totals}")
        if any(file.chunks is not None for file in self.files) != (self.hash is not None):
            raise ValueError("expected `hash` exactly if a file has chunks")
        roles = {file.role for file in self.files}
        if absent := [role for role in self.requires if role not in roles]:
            raise ValueError(f"it requires roles that no file has: {', '.join(absent)}")
        if len(set(self.requires)) != len(self.requires):
            raise ValueError("it requires a role twice")
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
        epoch: int = 1,
        expires: datetime | None = None,
        kind: RestoreKind = "inference",
        requires: Sequence[Role] = (),
        derived_from: str | None = None,
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
            epoch: One more than that of the manifest before if versions start anew.
            expires: When it stops to be current, with its time zone.
            kind: What a restore of it is for.
            requires: Roles that such a restore needs, as `required_roles` has them.
            derived_from: SHA-256 of the payload of the manifest whose checkpoint was converted.

        Raises:
            ManifestError: The files cannot stand in one manifest, or none has a required role.
            ConfigError: Another argument is not of the form that a manifest has it in, or it expires before it begins.
        """
        if expires is not None:
            if expires.tzinfo is None:
                raise ConfigError("expires: expected a time with its zone, found one without")
            try:
                expires = expires.astimezone(UTC)
            except OverflowError as err:
                raise ConfigError("expires: expected a date within the years 1 to 9999 in UTC") from err
        if expires is not None and expires <= issued:
            raise ConfigError(f"it expires before it is issued: {_instant(expires)}, and {_instant(issued)}")
        entries = tuple(sorted(files, key=lambda file: file.path.encode("utf-8")))
        try:
            return cls(
                spec="1.0",
                stream=stream,
                revision=revision,
                epoch=epoch,
                version=version,
                issued=_instant(issued),
                expires=None if expires is None else _instant(expires),
                previous=previous,
                derived_from=derived_from,
                kind=kind,
                requires=tuple(requires),
                hash=Hashing() if any(file.chunks is not None for file in entries) else None,
                totals=Totals(files=len(entries), bytes=sum(file.size for file in entries)),
                files=entries,
                tool=Tool(name="safeload", version=tool_version),
            )
        except ValidationError as err:
            place = err.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]
            if place and place[0] in _ARGUMENTS:
                raise ConfigError(f"manifest: {first_problem(err)}") from err
            raise _refusal(first_problem(err)) from err

    @classmethod
    def parse(cls, payload: bytes) -> Manifest:
        """Return the manifest that a payload states.

        Args:
            payload: The bytes of an in-toto Statement v1, exactly as they were verified.

        Raises:
            ManifestError: It is no strict JSON, not of the schema, or does not agree with itself.
        """
        try:
            with _collector_paused():
                # Without a name of its own, what was decoded is gone before the collector looks again.
                statement = _Statement.model_validate(
                    strict_json.loads(payload, max_bytes=MAX_PAYLOAD_BYTES, max_depth=_MAX_DEPTH)
                )
        except ManifestError as err:
            raise _refusal(err.findings[0].message, err.findings[0].offset) from err
        except ValidationError as err:
            raise _refusal(first_problem(err)) from err
        subject, manifest = statement.subject[0], statement.predicate
        if subject.name != manifest.stream:
            raise _refusal(f"expected the subject {manifest.stream}, found {subject.name}")
        if subject.digest.sha256 != manifest.tree_sha256:
            raise _refusal(f"expected the tree digest {manifest.tree_sha256}, found {subject.digest.sha256}")
        return manifest

    def to_payload(self) -> bytes:
        """Return the manifest as the bytes to sign, always the same for equal manifests."""
        predicate = self.model_dump(mode="json", exclude_defaults=True)
        if self.hash is not None:
            # It is there to be read, though it can say only one thing.
            predicate["hash"] = self.hash.model_dump(mode="json")
        statement = {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": self.stream, "digest": {"sha256": self.tree_sha256}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": predicate,
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
        lines = [f"{_utf8_length(file.path)} {file.path} {file.size} {file.sha256}\n" for file in self.files]
        return hashlib.sha256("".join(["safeload-tree-v1\n", *lines]).encode("utf-8")).hexdigest()


_ARGUMENTS: Final = frozenset(
    {"derived_from", "epoch", "expires", "issued", "kind", "previous", "requires", "revision", "stream", "version"}
)
"""Fields of a manifest that a caller states, and no scan finds."""


class _Digest(_Model):
    sha256: Sha256


class _Subject(_Model):
    name: str
    digest: _Digest


class _Statement(_Model):
    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: Annotated[tuple[_Subject, ...], _Lax, _First, Field(min_length=1, max_length=1)]
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
        publisher: Whose keys they are, by the trust store's name.
        ignored: Keys of the store that signed too and did not count: revoked, or not valid now.
    """

    manifest: Manifest
    sha256: str
    signers: tuple[Signer, ...]
    threshold: int
    publisher: str = ""
    ignored: tuple[Signer, ...] = ()


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector from walking the whole process again and again while a manifest is built.

    A manifest is tens of thousands of objects that all stay and hold no cycles, and every full collection on the way
    looks at them, and at whatever else the process holds, for nothing: that is half of the time otherwise.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _instant(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _check_paths(paths: Sequence[str]) -> None:
    # UTF-8 keeps the order of code points, which is how Python compares strings.
    if not all(map(lt, paths, paths[1:])):
        wrong = next(after for before, after in pairwise(paths) if before >= after)
        raise ValueError(f"files are not in order of their paths' bytes, each once: {wrong!r}")
    if len(set(map(fold_path, paths))) != len(paths):
        raise ValueError("two paths differ only in case or normalization")


def _check_chunks(file: FileEntry, chunks: str) -> None:
    nbytes = -(-file.size // CHUNK_BYTES) * _SHA256_BYTES
    # The text is canonical base64, so that its length and padding say how many bytes it stands for.
    if file.size <= CHUNK_BYTES or len(chunks) != -(-nbytes // 3) * 4:
        raise ValueError(f"{file.path!r}: expected one chunk digest for each {CHUNK_BYTES} bytes of a longer file")
    if len(chunks) - chunks.count("=") != -(-nbytes * 4 // 3):
        raise ValueError(f"{file.path!r}: chunk digests are not {_SHA256_BYTES} bytes each")


def _check_tensor(file: FileEntry, tensor: ManifestTensor) -> None:
    elements = math.prod(tensor.shape)
    if tensor.strides is not None:
        if len(tensor.strides) != len(tensor.shape):
            raise ValueError(f"{file.path!r}: tensor {tensor.name!r}: expected a stride for each dimension")
        elements = span(tensor.shape, tensor.strides)
    expected = elements * DTYPE_ITEMSIZE[tensor.dtype]
    if tensor.nbytes != expected:
        raise ValueError(f"{file.path!r}: tensor {tensor.name!r}: expected nbytes {expected}, found {tensor.nbytes}")
    if tensor.offset + (0 if tensor.inline else expected) > file.size:
        raise ValueError(f"{file.path!r}: tensor {tensor.name!r} ends behind the file")


def fold_path(path: str) -> str:
    """Return what is equal for paths that some file system takes for one (Unicode, 3.13, D145: caseless matching)."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())


def first_problem(err: ValidationError) -> str:
    """Return what is wrong first, and where, without the words that pydantic has around it."""
    problem = err.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    what = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {what}" if place else what


def _refusal(message: str, offset: int | None = None) -> ManifestError:
    return ManifestError(Finding("bad-manifest", f"not a manifest of safeload: {escape(message)}", offset=offset))
