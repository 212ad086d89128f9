"""The Responses API over HTTP, streamed and whole, raw and with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from http_client import post, stream_lines
from live_server import MODEL, LiveServer

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "get_weather", "strict": False, "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}]  # fmt: skip
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


def body(given: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": given, **fields}


def events(live: LiveServer, asked: dict[str, Any]) -> list[dict[str, Any]]:
    data = [json.loads(line[6:]) for line in stream_lines(live, asked, PATH) if line.startswith("data: ")]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    return data


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two runs."""
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    return {key: value for key, value in response.items() if key not in ("id", "created_at")} | {"output": items}


def both(live: LiveServer, asked: dict[str, Any]) -> dict[str, Any]:
    whole = post(live, asked, PATH)
    assert whole.status == 200, whole.body
    streamed = events(live, asked)
    assert plain(streamed[-1]["response"]) == plain(whole.json)
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert done == streamed[-1]["response"]["output"]
    for position, item in enumerate(done):
        if item["type"] == "message":
            deltas = [e["delta"] for e in streamed
                      if e["type"] == "response.output_text.delta" and e["output_index"] == position]  # fmt: skip
            assert "".join(deltas) == item["content"][0]["text"]
    return dict(whole.json)


def test_text_and_reasoning(live: LiveServer) -> None:
    live.engine.say("hm\n</think>\n\nHello there")
    response = both(live, body(instructions="Be kind."))
    thought, message = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Hello there"
    assert (response["object"], response["status"]) == ("response", "completed")
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 4


def test_calls_and_results(live: LiveServer) -> None:
    live.engine.say(f"hm\n</think>\n\n{CALL}\n{CALL}")
    response = both(live, body(tools=TOOLS))
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    assert [call["arguments"] for call in calls] == ['{"city": "Paris"}'] * 2
    assert len({call["call_id"] for call in calls}) == 2
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"} for call in calls]
    live.engine.requests.clear()
    both(live, body([{"role": "user", "content": "Weather?"}, *response["output"], *outputs], tools=TOOLS))
    ids = live.engine.requests[0].prompt.token_ids.tolist()
    prompt = post(live, {"tokens": ids}, "/detokenize").json["prompt"]
    assert prompt.count("<|im_start|>assistant\n") == 2
    assert f"<think>\nhm\n</think>\n\n{CALL}\n{CALL}<|im_end|>" in prompt
    assert prompt.count("<tool_response>\nsunny\n</tool_response>") == 2


def test_limit_is_incomplete(live: LiveServer) -> None:
    live.engine.say("long " * 50)
    response = both(live, body(max_output_tokens=5))
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_schema(live: LiveServer) -> None:
    live.engine.say('{"a": 5}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    response = both(live, body(text=text, reasoning={"effort": "none"}))
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"a": 5}
    assert response["text"]["format"]["schema"] == schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].image_url"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include[1]"),
        ({"input": "x " * 5000}, "input"),
        ({"temperature": 5}, "temperature"),
    ],
)  # fmt: skip
def test_refusals(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    response = post(live, body(**fields), PATH)
    assert (response.status, response.error["param"]) == (400, param)


def test_failure_in_a_stream(live: LiveServer) -> None:
    live.engine.error = ValueError("secret")
    last = events(live, body())[-1]
    live.engine.error = None
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "secret" not in last["response"]["error"]["message"]


def test_official_client(live: LiveServer) -> None:
    live.engine.say(f"hm\n</think>\n\nHello\n\n{CALL}")
    tools: Any = TOOLS
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(model=MODEL, input="Hi", tools=tools)
        assert response.output_text == "Hello"
        with client.responses.stream(model=MODEL, input="Hi", tools=tools) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
    assert final.output_text == "Hello"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
