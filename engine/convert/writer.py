"""Writes a checkpoint directory from a plan: streaming, resumable, and visible only when complete.

Everything goes to `DST.partial`, which becomes DST by one rename. The layout of the data file is fixed by the plan
before any data exists, so progress is one number: how many pieces, in order, are safely on disk. A conversion that
was killed continues behind them and ends with the same bytes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.convert.calibration import Calibration
from engine.convert.plan import Format, OutputTensor, Piece, Plan, digest, pieces, select_rows
from engine.convert.quantize import ALGORITHM, quantize_rows, quantize_rows_with_feedback
from engine.convert.safetensors import build_header, padded_bytes
from engine.convert.sources import PackedSource
from engine.core import Float32Array, UInt8Array
from engine.errors import ConfigError, ModelFileError

DATA_NAME = "model.safetensors"
JOURNAL_NAME = "conversion-journal"
METADATA = {"format": "fermion", "format_version": "1"}
SYNC_BYTES = 64 << 20  # data between two entries of the journal: what a kill can cost
SPARE_BYTES = 64 << 20  # headroom asked of the disk beyond the data file
F16_MAX = 65504.0

ProgressReport = Callable[[int, int], None]  # (bytes done, bytes in all)


def plan_bytes(plan: Plan) -> int:
    """Size of the data file in bytes, header excluded."""
    return padded_bytes(tensor.info for tensor in plan.tensors)


def write_checkpoint(
    destination: Path,
    plan: Plan,
    side_files: Mapping[str, bytes],
    *,
    calibration: Calibration | None,
    threads: int,
    progress: ProgressReport,
) -> None:
    """Encodes the plan into `destination`, which must not exist or be empty.

    Raises ConfigError (destination, disk space) or ModelFileError (what the weights hold); after the latter
    nothing is left behind, after anything else the partial directory is kept to be continued.
    """
    check_destination(destination)
    partial = destination.with_name(destination.name + ".partial")
    is_new = not partial.exists()
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{partial} cannot be made: {error.strerror}") from error
    try:
        with _locked_journal(partial) as journal:
            _write_data(partial, journal, plan, calibration, threads, progress)
            for name, content in side_files.items():
                (partial / name).write_bytes(content)
            (partial / JOURNAL_NAME).unlink()
            _sync_directory(partial)
            partial.rename(destination)
    except ModelFileError:
        shutil.rmtree(partial)
        raise
    except ConfigError:
        # Refused before anything was written.
        if is_new:
            shutil.rmtree(partial)
        raise
    except OSError as error:
        raise ConfigError(f"{partial}: writing failed ({error.strerror}); run again to continue") from error
    _sync_directory(destination.parent)


def check_destination(destination: Path) -> None:
    """Raises ConfigError unless `destination` is absent or an empty directory."""
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise ConfigError(f"destination {destination} exists and is not a directory")
    if destination.is_dir() and any(destination.iterdir()):
        raise ConfigError(f"destination {destination} is not empty: choose a new directory")


@contextmanager
def _locked_journal(partial: Path) -> Iterator[BinaryIO]:
    with (partial / JOURNAL_NAME).open("a+b") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{partial} is being written by another conversion") from error
        yield journal


def _write_data(
    partial: Path,
    journal: BinaryIO,
    plan: Plan,
    calibration: Calibration | None,
    threads: int,
    progress: ProgressReport,
) -> None:
    header, offsets = build_header([tensor.info for tensor in plan.tensors], METADATA)
    total = len(header) + plan_bytes(plan)
    signature = digest(plan.tensors, f"{ALGORITHM} {calibration.identity if calibration else 'uncalibrated'}")
    work = chain.from_iterable(pieces(tensor) for tensor in plan.tensors)
    data = os.open(partial / DATA_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        whole = os.fstat(data).st_size == total
        finished = _finished_pieces(journal, signature) if whole else 0
        if finished == 0:
            _begin_journal(journal, signature)
            os.ftruncate(data, 0)
        _check_space(partial, total - _allocated(data))
        os.ftruncate(data, total)
        os.pwrite(data, header, 0)
        done = len(header)
        for piece in islice(work, finished):
            done += _piece_bytes(piece)
        progress(done, total)
        unsynced, synced_at = 0, time.monotonic()
        for piece, encoded in _encoded(work, calibration, threads):
            _pwrite_all(data, encoded, offsets[piece.tensor.name] + piece.offset)
            finished += 1
            done += encoded.nbytes
            unsynced += encoded.nbytes
            if unsynced >= SYNC_BYTES or time.monotonic() - synced_at > 10:
                _record(data, journal, finished)
                unsynced, synced_at = 0, time.monotonic()
            progress(done, total)
        _record(data, journal, finished)
        progress(total, total)
    finally:
        os.close(data)


def _finished_pieces(journal: BinaryIO, signature: str) -> int:
    """How many leading pieces the journal vouches for; 0 if it belongs to another plan."""
    journal.seek(0)
    lines = journal.read().split(b"\n")[:-1]  # a kill may have cut the last line short
    if len(lines) < 2 or lines[0] != signature.encode() or not lines[-1].isdigit():
        return 0
    return int(lines[-1])


def _begin_journal(journal: BinaryIO, signature: str) -> None:
    journal.truncate(0)
    journal.write(signature.encode() + b"\n")
    journal.flush()


def _record(data: int, journal: BinaryIO, finished: int) -> None:
    """Data first, then the number that vouches for it."""
    os.fdatasync(data)
    # What is on disk is not read again here: give the page cache back.
    os.posix_fadvise(data, 0, 0, os.POSIX_FADV_DONTNEED)
    journal.write(f"{finished}\n".encode())
    journal.flush()
    os.fdatasync(journal.fileno())


def _allocated(data: int) -> int:
    return os.fstat(data).st_blocks * 512


def _check_space(partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial).free
    if needed + SPARE_BYTES > free:
        raise ConfigError(
            f"destination {partial.parent}: {needed + SPARE_BYTES:,} bytes needed, {free:,} bytes free on that disk"
        )


def _piece_bytes(piece: Piece) -> int:
    return piece.tensor.row_bytes(piece.row1) - piece.tensor.row_bytes(piece.row0)


def _encoded(
    work: Iterator[Piece], calibration: Calibration | None, threads: int
) -> Iterator[tuple[Piece, UInt8Array]]:
    """Encodes on all threads, at most two pieces a thread in flight, and yields in order."""
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[tuple[Piece, Future[UInt8Array]]] = deque()
        try:
            for piece in islice(work, 2 * threads):
                pending.append((piece, pool.submit(encode_piece, piece, calibration)))
            while pending:
                piece, future = pending.popleft()
                yield piece, future.result()
                for following in islice(work, 1):
                    pending.append((following, pool.submit(encode_piece, following, calibration)))
        finally:
            for _, future in pending:
                future.cancel()


def encode_piece(piece: Piece, calibration: Calibration | None) -> UInt8Array:
    """Stored bytes of one piece, quantised as well as the calibration allows.

    Raises ModelFileError for values that are not finite or do not fit the format.
    """
    segments = tuple(select_rows(piece.tensor.segments, piece.row0, piece.row1))
    packed = [s.source.read_packed(s.row0, s.row1) for s in segments if isinstance(s.source, PackedSource)]
    if packed:
        return np.concatenate(packed).reshape(-1)
    weights = read_rows(piece.tensor, piece.row0, piece.row1)
    _check_finite(piece, weights)
    if piece.tensor.format is Format.F32:
        return weights.reshape(-1).view(np.uint8)
    if piece.tensor.format is Format.F16:
        return weights.astype(np.float16).reshape(-1).view(np.uint8)
    return _quantize(piece, weights, calibration).reshape(-1)


def _quantize(piece: Piece, weights: Float32Array, calibration: Calibration | None) -> UInt8Array:
    if calibration is None:
        return quantize_rows(weights)
    tensor, matrix = piece.tensor, piece.row0 // piece.tensor.matrix_rows
    original = tensor.kept_experts[matrix] if tensor.kept_experts else matrix
    curvature = calibration.curvature(tensor.name, original)
    if curvature is not None:
        return quantize_rows_with_feedback(weights, curvature)
    return quantize_rows(weights, calibration.importance(tensor.name, original))


def read_rows(tensor: OutputTensor, row0: int, row1: int) -> Float32Array:
    """Rows of the matrix view of an unpacked tensor, gathered from its segments: float32 [row1 - row0, cols]."""
    parts = [
        segment.source.read(segment.row0, segment.row1)
        for segment in select_rows(tensor.segments, row0, row1)
        if not isinstance(segment.source, PackedSource)
    ]
    return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def _check_finite(piece: Piece, weights: Float32Array) -> None:
    # Nothing above F16_MAX can be a weight of this family, and scales and F16 tensors could not hold it.
    limit = np.float32(np.finfo(np.float32).max if piece.tensor.format is Format.F32 else F16_MAX)
    bad = ~(np.abs(weights) <= limit)
    if bad.any():
        row, col = np.argwhere(bad)[0]
        (segment,) = select_rows(piece.tensor.segments, piece.row0 + row, piece.row0 + row + 1)
        raise ModelFileError(
            f"{segment.source.path}: tensor {piece.tensor.name!r}: value {weights[row, col]} at row "
            f"{piece.row0 + row}, column {col} is not a finite number that fits {piece.tensor.format.value}"
        )


def _pwrite_all(data: int, encoded: UInt8Array, offset: int) -> None:
    view = encoded.data
    while view:
        count = os.pwrite(data, view, offset)
        view, offset = view[count:], offset + count


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
