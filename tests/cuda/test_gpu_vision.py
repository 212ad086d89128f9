"""The vision tower through the CUDA kernels and the driver's calls, both run on the CPU, against the CPU's tower; and
what becomes of prompts with pictures in an engine with a card."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_models import card_checkpoint
from tiny_models import add_turn_token, deviation, load_model
from tiny_pictures import picture

from engine import cuda_driver, gpu_vision
from engine.config import CacheSettings, EngineConfig, ModelConfig, VisionConfig
from engine.core import (
    CacheOptions,
    GenerationRequest,
    ImageSpan,
    Progress,
    Prompt,
    SamplingParams,
    TokenResult,
)
from engine.cuda_driver import CudaCard
from engine.engine import Engine
from engine.errors import Cancelled, KernelError, OutOfMemory
from engine.gpu import PTX, GpuPrefill, IdleMemory, lock_experts, make_plan
from engine.gpu_vision import CardTower, activations, open_tower, page_runs, plan_tower
from engine.model import Model
from engine.vision import VisionTower, picture_flops
from engine.vision_bench import PUBLISHED, random_weights
from engine.weights import VisionWeights, load_weights

pytestmark = pytest.mark.usefixtures("driver")
TOLERANCE = 1e-4  # of the rows' scale
SIZES = ((32, 32), (96, 160), (224, 64), (32, 480))  # height, width: one token, and grids that are not square
TURN, NEWLINE, ASSISTANT, PAD = 258, 198, 64, 508

TINY = VisionConfig(
    depth=2, hidden_size=48, intermediate_size=96, num_heads=4, in_channels=3, patch_size=16, temporal_patch_size=2,
    spatial_merge_size=2, num_position_embeddings=64, out_hidden_size=80,
)  # fmt: skip
WIDE = dataclasses.replace(TINY, hidden_size=144, intermediate_size=528, num_heads=2, num_position_embeddings=49)
"""Heads as wide as the published tower's, and a table with a side that no picture shares."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = card_checkpoint(tmp_path_factory.mktemp("models") / "card", sees=True)
    add_turn_token(directory)
    return directory


@pytest.fixture
def model(checkpoint: Path) -> Iterator[Model]:
    loaded = load_model(checkpoint, compute="f32", threads=1, pass_tokens=64)
    yield loaded
    loaded.close()


@pytest.fixture
def prefill(checkpoint: Path, model: Model) -> Iterator[Callable[[int | None], GpuPrefill]]:
    """Makes the prompts' part of a card, with so much memory."""
    opened: list[CudaCard] = []

    def make(memory: int | None = None) -> GpuPrefill:
        weights = load_weights(checkpoint, ModelConfig.load(checkpoint))
        opened.append(CudaCard(PTX))
        plan = make_plan(weights, True, opened[-1].free_bytes(), 512, memory)
        weights, locked = lock_experts(weights, plan, opened[-1])
        return GpuPrefill(weights, model.cpu, opened[-1], plan, locked=locked)

    yield make
    for card in opened:
        card.close()


def cpu_tower(weights: VisionWeights, model: Model) -> VisionTower:
    return VisionTower(weights, model.cpu.tier, model.cpu.pool)


@pytest.mark.parametrize("shape", [TINY, WIDE], ids=["heads-of-12", "heads-of-72"])
def test_the_card_gives_the_rows_of_the_cpu(
    model: Model, prefill: Callable[..., GpuPrefill], driver: ctypes.CDLL, shape: VisionConfig
) -> None:
    weights = random_weights(shape, seed=3)
    weights = dataclasses.replace(weights, blocks=(weights.blocks[0], random_weights(shape, seed=4).blocks[0]))
    cpu = cpu_tower(weights, model)
    tower, decided = open_tower(weights, cpu, prefill(), None)
    assert decided.startswith(", pictures of up to ")
    for seed, (height, width) in enumerate(SIZES):
        pixels, launched = picture(height, width, seed), driver.fake_launches()
        got = tower.encode(pixels)
        assert got.shape == (height * width // 1024, 80)
        assert driver.fake_launches() - launched == 3 + 9 * shape.depth + 4
        assert deviation(got, cpu.encode(pixels)) < TOLERANCE, f"{width} x {height}"
    tower.close()


def test_the_kernels_for_newer_cards_do_so_too(
    model: Model, prefill: Callable[..., GpuPrefill], newer_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", str(newer_library))
    for shape in (TINY, WIDE):
        weights, pixels = random_weights(shape), picture(96, 160, 1)
        cpu = cpu_tower(weights, model)
        tower, _ = open_tower(weights, cpu, prefill(), None)
        assert deviation(tower.encode(pixels), cpu.encode(pixels)) < TOLERANCE
        tower.close()


def test_whose_memory_it_is_and_how_weights_travel_changes_no_bit(
    model: Model, prefill: Callable[..., GpuPrefill], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers and activations of prompts or own ones; weights locked in place, moved, or not locked."""
    weights, pixels = random_weights(TINY), picture(96, 160, 1)
    pin, found, plans = CudaCard.pin, set(), []

    def run(gpu: GpuPrefill, spare: int = 0) -> None:
        plans.append(plan_tower(weights, gpu.idle_memory, spare))
        tower = CardTower(weights, cpu_tower(weights, model), gpu.card, gpu.idle_memory, plans[-1])
        found.add(tower.encode(pixels).tobytes())
        tower.close()

    resident, travelling = prefill(), prefill(4_200_000)
    run(resident)
    run(resident, 1 << 26)
    run(travelling)
    assert travelling.idle_memory.buffer_bytes > 0
    assert resident.idle_memory.buffer_bytes == 0
    assert [plan.own_bytes > 0 for plan in plans] == [False, True, False]
    for refusals in (1, 1000):
        left = iter(range(refusals))
        monkeypatch.setattr(CudaCard, "pin", lambda card, array, left=left: next(left, -1) < 0 and pin(card, array))
        run(resident)
    assert len(found) == 1


def test_arrays_that_share_a_page_are_locked_together() -> None:
    memory = np.zeros(5 * mmap.PAGESIZE, np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE  # of a page
    page = memory[first : first + 4 * mmap.PAGESIZE].reshape(4, -1)
    arrays = [page[2, 100:200], page[0, 10:20], page.reshape(-1)[30 : mmap.PAGESIZE + 1], page[1, 64:]]
    found = [(run.ctypes.data - page.ctypes.data, run.nbytes) for run in page_runs(arrays)]
    assert found == [(10, 2 * mmap.PAGESIZE - 10), (2 * mmap.PAGESIZE + 100, 100)]


def test_prompts_and_pictures_take_turns_in_the_same_memory(model: Model, prefill: Callable[..., GpuPrefill]) -> None:
    gpu, weights = prefill(4_200_000), random_weights(TINY)
    tower, _ = open_tower(weights, cpu_tower(weights, model), gpu, 4_200_000)
    ids = np.arange(100, dtype=np.int32)

    def prompt() -> bytes:
        state = model.new_state()
        for _ in gpu.advance_steps(state, ids, np.repeat(ids[:, None], 3, axis=1)):
            pass
        return state.ssm.tobytes()

    first = prompt(), tower.encode(picture(64, 96, 0)).tobytes()
    assert (prompt(), tower.encode(picture(64, 96, 0)).tobytes()) == first
    tower.close()


def test_pictures_left_early_leave_the_card_ready_and_its_memory_as_it_was(
    model: Model, prefill: Callable[..., GpuPrefill], driver: ctypes.CDLL
) -> None:
    gpu, weights, pixels = prefill(), random_weights(TINY), picture(64, 96, 0)
    tower, _ = open_tower(weights, cpu_tower(weights, model), gpu, None)
    expected = tower.encode(pixels)
    gpu.card.synchronize()
    live = driver.fake_live()
    for count in (1, 2, 3, 4, 1):
        steps = tower.encode_steps(pixels)
        assert [next(steps) for _ in range(count)] == [4, 3, 2, 1][:count]
        steps.close()
    assert np.array_equal(tower.encode(pixels), expected)
    gpu.card.synchronize()
    assert driver.fake_live() == live
    tower.close()
    gpu.close()
    assert driver.fake_live() == 0
    with pytest.raises(KernelError, match="closed"):
        tower.encode(pixels)


def test_a_failing_card_is_a_kernel_error(
    model: Model, prefill: Callable[..., GpuPrefill], driver: ctypes.CDLL
) -> None:
    weights = random_weights(TINY)
    tower, _ = open_tower(weights, cpu_tower(weights, model), prefill(), None)
    driver.fake_fail(b"cuLaunchKernel", 700)
    with pytest.raises(KernelError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        tower.encode(picture(32, 32, 0))
    tower.close()


def test_where_the_card_cannot_the_cpu_encodes_and_the_log_says_why(
    model: Model, prefill: Callable[..., GpuPrefill], driver: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    weights = random_weights(TINY)
    gpu, cpu = prefill(), cpu_tower(weights, model)
    floats = dataclasses.replace(weights, table=weights.table.astype(np.float32))
    heads = random_weights(dataclasses.replace(TINY, num_heads=3))
    columns = random_weights(dataclasses.replace(TINY, intermediate_size=104))
    for unfit, reason in (
        (floats, "the tower's table is float32, the kernels take float16"),
        (heads, "the tower's heads have 16 channels, the kernels take 72 or 12"),
        (columns, "the tower's fc2 of block 0 has 104 columns, the kernels take multiples of 16"),
    ):
        assert open_tower(unfit, cpu, gpu, None) == (cpu, "")
        assert f"pictures are encoded on the CPU: {reason}" in caplog.text
    driver.fake_fail(b"cuMemAlloc_v2", 2)  # what was free is not any more
    assert open_tower(weights, cpu, gpu, None) == (cpu, "")
    assert "pictures are encoded on the CPU: the card has no" in caplog.text
    with pytest.raises(OutOfMemory, match=r"needs \d+ bytes of the card for a picture of 64 tokens; prompts leave 10"):
        plan_tower(weights, IdleMemory(0, 1000, (), 0), 10)
    cpu.close()


@pytest.mark.parametrize(
    ("scratch_mib", "buffer_mib", "spare_mib", "tokens", "own"),
    [(330, 216, 0, 2048, False), (330, 0, 0, 1024, False), (330, 216, 900, 8192, True), (700, 0, 9000, 16383, True)],
)
def test_plan_of_the_published_tower(scratch_mib: int, buffer_mib: int, spare_mib: int, tokens: int, own: bool) -> None:
    weights = published_shapes()
    idle = IdleMemory(0, scratch_mib << 20, (0, 0) if buffer_mib else (), buffer_mib << 20)
    plan = plan_tower(weights, idle, spare_mib << 20)
    assert plan.patches == 4 * tokens
    assert (plan.own_bytes > 0) is own
    assert plan.own_bytes <= spare_mib << 20
    assert 105e3 < activations(PUBLISHED, 4096).nbytes / 1024 < 115e3  # bytes for each token
    assert picture_flops(PUBLISHED, 1024, 1024) == pytest.approx(5.53e12, rel=0.01)


def published_shapes() -> VisionWeights:
    """The published tower; its blocks are one."""
    small = random_weights(dataclasses.replace(PUBLISHED, depth=1))
    return dataclasses.replace(small, config=PUBLISHED, blocks=small.blocks * PUBLISHED.depth)


# ---- in the engine ----------------------------------------------------------------------------------------------


def config(**more: Any) -> EngineConfig:
    settings = {"threads": 1, "context_length": 1024, "pass_tokens": 128, "device": "gpu", "gpu_min_tokens": 100}
    return EngineConfig(**{**settings, **more})


def load(checkpoint: Path, **more: Any) -> Engine:
    engine = Engine.load(checkpoint, config(**more))
    engine.vocab_size = engine.model.vocab_size  # the placeholder is beyond the test's tokenizer
    return engine


def request(*turns: list[int | ImageSpan]) -> GenerationRequest:
    """A conversation that ends in the header of the answer; exact, so that bits can be compared."""
    ids: list[int] = []
    images: list[ImageSpan] = []
    boundaries: list[int] = []
    for part in [*turns, [TURN, ASSISTANT, NEWLINE]]:
        for item in part:
            if isinstance(item, ImageSpan):
                images.append(dataclasses.replace(item, start=len(ids)))
                ids += [PAD] * item.count
            else:
                ids.append(item)
        boundaries.append(len(ids))
    prompt = Prompt(np.array(ids, np.int32), tuple(boundaries[:-1]), tuple(images))
    return GenerationRequest(
        "r", prompt, 2, SamplingParams(temperature=0.0), top_logprobs=20, cache=CacheOptions(exact=True)
    )


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 180, count).tolist()


def turn(*parts: list[int] | ImageSpan) -> list[int | ImageSpan]:
    items: list[int | ImageSpan] = [TURN, 84, NEWLINE]
    for part in parts:
        items += [part] if isinstance(part, ImageSpan) else part
    return items


def span(height: int, width: int, seed: int) -> ImageSpan:
    pixels = picture(height, width, seed)
    return ImageSpan(0, height * width // 1024, pixels, hashlib.sha256(pixels).digest())


def answer(engine: Engine, asked: GenerationRequest) -> tuple[list[tuple[int, Any]], int]:
    """Tokens with their log-probabilities, and how much of the prompt was reused."""
    tokens, position = [], 0
    for event in engine.generate(asked, lambda: False):
        if isinstance(event, TokenResult):
            tokens.append((event.token_id, event.logprobs))
        elif isinstance(event, Progress) and event.cache is not None:
            position = event.cache.position
    return tokens, position


def test_history_changes_no_bit_of_prompts_with_pictures(checkpoint: Path, tmp_path: Path) -> None:
    """Pictures in long segments, which the card computes, and in short ones, which the CPU does; seen before or not."""
    red, blue, wide = span(96, 160, 1), span(64, 96, 2), span(32, 320, 3)
    talks = [
        [turn(words(0, 120), red, words(1, 10))],
        [turn(red, words(2, 20))],
        [turn(red, words(2, 20)), turn(words(3, 130), blue, wide)],
        [turn(words(0, 120), red, words(1, 10)), turn(blue, words(4, 5))],
        [turn(words(0, 120), blue, words(1, 10)), turn(blue, words(4, 5))],
        [turn(red, words(2, 20)), turn(words(3, 130), blue, wide), turn(words(5, 8))],
    ]
    expected = []
    for talk in talks:
        with load(checkpoint) as fresh:
            expected.append(answer(fresh, request(*talk))[0])
    reused = 0
    with load(checkpoint, cache=CacheSettings(8 << 20, 0, tmp_path / "prefix")) as cached:
        for talk, tokens in zip(talks, expected, strict=True):
            got, position = answer(cached, request(*talk))
            assert got == tokens
            reused += position
        assert cached.picture_counters["encoded"] == 3
        assert answer(cached, request(*talks[-1]))[0] == expected[-1]
        assert cached.picture_counters["encoded"] == 3
    assert reused > 150


def test_the_cpu_engine_answers_alike(checkpoint: Path) -> None:
    talk = request(turn(words(0, 120), span(96, 160, 1), words(1, 10), span(64, 32, 2), words(2, 9)))
    with load(checkpoint, compute="f32") as card, load(checkpoint, compute="f32", device="cpu") as cpu:
        got, expected = answer(card, talk)[0], answer(cpu, talk)[0]
    assert [token for token, _ in got] == [token for token, _ in expected]
    for (_, mine), (_, theirs) in zip(got, expected, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=2e-3)


def test_a_picture_beyond_the_plan_is_encoded_on_the_cpu(
    checkpoint: Path, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its size alone."""
    monkeypatch.setattr(gpu_vision, "PICTURE_TOKENS", (16,))
    with load(checkpoint) as engine:
        for height, width, on_card in ((128, 128, True), (128, 160, False), (32, 512, True)):
            before = driver.fake_launches()
            answer(engine, request(turn(span(height, width, 5), words(1, 4))))
            assert (driver.fake_launches() > before) is on_card


def test_which_pictures_the_card_takes_is_in_the_fingerprint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = set()
    for tokens in ((1024,), (512,), ()):
        monkeypatch.setattr(gpu_vision, "PICTURE_TOKENS", tokens or (1 << 30,))
        with load(checkpoint, cache=CacheSettings(8 << 20, 0, tmp_path / "prefix")) as engine:
            assert engine._reuse.cache is not None
            prints.add(engine._reuse.cache.prefix.fingerprint)
    assert len(prints) == 3


def test_a_request_withdrawn_while_a_picture_is_encoded(checkpoint: Path) -> None:
    asked = request(turn(words(0, 120), span(96, 160, 1), words(1, 10)))
    with load(checkpoint) as engine:
        expected = answer(engine, asked)[0]
    with load(checkpoint) as engine:
        for count in (1, 2, 3):
            answers = iter([False] * count)
            with pytest.raises(Cancelled):
                list(engine.generate(asked, lambda answers=answers: next(answers, True)))  # type: ignore[misc]
        assert answer(engine, asked)[0] == expected
