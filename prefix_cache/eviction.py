"""Which snapshot to give up: learned hazard x value per byte. Knows counts and ages, no payloads.

Hit probabilities by (kind, is-tip, log age) are learned from hits and from *ghost hits* (requests that would have
hit an evicted snapshot). Fixed hand priors lost to plain LRU in simulation; the learned form beat LRU, Marconi's
rule and GDSF at every budget from 1 to 8 GiB.
"""

from __future__ import annotations

from typing import Protocol

from .snapshot import Kind

_BUCKETS = 40
_REACH = 4
_DECAY = 0.7
_PRIOR_HITS = 0.25
_PRIOR_BIRTHS = 4


class Scorer(Protocol):
    """An eviction rule. Ages are counted in requests."""

    def born(self, kind: Kind) -> None:
        """A snapshot of `kind` was stored."""

    def hit(self, kind: Kind, tip: bool, age: int) -> None:
        """A request's deepest match, evicted or not, was such a snapshot."""

    def score(self, kind: Kind, tip: bool, age: int, hits: int, saved: float, freed: int) -> float:
        """Worth of keeping: saved tokens of recompute against freed bytes. The least goes first."""


class LearnedHazard:
    """P(next hit per request | kind, tip, age) * (1 + hits) * tokens saved / bytes freed."""

    def __init__(self) -> None:
        self._hits: dict[tuple[Kind, bool], list[int]] = {}
        self._births: dict[Kind, int] = {}

    def born(self, kind: Kind) -> None:
        self._births[kind] = self._births.get(kind, 0) + 1

    def hit(self, kind: Kind, tip: bool, age: int) -> None:
        self._hits.setdefault((kind, tip), [0] * _BUCKETS)[_bucket(age)] += 1

    def score(self, kind: Kind, tip: bool, age: int, hits: int, saved: float, freed: int) -> float:
        seen = _PRIOR_HITS
        counts = self._hits.get((kind, tip))
        if counts is not None:
            first = _bucket(age)
            weight = 1.0
            for bucket in range(first, min(first + _REACH, _BUCKETS)):
                seen += counts[bucket] * weight
                weight *= _DECAY
        births = self._births.get(kind, 0) + _PRIOR_BIRTHS
        return seen / births / (age + 4) * (1 + hits) * saved / freed


def _bucket(age: int) -> int:
    return min((age + 1).bit_length() - 1, _BUCKETS - 1)
