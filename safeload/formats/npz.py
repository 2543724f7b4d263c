"""npz: a zip archive of npy arrays, one member each (numpy.savez, numpy.savez_compressed)."""

from __future__ import annotations

from typing import Final

from safeload.errors import Finding, FormatError, LimitError, PolicyError, escape
from safeload.formats import MemorySource, Parsed, Source
from safeload.formats.npy import read_header
from safeload.formats.zips import DEFLATED, ZipEntry, ZipTable, entry_bytes, read_zip
from safeload.policy import Policy
from safeload.tensors import Extent, TensorSpec, Value

MAX_CHECKED_BYTES: Final = 16 * 1024 * 1024
"""Stored arrays of up to so many bytes in all are held against the archive's checksums. Larger ones are not read to be
parsed: a scan jumps over them. CRC-32 is no protection from anybody; what is signed has a SHA-256 of every byte."""

_SUFFIX = ".npy"


def parse_npz(source: Source, policy: Policy, archive: ZipTable | None = None) -> Parsed:
    """Say what arrays the archive holds; see `safeload.formats`.

    The value is a dict of the arrays by the names that `numpy.load` gives them. A stored array lies where the file has
    it; a deflated one is carried along inflated, and the policy bounds how much that comes to in all.

    Args:
        source: The file's bytes.
        policy: Its limits bound what is read.
        archive: What `read_zip` said of this source, where it was asked before.
    """
    try:
        return _parse(source, policy, read_zip(source, policy) if archive is None else archive)
    except (FormatError, LimitError, PolicyError) as err:
        return Parsed(refusal=err)


def _parse(source: Source, policy: Policy, archive: ZipTable) -> Parsed:
    entries = archive.entries
    for entry in entries:
        if not entry.name.endswith(_SUFFIX):
            message = f"expected only arrays, members called NAME.npy, found '{escape(entry.name)}'"
            hint = "keep what is no array in a file of its own"
            raise PolicyError(Finding("format-not-supported", message, offset=entry.offset, hint=hint))
    names = {entry.name for entry in entries}
    for entry in entries:
        if entry.name + _SUFFIX in names:
            message = f"expected no array called like the member of another, found '{escape(entry.name)}' twice"
            hint = "numpy.load looks for the member first, and gives the other array under this name; rename one"
            raise FormatError(Finding("ambiguous-name", message, offset=entry.offset, hint=hint))
    inflated = sum(entry.nbytes for entry in entries if entry.method == DEFLATED)
    if inflated > policy.limits.max_inline_bytes:
        message = f"arrays that inflate to {inflated:,} bytes; the policy allows {policy.limits.max_inline_bytes:,}"
        hint = policy.admits_by("[limits]", "`max_inline_bytes` with a larger number; or save with numpy.savez")
        raise LimitError(Finding("limit-exceeded", message, offset=0, hint=hint))
    stored = sum(entry.nbytes for entry in entries if entry.method != DEFLATED)
    # What is peeked at is held, and headers are as well, so the policy's bound must not be met by these.
    is_checked = stored <= min(MAX_CHECKED_BYTES, policy.limits.max_inline_bytes // 4)
    specs = [_array(source, entry, policy, is_checked=is_checked) for entry in entries]
    for spec in specs:
        if spec.extent.inline is None:
            source.payload(spec.extent.offset, spec.extent.nbytes)
    value: dict[str | int | float | None, Value] = {spec.name: spec for spec in specs}
    return Parsed(value, tuple(specs))


def _array(source: Source, entry: ZipEntry, policy: Policy, *, is_checked: bool) -> TensorSpec:
    name = entry.name.removesuffix(_SUFFIX)
    if entry.method == DEFLATED:
        data = entry_bytes(source, entry, policy)
        try:
            header = read_header(MemorySource(data).read, 0, entry.nbytes)
        except (FormatError, PolicyError) as err:
            # What is at fault is inside the member, which as a whole is at one place of the file.
            found = (Finding(f.code, f.message, offset=entry.offset, hint=f.hint) for f in err.findings)
            raise type(err)(*found) from err
        extent = Extent(entry.offset, header.nbytes, data[header.start :])
    else:
        source.checksum(entry.offset, entry.nbytes, entry.crc32)
        if is_checked:
            entry_bytes(source, entry, policy)
        header = read_header(source.peek, entry.offset, entry.nbytes)
        extent = Extent(header.start, header.nbytes)
    return TensorSpec(name, header.dtype, header.shape, header.order, extent)
