"""Exceptions to HTTP: one table of status, type, code and parameter. Owns no transport.

The body has the OpenAI shape `{"error": {"message", "type", "param", "code"}}`, `code` always a string.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.exceptions import HTTPException

from engine.errors import (
    Cancelled,
    ConfigError,
    ContextLengthExceeded,
    FermionError,
    KernelError,
    ModelFileError,
    OutOfMemory,
    RequestError,
)


class ApiError(FermionError):
    """A refusal that already knows its HTTP form.

    status: HTTP status; code: stable machine-readable word; param: JSON path of the field at fault;
    retry_after_s: seconds for the Retry-After header, when trying again makes sense; allow: methods of a 405.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = tuple(allow)

    @property
    def kind(self) -> str:
        """The `type` word of the body, a function of the status."""
        return _TYPE_BY_STATUS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The JSON body, OpenAI shape."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The JSON body, Anthropic shape."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that belong to this refusal."""
        headers: list[tuple[bytes, bytes]] = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.allow:
            headers.append((b"allow", ", ".join(self.allow).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status == 504:
            # Official clients repeat whatever failed with 5xx; this would only take as long again.
            headers.append((b"x-should-retry", b"false"))
        return headers


_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# Exception type -> (status, code); the first match in order wins, so subclasses stand before their base.
_TABLE: tuple[tuple[type[BaseException], int, str], ...] = (
    (ContextLengthExceeded, 400, "context_length_exceeded"),
    (RequestError, 400, "invalid_request"),
    (OutOfMemory, 503, "out_of_memory"),
    (KernelError, 500, "engine_failure"),
    (ModelFileError, 500, "model_file_error"),
    (ConfigError, 500, "config_error"),
    (Cancelled, 499, "request_cancelled"),
)


def to_api_error(error: BaseException) -> ApiError:
    """The HTTP form of any exception. Unknown ones become a bare 500: their text stays in the log."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _TABLE:
        if isinstance(error, kind):
            if isinstance(error, RequestError):
                return ApiError(status, str(error), code=error.code or code, param=error.param)
            return ApiError(status, str(error), code=code)
    if isinstance(error, HTTPException):
        return _of_routing(error)
    return ApiError(500, "The server failed while answering. The cause is in its log.", code="internal_error")


def _of_routing(error: HTTPException) -> ApiError:
    """The refusals of FastAPI's router."""
    if error.status_code == 405:
        allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
        text = f"This method is not allowed here, only {', '.join(allowed)}."
        return ApiError(405, text, code="method_not_allowed", allow=allowed)
    text = "Unknown request URL. Those of the OpenAI API begin with /v1; GET /openapi.json describes all there are."
    return ApiError(error.status_code, text, code="unknown_url")


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """A 400 for a field whose value is not acceptable."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, detail: str = "") -> ApiError:
    """A 400 for a field that this server knows and does not implement."""
    text = f"Unsupported parameter: '{param}' is not supported by this server."
    return ApiError(400, f"{text} {detail}".strip(), code="unsupported_parameter", param=param)
