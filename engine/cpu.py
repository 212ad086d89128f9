"""The binding to the C engine. The only module of the model that touches cffi; everything it passes stays referenced
for as long as C may read it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine import _simd
from engine._simd import ffi, lib
from engine.config import SIMD_TIERS, EngineConfig, LayerType
from engine.core import Float32Array, Int32Array, UInt8Array
from engine.errors import ConfigError, KernelError, OutOfMemory
from engine.formats import dequantize_q4
from engine.profiler import OperationCost
from engine.state import SequenceState
from engine.weights import AttentionWeights, DeltaNetWeights, LayerWeights, Matrix, MoeWeights, Weights

# In the order of the FM_OP constants (model_api.h).
_OPERATIONS = (
    "embedding",
    "norms",
    "delta net in",
    "delta rule",
    "delta net out",
    "attention in",
    "attention",
    "attention out",
    "router",
    "experts in",
    "experts out",
    "head",
)


def supported_tiers() -> tuple[str, ...]:
    """Instruction set tiers that this processor and build can run, lowest first."""
    return tuple(tier for tier in SIMD_TIERS if lib.fm_tier_supported(tier.encode()))


def resolve_tier(name: str) -> str:
    """The tier to use for a setting: the highest one for "auto". ConfigError if it cannot run here."""
    supported = supported_tiers()
    if name == "auto":
        return supported[-1]
    if name not in supported:
        raise ConfigError(f"simd_tier {name!r} cannot run on this processor; supported: {', '.join(supported)}")
    return name


def build_digest() -> bytes:
    """Digest of the compiled kernels: results of two builds may differ in their bits."""
    return hashlib.blake2b(Path(_simd.__file__).read_bytes(), digest_size=16).digest()


class CpuEngine:
    """The C engine over one set of weights: runs passes over sequence states, one call at a time.

    tier: the instruction set in use. scratch_bytes: memory held beside weights and states. max_tokens: of one pass.
    """

    def __init__(
        self, weights: Weights, config: EngineConfig, *, threads: int, cpus: Sequence[int] | None, max_context: int
    ) -> None:
        """cpus: logical processors to pin the threads to, the calling thread first; None: not pinned.

        Raises ConfigError for a tier that cannot run here, OutOfMemory, KernelError if threads cannot start."""
        model = weights.config
        self._kept: list[Any] = [weights]
        self.tier = resolve_tier(config.simd_tier)
        self.threads = threads
        self.vocab = model.vocab_size
        self.max_tokens = config.pass_tokens
        self._hidden = model.hidden_size
        self.kv_f32 = config.compute == "f32"
        self._unpack = config.compute == "f32"
        spec = ffi.new("fm_model_spec *")
        spec.hidden, spec.layers, spec.vocab = model.hidden_size, model.num_hidden_layers, model.vocab_size
        spec.heads, spec.kv_heads, spec.head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        spec.rotary_pairs = model.rotary_dim // 2
        spec.key_heads, spec.value_heads = model.linear_num_key_heads, model.linear_num_value_heads
        spec.key_dim, spec.value_dim = model.linear_key_head_dim, model.linear_value_head_dim
        spec.experts, spec.experts_per_token = model.num_experts, model.num_experts_per_tok
        spec.expert_hidden, spec.shared_hidden = model.moe_intermediate_size, model.shared_expert_intermediate_size
        spec.eps, spec.kv_f32 = model.rms_norm_eps, self.kv_f32
        spec.max_tokens, spec.max_context = config.pass_tokens, max_context
        spec.inverse_frequency = self._floats(inverse_frequency(model.rotary_dim, model.rope_theta))
        spec.rotary_axis = self._keep(ffi.new("int[]", rotary_axes(model.mrope_section)))
        self._fill(spec.embed, weights.embed)
        self._fill(spec.head, weights.head)
        spec.final_norm = self._floats(weights.final_norm)
        layers = self._keep(ffi.new("fm_layer[]", model.num_hidden_layers))
        counts = dict.fromkeys(LayerType, 0)
        for i, (kind, layer) in enumerate(zip(model.layer_types, weights.layers, strict=True)):
            layers[i].kind = lib.FM_ATTENTION if kind is LayerType.FULL_ATTENTION else lib.FM_DELTA_NET
            layers[i].kind_index = counts[kind]
            counts[kind] += 1
            self._fill_layer(layers[i], layer)
        spec.layer = layers
        self._kept.append(spec)
        self._affinity = os.sched_getaffinity(0)
        pinned = ffi.NULL if cpus is None else ffi.new("int[]", list(cpus))
        self._engine = lib.fm_engine_create(spec, self.tier.encode(), threads, pinned)
        if self._engine == ffi.NULL:
            raise OutOfMemory(f"the engine could not allocate its scratch memory or start {threads} threads")
        self.scratch_bytes: int = lib.fm_engine_scratch_bytes(self._engine)
        self._tokens = 0
        self._costs: Any = None
        self._current = ffi.new("fm_sequence *")

    def close(self) -> None:
        """Free scratch memory and threads; lets the calling thread run anywhere again. Idempotent."""
        if self._engine != ffi.NULL:
            lib.fm_engine_destroy(self._engine)
            self._engine = ffi.NULL
            with contextlib.suppress(OSError):  # the processors may have been taken away meanwhile
                os.sched_setaffinity(0, self._affinity)

    def begin(self, ids: Int32Array, positions: Int32Array) -> None:
        """Start a pass. ids: int32 [T]; positions: int32 [T, 3] rotary positions (time, height, width)."""
        self._tokens = len(ids)
        lib.fm_pass_begin(self._live(), ffi.from_buffer("int[]", ids), ffi.from_buffer("int[]", positions), len(ids))

    @property
    def hidden(self) -> Float32Array:
        """Residual stream of the pass, float32 [T, hidden], writable between `begin` and the first layer."""
        pointer = lib.fm_pass_hidden(self._live())
        buffer = ffi.buffer(pointer, self._tokens * self._hidden * 4)
        return np.frombuffer(buffer, np.float32).reshape(self._tokens, self._hidden)

    @property
    def hidden_buffer(self) -> Float32Array:
        """Where `hidden` lies in every pass: float32 [max_tokens, hidden], for as long as the engine lives."""
        buffer = ffi.buffer(lib.fm_pass_hidden(self._live()), self.max_tokens * self._hidden * 4)
        return np.frombuffer(buffer, np.float32).reshape(self.max_tokens, self._hidden)

    def layers(self, state: SequenceState, first: int, last: int, *, recurrent: bool, every_row: bool = True) -> None:
        """Run layers first..last-1 of the pass; see fm_pass_layers."""
        lib.fm_pass_layers(self._live(), self._sequence(state, self._tokens), first, last, recurrent, every_row)

    def logits(self, row: int) -> Float32Array:
        """float32 [vocab] at token `row` of the pass, whose layers have all run."""
        out = np.empty(self.vocab, np.float32)
        lib.fm_pass_logits(self._live(), row, ffi.from_buffer("float[]", out))
        return out

    def decode(self, state: SequenceState, token_id: int, position: int) -> Float32Array:
        """One whole step: float32 [vocab] logits after `token_id` at rotary position `position`; moves the state."""
        out = np.empty(self.vocab, np.float32)
        sequence = self._sequence(state, 1)
        where = ffi.new("int[]", [position] * 3)
        lib.fm_decode(self._live(), sequence, token_id, where, ffi.from_buffer("float[]", out))
        state.position += 1
        return out

    def sample(
        self, logits: Float32Array, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
    ) -> int:
        """Draw an id; see fm_sample."""
        buffer = ffi.from_buffer("float[]", logits)
        token: int = lib.fm_sample(self._live(), buffer, len(logits), temperature, top_k, top_p, min_p, uniform)
        return token

    def start_profile(self) -> None:
        """Count what operations cost, from nothing."""
        self._costs = ffi.new("fm_op_cost[]", lib.FM_OPS)
        lib.fm_engine_profile(self._live(), self._costs)

    def operation_costs(self) -> tuple[OperationCost, ...]:
        """What operations cost since `start_profile`, in the order of a layer. Empty before."""
        return (
            tuple(
                OperationCost(name, cost.calls, cost.seconds, cost.bytes)
                for name, cost in zip(_OPERATIONS, self._costs, strict=True)
            )
            if self._costs
            else ()
        )

    @property
    def handle(self) -> Any:
        """The fm_engine in C, for calls that are not part of running the model (calibration looks inside)."""
        return self._live()

    @property
    def pool(self) -> Any:
        """The engine's threads (fm_pool in C), for work between its calls. Gone when it is closed."""
        return lib.fm_engine_pool(self._live())

    def copy(self, pieces: Sequence[tuple[UInt8Array, UInt8Array]]) -> None:
        """Copy between arrays with all threads, between passes: (target, source) of equal size each, uint8 [n]."""
        to = ffi.new("void *[]", [ffi.from_buffer(target, require_writable=True) for target, _ in pieces])
        out_of = ffi.new("void *[]", [ffi.from_buffer(source) for _, source in pieces])
        sizes = ffi.new("size_t[]", [target.nbytes for target, _ in pieces])
        lib.fm_snapshot_copy(self.pool, len(pieces), to, ffi.cast("const void **", out_of), sizes)

    def _live(self) -> Any:
        if self._engine == ffi.NULL:
            raise KernelError("the engine is closed")
        return self._engine

    def _sequence(self, state: SequenceState, tokens: int) -> Any:
        """The state as C sees it, with room for `tokens` more. Valid while the caller holds `state`."""
        state.reserve(state.position + tokens)
        sequence = self._current
        sequence.position = state.position
        sequence.conv = ffi.from_buffer("float[]", state.conv)
        sequence.ssm = ffi.from_buffer("float[]", state.ssm)
        sequence.pages = ffi.cast("void **", ffi.from_buffer(state.page_addresses))
        return sequence

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def _floats(self, array: Float32Array) -> Any:
        return self._keep(ffi.from_buffer("float[]", np.ascontiguousarray(array, np.float32)))

    def _fill(self, target: Any, matrix: Matrix) -> None:
        data = dequantize_q4(matrix.data.view(np.uint8)) if matrix.packed and self._unpack else matrix.data
        target.dtype = lib.FM_Q4 if data.dtype == np.uint8 else lib.FM_F32
        target.rows, target.cols = matrix.rows, matrix.cols
        target.data = self._keep(ffi.from_buffer(data))

    def _fill_layer(self, target: Any, layer: LayerWeights) -> None:
        target.input_norm, target.post_norm = self._floats(layer.input_norm), self._floats(layer.post_norm)
        if isinstance(layer.mixer, AttentionWeights):
            self._fill_attention(target, layer.mixer)
        else:
            self._fill_delta_net(target, layer.mixer)
        self._fill_moe(target, layer.moe)

    def _fill_attention(self, target: Any, weights: AttentionWeights) -> None:
        self._fill(target.q_proj, weights.q_proj)
        self._fill(target.k_proj, weights.k_proj)
        self._fill(target.v_proj, weights.v_proj)
        self._fill(target.o_proj, weights.o_proj)
        target.q_norm, target.k_norm = self._floats(weights.q_norm), self._floats(weights.k_norm)

    def _fill_delta_net(self, target: Any, weights: DeltaNetWeights) -> None:
        self._fill(target.in_proj_qkv, weights.in_proj_qkv)
        self._fill(target.in_proj_z, weights.in_proj_z)
        self._fill(target.in_proj_b, weights.in_proj_b)
        self._fill(target.in_proj_a, weights.in_proj_a)
        self._fill(target.out_proj, weights.out_proj)
        target.conv, target.gated_norm = self._floats(weights.conv), self._floats(weights.norm)
        target.minus_a, target.dt_bias = self._floats(weights.minus_a), self._floats(weights.dt_bias)

    def _fill_moe(self, target: Any, weights: MoeWeights) -> None:
        self._fill(target.router, weights.router)
        self._fill(target.shared_expert_gate, weights.shared_expert_gate)
        self._fill(target.experts_gate_up, weights.experts_gate_up)
        self._fill(target.experts_down, weights.experts_down)
        self._fill(target.shared_gate, weights.shared_gate)
        self._fill(target.shared_up, weights.shared_up)
        self._fill(target.shared_down, weights.shared_down)


def inverse_frequency(rotary_dim: int, theta: float) -> Float32Array:
    """theta^(-2j / rotary_dim), float32 [rotary_dim / 2], rounded step by step as the official implementation does."""
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequency: Float32Array = np.float32(1.0) / np.power(np.float32(theta), exponent)
    return frequency


def rotary_axes(sections: tuple[int, int, int]) -> list[int]:
    """Which position (0 time, 1 height, 2 width) turns each frequency: the axes take turns until height and width
    have had their sections; time has the rest."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for j in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[j] = axis
    return axes
