"""Whole-model prefill on a CUDA card: times with the state's hand-over, against the floors of this card.

    fermion bench make-synthetic DIR
    python tests/kernels/device_prefill.py DIR [--tokens 947 4096] [--gpu-memory-mib 5325] [--newest 20] [--profile]
        [--timeline FILE]

Needs the project with its native build, and an NVIDIA driver. --timeline: a picture of one prefill (the last of
--tokens): copies over computation, layer by layer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from engine.config import EngineConfig, ModelConfig
from engine.core import Float32Array, Int32Array
from engine.cuda_driver import Argument, Array, CudaCard
from engine.gpu import PTX, GpuPrefill, lock_experts, make_plan
from engine.model import Model, text_positions
from engine.placement import choose_threads
from engine.state import SequenceState
from engine.weights import Weights, load_weights

REPEATS = 5
COPY_BYTES = 256 << 20
FMA_ROUNDS, FMA_CHAINS, FMA_BLOCKS = 4096, 16, 4096
FLOP_SHARE = 0.6  # of the measured peak: what the arithmetic floor counts on


class ProfiledCard(CudaCard):
    """Waits for every kernel and adds up its time."""

    def __init__(self, ptx: Path, newest: int) -> None:
        super().__init__(ptx, newest=newest)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def launch(
        self, kernel: str, grid: tuple[int, int], threads: int, *arguments: Argument, beside: bool = False
    ) -> None:
        begin = time.perf_counter()
        super().launch(kernel, grid, threads, *arguments)
        self.finish(self.mark())
        self.seconds[kernel] += time.perf_counter() - begin


class TimedCard(CudaCard):
    """Takes the time of every copy and of every stretch of computation between marks and waits."""

    def __init__(self, ptx: Path, newest: int) -> None:
        super().__init__(ptx, newest=newest)
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.synchronize()
        self.spans: dict[str, list[tuple[ctypes.c_void_p, ctypes.c_void_p]]] = {"copy": [], "compute": []}
        self.zero = self._timed(self._compute)
        self._since = self.zero

    def _timed(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        self._call("cuEventRecord", event, stream)
        return event

    def copy(self, pieces: Sequence[tuple[int, Array]], after: object) -> object:
        if after is not None:
            self._call("cuStreamWaitEvent", self._copies, after, ctypes.c_uint(0))
        begin = self._timed(self._copies)
        done = super().copy(pieces, None)
        self.spans["copy"].append((begin, self._timed(self._copies)))
        return done

    def wait(self, copied: object) -> None:
        self.spans["compute"].append((self._since, self._timed(self._compute)))
        super().wait(copied)
        self._since = self._timed(self._compute)

    def mark(self) -> object:
        now = self._timed(self._compute)
        self.spans["compute"].append((self._since, now))
        self._since = now
        return super().mark()

    def milliseconds(self) -> dict[str, list[tuple[float, float]]]:
        """Begin and end of each span since `forget`."""
        self.synchronize()

        def since(event: ctypes.c_void_p) -> float:
            value = ctypes.c_float()
            self._call("cuEventElapsedTime", ctypes.byref(value), self.zero, event)
            return value.value

        return {kind: [(since(a), since(b)) for a, b in spans] for kind, spans in self.spans.items()}


def draw(spans: dict[str, list[tuple[float, float]]], title: str, path: Path) -> None:
    """Two rows over a common time axis in ms: what is copied, what is computed."""
    width, row, left, top = 1400, 60, 90, 40
    total = max(end for group in spans.values() for _, end in group)
    picture = Image.new("RGB", (left + width + 30, top + 2 * row + 60), "white")
    pen = ImageDraw.Draw(picture)
    pen.text((left, 12), title, "black")
    for index, (kind, shades) in enumerate((("copy", ("#d9822b", "#f3b774")), ("compute", ("#2b6cb0", "#7fb0dd")))):
        y = top + index * row
        pen.text((10, y + 18), kind, "black")
        for number, (begin, end) in enumerate(spans[kind]):
            x = left + begin / total * width, left + end / total * width
            pen.rectangle((x[0], y, max(x), y + row - 14), fill=shades[number % 2])
    base, step = top + 2 * row, next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if total / s <= 14)
    pen.line((left, base, left + width, base), fill="black")
    for value in range(0, int(total) + 1, step):
        x_tick = left + value / total * width
        pen.line((x_tick, base, x_tick, base + 6), fill="black")
        pen.text((x_tick - 8, base + 10), f"{value} ms", "black")
    picture.save(path)


def run(gpu: GpuPrefill, state: SequenceState, ids: Int32Array) -> Float32Array:
    """Logits behind a segment."""
    steps = gpu.advance_steps(state, ids, text_positions(state.position, len(ids)))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return gpu._cpu.logits(end.value)


def copy_rate(card: CudaCard) -> float:
    """Bytes per second from page-locked memory to the card; 0 if none can be locked."""
    array = np.ones(COPY_BYTES, np.uint8)
    if not card.pin(array):
        return 0.0
    target, best = card.allocate(COPY_BYTES), float("inf")
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        card.write(target, array)
        best = min(best, time.perf_counter() - begin)
    return COPY_BYTES / best


def fma_peak() -> float:
    """float32 operations per second of a kernel that does nothing but multiply-adds, a multiply-add being two."""
    chains = "\n".join(f"fma.rn.f32 %f{i}, %f{i}, %a, %a;" for i in range(FMA_CHAINS))
    starts = "\n".join(f"mov.f32 %f{i}, %a;" for i in range(FMA_CHAINS))
    sums = "\n".join(f"add.f32 %f0, %f0, %f{i};" for i in range(1, FMA_CHAINS))
    text = f""".version 3.2
.target sm_20
.address_size 64
.visible .entry fma_peak(.param .u64 y, .param .u32 rounds) {{
.reg .f32 %f<{FMA_CHAINS}>; .reg .f32 %a; .reg .u32 %n, %t; .reg .u64 %p; .reg .pred %q;
mov.u32 %t, %tid.x; cvt.rn.f32.u32 %a, %t; mul.f32 %a, %a, 0f37800000;
ld.param.u64 %p, [y]; ld.param.u32 %n, [rounds];
{starts}
again:
{chains}
{chains}
sub.u32 %n, %n, 1; setp.ne.u32 %q, %n, 0; @%q bra again;
{sums}
st.global.f32 [%p], %f0; ret; }}
"""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "fma_peak.ptx").write_text(text)
        card = CudaCard(Path(folder))
    try:
        target, best = card.allocate(256), float("inf")
        for _ in range(REPEATS):
            begin = time.perf_counter()
            card.launch("fma_peak", (FMA_BLOCKS, 1), 256, target, ctypes.c_uint(FMA_ROUNDS))
            card.synchronize()
            best = min(best, time.perf_counter() - begin)
    finally:
        card.close()
    return 2.0 * 2 * FMA_CHAINS * FMA_ROUNDS * FMA_BLOCKS * 256 / best


def flop(config: ModelConfig, tokens: int) -> float:
    """Of a prefill: products, delta rule, attention; an expert's tiles unpadded."""
    h, layers = config.hidden_size, config.num_hidden_layers
    width = config.value_width
    delta = h * (config.conv_channels + 2 * width) + 3 * width * config.linear_key_head_dim
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = h * (3 * query + 2 * key) + query * tokens
    inner = config.num_experts_per_tok * config.moe_intermediate_size + config.shared_expert_intermediate_size
    per_token = config.delta_layers * delta + config.attention_layers * attention
    per_token += layers * h * (3 * inner + config.num_experts)
    return 2.0 * tokens * per_token


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[947, 4096])
    parser.add_argument("--gpu-memory-mib", type=int, help="as on a smaller card (C2075 with ECC: 5325)")
    parser.add_argument("--newest", type=int, default=1000, help="20: the kernels for Fermi even on a newer card")
    parser.add_argument("--profile", action="store_true", help="time by kernel, one after the other")
    parser.add_argument("--timeline", type=Path, help="picture of one prefill")
    options = parser.parse_args()
    weights: Weights = load_weights(options.checkpoint, ModelConfig.load(options.checkpoint))
    context = max(options.tokens) + 64
    config = EngineConfig(device="cpu")
    threads, cpus = choose_threads(None)
    probe = CudaCard(PTX)
    rate, peak = copy_rate(probe), fma_peak()
    probe.close()
    kind = ProfiledCard if options.profile else TimedCard if options.timeline else None
    card = CudaCard(PTX, newest=options.newest) if kind is None else kind(PTX, options.newest)
    print(f"{card.name}: copies {rate / 1e9:.1f} GB/s page-locked, multiply-adds {peak / 1e12:.1f} TFLOP/s")
    limit = None if options.gpu_memory_mib is None else options.gpu_memory_mib << 20
    plan = make_plan(weights, False, card.free_bytes(), context, limit)
    begin = time.perf_counter()
    weights, locked = lock_experts(weights, plan, card)
    lock_s = time.perf_counter() - begin
    model = Model(weights, config, threads=threads, cpus=cpus, max_context=context)
    gpu = GpuPrefill(weights, model.cpu, card, plan, locked=locked)
    load_s = time.perf_counter() - begin
    print(f"plan: {plan}; page-locked {locked} in {lock_s:.1f} s, loaded in {load_s:.1f} s")
    experts = [layer.moe.experts_gate_up.data.nbytes + layer.moe.experts_down.data.nbytes for layer in weights.layers]
    travel = sum(size for i, size in enumerate(experts) if i not in plan.resident)
    result: dict[str, object] = {"card": card.name, "newest": options.newest, "plan": str(plan), "locked": locked}
    result |= {"pinned_bytes_per_s": rate, "fma_flop_per_s": peak, "travelling_bytes": travel, "prefill_ms": {}}
    rng = np.random.default_rng(0)
    for tokens in options.tokens:
        ids = rng.integers(0, weights.config.vocab_size, tokens).astype(np.int32)
        run(gpu, model.new_state(), ids)
        if isinstance(card, ProfiledCard):
            card.seconds.clear()
        times = []
        for _ in range(REPEATS):
            if isinstance(card, TimedCard):
                card.forget()
            state = model.new_state()
            begin = time.perf_counter()
            run(gpu, state, ids)
            times.append((time.perf_counter() - begin) * 1e3)
        passes = -(-tokens // plan.pass_tokens)
        floors = sum(experts) / rate * 1e3, flop(weights.config, tokens) / peak / FLOP_SHARE * 1e3
        print(
            f"{tokens} tokens: best {min(times):.1f} ms, median {np.median(times):.1f} ms, {passes} passes; floors: "
            f"all experts copied once {floors[0]:.1f} ms, float32 at {FLOP_SHARE:.0%} of peak {floors[1]:.1f} ms; "
            f"best is {min(times) / max(floors):.2f} of the larger",
            flush=True,
        )
        result["prefill_ms"] |= {tokens: times}  # type: ignore[operator]
        if isinstance(card, ProfiledCard):
            for kernel, seconds in sorted(card.seconds.items(), key=lambda item: -item[1]):
                print(f"  {kernel:24s} {seconds / REPEATS * 1e3:9.2f} ms")
    if isinstance(card, TimedCard):
        spans = card.milliseconds()
        title = f"{options.tokens[-1]} tokens on {card.name}: {plan}"
        draw(spans, title, options.timeline)
        result["spans_ms"] = {kind: sum(end - begin for begin, end in group) for kind, group in spans.items()}
    gpu.close()
    model.close()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
