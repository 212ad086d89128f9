"""Between index and disk: the thread that writes behind the requests, and the rebuild of the index at start."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from . import format as fmt
from .disk import PACK_PAGES, DiskTier, PageToWrite
from .index import Index
from .key import PAGE_TOKENS
from .snapshot import EXACT, DiskCopy, DiskPage, Entry, Pack, RamCopy, RamPage, page_chain

log = logging.getLogger("fermion.prefix_cache")

_PRESSURE = 0.25


class Writer:
    """Writes waiting snapshots: those that matter most first, none before its delay is over unless the arena runs
    low. One write at a time; the lock is not held while bytes move."""

    def __init__(self, index: Index, clock: Callable[[], float]) -> None:
        self._index, self._clock = index, clock
        self._changed = threading.Condition(index.lock)
        self._writing = threading.Lock()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if the disk can be written and it does not run yet."""
        if self._index.disk is not None and self._index.disk.writable and self._thread is None:
            self._thread = threading.Thread(target=self._write_behind, name="prefix-cache-writer", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Let the present write end, and the thread with it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def at_rest(self) -> threading.Lock:
        """Held while a snapshot is being written: who has it knows that none is."""
        return self._writing

    def enqueue(self, entry: Entry) -> None:
        """Have a snapshot written, unless it never can be. The caller holds the lock."""
        disk = self._index.disk
        if disk is not None and disk.writable and entry.node.root.fingerprint == self._index.fingerprint:
            self._index.waiting.setdefault(entry, self._clock() + disk.config.write_delay_s)
            self._changed.notify_all()

    def _next_write(self, *, now: bool) -> Entry | None:
        """The waiting snapshot that is due and matters most. now: all are due."""
        hurry = now or self._index.arena.free < self._index.arena.blocks * _PRESSURE
        at = self._clock()
        due = [(e.kind, since, e.position, e) for e, since in self._index.waiting.items() if hurry or since <= at]
        return min(due, key=lambda item: item[:3])[3] if due else None

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                entry = None
                while not self._stopping:
                    entry = self._next_write(now=False)
                    if entry is not None:
                        break
                    next_due = min(self._index.waiting.values(), default=None)
                    self._changed.wait(None if next_due is None else max(0.01, next_due - self._clock()))
                if entry is None:
                    return
            self._persist(entry)

    def flush(self, limit_s: float = float("inf")) -> None:
        """Write all waiting snapshots now, for at most about `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with self._index.lock:
                entry = self._next_write(now=True)
            if entry is None:
                return
            self._persist(entry)

    def _persist(self, entry: Entry) -> None:
        """Write one snapshot and the KV pages it needs that are not on disk yet."""
        with self._writing:
            with self._index.lock:
                self._index.waiting.pop(entry, None)
                disk, copy = self._index.disk, entry.ram
                if disk is None or copy is None or entry.disk is not None or entry not in self._index.entries:
                    return
                chain = page_chain(copy.leaf)
                base, first = self._index.disk_base(chain)
                copy.refs += 1
                nbytes = self._file_bytes_at_most(entry, chain, first)
                allowed = disk.admits(nbytes) and self._index.make_disk_room(nbytes)
            written: list[tuple[str, int, int]] = []
            done: tuple[str, int] | None = None
            try:
                if allowed:
                    done = self._write_files(disk, entry, copy, chain, base, first, written)
            except OSError:
                pass  # the tier has said so, and is off
            except Exception:
                log.exception("prefix cache: a snapshot of %d tokens could not be written", entry.position)
            with self._index.lock:
                if done is None or entry not in self._index.entries:
                    for name, size, _ in written:
                        disk.discard(name, size)
                    if done is not None:
                        disk.discard(*done)
                    self._index.unref_disk_page(base)
                else:
                    leaf = base
                    for name, size, count in written:
                        pack = Pack(name, size)
                        for index, page in enumerate(chain[first : first + count]):
                            leaf = self._index.add_disk_page(page.node, page.variant, leaf, pack, index)
                        first += count
                    entry.disk = DiskCopy(leaf, *done)
                self._index.unref_copy(copy)

    def _file_bytes_at_most(self, entry: Entry, chain: Sequence[RamPage], first: int) -> int:
        """Bytes that writing a snapshot and chain[first:] can take, headers included."""
        keys = [len(page.node.key) for page in chain]
        payload = self._index.geometry.recurrent_bytes + self._index.geometry.page_bytes
        total = fmt.snapshot_bytes_at_most(
            payload, len(entry.tail_key), self._index.geometry.recurrent_blocks + 1, sum(keys)
        )  # fmt: skip
        for start in range(first, len(chain), PACK_PAGES):
            pack = keys[start : start + PACK_PAGES]
            total += fmt.pack_bytes_at_most(self._index.geometry.page_bytes, pack, sum(keys[:start]))
        return total

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
                [PageToWrite(p.node.digest, p.variant, p.node.key, self._index.arena.view(p.block)) for p in pages],
                b"".join(keys[:start]),
            )
            written.append((name, size, len(pages)))
            parent = (pages[-1].node.digest, pages[-1].variant)
        blocks = copy.recurrent if copy.tail is None else [*copy.recurrent, copy.tail]
        payload = self._index.payload_views(blocks)
        path = b"".join(keys)
        header = fmt.SnapshotHeader(
            self._index.fingerprint, root.digest, root.scope_tag, parent[0], parent[1], len(chain), entry.position,
            entry.rope_delta, entry.exact_pages, entry.kind, copy.tail is not None, entry.created,
            self._index.geometry.recurrent_bytes, self._index.geometry.page_bytes, entry.tail_key,
            disk.checksums(payload), len(path), fmt.path_digest(path),
        )  # fmt: skip
        return disk.write_snapshot(header, path, payload)


def attach(
    index: Index,
    packs: list[tuple[str, int, fmt.PackHeader]],
    snapshots: list[tuple[str, int, fmt.SnapshotHeader]],
) -> None:
    """Rebuild the index from headers; files whose prefix is incomplete are deleted."""
    disk = index.disk
    assert disk is not None
    known: dict[tuple[bytes, bytes, int], DiskPage] = {}
    for name, size, pack_header in sorted(packs, key=lambda item: item[2].first_depth):
        root = index.root(pack_header.root, pack_header.fingerprint, pack_header.scope_tag)
        parent = known.get((pack_header.root, pack_header.parent_digest, pack_header.parent_variant))
        node = parent.node if parent is not None else root.node
        if node.depth != pack_header.first_depth:
            _discard_orphan(index, name, size)
            index.prune(node)
            continue
        pack = Pack(name, size)
        for place, (digest, variant, page_key, _) in enumerate(pack_header.pages):
            child = index.child(node, page_key)
            if child.digest != digest:
                index.prune(child)
                break
            # A page whose snapshots had left may have been written anew, while its neighbours kept its first pack.
            page = (child.disk or {}).get(variant)
            if page is None:
                page = index.add_disk_page(child, variant, parent, pack, place)
                page.refs = 0
                if parent is not None:
                    parent.refs += 1
                known[pack_header.root, digest, variant] = page
            parent, node = page, child
        if pack.live == 0:
            _discard_orphan(index, name, size)
    for name, size, header in snapshots:
        leaf = known.get((header.root, header.leaf_digest, header.leaf_variant)) if header.depth else None
        if (leaf is None) != (header.depth == 0) or header.position // PAGE_TOKENS != header.depth:
            _discard_orphan(index, name, size)
            continue
        root = leaf.node.root if leaf else index.root(header.root, header.fingerprint, header.scope_tag)
        node = leaf.node if leaf is not None else root.node
        if node.depth != header.depth or header.tail_key in (node.entries or {}):
            _discard_orphan(index, name, size)
            continue
        entry = Entry(
            node, header.tail_key, header.position, header.kind, header.exact_pages, header.rope_delta, 0,
            header.created,
        )  # fmt: skip
        entry.disk = DiskCopy(leaf, name, size)
        if leaf is not None:
            leaf.refs += 1
        index.add(entry)
    for page in list(known.values()):
        if page.refs == 0 and page.node.disk is not None and page.node.disk.get(page.variant) is page:
            page.refs = 1
            index.stats.disk_orphans_removed += 1
            index.unref_disk_page(page)


def _discard_orphan(index: Index, name: str, size: int) -> None:
    assert index.disk is not None
    index.stats.disk_orphans_removed += 1
    index.disk.discard(name, size)
