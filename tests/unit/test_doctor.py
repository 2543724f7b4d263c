"""What is slow or impossible here is said as what it is: each case is made, and found."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from safeload import cli, doctor
from safeload.doctor import Observation, examine
from safeload.errors import ConfigError, StagingError

SUBJECTS = [
    *("system", "processors", "memory", "frozen-memory", "huge-pages", "sealed-memory", "shared-memory"),
    *("sha256", "blake3", "open-files", "jax", "fickling", "fsspec", "sigstore", "distributed"),
]


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Measured once, in a test of its own: elsewhere a speed is stated."""
    measured = doctor._speed
    monkeypatch.setattr(doctor, "measured_speed", measured, raising=False)

    def be(bytes_per_second: float) -> None:
        monkeypatch.setattr(doctor, "_speed", lambda _new: bytes_per_second)

    be(1.5e9)
    return be


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the kernel says, by path: what a test puts here, and else what it does say."""
    files: dict[str, str] = {}
    read = doctor._read
    monkeypatch.setattr(doctor, "_read", lambda path: files[path] if path in files else read(path))
    return files


def look(subject: str, directory: Path | None = None, **more: bool) -> Observation:
    (found,) = (item for item in examine(directory, **more) if item.subject == subject)
    return found


def refuse(*_: object, **__: object) -> NoReturn:
    raise StagingError("no, for a test")


def test_everything_is_looked_at_in_this_order() -> None:
    assert [item.subject for item in examine()] == SUBJECTS


def test_this_machine_can_load() -> None:
    assert [item.subject for item in examine() if item.level == "refused"] == []


def test_whatever_is_slow_or_refused_says_why_or_what_to_do(kernel: dict[str, str]) -> None:
    kernel["/sys/kernel/mm/transparent_hugepage/enabled"] = "always madvise [never]\n"
    kernel["/sys/fs/cgroup/cpu.max"] = "50000 100000\n"
    bad = [item for item in examine() if item.level in {"slow", "refused"}]
    assert {item.subject for item in bad} >= {"huge-pages", "processors"}
    assert all(item.why and item.hint for item in bad)


def test_memory_that_cannot_be_frozen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.memory.Arena.freeze", refuse)
    assert look("frozen-memory").level == "refused"


def test_memory_that_cannot_be_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", refuse)
    assert look("memory").level == "refused"


def test_memory_is_what_staging_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 3 << 30)
    found = look("memory")
    assert (found.number, found.value) == (3 << 30, "3.0 GiB available")


@pytest.mark.parametrize(
    ("said", "level", "value"),
    [
        ("always [madvise] never\n", "good", "madvise"),
        ("[always] madvise never\n", "good", "always"),
        ("always madvise [never]\n", "slow", "never"),
        ("", "slow", "unknown"),
    ],
)
def test_huge_pages_are_what_the_kernel_chose(kernel: dict[str, str], said: str, level: str, value: str) -> None:
    kernel["/sys/kernel/mm/transparent_hugepage/enabled"] = said
    found = look("huge-pages")
    assert (found.level, found.value) == (level, value)


@pytest.mark.parametrize(
    ("said", "level"), [("max 100000\n", "good"), ("50000 100000\n", "slow"), ("", "good"), ("1 0\n", "good")]
)
def test_a_quota_of_processors_is_seen(kernel: dict[str, str], said: str, level: str) -> None:
    kernel["/sys/fs/cgroup/cpu.max"] = said
    assert look("processors").level == level


def test_sealing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("sealed-memory").value == "works (memfd)"
    monkeypatch.setattr("os.memfd_create", _no_such_call)
    assert (look("sealed-memory").level, look("sealed-memory").value) == ("note", "refused")


def _no_such_call(*_: object) -> NoReturn:
    raise OSError(38, os.strerror(38))


@pytest.mark.parametrize(("rate", "level"), [(1.5e9, "good"), (0.8e9, "good"), (0.79e9, "slow")])
def test_slow_hashing_is_slow(speed: Callable[[float], None], rate: float, level: str) -> None:
    speed(rate)
    found = look("sha256")
    assert (found.level, found.number) == (level, int(rate))


@pytest.mark.parametrize(
    ("cpuinfo", "why"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2\n", "the CPU has no instructions"),
        ("processor\t: 0\nFeatures\t: fp asimd sha1 sha2\n", "OPENSSL_ia32cap"),
        ("processor\t: 0\nflags\t\t: fpu sha_ni\n", "OPENSSL_ia32cap"),
    ],
)
def test_slow_hashing_has_a_cause(
    kernel: dict[str, str], speed: Callable[[float], None], cpuinfo: str, why: str
) -> None:
    kernel["/proc/cpuinfo"] = cpuinfo
    speed(0.2e9)
    assert why in str(look("sha256").why)


def test_hashing_without_openssl_is_told(kernel: dict[str, str], speed: Callable[[float], None]) -> None:
    kernel["/proc/cpuinfo"] = "flags\t: sha_ni\n"
    speed(0.2e9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hashlib.sha256", lambda *_: 0)
        found = look("sha256")
    assert found.why == "this Python was built without OpenSSL"


def test_the_speed_is_that_of_the_hasher() -> None:
    class Slow:
        """Counts what it is given."""

        taken = 0

        def update(self, data: memoryview, /) -> None:
            Slow.taken += len(data)

        def digest(self) -> bytes:
            return b""

        def hexdigest(self) -> str:
            return ""

    assert doctor.measured_speed(Slow) > 0  # type: ignore[attr-defined] # put there by the fixture
    assert Slow.taken == doctor._SAMPLES * doctor._SAMPLE_BYTES


def test_a_package_that_is_missing_is_no_fault_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    found = look("jax")
    assert (found.level, found.value, found.hint) == ("note", "not installed", "pip install '.[jax]' in its repository")


def test_every_extra_that_is_named_exists() -> None:
    import tomllib

    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = set(pyproject["project"]["optional-dependencies"])
    assert {extra for extra, _ in doctor._PACKAGES.values()} - extras == set()


def test_few_open_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (255, 4096))
    assert look("open-files").level == "slow"
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (256, 4096))
    assert look("open-files").level == "good"
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert look("open-files").value == "no limit"


def test_jax_is_asked_only_when_wanted() -> None:
    code = "import sys; from safeload.doctor import examine; examine(); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_devices_of_jax_are_counted() -> None:
    pytest.importorskip("jax")
    found = look("jax-devices", jax=True)
    assert (found.level, found.number) == ("good", 8)  # as tests/conftest.py has it
    assert "cpu" in found.value


def test_a_jax_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(jax, "devices", lambda: (_ for _ in ()).throw(RuntimeError("no \x1b[2J backend")))
    found = look("jax-devices", jax=True)
    assert (found.level, found.value) == ("refused", r"RuntimeError: no \x1b[2J backend")


# ---------------------------------------------------------------- the file system of the target


def test_a_directory_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    subjects = [item.subject for item in examine(tmp_path)]
    assert subjects == [*SUBJECTS, "file-system", "disk-space", "exchange", "reflink"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_directories_that_cannot_be_exchanged_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("exchange", tmp_path).level == "good"
    monkeypatch.setattr("safeload.saving._exchange", refuse)
    found = look("exchange", tmp_path)
    assert (found.level, found.value) == ("refused", "no, for a test")
    assert list(tmp_path.iterdir()) == []


def test_reflinks_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("fcntl.ioctl", lambda _file, request, _source: asked.append(request))
    assert look("reflink", tmp_path).level == "good"
    assert asked == [0x40049409]  # FICLONE of linux/fs.h, on every architecture that Python runs on but a few
    monkeypatch.setattr("fcntl.ioctl", lambda *_: (_ for _ in ()).throw(OSError(95, os.strerror(95))))
    assert look("reflink", tmp_path).level == "note"


def test_a_directory_that_cannot_be_written_to_is_told() -> None:
    found = {item.subject: item.level for item in examine("/proc")}
    assert found["writable"] == "note"
    assert "exchange" not in found


@pytest.mark.parametrize("name", ["missing", "file", "nul\0"])
def test_what_is_no_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError):
        examine(tmp_path / name)


MOUNTS = """\
21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
22 21 {device} / /mnt rw shared:1 - {kind} server:/x rw
23 22 0:99 / /mnt/a\\040b rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("kind", "level"),
    [("nfs4", "slow"), ("fuse.sshfs", "slow"), ("9p", "slow"), ("ext4", "good"), ("xfs", "good"), ("tmpfs", "good")],
)
def test_a_file_system_over_a_network_is_slow(
    tmp_path: Path, kernel: dict[str, str], monkeypatch: pytest.MonkeyPatch, kind: str, level: str
) -> None:
    status = tmp_path.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    kernel["/proc/self/mountinfo"] = MOUNTS.format(device=device, kind=kind)
    monkeypatch.setattr("os.path.realpath", lambda _path: "/mnt/checkpoints")
    found = look("file-system", tmp_path)
    assert (found.value, found.level) == (kind, level)


def test_the_longest_mount_point_decides_and_names_are_unescaped(
    tmp_path: Path, kernel: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel["/proc/self/mountinfo"] = MOUNTS.format(device="0:0", kind="btrfs") + "a line that is none\n"
    for path, kind in (("/mnt/a b/c", "tmpfs"), ("/mnt/ab", "btrfs"), ("/mntx", "ext4")):
        monkeypatch.setattr("os.path.realpath", lambda _path, real=path: real)
        assert doctor._mounted(tmp_path) == kind


def test_where_the_kernel_says_nothing_the_file_system_is_unknown(tmp_path: Path, kernel: dict[str, str]) -> None:
    kernel["/proc/self/mountinfo"] = ""
    assert look("file-system", tmp_path).value == "unknown"


# ---------------------------------------------------------------- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, Any]:
    capsys.readouterr()
    code = cli.main(["doctor", *arguments])
    out = capsys.readouterr().out
    return code, out.splitlines()[-1], json.loads(out) if "--json" in arguments else None


def test_a_machine_that_can_load_is_ready(kernel: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    kernel["/sys/kernel/mm/transparent_hugepage/enabled"] = "[always] madvise never"
    kernel["/sys/fs/cgroup/cpu.max"] = "max 100000"
    assert run(capsys)[:2] == (0, "ready")


def test_slow_is_ready(
    kernel: dict[str, str], speed: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    kernel["/sys/kernel/mm/transparent_hugepage/enabled"] = "[always] madvise never"
    kernel["/sys/fs/cgroup/cpu.max"] = "max 100000"
    speed(1e8)
    assert run(capsys)[:2] == (0, "ready; slow: sha256")


def test_a_machine_that_cannot_load_gives_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("safeload.memory.Arena.freeze", refuse)
    code, last, _ = run(capsys)
    assert code == 2
    assert last.startswith("not ready; refused: frozen-memory")
    code, _, found = run(capsys, "--json")
    assert (code, found["ready"], found["refused"]) == (2, False, ["frozen-memory"])


def test_what_only_one_command_needs_leaves_it_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("safeload.saving._exchange", refuse)
    code, last, _ = run(capsys, str(tmp_path))
    assert code == 0
    assert last.startswith("ready; refused: exchange")


def test_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, found = run(capsys, "--json")
    assert code == 0
    assert set(found) == {"schema", "ready", "slow", "refused", "observations"}
    assert [item["subject"] for item in found["observations"]] == SUBJECTS
    assert set(found["observations"][0]) == {"subject", "level", "value", "why", "hint", "number"}
