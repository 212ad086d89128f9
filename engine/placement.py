"""What lives where: processors for the threads, memory for weights, states and scratch. Decided once, at load."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError, OutOfMemory
from engine.state import PAGE_TOKENS, page_bytes, recurrent_bytes

_SPARE_SHARE = 0.1  # of the memory that is free: left to everything else
PICTURE_ROWS_BYTES = 64 << 20
"""Most bytes kept of what the vision tower made of pictures: 8 of 1,024 tokens at the 35B shape."""

# Taken at import, before any engine pins the thread that loads it.
_ALLOWED_CPUS = frozenset(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision. threads: in the pool; cpus: the logical processor of each, None: not pinned. context_length:
    tokens of prompt and output together. Sizes in bytes; weights_bytes is mapped from the file."""

    threads: int
    cpus: tuple[int, ...] | None
    context_length: int
    weights_bytes: int
    recurrent_bytes: int
    kv_bytes_per_token: int


def place(model: ModelConfig, config: EngineConfig, weights_bytes: int, cache_bytes: int = 0) -> Placement:
    """Decide for one sequence at a time. cache_bytes: memory that the prefix cache will fill. OutOfMemory if the
    context asked for does not fit, or none does; ConfigError for more threads than processors or a context longer than
    the model's."""
    threads, cpus = choose_threads(config.threads)
    per_page = page_bytes(model, config.compute == "f32")
    fixed = _fixed_bytes(model, config, weights_bytes) + cache_bytes
    free = available_bytes()
    budget = int(free * (1 - _SPARE_SHARE)) - fixed
    wanted = wanted_context(model, config)
    fitting = budget // per_page * PAGE_TOKENS
    if (config.context_length is not None and fitting < wanted) or fitting < PAGE_TOKENS:
        asked = max(wanted if config.context_length is not None else 0, PAGE_TOKENS)
        need = fixed + math.ceil(asked / PAGE_TOKENS) * per_page
        cache = f", {cache_bytes} of them for the prefix cache (cache_ram)" if cache_bytes else ""
        raise OutOfMemory(
            f"a context of {asked} tokens needs {need} bytes with the weights{cache}; {free} are available"
        )
    return Placement(
        threads=threads,
        cpus=cpus,
        context_length=min(wanted, fitting),
        weights_bytes=weights_bytes,
        recurrent_bytes=recurrent_bytes(model),
        kv_bytes_per_token=per_page // PAGE_TOKENS,
    )


def wanted_context(model: ModelConfig, config: EngineConfig) -> int:
    """Tokens of context that the settings ask for, by default the model's own. ConfigError if that is more than the
    model has positions for."""
    longest = model.max_position_embeddings
    if config.context_length is None:
        return longest
    if config.context_length > longest:
        raise ConfigError(f"context_length is {config.context_length} tokens, this model has at most {longest}")
    return config.context_length


def spare_bytes(model: ModelConfig, config: EngineConfig, weights_bytes: int) -> int:
    """Memory beside the weights and one sequence without context: what contexts and the prefix cache share."""
    free = int(available_bytes() * (1 - _SPARE_SHARE))
    return max(0, free - _fixed_bytes(model, config, weights_bytes))


def _fixed_bytes(model: ModelConfig, config: EngineConfig, weights_bytes: int) -> int:
    unpacked = weights_bytes * 64 // 9 if config.compute == "f32" and model.quantized else 0  # 32 bits for every 4.5
    pictures = 0 if model.vision is None else PICTURE_ROWS_BYTES
    return weights_bytes + unpacked + recurrent_bytes(model) + pictures


def choose_threads(wanted: int | None) -> tuple[int, tuple[int, ...] | None]:
    """(threads, processors to pin them to). By default one thread per physical core that the process may use, fewer
    under a CPU quota. Nothing is pinned when threads and cores do not correspond one to one: under a quota the
    scheduler must be free to choose, and extra threads must share. ConfigError for more threads than processors: they
    work in step, so each would wait for those that wait for a processor."""
    cores = physical_cpus(_ALLOWED_CPUS)
    if wanted is not None:
        check_threads(wanted)
    quota = cpu_quota()
    if wanted is None:
        wanted = len(cores) if quota is None else max(1, min(len(cores), math.floor(quota)))
    pinned = quota is None and wanted <= len(cores)
    return wanted, cores[:wanted] if pinned else None


def check_threads(wanted: int) -> None:
    """ConfigError for more threads than this process may use processors."""
    if wanted > len(_ALLOWED_CPUS):
        raise ConfigError(f"threads is {wanted}, this process may use {len(_ALLOWED_CPUS)} processors")


def physical_cpus(allowed: Iterable[int], root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    """One logical processor of each physical core, ascending: the first of its hyper-threads that is allowed. All
    allowed ones where the topology is not told."""
    first_of_core: dict[str, int] = {}
    for cpu in sorted(allowed):
        try:
            siblings = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        first_of_core.setdefault(siblings, cpu)
    return tuple(first_of_core.values())


def memory_nodes(
    root: Path = Path("/sys/devices/system/node"), status: Path = Path("/proc/self/status")
) -> tuple[int, ...]:
    """NUMA nodes, ascending, that have memory and that this process may take it from. Empty if the kernel does not
    tell; nodes from 64 on are left out."""
    try:
        there = _numbers((root / "has_memory").read_text())
        allowed = next(line for line in status.read_text().splitlines() if line.startswith("Mems_allowed_list:"))
        return tuple(sorted(n for n in there & _numbers(allowed.split(":", 1)[1]) if n < 64))
    except (OSError, ValueError, StopIteration):
        return ()


def _numbers(text: str) -> set[int]:
    """A list as the kernel writes it: `0-2,5`."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Processors' worth of time that the control group allows, None if unlimited."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 else None


def available_bytes(meminfo: Path = Path("/proc/meminfo"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that may be used without swapping: the system's, or what the control group leaves. File pages in
    memory count as available, so a mapped checkpoint must be budgeted for by its size."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    if limit == "max":
        return free
    reclaimable = int(statistics.get("file", 0))
    return min(free, max(0, int(limit) - used + reclaimable))
