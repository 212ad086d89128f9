"""How a prompt is divided among devices and passes."""

from __future__ import annotations

import random

import pytest

from engine.segments import CardRule, Segment, Stretch, segments, stretches

ALL = 1 << 30


def test_without_a_card_every_position_is_settled() -> None:
    assert segments([100, 1124], 1200, None) == [
        Segment(0, 100, False, 1),
        Segment(100, 1124, False, 101),
        Segment(1124, 1200, False, 1125),
    ]


def test_size_decides_and_what_goes_on_from_a_full_segment_follows_it() -> None:
    found = segments([100, 1124, 1150], 1200, CardRule(256, ALL))
    assert [part.on_card for part in found] == [False, True, True, False]
    assert [part.settled for part in found] == [100, 356, 1125, 1201]


def test_segments_that_may_leave_the_cards_memory_run_on_the_cpu() -> None:
    found = segments([1024, 2048], 3000, CardRule(256, 2500))
    assert [(part.on_card, part.settled) for part in found] == [(True, 256), (True, 1025), (False, 2049)]


@pytest.mark.parametrize("seed", range(20))
def test_settled_positions_are_computed_alike_in_every_longer_prompt(seed: int) -> None:
    """Cuts of a prompt are those of any longer one that lie inside it."""
    rng = random.Random(seed)
    cuts, last = [], 0
    while last < 6000:
        last += rng.choice([1024, rng.randint(1, 300), rng.randint(100, 1024)])
        cuts.append(last)
    rule = CardRule(rng.choice([64, 256, 1024]), rng.choice([3000, ALL]))

    def device(tokens: int, position: int) -> bool:
        parts = segments([cut for cut in cuts if cut <= tokens], tokens, rule)
        return next(part.on_card for part in parts if part.start < position <= part.end)

    for _ in range(200):
        tokens = rng.randint(1, 6000)
        parts = segments([cut for cut in cuts if cut <= tokens], tokens, rule)
        position = rng.randint(1, tokens)
        part = next(part for part in parts if part.start < position <= part.end)
        if position >= part.settled:
            assert device(rng.randint(position, 6000), position) == part.on_card


def test_the_card_takes_neighbouring_segments_at_once() -> None:
    parts = segments([500, 1000, 1100], 1700, CardRule(256, ALL))
    assert stretches(parts, 0, {128, 500, 1000, 1064}, 512) == [
        Stretch(1000, True, (0, 500), (128, 500)),
        Stretch(1064, False),
        Stretch(1100, False),
        Stretch(1700, True, (1100,), ()),
    ]
    assert stretches(parts, 256, {500}, 512)[0] == Stretch(1000, True, (256, 500), (500,))


def test_the_cpu_divides_on_the_grid_of_the_segments_start() -> None:
    found = stretches(segments([100], 1300, None), 0, {228}, 512)
    assert [stretch.end for stretch in found] == [100, 228, 740, 1252, 1300]
    assert stretches(segments([100], 1300, None), 1300, set(), 512) == []
