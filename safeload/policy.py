"""What a consumer is willing to load: a TOML file, read strictly into frozen models.

A policy starts from nothing and lists what it allows, each entry with its reason. Nothing is ever read from the
directory that is being checked, and no environment variable is consulted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, escape
from safeload.tensors import DTYPE_ITEMSIZE

DEFAULT_POLICY = "numpy-quantized"
"""The policy that is used where none is named."""

MAX_POLICY_BYTES = 1024 * 1024
"""A policy is written by hand; a larger file is a mistake."""

Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
DottedName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
Reason = Annotated[str, StringConstraints(min_length=8, strip_whitespace=True)]
DTypeName = Literal[tuple(DTYPE_ITEMSIZE)]  # type: ignore[valid-type] # one table of dtypes, not a second list
Positive = Annotated[int, Field(gt=0)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class AllowedGlobals(_Model):
    """One or more (module, name) pairs that a pickle may mention, written `module.name`, and why that is harmless.

    Only pairs that a built-in constructor interprets have a meaning: a policy narrows, it cannot teach new calls.
    """

    names: tuple[DottedName, ...] = Field(min_length=1)
    reason: Reason


class GroupedScales(_Model):
    """Shape rule of a quantised record: scales `[.., G, N]` belong to a weight `[.., K, N]`, G dividing K."""

    weight: Identifier
    scales: Identifier


class RecordRule(_Model):
    """A class whose instances may appear in a pickle, as data: a name, its modules and exactly these fields."""

    name: Identifier
    modules: tuple[DottedName, ...] = Field(min_length=1)
    fields: Mapping[Identifier, tuple[DTypeName, ...]] = Field(min_length=1)  # type: ignore[valid-type] # see above
    grouped_scales: GroupedScales | None = None
    reason: Reason

    @model_validator(mode="after")
    def _rule_names_fields(self) -> RecordRule:
        rule = self.grouped_scales
        if rule is not None and not {rule.weight, rule.scales} <= set(self.fields):
            raise ValueError("grouped_scales names a field that the record does not have")
        return self


class PickleRules(_Model):
    """What a pickle may be made of."""

    protocols: tuple[Annotated[int, Field(ge=0, le=5)], ...] = (2, 3, 4, 5)
    globals: tuple[AllowedGlobals, ...] = ()
    records: tuple[RecordRule, ...] = ()

    @cached_property
    def global_names(self) -> frozenset[str]:
        """Every `module.name` that may be mentioned, records aside."""
        return frozenset(name for entry in self.globals for name in entry.names)

    @cached_property
    def records_by_global(self) -> Mapping[str, RecordRule]:
        """The record that each `module.name` stands for."""
        return {f"{module}.{rule.name}": rule for rule in self.records for module in rule.modules}


class FormatRules(_Model):
    """Which containers of tensors may be loaded."""

    allow: tuple[Literal["pickle"], ...] = ()


class InertFiles(_Model):
    """Files that are data and no tensors: admitted by name, checked by content, never opened by the loader."""

    patterns: tuple[Annotated[str, StringConstraints(pattern=r"^[^/]+$")], ...] = Field(min_length=1)
    content: Literal["json", "text", "opaque"]
    reason: Reason


class FileRules(_Model):
    """Which files may lie beside the tensors."""

    inert: tuple[InertFiles, ...] = ()

    def inert_for(self, filename: str) -> InertFiles | None:
        """Return the first entry whose pattern fits the last component of a path; case matters."""
        for entry in self.inert:
            if any(fnmatchcase(filename, pattern) for pattern in entry.patterns):
                return entry
        return None


class ShardRules(_Model):
    """What every file of tensors must look like, for checkpoints of one fixed layout."""

    name: str
    holds: tuple[str, ...] = Field(min_length=1)
    array_dtypes: tuple[DTypeName, ...] = Field(min_length=1)  # type: ignore[valid-type] # see DTypeName

    @model_validator(mode="after")
    def _name_compiles(self) -> ShardRules:
        try:
            re.compile(self.name)
        except re.error as err:
            raise ValueError(f"name is no regular expression: {err}") from err
        return self

    def fits(self, filename: str) -> bool:
        """Whether the last component of a path is a shard's name."""
        return re.fullmatch(self.name, filename) is not None


class Limits(_Model):
    """Upper bounds. None is ever taken from the input, and each is checked before the resource is used."""

    max_operations: Positive = 20_000_000
    """Opcodes a file. A shard has about 60; a pickle of a million plain numbers about a million."""
    max_depth: Positive = 64
    """Containers within containers. Real checkpoints stay below 10; Python's own unpickler breaks near 1,000."""
    max_memo_entries: Positive = 5_000_000
    """Memo slots a file, about 100 bytes each. The C pickler makes one for each object."""
    max_stack_items: Positive = 5_000_000
    """Values on the stack a file, about 100 bytes each."""
    max_inline_bytes: Positive = 256 * 1024 * 1024
    """Bytes a file that must be decoded and cannot be pointed at: strings, and the escaped payloads of protocol
    0 to 2. Modern pickles need a few hundred."""
    max_values: Positive = 2_000_000
    """Leaves and containers of the result, counted once for each place they appear in, so that sharing
    cannot multiply them unseen."""
    max_inert_bytes: Positive = 64 * 1024 * 1024
    """Size of a file that is no tensor, which is read whole to be checked. The largest tokenizers have 35 MB."""


class Policy(_Model):
    """A whole policy, as one file states it."""

    version: Literal[1]
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    description: Annotated[str, StringConstraints(min_length=8)]
    formats: FormatRules = FormatRules()
    pickle: PickleRules = PickleRules()
    files: FileRules = FileRules()
    shards: ShardRules | None = None
    limits: Limits = Limits()

    _source: str = ""
    _sha256: str = ""

    @property
    def source(self) -> str:
        """Where the policy was read from: a shipped policy's name, or a path."""
        return self._source

    @property
    def sha256(self) -> str:
        """SHA-256 of the policy file's bytes."""
        return self._sha256

    @model_validator(mode="after")
    def _shards_hold_what_is_declared(self) -> Policy:
        known = {"array", *(rule.name for rule in self.pickle.records)}
        if self.shards is not None and not set(self.shards.holds) <= known:
            raise ValueError(f"shards.holds names what no record declares; known are {sorted(known)}")
        return self

    @classmethod
    def parse(cls, text: bytes, *, source: str) -> Policy:
        """Parse one policy file.

        Args:
            text: The file's bytes: UTF-8 TOML.
            source: What to call it in messages.

        Raises:
            ConfigError: It is not TOML, or has an unknown key, a wrong type, or an entry that is not allowed.
        """
        if len(text) > MAX_POLICY_BYTES:
            raise ConfigError(f"policy {escape(source)}: more than {MAX_POLICY_BYTES} bytes")
        try:
            policy = cls.model_validate(_tuples(tomllib.loads(text.decode("utf-8"))))
        except ValidationError as err:
            problem = err.errors(include_url=False, include_context=False)[0]
            place = ".".join(str(part) for part in problem["loc"]) or "the file"
            raise ConfigError(
                f"policy {escape(source)}: {escape(place)}: {escape(problem['msg'])}",
                hint="see `safeload policy show numpy-quantized` for a complete, commented example",
            ) from err
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
            raise ConfigError(f"policy {escape(source)}: not TOML: {escape(str(err))}") from err
        policy._source = source
        policy._sha256 = sha256_hex(text)
        return policy


def _tuples(value: object) -> object:
    """TOML's arrays as tuples, so that a frozen model is frozen all the way down."""
    if isinstance(value, dict):
        return {key: _tuples(child) for key, child in value.items()}
    return tuple(_tuples(child) for child in value) if isinstance(value, list) else value


def shipped_policies() -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each policy that comes with safeload, by name."""
    package = Path(__file__).parent
    # A wheel carries the folder inside the package; a source tree (editable install) has it beside the package.
    folder = next((f for f in (package / "policies", package.parent / "policies") if f.is_dir()), None)
    if folder is None:
        raise ConfigError("the shipped policies are missing from this installation", hint="install safeload again")
    for path in sorted(folder.glob("*.toml")):
        yield path.stem, path


def policy_text(name_or_path: str | Path) -> tuple[bytes, str]:
    """Return a policy file's bytes and what to call it.

    A plain word names a shipped policy; anything with a `/` or ending in `.toml` is a path. So a file in the
    current folder can never stand in for a shipped policy.

    Raises:
        ConfigError: There is no such policy, or it cannot be read.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith(".toml"):
        try:
            return Path(text).read_bytes(), text
        except (OSError, ValueError) as err:
            raise ConfigError(f"policy {escape(text)}: {escape(str(err))}") from err
    shipped = dict(shipped_policies())
    if text not in shipped:
        raise ConfigError(
            f"no policy is called {escape(text)!r}",
            hint=f"shipped are {', '.join(shipped)}; a path to your own must contain a / or end in .toml",
        )
    return shipped[text].read_bytes(), text


def load_policy(policy: Policy | str | Path) -> Policy:
    """Return the policy of a shipped name or of a path; a `Policy` is returned as it is.

    Raises:
        ConfigError: There is no such policy, or it is not valid.
    """
    if isinstance(policy, Policy):
        return policy
    text, source = policy_text(policy)
    return Policy.parse(text, source=source)
