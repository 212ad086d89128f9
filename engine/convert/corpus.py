"""Text to calibrate and to measure on: token sequences with the positions that count.

A corpus is a JSONL file. Each line is {"text": ...}, or a chat as a client sends it, {"messages": [...], "tools":
[...]}, whose last message is the assistant's: it alone counts. Pictures are parts of a message's content, as in
requests: {"type": "image_url", "image_url": {"url": ...}} with a data: URL or the path of a file beside the corpus or
below; they are looked at in low detail, unless "detail" is "high". Without a file, the lessons of the built-in demo
model are used: invented sentences, look-ups, arithmetic, tool calls and drawn pictures, free of anybody else's rights.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import jinja2
import numpy as np
import numpy.typing as npt
from jinja2.sandbox import ImmutableSandboxedEnvironment
from PIL import Image

from engine.config import ModelConfig
from engine.core import ImageSpan, Int32Array
from engine.errors import ConfigError, ModelFileError, RequestError
from engine.image import Detail, Picture, PreprocessorConfig, load_picture
from engine.tokenizer import Tokenizer

MAX_LINE_BYTES = 64 << 20
MAX_PICTURE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence; tokens from `first_label` on are predicted and count. skill: what a demo lesson practises. images:
    where pictures take the place of tokens, in order."""

    token_ids: Int32Array
    first_label: int
    skill: str
    images: tuple[ImageSpan, ...] = ()

    @property
    def labels(self) -> Int32Array:
        """Tokens to predict; the k-th is predicted at position first_label - 1 + k."""
        return self.token_ids[self.first_label :]


class CorpusReader:
    """Turns lines and lessons into samples for one checkpoint."""

    def __init__(self, directory: Path, longest: int) -> None:
        """directory: the checkpoint, for tokenizer and template; longest: tokens kept of a sequence."""
        self._directory = directory
        self._tokenizer = Tokenizer.load(directory)
        self._longest = longest
        template = directory / "chat_template.jinja"
        self._template = _compile(template) if template.is_file() else None

    @cached_property
    def _model(self) -> ModelConfig:
        return ModelConfig.load(self._directory)

    def file(self, path: Path) -> Iterator[Sample]:
        """Samples of a JSONL file. Raises ModelFileError naming the line that is not understood."""
        try:
            with path.open("rb") as file:
                for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                    if line.strip():
                        yield self._line(f"{path}:{number}", line, path.parent)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error

    def lessons(self, *, held_out: bool, seed: int) -> Iterator[Sample]:
        """Endless lessons of the demo model, from the training or from the held-out side; longer ones are left out."""
        from engine.demo.recipe import data
        from engine.demo.recipe.lessons import World

        if self._template is None:
            raise ModelFileError("the checkpoint has no chat_template.jinja: lessons cannot be rendered")
        rng, world = random.Random(seed), World([], [])
        text = data.TEMPLATE_PATH.read_text("utf-8")
        while True:
            lesson = data.draw_sample(rng, world, 1, held_out)
            if lesson.pictures and self._model.vision is None:
                continue
            pictures = [self._picture(_png(pixels), Detail.HIGH) for pixels in lesson.pictures]
            prompt = self._render(
                lesson.messages, lesson.tools, add_generation_prompt=True, enable_thinking=lesson.thinking
            )
            # Whole or not at all: a prompt without its first half has no one right answer.
            sample = self._sample(prompt, data.render(lesson, text)[1], lesson.skill, pictures, sys.maxsize)
            if len(sample.token_ids) <= self._longest:
                yield sample

    def _line(self, where: str, line: bytes, beside: Path) -> Sample:
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
        return self._chat(where, fields, beside)

    def _chat(self, where: str, fields: Mapping[str, Any], beside: Path) -> Sample:
        messages, tools = fields["messages"], fields.get("tools")
        if self._template is None:
            raise ModelFileError(f"{where}: a chat, but the checkpoint has no chat_template.jinja")
        if not isinstance(messages[-1], dict) or messages[-1].get("role") != "assistant":
            raise ModelFileError(f"{where}: the last message is not the assistant's")
        if isinstance(messages[-1].get("content"), list):
            raise ModelFileError(f"{where}: the assistant's content is a list, expected text")
        try:
            pictures: list[Picture] = []
            turns = [self._turn(message, beside, pictures) for message in messages]
            whole = self._render(turns, tools)
            before = self._render(turns[:-1], tools)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise ModelFileError(f"{where}: the template refused the chat: {error}") from error
        except (RequestError, ModelFileError) as error:
            raise ModelFileError(f"{where}: {error}") from error
        if not whole.startswith(before):
            raise ModelFileError(f"{where}: the template changes earlier turns when an answer is added")
        try:
            return self._sample(before, whole[len(before) :], "chat", pictures, self._longest)
        except ModelFileError as error:
            raise ModelFileError(f"{where}: {error}") from error

    def _turn(self, message: object, beside: Path, pictures: list[Picture]) -> object:
        """The message as the template takes it; its pictures are appended to `pictures`."""
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            return message
        parts: list[dict[str, str]] = []
        for part in message["content"]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            elif kind == "image_url" and isinstance(part.get("image_url"), dict):
                detail = Detail.HIGH if part["image_url"].get("detail") == "high" else Detail.LOW
                pictures.append(self._picture(_picture_bytes(part["image_url"].get("url"), beside), detail))
                parts.append({"type": "image"})
            else:
                raise ModelFileError(f"a part of a message is {str(part)[:60]!r}, expected text or image_url")
        return {**message, "content": parts}

    def _picture(self, data: bytes, detail: Detail) -> Picture:
        if self._model.vision is None or self._model.image_token_id is None:
            raise ModelFileError("a picture, but the checkpoint has no vision tower")
        return load_picture(data, PreprocessorConfig.load(self._directory, self._model.vision), detail=detail)

    def _render(self, messages: object, tools: object, **values: bool) -> str:
        assert self._template is not None
        return self._template.render(messages=messages, tools=tools or None, **values)

    def _sample(self, prompt_text: str, answer: str, skill: str, pictures: Sequence[Picture], longest: int) -> Sample:
        """Encoded apart, as a server does. A sequence of more than `longest` tokens loses its beginning, not its labels
        nor its pictures: ModelFileError if that is not possible."""
        prompt = np.asarray(self._tokenizer.encode(prompt_text, allow_special=True), np.int32)
        completion = self._tokenizer.encode(answer, allow_special=True)[: longest - 1]
        spans: tuple[ImageSpan, ...] = ()
        if pictures:
            prompt, spans = self._make_room(prompt, pictures)
        cut = max(0, len(prompt) + len(completion) - longest)
        if spans and cut > spans[0].start:
            raise ModelFileError(f"{len(prompt) + len(completion)} tokens with pictures, at most {longest} fit")
        spans = tuple(ImageSpan(span.start - cut, span.count, span.pixels, span.digest) for span in spans)
        kept = prompt[cut:]
        return Sample(np.concatenate([kept, np.asarray(completion, np.int32)]), len(kept), skill, spans)

    def _make_room(self, ids: Int32Array, pictures: Sequence[Picture]) -> tuple[Int32Array, tuple[ImageSpan, ...]]:
        """Each picture's placeholder repeated as often as it takes tokens, and where that is."""
        pads = np.flatnonzero(ids == self._model.image_token_id)
        if len(pads) != len(pictures):
            raise ModelFileError(f"the template shows {len(pads)} of {len(pictures)} pictures")
        counts = np.ones(len(ids), np.int64)
        counts[pads] = [picture.tokens for picture in pictures]
        starts = (np.cumsum(counts) - counts)[pads]
        spans = tuple(picture.span(int(start)) for picture, start in zip(pictures, starts, strict=True))
        return np.repeat(ids, counts), spans


def take(reader: CorpusReader, path: Path | None, count: int, *, held_out: bool, seed: int) -> list[Sample]:
    """The first `count` samples of a file, or that many lessons. Raises ConfigError if the file holds none."""
    source = reader.lessons(held_out=held_out, seed=seed) if path is None else reader.file(path)
    samples = list(islice(source, count))
    if not samples:
        raise ConfigError(f"{path} holds no samples")
    return samples


def _picture_bytes(url: object, beside: Path) -> bytes:
    """The file that a data: URL holds, or that lies beside the corpus."""
    if not isinstance(url, str):
        raise ModelFileError(f"the url of a picture is {str(url)[:60]!r}, expected text")
    if url.startswith("data:"):
        head, _, content = url.partition(",")
        if not head.endswith(";base64"):
            raise ModelFileError(f"a picture is {url[:60]!r}, expected a data: URL in base64")
        try:
            return base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ModelFileError(f"a data: URL does not hold valid base64: {error}") from error
    # A corpus from somewhere else must not reach other files, and nothing is fetched.
    place = PurePosixPath(url)
    if "://" in url or place.is_absolute() or ".." in place.parts:
        raise ModelFileError(
            f"a picture is at {url[:60]!r}, expected a data: URL or a file below the corpus's directory"
        )
    path = beside / place
    try:
        if path.stat().st_size > MAX_PICTURE_BYTES:
            raise ModelFileError(f"{path}: {path.stat().st_size} bytes, at most {MAX_PICTURE_BYTES} accepted")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ModelFileError(f"picture {path}: cannot be read: {error}") from error


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


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
