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
from typing import IO

import numpy as np
import numpy.typing as npt

from engine.config import LayerType, ModelConfig
from engine.convert.calibration import HEAD_POINT, MTP_FC_POINT, MTP_PREFIX, CalibrationWriter
from engine.convert.corpus import Sample
from engine.convert.forward import Forward, MtpForward, Observation
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
    mtp = model.mtp()
    writer = CalibrationWriter(path, _shapes(model.config, mtp, second_order))
    try:
        with tempfile.TemporaryFile(dir=path.parent, prefix=path.name) as spill:
            _run(model, mtp, samples, writer, spill, second_order, progress)
        writer.commit()
    finally:
        writer.discard()
        if mtp is not None:
            mtp.close()


def _run(
    model: Forward,
    mtp: MtpForward | None,
    samples: Sequence[Sample],
    writer: CalibrationWriter,
    spill: IO[bytes],
    second_order: bool,
    progress: Callable[[int, int], None],
) -> None:
    bounds = np.concatenate([[0], np.cumsum([len(sample.token_ids) for sample in samples])])
    config = model.config
    hidden = np.memmap(spill, np.float32, "w+", shape=(int(bounds[-1]), config.hidden_size))
    spans = [slice(int(start), int(stop)) for start, stop in pairwise(bounds)]
    for sample, span in zip(samples, spans, strict=True):
        hidden[span] = model.embed(sample)
    total = (config.num_hidden_layers + (mtp is not None)) * len(samples)
    for layer in range(config.num_hidden_layers):
        sums = LayerSums(config, second_order)
        for index, (sample, span) in enumerate(zip(samples, spans, strict=True)):
            hidden[span], seen = model.layer(sample, layer, hidden[span])
            sums.add(seen)
            progress(layer * len(samples) + index + 1, total)
        sums.write(writer, f"{PREFIX}layers.{layer}.")
    head = PointSums(config.hidden_size, second_order)
    for span in spans:
        hidden[span] = model.head_input(hidden[span])
        head.add(hidden[span])
    head.write(writer, HEAD_POINT)
    if mtp is not None:
        fc, sums = PointSums(2 * config.hidden_size, second_order), LayerSums(mtp.config, second_order)
        for index, (sample, span) in enumerate(zip(samples, spans, strict=True)):
            fc_input = mtp.fc_input(sample, hidden[span])
            fc.add(fc_input)
            sums.add(mtp.layer(sample, fc_input)[1])
            progress(total - len(samples) + index + 1, total)
        fc.write(writer, MTP_FC_POINT)
        sums.write(writer, MTP_PREFIX)


class PointSums:
    """Sums over the input rows of one matrix: of squares and, if asked for, of products."""

    def __init__(self, cols: int, second_order: bool) -> None:
        self._square = np.zeros(cols)
        self._correlation = np.zeros((cols, cols), np.float32) if second_order else None

    def add(self, rows: Float32Array) -> None:
        """[T, cols]."""
        self._square += np.einsum("tc,tc->c", rows, rows, dtype=np.float64)
        if self._correlation is not None:
            self._correlation += rows.T @ rows

    def write(self, writer: CalibrationWriter, point: str) -> None:
        """Stores the sums under the point's name."""
        writer.write(f"{point}.square", self._square.astype(np.float32))
        if self._correlation is not None:
            writer.write(f"{point}.correlation", self._correlation)


class LayerSums:
    """Sums over samples of what one layer shows."""

    def __init__(self, config: ModelConfig, second_order: bool) -> None:
        self._experts = config.num_experts
        self._expert_input_correlation = second_order and _fits(config)
        self._second_order = second_order
        self._points: dict[str, PointSums] = {}
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
        for point, sums in self._points.items():
            sums.write(writer, prefix + point)
        for point, square in self._squares.items():
            writer.write(f"{prefix}{point}.square", square.astype(np.float32))
        for point, correlation in self._correlations.items():
            writer.write(f"{prefix}{point}.correlation", correlation)

    def _add(self, point: str, rows: Float32Array) -> None:
        if point not in self._points:
            self._points[point] = PointSums(rows.shape[1], self._second_order)
        self._points[point].add(rows)

    def _add_by_expert(self, point: str, rows: Float32Array, seen: Observation, correlate: bool) -> None:
        """The same for each expert's own rows; slots are sorted by expert."""
        if point not in self._squares:
            cols = rows.shape[1]
            self._squares[point] = np.zeros((self._experts, cols))
            if correlate:
                self._correlations[point] = np.zeros((self._experts, cols, cols), np.float32)
        ends = np.searchsorted(seen.slot_expert, np.arange(self._experts + 1))
        for expert in np.unique(seen.slot_expert):
            own = rows[ends[expert] : ends[expert + 1]]
            self._squares[point][expert] += np.einsum("tc,tc->c", own, own, dtype=np.float64)
            if correlate:
                self._correlations[point][expert] += own.T @ own


def _fits(config: ModelConfig) -> bool:
    return config.num_experts * config.hidden_size**2 * 4 <= EXPERT_CORRELATION_BYTES


def _shapes(config: ModelConfig, mtp: MtpForward | None, second_order: bool) -> dict[str, tuple[int, ...]]:
    """Every statistic that will be written, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, kind in enumerate(config.layer_types):
        shapes |= _layer_shapes(f"{PREFIX}layers.{layer}.", kind, config, second_order)
    shapes |= _point_shapes(HEAD_POINT, config.hidden_size, second_order)
    if mtp is not None:
        shapes |= _point_shapes(MTP_FC_POINT, 2 * config.hidden_size, second_order)
        shapes |= _layer_shapes(MTP_PREFIX, LayerType.FULL_ATTENTION, mtp.config, second_order)
    return shapes


def _layer_shapes(prefix: str, kind: LayerType, config: ModelConfig, second_order: bool) -> dict[str, tuple[int, ...]]:
    experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    full = kind is LayerType.FULL_ATTENTION
    mixed = config.num_attention_heads * config.head_dim if full else config.value_width
    widths = {
        "mixer_input": hidden,
        "mixer_output": mixed,
        "moe_input": hidden,
        "shared_hidden": config.shared_expert_intermediate_size,
    }
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}mlp.saliency": (experts,), f"{prefix}mlp.tokens": (experts,)}
    for point, width in widths.items():
        shapes |= _point_shapes(prefix + point, width, second_order)
    shapes |= {f"{prefix}expert_hidden.square": (experts, inner), f"{prefix}expert_input.square": (experts, hidden)}
    if second_order:
        shapes[f"{prefix}expert_hidden.correlation"] = (experts, inner, inner)
        if _fits(config):
            shapes[f"{prefix}expert_input.correlation"] = (experts, hidden, hidden)
    return shapes


def _point_shapes(point: str, cols: int, second_order: bool) -> dict[str, tuple[int, ...]]:
    square: dict[str, tuple[int, ...]] = {f"{point}.square": (cols,)}
    return square | ({f"{point}.correlation": (cols, cols)} if second_order else {})
