"""Checkpoint files at the door: damaged, foreign or inconsistent ones are refused with tensor, got and expected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import packed_checkpoint, vector_checkpoint

from engine.config import ModelConfig
from engine.errors import ModelFileError
from engine.weights import DeltaNetWeights, ModelFile, Weights, load_weights

LAYER = "model.language_model.layers.0."
Edit = Callable[[dict[str, Any], bytearray], None]


def load(directory: Path) -> Weights:
    return load_weights(directory, ModelConfig.load(directory))


def rewrite(directory: Path, edit: Edit) -> None:
    """Change header and data of a checkpoint's file."""
    path = directory / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    edit(header, data)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return vector_checkpoint(tmp_path / "a", "a")


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_checkpoint(tmp_path / "packed")


class TestBinding:
    def test_norms_become_gains_except_the_gated_one(self, checkpoint: Path) -> None:
        weights = load(checkpoint)
        file = ModelFile(checkpoint)
        stored = file.floats(f"{LAYER}input_layernorm.weight", (64,))
        assert np.array_equal(weights.layers[0].input_norm, 1 + stored)
        mixer = weights.layers[0].mixer
        assert isinstance(mixer, DeltaNetWeights)
        assert np.array_equal(mixer.norm, file.floats(f"{LAYER}linear_attn.norm.weight", (16,)))
        assert np.array_equal(mixer.minus_a, -np.exp(file.floats(f"{LAYER}linear_attn.A_log", (4,))))
        assert np.array_equal(mixer.conv.T, file.floats(f"{LAYER}linear_attn.conv1d.weight", (128, 1, 4))[:, 0])

    def test_packed_matrices_are_used_in_place(self, packed: Path) -> None:
        weights = load(packed)
        assert weights.head.packed
        assert not weights.head.data.flags.writeable
        assert np.shares_memory(weights.head.data, weights.file.get("lm_head.weight").data)
        assert weights.head.data.ctypes.data % 64 == 0

    def test_plain_floats_convert(self, tmp_path: Path, checkpoint: Path) -> None:
        rng = np.random.default_rng(0)
        values = rng.standard_normal(64).astype(np.float16).astype(np.float32)
        bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
        name = f"{LAYER}input_layernorm.weight"
        for dtype, data, expected in (
            ("F32", values.tobytes(), values),
            ("F16", values.astype(np.float16).tobytes(), values),
            ("BF16", bf16.tobytes(), (bf16.astype(np.uint32) << 16).view(np.float32)),
        ):
            directory = tmp_path / dtype
            directory.mkdir()
            header = {name: {"dtype": dtype, "shape": [64], "data_offsets": [0, len(data)]}}
            text = json.dumps(header).encode()
            (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
            assert np.array_equal(ModelFile(directory).floats(name, (64,)), expected)

    def test_expert_count_comes_from_the_tensors(self, checkpoint: Path) -> None:
        config = json.loads((checkpoint / "config.json").read_text())
        config["text_config"]["num_experts"] = 256
        (checkpoint / "config.json").write_text(json.dumps(config))
        assert load(checkpoint).config.num_experts == 8

    def test_shards_named_by_an_index(self, tmp_path: Path, checkpoint: Path) -> None:
        whole = load(checkpoint)
        (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(whole.file.tensors, "model-00001-of-00001.safetensors")}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        assert np.array_equal(load(checkpoint).final_norm, whole.final_norm)
        index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelFileError, match="not the name of a file beside it"):
            load(checkpoint)


class TestRefusals:
    def test_missing_tensor(self, checkpoint: Path) -> None:
        def rename(header: dict[str, Any], data: bytearray) -> None:
            header["padding.0"] = header.pop(f"{LAYER}linear_attn.dt_bias")

        rewrite(checkpoint, rename)
        with pytest.raises(ModelFileError, match=r"tensor 'model\.language_model\.layers\.0.*dt_bias' is missing"):
            load(checkpoint)

    @pytest.mark.parametrize(
        "name", ["model.language_model.layers.4.input_layernorm.weight", "model.visual.x", "mtp.x"]
    )
    def test_unexpected_tensor(self, checkpoint: Path, name: str) -> None:
        def add(header: dict[str, Any], data: bytearray) -> None:
            header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
            data += bytes(4)

        rewrite(checkpoint, add)
        with pytest.raises(ModelFileError, match=f"unexpected tensor '{name}'"):
            load(checkpoint)

    @pytest.mark.parametrize(
        "name",
        [
            "lm_head.weight",
            f"{LAYER}linear_attn.conv1d.weight",
            f"{LAYER}mlp.experts.down_proj",
            "mtp.fc.weight",
            "mtp.layers.0.mlp.gate.weight",
            "model.visual.merger.norm.weight",
        ],
    )
    def test_wrong_shape_says_got_and_expected(self, checkpoint: Path, name: str) -> None:
        def flatten(header: dict[str, Any], data: bytearray) -> None:
            shape = header[name]["shape"]
            header[name]["shape"] = [int(np.prod(shape)), 1, 1, 1]

        rewrite(checkpoint, flatten)
        with pytest.raises(ModelFileError, match=rf"tensor '{name}': got BF16 \[.*\], expected F32 or F16 or BF16 \["):
            load(checkpoint)

    def test_wrong_type(self, checkpoint: Path) -> None:
        rewrite(checkpoint, lambda header, data: header["lm_head.weight"].update(dtype="I16"))
        with pytest.raises(ModelFileError, match=r"'lm_head.weight': got I16 \[512, 64\], expected F32 or F16 or BF16"):
            load(checkpoint)

    def test_packed_tensor_needs_the_quantization_section(self, packed: Path) -> None:
        config = json.loads((packed / "config.json").read_text())
        del config["quantization_config"]
        (packed / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelFileError, match=r"is packed, but config\.json has no quantization_config"):
            load(packed)

    def test_packed_tensor_of_another_layout(self, packed: Path) -> None:
        def reshape(header: dict[str, Any], data: bytearray) -> None:
            header["lm_head.weight"]["shape"] = [512 // 16, 128 // 64 * 576]

        rewrite(packed, reshape)
        with pytest.raises(ModelFileError, match=r"got U8 \[32, 1152\], expected U8 \[32, 2, 576\]"):
            load(packed)

    def test_router_is_never_packed(self, packed: Path) -> None:
        rewrite(packed, lambda header, data: header[f"{LAYER}mlp.gate.weight"].update(dtype="U8", shape=[6 * 128 * 4]))
        with pytest.raises(ModelFileError, match=r"mlp\.gate\.weight': got U8"):
            load(packed)

    def test_unaligned_packed_tensor(self, packed: Path) -> None:
        path = packed / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        text = content[8 : 8 + length] + b"    "
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        with pytest.raises(ModelFileError, match="does not start at a multiple of 64 bytes"):
            load(packed)

    def test_more_experts_wanted_than_there_are(self, checkpoint: Path) -> None:
        config = json.loads((checkpoint / "config.json").read_text())
        config["text_config"]["num_experts_per_tok"] = 9
        (checkpoint / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelFileError, match="8 experts, but 9 are to be chosen per token"):
            load(checkpoint)


class TestContainer:
    @pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 1000, -1, -1000])
    def test_truncated_anywhere(self, checkpoint: Path, keep: int) -> None:
        path = checkpoint / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ModelFileError, match=r"model\.safetensors: .*truncated|got \d+ bytes of data"):
            load(checkpoint)

    @pytest.mark.parametrize("content", [b"GGUF" + bytes(1000), bytes(100), b"\x02" + bytes(7) + b"[]", b"x" * 64])
    def test_foreign_file(self, checkpoint: Path, content: bytes) -> None:
        (checkpoint / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelFileError, match=r"model\.safetensors"):
            load(checkpoint)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("data_offsets", [0, 5]),
            ("data_offsets", [64, 128]),
            ("data_offsets", [-1, 3]),
            ("data_offsets", "0"),
            ("data_offsets", [0]),
            ("data_offsets", [0, True]),
            ("shape", "64"),
            ("shape", [-64]),
            ("shape", [1] * 9),
            ("dtype", "Q4"),
            ("dtype", None),
        ],
    )
    def test_bad_entry_names_the_tensor(self, checkpoint: Path, field: str, value: object) -> None:
        rewrite(checkpoint, lambda header, data: header["lm_head.weight"].update({field: value}))
        with pytest.raises(ModelFileError, match=r"tensor '"):
            load(checkpoint)

    def test_overlapping_tensors(self, checkpoint: Path) -> None:
        def overlap(header: dict[str, Any], data: bytearray) -> None:
            header["mtp.norm.weight"]["data_offsets"] = header["mtp.pre_fc_norm_hidden.weight"]["data_offsets"]

        rewrite(checkpoint, overlap)
        with pytest.raises(ModelFileError, match=r"got bytes \d+\.\.\d+, expected \d+\.\.\d+"):
            load(checkpoint)

    def test_name_twice_in_the_header(self, checkpoint: Path) -> None:
        path = checkpoint / "model.safetensors"
        entry = b'"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        text = b"{" + entry + b"," + entry + b"}"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(ModelFileError, match="twice"):
            load(checkpoint)

    def test_no_file_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"neither model\.safetensors nor"):
            ModelFile(tmp_path)


def test_the_sampled_digest_follows_content_and_not_the_place(checkpoint: Path, tmp_path: Path) -> None:
    digest = ModelFile(checkpoint).sampled_digest()
    assert ModelFile(vector_checkpoint(tmp_path / "copy", "a")).sampled_digest() == digest

    def change(position: int) -> bytes:
        other = vector_checkpoint(tmp_path / f"other{position}", "a")

        def flip(header: dict[str, Any], data: bytearray) -> None:
            data[position] ^= 1

        rewrite(other, flip)
        return ModelFile(other).sampled_digest()

    assert len({digest, change(0), change(-1)}) == 3
