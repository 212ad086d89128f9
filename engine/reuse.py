"""The prefix cache in front of the model: what a prompt need not compute, and what it leaves behind for the next.

Joins the cache, which knows no model, with states and tokens. Every prefill is cut here, with a cache or without, so
that both have the same bits.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np

from engine import cpu as cpu_module
from engine import formats as formats_module
from engine import model as model_module
from engine import segments as segments_module
from engine import state as state_module
from engine import vision as vision_module
from engine import weights as weights_module
from engine.config import CacheSettings, EngineConfig
from engine.core import CacheEntry, CacheOptions, CacheReport, Prompt, UInt8Array
from engine.cpu import CpuEngine, build_digest, resolve_tier
from engine.errors import ConfigError, RequestError
from engine.memory import touch
from engine.model import PausedPass
from engine.placement import spare_bytes
from engine.segments import CardRule, segments, stretches
from engine.state import SequenceState, page_bytes, recurrent_bytes
from engine.tokenizer import Tokenizer
from engine.vision import PIXEL_RULE
from engine.weights import Weights
from prefix_cache import (
    PAGE_TOKENS,
    CacheConfig,
    CacheError,
    Checkpoint,
    Cuts,
    DiskConfig,
    FolderInfo,
    Geometry,
    Kind,
    Lease,
    Markers,
    MediaSpan,
    Namespace,
    Outcome,
    Parked,
    PrefixCache,
    PromptKey,
    SnapshotInfo,
    canonical_cuts,
    clear_directory,
    common_tokens,
    default_directory,
    default_disk_bytes,
    default_ram_bytes,
    fingerprint,
    list_directory,
    plan,
    snap,
)
from prefix_cache import policy as policy_module

log = logging.getLogger("fermion.cache")

# The matrix products of a token do not depend on its neighbours, and the delta rule works in chunks of 64 from the
# start of a segment: a state is exact at every 64th token behind a cut.
_CUTS = Cuts.GRID
# Python that decides bits beside the kernels, or what they mean: where prompts are cut, what a layer is given, where
# pictures stand, how a state lies in memory and in which order it is kept.
_RULES = (
    cpu_module, formats_module, model_module, segments_module, state_module, vision_module, weights_module,
    sys.modules[__name__], policy_module,
)  # fmt: skip
# By default the cache takes at most this part of the memory that weights leave: contexts need the rest.
_MEMORY_SHARE = 0.25
_LEAST_SNAPSHOTS = 2


def template_markers(tokenizer: Tokenizer) -> Markers | None:
    """The tokens that open turns and pictures. None: the vocabulary has no turns."""
    start = tokenizer.added_tokens.get("<|im_start|>")
    newline = tokenizer.encode("\n", allow_special=False)
    assistant = tokenizer.encode("assistant", allow_special=False)
    picture = tokenizer.added_tokens.get("<|vision_start|>")
    return None if start is None or len(newline) != 1 else Markers(start, newline[0], assistant[0], picture)


def cache_bytes(weights: Weights, config: EngineConfig) -> int:
    """RAM that the prefix cache of a model will take; 0: none is wanted, or memory is too short for one."""
    if config.cache is None:
        return 0
    if config.cache.ram_bytes is not None:
        return config.cache.ram_bytes
    spare = spare_bytes(weights.config, config, weights.file.resident_bytes)
    size = min(default_ram_bytes(), int(spare * _MEMORY_SHARE))
    if size < _LEAST_SNAPSHOTS * (recurrent_bytes(weights.config) + page_bytes(weights.config, _kv_f32(config))):
        log.warning("Memory is too short for a prefix cache; every prompt will be computed from its first token.")
        return 0
    return size


def _kv_f32(config: EngineConfig) -> bool:
    return config.compute == "f32"


@dataclass(frozen=True, slots=True)
class Reuse:
    """Everything about prompts that outlives one. markers: where turns begin. pass_tokens: most tokens of one pass of
    the CPU. cache None: nothing is kept. card: what a card computes, None if there is none."""

    markers: Markers | None
    pass_tokens: int
    cache: ModelCache | None
    card: CardRule | None = None

    def begin(self, prompt: Prompt, state: SequenceState, options: CacheOptions) -> PromptRun:
        """A run of `prompt` in the empty `state`, which may thereby get as far as the cache reaches."""
        return PromptRun(self, prompt, state, options)

    def close(self) -> None:
        """Write what waits for the disk. Idempotent."""
        if self.cache is not None:
            self.cache.close()


class ModelCache:
    """The prefix cache of one loaded model. Its public methods are `engine.core.CacheControl`.

    interrupted: the last pass that was left in its middle, until it is taken up again.
    """

    def __init__(self, weights: Weights, config: EngineConfig, ram_bytes: int, cpu: CpuEngine, card: str = "") -> None:
        """Opens the disk tier and starts the cache's threads: on whatever processors the caller may use.

        config.cache is set. cpu: its threads copy states. card: names everything about a card that decides bits, empty
        without one. ConfigError if ram_bytes cannot hold one snapshot.
        """
        assert config.cache is not None
        geometry = Geometry(page_bytes(weights.config, _kv_f32(config)), recurrent_bytes(weights.config))
        disk = _disk(config.cache)
        try:
            settings = CacheConfig(ram_bytes, disk, _CUTS)
            digest = _fingerprint(weights, config, card)
            self.prefix = PrefixCache(settings, digest, geometry, copy=cpu.copy, touch=touch)
        except CacheError as error:
            raise ConfigError(f"the prefix cache cannot work with {ram_bytes} bytes of memory: {error}") from None
        self.interrupted: Interrupted | None = None
        self.prefix.start()
        gauges = self.prefix.gauges()
        if disk is None or not gauges["disk_readable"]:
            place = "nothing on disk"
        elif not gauges["disk_writable"]:
            place = f"{disk.directory} read only ({gauges['disk_failure']})"
        else:
            place = f"{_size(disk.capacity_bytes)} in {disk.directory}"
        log.info("Prefix cache: %s of memory, %s.", _size(ram_bytes), place)

    def namespace(self, options: CacheOptions) -> Namespace:
        """Where a request's prompts belong."""
        return Namespace(self.prefix.fingerprint, options.scope, options.salt)

    def entries(self, scope: bytes | None, limit: int) -> list[CacheEntry]:
        """See CacheControl."""
        return [_entry(info) for info in self.prefix.inspect(scope_tag=self._tag(scope), limit=limit)]

    def pin(self, entry_id: str, pinned: bool, scope: bytes | None) -> bool:
        """See CacheControl."""
        try:
            return self.prefix.pin(entry_id, pinned, scope_tag=self._tag(scope))
        except CacheError as error:
            raise RequestError(f"The snapshot cannot be pinned: {error}.", param="id", code="pin_limit") from None

    def clear(self, scope: bytes | None) -> int:
        """See CacheControl."""
        left = self.interrupted
        if left is not None and scope in (None, left.key.namespace.scope):
            self.interrupted = None
            left.parked.drop()
        return self.prefix.clear(scope_tag=self._tag(scope))

    def covered(self, prompt: Prompt, options: CacheOptions) -> int:
        """See CacheControl."""
        key = prompt_key(prompt, self.namespace(options))
        # One more token, whichever: lookups leave the last one to be computed.
        return self.prefix.peek(key.extended([0]), exact=options.exact).position

    def counters(self) -> Mapping[str, int | float | Mapping[str, int]]:
        """See CacheControl."""
        return self.prefix.stats.as_dict()

    def gauges(self) -> Mapping[str, int | float | str | None]:
        """See CacheControl."""
        return self.prefix.gauges()

    def close(self) -> None:
        """Write what waits for the disk. Idempotent."""
        self.prefix.close()

    def _tag(self, scope: bytes | None) -> bytes | None:
        return None if scope is None else Namespace(self.prefix.fingerprint, scope).scope_tag()


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A pass of the CPU that was left between two layers, from position `start` to `end` of the prompt `key`. shape: of
    the residual stream; canonical: nothing but prefill was in the state; parked: the bytes."""

    key: PromptKey
    start: int
    end: int
    layers: int
    shape: tuple[int, ...]
    canonical: bool
    parked: Parked


class PromptRun:
    """One prompt on its way into a state.

    state: stands at the resume point. report: what the cache gave. stretches: what is left to compute, in order (of a
    shadow: to its snapshot); `reached` must be called behind each one, and at its stops.
    """

    def __init__(self, reuse: Reuse, prompt: Prompt, state: SequenceState, options: CacheOptions) -> None:
        """Use `Reuse.begin`."""
        self.state = state
        self.report: CacheReport | None = None
        self._shelf = reuse.cache
        self._cache = None if reuse.cache is None else reuse.cache.prefix
        self._options = options
        self._lease: Lease | None = None
        self._exact_tokens = 0
        self._canonical = True  # nothing but prefill of this prompt's own segments is in the state
        self._checkpoint: Checkpoint | None = None
        self._last_kept = 0
        namespace = Namespace(bytes(32)) if reuse.cache is None else reuse.cache.namespace(options)
        self._key = prompt_key(prompt, namespace)
        self._cuts = canonical_cuts(self._key.token_ids, reuse.markers, self._key.media)
        self._kinds: dict[int, Kind] = {}
        try:
            self._resume(reuse, prompt)
        except BaseException:
            self.close()
            raise

    def _resume(self, reuse: Reuse, prompt: Prompt) -> None:
        """Take from the cache what it has, and see what is left to do."""
        options = self._options
        if self._cache is not None:
            outcome, self._lease = self._cache.acquire(
                self._key, exact=options.exact, read=options.read, shadow=options.shadow
            )
            self.report = _report(outcome)
            if self._lease is not None:
                self._adopt(self._lease)
            if options.write:
                self._kinds = self._placements(prompt.boundaries, outcome.matched)
        self.resumed = self.state.position
        self._segments = segments(self._cuts, self._key.tokens, reuse.card)
        self.stretches = stretches(self._segments, self.resumed, self._kinds, reuse.pass_tokens)
        if options.shadow:
            end = max(self._kinds, default=self.resumed)
            self.stretches = [stretch for stretch in self.stretches if stretch.end <= end or end in stretch.stops]

    def _placements(self, boundaries: Sequence[int], matched: int) -> dict[int, Kind]:
        """Where to take which snapshot."""
        start, end = self.state.position, self._key.tokens
        if self._options.shadow:
            # Wherever the common part ends, unless only what gives the bits of an uncached run will be asked for.
            last = snap(end, self._cuts, _CUTS) if self._options.exact else end
            return {last: Kind.SHADOW} if last > start else {}
        placements = plan(end, boundaries, self._cuts, _CUTS, resume=start, matched=matched)
        return {placement.position: placement.kind for placement in placements}

    def _adopt(self, lease: Lease) -> None:
        state = self.state
        lease.restore([state.conv, state.ssm])
        state.adopt(lease.pages, lease.tail)
        state.position, state.rope_delta = lease.position, lease.rope_delta
        self._exact_tokens = lease.exact_tokens
        self._canonical = lease.exact_tokens == lease.position
        self._last_kept = lease.position

    def reached(self) -> None:
        """The state has come to the end of a stretch or to a stop inside."""
        position = self.state.position
        if self._canonical:
            part = next(part for part in self._segments if part.start < position <= part.end)
            self._exact_tokens = position if position >= part.settled else part.start
            if self._options.shadow:
                # It ends anywhere, but prompts that go on are not cut there.
                self._exact_tokens = min(self._exact_tokens, snap(position, self._cuts, _CUTS))
        if position in self._kinds:
            self._store(self._key, self._kinds[position])
            self._last_kept = position
        elif position == self._key.tokens:
            self._drop_checkpoint()
        elif self._cache is not None and self._options.write and position - self._last_kept >= PAGE_TOKENS:
            self._checkpoint = self._cache.checkpoint(
                self._key, self.state, position, self._exact_tokens, self._checkpoint
            )
            self._last_kept = position

    def pause(self, paused: PausedPass, end: int) -> None:
        """Prefill will be given up in the middle of the pass that would have come to `end`: keep what it has done."""
        if self._cache is None or self._shelf is None or not self._options.write or end > self._key.limit:
            return
        parked = self._cache.park(
            [paused.hidden, *self._pass_arrays(end)], beside=self._checkpoint, evict=not self._options.shadow
        )
        if parked is not None:
            self._shelf.interrupted = Interrupted(
                self._key, self.state.position, end, paused.layers, paused.hidden.shape, self._canonical, parked
            )

    def paused_pass(self, end: int) -> PausedPass | None:
        """Where the pass from the state's position to `end` goes on, if that very pass was interrupted; the state is
        then the one of that moment."""
        left = None if self._shelf is None else self._shelf.interrupted
        if left is None or not self._options.read or (left.start, left.end) != (self.state.position, end):
            return None
        if common_tokens(left.key, self._key) < end or (self._options.exact and not left.canonical):
            return None
        assert self._shelf is not None
        self._shelf.interrupted = None
        self.state.reserve(end)
        hidden = np.empty(left.shape, np.float32)
        if not left.parked.restore([hidden, *self._pass_arrays(end)]):
            return None
        self._canonical = self._canonical and left.canonical
        if self.report is not None:
            layers = self.state.config.num_hidden_layers
            self.report = replace(self.report, carried=(end - left.start) * left.layers // layers)
        return PausedPass(left.layers, hidden)

    def _pass_arrays(self, end: int) -> list[UInt8Array]:
        """What a pass from the state's position to `end` writes to, residual stream apart."""
        pages = range(self.state.position // PAGE_TOKENS, -(-end // PAGE_TOKENS))
        return [*self.state.recurrent(), *(self.state.page(index) for index in pages)]

    def cancelled(self) -> None:
        """Prefill was given up in the middle of a segment: what stays is how far the one before it came. The state is
        void afterwards."""
        if self._checkpoint is not None:
            self._checkpoint.keep(self._new_shadow_tokens(self._checkpoint.position))
            self._checkpoint = None

    def ended(self, generated: Sequence[int]) -> None:
        """The tokens of the answer, as far as they are in the state: keep them if the conversation will."""
        count = self.state.position - self._key.tokens
        if self._cache is not None and self._options.write and count > 0 and self._options.keep_reply():
            self._store(self._key.extended(generated[:count]), Kind.REPLY)

    def measured(self, seconds: float) -> None:
        """How long the prompt took from the resume point to its end."""
        if self._cache is not None and self.report is not None:
            self._cache.observe_prefill(self.state.position - self.resumed - self.report.carried, seconds)

    def close(self) -> None:
        """Let the cache reuse the memory that the state borrowed. The state must not be used any more."""
        self._drop_checkpoint()
        if self._lease is not None:
            self._lease.release()

    def _drop_checkpoint(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.drop()
            self._checkpoint = None

    def _store(self, key: PromptKey, kind: Kind) -> None:
        assert self._cache is not None
        position = self.state.position
        self._cache.store(
            key,
            self.state,
            kind,
            position,
            self._exact_tokens,
            replaces=self._checkpoint,
            shadow_tokens=self._new_shadow_tokens(position),
        )
        self._checkpoint = None

    def _new_shadow_tokens(self, position: int) -> int:
        """Tokens computed ahead of demand that a snapshot at `position` stands for, together with those of the
        snapshot that it was built upon; each is told once."""
        if not self._options.shadow or self._cache is None:
            return 0
        computed = position - self.resumed
        self._cache.shadow_computed(computed)
        return computed + (0 if self._lease is None else self._lease.inherit_shadow())


def prompt_key(prompt: Prompt, namespace: Namespace) -> PromptKey:
    """What the cache calls `prompt`."""
    media = [MediaSpan(image.start, image.count, image.digest or None) for image in prompt.images]
    return PromptKey(namespace, prompt.token_ids, media)


def _fingerprint(weights: Weights, config: EngineConfig, card: str) -> bytes:
    """Everything but tokens that decides the bits of a state."""
    parts: dict[str, str | bytes | int | float | bool] = {
        "weights": weights.file.sampled_digest(),
        "files": weights.file.stamp(),
        "model": repr(weights.config),
        "compute": config.compute,
        "tier": resolve_tier(config.simd_tier),
        "kv": "float32" if _kv_f32(config) else "float16",
        "kernels": build_digest(),
        "rules": _source_digest(_RULES),
        "pixels": PIXEL_RULE,
    }
    if card:
        parts["card"] = card
    return fingerprint(parts)


def _source_digest(modules: Sequence[ModuleType]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for module in modules:
        assert module.__file__ is not None
        source = Path(module.__file__).read_bytes()
        digest.update(len(source).to_bytes(8, "little") + source)
    return digest.digest()


def _disk(settings: CacheSettings) -> DiskConfig | None:
    if settings.disk_bytes == 0:
        return None
    try:
        directory = settings.directory or default_directory()
        size = default_disk_bytes(directory) if settings.disk_bytes is None else settings.disk_bytes
    except (CacheError, OSError) as error:
        log.warning("The prefix cache keeps nothing on disk: %s.", error)
        return None
    if size <= 0:
        log.warning("The prefix cache keeps nothing on disk: the file system of %s has no room.", directory)
        return None
    return DiskConfig(directory, size)


def _report(outcome: Outcome) -> CacheReport:
    return CacheReport(
        tokens=outcome.tokens,
        matched=outcome.matched,
        position=outcome.position,
        tier=None if outcome.tier is None else outcome.tier.value,
        load_s=outcome.load_s,
        provenance=None if outcome.provenance is None else outcome.provenance.name.lower(),
        miss_reason=None if outcome.miss_reason is None else outcome.miss_reason.value,
    )


def _entry(info: SnapshotInfo) -> CacheEntry:
    return CacheEntry(
        id=info.id,
        position=info.position,
        kind=info.kind,
        provenance=info.provenance,
        ram_bytes=info.ram_bytes,
        disk_bytes=info.disk_bytes,
        in_ram=info.in_ram,
        on_disk=info.on_disk,
        hits=info.hits,
        age=info.age,
        pinned=info.pinned,
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


# ---- the folders of all models, without one loaded ----


def list_folders(directory: Path | None) -> tuple[Path, list[FolderInfo]]:
    """The cache directory (None: the user's) and what each model has in it. ConfigError if it cannot be read."""
    place = _place(directory)
    try:
        return place, list_directory(place)
    except OSError as error:
        raise ConfigError(f"cache directory {place}: {error.strerror}") from error


def clear_folders(directory: Path | None) -> tuple[int, list[str]]:
    """Delete all models' folders that no process uses: (bytes freed, folders left). ConfigError as above."""
    place = _place(directory)
    try:
        return clear_directory(place)
    except OSError as error:
        raise ConfigError(f"cache directory {place}: {error.strerror}") from error


def _place(directory: Path | None) -> Path:
    try:
        return directory or default_directory()
    except CacheError as error:
        raise ConfigError(f"cache directory: {error}") from None
