"""The one thread that owns the engine, and the bounded queue in front of it.

An `EngineWorker` loads the engine in its thread (a device context belongs to a thread) and runs one job at a time.
Jobs are made on the event loop, and report to it; nothing else is shared. Text is assembled here, between two tokens,
so that a stop string ends generation before the next token is computed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

from engine.core import CacheControl, CacheReport, FinishReason, GenerationRequest, Progress, TokenLogprobs, TokenResult
from engine.errors import Cancelled, FermionError, KernelError
from server.errors import ApiError
from server.job import ChoiceFinished, Deltas, Failed, Finished, Job, JobState, JobStatus, Reply, Sequel, Started
from server.pace import Pace
from server.textstream import Delta, TextStream

log = logging.getLogger("fermion.worker")

# Bounds of Retry-After in seconds: official clients ignore more than two minutes.
_RETRY_MIN_S = 1
_RETRY_MAX_S = 120
# Finished jobs whose last state can still be asked for.
_REMEMBERED = 64
# Conversations whose next prompt may be read ahead, and how many new tokens make that worth a snapshot.
_MAX_SEQUELS = 8
_LEAST_SHADOW_TOKENS = 16


class GeneratingEngine(Protocol):
    """The part of `engine.engine.Engine` that serving needs; tests put a scripted one in its place."""

    @property
    def context_length(self) -> int: ...

    @property
    def cache(self) -> CacheControl | None: ...

    @property
    def picture_counters(self) -> Mapping[str, int]: ...

    def generate(
        self, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> Generator[Progress | TokenResult, None, None]: ...

    def close(self) -> None: ...


class EngineWorker:
    """Queue and thread. Public methods may be called from any thread; jobs are made on an event loop.

    load: makes the engine, called once in the worker's thread; max_queued: jobs that may wait; time_limit_s: how long
    one job may have the engine, 0: as long as it takes; shadow: while no job waits, read what conversations are going
    to send next; observe: told of every job that is over, in the worker's thread or the caller's.
    """

    def __init__(
        self,
        load: Callable[[], GeneratingEngine],
        *,
        max_queued: int,
        time_limit_s: float = 0.0,
        shadow: bool = True,
        observe: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self._load = load
        self._max_queued = max_queued
        self._time_limit_s = time_limit_s
        self._shadow = shadow
        self._observe = observe
        self._changed = threading.Condition()
        self._queue: list[Job] = []
        self._running: Job | None = None
        self._active: dict[str, Job] = {}
        self._over: OrderedDict[str, JobStatus] = OrderedDict()
        self._sequels: list[_Ahead] = []
        self._reading: _Ahead | None = None
        self._pace = Pace()
        self._engine: GeneratingEngine | None = None
        self._context_length = 0
        self._cache: CacheControl | None = None
        self._closing = False
        self._draining = False
        self._failure: BaseException | None = None
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
    def cache(self) -> CacheControl | None:
        """The engine's prefix cache; None before it is loaded, after it is closed, and without one."""
        return self._cache

    @property
    def picture_counters(self) -> Mapping[str, int]:
        """What became of the pictures in prompts; empty while there is no engine, and if the model does not see."""
        engine = self._engine
        return {} if engine is None else engine.picture_counters

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Jobs in the engine: 0 or 1."""
        return int(self._running is not None)

    @property
    def ahead(self) -> int:
        """Conversations whose next prompt is being read ahead, or will be as soon as there is time."""
        return len(self._sequels) + int(self._reading is not None)

    def forget_ahead(self, tenant: bytes) -> None:
        """Read nothing ahead any more of the conversations so far of one tenant. Blocks until what is being read has
        ended, by the end of the layer, so that it leaves nothing behind afterwards."""
        with self._changed:
            self._sequels = [ahead for ahead in self._sequels if ahead.sequel.tenant != tenant]
            reading = self._reading
            if reading is not None and reading.sequel.tenant == tenant:
                reading.is_unwanted = True
                self._changed.wait_for(lambda: self._reading is not reading)

    def check_admission(self) -> None:
        """Raise the ApiError that a new job would meet now."""
        if self._failure is not None:
            raise ApiError(503, "The engine has failed; the server must be restarted.", code="engine_failure")
        if self._draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down")
        if self._engine is None:
            raise ApiError(503, "The model is still being loaded.", code="model_loading", retry_after_s=5)
        if len(self._queue) + self.running > self._max_queued:
            raise ApiError(
                429,
                f"The queue is full: {len(self._queue)} requests are waiting. Try again later.",
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )

    def submit(self, job: Job) -> None:
        """Queue `job`, or raise ApiError. A running job that can start anew gives way to a more urgent one."""
        with self._changed:
            self.check_admission()
            self._queue.append(job)
            self._active[job.id] = job
            if self._running is not None and self._running.gives_way_to(job):
                self._running.is_preempted = True
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Withdraw `job`: at once if it waits, else at the next layer or token. Safe at any time, and repeatedly."""
        with self._changed:
            job.request_cancel()
            if job in self._queue:
                self._queue.remove(job)
                self._finish(job, JobState.CANCELLED, Failed(Cancelled("The request was withdrawn while queued.")))

    def active_job(self, job_id: str) -> Job | None:
        """The job with this id, unless it is over."""
        return self._active.get(job_id)

    def repetitions(self, digest: bytes) -> list[Job]:
        """Jobs of the same request that are not over."""
        with self._changed:
            return [job for job in self._active.values() if job.digest == digest]

    def status(self, job_id: str) -> JobStatus | None:
        """State of a job that is not over, or was among the last to be."""
        with self._changed:
            job = self._active.get(job_id)
            return self._over.get(job_id) if job is None else job.status()

    def queue_position(self, job: Job) -> int | None:
        """How many waiting jobs stand before a waiting one; None if it does not wait."""
        with self._changed:
            return self._before(job).index(job) if job in self._queue else None

    def seconds_left(self, job: Job) -> float:
        """Estimated time until `job` is done, from measured speeds; 0 as long as nothing is known."""
        with self._changed:
            ahead = [] if self._running is None else [self._running]
            if job in self._queue:
                order = self._before(job)
                ahead += order[: order.index(job) + 1]
            return sum(self._pace.seconds_left(other) for other in ahead)

    def drain(self) -> None:
        """Refuse new jobs from now on; those accepted go on."""
        with self._changed:
            self._draining = True

    def abort_all(self, error: ApiError) -> None:
        """End every job with `error`, waiting or running."""
        with self._changed:
            self._fail_queue(error)
            if self._running is not None:
                self._running.request_cancel()
                self._running.post(Failed(error))

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop the thread and close the engine; blocks for the rest of the running step."""
        with self._changed:
            self._draining = True
            self._closing = True
            self._fail_queue(Cancelled("The server is shutting down."))
            if self._running is not None:
                self._running.request_cancel()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # The lock is held by those who call these.

    def _before(self, job: Job) -> list[Job]:
        """The waiting jobs in the order in which they would start now."""
        now = time.monotonic()
        return sorted(self._queue, key=lambda waiting: waiting.urgency(now))

    def _retry_after_s(self) -> int:
        """Estimated seconds until a place is free: the queue moves by one when the running job ends."""
        left = 0.0 if self._running is None else self._pace.seconds_left(self._running)
        return max(_RETRY_MIN_S, min(_RETRY_MAX_S, math.ceil(left)))

    def _fail_queue(self, error: FermionError) -> None:
        state = JobState.CANCELLED if isinstance(error, Cancelled) else JobState.FAILED
        for job in self._queue:
            self._finish(job, state, Failed(error))
        self._queue.clear()

    def _finish(self, job: Job, state: JobState, event: Finished | Failed) -> None:
        job.state = state
        job.finished_at = time.monotonic()
        self._active.pop(job.id, None)
        self._over[job.id] = job.status()
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        self._observe(job)
        job.post(event)

    # From here on: the worker's thread.

    def _main(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            log.error("The engine could not be loaded: %s", error, exc_info=not isinstance(error, FermionError))
            self._failure = error
            return
        self._context_length = engine.context_length
        self._cache = engine.cache
        self._engine = engine
        try:
            while self._failure is None and (work := self._take()) is not None:
                if isinstance(work, Job):
                    self._run(engine, work)
                else:
                    self._read_ahead(engine, work)
        finally:
            self._cache = None
            engine.close()

    def _take(self) -> Job | _Ahead | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing or (self._sequels and not self._draining))
            if self._closing:
                return None
            if not self._queue:
                self._reading = self._sequels.pop()
                return self._reading
            now = time.monotonic()
            job = min(self._queue, key=lambda waiting: waiting.urgency(now))
            self._queue.remove(job)
            job.started_at = now
            if self._time_limit_s:
                job.deadline = now + self._time_limit_s
            job.state = JobState.PREFILL
            self._running = job
        return job

    def _run(self, engine: GeneratingEngine, job: Job) -> None:
        last = self._generate(engine, job)
        with self._changed:
            self._running = None
            if isinstance(last, Finished):
                self._finish(job, JobState.FINISHED, last)
                self._pace.learn(job)
            elif not isinstance(last.error, Cancelled):
                if isinstance(last.error, KernelError):
                    # State touched by a failed kernel is suspect, and so is the device: nothing more is computed here.
                    self._failure = last.error
                    self._fail_queue(last.error)
                self._finish(job, JobState.FAILED, last)
            elif job.is_cancelled:
                self._finish(job, JobState.CANCELLED, last)
            elif job.is_preempted:
                job.restart()
                self._queue.append(job)
            else:
                self._finish(job, JobState.FAILED, Failed(_overdue(self._time_limit_s)))

    def _read_ahead(self, engine: GeneratingEngine, ahead: _Ahead) -> None:
        """Read what a conversation will send next, until there is a job: it waits for one layer at most."""
        try:
            for request in ahead.requests(engine.context_length):
                control = engine.cache
                known = 0 if control is None else control.covered(request.prompt, request.cache)
                if len(request.prompt.token_ids) - known < _LEAST_SHADOW_TOKENS:
                    continue
                for _ in engine.generate(request, lambda: ahead.is_unwanted or self._has_other_work()):
                    pass
        except Cancelled:
            # What was read is kept; the rest stays to be read, behind conversations that have moved since.
            with self._changed:
                if not ahead.is_unwanted:
                    self._sequels.insert(0, ahead)
        except FermionError as error:
            log.error("Reading ahead failed: %s", error)
            if isinstance(error, KernelError):
                with self._changed:
                    self._failure = error
                    self._fail_queue(error)
        except Exception:
            log.exception("Reading ahead failed")
        finally:
            with self._changed:
                self._reading = None
                self._changed.notify_all()

    def _has_other_work(self) -> bool:
        return bool(self._queue) or self._draining

    def _keep(self, engine: GeneratingEngine, sequel: Sequel, reply: Reply, *, only: bool) -> None:
        """Get ready for what may follow an answer, the only one to its request or not. Nothing of it is worth losing
        the answer."""
        try:
            sequel.remember(reply)
        except Exception:
            log.exception("An answer could not be remembered")
        if not (self._shadow and only and engine.cache is not None and sequel.may_be_read):
            return
        ahead = _Ahead(sequel, reply)
        with self._changed:
            self._sequels = [other for other in self._sequels if not ahead.sequel.continues(other.sequel)]
            self._sequels = [*self._sequels[1 - _MAX_SEQUELS :], ahead]

    def _generate(self, engine: GeneratingEngine, job: Job) -> Finished | Failed:
        try:
            job.post(Started())
            for index, make in enumerate(job.work.choices):
                if job.must_stop:
                    raise Cancelled("The request was withdrawn.")
                request, stream = make()
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
        report: CacheReport | None = None
        logprobs: list[tuple[int, TokenLogprobs]] = []
        generated: list[int] = []
        told: list[Delta] = []
        reason = FinishReason.LENGTH
        steps = engine.generate(request, lambda: job.must_stop)
        try:
            for step in steps:
                if isinstance(step, Progress):
                    cached, report = step.cached, step.cache
                    job.progress = step
                    if index == 0:
                        job.cached_tokens = cached
                    job.post(step)
                    continue
                if job.first_token_at is None:
                    job.first_token_at = time.monotonic()
                job.state = JobState.DECODE
                tokens += 1
                generated.append(step.token_id)
                job.completion_tokens += 1
                if step.token_id not in request.stop_token_ids:
                    if step.logprobs is not None and stream.is_answer(step.token_id):
                        logprobs.append((step.token_id, step.logprobs))
                    if deltas := stream.feed(step.token_id):
                        told += deltas
                        job.post(Deltas(index, deltas, logprobs))
                        logprobs = []
                if step.finish_reason is not None:
                    reason = step.finish_reason
                if stream.stopped:
                    reason = FinishReason.STOP
                    break
                if job.must_stop:
                    raise Cancelled("The request was withdrawn.")
        finally:
            steps.close()
        deltas = stream.finish(truncated=reason is FinishReason.LENGTH)
        if deltas or logprobs:
            job.post(Deltas(index, deltas, logprobs))
        if job.work.sequel is not None and tokens:
            reply = Reply(generated, [*told, *deltas], stream.stop_string)
            self._keep(engine, job.work.sequel, reply, only=len(job.work.choices) == 1)
        called = stream.has_tool_calls and reason is FinishReason.STOP
        job.post(
            ChoiceFinished(
                index,
                "tool_calls" if called else reason.value,
                tokens,
                stream.reasoning_tokens,
                cached,
                stream.stop_string,
                report,
            )
        )


class _Ahead:
    """An answer that was given, and what may follow it. is_unwanted: nothing must be left of it any more."""

    def __init__(self, sequel: Sequel, reply: Reply) -> None:
        self.sequel = sequel
        self.is_unwanted = False
        self._reply = reply
        self._requests: Sequence[GenerationRequest] | None = None

    def requests(self, context_length: int) -> Sequence[GenerationRequest]:
        """What to read; worked out when there is time for it, and once."""
        if self._requests is None:
            self._requests = self.sequel.shadows(self._reply, context_length)
        return self._requests


def _overdue(limit_s: float) -> ApiError:
    text = f"The answer was not complete after {limit_s:g} s of work, the limit of this server. Ask for fewer tokens."
    return ApiError(504, text, code="request_timeout")
