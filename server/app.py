"""Puts the server together: routes, wrappers, start and graceful end. Holds no global state."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.errors import ConfigError, ModelFileError
from engine.image import PreprocessorConfig
from engine.tokenizer import Tokenizer
from server.cache_routes import CacheList, CachePin, CacheWarm
from server.completions import Completions
from server.config import ServerConfig
from server.errors import ApiError
from server.fetch import Fetcher
from server.generation import ChoiceBuilder
from server.images import PictureReader
from server.inspect_routes import ApplyTemplate, Detokenize, MetricsPage, RequestState, Tokenize
from server.logprobs import TokenNames
from server.messages import CountTokens, Messages
from server.metrics import Metrics
from server.openapi import OpenApi
from server.prompt import IMAGE_PAD, GenerationDefaults, PromptBuilder
from server.responses import Responses
from server.routes import ChatCompletions, Health, ModelEntry, ModelsList, Service
from server.template import ChatTemplate
from server.transport import Api, KeyCheck, RequestEnvelope
from server.worker import EngineWorker, GeneratingEngine

log = logging.getLogger("fermion.server")

_OPEN_PATHS = frozenset({"/health"})
# After the grace period, how long connections get to deliver their final error event.
_LAST_WORDS_S = 5


def create_service(
    directory: Path,
    load_engine: Callable[[], GeneratingEngine],
    *,
    model_name: str,
    queue_size: int,
    keep_alive_s: float,
    max_body_bytes: int,
    request_timeout_s: float = 0.0,
    pictures: PictureReader | None = None,
    shadow: bool = True,
    preserve_thinking: bool = False,
) -> Service:
    """Everything behind the endpoints, for the checkpoint in `directory`.

    request_timeout_s: 0 is no limit; pictures: None for a model that reads none; shadow: read ahead when idle;
    preserve_thinking: as in `Settings`. ModelFileError if its text files are missing or wrong. The engine is loaded
    when the worker is started.
    """
    tokenizer = Tokenizer.load(directory)
    prompts = PromptBuilder(
        tokenizer,
        ChatTemplate.load(directory),
        GenerationDefaults.load(directory),
        preserve_thinking=preserve_thinking,
    )
    metrics = Metrics(model_name)
    worker = EngineWorker(
        load_engine,
        max_queued=queue_size,
        time_limit_s=request_timeout_s,
        shadow=shadow,
        observe=metrics.observe,
    )
    metrics.watch(worker)
    return Service(
        worker=worker,
        prompts=prompts,
        choices=ChoiceBuilder(prompts, (directory / "tokenizer.json").read_text("utf-8")),
        tokens=TokenNames(tokenizer),
        metrics=metrics,
        model=model_name,
        keep_alive_s=keep_alive_s,
        max_body_bytes=max_body_bytes,
        pictures=pictures,
    )


def picture_reader(directory: Path, config: ServerConfig) -> PictureReader | None:
    """What reads the pictures for the checkpoint in `directory`; None if its model has no vision tower.

    ModelFileError, ConfigError: the checkpoint's files are missing or contradict each other.
    """
    model = ModelConfig.load(directory)
    if model.vision is None:
        return None
    pad = Tokenizer.load(directory).added_tokens.get(IMAGE_PAD)
    if pad is None or pad != model.image_token_id:
        raise ModelFileError(
            f"{directory}: image_token_id is {model.image_token_id}, but the tokenizer's {IMAGE_PAD} is {pad}"
        )
    return PictureReader(
        PreprocessorConfig.load(directory, model.vision),
        max_pixels=config.image_max_pixels,
        per_request=config.max_images,
        fetcher=Fetcher() if config.image_fetch else None,
    )


def create_app(service: Service, *, api_keys: tuple[str, ...] = (), cors_origins: tuple[str, ...] = ()) -> ASGIApp:
    """The ASGI application. The caller starts and closes `service.worker`."""
    api = Api(
        [
            ("POST", "/v1/chat/completions", ChatCompletions(service)),
            ("POST", "/v1/completions", Completions(service)),
            ("POST", "/v1/messages", Messages(service)),
            ("POST", "/v1/messages/count_tokens", CountTokens(service)),
            ("POST", "/v1/responses", Responses(service)),
            ("GET", "/v1/models", ModelsList(service)),
            ("GET", "/v1/models/{model:path}", ModelEntry(service)),
            ("GET DELETE", "/v1/requests/{request:path}", RequestState(service)),
            ("GET DELETE", "/v1/cache", CacheList(service)),
            ("POST", "/v1/cache/warm", CacheWarm(service)),
            ("POST", "/v1/cache/pin", CachePin(service, pinned=True)),
            ("POST", "/v1/cache/unpin", CachePin(service, pinned=False)),
            ("POST", "/tokenize", Tokenize(service)),
            ("POST", "/detokenize", Detokenize(service)),
            ("POST", "/apply-template", ApplyTemplate(service)),
            ("GET", "/metrics", MetricsPage(service)),
            ("GET", "/openapi.json", OpenApi(service.model)),
            ("GET", "/health", Health(service)),
        ]
    )
    app: ASGIApp = RequestEnvelope(KeyCheck(api, api_keys, _OPEN_PATHS))
    if cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


class GracefulServer(uvicorn.Server):
    """uvicorn, with a first phase before its own shutdown: new requests get 503 while accepted ones finish.

    grace_s: seconds that accepted requests get; what is left then ends with an error event. A second signal skips
    the waiting, a third the rest.
    """

    def __init__(self, config: uvicorn.Config, worker: EngineWorker, grace_s: float) -> None:
        super().__init__(config)
        self._worker = worker
        self._grace_s = grace_s
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        self._guard = self._loop.create_task(self._stop_on_failure())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if not self.started or self._signals > 2:
            super().handle_exit(sig, frame)
        elif self._signals == 1:
            self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._worker.drain()
        self._drain = self._loop.create_task(self._finish_jobs())

    async def _finish_jobs(self) -> None:
        worker = self._worker
        left = worker.queued + worker.running
        if left:
            log.info("Shutting down: requests get %.0f s to finish, %d of them.", self._grace_s, left)
        else:
            log.info("Shutting down.")
        deadline = self._loop.time() + self._grace_s
        while (worker.queued or worker.running) and self._loop.time() < deadline and self._signals == 1:
            await asyncio.sleep(0.05)
        worker.abort_all(ApiError(503, "The server is shutting down.", code="shutting_down"))
        self.should_exit = True

    async def _stop_on_failure(self) -> None:
        """A failed engine answers nothing any more: end the process, so that whoever supervises it starts a new one."""
        while self._worker.failure is None:
            await asyncio.sleep(0.2)
        self.should_exit = True


def make_server(config: ServerConfig, engine_config: EngineConfig) -> tuple[GracefulServer, EngineWorker]:
    """A server for one checkpoint, and its worker; the caller starts and closes the worker and runs the server.

    ModelFileError if the checkpoint's text files are missing or wrong; the weights are checked by the engine.
    """
    directory = config.model
    service = create_service(
        directory,
        lambda: Engine.load(directory, engine_config),
        model_name=config.served_model_name,
        queue_size=config.queue_size,
        request_timeout_s=config.request_timeout_s,
        keep_alive_s=config.keep_alive_s,
        max_body_bytes=config.max_body_bytes,
        pictures=picture_reader(directory, config),
        shadow=config.shadow,
        preserve_thinking=config.preserve_thinking,
    )
    worker = service.worker
    app = create_app(service, api_keys=config.api_keys, cors_origins=config.cors_origins)
    server = GracefulServer(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            access_log=False,
            log_config=None,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=_LAST_WORDS_S,
            server_header=False,
        ),
        worker,
        config.shutdown_grace_s,
    )
    return server, worker


def serve(config: ServerConfig, engine_config: EngineConfig) -> int:
    """Serve a checkpoint until a signal ends it. Returns the exit status: 0, or 1 if the engine failed.

    ConfigError if the address cannot be listened on, before the model is loaded.
    """
    with listen(config.host, config.port) as listener:
        server, worker = make_server(config, engine_config)
        host, port = listener.getsockname()[:2]
        log.info(
            "%s is running on http://%s:%d/v1", config.served_model_name, f"[{host}]" if ":" in host else host, port
        )
        worker.start()
        # A terminal that is closed asks for the same as SIGTERM, unless nohup has it ignored.
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, server.handle_exit)
        try:
            server.run(sockets=[listener])
        finally:
            worker.close()
    return 0 if worker.failure is None else 1


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at `host` (a name or an address of either family). ConfigError says why there is none."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
