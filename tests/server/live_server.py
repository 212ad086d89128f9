"""The real HTTP server on a free loopback port, in a thread, over a scripted engine and a tiny tokenizer."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import uvicorn
from fake_engine import FakeEngine
from tokenizers import decoders, models, pre_tokenizers

from engine.image import PreprocessorConfig
from engine.tokenizer import Tokenizer
from server.app import GracefulServer, create_app, create_service
from server.fetch import Fetcher
from server.images import PictureReader
from server.worker import EngineWorker

MODEL = "test-model"
PREPROCESSOR = PreprocessorConfig(patch_size=16, merge_size=2, min_pixels=4096, max_pixels=65536)
TEMPLATE = Path(__file__).parents[2] / "engine" / "demo" / "chat_template.jinja"

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_WORDS = ("the", "quick", "brown", "fox", "own", "get", "weather", "city", "Paris", "function", "parameter")
_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def write_checkpoint_texts(directory: Path) -> None:
    """The text files of a checkpoint: byte-level tokenizer with a few merged words, template, defaults."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in (spaced for plain in _WORDS for spaced in (plain, f"\u0120{plain}")):
        left = word[0]
        for symbol in word[1:]:
            if left + symbol not in vocabulary:
                vocabulary[left + symbol] = len(vocabulary)
                merges.append((left, symbol))
            left += symbol
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False, special=False) for text in TEXT_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    shutil.copy(TEMPLATE, directory / "chat_template.jinja")
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    defaults = {"eos_token_id": ends, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    (directory / "generation_config.json").write_text(json.dumps(defaults))


@dataclass
class LiveServer:
    """A running server; `engine` is the scripted engine behind it."""

    engine: FakeEngine
    worker: EngineWorker
    server: GracefulServer
    thread: threading.Thread
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.worker.close()
        assert not self.thread.is_alive()


def start(
    directory: Path,
    *,
    queue_size: int = 8,
    request_timeout_s: float = 0.0,
    keep_alive_s: float = 5.0,
    api_keys: Iterable[str] = (),
    cors_origins: Iterable[str] = (),
    max_body_bytes: int = 1 << 20,
    grace_s: float = 2.0,
    context_length: int = 4096,
    max_images: int | None = 8,
    fetcher: Fetcher | None = None,
) -> LiveServer:
    """Serve the checkpoint texts in `directory`. max_images: None for a model without eyes."""
    tokenizer = Tokenizer.load(directory)
    engine = FakeEngine(tokenizer, context_length=context_length)
    service = create_service(
        directory,
        lambda: engine,
        model_name=MODEL,
        queue_size=queue_size,
        request_timeout_s=request_timeout_s,
        keep_alive_s=keep_alive_s,
        max_body_bytes=max_body_bytes,
        pictures=None
        if max_images is None
        else PictureReader(PREPROCESSOR, max_pixels=65536, per_request=max_images, fetcher=fetcher),
    )
    worker = service.worker
    app = create_app(service, api_keys=tuple(api_keys), cors_origins=tuple(cors_origins))
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    server = GracefulServer(config, worker, grace_s)
    worker.start()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    live = LiveServer(engine, worker, server, thread, listener.getsockname()[1])
    _wait_until_ready(live)
    return live


def _wait_until_ready(live: LiveServer) -> None:
    for _ in range(500):
        if live.server.started and live.worker.is_ready:
            return
        time.sleep(0.01)
    raise TimeoutError("the server did not start")


def chat_body(content: Any = "Hello", **fields: Any) -> dict[str, Any]:
    """A chat request with one user message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def access_line(caplog: pytest.LogCaptureFixture, word: str) -> str:
    """The first line of the access log that holds `word`; it is written a moment after the answer."""
    for _ in range(500):
        for record in caplog.records:
            if record.name == "fermion.access" and word in record.getMessage():
                return record.getMessage()
        time.sleep(0.01)
    raise AssertionError(f"no access log line with {word!r}")
