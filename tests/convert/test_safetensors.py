"""Headers that lie are refused by name; honest ones and our own round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import write_raw, write_safetensors

from engine.convert.safetensors import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    TensorInfo,
    build_header,
    read_checkpoint,
    read_header,
)
from engine.errors import ModelFileError


def field(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": field("F32", [2, 2], 0, 16), "b": field("BF16", [4], 16, 24)}


def test_reads_shapes_and_absolute_offsets(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_raw(path, {"__metadata__": {"format": "pt"}, **GOOD}, bytes(24))
    entries = read_header(path)
    assert {name: (e.dtype, e.shape, e.end - e.begin) for name, e in entries.items()} == {
        "a": ("F32", (2, 2), 16),
        "b": ("BF16", (4,), 8),
    }
    assert entries["b"].end == path.stat().st_size


HOSTILE: dict[str, tuple[dict[str, object], int, str]] = {
    "overlap": ({"a": field("F32", [2], 0, 8), "b": field("F32", [2], 4, 12)}, 12, "'b' overlaps 'a'"),
    "gap": ({"a": field("F32", [2], 0, 8), "b": field("F32", [1], 12, 16)}, 16, "'b' leaves a gap after 'a'"),
    "late-start": ({"a": field("F32", [2], 8, 16)}, 16, "'a': gap of 8 bytes"),
    "truncated": (GOOD, 23, "truncated in or before tensor 'b'"),
    "trailing": (GOOD, 25, "trailing bytes"),
    "wrong-size": ({"a": field("F32", [3], 0, 8)}, 8, "'a': F32 [3] needs 12 bytes"),
    "unknown-type": ({"a": field("Q4_K", [1], 0, 8)}, 8, "'a': unknown dtype 'Q4_K'"),
    "negative-shape": ({"a": field("U8", [-1], 0, 8)}, 8, "'a': shape"),
    "bool-shape": ({"a": field("U8", [True], 0, 1)}, 1, "'a': shape"),
    "huge-rank": ({"a": field("U8", [1] * 9, 0, 1)}, 1, "'a': shape"),
    "float-offset": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.0]}}, 1, "'a': data_offsets"),
    "overflow": ({"a": field("U8", [2**62, 2**62], 0, 8)}, 8, "'a': U8"),
    "not-an-object": ({"a": 7}, 8, "'a': expected an object"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused_by_name(tmp_path: Path, case: str) -> None:
    fields, size, message = HOSTILE[case]
    path = tmp_path / "bad.safetensors"
    write_raw(path, fields, bytes(size))
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x01", "truncated"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "at most"),
        ((2**63).to_bytes(8, "little") + b"{}", "at most"),
        ((50).to_bytes(8, "little") + b"{}", "truncated"),
        ((2).to_bytes(8, "little") + b"[]", "expected a JSON object"),
        ((2).to_bytes(8, "little") + b"{\xff", "not JSON"),
        ((17).to_bytes(8, "little") + b'{"a": 1, "a": 2 }', "'a' appears twice"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "not JSON"),
    ],
)
def test_broken_container_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        read_header(path)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x.safetensors", "d/x.safetensors", "..\\x.safetensors", 7])
def test_index_cannot_reach_outside_its_directory(tmp_path: Path, shard: object) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelFileError, match="is not the name of a file beside the index"):
        read_checkpoint(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": np.zeros(4, np.float32)})
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(ModelFileError, match="'b' is in the index but not in the shard"):
        read_checkpoint(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "two.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"two\.safetensors: named by"):
        read_checkpoint(tmp_path)


def test_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="neither"):
        read_checkpoint(tmp_path)


def test_written_layout_is_aligned_and_readable(tmp_path: Path) -> None:
    tensors = [TensorInfo("odd", "F32", (3,)), TensorInfo("big", "U8", (2, 576)), TensorInfo("last", "F16", (5,))]
    header, offsets = build_header(tensors, {"format": "fermion"})
    assert len(header) % 64 == 0
    assert all(offset % 64 == 0 for offset in offsets.values())
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + bytes(64 + 1152 + 64))
    assert {name: entry.begin for name, entry in read_header(path).items() if name in offsets} == offsets
