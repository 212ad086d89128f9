"""The one thread that owns the engine, and the bounded queue in front of it.

An `EngineWorker` loads the engine in its thread (a device context belongs to a thread) and runs one job at a time.
Jobs are made on the event loop, and report to it; nothing else is shared. Text is assembled here, between two tokens,
so that a stop string ends generation before the next token is computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.core import FinishReason, GenerationRequest, Progress, TokenLogprobs, TokenResult
from engine.errors import Cancelled, FermionError, KernelError
from server.errors import ApiError
from server.textstream import Delta, TextStream

log = logging.getLogger("fermion.worker")

# Bounds of Retry-After in seconds: official clients ignore more than two minutes.
_RETRY_MIN_S = 1
_RETRY_MAX_S = 120


class GeneratingEngine(Protocol):
    """The part of `engine.engine.Engine` that serving needs; tests put a scripted one in its place."""

    @property
    def context_length(self) -> int: ...

    def generate(
        self, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> Generator[Progress | TokenResult, None, None]: ...

    def close(self) -> None: ...


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
class Deltas:
    """New text of choice `index`. logprobs: (token id, log-probabilities) of the answer tokens behind it, if asked."""

    index: int
    deltas: Sequence[Delta]
    logprobs: Sequence[tuple[int, TokenLogprobs]] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """Choice `index` is complete. reason: "stop", "length" or "tool_calls"; counts in tokens."""

    index: int
    reason: str
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a job that ran to its end."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a job that did not."""

    error: BaseException


Choice = tuple[GenerationRequest, TextStream]
JobEvent = Started | Progress | Deltas | ChoiceFinished | Finished | Failed


class Job:
    """One request on its way through the queue and the engine.

    choices: what to generate, each with the stream that turns its tokens to text; they run one after another.
    Events are read on the event loop that made the job. Times are seconds of `time.monotonic`.
    """

    def __init__(self, job_id: str, choices: Sequence[Choice]) -> None:
        self.id = job_id
        self.choices = choices
        self.state = JobState.QUEUED
        self.progress: Progress | None = None
        self.completion_tokens = 0
        self.created_at = time.monotonic()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self._events: asyncio.Queue[JobEvent] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._is_cancelled = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.choices[0][0].prompt.token_ids)

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    @property
    def is_over(self) -> bool:
        return self.state in (JobState.FINISHED, JobState.CANCELLED, JobState.FAILED)

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


class EngineWorker:
    """Queue and thread. All public methods are called from the event loop, unless they say otherwise.

    load: makes the engine, called once in the worker's thread; max_queued: jobs that may wait.
    """

    def __init__(self, load: Callable[[], GeneratingEngine], *, max_queued: int) -> None:
        self._load = load
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._engine: GeneratingEngine | None = None
        self._context_length = 0
        self._closing = False
        self._draining = False
        self._failure: BaseException | None = None
        self._job_seconds = 0.0
        self._thread = threading.Thread(target=self._main, name="fermion-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """Why the engine is unusable, if it is."""
        return self._failure

    @property
    def is_ready(self) -> bool:
        """The engine is loaded and accepts work."""
        return self._engine is not None and self._failure is None and not self._draining

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together. Only meaningful once the engine is ready."""
        return self._context_length

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Jobs in the engine: 0 or 1."""
        return int(self._running is not None)

    def check_admission(self) -> None:
        """Raise the ApiError that a new job would meet now."""
        if self._failure is not None:
            raise ApiError(503, "The engine has failed; the server must be restarted.", code="engine_failure")
        if self._draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down")
        if self._engine is None:
            raise ApiError(503, "The model is still being loaded.", code="model_loading", retry_after_s=5)
        if len(self._queue) >= self._max_queued:
            raise ApiError(
                429,
                f"The queue is full: {len(self._queue)} requests are waiting. Try again later.",
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )

    def submit(self, job: Job) -> None:
        """Queue `job`, or raise ApiError."""
        with self._changed:
            self.check_admission()
            self._queue.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Withdraw `job`: at once if it waits, else at the next layer or token. Safe at any time, and repeatedly."""
        with self._changed:
            job.request_cancel()
            if job in self._queue:
                self._queue.remove(job)
                self._finish(job, JobState.CANCELLED, Failed(Cancelled("The request was withdrawn while queued.")))

    def queue_position(self, job: Job) -> int | None:
        """How many jobs stand before a waiting one; None if it does not wait."""
        with self._changed:
            return self._queue.index(job) if job in self._queue else None

    def drain(self) -> None:
        """Refuse new jobs from now on; those accepted go on."""
        with self._changed:
            self._draining = True

    def abort_all(self, error: ApiError) -> None:
        """End every job with `error`, waiting or running."""
        with self._changed:
            for job in self._queue:
                self._finish(job, JobState.FAILED, Failed(error))
            self._queue.clear()
            if self._running is not None:
                self._running.request_cancel()
                self._running.post(Failed(error))

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop the thread and close the engine; blocks for the rest of the running step. Any thread may call it."""
        with self._changed:
            self._draining = True
            self._closing = True
            for job in self._queue:
                self._finish(job, JobState.CANCELLED, Failed(Cancelled("The server is shutting down.")))
            self._queue.clear()
            if self._running is not None:
                self._running.request_cancel()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _retry_after_s(self) -> int:
        """Estimated seconds until a place is free: the queue moves by one when the running job ends."""
        job = self._running
        elapsed = time.monotonic() - job.started_at if job is not None and job.started_at is not None else 0.0
        return max(_RETRY_MIN_S, min(_RETRY_MAX_S, math.ceil(self._job_seconds - elapsed)))

    # From here on: the worker's thread.

    def _main(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            log.error("The engine could not be loaded: %s", error, exc_info=not isinstance(error, FermionError))
            self._failure = error
            return
        self._context_length = engine.context_length
        self._engine = engine
        try:
            while (job := self._take()) is not None:
                self._run(engine, job)
                if self._failure is not None:
                    break
        finally:
            engine.close()

    def _take(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._closing:
                return None
            job = self._queue.popleft()
            job.started_at = time.monotonic()
            job.state = JobState.PREFILL
            self._running = job
        return job

    def _run(self, engine: GeneratingEngine, job: Job) -> None:
        started = time.monotonic()
        state, last = JobState.FINISHED, self._generate(engine, job)
        if isinstance(last, Failed):
            state = JobState.CANCELLED if isinstance(last.error, Cancelled) else JobState.FAILED
        else:
            seconds = time.monotonic() - started
            self._job_seconds = 0.8 * self._job_seconds + 0.2 * seconds if self._job_seconds else seconds
        with self._changed:
            self._running = None
            if isinstance(last, Failed) and isinstance(last.error, KernelError):
                self._fail(last.error)
            self._finish(job, state, last)

    def _fail(self, error: KernelError) -> None:
        """State touched by a failed kernel is suspect, and so is the device: nothing more is computed here."""
        self._failure = error
        for job in self._queue:
            self._finish(job, JobState.FAILED, Failed(error))
        self._queue.clear()

    def _finish(self, job: Job, state: JobState, event: Finished | Failed) -> None:
        job.state = state
        job.finished_at = time.monotonic()
        job.post(event)

    def _generate(self, engine: GeneratingEngine, job: Job) -> Finished | Failed:
        try:
            job.post(Started())
            for index, (request, stream) in enumerate(job.choices):
                if job.is_cancelled:
                    raise Cancelled("The request was withdrawn.")
                self._generate_choice(engine, job, index, request, stream)
        except FermionError as error:
            return Failed(error)
        except Exception as error:
            log.exception("Request %s failed", job.id)
            return Failed(error)
        return Finished()

    def _generate_choice(
        self, engine: GeneratingEngine, job: Job, index: int, request: GenerationRequest, stream: TextStream
    ) -> None:
        tokens, cached = 0, 0
        logprobs: list[tuple[int, TokenLogprobs]] = []
        reason = FinishReason.LENGTH
        steps = engine.generate(request, lambda: job.is_cancelled)
        try:
            for step in steps:
                if isinstance(step, Progress):
                    cached = step.cached
                    job.progress = step
                    job.post(step)
                    continue
                if job.first_token_at is None:
                    job.first_token_at = time.monotonic()
                job.state = JobState.DECODE
                tokens += 1
                job.completion_tokens += 1
                if step.token_id not in request.stop_token_ids:
                    if step.logprobs is not None and not stream.in_reasoning:
                        logprobs.append((step.token_id, step.logprobs))
                    if deltas := stream.feed(step.token_id):
                        job.post(Deltas(index, deltas, logprobs))
                        logprobs = []
                if step.finish_reason is not None:
                    reason = step.finish_reason
                if stream.stopped:
                    reason = FinishReason.STOP
                    break
                if job.is_cancelled:
                    raise Cancelled("The request was withdrawn.")
        finally:
            steps.close()
        deltas = stream.finish(truncated=reason is FinishReason.LENGTH)
        if deltas or logprobs:
            job.post(Deltas(index, deltas, logprobs))
        called = stream.has_tool_calls and reason is FinishReason.STOP
        job.post(
            ChoiceFinished(index, "tool_calls" if called else reason.value, tokens, stream.reasoning_tokens, cached)
        )
