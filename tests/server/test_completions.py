"""Text completions over HTTP, streamed and whole."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from http_client import post, stream_events
from live_server import MODEL, LiveServer

PATH = "/v1/completions"


def body(prompt: Any = "The", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def both(live: LiveServer, asked: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, after checking that the joined stream says the same."""
    whole = post(live, asked, PATH).json
    chunks = stream_events(live, {**asked, "stream_options": {"include_usage": True}}, PATH)
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            joined = [item for part in parts if part["logprobs"] for item in part["logprobs"][name]]
            assert joined == ((choice["logprobs"] or {}).get(name) or [])
    return dict(whole)


def test_text(live: LiveServer) -> None:
    live.engine.say(" quick brown fox")
    whole = both(live, body(max_tokens=50))
    assert whole["object"] == "text_completion"
    assert whole["id"].startswith("cmpl-")
    (choice,) = whole["choices"]
    assert choice == {"index": 0, "text": " quick brown fox", "logprobs": None, "finish_reason": "stop"}


def test_sixteen_tokens_unless_said(live: LiveServer) -> None:
    live.engine.say("zzzz" * 10)
    assert both(live, body())["usage"]["completion_tokens"] == 16


def test_echo(live: LiveServer) -> None:
    live.engine.say(" end")
    assert both(live, body("Start é", echo=True))["choices"][0]["text"] == "Start é end"
    assert both(live, body("Start", echo=True, max_tokens=0))["choices"][0]["text"] == "Start"


def test_prompts_and_choices(live: LiveServer) -> None:
    whole = both(live, body(["The", "quick brown"], n=2, max_tokens=30))
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert whole["usage"]["prompt_tokens"] == sum(len(r.prompt.token_ids) for r in live.engine.requests[:4:2])


def test_token_ids(live: LiveServer) -> None:
    text = both(live, body("The", max_tokens=30))["choices"][0]["text"]
    ids = live.engine.requests[0].prompt.token_ids.tolist()
    assert both(live, body(ids, max_tokens=30))["choices"][0]["text"] == text
    assert both(live, body([ids, ids], max_tokens=30))["choices"][1]["text"] == text


def test_control_tokens_of_the_prompt_are_meant(live: LiveServer) -> None:
    post(live, body("<|im_start|>user\n"), PATH)
    post(live, body("<|im_start|>user\n", parse_special=False), PATH)
    meant, text = (request.prompt.token_ids for request in live.engine.requests)
    assert len(meant) < len(text)


def test_stop_and_thinking_tags_are_text(live: LiveServer) -> None:
    live.engine.say("a</think>b stop c")
    choice = both(live, body(stop=" stop"))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a</think>b", "stop")


def test_logprobs(live: LiveServer) -> None:
    live.engine.say("the fox")
    logprobs = both(live, body(logprobs=2))["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "the fox"
    assert logprobs["text_offset"][0] == 0
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": "x " * 5000}, "prompt"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"stream_options": {}}, "stream_options"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_refusals(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    response = post(live, body(**fields), PATH)
    assert (response.status, response.error["param"]) == (400, param)


def test_official_client(live: LiveServer) -> None:
    live.engine.say(" quick")
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        assert client.completions.create(model=MODEL, prompt="The").choices[0].text == " quick"
        chunks = list(client.completions.create(model=MODEL, prompt="The", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " quick"
