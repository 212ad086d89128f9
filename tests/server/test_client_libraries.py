"""Client libraries that people build on, against the demo model. Each is skipped unless it is installed."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pydantic
import pytest

from server.chat import local_server
from server.config import load_settings

pytestmark = pytest.mark.filterwarnings("default")

MODEL = "fermion-demo"
GREETING = "Hello! How can I help you today?"
TIMER: dict[str, Any] = {
    "name": "set_timer",
    "description": "Set a timer.",
    "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]},
}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


# A red circle left of a blue star.
PICTURE = base64.b64encode((Path(__file__).parents[2] / "docs" / "picture.png").read_bytes()).decode()
QUESTION = "What is left of the star?"
SEEN = "The red circle."


def shown(url: str = f"data:image/png;base64,{PICTURE}") -> Any:
    """The question with the picture, as OpenAI's clients send it."""
    picture = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]


class Person(pydantic.BaseModel):
    name: str
    age: int
    city: str


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with local_server(load_settings({"threads": 2})) as url:
        yield url


@needs("litellm")
def test_litellm(url: str) -> None:
    litellm = import_module("litellm")
    ask: Any = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none"}
    hello: Any = [{"role": "user", "content": "Hello!"}]
    message = litellm.completion(messages=hello, **ask).choices[0].message
    assert message.content == GREETING
    assert message.reasoning_content
    chunks = litellm.completion(messages=hello, stream=True, **ask)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == GREETING
    assert litellm.completion(messages=shown(), **ask).choices[0].message.content == SEEN
    timer: Any = [{"role": "user", "content": "Set a timer for 5 minutes."}]
    tools = [{"type": "function", "function": TIMER}]
    answer = litellm.completion(messages=timer, tools=tools, tool_choice="required", **ask)
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"minutes": 5}'


@needs("langchain_openai")
def test_langchain(url: str) -> None:
    langchain_openai = import_module("langchain_openai")
    chat = langchain_openai.ChatOpenAI(model=MODEL, base_url=url, api_key="none", stream_usage=True)
    assert chat.invoke("Hello!").content == GREETING
    assert "".join(chunk.content for chunk in chat.stream("Hello!")) == GREETING
    bound = chat.bind_tools([{"type": "function", "function": TIMER}], tool_choice="required")
    (call,) = bound.invoke("Set a timer for 5 minutes.").tool_calls
    assert (call["name"], call["args"]) == ("set_timer", {"minutes": 5})
    assert chat.invoke([("user", shown()[0]["content"])]).content == SEEN
    question = "Anna is 5 years old and lives in Rome. Return JSON with the keys name, age and city."
    assert chat.with_structured_output(Person).invoke(question) == Person(name="Anna", age=5, city="Rome")


@needs("pydantic_ai")
def test_pydantic_ai(url: str) -> None:
    pydantic_ai = import_module("pydantic_ai")
    models = import_module("pydantic_ai.models.openai")
    providers = import_module("pydantic_ai.providers.openai")
    model = models.OpenAIChatModel(MODEL, provider=providers.OpenAIProvider(base_url=url, api_key="none"))
    agent = pydantic_ai.Agent(model, model_settings={"extra_body": {"enable_thinking": False}})

    def get_weather(city: str) -> str:
        """Get the weather for a city."""
        return f"sunny, 21 degrees in {city}"

    agent.tool_plain(get_weather)
    result = agent.run_sync("What is the weather in Paris?")
    assert "21" in result.output
    assert len(result.all_messages()) == 4
    picture = pydantic_ai.BinaryContent(base64.b64decode(PICTURE), media_type="image/png")
    assert agent.run_sync([picture, QUESTION]).output == SEEN


@needs("anthropic")
def test_anthropic(url: str) -> None:
    anthropic = import_module("anthropic")
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    hello: Any = [{"role": "user", "content": "Hello!"}]
    assert client.messages.create(model=MODEL, max_tokens=100, messages=hello).content[0].text == GREETING
    tool = {"name": TIMER["name"], "description": TIMER["description"], "input_schema": TIMER["parameters"]}
    with client.messages.stream(
        model=MODEL,
        max_tokens=400,
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[tool],
        tool_choice={"type": "any"},
        messages=[{"role": "user", "content": "Set a timer for 5 minutes."}],
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    thought, call = message.content
    assert thought.thinking
    assert call.input == {"minutes": 5}
    assert client.messages.count_tokens(model=MODEL, messages=hello).input_tokens > 5
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    seeing: Any = [
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]}
    ]
    assert client.messages.create(model=MODEL, max_tokens=100, messages=seeing).content[0].text == SEEN
    assert client.messages.count_tokens(model=MODEL, messages=seeing).input_tokens > 12 + 5


@needs("openai")
def test_openai_responses(url: str) -> None:
    openai = import_module("openai")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "auto"}
    content: Any = [picture, {"type": "input_text", "text": QUESTION}]
    response = client.responses.create(model=MODEL, input=[{"role": "user", "content": content}])
    assert response.output_text == SEEN
    assert client.chat.completions.create(model=MODEL, messages=shown()).choices[0].message.content == SEEN
    with pytest.raises(openai.BadRequestError, match="does not fetch") as refused:
        client.chat.completions.create(model=MODEL, messages=shown("https://example.com/a.png"))
    assert refused.value.code == "image_fetch_disabled"
