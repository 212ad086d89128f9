"""Chat completions over HTTP with the official Python client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from live_server import MODEL, LiveServer


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=20)


def test_whole_answer(live: LiveServer, client: openai.OpenAI) -> None:
    live.engine.say("thinking it over\n</think>\n\nHello there")
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "Hello there")
    assert message.model_extra == {"reasoning_content": "thinking it over"}
    assert answer.choices[0].finish_reason == "stop"


def test_stream(live: LiveServer, client: openai.OpenAI) -> None:
    live.engine.say("hm\n</think>\n\nHello there")
    chunks: list[Any] = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there"
    assert chunks[-1].usage.completion_tokens > 3
