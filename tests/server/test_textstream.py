"""Tokens to text: every way of cutting the same text into tokens gives the same result."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.textstream import StopMatcher, TextDelta, TextStream
from server.toolcalls import ToolCallDelta, ToolCallParser

THINK_END = (1000, 1001)
TOOL_START = (2000,)
MARKERS = {1000: b"</thi", 1001: b"nk>", 2000: b"<tool_call>", 3000: b""}


def token_bytes(token_id: int) -> bytes:
    """Ids under 256 are bytes."""
    return MARKERS[token_id] if token_id in MARKERS else bytes([token_id])


def run(ids: Sequence[int], *, truncated: bool = False, **settings: object) -> dict[str, str]:
    """Text per channel; calls as `name(arguments)` under `calls`."""
    stream = TextStream(
        token_bytes, **{"think_end": THINK_END, "in_reasoning": False, "tool_start": TOOL_START, **settings}
    )
    result = {"reasoning": "", "content": "", "calls": ""}
    deltas = [delta for token in ids if not stream.stopped for delta in stream.feed(token)]
    for delta in [*deltas, *stream.finish(truncated=truncated)]:
        if isinstance(delta, TextDelta):
            assert delta.text
            result[delta.channel] += delta.text
        else:
            assert isinstance(delta, ToolCallDelta)
            result["calls"] += f"{delta.name or ''}{delta.arguments}"
    return result


def text_ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["own fox"], "The quick brown fox jumps", "The quick br"),
        (["fox"], "no match here", "no match here"),
        (["\n\n"], "one\n", "one\n"),
        (["aab"], "aaab", "a"),
        (["abc", "b"], "xabc", "xa"),
        (["cd", "abcd"], "xabcd", "x"),
        (["end"], "end", ""),
        (["🦊"], "a🦊b", "a"),
    ],
)
def test_stop_strings_do_not_depend_on_cuts(stops: list[str], text: str, expected: str) -> None:
    for size in range(1, len(text) + 1):
        matcher = StopMatcher(stops)
        shown = "".join(matcher.feed(text[start : start + size]) for start in range(0, len(text), size))
        assert shown + matcher.finish() == expected, size


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_matcher_equals_plain_search(text: str, stops: list[str]) -> None:
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:
        expected = text[: ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
    matcher = StopMatcher(stops)
    assert "".join(map(matcher.feed, text)) + matcher.finish() == expected
    assert matcher.matched == bool(ends)


def test_holds_back_only_what_may_match() -> None:
    matcher = StopMatcher(["stop!"])
    assert matcher.feed("a sto") == "a "
    assert matcher.feed("ry") == "story"


def test_utf8_is_never_split() -> None:
    stream = TextStream(token_bytes, think_end=THINK_END, in_reasoning=False)
    pieces = [[delta.text for delta in stream.feed(byte) if isinstance(delta, TextDelta)] for byte in "é👩".encode()]
    assert pieces == [[], ["é"], [], [], [], ["👩"]]


def test_cut_character_is_dropped() -> None:
    assert run(text_ids("ok 👩")[:-1], truncated=True)["content"] == "ok "


def test_invalid_bytes_never_show_as_replacement_characters() -> None:
    assert run([0x61, 0xFF, 0x80, 0x62])["content"] == "ab"


def test_reasoning_ends_at_the_token_sequence_once() -> None:
    ids = [*text_ids("why\n"), *THINK_END, *text_ids("\n\nbecause "), *THINK_END, *text_ids(" yes")]
    assert run(ids, in_reasoning=True) == {"reasoning": "why", "content": "because </think> yes", "calls": ""}


def test_literal_tag_in_reasoning_is_text() -> None:
    ids = [*text_ids("the </think> tag"), *THINK_END, *text_ids("A")]
    assert run(ids, in_reasoning=True) == {"reasoning": "the </think> tag", "content": "A", "calls": ""}


def test_beginning_of_the_marker_is_released_when_it_goes_on_differently() -> None:
    assert run([*text_ids("a"), 1000, *text_ids("b"), *THINK_END], in_reasoning=True)["reasoning"] == "a</thib"


def test_reasoning_cut_off() -> None:
    stream = TextStream(token_bytes, think_end=THINK_END, in_reasoning=True)
    for byte in b"still \n":
        stream.feed(byte)
    assert stream.reasoning_tokens == 7
    assert stream.finish(truncated=True) == [TextDelta("reasoning", " \n")]
    assert stream.in_reasoning


def test_stop_strings_sleep_in_reasoning() -> None:
    ids = [*text_ids("STOP it"), *THINK_END, *text_ids("go STOP on")]
    result = run(ids, in_reasoning=True, stops=["STOP"])
    assert (result["reasoning"], result["content"]) == ("STOP it", "go ")


CALL = "\n<function=f>\n<parameter=x>\n1 STOP\n</parameter>\n</function>\n</tool_call>"


def test_call_inside_unclosed_reasoning_is_reported() -> None:
    ids = [*text_ids("I should call\n"), *TOOL_START, *text_ids(CALL)]
    result = run(ids, in_reasoning=True, tools=ToolCallParser({"f": None}))
    assert result == {"reasoning": "I should call", "content": "", "calls": 'f{"x": "1 STOP"}'}


def test_stop_strings_sleep_in_calls() -> None:
    ids = [*text_ids("ok S\n\n"), *TOOL_START, *text_ids(CALL), *text_ids(" then STOP"), *text_ids("x")]
    result = run(ids, tools=ToolCallParser({"f": None}), stops=["STOP"])
    assert result == {"reasoning": "", "content": "ok Sthen ", "calls": 'f{"x": "1 STOP"}'}


def test_single_call_stops_the_stream() -> None:
    ids = [*TOOL_START, *text_ids(CALL), *TOOL_START, *text_ids(CALL)]
    assert run(ids, tools=ToolCallParser({"f": None}, parallel=False))["calls"] == 'f{"x": "1 STOP"}'
