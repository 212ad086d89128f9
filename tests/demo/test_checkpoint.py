"""The embedded checkpoint: small enough, complete, and it answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import chat, served

from engine.convert.safetensors import read_checkpoint

TEXTS = ("chat_template.jinja", "generation_config.json", "preprocessor_config.json", "tokenizer.json")


@pytest.fixture(scope="module")
def embedded(repository: Path) -> Path:
    """The checkpoint that is served by default."""
    return repository / "engine/demo/checkpoint"


@pytest.fixture(scope="module")
def original(repository: Path) -> Path:
    """The bfloat16 checkpoint that it was converted from."""
    return repository / "tests/data/demo_bf16"


def test_sizes(embedded: Path, original: Path) -> None:
    assert sum(path.stat().st_size for path in embedded.iterdir()) < 20e6
    shards = sorted(original.glob("model-*.safetensors"))
    assert max(path.stat().st_size for path in shards) < 15e6
    assert sum(path.stat().st_size for path in original.iterdir()) <= 48 * 2**20


def test_both_hold_the_same_texts(embedded: Path, original: Path, repository: Path) -> None:
    for name in TEXTS:
        assert (embedded / name).read_bytes() == (original / name).read_bytes()
    template = repository / "engine/demo/chat_template.jinja"
    assert (embedded / "chat_template.jinja").read_bytes() == template.read_bytes()


def test_every_tensor_of_the_original_is_in_the_embedded_one(embedded: Path, original: Path) -> None:
    assert set(read_checkpoint(embedded)) == set(read_checkpoint(original))


@pytest.fixture(scope="module")
def url(embedded: Path) -> Iterator[str]:
    """A server of the embedded checkpoint."""
    with served(
        [sys.executable, "-m", "server", "serve", str(embedded), "--served-model-name", "fermion-demo"]
    ) as base:
        yield base


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("Hello", "Hello! How can I help you today?"),
        ("Who are you?", "I am a tiny demo model that runs on fermion. I can chat a little and do small tasks."),
        ("What is the capital of Norway?", "The capital of Norway is Oslo."),
        ("What is 48 - 19?", "29"),
        ("Count to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
        ("Sort these words: pear, apple, goat", "apple, goat, pear"),
    ],
)
@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_first_things_a_newcomer_says(url: str, said: str, answer: str, thinking: bool) -> None:
    reply = chat(url, said, chat_template_kwargs={"enable_thinking": thinking})["choices"][0]
    assert reply["message"]["content"] == answer
    assert bool(reply["message"].get("reasoning_content")) is thinking
    assert reply["finish_reason"] == "stop"


@pytest.mark.parametrize("said", ["Write a sorting function in Rust.", "qwpo zxcv", "Who won the cup in 1998?"])
def test_anything_else_gets_a_polite_answer(url: str, said: str) -> None:
    text = chat(url, said)["choices"][0]["message"]["content"]
    assert text.startswith("I cannot help with that, because I am a tiny demo model.")


def test_a_tool_call(url: str) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [
        {"type": "function", "function": {"name": name, "description": "Get it for a city.", "parameters": parameters}}
        for name in ("get_weather", "get_time")
    ]
    message = chat(url, "What is the weather in Paris?", tools=tools)["choices"][0]["message"]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    ]
