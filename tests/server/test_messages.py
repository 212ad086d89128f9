"""The Anthropic shape over HTTP, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_client import post, send, stream_lines
from live_server import MODEL, LiveServer

PATH = "/v1/messages"
TOOLS = [{"name": "get_weather", "description": "Weather.", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]  # fmt: skip
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


def body(content: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": content}], **fields}


def events(live: LiveServer, asked: dict[str, Any]) -> list[dict[str, Any]]:
    lines = [line.rstrip("\n") for line in stream_lines(live, asked, PATH)]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in data] == names
    return data


def joined(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The stream as the official client joins it."""
    message: dict[str, Any] = dict(stream[0]["message"])
    blocks: list[dict[str, Any]] = []
    partial = ""
    is_open = False
    for event in stream[1:]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                partial, is_open = "", True
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                match event["delta"]["type"]:
                    case "text_delta":
                        blocks[-1]["text"] += event["delta"]["text"]
                    case "thinking_delta":
                        blocks[-1]["thinking"] += event["delta"]["thinking"]
                    case "signature_delta":
                        blocks[-1]["signature"] = event["delta"]["signature"]
                    case "input_json_delta":
                        partial += event["delta"]["partial_json"]
            case "content_block_stop":
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(partial or "{}")
                is_open = False
            case "message_delta":
                message |= event["delta"]
                message["usage"] = {**message["usage"], **event["usage"]}
    assert not is_open
    assert stream[-1] == {"type": "message_stop"}
    return {**message, "content": blocks}


def both(live: LiveServer, asked: dict[str, Any]) -> dict[str, Any]:
    response = post(live, asked, PATH)
    assert response.status == 200, response.body
    whole, streamed = response.json, joined(events(live, asked))
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            assert block.pop("id", "call_").startswith("call_")
    assert streamed == whole
    return dict(whole)


def test_text(live: LiveServer) -> None:
    live.engine.say("Hello there")
    live.engine.cached = 5
    message = both(live, body(system="Be kind."))
    assert message["content"] == [{"type": "text", "text": "Hello there"}]
    assert (message["role"], message["type"], message["model"]) == ("assistant", "message", MODEL)
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["cache_read_input_tokens"] == 5
    count = send(live, "POST", f"{PATH}/count_tokens", body(system="Be kind.")).json["input_tokens"]
    assert count == message["usage"]["input_tokens"] + 5


def test_thinking_only_on_demand(live: LiveServer) -> None:
    live.engine.say("hm\n</think>\n\nHi")
    message = both(live, body(thinking={"type": "enabled", "budget_tokens": 1024}))
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "text", "text": "Hi"},
    ]
    live.engine.say("Hi")
    assert both(live, body())["content"] == [{"type": "text", "text": "Hi"}]


def test_tool_use_and_result(live: LiveServer) -> None:
    live.engine.say(f"Let me look.\n\n{CALL}\n{CALL}")
    message = both(live, body(tools=TOOLS))
    use = {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}}
    assert message["content"] == [{"type": "text", "text": "Let me look."}, use, use]
    assert message["stop_reason"] == "tool_use"
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "x"}, {**use, "id": "c1"}]},
        {"role": "user", "content": [
            {"type": "text", "text": "and?"},
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]}]},
    ]  # fmt: skip
    live.engine.say("Sunny.")
    live.engine.requests.clear()
    assert both(live, {**body(tools=TOOLS), "messages": history})["content"][0]["text"] == "Sunny."
    ids = live.engine.requests[0].prompt.token_ids.tolist()
    prompt = post(live, {"tokens": ids}, "/detokenize").json["prompt"]
    assert "<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>user\nand?<|im_end|>" in prompt
    assert "<parameter=city>\nParis\n" in prompt


def test_forced_tool(live: LiveServer) -> None:
    live.engine.say(CALL + " and more")
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    message = both(live, body(tools=TOOLS, tool_choice=choice))
    assert [block["name"] for block in message["content"]] == ["get_weather"]
    assert live.engine.requests[0].constraint is not None


PERSON = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 7, "maximum": 9}}, "required": ["age"],
          "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
        {"output_format": {"type": "json_schema", "schema": PERSON}},
    ],
)
def test_structured_output(live: LiveServer, asked: dict[str, Any]) -> None:
    live.engine.say("I would rather chat.")
    (block,) = post(live, body(**asked), PATH).json["content"]
    assert json.loads(block["text"])["age"] in (7, 8, 9)


def test_effort_limits_adaptive_thinking(live: LiveServer) -> None:
    live.engine.say("x" * 3000)
    asked = body(thinking={"type": "adaptive"}, output_config={"effort": "low"}) | {"max_tokens": 2100}
    thought, _ = post(live, asked, PATH).json["content"]
    assert len(thought["thinking"]) == 2048


def test_schemas_that_cannot_be_followed_are_refused_under_their_name(live: LiveServer) -> None:
    schema = {"type": "array", "uniqueItems": True}
    response = post(live, body(output_config={"format": {"type": "json_schema", "schema": schema}}), PATH)
    assert response.status == 400
    assert response.json["error"]["message"].startswith("'output_config.format'")


@pytest.mark.parametrize("field", [{"mcp_servers": [{"type": "url"}]}, {"container": "x"}])
def test_what_runs_elsewhere_is_refused(live: LiveServer, field: dict[str, Any]) -> None:
    response = post(live, body(**field), PATH)
    assert response.status == 400
    assert next(iter(field)) in response.json["error"]["message"]
    assert post(live, body(mcp_servers=[], container=None), PATH).status == 200


def test_stop_sequence_and_limit(live: LiveServer) -> None:
    live.engine.say("one two three")
    message = both(live, body(stop_sequences=["two"]))
    assert message["content"] == [{"type": "text", "text": "one "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "two")
    assert both(live, body(max_tokens=2))["stop_reason"] == "max_tokens"


def test_final_assistant_turn_is_continued(live: LiveServer) -> None:
    live.engine.say(" world")
    asked = body()
    asked["messages"].append({"role": "assistant", "content": "Hello"})
    assert both(live, asked)["content"] == [{"type": "text", "text": " world"}]
    ids = live.engine.requests[0].prompt.token_ids.tolist()
    assert post(live, {"tokens": ids}, "/detokenize").json["prompt"].endswith("</think>\n\nHello")


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "other"}, 404, "not_found_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
         400, "invalid_request_error"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error"),
        ({"temperature": 1.5}, 400, "invalid_request_error"),
    ],
)  # fmt: skip
def test_refusals(live: LiveServer, fields: dict[str, Any], status: int, kind: str) -> None:
    response = post(live, body(**fields), PATH)
    assert response.status == status
    assert response.json["type"] == "error"
    assert response.json["error"]["type"] == kind
    assert response.json["error"]["message"]


def test_failure_in_a_stream(live: LiveServer) -> None:
    live.engine.error = ValueError("secret")
    last = events(live, body())[-1]
    live.engine.error = None
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in last["error"]["message"]
