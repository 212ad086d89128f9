"""The thread pool runs every item of every job exactly once, with fewer, equal and more items than threads."""

from __future__ import annotations

import pytest

from engine._simd import ffi, lib


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("items", [0, 1, 2, 7, 300])
def test_every_item_once(threads: int, items: int) -> None:
    assert lib.fm_pool_check(threads, items, 500) == 0


def test_no_thread_is_no_pool() -> None:
    assert lib.fm_pool_check(0, 3, 1) == -1


def test_an_unknown_tier_has_no_kernels() -> None:
    best = ffi.string(lib.fm_best_tier()).decode()
    assert best in ("scalar", "ssse3", "avx2", "avx512")
    empty = ffi.new("float[1]")
    assert lib.fm_f32_matmul(b"altivec", empty, 1, 0, 0, empty, 1, ffi.NULL, 0, empty, 1) == -1
