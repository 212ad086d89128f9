"""The published safetensors layout: text prefix, fused or per-expert storage, block-FP8 matrices."""

from __future__ import annotations

import re
from pathlib import Path

from engine.convert.plan import PREFIX, Segment, row_view
from engine.convert.safetensors import TensorEntry
from engine.convert.sources import BlockFp8Source, FloatSource, RowSource
from engine.errors import ModelFileError

FP8_SCALE_SUFFIX = "_scale_inv"
_EXPERT = re.compile(r"(.*\.mlp\.)experts\.(\d+)\.(?:gate|up|down)_proj\.weight")


class HfCheckpoint:
    """Answers for the tensors of a checkpoint directory; see `plan.TensorProvider`."""

    def __init__(self, directory: Path, entries: dict[str, TensorEntry]) -> None:
        """`entries`: stored name -> place, as `safetensors.read_checkpoint` returns them."""
        self.path = directory
        self._entries = entries
        self._taken: set[str] = set()
        multimodal = any(name.startswith(PREFIX) for name in entries)
        self._text_prefix = PREFIX if multimodal else "model."
        self._per_expert: dict[str, set[int]] = {}
        for name in entries:
            match = _EXPERT.fullmatch(name)
            if match:
                self._per_expert.setdefault(match[1], set()).add(int(match[2]))

    def weight(self, name: str, shape: tuple[int, ...]) -> tuple[Segment, ...]:
        """All rows of one tensor."""
        source = self._take(self._stored(name), shape)
        return (Segment(source, 0, source.rows),)

    def experts(self, prefix: str, count: int, hidden: int, width: int) -> tuple[tuple[Segment, ...], ...]:
        """(gate_up, down) rows: from the fused tensors, or gathered expert by expert."""
        stored = self._stored(prefix)
        if stored not in self._per_expert:
            gate_up = self._take(f"{stored}experts.gate_up_proj", (count, 2 * width, hidden))
            down = self._take(f"{stored}experts.down_proj", (count, hidden, width))
            return (Segment(gate_up, 0, gate_up.rows),), (Segment(down, 0, down.rows),)
        gate_up_rows: list[Segment] = []
        down_rows: list[Segment] = []
        for expert in range(count):
            base = f"{stored}experts.{expert}."
            halves = (self._take(f"{base}{part}.weight", (width, hidden)) for part in ("gate_proj", "up_proj"))
            gate_up_rows += [Segment(half, 0, width) for half in halves]
            down_rows.append(Segment(self._take(f"{base}down_proj.weight", (hidden, width)), 0, hidden))
        return tuple(gate_up_rows), tuple(down_rows)

    def expert_count(self, prefix: str) -> int:
        """From the tensors themselves: pruned checkpoints have been seen with stale configs."""
        stored = self._stored(prefix)
        numbers = self._per_expert.get(stored)
        if numbers is not None:
            return max(numbers) + 1
        fused = f"{stored}experts.gate_up_proj"
        if fused not in self._entries:
            raise ModelFileError(f"{self.path}: tensor {fused!r} is missing, and so are per-expert tensors")
        shape = self._entries[fused].shape
        return shape[0] if shape else 0

    def has(self, prefix: str) -> bool:
        """Whether any stored tensor begins with the published `prefix`."""
        return any(name.startswith(self._stored(prefix)) for name in self._entries)

    def unused(self) -> list[str]:
        """Tensors that no part of the architecture asked for."""
        return sorted(self._entries.keys() - self._taken)

    def kept_experts(self, prefix: str) -> tuple[int, ...]:
        """Nothing is pruned here."""
        return ()

    def _stored(self, name: str) -> str:
        return self._text_prefix + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name

    def _take(self, name: str, shape: tuple[int, ...]) -> RowSource:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing")
        if entry.shape != shape:
            raise ModelFileError(f"{entry.path}: tensor {name!r}: expected shape {shape}, got {entry.shape}")
        self._taken.add(name)
        if entry.dtype != "F8_E4M3":
            return FloatSource(entry, row_view(shape)[1])
        scales = self._entries.get(name + FP8_SCALE_SUFFIX)
        if scales is None:
            raise ModelFileError(f"{entry.path}: tensor {name!r} is F8_E4M3 but {name + FP8_SCALE_SUFFIX!r} is missing")
        self._taken.add(scales.name)
        return BlockFp8Source(entry, scales)
