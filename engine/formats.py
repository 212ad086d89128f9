"""The packed weight layout of simd_src/blocks.h for NumPy: packing, unpacking and the plain absmax baseline.

A 4-bit matrix is stored in blocks of 16 rows x 64 columns, 576 bytes each: two groups of 32 columns, every row with
its own fp16 scale per group. `weight[n, k] = scale[n, k // 32] * (nibble[n, k] - 8)`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.core import Float32Array, UInt8Array

Float16Array = npt.NDArray[np.float16]

GROUP = 32
BLOCK_ROWS = 16
BLOCK_COLS = 64
BLOCK_BYTES = 576
Q4_ZERO = 8
_SCALE_BYTES = 2 * BLOCK_ROWS * (BLOCK_COLS // GROUP)


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the packed uint8 array of a matrix [..., rows, cols]. Raises ValueError if it cannot be packed."""
    *leading, rows, cols = shape
    if rows % BLOCK_ROWS or cols % BLOCK_COLS:
        raise ValueError(f"a packed matrix needs rows % {BLOCK_ROWS} == 0 and columns % {BLOCK_COLS} == 0, got {shape}")
    return (*leading, rows // BLOCK_ROWS, cols // BLOCK_COLS, BLOCK_BYTES)


def unpacked_shape(packed: tuple[int, ...]) -> tuple[int, ...]:
    """Shape [..., rows, cols] of the matrix in a packed array [..., rows/16, cols/64, 576]."""
    *leading, tiles, blocks, size = packed
    if size != BLOCK_BYTES:
        raise ValueError(f"a packed matrix ends in {BLOCK_BYTES} bytes a block, got shape {packed}")
    return (*leading, tiles * BLOCK_ROWS, blocks * BLOCK_COLS)


def pack_q4(nibbles: UInt8Array, scales: Float16Array) -> UInt8Array:
    """nibbles uint8 [..., rows, cols] in 0..15, scales float16 [..., rows, cols/32] -> blocks, uint8.

    The result has shape [..., rows/16, cols/64, 576]. Raises ValueError if the shape cannot be packed.
    """
    blocks = np.empty(packed_shape(nibbles.shape), np.uint8)
    *leading, tiles, wide, _ = blocks.shape
    # [..., tile, r, block, g, c, low/high, j] -> [..., tile, block, g, c, r, j]
    parts = nibbles.reshape(*leading, tiles, BLOCK_ROWS, wide, 2, 4, 2, 4)
    low = np.moveaxis(parts[..., 0, :], -5, -2)
    high = np.moveaxis(parts[..., 1, :], -5, -2)
    blocks[..., _SCALE_BYTES:] = (low | high << 4).reshape(*leading, tiles, wide, -1)
    ordered = np.moveaxis(scales.reshape(*leading, tiles, BLOCK_ROWS, wide, 2), -3, -1)
    blocks[..., :_SCALE_BYTES] = np.ascontiguousarray(ordered).view(np.uint8).reshape(*leading, tiles, wide, -1)
    return blocks


def unpack_q4(blocks: UInt8Array) -> tuple[UInt8Array, Float16Array]:
    """uint8 [..., rows/16, cols/64, 576] -> nibbles uint8 [..., rows, cols], scales float16 [..., rows, cols/32]."""
    *leading, rows, cols = unpacked_shape(blocks.shape)
    tiles, wide = rows // BLOCK_ROWS, cols // BLOCK_COLS
    quant = blocks[..., _SCALE_BYTES:].reshape(*leading, tiles, wide, 2, 4, BLOCK_ROWS, 4)
    both = np.stack([quant & 15, quant >> 4], axis=-2)  # [..., tile, block, g, c, r, low/high, j]
    nibbles = np.moveaxis(both, -3, -6).reshape(*leading, rows, cols)
    ordered = np.ascontiguousarray(blocks[..., :_SCALE_BYTES]).view(np.float16)
    scales = np.moveaxis(ordered.reshape(*leading, tiles, wide, 2, BLOCK_ROWS), -1, -3)
    return nibbles, scales.reshape(*leading, rows, cols // GROUP)


def dequantize_q4(blocks: UInt8Array) -> Float32Array:
    """uint8 [..., rows/16, cols/64, 576] -> float32 [..., rows, cols]: exactly the values the kernels compute with."""
    nibbles, scales = unpack_q4(blocks)
    centred = (nibbles.astype(np.float32) - Q4_ZERO).reshape(*scales.shape, GROUP)
    weights: Float32Array = (centred * scales.astype(np.float32)[..., None]).reshape(nibbles.shape)
    return weights


def quantize_absmax(weights: Float32Array) -> tuple[UInt8Array, Float16Array]:
    """The plain baseline (Q4_0): per group the entry of largest magnitude becomes -8 exactly, the rest are rounded.

    float32 [..., rows, cols] -> nibbles uint8 [..., rows, cols], scales float16 [..., rows, cols/32].
    """
    groups = weights.reshape(*weights.shape[:-1], weights.shape[-1] // GROUP, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)
    scales = (largest / -Q4_ZERO).astype(np.float16)
    divisor = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
    nibbles = np.clip(np.rint(groups / divisor) + Q4_ZERO, 0, 15).astype(np.uint8)
    return nibbles.reshape(weights.shape), scales[..., 0]
