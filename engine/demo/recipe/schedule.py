"""What every training step is, as a function of its number alone."""

import dataclasses
import random

#: Ends of the first two stages as fractions of the main phase; the third one is the learning-rate decay.
STAGES = (0.10, 0.62)
LONG_SHARE = (0.0, 0.06, 0.16)
WARM_UP_STEPS = 100
LAST_RATE = 0.02


def stage_of(fraction: float) -> int:
    """The stage at a fraction of the main phase."""
    return sum(fraction >= end for end in STAGES)


def rate_of(step: int, fraction: float) -> float:
    """Warm-up, flat, then linear to :data:`LAST_RATE`."""
    falling = 1.0 if fraction < STAGES[1] else max(LAST_RATE, (1 - fraction) / (1 - STAGES[1]))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * falling


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every step is, as a function of its number.

    ``steps`` of the main phase cover the schedule from the fraction ``first`` to its end; ``mtp_steps`` follow with the
    mixture of its last stage. A step is the mean over ``parts`` batches.
    """

    steps: int
    mtp_steps: int
    parts: int
    seed: int
    first: float
    long_share: tuple[float, ...] = LONG_SHARE

    def fraction(self, step: int) -> float:
        """The fraction of the schedule at a step."""
        return min(1.0, self.first + (1 - self.first) * step / max(self.steps, 1))

    def is_long(self, step: int) -> bool:
        """Whether the step's batches hold long rows."""
        share = self.long_share[stage_of(self.fraction(step))]
        return random.Random(f"{self.seed} form {step}").random() < share

    def batch_seed(self, step: int, part: int) -> str:
        """Seed of the random generator that draws one batch."""
        return f"{self.seed} batch {step} {part}"
