"""4-bit x 8-bit products: every tier against float64, against the scalar reference, and against itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from native_matmul import TIERS, aligned, q4_matmul, quantize, supported

from engine import formats

# The avx2 tier has a second form for CPUs with AVX-VNNI; "avx2-maddubs" is the one without, on any CPU.
KERNELS = (*TIERS[:3], "avx2-maddubs", *TIERS[3:])
tiers = pytest.mark.parametrize(
    "tier",
    [
        pytest.param(k, marks=pytest.mark.skipif(not supported(k.removesuffix("-maddubs")), reason=f"no {k} here"))
        for k in KERNELS
    ],
)


def packed(rows: int, cols: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    scales = (rng.standard_normal((rows, cols // 32)) * 0.02).astype(np.float16)
    return aligned(formats.pack_q4(rng.integers(0, 16, (rows, cols), np.uint8), scales))


def tokens(count: int, cols: int, seed: int = 1) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, cols)).astype(np.float32)


@tiers
@pytest.mark.parametrize(("rows", "cols", "count"), [(16, 64, 1), (48, 128, 3), (32, 576, 21), (80, 2048, 17)])
def test_matches_float64(tier: str, rows: int, cols: int, count: int) -> None:
    blocks, x = packed(rows, cols), quantize("scalar", tokens(count, cols))
    groups = x[0].reshape(count, -1, 32).astype(np.float64) * x[1][..., None]
    weights = formats.dequantize_q4(blocks).astype(np.float64)
    exact = groups.reshape(count, cols) @ weights.T
    # Integer dot products are exact; each of cols/32 groups is rounded three times (product, scale, sum).
    magnitude = np.abs(groups.reshape(count, cols)) @ np.abs(weights.T)
    bound = (cols / 32 + 2) * 2.0**-23 * magnitude
    assert np.all(np.abs(q4_matmul(tier, blocks, x) - exact) <= bound)


@tiers
@pytest.mark.parametrize("count", [1, 3, 9, 66])
def test_tiers_differ_by_fused_rounding_alone(tier: str, count: int) -> None:
    """Without FMA every tier repeats the scalar one bit for bit; those with FMA repeat each other."""
    blocks, x = packed(64, 1024), quantize("scalar", tokens(count, 1024))
    got, reference = q4_matmul(tier, blocks, x), q4_matmul("scalar", blocks, x)
    if tier in ("scalar", "ssse3"):
        assert np.array_equal(got, reference)
    else:
        assert np.array_equal(got, q4_matmul("avx2-maddubs", blocks, x))
        assert np.max(np.abs(got - reference)) <= 1e-5 * np.max(np.abs(reference))


@tiers
def test_one_group_is_exact_so_integer_parts_agree_bit_for_bit(tier: str) -> None:
    """With one group that is not zero and scales that are powers of two, nothing is rounded in any tier."""
    rng = np.random.default_rng(5)
    nibbles = rng.integers(0, 16, (32, 64), np.uint8)
    nibbles[0], nibbles[1] = 0, 15
    blocks = aligned(formats.pack_q4(nibbles, np.full((32, 2), -0.25, np.float16)))
    for extreme in (127, -127):
        q = np.zeros((2, 64), np.int8)
        q[0, :32], q[1, 32:] = extreme, rng.integers(-127, 128, 32)
        correction = (-8 * q.reshape(2, 2, 32).sum(-1, dtype=np.int32)).astype(np.int32)
        got = q4_matmul(tier, blocks, (aligned(q), np.full((2, 2), 0.5, np.float32), correction))
        exact = (q.astype(np.int64) @ (nibbles.astype(np.int64).T - 8)) * -0.125
        assert np.array_equal(got, exact.astype(np.float32))


@tiers
@pytest.mark.parametrize("cols", [64, 576, 1088])
def test_a_token_does_not_feel_its_company(tier: str, cols: int) -> None:
    """The same bits alone, in any number, in any order, and whatever tiles share the call."""
    blocks, x = packed(48, cols), quantize("scalar", tokens(70, cols))
    alone = np.concatenate([q4_matmul(tier, blocks, x, np.array([t], np.int32)) for t in range(70)])
    for count in range(1, 71):
        rows = np.arange(70 - count, 70, dtype=np.int32)
        assert np.array_equal(q4_matmul(tier, blocks, x, rows), alone[rows])
    shuffled = np.random.default_rng(3).permutation(70).astype(np.int32)
    assert np.array_equal(q4_matmul(tier, blocks, x, shuffled), alone[shuffled])
    assert np.array_equal(q4_matmul(tier, blocks, x), alone)
    assert np.array_equal(q4_matmul(tier, blocks, x, tiles=(1, 3)), alone[:, 16:])


@tiers
def test_huge_and_tiny_scales(tier: str) -> None:
    scales = np.array([[65504, 6e-8], [-6e-8, -65504]] * 8, np.float16)
    blocks = aligned(formats.pack_q4(np.full((16, 64), 3, np.uint8), scales))
    x = quantize("scalar", np.full((1, 64), 1e30, np.float32))
    expected = formats.dequantize_q4(blocks).astype(np.float64).sum(1) * 1e30
    np.testing.assert_allclose(q4_matmul(tier, blocks, x)[0], expected, rtol=1e-5)


@tiers
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_reaches_every_output(tier: str, value: float) -> None:
    x = tokens(3, 128)
    x[1, 70] = value
    got = q4_matmul(tier, packed(32, 128), quantize("scalar", x))
    assert np.all(np.isnan(got[1]))
    assert np.all(np.isfinite(got[[0, 2]]))
