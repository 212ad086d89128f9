"""The numbers of an evaluation, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.convert.corpus import Sample
from engine.convert.evaluate import compare, log_softmax, table


def sample(labels: list[int], skill: str = "a") -> Sample:
    return Sample(np.array([0, *labels], np.int32), 1, skill)


def test_numbers_are_those_of_the_definitions() -> None:
    reference = [[np.array([0, 1, 2], np.float32), np.array([3, 0, 0], np.float32)]]
    candidate = [[np.array([0, 2, 1], np.float32), np.array([3, 1, 0], np.float32)]]
    score = compare([sample([2, 0])], reference, candidate)
    p = [np.exp(x) / np.exp(x).sum() for x in reference[0]]
    q = [np.exp(x) / np.exp(x).sum() for x in candidate[0]]
    assert score.kl == pytest.approx(np.mean([(a * np.log(a / b)).sum() for a, b in zip(p, q, strict=True)]), rel=1e-6)
    assert score.loss == pytest.approx(-(math.log(q[0][2]) + math.log(q[1][0])) / 2, rel=1e-6)
    assert score.reference_loss == pytest.approx(-(math.log(p[0][2]) + math.log(p[1][0])) / 2, rel=1e-6)
    assert score.agreement == 0.5
    assert (score.skills["a"].exact, score.skills["a"].reference_exact) == (0, 1)
    assert score.known_loss == score.loss


def test_what_the_reference_gets_wrong_is_not_known() -> None:
    reference = [[np.array([0, 3], np.float32)], [np.array([0, 3], np.float32)]]
    candidate = [[np.array([1, 2], np.float32)], [np.array([2, 2], np.float32)]]
    score = compare([sample([1]), sample([0])], reference, candidate)
    assert score.known_loss == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6)
    assert score.loss == pytest.approx((math.log(1 + math.exp(-1)) + math.log(2)) / 2, rel=1e-6)


def test_equal_models_have_no_divergence() -> None:
    logits = [[np.random.default_rng(0).standard_normal(50).astype(np.float32)] for _ in range(4)]
    score = compare([sample([1], str(i)) for i in range(4)], logits, logits)
    assert score.kl == 0
    assert score.agreement == 1
    assert "top-1 agreement    100.00%" in table(score)
    assert score.as_dict()["perplexity"] == score.as_dict()["reference_perplexity"]


def test_large_logits_do_not_overflow() -> None:
    assert np.isfinite(log_softmax(np.array([1e4, -1e4], np.float32))).all()
