"""A small checkpoint whose sizes the CUDA kernels cover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import VECTORS, write_safetensors, write_tokenizer

from engine import formats
from engine.config import QUANTIZATION, parse_config
from engine.weights import vision_shapes


def card_checkpoint(directory: Path, *, sees: bool = False) -> Path:
    """A random 4-bit model of sizes that the kernels cover: 3 delta nets and 1 attention, grouped heads, 6 experts.
    sees: with a vision tower of two blocks; 508 is a picture's placeholder."""
    directory.mkdir()
    config = json.loads((VECTORS / "a.json").read_text())
    if sees:
        config["vision_config"].update(
            depth=2, hidden_size=48, intermediate_size=96, num_heads=4, num_position_embeddings=64, out_hidden_size=128
        )
    else:
        del config["vision_config"]
    config["quantization_config"] = dict(QUANTIZATION)
    config["text_config"].update(
        hidden_size=128, head_dim=64, num_attention_heads=4, num_key_value_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64, vocab_size=512,
        mtp_num_hidden_layers=0,
    )  # fmt: skip
    config["text_config"]["rope_parameters"].update(mrope_section=[4, 2, 2])
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(5)
    tensors: dict[str, Any] = {}

    def packed(name: str, *shape: int) -> None:
        weights = rng.standard_normal(shape, np.float32) * (1.0 if "embed" in name else shape[-1] ** -0.5)
        blocks = formats.pack_q4(*formats.quantize_absmax(weights.reshape(-1, shape[-1])))
        tensors[name] = ("U8", formats.packed_shape(shape), blocks.tobytes())

    def floats(name: str, *shape: int, scale: float = 0.3) -> None:
        tensors[name] = ("F32", shape, (rng.standard_normal(shape, np.float32) * scale).tobytes())

    packed("model.language_model.embed_tokens.weight", 512, 128)
    packed("lm_head.weight", 512, 128)
    floats("model.language_model.norm.weight", 128)
    for i in range(4):
        layer = f"model.language_model.layers.{i}."
        floats(f"{layer}input_layernorm.weight", 128)
        floats(f"{layer}post_attention_layernorm.weight", 128)
        if i == 3:
            for name, rows, cols in (("q", 512, 128), ("k", 128, 128), ("v", 128, 128), ("o", 128, 256)):
                packed(f"{layer}self_attn.{name}_proj.weight", rows, cols)
            floats(f"{layer}self_attn.q_norm.weight", 64)
            floats(f"{layer}self_attn.k_norm.weight", 64)
        else:
            for name, rows, cols in (("in_proj_qkv", 256, 128), ("in_proj_z", 128, 128), ("out_proj", 128, 128)):
                packed(f"{layer}linear_attn.{name}.weight", rows, cols)
            floats(f"{layer}linear_attn.in_proj_b.weight", 4, 128, scale=0.09)
            floats(f"{layer}linear_attn.in_proj_a.weight", 4, 128, scale=0.09)
            floats(f"{layer}linear_attn.conv1d.weight", 256, 1, 4)
            floats(f"{layer}linear_attn.A_log", 4)
            floats(f"{layer}linear_attn.dt_bias", 4)
            floats(f"{layer}linear_attn.norm.weight", 32, scale=1.0)
        floats(f"{layer}mlp.gate.weight", 6, 128, scale=0.2)
        floats(f"{layer}mlp.shared_expert_gate.weight", 1, 128, scale=0.2)
        packed(f"{layer}mlp.experts.gate_up_proj", 6, 128, 128)
        packed(f"{layer}mlp.experts.down_proj", 6, 128, 64)
        packed(f"{layer}mlp.shared_expert.gate_proj.weight", 64, 128)
        packed(f"{layer}mlp.shared_expert.up_proj.weight", 64, 128)
        packed(f"{layer}mlp.shared_expert.down_proj.weight", 128, 64)
    vision = parse_config(directory / "config.json", config).vision
    for name, shape in () if vision is None else vision_shapes(vision):
        if len(shape) == 1:
            floats(name, *shape)
        else:
            values = rng.standard_normal(shape, np.float32) * np.prod(shape[1:]) ** -0.5
            tensors[name] = ("F16", shape, values.astype(np.float16).tobytes())
    write_safetensors(directory / "model.safetensors", tensors)
    write_tokenizer(directory)
    return directory
