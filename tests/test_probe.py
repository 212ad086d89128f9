"""The bandwidth probe runs in every tier, reads all of its buffer, and refuses what it cannot do."""

from __future__ import annotations

import pytest

from engine import probe
from engine.cpu import supported_tiers
from engine.errors import KernelError, OutOfMemory
from engine.probe import BLOCK_BYTES, BandwidthProbe


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tier", supported_tiers())
def test_it_measures_a_plausible_rate(tier: str, threads: int) -> None:
    rate = BandwidthProbe(tier, threads, nbytes=16 * BLOCK_BYTES).gb_per_s(passes=3)
    assert 0.01 < rate < 10_000


def test_an_unknown_tier_is_an_error() -> None:
    with pytest.raises(KernelError, match="'avx9'"):
        BandwidthProbe("avx9", 1, nbytes=BLOCK_BYTES).gb_per_s(passes=1)


def test_it_never_drives_the_machine_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "available_bytes", lambda: 2 * BLOCK_BYTES - 1)
    with pytest.raises(OutOfMemory, match="are available"):
        BandwidthProbe("scalar", 1, nbytes=BLOCK_BYTES)
