"""The text model: prompts run through it in passes, layer by layer; generated tokens one whole step at a time.

Knows weights, states and the C engine; nothing of requests, text or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.config import EngineConfig, ModelConfig
from engine.core import Float32Array, Int32Array
from engine.cpu import CpuEngine
from engine.segments import Stretch
from engine.state import SequenceState
from engine.weights import Weights

if TYPE_CHECKING:
    from engine.gpu import GpuPrefill  # imported where a card is: engine.engine


def text_positions(first: int, count: int) -> Int32Array:
    """Rotary positions of text: int32 [count, 3], the three axes equal."""
    return np.repeat(np.arange(first, first + count, dtype=np.int32)[:, None], 3, axis=1)


@dataclass(frozen=True, slots=True)
class PausedPass:
    """A pass that was left between two layers. layers: how many are done; hidden: float32 [tokens, hidden size], the
    residual stream behind them. The rest is in the state: keys, values and recurrent states of those layers."""

    layers: int
    hidden: Float32Array


class Model:
    """A loaded text model. One sequence at a time may be inside a call.

    Bits: a token's logits depend on the prompt, on where its prefill segments start and on the instruction set, not
    on the number of threads nor on pass_tokens. A card computes other bits than the CPU.
    """

    def __init__(
        self, weights: Weights, config: EngineConfig, *, threads: int, cpus: Sequence[int] | None, max_context: int
    ) -> None:
        self.config: ModelConfig = weights.config
        self.pass_tokens = config.pass_tokens
        self._gpu: GpuPrefill | None = None
        self.cpu = CpuEngine(weights, config, threads=threads, cpus=cpus, max_context=max_context)

    def use_gpu(self, gpu: GpuPrefill) -> None:
        """Let stretches that are meant for a card run there. The model closes it."""
        self._gpu = gpu

    @property
    def gpu(self) -> GpuPrefill | None:
        """The card, if there is one."""
        return self._gpu

    def new_state(self) -> SequenceState:
        """An empty sequence."""
        return SequenceState(self.config, kv_f32=self.cpu.kv_f32)

    def prefill(
        self,
        state: SequenceState,
        token_ids: Int32Array,
        positions: Int32Array | None = None,
        embeddings: Sequence[tuple[int, Float32Array]] = (),
    ) -> Float32Array:
        """`prefill_steps` without a stop; float32 [vocab] logits at the last token."""
        steps = self.prefill_steps(state, token_ids, positions, embeddings)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            logits: Float32Array = end.value
            return logits

    def prefill_steps(
        self,
        state: SequenceState,
        token_ids: Int32Array,
        positions: Int32Array | None = None,
        embeddings: Sequence[tuple[int, Float32Array]] = (),
    ) -> Generator[int, None, Float32Array]:
        """`advance_steps`, and then float32 [vocab] logits at the last token."""
        last = yield from self.advance_steps(state, token_ids, positions, embeddings)
        return self.logits(last)

    def advance_steps(
        self,
        state: SequenceState,
        token_ids: Int32Array,
        positions: Int32Array | None = None,
        embeddings: Sequence[tuple[int, Float32Array]] = (),
        *,
        card: Stretch | None = None,
        reached: Callable[[], None] = lambda: None,
        paused: PausedPass | None = None,
        every_row: bool = False,
    ) -> Generator[int, None, int]:
        """Append a segment of at least one token; returns the row of its last token in its last pass.

        Yields after each layer how far the segment is, in tokens. If the generator is left early the state must be
        dropped. positions: int32 [n, 3], by default those of text behind the state. embeddings: (index in the segment,
        rows float32 [k, hidden]) that take the place of the tokens' own. card: the tokens are this stretch of a
        prompt, which may hold several segments and is computed by the card; `reached` is called at its stops. paused:
        where the first pass goes on; the state is the one that was left then. every_row: when a pass on the CPU is
        done, `logits` may be asked at all of its rows, which costs the last layer's work for them.
        """
        ids = np.ascontiguousarray(token_ids, np.int32)
        if positions is None:
            positions = text_positions(state.position + state.rope_delta, len(ids))
        where = np.ascontiguousarray(positions, np.int32)
        if card is not None:
            assert self._gpu is not None, "a stretch for a card, but there is none"
            return (
                yield from self._gpu.advance_steps(
                    state, ids, where, embeddings, starts=card.starts, stops=card.stops, reached=reached
                )
            )
        layers, size = self.config.num_hidden_layers, 0
        for begin in range(0, len(ids), self.pass_tokens):
            size = min(self.pass_tokens, len(ids) - begin)
            self.cpu.begin(ids[begin : begin + size], where[begin : begin + size])
            self._replace_embeddings(embeddings, begin, size)
            done = 0
            if paused is not None and begin == 0:
                done = paused.layers
                self.cpu.hidden[:] = paused.hidden
            for layer in range(done, layers):
                self.cpu.layers(state, layer, layer + 1, recurrent=False, every_row=every_row)
                if layer == layers - 1:
                    state.position += size
                yield begin + size * (layer + 1) // layers
        return size - 1

    def _replace_embeddings(self, embeddings: Sequence[tuple[int, Float32Array]], begin: int, size: int) -> None:
        for start, rows in embeddings:
            first, last = max(start, begin), min(start + len(rows), begin + size)
            if first < last:
                self.cpu.hidden[first - begin : last - begin] = rows[first - start : last - start]

    def logits(self, row: int) -> Float32Array:
        """float32 [vocab] at token `row` of the last pass."""
        return self.cpu.logits(row)

    def decode(self, state: SequenceState, token_id: int) -> Float32Array:
        """Append one generated token; float32 [vocab] logits for the next."""
        return self.cpu.decode(state, token_id, state.position + state.rope_delta)

    def close(self) -> None:
        """Free what the card and the C engine hold."""
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None
        self.cpu.close()
