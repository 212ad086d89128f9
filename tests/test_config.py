"""config.json and engine settings: what is accepted, and that refusals name file, key, value and expectation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import VECTORS

from engine.config import QUANTIZATION, EngineConfig, LayerType, ModelConfig, parse_config
from engine.errors import ConfigError, ModelFileError

PATH = Path("somewhere/config.json")


@pytest.fixture
def values() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((VECTORS / "a.json").read_text())
    return config


def test_sizes_come_from_the_file(values: dict[str, Any]) -> None:
    config = parse_config(PATH, values)
    assert config.num_hidden_layers == 4
    assert config.layer_types[3] is LayerType.FULL_ATTENTION
    assert (config.delta_layers, config.attention_layers) == (3, 1)
    assert config.rotary_dim == 8
    assert config.mrope_section == (2, 1, 1)
    assert (config.conv_channels, config.value_width) == (128, 64)
    assert config.vision is not None
    assert config.vision.depth == 1
    assert not config.quantized


def test_layer_kinds_from_the_interval(values: dict[str, Any]) -> None:
    del values["text_config"]["layer_types"]
    values["text_config"]["full_attention_interval"] = 2
    kinds = parse_config(PATH, values).layer_types
    assert [kind is LayerType.FULL_ATTENTION for kind in kinds] == [False, True, False, True]


def test_text_only_checkpoint_has_no_vision(values: dict[str, Any]) -> None:
    del values["vision_config"]
    assert parse_config(PATH, values).vision is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", 72),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("vocab_size", 1 << 40),
        ("num_experts", None),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("inf")),
        ("num_attention_heads", 5),
        ("linear_num_value_heads", 3),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"]),
        ("hidden_act", "gelu"),
        ("attn_output_gate", False),
        ("output_gate_type", "swish"),
        ("linear_conv_kernel_dim", 3),
        ("tie_word_embeddings", True),
    ],
)
def test_refused_values_are_named(values: dict[str, Any], key: str, value: object) -> None:
    values["text_config"][key] = value
    with pytest.raises(ConfigError, match=rf"somewhere/config\.json: text_config\.{key} is .*, expected"):
        parse_config(PATH, values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_type", "yarn"),
        ("mrope_section", [2, 1, 2]),
        ("mrope_section", [4, 0]),
        ("mrope_interleaved", False),
        ("partial_rotary_factor", 1.5),
        ("rope_theta", -1),
    ],
)
def test_refused_rope(values: dict[str, Any], key: str, value: object) -> None:
    values["text_config"]["rope_parameters"][key] = value
    with pytest.raises(ConfigError, match=rf"text_config\.rope_parameters\.{key} is"):
        parse_config(PATH, values)


def test_missing_key_and_foreign_model(values: dict[str, Any]) -> None:
    del values["text_config"]["head_dim"]
    with pytest.raises(ConfigError, match=r"text_config\.head_dim is missing"):
        parse_config(PATH, values)
    with pytest.raises(ConfigError, match=r"model_type is 'llama', expected 'qwen3_5_moe'"):
        parse_config(PATH, {"model_type": "llama"})


def test_quantization_section(values: dict[str, Any]) -> None:
    for key, only in (("head_dim", 64), ("linear_value_head_dim", 32)):
        values["text_config"][key] = only
    values["text_config"]["rope_parameters"]["mrope_section"] = [4, 2, 2]
    values["quantization_config"] = dict(QUANTIZATION)
    assert parse_config(PATH, values).quantized
    values["quantization_config"]["format_version"] = 2
    with pytest.raises(ConfigError, match=r"quantization_config\.format_version is 2, expected 1"):
        parse_config(PATH, values)


def test_widths_of_a_quantized_model_are_whole_groups(values: dict[str, Any]) -> None:
    values["quantization_config"] = dict(QUANTIZATION)
    with pytest.raises(ConfigError, match=r"linear_value_head_dim is 16, expected .* divisible by 32"):
        parse_config(PATH, values)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe"])
def test_unreadable_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read: No such file"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"simd_tier": "mmx"},
        {"compute": "fp8"},
        {"device": "cuda"},
        {"threads": 0},
        {"context_length": 0},
        {"pass_tokens": 100},
    ],
)
def test_refused_engine_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig(**settings)
