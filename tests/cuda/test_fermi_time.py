"""The products' loops on real Fermi code, and what the time model makes of them."""

from __future__ import annotations

import os

import fermi_assembler
import pytest
from fermi_time import Card, card_from_library, predict

USEFUL_FFMA = {"matmul_q4": 512, "matmul_q4_grouped": 512, "matmul_f16": 512}


@pytest.fixture(scope="module")
def card() -> Card:
    library = fermi_assembler.find_library(os.environ)
    if library is None:
        pytest.skip("no assembler of driver 390: install libnvidia-legacy-390xx-ptxjitcompiler1 or set FERMI_JIT")
    return card_from_library(library)


@pytest.mark.parametrize("kernel", USEFUL_FFMA)
def test_main_loops_are_at_least_70_percent_useful_products(card: Card, kernel: str) -> None:
    loops = [loop for loop in card.main_loops(kernel) if loop.counts["FFMA"] >= USEFUL_FFMA[kernel]]
    assert len(loops) == (2 if "grouped" in kernel else 1)
    assert min(USEFUL_FFMA[kernel] / loop.size for loop in loops) >= 0.70


@pytest.mark.parametrize("kernel", USEFUL_FFMA)
def test_few_shared_loads_of_the_products_are_128_bits_wide(card: Card, kernel: str) -> None:
    """Those of x, of which a warp reads two at once; others would collide."""
    for loop in card.main_loops(kernel):
        assert loop.counts["LDS.128"] * 16 <= loop.counts["FFMA"]
        assert loop.counts["LDS.64"] == 32


@pytest.mark.parametrize("kernel", [*USEFUL_FFMA, "matmul_f32"])
def test_main_loops_spill_nothing(card: Card, kernel: str) -> None:
    assert [loop.spills for loop in card.main_loops(kernel)] == [0] * len(card.main_loops(kernel))


def test_predicted_prefill_of_947_tokens(card: Card) -> None:
    seconds = predict(card, 947)
    assert (
        6.0 < seconds["total"] <= 11.0
    )  # nothing can beat the chip's peak: 4.8 TFLOP at 1.03 TFLOP/s and some padding
    assert seconds["waiting for PCIe"] < 0.05 * seconds["total"]


def test_prediction_grows_with_the_prompt(card: Card) -> None:
    totals = [predict(card, tokens)["total"] for tokens in (128, 512, 2048, 8192)]
    assert totals == sorted(totals)
