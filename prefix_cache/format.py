"""Byte layout of the two kinds of file, with everything a reader must check. Pure: bytes in, values out.

    [prefix 64 B: magic, version, body length, file length, BLAKE2b over all header bytes but itself]
    [body: the record below]  [path: stored page keys, BLAKE2b in the body]  [zeros to 4096]  [payload]

The payload's CRC-32s, one per unit of at least 1 MiB (or one page if pages are larger), lie in the body. Little
endian. A file is written under a temporary name and renamed, and never changes afterwards.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from .key import DIGEST_BYTES, FORMAT_VERSION
from .snapshot import Kind

SNAPSHOT_MAGIC = b"FERMSNAP"
PACK_MAGIC = b"FERMPACK"
ALIGN = 4096
CHECKSUM_UNIT = 1 << 20

_PREFIX = struct.Struct("<8sIIQ8x32s")
_PACK = struct.Struct("<32s32s8s32siIIQQ32s")
_PACK_PAGE = struct.Struct("<32siII")
_SNAPSHOT = struct.Struct("<32s32s8s32siIQqiBBdQQIIQ32s")
PREFIX_BYTES = _PREFIX.size


class FileRejected(Exception):
    """A file is not one that this build wrote whole: torn, flipped, foreign or of another version."""

    def __init__(self, text: str, *, old_version: bool = False) -> None:
        super().__init__(text)
        self.old_version = old_version


@dataclass(frozen=True, slots=True)
class PackHeader:
    """Consecutive KV pages of one prefix. first_depth: number of pages before the first one here.

    pages: (digest, variant, key, CRC-32 of the page) each. path: digest of the keys of all pages before the first.
    """

    fingerprint: bytes
    root: bytes
    scope_tag: bytes
    parent_digest: bytes
    parent_variant: int
    first_depth: int
    page_bytes: int
    pages: tuple[tuple[bytes, int, bytes, int], ...]
    path_bytes: int
    path_digest: bytes


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """One snapshot. depth: full pages below it, the last named (leaf_digest, leaf_variant). tail_key: key of the
    tokens after them. checksums: CRC-32 per unit of the payload (recurrent bytes, then the tail page if any)."""

    fingerprint: bytes
    root: bytes
    scope_tag: bytes
    leaf_digest: bytes
    leaf_variant: int
    depth: int
    position: int
    rope_delta: int
    exact_pages: int
    kind: Kind
    has_tail: bool
    created: float
    recurrent_bytes: int
    page_bytes: int
    tail_key: bytes
    checksums: tuple[int, ...]
    path_bytes: int
    path_digest: bytes


def path_digest(path: bytes) -> bytes:
    """Digest of stored page keys."""
    return hashlib.blake2b(path, digest_size=DIGEST_BYTES, person=b"fermion-path").digest()


def encode_pack(header: PackHeader, path: bytes) -> bytes:
    """Everything before the payload, padded."""
    body = [
        _PACK.pack(
            header.fingerprint, header.root, header.scope_tag, header.parent_digest, header.parent_variant,
            header.first_depth, len(header.pages), header.page_bytes, header.path_bytes, header.path_digest,
        )
    ]  # fmt: skip
    for digest, variant, key, checksum in header.pages:
        body += [_PACK_PAGE.pack(digest, variant, len(key), checksum), key]
    return _frame(PACK_MAGIC, b"".join(body), path, header.page_bytes * len(header.pages))


def encode_snapshot(header: SnapshotHeader, path: bytes) -> bytes:
    """Everything before the payload, padded."""
    body = _SNAPSHOT.pack(
        header.fingerprint, header.root, header.scope_tag, header.leaf_digest, header.leaf_variant, header.depth,
        header.position, header.rope_delta, header.exact_pages, header.kind, header.has_tail, header.created,
        header.recurrent_bytes, header.page_bytes, len(header.tail_key), len(header.checksums),
        header.path_bytes, header.path_digest,
    )  # fmt: skip
    body += header.tail_key + struct.pack(f"<{len(header.checksums)}I", *header.checksums)
    payload = header.recurrent_bytes + header.page_bytes * header.has_tail
    return _frame(SNAPSHOT_MAGIC, body, path, payload)


def _frame(magic: bytes, body: bytes, path: bytes, payload: int) -> bytes:
    size = PREFIX_BYTES + len(body) + len(path)
    start = -(-size // ALIGN) * ALIGN
    digest = _header_digest(magic, FORMAT_VERSION, start + payload, body)
    prefix = _PREFIX.pack(magic, FORMAT_VERSION, len(body), start + payload, digest)
    return b"".join([prefix, body, path, b"\0" * (start - size)])


def _header_digest(magic: bytes, version: int, file_bytes: int, body: bytes) -> bytes:
    h = hashlib.blake2b(digest_size=32, person=b"fermion-head")
    h.update(struct.pack("<8sIQQ", magic, version, len(body), file_bytes))
    h.update(body)
    return h.digest()


def body_length(start: bytes, magic: bytes, file_bytes: int) -> int:
    """Bytes of the body, from the first PREFIX_BYTES of a file of `file_bytes`. Raises FileRejected."""
    if len(start) < PREFIX_BYTES:
        raise FileRejected(f"{len(start)} bytes are too short for a header")
    found, version, length, expected, _ = _PREFIX.unpack_from(start)
    if found != magic:
        raise FileRejected(f"magic is {found!r}, expected {magic!r}")
    if version != FORMAT_VERSION:
        raise FileRejected(f"format version is {version}, expected {FORMAT_VERSION}", old_version=True)
    if expected != file_bytes or PREFIX_BYTES + length > file_bytes:
        raise FileRejected(f"file has {file_bytes} bytes, header says {expected} with a body of {length}")
    return int(length)


def _checked_body(data: bytes, magic: bytes, file_bytes: int) -> bytes:
    length = body_length(data, magic, file_bytes)
    body = data[PREFIX_BYTES : PREFIX_BYTES + length]
    if len(body) < length:
        raise FileRejected("header is cut off")
    digest = _PREFIX.unpack_from(data)[4]
    if _header_digest(magic, FORMAT_VERSION, file_bytes, body) != digest:
        raise FileRejected("header checksum does not match")
    return body


def decode_pack(data: bytes, file_bytes: int) -> PackHeader:
    """Parse prefix and body (`data` may go on beyond). Raises FileRejected."""
    body = _checked_body(data, PACK_MAGIC, file_bytes)
    try:
        return _pack_header(body)
    except struct.error as error:
        raise FileRejected(f"header is not one of this build: {error}") from None


def _pack_header(body: bytes) -> PackHeader:
    (fp, root, scope, parent, parent_variant, first_depth, count, page_bytes, path_bytes, path) = _PACK.unpack_from(
        body
    )
    pages = []
    offset = _PACK.size
    for _ in range(count):
        digest, variant, key_bytes, checksum = _PACK_PAGE.unpack_from(body, offset)
        offset += _PACK_PAGE.size
        pages.append((digest, variant, body[offset : offset + key_bytes], checksum))
        offset += key_bytes
    return PackHeader(fp, root, scope, parent, parent_variant, first_depth, page_bytes, tuple(pages), path_bytes, path)


def decode_snapshot(data: bytes, file_bytes: int) -> SnapshotHeader:
    """Parse prefix and body (`data` may go on beyond). Raises FileRejected."""
    body = _checked_body(data, SNAPSHOT_MAGIC, file_bytes)
    try:
        return _snapshot_header(body)
    except (struct.error, ValueError) as error:  # also of a kind that a later build has
        raise FileRejected(f"header is not one of this build: {error}") from None


def _snapshot_header(body: bytes) -> SnapshotHeader:
    (
        fp, root, scope, leaf, leaf_variant, depth, position, rope_delta, exact_pages, kind, has_tail, created,
        recurrent, page_bytes, tail_bytes, count, path_bytes, path,
    ) = _SNAPSHOT.unpack_from(body)  # fmt: skip
    offset = _SNAPSHOT.size
    tail_key = body[offset : offset + tail_bytes]
    checksums = struct.unpack_from(f"<{count}I", body, offset + tail_bytes)
    return SnapshotHeader(
        fp, root, scope, leaf, leaf_variant, depth, position, rope_delta, exact_pages, Kind(kind), bool(has_tail),
        created, recurrent, page_bytes, tail_key, checksums, path_bytes, path,
    )  # fmt: skip


def pack_bytes_at_most(page_bytes: int, key_bytes: list[int], path_bytes: int) -> int:
    """Upper bound of a pack's file size."""
    header = PREFIX_BYTES + _PACK.size + sum(_PACK_PAGE.size + n for n in key_bytes) + path_bytes
    return header + ALIGN + page_bytes * len(key_bytes)


def snapshot_bytes_at_most(payload_bytes: int, tail_key_bytes: int, checksums: int, path_bytes: int) -> int:
    """Upper bound of a snapshot's file size."""
    return PREFIX_BYTES + _SNAPSHOT.size + tail_key_bytes + 4 * checksums + path_bytes + ALIGN + payload_bytes


def payload_start(body_bytes: int, path_bytes: int) -> int:
    """Offset of the payload in the file."""
    return -(-(PREFIX_BYTES + body_bytes + path_bytes) // ALIGN) * ALIGN
