"""What the prefix cache costs and saves on a model of real size, in the process. The last line of output is JSON.

A prompt is read cold, again from memory, and again from disk by an engine that has just started, with the files not in
the system's cache. Times are to the first token. Weights may be random: `fermion bench make-synthetic`.

    python tests/bench/cache_shape.py CHECKPOINT [--tokens 2000] [--repeats 5] [--directory DIR]
    python tests/bench/cache_shape.py CHECKPOINT --directory DIR --part memory    # and then, DIR being left as it is,
    python tests/bench/cache_shape.py CHECKPOINT --directory DIR --part disk
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.config import CacheSettings, EngineConfig
from engine.core import CacheOptions, CacheReport, GenerationRequest, Progress, Prompt, SamplingParams, TokenResult
from engine.engine import Engine
from engine.tokenizer import Tokenizer
from prefix_cache import PrefixCache

TOUCH_TOKENS = 512
REFERENCE_DISK = 2e9


class Capture:
    """Seconds that snapshots take on the way of a prefill."""

    def __init__(self) -> None:
        self.reset()
        plain = PrefixCache._take

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = plain(*arguments, **named)
            seconds = time.perf_counter() - started
            self.seconds, self.count, self.longest = self.seconds + seconds, self.count + 1, max(self.longest, seconds)
            return result

        PrefixCache._take = timed  # type: ignore[method-assign]

    def reset(self) -> None:
        self.seconds, self.count, self.longest = 0.0, 0, 0.0


def prompt(tokenizer: Tokenizer, tokens: int, seed: int) -> Prompt:
    """A question of that many tokens in all, and the beginning of its answer."""
    head = tokenizer.encode("<|im_start|>user\n", allow_special=True)
    tail = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n", allow_special=True)
    middle = np.random.default_rng(seed).integers(0, 200, tokens - len(head) - len(tail)).tolist()
    ids = np.array([*head, *middle, *tail], np.int32)
    return Prompt(ids, (tokens - len(tail) + 2,))


def ask(engine: Engine, text: Prompt, tokens: int = 1, **options: Any) -> tuple[list[float], CacheReport]:
    """Seconds to the first token and to each one after it, and what the cache did."""
    wanted = GenerationRequest("b", text, tokens, SamplingParams(temperature=0.0), cache=CacheOptions(**options))
    times: list[float] = []
    report: CacheReport | None = None
    last = time.perf_counter()
    for item in engine.generate(wanted, lambda: False):
        if isinstance(item, Progress):
            report = item.cache
        elif isinstance(item, TokenResult):
            times.append(time.perf_counter() - last)
            last = time.perf_counter()
    assert report is not None
    return times, report


def forget(directory: Path) -> int:
    """Have the system drop the files from its cache; their bytes."""
    total = 0
    for path in directory.rglob("*.*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        total += path.stat().st_size
    return total


def disk_rate(directory: Path) -> float:
    """Bytes a second at which the files are read, none of them in the system's cache."""
    total = forget(directory)
    buffer = bytearray(8 << 20)
    started = time.perf_counter()
    for path in directory.rglob("*.*"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return total / (time.perf_counter() - started)


def measure_memory(checkpoint: Path, config: EngineConfig, text: Prompt, repeats: int) -> dict[str, float]:
    """Cold, and again from memory. What was captured is on disk afterwards."""
    capture = Capture()
    warm, steps = [], []
    with Engine.load(checkpoint, config) as engine:
        # Touches all weights once, so that nothing below waits for them.
        ask(engine, prompt(Tokenizer.load(checkpoint), TOUCH_TOKENS, 3), 2, read=False, write=False)
        capture.reset()
        (cold,), _ = ask(engine, text)
        seconds, count, longest = capture.seconds, capture.count, capture.longest
        for _ in range(repeats):
            (first, *more), report = ask(engine, text, 9)
            assert (report.tier, report.recomputed) == ("ram", 2), report
            warm.append(first)
            steps += more
        layers = engine.model.num_hidden_layers
    return {
        "layers": layers,
        "tokens": len(text.token_ids),
        "cold_s": cold,
        "decode_step_s": statistics.median(steps),
        "warm_ram_s": statistics.median(warm),
        "ram_load_s": report.load_s,
        "cold_over_warm_ram": cold / statistics.median(warm),
        "captures": count,
        "capture_ms": 1e3 * seconds / max(1, count),
        "capture_ms_longest": 1e3 * longest,
        "capture_share": seconds / cold,
    }


def measure_disk(checkpoint: Path, config: EngineConfig, text: Prompt, repeats: int, place: Path) -> dict[str, float]:
    """Again from disk, by engines that have just started."""
    rate = disk_rate(place)
    times, loads = [], []
    for _ in range(repeats):
        forget(place)
        with Engine.load(checkpoint, config) as engine:
            ask(engine, prompt(Tokenizer.load(checkpoint), 64, 4), 2, read=False, write=False)
            assert engine.cache is not None
            before: Any = dict(engine.cache.counters())
            (seconds,), report = ask(engine, text, write=False)
            assert (report.tier, report.recomputed) == ("disk", 2), report
            after: Any = engine.cache.counters()
            loaded = after["loaded_bytes"] - before["loaded_bytes"]
        times.append(seconds)
        loads.append(report.load_s)
    seconds, load_s = statistics.median(times), statistics.median(loads)
    return {
        "warm_disk_s": seconds,
        "disk_load_s": load_s,
        "loaded_mib": loaded / 2**20,
        "disk_gb_per_s": rate / 1e9,
        "warm_disk_at_2_gb_per_s_s": seconds - loaded / rate + loaded / REFERENCE_DISK,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to put the temporary disk tier (default: system's)")
    parser.add_argument("--part", choices=["memory", "disk"], help="one half, with the disk tier in --directory itself")
    arguments = parser.parse_args()
    if arguments.part and arguments.directory is None:
        parser.error("--part needs --directory, where the first half leaves what the second one reads")
    text = prompt(Tokenizer.load(arguments.checkpoint), arguments.tokens, 1)
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        place = arguments.directory if arguments.part else Path(temporary)
        config = EngineConfig(context_length=arguments.tokens + 512, cache=CacheSettings(1 << 30, 8 << 30, place))
        if arguments.part != "disk":
            result |= measure_memory(arguments.checkpoint, config, text, arguments.repeats)
        if arguments.part != "memory":
            result |= measure_disk(arguments.checkpoint, config, text, arguments.repeats, place)
    for name, value in result.items():
        print(f"{name:28}{value:10.4f}")
    print(json.dumps({name: round(value, 5) for name, value in result.items()}))


if __name__ == "__main__":
    main()
