"""Claims of `safeload.fetching.quarantine`: private, recorded, and under no name that a loader picks up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from safeload.errors import ConfigError, Finding, StagingError
from safeload.fetching.quarantine import Quarantine, Record, quarantine_of

WHY = Finding("global-not-allowed", "expected x, found os.system")


def put(quarantine: Quarantine, tmp_path: Path, content: bytes | None = b"bad") -> Record:
    source = tmp_path / "source"
    if content is not None:
        source.write_bytes(content)
        source.chmod(0o644)
    return quarantine.add(
        "ckpt-0/model.bin",
        mirrors=["https://mirror.example"],
        findings=[WHY],
        expected="a" * 64,
        found="b" * 64,
        move=None if content is None else source.rename,
    )


def test_what_is_put_away_is_private_and_recorded(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "model")
    assert quarantine.records() == ()
    record = put(quarantine, tmp_path)
    assert quarantine.records() == (record,)
    assert (record.path, record.expected, record.found, record.kept) == ("ckpt-0/model.bin", "a" * 64, "b" * 64, True)
    assert [(reason.code, reason.message) for reason in record.reasons] == [(WHY.code, WHY.message)]
    content = quarantine.content(record.id)
    assert content is not None
    assert content.read_bytes() == b"bad"
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (quarantine.path, content.parent, content)}
    assert set(modes.values()) == {"0o700", "0o600"}
    assert quarantine.path == quarantine_of(tmp_path / "model") == tmp_path / ".model.quarantine"
    names = {path.name for path in quarantine.path.rglob("*")}
    assert "model.bin" not in names
    assert not {path.suffix for path in quarantine.path.rglob("*") if path.is_file()} - {".quarantined", ".json"}


def test_a_record_alone_keeps_no_content(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "model")
    record = put(quarantine, tmp_path, None)
    assert not record.kept
    assert quarantine.content(record.id) is None


def test_purge_removes_what_was_named_or_all(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "model")
    first, second = put(quarantine, tmp_path), put(quarantine, tmp_path)
    assert quarantine.purge([first.id]) == 1
    assert quarantine.records() == (second,)
    assert quarantine.purge() == 1
    assert not quarantine.path.exists()
    assert quarantine.purge() == 0


@pytest.mark.parametrize("name", ["../x", "", "absent", "20260101T000000Z-00000000", "/etc"])
def test_only_items_can_be_named(tmp_path: Path, name: str) -> None:
    quarantine = Quarantine(tmp_path / "model")
    put(quarantine, tmp_path)
    (tmp_path / "x").mkdir()
    for use in (quarantine.record, quarantine.content, lambda one: quarantine.purge([one])):
        with pytest.raises(ConfigError, match="there is nothing called"):
            use(name)
    assert (tmp_path / "x").is_dir()


def test_a_quarantine_that_others_can_use_is_refused(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "model")
    put(quarantine, tmp_path)
    quarantine.path.chmod(0o755)
    for use in (quarantine.records, quarantine.purge, lambda: put(quarantine, tmp_path)):
        with pytest.raises(ConfigError, match="of ours alone"):
            use()


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    quarantine = Quarantine(tmp_path / "model")
    quarantine.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="of ours alone"):
        put(quarantine, tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"id": "x"}', "[" * 100_000, "\xff"])
def test_a_record_that_is_none_of_ours_is_refused(tmp_path: Path, text: str) -> None:
    quarantine = Quarantine(tmp_path / "model")
    record = put(quarantine, tmp_path)
    (quarantine.path / record.id / "record.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="is no record") as caught:
        quarantine.records()
    assert str(caught.value.hint).endswith(f"safeload quarantine purge DIR {record.id}")
    assert quarantine.purge([record.id]) == 1
    assert quarantine.records() == ()


def test_all_is_purged_whatever_the_records_say_and_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safeload.fetching.quarantine.MAX_ITEMS", 2)
    quarantine = Quarantine(tmp_path / "model")
    items = [put(quarantine, tmp_path) for _ in range(3)]
    (quarantine.path / max(item.id for item in items) / "record.json").write_bytes(b"")
    assert len(quarantine.records()) == 2
    assert quarantine.purge() == 3
    assert not quarantine.path.exists()


def test_an_item_whose_record_was_never_written_is_listed_all_the_same(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "model")
    record = put(quarantine, tmp_path)
    (quarantine.path / record.id / "record.json").unlink()
    (found,) = quarantine.records()
    assert (found.id, found.kept, found.reasons[0].code) == (record.id, True, "no-record")
    assert quarantine.purge() == 1


def test_what_cannot_be_moved_is_an_error(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "model")
    with pytest.raises(StagingError, match="cannot put"):
        quarantine.add("a", mirrors=[], findings=[WHY], expected=None, found=None, move=(tmp_path / "absent").rename)


def test_a_hostile_message_cannot_drive_a_terminal(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "model")
    record = quarantine.add("a", mirrors=[], findings=[Finding("c", "\x1b[2J")], expected=None, found=None)
    assert record.reasons[0].message == r"\x1b[2J"
    assert json.loads((quarantine.path / record.id / "record.json").read_bytes())["unsigned"] is False
