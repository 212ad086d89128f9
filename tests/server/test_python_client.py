"""The official Python client: plain, streamed, with its stream helper and its errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from live_server import MODEL, LiveServer

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
CALL = "<tool_call>\n<function=get_time>\n<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture
def client(live: LiveServer) -> Any:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_plain(live: LiveServer, client: openai.OpenAI) -> None:
    live.engine.say("hm\n</think>\n\nHello there")
    completion = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert completion.choices[0].message.content == "Hello there"
    assert completion.choices[0].message.model_extra == {"reasoning_content": "hm"}
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens == 4


def test_stream(live: LiveServer, client: openai.OpenAI) -> None:
    live.engine.say("hm\n</think>\n\nHello there")
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_stream_helper(live: LiveServer, client: openai.OpenAI) -> None:
    live.engine.say(f"hm\n</think>\n\nHello\n\n{CALL}\n{CALL}")
    extra = {"return_progress": True}
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS, extra_body=extra) as stream:
        for _ in stream:
            pass
        completion = stream.get_final_completion()
    message = completion.choices[0].message
    assert (message.role, message.content) == ("assistant", "Hello")
    assert message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls] == ["get_time", "get_time"]
    assert [call.function.arguments for call in message.tool_calls] == ['{"zone": "CET"}'] * 2
    assert completion.choices[0].finish_reason == "tool_calls"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert (invalid.value.code, invalid.value.param) == ("invalid_value", "temperature")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "fermion"


def test_abandoned_stream_frees_the_engine(live: LiveServer, client: openai.OpenAI) -> None:
    live.engine.token_s = 0.01
    live.engine.say("word " * 300)
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    next(iter(stream))
    stream.close()
    live.engine.token_s = 0.0
    assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1).choices[0].message is not None
    assert live.engine.outcomes[0] == "cancelled"


def test_parallel_conversations_do_not_mix(live: LiveServer) -> None:
    async def ask(client: openai.AsyncOpenAI, text: str) -> tuple[str, str | None]:
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": text}],
            extra_body={"enable_thinking": False},
        )
        return text, completion.choices[0].message.content

    async def ask_all() -> list[tuple[str, str | None]]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, f"question {index * 37}") for index in range(8)))

    answers = asyncio.run(ask_all())
    expected = {f"sum {int(request.prompt.token_ids.sum())}" for request in live.engine.requests}
    assert {answer for _, answer in answers} == expected
    assert len(expected) == 8
