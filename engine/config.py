"""Sizes of the model, from config.json, and settings of the engine. Checked here once; trusted everywhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError, ModelFileError
from engine.json_file import read_json_object

CONFIG_NAME = "config.json"
MODEL_TYPE = "qwen3_5_moe"
QUANTIZATION: Mapping[str, object] = {
    "quant_method": "fermion",
    "format_version": 1,
    "bits": 4,
    "group_size": 32,
    "layout": "q4_16x64",
}
SIMD_TIERS = ("scalar", "ssse3", "avx2", "avx512")
LANES = 16  # widest float vector of any tier: the widths that vectors run along are multiples of it
GROUP = 32  # activations that share a scale when they meet packed weights

VISION_ROPE_THETA = 10_000.0  # of all published towers; config.json need not state it

_MAX_CONFIG_BYTES = 16 << 20
_MAX_SIZE = 1 << 24

# Keys whose only value here is the one the engine computes; absent means that value.
_FIXED: Mapping[str, object] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "output_gate_type": None,
    "linear_conv_kernel_dim": 4,
    "mtp_use_dedicated_embeddings": False,
}


class LayerType(StrEnum):
    """Kinds of decoder layer, by their names in config.json."""

    LINEAR_ATTENTION = "linear_attention"
    FULL_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of the vision tower, under their names in `vision_config`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int

    @property
    def token_side(self) -> int:
        """Pixels on a side of the square that one token of the text model stands for."""
        return self.patch_size * self.spatial_merge_size

    @property
    def table_side(self) -> int:
        """Side of the square grid that the position embeddings belong to."""
        return math.isqrt(self.num_position_embeddings)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the text model, under their names in `text_config`, and the vision tower's.

    num_experts is what config.json says; the checkpoint's tensors decide (`weights.load_weights`).
    rotary_dim: leading dimensions of a head that are rotated. mtp_num_hidden_layers: layers for multi-token
    prediction that the checkpoint may hold. vision None: the checkpoint is text only.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    mtp_num_hidden_layers: int
    image_token_id: int | None
    vision: VisionConfig | None
    quantized: bool

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_types)

    @property
    def delta_layers(self) -> int:
        """Layers with recurrent state."""
        return self.layer_types.count(LayerType.LINEAR_ATTENTION)

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.layer_types.count(LayerType.FULL_ATTENTION)

    @property
    def conv_channels(self) -> int:
        """Rows of in_proj_qkv: q and k of all key heads, v of all value heads."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Width of all value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @staticmethod
    def load(directory: Path) -> ModelConfig:
        """From `directory`/config.json. ModelFileError: the file is missing or not a JSON object; ConfigError: a
        value is missing, of the wrong type, or asks for something that the engine does not compute."""
        if not directory.is_dir():
            what = "a file" if directory.exists() else "not there"
            raise ModelFileError(
                f"{directory} is {what}; expected a checkpoint directory with {CONFIG_NAME} and model.safetensors, as "
                "'fermion convert' writes it (nothing is downloaded)"
            )
        return parse_config(directory / CONFIG_NAME, read_json_object(directory / CONFIG_NAME, _MAX_CONFIG_BYTES))


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Sizes of the prefix cache in bytes and its place. ram_bytes None: a share of the memory that the model leaves.
    disk_bytes None: a share of the file system, 0: nothing on disk. directory None: in the user's cache directory.
    """

    ram_bytes: int | None = None
    disk_bytes: int | None = None
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run a model.

    simd_tier: "auto" or the tier to use. threads None: one per physical core that the process may use.
    compute: "w4a8" multiplies packed weights by 8-bit activations; "f32" unpacks all weights to float32 first (the
    verification path). context_length None: the model's, or less if memory is short. pass_tokens: most tokens that
    run through a layer at once in prefill. cache None: every prompt is computed from its first token.
    device: where prompts run: "auto" is the GPU if there is one that can, else the CPU; "gpu" insists. gpu_memory:
    bytes of the card to use at most, None: what is free. gpu_min_tokens: segments of a prompt that are shorter run on
    the CPU, which is quicker there; None: measured at load. huge_pages: under the weights: "auto" takes what the file
    gives, "on" copies to get them, "off" forbids them. numa: "interleave" deals the weights out to the nodes of a
    machine with several, "off" leaves them where they fall. memory_lock: the weights may not be paged out.
    """

    simd_tier: str = "auto"
    threads: int | None = None
    compute: Literal["w4a8", "f32"] = "w4a8"
    context_length: int | None = None
    device: Literal["auto", "cpu", "gpu"] = "auto"
    gpu_memory: int | None = None
    gpu_min_tokens: int | None = None
    pass_tokens: int = 512
    cache: CacheSettings | None = None
    huge_pages: Literal["auto", "on", "off"] = "auto"
    numa: Literal["interleave", "off"] = "interleave"
    memory_lock: bool = False

    def __post_init__(self) -> None:
        if self.huge_pages not in ("auto", "on", "off"):
            raise ConfigError(f"huge_pages is {self.huge_pages!r}, expected 'auto', 'on' or 'off'")
        if self.numa not in ("interleave", "off"):
            raise ConfigError(f"numa is {self.numa!r}, expected 'interleave' or 'off'")
        if self.simd_tier not in ("auto", *SIMD_TIERS):
            raise ConfigError(f"simd_tier is {self.simd_tier!r}, expected one of auto, {', '.join(SIMD_TIERS)}")
        if self.compute not in ("w4a8", "f32"):
            raise ConfigError(f"compute is {self.compute!r}, expected 'w4a8' or 'f32'")
        if self.device not in ("auto", "cpu", "gpu"):
            raise ConfigError(f"device is {self.device!r}, expected one of auto, cpu, gpu")
        if self.gpu_memory is not None and self.gpu_memory < 1:
            raise ConfigError(f"gpu_memory is {self.gpu_memory}, expected a number of bytes")
        if self.gpu_min_tokens is not None and not 1 <= self.gpu_min_tokens <= 1024:
            raise ConfigError(f"gpu_min_tokens is {self.gpu_min_tokens}, expected 1..1024")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise ConfigError(f"threads is {self.threads}, expected 1..1024")
        if self.context_length is not None and self.context_length < 1:
            raise ConfigError(f"context_length is {self.context_length}, expected at least 1")
        if self.pass_tokens < 64 or self.pass_tokens % 64:
            raise ConfigError(f"pass_tokens is {self.pass_tokens}, expected a multiple of 64")


class _Section:
    """One object of config.json with typed access; errors name file, section and key."""

    def __init__(self, path: Path, values: Mapping[str, Any], name: str) -> None:
        self._path, self._values, self._name = path, values, name

    def error(self, key: str, expected: str) -> ConfigError:
        """What is wrong with `key`."""
        name = f"{self._name}.{key}" if self._name else key
        got = repr(self._values[key]) if key in self._values else "missing"
        return ConfigError(f"{self._path}: {name} is {got[:200]}, expected {expected}")

    def section(self, key: str) -> _Section:
        """A nested object."""
        value = self._values.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return _Section(self._path, value, f"{self._name}.{key}" if self._name else key)

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self._values.get(key) is not None

    def size(self, key: str, multiple: int = 1, least: int = 1) -> int:
        """An integer within least..2^24 that `multiple` divides."""
        value = self._values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_SIZE or value % multiple:
            suffix = f" divisible by {multiple}" if multiple > 1 else ""
            raise self.error(key, f"an integer in {least}..{_MAX_SIZE}{suffix}")
        return value

    def number(self, key: str) -> float:
        """A positive finite number."""
        value = self._values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(key, "a positive number")
        return float(value)

    def fixed(self, key: str, only: object) -> None:
        """Refuses `key` unless it is absent or has the one value that is computed."""
        if key in self._values and self._values[key] != only:
            raise self.error(key, f"{only!r}, the only value that is computed")

    def raw(self, key: str) -> object:
        """The value as it stands, None if absent."""
        return self._values.get(key)


def parse_config(path: Path, values: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from the content of config.json; `path` is for messages. ConfigError as for `ModelConfig.load`."""
    top = _Section(path, values, "")
    if values.get("model_type") != MODEL_TYPE:
        raise top.error("model_type", repr(MODEL_TYPE))
    top.fixed("tie_word_embeddings", False)
    text = top.section("text_config")
    text.fixed("tie_word_embeddings", False)
    for key, only in _FIXED.items():
        text.fixed(key, only)
    quantized = top.has("quantization_config")
    if quantized:
        section = top.section("quantization_config")
        for key, expected in QUANTIZATION.items():
            if section.raw(key) != expected:
                raise section.error(key, repr(expected))
    lanes = GROUP if quantized else LANES
    head_dim = text.size("head_dim", lanes)
    rotary_dim, theta, sections = _rope(text, head_dim)
    config = ModelConfig(
        vocab_size=text.size("vocab_size"),
        hidden_size=text.size("hidden_size", lanes),
        layer_types=_layer_types(text),
        num_attention_heads=text.size("num_attention_heads"),
        num_key_value_heads=text.size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        mrope_section=sections,
        linear_num_key_heads=text.size("linear_num_key_heads"),
        linear_num_value_heads=text.size("linear_num_value_heads"),
        linear_key_head_dim=text.size("linear_key_head_dim", LANES),
        linear_value_head_dim=text.size("linear_value_head_dim", lanes),
        num_experts=text.size("num_experts"),
        num_experts_per_tok=text.size("num_experts_per_tok"),
        moe_intermediate_size=text.size("moe_intermediate_size", lanes),
        shared_expert_intermediate_size=text.size("shared_expert_intermediate_size", lanes),
        rms_norm_eps=text.number("rms_norm_eps"),
        max_position_embeddings=text.size("max_position_embeddings"),
        mtp_num_hidden_layers=text.size("mtp_num_hidden_layers", least=0) if text.has("mtp_num_hidden_layers") else 0,
        image_token_id=top.size("image_token_id", least=0) if top.has("image_token_id") else None,
        vision=_vision(top.section("vision_config")) if top.has("vision_config") else None,
        quantized=quantized,
    )
    _check_ratio(text, "num_attention_heads", config.num_attention_heads, config.num_key_value_heads)
    _check_ratio(text, "linear_num_value_heads", config.linear_num_value_heads, config.linear_num_key_heads)
    if config.vision is not None and config.vision.out_hidden_size != config.hidden_size:
        raise top.section("vision_config").error(
            "out_hidden_size", f"the text model's hidden size {config.hidden_size}"
        )
    return config


def _check_ratio(section: _Section, key: str, value: int, divisor: int) -> None:
    if value % divisor:
        raise section.error(key, f"a multiple of {divisor}, the heads it is shared among")


def _layer_types(text: _Section) -> tuple[LayerType, ...]:
    layers = text.size("num_hidden_layers")
    kinds = text.raw("layer_types")
    if kinds is None:  # older files state only the interval: every interval-th layer is full attention
        interval = text.size("full_attention_interval")
        return tuple(
            LayerType.FULL_ATTENTION if i % interval == interval - 1 else LayerType.LINEAR_ATTENTION
            for i in range(layers)
        )
    known = [kind.value for kind in LayerType]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise text.error("layer_types", f"a list of {layers} names, each one of {', '.join(known)}")
    return tuple(LayerType(kind) for kind in kinds)


def _rope(text: _Section, head_dim: int) -> tuple[int, float, tuple[int, int, int]]:
    rope = text.section("rope_parameters")
    if rope.raw("rope_type") != "default":
        raise rope.error("rope_type", "'default'")
    rope.fixed("mrope_interleaved", True)
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor"))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise rope.error("partial_rotary_factor", f"an even number of rotated dimensions within {head_dim}")
    sections = rope.raw("mrope_section")
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(isinstance(size, int) and size >= 0 for size in sections)
        or sum(sections) != rotary_dim // 2
    ):
        raise rope.error("mrope_section", f"three sizes that sum to {rotary_dim // 2}")
    return rotary_dim, rope.number("rope_theta"), (sections[0], sections[1], sections[2])


def _vision(vision: _Section) -> VisionConfig:
    if vision.raw("deepstack_visual_indexes"):
        raise vision.error("deepstack_visual_indexes", "an empty list: deepstack is not computed")
    vision.fixed("hidden_act", "gelu_pytorch_tanh")
    config = VisionConfig(
        depth=vision.size("depth"),
        hidden_size=vision.size("hidden_size"),
        intermediate_size=vision.size("intermediate_size"),
        num_heads=vision.size("num_heads"),
        in_channels=vision.size("in_channels"),
        patch_size=vision.size("patch_size"),
        temporal_patch_size=vision.size("temporal_patch_size"),
        spatial_merge_size=vision.size("spatial_merge_size"),
        num_position_embeddings=vision.size("num_position_embeddings"),
        out_hidden_size=vision.size("out_hidden_size"),
    )
    if config.hidden_size % (4 * config.num_heads):  # half of a head's pairs turn with the row, half with the column
        raise vision.error("hidden_size", f"a multiple of 4 for each of {config.num_heads} heads")
    if config.in_channels != 3:
        raise vision.error("in_channels", "3: pictures are red, green and blue")
    if config.spatial_merge_size != 2:
        raise vision.error("spatial_merge_size", "2, the only value that is computed")
    if config.table_side**2 != config.num_position_embeddings:
        raise vision.error("num_position_embeddings", "a square number")
    if vision.has("rope_parameters"):
        vision.section("rope_parameters").fixed("rope_theta", VISION_ROPE_THETA)
    return config
