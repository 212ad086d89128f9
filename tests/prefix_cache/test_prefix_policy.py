import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_cache import Cuts, Kind, Markers, MediaSpan, Placement, canonical_cuts, plan, snap

START, NEWLINE, ASSISTANT, USER = 1, 2, 3, 4
MARKERS = Markers(START, NEWLINE, ASSISTANT)


def turn(role, content):
    return [START, role, NEWLINE, *content, 5, NEWLINE]


def ids(*parts):
    return np.array([t for part in parts for t in part], dtype=np.int32)


def test_cuts_follow_headers_and_the_grid():
    tokens = ids(turn(USER, [9] * 200), turn(USER, [9] * 50), turn(USER, [9] * 100), [START, ASSISTANT, NEWLINE], [9])
    # first header at 3: under 128 tokens after the start; second at 208; third at 263: too close; assistant: always
    assert canonical_cuts(tokens, MARKERS) == [208, 368]


def test_long_text_is_cut_every_1024_tokens_since_the_last_cut():
    tokens = ids(turn(USER, [9] * 195), turn(USER, [9] * 3000))
    assert canonical_cuts(tokens, MARKERS) == [203, 1227, 2251]


def test_pictures_cut_behind_them_and_behind_the_token_before():
    picture = [MediaSpan(50, 100, b"d" * 32)]
    assert canonical_cuts(ids([9] * 300), None, picture) == [150]
    announced = [9] * 49 + [7] + [9] * 250
    assert canonical_cuts(ids(announced), Markers(START, NEWLINE, ASSISTANT, 7), picture) == [50, 150]


def test_text_that_goes_on_without_a_picture_is_cut_alike():
    announced = [9] * 49 + [7] + [9] * 250
    with_picture = canonical_cuts(ids(announced), Markers(START, NEWLINE, ASSISTANT, 7), [MediaSpan(50, 9, b"d" * 32)])
    text = canonical_cuts(ids(announced), Markers(START, NEWLINE, ASSISTANT, 7))
    assert [cut for cut in with_picture if cut <= 50] == [cut for cut in text if cut <= 50] == [50]


@settings(derandomize=True, max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([[START, USER, NEWLINE], [START, ASSISTANT, NEWLINE], [START], [NEWLINE]]),
            st.integers(1, 1500).map(lambda n: [9] * n),
        ),
        max_size=12,
    ),
    st.integers(0, 6000),
)
def test_cuts_of_a_prefix_are_the_cuts_inside_it(parts, end):
    tokens = ids(*parts) if parts else ids([])
    end = min(end, len(tokens))
    cuts = canonical_cuts(tokens, MARKERS)
    assert canonical_cuts(tokens[:end], MARKERS) == [c for c in cuts if c <= end]
    assert all(b - a <= 1024 for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True))


def test_snap_never_leaves_the_exact_positions():
    cuts = [100, 300]
    assert [snap(p, cuts, Cuts.CANONICAL) for p in (99, 100, 299, 301)] == [0, 100, 100, 300]
    assert [snap(p, cuts, Cuts.GRID) for p in (63, 99, 101, 299, 363, 364)] == [0, 64, 100, 292, 300, 364]
    assert snap(299, cuts, Cuts.ANY) == 299


def positions(placements, kind):
    return [p.position for p in placements if p.kind is kind]


def test_chat_gets_system_messages_and_generation_prompt():
    placed = plan(1002, [400, 700, 1000], [], Cuts.ANY)
    assert placed == [
        Placement(400, Kind.SYSTEM), Placement(700, Kind.MESSAGE), Placement(1000, Kind.GENERATION)
    ]  # fmt: skip


def test_close_messages_are_thinned_but_never_the_system_or_the_generation_prompt():
    placed = plan(1002, [20, 60, 100, 500, 990], [], Cuts.ANY)
    assert [p.position for p in placed] == [20, 500, 990]


def test_long_message_gets_log_spaced_points_and_three_near_its_end():
    placed = plan(12_002, [500, 12_000], [], Cuts.ANY)
    inside = positions(placed, Kind.INTERIOR)
    distances = [12_000 - p for p in inside]
    assert all(p % 64 == 0 for p in inside)
    assert len(inside) <= 8
    assert all(b - a >= 128 or b > 12_000 - 192 for a, b in itertools.pairwise(inside))
    for edit in (60, 128, 200, 512, 900, 2000, 4000):  # an edit that far from the end recomputes at most about twice it
        recomputed = min(d for d in distances if d >= edit)
        assert recomputed <= 4 * edit, (edit, recomputed)


def test_message_end_and_next_header_end_are_one_place():
    assert plan(1002, [397, 400, 697, 700, 997, 1000], [], Cuts.ANY) == plan(1002, [400, 700, 1000], [], Cuts.ANY)


def test_canonical_cut_behind_a_message_end_is_used():
    placed = plan(1002, [397, 997], [400, 1000], Cuts.CANONICAL)
    assert placed == [Placement(400, Kind.SYSTEM), Placement(1000, Kind.GENERATION)]


def test_branch_is_placed_on_second_sight_only():
    assert positions(plan(1002, [400, 1000], [], Cuts.ANY, resume=400, matched=464), Kind.BRANCH) == []
    assert positions(plan(1002, [400, 1000], [], Cuts.ANY, resume=400, matched=800), Kind.BRANCH) == [768]


def test_nothing_at_or_before_the_resume_point_nor_past_the_last_but_one_token():
    placed = plan(1000, [400, 700, 999], [], Cuts.ANY, resume=700)
    assert [p.position for p in placed] == [999]
    assert plan(1, [], [], Cuts.ANY) == []


@settings(derandomize=True, max_examples=200)
@given(
    st.integers(1, 20_000), st.lists(st.integers(0, 20_000), max_size=10), st.sampled_from(list(Cuts)),
    st.integers(0, 20_000), st.integers(0, 20_000),
)  # fmt: skip
def test_every_placement_is_exact_and_in_range(n, bounds, mode, resume, matched):
    cuts = list(range(777, n + 1, 777))
    resume, matched = min(resume, n - 1), min(matched, n - 1)
    placed = plan(n, sorted(bounds), cuts, mode, resume=resume, matched=matched)
    found = [p.position for p in placed]
    assert found == sorted(set(found))
    for position in found:
        assert resume < position <= n - 1
        assert snap(position, cuts, mode) == position


@pytest.mark.parametrize("mode", list(Cuts))
@pytest.mark.parametrize("given", [5, 2])
def test_generation_prompt_is_cut_before_the_thinking_in_every_mode(mode, given):
    """Whether the boundary is the end of the last message or of the assistant's header."""
    tokens = ids(turn(USER, [9] * 700), [START, ASSISTANT, NEWLINE, 8, NEWLINE])
    n = len(tokens)
    placed = plan(n, [n - given], canonical_cuts(tokens, MARKERS), mode)
    assert positions(placed, Kind.GENERATION) == [n - 2]
