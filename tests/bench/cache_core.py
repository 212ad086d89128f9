"""Figures of the cache library alone, on synthetic states. The last line of output is JSON.

Lookup in a 128k-token prompt, restart scan of 1,600 snapshot files, capture and load at the 35B shape (62.8 MiB
recurrent payload, 1.25 MiB pages), token hit rate of the eviction rule against LRU and GDSF.

    python tests/bench/cache_core.py [--directory DIR] [--skip-eviction]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "prefix_cache"))

from eviction_rules import GreedyDualSizeFrequency, LeastRecentlyUsed, replay
from traffic import Traffic

from prefix_cache import CacheConfig, Cuts, DiskConfig, Geometry, Kind, Namespace, PrefixCache, PromptKey, fingerprint

FINGERPRINT = fingerprint({"bench": 1})
SMALL = Geometry(page_bytes=64, recurrent_bytes=200)
REAL = Geometry(page_bytes=20480 * 64, recurrent_bytes=(60 << 20) + 30 * 8192 * 3 * 4)
LONG = 128 * 1024
REPEATS = 20


class State:
    """A state of constant bytes at any position."""

    rope_delta = 0

    def __init__(self, geometry: Geometry) -> None:
        self._page = np.full(geometry.page_bytes, 1, np.uint8)
        self._recurrent = [np.full(geometry.recurrent_bytes, 2, np.uint8)]

    def layer_positions(self):
        return ()

    def page(self, index: int):
        return self._page

    def recurrent(self):
        return self._recurrent


def make_key(seed: int, count: int, prefix: int = 0) -> PromptKey:
    """`count` tokens, of which the first `prefix` are the same for all seeds."""
    shared = np.random.default_rng(0).integers(0, 248_000, prefix)
    own = np.random.default_rng(seed + 1).integers(0, 248_000, count - prefix)
    return PromptKey(Namespace(FINGERPRINT), np.concatenate([shared, own]).astype(np.int32))


def timed(call, repeats: int = REPEATS) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def bench_lookup() -> dict[str, float]:
    """Milliseconds to decide where to resume a prompt of 128k tokens that matches to its end."""
    blocks = LONG // 64 + 1000
    cache = PrefixCache(CacheConfig(blocks * SMALL.page_bytes, cuts=Cuts.ANY), FINGERPRINT, SMALL)
    state = State(SMALL)
    key = make_key(1, LONG)
    for position in range(1024, LONG, 1024):
        cache.store(key, state, Kind.INTERIOR, position, position)
    cache.store(key, state, Kind.GENERATION, LONG - 2, LONG - 2)
    assert cache.peek(key).position == LONG - 2
    times = timed(lambda: cache.peek(key), 100)
    keys = timed(lambda: PromptKey(key.namespace, key.token_ids))
    return {
        "lookup_128k_ms_median": statistics.median(times) * 1e3,
        "lookup_128k_ms_max": max(times) * 1e3,
        "key_128k_ms_median": statistics.median(keys) * 1e3,
    }


def bench_scan(directory: Path) -> dict[str, float]:
    """Seconds to open a folder of 1,600 snapshots and their packs, prompts of 4,096 tokens sharing 2,048."""
    disk = DiskConfig(directory, 1 << 40, free_floor_bytes=0, write_bytes_per_day=1 << 50, write_burst_bytes=1 << 50)
    config = CacheConfig(1 << 20, disk, Cuts.ANY)
    cache = PrefixCache(config, FINGERPRINT, SMALL)
    state = State(SMALL)
    for seed in range(800):
        key = make_key(seed, 4096, 2048)
        for position in (3000, 4094):
            cache.store(key, state, Kind.MESSAGE, position, position)
            cache.flush()
    cache.close()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        cache = PrefixCache(config, FINGERPRINT, SMALL)
        times.append(time.perf_counter() - start)
        assert cache.gauges()["snapshots"] == 1600
        files = sum(1 for _ in directory.rglob("*.*"))
        cache.close()
    return {"scan_snapshots": 1600, "scan_files": files, "scan_s_median": statistics.median(times)}


def bench_payloads(directory: Path) -> dict[str, float]:
    """Capture and load of one snapshot of a 2,000-token prompt at the 35B shape, into memory that the system has yet to
    find and into memory used before."""
    disk = DiskConfig(directory, 1 << 40, free_floor_bytes=0)
    config = CacheConfig(1 << 29, disk, Cuts.ANY)
    cache = PrefixCache(config, FINGERPRINT, REAL)
    state = State(REAL)
    times = []
    for seed in range(4 + REPEATS):
        key = make_key(seed, 2000)
        start = time.perf_counter()
        cache.store(key, state, Kind.GENERATION, 1998, 1998)
        times.append(time.perf_counter() - start)
        if seed == 0:
            start = time.perf_counter()
            cache.flush()
            write = time.perf_counter() - start
        else:
            cache._index.waiting.clear()
    targets = [np.zeros(REAL.recurrent_bytes, np.uint8)]
    from_ram = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        _, lease = cache.acquire(key)
        assert lease is not None
        lease.restore(targets)
        lease.release()
        from_ram.append(time.perf_counter() - start)
    cache.close(0)
    cache = PrefixCache(config, FINGERPRINT, REAL)
    start = time.perf_counter()
    outcome, lease = cache.acquire(make_key(0, 2000))
    assert lease is not None
    lease.restore(targets)
    from_disk = time.perf_counter() - start
    assert outcome.tier == "disk"
    loaded = cache.stats.loaded_bytes
    lease.release()
    cache.close(0)
    return {
        "capture_ms_new_memory": statistics.median(times[:4]) * 1e3,
        "capture_ms_median": statistics.median(times[8:]) * 1e3,
        "load_ram_ms_median": statistics.median(from_ram) * 1e3,
        "load_disk_ms": from_disk * 1e3,
        "load_disk_mib": loaded / 2**20,
        "write_ms": write * 1e3,
    }


def bench_eviction() -> dict[str, float]:
    """Mean token hit rate over three streams per rule and RAM budget (35B shape, no disk)."""
    rules = {"lru": LeastRecentlyUsed, "gdsf": GreedyDualSizeFrequency, "learned": lambda: None}
    result = {}
    for gib in (1, 2, 4, 8):
        for name, rule in rules.items():
            rates = [replay(Traffic(seed).requests(), gib, rule()).rate for seed in (1, 2, 3)]
            result[f"hit_rate_{gib}gib_{name}"] = statistics.mean(rates)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where to put the temporary disk tier (default: system's)")
    parser.add_argument("--skip-eviction", action="store_true", help="leave out the slowest part")
    arguments = parser.parse_args()
    result = bench_lookup()
    for bench in (bench_scan, bench_payloads):
        directory = Path(tempfile.mkdtemp(dir=arguments.directory))
        try:
            result |= bench(directory)
        finally:
            shutil.rmtree(directory)
    if not arguments.skip_eviction:
        result |= bench_eviction()
    for name, value in result.items():
        print(f"{name:32s} {value:10.3f}")
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
