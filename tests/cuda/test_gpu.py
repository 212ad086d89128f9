"""Whole-model prefill through the CUDA kernels, run on the CPU, against the CPU engine's float32 path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_card import EmulatedCard
from tiny_models import load_model, vector_checkpoint, write_safetensors, write_tokenizer

from engine import formats
from engine.config import QUANTIZATION, ModelConfig
from engine.core import Float32Array, Int32Array
from engine.errors import ConfigError, OutOfMemory
from engine.gpu import GpuPrefill, make_plan
from engine.model import Model, text_positions
from engine.state import SequenceState
from engine.weights import Weights, load_weights

TOLERANCE = 1e-4  # of the logits' scale
VECTORS = Path(__file__).parents[1] / "vectors"
CONTEXT = 512
IDS = np.random.default_rng(11).integers(0, 512, 333).astype(np.int32)


def card_checkpoint(directory: Path) -> Path:
    """A random 4-bit model of sizes that the kernels cover: 3 delta nets and 1 attention, grouped heads, 6 experts."""
    directory.mkdir()
    config = json.loads((VECTORS / "a.json").read_text())
    del config["vision_config"]
    config["quantization_config"] = dict(QUANTIZATION)
    config["text_config"].update(
        hidden_size=128, head_dim=64, num_attention_heads=4, num_key_value_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64, vocab_size=512,
        mtp_num_hidden_layers=0,
    )  # fmt: skip
    config["text_config"]["rope_parameters"].update(mrope_section=[4, 2, 2])
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(5)
    tensors: dict[str, Any] = {}

    def packed(name: str, *shape: int) -> None:
        weights = rng.standard_normal(shape, np.float32) * (1.0 if "embed" in name else shape[-1] ** -0.5)
        blocks = formats.pack_q4(*formats.quantize_absmax(weights.reshape(-1, shape[-1])))
        tensors[name] = ("U8", formats.packed_shape(shape), blocks.tobytes())

    def floats(name: str, *shape: int, scale: float = 0.3) -> None:
        tensors[name] = ("F32", shape, (rng.standard_normal(shape, np.float32) * scale).tobytes())

    packed("model.language_model.embed_tokens.weight", 512, 128)
    packed("lm_head.weight", 512, 128)
    floats("model.language_model.norm.weight", 128)
    for i in range(4):
        layer = f"model.language_model.layers.{i}."
        floats(f"{layer}input_layernorm.weight", 128)
        floats(f"{layer}post_attention_layernorm.weight", 128)
        if i == 3:
            for name, rows, cols in (("q", 512, 128), ("k", 128, 128), ("v", 128, 128), ("o", 128, 256)):
                packed(f"{layer}self_attn.{name}_proj.weight", rows, cols)
            floats(f"{layer}self_attn.q_norm.weight", 64)
            floats(f"{layer}self_attn.k_norm.weight", 64)
        else:
            for name, rows, cols in (("in_proj_qkv", 256, 128), ("in_proj_z", 128, 128), ("out_proj", 128, 128)):
                packed(f"{layer}linear_attn.{name}.weight", rows, cols)
            floats(f"{layer}linear_attn.in_proj_b.weight", 4, 128, scale=0.09)
            floats(f"{layer}linear_attn.in_proj_a.weight", 4, 128, scale=0.09)
            floats(f"{layer}linear_attn.conv1d.weight", 256, 1, 4)
            floats(f"{layer}linear_attn.A_log", 4)
            floats(f"{layer}linear_attn.dt_bias", 4)
            floats(f"{layer}linear_attn.norm.weight", 32, scale=1.0)
        floats(f"{layer}mlp.gate.weight", 6, 128, scale=0.2)
        floats(f"{layer}mlp.shared_expert_gate.weight", 1, 128, scale=0.2)
        packed(f"{layer}mlp.experts.gate_up_proj", 6, 128, 128)
        packed(f"{layer}mlp.experts.down_proj", 6, 128, 64)
        packed(f"{layer}mlp.shared_expert.gate_proj.weight", 64, 128)
        packed(f"{layer}mlp.shared_expert.up_proj.weight", 64, 128)
        packed(f"{layer}mlp.shared_expert.down_proj.weight", 128, 64)
    write_safetensors(directory / "model.safetensors", tensors)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return card_checkpoint(tmp_path_factory.mktemp("models") / "card")


@pytest.fixture
def weights(checkpoint: Path) -> Weights:
    return load_weights(checkpoint, ModelConfig.load(checkpoint))


@pytest.fixture
def model(checkpoint: Path) -> Iterator[Model]:
    loaded = load_model(checkpoint, compute="f32", threads=1, pass_tokens=64)
    yield loaded
    loaded.close()


def on_card(weights: Weights, model: Model, card: EmulatedCard, memory: int | None = None) -> GpuPrefill:
    return GpuPrefill(weights, model.cpu, card, cpu_pass_tokens=64, context_length=CONTEXT, memory_limit=memory)


def run(gpu: GpuPrefill, state: SequenceState, ids: Int32Array, **more: Any) -> Float32Array:
    positions = more.pop("positions", None)
    if positions is None:
        positions = text_positions(state.position, len(ids))
    steps = gpu.prefill_steps(state, ids, positions, **more)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            logits: Float32Array = end.value
            return logits


def deviation(got: Float32Array, expected: Float32Array) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def contents(state: SequenceState) -> bytes:
    """All of a state that later tokens can see: pages up to the position."""
    pages = np.stack([page.view(np.float32) for page in state.pages])
    seen = pages.reshape(len(pages), -1, 64, state.config.head_dim).transpose(1, 0, 2, 3)
    seen = seen.reshape(seen.shape[0], -1, state.config.head_dim)[:, : state.position]
    return state.conv.tobytes() + state.ssm.tobytes() + seen.tobytes()


@pytest.mark.parametrize("length", [1, 31, 64, 100, 333])
def test_prefill_equals_the_cpu_engine(weights: Weights, model: Model, library: Path, length: int) -> None:
    gpu = on_card(weights, model, EmulatedCard(library))
    expected_state, state = model.new_state(), model.new_state()
    expected = model.prefill(expected_state, IDS[:length])
    got = run(gpu, state, IDS[:length])
    assert deviation(got, expected) < TOLERANCE
    assert deviation(state.ssm, expected_state.ssm) < TOLERANCE
    assert deviation(state.conv, expected_state.conv) < TOLERANCE
    assert state.position == length


def test_greedy_continuation_on_the_cpu_is_the_same(weights: Weights, model: Model, library: Path) -> None:
    gpu = on_card(weights, model, EmulatedCard(library))
    continuations = []
    for on_gpu in (False, True):
        state = model.new_state()
        logits = run(gpu, state, IDS[:150]) if on_gpu else model.prefill(state, IDS[:150])
        ids = []
        for _ in range(12):
            ids.append(int(np.argmax(logits)))
            logits = model.decode(state, ids[-1])
        continuations.append(ids)
    assert continuations[0] == continuations[1]


@pytest.mark.parametrize("cut", [64, 128, 320])
def test_resumed_prefill_is_bit_equal(weights: Weights, model: Model, library: Path, cut: int) -> None:
    gpu = on_card(weights, model, EmulatedCard(library))
    whole, split = model.new_state(), model.new_state()
    expected = run(gpu, whole, IDS)
    run(gpu, split, IDS[:cut])
    assert np.array_equal(run(gpu, split, IDS[cut:]), expected)
    assert contents(split) == contents(whole)


def test_what_stays_on_the_card_and_how_passes_are_cut_changes_no_bit(
    weights: Weights, model: Model, library: Path
) -> None:
    results = []
    roomy = make_plan(weights, True, 1 << 30, CONTEXT, None)
    streaming = None
    for memory in (None, *range(4_000_000, 1_000_000, -100_000)):
        try:
            plan = make_plan(weights, True, 1 << 30, CONTEXT, memory)
        except OutOfMemory:
            break
        if not plan.resident and plan.pass_tokens < len(IDS):
            streaming = memory
    assert len(roomy.resident) == 4
    assert streaming is not None
    for memory in (None, streaming):
        card = EmulatedCard(library)
        gpu, state = on_card(weights, model, card, memory), model.new_state()
        logits = run(gpu, state, IDS)
        results.append((logits.tobytes(), contents(state)))
        assert ("copy" in card.log) == (memory is not None)
    assert results[0] == results[1]


def test_pictures_replace_embeddings_and_set_positions(weights: Weights, model: Model, library: Path) -> None:
    gpu = on_card(weights, model, EmulatedCard(library))
    rows = np.random.default_rng(2).standard_normal((70, 128)).astype(np.float32)
    positions = text_positions(0, 120)
    positions[20:90, 1] += np.arange(70) // 10
    positions[20:90, 2] += np.arange(70) % 10
    expected = model.prefill(model.new_state(), IDS[:120], positions, [(20, rows)])
    got = run(gpu, model.new_state(), IDS[:120], positions=positions, embeddings=[(20, rows)])
    assert deviation(got, expected) < TOLERANCE


def test_a_prefill_left_early_leaves_the_card_ready_and_its_memory_as_it_was(
    weights: Weights, model: Model, library: Path
) -> None:
    card = EmulatedCard(library)
    gpu = on_card(weights, model, card)
    held = dict(card.allocated)
    expected = run(gpu, model.new_state(), IDS[:100])
    for layers in (1, 2, 3):
        steps = gpu.prefill_steps(model.new_state(), IDS, text_positions(0, len(IDS)))
        for _ in range(layers):
            next(steps)
        steps.close()
    assert np.array_equal(run(gpu, model.new_state(), IDS[:100]), expected)
    assert card.allocated == held
    gpu.close()
    assert not card.allocated


def test_progress_counts_up_to_the_whole_segment(weights: Weights, model: Model, library: Path) -> None:
    gpu = on_card(weights, model, EmulatedCard(library))
    told = list(gpu.prefill_steps(model.new_state(), IDS, text_positions(0, len(IDS))))
    assert told == sorted(told)
    assert told[-1] == len(IDS)


def test_a_context_beyond_the_plan_is_refused_before_any_work(weights: Weights, model: Model, library: Path) -> None:
    card = EmulatedCard(library)
    gpu, state = on_card(weights, model, card), model.new_state()
    launched = len(card.log)
    with pytest.raises(OutOfMemory, match=r"512 tokens, not 600"):
        run(gpu, state, np.zeros(600, np.int32))
    assert state.position == 0
    assert len(card.log) == launched


def test_a_card_that_is_too_small_is_an_error_with_both_sizes(weights: Weights, model: Model, library: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"needs \d+ bytes .* 100000 may be used"):
        on_card(weights, model, EmulatedCard(library), 100_000)


def test_a_model_that_the_kernels_do_not_cover_is_refused(tmp_path: Path, library: Path) -> None:
    checkpoint = vector_checkpoint(tmp_path / "a", "a")
    model = load_model(checkpoint, compute="f32")
    weights = load_weights(checkpoint, ModelConfig.load(checkpoint))
    with pytest.raises(ConfigError, match=r"prefill on the GPU: .* expected"):
        on_card(weights, model, EmulatedCard(library))
    model.close()
