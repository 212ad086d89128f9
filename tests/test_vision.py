"""Pictures: the tower and prompts with pictures against the official implementation's results (tests/vectors), and
what becomes of a picture in the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tiny_models import VECTORS, deviation, packed_checkpoint, vector_checkpoint
from tiny_pictures import picture

from engine.config import SIMD_TIERS, CacheSettings, EngineConfig
from engine.core import (
    CacheOptions,
    Float32Array,
    GenerationRequest,
    ImageSpan,
    Progress,
    Prompt,
    SamplingParams,
    TokenResult,
)
from engine.cpu import supported_tiers
from engine.engine import Engine
from engine.errors import Cancelled, KernelError, OutOfMemory, RequestError
from engine.vision import PictureRows, Sight, VisionTower, rotary_positions

TOLERANCE = 1e-4  # of the scale
PROMPTS = range(5)
PAD = 508  # placeholder of the tiny models
CONFIG = EngineConfig(threads=1, compute="f32", pass_tokens=64, context_length=2048)

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
    config = dataclasses.replace(CONFIG, simd_tier=tier, threads=threads, pass_tokens=pass_tokens)
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
            steps = model.advance_steps(state, prompt.token_ids, sight.positions, rows, every_row=True)
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


def test_known_prompts_begin_and_end_with_pictures(known: dict[str, npt.NDArray[np.generic]]) -> None:
    prompts = [known[f"prompt_{number}"].tolist() for number in PROMPTS]
    assert PAD in {ids[0] for ids in prompts}
    assert PAD in {ids[-1] for ids in prompts}


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


# ---- a picture's life in the engine ----


def changed(prompt: Prompt, number: int, **fields: object) -> Prompt:
    images = list(prompt.images)
    images[number] = dataclasses.replace(images[number], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(prompt, images=tuple(images))


def two_pictures() -> Prompt:
    """Text, a picture of 3 x 4 tokens, text, one of 2 x 2, text."""
    ids = np.random.default_rng(4).integers(0, 256, 230).astype(np.int32)
    images = (span(70, 96, 128, 1), span(150, 64, 64, 2))
    for image in images:
        ids[image.start : image.start + image.count] = PAD
    return Prompt(ids, (68, 160, 222), images)


@pytest.mark.parametrize(
    ("number", "fields", "text"),
    [
        (0, {"pixels": np.zeros((96, 128, 4), np.uint8)}, r"Picture 1 is uint8 \[96, 128, 4\], expected uint8 RGB"),
        (0, {"pixels": np.zeros((96, 128, 3), np.float32)}, "Picture 1 is float32"),
        (0, {"pixels": np.zeros((0, 128, 3), np.uint8)}, "128 x 0 pixels, expected multiples of 32"),
        (1, {"pixels": np.zeros((64, 60, 3), np.uint8)}, "Picture 2 has 60 x 64 pixels, expected multiples of 32"),
        (0, {"count": 11}, "Picture 1 takes 12 tokens, its place in the prompt has 11"),
        (0, {"start": 69}, "place of picture 1 holds tokens other than 508"),
        (1, {"start": 228}, "Picture 2 is at tokens 228 to 232, expected a place in 82 to 230"),
        (1, {"start": 72}, "Picture 2 is at tokens 72 to 76, expected a place in 82 to 230"),
        (0, {"start": -1}, "Picture 1 is at tokens -1 to 11"),
        (0, {"digest": b"short"}, "Picture 1 has a digest of 5 bytes, expected 32"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(
    engine: Engine, number: int, fields: dict[str, object], text: str
) -> None:
    with pytest.raises(RequestError, match=text) as error:
        next(engine.generate(request(changed(two_pictures(), number, **fields)), lambda: False))
    assert (error.value.param, error.value.code) == ("messages", "invalid_image")


def test_a_model_without_tower_says_so(tmp_path: Path) -> None:
    with Engine.load(packed_checkpoint(tmp_path / "text"), EngineConfig(threads=1)) as engine:
        assert engine.model.vision is None
        assert engine.picture_counters == {}
        prompt = Prompt(np.zeros(1, np.int32), (), (span(0, 32, 32, 0),))
        with pytest.raises(RequestError, match="does not see: its checkpoint has no vision tower") as error:
            next(engine.generate(request(prompt), lambda: False))
    assert error.value.code == "unsupported_content"


def test_withdrawn_while_the_tower_works(checkpoint: Path) -> None:
    """At any step: the next request must not notice."""
    ids = np.full(420, PAD, np.int32)
    large = Prompt(ids, (), (span(0, 640, 672, 3),))
    with load(checkpoint) as engine:
        expected = tokens(engine, request(two_pictures()))
        for asked in range(13):
            answers = iter([False] * asked)
            with pytest.raises(Cancelled):
                list(engine.generate(request(large), lambda answers=answers: next(answers, True)))  # type: ignore[misc]
            assert tokens(engine, request(two_pictures(), read=False)) == expected
        left = engine.generate(request(large), lambda: False)
        assert isinstance(next(left), Progress)
        left.close()
        assert tokens(engine, request(two_pictures(), read=False)) == expected
        assert engine.picture_counters["encoded"] == 2 * 15


def test_progress_is_told_while_the_tower_works(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.engine._REPORT_INTERVAL_S", 0.0)
    prompt = Prompt(np.full(420, PAD, np.int32), (), (span(0, 640, 672, 3),))
    with load(checkpoint) as engine:
        told = [e.processed for e in engine.generate(request(prompt, 0), lambda: False) if isinstance(e, Progress)]
    steps = 2 * (2 + 2 * 2)  # two chunks of patches, two blocks
    assert told[: 1 + steps] == [0] * (1 + steps)
    assert told == sorted(told)
    assert told[-1] == 420


def test_a_picture_too_large_for_the_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.vision.available_bytes", lambda: 1000)
    with pytest.raises(OutOfMemory, match=r"a picture of 128 x 96 pixels needs \d+ bytes, 1000 are available"):
        tower(engine).encode(picture(96, 128, 0))


def test_a_closed_tower(checkpoint: Path) -> None:
    with load(checkpoint) as engine:
        closed = tower(engine)
    with pytest.raises(KernelError):
        closed.encode(picture(32, 32, 0))


class TestRows:
    """Rows of pictures seen before, without a prefix cache."""

    def encode(self, rows: PictureRows, image: ImageSpan, **options: object) -> bytes:
        steps = rows.steps(image, CacheOptions(**options))  # type: ignore[arg-type]
        try:
            while True:
                next(steps)
        except StopIteration as end:
            result: bytes = end.value.tobytes()
            return result

    def test_the_same_picture_is_encoded_once(self, engine: Engine) -> None:
        rows = PictureRows(tower(engine))
        first = self.encode(rows, span(0, 64, 64, 1))
        assert self.encode(rows, span(9, 64, 64, 1)) == first
        assert self.encode(rows, span(0, 64, 64, 2)) != first
        assert rows.counters() == {"encoded": 2, "reused": 1, "dropped": 0, "kept": 2, "bytes": 2 * 4 * 64 * 4}

    def test_tenants_digests_and_switches(self, engine: Engine) -> None:
        rows = PictureRows(tower(engine))
        image = span(0, 64, 64, 1)
        unknown = dataclasses.replace(image, digest=b"")
        for one, options in (
            (image, {"write": False}),
            (image, {}),
            (image, {"scope": b"other"}),
            (image, {"salt": b"s"}),
            (image, {"read": False}),
            (unknown, {}),
            (unknown, {}),
        ):
            self.encode(rows, one, **options)
        assert rows.counters()["encoded"] == 7
        assert rows.counters()["kept"] == 3

    def test_the_oldest_make_room(self, engine: Engine) -> None:
        rows = PictureRows(tower(engine), capacity=2 * 4 * 64 * 4)
        for seed in (1, 2, 1, 3, 1, 2):
            self.encode(rows, span(0, 64, 64, seed))
        assert rows.counters() == {"encoded": 4, "reused": 2, "dropped": 2, "kept": 2, "bytes": 2 * 4 * 64 * 4}
        self.encode(rows, span(0, 320, 320, 0))  # larger than everything: not kept
        assert rows.counters()["bytes"] == 2 * 4 * 64 * 4


class TestReuse:
    """The prefix cache in front of pictures."""

    @pytest.fixture
    def cached(self, checkpoint: Path, tmp_path: Path) -> Iterator[Engine]:
        settings = CacheSettings(8 << 20, 64 << 20, tmp_path / "prefix")
        with Engine.load(checkpoint, dataclasses.replace(CONFIG, cache=settings)) as engine:
            engine.vocab_size = engine.model.vocab_size
            yield engine

    def run(self, engine: Engine, prompt: Prompt, **options: object) -> tuple[list[tuple[int, float]], int]:
        """Tokens with their log-probabilities, and how many prompt tokens were reused."""
        wanted = dataclasses.replace(request(prompt, 6, exact=True, **options), top_logprobs=0)
        results, position = [], -1
        for item in engine.generate(wanted, lambda: False):
            if isinstance(item, TokenResult):
                assert item.logprobs is not None
                results.append((item.token_id, item.logprobs.logprob))
            elif item.cache is not None:
                position = item.cache.position
        return results, position

    def test_a_repetition_computes_neither_tower_nor_prefix(self, cached: Engine, engine: Engine) -> None:
        prompt = two_pictures()
        expected = self.run(engine, prompt)[0]
        assert self.run(cached, prompt) == (expected, 0)
        counters = dict(cached.picture_counters)
        results, position = self.run(cached, prompt)
        assert results == expected
        assert position == 154 + 64  # behind the second picture, short of the answer's header
        assert cached.picture_counters == counters

    def test_one_pixel_ends_what_is_shared(self, cached: Engine, engine: Engine) -> None:
        prompt = two_pictures()
        self.run(cached, prompt)
        for number, (least, most) in enumerate(((64, 70), (64, 150))):
            pixels = prompt.images[number].pixels.copy()
            pixels[3, 5, 1] ^= 1
            other = changed(prompt, number, pixels=pixels, digest=hashlib.sha256(pixels).digest())
            results, position = self.run(cached, other)
            assert results == self.run(engine, other)[0]
            assert least <= position <= most

    def test_without_a_digest_nothing_behind_is_kept(self, cached: Engine, engine: Engine) -> None:
        prompt = changed(two_pictures(), 1, digest=b"")
        expected = self.run(engine, prompt)[0]
        for _ in range(2):
            results, position = self.run(cached, prompt)
            assert results == expected
            assert position <= 150

    def test_any_history_gives_the_bits_of_an_engine_without_cache(self, cached: Engine, engine: Engine) -> None:
        rng = random.Random(3)
        expected: dict[tuple[bytes, ...], list[tuple[int, float]]] = {}
        reused = 0
        for _ in range(40):
            parts: list[list[int] | ImageSpan] = []
            for _ in range(rng.randint(1, 4)):
                seed = rng.randint(0, 2)
                words = np.random.default_rng(seed).integers(0, 256, rng.choice([3, 40, 100])).tolist()
                size = rng.choice([(32, 32), (96, 64), (320, 288)])
                parts += [words, span(0, *size, seed)] if rng.random() < 0.6 else [words]
            ids: list[int] = []
            images, ends = [], []
            for part in parts:
                if isinstance(part, ImageSpan):
                    images.append(dataclasses.replace(part, start=len(ids)))
                    ids += [PAD] * part.count
                else:
                    ids += part
                ends.append(len(ids))
            prompt = Prompt(np.array(ids, np.int32), tuple(ends), tuple(images))
            if rng.random() < 0.3:
                answers = iter([False] * rng.randint(1, 25))
                with contextlib.suppress(Cancelled):
                    list(cached.generate(request(prompt), lambda answers=answers: next(answers, True)))  # type: ignore[misc]
            results, position = self.run(cached, prompt)
            name = (prompt.token_ids.tobytes(), *(image.digest for image in images))
            if name not in expected:
                expected[name] = self.run(engine, prompt)[0]
            assert results == expected[name]
            reused += position > 0
        assert reused > 15
