"""The checkpoint's tensors: mapped read-only, each checked against the model's sizes, and bound to their roles.

Packed matrices are used where they lie in the file; so are float32 ones, and float16 ones of the vision tower. What
the engine multiplies by in another form (norm gains, convolution taps, decay rates) is small and made once, here.
Nothing in this module computes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig, LayerType, ModelConfig, VisionConfig
from engine.core import Float32Array, UInt8Array
from engine.errors import ModelFileError
from engine.formats import BLOCK_BYTES, BLOCK_COLS, BLOCK_ROWS
from engine.memory import map_file

FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TEXT_PREFIX = "model.language_model."
PADDING_PREFIX = "padding."  # fillers between tensors: the container allows no holes

_MAX_HEADER_BYTES = 100_000_000
_SAMPLE_BYTES = 4096
_DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_FLOATS = ("F32", "F16", "BF16")

Shape = tuple[int, ...]
HalfArray = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor where it lies: `data` is its bytes in the mapped file."""

    name: str
    dtype: str
    shape: Shape
    data: UInt8Array
    path: Path


@dataclass(frozen=True, slots=True)
class Matrix:
    """y = W x, or a stack of equal matrices (experts). data: uint8 blocks [count, rows/16, cols/64, 576] if packed,
    else float32 [count, rows, cols]; C-contiguous."""

    rows: int
    cols: int
    count: int
    data: UInt8Array | Float32Array

    @property
    def packed(self) -> bool:
        """Whether `data` holds 4-bit blocks."""
        return self.data.dtype == np.uint8


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Full attention. q_proj rows per head: query, then gate. Norms are gains (1 + w), [head_dim]."""

    q_proj: Matrix
    k_proj: Matrix
    v_proj: Matrix
    o_proj: Matrix
    q_norm: Float32Array
    k_norm: Float32Array


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """Gated delta net. conv: [4, channels], newest tap last; minus_a = -exp(A_log) and dt_bias: [value heads];
    norm: [value_dim], multiplied as it is stored."""

    in_proj_qkv: Matrix
    in_proj_z: Matrix
    in_proj_b: Matrix
    in_proj_a: Matrix
    out_proj: Matrix
    conv: Float32Array
    minus_a: Float32Array
    dt_bias: Float32Array
    norm: Float32Array


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Sparse mixture of experts. gate_up rows per expert: gate, then up."""

    router: Matrix
    shared_expert_gate: Matrix
    experts_gate_up: Matrix
    experts_down: Matrix
    shared_gate: Matrix
    shared_up: Matrix
    shared_down: Matrix


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms are gains (1 + w), [hidden]."""

    input_norm: Float32Array
    post_norm: Float32Array
    mixer: AttentionWeights | DeltaNetWeights
    moe: MoeWeights


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The layer for multi-token prediction. fc: [hidden, 2 hidden], the embedding's half first; norms are gains,
    [hidden]. experts: of its own mixture, which a pruned trunk need not share. Embedding and head are the trunk's."""

    fc: Matrix
    norm_embedding: Float32Array
    norm_hidden: Float32Array
    layer: LayerWeights
    final_norm: Float32Array
    experts: int


@dataclass(frozen=True, slots=True)
class Linear:
    """y = W x + b in the vision tower. weight: float16 or float32 [rows, cols], as it lies in the file if that is
    possible; bias: [rows]."""

    weight: HalfArray | Float32Array
    bias: Float32Array


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Gain and shift, [hidden] each."""

    weight: Float32Array
    bias: Float32Array


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """One block of the vision tower. qkv rows: queries of all heads, then keys, then values."""

    norm1: LayerNorm
    norm2: LayerNorm
    qkv: Linear
    proj: Linear
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The vision tower. patch_embed columns: [channel][frame][row][column] of a patch; table: position embeddings
    of a square grid, float16 or float32 [positions, hidden]; columns of merger_fc1: a token's patches side by side."""

    config: VisionConfig
    patch_embed: Linear
    table: HalfArray | Float32Array
    blocks: tuple[VisionBlock, ...]
    merger_norm: LayerNorm
    merger_fc1: Linear
    merger_fc2: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """The text model and its vision tower, None if it has none. config: of the checkpoint, with the number of experts
    that its tensors have. file keeps the mapping alive and holds the tensors of the MTP layer, checked but not bound.
    """

    config: ModelConfig
    embed: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: Float32Array
    head: Matrix
    file: ModelFile
    vision: VisionWeights | None = None


class ModelFile:
    """The tensors of a checkpoint directory, by name: `model.safetensors`, or the shards that an index names.

    Raises ModelFileError if a file is missing, truncated or no safetensors, if tensors overlap or leave gaps, or if
    a name occurs twice.
    """

    def __init__(self, directory: Path, memory: EngineConfig | None = None) -> None:
        """memory: how the files are to lie in memory (`memory.map_file`); None: as the kernel does it."""
        self.directory = directory
        self.files: dict[Path, UInt8Array] = {}  # whole, mapped
        self.tensors: dict[str, StoredTensor] = {}
        for path in _data_files(directory):
            self.files[path] = _map(path, memory)
            for tensor in _read_file(path, self.files[path]):
                if tensor.name in self.tensors:
                    raise ModelFileError(f"{path}: tensor {tensor.name!r} is also in {self.tensors[tensor.name].path}")
                if not tensor.name.startswith(PADDING_PREFIX):
                    self.tensors[tensor.name] = tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of all tensors in memory: 16-bit ones of the text model are held as float32."""
        return sum(tensor.data.nbytes * (2 if _is_widened(tensor) else 1) for tensor in self.tensors.values())

    def sampled_digest(self) -> bytes:
        """Tells checkpoints apart without reading them whole: over names, types, shapes, and the beginning, middle and
        end of every tensor. 32 bytes; independent of path and time, and so blind for changes elsewhere."""
        digest = hashlib.blake2b(digest_size=32)
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
            data = tensor.data.reshape(-1)
            middle = max(0, (len(data) - _SAMPLE_BYTES) // 2)
            for part in (data[:_SAMPLE_BYTES], data[middle : middle + _SAMPLE_BYTES], data[-_SAMPLE_BYTES:]):
                digest.update(part.tobytes())
        return digest.digest()

    def stamp(self) -> str:
        """Length and time of the last change of every file: changes where `sampled_digest` does not look, too."""
        found = [(path.name, path.stat()) for path in sorted(self.files)]
        return ", ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found)

    def get(self, name: str) -> StoredTensor:
        """ModelFileError if there is none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self.directory}: tensor {name!r} is missing")
        return tensor

    def floats(self, name: str, shape: Shape) -> Float32Array:
        """A tensor of exactly `shape` as float32; in place if it is stored so, else converted."""
        tensor = self.get(name)
        _check(tensor, shape, _FLOATS)
        if tensor.dtype == "F32":
            aligned = tensor.data.ctypes.data % 4 == 0
            return (tensor.data if aligned else tensor.data.copy()).view(np.float32).reshape(shape)
        if tensor.dtype == "F16":
            return tensor.data.copy().view(np.float16).astype(np.float32).reshape(shape)
        wide = tensor.data.copy().view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)

    def halves(self, name: str, shape: Shape) -> HalfArray | Float32Array:
        """A tensor of exactly `shape`: float16 in place if it is stored so, else as `floats` gives it."""
        tensor = self.get(name)
        if tensor.dtype != "F16" or tensor.data.ctypes.data % 2:
            return self.floats(name, shape)
        _check(tensor, shape, _FLOATS)
        return tensor.data.view(np.float16).reshape(shape)

    def matrix(self, name: str, rows: int, cols: int, count: int | None = None) -> Matrix:
        """A matrix, or a stack of `count`, packed or not."""
        lead = () if count is None else (count,)
        tensor = self.get(name)
        if tensor.dtype != "U8":
            data = self.floats(name, (*lead, rows, cols))
            return Matrix(rows, cols, count or 1, data.reshape(count or 1, rows, cols))
        if rows % BLOCK_ROWS or cols % BLOCK_COLS:
            raise ModelFileError(
                f"{tensor.path}: tensor {name!r} is packed, but {rows} x {cols} is not a multiple of "
                f"{BLOCK_ROWS} x {BLOCK_COLS}; expected one of {', '.join(_FLOATS)}"
            )
        blocks = (rows // BLOCK_ROWS, cols // BLOCK_COLS, BLOCK_BYTES)
        _check(tensor, (*lead, *blocks), ("U8",))
        if tensor.data.ctypes.data % 64:
            raise ModelFileError(f"{tensor.path}: tensor {name!r} does not start at a multiple of 64 bytes")
        return Matrix(rows, cols, count or 1, tensor.data.reshape(count or 1, *blocks))


def load_weights(directory: Path, config: ModelConfig, memory: EngineConfig | None = None) -> Weights:
    """Map and bind the checkpoint in `directory`; memory: how its files are to lie (`memory.map_file`).

    Raises ModelFileError naming the first tensor that is missing, unexpected, or not of the shape and type that
    `config` asks for."""
    file = ModelFile(directory, memory)
    binder = _Binder(file, quantized=config.quantized)
    prefix = TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in file.tensors) else "model."
    config = dataclasses.replace(config, num_experts=binder.expert_count(f"{prefix}layers.0.mlp."))
    if config.num_experts_per_tok > config.num_experts:
        raise ModelFileError(
            f"{directory}: {config.num_experts} experts, but {config.num_experts_per_tok} are to be chosen per token"
        )
    rows, hidden = config.vocab_size, config.hidden_size
    weights = Weights(
        config=config,
        embed=binder.matrix(f"{prefix}embed_tokens.weight", rows, hidden),
        layers=tuple(_layer(binder, f"{prefix}layers.{i}.", config, kind) for i, kind in enumerate(config.layer_types)),
        final_norm=binder.gain(f"{prefix}norm.weight", hidden),
        head=binder.matrix("lm_head.weight", rows, hidden),
        file=file,
        vision=None if config.vision is None else _vision(binder, config.vision),
    )
    if _has_mtp(file, config):
        _mtp(binder, config)
    unexpected = sorted(file.tensors.keys() - binder.taken)
    if unexpected:
        more = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
        raise ModelFileError(f"{directory}: unexpected tensor {unexpected[0]!r}{more}")
    return weights


def vision_shapes(vision: VisionConfig, prefix: str = "model.visual.") -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the vision tower's tensors, all stored as plain floats."""
    hidden, merged = vision.hidden_size, vision.hidden_size * vision.spatial_merge_size**2
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield f"{prefix}patch_embed.proj.weight", (hidden, *patch)
    yield f"{prefix}patch_embed.proj.bias", (hidden,)
    yield f"{prefix}pos_embed.weight", (vision.num_position_embeddings, hidden)
    shapes: dict[str, Shape] = {"merger.norm": (hidden,)}
    for i in range(vision.depth):
        block = f"blocks.{i}."
        shapes |= {
            f"{block}norm1": (hidden,),
            f"{block}norm2": (hidden,),
            f"{block}attn.qkv": (3 * hidden, hidden),
            f"{block}attn.proj": (hidden, hidden),
            f"{block}mlp.linear_fc1": (vision.intermediate_size, hidden),
            f"{block}mlp.linear_fc2": (hidden, vision.intermediate_size),
        }
    shapes |= {"merger.linear_fc1": (merged, merged), "merger.linear_fc2": (vision.out_hidden_size, merged)}
    for name, shape in shapes.items():
        yield f"{prefix}{name}.weight", shape
        yield f"{prefix}{name}.bias", shape[:1]


class _Binder:
    """Takes tensors from a file and remembers which. quantized: packed matrices are expected."""

    def __init__(self, file: ModelFile, *, quantized: bool) -> None:
        self.file = file
        self.quantized = quantized
        self.taken: set[str] = set()

    def check(self, name: str, shape: Shape) -> None:
        """A float tensor that is not bound."""
        _check(self.file.get(name), shape, _FLOATS)
        self.taken.add(name)

    def floats(self, name: str, shape: Shape) -> Float32Array:
        self.taken.add(name)
        return self.file.floats(name, shape)

    def gain(self, name: str, size: int) -> Float32Array:
        """1 + w: the checkpoint stores what a norm's gain differs from 1 by."""
        return 1.0 + self.floats(name, (size,))

    def matrix(self, name: str, rows: int, cols: int, count: int | None = None) -> Matrix:
        tensor = self.file.get(name)
        if tensor.dtype == "U8" and not self.quantized:
            raise ModelFileError(
                f"{tensor.path}: tensor {name!r} is packed, but config.json has no quantization_config"
            )
        self.taken.add(name)
        return self.file.matrix(name, rows, cols, count)

    def linear(self, name: str, shapes: Mapping[str, Shape]) -> Linear:
        """A layer with bias, its weight as a matrix of all that its inputs have."""
        shape = shapes[f"{name}.weight"]
        self.taken.add(f"{name}.weight")
        weight = self.file.halves(f"{name}.weight", shape)
        return Linear(weight.reshape(shape[0], -1), self.floats(f"{name}.bias", shape[:1]))

    def layer_norm(self, name: str, shapes: Mapping[str, Shape]) -> LayerNorm:
        shape = shapes[f"{name}.weight"]
        return LayerNorm(self.floats(f"{name}.weight", shape), self.floats(f"{name}.bias", shape))

    def float_matrix(self, name: str, rows: int, cols: int) -> Matrix:
        """A matrix that is never packed: too small to gain by it and too sensitive to rounding."""
        return Matrix(rows, cols, 1, self.floats(name, (rows, cols)).reshape(1, rows, cols))

    def expert_count(self, prefix: str) -> int:
        """Experts of the layer `prefix`, from its tensors: pruned checkpoints with a stale config.json exist."""
        fused = self.file.tensors.get(f"{prefix}experts.gate_up_proj")
        if fused is not None:
            return fused.shape[0] if fused.shape else 0
        start = f"{prefix}experts."
        numbers = {name[len(start) :].split(".")[0] for name in self.file.tensors if name.startswith(start)}
        if not numbers:
            raise ModelFileError(f"{self.file.directory}: tensor {start + 'gate_up_proj'!r} is missing")
        return len(numbers)

    def experts(self, prefix: str, count: int, hidden: int, inner: int) -> tuple[Matrix, Matrix]:
        """(gate_up, down) of all experts; from one fused tensor each, or gathered expert by expert."""
        if f"{prefix}experts.gate_up_proj" in self.file.tensors:
            gate_up = self.matrix(f"{prefix}experts.gate_up_proj", 2 * inner, hidden, count)
            return gate_up, self.matrix(f"{prefix}experts.down_proj", hidden, inner, count)
        gate_up_data = np.empty((count, 2 * inner, hidden), np.float32)
        down_data = np.empty((count, hidden, inner), np.float32)
        for expert in range(count):
            base = f"{prefix}experts.{expert}."
            gate_up_data[expert, :inner] = self.floats(f"{base}gate_proj.weight", (inner, hidden))
            gate_up_data[expert, inner:] = self.floats(f"{base}up_proj.weight", (inner, hidden))
            down_data[expert] = self.floats(f"{base}down_proj.weight", (hidden, inner))
        return Matrix(2 * inner, hidden, count, gate_up_data), Matrix(hidden, inner, count, down_data)


def _layer(binder: _Binder, prefix: str, config: ModelConfig, kind: LayerType) -> LayerWeights:
    hidden = config.hidden_size
    full = kind is LayerType.FULL_ATTENTION
    return LayerWeights(
        input_norm=binder.gain(f"{prefix}input_layernorm.weight", hidden),
        post_norm=binder.gain(f"{prefix}post_attention_layernorm.weight", hidden),
        mixer=_attention(binder, f"{prefix}self_attn.", config)
        if full
        else _delta_net(binder, f"{prefix}linear_attn.", config),
        moe=_moe(binder, f"{prefix}mlp.", config, config.num_experts),
    )


def _attention(binder: _Binder, prefix: str, config: ModelConfig) -> AttentionWeights:
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return AttentionWeights(
        q_proj=binder.matrix(f"{prefix}q_proj.weight", 2 * query, hidden),
        k_proj=binder.matrix(f"{prefix}k_proj.weight", key, hidden),
        v_proj=binder.matrix(f"{prefix}v_proj.weight", key, hidden),
        o_proj=binder.matrix(f"{prefix}o_proj.weight", hidden, query),
        q_norm=binder.gain(f"{prefix}q_norm.weight", head_dim),
        k_norm=binder.gain(f"{prefix}k_norm.weight", head_dim),
    )


def _delta_net(binder: _Binder, prefix: str, config: ModelConfig) -> DeltaNetWeights:
    hidden, heads, channels = config.hidden_size, config.linear_num_value_heads, config.conv_channels
    taps = binder.floats(f"{prefix}conv1d.weight", (channels, 1, 4))
    return DeltaNetWeights(
        in_proj_qkv=binder.matrix(f"{prefix}in_proj_qkv.weight", channels, hidden),
        in_proj_z=binder.matrix(f"{prefix}in_proj_z.weight", config.value_width, hidden),
        in_proj_b=binder.float_matrix(f"{prefix}in_proj_b.weight", heads, hidden),
        in_proj_a=binder.float_matrix(f"{prefix}in_proj_a.weight", heads, hidden),
        out_proj=binder.matrix(f"{prefix}out_proj.weight", hidden, config.value_width),
        conv=np.ascontiguousarray(taps[:, 0, :].T),
        minus_a=-np.exp(binder.floats(f"{prefix}A_log", (heads,))),
        dt_bias=binder.floats(f"{prefix}dt_bias", (heads,)),
        norm=binder.floats(f"{prefix}norm.weight", (config.linear_value_head_dim,)),
    )


def _moe(binder: _Binder, prefix: str, config: ModelConfig, experts: int) -> MoeWeights:
    hidden, shared = config.hidden_size, config.shared_expert_intermediate_size
    gate_up, down = binder.experts(prefix, experts, hidden, config.moe_intermediate_size)
    return MoeWeights(
        router=binder.float_matrix(f"{prefix}gate.weight", experts, hidden),
        shared_expert_gate=binder.float_matrix(f"{prefix}shared_expert_gate.weight", 1, hidden),
        experts_gate_up=gate_up,
        experts_down=down,
        shared_gate=binder.matrix(f"{prefix}shared_expert.gate_proj.weight", shared, hidden),
        shared_up=binder.matrix(f"{prefix}shared_expert.up_proj.weight", shared, hidden),
        shared_down=binder.matrix(f"{prefix}shared_expert.down_proj.weight", hidden, shared),
    )


def mtp_weights(weights: Weights) -> MtpWeights | None:
    """The layer for multi-token prediction, bound; None if the checkpoint has none. The engine does not run it."""
    if not _has_mtp(weights.file, weights.config):
        return None
    return _mtp(_Binder(weights.file, quantized=weights.config.quantized), weights.config)


def _has_mtp(file: ModelFile, config: ModelConfig) -> bool:
    return config.mtp_num_hidden_layers > 0 and "mtp.fc.weight" in file.tensors


def _mtp(binder: _Binder, config: ModelConfig) -> MtpWeights:
    hidden, prefix = config.hidden_size, "mtp.layers.0."
    experts = binder.expert_count(f"{prefix}mlp.")
    if config.num_experts_per_tok > experts:
        raise ModelFileError(
            f"{binder.file.directory}: {experts} experts under {prefix}mlp., but {config.num_experts_per_tok} are to "
            "be chosen per token"
        )
    return MtpWeights(
        fc=binder.matrix("mtp.fc.weight", hidden, 2 * hidden),
        norm_embedding=binder.gain("mtp.pre_fc_norm_embedding.weight", hidden),
        norm_hidden=binder.gain("mtp.pre_fc_norm_hidden.weight", hidden),
        layer=_layer(binder, prefix, dataclasses.replace(config, num_experts=experts), LayerType.FULL_ATTENTION),
        final_norm=binder.gain("mtp.norm.weight", hidden),
        experts=experts,
    )


def _vision(binder: _Binder, vision: VisionConfig) -> VisionWeights:
    prefix = "model.visual."
    shapes = dict(vision_shapes(vision, prefix))
    table = f"{prefix}pos_embed.weight"
    binder.taken.add(table)
    return VisionWeights(
        config=vision,
        patch_embed=binder.linear(f"{prefix}patch_embed.proj", shapes),
        table=binder.file.halves(table, shapes[table]),
        blocks=tuple(
            VisionBlock(
                norm1=binder.layer_norm(f"{block}norm1", shapes),
                norm2=binder.layer_norm(f"{block}norm2", shapes),
                qkv=binder.linear(f"{block}attn.qkv", shapes),
                proj=binder.linear(f"{block}attn.proj", shapes),
                fc1=binder.linear(f"{block}mlp.linear_fc1", shapes),
                fc2=binder.linear(f"{block}mlp.linear_fc2", shapes),
            )
            for block in (f"{prefix}blocks.{i}." for i in range(vision.depth))
        ),
        merger_norm=binder.layer_norm(f"{prefix}merger.norm", shapes),
        merger_fc1=binder.linear(f"{prefix}merger.linear_fc1", shapes),
        merger_fc2=binder.linear(f"{prefix}merger.linear_fc2", shapes),
    )


def _is_widened(tensor: StoredTensor) -> bool:
    """Whether binding makes a float32 copy of a tensor and keeps it. The vision tower takes F16 as it is; the layer for
    multi-token prediction is not bound."""
    if tensor.name.startswith("model.visual."):
        return tensor.dtype == "BF16"
    return tensor.dtype in ("F16", "BF16") and not tensor.name.startswith("mtp.")


def _check(tensor: StoredTensor, shape: Shape, dtypes: tuple[str, ...]) -> None:
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise ModelFileError(
            f"{tensor.path}: tensor {tensor.name!r}: got {tensor.dtype} {list(tensor.shape)}, "
            f"expected {' or '.join(dtypes)} {list(shape)}"
        )


def _data_files(directory: Path) -> list[Path]:
    single, index = directory / FILE_NAME, directory / INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelFileError(f"{directory}: neither {FILE_NAME} nor {INDEX_NAME} is there")
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{index}: not an index of safetensors files") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFileError(f"{index}: {name!r} is not the name of a file beside it")
    return [directory / name for name in sorted(set(names))]


def _map(path: Path, memory: EngineConfig | None) -> UInt8Array:
    try:
        size = path.stat().st_size
        if size < 8:
            raise ModelFileError(f"{path}: truncated: {size} bytes, a safetensors file has at least 8")
        return map_file(path, memory)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error


def _read_file(path: Path, mapped: UInt8Array) -> list[StoredTensor]:
    """All tensors of a safetensors file: 8 bytes of header length, a JSON header, the data without holes."""
    size = mapped.nbytes
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if length > _MAX_HEADER_BYTES or 8 + length > size:
        raise ModelFileError(f"{path}: not a safetensors file, or truncated: header of {length} in {size} bytes")
    header = _parse_header(path, mapped[8 : 8 + length].tobytes())
    data = mapped[8 + length :]
    tensors, position = [], 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        begin, end = _offsets(path, name, entry)
        dtype, shape = _type_and_shape(path, name, entry)
        nbytes = prod(shape) * _DTYPE_BYTES[dtype]
        if begin != position or end - begin != nbytes:
            raise ModelFileError(
                f"{path}: tensor {name!r}: got bytes {begin}..{end}, expected {position}..{position + nbytes}"
            )
        if end > data.size:
            raise ModelFileError(f"{path}: truncated in tensor {name!r}: got {data.size} bytes of data, expected {end}")
        tensors.append(StoredTensor(name, dtype, shape, data[begin:end], path))
        position = end
    if position != data.size:
        raise ModelFileError(f"{path}: got {data.size} bytes of data, expected {position}")
    return tensors


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise ModelFileError(f"{path}: a name occurs twice in the header")
        return dict(pairs)

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: the header is not JSON: not a safetensors file") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: the header is not a JSON object: not a safetensors file")
    header.pop("__metadata__", None)
    return header


def _offsets(path: Path, name: str, entry: object) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, Mapping) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(value) for value in offsets):
        raise ModelFileError(f"{path}: tensor {name!r}: data_offsets is {offsets!r}, expected [begin, end]")
    return offsets[0], offsets[1]


def _type_and_shape(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[str, Shape]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if dtype not in _DTYPE_BYTES:
        raise ModelFileError(f"{path}: tensor {name!r}: dtype is {dtype!r}, expected one of {', '.join(_DTYPE_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_size(value) for value in shape):
        raise ModelFileError(f"{path}: tensor {name!r}: shape is {shape!r}, expected up to 8 sizes")
    return dtype, tuple(shape)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 50
