"""A file that is longer than the policy allows is refused at once, whoever looks at it, and never read to its end."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safeload import scan, sign
from safeload.auditing import audit
from safeload.baselines import baseline_json, never_known, read_baseline
from safeload.files import Root, StreamSource
from safeload.formats import MemorySource
from safeload.loading import check
from safeload.policy import Policy, load_policy
from safeload.report import FileReport
from safeload.scanning import parse
from safeload.trust.keys import SecretKey

TIB = 1024**4
KEY = SecretKey.generate()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with one honest file, and one that is a hole of a tebibyte."""
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "a").write_bytes(pickle.dumps(np.ones(3, np.float32), protocol=4))
    with (folder / "hole").open("wb") as file:
        try:
            file.truncate(TIB)
        except OSError:
            pytest.skip("the file system takes no file of a tebibyte")
    return folder


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count what is hashed of each file, and give up where it is more than this test could wait for."""
    counts: dict[str, int] = {}
    honest = StreamSource._hash_next

    def counted(source: StreamSource, *arguments: Any, is_seen: bool) -> memoryview:
        piece = honest(source, *arguments, is_seen=is_seen)
        name = source.path.rpartition("/")[2]
        counts[name] = counts.get(name, 0) + len(piece)
        assert counts[name] < 1 << 28, "it is read to its end"
        return piece

    monkeypatch.setattr(StreamSource, "_hash_next", counted)
    return counts


def refused(file: FileReport) -> None:
    assert [finding.code for finding in file.findings] == ["limit-exceeded"]
    (finding,) = file.findings
    assert finding.message == "a file of 1,099,511,627,776 bytes; the policy allows 549,755,813,888"
    assert "[widen.limits] `max_file_bytes`" in (finding.hint or "")
    assert (file.size, file.sha256, file.verdict) == (TIB, None, "rejected")


def test_an_audit_refuses_a_hole_and_looks_at_the_rest(checkpoint: Path, read: dict[str, int]) -> None:
    told: list[tuple[int, int]] = []
    found = audit(checkpoint, progress=lambda _, done, total: told.append((done, total)))
    honest, hole = found.report.files
    assert honest.verdict == "accepted"
    refused(hole)
    assert not found.has_passed
    assert read == {"a": (checkpoint / "a").stat().st_size}
    assert told[-1][0] == told[-1][1]
    unread = "what is in 1 file that could not be read, or that the policy finds too long"
    assert unread in found.report.facts["audit"]["not_checked"]


def test_no_baseline_makes_a_hole_pass(checkpoint: Path, tmp_path: Path) -> None:
    found = audit(checkpoint)
    assert [finding.code for finding in never_known(found.report)] == ["limit-exceeded"]
    baseline = tmp_path / "known.json"
    baseline.write_text(baseline_json(found.report))
    assert not read_baseline(baseline).known
    assert not audit(checkpoint, baseline=baseline).has_passed


def test_a_cache_holds_nothing_of_a_hole(checkpoint: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    for _ in range(2):
        found = audit(checkpoint, cache=tmp_path / "cache", cache_key=key)
        refused(found.report.files[1])


def test_a_file_that_becomes_a_hole_is_not_hashed_because_the_cache_knew_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    (checkpoint / "hole").unlink()
    cached: dict[str, Any] = {"cache": tmp_path / "cache", "cache_key": key}
    audit(checkpoint, **cached)
    honest = Root.open

    def grown(root: Root, path: str) -> int:
        if path == "a":
            os.truncate(checkpoint / "a", TIB)
        return honest(root, path)

    monkeypatch.setattr(Root, "open", grown)
    (file,) = audit(checkpoint, **cached).report.files
    refused(file)


def test_a_refused_pickle_that_becomes_a_hole_is_not_traced_to_its_end(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "hole").unlink()
    (checkpoint / "a").write_bytes(pickle.dumps(os.getpid, protocol=4))
    assert list(audit(checkpoint, traces=True).traces) == [str(checkpoint / "a")]
    honest = Root.open
    n_opened = 0

    def grown(root: Root, path: str) -> int:
        nonlocal n_opened
        n_opened += 1
        if n_opened == 2:
            os.truncate(checkpoint / "a", TIB)
        return honest(root, path)

    monkeypatch.setattr(Root, "open", grown)
    found = audit(checkpoint, traces=True)
    assert [finding.code for finding in found.report.all_findings] == ["global-not-allowed"]
    assert (n_opened, dict(found.traces)) == (2, {})


@pytest.mark.parametrize("digests", [False, True])
def test_a_scan_says_the_same(checkpoint: Path, digests: bool) -> None:
    refused(scan(checkpoint, digests=digests).files[1])


def narrow(bound: int) -> Policy:
    text = 'version = 1\nname = "short"\ndescription = "for this test"\nextends = "numpy-quantized"\n'
    return Policy.parse(f"{text}[narrow.limits]\nmax_file_bytes = {bound}\n".encode(), source="short.toml")


def test_the_bound_is_the_longest_that_is_taken_and_holds_for_signed_files(checkpoint: Path) -> None:
    (checkpoint / "hole").unlink()
    data = (checkpoint / "a").read_bytes()
    manifest = sign(checkpoint, keys=[KEY], model="m", revision="r")
    for bound, codes in ((len(data), []), (len(data) - 1, ["limit-exceeded"])):
        policy = narrow(bound)
        by_each = (
            audit({checkpoint: manifest}, trust=[KEY.public], policy=policy).report,
            audit(checkpoint, policy=policy).report,
            check(checkpoint, manifest=manifest, trust=[KEY.public], policy=policy),
            scan(checkpoint, policy=policy),
        )
        for report in by_each:
            assert [finding.code for finding in report.all_findings] == codes
        refusal = parse(MemorySource(memoryview(data)), "a", policy)[1].refusal
        assert (refusal is not None) == bool(codes)


def test_all_of_grok_1_in_one_file_would_be_taken() -> None:
    assert load_policy("grok-1").limits.max_file_bytes > 318_239_886_140
