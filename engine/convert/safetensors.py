"""The safetensors container: headers checked in full before one byte of data is trusted, and written aligned.

Format: 8-byte little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data.
(https://huggingface.co/docs/safetensors.) Files come from strangers, so everything the header says is checked
against the file itself; later code may trust a `TensorEntry`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

from engine.errors import ModelFileError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own implementation
MAX_RANK = 8
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
INDEX_NAME = "model.safetensors.index.json"
_PLAIN_NAME = re.compile(r"[\w.+-]+\.safetensors", re.ASCII)
ALIGNMENT = 64
PADDING_PREFIX = "padding."  # U8 fillers: the format allows no holes, and every tensor starts on a cache line


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. `begin`/`end` are byte offsets in `path`, half-open; shape in elements of `dtype`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor to be written: `dtype` is a key of `DTYPE_BYTES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """All tensors of one file, in file order.

    Raises ModelFileError, naming file and tensor, if the header is oversized, is not the JSON the format asks
    for, names an unknown type, or if the tensors overlap, leave gaps, or do not fill the file exactly.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelFileError(f"{path}: truncated: {file_bytes} bytes, a safetensors file has at least 8")
            header_bytes = int.from_bytes(prefix, "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise ModelFileError(f"{path}: header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} accepted")
            if 8 + header_bytes > file_bytes:
                raise ModelFileError(f"{path}: truncated: header of {header_bytes} bytes in a file of {file_bytes}")
            text = file.read(header_bytes)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    fields = _parse_json_object(path, text)
    fields.pop("__metadata__", None)
    data_start = 8 + header_bytes
    entries = [_entry(path, name, value, data_start) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_tiling(path, entries, data_start, file_bytes)
    return {entry.name: entry for entry in entries}


def read_checkpoint(directory: Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint directory: index + shards, or a single `model.safetensors` (our fillers left out).

    The index must name plain files of that directory, and each shard must hold exactly the tensors the index
    assigns to it; anything else raises ModelFileError.
    """
    index = directory / INDEX_NAME
    single = directory / "model.safetensors"
    if index.is_file():
        return _read_sharded(directory, index)
    if single.is_file():
        return {name: entry for name, entry in read_header(single).items() if not name.startswith(PADDING_PREFIX)}
    raise ModelFileError(f"{directory}: neither {INDEX_NAME} nor model.safetensors found")


def build_header(tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Header bytes (length prefix included) and the absolute file offset of each tensor.

    The tensors keep their order. The header is padded with spaces to a multiple of 64, and a U8 filler named
    `padding.N` follows each tensor whose size is not, so that every tensor starts on a 64-byte boundary.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    relative: dict[str, int] = {}
    position = 0
    for info in tensors:
        relative[info.name] = position
        fields[info.name] = _header_field(info, position)
        position += info.nbytes
        gap = -position % ALIGNMENT
        if gap:
            filler = TensorInfo(f"{PADDING_PREFIX}{info.name}", "U8", (gap,))
            fields[filler.name] = _header_field(filler, position)
            position += gap
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + offset for name, offset in relative.items()}


def padded_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Bytes of the data part that `build_header` lays out."""
    return sum(info.nbytes + -info.nbytes % ALIGNMENT for info in tensors)


def _header_field(info: TensorInfo, position: int) -> dict[str, object]:
    return {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [position, position + info.nbytes]}


def _parse_json_object(path: Path, text: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = dict(pairs)
        if len(names) != len(pairs):
            twice = next(name for i, (name, _) in enumerate(pairs) if name in {n for n, _ in pairs[:i]})
            raise ModelFileError(f"{path}: {twice!r} appears twice in the JSON object")
        return names

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path}: header is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: expected an object, got {type(value).__name__}")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ModelFileError(f"{where}: unknown dtype {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_count, shape)):
        raise ModelFileError(f"{where}: shape {shape!r} is not a list of at most {MAX_RANK} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise ModelFileError(f"{where}: data_offsets {offsets!r} is not a pair of sizes")
    begin, end = offsets
    expected = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise ModelFileError(f"{where}: {dtype} {shape} needs {expected} bytes, data_offsets give {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), path, data_start + begin, data_start + end)


def _check_tiling(path: Path, entries: Sequence[TensorEntry], data_start: int, file_bytes: int) -> None:
    """Entries sorted by offset must cover the data part exactly once."""
    if entries and entries[0].begin != data_start:
        raise ModelFileError(f"{path}: tensor {entries[0].name!r}: gap of {entries[0].begin - data_start} bytes before")
    for before, after in pairwise(entries):
        if after.begin != before.end:
            what = "overlaps" if after.begin < before.end else "leaves a gap after"
            raise ModelFileError(f"{path}: tensor {after.name!r} {what} {before.name!r}")
    end = entries[-1].end if entries else data_start
    if end != file_bytes:
        what = f"truncated in or before tensor {entries[-1].name!r}" if end > file_bytes else "trailing bytes"
        raise ModelFileError(f"{path}: {what}: header describes {end} bytes, the file has {file_bytes}")


def _read_sharded(directory: Path, index: Path) -> dict[str, TensorEntry]:
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise ModelFileError(f"{index}: {index.stat().st_size} bytes, at most {MAX_HEADER_BYTES} accepted")
    weight_map = _parse_json_object(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelFileError(f"{index}: weight_map is not an object")
    shard_tensors: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        # A plain name only: an index must not reach files outside its own directory.
        if not isinstance(shard, str) or not _PLAIN_NAME.fullmatch(shard):
            raise ModelFileError(f"{index}: tensor {tensor!r}: {shard!r} is not the name of a file beside the index")
        shard_tensors.setdefault(shard, set()).add(tensor)
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(shard_tensors):
        path = directory / shard
        if not path.is_file():
            raise ModelFileError(f"{path}: named by {INDEX_NAME} but not found")
        found = read_header(path)
        for name in sorted(found.keys() ^ shard_tensors[shard]):
            what = "is in the shard but not in the index" if name in found else "is in the index but not in the shard"
            raise ModelFileError(f"{path}: tensor {name!r} {what}")
        entries.update(found)
    return entries
