"""Whole-model prefill on a CUDA card against the CPU engine, on a tiny and the demo model: no timings.

    python tests/kernels/device_prefill_check.py [--only NAME] [--lengths 1 64 150 947] [--newest 20]

Needs the project with its native build, and an NVIDIA driver. Every check runs, whatever became of the others; one line
each, a traceback where one broke. Exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "cuda")]
from card_models import card_checkpoint  # noqa: E402
from tiny_models import load_model  # noqa: E402

from engine.config import ModelConfig  # noqa: E402
from engine.core import Float32Array, Int32Array  # noqa: E402
from engine.cuda_driver import CudaCard  # noqa: E402
from engine.errors import FermionError, OutOfMemory  # noqa: E402
from engine.gpu import PTX, GpuPrefill, lock_experts, make_plan  # noqa: E402
from engine.model import Model, text_positions  # noqa: E402
from engine.state import SequenceState  # noqa: E402
from engine.weights import Weights, load_weights  # noqa: E402

TOLERANCE = 1e-4  # of the largest value
CONTEXT = 4096
CANCELS = 100


def prefill(gpu: GpuPrefill, state: SequenceState, ids: Int32Array, **more: Any) -> Float32Array:
    """Logits behind a segment."""
    steps = gpu.advance_steps(state, ids, text_positions(state.position, len(ids)), **more)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return gpu._cpu.logits(end.value)


def contents(state: SequenceState) -> list[bytes]:
    """The state, bit by bit, with the keys and values of its tokens only."""
    full, rest = divmod(state.position, 64)
    pages = [page.tobytes() for page in state.pages[:full]]
    if rest:
        c = state.config
        shape = (c.attention_layers, 2, c.num_key_value_heads, 64, -1)
        pages.append(state.pages[full].reshape(shape)[:, :, :, :rest].tobytes())
    return [state.conv.tobytes(), state.ssm.tobytes(), *pages]


def deviation(got: Float32Array, expected: Float32Array) -> float:
    """Largest difference over the largest value."""
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-30))


class Checks:
    """One model on the card; every method named check_* is a check that raises or returns what to print."""

    def __init__(self, checkpoint: Path, lengths: list[int], newest: int) -> None:
        self.checkpoint, self.lengths, self.newest = checkpoint, lengths, newest
        self.weights: Weights = load_weights(checkpoint, ModelConfig.load(checkpoint))
        self.exact: Model = load_model(checkpoint, compute="f32", threads=4)
        rng = np.random.default_rng(3)
        self.ids = rng.integers(0, self.weights.config.vocab_size, max(*lengths, 333) + 64).astype(np.int32)

    @contextlib.contextmanager
    def gpu(self, model: Model | None = None, memory: int | None = None) -> Iterator[GpuPrefill]:
        """A fresh card with the model on it."""
        card = CudaCard(PTX, newest=self.newest)
        try:
            cpu = (model or self.exact).cpu
            plan = make_plan(self.weights, cpu.kv_f32, card.free_bytes(), CONTEXT, memory)
            weights, locked = lock_experts(self.weights, plan, card)
            self.locked = locked
            yield GpuPrefill(weights, cpu, card, plan, locked=locked)
        finally:
            card.close()

    def check_agreement_with_the_cpu(self) -> str:
        found = []
        with self.gpu() as gpu:
            for length in self.lengths:
                ids = self.ids[:length]
                states = self.exact.new_state(), self.exact.new_state()
                logits = {"cpu": self.exact.prefill(states[0], ids), "gpu": prefill(gpu, states[1], ids)}
                parts = (
                    deviation(logits["gpu"], logits["cpu"]),
                    deviation(states[1].ssm, states[0].ssm),
                    deviation(states[1].conv, states[0].conv),
                )
                same = 0
                for _ in range(24):
                    tokens = [int(np.argmax(row)) for row in logits.values()]
                    if tokens[0] != tokens[1]:
                        break
                    same += 1
                    logits = {
                        name: self.exact.decode(state, tokens[0]) for name, state in zip(logits, states, strict=True)
                    }
                found.append(f"{length}: " + "/".join(f"{part:.1e}" for part in parts) + f", {same} of 24 tokens")
                assert max(parts) < TOLERANCE, found
                assert same == 24, found
        return "; ".join(found)

    def check_resumed_from_every_boundary(self) -> str:
        length = min(max(self.lengths), 700)
        with self.gpu() as gpu:
            whole = self.exact.new_state()
            expected = prefill(gpu, whole, self.ids[:length])
            cuts = range(64, length, 64)
            for cut in cuts:
                state = self.exact.new_state()
                prefill(gpu, state, self.ids[:cut])
                got = prefill(gpu, state, self.ids[cut:length])
                assert np.array_equal(got, expected), f"cut at {cut}: {deviation(got, expected):.1e}"
                assert contents(state) == contents(whole), f"cut at {cut}: states differ"
        return f"{length} tokens, {len(cuts)} cuts"

    def check_what_stays_on_the_card_changes_no_bit(self) -> str:
        length = max(self.lengths)
        plans, results = [], []
        for memory in (None, self.smallest()):
            with self.gpu(memory=memory) as gpu:
                state = self.exact.new_state()
                results.append((prefill(gpu, state, self.ids[:length]).tobytes(), contents(state)))
                plans.append(str(gpu.plan))
        assert results[0] == results[1], plans
        return f"{plans[1]}; page-locked: {self.locked}"

    def smallest(self) -> int:
        """The least memory with which a plan has room for the context."""
        limit = 16 << 30
        for memory in (int(limit * 0.97**i) for i in range(1000)):
            try:
                plan = make_plan(self.weights, True, 1 << 40, CONTEXT, memory)
            except OutOfMemory:
                break
            if plan.kv_tokens < max(self.lengths) + 64:
                break
            limit = memory
        return limit

    def check_segments_of_one_call(self) -> str:
        """Several segments in one call, with the states on the way, against one call each."""
        starts, stops = (130, 195, 203), (64, 130, 203, 267)
        end = 333
        with self.gpu() as gpu:
            separate, expected = self.exact.new_state(), {}
            for first, last in pairwise([0, 64, 130, 195, 203, 267, end]):
                logits = prefill(gpu, separate, self.ids[first:last])
                expected[last] = contents(separate)
            state, found = self.exact.new_state(), {}
            got = prefill(
                gpu,
                state,
                self.ids[:end],
                starts=starts,
                stops=stops,
                reached=lambda: found.update({state.position: contents(state)}),
            )
            assert np.array_equal(got, logits)
            assert found == {stop: expected[stop] for stop in stops}
            assert contents(state) == expected[end]
        return f"{len(starts) + 1} segments, {len(stops)} states"

    def check_half_precision_pages(self) -> str:
        """The serving configuration: 8-bit activations on the CPU, float16 keys and values on both."""
        served = load_model(self.checkpoint, threads=4)
        try:
            with self.gpu(served) as gpu:
                state, uncut = served.new_state(), served.new_state()
                ids = self.ids[: min(max(self.lengths), 700)]
                expected = prefill(gpu, uncut, ids)
                cut = len(ids) // 2 // 64 * 64
                prefill(gpu, state, ids[:cut])
                assert np.array_equal(prefill(gpu, state, ids[cut:]), expected)
                on_cpu = served.prefill(served.new_state(), ids)
                return f"deviation from 8-bit activations {deviation(expected, on_cpu):.1e}"
        finally:
            served.close()

    def check_cancels_leave_nothing(self) -> str:
        length = min(max(self.lengths), 200)
        with self.gpu() as gpu:
            expected = prefill(gpu, self.exact.new_state(), self.ids[:length])
            before = gpu.card.free_bytes()
            layers = np.random.default_rng(4).integers(1, self.weights.config.num_hidden_layers, CANCELS)
            for count in layers:
                steps = gpu.advance_steps(self.exact.new_state(), self.ids[:length], text_positions(0, length))
                for _ in range(count):
                    next(steps)
                steps.close()
            assert np.array_equal(prefill(gpu, self.exact.new_state(), self.ids[:length]), expected)
            after = gpu.card.free_bytes()
        assert after == before, f"{before - after} bytes are gone"
        return f"{CANCELS} cancels, {after} bytes free before and after"

    def check_too_little_memory(self) -> str:
        try:
            with self.gpu(memory=100_000):
                raise AssertionError("no error")
        except OutOfMemory as error:
            return str(error)

    def check_memory_taken_by_others(self) -> str:
        """Another user of the card leaves little: a smaller plan, or an error in words."""
        other = CudaCard(PTX)
        try:
            taken = other.free_bytes() - (1 << 30)
            other.allocate(taken)
            with self.gpu() as gpu:
                prefill(gpu, self.exact.new_state(), self.ids[:64])
                return str(gpu.plan)
        except OutOfMemory as error:
            return str(error)
        finally:
            other.close()

    def check_close_gives_everything_back(self) -> str:
        with self.gpu() as gpu:
            prefill(gpu, self.exact.new_state(), self.ids[:64])
        probe = CudaCard(PTX)
        first = probe.free_bytes()
        probe.close()
        for _ in range(3):
            with self.gpu() as gpu:
                prefill(gpu, self.exact.new_state(), self.ids[:64])
        probe = CudaCard(PTX)
        last = probe.free_bytes()
        probe.close()
        assert last >= first, f"{first - last} bytes are gone"
        return f"{last} bytes free"


def attempt(name: str, check: Callable[[], str]) -> bool:
    """Run one check and print what became of it."""
    begin = time.perf_counter()
    try:
        found, good = check(), True
    except Exception as error:
        found, good = f"{type(error).__name__}: {error}", False
        traceback.print_exc(file=sys.stdout)
    print(f"{'ok    ' if good else 'FAILED'} {name} ({time.perf_counter() - begin:.1f} s): {found}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 64, 150, 947])
    parser.add_argument("--newest", type=int, default=1000, help="20: the kernels for Fermi even on a newer card")
    options = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as directory:
        demo = ROOT / "engine" / "demo" / "checkpoint"
        for model, make in (("tiny", lambda: card_checkpoint(Path(directory) / "tiny")), ("demo", lambda: demo)):
            try:
                checks = Checks(make(), options.lengths, options.newest)
            except (OSError, FermionError):
                traceback.print_exc(file=sys.stdout)
                good = False
                continue
            for attribute in dir(checks):
                name = f"{model} {attribute.removeprefix('check_')}"
                if attribute.startswith("check_") and options.only in name:
                    good &= attempt(name, getattr(checks, attribute))
            checks.exact.close()
    print("all good" if good else "NOT good")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
