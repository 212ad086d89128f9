"""Where rows of weights come from: each source reads a range of rows as float32 and holds no weights itself.

A source is a matrix view [rows, cols] of one stored tensor. Memory stays bounded because readers ask for a few
megabytes of rows at a time, and files are read by position, so threads share them without locks.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.convert.safetensors import TensorEntry
from engine.core import Float32Array, UInt8Array
from engine.errors import ModelFileError
from engine.formats import BLOCK_BYTES, BLOCK_COLS, BLOCK_ROWS

FP8_BLOCK = 128  # rows and columns that share one scale in block-FP8 exports


class RowSource(Protocol):
    """Rows of one stored tensor, in the file `path`. `identity` changes when the stored bytes or their meaning may have
    changed."""

    path: Path
    name: str
    rows: int
    cols: int
    identity: str

    def read(self, row0: int, row1: int) -> Float32Array:
        """Rows row0..row1-1 as float32 [row1 - row0, cols]. Raises ModelFileError on a short read."""


def file_identity(path: Path) -> str:
    """Changes when the file is replaced or written to."""
    status = path.stat()
    return f"{path.name}:{status.st_size}:{status.st_mtime_ns}"


def read_bytes(path: Path, name: str, begin: int, size: int) -> UInt8Array:
    """`size` bytes of `path` from `begin`. Raises ModelFileError naming file and tensor if they are not there."""
    buffer = np.empty(size, np.uint8)
    view, done = buffer.data, 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < size:
                count = os.preadv(descriptor, [view[done:]], begin + done)
                if count == 0:
                    raise ModelFileError(f"{path}: tensor {name!r}: file ended {size - done} bytes early")
                done += count
            # Each weight is read once: keeping it in the page cache would push out what the machine needs.
            os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelFileError(f"{path}: tensor {name!r}: {error.strerror}") from error
    return buffer


def widen(raw: UInt8Array, dtype: str) -> Float32Array:
    """Bytes of BF16, F16 or F32 numbers as float32, exactly."""
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return raw.view(np.float32)


class FloatSource:
    """A BF16, F16 or F32 safetensors tensor seen as [rows, cols]; any leading dimensions become rows."""

    def __init__(self, entry: TensorEntry, cols: int) -> None:
        """Raises ModelFileError for other types. `cols` must divide the number of elements."""
        if entry.dtype not in ("BF16", "F16", "F32"):
            raise ModelFileError(f"{entry.path}: tensor {entry.name!r}: expected BF16, F16 or F32, got {entry.dtype}")
        self.path, self.name, self.cols = entry.path, entry.name, cols
        self.rows = prod(entry.shape) // cols
        self.identity = f"{file_identity(entry.path)}:{entry.name}:{entry.dtype}:{entry.begin}:{entry.end}"
        self._entry = entry
        self._row_bytes = (entry.end - entry.begin) // max(self.rows, 1)

    def read(self, row0: int, row1: int) -> Float32Array:
        """Rows as float32 [row1 - row0, cols]."""
        begin = self._entry.begin + row0 * self._row_bytes
        raw = read_bytes(self._entry.path, self.name, begin, (row1 - row0) * self._row_bytes)
        return widen(raw, self._entry.dtype).reshape(row1 - row0, self.cols)


class PackedSource:
    """A tensor packed already: U8 [..., rows/16, cols/64, 576]. Its rows are rows of weights, taken 16 at a time."""

    def __init__(self, entry: TensorEntry) -> None:
        """Raises ModelFileError unless the entry has the packed type and block size."""
        if entry.dtype != "U8" or len(entry.shape) < 3 or entry.shape[-1] != BLOCK_BYTES:
            raise ModelFileError(
                f"{entry.path}: tensor {entry.name!r}: expected packed U8 blocks, got {entry.dtype} {entry.shape}"
            )
        self.path, self.name = entry.path, entry.name
        self.rows = prod(entry.shape[:-2]) * BLOCK_ROWS
        self.cols = entry.shape[-2] * BLOCK_COLS
        self.identity = f"packed:{file_identity(entry.path)}:{entry.name}:{entry.begin}:{entry.end}"
        self._entry = entry

    def read_packed(self, row0: int, row1: int) -> UInt8Array:
        """Blocks of rows row0..row1-1 (multiples of 16), uint8 [(row1 - row0)/16, cols/64, 576]."""
        assert row0 % BLOCK_ROWS == 0, row0
        assert row1 % BLOCK_ROWS == 0, row1
        tiles = (row1 - row0) // BLOCK_ROWS
        tile_bytes = self.cols // BLOCK_COLS * BLOCK_BYTES
        begin = self._entry.begin + row0 // BLOCK_ROWS * tile_bytes
        raw = read_bytes(self._entry.path, self.name, begin, tiles * tile_bytes)
        return raw.reshape(tiles, self.cols // BLOCK_COLS, BLOCK_BYTES)


def _fp8_e4m3_table() -> Float32Array:
    """Value of each byte: sign 1, exponent 4 (bias 7), mantissa 3; no infinities, 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


FP8_E4M3 = _fp8_e4m3_table()


class BlockFp8Source:
    """An F8_E4M3 matrix with one `weight_scale_inv` per block of 128 x 128: value = code * scale."""

    def __init__(self, entry: TensorEntry, scales: TensorEntry) -> None:
        """Raises ModelFileError unless the scales are [ceil(rows/128), ceil(cols/128)] floats."""
        if len(entry.shape) != 2 or entry.dtype != "F8_E4M3":
            raise ModelFileError(
                f"{entry.path}: tensor {entry.name!r}: expected an F8_E4M3 matrix, got {entry.dtype} {entry.shape}"
            )
        self.path, self.name = entry.path, entry.name
        self.rows, self.cols = entry.shape
        expected = (-(-self.rows // FP8_BLOCK), -(-self.cols // FP8_BLOCK))
        if scales.shape != expected:
            raise ModelFileError(
                f"{scales.path}: tensor {scales.name!r}: expected shape {expected}, got {scales.shape}"
            )
        self._scales = FloatSource(scales, expected[1])
        self.identity = f"{file_identity(entry.path)}:{entry.name}:{entry.begin}:{self._scales.identity}"
        self._entry = entry

    def read(self, row0: int, row1: int) -> Float32Array:
        """Rows as float32 [row1 - row0, cols]."""
        codes = read_bytes(self._entry.path, self.name, self._entry.begin + row0 * self.cols, (row1 - row0) * self.cols)
        block0 = row0 // FP8_BLOCK
        scales = self._scales.read(block0, -(-row1 // FP8_BLOCK))
        row_scales = scales[np.arange(row0, row1) // FP8_BLOCK - block0]
        full = np.repeat(row_scales, FP8_BLOCK, axis=1)[:, : self.cols]
        return FP8_E4M3[codes].reshape(row1 - row0, self.cols) * full
