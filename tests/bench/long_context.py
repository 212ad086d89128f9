"""Speed at a long context beside a short one, in turns within one process, since a shared host's speed moves.

Decode: at --context tokens and at 128; keys and values are random there, speed does not depend on them. Prefill: a
prompt of --context tokens, every pass of 512 of it followed by a prompt of 512, and the sums of their times compared.

Usage: python tests/bench/long_context.py MODEL [--context 8192] [--tokens 16] [--rounds 6] [--threads N]
       [--simd-tier T]. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from engine.config import EngineConfig, ModelConfig
from engine.model import Model
from engine.placement import choose_threads
from engine.state import PAGE_TOKENS, SequenceState
from engine.weights import load_weights

SHORT, PASS = 128, 512


def state_at(model: Model, position: int, room: int) -> SequenceState:
    """A sequence of `position` random tokens with room for more."""
    state = model.new_state()
    state.reserve(position + room)
    rng = np.random.default_rng(0)
    for page in state.pages[: -(-position // PAGE_TOKENS)]:
        page.view(np.float16)[:] = rng.standard_normal(len(page) // 2, np.float32)
    state.position = position
    return state


def decode_seconds(model: Model, state: SequenceState, tokens: int) -> float:
    """Of the median step; the sequence is where it was afterwards."""
    position, steps = state.position, []
    for token in range(tokens):
        started = time.perf_counter()
        model.decode(state, token)
        steps.append(time.perf_counter() - started)
    state.position = position
    return statistics.median(steps)


def pass_seconds(model: Model, state: SequenceState) -> float:
    """Of a pass of random tokens behind what the sequence holds."""
    ids = np.random.default_rng(state.position).integers(0, model.config.vocab_size, PASS, dtype=np.int32)
    started = time.perf_counter()
    for _ in model.advance_steps(state, ids):
        pass
    return time.perf_counter() - started


def empty(model: Model, tokens: int) -> SequenceState:
    """A sequence of no tokens whose memory for so many has been written: finding it is no part of the time."""
    state = model.new_state()
    state.reserve(tokens)
    for memory in (state.conv, state.ssm, *state.pages):
        memory.fill(0)
    return state


def prefill_seconds(model: Model, context: int) -> tuple[float, float]:
    """Of as many prompts of a single pass as a prompt of `context` tokens has passes, and of that prompt, in turns."""
    prompt, short, long = empty(model, context), 0.0, 0.0
    for number in range(context // PASS):
        long += pass_seconds(model, prompt)
        short += pass_seconds(model, empty(model, PASS))
        print(
            f"{(number + 1) * PASS} tokens of the prompt: {(number + 1) * PASS / long:.1f} tokens/s, "
            f"prompts of {PASS}: {(number + 1) * PASS / short:.1f}; {short / long:.3f}",
            flush=True,
        )
    return short, long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--simd-tier", default="auto")
    args = parser.parse_args()
    threads, cpus = choose_threads(args.threads)
    config = EngineConfig(simd_tier=args.simd_tier, threads=threads, device="cpu", pass_tokens=PASS)
    weights = load_weights(args.model, ModelConfig.load(args.model), config)
    model = Model(weights, config, threads=threads, cpus=cpus, max_context=args.context + PASS)
    short, long = (state_at(model, position, PASS) for position in (SHORT, args.context))
    decode_seconds(model, short, args.tokens)
    found = []
    for number in range(args.rounds):
        a, b = decode_seconds(model, short, args.tokens), decode_seconds(model, long, args.tokens)
        found.append(a / b)
        print(f"round {number + 1}: decode {1 / a:.1f} and {1 / b:.1f} tokens/s, {a / b:.3f}", flush=True)
    c, d = prefill_seconds(model, args.context)
    ratios = {"decode": round(statistics.median(found), 3), "prefill": round(c / d, 3)}
    print(json.dumps({"context": args.context, "threads": threads, "tier": args.simd_tier, "ratios": ratios}))
    model.close()


if __name__ == "__main__":
    main()
