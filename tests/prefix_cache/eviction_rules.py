"""Eviction rules to compare with, and a replay of request streams through the real cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from traffic import Request

from prefix_cache import CacheConfig, Cuts, Geometry, Kind, Namespace, PrefixCache, PromptKey, fingerprint, plan
from prefix_cache.eviction import Scorer

REPLAY = Geometry(page_bytes=64, recurrent_bytes=3216)
"""The 35B shape scaled down: the recurrent payload weighs 50.25 KV pages (62.8 MiB against 1.25 MiB)."""
PAGES_PER_GIB = (1 << 30) // (64 * 20 * 1024)


class _Fixed:
    def born(self, kind: Kind) -> None:
        pass

    def hit(self, kind: Kind, tip: bool, age: int) -> None:
        pass


class LeastRecentlyUsed(_Fixed):
    def score(self, kind: Kind, tip: bool, age: int, hits: int, saved: float, freed: int) -> float:
        return -age


class GreedyDualSizeFrequency(_Fixed):
    def score(self, kind: Kind, tip: bool, age: int, hits: int, saved: float, freed: int) -> float:
        return (1 + hits) * saved / freed / (1 + age)


class Zeros:
    """A state without content: only placement and eviction are replayed."""

    rope_delta = 0

    def __init__(self) -> None:
        self._page = np.zeros(REPLAY.page_bytes, np.uint8)
        self._recurrent = [np.zeros(REPLAY.recurrent_bytes, np.uint8)]

    def layer_positions(self):
        return ()

    def page(self, index: int):
        return self._page

    def recurrent(self):
        return self._recurrent


@dataclass
class Replay:
    tokens: int
    reused: int
    requests: int

    @property
    def rate(self) -> float:
        return self.reused / self.tokens


def replay(requests: Iterable[Request], gib: float, scorer: Scorer | None) -> Replay:
    """Token hit rate of a stream against a RAM-only cache of `gib` GiB at the 35B shape."""
    config = CacheConfig(
        ram_bytes=int(gib * PAGES_PER_GIB) * REPLAY.page_bytes, cuts=Cuts.ANY, prefill_tokens_per_s=50.0
    )
    fp = fingerprint({"replay": 1})
    cache = PrefixCache(config, fp, REPLAY, scorer=scorer)
    state = Zeros()
    total = Replay(0, 0, 0)
    for request in requests:
        key = PromptKey(Namespace(fp), request.prompt)
        outcome, lease = cache.acquire(key)
        if lease is not None:
            lease.release()
        todo = plan(
            key.tokens, request.boundaries, [], Cuts.ANY, resume=outcome.position, matched=outcome.matched
        )  # fmt: skip
        for placement in todo:
            cache.store(key, state, placement.kind, placement.position, placement.position)
        whole = key.extended(request.generated)
        cache.store(whole, state, Kind.REPLY, whole.tokens, key.tokens)
        total.tokens += key.tokens
        total.reused += outcome.position
        total.requests += 1
    return total
