"""Speed of decode and prefill on this machine, beside what its memory could give in the same minute.

Tokens are random, since speed does not depend on them. Each figure is the median of several rounds; the bandwidth
probe runs between the rounds, because the rate of a shared host moves.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.core import GenerationRequest, Prompt, SamplingParams, TokenResult
from engine.engine import Engine
from engine.errors import ConfigError, OutOfMemory
from engine.inventory import Inventory, take_inventory
from engine.probe import BandwidthProbe
from engine.profiler import OperationCost, cost_table, sum_costs

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement. gb_per_s: bytes that the work must move, per second; bandwidth_share: of what the probe
    measured (probe_gb_per_s), None if memory was too short for it. step_ms: median and 90th percentile of a decode
    step, or of the whole prefill. operations: what they cost in all steps, which took `seconds`; outside_share: of
    that, what was spent outside of them: interpreter, binding, sampling, and the logits of a prefill."""

    kind: str
    model: str
    tokens: int
    context: int
    rounds: int
    tier: str
    threads: int
    tokens_per_s: float
    gb_per_s: float
    probe_gb_per_s: float | None
    bandwidth_share: float | None
    step_ms: float
    step_ms_p90: float
    load_s: float
    outside_share: float
    operations: tuple[OperationCost, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """All fields, rounded to what a measurement is worth."""
        text = json.dumps(asdict(self))
        values: dict[str, Any] = json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
        return values

    def as_text(self) -> str:
        """One line for people."""
        share = "" if self.bandwidth_share is None else f" ({self.bandwidth_share:.0%} of the probe)"
        return (
            f"{self.kind:<8}{self.tokens:>6} tokens at context {self.context}: {self.tokens_per_s:.1f} tokens/s, "
            f"{self.gb_per_s:.1f} GB/s{share}; {self.tier}, {self.threads} threads"
        )

    def as_table(self) -> str:
        """The operations, for people; per decode step or prefill."""
        return cost_table(self.operations, self.seconds, self.rounds * (self.tokens if self.kind == "decode" else 1))


def draw(speeds: Sequence[Speed], path: Path) -> None:
    """Write a PNG: of one measurement the milliseconds of each operation, of several the speed over their lengths.
    ConfigError if the place cannot be written to."""
    from engine import charts  # Pillow takes a while to load

    first = speeds[0]
    title = f"{first.kind.capitalize()}, {first.tier}, {first.threads} threads"
    if len(speeds) == 1:
        steps = first.rounds * (first.tokens if first.kind == "decode" else 1)
        costs = [cost for cost in first.operations if cost.calls]
        values = [1e3 * cost.seconds / steps for cost in costs]
        labels = charts.Labels(title, "operation", "ms per token" if first.kind == "decode" else "ms per prompt")
        charts.save(charts.bars(labels, [cost.name for cost in costs], {"ms": values}), path)
        return
    lengths = [float(speed.context if speed.kind == "decode" else speed.tokens) for speed in speeds]
    points = sorted(zip(lengths, (speed.tokens_per_s for speed in speeds), strict=True))
    labels = charts.Labels(title, "tokens of context" if first.kind == "decode" else "tokens of the prompt", "tokens/s")
    charts.save(charts.lines(labels, [charts.Series("tokens/s", points)], log_x=True), path)


def measure_decode(
    directory: Path, config: EngineConfig, *, context: int, tokens: int, rounds: int, report: Report
) -> Speed:
    """Time per decoded token after a prompt of `context` tokens. ConfigError if they do not fit the context window."""
    bench = _Bench(directory, config, context + tokens + 1)
    steps: list[float] = []
    try:
        for number in range(rounds):
            bench.probe()
            results = bench.run(context, tokens + 1, seed=0)
            stamps = [next(results)[0]]
            bench.start_costs()
            stamps += [stamp for stamp, _ in results]
            bench.add_costs()
            steps += [later - earlier for earlier, later in pairwise(stamps)]
            report(f"round {number + 1} of {rounds}: {tokens / (stamps[-1] - stamps[0]):.1f} tokens/s")
        bench.probe()
    finally:
        bench.close()
    step = statistics.median(steps)
    moved = bench.inventory.decode_bytes(context + tokens // 2)
    return bench.speed("decode", tokens, context, rounds, 1.0 / step, moved / step, steps)


def measure_prefill(directory: Path, config: EngineConfig, *, tokens: int, rounds: int, report: Report) -> Speed:
    """Time from a prompt of `tokens` tokens to its first output token. ConfigError if it does not fit."""
    bench = _Bench(directory, config, tokens + 1)
    seconds: list[float] = []
    try:
        for number in range(rounds):
            bench.probe()
            bench.start_costs()
            started = time.perf_counter()
            stamp, _ = next(bench.run(tokens, 1, seed=number))  # another prompt each time: nothing can be reused
            seconds.append(stamp - started)
            bench.add_costs()
            report(f"round {number + 1} of {rounds}: {tokens / seconds[-1]:.1f} tokens/s")
        bench.probe()
    finally:
        bench.close()
    median = statistics.median(seconds)
    passes = -(-tokens // config.pass_tokens)
    text_bytes = sum(part.nbytes for part in bench.inventory.parts if part.token_bytes > 0)
    return bench.speed("prefill", tokens, 0, rounds, tokens / median, passes * text_bytes / median, seconds)


class _Bench:
    """An engine, the probe beside it, and what both share."""

    def __init__(self, directory: Path, config: EngineConfig, needed: int) -> None:
        self.inventory: Inventory = take_inventory(directory, config)
        config = replace(config, cache=None)  # what is measured must be computed
        started = time.perf_counter()
        self._engine = Engine.load(directory, config)
        self._load_s = time.perf_counter() - started
        if needed > self._engine.context_length:
            self._engine.close()
            raise ConfigError(f"{needed} tokens do not fit the context window of {self._engine.context_length}")
        self._rates: list[float] = []
        self._costs: tuple[OperationCost, ...] = ()
        try:
            self._probe: BandwidthProbe | None = BandwidthProbe(
                self.inventory.tier, self.inventory.threads, self.inventory.pinned_to
            )
        except OutOfMemory:
            self._probe = None

    def close(self) -> None:
        self._engine.close()

    def probe(self) -> None:
        """Take the memory's rate now."""
        if self._probe is not None:
            self._rates.append(self._probe.gb_per_s(passes=1))

    def start_costs(self) -> None:
        """Count what operations cost from here."""
        self._engine.start_profile()

    def add_costs(self) -> None:
        """Add what they cost since then to the whole measurement's."""
        self._costs = sum_costs(self._costs, self._engine.operation_costs())

    def run(self, context: int, tokens: int, seed: int) -> Iterator[tuple[float, TokenResult]]:
        """Generate greedily after a random prompt; each token with the time when it was there."""
        ids = np.random.default_rng(seed).integers(0, self._engine.vocab_size, context, dtype=np.int32)
        request = GenerationRequest("bench", Prompt(ids), tokens, SamplingParams(temperature=0.0))
        for event in self._engine.generate(request, lambda: False):
            if isinstance(event, TokenResult):
                yield time.perf_counter(), event

    def speed(
        self,
        kind: str,
        tokens: int,
        context: int,
        rounds: int,
        tokens_per_s: float,
        bytes_per_s: float,
        seconds: list[float],
    ) -> Speed:
        """The figures of a finished measurement."""
        rate = statistics.median(self._rates) if self._rates else None
        return Speed(
            kind=kind,
            model=self.inventory.directory,
            tokens=tokens,
            context=context,
            rounds=rounds,
            tier=self.inventory.tier,
            threads=self.inventory.threads,
            tokens_per_s=tokens_per_s,
            gb_per_s=bytes_per_s / 1e9,
            probe_gb_per_s=rate,
            bandwidth_share=bytes_per_s / 1e9 / rate if rate else None,
            step_ms=1e3 * statistics.median(seconds),
            step_ms_p90=1e3 * float(np.quantile(seconds, 0.9)),
            load_s=self._load_s,
            outside_share=max(0.0, 1.0 - sum(cost.seconds for cost in self._costs) / sum(seconds)),
            operations=self._costs,
            seconds=sum(seconds),
        )
