"""A model run over whole samples, for measuring: logits at every position, or layer by layer with a look inside.

Uses the engine's own passes; a sample is one pass, so that each layer's scratch memory holds all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engine._simd import ffi, lib
from engine.config import EngineConfig, LayerType, ModelConfig
from engine.convert.corpus import Sample
from engine.core import Float32Array, Int32Array, Prompt
from engine.formats import dequantize_q4
from engine.model import Model, text_positions
from engine.placement import choose_threads
from engine.vision import VisionTower, check_pictures, rotary_positions
from engine.weights import MtpWeights, Weights, load_weights, mtp_weights

LONGEST = 2048  # tokens of a sample
Compute = Literal["w4a8", "f32"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What one layer computed on one sample of T tokens; slots are visits of tokens to experts, sorted by expert.

    mixer_input [T, hidden], mixer_output [T, width]: inputs of the mixer's first and last projections. moe_input
    [T, hidden]; shared_hidden [T, shared]; slot_expert, slot_token, slot_weight [slots]; expert_hidden [slots, inner];
    expert_norm [slots]: length of the expert's output before its gate weight. All but mixer_input live until the
    next layer runs.
    """

    mixer_input: Float32Array
    mixer_output: Float32Array
    moe_input: Float32Array
    shared_hidden: Float32Array
    slot_expert: Int32Array
    slot_token: Int32Array
    slot_weight: Float32Array
    expert_hidden: Float32Array
    expert_norm: Float32Array


class Forward:
    """A loaded checkpoint. Call `close` when done."""

    def __init__(self, checkpoint: Path | Weights, threads: int | None, compute: Compute = "w4a8") -> None:
        """checkpoint: a directory, or what has been loaded from one. compute "f32": packed weights are unpacked and
        activations stay float, which shows what the weights alone lose; "w4a8": as served. Published checkpoints run
        in float32 either way. Raises ModelFileError, ConfigError."""
        self._engine = EngineConfig(threads=threads, pass_tokens=LONGEST, compute=compute)
        if isinstance(checkpoint, Path):
            checkpoint = load_weights(checkpoint, ModelConfig.load(checkpoint))
        self._weights = checkpoint
        self.config = checkpoint.config
        self._model = Model(
            checkpoint, self._engine, threads=choose_threads(threads)[0], cpus=None, max_context=LONGEST
        )
        cpu = self._model.cpu
        self._tower = VisionTower(checkpoint.vision, cpu.tier, cpu.pool) if checkpoint.vision is not None else None

    def mtp(self) -> MtpForward | None:
        """The checkpoint's layer for multi-token prediction, to be closed by the caller; None if it has none."""
        mtp = mtp_weights(self._weights)
        return MtpForward(self._weights, mtp, self._engine.threads, self._engine.compute) if mtp else None

    def close(self) -> None:
        """Frees the engine."""
        if self._tower is not None:
            self._tower.close()
        self._model.close()

    def logits(self, sample: Sample) -> Iterator[Float32Array]:
        """Logits [vocab] at the position before each label."""
        self._run(sample)
        for row in range(sample.first_label - 1, len(sample.token_ids) - 1):
            yield self.head(row)

    def final(self, sample: Sample) -> Float32Array:
        """What the head reads of the whole sample, [T, hidden]."""
        self._run(sample)
        return self.head_input(self._model.cpu.hidden)

    def embed(self, sample: Sample) -> Float32Array:
        """The residual stream before the first layer, [T, hidden]."""
        self._begin(sample)
        self._show(sample)
        return self._model.cpu.hidden.copy()

    def layer(self, sample: Sample, index: int, hidden: Float32Array) -> tuple[Float32Array, Observation]:
        """Runs one layer on the residual stream [T, hidden]: the stream behind it, and what was seen."""
        cpu = self._model.cpu
        self._begin(sample)
        cpu.hidden[:] = hidden
        cpu.layers(self._model.new_state(), index, index + 1, recurrent=False)
        mixer_input = rms_norm(hidden, self._weights.layers[index].input_norm, self.config.rms_norm_eps)
        return cpu.hidden.copy(), self._observe(index, mixer_input)

    def head(self, row: int) -> Float32Array:
        """Logits [vocab] at one token of the sample whose last layer has just run."""
        return self._model.cpu.logits(row)

    def head_input(self, hidden: Float32Array) -> Float32Array:
        """What the head reads, [T, hidden], from the residual stream behind the last layer."""
        return rms_norm(hidden, self._weights.final_norm, self.config.rms_norm_eps)

    def _run(self, sample: Sample) -> None:
        self._begin(sample)
        self._show(sample)
        self._model.cpu.layers(self._model.new_state(), 0, self.config.num_hidden_layers, recurrent=False)

    def _begin(self, sample: Sample) -> None:
        ids, vision = sample.token_ids, self.config.vision
        positions = text_positions(0, len(ids))
        if sample.images and vision is not None:
            positions = rotary_positions(len(ids), sample.images, vision)
        self._model.cpu.begin(ids, positions)

    def _show(self, sample: Sample) -> None:
        """What the tower makes of the pictures, in place of their tokens."""
        if not sample.images:
            return
        check_pictures(Prompt(sample.token_ids, images=sample.images), self.config)
        assert self._tower is not None
        for image in sample.images:
            self._model.cpu.hidden[image.start : image.start + image.count] = self._tower.encode(image.pixels)

    def _observe(self, index: int, mixer_input: Float32Array) -> Observation:
        seen = ffi.new("fm_observation *")
        lib.fm_observe(self._model.cpu.handle, seen)
        expert, norm = np.empty(seen.slots, np.int32), np.empty(seen.slots, np.float32)
        lib.fm_observe_experts(
            self._model.cpu.handle, index, ffi.from_buffer("int[]", expert), ffi.from_buffer("float[]", norm)
        )
        config = self.config
        return Observation(
            mixer_input=mixer_input,
            mixer_output=_view(seen.mixed, seen.tokens, seen.mixed_cols),
            moe_input=_view(seen.normed, seen.tokens, config.hidden_size),
            shared_hidden=_view(seen.shared_inner, seen.tokens, config.shared_expert_intermediate_size),
            slot_expert=expert,
            slot_token=np.frombuffer(ffi.buffer(seen.slot_token, seen.slots * 4), np.int32),
            slot_weight=np.frombuffer(ffi.buffer(seen.slot_weight, seen.slots * 4), np.float32),
            expert_hidden=_view(seen.expert_inner, seen.slots, config.moe_intermediate_size),
            expert_norm=norm,
        )


class MtpForward:
    """The layer for multi-token prediction over whole samples: from the trunk's final hidden state at t and the token
    at t + 1, what comes at t + 2. A sample of T tokens has T - 1 positions here.

    x_t = fc([norm_e(E[token_{t+1}]); norm_h(h_t)]), h_t behind the trunk's final norm; then one full-attention layer
    with experts of its own, a norm, and the trunk's head. (DeepSeek-V3 technical report, 2.2, with the halves as
    vLLM's `qwen3_next_mtp` has them.)
    """

    def __init__(self, trunk: Weights, mtp: MtpWeights, threads: int | None, compute: Compute) -> None:
        """trunk: lends embedding and head."""
        config = replace(trunk.config, layer_types=(LayerType.FULL_ATTENTION,), num_experts=mtp.experts)
        alone = replace(trunk, config=config, layers=(mtp.layer,), final_norm=mtp.final_norm)
        self._forward = Forward(alone, threads, compute)
        self._weights = mtp
        self._fc = _dense(mtp)
        self.config = config

    def close(self) -> None:
        """Frees the engine."""
        self._forward.close()

    def fc_input(self, sample: Sample, final: Float32Array) -> Float32Array:
        """What fc reads, [T - 1, 2 hidden]. final: [T, hidden], the trunk's state behind its final norm."""
        embedding, eps = self._forward.embed(_following(sample)), self.config.rms_norm_eps
        halves = (
            rms_norm(embedding, self._weights.norm_embedding, eps),
            rms_norm(final[:-1], self._weights.norm_hidden, eps),
        )
        return np.concatenate(halves, axis=1)

    def layer(self, sample: Sample, fc_input: Float32Array) -> tuple[Float32Array, Observation]:
        """The residual stream behind the layer, [T - 1, hidden], and what was seen in it."""
        return self._forward.layer(_following(sample), 0, fc_input @ self._fc.T)

    def logits(self, sample: Sample, final: Float32Array) -> Iterator[Float32Array]:
        """Logits [vocab] for each label that has two tokens before it, from the position two before."""
        self.layer(sample, self.fc_input(sample, final))
        for label in range(max(sample.first_label, 2), len(sample.token_ids)):
            yield self._forward.head(label - 2)


def _following(sample: Sample) -> Sample:
    """The tokens that are t + 1 for some t, rotated by their own positions: what counts is how far apart they are."""
    images = tuple(replace(image, start=image.start - 1) for image in sample.images)
    return replace(sample, token_ids=sample.token_ids[1:], first_label=max(1, sample.first_label - 1), images=images)


def _dense(mtp: MtpWeights) -> Float32Array:
    data = mtp.fc.data
    dense: Float32Array = dequantize_q4(data.view(np.uint8)) if mtp.fc.packed else data.view(np.float32)
    return dense.reshape(mtp.fc.rows, mtp.fc.cols)


def rms_norm(x: Float32Array, gain: Float32Array, eps: float) -> Float32Array:
    """x (mean x^2 + eps)^-1/2 gain over the last dimension."""
    scale = 1 / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + eps)
    normed: Float32Array = (x * scale * gain).astype(np.float32)
    return normed


def _view(pointer: Any, rows: int, cols: int) -> Float32Array:
    values: Float32Array = np.frombuffer(ffi.buffer(pointer, rows * cols * 4), np.float32)
    return values.reshape(rows, cols)
