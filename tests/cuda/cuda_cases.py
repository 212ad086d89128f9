"""Every CUDA kernel against a float64 reference: inputs, launches, references and bounds, for any device.

The same cases run on the CPU emulation (small shapes, odd tails) and on a real card (the shapes of the 35B model too).
A bound is stated per case from the unit roundoff U of float32, the length of the reductions and the magnitudes summed.
Needs NumPy only.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
U = 2.0**-24
EPS = 1e-6


class Device(Protocol):
    """What a case needs of a device: memory, and launches as the driver API takes them."""

    def upload(self, array: Array) -> Any: ...

    def download(self, buffer: Any) -> Array: ...

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, *arguments: object) -> None: ...


SPLIT_BOUNDS = 4.0
"""Share of the bounds, which are those of float32 sums, that products on tensor cores may use: they take activations as
two bfloat16 numbers, so that each is off by up to 2^-17."""


@dataclass(frozen=True)
class Check:
    """One output of a kernel: what it gave, what it should be, and how far apart the two may lie."""

    kernel: str
    got: Array
    expected: Array
    bound: Array | float
    flops: float = 0.0
    traffic: float = 0.0

    @property
    def error(self) -> float:
        """Largest deviation as a share of its bound; infinite if a value is not finite."""
        got = self.got.astype(np.float64)
        if not np.isfinite(got).all():
            return float("inf")
        difference = np.abs(got - self.expected)
        return float(np.max(difference / np.broadcast_to(self.bound, difference.shape))) if difference.size else 0.0

    @property
    def relative(self) -> float:
        """Root-mean-square deviation over the root mean square of the reference."""
        difference = self.got.astype(np.float64) - self.expected
        return float(np.linalg.norm(difference) / max(float(np.linalg.norm(self.expected)), 1e-300))


Run = Callable[[Device, np.random.Generator], Iterator[Check]]


@dataclass(frozen=True)
class Case:
    """A named test: ``run(device, rng)`` launches kernels and yields its checks."""

    name: str
    run: Run


def i32(value: int) -> ctypes.c_int:
    return ctypes.c_int(value)


def f32(value: float) -> ctypes.c_float:
    return ctypes.c_float(value)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def nan_like(*shape: int) -> Array:
    """An output buffer in which an element that no thread wrote stays visible."""
    return np.full(shape, np.nan, np.float32)


def sigmoid(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def silu(x: Array) -> Array:
    return np.asarray(x * sigmoid(x))


def pack_q4(rng: np.random.Generator, rows: int, cols: int) -> tuple[Array, Array]:
    """A random packed matrix (uint8 [rows/16, cols/64, 576], the layout of blocks.h) and its float64 values."""
    nibbles = rng.integers(0, 16, (rows, cols), dtype=np.uint8)
    scales = (rng.uniform(0.5, 2.0, (rows, cols // 32)) / np.sqrt(cols) / 4.6).astype(np.float16)
    # [tile, row, block, group, piece, high or low, column] -> [tile, block, group, piece, row, column]
    parts = nibbles.reshape(rows // 16, 16, cols // 64, 2, 4, 2, 4)
    quants = (parts[..., 0, :] | parts[..., 1, :] << 4).transpose(0, 2, 3, 4, 1, 5)
    tiled = scales.reshape(rows // 16, 16, cols // 64, 2).transpose(0, 2, 3, 1)
    packed = np.concatenate(
        [
            np.ascontiguousarray(tiled).view(np.uint8).reshape(rows // 16, cols // 64, 64),
            np.ascontiguousarray(quants).reshape(rows // 16, cols // 64, 512),
        ],
        axis=2,
    )
    return packed, (nibbles.astype(np.float64) - 8.0) * np.repeat(scales.astype(np.float64), 32, axis=1)


def product_bound(x: Array, w: Array) -> Array:
    """Random-walk bound of a K-term float32 dot product: 4 sqrt(K) U sum |x w|."""
    return np.asarray(4.0 * np.sqrt(x.shape[-1]) * U * (np.abs(x) @ np.abs(w).T)) + 1e-30


def matmul_q4(m: int, n: int, k: int, accumulate: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        x, (packed, w) = normal(rng, m, k), pack_q4(rng, n, k)
        start = normal(rng, m, n) if accumulate else nan_like(m, n)
        y = device.upload(start)
        device.launch(
            "matmul_q4", (ceil_div(n, 128), ceil_div(m, 64)), 256,
            device.upload(x), i32(k), device.upload(packed), y, i32(n), i32(m), i32(n), i32(k), i32(accumulate),
        )  # fmt: skip
        x64 = x.astype(np.float64)
        expected = x64 @ w.T + (start if accumulate else 0.0)
        bound = product_bound(x64, w) + (2 * U * np.abs(start) if accumulate else 0.0)
        yield Check(
            "matmul_q4", device.download(y), expected, bound, 2.0 * m * n * k, 4.0 * m * (n + k) + 0.5625 * n * k
        )

    return run


def matvec_q4(positions: int, n: int, k: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        x, (packed, w) = normal(rng, positions, k), pack_q4(rng, n, k)
        y = device.upload(nan_like(positions, n))
        device.launch(
            "matvec_q4", (min(n // 16, 65535), 1), 128,
            device.upload(x), i32(k), i32(positions), device.upload(packed), y, i32(n), i32(k),
        )  # fmt: skip
        x64 = x.astype(np.float64)
        yield Check(
            "matvec_q4", device.download(y), x64 @ w.T, product_bound(x64, w), 2.0 * positions * n * k, 0.5625 * n * k
        )

    return run


def matmul_f32(m: int, n: int, k: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        x, w = normal(rng, m, k), normal(rng, n, k, scale=k**-0.5)
        y = device.upload(nan_like(m, n))
        device.launch(
            "matmul_f32", (ceil_div(n, 32), ceil_div(m, 32)), 256,
            device.upload(x), i32(k), device.upload(w), y, i32(n), i32(m), i32(n), i32(k),
        )  # fmt: skip
        x64, w64 = x.astype(np.float64), w.astype(np.float64)
        yield Check("matmul_f32", device.download(y), x64 @ w64.T, product_bound(x64, w64), 2.0 * m * n * k)

    return run


def matmul_f16(m: int, n: int, k: int, accumulate: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        x, w, bias = normal(rng, m, k), normal(rng, n, k, scale=k**-0.5).astype(np.float16), normal(rng, n)
        start = normal(rng, m, n) if accumulate else nan_like(m, n)
        y = device.upload(start)
        device.launch(
            "matmul_f16", (ceil_div(n, 128), ceil_div(m, 64)), 256,
            device.upload(x), i32(k), device.upload(w), device.upload(bias), y, i32(n), i32(m), i32(n), i32(k),
            i32(accumulate),
        )  # fmt: skip
        x64, w64 = x.astype(np.float64), w.astype(np.float64)
        expected = x64 @ w64.T + bias + (start if accumulate else 0.0)
        bound = product_bound(x64, w64) + 4 * U * (np.abs(bias) + (np.abs(start) if accumulate else 0.0))
        yield Check("matmul_f16", device.download(y), expected, bound, 2.0 * m * n * k)

    return run


def embed_q4(tokens: int, vocabulary: int, k: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        packed, w = pack_q4(rng, vocabulary, k)
        ids = rng.integers(0, vocabulary, tokens, dtype=np.int32)
        y = device.upload(nan_like(tokens, k))
        device.launch("embed_q4", (ceil_div(k, 512), tokens), 64, device.upload(packed), device.upload(ids), y, i32(k))
        yield Check("embed_q4", device.download(y), w[ids], 1e-30, traffic=4.5625 * tokens * k)

    return run


def rmsnorm(tokens: int, heads: int, k: int, stride: int) -> Run:
    """``stride`` floats from head to head of x (the q projection keeps a gate between its heads)."""

    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        x, w = normal(rng, tokens, heads, stride, scale=3.0), normal(rng, k)
        x[0] *= 1e-3  # small enough for epsilon to count
        y = device.upload(nan_like(tokens, heads, k))
        device.launch(
            "rmsnorm", (heads, tokens), 128,
            device.upload(x), i32(heads * stride), i32(stride), device.upload(w), y, i32(heads * k), i32(k), i32(k),
            f32(EPS),
        )  # fmt: skip
        x64 = x[:, :, :k].astype(np.float64)
        expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + EPS) * w.astype(np.float64)
        bound = (np.sqrt(k) + 8) * U * np.abs(expected) + 1e-30
        yield Check("rmsnorm", device.download(y), expected, bound, traffic=8.0 * tokens * heads * k)

    return run


def gated_norm(tokens: int, heads: int, d: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        o, z, w = normal(rng, tokens, heads, d), normal(rng, tokens, heads, d, scale=2.0), normal(rng, d)
        o[0] *= 1e-3
        y = device.upload(nan_like(tokens, heads, d))
        row = i32(heads * d)
        device.launch(
            "gated_norm", (heads, tokens), 64, device.upload(o), row, device.upload(z), row, device.upload(w), y, row,
            i32(d), f32(EPS),
        )  # fmt: skip
        o64, z64 = o.astype(np.float64), z.astype(np.float64)
        expected = o64 / np.sqrt((o64**2).mean(-1, keepdims=True) + EPS) * w * silu(z64)
        bound = (np.sqrt(d) + 24) * U * np.abs(expected) + 1e-30
        yield Check("gated_norm", device.download(y), expected, bound, traffic=12.0 * tokens * heads * d)

    return run


def layernorm(tokens: int, k: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        x, w, b = normal(rng, tokens, k) + np.float32(2.0), normal(rng, k), normal(rng, k)
        x[0] *= 1e-3
        y = device.upload(nan_like(tokens, k))
        device.launch(
            "layernorm", (tokens, 1), 128, device.upload(x), device.upload(w), device.upload(b), y, i32(k), f32(EPS)
        )
        x64 = x.astype(np.float64)
        centred = x64 - x64.mean(-1, keepdims=True)
        expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS) * w + b
        bound = (np.sqrt(k) + 8) * U * (np.abs(expected) + 3.0 * np.abs(w) + np.abs(b))
        yield Check("layernorm", device.download(y), expected, bound, traffic=8.0 * tokens * k)

    return run


def rope(tokens: int, heads: int, d: int, rotary: int, sections: tuple[int, int, int]) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        half, start = rotary // 2, 100
        x = normal(rng, tokens, heads, d)
        positions = rng.integers(start, start + 300, (tokens, 3)).astype(np.int32)
        angles = np.arange(start, start + 300)[:, None] * 1e7 ** (-2.0 * np.arange(half) / rotary)
        table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
        buffer = device.upload(x)
        device.launch(
            "rope", (heads, tokens), 32,
            buffer, i32(heads * d), i32(d), device.upload(positions), device.upload(table), i32(start), i32(half),
            i32(sections[1]), i32(sections[2]),
        )  # fmt: skip
        j = np.arange(half)
        axis = np.where((j % 3 == 1) & (j < 3 * sections[1]), 1, np.where((j % 3 == 2) & (j < 3 * sections[2]), 2, 0))
        turn = table.astype(np.float64)[positions[:, axis] - start, j][:, None]
        a, b = x[..., :half].astype(np.float64), x[..., half:rotary].astype(np.float64)
        expected = x.astype(np.float64)
        expected[..., :half] = a * turn[..., 0] - b * turn[..., 1]
        expected[..., half:rotary] = b * turn[..., 0] + a * turn[..., 1]
        yield Check("rope", device.download(buffer), expected, 16 * U, traffic=8.0 * tokens * heads * rotary)

    return run


def rope_2d(tokens: int, heads: int, d: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        quarter = d // 4
        x = normal(rng, tokens, 3, heads, d)  # q, k, v: v must stay as it is
        cells = rng.integers(0, 48, (tokens, 2)).astype(np.int32)
        angles = np.arange(48)[:, None] * 1e4 ** (-2.0 * np.arange(quarter) / (d // 2))
        table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
        buffer = device.upload(x)
        device.launch(
            "rope_2d",
            (2 * heads, tokens),
            64,
            buffer,
            i32(3 * heads * d),
            i32(d),
            device.upload(cells),
            device.upload(table),
        )
        turn = table.astype(np.float64)[cells].reshape(tokens, 1, 1, d // 2, 2)
        qk = x[:, :2].astype(np.float64)
        a, b = qk[..., : d // 2], qk[..., d // 2 :]
        expected = x.astype(np.float64)
        expected[:, :2, :, : d // 2] = a * turn[..., 0] - b * turn[..., 1]
        expected[:, :2, :, d // 2 :] = b * turn[..., 0] + a * turn[..., 1]
        yield Check("rope_2d", device.download(buffer), expected, 16 * U, traffic=16.0 * tokens * heads * d)

    return run


def picture(rows: int, columns: int, side: int, k: int) -> Run:
    """Patches of 4 x 4 pixels in the order of merge blocks of 2 x 2, and the position table under them."""

    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        patch, frames = 4, 2
        pixels = rng.integers(0, 256, (rows * patch, columns * patch, 3), dtype=np.uint8)
        grid = np.indices((rows, columns)).reshape(2, rows // 2, 2, columns // 2, 2)
        cells = np.ascontiguousarray(grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2).astype(np.int32))
        patches, values = len(cells), 3 * frames * patch**2
        x, known = device.upload(nan_like(patches, values)), device.upload(cells)
        device.launch(
            "picture_patches", (patches, 1), 128,
            device.upload(pixels), known, x, i32(columns * patch), i32(3), i32(frames), i32(patch),
        )  # fmt: skip
        tiles = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)[cells[:, 0], cells[:, 1]]
        expected = np.repeat((tiles.reshape(patches, 3, 1, -1) - 127.5) / 127.5, frames, axis=2)
        yield Check("picture_patches", device.download(x), expected.reshape(patches, values), 2 * U)

        table, start = normal(rng, side, side, k).astype(np.float16), normal(rng, patches, k)
        y = device.upload(start)
        device.launch(
            "picture_positions", (patches, 1), 128,
            device.upload(table), known, y, i32(k), i32(side), i32(rows), i32(columns),
        )  # fmt: skip
        source = cells * (side - 1) / np.maximum(np.array([rows, columns]) - 1, 1)
        first = np.floor(source + 1e-9).astype(int)
        second = np.minimum(first + 1, side - 1)
        (down, over), t = (source - first).T[..., None], table.astype(np.float64)
        upper = t[first[:, 0], first[:, 1]] * (1 - over) + t[first[:, 0], second[:, 1]] * over
        lower = t[second[:, 0], first[:, 1]] * (1 - over) + t[second[:, 0], second[:, 1]] * over
        expected = start + upper * (1 - down) + lower * down
        # A coordinate is known to a few roundings of the table's side, and values of the table are below 6.
        yield Check("picture_positions", device.download(y), expected, (32 * side + 64) * U, traffic=8.0 * patches * k)

    return run


def swiglu(rows: int, inner: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        x = normal(rng, rows, 2 * inner, scale=4.0)
        y = device.upload(nan_like(rows, inner))
        device.launch(
            "swiglu", (ceil_div(inner, 128), ceil_div(rows, 4)), 128, device.upload(x), y, i32(rows), i32(inner)
        )
        x64 = x.astype(np.float64)
        expected = silu(x64[:, :inner]) * x64[:, inner:]
        yield Check(
            "swiglu", device.download(y), expected, 16 * U * np.abs(expected) + 1e-30, traffic=12.0 * rows * inner
        )

    return run


def gelu(kernel: str, count: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        x = normal(rng, count, scale=3.0)
        y = device.upload(nan_like(count))
        device.launch(kernel, (min(ceil_div(count, 256), 65535), 1), 256, device.upload(x), y, i32(count))
        x64 = x.astype(np.float64)
        if kernel == "gelu_tanh":
            expected = 0.5 * x64 * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x64 + 0.044715 * x64**3)))
            bound = 32 * U * np.maximum(np.abs(x64), 1.0)
        else:
            expected = 0.5 * x64 * (1.0 + np.array([math.erf(v) for v in x64 / np.sqrt(2.0)]))
            bound = 1.5e-7 * np.abs(x64) + 16 * U * np.maximum(np.abs(x64), 1.0)
        yield Check(kernel, device.download(y), expected, bound, traffic=8.0 * count)

    return run


def route(logits: Array, k: int) -> tuple[Array, Array]:
    """(experts, weights) of each token in float64: falling logit, the lower index first among equals."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(logits.astype(np.float64), order, axis=1)
    weights = np.exp(chosen - chosen[:, :1])
    return order.astype(np.int32), weights / weights.sum(1, keepdims=True)


def router_topk(tokens: int, experts: int, k: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        logits = normal(rng, tokens, experts + 1, scale=2.0)
        logits[::3] = np.round(logits[::3])  # many ties
        chosen = device.upload(np.full((tokens, k), -1, np.int32))
        weights = device.upload(nan_like(tokens, k))
        device.launch(
            "router_topk",
            (tokens, 1),
            128,
            device.upload(logits),
            i32(experts + 1),
            i32(experts),
            i32(k),
            chosen,
            weights,
        )
        expected_experts, expected_weights = route(logits[:, :experts], k)
        yield Check("router_topk", device.download(chosen), expected_experts, 0.5)
        yield Check("router_topk", device.download(weights), expected_weights, 16 * U)

    return run


def expert_products(tokens: int, experts: int, k: int, hidden: int, inner: int, skew: float) -> Run:
    """The whole routed path: plan, gathered product, SwiGLU, product, weighted combine with the shared expert."""

    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        logits = normal(rng, tokens, experts) + (skew * np.arange(experts) / experts).astype(np.float32)
        pairs, weights = route(logits, k)
        weights = weights.astype(np.float32)
        count = tokens * k
        slots = rng.permutation(experts).astype(np.int32)  # weights lie on the card in another order
        gate_up, down = pack_q4(rng, experts * 2 * inner, hidden), pack_q4(rng, experts * hidden, inner)
        x = normal(rng, tokens, hidden)
        device_pairs, device_slots = device.upload(pairs), device.upload(slots)
        counts, starts = device.upload(np.full(experts, -1, np.int32)), device.upload(np.full(experts, -1, np.int32))
        bound = min(count // 32 + experts, count // 64 + 2 * experts)
        tiles, tile_count = device.upload(np.full((bound, 4), -1, np.int32)), device.upload(np.full(1, -1, np.int32))
        rows, places = device.upload(np.full(count, -1, np.int32)), device.upload(np.full(count, -1, np.int32))
        device.launch("expert_count", (experts, 1), 256, device_pairs, i32(count), counts)
        device.launch("expert_plan", (1, 1), 512, counts, i32(experts), device_slots, starts, tiles, tile_count)
        device.launch("expert_scatter", (experts, 1), 256, device_pairs, i32(count), i32(k), starts, rows, places)

        flat = pairs.reshape(-1)
        order = np.argsort(flat, kind="stable")
        expected_counts = np.bincount(flat, minlength=experts)
        yield Check("expert_count", device.download(counts), expected_counts, 0.5)
        yield Check("expert_plan", device.download(starts), np.cumsum(expected_counts) - expected_counts, 0.5)
        yield Check("expert_scatter", device.download(rows), order // k, 0.5)
        yield Check("expert_scatter", device.download(places), np.argsort(order), 0.5)

        gated = device.upload(nan_like(count, 2 * inner))
        active = device.upload(nan_like(count, inner))
        routed = device.upload(nan_like(count, hidden))
        x_device, up_device, down_device = device.upload(x), device.upload(gate_up[0]), device.upload(down[0])

        def grouped(source: Any, stride: int, gather: Any, w: Any, n: int, cols: int, target: Any) -> None:
            device.launch(
                "matmul_q4_grouped", (2 * ceil_div(n, 128), bound), 128,
                source, i32(stride), gather, w, ctypes.c_uint(n // 16 * (cols // 64) * 576), target, i32(n), tiles,
                tile_count, i32(n), i32(cols),
            )  # fmt: skip

        w_up, w_down = gate_up[1].reshape(experts, 2 * inner, hidden), down[1].reshape(experts, hidden, inner)
        x64 = x.astype(np.float64)
        expert_of_row, token_of_row = flat[order], order // k

        grouped(x_device, hidden, rows, up_device, 2 * inner, hidden, gated)
        got = device.download(gated)
        expected = np.empty((count, 2 * inner))
        limit = np.empty_like(expected)
        for e in range(experts):
            mine = expert_of_row == e
            expected[mine] = x64[token_of_row[mine]] @ w_up[slots[e]].T
            limit[mine] = product_bound(x64[token_of_row[mine]], w_up[slots[e]])
        weight_bytes = 0.5625 * experts * 2 * inner * hidden
        yield Check(
            "matmul_q4_grouped",
            got,
            expected,
            limit,
            4.0 * count * inner * hidden,
            weight_bytes + 4.0 * count * 2 * inner,
        )

        device.launch("swiglu", (ceil_div(inner, 128), ceil_div(count, 4)), 128, gated, active, i32(count), i32(inner))
        a64 = device.download(active).astype(np.float64)
        grouped(active, inner, None, down_device, hidden, inner, routed)
        got = device.download(routed).astype(np.float64)
        expected, limit = np.empty((count, hidden)), np.empty((count, hidden))
        for e in range(experts):
            mine = expert_of_row == e
            expected[mine] = a64[mine] @ w_down[slots[e]].T
            limit[mine] = product_bound(a64[mine], w_down[slots[e]])
        yield Check("matmul_q4_grouped", got, expected, limit, 2.0 * count * inner * hidden, weight_bytes / 2)

        residual, shared, gate = normal(rng, tokens, hidden), normal(rng, tokens, hidden), normal(rng, tokens, 3)
        total = device.upload(residual)
        device.launch(
            "moe_combine", (ceil_div(hidden, 128), tokens), 128,
            total, routed, device.upload(weights), places, i32(k), device.upload(shared), device.upload(gate), i32(3),
            i32(hidden),
        )  # fmt: skip
        chosen = got[np.argsort(order)].reshape(tokens, k, hidden)
        parts = weights.astype(np.float64)[:, :, None] * chosen
        opened = sigmoid(gate[:, :1].astype(np.float64)) * shared
        expected = residual + parts.sum(1) + opened
        limit = (k + 8) * U * (np.abs(residual) + np.abs(parts).sum(1) + np.abs(opened))
        yield Check("moe_combine", device.download(total), expected, limit, traffic=4.0 * tokens * hidden * (k + 3))

    return run


def conv1d(tokens: int, channels: int, stride: int) -> Run:
    """``stride`` floats from row to row of the inputs (a gate's projection lies beside them)."""

    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        rows, w, window = normal(rng, tokens, stride), normal(rng, 4, channels), normal(rng, 3, channels)
        u = rows[:, :channels]
        c, after = device.upload(nan_like(tokens, channels)), device.upload(nan_like(3, channels))
        device_u, device_window = device.upload(rows), device.upload(window)
        blocks = ceil_div(channels, 128)
        device.launch(
            "conv1d_silu", (blocks, ceil_div(tokens, 16)), 128,
            device_u, i32(stride), device.upload(w), device_window, c, i32(tokens), i32(channels),
        )  # fmt: skip
        device.launch(
            "conv1d_window", (blocks, 1), 128, device_u, i32(stride), device_window, after, i32(tokens), i32(channels)
        )
        padded = np.concatenate([window, u]).astype(np.float64)
        taps = np.stack([padded[j : j + tokens] * w[j] for j in range(4)])
        expected = silu(taps.sum(0))
        bound = 16 * U * (np.abs(taps).sum(0) + np.abs(expected))
        yield Check("conv1d_silu", device.download(c), expected, bound, traffic=8.0 * tokens * channels)
        yield Check("conv1d_window", device.download(after), padded[-3:], 1e-30)

    return run


def delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, cuts: tuple[int, ...]
) -> tuple[Array, Array, list[Array]]:
    """The recurrence of the model, token by token in float64: (outputs, final state, states after ``cuts`` tokens)."""
    s = state.astype(np.float64).copy()
    outputs, states = np.empty_like(v), []
    for t in range(q.shape[0]):
        s *= np.exp(g[t])[:, None, None]
        update = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", s, k[t]))
        s += k[t][:, :, None] * update[:, None, :]
        outputs[t] = np.einsum("hkv,hk->hv", s, q[t])
        if t + 1 in cuts:
            states.append(s.copy())
    return outputs, s, states


def gated_delta(tokens: int, key_heads: int, value_heads: int, d: int, cuts: tuple[int, ...]) -> Run:
    """``cuts``: token counts after which a snapshot is taken; chunks start there and every 32 tokens after it."""

    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        channels = (2 * key_heads + value_heads) * d
        qkv = normal(rng, tokens, channels)
        qkv[0] *= 1e-3
        ab = normal(rng, tokens, 2 * value_heads, scale=2.0)
        minus_a = -rng.uniform(0.05, 16.0, value_heads).astype(np.float32)
        dt_bias = normal(rng, value_heads, scale=2.0) - np.float32(2.0)
        state = normal(rng, value_heads, d, d, scale=0.1)
        chunks, start = [], 0
        for snapshot, cut in enumerate((*cuts, tokens)):
            while start < cut:
                count = min(32, cut - start)
                start += count
                chunks.append((start - count, count, snapshot if start == cut and cut != tokens else -1, 0))
        work_size = 4 * 32 * d + 32 * 32 + 32
        device_chunks = device.upload(np.array(chunks, np.int32))
        work = device.upload(nan_like(len(chunks), value_heads, work_size))
        buffer = device.upload(ab)
        a = buffer
        b = device.upload(np.ascontiguousarray(ab.reshape(-1)[value_heads:]))  # the same rows, seen from column Hv
        device_state, snapshots = device.upload(state), device.upload(nan_like(max(len(cuts), 1), value_heads, d, d))
        o = device.upload(nan_like(tokens, value_heads, d))
        device.launch(
            f"gated_delta_chunk_{d}", (len(chunks), value_heads), 256,
            device.upload(qkv), i32(channels), a, b, i32(2 * value_heads), device.upload(minus_a),
            device.upload(dt_bias), device_chunks, i32(key_heads), f32(EPS), work,
        )  # fmt: skip
        device.launch(
            f"gated_delta_scan_{d}", (ceil_div(d, 32), value_heads), 256,
            work, device_chunks, i32(len(chunks)), device_state, snapshots, o,
        )  # fmt: skip
        x = qkv.astype(np.float64)
        q = x[:, : key_heads * d].reshape(tokens, key_heads, d)
        k = x[:, key_heads * d : 2 * key_heads * d].reshape(tokens, key_heads, d)
        v = x[:, 2 * key_heads * d :].reshape(tokens, value_heads, d)
        q = q / np.sqrt((q**2).sum(-1, keepdims=True) + EPS) * d**-0.5
        k = k / np.sqrt((k**2).sum(-1, keepdims=True) + EPS)
        q, k = (np.repeat(m, value_heads // key_heads, axis=1) for m in (q, k))
        alpha, beta = ab[:, :value_heads].astype(np.float64), sigmoid(ab[:, value_heads:].astype(np.float64))
        g = minus_a.astype(np.float64) * np.logaddexp(0.0, alpha + dt_bias)
        expected, final, states = delta_rule(q, k, v, g, beta, state, cuts)
        flops = 2.0 * tokens * value_heads * d * (3 * d + 32)
        limit = 256 * U * max(1.0, float(np.abs(expected).max()))
        yield Check(f"gated_delta_scan_{d}", device.download(o), expected, limit, flops)
        limit = 256 * U * max(1.0, float(np.abs(final).max()))
        yield Check(f"gated_delta_scan_{d}", device.download(device_state), final, limit)
        for snapshot, expected_state in enumerate(states):
            yield Check(f"gated_delta_chunk_{d}", device.download(snapshots)[snapshot], expected_state, limit)

    return run


def attention_causal(tokens: int, position: int, kv_heads: int, group: int, d: int, pages_f32: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        heads, length = kv_heads * group, position + tokens
        element = np.float32 if pages_f32 else np.float16
        page_count = ceil_div(length, 64)
        pages = np.full((page_count, 2, kv_heads, 64, d), np.nan, element)
        past = normal(rng, 2, kv_heads, position, d).astype(element)
        for n in range(position):
            pages[n // 64, :, :, n % 64] = past[:, :, n]
        qg = normal(rng, tokens, heads, 2, d)  # query and gate of a head lie side by side, as q_proj gives them
        kv = normal(rng, 2, tokens, kv_heads, d)
        buffers = [device.upload(page) for page in pages]
        table = device.upload(np.array([buffer.address for buffer in buffers], np.uint64))
        device.launch(
            "kv_store", (kv_heads, tokens), 64,
            device.upload(kv[0]), device.upload(kv[1]), i32(kv_heads * d), table, i32(position), i32(d), i32(pages_f32),
        )  # fmt: skip
        new = kv.transpose(0, 2, 1, 3).astype(element)
        for n in range(tokens):
            pages[(position + n) // 64, :, :, (position + n) % 64] = new[:, :, n]
        stored = np.stack([device.download(buffer) for buffer in buffers])
        yield Check("kv_store", np.nan_to_num(stored), np.nan_to_num(pages.astype(np.float64)), 1e-30)

        qg_device = device.upload(qg)
        gate = device.upload(np.ascontiguousarray(qg.reshape(-1)[d:]))
        y = device.upload(nan_like(tokens, heads, d))
        row, head = i32(heads * 2 * d), i32(2 * d)
        device.launch(
            f"attention_causal_{d}", (ceil_div(tokens * group, 32), kv_heads), 256,
            qg_device, row, head, gate, row, head, table, i32(pages_f32), i32(position), i32(tokens), i32(group),
            f32(d**-0.5), y,
        )  # fmt: skip
        keys, values = np.concatenate([past, new], axis=2).astype(np.float64)
        expected = np.empty((tokens, heads, d))
        unseen = np.arange(length)[None] > position + np.arange(tokens)[:, None]
        for h in range(heads):
            scores = qg[:, h, 0].astype(np.float64) @ keys[h // group].T * d**-0.5
            scores[unseen] = -np.inf
            p = np.exp(scores - scores.max(1, keepdims=True))
            expected[:, h] = p / p.sum(1, keepdims=True) @ values[h // group]
        expected *= sigmoid(qg[:, :, 1].astype(np.float64))
        flops = 4.0 * heads * d * tokens * (position + tokens / 2)
        yield Check(f"attention_causal_{d}", device.download(y), expected, 8 * np.sqrt(d) * U, flops)

    return run


def attention_full(tokens: int, heads: int, d: int) -> Run:
    def run(device: Device, rng: np.random.Generator) -> Iterator[Check]:
        qkv = normal(rng, tokens, 3, heads, d)
        y = device.upload(nan_like(tokens, heads, d))
        device.launch(
            f"attention_full_{d}", (ceil_div(tokens, 32), heads), 256, device.upload(qkv), i32(tokens), f32(d**-0.5), y
        )
        q, k, v = qkv.astype(np.float64).transpose(1, 2, 0, 3)
        scores = q @ k.transpose(0, 2, 1) * d**-0.5
        p = np.exp(scores - scores.max(-1, keepdims=True))
        expected = (p / p.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)
        flops = 4.0 * heads * d * tokens * tokens
        yield Check(f"attention_full_{d}", device.download(y), expected, 8 * np.sqrt(d) * U, flops)

    return run


SMALL = (
    Case("matmul_q4-M1-N16-K64", matmul_q4(1, 16, 64, 0)),
    Case("matmul_q4-M67-N144-K192-accumulate", matmul_q4(67, 144, 192, 1)),
    Case("matmul_q4-M130-N256-K128", matmul_q4(130, 256, 128, 0)),
    Case("matvec_q4-P1-N48-K64", matvec_q4(1, 48, 64)),
    Case("matvec_q4-P4-N80-K320", matvec_q4(4, 80, 320)),
    Case("matmul_f32-M67-N65-K192", matmul_f32(67, 65, 192)),
    Case("matmul_f32-M1-N1-K64", matmul_f32(1, 1, 64)),
    Case("matmul_f32-M33-N32-K128", matmul_f32(33, 32, 128)),
    Case("matmul_f16-M66-N131-K80", matmul_f16(66, 131, 80, 0)),
    Case("matmul_f16-M5-N48-K16-accumulate", matmul_f16(5, 48, 16, 1)),
    Case("embed_q4-T7-K576", embed_q4(7, 48, 576)),
    Case("rmsnorm-T5-K70", rmsnorm(5, 1, 70, 70)),
    Case("rmsnorm-T3-heads4-K256", rmsnorm(3, 4, 256, 512)),
    Case("rmsnorm-T2-K1100", rmsnorm(2, 1, 1100, 1100)),
    Case("gated_norm-T5-D128", gated_norm(5, 3, 128)),
    Case("gated_norm-T3-D16", gated_norm(3, 4, 16)),
    Case("layernorm-T4-K150", layernorm(4, 150)),
    Case("rope-D256-R64", rope(5, 3, 256, 64, (11, 11, 10))),
    Case("rope-D32-R8", rope(5, 2, 32, 8, (2, 1, 1))),
    Case("rope-D64-R22-uneven-sections", rope(5, 2, 64, 22, (6, 3, 2))),
    Case("rope_2d-D72", rope_2d(6, 2, 72)),
    Case("rope_2d-D12", rope_2d(6, 4, 12)),
    Case("picture-6x10", picture(6, 10, 7, 130)),
    Case("picture-1x1-token", picture(2, 2, 5, 48)),
    Case("swiglu-R9-I130", swiglu(9, 130)),
    Case("gelu_tanh-1000", gelu("gelu_tanh", 1000)),
    Case("gelu_erf-1000", gelu("gelu_erf", 1000)),
    Case("router_topk-E8-k2", router_topk(9, 8, 2)),
    Case("router_topk-E130-k8", router_topk(7, 130, 8)),
    Case("experts-T40-E8-k2", expert_products(40, 8, 2, 64, 64, 0.0)),
    Case("experts-T70-E5-k3-skewed", expert_products(70, 5, 3, 128, 64, 6.0)),
    Case("experts-T150-E5-k2", expert_products(150, 5, 2, 64, 64, 0.0)),
    Case("conv1d-T37-C130", conv1d(37, 130, 150)),
    Case("conv1d-T1-C64", conv1d(1, 64, 64)),
    Case("conv1d-T2-C64", conv1d(2, 64, 96)),
    Case("gated_delta-T70-D128", gated_delta(70, 1, 2, 128, ())),
    Case("gated_delta-T75-D16-snapshots", gated_delta(75, 2, 4, 16, (32, 50))),
    Case("gated_delta-T33-D32", gated_delta(33, 2, 2, 32, (1,))),
    Case("attention_causal-T70-D256-f16", attention_causal(70, 0, 1, 2, 256, 0)),
    Case("attention_causal-T5-past130-D256-f32", attention_causal(5, 130, 2, 8, 256, 1)),
    Case("attention_causal-T67-past3-D32", attention_causal(67, 3, 2, 2, 32, 1)),
    Case("attention_causal-T9-past60-D64", attention_causal(9, 60, 1, 4, 64, 0)),
    Case("attention_causal-T9-past60-D128", attention_causal(9, 60, 1, 4, 128, 0)),
    Case("attention_full-T70-D72", attention_full(70, 2, 72)),
    Case("attention_full-T33-D12", attention_full(33, 4, 12)),
)
"""Odd tails and both sides of every boundary; the emulation runs all of them in seconds."""

REAL = (
    Case("matmul_q4-qkv-947", matmul_q4(947, 8192, 2048, 0)),
    Case("matmul_q4-out-947", matmul_q4(947, 2048, 4096, 1)),
    Case("matvec_q4-head-tenth", matvec_q4(1, 24832, 2048)),
    Case("matmul_f32-router-947", matmul_f32(947, 129, 2048)),
    Case("matmul_f16-vision-fc1", matmul_f16(1024, 4304, 1152, 0)),
    Case("matmul_f16-vision-fc2", matmul_f16(1024, 1152, 4304, 1)),
    Case("embed_q4-947", embed_q4(947, 4096, 2048)),
    Case("rmsnorm-947", rmsnorm(947, 1, 2048, 2048)),
    Case("rmsnorm-q-947", rmsnorm(947, 16, 256, 512)),
    Case("gated_norm-947", gated_norm(947, 32, 128)),
    Case("layernorm-1024", layernorm(1024, 1152)),
    Case("rope-947", rope(947, 16, 256, 64, (11, 11, 10))),
    Case("rope_2d-1024", rope_2d(1024, 16, 72)),
    Case("picture-1024-tokens", picture(64, 64, 48, 1152)),
    Case("swiglu-7576", swiglu(7576, 512)),
    Case("router_topk-947", router_topk(947, 128, 8)),
    Case("experts-947-E16", expert_products(118, 16, 8, 2048, 512, 1.0)),
    Case("conv1d-947", conv1d(947, 8192, 12288)),
    Case("gated_delta-947", gated_delta(947, 16, 32, 128, (512,))),
    Case("attention_causal-947", attention_causal(947, 0, 2, 8, 256, 0)),
    Case("attention_causal-200-past1000", attention_causal(200, 1000, 2, 8, 256, 0)),
    Case("attention_full-1024", attention_full(1024, 16, 72)),
)
"""The shapes of the 35B model at a prompt of 947 tokens, for a card."""
