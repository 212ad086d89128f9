"""How fast the engine works, measured on finished jobs, and what that means for those that wait."""

from __future__ import annotations

from server.job import Job

# What a job counts when the next one has been measured.
_MEMORY = 0.8


class _Speed:
    """Tokens per second, by the tokens and seconds of past jobs: short jobs, mostly overhead, hardly count."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds

    def seconds_for(self, tokens: float) -> float:
        """0 as long as nothing is known."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class Pace:
    """Speed of prefill and decode, and the moving average of the length of answers (tokens)."""

    def __init__(self) -> None:
        self._prefill = _Speed()
        self._decode = _Speed()
        self._answer = 0.0

    def learn(self, job: Job) -> None:
        """Take in the times of a finished job."""
        started, first, finished = job.started_at, job.first_token_at, job.finished_at
        if started is None or first is None or finished is None:
            return
        self._prefill.add(job.work.prompt_tokens - job.cached_tokens, first - started)
        self._decode.add(job.completion_tokens - 1, finished - first)
        answer = job.completion_tokens
        self._answer = _MEMORY * self._answer + (1 - _MEMORY) * answer if self._answer else answer

    def seconds_left(self, job: Job) -> float:
        """Estimated time until `job` is done once it has the engine; 0 as long as nothing is known."""
        processed = 0 if job.progress is None else job.progress.processed
        expected = min(self._answer, job.work.max_tokens) * len(job.work.choices)
        decode_s = self._decode.seconds_for(max(0.0, expected - job.completion_tokens))
        return self._prefill.seconds_for(job.work.prompt_tokens - processed) + decode_s
