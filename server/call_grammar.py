"""Grammar rules of tool calls: the arguments of a function, bound to its JSON schema in the family's raw syntax.

Values that are no strings are JSON, which llguidance binds to a schema by itself. Strings stand raw, between their
tags, so their keywords (enum, const, pattern, lengths, format) become regular expressions here. What a schema asks for
and these rules cannot promise is refused by name; nothing is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.errors import ApiError
from server.toolcalls import JSON_TYPES, json_types, parameter_types, pointed, read_value, resolve

Schema = Mapping[str, Any]

# One line, spaced as models learnt it from json.dumps: free whitespace invites endless line breaks.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Written between two lines of a call; a value cannot hold the second one.
_VALUE_END = "\n</parameter>\n"
_ANNOTATIONS = frozenset({
    "$comment", "$defs", "$id", "$schema", "definitions", "default", "deprecated", "description", "discriminator",
    "example", "examples", "nullable", "readOnly", "title", "writeOnly",
})  # fmt: skip
_STRING_KEYWORDS = ("pattern", "minLength", "maxLength", "format")
_NOT_FOR_STRINGS = frozenset({"not", "if", "then", "else", "contentEncoding", "contentMediaType", "contentSchema"})
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_NOT_FOR_ARGUMENTS = (
    "anyOf", "oneOf", "allOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies",
    "patternProperties", "propertyNames", "const", "enum",
)  # fmt: skip
# Keywords whose values are schemas by name, one schema, or several; all others hold no schemas.
_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
_ONE_SCHEMA = frozenset({
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "additionalItems",
    "unevaluatedItems", "unevaluatedProperties", "contentSchema",
})  # fmt: skip
_SEVERAL_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_MAX_ALTERNATIVES = 64
# References that lead to references, and so on.
_MAX_CHAIN = 64
_MAX_EXPRESSIONS = 6
# Compiling takes time with the square of an expression's length.
_MAX_PATTERN = 4096

_YEAR_TO_DAY = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = r"[0-9A-Fa-f]{1,4}"
# Each describes texts that surely have the format (RFC 3339, 5321, 1123, 4291, 4122, 3986, ISO 8601), not all of them.
_FORMATS = {
    "date": _YEAR_TO_DAY,
    "time": _TIME,
    "date-time": f"{_YEAR_TO_DAY}T{_TIME}",
    "duration": r"P(?:[0-9]{1,6}W|[0-9]{1,6}D(?:T[0-9]{1,6}[HMS])?|[0-9]{1,6}[YM]|T[0-9]{1,6}[HMS])",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,31}})?@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": (
        rf"(?:{_GROUP}(?::{_GROUP}){{7}}|::(?:{_GROUP}(?::{_GROUP}){{0,5}})?|{_GROUP}::{_GROUP}(?::{_GROUP}){{0,4}})"
    ),
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": (
        rf"[a-z][a-z0-9+.-]{{1,15}}://{_LABEL}(?:\.{_LABEL}){{0,3}}(?::[0-9]{{1,5}})?"
        r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?"
    ),
}


class UnboundError(Exception):
    """A schema asks for what the rules cannot promise; the text says what, and where in the schema."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a call may name. bound: its arguments must fit `schema`; else any are accepted."""

    name: str
    schema: Schema | None
    bound: bool


def function_rules(rule: str, function: Function) -> list[str]:
    """Lark lines of one function, the first of them called `rule`: parameters in the schema's order, required ones
    obligatory. UnboundError if its schema cannot be promised."""
    _check_name(function.name, "The name of the function")
    opening = lark_string(f"<function={function.name}>\n")
    if not function.bound:
        return [
            f"{rule}: {opening} {rule}_any*",
            f'{rule}_any: /<parameter=[^<>\\n]+>\\n/ raw_text "\\n"',
        ]
    check_expressions(function.schema)
    parts, lines = [opening], []
    for index, (key, value, required) in enumerate(_parameters(function.schema or {})):
        name = f"{rule}_{index}"
        parts.append(name if required else f"{name}?")
        lines += parameter_rules(name, function.schema or {}, key, value)
    return [f"{rule}: {' '.join(parts)}", *lines]


def parameter_rules(rule: str, schema: Schema, key: str, value: Any) -> list[str]:
    """Lark lines of one parameter with its tags, the first of them called `rule`. value: its schema within the
    function's whole `schema`."""
    _check_name(key, "The name of the parameter")
    opening = lark_string(f"<parameter={key}>\n")
    try:
        if "string" not in parameter_types(schema, key) and isinstance(value, Mapping):
            return [f"{rule}: {opening} {_json_rule(value, schema)} {lark_string(_VALUE_END)}"]
        alternatives = _Alternatives(rule, schema, parameter_types(schema, key))
        alternatives.collect(_branches(value, schema, {}, 0))
        body = alternatives.body()
    except UnboundError as error:
        raise UnboundError(f"parameter '{key}': {error}") from None
    if not body:
        return [f'{rule}: {opening} raw_text "\\n"']
    return [f"{rule}: {opening} ({' | '.join(body)})", *alternatives.lines]


def named_parameters(function: Function) -> Iterable[tuple[str, Any]]:
    """(name, schema) of every parameter that a bound call may hold."""
    for key, value, _ in _parameters(function.schema or {}):
        yield key, value


def text_alone(line: str) -> str | None:
    """A grammar of nothing but the string that a line of `parameter_rules` defines, if it must match several
    expressions."""
    terminal, _, definition = line.partition(": ")
    return f"start: TEXT\nTEXT: {definition}\n" if terminal.isupper() and " & /" in definition else None


def plain_schema(schema: Any, refer: Callable[[str], str] | None = None) -> Any:
    """A copy of a schema without formats that are annotations only, its references passed through `refer`.

    UnboundError for what llguidance takes and does not keep.
    """
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _NAMED_SCHEMAS and isinstance(value, Mapping):
            copy[word] = {name: plain_schema(one, refer) for name, one in value.items()}
        elif word in _SEVERAL_SCHEMAS and isinstance(value, list):
            copy[word] = [plain_schema(one, refer) for one in value]
        elif word in _ONE_SCHEMA:
            copy[word] = plain_schema(value, refer)
        elif word == "$ref" and refer is not None and isinstance(value, str):
            copy[word] = refer(value)
        elif word != "format" or value in _FORMATS:
            copy[word] = value
        if word == "pattern" and isinstance(value, str):
            _check_pattern(value)
        elif word == "patternProperties" and isinstance(value, Mapping):
            for pattern in value:
                _check_pattern(pattern)
    required = schema.get("required")
    needed = schema.get("minProperties")
    if isinstance(needed, int) and needed > 1 + len(required if isinstance(required, list) else ()):
        # The grammar does not keep the names of further properties apart, and one that comes twice counts once.
        raise UnboundError(f"'minProperties' {needed} asks for several properties that 'required' does not name")
    return copy


def check_expressions(schema: Any) -> None:
    """UnboundError if one string had to match many expressions at once: the compiler's time doubles with each.

    schema: a whole document, to whose parts its references lead.
    """
    weights: dict[int, int] = {}
    waiting = [schema]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Mapping):
            _expressions(here, schema, weights, 0)
            waiting += here.values()
        elif isinstance(here, list):
            waiting += here


def _expressions(schema: Any, root: Schema, known: dict[int, int], depth: int) -> int:
    """How many expressions a string must match to fit `schema`, at most. known: results by identity."""
    if not isinstance(schema, Mapping):
        return 0
    if id(schema) in known:
        return known[id(schema)]
    if depth > _MAX_CHAIN:
        raise UnboundError(f"its references are nested deeper than {_MAX_CHAIN} levels")
    known[id(schema)] = 0
    count = sum(isinstance(schema.get(word), str) for word in ("pattern", "format"))
    if isinstance(schema.get("$ref"), str):
        count += _expressions(pointed(schema["$ref"], root), root, known, depth + 1)
    for word, combine in (("allOf", sum), ("anyOf", max), ("oneOf", max)):
        parts = schema.get(word)
        if isinstance(parts, list) and parts:
            count += combine([_expressions(part, root, known, depth + 1) for part in parts])
    if count > _MAX_EXPRESSIONS:
        raise UnboundError(
            f"a string has to fit {count} 'pattern' and 'format' at once, at most {_MAX_EXPRESSIONS} may"
        )
    known[id(schema)] = count
    return count


def lark_string(text: str) -> str:
    """A quoted Lark string; its escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(slots=True)
class _Alternatives:
    """What one parameter that may be a string can hold, as alternatives of a Lark rule."""

    rule: str
    schema: Schema
    allowed: frozenset[str]
    lines: list[str] = field(default_factory=list)
    _literals: dict[str, None] = field(default_factory=dict)
    _strings: list[Schema] = field(default_factory=list)
    _json: list[dict[str, Any]] = field(default_factory=list)

    def collect(self, branches: Sequence[Schema]) -> None:
        """Sort the alternatives of the schema by what they become."""
        for branch in branches:
            types = _branch_types(branch)
            if "enum" in branch or "const" in branch:
                self._collect_values(branch, types)
                continue
            if "string" in types:
                for word in sorted(_NOT_FOR_STRINGS & branch.keys()):
                    raise UnboundError(f"'{word}' is not available for strings")
                self._strings.append({word: branch[word] for word in _STRING_KEYWORDS if word in branch})
            others = types - {"string"}
            if "null" in others:
                self._literals["null"] = None
            if "boolean" in others:
                self._literals.update({"true": None, "false": None})
            if others := others - {"null", "boolean"}:
                rest = {word: branch[word] for word in branch if word not in _STRING_KEYWORDS}
                self._json.append({**rest, "type": sorted(others)})

    def body(self) -> list[str]:
        """The alternatives; none if any text at all will do."""
        strings = [dict(text) for text in {json.dumps(text, sort_keys=True): text for text in self._strings}.values()]
        if any(not _demands(text) for text in strings):
            if not any(len(value) > 1 for value in self._json) and all(
                word in ("null", "true", "false") or self._is_string(word) for word in self._literals
            ):
                return []
            strings = [{}]
        body = []
        if self._literals:
            terminal = f"{self.rule}_values".upper()
            words = " | ".join(lark_string(f"{word}{_VALUE_END}") for word in self._literals)
            self.lines.append(f"{terminal}: {words}")
            body.append(terminal)
        for index, text in enumerate(strings):
            name, terminal = f"{self.rule}_text_{index}", f"{self.rule}_text_{index}".upper()
            self.lines.append(f'{name}[suffix="\\n</parameter>"]: {terminal}')
            self.lines.append(f"{terminal}: {' & '.join(self._text(text))}")
            body.append(f'{name} "\\n"')
        for index, value in enumerate(self._json):
            name = f"{self.rule}_json_{index}"
            self.lines.append(f"{name}: {_json_rule(value, self.schema)} {lark_string(_VALUE_END)}")
            body.append(name)
        if not body:
            raise UnboundError("no value fits its schema")
        return body

    def _text(self, keywords: Schema) -> list[str]:
        """Expressions that a raw string must match, all of them."""
        expressions = [_lark_regex(expression) for expression in _string_regexes(keywords) or ["(?s:.*)"]]
        # The tag within a value would end it for whoever reads the call.
        unlike = [r"(?s:.*)</parameter>(?s:.*)"]
        # What reads like another of the allowed types would be taken for it.
        if "null" in self.allowed:
            unlike.append(r"\s*(?:null|None)\s*")
        if "boolean" in self.allowed:
            unlike.append(r"\s*(?:true|false|True|False)\s*")
        if self.allowed & {"integer", "number"}:
            unlike.append(r"\s*-?[0-9](?s:.*)")
        if self.allowed & {"object", "array"}:
            unlike.append(r"\s*[\[{](?s:.*)")
        return [*expressions, *(f"~{_lark_regex(expression)}" for expression in unlike)]

    def _collect_values(self, branch: Schema, types: frozenset[str]) -> None:
        values = _listed(branch)
        if not isinstance(values, list):
            raise UnboundError("'enum' must be an array")
        if "const" in branch and "enum" in branch:
            values = [value for value in values if value in branch["enum"]]
        demands = [word for word in _STRING_KEYWORDS if word in branch]
        if demands and any(isinstance(value, str) for value in values):
            raise UnboundError(f"'{demands[0]}' is not available beside 'enum' or 'const'")
        for value in values:
            if not json_types(value) & types:
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            # A text that would be read as another value cannot stand for this one.
            read = read_value(text, self.allowed)
            if type(read) is type(value) and read == value:
                self._literals[text] = None

    def _is_string(self, word: str) -> bool:
        return isinstance(read_value(word, self.allowed), str)


def _parameters(schema: Schema) -> list[tuple[str, Any, bool]]:
    """(name, schema, whether required) of what a call of a bound function holds. UnboundError."""
    here = resolve(schema, schema)
    for word in _NOT_FOR_ARGUMENTS:
        if word in here:
            raise UnboundError(f"'{word}' is not available for the arguments as a whole")
    declared = here.get("type", "object")
    if declared != "object" and not (isinstance(declared, list) and "object" in declared):
        raise UnboundError(f"arguments are an object, 'type' is {declared!r}")
    properties = here.get("properties", {})
    if not isinstance(properties, Mapping):
        raise UnboundError("'properties' must be an object")
    required = here.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise UnboundError("'required' must be an array of names")
    further = here.get("additionalProperties", True)
    parameters = [(key, value, key in required) for key, value in properties.items()]
    parameters += [(key, further, True) for key in dict.fromkeys(required) if key not in properties]
    parameters = [one for one in parameters if one[1] is not False or one[2]]
    for key, value, _ in parameters:
        if value is False:
            raise UnboundError(f"'required' names '{key}', and no value may stand there")
        if not isinstance(value, Mapping) and value is not True:
            raise UnboundError(f"the schema of parameter '{key}' must be an object")
    least, most = here.get("minProperties", 0), here.get("maxProperties", len(parameters))
    if not isinstance(least, int) or least > sum(needed for *_, needed in parameters):
        raise UnboundError("'minProperties' asks for more than 'required' names")
    if not isinstance(most, int) or most < len(parameters):
        raise UnboundError("'maxProperties' allows fewer than there are")
    return parameters


def _json_rule(value: Schema, root: Schema) -> str:
    """An inline grammar of one JSON value. Parts of the whole schema that it refers to travel along."""
    numbers: dict[str, int] = {}

    def refer(reference: str) -> str:
        return f"#/$defs/{numbers.setdefault(reference, len(numbers))}"

    definition = plain_schema({word: part for word, part in value.items() if word not in _ANNOTATIONS}, refer)
    parts: dict[str, Any] = {}
    while len(parts) < len(numbers):
        reference = list(numbers)[len(parts)]
        target = pointed(reference, root)
        if target is None:
            raise UnboundError(f"'$ref' {reference!r} leads nowhere")
        parts[str(len(parts))] = plain_schema(target, refer)
    return json_grammar({**definition, "$defs": parts} if parts else definition)


def json_grammar(schema: Schema) -> str:
    """An inline Lark grammar of one JSON value that fits `schema`."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE}, ensure_ascii=False)}"


def _branches(
    schema: Any, root: Schema, known: dict[int, list[dict[str, Any]] | None], depth: int
) -> list[dict[str, Any]]:
    """Schemas without references and alternatives, one of which a value must fit to fit `schema`.

    known: results by identity, None while one is being made, so that each part of a schema is looked at once.
    """
    if depth > _MAX_CHAIN:
        raise UnboundError(f"its references are nested deeper than {_MAX_CHAIN} levels")
    if schema is True:
        return [{}]
    if schema is False:
        return []
    if not isinstance(schema, Mapping):
        raise UnboundError("a schema must be an object or a boolean")
    if id(schema) in known:
        result = known[id(schema)]
        if result is None:
            raise UnboundError("it refers to itself")
        return result
    known[id(schema)] = None
    found = [{word: value for word, value in schema.items() if word not in _ANNOTATIONS | _COMBINING}]
    if schema.get("nullable") is True and "type" in schema:
        found[0]["type"] = sorted(_branch_types(schema) | {"null"})
    if "$ref" in schema:
        if not isinstance(schema["$ref"], str):
            raise UnboundError("'$ref' must be a string")
        target = resolve(schema, root)
        if not target:
            raise UnboundError(f"'$ref' {schema['$ref']!r} leads nowhere")
        found = _both(found, _branches(target, root, known, depth + 1))
    for part in _parts(schema, "allOf"):
        found = _both(found, _branches(part, root, known, depth + 1))
    for word in ("anyOf", "oneOf"):
        if word in schema:
            options = [_branches(part, root, known, depth + 1) for part in _parts(schema, word)]
            if word == "oneOf" and not _are_apart(options):
                raise UnboundError("'oneOf' has alternatives that may both fit")
            found = _both(found, [branch for option in options for branch in option])
    known[id(schema)] = found
    return found


def _parts(schema: Schema, word: str) -> list[Any]:
    parts = schema.get(word, [])
    if not isinstance(parts, list):
        raise UnboundError(f"'{word}' must be an array")
    return parts


def _both(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Branches for what fits one of `left` and one of `right`."""
    if len(left) * len(right) > _MAX_ALTERNATIVES:
        raise UnboundError(f"it has more than {_MAX_ALTERNATIVES} alternatives")
    return [both for one in left for other in right if (both := _merge(one, other)) is not None]


def _merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """A schema for what fits both; None if nothing does."""
    merged = {**one, **other}
    for word in one.keys() & other.keys() - {"type"}:
        if word == "enum":
            merged[word] = [value for value in one[word] if value in other[word]]
        elif one[word] != other[word]:
            raise UnboundError(f"'{word}' is stated twice")
    if "type" in one and "type" in other:
        types = _branch_types({"type": one["type"]}) & _branch_types({"type": other["type"]})
        if not types:
            return None
        merged["type"] = sorted(types)
    return merged


def _are_apart(options: list[list[dict[str, Any]]]) -> bool:
    """Whether no value fits two of the options, as far as their types and listed values tell."""
    for index, option in enumerate(options):
        for other in options[index + 1 :]:
            for one in option:
                for two in other:
                    values = [_listed(one), _listed(two)]
                    if None not in values:
                        if {json.dumps(value) for value in values[0] or ()} & {
                            json.dumps(value) for value in values[1] or ()
                        }:
                            return False
                    elif _branch_types(one) & _branch_types(two):
                        return False
    return True


def _listed(branch: Schema) -> list[Any] | None:
    return [branch["const"]] if "const" in branch else branch.get("enum")


def _branch_types(branch: Schema) -> frozenset[str]:
    """JSON types that a branch allows by its `type`; `number` includes `integer`."""
    declared = branch.get("type", sorted(JSON_TYPES))
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list) or not all(isinstance(name, str) and name in JSON_TYPES for name in names):
        raise UnboundError(f"'type' is {declared!r}")
    return frozenset(names) | ({"integer"} if "number" in names else frozenset())


def _demands(text: Schema) -> bool:
    return any(word != "format" or text[word] in _FORMATS for word in text)


def _string_regexes(text: Schema) -> list[str]:
    """Expressions that a string must match as a whole to fit the keywords."""
    expressions = []
    least, most = text.get("minLength", 0), text.get("maxLength")
    for word, bound in (("minLength", least), ("maxLength", most)):
        if bound is not None and (not isinstance(bound, int) or bound < 0):
            raise UnboundError(f"'{word}' must be an integer of at least 0")
    if most is not None and most < least:
        raise UnboundError("'minLength' is larger than 'maxLength'")
    if least or most is not None:
        expressions.append(f"(?s:.{{{least},{'' if most is None else most}}})")
    if "pattern" in text:
        if not isinstance(text["pattern"], str):
            raise UnboundError("'pattern' must be a string")
        _check_pattern(text["pattern"])
        expressions.append(_anchored(text["pattern"]))
    if text.get("format") in _FORMATS:
        expressions.append(_FORMATS[text["format"]])
    return expressions


def _check_pattern(pattern: str) -> None:
    if len(pattern) > _MAX_PATTERN:
        raise UnboundError(f"a 'pattern' of {len(pattern)} characters, at most {_MAX_PATTERN} are read")


def _anchored(pattern: str) -> str:
    """A pattern that is looked for anywhere, as one that matches the whole: anchors go, free text takes their place."""
    alternatives = []
    for part in _top_level_alternatives(pattern):
        start = "" if part.startswith("^") else "(?s:.*)"
        end = "" if re.search(r"(?<!\\)(?:\\\\)*\$\Z", part) else "(?s:.*)"
        inner = part[0 if start else 1 : len(part) if end else -1]
        alternatives.append(f"{start}(?:{inner}){end}")
    return "|".join(alternatives)


def _top_level_alternatives(pattern: str) -> list[str]:
    parts, depth, in_class, start, position = [], 0, False, 0, 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            parts.append(pattern[start:position])
            start = position + 1
        position += 1
    return [*parts, pattern[start:]]


def _lark_regex(expression: str) -> str:
    """An expression between slashes, on one line."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], expression, flags=re.DOTALL)
    for character, escape in (("\n", r"\n"), ("\r", r"\r")):
        escaped = escaped.replace("\\" + character, escape).replace(character, escape)
    return f"/(?:{escaped})/"


def _check_name(name: str, what: str) -> None:
    """Tags hold names as they are: some characters would end them, and blanks at their ends are lost."""
    if not name or name.strip() != name or any(character in name for character in "<>\n"):
        raise UnboundError(f"{what} {name[:60]!r} cannot be written in a call")


def refusal(function: str, reason: str) -> ApiError:
    """400 for a function whose calls cannot be bound to its schema."""
    return ApiError(
        400,
        f"Calls of '{function[:100]}' cannot be bound to its schema: {reason[:500]}.",
        code="unsupported_grammar",
        param="tools",
    )
