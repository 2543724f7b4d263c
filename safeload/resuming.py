"""Resume: a training run saved as one signed checkpoint of kind "training", and taken up again where it stood.

What is saved is all that a step reads: parameters, optimizer state, the number of the step, what the schedule and the
data pipeline say of themselves, and the keys of the random generators. Each is a file of its own role, so that a
manifest without one of them is refused for a resume. The next step is the one that would have come, bit by bit, and
the function that was compiled for it: arrays have the weak types of the run that was saved, and trees are of the types
that they are told to be like.

What is not covered, because no file could say it: data loaders with worker processes, of which each has read ahead
(save what they have handed out, not where they are); other hardware, another number of devices or another version of
XLA, which may round differently; and random generators that nobody put into the state.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Unpack

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from safeload.agreeing import HOST_TIMEOUT_SECONDS, together
from safeload.companions import Companion, read_companions
from safeload.errors import (
    ConfigError,
    Finding,
    FormatError,
    ManifestError,
    ShardingError,
    StagingError,
    escape,
    reason,
)
from safeload.expecting import Expectations
from safeload.files import publish
from safeload.filling import fill_held, needs_agreement
from safeload.formats.safetensors_writing import SAFETENSORS_NAMES, write_safetensors
from safeload.loading import hold
from safeload.manifest import Role
from safeload.policy import DEFAULT_POLICY, Policy
from safeload.publishing import describe
from safeload.report import Progress
from safeload.saving import MANIFEST_NAME, Stated, host_array, publishing_directory, require_equal_digests
from safeload.signing import sign_manifest
from safeload.trees import map_leaves, named_leaves, same_leaves
from safeload.trust import strict_json
from safeload.trust.store import Trust

if TYPE_CHECKING:
    from safeload.formats.pickles.writing import Sink
    from safeload.trust.keys import SecretKey

_ARRAYS: Final[Mapping[str, tuple[str, Role]]] = {
    "params": ("model.safetensors", "weights"),
    "optimizer": ("optimizer.safetensors", "optimizer"),
    "rng": ("rng.safetensors", "rng"),
}
"""Parts of the state that are trees of arrays: the file of each, and its role, which goes by the file's name."""

_PLAIN: Final[Mapping[str, tuple[str, Role]]] = {
    "schedule": ("schedule.json", "schedule"),
    "data_progress": ("data_progress.json", "data-progress"),
}
_STEP: Final[tuple[str, Role]] = ("step.json", "step")
_NO_ARRAYS: Final = "{}\n"
"""What stands in a part's `.json` that has no arrays, as the state of plain gradient descent: its role is there."""

_MAX_JSON_BYTES: Final = 16 * 1024 * 1024
"""Progress through data can be a list of files; this is some 100,000 of them."""

_MAX_JSON_DEPTH: Final = 32
_GENERATORS: Final = ("threefry2x32", "rbg", "unsafe_rbg")
"""The generators that JAX has of its own, by the names that `jax.random.key` takes."""

_TAGS: Final = frozenset({"$float", "$int"})


@dataclass(frozen=True, slots=True)
class TrainingState:
    """All that the next step of a training run depends on.

    Attributes:
        params: Tree of arrays. Leaves that are one object are saved once, and are one again.
        optimizer: Tree of arrays, such as what `init` and `update` of optax return.
        step: How many steps were done.
        rng: Tree of keys of JAX, typed or raw, or of other arrays.
        schedule: What a schedule says of itself, if it is more than a function of the step: dicts with texts as keys,
            lists, texts, numbers and None. Floats come back bit by bit, and integers of any length, such as the state
            of a generator of numpy.
        data_progress: How far the data were read; as for `schedule`.
    """

    params: Any
    optimizer: Any
    step: int
    rng: Any
    schedule: Any = None
    data_progress: Any = None


class _Step(BaseModel):
    """What `step.json` holds.

    Attributes:
        schema_: Version of this file.
        step: How many steps were done.
        ties: Groups of names of arrays that are one; the first is the one that a file has.
        keys: Generator of each typed key of JAX, by the name of its array.
        weak: Names of the arrays of JAX with a weak type, as a count that began as a number of Python has: what is
            added to or multiplied with one keeps its own dtype, so that a step would round differently without.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    schema_: Literal[1] = Field(alias="schema")
    step: Annotated[int, Field(ge=0, le=strict_json.MAX_INTEGER)]
    ties: Annotated[tuple[Annotated[tuple[str, ...], Field(min_length=2, strict=False)], ...], Field(strict=False)] = ()
    keys: Mapping[str, Annotated[str, Field(max_length=64)]] = {}
    weak: Annotated[tuple[str, ...], Field(strict=False)] = ()


# ---------------------------------------------------------------- saving


def save_training(
    state: TrainingState,
    directory: str | Path,
    *,
    keys: Sequence[SecretKey],
    model: str,
    revision: str,
    replace: bool = False,
    **stated: Unpack[Stated],
) -> Path:
    """Write a training state as a signed checkpoint of kind "training", which appears whole or not at all.

    It appears, and replaces another, as with `safeload.saving.save`. Arrays are brought to the host one part of the
    state at a time; every one must be of this process alone.

    Args:
        state: The state.
        directory: What to make.
        keys: Private keys to sign with, one signature each.
        model: Name of the model.
        revision: Which state of it, such as "step-3000".
        replace: Whether a directory that is there may be replaced; what is in it is removed.
        **stated: What the manifest says besides; see `Stated`. Its kind is always "training".

    Returns:
        The path of the manifest, which is `manifest.json` in the directory.

    Raises:
        ConfigError: The state has something that cannot be saved, another argument is wrong, or the directory is there
            and is not to be replaced.
        PolicyError: The policy refuses what was written; nothing was published. So for the next two.
        ManifestError: A role that is required besides is missing.
        DigestMismatchError: What was read back to be signed is not what was written.
        StagingError: A file could not be written, or the file system cannot exchange two directories.
    """
    if not keys:
        raise ConfigError("keys: expected at least one secret key to sign with, found none")
    if stated.setdefault("kind", "training") != "training":
        raise ConfigError(f"kind: expected training, found {escape(str(stated['kind']))}")
    if type(state.step) is not int or not 0 <= state.step <= strict_json.MAX_INTEGER:
        raise ConfigError(f"step: expected a number of steps, found {escape(repr(state.step))}")
    generators: dict[str, str] = {}
    parts = {part: _leaves(part, getattr(state, part), generators) for part in _ARRAYS}
    tied = [tuple(names) for names in same_leaves({k: v for leaves in parts.values() for k, v in leaves.items()})]
    ties = [names for names in tied if len(names) > 1 and len({name.split("/")[0] for name in names}) == 1]
    if not parts["params"]:
        raise ConfigError("params: expected at least one array, found none")
    texts = {
        file: _json(file, _encoded(part, getattr(state, part)))
        for part, (file, _) in _PLAIN.items()
        if getattr(state, part) is not None
    }
    weak = [name for leaves in parts.values() for name, leaf in leaves.items() if getattr(leaf, "weak_type", False)]
    more = {"ties": ties, "keys": generators, "weak": weak}
    texts[_STEP[0]] = _json(_STEP[0], {"schema": 1, "step": state.step, **more})
    aliases = {name for names in ties for name in names[1:]}
    written: dict[str, str] = {}
    with publishing_directory(directory, replace=replace) as fresh:
        for part, (file, _) in _ARRAYS.items():
            leaves = {name: leaf for name, leaf in parts[part].items() if name not in aliases}
            if leaves:
                arrays = {name: host_array(name, _data(leaf)) for name, leaf in leaves.items()}
                written[file] = _write(fresh / file, partial(write_safetensors, arrays=arrays))
            else:
                empty = Path(file).with_suffix(".json").name
                written[empty] = _write_text(fresh / empty, _NO_ARRAYS)
        for file, text in texts.items():
            written[file] = _write_text(fresh / file, text)
        options: dict[str, Any] = {"policy": DEFAULT_POLICY, **stated}
        made, _ = describe(fresh, model=model, revision=revision, **options)
        require_equal_digests(written, {file.path: file.sha256 for file in made.files})
        publish(fresh / MANIFEST_NAME, sign_manifest(made, keys))
    return Path(directory) / MANIFEST_NAME


def _leaves(part: str, tree: Any, generators: dict[str, str]) -> dict[str, Any]:
    """Return the arrays of a part by the names that the file has for them, having shown that it can hold them."""
    found: dict[str, Any] = {}
    # Under its part's name, as a restore has it: an empty key is a level too.
    for name, leaf in named_leaves({part: tree}).items():
        _require_array(name, leaf)
        if not getattr(leaf, "is_fully_addressable", True):
            raise ConfigError(
                f"{escape(name)}: other processes hold parts of it",
                hint="gather it first: jax.experimental.multihost_utils.process_allgather",
            )
        if _is_key(leaf):
            generators[name] = _generator(name, leaf)
        elif str(getattr(leaf.dtype, "name", leaf.dtype)) not in SAFETENSORS_NAMES:
            raise ConfigError(f"{escape(name)}: safetensors has no dtype {escape(str(leaf.dtype))}")
        found[name] = leaf
    return found


def _require_array(name: str, leaf: Any) -> None:
    """Refuse what looks like an array and is a tree: in its place would come back an array, and the rest be lost."""
    if _has_jax() and not _jax().tree_util.all_leaves([leaf]):
        raise ConfigError(
            f"{escape(name)}: expected an array, found {escape(type(leaf).__name__)}, which only holds one",
            hint="save and restore the arrays: `flax.nnx.to_pure_dict(state)` has them",
        )


def _generator(name: str, key: Any) -> str:
    """Return what JAX calls the generator of typed keys, having shown that keys of it can be made by that name."""
    jax = _jax()
    own = jax.random.key_impl(key)
    # An older JAX, and any of a generator of somebody's own, returns an object that keeps its name to itself.
    for generator in (own,) if isinstance(own, str) else _GENERATORS:
        if jax.eval_shape(partial(jax.random.key, 0, impl=generator)).dtype == key.dtype:
            return generator
    raise ConfigError(
        f"{escape(name)}: expected keys of {', '.join(_GENERATORS)}, found {escape(str(key.dtype))}, which no restore "
        "could make by name",
        hint="save the words of the keys, `jax.random.key_data(keys)`, in their place",
    )


def _is_key(leaf: Any) -> bool:
    return str(leaf.dtype).startswith("key<") and _has_jax()


def _has_jax() -> bool:
    # Whoever has an array of JAX has imported JAX; a run of numpy or torch does without it.
    return "jax" in sys.modules


def _jax() -> Any:
    return sys.modules["jax"]


def _data(leaf: Any) -> Any:
    return _jax().random.key_data(leaf) if _is_key(leaf) else leaf


def _encoded(part: str, value: Any, depth: int = 0) -> Any:
    """Return plain data as strict JSON can say them: floats bit by bit, and integers of any length as text."""
    if depth > _MAX_JSON_DEPTH - 4:
        raise ConfigError(f"{part}: expected fewer levels", hint="does it hold itself?")
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int:
        return value if abs(value) <= strict_json.MAX_INTEGER else {"$int": hex(value)}
    if type(value) is float:
        return {"$float": value.hex()}
    if isinstance(value, Mapping) and all(type(key) is str and key not in _TAGS for key in value):
        return {key: _encoded(part, child, depth + 1) for key, child in value.items()}
    if type(value) is list:
        return [_encoded(part, child, depth + 1) for child in value]
    raise ConfigError(
        f"{part}: expected dicts with texts as keys, lists, texts, numbers and None, found "
        f"{escape(type(value).__name__)}",
        hint="an array belongs in the tree of the optimizer or of rng; a number of numpy has `.item()`",
    )


def _decoded(value: Any) -> Any:
    """Return what `_encoded` was told.

    Raises:
        ValueError: A text is no number.
    """
    if isinstance(value, list):
        return [_decoded(child) for child in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$float"} and isinstance(value["$float"], str):
        return float.fromhex(value["$float"])
    if value.keys() == {"$int"} and isinstance(value["$int"], str):
        return int(value["$int"], 16)
    if _TAGS & value.keys():
        raise ValueError("a number is spelled in no way that is known")
    return {key: _decoded(child) for key, child in value.items()}


def _json(file: str, value: Any) -> str:
    """Return the text of a file, having shown that a restore can read it: too late to find out then."""
    text = json.dumps(value, ensure_ascii=True, indent=1) + "\n"
    try:
        _parsed(text.encode("ascii"))
    except ManifestError as err:
        hint = "leave it out, or put it into an array"
        raise ConfigError(f"{file}: it could not be restored: {err.findings[0].message}", hint=hint) from err
    return text


def _parsed(data: bytes) -> Any:
    return strict_json.loads(data, max_bytes=_MAX_JSON_BYTES, max_depth=_MAX_JSON_DEPTH)


def _write_text(path: Path, text: str) -> str:
    return _write(path, lambda sink: sink.write(text.encode("ascii")))


class _Hashing:
    """A sink that hashes what it passes on."""

    def __init__(self, file: Sink) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes | memoryview, /) -> None:
        self.digest.update(data)
        self._file.write(data)


def _write(path: Path, put: Callable[[Sink], object]) -> str:
    """Make a file with what `put` writes, and return its digest."""
    try:
        with path.open("xb") as file:
            sink = _Hashing(file)
            put(sink)
    except OSError as err:
        raise StagingError(f"cannot write {escape(path.name)}: {reason(err)}", hint="is there room?") from err
    except TypeError as err:  # a name that safetensors cannot hold
        raise ConfigError(f"{escape(path.name)}: {escape(str(err))}") from err
    return sink.digest.hexdigest()


# ---------------------------------------------------------------- restoring


def restore_training(
    directory: str | Path,
    like: TrainingState,
    *,
    manifest: str | Path | bytes | None = None,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    memory_budget: int | str | None = None,
    host_timeout: float = HOST_TIMEOUT_SECONDS,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> TrainingState:
    """Return the training state of a signed checkpoint, tensor by tensor and verified as by `safeload.filling.fill`.

    Args:
        directory: Where the files are. Untrusted.
        like: A state with the same structure: its trees say where each array goes, with shape, dtype and sharding.
            Arrays of JAX and `ShapeDtypeStruct`s, such as `jax.eval_shape` makes of the function that begins a run,
            become new arrays, in memory of their own that may be donated, and on the devices where those are; where
            JAX was free to choose, as for a count that `init` of optax makes, it is again. A number of Python stands
            for an array there. Arrays of numpy and tensors of torch are written in place; what the checkpoint ties
            has to be one array of these here too. Its step, schedule and data progress are not looked at.
        manifest: The signed manifest: a path, or the bytes of the envelope; `manifest.json` in the directory if None.
        trust: Who may sign.
        policy: What may be in the files.
        memory_budget: As for `fill`.
        host_timeout: As for `load`.
        progress: Told how far it has come.
        **expected: What to hold the manifest against; see `load`. The purpose is always "training": a checkpoint that
            lacks the optimizer, the step or the random state is refused before a file is read.

    Returns:
        The state, with the structure of `like`.

    Raises:
        PolicyError: The checkpoint is none to go on training from, or the policy refuses a file.
        RejectedError: As `load`.
        FormatError: A file of the state does not say what it should.
        ShardingError: The trees of `like` are not those of the checkpoint, a key is of another generator, or JAX has
            no weak type here of a dtype that had one.
        ConfigError: As `fill`, the purpose is another, or something in `like` is no array and describes none.
        StagingError: As `fill`.
        HostError: As `load`.
    """
    if expected.setdefault("purpose", "training") != "training":
        raise ConfigError(f"purpose: expected training, found {escape(str(expected['purpose']))}")
    path = Path(directory) / MANIFEST_NAME if manifest is None else manifest
    trees = map_leaves({part: getattr(like, part) for part in _ARRAYS}, _described, plain=_described_number)
    leaves = named_leaves(trees)
    typed = {name: leaf for name, leaf in leaves.items() if _is_key(leaf)}
    target = map_leaves(trees, lambda _, leaf: _raw(leaf) if _is_key(leaf) else leaf)
    with ExitStack() as stack:
        if needs_agreement(target):
            stack.enter_context(together(seconds=host_timeout))
        held = hold(directory, manifest=path, trust=trust, **expected)
        roles = [_STEP[1], *(role for _, role in (*_ARRAYS.values(), *_PLAIN.values()))]
        beside = read_companions(directory, held, roles=roles, policy=policy)
        step = _step(beside)
        plain = {part: _plain(beside, file) for part, (file, _) in _PLAIN.items()}
        if step.keys.keys() != typed.keys():
            raise ShardingError(
                f"typed keys of JAX: expected {escape(', '.join(typed)) or 'none'}, found "
                f"{escape(', '.join(step.keys)) or 'none'} in the checkpoint"
            )
        weak = frozenset(step.weak)
        if strange := sorted(weak - leaves.keys()):
            raise ShardingError(f"weak types: expected leaves of `like`, found {escape(', '.join(strange))}")
        for name, leaf in typed.items():
            # By the description alone, and before anything is written in place.
            _jax().eval_shape(partial(_wrapped, name, like=leaf, generator=step.keys[name]), _raw(leaf))
        filled = fill_held(
            target,
            directory,
            held,
            policy=policy,
            memory_budget=memory_budget,
            roles=[role for _, role in _ARRAYS.values()],
            tied=step.ties,
            progress=progress,
        )
        made: dict[int, Any] = {}

        def finish(name: str, leaf: Any) -> Any:
            # What is one array stays one.
            if id(leaf) not in made:
                if name in typed:
                    made[id(leaf)] = _wrapped(name, leaf, typed[name], step.keys[name])
                else:
                    made[id(leaf)] = _weakened(name, leaf) if name in weak else leaf
            return made[id(leaf)]

        wrapped = map_leaves(filled, finish)
    held.expectation.record(held.trusted)
    return TrainingState(step=step.step, **plain, **wrapped)


def _described(name: str, leaf: Any) -> Any:
    """Return the description of an array of JAX, and any other leaf as it is."""
    _require_array(name, leaf)
    if not _has_jax() or not isinstance(leaf, _jax().Array):
        return leaf
    # An array of JAX never changes, so that two leaves that are one object are no tie: an optimizer that remembers
    # where the parameters began has the same objects at first. And one that JAX was free to place must be so again:
    # bound to the default device, it could not be used together with arrays on others.
    sharding = leaf.sharding if leaf.committed else None
    return _jax().ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _described_number(name: str, value: Any) -> Any:
    if value is None:
        return None
    if _has_jax() and type(value) in {bool, int, float, complex}:
        return _jax().eval_shape(lambda: value)
    raise ConfigError(
        f"{escape(name)}: expected an array, or what describes one, found {escape(type(value).__name__)}",
        hint="leave out of the trees what is no array",
    )


def _raw(leaf: Any) -> Any:
    """Return the description of what typed keys are made of, on the same devices."""
    jax = _jax()
    raw = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    # Of any number of dimensions; of the last, the words of a key, they say nothing, so that these lie together.
    if isinstance(leaf.sharding, (jax.sharding.NamedSharding, jax.sharding.SingleDeviceSharding)):
        return jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=leaf.sharding)
    return raw


def _wrapped(name: str, data: Any, like: Any, generator: str) -> Any:
    try:
        key = _jax().random.wrap_key_data(data, impl=generator)
    except Exception as err:  # JAX's errors share no other base
        raise ShardingError(f"{escape(name)}: no key of the generator {escape(generator)}: {escape(str(err))}") from err
    if key.dtype != like.dtype:
        raise ShardingError(
            f"{escape(name)}: expected {escape(str(like.dtype))}, found {escape(str(key.dtype))}, another generator"
        )
    return key


def _weakened(name: str, leaf: Any) -> Any:
    """Return an array with a weak type, where it is one of JAX; the others have none."""
    jax = _jax() if _has_jax() else None
    if jax is None or not isinstance(leaf, jax.Array):
        return leaf
    try:
        # Only numbers of Python begin a weak type, and an array keeps its own when others are written into it. A bool
        # begins none, but what comes of comparing has the weak type of what was compared.
        is_bool = leaf.dtype == bool
        made = jax.numpy.full(leaf.shape, 0 if is_bool else leaf.dtype.type(0).item()).at[...].set(leaf)
        made = made != 0 if is_bool else made
        made = jax.device_put(made, leaf.sharding) if leaf.committed else made
    except Exception as err:  # JAX's errors share no other base
        raise ShardingError(f"{escape(name)}: cannot be of a weak type: {escape(str(err))}") from err
    if made.dtype != leaf.dtype or not made.weak_type:
        raise ShardingError(
            f"{escape(name)}: expected {escape(str(leaf.dtype))} of a weak type, found that JAX has none here",
            hint="set `jax_enable_x64` as it was when the state was saved",
        )
    return made


def _step(beside: Mapping[str, Companion]) -> _Step:
    value = _read(beside, _STEP[0])
    try:
        step = _Step.model_validate(value)
    except ValidationError as err:
        first = err.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise _malformed(_STEP[0], f"{place}: {first['msg']}") from err
    for field, names in {"ties": [name for group in step.ties for name in group], "weak": step.weak}.items():
        # All leaves are gone through for each group of them: a million groups of one leaf would take hours.
        if len(set(names)) != len(names):
            raise _malformed(_STEP[0], f"{field}: expected each name once, found one twice")
    return step


def _plain(beside: Mapping[str, Companion], file: str) -> Any:
    if file not in beside:
        return None
    try:
        return _decoded(_read(beside, file))
    except (ValueError, OverflowError) as err:
        raise _malformed(file, str(err)) from err


def _read(beside: Mapping[str, Companion], file: str) -> Any:
    if file not in beside:
        raise _malformed(file, "it is not there, and the state is not one that `save_training` wrote")
    try:
        return _parsed(beside[file].data)
    except ManifestError as err:
        raise _malformed(file, err.findings[0].message) from err


def _malformed(file: str, message: str) -> FormatError:
    hint = "restore what `save_training` wrote, with the same version of safeload or a later one"
    return FormatError(Finding("bad-training-state", escape(message), file=file, hint=hint))
