"""GET /openapi.json: the description of the API, made from the request types themselves."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from starlette.types import Receive, Scope, Send

from server.messages import CountTokensRequest, MessagesRequest
from server.responses import ResponsesRequest
from server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    PinRequest,
    TokenizeRequest,
    WireModel,
)
from server.transport import send_json

_POSTS: tuple[tuple[str, str, type[WireModel]], ...] = (
    ("/v1/chat/completions", "Answer a conversation, whole or as an event stream.", ChatCompletionRequest),
    ("/v1/completions", "Continue a text.", CompletionRequest),
    ("/v1/responses", "Answer in the shape of the Responses API. Nothing is stored.", ResponsesRequest),
    ("/v1/messages", "Answer in the Anthropic shape.", MessagesRequest),
    ("/v1/messages/count_tokens", "Count the prompt tokens of a message request.", CountTokensRequest),
    ("/tokenize", "Token ids of a text or of a conversation.", TokenizeRequest),
    ("/detokenize", "The text of token ids.", DetokenizeRequest),
    ("/v1/cache/warm", "Read a conversation into the prefix cache without answering it.", ChatCompletionRequest),
    ("/v1/cache/pin", "Keep a snapshot of the prefix cache from eviction.", PinRequest),
    ("/v1/cache/unpin", "Let a pinned snapshot be evicted again.", PinRequest),
    ("/apply-template", "The text that the model reads for a conversation.", ChatCompletionRequest),
)
_GETS = (
    ("/v1/models", "The served model.", "application/json"),
    ("/health", "Whether requests are accepted.", "application/json"),
    ("/metrics", "Prometheus metrics.", "text/plain"),
)
_REFERENCES = "#/components/schemas/{model}"


def describe(model: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server that serves `model`."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for path, summary, kind in _POSTS:
        schema = kind.model_json_schema(ref_template=_REFERENCES)
        schemas |= schema.pop("$defs", {})
        if "model" in kind.model_fields and kind.model_fields["model"].is_required():
            schema["properties"]["model"] = {"type": "string", "enum": [model]}
        schemas[kind.__name__] = schema
        body = {"$ref": _REFERENCES.format(model=kind.__name__)}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": {"200": {"description": "The answer."}, **_REFUSALS},
            }
        }
    for path, summary, content in _GETS:
        paths[path] = {"get": _get(summary, content)}
    paths["/v1/models/{model}"] = {"get": {**_get("One model.", "application/json"), "parameters": [_path("model")]}}
    state = {**_get("Where a request is: state, place in the queue, progress.", "application/json")}
    cancel = {**state, "summary": "Withdraw a request."}
    paths["/v1/requests/{id}"] = {"parameters": [_path("id")], "get": state, "delete": cancel}
    listed = _get("Snapshots that the prefix cache holds for the caller's key.", "application/json")
    paths["/v1/cache"] = {"get": listed, "delete": {**listed, "summary": "Delete all of them."}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "fermion", "version": version("fermion")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _get(summary: str, content: str) -> dict[str, Any]:
    answer = {"description": "The answer.", "content": {content: {}}}
    return {"summary": summary, "responses": {"200": answer, **_REFUSALS}}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    status: {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": _REFERENCES.format(model="Error")}}},
    }
    for status, text in (
        ("400", "The request cannot be served as asked; `param` names the field."),
        ("401", "The API key is missing or wrong."),
        ("404", "There is no such model, request or URL."),
        ("405", "The method is not allowed here."),
        ("408", "The request body did not come."),
        ("413", "The request body is too large."),
        ("415", "The request body is compressed."),
        ("429", "The queue is full; Retry-After says when to try again."),
        ("503", "The model is being loaded, or the server is shutting down."),
        ("504", "The request took more work than this server allows."),
    )
}


class OpenApi:
    """GET /openapi.json."""

    def __init__(self, model: str) -> None:
        self._document = describe(model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._document)
