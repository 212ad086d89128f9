"""Each recipe stores the forms it promises, and never less than its cheaper neighbour."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny_checkpoint as tiny

from engine.convert import convert, writer
from engine.convert.convert import Options
from engine.convert.plan import Format
from engine.convert.recipes import RECIPES
from engine.errors import ConfigError
from engine.weights import ModelFile


def quiet(done: int, total: int) -> None:
    """No progress line."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())


def test_sensitive_tensors_are_float_in_every_recipe(source: Path) -> None:
    small = ("norm", "conv1d", "A_log", "dt_bias", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b")
    for recipe in RECIPES:
        for tensor in convert.prepare(source, Options(recipe=recipe)).plan.tensors:
            if tensor.name.startswith("model.visual."):
                assert tensor.format is not Format.Q4
            elif any(part in tensor.name for part in small):
                assert tensor.format is Format.F32, tensor.name


def test_recipes_grow_from_size_to_float(source: Path) -> None:
    sizes = [writer.plan_bytes(convert.prepare(source, Options(recipe=recipe)).plan) for recipe in RECIPES]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)


def test_unknown_recipe_is_refused(source: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of size"):
        convert.prepare(source, Options(recipe="best"))


def test_float_checkpoint_is_exact_unmarked_and_can_be_converted_again(source: Path, tmp_path: Path) -> None:
    convert.run(convert.prepare(source, Options(recipe="float")), tmp_path / "float", threads=1, progress=quiet)
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())
    for origin, name in ((source, "a"), (tmp_path / "float", "b")):
        convert.run(convert.prepare(origin, Options()), tmp_path / name, threads=1, progress=quiet)
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_what_recipes_cost_in_memory_is_told_and_kept(source: Path, tmp_path: Path) -> None:
    """F16 matrices double when they are loaded: the plan says so, and so does the loaded file."""
    for recipe in ("size", "balanced", "quality"):
        prepared = convert.prepare(source, Options(recipe=recipe))
        convert.run(prepared, tmp_path / recipe, threads=1, progress=quiet)
        file = ModelFile(tmp_path / recipe)
        halves = [t for t in file.tensors.values() if t.dtype == "F16" and "visual" not in t.name]
        assert bool(halves) == (recipe != "size")
        assert file.resident_bytes == file.nbytes + sum(t.data.nbytes for t in halves)
        told = re.search(r"in memory ([\d,]+) bytes", convert.describe(prepared))
        assert (told is None) == (recipe == "size")
        if told is not None:
            resident = int(told[1].replace(",", ""))
            assert resident == pytest.approx(file.resident_bytes, rel=0.01)  # fillers between tensors
