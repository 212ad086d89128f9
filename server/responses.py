"""POST /v1/responses: the stateless core of the Responses API, with streaming events and function tools.

A translation only: requests become chat requests, events become items. Nothing is stored, so whatever refers to
something stored is refused by name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.types import Receive, Scope, Send

from engine.core import Progress
from server import answering, sse
from server.chatwire import UsageCount
from server.errors import ApiError, invalid, to_api_error, unsupported
from server.job import ChoiceFinished, Deltas, Failed, Finished, JobEvent, Restarted, Started
from server.routes import Service
from server.schema import (
    CachingRequest,
    ChatCompletionRequest,
    ImageDetail,
    ImagePart,
    WireModel,
    cache_fields,
    parse_request,
    unknown_fields,
)
from server.textstream import TextDelta
from server.toolcalls import ToolCallDelta
from server.transport import read_body, record_of


class TextItemPart(WireModel):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalItemPart(WireModel):
    type: Literal["refusal"]
    refusal: str


class ImageItemPart(WireModel):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: ImageDetail | None = None


class OtherItemPart(WireModel):
    type: Literal["input_file", "input_audio"]


ItemPart = Annotated[TextItemPart | RefusalItemPart | ImageItemPart | OtherItemPart, Field(discriminator="type")]


class InputItem(WireModel):
    """Any item of the input; which fields it needs depends on its type, and `_turns` checks that."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    status: str | None = None


class FunctionTool(WireModel):
    type: str
    name: str | None = Field(default=None, min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(WireModel):
    type: Literal["function"]
    name: str


class TextFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(WireModel):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(WireModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(CachingRequest):
    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, allow_inf_nan=False)
    stream: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    priority: int | None = Field(default=None, ge=-100, le=100)
    # Taken and not used: they change no answer of a server that stores nothing.
    store: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
    stream_options: dict[str, Any] | None = None
    # Known and refused unless empty.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    top_logprobs: int | None = None


_REFUSED = ("previous_response_id", "conversation", "background", "prompt", "top_logprobs")


class Responses:
    """POST /v1/responses."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        record = record_of(scope)
        body = await read_body(scope, receive, service.max_body_bytes)
        request, chat = await asyncio.to_thread(self._prepare, body)
        try:
            work = await service.chat_work(chat, scope)
        except Exception as error:
            refusal = to_api_error(error)
            name = {"messages": "input", "response_format": "text.format"}.get(refusal.param or "")
            if name is None:
                raise
            message = refusal.message.replace("'response_format'", f"'{name}'")
            raise ApiError(refusal.status, message, code=refusal.code, param=name) from error
        job = await service.job(scope, work, body)
        writer = ResponseWriter(record.request_id, service.model, request, UsageCount(work.prompt_tokens))
        if request.stream:
            await answering.stream(service.worker, job, writer, record, receive, send, service.keep_alive_s)
        else:
            await answering.whole(service.worker, job, writer, record, receive, send, service.keep_alive_s)

    def _prepare(self, body: bytes) -> tuple[ResponsesRequest, ChatCompletionRequest]:
        service = self._service
        request = parse_request(ResponsesRequest, body)
        service.check_model(request.model)
        for name in _REFUSED:
            if getattr(request, name):
                raise unsupported(name)
        for index, wanted in enumerate(request.include or ()):
            # Other inclusions are parts of items that this server never has.
            if wanted == "message.output_text.logprobs":
                raise unsupported(f"include[{index}]", "Log-probabilities come with chat completions.")
        service.unknown.note(unknown_fields(request))
        service.worker.check_admission()
        return request, to_chat_request(request)


def to_chat_request(request: ResponsesRequest) -> ChatCompletionRequest:
    """The same request in the shape of the chat API."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        messages += _turns(request.input)
    choice: Any = request.tool_choice
    if isinstance(choice, NamedTool):
        choice = {"type": "function", "function": {"name": choice.name}}
    return ChatCompletionRequest.model_validate(
        {
            "model": request.model,
            "messages": messages,
            "tools": _tools(request.tools),
            "tool_choice": choice,
            "parallel_tool_calls": request.parallel_tool_calls,
            "max_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stream": request.stream,
            "response_format": _response_format(request.text),
            "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
            "metadata": request.metadata,
            "priority": request.priority,
            **cache_fields(request),
        }
    )


def _turns(items: list[InputItem]) -> list[dict[str, Any]]:
    """Items to chat turns: reasoning, text and calls of one answer belong into one assistant turn."""
    turns: list[dict[str, Any]] = []
    is_open = False
    for index, item in enumerate(items):
        path = f"input[{index}]"
        match item.type:
            case "message":
                if item.role is None:
                    raise _missing(f"{path}.role")
                if item.role == "assistant" and is_open:
                    turns[-1]["content"] += _text(item.content, f"{path}.content")
                else:
                    turns.append({"role": item.role, "content": _content(item, f"{path}.content")})
                is_open = item.role == "assistant"
            case "reasoning":
                if not is_open:
                    turns.append({"role": "assistant", "content": ""})
                thought = _text(item.content or item.summary, f"{path}.content")
                turns[-1]["reasoning_content"] = turns[-1].get("reasoning_content", "") + thought
                is_open = True
            case "function_call":
                if item.name is None:
                    raise _missing(f"{path}.name")
                if not is_open:
                    turns.append({"role": "assistant", "content": ""})
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                turns[-1].setdefault("tool_calls", []).append(call)
                is_open = True
            case "function_call_output":
                output = _parts(item.output, f"{path}.output")
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
                is_open = False
            case "item_reference":
                raise unsupported(f"{path}.type", "Nothing is stored here that could be referred to.")
    return turns


def _missing(path: str) -> ApiError:
    return ApiError(400, f"Missing required parameter: '{path}'.", code="missing_required_parameter", param=path)


def _content(item: InputItem, path: str) -> str | list[dict[str, str] | ImagePart]:
    """What a message says. Only users send pictures."""
    return _parts(item.content, path) if item.role == "user" else _text(item.content, path)


def _text(content: str | list[ItemPart] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, ImageItemPart | OtherItemPart):
            raise unsupported(f"{path}[{index}].{part.type}", "Only text is, here.")
        texts.append(part.text if isinstance(part, TextItemPart) else part.refusal)
    return "".join(texts)


def _parts(content: str | list[ItemPart] | None, path: str) -> str | list[dict[str, str] | ImagePart]:
    """Content that may hold pictures, as the chat API has it."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, str] | ImagePart] = []
    for index, part in enumerate(content):
        here = f"{path}[{index}]"
        if isinstance(part, OtherItemPart):
            raise unsupported(f"{here}.{part.type}", "Only text and pictures are.")
        if isinstance(part, ImageItemPart):
            if part.file_id is not None:
                raise unsupported(f"{here}.file_id", "Nothing is stored here that could be referred to.")
            if part.image_url is None:
                raise _missing(f"{here}.image_url")
            parts.append(ImagePart.at(f"{here}.image_url", part.image_url, part.detail))
        else:
            parts.append({"type": "text", "text": part.text if isinstance(part, TextItemPart) else part.refusal})
    return parts


def _tools(tools: list[FunctionTool] | None) -> list[dict[str, Any]] | None:
    converted: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise unsupported(f"tools[{index}].type", f"'{tool.type[:60]}' does not run here.")
        if tool.name is None:
            raise _missing(f"tools[{index}].name")
        function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        if tool.strict:
            function["strict"] = True
        given = {key: value for key, value in function.items() if value is not None}
        converted.append({"type": "function", "function": given})
    return converted or None


def _response_format(text: TextSettings | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    given = text.format
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None:
        raise invalid("'text.format.schema' is missing.", "text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema_}}


class ResponseWriter:
    """Events of one job to the items of a response: as an event stream (`write`) or one object (`add`, `wire`)."""

    def __init__(self, request_id: str, model: str, request: ResponsesRequest, usage: UsageCount) -> None:
        self._request_id = request_id
        self._model = model
        self._request = request
        self._usage = usage
        self._created = int(time.time())
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        self._reason: str | None = None
        self._error: ApiError | None = None

    def write(self, event: JobEvent) -> bytes:
        """The bytes that `event` adds to the stream, possibly none."""
        return b"".join(self._events(event))

    def add(self, event: JobEvent) -> None:
        """Take in one event."""
        if isinstance(event, Restarted):
            self._output, self._is_open = [], False
            self._usage.reset()
            return
        for _ in self._events(event):
            pass

    def wire(self) -> dict[str, Any]:
        """The response object as it stands."""
        request = self._request
        status, details = "in_progress", None
        if self._error is not None:
            status = "failed"
        elif self._reason == "length":
            status, details = "incomplete", {"reason": "max_output_tokens"}
        elif self._reason is not None:
            status = "completed"
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text is not None else {}
        choice = request.tool_choice
        return {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None if self._error is None else {"code": self._error.code, "message": self._error.message},
            "incomplete_details": details,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in request.tools or ()],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": self._wire_usage() if self._reason is not None else None,
            "user": request.user,
            "metadata": request.metadata or {},
            **(self._usage.extension() if self._reason is not None else {}),
        }

    def _events(self, event: JobEvent) -> Iterator[bytes]:
        match event:
            case Started():
                yield self._event("response.created", response=self.wire())
                yield self._event("response.in_progress", response=self.wire())
            case Deltas():
                for delta in event.deltas:
                    yield from self._call(delta) if isinstance(delta, ToolCallDelta) else self._text(delta)
            case ChoiceFinished():
                self._usage.add(event)
                yield from self._close("incomplete" if event.reason == "length" else "completed")
                self._reason = event.reason
            case Finished():
                kind = "response.incomplete" if self._reason == "length" else "response.completed"
                yield self._event(kind, response=self.wire())
            case Failed():
                self._error = to_api_error(event.error)
                yield self._event("response.failed", response=self.wire())
            case Progress():
                pass
            case Restarted():
                raise AssertionError("a stream cannot start anew")

    def _text(self, delta: TextDelta) -> Iterator[bytes]:
        is_thought = delta.channel == "reasoning"
        kind = "reasoning" if is_thought else "message"
        if not self._is_open or self._output[-1]["type"] != kind:
            yield from self._close("completed")
            if is_thought:
                part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
                item = {"id": self._item_id("rs"), "type": kind, "summary": [], "content": []}
            else:
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {"id": self._item_id("msg"), "type": kind, "role": "assistant", "content": []}
            yield self._open({**item, "status": "in_progress"})
            yield self._part_event("response.content_part.added", part=dict(part))
            self._output[-1]["content"].append(part)
        self._output[-1]["content"][0]["text"] += delta.text
        name = "response.reasoning_text.delta" if is_thought else "response.output_text.delta"
        extra: dict[str, Any] = {} if is_thought else {"logprobs": []}
        yield self._part_event(name, delta=delta.text, **extra)

    def _call(self, delta: ToolCallDelta) -> Iterator[bytes]:
        if delta.call_id is not None:
            yield from self._close("completed")
            yield self._open(
                {
                    "id": self._item_id("fc"),
                    "type": "function_call",
                    "call_id": delta.call_id,
                    "name": delta.name,
                    "arguments": "",
                    "status": "in_progress",
                }
            )
        if delta.arguments:
            self._output[-1]["arguments"] += delta.arguments
            yield self._item_event("response.function_call_arguments.delta", delta=delta.arguments)

    def _open(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        self._is_open = True
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _close(self, status: str) -> Iterator[bytes]:
        """End the open item, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            if item["type"] == "reasoning":
                yield self._part_event("response.reasoning_text.done", text=part["text"])
            else:
                yield self._part_event("response.output_text.done", text=part["text"], logprobs=[])
            yield self._part_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}{len(self._output):02x}"

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        position = len(self._output) - 1
        return self._event(kind, item_id=self._output[position]["id"], output_index=position, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return sse.event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)

    def _wire_usage(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
