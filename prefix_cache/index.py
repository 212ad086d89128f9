"""The index of all snapshots: the tree of token pages, who refers to what, and what to give up.

Everything here runs under `Index.lock`. Reference counts decide when a block or a file goes; the eviction rule
decides which snapshot goes. Makes no copies and opens no files.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from .arena import Arena, UInt8Array
from .config import CacheConfig
from .disk import DiskTier
from .eviction import Scorer
from .key import PAGE_TOKENS, CacheError, PromptKey, page_digest
from .policy import SEGMENT_TOKENS
from .snapshot import DiskPage, Entry, Geometry, Ghost, Node, Pack, RamCopy, RamPage, Root
from .stats import Stats

_RESCORED = 256
_SPARE_PART = 64


class HoldsBlocks(Protocol):
    """Something outside the tree that has blocks of the arena."""

    blocks: list[int]


class Index:
    """State of one cache.

    requests: lookups so far, the clock of ages. waiting: snapshots to be written and since when they may be.
    loading: snapshots being read from disk, which must not leave it. parked: bytes of no snapshot, the first to go.
    prefill_rate in tokens/s, disk_rate in bytes/s.
    Raises CacheError if the arena cannot hold one snapshot.
    """

    def __init__(
        self, config: CacheConfig, fingerprint: bytes, geometry: Geometry, scorer: Scorer, stats: Stats
    ) -> None:
        self.config, self.fingerprint, self.geometry, self.scorer, self.stats = (
            config, fingerprint, geometry, scorer, stats,
        )  # fmt: skip
        ahead = geometry.recurrent_blocks + 1 + SEGMENT_TOKENS // PAGE_TOKENS  # one snapshot and the pages before it
        self.arena = Arena(geometry.page_bytes, config.ram_bytes, ahead)
        if geometry.recurrent_blocks + 1 > self.arena.blocks:
            raise CacheError(
                f"ram_bytes is {config.ram_bytes}, one snapshot needs "
                f"{(geometry.recurrent_blocks + 1) * geometry.page_bytes}"
            )
        self.disk: DiskTier | None = None
        self.lock = threading.RLock()
        self.roots: dict[bytes, Root] = {}
        self.entries: dict[Entry, None] = {}
        self.ghosts: OrderedDict[Ghost, None] = OrderedDict()
        self.waiting: dict[Entry, float] = {}
        self.loading: Counter[Entry] = Counter()
        self.parked: HoldsBlocks | None = None
        self.requests = 0
        self.prefill_rate = config.prefill_tokens_per_s
        self.disk_rate = config.disk_bytes_per_s

    # ---- tree ----

    def root(self, digest: bytes, fingerprint: bytes, scope_tag: bytes) -> Root:
        """The root with this digest, made if need be."""
        root = self.roots.get(digest)
        if root is None:
            root = self.roots[digest] = Root(digest, fingerprint, scope_tag)
        return root

    @staticmethod
    def child(node: Node, key: bytes) -> Node:
        """The node one page deeper, made if need be."""
        child = node.children.get(key)
        if child is None:
            child = Node(node, key, node.depth + 1, page_digest(node.digest, key), node.root)
            node.children[key] = child
        return child

    def add(self, entry: Entry) -> None:
        """List a snapshot at its node."""
        if entry.node.entries is None:
            entry.node.entries = {}
        entry.node.entries[entry.tail_key] = entry
        self.entries[entry] = None

    def known_nodes(self, key: PromptKey, count: int) -> list[Node]:
        """Existing nodes of the first `count` pages, as far as they go."""
        nodes: list[Node] = []
        root = self.roots.get(key.root)
        node = root.node if root is not None else None
        while node is not None and len(nodes) < count:
            node = node.children.get(key.page_key(len(nodes)))
            if node is not None:
                nodes.append(node)
        return nodes

    def ram_base(self, entry: Entry, nodes: Sequence[Node]) -> tuple[RamPage | None, int]:
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

    def reserve(self, count: int, base: RamPage | None, instead_of: Entry | None = None) -> list[int] | None:
        """Blocks for a copy, evicting for them; on failure the reference on `base` is dropped.

        instead_of: a snapshot to give up for it, whose blocks count as room; on failure it stays.
        """
        own, copy = 0, None
        if instead_of is not None and instead_of in self.entries:
            copy = instead_of.ram
        if copy is not None:
            own = (len(copy.recurrent) + (copy.tail is not None)) * (copy.refs == 1)
            copy.refs += 1
        has_room = self.make_room(max(0, count - own))
        if copy is not None:
            copy.refs -= 1
        if has_room and instead_of is not None and instead_of in self.entries:
            self.remove(instead_of, remember=False)
        blocks = self.arena.reserve(count) if has_room else None
        if blocks is None and base is not None:
            self.unref_page(base)
        return blocks

    def publish_pages(
        self,
        base: RamPage | None,
        nodes: Sequence[Node],
        variant: Callable[[int], int],
        first: int,
        blocks: Sequence[int],
    ) -> RamPage | None:
        """Make copied pages part of the index; returns the leaf with one reference for the caller's snapshot.

        nodes, blocks: of the pages from `first` on. The reference that `ram_base` took on `base` is consumed.
        """
        leaf = base
        for index, (node, block) in enumerate(zip(nodes, blocks, strict=True), first):
            which = variant(index)
            page = (node.ram or {}).get(which)
            if page is not None:  # another thread published the same page meanwhile
                self.arena.release([block])
                page.refs += 1
                if leaf is not None:
                    self.unref_page(leaf)
            else:
                page = RamPage(node, which, leaf, block)
                page.refs = 1
                if node.ram is None:
                    node.ram = {}
                node.ram[which] = page
            leaf = page
        return leaf

    def payload_views(self, blocks: Sequence[int]) -> list[UInt8Array]:
        """Views of a snapshot's own blocks, the last recurrent one cut to what the payload fills."""
        views = [self.arena.view(block) for block in blocks]
        last = self.geometry.recurrent_blocks - 1
        views[last] = views[last][: self.geometry.recurrent_bytes - last * self.geometry.page_bytes]
        return views

    # ---- references ----

    def unref_copy(self, copy: RamCopy) -> None:
        """Drop a reference; the last one frees the blocks."""
        copy.refs -= 1
        if copy.refs == 0:
            self.arena.release(copy.recurrent)
            if copy.tail is not None:
                self.arena.release([copy.tail])
            if copy.leaf is not None:
                self.unref_page(copy.leaf)

    def unref_page(self, page: RamPage | None) -> None:
        """Drop a reference; the last one frees the block and drops the parent's."""
        while page is not None:
            page.refs -= 1
            if page.refs:
                return
            self.arena.release([page.block])
            assert page.node.ram is not None
            del page.node.ram[page.variant]
            self.prune(page.node)
            page = page.parent

    def unref_disk_page(self, page: DiskPage | None) -> None:
        """Drop a reference; a pack whose last page goes is deleted."""
        while page is not None:
            page.refs -= 1
            if page.refs:
                return
            assert page.node.disk is not None
            assert self.disk is not None
            del page.node.disk[page.variant]
            page.pack.live -= 1
            if page.pack.live == 0:
                self.disk.discard(page.pack.name, page.pack.nbytes)
            self.prune(page.node)
            page = page.parent

    def prune(self, node: Node) -> None:
        """Forget nodes that nothing refers to, upwards."""
        while not (node.children or node.entries or node.ghosts or node.ram or node.disk):
            parent = node.parent
            if parent is None:
                # A prefix that was deleted while it was loaded may have come anew meanwhile.
                if self.roots.get(node.digest) is node.root:
                    del self.roots[node.digest]
                return
            if parent.children.get(node.key) is node:
                del parent.children[node.key]
            node = parent

    def remove(self, entry: Entry, *, remember: bool, prune: bool = True) -> None:
        """Take a snapshot out of the index and both tiers; leases on it stay valid."""
        node = entry.node
        assert node.entries is not None
        del node.entries[entry.tail_key]
        del self.entries[entry]
        self.stats.shadow_wasted_tokens += entry.shadow_tokens
        self.waiting.pop(entry, None)
        if remember and self.config.ghosts > 0:
            ghost = Ghost(entry)
            if node.ghosts is None:
                node.ghosts = {}
            node.ghosts[entry.tail_key] = ghost
            self.ghosts[ghost] = None
            while len(self.ghosts) > self.config.ghosts:
                self.forget(next(iter(self.ghosts)))
        if entry.ram is not None:
            copy, entry.ram = entry.ram, None
            self.unref_copy(copy)
        if entry.disk is not None:
            self._release_disk(entry)
        if prune:
            self.prune(node)

    def forget(self, ghost: Ghost, *, prune: bool = True) -> None:
        """Stop remembering an evicted snapshot."""
        del self.ghosts[ghost]
        assert ghost.node.ghosts is not None
        del ghost.node.ghosts[ghost.tail_key]
        if prune:
            self.prune(ghost.node)

    def _release_disk(self, entry: Entry) -> None:
        copy, entry.disk = entry.disk, None
        assert copy is not None
        assert self.disk is not None
        self.disk.discard(copy.name, copy.nbytes)
        self.unref_disk_page(copy.leaf)

    def drop_disk(self, entry: Entry, *, evicted: bool) -> None:
        """Give up the disk copy; a snapshot without any copy leaves the index."""
        if entry.disk is None:
            return
        if evicted:
            self.stats.evicted_disk[entry.kind.name.lower()] += 1
        if entry.ram is None:
            self.remove(entry, remember=evicted)
        else:
            self._release_disk(entry)

    def drop_broken(self, entry: Entry, pack: Pack | None) -> None:
        """Give up the disk copies that a broken file strands: one snapshot's, or all that use a pack."""
        stranded = [entry] if pack is None else [e for e in self.entries if uses_pack(e, pack)]
        for each in stranded:
            if each in self.entries:
                self.drop_disk(each, evicted=False)

    # ---- eviction ----

    def make_room(self, count: int) -> bool:
        """Evict until `count` blocks are free; False, with nothing evicted, if leases and pins forbid it."""
        if count > self.arena.free:
            self.drop_parked()
        if count <= self.arena.free:
            return True
        victims = [e for e in self.entries if self._may_leave_ram(e)]
        if count > self.arena.blocks - self._held_blocks(set(victims)):
            return False
        spare = self.arena.blocks // _SPARE_PART if len(victims) > _RESCORED else 0
        for victim in _least(victims, self._ram_worth):
            if count + spare <= self.arena.free:
                break
            self.stats.evicted_ram[victim.kind.name.lower()] += 1
            if victim.disk is None:
                self.remove(victim, remember=True)
            else:
                copy, victim.ram = victim.ram, None
                assert copy is not None
                self.unref_copy(copy)
        return True

    def drop_parked(self) -> None:
        """Give up what is parked."""
        if self.parked is not None:
            self.arena.release(self.parked.blocks)
            self.parked = None

    def _may_leave_ram(self, entry: Entry) -> bool:
        if entry.ram is None or entry.ram.refs != 1:
            return False
        return not entry.pinned or (entry.disk is not None and self.disk is not None and self.disk.readable)

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
        return self.arena.blocks - self.arena.free - freed

    def _ram_worth(self, entry: Entry) -> float:
        copy = entry.ram
        assert copy is not None
        freed = len(copy.recurrent) + (copy.tail is not None)
        page = copy.leaf
        lacking = 0
        while page is not None and page.refs == 1:
            lacking += 1
            page = page.parent
        saved = float(entry.position - self.parent_position(entry))
        if entry.disk is not None and self.disk is not None and self.disk.readable:
            nbytes = self.geometry.recurrent_bytes + lacking * self.geometry.page_bytes
            reload_s = self.config.disk_latency_s + nbytes / self.disk_rate
            saved = min(saved, reload_s * self.prefill_rate)
        return self._score(entry, saved, (freed + lacking) * self.geometry.page_bytes)

    def _disk_worth(self, entry: Entry) -> float:
        assert entry.disk is not None
        freed = entry.disk.nbytes
        page = entry.disk.leaf
        while page is not None and page.refs == 1:
            freed += self.geometry.page_bytes
            page = page.parent
        return self._score(entry, float(entry.position - self.parent_position(entry)), freed)

    def _score(self, entry: Entry, saved: float, freed: int) -> float:
        age = self.requests - entry.used
        return self.scorer.score(entry.kind, entry.tip, age, entry.hits, saved, freed)

    @staticmethod
    def parent_position(entry: Entry) -> int:
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

    @staticmethod
    def disk_base(chain: Sequence[RamPage]) -> tuple[DiskPage | None, int]:
        """The deepest page of a chain that is on disk, with a reference taken, and the count up to it."""
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
    def add_disk_page(node: Node, variant: int, parent: DiskPage | None, pack: Pack, index: int) -> DiskPage:
        """One page with one reference, which the next page or the snapshot consumes."""
        page = DiskPage(node, variant, parent, pack, index)
        page.refs = 1
        pack.live += 1
        if node.disk is None:
            node.disk = {}
        node.disk[variant] = page
        return page

    def make_disk_room(self, nbytes: int) -> bool:
        """Evict from disk until `nbytes` more fit under the cap; False if they cannot."""
        disk = self.disk
        assert disk is not None
        if nbytes > disk.config.capacity_bytes - disk.foreign_bytes:
            return False
        if disk.over_bytes + nbytes <= 0:
            return True
        victims = [e for e in self.entries if e.disk is not None and not e.pinned and e not in self.loading]
        spare = disk.config.capacity_bytes // _SPARE_PART if len(victims) > _RESCORED else 0
        for victim in _least(victims, self._disk_worth):
            if disk.over_bytes + nbytes + spare <= 0 or not disk.writable:
                break
            self.drop_disk(victim, evicted=True)
        return disk.writable and disk.over_bytes + nbytes <= 0


def _least(victims: list[Entry], worth: Callable[[Entry], float]) -> Iterator[Entry]:
    """Victims, least worth first. Few are scored anew after each one, since its loss changes what others save; of
    many the order is fixed at once, and the caller takes a batch."""
    if len(victims) > _RESCORED:
        yield from sorted(victims, key=worth)
        return
    left = list(victims)
    while left:
        victim = min(left, key=worth)
        left.remove(victim)
        yield victim


def uses_pack(entry: Entry, pack: Pack) -> bool:
    """Whether the snapshot's disk copy needs a page of `pack`."""
    page = entry.disk.leaf if entry.disk is not None else None
    while page is not None and page.pack is not pack:
        page = page.parent
    return page is not None
