"""Output constraints over HTTP: thinking budgets, schemas, forced calls. The engine's script resists where it can."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_client import both, post, stream_events
from live_server import LiveServer, chat_body

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def message(live: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    (choice,) = post(live, body).json["choices"]
    return dict(choice["message"])


def test_schema_is_obeyed_after_the_thinking(live: LiveServer) -> None:
    live.engine.say('{"no": "grammar here"}\n</think>\n\nI would rather chat than write JSON.')
    for _ in range(5):
        answer = message(live, chat_body(response_format=json_format(PERSON)))
        assert answer["reasoning_content"] == '{"no": "grammar here"}'
        value = json.loads(answer["content"])
        assert set(value) == {"name", "age"}
        assert 0 <= value["age"] <= 99


def test_willing_model_is_not_disturbed(live: LiveServer) -> None:
    said = '{"name": "Zoë", "age": 7}'
    live.engine.say("hm\n</think>\n\n" + said)
    (choice,) = both(live, chat_body(response_format=json_format(PERSON)))["choices"]
    assert choice["message"]["content"] == said
    assert choice["finish_reason"] == "stop"


def test_json_object(live: LiveServer) -> None:
    live.engine.say('{"a": [1, {"b": null}]}')
    answer = message(live, chat_body(response_format={"type": "json_object"}, enable_thinking=False))
    assert json.loads(answer["content"]) == {"a": [1, {"b": None}]}


def test_the_form_includes_what_a_continued_message_began(live: LiveServer) -> None:
    def body(begun: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": begun}]
        return {**chat_body(response_format=json_format(PERSON), enable_thinking=False), "messages": messages,
                "continue_final_message": True}  # fmt: skip

    for begun, said in (('{"name": "Al', '", "age": 7}'), ('{"name": "Zoë", "age": ', "1"), ("", '{"name": "", ')):
        live.engine.say(said)
        answer = message(live, body(begun))["content"]
        assert answer.startswith(said)
        assert set(json.loads(begun + answer)) == {"name", "age"}
    for begun in ("Here it is: ", '{"age": '):
        response = post(live, body(begun))
        assert (response.status, response.error["param"]) == (400, "continue_final_message")


def test_end_of_turn_is_no_way_out_of_thinking(live: LiveServer) -> None:
    live.engine.say("I stop here<|im_end|>")
    answer = message(live, chat_body(response_format=json_format(PERSON), thinking_token_budget=30))
    assert set(json.loads(answer["content"])) == {"name", "age"}


def test_empty_schema_does_not_constrain(live: LiveServer) -> None:
    live.engine.say("plain words")
    body = chat_body(response_format=json_format({}), enable_thinking=False)
    assert message(live, body)["content"] == "plain words"


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "strng"}, "strng"),
    ],
)
def test_what_the_grammar_cannot_do_is_named(live: LiveServer, schema: dict[str, Any], keyword: str) -> None:
    response = post(live, chat_body(response_format=json_format({"type": "object", "properties": {"a": schema}})))
    assert response.status == 400
    assert response.error["param"] == "response_format"
    assert keyword in response.error["message"]


@pytest.mark.parametrize(
    ("constraint", "accepted"),
    [
        ({"choice": ["yes", "no", 'may"be']}, {"yes", "no", 'may"be'}),
        ({"regex": "[ab]c"}, {"ac", "bc"}),
        ({"choice": ["", "x"]}, {"", "x"}),
        ({"choice": [f"none of {number}" for number in range(3000)]}, {f"none of {number}" for number in range(3000)}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"json": {"enum": [1, "z"]}}, {"1", '"z"'}),
        ({"json": '{"const": true}'}, {"true"}),
    ],
)
def test_structured_outputs(live: LiveServer, constraint: dict[str, Any], accepted: set[str]) -> None:
    live.engine.say("none of these")
    for _ in range(3):
        answer = message(live, chat_body(structured_outputs=constraint, enable_thinking=False))
        assert answer["content"] in accepted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"items":' * 500 + "{}" + "}" * 500}}, None),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    response = post(live, chat_body(**fields))
    assert (response.status, response.error["param"]) == (400, param), response.body


TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "required": ["city", "unit", "days"],
        "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]},
                       "days": {"$ref": "#/$defs/n"}, "more": {"type": "array", "items": {"type": "boolean"}}},
        "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 3}}}}},
    {"type": "function", "function": {"name": "näme-2"}},
]  # fmt: skip
WEATHER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)


def test_willing_model_calls_undisturbed(live: LiveServer) -> None:
    live.engine.say("hm\n</think>\n\n" + WEATHER + "\n" + WEATHER)
    (choice,) = both(live, chat_body(tools=TOOLS, tool_choice="required"))["choices"]
    arguments = [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert arguments == [{"city": "Paris", "unit": "C", "days": 2}] * 2
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("thinking", [True, False])
def test_required_forces_a_valid_call(live: LiveServer, thinking: bool) -> None:
    live.engine.say("I do not feel like calling anything.\n</think>\n\nReally not.\n</parameter>\n")
    for _ in range(4):
        body = chat_body(tools=TOOLS, tool_choice="required", enable_thinking=thinking, max_tokens=600)
        (choice,) = post(live, body).json["choices"]
        if choice["finish_reason"] == "length":
            continue
        assert choice["finish_reason"] == "tool_calls"
        for call in choice["message"]["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "get_weather":
                assert arguments["unit"] in ("C", "F")
                assert arguments["days"] in (1, 2, 3)
            else:
                assert (call["function"]["name"], arguments) == ("näme-2", {})


def test_named_choice(live: LiveServer) -> None:
    live.engine.say("No.")
    choice_of = {"type": "function", "function": {"name": "näme-2"}}
    body = chat_body(tools=TOOLS, tool_choice=choice_of, parallel_tool_calls=False, enable_thinking=False)
    (choice,) = both(live, body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "näme-2", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"


def test_named_choice_must_exist(live: LiveServer) -> None:
    body = chat_body(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}})
    assert post(live, body).error["param"] == "tool_choice.function.name"


def strict(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]


def test_strict_functions_leave_text_free_and_bind_calls(live: LiveServer) -> None:
    live.engine.say("Just words, no call.")
    assert message(live, chat_body(tools=strict(TOOLS), enable_thinking=False))["content"] == "Just words, no call."
    live.engine.say("Look:\n\n" + WEATHER.replace("\nC\n", "\nKelvin\n"))
    answer = message(live, chat_body(tools=strict(TOOLS), enable_thinking=False, parallel_tool_calls=False))
    assert answer["content"] == "Look:"
    arguments = json.loads(answer["tool_calls"][0]["function"]["arguments"])
    assert arguments["unit"] in ("C", "F")


def test_schema_or_call(live: LiveServer) -> None:
    body = chat_body(tools=TOOLS, response_format=json_format(PERSON), enable_thinking=False)
    live.engine.say('{"name": "Al", "age": 3}')
    assert message(live, body)["content"] == '{"name": "Al", "age": 3}'
    live.engine.say(WEATHER)
    assert message(live, body)["tool_calls"][0]["function"]["name"] == "get_weather"


def test_one_strict_function_does_not_bind_the_others(live: LiveServer) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [*strict(TOOLS), {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    live.engine.say("<tool_call>\n<function=odd>\n<parameter=a>\n[1, 1]\n</parameter>\n</function>\n</tool_call>")
    (call,) = message(live, chat_body(tools=tools, enable_thinking=False))["tool_calls"]
    assert call["function"] == {"name": "odd", "arguments": '{"a": [1, 1]}'}
    response = post(live, chat_body(tools=tools, tool_choice="required"))
    assert (response.status, response.error["param"]) == (400, "tools")
    assert "'odd'" in response.error["message"]
    assert "uniqueItems" in response.error["message"]


@pytest.mark.parametrize("broken", [{"allOf": 5}, {"anyOf": {}}, {"enum": 3}, {"type": [1]}, {"$ref": 5}, 7])
def test_broken_schemas_of_tools_are_the_clients_fault(live: LiveServer, broken: Any) -> None:
    parameters = {"type": "object", "properties": {"a": broken}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert post(live, chat_body(tools=tools, tool_choice="required")).status == 400
    live.engine.say("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>")
    (call,) = message(live, chat_body(tools=tools, enable_thinking=False))["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, "1")


@pytest.mark.parametrize("budget", [0, 1, 16])
def test_thinking_budget(live: LiveServer, budget: int) -> None:
    live.engine.say("zoom in " * 50)
    (choice,) = both(live, chat_body(max_tokens=200, thinking_token_budget=budget))["choices"]
    expected = ("zoom in " * 50)[:budget].rstrip()
    assert choice["message"].get("reasoning_content", "") == expected
    assert choice["message"]["content"].startswith(("zoom in " * 50)[budget : budget + 5])


def test_budget_is_counted_in_usage(live: LiveServer) -> None:
    live.engine.say("zoom in " * 50)
    usage = both(live, chat_body(thinking_token_budget=10))["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 12


def test_effort_sets_a_budget(live: LiveServer) -> None:
    live.engine.say("x" * 700)
    short = post(live, chat_body(reasoning_effort="minimal")).json["usage"]["completion_tokens_details"]
    assert short["reasoning_tokens"] == 514
    full = post(live, chat_body(reasoning_effort="high")).json["usage"]["completion_tokens_details"]
    assert full["reasoning_tokens"] == 700


def test_logprobs(live: LiveServer) -> None:
    live.engine.say("hm\n</think>\n\nthe é")
    (choice,) = both(live, chat_body(logprobs=True, top_logprobs=2))["choices"]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "the é"
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.5 for entry in entries)
    assert entries[0]["top_logprobs"][0] == {key: entries[0][key] for key in ("token", "logprob", "bytes")}
    partial = [entry["token"] for entry in entries if entry["token"].startswith("bytes:")]
    assert partial == ["bytes:\\xc3", "bytes:\\xa9"]


def test_logprobs_without_alternatives(live: LiveServer) -> None:
    (choice,) = both(live, chat_body(logprobs=True, enable_thinking=False))["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])


def test_no_logprobs_unless_asked(live: LiveServer) -> None:
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in stream_events(live, chat_body()))
