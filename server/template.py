"""The checkpoint's chat template: compiled once, rendered in a sandbox, safe against forged special tokens.

Text of a request can contain `<|im_end|>` or `</think>`. Encoded together with the template it would become the
control token. So every such occurrence is replaced, before rendering, by a mark that nobody can guess; after rendering
the text is cut at the marks and the forged pieces are encoded as plain text. Text without special-token strings is
rendered and encoded in one piece, exactly as in training.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from engine.errors import ModelFileError, RequestError


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of rendered text. `is_template`: special-token strings in it are the template's and mean the tokens."""

    text: str
    is_template: bool


class ChatTemplate:
    """One compiled template. Raises ModelFileError if `source` is no valid Jinja."""

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        # The stock filter escapes for HTML and for ASCII; models were trained on neither.
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(f"chat_template.jinja, line {error.lineno}: {error.message}") from None

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """The template of a checkpoint directory. ModelFileError if it is missing."""
        path = directory / "chat_template.jinja"
        try:
            return cls(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{path}: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The prompt text. A refusal of the template is a RequestError about `messages`."""
        try:
            return self._template.render(messages=messages, **values)
        except _TemplateRefusal as error:
            raise RequestError(f"The chat template refused the messages: {error}", param="messages") from None
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise RequestError(
                f"The chat template could not render the messages: {type(error).__name__}", param="messages"
            ) from error


class _TemplateRefusal(jinja2.TemplateError):
    """Raised by `raise_exception` inside a template."""


def _raise_exception(message: str) -> str:
    raise _TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class SpecialTextGuard:
    """Marks special-token strings in the text of one request, and finds the marks again after rendering.

    special_texts: strings of all special and added tokens. One instance serves one request: the marks are random.
    """

    def __init__(self, special_texts: Iterable[str]) -> None:
        self._specials = sorted(special_texts, key=lambda text: (-len(text), text))
        self._mark = f"\ue000{secrets.token_hex(16)}"
        self._replaced: list[str] = []
        self._indices: dict[str, int] = {}
        self._beginnings = tuple({text[:length] for text in self._specials for length in range(1, len(text))})
        self._endings = tuple({text[-length:] for text in self._specials for length in range(2, len(text))})
        self._pattern = re.compile("|".join(map(re.escape, self._specials))) if self._specials else None

    def protect(self, value: Any) -> Any:
        """A copy of a JSON value whose strings, keys included, hold no special-token string."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self._protect_text(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.protect(item) for item in value]
        return value

    def _protect_text(self, text: str) -> str:
        if self._pattern is None:
            return text
        text = self._pattern.sub(lambda match: self._mark_for(match.group()), text)
        # Halves of a special-token string at an edge could be completed by whatever the template puts beside them;
        # a mark that stands for nothing keeps them apart.
        if text.endswith(self._beginnings):
            text = text + self._mark_for("")
        if text.startswith(self._endings):
            text = self._mark_for("") + text
        return text

    def new_mark(self) -> str:
        """A mark that stands for nothing and occurs nowhere else, to find a place again after rendering."""
        self._replaced.append("")
        return f"{self._mark}:{len(self._replaced) - 1}\ue001"

    def _mark_for(self, text: str) -> str:
        index = self._indices.setdefault(text, len(self._replaced))
        if index == len(self._replaced):
            self._replaced.append(text)
        return f"{self._mark}:{index}\ue001"

    def split(self, rendered: str) -> list[Piece]:
        """The rendered text, cut at the marks; empty pieces are left out."""
        if not self._replaced:
            return [Piece(rendered, True)]
        pieces: list[Piece] = []
        parts = re.split(f"{self._mark}:([0-9]+)\ue001", rendered)
        for position, part in enumerate(parts):
            text = self._replaced[int(part)] if position % 2 else part
            if text:
                pieces.append(Piece(text, position % 2 == 0))
        return pieces
