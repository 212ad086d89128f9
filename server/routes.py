"""The endpoints. Each checks its request, hands a job to the worker and writes the job's events to the client.

Every check that can refuse (schema, template, context, room in the queue) is made before the first byte is sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import Receive, Scope, Send

from engine.core import GenerationRequest
from server import answering
from server.chatwire import AnswerHead, ChatAnswer, ChatStream, UsageCount
from server.errors import ApiError, invalid, unsupported
from server.prompt import PromptBuilder, output_limit, stop_strings
from server.schema import ChatCompletionRequest, parse_request, reject_unsupported, unknown_fields
from server.textstream import TextStream
from server.toolcalls import ToolCallParser
from server.transport import REST_OF_PATH, read_body, record_of, send_json
from server.worker import Choice, EngineWorker, Job

log = logging.getLogger("fermion.api")

_MAX_LOGGED_NAMES = 1000


class UnknownFieldLog:
    """Says once per name that a field is not known and was ignored. Bounded: names come from clients."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            name = name[:80]
            if name not in self._seen and len(self._seen) < _MAX_LOGGED_NAMES:
                self._seen.add(name)
                log.warning("Request field %r is not known; it is ignored.", name)


@dataclass(frozen=True)
class Service:
    """What the endpoints share.

    model: the served name; created: Unix seconds of the start; keep_alive_s: longest silence on a connection;
    max_body_bytes: largest request body.
    """

    worker: EngineWorker
    prompts: PromptBuilder
    model: str
    keep_alive_s: float
    max_body_bytes: int
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
        # Parsing and tokenising a long conversation takes a while, and others are being answered meanwhile.
        request, choices = await asyncio.to_thread(self._prepare, body, record.request_id)
        job = Job(record.request_id, choices)
        head = AnswerHead(f"chatcmpl-{record.request_id}", int(time.time()), service.model, len(choices))
        usage = UsageCount(job.prompt_tokens)
        if request.stream:
            stream = ChatStream(
                head,
                usage,
                include_usage=request.include_usage,
                return_progress=bool(request.return_progress),
            )
            await answering.stream(service.worker, job, stream, record, receive, send, service.keep_alive_s)
        else:
            answer = ChatAnswer(head, usage)
            await answering.whole(service.worker, job, answer, record, receive, send, service.keep_alive_s)

    def _prepare(self, body: bytes, request_id: str) -> tuple[ChatCompletionRequest, list[Choice]]:
        """Everything that can refuse the request but the queue. Runs in a helper thread."""
        service = self._service
        request = parse_request(ChatCompletionRequest, body)
        reject_unsupported(request)
        service.check_model(request.model)
        service.unknown.note(unknown_fields(request))
        if request.stream_options is not None and not request.stream:
            raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        service.worker.check_admission()
        _reject_missing_features(request)
        stops = stop_strings(request.stop)
        chat = service.prompts.chat(request)
        generation = service.prompts.generation_request(
            request,
            chat.prompt,
            request_id=request_id,
            max_tokens=output_limit(request),
            context_length=service.worker.context_length,
        )
        choices: list[Choice] = []
        for index in range(request.n or 1):
            stream = TextStream(
                service.prompts.tokenizer.token_bytes,
                think_end=service.prompts.think_end,
                in_reasoning=chat.in_reasoning,
                stops=stops,
                tools=_tool_parser(request),
                tool_start=service.prompts.tool_start,
            )
            choices.append((_variant(generation, index), stream))
        return request, choices


def _variant(generation: GenerationRequest, index: int) -> GenerationRequest:
    """The generation of choice `index`: a fixed seed must not make all choices the same."""
    seed = generation.sampling.seed
    if seed is None or index == 0:
        return generation
    return replace(generation, sampling=replace(generation.sampling, seed=(seed + index) % 2**63))


def _tool_parser(request: ChatCompletionRequest) -> ToolCallParser | None:
    if not request.tools:
        return None
    return ToolCallParser(
        {tool.function.name: tool.function.parameters for tool in request.tools},
        parallel=request.parallel_tool_calls is not False,
        report=request.tool_choice != "none",
    )


def _reject_missing_features(request: ChatCompletionRequest) -> None:
    """Fields of the schema that are typed but not served: refused by name unless they ask for nothing."""
    if request.logprobs or request.top_logprobs:
        raise unsupported("logprobs" if request.logprobs else "top_logprobs")
    if request.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "Only 'none' and 'auto' are.")
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported("response_format")
    if request.thinking_token_budget is not None:
        raise unsupported("thinking_token_budget")


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
        self._service.check_model(scope[REST_OF_PATH])
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
