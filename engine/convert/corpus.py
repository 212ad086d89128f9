"""Text to calibrate and to measure on: token sequences with the positions that count.

A corpus is a JSONL file. Each line is {"text": ...}, or a chat as a client sends it, {"messages": [...], "tools":
[...]}, whose last message is the assistant's: it alone counts. Without a file, the lessons of the built-in demo model
are used: invented sentences, look-ups, arithmetic and tool calls, free of anybody else's rights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.core import Int32Array
from engine.errors import ConfigError, ModelFileError
from engine.tokenizer import Tokenizer

MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence; tokens from `first_label` on are predicted and count. skill: what a demo lesson practises."""

    token_ids: Int32Array
    first_label: int
    skill: str

    @property
    def labels(self) -> Int32Array:
        """Tokens to predict; the k-th is predicted at position first_label - 1 + k."""
        return self.token_ids[self.first_label :]


class CorpusReader:
    """Turns lines and lessons into samples for one checkpoint."""

    def __init__(self, directory: Path, longest: int) -> None:
        """directory: the checkpoint, for tokenizer and template; longest: tokens kept of a sequence."""
        self._tokenizer = Tokenizer.load(directory)
        self._longest = longest
        template = directory / "chat_template.jinja"
        self._template = _compile(template) if template.is_file() else None

    def file(self, path: Path) -> Iterator[Sample]:
        """Samples of a JSONL file. Raises ModelFileError naming the line that is not understood."""
        try:
            with path.open("rb") as file:
                for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                    if line.strip():
                        yield self._line(f"{path}:{number}", line)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error

    def lessons(self, *, held_out: bool, seed: int) -> Iterator[Sample]:
        """Endless lessons of the demo model, from the training or from the held-out side."""
        from engine.demo.recipe import data
        from engine.demo.recipe.lessons import World

        if self._template is None:
            raise ModelFileError("the checkpoint has no chat_template.jinja: lessons cannot be rendered")
        rng, world = random.Random(seed), World([], [])
        text = data.TEMPLATE_PATH.read_text("utf-8")
        while True:
            lesson = data.draw_sample(rng, world, 1, held_out)
            if lesson.pictures:
                continue
            prompt = self._render(
                lesson.messages, lesson.tools, add_generation_prompt=True, enable_thinking=lesson.thinking
            )
            sample = self._sample(prompt, data.render(lesson, text)[1], lesson.skill)
            if len(sample.token_ids) <= self._longest:
                yield sample

    def _line(self, where: str, line: bytes) -> Sample:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{where}: not JSON: {error}") from error
        if isinstance(fields, dict) and isinstance(fields.get("text"), str):
            ids = self._tokenizer.encode(fields["text"], allow_special=False)[: self._longest]
            if len(ids) < 2:
                raise ModelFileError(f"{where}: a text of {len(ids)} tokens, expected at least 2")
            return Sample(np.asarray(ids, np.int32), 1, "text")
        if not isinstance(fields, dict) or not isinstance(fields.get("messages"), list) or not fields["messages"]:
            raise ModelFileError(f'{where}: expected {{"text": ...}} or {{"messages": [...]}}')
        return self._chat(where, fields)

    def _chat(self, where: str, fields: Mapping[str, Any]) -> Sample:
        messages, tools = fields["messages"], fields.get("tools")
        if self._template is None:
            raise ModelFileError(f"{where}: a chat, but the checkpoint has no chat_template.jinja")
        if not isinstance(messages[-1], dict) or messages[-1].get("role") != "assistant":
            raise ModelFileError(f"{where}: the last message is not the assistant's")
        if any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages):
            raise ModelFileError(f"{where}: message content must be text: pictures cannot be measured on")
        try:
            whole = self._render(messages, tools)
            before = self._render(messages[:-1], tools)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise ModelFileError(f"{where}: the template refused the chat: {error}") from error
        if not whole.startswith(before):
            raise ModelFileError(f"{where}: the template changes earlier turns when an answer is added")
        return self._sample(before, whole[len(before) :], "chat")

    def _render(self, messages: object, tools: object, **values: bool) -> str:
        assert self._template is not None
        return self._template.render(messages=messages, tools=tools or None, **values)

    def _sample(self, prompt_text: str, answer: str, skill: str) -> Sample:
        """Encoded apart, as a server does. A sequence that is too long loses its beginning, not its labels."""
        prompt = self._tokenizer.encode(prompt_text, allow_special=True)
        completion = self._tokenizer.encode(answer, allow_special=True)[: self._longest - 1]
        kept = prompt[max(0, len(prompt) + len(completion) - self._longest) :]
        return Sample(np.asarray([*kept, *completion], np.int32), len(kept), skill)


def take(reader: CorpusReader, path: Path | None, count: int, *, held_out: bool, seed: int) -> list[Sample]:
    """The first `count` samples of a file, or that many lessons. Raises ConfigError if the file holds none."""
    source = reader.lessons(held_out=held_out, seed=seed) if path is None else reader.file(path)
    samples = list(islice(source, count))
    if not samples:
        raise ConfigError(f"{path} holds no samples")
    return samples


def _compile(path: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(path.read_text("utf-8"))
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: {error}") from error
