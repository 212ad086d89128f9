"""A model with a prefix cache in front, wired as the engine does it, and the same without one as oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.core import Float32Array
from engine.model import Model
from engine.state import SequenceState, page_bytes, recurrent_bytes
from prefix_cache import (
    CacheConfig,
    Cuts,
    DiskConfig,
    Geometry,
    Kind,
    Lease,
    Markers,
    Namespace,
    Outcome,
    PrefixCache,
    PromptKey,
    Stored,
    canonical_cuts,
    fingerprint,
    plan,
    snap,
)

MARKERS = Markers(turn_start=1, newline=2, assistant=3)
FINGERPRINT = fingerprint({"model": "tiny"})


def geometry_of(model: Model) -> Geometry:
    return Geometry(page_bytes(model.config, model.cpu.kv_f32), recurrent_bytes(model.config))


class Run:
    """One sequence: state, what is known of its exactness, and the lease that its pages may lie in."""

    def __init__(self, key: PromptKey, state: SequenceState, outcome: Outcome | None, lease: Lease | None) -> None:
        self.key, self.state, self.outcome, self.lease = key, state, outcome, lease
        self.exact_tokens = 0
        self.logits: Float32Array = np.empty(0, np.float32)

    def close(self) -> None:
        self.state.pages = []
        if self.lease is not None:
            self.lease.release()


class CachedModel:
    """cache_blocks: arena size in KV pages; None: no cache, the oracle."""

    def __init__(self, model: Model, cache_blocks: int | None, disk: DiskConfig | None = None) -> None:
        self.model, self.disk, self.blocks = model, disk, cache_blocks
        self.geometry = geometry_of(model)
        self.cache = self._open()

    def _open(self) -> PrefixCache | None:
        if self.blocks is None:
            return None
        config = CacheConfig(self.blocks * self.geometry.page_bytes, self.disk, Cuts.GRID, prefill_tokens_per_s=1.0)
        return PrefixCache(config, FINGERPRINT, self.geometry)

    def restart(self) -> None:
        """Close and open the cache: RAM is lost, what was flushed is not."""
        assert self.cache is not None
        self.cache.close()
        self.cache = self._open()

    def start(self, token_ids: Sequence[int], *, exact: bool) -> Run:
        """A sequence standing at the resume point, at 0 without a hit."""
        key = PromptKey(Namespace(FINGERPRINT), token_ids)
        state = self.model.new_state()
        if self.cache is None:
            return Run(key, state, None, None)
        outcome, lease = self.cache.acquire(key, exact=exact)
        run = Run(key, state, outcome, lease)
        if lease is not None:
            lease.restore([state.conv, state.ssm])
            state.adopt(lease.pages, lease.tail)
            state.position, state.rope_delta = lease.position, lease.rope_delta
            run.exact_tokens = lease.exact_tokens
        return run

    def prefill(self, run: Run, boundaries: Sequence[int], stop: int | None = None) -> None:
        """Take the prompt (its first `stop` tokens: cancelled there, at a cut) into the state."""
        key, state = run.key, run.state
        cuts = canonical_cuts(key.token_ids, MARKERS)
        placements = {}
        if self.cache is not None:
            assert run.outcome is not None
            found = run.outcome
            todo = plan(key.tokens, boundaries, cuts, Cuts.GRID, resume=found.position, matched=found.matched)
            placements = {p.position: p.kind for p in todo}
        if stop is not None:
            stop = snap(stop, cuts, Cuts.GRID)
            placements[stop] = Kind.CANCEL
        end = key.tokens if stop is None else stop
        for at in sorted({*cuts, *placements, end}):
            if state.position < at <= end:
                was_exact = run.exact_tokens == state.position
                run.logits = self.model.prefill(state, key.token_ids[state.position : at])
                if was_exact:
                    run.exact_tokens = at
                if at in placements:
                    self.store(run, placements[at])

    def decode(self, run: Run, count: int) -> list[int]:
        """Greedy tokens, each taken into the state, as REPLY at the end."""
        tokens = []
        for _ in range(count):
            token = int(run.logits.argmax())
            run.logits = self.model.decode(run.state, token)
            tokens.append(token)
        run.key = run.key.extended(tokens)
        self.store(run, Kind.REPLY)
        return tokens

    def store(self, run: Run, kind: Kind) -> Stored | None:
        if self.cache is None:
            return None
        return self.cache.store(run.key, run.state, kind, run.state.position, run.exact_tokens)
