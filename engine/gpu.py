"""Prefill on a CUDA card: the layers of cuda_src/, in the order of the model, over weights that travel as needed.

Owns the card's memory: it is divided once, printed as a plan and never grows. Everything but the experts stays on the
card, and as many layers' experts as fit; the others' come in two buffers, layer n + 1's while layer n computes. The
embedding and the head run on the CPU, which also decodes: the state is on the host before and after a prefill.

Bits: products, attention tiles and delta-rule chunks do not depend on how many tokens share a pass, chunks begin anew
where segments do, and passes are cut at multiples of 64 tokens from there. So a token's results depend on the prompt
and on where segments start, not on the card's memory nor on how many segments a call takes at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import logging
import mmap
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.config import LayerType, ModelConfig
from engine.core import Float32Array, Int32Array
from engine.cpu import CpuEngine, inverse_frequency
from engine.cuda_driver import Argument, Array, Card, CudaCard
from engine.errors import ConfigError, KernelError, OutOfMemory
from engine.formats import BLOCK_BYTES, BLOCK_COLS, BLOCK_ROWS
from engine.placement import available_bytes
from engine.segments import CardRule
from engine.state import CONV_WINDOW, PAGE_TOKENS, SequenceState, page_bytes
from engine.weights import AttentionWeights, DeltaNetWeights, LayerWeights, Matrix, MoeWeights, Weights

logger = logging.getLogger(__name__)

HEAD_DIMS = (256, 128, 64, 32)
DELTA_DIMS = (128, 32, 16)
MAX_EXPERTS, MAX_CHOSEN = 512, 16
CHUNK = 32  # tokens of a delta-rule chunk
CHUNKS_AT_ONCE = 32  # what the intermediate results of the delta rule are kept for
STOPS_AT_ONCE = 8  # states that one pass can leave behind on its way
PASS_TOKENS = (4096, 2048, 1024, 512, 256, 128, 64)
SPARE_SHARE = 0.03  # of the card's free memory: left to the driver
KV_SHARE = 0.25  # of what may be used, at most: longer contexts run on the CPU
PTX = Path(__file__).parent / "ptx"
_ALIGN = 256
_TRIAL_TOKENS = 64
_MIN_TOKENS = (64, 128, 256, 512, 1024)  # few steps: what is cached is good for one of them
_LOCK_SPARE = 1 << 30  # host memory that locked copies leave free


@dataclass(frozen=True, slots=True)
class Plan:
    """How the card's memory is divided, in bytes. pass_tokens: most tokens of a pass. resident: layers whose experts
    stay. kv_tokens: the longest context that fits."""

    pass_tokens: int
    kv_tokens: int
    resident: frozenset[int]
    dense_bytes: int
    expert_bytes: int
    slot_bytes: int
    scratch_bytes: int
    kv_bytes: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.dense_bytes + self.expert_bytes + self.slot_bytes + self.scratch_bytes + self.kv_bytes

    def __str__(self) -> str:
        parts = (
            ("dense weights", self.dense_bytes),
            (f"experts of {len(self.resident)} layers", self.expert_bytes),
            ("two expert buffers", self.slot_bytes),
            (f"activations of {self.pass_tokens} tokens", self.scratch_bytes),
            (f"keys and values of {self.kv_tokens} tokens", self.kv_bytes),
        )
        return ", ".join(f"{name} {nbytes / 2**20:.0f} MiB" for name, nbytes in parts if nbytes)


@dataclass(frozen=True, slots=True)
class IdleMemory:
    """Memory of the card that holds nothing between two calls of prefill: `nbytes` at `address`, and two buffers of
    `buffer_bytes` each (none if all experts stay). Whoever uses it synchronizes the card first."""

    address: int
    nbytes: int
    buffers: tuple[int, ...]
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where a pass keeps its intermediate results: name -> byte offset. What the mixer uses and what the experts use
    lie over each other, and so do some results whose lives do not meet."""

    offsets: dict[str, int]
    nbytes: int


def tile_bound(pairs: int, experts: int) -> int:
    """The most tiles that expert_plan makes of so many (token, expert) pairs."""
    return min(pairs // 32 + experts, pairs // 64 + 2 * experts)


def scratch_layout(config: ModelConfig, tokens: int, kv_tokens: int) -> Scratch:
    """Offsets for passes of up to `tokens` tokens."""
    hidden, experts = config.hidden_size, config.num_experts
    pairs = tokens * config.num_experts_per_tok
    query, heads = config.num_attention_heads * config.head_dim, config.linear_num_value_heads
    key = config.num_key_value_heads * config.head_dim
    dim = config.linear_value_head_dim
    chunks = min(CHUNKS_AT_ONCE, tokens)  # segments may be as short as a token
    tiles = tile_bound(pairs, experts)
    inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    always = {
        "hidden": 4 * tokens * hidden,
        "normed": 4 * tokens * hidden,
        "positions": 12 * tokens,
        "rotary": 8 * kv_tokens * (config.rotary_dim // 2),
        "pages": 8 * config.attention_layers * (kv_tokens // PAGE_TOKENS),
        "chunks": 16 * tokens,
        "conv_stops": 4 * STOPS_AT_ONCE * CONV_WINDOW * config.conv_channels,
        "ssm_stops": 4 * STOPS_AT_ONCE * heads * config.linear_key_head_dim * dim,
        "conv": 4 * config.delta_layers * CONV_WINDOW * config.conv_channels,
        "conv_next": 4 * config.delta_layers * CONV_WINDOW * config.conv_channels,
        "ssm": 4 * config.delta_layers * heads * config.linear_key_head_dim * dim,
    }
    delta = {
        "qkvz": 4 * tokens * (config.conv_channels + config.value_width),
        "convolved": 4 * tokens * config.conv_channels,
        "ab": 4 * tokens * 2 * heads,
        "work": 4 * chunks * heads * (4 * CHUNK * dim + CHUNK * CHUNK + 32),
    }
    attention = {
        "qkv": 8 * tokens * (query + key),
        "q": 4 * tokens * query,
        "attended": 4 * tokens * query,
    }
    moe = {
        "router": 4 * tokens * (experts + 1),
        "chosen": 4 * pairs,
        "weights": 4 * pairs,
        "counts": 4 * experts,
        "starts": 4 * experts,
        "tiles": 16 * tiles,
        "tile_count": 4,
        "rows": 4 * pairs,
        "places": 4 * pairs,
        "gate_up": 4 * pairs * max(2 * inner, hidden),
        "inner": 4 * pairs * inner,
        "shared_gate_up": 8 * tokens * shared,
        "shared_inner": 4 * tokens * shared,
        "shared": 4 * tokens * hidden,
    }
    offsets: dict[str, int] = {}

    def place(sizes: dict[str, int], start: int) -> int:
        for name, nbytes in sizes.items():
            offsets[name] = start
            start += -(-nbytes // _ALIGN) * _ALIGN
        return start

    common = place(always, 0)
    nbytes = max(place(group, common) for group in (delta, attention, moe))
    # The rule's outputs follow its inputs, of which a row is longer, from one group of chunks to the next.
    offsets["delta"] = offsets["convolved"]
    offsets["routed"] = offsets["gate_up"]  # which SwiGLU has read
    return Scratch(offsets, nbytes)


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix or vector on the card. address is 0 for experts that travel: the buffer's is added."""

    address: int
    rows: int
    cols: int

    def split(self, rows: int) -> tuple[Stored, Stored]:
        """The first rows, a multiple of 16, and the rest of a packed matrix."""
        below = self.address + rows // BLOCK_ROWS * (self.cols // BLOCK_COLS) * BLOCK_BYTES
        return Stored(self.address, rows, self.cols), Stored(below, self.rows - rows, self.cols)


@dataclass(frozen=True, slots=True)
class CardLayer:
    """One layer's weights on the card. experts: what travels, as (offset in the buffer, array); None if it stays."""

    kind: LayerType
    tensors: dict[str, Stored]
    experts: tuple[tuple[int, Array], ...] | None


@dataclass(frozen=True, slots=True)
class PassPart:
    """Tokens first..end of a sequence that run through all layers together. starts: where segments begin, the first
    among them; stops: positions inside at which the state is wanted."""

    first: int
    end: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def pages(self) -> range:
        """The pages of keys and values that the pass writes to."""
        return range(self.first // PAGE_TOKENS, -(-self.end // PAGE_TOKENS))

    def chunks(self) -> Array:
        """The delta rule's table, int32 [chunks, 4]: first row, rows, index of the stop behind it or -1, 0.

        Stops lie on the grid of their segment's start, so that chunks end there anyway; but not if the sequence was
        resumed between, behind decoded tokens: then they begin anew."""
        rows: list[tuple[int, int, int, int]] = []
        begins = sorted({*self.starts, *self.stops})
        for begin, end in zip(begins, [*begins[1:], self.end], strict=True):
            for first in range(begin, end, CHUNK):
                last = min(first + CHUNK, end)
                stop = self.stops.index(last) if last in self.stops else -1
                rows.append((first - self.first, last - first, stop, 0))
        return np.array(rows, np.int32)


def divide(first: int, end: int, starts: Sequence[int], stops: Sequence[int], longest: int) -> list[PassPart]:
    """Cut tokens first..end into passes of at most `longest` tokens (a multiple of 64) and STOPS_AT_ONCE stops. A pass
    ends at a multiple of 64 tokens from the start of its segment, or at a stop."""
    parts: list[PassPart] = []
    while first < end:
        last = min(first + longest, end)
        own = sorted({first, *(start for start in starts if first < start <= last)})
        if last < end:
            last = own[-1] + (last - own[-1]) // PAGE_TOKENS * PAGE_TOKENS
        inside = [stop for stop in stops if first < stop < last]
        if len(inside) > STOPS_AT_ONCE:
            last = inside[STOPS_AT_ONCE]
        parts.append(PassPart(first, last, tuple(p for p in own if p < last), tuple(p for p in inside if p < last)))
        first = last
    return parts


class GpuPrefill:
    """Takes prompt segments into states on a card. One call at a time, in the thread that made the card."""

    def __init__(self, weights: Weights, cpu: CpuEngine, card: Card, plan: Plan, *, locked: bool) -> None:
        """Allocate and upload. `close` closes the card; if this raises, the caller does. locked: whether the experts'
        arrays are page-locked (`lock_experts`).

        Raises OutOfMemory if the card has less than was planned."""
        self.config = weights.config
        self.plan, self.card = plan, card
        self._cpu = cpu
        self._kv_f32 = cpu.kv_f32
        self._page_bytes = page_bytes(self.config, cpu.kv_f32)
        self._scratch = scratch_layout(self.config, plan.pass_tokens, plan.kv_tokens)
        self._base = card.allocate(self._scratch.nbytes)
        self._kv = card.allocate(plan.kv_bytes)
        self._slots = [card.allocate(plan.slot_bytes // 2) for _ in range(2)] if plan.slot_bytes else []
        self._next_weight = card.allocate(plan.dense_bytes + plan.expert_bytes)
        self._layers = [self._store(layer, i) for i, layer in enumerate(weights.layers)]
        self._angles = np.empty((0, self.config.rotary_dim // 2, 2), np.float32)
        self._left: list[tuple[Float32Array, Float32Array]] = []  # states at stops: convolution windows, recurrent
        # Where the card writes what goes to the host: page-locked, so that it need not wait. New memory of a state is
        # several times slower to fill from the card than from here.
        self._landed = self._landing()
        shape = plan.pass_tokens // PAGE_TOKENS + 2, self.config.attention_layers
        self._landed_pages = _anonymous((*shape, self._page_bytes // max(shape[1], 1)), np.uint8)
        card.pin(self._landed_pages, written=True)
        card.pin(cpu.hidden_buffer, written=True)
        logger.info("prefill on %s: %s", card.name, self.plan)
        if not locked:
            logger.warning(
                "The weights that travel to the card could not be page-locked: their copies are several times slower "
                "and nothing is computed meanwhile. `fermion doctor` says what is missing."
            )

    @property
    def identity(self) -> str:
        """Everything here that decides bits, for the fingerprint of what is cached."""
        digest = hashlib.sha256()
        for path in (Path(__file__), *sorted(PTX.rglob("*.ptx"))):
            digest.update(path.name.encode() + path.read_bytes())
        return f"{self.card.name}, kernels {digest.hexdigest()[:16]}"

    @property
    def idle_memory(self) -> IdleMemory:
        """What others may use between calls."""
        return IdleMemory(self._base, self._scratch.nbytes, tuple(self._slots), self.plan.slot_bytes // 2)

    def accepts(self, tokens: int, positions: Int32Array) -> bool:
        """Whether the plan has room for a sequence of `tokens` tokens and a segment at these rotary positions."""
        return tokens <= self.plan.kv_tokens and int(positions.max()) - int(positions.min()) < self.plan.kv_tokens

    def close(self) -> None:
        """Close the card with all memory on it. Idempotent."""
        self.card.close()

    def advance_steps(
        self,
        state: SequenceState,
        token_ids: Int32Array,
        positions: Int32Array,
        embeddings: Sequence[tuple[int, Float32Array]] = (),
        *,
        starts: Sequence[int] = (),
        stops: Sequence[int] = (),
        reached: Callable[[], None] = lambda: None,
    ) -> Generator[int, None, int]:
        """As Model.advance_steps: append segments, yield after each layer how far it is in tokens, return the row of
        the last token in the CPU's pass, for its head.

        starts: positions behind the state's at which further segments begin. stops: positions on the way at which
        `reached` is called with the state standing there; chunks begin anew behind them. OutOfMemory, before any
        work, if the context is longer than planned for. If the generator is left early the state must be dropped; the
        card is ready for the next call."""
        ids = np.ascontiguousarray(token_ids, np.int32)
        where = np.ascontiguousarray(positions, np.int32)
        first, end = state.position, state.position + len(ids)
        if not self.accepts(end, where):
            raise OutOfMemory(f"the card has room for the keys and values of {self.plan.kv_tokens} tokens, not {end}")
        self.card.synchronize()
        state.reserve(end)
        layers = len(self._layers)
        for part in divide(first, end, starts, stops, self.plan.pass_tokens):
            begin, size = part.first - first, part.end - part.first
            rows = slice(begin, begin + size)
            lands = bool(part.stops) or part.end in stops or part.end == end
            if part.first == first:
                self._state_in(state)
            self._begin(ids[rows], where[rows], _shifted(embeddings, begin, size), part)
            for index in self._run(part, lands):
                if index:
                    self._land(state, part, index - 1, recurrent=lands)
                yield begin + size * (index + 1) // layers
            self._land(state, part, layers - 1, recurrent=lands)
            if lands:
                self._pass_stops(state, part.stops, reached)
                state.position = part.end
                if part.end in stops:
                    reached()
        last = np.empty((1, self.config.hidden_size), np.float32)
        self.card.read(last, self._hidden(size - 1))
        self._cpu.begin(ids[-1:], where[-1:])
        self._cpu.hidden[:] = last
        return 0

    # ---- what moves ------------------------------------------------------------------------------------------

    def _state_in(self, state: SequenceState) -> None:
        if state.position == 0:  # all zeros
            self.card.clear(self._at("conv"), state.conv.nbytes)
            self.card.clear(self._at("ssm"), state.ssm.nbytes)
            return
        self.card.write(self._at("conv"), state.conv)
        self.card.write(self._at("ssm"), state.ssm)
        size = state.page_bytes
        for page in range(-(-state.position // PAGE_TOKENS)):
            self.card.write(self._kv + page * size, state.pages[page])

    def _landing(self) -> tuple[Float32Array, Float32Array]:
        """Page-locked memory for convolution windows and recurrent states."""
        c = self.config
        heads = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        arrays = _anonymous((c.delta_layers, CONV_WINDOW, c.conv_channels)), _anonymous((c.delta_layers, *heads))
        for array in arrays:
            self.card.pin(array, written=True)
        return arrays

    def _land(self, state: SequenceState, part: PassPart, index: int, *, recurrent: bool) -> None:
        """Take over what layer `index`, which is done, has left in the landing memory."""
        kind = self._layers[index].kind
        number = sum(layer.kind is kind for layer in self._layers[:index])
        if kind is LayerType.FULL_ATTENTION:
            for landed, page in enumerate(part.pages()):
                shape = self._landed_pages.shape[1:]
                np.copyto(state.pages[page].reshape(shape)[number], self._landed_pages[landed, number])
        elif recurrent:
            for target, landed_state in zip((state.conv, state.ssm), self._landed, strict=True):
                np.copyto(target[number], landed_state[number])

    def _pass_stops(self, state: SequenceState, stops: Sequence[int], reached: Callable[[], None]) -> None:
        """Show the states that a pass has left behind. `state` itself is not moved: it borrows their arrays."""
        own = state.conv, state.ssm
        try:
            for stop, (conv, ssm) in zip(stops, self._left, strict=False):
                state.position, state.conv, state.ssm = stop, conv, ssm
                reached()
        finally:
            state.conv, state.ssm = own

    def _begin(
        self,
        ids: Int32Array,
        positions: Int32Array,
        embeddings: Sequence[tuple[int, Float32Array]],
        part: PassPart,
    ) -> None:
        """Embeddings, and the tables of a pass: chunks, rotary angles, pages. All before the experts set out, behind
        which they would have to wait."""
        step = self._cpu.max_tokens
        for begin in range(0, len(ids), step):
            rows = slice(begin, begin + step)
            self._cpu.begin(ids[rows], positions[rows])
            hidden = self._cpu.hidden
            for start, values in _shifted(embeddings, begin, len(hidden)):
                hidden[start : start + len(values)] = values
            self.card.write(self._at("hidden") + 4 * begin * self.config.hidden_size, np.ascontiguousarray(hidden))
        chunks = part.chunks()
        self._chunks = len(chunks)
        self._rotary_start = int(positions.min())
        size = self._page_bytes
        layer = np.arange(self.config.attention_layers, dtype=np.uint64)[:, None]
        page = np.arange(self.plan.kv_tokens // PAGE_TOKENS, dtype=np.uint64)
        addresses = self._kv + layer * (size // max(self.config.attention_layers, 1)) + page * size
        self.card.write(self._at("chunks"), chunks)
        self.card.write(self._at("rotary"), self._rotary(self._rotary_start, int(positions.max()) + 1))
        self.card.write(self._at("positions"), positions)
        self.card.write(self._at("pages"), addresses.astype(np.uint64))
        while len(self._left) < len(part.stops):
            self._left.append(self._landing())

    def _rotary(self, first: int, end: int) -> Float32Array:
        """Cosine and sine of each frequency at positions first..end-1: float32 [positions, pairs, 2]. Kept from one
        prompt to the next."""
        if end > len(self._angles):
            span = np.arange(len(self._angles), end, dtype=np.float32)[:, None]
            angles = (span * inverse_frequency(self.config.rotary_dim, self.config.rope_theta)).astype(np.float64)
            more = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
            self._angles = np.concatenate([self._angles, more])
        return self._angles[first:end]

    def _store(self, layer: LayerWeights, index: int) -> CardLayer:
        """Upload a layer's weights; experts that travel stay where they are."""
        tensors = {name: self._upload(arrays, rows, cols) for name, arrays, rows, cols in dense_tensors(layer)}
        gate_up, down = layer.moe.experts_gate_up, layer.moe.experts_down
        down_at = _aligned(gate_up.data.nbytes)
        stays = index in self.plan.resident
        base = self._reserve(down_at + down.data.nbytes) if stays else 0
        tensors["experts_gate_up"] = Stored(base, gate_up.rows, gate_up.cols)
        tensors["experts_down"] = Stored(base + down_at, down.rows, down.cols)
        pieces = ((0, gate_up.data), (down_at, down.data))
        if stays:
            for offset, array in pieces:
                self.card.write(base + offset, array)
        kind = LayerType.FULL_ATTENTION if isinstance(layer.mixer, AttentionWeights) else LayerType.LINEAR_ATTENTION
        return CardLayer(kind, tensors, None if stays else pieces)

    def _upload(self, arrays: Sequence[Array], rows: int, cols: int) -> Stored:
        """Matrices of the same columns become one, each below the one before."""
        address = at = self._reserve(sum(array.nbytes for array in arrays))
        for array in arrays:
            self.card.write(at, np.ascontiguousarray(array))
            at += array.nbytes
        return Stored(address, rows, cols)

    def _reserve(self, nbytes: int) -> int:
        """The next piece of the memory for weights that stay."""
        address = self._next_weight
        self._next_weight += _aligned(nbytes)
        return address

    # ---- the layers ------------------------------------------------------------------------------------------

    def _run(self, part: PassPart, lands: bool) -> Generator[int, None, None]:
        """All layers of a pass. Yields the number of each layer when the one before it is done, and ends when all are.
        lands: the state behind the pass goes to the landing memory."""
        tokens = part.end - part.first
        travelling = [i for i, layer in enumerate(self._layers) if layer.experts is not None]
        arriving: dict[int, tuple[int, object]] = {}  # layer -> its buffer and copy; at most two
        freed: list[object] = [None, None]  # until when each buffer is in use
        sent = 0

        def send() -> None:
            """Let the next travelling experts come, into the buffer that was read before the last one."""
            nonlocal sent
            if sent < len(travelling):
                index, slot = travelling[sent], sent % 2
                pieces = [(self._slots[slot] + offset, array) for offset, array in self._layers[index].experts or ()]
                arriving[index] = slot, self.card.copy(pieces, freed[slot])
                sent += 1

        numbers = {LayerType.FULL_ATTENTION: 0, LayerType.LINEAR_ATTENTION: 0}
        previous: object = None
        send()
        send()
        for index, layer in enumerate(self._layers):
            # Behind the last layer's state only the last token's result is wanted.
            rows = tokens if index + 1 < len(self._layers) else 1
            if layer.kind is LayerType.FULL_ATTENTION:
                self._attention(layer, numbers[layer.kind], part, rows)
            else:
                self._delta_net(layer, numbers[layer.kind], part, rows, lands)
            numbers[layer.kind] += 1
            slot: int | None = None
            if layer.experts is not None:
                slot, copied = arriving.pop(index)
                self.card.wait(copied)
            self._moe(layer, rows, tokens - rows, 0 if slot is None else self._slots[slot])
            done = self.card.mark()
            if slot is not None:
                freed[slot] = done
            if not arriving:
                send()  # after this layer's launches: a copy of pageable memory holds this thread up
            if previous is not None:
                self.card.finish(previous)
            previous = done
            yield index
        self.card.finish(done)

    def _delta_net(self, layer: CardLayer, number: int, part: PassPart, rows: int, lands: bool) -> None:
        """rows: of how many tokens at the end the result is wanted; all go into the state."""
        c, t, tokens = self.config, layer.tensors, part.end - part.first
        heads, dim, channels, width = c.linear_num_value_heads, c.linear_value_head_dim, c.conv_channels, c.value_width
        window = 4 * number * CONV_WINDOW * channels
        self._norm(t["input_norm"], tokens)
        into_qkv, into_z = t["qkvz"].split(channels)
        row_floats, skipped, qkv = channels + width, tokens - rows, self._at("qkvz")
        z = qkv + 4 * (skipped * row_floats + channels)
        self._product(into_qkv, self._at("normed"), qkv, tokens, stride=row_floats)
        # z is needed at the end only: its product fills what the rule's kernels, bound by latency, leave idle.
        self.card.branch()
        normed = self._at("normed") + 4 * skipped * c.hidden_size
        self._product(into_z, normed, z, rows, stride=row_floats, beside=True)
        self._float_product(t["ab"], "normed", "ab", tokens)
        blocks = -(-channels // 128)
        before, after = self._at("conv") + window, self._at("conv_next") + window
        conv_stops, ssm_stops = self._at("conv_stops"), self._at("ssm_stops")
        window_bytes, state_bytes = 4 * CONV_WINDOW * channels, 4 * heads * dim * dim
        row = _int(row_floats)
        self._launch(
            "conv1d_silu", (blocks, -(-tokens // 16)), 128,
            qkv, row, t["conv"].address, before, self._at("convolved"), _int(tokens), _int(channels),
        )  # fmt: skip
        self.card.branch()
        ends = [(stop - part.first, conv_stops + i * window_bytes) for i, stop in enumerate(part.stops)]
        for end, window_at in (*ends, (tokens, after)):
            self._launch(
                "conv1d_window", (blocks, 1), 128, qkv, row, before, window_at, _int(end), _int(channels), beside=True
            )  # fmt: skip
        self._launch(
            "conv1d_window", (blocks, 1), 128,
            after, _int(channels), after, before, _int(CONV_WINDOW), _int(channels), beside=True,
        )  # fmt: skip
        a, state = self._at("ab"), self._at("ssm") + number * state_bytes
        for first in range(0, self._chunks, CHUNKS_AT_ONCE):
            count = min(CHUNKS_AT_ONCE, self._chunks - first)
            table = self._at("chunks") + 16 * first
            self._launch(
                f"gated_delta_chunk_{dim}", (count, heads), 256,
                self._at("convolved"), _int(channels), a, a + 4 * heads, _int(2 * heads), t["minus_a"].address,
                t["dt_bias"].address, table, _int(c.linear_num_key_heads), c.rms_norm_eps, self._at("work"),
            )  # fmt: skip
            self._launch(
                f"gated_delta_scan_{dim}", (-(-dim // 32), heads), 256,
                self._at("work"), table, _int(count), state, ssm_stops, self._at("delta"),
            )  # fmt: skip
        self.card.merge()  # with z; what goes to the host holds nothing up
        self.card.branch()
        if lands:
            self.card.read_later(self._landed[0][number], before, beside=True)
            self.card.read_later(self._landed[1][number], state, beside=True)
        for i, (conv, ssm) in enumerate(self._left[: len(part.stops)]):
            self.card.read_later(conv[number], conv_stops + i * window_bytes, beside=True)
            self.card.read_later(ssm[number], ssm_stops + i * state_bytes, beside=True)
        delta = self._at("delta") + 4 * skipped * width
        self._launch(
            "gated_norm", (heads, rows), 64,
            delta, _int(width), z, row, t["norm"].address, delta, _int(width), _int(dim),
            c.rms_norm_eps,
        )  # fmt: skip
        self._product(t["out"], delta, self._hidden(skipped), rows, accumulate=True)

    def _attention(self, layer: CardLayer, number: int, part: PassPart, rows: int) -> None:
        """rows: of how many tokens at the end the result is wanted; all get keys and values."""
        c, t, tokens = self.config, layer.tensors, part.end - part.first
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        pages = self._at("pages") + 8 * number * (self.plan.kv_tokens // PAGE_TOKENS)
        # A row: query and gate of each head, keys, values.
        width, query_width, skipped = 2 * (heads + kv_heads) * dim, 2 * heads * dim, tokens - rows
        row, qkv, normed = _int(width), self._at("qkv"), self._at("normed")
        k = qkv + 4 * query_width
        v, gate = k + 4 * kv_heads * dim, qkv + 4 * skipped * width
        self._norm(t["input_norm"], tokens)
        if skipped:
            queries, keys = t["qkv"].split(query_width)
            self._product(keys, normed, k, tokens, stride=width)
            self._product(queries, normed + 4 * skipped * c.hidden_size, gate, rows, stride=width)
        else:
            self._product(t["qkv"], normed, qkv, tokens)
        q = self._at("q")
        self._launch(
            "rmsnorm", (heads, rows), 128,
            gate, row, _int(2 * dim), t["q_norm"].address, q, _int(heads * dim), _int(dim), _int(dim), c.rms_norm_eps,
        )  # fmt: skip
        self._launch(
            "rmsnorm", (kv_heads, tokens), 128,
            k, row, _int(dim), t["k_norm"].address, k, row, _int(dim), _int(dim), c.rms_norm_eps,
        )  # fmt: skip
        half = c.rotary_dim // 2
        for x, stride, count, first in ((q, _int(heads * dim), heads, skipped), (k, row, kv_heads, 0)):
            self._launch(
                "rope", (count, tokens - first), 32,
                x, stride, _int(dim), self._at("positions") + 12 * first, self._at("rotary"), _int(self._rotary_start),
                _int(half), _int(c.mrope_section[1]), _int(c.mrope_section[2]),
            )  # fmt: skip
        self._launch(
            "kv_store", (kv_heads, tokens), 64, k, v, row, pages, _int(part.first), _int(dim), _int(self._kv_f32)
        )  # fmt: skip
        self.card.branch()
        layer_bytes = self._landed_pages.shape[2]
        for landed, page in enumerate(part.pages()):
            source = self._kv + page * self._page_bytes + number * layer_bytes
            self.card.read_later(self._landed_pages[landed, number], source, beside=True)
        group = heads // kv_heads
        self._launch(
            f"attention_causal_{dim}", (-(-rows * group // 32), kv_heads), 256,
            q, _int(heads * dim), _int(dim), gate + 4 * dim, row, _int(2 * dim), pages,
            _int(self._kv_f32), _int(part.first + skipped), _int(rows), _int(group), dim**-0.5, self._at("attended"),
        )  # fmt: skip
        self._product(t["o_proj"], self._at("attended"), self._hidden(skipped), rows, accumulate=True)

    def _moe(self, layer: CardLayer, tokens: int, skipped: int, slot: int) -> None:
        """For all tokens behind the first `skipped` ones."""
        c, t = self.config, layer.tensors
        experts, chosen, hidden = c.num_experts, c.num_experts_per_tok, c.hidden_size
        inner, shared = c.moe_intermediate_size, c.shared_expert_intermediate_size
        pairs = tokens * chosen
        self._norm(t["post_norm"], tokens, skipped)
        # The shared expert goes beside the routed ones: their plan is made by small kernels that leave a card idle. In
        # turns, since Fermi has one queue for both streams.
        self.card.branch()
        self._product(t["shared_gate_up"], self._at("normed"), self._at("shared_gate_up"), tokens, beside=True)
        self._float_product(t["router"], "normed", "router", tokens)
        router, ids, weights = self._at("router"), self._at("chosen"), self._at("weights")
        stride = _int(experts + 1)
        self._launch("router_topk", (tokens, 1), 128, router, stride, _int(experts), _int(chosen), ids, weights)
        counts, starts, rows, places = (self._at(name) for name in ("counts", "starts", "rows", "places"))
        tiles, tile_count = self._at("tiles"), self._at("tile_count")
        self._launch("expert_count", (experts, 1), 256, ids, _int(pairs), counts)
        self._launch("expert_plan", (1, 1), 512, counts, _int(experts), None, starts, tiles, tile_count)
        self._launch("expert_scatter", (experts, 1), 256, ids, _int(pairs), _int(chosen), starts, rows, places)
        self._swiglu("shared_gate_up", "shared_inner", tokens, shared, beside=True)
        self._grouped(t["experts_gate_up"], slot, "normed", rows, "gate_up", pairs)
        self._product(t["shared_down"], self._at("shared_inner"), self._at("shared"), tokens, beside=True)
        self._swiglu("gate_up", "inner", pairs, inner)
        self._grouped(t["experts_down"], slot, "inner", None, "routed", pairs)
        self.card.merge()
        self._launch(
            "moe_combine", (-(-hidden // 128), tokens), 128,
            self._hidden(skipped), self._at("routed"), weights, places, _int(chosen), self._at("shared"),
            router + 4 * experts, stride, _int(hidden),
        )  # fmt: skip

    # ---- operations ------------------------------------------------------------------------------------------

    def _norm(self, gain: Stored, tokens: int, skipped: int = 0) -> None:
        """normed = rmsnorm(hidden), behind the first `skipped` rows."""
        row, zero = _int(self.config.hidden_size), _int(0)
        x, y = self._hidden(skipped), self._at("normed")
        self._launch(
            "rmsnorm", (1, tokens), 128, x, row, zero, gain.address, y, row, zero, row, self.config.rms_norm_eps
        )

    def _product(
        self, w: Stored, x: int, y: int, tokens: int, *, accumulate: bool = False, stride: int = 0, beside: bool = False
    ) -> None:
        """y = x W^T, or += ; rows of y are `stride` floats apart (0: as many as W has rows)."""
        self._launch(
            "matmul_q4", (-(-w.rows // 128), -(-tokens // 64)), 256,
            x, _int(w.cols), w.address, y, _int(stride or w.rows), _int(tokens), _int(w.rows), _int(w.cols),
            _int(accumulate), beside=beside,
        )  # fmt: skip

    def _float_product(self, w: Stored, x: str, y: str, tokens: int) -> None:
        self._launch(
            "matmul_f32", (-(-w.rows // 32), -(-tokens // 32)), 256,
            self._at(x), _int(w.cols), w.address, self._at(y), _int(w.rows), _int(tokens), _int(w.rows), _int(w.cols),
        )  # fmt: skip

    def _grouped(self, w: Stored, slot: int, x: str, rows: int | None, y: str, pairs: int) -> None:
        bound = tile_bound(pairs, self.config.num_experts)
        slot_bytes = ctypes.c_uint(w.rows // BLOCK_ROWS * (w.cols // BLOCK_COLS) * BLOCK_BYTES)
        self._launch(
            "matmul_q4_grouped", (2 * -(-w.rows // 128), bound), 128,
            self._at(x), _int(w.cols), rows, slot + w.address, slot_bytes, self._at(y), _int(w.rows), self._at("tiles"),
            self._at("tile_count"), _int(w.rows), _int(w.cols),
        )  # fmt: skip

    def _swiglu(self, x: str, y: str, rows: int, inner: int, *, beside: bool = False) -> None:
        grid = -(-inner // 128), min(-(-rows // 4), 65535)
        self._launch("swiglu", grid, 128, self._at(x), self._at(y), _int(rows), _int(inner), beside=beside)

    def _launch(
        self, kernel: str, grid: tuple[int, int], threads: int, *arguments: Argument, beside: bool = False
    ) -> None:
        self.card.launch(kernel, grid, threads, *arguments, beside=beside)

    def _hidden(self, row: int) -> int:
        return self._at("hidden") + 4 * row * self.config.hidden_size

    def _at(self, name: str) -> int:
        return self._base + self._scratch.offsets[name]


def open_card(
    weights: Weights,
    *,
    kv_f32: bool,
    insist: bool,
    context_length: int,
    memory_limit: int | None = None,
) -> tuple[CudaCard, Plan] | None:
    """The first card and how its memory will be used; the caller closes it. memory_limit: bytes of it to use at most.

    Where prompts cannot run on it: ConfigError if the caller insists, else None and a line in the log."""
    try:
        check_model(weights)
        card = CudaCard(PTX)
        try:
            return card, make_plan(weights, kv_f32, card.free_bytes(), context_length, memory_limit)
        except BaseException:
            card.close()
            raise
    except (ConfigError, KernelError, OutOfMemory) as error:
        decline(error, insist=insist)
        return None


def describe_card() -> str:
    """The first card and its free memory, once all kernels have been loaded on it. KernelError if that fails."""
    card = CudaCard(PTX)
    try:
        return f"{card.name}, {card.free_bytes() >> 20} MiB free, kernels loaded"
    finally:
        card.close()


def decline(error: Exception, *, insist: bool) -> None:
    """Go on without the card, saying why, unless the caller insists on it: ConfigError."""
    if insist:
        raise ConfigError(f"device is 'gpu', but prompts cannot run there: {error}") from error
    logger.warning("prompts run on the CPU: %s", error)


def lock_experts(weights: Weights, plan: Plan, card: Card) -> tuple[Weights, bool]:
    """Page-lock the experts that travel: (weights to use from now on, whether all are locked).

    In place where the driver can lock the mapped file; else their bytes move to memory of ours, which card and CPU
    then both use; not at all if that is short."""
    travelling = [i for i in range(len(weights.layers)) if i not in plan.resident]
    arrays = [matrix.data for i in travelling for matrix in _expert_matrices(weights.layers[i].moe)]
    if not arrays:
        return weights, True
    if all(card.pin(array) for array in arrays):
        return weights, True
    if sum(array.nbytes for array in arrays) + _LOCK_SPARE > available_bytes():
        return weights, False
    layers, locked = list(weights.layers), True
    for i in travelling:
        moved = []
        for matrix in _expert_matrices(layers[i].moe):
            data = _anonymous(matrix.data.shape, matrix.data.dtype)
            np.copyto(data, matrix.data)
            locked = locked and card.pin(data)
            moved.append(dataclasses.replace(matrix, data=data))
        moe = dataclasses.replace(layers[i].moe, experts_gate_up=moved[0], experts_down=moved[1])
        layers[i] = dataclasses.replace(layers[i], moe=moe)
    return dataclasses.replace(weights, layers=tuple(layers)), locked


def card_rule(plan: Plan, context_length: int, min_tokens: int) -> CardRule:
    """Which segments the card takes. Where its memory does not cover the context window the limit is rounded down to
    one of few values: it decides bits, so what is cached should survive a little more or less free memory."""
    if plan.kv_tokens >= context_length:
        return CardRule(min_tokens, 1 << 30)
    step = 1 << max(0, plan.kv_tokens.bit_length() - 4)
    return CardRule(min_tokens, plan.kv_tokens // step * step)


def measure_min_tokens(
    gpu: GpuPrefill, on_cpu: Callable[[Int32Array], object], new_state: Callable[[], SequenceState]
) -> int:
    """The size of a segment from which the card is quicker than the CPU, by one trial of each: a segment costs the card
    much the same whatever its size, since the weights must travel, and the CPU in proportion to it.

    on_cpu: prefill of these tokens there. new_state: an empty sequence."""
    ids = np.random.default_rng(0).integers(0, gpu.config.vocab_size, _TRIAL_TOKENS).astype(np.int32)
    where = np.repeat(np.arange(_TRIAL_TOKENS, dtype=np.int32)[:, None], 3, axis=1)

    def on_card(tokens: Int32Array) -> None:
        for _ in gpu.advance_steps(new_state(), tokens, where):
            pass

    seconds = []
    trials: tuple[Callable[[Int32Array], object], ...] = (on_card, on_cpu)
    for run in trials:
        run(ids)  # pages come from the disk, code is made
        begin = time.perf_counter()
        run(ids)
        seconds.append(time.perf_counter() - begin)
    share = seconds[0] / seconds[1] * _TRIAL_TOKENS
    chosen = next((size for size in _MIN_TOKENS if size >= share), _MIN_TOKENS[-1])
    logger.info(
        "%d tokens take %.2f s on the card and %.2f s on the CPU: segments of at least %d tokens run on the card",
        _TRIAL_TOKENS, *seconds, chosen,
    )  # fmt: skip
    return chosen


def check_model(weights: Weights) -> None:
    """ConfigError if the kernels do not cover the model's sizes or its matrices are not packed."""
    c = weights.config
    limits = (
        ("head_dim", c.head_dim, HEAD_DIMS),
        ("linear_value_head_dim", c.linear_value_head_dim, DELTA_DIMS),
        ("linear_key_head_dim", c.linear_key_head_dim, (c.linear_value_head_dim,)),
        ("num_experts", c.num_experts, range(1, MAX_EXPERTS + 1)),
        ("num_experts_per_tok", c.num_experts_per_tok, range(1, MAX_CHOSEN + 1)),
    )
    for name, value, accepted in limits:
        if value not in accepted:
            expected = f"at most {accepted[-1]}" if isinstance(accepted, range) else " or ".join(map(str, accepted))
            raise ConfigError(f"prefill on the GPU: {name} is {value}, expected {expected}")
    for index, layer in enumerate(weights.layers):
        for name, matrix in packed_matrices(layer):
            if not matrix.packed:
                raise ConfigError(f"prefill on the GPU: {name} of layer {index} is float32, expected 4-bit blocks")


def packed_matrices(layer: LayerWeights) -> list[tuple[str, Matrix]]:
    """The 4-bit matrices of a layer."""
    moe = layer.moe
    mixer: list[tuple[str, Matrix]]
    if isinstance(layer.mixer, AttentionWeights):
        a = layer.mixer
        mixer = [("q_proj", a.q_proj), ("k_proj", a.k_proj), ("v_proj", a.v_proj), ("o_proj", a.o_proj)]
    else:
        d = layer.mixer
        mixer = [("qkv", d.in_proj_qkv), ("z", d.in_proj_z), ("out", d.out_proj)]
    shared = [("shared_gate", moe.shared_gate), ("shared_up", moe.shared_up), ("shared_down", moe.shared_down)]
    return [*mixer, *shared, ("experts_gate_up", moe.experts_gate_up), ("experts_down", moe.experts_down)]


def dense_tensors(layer: LayerWeights) -> list[tuple[str, tuple[Array, ...], int, int]]:
    """(name, arrays one below the other, rows, cols) of everything but the experts, as the kernels take it. What reads
    the same input is one product: a few columns alone would leave most of a card idle."""
    moe = layer.moe
    if isinstance(layer.mixer, DeltaNetWeights):
        d = layer.mixer
        ab = np.concatenate([d.in_proj_a.data[0], d.in_proj_b.data[0]])
        tensors = [_stack("qkvz", d.in_proj_qkv, d.in_proj_z), _stack("out", d.out_proj)]
        tensors += [("ab", (ab,), *ab.shape), ("conv", (d.conv,), *d.conv.shape)]
        tensors += [_vector("minus_a", d.minus_a), _vector("dt_bias", d.dt_bias), _vector("norm", d.norm)]
    else:
        a = layer.mixer
        tensors = [_stack("qkv", a.q_proj, a.k_proj, a.v_proj), _stack("o_proj", a.o_proj)]
        tensors += [_vector("q_norm", a.q_norm), _vector("k_norm", a.k_norm)]
    tensors += [_stack("shared_gate_up", moe.shared_gate, moe.shared_up), _stack("shared_down", moe.shared_down)]
    tensors += [_vector("input_norm", layer.input_norm), _vector("post_norm", layer.post_norm), _router(moe)]
    return tensors


def usable_bytes(free_bytes: int, memory_limit: int | None) -> int:
    """How much of a card's free memory may be used: all but a spare part, at most the limit."""
    usable = int(free_bytes * (1 - SPARE_SHARE))
    return usable if memory_limit is None else min(usable, memory_limit)


def make_plan(weights: Weights, kv_f32: bool, free_bytes: int, context_length: int, memory_limit: int | None) -> Plan:
    """Divide the card: the longest pass that leaves room for dense weights, buffers and the context; then experts."""
    c = weights.config
    usable = usable_bytes(free_bytes, memory_limit)
    tensors = (arrays for layer in weights.layers for _, arrays, _, _ in dense_tensors(layer))
    dense = sum(_aligned(sum(array.nbytes for array in arrays)) for arrays in tensors)
    experts = [
        _aligned(_aligned(layer.moe.experts_gate_up.data.nbytes) + layer.moe.experts_down.data.nbytes)
        for layer in weights.layers
    ]
    pages = min(-(-context_length // PAGE_TOKENS), int(usable * KV_SHARE) // page_bytes(c, kv_f32))
    kv_tokens, kv = pages * PAGE_TOKENS, pages * page_bytes(c, kv_f32)
    for tokens in PASS_TOKENS:
        scratch = scratch_layout(c, tokens, kv_tokens).nbytes
        left = usable - dense - kv - scratch
        if left >= sum(experts):
            everything = frozenset(range(len(experts)))
            return Plan(tokens, kv_tokens, everything, dense, sum(experts), 0, scratch, kv)
        slots = 2 * max(experts)
        if left >= slots:
            count = min(len(experts) - 1, (left - slots) // max(experts))
            # Spread out, the first layer first: what stays gives the copies of the others time.
            resident = frozenset(i * len(experts) // count for i in range(count)) if count else frozenset()
            kept = sum(experts[i] for i in resident)
            return Plan(tokens, kv_tokens, resident, dense, kept, slots, scratch, kv)
    least = dense + kv + 2 * max(experts) + scratch_layout(c, PASS_TOKENS[-1], kv_tokens).nbytes
    raise OutOfMemory(
        f"prefill on the GPU needs {least} bytes for a context of {context_length} tokens; {usable} may be used"
    )


def _router(moe: MoeWeights) -> tuple[str, tuple[Array, ...], int, int]:
    """Router and shared expert's gate as one matrix: both read the same input."""
    both = np.concatenate([moe.router.data[0], moe.shared_expert_gate.data[0]])
    return "router", (both,), *both.shape


def _stack(name: str, *matrices: Matrix) -> tuple[str, tuple[Array, ...], int, int]:
    rows = sum(matrix.rows for matrix in matrices)
    return name, tuple(matrix.data for matrix in matrices), rows, matrices[0].cols


def _vector(name: str, values: Float32Array) -> tuple[str, tuple[Array, ...], int, int]:
    return name, (values,), 1, len(values)


def _expert_matrices(moe: MoeWeights) -> tuple[Matrix, Matrix]:
    return moe.experts_gate_up, moe.experts_down


def _anonymous(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
    """An array in pages of its own, zero; huge ones where the system has them."""
    kind = np.dtype(dtype)
    memory = mmap.mmap(-1, max(1, int(np.prod(shape)) * kind.itemsize))
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, kind, int(np.prod(shape))).reshape(shape)


def _shifted(embeddings: Sequence[tuple[int, Float32Array]], begin: int, size: int) -> list[tuple[int, Float32Array]]:
    """The parts of `embeddings` inside begin..begin+size-1, counted from `begin`."""
    parts = []
    for start, rows in embeddings:
        first, last = max(start, begin), min(start + len(rows), begin + size)
        if first < last:
            parts.append((first - begin, rows[first - start : last - start]))
    return parts


def _int(value: int) -> ctypes.c_int:
    return ctypes.c_int(value)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
