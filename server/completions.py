"""POST /v1/completions: raw text in, raw text out.

The prompt is all that the model reads, so the control tokens that it spells are meant (`parse_special` false: text).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from starlette.types import Receive, Scope, Send

from engine.core import GenerationRequest, Progress, Prompt, TokenLogprobs
from engine.errors import RequestError
from server import answering, sse
from server.chatwire import AnswerHead, UsageCount
from server.errors import invalid, to_api_error, unsupported
from server.generation import variant
from server.job import (
    Choice,
    ChoiceFactory,
    ChoiceFinished,
    Deltas,
    Failed,
    Finished,
    JobEvent,
    Restarted,
    Started,
    Work,
)
from server.logprobs import TokenNames
from server.prompt import stop_strings
from server.routes import Service
from server.schema import CompletionRequest
from server.textstream import TextDelta, TextStream
from server.transport import read_body, record_of, tenant_of

_DEFAULT_MAX_TOKENS = 16
_MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A checked request. echoes: what stands before the generated text, one per choice."""

    request: CompletionRequest
    work: Work
    echoes: list[str]


class Completions:
    """POST /v1/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        record = record_of(scope)
        body = await read_body(scope, receive, service.max_body_bytes)
        prepared = await asyncio.to_thread(self._prepare, body, record.request_id, tenant_of(scope))
        job = await service.job(scope, prepared.work, body)
        head = AnswerHead(f"cmpl-{record.request_id}", int(time.time()), service.model, len(prepared.echoes))
        usage = UsageCount(prepared.work.prompt_tokens)
        if prepared.request.stream:
            stream = _TextChunks(head, usage, prepared, service.tokens)
            await answering.stream(service.worker, job, stream, record, receive, send, service.keep_alive_s)
        else:
            answer = _TextAnswer(head, usage, prepared, service.tokens)
            await answering.whole(service.worker, job, answer, record, receive, send, service.keep_alive_s)

    def _prepare(self, body: bytes, request_id: str, tenant: bytes) -> PreparedCompletion:
        service = self._service
        request = service.check(CompletionRequest, body)
        if request.suffix:
            raise unsupported("suffix")
        if request.echo and request.logprobs is not None:
            raise unsupported("logprobs", "It cannot be combined with 'echo'.")
        prompts = _prompt_ids(request, service)
        per_prompt = request.n or 1
        if len(prompts) * per_prompt > _MAX_CHOICES:
            raise invalid(f"At most {_MAX_CHOICES} choices can be asked for at once.", "prompt")
        stops = stop_strings(request.stop)
        limit = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        choices: list[ChoiceFactory] = []
        echoes: list[str] = []
        for ids in prompts:
            generation = service.prompts.generation_request(
                request,
                # No turns are known in raw text. It is likely to come again as a whole.
                Prompt(np.asarray(ids, np.int32), (len(ids) - 1,) if len(ids) > 1 else ()),
                request_id=request_id,
                max_tokens=limit,
                context_length=service.worker.context_length,
                param="prompt",
                top_logprobs=request.logprobs,
                tenant=tenant,
            )
            echo = b"".join(map(service.tokens.raw, ids)).decode("utf-8", "ignore") if request.echo else ""
            for index in range(per_prompt):
                choices.append(partial(self._choice, variant(generation, index), stops))
                echoes.append(echo)
        work = Work(choices, sum(map(len, prompts)), limit, priority=request.priority or 0)
        return PreparedCompletion(request, work, echoes)

    def _choice(self, generation: GenerationRequest, stops: tuple[str, ...]) -> Choice:
        token_bytes = self._service.prompts.tokenizer.token_bytes
        return generation, TextStream(token_bytes, think_end=(), in_reasoning=False, stops=stops)


def _prompt_ids(request: CompletionRequest, service: Service) -> list[list[int]]:
    """The prompts of a request as token ids."""
    given = request.prompt
    prompts: list[Any] = [given]
    if isinstance(given, list) and given and not isinstance(given[0], int):
        prompts = list(given)
    tokenizer = service.prompts.tokenizer
    for prompt in prompts:
        if isinstance(prompt, str):
            service.prompts.refuse_hopeless(prompt, service.worker.context_length, "prompt")
    encoded = [
        tokenizer.encode(prompt, allow_special=request.parse_special is not False)
        if isinstance(prompt, str)
        else list(prompt)
        for prompt in prompts
    ]
    for ids in encoded:
        if not ids:
            raise RequestError("The prompt is empty.", param="prompt", code="invalid_value")
        if any(not 0 <= token < tokenizer.vocab_size for token in ids):
            raise invalid(f"Token ids go from 0 to {tokenizer.vocab_size - 1}.", "prompt")
    return encoded


class _TextChunks:
    """Events to the chunks of a streamed completion."""

    def __init__(self, head: AnswerHead, usage: UsageCount, prepared: PreparedCompletion, tokens: TokenNames) -> None:
        self._head = head
        self._usage = usage
        self._prepared = prepared
        self._tokens = tokens
        self._offsets = [len(echo) for echo in prepared.echoes]

    def write(self, event: JobEvent) -> bytes:
        """The bytes that `event` adds to the stream, possibly none."""
        match event:
            case Started():
                echoes = enumerate(self._prepared.echoes)
                return b"".join(self._choice(index, echo) for index, echo in echoes if echo)
            case Deltas():
                return self._deltas(event)
            case ChoiceFinished():
                self._usage.add(event)
                return self._choice(event.index, "", reason=event.reason)
            case Finished():
                usage = b""
                if self._prepared.request.include_usage:
                    usage = self._event([], usage=self._usage.wire(), **self._usage.extension())
                return usage + sse.DONE
            case Failed():
                return sse.error_event(to_api_error(event.error))
            case Progress():
                return b""
            case Restarted():
                raise AssertionError("a stream cannot start anew")

    def _deltas(self, event: Deltas) -> bytes:
        text = _text(event)
        logprobs = None
        if event.logprobs:
            logprobs = self._tokens.text_logprobs(event.logprobs, self._offsets[event.index])
            self._offsets[event.index] += sum(len(self._tokens.text(token)) for token, _ in event.logprobs)
        return self._choice(event.index, text, logprobs=logprobs)

    def _choice(
        self, index: int, text: str, *, reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        return self._event([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse.event({**_envelope(self._head), "choices": choices, **more})


@dataclass(slots=True)
class _Text:
    text: str
    reason: str | None = None
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)


class _TextAnswer:
    """Collects events into one completion object."""

    def __init__(self, head: AnswerHead, usage: UsageCount, prepared: PreparedCompletion, tokens: TokenNames) -> None:
        self._head = head
        self._usage = usage
        self._echoes = prepared.echoes
        self._tokens = tokens
        self._texts = [_Text(echo) for echo in prepared.echoes]

    def add(self, event: JobEvent) -> None:
        """Take in one event."""
        if isinstance(event, Deltas):
            self._texts[event.index].text += _text(event)
            self._texts[event.index].logprobs.extend(event.logprobs)
        elif isinstance(event, ChoiceFinished):
            self._usage.add(event)
            self._texts[event.index].reason = event.reason

    def wire(self) -> dict[str, Any]:
        """The response body."""
        return {
            **_envelope(self._head),
            "choices": [
                {
                    "index": index,
                    "text": text.text,
                    "logprobs": self._tokens.text_logprobs(text.logprobs, len(self._echoes[index]))
                    if text.logprobs
                    else None,
                    "finish_reason": text.reason,
                }
                for index, text in enumerate(self._texts)
            ],
            "usage": self._usage.wire(),
            **self._usage.extension(),
        }


def _text(event: Deltas) -> str:
    return "".join(delta.text for delta in event.deltas if isinstance(delta, TextDelta))


def _envelope(head: AnswerHead) -> dict[str, Any]:
    return {"id": head.completion_id, "object": "text_completion", "created": head.created, "model": head.model}
