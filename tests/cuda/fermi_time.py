"""Predicts the prefill time of the 35B model (128 experts, 4-bit) on a Tesla C2075. A prediction: no card was at hand.

    python tests/cuda/fermi_time.py [--tokens 947] [--efficiency 0.8] [--json]

What it rests on
- Matrix products: instructions of the real sm_20 loop (assembler of driver 390.157), times tiles with their padding.
  A multiprocessor issues one warp instruction per hot clock; conversions, shifts and integer products take two; a
  64-bit shared load occupies the load/store units for four, one of 128 bits for sixteen, since NVIDIA's guide has most
  of them collide two ways. The slowest of the three sets the bound.
- Of that bound, compiled code reaches ISSUE_EFFICIENCY. MAGMA's CUDA C on the same chip reached 63 % of peak (Nath,
  Tomov, Dongarra 2010), hand-written assembly about 90 % of its own bound (Lai and Seznec, CGO 2013); 0.80 lies
  between.
- Attention and delta rule: multiply-adds by formula over the share of FFMA in the loops that do them.
- Everything else moves bytes at BANDWIDTH (144 GB/s less what ECC takes).
- Experts travel over PCIe at PCIE_RATE while the layer before computes; what computes faster than it travels waits.
- Routing: tokens choose experts uniformly, from a fixed seed, so the tiles' padding is that of real counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import cuda_ptx
import fermi_assembler
import fermi_code
import numpy as np

MULTIPROCESSORS, HOT_CLOCK = 14, 1.15e9
ISSUE_EFFICIENCY = 0.80
BANDWIDTH = 115e9
PCIE_RATE = 5.8e9
SHARED_CLOCKS = {"LDS": 2, "LDS.64": 4, "LDS.128": 16}
LAUNCH_SECONDS = 10e-6

HIDDEN, VOCABULARY, DELTA_LAYERS, ATTENTION_LAYERS = 2048, 248320, 30, 10
LAYERS = DELTA_LAYERS + ATTENTION_LAYERS
EXPERTS, CHOSEN, INNER = 128, 8, 512
EXPERT_BYTES = (2 * INNER * HIDDEN + HIDDEN * INNER) * 0.5625
CHUNK = 32


@dataclass(frozen=True)
class Step:
    """One kernel launch of a layer, or several alike: what it is and its predicted seconds."""

    kernel: str
    what: str
    seconds: float


class Card:
    """Seconds of a C2075 for launches of the committed kernels."""

    def __init__(self, code: dict[str, fermi_code.Code], efficiency: float = ISSUE_EFFICIENCY) -> None:
        self._code = code
        self._efficiency = efficiency

    def main_loops(self, kernel: str) -> list[fermi_code.Loop]:
        """The loops of a matrix product over K, the one with the most multiply-adds last."""
        loops = [loop for loop in self._code[kernel].loops if loop.counts["FFMA"] >= 200]
        return sorted(loops, key=lambda loop: loop.counts["FFMA"])

    def clocks(self, counts: Counter[str]) -> float:
        """Hot clocks of one multiprocessor per warp that executes these instructions."""
        issue = sum(counts.values())
        shared = sum(counts[name] for name in SHARED_CLOCKS)
        arithmetic = issue - shared - counts["STS"] - counts["LD"] - counts["ST"]
        arithmetic += sum(counts[name] for name in fermi_code.HALF_RATE)
        memory = sum(clocks * counts[name] for name, clocks in SHARED_CLOCKS.items())
        memory += 2 * (counts["STS"] + counts["LD"] + counts["ST"])
        return max(issue, arithmetic, memory) / self._efficiency

    def product(self, kernel: str, blocks: int, warps: int, k: float, loop: int = -1) -> float:
        """Seconds of `blocks` tiles over k columns; the last round of blocks may leave multiprocessors idle."""
        body = self.main_loops(kernel)[loop]
        once = len(self._code[kernel].operations) - sum(other.size for other in self.main_loops(kernel))
        per_block = warps * (self.clocks(body.counts) * k / 16 + once / self._efficiency)
        return -(-blocks // MULTIPROCESSORS) * per_block / HOT_CLOCK

    def multiply_adds(self, kernel: str, count: float) -> float:
        """Seconds of `count` multiply-adds at the FFMA share of the kernel's inner loops."""
        loops = [loop for loop in self._code[kernel].loops if loop.counts["FFMA"] >= 16]
        share = min(loop.ffma_share for loop in loops)
        return count / 32 / share / self._efficiency / MULTIPROCESSORS / HOT_CLOCK

    def dense(self, what: str, m: int, n: int, k: int, kernel: str = "matmul_q4") -> Step:
        """y[m, n] over k columns, in tiles of 64 x 128 (float32: 32 x 32, 64 columns at a time)."""
        if kernel == "matmul_f32":
            return Step(kernel, what, self.product(kernel, -(-m // 32) * -(-n // 32), 8, k / 4))
        return Step(kernel, what, self.product(kernel, -(-m // 64) * -(-n // 128), 8, k))

    def grouped(self, what: str, rows: np.ndarray[tuple[int], np.dtype[np.int64]], n: int, k: int) -> Step:
        """The experts' product: rows of each expert in tiles of 64 rows and columns, the rest in one or two of 32 or 16
        rows and 128 columns where those cost less."""
        rest = rows % 64
        tall = int((rows // 64).sum() + (rest > 48).sum())
        wide = int(((rest > 16) & (rest <= 48)).sum())
        narrow = int((((rest > 0) & (rest <= 16)) | ((rest > 32) & (rest <= 48))).sum())
        shapes = (narrow * (n // 128), tall * (n // 64), wide * (n // 128))  # as main_loops has them
        seconds = (self.product("matmul_q4_grouped", blocks, 4, k, loop) for loop, blocks in enumerate(shapes))
        return Step("matmul_q4_grouped", what, sum(seconds))

    def moved(self, kernel: str, what: str, nbytes: float) -> Step:
        """A kernel that is bound by memory."""
        return Step(kernel, what, nbytes / BANDWIDTH)


def delta_layer(card: Card, tokens: int) -> list[Step]:
    """The mixer of a gated delta net layer."""
    channels, width, heads, d = 8192, 4096, 32, 128
    per_token = 3 * d * d + CHUNK * d  # state products, and P N
    in_chunk = 2 * CHUNK * d + CHUNK * 2 * d / 2  # both Gram matrices whole, triangular solve
    return [
        card.dense("in_proj_qkv, z", tokens, channels + width, HIDDEN),
        card.dense("in_proj_a, b", tokens, 64, HIDDEN, "matmul_f32"),
        card.moved("conv1d_silu", "convolution", 8.2 * tokens * channels),
        Step("gated_delta_chunk", "chunks", card.multiply_adds("gated_delta_chunk_128", tokens * heads * in_chunk)),
        Step("gated_delta_scan", "scan", card.multiply_adds("gated_delta_scan_128", tokens * heads * per_token)),
        card.moved("gated_norm", "gated norm", 12 * tokens * width),
        card.dense("out_proj", tokens, HIDDEN, width),
    ]


def attention_layer(card: Card, tokens: int) -> list[Step]:
    """The mixer of a full attention layer."""
    heads, d = 16, 256
    pairs = heads * d * tokens * (tokens + 64) / 2  # the last page of a row is computed whole
    return [
        card.dense("q_proj, k_proj, v_proj", tokens, 9216, HIDDEN),
        card.moved("rmsnorm, rope, kv_store", "q and k norms", 30 * tokens * heads * d),
        Step("attention_causal", "attention", card.multiply_adds("attention_causal_256", 2 * pairs)),
        card.dense("o_proj", tokens, HIDDEN, heads * d),
    ]


def moe(card: Card, tokens: int) -> list[Step]:
    """Norms and the mixture of experts of any layer."""
    rng = np.random.default_rng(0)
    choices = rng.random((tokens, EXPERTS)).argsort(1)[:, :CHOSEN]
    rows = np.bincount(choices.reshape(-1), minlength=EXPERTS)
    pairs = tokens * CHOSEN
    return [
        card.moved("rmsnorm", "norms", 2 * 12 * tokens * HIDDEN),
        card.dense("router", tokens, EXPERTS + 1, HIDDEN, "matmul_f32"),
        card.grouped("experts gate, up", rows, 2 * INNER, HIDDEN),
        card.grouped("experts down", rows, HIDDEN, INNER),
        card.dense("shared gate, up", tokens, 2 * INNER, HIDDEN),
        card.dense("shared down", tokens, HIDDEN, INNER),
        card.moved("swiglu", "SwiGLU", 12 * (pairs + tokens) * INNER),
        card.moved("moe_combine", "combine", 4 * tokens * HIDDEN * (CHOSEN + 3)),
        Step("router_topk, expert_*", "top-k and plan", (tokens * EXPERTS**2 * 5 / 32) / MULTIPROCESSORS / HOT_CLOCK),
        Step("all", "launches", 25 * LAUNCH_SECONDS),
    ]


def predict(card: Card, tokens: int) -> dict[str, float]:
    """Seconds by kernel for a prompt of `tokens`, plus "waiting for PCIe" and "total"."""
    seconds: defaultdict[str, float] = defaultdict(float)
    waiting = 0.0
    for mixer, layers in ((delta_layer, DELTA_LAYERS), (attention_layer, ATTENTION_LAYERS)):
        steps = [*mixer(card, tokens), *moe(card, tokens)]
        for step in steps:
            seconds[step.kernel] += layers * step.seconds
        touched = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** tokens)
        transfer = touched * EXPERT_BYTES / PCIE_RATE
        waiting += layers * max(0.0, transfer - sum(step.seconds for step in steps))
    head = card.moved("matvec_q4", "head", VOCABULARY * HIDDEN * 0.5625)
    seconds[head.kernel] += head.seconds
    first = EXPERTS * EXPERT_BYTES / PCIE_RATE  # nothing computes while the first layer's experts travel
    waiting += first
    by_kernel = dict(sorted(seconds.items(), key=lambda item: -item[1]))
    return {**by_kernel, "waiting for PCIe": waiting, "total": sum(seconds.values()) + waiting}


def card_from_library(library: Path, efficiency: float = ISSUE_EFFICIENCY) -> Card:
    """The card's model from the committed PTX, assembled by driver 390's compiler."""
    code: dict[str, fermi_code.Code] = {}
    for text in cuda_ptx.for_fermi(cuda_ptx.committed()).values():
        code |= fermi_code.parse(fermi_assembler.assemble(library, text).cubin)
    return Card(code, efficiency)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=947)
    parser.add_argument("--efficiency", type=float, default=ISSUE_EFFICIENCY, help="share of the issue bound reached")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    library = fermi_assembler.find_library(os.environ)
    if library is None:
        print("needs the compiler library of driver 390.157: libnvidia-legacy-390xx-ptxjitcompiler1, or FERMI_JIT=FILE")
        return 2
    card = card_from_library(library, options.efficiency)
    seconds = predict(card, options.tokens)
    if options.json:
        print(json.dumps({"tokens": options.tokens, "predicted_seconds": seconds}))
        return 0
    print(f"Tesla C2075, {options.tokens} tokens: PREDICTED from instruction counts, not measured on a card")
    for kernel in ("matmul_q4", "matmul_q4_grouped", "matmul_f32"):
        loop = card.main_loops(kernel)[-1]
        bound = 512 if kernel != "matmul_f32" else 256
        print(f"  {kernel:22s} loop of {loop.size} instructions, {bound} useful FFMA: {bound / loop.size:.1%}")
    for kernel, value in seconds.items():
        print(f"  {kernel:26s} {value:7.3f} s {value / seconds['total']:6.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
