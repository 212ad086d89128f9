"""Copies of states by all threads: every byte, whatever sizes and places. Memory made ready while others write."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine._simd import ffi, lib

POPULATE_WRITE = 23
UNKNOWN_ADVICE = 12345
SIZE = 5 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture(params=[1, 2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = lib.fm_pool_create(request.param, ffi.NULL)
    yield made
    lib.fm_pool_destroy(made)


@pytest.mark.parametrize("shift", [0, 1, 16])
def test_every_piece_is_copied_and_nothing_else(pool: Any, shift: int) -> None:
    sizes = [0, 1, 63, 64, 65, 1000, 4096, 100_003, 1 << 20]
    rng = np.random.default_rng(shift)
    sources = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    room = [np.full(size + 300, 7, np.uint8) for size in sizes]
    targets = []
    for memory, size in zip(room, sizes, strict=True):
        begin = -memory.ctypes.data % 64 + 64 + shift
        targets.append(memory[begin : begin + size])
    to = ffi.new("void *[]", [ffi.cast("void *", target.ctypes.data) for target in targets])
    out_of = ffi.new("void *[]", [ffi.cast("void *", source.ctypes.data) for source in sources])
    lib.fm_snapshot_copy(pool, len(sizes), to, ffi.cast("const void **", out_of), ffi.new("size_t[]", sizes))
    for memory, target, source in zip(room, targets, sources, strict=True):
        assert np.array_equal(target, source)
        target[:] = 7
        assert (memory == 7).all()


def anonymous() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def resident(memory: np.ndarray) -> np.ndarray:
    found = np.zeros(SIZE // PAGE, np.uint8)
    assert lib.fm_memory_resident(ffi.from_buffer(memory), SIZE, ffi.from_buffer(found)) == 0
    return found & 1


@pytest.mark.parametrize("advice", [POPULATE_WRITE, UNKNOWN_ADVICE])
def test_touched_memory_is_there_and_the_rest_is_not(advice: int) -> None:
    memory = anonymous()
    begin, end = PAGE * 3 + 100, SIZE - 5 * PAGE - 10  # parts of the pages at both ends
    part = memory[begin:end]
    lib.fm_snapshot_touch(ffi.from_buffer(part), part.nbytes, advice)
    expected = np.zeros(SIZE // PAGE)
    expected[3 : SIZE // PAGE - 5] = 1
    assert np.array_equal(resident(memory), expected)
    assert not memory.any()


@pytest.mark.parametrize("advice", [POPULATE_WRITE, UNKNOWN_ADVICE])
def test_what_others_write_meanwhile_stays(advice: int) -> None:
    for seed in range(10):
        memory = anonymous()
        content = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
        thread = threading.Thread(target=np.copyto, args=(memory, content))
        thread.start()
        lib.fm_snapshot_touch(ffi.from_buffer(memory), SIZE, advice)
        lib.fm_snapshot_touch(ffi.from_buffer(memory), SIZE, advice)
        thread.join()
        assert np.array_equal(memory, content)
