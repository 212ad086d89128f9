"""A fermion checkpoint as a source: packed tensors pass through block by block, so pruning one never requantises."""

from __future__ import annotations

from pathlib import Path

from engine.convert.plan import Format, Segment, row_view
from engine.convert.safetensors import TensorEntry
from engine.convert.sources import FloatSource, PackedSource, RowSource
from engine.errors import ModelFileError
from engine.formats import BLOCK_BYTES, BLOCK_COLS, BLOCK_ROWS


class PackedCheckpoint:
    """Answers for the tensors of a converted checkpoint; see `plan.TensorProvider`."""

    def __init__(self, directory: Path, entries: dict[str, TensorEntry]) -> None:
        """`entries`: stored name -> place, as `safetensors.read_checkpoint` returns them."""
        self.path = directory
        self._entries = entries
        self._taken: set[str] = set()

    def stored_format(self, name: str, shape: tuple[int, ...]) -> Format:
        """The form a tensor has now, which is the form it keeps. `shape` is what a plan passes; unused here."""
        dtype = self._entries[name].dtype
        return Format.Q4 if dtype == "U8" else Format(dtype)

    def weight(self, name: str, shape: tuple[int, ...]) -> tuple[Segment, ...]:
        """All rows of one tensor."""
        source = self._take(name, shape)
        return (Segment(source, 0, source.rows),)

    def experts(self, prefix: str, count: int, hidden: int, width: int) -> tuple[tuple[Segment, ...], ...]:
        """(gate_up, down) rows; always fused here."""
        gate_up = self.weight(f"{prefix}experts.gate_up_proj", (count, 2 * width, hidden))
        return gate_up, self.weight(f"{prefix}experts.down_proj", (count, hidden, width))

    def expert_count(self, prefix: str) -> int:
        """From the tensors themselves."""
        return self._entry(f"{prefix}experts.gate_up_proj").shape[0]

    def has(self, prefix: str) -> bool:
        """Whether any tensor's name starts with `prefix`."""
        return any(name.startswith(prefix) for name in self._entries)

    def unused(self) -> list[str]:
        """Tensors that no part of the architecture asked for."""
        return sorted(self._entries.keys() - self._taken)

    def kept_experts(self, prefix: str) -> tuple[int, ...]:
        """Nothing is pruned here."""
        return ()

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing")
        return entry

    def _take(self, name: str, shape: tuple[int, ...]) -> RowSource | PackedSource:
        entry = self._entry(name)
        expected = shape
        if entry.dtype == "U8":
            expected = (*shape[:-2], shape[-2] // BLOCK_ROWS, shape[-1] // BLOCK_COLS, BLOCK_BYTES)
        if entry.shape != expected:
            raise ModelFileError(f"{entry.path}: tensor {name!r}: expected shape {expected}, got {entry.shape}")
        self._taken.add(name)
        return PackedSource(entry) if entry.dtype == "U8" else FloatSource(entry, row_view(shape)[1])
