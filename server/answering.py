"""From a job's events to the client's connection: streamed or whole, kept alive, cut off when the client leaves.

Shared by all generating endpoints; what the bytes look like is the business of the writer that each brings along.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from starlette.types import Receive, Send

from server import sse
from server.errors import ApiError, to_api_error
from server.job import Failed, Finished, Job, JobEvent
from server.transport import AccessRecord, on_disconnect, send_json
from server.worker import EngineWorker

log = logging.getLogger("fermion.api")


class StreamWriter(Protocol):
    """Turns events into the bytes of one event stream."""

    def write(self, event: JobEvent) -> bytes: ...


class AnswerWriter(Protocol):
    """Collects events into one response body."""

    def add(self, event: JobEvent) -> None: ...

    def wire(self) -> dict[str, Any]: ...


class _Silence:
    """Time since the last byte on a connection. Events that put nothing on the wire do not break a silence."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.restart()

    def restart(self) -> None:
        """A byte was sent."""
        self._end = time.monotonic() + self._limit_s

    @property
    def left_s(self) -> float:
        """Seconds until a byte is due."""
        return max(0.0, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end


@asynccontextmanager
async def _running(worker: EngineWorker, job: Job, record: AccessRecord, receive: Receive) -> AsyncIterator[None]:
    """Submit `job` (ApiError if there is no room) and withdraw it if the block is left before its end."""
    record.prompt_tokens = job.work.prompt_tokens
    worker.submit(job)
    try:
        async with on_disconnect(receive, lambda: worker.cancel(job)):
            yield
    finally:
        worker.cancel(job)
        _note(record, job)


async def stream(
    worker: EngineWorker,
    job: Job,
    writer: StreamWriter,
    record: AccessRecord,
    receive: Receive,
    send: Send,
    keep_alive_s: float,
) -> None:
    """Answer with an event stream. The status line goes out as soon as the job has its place in the queue."""
    async with _running(worker, job, record, receive):
        await send({"type": "http.response.start", "status": 200, "headers": [*sse.HEADERS]})
        silence = _Silence(keep_alive_s)
        while True:
            event = await job.next_event(silence.left_s)
            data = b"" if event is None else writer.write(event)
            is_last = isinstance(event, Finished | Failed)
            if not data and not is_last and silence.is_over:
                data = sse.KEEP_ALIVE
            if data or is_last:
                silence.restart()
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if isinstance(event, Failed):
                _note_failure(record, job, event)
            if is_last:
                return


async def whole(
    worker: EngineWorker,
    job: Job,
    answer: AnswerWriter,
    record: AccessRecord,
    receive: Receive,
    send: Send,
    keep_alive_s: float,
) -> None:
    """Answer with one JSON object. While it takes long, line breaks go ahead: JSON allows and proxies need them."""
    async with _running(worker, job, record, receive):
        is_started = False
        silence = _Silence(keep_alive_s)
        while True:
            event = await job.next_event(silence.left_s)
            if isinstance(event, Failed):
                _note_failure(record, job, event)
                if not is_started:
                    raise to_api_error(event.error)
                # The status is out. An unterminated body is the only way left to say that this is no answer.
                return
            if isinstance(event, Finished):
                if is_started:
                    body = sse.dumps(answer.wire()).encode()
                    await send({"type": "http.response.body", "body": body})
                else:
                    await send_json(send, answer.wire())
                return
            if event is not None:
                answer.add(event)
            if silence.is_over:
                if not is_started:
                    is_started = True
                    headers = [(b"content-type", b"application/json"), sse.UNBUFFERED]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                silence.restart()
                await send({"type": "http.response.body", "body": b"\n", "more_body": True})


def _note_failure(record: AccessRecord, job: Job, event: Failed) -> None:
    error = to_api_error(event.error)
    if error.status >= 500 and not isinstance(event.error, ApiError):
        log.error("request %s: %s", job.id, event.error)
    record.outcome = error.code
    # With the status line out, the log must not say 200 of a request that was given up.
    if error.status == 499 and record.status:
        record.status = error.status


def _note(record: AccessRecord, job: Job) -> None:
    """Copy a job's counts and times to the access record."""
    record.completion_tokens = job.completion_tokens
    if job.progress is not None:
        record.cached_tokens = job.cached_tokens
    started, first, finished = job.started_at, job.first_token_at, job.finished_at
    if started is not None:
        record.queue_s = started - job.created_at
        if first is not None:
            record.prefill_s = first - started
            if finished is not None:
                record.decode_s = finished - first
