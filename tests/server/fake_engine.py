"""A scripted engine with the interface of `engine.engine.Engine`: what it says and how long it takes is the test's."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import numpy as np

from engine.core import CacheControl, FinishReason, GenerationRequest, Progress, TokenLogprobs, TokenResult
from engine.errors import Cancelled
from engine.tokenizer import Tokenizer

Reply = Callable[[GenerationRequest], Sequence[int]]


class FakeEngine:
    """Says `reply(request)`, then the first stop token.

    Prefill goes in `layers` steps of `layer_s` seconds; every token takes `token_s` seconds. `cached` tokens of each
    prompt count as reused, or all but one if `reuses_last_prompt` and it is that; constraints are obeyed. `requests`,
    `outcomes` and `computed_tokens` say what happened.
    """

    def __init__(self, tokenizer: Tokenizer, *, context_length: int = 4096) -> None:
        self._tokenizer = tokenizer
        self.context_length = context_length
        self.reply: Reply = self.echo
        self.layers = 2
        self.layer_s = 0.0
        self.token_s = 0.0
        self.cached = 0
        self.reuses_last_prompt = False
        self.cache: CacheControl | None = None
        self.picture_counters: dict[str, int] = {}
        self.error: Exception | None = None
        self.requests: list[GenerationRequest] = []
        self.outcomes: list[str] = []
        self.computed_tokens = 0
        self.active = 0
        self.is_closed = False
        self._rng = np.random.default_rng(1)

    def say(self, text: str) -> None:
        """Answer every request with `text`; special-token strings in it become the tokens."""
        ids = self._tokenizer.encode(text, allow_special=True)
        self.reply = lambda request: ids

    def echo(self, request: GenerationRequest) -> list[int]:
        """An answer that depends on the prompt alone: a checksum, so that mixed-up requests are noticed."""
        return list(self._tokenizer.encode(f"sum {int(request.prompt.token_ids.sum())}", allow_special=False))

    def generate(
        self, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> Generator[Progress | TokenResult, None, None]:
        """See `Engine.generate`."""
        assert self.active == 0, "two generations at a time"
        self.active += 1
        self.requests.append(request)
        outcome = "closed"
        try:
            yield from self._prefill(request, cancelled)
            yield from self._decode(request, cancelled)
            outcome = "finished"
        except Cancelled:
            outcome = "cancelled"
            raise
        finally:
            self.active -= 1
            self.outcomes.append(outcome)

    def _prefill(self, request: GenerationRequest, cancelled: Callable[[], bool]) -> Generator[Progress, None, None]:
        if self.error is not None:
            raise self.error
        total = len(request.prompt.token_ids)
        started = time.monotonic()
        is_known = self.reuses_last_prompt and any(last.prompt is request.prompt for last in self.requests[-2:-1])
        cached = total - 1 if is_known else min(self.cached, total - 1)
        yield Progress(total, cached, cached, 0.0)
        for layer in range(self.layers):
            self._work(self.layer_s, cancelled)
            done = cached + (total - cached) * (layer + 1) // self.layers
            yield Progress(total, cached, done, time.monotonic() - started)

    def _decode(self, request: GenerationRequest, cancelled: Callable[[], bool]) -> Generator[TokenResult, None, None]:
        if request.max_tokens == 0:
            return
        script = [*self.reply(request), min(request.stop_token_ids)]
        for count in range(1, request.max_tokens + 1):
            self._work(self.token_s, cancelled)
            self.computed_tokens += 1
            token = self._choose(request, script)
            reason = None
            if token in request.stop_token_ids:
                reason = FinishReason.STOP
            elif count == request.max_tokens:
                reason = FinishReason.LENGTH
            yield TokenResult(token, reason, self._logprobs(request, token))
            if reason is not None:
                return

    def _choose(self, request: GenerationRequest, script: list[int]) -> int:
        """The script's next token where the constraint allows it, else a stop token, else any allowed one."""
        mask = None if request.constraint is None else request.constraint.allowed()
        if mask is None or mask[script[0]]:
            token = script.pop(0) if len(script) > 1 else script[0]
        else:
            stops = [stop for stop in request.stop_token_ids if mask[stop]]
            token = stops[0] if stops else int(self._rng.choice(np.flatnonzero(mask)))
        if request.constraint is not None:
            request.constraint.accept(token)
        return token

    def _logprobs(self, request: GenerationRequest, token: int) -> TokenLogprobs | None:
        if request.top_logprobs is None:
            return None
        return TokenLogprobs(-0.5, tuple((token + step, -0.5 - step) for step in range(request.top_logprobs)))

    def _work(self, seconds: float, cancelled: Callable[[], bool]) -> None:
        if seconds:
            time.sleep(seconds)
        if cancelled():
            raise Cancelled("withdrawn")

    def close(self) -> None:
        """See `Engine.close`."""
        self.is_closed = True
