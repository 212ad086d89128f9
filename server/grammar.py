"""Structured output: JSON schemas, regular expressions, choices and forced tool calls as grammars over tokens.

Owns the translation to llguidance's grammars and nothing of when they apply. What the library cannot do is refused
with a 400 that repeats its reason, which names the keyword. The rules of tool calls are in `server.call_grammar`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
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
            text = json.dumps(call_grammar.plain_schema(schema), ensure_ascii=False)
        except UnboundError as error:
            raise _refusal(param, str(error)) from None
        return self._compile(llguidance.LLMatcher.grammar_from_json_schema(text, call_grammar.JSON_STYLE), param)

    def regex(self, pattern: str, param: str) -> Grammar:
        """Text that matches `pattern` as a whole (Rust regex syntax)."""
        return self._compile(llguidance.LLMatcher.grammar_from_regex(pattern), param)

    def lark(self, text: str, param: str) -> Grammar:
        """Text of a Lark grammar, with llguidance's extensions."""
        return self._compile(llguidance.LLMatcher.grammar_from_lark(text), param)

    def choice(self, options: Sequence[str], param: str) -> Grammar:
        """One of several texts."""
        # A terminal: thousands of alternatives in a rule are more than the parser follows.
        return self.lark(f"start: OPTION\nOPTION: {' | '.join(map(lark_string, options))}\n", param)

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
                lines += call_grammar.function_rules(rule, function)
            except UnboundError as error:
                raise call_grammar.refusal(function.name, str(error)) from None
        tokenizer = self._loaded()
        matcher = _matcher(tokenizer, llguidance.LLMatcher.grammar_from_lark("\n".join(lines) + "\n"))
        if matcher.is_error() or self._has_contradiction(lines):
            raise self._culprit(functions, or_json) or _refusal("tools", _reason(matcher))
        return Grammar(tokenizer, matcher)

    def _has_contradiction(self, lines: Iterable[str]) -> bool:
        """Whether a string must be several things of which it cannot be all: a call would get stuck there."""
        texts = (call_grammar.text_alone(line) for line in lines)
        sources = [llguidance.LLMatcher.grammar_from_lark(text) for text in texts if text is not None]
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


def _matcher(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """A matcher at its start, in error if `source` is no grammar or nothing fits it."""
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
    if "Too many items" in text or "fuel exhausted" in text or "too many expressions" in text:
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
