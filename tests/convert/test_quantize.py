"""The scale search never loses to plain absmax, and packs what blocks.h says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from engine._simd import ffi, lib
from engine.convert.quantize import make_curvature, quantize_rows, quantize_rows_with_feedback
from engine.formats import dequantize_q4, unpack_q4

Matrix = npt.NDArray[np.float32]


def absmax_q4_0(weights: Matrix) -> Matrix:
    """The plain scheme: the largest weight of a group becomes exactly -8 steps."""
    groups = weights.reshape(-1, 32)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    scale = (largest / -8).astype(np.float16).astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return (np.clip(np.rint(groups * inverse), -8, 7) * scale).reshape(weights.shape)


def errors(weights: Matrix, restored: Matrix, importance: Matrix) -> Matrix:
    """Weighted squared error of each group."""
    return (importance * (weights - restored) ** 2).reshape(-1, 32).sum(axis=1)


@pytest.mark.parametrize("distribution", ["normal", "laplace", "uniform", "one-sided"])
def test_beats_absmax_in_every_group(distribution: str) -> None:
    rng = np.random.default_rng(1)
    draw = {
        "normal": rng.standard_normal,
        "laplace": lambda shape: rng.laplace(size=shape),
        "uniform": lambda shape: rng.uniform(-1, 1, shape),
        "one-sided": lambda shape: np.abs(rng.standard_normal(shape)),
    }[distribution]
    weights = (draw((64, 256)) * 0.02).astype(np.float32)
    ones = np.ones(256, np.float32)
    ours = errors(weights, dequantize_q4(quantize_rows(weights)), ones)
    plain = errors(weights, absmax_q4_0(weights), ones)
    assert (ours <= plain * 1.001).all()
    assert ours.sum() < 0.93 * plain.sum()


def test_importance_moves_the_error_where_it_hurts_less() -> None:
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((64, 128)).astype(np.float32)
    importance = np.exp(2 * rng.standard_normal(128)).astype(np.float32)
    weighted = errors(weights, dequantize_q4(quantize_rows(weights, importance)), importance)
    unweighted = errors(weights, dequantize_q4(quantize_rows(weights)), importance)
    assert weighted.sum() < 0.8 * unweighted.sum()


def test_values_on_the_grid_are_kept_exactly() -> None:
    rng = np.random.default_rng(3)
    nibbles = rng.integers(-8, 8, (16, 64)).astype(np.float32)
    nibbles[:, ::32] = -8
    weights = nibbles * np.float32(0.0625)
    np.testing.assert_array_equal(dequantize_q4(quantize_rows(weights)), weights)


def test_zero_and_tiny_groups_become_zero_not_nan() -> None:
    weights = np.zeros((16, 64), np.float32)
    weights[0, 32:] = 1e-30
    assert not dequantize_q4(quantize_rows(weights)).any()


def correlated_inputs(tokens: int, cols: int) -> Matrix:
    """Inputs that live mostly in a few directions, as activations do."""
    rng = np.random.default_rng(4)
    mixing = rng.standard_normal((cols, cols)) * np.exp(rng.standard_normal(cols))[:, None]
    return (rng.standard_normal((tokens, cols)) @ mixing).astype(np.float32)


def test_curvature_is_what_it_says() -> None:
    inputs = correlated_inputs(300, 64)
    correlation = inputs.T @ inputs
    curvature = make_curvature(correlation, 0.01)
    factor = curvature.factor.astype(np.float64)
    damped = correlation + 0.01 * np.trace(correlation) / 64 * np.eye(64)
    np.testing.assert_allclose(curvature.hessian, damped, rtol=1e-5)
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(64), atol=1e-3)
    assert not np.tril(factor, -1).any()


def test_error_feedback_lowers_the_error_of_outputs() -> None:
    inputs = correlated_inputs(2000, 128)
    weights = np.random.default_rng(5).standard_normal((64, 128)).astype(np.float32)

    def output_error(restored: Matrix) -> float:
        return float(((inputs @ (restored - weights).T) ** 2).sum())

    curvature = make_curvature(inputs.T @ inputs, 0.01)
    with_feedback = output_error(dequantize_q4(quantize_rows_with_feedback(weights, curvature)))
    without = output_error(dequantize_q4(quantize_rows(weights)))
    assert with_feedback < 0.5 * without


def test_feedback_without_correlation_is_plain_search() -> None:
    weights = np.random.default_rng(6).standard_normal((32, 128)).astype(np.float32)
    curvature = make_curvature(np.zeros((128, 128), np.float32), 0.01)
    np.testing.assert_array_equal(quantize_rows_with_feedback(weights, curvature), quantize_rows(weights))


def test_no_single_nibble_can_still_be_improved() -> None:
    """The end of refinement, checked by trying every nibble one up and one down with the scales as they are."""
    inputs = correlated_inputs(500, 64)
    weights = np.random.default_rng(9).standard_normal((16, 64)).astype(np.float32)
    curvature = make_curvature(inputs.T @ inputs, 0.01)
    blocks = quantize_rows_with_feedback(weights, curvature)
    for _ in range(8):  # until nothing changes
        before = blocks.copy()
        lib.fm_quantize_refine(*refine_arguments(weights, curvature.hessian, blocks))
    np.testing.assert_array_equal(blocks, before)
    nibbles, scales = unpack_q4(blocks)
    hessian = curvature.hessian.astype(np.float64)
    error = dequantize_q4(blocks).astype(np.float64) - weights
    gradient = error @ hessian
    step = np.repeat(scales.astype(np.float64), 32, axis=1)
    for move in (-1, 1):
        allowed = (nibbles + move >= 0) & (nibbles + move <= 15) if move > 0 else nibbles > 0
        change = 2 * move * step * gradient + step**2 * np.diag(hessian)
        assert (change[allowed] > -1e-4 * np.abs(gradient).max()).all()


def refine_arguments(weights: Matrix, hessian: Matrix, blocks: np.ndarray) -> tuple[object, ...]:
    scratch = np.empty(16 * weights.shape[1], np.float32)
    floats = [ffi.from_buffer("float[]", array) for array in (weights, hessian, scratch)]
    rows, cols = weights.shape
    return floats[0], rows, cols, floats[1], 1, floats[2], ffi.from_buffer("unsigned char[]", blocks)


def test_feedback_leaves_its_input_alone() -> None:
    weights = np.random.default_rng(7).standard_normal((16, 64)).astype(np.float32)
    before = weights.copy()
    quantize_rows_with_feedback(weights, make_curvature(np.eye(64, dtype=np.float32), 0.01))
    np.testing.assert_array_equal(weights, before)


@pytest.mark.parametrize("exponent", [-23, -16, -14, -5, 0, 10])
def test_scales_are_rounded_as_ieee_half(exponent: int) -> None:
    """One weight per group decides its scale alone: it must equal NumPy's fp16 rounding of the least-squares fit."""
    rng = np.random.default_rng(8)
    weights = np.zeros((16, 64), np.float32)
    weights[:, ::32] = rng.uniform(1, 2, (16, 2)) * 8 * 2.0**exponent
    blocks = quantize_rows(weights)
    nibbles, scales = unpack_q4(blocks)
    quants = nibbles[:, ::32].astype(np.float64) - 8
    np.testing.assert_array_equal(scales, (weights[:, ::32] / quants).astype(np.float32).astype(np.float16))
