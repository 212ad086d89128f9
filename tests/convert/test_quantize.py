"""The scale search never loses to plain absmax, and packs what blocks.h says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from engine.convert.quantize import quantize_rows
from engine.formats import dequantize_q4

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
    assert (ours <= plain * 1.0001).all()
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
