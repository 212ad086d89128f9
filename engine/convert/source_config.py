"""The published config.json: read, checked for what this engine computes, and put in one nested form.

A checkpoint may be multimodal (nested `text_config`) or a text-only save (flat). Keys keep their published names.
A setting that would change the computation and that the engine does not implement is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelFileError

MAX_CONFIG_BYTES = 16 << 20
MAX_LAYERS = 1024
MULTIMODAL_TYPE = "qwen3_5_moe"
TEXT_TYPE = "qwen3_5_moe_text"
QUANTIZATION = {"quant_method": "fermion", "format_version": 1, "bits": 4, "group_size": 32, "layout": "q4_16x64"}

# Keys with the only value the engine computes; absent means that value.
_FIXED: dict[str, object] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "output_gate_type": None,
    "norm_topk_prob": True,
    "mtp_use_dedicated_embeddings": False,
}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class VisionGeometry:
    """Sizes of the vision tower."""

    depth: int
    hidden: int
    intermediate: int
    channels: int
    temporal_patch: int
    patch: int
    merge: int
    positions: int
    out_hidden: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Every size that a tensor shape depends on. `full_attention[i]`: layer i is full attention, else GDN."""

    vocab: int
    hidden: int
    full_attention: tuple[bool, ...]
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    experts: int
    expert_hidden: int
    shared_hidden: int
    tied: bool
    vision: VisionGeometry | None

    @property
    def qkv_rows(self) -> int:
        """Rows of in_proj_qkv: q and k of every key head, then v of every value head."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_rows(self) -> int:
        """Width of all value heads together."""
        return self.value_heads * self.value_dim


def load_json(path: Path) -> Json:
    """A JSON object from a file of at most 16 MiB. Raises ModelFileError."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelFileError(f"{path}: {path.stat().st_size} bytes, at most {MAX_CONFIG_BYTES} accepted")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def dump_json(value: Json) -> bytes:
    """The text of a JSON file, keys in their order."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def load_config(path: Path) -> Json:
    """config.json in nested form: `model_type` qwen3_5_moe with `text_config`, and `vision_config` if present.

    The source's `quantization_config` is kept for the caller to judge. Raises ModelFileError for other models.
    """
    config = load_json(path)
    model_type = config.get("model_type")
    if model_type == TEXT_TYPE:
        config = _nest(config)
    elif model_type != MULTIMODAL_TYPE:
        raise ModelFileError(
            f"{path}: model_type is {model_type!r}, this converter reads {MULTIMODAL_TYPE!r} and {TEXT_TYPE!r}"
        )
    text = _section(path, config, "text_config")
    for key, only in _FIXED.items():
        if text.get(key, only) != only:
            raise ModelFileError(f"{path}: text_config.{key} is {text[key]!r}, the engine computes only {only!r}")
    if "vision_config" in config and _section(path, config, "vision_config").get("deepstack_visual_indexes"):
        raise ModelFileError(f"{path}: vision_config.deepstack_visual_indexes is not empty: not supported")
    return config


def geometry(path: Path, config: Json) -> Geometry:
    """Sizes from a nested config; `path` is for messages. Raises ModelFileError for missing or absurd values."""
    text = _section(path, config, "text_config")

    def size(key: str) -> int:
        return _size(path, text, "text_config", key)

    return Geometry(
        vocab=size("vocab_size"),
        hidden=size("hidden_size"),
        full_attention=_full_attention(path, text, size("num_hidden_layers")),
        heads=size("num_attention_heads"),
        kv_heads=size("num_key_value_heads"),
        head_dim=size("head_dim"),
        key_heads=size("linear_num_key_heads"),
        value_heads=size("linear_num_value_heads"),
        key_dim=size("linear_key_head_dim"),
        value_dim=size("linear_value_head_dim"),
        conv_kernel=size("linear_conv_kernel_dim"),
        experts=size("num_experts"),
        expert_hidden=size("moe_intermediate_size"),
        shared_hidden=size("shared_expert_intermediate_size"),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        vision=_vision(path, config) if "vision_config" in config else None,
    )


def _nest(text: Json) -> Json:
    top: Json = {key: text[key] for key in ("quantization_config", "tie_word_embeddings", "dtype") if key in text}
    inner = {key: value for key, value in text.items() if key not in ("quantization_config", "architectures")}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": MULTIMODAL_TYPE,
        **top,
        "text_config": inner,
    }


def _section(path: Path, config: Json, key: str) -> Json:
    value = config.get(key)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: {key} is missing or not an object")
    return value


def _size(path: Path, section: Json, where: str, key: str) -> int:
    value = section.get(key)
    most = MAX_LAYERS if key in ("num_hidden_layers", "depth") else 2**31 - 1
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ModelFileError(f"{path}: {where}.{key} is {value!r}, expected an integer in 1..{most}")
    return value


def _full_attention(path: Path, text: Json, layers: int) -> tuple[bool, ...]:
    kinds = text.get("layer_types")
    if kinds is None:  # older saves state only the interval: every interval-th layer is full attention
        interval = _size(path, text, "text_config", "full_attention_interval")
        return tuple((i + 1) % interval == 0 for i in range(layers))
    known = {"full_attention": True, "linear_attention": False}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
        raise ModelFileError(f"{path}: text_config.layer_types is not a list of {layers} names")
    unknown = sorted(set(kinds) - known.keys())
    if unknown:
        raise ModelFileError(f"{path}: text_config.layer_types has unknown kind {unknown[0]!r}")
    return tuple(known[kind] for kind in kinds)


def _vision(path: Path, config: Json) -> VisionGeometry:
    vision = _section(path, config, "vision_config")

    def size(key: str) -> int:
        return _size(path, vision, "vision_config", key)

    return VisionGeometry(
        depth=size("depth"),
        hidden=size("hidden_size"),
        intermediate=size("intermediate_size"),
        channels=size("in_channels"),
        temporal_patch=size("temporal_patch_size"),
        patch=size("patch_size"),
        merge=size("spatial_merge_size"),
        positions=size("num_position_embeddings"),
        out_hidden=size("out_hidden_size"),
    )
