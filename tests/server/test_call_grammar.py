"""Bound tool calls: which raw texts a parameter's schema lets through, what they become, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine.tokenizer import Tokenizer
from server.call_grammar import Function
from server.errors import ApiError
from server.grammar import Grammar, GrammarCompiler
from server.toolcalls import ToolCallParser, parameter_types

CHECKPOINT = Path(__file__).parents[2] / "engine" / "demo" / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(CHECKPOINT)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(
        (CHECKPOINT / "tokenizer.json").read_text("utf-8"),
        [tokenizer.added_tokens["<|im_end|>"]],
        call_start=tokenizer.encode("<tool_call>", allow_special=True),
        call_end=tokenizer.encode("</tool_call>", allow_special=True),
    )


def call_text(arguments: Sequence[tuple[str, str]]) -> str:
    values = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments)
    return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"


def allows(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar lets a model write `text` and end there."""
    matcher = grammar.matcher()
    for token in tokenizer.encode(text, allow_special=True):
        if not matcher.allowed()[token]:
            return False
        matcher.accept(token)
    return bool(matcher.allowed()[tokenizer.added_tokens["<|im_end|>"]])


def parsed(schema: dict[str, Any], text: str) -> Any:
    parser = ToolCallParser({"f": schema})
    pieces = parser.feed(text) + parser.finish(truncated=False)
    return json.loads("".join(piece.arguments for piece in pieces if not isinstance(piece, str)))


def arguments_of(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}, "required": ["a"], **more}


COLOR = {"$defs": {"color": {"type": "string", "enum": ["red", "blue"]}}}


@pytest.mark.parametrize(
    ("schema", "fits", "misfits"),
    [
        (arguments_of({"type": "string"}), {"any </b> text": "any </b> text", "": "", "5": "5"}, []),
        (arguments_of({"$ref": "#/$defs/color"}, **COLOR), {"red": "red", "blue": "blue"}, ["green", "re", "redd"]),
        (arguments_of({"allOf": [{"$ref": "#/$defs/color"}]}, **COLOR), {"red": "red"}, ["green"]),
        (arguments_of({"enum": [f"value {number}" for number in range(3000)]}),
         {"value 0": "value 0", "value 2999": "value 2999"}, ["value", "value 3000"]),
        (arguments_of({"const": "only"}), {"only": "only"}, ["onl", "other"]),
        (arguments_of({"enum": ["x", 1, None, "null"]}), {"x": "x", "1": 1, "null": None}, ["y", "2", "x "]),
        (arguments_of({"type": ["string", "null"], "enum": ["x", None]}), {"x": "x", "null": None}, ["None", "y"]),
        (arguments_of({"type": "string", "pattern": "^[a-z]{2}$"}), {"ab": "ab"}, ["a", "abc", "a1"]),
        (arguments_of({"type": "string", "pattern": "b+|^x/y$"}), {"abba": "abba", "x/y": "x/y"}, ["a", "x/yz"]),
        (arguments_of({"type": "string", "pattern": "^a\\$"}), {"a$": "a$", "a$b": "a$b"}, ["a", "ba$"]),
        (arguments_of({"type": "string", "minLength": 2, "maxLength": 3}), {"ab": "ab", "üüü": "üüü"}, ["a", "abcd"]),
        (arguments_of({"type": "string", "maxLength": 4000}), {"word " * 300: "word " * 300}, ["word " * 801]),
        (arguments_of({"type": "string", "format": "date"}), {"2024-02-28": "2024-02-28"}, ["2024-02-30", "soon"]),
        (arguments_of({"type": "string", "format": "path"}), {"/any where": "/any where"}, []),
        (arguments_of({"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]}),
         {"null": None, "nul": "nul", "nope": "nope"}, ["None", "longer"]),
        (arguments_of({"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "integer", "minimum": 5}]}),
         {"x": "x", "7": 7}, ["3", "y"]),
        (arguments_of({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/m"}]}, **{"$defs": {"m": {
            "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}),
         {'{"x": 1}': {"x": 1}, "words": "words"}, ['{"x": "1"}', "[1]"]),
        (arguments_of({"oneOf": [{"const": "p"}, {"const": "q"}]}), {"q": "q"}, ["r"]),
        (arguments_of({"type": "string", "nullable": True}), {"null": None, "x": "x"}, []),
        (arguments_of({"type": "integer", "minimum": 3, "maximum": 5}), {"4": 4}, ["6", "x"]),
        ({"$ref": "#/$defs/r", "$defs": {"r": arguments_of({"type": "integer"})}}, {"4": 4}, ["x"]),
        (arguments_of({"$ref": "#/properties/b"}) | {"properties": {"a": {"$ref": "#/properties/b"}, "b": {
            "type": "integer", "maximum": 5}}}, {"4": 4}, ["6"]),
        ({"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}}, {"4": 4}, ["x"]),
    ],
)  # fmt: skip
def test_arguments_are_bound(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], fits: dict[str, Any], misfits: list[str]
) -> None:
    grammar = compiler.tool_calls([Function("f", schema, bound=True)], parallel=False)
    for text, value in fits.items():
        assert allows(grammar, tokenizer, call_text([("a", text)])), text
        # A declared mixture is read by the whole of its schema; the root reference is resolved by the parser, too.
        assert parsed(schema, call_text([("a", text)])) == {"a": value}
    for text in misfits:
        assert not allows(grammar, tokenizer, call_text([("a", text)])), text
    assert not allows(grammar, tokenizer, call_text([]))


def test_an_end_that_comes_too_early_is_not_read_as_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = arguments_of({"type": "string", "minLength": 5})
    grammar = compiler.tool_calls([Function("f", schema, bound=True)], parallel=False)
    early = call_text([("a", "ab")])
    late = call_text([("a", "abcde")])
    assert allows(grammar, tokenizer, late)
    for text in (early, early + late, early.replace("\n</parameter>", "</parameter>") + late):
        assert not allows(grammar, tokenizer, text)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (arguments_of({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (arguments_of({"type": "string", "not": {"const": "x"}}), "'not'"),
        (arguments_of({"type": "string", "pattern": "(?=a)b"}), "(?=a)b"),
        (arguments_of({"type": "string", "pattern": "\\bfoo"}), "\\bfoo"),
        (arguments_of({"type": "string", "minLength": 5, "maxLength": 4}), "minLength"),
        (arguments_of({"type": "string", "maxLength": "4"}), "maxLength"),
        (arguments_of({"type": "string", "maxLength": 3, "pattern": "null"}), "all of its keywords"),
        (arguments_of({"type": "string", "pattern": "^x", "format": "uuid"}), "all of its keywords"),
        (arguments_of({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}), "oneOf"),
        (arguments_of({"enum": []}), "no value"),
        (arguments_of({"enum": {"a": 1}}), "enum"),
        (arguments_of({"allOf": 5}), "allOf"),
        (arguments_of({"type": {}}), "type"),
        (arguments_of({"$ref": "#/$defs/none"}), "#/$defs/none"),
        (arguments_of({"$ref": 5}), "'$ref' must be a string"),
        (arguments_of({"type": "object", "minProperties": 3}), "minProperties"),
        (arguments_of({"type": "integer"}, minProperties=2), "minProperties"),
        (arguments_of({"type": "integer"}, maxProperties=0), "maxProperties"),
        (arguments_of(False), "required"),
        (arguments_of([]), "parameter 'a'"),
        ({"type": "object", "properties": {}, "required": ["z"], "additionalProperties": False}, "'z'"),
        ({"type": "object", "properties": {}, "required": [{}]}, "required"),
        ({"type": "object", "properties": []}, "properties"),
        ({"type": "array"}, "array"),
        ({"anyOf": [arguments_of({"type": "integer"})]}, "anyOf"),
        ({"type": "object", "properties": {"b>c": {"type": "integer"}}}, "b>c"),
    ],
)
def test_what_cannot_be_bound_is_refused_by_name(compiler: GrammarCompiler, schema: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError) as caught:
        compiler.tool_calls([Function("f", schema, bound=True)], parallel=False)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_grammar", "tools")
    assert "'f'" in str(caught.value)
    assert named in str(caught.value)


def test_unbound_functions_take_anything(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    unbound = Function("f", arguments_of({"type": "array", "uniqueItems": True}), bound=False)
    bound = Function("g", arguments_of({"type": "integer"}), bound=True)
    grammar = compiler.tool_calls([unbound, bound], parallel=True, or_text=True)
    free = call_text([("a", "what it wants"), ("undeclared", "1")])
    assert allows(grammar, tokenizer, "Look:\n" + free)
    assert allows(grammar, tokenizer, call_text([]))
    assert allows(grammar, tokenizer, call_text([("a", "1")]).replace("=f>", "=g>"))
    assert not allows(grammar, tokenizer, free.replace("=f>", "=g>"))


@pytest.mark.parametrize("leaf", [False, {"type": "string"}, {"$ref": "#/$defs/l0"}])
def test_short_schemas_of_endless_width_cost_nothing(compiler: GrammarCompiler, leaf: Any) -> None:
    """Ten to the fourteenth ways lead to the leaf; whoever walks them all never comes back."""
    levels = {f"l{level}": {"anyOf": [{"$ref": f"#/$defs/l{level + 1}"}] * 10} for level in range(14)}
    schema = arguments_of({"$ref": "#/$defs/l0"}, **{"$defs": {**levels, "l14": leaf}})
    assert parameter_types(schema, "a")
    with pytest.raises(ApiError, match="cannot be bound"):
        compiler.tool_calls([Function("f", schema, bound=True)], parallel=False)


def chain(length: int, link: str) -> dict[str, Any]:
    """A schema that leads over `length` definitions to an integer."""
    links = {f"l{number}": json.loads(link.replace("NEXT", f"#/$defs/l{number + 1}")) for number in range(length)}
    return {"$ref": "#/$defs/l0", "$defs": {**links, f"l{length}": {"type": "integer"}}}


MANY_PATTERNS = {"allOf": [{"type": "string", "pattern": "a" * number} for number in range(1, 31)]}


def chain_of_patterns(length: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for number in range(length):
        schema = {"pattern": "a" * number, "allOf": [schema]}
    return schema


@pytest.mark.parametrize(
    ("link", "length"),
    [('{"$ref": "NEXT"}', 3600), ('{"items": {"$ref": "NEXT"}}', 2700), ('{"anyOf": [{"$ref": "NEXT"}]}', 2600)],
)
def test_long_chains_do_not_end_the_process(compiler: GrammarCompiler, link: str, length: int) -> None:
    """The compiler calls itself for each link; on a usual stack it overflows, and takes the server with it."""
    with suppress(ApiError):
        compiler.json_value(chain(length, link), "x").matcher().allowed()
    arguments = arguments_of({"$ref": "#/$defs/l0"}, **{"$defs": chain(length, link)["$defs"]})
    assert parameter_types(arguments, "a")
    with suppress(ApiError):
        compiler.tool_calls([Function("f", arguments, bound=True)], parallel=False).matcher().allowed()


def test_long_chains_of_rules_do_not_end_the_process(compiler: GrammarCompiler) -> None:
    rules = "".join(f"r{number}:r{number + 1}\n" for number in range(2500))
    compiler.lark(f'start:r0\n{rules}r2500:"x"\n', "x").matcher().allowed()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda compiler: compiler.regex("[a-z]?" * 3000, "x"), "18000 characters"),
        (lambda compiler: compiler.regex("[a-z]?" * 2000, "x"), "too large"),
        (lambda compiler: compiler.lark('start: "a"' + " " * 40000, "x"), "40010 characters"),
        (lambda compiler: compiler.choice(["x" * 2_000_000], "x"), "characters"),
        (lambda compiler: compiler.json_value({"type": "string", "pattern": "a" * 5000}, "x"), "5000 characters"),
        (lambda compiler: compiler.json_value({"enum": ["a" * 200_000]}, "x"), "characters"),
        (lambda compiler: compiler.json_value(MANY_PATTERNS, "x"), "30 'pattern' and 'format' at once"),
        (lambda compiler: compiler.json_value({"items": chain_of_patterns(30)}, "x"), "7 'pattern'"),
        (lambda compiler: compiler.json_value(chain(100, '{"$ref": "NEXT"}'), "x"), "deeper than 64"),
        (lambda compiler: compiler.lark(f"start: %json {json.dumps(MANY_PATTERNS)}", "x"), "30 'pattern'"),
        (lambda compiler: compiler.lark(f'start: T\nT: /a/ & "&"{" & /d/" * 9}', "x"), "10 intersections"),
        (lambda compiler: compiler.tool_calls([Function("f", arguments_of({"type": "array", "items": MANY_PATTERNS}),
                                                        bound=True)], parallel=False), "30 'pattern'"),
        (lambda compiler: compiler.tool_calls([Function("f", {"title": "a" * 200_000}, bound=True)], parallel=False),
         "longer than"),
    ],
)  # fmt: skip
def test_what_would_take_too_long_is_refused(
    compiler: GrammarCompiler, make: Callable[[GrammarCompiler], Grammar], named: str
) -> None:
    with pytest.raises(ApiError, match=named):
        make(compiler)


def test_many_values_take_no_time(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = arguments_of({"enum": [f"v{number}" for number in range(8_000)]})
    grammar = compiler.tool_calls([Function("f", schema, bound=True)], parallel=False)
    assert allows(grammar, tokenizer, call_text([("a", "v7999")]))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"$ref": "#"}, "no text"),
        ({"type": "string", "pattern": "(?=a)b"}, "(?=a)b: look-around"),
        ({"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}, "minProperties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ],
)
def test_schemas_of_answers_are_refused_with_a_reason(
    compiler: GrammarCompiler, schema: dict[str, Any], named: str
) -> None:
    with pytest.raises(ApiError) as caught:
        compiler.json_value(schema, "response_format")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "coerce" not in str(caught.value)
