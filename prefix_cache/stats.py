"""Plain counters of the cache, and the reasons for a miss. No behaviour beyond adding up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from .snapshot import Provenance


class MissReason(StrEnum):
    """Why fewer tokens were reused than the index had in common with the prompt."""

    COLD = "cold"
    """Nothing with this beginning was seen."""
    NO_SNAPSHOT = "no_snapshot"
    """The beginning is known but no snapshot was ever taken deep enough in it."""
    EVICTED = "evicted"
    """A deeper snapshot existed and made room for others."""
    KV_GAP = "kv_gap"
    """A snapshot exists but KV pages below it are gone from disk."""
    FP_MISMATCH = "fp_mismatch"
    """The same beginning was seen by the same tenant under another model, quantisation or kernel version."""
    SALT = "salt"
    """The same beginning was seen by the same tenant under another `cache_salt`."""
    MEDIA_NODIGEST = "media_nodigest"
    """A picture without a digest ends what may be cached."""
    CORRUPT = "corrupt"
    """A file failed its checksum or its stored token ids differ; it was deleted."""
    EXACT_ONLY = "exact_only"
    """A deeper snapshot came from decoding and the request asked for exact ones."""
    NO_ROOM = "no_room"
    """The RAM arena is full of snapshots in use."""
    DISK_ERROR = "disk_error"
    """The disk tier failed while loading."""
    RECOMPUTE_CHEAPER = "recompute_cheaper"
    """Loading a deeper snapshot would take longer than computing the tokens."""
    DISABLED = "disabled"
    """The request asked not to read the cache."""


class Tier(StrEnum):
    """Where a hit came from."""

    RAM = "ram"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a lookup gave. Token counts; load_s in seconds. miss_reason: set whenever a page or more of `matched`
    (what the index knows of the prompt, at most tokens - 1) was not reused, and on a full miss."""

    tokens: int
    matched: int
    position: int
    tier: Tier | None
    load_s: float
    provenance: Provenance | None
    miss_reason: MissReason | None

    @property
    def recomputed(self) -> int:
        """Prompt tokens left to prefill."""
        return self.tokens - self.position


@dataclass(slots=True)
class Stats:
    """Counters since start; monotonic. Dictionaries are keyed by the enums' text."""

    lookups: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    hits_by_tier: Counter[str] = field(default_factory=Counter)
    hits_by_kind: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    lost_tokens: Counter[str] = field(default_factory=Counter)
    ghost_hits: int = 0
    stored: Counter[str] = field(default_factory=Counter)
    store_exists: int = 0
    store_no_room: int = 0
    shadow_tokens: int = 0
    shadow_used_tokens: int = 0
    shadow_wasted_tokens: int = 0
    evicted_ram: Counter[str] = field(default_factory=Counter)
    evicted_disk: Counter[str] = field(default_factory=Counter)
    load_seconds: float = 0.0
    loaded_bytes: int = 0
    save_seconds: float = 0.0
    disk_written_bytes: int = 0
    disk_writes: int = 0
    disk_skipped_budget: int = 0
    disk_skipped_space: int = 0
    disk_errors: int = 0
    disk_corrupt: int = 0
    disk_foreign_removed: int = 0
    disk_orphans_removed: int = 0
    disk_old_version_removed: int = 0

    def as_dict(self) -> dict[str, int | float | dict[str, int]]:
        """All counters by name, for /metrics and tests."""
        result: dict[str, int | float | dict[str, int]] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            result[name] = dict(value) if isinstance(value, Counter) else value
        return result
