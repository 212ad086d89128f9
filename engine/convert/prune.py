"""Which experts stay (REAP, arXiv 2510.13999), and a checkpoint seen through that choice.

Saliency of an expert is the mean, over the calibration tokens routed to it, of its renormalised gate weight times
the norm of its output. The least salient go, the same number in every layer; survivors keep their order, router
rows follow, top-k and renormalisation stay as they are, and the shared expert is not touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.convert.plan import Segment, TensorProvider, select_rows
from engine.convert.source_config import load_json
from engine.errors import ConfigError, ModelFileError

SELECTION_FORMAT = "fermion-experts-1"


@dataclass(frozen=True, slots=True)
class Selection:
    """Kept experts, ascending, for each MoE block by its prefix (`...layers.3.mlp.`); blocks not named stay whole.

    experts: how many each named block had; kept: how many it keeps.
    """

    experts: int
    kept: int
    blocks: Mapping[str, tuple[int, ...]]

    def save(self, path: Path) -> None:
        """Writes the reusable JSON form."""
        fields = {
            "format": SELECTION_FORMAT,
            "experts": self.experts,
            "kept": self.kept,
            "blocks": {prefix: list(ids) for prefix, ids in self.blocks.items()},
        }
        path.write_text(json.dumps(fields, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Selection:
        """Reads what `save` wrote. Raises ModelFileError for anything inconsistent."""
        fields = load_json(path)
        if fields.get("format") != SELECTION_FORMAT:
            raise ModelFileError(f"{path}: format is {fields.get('format')!r}, expected {SELECTION_FORMAT!r}")
        experts, kept, blocks = fields.get("experts"), fields.get("kept"), fields.get("blocks")
        if not isinstance(experts, int) or not isinstance(kept, int) or not isinstance(blocks, dict):
            raise ModelFileError(f"{path}: experts, kept and blocks must be two integers and an object")
        for prefix, ids in blocks.items():
            whole = isinstance(ids, list) and all(isinstance(i, int) and 0 <= i < experts for i in ids)
            if not whole or ids != sorted(set(ids)) or len(ids) != kept:
                raise ModelFileError(f"{path}: block {prefix!r}: expected {kept} ascending numbers below {experts}")
        return cls(experts, kept, {prefix: tuple(ids) for prefix, ids in blocks.items()})


def select(scores: Mapping[str, npt.NDArray[np.floating]], kept: int) -> Selection:
    """The `kept` highest scores of each block, ties to the lower number. scores: block prefix -> [experts].

    Raises ConfigError for a count that is not in 1..experts.
    """
    counts = {len(score) for score in scores.values()}
    if len(counts) != 1:
        raise ConfigError(f"the blocks have different numbers of experts: {sorted(counts)}")
    experts = counts.pop()
    if not 1 <= kept <= experts:
        raise ConfigError(f"keep {kept}: expected 1 to {experts} experts")
    blocks = {
        prefix: tuple(sorted(int(i) for i in np.argsort(-score, kind="stable")[:kept]))
        for prefix, score in scores.items()
    }
    return Selection(experts, kept, blocks)


class PrunedCheckpoint:
    """Another provider with fewer experts; see `plan.TensorProvider`."""

    def __init__(self, provider: TensorProvider, selection: Selection) -> None:
        """Raises ModelFileError if a selected block holds another number of experts than the selection says."""
        for prefix in selection.blocks:
            stored = provider.expert_count(prefix)
            if stored != selection.experts:
                raise ModelFileError(f"{prefix} holds {stored} experts, the selection was made for {selection.experts}")
        self._provider = provider
        self._selection = selection

    def weight(self, name: str, shape: tuple[int, ...]) -> tuple[Segment, ...]:
        """Router rows of pruned blocks follow their experts; everything else passes through."""
        ids = self._selection.blocks.get(name.removesuffix("gate.weight")) if name.endswith("mlp.gate.weight") else None
        if ids is None:
            return self._provider.weight(name, shape)
        rows = self._provider.weight(name, (self._selection.experts, *shape[1:]))
        return _take_matrices(rows, ids, 1)

    def experts(self, prefix: str, count: int, hidden: int, width: int) -> tuple[tuple[Segment, ...], ...]:
        """(gate_up, down) rows of the survivors."""
        ids = self._selection.blocks.get(prefix)
        if ids is None:
            return self._provider.experts(prefix, count, hidden, width)
        gate_up, down = self._provider.experts(prefix, self._selection.experts, hidden, width)
        return _take_matrices(gate_up, ids, 2 * width), _take_matrices(down, ids, hidden)

    def expert_count(self, prefix: str) -> int:
        """What is left."""
        ids = self._selection.blocks.get(prefix)
        return self._provider.expert_count(prefix) if ids is None else len(ids)

    def has(self, prefix: str) -> bool:
        """As the provider underneath."""
        return self._provider.has(prefix)

    def unused(self) -> list[str]:
        """As the provider underneath."""
        return self._provider.unused()

    def kept_experts(self, prefix: str) -> tuple[int, ...]:
        """Former numbers of the survivors."""
        return self._selection.blocks.get(prefix, ())


def _take_matrices(segments: tuple[Segment, ...], ids: tuple[int, ...], rows: int) -> tuple[Segment, ...]:
    """Rows of matrices `ids`, each of `rows` rows, in that order."""
    return tuple(segment for i in ids for segment in select_rows(segments, i * rows, (i + 1) * rows))
