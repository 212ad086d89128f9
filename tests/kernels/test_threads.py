"""The thread pool: every item once, whatever the counts; misuse and forks end well; busy neighbours are survived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from engine._simd import ffi, lib


def trial(threads: int, jobs: int, items: int, spin_cycles: int = 0) -> tuple[float, list[int], list[int]]:
    """Seconds, how often each item ran, and how many items each worker ran."""
    visits, worker_items = ffi.new("int[]", max(items, 1)), ffi.new("int[]", max(threads, 1))
    seconds = lib.fm_pool_trial(threads, ffi.NULL, jobs, items, spin_cycles, visits, worker_items)
    return seconds, list(visits)[:items], list(worker_items)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("items", [0, 1, 2, 7, 300])
def test_every_item_once(threads: int, items: int) -> None:
    seconds, visits, worker_items = trial(threads, 300, items)
    assert seconds >= 0
    assert visits == [300] * items
    assert sum(worker_items) == 300 * items


def test_workers_take_part() -> None:
    _, visits, worker_items = trial(3, 20, 60, spin_cycles=200_000)
    assert visits == [20] * 60
    assert all(count > 0 for count in worker_items)


def test_no_thread_is_no_pool() -> None:
    assert trial(0, 1, 3)[0] == -1


def test_a_cpu_that_does_not_exist_leaves_the_worker_unpinned() -> None:
    visits, worker_items = ffi.new("int[4]"), ffi.new("int[2]")
    assert lib.fm_pool_trial(2, ffi.new("int[2]", [0, 1 << 20]), 5, 4, 0, visits, worker_items) >= 0
    assert list(visits) == [5] * 4


@pytest.mark.parametrize("threads", [1, 2])
def test_a_job_within_a_job_is_refused(threads: int) -> None:
    code = f"from engine._simd import lib; lib.fm_pool_trial_nested({threads})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == -signal.SIGABRT
    assert "called from within a task" in ended.stderr


@pytest.mark.parametrize("threads", [1, 3])
def test_a_forked_child_runs_alone_and_lets_go(threads: int) -> None:
    assert lib.fm_pool_trial_fork(threads) == 0


def test_the_caller_gets_its_processors_back() -> None:
    before = os.sched_getaffinity(0)
    visits, worker_items = ffi.new("int[4]"), ffi.new("int[2]")
    cpus = ffi.new("int[2]", [min(before), max(before)])
    assert lib.fm_pool_trial(2, cpus, 5, 4, 0, visits, worker_items) >= 0
    assert os.sched_getaffinity(0) == before
