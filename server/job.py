"""One request between the event loop and the engine's thread: its events, its state, its place in the queue."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.core import CacheReport, GenerationRequest, Progress, TokenLogprobs
from server.textstream import Delta, TextStream


class JobState(StrEnum):
    """Where a job is. The last three are final."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Started:
    """The job left the queue; prefill begins."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The job gave way to a more urgent one and will start anew: forget everything since `Started`."""


@dataclass(frozen=True, slots=True)
class Deltas:
    """New text of choice `index`. logprobs: (token id, log-probabilities) of the answer tokens behind it, if asked."""

    index: int
    deltas: Sequence[Delta]
    logprobs: Sequence[tuple[int, TokenLogprobs]] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """Choice `index` is complete. reason: "stop", "length" or "tool_calls"; counts in tokens.

    stop_string: the stop string that ended it, if one did; cache: what the prefix cache did for its prompt.
    """

    index: int
    reason: str
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    stop_string: str | None = None
    cache: CacheReport | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a job that ran to its end."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a job that did not."""

    error: BaseException


JobEvent = Started | Restarted | Progress | Deltas | ChoiceFinished | Finished | Failed
Choice = tuple[GenerationRequest, TextStream]
ChoiceFactory = Callable[[], Choice]


@dataclass(frozen=True, slots=True)
class Reply:
    """One generated choice. token_ids: all that were drawn; deltas: what the client was told; stop_string: the stop
    string that ended it, if one did."""

    token_ids: Sequence[int]
    deltas: Sequence[Delta]
    stop_string: str | None


class Sequel(Protocol):
    """What may follow an answer."""

    @property
    def tenant(self) -> bytes:
        """Whose conversation it is."""

    def remember(self, reply: Reply) -> None:
        """Keep what the next request of the conversation will need. Called before the client knows the last of it."""

    @property
    def may_be_read(self) -> bool:
        """Whether the request allows to read ahead of what follows it."""

    def continues(self, other: Sequel) -> bool:
        """Whether this is a later state of the conversation of `other`."""

    def shadows(self, reply: Reply, context_length: int) -> Sequence[GenerationRequest]:
        """Beginnings of the prompts that may come next, most urgent first, to be read when there is time."""


BACKGROUND_PRIORITY = 10
# Waiting this long is worth one step of priority, so that nothing waits for ever.
_AGEING_S = 10.0
_MAX_RESTARTS = 3


@dataclass(frozen=True, slots=True)
class Work:
    """What a job asks of the engine.

    choices: factories of what is generated, one after another (a job that starts anew needs fresh ones);
    prompt_tokens, max_tokens: sizes of one choice; priority: lower goes first; may_restart: nothing of the answer is
    sent before its end, so that the job can give way; sequel: what may follow the answer, if anything.
    """

    choices: Sequence[ChoiceFactory]
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    may_restart: bool = False
    sequel: Sequel | None = None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A snapshot of a job for those who ask. Times in seconds; tenant: see `Job`."""

    state: JobState
    prompt_tokens: int
    processed_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    run_s: float
    tenant: bytes = b""


class Job:
    """One request on its way through the queue and the engine.

    Events are read on the event loop that made the job. Times are seconds of `time.monotonic`.
    """

    def __init__(self, job_id: str, work: Work, digest: bytes = b"", tenant: bytes = b"") -> None:
        """digest: equal for repetitions of the same request by the same client. tenant: who may ask for it."""
        self.id = job_id
        self.work = work
        self.digest = digest
        self.tenant = tenant
        self.state = JobState.QUEUED
        self.progress: Progress | None = None
        # Of the first choice: the others find what it has computed, which says nothing about the cache's use.
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.created_at = time.monotonic()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.deadline = math.inf
        self.is_preempted = False
        self._restarts = 0
        self._events: asyncio.Queue[JobEvent] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    @property
    def is_over(self) -> bool:
        return self.state in (JobState.FINISHED, JobState.CANCELLED, JobState.FAILED)

    @property
    def is_overdue(self) -> bool:
        """The job has had the engine for as long as it may."""
        return time.monotonic() >= self.deadline

    @property
    def must_stop(self) -> bool:
        """The engine should give the job up, for good or to start it anew later."""
        return self._is_cancelled or self.is_preempted or self.is_overdue

    def urgency(self, now: float) -> float:
        """What the queue is sorted by: the smallest goes first. Waiting helps."""
        return self.work.priority - (now - self.created_at) / _AGEING_S

    def gives_way_to(self, other: Job) -> bool:
        """Whether this running job should stop for `other` and start anew."""
        return self.work.may_restart and self._restarts < _MAX_RESTARTS and other.work.priority < self.work.priority

    def restart(self) -> None:
        """Back to the beginning, after the engine gave the job up."""
        self._restarts += 1
        self.is_preempted = False
        self.state = JobState.QUEUED
        self.progress = None
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.started_at = self.first_token_at = None
        self.deadline = math.inf
        self.post(Restarted())

    def status(self) -> JobStatus:
        """The state now."""
        now = time.monotonic() if self.finished_at is None else self.finished_at
        started = now if self.started_at is None else self.started_at
        progress = self.progress
        return JobStatus(
            state=self.state,
            prompt_tokens=self.work.prompt_tokens,
            processed_tokens=0 if progress is None else progress.processed,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            queue_s=started - self.created_at,
            run_s=now - started,
            tenant=self.tenant,
        )

    async def next_event(self, timeout_s: float) -> JobEvent | None:
        """The next event, or None after `timeout_s` of silence."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._events.get()
        except TimeoutError:
            return None

    def post(self, event: JobEvent) -> None:
        """Report to the event loop; callable from any thread. A loop that is gone takes its job with it."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            self._is_cancelled = True

    def request_cancel(self) -> None:
        self._is_cancelled = True
