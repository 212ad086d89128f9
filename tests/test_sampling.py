"""The draw against a plain NumPy statement of SamplingParams, and what happens to logits before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny_models import load_model, vector_checkpoint

from engine.core import SAMPLING_RANGES, BoolArray, Float32Array, SamplingParams
from engine.cpu import CpuEngine
from engine.errors import KernelError, RequestError
from engine.sampling import Sampler

VOCAB = 500


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuEngine]:
    model = load_model(vector_checkpoint(tmp_path_factory.mktemp("model") / "a", "a"), compute="f32")
    yield model.cpu
    model.close()


def random_logits(seed: int, scale: float = 2.0) -> Float32Array:
    return np.random.default_rng(seed).standard_normal(VOCAB, np.float32) * np.float32(scale)


def sampler(cpu: CpuEngine, params: SamplingParams, prompt: tuple[int, ...] = (), **more: Any) -> Sampler:
    return Sampler(params, np.array(prompt, np.int32), VOCAB, cpu.sample, **more)


def distribution(logits: Float32Array, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """id -> probability after all filters, ids in drawing order (descending, lower id first)."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    if top_k:
        order, weights = order[:top_k], weights[:top_k]
    if top_p < 1:
        before = np.cumsum(weights) - weights
        kept = (before < top_p * weights.sum()) | (np.arange(len(weights)) == 0)
        order, weights = order[kept], weights[kept]
    kept = weights >= min_p * weights.max()
    order, weights = order[kept], weights[kept]
    return dict(zip(order.tolist(), (weights / weights.sum()).tolist(), strict=True))


@pytest.mark.parametrize("temperature", [0.3, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 20, 499, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_draw_follows_the_filters(cpu: CpuEngine, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(top_k)
    logits[3:20] = -np.inf
    expected = distribution(logits, temperature, min(top_k, VOCAB), top_p, min_p)
    drawn = [cpu.sample(logits, temperature, top_k, top_p, min_p, u) for u in np.linspace(0, 1, 1000, endpoint=False)]
    counts = np.bincount(drawn, minlength=VOCAB) / len(drawn)
    for token in range(VOCAB):  # a uniform grid hits each token in proportion, to within one step
        assert counts[token] == pytest.approx(expected.get(token, 0.0), abs=1.01 / 1000)


def test_ties_keep_the_lowest_ids(cpu: CpuEngine) -> None:
    logits = np.zeros(VOCAB, np.float32)
    assert {cpu.sample(logits, 1.0, 3, 1.0, 0.0, u) for u in (0.0, 0.4, 0.99)} == {0, 1, 2}
    assert sampler(cpu, SamplingParams(temperature=0)).choose(logits.copy())[0] == 0


def test_extreme_temperatures(cpu: CpuEngine) -> None:
    logits = random_logits(1)
    assert cpu.sample(logits, 1e-6, 0, 1.0, 0.0, 0.999) == int(logits.argmax())
    assert cpu.sample(logits, 1e-6, 20, 0.9, 0.1, 0.999) == int(logits.argmax())
    hot = {cpu.sample(logits, 100.0, 0, 1.0, 0.0, u) for u in np.linspace(0, 1, 2000, endpoint=False)}
    assert len(hot) == VOCAB


def test_same_seed_same_tokens(cpu: CpuEngine) -> None:
    def run(seed: int | None) -> list[int]:
        chooser = sampler(cpu, SamplingParams(seed=seed))
        return [chooser.choose(random_logits(i))[0] for i in range(30)]

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(None) != run(None)


def test_greedy_takes_the_largest(cpu: CpuEngine) -> None:
    logits = random_logits(2)
    assert sampler(cpu, SamplingParams(temperature=0)).choose(logits.copy())[0] == int(logits.argmax())


def test_bias_comes_before_everything(cpu: CpuEngine) -> None:
    params = SamplingParams(temperature=0, logit_bias=((5, 50.0), (5, 50.0), (6, 99.0)))
    assert sampler(cpu, params).choose(random_logits(3))[0] == 5
    assert sampler(cpu, SamplingParams(temperature=0, logit_bias=((9, 100.0),))).choose(random_logits(3))[0] == 9


def test_presence_and_frequency_count_generated_tokens_only(cpu: CpuEngine) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[4, 5, 6]] = 3.0, 2.5, 2.0
    presence = sampler(cpu, SamplingParams(temperature=0, presence_penalty=0.8), prompt=(4, 4, 5))
    assert [presence.choose(logits.copy())[0] for _ in range(4)] == [4, 5, 4, 4]
    frequency = sampler(cpu, SamplingParams(temperature=0, frequency_penalty=0.8))
    assert [frequency.choose(logits.copy())[0] for _ in range(6)] == [4, 5, 4, 6, 5, 4]


def test_repetition_counts_the_prompt_too(cpu: CpuEngine) -> None:
    logits = np.full(VOCAB, -5.0, np.float32)
    logits[[4, 5, 6]] = 3.0, 2.5, -1.0
    chooser = sampler(cpu, SamplingParams(temperature=0, repetition_penalty=2.0), prompt=(4,))
    changed = logits.copy()
    assert chooser.choose(changed)[0] == 5
    assert changed[[4, 5, 6]].tolist() == [1.5, 2.5, -1.0]
    changed = logits.copy()
    assert chooser.choose(changed)[0] == 4
    again = np.full(VOCAB, -5.0, np.float32)
    assert chooser.choose(again)[0] == 0
    assert again[4] == -10.0


class OnlyEven:
    """A constraint that notes what it is told."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self) -> BoolArray | None:
        return None if len(self.accepted) == 2 else np.arange(VOCAB) % 2 == 0

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraint_rules_and_is_told(cpu: CpuEngine, temperature: float) -> None:
    constraint = OnlyEven()
    params = SamplingParams(temperature=temperature, seed=1, logit_bias=((1, 100.0),))
    chooser = sampler(cpu, params, constraint=constraint)
    drawn = [chooser.choose(random_logits(i))[0] for i in range(4)]
    assert drawn == constraint.accepted
    assert [token % 2 for token in drawn] == [0, 0, 1, 0]


def test_logprobs_are_those_of_the_model(cpu: CpuEngine) -> None:
    logits = random_logits(5)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    params = SamplingParams(temperature=0, logit_bias=((17, 100.0),))
    token, report = sampler(cpu, params, top_logprobs=3).choose(logits.copy())
    assert token == 17
    assert report is not None
    assert report.logprob == pytest.approx(expected[17], abs=1e-5)
    assert [i for i, _ in report.top] == np.argsort(-logits)[:3].tolist()
    assert [p for _, p in report.top] == pytest.approx(np.sort(expected)[::-1][:3].tolist(), abs=1e-5)
    assert sampler(cpu, params, top_logprobs=0).choose(logits.copy())[1] is not None
    assert sampler(cpu, params).choose(logits.copy())[1] is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 20])
def test_logits_that_are_no_numbers_are_a_kernel_fault(cpu: CpuEngine, temperature: float, top_k: int) -> None:
    with pytest.raises(KernelError):
        sampler(cpu, SamplingParams(temperature=temperature, top_k=top_k)).choose(np.full(VOCAB, np.nan, np.float32))


@pytest.mark.parametrize("name", SAMPLING_RANGES)
@pytest.mark.parametrize("end", [0, 1])
def test_both_ends_of_every_range_are_served(cpu: CpuEngine, name: str, end: int) -> None:
    """No accepted parameter may look like a broken engine: that would end the server."""
    value = SAMPLING_RANGES[name][end]
    extreme = {"repetition_penalty": 0.01, "frequency_penalty": -2.0, "temperature": 0.5, "seed": 3}
    params = SamplingParams(**(extreme | {name: int(value) if name == "top_k" else value}))  # type: ignore[arg-type]
    chooser = sampler(cpu, params, tuple(range(VOCAB)))
    for i in range(20):
        assert 0 <= chooser.choose(random_logits(i) * 1000)[0] < VOCAB


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-9])
@pytest.mark.parametrize("top_k", [0, 20])
def test_a_temperature_next_to_zero_is_greedy(cpu: CpuEngine, temperature: float, top_k: int) -> None:
    logits = random_logits(4) * 100
    chooser = sampler(cpu, SamplingParams(temperature=temperature, top_k=top_k, top_p=0.9, min_p=0.1, seed=1))
    assert chooser.choose(logits.copy())[0] == int(logits.argmax())


def test_any_integer_is_a_seed(cpu: CpuEngine) -> None:
    def run(seed: int) -> list[int]:
        chooser = sampler(cpu, SamplingParams(seed=seed))
        return [chooser.choose(random_logits(i))[0] for i in range(10)]

    assert run(-1) == run(-1) == run(2**64 - 1)
    assert run(-(2**63)) == run(2**63)


class Nothing(OnlyEven):
    """A grammar at a dead end."""

    def allowed(self) -> BoolArray | None:
        return np.zeros(VOCAB, np.bool_)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_dead_end_of_a_grammar_is_the_requests_fault(cpu: CpuEngine, temperature: float) -> None:
    with pytest.raises(RequestError, match="grammar"):
        sampler(cpu, SamplingParams(temperature=temperature), constraint=Nothing()).choose(random_logits(0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("presence_penalty", float("inf")),
        ("logit_bias", ((VOCAB, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
    ],
)
def test_bad_parameters_are_named(cpu: CpuEngine, field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as error:
        sampler(cpu, SamplingParams(**{field: value}))  # type: ignore[arg-type]
    assert error.value.param == field
