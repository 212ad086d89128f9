"""Bytes flipped, removed and added anywhere in a file: it is read, or refused as a ModelFileError; nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoint as tiny

from engine.convert.gguf_file import read_gguf
from engine.convert.safetensors import read_header
from engine.errors import ModelFileError


def damaged(content: bytes, rng: random.Random, within: int) -> bytes:
    """One to four edits in the first `within` bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(within, len(data)))
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randint(1, 9)]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 9))
            case _:
                data[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\x00" * 7 + b"\x80", b'"":{}[],'])
    return bytes(data)


def survives(path: Path, content: bytes, within: int, read: Callable[[Path], object], rounds: int) -> int:
    """How many of the damaged files were refused."""
    rng, refused = random.Random(1), 0
    for _ in range(rounds):
        path.write_bytes(damaged(content, rng, within))
        try:
            read(path)
        except ModelFileError:
            refused += 1
    return refused


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weights = {name: value for name, value in tiny.random_weights(vision=False).items() if value.size < 600}
    tiny.write_safetensors(path, weights)
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little")
    assert survives(path, content, 8 + header, read_header, 600) > 500


def test_gguf(tmp_path: Path) -> None:
    tiny_gguf = pytest.importorskip("tiny_gguf")
    path = tmp_path / "model.gguf"
    tensors = tiny_gguf.text_tensors(tiny.random_weights(vision=False), fused=True)
    tiny_gguf.write_text(path, {name: value for name, value in tensors.items() if value.size < 600})
    assert survives(path, path.read_bytes(), 4000, read_gguf, 600) > 400
