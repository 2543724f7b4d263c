"""What nobody signed goes into quarantine, and nowhere else."""

import hashlib
import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from safeload.errors import ConfigError, FetchError, FileSetError, StagingError
from safeload.fetching import unsigned
from safeload.fetching.quarantine import Quarantine
from safeload.fetching.sources import Access, RemoteSize, open_source
from safeload.fetching.unsigned import fetch_unsigned
from safeload.files import WalkedFile
from tests.range_server import HOST, RangeServer, serving

LOOPBACK = Access(allow_private=frozenset({HOST}))
HOSTILE = b"cos\nsystem\n(S'true'\ntR."
GOOD = pickle.dumps({"w": np.arange(100_000, dtype=np.float32)})


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with serving() as state:
        yield state


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    folder = tmp_path / "mirror"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "good").write_bytes(GOOD)
    (folder / "hostile").write_bytes(HOSTILE)
    return folder


def test_every_file_is_put_away_with_what_a_scan_says(mirror: Path, tmp_path: Path) -> None:
    target = tmp_path / "there" / "ckpt"
    target.parent.mkdir()
    with open_source(str(mirror)) as source:
        records = {record.path: record for record in fetch_unsigned(source, target)}
    codes = {path: [why.code for why in record.reasons] for path, record in records.items()}
    assert codes == {"hostile": ["unsigned", "global-not-allowed"], "sub/good": ["unsigned"]}
    store = Quarantine(target)
    for path, data in (("hostile", HOSTILE), ("sub/good", GOOD)):
        record = records[path]
        content = store.content(record.id)
        assert content is not None
        assert content.read_bytes() == data
        assert (record.found, record.expected, record.unsigned) == (hashlib.sha256(data).hexdigest(), None, True)
        assert stat.S_IMODE(content.stat().st_mode) == 0o600
    # Nothing is where the checkpoint would be, and nothing is left beside it.
    assert [path.name for path in target.parent.iterdir()] == [".ckpt.quarantine"]
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o700


def test_one_file_of_a_web_server(server: RangeServer, tmp_path: Path) -> None:
    server.files["/x/model.bin"] = GOOD
    with open_source(f"{server.url}/x/model.bin", LOOPBACK) as source:
        (record,) = fetch_unsigned(source, tmp_path / "ckpt")
    assert (record.path, record.found) == ("model.bin", hashlib.sha256(GOOD).hexdigest())


class Broken:
    """A source that gives a few bytes at a time, and then fails."""

    name = "broken"

    def __init__(self, data: bytes, step: int) -> None:
        self.data = data
        self.step = step
        self.asked: list[int] = []

    def read(self, path: str, start: int, stop: int, size: int, *, etag: str | None = None) -> Iterator[bytes]:
        del path, size, etag
        self.asked.append(start)
        yield self.data[start : min(start + self.step, stop)]
        if start + self.step < stop:
            raise FetchError("cut")

    def stat(self, path: str) -> RemoteSize:
        del path
        return RemoteSize(len(self.data))

    def files(self) -> tuple[WalkedFile, ...]:
        return (WalkedFile("f", len(self.data)),)

    def facts(self) -> dict[str, object]:
        return {}


def test_a_cut_connection_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    source = Broken(data, 1_100_000)
    pauses: list[float] = []
    (record,) = fetch_unsigned(source, tmp_path / "ckpt", sleep=pauses.append)
    assert record.found == hashlib.sha256(data).hexdigest()
    assert source.asked == [0, 1_100_000, 2_200_000, 3_300_000, 4_400_000]
    assert pauses == [0.5] * 4


def test_a_source_that_gives_a_byte_at_a_time_is_given_up(tmp_path: Path) -> None:
    source = Broken(bytes(1000), 1)
    pauses: list[float] = []
    with pytest.raises(FetchError, match="cut"):
        fetch_unsigned(source, tmp_path / "ckpt", sleep=pauses.append)
    assert len(source.asked) == 4
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_no_paths_end_it_before_a_byte(mirror: Path, tmp_path: Path) -> None:
    (mirror / "a\\b").write_bytes(b"x")
    with open_source(str(mirror)) as source, pytest.raises(FileSetError) as caught:
        fetch_unsigned(source, tmp_path / "ckpt")
    assert [finding.code for finding in caught.value.findings] == ["bad-path"]
    assert not Quarantine(tmp_path / "ckpt").path.exists()


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    with open_source(str(tmp_path / "mirror")) as source, pytest.raises(FileSetError) as caught:
        fetch_unsigned(source, tmp_path / "ckpt")
    assert [finding.code for finding in caught.value.findings] == ["nothing-to-fetch"]


def test_a_disk_without_room_is_told_before_a_byte(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise StagingError("no room")

    monkeypatch.setattr(unsigned, "require_space", no_room)
    with open_source(str(mirror)) as source, pytest.raises(StagingError, match="no room"):
        fetch_unsigned(source, tmp_path / "ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["mirror"]


def test_a_quarantine_that_others_can_write_to_is_not_used(mirror: Path, tmp_path: Path) -> None:
    place = Quarantine(tmp_path / "ckpt").path
    place.mkdir()
    place.chmod(0o777)
    with open_source(str(mirror)) as source, pytest.raises(ConfigError):
        fetch_unsigned(source, tmp_path / "ckpt")
    assert list(place.iterdir()) == []
