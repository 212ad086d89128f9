"""Where a prompt can resume: the walk, the choice of the cheapest point, and the reason when little is reused.

Runs under the index's lock; changes nothing but what `learn` feeds to the eviction rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .index import Index
from .key import PAGE_TOKENS, PromptKey
from .snapshot import EXACT, Entry, Ghost, Node
from .stats import MissReason, Outcome, Tier

_SIBLINGS = 64


@dataclass(slots=True)
class Found:
    """Result of a walk. matched: tokens that the index knows of the prompt; usable: snapshots on its path, with the
    number of KV pages each lacks in RAM; exact_skipped, ghost_position: deepest snapshot not usable for being
    decoded, and deepest evicted one (0: none)."""

    matched: int
    usable: list[tuple[Entry, int]]
    ghosts: list[Ghost]
    exact_skipped: int
    ghost_position: int


def find(index: Index, key: PromptKey, exact: bool) -> Found:
    """Walk down the tree as far as the prompt's pages are known. Cost: one dictionary access per page."""
    found = Found(0, [], [], 0, 0)
    root = index.roots.get(key.root)
    if root is None:
        return found
    node = root.node
    pages = key.limit // PAGE_TOKENS
    last = min(key.limit, key.tokens - 1)
    marked: list[tuple[Node, int]] = []
    ram_depth = marked_depth = 0
    raw, step, plain = key.raw, 4 * PAGE_TOKENS, not key.known_media
    depth = 0
    while True:
        if node.entries or node.ghosts:
            above = node
            while above.parent is not None and above.depth > marked_depth and not above.ram:
                above = above.parent
            ram_depth = above.depth if above.ram else ram_depth
            marked_depth = depth
            marked.append((node, depth - ram_depth))
        if depth == pages:
            break
        start = step * depth
        child = node.children.get(raw[start : start + step] if plain else key.page_key(depth))
        if child is None:
            break
        node = child
        depth += 1
    found.matched = min(node.position + _partial_match(node, key), last)
    for place, lacking in marked:
        for entry in (place.entries or {}).values():
            if entry.position <= last and _tail_matches(key, place, entry.position, entry.tail_key):
                if exact and entry.exact_pages != EXACT:
                    found.exact_skipped = max(found.exact_skipped, entry.position)
                else:
                    found.usable.append((entry, lacking))
        for ghost in (place.ghosts or {}).values():
            if ghost.position <= last and _tail_matches(key, place, ghost.position, ghost.tail_key):
                found.ghosts.append(ghost)
                found.ghost_position = max(found.ghost_position, ghost.position)
    return found


def _tail_matches(key: PromptKey, node: Node, position: int, tail_key: bytes) -> bool:
    return position == node.position or key.span_key(node.position, position) == tail_key


def _partial_match(node: Node, key: PromptKey) -> int:
    """Tokens after `node` that agree with some known continuation, less than a page; none inside pictures."""
    start = node.position
    end = min(start + PAGE_TOKENS, key.limit, *(s.start for s in key.known_media if s.start + s.count > start))
    if end <= start:
        return 0
    ours = key.token_ids[start:end]
    best = 0
    known = [child for child, _ in zip(node.children, range(_SIBLINGS), strict=False)]
    known += [tail for tail, _ in zip(node.entries or {}, range(_SIBLINGS), strict=False)]
    for other in known:
        theirs = np.frombuffer(other, dtype="<i4", count=min(len(other) // 4, ours.size))
        differ = np.flatnonzero(theirs != ours[: theirs.size])
        best = max(best, int(differ[0]) if differ.size else theirs.size)
    return best


def order(index: Index, key: PromptKey, found: Found) -> list[tuple[Entry, float]]:
    """Usable snapshots by expected seconds to the end of the prompt, those worse than no reuse left out."""
    ranked = []
    for entry, lacking in found.usable:
        if entry.ram is None and (index.disk is None or not index.disk.readable or entry.disk is None):
            continue
        seconds = _load_seconds(index, entry, lacking) + (key.tokens - entry.position) / index.prefill_rate
        if seconds < key.tokens / index.prefill_rate:
            ranked.append((entry, seconds))
    ranked.sort(key=lambda item: (item[1], -item[0].position))
    return ranked


def _load_seconds(index: Index, entry: Entry, lacking_pages: int) -> float:
    if entry.ram is not None:
        return index.geometry.recurrent_bytes / index.config.ram_bytes_per_s
    nbytes = index.geometry.recurrent_bytes + (lacking_pages + 1) * index.geometry.page_bytes
    return index.config.disk_latency_s + nbytes / index.disk_rate


def learn(index: Index, found: Found) -> None:
    """Feed the deepest match, live or evicted, to the eviction rule; matched snapshots are no longer tips."""
    candidates: list[Entry | Ghost] = [*(e for e, _ in found.usable), *found.ghosts]
    if not candidates:
        return
    deepest = max(candidates, key=lambda c: c.position)
    index.scorer.hit(deepest.kind, deepest.tip, index.requests - deepest.used)
    if isinstance(deepest, Ghost):
        index.stats.ghost_hits += 1
    for candidate in candidates:
        candidate.tip = False


def reason(
    index: Index, key: PromptKey, found: Found, chosen: Entry | None, failure: MissReason | None
) -> MissReason | None:
    """Why `chosen` (None: nothing) reuses less than is known; None if it comes within a page of it.

    failure: what went wrong with a deeper snapshot, or DISABLED.
    """
    position = chosen.position if chosen is not None else 0
    if failure is MissReason.DISABLED:
        return failure
    if found.matched - position < PAGE_TOKENS and position > 0:
        blocked = key.limit < key.tokens - 1 and found.matched >= key.limit - PAGE_TOKENS
        return MissReason.MEDIA_NODIGEST if blocked else None
    if failure is not None:
        return failure
    if found.exact_skipped > position:
        return MissReason.EXACT_ONLY
    if found.ghost_position > position:
        return MissReason.EVICTED
    deeper = [e for e, _ in found.usable if e.position > position]
    if any(e.ram is None and index.disk is not None and not index.disk.readable for e in deeper):
        return MissReason.DISK_ERROR
    if deeper:
        return MissReason.RECOMPUTE_CHEAPER
    if key.limit < min(key.tokens, PAGE_TOKENS):
        return MissReason.MEDIA_NODIGEST
    if found.matched < min(PAGE_TOKENS, key.tokens - 1):
        return _cold_reason(index, key)
    return MissReason.NO_SNAPSHOT


def _cold_reason(index: Index, key: PromptKey) -> MissReason:
    """Tell a change of model or salt from a first sight. Only within the same scope: anything else would let
    one tenant probe another's prompts."""
    if key.limit < PAGE_TOKENS:
        return MissReason.COLD
    first, tag = key.page_key(0), key.namespace.scope_tag()
    if index.disk is not None and (tag, first) in index.disk.foreign_first_pages:
        return MissReason.FP_MISMATCH
    for root in index.roots.values():
        if root.digest != key.root and root.scope_tag == tag and first in root.node.children:
            same_model = root.fingerprint == key.namespace.fingerprint
            return MissReason.SALT if same_model else MissReason.FP_MISMATCH
    return MissReason.COLD


def outcome(
    key: PromptKey,
    found: Found,
    entry: Entry | None,
    tier: Tier | None,
    load_s: float,
    reason: MissReason | None,
) -> Outcome:
    """Put together what the caller is told. tier None: wherever `entry` would come from now."""
    if entry is None:
        return Outcome(key.tokens, found.matched, 0, None, 0.0, None, reason)
    if tier is None:
        tier = Tier.RAM if entry.ram is not None else Tier.DISK
    matched = max(found.matched, entry.position)
    return Outcome(key.tokens, matched, entry.position, tier, load_s, entry.provenance, reason)
