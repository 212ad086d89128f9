"""The GGUF layout of this family (`qwen35moe`), undone: names, +1 norms, -exp(A), tiled value heads, split patches.

Value heads: the published order is grouped (value head h uses key head h // R, R = value heads / key heads), GGUF's
is tiled (value head j uses key head j % key heads), so published head h = k R + r is stored as j = r Hk + k. It
affects the value rows of qkv and conv, the rows of z, a, b, A_log and dt_bias, and the columns of out_proj.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import numpy as np

from engine.config import ModelConfig
from engine.convert.gguf_file import GgufEntry, GgufSource
from engine.convert.plan import PREFIX, Segment, row_view
from engine.convert.sources import RowSource
from engine.core import Float32Array
from engine.errors import ModelFileError

_TOP = {
    f"{PREFIX}embed_tokens.weight": "token_embd.weight",
    f"{PREFIX}norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
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
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
_MTP = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
_VISION = {
    "pos_embed.weight": "v.position_embd.weight",
    "patch_embed.proj.bias": "v.patch_embd.bias",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
}
_VISION_BLOCK = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}


def _is_offset_norm(name: str) -> bool:
    """RMS norms that compute with 1 + w: all of the text model but the one inside the delta net."""
    return "norm" in name and "linear_attn" not in name and "model.visual." not in name


class _MinusOne:
    """Norm weights: GGUF stores 1 + w, the published form is w."""

    def __init__(self, source: RowSource) -> None:
        self.path, self.name, self.rows, self.cols = source.path, source.name, source.rows, source.cols
        self.identity = f"minus-one({source.identity})"
        self._source = source

    def read(self, row0: int, row1: int) -> Float32Array:
        return self._source.read(row0, row1) - np.float32(1)


class _LogOfNegative:
    """A_log: GGUF stores -exp(A_log)."""

    def __init__(self, source: RowSource) -> None:
        self.path, self.name, self.rows, self.cols = source.path, source.name, source.rows, source.cols
        self.identity = f"log-of-negative({source.identity})"
        self._source = source

    def read(self, row0: int, row1: int) -> Float32Array:
        decay = self._source.read(row0, row1)
        if not (decay < 0).all():
            raise ModelFileError(
                f"{self.path}: tensor {self.name!r}: expected negative values (-exp(A_log)), got {decay.max()}"
            )
        return np.log(-decay.astype(np.float64)).astype(np.float32)


class _ReorderedColumns:
    """Columns taken in another order."""

    def __init__(self, source: RowSource, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        self.path, self.name, self.rows, self.cols = source.path, source.name, source.rows, source.cols
        self.identity = f"columns({source.identity},{order.tolist()})"
        self._source, self._order = source, order

    def read(self, row0: int, row1: int) -> Float32Array:
        return np.ascontiguousarray(self._source.read(row0, row1)[:, self._order])


class _InterleavedPatches:
    """The patch convolution: GGUF keeps its two time steps apart, the published form is [out, channel, time, y, x]."""

    def __init__(self, first: RowSource, second: RowSource, channels: int) -> None:
        self.path, self.name, self.rows, self.cols = first.path, first.name, first.rows, 2 * first.cols
        self.identity = f"interleaved({first.identity},{second.identity})"
        self._parts, self._channels = (first, second), channels

    def read(self, row0: int, row1: int) -> Float32Array:
        parts = [part.read(row0, row1).reshape(row1 - row0, self._channels, -1) for part in self._parts]
        return np.stack(parts, axis=2).reshape(row1 - row0, self.cols)


class GgufCheckpoint:
    """Answers for the tensors of a GGUF model and its optional vision file; see `plan.TensorProvider`."""

    def __init__(self, path: Path, entries: dict[str, GgufEntry], geometry: ModelConfig) -> None:
        """path: the (first) file of the model; entries: of all files, names must not collide; geometry: of the text
        model and the vision tower."""
        self.path = path
        self._entries = entries
        self._geometry = geometry
        self._mtp_block = geometry.num_hidden_layers
        self._taken: set[str] = set()
        channels = dict.fromkeys(("in_proj_qkv", "in_proj_z", "conv1d"), geometry.linear_value_head_dim)
        self._rows_per_value_head = channels | dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), 1)

    def weight(self, name: str, shape: tuple[int, ...]) -> tuple[Segment, ...]:
        """Rows of one tensor, in published order and value."""
        if name == "model.visual.patch_embed.proj.weight":
            return self._patch_embedding(shape)
        source: RowSource = self._take(self._stored(name), name, shape)
        if _is_offset_norm(name):
            source = _MinusOne(source)
        if name.endswith("A_log"):
            source = _LogOfNegative(source)
        if name.endswith("out_proj.weight"):
            source = _ReorderedColumns(source, self._value_order(self._geometry.linear_value_head_dim))
        for part, rows_per_head in self._rows_per_value_head.items():
            if part in name:
                return self._value_head_rows(source, rows_per_head)
        return (Segment(source, 0, source.rows),)

    def experts(self, prefix: str, count: int, hidden: int, width: int) -> tuple[tuple[Segment, ...], ...]:
        """(gate_up, down) rows; gate and up may be stored apart."""
        block = self._block(prefix)
        down = self._take(f"{block}ffn_down_exps.weight", f"{prefix}experts.down_proj", (count, hidden, width))
        down_rows = (Segment(down, 0, down.rows),)
        fused = f"{block}ffn_gate_up_exps.weight"
        if fused in self._entries:
            both = self._take(fused, f"{prefix}experts.gate_up_proj", (count, 2 * width, hidden))
            return (Segment(both, 0, both.rows),), down_rows
        halves = [
            self._take(f"{block}ffn_{part}_exps.weight", f"{prefix}experts.gate_up_proj", (count, width, hidden))
            for part in ("gate", "up")
        ]
        rows = [Segment(half, e * width, (e + 1) * width) for e in range(count) for half in halves]
        return tuple(rows), down_rows

    def expert_count(self, prefix: str) -> int:
        """From the stored down projection."""
        name = f"{self._block(prefix)}ffn_down_exps.weight"
        if name not in self._entries:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing")
        return self._entries[name].shape[0]

    def has(self, prefix: str) -> bool:
        """Whether the file holds tensors that are published under `prefix` (`mtp.` or `lm_head.`)."""
        stored = {"mtp.": f"blk.{self._mtp_block}.", "lm_head.": "output.weight"}[prefix]
        return any(name.startswith(stored) for name in self._entries)

    def unused(self) -> list[str]:
        """Tensors that no part of the architecture asked for."""
        return sorted(self._entries.keys() - self._taken)

    def kept_experts(self, prefix: str) -> tuple[int, ...]:
        """Nothing is pruned here."""
        return ()

    def _block(self, prefix: str) -> str:
        match = re.match(re.escape(PREFIX) + r"layers\.(\d+)\.", prefix)
        return f"blk.{match[1] if match else self._mtp_block}."

    def _stored(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        if name in _MTP:
            return f"blk.{self._mtp_block}.{_MTP[name]}"
        if name.startswith("model.visual."):
            return self._stored_vision(name.removeprefix("model.visual."))
        suffix = re.sub(r"^.*?layers\.\d+\.", "", name)
        return self._block(name) + _LAYER[suffix]

    def _stored_vision(self, name: str) -> str:
        if name in _VISION:
            return _VISION[name]
        stem, _, kind = name.rpartition(".")
        if stem in _VISION:
            return f"{_VISION[stem]}.{kind}"
        _, index, part = stem.split(".", 2)
        return f"v.blk.{index}.{_VISION_BLOCK[part]}.{kind}"

    def _take(self, stored: str, name: str, shape: tuple[int, ...]) -> GgufSource:
        entry = self._entries.get(stored)
        if entry is None:
            raise ModelFileError(f"{self.path}: tensor {stored!r} ({name}) is missing")
        # Unit dimensions come and go between the layouts: [C, 1, 4] is stored [C, 4], and [1, H] as [H].
        if tuple(d for d in entry.shape if d != 1) != tuple(d for d in shape if d != 1):
            raise ModelFileError(f"{entry.path}: tensor {stored!r}: expected shape {shape}, got {entry.shape}")
        self._taken.add(stored)
        return GgufSource(entry, row_view(shape)[1])

    def _value_order(self, width: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Stored index of each published row, value heads of `width` rows."""
        keys, values = self._geometry.linear_num_key_heads, self._geometry.linear_num_value_heads
        stored_head = np.arange(values).reshape(values // keys, keys).T.reshape(-1)
        return (stored_head[:, None] * width + np.arange(width)).reshape(-1)

    def _value_head_rows(self, source: RowSource, width: int) -> tuple[Segment, ...]:
        """Rows before the value heads (q and k) as they are, then one segment of `width` rows per value head."""
        before = source.rows - self._geometry.linear_num_value_heads * width
        head = [Segment(source, 0, before)] if before else []
        starts = before + self._value_order(width)[::width]
        return (*head, *(Segment(source, int(start), int(start) + width) for start in starts))

    def _patch_embedding(self, shape: tuple[int, ...]) -> tuple[Segment, ...]:
        out, channels, times, height, width = shape
        if times != 2:
            raise ModelFileError(f"{self.path}: a vision file holds 2 temporal slices, the configuration says {times}")
        name = "model.visual.patch_embed.proj.weight"
        parts = [
            self._take(f"v.patch_embd.weight{suffix}", name, (out, channels, height, width)) for suffix in ("", ".1")
        ]
        source = _InterleavedPatches(parts[0], parts[1], channels)
        assert source.cols == prod(shape[1:])
        return (Segment(source, 0, out),)
