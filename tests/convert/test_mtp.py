"""The layer for multi-token prediction, against its equations in float64: what it computes, what calibration records
of it, and which of its experts pruning keeps. Transformers ignores `mtp.*`, so the reference is written here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tiny_checkpoint as tiny

from engine.convert import convert, writer
from engine.convert.calibrate import calibrate
from engine.convert.calibration import Calibration
from engine.convert.convert import Options
from engine.convert.corpus import Sample
from engine.convert.evaluate import draft_acceptance
from engine.convert.forward import Forward, MtpForward
from engine.convert.prune import select
from engine.errors import ConfigError, ModelFileError

WEIGHTS = tiny.random_weights(vision=False)
BLOCK = "mtp.layers.0.mlp."
HEADS, KV_HEADS, HEAD, ROTARY, TOP, INNER, EPS = 4, 2, 32, 8, 2, 64, 1e-6
Floats = npt.NDArray[np.float64]


def quiet(done: int, total: int) -> None:
    """No progress line."""


def samples(count: int = 3) -> list[Sample]:
    rng = np.random.default_rng(4)
    return [Sample(rng.integers(0, 128, 70 + i).astype(np.int32), 5, "noise") for i in range(count)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("mtp") / "src", WEIGHTS, tiny.config(vision=False))


@pytest.fixture(scope="module")
def model(source: Path) -> Iterator[Forward]:
    loaded = Forward(source, 2, "f32")  # keys and values in float32 too
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def mtp(model: Forward) -> Iterator[MtpForward]:
    loaded = model.mtp()
    assert loaded is not None
    yield loaded
    loaded.close()


def final_state(model: Forward, sample: Sample) -> npt.NDArray[np.float32]:
    """The trunk's state behind its final norm, [T, hidden]."""
    hidden = model.embed(sample)
    for layer in range(4):
        hidden, _ = model.layer(sample, layer, hidden)
    return model.head_input(hidden)


# ---- the equations ------------------------------------------------------------------------------------------------


def weight(name: str) -> Floats:
    return WEIGHTS[name].astype(np.float64)


def norm(x: Floats, name: str) -> Floats:
    """RMS norm with gain 1 + w."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * (1 + weight(f"{name}.weight"))


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def rotate(x: Floats, positions: Floats) -> Floats:
    """The first ROTARY entries of each head in pairs (j, j + ROTARY / 2). x: [T, heads, HEAD]."""
    half = ROTARY // 2
    angle = positions[:, None] * 1e7 ** (-2 * np.arange(half) / ROTARY)
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:ROTARY]
    turned = (first * cosine - second * sine, first * sine + second * cosine, x[..., ROTARY:])
    return np.concatenate(turned, axis=-1)


def attention(x: Floats) -> Floats:
    prefix, tokens = "mtp.layers.0.self_attn.", len(x)
    positions = np.arange(tokens, dtype=np.float64)
    both = (x @ weight(f"{prefix}q_proj.weight").T).reshape(tokens, HEADS, 2 * HEAD)
    query, gate = both[..., :HEAD], both[..., HEAD:]
    key = (x @ weight(f"{prefix}k_proj.weight").T).reshape(tokens, KV_HEADS, HEAD)
    value = (x @ weight(f"{prefix}v_proj.weight").T).reshape(tokens, KV_HEADS, HEAD)
    query = rotate(norm(query, f"{prefix}q_norm"), positions)
    key = rotate(norm(key, f"{prefix}k_norm"), positions)
    mixed = np.empty((tokens, HEADS, HEAD))
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = query[:, head] @ key[:, group].T / np.sqrt(HEAD)
        scores[np.triu_indices(tokens, 1)] = -np.inf
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed[:, head] = share / share.sum(axis=1, keepdims=True) @ value[:, group]
    return (mixed * sigmoid(gate)).reshape(tokens, -1) @ weight(f"{prefix}o_proj.weight").T


@dataclass
class Routed:
    """chosen, gate: [T, TOP]; norms: [T, experts], the length of each expert's output on each token."""

    chosen: npt.NDArray[np.int64]
    gate: Floats
    norms: Floats


def mixture(x: Floats) -> tuple[Floats, Routed]:
    gate_up, down = weight(f"{BLOCK}experts.gate_up_proj"), weight(f"{BLOCK}experts.down_proj")
    logits = x @ weight(f"{BLOCK}gate.weight").T
    probability = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen = np.argsort(-probability, axis=1, kind="stable")[:, :TOP]
    gate = np.take_along_axis(probability, chosen, axis=1)
    gate /= gate.sum(axis=1, keepdims=True)
    both = np.einsum("th,eoh->teo", x, gate_up)
    inner = both[..., :INNER] * sigmoid(both[..., :INNER]) * both[..., INNER:]
    outputs = np.einsum("tei,ehi->teh", inner, down)
    result = sum(gate[:, k, None] * outputs[np.arange(len(x)), chosen[:, k]] for k in range(TOP))
    up = x @ weight(f"{BLOCK}shared_expert.up_proj.weight").T
    act = x @ weight(f"{BLOCK}shared_expert.gate_proj.weight").T
    shared = (act * sigmoid(act) * up) @ weight(f"{BLOCK}shared_expert.down_proj.weight").T
    result = result + sigmoid(x @ weight(f"{BLOCK}shared_expert_gate.weight").T) * shared
    return result, Routed(chosen, gate, np.linalg.norm(outputs, axis=2))


def reference(sample: Sample, final: npt.NDArray[np.float32]) -> tuple[Floats, Floats, Routed]:
    """(logits [T - 1, vocab], input of fc, routing). final: the trunk's state behind its final norm."""
    embedding = weight(f"{tiny.PREFIX}embed_tokens.weight")[sample.token_ids[1:]]
    halves = norm(embedding, "mtp.pre_fc_norm_embedding"), norm(final[:-1].astype(np.float64), "mtp.pre_fc_norm_hidden")
    joined = np.concatenate(halves, axis=1)
    x = joined @ weight("mtp.fc.weight").T
    x = x + attention(norm(x, "mtp.layers.0.input_layernorm"))
    routed, routing = mixture(norm(x, "mtp.layers.0.post_attention_layernorm"))
    logits = norm(x + routed, "mtp.norm") @ weight("lm_head.weight").T
    return logits, joined, routing


# ---- the tests ----------------------------------------------------------------------------------------------------


def test_logits_are_those_of_the_equations(model: Forward, mtp: MtpForward) -> None:
    for sample in samples():
        final = final_state(model, sample)
        expected, joined, _ = reference(sample, final)
        np.testing.assert_allclose(mtp.fc_input(sample, final), joined, rtol=1e-4, atol=1e-4)
        got = np.array(list(mtp.logits(sample, final)))
        scale = np.abs(expected).max()
        np.testing.assert_allclose(got, expected[sample.first_label - 2 : -1], atol=1e-5 * scale)


def test_accepted_drafts_are_counted_where_the_trunk_agrees(model: Forward) -> None:
    chosen = samples()
    agreed = []
    for sample in chosen:
        drafts = reference(sample, final_state(model, sample))[0].argmax(axis=1)
        own = [int(logits.argmax()) for logits in model.logits(sample)]
        agreed += list(drafts[sample.first_label - 2 : -1] == own)
    assert draft_acceptance(model, chosen) == pytest.approx(np.mean(agreed))


def test_saliency_is_that_of_the_equations(model: Forward, tmp_path: Path) -> None:
    chosen = samples()
    calibrate(model, chosen, tmp_path / "statistics", second_order=True, progress=quiet)
    calibration = Calibration(tmp_path / "statistics")
    total, tokens, square = np.zeros(8), np.zeros(8), np.zeros(128)
    for sample in chosen:
        _, joined, routing = reference(sample, final_state(model, sample))
        square += (joined**2).sum(axis=0)
        for k in range(TOP):
            expert = routing.chosen[:, k]
            np.add.at(tokens, expert, 1)
            np.add.at(total, expert, routing.gate[:, k] * routing.norms[np.arange(len(expert)), expert])
    np.testing.assert_array_equal(calibration.scores("tokens")[BLOCK], tokens)
    np.testing.assert_allclose(calibration.scores("saliency")[BLOCK], total / tokens, rtol=1e-4)
    importance = calibration.importance("mtp.fc.weight", 0)
    assert importance is not None
    np.testing.assert_allclose(importance, (square / square.mean() + 0.01) / 1.01, rtol=1e-4)
    assert calibration.curvature("mtp.fc.weight", 0) is not None
    assert calibration.curvature(f"{BLOCK}experts.down_proj", 0) is not None


def test_pruning_keeps_its_experts_by_their_own_saliency(model: Forward, source: Path, tmp_path: Path) -> None:
    calibrate(model, samples(), tmp_path / "statistics", second_order=False, progress=quiet)
    scores = Calibration(tmp_path / "statistics").scores("saliency")
    assert len(scores) == 5
    selection = select(scores, 4)
    kept = selection.blocks[BLOCK]
    assert kept == tuple(sorted(np.argsort(-scores[BLOCK])[:4]))
    assert any(kept != ids for prefix, ids in selection.blocks.items() if prefix != BLOCK)
    conversion = convert.prepare(source, Options(selection=selection, recipe="float"))
    tensors = {tensor.name: tensor for tensor in conversion.plan.tensors}
    for name in (f"{BLOCK}gate.weight", f"{BLOCK}experts.gate_up_proj", f"{BLOCK}experts.down_proj"):
        tensor = tensors[name]
        got = writer.read_rows(tensor, 0, tensor.rows).reshape(tensor.shape)
        np.testing.assert_array_equal(got, WEIGHTS[name][list(kept)], err_msg=name)
    text = json.loads(conversion.side_files["config.json"])["text_config"]
    assert (text["num_experts"], text["mtp_num_hidden_layers"]) == (4, 1)
    assert "mtp_num_experts" not in text
    convert.run(conversion, tmp_path / "pruned", threads=1, progress=quiet)
    pruned = Forward(tmp_path / "pruned", 1)
    layer = pruned.mtp()
    assert layer is not None
    assert layer.config.num_experts == 4
    layer.close()
    pruned.close()


def mixed_counts(tmp_path: Path) -> Path:
    """A trunk pruned to 4 experts whose prediction layer kept its 8, as such checkpoints are published."""
    weights = tiny.random_weights(vision=False, experts=4) | {k: v for k, v in WEIGHTS.items() if k.startswith("mtp.")}
    return tiny.write_checkpoint(tmp_path / "mixed", weights, tiny.config(vision=False, experts=4))


def test_trunk_and_prediction_layer_may_differ_in_experts(tmp_path: Path) -> None:
    source = mixed_counts(tmp_path)
    model = Forward(source, 1)
    calibrate(model, samples(), tmp_path / "statistics", second_order=False, progress=quiet)
    model.close()
    scores = Calibration(tmp_path / "statistics").scores("saliency")
    assert {prefix: len(score) for prefix, score in scores.items()}[BLOCK] == 8
    selection = select(scores, 3)
    selection.save(tmp_path / "experts.json")
    assert selection.load(tmp_path / "experts.json") == selection
    plan = convert.prepare(source, Options(selection=selection)).plan
    assert {t.shape[0] for t in plan.tensors if t.name.endswith("experts.down_proj")} == {3}
    assert plan.mtp_experts == 3
    with pytest.raises(ConfigError, match="keep 5: expected 1 to 4 experts"):
        select(scores, 5)


def test_too_few_experts_are_refused(tmp_path: Path) -> None:
    weights = dict(WEIGHTS)
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        weights[BLOCK + name] = WEIGHTS[BLOCK + name][:1]
    source = tiny.write_checkpoint(tmp_path / "src", weights, tiny.config(vision=False))
    with pytest.raises(ModelFileError, match=r"1 experts under mtp\.layers\.0\.mlp\., but 2"):
        Forward(source, 1)


def test_a_model_without_one_has_none(tmp_path: Path) -> None:
    weights = tiny.random_weights(vision=False, mtp=False)
    model = Forward(tiny.write_checkpoint(tmp_path / "src", weights, tiny.config(vision=False, mtp=False)), 1)
    assert model.mtp() is None
    assert draft_acceptance(model, samples(1)) is None
    model.close()
