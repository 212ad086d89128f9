"""Server-sent events: values to bytes. Owns the wire format of a stream, knows nothing of its content."""

from __future__ import annotations

import json
from typing import Any

from server.errors import ApiError

# nginx keeps back what it proxies until it is complete or fills a buffer, unless told not to.
UNBUFFERED = (b"x-accel-buffering", b"no")
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    UNBUFFERED,
)
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> str:
    """Compact JSON with characters as they are; NaN and infinity are our own bug and raise ValueError."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def event(value: Any, name: str | None = None) -> bytes:
    """One event: an optional `event:` line and one `data:` line (JSON never holds a raw line break)."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {dumps(value)}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed after its first byte."""
    return event(error.body())
