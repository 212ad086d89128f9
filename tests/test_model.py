"""The text model against the official implementation's results (tests/vectors), and against itself: chunked and
recurrent, whole and split, any number of threads and any size of pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tiny_models import VECTORS, deviation, load_model, packed_checkpoint, vector_checkpoint

from engine import formats
from engine.config import SIMD_TIERS
from engine.core import Float32Array, Int32Array
from engine.cpu import inverse_frequency, rotary_axes, supported_tiers
from engine.model import Model, text_positions
from engine.state import SequenceState
from engine.weights import load_weights

HF_TOLERANCE = 1e-4  # of the logits' scale
SELF_TOLERANCE = 1e-5

tiers = pytest.mark.parametrize(
    "tier",
    [pytest.param(t, marks=pytest.mark.skipif(t not in supported_tiers(), reason=f"no {t} here")) for t in SIMD_TIERS],
)
models = pytest.mark.parametrize("name", ["a", "b"])


def vectors(name: str) -> dict[str, npt.NDArray[np.generic]]:
    with np.load(VECTORS / f"{name}.npz") as file:
        return dict(file)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path, tier: str, name: str) -> Iterator[Model]:
    loaded = load_model(vector_checkpoint(tmp_path / name, name), compute="f32", simd_tier=tier, threads=2)
    yield loaded
    loaded.close()


def run_recurrent(model: Model, state: SequenceState, ids: Int32Array) -> Float32Array:
    """A pass whose delta rule goes token by token."""
    model.cpu.begin(ids, text_positions(state.position, len(ids)))
    model.cpu.layers(state, 0, model.config.num_hidden_layers, recurrent=True)
    state.position += len(ids)
    return model.cpu.logits(len(ids) - 1)


def state_bytes(state: SequenceState) -> bytes:
    """All of a state that later tokens can see."""
    pages = [page.tobytes() for page in state.pages]
    return b"".join([state.conv.tobytes(), state.ssm.tobytes(), *pages])


@tiers
@models
class TestAgainstOfficial:
    def test_prefill_of_ragged_lengths(self, model: Model, name: str) -> None:
        known = vectors(name)
        for length, expected in zip(known["lengths"], known["last_logits"], strict=True):
            got = model.prefill(model.new_state(), known["tokens"][:length])
            assert deviation(got, expected) < HF_TOLERANCE, f"length {length}"

    def test_every_position_of_a_prompt(self, model: Model, name: str) -> None:
        known = vectors(name)
        for _ in model.advance_steps(model.new_state(), known["tokens"], every_row=True):
            pass
        got = np.stack([model.cpu.logits(row) for row in range(0, len(known["tokens"]), 9)])
        assert deviation(got, known["all_logits"]) < HF_TOLERANCE

    def test_states_after_a_prompt(self, model: Model, name: str) -> None:
        known = vectors(name)
        state = model.new_state()
        model.prefill(state, known["tokens"])
        assert deviation(state.conv, known["conv"]) < SELF_TOLERANCE
        assert deviation(state.ssm, known["ssm"]) < SELF_TOLERANCE

    def test_greedy_ids_continue_a_prefill(self, model: Model, name: str) -> None:
        known = vectors(name)
        for start, ids, kept in zip(known["starts"], known["greedy"], known["greedy_logits"], strict=True):
            state = model.new_state()
            logits = model.prefill(state, known["tokens"][:start])
            got = []
            for step in range(len(ids)):
                if step % 9 == 0:
                    assert deviation(logits, kept[step // 9]) < HF_TOLERANCE, f"start {start}, step {step}"
                got.append(int(np.argmax(logits)))
                logits = model.decode(state, got[-1])
            assert got == ids.tolist(), f"start {start}"

    def test_picture_positions_and_what_follows_them(self, model: Model, name: str) -> None:
        known = vectors(name)
        state = model.new_state()
        for _ in model.advance_steps(state, known["mrope_tokens"], known["mrope_positions"], every_row=True):
            pass
        rows = range(0, len(known["mrope_tokens"]), 5)
        assert deviation(np.stack([model.cpu.logits(row) for row in rows]), known["mrope_logits"]) < HF_TOLERANCE
        state.rope_delta = int(known["mrope_delta"])
        for token, expected in zip(known["mrope_more"], known["mrope_next"], strict=True):
            assert deviation(model.decode(state, int(token)), expected) < HF_TOLERANCE


@tiers
@models
class TestAgainstItself:
    @pytest.mark.parametrize("cuts", [[1], [64], [65], [1, 2, 3, 4], [100, 101, 230], [63, 127, 191, 255, 319]])
    def test_split_prefill(self, model: Model, name: str, cuts: list[int]) -> None:
        ids = vectors(name)["tokens"]
        whole, split = model.new_state(), model.new_state()
        expected = model.prefill(whole, ids)
        for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            got = model.prefill(split, ids[begin:end])
        assert deviation(got, expected) < SELF_TOLERANCE
        assert deviation(split.ssm, whole.ssm) < SELF_TOLERANCE
        assert deviation(split.conv, whole.conv) < SELF_TOLERANCE

    def test_recurrent_equals_chunked(self, model: Model, name: str) -> None:
        ids = vectors(name)["tokens"]
        chunked, recurrent = model.new_state(), model.new_state()
        expected = model.prefill(chunked, ids)
        assert deviation(run_recurrent(model, recurrent, ids), expected) < SELF_TOLERANCE
        assert deviation(recurrent.ssm, chunked.ssm) < SELF_TOLERANCE

    def test_one_pass_of_many_tokens_has_the_bits_of_many_steps(self, model: Model, name: str) -> None:
        ids = vectors(name)["tokens"][:150]
        together, stepped = model.new_state(), model.new_state()
        expected = run_recurrent(model, together, ids)
        for token in ids:
            got = model.decode(stepped, int(token))
        assert got.tobytes() == expected.tobytes()
        assert state_bytes(stepped) == state_bytes(together)


class TestInvariance:
    """Bits of a packed model depend on nothing but prompt, segment starts and tier."""

    @tiers
    def test_threads_and_pass_size_change_no_bit(self, tmp_path: Path, tier: str) -> None:
        directory = packed_checkpoint(tmp_path / "packed")
        ids = np.random.default_rng(1).integers(0, 258, 333).astype(np.int32)
        results = set()
        for threads, pass_tokens in ((1, 512), (1, 64), (2, 192), (3, 512), (5, 64)):
            model = load_model(directory, simd_tier=tier, threads=threads, pass_tokens=pass_tokens)
            state = model.new_state()
            logits = [model.prefill(state, ids), model.decode(state, 7), model.decode(state, 8)]
            results.add(b"".join(row.tobytes() for row in logits) + state_bytes(state))
            model.close()
        assert len(results) == 1

    @tiers
    def test_one_pass_of_many_tokens_has_the_bits_of_many_steps(self, tmp_path: Path, tier: str) -> None:
        model = load_model(packed_checkpoint(tmp_path / "packed"), simd_tier=tier, pass_tokens=640)
        ids = np.random.default_rng(2).integers(0, 258, 600).astype(np.int32)  # more than one span of keys
        together, stepped = model.new_state(), model.new_state()
        expected = run_recurrent(model, together, ids)
        for token in ids:
            got = model.decode(stepped, int(token))
        assert got.tobytes() == expected.tobytes()
        assert state_bytes(stepped) == state_bytes(together)
        model.close()


class TestForms:
    def test_same_weights_stored_expert_by_expert(self, tmp_path: Path) -> None:
        ids = vectors("a")["tokens"]
        results = []
        for file in ("a", "a_per_expert"):
            model = load_model(vector_checkpoint(tmp_path / file, "a", file), compute="f32")
            results.append(model.prefill(model.new_state(), ids).tobytes())
            model.close()
        assert results[0] == results[1]

    def test_8_bit_activations_stay_close_to_float32(self, tmp_path: Path) -> None:
        directory = packed_checkpoint(tmp_path / "packed")
        ids = np.random.default_rng(3).integers(0, 258, 100).astype(np.int32)
        logits = {}
        for compute in ("f32", "w4a8"):
            model = load_model(directory, compute=compute)
            logits[compute] = model.prefill(model.new_state(), ids)
            model.close()
        assert 0 < deviation(logits["w4a8"], logits["f32"]) < 0.1

    @tiers
    def test_the_head_has_no_quantisation_noise(self, tmp_path: Path, tier: str) -> None:
        """Its input is taken as two int8 terms; one alone is a thousandth off."""
        directory = packed_checkpoint(tmp_path / "packed")
        model = load_model(directory, simd_tier=tier)
        weights = load_weights(directory, model.config)
        head = formats.dequantize_q4(weights.head.data)
        ids = np.random.default_rng(5).integers(0, 258, 64).astype(np.int32)
        for _ in model.advance_steps(model.new_state(), ids, every_row=True):
            pass
        errors = []
        for row, hidden in enumerate(model.cpu.hidden.astype(np.float64)):
            scale = np.sqrt((hidden**2).mean() + model.config.rms_norm_eps)
            exact = head @ (hidden / scale * weights.final_norm)
            errors.append(np.abs(model.cpu.logits(row) - exact).max() / np.abs(exact).max())
        model.close()
        assert max(errors) < 1e-4

    def test_tiers_agree_in_float32(self, tmp_path: Path) -> None:
        directory = packed_checkpoint(tmp_path / "packed")
        ids = np.random.default_rng(4).integers(0, 258, 100).astype(np.int32)
        results = []
        for tier in supported_tiers():
            model = load_model(directory, compute="f32", simd_tier=tier)
            results.append(model.prefill(model.new_state(), ids))
            model.close()
        assert all(deviation(result, results[0]) < SELF_TOLERANCE for result in results)


class TestPrefill:
    def test_given_rows_replace_embeddings_across_passes(self, tmp_path: Path) -> None:
        model = load_model(vector_checkpoint(tmp_path / "a", "a"), compute="f32", pass_tokens=64)
        ids = vectors("a")["tokens"][:100].copy()
        expected = model.prefill(model.new_state(), ids)
        rows = model_rows(model, ids[50:80])
        masked = ids.copy()
        masked[50:80] = 3
        got = model.prefill(model.new_state(), masked, embeddings=[(50, rows)])
        assert got.tobytes() == expected.tobytes()
        model.close()

    @tiers
    def test_the_last_row_alone_is_what_it_is_among_all(self, tmp_path: Path, tier: str) -> None:
        """The last layer's other rows are left out; its keys, states and the last row keep every bit."""
        model = load_model(packed_checkpoint(tmp_path / "packed"), simd_tier=tier, pass_tokens=64)
        ids = np.random.default_rng(8).integers(0, 258, 150).astype(np.int32)
        for length in (1, 2, 63, 64, 65, 130, 150):
            whole, short = model.new_state(), model.new_state()
            for _ in model.advance_steps(whole, ids[:length], every_row=True):
                pass
            expected = model.logits((length - 1) % 64)
            assert model.prefill(short, ids[:length]).tobytes() == expected.tobytes(), length
            assert state_bytes(short) == state_bytes(whole), length
            assert model.decode(short, 5).tobytes() == model.decode(whole, 5).tobytes(), length
        model.close()

    def test_steps_report_every_layer_in_order(self, tmp_path: Path) -> None:
        model = load_model(vector_checkpoint(tmp_path / "a", "a"), compute="f32", pass_tokens=64)
        state = model.new_state()
        steps = list(model.prefill_steps(state, vectors("a")["tokens"][:100]))
        assert steps == [16, 32, 48, 64, 73, 82, 91, 100]
        assert state.position == 100
        model.close()


def model_rows(model: Model, ids: Int32Array) -> Float32Array:
    """Embedding rows of `ids`."""
    model.cpu.begin(np.ascontiguousarray(ids), text_positions(0, len(ids)))
    return model.cpu.hidden.copy()


def test_rotary_axes_interleave() -> None:
    axes = rotary_axes((11, 11, 10))
    assert [axes.count(axis) for axis in range(3)] == [11, 11, 10]
    assert axes[:6] == [0, 1, 2, 0, 1, 2]
    assert axes[30:] == [0, 1]


def test_inverse_frequencies() -> None:
    got = inverse_frequency(64, 1e7)
    assert got.dtype == np.float32
    assert got == pytest.approx([1e7 ** (-2 * j / 64) for j in range(32)], rel=1e-6)
