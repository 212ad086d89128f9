"""Endpoints that look inside: tokens, templates, metrics, the state of requests. None of them uses the engine."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send

from server.errors import ApiError, invalid
from server.routes import Service
from server.schema import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest, parse_request
from server.transport import read_body, send_json, tenant_of


class Tokenize:
    """POST /tokenize: ids of a text, or of a conversation as the model would read it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = await read_body(scope, receive, service.max_body_bytes)
        request = await asyncio.to_thread(parse_request, TokenizeRequest, body)
        if request.model is not None:
            service.check_model(request.model)
        ids = await self._ids(request, body, scope)
        await send_json(send, await asyncio.to_thread(self._answer, request, ids))

    async def _ids(self, request: TokenizeRequest, body: bytes, scope: Scope) -> list[int]:
        service = self._service
        if request.messages is not None:
            defaults = {"model": service.model}
            chat = await asyncio.to_thread(parse_request, ChatCompletionRequest, body, defaults)
            ids: list[int] = (await service.chat_prompt(chat, scope)).prompt.token_ids.tolist()
            return ids
        if request.prompt is None:
            raise invalid("Either 'prompt' or 'messages' is needed.", "prompt")
        # Special tokens are the caller's wish here: nothing is generated from them.
        is_special = request.parse_special is True
        return await asyncio.to_thread(service.prompts.tokenizer.encode, request.prompt, is_special)

    def _answer(self, request: TokenizeRequest, ids: list[int]) -> dict[str, Any]:
        service = self._service
        answer = {"count": len(ids), "max_model_len": service.worker.context_length, "tokens": ids}
        if request.return_token_strs:
            answer["token_strs"] = [service.tokens.text(token) for token in ids]
        return answer


class Detokenize:
    """POST /detokenize: the text of token ids."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        request = parse_request(DetokenizeRequest, await read_body(scope, receive, service.max_body_bytes))
        limit = service.prompts.tokenizer.vocab_size
        if any(not 0 <= token < limit for token in request.tokens):
            raise invalid(f"Token ids go from 0 to {limit - 1}.", "tokens")
        text = b"".join(map(service.tokens.raw, request.tokens)).decode("utf-8", "replace")
        await send_json(send, {"prompt": text})


class ApplyTemplate:
    """POST /apply-template: the text that the model would read for a chat request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = await read_body(scope, receive, service.max_body_bytes)
        request = await asyncio.to_thread(parse_request, ChatCompletionRequest, body, {"model": service.model})
        await send_json(send, {"prompt": (await service.chat_prompt(request, scope)).text})


class MetricsPage:
    """GET /metrics."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._service.metrics.text()
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class RequestState:
    """GET /v1/requests/{id}: where a request is. DELETE: withdraw it. The id is that of the answer or x-request-id."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        worker = self._service.worker
        # Ids of answers are a word, a separator and the id of the request.
        job_id = scope["path_params"]["request"].replace("_", "-").rpartition("-")[2]
        status = worker.status(job_id)
        # Requests of other keys are not there, like their cached prompts.
        if status is None or status.tenant != tenant_of(scope):
            raise ApiError(404, "There is no such request, or it was over long ago.", code="request_not_found")
        job = worker.active_job(job_id)
        if scope["method"] == "DELETE" and job is not None:
            worker.cancel(job)
            status = job.status()
        await send_json(
            send,
            {
                "id": job_id,
                "object": "request",
                "state": status.state.value,
                "queue_position": None if job is None else worker.queue_position(job),
                "prompt_tokens": status.prompt_tokens,
                "processed_tokens": status.processed_tokens,
                "cached_tokens": status.cached_tokens,
                "completion_tokens": status.completion_tokens,
                "queue_ms": round(status.queue_s * 1000),
                "run_ms": round(status.run_s * 1000),
                "eta_ms": 0 if job is None else round(worker.seconds_left(job) * 1000),
            },
        )
