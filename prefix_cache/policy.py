"""Where to cut a prefill and where to take snapshots. Pure functions of token ids and boundaries.

Canonical cuts depend on the prefix alone, so a warm and a cold run execute the same calls with the same shapes
and a resumed state has the same bits even where kernels are not batch-invariant.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from .key import PAGE_TOKENS, MediaSpan
from .snapshot import Kind

SEGMENT_TOKENS = 1024
"""Longest canonical segment: bounds what a cancelled or edited long message recomputes."""
MIN_GAP = 128
"""A snapshot of the 35B shape weighs as much as KV of 3,144 tokens, so closer ones do not pay."""
TAIL_GAPS = (16, 64, 128, 512)
"""Extra points before the end of a long last message, where documents meet changing questions: with the first three on
the 64 grid, a question of 16 to 128 tokens after a document recomputes less than a page of it."""
_GENERATION_WINDOW = 16
_HEADER_TOKENS = 4
_SAME_PLACE = 8


class Cuts(StrEnum):
    """Which positions give a state whose bits do not depend on how the prefill was cut.

    CANONICAL: only the canonical cuts. GRID: also every 64 tokens after a cut (batch-invariant matmul; a delta rule
    that works in chunks of 64 from the start of a segment). ANY: every position (kernels that treat each token alike).
    """

    CANONICAL = "canonical"
    GRID = "grid"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Markers:
    """Token ids of the chat template. turn_start opens a message, newline closes its header, assistant is the
    token after turn_start in the assistant's header; picture announces a picture, None if there is no such token."""

    turn_start: int
    newline: int
    assistant: int
    picture: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Take a snapshot of `kind` after `position` tokens."""

    position: int
    kind: Kind


def canonical_cuts(
    token_ids: npt.NDArray[np.integer], markers: Markers | None, media: Sequence[MediaSpan] = ()
) -> list[int]:
    """Ascending cut positions in (0, tokens]: after each role header, before and after pictures, and every 1,024 tokens
    since the last cut. Headers other than the assistant's count only 128 tokens or more after the last cut.

    The cuts of a prefix are the cuts of the whole that lie inside it; resuming at one is exact.
    markers None: the model has no chat template, only ends of pictures and the 1,024 grid cut.
    """
    n = len(token_ids)
    events: dict[int, bool] = {}
    if markers is not None:
        for start in np.flatnonzero(token_ids == markers.turn_start).tolist():
            for end in range(start + 2, min(start + 2 + _HEADER_TOKENS, n + 1)):
                if int(token_ids[end - 1]) == markers.newline:
                    always = int(token_ids[start + 1]) == markers.assistant
                    events[end] = events.get(end, False) or always
                    break
        if markers.picture is not None:
            events |= dict.fromkeys((np.flatnonzero(token_ids == markers.picture) + 1).tolist(), True)
    # Where a picture begins is not known from what is before it, unless a token says so: no cut.
    events |= {span.start + span.count: True for span in media if span.start + span.count <= n}
    cuts: list[int] = []
    last = 0
    for position in sorted(events):
        while position - last >= SEGMENT_TOKENS:
            last += SEGMENT_TOKENS
            cuts.append(last)
        if position > last and (events[position] or position - last >= MIN_GAP):
            last = position
            cuts.append(last)
    while n - last >= SEGMENT_TOKENS:
        last += SEGMENT_TOKENS
        cuts.append(last)
    return cuts


def snap(position: int, cuts: Sequence[int], mode: Cuts) -> int:
    """The deepest exact position <= `position`; 0 if there is none. cuts: from `canonical_cuts`."""
    if mode is Cuts.ANY:
        return position
    return _grid_floor(position, cuts) if mode is Cuts.GRID else _last_cut(position, cuts)


def plan(
    tokens: int,
    boundaries: Sequence[int],
    cuts: Sequence[int],
    mode: Cuts,
    *,
    resume: int = 0,
    matched: int = 0,
) -> list[Placement]:
    """Snapshots to take while prefilling [resume, tokens), ascending, each in (resume, tokens - 1].

    boundaries: ascending ends of template parts (`Prompt.boundaries`): the first is the end of system and tools, one
    within 16 tokens of the end belongs to the generation prompt, the others end messages. Ends of headers may be
    given too. A canonical cut just behind a boundary (the end of the next header) takes its place.
    matched: tokens of this prompt that the index knows (`Outcome.matched`, less than `tokens`); where they exceed
    `resume` by more than a page, prompts branch there for the second time and the branch gets its own snapshot.
    Positions at or below `tokens - 1` only: the last prompt token must be forwarded to give logits.
    """
    points = _merge(sorted({b for b in boundaries if 0 < b < tokens}))
    wanted: dict[int, Kind] = {}
    tail: set[int] = set()

    def want(position: int, kind: Kind) -> int:
        position = snap(position, cuts, mode)
        if position > resume:
            wanted[position] = min(wanted.get(position, kind), kind, key=_RANK.__getitem__)
        return position

    generation = points[-1] if points and tokens - points[-1] <= _GENERATION_WINDOW else None
    content_end = generation if generation is not None else tokens
    start = 0
    for end in [*points, tokens]:
        gap = SEGMENT_TOKENS
        while gap < end - start:
            want(_grid_floor(end - gap, cuts), Kind.INTERIOR)
            gap *= 2
        start = end
    last_start = max((p for p in points if p < content_end), default=0)
    if content_end - last_start > SEGMENT_TOKENS:
        for gap in TAIL_GAPS:
            tail.add(want(_grid_floor(content_end - gap, cuts), Kind.INTERIOR))
    for index, point in enumerate(points):
        if point != generation:
            want(_cut_behind(point, cuts), Kind.SYSTEM if index == 0 else Kind.MESSAGE)
    if generation is not None:
        want(_cut_behind(generation, cuts), Kind.GENERATION)
    if matched > resume + PAGE_TOKENS:
        want(_grid_floor(matched, cuts), Kind.BRANCH)

    chosen: list[Placement] = []
    last = resume
    for position in sorted(wanted):
        kind = wanted[position]
        thinned = kind in (Kind.MESSAGE, Kind.INTERIOR) and position not in tail
        if thinned and position - last < MIN_GAP and last > 0:
            continue
        chosen.append(Placement(position, kind))
        last = position
    return chosen


_RANK = {
    Kind.SYSTEM: 0, Kind.GENERATION: 1, Kind.BRANCH: 2, Kind.MESSAGE: 3,
    Kind.INTERIOR: 4, Kind.REPLY: 5, Kind.CANCEL: 6, Kind.SHADOW: 7,
}  # fmt: skip


def _merge(points: list[int]) -> list[int]:
    """Of boundaries a few tokens apart (a message's end, the next header's end) the last."""
    return [p for p, following in zip(points, [*points[1:], math.inf], strict=False) if following - p > _HEADER_TOKENS]


def _cut_behind(position: int, cuts: Sequence[int]) -> int:
    """The first canonical cut within a header's length behind `position`, else `position`."""
    index = bisect.bisect_left(cuts, position)
    return cuts[index] if index < len(cuts) and cuts[index] <= position + _SAME_PLACE else position


def _last_cut(position: int, cuts: Sequence[int]) -> int:
    index = bisect.bisect_right(cuts, position)
    return cuts[index - 1] if index else 0


def _grid_floor(position: int, cuts: Sequence[int]) -> int:
    """`position` rounded down to a whole number of chunks after the last cut. Used in every mode: two prompts often
    share a few tokens by chance, so the exact place where they part is not where a third one parts."""
    cut = _last_cut(position, cuts)
    return cut + (position - cut) // PAGE_TOKENS * PAGE_TOKENS
