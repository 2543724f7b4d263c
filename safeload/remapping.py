"""Remap: verified tensors under a checkpoint's names, into the nested dict that a model wants, by rules that are data.

Nothing is lost and nothing is made up: every tensor of the checkpoint ends in exactly one place or is excluded by name,
and everything that the model demands is given, with the shape and the dtype that it demands, or all that is wrong is
told at once. There is no lenient mode; a rule says what is left out.

Views cost nothing, and keep the staged memory alive as a whole. `merge` and `cast` copy, and so does a `reshape` that
the layout in memory does not allow as a view; the report says how many bytes.
"""

from __future__ import annotations

import difflib
import heapq
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from safeload.canonical import numpy_dtype
from safeload.decoding import HostTensor, PartialTensor
from safeload.errors import ConfigError, Finding, LimitError, PolicyError, StagingError, escape
from safeload.mapping_rules import MAX_NAME, Build, MappingRules, Merge, Rename, Tie, expand, literal, load_rules
from safeload.naming import NamedFile, name_tensors
from safeload.records import Record
from safeload.tensors import DTYPE_ITEMSIZE, DType

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_MAX_DEPTH: Final = 64
"""Most levels of a tree; a deeper one is one that holds itself."""

_MAX_SUGGESTED: Final = 50
"""How many names get a suggestion: each looks at up to `_MAX_LOOKED_AT` others, and compares letter by letter with the
`_MAX_CANDIDATES` of them that share the most components. That takes seconds at worst, whatever the names."""

_MAX_LOOKED_AT: Final = 10_000
_MAX_CANDIDATES: Final = 30

_BLOCK_BYTES: Final = 16 * 1024 * 1024
"""How much of a value is brought into canonical form at one time."""

_MAX_BUFFER_BYTES: Final = 1 << 32
"""Largest buffer that is built: a mask of 65,536 positions, a byte each. What is demanded may come from a checkpoint's
configuration."""

_NUMBERS: Final = re.compile(r"(\d+)")
_COMPONENTS: Final = re.compile(r"[/.]")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor comes from.

    Attributes:
        file: The file's path, as the manifest lists it.
        name: The tensor's name in the checkpoint, as rules see it.
    """

    file: str
    name: str


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """What became of a tensor.

    Attributes:
        shape: Its shape in the result.
        dtype: Its dtype in the result, by numpy's or ml_dtypes' name.
        origins: What it is made of; several for a merge, none for what was built.
        steps: The steps that made it, in order.
        copied_bytes: How much of it was copied; 0 for a view.
    """

    shape: tuple[int, ...]
    dtype: str
    origins: tuple[Origin, ...]
    steps: tuple[str, ...]
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class MappingReport:
    """What a mapping did, and everything that is wrong with it.

    Attributes:
        tensors: What is in the result, by name.
        excluded: Why a tensor was left out, by the name that renaming gave it.
        ties: The names that stand for the tensor of another name, with that name.
        built: Names of the buffers that were built and not read.
        compared: Names of the buffers that the checkpoint has, and that are equal to what is built.
        plain: Names of the numbers, text and empty places among the tensors, which are not mapped.
        unused: Rules that no name matched: the step and what the rule matches.
        findings: Everything that is wrong; the mapping is refused if there is any.
    """

    tensors: Mapping[str, MappedTensor]
    excluded: Mapping[str, str]
    ties: Mapping[str, str]
    built: tuple[str, ...]
    compared: tuple[str, ...]
    plain: tuple[str, ...]
    unused: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def copied_bytes(self) -> int:
        """Bytes that were copied; a tied or shared tensor counts once for each of its names."""
        return sum(tensor.copied_bytes for tensor in self.tensors.values())


def remap(
    loaded: Mapping[str, Any],
    rules: MappingRules | str | Path,
    *,
    target: Any = None,
    parameters: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the tensors of a checkpoint as a nested dict of read-only arrays, named and laid out by rules.

    A tensor's name is that in its file, if no other file has it too, else it stands behind the file's path; see
    `safeload.naming.name_tensors`. The result's name is split at each `/`.

    Args:
        loaded: What each file holds, by path, as `load` and `load_host` return it: dicts, lists, tuples and records of
            numpy arrays or `HostTensor`s.
        rules: The rules, or the name of shipped ones, or a path.
        target: What the model demands: dicts, lists and tuples with a leaf that has a shape and a dtype for each
            parameter and each buffer, such as `jax.eval_shape` makes; None to take whatever the rules make.
        parameters: The parameter that a file holds, by its path, where a manifest says so.

    Raises:
        PolicyError: A tensor is missing, unexpected, of another shape or dtype, in two places, or does not fit its
            rule; or a copy of a tied tensor or of a buffer is not equal. There is one finding for each.
        LimitError: A name is longer than rules are tried on.
        ConfigError: The rules are wrong, or `loaded` or `target` is not what is written above.
        StagingError: A tensor was read in part only.
    """
    tree, _ = remap_and_report(loaded, rules, target=target, parameters=parameters)
    return tree


def remap_and_report(
    loaded: Mapping[str, Any],
    rules: MappingRules | str | Path,
    *,
    target: Any = None,
    parameters: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], MappingReport]:
    """Return what `remap` returns, with the same arguments and errors, and what was done."""
    mapping = _map(loaded, rules, target, parameters)
    report = mapping.report()
    if report.findings:
        raise PolicyError(*report.findings)
    return _nested({name: item.array for name, item in mapping.items.items()}), report


def survey(
    loaded: Mapping[str, Any],
    rules: MappingRules | str | Path,
    *,
    target: Any = None,
    parameters: Mapping[str, str] | None = None,
) -> MappingReport:
    """Return what `remap` would do, with all that is wrong in its findings: for writing rules.

    Args:
        loaded: As for `remap`.
        rules: As for `remap`.
        target: As for `remap`.
        parameters: As for `remap`.

    Raises:
        LimitError: As `remap`.
        ConfigError: As `remap`.
        StagingError: As `remap`.
    """
    return _map(loaded, rules, target, parameters).report()


def rules_of_lookup(wanted: Iterable[str], locate: Callable[[str], str | None]) -> MappingRules:
    """Return the rules that do what a function from names of the code to names of the checkpoint says.

    Grok-1's `load_rename_rules` and `load_exclude_rules` are such a function:
    `lambda name: grok1.get_load_path_str(name, load_rename_rules, load_exclude_rules)`. Two names that are found in one
    place are tied. A name that is found nowhere is not loaded, and must not be demanded.

    Args:
        wanted: Names in the code.
        locate: Returns the name in the checkpoint; None for what is not loaded.
    """
    rename: dict[str, str] = {}
    tie: list[Tie] = []
    for name in wanted:
        source = locate(name)
        if source is None:
            continue
        if source in rename:
            tie.append(Tie(name=re.escape(rename[source]), also=literal(name)))
        else:
            rename[source] = name
    return MappingRules(
        version=1,
        name="lookup",
        description="What a function of names says.",
        rename=tuple(Rename(name=re.escape(source), to=literal(name)) for source, name in rename.items()),
        tie=tuple(tie),
    )


# ---------------------------------------------------------------- what there is


@dataclass(slots=True)
class _Item:
    """A tensor on its way."""

    array: Array
    origins: tuple[Origin, ...]
    steps: tuple[str, ...] = ()
    copied_bytes: int = 0

    def becomes(self, array: Array, step: str) -> _Item:
        copied = 0 if np.may_share_memory(array, self.array) or not array.size else array.nbytes
        return _Item(_frozen(array), self.origins, (*self.steps, step), self.copied_bytes + copied)

    @property
    def file(self) -> str | None:
        return self.origins[0].file if self.origins else None

    @property
    def described(self) -> str:
        return f"{self.array.dtype.name}{list(self.array.shape)}"


def _frozen(array: Array) -> Array:
    """Return the same memory as an array that cannot be written through."""
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def _sources(loaded: Mapping[str, Any], parameters: Mapping[str, str]) -> tuple[dict[str, _Item], list[str]]:
    """Return the tensors by name, and the names of what is none."""
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"expected what each file holds by its path, found {type(loaded).__name__}")
    found: dict[tuple[str, str], Array] = {}
    files: list[NamedFile] = []
    plain: list[str] = []
    for path, tree in loaded.items():
        if not isinstance(path, str):
            raise ConfigError(f"expected what each file holds by its path, found a {type(path).__name__} as one")
        names: list[str] = []
        for name, leaf in _leaves(tree, (), path):
            if isinstance(leaf, np.ndarray):
                found[path, name] = leaf
                names.append(name)
            else:
                plain.append(f"{path}/{name}" if name else path)
        files.append(NamedFile(path, parameters.get(path), tuple(names)))
    named = name_tensors(files)
    return {name: _Item(_frozen(found[place]), (Origin(place[0], name),)) for place, name in named.items()}, plain


def _leaves(node: Any, path: tuple[str, ...], file: str) -> Iterator[tuple[str, Any]]:
    name = "/".join(path)
    children: Iterable[tuple[Any, Any]]
    match node:
        case HostTensor():
            yield name, node.array
            return
        case PartialTensor():
            raise StagingError(f"{escape(node.path)}: only a part of it was read")
        case np.ndarray() | np.generic():
            array = np.asarray(node)
            if array.dtype.name not in DTYPE_ITEMSIZE:
                raise ConfigError(f"{escape(file)}: {escape(name)}: safeload has no dtype {escape(str(array.dtype))}")
            yield name, array
            return
        case None | bool() | int() | float() | str() | bytes():
            yield name, node
            return
        case Record() | Mapping():
            children = node.items()
        case list() | tuple():
            children = enumerate(node)
        case _:
            raise ConfigError(
                f"{escape(file)}: {escape(name)}: expected a numpy array or a HostTensor, found {type(node).__name__}",
                hint="map what is in host memory, and place the result: load without shardings",
            )
    _require_depth(path)
    for key, child in children:
        yield from _leaves(child, (*path, key if isinstance(key, str) else repr(key)), file)


def _require_depth(path: tuple[str, ...]) -> None:
    if len(path) >= _MAX_DEPTH:
        raise ConfigError(f"expected at most {_MAX_DEPTH} levels in a tree, found more", hint="does it hold itself?")


@dataclass(frozen=True, slots=True)
class _Demand:
    shape: tuple[int, ...]
    dtype: str

    @property
    def described(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _demands(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, _Demand]]:
    name = "/".join(path)
    if node is None:
        return
    if hasattr(node, "dtype") and hasattr(node, "shape") and not isinstance(node, Record):
        dtype = getattr(node.dtype, "name", str(node.dtype))
        if dtype not in DTYPE_ITEMSIZE:
            raise ConfigError(f"target: {escape(name)}: safeload has no dtype {escape(dtype)}")
        try:
            shape = tuple(map(operator.index, node.shape))
        except TypeError as err:
            raise ConfigError(f"target: {escape(name)}: expected a shape of whole numbers: {escape(str(err))}") from err
        yield name, _Demand(shape, dtype)
        return
    _require_depth(path)
    if isinstance(node, (Mapping, Record)):
        for key, child in node.items():
            yield from _demands(child, (*path, str(key)))
    elif isinstance(node, tuple) and hasattr(node, "_fields"):
        for key in node._fields:
            yield from _demands(getattr(node, key), (*path, key))
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from _demands(child, (*path, str(index)))
    else:
        raise ConfigError(
            f"target: {escape(name)}: expected a leaf with a shape and a dtype, found {type(node).__name__}",
            hint="jax.eval_shape makes such a tree",
        )


def _map(
    loaded: Mapping[str, Any], rules: MappingRules | str | Path, target: Any, parameters: Mapping[str, str] | None
) -> _Mapping:
    checked = load_rules(rules)
    wanted: dict[str, _Demand] | None = None
    if target is not None:
        leaves = list(_demands(target))
        twice = [name for name, times in Counter(name for name, _ in leaves).items() if times > 1]
        if twice:
            raise ConfigError(f"target: expected a name for each leaf, found {escape(twice[0])} twice")
        wanted = dict(leaves)
    items, plain = _sources(loaded, parameters or {})
    long = [name for name in items if len(name) > MAX_NAME]
    if long:
        raise LimitError(
            *(
                Finding(
                    "name-too-long",
                    f"expected names of at most {MAX_NAME} characters, found {len(name)}",
                    file=items[name].file,
                )
                for name in long
            )
        )
    mapping = _Mapping(items, checked, wanted, plain)
    mapping.run()
    return mapping


# ---------------------------------------------------------------- the steps


@dataclass(slots=True)
class _Mapping:
    """A mapping at work: the tensors by the names that they have by now, and what was met."""

    items: dict[str, _Item]
    rules: MappingRules
    wanted: Mapping[str, _Demand] | None
    plain: list[str]
    findings: list[Finding] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    built: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    buffers: dict[tuple[str, tuple[int, ...], str], Array] = field(default_factory=dict)

    def run(self) -> None:
        self.rename()
        self.exclude()
        self.move("transpose", lambda array, rule: array.transpose(rule.axes))
        self.split()
        self.merge()
        self.move("reshape", lambda array, rule: array.reshape(rule.shape))
        self.move("squeeze", lambda array, rule: array.squeeze(rule.axes))
        self.tie()
        self.build()
        self.cast()
        self.compare()

    def report(self) -> MappingReport:
        steps = (
            "rename",
            "exclude",
            "transpose",
            "split",
            "merge",
            "reshape",
            "squeeze",
            "tie",
            "build",
            "cast",
        )
        unused = [
            f"{step} {' + '.join(rule.names) if isinstance(rule, Merge) else rule.name}"
            for step in steps
            for rule in getattr(self.rules, step)
            if id(rule) not in self.used
        ]
        tensors = {
            name: MappedTensor(item.array.shape, item.array.dtype.name, item.origins, item.steps, item.copied_bytes)
            for name, item in self.items.items()
        }
        return MappingReport(
            tensors,
            self.excluded,
            self.ties,
            tuple(self.built),
            tuple(self.compared),
            tuple(self.plain),
            tuple(unused),
            tuple(self.findings),
        )

    # -------- finding a rule

    def first(self, rules: Sequence[Any], name: str) -> tuple[Any, re.Match[str]] | None:
        """Return the first rule of a step that matches a name, and the match."""
        for rule in rules:
            match = re.fullmatch(rule.name, name)
            if match is not None:
                self.used.add(id(rule))
                return rule, match
        return None

    def put(self, into: dict[str, _Item], name: str, item: _Item) -> None:
        other = into.setdefault(name, item)
        if other is not item:
            both = " and ".join(escape(origin.name) for origin in (*other.origins, *item.origins))
            self.find("name-twice", f"expected one tensor to become {escape(name)}, found {both}", item.file)

    def find(self, code: str, message: str, file: str | None = None, hint: str | None = None) -> None:
        self.findings.append(Finding(code, message, file=file, hint=hint))

    def named(self, template: str, match: re.Match[str]) -> str:
        """Return the name that a rule makes, which is held to the limit of those that the next rules are tried on."""
        name = expand(template, match)
        if len(name) > MAX_NAME:
            message = f"expected rules that make names of at most {MAX_NAME} characters, found {len(name)}"
            raise LimitError(Finding("name-too-long", message, hint="repeat less of what was matched"))
        return name

    def unfit(self, step: str, name: str, item: _Item, why: object) -> None:
        message = f"{escape(name)}: expected a tensor that `{step}` fits, found {item.described}: {escape(str(why))}"
        self.find("rule-does-not-fit", message, item.file, "change the rule; its axes count from 0")

    # -------- steps

    def rename(self) -> None:
        renamed: dict[str, _Item] = {}
        for name, item in self.items.items():
            found = self.first(self.rules.rename, name)
            self.put(renamed, name if found is None else self.named(found[0].to, found[1]), item)
        self.items = renamed

    def exclude(self) -> None:
        for name in list(self.items):
            found = self.first(self.rules.exclude, name)
            if found is not None:
                self.excluded[name] = found[0].reason
                del self.items[name]

    def move(self, step: str, make: Callable[[Array, Any], Array]) -> None:
        for name, item in self.items.items():
            found = self.first(getattr(self.rules, step), name)
            if found is None:
                continue
            try:
                self.items[name] = item.becomes(make(item.array, found[0]), step)
            except (ValueError, IndexError) as err:  # numpy's AxisError is both
                self.unfit(step, name, item, err)

    def split(self) -> None:
        parts: dict[str, _Item] = {}
        for name, item in self.items.items():
            found = self.first(self.rules.split, name)
            if found is None:
                self.put(parts, name, item)
                continue
            rule, match = found
            try:
                pieces = _pieces(item.array, rule.axis, rule.sizes, len(rule.into))
            except (ValueError, IndexError) as err:
                self.unfit("split", name, item, err)
                pieces = []
            for template, piece in zip(rule.into, pieces, strict=False):
                self.put(parts, self.named(template, match), item.becomes(piece, "split"))
        self.items = parts

    def merge(self) -> None:
        groups: dict[tuple[int, str], list[tuple[int, str]]] = {}
        for name in self.items:
            place = self._merged_into(name)
            if place is not None:
                number, order, into = place
                groups.setdefault((number, into), []).append((order, name))
        for (number, into), members in groups.items():
            self._merge(self.rules.merge[number], into, members)

    def _merged_into(self, name: str) -> tuple[int, int, str] | None:
        for number, rule in enumerate(self.rules.merge):
            for order, pattern in enumerate(rule.names):
                match = re.fullmatch(pattern, name)
                if match is not None:
                    self.used.add(id(rule))
                    return number, order, self.named(rule.into, match)
        return None

    def _merge(self, rule: Merge, into: str, members: list[tuple[int, str]]) -> None:
        members.sort(key=lambda member: (member[0], _natural(member[1])))
        items = [self.items.pop(name) for _, name in members]
        each = Counter(order for order, _ in members)
        if len(members) != rule.n_parts or len(set(each.values())) > 1 or len(each) != len(rule.names):
            names = ", ".join(escape(name) for _, name in members)
            message = f"expected {rule.n_parts} tensors to become {escape(into)}, found {len(members)}: {names}"
            self.find("merge-incomplete", message, items[0].file)
            return
        if not all(_is_even([name for order, name in members if order == each]) for each in range(len(rule.names))):
            names = ", ".join(escape(name) for _, name in members)
            message = (
                f"expected numbers at even steps, which give the order of what becomes {escape(into)}; found {names}"
            )
            self.find(
                "merge-order", message, items[0].file, "is one missing? Else name the parts one by one in `names`"
            )
            return
        if len({item.array.dtype.name for item in items}) > 1:
            self.unfit("merge", into, items[0], f"another is {items[-1].described}, and nothing is cast here")
            return
        try:
            arrays = [item.array for item in items]
            made = np.stack(arrays, rule.axis) if rule.stack else np.concatenate(arrays, rule.axis)
        except (ValueError, IndexError) as err:
            self.unfit("merge", into, items[0], err)
            return
        steps = tuple(dict.fromkeys(step for item in items for step in item.steps))
        origins = tuple(origin for item in items for origin in item.origins)
        self.put(self.items, into, _Item(_frozen(made), origins, (*steps, "merge"), made.nbytes))

    def tie(self) -> None:
        for rule in self.rules.tie:
            for name in list(self.items):
                match = re.fullmatch(rule.name, name)
                if match is None:
                    continue
                self.used.add(id(rule))
                also, item = self.named(rule.also, match), self.items[name]
                copy = self.items.get(also)
                if copy is not None and not same_value(copy.array, item.array):
                    self.find(
                        "tie-differs",
                        f"expected {escape(also)} to be equal to {escape(name)}, to which it is tied; found other "
                        "values",
                        copy.file,
                        "leave the rule out, if this model has two parameters there",
                    )
                self.items[also] = item
                self.ties[also] = name

    def build(self) -> None:
        for name in dict.fromkeys([*self.items, *(self.wanted or {})]):
            found = self.first(self.rules.build, name)
            if found is None:
                continue
            item, demand = self.items.get(name), (self.wanted or {}).get(name)
            shape = demand.shape if demand is not None else item.array.shape if item is not None else ()
            made = self._buffer(found[0], shape, demand.dtype if demand is not None else "bool")
            if made is None:
                message = (
                    f"{escape(name)}: expected a shape [.., n, n] of at most {_MAX_BUFFER_BYTES} bytes for a "
                    f"{found[0].kind}, found {list(shape)}"
                )
                self.find("rule-does-not-fit", message, None if item is None else item.file)
                continue
            if item is not None:
                if item.array.shape != shape:
                    message = f"expected {escape(name)} of shape {list(shape)}, found {list(item.array.shape)}"
                    self.find("shape-mismatch", message, item.file, "is it a model of this size?")
                elif not np.array_equal(item.array, made):
                    self.find(
                        "buffer-differs",
                        f"{escape(name)}: expected the values of a {found[0].kind}, found others",
                        item.file,
                        "the model would compute something else with it; do not use this file",
                    )
                self.compared.append(name)
            if demand is not None:
                self.items[name] = _Item(made, () if item is None else item.origins, ("build",))
                self.built.append(name)
            elif self.wanted is not None:
                # It says no more than the rule, and the model has no place for it.
                self.excluded[name] = f"A {found[0].kind}, which the model does not ask for."
                del self.items[name]

    def _buffer(self, rule: Build, shape: tuple[int, ...], dtype: str) -> Array | None:
        """Return a buffer, one for all of a kind, shape and dtype; None where it has no such shape or is too large."""
        if len(shape) < 2 or shape[-1] != shape[-2] or any(length != 1 for length in shape[:-2]):
            return None
        if shape[-1] ** 2 * DTYPE_ITEMSIZE[dtype] > _MAX_BUFFER_BYTES:
            return None
        key = rule.kind, shape, dtype
        if key not in self.buffers:
            self.buffers[key] = _frozen(np.tri(shape[-1], dtype=bool).astype(numpy_dtype(DType(dtype))).reshape(shape))
        return self.buffers[key]

    def cast(self) -> None:
        made: dict[tuple[int, str], _Item] = {}
        for name, item in self.items.items():
            found = self.first(self.rules.cast, name)
            if found is None or item.array.dtype.name == found[0].dtype:
                continue
            if item.array.dtype.kind == "c":
                self.unfit("cast", name, item, "it is complex, and would lose half of its values")
                continue
            # Once for each tensor, so that what is tied stays one.
            key = id(item.array), found[0].dtype
            if key not in made:
                # Values that the new type has no number for become infinite or nan, as whoever wrote the rule knows.
                with np.errstate(all="ignore"):
                    array = item.array.astype(numpy_dtype(DType(found[0].dtype)))
                made[key] = item.becomes(array, "cast")
            self.items[name] = made[key]

    # -------- what is demanded

    def compare(self) -> None:
        self._require_tree()
        if self.wanted is None:
            return
        missing = [name for name in self.wanted if name not in self.items]
        unexpected = [name for name in self.items if name not in self.wanted]
        mapped = {
            item.origins[0].name: name for name, item in self.items.items() if name in self.wanted and item.origins
        }
        suggest = _Suggestions(missing, unexpected, mapped)
        for name in missing:
            message = f"expected {escape(name)}, {self.wanted[name].described}; found no such tensor"
            self.find("missing-tensor", message, None, self._hint_missing(name, suggest))
        for name in unexpected:
            item = self.items[name]
            came = item.origins[0].name if item.origins else name
            was = "" if came == name else f" (from {escape(came)})"
            hint = self._hint_unexpected(name, came, suggest)
            message = f"expected nothing that becomes {escape(name)}{was}; found {item.described}"
            self.find("unexpected-tensor", message, item.file, hint)
        for name, demand in self.wanted.items():
            found = self.items.get(name)
            if found is None:
                continue
            if found.array.shape != demand.shape:
                turned = found.array.shape == demand.shape[::-1] and len(demand.shape) > 1
                hint = "a transpose may be missing" if turned else "is it a model of this size?"
                message = f"expected {escape(name)} of shape {list(demand.shape)}, found {list(found.array.shape)}"
                self.find("shape-mismatch", message, found.file, hint)
            if found.array.dtype.name != demand.dtype:
                message = f"expected {escape(name)} of dtype {demand.dtype}, found {found.array.dtype.name}"
                self.find("dtype-mismatch", message, found.file, f'a cast rule can make it: dtype = "{demand.dtype}"')

    def _hint_unexpected(self, name: str, came: str, suggest: _Suggestions) -> str:
        near = suggest.near(name, suggest.missing)
        if near is not None:
            return f"rename it to {escape(near)}"
        # Names of a checkpoint are seldom near to those of a model, and often to one another.
        model = suggest.near(came, list(suggest.mapped))
        if model is not None:
            return f"did you mean a name like {escape(model)}, which becomes {escape(suggest.mapped[model])}?"
        return "exclude it by name, with the reason, if it has no place"

    def _hint_missing(self, name: str, suggest: _Suggestions) -> str:
        if name in self.excluded:
            return "a rule excludes it"
        near = suggest.near(name, suggest.unexpected)
        if near is None:
            return "a buffer that the checkpoint lacks needs a build rule, a shared tensor a tie rule"
        origins = self.items[near].origins
        return f"did you mean {escape(origins[0].name if origins else near)}? Rename it"

    def _require_tree(self) -> None:
        for name in self.items:
            parts = name.split("/")
            above = next((path for end in range(1, len(parts)) if (path := "/".join(parts[:end])) in self.items), None)
            if above is not None:
                message = f"expected {escape(above)} to be a tensor or a level of the tree, found {escape(name)} below"
                self.find("name-conflict", message, self.items[name].file, "rename one of the two")


class _Suggestions:
    """Names that are near to each other, for as many as can be afforded."""

    def __init__(self, missing: Sequence[str], unexpected: Sequence[str], mapped: Mapping[str, str]) -> None:
        self.missing, self.unexpected, self.mapped = missing, unexpected, mapped
        self._left = _MAX_SUGGESTED

    def near(self, name: str, others: Sequence[str]) -> str | None:
        if not others or not self._left:
            return None
        self._left -= 1
        parts = set(_COMPONENTS.split(name))
        likely = heapq.nlargest(
            _MAX_CANDIDATES,
            others[:_MAX_LOOKED_AT],
            key=lambda other: len(parts.intersection(_COMPONENTS.split(other))),
        )
        close = difflib.get_close_matches(name, likely, n=1)
        return close[0] if close else None


def _pieces(array: Array, axis: int, sizes: tuple[int, ...] | None, n_pieces: int) -> list[Array]:
    length = array.shape[axis]
    if sizes is None:
        if length % n_pieces:
            raise ValueError(f"{length} along axis {axis} is not {n_pieces} equal parts")
        sizes = (length // n_pieces,) * n_pieces
    if sum(sizes) != length:
        raise ValueError(f"{length} along axis {axis} is not the sum of {', '.join(map(str, sizes))}")
    ends = np.cumsum(sizes)[:-1]
    return list(np.split(array, ends, axis))


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that puts 2 before 10."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in _NUMBERS.split(name) if part)


def _is_even(names: Sequence[str]) -> bool:
    """Whether names in natural order differ, and each number in them takes values that are equally far apart.

    Layers 0, 1, 2 and 1, 3, 5 do. Of 0, 2, 3 one may be missing with another in its place; "1" and "01" have no order.
    """
    keys = [_natural(name) for name in names]
    if len(set(keys)) < len(keys):
        return False
    for column in zip(*([part for kind, part in key if not kind] for key in keys), strict=False):
        values = sorted({number for number in column if isinstance(number, int)})
        if len({after - before for before, after in pairwise(values)}) > 1:
            return False
    return True


def _nested(arrays: Mapping[str, Array]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *above, last = name.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


# ---------------------------------------------------------------- values


def canonical_blocks(array: Array) -> Iterator[bytes | memoryview]:
    """Yield the value's C-order little-endian bytes, of a view with bounded memory: what value digests are taken of."""
    little = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
    if not array.size:
        return
    if array.ndim == 0:
        yield array.astype(little).tobytes()
        return
    if array.ndim > 1 and array[0].nbytes > _BLOCK_BYTES:
        for row in array:  # as deep as there are dimensions, which numpy bounds
            yield from canonical_blocks(row)
        return
    rows = max(1, _BLOCK_BYTES // max(1, array[0].nbytes))
    for start in range(0, len(array), rows):
        part = np.ascontiguousarray(array[start : start + rows], dtype=little)
        # By way of uint8, because ml_dtypes' types have no buffer format of their own.
        yield part.reshape(-1).view(np.uint8).data


def same_value(one: Array, other: Array) -> bool:
    """Whether two arrays have the same dtype and shape, and the same bits, whatever their layout."""
    if one.dtype.name != other.dtype.name or one.shape != other.shape:
        return False
    return all(a == b for a, b in zip(canonical_blocks(one), canonical_blocks(other), strict=True))
