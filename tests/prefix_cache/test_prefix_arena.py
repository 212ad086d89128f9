import numpy as np
import pytest

from prefix_cache.arena import Arena, copy_pieces, pieces
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


def test_pieces_there_and_back_are_inverse_over_odd_sizes():
    arena = Arena(64, 64 * 10)
    views = arena.views(arena.reserve(4), 201)
    source = [np.arange(7, dtype=np.float32), np.arange(60, dtype=np.float16), np.arange(53, dtype=np.uint8)]
    copy_pieces(pieces(views, source, 201))
    back = [np.zeros_like(a) for a in source]
    copy_pieces(pieces(back, views, 201))
    for a, b in zip(source, back, strict=True):
        assert np.array_equal(a, b)


def test_views_join_blocks_that_lie_one_behind_another():
    arena = Arena(64, 64 * 10)
    blocks = arena.reserve(10)
    for index, block in enumerate(blocks):
        arena.view(block)[:] = index
    for chosen, lengths in (([0, 1, 2], [192]), ([0, 2, 3, 9, 8], [64, 128, 64, 64]), ([5], [64])):
        views = arena.views(chosen, 64 * len(chosen) - 10)
        assert [view.size for view in views] == [*lengths[:-1], lengths[-1] - 10]
        expected = np.repeat(chosen, 64)[: 64 * len(chosen) - 10]
        assert np.array_equal(np.concatenate(views), expected)
    arena.release([3, 4, 5, 6])
    assert arena.reserve(4) == [3, 4, 5, 6]
    arena.release([2])
    with pytest.raises(AssertionError):
        arena.views([1, 2], 128)


@pytest.mark.parametrize("size", [0, 200, 202, 500])
def test_wrong_payload_size_is_refused(size):
    arena = Arena(64, 64 * 10)
    views = arena.views(arena.reserve(4), 201)
    with pytest.raises(CacheError, match="expected 201"):
        pieces(views, [np.zeros(size, np.uint8)], 201)
    with pytest.raises(CacheError, match="expected 201"):
        pieces([np.zeros(size, np.uint8)], views, 201)


def test_what_is_written_next_is_prepared_and_no_more():
    block = 1 << 20
    arena = Arena(block, 100 * block, ahead=20)
    touched = []

    def touch(memory):
        touched.append((memory.ctypes.data - arena._memory.ctypes.data, memory.nbytes))

    def prepared():
        touched.clear()
        while arena.prepare(touch):
            pass
        assert arena.is_prepared
        return sum(size for _, size in touched) // block

    assert not arena.is_prepared
    assert prepared() == 20
    assert [start for start, _ in touched] == [0, 16 * block]  # in pieces, so that it can be stopped
    first = arena.reserve(20)
    assert prepared() == 20
    assert touched[0][0] == 20 * block
    arena.release(first[:5])  # written before: ready
    assert prepared() == 0
    arena.reserve(7)
    assert prepared() == 2
    arena.reserve(50)  # more than was ready: what is written by now needs no touch
    assert prepared() == 20
    assert touched[0][0] == 72 * block
    arena.reserve(arena.free)
    assert prepared() == 0
    assert arena.used_bytes == 100 * block
