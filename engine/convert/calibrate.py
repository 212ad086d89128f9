"""Runs a corpus through a model layer by layer and records what quantisation and pruning need to know.

All samples pass one layer before any passes the next, so the weights are read once, however long the corpus: a model
larger than memory streams from its file. Residual streams wait in a temporary file, statistics of finished layers in
the calibration file: memory holds one sample and the sums of one layer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.config import LayerType, ModelConfig
from engine.convert.calibration import HEAD_POINT, CalibrationWriter
from engine.convert.corpus import Sample
from engine.convert.forward import Forward, Observation
from engine.convert.plan import PREFIX
from engine.core import Float32Array

# An input correlation for every expert is worth its bytes only in small models; above this all experts share one.
EXPERT_CORRELATION_BYTES = 1 << 28

Float64Array = npt.NDArray[np.float64]


def calibrate(
    model: Forward,
    samples: Sequence[Sample],
    path: Path,
    *,
    second_order: bool,
    progress: Callable[[int, int], None],
) -> None:
    """Writes the calibration file `path` from `samples`. second_order: also input correlations, for error feedback.

    progress: (layer passes of a sample done, in all).
    """
    lengths = [len(sample.token_ids) for sample in samples]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    config = model.config
    writer = CalibrationWriter(path, _shapes(config, second_order))
    try:
        with tempfile.TemporaryFile(dir=path.parent, prefix=path.name) as spill:
            hidden = np.memmap(spill, np.float32, "w+", shape=(int(bounds[-1]), config.hidden_size))
            for index, sample in enumerate(samples):
                hidden[bounds[index] : bounds[index + 1]] = model.embed(sample)
            for layer in range(config.num_hidden_layers):
                sums = LayerSums(config, second_order)
                for index, sample in enumerate(samples):
                    rows = hidden[bounds[index] : bounds[index + 1]]
                    rows[:], seen = model.layer(sample, layer, rows)
                    sums.add(seen)
                    progress(layer * len(samples) + index + 1, config.num_hidden_layers * len(samples))
                sums.write(writer, f"{PREFIX}layers.{layer}.")
            _write_head(model, writer, hidden, bounds, second_order)
        writer.commit()
    finally:
        writer.discard()


class LayerSums:
    """Sums over samples of what one layer shows."""

    def __init__(self, config: ModelConfig, second_order: bool) -> None:
        self._experts = config.num_experts
        self._expert_input_correlation = second_order and _fits(config)
        self._second_order = second_order
        self._squares: dict[str, Float64Array] = {}
        self._correlations: dict[str, Float32Array] = {}
        self._saliency = np.zeros(self._experts)
        self._tokens = np.zeros(self._experts)

    def add(self, seen: Observation) -> None:
        """One sample."""
        self._tokens += np.bincount(seen.slot_expert, minlength=self._experts)
        self._saliency += np.bincount(seen.slot_expert, seen.slot_weight * seen.expert_norm, self._experts)
        self._add("mixer_input", seen.mixer_input)
        self._add("mixer_output", seen.mixer_output)
        self._add("moe_input", seen.moe_input)
        self._add("shared_hidden", seen.shared_hidden)
        weight = seen.slot_weight[:, None]
        self._add_by_expert("expert_hidden", seen.expert_hidden * weight, seen, self._second_order)
        expert_input = seen.moe_input[seen.slot_token] * weight
        self._add_by_expert("expert_input", expert_input, seen, self._expert_input_correlation)

    def write(self, writer: CalibrationWriter, prefix: str) -> None:
        """Stores the sums under the layer's name, saliency as the mean over an expert's tokens."""
        mean = np.divide(self._saliency, self._tokens, out=np.zeros(self._experts), where=self._tokens > 0)
        writer.write(f"{prefix}mlp.saliency", mean.astype(np.float32))
        writer.write(f"{prefix}mlp.tokens", self._tokens.astype(np.float32))
        for point, square in self._squares.items():
            writer.write(f"{prefix}{point}.square", square.astype(np.float32))
        for point, correlation in self._correlations.items():
            writer.write(f"{prefix}{point}.correlation", correlation)

    def _add(self, point: str, rows: Float32Array) -> None:
        cols = rows.shape[1]
        self._prepare(point, (), cols, self._second_order)
        self._squares[point] += np.einsum("tc,tc->c", rows, rows, dtype=np.float64)
        if self._second_order:
            self._correlations[point] += rows.T @ rows

    def _add_by_expert(self, point: str, rows: Float32Array, seen: Observation, correlate: bool) -> None:
        """The same for each expert's own rows; slots are sorted by expert."""
        cols = rows.shape[1]
        self._prepare(point, (self._experts,), cols, correlate)
        ends = np.searchsorted(seen.slot_expert, np.arange(self._experts + 1))
        for expert in np.unique(seen.slot_expert):
            own = rows[ends[expert] : ends[expert + 1]]
            self._squares[point][expert] += np.einsum("tc,tc->c", own, own, dtype=np.float64)
            if correlate:
                self._correlations[point][expert] += own.T @ own

    def _prepare(self, point: str, lead: tuple[int, ...], cols: int, correlate: bool) -> None:
        if point not in self._squares:
            self._squares[point] = np.zeros((*lead, cols))
            if correlate:
                self._correlations[point] = np.zeros((*lead, cols, cols), np.float32)


def _fits(config: ModelConfig) -> bool:
    return config.num_experts * config.hidden_size**2 * 4 <= EXPERT_CORRELATION_BYTES


def _shapes(config: ModelConfig, second_order: bool) -> dict[str, tuple[int, ...]]:
    """Every statistic that will be written, by name."""
    experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, kind in enumerate(config.layer_types):
        full = kind is LayerType.FULL_ATTENTION
        mixed = config.num_attention_heads * config.head_dim if full else config.value_width
        widths = {
            "mixer_input": hidden,
            "mixer_output": mixed,
            "moe_input": hidden,
            "shared_hidden": config.shared_expert_intermediate_size,
        }
        prefix = f"{PREFIX}layers.{layer}."
        shapes |= {f"{prefix}mlp.saliency": (experts,), f"{prefix}mlp.tokens": (experts,)}
        shapes |= {f"{prefix}{point}.square": (width,) for point, width in widths.items()}
        shapes |= {f"{prefix}expert_hidden.square": (experts, inner), f"{prefix}expert_input.square": (experts, hidden)}
        if second_order:
            shapes |= {f"{prefix}{point}.correlation": (width, width) for point, width in widths.items()}
            shapes[f"{prefix}expert_hidden.correlation"] = (experts, inner, inner)
            if _fits(config):
                shapes[f"{prefix}expert_input.correlation"] = (experts, hidden, hidden)
    shapes[f"{HEAD_POINT}.square"] = (hidden,)
    if second_order:
        shapes[f"{HEAD_POINT}.correlation"] = (hidden, hidden)
    return shapes


def _write_head(
    model: Forward, writer: CalibrationWriter, hidden: Float32Array, bounds: npt.NDArray[np.int64], second_order: bool
) -> None:
    width = hidden.shape[1]
    square, correlation = np.zeros(width), np.zeros((width, width), np.float32)
    for start, stop in pairwise(bounds):
        rows = model.head_input(hidden[start:stop])
        square += np.einsum("tc,tc->c", rows, rows, dtype=np.float64)
        if second_order:
            correlation += rows.T @ rows
    writer.write(f"{HEAD_POINT}.square", square.astype(np.float32))
    if second_order:
        writer.write(f"{HEAD_POINT}.correlation", correlation)
