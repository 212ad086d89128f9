"""Speed of the vision tower on this machine, beside what its processors could do in the same minute.

The yardstick is the rate of float multiply-adds from registers on all threads, taken before and after each round:
clocks and neighbours on a shared host move within minutes. A round is held against the mean of its two. Pictures and
weights are random, since speed does not depend on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine._simd import ffi, lib
from engine.config import EngineConfig, ModelConfig, VisionConfig
from engine.core import Float32Array
from engine.cpu import resolve_tier
from engine.errors import ConfigError, OutOfMemory
from engine.placement import choose_threads
from engine.vision import VisionTower, picture_flops
from engine.weights import HalfArray, LayerNorm, Linear, VisionBlock, VisionWeights, load_weights

PUBLISHED = VisionConfig(
    depth=27,
    hidden_size=1152,
    intermediate_size=4304,
    num_heads=16,
    in_channels=3,
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    num_position_embeddings=2304,
    out_hidden_size=2048,
)
"""The tower of the 35B model."""


@dataclass(frozen=True, slots=True)
class VisionSpeed:
    """One measurement. seconds: for one picture, median of the rounds; the fastest and the slowest. gflop: what the
    picture takes, a multiply-add counted twice. peak_gflop_per_s: what the processors did from registers, median.
    peak_share: a round's share of that just before and after it, median; the smallest. processor_share: processor time
    of the process over threads times seconds, median: below 1 if others used the processors too, or threads waited."""

    kind: str
    model: str
    width: int
    height: int
    patches: int
    tokens: int
    rounds: int
    tier: str
    threads: int
    seconds: float
    seconds_least: float
    seconds_most: float
    gflop: float
    gflop_per_s: float
    peak_gflop_per_s: float
    peak_share: float
    peak_share_least: float
    processor_share: float
    work_bytes: int

    def as_json(self) -> dict[str, Any]:
        """All fields, rounded to what a measurement is worth."""
        return {
            name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in asdict(self).items()
        }

    def as_text(self) -> str:
        """One line for people."""
        return (
            f"vision  {self.width} x {self.height} pixels, {self.tokens} tokens: {self.seconds:.2f} s "
            f"({self.seconds_least:.2f} to {self.seconds_most:.2f}, {self.rounds} rounds), {self.gflop_per_s:.0f} "
            f"GFLOP/s ({self.peak_share:.0%} of {self.peak_gflop_per_s:.0f} from registers, at least "
            f"{self.peak_share_least:.0%}); {self.tier}, {self.threads} threads, running {self.processor_share:.0%} of "
            f"the time"
        )


def measure_vision(
    directory: Path | None,
    config: EngineConfig,
    *,
    width: int,
    height: int,
    rounds: int,
    report: Callable[[str], None],
) -> VisionSpeed:
    """Time for one picture; directory None: the published tower with random weights (0.9 GB of memory).

    ConfigError if the sides are not whole tokens or the checkpoint has no tower; OutOfMemory.
    """
    weights = (
        random_weights(PUBLISHED) if directory is None else load_weights(directory, ModelConfig.load(directory)).vision
    )
    if weights is None:
        raise ConfigError(f"{directory}: this checkpoint has no vision tower")
    side = weights.config.token_side
    if width < side or height < side or width % side or height % side:
        raise ConfigError(f"a picture of {width} x {height} pixels, expected sides that are multiples of {side}")
    tier = resolve_tier(config.simd_tier)
    threads, cpus = choose_threads(config.threads)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    seconds: list[float] = []
    peaks: list[float] = []
    shares: list[float] = []
    running: list[float] = []
    gflop = 1e-9 * picture_flops(weights.config, height, width)
    with _pool(threads, cpus) as pool:
        tower = VisionTower(weights, tier, pool)
        try:
            peaks.append(2e-9 * lib.fm_vision_peak(tier.encode(), pool))
            for number in range(rounds):
                started, used = time.perf_counter(), time.process_time()
                rows = tower.encode(pixels)
                seconds.append(time.perf_counter() - started)
                running.append((time.process_time() - used) / (threads * seconds[-1]))
                peaks.append(2e-9 * lib.fm_vision_peak(tier.encode(), pool))
                shares.append(gflop / seconds[-1] / statistics.mean(peaks[-2:]))
                report(
                    f"round {number + 1} of {rounds}: {seconds[-1]:.2f} s, {shares[-1]:.0%} of {peaks[-2]:.0f} GFLOP/s "
                    f"before and {peaks[-1]:.0f} after it; threads ran {running[-1]:.0%} of the time"
                )
            work_bytes = tower.work_bytes(height, width) + rows.nbytes
        finally:
            tower.close()
    patches = height * width // weights.config.patch_size**2
    median = statistics.median(seconds)
    return VisionSpeed(
        kind="vision",
        model="published shape, random weights" if directory is None else str(directory),
        width=width,
        height=height,
        patches=patches,
        tokens=len(rows),
        rounds=rounds,
        tier=tier,
        threads=threads,
        seconds=median,
        seconds_least=min(seconds),
        seconds_most=max(seconds),
        gflop=gflop,
        gflop_per_s=gflop / median,
        peak_gflop_per_s=statistics.median(peaks),
        peak_share=statistics.median(shares),
        peak_share_least=min(shares),
        processor_share=statistics.median(running),
        work_bytes=work_bytes,
    )


def random_weights(vision: VisionConfig, seed: int = 0) -> VisionWeights:
    """A tower of random float16 weights; its blocks are equal, each in its own memory."""
    rng = np.random.default_rng(seed)
    hidden, merged = vision.hidden_size, vision.hidden_size * vision.spatial_merge_size**2

    def matrix(rows: int, cols: int) -> HalfArray:
        values = rng.standard_normal((rows, cols), np.float32)
        return np.multiply(values, np.float32(cols**-0.5)).astype(np.float16)

    def vector(size: int) -> Float32Array:
        return rng.standard_normal(size, np.float32) * np.float32(0.1)

    def linear(rows: int, cols: int) -> Linear:
        return Linear(matrix(rows, cols), vector(rows))

    def norm() -> LayerNorm:
        return LayerNorm(1 + vector(hidden), vector(hidden))

    def copy(layer: Linear) -> Linear:
        return Linear(layer.weight.copy(), layer.bias)

    qkv, proj = linear(3 * hidden, hidden), linear(hidden, hidden)
    fc1, fc2 = linear(vision.intermediate_size, hidden), linear(hidden, vision.intermediate_size)
    return VisionWeights(
        config=vision,
        patch_embed=linear(hidden, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2),
        table=matrix(vision.num_position_embeddings, hidden),
        blocks=tuple(
            VisionBlock(norm(), norm(), copy(qkv), copy(proj), copy(fc1), copy(fc2)) for _ in range(vision.depth)
        ),
        merger_norm=norm(),
        merger_fc1=linear(merged, merged),
        merger_fc2=linear(vision.out_hidden_size, merged),
    )


@contextmanager
def _pool(threads: int, cpus: tuple[int, ...] | None) -> Iterator[Any]:
    """Threads like those of an engine, for as long as the block runs."""
    pool = lib.fm_pool_create(threads, ffi.NULL if cpus is None else ffi.new("int[]", list(cpus)))
    if pool == ffi.NULL:
        raise OutOfMemory(f"{threads} threads could not be started")
    try:
        yield pool
    finally:
        lib.fm_pool_destroy(pool)
