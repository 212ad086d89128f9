"""Pictures of a conversion: what each layer loses, how salient experts are, and which were kept."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from engine import charts
from engine.charts import Labels, Series
from engine.convert.corpus import Sample
from engine.convert.forward import Forward
from engine.convert.prune import Selection
from engine.core import Float32Array
from engine.errors import ConfigError

SAMPLES = 16  # whose streams fit in memory at the published width: what `layer_losses` looks at
_LAYER = re.compile(r"layers\.(\d+)\.mlp\.")


@dataclass(frozen=True, slots=True)
class LayerLosses:
    """Error of the residual stream behind each layer, relative to its length, over all tokens. alone: of this layer on
    the reference's own stream; accumulated: of everything up to it."""

    alone: tuple[float, ...]
    accumulated: tuple[float, ...]


def layer_losses(reference: Forward, candidate: Forward, samples: Sequence[Sample]) -> LayerLosses:
    """Runs both models layer by layer over the first SAMPLES samples. Raises ConfigError if their shapes differ."""
    shape = reference.config.num_hidden_layers, reference.config.hidden_size
    if shape != (candidate.config.num_hidden_layers, candidate.config.hidden_size):
        raise ConfigError("losses by layer need two models with the same layers and width")
    samples = samples[:SAMPLES]
    expected = [reference.embed(sample) for sample in samples]
    streams = [candidate.embed(sample) for sample in samples]
    alone, accumulated = [], []
    for layer in range(shape[0]):
        own, whole = _Error(), _Error()
        for index, sample in enumerate(samples):
            lone = candidate.layer(sample, layer, expected[index])[0]
            streams[index] = candidate.layer(sample, layer, streams[index])[0]
            expected[index] = reference.layer(sample, layer, expected[index])[0]
            own.add(lone, expected[index])
            whole.add(streams[index], expected[index])
        alone.append(own.relative)
        accumulated.append(whole.relative)
    return LayerLosses(tuple(alone), tuple(accumulated))


def save_losses(losses: LayerLosses, directory: Path) -> Path:
    """loss-per-layer.png. Raises ConfigError if it cannot be written."""
    series = [
        Series("all layers so far", list(enumerate(losses.accumulated))),
        Series("this layer alone", list(enumerate(losses.alone))),
    ]
    labels = Labels("What each layer loses", "layer", "error of the stream, relative")
    return _save(charts.lines(labels, series), directory / "loss-per-layer.png")


def save_saliency(scores: Mapping[str, Float32Array], directory: Path) -> Path:
    """saliency.png: all experts of all blocks. scores: block prefix -> [experts]."""
    values = [score / score.mean() for score in scores.values() if score.any()]
    labels = Labels("Saliency of experts", "REAP saliency, relative to the layer's mean", "experts")
    return _save(charts.histogram(labels, np.concatenate(values) if values else []), directory / "saliency.png")


def save_kept(selection: Selection, directory: Path) -> Path:
    """kept-experts.png: a row of cells for each block; the layer for multi-token prediction on top."""
    blocks = sorted(selection.blocks, key=_order)
    cells = np.zeros((len(blocks), max(selection.experts.values())), np.bool_)
    for row, prefix in enumerate(blocks):
        cells[row, list(selection.blocks[prefix])] = True
    last = ", the last for multi-token prediction" if any(prefix.startswith("mtp.") for prefix in blocks) else ""
    labels = Labels(f"Kept experts: {selection.kept} of each layer", "expert", f"layer{last}")
    return _save(charts.grid(labels, cells), directory / "kept-experts.png")


class _Error:
    """Squared error and squared length, summed."""

    def __init__(self) -> None:
        self._error = self._length = 0.0

    def add(self, got: Float32Array, expected: Float32Array) -> None:
        self._error += float(np.square(got - expected, dtype=np.float64).sum())
        self._length += float(np.square(expected, dtype=np.float64).sum())

    @property
    def relative(self) -> float:
        return math.sqrt(self._error / self._length) if self._length else 0.0


def _order(prefix: str) -> tuple[bool, int]:
    match = _LAYER.search(prefix)
    return prefix.startswith("mtp."), int(match[1]) if match else 0


def _save(chart: Image.Image, path: Path) -> Path:
    charts.save(chart, path)
    return path
