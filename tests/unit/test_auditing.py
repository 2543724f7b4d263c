"""Claims of `safeload.auditing`: one pass over many checkpoints, whoever does the work, and an honest summing up."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from safeload import auditing, scan, sign, verify
from safeload.auditing import Audit, audit
from safeload.baselines import baseline_json
from safeload.errors import ConfigError, SafeloadError, StagingError
from safeload.files import Root, StreamSource
from safeload.interchange import sign_bundle
from safeload.policy import DEFAULT_POLICY, load_policy
from safeload.report import Report
from safeload.trust.keys import SecretKey
from tests.tensorflow_sample import Tensor
from tests.tensorflow_sample import bundle as tensorflow_bundle

HOSTILE = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
"""A pickle that would run `true` in a shell; its global is at byte 17."""

KEY = SecretKey.generate()


def array(n: int) -> bytes:
    return pickle.dumps(np.arange(n, dtype=np.float32), protocol=4)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_bytes(array(10))
    (folder / "sub" / "b").write_bytes(array(1000))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def manifest(tmp_path: Path, checkpoint: Path) -> Path:
    path = tmp_path / "manifest.json"
    path.write_bytes(sign(checkpoint, keys=[KEY], model="m", revision="r"))
    return path


def codes(found: Audit) -> list[tuple[str | None, str]]:
    """Return each finding's file, from the name of the checkpoint on, and its code."""
    return [(f.file and f.file[f.file.find("ckpt") :], f.code) for f in found.report.all_findings]


def facts(found: Audit) -> Any:
    return found.report.facts["audit"]


# --- what is found ------------------------------------------------------------------------------------------------


def test_without_a_manifest_an_audit_finds_what_a_scan_finds(checkpoint: Path) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    found, scanned = audit(checkpoint).report, scan(checkpoint)
    assert [(f.path, f.format, f.findings, f.tensors) for f in found.files] == [
        (f.path, f.format, f.findings, f.tensors) for f in scanned.files
    ]
    assert all(file.sha256 for file in found.files)
    assert codes(audit(checkpoint)) == [("ckpt/bad", "global-not-allowed")]


def test_with_a_manifest_an_audit_proves_what_verify_proves(checkpoint: Path, manifest: Path) -> None:
    found = audit({checkpoint: manifest}, trust=[KEY.public])
    proved = verify(checkpoint, manifest=manifest, trust=[KEY.public])
    assert found.has_passed
    assert found.report.facts["manifest"] == proved.facts["manifest"]
    assert [f.sha256 for f in found.report.files] == [f.sha256 for f in proved.files]
    assert facts(found)["roots"][0]["mode"] == "verified"


def test_an_audit_without_a_manifest_says_that_nobody_vouches(checkpoint: Path) -> None:
    found = audit(checkpoint)
    assert found.has_passed
    assert facts(found)["roots"][0]["mode"] == "scanned"
    assert "who made the directory, and whether all of it is there" in facts(found)["not_checked"]


def flip(folder: Path) -> None:
    data = bytearray((folder / "a").read_bytes())
    data[-8] ^= 1
    (folder / "a").write_bytes(data)


def link(folder: Path) -> None:
    (folder / "a").unlink()
    (folder / "a").symlink_to("sub/b")


DAMAGE: dict[str, tuple[Callable[[Path], object], list[tuple[str, str]]]] = {
    "bit flipped": (flip, [("ckpt/a", "digest-mismatch")]),
    "file missing": (lambda f: (f / "a").unlink(), [("ckpt/a", "missing-file")]),
    "file added": (lambda f: (f / "new").write_bytes(array(3)), [("ckpt/new", "unlisted-file")]),
    "hostile file added": (
        lambda f: (f / "new").write_bytes(HOSTILE),
        [("ckpt/new", "unlisted-file"), ("ckpt/new", "global-not-allowed")],
    ),
    "file longer": (lambda f: (f / "config.json").write_text("{ }"), [("ckpt/config.json", "size-mismatch")]),
    "file is a link": (link, [("ckpt/a", "symlink")]),
    "file hostile": (
        lambda f: (f / "a").write_bytes(HOSTILE),
        [("ckpt/a", "size-mismatch"), ("ckpt/a", "global-not-allowed")],
    ),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=list(DAMAGE))
def test_damage_is_found_and_what_is_there_is_scanned_all_the_same(
    checkpoint: Path, manifest: Path, damage: Callable[[Path], object], expected: list[tuple[str, str]]
) -> None:
    damage(checkpoint)
    found = audit({checkpoint: manifest}, trust=[KEY.public])
    assert codes(found) == expected
    assert not found.has_passed
    assert len(found.report.files) == sum(len(files) for _, _, files in os.walk(checkpoint))


def test_a_manifest_that_nobody_trusted_signed_is_refused_and_the_files_are_scanned(
    checkpoint: Path, manifest: Path
) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    found = audit({checkpoint: manifest}, trust=[SecretKey.generate().public])
    assert [code for _, code in codes(found)] == ["untrusted-key", "global-not-allowed"]
    assert facts(found)["roots"][0]["mode"] == "scanned"
    assert "manifest" not in found.report.facts


def test_the_manifest_may_lie_in_the_directory(checkpoint: Path) -> None:
    inside = checkpoint / "manifest.json"
    data = sign(checkpoint, keys=[KEY], model="m", revision="r")
    inside.write_bytes(data)
    assert audit({checkpoint: inside}, trust=[KEY.public]).has_passed
    inside.write_bytes(data + b"\n")
    assert codes(audit({checkpoint: data}, trust=[KEY.public])) == [("ckpt/manifest.json", "unlisted-file")]


def test_a_bundle_of_model_signing_is_verified_too(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    key = SecretKey.generate("ecdsa-p256")
    bundle, _ = sign_bundle(folder, key=key, model="m")
    found = audit({folder: bundle}, trust=[key.public])
    assert codes(found) == []
    assert found.has_passed
    assert facts(found)["roots"][0]["bundle"]["model"] == "m"
    (folder / "config.json").write_text("[]")
    assert codes(audit({folder: bundle}, trust=[key.public])) == [("ckpt/config.json", "digest-mismatch")]
    (folder / "bad").write_bytes(HOSTILE)
    untrusted = audit({folder: bundle}, trust=[SecretKey.generate().public])
    assert codes(untrusted)[-1] == ("ckpt/bad", "global-not-allowed")
    assert facts(untrusted)["roots"][0]["mode"] == "scanned"


def test_a_history_refuses_what_is_older_and_remembers_only_what_passed(checkpoint: Path, tmp_path: Path) -> None:
    old = sign(checkpoint, keys=[KEY], model="m", revision="r", version=1)
    new = sign(checkpoint, keys=[KEY], model="m", revision="r", version=2)
    history = tmp_path / "history.json"
    (checkpoint / "extra").write_bytes(array(1))
    assert not audit({checkpoint: new}, trust=[KEY.public], history=history).has_passed
    assert not history.exists()
    (checkpoint / "extra").unlink()
    assert audit({checkpoint: new}, trust=[KEY.public], history=history).has_passed
    assert codes(audit({checkpoint: old}, trust=[KEY.public], history=history))[0][1] == "rollback"


def test_a_bundle_of_tensorflow_is_read_with_its_index(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    tensor = Tensor(1, (6,), np.arange(6, dtype=np.float32).tobytes())
    for name, data in tensorflow_bundle("model.ckpt", {"w": tensor}).items():
        (folder / name).write_bytes(data)
    rules = load_policy("numpy-quantized")
    wide = rules.model_copy(update={"formats": rules.formats.model_copy(update={"allow": ("tensorflow",)})})
    assert codes(audit(folder, policy=wide)) == []
    (folder / "model.ckpt.index").unlink()
    assert codes(audit(folder, policy=wide)) == [("ckpt/model.ckpt.data-00000-of-00001", "bundle-index-missing")]


# --- many, and who does the work ----------------------------------------------------------------------------------


def test_many_directories_are_one_report_and_each_has_its_own_line(tmp_path: Path) -> None:
    folders = []
    for number in range(20):
        folder = tmp_path / f"ckpt{number}"
        folder.mkdir()
        (folder / "a").write_bytes(HOSTILE if number == 13 else array(number + 1))
        folders.append(folder)
    found = audit(folders)
    assert [root["verdict"] for root in facts(found)["roots"]] == ["accepted"] * 13 + ["rejected"] + ["accepted"] * 6
    assert codes(found) == [("ckpt13/a", "global-not-allowed")]
    assert len(found.report.files) == 20


def test_a_directory_with_and_one_without_a_manifest(checkpoint: Path, manifest: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a").write_bytes(array(3))
    found = audit({checkpoint: manifest, other: None}, trust=[KEY.public])
    assert [root["mode"] for root in facts(found)["roots"]] == ["verified", "scanned"]
    assert "who signed 1 of 2 directories, which files belong there, and the SHA-256 of each" in facts(found)["checked"]
    assert not audit({checkpoint: manifest, other: None}, trust=[KEY.public], fail_on=["unverified"]).has_passed
    assert audit({checkpoint: manifest}, trust=[KEY.public], fail_on=["unverified"]).has_passed


def test_an_empty_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    found = audit(tmp_path / "ckpt")
    assert codes(found) == [("ckpt", "nothing-to-scan")]
    assert not found.has_passed


def test_a_directory_that_cannot_be_opened_is_rejected_and_the_others_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closing(Root):
        # Who may read everything, as root may, cannot be shut out by permissions.
        def __enter__(self) -> Self:
            if self.directory.name == "ckpt-closed":
                raise StagingError("cannot open the directory")
            return super().__enter__()

    for name in ("ckpt-closed", "ckpt-open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(array(1))
    monkeypatch.setattr(auditing, "Root", Closing)
    found = audit([tmp_path / "ckpt-closed", tmp_path / "ckpt-open"])
    assert codes(found) == [("ckpt-closed", "unreadable")]
    assert len(found.report.files) == 1


class Inline(Executor):
    """Runs what it is given at once, and remembers it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # What goes through a pickle and back is what another machine would get.
        self.calls.append(pickle.loads(pickle.dumps(args)))
        future: Future[Any] = Future()
        try:
            future.set_result(pickle.loads(pickle.dumps(fn(*self.calls[-1], **kwargs))))
        except Exception as err:  # noqa: BLE001 - as an executor does
            future.set_exception(err)
        return future


@pytest.mark.parametrize("jobs", [None, 1, 7])
def test_the_number_of_threads_changes_nothing(checkpoint: Path, jobs: int | None) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    assert audit(checkpoint, jobs=jobs).report.files == audit(checkpoint).report.files


def test_an_executor_changes_nothing(checkpoint: Path, manifest: Path) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    here = audit({checkpoint: manifest}, trust=[KEY.public], traces=True)
    for executor in (Inline(), ThreadPoolExecutor(2)):
        with executor:
            there = audit({checkpoint: manifest}, trust=[KEY.public], executor=executor, traces=True)
        assert there.report.files == here.report.files
        assert there.traces == here.traces


@pytest.mark.slow
def test_processes_can_do_the_work(checkpoint: Path) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        assert audit(checkpoint, executor=executor).report.files == audit(checkpoint).report.files


class Failing(Executor):
    """Loses the machine that should have done the work."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        del fn, args, kwargs
        future: Future[Any] = Future()
        future.set_exception(OSError("the machine is gone\x1b"))
        return future


def test_a_worker_that_fails_is_no_verdict(checkpoint: Path) -> None:
    with pytest.raises(StagingError, match=r"a worker failed: OSError: the machine is gone\\x1b"):
        audit(checkpoint, executor=Failing())


def test_a_worker_of_another_version_is_no_verdict(checkpoint: Path) -> None:
    class Other(Inline):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(fn, *args, **kwargs)
            object.__setattr__(future.result(), "version", "0.0.1")
            return future

    with pytest.raises(StagingError, match=r"found one with 0\.0\.1"):
        audit(checkpoint, executor=Other())


def test_a_file_that_vanishes_on_the_way_to_a_worker_is_refused(checkpoint: Path) -> None:
    class Late(Inline):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            (checkpoint / "a").unlink(missing_ok=True)
            return super().submit(fn, *args, **kwargs)

    assert codes(audit(checkpoint, executor=Late())) == [("ckpt/a", "missing-file")]


def test_progress_counts_every_byte_once(checkpoint: Path) -> None:
    told: list[tuple[str, int, int]] = []
    audit(checkpoint, progress=lambda *step: told.append(step))
    total = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert told[-1] == ("auditing", total, total)


def test_progress_can_stop_it(checkpoint: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(checkpoint, progress=stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("safeload")]


# --- each byte once -----------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every file that is opened to be hashed, and how many of its bytes were."""
    seen: list[tuple[str, int]] = []
    finish = StreamSource.finish

    def counted(self: StreamSource) -> str:
        seen.append((Path(self.path).name, self.size))
        return finish(self)

    monkeypatch.setattr(StreamSource, "finish", counted)
    return seen


def test_each_file_is_read_once(checkpoint: Path, manifest: Path, reads: list[tuple[str, int]]) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    audit({checkpoint: manifest}, trust=[KEY.public])
    assert sorted(name for name, _ in reads) == ["a", "b", "bad", "config.json"]


def test_only_refused_pickles_are_read_again_and_only_if_their_instructions_are_wanted(
    checkpoint: Path, reads: list[tuple[str, int]]
) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    audit(checkpoint, traces=True)
    assert sorted(name for name, _ in reads) == ["a", "b", "bad", "bad", "config.json"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_size_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    n_bytes = 256 * 1024 * 1024
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (n_bytes, n_bytes)
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + n_bytes)
    code = (
        "import resource\nfrom safeload.auditing import audit\n"
        f"import safeload.formats.safetensors, safeload.loading\naudit({str(tmp_path / 'small')!r})\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\nbefore = peak()\n"
        f"found = audit({str(folder)!r})\nprint(found.has_passed, peak() - before)"
    )
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "a").write_bytes(array(1))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    passed, grown = done.stdout.split()
    assert passed == "True"
    assert int(grown) < n_bytes // 8


# --- traces -------------------------------------------------------------------------------------------------------


def test_a_trace_names_the_instruction_that_is_refused(checkpoint: Path) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    found = audit(checkpoint, traces=True)
    (trace,) = found.traces.values()
    (refused,) = [step for step in trace.steps if step.refusal]
    assert (refused.opcode, refused.offset) == ("STACK_GLOBAL", 17)
    assert trace.n_steps == len(trace.steps)
    assert audit(checkpoint).traces == {}


def test_a_long_trace_keeps_its_beginning_and_what_comes_before_a_refusal(checkpoint: Path) -> None:
    long = b"\x80\x04" + b"N0" * 5000 + HOSTILE[2:]
    (checkpoint / "bad").write_bytes(long)
    (trace,) = audit(checkpoint, traces=True).traces.values()
    assert trace.n_steps > 10_000
    assert len(trace.steps) < 100
    offsets = [step.offset for step in trace.steps]
    assert offsets == sorted(offsets)
    assert [step.opcode for step in trace.steps if step.refusal] == ["STACK_GLOBAL"]
    assert trace.steps[-2].result == "the string 'system'"


def test_a_trace_of_another_file_is_not_shown(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE)
    trace = auditing._Crew.trace

    def later(self: Any, roots: Sequence[Any]) -> Any:
        (checkpoint / "bad").write_bytes(HOSTILE.replace(b"true", b"fals"))
        return trace(self, roots)

    monkeypatch.setattr(auditing._Crew, "trace", later)
    assert audit(checkpoint, traces=True).traces == {}


# --- baseline -----------------------------------------------------------------------------------------------------


@pytest.fixture
def baseline(checkpoint: Path, tmp_path: Path) -> Path:
    (checkpoint / "bad").write_bytes(HOSTILE)
    path = tmp_path / "baseline.json"
    path.write_text(baseline_json(audit(checkpoint).report))
    return path


def test_known_findings_do_not_fail_and_are_still_refused(checkpoint: Path, baseline: Path) -> None:
    found = audit(checkpoint, baseline=baseline)
    assert found.has_passed
    assert found.report.verdict == "rejected"
    assert (facts(found)["new"], len(facts(found)["known"])) == (0, 1)
    assert not audit(checkpoint, baseline=baseline, fail_on=["known"]).has_passed


def test_another_file_under_a_known_name_is_new(checkpoint: Path, baseline: Path) -> None:
    (checkpoint / "bad").write_bytes(HOSTILE.replace(b"true", b"fals"))
    found = audit(checkpoint, baseline=baseline)
    assert not found.has_passed
    assert (facts(found)["new"], facts(found)["known"], len(facts(found)["baseline"]["stale"])) == (1, [], 1)


def test_a_known_file_under_another_name_is_new(checkpoint: Path, baseline: Path) -> None:
    (checkpoint / "bad").rename(checkpoint / "worse")
    assert not audit(checkpoint, baseline=baseline).has_passed


def test_another_reason_for_a_known_file_is_new(checkpoint: Path, manifest: Path, baseline: Path) -> None:
    found = audit({checkpoint: manifest}, trust=[KEY.public], baseline=baseline)
    assert [f.code for f in found.report.all_findings] == ["unlisted-file", "global-not-allowed"]
    assert facts(found)["new"] == 1
    assert not found.has_passed


def test_what_has_no_digest_is_never_known(checkpoint: Path, manifest: Path) -> None:
    (checkpoint / "link").symlink_to("a")
    (checkpoint / "a").unlink()
    text = baseline_json(audit({checkpoint: manifest}, trust=[KEY.public]).report)
    assert '"findings": []' in text


# --- arguments ----------------------------------------------------------------------------------------------------


def refused(message: str, **arguments: Any) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        audit(**arguments)
    assert caught.value.hint


def test_wrong_arguments_are_said_before_anything_is_read(checkpoint: Path, manifest: Path, tmp_path: Path) -> None:
    refused("expected a directory, found none", directories=[])
    refused("is no directory", directories=[tmp_path / "nowhere"])
    refused("is no directory", directories=[manifest])
    refused("twice", directories=[checkpoint, checkpoint])
    refused("nobody to trust", directories={checkpoint: manifest})
    refused("no manifest", directories=checkpoint, trust=[KEY.public])
    refused("pin can be expected", directories=checkpoint, pin="sha256:" + "0" * 64)
    refused("a pin names one", directories={checkpoint: manifest, tmp_path: None}, trust=[KEY.public], pin="x")
    refused("fail_on", directories=checkpoint, fail_on=["nothing"])
    refused("a cache and its key", directories=checkpoint, cache=tmp_path / "c")
    refused("jobs", directories=checkpoint, jobs=0)
    refused("jobs", directories=checkpoint, jobs=10**30)
    refused("jobs", directories=checkpoint, jobs=2, executor=Inline())
    refused("no policy is called", directories=checkpoint, policy="nothing")


@pytest.mark.parametrize("wrong", [-1, 1.5, b"x", object(), [None], {"a": 1}], ids=lambda wrong: type(wrong).__name__)
@pytest.mark.parametrize(
    "name",
    [
        *("directories", "trust", "policy", "baseline", "fail_on", "cache", "cache_key", "jobs", "executor"),
        "progress",
    ],
)
def test_an_argument_of_another_type_is_a_wrong_argument(checkpoint: Path, name: str, wrong: object) -> None:
    arguments: dict[str, Any] = {"directories": checkpoint, name: wrong}
    refused(".", **arguments)


@pytest.mark.parametrize("name", ["directories", "trust", "fail_on"])
def test_none_is_named_as_a_wrong_argument_where_something_is_needed(checkpoint: Path, name: str) -> None:
    refused(f"{name}: expected .*, found NoneType", **{"directories": checkpoint, name: None})


def test_words_and_iterators_are_not_taken_for_lists(checkpoint: Path, manifest: Path) -> None:
    refused("fail_on: expected a list of words, found str", directories=checkpoint, fail_on="known")
    refused("trust: expected .*, found generator", directories={checkpoint: manifest}, trust=(k for k in [KEY.public]))
    refused("directories: expected a manifest's path, .* found int", directories={checkpoint: 3})


def test_nothing_that_decides_may_lie_in_what_is_audited(checkpoint: Path, tmp_path: Path) -> None:
    inside = checkpoint / "x.toml"
    inside.write_text("")
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    refused("the policy .* lies in the checkpoint", directories=checkpoint, policy=inside)
    refused("the baseline .* lies in the checkpoint", directories=checkpoint, baseline=inside)
    refused("the cache .* lies in the checkpoint", directories=checkpoint, cache=checkpoint / "c", cache_key=key)
    refused("the cache's key .* lies in the checkpoint", directories=checkpoint, cache=tmp_path / "c", cache_key=inside)
    refused("lies in the checkpoint", directories={checkpoint: b"{}"}, trust=inside)


def test_an_audit_is_what_the_default_policy_says(checkpoint: Path) -> None:
    assert audit(checkpoint).report.facts["policy"]["name"] == DEFAULT_POLICY


# --- a cluster ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of a foreign package, about itself
def test_a_cluster_changes_nothing(checkpoint: Path, manifest: Path) -> None:
    distributed: Any = pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    (checkpoint / "bad").write_bytes(HOSTILE)
    here = audit({checkpoint: manifest}, trust=[KEY.public], traces=True)
    # A worker that is a process of its own, and has nothing but what it is sent and what it can import.
    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": None, "host": "127.0.0.1"}
    with (
        distributed.LocalCluster(**options, worker_dashboard_address=None) as cluster,
        auditing.dask_executor(cluster.scheduler_address) as executor,
    ):
        there = audit({checkpoint: manifest}, trust=[KEY.public], executor=executor, traces=True)
    assert there.report.files == here.report.files
    assert there.report.findings == here.report.findings
    assert there.traces == here.traces


def test_no_cluster_is_a_wrong_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="the extra `dask` is not installed", exc_type=ImportError)
    monkeypatch.setattr(auditing, "_CONNECT_SECONDS", 1)
    with (
        pytest.raises(SafeloadError, match="cannot reach a Dask scheduler"),
        auditing.dask_executor("tcp://127.0.0.1:1"),
    ):
        pass


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(ConfigError, match="Dask is not installed"), auditing.dask_executor("tcp://127.0.0.1:1"):
        pass


def test_a_report_of_an_audit_has_no_truth_value(checkpoint: Path) -> None:
    report: Report = audit(checkpoint).report
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(report)
