"""What a consumer is willing to load: a TOML file, read strictly into frozen models.

A policy starts from nothing and lists what it allows, each entry with its reason. Nothing is ever read from the
directory that is being checked, and no environment variable is consulted.
"""

from __future__ import annotations

import json
import keyword
import operator
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from safeload.digests import sha256_hex
from safeload.errors import ConfigError, escape, reason
from safeload.records import Record
from safeload.tensors import DTYPE_ITEMSIZE, ML_DTYPES_ITEMSIZE, TENSOR_FORMATS

DEFAULT_POLICY = "numpy-quantized"
"""The policy that is used where none is named."""

MAX_PROBLEMS = 8
"""How many problems of a policy file are told at once."""

MAX_POLICY_BYTES = 1024 * 1024
"""A policy is written by hand; a larger file is a mistake."""


INTERPRETED_GLOBALS = frozenset(
    {
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
        "numpy.ndarray",
        "numpy.dtype",
        *(f"ml_dtypes.{name}" for name in ML_DTYPES_ITEMSIZE),
        "_codecs.encode",
        *(f"{module}.{name}" for module in ("__builtin__", "builtins") for name in ("bytes", "object")),
        "copy_reg._reconstructor",
        "copyreg._reconstructor",
        "collections.OrderedDict",
        "jax._src.array._reconstruct_array",
        "jax._src.device_array.reconstruct_device_array",
        *(f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "qtensor")),
        *(f"torch._utils._rebuild_{name}" for name in ("parameter", "parameter_with_state")),
        *(f"torch.{name}Storage" for name in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char")),
        *(f"torch.{name}Storage" for name in ("Byte", "Bool", "ComplexDouble", "ComplexFloat")),
        *(f"torch.{name}Storage" for name in ("QInt8", "QUInt8", "QInt32")),
        "torch.storage.UntypedStorage",
        *(f"torch.uint{bits}" for bits in (16, 32, 64)),
        *(f"torch.float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")),
        "torch.per_tensor_affine",
        "torch.per_channel_affine",
        "torch.Size",
    }
)
"""Every global that a policy can list: those that `formats.pickles` interprets, PyTorch's only in its own files. A test
holds it against the constructors."""


def _usable_as_field(name: str) -> str:
    # A record class is made with these names, and what it has itself must not be hidden by one of them.
    if keyword.iskeyword(name) or name.startswith("_") or hasattr(Record, name):
        raise ValueError(f"a record cannot have a field called {name}")
    return name


def _interpreted(name: str) -> str:
    if name not in INTERPRETED_GLOBALS:
        raise ValueError(f"safeload has no constructor for {name}; a class of plain fields is a [[pickle.records]]")
    return name


Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
FieldName = Annotated[Identifier, AfterValidator(_usable_as_field)]
DottedName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
Reason = Annotated[str, StringConstraints(min_length=8, strip_whitespace=True)]
DTypeName = Literal[tuple(DTYPE_ITEMSIZE)]  # type: ignore[valid-type] # one table of dtypes, not a second list
FilePattern = Annotated[str, StringConstraints(pattern=r"^[^/]+$")]
Version = Annotated[int, Field(ge=1, le=1)]  # a Literal[1] would take `true` and `1.0` as well
Positive = Annotated[int, Field(gt=0, le=1 << 53)]
Protocol = Annotated[int, Field(ge=0, le=5)]
PolicyName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
Description = Annotated[str, StringConstraints(min_length=8)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class AllowedGlobals(_Model):
    """One or more (module, name) pairs that a pickle may mention, written `module.name`, and why that is harmless.

    Only pairs that a built-in constructor interprets can be listed: a policy narrows, it cannot teach new calls.
    """

    names: tuple[Annotated[DottedName, AfterValidator(_interpreted)], ...] = Field(min_length=1)
    reason: Reason


class GroupedScales(_Model):
    """Shape rule of a quantised record: scales `[.., G, N]` belong to a weight `[.., K, N]`, G dividing K."""

    weight: Identifier
    scales: Identifier


class RecordRule(_Model):
    """A class whose instances may appear in a pickle, as data: a name, its modules and exactly these fields."""

    name: Identifier
    modules: tuple[DottedName, ...] = Field(min_length=1)
    fields: Annotated[
        Mapping[FieldName, tuple[DTypeName, ...]],  # type: ignore[valid-type] # see DTypeName
        Field(min_length=1),
        AfterValidator(MappingProxyType),
        PlainSerializer(dict),
    ]
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

    protocols: tuple[Protocol, ...] = (2, 3, 4, 5)
    globals: tuple[AllowedGlobals, ...] = ()
    records: tuple[RecordRule, ...] = ()

    @model_validator(mode="after")
    def _says_each_once(self) -> PickleRules:
        names = [name for entry in self.globals for name in entry.names]
        names += [f"{module}.{rule.name}" for rule in self.records for module in rule.modules]
        for name, times in Counter(names).items():
            if times > 1:
                raise ValueError(f"{name} is listed {times} times; the last would win over what a reader saw first")
        return self

    @cached_property
    def global_names(self) -> frozenset[str]:
        """Every `module.name` that may be mentioned, records aside."""
        return frozenset(name for entry in self.globals for name in entry.names)

    @cached_property
    def records_by_global(self) -> Mapping[str, RecordRule]:
        """The record that each `module.name` stands for."""
        return MappingProxyType({f"{module}.{rule.name}": rule for rule in self.records for module in rule.modules})


class FormatRules(_Model):
    """Which containers of tensors may be loaded."""

    allow: tuple[Literal[TENSOR_FORMATS], ...] = ()  # type: ignore[valid-type] # one table of formats


class InertFiles(_Model):
    """Files that are data and no tensors: admitted by name, checked by content, never opened by the loader."""

    patterns: tuple[FilePattern, ...] = Field(min_length=1)
    content: Literal["json", "text", "opaque", "store"]
    reason: Reason


class FileRules(_Model):
    """Which files may lie beside the tensors."""

    inert: tuple[InertFiles, ...] = ()
    never: tuple[FilePattern, ...] = ()
    """Names that no entry above admits, whatever its patterns are."""

    def inert_for(self, filename: str) -> InertFiles | None:
        """Return the first entry whose pattern fits the last component of a path; case matters."""
        if any(fnmatchcase(filename, pattern) for pattern in self.never):
            return None
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
        except (re.error, OverflowError, RecursionError) as err:
            raise ValueError(f"name is no regular expression: {err}") from err
        return self

    def fits(self, filename: str) -> bool:
        """Whether the last component of a path is a shard's name."""
        return re.fullmatch(self.name, filename) is not None


class Limits(_Model):
    """Upper bounds, none of them taken from the input.

    Those of memory are checked at least once for each 64 KiB that are read, which is as far as one can be exceeded.
    """

    max_operations: Positive = 10_000_000
    """Opcodes a file. A shard has about 60; a pickle of a million plain numbers about a million."""
    max_depth: Annotated[int, Field(gt=0, le=100)] = 64
    """Containers within containers. Real checkpoints stay below 10. At most 100: the result is a nested Python value,
    and Python code that walks it needs a few stack frames a level, of the 1,000 that it has."""
    max_memo_entries: Positive = 4_000_000
    """Memo slots a file, about 100 bytes each. The C pickler makes one for each object."""
    max_stack_items: Positive = 1_000_000
    """Values on the stack at one time, about 100 bytes each. Picklers write items in batches of a thousand; only a
    tuple lies there whole."""
    max_inline_bytes: Positive = 256 * 1024 * 1024
    """Bytes a file that are kept and not pointed at: strings, short byte strings, and the escaped payloads of
    protocols 0 to 2. Modern shards need a few hundred."""
    max_values: Positive = 2_000_000
    """Leaves and containers of the result, counted once for each place they appear in, so that sharing
    cannot multiply them unseen."""
    max_inert_bytes: Positive = 64 * 1024 * 1024
    """Size of a file that is no tensor, which is read whole to be checked. The largest tokenizers have 35 MB."""
    max_file_bytes: Positive = 512 * 1024**3
    """Length of any file. A hole takes no room where it lies, and as long to hash as data does: this many bytes take
    some 5 minutes. All 770 files of Grok-1 together have 318 GB."""


class PickleWidening(_Model):
    """What a derived policy adds to its base's [pickle]."""

    protocols: tuple[Protocol, ...] = ()
    globals: tuple[AllowedGlobals, ...] = ()
    records: tuple[RecordRule, ...] = ()


class Widening(_Model):
    """What a derived policy allows and its base does not: new entries, and limits that are larger."""

    pickle: PickleWidening = PickleWidening()
    files: FileRules = FileRules()
    limits: Mapping[Identifier, Positive] = {}


class PickleNarrowing(_Model):
    """What a derived policy takes away from its base's [pickle]: protocols, `module.name`s, and records by name."""

    protocols: tuple[Protocol, ...] = ()
    globals: tuple[DottedName, ...] = ()
    records: tuple[Identifier, ...] = ()


class Narrowing(_Model):
    """What a derived policy refuses and its base does not: entries taken away, smaller limits, rules for shards."""

    pickle: PickleNarrowing = PickleNarrowing()
    inert_patterns: tuple[str, ...] = ()
    limits: Mapping[Identifier, Positive] = {}
    shards: ShardRules | None = None


class Derivation(_Model):
    """A policy that is written as the difference to a shipped one. Nothing changes but what it says, either way."""

    version: Version
    name: PolicyName
    description: Description
    extends: PolicyName
    widen: Widening = Widening()
    narrow: Narrowing = Narrowing()

    def applied_to(self, base: Policy) -> Policy:
        """Return the whole policy.

        Raises:
            ValueError: It adds what is there, takes away what is not, or moves a limit the wrong way.
        """
        narrow, widen = self.narrow, self.widen
        pickle = PickleRules(
            protocols=tuple(
                sorted(_changed("protocol", base.pickle.protocols, widen.pickle.protocols, narrow.pickle.protocols))
            ),
            globals=(
                *_without_globals(base.pickle.globals, narrow.pickle.globals),
                *_new_globals(base.pickle, widen.pickle.globals),
            ),
            records=_changed(
                "record", base.pickle.records, widen.pickle.records, narrow.pickle.records, key=lambda r: r.name
            ),
        )
        if narrow.shards is not None and base.shards is not None:
            raise ValueError(f"policy {base.name} has [shards] already; write a policy of its own to change them")
        # What was taken away must not fit a later pattern instead.
        kept = tuple(_without_patterns(base.files.inert, narrow.inert_patterns))
        never = (*base.files.never, *narrow.inert_patterns)
        return Policy(
            version=1,
            name=self.name,
            description=self.description,
            formats=base.formats,
            pickle=pickle,
            files=FileRules(inert=(*kept, *widen.files.inert), never=never),
            shards=narrow.shards or base.shards,
            limits=_moved_limits(base.limits, widen.limits, narrow.limits),
        )


class Policy(_Model):
    """A whole policy: what one file states, or what a derived one comes to."""

    version: Version
    name: PolicyName
    description: Description
    formats: FormatRules = FormatRules()
    pickle: PickleRules = PickleRules()
    files: FileRules = FileRules()
    shards: ShardRules | None = None
    limits: Limits = Limits()

    _source: str = ""
    _is_derived: bool = False

    @property
    def is_derived(self) -> bool:
        """Whether it was written as the difference to another policy."""
        return self._is_derived

    def admits_by(self, table: str, *lines: str) -> str:
        """Return the hint that names the lines of a policy that would admit what was refused.

        Those of an array of tables, "[[pickle.globals]]", are TOML to paste at the end of a policy, as it holds any
        number of these: each on a line of its own, behind the line of the table.

        Args:
            table: Where they belong, as a policy that stands alone has it: "[limits]" or "[[pickle.globals]]".
            lines: What to write there: `key = value`; for a table that may be there already, in words.
        """
        separator = "\n" if table.startswith("[[") else " "
        is_own = self.is_derived or self.source not in dict(shipped_policies())
        whose = f"policy {self.name}" if is_own else f'a policy of your own that extends = "{self.name}"'
        return separator.join([f"{whose} can admit it:", self.table_to_widen(table), *lines])

    def table_to_widen(self, table: str) -> str:
        """Return what a table of a policy that stands alone is called in the one that the user can write to."""
        if self.is_derived or self.source in dict(shipped_policies()):
            return table.replace("[[", "[[widen.") if table.startswith("[[") else table.replace("[", "[widen.")
        return table

    @property
    def source(self) -> str:
        """Where the policy was read from: a shipped policy's name, or a path."""
        return self._source

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the resolved policy as JSON: the same for files that differ in comments and layout only.

        The order of a record's fields and that of entries count, because they decide what a file is read as.
        """
        return sha256_hex(json.dumps(self.model_dump(mode="json"), separators=(",", ":")).encode())

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
            table = _tuples(tomllib.loads(text.decode("utf-8")))
            if isinstance(table, dict) and "extends" in table:
                derivation = Derivation.model_validate(table)
                policy = derivation.applied_to(load_policy(derivation.extends))
            else:
                policy = cls.model_validate(table)
        except ValidationError as err:
            problems = err.errors(include_url=False, include_context=False)
            shown = [_in_words(problem) for problem in problems[:MAX_PROBLEMS]]
            shown += [f"and {len(problems) - MAX_PROBLEMS} more"] * (len(problems) > MAX_PROBLEMS)
            raise ConfigError(
                f"policy {escape(source)}: {'; '.join(shown)}",
                hint="the README's section on policies has an example; `safeload policy show NAME` prints a whole one",
            ) from err
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as err:
            raise ConfigError(f"policy {escape(source)}: not TOML: {escape(str(err))}") from err
        except ValueError as err:
            raise ConfigError(f"policy {escape(source)}: {escape(str(err))}") from err
        policy._source = source
        policy._is_derived = isinstance(table, dict) and "extends" in table
        return policy

    def additions_to(self, other: Policy) -> list[str]:
        """Return what this policy allows and `other` does not, one sentence each; empty if it is nowhere wider."""
        mine, theirs = self.pickle, other.pickle
        added = [f"format {name}" for name in self.formats.allow if name not in other.formats.allow]
        added += [f"pickle protocol {n}" for n in mine.protocols if n not in theirs.protocols]
        added += [f"global {name}" for name in sorted(mine.global_names - theirs.global_names)]
        for full, rule in mine.records_by_global.items():
            known = theirs.records_by_global.get(full)
            if known is None:
                added.append(f"record {full}")
            elif list(rule.fields) != list(known.fields):
                added.append(f"record {full} with the fields {', '.join(rule.fields)}")
            else:
                for field, dtypes in rule.fields.items():
                    added += [f"record {full}: {field} of {d}" for d in dtypes if d not in known.fields[field]]
                if known.grouped_scales not in {None, rule.grouped_scales}:
                    added.append(f"record {full}: scales that break its rule")
        added += _wider_files(self.files, other.files)
        if other.shards is not None and self.shards != other.shards:
            added.append(f"shards other than {other.shards.name} with {' or '.join(other.shards.holds)}")
        limits, bounds = self.limits.model_dump(), other.limits.model_dump()
        return added + [
            f"{name} = {limits[name]:,} (from {bounds[name]:,})" for name in limits if limits[name] > bounds[name]
        ]

    def to_toml(self) -> str:
        """Return the resolved policy as a policy file."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True, by_alias=True))


def quoted(text: str) -> str:
    """Return text as a basic string of TOML 1.0, on one line and printable."""
    shown = (
        f"\\{c}"
        if c in '"\\'
        else c
        if c.isprintable()
        else f"\\u{ord(c):04x}"
        if ord(c) < 1 << 16
        else f"\\U{ord(c):08x}"
        for c in text
    )
    return f'"{"".join(shown)}"'


def exact_pattern(name: str) -> str:
    """Return the pattern of `[[files.inert]]` that fits this name and no other, as TOML."""
    return quoted("".join(f"[{c}]" if c in "*?[" else c for c in name))


def _wider_files(mine: FileRules, theirs: FileRules) -> Iterator[str]:
    """Yield what `mine` may admit and `theirs` refuses.

    The first pattern that fits a name decides, so an entry is the same only behind all that came before it there and
    may fit the same names.
    """
    before: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for entry in theirs.inert:
        for pattern in entry.patterns:
            before.setdefault((pattern, entry.content), set(before))
    seen: set[tuple[str, str]] = set()
    told: set[str] = set()
    for entry in mine.inert:
        for pattern in entry.patterns:
            this = pattern, entry.content
            lost = {p for p, _ in before.get(this, set()) - seen if _may_share(p, pattern)} - set(mine.never)
            if this not in before or lost:
                told.add(pattern)
                yield f"files named {pattern} as {entry.content}"
            seen.add(this)
    for never in theirs.never:
        if never not in {*mine.never, *told} and any(_may_share(never, pattern) for pattern, _ in seen):
            yield f"files named {never}"


def _may_share(one: str, other: str) -> bool:
    """Whether some name may fit both patterns; exact for plain names and for a star at one end."""
    if not set("*?[") & set(one):
        return fnmatchcase(one, other)
    if not set("*?[") & set(other):
        return fnmatchcase(other, one)
    ends = [p[1:] for p in (one, other) if p[0] == "*" and not set("*?[") & set(p[1:])]
    return len(ends) < 2 or ends[0].endswith(ends[1]) or ends[1].endswith(ends[0])


def _in_words(problem: ErrorDetails) -> str:
    """Say what is wrong with one place of a policy file."""
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    match problem["type"]:
        case "missing":
            found = "expected it, found none"
        case "extra_forbidden" if place in Policy.model_fields:
            found = f"a policy that extends another says [widen.{place}] or [narrow.{place}]"
        case "extra_forbidden":
            found = "there is no such key"
        case _:
            found = problem["msg"].removeprefix("Value error, ")
    return f"{escape(place)}: {escape(found)}"


T = TypeVar("T")


def _changed(
    noun: str,
    base: tuple[T, ...],
    added: tuple[T, ...],
    removed: tuple[object, ...],
    key: Callable[[T], object] = lambda entry: entry,
) -> tuple[T, ...]:
    """Return `base` with entries added and removed, refusing to do either where it would change nothing."""
    have = {key(entry) for entry in base}
    for entry in added:
        if key(entry) in have:
            raise ValueError(f"widen: {noun} {key(entry)} is allowed by the base already")
    for name in removed:
        if name not in have:
            raise ValueError(f"narrow: {noun} {name} is not allowed by the base")
    return (*(entry for entry in base if key(entry) not in removed), *added)


def _without_globals(base: tuple[AllowedGlobals, ...], removed: tuple[str, ...]) -> Iterator[AllowedGlobals]:
    _changed("global", tuple(name for entry in base for name in entry.names), (), removed)
    for entry in base:
        left = tuple(name for name in entry.names if name not in removed)
        if left:
            yield entry.model_copy(update={"names": left})


def _new_globals(base: PickleRules, added: tuple[AllowedGlobals, ...]) -> tuple[AllowedGlobals, ...]:
    _changed("global", tuple(base.global_names), tuple(name for entry in added for name in entry.names), ())
    return added


def _without_patterns(base: tuple[InertFiles, ...], removed: tuple[str, ...]) -> Iterator[InertFiles]:
    _changed("pattern", tuple(pattern for entry in base for pattern in entry.patterns), (), removed)
    for entry in base:
        left = tuple(pattern for pattern in entry.patterns if pattern not in removed)
        if left:
            yield entry.model_copy(update={"patterns": left})


def _moved_limits(base: Limits, up: Mapping[str, int], down: Mapping[str, int]) -> Limits:
    bounds = base.model_dump()
    for table, limits, right_way in (("widen", up, operator.gt), ("narrow", down, operator.lt)):
        for name, bound in limits.items():
            if name not in bounds:
                raise ValueError(f"{table}.limits: there is no limit {name}; known are {', '.join(bounds)}")
            if not right_way(bound, base.model_dump()[name]):
                raise ValueError(f"{table}.limits: {name} = {bound:,} does not {table} the base's {bounds[name]:,}")
            bounds[name] = bound
    return Limits(**bounds)


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


def is_policy_path(name_or_path: str | Path) -> bool:
    """Whether this is a path of a policy, and no name of a shipped one."""
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or "/" in text or text.endswith(".toml")


def policy_text(name_or_path: str | Path) -> tuple[bytes, str]:
    """Return a policy file's bytes and what to call it.

    A plain word names a shipped policy; anything with a `/` or ending in `.toml` is a path. So a file in the
    current folder can never stand in for a shipped policy.

    Raises:
        ConfigError: There is no such policy, or it cannot be read.
    """
    text = str(name_or_path)
    if is_policy_path(name_or_path):
        try:
            with Path(text).open("rb") as file:
                return file.read(MAX_POLICY_BYTES + 1), text
        except (OSError, ValueError) as err:
            raise ConfigError(f"cannot read policy {escape(text)}: {reason(err)}", hint="check the path") from err
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
