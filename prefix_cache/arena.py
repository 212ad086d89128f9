"""The one block of memory that cached payloads live in, with a cap that no copy in flight can exceed.

Both KV pages and recurrent payloads are made of equal blocks of one KV page: a recurrent payload takes several,
not necessarily adjacent, so nothing ever fragments. A block is reserved before a byte is copied into it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from .key import CacheError

UInt8Array = npt.NDArray[np.uint8]

Pieces = Sequence[tuple[UInt8Array, UInt8Array]]
"""What is to be copied: (target, source) each, of equal size."""

_TOUCHED_AT_ONCE = 16 << 20  # between two looks at what is wanted: 5 ms, and 60 where memory is slow to come


class Arena:
    """`capacity_bytes // block_bytes` blocks of `block_bytes` bytes (a multiple of 64: every block is aligned so).

    Pages of the operating system are committed as blocks are first written, or ahead of that by `prepare`. Not
    thread-safe: the cache's lock guards reserve and release; views of reserved blocks may be filled outside it, and one
    thread at a time may prepare.
    ahead: free blocks that should always be ready to be written.
    """

    def __init__(self, block_bytes: int, capacity_bytes: int, ahead: int = 0) -> None:
        if block_bytes <= 0 or block_bytes % 64:
            raise CacheError(f"block_bytes is {block_bytes}, expected a positive multiple of 64")
        self.block_bytes = block_bytes
        self.blocks = capacity_bytes // block_bytes
        if self.blocks < 1:
            raise CacheError(f"RAM capacity of {capacity_bytes} bytes holds no block of {block_bytes} bytes")
        self.ahead = ahead
        # Small pages on purpose: making a huge one ready stops the prefill that needs it for far longer.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, self.blocks * block_bytes, flags=flags)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "more than can be addressed"
            raise CacheError(f"{capacity_bytes} bytes cannot be had: {reason}") from None
        self._flat: UInt8Array = np.frombuffer(self._map, dtype=np.uint8)
        self._memory: UInt8Array = self._flat.reshape(self.blocks, block_bytes)
        self._returned: list[int] = []  # free, and written before: taken first
        self._fresh = 0  # this block and those behind it were never reserved
        self._prepared_bytes = 0  # of the arena, from its start
        self._used = bytearray(self.blocks)
        self.high_water = 0

    @property
    def free(self) -> int:
        """Blocks that are not reserved."""
        return len(self._returned) + self.blocks - self._fresh

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now, copies in flight included."""
        return (self.blocks - self.free) * self.block_bytes

    def reserve(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and no change) when fewer are free."""
        if count > self.free:
            return None
        again = min(count, len(self._returned))
        taken = [self._returned.pop() for _ in range(again)]
        taken += range(self._fresh, self._fresh + count - again)
        self._fresh += count - again
        for block in taken:
            self._used[block] = 1
        self.high_water = max(self.high_water, self.blocks - self.free)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. They are taken again in the same order."""
        for block in reversed(blocks):
            assert self._used[block], f"block {block} released twice"
            self._used[block] = 0
            self._returned.append(block)

    def prepare(self, touch: Callable[[UInt8Array], None]) -> bool:
        """Make some memory ready that is to be written next. touch: has the system put memory behind an array, whose
        bytes stay as they are, also those that other threads write meanwhile. False: as much is ready as should be."""
        begin, end = self._unprepared()
        if begin >= end:
            return False
        end = min(end, begin + _TOUCHED_AT_ONCE)
        touch(self._flat[begin:end])
        self._prepared_bytes = end
        return True

    @property
    def is_prepared(self) -> bool:
        """Whether as much is ready as should be."""
        begin, end = self._unprepared()
        return begin >= end

    def _unprepared(self) -> tuple[int, int]:
        """Where what should be ready and is not begins and ends, in bytes."""
        fresh = self._fresh
        ahead = max(0, self.ahead - len(self._returned))
        return max(self._prepared_bytes, fresh * self.block_bytes), min(self.blocks, fresh + ahead) * self.block_bytes

    def view(self, block: int) -> UInt8Array:
        """Writable uint8 [block_bytes] view of one reserved block."""
        assert self._used[block], f"block {block} is not reserved"
        view: UInt8Array = self._memory[block]
        return view

    def views(self, blocks: Sequence[int], nbytes: int) -> list[UInt8Array]:
        """Writable views of reserved blocks that hold `nbytes` together: one of each run of blocks that lie one
        behind another, the last one cut."""
        found: list[UInt8Array] = []
        size, at = self.block_bytes, 0
        while at < len(blocks):
            first, begin = blocks[at], at
            while at < len(blocks) and blocks[at] == first + at - begin:
                assert self._used[blocks[at]], f"block {blocks[at]} is not reserved"
                at += 1
            found.append(self._flat[first * size : first * size + min(at * size, nbytes) - begin * size])
        return found

    def is_used(self, block: int) -> bool:
        """Whether the block is reserved."""
        return bool(self._used[block])


def pieces(
    targets: Iterable[npt.NDArray[np.generic]], sources: Iterable[npt.NDArray[np.generic]], expected: int
) -> Pieces:
    """How to copy the concatenation of `sources` over that of `targets`: C-contiguous arrays, the targets writable.

    Raises CacheError unless both have exactly `expected` bytes.
    """
    into, out_of = [as_bytes(a) for a in targets], [as_bytes(a) for a in sources]
    for name, arrays in (("place for a payload", into), ("payload", out_of)):
        total = sum(a.size for a in arrays)
        if total != expected:
            raise CacheError(f"{name} has {total} bytes, expected {expected}")
    found: list[tuple[UInt8Array, UInt8Array]] = []
    rest = iter(into)
    target = np.empty(0, np.uint8)
    for source in out_of:
        while source.size:
            if not target.size:
                target = next(rest)
            count = min(source.size, target.size)
            found.append((target[:count], source[:count]))
            target, source = target[count:], source[count:]
    return found


def copy_pieces(pieces: Pieces) -> None:
    """Copy, in this thread."""
    for target, source in pieces:
        target[...] = source


def as_bytes(array: npt.NDArray[np.generic]) -> UInt8Array:
    """The memory of a C-contiguous array, uint8 [nbytes]."""
    if array.ndim == 1 and array.flags.c_contiguous:
        return array.view(np.uint8)
    return np.frombuffer(array.data.cast("B"), dtype=np.uint8)
