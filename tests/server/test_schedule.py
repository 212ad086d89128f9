"""Long and crowded runs: random schedules, many idle connections, a front end's habits."""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from http_client import both, post, send, stream_events
from live_server import MODEL, LiveServer, chat_body
from test_worker import Connection, is_idle, wait_until

from engine.core import SamplingParams
from engine.tokenizer import Tokenizer
from server.errors import ApiError
from server.generation import ChoiceBuilder
from server.job import ChoiceFinished, Deltas, Failed, Finished, Job, Restarted
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


def test_random_schedule(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    defaults = GenerationDefaults(SamplingParams(), GenerationDefaults.load(checkpoint).stop_token_ids)
    prompts = PromptBuilder(tokenizer, ChatTemplate.load(checkpoint), defaults)
    choices = ChoiceBuilder(prompts, (checkpoint / "tokenizer.json").read_text())
    engine = FakeEngine(tokenizer)
    engine.layer_s = 0.0005
    worker = EngineWorker(lambda: engine, max_queued=8)
    rng = random.Random(3)

    def make_job(number: int) -> tuple[Job, str]:
        body = chat_body(f"question {number}", enable_thinking=False, priority=rng.choice([None, 0, 5, -5]))
        if rng.random() < 0.3:
            body |= {"metadata": {"task": "title"}, "priority": None}
        work = choices.chat(ChatCompletionRequest.model_validate(body), str(number), 4096)
        request, _ = work.choices[0]()
        return Job(str(number), work), f"sum {int(request.prompt.token_ids.sum())}"

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
        chunks = stream_events(live, chat)
        assert chunks[-1]["usage"]["total_tokens"] > 0
        return time.monotonic() - started

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
    assert beside_tasks < alone + 0.15
    both(live, {**chat, "stream_options": None})
