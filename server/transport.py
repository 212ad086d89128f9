"""ASGI plumbing: bodies, JSON answers, disconnects, and the wrappers around every request. Knows no model.

Plain ASGI throughout: wrappers that buffer a response would hide disconnects from the handlers.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import sse
from server.errors import ApiError, to_api_error

log = logging.getLogger("fermion.http")
access_log = logging.getLogger("fermion.access")

_RECORD = "fermion.record"
ANTHROPIC_PATH = "/v1/messages"
# Longest pause while a request body is being sent, seconds.
_BODY_SILENCE_S = 30.0
_TENANT = "fermion.tenant"


@dataclass(slots=True)
class AccessRecord:
    """What the access log says about one request. Filled in by whoever knows; never holds content."""

    request_id: str
    # 499: withdrawn, or the client left, whatever had been sent by then.
    status: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    outcome: str = ""

    def details(self) -> str:
        """The part of the log line that only generating requests have."""
        parts: list[str] = []
        if self.prompt_tokens is not None:
            parts.append(f"prompt={self.prompt_tokens}")
        if self.cached_tokens is not None:
            parts.append(f"cached={self.cached_tokens}")
        if self.completion_tokens is not None:
            parts.append(f"completion={self.completion_tokens}")
        if self.queue_s is not None:
            parts.append(f"queue={self.queue_s * 1000:.0f}ms")
        if self.prefill_s is not None:
            parts.append(f"prefill={self.prefill_s * 1000:.0f}ms")
        if self.decode_s and self.completion_tokens and self.completion_tokens > 1:
            parts.append(f"decode={(self.completion_tokens - 1) / self.decode_s:.1f}tok/s")
        if self.outcome:
            parts.append(self.outcome)
        return " ".join(parts)


def record_of(scope: Scope) -> AccessRecord:
    """The record of the request that `scope` belongs to."""
    record: AccessRecord = scope[_RECORD]
    return record


def tenant_of(scope: Scope) -> bytes:
    """Who must not learn what others asked: a digest of the API key; empty, one for all, where no key is asked for."""
    tenant: bytes = scope.get(_TENANT, b"")
    return tenant


class RequestEnvelope:
    """Outermost wrapper: gives the request its id, answers exceptions with a JSON error, writes the access log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = AccessRecord(request_id=secrets.token_hex(12))
        scope[_RECORD] = record
        started = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)
            if message.get("more_body"):
                # A lost connection is reported in the loop's next turn; what is written until then goes nowhere.
                await asyncio.sleep(0)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            refusal = to_api_error(error)
            if refusal.status >= 500 and not isinstance(error, ApiError):
                log.exception("request %s: unexpected failure", record.request_id)
            if record.status:
                raise
            record.outcome = refusal.code
            await send_error(send_with_id, refusal, scope["path"])
        finally:
            access_log.info(
                "%s %s %s %d %.0fms %s",
                record.request_id,
                scope["method"],
                _printable(scope["path"]),
                record.status,
                (time.monotonic() - started) * 1000,
                record.details(),
            )


def _printable(text: str) -> str:
    """Text that cannot break a log line."""
    return text[:200].encode("unicode_escape").decode("ascii")


class KeyCheck:
    """Demands one of the API keys, as Bearer token or X-Api-Key, on all paths but the open ones."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in self._open_paths:
            given = _given_key(scope)
            # Every key is compared, in constant time each, so that timing tells nothing about any of them.
            if sum([hmac.compare_digest(given, key) for key in self._keys]) == 0:
                what = "Incorrect API key provided." if given else "No API key was provided."
                raise ApiError(401, what, code="invalid_api_key")
            scope[_TENANT] = hashlib.sha256(given).digest()[:16]
        await self._app(scope, receive, send)


class Api(FastAPI):
    """FastAPI's routing for plain ASGI endpoints, and nothing around it.

    The wrappers that FastAPI puts around its routes by default answer errors themselves, which is wrong once a stream
    has begun; RequestEnvelope answers them all, before and after the first byte.
    """

    def __init__(self, endpoints: Sequence[tuple[str, str, ASGIApp]]) -> None:
        """endpoints: methods separated by blanks, path with FastAPI's parameters, application."""
        super().__init__(openapi_url=None, redirect_slashes=False)
        for methods, path, endpoint in endpoints:
            self.add_route(path, cast(Any, endpoint), methods=methods.split())

    def build_middleware_stack(self) -> ASGIApp:
        """What stands between the server and the routes: nothing."""
        return self.router


def _given_key(scope: Scope) -> bytes:
    authorization = header(scope, b"authorization")
    if authorization is not None:
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() == b"bearer":
            return token.strip()
    return header(scope, b"x-api-key") or b""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header called `name` (lower case)."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body. Over `limit` bytes it is a 413, before it is read if the length is declared.

    A client that stops sending gets a 408, a compressed body a 415.
    """
    _check_encoding(scope)
    too_large = ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(_BODY_SILENCE_S):
                message = await receive()
        except TimeoutError:
            text = f"No part of the request body came for {_BODY_SILENCE_S:.0f} s."
            raise ApiError(408, text, code="request_timeout") from None
        if message["type"] == "http.disconnect":
            raise ApiError(499, "The client closed the connection.", code="client_disconnected")
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def _check_encoding(scope: Scope) -> None:
    for name, value in scope["headers"]:
        if name == b"content-encoding":
            for encoding in value.decode("latin-1").split(","):
                if encoding.strip().lower() not in ("", "identity"):
                    text = f"Content-Encoding '{_printable(encoding.strip()[:40])}' is not supported: send plain JSON."
                    raise ApiError(415, text, code="unsupported_content_encoding")


async def send_json(send: Send, value: Any, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """A complete JSON response."""
    body = sse.dumps(value).encode()
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """A complete error response, in the shape of the API that `path` belongs to."""
    body = error.anthropic_body() if path.startswith(ANTHROPIC_PATH) else error.body()
    await send_json(send, body, error.status, error.headers())


@asynccontextmanager
async def on_disconnect(receive: Receive, callback: Callable[[], None]) -> AsyncIterator[None]:
    """Call `callback` if the client goes away while the block runs. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        callback()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
