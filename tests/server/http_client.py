"""A plain HTTP client for the tests: raw bytes in, parsed answers out. Needs no client library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from live_server import LiveServer

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; the body must have the OpenAI shape."""
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["code"], str)
        assert isinstance(error["message"], str)
        return dict(error)


def send(live: LiveServer, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Response:
    """One request on a fresh connection; `body` is JSON unless it is bytes or an iterator of chunks."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    try:
        data = body if isinstance(body, bytes | None | Iterator) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {}, encode_chunked=isinstance(body, Iterator))
        response = connection.getresponse()
        return Response(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def post(live: LiveServer, body: Any, path: str = CHAT, **headers: str) -> Response:
    return send(live, "POST", path, body, headers)


def stream_lines(live: LiveServer, body: dict[str, Any], path: str = CHAT) -> Generator[str, None, None]:
    """The lines of an event stream, as they arrive."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        for line in response:
            yield line.decode()
    finally:
        connection.close()


def stream_events(live: LiveServer, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    """The JSON of all events; the stream must end with [DONE]."""
    data = [line[6:] for line in stream_lines(live, body, path) if line.startswith("data: ")]
    assert data[-1] == "[DONE]\n"
    return [json.loads(item) for item in data[:-1]]


def join_chunks(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat chunks as the official clients join them: the choices of a whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"message": {}, "finish_reason": None, "logprobs": None})
            _join_delta(choice["message"], part["delta"])
            assert choice["finish_reason"] is None
            choice["finish_reason"] = part["finish_reason"]
            if part["logprobs"] is not None:
                choice["logprobs"] = {"content": [*(choice["logprobs"] or {"content": []})["content"],
                                                  *part["logprobs"]["content"]], "refusal": None}  # fmt: skip
    return [choices[index] for index in sorted(choices)]


def _join_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                else:
                    assert set(part) == {"index", "function"}
                    assert set(part["function"]) == {"arguments"}
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        else:
            message[key] = message.get(key, "") + value


def both(live: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, after checking that the joined stream says the same."""
    response = post(live, body)
    assert response.status == 200, response.body
    whole = response.json
    chunks = stream_events(live, {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    streamed = join_chunks(chunks)
    for got, expected in zip(streamed, whole["choices"], strict=True):
        message = {key: value for key, value in expected["message"].items() if value is not None}
        if "tool_calls" in message:
            message.setdefault("content", "")
            for call in (*message["tool_calls"], *got["message"]["tool_calls"]):
                assert call.pop("id").startswith("call_")
        assert got["message"] == message
        assert got["finish_reason"] == expected["finish_reason"]
        assert got["logprobs"] == expected["logprobs"]
    return dict(whole)


def answer(live: LiveServer, body: dict[str, Any]) -> tuple[str | None, str]:
    """Content and finish reason of the only choice, the same in both modes."""
    (choice,) = both(live, body)["choices"]
    return choice["message"]["content"], choice["finish_reason"]
