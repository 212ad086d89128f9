"""A checked request to the choices that the worker runs: engine request, text stream and constraint of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from engine.core import GenerationRequest
from engine.image import Picture
from engine.tokenizer import Tokenizer
from server.call_grammar import Function
from server.constraint import AnswerConstraint
from server.errors import invalid, unsupported
from server.grammar import Grammar, GrammarCompiler
from server.job import BACKGROUND_PRIORITY, Choice, Work
from server.prompt import THINK_END, PromptBuilder, output_limit, stop_strings
from server.schema import (
    ChatCompletionRequest,
    NamedToolChoice,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    check_nesting,
)
from server.sequel import ChatSequel
from server.textstream import TextStream
from server.toolcalls import CALL_END, CALL_START, ToolCallParser

# How thinking ends when it is ended from outside, and what stands between it and an answer: the template's own text.
_FORCED_END = f"\n{THINK_END}\n\n"
_AFTER_THINK = "\n\n"

# Thinking tokens per effort; efforts above these are not limited.
_EFFORT_BUDGETS = {"minimal": 512, "low": 2048, "medium": 8192}


class ChoiceBuilder:
    """Builds the choices of requests for one checkpoint. Threads may share it.

    tokenizer_json: the text of tokenizer.json, from which grammars get their vocabulary.
    """

    def __init__(self, prompts: PromptBuilder, tokenizer_json: str) -> None:
        tokenizer = prompts.tokenizer
        self._prompts = prompts
        self._tokenizer: Tokenizer = tokenizer
        self._think_end = tuple(tokenizer.encode(THINK_END, allow_special=True))
        self._forced_end = tuple(tokenizer.encode(_FORCED_END, allow_special=True))
        self._after_think = tuple(tokenizer.encode(_AFTER_THINK, allow_special=True))
        self._call_start = tuple(tokenizer.encode(CALL_START, allow_special=True))
        self._grammars = GrammarCompiler(
            tokenizer_json,
            prompts.defaults.stop_token_ids,
            call_start=self._call_start,
            call_end=tokenizer.encode(CALL_END, allow_special=True),
        )

    def chat(
        self,
        request: ChatCompletionRequest,
        request_id: str,
        context_length: int,
        tenant: bytes = b"",
        pictures: Sequence[Picture] = (),
    ) -> Work:
        """The work of a chat request. tenant: whose cached prompts may be used; pictures: those of the messages.
        Raises ApiError or RequestError for whatever cannot be served."""
        stops = stop_strings(request.stop)
        chat = self._prompts.chat(request, context_length, pictures, scope=tenant)
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        generation = self._prompts.generation_request(
            request,
            chat.prompt,
            request_id=request_id,
            max_tokens=output_limit(request),
            context_length=context_length,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            tenant=tenant,
        )
        preserved = self._prompts.keeps_thoughts(request)
        grammar = self._grammar(request)
        if grammar is not None and chat.begun and _output_constraint(request) is not None:
            grammar = grammar.after(self._tokenizer.encode(chat.begun, allow_special=False))
            if grammar is None:
                raise invalid(
                    "The final message does not begin an answer of the form that is asked for.",
                    "continue_final_message",
                )
        budget = _thinking_budget(request) if chat.in_reasoning else None
        needs_constraint = grammar is not None or budget is not None

        def make(index: int) -> Choice:
            stream = TextStream(
                self._tokenizer.token_bytes,
                think_end=self._think_end,
                in_reasoning=chat.in_reasoning,
                stops=stops,
                tools=_tool_parser(request),
                tool_start=self._call_start,
            )
            constraint = self._constraint(grammar, budget, chat.in_reasoning) if needs_constraint else None

            def keep_reply() -> bool:
                # Templates of this family drop the thinking of earlier turns, but not within a chain of tool calls.
                return stream.stop_string is None and (preserved or stream.has_tool_calls)

            cache = replace(generation.cache, keep_reply=keep_reply)
            return replace(variant(generation, index), constraint=constraint, cache=cache), stream

        background = is_background(request)
        return Work(
            choices=[partial(make, index) for index in range(request.n or 1)],
            prompt_tokens=len(generation.prompt.token_ids),
            max_tokens=generation.max_tokens,
            priority=request.priority if request.priority is not None else BACKGROUND_PRIORITY if background else 0,
            may_restart=background and not request.stream,
            sequel=None if background else ChatSequel(self._prompts, request, chat, generation),
        )

    def _constraint(self, grammar: Grammar | None, budget: int | None, in_reasoning: bool) -> AnswerConstraint:
        return AnswerConstraint(
            self._tokenizer.vocab_size,
            in_reasoning=in_reasoning,
            think_end=self._think_end,
            budget=budget,
            forced_end=self._forced_end,
            after_think=self._after_think,
            grammar=None if grammar is None else grammar.matcher(),
            answer_only=(*self._prompts.defaults.stop_token_ids, *self._call_start),
        )

    def _grammar(self, request: ChatCompletionRequest) -> Grammar | None:
        """The grammar of the answer, if the request constrains it."""
        tools = callable_tools(request)
        forced = request.tool_choice == "required" or isinstance(request.tool_choice, NamedToolChoice)
        output = _output_constraint(request)
        parallel = request.parallel_tool_calls is not False
        if forced:
            if output is not None:
                raise invalid("A forced tool call cannot be combined with an output format.", "tool_choice")
            return self._grammars.tool_calls(_functions(tools, forced=True), parallel=parallel)
        if output is None:
            if any(tool.function.strict for tool in tools.values()):
                return self._grammars.tool_calls(_functions(tools), parallel=parallel, or_text=True)
            return None
        param, kind, value = output
        if kind == "json":
            if tools:
                return self._grammars.tool_calls(_functions(tools), parallel=parallel, or_json=value)
            return self._grammars.json_value(value, param)
        if tools:
            raise unsupported(param, "It cannot be combined with tools.")
        if kind == "regex":
            return self._grammars.regex(value, param)
        return self._grammars.choice(value, param) if kind == "choice" else self._grammars.lark(value, param)


def is_background(request: ChatCompletionRequest) -> bool:
    """Whether nobody waits for the answer: titles, tags and the like that front ends ask for beside a chat.

    They say so in `metadata.task`, or begin the prompt in the way of Open WebUI's task templates.
    """
    if request.priority is not None:
        return request.priority > 0
    if request.stream:
        return False
    if request.metadata is not None and request.metadata.get("task"):
        return True
    content = request.messages[-1].content if request.messages else None
    return isinstance(content, str) and content.lstrip().startswith("### Task:")


def callable_tools(request: ChatCompletionRequest) -> dict[str, Tool]:
    """Functions that the answer may call, by name."""
    tools = {tool.function.name: tool for tool in request.tools or ()}
    if len(tools) < len(request.tools or ()):
        raise invalid("The functions in 'tools' must have different names.", "tools")
    choice = request.tool_choice
    if choice == "none":
        return {}
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in tools:
            raise invalid("'tool_choice' names a function that is not in 'tools'.", "tool_choice.function.name")
        return {choice.function.name: tools[choice.function.name]}
    if choice == "required" and not tools:
        raise invalid("'tool_choice' is 'required' but there are no 'tools'.", "tool_choice")
    return tools


def _functions(tools: Mapping[str, Tool], *, forced: bool = False) -> list[Function]:
    """What may be called. Calls that are forced are bound to their schemas, others only if the function says so."""
    return [
        Function(name, tool.function.parameters, bound=forced or bool(tool.function.strict))
        for name, tool in tools.items()
    ]


def _tool_parser(request: ChatCompletionRequest) -> ToolCallParser | None:
    if not request.tools:
        return None
    return ToolCallParser(
        {tool.function.name: tool.function.parameters for tool in request.tools},
        parallel=request.parallel_tool_calls is not False,
        report=request.tool_choice != "none",
    )


def _output_constraint(request: ChatCompletionRequest) -> tuple[str, str, Any] | None:
    """(field, kind, value) of the one constraint on the text, if there is one."""
    found = [*_from_response_format(request.response_format), *_from_structured_outputs(request.structured_outputs)]
    if len(found) > 1:
        raise invalid(f"'{found[0][0]}' and '{found[1][0]}' exclude each other.", found[1][0])
    return found[0] if found else None


def _from_response_format(given: ResponseFormat | None) -> list[tuple[str, str, Any]]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [("response_format", "json", {"type": "object"})]
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise invalid("'response_format.json_schema.schema' is missing.", "response_format.json_schema.schema")
    # A schema that demands nothing is how some front ends say "no schema".
    return [("response_format", "json", given.json_schema.schema_)] if given.json_schema.schema_ else []


def _from_structured_outputs(given: StructuredOutputs | None) -> list[tuple[str, str, Any]]:
    if given is None:
        return []
    if given.structural_tag is not None:
        raise unsupported("structured_outputs.structural_tag")
    found: list[tuple[str, str, Any]] = []
    if given.json_ is not None:
        found.append(("structured_outputs.json", "json", _schema_object(given.json_)))
    if given.regex is not None:
        found.append(("structured_outputs.regex", "regex", given.regex))
    if given.choice is not None:
        found.append(("structured_outputs.choice", "choice", given.choice))
    if given.grammar is not None:
        found.append(("structured_outputs.grammar", "lark", given.grammar))
    return found


def _schema_object(schema: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid("'structured_outputs.json' must be a JSON schema object.", "structured_outputs.json")
    check_nesting(value, "structured_outputs.json")
    return value


def _thinking_budget(request: ChatCompletionRequest) -> int | None:
    if request.thinking_token_budget is not None:
        return request.thinking_token_budget
    return _EFFORT_BUDGETS.get(request.reasoning_effort or "")


def variant(generation: GenerationRequest, index: int) -> GenerationRequest:
    """The generation of choice `index`: a fixed seed must not make all choices the same."""
    seed = generation.sampling.seed
    if seed is None or index == 0:
        return generation
    return replace(generation, sampling=replace(generation.sampling, seed=(seed + index) % 2**63))
