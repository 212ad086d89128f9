"""Where the time of a pass goes: seconds and bytes of each operation, as the C engine accounts for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperationCost:
    """One operation over all layers and passes. nbytes: weights read, and state read and written, each counted once,
    whether memory or a cache gave them."""

    name: str
    calls: int
    seconds: float
    nbytes: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second; 0 for an operation that took no time."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


def sum_costs(first: Sequence[OperationCost], second: Sequence[OperationCost]) -> tuple[OperationCost, ...]:
    """Both together, operation by operation; either may be empty."""
    if not first or not second:
        return tuple(first or second)
    return tuple(
        OperationCost(a.name, a.calls + b.calls, a.seconds + b.seconds, a.nbytes + b.nbytes)
        for a, b in zip(first, second, strict=True)
    )


def cost_table(costs: Sequence[OperationCost], seconds: float, steps: int) -> str:
    """Lines for people: each operation's share of `steps` equal steps that took `seconds` together, and what was spent
    outside of them (interpreter, sampling)."""
    head = f"{'operation':<16}{'calls':>7}{'ms':>10}{'share':>8}{'MB':>10}{'GB/s':>8}"
    rows = [_row(cost, seconds, steps) for cost in costs if cost.calls]
    inside = sum(cost.seconds for cost in costs)
    nbytes = sum(cost.nbytes for cost in costs)
    rest = OperationCost("outside", steps, max(0.0, seconds - inside), 0.0)
    whole = OperationCost("all", steps, seconds, nbytes)
    return "\n".join([head, *rows, _row(rest, seconds, steps), _row(whole, seconds, steps)])


def _row(cost: OperationCost, seconds: float, steps: int) -> str:
    rate = f"{cost.gb_per_s:>8.1f}" if cost.nbytes else " " * 8
    return (
        f"{cost.name:<16}{cost.calls // steps:>7}{1e3 * cost.seconds / steps:>10.3f}{cost.seconds / seconds:>8.1%}"
        f"{cost.nbytes / steps / 1e6:>10.2f}{rate}"
    )
