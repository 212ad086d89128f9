"""What calibration sees inside a layer adds up to what the layer does, and its statistics are what they are called."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny
from tiny_checkpoint import PREFIX

from engine.convert import convert
from engine.convert.calibrate import calibrate
from engine.convert.calibration import Calibration
from engine.convert.convert import Options
from engine.convert.corpus import Sample
from engine.convert.evaluate import compare
from engine.convert.forward import Forward, rms_norm

WEIGHTS = tiny.random_weights(vision=False, mtp=False)
EXPERTS, TOP, HIDDEN, INNER = 8, 2, 64, 64


def quiet(done: int, total: int) -> None:
    """No progress line."""


def samples(count: int = 3) -> list[Sample]:
    rng = np.random.default_rng(1)
    return [Sample(rng.integers(0, 128, 70 + i).astype(np.int32), 5, "noise") for i in range(count)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forward") / "src"
    return tiny.write_checkpoint(path, WEIGHTS, tiny.config(vision=False, mtp=False))


@pytest.fixture(scope="module")
def model(source: Path) -> Iterator[Forward]:
    loaded = Forward(source, 2)
    yield loaded
    loaded.close()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("layer", [1, 3])
def test_parts_of_a_layer_add_up(model: Forward, layer: int) -> None:
    prefix = f"{PREFIX}layers.{layer}."
    sample = samples()[0]
    before = model.embed(sample)
    after, seen = model.layer(sample, layer, before)
    np.testing.assert_allclose(
        seen.mixer_input, rms_norm(before, 1 + WEIGHTS[f"{prefix}input_layernorm.weight"], 1e-6), rtol=1e-4, atol=1e-5
    )
    out = "self_attn.o_proj" if layer == 3 else "linear_attn.out_proj"
    middle = before + seen.mixer_output @ WEIGHTS[f"{prefix}{out}.weight"].T
    moe_input = rms_norm(middle, 1 + WEIGHTS[f"{prefix}post_attention_layernorm.weight"], 1e-6)
    np.testing.assert_allclose(seen.moe_input, moe_input, rtol=1e-3, atol=1e-4)
    routed = np.zeros_like(before)
    for slot in range(len(seen.slot_expert)):
        expert, token = seen.slot_expert[slot], seen.slot_token[slot]
        both = WEIGHTS[f"{prefix}mlp.experts.gate_up_proj"][expert] @ moe_input[token]
        inner = both[:INNER] * sigmoid(both[:INNER]) * both[INNER:]
        np.testing.assert_allclose(seen.expert_hidden[slot], inner, rtol=1e-3, atol=1e-4)
        output = WEIGHTS[f"{prefix}mlp.experts.down_proj"][expert] @ inner
        np.testing.assert_allclose(seen.expert_norm[slot], np.linalg.norm(output), rtol=1e-3)
        routed[token] += seen.slot_weight[slot] * output
    gate = sigmoid(moe_input @ WEIGHTS[f"{prefix}mlp.shared_expert_gate.weight"].T)
    shared = gate * (seen.shared_hidden @ WEIGHTS[f"{prefix}mlp.shared_expert.down_proj.weight"].T)
    np.testing.assert_allclose(after, middle + routed + shared, rtol=1e-3, atol=1e-4)


def test_layer_by_layer_is_the_whole_model(model: Forward) -> None:
    sample = samples()[1]
    hidden = model.embed(sample)
    for layer in range(4):
        hidden, _ = model.layer(sample, layer, hidden)
    expected = model.head_input(hidden) @ WEIGHTS["lm_head.weight"].T
    got = np.array(list(model.logits(sample)))
    np.testing.assert_allclose(got, expected[sample.first_label - 1 : -1], rtol=1e-3, atol=1e-4)


def test_statistics_are_sums_over_all_samples(model: Forward, tmp_path: Path) -> None:
    chosen = samples()
    calibrate(model, chosen, tmp_path / "statistics", second_order=True, progress=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["statistics"]
    calibration = Calibration(tmp_path / "statistics")
    prefix = f"{PREFIX}layers.0."
    observed = [model.layer(sample, 0, model.embed(sample))[1] for sample in chosen]
    name = f"{prefix}linear_attn.in_proj_qkv.weight"
    importance = calibration.importance(name, 0)
    assert importance is not None
    square = np.square(np.concatenate([seen.mixer_input for seen in observed])).sum(axis=0)
    np.testing.assert_allclose(importance, (square / square.mean() + 0.01) / 1.01, rtol=1e-4)
    tokens = sum(len(sample.token_ids) for sample in chosen)
    counts = calibration.scores("tokens")[f"{prefix}mlp."]
    assert counts.sum() == tokens * TOP
    saliency = calibration.scores("saliency")[f"{prefix}mlp."]
    assert ((saliency > 0) == (counts > 0)).all()
    assert calibration.curvature(f"{prefix}mlp.experts.gate_up_proj", int(counts.argmax())) is not None


def test_saliency_is_the_mean_over_routed_tokens(model: Forward, tmp_path: Path) -> None:
    sample = samples(1)[0]
    calibrate(model, [sample], tmp_path / "statistics", second_order=False, progress=quiet)
    _, seen = model.layer(sample, 0, model.embed(sample))
    expected = np.zeros(EXPERTS)
    for expert in range(EXPERTS):
        own = seen.slot_expert == expert
        expected[expert] = np.mean(seen.slot_weight[own] * seen.expert_norm[own]) if own.any() else 0
    got = Calibration(tmp_path / "statistics").scores("saliency")[f"{PREFIX}layers.0.mlp."]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_failure_leaves_no_file(model: Forward, tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        calibrate(model, samples(), tmp_path / "statistics", second_order=False, progress=fail)
    assert not list(tmp_path.iterdir())


def test_error_feedback_brings_outputs_nearer(tmp_path: Path) -> None:
    """The whole chain: calibrated 4-bit weights stay closer to the original than uncalibrated ones."""
    rng = np.random.default_rng(2)
    name = f"{PREFIX}embed_tokens.weight"  # inputs in few directions, as trained models have them
    embedding = (rng.standard_normal((128, 6)) @ rng.standard_normal((6, 64))).astype(np.float32)
    weights = WEIGHTS | {name: tiny.bf16_exact(embedding)}
    source = tiny.write_checkpoint(tmp_path / "src", weights, tiny.config(vision=False, mtp=False))
    model = Forward(source, 2)
    calibrate(model, samples(20), tmp_path / "statistics", second_order=True, progress=quiet)
    held_out = [Sample(sample.token_ids[::-1].copy(), 5, "noise") for sample in samples(8)]
    divergences = []
    for name, calibration in (("plain", None), ("calibrated", Calibration(tmp_path / "statistics"))):
        prepared = convert.prepare(source, Options(calibration=calibration))
        convert.run(prepared, tmp_path / name, threads=2, progress=quiet)
        candidate = Forward(tmp_path / name, 2)
        score = compare(held_out, map(model.logits, held_out), map(candidate.logits, held_out))
        candidate.close()
        divergences.append(score.kl)
    model.close()
    assert divergences[1] < 0.9 * divergences[0]
