"""The one block of memory that cached payloads live in, with a cap that no copy in flight can exceed.

Both KV pages and recurrent payloads are made of equal blocks of one KV page: a recurrent payload takes several,
not necessarily adjacent, so nothing ever fragments. A block is reserved before a byte is copied into it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .key import CacheError

UInt8Array = npt.NDArray[np.uint8]


class Arena:
    """`capacity_bytes // block_bytes` blocks of `block_bytes` bytes (a multiple of 64: every block is aligned so).

    Pages of the operating system are committed as blocks are first written. Not thread-safe: the cache's lock
    guards reserve and release; views of reserved blocks may be filled outside it.
    """

    def __init__(self, block_bytes: int, capacity_bytes: int) -> None:
        if block_bytes <= 0 or block_bytes % 64:
            raise CacheError(f"block_bytes is {block_bytes}, expected a positive multiple of 64")
        self.block_bytes = block_bytes
        self.blocks = capacity_bytes // block_bytes
        if self.blocks < 1:
            raise CacheError(f"RAM capacity of {capacity_bytes} bytes holds no block of {block_bytes} bytes")
        # Small pages on purpose: making a huge one ready stops the prefill that needs it for far longer.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, self.blocks * block_bytes, flags=flags)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "more than can be addressed"
            raise CacheError(f"{capacity_bytes} bytes cannot be had: {reason}") from None
        self._memory: UInt8Array = np.frombuffer(self._map, dtype=np.uint8).reshape(self.blocks, block_bytes)
        self._free = list(range(self.blocks - 1, -1, -1))
        self._used = bytearray(self.blocks)
        self.high_water = 0

    @property
    def free(self) -> int:
        """Blocks that are not reserved."""
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now, copies in flight included."""
        return (self.blocks - len(self._free)) * self.block_bytes

    def reserve(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and no change) when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._used[block] = 1
        self.high_water = max(self.high_water, self.blocks - len(self._free))
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back."""
        for block in blocks:
            assert self._used[block], f"block {block} released twice"
            self._used[block] = 0
            self._free.append(block)

    def view(self, block: int) -> UInt8Array:
        """Writable uint8 [block_bytes] view of one reserved block."""
        assert self._used[block], f"block {block} is not reserved"
        view: UInt8Array = self._memory[block]
        return view

    def is_used(self, block: int) -> bool:
        """Whether the block is reserved."""
        return bool(self._used[block])


def scatter(sources: Iterable[npt.NDArray[np.generic]], targets: list[UInt8Array], expected: int) -> None:
    """Copy the concatenation of `sources` (C-contiguous arrays) over `targets` in order.

    Raises CacheError unless exactly `expected` bytes arrive.
    """
    index, offset, total = 0, 0, 0
    for source in sources:
        data = np.frombuffer(source.data.cast("B"), dtype=np.uint8)
        total += data.size
        if total > expected:
            break
        done = 0
        while done < data.size:
            count = min(data.size - done, targets[index].size - offset)
            targets[index][offset : offset + count] = data[done : done + count]
            done += count
            offset += count
            if offset == targets[index].size:
                index, offset = index + 1, 0
    if total != expected:
        raise CacheError(f"payload has {total} bytes or more, expected {expected}")


def gather(sources: list[UInt8Array], targets: Iterable[npt.NDArray[np.generic]], expected: int) -> None:
    """Inverse of `scatter`: fill C-contiguous writable arrays from blocks. Raises CacheError on a size mismatch."""
    arrays = list(targets)
    total = sum(a.nbytes for a in arrays)
    if total != expected:
        raise CacheError(f"restore targets have {total} bytes, expected {expected}")
    index, offset = 0, 0
    for array in arrays:
        data = np.frombuffer(array.data.cast("B"), dtype=np.uint8)
        done = 0
        while done < data.size:
            count = min(data.size - done, sources[index].size - offset)
            data[done : done + count] = sources[index][offset : offset + count]
            done += count
            offset += count
            if offset == sources[index].size:
                index, offset = index + 1, 0
