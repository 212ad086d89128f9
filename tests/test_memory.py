"""The memory under a file: its bytes whatever is asked for, honest reports, and nodes that get their share."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine import memory
from engine.config import EngineConfig
from engine.core import UInt8Array
from engine.errors import ConfigError, OutOfMemory
from engine.memory import HUGE_PAGE, MemoryReport, map_file, report

SIZE = 3 * HUGE_PAGE + 5000  # no multiple of anything


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


def content(path: Path) -> UInt8Array:
    return np.frombuffer(path.read_bytes(), np.uint8)


def replaced(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """Calls that memory makes to C, for the functions given; the others go there."""
    calls: list[tuple[Any, ...]] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            if name not in functions:
                return getattr(real, name)

            def call(*arguments: Any) -> Any:
                calls.append((name, *arguments))
                return functions[name](*arguments)

            return call

    real = memory.lib
    monkeypatch.setattr(memory, "lib", Library())
    return calls


@pytest.mark.parametrize("huge_pages", ["auto", "on", "off"])
def test_the_bytes_are_those_of_the_file(file: Path, huge_pages: Any) -> None:
    data = map_file(file, EngineConfig(huge_pages=huge_pages))
    assert np.array_equal(data, content(file))
    assert not data.flags.writeable or huge_pages == "on"
    assert data.ctypes.data % 4096 == 0


def test_without_huge_pages_there_are_none(file: Path) -> None:
    data = map_file(file, EngineConfig(huge_pages="off"))
    assert data.sum(dtype=np.int64) == content(file).sum(dtype=np.int64)
    found = report(data)
    assert found.huge == 0.0
    assert found.resident == 1.0
    assert found.nbytes == SIZE


def test_a_copy_is_made_only_of_what_has_too_few(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    monkeypatch.setattr(memory, "_copy", lambda descriptor, mapped, nodes: copies.append(len(mapped)) or mapped)
    for share in (0.99, 0.5):
        monkeypatch.setattr(memory, "report", lambda data, share=share: MemoryReport(data.nbytes, 1.0, share, {0: 1.0}))
        map_file(file, EngineConfig(huge_pages="on"))
        map_file(file, EngineConfig(huge_pages="auto"))
    assert copies == [SIZE]


def test_a_copy_that_does_not_fit_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "report", lambda data: MemoryReport(data.nbytes, 1.0, 0.0, {}))
    monkeypatch.setattr(memory, "available_bytes", lambda: SIZE - 1)
    with pytest.raises(OutOfMemory, match=f"{SIZE:,} bytes in huge pages does not fit"):
        map_file(file, EngineConfig(huge_pages="on"))


def test_a_report_brings_nothing_in(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    data = map_file(file)
    first = report(data).resident
    if first == 1.0:
        pytest.skip("this file system keeps its pages")
    assert report(data).resident == first


def test_a_report_for_people() -> None:
    assert MemoryReport(1, 0.5, 0.25, {0: 1.0}).as_text() == "50% in memory, of that 25% in huge pages"
    text = MemoryReport(1, 1.0, 1.0, {1: 0.4, 0: 0.6}).as_text()
    assert text == "100% in memory, of that 100% in huge pages; nodes 0: 60%, 1: 40%"


def test_pages_are_dealt_out_to_all_nodes_while_they_are_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_nodes", lambda: (0, 2))
    calls = replaced(monkeypatch, fm_memory_interleave_thread=lambda nodes: 0)
    assert np.array_equal(map_file(file, EngineConfig()), content(file))
    assert calls == [("fm_memory_interleave_thread", 0b101), ("fm_memory_interleave_thread", 0)]
    calls.clear()
    map_file(file, EngineConfig(numa="off"))
    assert calls == []


def test_one_node_needs_no_dealing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_nodes", lambda: (0,))
    calls = replaced(monkeypatch, fm_memory_interleave_thread=lambda nodes: 0)
    map_file(file, EngineConfig())
    assert calls == []


def test_the_kernel_takes_our_system_calls(file: Path) -> None:
    """With the one node that every machine has; a kernel without NUMA answers ENOSYS."""
    data = map_file(file)
    address = memory.ffi.cast("char *", data.ctypes.data)
    assert memory.lib.fm_memory_interleave_thread(1) in (0, 38)
    assert memory.lib.fm_memory_interleave_thread(0) in (0, 38)
    assert memory.lib.fm_memory_interleave(address, data.nbytes, 1) in (0, 38)
    assert memory.lib.fm_memory_interleave(address, data.nbytes, 0) != 0  # no node at all is an error


def test_locking_beyond_the_limit_says_how_to_raise_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, fm_memory_lock=lambda address, nbytes: 12)
    monkeypatch.setattr(memory, "resource", SimpleNamespace(getrlimit=lambda kind: (8192, 8192), RLIMIT_MEMLOCK=8))
    with pytest.raises(ConfigError, match=r"the limit is 8,192; raise it with `ulimit -l unlimited`"):
        map_file(file, EngineConfig(memory_lock=True))
    monkeypatch.setattr(memory, "resource", SimpleNamespace(getrlimit=lambda kind: (SIZE, SIZE), RLIMIT_MEMLOCK=8))
    with pytest.raises(OutOfMemory, match="cannot be kept in memory"):
        map_file(file, EngineConfig(memory_lock=True))


def test_locked_memory_is_locked(file: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if 0 <= limit < SIZE:
        pytest.skip(f"only {limit} bytes may be locked here")

    def locked() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmLck"))

    before = locked()
    data = map_file(file, EngineConfig(memory_lock=True))
    assert locked() - before == -(-data.nbytes // 4096) * 4
