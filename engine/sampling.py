"""From logits to the next token: bias, penalties and constraint, then the draw that `SamplingParams` describes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.core import SAMPLING_RANGES, Float32Array, Int32Array, SamplingParams, TokenConstraint, TokenLogprobs
from engine.errors import KernelError, RequestError

Draw = Callable[[Float32Array, float, int, float, float, float], int]
"""(logits, temperature, top_k, top_p, min_p, uniform in [0, 1)) -> id; `CpuEngine.sample`."""


_GREEDY_BELOW = 1e-6
"""A temperature so near to zero that dividing logits by it says nothing more, and may overflow float32."""


class Sampler:
    """Chooses the tokens of one generation, in order.

    Raises RequestError if a parameter is out of range for this vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Int32Array,
        vocab_size: int,
        draw: Draw,
        *,
        constraint: TokenConstraint | None = None,
        top_logprobs: int | None = None,
    ) -> None:
        _check(params, vocab_size)
        self._params = params
        self._draw = draw
        self._constraint = constraint
        self._top_logprobs = top_logprobs
        self._random = np.random.Generator(np.random.PCG64(None if params.seed is None else params.seed % 2**64))
        self._bias_ids = np.array([token for token, _ in params.logit_bias], np.int32)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._generated = _TokenCounts(vocab_size)
        self._seen = _TokenCounts(vocab_size)  # prompt and generated
        if params.repetition_penalty != 1.0:
            for token in np.unique(prompt_ids):
                self._seen.add(int(token))

    def choose(self, logits: Float32Array) -> tuple[int, TokenLogprobs | None]:
        """The next token and, if wanted, its log-probabilities. Overwrites `logits`, float32 [vocab_size].

        Raises KernelError if the logits are not numbers: parameters within SAMPLING_RANGES cannot make them so."""
        before = None if self._top_logprobs is None else _log_softmax(logits)
        self._adjust(logits)
        params = self._params
        if params.temperature < _GREEDY_BELOW:
            token = int(np.argmax(logits))
        else:
            token = self._draw(
                logits, params.temperature, params.top_k, params.top_p, params.min_p, self._random.random()
            )
        if not np.isfinite(logits[token]):  # argmax and the draw both end on what is not a number
            if self._constraint is not None and np.isneginf(logits[token]):
                raise RequestError("The grammar of this request allows no token here.", code="grammar_dead_end")
            raise KernelError(f"the logits hold no finite maximum: token {token} has {logits[token]}")
        self._generated.add(token)
        if params.repetition_penalty != 1.0:
            self._seen.add(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        return token, None if before is None else _report(before, token, self._top_logprobs or 0)

    def _adjust(self, logits: Float32Array) -> None:
        params = self._params
        if len(self._bias_ids):
            np.add.at(logits, self._bias_ids, self._bias)
        if params.repetition_penalty != 1.0:
            seen = self._seen.ids
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            ids = self._generated.ids
            logits[ids] -= params.presence_penalty + params.frequency_penalty * self._generated.counts[ids]
        if self._constraint is not None and (allowed := self._constraint.allowed()) is not None:
            logits[~allowed] = -np.inf


class _TokenCounts:
    """How often each token occurred: dense counts, and the distinct ids for sparse updates of logits."""

    def __init__(self, vocab_size: int) -> None:
        self.counts: Float32Array = np.zeros(vocab_size, np.float32)
        self._ids: Int32Array = np.empty(64, np.int32)
        self._distinct = 0

    @property
    def ids(self) -> Int32Array:
        """Distinct tokens, in order of first occurrence."""
        return self._ids[: self._distinct]

    def add(self, token: int) -> None:
        if self.counts[token] == 0:
            if self._distinct == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._ids[self._distinct] = token
            self._distinct += 1
        self.counts[token] += 1


def _check(params: SamplingParams, vocab_size: int) -> None:
    for name, (least, most) in SAMPLING_RANGES.items():
        value = getattr(params, name)
        if not least <= value <= most:
            raise RequestError(f"{name} is {value}, expected at least {least:g} and at most {most:g}.", param=name)
    for token, _ in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise RequestError(f"logit_bias names token {token}, expected 0..{vocab_size - 1}.", param="logit_bias")


def _log_softmax(logits: Float32Array) -> Float32Array:
    shifted = logits - logits.max()
    result: Float32Array = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    return result


def _report(logprobs: Float32Array, token: int, count: int) -> TokenLogprobs:
    largest: npt.NDArray[np.intp] = np.empty(0, np.intp)
    if count > 0:
        kept = min(count, len(logprobs))
        largest = np.argpartition(-logprobs, kept - 1)[:kept]
        largest = largest[np.lexsort((largest, -logprobs[largest]))]
    return TokenLogprobs(float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in largest))
