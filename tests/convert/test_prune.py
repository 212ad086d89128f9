"""Pruning keeps exactly the chosen experts and their router rows, from a published and from a converted checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny
from tiny_checkpoint import PREFIX

from engine.convert import convert, writer
from engine.convert.calibration import Calibration, write_calibration
from engine.convert.convert import Options
from engine.convert.prune import Selection, select
from engine.errors import ConfigError, ModelFileError

TRUNK = [f"{PREFIX}layers.{index}.mlp." for index in range(4)]
MTP = "mtp.layers.0.mlp."


def quiet(done: int, total: int) -> None:
    """No progress line."""


def choice(kept: int = 4, *, mtp: bool = True) -> Selection:
    """Another choice in every block."""
    rng = np.random.default_rng(1)
    return select({prefix: rng.random(8).astype(np.float32) for prefix in (TRUNK + [MTP] * mtp)}, kept)


def sliced(weights: tiny.Weights, selection: Selection) -> tiny.Weights:
    """The same prune, in plain NumPy."""
    pruned = dict(weights)
    for prefix, ids in selection.blocks.items():
        for name in (f"{prefix}gate.weight", f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"):
            pruned[name] = weights[name][list(ids)]
    return pruned


def test_highest_scores_stay_in_order_and_ties_go_to_the_lower_number() -> None:
    scores = {"a.mlp.": np.array([1, 3, 3, 0, 3], np.float32), "b.mlp.": np.array([0, 0, 0, 0, 1], np.float32)}
    assert select(scores, 2).blocks == {"a.mlp.": (1, 2), "b.mlp.": (0, 4)}


@pytest.mark.parametrize("kept", [0, 9])
def test_impossible_count_is_refused(kept: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 8"):
        choice(kept)


@pytest.mark.parametrize("form", ["fused", "per-expert"])
def test_published_source(tmp_path: Path, form: str) -> None:
    weights = tiny.random_weights()
    stored = weights if form == "fused" else tiny.per_expert(weights)
    source = tiny.write_checkpoint(tmp_path / "src", stored, tiny.config())
    selection = choice()
    conversion = convert.prepare(source, Options(selection=selection))
    for tensor in conversion.plan.tensors:
        got = writer.read_rows(tensor, 0, tensor.rows).reshape(tensor.shape)
        np.testing.assert_array_equal(got, sliced(weights, selection)[tensor.name], err_msg=tensor.name)
    text = json.loads(conversion.side_files["config.json"])["text_config"]
    assert text["num_experts"] == 4
    assert "mtp_num_experts" not in text


def test_converted_source_gives_the_bytes_of_pruning_first(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    selection = choice()
    convert.run(convert.prepare(source, Options(selection=selection)), tmp_path / "direct", threads=2, progress=quiet)
    convert.run(convert.prepare(source, Options()), tmp_path / "whole", threads=2, progress=quiet)
    pruned = convert.prepare(tmp_path / "whole", Options(selection=selection))
    convert.run(pruned, tmp_path / "later", threads=2, progress=quiet)
    for path in (tmp_path / "direct").iterdir():
        assert (tmp_path / "later" / path.name).read_bytes() == path.read_bytes(), path.name


def test_mtp_without_scores_stays_whole_and_is_recorded(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    conversion = convert.prepare(source, Options(selection=choice(mtp=False)))
    text = json.loads(conversion.side_files["config.json"])["text_config"]
    assert (text["num_experts"], text["mtp_num_experts"]) == (4, 8)


def test_fewer_experts_than_a_token_uses_is_refused(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    with pytest.raises(ConfigError, match="routes each token to 2"):
        convert.prepare(source, Options(selection=choice(1)))


def test_selection_of_another_model_is_refused(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(experts=4), tiny.config(experts=4))
    with pytest.raises(ModelFileError, match="holds 4 experts, the selection was made for 8"):
        convert.prepare(source, Options(selection=choice()))


def test_converted_source_without_selection_is_refused(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    convert.run(convert.prepare(source, Options()), tmp_path / "dst", threads=1, progress=quiet)
    with pytest.raises(ConfigError, match="converted checkpoint already"):
        convert.prepare(tmp_path / "dst", Options())
    with pytest.raises(ConfigError, match=r"recipe quality: .* is converted already"):
        convert.prepare(tmp_path / "dst", Options(recipe="quality", selection=choice()))


def test_selection_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    choice().save(path)
    assert Selection.load(path) == choice()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format is 'other'"),
        ({"kept": "4"}, "experts and blocks to be objects and kept to be an integer"),
        ({"experts": {"x.mlp.": 8}}, "an integer for each of blocks"),
        ({"experts": {"x.mlp.": 8}, "blocks": {"x.mlp.": [3, 1, 2, 0]}}, "'x.mlp.': expected 4 ascending"),
        ({"experts": {"x.mlp.": 8}, "blocks": {"x.mlp.": [0, 1, 2, 8]}}, "'x.mlp.': expected 4 ascending"),
        ({"experts": {"x.mlp.": 8}, "blocks": {"x.mlp.": [0, 1, 2]}}, "'x.mlp.': expected 4 ascending"),
    ],
)
def test_damaged_selection_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "experts.json"
    choice().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelFileError, match=message):
        Selection.load(path)


def test_pruned_experts_are_quantised_with_their_own_statistics(tmp_path: Path) -> None:
    """Statistics are kept under the former numbers: pruning before or after quantising must give the same bytes."""
    rng = np.random.default_rng(3)
    statistics = {f"{PREFIX}layers.{i}.expert_hidden.square": rng.random((8, 64), np.float32) for i in range(4)}
    write_calibration(tmp_path / "calibration", statistics)
    calibration = Calibration(tmp_path / "calibration")
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    whole = convert.prepare(source, Options(calibration=calibration))
    convert.run(whole, tmp_path / "whole", threads=1, progress=quiet)
    selection = choice()
    convert.run(
        convert.prepare(tmp_path / "whole", Options(selection=selection)), tmp_path / "later", threads=1, progress=quiet
    )
    direct = convert.prepare(source, Options(selection=selection, calibration=calibration))
    convert.run(direct, tmp_path / "direct", threads=1, progress=quiet)
    name = "model.safetensors"
    assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()
