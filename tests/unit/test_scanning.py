"""Claims of `safeload.scanning`: one verdict a file, payloads jumped over, digests that numpy agrees with."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safeload import scanning
from safeload.errors import ConfigError, SafeloadError, StagingError
from safeload.files import Root
from safeload.formats.pickles.writing import pickle_shard
from safeload.report import FileReport, Report
from safeload.scanning import scan
from tests.simulator import CONFIG, CheckpointSimulator, Exploit, pickled

HONEST = pickled(np.arange(10, dtype=np.float32))


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def only(report: Report) -> FileReport:
    assert len(report.files) == 1
    return report.files[0]


def codes(report: Report) -> dict[str, list[str]]:
    return {file.path: [finding.code for finding in file.findings] for file in report.files}


# ---------------------------------------------------------------- one verdict each


def test_every_file_of_a_directory_has_exactly_one_verdict(tmp_path: Path) -> None:
    contents = {
        "good": HONEST,
        "sub/deep/good": HONEST,
        ".hidden": pickled(Exploit()),
        ".dir/.also": HONEST,
        "hostile": pickled(Exploit(), 0),
        "hostile.json": pickled(Exploit()),
        "empty": b"",
        "cut": HONEST[:-1],
        "longer": HONEST + b"\0",
        "noise": b"\xfe\xfd",
        "zip": b"PK\x03\x04" + bytes(100),
        "config.json": b"{}",
        "broken.json": b"{",
        "control.txt": b"a\x1b[31m",
        "latin.md": "é".encode("latin-1"),
        "pickle.txt": pickle.dumps(["a"], 0),
        "tokenizer.model": b"\n\x05<unk>",
        "sub/tokenizer.model": pickled(Exploit()),
        "page": b"<!DOCTYPE html>",
    }
    for name, data in contents.items():
        write(tmp_path / name, data)
    report = scan(tmp_path)
    assert report.verdict == "rejected"
    assert report.findings == ()
    found = {os.path.relpath(path, tmp_path): each for path, each in codes(report).items()}
    assert found == {
        "good": [],
        "sub/deep/good": [],
        ".hidden": ["global-not-allowed"],
        ".dir/.also": [],
        "hostile": ["global-not-allowed"],
        "hostile.json": ["name-contradicts-content"],
        "empty": ["empty-file"],
        "cut": ["truncated"],
        "longer": ["data-after-stop"],
        "noise": ["not-a-pickle"],
        "zip": ["zip-bad-end"],
        "config.json": [],
        "broken.json": ["name-contradicts-content"],
        "control.txt": ["name-contradicts-content"],
        "latin.md": ["name-contradicts-content"],
        "pickle.txt": ["name-contradicts-content"],
        "tokenizer.model": [],
        "sub/tokenizer.model": ["name-contradicts-content"],
        "page": ["format-not-supported"],
    }
    assert len(report.files) == len(contents)
    assert [file.path for file in report.files] == sorted(file.path for file in report.files)


@pytest.mark.parametrize("protocol", range(6))
def test_an_opaque_file_is_refused_if_it_is_a_pickle_of_any_protocol(tmp_path: Path, protocol: int) -> None:
    # The first protocols have no signature, so that the first bytes alone do not tell.
    write(tmp_path / "tokenizer.model", pickle.dumps(Exploit(), protocol))
    assert codes(scan(tmp_path)) == {str(tmp_path / "tokenizer.model"): ["name-contradicts-content"]}


@pytest.mark.parametrize("text", [b"", b"{} {}", b"'a'", b"\xff", b"[" * 9999])
def test_a_json_file_is_json(tmp_path: Path, text: bytes) -> None:
    write(tmp_path / "a.json", text)
    assert codes(scan(tmp_path)) == {str(tmp_path / "a.json"): ["name-contradicts-content"]}


def test_an_accepted_file_tells_its_tensors_and_globals(tmp_path: Path) -> None:
    path = write(tmp_path / "a", pickled({"w": np.ones((2, 3), np.int8)}))
    report = scan(path)
    assert report.verdict == "accepted"
    file = only(report)
    assert (file.path, file.format, file.size, file.sha256) == (str(path), "pickle", path.stat().st_size, None)
    (spec,) = file.tensors
    assert (spec.name, spec.dtype.name, spec.shape, spec.order, spec.sha256) == ("w", "int8", (2, 3), "C", None)
    assert path.read_bytes()[spec.extent.offset :][:6] == b"\1" * 6
    assert [name.split(".")[-1] for name in file.globals] == ["_reconstruct", "ndarray", "dtype"]


def test_one_bad_file_among_good_ones_rejects_the_run_and_only_itself(tmp_path: Path) -> None:
    for i in range(5):
        write(tmp_path / f"t{i}", HONEST)
    write(tmp_path / "t3", pickled(Exploit()))
    for digests in (False, True):
        report = scan(tmp_path, digests=digests)
        assert report.verdict == "rejected"
        assert [file.verdict for file in report.files] == ["accepted"] * 3 + ["rejected", "accepted"]


def test_a_file_that_is_two_things_is_named_by_all_its_globals(tmp_path: Path) -> None:
    path = write(tmp_path / "a", pickled([Exploit(), print]))
    assert [finding.code for finding in only(scan(path)).findings] == ["global-not-allowed"] * 2


def test_every_refusal_has_a_hint_or_an_offset(tmp_path: Path) -> None:
    write(tmp_path / "a", b"\xfe")
    write(tmp_path / "b", pickled(Exploit()))
    write(tmp_path / "c.json", b"{")
    for file in scan(tmp_path).files:
        assert all(finding.hint or finding.offset is not None for finding in file.findings), file


# ---------------------------------------------------------------- what a path stands for


def test_links_and_fifos_below_a_directory_are_refused_and_not_opened(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", HONEST)
    top = tmp_path / "top"
    write(top / "good", HONEST)
    (top / "link").symlink_to(outside)
    (top / "dangling").symlink_to("nowhere")
    (top / "loop").symlink_to("loop")
    (top / "dirlink").symlink_to(tmp_path)
    os.mkfifo(top / "fifo")
    assert codes(scan(top)) == {
        str(top / "dangling"): ["symlink"],
        str(top / "dirlink"): ["symlink"],
        str(top / "fifo"): ["not-a-regular-file"],
        str(top / "good"): [],
        str(top / "link"): ["symlink"],
        str(top / "loop"): ["symlink"],
    }


def test_a_finding_of_a_file_has_the_keys_of_the_contract_wherever_it_was_met(tmp_path: Path) -> None:
    write(tmp_path / "sub/hostile", pickled(Exploit()))
    (tmp_path / "sub/link").symlink_to("hostile")
    for file in scan(tmp_path).to_json()["files"]:
        for finding in file["findings"]:
            # The file's own path stands beside the list; a second one could contradict it.
            assert set(finding) - {"path"} == {"code", "message", "offset", "hint"}
            assert finding.get("path", file["path"]) == file["path"]


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).write_bytes(HONEST)
    report = scan(tmp_path)
    assert [finding.code for finding in only(report).findings] == ["undecodable-name"]
    json.dumps(report.to_json())


def test_a_file_argument_that_is_a_link_is_followed(tmp_path: Path) -> None:
    # Download caches are made of such links, and the user typed this one.
    write(tmp_path / "blobs/0123", HONEST)
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot/model"
    link.symlink_to("../blobs/0123")
    report = scan(link)
    assert report.verdict == "accepted"
    assert only(report).path == str(link)


def test_a_directory_argument_that_is_a_link_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "real/a", HONEST)
    (tmp_path / "link").symlink_to("real")
    assert codes(scan(tmp_path / "link")) == {str(tmp_path / "link/a"): []}


def test_a_fifo_argument_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert codes(scan(tmp_path / "fifo")) == {str(tmp_path / "fifo"): ["not-a-regular-file"]}


@pytest.mark.parametrize("name", ["missing", "missing/deeper", "file/deeper", "dangling", "loop", "nul\0", "x" * 300])
def test_a_path_that_is_not_there_is_a_config_error(tmp_path: Path, name: str) -> None:
    write(tmp_path / "file", HONEST)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"no file or directory|cannot"):
        scan([tmp_path / "file", f"{tmp_path}/{name}"])


def test_an_empty_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "sub/sub").mkdir(parents=True)
    report = scan(tmp_path)
    assert report.verdict == "rejected"
    assert report.files == ()
    assert [(finding.code, finding.file) for finding in report.findings] == [("nothing-to-scan", str(tmp_path))]


def test_an_empty_directory_is_rejected_beside_a_good_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    good = write(tmp_path / "good", HONEST)
    report = scan([good, tmp_path / "empty"])
    assert report.verdict == "rejected"
    assert codes(report) == {str(good): []}
    assert [finding.code for finding in report.findings] == ["nothing-to-scan"]


def test_no_path_at_all_is_not_accepted() -> None:
    assert scan([]).verdict == "rejected"


def test_several_paths_are_reported_in_the_order_given(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, HONEST) for name in ("b", "a", "c")]
    for digests in (False, True):
        assert [file.path for file in scan(paths, digests=digests).files] == [str(path) for path in paths]


def test_a_path_may_be_text_and_is_shown_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "sub/a", HONEST)
    monkeypatch.chdir(tmp_path)
    assert only(scan("./sub/../sub/a")).path == "./sub/../sub/a"
    assert only(scan("./sub/")).path == "./sub/a"


def test_a_file_that_the_system_refuses_is_a_finding_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Mode bits would not do where tests run as root.
    for name in ("a", "b", "c"):
        write(tmp_path / name, HONEST)
    genuine = os.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == "b":
            raise PermissionError(13, "Permission denied")
        return genuine(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    for digests in (False, True):
        report = scan(tmp_path, digests=digests)
        assert list(codes(report).values()) == [[], ["unreadable"], []]
        assert report.files[1].size is None


@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_a_file_that_changes_while_it_is_hashed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = write(tmp_path / "a", pickled(np.zeros(1 << 20, np.uint8)))
    size = path.stat().st_size
    genuine = os.preadv

    def reading(fd: int, buffers: Any, offset: int) -> int:
        os.truncate(path, size // 2 if change == "shorter" else size + 1)
        return genuine(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", reading)
    assert codes(scan(path, digests=True)) == {str(path): ["changed-while-read"]}


def test_a_payload_that_is_another_when_read_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A Fortran array's digest needs a second pass over bytes that streamed past already.
    path = write(tmp_path / "a", pickled(np.asfortranarray(np.zeros((300, 300)))))
    size = path.stat().st_size
    genuine = os.preadv

    def reading(fd: int, buffers: Any, offset: int) -> int:
        n = genuine(fd, buffers, offset)
        if offset + n >= size:
            with path.open("r+b") as file:
                file.seek(size // 2)
                file.write(b"\1")
        return n

    monkeypatch.setattr(os, "preadv", reading)
    assert codes(scan(path, digests=True)) == {str(path): ["changed-while-read"]}


def test_a_directory_that_may_not_be_entered_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", HONEST)
    write(tmp_path / "locked/b", HONEST)
    genuine = os.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == "locked":
            raise PermissionError(13, "Permission denied")
        return genuine(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    report = scan(tmp_path)
    assert codes(report) == {str(tmp_path / "a"): [], str(tmp_path / "locked"): ["unreadable"]}


def test_a_directory_argument_that_may_not_be_opened_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(StagingError, match="cannot open the directory"):
        scan(tmp_path)


# ---------------------------------------------------------------- nothing is read that need not be


def in_a_process(code: str, *args: str) -> Any:
    """Run code in a fresh interpreter, and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sparse(path: Path, nbytes: int) -> Path:
    """Write an honest pickle whose payload is a hole, so that it takes no room on disk."""
    with path.open("wb") as file:
        for piece in pickle_shard(np.zeros(nbytes, np.int8)):
            if len(piece) > 1 << 20:
                file.seek(len(piece), os.SEEK_CUR)
            else:
                file.write(piece)
    return path


def test_payloads_are_jumped_over_and_not_read(tmp_path: Path) -> None:
    path = sparse(tmp_path / "big", 2 << 30)
    assert path.stat().st_size > 2 << 30
    # VmHWM and not ru_maxrss: that one counts what this process had when it forked.
    measured = in_a_process(
        """
        import json, re, sys
        from pathlib import Path
        from safeload import scan
        def rchar():
            return int(re.search(r"rchar: (\\d+)", Path("/proc/self/io").read_text())[1])
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
        scan([])
        before = rchar()
        report = scan(sys.argv[1])
        read = rchar() - before
        print(json.dumps([report.verdict, list(report.files[0].tensors[0].shape), read, peak()]))
        """,
        str(path),
    )
    verdict, shape, n_read, n_resident = measured
    assert (verdict, shape) == ("accepted", [2 << 30])
    assert n_read < 1_000_000
    assert n_resident < 100_000_000


def test_digests_are_taken_in_little_memory(tmp_path: Path) -> None:
    path = sparse(tmp_path / "big", 200 << 20)
    verdict, n_resident = in_a_process(
        """
        import json, re, sys
        from pathlib import Path
        from safeload import scan
        report = scan(sys.argv[1], digests=True)
        peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
        print(json.dumps([report.verdict, peak]))
        """,
        str(path),
    )
    assert verdict == "accepted"
    assert n_resident < 100_000_000


@pytest.mark.parametrize(
    ("array", "digests", "numpy_is_loaded"),
    [
        (np.ones((3, 4)), False, False),
        (np.asfortranarray(np.ones((3, 4))), False, False),
        (np.ones((3, 4)), True, False),
        (np.asfortranarray(np.ones((3, 1))), True, False),
        (np.asfortranarray(np.ones((3, 4))), True, True),
        (np.ones((3, 4), ">f8"), True, True),
    ],
)
def test_numpy_is_loaded_only_to_digest_what_is_not_canonical(
    tmp_path: Path, array: np.ndarray, digests: bool, numpy_is_loaded: bool
) -> None:
    path = write(tmp_path / "a", pickled(array))
    code = """
        import json, sys
        import safeload
        report = safeload.scan(sys.argv[1], digests=sys.argv[2] == "True")
        heavy = {"cryptography", "jax", "jaxlib", "numpy"} & {name.split(".")[0] for name in sys.modules}
        print(json.dumps([report.verdict, sorted(heavy)]))
    """
    assert in_a_process(code, str(path), str(digests)) == ["accepted", ["numpy"] if numpy_is_loaded else []]


# ---------------------------------------------------------------- digests


def array_cases() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    plain = rng.standard_normal((7, 5, 3))
    return {
        "C": plain,
        "F": np.asfortranarray(plain),
        "F, one axis": np.asfortranarray(plain[:, :1, :1]),
        "big-endian": plain.astype(">f8"),
        "big-endian F": np.asfortranarray(plain.astype(">f4")),
        "strided": plain[::2, ::-1],
        "0-d": np.array(3.25),
        "0-d big-endian": np.array(3, ">i8"),
        "empty": np.empty((0,), np.float32),
        "empty C": np.empty((3, 0, 2), np.int16),
        "empty F": np.asfortranarray(np.empty((3, 0, 2), ">i4")),
        "one byte": np.array([200], np.uint8),
        "bool": plain > 0,
        "complex": (plain + 1j).astype(np.complex64),
        "bfloat16": plain.astype(ml_dtypes.bfloat16),
        "bfloat16 F": np.asfortranarray(plain.astype(ml_dtypes.bfloat16)),
        "int4": rng.integers(-8, 8, (5, 4)).astype(ml_dtypes.int4),
        "several windows": rng.integers(0, 255, 700_001, dtype=np.uint8),
        "several windows F": np.asfortranarray(rng.integers(0, 255, (900, 901), dtype=np.uint8)),
    }


@pytest.mark.parametrize("protocol", range(6))
def test_digests_are_of_the_little_endian_c_order_bytes(tmp_path: Path, protocol: int) -> None:
    # No file is newer than this, so that whatever numpy makes of an order is what is asked for here.
    values = array_cases() if protocol > 2 else {k: v for k, v in array_cases().items() if "windows" not in k}
    path = write(tmp_path / "a", pickled(values, protocol))
    report = scan(path, digests=True)
    assert report.verdict == "accepted", report.all_findings
    found = {spec.name: spec for spec in only(report).tensors}
    assert list(found) == list(values)
    for name, value in values.items():
        little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
        assert found[name].sha256 == hashlib.sha256(little.tobytes()).hexdigest(), name
        assert found[name].shape == value.shape
    assert only(report).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_shared_and_repeated_arrays_have_a_digest_each(tmp_path: Path) -> None:
    array = np.asfortranarray(np.ones((2, 3), ">i2"))
    empty, one = np.empty(0), np.ones(1, np.uint8)
    values = {"a": array, "b": array, "c": empty, "d": empty.copy(), "e": one, "f": one.copy()}
    for protocol in range(6):
        report = scan(write(tmp_path / "a", pickled(values, protocol)), digests=True)
        found = {spec.name: spec.sha256 for spec in only(report).tensors}
        assert found["a"] == found["b"] == hashlib.sha256(np.ones((2, 3), "<i2").tobytes()).hexdigest()
        assert found["c"] == found["d"] == hashlib.sha256(b"").hexdigest()
        assert found["e"] == found["f"] == hashlib.sha256(b"\1").hexdigest()


def test_a_refused_file_has_a_digest_and_no_rows(tmp_path: Path) -> None:
    data = pickled([np.ones(3), Exploit()])
    file = only(scan(write(tmp_path / "a", data), digests=True))
    assert file.sha256 == hashlib.sha256(data).hexdigest()
    assert file.tensors == ()


def test_inert_files_have_a_digest_too(tmp_path: Path) -> None:
    file = only(scan(write(tmp_path / "a.json", b"{}"), digests=True))
    assert (file.verdict, file.format, file.sha256) == ("accepted", "json", hashlib.sha256(b"{}").hexdigest())


# ---------------------------------------------------------------- the rest


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    for i in range(6):
        write(tmp_path / f"t{i}", pickled(np.zeros(1000 * i)))
    total = sum(file.stat().st_size for file in tmp_path.iterdir())
    for digests in (False, True):
        told: list[tuple[str, int, int]] = []
        scan(tmp_path, digests=digests, progress=lambda *state, told=told: told.append(state))
        assert told
        assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
        assert told[-1] == ("scanning", total, total)


def test_ctrl_c_in_progress_ends_the_run(tmp_path: Path) -> None:
    for i in range(6):
        write(tmp_path / f"t{i}", HONEST)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for digests in (False, True):
        with pytest.raises(KeyboardInterrupt):
            scan(tmp_path, digests=digests, progress=stop)


def test_the_report_says_which_policy_it_was_held_against(tmp_path: Path) -> None:
    report = scan(write(tmp_path / "a", HONEST), policy="grok-1")
    policy = report.to_json()["policy"]
    assert set(policy) == {"name", "source", "sha256"}
    assert policy["name"] == policy["source"] == "grok-1"
    assert len(policy["sha256"]) == 64


def test_many_directories_are_scanned_with_few_descriptors(tmp_path: Path) -> None:
    for number in range(400):
        write(tmp_path / f"{number // 20}" / f"{number % 20}" / "file", HONEST)
    found = in_a_process(
        """
        import json, resource, sys
        from pathlib import Path
        from safeload.scanning import scan
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        top = Path(sys.argv[1])
        directories = [top / str(number) for number in range(20)]
        files = [top / str(one) / str(other) / "file" for one in range(20) for other in range(20)]
        reports = [scan(directories, digests=True), scan(files)]
        print(json.dumps([[len(report.files), report.is_accepted] for report in reports]))
        """,
        str(tmp_path),
    )
    assert found == [[400, True], [400, True]]


def test_files_of_one_directory_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    enter = Root.__enter__

    def counting(self: Root) -> Root:
        opened.append(str(self.directory))
        return enter(self)

    monkeypatch.setattr(Root, "__enter__", counting)
    paths = [write(tmp_path / f"{number % 9}" / f"{number}", HONEST) for number in range(18)]
    inside = sorted(paths, key=lambda path: path.parent)
    assert [file.path for file in scan(inside).files] == [str(path) for path in inside]
    assert opened == [str(tmp_path / f"{number}") for number in range(9)]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    for i in range(4):
        write(tmp_path / f"d{i}/t", HONEST if i % 2 else b"\xfe")
    (tmp_path / "link").symlink_to("d0")
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - a fair copy, before anything is opened
    for digests in (False, True):
        scan([tmp_path, tmp_path / "d1/t"], digests=digests)
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208 - as above


def test_verify_needs_the_manifest_for_a_closed_list_and_scan_says_nothing_of_it(tmp_path: Path) -> None:
    checkpoint = CheckpointSimulator(tmp_path)
    checkpoint.remove(CONFIG)
    assert scan(checkpoint.directory).verdict == "accepted"
    assert checkpoint.check().verdict == "rejected"


# ---------------------------------------------------------------- any bytes

NAMES = ("tensor00000_000", "a.json", "a.txt", "tokenizer.model")
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MAGIC = [
    b"",
    b"\x80\x04",
    b"\x80\x02",
    b"PK\x03\x04",
    b"{",
    b"cos\nsystem\n",
    b"\x80\x04\x95" + bytes(8),
    b"\x8e" + b"\xff" * 8,
]


@given(st.sampled_from(NAMES), st.sampled_from(MAGIC), st.binary(max_size=300))
@FUZZ
def test_any_bytes_get_one_verdict_and_no_foreign_error(tmp_path: Path, name: str, magic: bytes, data: bytes) -> None:
    path = write(tmp_path / name, magic + data)
    plain, digested = scan(path), scan(path, digests=True)
    assert codes(plain) == codes(digested)
    assert plain.verdict == only(plain).verdict


@given(st.sampled_from(sorted(array_cases())), st.integers(0, 5), st.data())
@FUZZ
def test_damaged_pickles_get_one_verdict_and_no_foreign_error(
    tmp_path: Path, case: str, protocol: int, data: st.DataObject
) -> None:
    content = bytearray(pickled(array_cases()[case], protocol))
    head = min(len(content), 400)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    path = write(tmp_path / "a", bytes(content[: data.draw(st.integers(0, len(content)))] or content))
    report = scan(path, digests=True)
    assert len(report.files) == 1
    if report.verdict == "accepted":
        assert all(spec.sha256 for spec in only(report).tensors)


@given(st.text(max_size=20).filter(lambda text: not text.startswith("/")))
@FUZZ
def test_any_text_as_a_path_is_a_verdict_or_our_error(tmp_path: Path, text: str) -> None:
    act: Callable[[], Report] = lambda: scan(f"{tmp_path}/{text}")  # noqa: E731 - one expression, said once
    try:
        report = act()
    except SafeloadError:
        return
    assert report.verdict == "rejected"


@pytest.mark.parametrize("name", ["a.txt", "a.json", "tokenizer.model"])
def test_a_long_inert_file_can_be_hashed_as_a_short_one(tmp_path: Path, name: str) -> None:
    for n_bytes in (380_000, 400_000, 1_500_000):
        data = b'"' + b"a" * n_bytes + b'"'
        file = only(scan(write(tmp_path / name, data), digests=True))
        assert (file.verdict, file.sha256) == ("accepted", hashlib.sha256(data).hexdigest())


def test_an_array_that_memory_has_no_room_to_reorder_is_refused_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", pickled(np.asfortranarray(np.arange(6.0).reshape(2, 3))))
    write(tmp_path / "b", pickled(np.arange(6.0)))
    monkeypatch.setattr("safeload.scanning.available_memory", lambda: 90)
    report = scan(tmp_path, digests=True)
    assert [[f.code for f in file.findings] for file in report.files] == [["unreadable"], []]
    assert "in C order takes twice as much memory" in report.files[0].findings[0].message


def test_a_policy_in_what_is_scanned_is_nobodys_word(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    folder.mkdir()
    write(folder / "a", pickled(np.ones(2)))
    policy = write(folder / "README.md", (Path(__file__).parents[2] / "policies/numpy-quantized.toml").read_bytes())
    with pytest.raises(ConfigError, match="lies in the checkpoint"):
        scan(folder, policy=policy)
    outside = policy.rename(tmp_path / "mine.toml")
    assert scan(folder, policy=outside).is_accepted


def test_the_digest_of_an_array_in_another_order_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    (tmp_path / "w").write_bytes(pickle.dumps({"a": array, "b": array, "c": array}))
    taken = []
    real = vars(scanning)["_digest"]

    def digest(*arguments: Any) -> Any:
        taken.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(scanning, "_digest", digest)
    (file,) = scan(tmp_path, digests=True).files
    assert len({spec.sha256 for spec in file.tensors}) == 1
    assert [spec.name for spec in file.tensors] == ["a", "b", "c"]
    assert len(taken) == 1


# ---------------------------------------------------------------- files of no known format

SAFETENSORS_HEADER = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
SAFETENSORS = len(SAFETENSORS_HEADER).to_bytes(8, "little") + SAFETENSORS_HEADER + bytes(16)


@pytest.mark.parametrize(
    ("name", "data", "noun"),
    [
        ("m.safetensors", SAFETENSORS[:50], "a safetensors file"),
        ("m.safetensors", SAFETENSORS[:4], "a safetensors file"),
        ("m.safetensors", b"\x80\x01" + SAFETENSORS[2:], "a safetensors file"),
        ("m.safetensors", bytes(7) + b"\x01" + SAFETENSORS[8:], "a safetensors file"),
        ("m.pt", b"0123456789PK\x03\x04" + bytes(30), "a PyTorch file"),
        ("m.NPY", b"NUMPY\1\0", "an npy array"),
        ("m.npz", b"K\x03\x04", "an npz archive"),
        ("m.gguf", b"GGU", "a GGUF model"),
    ],
)
def test_a_damaged_file_is_told_as_what_its_name_promises(tmp_path: Path, name: str, data: bytes, noun: str) -> None:
    file = only(scan(write(tmp_path / name, data)))
    assert [(f.code, file.format) for f in file.findings] == [("damaged-file", "unknown")]
    assert f"expected {noun}" in file.findings[0].message
    assert "fetch it again" in (file.findings[0].hint or "")
    assert "inert" not in (file.findings[0].hint or "")


def test_an_empty_file_is_no_pickle_that_was_expected(tmp_path: Path) -> None:
    for name, noun in (("m.safetensors", "a safetensors file"), ("x", "tensors, or data")):
        (finding,) = only(scan(write(tmp_path / name, b""))).findings
        assert (finding.code, f"expected {noun}" in finding.message) == ("empty-file", True)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("modeling_x.py", b"import torch\n"),
        ("c.yaml", b"config:\n  a: 1\n"),
        ("P.cfg", b"Property\n"),
        ("HEAD", b"ref: refs/heads/main\n"),
        (".venv", b".venv/\n"),
        ("saved_model.pb", b"\x08\x01stub"),
        ("index", b"DIRC\0\0\0\2"),
        ("notes", b"Version 1\nIt is\n"),
        ("garbage", b"\x97\xfe\xff"),
    ],
)
@pytest.mark.parametrize("policy", ["numpy-quantized", "grok-1"])
def test_what_is_no_pickle_is_not_refused_as_one(tmp_path: Path, name: str, data: bytes, policy: str) -> None:
    file = only(scan(write(tmp_path / name, data), policy=policy))
    assert [(f.code, file.format) for f in file.findings] == [("not-a-pickle", "unknown")]
    assert file.findings[0].message.startswith("of no known format")
    assert "protocols" not in (file.findings[0].hint or "")


@pytest.mark.parametrize("name", ["x.yaml", "m.pt", "m.safetensors", "modeling.py", ".git/HEAD", "a"])
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (pickle.dumps(Exploit(), 0), "global-not-allowed"),
        (pickle.dumps(Exploit(), 1), "global-not-allowed"),
        (pickle.dumps(Exploit(), 2), "global-not-allowed"),
        (b"cos\ngetcwd\n", "global-not-allowed"),
        (b"(ios\ngetcwd\n", "global-not-allowed"),
        (pickle.dumps([1], 0) + b"tail", "data-after-stop"),
    ],
)
def test_an_old_pickle_is_refused_for_what_it_does_whatever_its_name(
    tmp_path: Path, name: str, data: bytes, code: str
) -> None:
    found = [finding.code for finding in only(scan(write(tmp_path / name, data))).findings]
    assert found[0] == code


def test_the_name_of_source_code_gives_its_own_hint(tmp_path: Path) -> None:
    (finding,) = only(scan(write(tmp_path / "modeling_x.py", b"import torch\n"))).findings
    assert (finding.hint or "").startswith("source code does not belong in a checkpoint")


def test_each_file_of_a_folder_that_a_tool_left_names_the_folder(tmp_path: Path) -> None:
    for name, data in (
        (".git/HEAD", b"ref: refs/heads/main\n"),
        (".git/objects/ab/cd", b"x\x01K\xca"),
        (".git/hooks/a.sample", b"#!/bin/sh\n"),
        (".cache/huggingface/download/m.lock", b""),
        (".cache/huggingface/download/m.metadata", b"abc\n1.5\n"),
    ):
        write(tmp_path / "m" / name, data)
    hints = {finding.hint or "" for file in scan(tmp_path / "m").files for finding in file.findings}
    assert {hint.split(",")[0] for hint in hints} == {"remove the folder .git", "remove the folder .cache/huggingface"}


def test_a_checkpoint_in_the_cache_of_the_hub_is_not_told_to_be_removed(tmp_path: Path) -> None:
    path = write(tmp_path / ".cache/huggingface/hub/models--x/snapshots/0/notes.rst", b"hello\n")
    (finding,) = only(scan(path)).findings
    assert "remove the folder" not in (finding.hint or "")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.npy", "notes.txt"], "found 'notes.txt'"),
        (["notes.txt"], "a zip archive that holds 'notes.txt' and no tensors"),
        (["config.json", "model.weights.h5"], "a Keras model"),
        ([], "an empty zip archive"),
    ],
)
def test_an_archive_that_is_none_of_tensors_names_what_is_in_it(tmp_path: Path, names: list[str], message: str) -> None:
    buffer, array = io.BytesIO(), io.BytesIO()
    np.save(array, np.ones(3))
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, array.getvalue() if name.endswith(".npy") else b"x")
    (finding,) = only(scan(write(tmp_path / "n.npz", buffer.getvalue()))).findings
    assert (finding.code, message in finding.message) == ("format-not-supported", True)


def test_a_set_is_not_told_to_be_declared_as_a_record(tmp_path: Path) -> None:
    (finding,) = only(scan(write(tmp_path / "a", b"\x80\x02c__builtin__\nset\n]\x85R."))).findings
    assert finding.code == "global-not-allowed"
    assert "save a list" in (finding.hint or "")
    assert "records" not in (finding.hint or "")
