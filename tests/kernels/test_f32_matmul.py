"""float32 products: every tier against float64, and the same bits whatever shares the call."""

from __future__ import annotations

import numpy as np
import pytest
from native_matmul import TIERS, f32_matmul, supported

tiers = pytest.mark.parametrize(
    "tier", [pytest.param(t, marks=pytest.mark.skipif(not supported(t), reason=f"no {t} here")) for t in TIERS]
)


@tiers
@pytest.mark.parametrize(("rows", "cols", "count"), [(1, 16, 1), (7, 33, 5), (33, 256, 9), (6, 2049, 4), (3, 5, 2)])
def test_matches_float64(tier: str, rows: int, cols: int, count: int) -> None:
    rng = np.random.default_rng(rows)
    w, x = (rng.standard_normal((n, cols)).astype(np.float32) for n in (rows, count))
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    bound = (cols / 16 + 6) * 2.0**-23 * (np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T)
    assert np.all(np.abs(f32_matmul(tier, w, x) - exact) <= bound)


@tiers
def test_a_dot_product_does_not_feel_its_company(tier: str) -> None:
    rng = np.random.default_rng(4)
    w, x = rng.standard_normal((37, 200)).astype(np.float32), rng.standard_normal((23, 200)).astype(np.float32)
    alone = np.block([[f32_matmul(tier, w[r : r + 1], x[t : t + 1]) for r in range(37)] for t in range(23)])
    for count in range(1, 24):
        assert np.array_equal(f32_matmul(tier, w, x[:count]), alone[:count])
    order = rng.permutation(23).astype(np.int32)
    assert np.array_equal(f32_matmul(tier, w, x, order), alone[order])


def test_ssse3_repeats_scalar() -> None:
    if not supported("ssse3"):
        pytest.skip("no ssse3 here")
    rng = np.random.default_rng(6)
    w, x = rng.standard_normal((19, 130)).astype(np.float32), rng.standard_normal((5, 130)).astype(np.float32)
    assert np.array_equal(f32_matmul("ssse3", w, x), f32_matmul("scalar", w, x))
