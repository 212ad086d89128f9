"""The published config.json, read and put in one nested form; the small files that travel with a checkpoint.

A checkpoint may be multimodal (nested `text_config`) or a text-only save (flat). Keys keep their published names.
What the engine does not compute is refused by `engine.config`, by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config import MODEL_TYPE, QUANTIZATION, ModelConfig, parse_config
from engine.errors import ModelFileError
from engine.json_file import read_json_object

MAX_CONFIG_BYTES = 16 << 20
MAX_LAYERS = 1024
TEXT_TYPE = "qwen3_5_moe_text"

Json = dict[str, Any]


def load_json(path: Path) -> Json:
    """A JSON object from a file of at most 16 MiB. Raises ModelFileError."""
    return read_json_object(path, MAX_CONFIG_BYTES)


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
    elif model_type != MODEL_TYPE:
        raise ModelFileError(f"{path}: model_type is {model_type!r}, expected {MODEL_TYPE!r} or {TEXT_TYPE!r}")
    if not isinstance(config.get("text_config"), dict):
        raise ModelFileError(f"{path}: text_config is missing or not an object")
    return config


def is_tied(config: Json) -> bool:
    """Whether the head is the embedding."""
    return bool(config.get("tie_word_embeddings", config["text_config"].get("tie_word_embeddings", False)))


def untied(config: Json) -> Json:
    """The same model with a head of its own, which is the only form the engine has."""
    text = {**config["text_config"], "tie_word_embeddings": False}
    return {**config, "tie_word_embeddings": False, "text_config": text}


def geometry(path: Path, config: Json) -> ModelConfig:
    """Sizes from a nested config; `path` is for messages. Raises ConfigError for what cannot run in 4 bits."""
    text = config["text_config"]
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:  # before anything is made of that length
        raise ModelFileError(f"{path}: text_config.num_hidden_layers is {layers}, at most {MAX_LAYERS} accepted")
    return parse_config(path, {**untied(config), "quantization_config": dict(QUANTIZATION)})


def _nest(text: Json) -> Json:
    top: Json = {key: text[key] for key in ("quantization_config", "tie_word_embeddings", "dtype") if key in text}
    inner = {key: value for key, value in text.items() if key not in ("quantization_config", "architectures")}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        **top,
        "text_config": inner,
    }
