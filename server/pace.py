"""How fast the engine works, measured on finished jobs, and what that means for those that wait."""

from __future__ import annotations

from server.job import Job

# Weight of the newest measurement.
_WEIGHT = 0.2


class Pace:
    """Moving averages of prefill and decode speed (tokens per second) and of the length of answers (tokens)."""

    def __init__(self) -> None:
        self._prefill = 0.0
        self._decode = 0.0
        self._answer = 0.0

    def learn(self, job: Job) -> None:
        """Take in the times of a finished job."""
        started, first, finished = job.started_at, job.first_token_at, job.finished_at
        if started is None or first is None or finished is None:
            return
        computed = job.work.prompt_tokens - (job.progress.cached if job.progress is not None else 0)
        self._prefill = _blend(self._prefill, computed / max(first - started, 1e-6))
        self._answer = _blend(self._answer, job.completion_tokens)
        if job.completion_tokens > 1:
            self._decode = _blend(self._decode, (job.completion_tokens - 1) / max(finished - first, 1e-6))

    def seconds_left(self, job: Job) -> float:
        """Estimated time until `job` is done once it has the engine; 0 as long as nothing is known."""
        processed = 0 if job.progress is None else job.progress.processed
        seconds = (job.work.prompt_tokens - processed) / self._prefill if self._prefill else 0.0
        expected = min(self._answer, job.work.max_tokens) * len(job.work.choices)
        if self._decode:
            seconds += max(0.0, expected - job.completion_tokens) / self._decode
        return seconds


def _blend(old: float, new: float) -> float:
    return (1 - _WEIGHT) * old + _WEIGHT * new if old else new
