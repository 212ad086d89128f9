"""The training schedule: every step is a function of its number, whoever computes it and however fast."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.demo.recipe import data
from engine.demo.recipe.data import Encoder, Form, Packer
from engine.demo.recipe.schedule import LAST_RATE, Plan, rate_of, stage_of

PLAN = Plan(steps=1000, mtp_steps=50, parts=2, seed=7, first=0.0)
SMALL = Form(rows=1, length=1024, labels=500, image_rows=320)


def test_stages_follow_the_step() -> None:
    assert [stage_of(PLAN.fraction(step)) for step in (0, 99, 100, 619, 620, 999, 1049)] == [0, 0, 1, 1, 2, 2, 2]
    assert Plan(steps=1000, mtp_steps=0, parts=2, seed=7, first=0.45).fraction(0) == 0.45


def test_rate_warms_up_stays_and_falls() -> None:
    assert rate_of(0, 0.5) == pytest.approx(0.01)
    assert rate_of(300, 0.3) == 1.0
    assert rate_of(900, 0.81) == pytest.approx(0.5)
    assert rate_of(1000, 1.0) == LAST_RATE


def test_long_steps_are_those_of_the_seed() -> None:
    long = [PLAN.is_long(step) for step in range(1000)]
    assert long == [Plan(1000, 50, 1, 7, 0.0).is_long(step) for step in range(1000)]
    assert not any(long[:100])
    assert 30 < sum(long[620:]) < 90
    assert len({PLAN.batch_seed(step, part) for step in range(50) for part in range(2)}) == 100


def test_a_batch_does_not_depend_on_those_before_it(repository: Path) -> None:
    tokenizer = Tokenizer.from_file(str(repository / "engine/demo/checkpoint/tokenizer.json"))
    encoder = Encoder(tokenizer, data.TEMPLATE_PATH.read_text("utf-8"))
    fresh, used = (Packer(encoder, ["Some prose."], [], seed=s) for s in (1, 2))
    used.batch(SMALL, 1)
    made = []
    for packer in (fresh, used):
        packer.rng = random.Random(PLAN.batch_seed(3, 1))
        made.append(packer.batch(SMALL, 1))
    assert made[0]["skills"] == made[1]["skills"]
    for name in ("ids", "positions", "label_at", "label_id", "pictures"):
        assert np.array_equal(made[0][name], made[1][name])
