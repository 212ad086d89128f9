"""From disk to RAM: read a snapshot and the KV pages it lacks into reserved blocks, checked byte by byte."""

from __future__ import annotations

import logging
import time

from . import format as fmt
from .disk import DiskTier, PageMissing
from .index import Index
from .key import PAGE_TOKENS, PromptKey
from .snapshot import DiskPage, Entry, Pack, RamCopy, disk_chain
from .stats import MissReason

log = logging.getLogger("fermion.prefix_cache")

_RATE_WEIGHT = 0.2
_MIN_RATE_BYTES = 1 << 20


def load(index: Index, entry: Entry, key: PromptKey) -> RamCopy | MissReason:
    """The snapshot's payload in RAM, with a reference for the caller, or why there is none.

    Blocks are reserved before anything is read. What proves broken leaves the index.
    """
    with index.lock:
        if entry not in index.entries:
            return MissReason.EVICTED
        if entry.ram is not None:
            entry.ram.refs += 1
            return entry.ram
        disk = index.disk
        if disk is None or not disk.readable or entry.disk is None:
            return MissReason.DISK_ERROR
        index.loading[entry] += 1
        pages = disk_chain(entry.disk.leaf)
        base, first = index.ram_base(entry, [p.node for p in pages])
        has_tail = entry.position % PAGE_TOKENS != 0
        blocks = index.reserve(len(pages) - first + index.geometry.recurrent_blocks + has_tail, base)
        name = entry.disk.name
    if blocks is None:
        with index.lock:
            _end_loading(index, entry)
        return MissReason.NO_ROOM
    loaded = False
    reading: list[Pack] = []
    try:
        page_blocks = blocks[: len(pages) - first]
        rest = blocks[len(pages) - first :]
        started = time.perf_counter()
        nbytes = _load_pages(index, disk, pages, first, page_blocks, key, reading)
        reading.clear()
        payload = index.payload_views(rest)
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
        with index.lock:
            _end_loading(index, entry)
            if not loaded:
                index.arena.release(blocks)
                if base is not None:
                    index.unref_page(base)
    with index.lock:
        if not loaded:
            if failure is MissReason.CORRUPT:
                index.stats.disk_corrupt += 1
            if failure is not MissReason.DISK_ERROR:
                index.drop_broken(entry, reading[-1] if reading else None)
            return failure
        index.stats.loaded_bytes += nbytes
        if nbytes >= _MIN_RATE_BYTES and seconds > 0:
            index.disk_rate += _RATE_WEIGHT * (nbytes / seconds - index.disk_rate)
        leaf = index.publish_pages(base, [p.node for p in pages[first:]], entry.variant, first, page_blocks)
        copy = RamCopy(leaf, rest[: index.geometry.recurrent_blocks], rest[-1] if has_tail else None)
        if entry in index.entries and entry.ram is None:
            entry.ram = copy
            copy.refs += 1
        return copy


def _load_pages(
    index: Index,
    disk: DiskTier,
    pages: list[DiskPage],
    first: int,
    blocks: list[int],
    key: PromptKey,
    reading: list[Pack],
) -> int:
    """Read pages[first:] into blocks; `reading` ends with the pack at fault if this raises."""
    nbytes = 0
    at = first
    while at < len(pages):
        pack = pages[at].pack
        end = at
        while end < len(pages) and pages[end].pack is pack:
            end += 1
        before = at - pages[at].index
        reading.append(pack)
        nbytes += disk.read_pages(
            pack.name,
            [(pages[i].index, index.arena.view(blocks[i - first])) for i in range(at, end)],
            key.path(before),
            [key.page_key(i) for i in range(at, end)],
        )
        at = end
    return nbytes


def _end_loading(index: Index, entry: Entry) -> None:
    index.loading[entry] -= 1
    if index.loading[entry] <= 0:
        del index.loading[entry]
