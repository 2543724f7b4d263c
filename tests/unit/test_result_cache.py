"""The cache gives back what was found: for exactly these bytes, this policy and version, and only from its owner."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safeload import __version__, result_cache
from safeload.auditing import Audit, audit
from safeload.errors import ConfigError, StagingError
from safeload.files import StreamSource
from safeload.policy import load_policy
from safeload.result_cache import CachedResult, ResultCache
from tests.tensorflow_sample import Tensor
from tests.tensorflow_sample import bundle as tensorflow_bundle

HOSTILE = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
POLICY = load_policy("numpy-quantized")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "a").write_bytes(pickle.dumps({"w": np.arange(6, dtype=">i4").reshape(2, 3), "f": np.eye(3).T}))
    (folder / "f.npy").write_bytes(fortran())
    (folder / "config.json").write_text("{}")
    (folder / "bad").write_bytes(HOSTILE)
    return folder


def fortran() -> bytes:
    import io

    file = io.BytesIO()
    np.save(file, np.asfortranarray(np.arange(12.0).reshape(3, 4)))
    return file.getvalue()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    return path


@pytest.fixture
def cached(tmp_path: Path, key: Path) -> Callable[..., Audit]:
    def cached(folder: Path, **options: Any) -> Audit:
        return audit(folder, cache=tmp_path / "cache", cache_key=key, **options)

    return cached


def use(found: Audit) -> tuple[int, int]:
    cache = found.report.facts["audit"]["cache"]
    return cache["reused"], cache["parsed"]


def parts(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.results"))


def test_a_second_run_parses_nothing_and_says_the_same(checkpoint: Path, cached: Callable[..., Audit]) -> None:
    first, second = cached(checkpoint), cached(checkpoint)
    assert (use(first), use(second)) == ((0, 4), (4, 0))
    assert second.report.files == first.report.files == audit(checkpoint).report.files
    assert second.report.verdict == "rejected"


def test_a_second_run_reads_every_byte(
    checkpoint: Path, cached: Callable[..., Audit], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(checkpoint)
    hashed: list[int] = []
    finish = StreamSource.finish

    def counted(self: StreamSource) -> str:
        hashed.append(self.size)
        return finish(self)

    monkeypatch.setattr(StreamSource, "finish", counted)
    cached(checkpoint)
    assert sorted(hashed) == sorted(path.stat().st_size for path in checkpoint.iterdir())


def test_other_bytes_of_the_same_name_length_and_time_are_parsed(
    checkpoint: Path, cached: Callable[..., Audit]
) -> None:
    good = checkpoint / "a"
    good.write_bytes(HOSTILE.replace(b"posix\x8c\x06system\x93\x8c\x04true\x85R", b"N" * 21)[: len(HOSTILE)])
    before = good.stat()
    cached(checkpoint)
    good.write_bytes(HOSTILE[: before.st_size])
    os.utime(good, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = cached(checkpoint)
    assert again.report.files == audit(checkpoint).report.files
    assert use(again) == (3, 1)


def test_the_same_bytes_under_another_name_are_parsed(checkpoint: Path, cached: Callable[..., Audit]) -> None:
    cached(checkpoint)
    (checkpoint / "config.json").rename(checkpoint / "config.pt")
    again = cached(checkpoint)
    assert use(again) == (3, 1)
    assert again.report.files == audit(checkpoint).report.files


def test_the_same_file_in_another_directory_is_reused_and_named_after_it(
    checkpoint: Path, cached: Callable[..., Audit]
) -> None:
    cached(checkpoint)
    other = checkpoint.rename(checkpoint.parent / "moved")
    again = cached(other)
    assert use(again) == (4, 0)
    assert again.report.files == audit(other).report.files


def test_another_policy_has_results_of_its_own(checkpoint: Path, cached: Callable[..., Audit]) -> None:
    cached(checkpoint)
    assert use(cached(checkpoint, policy="grok-1")) == (0, 4)
    assert use(cached(checkpoint)) == (4, 0)


def test_another_version_has_results_of_its_own(
    checkpoint: Path, cached: Callable[..., Audit], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(checkpoint)
    monkeypatch.setattr(result_cache, "__version__", "99.0.0")
    assert use(cached(checkpoint)) == (0, 4)


def test_a_manifest_is_held_against_what_the_cache_says(checkpoint: Path, cached: Callable[..., Audit]) -> None:
    from safeload import sign
    from safeload.trust.keys import SecretKey

    (checkpoint / "bad").unlink()
    secret = SecretKey.generate()
    manifest = sign(checkpoint, keys=[secret], model="m", revision="r")
    found = [cached({checkpoint: manifest}, trust=[secret.public]) for _ in range(2)]
    assert [each.has_passed for each in found] == [True, True]
    assert use(found[1]) == (3, 0)
    other = bytearray((checkpoint / "a").read_bytes())
    other[-20] ^= 1
    (checkpoint / "a").write_bytes(other)
    # The second time the cache knows these bytes, and they are not the signed ones all the same.
    again = [cached({checkpoint: manifest}, trust=[secret.public]) for _ in range(2)]
    assert [each.report.all_findings[0].code for each in again] == ["digest-mismatch"] * 2
    assert use(again[1]) == (3, 0)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the body": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "a bit of the code": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "shorter": lambda data: data[:-1],
    "empty": lambda _: b"",
    "no code": lambda data: data[32:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_part_that_somebody_else_wrote_is_not_used(
    tmp_path: Path, checkpoint: Path, cached: Callable[..., Audit], damage: Callable[[bytes], bytes]
) -> None:
    cached(checkpoint)
    (part,) = parts(tmp_path)
    part.write_bytes(damage(part.read_bytes()))
    again = cached(checkpoint)
    assert use(again) == (0, 4)
    assert again.report.facts["audit"]["cache"]["damaged_parts"] == 1
    assert again.report.files == audit(checkpoint).report.files


def test_a_part_under_another_key_is_not_used(
    tmp_path: Path, checkpoint: Path, cached: Callable[..., Audit], key: Path
) -> None:
    cached(checkpoint)
    key.write_bytes(b"x" * 32)
    assert use(cached(checkpoint)) == (0, 4)
    assert len(parts(tmp_path)) == 2


def test_a_part_of_another_policy_is_not_used_wherever_it_lies(
    tmp_path: Path, checkpoint: Path, cached: Callable[..., Audit]
) -> None:
    cached(checkpoint, policy="grok-1")
    (part,) = parts(tmp_path)
    mine = tmp_path / "cache" / f"{POLICY.sha256[:32]}-{__version__}"
    mine.mkdir()
    part.rename(mine / part.name)
    again = cached(checkpoint)
    assert use(again) == (0, 4)
    assert again.report.facts["audit"]["cache"]["damaged_parts"] == 1


def test_a_link_in_the_cache_is_not_followed(tmp_path: Path, checkpoint: Path, cached: Callable[..., Audit]) -> None:
    cached(checkpoint)
    (part,) = parts(tmp_path)
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    assert use(cached(checkpoint)) == (0, 4)


def test_a_cache_that_is_a_link_is_not_written_through(
    tmp_path: Path, checkpoint: Path, cached: Callable[..., Audit]
) -> None:
    cached(checkpoint)
    (part,) = parts(tmp_path)
    folder = part.parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    (checkpoint / "new").write_bytes(pickle.dumps({"w": np.ones(2)}))
    with pytest.raises(StagingError, match="is a symbolic link"):
        cached(checkpoint)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [part.name]


def test_a_part_of_any_length_leaves_the_others_usable(
    tmp_path: Path, checkpoint: Path, cached: Callable[..., Audit]
) -> None:
    cached(checkpoint)
    (part,) = parts(tmp_path)
    with (part.parent / "0.results").open("wb") as file:
        file.truncate(1 << 40)
    again = cached(checkpoint)
    assert use(again) == (4, 0)
    assert again.report.facts["audit"]["cache"]["damaged_parts"] == 1


def test_what_depends_on_files_beside_it_is_not_remembered(tmp_path: Path, cached: Callable[..., Audit]) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    tensor = Tensor(1, (6,), np.arange(6, dtype=np.float32).tobytes())
    for name, data in tensorflow_bundle("model.ckpt", {"w": tensor}).items():
        (folder / name).write_bytes(data)
    wide = POLICY.model_copy(update={"formats": POLICY.formats.model_copy(update={"allow": ("tensorflow",)})})
    assert use(cached(folder, policy=wide)) == use(cached(folder, policy=wide)) == (0, 2)


def test_an_interruption_costs_little(
    tmp_path: Path, checkpoint: Path, cached: Callable[..., Audit], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: str, done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(checkpoint, progress=stop, jobs=1)
    assert len(parts(tmp_path)) == 1
    assert use(cached(checkpoint)) == (4, 0)
    monkeypatch.setattr(result_cache, "_RESULTS_IN_A_PART", 1)
    monkeypatch.setattr(result_cache, "_PART_SECONDS", 1e9)
    cached(checkpoint, policy="grok-1")
    assert len(parts(tmp_path)) == 5


def test_many_parts_are_joined_and_nothing_is_lost(
    tmp_path: Path, checkpoint: Path, cached: Callable[..., Audit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_cache, "_RESULTS_IN_A_PART", 1)
    monkeypatch.setattr(result_cache, "_MAX_PARTS", 3)
    cached(checkpoint)
    assert len(parts(tmp_path)) == 1
    assert use(cached(checkpoint)) == (4, 0)


def test_no_part_is_longer_than_is_read_again(
    tmp_path: Path, checkpoint: Path, cached: Callable[..., Audit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_cache, "MAX_PART_BYTES", 700)
    cached(checkpoint)
    assert len(parts(tmp_path)) > 1
    assert all(part.stat().st_size <= 700 for part in parts(tmp_path))
    assert use(cached(checkpoint))[0] > 0


def test_a_cache_that_is_too_large_is_read_in_part(
    checkpoint: Path, cached: Callable[..., Audit], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(checkpoint)
    monkeypatch.setattr(result_cache, "MAX_CACHE_BYTES", 10)
    again = cached(checkpoint)
    assert again.report.facts["audit"]["cache"]["unread_parts"] == 1
    assert use(again) == (0, 4)


def test_bytes_that_lie_nowhere_in_the_file_are_not_remembered() -> None:
    from safeload.formats import MemorySource
    from safeload.scanning import parse

    text = pickle.dumps(np.arange(3, dtype=np.int8), protocol=0)
    kind, parsed = parse(MemorySource(text), "a", POLICY)
    assert parsed.tensors[0].extent.inline is not None
    assert CachedResult.of("a", len(text), "0" * 64, kind, parsed) is None


def test_the_key_is_long_secret_and_a_file(tmp_path: Path, key: Path) -> None:
    def refused(message: str, path: Path) -> None:
        with pytest.raises(ConfigError, match=message):
            ResultCache(tmp_path / "cache", path, POLICY)

    refused("cannot read", tmp_path / "nowhere")
    refused("cannot read|expected a file", tmp_path)
    key.write_bytes(b"k" * 31)
    refused("found 31", key)
    key.write_bytes(b"k" * 4097)
    refused("found 4097", key)
    key.write_bytes(b"k" * 32)
    key.chmod(0o640)
    refused("can be read or written by others", key)


def test_a_cache_that_cannot_be_made_is_no_verdict(tmp_path: Path, key: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StagingError, match="cannot make the cache"), ResultCache(tmp_path / "file", key, POLICY):
        pass
