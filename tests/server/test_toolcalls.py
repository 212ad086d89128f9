"""The tool-call syntax, in one piece and cut everywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.toolcalls import ToolCallDelta, ToolCallParser, decode_arguments, parameter_types, typed_value


def call(name: str, **parameters: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


FUNCTIONS: dict[str, Any] = {
    "write": schema(path={"type": "string"}, content={"type": "string"}),
    "now": schema(),
    "set": schema(n={"type": "integer"}, flag={"type": "boolean"}),
    "free": None,
}


def parse(text: str, size: int, *, truncated: bool = False, **settings: Any) -> tuple[str, list[tuple[str, str]]]:
    """Prose and calls of `text`, fed in pieces of `size` characters."""
    parser = ToolCallParser(FUNCTIONS, **settings)
    prose, names, arguments, ids = "", [], [], []
    pieces = [piece for start in range(0, len(text), size) for piece in parser.feed(text[start : start + size])]
    for piece in [*pieces, *parser.finish(truncated=truncated)]:
        if isinstance(piece, str):
            prose += piece
            continue
        if piece.call_id is not None:
            assert piece.index == len(names)
            ids.append(piece.call_id)
            names.append(piece.name or "")
            arguments.append("")
        arguments[piece.index] += piece.arguments
    assert len(set(ids)) == len(ids)
    return prose, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize(
    ("text", "prose", "calls"),
    [
        ("plain text", "plain text", []),
        (call("now"), "", [("now", {})]),
        ("Let me see.\n\n" + call("now"), "Let me see.", [("now", {})]),
        (
            call("write", path="a", content="b") + "\n" + call("now"),
            "",
            [("write", {"path": "a", "content": "b"}), ("now", {})],
        ),
        (
            call("write", path="a}b", content='say "hi"\\n {'),
            "",
            [("write", {"path": "a}b", "content": 'say "hi"\\n {'})],
        ),
        (call("write", content="    if x:\n"), "", [("write", {"content": "    if x:\n"})]),
        (call("write", content="\n\nx\n\n"), "", [("write", {"content": "\n\nx\n\n"})]),
        (call("write", content=""), "", [("write", {"content": ""})]),
        (call("write", content="é🦊\ttab"), "", [("write", {"content": "é🦊\ttab"})]),
        (call("write", content="a\n</parameter>\nb"), "", [("write", {"content": "a\n</parameter>\nb"})]),
        (
            call("write", content="<parameter=x>\n</function>"),
            "",
            [("write", {"content": "<parameter=x>\n</function>"})],
        ),
        (call("set", n="5", flag="True"), "", [("set", {"n": 5, "flag": True})]),
        (call("free", a="5", b="text", c="[1, 2]"), "", [("free", {"a": 5, "b": "text", "c": [1, 2]})]),
        (call("unknown", a="x"), "", [("unknown", {"a": "x"})]),
        ("<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
        ("First:\n<function=now>\n</function>", "First:", [("now", {})]),
        ("use <tool_call> to call", "use <tool_call> to call", []),
        ("a <tool_call>\n<tool", "a <tool_call>\n<tool", []),
        ("inline <function=now> is prose", "inline <function=now> is prose", []),
        ("<function=other>\nx", "<function=other>\nx", []),
        (call("now") + "\n\nDone.", "Done.", [("now", {})]),
        ("trailing blank \n\n", "trailing blank \n\n", []),
        (call("write", path="a").removesuffix("\n</tool_call>"), "", [("write", {"path": "a"})]),
        ("<tool_call>\n<function=write>\n<parameter=path>\nabc\n", "", [("write", {"path": "abc"})]),
        ("<tool_call>\n<function=write>\n<parameter=path>\nabc\n</parameter>", "", [("write", {"path": "abc"})]),
    ],
)
def test_parse_does_not_depend_on_cuts(text: str, prose: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    for size in (1, 2, 3, 5, 7, 11, len(text)):
        got_prose, got = parse(text, size)
        assert (got_prose, [(name, json.loads(arguments)) for name, arguments in got]) == (prose, calls), size


def test_string_arguments_stream() -> None:
    parser = ToolCallParser(FUNCTIONS)
    deltas = [d for c in call("write", path="p", content="word " * 50) for d in parser.feed(c)]
    assert sum(isinstance(delta, ToolCallDelta) for delta in deltas) > 100


def test_identity_is_sent_once() -> None:
    parser = ToolCallParser(FUNCTIONS)
    deltas = [d for c in call("write", path="p") for d in parser.feed(c) if isinstance(d, ToolCallDelta)]
    assert [bool(d.call_id) for d in deltas] == [True] + [False] * (len(deltas) - 1)
    assert [bool(d.name) for d in deltas] == [True] + [False] * (len(deltas) - 1)


def test_truncated_call_stays_open() -> None:
    _, calls = parse("<tool_call>\n<function=write>\n<parameter=path>\nab", 1, truncated=True)
    assert calls == [("write", '{"path": "ab')]


def test_suppressed_calls_leave_no_markup() -> None:
    assert parse("Sure.\n\n" + call("now") + "\n", 1, report=False) == ("Sure.", [])


REFERENCED = {
    "type": "object",
    "$defs": {"Point": {"type": "object"}},
    "properties": {
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "o": {"$ref": "#/$defs/Point"},
        "i": {"type": ["integer", "null"]},
        "zip": {"type": "string"},
        "ns": {"type": ["string", "null"]},
        "e": {"enum": ["a", "b"]},
        "mixed": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "x": {"type": "number"},
        "nb": {"type": "boolean", "nullable": True},
        "any": {},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("n", "5", 5),
        ("n", "null", None),
        ("o", '{"x": 1}', {"x": 1}),
        ("i", "7", 7),
        ("i", "None", None),
        ("i", "5.0", 5),
        ("zip", "03106", "03106"),
        ("zip", "true", "true"),
        ("zip", "1e3", "1e3"),
        ("zip", "null", "null"),
        ("ns", "null", None),
        ("ns", "abc", "abc"),
        ("e", "a", "a"),
        ("mixed", "5", 5),
        ("mixed", "five", "five"),
        ("x", "2", 2),
        ("x", "2.5", 2.5),
        ("x", "NaN", "NaN"),
        ("nb", "null", None),
        ("any", "03106", "03106"),
        ("any", '"quoted"', '"quoted"'),
        ("undeclared", "12", 12),
        ("i", "not a number", "not a number"),
    ],
)
def test_values_follow_the_schema(key: str, text: str, value: Any) -> None:
    got = typed_value(text, REFERENCED, key)
    assert got == value
    assert type(got) is type(value)


def test_circular_reference_ends() -> None:
    circular = {"properties": {"a": {"$ref": "#/properties/a"}, "b": {"anyOf": [{"$ref": "#/properties/b"}]}}}
    assert "string" in parameter_types(circular, "a")
    assert "string" in parameter_types(circular, "b")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("[1]", {"arguments": [1]}),
    ],
)
def test_history_arguments_become_objects(given: Any, expected: dict[str, Any]) -> None:
    assert decode_arguments(given) == expected
