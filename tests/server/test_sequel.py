"""What is remembered of answers, and what is read ahead: that it is the beginning of what the client sends next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from http_client import post
from live_server import MODEL, LiveServer, chat_body
from test_worker import wait_until

from engine.core import CacheEntry, CacheOptions, GenerationRequest, Prompt
from engine.tokenizer import Tokenizer
from server.generation import ChoiceBuilder
from server.job import Job, Reply, Work
from server.prompt import GenerationDefaults, PromptBuilder
from server.recall import ANSWER_START, TURN_END, Recall, scope_of
from server.schema import ChatCompletionRequest
from server.template import ChatTemplate
from server.textstream import Delta
from server.worker import EngineWorker

Turn = dict[str, Any]
QUESTION: Turn = {"role": "user", "content": "What is 1 + 1?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "array"}}}},
}


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def builder(checkpoint: Path, **options: Any) -> PromptBuilder:
    return PromptBuilder(
        Tokenizer.load(checkpoint), ChatTemplate.load(checkpoint), GenerationDefaults.load(checkpoint), **options
    )


@pytest.fixture
def prompts(checkpoint: Path) -> PromptBuilder:
    return builder(checkpoint)


def request(*messages: Turn, **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": MODEL, "messages": list(messages), **fields})


class Talk:
    """One request and an answer to it, as the worker sees them."""

    def __init__(self, checkpoint: Path, prompts: PromptBuilder, *messages: Turn, **fields: Any) -> None:
        choices = ChoiceBuilder(prompts, (checkpoint / "tokenizer.json").read_text())
        self.request = request(*messages, **fields)
        self.work: Work = choices.chat(self.request, "r", 4096, b"tenant")
        assert self.work.sequel is not None
        self.sequel = self.work.sequel

    def answer(self, ids: Sequence[int]) -> Reply:
        """The reply of these tokens; the end of the turn is added."""
        generation, stream = self.work.choices[0]()
        deltas: list[Delta] = [delta for token in ids for delta in stream.feed(token)]
        end = min(generation.stop_token_ids)
        return Reply([*ids, end], [*deltas, *stream.finish(truncated=False)], stream.stop_string)


def calling(thought: str, numbers: str) -> str:
    """An answer that calls the tool."""
    call = f"<function=add>\n<parameter=n>\n{numbers}\n</parameter>\n</function>"
    return f"{thought}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def shared_beginning(ahead: GenerationRequest, following: Prompt) -> bool:
    ids = ahead.prompt.token_ids
    return len(ids) < len(following.token_ids) and np.array_equal(following.token_ids[: len(ids)], ids)


# ---- what is read ahead ----


def test_thinking_is_stripped_ahead_of_the_next_question(checkpoint: Path, prompts: PromptBuilder) -> None:
    talk = Talk(checkpoint, prompts, QUESTION)
    reply = talk.answer(prompts.tokenizer.encode("One and one.\n</think>\n\nTwo.", allow_special=True))
    (ahead,) = talk.sequel.shadows(reply, 4096)
    for question in ("Why?", "  \n Wait", "", "<tool_response> & co", "🦊"):
        sent: Turn = {"role": "assistant", "content": "Two.", "reasoning_content": "One and one."}
        following = prompts.chat(request(QUESTION, sent, {"role": "user", "content": question}), scope=b"tenant")
        assert shared_beginning(ahead, following.prompt), question
    assert ahead.cache.shadow
    assert ahead.cache.scope == b"tenant"
    assert ahead.max_tokens == 0


def test_a_call_is_followed_by_its_result_or_by_a_question(checkpoint: Path, prompts: PromptBuilder) -> None:
    talk = Talk(checkpoint, prompts, QUESTION, tools=[TOOL])
    reply = talk.answer(prompts.tokenizer.encode(calling("Adding.", "[1,  1]"), allow_special=True))
    result, question = talk.sequel.shadows(reply, 4096)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"n": [1, 1]}'}}
    sent: Turn = {"role": "assistant", "content": None, "reasoning_content": "Adding.", "tool_calls": [call]}
    tool: Turn = {"role": "tool", "tool_call_id": "c", "content": "2"}
    following = prompts.chat(request(QUESTION, sent, tool, tools=[TOOL]), scope=b"tenant").prompt
    assert shared_beginning(result, following)
    assert not shared_beginning(question, following)
    later = prompts.chat(request(QUESTION, sent, {"role": "user", "content": "Stop"}, tools=[TOOL]), scope=b"tenant")
    assert shared_beginning(question, later.prompt)


def test_clients_that_leave_thinking_out_are_known_by_their_history(checkpoint: Path, prompts: PromptBuilder) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"n": [1, 1]}'}}
    sent: Turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    tool: Turn = {"role": "tool", "tool_call_id": "c", "content": "2"}
    talk = Talk(checkpoint, prompts, QUESTION, sent, tool, tools=[TOOL])
    reply = talk.answer(prompts.tokenizer.encode(calling("Again.", "[1, 1]"), allow_special=True))
    result, _ = talk.sequel.shadows(reply, 4096)
    following = prompts.chat(request(QUESTION, sent, tool, sent, tool, tools=[TOOL]), scope=b"tenant")
    assert shared_beginning(result, following.prompt)


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": {"write": False}},
        {"cache": {"read": False}},
        {"add_generation_prompt": False},
    ],
)
def test_nothing_is_read_ahead_of_requests_that_ask_for_less(
    checkpoint: Path, prompts: PromptBuilder, fields: dict[str, Any]
) -> None:
    talk = Talk(checkpoint, prompts, QUESTION, **fields)
    assert not talk.sequel.may_be_read
    assert Talk(checkpoint, prompts, QUESTION).sequel.may_be_read


def test_nothing_is_read_ahead_of_thoughts_without_an_answer_nor_beyond_the_context(
    checkpoint: Path, prompts: PromptBuilder
) -> None:
    talk = Talk(checkpoint, prompts, QUESTION)
    assert talk.sequel.shadows(talk.answer(prompts.tokenizer.encode("Hm", allow_special=True)), 4096) == ()
    reply = talk.answer(prompts.tokenizer.encode("A.\n</think>\n\nB.", allow_special=True))
    assert len(talk.sequel.shadows(reply, 4096)) == 1
    assert len(talk.sequel.shadows(reply, 12)) == 0


def test_later_states_of_a_conversation_are_recognised(checkpoint: Path, prompts: PromptBuilder) -> None:
    first = Talk(checkpoint, prompts, QUESTION).sequel
    answer: Turn = {"role": "assistant", "content": "Two."}
    later = Talk(checkpoint, prompts, QUESTION, answer, QUESTION).sequel
    assert later.continues(first)
    assert not first.continues(later)
    assert not Talk(checkpoint, prompts, answer, QUESTION).sequel.continues(first)


# ---- what is remembered ----


def test_an_answer_comes_back_in_the_tokens_it_was_generated_in(checkpoint: Path, prompts: PromptBuilder) -> None:
    """Letter by letter is no encoding of this text; the state belongs to these tokens all the same."""
    talk = Talk(checkpoint, prompts, QUESTION, chat_template_kwargs={"preserve_thinking": True})
    encode = prompts.tokenizer.encode
    letters = [encode(letter, allow_special=False)[0] for letter in "the fox"]
    ids = [*letters, *encode("\n</think>\n\nIt is two.", allow_special=True)]
    reply = talk.answer(ids)
    talk.sequel.remember(reply)
    sent: Turn = {"role": "assistant", "content": "It is two.", "reasoning_content": "the fox"}
    asked = request(QUESTION, sent, QUESTION, chat_template_kwargs={"preserve_thinking": True})
    kept, other = prompts.chat(asked, scope=b"tenant"), prompts.chat(asked, scope=b"another")
    assert kept.text == other.text
    assert kept.prompt.token_ids.tolist() != other.prompt.token_ids.tolist()
    begun = talk.work.choices[0]()[0].prompt.token_ids.tolist()
    assert kept.prompt.token_ids.tolist()[: len(begun) + len(ids)] == [*begun, *ids]
    names = {i: text.encode() for text, i in prompts.tokenizer.added_tokens.items()}
    for chat in (kept, other):
        raw = b"".join(names.get(i) or prompts.tokenizer.token_bytes(i) for i in chat.prompt.token_ids.tolist())
        assert raw.decode() == chat.text
    salted = request(QUESTION, sent, QUESTION, chat_template_kwargs={"preserve_thinking": True}, cache_salt="s")
    assert prompts.chat(salted, scope=b"tenant").prompt.token_ids.tolist() == other.prompt.token_ids.tolist()
    changed = request(
        QUESTION, {**sent, "content": "It is 2."}, QUESTION, chat_template_kwargs={"preserve_thinking": True}
    )
    assert np.array_equal(
        prompts.chat(changed, scope=b"tenant").prompt.token_ids,
        prompts.chat(changed, scope=b"another").prompt.token_ids,
    )


def test_answers_that_encoding_gives_take_no_memory(checkpoint: Path, prompts: PromptBuilder) -> None:
    talk = Talk(checkpoint, prompts, QUESTION)
    talk.sequel.remember(talk.answer(prompts.tokenizer.encode("A.\n</think>\n\nB.", allow_special=True)))
    assert prompts._recall.nbytes == 0


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    recall = Recall(capacity_bytes=4000)

    def turn(number: int) -> str:
        return f"{ANSWER_START}answer {number}{TURN_END}"

    for number in range(50):
        recall.keep_ids(b"a", turn(number), range(number, number + 20))
        assert recall.nbytes <= 4000
    recall.keep_ids(b"a", turn(49), range(49, 69))
    assert recall.encode(b"a", turn(49), lambda text: [-1]) == list(range(49, 69))
    assert recall.encode(b"a", turn(0), lambda text: [-1]) == [-1]
    assert recall.encode(b"b", turn(49), lambda text: [-1]) == [-1]
    recall.keep_ids(b"a", turn(50), range(4000))
    assert recall.nbytes == 0


def test_a_tenant_is_forgotten_with_all_its_salts_and_nobody_else() -> None:
    recall = Recall()
    turn = f"{ANSWER_START}yes{TURN_END}"
    scopes = [scope_of(tenant, salt) for tenant in (b"a", b"b") for salt in (b"", b"s")]
    for scope in scopes:
        recall.keep_ids(scope, turn, [1, 2])
    recall.keep_thinking(
        scopes[0], [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "reasoning_content": "x"}]
    )
    recall.forget(b"a")
    known = [recall.encode(scope, turn, lambda text: [0]) for scope in scopes]
    assert known == [[0], [0], [1, 2], [1, 2]]
    recall.forget(b"b")
    assert recall.nbytes == 0


def test_text_around_known_answers_is_encoded_in_pieces() -> None:
    recall = Recall()
    known = f"{ANSWER_START}yes{TURN_END}"
    recall.keep_ids(b"", known, [1, 2, 3])
    pieces: list[str] = []

    def encode(text: str) -> list[int]:
        pieces.append(text)
        return [0]

    unknown = f"{ANSWER_START}no{TURN_END}"
    text = f"start{known}\n{unknown}\n{known}\n<|im_start|>assistant\n<think>"
    assert recall.encode(b"", text, encode) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert pieces == ["start", f"\n{unknown}\n", "\n<|im_start|>assistant\n<think>"]


def test_thinking_comes_back_where_it_was_and_only_if_it_is_wanted(checkpoint: Path) -> None:
    preserving = builder(checkpoint, preserve_thinking=True)
    talk = Talk(checkpoint, preserving, QUESTION)
    talk.sequel.remember(talk.answer(preserving.tokenizer.encode("Easy.\n</think>\n\nTwo.", allow_special=True)))
    bare: Turn = {"role": "assistant", "content": "Two."}

    def text(*messages: Turn, **fields: Any) -> str:
        return preserving.chat(request(*messages, **fields), scope=b"tenant").text

    assert "Easy." in text(QUESTION, bare, QUESTION)
    assert "Easy." not in text({"role": "user", "content": "Else?"}, bare, QUESTION)
    assert "Easy." not in text(QUESTION, {**bare, "content": "Three."}, QUESTION)
    assert "Easy." not in text(QUESTION, bare, QUESTION, chat_template_kwargs={"preserve_thinking": False})
    assert "Easy." not in preserving.chat(request(QUESTION, bare, QUESTION), scope=b"another").text
    own: Turn = {**bare, "reasoning_content": "Mine."}
    assert "Mine." in text(QUESTION, own, QUESTION)
    assert "Easy." not in text(QUESTION, own, QUESTION)
    plain = builder(checkpoint)
    assert "Easy." not in plain.chat(request(QUESTION, own, QUESTION), scope=b"tenant").text


# ---- when it is read ----


class Shelf:
    """A prefix cache that covers what it is told to."""

    def __init__(self) -> None:
        self.known = 0

    def covered(self, prompt: Prompt, options: CacheOptions) -> int:
        return self.known

    def entries(self, scope: bytes | None, limit: int) -> Sequence[CacheEntry]:
        return ()

    def pin(self, entry_id: str, pinned: bool, scope: bytes | None) -> bool:
        return False

    def clear(self, scope: bytes | None) -> int:
        return 0

    def counters(self) -> Mapping[str, int | float | Mapping[str, int]]:
        return {}

    def gauges(self) -> Mapping[str, int | float | str | None]:
        return {}


@pytest.fixture
def shelved(live: LiveServer) -> Any:
    """The shared server with a cache that holds nothing."""
    live.engine.cache = Shelf()
    live.engine.say("Thinking.\n</think>\n\nA long enough answer to make reading it again cost something at all.")
    yield live
    live.engine.cache = None


def shadows(engine: FakeEngine) -> list[str]:
    return [outcome for asked, outcome in zip(engine.requests, engine.outcomes, strict=False) if asked.cache.shadow]


def test_the_next_prompt_is_read_when_the_answer_is_out(shelved: LiveServer) -> None:
    post(shelved, chat_body())
    wait_until(lambda: shadows(shelved.engine) == ["finished"])
    assert shelved.worker.ahead == 0


def test_what_is_covered_is_not_read_again(shelved: LiveServer) -> None:
    assert isinstance(shelved.engine.cache, Shelf)
    shelved.engine.cache.known = 1 << 20
    post(shelved, chat_body())
    wait_until(lambda: shelved.worker.ahead == 0)
    assert shadows(shelved.engine) == []


def test_a_request_stops_the_reading_at_once_and_it_goes_on_afterwards(shelved: LiveServer) -> None:
    engine = shelved.engine
    post(shelved, chat_body())
    wait_until(lambda: shadows(engine) == ["finished"])
    engine.layers, engine.layer_s = 200, 0.01
    post(shelved, chat_body("Another conversation", max_tokens=30))
    wait_until(lambda: engine.requests[-1].cache.shadow)
    post(shelved, chat_body("A third one"))
    engine.layers, engine.layer_s = 2, 0.0  # not before: it would end the reading that is to be stopped
    wait_until(lambda: shelved.worker.ahead == 0)
    # The request came between the beginning of the reading and its end.
    assert [(asked.cache.shadow, outcome) for asked, outcome in zip(engine.requests, engine.outcomes, strict=True)][
        3:5
    ] == [(True, "cancelled"), (False, "finished")]
    assert shadows(engine).count("finished") == 3


def test_what_is_deleted_is_not_read_ahead_any_more(shelved: LiveServer) -> None:
    engine = shelved.engine
    engine.layers, engine.layer_s = 150, 0.01
    engine.say("Thinking.\n</think>\n\nAn answer that is long enough to be worth some reading ahead of the next one.")
    asked = threading.Thread(target=post, args=(shelved, chat_body()))
    asked.start()
    wait_until(lambda: bool(engine.requests) and engine.requests[-1].cache.shadow, seconds=20)
    asked.join()
    shelved.worker.forget_ahead(b"somebody else")
    assert shelved.worker.ahead == 1
    shelved.worker.forget_ahead(b"")
    # Not a moment later: what is deleted next must be all there is.
    assert (shelved.worker.ahead, shadows(engine)) == (0, ["cancelled"])


def test_a_server_that_is_told_not_to_does_not_read_ahead(checkpoint: Path) -> None:
    engine = FakeEngine(Tokenizer.load(checkpoint))
    engine.cache = Shelf()
    engine.say("Thinking.\n</think>\n\nAn answer that is long enough to be worth some reading ahead of the next one.")
    worker = EngineWorker(lambda: engine, max_queued=8, shadow=False)
    talk = Talk(checkpoint, builder(checkpoint), QUESTION)

    async def run() -> None:
        worker.start()
        while not worker.is_ready:
            await asyncio.sleep(0.01)
        job = Job("1", talk.work)
        worker.submit(job)
        while not job.is_over:
            await asyncio.sleep(0.01)

    try:
        asyncio.run(run())
        assert worker.ahead == 0
    finally:
        worker.close()
    assert shadows(engine) == []


def test_a_failure_of_reading_ahead_is_no_failure_of_the_server(
    shelved: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = shelved.engine
    answer = engine.reply

    def then_break_down(request: GenerationRequest) -> Sequence[int]:
        engine.error = RuntimeError("broken")
        return answer(request)

    engine.reply = then_break_down
    post(shelved, chat_body())
    wait_until(lambda: "Reading ahead failed" in caplog.text)
    engine.error, engine.reply = None, answer
    assert post(shelved, chat_body("And now?")).status == 200
    wait_until(lambda: shelved.worker.ahead == 0)
