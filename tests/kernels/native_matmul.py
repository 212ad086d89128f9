"""Calls the native kernels with NumPy arrays, for the tests of this folder. Not a test itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine import formats
from engine._simd import ffi, lib

TIERS = ("scalar", "ssse3", "avx2", "avx512")


def supported(tier: str) -> bool:
    """Whether this processor runs the kernels of `tier`."""
    return TIERS.index(tier) <= TIERS.index(ffi.string(lib.fm_best_tier()).decode())


def aligned(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """A copy that starts at a multiple of 64 bytes, as checkpoints and scratch memory do."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def quantize(tier: str, x: npt.NDArray[np.float32]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x float32 [tokens, cols] -> q int8 [tokens, cols], scale float32 and correction int32 [tokens, cols/32]."""
    tokens, cols = x.shape
    q = aligned(np.zeros((tokens, cols), np.int8))
    scale = np.zeros((tokens, cols // formats.GROUP), np.float32)
    correction = np.zeros((tokens, cols // formats.GROUP), np.int32)
    status = lib.fm_quantize_rows(tier.encode(), floats(x), tokens, cols, int8s(q), floats(scale), int32s(correction))
    assert status == 0
    return q, scale, correction


def q4_matmul(
    tier: str,
    blocks: np.ndarray,
    x: tuple[np.ndarray, np.ndarray, np.ndarray],
    rows: npt.NDArray[np.int32] | None = None,
    tiles: tuple[int, int] | None = None,
) -> npt.NDArray[np.float32]:
    """blocks uint8 [rows/16, cols/64, 576] times quantised tokens -> float32 [tokens, rows of the tiles]."""
    q, scale, correction = x
    tile0, tile1 = tiles or (0, blocks.shape[0])
    tokens = len(q) if rows is None else len(rows)
    y = np.full((tokens, (tile1 - tile0) * formats.BLOCK_ROWS), np.nan, np.float32)
    chosen = ffi.NULL if rows is None else int32s(rows)
    weights = ffi.from_buffer("unsigned char[]", blocks)
    assert (
        lib.fm_q4_matmul(
            *(tier.encode(), weights, q.shape[1], tile0, tile1, int8s(q), floats(scale), int32s(correction)),
            *(len(q), chosen, tokens, floats(y), y.shape[1]),
        )
        == 0
    )
    return y


def f32_matmul(
    tier: str, w: npt.NDArray[np.float32], x: npt.NDArray[np.float32], rows: npt.NDArray[np.int32] | None = None
) -> npt.NDArray[np.float32]:
    """w float32 [rows, cols] times x float32 [tokens, cols] -> float32 [tokens, rows]."""
    tokens = len(x) if rows is None else len(rows)
    y = np.full((tokens, len(w)), np.nan, np.float32)
    chosen = ffi.NULL if rows is None else int32s(rows)
    assert (
        lib.fm_f32_matmul(
            tier.encode(), floats(w), w.shape[1], 0, len(w), floats(x), x.shape[1], chosen, tokens, floats(y), len(w)
        )
        == 0
    )
    return y


def floats(array: np.ndarray) -> object:
    assert array.dtype == np.float32
    return ffi.from_buffer("float[]", array)


def int32s(array: np.ndarray) -> object:
    assert array.dtype == np.int32
    return ffi.from_buffer("int32_t[]", array)


def int8s(array: np.ndarray) -> object:
    assert array.dtype == np.int8
    return ffi.from_buffer("int8_t[]", array)
