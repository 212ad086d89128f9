"""Random requests: whatever comes, the answer is an answer or a refusal in the API's shape, and the server lives on."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from http_client import post, send
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import MODEL, LiveServer, chat_body

# FERMION_FUZZ_EXAMPLES=10000 is the long run.
EXAMPLES = int(os.environ.get("FERMION_FUZZ_EXAMPLES", "150"))

text = st.text(max_size=12) | st.sampled_from(["", "<|im_end|>", "</think>", "\ud800", "user", "auto", "none", MODEL])
scalar = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | text
anything = st.recursive(scalar, lambda s: st.lists(s, max_size=3) | st.dictionaries(text, s, max_size=3), max_leaves=6)

part = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "input_text", "refusal", "tool_result"]) | anything},
    optional={"text": text | anything, "image_url": anything, "refusal": anything},
)
call = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": text}, optional={"arguments": text | anything}) | anything},
    optional={"id": text, "type": st.just("function") | anything},
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | anything},
    optional={
        "content": text | st.lists(part, max_size=3) | anything,
        "name": text | anything,
        "tool_calls": st.lists(call, max_size=2) | anything,
        "tool_call_id": text | anything,
        "reasoning_content": text | anything,
    },
)
schema = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "array", "string", "integer", "null", "strng"]) | anything,
        "properties": st.dictionaries(text, anything, max_size=2),
        "required": st.lists(text, max_size=2) | anything,
        "items": anything,
        "enum": st.lists(scalar, max_size=2),
        "$ref": st.sampled_from(["#", "#/properties/a", "http://x/y"]),
        "anyOf": st.lists(st.fixed_dictionaries({"type": st.sampled_from(["integer", "null"])}), max_size=2),
    },
)
tool = st.fixed_dictionaries(
    {"type": st.just("function") | anything},
    optional={"function": st.fixed_dictionaries({"name": text}, optional={"parameters": schema | anything}) | anything},
)
number = st.integers(-3, 5) | st.floats(-3, 3) | anything
fields = {
    "max_tokens": st.integers(0, 20) | anything,
    "max_completion_tokens": st.integers(0, 20) | anything,
    "temperature": number,
    "top_p": number,
    "top_k": number,
    "min_p": number,
    "presence_penalty": number,
    "repetition_penalty": number,
    "seed": number,
    "n": number,
    "stop": text | st.lists(text, max_size=3) | anything,
    "logit_bias": st.dictionaries(st.integers(-1, 400).map(str) | text, number, max_size=2) | anything,
    "logprobs": st.booleans() | anything,
    "top_logprobs": number,
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | anything,
    "tools": st.lists(tool, max_size=2) | anything,
    "tool_choice": st.sampled_from(["none", "auto", "required"]) | anything,
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])},
        optional={"json_schema": st.fixed_dictionaries({"schema": schema}) | anything},
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["regex", "choice", "grammar", "json"]), anything, max_size=2
    ),
    "enable_thinking": st.booleans() | anything,
    "thinking_token_budget": number,
    "reasoning_effort": st.sampled_from(["none", "low"]) | anything,
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "tools", "x"]), anything) | anything,
    "continue_final_message": st.booleans(),
    "priority": number,
    "system": text | anything,
    "thinking": anything,
    "instructions": text | anything,
    "max_output_tokens": st.integers(0, 20) | anything,
    "echo": st.booleans(),
}
body = st.fixed_dictionaries(
    {"model": st.just(MODEL) | text},
    optional={
        "messages": st.lists(message, max_size=4) | anything,
        "prompt": text | st.lists(st.integers(-1, 400), max_size=4) | anything,
        "tokens": st.lists(st.integers(-1, 400), max_size=4) | anything,
        "input": text | st.lists(message, max_size=3) | anything,
        **fields,
    },
)
paths = st.sampled_from(
    ["/v1/chat/completions"] * 4
    + ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
    + ["/tokenize", "/detokenize", "/apply-template"]
)


def check_answer(live: LiveServer, path: str, data: Any) -> None:
    response = post(live, data, path)
    assert response.status < 500, (path, data, response.body)
    if response.status >= 400:
        assert response.json["error"]["message"], response.body
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.body.endswith(b"\n\n")
    else:
        assert isinstance(response.json, dict)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=paths, data=body)
def test_random_bodies(live: LiveServer, path: str, data: dict[str, Any]) -> None:
    live.engine.say("ok")
    check_answer(live, path, data)


@settings(max_examples=EXAMPLES // 3, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=paths, data=anything.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
def test_random_json(live: LiveServer, path: str, data: bytes) -> None:
    check_answer(live, path, data)


@settings(max_examples=EXAMPLES // 3, deadline=None, suppress_health_check=list(HealthCheck))
@given(message=message, extra=st.dictionaries(st.sampled_from(sorted(fields)), anything, max_size=2))
def test_random_turns_in_a_good_request(live: LiveServer, message: dict[str, Any], extra: dict[str, Any]) -> None:
    live.engine.say("ok")
    good = chat_body("hi", max_tokens=8, enable_thinking=False)
    check_answer(live, "/v1/chat/completions", {**good, "messages": [message, *good["messages"]], **extra})


def test_description_names_every_endpoint(live: LiveServer) -> None:
    document = send(live, "GET", "/openapi.json").json
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        for method in set(methods) & {"get", "post", "delete"}:
            response = send(live, method.upper(), path.replace("{model}", MODEL).replace("{id}", "none"))
            assert response.status not in (405, 500), path
            assert response.status != 404 or "{id}" in path or response.error["code"] == "cache_disabled"


@pytest.fixture(autouse=True)
def _server_lives(live: LiveServer) -> Any:
    yield
    live.engine.say("fine")
    answer = post(live, chat_body(enable_thinking=False)).json
    assert answer["choices"][0]["message"]["content"] == "fine"
