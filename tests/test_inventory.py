"""What `fermion info` says of a checkpoint, checked against the arithmetic of the published shape."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engine.config import EngineConfig, parse_config
from engine.convert.plan import build_plan
from engine.convert.source_config import geometry
from engine.convert.synthetic import RandomCheckpoint, Shape, published_config
from engine.errors import ConfigError, ModelFileError
from engine.inventory import Inventory, MemorySettings, parts_of, pictures_of, sequence_of, take_inventory
from engine.memory import MemoryReport
from engine.vision_bench import PUBLISHED
from server.config import DEMO_CHECKPOINT


@pytest.fixture(scope="module")
def published() -> Inventory:
    """The 35B shape with 128 experts, without its 10 GB: tensors are views of one byte that only know their size."""
    values = published_config(Shape())
    config = parse_config(Path("config.json"), values)
    plan = build_plan(RandomCheckpoint(0, 128), geometry(Path("config.json"), values))
    tensors = {
        tensor.name: SimpleNamespace(
            name=tensor.name, data=np.broadcast_to(np.zeros(1, np.uint8), (tensor.info.nbytes,))
        )
        for tensor in plan.tensors
    }
    weights = SimpleNamespace(config=config, file=SimpleNamespace(tensors=tensors))
    return Inventory(
        directory="published",
        model=config,
        parts=parts_of(cast(Any, weights)),
        sequence=sequence_of(config, kv_f32=False),
        context_length=4096,
        tier="ssse3",
        threads=2,
        pinned_to=(0, 1),
        transparent_huge_pages="madvise",
        memory=MemoryReport(10_484_920_512, 1.0, 0.98, {0: 0.5, 1: 0.5}),
        memory_nodes=(0, 1),
        settings=MemorySettings("auto", "interleave", memory_lock=False),
        memory_available=0,
    )


def test_every_stored_byte_belongs_to_a_part(published: Inventory) -> None:
    assert published.weight_bytes == pytest.approx(10.485e9, rel=1e-3)
    assert sum(part.tensors for part in published.parts) == 693


def test_a_token_reads_what_the_arithmetic_says(published: Inventory) -> None:
    weights = sum(part.token_bytes for part in published.parts)
    assert weights == pytest.approx(1.705e9, rel=2e-3)
    assert published.decode_bytes(0) == pytest.approx(1.83e9, rel=5e-3)
    assert published.decode_bytes(1000) - published.decode_bytes(0) == 1000 * 20 * 1024


def test_state_is_counted_in_whole_pages(published: Inventory) -> None:
    recurrent = 30 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert published.sequence.at(0) == recurrent
    assert published.sequence.at(1) == published.sequence.at(64) == recurrent + 64 * 20 * 1024


def test_text_and_json_tell_the_same(published: Inventory) -> None:
    text, values = published.as_text(), json.loads(json.dumps(published.as_json()))
    assert values["weight_bytes"] == published.weight_bytes
    assert f"{published.weight_bytes:,}" in text
    assert "30 gated delta net, 10 attention" in text
    assert "ssse3, 2 threads, on processors 0, 1" in text
    assert "100% in memory, of that 98% in huge pages; nodes 0: 50%, 1: 50%" in text
    assert "nodes 0, 1: weights are dealt out to them" in text
    assert values["settings"] == {"huge_pages": "auto", "numa": "interleave", "memory_lock": False}
    assert "40 layers, 128 experts, 10.48 GB of weights" in published.headline()


def test_the_demo_model_is_read_from_its_files() -> None:
    inventory = take_inventory(DEMO_CHECKPOINT, EngineConfig(threads=1, context_length=128))
    stored = (DEMO_CHECKPOINT / "model.safetensors").stat().st_size
    assert 0.98 * stored < inventory.weight_bytes < stored
    assert inventory.model.num_experts >= 8
    assert inventory.context_length == 128
    with pytest.raises(ConfigError, match=r"context_length is 99999999 tokens, this model has at most \d+"):
        take_inventory(DEMO_CHECKPOINT, EngineConfig(threads=1, context_length=99_999_999))
    assert {part.name for part in inventory.parts} >= {"experts", "delta net", "attention", "vision tower"}


def test_what_pictures_cost_at_the_published_shape() -> None:
    config = parse_config(Path("config.json"), published_config(Shape()))
    small, large = pictures_of(dataclasses.replace(config, vision=PUBLISHED), "scalar")
    assert (small.tokens, large.tokens) == (64, 1024)
    assert small.gflop == pytest.approx(224, rel=0.01)
    assert large.gflop == pytest.approx(5532, rel=0.001)
    assert 4096 * 4 * 4 * 1152 < large.work_bytes < 150e6
    assert large.row_bytes == 1024 * 2048 * 4
    assert pictures_of(config, "scalar") == ()


def test_the_demo_model_tells_what_pictures_cost() -> None:
    inventory = take_inventory(DEMO_CHECKPOINT, EngineConfig(threads=1, context_length=128))
    assert "256 x 256: 64 tokens" in inventory.as_text()
    assert inventory.as_json()["pictures"][1]["tokens"] == 1024


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=str(tmp_path)):
        take_inventory(tmp_path, EngineConfig())
