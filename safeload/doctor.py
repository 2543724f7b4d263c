"""What this machine makes slow or impossible, found out by doing it: memory, hashing, file systems, packages.

Each observation comes of the operation that a run would do (map and freeze memory, exchange two directories), and not
of a version number. Only the names of CPU features, file systems and packages are looked up.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from safeload.digests import HASH_CHUNK_BYTES, INSTALL_BLAKE3, Hasher, has_blake3, new_hasher
from safeload.errors import ConfigError, SafeloadError, StagingError, escape, reason
from safeload.memory import Arena, available_memory
from safeload.parallel import n_processors
from safeload.sizes import human_size

Level: TypeAlias = Literal["good", "note", "slow", "refused"]
"""How it will be: as it should, worth knowing, slower than it could be, or impossible."""

_SAMPLE_BYTES: Final = 8 * 1024 * 1024
"""How much is hashed to measure the speed: 5 ms of SHA-256 with the CPU's help, and 30 ms without."""

_SAMPLES: Final = 8
"""How often; the fastest counts, as everything else that runs only slows one down."""

_SLOW_SHA256: Final = 0.8e9
"""Bytes a second of one thread. Code without the CPU's SHA instructions stays below, code with them lies above."""

_FEW_FILES: Final = 256
"""Open files that a process may have: below this, many directories at once, or many connections, can run out."""

_SHA_FEATURES: Final = frozenset({"sha_ni", "sha2"})
"""What /proc/cpuinfo calls instructions for SHA-256: on x86-64, and on 64-bit Arm."""

_REMOTE: Final = frozenset({"9p", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs"})
"""File systems whose bytes come over a network or from a host, by the kernel's names; and so all of FUSE."""

_FICLONE: Final = 0x40049409  # FICLONE of linux/fs.h: _IOW(0x94, 9, int)

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - nothing is written there

_SEALS: Final = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, SHRINK, GROW and WRITE of linux/fcntl.h

_PACKAGES: Final = MappingProxyType(
    {
        "jax": ("jax", "to load into JAX"),
        "blake3": ("blake3", "for `sign --blake3`, and to use such digests"),
        "fickling": ("explain", "to decompile what `explain` shows"),
        "fsspec": ("fsspec", "to fetch from object stores"),
        "sigstore": ("sigstore", "to verify Sigstore bundles"),
        "distributed": ("dask", "to audit on a Dask cluster"),
    }
)
"""The package of each extra, the extra, and what it is for."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing about this machine that matters to a run.

    Attributes:
        subject: Stable kebab-case name of what was looked at, for machines.
        level: How it will be.
        value: What was found, for people.
        why: What follows from it; None where nothing does.
        hint: What to do about it; None where there is nothing to do.
        number: What was measured, in bytes, bytes a second or a count; None where it is no number.
    """

    subject: str
    level: Level
    value: str
    why: str | None = None
    hint: str | None = None
    number: int | None = None


CORE: Final = frozenset({"system", "memory", "frozen-memory"})
"""What has to work before anything can be loaded; the rest belongs to single commands."""


def examine(directory: str | Path | None = None, *, jax: bool = False) -> tuple[Observation, ...]:
    """Say what will be slow or refused on this machine, and why.

    Args:
        directory: Where checkpoints shall be written; what its file system can do is tried in a directory that is made
            in it and removed again. None to leave file systems out.
        jax: Whether to import JAX and ask it for its devices, which takes seconds and may take a GPU's memory.

    Returns:
        What was found, in a fixed order.

    Raises:
        ConfigError: `directory` is no directory that can be looked at.
    """
    found = [_system(), _processors(), _memory(), _frozen_memory(), _huge_pages(), _sealed_memory(), _shared_memory()]
    found += [_sha256(), _blake3(), _open_files(), *_packages()]
    if jax:
        found.append(_jax_devices())
    if directory is not None:
        found += _file_system(Path(directory))
    return tuple(found)


# ---------------------------------------------------------------- the machine


def _system() -> Observation:
    kernel = os.uname()
    value = f"Python {platform.python_version()} on {kernel.sysname} {kernel.release}, {kernel.machine}"
    if kernel.sysname == "Linux":
        return Observation("system", "good", value)
    return Observation(
        "system", "refused", value, "safeload needs Linux: how it opens files and freezes memory is Linux's"
    )


def _processors() -> Observation:
    usable, quota = n_processors(), _cpu_quota()
    value = f"{usable} usable"
    if quota is not None and quota < usable:
        why = f"the container may use {quota:.2g} of them: {usable} threads share that"
        return Observation("processors", "slow", value, why, "raise the container's CPU limit", usable)
    return Observation("processors", "good", value, "files are hashed by as many threads", None, usable)


def _cpu_quota() -> float | None:
    """Return how many processors the cgroup (v2) of this process may use, None where nothing says so."""
    most, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    return int(most) / int(period) if most.isdecimal() and period.isdecimal() and int(period) else None


def _memory() -> Observation:
    try:
        room = available_memory()
    except StagingError as err:
        return Observation("memory", "refused", "unknown", err.message, err.hint)
    why = "`load` stages in it: a checkpoint that does not fit needs --memory-budget, a file that does not is refused"
    return Observation("memory", "good", f"{human_size(room)} available", why, None, room)


def _frozen_memory() -> Observation:
    try:
        arena = Arena(mmap.PAGESIZE)
        try:
            arena.freeze()
            arena.thaw()
        finally:
            arena.close()
    except StagingError as err:
        why = "`load` is refused: bytes that were hashed could be changed before they are used"
        return Observation("frozen-memory", "refused", err.message, why, "allow mprotect (seccomp, SELinux)")
    return Observation("frozen-memory", "good", "works (mprotect)")


def _huge_pages() -> Observation:
    chosen = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = chosen.partition("[")[2].partition("]")[0] or "unknown"
    if mode in {"always", "madvise"}:
        return Observation("huge-pages", "good", mode)
    why = "`load` touches fresh memory 4 KiB at a time, which can cost as much as hashing it"
    hint = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Observation("huge-pages", "slow", mode, why, hint)


def _sealed_memory() -> Observation:
    works = False
    try:
        fd = os.memfd_create("safeload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            works = True
        finally:
            os.close(fd)
    except OSError:
        pass
    why = "not used: staged memory is private, and is frozen in place of sealed"
    return Observation("sealed-memory", "good" if works else "note", "works (memfd)" if works else "refused", why)


def _shared_memory() -> Observation:
    try:
        size = shutil.disk_usage(_SHARED_MEMORY).total
    except OSError:
        return Observation("shared-memory", "note", f"no {_SHARED_MEMORY}", "not used: nothing is staged there")
    why = "not used: staging takes no shared memory, so a container's 64 MiB are no limit"
    return Observation("shared-memory", "good", f"{_SHARED_MEMORY} of {human_size(size)}", why, None, size)


def _open_files() -> Observation:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return Observation(
            "open-files", "good", "no limit" if soft == resource.RLIM_INFINITY else str(soft), number=soft
        )
    return Observation(
        "open-files", "slow", str(soft), "many directories at once may run out of them", "ulimit -n 1024", soft
    )


# ---------------------------------------------------------------- hashing


def _sha256() -> Observation:
    speed = _speed(lambda: new_hasher("sha256"))
    # Which code computes it: OpenSSL's chooses by CPU, CPython's own (`_sha2`) does not use its instructions.
    is_openssl = type(hashlib.sha256()).__module__ == "_hashlib"
    features = _SHA_FEATURES & _cpu_features()
    by = "OpenSSL" if is_openssl else "Python's own code, without OpenSSL"
    value = f"{_gigabytes(speed)} a thread, by {by}" + (f" and the CPU's {min(features)}" if features else "")
    if speed >= _SLOW_SHA256:
        return Observation("sha256", "good", value, "every byte is hashed once", None, int(speed))
    if not features:
        why, hint = (
            "the CPU has no instructions for SHA-256, or hides them",
            "sign with --blake3: such loads hash faster",
        )
    elif not is_openssl:
        why, hint = "this Python was built without OpenSSL", "use another build of Python"
    else:
        why, hint = (
            "a slow processor, or OPENSSL_ia32cap hides its instructions",
            "sign with --blake3: such loads hash faster",
        )
    return Observation("sha256", "slow", value, why, hint, int(speed))


def _blake3() -> Observation:
    if not has_blake3():
        return Observation("blake3", "note", "not installed", "optional", INSTALL_BLAKE3)
    speed = _speed(lambda: new_hasher("blake3"))
    why = "used where a manifest has BLAKE3 digests"
    return Observation("blake3", "good", f"{_gigabytes(speed)} a thread", why, None, int(speed))


def _speed(new: Callable[[], Hasher]) -> float:
    """Return how many bytes one thread hashes in a second, in pieces as a run takes them."""
    piece = memoryview(bytes(HASH_CHUNK_BYTES))
    best = float("inf")
    for _ in range(_SAMPLES):
        # The thread's own time: what others take of the processor meanwhile says nothing about it.
        hasher, began = new(), time.thread_time()
        for _ in range(_SAMPLE_BYTES // HASH_CHUNK_BYTES):
            hasher.update(piece)
        hasher.digest()
        best = min(best, time.thread_time() - began)
    return _SAMPLE_BYTES / max(best, 1e-9)


def _cpu_features() -> frozenset[str]:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, words = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(words.split())
    return frozenset()


def _gigabytes(speed: float) -> str:
    return f"{speed / 1e9:.2f} GB/s"


# ---------------------------------------------------------------- packages


def _packages() -> Iterator[Observation]:
    for package, (extra, use) in _PACKAGES.items():
        if package == "blake3":
            continue  # measured above
        # Found and not imported: importing some of them takes seconds.
        if importlib.util.find_spec(package) is None:
            yield Observation(
                package, "note", "not installed", f"optional, {use}", f"pip install '.[{extra}]' in its repository"
            )
        else:
            yield Observation(package, "good", _version(package), use)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"


def _jax_devices() -> Observation:
    if importlib.util.find_spec("jax") is None:
        return Observation(
            "jax-devices", "refused", "JAX is not installed", None, "pip install '.[jax]' in its repository"
        )
    try:
        import jax

        devices = jax.devices()
    except Exception as err:  # noqa: BLE001 - a driver's failures have no common class, and each is an answer here
        return Observation("jax-devices", "refused", escape(f"{type(err).__name__}: {err}"), "JAX finds no device")
    kinds = sorted({f"{device.platform} ({device.device_kind})" for device in devices})
    return Observation("jax-devices", "good", f"{len(devices)}: {escape(', '.join(kinds))}", number=len(devices))


# ---------------------------------------------------------------- where checkpoints shall lie


def _file_system(directory: Path) -> Iterator[Observation]:
    """Yield what the file system of a directory is and can do, tried in a directory of its own.

    Raises:
        ConfigError: It is no directory that can be looked at.
    """
    try:
        kind, free = _mounted(directory), shutil.disk_usage(directory).free
        is_directory = directory.is_dir()
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot look at {escape(str(directory))}: {reason(err)}", hint="check the path") from err
    if not is_directory:
        raise ConfigError(f"expected a directory, found the file {escape(str(directory))}", hint="name its directory")
    is_remote = kind in _REMOTE or kind.startswith("fuse")
    why = (
        "its bytes come over a network or from a host: every byte is read once, so that is the speed"
        if is_remote
        else None
    )
    yield Observation("file-system", "slow" if is_remote else "good", escape(kind), why)
    yield Observation("disk-space", "good", f"{human_size(free)} free", None, None, free)
    try:
        with tempfile.TemporaryDirectory(prefix=".safeload-doctor-", dir=directory) as probe:
            yield _exchange(Path(probe))
            yield _reflink(Path(probe))
    except OSError as err:
        why = "`fetch`, `convert`, `sign` and reports cannot write here; `scan`, `verify` and `load` can read"
        yield Observation("writable", "note", f"no: {reason(err)}", why)


def _exchange(probe: Path) -> Observation:
    from safeload.saving import publishing_directory

    try:
        for content in ("old", "new"):
            with publishing_directory(probe / "checkpoint", replace=True) as fresh:
                (fresh / "file").write_text(content, encoding="ascii")
    except SafeloadError as err:
        why = "a new checkpoint cannot take an old one's place; to a new directory it can be written"
        return Observation("exchange", "refused", escape(str(err)), why, "write to a new directory, or to another disk")
    return Observation("exchange", "good", "works (renameat2)", "a checkpoint is replaced in one step")


def _reflink(probe: Path) -> Observation:
    (probe / "source").write_bytes(bytes(mmap.PAGESIZE))
    with (probe / "source").open("rb") as source, (probe / "target").open("wb") as target:
        try:
            fcntl.ioctl(target, _FICLONE, source.fileno())
        except OSError as err:
            why = "what `fetch` takes from another copy is copied, which takes its time and its room"
            return Observation("reflink", "note", f"no: {reason(err)}", why, "XFS and Btrfs can")
    return Observation("reflink", "good", "works (FICLONE)", "what `fetch` takes from another copy takes no room")


def _mounted(path: Path) -> str:
    """Return the kernel's name of the file system that a path lies on; "unknown" where it cannot be told."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(path)
    best, kind = -1, "unknown"
    for line in _read("/proc/self/mountinfo").splitlines():
        # Fields of proc(5): id, parent, major:minor, root, mount point, options, tags..., "-", type, source.
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after.strip():
            continue
        point = fields[4].encode("ascii", "backslashreplace").decode("unicode_escape")  # \040 is a space
        lies_below = point in {"/", real} or real.startswith(f"{point}/")
        # Btrfs gives each subvolume a device of its own, which no line has: there the longest mount point decides.
        score = len(point) + (1 << 16 if fields[2] == wanted else 0)
        if lies_below and score >= best:
            best, kind = score, after.split()[0]
    return kind


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
