"""What will be written: every output tensor, its stored form, and the source rows it is made of.

A plan is pure data, made before any weight is read: printing it is `--dry-run`, hashing it is what makes a
resumed conversion safe, and pruning and head reordering are nothing but another list of row ranges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Protocol

from engine.config import LayerType, ModelConfig, VisionConfig
from engine.convert.safetensors import TensorInfo
from engine.convert.sources import PackedSource, RowSource
from engine.errors import ModelFileError
from engine.formats import BLOCK_BYTES, BLOCK_COLS, BLOCK_ROWS

PIECE_WEIGHTS = 1 << 21  # weights encoded at a time by one thread: 8 MiB as float32
PREFIX = "model.language_model."
CONV_TAPS = 4


class Format(StrEnum):
    """Stored forms. Q4: blocks.h, 4.5 bits per weight; the others are plain numbers."""

    Q4 = "Q4"
    F16 = "F16"
    F32 = "F32"


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows row0..row1-1 of a source; of a packed one in multiples of 16."""

    source: RowSource | PackedSource
    row0: int
    row1: int


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the checkpoint: `shape` in weights, its rows the concatenation of `segments`.

    Either all segments are packed already and stored as they are, or none. A tensor with more than one matrix
    (experts) is [matrices, rows, cols]; `matrix_rows` is `rows`. kept_experts: after pruning, the former number of
    each.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    kept_experts: tuple[int, ...] = ()

    @property
    def cols(self) -> int:
        """Columns of the matrix view: what one source row holds."""
        return row_view(self.shape)[1]

    @property
    def rows(self) -> int:
        """Rows of the matrix view, all experts together."""
        return row_view(self.shape)[0]

    @property
    def matrix_rows(self) -> int:
        """Rows of one matrix: those of one expert, or all."""
        return self.shape[1] if len(self.shape) == 3 and self.shape[1] != 1 else self.rows

    @property
    def info(self) -> TensorInfo:
        """Its entry in the written file."""
        if self.format is not Format.Q4:
            return TensorInfo(self.name, self.format.value, self.shape)
        *lead, rows, cols = self.shape
        return TensorInfo(self.name, "U8", (*lead, rows // BLOCK_ROWS, cols // BLOCK_COLS, BLOCK_BYTES))

    def row_bytes(self, rows: int) -> int:
        """Stored bytes of `rows` consecutive rows (a multiple of 16 for Q4)."""
        if self.format is Format.Q4:
            return rows // BLOCK_ROWS * (self.cols // BLOCK_COLS) * BLOCK_BYTES
        return rows * self.cols * (2 if self.format is Format.F16 else 4)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows row0..row1-1 of one tensor, at byte `offset` of its data: the unit of work and of resuming."""

    tensor: OutputTensor
    row0: int
    row1: int
    offset: int


class TensorProvider(Protocol):
    """A checkpoint in somebody's layout, answering in published names and shapes. path: its directory or file."""

    path: Path

    def weight(self, name: str, shape: tuple[int, ...]) -> tuple[Segment, ...]:
        """Rows of one tensor. Raises ModelFileError if it is missing or has another shape."""

    def experts(self, prefix: str, count: int, hidden: int, width: int) -> tuple[tuple[Segment, ...], ...]:
        """(gate_up rows, down rows) of all experts under `prefix` (ends in `mlp.`), in expert order."""

    def expert_count(self, prefix: str) -> int:
        """How many experts the stored tensors hold under `prefix`."""

    def has(self, prefix: str) -> bool:
        """Whether any tensor's published name starts with `prefix`."""

    def unused(self) -> list[str]:
        """Stored names nobody asked for, as the source spells them."""

    def kept_experts(self, prefix: str) -> tuple[int, ...]:
        """Former numbers of the experts under `prefix` if it was pruned, else empty."""


def row_view(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, cols) of the matrix view of a tensor: vectors are one column, so that heads can be reordered."""
    if len(shape) == 1:
        return shape[0], 1
    if len(shape) == 2 or (len(shape) == 3 and shape[1] != 1):  # experts [E, rows, cols] and matrices
        return prod(shape[:-1]), shape[-1]
    return shape[0], prod(shape[1:])  # convolution kernels: one row per output channel


def select_rows(segments: Sequence[Segment], row0: int, row1: int) -> Iterator[Segment]:
    """The segments that make up rows row0..row1-1 of what `segments` concatenate to."""
    start = 0
    for segment in segments:
        stop = start + segment.row1 - segment.row0
        low, high = max(row0, start), min(row1, stop)
        if low < high:
            yield Segment(segment.source, segment.row0 + low - start, segment.row0 + high - start)
        start = stop


def pieces(tensor: OutputTensor) -> Iterator[Piece]:
    """Cuts a tensor into pieces of at most about PIECE_WEIGHTS weights that never span two matrices."""
    step = max(BLOCK_ROWS, PIECE_WEIGHTS // tensor.cols // BLOCK_ROWS * BLOCK_ROWS)
    for matrix in range(0, tensor.rows, tensor.matrix_rows):
        end = matrix + tensor.matrix_rows
        for row in range(matrix, end, step):
            yield Piece(tensor, row, min(row + step, end), tensor.row_bytes(row))


def digest(tensors: Sequence[OutputTensor], settings: str) -> str:
    """SHA-256 over everything that decides the bytes to be written; `settings` describes the quantiser."""
    sha = hashlib.sha256(settings.encode())
    for tensor in tensors:
        sha.update(f"\n{tensor.name} {tensor.format} {tensor.shape}".encode())
        for segment in tensor.segments:
            sha.update(f"\n {segment.source.identity} {segment.row0} {segment.row1}".encode())
    return sha.hexdigest()


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensors in file order, and the expert counts found: `mtp_experts` None without an MTP layer."""

    tensors: tuple[OutputTensor, ...]
    mtp_experts: int | None


FormatChoice = Callable[[str, tuple[int, ...]], Format]


def default_format(name: str, shape: tuple[int, ...]) -> Format:
    """Big matrices in 4 bits; what is small and sensitive in F32; the vision tower in F16 (its widths do not
    divide into blocks)."""
    if name.startswith("model.visual."):
        return Format.F16 if len(shape) > 1 else Format.F32
    small = ("norm", "conv1d", "A_log", "dt_bias", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b")
    return Format.F32 if len(shape) == 1 or any(part in name for part in small) else Format.Q4


def build_plan(
    provider: TensorProvider, geometry: ModelConfig, choose: FormatChoice = default_format, *, tied: bool = False
) -> Plan:
    """Binds every tensor the geometry asks for; tied: the head is the embedding, written once more.

    Raises ModelFileError for anything missing, misshapen or unknown.
    """
    planner = _Planner(provider, geometry, choose)
    planner.weight(f"{PREFIX}embed_tokens.weight", geometry.vocab_size, geometry.hidden_size)
    for index, kind in enumerate(geometry.layer_types):
        planner.layer(f"{PREFIX}layers.{index}.", kind, geometry.num_experts)
    planner.weight(f"{PREFIX}norm.weight", geometry.hidden_size)
    planner.lm_head(tied)
    mtp_experts = planner.mtp() if provider.has("mtp.") else None
    if geometry.vision is not None:
        planner.vision(geometry.vision)
    unused = provider.unused()
    if unused:
        raise ModelFileError(
            f"{provider.path}: {len(unused)} tensors are not part of this architecture, first {unused[0]!r}"
        )
    return Plan(tuple(planner.tensors), mtp_experts)


class _Planner:
    """Collects output tensors in file order."""

    def __init__(self, provider: TensorProvider, geometry: ModelConfig, choose: FormatChoice) -> None:
        self.tensors: list[OutputTensor] = []
        self._provider = provider
        self._geometry = geometry
        self._choose = choose

    def weight(self, name: str, *shape: int) -> None:
        self._add(name, shape, self._provider.weight(name, shape))

    def _add(
        self, name: str, shape: tuple[int, ...], segments: tuple[Segment, ...], kept: tuple[int, ...] = ()
    ) -> None:
        stored = self._choose(name, shape)
        if stored is Format.Q4 and (shape[-2] % BLOCK_ROWS or shape[-1] % BLOCK_COLS):
            raise ModelFileError(
                f"{self._provider.path}: tensor {name!r}: shape {shape} does not divide into blocks of "
                f"{BLOCK_ROWS} x {BLOCK_COLS}"
            )
        self.tensors.append(OutputTensor(name, stored, shape, segments, kept))

    def layer(self, prefix: str, kind: LayerType, experts: int) -> None:
        hidden = self._geometry.hidden_size
        self.weight(f"{prefix}input_layernorm.weight", hidden)
        if kind is LayerType.FULL_ATTENTION:
            self._attention(f"{prefix}self_attn.")
        else:
            self._gated_delta(f"{prefix}linear_attn.")
        self.weight(f"{prefix}post_attention_layernorm.weight", hidden)
        self._moe(f"{prefix}mlp.", experts)

    def _attention(self, prefix: str) -> None:
        g = self._geometry
        self.weight(f"{prefix}q_proj.weight", 2 * g.num_attention_heads * g.head_dim, g.hidden_size)
        self.weight(f"{prefix}k_proj.weight", g.num_key_value_heads * g.head_dim, g.hidden_size)
        self.weight(f"{prefix}v_proj.weight", g.num_key_value_heads * g.head_dim, g.hidden_size)
        self.weight(f"{prefix}o_proj.weight", g.hidden_size, g.num_attention_heads * g.head_dim)
        self.weight(f"{prefix}q_norm.weight", g.head_dim)
        self.weight(f"{prefix}k_norm.weight", g.head_dim)

    def _gated_delta(self, prefix: str) -> None:
        g = self._geometry
        self.weight(f"{prefix}in_proj_qkv.weight", g.conv_channels, g.hidden_size)
        self.weight(f"{prefix}in_proj_z.weight", g.value_width, g.hidden_size)
        self.weight(f"{prefix}in_proj_b.weight", g.linear_num_value_heads, g.hidden_size)
        self.weight(f"{prefix}in_proj_a.weight", g.linear_num_value_heads, g.hidden_size)
        self.weight(f"{prefix}conv1d.weight", g.conv_channels, 1, CONV_TAPS)
        self.weight(f"{prefix}A_log", g.linear_num_value_heads)
        self.weight(f"{prefix}dt_bias", g.linear_num_value_heads)
        self.weight(f"{prefix}norm.weight", g.linear_value_head_dim)
        self.weight(f"{prefix}out_proj.weight", g.hidden_size, g.value_width)

    def _moe(self, prefix: str, experts: int) -> None:
        g = self._geometry
        stored = self._provider.expert_count(prefix)
        if stored != experts:
            raise ModelFileError(
                f"{self._provider.path}: tensors under {prefix}experts hold {stored} experts, the configuration says "
                f"{experts}"
            )
        self.weight(f"{prefix}gate.weight", experts, g.hidden_size)
        gate_up, down = self._provider.experts(prefix, experts, g.hidden_size, g.moe_intermediate_size)
        kept = self._provider.kept_experts(prefix)
        self._add(f"{prefix}experts.gate_up_proj", (experts, 2 * g.moe_intermediate_size, g.hidden_size), gate_up, kept)
        self._add(f"{prefix}experts.down_proj", (experts, g.hidden_size, g.moe_intermediate_size), down, kept)
        self.weight(f"{prefix}shared_expert.gate_proj.weight", g.shared_expert_intermediate_size, g.hidden_size)
        self.weight(f"{prefix}shared_expert.up_proj.weight", g.shared_expert_intermediate_size, g.hidden_size)
        self.weight(f"{prefix}shared_expert.down_proj.weight", g.hidden_size, g.shared_expert_intermediate_size)
        self.weight(f"{prefix}shared_expert_gate.weight", 1, g.hidden_size)

    def lm_head(self, tied: bool) -> None:
        g = self._geometry
        if tied and not self._provider.has("lm_head."):
            shape = (g.vocab_size, g.hidden_size)
            self._add("lm_head.weight", shape, self.tensors[0].segments)
        else:
            self.weight("lm_head.weight", g.vocab_size, g.hidden_size)

    def mtp(self) -> int:
        hidden = self._geometry.hidden_size
        experts = self._provider.expert_count("mtp.layers.0.mlp.")
        self.weight("mtp.fc.weight", hidden, 2 * hidden)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            self.weight(f"mtp.{name}.weight", hidden)
        self.layer("mtp.layers.0.", LayerType.FULL_ATTENTION, experts)
        return experts

    def vision(self, v: VisionConfig) -> None:
        visual = "model.visual."
        self._linear(
            f"{visual}patch_embed.proj", v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size
        )
        self.weight(f"{visual}pos_embed.weight", v.num_position_embeddings, v.hidden_size)
        for index in range(v.depth):
            block = f"{visual}blocks.{index}."
            self._linear(f"{block}norm1", v.hidden_size)
            self._linear(f"{block}norm2", v.hidden_size)
            self._linear(f"{block}attn.qkv", 3 * v.hidden_size, v.hidden_size)
            self._linear(f"{block}attn.proj", v.hidden_size, v.hidden_size)
            self._linear(f"{block}mlp.linear_fc1", v.intermediate_size, v.hidden_size)
            self._linear(f"{block}mlp.linear_fc2", v.hidden_size, v.intermediate_size)
        merged = v.hidden_size * v.spatial_merge_size**2
        self._linear(f"{visual}merger.norm", v.hidden_size)
        self._linear(f"{visual}merger.linear_fc1", merged, merged)
        self._linear(f"{visual}merger.linear_fc2", v.out_hidden_size, merged)

    def _linear(self, name: str, *shape: int) -> None:
        """A weight and its bias."""
        self.weight(f"{name}.weight", *shape)
        self.weight(f"{name}.bias", shape[0])
