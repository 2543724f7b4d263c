"""Compare two checkpoints of any formats by the digests of their values, without loading either.

A value's digest is that of its C-order little-endian bytes, so it is the same in a pickle and in a safetensors file.
Numbers and text that a file holds beside its tensors are not compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safeload.errors import ConfigError, PolicyError, VerificationError, escape
from safeload.naming import NamedFile, name_tensors
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import Progress
from safeload.scanning import scan
from safeload.tensors import DType
from safeload.trust.oms import is_bundle
from safeload.trust.store import Trust, load_trust
from safeload.verifying import read_manifest, verify_manifest


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """What is compared of a tensor.

    Attributes:
        dtype: Element type, by numpy's or ml_dtypes' name; its byte order in the file does not count.
        shape: Length of each dimension.
        sha256: Of the value's C-order little-endian bytes, 64 lower-case hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}] sha256:{self.sha256[:16]}"


@dataclass(frozen=True, slots=True)
class Difference:
    """How two checkpoints differ, tensor by tensor, each in exactly one of these.

    Attributes:
        same: Names that have the same type, shape and value on both sides.
        changed: Names that are on both sides, with what they stand for on each.
        renamed: Pairs of names, one of each side and on that side alone, that stand for the same.
        missing: What is in the first checkpoint only.
        added: What is in the second only.
    """

    same: tuple[str, ...]
    changed: Mapping[str, tuple[ComparedTensor, ComparedTensor]]
    renamed: tuple[tuple[str, str], ...]
    missing: Mapping[str, ComparedTensor]
    added: Mapping[str, ComparedTensor]

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same tensors under the same names."""
        return not (self.changed or self.renamed or self.missing or self.added)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data: a part of the command's JSON object."""
        return {
            "equal": self.is_equal,
            "same": list(self.same),
            "changed": {name: [_json(before), _json(after)] for name, (before, after) in self.changed.items()},
            "renamed": [list(pair) for pair in self.renamed],
            "missing": {name: _json(tensor) for name, tensor in self.missing.items()},
            "added": {name: _json(tensor) for name, tensor in self.added.items()},
        }


def _json(tensor: ComparedTensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "sha256": tensor.sha256}


def diff(
    first: str | Path,
    second: str | Path,
    *,
    trust: Trust | None = None,
    policy: str | Path | Policy = DEFAULT_POLICY,
    progress: Progress | None = None,
) -> Difference:
    """Say which tensors two checkpoints have in common, by value.

    Args:
        first: A directory, whose every byte is read and hashed; or a signed manifest, which is verified, and whose
            digests are taken for what they are: its publisher's word.
        second: The same of the other.
        trust: The keys to trust; needed where a side is a manifest.
        policy: What is allowed in the files of a directory.
        progress: Told of the bytes that were hashed.

    Raises:
        PolicyError: A directory holds what the policy does not allow; every finding is in it.
        VerificationError: A manifest is not signed by a trusted key.
        ConfigError: A path is neither, a manifest is given without keys, a bundle in its place, or names are ambiguous.
        StagingError: A directory could not be read.
    """
    rules = load_policy(policy)
    before, after = (_tensors(Path(side), trust, rules, progress) for side in (first, second))
    return compare(before, after)


def compare(before: Mapping[str, ComparedTensor], after: Mapping[str, ComparedTensor]) -> Difference:
    """Say how two tables of named tensors differ.

    A name that is on one side only is taken for a new name of what is on the other side only, if both stand for the
    same; where several do, they are paired in the order of their names.
    """
    same = tuple(name for name in sorted(before) if after.get(name) == before[name])
    changed = {n: (before[n], after[n]) for n in sorted(before) if n in after and after[n] != before[n]}
    gone = {name: before[name] for name in sorted(before) if name not in after}
    come = {name: after[name] for name in sorted(after) if name not in before}
    waiting: dict[ComparedTensor, list[str]] = {}
    for name, tensor in come.items():
        waiting.setdefault(tensor, []).append(name)
    renamed = tuple((name, waiting[tensor].pop(0)) for name, tensor in gone.items() if waiting.get(tensor))
    old, new = {pair[0] for pair in renamed}, {pair[1] for pair in renamed}
    return Difference(
        same,
        changed,
        renamed,
        {name: tensor for name, tensor in gone.items() if name not in old},
        {name: tensor for name, tensor in come.items() if name not in new},
    )


def _tensors(side: Path, trust: Trust | None, rules: Policy, progress: Progress | None) -> dict[str, ComparedTensor]:
    # `Path.is_dir` raises where we may not look.
    is_directory = os.path.isdir(side)  # noqa: PTH112
    rows = list(_of_directory(side, rules, progress) if is_directory else _of_manifest(side, trust))
    names = name_tensors(file for file, _ in rows)
    return {names[file.path, name]: tensor for file, found in rows for name, tensor in found.items()}


_Rows = Iterator[tuple[NamedFile, dict[str, ComparedTensor]]]


def _of_directory(directory: Path, rules: Policy, progress: Progress | None) -> _Rows:
    report = scan(directory, policy=rules, digests=True, progress=progress)
    if not report.is_accepted:
        raise PolicyError(*report.all_findings)
    for file in report.files:
        path = Path(file.path).relative_to(directory).as_posix()
        found = {spec.name: _compared(spec.dtype, spec.shape, spec.sha256) for spec in file.tensors}
        yield NamedFile(path, None, tuple(spec.name for spec in file.tensors)), found


def _of_manifest(manifest: Path, trust: Trust | None) -> _Rows:
    envelope, source = read_manifest(manifest)
    if is_bundle(envelope):
        raise ConfigError(
            f"{escape(source)} is a bundle, which lists no tensors: there is nothing to compare by it",
            hint="name the directory that it is for",
        )
    if trust is None:
        message = f"{escape(str(manifest))} is no directory, and a manifest is compared only if a trusted key signed it"
        raise ConfigError(message, hint="name a directory, or the key of who signed the manifest: --trust KEY.pub")
    try:
        trusted = verify_manifest(envelope, load_trust(trust))
    except VerificationError as err:
        # Which of the two sides it is, nothing else says.
        raise type(err)(*(finding.in_file(source) for finding in err.findings)) from err
    for entry in trusted.manifest.files:
        found = {t.name: ComparedTensor(t.dtype, t.shape, t.sha256) for t in entry.tensors}
        yield NamedFile(entry.path, entry.parameter, tuple(t.name for t in entry.tensors)), found


def _compared(dtype: DType, shape: tuple[int, ...], sha256: str | None) -> ComparedTensor:
    if sha256 is None:
        raise TypeError("a scan with digests has one for each tensor")
    return ComparedTensor(dtype.name, shape, sha256)
