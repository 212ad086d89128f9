"""The prefix cache behind the real server and engine, over HTTP: what is reused, what it says, who shares with whom."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server.app import make_server
from server.config import load_settings

CHAT = "/v1/chat/completions"
PAGE = 64
LEAST = 16
# A system prompt of some hundred tokens, and a document longer than the longest segment.
RULES = "You answer questions about a small town. " + " ".join(
    f"House {n} on Main Street has {n * 7 % 13} windows and a {['red', 'green', 'blue'][n % 3]} door."
    for n in range(30)
)
DOCUMENT = " ".join(f"Line {n}: the river rose by {n * 5 % 17} cm and fell by {n * 3 % 11} cm." for n in range(120))


@dataclass(frozen=True)
class Client:
    """A running server and the key to send."""

    url: str
    key: str | None = None

    def call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.read().decode()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self.call(method, path, body))

    def refusal(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.call(method, path, body)
        return caught.value.code, json.loads(caught.value.read())["error"]

    def chat(self, *messages: tuple[str, str], **fields: Any) -> Any:
        return self.json("POST", CHAT, chat_body(*messages, **fields))

    def metric(self, name: str) -> float:
        lines = [line for line in self.call("GET", "/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def chat_body(*messages: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {
        "model": "fermion-demo",
        "messages": [{"role": role, "content": text} for role, text in messages],
        "temperature": 0,
        "max_tokens": 8,
        "enable_thinking": False,
        **fields,
    }


@contextmanager
def serving(directory: Path, **settings: Any) -> Iterator[Client]:
    """The demo model with a small cache in `directory`."""
    given = {"port": 0, "threads": 2, "cache_ram": "64M", "cache_disk": "256M", "cache_dir": directory}
    given |= {"no_shadow": True, **settings}
    loaded = load_settings(given)
    server, worker = make_server(loaded.server_config(), loaded.engine_config())
    worker.start()
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: worker.failure or (server.started and worker.is_ready))
        assert worker.failure is None, worker.failure
        yield Client(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", settings.get("api_key"))
    finally:
        server.should_exit = True
        thread.join(20)
        worker.close()


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.01)
    return value


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(tmp_path_factory.mktemp("prefix")) as client:
        yield client


@pytest.fixture
def client(shared: Client) -> Client:
    """The shared server, its cache empty."""
    shared.call("DELETE", "/v1/cache")
    return shared


def text(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def cached(answer: Any) -> int:
    """Reused tokens; usage and extension must agree."""
    count, report = answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["fermion"]["cache"]
    assert report["hit_position"] == count
    assert report["recomputed"] == answer["usage"]["prompt_tokens"] - count
    return int(count)


def recomputed(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens"]) - cached(answer)


def test_a_repeated_prompt_is_reused_and_answered_alike(client: Client) -> None:
    messages = ("system", RULES), ("user", "Which door has house 3?")
    cold, warm = client.chat(*messages), client.chat(*messages)
    assert cached(cold) == 0
    assert cold["fermion"]["cache"]["miss_reason"] == "cold"
    # What is left is the opening of the answer: `<think>`, an empty thought and `</think>`.
    assert recomputed(warm) <= 8
    report = warm["fermion"]["cache"]
    assert (report["tier"], report["provenance"], report["miss_reason"]) == ("ram", "prefill", None)
    assert cached(warm) <= report["matched"] < warm["usage"]["prompt_tokens"]
    assert report["load_ms"] >= 0
    assert text(warm) == text(cold)


def test_log_probabilities_of_an_exact_answer_have_the_same_bits(client: Client) -> None:
    messages = ("system", RULES), ("user", DOCUMENT[:1500])
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 5, "max_tokens": 6}
    fresh = client.chat(*messages, cache={"read": False, "write": False}, **fields)
    client.chat(*messages, **fields)
    warm = client.chat(*messages, cache_exact=True, **fields)
    assert cached(warm) > 0
    assert warm["fermion"]["cache"]["provenance"] == "prefill"
    assert warm["choices"] == fresh["choices"]


def test_the_turns_of_a_chat(client: Client) -> None:
    history = [("system", RULES), ("user", "What colour is the door of house 4?")]
    answer = client.chat(*history)
    for question in ("And house 5?", "And house 6? " + DOCUMENT[:600], "Thanks. And house 7?"):
        asked = answer["usage"]["prompt_tokens"]
        history += [("assistant", text(answer)), ("user", question)]
        answer = client.chat(*history)
        # The thinking of the last turn is stripped, so what follows its header is new.
        assert asked - 16 <= cached(answer) <= asked
        fresh = client.chat(*history, cache={"read": False, "write": False})
        assert text(fresh) == text(answer)


@pytest.fixture(scope="module")
def shadowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server that reads ahead."""
    with serving(tmp_path_factory.mktemp("shadow"), no_shadow=False) as client:
        yield client


def rest(client: Client) -> None:
    """Give the server the time that users take to read."""
    wait_for(lambda: client.metric("fermion_num_conversations_ahead") == 0)


def test_with_time_between_the_turns_of_a_chat_only_the_question_is_new(shadowing: Client) -> None:
    """Thinking is on, and stripped at the next question."""
    shadowing.call("DELETE", "/v1/cache")
    used = shadowing.metric("fermion_cache_shadow_used_tokens_total")
    fields: dict[str, Any] = {"enable_thinking": True, "max_tokens": 60}
    history = [("system", RULES), ("user", "What colour is the door of house 4?")]
    answer = shadowing.chat(*history, **fields)
    for question in ("And house 5?", "And house 6? " + DOCUMENT[:600], "Thanks. And house 7?"):
        rest(shadowing)
        history += [("assistant", text(answer)), ("user", question)]
        body = chat_body(*history, **fields)
        answer = shadowing.json("POST", CHAT, body)
        # All before the question has been read, unless the answer was too short to be worth it.
        alone = shadowing.json("POST", "/tokenize", {"prompt": question})["count"]
        assert recomputed(answer) <= alone + 8 + LEAST
        exact = shadowing.chat(*history, **fields, cache_exact=True, cache={"write": False})
        fresh = shadowing.chat(*history, **fields, cache={"read": False, "write": False})
        assert exact["choices"] == fresh["choices"]
    assert shadowing.metric("fermion_cache_shadow_used_tokens_total") > used


def test_exact_conversations_are_read_ahead_exactly(shadowing: Client) -> None:
    shadowing.call("DELETE", "/v1/cache")
    history = [("system", RULES), ("user", "List five things.")]
    fields: dict[str, Any] = {"max_tokens": 100, "logprobs": True, "top_logprobs": 3}
    answer = shadowing.chat(*history, **fields, cache_exact=True)
    rest(shadowing)
    history += [("assistant", text(answer)), ("user", "More.")]
    warm = shadowing.chat(*history, **fields, cache_exact=True)
    fresh = shadowing.chat(*history, **fields, cache={"read": False, "write": False})
    assert warm["choices"] == fresh["choices"]
    assert warm["fermion"]["cache"]["provenance"] == "prefill"


def test_requests_that_leave_nothing_behind_are_not_read_ahead(shadowing: Client) -> None:
    shadowing.call("DELETE", "/v1/cache")
    before = shadowing.metric("fermion_cache_shadow_tokens_total")
    shadowing.chat(("system", RULES), ("user", "List five things."), max_tokens=60, cache={"write": False})
    rest(shadowing)
    assert shadowing.json("GET", "/v1/cache")["data"] == []
    assert shadowing.metric("fermion_cache_shadow_tokens_total") == before


def test_a_tool_chain_is_read_ahead_of_the_question_that_ends_it(shadowing: Client) -> None:
    """The question strips the thinking of every round since the one before it; none of them is read again."""
    shadowing.call("DELETE", "/v1/cache")
    tools = [{"type": "function", "function": {
        "name": "get_weather", "description": "Get the weather for a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip
    body = chat_body(("user", "What is the weather in Paris?"), tools=tools, max_tokens=200, enable_thinking=True)
    for number in range(3):
        answer = shadowing.json("POST", CHAT, {**body, "tool_choice": "required"})
        message = answer["choices"][0]["message"]
        body["messages"].append(message)
        for call in message["tool_calls"]:
            content = f"Report {number}: {DOCUMENT[number * 500 :][:500]}"
            body["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": content})
        rest(shadowing)
    answer = shadowing.json("POST", CHAT, {**body, "max_tokens": 40})
    body["messages"].append(answer["choices"][0]["message"])
    rest(shadowing)
    question = {"role": "user", "content": "Thanks. And tomorrow?"}
    last = shadowing.json("POST", CHAT, {**body, "messages": [*body["messages"], question]})
    alone = shadowing.json("POST", "/tokenize", {"prompt": question["content"]})["count"]
    if answer["choices"][0]["finish_reason"] == "stop":
        assert recomputed(last) <= alone + 8


def test_thinking_that_clients_leave_out_is_restored_on_demand(tmp_path: Path) -> None:
    with serving(tmp_path, preserve_thinking=True) as client:
        history = [("system", RULES), ("user", "What colour is the door of house 4?")]
        fields: dict[str, Any] = {"enable_thinking": True, "max_tokens": 200}
        answer = client.chat(*history, **fields)
        thought = answer["choices"][0]["message"]["reasoning_content"]
        history += [("assistant", text(answer)), ("user", "And house 5?")]
        assert thought in client.json("POST", "/apply-template", chat_body(*history, **fields))["prompt"]
        following = client.chat(*history, **fields)
        # All but the end of the turn and the question was in the state.
        usage = answer["usage"]
        assert cached(following) == usage["prompt_tokens"] + usage["completion_tokens"] - 1
        without = chat_body(*history, **fields, chat_template_kwargs={"preserve_thinking": False})
        assert thought not in client.json("POST", "/apply-template", without)["prompt"]


def test_a_system_prompt_is_shared(client: Client) -> None:
    client.chat(("system", RULES), ("user", "Who lives in house 8?"))
    other = client.chat(("system", RULES), ("user", "How many windows has house 9?"))
    system = client.json("POST", "/tokenize", {"prompt": RULES})["count"]
    assert system <= cached(other) <= system + 16


def test_tool_turns_are_kept_as_they_were_generated(client: Client) -> None:
    tools = [{"type": "function", "function": {
        "name": "get_weather", "description": "Get the weather for a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip
    body = chat_body(("user", "What is the weather in Paris?"), tools=tools, max_tokens=200, tool_choice="required")
    call = client.json("POST", CHAT, body)
    usage = call["usage"]
    assert call["choices"][0]["finish_reason"] == "tool_calls"
    message = call["choices"][0]["message"]
    body["messages"] += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}]
    after = client.json("POST", CHAT, body)
    # The last token of the turn was drawn, and not yet read.
    assert cached(after) == usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert after["fermion"]["cache"]["provenance"] == "decode"
    exact = client.json("POST", CHAT, {**body, "cache_exact": True})
    assert cached(exact) < cached(after) or exact["fermion"]["cache"]["provenance"] == "prefill"


def test_a_long_document_with_changing_questions(client: Client) -> None:
    first = client.chat(("user", DOCUMENT + "\n\nHow much did it rise in line 7?"))
    second = client.chat(("user", DOCUMENT + "\n\nAnd how much did it fall in line 90?"))
    third = client.chat(("user", DOCUMENT + "\n\nIn which line did it fall by 10 cm?"))
    assert first["usage"]["prompt_tokens"] > 1024
    assert recomputed(second) <= 2 * PAGE
    assert recomputed(third) <= 2 * PAGE


def test_salts_share_nothing(client: Client) -> None:
    messages = ("system", RULES), ("user", "Hello")
    client.chat(*messages, cache_salt="a")
    for salt in ({}, {"cache_salt": "b"}):
        answer = client.chat(*messages, **salt)
        assert cached(answer) == 0
        assert answer["fermion"]["cache"]["miss_reason"] == "salt"
    assert cached(client.chat(*messages, cache_salt="a")) > 0


def test_a_request_can_do_without(client: Client) -> None:
    messages = ("system", RULES), ("user", "Hello")
    client.chat(*messages, cache={"write": False})
    assert client.json("GET", "/v1/cache")["data"] == []
    client.chat(*messages)
    unread = client.chat(*messages, cache={"read": False})
    assert cached(unread) == 0
    assert unread["fermion"]["cache"]["miss_reason"] == "disabled"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 513}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_exact": "yes"}, "cache_exact"),
        ({"cache": True}, "cache"),
        ({"cache": {"read": "no"}}, "cache.read"),
        ({"prompt_cache_key": 7}, "prompt_cache_key"),
    ],
)
def test_wrong_fields_are_named(client: Client, fields: dict[str, Any], param: str) -> None:
    status, error = client.refusal("POST", CHAT, chat_body(("user", "x"), **fields))
    assert (status, error["param"]) == (400, param)


def test_streams_tell_when_asked_for_usage(client: Client) -> None:
    body = chat_body(("system", RULES), ("user", "Hi"), stream=True, prompt_cache_key="user-1")
    client.call("POST", CHAT, body)
    lines = client.call("POST", CHAT, {**body, "stream_options": {"include_usage": True}}).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert cached(chunks[-1]) > 0
    assert all("fermion" not in chunk for chunk in chunks[:-1])
    silent = client.call("POST", CHAT, body)
    assert "fermion" not in silent.replace("fermion-demo", "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": RULES}),
        ("/v1/responses", {"input": RULES}),
        ("/v1/messages", {"messages": [{"role": "user", "content": RULES}]}),
    ],
)
def test_every_endpoint_uses_the_cache(client: Client, path: str, body: dict[str, Any]) -> None:
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = {"model": "fermion-demo", limit: 4, "temperature": 0, "cache_salt": path, **body}
    cold, warm = client.json("POST", path, body), client.json("POST", path, body)
    assert cold["fermion"]["cache"]["hit_position"] == 0
    assert 0 <= warm["fermion"]["cache"]["recomputed"] <= PAGE + 1
    hit = warm["fermion"]["cache"]["hit_position"]
    usage = warm["usage"]
    shown = {
        "/v1/completions": lambda: usage["prompt_tokens_details"]["cached_tokens"],
        "/v1/responses": lambda: usage["input_tokens_details"]["cached_tokens"],
        "/v1/messages": lambda: usage["cache_read_input_tokens"],
    }[path]()
    assert shown == hit > 0


def computed(client: Client) -> float:
    """Prompt tokens that were computed so far, for all choices of all requests."""
    return client.metric("fermion_cache_prompt_tokens_total") - client.metric("fermion_cache_reused_tokens_total")


@contextmanager
def held(client: Client) -> Iterator[None]:
    """The engine is busy with something else and what is asked inside waits, so that requests overlap for sure."""
    endless = {"structured_outputs": {"regex": "(one ){2000}"}, "max_tokens": 3000}
    body = json.dumps(chat_body(("user", "Count."), stream=True, **endless)).encode()
    request = urllib.request.Request(client.url + CHAT, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        response.readline()
        wait_for(lambda: client.metric("fermion_num_requests_running") == 1)
        yield


def waiting(client: Client, count: int) -> None:
    wait_for(lambda: client.metric("fermion_num_requests_waiting") == count)


def asked(number: int) -> tuple[tuple[str, str], ...]:
    """A prefix of some thousand tokens, and one of several short questions."""
    return ("system", DOCUMENT), ("user", f"How much did the river rise in line {number}?")


QUESTION = 48  # tokens behind the system prompt, at most


@pytest.mark.parametrize("n", [1, 3])
def test_concurrent_requests_compute_a_prefix_once(client: Client, n: int) -> None:
    with ThreadPoolExecutor(5) as pool:
        with held(client):
            before = computed(client)
            futures = [pool.submit(client.chat, *asked(i), n=n) for i in range(5)]
            waiting(client, 5)
        answers = [future.result() for future in futures]
    total = max(answer["usage"]["prompt_tokens"] for answer in answers)
    assert total > 2000
    assert sorted(map(recomputed, answers))[3] < QUESTION  # all but the one that came first
    assert computed(client) - before <= total + 4 * QUESTION + 5 * (n - 1) * 8
    with ThreadPoolExecutor(5) as pool:
        again = list(pool.map(lambda i: client.chat(*asked(i), n=n), range(5)))
    assert [a["choices"] for a in again] == [a["choices"] for a in answers]


def test_what_a_cancelled_request_computed_of_a_prefix_serves_those_that_wait_for_it(client: Client) -> None:
    leading = json.dumps(chat_body(*asked(0), stream=True, return_progress=True)).encode()
    request = urllib.request.Request(client.url + CHAT, leading, {"content-type": "application/json"})
    seen = 0
    with ThreadPoolExecutor(4) as pool:
        with held(client):
            first = pool.submit(urllib.request.urlopen, request, timeout=120)
            waiting(client, 1)
            futures = [pool.submit(client.chat, *asked(i)) for i in (1, 2, 3)]
            waiting(client, 4)
        with first.result() as response:
            for line in response:
                if b"prompt_progress" in line:
                    seen = json.loads(line[6:])["prompt_progress"]["processed"]
                    if seen > 900:
                        break
        answers = [future.result() for future in futures]
    total = max(answer["usage"]["prompt_tokens"] for answer in answers)
    assert 900 < seen < total
    first_of_them = max(range(3), key=lambda i: recomputed(answers[i]))
    taken_up = answers.pop(first_of_them)
    report = taken_up["fermion"]["cache"]
    assert report["hit_position"] + report["carried"] >= seen
    assert max(map(recomputed, answers)) < QUESTION
    fresh = client.chat(*asked(1 + first_of_them), cache={"read": False, "write": False})
    assert taken_up["choices"] == fresh["choices"]


def test_a_cancelled_prefill_is_not_lost_and_changes_nothing(client: Client) -> None:
    messages = ("system", RULES), ("user", DOCUMENT)
    fresh = client.chat(*messages, cache={"read": False, "write": False})
    body = json.dumps(chat_body(*messages, stream=True, return_progress=True)).encode()
    request = urllib.request.Request(client.url + CHAT, body, {"content-type": "application/json"})
    seen = 0
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if b"prompt_progress" in line:
                seen = json.loads(line[6:])["prompt_progress"]["processed"]
                if seen > 900:
                    break
    assert 900 < seen < fresh["usage"]["prompt_tokens"]
    wait_for(lambda: client.metric("fermion_num_requests_running") == 0)
    retry = client.chat(*messages)
    assert seen - cached(retry) <= 512
    assert text(retry) == text(fresh)


def test_inspect_pin_and_clear(client: Client) -> None:
    client.chat(("system", RULES), ("user", "Hello"))
    listed = client.json("GET", "/v1/cache")
    kinds = {snapshot["kind"]: snapshot for snapshot in listed["data"]}
    assert set(kinds) == {"system", "generation"}
    positions = [snapshot["position"] for snapshot in listed["data"]]
    assert positions == sorted(positions, reverse=True)
    name = kinds["system"]["id"]
    assert client.json("POST", "/v1/cache/pin", {"id": name})["pinned"] is True
    assert {s["id"]: s["pinned"] for s in client.json("GET", "/v1/cache")["data"]}[name] is True
    assert client.metric("fermion_cache_pinned") == 1
    assert client.json("POST", "/v1/cache/unpin", {"id": name})["pinned"] is False
    status, error = client.refusal("POST", "/v1/cache/pin", {"id": "none"})
    assert (status, error["code"]) == (404, "snapshot_not_found")
    assert client.json("DELETE", "/v1/cache")["deleted"] == len(positions)
    assert client.json("GET", "/v1/cache")["data"] == []
    assert cached(client.chat(("system", RULES), ("user", "Hello"))) == 0


def test_warming_saves_the_first_request_its_prefill(client: Client) -> None:
    messages = ("system", RULES), ("user", "Hello")
    warmed = client.json("POST", "/v1/cache/warm", chat_body(*messages))
    assert warmed["usage"]["completion_tokens"] == 0
    assert recomputed(client.chat(*messages)) <= 8


def test_metrics_count_hits_and_reasons(client: Client) -> None:
    names = ("fermion_cache_hits_total", "fermion_cache_reused_tokens_total", "fermion_prefix_cache_hits_total")
    before = [client.metric(name) for name in names]
    misses = client.metric("fermion_cache_misses_total")
    messages = ("system", RULES), ("user", "Count me")
    client.chat(*messages)
    hit = cached(client.chat(*messages))
    after = wait_for(lambda: (now := [client.metric(name) for name in names])[2] > before[2] and now)
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, hit, hit]
    assert client.metric("fermion_cache_misses_total") == misses + 1
    assert client.metric("fermion_cache_ram_bytes{") <= client.metric("fermion_cache_ram_capacity_bytes{") <= 64 << 20


def test_keys_are_tenants_and_the_disk_survives_a_restart(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\nbeta\n")
    keys.chmod(0o600)
    messages = ("system", RULES), ("user", "Whose is this?")
    with serving(tmp_path / "prefix", api_key_file=keys) as anonymous:
        alpha, beta = Client(anonymous.url, "alpha"), Client(anonymous.url, "beta")
        cold = alpha.chat(*messages)
        stranger = beta.chat(*messages)
        assert (cached(stranger), stranger["fermion"]["cache"]["miss_reason"]) == (0, "cold")
        mine = alpha.json("GET", "/v1/cache")["data"]
        assert cached(alpha.chat(*messages)) > 0
        assert beta.refusal("POST", "/v1/cache/pin", {"id": mine[0]["id"]})[0] == 404
        assert beta.json("DELETE", "/v1/cache")["deleted"] > 0
        assert len(alpha.json("GET", "/v1/cache")["data"]) == len(mine)
        assert anonymous.refusal("GET", "/v1/cache")[0] == 401
    with serving(tmp_path / "prefix", api_key_file=keys) as anonymous:
        warm = Client(anonymous.url, "alpha").chat(*messages)
        assert recomputed(warm) <= 8
        assert warm["fermion"]["cache"]["tier"] == "disk"
        assert text(warm) == text(cold)
        assert cached(Client(anonymous.url, "beta").chat(*messages)) == 0


def test_without_a_cache(tmp_path: Path) -> None:
    messages = ("system", RULES), ("user", "Hello")
    with serving(tmp_path / "prefix", no_cache=True) as client:
        for _ in range(2):
            answer = client.chat(*messages)
            assert "fermion" not in answer
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        status, error = client.refusal("GET", "/v1/cache")
        assert (status, error["code"]) == (404, "cache_disabled")
    assert not (tmp_path / "prefix").exists()
