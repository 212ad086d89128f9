"""The model family's one tool-call syntax, and its translation to OpenAI tool calls.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE, raw, may span lines, no escaping
    </parameter>
    </function>
    </tool_call>

Strings stand raw, everything else as JSON. Exactly one line break is stripped from each side of a value. What type
a value has is decided by the function's JSON schema, never by its looks alone: a declared string stays a string.
The parser is incremental: arguments of declared strings stream while they are produced.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"

# What may open a call, in full and as a beginning that more text can complete.
_OPENING = re.compile(r"<tool_call>\s*<function=([^<>\n]+)>")
_OPENING_BEGIN = re.compile(r"<tool_call>\s*(?:<function=[^<>\n]*)?$")
_BARE_OPENING = re.compile(r"(?:\A|(?<=\n))<function=([^<>\n]+)>")
_PARAMETER_HEAD = re.compile(r"<parameter=([^<>\n]+)>")
_AFTER_VALUE = re.compile(r"\s*(?:<parameter=|</function>|</tool_call>)")
# Schemas within schemas that are looked into for the type of a parameter.
_MAX_DEPTH = 16
_AFTER_VALUE_WORDS = (_PARAMETER, _FUNCTION_END, CALL_END)

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call. `call_id` and `name` come once, with the first piece; `arguments` pieces join to JSON."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


class ToolCallParser:
    """Splits answer text into prose and calls, incrementally.

    functions: name -> JSON schema of its parameters (None: anything); parallel: whether more than one call is wanted;
    report: False drops the calls (tool_choice "none"), so that no markup reaches the text.
    """

    def __init__(
        self, functions: Mapping[str, Mapping[str, Any] | None], *, parallel: bool = True, report: bool = True
    ) -> None:
        self._functions = functions
        self._parallel = parallel
        self._report = report
        self._buffer = ""
        self._step = self._prose
        self._at_line_start = True
        self._name = ""
        self._key = ""
        self._schema: Mapping[str, Any] | None = None
        self._is_string = False
        self._value_begun = False
        self._parameters = 0
        self.count = 0
        self.finished = False

    @property
    def reported(self) -> int:
        """Calls that the client has been told of."""
        return self.count if self._report else 0

    def feed(self, text: str) -> list[str | ToolCallDelta]:
        """Prose and call pieces that `text` makes certain."""
        pieces: list[str | ToolCallDelta] = []
        if self.finished:
            return pieces
        self._buffer += text
        while not self.finished and self._step(pieces):
            pass
        return pieces

    def finish(self, *, truncated: bool) -> list[str | ToolCallDelta]:
        """Release what is held. A call that the model left open is closed, unless generation was cut off."""
        pieces: list[str | ToolCallDelta] = []
        if self.finished:
            return pieces
        step = self._step
        if step == self._prose:
            if self._buffer:
                pieces.append(self._buffer)
        elif step == self._value:
            self._finish_value(pieces, truncated)
        elif step == self._body and not truncated:
            self._close_call(pieces)
        self._buffer = ""
        self.finished = True
        return pieces

    # Each step consumes from the buffer and says whether it made progress; False waits for more text.

    def _prose(self, pieces: list[str | ToolCallDelta]) -> bool:
        text = self._buffer
        if self.count and self._at_line_start:
            text = self._buffer = text.lstrip()
        match = _OPENING.search(text)
        bare = self._bare_opening(text)
        if bare is not None and (match is None or bare.start() < match.start()):
            match = bare
        if match is not None:
            prose = text[: match.start()].rstrip()
            if prose:
                pieces.append(prose)
            self._buffer = text[match.end() :]
            self._open_call(match.group(1).strip(), pieces)
            return True
        keep = self._prose_tail(text)
        shown = text[:keep]
        # Blank before a call is the template's, so it waits until it is known what follows.
        blank = len(shown.rstrip())
        shown, self._buffer = text[:blank], text[blank:]
        if shown:
            pieces.append(shown)
            self._at_line_start = False
        return False

    def _bare_opening(self, text: str) -> re.Match[str] | None:
        """A call whose `<tool_call>` is missing: believed only for declared names at the start of a line."""
        for match in _BARE_OPENING.finditer(text):
            at_start = match.start() > 0 or self._at_line_start
            if at_start and match.group(1).strip() in self._functions:
                return match
        return None

    def _prose_tail(self, text: str) -> int:
        """Where the tail begins that may still become the opening of a call."""
        start = text.find("<")
        while start >= 0:
            tail = text[start:]
            if CALL_START.startswith(tail) or _OPENING_BEGIN.match(tail) or self._may_open_bare(text, start):
                return start
            if tail.startswith(CALL_START) and _FUNCTION.startswith(tail[len(CALL_START) :].lstrip()):
                return start
            start = text.find("<", start + 1)
        return len(text)

    def _may_open_bare(self, text: str, start: int) -> bool:
        if not (text[start - 1] == "\n" if start else self._at_line_start):
            return False
        tail = text[start:]
        return any(f"{_FUNCTION}{name}>".startswith(tail) for name in self._functions)

    def _open_call(self, name: str, pieces: list[str | ToolCallDelta]) -> None:
        self._name = name
        self._parameters = 0
        self.count += 1
        self._emit(pieces, "", opening=True)
        self._step = self._body

    def _body(self, pieces: list[str | ToolCallDelta]) -> bool:
        text = self._buffer
        head = _PARAMETER_HEAD.search(text)
        ends = [position for word in (_FUNCTION_END, CALL_END) if (position := text.find(word)) >= 0]
        end = min(ends, default=-1)
        if head is not None and not 0 <= end < head.start():
            self._buffer = text[head.end() :]
            self._open_parameter(head.group(1).strip(), pieces)
            return True
        if end >= 0:
            self._buffer = text[end:].removeprefix(_FUNCTION_END)
            self._close_call(pieces)
            return True
        return False

    def _open_parameter(self, key: str, pieces: list[str | ToolCallDelta]) -> None:
        self._key = key
        self._schema = self._functions.get(self._name)
        types = parameter_types(self._schema, key)
        self._is_string = types == {"string"}
        self._value_begun = False
        lead = "{" if self._parameters == 0 else ", "
        self._parameters += 1
        self._emit(pieces, f"{lead}{_dumps(key)}: " + ('"' if self._is_string else ""))
        self._step = self._value

    def _value(self, pieces: list[str | ToolCallDelta]) -> bool:
        if not self._value_begun:
            if not self._buffer:
                return False
            self._buffer = self._buffer.removeprefix("\n")
            self._value_begun = True
        start = self._buffer.find(_PARAMETER_END)
        while start >= 0:
            after = self._buffer[start + len(_PARAMETER_END) :]
            if _AFTER_VALUE.match(after):
                self._close_parameter(self._buffer[:start].removesuffix("\n"), pieces)
                self._buffer = after
                return True
            rest = after.lstrip()
            if any(word.startswith(rest) for word in _AFTER_VALUE_WORDS):
                break
            start = self._buffer.find(_PARAMETER_END, start + 1)
        if self._is_string:
            # All but a possible end: a line break and whatever may still become the closing tag.
            keep = start if start >= 0 else len(self._buffer) - _overlap(self._buffer, _PARAMETER_END)
            if keep > 0 and self._buffer[keep - 1] == "\n":
                keep -= 1
            if keep > 0:
                self._emit(pieces, _dumps(self._buffer[:keep])[1:-1])
                self._buffer = self._buffer[keep:]
        return False

    def _close_parameter(self, rest: str, pieces: list[str | ToolCallDelta]) -> None:
        if self._is_string:
            self._emit(pieces, _dumps(rest)[1:])
        else:
            self._emit(pieces, _dumps(typed_value(rest, self._schema, self._key)))
        self._step = self._body

    def _finish_value(self, pieces: list[str | ToolCallDelta], truncated: bool) -> None:
        if not truncated:
            rest = self._buffer.removeprefix("" if self._value_begun else "\n")
            closing = rest.rfind(_PARAMETER_END)
            rest = rest[: closing if closing >= 0 else len(rest) - _overlap(rest, _PARAMETER_END)]
            self._close_parameter(rest.removesuffix("\n"), pieces)
            self._close_call(pieces)
        elif self._is_string and self._buffer:
            self._emit(pieces, _dumps(self._buffer)[1:-1])

    def _close_call(self, pieces: list[str | ToolCallDelta]) -> None:
        self._emit(pieces, "}" if self._parameters else "{}")
        self._step = self._after_call
        if not self._parallel:
            self.finished = True

    def _after_call(self, pieces: list[str | ToolCallDelta]) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(CALL_END):
            text = text[len(CALL_END) :]
        elif CALL_END.startswith(text):
            return False
        self._buffer = text
        self._at_line_start = True
        self._step = self._prose
        return True

    def _emit(self, pieces: list[str | ToolCallDelta], arguments: str, *, opening: bool = False) -> None:
        if not self._report:
            return
        index = self.count - 1
        if opening:
            pieces.append(ToolCallDelta(index, new_call_id(), self._name, arguments))
        elif pieces and isinstance(last := pieces[-1], ToolCallDelta) and last.index == index:
            pieces[-1] = ToolCallDelta(index, last.call_id, last.name, last.arguments + arguments)
        else:
            pieces.append(ToolCallDelta(index, None, None, arguments))


def new_call_id() -> str:
    """A fresh call id; unique across the calls of all answers."""
    return f"call_{secrets.token_hex(12)}"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `word`."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if word.startswith(text[-length:]):
            return length
    return 0


def parameter_types(schema: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """JSON types that the schema of a function's parameters allows for parameter `key`."""
    if schema is None:
        return JSON_TYPES
    root = schema
    properties = resolve(schema, root).get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return JSON_TYPES
    return _types(properties[key], root, {}, 0)


def resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow local references (`#/$defs/name`); a broken one allows anything."""
    for _ in range(16):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = pointed(reference, root)
    return {}


def pointed(reference: str, root: Mapping[str, Any]) -> Any:
    """What a local reference points to; None: nothing, or it is not local."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


def _types(schema: Any, root: Mapping[str, Any], known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    """JSON types that `schema` allows. known: results by identity: references make short schemas endlessly wide."""
    if depth > _MAX_DEPTH:
        return JSON_TYPES
    here = resolve(schema, root)
    if id(here) in known:
        return known[id(here)]
    # What refers to itself allows, by that, anything.
    known[id(here)] = allowed = JSON_TYPES
    declared = here.get("type")
    if isinstance(declared, str):
        allowed = frozenset({declared})
    elif isinstance(declared, Sequence):
        allowed = frozenset(name for name in declared if isinstance(name, str))
    for word in ("anyOf", "oneOf"):
        branches = here.get(word)
        if isinstance(branches, Sequence) and not isinstance(branches, str) and branches:
            allowed &= frozenset().union(*(_types(branch, root, known, depth + 1) for branch in branches))
    parts = here.get("allOf")
    for branch in parts if isinstance(parts, list) else ():
        allowed &= _types(branch, root, known, depth + 1)
    if isinstance(values := here.get("enum"), Sequence) and not isinstance(values, str):
        allowed &= frozenset().union(*(json_types(value) for value in values))
    elif "const" in here:
        allowed &= json_types(here["const"])
    if here.get("nullable") is True:
        allowed |= {"null"}
    known[id(here)] = allowed or JSON_TYPES
    return known[id(here)]


def json_types(value: Any) -> frozenset[str]:
    """The JSON types that describe a value; an integer is a number too."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"integer", "number"} if value.is_integer() else {"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array"} if isinstance(value, Sequence) else {"object"})


# How a model that has read much Python writes these.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def typed_value(text: str, schema: Mapping[str, Any] | None, key: str) -> Any:
    """The value of a parameter's raw text by its schema.

    Text that fits no allowed type stays text: the caller's own validation will say so, and nothing is lost.
    """
    return read_value(text, parameter_types(schema, key))


def read_value(text: str, allowed: frozenset[str]) -> Any:
    """`typed_value` where these types are allowed."""
    if allowed == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        word = text.strip()
        if "string" in allowed or word not in _PYTHON_WORDS:
            return text
        value = _PYTHON_WORDS[word]
    if isinstance(value, str):
        # JSON quotes around a string are part of a raw string, unless only an enumeration of strings can be meant.
        return text if "string" in allowed else value
    if not json_types(value) & allowed:
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in allowed and "number" not in allowed:
        return int(value)
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def decode_arguments(arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of a call in the history as the object that the template wants.

    Text that is no JSON object still renders, under one name: refusing it would lock an agent into an error loop.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return dict(arguments)
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}
