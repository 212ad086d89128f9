"""The engine: a loaded model and the life of one request in it, from prompt to last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType

from engine.config import EngineConfig, ModelConfig
from engine.core import CacheControl, FinishReason, Float32Array, GenerationRequest, Progress, TokenResult
from engine.errors import Cancelled, ContextLengthExceeded, ModelFileError, RequestError
from engine.model import Model
from engine.placement import Placement, place
from engine.reuse import ModelCache, PromptRun, Reuse, cache_bytes, template_markers
from engine.sampling import Sampler
from engine.tokenizer import Tokenizer
from engine.weights import load_weights

_REPORT_INTERVAL_S = 0.1
"""Progress is told at most this often."""


class Engine:
    """Runs one generation at a time, in the thread that calls it.

    model: sizes of the loaded model. placement: what was decided at load. vocab_size: ids that have a token; the
    model's rows above it are padding and are never drawn.
    """

    def __init__(self, model: Model, placement: Placement, vocab_size: int, reuse: Reuse) -> None:
        """Use `load`."""
        self._model = model
        self._reuse = reuse
        self.model: ModelConfig = model.config
        self.placement = placement
        self.vocab_size = vocab_size

    @staticmethod
    def load(path: Path, config: EngineConfig) -> Engine:
        """Map and check the checkpoint directory `path` and start the threads.

        The calling thread becomes one of them: generate from it. Raises ModelFileError, ConfigError, OutOfMemory.
        """
        weights = load_weights(path, ModelConfig.load(path))
        tokenizer = Tokenizer.load(path)
        tokens = tokenizer.vocab_size
        if tokens > weights.config.vocab_size:
            raise ModelFileError(
                f"{path}: the tokenizer has ids up to {tokens - 1}, the model {weights.config.vocab_size} rows"
            )
        kept_bytes = cache_bytes(weights, config)
        placement = place(weights.config, config, weights.file.nbytes, kept_bytes)
        # Before the model: it pins this thread, and threads that start later would share the one processor.
        cache = ModelCache(weights, config, kept_bytes) if kept_bytes else None
        reuse = Reuse(template_markers(tokenizer), config.pass_tokens, cache)
        try:
            model = Model(
                weights,
                config,
                threads=placement.threads,
                cpus=placement.cpus,
                max_context=placement.context_length,
            )
        except BaseException:
            reuse.close()
            raise
        return Engine(model, placement, tokens, reuse)

    @property
    def cache(self) -> CacheControl | None:
        """The prefix cache's administration, None if there is no cache."""
        return self._reuse.cache

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together."""
        return self.placement.context_length

    @property
    def tier(self) -> str:
        """The instruction set in use."""
        return self._model.cpu.tier

    @property
    def scratch_bytes(self) -> int:
        """Memory held for intermediate results."""
        return self._model.cpu.scratch_bytes

    def generate(
        self, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> Generator[Progress | TokenResult, None, None]:
        """Progress until the prompt is in the state, then one TokenResult per token.

        A token is computed only when the next item is asked for, so closing the generator stops the work. `cancelled`
        is asked once per layer of prefill and once per token; Cancelled is raised if it says yes. Raises RequestError
        (ContextLengthExceeded) before any work.
        """
        self._check(request)
        sampler = Sampler(
            request.sampling,
            request.prompt.token_ids,
            self.vocab_size,
            self._model.cpu.sample,
            constraint=request.constraint,
            top_logprobs=request.top_logprobs,
        )
        run = self._reuse.begin(request.prompt, self._model.new_state(), request.cache)
        generated: list[int] = []
        try:
            logits = yield from self._prefill(run, request, cancelled)
            for count in range(1, request.max_tokens + 1):
                token, logprobs = sampler.choose(logits[: self.vocab_size])
                reason = None
                if token in request.stop_token_ids:
                    reason = FinishReason.STOP
                elif count == request.max_tokens:
                    reason = FinishReason.LENGTH
                try:
                    yield TokenResult(token, reason, logprobs)
                except GeneratorExit:
                    run.ended(generated)
                    raise
                if reason is not None:
                    run.ended(generated)
                    return
                if cancelled():
                    raise Cancelled("the request was withdrawn")
                logits = self._model.decode(run.state, token)
                generated.append(token)
        finally:
            run.close()

    def close(self) -> None:
        """Write what the prefix cache has for the disk; free scratch memory and threads. Idempotent."""
        self._reuse.close()
        self._model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prefill(
        self, run: PromptRun, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> Generator[Progress | TokenResult, None, Float32Array]:
        """Take what is missing of the prompt into the state, segment by segment; returns the logits behind it."""
        ids = request.prompt.token_ids
        total, start = len(ids), time.monotonic()
        yield Progress(total, run.resumed, run.resumed, 0.0, run.report)
        told = start
        row = 0
        for stop in run.stops:
            begin = run.state.position
            steps = self._model.advance_steps(run.state, ids[begin:stop])
            while True:
                if cancelled():
                    run.cancelled()
                    raise Cancelled("the request was withdrawn")
                try:
                    processed = begin + next(steps)
                except StopIteration as end:
                    row = end.value
                    break
                now = time.monotonic()
                if processed == total:
                    continue
                if now - told >= _REPORT_INTERVAL_S:
                    told = now
                    yield Progress(total, run.resumed, processed, now - start, run.report)
            run.reached(begin)
        elapsed = time.monotonic() - start
        run.measured(elapsed)
        yield Progress(total, run.resumed, total, elapsed, run.report)
        return self._model.logits(row)

    def _check(self, request: GenerationRequest) -> None:
        ids = request.prompt.token_ids
        if request.prompt.images:
            raise RequestError("This model is served without pictures.", param="messages", code="unsupported_content")
        if len(ids) == 0:
            raise RequestError("The prompt is empty.", param="messages")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise RequestError(f"The prompt holds a token outside 0..{self.vocab_size - 1}.", param="messages")
        if request.max_tokens < 0:
            raise RequestError(f"max_tokens is {request.max_tokens}, expected at least 0.", param="max_tokens")
        if len(ids) + request.max_tokens > self.context_length:
            raise ContextLengthExceeded(len(ids), request.max_tokens, self.context_length)
