"""Settings of the cache, and defaults from the machine. Decides sizes, never touches payloads."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from .key import CacheError
from .policy import Cuts

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """The disk tier. Sizes in bytes.

    directory: holds one folder per model fingerprint. capacity_bytes: cap over all of them. free_floor_bytes:
    the file system never gets fuller than this by our hand. write_bytes_per_day, write_burst_bytes: token bucket
    that spares the drive. write_delay_s: a snapshot younger than this is not written (it may be superseded).
    foreign_ttl_s: folders of other fingerprints unused for longer are deleted at start.
    """

    directory: Path
    capacity_bytes: int
    free_floor_bytes: int = 5 * GIB
    write_bytes_per_day: int = 200 * GIB
    write_burst_bytes: int = 16 * GIB
    write_delay_s: float = 1.0
    foreign_ttl_s: float = 7 * 86400.0

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "write_bytes_per_day", "write_burst_bytes"):
            if getattr(self, name) <= 0:
                raise CacheError(f"disk {name} is {getattr(self, name)}, expected > 0")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The whole cache. ram_bytes: hard cap of the arena. disk None: no disk tier. cuts: see `policy.Cuts`.

    The four rates are starting guesses until measured: prefill in tokens/s, loads in bytes/s.
    ghosts: evicted snapshots remembered for learning and for `miss_reason`. pin_share: part of ram_bytes that
    pinned snapshots may fill.
    """

    ram_bytes: int
    disk: DiskConfig | None = None
    cuts: Cuts = Cuts.CANONICAL
    prefill_tokens_per_s: float = 50.0
    ram_bytes_per_s: float = 8e9
    disk_bytes_per_s: float = 1e9
    disk_latency_s: float = 2e-3
    ghosts: int = 2000
    pin_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.pin_share <= 1.0:
            raise CacheError(f"pin_share is {self.pin_share}, expected 0..1")
        for name in ("prefill_tokens_per_s", "ram_bytes_per_s", "disk_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise CacheError(f"{name} is {getattr(self, name)}, expected > 0")


def default_ram_bytes() -> int:
    """An eighth of the machine's memory, between 256 MiB and 8 GiB; the model's weights need the rest."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(GIB // 4, min(8 * GIB, total // 8))


def default_directory() -> Path:
    """`prefix` in fermion's folder of the user's cache directory (XDG_CACHE_HOME, else ~/.cache).

    Raises CacheError for a user without a home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "fermion" / "prefix"
    except RuntimeError:
        raise CacheError("this user has no home directory, and XDG_CACHE_HOME is not set") from None


def default_disk_bytes(directory: Path) -> int:
    """A tenth of the file system or half of what is free, whichever is less; at most 100 GiB, at least 0. Raises
    OSError where the directory, or what there is of the way to it, cannot be looked at."""
    probe = directory
    while not probe.exists():
        probe = probe.parent
    usage = shutil.disk_usage(probe)
    return max(0, min(100 * GIB, usage.total // 10, usage.free // 2))
