"""Small checkpoint directories for tests: the ones behind tests/vectors, and a random packed one; and how far results
lie apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine import formats
from engine.config import QUANTIZATION, EngineConfig, ModelConfig
from engine.model import Model
from engine.weights import load_weights

VECTORS = Path(__file__).parent / "vectors"
Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]  # name -> (dtype, shape, data)


def vector_checkpoint(directory: Path, name: str, file: str | None = None) -> Path:
    """The model behind tests/vectors/`name`.npz; `file` names another form of its weights."""
    directory.mkdir(exist_ok=True)
    shutil.copy(VECTORS / f"{file or name}.safetensors", directory / "model.safetensors")
    shutil.copy(VECTORS / f"{name}.json", directory / "config.json")
    write_tokenizer(directory)
    return directory


def packed_checkpoint(directory: Path) -> Path:
    """A random 4-bit checkpoint with every kind of layer: 3 delta nets and 1 attention, 6 experts of 64, vocabulary
    512 of which the tokenizer uses 258."""
    directory.mkdir(exist_ok=True)
    config = json.loads((VECTORS / "a.json").read_text())
    del config["vision_config"]
    config["quantization_config"] = dict(QUANTIZATION)
    config["text_config"].update(
        hidden_size=128, head_dim=64, linear_key_head_dim=32, linear_value_head_dim=64, num_experts=6,
        moe_intermediate_size=64, shared_expert_intermediate_size=64, mtp_num_hidden_layers=0,
    )  # fmt: skip
    config["text_config"]["rope_parameters"].update(mrope_section=[4, 2, 2])
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", dict(_packed_tensors()))
    write_tokenizer(directory)
    return directory


def add_turn_token(directory: Path) -> tokenizers.Tokenizer:
    """Gives the directory's tokenizer the token that opens turns, id 258, which prompts are cut at."""
    path = str(directory / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|im_start|>", normalized=False)])
    tokenizer.save(path)
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Byte-level without merges: ids 0..255, then a special token and a visible added one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([tokenizers.AddedToken("<|im_end|>", special=True, normalized=False)])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Tensors in the order given, each starting at a multiple of 64 bytes."""
    header: dict[str, Any] = {}
    data = bytearray()
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
        if fill := -len(data) % 64:
            pad = {"dtype": "U8", "shape": [fill], "data_offsets": [len(data), len(data) + fill]}
            header[f"padding.{len(header)}"] = pad
            data += bytes(fill)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


def load_model(directory: Path, **settings: Any) -> Model:
    """A model with one unpinned thread and a context of 4096, unless `settings` (of EngineConfig) say otherwise."""
    config = EngineConfig(**{"threads": 1, **settings})
    weights = load_weights(directory, ModelConfig.load(directory))
    return Model(weights, config, threads=config.threads or 1, cpus=None, max_context=4096)


def deviation(got: npt.NDArray[np.float32], expected: npt.NDArray[np.generic]) -> float:
    """Largest difference relative to the scale of what is expected."""
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def _packed_tensors() -> Iterator[tuple[str, tuple[str, tuple[int, ...], bytes]]]:
    rng = np.random.default_rng(5)

    def packed(name: str, *shape: int) -> tuple[str, tuple[str, tuple[int, ...], bytes]]:
        weights = rng.standard_normal(shape, np.float32) * (1.0 if "embed" in name else shape[-1] ** -0.5)
        flat = weights.reshape(-1, shape[-1])
        blocks = formats.pack_q4(*formats.quantize_absmax(flat))
        return name, ("U8", formats.packed_shape(shape), blocks.tobytes())

    def floats(name: str, *shape: int, scale: float = 0.3) -> tuple[str, tuple[str, tuple[int, ...], bytes]]:
        return name, ("F32", shape, (rng.standard_normal(shape, np.float32) * scale).tobytes())

    yield packed("model.language_model.embed_tokens.weight", 512, 128)
    yield packed("lm_head.weight", 512, 128)
    yield floats("model.language_model.norm.weight", 128)
    for i in range(4):
        layer = f"model.language_model.layers.{i}."
        yield floats(f"{layer}input_layernorm.weight", 128)
        yield floats(f"{layer}post_attention_layernorm.weight", 128)
        if i == 3:
            yield packed(f"{layer}self_attn.q_proj.weight", 512, 128)
            yield packed(f"{layer}self_attn.k_proj.weight", 128, 128)
            yield packed(f"{layer}self_attn.v_proj.weight", 128, 128)
            yield packed(f"{layer}self_attn.o_proj.weight", 128, 256)
            yield floats(f"{layer}self_attn.q_norm.weight", 64)
            yield floats(f"{layer}self_attn.k_norm.weight", 64)
        else:
            yield packed(f"{layer}linear_attn.in_proj_qkv.weight", 384, 128)
            yield packed(f"{layer}linear_attn.in_proj_z.weight", 256, 128)
            yield floats(f"{layer}linear_attn.in_proj_b.weight", 4, 128, scale=0.09)
            yield floats(f"{layer}linear_attn.in_proj_a.weight", 4, 128, scale=0.09)
            yield packed(f"{layer}linear_attn.out_proj.weight", 128, 256)
            yield floats(f"{layer}linear_attn.conv1d.weight", 384, 1, 4)
            yield floats(f"{layer}linear_attn.A_log", 4)
            yield floats(f"{layer}linear_attn.dt_bias", 4)
            yield floats(f"{layer}linear_attn.norm.weight", 64, scale=1.0)
        yield floats(f"{layer}mlp.gate.weight", 6, 128, scale=0.09)
        yield floats(f"{layer}mlp.shared_expert_gate.weight", 1, 128, scale=0.09)
        yield packed(f"{layer}mlp.experts.gate_up_proj", 6, 128, 128)
        yield packed(f"{layer}mlp.experts.down_proj", 6, 128, 64)
        yield packed(f"{layer}mlp.shared_expert.gate_proj.weight", 64, 128)
        yield packed(f"{layer}mlp.shared_expert.up_proj.weight", 64, 128)
        yield packed(f"{layer}mlp.shared_expert.down_proj.weight", 128, 64)
