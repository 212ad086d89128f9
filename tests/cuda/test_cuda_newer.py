"""The kernels for newer cards, run on the CPU: correct within what they promise, independent of neighbours like all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import test_cuda_invariance as invariance
from card_models import card_checkpoint
from cuda_cases import SMALL, SPLIT_BOUNDS, Case
from cuda_emulator import CUDA_SOURCES, Emulator, kernel_names
from tiny_models import load_model

from engine import cuda_driver
from engine.config import ModelConfig
from engine.cuda_driver import CudaCard, modules_for
from engine.gpu import PTX, GpuPrefill, lock_experts, make_plan
from engine.model import text_positions
from engine.weights import load_weights

NEWER = sorted((CUDA_SOURCES / "sm_80").glob("*.cu"))
NEWER_CASES = ("matmul_q4-", "matmul_f16-", "experts-", "attention_causal-")
CASES = [case for case in SMALL if case.name.startswith(NEWER_CASES)]


@pytest.mark.parametrize("order", [0, 1, 7])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_float64(newer_library: Path, case: Case, order: int) -> None:
    for check in case.run(Emulator(newer_library, order), np.random.default_rng(1)):
        assert check.error <= SPLIT_BOUNDS, f"{check.kernel}: {check.error:.3g} of its bound"


@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 70), slice(64, 130)], ids=str)
def test_rows_do_not_depend_on_their_neighbours(newer_library: Path, rows: slice) -> None:
    invariance.test_matmul_q4_rows_do_not_depend_on_their_neighbours(Emulator(newer_library), rows)


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_attention_resumed_in_the_middle_equals_the_uncut_pass(newer_library: Path, cut: int) -> None:
    invariance.test_attention_resumed_in_the_middle_equals_the_uncut_pass(Emulator(newer_library), cut)


@pytest.mark.parametrize("count", [1, 17, 32, 33, 64])
def test_grouped_equals_dense(newer_library: Path, count: int) -> None:
    invariance.test_grouped_tiles_of_all_heights_equal_the_dense_product(Emulator(newer_library), count)


def test_each_has_the_kernels_of_its_namesake() -> None:
    assert NEWER
    for source in NEWER:
        assert (CUDA_SOURCES / source.name).exists()
        assert kernel_names(source) == kernel_names(CUDA_SOURCES / source.name)


def test_a_card_gets_the_newest_form_that_it_can_run(tmp_path: Path) -> None:
    for name in ("a.ptx", "b.ptx", "sm_80/a.ptx", "sm_90/a.ptx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    chosen = {20: "a.ptx", 75: "a.ptx", 80: "sm_80/a.ptx", 86: "sm_80/a.ptx", 90: "sm_90/a.ptx", 120: "sm_90/a.ptx"}
    for capability, name in chosen.items():
        assert modules_for(tmp_path, capability) == [tmp_path / name, tmp_path / "b.ptx"]


def test_whole_model_agrees_with_the_cpu(newer_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", str(newer_library))
    checkpoint = card_checkpoint(tmp_path / "card")
    weights, model = load_weights(checkpoint, ModelConfig.load(checkpoint)), load_model(checkpoint, compute="f32")
    card = CudaCard(PTX)
    plan = make_plan(weights, True, card.free_bytes(), 256, None)
    gpu = GpuPrefill(*lock_experts(weights, plan, card)[:1], model.cpu, card, plan, locked=True)
    ids = np.random.default_rng(11).integers(0, 512, 130).astype(np.int32)
    expected, state = model.prefill(model.new_state(), ids), model.new_state()
    for _ in gpu.advance_steps(state, ids, text_positions(0, len(ids))):
        pass
    got = model.logits(0)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    gpu.close()
    model.close()
