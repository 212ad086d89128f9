"""Calibration files: what is stored is found again under the tensors it speaks of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny
from tiny_checkpoint import PREFIX

from engine.convert import convert, writer
from engine.convert.calibration import Calibration, CalibrationWriter, point_of, write_calibration
from engine.convert.convert import Options
from engine.convert.plan import Format, pieces
from engine.convert.quantize import make_curvature, quantize_rows, quantize_rows_with_feedback
from engine.errors import ConfigError, ModelFileError

LAYER = f"{PREFIX}layers.1."


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((200, 64)).astype(np.float32)
    write_calibration(
        tmp_path / "statistics",
        {
            f"{LAYER}mlp.saliency": rng.random(8, np.float32),
            f"{LAYER}mlp.tokens": np.arange(8, dtype=np.float32),
            f"{LAYER}mixer_input.square": (inputs**2).sum(axis=0),
            f"{LAYER}mixer_input.correlation": inputs.T @ inputs,
            f"{LAYER}expert_hidden.square": np.diag(np.arange(8, dtype=np.float32)) @ np.ones((8, 64), np.float32),
            "final_hidden.square": np.ones(64, np.float32),
        },
    )
    return Calibration(tmp_path / "statistics")


def test_statistics_are_found_by_tensor(calibration: Calibration) -> None:
    assert calibration.scores("tokens").keys() == {f"{LAYER}mlp."}
    np.testing.assert_array_equal(calibration.scores("tokens")[f"{LAYER}mlp."], np.arange(8))
    assert calibration.curvature(f"{LAYER}linear_attn.in_proj_qkv.weight", 0) is not None
    assert calibration.curvature(f"{LAYER}linear_attn.out_proj.weight", 0) is None
    assert calibration.importance(f"{LAYER}linear_attn.out_proj.weight", 0) is None
    importance = calibration.importance("lm_head.weight", 0)
    assert importance is not None
    np.testing.assert_allclose(importance, np.ones(64), rtol=1e-6)


def test_expert_that_was_never_hit_has_no_importance(calibration: Calibration) -> None:
    name = f"{LAYER}mlp.experts.down_proj"
    assert calibration.importance(name, 0) is None
    assert calibration.importance(name, 3) is not None


def test_points() -> None:
    assert point_of(f"{LAYER}self_attn.k_proj.weight") == f"{LAYER}mixer_input"
    assert point_of("mtp.layers.0.mlp.experts.down_proj") == "mtp.layers.0.expert_hidden"
    assert point_of(f"{PREFIX}embed_tokens.weight") is None
    assert point_of("mtp.fc.weight") == "mtp.fc_input"


def test_pieces_use_feedback_where_correlation_is_known(tmp_path: Path, calibration: Calibration) -> None:
    weights = tiny.random_weights()
    source = tiny.write_checkpoint(tmp_path / "src", weights, tiny.config())
    plan = convert.prepare(source, Options(calibration=calibration)).plan
    encoded = {t.name: writer.encode_piece(next(pieces(t)), calibration) for t in plan.tensors if t.format is Format.Q4}
    with_feedback, with_importance = f"{LAYER}linear_attn.in_proj_z.weight", "lm_head.weight"
    curvature = calibration.curvature(with_feedback, 0)
    assert curvature is not None
    np.testing.assert_array_equal(
        encoded[with_feedback], quantize_rows_with_feedback(weights[with_feedback], curvature).reshape(-1)
    )
    np.testing.assert_array_equal(encoded[with_importance], quantize_rows(weights[with_importance]).reshape(-1))
    plain = f"{PREFIX}layers.2.linear_attn.in_proj_z.weight"
    np.testing.assert_array_equal(encoded[plain], quantize_rows(weights[plain]).reshape(-1))


def test_curvature_is_of_the_recorded_correlation(calibration: Calibration) -> None:
    curvature = calibration.curvature(f"{LAYER}linear_attn.in_proj_z.weight", 0)
    inputs = np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32)
    assert curvature is not None
    np.testing.assert_array_equal(curvature.factor, make_curvature(inputs.T @ inputs, 0.01).factor)


def test_other_file_is_refused(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path / "model.safetensors", {"a": np.zeros(4, np.float32)})
    with pytest.raises(ModelFileError, match="not a calibration file"):
        Calibration(tmp_path / "model.safetensors")


def test_missing_folder_and_full_disk_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        CalibrationWriter(tmp_path / "nowhere" / "statistics", {"a.square": (4,)})
    with pytest.raises(ConfigError, match="bytes needed"):
        CalibrationWriter(tmp_path / "statistics", {"a.square": (1 << 50,)})
    assert not list(tmp_path.iterdir())
