"""Checkpoints of the real shape with random weights, to measure speed on: made from a seed, at the disk's rate.

Speed does not depend on the values, but kernels must not meet infinities or denormals all the time, so magnitudes
are those of a fresh model: every matrix keeps the scale of its input, every recurrence decays. Output is noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from engine.config import QUANTIZATION
from engine.convert.plan import Format, Segment, build_plan, default_format, row_view
from engine.convert.source_config import Json, dump_json, geometry
from engine.convert.sources import PackedSource
from engine.convert.writer import ProgressReport, write_checkpoint
from engine.core import Float32Array, UInt8Array
from engine.errors import ConfigError
from engine.formats import BLOCK_BYTES, BLOCK_COLS, BLOCK_ROWS

LAYERS, EXPERTS = 40, 128
INTERVAL = 4  # every fourth layer is full attention
NOWHERE = Path("random weights")  # where sources with files have theirs, for messages
_SCALE_BYTES = 2 * BLOCK_ROWS * 2  # of a block: two groups of columns, fp16
# Only odd nibbles, which mean -7, -5 ... 7: their mean is exactly 0, as a trained model's nearly is.
_ODD = np.uint64(0x1111111111111111)
_NIBBLE_STD = 21.0**0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """What may differ from the published 35B shape (pruned to 128 experts). `layers` must be a multiple of 4."""

    layers: int = LAYERS
    experts: int = EXPERTS


def make_synthetic(
    destination: Path,
    shape: Shape,
    *,
    seed: int,
    threads: int,
    progress: ProgressReport,
    text_files: Path,
) -> None:
    """Write a checkpoint directory. The same arguments give the same bytes.

    text_files: a checkpoint whose tokenizer, template and defaults are copied, so that the result can be served too.
    Raises ConfigError for an impossible shape or destination.
    """
    if shape.layers < INTERVAL or shape.layers % INTERVAL:
        raise ConfigError(f"--layers {shape.layers}: expected a multiple of {INTERVAL}, at least {INTERVAL}")
    if shape.experts < 8:
        raise ConfigError(f"--experts {shape.experts}: expected at least 8, since 8 work on each token")
    config = published_config(shape)
    plan = build_plan(RandomCheckpoint(seed, shape.experts), geometry(destination / "config.json", config))
    files = {
        name: (text_files / name).read_bytes()
        for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json")
    }
    files["config.json"] = dump_json({**config, "quantization_config": dict(QUANTIZATION)})
    write_checkpoint(destination, plan, files, calibration=None, threads=threads, progress=progress)


def published_config(shape: Shape) -> Json:
    """The config of the published text model, with the layers and experts of `shape`; no vision tower, no MTP layer."""
    kinds = ["linear_attention"] * (INTERVAL - 1) + ["full_attention"]
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": shape.layers,
            "layer_types": kinds * (shape.layers // INTERVAL),
            "full_attention_interval": INTERVAL,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": shape.experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "max_position_embeddings": 262144,
            "mtp_num_hidden_layers": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": False,
        },
    }


class RandomCheckpoint:
    """Answers for every tensor with random rows; see `plan.TensorProvider`."""

    path = NOWHERE

    def __init__(self, seed: int, experts: int) -> None:
        self._seed = seed
        self._experts = experts

    def weight(self, name: str, shape: tuple[int, ...]) -> tuple[Segment, ...]:
        """All rows of one tensor."""
        rows, cols = row_view(shape)
        if default_format(name, shape) is Format.Q4:
            return (Segment(RandomBlocks(name, rows, cols, self._seed), 0, rows),)
        return (Segment(RandomRows(name, rows, cols, self._seed), 0, rows),)

    def experts(self, prefix: str, count: int, hidden: int, width: int) -> tuple[tuple[Segment, ...], ...]:
        """(gate_up, down) of all experts."""
        return (
            self.weight(f"{prefix}experts.gate_up_proj", (count, 2 * width, hidden)),
            self.weight(f"{prefix}experts.down_proj", (count, hidden, width)),
        )

    def expert_count(self, prefix: str) -> int:
        """As many as were asked for, in every layer."""
        return self._experts

    def kept_experts(self, prefix: str) -> tuple[int, ...]:
        """Nothing is pruned here."""
        return ()

    def has(self, prefix: str) -> bool:
        """There is a head and no MTP layer."""
        return prefix == "lm_head."

    def unused(self) -> list[str]:
        """Nothing is stored, so nothing is left over."""
        return []


class RandomBlocks(PackedSource):
    """Packed rows whose weights have mean 0 and the standard deviation 1/sqrt(cols), so that outputs keep the scale."""

    def __init__(self, name: str, rows: int, cols: int, seed: int) -> None:
        self.path, self.name, self.rows, self.cols = NOWHERE, name, rows, cols
        self.identity = f"random:{name}:{seed}"
        self._seed = seed
        self._scale = np.float16(1.0 / (_NIBBLE_STD * np.sqrt(cols)))

    def read_packed(self, row0: int, row1: int) -> UInt8Array:
        """Blocks of rows row0..row1-1 (multiples of 16), uint8 [(row1 - row0)/16, cols/64, 576]."""
        shape = ((row1 - row0) // BLOCK_ROWS, self.cols // BLOCK_COLS, BLOCK_BYTES)
        count = shape[0] * shape[1] * BLOCK_BYTES
        words = _stream(self._seed, self.name, row0).random_raw(count // 8)
        words |= _ODD
        blocks = words.view(np.uint8).reshape(shape)
        blocks[:, :, :_SCALE_BYTES] = np.full(_SCALE_BYTES // 2, self._scale, np.float16).view(np.uint8)
        return blocks


class RandomRows:
    """Float rows, drawn as the kind of tensor wants it; see `sources.RowSource`."""

    def __init__(self, name: str, rows: int, cols: int, seed: int) -> None:
        self.path, self.name, self.rows, self.cols = NOWHERE, name, rows, cols
        self.identity = f"random:{name}:{seed}"
        self._seed = seed

    def read(self, row0: int, row1: int) -> Float32Array:
        """Rows as float32 [row1 - row0, cols]."""
        generator = np.random.Generator(_stream(self._seed, self.name, row0))
        shape = (row1 - row0, self.cols)
        kind = self.name.removesuffix(".weight").rpartition(".")[2]
        if kind == "A_log":
            return np.log(generator.uniform(1.0, 16.0, shape)).astype(np.float32)
        if kind == "dt_bias":
            step = generator.uniform(1e-3, 0.1, shape)  # softplus(dt_bias): heads forget over 10 to 1000 tokens
            return np.log(np.expm1(step)).astype(np.float32)
        values = generator.standard_normal(shape, np.float32)
        if kind == "norm" and ".linear_attn." in self.name:
            return 1.0 + np.float32(0.1) * values  # the one norm that is stored as it is, not minus 1
        if "norm" in kind:
            return np.float32(0.1) * values
        return values / np.float32(np.sqrt(self.cols))


def _stream(seed: int, name: str, row: int) -> np.random.SFC64:
    """Each piece has its own stream, so bytes do not depend on the number of threads or on resuming."""
    return np.random.SFC64([seed, crc32(name.encode()), row])
