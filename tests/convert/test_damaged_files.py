"""Bytes flipped, removed and added anywhere in a file: it is read, or refused as a ModelFileError; nothing else."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny

from engine.convert import convert, writer
from engine.convert.calibration import Calibration, write_calibration
from engine.convert.convert import Options
from engine.convert.gguf_file import read_gguf
from engine.convert.prune import Selection, select
from engine.convert.safetensors import read_header
from engine.errors import FermionError, ModelFileError


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


def whole_source(directory: Path) -> dict[str, bytes]:
    """A published checkpoint of small tensors: its files by name."""
    weights = tiny.random_weights(vision=False, mtp=False)
    source = tiny.write_checkpoint(directory, weights, tiny.config(vision=False, mtp=False), shards=2)
    return {path.name: path.read_bytes() for path in source.iterdir()}


def damaged_conversions(directory: Path, rounds: int, seed: int) -> tuple[int, int]:
    """Converts sources with one damaged file each: (refused, converted). A refusal is a FermionError and leaves nothing
    behind; any other exception is a fault."""
    files = whole_source(directory / "src")
    rng, refused, finished = random.Random(seed), 0, 0
    for number in range(rounds):
        name = rng.choice(sorted(files))
        within = 1 << 16 if name.endswith("safetensors") else len(files[name])
        (directory / "src" / name).write_bytes(damaged(files[name], rng, within))
        target = directory / f"dst{number}"
        try:
            convert.run(
                convert.prepare(directory / "src", Options()), target, threads=1, progress=lambda done, total: None
            )
            finished += 1
            shutil.rmtree(target)
        except FermionError:
            refused += 1
        assert sorted(path.name for path in directory.iterdir()) == ["src"]
        (directory / "src" / name).write_bytes(files[name])
    return refused, finished


def test_whole_sources(tmp_path: Path) -> None:
    refused, finished = damaged_conversions(tmp_path, 25, 1)
    assert refused > 5
    assert finished > 0  # damage to weights or to what is not used goes unnoticed


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_whole_sources(tmp_path: Path, seed: int) -> None:
    damaged_conversions(tmp_path, 1500, seed)


def gguf_source(path: Path) -> bytes:
    """A whole GGUF model."""
    tiny_gguf = pytest.importorskip("tiny_gguf")
    tensors = tiny_gguf.text_tensors(tiny.random_weights(vision=False, mtp=False), fused=True)
    tiny_gguf.write_text(path, tensors, mtp=False)
    return path.read_bytes()


def damaged_gguf_plans(path: Path, rounds: int, seed: int) -> int:
    """Plans of damaged GGUF files, read to the first rows of every tensor: how many were refused."""
    content, rng, refused = gguf_source(path), random.Random(seed), 0
    for _ in range(rounds):
        path.write_bytes(damaged(content, rng, 12_000))
        try:
            for tensor in convert.prepare(path, Options()).plan.tensors:
                writer.read_rows(tensor, 0, 1)
        except FermionError:
            refused += 1
    return refused


def test_whole_gguf(tmp_path: Path) -> None:
    assert damaged_gguf_plans(tmp_path / "m.gguf", 100, 1) > 50


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_whole_gguf(tmp_path: Path, seed: int) -> None:
    damaged_gguf_plans(tmp_path / "m.gguf", 3000, seed)


def damaged_text(rng: random.Random, content: bytes) -> bytes:
    """As `damaged`, or a value replaced by one of another kind, which keeps the JSON whole."""
    if rng.random() < 0.3:
        return damaged(content, rng, len(content))
    values = json.loads(content)
    place, key = values, rng.choice(sorted(values))
    while isinstance(place[key], dict) and place[key] and rng.random() < 0.7:
        place, key = place[key], rng.choice(sorted(place[key]))
    place[key] = rng.choice([None, -1, 0, 1.5, 2**70, 1e308, "x", [], [None], {}, {"a": 1}, True, [2**40] * 4])
    return json.dumps(values).encode()


def damaged_configurations(directory: Path, rounds: int, seed: int) -> int:
    """Plans with a config.json or an index whose values are of the wrong kind: how many were refused."""
    files, rng, refused = whole_source(directory), random.Random(seed), 0
    for _ in range(rounds):
        name = rng.choice(["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
        (directory / name).write_bytes(damaged_text(rng, files[name]))
        try:
            convert.prepare(directory, Options())
        except FermionError:
            refused += 1
        (directory / name).write_bytes(files[name])
    return refused


def test_configurations(tmp_path: Path) -> None:
    assert damaged_configurations(tmp_path, 300, 1) > 100


@pytest.mark.exhaustive
def test_many_configurations(tmp_path: Path) -> None:
    damaged_configurations(tmp_path, 20_000, 2)


def test_selections_and_calibrations(tmp_path: Path) -> None:
    """Files of our own, after somebody edited them."""
    rng = random.Random(1)
    scores = {f"a.layers.{i}.mlp.": np.arange(8.0) for i in range(3)}
    path = tmp_path / "experts.json"
    select(scores, 4).save(path)
    content = path.read_bytes()
    refused = 0
    for _ in range(500):
        path.write_bytes(damaged_text(rng, content))
        try:
            Selection.load(path)
        except ModelFileError:
            refused += 1
    assert refused > 250
    path = tmp_path / "statistics"
    statistics = {
        "a.layers.0.mlp.saliency": np.ones(8, np.float32),
        "a.layers.0.mixer_input.square": np.ones(64, np.float32),
    }
    write_calibration(path, statistics)

    def read(where: Path) -> object:
        return Calibration(where).scores("saliency"), Calibration(where).importance(
            "a.layers.0.self_attn.q_proj.weight", 0
        )

    assert survives(path, path.read_bytes(), 600, read, 600) > 300
