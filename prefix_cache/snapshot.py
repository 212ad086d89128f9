"""The records of the index: page nodes, page copies in RAM and on disk, snapshots, and what a caller hands in.

Payload bytes are opaque. Reference counts form trees (a deeper page holds its parent), so a page that any
snapshot needs cannot be freed, and a snapshot costs one reference whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .arena import UInt8Array
from .key import PAGE_TOKENS

EXACT = -1
"""Variant of pages and snapshots made by canonical prefill alone (provenance P)."""


class Kind(IntEnum):
    """Why a snapshot was taken; lower values reach the disk first. Stored in files: never renumber."""

    SYSTEM = 0
    BRANCH = 1
    MESSAGE = 2
    GENERATION = 3
    INTERIOR = 4
    REPLY = 5
    CANCEL = 6
    SHADOW = 7


class Provenance(IntEnum):
    """PREFILL: bits equal those of a cold prefill. DECODE: some token was computed one step at a time."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """Fixed payload sizes in bytes. page_bytes: K and V of 64 tokens in all full-attention layers, a multiple of
    64; recurrent_bytes: recurrent states and convolution windows of all layers at one position."""

    page_bytes: int
    recurrent_bytes: int

    @property
    def recurrent_blocks(self) -> int:
        """Arena blocks that one recurrent payload takes."""
        return -(-self.recurrent_bytes // self.page_bytes)


class StateSource(Protocol):
    """A live sequence that a snapshot can be taken from. It must not change while `PrefixCache.store` runs."""

    @property
    def rope_delta(self) -> int:
        """Offset between token index and rotary position (pictures advance them differently)."""

    def layer_positions(self) -> Iterable[int]:
        """The position counter of each stateful layer; a snapshot is refused unless all agree."""

    def page(self, index: int) -> npt.NDArray[np.generic]:
        """C-contiguous array of page_bytes for KV page `index`; the last may be partly filled."""

    def recurrent(self) -> Sequence[npt.NDArray[np.generic]]:
        """C-contiguous arrays, recurrent_bytes together, in the order that `Lease.restore` fills."""


class RamPage:
    """One KV page in the arena. refs: deeper pages and snapshots that need it."""

    __slots__ = ("block", "node", "parent", "refs", "variant")

    def __init__(self, node: Node, variant: int, parent: RamPage | None, block: int) -> None:
        self.node, self.variant, self.parent, self.block, self.refs = node, variant, parent, block, 0


class Pack:
    """One immutable file of consecutive KV pages. live: pages of it that some snapshot on disk still needs."""

    __slots__ = ("live", "name", "nbytes")

    def __init__(self, name: str, nbytes: int) -> None:
        self.name, self.nbytes, self.live = name, nbytes, 0


class DiskPage:
    """One KV page in a pack. refs: deeper pages and snapshots on disk that need it."""

    __slots__ = ("index", "node", "pack", "parent", "refs", "variant")

    def __init__(self, node: Node, variant: int, parent: DiskPage | None, pack: Pack, index: int) -> None:
        self.node, self.variant, self.parent, self.pack, self.index, self.refs = node, variant, parent, pack, index, 0


class Node:
    """One full page of tokens below its parent; the root has depth 0 and no key."""

    __slots__ = ("children", "depth", "digest", "disk", "entries", "ghosts", "key", "parent", "ram", "root")

    def __init__(self, parent: Node | None, key: bytes, depth: int, digest: bytes, root: Root) -> None:
        self.parent, self.key, self.depth, self.digest, self.root = parent, key, depth, digest, root
        self.children: dict[bytes, Node] = {}
        self.entries: dict[bytes, Entry] | None = None
        self.ghosts: dict[bytes, Ghost] | None = None
        self.ram: dict[int, RamPage] | None = None
        self.disk: dict[int, DiskPage] | None = None

    @property
    def position(self) -> int:
        """Tokens from the start of the sequence to the end of this page."""
        return self.depth * PAGE_TOKENS


@dataclass(slots=True, eq=False)
class Root:
    """The start of all prefixes of one namespace."""

    digest: bytes
    fingerprint: bytes
    scope_tag: bytes
    node: Node = field(init=False)

    def __post_init__(self) -> None:
        self.node = Node(None, b"", 0, self.digest, self)


class RamCopy:
    """A snapshot's payload in the arena. refs: the index, leases and a write in progress each hold one."""

    __slots__ = ("leaf", "recurrent", "refs", "tail")

    def __init__(self, leaf: RamPage | None, recurrent: list[int], tail: int | None) -> None:
        self.leaf, self.recurrent, self.tail, self.refs = leaf, recurrent, tail, 1


class DiskCopy:
    """A snapshot's file and its chain of pages."""

    __slots__ = ("leaf", "name", "nbytes")

    def __init__(self, leaf: DiskPage | None, name: str, nbytes: int) -> None:
        self.leaf, self.name, self.nbytes = leaf, name, nbytes


class Entry:
    """One snapshot: the state after exactly `position` tokens. exact_pages: EXACT, or the first page with a token
    that was not prefilled canonically. used: request count at the last hit or creation. shadow_tokens: how many were
    computed for it ahead of demand, until a request uses it."""

    __slots__ = (
        "created", "disk", "exact_pages", "hits", "kind", "node", "pinned",
        "position", "ram", "rope_delta", "shadow_tokens", "tail_key", "tip", "used",
    )  # fmt: skip

    def __init__(
        self,
        node: Node,
        tail_key: bytes,
        position: int,
        kind: Kind,
        exact_pages: int,
        rope_delta: int,
        used: int,
        created: float,
    ) -> None:
        self.node, self.tail_key, self.position = node, tail_key, position
        self.kind, self.exact_pages, self.rope_delta = kind, exact_pages, rope_delta
        self.used, self.created, self.hits, self.tip, self.pinned = used, created, 0, True, False
        self.shadow_tokens = 0
        self.ram: RamCopy | None = None
        self.disk: DiskCopy | None = None

    @property
    def provenance(self) -> Provenance:
        """PREFILL or DECODE."""
        return Provenance.PREFILL if self.exact_pages == EXACT else Provenance.DECODE

    def variant(self, page_index: int) -> int:
        """Variant of this snapshot's page `page_index`."""
        return EXACT if self.exact_pages == EXACT or page_index < self.exact_pages else self.exact_pages


class Ghost:
    """What is remembered of an evicted snapshot: enough to learn from a request that would have hit it."""

    __slots__ = ("kind", "node", "position", "tail_key", "tip", "used")

    def __init__(self, entry: Entry) -> None:
        self.node, self.tail_key, self.position = entry.node, entry.tail_key, entry.position
        self.kind, self.tip, self.used = entry.kind, entry.tip, entry.used


def page_chain(leaf: RamPage | None) -> list[RamPage]:
    """Pages from the first to `leaf`."""
    chain = []
    while leaf is not None:
        chain.append(leaf)
        leaf = leaf.parent
    chain.reverse()
    return chain


def disk_chain(leaf: DiskPage | None) -> list[DiskPage]:
    """Pages from the first to `leaf`."""
    chain = []
    while leaf is not None:
        chain.append(leaf)
        leaf = leaf.parent
    chain.reverse()
    return chain


def read_only(view: UInt8Array) -> UInt8Array:
    """The same memory, not writable through the result."""
    result = view.view()
    result.flags.writeable = False
    return result
