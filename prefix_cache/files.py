"""The few system calls that the disk tier makes, in one place so that tests can make any of them fail."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from .arena import UInt8Array

_IOV_MAX = 512


class Files:
    """Plain files. Every method raises OSError as the system does. Payloads are read with pread, never mapped: a
    truncated file gives a short read here and would kill the process through a mapping."""

    def make_directory(self, path: Path) -> None:
        """Create with mode 0700 (cached text is private); parents too."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """New file, mode 0600, for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open_read(self, path: Path) -> int:
        """Descriptor for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        """Close."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Length in bytes."""
        return os.fstat(fd).st_size

    def write_all(self, fd: int, buffers: Sequence[UInt8Array | bytes]) -> None:
        """Append all buffers."""
        pending = [memoryview(b if isinstance(b, bytes) else b.data) for b in buffers]
        while pending:
            done = os.writev(fd, pending[:_IOV_MAX])
            while pending and done >= pending[0].nbytes:
                done -= pending[0].nbytes
                pending.pop(0)
            if done:
                pending[0] = pending[0][done:]

    def read(self, fd: int, count: int, offset: int) -> bytes:
        """Up to `count` bytes; fewer only at the end of the file."""
        parts = []
        while count > 0:
            part = os.pread(fd, count, offset)
            if not part:
                break
            parts.append(part)
            count -= len(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, fd: int, targets: Sequence[UInt8Array], offset: int) -> int:
        """Fill the targets in order; returns bytes read, fewer only at the end of the file."""
        pending = [t.data for t in targets]
        total = 0
        while pending:
            done = os.preadv(fd, pending[:_IOV_MAX], offset + total)
            if done == 0:
                break
            total += done
            while pending and done >= pending[0].nbytes:
                done -= pending[0].nbytes
                pending.pop(0)
            if done:
                pending[0] = pending[0][done:]
        return total

    def rename(self, source: Path, target: Path) -> None:
        """Atomic replace."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Delete; no error if it is gone."""
        path.unlink(missing_ok=True)

    def names(self, path: Path) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(entry.name for entry in path.iterdir())

    def free_bytes(self, path: Path) -> int:
        """Bytes that the file system still gives to us."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    def try_lock(self, path: Path) -> int | None:
        """Descriptor holding an exclusive lock on `path` (created), or None if another process has it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return fd
