"""Recount every reference, block and byte of a cache from its index. Reads private state; changes nothing."""

from __future__ import annotations

from collections import Counter

from .index import Index
from .key import PAGE_TOKENS, page_digest
from .snapshot import DiskPage, Entry, Node, Pack, RamCopy, RamPage


def check(index: Index) -> list[str]:
    """All violated invariants, as text. The caller holds the cache's lock and no other thread works on it.

    Leases hold blocks that the index cannot see; they are counted through the references they add, so outstanding
    leases on live snapshots are fine and leases on deleted ones show as unaccounted blocks.
    """
    problems: list[str] = []
    nodes = [n for root in index.roots.values() for n in _subtree(root.node)]
    _check_nodes(nodes, problems)
    _check_entries(index, nodes, problems)
    _check_ram(index, nodes, problems)
    _check_disk(index, nodes, problems)
    return problems


def _subtree(top: Node) -> list[Node]:
    found, stack = [], [top]
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.children.values())
    return found


def _check_nodes(nodes: list[Node], problems: list[str]) -> None:
    for node in nodes:
        if not (node.children or node.entries or node.ghosts or node.ram or node.disk):
            problems.append(f"empty node at depth {node.depth} was not pruned")
        for key, child in node.children.items():
            if child.parent is not node or child.key != key or child.depth != node.depth + 1:
                problems.append(f"child of a node at depth {node.depth} is linked wrongly")
            if child.digest != page_digest(node.digest, key):
                problems.append(f"digest of a node at depth {child.depth} does not follow from its parent")


def _check_entries(index: Index, nodes: list[Node], problems: list[str]) -> None:
    placed: dict[Entry, None] = {e: None for n in nodes for e in (n.entries or {}).values()}
    if placed.keys() != index.entries.keys():
        problems.append(f"{len(placed)} snapshots hang on nodes, {len(index.entries)} are listed")
    ghosts = {g for n in nodes for g in (n.ghosts or {}).values()}
    if ghosts != set(index.ghosts):
        problems.append(f"{len(ghosts)} ghosts hang on nodes, {len(index.ghosts)} are listed")
    for entry in placed:
        where = f"snapshot at {entry.position}"
        if entry.position // PAGE_TOKENS != entry.node.depth:
            problems.append(f"{where} hangs on a node of depth {entry.node.depth}")
        if entry.ram is None and entry.disk is None:
            problems.append(f"{where} has no copy in any tier")
        if (entry.ram is not None and not _covers(entry, entry.ram.leaf)) or (
            entry.disk is not None and not _covers(entry, entry.disk.leaf)
        ):
            problems.append(f"{where} lacks KV pages below it")
        if entry.tail_key in (entry.node.ghosts or {}):
            problems.append(f"{where} is both live and a ghost")


def _covers(entry: Entry, leaf: RamPage | DiskPage | None) -> bool:
    """Whether the pages from the root to the snapshot's node are all there, in the right variants."""
    node: Node | None = entry.node
    while node is not None and node.depth > 0:
        if leaf is None or leaf.node is not node or leaf.variant != entry.variant(node.depth - 1):
            return False
        leaf, node = leaf.parent, node.parent
    return leaf is None


def _check_ram(index: Index, nodes: list[Node], problems: list[str]) -> None:
    owner: Counter[int] = Counter()
    refs: Counter[RamPage] = Counter()
    pages = [p for n in nodes for p in (n.ram or {}).values()]
    copies: dict[RamCopy, None] = {e.ram: None for e in index.entries if e.ram is not None}
    for page in pages:
        owner[page.block] += 1
        if page.parent is not None:
            refs[page.parent] += 1
    for copy in copies:
        owner.update(copy.recurrent)
        if copy.tail is not None:
            owner[copy.tail] += 1
        if copy.leaf is not None:
            refs[copy.leaf] += 1
    if index.parked is not None:
        owner.update(index.parked.blocks)
    problems += [
        f"KV page at depth {p.node.depth} has {p.refs} references, counted {refs[p]}"
        for p in pages
        if p.refs != refs[p]
    ]
    arena = index.arena
    for block, count in owner.items():
        if count != 1 or not arena.is_used(block):
            problems.append(f"block {block} has {count} owners, reserved: {arena.is_used(block)}")
    if len(owner) != arena.blocks - arena.free:
        problems.append(f"{arena.blocks - arena.free} blocks are reserved, {len(owner)} are accounted for")


def _check_disk(index: Index, nodes: list[Node], problems: list[str]) -> None:
    disk = index.disk
    pages = [p for n in nodes for p in (n.disk or {}).values()]
    if disk is None:
        if pages:
            problems.append("pages on disk without a disk tier")
        return
    refs: Counter[DiskPage] = Counter(p.parent for p in pages if p.parent is not None)
    live: Counter[Pack] = Counter(p.pack for p in pages)
    total = sum(pack.nbytes for pack in live)
    for entry in index.entries:
        if entry.disk is not None:
            total += entry.disk.nbytes
            if entry.disk.leaf is not None:
                refs[entry.disk.leaf] += 1
    problems += [
        f"disk page at depth {p.node.depth} has {p.refs} references, counted {refs[p]}"
        for p in pages
        if p.refs != refs[p]
    ]
    for pack, count in live.items():
        if pack.live != count:
            problems.append(f"pack {pack.name} has {pack.live} live pages, counted {count}")
    if disk.used_bytes != total:
        problems.append(f"disk tier counts {disk.used_bytes} bytes, its files have {total}")
