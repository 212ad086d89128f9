"""Chat completions over HTTP: every case streamed and whole, with equal results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from http_client import CHAT, answer, both, join_chunks, post, send, stream_events, stream_lines
from live_server import MODEL, LiveServer, access_line, chat_body

from engine.core import SamplingParams
from engine.errors import KernelError, RequestError

NO_THINKING: dict[str, Any] = {"enable_thinking": False}
THOUGHT = "hm\n</think>\n\n"


def test_reasoning_and_answer(live: LiveServer) -> None:
    live.engine.say("Let me think.\n</think>\n\nThe tags are <think> and </think>.")
    live.engine.cached = 3
    whole = both(live, chat_body("Name tags"))
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == "Let me think."
    assert message["content"] == "The tags are <think> and </think>."
    assert whole["choices"][0]["finish_reason"] == "stop"
    usage = whole["usage"]
    tokens = len(live.engine.reply(live.engine.requests[0])) + 1
    assert usage["completion_tokens"] == tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + tokens
    assert usage["prompt_tokens"] == len(live.engine.requests[0].prompt.token_ids)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert 10 < usage["completion_tokens_details"]["reasoning_tokens"] < tokens - 10


def test_no_thinking_means_no_reasoning(live: LiveServer) -> None:
    live.engine.say("Just text")
    message = both(live, chat_body(chat_template_kwargs={"enable_thinking": False}))["choices"][0]["message"]
    assert message["content"] == "Just text"
    assert "reasoning_content" not in message


def test_limit_inside_reasoning(live: LiveServer) -> None:
    live.engine.say("thinking and thinking for long")
    whole = both(live, chat_body(max_tokens=16))
    message = whole["choices"][0]["message"]
    assert message["content"] == ""
    assert "thinking and thinking for long".startswith(message["reasoning_content"] or "none")
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 16


def test_wire_shape_of_a_stream(live: LiveServer) -> None:
    live.engine.say(THOUGHT + "Hi")
    first, *middle, finish, usage = stream_events(live, chat_body(stream_options={"include_usage": True}))
    assert first["object"] == "chat.completion.chunk"
    assert first["model"] == MODEL
    assert isinstance(first["created"], int)
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(set(chunk["choices"][0]["delta"]) <= {"content", "reasoning_content"} for chunk in middle)
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert not any("usage" in chunk for chunk in (first, *middle, finish))


def test_no_usage_chunk_unless_asked(live: LiveServer) -> None:
    assert stream_events(live, chat_body())[-1]["choices"][0]["finish_reason"] == "stop"


def test_role_is_sent_when_prefill_starts(live: LiveServer) -> None:
    live.engine.layers, live.engine.layer_s = 10, 0.05
    started = time.monotonic()
    lines = stream_lines(live, chat_body())
    assert '"role":"assistant"' in next(lines)
    assert time.monotonic() - started < 0.3
    lines.close()


@pytest.mark.parametrize(
    ("stop", "said", "expected"),
    [
        ("own fox", "The quick brown fox jumps", "The quick br"),
        (["zzz", "quick"], "The quick brown", "The "),
        ([], "The quick", "The quick"),
        (None, "The quick", "The quick"),
        ("never", "The quick", "The quick"),
        ("🦊", "a 🦊 b", "a "),
    ],
)
def test_stop_strings(live: LiveServer, stop: Any, said: str, expected: str) -> None:
    live.engine.say(said)
    assert answer(live, chat_body(stop=stop, **NO_THINKING)) == (expected, "stop")


def test_stop_string_ends_computation(live: LiveServer) -> None:
    live.engine.say("one stop " + "two " * 500)
    before = live.engine.computed_tokens
    assert answer(live, chat_body(stop="stop", **NO_THINKING)) == ("one ", "stop")
    assert live.engine.computed_tokens - before < 40
    assert live.engine.outcomes == ["closed", "closed"]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_max_tokens(live: LiveServer, max_tokens: int) -> None:
    live.engine.say("abcdef")
    whole = both(live, chat_body(max_tokens=max_tokens, **NO_THINKING))
    assert whole["usage"]["completion_tokens"] == max_tokens
    assert whole["choices"][0]["message"]["content"] == "abcdef"[:max_tokens]
    assert whole["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("old", "new", "expected"), [(None, 5, 5), (3, 5, 3), (5, 3, 3), (3, None, 3)])
def test_smaller_limit_wins(live: LiveServer, old: int | None, new: int | None, expected: int) -> None:
    live.engine.say("abcdefgh")
    whole = both(live, chat_body(max_tokens=old, max_completion_tokens=new, **NO_THINKING))
    assert whole["usage"]["completion_tokens"] == expected


@pytest.mark.parametrize("cut", range(1, 26))
def test_cut_characters_are_dropped(live: LiveServer, cut: int) -> None:
    text = "👩‍👩‍👧 é"
    live.engine.say(text)
    content, _ = answer(live, chat_body(max_tokens=cut, **NO_THINKING))
    assert content is not None
    assert text.startswith(content)
    assert "\ufffd" not in content


def test_without_a_limit_the_context_is_the_limit(live: LiveServer) -> None:
    assert post(live, chat_body()).status == 200
    request = live.engine.requests[0]
    assert request.max_tokens == 4096 - len(request.prompt.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_context_overflow(live: LiveServer, stream: bool) -> None:
    response = post(live, chat_body("x " * 5000, stream=stream, max_tokens=7))
    assert response.status == 400
    assert response.error["code"] == "context_length_exceeded"
    assert response.error["param"] == "messages"
    assert "4096" in response.error["message"]
    assert " 7 in the completion" in response.error["message"]
    assert live.engine.requests == []


def test_sampling_reaches_the_engine_over_the_models_defaults(live: LiveServer) -> None:
    given = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "presence_penalty": 1.5,
             "frequency_penalty": -1.0, "repetition_penalty": 1.2, "logit_bias": {"5": -100, "6": 2.5}}  # fmt: skip
    post(live, chat_body(**given))
    post(live, chat_body(temperature=None, top_k=-1))
    merged, defaults = (request.sampling for request in live.engine.requests)
    assert merged == SamplingParams(
        temperature=0.5,
        top_p=0.8,
        top_k=3,
        min_p=0.1,
        presence_penalty=1.5,
        frequency_penalty=-1.0,
        repetition_penalty=1.2,
        logit_bias=((5, -100.0), (6, 2.5)),
        seed=7,
    )
    assert defaults == SamplingParams(temperature=0.7, top_p=0.8, top_k=0)
    assert len(live.engine.requests[0].stop_token_ids) == 2


def test_several_choices(live: LiveServer) -> None:
    live.engine.say(THOUGHT + "Hi")
    whole = both(live, chat_body(n=3, seed=5))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in whole["choices"]} == {"Hi"}
    requests = live.engine.requests[:3]
    assert [request.sampling.seed for request in requests] == [5, 6, 7]
    # One prompt for all: what is cached of it serves every choice after the first.
    assert all(request.prompt is requests[0].prompt for request in requests)
    assert live.engine.outcomes[:3] == ["finished"] * 3
    tokens = len(live.engine.reply(live.engine.requests[0])) + 1
    assert whole["usage"]["completion_tokens"] == 3 * tokens


def test_progress_on_request(live: LiveServer) -> None:
    live.engine.layers, live.engine.cached = 4, 2
    chunks = stream_events(live, chat_body(return_progress=True))
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert [p["processed"] for p in progress] == sorted(p["processed"] for p in progress)
    assert len(progress) == 5
    assert progress[-1]["processed"] == progress[-1]["total"]
    assert progress[0]["cache"] == 2
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("prompt_progress" in chunk for chunk in stream_events(live, chat_body()))


TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "get_time"}},
]  # fmt: skip
PARIS = """<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
TIME = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"


def test_tool_calls(live: LiveServer) -> None:
    live.engine.say(f"{THOUGHT}Let me look.\n\n{PARIS}\n{TIME}")
    (choice,) = both(live, chat_body(tools=TOOLS))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    assert choice["message"]["tool_calls"] == [
        {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'}},
        {"type": "function", "function": {"name": "get_time", "arguments": "{}"}},
    ]


def test_tool_call_without_prose_has_null_content(live: LiveServer) -> None:
    live.engine.say(THOUGHT + PARIS)
    message = post(live, chat_body(tools=TOOLS)).json["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["id"].startswith("call_")


def test_one_call_at_a_time(live: LiveServer) -> None:
    live.engine.say(THOUGHT + PARIS + "\n" + TIME)
    (choice,) = both(live, chat_body(tools=TOOLS, parallel_tool_calls=False))["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


def test_tool_choice_none(live: LiveServer) -> None:
    live.engine.say(THOUGHT + "Sure.\n\n" + PARIS)
    assert answer(live, chat_body(tools=TOOLS, tool_choice="none")) == ("Sure.", "stop")


def test_truncated_call_ends_in_length(live: LiveServer) -> None:
    live.engine.say(PARIS)
    tokens = len(live.engine.reply(live.engine.requests[0])) if live.engine.requests else 30
    (choice,) = both(live, chat_body(tools=TOOLS, max_tokens=min(tokens, 30), **NO_THINKING))["choices"]
    assert choice["finish_reason"] == "length"


def test_markup_without_tools_is_text(live: LiveServer) -> None:
    live.engine.say(TIME)
    assert answer(live, chat_body(**NO_THINKING)) == (TIME, "stop")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("functions", [{"name": "f"}]),
        ("guided_json", {"type": "object"}),
        ("echo", True),
    ],
)
def test_what_is_missing_is_refused_by_name(live: LiveServer, field: str, value: Any) -> None:
    response = post(live, chat_body(**{field: value}))
    assert response.status == 400
    assert response.error["code"] == "unsupported_parameter"
    assert response.error["param"] == field
    assert field in response.error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": False, "top_logprobs": None, "tools": None, "response_format": {"type": "text"}},
        {"audio": None, "modalities": ["text"], "functions": [], "best_of": 1, "suffix": ""},
        {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto"},
        {"stop": None, "seed": None, "temperature": 0, "max_tokens": None, "stream": None},
    ],
)
def test_neutral_values_are_accepted(live: LiveServer, fields: dict[str, Any]) -> None:
    assert post(live, chat_body(**fields)).status == 200


def test_unknown_fields_are_ignored_and_logged_once(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    body = chat_body(sparkle=1)
    body["messages"][0]["extra_field"] = {"a": 1}
    for _ in range(2):
        assert post(live, body).status == 200
    lines = [record.getMessage() for record in caplog.records if "not known" in record.getMessage()]
    assert sorted(lines) == [
        "Request field 'messages[].extra_field' is not known; it is ignored.",
        "Request field 'sparkle' is not known; it is ignored.",
    ]


def ignored_names(caplog: pytest.LogCaptureFixture, why: str = "is not known; it is ignored") -> list[str]:
    """Fields of which the log says so."""
    lines = [record.getMessage() for record in caplog.records if why in record.getMessage()]
    return sorted(line.split("'")[1] for line in lines)


def test_unknown_template_switches_are_logged_once(
    start_server: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture
) -> None:
    live = start_server()
    switches = {"enable_thinking": False, "thinking_style": "long", "nothing": None}
    for _ in range(2):
        assert post(live, chat_body(chat_template_kwargs=switches)).status == 200
    assert ignored_names(caplog) == ["chat_template_kwargs.thinking_style"]


@pytest.mark.parametrize("name", ["enable_thinking", "preserve_thinking", "add_vision_id"])
def test_template_switches_are_booleans(live: LiveServer, name: str) -> None:
    response = post(live, chat_body(chat_template_kwargs={name: "false"}))
    assert (response.status, response.error["param"]) == (400, f"chat_template_kwargs.{name}")


def test_hints_that_ask_for_something_are_logged_once(
    start_server: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture
) -> None:
    live = start_server()
    neutral: list[dict[str, Any]] = [
        {"store": False, "service_tier": "auto", "verbosity": "medium", "prediction": None},
        {"store": None, "service_tier": "default", "verbosity": None},
    ]
    for fields in neutral:
        assert post(live, chat_body(**fields)).status == 200
    assert ignored_names(caplog, "Request field") == []
    prediction = {"type": "content", "content": "x"}
    for _ in range(2):
        asking = chat_body(store=True, service_tier="flex", verbosity="low", prediction=prediction)
        assert post(live, asking).status == 200
    hints = ["prediction", "service_tier", "store", "verbosity"]
    assert ignored_names(caplog, "is a hint that changes nothing here") == hints
    assert ignored_names(caplog, "Request field") == hints


def test_refused_part_is_not_logged_as_ignored(
    start_server: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture
) -> None:
    live = start_server()
    part = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    assert post(live, chat_body([part])).status == 400
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y"}}
    assert post(live, chat_body([image], max_tokens=5), "/v1/messages").status == 400
    assert ignored_names(caplog) == []


def test_engine_refusal_is_a_status(live: LiveServer) -> None:
    live.engine.error = RequestError("no such adapter", param="adapter")
    response = post(live, chat_body())
    assert (response.status, response.error["param"]) == (400, "adapter")
    lines = list(stream_lines(live, chat_body()))
    assert "no such adapter" in lines[-2]
    live.engine.error = None
    assert post(live, chat_body()).status == 200


def test_unexpected_failure_tells_no_details(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    live.engine.error = ZeroDivisionError("secret detail")
    response = post(live, chat_body())
    assert response.status == 500
    assert "secret" not in response.body.decode()
    live.engine.error = None
    assert post(live, chat_body()).status == 200


def test_kernel_failure_ends_the_server(start_server: Callable[..., LiveServer]) -> None:
    live = start_server()
    live.engine.error = KernelError("device lost")
    assert post(live, chat_body()).error["code"] == "engine_failure"
    live.thread.join(10)
    assert not live.thread.is_alive()
    assert live.engine.is_closed


def test_log_holds_figures_and_no_content(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="fermion")
    live.engine.say("hm\n</think>\n\nsecretanswer")
    post(live, chat_body("secretquestion"))
    line = access_line(caplog, "POST")
    assert "secret" not in caplog.text
    assert f"POST {CHAT} 200" in line
    for word in ("prompt=", "completion=", "queue=", "prefill=", "tok/s"):
        assert word in line


def test_slow_answers_are_kept_alive(start_server: Callable[..., LiveServer]) -> None:
    live = start_server(keep_alive_s=0.1)
    live.engine.layers, live.engine.layer_s = 1, 0.5
    live.engine.say(THOUGHT + "Hi")
    lines = list(stream_lines(live, chat_body()))
    assert lines.count(": keep-alive\n") >= 3
    response = post(live, chat_body())
    assert response.body.startswith(b"\n\n")
    assert response.json["choices"][0]["message"]["content"] == "Hi"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_events_without_bytes_do_not_replace_signs_of_life(start_server: Callable[..., LiveServer], phase: str) -> None:
    live = start_server(keep_alive_s=0.1)
    live.engine.say("<|vision_start|>" * 25)
    if phase == "prefill":
        live.engine.layers, live.engine.layer_s = 25, 0.02
    else:
        live.engine.token_s = 0.02
    lines = list(stream_lines(live, chat_body(**NO_THINKING)))
    assert lines.count(": keep-alive\n") >= 3
    response = post(live, chat_body(**NO_THINKING))
    assert response.body.startswith(b"\n\n\n")
    assert response.json["choices"][0]["finish_reason"] == "stop"


def test_failure_after_the_first_byte_cuts_the_body(start_server: Callable[..., LiveServer]) -> None:
    import http.client

    live = start_server(keep_alive_s=0.05)
    live.engine.layers, live.engine.layer_s = 1, 0.3

    def fail(request: Any) -> list[int]:
        raise RequestError("late")

    live.engine.reply = fail
    with pytest.raises(http.client.IncompleteRead):
        post(live, chat_body())


def test_whole_and_streamed_models(live: LiveServer) -> None:
    models = send(live, "GET", "/v1/models").json
    assert models["object"] == "list"
    (model,) = models["data"]
    assert (model["id"], model["object"], model["owned_by"]) == (MODEL, "model", "fermion")
    assert send(live, "GET", f"/v1/models/{MODEL}").json == model
    assert send(live, "GET", "/v1/models/org/other").error["code"] == "model_not_found"
    assert send(live, "GET", "/health").json["status"] == "ok"


def test_other_model_is_not_found(live: LiveServer) -> None:
    response = post(live, {**chat_body(), "model": "gpt-4"})
    assert (response.status, response.error["code"], response.error["param"]) == (404, "model_not_found", "model")
    assert MODEL in response.error["message"]


def test_continue_returns_only_new_text(live: LiveServer) -> None:
    live.engine.say("time there was")
    body = chat_body()
    body["messages"].append({"role": "assistant", "content": "Once upon a "})
    assert answer(live, {**body, "continue_final_message": True}) == ("time there was", "stop")


def test_joined_chunks_have_contiguous_indices(live: LiveServer) -> None:
    chunks = stream_events(live, chat_body(n=2))
    assert [chunk["choices"][0]["index"] for chunk in chunks[:2]] == [0, 1]
    assert len(join_chunks(chunks)) == 2
