"""POST /v1/messages and /v1/messages/count_tokens: the Anthropic shape, as coding agents use it.

A translation only: requests become chat requests, events become Anthropic's content blocks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.types import Receive, Scope, Send

from engine.core import SAMPLING_RANGES, Progress
from server import answering, sse
from server.chatwire import UsageCount
from server.errors import ApiError, invalid, to_api_error, unsupported
from server.job import ChoiceFinished, Deltas, Failed, Finished, JobEvent, Restarted, Started
from server.routes import Service
from server.schema import (
    CachingRequest,
    ChatCompletionRequest,
    ImagePart,
    WireModel,
    cache_fields,
    parse_request,
    unknown_fields,
)
from server.textstream import TextDelta
from server.toolcalls import ToolCallDelta
from server.transport import read_body, record_of, send_json

# Clients hand thinking blocks back with their signature; there is nothing here to sign.
_SIGNATURE = "unsigned"


class TextBlock(WireModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(WireModel):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(WireModel):
    type: Literal["redacted_thinking"]


class Base64Source(WireModel):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(WireModel):
    type: Literal["url"]
    url: str


class FileSource(WireModel):
    type: Literal["file"]


class ImageBlock(WireModel):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]


class DocumentBlock(WireModel):
    type: Literal["document"]


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResultBlock(WireModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ImageBlock | DocumentBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Turn(WireModel):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class ToolDefinition(WireModel):
    """Only the caller's own functions; `type` of anything else names a tool that runs at Anthropic."""

    type: str | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=0)


class OutputFormat(WireModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireModel):
    """effort: how much to think where `thinking` is adaptive."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(WireModel):
    """What decides on the prompt."""

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountTokensRequest, CachingRequest):
    max_tokens: int = Field(ge=0)
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(default=None, ge=0.0, le=1.0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=0, le=int(SAMPLING_RANGES["top_k"][1]))
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    output_config: OutputConfig | None = None
    # The name that `output_config.format` had before.
    output_format: OutputFormat | None = None
    # Known and refused unless empty: they run elsewhere.
    mcp_servers: list[Any] | None = None
    container: Any = None


class Messages:
    """POST /v1/messages."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        record = record_of(scope)
        body = await read_body(scope, receive, service.max_body_bytes)

        def prepare() -> tuple[MessagesRequest, ChatCompletionRequest]:
            request = parse_request(MessagesRequest, body)
            service.check_model(request.model)
            service.unknown.note(unknown_fields(request))
            service.worker.check_admission()
            return request, to_chat_request(request)

        request, chat = await asyncio.to_thread(prepare)
        try:
            work = await service.chat_work(chat, scope)
        except ApiError as error:
            if error.param != "response_format":
                raise
            name = "output_format" if request.output_format is not None else "output_config.format"
            message = error.message.replace("'response_format'", f"'{name}'")
            raise ApiError(error.status, message, code=error.code, param=name) from error
        job = await service.job(scope, work, body)
        usage = UsageCount(work.prompt_tokens)
        message_id = f"msg_{record.request_id}"
        if request.stream:
            stream = MessageStream(message_id, service.model, usage)
            await answering.stream(service.worker, job, stream, record, receive, send, service.keep_alive_s)
        else:
            answer = MessageAnswer(message_id, service.model, usage)
            await answering.whole(service.worker, job, answer, record, receive, send, service.keep_alive_s)


class CountTokens:
    """POST /v1/messages/count_tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = await read_body(scope, receive, service.max_body_bytes)

        def prepare() -> ChatCompletionRequest:
            request = parse_request(CountTokensRequest, body)
            service.check_model(request.model)
            return to_chat_request(request)

        prompt = await service.chat_prompt(await asyncio.to_thread(prepare), scope)
        await send_json(send, {"input_tokens": len(prompt.prompt.token_ids)})


def to_chat_request(request: CountTokensRequest) -> ChatCompletionRequest:
    """The same request in the shape of the chat API."""
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": [*_system(request.system), *_turns(request.messages)],
        "tools": _tools(request.tools),
        **_tool_choice(request.tool_choice),
        **_thinking(request.thinking),
    }
    if request.messages and request.messages[-1].role == "assistant":
        # This API continues a final assistant turn.
        fields["continue_final_message"] = True
    if isinstance(request, MessagesRequest):
        for name in ("mcp_servers", "container"):
            if getattr(request, name):
                raise unsupported(name)
        fields |= {
            **_output(request),
            "max_tokens": request.max_tokens,
            "stream": request.stream,
            "stop": request.stop_sequences,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            **cache_fields(request),
        }
    return ChatCompletionRequest.model_validate(fields)


def _system(system: str | list[TextBlock] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    text = system if isinstance(system, str) else "\n".join(block.text for block in system)
    return [{"role": "system", "content": text}]


def _turns(turns: list[Turn]) -> Iterator[dict[str, Any]]:
    for index, turn in enumerate(turns):
        if isinstance(turn.content, str):
            yield {"role": turn.role, "content": turn.content}
        elif turn.role == "user":
            yield from _user_turn(turn.content, f"messages[{index}].content")
        else:
            yield _assistant_turn(turn.content, f"messages[{index}].content")


def _user_turn(blocks: list[Block], path: str) -> Iterator[dict[str, Any]]:
    """Tool results stand before the text of the same turn, as in the model's own order."""
    parts: list[Any] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            content: Any = block.content or ""
            if not isinstance(content, str):
                here = f"{path}[{index}].content"
                content = [_part(part, f"{here}[{position}]") for position, part in enumerate(content)]
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        elif isinstance(block, TextBlock | ImageBlock | DocumentBlock):
            parts.append(_part(block, f"{path}[{index}]"))
        else:
            raise invalid(f"A user turn cannot hold a block of type '{block.type}'.", f"{path}[{index}].type")
    if parts:
        yield {"role": "user", "content": parts}


def _part(block: TextBlock | ImageBlock | DocumentBlock, path: str) -> dict[str, Any] | ImagePart:
    """A block as a part of the chat API."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, DocumentBlock):
        raise unsupported(f"{path}.document", "Only text and pictures are.")
    source = block.source
    if isinstance(source, FileSource):
        raise unsupported(f"{path}.source.file", "Nothing is stored here that could be referred to.")
    if isinstance(source, UrlSource):
        return ImagePart.at(f"{path}.source", source.url)
    return ImagePart.at(f"{path}.source", f"data:{source.media_type};base64,{source.data}")


def _assistant_turn(blocks: list[Block], path: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            turn["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            turn.setdefault("tool_calls", []).append(call)
        elif not isinstance(block, RedactedThinkingBlock):
            raise invalid(f"An assistant turn cannot hold a block of type '{block.type}'.", f"{path}[{index}].type")
    return turn


def _tools(tools: list[ToolDefinition] | None) -> list[dict[str, Any]] | None:
    converted: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        if tool.type not in (None, "custom"):
            raise unsupported(f"tools[{index}].type", f"'{tool.type[:60]}' does not run here.")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        if tool.strict is not None:
            function["strict"] = tool.strict
        converted.append({"type": "function", "function": function})
    return converted or None


def _tool_choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    fields: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("'tool_choice.name' is missing.", "tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = "required" if choice.type == "any" else choice.type
    return fields


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    """This API thinks only on demand."""
    if thinking is None or thinking.type == "disabled":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "thinking_token_budget": thinking.budget_tokens}


def _output(request: MessagesRequest) -> dict[str, Any]:
    """The form of the answer, and the effort that goes into it."""
    config = request.output_config or OutputConfig()
    if config.format is not None and request.output_format is not None:
        raise invalid("'output_config.format' and 'output_format' exclude each other.", "output_format")
    fields: dict[str, Any] = {}
    wanted = config.format or request.output_format
    if wanted is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
    if request.thinking is not None and request.thinking.type == "adaptive":
        fields["reasoning_effort"] = config.effort
    return fields


def _stop(event: ChoiceFinished) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(event.reason, "end_turn")
    if event.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": event.stop_string}


def _usage(usage: UsageCount) -> dict[str, Any]:
    """Here, input tokens are those that were not found in the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class MessageStream:
    """Events of one job to Anthropic's event stream: one content block after another, each opened and closed."""

    def __init__(self, message_id: str, model: str, usage: UsageCount) -> None:
        self._id = message_id
        self._model = model
        self._usage = usage
        self._index = -1
        self._open: tuple[str, int] | None = None

    def write(self, event: JobEvent) -> bytes:
        """The bytes that `event` adds to the stream, possibly none."""
        match event:
            case Started():
                return self._start()
            case Progress():
                return b""
            case Deltas():
                return b"".join(self._delta(delta) for delta in event.deltas)
            case ChoiceFinished():
                self._usage.add(event)
                closing = self._close()
                return closing + _event("message_delta", delta=_stop(event), usage=_usage(self._usage))
            case Finished():
                return _event("message_stop")
            case Failed():
                return sse.event(to_api_error(event.error).anthropic_body(), "error")
            case Restarted():
                raise AssertionError("a stream cannot start anew")

    def _start(self) -> bytes:
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._usage),
        }
        return _event("message_start", message=message) + _event("ping")

    def _delta(self, delta: TextDelta | ToolCallDelta) -> bytes:
        if isinstance(delta, ToolCallDelta):
            block: dict[str, Any] = {"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}}
            head = self._switch(("tool_use", delta.index), block)
            change = {"type": "input_json_delta", "partial_json": delta.arguments}
            return head + (self._change(change) if delta.arguments else b"")
        if delta.channel == "reasoning":
            head = self._switch(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
            return head + self._change({"type": "thinking_delta", "thinking": delta.text})
        head = self._switch(("text", 0), {"type": "text", "text": ""})
        return head + self._change({"type": "text_delta", "text": delta.text})

    def _switch(self, kind: tuple[str, int], block: dict[str, Any]) -> bytes:
        """Close the open block and open another, unless the right one is open."""
        if self._open == kind:
            return b""
        closing = self._close()
        self._index += 1
        self._open = kind
        return closing + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signature = b""
        if self._open[0] == "thinking":
            signature = self._change({"type": "signature_delta", "signature": _SIGNATURE})
        self._open = None
        return signature + _event("content_block_stop", index=self._index)

    def _change(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event({"type": kind, **fields}, kind)


class MessageAnswer:
    """Collects events into one message."""

    def __init__(self, message_id: str, model: str, usage: UsageCount) -> None:
        self._id = message_id
        self._model = model
        self._usage = usage
        self._blocks: list[dict[str, Any]] = []
        self._stop: dict[str, Any] = {}

    def add(self, event: JobEvent) -> None:
        """Take in one event."""
        if isinstance(event, Restarted):
            self._blocks = []
            self._usage.reset()
        elif isinstance(event, ChoiceFinished):
            self._usage.add(event)
            self._stop = _stop(event)
        elif isinstance(event, Deltas):
            for delta in event.deltas:
                self._append(delta)

    def _append(self, delta: TextDelta | ToolCallDelta) -> None:
        last = self._blocks[-1] if self._blocks else {}
        if isinstance(delta, ToolCallDelta):
            if delta.call_id is not None:
                self._blocks.append({"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": ""})
                last = self._blocks[-1]
            last["input"] += delta.arguments
            return
        kind = "thinking" if delta.channel == "reasoning" else "text"
        if last.get("type") != kind:
            last = {"type": kind, kind: ""}
            if kind == "thinking":
                last["signature"] = _SIGNATURE
            self._blocks.append(last)
        last[kind] += delta.text

    def wire(self) -> dict[str, Any]:
        """The response body."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_finished_block(block) for block in self._blocks],
            **self._stop,
            "usage": _usage(self._usage),
            **self._usage.extension(),
        }


def _finished_block(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return block
    try:
        arguments = json.loads(block["input"] or "{}")
    except ValueError:
        # Cut off by the token limit; an object is promised here, so the fragment goes as one.
        arguments = {"partial_json": block["input"]}
    return {**block, "input": arguments}
