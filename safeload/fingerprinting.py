"""Fingerprints: the digest of each value of a mapped model, and what it computes, to hold another load against.

A query that took the place of a key has the right shape, and so has a square matrix that was not transposed. Only
values tell: this writes them down as digests, once for a load that is known to be right, and compares every later one.

A fingerprint is a JSON file of integers and text. It proves as much as whoever vouches for it: put it into the
checkpoint before signing, and the manifest lists its digest; or keep it where the model's code is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from safeload.canonical import numpy_dtype
from safeload.decoding import HostTensor
from safeload.digests import SHA256_HEX, sha256_hex
from safeload.errors import ConfigError, DigestMismatchError, Finding, ManifestError, SafeloadError, escape, reason
from safeload.manifest import Manifest, TrustedManifest
from safeload.naming import NamedFile, name_tensors
from safeload.records import Record
from safeload.remapping import Array, canonical_blocks
from safeload.tensors import DTYPE_ITEMSIZE, DType
from safeload.trust.strict_json import loads

MAX_FINGERPRINT_BYTES: Final = 64 * 1024 * 1024
"""Longest fingerprint that is read. One tensor takes about 150 bytes."""

MAX_OUTPUT_BYTES: Final = 1024 * 1024
"""Most bytes of a forward pass's output that are kept: the logits of a few positions."""

MAX_NAME: Final = 4096
"""Longest name of a tensor, in characters."""

_MAX_DEPTH: Final = 64
"""Most levels of a tree; a deeper one is one that holds itself."""

Forward = Callable[[Any, Any], Any]
"""The caller's model: takes the mapped tree and the fixed input, and returns an array."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


Sha256 = Annotated[str, StringConstraints(pattern=f"^{SHA256_HEX.pattern}$")]
Dtype = Literal[tuple(DTYPE_ITEMSIZE)]  # type: ignore[valid-type] # one table of dtypes, not a second list
Shape = tuple[Annotated[int, Field(ge=0, le=1 << 53)], ...]


class Value(_Model):
    """A tensor's dtype, its shape, and the SHA-256 of its C-order little-endian bytes, as manifests have it."""

    dtype: Dtype  # type: ignore[valid-type] # see there
    shape: Shape
    sha256: Sha256

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} sha256:{self.sha256[:16]}"


class Pass(_Model):
    """A forward pass: the digest of what it was given, and its output with all its numbers."""

    given: Value
    output: Value
    numbers: Annotated[str, StringConstraints(max_length=2 * MAX_OUTPUT_BYTES)]
    """The output's C-order little-endian bytes in base64 (RFC 4648, 4): two machines need not agree in each bit."""

    @model_validator(mode="after")
    def _agrees(self) -> Pass:
        try:
            data = base64.b64decode(self.numbers, validate=True)
        except binascii.Error as err:
            raise ValueError(f"numbers: no base64: {err}") from err
        # So that the bytes are just as many as the shape has, and not one array is made of a claimed length.
        if sha256_hex(data) != self.output.sha256:
            raise ValueError("numbers: not those of the output's digest")
        n_elements = 1
        for length in self.output.shape:
            n_elements *= length
        if len(data) != n_elements * DTYPE_ITEMSIZE[self.output.dtype]:
            raise ValueError("numbers: more or fewer than the output's shape has")
        return self

    @property
    def array(self) -> Array:
        """The output."""
        flat = np.frombuffer(base64.b64decode(self.numbers), dtype=numpy_dtype(DType(self.output.dtype)))
        return flat.reshape(self.output.shape)


class Fingerprint(_Model):
    """The values of a mapped model by their `/`-joined names, and what it computes of a fixed input.

    Attributes:
        fingerprint: The format's version.
        tensors: Every tensor of the tree.
        forward: What the caller's model made of it; None where there was none.
    """

    fingerprint: Annotated[int, Field(ge=1, le=1)]
    tensors: Mapping[Annotated[str, StringConstraints(max_length=MAX_NAME)], Value] = Field(min_length=1)
    forward: Pass | None = None

    @classmethod
    def parse(cls, data: bytes, *, source: str = "the fingerprint") -> Fingerprint:
        """Read a fingerprint.

        Args:
            data: The file's bytes.
            source: What to call it in messages.

        Raises:
            ConfigError: It is none.
        """
        try:
            found = loads(data, max_bytes=MAX_FINGERPRINT_BYTES, max_depth=6, max_keys=1_000_000)
            return cls.model_validate(_tuples(found))
        except ManifestError as err:
            raise ConfigError(f"{escape(source)}: {err.findings[0].message}") from err
        except ValidationError as err:
            first = err.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            message = first["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{escape(source)}: {escape(place)}: {escape(message)}") from err

    @classmethod
    def read(cls, path: str | Path) -> Fingerprint:
        """Read a fingerprint from a file.

        Raises:
            ConfigError: It cannot be read, or is none.
        """
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_FINGERPRINT_BYTES + 1)
        except (OSError, ValueError) as err:
            raise ConfigError(f"cannot read {escape(str(path))}: {reason(err)}", hint="check the path") from err
        return cls.parse(data, source=str(path))

    @classmethod
    def of_manifest(cls, manifest: TrustedManifest | Manifest) -> Fingerprint:
        """Return the values that a manifest lists, under the names that its tensors have in a mapping.

        The manifest of a converted checkpoint is the fingerprint of the tree that was converted.

        Raises:
            ConfigError: Two tensors would have one name, or it lists none.
        """
        listed = manifest.manifest if isinstance(manifest, TrustedManifest) else manifest
        named = name_tensors(
            NamedFile(file.path, file.parameter, tuple(tensor.name for tensor in file.tensors)) for file in listed.files
        )
        if not named:
            raise ConfigError("expected a manifest that lists tensors, found none in it")
        values = {
            named[file.path, tensor.name]: Value(dtype=tensor.dtype, shape=tensor.shape, sha256=tensor.sha256)
            for file in listed.files
            for tensor in file.tensors
        }
        return _made(values, None)

    def to_json(self) -> bytes:
        """Return the file's bytes, the same for the same values: sorted, in ASCII, a line for each thing."""
        return (json.dumps(self.model_dump(mode="json", exclude_none=True), indent=1, sort_keys=True) + "\n").encode()

    @property
    def sha256(self) -> str:
        """SHA-256 of `to_json`: what to pin, to hold a model against without keeping the file."""
        return sha256_hex(self.to_json())


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison covered.

    Attributes:
        n_tensors: How many tensors are equal, which are all.
        forward: How the forward pass compares: equal bits, numbers within the tolerance, or not done.
        largest_difference: Between the outputs' numbers; 0.0 for equal bits or none.
    """

    n_tensors: int
    forward: Literal["equal", "close", "not compared"]
    largest_difference: float


def value_of(array: Any) -> Value:
    """Return an array's dtype, shape and digest, in memory that does not grow with it.

    Raises:
        ConfigError: It is no array of a dtype that safeload reads.
    """
    try:
        host = np.asarray(array)
    except Exception as err:  # JAX has errors that share no other base: a deleted or a donated array
        raise ConfigError(f"an array cannot be copied to the host: {escape(str(err))}") from err
    if host.dtype.name not in DTYPE_ITEMSIZE:
        raise ConfigError(f"safeload has no dtype {escape(str(host.dtype))}")
    digest = hashlib.sha256()
    for block in canonical_blocks(host):
        digest.update(block)
    return Value(dtype=host.dtype.name, shape=host.shape, sha256=digest.hexdigest())


def fingerprint(tree: Any, *, forward: Forward | None = None, inputs: Any = None) -> Fingerprint:
    """Return the fingerprint of a tree of arrays, and of a forward pass if the caller gives one.

    Args:
        tree: Dicts, lists, tuples and records of numpy or jax arrays or `HostTensor`s, such as `remap` returns.
        forward: The caller's model: a function of the tree and of `inputs` that returns an array.
        inputs: The fixed input, an array.

    Raises:
        ConfigError: The tree has no arrays or other leaves, the model raises an exception, or its output is too long.
    """
    # The values before the pass, as in a comparison: a model that writes to its weights is told then.
    values = _values(_arrays(tree))
    return _made(values, None if forward is None else _pass(tree, forward, inputs))


def check_fingerprint(
    tree: Any,
    expected: Fingerprint,
    *,
    forward: Forward | None = None,
    inputs: Any = None,
    tolerance: float = 0.0,
) -> Compared:
    """Prove that every value of a tree is the one that a fingerprint has, and that the model computes the same.

    Args:
        tree: As for `fingerprint`.
        expected: What to hold it against.
        forward: As for `fingerprint`; needed if the fingerprint has a forward pass that is to be compared.
        inputs: As for `fingerprint`.
        tolerance: The largest difference between two numbers of the outputs that is none: 0.0 for equal bits. Values
            of tensors are always compared bit by bit.

    Returns:
        What was compared: without `forward`, that is not the forward pass.

    Raises:
        DigestMismatchError: A tensor is missing, unexpected, or has another value; or the output differs. A finding
            says it where a value is another tensor's, or is the transpose of what is expected.
        ConfigError: As for `fingerprint`, or the inputs are not those of the fingerprint.
    """
    arrays = _arrays(tree)
    values = _values(arrays)
    findings = list(_differences(arrays, values, expected.tensors))
    result, difference = _compare_pass(tree, expected.forward, forward, inputs, tolerance)
    if result == "differs":
        message = f"expected the forward pass to give the same output, found numbers that differ by {difference:.3g}"
        findings.append(Finding("output-mismatch", message, hint="the values, the code or its precision are others"))
    if findings or result == "differs":
        raise DigestMismatchError(*findings)
    return Compared(len(values), result, difference)


def _made(values: Mapping[str, Value], forward: Pass | None) -> Fingerprint:
    try:
        return Fingerprint(fingerprint=1, tensors=values, forward=forward)
    except ValidationError as err:  # of a name, which is all that the caller chose
        names = [name for name in values if len(name) > MAX_NAME or not name.isprintable()]
        shown = escape(names[0] if names else "", limit=60)
        raise ConfigError(f"expected names of text of at most {MAX_NAME} characters, found {shown!r}") from err


def _compare_pass(
    tree: Any, expected: Pass | None, forward: Forward | None, inputs: Any, tolerance: float
) -> tuple[Literal["equal", "close", "not compared", "differs"], float]:
    if expected is None or forward is None:
        return "not compared", 0.0
    if value_of(inputs) != expected.given:
        raise ConfigError(f"inputs: expected {expected.given}, found {value_of(inputs)}", hint="use the same input")
    found = _pass(tree, forward, inputs)
    if found.output == expected.output:
        return "equal", 0.0
    if found.output.shape != expected.output.shape:
        return "differs", float("inf")
    # nan is no number, and stays the largest of differences.
    with np.errstate(all="ignore"):
        gaps = np.abs(found.array.astype(np.complex128) - expected.array.astype(np.complex128))
    largest = float(np.max(np.nan_to_num(gaps, nan=np.inf), initial=0.0))
    return ("close" if largest <= tolerance and tolerance > 0 else "differs"), largest


def _pass(tree: Any, forward: Forward, inputs: Any) -> Pass:
    try:
        made = forward(tree, inputs)
    except SafeloadError:
        raise
    except Exception as err:
        raise ConfigError(f"forward: the model raised {escape(repr(err))}") from err
    output = value_of(made)
    array = np.asarray(made)
    if array.nbytes > MAX_OUTPUT_BYTES:
        raise ConfigError(
            f"forward: expected an output of at most {MAX_OUTPUT_BYTES} bytes, found {array.nbytes}",
            hint="return the logits of a few positions",
        )
    numbers = base64.b64encode(b"".join(bytes(block) for block in canonical_blocks(array))).decode("ascii")
    return Pass(given=value_of(inputs), output=output, numbers=numbers)


def _values(arrays: Mapping[str, Any]) -> dict[str, Value]:
    # Once for each array, however many names it has.
    known: dict[int, Value] = {}
    for array in arrays.values():
        if id(array) not in known:
            known[id(array)] = value_of(array)
    return {name: known[id(array)] for name, array in arrays.items()}


def _differences(
    arrays: Mapping[str, Any], found: Mapping[str, Value], expected: Mapping[str, Value]
) -> Iterator[Finding]:
    owners: dict[Value, str] = {}
    for name, value in expected.items():
        owners.setdefault(value, name)
    for name, value in expected.items():
        if name not in found:
            yield Finding("value-missing", f"expected {escape(name)}, {value}; found no such tensor")
        elif found[name] != value:
            message = f"expected {escape(name)} to be {value}, found {found[name]}"
            yield Finding("value-mismatch", message, hint=_diagnosis(arrays[name], found[name], value, owners))
    for name in found:
        if name not in expected:
            message = f"expected no {escape(name)}, found {found[name]}"
            yield Finding("value-unexpected", message, hint="make the fingerprint of the same tree")


def _diagnosis(array: Any, found: Value, expected: Value, owners: Mapping[Value, str]) -> str | None:
    if found in owners:
        return f"it is the value of {escape(owners[found])}: were the two swapped?"
    if len(found.shape) > 1 and value_of(np.swapaxes(np.asarray(array), -1, -2)) == expected:
        return "it is the transpose: a transpose is missing, or one too many"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return "the mapping or the dtype is another"
    return None


def _arrays(tree: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, array in _leaves(tree, ()):
        if name in found:
            raise ConfigError(f"expected a name for each leaf, found {escape(name)} twice")
        found[name] = array
    if not found:
        raise ConfigError("expected a tree with at least one array, found none")
    return found


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if len(path) > _MAX_DEPTH:
        raise ConfigError(f"expected at most {_MAX_DEPTH} levels in a tree, found more", hint="does it hold itself?")
    if node is None:
        return
    if isinstance(node, HostTensor):
        yield "/".join(path), node.array
    elif isinstance(node, (Mapping, Record)):
        for key, child in node.items():
            yield from _leaves(child, (*path, str(key)))
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from _leaves(child, (*path, str(index)))
    elif hasattr(node, "dtype") and hasattr(node, "shape"):
        yield "/".join(path), node
    else:
        name = escape("/".join(path)) or "the tree"
        raise ConfigError(f"{name}: expected an array, found {type(node).__name__}")


def _tuples(value: object) -> object:
    """JSON's arrays as tuples, which is what a frozen model has."""
    if isinstance(value, dict):
        return {key: _tuples(child) for key, child in value.items()}
    return tuple(_tuples(child) for child in value) if isinstance(value, list) else value
