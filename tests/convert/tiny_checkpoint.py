"""Tiny random checkpoints in the published layouts, written without any machine-learning package.

Every 1-D parameter is random (fresh models have zeros and ones there, which hide a lost +1), value heads differ
from key heads, and all widths divide into packed blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.convert.safetensors import INDEX_NAME, TensorInfo

Weights = dict[str, npt.NDArray[np.float32]]

PREFIX = "model.language_model."
TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
# The same with every width a multiple of 256, which is what the larger quantisation blocks of GGUF divide into.
WIDE_CONFIG: dict[str, Any] = {
    **TEXT_CONFIG,
    "vocab_size": 64,
    "hidden_size": 256,
    "head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "rope_parameters": {**TEXT_CONFIG["rope_parameters"], "mrope_section": [3, 3, 2]},
}
VISION_CONFIG = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 100,
    "in_channels": 3,
    "num_heads": 4,
    "num_position_embeddings": 64,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def bf16_exact(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rounded towards zero to what BF16 holds."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def random_weights(
    *,
    seed: int = 0,
    vision: bool = True,
    mtp: bool = True,
    experts: int | None = None,
    text: dict[str, Any] = TEXT_CONFIG,
) -> Weights:
    """All tensors under their published names, experts fused; values exact in BF16."""
    rng = np.random.default_rng(seed)
    c, weights = text, {}
    hidden, width, shared = c["hidden_size"], c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
    heads, kv_heads, head = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    value_heads, value_dim = c["linear_num_value_heads"], c["linear_value_head_dim"]
    values = value_heads * value_dim
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    experts = c["num_experts"] if experts is None else experts

    def add(name: str, *shape: int) -> None:
        scale = 0.3 if len(shape) == 1 else 0.05
        weights[name] = bf16_exact(rng.standard_normal(shape, np.float32) * np.float32(scale))

    def layer(prefix: str, full: bool) -> None:
        add(f"{prefix}input_layernorm.weight", hidden)
        add(f"{prefix}post_attention_layernorm.weight", hidden)
        if full:
            add(f"{prefix}self_attn.q_proj.weight", 2 * heads * head, hidden)
            add(f"{prefix}self_attn.k_proj.weight", kv_heads * head, hidden)
            add(f"{prefix}self_attn.v_proj.weight", kv_heads * head, hidden)
            add(f"{prefix}self_attn.o_proj.weight", hidden, heads * head)
            add(f"{prefix}self_attn.q_norm.weight", head)
            add(f"{prefix}self_attn.k_norm.weight", head)
        else:
            add(f"{prefix}linear_attn.in_proj_qkv.weight", channels, hidden)
            add(f"{prefix}linear_attn.in_proj_z.weight", values, hidden)
            add(f"{prefix}linear_attn.in_proj_b.weight", value_heads, hidden)
            add(f"{prefix}linear_attn.in_proj_a.weight", value_heads, hidden)
            add(f"{prefix}linear_attn.conv1d.weight", channels, 1, 4)
            add(f"{prefix}linear_attn.A_log", value_heads)
            add(f"{prefix}linear_attn.dt_bias", value_heads)
            add(f"{prefix}linear_attn.norm.weight", value_dim)
            add(f"{prefix}linear_attn.out_proj.weight", hidden, values)
        add(f"{prefix}mlp.gate.weight", experts, hidden)
        add(f"{prefix}mlp.experts.gate_up_proj", experts, 2 * width, hidden)
        add(f"{prefix}mlp.experts.down_proj", experts, hidden, width)
        add(f"{prefix}mlp.shared_expert.gate_proj.weight", shared, hidden)
        add(f"{prefix}mlp.shared_expert.up_proj.weight", shared, hidden)
        add(f"{prefix}mlp.shared_expert.down_proj.weight", hidden, shared)
        add(f"{prefix}mlp.shared_expert_gate.weight", 1, hidden)

    add(f"{PREFIX}embed_tokens.weight", c["vocab_size"], hidden)
    add("lm_head.weight", c["vocab_size"], hidden)
    add(f"{PREFIX}norm.weight", hidden)
    for index, kind in enumerate(c["layer_types"]):
        layer(f"{PREFIX}layers.{index}.", kind == "full_attention")
    if mtp:
        add("mtp.fc.weight", hidden, 2 * hidden)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            add(f"mtp.{name}.weight", hidden)
        layer("mtp.layers.0.", True)
    if vision:
        _add_vision(add)
    return weights


def _add_vision(add: object) -> None:
    assert callable(add)

    def linear(name: str, *shape: int) -> None:
        add(f"model.visual.{name}.weight", *shape)
        add(f"model.visual.{name}.bias", shape[0])

    linear("patch_embed.proj", 48, 3, 2, 16, 16)
    add("model.visual.pos_embed.weight", 64, 48)
    for index in range(2):
        linear(f"blocks.{index}.norm1", 48)
        linear(f"blocks.{index}.norm2", 48)
        linear(f"blocks.{index}.attn.qkv", 144, 48)
        linear(f"blocks.{index}.attn.proj", 48, 48)
        linear(f"blocks.{index}.mlp.linear_fc1", 100, 48)
        linear(f"blocks.{index}.mlp.linear_fc2", 48, 100)
    linear("merger.norm", 48)
    linear("merger.linear_fc1", 192, 192)
    linear("merger.linear_fc2", 64, 192)


def per_expert(weights: Weights) -> Weights:
    """The same model with every expert matrix stored by itself."""
    split: Weights = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            width = value.shape[1] // 2
            for expert, matrix in enumerate(value):
                split[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = matrix[:width]
                split[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = matrix[width:]
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(value):
                split[name.replace("down_proj", f"{expert}.down_proj.weight")] = matrix
        else:
            split[name] = value
    return split


def write_safetensors(path: Path, weights: Weights, dtype: str = "BF16") -> None:
    """One shard; dtype BF16, F16 or F32 for all tensors."""
    fields, chunks, position = {}, [], 0
    for name, value in weights.items():
        chunk = encode(value, dtype)
        info = TensorInfo(name, dtype, value.shape)
        fields[name] = {"dtype": dtype, "shape": list(info.shape), "data_offsets": [position, position + len(chunk)]}
        chunks.append(chunk)
        position += len(chunk)
    write_raw(path, fields, b"".join(chunks))


def write_raw(path: Path, fields: object, data: bytes) -> None:
    """A safetensors file with any header, honest or not."""
    text = json.dumps(fields).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def encode(value: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Little-endian bytes of float32 values as BF16, F16 or F32."""
    if dtype == "BF16":
        return (np.ascontiguousarray(value).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return value.astype({"F16": np.float16, "F32": np.float32}[dtype]).tobytes()


def config(
    *, vision: bool = True, mtp: bool = True, experts: int | None = None, text: dict[str, Any] = TEXT_CONFIG
) -> dict[str, object]:
    """A nested published config."""
    text = {**text, "mtp_num_hidden_layers": int(mtp)} | ({} if experts is None else {"num_experts": experts})
    nested: dict[str, object] = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": text,
        "image_token_id": 120,
    }
    if vision:
        nested["vision_config"] = dict(VISION_CONFIG)
    return nested


def write_checkpoint(
    directory: Path,
    weights: Weights,
    model_config: dict[str, object],
    *,
    dtype: str = "BF16",
    shards: int = 1,
) -> Path:
    """A source directory: shards with an index, or one file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config))
    (directory / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    (directory / "generation_config.json").write_text('{"eos_token_id": [1]}')
    (directory / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    if shards == 1:
        write_safetensors(directory / "model.safetensors", weights, dtype)
        return directory
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        write_safetensors(directory / file_name, part, dtype)
        weight_map |= dict.fromkeys(part, file_name)
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
