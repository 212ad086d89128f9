"""What a checkpoint holds, what a token reads of it, and what it needs here: the content of `fermion info`.

Opens a checkpoint as the engine does, with every check, but computes nothing and reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, ModelConfig
from engine.cpu import resolve_tier
from engine.memory import MemoryReport, report
from engine.placement import available_bytes, choose_threads, memory_nodes, wanted_context
from engine.state import PAGE_TOKENS, page_bytes, recurrent_bytes
from engine.vision import picture_flops, work_bytes
from engine.weights import StoredTensor, Weights, load_weights

_TRANSPARENT_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# The first pattern that a tensor's name contains decides its part.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "vision tower": ("model.visual.",),
    "prediction layer": ("mtp.",),
    "embedding": ("embed_tokens.",),
    "head": ("lm_head.",),
    "experts": (".mlp.experts.",),
    "shared experts": (".mlp.shared_expert",),
    "routers": (".mlp.gate.",),
    "delta net": (".linear_attn.",),
    "attention": (".self_attn.",),
    "norms": ("norm",),
}


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one role. nbytes: stored; token_bytes: of them, read for one decoded token."""

    name: str
    tensors: int
    nbytes: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """Bytes of one conversation's state: recurrent_bytes at any length, kv_bytes_per_token more for each token."""

    recurrent_bytes: int
    kv_bytes_per_token: int

    def at(self, tokens: int) -> int:
        """Bytes at a length, in whole pages."""
        pages = -(-tokens // PAGE_TOKENS)
        return self.recurrent_bytes + pages * PAGE_TOKENS * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class PictureCost:
    """What one picture takes. tokens: of the prompt; gflop: of the tower; work_bytes: while it is in work; row_bytes:
    of its rows, kept for when it comes again."""

    width: int
    height: int
    tokens: int
    gflop: float
    work_bytes: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What was asked for; see EngineConfig."""

    huge_pages: str
    numa: str
    memory_lock: bool


@dataclass(frozen=True, slots=True)
class Inventory:
    """A checkpoint on this machine. Sizes in bytes; context_length in tokens. widened_bytes: what 16-bit matrices take
    beyond their stored size, because they are held as float32."""

    directory: str
    model: ModelConfig
    parts: tuple[Part, ...]
    sequence: Sequence
    context_length: int
    tier: str
    threads: int
    pinned_to: tuple[int, ...] | None
    transparent_huge_pages: str
    memory: MemoryReport
    memory_nodes: tuple[int, ...]
    settings: MemorySettings
    memory_available: int
    widened_bytes: int = 0
    pictures: tuple[PictureCost, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """All stored tensors."""
        return sum(part.nbytes for part in self.parts)

    def decode_bytes(self, context: int) -> int:
        """What one decode step moves at `context` tokens: weights and KV read, recurrent state read and written."""
        weights = sum(part.token_bytes for part in self.parts)
        return weights + 2 * self.sequence.recurrent_bytes + context * self.sequence.kv_bytes_per_token

    def as_json(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        state = asdict(self.sequence) | {"bytes_at_context": self.sequence.at(self.context_length)}
        return asdict(self) | {
            "sequence": state,
            "weight_bytes": self.weight_bytes,
            "decode_bytes": self.decode_bytes(0),
        }

    def headline(self) -> str:
        """One line for a log."""
        m = self.model
        return (
            f"{m.num_hidden_layers} layers, {m.num_experts} experts, {_size(self.weight_bytes)} of weights; "
            f"{self._kernels()}"
        )

    def as_text(self) -> str:
        """The same for people."""
        return "\n".join([*self._model_lines(), "", *self._part_lines(), "", *self._machine_lines()])

    def _model_lines(self) -> list[str]:
        m = self.model
        lines = [
            self.directory,
            f"  {m.num_hidden_layers} layers: {m.delta_layers} gated delta net, {m.attention_layers} attention; "
            f"hidden {m.hidden_size}, vocabulary {m.vocab_size}",
            f"  attention: {m.num_attention_heads} heads on {m.num_key_value_heads}, width {m.head_dim}, "
            f"{m.rotary_dim} rotated",
            f"  delta net: {m.linear_num_key_heads} key heads of {m.linear_key_head_dim}, "
            f"{m.linear_num_value_heads} value heads of {m.linear_value_head_dim}",
            f"  experts: {m.num_experts} of width {m.moe_intermediate_size}, {m.num_experts_per_tok} per token, "
            f"and a shared one of {m.shared_expert_intermediate_size}",
        ]
        vision = "none" if m.vision is None else f"{m.vision.depth} layers of {m.vision.hidden_size}"
        return [*lines, f"  pictures: {vision}"]

    def _part_lines(self) -> list[str]:
        rows = [(part.name, part.tensors, part.nbytes, part.token_bytes) for part in self.parts]
        rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows), sum(row[3] for row in rows)))
        head = f"{'part':<18}{'tensors':>8}{'bytes':>18}{'read per token':>18}"
        return [head, *(f"{name:<18}{count:>8}{size:>18,}{read:>18,}" for name, count, size, read in rows)]

    def _machine_lines(self) -> list[str]:
        state = self.sequence.at(self.context_length)
        return [
            f"weights      {_size(self.weight_bytes)}, mapped from the file and used in place (page cache)"
            + (f"; {_size(self.widened_bytes)} more for 16-bit matrices as float32" if self.widened_bytes else ""),
            f"sequence     {_size(state)} at {self.context_length} tokens: {_size(self.sequence.recurrent_bytes)} "
            f"recurrent and {self.sequence.kv_bytes_per_token / 1024:.1f} KiB per token",
            f"memory       {_size(self.weight_bytes + self.widened_bytes + state)} needed, "
            f"{_size(self.memory_available)} available",
            f"decode       moves {_size(self.decode_bytes(0))} per token, at {self.context_length} tokens "
            f"{_size(self.decode_bytes(self.context_length))}",
            *(
                f"picture      {p.width} x {p.height}: {p.tokens} tokens, {p.gflop:,.0f} GFLOP in the tower, "
                f"{_size(p.work_bytes)} while it is in work"
                for p in self.pictures
            ),
            f"kernels      {self._kernels()}",
            f"huge pages   {self.settings.huge_pages} (transparent ones: {self.transparent_huge_pages})",
            f"in memory    {self.memory.as_text()}",
            f"NUMA         {self._numa()}",
            f"locked       {'yes' if self.settings.memory_lock else 'no'}",
        ]

    def _numa(self) -> str:
        if len(self.memory_nodes) < 2:
            return "one node"
        nodes = ", ".join(map(str, self.memory_nodes))
        how = "weights are dealt out to them" if self.settings.numa == "interleave" else "weights lie where they fall"
        return f"nodes {nodes}: {how}"

    def _kernels(self) -> str:
        where = "not pinned" if self.pinned_to is None else f"on processors {', '.join(map(str, self.pinned_to))}"
        return f"{self.tier}, {self.threads} thread{'s' if self.threads != 1 else ''}, {where}"


def take_inventory(directory: Path, config: EngineConfig) -> Inventory:
    """Look at a checkpoint as an engine with `config` would use it. Raises ModelFileError, ConfigError."""
    # Looked at, not loaded: nothing is copied or locked for it.
    weights = load_weights(
        directory, ModelConfig.load(directory), replace(config, huge_pages="auto", memory_lock=False)
    )
    tier = resolve_tier(config.simd_tier)
    threads, pinned_to = choose_threads(config.threads)
    return Inventory(
        directory=str(directory),
        model=weights.config,
        parts=parts_of(weights),
        sequence=sequence_of(weights.config, kv_f32=config.compute == "f32"),
        context_length=wanted_context(weights.config, config),
        tier=tier,
        threads=threads,
        pinned_to=pinned_to,
        transparent_huge_pages=_transparent_huge_pages(),
        memory=_how_they_lie(weights),
        memory_nodes=memory_nodes(),
        settings=MemorySettings(config.huge_pages, config.numa, config.memory_lock),
        memory_available=available_bytes(),
        widened_bytes=weights.file.resident_bytes - weights.file.nbytes,
        pictures=pictures_of(weights.config, tier),
    )


def parts_of(weights: Weights) -> tuple[Part, ...]:
    """Stored tensors by role, in the order of _PARTS."""
    groups: dict[str, list[StoredTensor]] = {name: [] for name in _PARTS}
    for tensor in weights.file.tensors.values():
        groups[_part_name(tensor.name)].append(tensor)
    return tuple(
        Part(name, len(tensors), sum(t.data.nbytes for t in tensors), _token_bytes(name, tensors, weights.config))
        for name, tensors in groups.items()
        if tensors
    )


def sequence_of(config: ModelConfig, *, kv_f32: bool) -> Sequence:
    """State of one sequence."""
    return Sequence(recurrent_bytes(config), page_bytes(config, kv_f32) // PAGE_TOKENS)


def pictures_of(config: ModelConfig, tier: str) -> tuple[PictureCost, ...]:
    """A small picture and a large one; none if the model does not see. Cost is quadratic in the area."""
    vision = config.vision
    if vision is None:
        return ()

    def cost(width: int, height: int) -> PictureCost:
        tokens = (height // vision.token_side) * (width // vision.token_side)
        work, gflop = work_bytes(vision, tier, height, width), 1e-9 * picture_flops(vision, height, width)
        return PictureCost(width, height, tokens, gflop, work, 4 * tokens * vision.out_hidden_size)

    return tuple(cost(side * vision.token_side, side * vision.token_side) for side in (8, 32))


def _part_name(tensor: str) -> str:
    return next(part for part, patterns in _PARTS.items() if any(pattern in tensor for pattern in patterns))


def _token_bytes(part: str, tensors: list[StoredTensor], config: ModelConfig) -> int:
    nbytes = sum(tensor.data.nbytes for tensor in tensors)
    if part in ("vision tower", "prediction layer"):
        return 0
    if part == "embedding":
        return nbytes // config.vocab_size
    if part == "experts":
        return nbytes * config.num_experts_per_tok // config.num_experts
    return nbytes


def _how_they_lie(weights: Weights) -> MemoryReport:
    """Of the largest file: shards are alike."""
    return report(max(weights.file.files.values(), key=lambda data: data.nbytes))


def _transparent_huge_pages() -> str:
    try:
        found = re.search(r"\[(\w+)\]", _TRANSPARENT_PAGES.read_text())
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"


def _size(nbytes: int) -> str:
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.1f} MB"
