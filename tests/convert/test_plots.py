"""Charts of a conversion hold what they are named for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny
from PIL import Image
from tiny_checkpoint import PREFIX
from typer.testing import CliRunner

from engine import charts
from engine.charts import Labels, Series
from engine.convert import cli, plots
from engine.convert.corpus import Sample
from engine.convert.forward import Forward
from engine.convert.prune import select
from engine.errors import ConfigError


def samples(count: int = 2) -> list[Sample]:
    rng = np.random.default_rng(1)
    return [Sample(rng.integers(0, 128, 40 + i).astype(np.int32), 5, "noise") for i in range(count)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plots") / "src"
    return tiny.write_checkpoint(directory, tiny.random_weights(vision=False), tiny.config(vision=False))


def test_losses_are_those_of_the_layers_that_differ(source: Path, tmp_path: Path) -> None:
    changed = tiny.random_weights(vision=False)
    name = f"{PREFIX}layers.2.mlp.experts.down_proj"
    changed[name] = changed[name] + np.float32(0.02)
    other = tiny.write_checkpoint(tmp_path / "other", changed, tiny.config(vision=False))
    reference, candidate = Forward(source, 1, "f32"), Forward(other, 1, "f32")
    losses = plots.layer_losses(reference, candidate, samples())
    again = plots.layer_losses(reference, reference, samples())
    # The definition, on the layer that differs.
    error = length = 0.0
    for sample in samples():
        before = reference.embed(sample)
        for layer in range(2):
            before = reference.layer(sample, layer, before)[0]
        good, bad = reference.layer(sample, 2, before)[0], candidate.layer(sample, 2, before)[0]
        error, length = error + float(((good - bad) ** 2).sum()), length + float((good**2).sum())
    reference.close()
    candidate.close()
    assert losses.alone[:2] == losses.accumulated[:2] == (0, 0)
    assert losses.alone[2] == pytest.approx(np.sqrt(error / length), rel=1e-4)
    assert losses.accumulated[2] == pytest.approx(losses.alone[2], rel=1e-6)
    assert losses.alone[3] == 0
    assert losses.accumulated[3] > 0
    assert again.alone == again.accumulated == (0, 0, 0, 0)


def test_models_of_other_shapes_are_refused(source: Path, tmp_path: Path) -> None:
    weights = {k: v for k, v in tiny.random_weights(vision=False, mtp=False).items() if "layers.3." not in k}
    config = tiny.config(vision=False, mtp=False)
    text = config["text_config"]
    assert isinstance(text, dict)
    text |= {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
    shorter = tiny.write_checkpoint(tmp_path / "shorter", weights, config)
    reference, candidate = Forward(source, 1), Forward(shorter, 1)
    with pytest.raises(ConfigError, match="the same layers and width"):
        plots.layer_losses(reference, candidate, samples())
    reference.close()
    candidate.close()


def opened(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.size == charts.SIZE
        return np.asarray(image)


def test_kept_experts_are_the_cells(tmp_path: Path) -> None:
    scores = {f"{PREFIX}layers.{i}.mlp.": np.arange(8.0) for i in (10, 2)} | {"mtp.layers.0.mlp.": -np.arange(8.0)}
    path = plots.save_kept(select(scores, 2), tmp_path)
    cells = np.zeros((3, 8), np.bool_)
    cells[0, 6:] = cells[1, 6:] = cells[2, :2] = True
    expected = charts.grid(
        Labels("Kept experts: 2 of each layer", "expert", "layer, the last for multi-token prediction"), cells
    )
    np.testing.assert_array_equal(opened(path), np.asarray(expected))


def test_saliency_is_relative_to_the_layer(tmp_path: Path) -> None:
    scores = {"a.mlp.": np.array([1, 3], np.float32), "b.mlp.": np.array([100, 300], np.float32)}
    path = plots.save_saliency(scores, tmp_path)
    labels = Labels("Saliency of experts", "REAP saliency, relative to the layer's mean", "experts")
    np.testing.assert_array_equal(opened(path), np.asarray(charts.histogram(labels, [0.5, 1.5, 0.5, 1.5])))
    with pytest.raises(ConfigError):
        plots.save_saliency({"a.mlp.": np.zeros(2, np.float32)}, tmp_path)


def test_losses_are_drawn(tmp_path: Path) -> None:
    path = plots.save_losses(plots.LayerLosses((0.1, 0.2), (0.1, 0.3)), tmp_path)
    labels = Labels("What each layer loses", "layer", "error of the stream, relative")
    series = [Series("all layers so far", [(0, 0.1), (1, 0.3)]), Series("this layer alone", [(0, 0.1), (1, 0.2)])]
    np.testing.assert_array_equal(opened(path), np.asarray(charts.lines(labels, series)))


def test_commands_write_them(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """prune and evaluate with --plots, as typed."""
    import typer

    monkeypatch.setattr("engine.convert.corpus.CorpusReader.__init__", lambda self, directory, longest: None)
    monkeypatch.setattr("engine.convert.corpus.take", lambda reader, path, count, **more: samples(count))
    app = typer.Typer()
    for command in (cli.calibrate, cli.prune, cli.evaluate):
        app.command()(command)
    run = CliRunner().invoke
    statistics, charts_at = tmp_path / "statistics", tmp_path / "charts"
    common = ["--plots", str(charts_at)]
    run(app, ["calibrate", str(source), str(statistics), "--samples", "2", *common], catch_exceptions=False)
    assert [path.name for path in charts_at.iterdir()] == ["saliency.png"]
    arguments = ["prune", str(source), str(tmp_path / "out"), "--keep", "4", "--calibration", str(statistics), *common]
    run(app, arguments, catch_exceptions=False)
    assert sorted(path.name for path in charts_at.iterdir()) == ["kept-experts.png", "saliency.png"]
    arguments = ["evaluate", str(tmp_path / "out"), "--against", str(source), "--samples", "2", "--json", *common]
    result = run(app, arguments, catch_exceptions=False)
    assert result.stdout.startswith('{"tokens"')
    assert (charts_at / "loss-per-layer.png").is_file()
