"""The synthetic GGUF: read back by a reader of the container written here from its specification."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import ModelConfig
from engine.gguf import TensorType, gguf_tensors, write_gguf
from server.config import DEMO_CHECKPOINT

SCALARS = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}


class Reader:
    """Key-value pairs, and tensors as (shape in the file's order, type, offset)."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        assert self.take("<4sI") == (b"GGUF", 3)
        tensors, pairs = self.take("<QQ")
        self.values: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.string()
            self.values[key] = self.value(self.take("<I")[0])
        self.tensors = {}
        for _ in range(tensors):
            name = self.string()
            shape = self.take(f"<{self.take('<I')[0]}Q")
            self.tensors[name] = (shape, *self.take("<IQ"))
        self.begin = -(-self.at // 32) * 32

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        size = self.take("<Q")[0]
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind == 9:
            inner, count = self.take("<IQ")
            return [self.value(inner) for _ in range(count)]
        return self.take(SCALARS[kind])[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    path, config = tmp_path_factory.mktemp("gguf") / "model.gguf", ModelConfig.load(DEMO_CHECKPOINT)
    told: list[tuple[int, int]] = []
    write_gguf(path, config, seed=0, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] <= told[-1][1] < told[-1][0] + 32
    return path, config


def test_the_head_says_the_shape(written: tuple[Path, ModelConfig]) -> None:
    path, config = written
    values = Reader(path.read_bytes()).values
    assert values["general.architecture"] == "qwen35moe"
    assert values["qwen35moe.block_count"] == config.num_hidden_layers
    assert values["qwen35moe.expert_count"] == config.num_experts
    assert values["qwen35moe.vocab_size"] == config.vocab_size
    assert values["qwen35moe.rope.dimension_sections"] == [*config.mrope_section, 0]
    assert values["qwen35moe.attention.layer_norm_rms_epsilon"] == pytest.approx(config.rms_norm_eps)


def test_every_tensor_lies_where_the_table_says(written: tuple[Path, ModelConfig]) -> None:
    path, config = written
    data = path.read_bytes()
    reader = Reader(data)
    end = 0
    for tensor in gguf_tensors(config):
        shape, kind, offset = reader.tensors[tensor.name]
        assert shape == tuple(reversed(tensor.shape))
        assert (kind, offset) == (tensor.type, -(-end // 32) * 32)
        end = offset + tensor.nbytes
        if tensor.type is TensorType.Q4_0:
            assert tensor.shape[-1] % 32 == 0
    assert len(data) == reader.begin + -(-end // 32) * 32


def test_values_keep_the_scale_of_their_input(written: tuple[Path, ModelConfig]) -> None:
    path, config = written
    data = path.read_bytes()
    reader = Reader(data)
    tensor = next(t for t in gguf_tensors(config) if t.name == "blk.0.ffn_down_exps.weight")
    begin = reader.begin + reader.tensors[tensor.name][2]
    groups = np.frombuffer(data[begin : begin + tensor.nbytes], np.uint8).reshape(-1, 18)
    nibbles = np.concatenate([groups[:, 2:] & 15, groups[:, 2:] >> 4], axis=1).astype(np.float64) - 8
    weights = nibbles * groups[:, :2].copy().view(np.float16).astype(np.float64)
    assert abs(weights.mean()) < 0.01 * weights.std()
    assert weights.std() == pytest.approx(tensor.shape[-1] ** -0.5, rel=0.01)


def test_a_seed_gives_its_bytes_and_nothing_half_written_stays(
    written: tuple[Path, ModelConfig], tmp_path: Path
) -> None:
    path, config = written
    again = tmp_path / "again.gguf"
    write_gguf(again, config, seed=0, progress=lambda done, total: None)
    assert again.read_bytes() == path.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["again.gguf"]
