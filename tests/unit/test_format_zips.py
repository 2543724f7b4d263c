"""An archive is read only if its members tile it and both headers of each agree. Refusals are in tests/vectors."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

import pytest

from safeload import scanning
from safeload.errors import FormatError, LimitError, PolicyError, RejectedError
from safeload.formats import MemorySource, Source, npz, pytorch
from safeload.formats.zips import DEFLATED, MAX_ENTRIES, STORED, ZipEntry, ZipTable, entry_bytes, read_zip
from safeload.policy import Policy
from tests.containers_sample import Member, damaged, descriptor, extra, npy, zip64, zip_file
from tests.streams import DEFAULT, policy_with
from tests.torch_sample import WEIGHT, Torch, torch_zip


def contents(raw: bytes) -> dict[str, bytes]:
    source = MemorySource(raw)
    return {entry.name: entry_bytes(source, entry, DEFAULT) for entry in read_zip(source, DEFAULT).entries}


def read_or_refused(raw: bytes) -> dict[str, bytes] | RejectedError:
    try:
        return contents(raw)
    except (FormatError, LimitError, PolicyError) as err:
        return err


def written(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED, zip64_always: bool = False) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members:
            with archive.open(name, "w", force_zip64=zip64_always) as member:
                member.write(data)
    return out.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("zip64_always", [False, True])
def test_what_python_writes_is_read(method: int, zip64_always: bool) -> None:
    members = (("a", b""), ("b/c.npy", bytes(1000)), ("é", b"text"))
    assert contents(written(*members, method=method, zip64_always=zip64_always)) == dict(members)


def test_what_python_writes_to_a_pipe_is_read() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: int) -> int:
            raise OSError("a pipe")

        def tell(self) -> int:
            raise OSError("a pipe")

    for always in (False, True):
        out = Pipe()
        with (
            zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("a", "w", force_zip64=always) as f,
        ):
            f.write(bytes(100))
        assert contents(out.getvalue()) == {"a": bytes(100)}


def test_a_member_is_where_its_headers_say() -> None:
    (first, second) = read_zip(MemorySource(zip_file([Member("a", b"xyz"), Member("b", b"1" * 9, 8)])), DEFAULT).entries
    assert first == ZipEntry("a", 31, 3, 3, STORED, zlib.crc32(b"xyz"))
    stored = len(Member("b", b"1" * 9, 8).stored)
    assert second == ZipEntry("b", 31 + 3 + 31, stored, 9, DEFLATED, zlib.crc32(b"1" * 9))


def test_members_come_in_the_order_of_their_data() -> None:
    raw = zip_file([Member("b"), Member("a"), Member("c")], order=[2, 0, 1])
    assert [entry.name for entry in read_zip(MemorySource(raw), DEFAULT).entries] == ["b", "a", "c"]


def test_an_empty_archive_and_a_directory_are_read() -> None:
    assert contents(zip_file([])) == {}
    assert contents(zip_file([Member("d/", b""), Member("d/a", b"x")])) == {"d/": b"", "d/a": b"x"}
    (entry, _) = read_zip(MemorySource(zip_file([Member("d/", b""), Member("d/a", b"x")])), DEFAULT).entries
    assert entry.is_directory


def test_padding_and_times_in_extra_fields_are_read() -> None:
    fields = extra(0x4246, b"Z" * 60) + extra(0x5455, b"\1" + bytes(4))
    assert contents(zip_file([Member("a", b"x", local_extra=fields, central_extra=extra(0x5455, b"\1"))])) == {
        "a": b"x"
    }


WIDE = {"stored": 0xFFFFFFFF, "nbytes": 0xFFFFFFFF}
ZEROS = {"crc32": 0, "stored": 0, "nbytes": 0}


@pytest.mark.parametrize(
    "member",
    [
        Member(local=WIDE, local_extra=zip64(152, 152)),
        Member(local_extra=zip64(152, 152)),
        Member(local=WIDE, central=WIDE, local_extra=zip64(152, 152), central_extra=zip64(152, 152)),
        Member(central={"header": 0xFFFFFFFF}, central_extra=zip64(0)),
        Member(flags=8, local=ZEROS, behind=descriptor(Member())),
        Member(flags=8, behind=descriptor(Member())),
        Member(flags=8, local=ZEROS, local_extra=zip64(152, 0), behind=descriptor(Member(), wide=True)),
        Member(flags=8, local=ZEROS, local_extra=zip64(0), behind=descriptor(Member(), wide=True)),
        Member(flags=8, local=ZEROS, local_extra=zip64(152, 0, 0), behind=descriptor(Member(), wide=True)),
        Member(flags=8, local={"crc32": 0, **WIDE}, local_extra=zip64(0, 0), behind=descriptor(Member(), wide=True)),
    ],
    ids=[
        "local-zip64", "both-ways", "central-zip64", "far", "descriptor", "descriptor-and-sizes", "miniz-long",
        "miniz-far", "miniz-both", "python-pipe",
    ],
)  # fmt: skip
def test_each_way_of_stating_sizes_is_read(member: Member) -> None:
    assert len(npy()) == 152
    assert contents(zip_file([member])) == {"a.npy": npy()}


@pytest.mark.parametrize("end", [{}, {"start": 0xFFFFFFFF, "n_here": 0xFFFF, "n_all": 0xFFFF, "length": 0xFFFFFFFF}])
def test_a_zip64_end_record_is_read(end: dict[str, int]) -> None:
    assert contents(zip_file(end64={}, end=end)) == {"a.npy": npy()}


def test_members_are_bounded_before_their_headers_are_read() -> None:
    raw = zip_file(end64={"n_here": MAX_ENTRIES + 1, "n_all": MAX_ENTRIES + 1}, end={"n_here": 65535, "n_all": 65535})
    with pytest.raises(LimitError) as caught:
        read_zip(MemorySource(raw), DEFAULT)
    assert [finding.code for finding in caught.value.findings] == ["limit-exceeded"]
    assert "100,001 members" in str(caught.value)


def test_a_member_is_not_inflated_beyond_the_policy() -> None:
    raw = zip_file([Member("a", bytes(1001), 8)])
    (entry,) = read_zip(MemorySource(raw), DEFAULT).entries
    assert entry_bytes(MemorySource(raw), entry, policy_with(limits={"max_inline_bytes": 1001})) == bytes(1001)
    with pytest.raises(LimitError) as caught:
        entry_bytes(MemorySource(raw), entry, policy_with(limits={"max_inline_bytes": 1000}))
    assert "`max_inline_bytes`" in (caught.value.findings[0].hint or "")


def test_no_more_is_read_of_a_member_than_the_policy_allows_to_hold() -> None:
    """A member of 5 bytes may be stored as gigabytes, of which a file with holes takes no room on a disk."""

    class Unread(MemorySource):
        def peek(self, offset: int, nbytes: int) -> bytes:
            raise AssertionError((offset, nbytes))

    limits = policy_with(limits={"max_inline_bytes": 1000})
    entry = ZipEntry("a", 0, nbytes_stored=1001, nbytes=5, method=DEFLATED, crc32=0)
    with pytest.raises(LimitError) as caught:
        entry_bytes(Unread(bytes(2000)), entry, limits)
    assert "1,001 bytes" in caught.value.findings[0].message
    # As long as it may be, with empty blocks in front of what is stored.
    deflater = zlib.compressobj(0, zlib.DEFLATED, -15)
    stored = b"\0\0\0\xff\xff" * 10 + deflater.compress(b"hello") + deflater.flush()
    entry = ZipEntry("a", 0, nbytes_stored=len(stored), nbytes=5, method=DEFLATED, crc32=zlib.crc32(b"hello"))
    assert entry_bytes(MemorySource(stored), entry, limits) == b"hello"


def test_a_bomb_is_inflated_to_one_byte_more_than_it_declares() -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(64)) + bomb.flush()
    fields = {"method": 8, "nbytes": 100, "crc32": 0}
    raw = zip_file([Member("a", data, local=fields, central=fields)])
    (entry,) = read_zip(MemorySource(raw), DEFAULT).entries
    with pytest.raises(FormatError) as caught:
        entry_bytes(MemorySource(raw), entry, DEFAULT)
    assert caught.value.findings[0].code == "zip-bad-data"
    assert "found more" in caught.value.findings[0].message


def test_a_cut_or_changed_archive_is_refused_or_read_as_before() -> None:
    members = (("a.npy", npy()), ("b/c", b"text" * 20))
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raw = written(*members, method=method)
        n_read = 0
        for other in damaged(raw):
            found = read_or_refused(other)
            if isinstance(found, RejectedError):
                assert all(f.offset is not None and 0 <= f.offset <= len(other) for f in found.findings)
                continue
            n_read += 1
            with zipfile.ZipFile(io.BytesIO(other)) as archive:
                assert found == {name: archive.read(name) for name in archive.namelist()}
            assert list(found.values()) == [data for _, data in members]
        # The system that made it, and what it says of a file there: both change nothing for a reader.
        assert 0 < n_read < len(raw)


def test_an_archive_with_noise_in_it_is_refused_or_read_as_before() -> None:
    raw = zip_file([Member("a", b"x"), Member("b", b"y", local_extra=extra(0x4246, b"ZZ"))], end64={})
    for seed in range(2000):
        noise = zlib.crc32(struct.pack("<I", seed)).to_bytes(4, "little")
        at = seed % (len(raw) - 4)
        found = read_or_refused(raw[:at] + noise + raw[at + 4 :])
        assert isinstance(found, RejectedError) or found == {"a": b"x", "b": b"y"}


def test_a_second_directory_in_an_extra_field_is_refused() -> None:
    """Python's zipfile and miniz believe a zip64 locator in front of the end record, whatever the end record says."""
    hidden = zip_file([Member("a", b"hidden")], end64={})
    inner = hidden[: hidden.index(b"PK\1\2")]
    directory = bytearray(hidden[len(inner) : hidden.index(b"PK\6\6")])
    shown = Member("a", inner)  # the member that is hidden lies in the data of the one that is shown
    struct.pack_into("<I", directory, 42, 31)
    before = len(zip_file([shown])) - 22 + 4
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(directory), before)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, before + len(directory), 1)
    raw = zip_file([Member("a", inner, central_extra=extra(0x4246, bytes(directory) + end64 + locator))])
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert archive.read("a") == b"hidden"
    with pytest.raises(FormatError) as caught:
        read_zip(MemorySource(raw), DEFAULT)
    assert [finding.code for finding in caught.value.findings] == ["zip-bad-end"]
    assert "locator" in caught.value.findings[0].message


@pytest.mark.parametrize("kind", ["npz", "pytorch", "zip"])
def test_an_archive_is_told_from_others_and_parsed_by_one_reading(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    torch = Torch()
    raw = {
        "npz": zip_file([Member(), Member("b.npy", method=8)]),
        "pytorch": torch_zip(torch.pickle(torch.mapping({"w": torch.tensor(WEIGHT, (2, 3))})), [WEIGHT]),
        "zip": zip_file([Member("notes.txt", b"")]),
    }[kind]
    readings: list[ZipTable] = []

    def read(source: Source, policy: Policy) -> ZipTable:
        readings.append(read_zip(source, policy))
        return readings[-1]

    for module in (scanning, npz, pytorch):
        monkeypatch.setattr(module, "read_zip", read)
    found, parsed = scanning.parse(MemorySource(raw), "w", DEFAULT)
    assert (found, parsed.refusal is None) == (kind, kind != "zip")
    assert len(readings) == 1
