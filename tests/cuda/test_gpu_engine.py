"""The engine with a card behind the emulated driver: who computes what, and that what was cached changes no bit."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_models import card_checkpoint
from tiny_models import add_turn_token

from engine import cuda_driver, gpu
from engine.config import CacheSettings, EngineConfig
from engine.core import CacheOptions, CacheReport, GenerationRequest, Progress, Prompt, SamplingParams, TokenResult
from engine.engine import Engine
from engine.errors import Cancelled, ConfigError, KernelError
from engine.segments import CardRule

TURN, NEWLINE, ASSISTANT = 258, 198, 64
pytestmark = pytest.mark.usefixtures("driver")
CONTEXT = 1024


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the kernels cover, with a token that opens turns."""
    directory = card_checkpoint(tmp_path_factory.mktemp("models") / "card")
    add_turn_token(directory)
    return directory


def config(**more: Any) -> EngineConfig:
    settings = {"threads": 1, "context_length": CONTEXT, "pass_tokens": 128, "device": "gpu", "gpu_min_tokens": 100}
    return EngineConfig(**{**settings, **more})


@pytest.fixture
def cached(checkpoint: Path, tmp_path: Path) -> Iterator[Engine]:
    settings = config(cache=CacheSettings(8 << 20, 0, tmp_path / "prefix"))
    with Engine.load(checkpoint, settings) as engine:
        yield engine


def turn(seed: int, count: int) -> list[int]:
    return [TURN, 84, NEWLINE, *np.random.default_rng(seed).integers(0, 180, count).tolist()]


def request(*turns: list[int], exact: bool = True) -> GenerationRequest:
    """A conversation that ends in the header of the answer."""
    ids: list[int] = []
    boundaries: list[int] = []
    for part in [*turns, [TURN, ASSISTANT, NEWLINE]]:
        ids += part
        boundaries.append(len(ids))
    prompt = Prompt(np.array(ids, np.int32), tuple(boundaries[:-1]))
    return GenerationRequest(
        "r", prompt, 2, SamplingParams(temperature=0.0), top_logprobs=20, cache=CacheOptions(exact=exact)
    )


def answer(engine: Engine, asked: GenerationRequest) -> tuple[list[tuple[int, Any]], CacheReport | None]:
    """Tokens with their log-probabilities, and what the cache did."""
    tokens, report = [], None
    for event in engine.generate(asked, lambda: False):
        if isinstance(event, Progress):
            report = event.cache
        elif isinstance(event, TokenResult):
            tokens.append((event.token_id, event.logprobs))
    return tokens, report


def test_what_was_cached_changes_no_bit(checkpoint: Path, cached: Engine, driver: ctypes.CDLL) -> None:
    """Conversations of short and long turns that branch, grow and repeat, in one cached engine and in fresh ones."""
    parts = [turn(seed, count) for seed, count in enumerate((150, 30, 240, 60, 110, 12))]
    talks = [
        [parts[0], parts[1]],
        [parts[0], parts[1], parts[2]],
        [parts[0], parts[3]],
        [parts[0], parts[1], parts[2], parts[5], parts[4]],
        [parts[0][:140], parts[4]],
        [parts[2], parts[0]],
        [parts[2], parts[0], parts[3]],
        [parts[0], parts[1], parts[2]],
    ]
    reused = 0
    with Engine.load(checkpoint, config()) as plain:
        for talk in talks:
            launched = driver.fake_launches()
            got, report = answer(cached, request(*talk))
            assert report is not None
            reused += report.position
            assert got == answer(plain, request(*talk))[0]
            assert driver.fake_launches() > launched
    assert reused > 1000


def test_a_conversation_goes_on_behind_its_answer(cached: Engine, driver: ctypes.CDLL) -> None:
    """From a state between two places of the grid, behind decoded tokens, to a snapshot on the grid."""
    first = request(turn(1, 200), exact=False)
    options = CacheOptions(keep_reply=lambda: True)
    tokens, _ = answer(cached, dataclasses.replace(first, cache=options, max_tokens=40))
    ids = [
        *first.prompt.token_ids.tolist(),
        *(token for token, _ in tokens[:-1]),
        *turn(7, 300),
        TURN,
        ASSISTANT,
        NEWLINE,
    ]
    prompt = Prompt(np.array(ids, np.int32), (203, 420, len(ids) - 3))
    launched = driver.fake_launches()
    got, report = answer(cached, dataclasses.replace(first, prompt=prompt))
    assert report is not None
    assert report.position > len(first.prompt.token_ids)
    resumed = report.position
    assert driver.fake_launches() > launched
    assert len(got) == 2
    again, report = answer(cached, dataclasses.replace(first, prompt=prompt))
    assert report is not None
    assert report.position > resumed
    assert (report.position - resumed) % 32
    assert [token for token, _ in again] == [token for token, _ in got]


def test_a_short_segment_that_grows_is_computed_again(cached: Engine, checkpoint: Path) -> None:
    """On the CPU it had other bits than the card gives the longer one, so an exact request must not continue it."""
    short, long = turn(1, 90), turn(1, 300)
    answer(cached, request(short, exact=True))
    got, report = answer(cached, request(long, exact=True))
    assert report is not None
    assert report.position == 0
    with Engine.load(checkpoint, config()) as plain:
        assert got == answer(plain, request(long))[0]


def test_a_prompt_of_short_segments_stays_on_the_cpu(cached: Engine, driver: ctypes.CDLL) -> None:
    launched = driver.fake_launches()
    answer(cached, request(turn(1, 60)))
    assert driver.fake_launches() == launched
    answer(cached, request(turn(2, 120)))
    assert driver.fake_launches() > launched


def test_a_cancelled_prompt_leaves_what_is_done(cached: Engine) -> None:
    asked, layers = request(turn(3, 200), turn(4, 200)), 0

    def third_layer() -> bool:
        nonlocal layers
        layers += 1
        return layers > 3

    with pytest.raises(Cancelled):
        list(cached.generate(asked, third_layer))
    again, _ = answer(cached, asked)
    assert again == answer(cached, asked)[0]


def test_a_failing_card_ends_the_generation_with_a_kernel_error(cached: Engine, driver: ctypes.CDLL) -> None:
    driver.fake_fail(b"cuLaunchKernel", 700)
    with pytest.raises(KernelError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        answer(cached, request(turn(5, 200)))


def test_what_decides_bits_is_in_the_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    prints = set()
    for more in ({}, {"gpu_min_tokens": 101}, {"device": "cpu"}):
        cache = CacheSettings(8 << 20, 0, tmp_path / "prefix")
        with Engine.load(checkpoint, config(cache=cache, **more)) as engine:
            prints.add(engine._reuse.cache.prefix.fingerprint)
    assert len(prints) == 3


def test_the_least_size_is_measured_where_it_is_not_given(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    times = iter([0.0, 0.4, 1.0, 1.1])  # the card 0.4 s, the CPU 0.1 s for 64 tokens: from 256 on the card is quicker
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(times))
    with Engine.load(checkpoint, config(gpu_min_tokens=None)) as engine:
        assert engine._reuse.card == CardRule(256, 1 << 30)
    assert "64 tokens take 0.40 s on the card and 0.10 s on the CPU" in caplog.text


def test_experts_move_where_their_file_cannot_be_locked(
    checkpoint: Path, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request(turn(6, 200))
    with Engine.load(checkpoint, config()) as resident:
        expected, _ = answer(resident, asked)
    small = 4_200_000  # too little for any layer's experts to stay
    lock = cuda_driver.CudaCard.pin
    refusals = 0

    def pin(card: cuda_driver.CudaCard, array: np.ndarray, **more: bool) -> bool:
        nonlocal refusals
        refusals -= 1
        return refusals < 0 and lock(card, array, **more)

    monkeypatch.setattr(cuda_driver.CudaCard, "pin", pin)
    for refusals, warned in ((1, False), (100, True)):  # noqa: B007
        caplog.clear()
        with Engine.load(checkpoint, config(gpu_memory=small)) as engine:
            assert not engine._model._gpu.plan.resident
            assert answer(engine, asked)[0] == expected
        assert ("could not be page-locked" in caplog.text) is warned


def test_gpu_without_a_driver_is_an_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(ConfigError, match="device is 'gpu', but prompts cannot run there: no NVIDIA driver"):
        Engine.load(checkpoint, config())


def test_without_a_card_nothing_of_it_is_imported(checkpoint: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "import engine.engine as e; from engine.config import EngineConfig\n"
        "e._GPU_DEVICE = Path('/not/there')\n"
        "e.Engine.load(Path(sys.argv[1]), EngineConfig(threads=1, context_length=128)).close()\n"
        "print([name for name in sys.modules if name in ('engine.gpu', 'engine.cuda_driver')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
