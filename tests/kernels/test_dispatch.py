"""Tiers by name: the best one is known, all below it run, and any other name has no kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_matmul import TIERS, supported

from engine._simd import ffi, lib


def call(tier: str) -> int:
    """An empty product: 0 if the tier has kernels here."""
    empty = ffi.new("float[1]")
    return int(lib.fm_f32_matmul(tier.encode(), empty, 1, 0, 0, empty, 1, ffi.NULL, 0, empty, 1))


def test_every_tier_up_to_the_best_runs_and_none_above() -> None:
    best = ffi.string(lib.fm_best_tier()).decode()
    assert best in TIERS
    assert [tier for tier in TIERS if call(tier) == 0] == list(TIERS[: TIERS.index(best) + 1])


@pytest.mark.parametrize("name", ["", "altivec", "AVX2", "avx", "avx5120"])
def test_an_unknown_tier_has_no_kernels(name: str) -> None:
    assert call(name) == -1


def test_the_kernel_says_the_same_about_this_processor() -> None:
    """/proc/cpuinfo lists what Linux found and enabled, by its own reading of CPUID and XCR0."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii")
    flags = set(next(line for line in text.splitlines() if line.startswith("flags")).split(":")[1].split())
    assert supported("ssse3") == ("ssse3" in flags)
    assert supported("avx2") == ({"avx2", "fma", "f16c"} <= flags)
    vnni = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
    assert supported("avx512") == (vnni <= flags and supported("avx2"))
