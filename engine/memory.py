"""The memory under the weights: huge pages, NUMA nodes, locking. Decides nothing about what lies there.

There is one copy of the weights, ever. It is the file's own pages where these serve (`auto`): the kernel is asked for
huge ones, which file systems with large folios give (ext4 since Linux 6.16, XFS and others before). `on` insists: what
the file cannot have in huge pages is copied to anonymous memory piece by piece, and the file's pages are let go behind.
On machines with several NUMA nodes, pages are dealt out to them in turns while they are read, since every core reads
all weights.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine._simd import ffi, lib
from engine.config import EngineConfig
from engine.core import UInt8Array
from engine.errors import ConfigError, OutOfMemory
from engine.placement import available_bytes, memory_nodes

HUGE_PAGE = 2 << 20
_PAGE = mmap.PAGESIZE
_PIECE = 32 * HUGE_PAGE  # copied at once: what is there twice at most
_ENOUGH = 0.95  # share of huge pages from which a copy gains nothing
_SAMPLES = 1024  # pages whose node is asked for
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """How a range lies. resident: share of it in memory (this process's or the page cache); huge: share of what this
    process has mapped that is mapped by huge pages; nodes: share of sampled pages on each NUMA node, by number."""

    nbytes: int
    resident: float
    huge: float
    nodes: dict[int, float]

    def as_text(self) -> str:
        """One line for people."""
        where = ""
        if len(self.nodes) > 1:
            where = "; nodes " + ", ".join(f"{node}: {share:.0%}" for node, share in sorted(self.nodes.items()))
        return f"{self.resident:.0%} in memory, of that {self.huge:.0%} in huge pages{where}"


def map_file(path: Path, config: EngineConfig | None = None) -> UInt8Array:
    """The bytes of a file, read-only, as `config` wants them in memory; without one as the kernel does it.

    Raises OSError, OutOfMemory (a copy that does not fit), ConfigError (locking is not allowed).
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        if config is None:
            return np.frombuffer(mapped, np.uint8)
        nodes = memory_nodes() if config.numa == "interleave" else ()
        if config.huge_pages == "off":
            _advise(mapped, mmap.MADV_NOHUGEPAGE)
        else:
            _advise(mapped, mmap.MADV_HUGEPAGE)
        if len(nodes) > 1:
            with _dealt_out(nodes):
                _advise(mapped, _POPULATE_READ)
        if config.huge_pages == "on":
            _advise(mapped, _POPULATE_READ)
            if report(np.frombuffer(mapped, np.uint8)).huge < _ENOUGH:
                mapped = _copy(file.fileno(), mapped, nodes)
    data = np.frombuffer(mapped, np.uint8)
    if config.memory_lock:
        _lock(data, path)
    return data


def report(data: UInt8Array) -> MemoryReport:
    """How the pages of a mapped file or other page-aligned memory lie now. Brings none in from the disk."""
    address = data.ctypes.data
    assert address % _PAGE == 0
    pages = -(-data.nbytes // _PAGE)
    resident = np.zeros(pages, np.uint8)
    start = ffi.cast("char *", address)
    lib.fm_memory_resident(start, data.nbytes, ffi.from_buffer(resident))
    resident &= 1
    for page in np.flatnonzero(resident[:: HUGE_PAGE // _PAGE]):
        data[int(page) * HUGE_PAGE]  # cached pages are mapped when they are touched
    rss, huge = _mapped_bytes(address, address + data.nbytes)
    found: dict[int, float] = {}
    step = max(1, pages // _SAMPLES)
    there = np.flatnonzero(resident[::step]) * step
    if len(there):
        addresses = ffi.new("void *[]", [ffi.cast("void *", address + int(page) * _PAGE) for page in there])
        nodes = np.full(len(there), -1, np.int32)
        lib.fm_memory_nodes(ffi.cast("const void **", addresses), len(there), ffi.from_buffer("int[]", nodes))
        placed = nodes[nodes >= 0]
        found = {int(node): float((placed == node).mean()) for node in np.unique(placed)}
    return MemoryReport(data.nbytes, float(resident.mean()), huge / rss if rss else 0.0, found)


def touch(memory: UInt8Array) -> None:
    """Have the system put memory behind an array that nobody has written to. Its bytes stay as they are, also those
    that other threads write meanwhile."""
    lib.fm_snapshot_touch(ffi.from_buffer(memory, require_writable=True), memory.nbytes, _POPULATE_WRITE)


def _copy(descriptor: int, mapped: mmap.mmap, nodes: tuple[int, ...]) -> mmap.mmap:
    """The file in anonymous huge pages; its own pages are let go as the copy grows."""
    size = len(mapped)
    if size > available_bytes():  # the file's pages count as available
        raise OutOfMemory(f"a copy of {size:,} bytes in huge pages does not fit: {available_bytes():,} are available")
    copy = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(copy, mmap.MADV_HUGEPAGE)
    if len(nodes) > 1:
        lib.fm_memory_interleave(ffi.from_buffer(copy), size, _mask(nodes))
    for begin in range(0, size, _PIECE):
        end = min(begin + _PIECE, size)
        copy[begin:end] = mapped[begin:end]
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
    mapped.close()
    return copy


def _lock(data: UInt8Array, path: Path) -> None:
    error = lib.fm_memory_lock(ffi.cast("char *", data.ctypes.data), data.nbytes)
    if error == 0:
        return
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if error in (errno.EPERM, errno.ENOMEM, errno.EAGAIN) and limit < data.nbytes:
        raise ConfigError(
            f"memory_lock: {data.nbytes:,} bytes of {path} cannot be kept in memory, the limit is {limit:,}; raise it "
            "with `ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 of a container"
        )
    raise OutOfMemory(f"memory_lock: {path} cannot be kept in memory: {os.strerror(error)}")


@contextlib.contextmanager
def _dealt_out(nodes: tuple[int, ...]) -> Iterator[None]:
    """Pages that this thread brings in meanwhile go to `nodes` in turns."""
    lib.fm_memory_interleave_thread(_mask(nodes))
    try:
        yield
    finally:
        lib.fm_memory_interleave_thread(0)


def _mask(nodes: tuple[int, ...]) -> int:
    return sum(1 << node for node in nodes)


def _advise(memory: mmap.mmap, advice: int) -> None:
    """Advice that this kernel does not know changes nothing but speed."""
    with contextlib.suppress(OSError):
        memory.madvise(advice)


def _mapped_bytes(begin: int, end: int, smaps: Path = Path("/proc/self/smaps")) -> tuple[int, int]:
    """(mapped, of that by huge pages) of the mappings in begin..end-1, in bytes; zeros if the kernel does not tell."""
    try:
        text = smaps.read_text()
    except OSError:
        return 0, 0
    mapped = huge = 0
    inside = False
    for line in text.splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = begin <= int(head[1], 16) < end
        elif inside and (field := re.match(r"(Rss|AnonHugePages|FilePmdMapped|ShmemPmdMapped): +(\d+) kB", line)):
            nbytes = int(field[2]) * 1024
            if field[1] == "Rss":
                mapped += nbytes
            else:
                huge += nbytes
    return mapped, huge
