"""What a calibration run learnt: how much each input column matters, and how much each expert does.

A calibration file is a safetensors file of float32 tensors. For every MoE block, by its prefix (`...layers.3.mlp.`):
    PREFIX saliency     [experts]  mean over routed tokens of gate weight x norm of the expert's output; never hit: 0
    PREFIX tokens       [experts]  how many tokens were routed to each
For every point where a group of matrices takes its input (`POINTS`):
    LAYER POINT .square        [cols] or [experts, cols]              sum of x^2
    LAYER POINT .correlation   [cols, cols] or [experts, cols, cols]  sum of x x^T, only if it was asked for
The layer for multi-token prediction is one more layer (`mtp.layers.0.`); `mtp.fc_input` is what its fc reads.
Inputs of experts are weighted by the square of their gate weight, as their outputs are by the gate weight.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from engine.convert.quantize import Curvature, make_curvature
from engine.convert.safetensors import PADDING_PREFIX, TensorEntry, TensorInfo, build_header, padded_bytes, read_header
from engine.convert.sources import FloatSource, file_identity
from engine.core import Float32Array
from engine.errors import ConfigError, ModelFileError

DAMPING = 0.01  # of the mean diagonal: the usual value for second-order rounding
METADATA = {"format": "fermion-calibration", "format_version": "1"}

# Tensor name within a layer -> the point where its input is seen.
POINTS = {
    "self_attn.q_proj.weight": "mixer_input",
    "self_attn.k_proj.weight": "mixer_input",
    "self_attn.v_proj.weight": "mixer_input",
    "linear_attn.in_proj_qkv.weight": "mixer_input",
    "linear_attn.in_proj_z.weight": "mixer_input",
    "self_attn.o_proj.weight": "mixer_output",
    "linear_attn.out_proj.weight": "mixer_output",
    "mlp.experts.gate_up_proj": "expert_input",
    "mlp.experts.down_proj": "expert_hidden",
    "mlp.shared_expert.gate_proj.weight": "moe_input",
    "mlp.shared_expert.up_proj.weight": "moe_input",
    "mlp.shared_expert.down_proj.weight": "shared_hidden",
}
HEAD_POINT = "final_hidden"
MTP_PREFIX = "mtp.layers.0."
MTP_FC_POINT = "mtp.fc_input"
_POINTS_OF_OTHERS = {"lm_head.weight": HEAD_POINT, "mtp.fc.weight": MTP_FC_POINT}
_LAYER_NAME = re.compile(r"(.*layers\.\d+\.)(.+)")


class Calibration:
    """A calibration file, read as needed: statistics of a large model do not all fit in memory."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError if the file is damaged or something else."""
        self._path = path
        entries = read_header(path)
        self._entries = {name: entry for name, entry in entries.items() if not name.startswith(PADDING_PREFIX)}
        if not any(name.endswith(".square") for name in self._entries):
            raise ModelFileError(f"{path}: holds no input statistics: not a calibration file")
        self.identity = file_identity(path)
        # Neighbouring pieces share their matrix's curvature; two matrices are in work at a time.
        self._curvature = lru_cache(maxsize=4)(self._compute_curvature)

    def scores(self, statistic: str) -> dict[str, Float32Array]:
        """`saliency` or `tokens` of every MoE block: prefix -> [experts]."""
        suffix = f"mlp.{statistic}"
        return {name.removesuffix(statistic): self._read(name) for name in self._entries if name.endswith(suffix)}

    def importance(self, tensor: str, matrix: int) -> Float32Array | None:
        """Mean-square input of each column, [cols], mean 1; None where the input was not observed.

        matrix: the expert's number where the tensor holds several.
        """
        values = self._statistic(tensor, matrix, "square")
        if values is None or not values.any():
            return None
        # A column never seen to be non-zero still matters a little: calibration is a sample.
        mean = float(values.mean())
        return ((values + 0.01 * mean) / (1.01 * mean)).astype(np.float32)

    def curvature(self, tensor: str, matrix: int) -> Curvature | None:
        """From the input correlation, or None where that was not recorded or is zero."""
        return self._curvature(tensor, matrix)

    def _compute_curvature(self, tensor: str, matrix: int) -> Curvature | None:
        correlation = self._statistic(tensor, matrix, "correlation")
        if correlation is None or not correlation.any():
            return None
        return make_curvature(correlation, DAMPING)

    def _statistic(self, tensor: str, matrix: int, kind: str) -> Float32Array | None:
        name = f"{point_of(tensor)}.{kind}"
        if name not in self._entries:  # a correlation for each expert may have been too big to record
            name = name.replace("expert_input", "moe_input")
        entry = self._entries.get(name)
        if entry is None:
            return None
        per_matrix = len(entry.shape) == (2 if kind == "square" else 3)
        return self._read(name, matrix if per_matrix else None)

    def _read(self, name: str, matrix: int | None = None) -> Float32Array:
        entry: TensorEntry = self._entries[name]
        if matrix is None:
            return FloatSource(entry, entry.shape[-1]).read(0, int(np.prod(entry.shape[:-1]))).reshape(entry.shape)
        rows = int(np.prod(entry.shape[1:-1]))
        return FloatSource(entry, entry.shape[-1]).read(matrix * rows, (matrix + 1) * rows).reshape(entry.shape[1:])


def point_of(tensor: str) -> str | None:
    """Full name of the point where a tensor's input is seen; None for tensors without one (embedding)."""
    if tensor in _POINTS_OF_OTHERS:
        return _POINTS_OF_OTHERS[tensor]
    match = _LAYER_NAME.fullmatch(tensor)
    if match is None or match[2] not in POINTS:
        return None
    return match[1] + POINTS[match[2]]


class CalibrationWriter:
    """Writes a calibration file piece by piece; it appears under its name when `commit` is called."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: of every statistic that will be written. Raises ConfigError if the disk cannot hold them."""
        infos = [TensorInfo(name, "F32", shape) for name, shape in shapes.items()]
        header, self._offsets = build_header(infos, METADATA)
        size = len(header) + padded_bytes(infos)
        try:
            free = shutil.disk_usage(path.parent).free
        except OSError as error:
            raise ConfigError(f"calibration file {path}: {error.strerror}") from error
        if size > free:
            raise ConfigError(
                f"calibration file {path}: {size:,} bytes needed, {free:,} free (--no-second-order: less)"
            )
        self._shapes = dict(shapes)
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._file = self._partial.open("wb")
        self._file.write(header)
        self._file.truncate(size)

    def write(self, name: str, values: Float32Array) -> None:
        """One statistic, of the shape announced."""
        assert values.shape == self._shapes[name], (name, values.shape)
        self._file.seek(self._offsets[name])
        self._file.write(np.ascontiguousarray(values, np.float32).data)

    def commit(self) -> None:
        """Makes the file visible."""
        self._file.close()
        self._partial.replace(self._path)

    def discard(self) -> None:
        """Leaves nothing behind, unless it was committed."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


def write_calibration(path: Path, statistics: Mapping[str, Float32Array]) -> None:
    """Writes a calibration file in one go."""
    writer = CalibrationWriter(path, {name: value.shape for name, value in statistics.items()})
    for name, value in statistics.items():
        writer.write(name, value)
    writer.commit()
