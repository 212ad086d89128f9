"""Tokens per second of a streamed completion over HTTP, as a client counts them, tier by tier.

    python tests/bench/http_decode.py [--tiers ssse3,avx2,avx512] [--model DIR] [--rounds 7]

The tiers take turns, so that a machine whose speed drifts drifts for all. The last line is JSON: per tier the median
of all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from pathlib import Path

from engine._simd import ffi, lib
from server.chat import local_server
from server.config import DEMO_CHECKPOINT, load_settings

TIERS = ("scalar", "ssse3", "avx2", "avx512")
PROMPT = "The old man walked to the river and"


def tokens_per_s(url: str, model: str) -> float:
    """One streamed completion; the first token, which waits for the prompt, starts the clock."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 400, "temperature": 1.0, "seed": 1, "stream": True}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    chunks, start = 0, 0.0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                start = start or time.perf_counter()
                chunks += 1
    return (chunks - 1) / (time.perf_counter() - start)


def main() -> None:
    best = TIERS.index(ffi.string(lib.fm_best_tier()).decode())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiers", default=",".join(TIERS[1 : best + 1]))
    parser.add_argument("--model", type=Path, default=DEMO_CHECKPOINT)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {tier: [] for tier in arguments.tiers.split(",")}
    for _ in range(arguments.rounds):
        for tier, taken in rates.items():
            settings = load_settings({"model": arguments.model, "simd_tier": tier, "no_cache": True})
            with local_server(settings) as url:
                with urllib.request.urlopen(f"{url}/models") as response:
                    model = json.load(response)["data"][0]["id"]
                tokens_per_s(url, model)  # the first answer warms caches and the allocator
                taken.append(tokens_per_s(url, model))
    medians = {tier: round(statistics.median(taken), 1) for tier, taken in rates.items()}
    for tier, taken in rates.items():
        print(f"{tier:8} median {medians[tier]:7.1f} tokens/s  ({min(taken):.0f} to {max(taken):.0f})")
    print(json.dumps({"tokens_per_s": medians, "rounds": arguments.rounds}))


if __name__ == "__main__":
    main()
