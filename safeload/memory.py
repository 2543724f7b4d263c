"""Memory: how much there is, how much this process takes, and private memory that is frozen and used again.

Nothing here has a name: no file, no shared memory. What a killed process held is gone with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from safeload.errors import StagingError

SAMPLE_SECONDS = 0.005
"""How often resident memory is looked at: 10 us of work each time, and staging fills some 10 MB in between."""

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mprotect.restype = ctypes.c_int

_PROT_NONE = 0


# ---------------------------------------------------------------- how much there is


def available_memory() -> int:
    """Return how many bytes this process can still take: the machine's or its cgroup's, whichever is less.

    Memory that caches files counts as available, as the kernel takes it back. The machine's number is MemAvailable
    of `/proc/meminfo`; a cgroup's (v2, or the memory controller of v1) is its limit less its use, for the process's
    own group and every one above it.

    Raises:
        StagingError: the kernel does not say.
    """
    machine = _table(_PROC / "meminfo").get("MemAvailable:")
    if machine is None:
        message = "cannot tell how much memory is available"
        raise StagingError(message, hint="say how much to use with --memory-budget")
    return min([machine * 1024, *_cgroup_room()])


def _cgroup_room() -> Iterator[int]:
    for line in _read_text(_PROC / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, limit, use, prefix = _CGROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit, use, prefix = _CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        # In a container the path may be one of the host's, which is not mounted: the top then is our own group.
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            most, used = _read_text(top / group / limit).strip(), _read_text(top / group / use).strip()
            if most.isdecimal() and used.isdecimal():
                kinds = _table(top / group / "memory.stat")
                cached = sum(kinds.get(f"{prefix}{kind}", 0) for kind in ("active_file", "inactive_file"))
                yield max(0, int(most) - int(used) + cached)


def _table(path: Path) -> dict[str, int]:
    """Read a kernel's table of lines that begin with a name and a number."""
    rows = (line.split() for line in _read_text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------- how much is taken


class MemoryUse:
    """What `track` saw, all in bytes; good once its context was left.

    Attributes:
        before: Resident memory of the process when the tracking began.
        peak: The most that was seen since: at the beginning, at the end, and by the samples between.
        high_water: The kernel's own mark of the process's most (VmHWM), which no moment escapes, but which counts from
            the start of the process, not of the tracking; 0 where the kernel does not say. Never less than `peak`,
            though the kernel's counters of several threads lag by some pages.
    """

    def __init__(self) -> None:
        self.before = self.peak = resident_memory()
        self.high_water = 0

    @property
    def growth(self) -> int:
        """How far the peak lies above what was resident before, in bytes."""
        return self.peak - self.before


def resident_memory() -> int:
    """Return how many bytes of this process are in memory, as `/proc/self/statm` has it; 0 where it is not there."""
    fields = _read_text(_PROC / "self" / "statm").split()
    return int(fields[1]) * mmap.PAGESIZE if len(fields) > 1 and fields[1].isdecimal() else 0


@contextlib.contextmanager
def track(*, seconds: float = SAMPLE_SECONDS) -> Iterator[MemoryUse]:
    """Watch how much memory the process has resident while the context lasts.

    A thread samples it, and ends with the context however that is left. What lies between two samples can be missed;
    `high_water` is there to tell.

    Args:
        seconds: From one sample to the next.
    """
    use = MemoryUse()
    done = threading.Event()

    def sample() -> None:
        while not done.wait(min(seconds, threading.TIMEOUT_MAX)):
            use.peak = max(use.peak, resident_memory())

    sampler = threading.Thread(target=sample, name="safeload-memory", daemon=True)
    sampler.start()
    try:
        yield use
    finally:
        done.set()
        sampler.join()
        use.peak = max(use.peak, resident_memory())
        if mark := _table(_PROC / "self" / "status").get("VmHWM:", 0) * 1024:
            use.high_water = max(mark, use.peak)


# ---------------------------------------------------------------- private memory


class Arena:
    """Private anonymous memory: written to, frozen, handed out, and written to again once nobody has any of it.

    Attributes:
        nbytes: Length, a multiple of the page's.
        cost: How many of these bytes can come to be resident; less than `nbytes` where only parts may be used.
        is_reusable: Whether another file can take its place: not where only parts can be used, as those are one file's.
    """

    def __init__(self, nbytes: int, *, parts: Sequence[range] | None = None) -> None:
        """Map the memory.

        Args:
            nbytes: How much is needed; rounded up to pages.
            parts: The only bytes that will be used, in order and not overlapping: what lies on other pages is never
                there, and whoever touches it ends the process (SIGSEGV). None for all.

        Raises:
            StagingError: The system does not give it.
        """
        self.nbytes = page_bytes([range(nbytes)])
        self.is_reusable = parts is None
        self._usable = (range(self.nbytes),) if parts is None else _whole_pages(parts)
        self.cost = sum(map(len, self._usable))
        try:
            self._mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as err:
            message = f"cannot take {self.nbytes} bytes of memory: {err.strerror}"
            raise StagingError(message, hint="free memory, or raise the process's limit (ulimit -v)") from err
        self._references = sys.getrefcount(self._mapping)
        # Small pages would cost as much to touch as the bytes cost to hash. It is a hint: kernels may lack it.
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        if parts is not None:
            self._protect(range(self.nbytes), _PROT_NONE)
            self.thaw()

    def writable(self, start: int, nbytes: int) -> memoryview:
        """Lend bytes to write to; the borrower releases them."""
        with memoryview(self._mapping) as everything:
            return everything[start : start + nbytes]

    def readable(self, start: int, nbytes: int) -> memoryview:
        """Hand out bytes, read-only; whoever holds them, or what was made from them, keeps the memory alive."""
        with memoryview(self._mapping) as everything, everything.toreadonly() as frozen:
            return frozen[start : start + nbytes]

    def freeze(self) -> None:
        """Make the pages read-only: from here on a write through any alias ends the process (SIGSEGV).

        Raises:
            StagingError: The system refuses.
        """
        for part in self._usable:
            self._protect(part, mmap.PROT_READ)

    def thaw(self) -> None:
        """Make the pages writable again. Only for memory that nobody has, see `is_lent`.

        Raises:
            StagingError: The system refuses.
        """
        for part in self._usable:
            self._protect(part, mmap.PROT_READ | mmap.PROT_WRITE)

    def is_lent(self) -> bool:
        """Whether anybody has a view of the memory, or something that was made from one."""
        # An array of numpy can do with a reference to what its buffer belongs to, and hold no view of it.
        if sys.getrefcount(self._mapping) > self._references:
            return True
        try:
            # Python refuses to move memory of which there are views; to its own size it moves nowhere.
            self._mapping.resize(self.nbytes)
        except (BufferError, OSError, SystemError, ValueError):
            return True  # also where it cannot be told
        return False

    def close(self) -> None:
        """Give the memory back; where somebody still has some of it, it goes when they let go."""
        with contextlib.suppress(BufferError):
            self._mapping.close()

    def _protect(self, part: range, protection: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping)) + part.start
        if _LIBC.mprotect(address, len(part), protection):
            number = ctypes.get_errno()
            raise StagingError(f"cannot change the protection of staged memory: {os.strerror(number)}")


def page_bytes(parts: Sequence[range]) -> int:
    """Return how many bytes the pages have that some ranges of bytes, in order, lie on."""
    return sum(map(len, _whole_pages(parts)))


def _whole_pages(parts: Sequence[range]) -> tuple[range, ...]:
    """Widen ranges of bytes to pages, and join those that then touch."""
    pages: list[range] = []
    for part in parts:
        start = part.start // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-part.stop // mmap.PAGESIZE) * mmap.PAGESIZE
        if pages and start <= pages[-1].stop:
            pages[-1] = range(pages[-1].start, max(stop, pages[-1].stop))
        else:
            pages.append(range(start, stop))
    return tuple(pages)


class ArenaPool:
    """Arenas whose sum never exceeds a limit, and whose pages, touched once, are used again.

    To touch a fresh page can cost more than to hash what is read into it. Called from one thread.

    Attributes:
        limit: Most bytes of all arenas that are alive, in use or not.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[Arena] = []
        self._in_use: list[Arena] = []
        self._lent: list[Arena] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas that are alive."""
        return sum(arena.cost for arena in (*self._free, *self._in_use, *self._lent))

    @property
    def lent(self) -> int:
        """Bytes of the arenas that were given back here while somebody else still had some of them."""
        self._look_at_lent()
        return sum(arena.cost for arena in self._lent)

    def take(self, nbytes: int, *, parts: Sequence[range] | None = None) -> Arena | None:
        """Return an arena of at least this length, all of it writable; None where the limit leaves no room.

        Args:
            nbytes: As for an `Arena`.
            parts: As for an `Arena`.

        Raises:
            StagingError: The system does not give the memory.
        """
        self._look_at_lent()
        needed = page_bytes([range(nbytes)] if parts is None else parts)
        if parts is None:
            fitting = [arena for arena in self._free if arena.nbytes >= nbytes]
            if fitting:
                arena = min(fitting, key=lambda arena: arena.nbytes)
                self._free.remove(arena)
                arena.thaw()
                self._in_use.append(arena)
                return arena
        while self._free and self.nbytes + needed > self.limit:
            self._free.pop().close()
        if self.nbytes + needed > self.limit:
            return None
        arena = Arena(nbytes, parts=parts)
        self._in_use.append(arena)
        return arena

    def give_back(self, arena: Arena) -> None:
        """Take an arena back. Its pages are used again only once nobody has any of them."""
        self._in_use.remove(arena)
        self._lent.append(arena)
        self._look_at_lent()

    def close(self) -> None:
        """Give all memory back to the system but what somebody else has, which goes when they let go."""
        for arena in (*self._free, *self._in_use, *self._lent):
            arena.close()
        self._free, self._in_use, self._lent = [], [], []

    def _look_at_lent(self) -> None:
        for arena in [arena for arena in self._lent if not arena.is_lent()]:
            self._lent.remove(arena)
            if arena.is_reusable:
                self._free.append(arena)
            else:
                arena.close()


def collect_garbage() -> None:
    """Free what only cycles of dead objects hold: arrays that nobody can reach any more still hold their memory."""
    gc.collect()
