"""The endpoints. Each checks its request, hands a job to the worker and writes the job's events to the client.

Every check that can refuse (schema, template, context, room in the queue) is made before the first byte is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from engine.image import Picture
from server import answering
from server.chatwire import AnswerHead, ChatAnswer, ChatStream, UsageCount
from server.errors import ApiError, invalid
from server.generation import ChoiceBuilder
from server.images import PictureReader, picture_parts, refuse_pictures
from server.job import Job, Work
from server.logprobs import TokenNames
from server.metrics import Metrics
from server.prompt import ChatPrompt, PromptBuilder
from server.schema import (
    ChatCompletionRequest,
    StreamableRequest,
    is_hint,
    parse_request,
    reject_unsupported,
    unknown_fields,
)
from server.transport import header, read_body, record_of, send_json, tenant_of
from server.worker import EngineWorker

log = logging.getLogger("fermion.api")

Generating = TypeVar("Generating", bound=StreamableRequest)

_MAX_LOGGED_NAMES = 1000
# Hashing a body of this many bytes takes about a millisecond.
_LARGE_BODY = 1 << 18


class UnknownFieldLog:
    """Says once per name that a field has no effect, and whether it is known. Bounded: names come from clients."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            name = name[:80]
            if name not in self._seen and len(self._seen) < _MAX_LOGGED_NAMES:
                self._seen.add(name)
                why = "is a hint that changes nothing here" if is_hint(name) else "is not known; it is ignored"
                log.warning("Request field %r %s.", name, why)


@dataclass(frozen=True)
class Service:
    """What the endpoints share.

    model: the served name; created: Unix seconds of the start; keep_alive_s: longest silence on a connection;
    max_body_bytes: largest request body; pictures: None for a model that reads none.
    """

    worker: EngineWorker
    prompts: PromptBuilder
    choices: ChoiceBuilder
    tokens: TokenNames
    metrics: Metrics
    model: str
    keep_alive_s: float
    max_body_bytes: int
    pictures: PictureReader | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    unknown: UnknownFieldLog = field(default_factory=UnknownFieldLog)

    def check_model(self, name: str) -> None:
        """404 for a model that is not served here."""
        if name != self.model:
            raise ApiError(
                404,
                f"The model '{name[:200]}' does not exist here. This server serves '{self.model}'.",
                code="model_not_found",
                param="model",
            )

    def check(self, kind: type[Generating], body: bytes) -> Generating:
        """A request of type `kind` that this server can try to serve. Raises ApiError."""
        request = parse_request(kind, body)
        reject_unsupported(request)
        self.check_model(request.model)
        self.unknown.note(unknown_fields(request))
        if request.stream_options is not None and not request.stream:
            raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        self.worker.check_admission()
        return request

    async def read_pictures(self, request: ChatCompletionRequest, scope: Scope) -> tuple[Picture, ...]:
        """The pictures of the messages, in order. Raises ApiError for those that cannot be read."""
        parts = list(picture_parts(request.messages))
        if self.pictures is None:
            refuse_pictures(parts)
        if self.pictures is None or not parts:
            return ()
        return await self.pictures.read(parts, tenant_of(scope))

    async def chat_prompt(self, request: ChatCompletionRequest, scope: Scope) -> ChatPrompt:
        """What the model would read for a chat request. Raises ApiError or RequestError."""
        pictures = await self.read_pictures(request, scope)
        return await asyncio.to_thread(self.prompts.chat, request, None, pictures, scope=tenant_of(scope))

    async def chat_work(self, request: ChatCompletionRequest, scope: Scope) -> Work:
        """The work of a checked chat request: everything that can refuse it but the queue. Raises ApiError or
        RequestError."""
        pictures = await self.read_pictures(request, scope)
        # Rendering and tokenising a long conversation takes a while, and others are being answered meanwhile.
        return await asyncio.to_thread(
            self.choices.chat,
            request,
            record_of(scope).request_id,
            self.worker.context_length,
            tenant_of(scope),
            pictures,
        )

    async def job(self, scope: Scope, work: Work, body: bytes) -> Job:
        """The job of a checked request. One that a client library repeats replaces its earlier self."""
        given = header(scope, b"authorization") or header(scope, b"x-api-key") or b""
        hashed = hashlib.sha256(b"\0".join((scope["path"].encode(), given, b"")))
        if len(body) < _LARGE_BODY:
            hashed.update(body)
        else:
            await asyncio.to_thread(hashed.update, body)
        digest = hashed.digest()
        if (header(scope, b"x-stainless-retry-count") or b"0") != b"0":
            for orphan in self.worker.repetitions(digest):
                self.worker.cancel(orphan)
        return Job(record_of(scope).request_id, work, digest, tenant_of(scope))

    def model_object(self) -> dict[str, Any]:
        """The entry of the models list."""
        model = {"id": self.model, "object": "model", "created": self.created, "owned_by": "fermion"}
        if self.worker.is_ready:
            model["max_model_len"] = self.worker.context_length
        return model


class ChatCompletions:
    """POST /v1/chat/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        record = record_of(scope)
        body = await read_body(scope, receive, service.max_body_bytes)
        request = await asyncio.to_thread(service.check, ChatCompletionRequest, body)
        work = await service.chat_work(request, scope)
        job = await service.job(scope, work, body)
        head = AnswerHead(f"chatcmpl-{record.request_id}", int(time.time()), service.model, len(work.choices))
        usage = UsageCount(work.prompt_tokens)
        if request.stream:
            stream = ChatStream(
                head,
                usage,
                include_usage=request.include_usage,
                return_progress=bool(request.return_progress),
                tokens=service.tokens,
            )
            await answering.stream(service.worker, job, stream, record, receive, send, service.keep_alive_s)
        else:
            answer = ChatAnswer(head, usage, service.tokens)
            await answering.whole(service.worker, job, answer, record, receive, send, service.keep_alive_s)


class ModelsList:
    """GET /v1/models."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"object": "list", "data": [self._service.model_object()]})


class ModelEntry:
    """GET /v1/models/{id}; ids may hold slashes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.check_model(scope["path_params"]["model"])
        await send_json(send, self._service.model_object())


class Health:
    """GET /health: 200 while requests are accepted, else 503 with the reason."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        worker = self._service.worker
        if worker.failure is not None:
            status = "failed"
        elif worker.is_draining:
            status = "shutting_down"
        else:
            status = "ok" if worker.is_ready else "loading"
        body = {"status": status, "queued": worker.queued, "running": worker.running}
        await send_json(send, body, 200 if status == "ok" else 503)
