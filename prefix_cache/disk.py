"""The disk tier: one file per snapshot, shared packs of KV pages, one writer per directory.

Owns file names, sizes, checksums, the write budget and the decision that the disk can no longer be trusted.
Knows nothing of the index: the cache tells it what to write and gets records back at start. A failure here is
never a failure of a request.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import format as fmt
from .arena import UInt8Array
from .config import DiskConfig
from .files import Files
from .key import DIGEST_BYTES
from .snapshot import Geometry
from .stats import Stats

log = logging.getLogger("fermion.prefix_cache")

PACK_PAGES = 16
"""Pages per pack: 1,024 tokens, the canonical segment, so that a dead branch wastes at most that much."""

_FIRST_READ = 8192
_LOCK = "lock"
_FOREIGN_PACKS = 1000
_DAY_S = 86400.0


class PageMissing(Exception):
    """A pack is gone (another process or a person deleted it)."""


@dataclass(frozen=True, slots=True)
class PageToWrite:
    """One page for `write_pack`."""

    digest: bytes
    variant: int
    key: bytes
    view: UInt8Array


class DiskTier:
    """One model's folder. Thread-safe as far as the cache uses it: one writer at a time, any readers.

    writable: this process holds the folder's lock and no write has failed. readable: no read has failed.
    used_bytes: files of this folder; foreign_bytes: those of other fingerprints, which share the cap.
    foreign_first_pages: (scope tag, key of the first page) of prompts seen under other fingerprints.
    """

    def __init__(
        self,
        config: DiskConfig,
        fingerprint: bytes,
        geometry: Geometry,
        stats: Stats,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.fingerprint, self.geometry, self.stats = config, fingerprint, geometry, stats
        self.files = files or Files()
        self._clock = clock
        self.folder = config.directory / fingerprint.hex()
        self.writable = False
        self.readable = False
        self.failure: str | None = None
        self.used_bytes = 0
        self.foreign_bytes = 0
        self.foreign_first_pages: set[tuple[bytes, bytes]] = set()
        self._counting = threading.Lock()
        self._lock_fd: int | None = None
        self._budget = float(config.write_burst_bytes)
        self._budget_at = clock()
        self._unit_pages = max(1, fmt.CHECKSUM_UNIT // geometry.page_bytes)

    # ---- start and end ----

    def open(self) -> None:
        """Create and lock the folder, delete what no one can use. On failure the tier stays off."""
        try:
            self.files.make_directory(self.folder)
        except OSError as error:
            self._fail("cannot create its directory", error, reads_too=True)
            return
        self.readable = True
        try:
            self._lock_fd = self.files.try_lock(self.folder / _LOCK)
        except OSError as error:
            self._fail("directory is not writable", error, reads_too=False)
            return
        if self._lock_fd is None:
            self.failure = "another process writes this directory"
            log.warning("prefix cache: %s is in use by another process; reading only", self.folder)
            return
        self.writable = True
        try:
            os.utime(self.folder / _LOCK)
            self._collect_foreign()
        except OSError as error:
            self._fail("cannot clean its directory", error, reads_too=False)

    def close(self) -> None:
        """Release the lock."""
        if self._lock_fd is not None:
            self.files.close(self._lock_fd)
            self._lock_fd = None
        self.writable = self.readable = False

    def _collect_foreign(self) -> None:
        """Delete folders of other fingerprints that are unused and old, or whose bytes the cap does not allow."""
        folders = []
        for name in self.files.names(self.config.directory):
            folder = self.config.directory / name
            if folder == self.folder or not _is_model_folder(folder):
                continue
            lock = folder / _LOCK
            used_at = lock.stat().st_mtime if lock.exists() else 0.0
            folders.append((used_at, folder, folder_bytes(folder)))
        folders.sort()
        total = sum(size for _, _, size in folders)
        for used_at, folder, size in folders:
            self._note_foreign(folder)
            if total <= self.config.capacity_bytes // 2 and time.time() - used_at <= self.config.foreign_ttl_s:
                continue
            if remove_folder(folder, self.files):
                self.stats.disk_foreign_removed += 1
                total -= size
        self.foreign_bytes = total

    def _note_foreign(self, folder: Path) -> None:
        """Remember how the prompts in a foreign folder begin, so that their misses can be explained."""
        names = [name for name in self.files.names(folder) if name.endswith(".kv")]
        for name in names[:_FOREIGN_PACKS]:
            try:
                size, data = self._read_header(folder / name, fmt.PACK_MAGIC)
                header = fmt.decode_pack(data, size)
            except (fmt.FileRejected, FileNotFoundError):
                continue
            if header.first_depth == 0 and header.pages:
                self.foreign_first_pages.add((header.scope_tag, header.pages[0][2]))

    def scan(self) -> tuple[list[tuple[str, int, fmt.PackHeader]], list[tuple[str, int, fmt.SnapshotHeader]]]:
        """Headers of all usable files, (name, bytes, header) each; unusable ones are deleted and counted."""
        packs: list[tuple[str, int, fmt.PackHeader]] = []
        snapshots: list[tuple[str, int, fmt.SnapshotHeader]] = []
        if not self.readable:
            return packs, snapshots
        try:
            names = self.files.names(self.folder)
        except OSError as error:
            self._fail("cannot list its directory", error, reads_too=True)
            return packs, snapshots
        for name in names:
            try:
                if name.endswith(".kv"):
                    size, data = self._read_header(self.folder / name, fmt.PACK_MAGIC)
                    pack = fmt.decode_pack(data, size)
                    self._check_pack(pack)
                    packs.append((name, size, pack))
                elif name.endswith(".snap"):
                    size, data = self._read_header(self.folder / name, fmt.SNAPSHOT_MAGIC)
                    snapshot = fmt.decode_snapshot(data, size)
                    self._check_snapshot(snapshot)
                    snapshots.append((name, size, snapshot))
                else:
                    if name.startswith("tmp-"):
                        self.discard(name)
                    continue
                self.used_bytes += size
            except FileNotFoundError:
                continue
            except fmt.FileRejected as error:
                if error.old_version:
                    self.stats.disk_old_version_removed += 1
                else:
                    self.stats.disk_corrupt += 1
                self.discard(name)
            except OSError as error:
                self._fail("cannot read a header", error, reads_too=True)
                return [], []
        return packs, snapshots

    def _read_header(self, path: Path, magic: bytes) -> tuple[int, bytes]:
        fd = self.files.open_read(path)
        try:
            size = self.files.size(fd)
            return size, self._header_bytes(fd, magic, size)
        finally:
            self.files.close(fd)

    def _check_pack(self, header: fmt.PackHeader) -> None:
        if header.fingerprint != self.fingerprint or header.page_bytes != self.geometry.page_bytes:
            raise fmt.FileRejected("pack is of another model or page size")

    def _check_snapshot(self, header: fmt.SnapshotHeader) -> None:
        if header.fingerprint != self.fingerprint:
            raise fmt.FileRejected("snapshot is of another model")
        if (header.page_bytes, header.recurrent_bytes) != (self.geometry.page_bytes, self.geometry.recurrent_bytes):
            raise fmt.FileRejected("snapshot has other payload sizes")

    # ---- write ----

    def admits(self, nbytes: int) -> bool:
        """Whether budget and free space allow `nbytes` more, once files above the cap have made room for them."""
        if not self.writable:
            return False
        now = self._clock()
        rate = self.config.write_bytes_per_day / _DAY_S
        self._budget = min(float(self.config.write_burst_bytes), self._budget + max(0.0, now - self._budget_at) * rate)
        self._budget_at = now
        if nbytes > self._budget:
            self.stats.disk_skipped_budget += 1
            if self.stats.disk_skipped_budget == 1:
                log.warning(
                    "prefix cache: %s has taken the %d bytes that it may in one go; writing goes on at %d bytes a day",
                    self.folder, self.config.write_burst_bytes, self.config.write_bytes_per_day,
                )  # fmt: skip
            return False
        try:
            free = self.files.free_bytes(self.folder)
        except OSError as error:
            self._fail("cannot ask for free space", error, reads_too=False)
            return False
        if free + max(0, self.over_bytes + nbytes) - nbytes < self.config.free_floor_bytes:
            self.stats.disk_skipped_space += 1
            if self.stats.disk_skipped_space == 1:
                log.warning(
                    "prefix cache: %d bytes are free in %s, of which %d are left to others; nothing is written until "
                    "there are more",
                    free, self.folder, self.config.free_floor_bytes,
                )  # fmt: skip
            return False
        return True

    @property
    def over_bytes(self) -> int:
        """Bytes above the cap (negative: room left)."""
        return self.used_bytes + self.foreign_bytes - self.config.capacity_bytes

    def write_pack(
        self,
        root: bytes,
        scope_tag: bytes,
        parent: tuple[bytes, int],
        first_depth: int,
        pages: Sequence[PageToWrite],
        path: bytes,
    ) -> tuple[str, int]:
        """Write consecutive pages after `parent` (digest, variant); path: keys of all pages before the first.

        Returns (name, bytes). Raises OSError after switching the tier off.
        """
        assert len(parent[0]) == DIGEST_BYTES
        header = fmt.PackHeader(
            self.fingerprint, root, scope_tag, parent[0], parent[1], first_depth, self.geometry.page_bytes,
            tuple((p.digest, p.variant, p.key, zlib.crc32(p.view.data)) for p in pages),
            len(path), fmt.path_digest(path),
        )  # fmt: skip
        name = f"{pages[-1].digest[:8].hex()}-{secrets.token_hex(4)}.kv"
        return name, self._write(name, [fmt.encode_pack(header, path), *(p.view for p in pages)])

    def write_snapshot(self, header: fmt.SnapshotHeader, path: bytes, payload: Sequence[UInt8Array]) -> tuple[str, int]:
        """Write one snapshot. Returns (name, bytes). Raises OSError after switching the tier off."""
        name = f"{header.leaf_digest[:8].hex()}-{header.position}-{secrets.token_hex(4)}.snap"
        return name, self._write(name, [fmt.encode_snapshot(header, path), *payload])

    def checksums(self, payload: Sequence[UInt8Array]) -> tuple[int, ...]:
        """CRC-32 of each unit of a snapshot payload, given as arena blocks cut to what is stored."""
        return tuple(self._unit_checksums(payload))

    def _unit_checksums(self, payload: Sequence[UInt8Array]) -> Iterator[int]:
        for start in range(0, len(payload), self._unit_pages):
            value = 0
            for block in payload[start : start + self._unit_pages]:
                value = zlib.crc32(block.data, value)
            yield value

    def _write(self, name: str, buffers: Sequence[UInt8Array | bytes]) -> int:
        temporary = self.folder / f"tmp-{os.getpid()}-{secrets.token_hex(4)}"
        started = time.perf_counter()
        size = sum(len(b) if isinstance(b, bytes) else b.nbytes for b in buffers)
        try:
            fd = self.files.create(temporary)
            try:
                self.files.write_all(fd, buffers)
            finally:
                self.files.close(fd)
            self.files.rename(temporary, self.folder / name)
        except OSError as error:
            self._fail("write failed", error, reads_too=error.errno == errno.EIO)
            try:
                self.files.unlink(temporary)
            except OSError:
                log.debug("prefix cache: %s is left for the next start to delete", temporary)
            raise
        self._budget -= size
        with self._counting:
            self.used_bytes += size
            self.stats.disk_written_bytes += size
            self.stats.disk_writes += 1
            self.stats.save_seconds += time.perf_counter() - started
        return size

    def discard(self, name: str, nbytes: int = 0) -> None:
        """Delete a file of `nbytes` counted bytes; only the folder's writer deletes."""
        with self._counting:
            self.used_bytes -= nbytes
        if self._lock_fd is None:
            return
        try:
            self.files.unlink(self.folder / name)
        except OSError as error:
            self._fail("cannot delete a file", error, reads_too=False)

    # ---- read ----

    def read_pages(
        self, name: str, wanted: Sequence[tuple[int, UInt8Array]], path: bytes, keys: Sequence[bytes]
    ) -> int:
        """Fill views with pages (ascending index in the pack). Returns payload bytes.

        path: the caller's keys of all pages before the pack; keys: those of the wanted pages. Both are compared
        with what is stored. Raises PageMissing, FileRejected, or OSError after switching the tier off.
        """
        try:
            return self._read_pages(name, wanted, path, keys)
        except FileNotFoundError as error:
            raise PageMissing(name) from error
        except OSError as error:
            self._fail("read failed", error, reads_too=True)
            raise

    def _read_pages(
        self, name: str, wanted: Sequence[tuple[int, UInt8Array]], path: bytes, keys: Sequence[bytes]
    ) -> int:
        fd = self.files.open_read(self.folder / name)
        try:
            size = self.files.size(fd)
            header = fmt.decode_pack(self._header_bytes(fd, fmt.PACK_MAGIC, size), size)
            self._check_pack(header)
            body = fmt.body_length(self.files.read(fd, fmt.PREFIX_BYTES, 0), fmt.PACK_MAGIC, size)
            self._check_path(fd, body, header.path_bytes, header.path_digest, path)
            start = fmt.payload_start(body, header.path_bytes)
            for (index, _), key in zip(wanted, keys, strict=True):
                if index >= len(header.pages) or header.pages[index][2] != key:
                    raise fmt.FileRejected(f"{name}: stored token ids of page {index} differ")
            for run in _runs(wanted):
                views = [view for _, view in run]
                offset = start + run[0][0] * self.geometry.page_bytes
                if self.files.read_into(fd, views, offset) != sum(v.nbytes for v in views):
                    raise fmt.FileRejected(f"{name} is cut off")
                for index, view in run:
                    if zlib.crc32(view.data) != header.pages[index][3]:
                        raise fmt.FileRejected(f"{name}: checksum of page {index} does not match")
            return len(wanted) * self.geometry.page_bytes
        finally:
            self.files.close(fd)

    def read_snapshot(self, name: str, payload: Sequence[UInt8Array], path: bytes, tail_key: bytes) -> int:
        """Fill the payload blocks of one snapshot. Returns payload bytes. Compares and raises as `read_pages`."""
        try:
            return self._read_snapshot(name, payload, path, tail_key)
        except FileNotFoundError as error:
            raise PageMissing(name) from error
        except OSError as error:
            self._fail("read failed", error, reads_too=True)
            raise

    def _read_snapshot(self, name: str, payload: Sequence[UInt8Array], path: bytes, tail_key: bytes) -> int:
        fd = self.files.open_read(self.folder / name)
        try:
            size = self.files.size(fd)
            header = fmt.decode_snapshot(self._header_bytes(fd, fmt.SNAPSHOT_MAGIC, size), size)
            self._check_snapshot(header)
            body = fmt.body_length(self.files.read(fd, fmt.PREFIX_BYTES, 0), fmt.SNAPSHOT_MAGIC, size)
            if header.tail_key != tail_key:
                raise fmt.FileRejected(f"{name}: stored token ids of the tail differ")
            self._check_path(fd, body, header.path_bytes, header.path_digest, path)
            total = sum(block.nbytes for block in payload)
            if self.files.read_into(fd, payload, fmt.payload_start(body, header.path_bytes)) != total:
                raise fmt.FileRejected(f"{name} is cut off")
            if self.checksums(payload) != header.checksums:
                raise fmt.FileRejected(f"{name}: payload checksum does not match")
            return total
        finally:
            self.files.close(fd)

    def _header_bytes(self, fd: int, magic: bytes, size: int) -> bytes:
        data = self.files.read(fd, _FIRST_READ, 0)
        need = fmt.PREFIX_BYTES + fmt.body_length(data, magic, size)
        return data if need <= len(data) else data + self.files.read(fd, need - len(data), len(data))

    def _check_path(self, fd: int, body: int, length: int, digest: bytes, expected: bytes) -> None:
        stored = self.files.read(fd, length, fmt.PREFIX_BYTES + body)
        if fmt.path_digest(stored) != digest:
            raise fmt.FileRejected("stored token ids fail their checksum")
        if stored != expected:
            raise fmt.FileRejected("stored token ids differ from the prompt's")

    def _fail(self, what: str, error: OSError, *, reads_too: bool) -> None:
        """Switch the tier off, with one log line for the first failure."""
        self.stats.disk_errors += 1
        was_on = self.writable or self.readable or self.failure is None
        self.writable = False
        if reads_too:
            self.readable = False
        if was_on and self.failure is None:
            self.failure = f"{what}: {error.strerror or error}"
            scope = "off" if not self.readable else "off for writing"
            log.error("prefix cache: disk tier %s is %s: %s", self.folder, scope, self.failure)


def _runs(wanted: Sequence[tuple[int, UInt8Array]]) -> Iterator[list[tuple[int, UInt8Array]]]:
    """Split into runs of consecutive indices."""
    run: list[tuple[int, UInt8Array]] = []
    for item in wanted:
        if run and item[0] != run[-1][0] + 1:
            yield run
            run = []
        run.append(item)
    if run:
        yield run


# ---- what `fermion cache` needs without a model ----


@dataclass(frozen=True, slots=True)
class FolderInfo:
    """One model's folder: hex fingerprint, snapshot files, pack files, bytes, when it was last opened (UNIX
    seconds, 0 unknown) and whether a process has it open for writing."""

    fingerprint: str
    snapshots: int
    packs: int
    nbytes: int
    used_at: float
    in_use: bool


def list_directory(directory: Path) -> list[FolderInfo]:
    """Describe every model's folder in a cache directory; empty if there is none. Raises OSError."""
    if not directory.exists():
        return []
    files = Files()
    result = []
    for name in files.names(directory):
        folder = directory / name
        if not _is_model_folder(folder):
            continue
        names = files.names(folder)
        lock = folder / _LOCK
        fd = files.try_lock(lock) if lock.exists() else None
        in_use = lock.exists() and fd is None
        if fd is not None:
            files.close(fd)
        result.append(
            FolderInfo(
                name,
                sum(n.endswith(".snap") for n in names),
                sum(n.endswith(".kv") for n in names),
                folder_bytes(folder),
                lock.stat().st_mtime if lock.exists() else 0.0,
                in_use,
            )
        )
    return result


def clear_directory(directory: Path) -> tuple[int, list[str]]:
    """Delete all models' folders that no process writes. Returns (bytes freed, fingerprints left in use)."""
    freed, kept = 0, []
    for info in list_directory(directory):
        if remove_folder(directory / info.fingerprint, Files()):
            freed += info.nbytes
        else:
            kept.append(info.fingerprint)
    return freed, kept


def folder_bytes(folder: Path) -> int:
    """Bytes of the regular files in a folder."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def remove_folder(folder: Path, files: Files) -> bool:
    """Delete our files in a model's folder and the folder; False if a process is using it."""
    fd = files.try_lock(folder / _LOCK)
    if fd is None:
        return False
    try:
        for name in files.names(folder):
            if name.endswith((".snap", ".kv")) or name.startswith("tmp-"):
                with suppress(IsADirectoryError):  # not ours, whatever it is called
                    files.unlink(folder / name)
        files.unlink(folder / _LOCK)
    finally:
        files.close(fd)
    if not files.names(folder):
        folder.rmdir()
    return True


def _is_model_folder(path: Path) -> bool:
    name = path.name
    return len(name) == 2 * DIGEST_BYTES and all(c in "0123456789abcdef" for c in name) and path.is_dir()
