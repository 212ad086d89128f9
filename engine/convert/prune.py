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

SELECTION_FORMAT = "fermion-experts-2"


@dataclass(frozen=True, slots=True)
class Selection:
    """Kept experts, ascending, for each MoE block by its prefix (`...layers.3.mlp.`); blocks not named stay whole.

    experts: how many each named block had (the layer for multi-token prediction may differ from the trunk); kept: how
    many each keeps.
    """

    experts: Mapping[str, int]
    kept: int
    blocks: Mapping[str, tuple[int, ...]]

    def save(self, path: Path) -> None:
        """Writes the reusable JSON form."""
        fields = {
            "format": SELECTION_FORMAT,
            "experts": dict(self.experts),
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
        if not isinstance(experts, dict) or not isinstance(kept, int) or not isinstance(blocks, dict):
            raise ModelFileError(f"{path}: expected experts and blocks to be objects and kept to be an integer")
        if experts.keys() != blocks.keys() or not all(isinstance(count, int) for count in experts.values()):
            raise ModelFileError(f"{path}: expected experts to hold an integer for each of blocks")
        for prefix, ids in blocks.items():
            stored = experts[prefix]
            whole = isinstance(ids, list) and all(isinstance(i, int) and 0 <= i < stored for i in ids)
            if not whole or ids != sorted(set(ids)) or len(ids) != kept:
                raise ModelFileError(f"{path}: block {prefix!r}: expected {kept} ascending numbers below {stored}")
        return cls(experts, kept, {prefix: tuple(ids) for prefix, ids in blocks.items()})


def select(scores: Mapping[str, npt.NDArray[np.floating]], kept: int) -> Selection:
    """The `kept` highest scores of each block, ties to the lower number. scores: block prefix -> [experts].

    Raises ConfigError for a count that some block cannot keep.
    """
    experts = {prefix: len(score) for prefix, score in scores.items()}
    if not 1 <= kept <= min(experts.values(), default=0):
        raise ConfigError(f"keep {kept}: expected 1 to {min(experts.values(), default=0)} experts")
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
            made_for = selection.experts[prefix]
            if stored != made_for:
                raise ModelFileError(
                    f"{provider.path}: {prefix} holds {stored} experts, the selection was made for {made_for}"
                )
        self.path = provider.path
        self._provider = provider
        self._selection = selection

    def weight(self, name: str, shape: tuple[int, ...]) -> tuple[Segment, ...]:
        """Router rows of pruned blocks follow their experts; everything else passes through."""
        prefix = name.removesuffix("gate.weight")
        ids = self._selection.blocks.get(prefix) if name.endswith("mlp.gate.weight") else None
        if ids is None:
            return self._provider.weight(name, shape)
        rows = self._provider.weight(name, (self._selection.experts[prefix], *shape[1:]))
        return _take_matrices(rows, ids, 1)

    def experts(self, prefix: str, count: int, hidden: int, width: int) -> tuple[tuple[Segment, ...], ...]:
        """(gate_up, down) rows of the survivors."""
        ids = self._selection.blocks.get(prefix)
        if ids is None:
            return self._provider.experts(prefix, count, hidden, width)
        gate_up, down = self._provider.experts(prefix, self._selection.experts[prefix], hidden, width)
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
