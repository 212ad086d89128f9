"""The vision tower on a CUDA card: its rows against those of the CPU's tower, and times at the size of the 35B model.

    python tests/kernels/device_vision.py [--width 1024] [--height 1024] [--newest 20 1000] [--profile]
    python tests/kernels/device_vision.py --checkpoint DIR [--gpu-memory-mib 5325]

Needs the project with its native build, and an NVIDIA driver; weights are random. --checkpoint: a text model (`fermion
bench make-synthetic DIR`) whose prompts share the card's memory with the tower; the second form also shows that prompts
and pictures do not disturb each other. Exits with 1 if rows deviate. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
from device_prefill import FLOP_SHARE, REPEATS, ProfiledCard, copy_rate, fma_peak, run
from device_prefill_check import deviation

from engine.config import EngineConfig, ModelConfig, VisionConfig
from engine.core import Float32Array, UInt8Array
from engine.cpu import resolve_tier
from engine.cuda_driver import CudaCard, modules_for
from engine.gpu import PTX, GpuPrefill, IdleMemory, lock_experts, make_plan
from engine.gpu_vision import CardTower, _moved, open_tower, plan_tower
from engine.model import Model
from engine.placement import choose_threads
from engine.vision import Tower, VisionTower, picture_flops
from engine.vision_bench import PUBLISHED, _pool, random_weights
from engine.weights import VisionWeights, load_weights

TOLERANCE = 1e-4  # of the rows' scale
TINY = VisionConfig(
    depth=2, hidden_size=48, intermediate_size=96, num_heads=4, in_channels=3, patch_size=16, temporal_patch_size=2,
    spatial_merge_size=2, num_position_embeddings=64, out_hidden_size=80,
)  # fmt: skip
SHAPES = {
    "heads of 12": TINY,
    "heads of 72": dataclasses.replace(TINY, hidden_size=144, intermediate_size=528, num_heads=2),
    "published": dataclasses.replace(PUBLISHED, depth=3),
}
SIZES = ((32, 32), (96, 160), (224, 64), (32, 480), (320, 512))  # height, width
KERNELS = {"attention_full.ptx", "gelu.ptx", "layernorm.ptx", "matmul_f16.ptx", "picture.ptx", "rope_2d.ptx"}
NOTHING_IDLE = IdleMemory(0, 0, (), 0)
OWN_BYTES = 2 << 30  # at most


def picture(height: int, width: int, seed: int) -> UInt8Array:
    """Noise over slopes."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    slopes = np.stack([x + 2 * y, 3 * x - y, x * y // 16], axis=-1) % 200
    return (slopes + rng.integers(0, 56, (height, width, 3))).astype(np.uint8)


def tower_weights(shape: VisionConfig, seed: int) -> VisionWeights:
    """Random ones in pages of their own, as those of a mapped file are."""
    return _moved(random_weights(shape, seed))


def on_card(card: CudaCard, cpu: VisionTower, weights: VisionWeights) -> CardTower:
    """The tower in memory of its own."""
    plan = plan_tower(weights, NOTHING_IDLE, min(card.free_bytes(), OWN_BYTES))
    return CardTower(weights, cpu, card, NOTHING_IDLE, plan)


def check_rows(newest: int, tier: str, pool: object) -> int:
    """Failures: shapes whose rows deviate, or differ when a picture comes again after others."""
    failures = 0
    for name, shape in SHAPES.items():
        weights, card = tower_weights(shape, 3), CudaCard(PTX, newest=newest)
        try:
            cpu = VisionTower(weights, tier, pool)
            tower, found, again = on_card(card, cpu, weights), [], []
            pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
            first = [tower.encode(pixels) for pixels in pictures]
            for pixels, rows in zip(pictures, first, strict=True):
                found.append(deviation(rows, cpu.encode(pixels)))
                again.append(np.array_equal(tower.encode(pixels), rows))
            failed = not max(found) < TOLERANCE or not all(again)
            failures += failed
            print(
                f"rows, {name}: {', '.join(f'{value:.1e}' for value in found)} of scale from the CPU, the same bits "
                f"again: {all(again)}{'  FAILED' if failed else ''}",
                flush=True,
            )
            tower.close()
        finally:
            card.close()
    return failures


def timed(tower: Tower, pixels: UInt8Array) -> tuple[list[float], Float32Array]:
    """Milliseconds of each of REPEATS encodings after one that warms up, from pixels in memory to rows in memory."""
    rows, times = tower.encode(pixels), []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        rows = tower.encode(pixels)
        times.append((time.perf_counter() - begin) * 1e3)
    return times, rows


def report(what: str, times: list[float], moved: int, flops: float, rate: float, peak: float) -> None:
    """One line beside what arithmetic and copies would take at the least."""
    best = min(times)
    floor, copies = flops / peak / FLOP_SHARE * 1e3, moved / rate * 1e3 if rate else float("nan")
    print(
        f"{what}: best {best:.1f} ms, median {np.median(times):.1f} ms, {flops / best / 1e9:.1f} TFLOP/s "
        f"({flops / best / 1e-3 / peak:.0%} of the measured float32 peak); floors: float32 at {FLOP_SHARE:.0%} of peak "
        f"{floor:.1f} ms ({floor / best:.0%} of the time), {moved / 2**20:.0f} MiB moved {copies:.1f} ms",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--newest", type=int, nargs="+", default=[20, 1000], help="20: the kernels for Fermi")
    parser.add_argument("--profile", action="store_true", help="time by kernel, one after the other")
    parser.add_argument("--checkpoint", type=Path, help="a text model to share the card with")
    parser.add_argument("--gpu-memory-mib", type=int, default=5325, help="with --checkpoint; a C2075 with ECC: 5325")
    options = parser.parse_args()
    tier, (threads, cpus) = resolve_tier("auto"), choose_threads(None)
    probe = CudaCard(PTX)
    rate, peak, capability = copy_rate(probe), fma_peak(), 10 * probe.capability[0] + probe.capability[1]
    print(f"{probe.name}: copies {rate / 1e9:.1f} GB/s page-locked, multiply-adds {peak / 1e12:.1f} TFLOP/s")
    result: dict[str, object] = {"card": probe.name, "pinned_bytes_per_s": rate, "fma_flop_per_s": peak, "ms": {}}
    probe.close()
    pixels = picture(options.height, options.width, 9)
    flops = picture_flops(PUBLISHED, options.height, options.width)
    builds: dict[tuple[Path, ...], int] = {}
    for newest in options.newest:
        used = tuple(path for path in modules_for(PTX, min(newest, capability)) if path.name in KERNELS)
        if used in builds:
            print(f"kernels for {newest}: the tower's are those for {builds[used]}")
        builds.setdefault(used, newest)
    result |= {"tokens": pixels.size // 3 // 1024, "tflop": flops / 1e12}
    weights = tower_weights(PUBLISHED, 0)
    failures = 0
    with _pool(threads, cpus) as pool:
        cpu = VisionTower(weights, tier, pool)
        begin = time.perf_counter()
        expected = cpu.encode(pixels)
        print(f"on the CPU: {(time.perf_counter() - begin) * 1e3:.0f} ms, {threads} threads, {tier}", flush=True)
        for newest in builds.values():
            print(f"kernels for {newest}")
            failures += check_rows(newest, tier, pool)
            card = ProfiledCard(PTX, newest) if options.profile else CudaCard(PTX, newest=newest)
            try:
                tower = on_card(card, VisionTower(weights, tier, pool), weights)
                if isinstance(card, ProfiledCard):
                    tower.encode(pixels)
                    card.seconds.clear()
                times, rows = timed(tower, pixels)
                apart = deviation(rows, expected)
                failures += not apart < TOLERANCE
                moved = tower.travelling_bytes + pixels.nbytes + rows.nbytes
                what = f"{options.width} x {options.height} pixels, {len(rows)} tokens, {apart:.1e} from the CPU"
                report(what, times, moved, flops, rate, peak)
                result["ms"] |= {newest: times}  # type: ignore[operator]
                result |= {"moved_bytes": moved, f"deviation_{newest}": apart}
                if isinstance(card, ProfiledCard):
                    for kernel, seconds in sorted(card.seconds.items(), key=lambda item: -item[1]):
                        print(f"  {kernel:24s} {seconds / (REPEATS + 1) * 1e3:9.2f} ms")
                tower.close()
            finally:
                card.close()
        cpu.close()
    if options.checkpoint is not None:
        failures += beside_prompts(options.checkpoint, options.gpu_memory_mib << 20, pixels, expected, result)
        report("beside prompts", result["ms_beside_prompts"], moved, flops, rate, peak)  # type: ignore[arg-type]
    print("FAILED" if failures else "ok")
    print(json.dumps(result))
    return 1 if failures else 0


def beside_prompts(
    checkpoint: Path, memory: int, pixels: UInt8Array, expected: Float32Array, result: dict[str, object]
) -> int:
    """The tower in the memory of a text model's prompts; failures."""
    text = load_weights(checkpoint, ModelConfig.load(checkpoint))
    threads, cpus = choose_threads(None)
    card = CudaCard(PTX)
    plan = make_plan(text, False, card.free_bytes(), 4160, memory)
    text, locked = lock_experts(text, plan, card)
    model = Model(text, EngineConfig(device="cpu"), threads=threads, cpus=cpus, max_context=4160)
    try:
        gpu, weights = GpuPrefill(text, model.cpu, card, plan, locked=locked), tower_weights(PUBLISHED, 0)
        cpu = VisionTower(weights, model.cpu.tier, model.cpu.pool)
        tower, decided = open_tower(weights, cpu, gpu, memory)
        assert isinstance(tower, CardTower), "there is no room for the tower"
        print(f"plan: {plan}; tower{decided}, {tower.plan.own_bytes / 2**20:.0f} MiB of its own")
        ids = np.random.default_rng(0).integers(0, text.config.vocab_size, 947).astype(np.int32)
        before = run(gpu, model.new_state(), ids)
        times, rows = timed(tower, pixels)
        after = run(gpu, model.new_state(), ids)
        result |= {"plan": str(plan), "tower_patches": tower.plan.patches, "ms_beside_prompts": times}
        apart, same = deviation(rows, expected), np.array_equal(before, after)
        print(f"beside prompts: {apart:.1e} from the CPU; a prompt before and after has the same logits: {same}")
        tower.close()
        return int(not apart < TOLERANCE) + int(not same)
    finally:
        card.close()
        model.close()


if __name__ == "__main__":
    sys.exit(main())
