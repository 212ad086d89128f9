"""config.json, tokenizer.json and the other small files, rebuilt from GGUF metadata.

The metadata hold every number the computation needs except those the architecture fixes (written here as such).
What is missing is refused by key name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config import MODEL_TYPE
from engine.convert.gguf_file import GgufEntry, Metadata
from engine.convert.source_config import TEXT_TYPE, Json, dump_json
from engine.errors import ModelFileError

ARCHITECTURE = "qwen35moe"
PROJECTOR = "qwen3vl_merger"
PRE_TOKENIZER = "qwen35"
# The split pattern that the name `qwen35` stands for (the family's published tokenizer.json).
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # token types: special, and added but visible
_END_OF_TEXT = "<|endoftext|>"
_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SPECIAL_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


class GgufKeys:
    """Typed look-up in the metadata of one file; failures name file and key."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        """metadata: as `gguf_file.read_gguf` returns it."""
        self.path, self._metadata = path, metadata

    def optional(self, key: str, default: Any) -> Any:
        """The value, or the default where the key is absent."""
        return self._metadata.get(key, default)

    def integer(self, key: str) -> int:
        """A positive integer; per-layer arrays are accepted if their non-zero entries agree."""
        value = self._metadata.get(key)
        if isinstance(value, list) and len({v for v in value if v != 0}) == 1:
            value = max(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise ModelFileError(f"{self.path}: key {key!r} is {_brief(value)}, expected a positive integer")
        return value

    def count(self, key: str, default: int) -> int:
        """A number of things, possibly none, that may be left out."""
        value = self._metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ModelFileError(f"{self.path}: key {key!r} is {_brief(value)}, expected a number of things")
        return value

    def number(self, key: str) -> float:
        """A float. GGUF holds float32, so it is rounded to the 7 digits that float32 vouches for."""
        value = self._metadata.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelFileError(f"{self.path}: key {key!r} is {_brief(value)}, expected a number")
        return float(f"{value:.7g}")

    def text(self, key: str) -> str:
        """A string."""
        value = self._metadata.get(key)
        if not isinstance(value, str):
            raise ModelFileError(f"{self.path}: key {key!r} is {_brief(value)}, expected a string")
        return value

    def array(self, key: str, kind: type) -> list[Any]:
        """A list whose elements are all of `kind`."""
        value = self._metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ModelFileError(f"{self.path}: key {key!r} is {_brief(value)}, expected a list of {kind.__name__}")
        return value

    def require(self, key: str, expected: object) -> None:
        """Refuses any other value."""
        if self._metadata.get(key) != expected:
            raise ModelFileError(
                f"{self.path}: key {key!r} is {_brief(self._metadata.get(key))}, expected {expected!r}"
            )


def model_config(keys: GgufKeys, entries: dict[str, GgufEntry], vision: GgufKeys | None) -> Json:
    """A nested published config, from the text model's metadata and, if given, the vision file's."""
    keys.require("general.architecture", ARCHITECTURE)
    config: Json = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "tie_word_embeddings": "output.weight" not in entries,
        "text_config": _text_config(keys, entries),
    }
    tokens = {token: index for index, token in enumerate(keys.array("tokenizer.ggml.tokens", str))}
    config |= {key: tokens[token] for key, token in _SPECIAL_IDS.items() if token in tokens}
    if vision is not None:
        config["vision_config"] = _vision_config(vision, entries)
    return config


def side_files(keys: GgufKeys, vision: GgufKeys | None) -> dict[str, bytes]:
    """tokenizer.json, chat_template.jinja, generation_config.json and, with a vision file, preprocessor_config.json."""
    files = {
        "tokenizer.json": dump_json(_tokenizer(keys)),
        "generation_config.json": dump_json(_generation_config(keys)),
    }
    template = keys.optional("tokenizer.chat_template", None)
    if isinstance(template, str):
        files["chat_template.jinja"] = template.encode()
    if vision is not None:
        processor = {
            "image_mean": [round(v, 6) for v in vision.array("clip.vision.image_mean", float)],
            "image_std": [round(v, 6) for v in vision.array("clip.vision.image_std", float)],
            "patch_size": vision.integer("clip.vision.patch_size"),
            "merge_size": vision.optional("clip.vision.spatial_merge_size", 2),
            "temporal_patch_size": 2,
            # The family's published limits; a vision file may state its own.
            "size": {
                "shortest_edge": vision.optional("clip.vision.image_min_pixels", 65_536),
                "longest_edge": vision.optional("clip.vision.image_max_pixels", 16_777_216),
            },
        }
        files["preprocessor_config.json"] = dump_json(processor)
    return files


def _text_config(keys: GgufKeys, entries: dict[str, GgufEntry]) -> Json:
    def size(suffix: str) -> int:
        return keys.integer(f"{ARCHITECTURE}.{suffix}")

    mtp = keys.count(f"{ARCHITECTURE}.nextn_predict_layers", 0)
    layers = size("block_count") - mtp
    if mtp not in (0, 1) or not 0 < layers <= 1024:
        raise ModelFileError(
            f"{keys.path}: block_count {layers + mtp} with nextn_predict_layers {mtp} is not supported"
        )
    if "token_embd.weight" not in entries:
        raise ModelFileError(f"{keys.path}: tensor 'token_embd.weight' is missing")
    head_dim, rotary = size("attention.key_length"), size("rope.dimension_count")
    value_heads = size("ssm.time_step_rank")
    sections = keys.array(f"{ARCHITECTURE}.rope.dimension_sections", int)
    theta = keys.number(f"{ARCHITECTURE}.rope.freq_base")
    keys.require(f"{ARCHITECTURE}.attention.value_length", head_dim)
    return {
        "model_type": TEXT_TYPE,
        "vocab_size": entries["token_embd.weight"].shape[0],
        "hidden_size": size("embedding_length"),
        "num_hidden_layers": layers,
        "layer_types": [
            "full_attention" if f"blk.{index}.attn_q.weight" in entries else "linear_attention"
            for index in range(layers)
        ],
        "full_attention_interval": keys.optional(f"{ARCHITECTURE}.full_attention_interval", 4),
        "num_attention_heads": size("attention.head_count"),
        "num_key_value_heads": size("attention.head_count_kv"),
        "head_dim": head_dim,
        "attention_bias": False,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotary / head_dim,
            "mrope_interleaved": True,
            "mrope_section": sections[:3],
        },
        "partial_rotary_factor": rotary / head_dim,
        "linear_conv_kernel_dim": size("ssm.conv_kernel"),
        "linear_key_head_dim": size("ssm.state_size"),
        "linear_value_head_dim": size("ssm.inner_size") // value_heads,
        "linear_num_key_heads": size("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "num_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "moe_intermediate_size": size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": size("expert_shared_feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": keys.number(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": size("context_length"),
        "mtp_num_hidden_layers": mtp,
        "bos_token_id": keys.optional("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": keys.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": keys.optional("tokenizer.ggml.padding_token_id", None),
    }


def _generation_config(keys: GgufKeys) -> Json:
    """End tokens (the named one and, as published, the end of a document) and sampling defaults where stated."""
    ends = [keys.integer("tokenizer.ggml.eos_token_id")]
    tokens = keys.array("tokenizer.ggml.tokens", str)
    if _END_OF_TEXT in tokens and tokens.index(_END_OF_TEXT) not in ends:
        ends.append(tokens.index(_END_OF_TEXT))
    stated = {name: keys.optional(f"general.sampling.{key}", None) for name, key in _SAMPLING.items()}
    return {"eos_token_id": ends} | {name: value for name, value in stated.items() if value is not None}


def _vision_config(keys: GgufKeys, entries: dict[str, GgufEntry]) -> Json:
    keys.require("clip.projector_type", PROJECTOR)
    if keys.optional("clip.vision.is_deepstack_layers", None) and any(
        keys.array("clip.vision.is_deepstack_layers", bool)
    ):
        raise ModelFileError(f"{keys.path}: the vision tower has deepstack layers: not supported")
    for name in ("v.position_embd.weight", "v.patch_embd.weight"):
        if name not in entries:
            raise ModelFileError(f"{keys.path}: tensor {name!r} is missing")
    return {
        "depth": keys.integer("clip.vision.block_count"),
        "hidden_size": keys.integer("clip.vision.embedding_length"),
        "intermediate_size": keys.integer("clip.vision.feed_forward_length"),
        "num_heads": keys.integer("clip.vision.attention.head_count"),
        "out_hidden_size": keys.integer("clip.vision.projection_dim"),
        "patch_size": keys.integer("clip.vision.patch_size"),
        "spatial_merge_size": keys.optional("clip.vision.spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "in_channels": entries["v.patch_embd.weight"].shape[1],
        "num_position_embeddings": entries["v.position_embd.weight"].shape[0],
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    }


def _tokenizer(keys: GgufKeys) -> Json:
    """A byte-level BPE tokenizer.json; unused padding rows of the embedding get no entry."""
    keys.require("tokenizer.ggml.model", "gpt2")
    keys.require("tokenizer.ggml.pre", PRE_TOKENIZER)
    tokens = keys.array("tokenizer.ggml.tokens", str)
    types = keys.array("tokenizer.ggml.token_type", int)
    merges = keys.array("tokenizer.ggml.merges", str)
    if len(types) != len(tokens):
        raise ModelFileError(f"{keys.path}: {len(tokens)} tokens but {len(types)} token types")
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _SPLIT_PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == 1},
            "merges": merges,
        },
    }


def _brief(value: object) -> str:
    text = repr(value)
    return "missing" if value is None else text if len(text) <= 60 else f"{text[:57]}..."
