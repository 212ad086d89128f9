"""Whole-model prefill on a CUDA card: times with the state's hand-over, floors, and agreement with the CPU engine.

    fermion bench make-synthetic DIR [--layers N]
    python tests/kernels/device_prefill.py DIR [--tokens 947 4096] [--gpu-memory-mib 5325] [--check] [--profile]

Needs the installed project (`make setup`) and an NVIDIA driver. --check unpacks the model to float32 on the CPU: use
few layers. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from engine.config import EngineConfig, ModelConfig
from engine.core import Float32Array, Int32Array
from engine.cuda_driver import Argument, CudaCard
from engine.gpu import PTX, GpuPrefill, lock_experts, make_plan
from engine.model import Model, text_positions
from engine.placement import choose_threads
from engine.state import SequenceState
from engine.weights import Weights, load_weights

REPEATS = 3
COPY_BYTES = 256 << 20
TOLERANCE = 1e-4  # of the logits' scale


class ProfiledCard(CudaCard):
    """Waits for every kernel and adds up its time."""

    def __init__(self, ptx: Path) -> None:
        super().__init__(ptx)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, *arguments: Argument) -> None:
        begin = time.perf_counter()
        super().launch(kernel, grid, threads, *arguments)
        self.finish(self.mark())
        self.seconds[kernel] += time.perf_counter() - begin


def run(gpu: GpuPrefill, state: SequenceState, ids: Int32Array) -> Float32Array:
    """Logits behind a segment."""
    steps = gpu.advance_steps(state, ids, text_positions(state.position, len(ids)))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return gpu._cpu.logits(end.value)


def copy_rate(card: CudaCard) -> float:
    """Bytes per second from page-locked memory to the card; 0 if none can be locked."""
    array = np.ones(COPY_BYTES, np.uint8)
    if not card.pin(array):
        return 0.0
    target, best = card.allocate(COPY_BYTES), float("inf")
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        card.write(target, array)
        best = min(best, time.perf_counter() - begin)
    return COPY_BYTES / best


def check(weights: Weights, model: Model, gpu: GpuPrefill, ids: Int32Array) -> dict[str, float | bool]:
    """Against the CPU engine, and a resumed prefill against an uncut one."""
    state, reference = model.new_state(), model.new_state()
    expected, got = model.prefill(reference, ids), run(gpu, state, ids)
    halves, cut = model.new_state(), max(64, len(ids) // 2 // 64 * 64)
    run(gpu, halves, ids[:cut])
    resumed = run(gpu, halves, ids[cut:])
    same = True
    logits = {"cpu": expected, "gpu": got}
    for _ in range(8):
        tokens = {name: int(np.argmax(row)) for name, row in logits.items()}
        same &= tokens["cpu"] == tokens["gpu"]
        logits = {"cpu": model.decode(reference, tokens["cpu"]), "gpu": model.decode(state, tokens["gpu"])}
    return {
        "deviation": float(np.abs(got - expected).max() / np.abs(expected).max()),
        "same_greedy_tokens": same,
        "resumed_is_bit_equal": bool(np.array_equal(resumed, got)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[947, 4096])
    parser.add_argument("--gpu-memory-mib", type=int, help="as on a smaller card (C2075 with ECC: 5325)")
    parser.add_argument("--check", action="store_true", help="compare with the CPU engine in float32")
    parser.add_argument("--profile", action="store_true", help="time by kernel, one after the other")
    options = parser.parse_args()
    weights = load_weights(options.checkpoint, ModelConfig.load(options.checkpoint))
    context = max(options.tokens) + 64
    config = EngineConfig(compute="f32" if options.check else "w4a8", device="cpu")
    threads, cpus = choose_threads(None)
    model = Model(weights, config, threads=threads, cpus=cpus, max_context=context)
    probe = CudaCard(PTX)
    result: dict[str, object] = {"card": probe.name, "pinned_bytes_per_s": copy_rate(probe)}
    probe.close()
    card = ProfiledCard(PTX) if options.profile else CudaCard(PTX)
    limit = None if options.gpu_memory_mib is None else options.gpu_memory_mib << 20
    plan = make_plan(weights, model.cpu.kv_f32, card.free_bytes(), context, limit)
    weights, locked = lock_experts(weights, plan, card)
    gpu = GpuPrefill(weights, model.cpu, card, plan, locked=locked)
    print(f"{card.name}: {gpu.plan}")
    travelling = [layer.moe for i, layer in enumerate(weights.layers) if i not in gpu.plan.resident]
    travel = sum(moe.experts_gate_up.data.nbytes + moe.experts_down.data.nbytes for moe in travelling)
    result |= {"plan": str(gpu.plan), "travelling_bytes": travel, "prefill_s": {}}
    rng = np.random.default_rng(0)
    failed = False
    for tokens in options.tokens:
        ids = rng.integers(0, weights.config.vocab_size, tokens).astype(np.int32)
        run(gpu, model.new_state(), ids)
        if isinstance(card, ProfiledCard):
            card.seconds.clear()
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            run(gpu, model.new_state(), ids)
            times.append(time.perf_counter() - begin)
        passes = -(-tokens // gpu.plan.pass_tokens)
        print(f"{tokens} tokens: {min(times) * 1e3:.1f} ms in {passes} passes, {tokens / min(times):.0f} tokens/s")
        result["prefill_s"] |= {tokens: min(times)}  # type: ignore[operator]
        if isinstance(card, ProfiledCard):
            for kernel, seconds in sorted(card.seconds.items(), key=lambda item: -item[1]):
                print(f"  {kernel:24s} {seconds / REPEATS * 1e3:9.2f} ms")
        if options.check:
            found = check(weights, model, gpu, ids)
            print(f"  {found}")
            failed |= not (
                found["deviation"] < TOLERANCE and found["same_greedy_tokens"] and found["resumed_is_bit_equal"]
            )
            result |= {f"check_{tokens}": found}
    gpu.close()
    model.close()
    print(json.dumps(result))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
