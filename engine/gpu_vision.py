"""The vision tower on a CUDA card: the kernels of cuda_src/ in the order of the tower, over weights that travel.

Owns no weights on the card: a block's travel while the block before computes, through the buffers of the experts where
these are large enough; what lies between two products uses the memory for a prompt's activations, which is idle while a
picture is encoded. Only what is missing there is allocated, of the memory that the prompts' plan has left.

Bits: a picture's rows depend on its pixels and the kernels alone. Which pictures come here depends on their size alone,
wherever the tokens around them are computed and whatever was computed before.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import mmap
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.config import VisionConfig
from engine.core import Float32Array, Int32Array, UInt8Array
from engine.cuda_driver import Array, Card
from engine.errors import ConfigError, KernelError, OutOfMemory
from engine.gpu import GpuPrefill, IdleMemory, Stored, usable_bytes
from engine.placement import available_bytes
from engine.vision import Tower, VisionTower, rotary_frequencies
from engine.weights import LayerNorm, Linear, VisionBlock, VisionWeights

logger = logging.getLogger(__name__)

HEAD_DIMS = (72, 12)
PICTURE_TOKENS = (16383, 8192, 4096, 2048, 1024, 512, 256, 128, 64)
"""The largest picture that a plan has room for is one of few: it decides bits, so what is cached should survive a
little more or less free memory. The first is as many patches as a launch has blocks."""

_ALIGN = 256
_LAYER_NORM_EPS = 1e-6
_COLUMNS = 16  # what the products take at a time
_LOCK_SPARE = 1 << 30  # host memory that locked copies leave free


@dataclass(frozen=True, slots=True)
class TowerPlan:
    """Most patches of a picture, and bytes of the card beyond what prompts use."""

    patches: int
    own_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Weights that travel together. arrays: (offset in the buffer, array on the host); tensors: where each lies there;
    nbytes: of the buffer."""

    arrays: tuple[tuple[int, Array], ...]
    tensors: Mapping[str, Stored]
    nbytes: int


def open_tower(
    weights: VisionWeights, cpu: VisionTower, gpu: GpuPrefill, memory_limit: int | None
) -> tuple[Tower, str]:
    """The tower on the card that prompts run on, `cpu` where the card cannot, with a line in the log; and what decides
    bits there, for the fingerprint of what is cached. cpu: of the same weights; memory_limit: bytes of the card that
    may be used in all."""
    try:
        check_tower(weights)
        spare = usable_bytes(gpu.card.free_bytes() + gpu.plan.nbytes, memory_limit) - gpu.plan.nbytes
        plan = plan_tower(weights, gpu.idle_memory, spare)
        tower = CardTower(weights, cpu, gpu.card, gpu.idle_memory, plan)
    except (ConfigError, OutOfMemory) as error:
        logger.warning("pictures are encoded on the CPU: %s", error)
        return cpu, ""
    logger.info(
        "pictures of up to %d tokens are encoded on the card: %.0f MiB of weights travel for each, %.0f MiB of memory "
        "beside what prompts use",
        plan.patches // weights.config.spatial_merge_size**2, tower.travelling_bytes / 2**20, plan.own_bytes / 2**20,
    )  # fmt: skip
    return tower, f", pictures of up to {plan.patches} patches"


def check_tower(weights: VisionWeights) -> None:
    """ConfigError if the kernels do not cover the tower's sizes or its matrices are not float16."""
    c = weights.config
    if (dim := c.hidden_size // c.num_heads) not in HEAD_DIMS:
        raise ConfigError(f"the tower's heads have {dim} channels, the kernels take {' or '.join(map(str, HEAD_DIMS))}")
    for name, matrix in _matrices(weights):
        if matrix.dtype != np.float16:
            raise ConfigError(f"the tower's {name} is {matrix.dtype}, the kernels take float16")
        if name != "table" and matrix.shape[1] % _COLUMNS:
            raise ConfigError(f"the tower's {name} has {matrix.shape[1]} columns, the kernels take multiples of 16")


def plan_tower(weights: VisionWeights, idle: IdleMemory, spare: int) -> TowerPlan:
    """The largest pictures that the idle memory of prompts and `spare` bytes of the card have room for. OutOfMemory if
    there is none."""
    group = weights.config.spatial_merge_size**2
    buffers = 2 * _buffer_bytes(weights)
    lent = idle.buffer_bytes >= buffers // 2
    for tokens in PICTURE_TOKENS:
        patches = min(tokens * group, 65535 // group * group)
        needed = activations(weights.config, patches).nbytes + (0 if lent else buffers)
        own = 0 if needed <= idle.nbytes else needed
        if own <= spare:
            return TowerPlan(patches, own)
    raise OutOfMemory(
        f"the tower needs {needed} bytes of the card for a picture of {tokens} tokens; prompts leave {max(spare, 0)}"
    )


@dataclass(frozen=True, slots=True)
class Activations:
    """Where a picture's intermediate results lie: name -> byte offset."""

    offsets: Mapping[str, int]
    nbytes: int


def activations(vision: VisionConfig, patches: int) -> Activations:
    """For pictures of up to `patches` patches. The widest results of every stage lie over each other."""
    hidden, pixels = vision.hidden_size, vision.in_channels * vision.patch_size**2
    # Behind the merger's inner values lie the rows.
    merger = hidden + -(-vision.out_hidden_size // vision.spatial_merge_size**2)
    wide = max(3 * hidden, vision.intermediate_size, vision.temporal_patch_size * pixels, merger)
    sizes = {
        "pixels": patches * pixels,
        "cells": 8 * patches,
        "angles": 8 * patches * (hidden // vision.num_heads // 4),
        "hidden": 4 * patches * hidden,
        "normed": 4 * patches * hidden,
        "wide": 4 * patches * wide,
    }
    offsets, end = {}, 0
    for name, nbytes in sizes.items():
        offsets[name] = end
        end += _aligned(nbytes)
    return Activations(offsets, end)


def lock_tower(weights: VisionWeights, card: Card) -> tuple[VisionWeights, bool]:
    """Page-lock the matrices: (weights to use from now on, whether they are locked). In place where the driver can
    lock the mapped file; else in memory of ours; not at all if that is short."""
    matrices = [matrix for _, matrix in _matrices(weights)]
    if all(card.pin(run) for run in page_runs(matrices)):
        return weights, True
    if sum(matrix.nbytes for matrix in matrices) + _LOCK_SPARE > available_bytes():
        return weights, False
    moved = _moved(weights)
    return moved, all(card.pin(run) for run in page_runs([matrix for _, matrix in _matrices(moved)]))


def page_runs(arrays: Sequence[Array]) -> list[UInt8Array]:
    """The bytes of the arrays, those that share a page together: pages are locked once, and a copy from memory that is
    locked in part would be refused."""
    runs: list[list[int]] = []
    for begin, end in sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays):
        if runs and begin // mmap.PAGESIZE <= (runs[-1][1] - 1) // mmap.PAGESIZE:
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([begin, end])
    return [np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin)) for begin, end in runs]


class CardTower(Tower):
    """The vision tower on the card that prompts run on. One picture at a time, in the thread that owns the card, and
    not while a prompt is inside a call."""

    def __init__(self, weights: VisionWeights, cpu: VisionTower, card: Card, idle: IdleMemory, plan: TowerPlan) -> None:
        """cpu: takes pictures of more patches than planned; this closes it. idle, plan: see `plan_tower`. OutOfMemory
        if the card has less than was planned."""
        self.config = weights.config
        self.plan = plan
        self._cpu: VisionTower | None = cpu
        self._card = card
        self._places = activations(weights.config, plan.patches)
        size = _buffer_bytes(weights)
        self._base = self._card.allocate(plan.own_bytes) if plan.own_bytes else idle.address
        behind = self._base + self._places.nbytes
        self._buffers = idle.buffers if idle.buffer_bytes >= size else (behind, behind + size)
        weights, locked = lock_tower(weights, self._card)
        pieces = _pieces(weights)
        vectors = _in_own_pages([piece.arrays[0][1] for piece in pieces])
        self._pieces = [
            dataclasses.replace(piece, arrays=((0, own), *piece.arrays[1:]))
            for piece, own in zip(pieces, vectors, strict=True)
        ]
        locked = all(card.pin(run) for run in page_runs(vectors)) and locked
        if not locked:
            logger.warning("The tower's weights could not be page-locked: each picture waits for their copies.")

    @property
    def travelling_bytes(self) -> int:
        """What is copied to the card for every picture, its pixels apart."""
        return sum(array.nbytes for piece in self._pieces for _, array in piece.arrays)

    def close(self) -> None:
        """Free the CPU's tower; the card belongs to the prompts. Idempotent."""
        if self._cpu is not None:
            self._cpu.close()
            self._cpu = None

    def encode_steps(self, pixels: UInt8Array) -> Generator[int, None, Float32Array]:
        """As `VisionTower.encode_steps`; a step is a block. If the generator is left early the card is ready for the
        next call. OutOfMemory only for a picture that the CPU takes."""
        if self._cpu is None:
            raise KernelError("the vision tower is closed")
        c = self.config
        rows, columns = pixels.shape[0] // c.patch_size, pixels.shape[1] // c.patch_size
        if rows * columns > self.plan.patches:
            return (yield from self._cpu.encode_steps(pixels))
        card, last = self._card, len(self._pieces) - 1
        card.synchronize()
        copied = self._send(0, None)
        self._begin(np.ascontiguousarray(pixels, np.uint8), rows, columns)
        passed: list[object] = []  # a mark behind each piece
        for index, piece in enumerate(self._pieces):
            yield last + 1 - index
            card.wait(copied)
            if index == 0:
                self._embed(piece, rows, columns)
            elif index == last:
                self._merge(piece, rows * columns)
            else:
                self._block(piece, index, rows * columns)
            passed.append(card.mark())
            if index < last:  # into the buffer of the piece before, when that is done
                copied = self._send(index + 1, passed[-2] if index else None)
            if index:
                card.finish(passed[-2])
        out = np.empty((rows * columns // c.spatial_merge_size**2, c.out_hidden_size), np.float32)
        card.read(out, self._rows_at(rows * columns))
        return out

    def _send(self, index: int, after: object) -> object:
        base = self._buffers[index % 2]
        return self._card.copy([(base + offset, array) for offset, array in self._pieces[index].arrays], after)

    def _begin(self, pixels: UInt8Array, rows: int, columns: int) -> None:
        """Pixels, the cell of each patch, and the angles of the coordinates."""
        c = self.config
        self._width = pixels.shape[1]
        self._card.write(self._at("pixels"), pixels)
        self._card.write(self._at("cells"), patch_cells(c, rows, columns))
        frequency = rotary_frequencies(c.hidden_size // c.num_heads)
        angles = (np.arange(max(rows, columns), dtype=np.float32)[:, None] * frequency).astype(np.float64)
        self._card.write(self._at("angles"), np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32))

    def _embed(self, piece: Piece, rows: int, columns: int) -> None:
        c, base, patches = self.config, self._buffers[0], rows * columns
        cells, hidden = self._at("cells"), self._at("hidden")
        self._card.launch(
            "picture_patches", (patches, 1), 128,
            self._at("pixels"), cells, self._at("wide"), _int(self._width), _int(c.in_channels),
            _int(c.temporal_patch_size), _int(c.patch_size),
        )  # fmt: skip
        self._product(piece, base, "patch_embed", self._at("wide"), hidden, patches)
        self._card.launch(
            "picture_positions", (patches, 1), 128,
            base + piece.tensors["table"].address, cells, hidden, _int(c.hidden_size), _int(c.table_side), _int(rows),
            _int(columns),
        )  # fmt: skip

    def _block(self, piece: Piece, index: int, patches: int) -> None:
        c, base = self.config, self._buffers[index % 2]
        hidden, normed, wide = self._at("hidden"), self._at("normed"), self._at("wide")
        dim = c.hidden_size // c.num_heads
        self._norm(piece, base, "norm1", patches)
        self._product(piece, base, "qkv", normed, wide, patches)
        self._card.launch(
            "rope_2d", (2 * c.num_heads, patches), 64,
            wide, _int(3 * c.hidden_size), _int(dim), self._at("cells"), self._at("angles"),
        )  # fmt: skip
        self._card.launch(
            f"attention_full_{dim}", (-(-patches // 32), c.num_heads), 256, wide, _int(patches), dim**-0.5, normed
        )
        self._product(piece, base, "proj", normed, hidden, patches, accumulate=True)
        self._norm(piece, base, "norm2", patches)
        self._product(piece, base, "fc1", normed, wide, patches)
        self._gelu("gelu_tanh", wide, patches * c.intermediate_size)
        self._product(piece, base, "fc2", wide, hidden, patches, accumulate=True)

    def _merge(self, piece: Piece, patches: int) -> None:
        """The patches of a token lie side by side already: they are numbered token by token."""
        c, base = self.config, self._buffers[(len(self._pieces) - 1) % 2]
        tokens = patches // c.spatial_merge_size**2
        wide = self._at("wide")
        self._norm(piece, base, "norm", patches)
        self._product(piece, base, "fc1", self._at("normed"), wide, tokens)
        self._gelu("gelu_erf", wide, patches * c.hidden_size)
        self._product(piece, base, "fc2", wide, self._rows_at(patches), tokens)

    def _norm(self, piece: Piece, base: int, name: str, patches: int) -> None:
        """normed = layernorm(hidden)."""
        weight, bias = piece.tensors[f"{name}.weight"], piece.tensors[f"{name}.bias"]
        self._card.launch(
            "layernorm", (patches, 1), 128,
            self._at("hidden"), base + weight.address, base + bias.address, self._at("normed"),
            _int(self.config.hidden_size), _LAYER_NORM_EPS,
        )  # fmt: skip

    def _product(
        self, piece: Piece, base: int, name: str, x: int, y: int, rows: int, *, accumulate: bool = False
    ) -> None:
        """y = W x + b, or += ; x and y are addresses."""
        w, bias = piece.tensors[name], piece.tensors[f"{name}.bias"]
        self._card.launch(
            "matmul_f16", (-(-w.rows // 128), -(-rows // 64)), 256,
            x, _int(w.cols), base + w.address, base + bias.address, y, _int(w.rows), _int(rows), _int(w.rows),
            _int(w.cols), _int(accumulate),
        )  # fmt: skip

    def _gelu(self, kernel: str, x: int, count: int) -> None:
        self._card.launch(kernel, (min(-(-count // 256), 65535), 1), 256, x, x, _int(count))

    def _at(self, name: str) -> int:
        return self._base + self._places.offsets[name]

    def _rows_at(self, patches: int) -> int:
        """The picture's rows: behind the merger's inner values."""
        return self._at("wide") + 4 * patches * self.config.hidden_size


def patch_cells(vision: VisionConfig, rows: int, columns: int) -> Int32Array:
    """Row and column of each patch, int32 [patches, 2]: patches are numbered token by token."""
    merge = vision.spatial_merge_size
    grid = np.indices((rows, columns), np.int32).reshape(2, rows // merge, merge, columns // merge, merge)
    return np.ascontiguousarray(grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2))


def _pieces(weights: VisionWeights) -> list[Piece]:
    """The embedding, each block, the merger."""
    first = _piece({"patch_embed": weights.patch_embed}, {}, {"table": weights.table})
    last = _piece({"fc1": weights.merger_fc1, "fc2": weights.merger_fc2}, {"norm": weights.merger_norm}, {})
    return [first, *(_block_piece(block) for block in weights.blocks), last]


def _block_piece(block: VisionBlock) -> Piece:
    linears = {"qkv": block.qkv, "proj": block.proj, "fc1": block.fc1, "fc2": block.fc2}
    return _piece(linears, {"norm1": block.norm1, "norm2": block.norm2}, {})


def _piece(linears: Mapping[str, Linear], norms: Mapping[str, LayerNorm], tables: Mapping[str, Array]) -> Piece:
    """All vectors as one array first, then the matrices."""
    vectors = {f"{name}.bias": linear.bias for name, linear in linears.items()}
    for name, norm in norms.items():
        vectors |= {f"{name}.weight": norm.weight, f"{name}.bias": norm.bias}
    tensors, end = {}, 0
    for name, vector in vectors.items():
        tensors[name] = Stored(end, 1, len(vector))
        end += vector.nbytes
    arrays: list[tuple[int, Array]] = [(0, np.concatenate(list(vectors.values())))]
    for name, matrix in ({name: linear.weight for name, linear in linears.items()} | dict(tables)).items():
        end = _aligned(end)
        tensors[name] = Stored(end, *matrix.shape)
        arrays.append((end, matrix))
        end += matrix.nbytes
    return Piece(tuple(arrays), tensors, _aligned(end))


def _buffer_bytes(weights: VisionWeights) -> int:
    return max(piece.nbytes for piece in _pieces(weights))


def _matrices(weights: VisionWeights) -> list[tuple[str, Array]]:
    found: list[tuple[str, Array]] = [("patch_embed", weights.patch_embed.weight), ("table", weights.table)]
    for i, block in enumerate(weights.blocks):
        linears = (("qkv", block.qkv), ("proj", block.proj), ("fc1", block.fc1), ("fc2", block.fc2))
        found += [(f"{name} of block {i}", linear.weight) for name, linear in linears]
    return [*found, ("merger_fc1", weights.merger_fc1.weight), ("merger_fc2", weights.merger_fc2.weight)]


def _moved(weights: VisionWeights) -> VisionWeights:
    """The same with matrices in memory of ours."""

    def linear(source: Linear) -> Linear:
        return dataclasses.replace(source, weight=_in_own_pages([source.weight])[0])

    blocks: Sequence[VisionBlock] = [
        dataclasses.replace(
            block, qkv=linear(block.qkv), proj=linear(block.proj), fc1=linear(block.fc1), fc2=linear(block.fc2)
        )
        for block in weights.blocks
    ]
    return dataclasses.replace(
        weights,
        patch_embed=linear(weights.patch_embed),
        table=_in_own_pages([weights.table])[0],
        blocks=tuple(blocks),
        merger_fc1=linear(weights.merger_fc1),
        merger_fc2=linear(weights.merger_fc2),
    )


def _in_own_pages(arrays: Sequence[Array]) -> list[Array]:
    """Copies side by side in pages that hold nothing else, so that locking them concerns nothing else."""
    memory, copies, end = mmap.mmap(-1, sum(array.nbytes for array in arrays)), [], 0
    for array in arrays:
        copies.append(np.frombuffer(memory, array.dtype, array.size, end).reshape(array.shape))
        np.copyto(copies[-1], array)
        end += array.nbytes
    return copies


def _int(value: int) -> ctypes.c_int:
    return ctypes.c_int(value)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
