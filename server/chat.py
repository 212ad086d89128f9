"""A terminal client for any /v1 server, and a server in this process for those who have none running.

Owns the conversation and what the terminal shows. Speaks only HTTP: what works here works for every client.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import httpx2 as httpx

from engine.errors import ConfigError, FermionError
from server.config import Settings

_HELP = """\
/new           forget the conversation
/image PATH    show the model a picture with the next question; several are fine
/system TEXT   set the system message and start anew; without TEXT: none
/think on|off  let the model reason before it answers, or not
/quit          end (or Ctrl-D)
Ctrl-C stops the answer. A line that ends in \\ continues on the next one."""

# Between two bytes of one answer. Servers of ours send a sign of life every few seconds, others are given time.
_SILENCE_S = 600.0
# Bytes of a picture file; servers take no more in one piece.
_MAX_PICTURE = 20 << 20


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the user chose. None: the server's default. model_name None: the first one that the server lists."""

    system: str | None = None
    think: bool = True
    temperature: float | None = None
    max_tokens: int | None = None
    model_name: str | None = None


class ChatError(FermionError):
    """The server could not be reached or refused; the text is fit for the user."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """The server has read `processed` of `total` prompt tokens."""

    processed: int
    total: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished answer."""

    prompt_tokens: int
    completion_tokens: int


ChatEvent = Reasoning | Content | PromptProgress | Usage


class ChatClient:
    """One server. Close it after use."""

    def __init__(self, url: str, api_key: str | None = None, model_name: str | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(10.0, read=_SILENCE_S)
        try:
            self._http = httpx.Client(base_url=url.rstrip("/") + "/", headers=headers, timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"--url {url!r}: {error}") from None
        self.model_name, self._is_ours = self._choose_model(model_name)

    def close(self) -> None:
        self._http.close()

    def answer(self, messages: list[dict[str, Any]], options: ChatOptions) -> Iterator[ChatEvent]:
        """Stream the answer to `messages`. Closing the iterator stops the server's work. Raises ChatError."""
        body = self._request_body(messages, options)
        try:
            with self._http.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(_refusal(response))
                for line in response.iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        yield from _events(_json(data))
        except httpx.HTTPError as error:
            raise ChatError(f"connection to {self._http.base_url} failed: {error}") from error

    def _request_body(self, messages: list[dict[str, Any]], options: ChatOptions) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model_name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.temperature is not None:
            body["temperature"] = options.temperature
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        # Extensions go only where they are understood or were asked for: strict servers refuse unknown fields.
        if self._is_ours:
            body["return_progress"] = True
        if not options.think:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        return body

    def _choose_model(self, wanted: str | None) -> tuple[str, bool]:
        try:
            response = self._http.get("models")
        except httpx.HTTPError as error:
            raise ChatError(f"no server answers at {self._http.base_url}: {error}") from error
        if response.status_code != 200:
            raise ChatError(_refusal(response))
        listed = _json(response.text).get("data") or []
        models = {str(model.get("id")): model for model in listed if isinstance(model, dict)}
        name = wanted or next(iter(models), None)
        if name is None or name not in models:
            raise ChatError(f"the server has no model {wanted!r}; it lists: {', '.join(models) or 'none'}")
        return name, models[name].get("owned_by") == "fermion"


# Text, or parts where there are pictures.
Question = str | list[dict[str, Any]]


@dataclass(slots=True)
class Conversation:
    """The messages so far. A turn is added whole: an answer that failed leaves no trace of its question."""

    system: str | None
    turns: list[dict[str, Any]] = field(default_factory=list)

    def with_question(self, question: Question) -> list[dict[str, Any]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns, {"role": "user", "content": question}]

    def add(self, question: Question, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


class Screen:
    """Writes one answer to a terminal or pipe. Reasoning is dimmed; colours only on terminals, never with NO_COLOR."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._colours = self._terminal and not os.environ.get("NO_COLOR")
        self._dimmed = False
        self._progress_shown = False
        self._fresh_line = True

    def show(self, event: ChatEvent) -> None:
        """Write a piece of an answer."""
        if isinstance(event, PromptProgress):
            if self._terminal and event.total:
                self._out.write(f"\r\x1b[Kreading the prompt: {event.processed} of {event.total} tokens")
                self._progress_shown = True
        elif isinstance(event, Reasoning):
            self._text(event.text, dim=True)
        elif isinstance(event, Content):
            self._text(event.text, dim=False)
        self._out.flush()

    def note(self, text: str) -> None:
        """A dimmed line of our own, at the start of a line."""
        self._clear_progress()
        if not self._fresh_line:
            self._out.write("\n")
        self._dim(True)
        self._out.write(text)
        self._dim(False)
        self._out.write("\n")
        self._fresh_line = True
        self._out.flush()

    def _text(self, text: str, *, dim: bool) -> None:
        self._clear_progress()
        if dim != self._dimmed:
            if self._dimmed and not self._fresh_line:
                self._out.write("\n")
                self._fresh_line = True
            self._dim(dim)
        if self._fresh_line:
            text = text.lstrip("\n")
        if text:
            self._out.write(printable(text))
            self._fresh_line = text.endswith("\n")

    def _dim(self, dim: bool) -> None:
        if dim != self._dimmed and self._colours:
            self._out.write("\x1b[2m" if dim else "\x1b[0m")
        self._dimmed = dim

    def _clear_progress(self) -> None:
        if self._progress_shown:
            self._out.write("\r\x1b[K")
            self._progress_shown = False


def printable(text: str) -> str:
    """`text` without control characters but newline and tab: a model must not steer the terminal."""
    return "".join(char for char in text if char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160))


def run(url: str, api_key: str | None, options: ChatOptions) -> None:
    """Talk until the input ends. Lines from a pipe are turns too. Raises ChatError if the server is not there."""
    client = ChatClient(url, api_key, options.model_name)
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401  line editing and history for input(), by being imported

            print(f"{client.model_name} at {url}. /help lists commands.")
        Session(client, options, Screen(sys.stdout)).loop()
    finally:
        client.close()


class Session:
    """A talk: reads lines, runs commands, asks the server."""

    def __init__(self, client: ChatClient, options: ChatOptions, screen: Screen) -> None:
        self._client = client
        self._options = options
        self._screen = screen
        self._conversation = Conversation(options.system)
        self._pictures: list[str] = []

    def loop(self) -> None:
        """Handle lines until end of input or /quit."""
        while (line := self._read()) is not None:
            text = line.strip()
            if text.startswith("/"):
                if not self._command(text):
                    return
            elif text:
                self._ask(text)

    def _read(self) -> str | None:
        interactive = sys.stdin.isatty()
        lines: list[str] = []
        while True:
            try:
                line = input(("... " if lines else "> ") if interactive else "")
            except EOFError:
                if interactive:
                    print()
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit ends the talk)")
                lines.clear()
                continue
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def _command(self, text: str) -> bool:
        """Run a /command; False ends the talk."""
        name, _, rest = text.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name == "/image":
            self._attach(Path(rest.strip()).expanduser())
        elif name == "/new":
            self._conversation = Conversation(self._conversation.system)
            self._pictures.clear()
            self._screen.note("new conversation")
        elif name == "/system":
            self._conversation = Conversation(rest.strip() or None)
            self._screen.note("new conversation, system message set" if rest.strip() else "no system message")
        elif name == "/think" and rest.strip() in ("on", "off"):
            self._options = replace(self._options, think=rest.strip() == "on")
            self._screen.note(f"reasoning {rest.strip()}")
        else:
            self._screen.note(_HELP)
        return True

    def _attach(self, path: Path) -> None:
        """Keep a picture for the next question. Whether it is one, the server decides."""
        try:
            size = path.stat().st_size
            if size > _MAX_PICTURE:
                self._screen.note(f"error: {path} has {size} bytes, at most {_MAX_PICTURE} can be sent")
                return
            data = path.read_bytes()
        except OSError as error:
            self._screen.note(f"error: {path}: {error.strerror}")
            return
        self._pictures.append(f"data:image/*;base64,{base64.b64encode(data).decode('ascii')}")
        self._screen.note(f"{path.name} goes with the next question")

    def _ask(self, text: str) -> None:
        """One turn. Ctrl-C keeps what was answered so far; a refusal is shown and the turn forgotten."""
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in self._pictures]
        question: Question = [*pictures, {"type": "text", "text": text}] if pictures else text
        self._pictures.clear()
        answer: list[str] = []
        usage: Usage | None = None
        asked, first = time.monotonic(), 0.0
        events = self._client.answer(self._conversation.with_question(question), self._options)
        try:
            for event in events:
                if isinstance(event, Usage):
                    usage = event
                    continue
                if isinstance(event, Content | Reasoning) and not first:
                    first = time.monotonic()
                if isinstance(event, Content):
                    answer.append(event.text)
                self._screen.show(event)
            self._screen.note(_summary(usage, asked, first, time.monotonic()))
        except KeyboardInterrupt:
            events.close()  # type: ignore[attr-defined]
            self._screen.note("(stopped)")
        except ChatError as error:
            self._screen.note(f"error: {error}")
            return
        self._conversation.add(question, "".join(answer))


@contextmanager
def local_server(settings: Settings) -> Iterator[str]:
    """Serve in this process on a free loopback port while the block runs; gives the /v1 URL.

    Raises the error that kept the engine from loading.
    """
    from server.app import make_server

    local = settings.model_copy(update={"host": "127.0.0.1", "port": 0, "api_key": None, "api_key_file": None})
    server, worker = make_server(local.server_config(), local.engine_config())
    worker.start()
    thread = threading.Thread(target=server.run, name="fermion-http", daemon=True)
    thread.start()
    try:
        while not (server.started and worker.is_ready):
            if worker.failure is not None:
                raise worker.failure
            if not thread.is_alive():
                raise ChatError("the server ended before it was ready")
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join(5.0)
        worker.close()


def _events(chunk: Mapping[str, Any]) -> Iterator[ChatEvent]:
    """What a chunk of the stream says. Raises ChatError for an error event."""
    if error := chunk.get("error"):
        raise ChatError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if text := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Reasoning(text)
        if text := delta.get("content"):
            yield Content(text)
    if progress := chunk.get("prompt_progress"):
        yield PromptProgress(progress["processed"], progress["total"])
    if usage := chunk.get("usage"):
        yield Usage(usage["prompt_tokens"], usage["completion_tokens"])


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise ChatError(f"the server sent something that is not JSON: {text[:80]!r}") from None
    if not isinstance(value, dict):
        raise ChatError(f"the server sent {type(value).__name__} where an object was expected")
    return value


def _refusal(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200] or response.reason_phrase
    return f"the server answered {response.status_code}: {message}"


def _summary(usage: Usage | None, asked: float, first: float, done: float) -> str:
    if usage is None or not first:
        return f"({done - asked:.1f} s)"
    text = f"({usage.completion_tokens} tokens, first after {first - asked:.2f} s"
    if usage.completion_tokens > 1 and done > first:
        text += f", then {(usage.completion_tokens - 1) / (done - first):.0f} per second"
    return text + ")"
