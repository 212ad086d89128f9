"""Symmetric 4-bit groups of 32 with an fp16 scale, chosen to lose least at the same bytes.

For weights x and importances w of one group, the scale s and nibbles q minimise sum w (x - s q)^2 with q in
-8..7. Plain absmax (s = absmax / -8) is one candidate among several; each candidate's q is kept and its scale
refitted by weighted least squares, s = sum w x q / sum w q^2, and the best pair wins.
"""

from __future__ import annotations

import numpy as np

from engine.convert.plan import GROUP
from engine.core import Float32Array, UInt8Array
from engine.formats import pack_q4

# Divisors d of the candidate scales +-absmax / d. Below 8 the largest weight is clipped a little in exchange for
# a finer grid; only one sign can reach -8, so both signs are tried.
CANDIDATES = tuple(float(d) for d in np.linspace(6.5, 10.5, 17))
ALGORITHM = "scale-search-1"


def quantize_rows(weights: Float32Array, importance: Float32Array | None = None) -> UInt8Array:
    """Packs float32 [rows, cols] into uint8 [rows/16, cols/64, 576]; importance >= 0, [cols], or None for equal."""
    rows, cols = weights.shape
    groups = weights.reshape(rows, cols // GROUP, GROUP)
    if importance is None:
        importance = np.ones(cols, np.float32)
    column_weight = importance.reshape(1, cols // GROUP, GROUP)
    absmax = np.abs(groups).max(axis=2)
    best_scale = np.zeros_like(absmax)
    best_error = np.full_like(absmax, np.inf)
    for divisor in (*CANDIDATES, *(-d for d in CANDIDATES)):
        scale = _refit(groups, column_weight, absmax / np.float32(divisor))
        error = _error(groups, column_weight, scale)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
    quants = _round(groups, best_scale)
    nibbles = (quants + 8).astype(np.uint8).reshape(rows, cols)
    return pack_q4(nibbles, best_scale.astype(np.float16))


def _round(groups: Float32Array, scale: Float32Array) -> Float32Array:
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return np.clip(np.rint(groups * inverse[..., None]), -8, 7)


def _half(scale: Float32Array) -> Float32Array:
    return scale.astype(np.float16).astype(np.float32)


def _refit(groups: Float32Array, column_weight: Float32Array, scale: Float32Array) -> Float32Array:
    """The stored (fp16) scale that fits best the nibbles `scale` gives."""
    quants = _round(groups, scale)
    weighted = column_weight * quants
    square = (weighted * quants).sum(axis=2)
    fitted = np.divide((weighted * groups).sum(axis=2), square, out=scale.copy(), where=square > 0)
    return _half(fitted)


def _error(groups: Float32Array, column_weight: Float32Array, scale: Float32Array) -> Float32Array:
    difference = groups - _round(groups, scale) * scale[..., None]
    error: Float32Array = (column_weight * difference * difference).sum(axis=2)
    return error
