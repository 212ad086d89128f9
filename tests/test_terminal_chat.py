"""The terminal client against a scripted server: streaming, history, interruption, refusals, hostile output."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from server import chat
from server.chat import ChatClient, ChatError, ChatOptions, Content, PromptProgress, Reasoning, Screen, Session, Usage
from server.config import load_settings

USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


class ScriptedServer:
    """Answers POST with `chunks` (a dict is an event, a callable runs in between), or with `refusal`."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, Any] | Callable[[], None]] = []
        self.refusal: tuple[int, bytes] | None = None
        self.models: list[dict[str, str]] = [{"id": "m", "owned_by": "fermion"}]
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.client_left = threading.Event()
        self.url = ""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    script = ScriptedServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            script.keys.append(self.headers["authorization"])
            self._reply(200, json.dumps({"data": script.models}).encode())

        def do_POST(self) -> None:
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if script.refusal is not None:
                self._reply(*script.refusal)
                return
            self.send_response(200)
            self.end_headers()
            try:
                for chunk in script.chunks:
                    if callable(chunk):
                        chunk()
                    else:
                        self.wfile.write(b": alive\n\ndata: " + json.dumps(chunk).encode() + b"\n\n")
                        self.wfile.flush()
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                script.client_left.set()

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    script.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    yield script
    http.shutdown()
    http.server_close()
    thread.join()


@contextmanager
def client_of(server: ScriptedServer, **arguments: str) -> Iterator[ChatClient]:
    client = ChatClient(server.url, **arguments)
    try:
        yield client
    finally:
        client.close()


def talk(server: ScriptedServer, lines: list[str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    out = io.StringIO()
    with client_of(server) as client:
        Session(client, ChatOptions(**options), Screen(out)).loop()
    return out.getvalue()


def test_events_arrive_in_order(server: ScriptedServer) -> None:
    server.chunks = [
        {"choices": [], "prompt_progress": {"processed": 1, "total": 5}},
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="Hel"),
        delta(content="lo"),
        USAGE,
    ]
    with client_of(server) as client:
        events = list(client.answer([], ChatOptions()))
    assert events == [PromptProgress(1, 5), Reasoning("hm"), Content("Hel"), Content("lo"), Usage(5, 2)]


def test_history_is_sent_without_reasoning(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.chunks = [delta(reasoning_content="hm"), delta(content="yes"), USAGE]
    talk(server, ["one", "two"], monkeypatch, system="be brief")
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "two"},
    ]


def test_new_forgets_and_system_starts_anew(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.chunks = [delta(content="a")]
    talk(server, ["one", "/new", "two", "/system s", "three", "/quit", "never"], monkeypatch)
    assert [[message["content"] for message in body["messages"]] for body in server.bodies] == [
        ["one"],
        ["two"],
        ["s", "three"],
    ]


def test_pictures_go_with_the_next_question(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a b.png"
    path.write_bytes(b"abc")
    server.chunks = [delta(content="A cat.")]
    lines = [f"/image {path}", "/image /none.png", "What is it?", "Sure?", "/new", f"/image {path}", "/new", "Hello"]
    shown = talk(server, lines, monkeypatch)
    assert "a b.png goes with the next question" in shown
    assert "error: /none.png: No such file" in shown
    picture = {"type": "image_url", "image_url": {"url": "data:image/*;base64,YWJj"}}
    question = {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}
    first, second, third = (body["messages"] for body in server.bodies)
    assert first == [question]
    assert second == [question, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}]
    assert third == [{"role": "user", "content": "Hello"}]


def test_a_backslash_continues_the_line(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(server, ["one\\", "two"], monkeypatch)
    assert server.bodies[0]["messages"][0]["content"] == "one\ntwo"


def test_options_go_into_the_request(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(server, ["x", "/think on", "y"], monkeypatch, think=False, temperature=0.5, max_tokens=9)
    first, second = server.bodies
    assert (first["temperature"], first["max_tokens"]) == (0.5, 9)
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in second


def test_a_foreign_server_gets_no_extension(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.models = [{"id": "other", "owned_by": "someone"}]
    talk(server, ["x"], monkeypatch)
    assert set(server.bodies[0]) == {"model", "messages", "stream", "stream_options"}


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    filler = [delta(content="x" * 65536)] * 200
    server.chunks = [delta(content="first"), lambda: released.wait(10), *filler]
    show = Screen.show

    def interrupt(self: Screen, event: chat.ChatEvent) -> None:
        show(self, event)
        if event == Content("first"):
            released.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "show", interrupt)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    out = io.StringIO()
    with client_of(server) as client:
        session = Session(client, ChatOptions(), Screen(out))
        session.loop()
        assert server.client_left.wait(10)
        server.chunks = []
        monkeypatch.setattr("sys.stdin", io.StringIO("two\n"))
        session.loop()
    assert out.getvalue().startswith("first\n(stopped)\n")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "first", "two"]


def test_a_refusal_is_shown_and_the_turn_forgotten(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.refusal = (400, json.dumps({"error": {"message": "too long"}}).encode())
    shown = talk(server, ["one", "two"], monkeypatch)
    assert shown.splitlines() == ["error: the server answered 400: too long"] * 2
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["two"]


def test_an_error_within_the_stream_is_shown(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.chunks = [delta(content="half"), {"error": {"message": "engine failed"}}]
    assert talk(server, ["one"], monkeypatch).splitlines() == ["half", "error: engine failed"]


@pytest.mark.parametrize("body", [b"<html>bad gateway</html>", b'{"detail": 1}', b'["x"]'])
def test_a_refusal_of_another_shape_is_quoted(body: bytes, server: ScriptedServer) -> None:
    server.refusal = (502, body)
    with client_of(server) as client, pytest.raises(ChatError) as caught:
        list(client.answer([], ChatOptions()))
    assert str(caught.value) == f"the server answered 502: {body.decode()}"


def test_the_key_is_sent(server: ScriptedServer) -> None:
    with client_of(server, api_key="k"):
        assert server.keys == ["Bearer k"]


def test_a_model_that_is_not_there_is_named(server: ScriptedServer) -> None:
    with pytest.raises(ChatError, match="no model 'z'; it lists: m"):
        ChatClient(server.url, model_name="z")


def test_a_model_cannot_steer_the_terminal(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.chunks = [delta(content="a\x1b]0;title\x07b\r\x9b31mc\td\u00e9\u4f60\n")]
    assert talk(server, ["one"], monkeypatch).splitlines()[0] == "a]0;titleb31mc\td\u00e9\u4f60"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_reasoning_is_dimmed_and_set_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    screen = Screen(out)
    for event in (Reasoning("\nhm"), Reasoning(" so"), Content("\n\nyes")):
        screen.show(event)
    assert out.getvalue() == "\x1b[2mhm so\n\x1b[0myes"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    Screen(out).show(Reasoning("hm"))
    assert out.getvalue() == "hm"


def test_progress_is_redrawn_and_cleared() -> None:
    out = Terminal()
    screen = Screen(out)
    screen.show(PromptProgress(64, 128))
    screen.show(Content("a"))
    assert out.getvalue() == "\r\x1b[Kreading the prompt: 64 of 128 tokens\r\x1b[Ka"


def test_a_server_of_our_own_answers_and_goes() -> None:
    settings = load_settings({"threads": 1, "context_length": 512})
    with chat.local_server(settings) as url:
        client = ChatClient(url)
        events = list(client.answer([{"role": "user", "content": "Hello!"}], ChatOptions(max_tokens=8)))
        client.close()
    assert any(isinstance(event, Content | Reasoning) for event in events)
    assert isinstance(events[-1], Usage)
    with pytest.raises(ChatError, match="no server answers"):
        ChatClient(url)
