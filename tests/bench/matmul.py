"""How fast the 4-bit products run, tier by tier, beside what this machine allows in the same minute.

One token: GB/s of packed weights that lie scattered in memory, against the bandwidth probe with the same threads and
loads. Many tokens: 10^9 multiply-adds a second, against the tier's byte products from registers alone.

Usage: python tests/bench/matmul.py [--threads N] [--tiers ssse3,avx512] [--rows 1024] [--cols 2048]
       [--tokens 1,2,4,8,16,32,512] [--megabytes 600] [--rounds 5]. The last line is JSON.
Medians over the rounds; probe and product alternate, since a shared host's figures move. The best round is given too.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys

import numpy as np

from engine import formats
from engine._simd import ffi, lib
from engine.placement import choose_threads
from engine.probe import BandwidthProbe

TIERS = ("scalar", "ssse3", "avx2-maddubs", "avx2", "avx512")


class Weights:
    """Random packed matrices in huge pages, far more than any cache holds."""

    def __init__(self, rows: int, cols: int, nbytes: int) -> None:
        self.rows, self.cols = rows, cols
        self.matrix_bytes = rows // formats.BLOCK_ROWS * (cols // formats.BLOCK_COLS) * formats.BLOCK_BYTES
        self.count = max(1, nbytes // self.matrix_bytes)
        # Private: anonymous shared memory gets no huge pages, which are worth 40 % here.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, self.count * self.matrix_bytes, flags)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        rng = np.random.default_rng(0)
        nibbles = rng.integers(0, 16, (rows, cols), np.uint8)
        scales = rng.uniform(0.005, 0.02, (rows, cols // formats.GROUP)).astype(np.float16)
        view = np.frombuffer(self._memory, np.uint8).reshape(self.count, self.matrix_bytes)
        view[:] = formats.pack_q4(nibbles, scales).reshape(-1)

    def seconds(self, tier: str, threads: int, tokens: int, matrices: int, passes: int) -> list[float]:
        """Seconds of each pass over the first `matrices` matrices."""
        rng = np.random.default_rng(1)
        q = rng.integers(-127, 128, (tokens, self.cols), np.int8)
        scale = np.full((tokens, self.cols // formats.GROUP), 0.01, np.float32)
        correction = (-8 * q.reshape(tokens, -1, formats.GROUP).sum(-1, dtype=np.int32)).astype(np.int32)
        y, seconds = np.empty((tokens, self.rows), np.float32), ffi.new("double[]", passes)
        cpus = choose_threads(threads)[1]
        status = lib.fm_matmul_trial(
            *(tier.encode(), threads, ffi.NULL if cpus is None else ffi.new("int[]", cpus)),
            *(ffi.from_buffer("char[]", self._memory), matrices, self.rows, self.cols),
            *(ffi.from_buffer("int8_t[]", q), ffi.from_buffer("float[]", scale)),
            *(ffi.from_buffer("int32_t[]", correction), tokens, ffi.from_buffer("float[]", y), passes, seconds),
        )
        if status != 0:
            raise RuntimeError(f"no kernels of tier {tier} on {threads} threads here")
        return list(seconds)


def one_token(weights: Weights, tier: str, threads: int, rounds: int) -> dict[str, float]:
    """GB/s of the product and of the probe, alternating."""
    probe = BandwidthProbe(tier.removesuffix("-maddubs"), threads, choose_threads(threads)[1], nbytes=576 << 20)
    nbytes = weights.count * weights.matrix_bytes
    weights.seconds(tier, threads, 1, weights.count, 1)
    product, read = [], []
    for _ in range(rounds):
        read.append(probe.gb_per_s(1))
        product.append(nbytes / weights.seconds(tier, threads, 1, weights.count, 1)[0] / 1e9)
    share = statistics.median(p / r for p, r in zip(product, read, strict=True))
    return {
        "gb_per_s": round(statistics.median(product), 2),
        "best_gb_per_s": round(max(product), 2),
        "probe_gb_per_s": round(statistics.median(read), 2),
        "bandwidth_share": round(share, 3),
    }


def many_tokens(weights: Weights, tier: str, threads: int, tokens: int, rounds: int) -> dict[str, float]:
    """10^9 multiply-adds a second with weights from memory (as experts come), and the share of the tier's peak."""
    matrices = max(2, min(weights.count, 2048 // tokens // 4))
    work = tokens * weights.rows * weights.cols * matrices
    seconds = weights.seconds(tier, threads, tokens, matrices, 2 + 4 * rounds)[2:]
    peak = lib.fm_matmul_peak(tier.removesuffix("-maddubs").encode()) * threads / 1e9
    best = work / min(seconds) / 1e9
    return {
        "gmac_per_s": round(work / statistics.median(seconds) / 1e9, 1),
        "best_gmac_per_s": round(best, 1),
        "best_peak_share": round(best / peak, 3) if peak else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=choose_threads(None)[0])
    parser.add_argument("--tiers", default=",".join(TIERS[1:]))
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--cols", type=int, default=2048)
    parser.add_argument("--tokens", default="2,4,8,16,32,512")
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    best = TIERS.index(ffi.string(lib.fm_best_tier()).decode())
    weights = Weights(args.rows, args.cols, args.megabytes * 1_000_000)
    load = os.getloadavg()[0]
    results = {}
    for tier in args.tiers.split(","):
        if TIERS.index(tier) > best:
            print(f"{tier}: not on this CPU", file=sys.stderr)
            continue
        results[tier] = {"1": one_token(weights, tier, args.threads, args.rounds)}
        for tokens in map(int, args.tokens.split(",")):
            results[tier][str(tokens)] = many_tokens(weights, tier, args.threads, tokens, args.rounds)
        for tokens, figures in results[tier].items():
            print(f"{tier:13} {tokens:>4} tokens  " + "  ".join(f"{name} {value}" for name, value in figures.items()))
    print(json.dumps({"threads": args.threads, "load_before": round(load, 2), "results": results}))


if __name__ == "__main__":
    main()
