"""The prefix cache: never compute a prompt prefix twice.

A hybrid model's recurrent state is valid only at the position where it was taken, so KV alone cannot be reused:
this package keeps *snapshots* (recurrent payload, position, rotary offset, references to shared 64-token KV pages)
in a fixed RAM arena over an optional disk tier. Standard library and NumPy only; payload bytes are opaque; it
imports nothing of the engine or the server.

How an engine uses it, one request:

    key = PromptKey(Namespace(fingerprint, scope, salt), token_ids, media)
    outcome, lease = cache.acquire(key, exact=..., read=...)
    if lease: lease.restore([conv, ssm]); take lease.pages and a copy of lease.tail as the state's; position, rope_delta
    cuts = canonical_cuts(key.token_ids, markers, key.media)
    todo = plan(key.tokens, boundaries, cuts, config.cuts, resume=outcome.position, matched=outcome.matched)
    for each position in cuts and todo and the end: prefill up to it, starting a new segment there, and at those
        of todo: cache.store(key, state, kind, position, exact_tokens)
    between them, at exact positions (`snap`): checkpoint = cache.checkpoint(key, state, position, exact_tokens,
        checkpoint), which the next store replaces (replaces=checkpoint); checkpoint.keep() on cancel, else drop()
    after generation, only if the template will render the turn as it was generated:
        cache.store(key.extended(generated), state, Kind.REPLY, ...)
    drop the state; lease.release(); cache.observe_prefill(tokens, seconds)

Three rules make "warm equals cold, bit for bit" true. Segments start at the canonical cuts in every run, cached or not.
Full pages of a lease are used in place and never written; only the tail is copied. And exact_tokens counts the leading
tokens that canonical prefill computed: it starts at lease.exact_tokens (0 on a miss), follows the position as long as
it had reached it, and stops for good at the first decoded token. `tests/prefix_cache/cached_model.py` is this wiring
in small.
"""

from .cache import Checkpoint, Lease, Parked, PrefixCache, SnapshotInfo, Stored
from .config import CacheConfig, DiskConfig, default_directory, default_disk_bytes, default_ram_bytes
from .disk import FolderInfo, clear_directory, list_directory
from .key import PAGE_TOKENS, CacheError, MediaSpan, Namespace, PromptKey, common_tokens, fingerprint
from .policy import SEGMENT_TOKENS, Cuts, Markers, Placement, canonical_cuts, plan, snap
from .snapshot import Geometry, Kind, Provenance, StateSource
from .stats import MissReason, Outcome, Stats, Tier

__all__ = [
    "PAGE_TOKENS", "SEGMENT_TOKENS", "CacheConfig", "CacheError", "Checkpoint", "Cuts", "DiskConfig",
    "FolderInfo", "Geometry", "Kind", "Lease", "Markers", "MediaSpan", "MissReason", "Namespace",
    "Outcome", "Parked", "Placement", "PrefixCache", "PromptKey", "Provenance", "SnapshotInfo", "StateSource",
    "Stats", "Stored", "Tier", "canonical_cuts", "clear_directory", "common_tokens", "default_directory",
    "default_disk_bytes", "default_ram_bytes", "fingerprint", "list_directory", "plan", "snap",
]  # fmt: skip
