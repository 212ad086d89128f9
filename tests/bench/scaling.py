"""Decode over the number of threads, each beside what the bandwidth probe reads with as many, and prefill with all.

Usage: python tests/bench/scaling.py MODEL [--threads 1,2,4,8,16] [--simd-tier T] [--tokens 32] [--rounds 3]
       [--prefill 512] [--chart FILE.png]. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from engine.bench import Speed, measure_decode, measure_prefill
from engine.charts import Labels, Series, lines, save
from engine.config import EngineConfig


def quiet(text: str) -> None:
    pass


def draw(path: Path, decodes: list[Speed]) -> None:
    """Tokens a second that were decoded, and those that the probe's bandwidth would allow."""
    measured = [(float(speed.threads), speed.tokens_per_s) for speed in decodes]
    bounds = [
        (float(s.threads), s.tokens_per_s * s.probe_gb_per_s / s.gb_per_s)
        for s in decodes
        if s.probe_gb_per_s is not None
    ]
    title = f"Decode, {decodes[0].tier}"
    chart = lines(
        Labels(title, "threads", "tokens/s"),
        [Series("measured", measured), Series("bound by memory", bounds)],
        log_x=True,
    )
    save(chart, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", default="1,2,4,8,16")
    parser.add_argument("--simd-tier", default="auto")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--chart", type=Path)
    args = parser.parse_args()
    length = max(args.context + args.tokens, args.prefill) + 64
    decodes = []
    for threads in map(int, args.threads.split(",")):
        config = EngineConfig(simd_tier=args.simd_tier, threads=threads, context_length=length, device="cpu")
        speed = measure_decode(
            args.model, config, context=args.context, tokens=args.tokens, rounds=args.rounds, report=quiet
        )
        print(f"{speed.as_table()}\n{speed.as_text()}", flush=True)
        decodes.append(speed)
    prefill = measure_prefill(args.model, config, tokens=args.prefill, rounds=args.rounds, report=quiet)
    print(f"{prefill.as_table()}\n{prefill.as_text()}", flush=True)
    if args.chart is not None:
        draw(args.chart, decodes)
    print(json.dumps({"decode": [speed.as_json() for speed in decodes], "prefill": prefill.as_json()}))


if __name__ == "__main__":
    main()
