"""A fake sequence state whose bytes are a function of its tokens, so that any wrong byte served is seen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefix_cache import (
    PAGE_TOKENS,
    CacheConfig,
    Cuts,
    DiskConfig,
    Geometry,
    Kind,
    Lease,
    MediaSpan,
    Namespace,
    PrefixCache,
    PromptKey,
    Stored,
    fingerprint,
)

FINGERPRINT = fingerprint({"weights": b"w" * 32, "kernels": 1})
SMALL = Geometry(page_bytes=64, recurrent_bytes=200)
MEBIBYTE = Geometry(page_bytes=1 << 18, recurrent_bytes=(2 << 20) + 1000)


def _bytes(seed: bytes, count: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(hashlib.shake_128(seed).digest(count), dtype=np.uint8).copy()


class FakeState:
    """State after `position` tokens of `key`, of which the first `exact_tokens` were prefilled canonically."""

    def __init__(self, key: PromptKey, position: int, exact_tokens: int | None = None, geometry: Geometry = SMALL):
        self.key, self.position, self.geometry = key, position, geometry
        self.exact = position if exact_tokens is None else min(exact_tokens, position)
        self.rope_delta = -position
        self.layers: list[int] = [position, position]

    def _label(self, end: int) -> bytes:
        made = b"P" if end <= self.exact else b"D%d" % (self.exact // PAGE_TOKENS)
        media = b"".join(s.digest or b"?" for s in self.key.media if s.start < end)
        return made + self.key.root + self.key.token_ids[:end].tobytes() + media

    def layer_positions(self) -> Sequence[int]:
        return self.layers

    def page(self, index: int) -> npt.NDArray[np.uint8]:
        end = min((index + 1) * PAGE_TOKENS, self.position)
        return _bytes(b"page" + self._label(end), self.geometry.page_bytes)

    def recurrent(self) -> Sequence[npt.NDArray[np.uint8]]:
        data = _bytes(b"rec" + self._label(self.position), self.geometry.recurrent_bytes)
        cut = self.geometry.recurrent_bytes // 3
        return [data[:cut], data[cut:]]


def make_key(
    tokens: Sequence[int], salt: bytes = b"", scope: bytes = b"", media: Sequence[MediaSpan] = (), fp: bytes = b""
) -> PromptKey:
    return PromptKey(Namespace(fp or FINGERPRINT, scope, salt), tokens, media)


def make_cache(
    blocks: int = 1000, geometry: Geometry = SMALL, disk: DiskConfig | None = None, fp: bytes = FINGERPRINT, **extra
) -> PrefixCache:
    """A cache of `blocks` arena blocks that prefers any reuse to recompute."""
    config = CacheConfig(
        ram_bytes=blocks * geometry.page_bytes, disk=disk, cuts=Cuts.ANY, prefill_tokens_per_s=1.0,
        ghosts=extra.pop("ghosts", 2000),
    )  # fmt: skip
    return PrefixCache(config, fp, geometry, **extra)


def disk_config(directory: Path, **changes) -> DiskConfig:
    settings = {"capacity_bytes": 1 << 30, "free_floor_bytes": 0, "write_delay_s": 0.0}
    return DiskConfig(directory=directory, **(settings | changes))


def store(
    cache: PrefixCache, key: PromptKey, position: int, exact: int | None = None, kind: Kind = Kind.MESSAGE
) -> Stored:
    state = FakeState(key, position, exact, cache.geometry)
    return cache.store(key, state, kind, position, position if exact is None else exact)


def assert_right(lease: Lease, key: PromptKey, geometry: Geometry = SMALL) -> None:
    """Every byte of the lease is what the fake state of these tokens has."""
    state = FakeState(key, lease.position, lease.exact_tokens, geometry)
    assert lease.rope_delta == -lease.position
    assert len(lease.pages) == lease.position // PAGE_TOKENS
    for index, page in enumerate(lease.pages):
        assert np.array_equal(page, state.page(index)), f"page {index}"
    if lease.position % PAGE_TOKENS:
        assert lease.tail is not None
        assert np.array_equal(lease.tail, state.page(len(lease.pages)))
    else:
        assert lease.tail is None
    expected = state.recurrent()
    got = [np.zeros_like(part) for part in expected]
    lease.restore(got)
    for left, right in zip(got, expected, strict=True):
        assert np.array_equal(left, right)


def hit(cache: PrefixCache, key: PromptKey, exact: bool = False) -> int:
    """Position of the hit (0: none), its bytes checked, lease released."""
    outcome, lease = cache.acquire(key, exact=exact)
    if lease is None:
        assert outcome.position == 0
        return 0
    with lease:
        assert outcome.position == lease.position
        assert_right(lease, key, cache.geometry)
        return lease.position


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()
