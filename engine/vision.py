"""Pictures on their way into the text model: the vision tower, rows it made before, and rotary positions.

Binds the tower of the C engine (simd_src/vision.c). Takes pixels of the right size; where they come from, and how a
file becomes pixels, is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

from engine._simd import ffi, lib
from engine.config import VISION_ROPE_THETA, ModelConfig, VisionConfig
from engine.core import CacheOptions, Float32Array, ImageSpan, Int32Array, Prompt, UInt8Array
from engine.errors import KernelError, OutOfMemory, RequestError
from engine.placement import PICTURE_ROWS_BYTES, available_bytes
from engine.weights import HalfArray, LayerNorm, Linear, VisionBlock, VisionWeights

PIXEL_RULE = "(byte - 127.5) / 127.5"
"""What the tower makes of a byte of a picture: mean and deviation are one half in all published preprocessors."""

_DIGEST_BYTES = 32


def check_pictures(prompt: Prompt, model: ModelConfig) -> None:
    """RequestError unless the model sees and every picture of the prompt fits its placeholders."""
    if not prompt.images:
        return
    if model.vision is None or model.image_token_id is None:
        raise _refused(
            "This model does not see: its checkpoint has no vision tower. Send text only, or serve a checkpoint that "
            "has one.",
            "unsupported_content",
        )
    side, end = model.vision.token_side, 0
    for number, image in enumerate(prompt.images, 1):
        pixels, span = image.pixels, (image.start, image.start + image.count)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise _refused(f"Picture {number} is {pixels.dtype} {list(pixels.shape)}, expected uint8 RGB.")
        if 0 in pixels.shape or pixels.shape[0] % side or pixels.shape[1] % side:
            raise _refused(
                f"Picture {number} has {pixels.shape[1]} x {pixels.shape[0]} pixels, expected multiples of {side}."
            )
        if image.count != (expected := prod(token_grid(pixels, model.vision))):
            raise _refused(f"Picture {number} takes {expected} tokens, its place in the prompt has {image.count}.")
        if not end <= span[0] < span[1] <= len(prompt.token_ids):
            raise _refused(
                f"Picture {number} is at tokens {span[0]} to {span[1]}, expected a place in {end} to "
                f"{len(prompt.token_ids)}."
            )
        if np.any(prompt.token_ids[slice(*span)] != model.image_token_id):
            raise _refused(f"The place of picture {number} holds tokens other than {model.image_token_id}.")
        if len(image.digest) not in (0, _DIGEST_BYTES):
            raise _refused(f"Picture {number} has a digest of {len(image.digest)} bytes, expected {_DIGEST_BYTES}.")
        end = span[1]


def _refused(text: str, code: str = "invalid_image") -> RequestError:
    return RequestError(text, param="messages", code=code)


def token_grid(pixels: UInt8Array, vision: VisionConfig) -> tuple[int, int]:
    """Rows and columns of tokens that a picture [height, width, 3] takes."""
    height, width = pixels.shape[:2]
    return height // vision.token_side, width // vision.token_side


def rotary_positions(tokens: int, images: Sequence[ImageSpan], vision: VisionConfig) -> Int32Array:
    """Rotary positions of a prompt of `tokens` tokens: int32 [tokens, 3] (time, height, width).

    Text counts on all three axes. A picture that starts at position p has its token of row r and column c at
    (p, p + r, p + c); text goes on at p + max(rows, columns) (Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    positions = np.empty((tokens, 3), np.int32)
    index = following = 0
    for image in images:
        rows, columns = token_grid(image.pixels, vision)
        _count_up(positions[index : image.start], following)
        following += image.start - index
        row, column = np.divmod(np.arange(image.count, dtype=np.int32), columns)
        index = image.start + image.count
        positions[image.start : index] = following + np.stack([np.zeros_like(row), row, column], axis=1)
        following += max(rows, columns)
    _count_up(positions[index:], following)
    return positions


def _count_up(positions: Int32Array, first: int) -> None:
    positions[:] = np.arange(first, first + len(positions), dtype=np.int32)[:, None]


class Tower(Protocol):
    """What makes rows of pictures, one at a time."""

    config: VisionConfig

    def encode_steps(self, pixels: UInt8Array) -> Generator[int, None, Float32Array]:
        """See `VisionTower.encode_steps`."""

    def close(self) -> None:
        """Free memory. Idempotent."""

    def encode(self, pixels: UInt8Array) -> Float32Array:
        """`encode_steps` without a stop."""
        steps = self.encode_steps(pixels)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            rows: Float32Array = end.value
            return rows


class VisionTower(Tower):
    """The vision tower on the CPU, over one set of weights. One picture at a time, in the thread that owns the pool."""

    def __init__(self, weights: VisionWeights, tier: str, pool: Any) -> None:
        """tier: one that can run here; pool: the C engine's threads, which must outlive the tower. OutOfMemory."""
        self.config = weights.config
        self._tier = tier
        self._kept: list[Any] = [weights]
        self._spec = self._fill(weights)
        self._picture: object | None = None  # the encoding under way
        self._tower = lib.fm_vision_create(self._spec, tier.encode(), pool)
        if self._tower == ffi.NULL:
            raise OutOfMemory("the vision tower could not allocate its scratch memory")

    def close(self) -> None:
        """Free scratch memory. Idempotent."""
        if self._tower != ffi.NULL:
            lib.fm_vision_destroy(self._tower)
            self._tower = ffi.NULL

    def work_bytes(self, height: int, width: int) -> int:
        """See `work_bytes`."""
        return work_bytes(self.config, self._tier, height, width)

    def encode_steps(self, pixels: UInt8Array) -> Generator[int, None, Float32Array]:
        """Rows that take the place of a picture's placeholders: float32 [tokens, hidden of the text model].

        pixels: uint8 RGB [height, width, 3], sides multiples of `token_side`. Yields the number of steps left before
        each; if the generator is left early only the work is lost. A picture's rows depend on its pixels and the
        instruction set alone. OutOfMemory if the picture is too large for the memory that is free.
        """
        if self._tower == ffi.NULL:
            raise KernelError("the vision tower is closed")
        pixels = np.ascontiguousarray(pixels, np.uint8)
        height, width = pixels.shape[:2]
        needed, available = self.work_bytes(height, width), available_bytes()
        rows, columns = token_grid(pixels, self.config)
        out = np.empty((rows * columns, self.config.out_hidden_size), np.float32)
        # Asked before, since memory that is promised and not there ends the process.
        steps = -1
        if needed + out.nbytes <= available:
            steps = lib.fm_vision_begin(self._tower, ffi.from_buffer("uint8_t[]", pixels), height, width)
        if steps < 0:
            raise OutOfMemory(f"a picture of {width} x {height} pixels needs {needed} bytes, {available} are available")
        self._picture = mine = object()
        try:
            for step in range(steps):
                yield steps - step
                assert self._picture is mine, "two pictures at once"
                lib.fm_vision_step(self._tower, step, ffi.from_buffer("float[]", out))
        finally:
            if self._picture is mine:
                self._picture = None
                if self._tower != ffi.NULL:
                    lib.fm_vision_end(self._tower)
        return out

    def _fill(self, weights: VisionWeights) -> Any:
        c = weights.config
        spec = _sizes(c)
        spec.byte_value = self._floats(np.tile(_byte_values(), (c.in_channels, 1)))
        spec.frequency = self._floats(rotary_frequencies(c.hidden_size // c.num_heads))
        self._linear(spec.patch_embed, weights.patch_embed)
        self._matrix(spec.table, weights.table)
        self._norm(spec.merger_norm, weights.merger_norm)
        self._linear(spec.merger_fc1, weights.merger_fc1)
        self._linear(spec.merger_fc2, weights.merger_fc2)
        blocks = self._keep(ffi.new("fm_vision_block[]", c.depth))
        for target, block in zip(blocks, weights.blocks, strict=True):
            self._block(target, block)
        spec.block = blocks
        return spec

    def _block(self, target: Any, block: VisionBlock) -> None:
        self._norm(target.norm1, block.norm1)
        self._norm(target.norm2, block.norm2)
        self._linear(target.qkv, block.qkv)
        self._linear(target.proj, block.proj)
        self._linear(target.fc1, block.fc1)
        self._linear(target.fc2, block.fc2)

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def _floats(self, array: Float32Array) -> Any:
        return self._keep(ffi.from_buffer("float[]", np.ascontiguousarray(array, np.float32)))

    def _matrix(self, target: Any, matrix: HalfArray | Float32Array) -> None:
        target.dtype = lib.FM_F16 if matrix.dtype == np.float16 else lib.FM_F32
        target.rows, target.cols = matrix.shape
        target.data = self._keep(ffi.from_buffer(matrix))

    def _linear(self, target: Any, linear: Linear) -> None:
        self._matrix(target.weight, linear.weight)
        target.bias = self._floats(linear.bias)

    def _norm(self, target: Any, norm: LayerNorm) -> None:
        target.weight, target.bias = self._floats(norm.weight), self._floats(norm.bias)


def work_bytes(vision: VisionConfig, tier: str, height: int, width: int) -> int:
    """Memory that a picture of so many pixels takes while it is encoded, its rows not counted."""
    nbytes: int = lib.fm_vision_bytes(_sizes(vision), tier.encode(), height, width)
    return nbytes


def picture_flops(vision: VisionConfig, height: int, width: int) -> float:
    """Floating-point operations of the matrix products of one picture; all else is little beside them."""
    patches = height * width // vision.patch_size**2
    hidden, group = vision.hidden_size, vision.spatial_merge_size**2
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    block = 4 * hidden * hidden + 2 * hidden * vision.intermediate_size
    attention = 2 * patches * hidden
    merger = hidden * (group * hidden + vision.out_hidden_size)
    return 2.0 * patches * (values * hidden + vision.depth * (block + attention) + merger)


def _sizes(vision: VisionConfig) -> Any:
    """The part of fm_vision_spec that is numbers."""
    spec = ffi.new("fm_vision_spec *")
    spec.depth, spec.hidden, spec.inner = vision.depth, vision.hidden_size, vision.intermediate_size
    spec.heads, spec.out = vision.num_heads, vision.out_hidden_size
    spec.channels, spec.frames = vision.in_channels, vision.temporal_patch_size
    spec.patch, spec.merge, spec.table_side = vision.patch_size, vision.spatial_merge_size, vision.table_side
    return spec


def _byte_values() -> Float32Array:
    """PIXEL_RULE for each byte: float32 [256]."""
    return (np.arange(256, dtype=np.float32) - np.float32(127.5)) / np.float32(127.5)


def rotary_frequencies(head_dim: int) -> Float32Array:
    """theta^(-4j / head_dim), float32 [head_dim / 4], rounded step by step as the official implementation does."""
    exponent = np.arange(0, head_dim // 2, 2, dtype=np.float32) / np.float32(head_dim // 2)
    frequency: Float32Array = np.float32(1.0) / np.power(np.float32(VISION_ROPE_THETA), exponent)
    return frequency


class PictureRows:
    """Rows of pictures that the tower made, for pictures that come again: the least recently used go first.

    One tenant's pictures are never served to another: answers would be the same, but their speed would tell.
    """

    def __init__(self, tower: Tower, capacity: int = PICTURE_ROWS_BYTES) -> None:
        self.config = tower.config
        self._tower = tower
        self._capacity = capacity
        self._kept: OrderedDict[tuple[bytes, bytes, bytes], Float32Array] = OrderedDict()
        self._bytes = self._encoded = self._reused = self._dropped = 0

    def steps(self, image: ImageSpan, options: CacheOptions) -> Generator[int, None, Float32Array]:
        """As `VisionTower.encode_steps`; at once if the rows are there. A picture without digest is always encoded."""
        key = (options.scope, options.salt, image.digest)
        if image.digest and options.read and key in self._kept:
            self._kept.move_to_end(key)
            self._reused += 1
            return self._kept[key]
        rows = yield from self._tower.encode_steps(image.pixels)
        self._encoded += 1
        if image.digest and options.write:
            self._keep(key, rows)
        return rows

    def _keep(self, key: tuple[bytes, bytes, bytes], rows: Float32Array) -> None:
        if rows.nbytes > self._capacity:
            return
        old = self._kept.pop(key, None)
        self._bytes -= 0 if old is None else old.nbytes
        while self._kept and self._bytes + rows.nbytes > self._capacity:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
            self._dropped += 1
        self._kept[key] = rows
        self._bytes += rows.nbytes

    def counters(self) -> Mapping[str, int]:
        """Pictures since the start: `encoded` by the tower, `reused` without it, `dropped` for room; `kept` now, and
        the `bytes` of their rows."""
        return {
            "encoded": self._encoded,
            "reused": self._reused,
            "dropped": self._dropped,
            "kept": len(self._kept),
            "bytes": self._bytes,
        }

    def close(self) -> None:
        """Free the tower. Idempotent."""
        self._kept.clear()
        self._bytes = 0
        self._tower.close()


class Sight:
    """The pictures of one prompt. positions: rotary positions of all its tokens, int32 [tokens, 3]."""

    def __init__(self, pictures: PictureRows, prompt: Prompt, options: CacheOptions) -> None:
        """The prompt has passed `check_pictures`."""
        self.positions = rotary_positions(len(prompt.token_ids), prompt.images, pictures.config)
        self._highest = np.maximum.accumulate(self.positions.max(axis=1))
        self._pictures = pictures
        self._images = prompt.images
        self._options = options
        self._latest: tuple[ImageSpan, Float32Array] | None = None  # one picture may span several segments

    def rope_delta(self, position: int) -> int:
        """SequenceState.rope_delta after `position` >= 1 tokens: text goes on behind the highest position so far."""
        return int(self._highest[position - 1]) + 1 - position

    def rows_steps(self, begin: int, end: int) -> Generator[int, None, list[tuple[int, Float32Array]]]:
        """What replaces the embeddings of tokens [begin, end): (index among them, rows float32 [k, hidden]) for each
        picture there. Yields while the tower works, as `VisionTower.encode_steps`."""
        found = []
        for image in self._images:
            first, last = max(begin, image.start), min(end, image.start + image.count)
            if first >= last:
                continue
            if self._latest is None or self._latest[0] is not image:
                self._latest = image, (yield from self._pictures.steps(image, self._options))
            found.append((first - begin, self._latest[1][first - image.start : last - image.start]))
        return found
