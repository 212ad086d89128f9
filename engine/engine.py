"""The engine: a loaded model and the life of one request in it, from prompt to last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType

from engine.config import EngineConfig, ModelConfig
from engine.core import FinishReason, Float32Array, GenerationRequest, Progress, Prompt, TokenResult
from engine.errors import Cancelled, ContextLengthExceeded, ModelFileError, RequestError
from engine.model import Model
from engine.placement import Placement, place
from engine.sampling import Sampler
from engine.state import SequenceState
from engine.tokenizer import FILE_NAME as TOKENIZER_NAME
from engine.tokenizer import read_definition, vocab_size
from engine.weights import load_weights

_REPORT_INTERVAL_S = 0.1
"""Progress is told at most this often."""


class Engine:
    """Runs one generation at a time, in the thread that calls it.

    model: sizes of the loaded model. placement: what was decided at load. vocab_size: ids that have a token; the
    model's rows above it are padding and are never drawn.
    """

    def __init__(self, model: Model, placement: Placement, vocab_size: int) -> None:
        """Use `load`."""
        self._model = model
        self.model: ModelConfig = model.config
        self.placement = placement
        self.vocab_size = vocab_size

    @staticmethod
    def load(path: Path, config: EngineConfig) -> Engine:
        """Map and check the checkpoint directory `path` and start the threads.

        The calling thread becomes one of them: generate from it. Raises ModelFileError, ConfigError, OutOfMemory.
        """
        weights = load_weights(path, ModelConfig.load(path))
        tokens = vocab_size(read_definition(path), path / TOKENIZER_NAME)
        if tokens > weights.config.vocab_size:
            raise ModelFileError(
                f"{path}: the tokenizer has ids up to {tokens - 1}, the model {weights.config.vocab_size} rows"
            )
        placement = place(weights.config, config, weights.file.nbytes)
        model = Model(
            weights,
            config,
            threads=placement.threads,
            cpus=placement.cpus,
            max_context=placement.context_length,
        )
        return Engine(model, placement, tokens)

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
        state = self._model.new_state()
        logits = yield from self._prefill(state, request.prompt, cancelled)
        for count in range(1, request.max_tokens + 1):
            token, logprobs = sampler.choose(logits[: self.vocab_size])
            reason = None
            if token in request.stop_token_ids:
                reason = FinishReason.STOP
            elif count == request.max_tokens:
                reason = FinishReason.LENGTH
            yield TokenResult(token, reason, logprobs)
            if reason is not None:
                return
            if cancelled():
                raise Cancelled("the request was withdrawn")
            logits = self._model.decode(state, token)

    def close(self) -> None:
        """Free scratch memory and threads. Idempotent."""
        self._model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prefill(
        self, state: SequenceState, prompt: Prompt, cancelled: Callable[[], bool]
    ) -> Generator[Progress | TokenResult, None, Float32Array]:
        """Take the whole prompt into the state; returns the logits behind it."""
        total, start = len(prompt.token_ids), time.monotonic()
        yield Progress(total, 0, 0, 0.0)
        told = start
        steps = self._model.prefill_steps(state, prompt.token_ids)
        while True:
            if cancelled():
                raise Cancelled("the request was withdrawn")
            try:
                processed = next(steps)
            except StopIteration as end:
                logits: Float32Array = end.value
                return logits
            now = time.monotonic()
            if processed == total or now - told >= _REPORT_INTERVAL_S:
                told = now
                yield Progress(total, 0, processed, now - start)

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
