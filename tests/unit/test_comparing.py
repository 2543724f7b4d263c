"""A directory is the one that a bundle lists, or every way in which it is not is found."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from safeload.comparing import Comparison, compare_files
from safeload.digests import HASH_CHUNK_BYTES, sha256_hex
from safeload.errors import Finding, StagingError
from safeload.files import Root, StreamSource
from safeload.oms import OmsManifest, verify_bundle, write_bundle
from safeload.trust.keys import SecretKey
from safeload.trust.store import TrustStore
from tests.oms_sample import DEFAULT_IGNORES, NOW, bundle, resource, shards, statement

KEY = SecretKey.generate("ecdsa-p256")
TRUST = TrustStore.of_keys([KEY.public])
FILES = {"ckpt-0/tensor00000_000": b"0123456789", "config.json": b"{}", "sub/empty": b""}


def trusted(data: bytes) -> OmsManifest:
    return verify_bundle(data, TRUST, now=NOW)


def whole(
    files: Mapping[str, bytes] = FILES, *, algorithm: str = "sha256", ignore: tuple[str, ...] = ()
) -> OmsManifest:
    listed = [resource(path, data, algorithm) for path, data in files.items()]
    return trusted(bundle(statement(listed, ignore_paths=ignore, hash_type=algorithm), KEY))


def in_shards(files: Mapping[str, bytes] = FILES, *, size: int = 4, algorithm: str = "sha256") -> OmsManifest:
    listed = shards(files, size, algorithm)
    return trusted(bundle(statement(listed, method="shards", shard_size=size, hash_type=algorithm), KEY))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    for path, data in FILES.items():
        put(root / path, data)
    return root


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def compared(target: Path, oms: OmsManifest, ignore: Mapping[str, bytes] = MappingProxyType({})) -> Comparison[bytes]:
    return compare_files(target, oms, look=lambda _, source, __: source.read(0, 2), max_bytes=1 << 40, ignore=ignore)


def codes(comparison: Comparison[bytes]) -> dict[str, str]:
    """Return the code of each finding by the file that it is about."""
    found: list[Finding] = [*comparison.findings, *(each for file in comparison.files for each in file.findings)]
    assert all(finding.file is not None and finding.hint is not None for finding in found)
    return {str(finding.file): finding.code for finding in found}


def test_the_directory_that_was_signed_has_no_finding(model: Path) -> None:
    found = compared(model, whole())
    assert codes(found) == {}
    assert [(file.path, file.size, file.sha256, file.looked) for file in found.files] == [
        (path, len(data), sha256_hex(data), data[:2]) for path, data in sorted(FILES.items())
    ]
    assert found.ignored == ()


def test_what_we_write_is_what_we_find(model: Path) -> None:
    data = write_bundle([(path, sha256_hex(content)) for path, content in FILES.items()], KEY, "model")
    assert codes(compared(model, trusted(data))) == {}


def test_what_is_looked_at_is_what_is_hashed(model: Path) -> None:
    def swap(_: Root, source: StreamSource, path: str) -> bytes:
        seen = source.read(0, 4)
        put(model / path, b"x" * source.size)
        return seen

    big = {"big": os.urandom(3 * HASH_CHUNK_BYTES)}
    put(model / "big", big["big"])
    found = compare_files(model, whole(FILES | big), look=swap, max_bytes=1 << 40)
    changed = next(file for file in found.files if file.path == "big")
    assert changed.looked == big["big"][:4]
    assert [finding.code for finding in changed.findings] == ["digest-mismatch"]


def test_every_difference_is_found_in_one_run(model: Path) -> None:
    put(model / "config.json", b"[]")
    (model / "sub/empty").unlink()
    put(model / "ckpt-0/tensor00001_000", b"")
    os.mkfifo(model / "fifo")
    (model / "link").symlink_to("config.json")
    (model / "more").symlink_to("ckpt-0")
    assert codes(compared(model, whole())) == {
        "config.json": "digest-mismatch",
        "sub/empty": "missing-file",
        "ckpt-0/tensor00001_000": "unlisted-file",
        "fifo": "not-a-regular-file",
        "link": "symlink",
        "more": "symlink",
    }


def test_a_renamed_file_is_missing_and_unlisted(model: Path) -> None:
    (model / "config.json").rename(model / "Config.json")
    assert codes(compared(model, whole())) == {"config.json": "missing-file", "Config.json": "unlisted-file"}


def test_a_link_in_the_place_of_a_signed_file_is_not_followed(model: Path) -> None:
    (model / "config.json").rename(model.parent / "config.json")
    (model / "config.json").symlink_to(model.parent / "config.json")
    assert codes(compared(model, whole())) == {"config.json": "symlink"}


def test_a_file_that_was_swapped_for_a_link_after_the_walk_is_refused(model: Path) -> None:
    def swap(_: Root, source: StreamSource, path: str) -> bytes:
        if path != "config.json":
            (model / "config.json").unlink(missing_ok=True)
            (model / "config.json").symlink_to("/etc/hostname")
        return source.read(0, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("safeload.comparing.n_processors", lambda: 1)  # one after the other, the largest first
        found = compare_files(model, whole(), look=swap, max_bytes=1 << 40)
    (file,) = (file for file in found.files if file.path == "config.json")
    assert [finding.code for finding in file.findings] == ["symlink"]
    assert file.looked is None


def test_a_directory_that_cannot_be_read_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "closed").mkdir()
    original = Root._descend

    def descend(self: Root, parts: tuple[str, ...]) -> int:
        if parts == ("closed",):
            raise PermissionError(13, "Permission denied")
        return original(self, parts)

    monkeypatch.setattr(Root, "_descend", descend)  # root, as whom tests may run, reads every directory
    assert codes(compared(model, whole())) == {"closed": "unreadable"}


def test_a_file_that_cannot_be_read_is_refused_and_the_others_are_compared(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Root.open

    def open_(self: Root, path: str) -> int:
        if path == "config.json":
            raise StagingError("cannot open config.json: Input/output error")
        return original(self, path)

    monkeypatch.setattr(Root, "open", open_)
    put(model / "ckpt-0/tensor00000_000", b"other")
    found = [(file.path, [finding.code for finding in file.findings]) for file in compared(model, whole()).files]
    assert found == [
        ("ckpt-0/tensor00000_000", ["digest-mismatch"]),
        ("config.json", ["unreadable"]),
        ("sub/empty", []),
    ]


def test_a_name_that_is_no_text_is_refused(model: Path) -> None:
    os.close(os.open(os.fsencode(model) + b"/\xff", os.O_CREAT))
    assert codes(compared(model, whole())) == {"\udcff": "undecodable-name"}


def test_the_bundle_itself_may_lie_in_the_directory_and_nothing_else(model: Path) -> None:
    put(model / "model.sig", b"the bundle")
    put(model / "other.sig", b"the bundle")
    found = compared(model, whole(), ignore={"model.sig": b"the bundle"})
    assert codes(found) == {"other.sig": "unlisted-file"}


def test_a_directory_that_is_not_there_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(StagingError):
        compared(tmp_path / "none", whole())


# ---------------------------------------------------------------- what the signature leaves out


@pytest.mark.parametrize("extra", [".git/hooks/post-checkout", ".github/x.pkl", ".gitattributes", ".gitignore"])
def test_what_the_reference_passes_over_is_refused_unless_the_signature_says_that_it_is_left_out(
    model: Path, extra: str
) -> None:
    put(model / extra, b"#!/bin/sh")
    assert codes(compared(model, whole())) == {extra: "unlisted-file"}
    said = compared(model, whole(ignore=DEFAULT_IGNORES))
    assert codes(said) == {}
    assert said.ignored == (extra,)
    assert extra not in {file.path for file in said.files}


def test_what_is_left_out_is_named_and_never_opened(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(model / "notes/a.pkl", b"changed")
    put(model / "notes/deep/b", b"changed")
    put(model / "notes2", b"not left out")
    (model / "notes/link").symlink_to("/etc")
    opened: list[str] = []
    monkeypatch.setattr("safeload.comparing.Root.open", recording(opened))
    found = compared(model, whole(ignore=("notes",)))
    assert found.ignored == ("notes/a.pkl", "notes/deep/b", "notes/link")
    assert codes(found) == {"notes2": "unlisted-file"}
    assert sorted(opened) == sorted(FILES)


def recording(opened: list[str]) -> object:
    original = Root.open

    def open_(self: Root, path: str) -> int:
        opened.append(path)
        return original(self, path)

    return open_


def test_one_model_leaves_nothing_out_of_the_next(model: Path) -> None:
    put(model / "notes", b"")
    assert codes(compared(model, whole(ignore=("notes",)))) == {}
    assert codes(compared(model, whole())) == {"notes": "unlisted-file"}


# ---------------------------------------------------------------- digests


@pytest.mark.parametrize("size", [1, 3, 4, 5, 10, 11, 1_000_000_000])
def test_shards_of_any_size_are_compared(model: Path, size: int) -> None:
    (model / "sub/empty").unlink()
    assert codes(compared(model, in_shards(size=size))) == {}


def test_shards_that_end_within_what_is_read_at_a_time_are_compared(model: Path) -> None:
    (model / "sub/empty").unlink()
    data = os.urandom(2 * HASH_CHUNK_BYTES + 7)
    put(model / "big", data)
    for size in (HASH_CHUNK_BYTES, HASH_CHUNK_BYTES - 1, 100_003):
        assert codes(compared(model, in_shards(FILES | {"big": data}, size=size))) == {}


def test_a_changed_shard_is_named_with_its_place(model: Path) -> None:
    (model / "sub/empty").unlink()
    put(model / "ckpt-0/tensor00000_000", b"0123" + b"4x67" + b"89")
    found = compared(model, in_shards())
    (finding,) = found.files[0].findings
    assert (finding.code, finding.offset) == ("digest-mismatch", 4)
    assert "in shard 1" in finding.message
    assert sha256_hex(b"4567") in finding.message
    assert sha256_hex(b"4x67") in finding.message


def test_shards_bind_the_length(model: Path) -> None:
    (model / "sub/empty").unlink()
    for data in (b"0123456789x", b"01234567"):
        put(model / "ckpt-0/tensor00000_000", data)
        assert codes(compared(model, in_shards())) == {"ckpt-0/tensor00000_000": "size-mismatch"}


def test_an_empty_file_that_shards_cannot_list_is_refused(model: Path) -> None:
    # The reference lets one be added or taken away: `__init__.py` makes a package of a directory.
    assert codes(compared(model, in_shards())) == {"sub/empty": "unlisted-file"}


@pytest.mark.parametrize("shard_size", [None, 4])
def test_digests_of_blake2b_are_compared(model: Path, shard_size: int | None) -> None:
    (model / "sub/empty").unlink()
    files = {path: data for path, data in FILES.items() if data}
    oms = in_shards(files, algorithm="blake2b") if shard_size else whole(files, algorithm="blake2b")
    assert codes(compared(model, oms)) == {}
    put(model / "config.json", b"[]")
    found = compared(model, oms)
    assert codes(found) == {"config.json": "digest-mismatch"}
    assert [file.sha256 for file in found.files if file.path == "config.json"] == [sha256_hex(b"[]")]


def test_digests_of_blake3_are_compared_where_it_is_installed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StandIn:
        """Something else under BLAKE3's name, so that the test needs no package."""

        blake3 = staticmethod(hashlib.sha3_256)

    monkeypatch.setitem(sys.modules, "blake3", StandIn)
    listed = [
        {"name": path, "algorithm": "blake3", "digest": hashlib.sha3_256(data).hexdigest()}
        for path, data in FILES.items()
    ]
    oms = trusted(bundle(statement(listed, hash_type="blake3"), KEY))
    assert codes(compared(model, oms)) == {}
    put(model / "config.json", b"[]")
    assert codes(compared(model, oms)) == {"config.json": "digest-mismatch"}


# ---------------------------------------------------------------- a model that is one file


@pytest.mark.parametrize("name", [".", "weights.bin"])
def test_a_model_that_is_one_file_is_compared(tmp_path: Path, name: str) -> None:
    put(tmp_path / "weights.bin", b"0123")
    put(tmp_path / "beside", b"of no concern")
    oms = whole({name: b"0123"})
    found = compared(tmp_path / "weights.bin", oms)
    assert codes(found) == {}
    assert [file.path for file in found.files] == ["weights.bin"]
    put(tmp_path / "weights.bin", b"012x")
    assert codes(compared(tmp_path / "weights.bin", oms)) == {"weights.bin": "digest-mismatch"}


def test_one_file_is_not_taken_for_another_or_for_a_directory(tmp_path: Path) -> None:
    put(tmp_path / "a", b"0123")
    assert codes(compared(tmp_path / "a", whole({"b": b"0123"}))) == {"a": "unlisted-file", "b": "missing-file"}
    assert codes(compared(tmp_path / "a", whole({"a": b"0123", "b": b""}))) == {"b": "missing-file"}
    assert codes(compared(tmp_path, whole({".": b"0123"}))) == {"a": "unlisted-file", ".": "missing-file"}
    os.mkfifo(tmp_path / "fifo")
    assert codes(compared(tmp_path / "fifo", whole({".": b""}))) == {"fifo": "not-a-regular-file"}
