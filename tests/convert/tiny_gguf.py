"""Writes the tiny checkpoints as GGUF: the transforms of the public converter, applied independently of our reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tiny_checkpoint import PREFIX, TEXT_CONFIG, Weights

ARCHITECTURE = "qwen35moe"
KEY_HEADS, VALUE_HEADS = 2, 4
F32 = GGMLQuantizationType.F32

LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
OTHER_NAMES = {
    f"{PREFIX}embed_tokens.weight": "token_embd.weight",
    f"{PREFIX}norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
MTP_NAMES = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
TOKENS = (
    ("a", 1), ("b", 1), ("ab", 1), ("<|endoftext|>", 3), ("<|im_end|>", 3), ("<think>", 4), ("<|image_pad|>", 3),
    ("[PAD7]", 5),
)  # fmt: skip
VISION_NAMES = {
    "pos_embed": "v.position_embd",
    "patch_embed.proj": "v.patch_embd",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}


def tiled(value: npt.NDArray[np.float32], axis: int, width: int) -> npt.NDArray[np.float32]:
    """Value heads of `width` entries along an axis, from grouped [key head, repeat] to tiled [repeat, key head]."""
    moved = np.moveaxis(value, axis, 0)
    repeats = VALUE_HEADS // KEY_HEADS
    heads = moved.reshape(KEY_HEADS, repeats, width, *moved.shape[1:])
    return np.moveaxis(heads.swapaxes(0, 1).reshape(moved.shape), 0, axis)


def grouped(value: npt.NDArray[np.float32], axis: int, width: int) -> npt.NDArray[np.float32]:
    """The inverse of `tiled`."""
    moved = np.moveaxis(value, axis, 0)
    heads = moved.reshape(VALUE_HEADS // KEY_HEADS, KEY_HEADS, width, *moved.shape[1:])
    return np.moveaxis(heads.swapaxes(0, 1).reshape(moved.shape), 0, axis)


def transformed(name: str, value: npt.NDArray[np.float32], value_dim: int = 32) -> npt.NDArray[np.float32]:
    """What the public converter stores for one published text tensor."""
    if "norm" in name and "linear_attn" not in name:
        return value + np.float32(1)
    if name.endswith("conv1d.weight"):
        value = value[:, 0]
    if "A_log" in name:
        value = -np.exp(value)
    value = reordered(name, value, value_dim, tiled)
    return value[0] if "shared_expert_gate" in name else value


def reordered(
    name: str, value: npt.NDArray[np.float32], value_dim: int, order: Callable[..., npt.NDArray[np.float32]]
) -> npt.NDArray[np.float32]:
    """Value heads of a published tensor in the order `tiled` or `grouped`."""
    if "in_proj_qkv" in name or "conv1d" in name:
        key_rows = len(value) - VALUE_HEADS * value_dim
        return np.concatenate([value[:key_rows], order(value[key_rows:], 0, value_dim)])
    if "in_proj_z" in name:
        return order(value, 0, value_dim)
    if any(part in name for part in ("in_proj_a", "in_proj_b", "dt_bias", "A_log")):
        return order(value, 0, 1)
    return order(value, 1, value_dim) if "out_proj" in name else value


def text_name(name: str, layers: int = 4) -> str:
    """Stored name of a published text tensor of a model with so many layers."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    if name in MTP_NAMES:
        return f"blk.{layers}.{MTP_NAMES[name]}"
    head, index, suffix = name.removeprefix(PREFIX).removeprefix("mtp.").split(".", 2)
    assert head == "layers"
    return f"blk.{layers if name.startswith('mtp.') else index}.{LAYER_NAMES[suffix]}"


def text_tensors(weights: Weights, *, fused: bool, text: dict[str, Any] = TEXT_CONFIG) -> Weights:
    """All text tensors as stored, gate and up together or apart."""
    layers, value_dim = text["num_hidden_layers"], text["linear_value_head_dim"]
    stored = {text_name(n, layers): transformed(n, v, value_dim) for n, v in weights.items() if "visual" not in n}
    if not fused:
        for name in [name for name in stored if "gate_up_exps" in name]:
            both = stored.pop(name)
            stored[name.replace("gate_up", "gate")] = both[:, : both.shape[1] // 2]
            stored[name.replace("gate_up", "up")] = both[:, both.shape[1] // 2 :]
    return stored


def vision_tensors(weights: Weights) -> Weights:
    """The vision tower as stored: two temporal slices of the patch convolution, short names."""
    stored = {}
    for name, value in weights.items():
        if not name.startswith("model.visual."):
            continue
        stem, _, kind = name.removeprefix("model.visual.").rpartition(".")
        if stem.startswith("blocks."):
            _, index, part = stem.split(".", 2)
            stored[f"v.blk.{index}.{VISION_NAMES[part]}.{kind}"] = value
        elif stem == "patch_embed.proj" and kind == "weight":
            stored["v.patch_embd.weight"], stored["v.patch_embd.weight.1"] = value[:, :, 0], value[:, :, 1]
        else:
            stored[f"{VISION_NAMES[stem]}.{kind}"] = value
    return stored


def write_text(
    path: Path,
    tensors: Weights,
    *,
    mtp: bool = True,
    quantized: dict[str, GGMLQuantizationType] | None = None,
    blocks: dict[str, tuple[GGMLQuantizationType, npt.NDArray[np.uint8]]] | None = None,
    split_tensors: int = 0,
    text: dict[str, Any] = TEXT_CONFIG,
    tokens: Sequence[tuple[str, int]] = TOKENS,
    merges: Sequence[str] = ("a b",),
    end: int = 4,
) -> None:
    """The text model; `quantized` names the tensors that are not F32, `blocks` those whose bytes are given instead.
    tokens: text and type number; end: the id that ends an answer."""
    writer = GGUFWriter(path, ARCHITECTURE, split_max_tensors=split_tensors)
    writer.add_block_count(text["num_hidden_layers"] + int(mtp))
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(text["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(int(text["head_dim"] * text["rope_parameters"]["partial_rotary_factor"]))
    writer.add_array(f"{ARCHITECTURE}.rope.dimension_sections", [*text["rope_parameters"]["mrope_section"], 0])
    writer.add_expert_count(text["num_experts"])
    writer.add_expert_used_count(text["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(text["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(text["linear_key_head_dim"])
    writer.add_ssm_group_count(KEY_HEADS)
    writer.add_ssm_time_step_rank(VALUE_HEADS)
    writer.add_ssm_inner_size(VALUE_HEADS * text["linear_value_head_dim"])
    writer.add_uint32(f"{ARCHITECTURE}.full_attention_interval", 4)
    if mtp:
        writer.add_uint32(f"{ARCHITECTURE}.nextn_predict_layers", 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(end)
    writer.add_chat_template("{{ messages }}")
    _write(writer, tensors, quantized or {}, blocks or {})


def write_vision(path: Path, tensors: Weights, quantized: dict[str, GGMLQuantizationType] | None = None) -> None:
    """The vision tower's own file."""
    writer = GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    numbers = {
        "block_count": 2,
        "embedding_length": 48,
        "feed_forward_length": 100,
        "projection_dim": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "attention.head_count": 4,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    _write(writer, tensors, quantized or {}, {})


def _write(
    writer: GGUFWriter,
    tensors: Weights,
    quantized: dict[str, GGMLQuantizationType],
    blocks: dict[str, tuple[GGMLQuantizationType, npt.NDArray[np.uint8]]],
) -> None:
    for name, value in tensors.items():
        kind = quantized.get(name, F32)
        if name in blocks:
            kind, raw = blocks[name]
            writer.add_tensor(name, raw, raw_dtype=kind)
        elif kind is F32:
            writer.add_tensor(name, np.ascontiguousarray(value))
        else:
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
