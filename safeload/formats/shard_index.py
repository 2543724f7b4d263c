"""The index of a sharded checkpoint: which tensor lies in which file (`model.safetensors.index.json`)."""

from __future__ import annotations

from typing import NoReturn

from safeload.errors import Finding, FormatError, LimitError, ManifestError, escape
from safeload.formats import Parsed, Source
from safeload.formats.shapes import check_name
from safeload.policy import Policy
from safeload.tensors import ShardIndex
from safeload.trust import strict_json

_MAX_DEPTH = 16
"""The index needs two levels; what writers add to `metadata` needs some more."""


def is_index_name(name: str) -> bool:
    """Whether a file of this name is the index of a sharded checkpoint."""
    return name.endswith((".safetensors.index.json", ".bin.index.json"))


def parse_index(source: Source, policy: Policy) -> Parsed:
    """Say which tensor the index looks for in which file; see `safeload.formats`.

    The file holds no value. What it says is held against the files that it names once all of them are parsed.
    """
    try:
        return Parsed(index=_parse(source, policy))
    except (FormatError, LimitError) as err:
        return Parsed(refusal=err)


def _parse(source: Source, policy: Policy) -> ShardIndex:
    limit = policy.limits.max_inert_bytes
    if source.size > limit:
        message = f"an index of {source.size:,} bytes; the policy allows {limit:,}"
        hint = policy.admits_by("[limits]", "`max_inert_bytes` with a larger number, if the file is honest")
        raise LimitError(Finding("limit-exceeded", message, hint=hint))
    try:
        stated = strict_json.loads(
            source.read(0, source.size),
            max_bytes=limit,
            max_depth=_MAX_DEPTH,
            max_values=policy.limits.max_values,
            max_keys=policy.limits.max_values,
            whole_floats=True,  # some versions of the libraries write total_size as one
        )
    except ManifestError as err:
        raise FormatError(*(Finding("bad-index", f.message, offset=f.offset) for f in err.findings)) from err
    match stated:
        case {"weight_map": dict(files), **rest} if files and rest.keys() <= {"metadata"}:
            metadata = rest.get("metadata", {})
        case _:
            _fail(
                "bad-index", "expected an index of a weight_map that is not empty, and metadata, found something else"
            )
    for tensor, file in files.items():
        check_name(tensor, offset=0)
        if not isinstance(file, str) or not _is_plain(file):
            found = escape(str(file), limit=80)
            message = f"{escape(tensor, limit=80)}: expected the name of a file beside the index, found '{found}'"
            _fail("bad-index", message)
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else False
    if total_size is not None and (type(total_size) is not int or total_size < 0):
        _fail("bad-index", "expected metadata with a total_size in bytes, found something else")
    return ShardIndex(files, total_size)


def _is_plain(name: str) -> bool:
    """Whether a name is one component of a path, and no way to another directory."""
    return name not in {"", ".", ".."} and not any(sign in name for sign in "/\\\0") and len(name.encode()) <= 255


def _fail(code: str, message: str) -> NoReturn:
    raise FormatError(Finding(code, message, offset=0))
