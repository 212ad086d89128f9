import numpy as np
import pytest

from prefix_cache.arena import Arena, gather, scatter
from prefix_cache.key import CacheError


def test_capacity_is_never_exceeded():
    arena = Arena(64, 64 * 5 + 63)
    assert arena.blocks == 5
    first = arena.reserve(3)
    assert arena.reserve(3) is None
    assert arena.used_bytes == 192
    arena.release(first)
    assert arena.used_bytes == 0
    assert arena.high_water == 3


def test_double_release_is_a_bug():
    arena = Arena(64, 640)
    (block,) = arena.reserve(1)
    arena.release([block])
    with pytest.raises(AssertionError):
        arena.release([block])


@pytest.mark.parametrize("block_bytes", [0, 100, -64])
def test_bad_block_size_is_refused(block_bytes):
    with pytest.raises(CacheError):
        Arena(block_bytes, 1 << 20)


def test_capacity_below_one_block_is_refused():
    with pytest.raises(CacheError, match="no block"):
        Arena(128, 100)


def test_scatter_and_gather_are_inverse_over_odd_sizes():
    arena = Arena(64, 64 * 10)
    views = [arena.view(b) for b in arena.reserve(4)]
    views[-1] = views[-1][:9]
    source = [np.arange(7, dtype=np.float32), np.arange(60, dtype=np.float16), np.arange(53, dtype=np.uint8)]
    scatter(source, views, 201)
    back = [np.zeros_like(a) for a in source]
    gather(views, back, 201)
    for a, b in zip(source, back, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("size", [0, 200, 202, 500])
def test_wrong_payload_size_is_refused(size):
    arena = Arena(64, 64 * 10)
    views = [arena.view(b) for b in arena.reserve(4)]
    views[-1] = views[-1][:9]
    with pytest.raises(CacheError, match="expected 201"):
        scatter([np.zeros(size, np.uint8)], views, 201)
    with pytest.raises(CacheError, match="expected 201"):
        gather(views, [np.zeros(size, np.uint8)], 201)
