"""Writes a model of a given shape with random weights in the GGUF format, for `fermion bench peer` to give to engines
that read that format. The shape and the number of bits are those of a checkpoint of ours; the values are noise.

GGUF version 3: magic, counts, typed key-value pairs, a table of tensors, and their data, each at a multiple of 32
bytes. Numbers are little-endian; a string is its 64-bit length and its bytes. Names of keys and tensors are those that
llama.cpp gives to this family (architecture `qwen35moe`). There is no vocabulary but its size: token ids go in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import numpy as np

from engine.config import LayerType, ModelConfig
from engine.core import UInt8Array

ARCHITECTURE = "qwen35moe"
_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9  # types of values
_MOSTLY_Q4_0 = 2  # general.file_type
_GROUP, _GROUP_BYTES = 32, 18  # Q4_0: a half-precision scale and 32 nibbles, of which 8 means zero
_PIECE_BYTES = 8 << 20
# Only odd nibbles, -7, -5 ... 7: mean 0, mean square 21.
_ODD, _NIBBLE_STD = np.uint64(0x1111111111111111), 21.0**0.5

Progress = Callable[[int, int], None]  # (bytes written, bytes in all)


class TensorType(IntEnum):
    """Storage of a tensor, by its number in the file."""

    F32 = 0
    Q4_0 = 2


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: row-major, outermost first (the file has it reversed). mean, std: of the values."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the data, without padding."""
        values = int(np.prod(self.shape, dtype=np.int64))
        return values // _GROUP * _GROUP_BYTES if self.type is TensorType.Q4_0 else 4 * values


def gguf_tensors(config: ModelConfig) -> Iterator[GgufTensor]:
    """All tensors of the text model: 4-bit where a packed checkpoint of ours is, and where llama.cpp quantises too (the
    two small projections of the delta net)."""
    hidden = config.hidden_size
    yield _packed("token_embd.weight", config.vocab_size, hidden)
    yield _vector("output_norm.weight", hidden)
    yield _packed("output.weight", config.vocab_size, hidden)
    for number, kind in enumerate(config.layer_types):
        prefix = f"blk.{number}."
        yield _vector(f"{prefix}attn_norm.weight", hidden)
        yield _vector(f"{prefix}post_attention_norm.weight", hidden)
        mixer = _attention if kind is LayerType.FULL_ATTENTION else _delta_net
        yield from mixer(prefix, config)
        yield from _experts(prefix, config)


def write_gguf(path: Path, config: ModelConfig, *, seed: int, progress: Progress) -> None:
    """Write the file. Whole or not at all: it gets its name when it is complete. The same arguments give the same
    bytes. OSError if the disk does not take it."""
    tensors = list(gguf_tensors(config))
    total = sum(_padded(tensor.nbytes) for tensor in tensors)
    partial = path.with_name(f"{path.name}.partial")
    done = 0
    with partial.open("wb") as file:
        file.write(_head(config, tensors))
        for tensor in tensors:
            for piece in _data(tensor, seed):
                file.write(piece.data)
                done += len(piece)
                progress(done, total)
            done += _pad(file, done)
    partial.replace(path)


def _packed(name: str, *shape: int) -> GgufTensor:
    return GgufTensor(name, TensorType.Q4_0, shape, std=float(1.0 / np.sqrt(shape[-1])))


def _floats(name: str, *shape: int, mean: float = 0.0, std: float) -> GgufTensor:
    return GgufTensor(name, TensorType.F32, shape, mean, std)


def _vector(name: str, size: int) -> GgufTensor:
    """A norm's gain."""
    return _floats(name, size, mean=1.0, std=0.1)


def _attention(prefix: str, config: ModelConfig) -> Iterator[GgufTensor]:
    hidden, width = config.hidden_size, config.head_dim
    query, key = config.num_attention_heads * width, config.num_key_value_heads * width
    yield _packed(f"{prefix}attn_q.weight", 2 * query, hidden)
    yield _packed(f"{prefix}attn_k.weight", key, hidden)
    yield _packed(f"{prefix}attn_v.weight", key, hidden)
    yield _packed(f"{prefix}attn_output.weight", hidden, query)
    yield _vector(f"{prefix}attn_q_norm.weight", width)
    yield _vector(f"{prefix}attn_k_norm.weight", width)


def _delta_net(prefix: str, config: ModelConfig) -> Iterator[GgufTensor]:
    hidden, heads, channels = config.hidden_size, config.linear_num_value_heads, config.conv_channels
    inner = heads * config.linear_value_head_dim
    yield _packed(f"{prefix}attn_qkv.weight", channels, hidden)
    yield _packed(f"{prefix}attn_gate.weight", inner, hidden)
    yield _floats(f"{prefix}ssm_conv1d.weight", channels, 4, std=0.5)
    yield _floats(f"{prefix}ssm_dt.bias", heads, mean=-4.0, std=0.5)
    yield _floats(f"{prefix}ssm_a", heads, mean=-4.0, std=0.5)  # -exp(A_log): heads forget over tens of tokens
    yield _packed(f"{prefix}ssm_beta.weight", heads, hidden)
    yield _packed(f"{prefix}ssm_alpha.weight", heads, hidden)
    yield _vector(f"{prefix}ssm_norm.weight", config.linear_value_head_dim)
    yield _packed(f"{prefix}ssm_out.weight", hidden, inner)


def _experts(prefix: str, config: ModelConfig) -> Iterator[GgufTensor]:
    hidden, count = config.hidden_size, config.num_experts
    width, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    yield _floats(f"{prefix}ffn_gate_inp.weight", count, hidden, std=float(1.0 / np.sqrt(hidden)))
    yield _packed(f"{prefix}ffn_gate_exps.weight", count, width, hidden)
    yield _packed(f"{prefix}ffn_up_exps.weight", count, width, hidden)
    yield _packed(f"{prefix}ffn_down_exps.weight", count, hidden, width)
    yield _floats(f"{prefix}ffn_gate_inp_shexp.weight", hidden, std=float(1.0 / np.sqrt(hidden)))
    yield _packed(f"{prefix}ffn_gate_shexp.weight", shared, hidden)
    yield _packed(f"{prefix}ffn_up_shexp.weight", shared, hidden)
    yield _packed(f"{prefix}ffn_down_shexp.weight", hidden, shared)


def _head(config: ModelConfig, tensors: list[GgufTensor]) -> bytes:
    """Everything before the data."""
    values = list(_key_values(config))
    parts = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(values)), *values]
    offset = 0
    for tensor in tensors:
        parts.append(_string(tensor.name) + struct.pack("<I", len(tensor.shape)))
        parts.append(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
        parts.append(struct.pack("<IQ", tensor.type, offset))
        offset += _padded(tensor.nbytes)
    head = b"".join(parts)
    return head + bytes(-len(head) % _ALIGNMENT)


def _key_values(config: ModelConfig) -> Iterator[bytes]:
    interval = config.layer_types.index(LayerType.FULL_ATTENTION) + 1
    yield _pair("general.architecture", ARCHITECTURE)
    yield _pair("general.name", "random weights")
    yield _pair("general.file_type", _MOSTLY_Q4_0)
    yield _pair("general.quantization_version", 2)
    numbers: dict[str, int | float] = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.rotary_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "ssm.conv_kernel": 4,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": interval,
    }
    for name, number in numbers.items():
        yield _pair(f"{ARCHITECTURE}.{name}", number)
    sections = struct.pack("<IQ4i", _INT32, 4, *config.mrope_section, 0)
    yield _string(f"{ARCHITECTURE}.rope.dimension_sections") + struct.pack("<I", _ARRAY) + sections
    yield _pair("tokenizer.ggml.model", "no_vocab")


def _pair(key: str, value: str | int | float) -> bytes:
    if isinstance(value, str):
        return _string(key) + struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, int):
        return _string(key) + struct.pack("<II", _UINT32, value)
    return _string(key) + struct.pack("<If", _FLOAT32, value)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _pad(file: BinaryIO, done: int) -> int:
    return file.write(bytes(-done % _ALIGNMENT))


def _data(tensor: GgufTensor, seed: int) -> Iterator[UInt8Array]:
    """The bytes of a tensor, piece by piece."""
    stream = np.random.SFC64([seed, crc32(tensor.name.encode())])
    if tensor.type is TensorType.F32:
        values = np.random.Generator(stream).standard_normal(tensor.shape, np.float32)
        yield (np.float32(tensor.mean) + np.float32(tensor.std) * values).reshape(-1).view(np.uint8)
        return
    scale = np.float16(tensor.std / _NIBBLE_STD)
    left = tensor.nbytes // _GROUP_BYTES
    while left:
        count = min(left, _PIECE_BYTES // (8 * _GROUP_BYTES) * 8)  # groups; eight are a whole number of 64-bit words
        words = stream.random_raw(-(-count * _GROUP_BYTES // 8))
        words |= _ODD
        groups = words.view(np.uint8)[: count * _GROUP_BYTES].reshape(count, _GROUP_BYTES)
        groups[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        yield groups.reshape(-1)
        left -= count
