"""PyTorch: a zip archive of a pickle and its storages, and the older files of several pickles.

Sources: `torch/serialization.py` and `caffe2/serialize/inline_container.h` of PyTorch 1.6 to 2.13. In both forms one
pickle says what the file holds, and names storages by persistent ids; a storage's bytes lie outside of the pickle, as
they are, so tensors are views on the file. Nothing is unpickled: the same machine reads these pickles as all others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, TypeAlias

from safeload.errors import Finding, FormatError, PolicyError, RejectedError, escape
from safeload.formats import Parsed, Source
from safeload.formats.detection import is_tar
from safeload.formats.pickles.constructors import describe, short_text
from safeload.formats.pickles.machine import concluded
from safeload.formats.pickles.results import Results
from safeload.formats.pickles.symbols import Storage
from safeload.formats.pickles.torch_machine import TorchMachine
from safeload.formats.zips import STORED, ZipEntry, ZipTable, entry_bytes, read_zip
from safeload.policy import Policy
from safeload.tensors import Value

_LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""LONG1 of torch.serialization.MAGIC_NUMBER, then STOP."""

_MAGIC_NUMBER: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION: Final = 1001
"""What the first two pickles of a legacy file are."""

_SMALL_PICKLE_BYTES: Final = 4096
"""Length of each of a legacy file's first three pickles. The longest has about 120 bytes."""

_SAVE_AGAIN: Final = "write it again with `torch.save`, from a source that you trust"

_RECORDS: Final[Mapping[str, re.Pattern[bytes]]] = {
    # kMinSupportedFileFormatVersion to kMaxSupportedFileFormatVersion.
    "version": re.compile(rb"(?:[1-9]|10)\n?"),
    ".format_version": re.compile(rb"1"),
    ".storage_alignment": re.compile(rb"[1-9][0-9]{0,8}"),
    ".data/serialization_id": re.compile(rb"[0-9]{1,64}"),
    "byteorder": re.compile(rb"little|big"),
}
"""The members beside the pickle and the storages, and what they hold."""

_TORCHSCRIPT: Final = re.compile(
    r"constants\.pkl|code/.*|constants/.*|ts_code/.*|extra/.*|bytecode\.pkl|attributes\.pkl"
)
"""Members of a program, as `torch.jit.save` and the mobile formats write it."""


def is_legacy(head: bytes) -> bool:
    """Whether a file begins as PyTorch wrote them before version 1.6."""
    return _LEGACY_MAGIC in head[: 2 + 9 + len(_LEGACY_MAGIC)]


MakeMachine: TypeAlias = Callable[..., TorchMachine]
"""What makes a machine, called as `TorchMachine` is: the class, or one that tells what it does."""


def parse_pytorch(
    source: Source, policy: Policy, archive: ZipTable | None = None, *, machine: MakeMachine = TorchMachine
) -> Parsed:
    """Say what tensors a PyTorch zip file holds and where they lie, or why it is refused.

    The claim: for any bytes, either the result carries a refusal, or `torch.load(weights_only=True)` gives the same
    tensors, if it takes the file at all (numpy arrays and bytes, which it refuses, are read as in other pickles).

    Each storage is named by the pickle and each is there, with exactly the length that the pickle says; nothing else is
    in the archive but the records that PyTorch writes. The checksums of those and of the pickle are held against their
    data. Storages are jumped over, so that theirs are left to a source that reads them; see `Source.checksum`.

    Args:
        source: The file's bytes.
        policy: Which globals and protocols are allowed, and the limits.
        archive: What `read_zip` said of this source, where it was asked before.
        machine: What to run the pickle on.
    """
    machines: list[TorchMachine] = []
    results = Results(policy)
    value: Value = None
    error: RejectedError | None = None
    try:
        members = _members(read_zip(source, policy) if archive is None else archive)
        pickle = members.pop("data.pkl")
        _check_records(source, members, policy)
        held = _Held(pickle.offset, entry_bytes(source, pickle, policy))
        run = machine(held, policy, first=pickle.offset)
        machines.append(run)
        result = run.run()
        if not run.findings:
            _place(source, run.storages, members, pickle.offset)
            value = _converted(run, result, results, policy)
    except RejectedError as err:
        error = err
    return _announced(source, concluded(machines, value, results, error))


def pickle_of(source: Source, policy: Policy) -> bytes:
    """Return the pickle of a zip file, for people to read.

    Raises:
        RejectedError: It is no archive of PyTorch's, or the pickle is not what its checksum says.
    """
    return entry_bytes(source, _members(read_zip(source, policy))["data.pkl"], policy)


def parse_pytorch_legacy(source: Source, policy: Policy, *, machine: MakeMachine = TorchMachine) -> Parsed:
    """Say what tensors a PyTorch file from before version 1.6 holds and where they lie, or why it is refused.

    Such a file is five pickles (a magic number, a version, facts of the system, the value, the keys of the storages)
    and then the storages, each behind its number of elements. The claim is that of `parse_pytorch`.

    Args:
        source: The file's bytes.
        policy: Which globals and protocols are allowed, and the limits.
        machine: What to run the fourth pickle on.
    """
    machines: list[TorchMachine] = []
    results = Results(policy)
    value: Value = None
    error: RejectedError | None = None
    try:
        _refuse_tar(source)
        at = _check_preamble(source, policy, machines)
        run = machine(_UpTo(source, source.size), policy, first=at, is_legacy=True, is_last=False)
        machines.append(run)
        result = run.run()
        if not run.findings:
            keys = TorchMachine(_UpTo(source, source.size), policy, first=run.end, is_last=False)
            machines.append(keys)
            _place_in_order(source, run.storages, keys.run(), keys.end)
            value = _converted(run, result, results, policy)
    except RejectedError as err:
        error = err
    return _announced(source, concluded(machines, value, results, error))


def _converted(machine: TorchMachine, result: object, results: Results, policy: Policy) -> Value:
    """Return the value, after a look at what it does not show: attributes of state dicts, which may hold no tensors."""
    attributes = Results(policy)
    attributes.convert(machine.attributes)
    if attributes.tensors:
        _fail("not-data", "expected versions in a state dict's `_metadata`, found a tensor", None)
    return results.convert(result)


def _announced(source: Source, parsed: Parsed) -> Parsed:
    """Tell the source where the tensors lie, ties once."""
    for extent in dict.fromkeys(spec.extent for spec in parsed.tensors):
        if extent.inline is None:
            source.payload(extent.offset, extent.nbytes)
    return parsed


class _Held:
    """A part of a file that is in memory, at the offsets that it has in the file."""

    def __init__(self, offset: int, data: bytes) -> None:
        self._offset = offset
        self._data = data
        self.size = offset + len(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        """See `Source.read`."""
        start = offset - self._offset
        return self._data[start : start + nbytes]

    def payload(self, offset: int, nbytes: int) -> None:
        """Do nothing: every byte stays in reach."""

    def checksum(self, offset: int, nbytes: int, crc32: int) -> None:
        """Do nothing: the archive's own source is told of its members."""

    def peek(self, offset: int, nbytes: int) -> bytes:
        """See `Source.peek`."""
        return self.read(offset, nbytes)


class _UpTo:
    """A file up to some byte, read ahead of its stream, since views on what lies behind may come in any order."""

    def __init__(self, source: Source, size: int) -> None:
        self._source = source
        self.size = size

    def read(self, offset: int, nbytes: int) -> bytes:
        """See `Source.read`."""
        return self._source.peek(offset, max(0, min(nbytes, self.size - offset)))

    def payload(self, offset: int, nbytes: int) -> None:
        """Do nothing: the tensors are announced when all are known."""

    def checksum(self, offset: int, nbytes: int, crc32: int) -> None:
        """Do nothing: such a file has no checksums."""

    def peek(self, offset: int, nbytes: int) -> bytes:
        """See `Source.peek`."""
        return self.read(offset, nbytes)


def _fail(code: str, message: str, offset: int | None, hint: str | None = None) -> NoReturn:
    raise FormatError(Finding(code, message, offset=offset, hint=hint))


# ---------------------------------------------------------------- zip


def _members(archive: ZipTable) -> dict[str, ZipEntry]:
    """Return the archive's members by their names below its one root, `data.pkl` among them."""
    entries = archive.entries
    root = entries[0].name.partition("/")[0] if entries else ""
    members: dict[str, ZipEntry] = {}
    for entry in entries:
        # PyTorch takes the first member's folder for the root, and looks for all others in it.
        folder, _, name = entry.name.partition("/")
        if folder != root or not name:
            message = f"expected one folder with all members, found {escape(entry.name, limit=100)!r}"
            _fail("pytorch-member", message, entry.offset, _SAVE_AGAIN)
        members[name] = entry
    for name, entry in members.items():
        if _TORCHSCRIPT.fullmatch(name):
            finding = Finding(
                "torchscript",
                f"expected tensors, found a TorchScript program ({escape(name, limit=100)})",
                offset=entry.offset,
                hint="TorchScript is code; save `model.state_dict()` instead",
            )
            raise PolicyError(finding)
    for name, entry in members.items():
        if name != "data.pkl" and name not in _RECORDS and not name.startswith("data/"):
            message = f"expected the members that PyTorch writes, found {escape(name, limit=100)!r}"
            _fail("pytorch-member", message, entry.offset, _SAVE_AGAIN)
        if entry.method != STORED:
            finding = Finding(
                "pytorch-compressed",
                f"expected members stored as they are, found {escape(name, limit=100)!r} compressed",
                offset=entry.offset,
                hint=f"PyTorch never compresses; {_SAVE_AGAIN}",
            )
            raise PolicyError(finding)
    for name in ("data.pkl", "version"):
        if name not in members:
            _fail("pytorch-member", f"expected a member {name!r}, found none", 0, _SAVE_AGAIN)
    return members


def _check_records(source: Source, members: dict[str, ZipEntry], policy: Policy) -> None:
    """Take the small records out of `members`, after checking what each says."""
    for name, pattern in _RECORDS.items():
        entry = members.pop(name, None)
        if entry is None:
            continue
        text = entry_bytes(source, entry, policy)
        if not pattern.fullmatch(text):
            _fail("pytorch-record", f"{name}: expected {pattern.pattern!r}, found {text[:40]!r}", entry.offset)
        if name == "byteorder" and text != b"little":
            # A reader on a machine of the other order swaps each element, by a type that it takes from the pickle, and
            # versions before 2.1 do not look at this record at all.
            finding = Finding(
                "pytorch-big-endian",
                "expected little-endian storages, found big-endian ones, which versions of PyTorch read differently",
                offset=entry.offset,
                hint="load it on the machine that wrote it, and save it on a little-endian one",
            )
            raise PolicyError(finding)


def _place(source: Source, storages: Mapping[str, Storage], members: Mapping[str, ZipEntry], offset: int) -> None:
    """Give each storage its place, and see that the archive has these storages and no others."""
    for storage in storages.values():
        entry = members.get(f"data/{storage.key}")
        if entry is None:
            _fail("storage-missing", f"expected a storage data/{storage.key}, found none", offset)
        if entry.nbytes != storage.nbytes:
            message = f"data/{storage.key}: expected {storage.nbytes:,} bytes, found {entry.nbytes:,}"
            _fail("storage-size", message, entry.offset)
        storage.offset = entry.offset
        source.checksum(entry.offset, entry.nbytes, entry.crc32)
    for name, entry in members.items():
        if name.removeprefix("data/") not in storages:
            # PyTorch writes a storage when a tensor names it, so this was not written by it, and nobody would see it.
            message = f"expected storages that the pickle names, found {escape(name, limit=100)!r}"
            _fail("storage-unused", message, entry.offset, _SAVE_AGAIN)


# ---------------------------------------------------------------- several pickles


def _refuse_tar(source: Source) -> None:
    """Refuse a file that PyTorch would take for a tar archive, which it looks for first (`_legacy_load`)."""
    if is_tar(source.peek(0, 512)):
        _fail("two-formats", "expected a file of pickles, found one that is a tar archive as well", 0, _SAVE_AGAIN)


def _check_preamble(source: Source, policy: Policy, machines: list[TorchMachine]) -> int:
    """Run the first three pickles, and return where the fourth begins."""
    at = 0
    for what, fits in (
        ("the magic number", lambda value: type(value) is int and value == _MAGIC_NUMBER),
        (f"version {_PROTOCOL_VERSION}", lambda value: type(value) is int and value == _PROTOCOL_VERSION),
        (f"facts of a little-endian system with version {_PROTOCOL_VERSION}", _is_system),
    ):
        end = min(source.size, at + _SMALL_PICKLE_BYTES)
        machine = TorchMachine(_UpTo(source, end), policy, first=at, is_last=False)
        machines.append(machine)
        value = machine.run()
        if not fits(value):
            _fail("pytorch-preamble", f"expected {what}, found {describe(value)}", at)
        at = machine.end
    return at


def _is_system(value: object) -> bool:
    """Whether this is `sys_info` as a little-endian system writes it; files of others were not seen."""
    if type(value) is not dict or set(value) - {"type_sizes"} != {"protocol_version", "little_endian"}:
        return False
    sizes = value.get("type_sizes", {})
    plain = type(sizes) is dict and all(type(size) is int for size in sizes.values())
    return plain and value["little_endian"] is True and value["protocol_version"] == _PROTOCOL_VERSION


def _place_in_order(source: Source, storages: Mapping[str, Storage], keys: object, at: int) -> None:
    """Give each storage its place, in the order of the keys, from byte `at` to the end of the file."""
    first = at
    if type(keys) is not list:
        _fail("storage-keys", f"expected a list of the storages' keys, found {describe(keys)}", first)
    names = [short_text(key) for key in keys]
    if len(names) != len(set(names)) or set(names) != set(storages):
        message = f"expected the keys of the {len(storages)} storages that the value names, each once, found others"
        _fail("storage-keys", message, first, _SAVE_AGAIN)
    for storage in _named(storages, names):
        count = source.peek(at, 8)
        if len(count) < 8 or storage.nbytes > source.size - at - 8:
            _fail("truncated", f"expected a storage of {storage.nbytes:,} bytes, found the end of the file", at)
        if int.from_bytes(count, "little") != storage.n_elements:
            found = int.from_bytes(count, "little")
            _fail("storage-size", f"expected a storage of {storage.n_elements:,} elements, found {found:,}", at)
        storage.offset = at + 8
        at += 8 + storage.nbytes
    if at != source.size:
        _fail(
            "data-after-storages",
            f"expected the end of the file, found {source.size - at:,} more byte(s)",
            at,
            "what follows would be seen by some readers and not by others",
        )


def _named(storages: Mapping[str, Storage], names: Sequence[str | None]) -> list[Storage]:
    return [storages[name] for name in names if name is not None]
