"""Charts show what they are given: measured on the pictures, not on the calls."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageColor

from engine import charts
from engine.charts import Labels, Series
from engine.errors import ConfigError

LABELS = Labels("Title of the chart", "what runs to the right", "what runs upwards")
INK = (0x20, 0x20, 0x20)


def mask(chart: Image.Image, colour: str | tuple[int, int, int], tolerance: int = 8) -> npt.NDArray[np.bool_]:
    """Where a picture has a colour, [height, width]."""
    wanted = ImageColor.getrgb(colour) if isinstance(colour, str) else colour
    distance = np.abs(np.asarray(chart, np.int16) - np.array(wanted[:3], np.int16))
    return (distance.max(axis=2) <= tolerance).astype(np.bool_)


def columns_of(where: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs [first, last] of columns in which anything is set."""
    used = np.flatnonzero(where.any(axis=0))
    cuts = np.flatnonzero(np.diff(used) > 1)
    starts, ends = [0, *(cuts + 1)], [*cuts, len(used) - 1]
    return [(int(used[a]), int(used[b])) for a, b in zip(starts, ends, strict=True)]


def test_bars_are_as_high_as_their_values() -> None:
    chart = charts.bars(LABELS, ["a", "b", "c"], {"speed": [10, 20, 40]})
    blue = mask(chart, charts.COLOURS[0])
    runs = columns_of(blue)
    assert len(runs) == 3
    heights = [int(blue[:, a : b + 1].any(axis=1).sum()) for a, b in runs]
    assert heights[1] == pytest.approx(2 * heights[0], abs=5)  # the axis covers a line or two
    assert heights[2] == pytest.approx(4 * heights[0], abs=9)


def test_bars_of_two_groups_have_two_colours_and_a_legend() -> None:
    chart = charts.bars(LABELS, ["a", "b"], {"one thread": [1, 2], "two threads": [2, 4]})
    assert len(columns_of(mask(chart, charts.COLOURS[0]))) == 3  # two bars and the mark of the legend
    assert len(columns_of(mask(chart, charts.COLOURS[1]))) == 3


def test_negative_bars_hang_from_zero() -> None:
    chart = charts.bars(LABELS, ["gain", "loss"], {"change": [2, -2]})
    blue = mask(chart, charts.COLOURS[0])
    (a, b), (c, d) = columns_of(blue)
    up, down = (np.flatnonzero(blue[:, first : last + 1].any(axis=1)) for first, last in ((a, b), (c, d)))
    assert up[-1] == pytest.approx(down[0], abs=2)
    assert len(up) == pytest.approx(len(down), abs=2)


def marks(chart: Image.Image, index: int) -> list[tuple[float, float]]:
    """Centres of the thick marks on a line: columns where the line is higher than it is thick."""
    where = mask(chart, charts.COLOURS[index])
    thick = where & (where.sum(axis=0) > 5)
    return [
        ((a + b) / 2, float(np.mean(np.flatnonzero(thick[:, a : b + 1].any(axis=1))))) for a, b in columns_of(thick)
    ]


def test_lines_pass_through_their_points() -> None:
    chart = charts.lines(LABELS, [Series("flat and even", [(0, 3), (1, 3), (2, 3), (3, 3)])])
    centres = marks(chart, 0)
    assert len(centres) == 4
    steps = np.diff([x for x, _ in centres])
    np.testing.assert_allclose(steps, steps[0], atol=1.5)
    np.testing.assert_allclose([y for _, y in centres], centres[0][1], atol=1)


def test_logarithmic_axis_spaces_doublings_evenly() -> None:
    chart = charts.lines(LABELS, [Series("s", [(2.0**i, 1) for i in range(7, 12)])], log_x=True)
    steps = np.diff([x for x, _ in marks(chart, 0)])
    assert len(steps) == 4
    np.testing.assert_allclose(steps, steps[0], atol=1.5)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 40, ["0", "10", "20", "30", "40"]), (0, 0.0031, ["0", "0.001", "0.002", "0.003", "0.004"])],
)
def test_round_numbers_on_axes(low: float, high: float, expected: list[str]) -> None:
    axis = charts._Axis.of("t", [low, high], zero=True)
    assert [axis.number(tick) for tick in axis.ticks] == expected
    assert axis.low <= low
    assert axis.high >= high


def test_powers_of_two_are_named_as_contexts_are() -> None:
    axis = charts._Axis.of("t", [512, 32768], log=True)
    assert [axis.number(tick) for tick in axis.ticks] == ["512", "1k", "2k", "4k", "8k", "16k", "32k"]
    wide = charts._Axis.of("t", [1e-5, 1e-2], log=True)
    assert [axis.number(tick) for tick in wide.ticks] == ["1e-05", "0.0001", "0.001", "0.01"]


@pytest.mark.parametrize("value", [0, 1, -1, 0.25, 1234, 12345, 3.14159e-5, 9.99e8, -2.5e-9, 1e12, 7e30])
def test_numbers_fit_the_margin(value: float) -> None:
    assert len(charts._number(value)) <= 8
    assert charts._number(value) != "" if value else charts._number(value) == "0"


def test_numbers_below_do_not_touch() -> None:
    names = [f"a long name {i}" for i in range(60)]
    chart = charts.bars(LABELS, names, {"s": [1.0] * 60})
    words = mask(chart, INK, 120)
    strip = words[-55:-30]  # between the axis and the label under it
    gaps = [b[0] - a[1] for a, b in zip(columns_of(strip), columns_of(strip)[1:], strict=False)]
    assert max(gaps) >= 8
    assert len(columns_of(strip)) > 3


def test_histogram_counts() -> None:
    chart = charts.histogram(LABELS, [0.0] * 30 + [1.0] * 10, bins=2)
    blue = mask(chart, charts.COLOURS[0])
    (a, b), (c, d) = columns_of(blue)
    assert (b - a) == pytest.approx(d - c, abs=2)
    high, low = (int(blue[:, first : last + 1].any(axis=1).sum()) for first, last in ((a, b), (c, d)))
    assert high == pytest.approx(3 * low, abs=3)


def test_grid_fills_the_cells_that_are_set() -> None:
    cells = np.zeros((2, 4), np.bool_)
    cells[0, 1] = cells[1, 3] = True
    blue = mask(charts.grid(LABELS, cells), charts.COLOURS[0])
    (a, b), (c, d) = columns_of(blue)
    first, second = (np.flatnonzero(blue[:, left : right + 1].any(axis=1)) for left, right in ((a, b), (c, d)))
    assert first.min() > second.max() - 2  # row 0 is at the bottom
    assert c - a == pytest.approx(2 * (b - a + 2), abs=12)  # a cell has a little paper around it


def test_words_are_drawn_and_saved(tmp_path: Path) -> None:
    """Title, labels and numbers are there, in letters at least 11 pixels high."""
    with_words = charts.histogram(LABELS, [1, 2, 3])
    without = charts.histogram(Labels("", "", ""), [1, 2, 3])
    difference = np.asarray(with_words, np.int16) - np.asarray(without, np.int16)
    changed = np.abs(difference).max(axis=2) > 60
    assert changed[:40].any(axis=1).sum() >= 14  # title
    assert changed[-30:].any(axis=1).sum() >= 11  # below
    assert changed[:, :40].any(axis=0).sum() >= 11  # on the left, turned
    charts.save(with_words, tmp_path / "new" / "chart.png")
    with Image.open(tmp_path / "new" / "chart.png") as loaded:
        assert loaded.format == "PNG"
        assert loaded.size == charts.SIZE
        np.testing.assert_array_equal(np.asarray(loaded), np.asarray(with_words))


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    for values in ([], [math.nan], [math.inf]):
        with pytest.raises(ConfigError, match="Title of the chart"):
            charts.histogram(LABELS, values)
        with pytest.raises(ConfigError, match="Title of the chart"):
            charts.lines(LABELS, [Series("s", [(0, value) for value in values])])
    with pytest.raises(ConfigError, match="above 0"):
        charts.lines(LABELS, [Series("s", [(0, 1)])], log_x=True)
    with pytest.raises(ConfigError, match="expected 2 values"):
        charts.bars(LABELS, ["a", "b"], {"s": [1]})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        charts.save(charts.histogram(LABELS, [1]), tmp_path / "file" / "chart.png")
