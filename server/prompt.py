"""Requests to the engine's vocabulary: messages to token ids, wire parameters to `GenerationRequest`.

The one place where the model's defaults (generation_config.json) meet what a request asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.core import CacheOptions, GenerationRequest, ImageSpan, Int32Array, Prompt, SamplingParams
from engine.errors import ContextLengthExceeded, ModelFileError, RequestError
from engine.image import Picture
from engine.tokenizer import Tokenizer
from server.errors import invalid, unsupported
from server.recall import ANSWER_START, TURN_END, TURN_START, Recall, scope_of
from server.schema import (
    TEMPLATE_SWITCHES,
    CachingRequest,
    ChatCompletionRequest,
    Content,
    ImagePart,
    Message,
    RefusalPart,
    StreamableRequest,
    TextPart,
)
from server.template import ChatTemplate, SpecialTextGuard
from server.toolcalls import decode_arguments

THINK_START = "<think>"
THINK_END = "</think>"
IMAGE_PAD = "<|image_pad|>"

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the checkpoint recommends: sampling for requests that do not say, and the tokens that end a turn."""

    sampling: SamplingParams
    stop_token_ids: frozenset[int]

    @classmethod
    def load(cls, directory: Path) -> GenerationDefaults:
        """Read generation_config.json. ModelFileError if it is missing or holds values of a wrong type."""
        path = directory / "generation_config.json"
        try:
            config = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path}: {error}") from None
        if not isinstance(config, dict):
            raise ModelFileError(f"{path}: expected a JSON object")
        ends = config.get("eos_token_id")
        ends = [ends] if isinstance(ends, int) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, int) for end in ends):
            raise ModelFileError(f"{path}: eos_token_id must be a token id or a list of them, got {ends!r}")
        fields: dict[str, Any] = {}
        for name, kind in _DEFAULTABLE.items():
            value = config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | kind):
                raise ModelFileError(f"{path}: {name} must be a number, got {value!r}")
            fields[name] = kind(value)
        if config.get("do_sample") is False:
            fields["temperature"] = 0.0
        return cls(SamplingParams(**fields), frozenset(ends))


_DEFAULTABLE: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation. text: what the model reads, one placeholder for each picture; in_reasoning: it ends
    inside an open thinking block; pictures: those of the messages, in order; begun: what the answer goes on with, of
    the final message that is continued."""

    prompt: Prompt
    text: str
    in_reasoning: bool
    pictures: tuple[Picture, ...] = ()
    begun: str = ""


class PromptBuilder:
    """Turns conversations into prompts for one checkpoint. Threads may share it.

    preserve_thinking: earlier answers keep their thinking unless a request says otherwise, and get it back from
    clients that leave it out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        defaults: GenerationDefaults,
        *,
        preserve_thinking: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._template = template
        self._turn_start = tokenizer.added_tokens.get(TURN_START)
        self._image_pad = tokenizer.added_tokens.get(IMAGE_PAD)
        self._special_names = {token_id: text.encode() for text, token_id in tokenizer.added_tokens.items()}
        self._preserve_thinking = preserve_thinking
        self._recall = Recall()
        breaks = tokenizer.encode("\n", allow_special=False)
        self._line_break = breaks[0] if len(breaks) == 1 else -1

    def refuse_hopeless(self, text: str, context_length: int, param: str = "messages") -> None:
        """ContextLengthExceeded for a text whose mere size is too much: encoding it could take minutes."""
        # Normalisation (NFC) composes three characters into one at the most.
        least = len(text) // (3 * self.tokenizer.longest_token)
        if least > context_length:
            raise _context_exceeded(least, 1, context_length, param)

    def chat(
        self,
        request: ChatCompletionRequest,
        context_length: int | None = None,
        pictures: Sequence[Picture] = (),
        *,
        scope: bytes = b"",
    ) -> ChatPrompt:
        """Render and encode the messages of `request`. context_length: refuse early what cannot fit; pictures: those
        of the messages, in order; scope: the tenant, whose earlier answers are encoded as they were generated.

        Raises RequestError (400) for what cannot be rendered, ContextLengthExceeded."""
        guard = SpecialTextGuard(self.tokenizer.added_tokens)
        messages = template_messages(request.messages)
        continued = bool(request.continue_final_message)
        if continued and request.add_generation_prompt:
            raise invalid(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.", "continue_final_message"
            )
        known = prompt_scope(request, scope)
        values = self._template_values(request)
        if self._preserve_thinking and values.get("preserve_thinking"):
            messages = self._recall.restore_thinking(known, messages)
        begun = messages[-1]["content"] if continued else ""
        messages = guard.protect(messages)
        end_mark = ""
        if continued:
            messages, end_mark = _mark_end(messages, guard)
        rendered = self._template.render(
            messages,
            tools=guard.protect(_template_tools(request)) or None,
            add_generation_prompt=not continued and request.add_generation_prompt is not False,
            **values,
        )
        if continued:
            rendered, mark, _ = rendered.partition(end_mark)
            if not mark:
                raise RequestError(
                    "The chat template does not show the final message, so it cannot be continued.",
                    param="continue_final_message",
                )
        if context_length is not None:
            self.refuse_hopeless(rendered, context_length)
        pieces = guard.split(rendered)
        ids: list[int] = []
        for piece in pieces:
            if piece.is_template:
                ids.extend(self._recall.encode(known, piece.text, self._encode_template))
            else:
                ids.extend(self.tokenizer.encode(piece.text, allow_special=False))
        tail = rendered[rendered.rfind(TURN_START) :]
        return ChatPrompt(
            prompt=self._prompt(np.asarray(ids, dtype=np.int32), pictures),
            text="".join(piece.text for piece in pieces),
            in_reasoning=tail.rfind(THINK_START) > tail.rfind(THINK_END),
            pictures=tuple(pictures),
            begun=begun,
        )

    def _prompt(self, ids: Int32Array, pictures: Sequence[Picture]) -> Prompt:
        """Give each picture's placeholder in `ids` the room that the picture needs."""
        pads = np.flatnonzero(ids == self._image_pad) if self._image_pad is not None else np.zeros(0, np.int64)
        if len(pads) != len(pictures):
            raise RequestError(
                f"The chat template shows {len(pads)} of the {len(pictures)} pictures in the messages, so they cannot "
                "be told apart.",
                param="messages",
                code="pictures_not_shown",
            )
        counts = np.ones(len(ids), np.int64)
        counts[pads] = [picture.tokens for picture in pictures]
        starts = (np.cumsum(counts) - counts)[pads]
        ids = np.repeat(ids, counts)
        spans = tuple(picture.span(int(start)) for picture, start in zip(pictures, starts, strict=True))
        return Prompt(ids, self._boundaries(ids, spans), spans)

    def _boundaries(self, ids: Int32Array, spans: Sequence[ImageSpan]) -> tuple[int, ...]:
        """Positions at which a turn begins or a picture ends: later prompts share everything before one of them.

        Where a picture begins is none: another one in its place leaves what the turn's begin has kept."""
        found = set() if self._turn_start is None else set(np.flatnonzero(ids == self._turn_start).tolist())
        found |= {span.start + span.count for span in spans}
        return tuple(sorted(found - {0, len(ids)}))

    def _encode_template(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, allow_special=True)

    def keeps_thoughts(self, request: ChatCompletionRequest) -> bool:
        """Whether the conversation's next prompts will show the thinking of this turn."""
        return self._template_values(request).get("preserve_thinking", False)

    def _template_values(self, request: ChatCompletionRequest) -> dict[str, bool]:
        values = _template_values(request)
        if self._preserve_thinking:
            values.setdefault("preserve_thinking", True)
        return values

    def remember(
        self, request: ChatCompletionRequest, scope: bytes, chat: ChatPrompt, token_ids: Sequence[int], answer: Message
    ) -> None:
        """Keep of an answer to `request` what its text does not tell. scope: from `prompt_scope`; chat: the rendered
        request; token_ids: all that were generated; answer: what the client was told."""
        if self._preserve_thinking and self.keeps_thoughts(request):
            self._recall.keep_thinking(scope, template_messages([*request.messages, answer]))
        header = self._last_turn(chat.prompt)
        if header is None:
            return
        ids = [*chat.prompt.token_ids[header:].tolist(), *token_ids]
        turn_end = self.tokenizer.added_tokens.get(TURN_END)
        if turn_end is None:
            return
        if ids[-1] in self.defaults.stop_token_ids:
            ids.pop()
        ids.append(turn_end)
        try:
            turn = b"".join(self._special_names.get(i) or self.tokenizer.token_bytes(i) for i in ids).decode()
        except UnicodeDecodeError:
            return
        if turn.startswith(ANSWER_START) and self._encode_template(turn) != ids:
            self._recall.keep_ids(scope, turn, ids)

    def forget(self, tenant: bytes) -> None:
        """Drop what was kept of answers to one tenant."""
        self._recall.forget(tenant)

    def opened(self, prompt: Prompt) -> Prompt | None:
        """`prompt` to the end of its last turn's header: what it shares with any other content of that turn. None: it
        has no such header."""
        start = self._last_turn(prompt)
        if start is None:
            return None
        breaks = np.flatnonzero(prompt.token_ids[start:] == self._line_break)
        if not len(breaks):
            return None
        end = start + int(breaks[0]) + 1
        boundaries = tuple(place for place in prompt.boundaries if place < end)
        return replace(prompt, token_ids=prompt.token_ids[:end].copy(), boundaries=boundaries)

    def _last_turn(self, prompt: Prompt) -> int | None:
        starts = np.flatnonzero(prompt.token_ids == (-1 if self._turn_start is None else self._turn_start))
        return int(starts[-1]) if len(starts) else None

    def generation_request(
        self,
        request: StreamableRequest,
        prompt: Prompt,
        *,
        request_id: str,
        max_tokens: int | None,
        context_length: int,
        param: str = "messages",
        top_logprobs: int | None = None,
        tenant: bytes = b"",
    ) -> GenerationRequest:
        """Merge the model's defaults with the request, and check that everything fits.

        max_tokens None: as many as the context leaves; param: the field that holds the prompt; tenant: whose cached
        prompts may be used.
        Raises ContextLengthExceeded, RequestError.
        """
        prompt_tokens = len(prompt.token_ids)
        if prompt_tokens + (max_tokens if max_tokens is not None else 1) > context_length:
            raise _context_exceeded(prompt_tokens, 1 if max_tokens is None else max_tokens, context_length, param)
        return GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            max_tokens=max_tokens if max_tokens is not None else context_length - prompt_tokens,
            sampling=self._sampling(request),
            stop_token_ids=self.defaults.stop_token_ids,
            top_logprobs=top_logprobs,
            cache=cache_options(request, tenant),
        )

    def _sampling(self, request: StreamableRequest) -> SamplingParams:
        given: dict[str, Any] = {name: value for name in _DEFAULTABLE if (value := getattr(request, name)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return replace(
            self.defaults.sampling, **given, seed=request.seed, logit_bias=self._logit_bias(request.logit_bias)
        )

    def _logit_bias(self, bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
        pairs: list[tuple[int, float]] = []
        for key, value in (bias or {}).items():
            if not key.isascii() or not key.isdigit() or int(key) >= self.tokenizer.vocab_size:
                raise invalid(
                    f"Invalid key in 'logit_bias': expected a token id from 0 to {self.tokenizer.vocab_size - 1}.",
                    "logit_bias",
                )
            pairs.append((int(key), value))
        return tuple(pairs)


def cache_options(request: CachingRequest, tenant: bytes) -> CacheOptions:
    """What a request says about the prefix cache."""
    use = request.cache
    return CacheOptions(
        scope=tenant,
        salt=(request.cache_salt or "").encode(),
        exact=bool(request.cache_exact),
        read=use is None or use.read is not False,
        write=use is None or use.write is not False,
    )


def prompt_scope(request: CachingRequest, tenant: bytes) -> bytes:
    """Whose answers may be remembered in a prompt: requests of one tenant with one salt."""
    return scope_of(tenant, (request.cache_salt or "").encode())


def output_limit(request: ChatCompletionRequest) -> int | None:
    """The smaller of max_tokens and max_completion_tokens, None if neither is given."""
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    return min(limits, default=None)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The checked stop strings of a request."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid(f"At most {MAX_STOP_STRINGS} stop strings are accepted, got {len(stops)}.", "stop")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise invalid(f"A stop string must have 1 to {MAX_STOP_LENGTH} characters, got {len(text)}.", "stop")
    return stops


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form that templates of this family expect.

    developer is system; all system texts move to the front, in order; text parts are joined unless there are pictures
    among them; null is no text; arguments of calls become objects.
    """
    instructions: list[str] = []
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message.role in ("system", "developer"):
            content = _content(message.content, f"messages[{index}].content")
            assert isinstance(content, str), "pictures were refused here when they were read"
            instructions.append(content)
        else:
            turns.append(_turn(message, index))
    if not any(turn["role"] == "user" for turn in turns):
        raise RequestError("'messages' must hold at least one user message.", param="messages", code="invalid_value")
    if instructions:
        turns.insert(0, {"role": "system", "content": "\n\n".join(text for text in instructions if text)})
    return turns


def _turn(message: Message, index: int) -> dict[str, Any]:
    content = _content(message.content, f"messages[{index}].content")
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        turn["name"] = message.name
    if message.role == "assistant":
        reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
        if reasoning is None and isinstance(content, str):
            reasoning, turn["content"] = _split_reasoning(content)
        if reasoning is not None:
            turn["reasoning_content"] = reasoning
        if not turn["content"] and message.refusal:
            turn["content"] = message.refusal
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": decode_arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
    elif message.tool_calls:
        path = f"messages[{index}].tool_calls"
        raise invalid(f"'{path}': only an assistant message can hold tool calls.", path)
    return turn


def _split_reasoning(content: str) -> tuple[str | None, str]:
    """Separate a thinking block that a client left at the front of an answer; tags elsewhere are plain text."""
    text = content.lstrip()
    if not text.startswith(THINK_START) or THINK_END not in text:
        return None, content
    reasoning, _, answer = text.removeprefix(THINK_START).partition(THINK_END)
    return reasoning.strip(), answer.lstrip("\n")


def _content(content: Content | None, path: str) -> str | list[dict[str, str]]:
    """The text, or text and places of pictures where there are pictures."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, str]] = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        elif isinstance(part, RefusalPart):
            parts.append({"type": "text", "text": part.refusal})
        elif isinstance(part, ImagePart):
            parts.append({"type": "image"})
        else:
            raise unsupported(f"{path}[{index}].{part.type}", "Only text and pictures are.")
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _template_tools(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """Tool definitions, exactly as the client wrote them."""
    if not request.tools or request.tool_choice == "none":
        return []
    return [tool.source for tool in request.tools]


def _template_values(request: ChatCompletionRequest) -> dict[str, bool]:
    """The switches a template knows. Nothing else of a request reaches it."""
    values: dict[str, bool] = {}
    for name, value in (request.chat_template_kwargs or {}).items():
        if name not in TEMPLATE_SWITCHES or value is None:
            continue
        if not isinstance(value, bool):
            raise invalid(
                f"Invalid type for 'chat_template_kwargs.{name}': expected a boolean.",
                f"chat_template_kwargs.{name}",
                "invalid_type",
            )
        values[name] = value
    if "enable_thinking" not in values:
        if request.enable_thinking is not None:
            values["enable_thinking"] = request.enable_thinking
        elif request.reasoning_effort == "none":
            values["enable_thinking"] = False
    return values


def _context_exceeded(prompt: int, output: int, context_length: int, param: str) -> ContextLengthExceeded:
    error = ContextLengthExceeded(prompt, output, context_length)
    error.param = param
    return error


def _mark_end(messages: list[dict[str, Any]], guard: SpecialTextGuard) -> tuple[list[dict[str, Any]], str]:
    """Put a mark where the final message ends, so that the rendering can be cut there."""
    final = messages[-1]
    if final["role"] != "assistant" or final.get("tool_calls"):
        raise invalid(
            "'continue_final_message' needs a final assistant message without tool calls.", "continue_final_message"
        )
    mark = guard.new_mark()
    field = "reasoning_content" if not final["content"] and final.get("reasoning_content") else "content"
    return [*messages[:-1], {**final, field: final[field] + mark}], mark
