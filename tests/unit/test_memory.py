"""Claims of `safeload.memory`: how much there is, how much is taken, and memory that is frozen and used again."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safeload import memory
from safeload.errors import StagingError
from safeload.memory import Arena, ArenaPool, available_memory, page_bytes, resident_memory, track

MIB = 1024 * 1024
PAGE = mmap.PAGESIZE


def run(script: str) -> tuple[str, int]:
    """Output and exit status of a script in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout, done.returncode


# --- arenas -------------------------------------------------------------------------------------------------------


def test_an_arena_has_whole_pages_and_starts_as_zeros() -> None:
    arena = Arena(PAGE + 1)
    assert (arena.nbytes, arena.cost, arena.is_reusable) == (2 * PAGE, 2 * PAGE, True)
    assert bytes(arena.readable(0, arena.nbytes)) == bytes(2 * PAGE)


def test_what_is_written_is_what_is_handed_out_and_that_is_read_only() -> None:
    arena = Arena(PAGE)
    with arena.writable(10, 3) as target:
        target[:] = b"abc"
    arena.freeze()
    view = arena.readable(9, 5)
    assert bytes(view) == b"\0abc\0"
    assert view.readonly


@pytest.mark.parametrize(
    "make",
    [
        lambda view: np.frombuffer(view, np.uint8),
        lambda view: np.ndarray((8,), np.uint8, buffer=view),  # its base is the mapping, of which it has no view
        lambda view: view[0:],
        memoryview,
    ],
)
def test_an_arena_is_lent_while_anything_that_was_made_of_it_is_there(make: Callable[[memoryview], object]) -> None:
    arena = Arena(PAGE)
    assert not arena.is_lent()
    view = arena.readable(0, 8)
    assert arena.is_lent()
    made: Any = make(view)
    view.release()
    assert arena.is_lent()
    part = made[2:4]
    del made, view
    assert arena.is_lent()
    del part
    assert not arena.is_lent()


def test_a_frozen_arena_can_be_written_to_again_after_it_was_thawed_and_keeps_its_place() -> None:
    arena = Arena(PAGE)
    arena.freeze()
    with arena.readable(0, 1) as view:
        before = np.frombuffer(view, np.uint8).ctypes.data
    assert not arena.is_lent()
    arena.thaw()
    with arena.writable(0, 1) as target:
        target[0] = 7
        assert ctypes.addressof(ctypes.c_char.from_buffer(target)) == before
    assert bytes(arena.readable(0, 1)) == b"\7"


def test_where_it_cannot_be_told_whether_memory_is_lent_it_counts_as_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping:
        def resize(self, _: int) -> None:
            raise SystemError("mmap: resizing not available--no mremap()")

    arena = Arena(PAGE)
    monkeypatch.setattr(arena, "_mapping", Mapping())
    assert arena.is_lent()


@pytest.mark.parametrize("touched", [0, PAGE, 3 * PAGE - 1, 3 * PAGE, 6 * PAGE])
@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_not_among_the_parts_cannot_be_touched(touched: int, frozen: bool) -> None:
    output, status = run(f"""
        import resource
        from safeload.memory import Arena
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        arena = Arena({7 * PAGE}, parts=[range({PAGE}, {PAGE} + 1), range({2 * PAGE} + 5, {3 * PAGE})])
        if {frozen}:
            arena.freeze()
        print(arena.cost, flush=True)
        print(arena.readable(0, arena.nbytes)[{touched}], flush=True)
    """)
    assert output.startswith(f"{2 * PAGE}\n")
    there = PAGE <= touched < 3 * PAGE
    assert (output, status) == ((f"{2 * PAGE}\n0\n", 0) if there else (f"{2 * PAGE}\n", -signal.SIGSEGV))


def test_an_arena_without_any_part_costs_nothing() -> None:
    arena = Arena(MIB, parts=[])
    assert (arena.cost, arena.is_reusable) == (0, False)
    arena.freeze()


def test_ranges_count_by_the_pages_that_they_lie_on() -> None:
    assert page_bytes([]) == 0
    assert page_bytes([range(1)]) == PAGE
    assert page_bytes([range(PAGE - 1, PAGE + 1)]) == 2 * PAGE
    assert page_bytes([range(1), range(1, 2), range(PAGE, PAGE + 1), range(9 * PAGE, 9 * PAGE + 1)]) == 3 * PAGE


def test_memory_that_the_system_does_not_give_is_operational() -> None:
    with pytest.raises(StagingError, match="cannot take"):
        Arena(2**62)


def test_pages_whose_protection_cannot_be_changed_are_operational(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        @staticmethod
        def mprotect(*_: object) -> int:
            ctypes.set_errno(13)
            return -1

    arena = Arena(PAGE)
    monkeypatch.setattr(memory, "_LIBC", Refusing)
    for change in (arena.freeze, arena.thaw):
        with pytest.raises(StagingError, match="Permission denied"):
            change()


# --- the pool -----------------------------------------------------------------------------------------------------


def taken(pool: ArenaPool, nbytes: int) -> Arena:
    arena = pool.take(nbytes)
    assert arena is not None
    return arena


def test_a_pool_gives_no_more_than_its_limit() -> None:
    pool = ArenaPool(4 * PAGE)
    first = taken(pool, 3 * PAGE)
    assert pool.take(PAGE + 1) is None
    assert taken(pool, PAGE) is not first
    assert pool.nbytes == 4 * PAGE
    assert pool.take(1) is None


def test_a_pool_uses_the_smallest_arena_that_fits_again_and_makes_it_writable() -> None:
    pool = ArenaPool(10 * PAGE)
    large, small = taken(pool, 6 * PAGE), taken(pool, 3 * PAGE)
    for arena in (large, small):
        arena.freeze()
        pool.give_back(arena)
    assert pool.nbytes == 9 * PAGE
    again = taken(pool, 2 * PAGE)
    assert again is small
    with again.writable(0, 1) as target:
        target[0] = 1  # ends the process if it is still frozen
    assert taken(pool, 4 * PAGE) is large


def test_a_pool_gives_up_free_arenas_that_do_not_fit_for_one_that_does() -> None:
    pool = ArenaPool(4 * PAGE)
    first, second = taken(pool, PAGE), taken(pool, PAGE)
    pool.give_back(first)
    pool.give_back(second)
    assert taken(pool, 4 * PAGE).nbytes == 4 * PAGE
    assert pool.nbytes == 4 * PAGE


def test_memory_that_somebody_has_is_not_used_again_and_counts_until_they_let_go() -> None:
    pool = ArenaPool(2 * PAGE)
    arena = taken(pool, 2 * PAGE)
    with arena.writable(0, 4) as target:
        target[:] = b"mine"
    arena.freeze()
    array = np.frombuffer(arena.readable(0, 4), np.uint8)
    pool.give_back(arena)
    assert (pool.nbytes, pool.lent) == (2 * PAGE, 2 * PAGE)
    assert pool.take(1) is None
    assert array.tobytes() == b"mine"
    del array
    assert pool.lent == 0
    assert taken(pool, 1) is arena


def test_what_is_read_in_parts_counts_by_its_parts_and_is_not_used_again() -> None:
    pool = ArenaPool(2 * PAGE)
    arena = pool.take(100 * PAGE, parts=[range(PAGE), range(50 * PAGE, 51 * PAGE)])
    assert arena is not None
    assert (arena.nbytes, pool.nbytes) == (100 * PAGE, 2 * PAGE)
    assert pool.take(PAGE) is None
    pool.give_back(arena)
    assert pool.nbytes == 0
    assert taken(pool, PAGE) is not arena


def test_a_closed_pool_leaves_only_what_somebody_has() -> None:
    pool = ArenaPool(9 * PAGE)
    free, used, kept = (taken(pool, PAGE) for _ in range(3))
    pool.give_back(free)
    view = kept.readable(0, 1)
    pool.close()
    assert [arena._mapping.closed for arena in (free, used, kept)] == [True, True, False]
    assert view[0] == 0
    assert pool.nbytes == 0


# --- how much is taken --------------------------------------------------------------------------------------------


def test_the_peak_is_seen_though_the_memory_is_gone_when_the_context_ends() -> None:
    gc.collect()
    with track(seconds=0.001) as use:
        arena = Arena(64 * MIB)
        with arena.writable(0, 64 * MIB) as target:
            np.frombuffer(target, np.uint8)[:] = 1
        threading.Event().wait(0.1)
        arena.close()
    assert 64 * MIB <= use.growth < 96 * MIB
    assert use.peak == use.before + use.growth
    assert resident_memory() < use.peak - 32 * MIB
    assert use.high_water >= use.before + 64 * MIB


def test_without_a_sample_the_ends_and_the_kernels_mark_are_known() -> None:
    with track(seconds=3600) as use:
        arena = Arena(8 * MIB)
        with arena.writable(0, 8 * MIB) as target:
            np.frombuffer(target, np.uint8)[:] = 1
    assert use.growth >= 8 * MIB - MIB
    assert use.high_water >= use.before


def test_the_kernels_mark_is_never_below_what_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.memory._PROC", tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text("200 100 1")
    (tmp_path / "self" / "status").write_text("VmHWM:\t      4 kB\n")
    with track() as use:
        pass
    assert use.high_water == use.peak == 100 * mmap.PAGESIZE


@pytest.mark.filterwarnings("error")
def test_samples_can_be_further_apart_than_any_wait_lasts() -> None:
    with track(seconds=float("inf")) as use:
        pass
    assert use.peak >= use.before


def test_the_sampler_ends_with_its_context_however_that_is_left() -> None:
    def samplers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "safeload-memory"]

    seen: list[int] = []

    def interrupted() -> None:
        with track():
            seen.append(len(samplers()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (seen, samplers()) == ([1], [])


def test_where_the_kernel_says_nothing_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    with track() as use:
        pass
    assert (use.before, use.peak, use.growth, use.high_water) == (0, 0, 0, 0)


# --- how much memory there is -------------------------------------------------------------------------------------


def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: Mapping[str, str]) -> None:
    for path, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:    1000 kB\n", **tree}.items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")


def test_available_memory_of_this_machine_is_a_plausible_number() -> None:
    assert 2**20 < available_memory() < 2**50


@pytest.mark.parametrize("limit", ["max", str(2**62)])
def test_without_a_cgroups_limit_the_machines_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    group = {"cgroup/a/memory.max": limit, "cgroup/a/memory.current": "1000"}
    system(tmp_path, monkeypatch, {"proc/self/cgroup": "0::/a\n", **group})
    assert available_memory() == 1000 * 1024


def test_a_limit_of_cgroup_v2_counts_less_what_is_used_and_not_only_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = {
        "memory.max": "500000\n",
        "memory.current": "300000\n",
        "memory.stat": "anon 100000\nactive_file 20000\ninactive_file 30000\n",
    }
    tree = {f"cgroup/a/b/{name}": text for name, text in group.items()}
    system(tmp_path, monkeypatch, {"proc/self/cgroup": "0::/a/b\n", **tree})
    assert available_memory() == 500_000 - 300_000 + 50_000


def test_a_limit_of_a_cgroup_above_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "proc/self/cgroup": "0::/a/b\n",
        "cgroup/a/b/memory.max": "max",
        "cgroup/a/b/memory.current": "1",
        "cgroup/a/memory.max": "90000",
        "cgroup/a/memory.current": "100000",
    }
    system(tmp_path, monkeypatch, tree)
    assert available_memory() == 0


@pytest.mark.parametrize("path", ["/", "/of/the/host"])
def test_a_limit_of_cgroup_v1_counts_in_a_container_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    tree = {
        "proc/self/cgroup": f"9:name=systemd:/\n4:cpu,memory:{path}\n0::/\n",
        "cgroup/memory/memory.limit_in_bytes": "600000",
        "cgroup/memory/memory.usage_in_bytes": "500000",
        "cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 7000\ntotal_active_file 1000\n",
    }
    system(tmp_path, monkeypatch, tree)
    assert available_memory() == 108_000


def test_a_system_that_does_not_say_is_operational(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system(tmp_path, monkeypatch, {"proc/meminfo": "MemTotal: 99 kB\n"})
    with pytest.raises(StagingError) as caught:
        available_memory()
    assert "--memory-budget" in str(caught.value.hint)
