"""The demo model's chat template: the family's exact syntax, rendered as the server renders it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.demo.recipe.data import TEMPLATE_PATH
from engine.errors import RequestError
from server.template import ChatTemplate

QUESTION = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"text": "Tor é", "limit": 3, "deep": True}}}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    """The shipped template."""
    return ChatTemplate(TEMPLATE_PATH.read_text("utf-8"))


def rendered(template: ChatTemplate, messages: list[dict[str, Any]], **values: Any) -> str:
    return template.render(messages, add_generation_prompt=True, **values)


def test_thinking_is_open_by_default_and_closed_when_off(template: ChatTemplate) -> None:
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert rendered(template, [QUESTION]) == start
    assert rendered(template, [QUESTION], enable_thinking=True) == start
    assert rendered(template, [QUESTION], enable_thinking=False) == start + "\n</think>\n\n"


def test_no_system_turn_of_its_own_and_contents_are_trimmed(template: ChatTemplate) -> None:
    text = template.render([{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "\nHi \n"}])
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_tools_come_one_json_object_a_line_before_the_system_text(template: ChatTemplate) -> None:
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {}}}, {"type": "function"}]
    text = rendered(template, [{"role": "system", "content": "Be kind."}, QUESTION], tools=tools)
    head, rest = text.split("\n</tools>\n\n")
    assert head == (
        "<|im_start|>system\n# Tools\n\nThese functions can be called:\n\n<tools>\n"
        '{"type": "function", "function": {"name": "größe", "parameters": {}}}\n{"type": "function"}'
    )
    assert rest.split("<|im_end|>")[0].endswith("\n\nBe kind.")
    assert "<tool_call>\n<function=function_name>\n<parameter=parameter_name>\nvalue\n</parameter>\n" in rest


def test_calls_and_their_results(template: ChatTemplate) -> None:
    other = {"type": "function", "function": {"name": "now", "arguments": {}}}
    turn = {"role": "assistant", "content": "Wait.", "reasoning_content": "Two calls.", "tool_calls": [CALL, other]}
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    assert template.render([QUESTION, turn, *results]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nTwo calls.\n</think>\n\nWait.\n\n"
        "<tool_call>\n<function=find>\n<parameter=text>\nTor é\n</parameter>\n<parameter=limit>\n3\n</parameter>\n"
        "<parameter=deep>\ntrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )


def test_thoughts_before_the_last_question_are_dropped_unless_preserved(template: ChatTemplate) -> None:
    turns = [QUESTION, {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}, QUESTION]
    assert "<|im_start|>assistant\nYes<|im_end|>" in template.render(turns)
    assert "<think>\nHm\n</think>\n\nYes<|im_end|>" in template.render(turns, preserve_thinking=True)


def test_thoughts_after_the_last_question_stay_though_tool_results_are_user_turns(template: ChatTemplate) -> None:
    wrapped = {"role": "user", "content": "<tool_response>\n1\n</tool_response>"}
    for result in ({"role": "tool", "content": "1"}, wrapped):
        turn = {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [CALL]}
        assert "<think>\nHm\n</think>\n\n<tool_call>" in template.render([QUESTION, turn, result])


def test_thoughts_inside_the_content_count_too(template: ChatTemplate) -> None:
    turns = [QUESTION, {"role": "assistant", "content": "<think>\nHm\n</think>\n\nYes"}, QUESTION]
    assert "<|im_start|>assistant\nYes<|im_end|>" in template.render(turns)


def test_pictures_in_content_order(template: ChatTemplate) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    turns = [{"role": "user", "content": content}]
    assert f"user\n{picture}a{picture}<|im_end|>" in template.render(turns)
    assert f"user\nPicture 1: {picture}aPicture 2: {picture}<" in template.render(turns, add_vision_id=True)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "no messages"),
        ([{"role": "system", "content": "Be kind."}], "no user message"),
        ([QUESTION, {"role": "system", "content": "Be kind."}], "must be the first"),
        ([{"role": "system", "content": [{"type": "image"}]}, QUESTION], "cannot hold images"),
        ([QUESTION, {"role": "judge", "content": "x"}], "unknown message role"),
        ([{"role": "user", "content": [{"type": "video"}]}], "unknown kind"),
        ([{"role": "user", "content": {"text": "x"}}], "text or a list"),
        ([QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}], "object"),
    ],
)
def test_refusals(template: ChatTemplate, messages: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        template.render(messages)
