"""PrefixCache: find, lease and store snapshots of one model. The package's front.

Large copies and the reading and writing of files run outside the index's lock, on blocks reserved inside it; files
are deleted inside it. Never raises for a full arena, a broken file or a failing disk: those are misses with a reason.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from . import loader, lookup
from .arena import Pieces, UInt8Array, as_bytes, copy_pieces, pieces
from .config import CacheConfig
from .disk import DiskTier
from .eviction import LearnedHazard, Scorer
from .files import Files
from .index import Index
from .integrity import check
from .key import PAGE_TOKENS, CacheError, PromptKey
from .persist import Writer, attach
from .prepare import Preparer
from .snapshot import EXACT, Entry, Geometry, Kind, Node, RamCopy, Root, StateSource, page_chain, read_only
from .stats import MissReason, Outcome, Stats, Tier

_RATE_WEIGHT = 0.2
_MIN_RATE_TOKENS = 16
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
        arena = cache._index.arena
        self._cache, self._entry, self._copy, self._released = cache, entry, copy, False
        self.position = entry.position
        self.rope_delta = entry.rope_delta
        self.provenance = entry.provenance
        self.kind = entry.kind
        exact = entry.exact_pages
        self.exact_tokens = entry.position if exact == EXACT else exact * PAGE_TOKENS
        self.pages = [read_only(arena.view(p.block)) for p in page_chain(copy.leaf)]
        self.tail = None if copy.tail is None else read_only(arena.view(copy.tail))
        self._recurrent = arena.views(copy.recurrent, cache.geometry.recurrent_bytes)

    def restore(self, targets: Iterable[npt.NDArray[np.generic]]) -> None:
        """Fill C-contiguous arrays with the recurrent payload, in the order `StateSource.recurrent` gave it.

        Raises CacheError if the targets' bytes differ from the geometry's recurrent_bytes.
        """
        assert not self._released, "lease used after release"
        nbytes = self._cache.geometry.recurrent_bytes
        self._cache._copy(pieces(targets, self._recurrent, nbytes))

    def inherit_shadow(self) -> int:
        """Tokens computed ahead of demand for this snapshot that nobody has asked for yet. They are the caller's from
        now on: to be handed to `store` with the snapshot that was built upon this one."""
        with self._cache._index.lock:
            tokens, self._entry.shadow_tokens = self._entry.shadow_tokens, 0
        return tokens

    def release(self) -> None:
        """Let the memory be reused. May be called twice."""
        if not self._released:
            self._released = True
            self.pages, self.tail, self._recurrent = [], None, []
            with self._cache._index.lock:
                self._cache._index.unref_copy(self._copy)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Checkpoint:
    """How far a prefill has come, in the index like any snapshot but only for as long as the prefill runs: `keep` it
    if the prefill is given up, `drop` it otherwise. Made by `PrefixCache.checkpoint`."""

    def __init__(self, cache: PrefixCache, entry: Entry) -> None:
        self._cache, self._entry = cache, entry

    @property
    def position(self) -> int:
        """Tokens that it covers."""
        return self._entry.position

    def keep(self, shadow_tokens: int = 0) -> bool:
        """Make it an ordinary snapshot. shadow_tokens: see `PrefixCache.store`. False: it was evicted meanwhile."""
        with self._cache._index.lock:
            if self._entry not in self._cache._index.entries:
                self._cache.stats.shadow_wasted_tokens += shadow_tokens
                return False
            self._entry.shadow_tokens = shadow_tokens
            self._cache._settle(self._entry)
        return True

    def drop(self) -> None:
        """Give up the snapshot. May be called twice, and after `keep` no more."""
        with self._cache._index.lock:
            if self._entry in self._cache._index.entries:
                self._cache._index.remove(self._entry, remember=False)


class Parked:
    """Bytes that lie in the arena until they are wanted back, and make room before any snapshot does. Made by
    `PrefixCache.park`."""

    def __init__(self, cache: PrefixCache, blocks: list[int], nbytes: int) -> None:
        self._cache, self.blocks, self._nbytes = cache, blocks, nbytes

    def drop(self) -> None:
        """Give up the memory. May be called at any time, and twice."""
        with self._cache._index.lock:
            if self._cache._index.parked is self:
                self._cache._index.drop_parked()

    def restore(self, targets: Sequence[npt.NDArray[np.generic]]) -> bool:
        """Fill C-contiguous arrays of the sizes that were parked, and give up the memory. False, and nothing filled:
        the bytes have made room for others."""
        index = self._cache._index
        with index.lock:
            if index.parked is not self:
                return False
            index.parked = None
        try:
            self._cache._copy(pieces(targets, index.arena.views(self.blocks, self._nbytes), self._nbytes))
        finally:
            with index.lock:
                index.arena.release(self.blocks)
        return True


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


class PrefixCache:
    """The position-indexed snapshot cache. Thread-safe.

    config, geometry: sizes. fingerprint: 32 bytes of `key.fingerprint`; only its namespaces reach the disk.
    scorer: eviction rule; files, clock: the system's unless a test injects faults. copy: copies what snapshots are made
    of, in the threads that store, park and restore. touch: see `Arena.prepare`; None: memory is found when written.
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
        copy: Callable[[Pieces], None] = copy_pieces,
        touch: Callable[[UInt8Array], None] | None = None,
    ) -> None:
        self.config, self.geometry, self.fingerprint = config, geometry, fingerprint
        self.stats = Stats()
        self._index = Index(config, fingerprint, geometry, scorer or LearnedHazard(), self.stats)
        self._writer = Writer(self._index, clock)
        self._copy = copy
        self._preparer = None if touch is None else Preparer(self._index.arena, touch)
        if config.disk is not None:
            disk = self._index.disk = DiskTier(config.disk, fingerprint, geometry, self.stats, files, clock)
            disk.open()
            attach(self._index, *disk.scan())
            if disk.writable:
                self._index.make_disk_room(0)

    # ---- life ----

    def start(self) -> None:
        """Start the threads that write snapshots to disk behind the requests and have memory ready before them."""
        self._writer.start()
        if self._preparer is not None:
            self._preparer.start()

    def flush(self, limit_s: float = float("inf")) -> None:
        """Write all waiting snapshots now, for at most about `limit_s` seconds."""
        self._writer.flush(limit_s)

    def close(self, flush_s: float = _FLUSH_S) -> None:
        """Write what is waiting, for at most about `flush_s` seconds, and release the directory."""
        self._writer.stop()
        if self._preparer is not None:
            self._preparer.stop()
        if self._index.disk is not None:
            self._writer.flush(flush_s)
            self._index.disk.close()

    # ---- lookup ----

    def peek(self, key: PromptKey, *, exact: bool = False) -> Outcome:
        """What `acquire` would most likely give, without loading, counting or learning."""
        with self._index.lock:
            found = lookup.find(self._index, key, exact)
            order = lookup.order(self._index, key, found)
            best = order[0][0] if order else None
            reason = lookup.reason(self._index, key, found, best, None)
        return lookup.outcome(key, found, best, None, 0.0, reason)

    def acquire(
        self, key: PromptKey, *, exact: bool = False, read: bool = True, shadow: bool = False
    ) -> tuple[Outcome, Lease | None]:
        """Lease the cheapest snapshot to resume `key` from, loading it from disk if need be.

        exact: only snapshots made by canonical prefill. read False: the request wants none. shadow: nobody has asked
        yet, so that nothing is counted or learned from it. Never deeper than tokens - 1, since the last token must be
        forwarded to give logits.
        """
        with self._index.lock:
            found = lookup.find(self._index, key, exact)
            if not shadow:
                self._index.requests += 1
                self.stats.lookups += 1
                self.stats.prompt_tokens += key.tokens
                lookup.learn(self._index, found)
            order = lookup.order(self._index, key, found) if read else []
        failure: MissReason | None = None if read else MissReason.DISABLED
        started = time.perf_counter()
        for entry, _ in order:
            with self._index.lock:
                if entry not in self._index.entries:
                    continue
                tier = Tier.RAM if entry.ram is not None else Tier.DISK
            copy = loader.load(self._index, entry, key)
            if isinstance(copy, MissReason):
                failure = failure or copy
                continue
            load_s = time.perf_counter() - started
            with self._index.lock:
                entry.used = self._index.requests
                if entry.disk is None and entry in self._index.entries:
                    self._writer.enqueue(entry)
                reason = lookup.reason(self._index, key, found, entry, failure)
                outcome = lookup.outcome(key, found, entry, tier, load_s, reason)
                self.stats.load_seconds += load_s
                if not shadow:
                    entry.hits += 1
                    self.stats.hits += 1
                    self.stats.hits_by_tier[tier] += 1
                    self.stats.hits_by_kind[entry.kind.name.lower()] += 1
                    self.stats.shadow_used_tokens += entry.shadow_tokens
                    entry.shadow_tokens = 0
                    self._count(outcome)
            if tier is Tier.DISK:
                self._look_ahead()
            return outcome, Lease(self, entry, copy)
        with self._index.lock:
            outcome = lookup.outcome(key, found, None, None, 0.0, lookup.reason(self._index, key, found, None, failure))
            if not shadow:
                self._count(outcome)
        return outcome, None

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Report a measured prefill, so that resume points are weighed by this machine's rate."""
        if tokens >= _MIN_RATE_TOKENS and seconds > 0:
            with self._index.lock:
                self._index.prefill_rate += _RATE_WEIGHT * (tokens / seconds - self._index.prefill_rate)

    def _count(self, outcome: Outcome) -> None:
        self.stats.reused_tokens += outcome.position
        if outcome.miss_reason is not None:
            self.stats.misses[outcome.miss_reason] += 1
            self.stats.lost_tokens[outcome.miss_reason] += max(0, outcome.matched - outcome.position)

    # ---- store ----

    def store(
        self,
        key: PromptKey,
        source: StateSource,
        kind: Kind,
        position: int,
        exact_tokens: int,
        *,
        replaces: Checkpoint | None = None,
        shadow_tokens: int = 0,
    ) -> Stored:
        """Take a snapshot of `source`, which is the state after the first `position` tokens of `key`.

        exact_tokens: leading tokens that canonical prefill computed (`position` or more: provenance PREFILL).
        replaces: an earlier checkpoint of the same prefill, dropped in favour of this snapshot. shadow_tokens: how
        many were computed for it ahead of demand.
        Room is made first and reserved, then bytes are copied; KV pages already held are not copied again.
        Raises CacheError if position is outside [1, tokens] or a layer of the source is at another position.
        """
        entry = self._take(key, source, kind, position, exact_tokens, replaces)
        if isinstance(entry, Stored):
            if replaces is not None and entry is Stored.EXISTS:
                replaces.drop()
            with self._index.lock:
                self.stats.shadow_wasted_tokens += shadow_tokens
            return entry
        with self._index.lock:
            entry.shadow_tokens += shadow_tokens
            if entry in self._index.entries:
                self._settle(entry)
        self._look_ahead()
        return Stored.STORED

    def checkpoint(
        self, key: PromptKey, source: StateSource, position: int, exact_tokens: int, replaces: Checkpoint | None
    ) -> Checkpoint | None:
        """Like `store`, of a prefill that goes on: a snapshot that stands ready in case it is given up. Its memory is
        that of the checkpoint which it replaces. None: there is a snapshot already, or no room. One that decoding took
        part in is replaced for good."""
        entry = self._take(key, source, Kind.CANCEL, position, exact_tokens, replaces, passing=True)
        self._look_ahead()
        if not isinstance(entry, Stored):
            return Checkpoint(self, entry)
        if entry is Stored.EXISTS and replaces is not None:
            replaces.drop()
        return replaces if entry is Stored.NO_ROOM else None

    def park(
        self, arrays: Sequence[npt.NDArray[np.generic]], *, beside: Checkpoint | None = None, evict: bool = True
    ) -> Parked | None:
        """Keep a copy of C-contiguous arrays, in place of what was parked before. beside: a checkpoint that must not
        make room for it; evict False: no snapshot must. None: there is no room."""
        nbytes = sum(array.nbytes for array in arrays)
        count = -(-nbytes // self.geometry.page_bytes)
        with self._index.lock:
            self._index.drop_parked()
            kept = None if beside is None else beside._entry.ram
            if kept is not None:
                kept.refs += 1
            has_room = self._index.make_room(count) if evict else count <= self._index.arena.free
            blocks = self._index.arena.reserve(count) if has_room else None
            if kept is not None:
                self._index.unref_copy(kept)
        if blocks is None:
            return None
        self._copy(pieces(self._index.arena.views(blocks, nbytes), arrays, nbytes))
        parked = Parked(self, blocks, nbytes)
        with self._index.lock:
            self._index.parked = parked
        self._look_ahead()
        return parked

    def _look_ahead(self) -> None:
        if self._preparer is not None:
            self._preparer.look()

    def shadow_computed(self, tokens: int) -> None:
        """Count tokens that were computed ahead of demand and are in a snapshot."""
        with self._index.lock:
            self.stats.shadow_tokens += tokens

    def _settle(self, entry: Entry) -> None:
        """A snapshot is to stay. The caller holds the lock."""
        self._index.scorer.born(entry.kind)
        self.stats.stored[entry.kind.name.lower()] += 1
        self._writer.enqueue(entry)

    def _take(
        self,
        key: PromptKey,
        source: StateSource,
        kind: Kind,
        position: int,
        exact_tokens: int,
        replaces: Checkpoint | None,
        *,
        passing: bool = False,
    ) -> Entry | Stored:
        """passing: the snapshot is to go again, unless (STORED) it took the place of one that was to stay."""
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
        with self._index.lock:
            nodes = self._index.known_nodes(key, count)
            if len(nodes) == count and self._keeps_existing(key, nodes, tail_key, exact_pages):
                self.stats.store_exists += 1
                return Stored.EXISTS
            probe = Entry(_no_node(), tail_key, position, kind, exact_pages, 0, 0, 0.0)
            base, first = self._index.ram_base(probe, nodes)
            earlier = None if replaces is None else replaces._entry
            blocks = self._index.reserve(count - first + self.geometry.recurrent_blocks + (tail > 0), base, earlier)
            if blocks is None:
                self.stats.store_no_room += 1
                return Stored.NO_ROOM
        page_blocks, rest = blocks[: count - first], blocks[count - first :]
        copied = False
        try:
            recurrent = rest[: self.geometry.recurrent_blocks]
            self._copy(self._pieces(source, first, page_blocks, recurrent, rest[-1] if tail else None))
            rope_delta = int(source.rope_delta)
            copied = True
        finally:
            if not copied:
                with self._index.lock:
                    self._index.arena.release(blocks)
                    if base is not None:
                        self._index.unref_page(base)
        with self._index.lock:
            root = self._index.root(key.root, key.namespace.fingerprint, key.namespace.scope_tag())
            node = root.node if base is None else base.node
            added: list[Node] = []
            for index in range(first, count):
                node = self._index.child(node, key.page_key(index))
                added.append(node)
            entry = Entry(node, tail_key, position, kind, exact_pages, rope_delta, self._index.requests, time.time())
            leaf = self._index.publish_pages(base, added, entry.variant, first, page_blocks)
            entry.ram = RamCopy(leaf, recurrent, rest[-1] if tail else None)
            old = (node.entries or {}).get(tail_key)
            if old is not None:
                entry.pinned, entry.hits, entry.shadow_tokens = old.pinned, old.hits, old.shadow_tokens
                old.shadow_tokens = 0
                self._index.remove(old, remember=False, prune=False)
            if node.ghosts is not None and tail_key in node.ghosts:
                self._index.forget(node.ghosts[tail_key], prune=False)
            self._index.add(entry)
            if old is not None and passing:
                entry.kind = old.kind
                self._settle(entry)
                return Stored.STORED
        return entry

    def _pieces(
        self, source: StateSource, first: int, page_blocks: list[int], recurrent: list[int], tail: int | None
    ) -> Pieces:
        """What a snapshot copies of its source: pages from `first` on, the recurrent payload, the tail page."""
        geometry, arena = self.geometry, self._index.arena
        found: list[tuple[UInt8Array, UInt8Array]] = []
        for index, block in enumerate(page_blocks if tail is None else [*page_blocks, tail], first):
            page = as_bytes(source.page(index))
            if page.size != geometry.page_bytes:
                raise CacheError(f"KV page {index} has {page.size} bytes, expected {geometry.page_bytes}")
            found.append((arena.view(block), page))
        found += pieces(arena.views(recurrent, geometry.recurrent_bytes), source.recurrent(), geometry.recurrent_bytes)
        return found

    def _keeps_existing(self, key: PromptKey, nodes: list[Node], tail_key: bytes, exact_pages: int) -> bool:
        root = self._index.roots.get(key.root)
        if root is None:
            return False
        node = nodes[-1] if nodes else root.node
        entry = (node.entries or {}).get(tail_key)
        if entry is None or (entry.exact_pages != EXACT and exact_pages == EXACT):
            return False
        if entry.ram is None and (self._index.disk is None or not self._index.disk.readable):
            return False  # it is on a disk that has failed
        entry.used = self._index.requests
        if entry.disk is None:
            self._writer.enqueue(entry)
        return True

    # ---- administration ----

    def inspect(
        self, key: PromptKey | None = None, *, scope_tag: bytes | None = None, limit: int = 1000
    ) -> list[SnapshotInfo]:
        """Snapshots, deepest first: those on the path of `key`, or all of one scope, or all."""
        with self._index.lock:
            entries = (
                [e for e, _ in lookup.find(self._index, key, False).usable]
                if key is not None
                else list(self._index.entries)
            )
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
            entry.disk.nbytes if entry.disk is not None else 0, entry.hits, self._index.requests - entry.used,
            entry.pinned,
        )  # fmt: skip

    def pin(self, snapshot_id: str, pinned: bool = True, *, scope_tag: bytes | None = None) -> bool:
        """Keep (or stop keeping) a snapshot in at least one tier. False: no such snapshot (in that scope).

        Raises CacheError if pinned snapshots would fill more than their share of the arena.
        """
        with self._index.lock:
            for entry in self._index.entries:
                if _entry_id(entry) == snapshot_id and scope_tag in (None, entry.node.root.scope_tag):
                    if pinned and not entry.pinned:
                        self._check_pin(entry)
                    entry.pinned = pinned
                    return True
        return False

    def _check_pin(self, entry: Entry) -> None:
        allowed = int(self._index.config.pin_share * self._index.arena.blocks)
        pages = {n for e in self._index.entries if e.pinned or e is entry for n in _nodes_to(e.node)}
        count = sum(e.pinned or e is entry for e in self._index.entries)
        wanted = len(pages) + count * (self.geometry.recurrent_blocks + 1)
        if wanted > allowed:
            raise CacheError(
                f"pinned snapshots would need {wanted * self.geometry.page_bytes} bytes, "
                f"allowed are {allowed * self.geometry.page_bytes}"
            )

    def clear(self, *, scope_tag: bytes | None = None) -> int:
        """Delete all snapshots (of one scope) and what is remembered of evicted ones, pins included, in RAM and on
        disk. Leases stay valid, and what is parked stays to those who parked it unless all is deleted. Returns the
        number of snapshots deleted."""
        with self._index.lock:
            if scope_tag is None:
                self._index.drop_parked()
            entries = [e for e in self._index.entries if scope_tag in (None, e.node.root.scope_tag)]
            for entry in entries:
                self._index.remove(entry, remember=False)
            for ghost in [g for g in self._index.ghosts if scope_tag in (None, g.node.root.scope_tag)]:
                self._index.forget(ghost)
            return len(entries)

    def gauges(self) -> dict[str, int | float | str | None]:
        """Present sizes for /metrics: bytes and counts by tier, measured rates, why the disk is off (or None)."""
        with self._index.lock:
            disk = self._index.disk
            return {
                "snapshots": len(self._index.entries),
                "snapshots_ram": sum(e.ram is not None for e in self._index.entries),
                "snapshots_disk": sum(e.disk is not None for e in self._index.entries),
                "pinned": sum(e.pinned for e in self._index.entries),
                "ghosts": len(self._index.ghosts),
                "ram_bytes": self._index.arena.used_bytes,
                "ram_bytes_max": self._index.arena.high_water * self.geometry.page_bytes,
                "ram_capacity_bytes": self._index.arena.blocks * self.geometry.page_bytes,
                "disk_bytes": disk.used_bytes if disk is not None else 0,
                "disk_capacity_bytes": disk.config.capacity_bytes if disk is not None else 0,
                "disk_writable": int(disk is not None and disk.writable),
                "disk_readable": int(disk is not None and disk.readable),
                "disk_failure": disk.failure if disk is not None else None,
                "writes_waiting": len(self._index.waiting),
                "prefill_tokens_per_s": self._index.prefill_rate,
                "disk_bytes_per_s": self._index.disk_rate,
            }

    def check_integrity(self) -> list[str]:
        """Recount everything from the index; returns what is wrong (nothing, unless there is a bug or someone
        changed the folder). Waits for the write in progress; no other thread may use the cache meanwhile."""
        with self._writer.at_rest(), self._index.lock:
            return check(self._index)


def _no_node() -> Node:
    return Root(b"", b"", b"").node


def _nodes_to(node: Node) -> Iterable[Node]:
    place: Node | None = node
    while place is not None and place.depth > 0:
        yield place
        place = place.parent


def _entry_id(entry: Entry) -> str:
    return hashlib.blake2b(entry.node.digest + entry.tail_key, digest_size=16).hexdigest()
