"""Structured output: JSON schemas, regular expressions, choices and forced tool calls as grammars over tokens.

Owns the translation to llguidance's grammars and nothing of when they apply. What the library cannot do is refused
with a 400 that repeats its reason, which names the keyword. The rules of tool calls are in `server.call_grammar`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import llguidance
import numpy as np

from engine.core import BoolArray
from engine.errors import RequestError
from server import call_grammar
from server.call_grammar import Function, UnboundError, lark_string
from server.errors import ApiError

# Raw text up to the closing tag; the tag itself belongs to the rule.
_RAW_TEXT = 'raw_text[suffix="\\n</parameter>"]: /(?s:.*)/'


# Characters that are read. Compiling takes time with the square of the length, or as long as the text allows.
_MAX_SCHEMA, _MAX_RULES, _MAX_LARK, _MAX_REGEX, _MAX_CHOICES = 1 << 17, 1 << 22, 1 << 15, 1 << 14, 1 << 20
_MAX_INTERSECTIONS = 6
# The compiler calls itself for every rule that leads to a rule, some 10 kB each; within the limits above that is at
# most 130 MB. An overflow would end the process.
_STACK_BYTES = 1 << 28


# How the compiler says that it gave up.
_TOO_LARGE = ("Too many items", "fuel", "too many expressions", "panic", "too big", "too large", "Current row has")

# The size of new stacks is one for all threads.
_STACK_SIZE = threading.Lock()


class Grammar:
    """A checked grammar. `matcher` starts one generation."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, prototype: llguidance.LLMatcher) -> None:
        self._tokenizer = tokenizer
        self._prototype = prototype

    def after(self, token_ids: Sequence[int]) -> Grammar | None:
        """The grammar of what may follow these tokens; None if nothing that fits begins with them."""
        prototype = self._prototype.deep_copy()
        fits = prototype.try_consume_tokens(list(token_ids)) == len(token_ids)
        return Grammar(self._tokenizer, prototype) if fits and not prototype.is_error() else None

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._prototype.deep_copy(), self._tokenizer.vocab_size)


class GrammarMatcher:
    """The state of one generation under a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> BoolArray:
        """Tokens that may come next, bool [vocab]. RequestError if the grammar became too complex to follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise _unfollowable(self._matcher)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Take one token in; RequestError if the grammar does not allow it."""
        if not self._matcher.consume_token(token_id):
            raise _unfollowable(self._matcher)


class GrammarCompiler:
    """Makes grammars for one tokenizer. Safe to use from several threads.

    tokenizer_json: the text of tokenizer.json; stop_token_ids: tokens that may end an answer;
    call_start, call_end: ids of the markers around a tool call.
    """

    def __init__(
        self,
        tokenizer_json: str,
        stop_token_ids: Iterable[int],
        *,
        call_start: Sequence[int],
        call_end: Sequence[int],
    ) -> None:
        self._source = tokenizer_json
        self._stop_token_ids = sorted(stop_token_ids)
        self._call_start = _lark_tokens(call_start)
        self._call_end = _lark_tokens(call_end)
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None

    def json_value(self, schema: Mapping[str, Any], param: str) -> Grammar:
        """Exactly one JSON value that fits `schema`."""
        try:
            call_grammar.check_expressions(schema)
            text = json.dumps(call_grammar.plain_schema(schema), ensure_ascii=False)
            _check_length(text, _MAX_SCHEMA, param)
        except UnboundError as error:
            raise _refusal(param, str(error)) from None
        return self._compile(llguidance.LLMatcher.grammar_from_json_schema(text, call_grammar.JSON_STYLE), param)

    def regex(self, pattern: str, param: str) -> Grammar:
        """Text that matches `pattern` as a whole (Rust regex syntax)."""
        _check_length(pattern, _MAX_REGEX, param)
        return self._compile(llguidance.LLMatcher.grammar_from_regex(pattern), param)

    def lark(self, text: str, param: str) -> Grammar:
        """Text of a Lark grammar, with llguidance's extensions."""
        _check_length(text, _MAX_LARK, param)
        try:
            _check_lark(text)
        except UnboundError as error:
            raise _refusal(param, str(error)) from None
        return self._compile(llguidance.LLMatcher.grammar_from_lark(text), param)

    def choice(self, options: Sequence[str], param: str) -> Grammar:
        """One of several texts."""
        # A terminal: thousands of alternatives in a rule are more than the parser follows.
        text = f"start: OPTION\nOPTION: {' | '.join(map(lark_string, options))}\n"
        _check_length(text, _MAX_CHOICES, param)
        return self._compile(llguidance.LLMatcher.grammar_from_lark(text), param)

    def tool_calls(
        self,
        functions: Sequence[Function],
        *,
        parallel: bool,
        or_text: bool = False,
        or_json: Mapping[str, Any] | None = None,
    ) -> Grammar:
        """Calls of `functions`, of the bound ones with arguments that fit their schemas; text or JSON instead if that
        is allowed."""
        calls = 'call ("\\n" call)*' if parallel else "call"
        start = calls
        rules = []
        if or_text:
            start = f"prose ({calls})?"
            rules.append("prose: /(?s:.*)/")
        elif or_json is not None:
            start = f"{calls} | json_answer"
            rules.append(f"json_answer: {_json_answer(or_json)}")
        names = [f"function_{index}" for index in range(len(functions))]
        lines = [
            f"start: {start}",
            f'call: {self._call_start} "\\n" ({" | ".join(names)}) "</function>\\n" {self._call_end}',
            *rules,
            _RAW_TEXT,
        ]
        for rule, function in zip(names, functions, strict=True):
            try:
                if function.bound and len(json.dumps(function.schema)) > _MAX_SCHEMA:
                    raise UnboundError(f"it is longer than {_MAX_SCHEMA} characters")
                lines += call_grammar.function_rules(rule, function)
            except UnboundError as error:
                raise call_grammar.refusal(function.name, str(error)) from None
        _check_length("\n".join(lines), _MAX_RULES, "tools")
        tokenizer = self._loaded()
        matcher = _matcher(tokenizer, llguidance.LLMatcher.grammar_from_lark("\n".join(lines) + "\n"))
        if matcher.is_error() or self._has_contradiction(lines):
            raise self._culprit(functions, or_json) or _refusal("tools", _reason(matcher))
        return Grammar(tokenizer, matcher)

    def _has_contradiction(self, lines: Iterable[str]) -> bool:
        """Whether a string must be several things of which it cannot be all: a call would get stuck there."""
        texts = {text for line in lines if (text := call_grammar.text_alone(line)) is not None}
        sources = [llguidance.LLMatcher.grammar_from_lark(text) for text in sorted(texts)]
        return any(_matcher(self._loaded(), source).is_error() for source in sources)

    def _culprit(self, functions: Sequence[Function], or_json: Mapping[str, Any] | None) -> ApiError | None:
        """The refusal that names what made a grammar of calls fail, if one part of it does so alone."""
        for function in functions:
            for key, value in call_grammar.named_parameters(function) if function.bound else ():
                lines = call_grammar.parameter_rules("start", function.schema or {}, key, value)
                source = llguidance.LLMatcher.grammar_from_lark("\n".join([*lines, _RAW_TEXT]) + "\n")
                matcher = _matcher(self._loaded(), source)
                if matcher.is_error():
                    return call_grammar.refusal(function.name, f"parameter '{key[:100]}': {_reason(matcher)}")
                if self._has_contradiction(lines):
                    reason = f"parameter '{key[:100]}': there is no text that fits all of its keywords"
                    return call_grammar.refusal(function.name, reason)
        if or_json is not None:
            try:
                self.json_value(or_json, "response_format")
            except ApiError as error:
                return error
        return None

    def _compile(self, source: str, param: str) -> Grammar:
        tokenizer = self._loaded()
        matcher = _matcher(tokenizer, source)
        if matcher.is_error():
            raise _refusal(param, _reason(matcher))
        return Grammar(tokenizer, matcher)

    def _loaded(self) -> llguidance.LLTokenizer:
        # A large vocabulary takes seconds to index, so only those pay who use grammars.
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer(self._source, eos_token=self._stop_token_ids)
            return self._tokenizer


def _check_lark(text: str) -> None:
    """UnboundError for grammars whose compilation might not end: its time doubles with each intersection."""
    bare = re.sub(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/', "", text)
    if bare.count("&") > _MAX_INTERSECTIONS:
        raise UnboundError(f"it has {bare.count('&')} intersections, at most {_MAX_INTERSECTIONS} are read")
    for found in re.finditer(r"%json\s*", text):
        with suppress(ValueError, RecursionError):  # the compiler says what is wrong
            call_grammar.check_expressions(json.JSONDecoder().raw_decode(text, found.end())[0])


def _check_length(text: str, most: int, param: str) -> None:
    if len(text) > most:
        raise _refusal(param, f"it has {len(text)} characters, at most {most} are read")


def _matcher(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """A matcher at its start, in error if `source` is no grammar or nothing fits it."""
    made: Future[llguidance.LLMatcher] = Future()

    def compile_it() -> None:
        try:
            made.set_result(_compiled(tokenizer, source))
        except BaseException as error:
            made.set_exception(error)

    with _STACK_SIZE:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=compile_it, name="fermion-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return made.result()


def _compiled(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
    if not matcher.is_error():
        # Some grammars turn out to be empty, or too large, only when the first token is looked for.
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        if probe.is_error():
            return probe
    return matcher


def _json_answer(schema: Mapping[str, Any]) -> str:
    try:
        call_grammar.check_expressions(schema)
        return call_grammar.json_grammar(call_grammar.plain_schema(schema))
    except UnboundError as error:
        raise _refusal("response_format", str(error)) from None


def _lark_tokens(ids: Sequence[int]) -> str:
    return " ".join(f"<[{token}]>" for token in ids)


def _refusal(param: str, reason: str) -> ApiError:
    text = f"'{param}' cannot be used to constrain the output: {reason[:500]}."
    return ApiError(400, text, code="unsupported_grammar", param=param)


def _unfollowable(matcher: llguidance.LLMatcher) -> RequestError:
    return RequestError(f"The grammar cannot be followed: {_reason(matcher)}.", code="grammar_error")


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher is in error, in one sentence of its own words, without its state and what only its callers know."""
    text = matcher.get_error().split("\n<state>")[0].strip()
    if "NoExtension" in text:
        return "there is no text that fits it"
    if any(words in text for words in _TOO_LARGE):
        return "it is too large, or repeats itself without an end"
    # Regular expressions: the expression with a mark below, and what is wrong in the last line.
    wrong = re.search(r"^error: (.*)", text, re.MULTILINE)
    if wrong is not None and "regex parse error" in text:
        expression = "".join(text[text.index("regex parse error") :].splitlines()[1:2]).strip()
        return f"in the regular expression {_as_given(expression)}: {wrong[1]}"
    line = text.splitlines()[0] if text else "unknown reason"
    invalid = re.search(r'invalid regex "(.*)"(?: \(in regex\))?: (.*?)(?:; \w+)? in regex /', line)
    if invalid is not None:
        expression = _as_given(invalid[1].replace("\\\\", "\\"))
        return f"in the regular expression {expression}: {invalid[2]}"
    line = re.sub(r"^(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?", "", line)
    if line.startswith("oneOf constraints"):
        return "'oneOf' has alternatives that may both fit"
    return line.rstrip(".")


def _as_given(expression: str) -> str:
    """An expression of a request without what `call_grammar` puts around it."""
    return re.sub(r"^\(\?:(?:\(\?s:\.\*\))?\(\?:(.*?)\)(?:\(\?s:\.\*\))?\)$", r"\1", expression)
