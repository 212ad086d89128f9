"""The prefix cache: never compute a prompt prefix twice.

A hybrid model's recurrent state is valid only at the position where it was taken, so KV alone cannot be reused:
this package keeps *snapshots* (recurrent payload, position, rotary offset, references to shared 64-token KV pages)
in a fixed RAM arena over an optional disk tier. Standard library and NumPy only; payload bytes are opaque; it
imports nothing of the engine or the server.

How an engine uses it, one request:

    key = PromptKey(Namespace(fingerprint, scope, salt), token_ids, media)
    outcome, lease = cache.acquire(key, exact=..., read=...)      # lease: restore state, use its pages in place
    cuts = canonical_cuts(key.token_ids, markers, key.media)      # the only places where prefill calls may end
    todo = plan(key.tokens, boundaries, cuts, config.cuts, resume=outcome.position, matched=outcome.matched)
    flight = cache.flights.begin(key, [p.position for p in todo]) # with several requests at once: see `flight`
    ... prefill to each planned position, then
    cache.store(key, state, kind, position, exact_tokens); flight.publish(position)
    ... on cancel: store(kind=Kind.CANCEL) at the last cut passed; at the end of generation, only if the template
        will render the turn as generated: store(key.extended(generated), ..., Kind.REPLY, ...)
    flight.end(); lease.release(); cache.observe_prefill(tokens, seconds)

exact_tokens is what makes "warm equals cold, bit for bit" true: the engine counts the leading tokens of a sequence
that canonical prefill computed. It starts at lease.exact_tokens (or 0 on a miss), follows the position through
prefill as long as it had reached it, and stops for good at the first decoded token.
"""

from .cache import Lease, PrefixCache, SnapshotInfo, Stored
from .config import CacheConfig, DiskConfig, default_directory, default_disk_bytes, default_ram_bytes
from .disk import FolderInfo, clear_directory, list_directory
from .flight import Flight, Flights
from .key import PAGE_TOKENS, CacheError, MediaSpan, Namespace, PromptKey, fingerprint
from .policy import Cuts, Markers, Placement, canonical_cuts, plan, snap
from .snapshot import Geometry, Kind, Provenance, StateSource
from .stats import MissReason, Outcome, Stats, Tier

__all__ = [
    "PAGE_TOKENS", "CacheConfig", "CacheError", "Cuts", "DiskConfig", "Flight", "Flights", "FolderInfo", "Geometry",
    "Kind", "Lease", "Markers", "MediaSpan", "MissReason", "Namespace", "Outcome", "Placement", "PrefixCache",
    "PromptKey", "Provenance", "SnapshotInfo", "StateSource", "Stats", "Stored", "Tier", "canonical_cuts",
    "clear_directory", "default_directory", "default_disk_bytes", "default_ram_bytes", "fingerprint",
    "list_directory", "plan", "snap",
]  # fmt: skip
