"""How a prompt's prefill is divided: into segments, and these into stretches that one device computes in one go.

A segment lies between two canonical cuts. The first that is long enough goes to the card, and from there on all do: the
prompt alone decides, not what was cached. Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from engine.core import Int32Array
from prefix_cache import SEGMENT_TOKENS

_ON_CARD = 1 << 30  # above every token id


@dataclass(frozen=True, slots=True)
class CardRule:
    """Which segments a card computes. min_tokens: the first of at least this size, and all behind it. longest: tokens
    of a context that the card has room for; segments that may reach beyond run on the CPU."""

    min_tokens: int
    longest: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions start..end of a prompt between two canonical cuts (the last one may end before its cut)."""

    start: int
    end: int
    on_card: bool


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions up to `end` that are computed in one go.

    on_card: by the card, which may take several segments at once: `starts` are those that begin inside, `stops` the
    positions inside at which the state is wanted. The CPU takes one piece of a segment at a time.
    """

    end: int
    on_card: bool
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()


def segments(cuts: Sequence[int], tokens: int, rule: CardRule | None) -> list[Segment]:
    """The segments of a prompt. cuts: ascending canonical cuts in (0, tokens]; rule None: there is no card."""
    found: list[Segment] = []
    start, goes_on = 0, False
    for end in [*cuts, tokens] if not cuts or cuts[-1] < tokens else cuts:
        fits = rule is not None and start + SEGMENT_TOKENS <= rule.longest
        on_card = rule is not None and fits and (goes_on or end - start >= rule.min_tokens)
        found.append(Segment(start, end, on_card))
        start, goes_on = end, goes_on or on_card
    return found


def cache_ids(token_ids: Int32Array, parts: Sequence[Segment]) -> Int32Array:
    """What the prefix cache is told instead of token ids, int32 [tokens]: those from the first segment on the card on
    are marked.

    The size of that segment is not known before its end, so that of two prompts with the same beginning one may be on
    the CPU where the other is on the card: to the cache they must not be the same. Behind marks, or without any, equal
    ids were computed alike. What is decoded behind a marked prompt is marked too (`mark_like`)."""
    first = next((part.start for part in parts if part.on_card), len(token_ids))
    ids = np.array(token_ids, np.int32)
    ids[first:] |= _ON_CARD
    return ids


def mark_like(ids: Int32Array, more: Sequence[int]) -> Int32Array:
    """Token ids `more` that follow `ids` (of `cache_ids`, at least one), for the cache."""
    marked: Int32Array = np.array(more, np.int32) | (ids[-1] & np.int32(_ON_CARD))
    return marked


def stretches(parts: Sequence[Segment], resumed: int, wanted: Collection[int], pass_tokens: int) -> list[Stretch]:
    """What is left to compute of a prompt behind `resumed`. wanted: positions where the state is asked for.

    pass_tokens: most tokens of a pass of the CPU. It divides on the grid of a segment's start, where a segment may be
    divided without effect on any bit.
    """
    found: list[Stretch] = []
    for part in parts:
        if part.end <= resumed:
            continue
        begin = max(part.start, resumed)
        inside = sorted(position for position in wanted if begin < position < part.end)
        if part.on_card:
            before = found.pop() if found and found[-1].on_card else None
            starts, stops = (before.starts, before.stops) if before else ((), ())
            starts = (*starts, begin)
            stops = (*stops, *([begin] if before and begin in wanted else []), *inside)
            found.append(Stretch(part.end, True, starts, stops))
            continue
        for stop in [*inside, part.end]:
            found += [Stretch(position, False) for position in range(begin + pass_tokens, stop, pass_tokens)]
            found.append(Stretch(stop, False))
            begin = stop
    return found
