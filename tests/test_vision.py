"""Pictures: the tower and prompts with pictures against the official implementation's results (tests/vectors), and
what becomes of a picture in the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tiny_models import VECTORS, vector_checkpoint
from tiny_pictures import picture

from engine.config import SIMD_TIERS, EngineConfig
from engine.core import (
    CacheOptions,
    Float32Array,
    GenerationRequest,
    ImageSpan,
    Prompt,
    SamplingParams,
    TokenResult,
)
from engine.cpu import supported_tiers
from engine.engine import Engine
from engine.vision import Sight, VisionTower, rotary_positions

TOLERANCE = 1e-4  # of the scale
PROMPTS = range(4)
PAD = 508  # placeholder of the tiny models

tiers = pytest.mark.parametrize(
    "tier",
    [pytest.param(t, marks=pytest.mark.skipif(t not in supported_tiers(), reason=f"no {t} here")) for t in SIMD_TIERS],
)


@pytest.fixture(scope="module")
def known() -> dict[str, npt.NDArray[np.generic]]:
    with np.load(VECTORS / "c.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vector_checkpoint(tmp_path_factory.mktemp("vision") / "c", "c")


def load(directory: Path, tier: str = "auto", threads: int = 1, pass_tokens: int = 64) -> Engine:
    config = EngineConfig(simd_tier=tier, threads=threads, compute="f32", pass_tokens=pass_tokens, context_length=2048)
    engine = Engine.load(directory, config)
    engine.vocab_size = engine.model.vocab_size  # random tokens of the vectors are beyond the test's tokenizer
    return engine


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with load(checkpoint) as loaded:
        yield loaded


def span(start: int, height: int, width: int, seed: int) -> ImageSpan:
    pixels = picture(height, width, seed)
    return ImageSpan(start, height * width // 1024, pixels, hashlib.sha256(pixels).digest())


def known_prompt(known: dict[str, npt.NDArray[np.generic]], number: int) -> Prompt:
    images = tuple(span(*map(int, row)) for row in known[f"pictures_{number}"])
    return Prompt(known[f"prompt_{number}"].astype(np.int32), (), images)


def request(prompt: Prompt, max_tokens: int = 4, **options: object) -> GenerationRequest:
    return GenerationRequest("r", prompt, max_tokens, SamplingParams(temperature=0.0), cache=CacheOptions(**options))  # type: ignore[arg-type]


def tower(engine: Engine) -> VisionTower:
    assert engine._pictures is not None
    return engine._pictures._tower


def deviation(got: npt.NDArray[np.float32], expected: npt.NDArray[np.generic]) -> float:
    """Largest difference relative to the scale of what is expected."""
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def tokens(engine: Engine, wanted: GenerationRequest) -> list[int]:
    return [item.token_id for item in engine.generate(wanted, lambda: False) if isinstance(item, TokenResult)]


@tiers
class TestAgainstOfficial:
    def test_the_tower(self, checkpoint: Path, known: dict[str, npt.NDArray[np.generic]], tier: str) -> None:
        with load(checkpoint, tier, threads=2) as engine:
            for i, (height, width, seed) in enumerate(known["picture_sizes"].tolist()):
                rows = tower(engine).encode(picture(height, width, seed))
                assert rows.shape == (height * width // 1024, 64)
                assert deviation(rows[::7], known[f"tower_{i}"]) < TOLERANCE, f"{width} x {height}"

    @pytest.mark.parametrize("number", PROMPTS)
    def test_logits_of_a_prompt_and_what_follows(
        self, checkpoint: Path, known: dict[str, npt.NDArray[np.generic]], tier: str, number: int
    ) -> None:
        with load(checkpoint, tier) as engine:
            prompt, model = known_prompt(known, number), engine._model
            assert engine._pictures is not None
            sight = Sight(engine._pictures, prompt, CacheOptions())
            state, rows = model.new_state(), finish(sight, len(prompt.token_ids))
            logits = []
            steps = model.advance_steps(state, prompt.token_ids, sight.positions, rows)
            for processed in steps:  # whole passes: every row's logits are there when the last layer has run
                if processed % model.pass_tokens == 0 or processed == len(prompt.token_ids):
                    first = (processed - 1) // model.pass_tokens * model.pass_tokens
                    logits += [model.logits(row) for row in range(processed - first)]
            got = np.stack([*logits[::3], logits[-1]])
            assert deviation(got, known[f"logits_{number}"]) < TOLERANCE
            state.rope_delta = sight.rope_delta(state.position)
            assert state.rope_delta == int(known[f"delta_{number}"])
            following, expected_ids, ids = logits[-1], known[f"ids_{number}"].tolist(), []
            for step in range(len(expected_ids)):
                if step % 9 == 0:
                    assert deviation(following, known[f"next_{number}"][step // 9]) < TOLERANCE, f"step {step}"
                ids.append(int(np.argmax(following)))
                following = model.decode(state, ids[-1])
            assert ids == expected_ids


def finish(sight: Sight, end: int) -> list[tuple[int, Float32Array]]:
    steps = sight.rows_steps(0, end)
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        rows: list[tuple[int, Float32Array]] = stop.value
        return rows


@pytest.mark.parametrize("number", PROMPTS)
def test_the_engine_answers_as_the_official_model(
    engine: Engine, known: dict[str, npt.NDArray[np.generic]], number: int
) -> None:
    assert tokens(engine, request(known_prompt(known, number), 64)) == known[f"ids_{number}"].tolist()


@tiers
def test_threads_and_passes_change_no_bit(checkpoint: Path, tier: str) -> None:
    pixels = picture(640, 672, 3)
    results = set()
    for threads, pass_tokens in ((1, 64), (2, 512)):
        with load(checkpoint, tier, threads, pass_tokens) as engine:
            results.add(tower(engine).encode(pixels).tobytes())
    assert len(results) == 1


def test_a_row_depends_on_every_patch_of_its_picture_and_no_other(engine: Engine) -> None:
    pixels = picture(96, 128, 1)
    rows = tower(engine).encode(pixels)
    for y, x in ((0, 0), (95, 127), (40, 70)):
        changed = pixels.copy()
        changed[y, x, 1] ^= 255
        assert np.all(np.any(tower(engine).encode(changed) != rows, axis=1))
    assert tower(engine).encode(pixels).tobytes() == rows.tobytes()


def test_positions_of_text_and_pictures(engine: Engine) -> None:
    assert engine.model.vision is not None
    images = (span(2, 96, 64, 0), span(9, 32, 128, 0))
    positions = rotary_positions(15, images, engine.model.vision).tolist()
    first = [[2, 2 + r, 2 + c] for r in range(3) for c in range(2)]
    second = [[6, 6, 6 + c] for c in range(4)]
    assert positions == [[0] * 3, [1] * 3, *first, [5] * 3, *second, [10] * 3, [11] * 3]
