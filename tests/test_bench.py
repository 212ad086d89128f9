"""`fermion bench`: the command contract (a JSON line at the end) and figures that fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import packed_checkpoint

from engine import bench
from engine.bench import draw, measure_decode, measure_prefill
from engine.config import EngineConfig
from engine.errors import ConfigError, OutOfMemory
from engine.inventory import take_inventory
from engine.vision_bench import measure_vision
from server.config import DEMO_CHECKPOINT

CONTRACT = {"tokens_per_s", "gb_per_s", "bandwidth_share", "tier", "threads"}


class NoProbe:
    """In place of the probe: tests need no bandwidth, and a gigabyte each time is too much."""

    def __init__(self, *arguments: Any) -> None:
        raise OutOfMemory("not here")


@pytest.fixture
def without_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BandwidthProbe", NoProbe)


@pytest.mark.usefixtures("without_probe")
def test_decode_figures_fit_together() -> None:
    notes: list[str] = []
    speed = measure_decode(
        DEMO_CHECKPOINT, EngineConfig(threads=1), context=70, tokens=8, rounds=2, report=notes.append
    )
    values = speed.as_json()
    assert values.keys() >= CONTRACT
    assert speed.tokens_per_s == pytest.approx(1e3 / speed.step_ms)
    assert (speed.context, speed.tokens, speed.threads, len(notes)) == (70, 8, 1, 2)
    assert values["bandwidth_share"] is None


@pytest.mark.usefixtures("without_probe")
def test_prefill_figures_fit_together() -> None:
    speed = measure_prefill(DEMO_CHECKPOINT, EngineConfig(threads=1), tokens=130, rounds=1, report=lambda text: None)
    assert speed.tokens_per_s == pytest.approx(130 / (speed.step_ms / 1e3))
    assert speed.gb_per_s > 0


@pytest.mark.usefixtures("without_probe")
def test_operations_account_for_a_decode_step() -> None:
    speed = measure_decode(
        DEMO_CHECKPOINT, EngineConfig(threads=1), context=64, tokens=4, rounds=2, report=lambda text: None
    )
    inventory, costs = take_inventory(DEMO_CHECKPOINT, EngineConfig()), {c.name: c for c in speed.operations}
    model = inventory.model
    assert costs["delta rule"].calls == 8 * model.delta_layers
    assert costs["attention"].calls == 8 * model.attention_layers
    assert costs["head"].calls == 8
    assert all(cost.seconds > 0 for cost in costs.values())
    assert sum(cost.seconds for cost in costs.values()) == pytest.approx((1 - speed.outside_share) * speed.seconds)
    head = next(part for part in inventory.parts if part.name == "head")
    assert costs["head"].nbytes == 8 * head.nbytes
    # The small vectors that no operation counts: norms of heads, convolution, decay.
    assert sum(cost.nbytes for cost in costs.values()) == pytest.approx(8 * inventory.decode_bytes(66), rel=0.05)
    assert [line.split()[0] for line in speed.as_table().splitlines()[-2:]] == ["outside", "all"]


@pytest.mark.usefixtures("without_probe")
def test_operations_of_a_prefill_are_not_those_of_decode() -> None:
    speed = measure_prefill(DEMO_CHECKPOINT, EngineConfig(threads=1), tokens=130, rounds=2, report=lambda text: None)
    costs = {cost.name: cost for cost in speed.operations}
    assert costs["embedding"].calls == 2
    assert costs["head"].calls == 0
    assert "head" not in speed.as_table()


@pytest.mark.usefixtures("without_probe")
def test_a_context_that_does_not_fit_is_refused() -> None:
    config = EngineConfig(threads=1, context_length=128)
    with pytest.raises(ConfigError, match="130 tokens do not fit the context window of 128"):
        measure_decode(DEMO_CHECKPOINT, config, context=65, tokens=64, rounds=1, report=lambda text: None)


@pytest.mark.slow
def test_the_last_line_is_json_with_the_probe_beside_it() -> None:
    command = [Path(sys.executable).with_name("fermion"), "bench", "decode", "--tokens", "8", "--rounds", "1", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    values = json.loads(result.stdout.splitlines()[-1])
    assert values.keys() >= CONTRACT
    assert 0 < values["bandwidth_share"] == pytest.approx(values["gb_per_s"] / values["probe_gb_per_s"], rel=1e-3)


def test_vision_figures_fit_together() -> None:
    speed = measure_vision(
        DEMO_CHECKPOINT, EngineConfig(threads=1), width=96, height=64, rounds=1, report=lambda text: None
    )
    values = speed.as_json()
    assert (speed.patches, speed.tokens, speed.threads) == (24, 6, 1)
    assert speed.peak_share == pytest.approx(speed.gflop / speed.seconds / speed.peak_gflop_per_s)
    assert (speed.seconds_least, speed.seconds_most, speed.peak_share_least) == (
        speed.seconds,
        speed.seconds,
        speed.peak_share,
    )
    assert 0 < speed.processor_share < 2  # the process may have other threads
    assert values.keys() >= {"gflop_per_s", "peak_gflop_per_s", "peak_share", "tier", "threads"}
    assert "96 x 64 pixels, 6 tokens" in speed.as_text()


def test_vision_refuses_what_it_cannot_measure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="100 x 64 pixels, expected sides that are multiples of 32"):
        measure_vision(
            DEMO_CHECKPOINT, EngineConfig(threads=1), width=100, height=64, rounds=1, report=lambda text: None
        )
    text_only = packed_checkpoint(tmp_path / "text")
    with pytest.raises(ConfigError, match="this checkpoint has no vision tower"):
        measure_vision(text_only, EngineConfig(threads=1), width=64, height=64, rounds=1, report=lambda text: None)


@pytest.mark.usefixtures("without_probe")
@pytest.mark.parametrize("lengths", [[64], [64, 130]])
def test_a_chart_on_request(lengths: list[int], tmp_path: Path) -> None:
    config = EngineConfig(threads=1)
    speeds = [
        measure_prefill(DEMO_CHECKPOINT, config, tokens=length, rounds=1, report=lambda text: None)
        for length in lengths
    ]
    draw(speeds, tmp_path / "new" / "chart.png")
    assert (tmp_path / "new" / "chart.png").read_bytes().startswith(b"\x89PNG")
