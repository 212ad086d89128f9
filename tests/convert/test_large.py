"""Real layer shapes: the converter's memory does not grow with the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny

from engine.convert.plan import PREFIX
from engine.convert.safetensors import INDEX_NAME

REAL_TEXT = {
    **tiny.TEXT_CONFIG,
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "head_dim": 256,
    "rope_parameters": {**tiny.TEXT_CONFIG["rope_parameters"], "mrope_section": [11, 11, 10]},
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "mtp_num_hidden_layers": 0,
}
CHUNK = 32 << 20


def layer_shapes(full: bool, experts: int) -> dict[str, tuple[int, ...]]:
    """Published suffixes and shapes of one layer."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (2048,),
        "post_attention_layernorm.weight": (2048,),
        "mlp.gate.weight": (experts, 2048),
        "mlp.experts.gate_up_proj": (experts, 1024, 2048),
        "mlp.experts.down_proj": (experts, 2048, 512),
        "mlp.shared_expert.gate_proj.weight": (512, 2048),
        "mlp.shared_expert.up_proj.weight": (512, 2048),
        "mlp.shared_expert.down_proj.weight": (2048, 512),
        "mlp.shared_expert_gate.weight": (1, 2048),
    }
    if full:
        shapes |= {
            "self_attn.q_proj.weight": (8192, 2048),
            "self_attn.k_proj.weight": (512, 2048),
            "self_attn.v_proj.weight": (512, 2048),
            "self_attn.o_proj.weight": (2048, 4096),
            "self_attn.q_norm.weight": (256,),
            "self_attn.k_norm.weight": (256,),
        }
        return shapes
    return shapes | {
        "linear_attn.in_proj_qkv.weight": (8192, 2048),
        "linear_attn.in_proj_z.weight": (4096, 2048),
        "linear_attn.in_proj_b.weight": (32, 2048),
        "linear_attn.in_proj_a.weight": (32, 2048),
        "linear_attn.conv1d.weight": (8192, 1, 4),
        "linear_attn.A_log": (32,),
        "linear_attn.dt_bias": (32,),
        "linear_attn.norm.weight": (128,),
        "linear_attn.out_proj.weight": (2048, 4096),
    }


def write_large_checkpoint(directory: Path, layers: int, *, experts: int = 256, vocabulary: int = 248320) -> int:
    """BF16 shards of one layer each with random weights; returns their bytes. The last of four layers is full."""
    directory.mkdir(parents=True, exist_ok=True)
    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(layers)]
    sizes = {"num_hidden_layers": layers, "layer_types": kinds, "num_experts": experts, "vocab_size": vocabulary}
    config = {"model_type": "qwen3_5_moe", "text_config": REAL_TEXT | sizes}
    (directory / "config.json").write_text(json.dumps(config))
    vocab = (vocabulary, 2048)
    shards = [{f"{PREFIX}embed_tokens.weight": vocab, f"{PREFIX}norm.weight": (2048,), "lm_head.weight": vocab}]
    for index, kind in enumerate(kinds):
        shapes = layer_shapes(kind == "full_attention", experts)
        shards.append({f"{PREFIX}layers.{index}.{suffix}": shape for suffix, shape in shapes.items()})
    rng, weight_map, total = np.random.default_rng(0), {}, 0
    for number, shard in enumerate(shards):
        name = f"model-{number}.safetensors"
        fields, position = {}, 0
        for tensor, shape in shard.items():
            size = 2 * int(np.prod(shape))
            fields[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
            position += size
            weight_map[tensor] = name
        header = json.dumps(fields).encode()
        with (directory / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for start in range(0, position, CHUNK):
                random = np.frombuffer(rng.bytes(min(CHUNK, position - start)), np.uint16)
                file.write((random & np.uint16(0x80FF) | np.uint16(0x3C00)).tobytes())
        total += position
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return total


MEASURED = """
import runpy
from pathlib import Path
try:
    runpy.run_module("engine.convert", run_name="__main__")
finally:
    print(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")))
"""


def converted(source: Path, destination: Path) -> int:
    """Runs the command; its peak memory in bytes. The process tells it itself: the maximum that wait4 reports counts
    what the test runner held when it started the process."""
    command = [sys.executable, "-c", MEASURED, source, destination, "--threads", "1"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return int(result.stdout.split("VmHWM:")[1].split()[0]) * 1024


def test_peak_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Layers of the published widths, with few experts and with five times as many."""
    small = write_large_checkpoint(tmp_path / "small", 1, experts=8, vocabulary=4096)
    large = write_large_checkpoint(tmp_path / "large", 1, experts=40, vocabulary=16384)
    assert large > 2.5 * small
    assert large > 400e6
    peaks = [converted(tmp_path / name, tmp_path / f"{name}-converted") for name in ("small", "large")]
    assert peaks[1] < 256 << 20
    assert peaks[1] - peaks[0] < 48 << 20


@pytest.mark.exhaustive
def test_eight_gigabytes_of_the_published_shapes(tmp_path: Path) -> None:
    total = write_large_checkpoint(tmp_path / "src", 4)
    assert total > 8e9
    assert converted(tmp_path / "src", tmp_path / "dst") < 1 << 30
    assert (tmp_path / "dst" / "model.safetensors").stat().st_size < 0.3 * total
