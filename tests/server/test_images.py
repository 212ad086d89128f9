"""Pictures in requests: from every API's shape to the prompt, what is refused and how, and what that costs others."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_client import answer, both, post, send, stream_events
from live_server import MODEL, PREPROCESSOR, LiveServer, chat_body
from picture_files import data_url, encode, pattern
from PIL import Image
from test_image import REFUSED, TURNS, mutants, resident

from engine.core import Prompt
from engine.errors import RequestError
from engine.image import Picture, load_picture
from engine.tokenizer import Tokenizer
from server.prompt import GenerationDefaults, PromptBuilder
from server.schema import ChatCompletionRequest
from server.template import ChatTemplate

WIDE = encode(pattern(64, 128))  # 8 tokens
TALL = encode(pattern(96, 64, seed=1))  # 6 tokens
TEXT = {"type": "text", "text": "What is it?"}


def part(data: bytes = WIDE, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}


def block(data: bytes = WIDE, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def item(data: bytes = WIDE) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data), "detail": "auto"}


def loaded(data: bytes) -> Picture:
    return load_picture(data, PREPROCESSOR)


def prompt_of(live: LiveServer, body: Any, path: str = "/v1/chat/completions") -> Prompt:
    response = post(live, body, path)
    assert response.status == 200, response.body
    return live.engine.requests[-1].prompt


def ids_of(checkpoint: Path, *names: str) -> list[int]:
    return [Tokenizer.load(checkpoint).added_tokens[name] for name in names]


def check_spans(checkpoint: Path, prompt: Prompt, *files: bytes) -> None:
    """The prompt holds these pictures in this order, each in its frame and at its place."""
    pad, start, end = ids_of(checkpoint, "<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = prompt.token_ids.tolist()
    assert ids.count(pad) == sum(span.count for span in prompt.images)
    assert len(prompt.images) == len(files)
    for span, data in zip(prompt.images, files, strict=True):
        picture = loaded(data)
        assert (span.pixels == picture.pixels).all()
        assert (span.count, span.digest) == (picture.tokens, picture.digest)
        after = span.start + span.count
        assert ids[span.start - 1 : after + 1] == [start, *[pad] * span.count, end]
        assert after in prompt.boundaries
    assert list(prompt.boundaries) == sorted(set(prompt.boundaries))


@pytest.mark.parametrize("spelt", [data_url(WIDE), {"url": data_url(WIDE)}, {"url": data_url(WIDE), "detail": "high"}])
def test_a_picture_takes_its_place(live: LiveServer, checkpoint: Path, spelt: Any) -> None:
    given = {"type": "image_url", "image_url": spelt}
    plain = prompt_of(live, chat_body([TEXT]))
    prompt = prompt_of(live, chat_body([given, TEXT]))
    check_spans(checkpoint, prompt, WIDE)
    assert len(prompt.token_ids) == len(plain.token_ids) + 8 + 2


def test_several_pictures_between_texts(live: LiveServer, checkpoint: Path) -> None:
    content = [part(WIDE), TEXT, part(TALL), part(WIDE), {"type": "text", "text": "And that?"}]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "Waves."},
        {"role": "user", "content": [part(TALL)]},
    ]
    prompt = prompt_of(live, {"model": MODEL, "messages": messages})
    check_spans(checkpoint, prompt, WIDE, TALL, WIDE, TALL)
    assert prompt.images[0].digest == prompt.images[2].digest != prompt.images[1].digest


def test_tool_results_show_pictures(live: LiveServer, checkpoint: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Take a photo."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "here:"}, part(TALL)]},
    ]
    check_spans(checkpoint, prompt_of(live, {"model": MODEL, "messages": messages}), TALL)


def test_the_anthropic_shape(live: LiveServer, checkpoint: Path) -> None:
    tool_use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "see"}, block(TALL)]}
    messages = [
        {"role": "user", "content": [block(WIDE, "image/jpeg"), {"type": "text", "text": "Compare with a photo."}]},
        {"role": "assistant", "content": [tool_use]},
        {"role": "user", "content": [result, block(WIDE)]},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 20}
    prompt = prompt_of(live, body, "/v1/messages")
    check_spans(checkpoint, prompt, WIDE, TALL, WIDE)
    count = post(live, {"model": MODEL, "messages": messages}, "/v1/messages/count_tokens").json
    assert count == {"input_tokens": len(prompt.token_ids)}


def test_the_responses_shape(live: LiveServer, checkpoint: Path) -> None:
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "Compare with a photo."}, item(WIDE)]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [item(TALL)]},
    ]
    prompt = prompt_of(live, {"model": MODEL, "input": given}, "/v1/responses")
    check_spans(checkpoint, prompt, WIDE, TALL)


def test_picture_tokens_are_counted(live: LiveServer) -> None:
    body = chat_body([part(WIDE), part(TALL), TEXT])
    tokens = post(live, body, "/tokenize").json
    whole = both(live, body)
    assert whole["usage"]["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])
    assert tokens["tokens"] == live.engine.requests[-1].prompt.token_ids.tolist()
    shown = post(live, body, "/apply-template").json["prompt"]
    assert shown.count("<|vision_start|><|image_pad|><|vision_end|>") == 2


def test_detail_low_takes_fewer_tokens(
    start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.image.LOW_PIXELS", 16384)
    live = start_server()
    data = encode(pattern(256, 256))
    counts = [
        sum(span.count for span in prompt_of(live, chat_body([part(data, **fields)])).images)
        for fields in ({}, {"detail": "auto"}, {"detail": "high"}, {"detail": "original"}, {"detail": "low"})
    ]
    assert counts == [64, 64, 64, 64, 16]


def test_forged_pictures_are_text(live: LiveServer, checkpoint: Path) -> None:
    forged = {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>"}
    prompt = prompt_of(live, chat_body([forged, part(WIDE), forged]))
    check_spans(checkpoint, prompt, WIDE)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_bad_pictures_are_refused_with_the_reason(live: LiveServer, name: str, stream: bool) -> None:
    data, reason = REFUSED[name]
    response = post(live, chat_body([TEXT, part(), part(data)], stream=stream))
    assert response.status == 400
    assert response.error["param"] == "messages[0].content[2].image_url"
    assert response.error["code"] == ("image_too_large" if name.startswith("large") else "invalid_image")
    assert reason in response.error["message"]
    assert live.engine.requests == []


URLS = [
    ("file:///etc/passwd", "invalid_image_url", "data: URL"),
    ("ftp://example.com/a.png", "invalid_image_url", "data: URL"),
    ("iVBORw0KGgo", "invalid_image_url", "data: URL"),
    ("", "invalid_image_url", "data: URL"),
    ("data:image/png,abc", "invalid_image_url", "base64"),
    ("data:image/png;base64", "invalid_image_url", "base64"),
    ("data:image/png;base64,@@@@", "invalid_image", "base64"),
    ("data:image/png;base64,AAA", "invalid_image", "base64"),
    ("data:image/png;base64,ä", "invalid_image", "base64"),
    ("data:image/png;base64,", "invalid_image", "empty"),
    ("http://169.254.169.254/latest/meta-data", "image_fetch_disabled", "does not fetch"),
    ("https://example.com/a.png", "image_fetch_disabled", "does not fetch"),
    ("HTTP://[::1]/a.png", "image_fetch_disabled", "does not fetch"),
]


@pytest.mark.parametrize(("url", "code", "reason"), URLS)
def test_urls_that_are_not_read(live: LiveServer, url: str, code: str, reason: str) -> None:
    response = post(live, chat_body([{"type": "image_url", "image_url": {"url": url}}]))
    assert (response.status, response.error["code"]) == (400, code)
    assert response.error["param"] == "messages[0].content[0].image_url"
    assert reason in response.error["message"]


@pytest.mark.parametrize("spell", [lambda text: text[:40] + "\r\n " + text[40:], lambda text: text.replace("+", "%2B")])
def test_base64_as_people_write_it(live: LiveServer, spell: Callable[[str], str]) -> None:
    encoded = base64.b64encode(WIDE).decode()
    assert "+" in encoded
    url = "DATA:;BASE64," + spell(encoded)
    assert post(live, chat_body([{"type": "image_url", "image_url": url}])).status == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": [TEXT, block(b"x")]}], "max_tokens": 5}, None),
        ("/v1/responses", {"input": [{"role": "user", "content": [item(b"x")]}]}, "input[0].content[0].image_url"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [item(b"x")]}]},
            "input[0].output[0].image_url",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "system", "content": [item()]}, {"role": "user", "content": "x"}]},
            "input[0].content[0].input_image",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": [part()]}, {"role": "user", "content": "x"}]},
            "messages[0].content[0].image_url",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [TEXT, part()]}]},
            "messages[1].content[1].image_url",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": [part(b"x")]}]}, "messages[0].content[0].image_url"),
        ("/apply-template", {"messages": [{"role": "user", "content": [part(b"x")]}]}, None),
    ],
)
def test_refusals_name_the_field_of_the_clients_own_shape(
    live: LiveServer, path: str, body: dict[str, Any], param: str | None
) -> None:
    response = post(live, {"model": MODEL, **body}, path)
    assert response.status == 400
    assert param is None or response.error["param"] == param
    assert live.engine.requests == []


@pytest.mark.parametrize("kind", ["file", "text"])
def test_other_sources_of_the_anthropic_shape(live: LiveServer, kind: str) -> None:
    given = {"type": "image", "source": {"type": kind, "file_id": "f"}}
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": [given]}]}
    response = post(live, body, "/v1/messages")
    assert response.status == 400
    assert "source" in response.json["error"]["message"]
    body["messages"] = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]}]
    assert "does not fetch" in post(live, body, "/v1/messages").json["error"]["message"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "video_url"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
        ({"type": "file", "file": {"file_id": "f"}}, "file"),
    ],
)
def test_other_media_are_refused_by_name(live: LiveServer, given: dict[str, Any], named: str) -> None:
    response = post(live, chat_body([TEXT, part(), given]))
    assert (response.status, response.error["code"]) == (400, "unsupported_parameter")
    assert response.error["param"] == f"messages[0].content[2].{named}"


def test_too_many_pictures(live: LiveServer) -> None:
    response = post(live, chat_body([part()] * 9))
    assert (response.status, response.error["code"]) == (400, "too_many_images")
    assert response.error["param"] == "messages[0].content[8].image_url"
    assert "9 pictures; at most 8" in response.error["message"]
    assert post(live, chat_body([part()] * 8)).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_eyes_says_so(start_server: Callable[..., LiveServer], stream: bool) -> None:
    live = start_server(max_images=None)
    response = post(live, chat_body([TEXT, part()], stream=stream))
    assert (response.status, response.error["code"]) == (400, "unsupported_parameter")
    assert response.error["param"] == "messages[0].content[1].image_url"
    assert "reads no pictures" in response.error["message"]


def test_pictures_that_exceed_the_context(start_server: Callable[..., LiveServer]) -> None:
    live = start_server(context_length=100)
    response = post(live, chat_body([part(encode(pattern(256, 256)))] * 3))
    assert (response.status, response.error["code"]) == (400, "context_length_exceeded")


def test_bodies_with_pictures_may_be_large_but_not_endless(start_server: Callable[..., LiveServer]) -> None:
    live = start_server(max_body_bytes=300_000)
    assert post(live, chat_body([part(encode(pattern(256, 256), "BMP"))])).status == 200
    response = post(live, chat_body([part(encode(pattern(512, 256), "BMP"))]))
    assert (response.status, response.error["code"]) == (413, "request_too_large")


def test_the_answer_is_the_same_in_both_modes(live: LiveServer) -> None:
    text, reason = answer(live, chat_body([part(), TEXT], enable_thinking=False))
    assert (text is not None, reason) == (True, "stop")
    assert stream_events(live, chat_body([part(), TEXT]))


def test_decoding_keeps_nobody_waiting(
    start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While more pictures are decoded than there are threads for that, everything else is answered."""
    finish, at_work, most = threading.Event(), threading.Semaphore(0), []

    def slow(*args: Any, **kwargs: Any) -> Picture:
        most.append(1)
        at_work.release()
        assert finish.wait(30)
        return loaded(WIDE)

    monkeypatch.setattr("server.images.load_picture", slow)
    live = start_server(queue_size=100)
    with ThreadPoolExecutor(40) as pool:
        busy = [pool.submit(post, live, chat_body([part(encode(pattern(9, 9, seed=seed)))])) for seed in range(40)]
        assert at_work.acquire(timeout=30)
        assert at_work.acquire(timeout=30)
        assert send(live, "GET", "/health").status == 200
        assert post(live, chat_body("only text")).status == 200
        assert len(most) == 2
        finish.set()
        assert {pending.result().status for pending in busy} == {200}


def test_decoded_pictures_are_kept_per_tenant(
    start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []

    def counting(data: bytes, *args: Any, **kwargs: Any) -> Picture:
        decoded.append(data)
        return load_picture(data, *args, **kwargs)

    monkeypatch.setattr("server.images.load_picture", counting)
    live = start_server(api_keys=["a", "b"])
    for _ in range(3):
        assert post(live, chat_body([part(WIDE), part(TALL)]), authorization="Bearer a").status == 200
    assert decoded == [WIDE, TALL] or decoded == [TALL, WIDE]
    assert post(live, chat_body([part(WIDE)]), authorization="Bearer b").status == 200
    assert len(decoded) == 3


def test_kept_pictures_are_bounded(start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.images._RECENT_BYTES", 2 * 64 * 128 * 3)
    live = start_server()
    files = [encode(pattern(64, 128, seed=seed)) for seed in range(5)]
    for data in [*files, *files]:
        prompt = prompt_of(live, chat_body([part(data)]))
        assert (prompt.images[0].pixels == loaded(data).pixels).all()


def check_mutants(live: LiveServer, seed: int, count: int) -> set[int]:
    """Damaged files are answered, or refused with the reason."""
    seen = set()
    for data in mutants(seed, count):
        response = post(live, chat_body([part(data)], max_tokens=1))
        seen.add(response.status)
        if response.status != 200:
            assert (response.status, response.error["param"]) == (400, "messages[0].content[0].image_url")
            assert response.error["code"] in ("invalid_image", "image_too_large")
            assert response.error["message"].endswith(".")
        live.engine.requests.clear()
    return seen


def test_damaged_files_are_answered_or_refused(live: LiveServer) -> None:
    assert check_mutants(live, seed=4, count=80) == {200, 400}


@pytest.mark.exhaustive
def test_five_thousand_damaged_files_over_http(live: LiveServer) -> None:
    check_mutants(live, seed=5, count=500)
    before = resident()
    check_mutants(live, seed=6, count=4500)
    assert resident() - before < 96 << 20


def test_photographs_stand_upright(live: LiveServer) -> None:
    scene = pattern(64, 96)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(np.ascontiguousarray(dict(TURNS)[6](scene)), exif=exif)
    assert (prompt_of(live, chat_body([part(data)])).images[0].pixels == scene).all()


def test_templates_that_drop_pictures_are_refused(checkpoint: Path) -> None:
    source = "{%- for message in messages %}{{- message.role }}{%- endfor %}"
    builder = PromptBuilder(Tokenizer.load(checkpoint), ChatTemplate(source), GenerationDefaults.load(checkpoint))
    request = ChatCompletionRequest.model_validate(chat_body([part(), TEXT]))
    with pytest.raises(RequestError, match="shows 0 of the 1 pictures") as refusal:
        builder.chat(request, pictures=[loaded(WIDE)])
    assert (refusal.value.param, refusal.value.code) == ("messages", "pictures_not_shown")
