"""How fast this machine's memory can be read, measured with the threads, loads and access pattern of decode.

The yardstick of `fermion bench`: a token cannot be faster than its bytes at this rate. On shared hosts the rate moves
within minutes, so it is taken beside each figure and never remembered.
"""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Sequence

import numpy as np

from engine._simd import ffi, lib
from engine.errors import KernelError, OutOfMemory
from engine.placement import available_bytes

BLOCK_BYTES = 576 << 10  # an expert's down projection at the real shape
BUFFER_BYTES = 2048 * BLOCK_BYTES  # 1.1 GiB: far beyond any cache


class BandwidthProbe:
    """A buffer to read. Huge pages are asked for, since the figure is meant to be the machine's limit.

    tier: kernel tier; threads >= 1; cpus: logical ids to pin to, one per thread, or None. OutOfMemory if the machine
    has less than twice the buffer available.
    """

    def __init__(self, tier: str, threads: int, cpus: Sequence[int] | None = None, nbytes: int = BUFFER_BYTES) -> None:
        available = available_bytes()
        if 2 * nbytes > available:
            raise OutOfMemory(f"the bandwidth probe reads {nbytes:,} bytes, {available:,} bytes are available")
        self._tier, self._threads = tier, threads
        self._cpus = ffi.NULL if cpus is None else ffi.new("int[]", list(cpus))
        # Private: shared anonymous memory is a file to the kernel and rarely gets huge pages.
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(self._memory, np.uint8)[:] = 1  # untouched pages would all be the one zero page

    def gb_per_s(self, passes: int = 5) -> float:
        """Median over `passes` reads of the whole buffer, in 10^9 bytes per second. KernelError if it cannot run."""
        nbytes = len(self._memory)
        data = ffi.from_buffer("char[]", self._memory)
        seconds: list[float] = [
            lib.fm_probe_read(self._tier.encode(), self._threads, self._cpus, data, nbytes, BLOCK_BYTES)
            for _ in range(passes)
        ]
        if min(seconds) <= 0:
            raise KernelError(f"the bandwidth probe cannot run tier {self._tier!r} on {self._threads} threads here")
        return nbytes / statistics.median(seconds) / 1e9
