"""What a cached prefix is called: token ids, pictures and everything else that decides its numbers.

The in-memory index is walked by the token ids themselves (a page key *is* the ids, so a hash collision can
never serve foreign state); the chained digest names the same pages on disk. This module never sees payloads.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAGE_TOKENS = 64
"""Tokens per KV page; also the chunk of the gated delta rule, so that both grids coincide."""

FORMAT_VERSION = 1
"""Part of every digest and of every file header: raising it makes all older content unreachable."""

DIGEST_BYTES = 32
MIN_MEDIA_DIGEST_BYTES = 16

_MEDIA = struct.Struct("<HI")


class CacheError(ValueError):
    """A prefix-cache argument is not acceptable. The text names it, the value and what is accepted."""


def fingerprint(fields: dict[str, str | bytes | int | float | bool]) -> bytes:
    """32-byte digest of everything besides tokens that decides KV and recurrent bits.

    Callers put in weight and quantisation digests, LoRA id and scale, KV and state dtypes, rope settings, vision
    preprocessing and the kernel numerics version. Values are typed: 1, 1.0, "1" and True all differ.
    """
    h = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"fermion-fp")
    for name in sorted(fields):
        value = fields[name]
        data = value if isinstance(value, bytes) else repr(value).encode()
        for part in (name.encode(), type(value).__name__.encode(), data):
            h.update(struct.pack("<Q", len(part)))
            h.update(part)
    return h.digest()


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who may share with whom: prefixes meet only if all three fields are equal.

    fingerprint: result of `fingerprint`; scope: the tenant (a digest of the API key; b"" when there is one user);
    salt: the request's `cache_salt`. Neither scope nor salt is ever written to disk, only their digest.
    """

    fingerprint: bytes
    scope: bytes = b""
    salt: bytes = b""

    def __post_init__(self) -> None:
        if len(self.fingerprint) != DIGEST_BYTES:
            raise CacheError(f"fingerprint has {len(self.fingerprint)} bytes, expected {DIGEST_BYTES}")

    def root(self) -> bytes:
        """Digest at the root of the hash chain."""
        h = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"fermion-root")
        for part in (struct.pack("<I", FORMAT_VERSION), self.fingerprint, self.scope, self.salt):
            h.update(struct.pack("<Q", len(part)))
            h.update(part)
        return h.digest()

    def scope_tag(self) -> bytes:
        """8-byte digest of the scope: tells a change of model or salt from another tenant's prompt."""
        return hashlib.blake2b(self.scope, digest_size=8, person=b"fermion-scope").digest()


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A picture's placeholder tokens [start, start + count). digest: over pixels, mode, size and preprocessing,
    at least 16 bytes; None when unknown, and then nothing from `start` on is cached (placeholder ids are all
    equal, so guessing would serve another picture's state)."""

    start: int
    count: int
    digest: bytes | None


def page_digest(parent: bytes, page_key: bytes) -> bytes:
    """Chained name of a page: digest over the parent's digest and this page's key."""
    return hashlib.blake2b(parent + page_key, digest_size=DIGEST_BYTES).digest()


class PromptKey:
    """One token sequence as the cache sees it.

    token_ids: integer array or sequence [tokens], each in [0, 2**31). media: ascending, not overlapping.
    `limit`: tokens that may be cached, less than `tokens` only if a picture has no digest. `raw`: the ids as bytes;
    `known_media`: pictures before `limit`.
    Raises CacheError for ids or spans outside those bounds.
    """

    __slots__ = ("known_media", "limit", "media", "namespace", "raw", "root", "token_ids", "tokens")

    def __init__(
        self,
        namespace: Namespace,
        token_ids: npt.ArrayLike,
        media: Sequence[MediaSpan] = (),
    ) -> None:
        ids = np.asarray(token_ids)
        if ids.ndim != 1:
            raise CacheError(f"token_ids has {ids.ndim} dimensions, expected 1")
        if ids.size and ids.dtype.kind not in "iu":
            raise CacheError(f"token_ids has dtype {ids.dtype}, expected integers")
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**31):
            raise CacheError(f"token ids span [{ids.min()}, {ids.max()}], expected [0, 2**31)")
        self.namespace = namespace
        self.root = namespace.root()
        self.token_ids: npt.NDArray[np.int32] = np.array(ids, dtype="<i4")
        self.token_ids.flags.writeable = False
        self.tokens = int(self.token_ids.size)
        self.raw = self.token_ids.tobytes()
        self.media = tuple(media)
        self.limit = self.tokens
        end = 0
        for span in self.media:
            if span.start < end or span.count <= 0 or span.start + span.count > self.tokens:
                raise CacheError(
                    f"media span [{span.start}, {span.start + span.count}) is empty, out of order or outside "
                    f"[{end}, {self.tokens})"
                )
            if span.digest is None:
                self.limit = min(self.limit, span.start)
            elif len(span.digest) < MIN_MEDIA_DIGEST_BYTES:
                raise CacheError(f"media digest has {len(span.digest)} bytes, expected >= {MIN_MEDIA_DIGEST_BYTES}")
            end = span.start + span.count
        self.known_media = tuple(s for s in self.media if s.digest is not None and s.start < self.limit)

    def extended(self, token_ids: npt.ArrayLike) -> PromptKey:
        """The key of this sequence followed by `token_ids` (generated text: no media in it)."""
        more = np.asarray(token_ids, dtype=np.int64)
        return PromptKey(self.namespace, np.concatenate([self.token_ids.astype(np.int64), more]), self.media)

    def span_key(self, start: int, end: int) -> bytes:
        """Key of tokens [start, end) inside one page: their ids, then each picture that reaches into it."""
        raw = self.raw[4 * start : 4 * end]
        if not self.known_media:
            return raw
        for span in self.known_media:
            first = max(start, span.start)
            if first < min(end, span.start + span.count):
                assert span.digest is not None
                raw += _MEDIA.pack(first - start, first - span.start) + span.digest
        return raw

    def page_key(self, index: int) -> bytes:
        """Key of full page `index`: tokens [64 * index, 64 * index + 64)."""
        return self.span_key(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)

    def path(self, pages: int) -> bytes:
        """All page keys of the first `pages` pages, joined: what a file's stored ids are compared with."""
        if not self.known_media:
            return self.raw[: 4 * PAGE_TOKENS * pages]
        return b"".join(self.page_key(i) for i in range(pages))


def common_tokens(a: PromptKey, b: PromptKey) -> int:
    """Length of the common cacheable prefix; 0 across namespaces. Pictures with other digests end it."""
    if a.root != b.root:
        return 0
    n = min(a.limit, b.limit)
    differ = np.flatnonzero(a.token_ids[:n] != b.token_ids[:n])
    if differ.size:
        n = int(differ[0])
    for left, right in zip(a.media, b.media, strict=False):
        if min(left.start, right.start) >= n:
            break
        if left != right:
            return min(left.start, right.start)
    longer = a.media if len(a.media) > len(b.media) else b.media
    for span in longer[min(len(a.media), len(b.media)) :]:
        if span.start < n:
            return span.start
    return n
