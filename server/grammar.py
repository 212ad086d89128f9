"""Structured output: JSON schemas, regular expressions, choices and forced tool calls as grammars over tokens.

Owns the translation to llguidance's grammars and nothing of when they apply. What the library cannot do is refused
with a 400 that repeats its reason, which names the keyword.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import llguidance
import numpy as np

from engine.core import BoolArray
from engine.errors import RequestError
from server.errors import ApiError
from server.toolcalls import parameter_types

# One line, spaced as models learnt it from json.dumps: free whitespace invites endless line breaks.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """A checked grammar. `matcher` starts one generation."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, prototype: llguidance.LLMatcher) -> None:
        self._prototype = prototype
        self._vocab_size = tokenizer.vocab_size

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._prototype.deep_copy(), self._vocab_size)


class GrammarMatcher:
    """The state of one generation under a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> BoolArray:
        """Tokens that may come next, bool [vocab]. RequestError if the grammar became too complex to follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RequestError(f"The grammar cannot be followed: {self._matcher.get_error()}", code="grammar_error")
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Take one token in; RequestError if the grammar does not allow it."""
        if not self._matcher.consume_token(token_id):
            raise RequestError(f"The grammar cannot be followed: {self._matcher.get_error()}", code="grammar_error")


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
        return self._compile(llguidance.LLMatcher.grammar_from_json_schema(_schema_text(schema), _JSON_STYLE), param)

    def regex(self, pattern: str, param: str) -> Grammar:
        """Text that matches `pattern` as a whole (Rust regex syntax)."""
        return self._compile(llguidance.LLMatcher.grammar_from_regex(pattern), param)

    def lark(self, text: str, param: str) -> Grammar:
        """Text of a Lark grammar, with llguidance's extensions."""
        return self._compile(llguidance.LLMatcher.grammar_from_lark(text), param)

    def choice(self, options: Sequence[str], param: str) -> Grammar:
        """One of several texts."""
        return self.lark(f"start: {' | '.join(map(_lark_string, options))}\n", param)

    def tool_calls(
        self,
        functions: Mapping[str, Mapping[str, Any] | None],
        *,
        parallel: bool,
        or_text: bool = False,
        or_json: Mapping[str, Any] | None = None,
    ) -> Grammar:
        """Calls of `functions` with arguments that fit their schemas; text or JSON instead if that is allowed."""
        calls = 'call ("\\n" call)*' if parallel else "call"
        start = calls
        rules = []
        if or_text:
            start = f"prose ({calls})?"
            rules.append("prose: /(?s:.*)/")
        elif or_json is not None:
            start = f"{calls} | json_answer"
            rules.append(f"json_answer: {_lark_json(or_json)}")
        names = [f"function_{index}" for index in range(len(functions))]
        lines = [
            f"start: {start}",
            f'call: {self._call_start} "\\n" ({" | ".join(names)}) "</function>\\n" {self._call_end}',
            *rules,
            # Raw text up to the closing tag; the tag itself belongs to the rule.
            'raw_text[suffix="\\n</parameter>"]: /(?s:.*)/',
        ]
        for rule, (name, schema) in zip(names, functions.items(), strict=True):
            lines += _function_rules(rule, name, schema or {})
        return self._compile(llguidance.LLMatcher.grammar_from_lark("\n".join(lines) + "\n"), "tools")

    def _compile(self, source: str, param: str) -> Grammar:
        tokenizer = self._loaded()
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ApiError(
                400,
                f"'{param}' cannot be used to constrain the output: {_first_line(matcher.get_error())}",
                code="unsupported_grammar",
                param=param,
            )
        return Grammar(tokenizer, matcher)

    def _loaded(self) -> llguidance.LLTokenizer:
        # A large vocabulary takes seconds to index, so only those pay who use grammars.
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer(self._source, eos_token=self._stop_token_ids)
            return self._tokenizer


def _function_rules(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Grammar rules of one function: its parameters in the order of the schema, required ones obligatory."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = set(required) if isinstance(required, list) else set()
    parts = [_lark_string(f"<function={name}>\n")]
    rules: list[str] = []
    for index, (key, value) in enumerate(properties.items()):
        parameter = f"{rule}_{index}"
        parts.append(parameter if key in required else f"{parameter}?")
        opening = _lark_string(f"<parameter={key}>\n")
        if "string" in parameter_types(schema, key):
            options = value.get("enum") if isinstance(value, Mapping) else None
            if isinstance(options, list) and options and all(isinstance(option, str) for option in options):
                texts = " | ".join(_lark_string(f"{option}\n</parameter>\n") for option in options)
                rules.append(f"{parameter}: {opening} ({texts})")
            else:
                rules.append(f'{parameter}: {opening} raw_text "\\n"')
        else:
            definitions = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
            rules.append(f'{parameter}: {opening} {_lark_json({**definitions, **value})} "\\n</parameter>\\n"')
    return [f"{rule}: {' '.join(parts)}", *rules]


def _lark_tokens(ids: Sequence[int]) -> str:
    return " ".join(f"<[{token}]>" for token in ids)


def _lark_string(text: str) -> str:
    """A quoted Lark string; its escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _lark_json(schema: Mapping[str, Any]) -> str:
    return f"%json {_schema_text({**schema, 'x-guidance': _JSON_STYLE})}"


def _schema_text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:500] if text.strip() else "unknown reason"
