r"""Rules that turn the names and layouts of a checkpoint into those of a model: a TOML file, read into frozen models.

The steps have one order, whatever the order in a file: rename, exclude, transpose, split, merge, reshape, squeeze, tie,
build, cast. All but `rename` go by the names that renaming made, and `cast` by those at the end. Within a step, the
first rule that matches a name counts. A rule matches a name as a whole; what it makes is named by a template, in which
`\1` or `\g<name>` stands for a group of the match and two backslashes for one.

Names come from files, and so may be made to keep a regular expression busy for ever. So an expression is refused that
could be tried in more ways than `MAX_WAYS` on the longest name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from safeload.errors import ConfigError, escape, reason

MAX_NAME: Final = 512
"""Longest name of a tensor that rules are tried on, in characters. Flax and TensorFlow reach about 200."""

_NAME_BITS: Final = 9  # of `MAX_NAME`

MAX_WAYS: Final = 1 << 28
"""Most ways to match one name that an expression may have: some seconds, in the worst of cases."""

_WAYS_BITS: Final = MAX_WAYS.bit_length() - 1

MAX_RULES_BYTES: Final = 1024 * 1024
"""Rules are written by hand; a longer file is a mistake."""

_MAX_PROBLEMS: Final = 8
_MAX_PATTERN: Final = 1000  # characters; longer than any name
_MAX_RANK: Final = 32  # dimensions; what every numpy holds
_MAX_PARTS: Final = 4096
_GROUPS: Final = ("(?:", "(?P<", "(?=", "(?!")
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_QUANTIFIER: Final = re.compile(r"(?:[*+?]|\{(?P<exact>\d+)\}|\{\d*,?\d*\})[?+]?")
"""With what makes it lazy or possessive, which are the same ways in another order, or fewer."""
_REFERENCE: Final = re.compile(
    r"\\(?:(?P<number>[1-9])|g<(?P<name>[A-Za-z_]\w*)>|(?P<slash>\\)|(?P<wrong>.?))", re.DOTALL
)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as err:
        raise ValueError(f"{text!r} is no regular expression: {err}") from err
    bits = _bits(text)
    if bits > _WAYS_BITS:
        raise ValueError(f"{text!r} can be tried in 2**{bits} ways on one name; use fewer of * + ? and |")
    return text


def _bits(pattern: str) -> int:
    """Return the binary logarithm of the number of ways in which an expression can be tried, rounded up.

    Each quantifier without a bound has as many as a name has characters, each `?` and each `|` has two.

    Raises:
        ValueError: It repeats a group, or uses what makes the count wrong: references back, conditions, flags.
    """
    bits, position, before = 0, 0, ""
    while position < len(pattern):
        char, rest = pattern[position], pattern[position:]
        token = char
        if char == "\\":
            token = rest[:2]
            if token[1:].isdigit():
                raise ValueError(f"{pattern!r} refers back to a group")
        elif member := _CLASS.match(rest):
            token = member[0]
        elif rest.startswith("(?"):
            token = next((group for group in _GROUPS if rest.startswith(group)), "")
            if not token:
                raise ValueError(f"{pattern!r} has a group other than {' '.join(_GROUPS)}")
        elif char == "|":
            bits += 1
        elif quantifier := _QUANTIFIER.match(rest):
            token = quantifier[0]
            if before == ")" and char != "?":
                raise ValueError(f"{pattern!r} repeats a group")
            bits += 1 if char == "?" else 0 if quantifier["exact"] else _NAME_BITS
        before = token
        position += len(token)
    return bits


def _template(text: str) -> str:
    for match in _REFERENCE.finditer(text):
        if match["wrong"] is not None:
            raise ValueError(f"{text!r} has a backslash that is none of \\1 to \\9, \\g<name> and two backslashes")
    return text


Pattern = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_PATTERN), AfterValidator(_pattern)]
Template = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_PATTERN), AfterValidator(_template)]
Axis = Annotated[int, Field(ge=-_MAX_RANK, lt=_MAX_RANK)]
Length = Annotated[int, Field(ge=0, le=1 << 53)]
Floating = Literal["bfloat16", "float16", "float32", "float64"]
"""What a rule casts to. To make integers of floats is to quantize, which is the model's business."""


class _Rule(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    def _require_groups(self, templates: tuple[str, ...], patterns: tuple[str, ...]) -> None:
        for pattern in map(re.compile, patterns):
            for match in (match for template in templates for match in _REFERENCE.finditer(template)):
                number, name = match["number"], match["name"]
                lacks_number = number is not None and int(number) > pattern.groups
                if lacks_number or (name is not None and name not in pattern.groupindex):
                    raise ValueError(f"{match[0]} stands for a group that {pattern.pattern!r} does not have")


class Rename(_Rule):
    """A tensor of the checkpoint is called something else."""

    name: Pattern
    to: Template

    @model_validator(mode="after")
    def _groups(self) -> Rename:
        self._require_groups((self.to,), (self.name,))
        return self


class Exclude(_Rule):
    """A tensor of the checkpoint is not wanted, and why."""

    name: Pattern
    reason: Annotated[str, StringConstraints(min_length=8, strip_whitespace=True)]


class Transpose(_Rule):
    """Dimensions change places: the new dimension i is the old one `axes[i]`. A view."""

    name: Pattern
    axes: tuple[Axis, ...] = Field(min_length=1, max_length=_MAX_RANK)


class Split(_Rule):
    """A tensor becomes several along an axis: of equal sizes, or of those that are given. Views."""

    name: Pattern
    axis: Axis
    into: tuple[Template, ...] = Field(min_length=2, max_length=_MAX_PARTS)
    sizes: tuple[Length, ...] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Split:
        self._require_groups(self.into, (self.name,))
        if self.sizes is not None and len(self.sizes) != len(self.into):
            raise ValueError("expected a size for each of the names in `into`, or none")
        return self


class Merge(_Rule):
    """Several tensors become one along an axis, which copies them.

    Those with one name by `into` belong together: in the order of `names`, and by number where one expression matches
    several. `parts` is how many there must be, so that one that is not there is told; for the same reason the numbers
    have to be equally far apart, such as 0, 1, 2 or 1, 3, 5. Parts of other numbers are named one by one.
    """

    names: tuple[Pattern, ...] = Field(min_length=1, max_length=_MAX_PARTS)
    into: Template
    axis: Axis = 0
    stack: bool = False
    """Whether along a new axis, as for layers that are scanned over."""
    parts: Annotated[int, Field(ge=2, le=_MAX_PARTS)] | None = None

    @model_validator(mode="after")
    def _counts(self) -> Merge:
        self._require_groups((self.into,), self.names)
        if self.parts is None and len(self.names) < 2:
            raise ValueError("expected `parts`, as one expression does not say how many tensors make one")
        return self

    @property
    def n_parts(self) -> int:
        """How many tensors make one."""
        return len(self.names) if self.parts is None else self.parts


class Reshape(_Rule):
    """The elements in C order get another shape; one length may be -1. A view if the layout in memory allows it."""

    name: Pattern
    shape: tuple[Annotated[int, Field(ge=-1, le=1 << 53)], ...] = Field(max_length=_MAX_RANK)


class Squeeze(_Rule):
    """Dimensions of length 1 go away. A view."""

    name: Pattern
    axes: tuple[Axis, ...] = Field(min_length=1, max_length=_MAX_RANK)


class Tie(_Rule):
    """A tensor stands in a second place as well: one array. A copy that the checkpoint has there must be equal."""

    name: Pattern
    also: Template

    @model_validator(mode="after")
    def _groups(self) -> Tie:
        self._require_groups((self.also,), (self.name,))
        return self


BuildKind = Literal["causal-mask"]


class Build(_Rule):
    """A buffer that is demanded is built and not read. A copy that the checkpoint has must have the same values.

    `causal-mask`: `[.., n, n]` with 1 where row >= column, which is where attention may look, and 0 elsewhere.
    """

    name: Pattern
    kind: BuildKind


class Cast(_Rule):
    """The tensor gets another floating-point dtype, which copies it. Nothing else is ever cast."""

    name: Pattern
    dtype: Floating


class MappingRules(_Rule):
    """All rules of one file."""

    version: Annotated[int, Field(ge=1, le=1)]
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    description: Annotated[str, StringConstraints(min_length=8)]
    rename: tuple[Rename, ...] = ()
    exclude: tuple[Exclude, ...] = ()
    transpose: tuple[Transpose, ...] = ()
    split: tuple[Split, ...] = ()
    merge: tuple[Merge, ...] = ()
    reshape: tuple[Reshape, ...] = ()
    squeeze: tuple[Squeeze, ...] = ()
    tie: tuple[Tie, ...] = ()
    build: tuple[Build, ...] = ()
    cast: tuple[Cast, ...] = ()

    @classmethod
    def parse(cls, text: bytes, *, source: str) -> MappingRules:
        """Parse one file of rules.

        Args:
            text: The file's bytes: UTF-8 TOML.
            source: What to call it in messages.

        Raises:
            ConfigError: It is not TOML, has an unknown key or a wrong type, or an expression that is none, or that
                could take for ever.
        """
        shown = escape(source)
        if len(text) > MAX_RULES_BYTES:
            raise ConfigError(f"mapping {shown}: more than {MAX_RULES_BYTES} bytes")
        try:
            return cls.model_validate(_tuples(tomllib.loads(text.decode("utf-8"))))
        except ValidationError as err:
            problems = err.errors(include_url=False, include_context=False)
            told = [
                f"{escape('.'.join(map(str, problem['loc'])) or 'the file')}: "
                f"{escape(problem['msg'].removeprefix('Value error, '), limit=400)}"
                for problem in problems[:_MAX_PROBLEMS]
            ]
            told += [f"and {len(problems) - _MAX_PROBLEMS} more"] * (len(problems) > _MAX_PROBLEMS)
            hint = "the shipped mappings are examples: safeload.mapping_rules.shipped_mappings()"
            raise ConfigError(f"mapping {shown}: {'; '.join(told)}", hint=hint) from err
        except (ValueError, RecursionError) as err:  # of UTF-8 and of TOML
            raise ConfigError(f"mapping {shown}: not TOML: {escape(str(err))}") from err


def expand(template: str, match: re.Match[str]) -> str:
    """Return what a checked template makes of a match; a group that took no part is nothing."""

    def put(reference: re.Match[str]) -> str:
        if reference["slash"] is not None:
            return "\\"
        number = reference["number"]
        return str(match[int(number) if number is not None else reference["name"]] or "")

    return _REFERENCE.sub(put, template)


def literal(name: str) -> str:
    """Return the template that stands for just this name."""
    return name.replace("\\", "\\\\")


def _tuples(value: object) -> object:
    """TOML's arrays as tuples, which is what a frozen model has."""
    if isinstance(value, dict):
        return {key: _tuples(child) for key, child in value.items()}
    return tuple(_tuples(child) for child in value) if isinstance(value, list) else value


def shipped_mappings() -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each mapping that comes with safeload, by name."""
    for path in sorted((Path(__file__).parent / "mappings").glob("*.toml")):
        yield path.stem, path


def load_rules(rules: MappingRules | str | Path) -> MappingRules:
    """Return the rules of a shipped name or of a path; `MappingRules` are returned as they are.

    A plain word names shipped rules; anything with a `/` or ending in `.toml` is a path.

    Raises:
        ConfigError: There are no such rules, or they are not valid.
    """
    if isinstance(rules, MappingRules):
        return rules
    text = str(rules)
    if not (isinstance(rules, Path) or "/" in text or text.endswith(".toml")):
        shipped = dict(shipped_mappings())
        if text not in shipped:
            raise ConfigError(
                f"no mapping is called {escape(text)!r}",
                hint=f"shipped are {', '.join(shipped)}; a path to your own must contain a / or end in .toml",
            )
        return MappingRules.parse(shipped[text].read_bytes(), source=text)
    try:
        with Path(text).open("rb") as file:
            data = file.read(MAX_RULES_BYTES + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read the mapping {escape(text)}: {reason(err)}", hint="check the path") from err
    return MappingRules.parse(data, source=text)
