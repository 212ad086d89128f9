"""Synthetic checkpoints: the published shape, sane magnitudes, the same bytes every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoint import TEXT_CONFIG

from engine.convert.plan import Format, build_plan, pieces
from engine.convert.source_config import geometry
from engine.convert.synthetic import RandomBlocks, RandomCheckpoint, RandomRows, Shape, make_synthetic, published_config
from engine.convert.writer import encode_piece, plan_bytes
from engine.errors import ConfigError


def test_the_default_is_the_published_shape() -> None:
    config = published_config(Shape())
    plan = build_plan(RandomCheckpoint(0, 128), geometry(Path("config.json"), config))
    assert len(plan.tensors) == 693
    assert plan_bytes(plan) == pytest.approx(10.48e9, rel=1e-3)
    assert sum(tensor.format is Format.Q4 for tensor in plan.tensors) > 300


def test_packed_weights_keep_the_scale_of_their_input() -> None:
    blocks = RandomBlocks("m", 64, 2048, seed=1).read_packed(16, 48)
    assert blocks.shape == (2, 32, 576)
    scales = blocks[..., :64].copy().view(np.float16).astype(np.float64)
    quants = blocks[..., 64:]
    weights = np.concatenate([(quants & 15).reshape(-1), (quants >> 4).reshape(-1)]).astype(np.float64) - 8.0
    weights *= scales.max()
    assert scales.min() == scales.max() > 0
    assert abs(weights.mean()) < 0.01 * weights.std()
    assert weights.std() == pytest.approx(2048**-0.5, rel=0.01)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("linear_attn.A_log", 0.0, 2.78), ("linear_attn.dt_bias", -6.92, -2.2), ("linear_attn.norm.weight", 0.4, 1.6)],
)
def test_recurrences_decay_and_norms_are_near_one(name: str, low: float, high: float) -> None:
    rows = RandomRows(f"model.language_model.layers.0.{name}", 128, 1, seed=2).read(0, 128)
    assert rows.dtype == np.float32
    assert low <= rows.min() < rows.max() <= high


def test_the_same_seed_gives_the_same_bytes_and_another_does_not() -> None:
    config = {"model_type": "qwen3_5_moe", "text_config": TEXT_CONFIG}
    shapes = geometry(Path("config.json"), config)

    def encoded(seed: int) -> list[bytes]:
        plan = build_plan(RandomCheckpoint(seed, shapes.num_experts), shapes)
        return [encode_piece(piece, None).tobytes() for tensor in plan.tensors for piece in pieces(tensor)]

    assert encoded(7) == encoded(7)
    assert all(one != other for one, other in zip(encoded(7), encoded(8), strict=True))


@pytest.mark.parametrize(("shape", "word"), [(Shape(layers=6), "--layers 6"), (Shape(experts=4), "--experts 4")])
def test_impossible_shapes_are_refused(shape: Shape, word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word):
        make_synthetic(tmp_path / "m", shape, seed=0, threads=1, progress=lambda done, total: None, text_files=tmp_path)
    assert not (tmp_path / "m").exists()
