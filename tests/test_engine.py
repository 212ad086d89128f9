"""One request's life: progress, tokens, ends, cancellation, refusals; and that nothing is computed unasked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import VECTORS, packed_checkpoint, vector_checkpoint, write_tokenizer

from engine.config import EngineConfig
from engine.core import (
    FinishReason,
    GenerationRequest,
    ImageSpan,
    Progress,
    Prompt,
    SamplingParams,
    TokenResult,
)
from engine.engine import Engine
from engine.errors import Cancelled, ConfigError, ContextLengthExceeded, ModelFileError, OutOfMemory, RequestError

GREEDY = SamplingParams(temperature=0.0)


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = packed_checkpoint(tmp_path_factory.mktemp("engine") / "packed")
    with Engine.load(directory, EngineConfig(context_length=1000, threads=2, pass_tokens=64)) as loaded:
        yield loaded


def request(count: int = 10, max_tokens: int = 5, seed: int = 0, **more: Any) -> GenerationRequest:
    ids = np.random.default_rng(seed).integers(0, 258, count).astype(np.int32)
    return GenerationRequest("r", Prompt(ids), max_tokens, **{"sampling": GREEDY, **more})


def tokens(engine: Engine, wanted: GenerationRequest) -> list[TokenResult]:
    return [item for item in engine.generate(wanted, never) if isinstance(item, TokenResult)]


def test_greedy_continuation_of_the_official_model(tmp_path: Path) -> None:
    directory = vector_checkpoint(tmp_path / "b", "b")
    with np.load(VECTORS / "b.npz") as known, Engine.load(directory, EngineConfig(compute="f32")) as engine:
        usable = engine.vocab_size
        prompt = Prompt(known["tokens"][:64] % usable)
        results = tokens(engine, GenerationRequest("r", prompt, 20, GREEDY))
    assert len(results) == 20
    assert all(result.token_id < usable for result in results)


def test_progress_precedes_tokens_and_ends_at_the_prompt(engine: Engine) -> None:
    items = list(engine.generate(request(count=300), never))
    kinds = [type(item) for item in items]
    first = kinds.index(TokenResult)
    progress = [item for item in items[:first] if isinstance(item, Progress)]
    assert Progress not in kinds[first:]
    assert (progress[0].processed, progress[-1].processed) == (0, 300)
    assert all(item.total == 300 and item.cached == 0 for item in progress)
    assert [item.processed for item in progress] == sorted(item.processed for item in progress)


def test_ends_by_length(engine: Engine) -> None:
    results = tokens(engine, request(max_tokens=4))
    assert [result.finish_reason for result in results] == [None, None, None, FinishReason.LENGTH]


def test_ends_by_stop_token_which_is_reported(engine: Engine) -> None:
    drawn = [result.token_id for result in tokens(engine, request(max_tokens=8))]
    stop = drawn[3]
    results = tokens(engine, request(max_tokens=8, stop_token_ids=frozenset([stop])))
    assert [result.token_id for result in results] == drawn[: drawn.index(stop) + 1]
    assert results[-1].finish_reason is FinishReason.STOP


def test_max_tokens_zero_only_prefills(engine: Engine) -> None:
    items = list(engine.generate(request(max_tokens=0), never))
    assert all(isinstance(item, Progress) for item in items)
    assert isinstance(items[-1], Progress)
    assert items[-1].processed == 10


def test_padding_rows_are_never_drawn(engine: Engine) -> None:
    assert engine.vocab_size == 258 < engine.model.vocab_size
    results = tokens(engine, request(max_tokens=200, sampling=SamplingParams(temperature=2.0, seed=1)))
    assert max(result.token_id for result in results) < 258


def test_requests_do_not_see_each_other(engine: Engine) -> None:
    alone = tokens(engine, request(seed=1))
    tokens(engine, request(seed=2, count=200))
    abandoned = engine.generate(request(seed=3, count=300), never)
    next(abandoned)
    abandoned.close()
    assert tokens(engine, request(seed=1)) == alone


def test_no_token_is_computed_unasked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    decode = engine._model.decode
    monkeypatch.setattr(engine._model, "decode", lambda state, token: (steps.append(token), decode(state, token))[1])
    items = engine.generate(request(max_tokens=3), never)
    seen = []
    for item in items:
        if isinstance(item, TokenResult):
            assert steps == seen
            seen.append(item.token_id)
    assert len(seen) == 3
    assert steps == seen[:2]


def test_cancel_in_prefill_stops_within_a_layer(engine: Engine) -> None:
    asked = iter([False] * 5 + [True])
    with pytest.raises(Cancelled):
        list(engine.generate(request(count=900), lambda: next(asked)))


def test_cancel_in_decode_stops_within_a_token(engine: Engine) -> None:
    flag = threading.Event()
    items = engine.generate(request(max_tokens=100), flag.is_set)
    for item in items:
        if isinstance(item, TokenResult):
            break
    flag.set()
    with pytest.raises(Cancelled):
        next(items)


def test_logprobs_come_with_the_tokens(engine: Engine) -> None:
    results = tokens(engine, request(top_logprobs=2))
    for result in results:
        assert result.logprobs is not None
        assert result.logprobs.top[0] == (result.token_id, result.logprobs.logprob)
        assert len(result.logprobs.top) == 2


def test_context_length_is_checked_before_work(engine: Engine) -> None:
    assert len(tokens(engine, request(count=990, max_tokens=10))) == 10
    with pytest.raises(ContextLengthExceeded) as error:
        next(engine.generate(request(count=991, max_tokens=10), never))
    assert (error.value.prompt_tokens, error.value.context_length) == (991, 1000)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        (Prompt(np.array([], np.int32)), 1, "messages"),
        (Prompt(np.array([258], np.int32)), 1, "messages"),
        (Prompt(np.array([-1], np.int32)), 1, "messages"),
        (Prompt(np.array([1], np.int32)), -1, "max_tokens"),
        (
            Prompt(np.array([1, 2], np.int32), images=(ImageSpan(0, 1, np.zeros((32, 32, 3), np.uint8), b"x"),)),
            1,
            "messages",
        ),
    ],
)
def test_bad_requests_are_refused(engine: Engine, prompt: Prompt, max_tokens: int, param: str) -> None:
    with pytest.raises(RequestError) as error:
        next(engine.generate(GenerationRequest("r", prompt, max_tokens), never))
    assert error.value.param == param


def test_loading_reports_what_it_decided(engine: Engine) -> None:
    assert engine.context_length == 1000
    assert engine.placement.threads == 2
    assert engine.tier in ("scalar", "ssse3", "avx2", "avx512")
    assert engine.scratch_bytes > 0


def test_context_is_the_models_unless_told(tmp_path: Path) -> None:
    directory = packed_checkpoint(tmp_path / "packed")
    with Engine.load(directory, EngineConfig(threads=1)) as engine:
        assert engine.context_length == 4096
    with pytest.raises(ConfigError, match="context_length is 4097 tokens, this model has at most 4096"):
        Engine.load(directory, EngineConfig(threads=1, context_length=4097))


def test_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    directory = packed_checkpoint(tmp_path / "packed")
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace('"id":257', '"id":512').replace('"id": 257', '"id": 512'))
    with pytest.raises(ModelFileError, match="tokenizer has ids up to 512, the model 512 rows"):
        Engine.load(directory, EngineConfig(threads=1))


def test_missing_files_and_impossible_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFileError):
        Engine.load(tmp_path, EngineConfig())
    directory = packed_checkpoint(tmp_path / "packed")
    with monkeypatch.context() as patch:
        patch.setattr("engine.cpu.supported_tiers", lambda: ("scalar",))
        with pytest.raises(ConfigError, match="'avx2' cannot run on this processor; supported: scalar"):
            Engine.load(directory, EngineConfig(simd_tier="avx2"))
    with monkeypatch.context() as patch:
        patch.setattr("engine.placement.available_bytes", lambda: 1 << 20)
        with pytest.raises(OutOfMemory, match=r"a context of 4096 tokens needs \d+ bytes"):
            Engine.load(directory, EngineConfig(context_length=4096))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Engine.load(directory, EngineConfig())
    write_tokenizer(directory)


def test_short_memory_shortens_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = packed_checkpoint(tmp_path / "packed")
    monkeypatch.setattr("engine.placement.available_bytes", lambda: 2 << 20)
    with Engine.load(directory, EngineConfig(threads=1)) as engine:
        assert 64 <= engine.context_length < 4096
        assert engine.context_length % 64 == 0
