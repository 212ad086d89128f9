"""Symmetric 4-bit groups of 32 with an fp16 scale, chosen to lose least at the same bytes (simd_src/quantizer.c).

Two strengths: a scale search per group, weighted by how much each input column matters; and second-order error
feedback, where the columns still to be rounded make up for what the earlier ones lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine._simd import ffi, lib
from engine.core import Float32Array, UInt8Array
from engine.formats import BLOCK_BYTES, BLOCK_COLS, BLOCK_ROWS

ALGORITHM = "quantizer-2"  # part of a resumable plan: change it whenever the bytes change
REFINE_SWEEPS = 3  # further ones gain under 1 %


def quantize_rows(weights: Float32Array, importance: Float32Array | None = None) -> UInt8Array:
    """Scale search: float32 [rows, cols] -> uint8 [rows/16, cols/64, 576].

    importance: how much an error in each column costs, >= 0, float32 [cols]; None for all equal.
    """
    rows, cols = _checked_shape(weights)
    blocks = np.empty((rows // BLOCK_ROWS, cols // BLOCK_COLS, BLOCK_BYTES), np.uint8)
    column_weight = ffi.NULL if importance is None else _floats(importance, (cols,))
    lib.fm_quantize_search(_floats(weights, (rows, cols)), rows, cols, column_weight, _bytes(blocks))
    return blocks


@dataclass(frozen=True, slots=True)
class Curvature:
    """How errors in a matrix's columns act together on its outputs, from calibration inputs x.

    hessian: H = sum x x^T, damped, float32 [cols, cols]. factor: upper Cholesky factor U of its inverse,
    U^T U = H^-1, float32 [cols, cols].
    """

    hessian: Float32Array
    factor: Float32Array


def quantize_rows_with_feedback(weights: Float32Array, curvature: Curvature) -> UInt8Array:
    """Error feedback, then refinement: float32 [rows, cols] -> uint8 [rows/16, cols/64, 576]."""
    rows, cols = _checked_shape(weights)
    blocks = np.empty((rows // BLOCK_ROWS, cols // BLOCK_COLS, BLOCK_BYTES), np.uint8)
    changed = weights.copy()
    factor, hessian = _floats(curvature.factor, (cols, cols)), _floats(curvature.hessian, (cols, cols))
    lib.fm_quantize_feedback(_floats(changed, (rows, cols)), rows, cols, factor, _bytes(blocks))
    scratch = _floats(np.empty(BLOCK_ROWS * cols, np.float32), (BLOCK_ROWS * cols,))
    original = _floats(weights, (rows, cols))
    lib.fm_quantize_refine(original, rows, cols, hessian, REFINE_SWEEPS, scratch, _bytes(blocks))
    return blocks


def make_curvature(correlation: Float32Array, damping: float) -> Curvature:
    """From the input correlation sum x x^T, float32 [cols, cols].

    damping: the fraction of the mean diagonal that is added to the diagonal, which bounds how far directions that
    calibration has not seen are trusted. A correlation of zero gives plain rounding.
    """
    hessian = correlation.astype(np.float64)
    mean = float(np.trace(hessian)) / len(hessian)
    hessian[np.diag_indices_from(hessian)] += damping * mean if mean > 0 else 1.0
    # With P the reversal of order: H = (P L P)(P L P)^T for the Cholesky factor L of P H P, so U = (P L P)^-1 is upper.
    lower = np.linalg.cholesky(hessian[::-1, ::-1])
    upper = np.linalg.inv(lower[::-1, ::-1])
    return Curvature(hessian.astype(np.float32), np.ascontiguousarray(np.triu(upper), np.float32))


def _checked_shape(weights: Float32Array) -> tuple[int, int]:
    rows, cols = weights.shape
    assert (rows % BLOCK_ROWS, cols % BLOCK_COLS) == (0, 0), weights.shape
    return rows, cols


def _floats(array: Float32Array, shape: tuple[int, ...]) -> object:
    """A C pointer to checked memory; the array must outlive the call."""
    assert array.shape == shape
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    return ffi.from_buffer("float[]", array)


def _bytes(blocks: UInt8Array) -> object:
    return ffi.from_buffer("unsigned char[]", blocks)
