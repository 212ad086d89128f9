"""/v1/cache: what the prefix cache holds of one tenant, and what is to be kept, dropped or prepared.

A tenant (an API key) sees and changes only its own snapshots.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.types import Receive, Scope, Send

from engine.core import CacheControl, CacheEntry
from server import answering
from server.chatwire import UsageCount
from server.errors import ApiError
from server.job import ChoiceFinished, JobEvent, Work
from server.routes import Service
from server.schema import ChatCompletionRequest, PinRequest, parse_request
from server.transport import read_body, record_of, send_json, tenant_of

_MAX_LISTED = 1000


def _control(service: Service) -> CacheControl:
    """The cache. 503 while the model is being loaded, 404 if the server runs without one."""
    cache = service.worker.cache
    if cache is None:
        if not service.worker.is_ready:
            service.worker.check_admission()
        raise ApiError(404, "This server runs without a prefix cache.", code="cache_disabled")
    return cache


class CacheList:
    """GET /v1/cache: the tenant's snapshots, deepest first. DELETE: drop them all, pinned ones too."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cache, tenant = _control(self._service), tenant_of(scope)
        if scope["method"] == "DELETE":
            deleted = await asyncio.to_thread(self._delete, cache, tenant)
            await send_json(send, {"object": "cache.deleted", "deleted": deleted})
        else:
            entries = await asyncio.to_thread(cache.entries, tenant, _MAX_LISTED)
            await send_json(send, {"object": "list", "data": [_snapshot(entry) for entry in entries]})

    def _delete(self, cache: CacheControl, tenant: bytes) -> int:
        self._service.worker.forget_ahead(tenant)
        self._service.prompts.forget(tenant)
        return cache.clear(tenant)


def _snapshot(entry: CacheEntry) -> dict[str, Any]:
    return {"object": "cache.snapshot", **asdict(entry)}


class CachePin:
    """POST /v1/cache/pin and /v1/cache/unpin: keep a snapshot whatever else needs room, or stop that."""

    def __init__(self, service: Service, *, pinned: bool) -> None:
        self._service = service
        self._pinned = pinned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = parse_request(PinRequest, await read_body(scope, receive, self._service.max_body_bytes))
        cache = _control(self._service)
        if not await asyncio.to_thread(cache.pin, request.id, self._pinned, tenant_of(scope)):
            raise ApiError(404, "There is no such snapshot.", code="snapshot_not_found", param="id")
        await send_json(send, {"object": "cache.snapshot", "id": request.id, "pinned": self._pinned})


class CacheWarm:
    """POST /v1/cache/warm: read a conversation ahead of its question. Takes a chat request; generates nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        record = record_of(scope)
        body = await read_body(scope, receive, service.max_body_bytes)
        _control(service)
        request = await asyncio.to_thread(self._prepare, body)
        work = await service.chat_work(request, scope)
        job = await service.job(scope, work, body)
        answer = _Warmed(work)
        await answering.whole(service.worker, job, answer, record, receive, send, service.keep_alive_s)

    def _prepare(self, body: bytes) -> ChatCompletionRequest:
        request = self._service.check(ChatCompletionRequest, body)
        reading = {"max_tokens": 0, "max_completion_tokens": None, "n": 1, "stream": None, "stream_options": None}
        return request.model_copy(update=reading)


class _Warmed:
    """The answer to a request to warm the cache."""

    def __init__(self, work: Work) -> None:
        self._usage = UsageCount(work.prompt_tokens)

    def add(self, event: JobEvent) -> None:
        """Take in one event."""
        if isinstance(event, ChoiceFinished):
            self._usage.add(event)

    def wire(self) -> dict[str, Any]:
        """The response body."""
        return {"object": "cache.warmed", "usage": self._usage.wire(), **self._usage.extension()}
