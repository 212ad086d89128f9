"""The HTTP side of requests: shapes of refusals, keys, origins, sizes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from http_client import CHAT, post, send
from live_server import MODEL, LiveServer, access_line, chat_body

from engine.errors import ConfigError
from engine.tokenizer import Tokenizer
from server.app import listen


def message(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [fields]}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"a": NaN}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"1" * 5000,
        json.dumps({"model": MODEL, "messages": [], "x": [[[[]]]] * 3}).encode()[:-1],
    ],
)
def test_malformed_json(live: LiveServer, body: bytes) -> None:
    response = post(live, body)
    assert response.status == 400
    assert response.error["code"] == "invalid_json"
    assert not any(word in response.error["message"] for word in ("sys.", "utf-8-sig"))


def test_byte_order_mark_is_skipped(live: LiveServer) -> None:
    assert post(live, b"\xef\xbb\xbf" + json.dumps(chat_body()).encode()).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat_body("\ud83d"), "messages[0].content"),
        (chat_body([{"type": "text", "text": "a\udc00"}]), "messages[0].content[0].text"),
        (chat_body(stop=["\ud800"]), "stop[0]"),
        (chat_body(metadata={"\udfff": 1}), "metadata"),
    ],
)
def test_lone_surrogates(live: LiveServer, body: dict[str, Any], param: str) -> None:
    response = post(live, body)
    assert response.status == 400
    assert (response.error["code"], response.error["param"]) == ("invalid_unicode", param)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ([], None, "invalid_json"),
        ({"messages": []}, "model", "missing_required_parameter"),
        ({"model": MODEL}, "messages", "missing_required_parameter"),
        ({"model": 5, "messages": []}, "model", "invalid_type"),
        ({"model": MODEL, "messages": "hi"}, "messages", "invalid_type"),
        ({"model": MODEL, "messages": []}, "messages", "invalid_value"),
        (message(role="system", content="x"), "messages", "invalid_value"),
        (message(content="x"), "messages[0].role", "missing_required_parameter"),
        (message(role="robot", content="x"), "messages[0].role", "invalid_value"),
        (message(role="user", content=5), "messages[0].content", "invalid_type"),
        (message(role="user", content=[5]), "messages[0].content[0]", "invalid_type"),
        (message(role="user", content=[{"type": "smell"}]), "messages[0].content[0]", "invalid_value"),
        (message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text", "missing_required_parameter"),
        (message(role="user", tool_calls=[{"function": {"name": "f"}}]), "messages[0].tool_calls", "invalid_value"),
        (chat_body(temperature="hot"), "temperature", "invalid_type"),
        (chat_body(temperature=True), "temperature", "invalid_type"),
        (chat_body(temperature=3), "temperature", "invalid_value"),
        (chat_body(top_p=0), "top_p", "invalid_value"),
        (chat_body(max_tokens=-1), "max_tokens", "invalid_value"),
        (chat_body(max_tokens=1.5), "max_tokens", "invalid_type"),
        (chat_body(seed=2**63), "seed", "invalid_value"),
        (chat_body(stop=5), "stop", "invalid_type"),
        (chat_body(stop=["a", 5]), "stop[1]", "invalid_type"),
        (chat_body(stop=""), "stop", "invalid_value"),
        (chat_body(stop=["x"] * 17), "stop", "invalid_value"),
        (chat_body(logit_bias={"x": 1}), "logit_bias", "invalid_value"),
        (chat_body(logit_bias={"99999": 1}), "logit_bias", "invalid_value"),
        (chat_body(logit_bias={"5": 101}), "logit_bias.5", "invalid_value"),
        (chat_body(n=0), "n", "invalid_value"),
        (chat_body(stream="yes"), "stream", "invalid_type"),
        (chat_body(stream_options={"include_usage": True}), "stream_options", "invalid_value"),
        (chat_body(reasoning_effort="huge"), "reasoning_effort", "invalid_value"),
        (chat_body(chat_template_kwargs={"add_vision_id": 1}), "chat_template_kwargs.add_vision_id", "invalid_type"),
        (chat_body(tools=[{"type": "function"}]), "tools[0].function", "missing_required_parameter"),
        (chat_body(tools=[{"type": "function", "function": {"name": ""}}]), "tools[0].function.name", "invalid_value"),
        (chat_body(tool_choice={"type": "function"}), "tool_choice.function", "missing_required_parameter"),
        (chat_body(continue_final_message=True), "continue_final_message", "invalid_value"),
    ],
)  # fmt: skip
def test_refusals_name_the_json_path(live: LiveServer, body: Any, param: str | None, code: str) -> None:
    response = post(live, body)
    assert response.status == 400, response.body
    assert (response.error["param"], response.error["code"]) == (param, code)
    assert response.error["type"] == "invalid_request_error"
    if param is not None:
        assert param.partition("[")[0].partition(".")[0] in response.error["message"]
    assert live.engine.requests == []


def test_refusals_do_not_repeat_content(live: LiveServer) -> None:
    response = post(live, message(role="user", content={"secret": "abc"}))
    assert b"abc" not in response.body
    assert b"an object" in response.body


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
    ],
)
def test_wrong_urls(live: LiveServer, method: str, path: str, status: int, code: str) -> None:
    response = send(live, method, path)
    assert (response.status, response.error["code"]) == (status, code)


def test_refused_methods_name_those_allowed(live: LiveServer) -> None:
    assert send(live, "GET", CHAT).headers["allow"] == "POST"
    assert send(live, "PATCH", "/v1/requests/none").headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/openapi.json"])
def test_head_is_get_without_the_body(live: LiveServer, path: str) -> None:
    head, get = send(live, "HEAD", path), send(live, "GET", path)
    assert (head.status, head.body) == (get.status, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_every_answer_has_a_request_id(live: LiveServer) -> None:
    answers = [post(live, chat_body()), post(live, b""), send(live, "GET", "/health"), send(live, "GET", "/x")]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 4


def test_stream_headers(live: LiveServer) -> None:
    headers = post(live, chat_body(stream=True)).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": -1}, "Invalid value for 'max_tokens': must be at least 0."),
        ({"top_p": 0}, "Invalid value for 'top_p': must be greater than 0.0."),
        ({"n": 129}, "Invalid value for 'n': must be at most 128."),
        ({"stream": "yes"}, "Invalid type for 'stream': must be a boolean, but got a string."),
        ({"stop": 5}, "Invalid type for 'stop': must be a string or an array, but got a number."),
        ({"messages": [5]}, "Invalid type for 'messages[0]': must be an object, but got a number."),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "Invalid value for 'messages[0].content[0]': "
            "'type' must be one of 'text', 'input_text', 'output_text', 'refusal', 'image_url'.",
        ),
    ],
)
def test_refusals_are_sentences(live: LiveServer, fields: dict[str, Any], message: str) -> None:
    response = post(live, chat_body(**fields))
    assert (response.status, response.error["message"]) == (400, message)


@pytest.mark.parametrize(
    ("body", "start"),
    [
        (chat_body(metadata={"\udfff": 1}), "In 'metadata', a field name holds half of a surrogate pair"),
        (chat_body(**{"\udfff": 1}), "A field name holds half of a surrogate pair"),
        (chat_body(user="\udfff"), "'user' holds half of a surrogate pair"),
    ],
)
def test_lone_surrogate_is_located(live: LiveServer, body: dict[str, Any], start: str) -> None:
    assert post(live, body).error["message"].startswith(start)


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("identity, br", 415), ("Identity", 200)])
def test_compressed_bodies_are_refused(live: LiveServer, encoding: str, status: int) -> None:
    response = send(live, "POST", CHAT, chat_body(), {"content-encoding": encoding})
    assert response.status == status
    if status == 415:
        assert f"'{encoding.split()[-1]}'" in response.error["message"]


def test_body_limit(start_server: Callable[..., LiveServer]) -> None:
    live = start_server(max_body_bytes=1000)
    response = post(live, chat_body("x" * 2000))
    assert (response.status, response.error["code"]) == (413, "request_too_large")
    chunked = send(live, "POST", CHAT, (b"x" * 400 for _ in range(4)), {"transfer-encoding": "chunked"})
    assert chunked.status == 413
    assert post(live, chat_body()).status == 200


def test_stalled_body_is_given_up(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.transport._BODY_SILENCE_S", 0.1)
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf".encode())
        assert b" 408 " in connection.recv(200)


KEYS = ("first-key", "sécond-key")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "first-key"}, 401),
        ({"authorization": "Bearer first-key"}, 200),
        ({"authorization": "bearer first-key"}, 200),
        ({"x-api-key": "first-key"}, 200),
        ({"authorization": "Bearer sécond-key".encode().decode("latin-1")}, 200),
    ],
)
def test_api_keys(start_server: Callable[..., LiveServer], headers: dict[str, str], status: int) -> None:
    live = start_server(api_keys=KEYS)
    response = send(live, "GET", "/v1/models", headers=headers)
    assert response.status == status
    if status == 401:
        assert response.error["code"] == "invalid_api_key"
        assert response.error["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
    assert send(live, "GET", "/health").status == 200


def test_cross_origin(start_server: Callable[..., LiveServer]) -> None:
    live = start_server(cors_origins=["http://ui.local"], api_keys=KEYS)
    preflight = {"origin": "http://ui.local", "access-control-request-method": "POST",
                 "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    allowed = send(live, "OPTIONS", CHAT, headers=preflight)
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == "http://ui.local"
    refused = send(live, "OPTIONS", CHAT, headers={**preflight, "origin": "http://evil.example"})
    assert "access-control-allow-origin" not in refused.headers
    error = send(live, "POST", CHAT, chat_body(), {"origin": "http://ui.local"})
    assert error.status == 401
    assert error.headers["access-control-allow-origin"] == "http://ui.local"


def test_log_lines_cannot_be_forged(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fermion")
    send(live, "GET", "/a%0AFAKE%20LINE")
    assert "/a\\nFAKE LINE" in access_line(caplog, "FAKE")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_busy_address_is_a_setting_at_fault(host: str) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}"):
            listen(host, port)


def test_unknown_host_is_a_setting_at_fault() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid:1"):
        listen("no.such.host.invalid", 1)


def test_an_endless_text_is_refused_before_it_is_encoded(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size alone is too much; encoding it would take minutes."""

    def encode(self: Tokenizer, text: str, allow_special: bool) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    for path, body in (
        (CHAT, chat_body("x" * 1_000_000)),
        ("/v1/completions", {"model": MODEL, "prompt": "x" * 1_000_000}),
    ):
        answer = post(live, body, path)
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"


def test_encoding_a_long_text_leaves_others_their_answers(live: LiveServer) -> None:
    """The tokenizer runs without the interpreter lock: others are answered while megabytes are encoded."""
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(post, live, {"model": MODEL, "prompt": "a b" * 340_000}, "/tokenize")
        answered = 0
        while not work.done():
            assert send(live, "GET", "/health").status == 200
            answered += 1
        assert work.result().status == 200
    assert answered > 3
