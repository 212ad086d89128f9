"""Single flight: of several requests with a common prefix, one computes it and the others wait for its snapshot.

Owns no state of the cache; a flight only says who is prefilling what and how far it has published.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from .key import PromptKey


class Flight:
    """One request's prefill. Leave it with `end`, whatever happened (also on cancel and error)."""

    def __init__(self, owner: Flights, key: PromptKey, planned: Sequence[int]) -> None:
        self._owner = owner
        self.key = key
        self.planned = tuple(sorted(planned))
        self.reached = 0
        self.ended = False

    def publish(self, position: int) -> None:
        """The snapshot at `position` can be found by lookups from now on."""
        with self._owner._changed:
            self.reached = max(self.reached, position)
            self._owner._changed.notify_all()

    def end(self) -> None:
        """No more snapshots will come from this flight. May be called twice."""
        with self._owner._changed:
            self.ended = True
            self._owner._active = [f for f in self._owner._active if f is not self]
            self._owner._changed.notify_all()

    def wait_for_leader(self, have: int, timeout_s: float) -> bool:
        """Wait for an earlier flight that plans a snapshot of this prompt deeper than `have` tokens.

        True: something changed (published, ended): look up again. False: nobody to wait for, or time is up.
        Flights wait only for flights begun before them, so there is no cycle.
        """
        leader, target = self._owner._leader(self, have)
        if leader is None:
            return False
        with self._owner._changed:
            return self._owner._changed.wait_for(lambda: leader.ended or leader.reached >= target, timeout_s)


class Flights:
    """All prefills in progress. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active: list[Flight] = []

    def begin(self, key: PromptKey, planned: Sequence[int]) -> Flight:
        """Announce a prefill of `key` that will take snapshots at the `planned` positions."""
        flight = Flight(self, key, planned)
        with self._changed:
            self._active.append(flight)
        return flight

    @property
    def active(self) -> int:
        """Flights in progress."""
        with self._changed:
            return len(self._active)

    def _leader(self, follower: Flight, have: int) -> tuple[Flight | None, int]:
        with self._changed:
            ahead = []
            for flight in self._active:
                if flight is follower:
                    break
                ahead.append(flight)
        best, target = None, have
        for flight in ahead:
            shared = min(common_tokens(flight.key, follower.key), follower.key.tokens - 1)
            deepest = max((p for p in flight.planned if flight.reached < p <= shared), default=0)
            if deepest > target:
                best, target = flight, deepest
        return best, target


def common_tokens(a: PromptKey, b: PromptKey) -> int:
    """Length of the common cacheable prefix; 0 across namespaces. Pictures with other digests end it."""
    if a.root != b.root:
        return 0
    n = min(a.limit, b.limit)
    differ = np.flatnonzero(a.token_ids[:n] != b.token_ids[:n])
    if differ.size:
        n = int(differ[0])
    for left, right in zip(a.media, b.media, strict=False):
        if min(left.start, right.start) >= n:
            break
        if left != right:
            return min(left.start, right.start)
    longer = a.media if len(a.media) > len(b.media) else b.media
    for span in longer[min(len(a.media), len(b.media)) :]:
        if span.start < n:
            return span.start
    return n
