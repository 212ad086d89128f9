"""How a prompt's prefill is divided: into segments, and these into stretches that one device computes in one go.

A segment lies between two canonical cuts, and its own size decides where it is computed: nothing that was cached
does. So a prompt has the same bits whether or not a snapshot gave its beginning. Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from prefix_cache import SEGMENT_TOKENS


@dataclass(frozen=True, slots=True)
class CardRule:
    """Which segments a card computes. min_tokens: those of at least this size (what goes on from a segment of full
    size belongs to it). longest: tokens of a context that the card has room for; segments that may reach beyond run
    on the CPU."""

    min_tokens: int
    longest: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions start..end of a prompt between two canonical cuts (the last one may end before its cut).

    settled: from this position on, no longer prompt with the same beginning computes the segment elsewhere, so a
    state there has the bits that any prompt gets. Beyond `end`: nowhere inside.
    """

    start: int
    end: int
    on_card: bool
    settled: int


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
        whole = end < tokens or bool(cuts and cuts[-1] == end)
        fits = rule is not None and start + SEGMENT_TOKENS <= rule.longest
        on_card = rule is not None and fits and (goes_on or end - start >= rule.min_tokens)
        if rule is None or not fits or goes_on:
            settled = start + 1
        elif on_card:
            settled = start + rule.min_tokens
        else:
            settled = end if whole else end + 1
        found.append(Segment(start, end, on_card, settled))
        start, goes_on = end, on_card and end - start == SEGMENT_TOKENS
    return found


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
