"""How a prompt is divided among devices and passes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.core import Int32Array
from engine.segments import CardRule, Segment, Stretch, cache_ids, mark_like, segments, stretches

ALL = 1 << 30


def test_without_a_card_all_run_on_the_cpu() -> None:
    expected = [Segment(0, 100, False), Segment(100, 1124, False), Segment(1124, 1200, False)]
    assert segments([100, 1124], 1200, None) == expected
    ids = np.arange(1200, dtype=np.int32)
    assert np.array_equal(cache_ids(ids, expected), ids)


def test_the_first_long_segment_decides_for_all_behind_it() -> None:
    found = segments([100, 400, 450], 500, CardRule(256, ALL))
    assert [part.on_card for part in found] == [False, True, True, True]
    ids = cache_ids(np.arange(500, dtype=np.int32), found)
    assert ids[:100].tolist() == list(range(100))
    assert (ids[100:] >= 1 << 30).all()
    assert mark_like(ids, [7]).tolist() == [7 | 1 << 30]
    assert mark_like(ids[:100], [7]).tolist() == [7]


def test_segments_that_may_leave_the_cards_memory_run_on_the_cpu() -> None:
    found = segments([1024, 2048], 3000, CardRule(256, 2500))
    assert [part.on_card for part in found] == [True, True, False]


@pytest.mark.parametrize("seed", range(20))
def test_what_the_cache_takes_for_the_same_was_computed_alike(seed: int) -> None:
    """Prompts with a common beginning of any length; a token of its own stands before each cut, as headers do."""
    rng = random.Random(seed)
    rule = CardRule(rng.choice([64, 256, 1024]), rng.choice([3000, ALL]))
    sizes = [rng.choice([1024, rng.randint(1, 300), rng.randint(100, 1024)]) for _ in range(12)]

    def prompt() -> tuple[list[Segment], Int32Array]:
        kept = rng.randint(1, 12)
        own = [*sizes[:kept], *(rng.choice([1024, rng.randint(1, 500)]) for _ in range(3))]
        cuts = np.cumsum(own).tolist()
        tokens = rng.randint(1, cuts[-1])
        parts = segments([cut for cut in cuts if cut <= tokens], tokens, rule)
        ids = np.zeros(tokens, np.int32)
        ids[[cut - 1 for cut in cuts if cut <= tokens]] = 1
        return parts, cache_ids(ids, parts)

    def devices(parts: list[Segment], tokens: int) -> list[bool]:
        return [part.on_card for part in parts for _ in range(part.start, min(part.end, tokens))]

    for _ in range(50):
        (parts, ids), (others, other_ids) = prompt(), prompt()
        least = min(len(ids), len(other_ids))
        same = int(np.argmin(np.append(ids[:least] == other_ids[:least], False)))
        assert devices(parts, same) == devices(others, same)


def test_the_card_takes_neighbouring_segments_at_once() -> None:
    parts = segments([100, 500, 1000], 1700, CardRule(256, ALL))
    assert stretches(parts, 0, {64, 228, 500, 1000, 1064}, 512) == [
        Stretch(64, False),
        Stretch(100, False),
        Stretch(1700, True, (100, 500, 1000), (228, 500, 1000, 1064)),
    ]
    assert stretches(parts, 228, {500}, 512) == [Stretch(1700, True, (228, 500, 1000), (500,))]


def test_the_cpu_divides_on_the_grid_of_the_segments_start() -> None:
    found = stretches(segments([100], 1300, None), 0, {228}, 512)
    assert [stretch.end for stretch in found] == [100, 228, 740, 1252, 1300]
    assert stretches(segments([100], 1300, None), 1300, set(), 512) == []
