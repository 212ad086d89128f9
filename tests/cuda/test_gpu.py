"""Whole-model prefill through the CUDA kernels and the driver's calls, both run on the CPU, against the CPU engine's
float32 path."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_models import card_checkpoint
from reordered_card import ReorderedCard
from tiny_models import deviation, load_model, vector_checkpoint

import engine.engine
from engine import cuda_driver
from engine.config import EngineConfig, LayerType, ModelConfig, parse_config
from engine.convert.synthetic import Shape, published_config
from engine.core import Float32Array, Int32Array
from engine.cuda_driver import CudaCard
from engine.engine import Engine
from engine.errors import ConfigError, KernelError, OutOfMemory
from engine.gpu import PTX, STOPS_AT_ONCE, GpuPrefill, PassPart, divide, lock_experts, make_plan, open_card
from engine.model import Model, text_positions
from engine.state import SequenceState
from engine.weights import (
    AttentionWeights,
    DeltaNetWeights,
    LayerWeights,
    Matrix,
    ModelFile,
    MoeWeights,
    Weights,
    load_weights,
)

TOLERANCE = 1e-4  # of the logits' scale
CONTEXT = 512
IDS = np.random.default_rng(11).integers(0, 512, 333).astype(np.int32)


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


@pytest.fixture
def card(driver: ctypes.CDLL) -> Iterator[CudaCard]:
    opened = CudaCard(PTX)
    yield opened
    opened.close()


def on_card(weights: Weights, model: Model, card: CudaCard, memory: int | None = None) -> GpuPrefill:
    plan = make_plan(weights, model.cpu.kv_f32, card.free_bytes(), CONTEXT, memory)
    weights, locked = lock_experts(weights, plan, card)
    return GpuPrefill(weights, model.cpu, card, plan, locked=locked)


def open_for(weights: Weights, *, insist: bool = False) -> object:
    return open_card(weights, kv_f32=True, insist=insist, context_length=CONTEXT)


def run(gpu: GpuPrefill, state: SequenceState, ids: Int32Array, **more: Any) -> Float32Array:
    positions = more.pop("positions", None)
    if positions is None:
        positions = text_positions(state.position, len(ids))
    steps = gpu.advance_steps(state, ids, positions, **more)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return gpu._cpu.logits(end.value)


def contents(state: SequenceState) -> bytes:
    """All of a state that later tokens can see: pages up to the position."""
    pages = np.stack([page.view(np.float32) for page in state.pages])
    seen = pages.reshape(len(pages), -1, 64, state.config.head_dim).transpose(1, 0, 2, 3)
    seen = seen.reshape(seen.shape[0], -1, state.config.head_dim)[:, : state.position]
    return state.conv.tobytes() + state.ssm.tobytes() + seen.tobytes()


@pytest.mark.parametrize("length", [1, 31, 64, 100, 333])
def test_prefill_equals_the_cpu_engine(weights: Weights, model: Model, card: CudaCard, length: int) -> None:
    gpu = on_card(weights, model, card)
    expected_state, state = model.new_state(), model.new_state()
    expected = model.prefill(expected_state, IDS[:length])
    got = run(gpu, state, IDS[:length])
    assert deviation(got, expected) < TOLERANCE
    assert deviation(state.ssm, expected_state.ssm) < TOLERANCE
    assert deviation(state.conv, expected_state.conv) < TOLERANCE
    assert state.position == length


def test_greedy_continuation_on_the_cpu_is_the_same(weights: Weights, model: Model, card: CudaCard) -> None:
    gpu = on_card(weights, model, card)
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
def test_resumed_prefill_is_bit_equal(weights: Weights, model: Model, card: CudaCard, cut: int) -> None:
    gpu = on_card(weights, model, card)
    whole, split = model.new_state(), model.new_state()
    expected = run(gpu, whole, IDS)
    run(gpu, split, IDS[:cut])
    assert np.array_equal(run(gpu, split, IDS[cut:]), expected)
    assert contents(split) == contents(whole)


@pytest.mark.parametrize("read_only", [False, True])
def test_segments_of_one_call_have_the_bits_of_separate_calls(
    weights: Weights, model: Model, card: CudaCard, driver: ctypes.CDLL, read_only: bool
) -> None:
    """With the states that the call leaves behind on its way."""
    driver.fake_read_only(read_only)
    gpu, starts, stops = on_card(weights, model, card), (130, 195, 203), (64, 130, 203, 267)
    separate, expected = model.new_state(), {}
    for begin, end in pairwise([0, 64, 130, 195, 203, 267, 333]):
        logits = run(gpu, separate, IDS[begin:end])
        expected[end] = contents(separate)
    state, found = model.new_state(), {}
    got = run(
        gpu, state, IDS, starts=starts, stops=stops, reached=lambda: found.update({state.position: contents(state)})
    )
    assert np.array_equal(got, logits)
    assert found == {stop: expected[stop] for stop in stops}
    assert contents(state) == expected[333]


def test_passes_end_on_the_grid_of_their_segment_and_leave_few_states() -> None:
    assert divide(0, 100, (), (), 4096) == [PassPart(0, 100, (0,), ())]
    assert [(part.first, part.end) for part in divide(0, 300, (70,), (), 128)] == [(0, 70), (70, 198), (198, 300)]
    stops = tuple(range(64, 64 * 12, 64))
    parts = divide(0, 64 * 12, (), stops, 4096)
    assert [part.end for part in parts] == [64 * (STOPS_AT_ONCE + 1), 64 * 12]
    assert [*parts[0].stops, parts[0].end, *parts[1].stops] == list(stops)
    table = PassPart(64, 140, (64, 130), (128, 130)).chunks()
    assert table.tolist() == [[0, 32, -1, 0], [32, 32, 0, 0], [64, 2, 1, 0], [66, 10, -1, 0]]
    resumed = PassPart(101, 180, (101,), (128,)).chunks()
    assert resumed.tolist() == [[0, 27, 0, 0], [27, 32, -1, 0], [59, 20, -1, 0]]


def streaming_memory(weights: Weights) -> int:
    """So little memory that all experts travel and IDS take several passes."""
    found = None
    for memory in range(6_000_000, 1_000_000, -100_000):
        try:
            plan = make_plan(weights, True, 1 << 30, CONTEXT, memory)
        except OutOfMemory:
            break
        if not plan.resident and plan.pass_tokens < len(IDS) <= plan.kv_tokens:
            found = memory
    assert found is not None
    return found


def test_what_stays_on_the_card_and_how_passes_are_cut_changes_no_bit(
    weights: Weights, model: Model, driver: ctypes.CDLL
) -> None:
    """Everything resident and one pass, against experts that travel and several passes."""
    streaming = streaming_memory(weights)
    results = []
    for limit in (None, streaming):
        gpu, state = on_card(weights, model, CudaCard(PTX), limit), model.new_state()
        assert bool(gpu.plan.resident) == (limit is None)
        results.append((run(gpu, state, IDS).tobytes(), contents(state)))
        gpu.close()
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "order", [("first", "second", "copies"), ("second", "first", "copies"), ("copies", "second", "first")], ids="-".join
)
def test_streams_may_run_in_any_order_that_their_events_allow(
    weights: Weights, model: Model, driver: ctypes.CDLL, order: Sequence[str]
) -> None:
    starts, stops, results = (130, 195, 203), (64, 130, 203), []
    for card in (CudaCard(PTX), ReorderedCard(PTX, order)):
        gpu, state, found = on_card(weights, model, card, streaming_memory(weights)), model.new_state(), []
        logits = run(
            gpu, state, IDS, starts=starts, stops=stops, reached=lambda: found.append(contents(state))  # noqa: B023
        )  # fmt: skip
        results.append((logits.tobytes(), contents(state), found))
        gpu.close()
    assert results[0] == results[1]


def test_pictures_replace_embeddings_and_set_positions(weights: Weights, model: Model, card: CudaCard) -> None:
    gpu = on_card(weights, model, card)
    rows = np.random.default_rng(2).standard_normal((70, 128)).astype(np.float32)
    positions = text_positions(0, 120)
    positions[20:90, 1] += np.arange(70) // 10
    positions[20:90, 2] += np.arange(70) % 10
    expected = model.prefill(model.new_state(), IDS[:120], positions, [(20, rows)])
    got = run(gpu, model.new_state(), IDS[:120], positions=positions, embeddings=[(20, rows)])
    assert deviation(got, expected) < TOLERANCE


def test_prefills_left_early_leave_the_card_ready_and_its_memory_as_it_was(
    weights: Weights, model: Model, card: CudaCard, driver: ctypes.CDLL
) -> None:
    gpu = on_card(weights, model, card)
    expected = run(gpu, model.new_state(), IDS[:100])
    card.synchronize()
    live = driver.fake_live()
    for layers in np.random.default_rng(4).integers(1, 5, 20):
        steps = gpu.advance_steps(model.new_state(), IDS[:130], text_positions(0, 130))
        for _ in range(layers):
            next(steps)
        steps.close()
    assert np.array_equal(run(gpu, model.new_state(), IDS[:100]), expected)
    card.synchronize()
    assert driver.fake_live() == live
    gpu.close()
    assert driver.fake_live() == 0


def test_progress_counts_up_to_the_whole_segment(weights: Weights, model: Model, card: CudaCard) -> None:
    gpu = on_card(weights, model, card)
    told = list(gpu.advance_steps(model.new_state(), IDS, text_positions(0, len(IDS))))
    assert told == sorted(told)
    assert told[-1] == len(IDS)


def test_a_context_beyond_the_plan_is_refused_before_any_work(
    weights: Weights, model: Model, card: CudaCard, driver: ctypes.CDLL
) -> None:
    gpu, state, launched = on_card(weights, model, card), model.new_state(), driver.fake_launches()
    with pytest.raises(OutOfMemory, match=r"512 tokens, not 600"):
        run(gpu, state, np.zeros(600, np.int32))
    assert state.position == 0
    assert driver.fake_launches() == launched


def test_a_card_that_is_too_small_is_an_error_with_both_sizes(weights: Weights, model: Model, card: CudaCard) -> None:
    with pytest.raises(OutOfMemory, match=r"needs \d+ bytes .* 100000 may be used"):
        on_card(weights, model, card, 100_000)


def test_memory_that_another_program_took_meanwhile_is_given_back_and_told(
    checkpoint: Path, driver: ctypes.CDLL, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(threads=1, context_length=CONTEXT, device="auto", gpu_min_tokens=64)
    monkeypatch.setattr(engine.engine, "_GPU_DEVICE", Path("/"))
    driver.fake_fail(b"cuMemAlloc_v2", 2)
    with Engine.load(checkpoint, config):
        assert "prompts run on the CPU: the card has no" in caplog.text
        assert driver.fake_live() == 0
    driver.fake_fail(b"cuMemAlloc_v2", 2)
    with pytest.raises(ConfigError, match="device is 'gpu', but prompts cannot run there: the card has no"):
        Engine.load(checkpoint, dataclasses.replace(config, device="gpu"))
    assert driver.fake_live() == 0


def test_a_failing_launch_names_the_call(weights: Weights, model: Model, card: CudaCard, driver: ctypes.CDLL) -> None:
    gpu = on_card(weights, model, card)
    driver.fake_fail(b"cuLaunchKernel", 700)
    with pytest.raises(KernelError, match=r"cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        run(gpu, model.new_state(), IDS[:70])


def test_refused_ptx_is_an_error_with_the_compilers_words(driver: ctypes.CDLL) -> None:
    driver.fake_fail(b"cuModuleLoadDataEx", 218)
    with pytest.raises(KernelError, match=r"attention_causal\.ptx failed: .*line 1: refused"):
        CudaCard(PTX)
    assert driver.fake_live() == 0


def test_a_model_that_the_kernels_do_not_cover_is_refused(tmp_path: Path) -> None:
    checkpoint = vector_checkpoint(tmp_path / "a", "a")
    weights = load_weights(checkpoint, ModelConfig.load(checkpoint))
    with pytest.raises(ConfigError, match=r"prefill on the GPU: .* expected"):
        open_for(weights, insist=True)


def test_without_a_driver_auto_is_the_cpu_with_a_line_in_the_log_and_gpu_an_error(
    weights: Weights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    assert open_for(weights) is None
    assert "prompts run on the CPU: no NVIDIA driver" in caplog.text
    with pytest.raises(ConfigError, match=r"device is 'gpu', but .* no NVIDIA driver"):
        open_for(weights, insist=True)


def real_weights() -> Weights:
    """The 35B model pruned to 128 experts, all zeros: arrays that own no memory."""
    config = parse_config(Path("config.json"), published_config(Shape()))

    def matrix(rows: int, cols: int, count: int = 1, *, packed: bool = True) -> Matrix:
        shape = (count, rows // 16, cols // 64, 576) if packed else (count, rows, cols)
        return Matrix(rows, cols, count, np.broadcast_to((np.uint8 if packed else np.float32)(0), shape))

    def vector(size: int) -> Float32Array:
        return np.broadcast_to(np.float32(0), (size,))

    def layer(kind: LayerType) -> LayerWeights:
        mixer: AttentionWeights | DeltaNetWeights
        if kind is LayerType.FULL_ATTENTION:
            q, k, v, o = (matrix(rows, cols) for rows, cols in ((8192, 2048), (512, 2048), (512, 2048), (2048, 4096)))
            mixer = AttentionWeights(q, k, v, o, vector(256), vector(256))
        else:
            small = matrix(32, 2048, packed=False)
            taps = np.broadcast_to(np.float32(0), (4, 8192))
            mixer = DeltaNetWeights(
                matrix(8192, 2048), matrix(4096, 2048), small, small, matrix(2048, 4096), taps, vector(32), vector(32),
                vector(128),
            )  # fmt: skip
        moe = MoeWeights(
            matrix(128, 2048, packed=False), matrix(1, 2048, packed=False), matrix(1024, 2048, 128),
            matrix(2048, 512, 128), matrix(512, 2048), matrix(512, 2048), matrix(2048, 512),
        )  # fmt: skip
        return LayerWeights(vector(2048), vector(2048), mixer, moe)

    table = matrix(config.vocab_size, 2048)
    layers = tuple(layer(kind) for kind in config.layer_types)
    return Weights(config, table, layers, vector(2048), table, ModelFile.__new__(ModelFile))


@pytest.mark.parametrize(
    ("free_mib", "context", "pass_tokens", "resident"),
    [(5375, 4096, 4096, 15), (5375, 32768, 4096, 12), (5375, 262144, 4096, 9), (143_000, 32768, 4096, 40)],
)
def test_plan_of_the_real_model(free_mib: int, context: int, pass_tokens: int, resident: int) -> None:
    plan = make_plan(real_weights(), False, free_mib << 20, context, None)
    assert (plan.pass_tokens, len(plan.resident)) == (pass_tokens, resident)
    assert 0 in plan.resident
    parts = (plan.dense_bytes, plan.expert_bytes, plan.slot_bytes, plan.scratch_bytes, plan.kv_bytes)
    assert sum(parts) <= free_mib << 20
    assert plan.kv_tokens >= min(context, 60_000)
