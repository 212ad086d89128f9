"""engine/formats.py states the same layout as simd_src/blocks.h, and packing loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from native_matmul import floats

from engine import formats
from engine._simd import ffi, lib


def test_numbers_are_those_of_the_c_header() -> None:
    numbers = ffi.new("int[6]")
    assert lib.fm_layout_numbers(numbers) == 6
    assert list(numbers) == [
        formats.GROUP,
        formats.BLOCK_ROWS,
        formats.BLOCK_COLS,
        formats.BLOCK_BYTES,
        formats.Q4_ZERO,
        64,
    ]


def test_every_byte_is_where_the_header_says() -> None:
    """One weight at a time: row r, column 32 g + 8 c + 4 h + j is nibble h of quant[g][c][r][j]."""
    scales = np.zeros((16, 2), np.float16)
    for row, col in [(0, 0), (3, 2), (15, 63), (7, 36), (9, 27)]:
        nibbles = np.zeros((16, 64), np.uint8)
        nibbles[row, col] = 11
        block = formats.pack_q4(nibbles, scales)[0, 0]
        g, c, high, j = col // 32, col % 32 // 8, col % 8 // 4, col % 4
        expected = np.zeros(formats.BLOCK_BYTES, np.uint8)
        expected[64 + ((g * 4 + c) * 16 + row) * 4 + j] = 11 << (4 * high)
        assert np.array_equal(block, expected)
    scales[5, 1] = 1.5
    block = formats.pack_q4(np.zeros((16, 64), np.uint8), scales)[0, 0]
    assert block[:64].view(np.float16)[16 + 5] == 1.5
    assert np.count_nonzero(block[:64].view(np.float16)) == 1


@pytest.mark.parametrize("shape", [(16, 64), (80, 576), (3, 32, 128), (2, 2, 16, 64)])
def test_unpack_inverts_pack(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    nibbles = rng.integers(0, 16, shape, np.uint8)
    scales = rng.standard_normal((*shape[:-1], shape[-1] // 32)).astype(np.float16)
    blocks = formats.pack_q4(nibbles, scales)
    assert blocks.shape == formats.packed_shape(shape)
    assert formats.unpacked_shape(blocks.shape) == shape
    again = formats.unpack_q4(blocks)
    assert np.array_equal(again[0], nibbles)
    assert np.array_equal(again[1], scales)


@pytest.mark.parametrize("shape", [(15, 64), (16, 32), (16, 96)])
def test_a_shape_that_does_not_fit_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="rows % 16"):
        formats.packed_shape(shape)


def test_c_reads_a_row_as_python_does() -> None:
    rng = np.random.default_rng(2)
    scales = rng.standard_normal((48, 6)).astype(np.float16)
    scales[0, 0], scales[1, 0] = np.float16(6e-8), np.float16(-65504)  # subnormal and largest
    blocks = formats.pack_q4(rng.integers(0, 16, (48, 192), np.uint8), scales)
    weights = formats.dequantize_q4(blocks)
    for row in (0, 1, 17, 47):
        out = np.empty(192, np.float32)
        lib.fm_q4_row_floats(ffi.from_buffer("unsigned char[]", blocks), 192, row, floats(out))
        assert np.array_equal(out, weights[row])


def test_absmax_keeps_the_largest_weight_and_bounds_the_rest() -> None:
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((32, 128)).astype(np.float32)
    weights[4, :32] = 0
    nibbles, scales = formats.quantize_absmax(weights)
    again = formats.dequantize_q4(formats.pack_q4(nibbles, scales))
    step = np.abs(scales.astype(np.float32)).repeat(32, -1)
    # The code runs from -8 to 7 steps: the entry opposite to the largest may be cut by one step.
    assert np.all(np.abs(again - weights) <= step * 1.01 + 1e-7)
    assert np.array_equal(again[4, :32], np.zeros(32))
