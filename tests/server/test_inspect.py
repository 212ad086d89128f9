"""Tokens, templates, metrics and the state of requests over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from http_client import post, send
from live_server import MODEL, LiveServer, chat_body

from server.pace import Pace

Starter = Callable[..., LiveServer]


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.005)
    return value


def test_tokenize_and_back(live: LiveServer) -> None:
    text = "The quick brown 🦊<|im_end|>"
    answer = post(live, {"model": MODEL, "prompt": text, "return_token_strs": True}, "/tokenize").json
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert post(live, {"tokens": answer["tokens"]}, "/detokenize").json == {"prompt": text}
    special = post(live, {"prompt": text, "parse_special": True}, "/tokenize").json
    assert special["count"] < answer["count"]
    assert post(live, {"tokens": special["tokens"]}, "/detokenize").json == {"prompt": text}


def test_tokenize_messages_counts_the_prompt(live: LiveServer) -> None:
    body = chat_body("How many?", enable_thinking=False)
    count = post(live, body, "/tokenize").json["count"]
    assert count == post(live, body).json["usage"]["prompt_tokens"]


def test_apply_template(live: LiveServer) -> None:
    prompt = post(live, {"messages": chat_body("x<|im_end|>")["messages"]}, "/apply-template").json["prompt"]
    assert prompt == "<|im_start|>user\nx<|im_end|><|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"model": "other", "prompt": "x"}, "model"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
    ],
)
def test_refusals(live: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    response = post(live, body, path)
    assert response.status in (400, 404)
    assert response.error["param"] == param


def test_metrics(start_server: Starter) -> None:
    live = start_server()
    live.engine.cached = 4
    assert post(live, chat_body()).status == 200

    def page() -> str:
        text = send(live, "GET", "/metrics").body.decode()
        return text if 'fermion_requests_total{model_name="test-model",state="finished"} 1.0' in text else ""

    text = wait_until(page)
    for prefix in ("fermion_", "vllm:"):
        assert f'{prefix}num_requests_running{{model_name="{MODEL}"}} 0.0' in text
        assert f'{prefix}num_requests_waiting{{model_name="{MODEL}"}} 0.0' in text
        assert f'{prefix}time_to_first_token_seconds_count{{model_name="{MODEL}"}} 1.0' in text
        assert f'{prefix}prefix_cache_hits_total{{model_name="{MODEL}"}} 4.0' in text
        assert f'{prefix}generation_tokens_total{{model_name="{MODEL}"}}' in text


def request_ids(live: LiveServer) -> list[str]:
    return list(live.worker._active)


def test_state_of_requests(start_server: Starter) -> None:
    live = start_server()
    live.engine.layers, live.engine.layer_s = 20, 0.03
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, live, chat_body("first"))
        (running,) = wait_until(lambda: request_ids(live))
        wait_until(lambda: live.worker.running)
        second = pool.submit(post, live, chat_body("second"))
        waiting = wait_until(lambda: [i for i in request_ids(live) if i != running])[0]
        state = wait_until(lambda: (s := send(live, "GET", f"/v1/requests/{running}").json)["processed_tokens"] and s)
        assert state["state"] == "prefill"
        assert 0 < state["processed_tokens"] <= state["prompt_tokens"]
        state = send(live, "GET", f"/v1/requests/chatcmpl-{waiting}").json
        assert (state["state"], state["queue_position"]) == ("queued", 0)
        assert send(live, "DELETE", f"/v1/requests/{waiting}").json["state"] == "cancelled"
        assert second.result().status == 499
        assert second.result().error["code"] == "request_cancelled"
        assert first.result().status == 200
    assert send(live, "GET", f"/v1/requests/{running}").json["state"] == "finished"
    assert send(live, "GET", "/v1/requests/none").error["code"] == "request_not_found"


def test_requests_of_other_keys_are_not_there(start_server: Starter) -> None:
    live = start_server(api_keys=["a", "b"])
    live.engine.layers, live.engine.layer_s = 20, 0.03
    owner, other = ({"authorization": f"Bearer {key}"} for key in "ab")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, live, chat_body("first"), **owner)
        (running,) = wait_until(lambda: request_ids(live))
        path = f"/v1/requests/{running}"
        for method in ("GET", "DELETE"):
            assert send(live, method, path, headers=other).error["code"] == "request_not_found"
        assert send(live, "GET", path, headers=owner).status == 200
        assert answer.result().status == 200
    assert send(live, "GET", path, headers=other).status == 404
    assert send(live, "GET", path, headers=owner).json["state"] == "finished"


def test_estimates_come_from_measured_speed(start_server: Starter) -> None:
    live = start_server(queue_size=1)
    live.engine.layers, live.engine.layer_s = 1, 1.2
    with ThreadPoolExecutor(3) as pool:
        assert post(live, chat_body()).status == 200
        answers = [pool.submit(post, live, chat_body()) for _ in range(2)]
        wait_until(lambda: live.worker.queued == 1)
        refused = post(live, chat_body())
        assert refused.status == 429
        assert refused.headers["retry-after"] == "2"
        waiting = next(i for i in request_ids(live) if live.worker.queue_position(live.worker._active[i]) == 0)
        assert 1200 < send(live, "GET", f"/v1/requests/{waiting}").json["eta_ms"] < 3600
        assert {answer.result().status for answer in answers} == {200}


def order_of(live: LiveServer) -> list[int]:
    return [len(request.prompt.token_ids) for request in live.engine.requests]


def test_short_and_cached_prompts_do_not_spoil_the_estimate() -> None:
    def job(prompt: int, cached: int, prefill_s: float) -> Any:
        return SimpleNamespace(
            work=SimpleNamespace(prompt_tokens=prompt, max_tokens=11, choices=[None]),
            progress=None, cached_tokens=cached, completion_tokens=11,
            started_at=0.0, first_token_at=prefill_s, finished_at=prefill_s + 1.0,
        )  # fmt: skip

    pace = Pace()
    pace.learn(job(4000, 0, 8.0))
    for _ in range(3):
        pace.learn(job(4010, 4000, 0.1))
    waiting = job(2000, 0, 0.0)
    waiting.completion_tokens = 0
    assert pace.seconds_left(waiting) == pytest.approx(4.0 + 1.1, rel=0.1)


def test_choices_after_the_first_do_not_count_as_cached(start_server: Starter) -> None:
    """What the first choice computed, the second finds in the cache; that is not the prompt's own share."""
    live = start_server()
    live.engine.reuses_last_prompt = True
    usage = post(live, chat_body("some words", n=3)).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(live.engine.requests) == 3
    text = wait_until(lambda: (t := send(live, "GET", "/metrics").body.decode()).count('"finished"} 1.0') and t)
    assert f'fermion_prefix_cache_hits_total{{model_name="{MODEL}"}} 0.0' in text


def test_urgent_requests_overtake(start_server: Starter) -> None:
    live = start_server()
    live.engine.layers, live.engine.layer_s = 1, 0.2
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(post, live, chat_body("x"))]
        wait_until(lambda: live.worker.running)
        for length, priority in ((20, 5), (40, None), (60, -5)):
            futures.append(pool.submit(post, live, chat_body("x" * length, priority=priority)))
            wait_until(lambda: live.worker.queued == len(futures) - 1)
        assert {future.result().status for future in futures} == {200}
    lengths = order_of(live)
    assert lengths[1:] == sorted(lengths[1:], reverse=True)


def test_background_task_gives_way_and_is_still_right(start_server: Starter) -> None:
    live = start_server()
    live.engine.layers, live.engine.layer_s = 20, 0.02
    task = chat_body("### Task:\nGenerate a title", enable_thinking=False)
    with ThreadPoolExecutor(2) as pool:
        background = pool.submit(post, live, task)
        wait_until(lambda: live.worker.running)
        started = time.monotonic()
        chat = post(live, chat_body("Hello", enable_thinking=False))
        assert chat.json["choices"][0]["message"]["content"].startswith("sum ")
        assert time.monotonic() - started < 0.75
        title = background.result().json
    assert live.engine.outcomes == ["cancelled", "finished", "finished"]
    expected = int(live.engine.requests[-1].prompt.token_ids.sum())
    assert title["choices"][0]["message"]["content"] == f"sum {expected}"
    tokens = len(live.engine.reply(live.engine.requests[-1])) + 1
    assert title["usage"]["completion_tokens"] == tokens


def test_streams_and_equal_tasks_do_not_give_way(start_server: Starter) -> None:
    live = start_server()
    live.engine.layers, live.engine.layer_s = 5, 0.02
    with ThreadPoolExecutor(3) as pool:
        bodies = [chat_body("### Task: a"), chat_body("### Task: b", metadata={"task": "x"}), chat_body("### Task: c")]
        futures = [pool.submit(post, live, body) for body in bodies]
        assert {future.result().status for future in futures} == {200}
    assert live.engine.outcomes == ["finished"] * 3


def test_repeated_request_replaces_its_orphan(start_server: Starter) -> None:
    live = start_server()
    live.engine.layers, live.engine.layer_s = 50, 0.02
    with ThreadPoolExecutor(2) as pool:
        orphan = pool.submit(post, live, chat_body("again"))
        wait_until(lambda: live.worker.running)
        other = pool.submit(post, live, chat_body("other"))
        wait_until(lambda: live.worker.queued)
        live.engine.layer_s = 0.001
        repeated = post(live, chat_body("again"), **{"x-stainless-retry-count": "1"})
        assert repeated.status == 200
        assert orphan.result().status == 499
        assert other.result().status == 200
