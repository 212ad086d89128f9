"""Events of a job to the objects of the chat completions API, streamed and whole.

Official clients concatenate every string that they see twice, so role, call ids and names are sent exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.core import CacheReport, Progress, TokenLogprobs
from server import sse
from server.errors import to_api_error
from server.job import ChoiceFinished, Deltas, Failed, Finished, JobEvent, Restarted, Started
from server.logprobs import TokenNames
from server.textstream import Delta, TextDelta
from server.toolcalls import ToolCallDelta


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all objects of one answer share. created: Unix seconds."""

    completion_id: str
    created: int
    model: str
    choices: int


@dataclass(slots=True)
class UsageCount:
    """Token counts of one answer. The prompt counts once, however many choices are generated from it."""

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cache: CacheReport | None = None

    def add(self, finished: ChoiceFinished) -> None:
        self.completion_tokens += finished.completion_tokens
        self.reasoning_tokens += finished.reasoning_tokens
        if finished.index == 0:
            self.cached_tokens = finished.cached_tokens
            self.cache = finished.cache

    def reset(self) -> None:
        """Forget what was generated."""
        self.completion_tokens = self.reasoning_tokens = self.cached_tokens = 0
        self.cache = None

    def extension(self) -> dict[str, Any]:
        """Our own part of an answer: `fermion.cache` says what the prefix cache did, and why it did not do more."""
        report = self.cache
        if report is None:
            return {}
        cache = {
            "hit_position": report.position,
            "matched": report.matched,
            "recomputed": report.recomputed,
            "carried": report.carried,
            "tier": report.tier,
            "load_ms": round(report.load_s * 1000, 3),
            "provenance": report.provenance,
            "miss_reason": report.miss_reason,
        }
        return {"fermion": {"cache": cache}}

    def wire(self) -> dict[str, Any]:
        """The `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class ChatStream:
    """Events of one job to the bytes of its event stream."""

    def __init__(
        self,
        head: AnswerHead,
        usage: UsageCount,
        *,
        include_usage: bool,
        return_progress: bool,
        tokens: TokenNames,
    ) -> None:
        self._head = head
        self._usage = usage
        self._tokens = tokens
        self._include_usage = include_usage
        self._return_progress = return_progress

    def write(self, event: JobEvent) -> bytes:
        """The bytes that `event` adds to the stream, possibly none."""
        match event:
            case Started():
                # Clients learn at once that the request has left the queue.
                role = {"role": "assistant", "content": ""}
                return b"".join(self._choice(index, role) for index in range(self._head.choices))
            case Progress():
                return self._progress(event) if self._return_progress else b""
            case Deltas():
                return self._deltas(event)
            case ChoiceFinished():
                self._usage.add(event)
                return self._choice(event.index, {}, event.reason)
            case Finished():
                usage = b""
                if self._include_usage:
                    usage = self._event([], usage=self._usage.wire(), **self._usage.extension())
                return usage + sse.DONE
            case Restarted():
                raise AssertionError("a stream cannot start anew")
            case Failed():
                return sse.error_event(to_api_error(event.error))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = self._head
        return sse.event(
            {
                "id": head.completion_id,
                "object": "chat.completion.chunk",
                "created": head.created,
                "model": head.model,
                "choices": choices,
                **more,
            }
        )

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        return self._event([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _deltas(self, event: Deltas) -> bytes:
        if not event.logprobs:
            return b"".join(self._choice(event.index, _delta(delta)) for delta in event.deltas)
        # Tokens and pieces of text do not match one to one; all that came since the last piece go with the first.
        first, *rest = [_delta(delta) for delta in event.deltas] or [{"content": ""}]
        logprobs = self._tokens.chat_logprobs(event.logprobs)
        head = self._choice(event.index, first, logprobs=logprobs)
        return head + b"".join(self._choice(event.index, delta) for delta in rest)

    def _progress(self, progress: Progress) -> bytes:
        return self._event(
            [],
            prompt_progress={
                "total": progress.total,
                "cache": progress.cached,
                "processed": progress.processed,
                "time_ms": round(progress.elapsed_s * 1000),
            },
        )


def _delta(delta: TextDelta | ToolCallDelta) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        return {"content" if delta.channel == "content" else "reasoning_content": delta.text}
    if delta.call_id is None:
        call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.arguments}}
    else:
        function = {"name": delta.name, "arguments": delta.arguments}
        call = {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}
    return {"tool_calls": [call]}


@dataclass(slots=True)
class _Call:
    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class _Choice:
    content: str = ""
    reasoning: str = ""
    calls: list[_Call] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    reason: str | None = None


class ChatAnswer:
    """Collects the events of one job into one `chat.completion` object."""

    def __init__(self, head: AnswerHead, usage: UsageCount, tokens: TokenNames) -> None:
        self._head = head
        self._usage = usage
        self._tokens = tokens
        self._choices = [_Choice() for _ in range(head.choices)]

    def add(self, event: JobEvent) -> None:
        """Take in one event."""
        if isinstance(event, Restarted):
            self._choices = [_Choice() for _ in range(self._head.choices)]
            self._usage.reset()
        elif isinstance(event, ChoiceFinished):
            self._usage.add(event)
            self._choices[event.index].reason = event.reason
        elif isinstance(event, Deltas):
            self._choices[event.index].logprobs.extend(event.logprobs)
            for delta in event.deltas:
                _append(self._choices[event.index], delta)

    def wire(self) -> dict[str, Any]:
        """The response body."""
        return {
            "id": self._head.completion_id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [
                {
                    "index": index,
                    "message": _message(choice),
                    "logprobs": self._tokens.chat_logprobs(choice.logprobs) if choice.logprobs else None,
                    "finish_reason": choice.reason,
                }
                for index, choice in enumerate(self._choices)
            ],
            "usage": self._usage.wire(),
            **self._usage.extension(),
        }


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The assistant's message that `deltas` tell."""
    choice = _Choice()
    for delta in deltas:
        _append(choice, delta)
    return _message(choice)


def _append(choice: _Choice, delta: TextDelta | ToolCallDelta) -> None:
    if isinstance(delta, ToolCallDelta):
        if delta.call_id is not None:
            choice.calls.append(_Call(delta.call_id, delta.name or "", delta.arguments))
        else:
            choice.calls[delta.index].arguments += delta.arguments
    elif delta.channel == "content":
        choice.content += delta.text
    else:
        choice.reasoning += delta.text


def _message(choice: _Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message
