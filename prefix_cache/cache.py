"""PrefixCache: find, lease, store, evict and persist snapshots of one model.

Owns the index, the arena and the disk tier, and the one lock over them. Large copies and file I/O run outside
the lock on blocks reserved inside it. Never raises for a full arena, a broken file or a failing disk: those are
misses with a reason.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from . import format as fmt
from .arena import Arena, UInt8Array, gather, scatter
from .config import CacheConfig
from .disk import PACK_PAGES, DiskTier, PageMissing, PageToWrite
from .eviction import LearnedHazard, Scorer
from .files import Files
from .flight import Flights
from .integrity import check
from .key import PAGE_TOKENS, CacheError, PromptKey, page_digest
from .snapshot import (
    EXACT,
    DiskCopy,
    DiskPage,
    Entry,
    Geometry,
    Ghost,
    Kind,
    Node,
    Pack,
    RamCopy,
    RamPage,
    Root,
    StateSource,
    page_chain,
    read_only,
)
from .stats import MissReason, Outcome, Stats, Tier

log = logging.getLogger("fermion.prefix_cache")

_SIBLINGS = 64
_RATE_WEIGHT = 0.2
_MIN_RATE_TOKENS = 16
_PRESSURE = 0.25
_FLUSH_S = 10.0


class Stored(StrEnum):
    """What `store` did."""

    STORED = "stored"
    EXISTS = "exists"
    NO_ROOM = "no_room"
    NOT_CACHEABLE = "not_cacheable"


class Lease:
    """A snapshot in use: its memory stays valid and unchanged until `release`.

    position: tokens that the state covers. exact_tokens: leading tokens computed by canonical prefill; equals
    position for provenance PREFILL. pages: read-only uint8 [page_bytes] views of the full KV pages, which may be
    used in place. tail: the partly filled page after them, to be copied before writing, or None.
    """

    def __init__(self, cache: PrefixCache, entry: Entry, copy: RamCopy) -> None:
        arena = cache._arena
        self._cache, self._copy, self._released = cache, copy, False
        self.position = entry.position
        self.rope_delta = entry.rope_delta
        self.provenance = entry.provenance
        self.kind = entry.kind
        exact = entry.exact_pages
        self.exact_tokens = entry.position if exact == EXACT else exact * PAGE_TOKENS
        self.pages = [read_only(arena.view(p.block)) for p in page_chain(copy.leaf)]
        self.tail = None if copy.tail is None else read_only(arena.view(copy.tail))
        self._recurrent = [arena.view(block) for block in copy.recurrent]

    def restore(self, targets: Iterable[npt.NDArray[np.generic]]) -> None:
        """Fill C-contiguous arrays with the recurrent payload, in the order `StateSource.recurrent` gave it.

        Raises CacheError if the targets' bytes differ from the geometry's recurrent_bytes.
        """
        assert not self._released, "lease used after release"
        gather(self._recurrent, targets, self._cache.geometry.recurrent_bytes)

    def release(self) -> None:
        """Let the memory be reused. May be called twice."""
        if not self._released:
            self._released = True
            self.pages, self.tail, self._recurrent = [], None, []
            with self._cache._lock:
                self._cache._unref_copy(self._copy)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One snapshot as `inspect` shows it. id: hex name for `pin`; root: hex digest of its namespace; ages in
    requests; ram_bytes, disk_bytes: what its removal from that tier would free."""

    id: str
    root: str
    position: int
    kind: str
    provenance: str
    in_ram: bool
    on_disk: bool
    ram_bytes: int
    disk_bytes: int
    hits: int
    age: int
    pinned: bool


@dataclass(slots=True)
class _Found:
    """Result of a walk: usable snapshots with the KV pages each lacks in RAM, and what explains a miss."""

    matched: int
    usable: list[tuple[Entry, int]]
    ghosts: list[Ghost]
    exact_skipped: int
    ghost_position: int


class PrefixCache:
    """The position-indexed snapshot cache. Thread-safe.

    config, geometry: sizes. fingerprint: 32 bytes of `key.fingerprint`; only its namespaces reach the disk.
    scorer: eviction rule; files, clock: the system's unless a test injects faults.
    Raises CacheError if the arena cannot hold one snapshot.
    """

    def __init__(
        self,
        config: CacheConfig,
        fingerprint: bytes,
        geometry: Geometry,
        *,
        scorer: Scorer | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.geometry, self.fingerprint = config, geometry, fingerprint
        self.stats = Stats()
        self.flights = Flights()
        self._arena = Arena(geometry.page_bytes, config.ram_bytes)
        if geometry.recurrent_blocks + 1 > self._arena.blocks:
            raise CacheError(
                f"ram_bytes is {config.ram_bytes}, one snapshot needs "
                f"{(geometry.recurrent_blocks + 1) * geometry.page_bytes}"
            )
        self._scorer = scorer or LearnedHazard()
        self._clock = clock
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._writing = threading.Lock()
        self._roots: dict[bytes, Root] = {}
        self._entries: dict[Entry, None] = {}
        self._ghosts: OrderedDict[Ghost, None] = OrderedDict()
        self._queue: dict[Entry, float] = {}
        self._loading: Counter[Entry] = Counter()
        self._requests = 0
        self._prefill_rate = config.prefill_tokens_per_s
        self._disk_rate = config.disk_bytes_per_s
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._disk: DiskTier | None = None
        if config.disk is not None:
            self._disk = DiskTier(config.disk, fingerprint, geometry, self.stats, files, clock)
            self._disk.open()
            self._attach(*self._disk.scan())

    # ---- life ----

    def start(self) -> None:
        """Start the thread that writes snapshots to disk behind the requests."""
        if self._disk is not None and self._disk.writable and self._thread is None:
            self._thread = threading.Thread(target=self._write_behind, name="prefix-cache-writer", daemon=True)
            self._thread.start()

    def close(self, flush_s: float = _FLUSH_S) -> None:
        """Write what is waiting, for at most about `flush_s` seconds, and release the directory."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._disk is not None:
            self.flush(flush_s)
            self._disk.close()

    # ---- lookup ----

    def peek(self, key: PromptKey, *, exact: bool = False) -> Outcome:
        """What `acquire` would most likely give, without loading, counting or learning."""
        with self._lock:
            found = self._find(key, exact)
            order = self._order(key, found)
            best = order[0][0] if order else None
            reason = self._reason(key, found, best, None)
        return self._outcome(key, found, best, None, 0.0, reason)

    def acquire(self, key: PromptKey, *, exact: bool = False, read: bool = True) -> tuple[Outcome, Lease | None]:
        """Lease the cheapest snapshot to resume `key` from, loading it from disk if need be.

        exact: only snapshots made by canonical prefill. read False: the request wants none. Never deeper than
        tokens - 1, since the last token must be forwarded to give logits.
        """
        with self._lock:
            self._requests += 1
            self.stats.lookups += 1
            self.stats.prompt_tokens += key.tokens
            found = self._find(key, exact)
            self._learn(found)
            order = self._order(key, found) if read else []
        failure: MissReason | None = None if read else MissReason.DISABLED
        started = time.perf_counter()
        for entry, _ in order:
            with self._lock:
                if entry not in self._entries:
                    continue
                tier = Tier.RAM if entry.ram is not None else Tier.DISK
            result = self._lease(entry, key)
            if isinstance(result, MissReason):
                failure = failure or result
                continue
            load_s = time.perf_counter() - started
            with self._lock:
                entry.hits += 1
                entry.used = self._requests
                if entry.disk is None and entry in self._entries:
                    self._enqueue(entry)
                reason = self._reason(key, found, entry, failure)
                outcome = self._outcome(key, found, entry, tier, load_s, reason)
                self.stats.hits += 1
                self.stats.hits_by_tier[tier] += 1
                self.stats.hits_by_kind[entry.kind.name.lower()] += 1
                self.stats.load_seconds += load_s
                self._count(outcome)
            return outcome, result
        with self._lock:
            outcome = self._outcome(key, found, None, None, 0.0, self._reason(key, found, None, failure))
            self._count(outcome)
        return outcome, None

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Report a measured prefill, so that resume points are weighed by this machine's rate."""
        if tokens >= _MIN_RATE_TOKENS and seconds > 0:
            with self._lock:
                self._prefill_rate += _RATE_WEIGHT * (tokens / seconds - self._prefill_rate)

    def _count(self, outcome: Outcome) -> None:
        self.stats.reused_tokens += outcome.position
        if outcome.miss_reason is not None:
            self.stats.misses[outcome.miss_reason] += 1
            self.stats.lost_tokens[outcome.miss_reason] += max(0, outcome.matched - outcome.position)

    def _find(self, key: PromptKey, exact: bool) -> _Found:
        found = _Found(0, [], [], 0, 0)
        root = self._roots.get(key.root)
        if root is None:
            return found
        node = root.node
        pages = key.limit // PAGE_TOKENS
        last = min(key.limit, key.tokens - 1)
        marked: list[tuple[Node, int]] = []
        ram_depth = 0
        raw, step, plain = key._raw, 4 * PAGE_TOKENS, not key._media
        index = 0
        while True:
            if node.ram:
                ram_depth = index
            if node.entries or node.ghosts:
                marked.append((node, index - ram_depth))
            if index == pages:
                break
            child = node.children.get(raw[step * index : step * index + step] if plain else key.page_key(index))
            if child is None:
                break
            node = child
            index += 1
        found.matched = min(index * PAGE_TOKENS + self._partial_match(node, key), last)
        for place, lacking in marked:
            for entry in (place.entries or {}).values():
                if entry.position <= last and self._tail_matches(key, place, entry.position, entry.tail_key):
                    if exact and entry.exact_pages != EXACT:
                        found.exact_skipped = max(found.exact_skipped, entry.position)
                    else:
                        found.usable.append((entry, lacking))
            for ghost in (place.ghosts or {}).values():
                if ghost.position <= last and self._tail_matches(key, place, ghost.position, ghost.tail_key):
                    found.ghosts.append(ghost)
                    found.ghost_position = max(found.ghost_position, ghost.position)
        return found

    @staticmethod
    def _tail_matches(key: PromptKey, node: Node, position: int, tail_key: bytes) -> bool:
        return position == node.position or key.span_key(node.position, position) == tail_key

    @staticmethod
    def _partial_match(node: Node, key: PromptKey) -> int:
        """Tokens after `node` that agree with some known continuation, less than a page; none inside pictures."""
        start = node.position
        end = min(start + PAGE_TOKENS, key.limit, *(s.start for s in key._media if s.start + s.count > start))
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

    def _order(self, key: PromptKey, found: _Found) -> list[tuple[Entry, float]]:
        """Usable snapshots by expected seconds to the end of the prompt, those worse than no reuse left out."""
        order = []
        for entry, lacking in found.usable:
            if entry.ram is None and (self._disk is None or not self._disk.readable or entry.disk is None):
                continue
            seconds = self._load_seconds(entry, lacking) + (key.tokens - entry.position) / self._prefill_rate
            if seconds < key.tokens / self._prefill_rate:
                order.append((entry, seconds))
        order.sort(key=lambda item: (item[1], -item[0].position))
        return order

    def _load_seconds(self, entry: Entry, lacking_pages: int) -> float:
        if entry.ram is not None:
            return self.geometry.recurrent_bytes / self.config.ram_bytes_per_s
        nbytes = self.geometry.recurrent_bytes + (lacking_pages + 1) * self.geometry.page_bytes
        return self.config.disk_latency_s + nbytes / self._disk_rate

    def _learn(self, found: _Found) -> None:
        """Feed the deepest match, live or evicted, to the eviction rule; matched snapshots are no longer tips."""
        candidates: list[Entry | Ghost] = [*(e for e, _ in found.usable), *found.ghosts]
        if not candidates:
            return
        deepest = max(candidates, key=lambda c: c.position)
        self._scorer.hit(deepest.kind, deepest.tip, self._requests - deepest.used)
        if isinstance(deepest, Ghost):
            self.stats.ghost_hits += 1
        for candidate in candidates:
            candidate.tip = False

    def _reason(
        self, key: PromptKey, found: _Found, chosen: Entry | None, failure: MissReason | None
    ) -> MissReason | None:
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
        if any(e.ram is None and self._disk is not None and not self._disk.readable for e in deeper):
            return MissReason.DISK_ERROR
        if deeper:
            return MissReason.RECOMPUTE_CHEAPER
        if key.limit < min(key.tokens, PAGE_TOKENS):
            return MissReason.MEDIA_NODIGEST
        if found.matched < min(PAGE_TOKENS, key.tokens - 1):
            return self._cold_reason(key)
        return MissReason.NO_SNAPSHOT

    def _cold_reason(self, key: PromptKey) -> MissReason:
        """Tell a change of model or salt from a first sight. Only within the same scope: anything else would let
        one tenant probe another's prompts."""
        if key.limit < PAGE_TOKENS:
            return MissReason.COLD
        first, tag = key.page_key(0), key.namespace.scope_tag()
        if self._disk is not None and (tag, first) in self._disk.foreign_first_pages:
            return MissReason.FP_MISMATCH
        for root in self._roots.values():
            if root.digest != key.root and root.scope_tag == tag and first in root.node.children:
                same_model = root.fingerprint == key.namespace.fingerprint
                return MissReason.SALT if same_model else MissReason.FP_MISMATCH
        return MissReason.COLD

    @staticmethod
    def _outcome(
        key: PromptKey,
        found: _Found,
        entry: Entry | None,
        tier: Tier | None,
        load_s: float,
        reason: MissReason | None,
    ) -> Outcome:
        if entry is None:
            return Outcome(key.tokens, found.matched, 0, None, 0.0, None, reason)
        if tier is None:
            tier = Tier.RAM if entry.ram is not None else Tier.DISK
        matched = max(found.matched, entry.position)
        return Outcome(key.tokens, matched, entry.position, tier, load_s, entry.provenance, reason)

    # ---- lease and load ----

    def _lease(self, entry: Entry, key: PromptKey) -> Lease | MissReason:
        with self._lock:
            if entry not in self._entries:
                return MissReason.EVICTED
            if entry.ram is not None:
                entry.ram.refs += 1
                return Lease(self, entry, entry.ram)
            disk = self._disk
            if disk is None or not disk.readable or entry.disk is None:
                return MissReason.DISK_ERROR
            self._loading[entry] += 1
            pages = _disk_chain(entry.disk.leaf)
            base, first = self._ram_base(entry, [p.node for p in pages])
            has_tail = entry.position % PAGE_TOKENS != 0
            blocks = self._reserve(len(pages) - first + self.geometry.recurrent_blocks + has_tail, base)
            name = entry.disk.name
        if blocks is None:
            with self._lock:
                self._end_loading(entry)
            return MissReason.NO_ROOM
        loaded = False
        reading: list[Pack] = []
        try:
            page_blocks = blocks[: len(pages) - first]
            rest = blocks[len(pages) - first :]
            started = time.perf_counter()
            nbytes = self._load_pages(disk, pages, first, page_blocks, key, reading)
            reading.clear()
            payload = self._payload_views(rest)
            nbytes += disk.read_snapshot(
                name, payload, key.path(len(pages)), key.span_key(len(pages) * PAGE_TOKENS, entry.position)
            )
            seconds = time.perf_counter() - started
            loaded = True
        except PageMissing:
            failure = MissReason.KV_GAP
        except fmt.FileRejected as error:
            failure = MissReason.CORRUPT
            log.warning("prefix cache: dropped a snapshot of %d tokens: %s", entry.position, error)
        except OSError:
            failure = MissReason.DISK_ERROR
        finally:
            with self._lock:
                self._end_loading(entry)
                if not loaded:
                    self._arena.release(blocks)
                    if base is not None:
                        self._unref_page(base)
        with self._lock:
            if not loaded:
                if failure is MissReason.CORRUPT:
                    self.stats.disk_corrupt += 1
                if failure is not MissReason.DISK_ERROR:
                    self._drop_broken(entry, reading[-1] if reading else None)
                return failure
            self.stats.loaded_bytes += nbytes
            if nbytes >= 1 << 20 and seconds > 0:
                self._disk_rate += _RATE_WEIGHT * (nbytes / seconds - self._disk_rate)
            leaf = self._publish_pages(base, [p.node for p in pages], entry.variant, first, page_blocks)
            copy = RamCopy(leaf, rest[: self.geometry.recurrent_blocks], rest[-1] if has_tail else None)
            if entry in self._entries and entry.ram is None:
                entry.ram = copy
                copy.refs += 1
            return Lease(self, entry, copy)

    def _load_pages(
        self,
        disk: DiskTier,
        pages: list[DiskPage],
        first: int,
        blocks: list[int],
        key: PromptKey,
        reading: list[Pack],
    ) -> int:
        """Read pages[first:] into blocks; `reading` ends with the pack at fault if this raises."""
        nbytes = 0
        index = first
        while index < len(pages):
            pack = pages[index].pack
            end = index
            while end < len(pages) and pages[end].pack is pack:
                end += 1
            before = index - pages[index].index
            reading.append(pack)
            nbytes += disk.read_pages(
                pack.name,
                [(pages[i].index, self._arena.view(blocks[i - first])) for i in range(index, end)],
                key.path(before),
                [key.page_key(i) for i in range(index, end)],
            )
            index = end
        return nbytes

    def _payload_views(self, blocks: Sequence[int]) -> list[UInt8Array]:
        """Views of a snapshot's own blocks, the last recurrent one cut to what the payload fills."""
        views = [self._arena.view(block) for block in blocks]
        last = self.geometry.recurrent_blocks - 1
        views[last] = views[last][: self.geometry.recurrent_bytes - last * self.geometry.page_bytes]
        return views

    def _end_loading(self, entry: Entry) -> None:
        self._loading[entry] -= 1
        if self._loading[entry] <= 0:
            del self._loading[entry]

    # ---- store ----

    def store(self, key: PromptKey, source: StateSource, kind: Kind, position: int, exact_tokens: int) -> Stored:
        """Take a snapshot of `source`, which is the state after the first `position` tokens of `key`.

        exact_tokens: leading tokens that canonical prefill computed (`position` or more: provenance PREFILL).
        Room is made first and reserved, then bytes are copied; KV pages already held are not copied again.
        Raises CacheError if position is outside [1, tokens] or a layer of the source is at another position.
        """
        if not 0 < position <= key.tokens:
            raise CacheError(f"snapshot position is {position}, expected 1..{key.tokens}")
        for layer, at in enumerate(source.layer_positions()):
            if at != position:
                raise CacheError(f"stateful layer {layer} is at position {at}, the snapshot at {position}")
        if position > key.limit:
            return Stored.NOT_CACHEABLE
        exact_pages = EXACT if exact_tokens >= position else max(0, exact_tokens) // PAGE_TOKENS
        count, tail = divmod(position, PAGE_TOKENS)
        tail_key = key.span_key(count * PAGE_TOKENS, position)
        with self._lock:
            nodes = self._known_nodes(key, count)
            if len(nodes) == count and self._keeps_existing(key, nodes, tail_key, exact_pages):
                self.stats.store_exists += 1
                return Stored.EXISTS
            probe = Entry(_no_node(), tail_key, position, kind, exact_pages, 0, 0, 0.0)
            base, first = self._ram_base(probe, nodes)
            blocks = self._reserve(count - first + self.geometry.recurrent_blocks + (tail > 0), base)
            if blocks is None:
                self.stats.store_no_room += 1
                return Stored.NO_ROOM
        page_blocks, rest = blocks[: count - first], blocks[count - first :]
        copied = False
        try:
            for index, block in enumerate(page_blocks, first):
                scatter([source.page(index)], [self._arena.view(block)], self.geometry.page_bytes)
            recurrent = rest[: self.geometry.recurrent_blocks]
            views = self._payload_views(recurrent)
            scatter(source.recurrent(), views, self.geometry.recurrent_bytes)
            if tail:
                scatter([source.page(count)], [self._arena.view(rest[-1])], self.geometry.page_bytes)
            rope_delta = int(source.rope_delta)
            copied = True
        finally:
            if not copied:
                with self._lock:
                    self._arena.release(blocks)
                    if base is not None:
                        self._unref_page(base)
        with self._wake:
            root = self._root(key.root, key.namespace.fingerprint, key.namespace.scope_tag())
            nodes = [root.node]
            for index in range(count):
                nodes.append(self._child(nodes[-1], key.page_key(index)))
            node = nodes[-1]
            entry = Entry(node, tail_key, position, kind, exact_pages, rope_delta, self._requests, time.time())
            leaf = self._publish_pages(base, nodes[1:], entry.variant, first, page_blocks)
            entry.ram = RamCopy(leaf, recurrent, rest[-1] if tail else None)
            old = (node.entries or {}).get(tail_key)
            if old is not None:
                entry.pinned, entry.hits = old.pinned, old.hits
                self._remove(old, remember=False, prune=False)
            if node.ghosts is not None and tail_key in node.ghosts:
                self._forget(node.ghosts[tail_key], prune=False)
            self._add(entry)
            self._scorer.born(kind)
            self.stats.stored[kind.name.lower()] += 1
            self._enqueue(entry)
        return Stored.STORED

    def _known_nodes(self, key: PromptKey, count: int) -> list[Node]:
        """Existing nodes of the first `count` pages, as far as they go."""
        nodes: list[Node] = []
        root = self._roots.get(key.root)
        node = root.node if root is not None else None
        while node is not None and len(nodes) < count:
            node = node.children.get(key.page_key(len(nodes)))
            if node is not None:
                nodes.append(node)
        return nodes

    def _keeps_existing(self, key: PromptKey, nodes: list[Node], tail_key: bytes, exact_pages: int) -> bool:
        root = self._roots.get(key.root)
        if root is None:
            return False
        node = nodes[-1] if nodes else root.node
        entry = (node.entries or {}).get(tail_key)
        if entry is None or (entry.exact_pages != EXACT and exact_pages == EXACT):
            return False
        entry.used = self._requests
        if entry.disk is None:
            self._enqueue(entry)
        return True

    def _ram_base(self, entry: Entry, nodes: Sequence[Node]) -> tuple[RamPage | None, int]:
        """The deepest page of the entry's chain held in RAM, with a reference taken, and the count up to it."""
        base, first = None, 0
        for node in nodes:
            page = (node.ram or {}).get(entry.variant(first))
            if page is None:
                break
            base, first = page, first + 1
        if base is not None:
            base.refs += 1
        return base, first

    def _reserve(self, count: int, base: RamPage | None) -> list[int] | None:
        """Blocks for a copy, evicting for them; on failure the reference on `base` is dropped."""
        blocks = self._arena.reserve(count) if self._make_room(count) else None
        if blocks is None and base is not None:
            self._unref_page(base)
        return blocks

    def _publish_pages(
        self,
        base: RamPage | None,
        nodes: Sequence[Node],
        variant: Callable[[int], int],
        first: int,
        blocks: Sequence[int],
    ) -> RamPage | None:
        """Make copied pages part of the index; returns the leaf with one reference for the caller's snapshot.

        The reference that `_ram_base` took on `base` is consumed.
        """
        leaf = base
        for index, block in enumerate(blocks, first):
            node, which = nodes[index], variant(index)
            page = (node.ram or {}).get(which)
            if page is not None:  # another thread published the same page meanwhile
                self._arena.release([block])
                page.refs += 1
                if leaf is not None:
                    self._unref_page(leaf)
            else:
                page = RamPage(node, which, leaf, block)
                page.refs = 1
                if node.ram is None:
                    node.ram = {}
                node.ram[which] = page
            leaf = page
        return leaf

    def _root(self, digest: bytes, fingerprint: bytes, scope_tag: bytes) -> Root:
        root = self._roots.get(digest)
        if root is None:
            root = self._roots[digest] = Root(digest, fingerprint, scope_tag)
        return root

    @staticmethod
    def _child(node: Node, key: bytes) -> Node:
        child = node.children.get(key)
        if child is None:
            child = Node(node, key, node.depth + 1, page_digest(node.digest, key), node.root)
            node.children[key] = child
        return child

    def _add(self, entry: Entry) -> None:
        if entry.node.entries is None:
            entry.node.entries = {}
        entry.node.entries[entry.tail_key] = entry
        self._entries[entry] = None

    # ---- references ----

    def _unref_copy(self, copy: RamCopy) -> None:
        copy.refs -= 1
        if copy.refs == 0:
            self._arena.release(copy.recurrent)
            if copy.tail is not None:
                self._arena.release([copy.tail])
            if copy.leaf is not None:
                self._unref_page(copy.leaf)

    def _unref_page(self, page: RamPage | None) -> None:
        while page is not None:
            page.refs -= 1
            if page.refs:
                return
            self._arena.release([page.block])
            assert page.node.ram is not None
            del page.node.ram[page.variant]
            self._prune(page.node)
            page = page.parent

    def _unref_disk_page(self, page: DiskPage | None) -> None:
        while page is not None:
            page.refs -= 1
            if page.refs:
                return
            assert page.node.disk is not None
            assert self._disk is not None
            del page.node.disk[page.variant]
            page.pack.live -= 1
            if page.pack.live == 0:
                self._disk.discard(page.pack.name, page.pack.nbytes)
            self._prune(page.node)
            page = page.parent

    def _prune(self, node: Node) -> None:
        """Forget nodes that nothing refers to, upwards."""
        while not (node.children or node.entries or node.ghosts or node.ram or node.disk):
            parent = node.parent
            if parent is None:
                self._roots.pop(node.digest, None)
                return
            if parent.children.get(node.key) is node:
                del parent.children[node.key]
            node = parent

    def _remove(self, entry: Entry, *, remember: bool, prune: bool = True) -> None:
        """Take a snapshot out of the index and both tiers; leases on it stay valid."""
        node = entry.node
        assert node.entries is not None
        del node.entries[entry.tail_key]
        del self._entries[entry]
        self._queue.pop(entry, None)
        if remember and self.config.ghosts > 0:
            ghost = Ghost(entry)
            if node.ghosts is None:
                node.ghosts = {}
            node.ghosts[entry.tail_key] = ghost
            self._ghosts[ghost] = None
            while len(self._ghosts) > self.config.ghosts:
                self._forget(next(iter(self._ghosts)))
        if entry.ram is not None:
            copy, entry.ram = entry.ram, None
            self._unref_copy(copy)
        if entry.disk is not None:
            self._release_disk(entry)
        if prune:
            self._prune(node)

    def _forget(self, ghost: Ghost, *, prune: bool = True) -> None:
        del self._ghosts[ghost]
        assert ghost.node.ghosts is not None
        del ghost.node.ghosts[ghost.tail_key]
        if prune:
            self._prune(ghost.node)

    def _release_disk(self, entry: Entry) -> None:
        copy, entry.disk = entry.disk, None
        assert copy is not None
        assert self._disk is not None
        self._disk.discard(copy.name, copy.nbytes)
        self._unref_disk_page(copy.leaf)

    def _drop_disk(self, entry: Entry, *, evicted: bool) -> None:
        """Give up the disk copy; a snapshot without any copy leaves the index."""
        if entry.disk is None:
            return
        if evicted:
            self.stats.evicted_disk[entry.kind.name.lower()] += 1
        if entry.ram is None:
            self._remove(entry, remember=evicted)
        else:
            self._release_disk(entry)

    def _drop_broken(self, entry: Entry, pack: Pack | None) -> None:
        """Give up the disk copies that a broken file strands: one snapshot's, or all that use a pack."""
        stranded = [entry] if pack is None else [e for e in self._entries if _uses_pack(e, pack)]
        for each in stranded:
            if each in self._entries:
                self._drop_disk(each, evicted=False)

    # ---- eviction ----

    def _make_room(self, count: int) -> bool:
        """Evict until `count` blocks are free; False, with nothing evicted, if leases and pins forbid it."""
        if count <= self._arena.free:
            return True
        victims = [e for e in self._entries if self._may_leave_ram(e)]
        if count > self._arena.blocks - self._held_blocks(set(victims)):
            return False
        while count > self._arena.free:
            victim = min(victims, key=self._ram_worth)
            victims.remove(victim)
            self.stats.evicted_ram[victim.kind.name.lower()] += 1
            if victim.disk is None:
                self._remove(victim, remember=True)
            else:
                copy, victim.ram = victim.ram, None
                assert copy is not None
                self._unref_copy(copy)
        return True

    @staticmethod
    def _may_leave_ram(entry: Entry) -> bool:
        return entry.ram is not None and entry.ram.refs == 1 and (not entry.pinned or entry.disk is not None)

    def _held_blocks(self, victims: set[Entry]) -> int:
        """Blocks that would stay if all victims left: everything reserved that no victim alone holds."""
        leaving: dict[RamPage, int] = {}
        freed = 0
        stack: list[RamPage] = []
        for entry in victims:
            copy = entry.ram
            assert copy is not None
            freed += len(copy.recurrent) + (copy.tail is not None)
            if copy.leaf is not None:
                stack.append(copy.leaf)
        while stack:
            page = stack.pop()
            leaving[page] = leaving.get(page, 0) + 1
            if leaving[page] == page.refs:
                freed += 1
                if page.parent is not None:
                    stack.append(page.parent)
        return self._arena.blocks - self._arena.free - freed

    def _ram_worth(self, entry: Entry) -> float:
        copy = entry.ram
        assert copy is not None
        freed = len(copy.recurrent) + (copy.tail is not None)
        page = copy.leaf
        lacking = 0
        while page is not None and page.refs == 1:
            lacking += 1
            page = page.parent
        saved = float(entry.position - self._parent_position(entry))
        if entry.disk is not None and self._disk is not None and self._disk.readable:
            nbytes = self.geometry.recurrent_bytes + lacking * self.geometry.page_bytes
            reload_s = self.config.disk_latency_s + nbytes / self._disk_rate
            saved = min(saved, reload_s * self._prefill_rate)
        return self._score(entry, saved, (freed + lacking) * self.geometry.page_bytes)

    def _disk_worth(self, entry: Entry) -> float:
        assert entry.disk is not None
        freed = entry.disk.nbytes
        page = entry.disk.leaf
        while page is not None and page.refs == 1:
            freed += self.geometry.page_bytes
            page = page.parent
        return self._score(entry, float(entry.position - self._parent_position(entry)), freed)

    def _score(self, entry: Entry, saved: float, freed: int) -> float:
        age = self._requests - entry.used
        return self._scorer.score(entry.kind, entry.tip, age, entry.hits, saved, freed)

    @staticmethod
    def _parent_position(entry: Entry) -> int:
        """Position of the nearest shallower snapshot of the same prefix: what a loss of `entry` falls back to."""
        best = 0
        for other in (entry.node.entries or {}).values():
            if other.position < entry.position and entry.tail_key.startswith(other.tail_key):
                best = max(best, other.position)
        below, node = entry.node.key, entry.node.parent
        while node is not None and best == 0:
            for other in (node.entries or {}).values():
                if below.startswith(other.tail_key):
                    best = max(best, other.position)
            below, node = node.key, node.parent
        return best

    # ---- disk ----

    def _enqueue(self, entry: Entry) -> None:
        disk = self._disk
        if disk is not None and disk.writable and entry.node.root.fingerprint == self.fingerprint:
            self._queue.setdefault(entry, self._clock() + disk.config.write_delay_s)
            self._wake.notify_all()

    def _next_write(self, *, now: bool) -> Entry | None:
        """The waiting snapshot that is due and matters most. now: all are due."""
        hurry = now or self._arena.free < self._arena.blocks * _PRESSURE
        at = self._clock()
        due = [(e.kind, since, e.position, e) for e, since in self._queue.items() if hurry or since <= at]
        return min(due, key=lambda item: item[:3])[3] if due else None

    def _write_behind(self) -> None:
        while True:
            with self._wake:
                entry = None
                while not self._stopping:
                    entry = self._next_write(now=False)
                    if entry is not None:
                        break
                    next_due = min(self._queue.values(), default=None)
                    self._wake.wait(None if next_due is None else max(0.01, next_due - self._clock()))
                if entry is None:
                    return
            self._persist(entry)

    def flush(self, limit_s: float = float("inf")) -> None:
        """Write all waiting snapshots now, for at most about `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with self._lock:
                entry = self._next_write(now=True)
            if entry is None:
                return
            self._persist(entry)

    def _persist(self, entry: Entry) -> None:
        """Write one snapshot and the KV pages it needs that are not on disk yet."""
        with self._writing:
            with self._lock:
                self._queue.pop(entry, None)
                disk, copy = self._disk, entry.ram
                if disk is None or copy is None or entry.disk is not None or entry not in self._entries:
                    return
                chain = page_chain(copy.leaf)
                base, first = self._disk_base(chain)
                copy.refs += 1
                nbytes = self._file_bytes_at_most(entry, chain, first)
                allowed = self._make_disk_room(nbytes) and disk.admit(nbytes)
            written: list[tuple[str, int, int]] = []
            done: tuple[str, int] | None = None
            try:
                if allowed:
                    done = self._write_files(disk, entry, copy, chain, base, first, written)
            except OSError:
                done = None
            with self._lock:
                if done is None or entry not in self._entries:
                    for name, size, _ in written:
                        disk.discard(name, size)
                    if done is not None:
                        disk.discard(*done)
                    self._unref_disk_page(base)
                else:
                    leaf = base
                    for name, size, count in written:
                        pack = Pack(name, size)
                        for index, page in enumerate(chain[first : first + count]):
                            leaf = self._add_disk_page(page.node, page.variant, leaf, pack, index)
                        first += count
                    entry.disk = DiskCopy(leaf, *done)
                self._unref_copy(copy)

    def _file_bytes_at_most(self, entry: Entry, chain: Sequence[RamPage], first: int) -> int:
        """Bytes that writing a snapshot and chain[first:] can take, headers included."""
        keys = [len(page.node.key) for page in chain]
        payload = self.geometry.recurrent_bytes + self.geometry.page_bytes
        total = fmt.snapshot_bytes_at_most(
            payload, len(entry.tail_key), self.geometry.recurrent_blocks + 1, sum(keys)
        )  # fmt: skip
        for start in range(first, len(chain), PACK_PAGES):
            pack = keys[start : start + PACK_PAGES]
            total += fmt.pack_bytes_at_most(self.geometry.page_bytes, pack, sum(keys[:start]))
        return total

    def _disk_base(self, chain: Sequence[RamPage]) -> tuple[DiskPage | None, int]:
        base, first = None, 0
        for page in chain:
            stored = (page.node.disk or {}).get(page.variant)
            if stored is None:
                break
            base, first = stored, first + 1
        if base is not None:
            base.refs += 1
        return base, first

    @staticmethod
    def _add_disk_page(node: Node, variant: int, parent: DiskPage | None, pack: Pack, index: int) -> DiskPage:
        """One page with one reference, which the next page or the snapshot consumes."""
        page = DiskPage(node, variant, parent, pack, index)
        page.refs = 1
        pack.live += 1
        if node.disk is None:
            node.disk = {}
        node.disk[variant] = page
        return page

    def _write_files(
        self,
        disk: DiskTier,
        entry: Entry,
        copy: RamCopy,
        chain: Sequence[RamPage],
        base: DiskPage | None,
        first: int,
        written: list[tuple[str, int, int]],
    ) -> tuple[str, int]:
        root = entry.node.root
        keys = [page.node.key for page in chain]
        parent = (root.digest, EXACT) if base is None else (base.node.digest, base.variant)
        for start in range(first, len(chain), PACK_PAGES):
            pages = chain[start : start + PACK_PAGES]
            name, size = disk.write_pack(
                root.digest,
                root.scope_tag,
                parent,
                start,
                [PageToWrite(p.node.digest, p.variant, p.node.key, self._arena.view(p.block)) for p in pages],
                b"".join(keys[:start]),
            )
            written.append((name, size, len(pages)))
            parent = (pages[-1].node.digest, pages[-1].variant)
        blocks = copy.recurrent if copy.tail is None else [*copy.recurrent, copy.tail]
        payload = self._payload_views(blocks)
        path = b"".join(keys)
        header = fmt.SnapshotHeader(
            self.fingerprint, root.digest, root.scope_tag, parent[0], parent[1], len(chain), entry.position,
            entry.rope_delta, entry.exact_pages, entry.kind, copy.tail is not None, entry.created,
            self.geometry.recurrent_bytes, self.geometry.page_bytes, entry.tail_key, disk.checksums(payload),
            len(path), fmt.path_digest(path),
        )  # fmt: skip
        return disk.write_snapshot(header, path, payload)

    def _make_disk_room(self, nbytes: int) -> bool:
        disk = self._disk
        assert disk is not None
        if nbytes > disk.config.capacity_bytes - disk.foreign_bytes:
            return False
        while disk.over_bytes + nbytes > 0:
            victims = [e for e in self._entries if e.disk is not None and not e.pinned and e not in self._loading]
            if not victims or not disk.writable:
                return False
            self._drop_disk(min(victims, key=self._disk_worth), evicted=True)
        return True

    def _attach(
        self,
        packs: list[tuple[str, int, fmt.PackHeader]],
        snapshots: list[tuple[str, int, fmt.SnapshotHeader]],
    ) -> None:
        """Rebuild the index from headers; files whose prefix is incomplete are deleted."""
        disk = self._disk
        assert disk is not None
        known: dict[tuple[bytes, bytes, int], DiskPage] = {}
        for name, size, pack_header in sorted(packs, key=lambda item: item[2].first_depth):
            root = self._root(pack_header.root, pack_header.fingerprint, pack_header.scope_tag)
            parent = known.get((pack_header.root, pack_header.parent_digest, pack_header.parent_variant))
            node = parent.node if parent is not None else root.node
            if node.depth != pack_header.first_depth:
                self._discard_orphan(name, size)
                self._prune(node)
                continue
            pack = Pack(name, size)
            for index, (digest, variant, page_key, _) in enumerate(pack_header.pages):
                child = self._child(node, page_key)
                if child.digest != digest or (child.disk is not None and variant in child.disk):
                    self._prune(child)
                    break
                page = self._add_disk_page(child, variant, parent, pack, index)
                page.refs = 0
                if parent is not None:
                    parent.refs += 1
                known[pack_header.root, digest, variant] = page
                parent, node = page, child
            if pack.live == 0:
                self._discard_orphan(name, size)
        for name, size, header in snapshots:
            leaf = known.get((header.root, header.leaf_digest, header.leaf_variant)) if header.depth else None
            if (leaf is None) != (header.depth == 0) or header.position // PAGE_TOKENS != header.depth:
                self._discard_orphan(name, size)
                continue
            root = leaf.node.root if leaf else self._root(header.root, header.fingerprint, header.scope_tag)
            node = leaf.node if leaf is not None else root.node
            if node.depth != header.depth or header.tail_key in (node.entries or {}):
                self._discard_orphan(name, size)
                continue
            entry = Entry(
                node, header.tail_key, header.position, header.kind, header.exact_pages, header.rope_delta, 0,
                header.created,
            )  # fmt: skip
            entry.disk = DiskCopy(leaf, name, size)
            if leaf is not None:
                leaf.refs += 1
            self._add(entry)
        for page in list(known.values()):
            if page.refs == 0 and page.node.disk is not None and page.node.disk.get(page.variant) is page:
                page.refs = 1
                self.stats.disk_orphans_removed += 1
                self._unref_disk_page(page)

    def _discard_orphan(self, name: str, size: int) -> None:
        assert self._disk is not None
        self.stats.disk_orphans_removed += 1
        self._disk.discard(name, size)

    # ---- administration ----

    def inspect(
        self, key: PromptKey | None = None, *, scope_tag: bytes | None = None, limit: int = 1000
    ) -> list[SnapshotInfo]:
        """Snapshots, deepest first: those on the path of `key`, or all of one scope, or all."""
        with self._lock:
            entries = [e for e, _ in self._find(key, False).usable] if key is not None else list(self._entries)
            if scope_tag is not None:
                entries = [e for e in entries if e.node.root.scope_tag == scope_tag]
            entries.sort(key=lambda e: -e.position)
            return [self._info(entry) for entry in entries[:limit]]

    def _info(self, entry: Entry) -> SnapshotInfo:
        ram = 0
        if entry.ram is not None:
            blocks = len(entry.ram.recurrent) + (entry.ram.tail is not None)
            page = entry.ram.leaf
            while page is not None and page.refs == 1:
                blocks, page = blocks + 1, page.parent
            ram = blocks * self.geometry.page_bytes
        return SnapshotInfo(
            _entry_id(entry), entry.node.root.digest.hex(), entry.position, entry.kind.name.lower(),
            entry.provenance.name.lower(), entry.ram is not None, entry.disk is not None, ram,
            entry.disk.nbytes if entry.disk is not None else 0, entry.hits, self._requests - entry.used, entry.pinned,
        )  # fmt: skip

    def pin(self, snapshot_id: str, pinned: bool = True, *, scope_tag: bytes | None = None) -> bool:
        """Keep (or stop keeping) a snapshot in at least one tier. False: no such snapshot (in that scope).

        Raises CacheError if pinned snapshots would fill more than their share of the arena.
        """
        with self._lock:
            for entry in self._entries:
                if _entry_id(entry) == snapshot_id and scope_tag in (None, entry.node.root.scope_tag):
                    if pinned and not entry.pinned:
                        self._check_pin(entry)
                    entry.pinned = pinned
                    return True
        return False

    def _check_pin(self, entry: Entry) -> None:
        allowed = int(self.config.pin_share * self._arena.blocks)
        pages = {n for e in self._entries if e.pinned or e is entry for n in _nodes_to(e.node)}
        count = sum(e.pinned or e is entry for e in self._entries)
        wanted = len(pages) + count * (self.geometry.recurrent_blocks + 1)
        if wanted > allowed:
            raise CacheError(
                f"pinned snapshots would need {wanted * self.geometry.page_bytes} bytes, "
                f"allowed are {allowed * self.geometry.page_bytes}"
            )

    def clear(self, *, scope_tag: bytes | None = None) -> int:
        """Delete all snapshots (of one scope) and what is remembered of evicted ones, pins included, in RAM and on
        disk. Leases stay valid. Returns the number of snapshots deleted."""
        with self._lock:
            entries = [e for e in self._entries if scope_tag in (None, e.node.root.scope_tag)]
            for entry in entries:
                self._remove(entry, remember=False)
            for ghost in [g for g in self._ghosts if scope_tag in (None, g.node.root.scope_tag)]:
                self._forget(ghost)
            return len(entries)

    def gauges(self) -> dict[str, int | float | str | None]:
        """Present sizes for /metrics: bytes and counts by tier, measured rates, why the disk is off (or None)."""
        with self._lock:
            disk = self._disk
            return {
                "snapshots": len(self._entries),
                "snapshots_ram": sum(e.ram is not None for e in self._entries),
                "snapshots_disk": sum(e.disk is not None for e in self._entries),
                "pinned": sum(e.pinned for e in self._entries),
                "ghosts": len(self._ghosts),
                "ram_bytes": self._arena.used_bytes,
                "ram_bytes_max": self._arena.high_water * self.geometry.page_bytes,
                "ram_capacity_bytes": self._arena.blocks * self.geometry.page_bytes,
                "disk_bytes": disk.used_bytes if disk is not None else 0,
                "disk_capacity_bytes": disk.config.capacity_bytes if disk is not None else 0,
                "disk_writable": int(disk is not None and disk.writable),
                "disk_readable": int(disk is not None and disk.readable),
                "disk_failure": disk.failure if disk is not None else None,
                "writes_waiting": len(self._queue),
                "prefill_tokens_per_s": self._prefill_rate,
                "disk_bytes_per_s": self._disk_rate,
                "flights": self.flights.active,
            }

    def check_integrity(self) -> list[str]:
        """Recount everything from the index; returns what is wrong (nothing, unless there is a bug or someone
        changed the folder). Call it while no other thread uses the cache."""
        with self._lock:
            return check(self)


def _no_node() -> Node:
    return Root(b"", b"", b"").node


def _nodes_to(node: Node) -> Iterable[Node]:
    place: Node | None = node
    while place is not None and place.depth > 0:
        yield place
        place = place.parent


def _disk_chain(leaf: DiskPage | None) -> list[DiskPage]:
    chain = []
    while leaf is not None:
        chain.append(leaf)
        leaf = leaf.parent
    chain.reverse()
    return chain


def _uses_pack(entry: Entry, pack: Pack) -> bool:
    page = entry.disk.leaf if entry.disk is not None else None
    while page is not None and page.pack is not pack:
        page = page.parent
    return page is not None


def _entry_id(entry: Entry) -> str:
    return hashlib.blake2b(entry.node.digest + entry.tail_key, digest_size=16).hexdigest()
