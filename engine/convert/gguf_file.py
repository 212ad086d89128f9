"""The GGUF container: metadata and tensor directory, checked against the file before any data is read.

Format (version 2 and 3, little-endian): magic, version, tensor count, key count, keys, tensor directory, padding to
the alignment, data. (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.) Split models are several files
`NAME-00001-of-0000N.gguf`, each with its own directory. Counts and lengths come from strangers: none is believed
before the bytes it speaks of are known to be there.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from engine.convert.sources import file_identity, read_bytes, widen
from engine.core import Float32Array, UInt8Array
from engine.errors import ConfigError, ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_SPLITS = 1024

# Type number -> (name, weights per block, bytes per block); the types that the `gguf` package can dequantise.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 22: ("IQ2_S", 256, 82), 18: ("IQ3_XXS", 256, 98),
    21: ("IQ3_S", 256, 110), 19: ("IQ1_S", 256, 50), 29: ("IQ1_M", 256, 56),
}  # fmt: skip

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

Metadata = dict[str, Any]  # numbers, bool, str, or lists of one of them


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """Where one tensor lies. shape: outermost dimension first (the reverse of GGUF's own order), in weights."""

    name: str
    type: int
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int


class GgufSource:
    """A GGUF tensor seen as rows [rows, cols], dequantised as it is read."""

    def __init__(self, entry: GgufEntry, cols: int) -> None:
        """cols: the row length wanted; whole quantisation blocks, or any divisor for plain floats."""
        type_name, block, block_bytes = TENSOR_TYPES[entry.type]
        if cols % block:
            raise ModelFileError(
                f"{entry.path}: tensor {entry.name!r}: rows of {cols} do not hold whole {type_name} blocks of {block}"
            )
        self.path, self.name, self.cols = entry.path, entry.name, cols
        self.rows = prod(entry.shape) // cols
        self.identity = f"{file_identity(entry.path)}:{entry.name}:{entry.type}:{entry.begin}:{entry.end}"
        self._entry = entry
        self._row_bytes = cols // block * block_bytes

    def read(self, row0: int, row1: int) -> Float32Array:
        """Rows as float32 [row1 - row0, cols]."""
        begin = self._entry.begin + row0 * self._row_bytes
        raw = read_bytes(self._entry.path, self.name, begin, (row1 - row0) * self._row_bytes)
        type_name = TENSOR_TYPES[self._entry.type][0]
        if type_name in ("F32", "F16", "BF16"):
            return widen(raw, type_name).reshape(row1 - row0, self.cols)
        return _dequantize(raw.reshape(row1 - row0, self._row_bytes), self._entry.type)


def read_gguf(path: Path) -> tuple[Metadata, dict[str, GgufEntry]]:
    """Metadata of the first file, and the tensors of it and of its splits. Raises ModelFileError naming the fault."""
    metadata, entries = _read_file(path)
    split = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    count = metadata.get("split.count", 1)
    if count == 1 and split is None:
        return metadata, entries
    if split is None or not isinstance(count, int) or int(split[3]) != count or not 1 <= count <= MAX_SPLITS:
        raise ModelFileError(f"{path}: split.count is {count!r}, which does not fit the file name")
    if int(split[2]) != 1:
        raise ModelFileError(f"{path}: part {int(split[2])} of {count}: name part 1, the others are found beside it")
    for number in range(2, count + 1):
        sibling = path.with_name(f"{split[1]}-{number:05}-of-{count:05}.gguf")
        other, more = _read_file(sibling)
        if other.get("split.no") != number - 1 or other.get("split.count") != count:
            raise ModelFileError(f"{sibling}: split.no {other.get('split.no')!r} does not fit the file name")
        twice = sorted(entries.keys() & more.keys())
        if twice:
            raise ModelFileError(f"{sibling}: tensor {twice[0]!r} is also in another part")
        entries |= more
    expected = metadata.get("split.tensors.count", len(entries))
    if expected != len(entries):
        raise ModelFileError(f"{path}: split.tensors.count is {expected}, the parts hold {len(entries)}")
    return metadata, entries


def _dequantize(raw: UInt8Array, type_number: int) -> Float32Array:
    try:  # an optional dependency of this path alone
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ConfigError(
            "reading quantised GGUF tensors needs the gguf package: pip install 'fermion[convert]'"
        ) from error
    values: Float32Array = dequantize(raw, GGMLQuantizationType(type_number))
    return values


class _Reader:
    """Little-endian fields from a file, never more than it holds."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self.size = path.stat().st_size
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise ModelFileError(f"{self.path}: truncated: {count} bytes wanted at {self.position} of {self.size}")
        self.position += count
        return self._file.read(count)

    def unpack(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str:
        return self.take(self.unpack("<Q")).decode("utf-8", errors="strict")

    def count(self, what: str, least_bytes: int) -> int:
        """A count of things of at least `least_bytes` each, refused if the rest of the file cannot hold them."""
        number: int = self.unpack("<Q")
        if number * least_bytes > self.size - self.position:
            raise ModelFileError(f"{self.path}: {what} of {number} cannot fit in a file of {self.size} bytes")
        return number

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ModelFileError(f"{self.path}: unknown value type {kind} at byte {self.position}")
        inner = self.unpack("<I")
        if inner == _STRING:
            return [self.text() for _ in range(self.count("array length", 8))]
        if inner not in _SCALARS:
            raise ModelFileError(f"{self.path}: arrays of type {inner} are not supported")
        layout = _SCALARS[inner]
        length = self.count("array length", struct.calcsize(layout))
        return list(struct.unpack(f"<{length}{layout[1]}", self.take(length * struct.calcsize(layout))))


def _read_file(path: Path) -> tuple[Metadata, dict[str, GgufEntry]]:
    try:
        with path.open("rb") as file:
            return _read_directory(_Reader(path, file))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: a string is not UTF-8: {error.reason}") from error


def _read_directory(reader: _Reader) -> tuple[Metadata, dict[str, GgufEntry]]:
    path = reader.path
    if reader.take(4) != MAGIC:
        raise ModelFileError(f"{path}: not a GGUF file")
    version = reader.unpack("<I")
    if version not in VERSIONS:
        raise ModelFileError(f"{path}: GGUF version {version}, expected 2 or 3 (little-endian)")
    tensor_count = reader.count("tensor count", 8 + 4 + 8 + 4 + 8)
    key_count = reader.count("key count", 8 + 4 + 1)
    metadata: Metadata = {}
    for _ in range(key_count):
        key = reader.text()
        if key in metadata:
            raise ModelFileError(f"{path}: key {key!r} appears twice")
        metadata[key] = reader.value(reader.unpack("<I"))
    infos = [_tensor_info(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment > 1 << 16 or alignment & (alignment - 1):
        raise ModelFileError(f"{path}: general.alignment is {alignment!r}, expected a power of two")
    start = reader.position + -reader.position % alignment
    entries = [
        GgufEntry(name, kind, shape, path, start + offset, start + offset + size)
        for name, kind, shape, offset, size in infos
    ]
    _check_places(path, entries, start, alignment, reader.size)
    return metadata, {entry.name: entry for entry in entries}


def _tensor_info(reader: _Reader) -> tuple[str, int, tuple[int, ...], int, int]:
    name = reader.text()
    where = f"{reader.path}: tensor {name!r}"
    rank = reader.unpack("<I")
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise ModelFileError(f"{where}: {rank} dimensions, expected 1 to {MAX_DIMENSIONS}")
    shape = tuple(reversed([reader.unpack("<Q") for _ in range(rank)]))
    kind, offset = reader.unpack("<I"), reader.unpack("<Q")
    if kind not in TENSOR_TYPES:
        known = ", ".join(known_name for known_name, _, _ in TENSOR_TYPES.values())
        raise ModelFileError(f"{where}: type number {kind} is not supported; supported: {known}")
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    if 0 in shape or shape[-1] % block:
        raise ModelFileError(f"{where}: shape {shape} does not hold whole {type_name} blocks of {block}")
    return name, kind, shape, offset, prod(shape) // block * block_bytes


def _check_places(path: Path, entries: Sequence[GgufEntry], start: int, alignment: int, size: int) -> None:
    """Every tensor aligned, inside the file, by itself, and named once."""
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise ModelFileError(f"{path}: tensor {entry.name!r} appears twice")
        names.add(entry.name)
        if (entry.begin - start) % alignment:
            raise ModelFileError(f"{path}: tensor {entry.name!r}: offset is not a multiple of {alignment}")
        if entry.end > size:
            raise ModelFileError(f"{path}: tensor {entry.name!r}: ends at byte {entry.end}, the file has {size}")
    for before, after in pairwise(sorted(entries, key=lambda entry: entry.begin)):
        if after.begin < before.end:
            raise ModelFileError(f"{path}: tensor {after.name!r} overlaps {before.name!r}")
