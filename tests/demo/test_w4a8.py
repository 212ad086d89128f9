"""What 8-bit activations cost: the served path against float32 on the same 4-bit weights, on held-out text.

The bar: the same most likely token at 99 % of the positions or more, and a mean divergence of 2e-3 nats or less.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.convert import cli
from engine.convert.corpus import CorpusReader, Sample, take
from engine.convert.evaluate import Score, compare
from engine.convert.forward import LONGEST, Forward

LESSONS, TEXTS = 64, 48


@pytest.fixture(scope="module")
def checkpoint(repository: Path) -> Path:
    return repository / "engine/demo/checkpoint"


@pytest.fixture(scope="module")
def paths(checkpoint: Path) -> Iterator[tuple[Forward, Forward]]:
    """The reference in float32, and the path that serves."""
    reference, served = Forward(checkpoint, None, compute="f32"), Forward(checkpoint, None, compute="w4a8")
    yield reference, served
    served.close()
    reference.close()


@pytest.fixture(scope="module")
def lessons(checkpoint: Path, paths: tuple[Forward, Forward]) -> Score:
    samples = take(CorpusReader(checkpoint, LONGEST), None, LESSONS, held_out=True, seed=2)
    return measure(paths, samples)


@pytest.fixture(scope="module")
def text(checkpoint: Path, repository: Path, paths: tuple[Forward, Forward]) -> Score:
    corpus = repository / "tests/convert/data/held_out.jsonl"
    return measure(paths, take(CorpusReader(checkpoint, LONGEST), corpus, TEXTS, held_out=True, seed=2))


def measure(paths: tuple[Forward, Forward], samples: list[Sample]) -> Score:
    reference, served = paths
    score = compare(samples, map(reference.logits, samples), map(served.logits, samples))
    assert score.tokens >= 900
    assert score.kl > 0, "both ran the same path"
    return score


def test_divergence_on_lessons(lessons: Score) -> None:
    assert lessons.kl <= 2e-3


def test_agreement_on_lessons(lessons: Score) -> None:
    assert lessons.agreement >= 0.99


def test_divergence_on_running_text(text: Score) -> None:
    assert text.kl <= 2e-3


def test_agreement_on_running_text(text: Score) -> None:
    assert text.agreement >= 0.99


def test_command_compares_the_two_paths(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    divergences = []
    for reference in ("f32", "w4a8"):
        cli.evaluate(checkpoint, checkpoint, samples=2, against_compute=reference, as_json=True)
        divergences.append(json.loads(capsys.readouterr().out)["kl"])
    assert divergences[0] > 0
    assert divergences[1] == 0
