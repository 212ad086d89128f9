"""Wire types of the requests, and nothing else: what JSON is accepted, and how a refusal names the culprit.

Unknown fields are kept in `model_extra` so that `unknown_fields` can report them; they never change an answer.
`null` means "not given" everywhere, as the official clients use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from engine.core import SAMPLING_RANGES
from server.errors import ApiError, invalid, unsupported


class WireModel(BaseModel):
    """Base of all request objects: strict types, immutable, unknown keys kept aside."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


class TextPart(WireModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(WireModel):
    type: Literal["refusal"]
    refusal: str


ImageDetail = Literal["auto", "low", "high", "original"]


class ImageUrl(WireModel):
    url: str
    detail: ImageDetail | None = None


class ImagePart(WireModel):
    """A picture. `path`: where the client has it, if the request came in another API's shape."""

    type: Literal["image_url"]
    image_url: ImageUrl | str
    _path: str | None = PrivateAttr(default=None)

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url

    @property
    def detail(self) -> ImageDetail | None:
        return None if isinstance(self.image_url, str) else self.image_url.detail

    @property
    def path(self) -> str | None:
        return self._path

    @classmethod
    def at(cls, path: str, url: str, detail: ImageDetail | None = None) -> ImagePart:
        """A part that the client has at `path` in a shape of its own."""
        part = cls(type="image_url", image_url=ImageUrl(url=url, detail=detail))
        part._path = path
        return part


class AudioPart(WireModel):
    type: Literal["input_audio"]


class FilePart(WireModel):
    type: Literal["file"]


class VideoPart(WireModel):
    type: Literal["video_url"]


ContentPart = Annotated[
    TextPart | RefusalPart | ImagePart | AudioPart | FilePart | VideoPart, Field(discriminator="type")
]
Content = str | list[ContentPart]
# Kinds of content parts, of all API shapes, that are known in order to be refused by name.
_REFUSED_PARTS = frozenset({"input_audio", "file", "video_url", "document", "input_file"})


class FunctionCall(WireModel):
    """`arguments`: JSON text as the API defines it, or an object as some agents send it."""

    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] | None = None


class ToolCall(WireModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(WireModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(WireModel):
    """Names go into the call syntax as they are, so brackets and line breaks have no place in them."""

    name: str = Field(min_length=1, max_length=256, pattern=r"^[^<>\r\n]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(WireModel):
    """`source` is the definition as the client wrote it: models see its keys in the client's order."""

    type: Literal["function"]
    function: FunctionDefinition
    _source: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def source(self) -> dict[str, Any]:
        return self._source

    @model_validator(mode="wrap")
    @classmethod
    def _keep_source(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        tool = handler(value)
        if isinstance(value, dict):
            tool._source = value
        return tool


class NamedFunction(WireModel):
    name: str


class NamedToolChoice(WireModel):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(WireModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(WireModel):
    """`schema` is a reserved name in pydantic, hence the alias."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(WireModel):
    """What the output must be, for those who want more than JSON; at most one field may be set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    structural_tag: Any = None


class CacheUse(WireModel):
    """Whether the prefix cache may be used for a request, and may keep what it computes. Default: both."""

    read: bool | None = None
    write: bool | None = None


class CachingRequest(WireModel):
    """How a request uses the prefix cache.

    cache_salt: prompts with different salts share nothing; cache_exact: reuse only what gives the bits of an uncached
    run; prompt_cache_key: a hint to route by, taken and not used, since prefixes are found by their content.
    """

    cache_salt: str | None = Field(default=None, min_length=1, max_length=512)
    cache_exact: bool | None = None
    cache: CacheUse | None = None
    prompt_cache_key: str | None = Field(default=None, max_length=512)


def cache_fields(request: CachingRequest) -> dict[str, Any]:
    """Those fields, to hand them on to another request."""
    use = request.cache
    return {
        "cache_salt": request.cache_salt,
        "cache_exact": request.cache_exact,
        "cache": None if use is None else {"read": use.read, "write": use.write},
        "prompt_cache_key": request.prompt_cache_key,
    }


def sampling_field(name: str) -> Any:
    """An optional number with the range that the engine accepts."""
    least, most = SAMPLING_RANGES[name]
    return Field(default=None, ge=least, le=most, allow_inf_nan=False)


class StreamableRequest(CachingRequest):
    """What every generating endpoint shares."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = sampling_field("temperature")
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, le=int(SAMPLING_RANGES["top_k"][1]))
    min_p: float | None = sampling_field("min_p")
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    repetition_penalty: float | None = sampling_field("repetition_penalty")
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    priority: int | None = Field(default=None, ge=-100, le=100)
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatCompletionRequest(StreamableRequest):
    messages: list[Message]
    max_completion_tokens: int | None = Field(default=None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0)
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_progress: bool | None = None
    # Hints about storage, billing and attribution: they change no answer, so they are taken and not used.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None


class CompletionRequest(StreamableRequest):
    """`prompt`: a text, token ids, or a list of either. `parse_special` false: control tokens in texts are text."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    parse_special: bool | None = None


class TokenizeRequest(WireModel):
    """A text or the messages of a chat request; what else belongs to a chat request is read by its own schema."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None


class PinRequest(WireModel):
    """`id`: a snapshot's name in the list of the cache."""

    id: str


class DetokenizeRequest(WireModel):
    model: str | None = None
    tokens: list[int]


# Fields that change an answer and are not implemented: the values that ask for nothing are let through.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "grammar": (None, ""),
    "json_schema": (None, {}),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "logits_processors": (None, []),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
}


# Hints that clients send by default and that change nothing here: these values ask for nothing, others are noted.
_NEUTRAL_HINTS: dict[str, tuple[Any, ...]] = {
    "store": (None, False),
    "service_tier": (None, "auto", "default", "standard_only"),
    "verbosity": (None, "medium"),
    "prediction": (None,),
    "cache_control": (None,),
}

# Switches of the chat template that `chat_template_kwargs` may set.
TEMPLATE_SWITCHES = frozenset({"enable_thinking", "preserve_thinking", "add_vision_id"})

# Fields of other requests that an endpoint does not have, refused there unless null.
_ELSEWHERE = frozenset({"messages", "prompt", "tools", "response_format", "structured_outputs"})


def reject_unsupported(request: WireModel) -> None:
    """Raise a 400 that names the first known-but-unimplemented field that asks for something."""
    for name, value in (request.model_extra or {}).items():
        if name in _NEUTRAL_VALUES and value not in _NEUTRAL_VALUES[name]:
            raise unsupported(name)
        if name in _ELSEWHERE and value is not None:
            raise unsupported(name, "It belongs to another endpoint.")


Request = TypeVar("Request", bound=WireModel)

MAX_DEPTH = 64
# Longer numbers take time that grows with the square of their length.
_MAX_DIGITS = 4000


def parse_json(body: bytes) -> Any:
    """The JSON value of a request body. Malformed text, NaN, lone surrogates and deep nesting are a 400."""
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise invalid(f"The request body is not UTF-8 (byte {error.start}).", None, "invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"The request body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        raise invalid(message, None, "invalid_json") from None
    except RecursionError:
        raise invalid("The request body is nested too deeply.", None, "invalid_json") from None
    except ValueError as error:
        raise invalid(f"The request body is not valid JSON: {error}.", None, "invalid_json") from None
    check_nesting(value, "")
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, at most {_MAX_DIGITS} are read")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def check_nesting(value: Any, path: str, depth: int = 0) -> None:
    """Refuse nesting over MAX_DEPTH and text that no UTF-8 can carry (half of a surrogate pair)."""
    if depth > MAX_DEPTH:
        raise invalid(f"The request body is nested deeper than {MAX_DEPTH} levels.", None, "invalid_json")
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, path, is_key=True)
            check_nesting(item, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_nesting(item, f"{path}[{index}]", depth + 1)


def _check_text(text: str, path: str, *, is_key: bool = False) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"'{path}' holds"
        if is_key:
            what = f"In '{path}', a field name holds" if path else "A field name holds"
        message = f"{what} half of a surrogate pair at character {error.start}: it is not valid Unicode."
        raise invalid(message, path or None, "invalid_unicode") from None


def parse_request(kind: type[Request], body: bytes, defaults: Mapping[str, Any] | None = None) -> Request:
    """A checked request of type `kind`; a 400 names the JSON path, what was expected and what was got.

    defaults: fields that may be left out here.
    """
    value = parse_json(body)
    if not isinstance(value, dict):
        raise invalid(f"The request body must be a JSON object, not {_type_name(value)}.", None, "invalid_json")
    value = {**(defaults or {}), **value}
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _validation_error(error.errors(include_url=False, include_context=True), value) from None


def _validation_error(details: Iterable[ErrorDetails], body: Any) -> ApiError:
    """Of all complaints, report the deepest path; several at that path are the branches of one union."""
    located = [(_json_path(detail["loc"], body, detail["type"] == "missing"), detail) for detail in details]
    path, first = max(located, key=lambda item: len(item[0]))
    here = [detail for other, detail in located if other == path]
    name = format_path(path)
    if first["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{name}'.", code="missing_required_parameter", param=name)
    reasons = list(dict.fromkeys(_reason(detail) for detail in here))
    is_type = all(detail["type"].endswith("_type") for detail in here)
    if all(reason.startswith("must be ") for reason in reasons):
        reasons[1:] = [reason.removeprefix("must be ") for reason in reasons[1:]]
    message = f"Invalid {'type' if is_type else 'value'} for '{name}': {' or '.join(reasons)}."
    if is_type:
        message = f"{message[:-1]}, but got {_type_name(first['input'])}."
    return ApiError(400, message, code="invalid_type" if is_type else "invalid_value", param=name)


# Pydantic's types of errors in words; names in braces come from the error's context.
_REASONS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "bool_type": "must be a boolean",
    "string_type": "must be a string",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "too_short": "must have at least {min_length} item(s)",
    "union_tag_not_found": "must be an object with a 'type'",
}


def _reason(detail: ErrorDetails) -> str:
    if detail["type"] == "union_tag_invalid":
        tags = [tag.strip("'") for tag in detail["ctx"]["expected_tags"].split(", ")]
        return "'type' must be one of " + ", ".join(f"'{tag}'" for tag in tags if tag not in _REFUSED_PARTS)
    words = _REASONS.get(detail["type"])
    if words is not None:
        return words.format_map(detail.get("ctx", {}))
    return detail["msg"].replace("Input should be ", "must be ", 1).replace("dictionary", "object")


def _type_name(value: Any) -> str:
    """The JSON name of a Python value's type; the value itself is request content and is not repeated."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def _json_path(location: tuple[int | str, ...], body: Any, missing: bool) -> tuple[int | str, ...]:
    """Pydantic's location without the names of union branches, which are no part of the JSON."""
    path: list[int | str] = []
    here = body
    for position, step in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(here, dict) and isinstance(step, str) and (step in here or (missing and is_last)):
            path.append(step)
            here = here.get(step)
        elif isinstance(here, list) and isinstance(step, int):
            path.append(step)
            here = here[step]
    return tuple(path)


def format_path(path: Iterable[int | str]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def unknown_fields(request: WireModel, prefix: str = "") -> Iterator[str]:
    """Names of ignored fields, list positions left out: `messages[].extra`. Parts that are refused are left out."""
    for name, value in (request.model_extra or {}).items():
        if value is not None and name not in _NEUTRAL_VALUES and not _is_neutral_hint(name, value):
            yield prefix + name
    for name in type(request).model_fields:
        value = getattr(request, name)
        if name in _NEUTRAL_HINTS and not _is_neutral_hint(name, value):
            yield prefix + name
        elif name == "chat_template_kwargs":
            for key, item in (value or {}).items():
                if item is not None and key not in TEMPLATE_SWITCHES:
                    yield f"{prefix}{name}.{key}"
        elif isinstance(value, WireModel):
            yield from unknown_fields(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, WireModel) and getattr(item, "type", None) not in _REFUSED_PARTS:
                    yield from unknown_fields(item, f"{prefix}{name}[].")


def is_hint(name: str) -> bool:
    """Whether a field that `unknown_fields` names is known, as a hint that changes nothing here."""
    return name.rpartition(".")[2] in _NEUTRAL_HINTS


def _is_neutral_hint(name: str, value: Any) -> bool:
    return name in _NEUTRAL_HINTS and value in _NEUTRAL_HINTS[name]
