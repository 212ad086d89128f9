"""Activations to int8: the same integers in every tier, and an error of at most half a step."""

from __future__ import annotations

import numpy as np
import pytest
from native_matmul import TIERS, quantize, supported

tiers = pytest.mark.parametrize(
    "tier", [pytest.param(t, marks=pytest.mark.skipif(not supported(t), reason=f"no {t} here")) for t in TIERS]
)


def cases() -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 256)).astype(np.float32)
    x[0] = 0
    x[1] *= 1e-30
    x[2] *= 1e30
    x[3] = 1e-40  # denormal: stored as zeros
    x[4, ::2] = -x[4, ::2] * 50
    x[5] = np.arange(256) % 2 - 0.5  # ties
    x[6, :32] = (np.arange(32) - 15.5) * 2 / 127 * 4
    return x


@tiers
def test_integers_are_the_reference_bit_for_bit(tier: str) -> None:
    for got, expected in zip(quantize(tier, cases()), quantize("scalar", cases()), strict=True):
        assert np.array_equal(got, expected)


@tiers
def test_error_is_at_most_half_a_step(tier: str) -> None:
    x = cases()
    q, scale, correction = quantize(tier, x)
    again = q.reshape(12, 8, 32) * scale[..., None].astype(np.float64)
    error = np.abs(again.reshape(x.shape) - x)
    assert np.all(error <= np.repeat(scale, 32, 1) * 0.50001 + 2.0**-100)
    assert np.array_equal(correction, -8 * q.reshape(12, 8, 32).sum(-1, dtype=np.int32))
    assert q.min() >= -127
    assert not scale[0].any()
    assert not scale[3].any()
    assert np.array_equal(np.abs(q.reshape(12, 8, 32)).max(-1)[4:], np.full((8, 8), 127))


@tiers
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 13, 31])
def test_a_group_that_is_not_finite_is_marked_by_its_scale(tier: str, value: float, place: int) -> None:
    x = np.ones((1, 96), np.float32)
    x[0, 32 + place] = value
    q, scale, correction = quantize(tier, x)
    assert not np.isfinite(scale[0, 1])
    assert not q[0, 32:64].any()
    assert correction[0, 1] == 0
    assert np.array_equal(q[0, :32], np.full(32, 127))
    assert np.all(np.isfinite(scale[0, [0, 2]]))
