"""Long and crowded runs: random schedules, many idle connections, a front end's habits."""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from http_client import CHAT, both, post, send, stream_lines
from live_server import MODEL, LiveServer, chat_body
from test_worker import Connection, is_idle, wait_until

from engine.core import SamplingParams
from engine.tokenizer import Tokenizer
from server.errors import ApiError
from server.generation import ChoiceBuilder
from server.job import ChoiceFinished, Deltas, Failed, Finished, Job, Restarted, Work
from server.prompt import GenerationDefaults, PromptBuilder
from server.schema import ChatCompletionRequest
from server.template import ChatTemplate
from server.textstream import TextDelta
from server.worker import EngineWorker


async def outcome(job: Job) -> str | BaseException:
    """The text of a job, or what became of it instead."""
    text, finished = "", 0
    while True:
        event = await job.next_event(30)
        assert event is not None, "a job was forgotten"
        if isinstance(event, Deltas):
            text += "".join(delta.text for delta in event.deltas if isinstance(delta, TextDelta))
        elif isinstance(event, Restarted):
            text, finished = "", 0
        elif isinstance(event, ChoiceFinished):
            finished += 1
        elif isinstance(event, Finished):
            assert finished == 1
            return text
        elif isinstance(event, Failed):
            return event.error


def choice_builder(checkpoint: Path) -> ChoiceBuilder:
    defaults = GenerationDefaults(SamplingParams(), GenerationDefaults.load(checkpoint).stop_token_ids)
    prompts = PromptBuilder(Tokenizer.load(checkpoint), ChatTemplate.load(checkpoint), defaults)
    return ChoiceBuilder(prompts, (checkpoint / "tokenizer.json").read_text())


def expected_answer(work: Work) -> str:
    """What `FakeEngine.echo` says."""
    request, _ = work.choices[0]()
    return f"sum {int(request.prompt.token_ids.sum())}"


def test_random_schedule(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    choices = choice_builder(checkpoint)
    engine = FakeEngine(tokenizer)
    engine.layer_s = 0.0005
    worker = EngineWorker(lambda: engine, max_queued=8)
    rng = random.Random(3)

    def make_job(number: int) -> tuple[Job, str]:
        body = chat_body(f"question {number}", enable_thinking=False, priority=rng.choice([None, 0, 5, -5]))
        if rng.random() < 0.3:
            body |= {"metadata": {"task": "title"}, "priority": None}
        work = choices.chat(ChatCompletionRequest.model_validate(body), str(number), 4096)
        return Job(str(number), work), expected_answer(work)

    async def run() -> tuple[int, int, int]:
        worker.start()
        while not worker.is_ready:
            await asyncio.sleep(0.01)
        tasks: list[tuple[Job, str, asyncio.Task[str | BaseException]]] = []
        refused = 0
        for step in range(1000):
            if rng.random() < 0.6:
                job, expected = make_job(step)
                try:
                    worker.submit(job)
                except ApiError as error:
                    refused += int(error.status == 429)
                    continue
                tasks.append((job, expected, asyncio.create_task(outcome(job))))
            elif tasks and rng.random() < 0.5:
                worker.cancel(tasks[rng.randrange(max(0, len(tasks) - 10), len(tasks))][0])
            else:
                await asyncio.sleep(rng.random() * 0.004)
        answered = cancelled = 0
        for job, expected, task in tasks:
            result = await task
            if isinstance(result, BaseException):
                assert job.is_cancelled, result
                cancelled += 1
            else:
                assert result == expected
                answered += 1
        assert worker.queued == worker.running == 0
        return answered, cancelled, refused

    try:
        answered, cancelled, refused = asyncio.run(run())
    finally:
        worker.close()
    assert engine.active == 0
    assert engine.is_closed
    assert min(answered, cancelled, refused) > 10


class Client:
    """One chat over a connection of its own, which can be dropped; `run` reads the answer."""

    def __init__(self, live: LiveServer, body: dict[str, Any], expected: str) -> None:
        self._port = live.port
        self._body = json.dumps(body).encode()
        self.expected = expected
        self.request_id: str | None = None
        self.is_dropped = self.is_withdrawn = False
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> str:
        """What became of it: "answered", "refused", "withdrawn" or "dropped". AssertionError for a wrong answer."""
        try:
            reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(self._body)}\r\n\r\n"
            self._writer.write(head.encode() + self._body)
            headers = await reader.readuntil(b"\r\n\r\n")
            self.request_id = headers.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
            async with asyncio.timeout(30):
                body = await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            assert self.is_dropped
            return "dropped"
        finally:
            if self._writer is not None:
                self._writer.close()
        if self.is_dropped:
            return "dropped"
        status = int(headers.split(b" ", 2)[1])
        if status == 429:
            return "refused"
        if b'"error":' in body:
            assert self.is_withdrawn, body
            assert b'"code":"request_cancelled"' in body
            return "withdrawn"
        assert status == 200
        # Every event is sent in one piece, so that no chunk's border lies within a string.
        assert "".join(re.findall(r'"content":"([^"]*)"', body.decode())) == self.expected
        return "answered"

    def drop(self, *, reset: bool) -> None:
        """Go away without a word."""
        if self._writer is not None:
            self.is_dropped = True
            if reset:
                self._writer.transport.abort()
            else:
                self._writer.close()


def test_random_schedule_over_http(checkpoint: Path, start_server: Callable[..., LiveServer]) -> None:
    """Submit, withdraw by id, hang up and wait, in any order: who was not refused and stayed gets the right answer."""
    live = start_server(queue_size=8)
    live.engine.layer_s, live.engine.token_s = 0.002, 0.0005
    choices = choice_builder(checkpoint)
    rng = random.Random(5)

    def make_client(number: int) -> Client:
        body = chat_body(f"question {number}", enable_thinking=False, stream=rng.random() < 0.5)
        if rng.random() < 0.3:
            body |= {"metadata": {"task": "title"}, "stream": False}
        else:
            body["priority"] = rng.choice([None, 0, 5, -5])
        work = choices.chat(ChatCompletionRequest.model_validate(body), str(number), 4096)
        return Client(live, body, expected_answer(work))

    async def withdraw(client: Client) -> None:
        client.is_withdrawn = True
        answer = await asyncio.to_thread(send, live, "DELETE", f"/v1/requests/{client.request_id}")
        assert answer.status in (200, 404)

    async def run() -> Counter[str]:
        clients: list[Client] = []
        tasks: list[asyncio.Task[str]] = []
        for step in range(1000):
            action = rng.random()
            recent = clients[-8:]
            if action < 0.5 or not recent:
                clients.append(make_client(step))
                tasks.append(asyncio.create_task(clients[-1].run()))
            elif action < 0.65:
                rng.choice(recent).drop(reset=rng.random() < 0.5)
            elif action < 0.8:
                if known := [client for client in recent if client.request_id and not client.is_dropped]:
                    await withdraw(rng.choice(known))
            else:
                await asyncio.sleep(rng.random() * 0.03)
        return Counter(await asyncio.gather(*tasks))

    outcomes = asyncio.run(run())
    wait_until(lambda: is_idle(live))
    assert live.engine.active == 0
    assert set(outcomes) == {"answered", "refused", "withdrawn", "dropped"}
    assert outcomes["answered"] > 100
    assert live.engine.outcomes.count("finished") >= outcomes["answered"]


def test_withdrawing_waiting_requests_never_touches_the_running_one(start_server: Callable[..., LiveServer]) -> None:
    live = start_server(queue_size=40)
    live.engine.layers, live.engine.layer_s = 40, 0.02
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: list(stream_lines(live, chat_body("running"))))
        wait_until(lambda: live.worker.running == 1)
        waiting = [Connection(live, chat_body(f"waiting {index}", stream=index % 2 == 0)) for index in range(30)]
        wait_until(lambda: live.worker.queued == 30)
        for index, connection in enumerate(waiting):
            connection.drop(reset=index % 3 == 0)
        wait_until(lambda: live.worker.queued == 0)
        assert live.worker.running == 1
        assert not running.done()
        lines = running.result()
    assert lines[-2:] == ["data: [DONE]\n", "\n"]
    assert len(live.engine.requests) == 1
    assert live.engine.outcomes == ["finished"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_idle_streams_are_cheap(start_server: Callable[..., LiveServer]) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        pytest.skip("needs 1200 file descriptors")
    live = start_server(queue_size=600)
    live.engine.layers, live.engine.layer_s = 10_000, 0.01
    warm = [Connection(live, chat_body(stream=True)) for _ in range(20)]
    wait_until(lambda: live.worker.queued == 19)
    before = resident_bytes()
    connections = [Connection(live, chat_body(stream=True)) for _ in range(500)]
    wait_until(lambda: live.worker.queued == 519, 30)
    growth = resident_bytes() - before
    started = time.monotonic()
    assert send(live, "GET", "/health").json["queued"] == 519
    assert time.monotonic() - started < 0.5
    for connection in (*warm, *connections):
        connection.drop()
    wait_until(lambda: is_idle(live), 30)
    assert growth < 50 << 20


def test_front_end_sequence(start_server: Callable[..., LiveServer]) -> None:
    """What Open WebUI does: list models, stream a chat, ask for title, tags and follow-ups in parallel, chat on."""
    live = start_server()
    live.engine.layers, live.engine.layer_s = 10, 0.01
    assert [model["id"] for model in send(live, "GET", "/v1/models").json["data"]] == [MODEL]
    chat = chat_body("Hi", stream_options={"include_usage": True})

    def first_token_s() -> float:
        started = time.monotonic()
        first = None
        for line in stream_lines(live, chat):
            if first is None and '"reasoning_content":' in line:
                first = time.monotonic() - started
        assert first is not None
        return first

    alone = first_token_s()
    tasks = [
        chat_body(f"### Task:\nGenerate {what} for the chat", stream=False, max_tokens=1000, enable_thinking=False)
        for what in ("a title", "tags", "follow-ups")
    ]
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(post, live, task) for task in tasks]
        wait_until(lambda: live.worker.running == 1 and live.worker.queued == 2)
        beside_tasks = first_token_s()
        assert {answer.result().status for answer in answers} == {200}
    # The task that was being read gave way at the next layer, and the chat went before all others.
    assert live.engine.outcomes == ["finished", "cancelled", *["finished"] * 4]
    assert live.engine.requests[0].prompt.token_ids.tolist() == live.engine.requests[2].prompt.token_ids.tolist()
    assert beside_tasks < alone + 0.15
    both(live, {**chat, "stream_options": None})
