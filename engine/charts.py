"""Charts as PNG pictures: lines, bars, histograms and grids of cells, drawn with Pillow alone.

Drawn at twice the size and reduced, so that lines and letters are smooth. Colours are told apart by people who do not
see all of them (Okabe and Ito, https://jfly.uni-koeln.de/color/), and every line has a mark of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from engine.errors import ConfigError

SIZE = (960, 540)  # pixels
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#000000")
_SCALE = 2
_INK, _FAINT, _PAPER = "#202020", "#d8d8d8", "#ffffff"
_TITLE, _TEXT = 20, 15  # heights of letters in pixels
_GAP = 8
_TICK_ROOM = 34  # least distance of two numbers on the vertical axis
_LABEL_ROOM = 12  # least distance of two numbers on the horizontal axis, beside their widths

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name in the legend, and points from left to right."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Labels:
    """What stands around a chart: above it, below it, and on its left."""

    title: str
    x: str
    y: str


def lines(labels: Labels, series: Sequence[Series], *, log_x: bool = False, log_y: bool = False) -> Image.Image:
    """Lines through marked points. log_x, log_y: logarithmic axes, for positive values only.

    Raises ConfigError for series without points, values that are not finite, and zeros on a logarithmic axis.
    """
    points = [point for one in series for point in one.points]
    if not points:
        raise ConfigError(f"chart {labels.title!r}: there are no points to draw")
    x_axis = _Axis.of(labels.title, [x for x, _ in points], log=log_x)
    y_axis = _Axis.of(labels.title, [y for _, y in points], log=log_y, zero=not log_y)
    canvas = _Canvas(labels, [one.name for one in series] if len(series) > 1 else [])
    canvas.vertical_axis(y_axis)
    canvas.horizontal_axis(x_axis)
    for index, one in enumerate(series):
        canvas.line([(x_axis.place(x), y_axis.place(y)) for x, y in one.points], index)
    return canvas.finish()


def bars(labels: Labels, names: Sequence[str], groups: Mapping[str, Sequence[float]]) -> Image.Image:
    """One group of bars for each of `names`, one bar in it for each of `groups` (name in the legend -> values)."""
    values = [value for group in groups.values() for value in group]
    if not values or any(len(group) != len(names) for group in groups.values()):
        raise ConfigError(f"chart {labels.title!r}: expected {len(names)} values for each group of bars")
    axis = _Axis.of(labels.title, values, zero=True)
    canvas = _Canvas(labels, list(groups) if len(groups) > 1 else [])
    canvas.vertical_axis(axis)
    slot = 1 / len(names)
    width = 0.8 * slot / len(groups)
    for index, group in enumerate(groups.values()):
        for position, value in enumerate(group):
            left = (position + 0.1) * slot + index * width
            low, high = axis.place(min(value, 0.0)), axis.place(max(value, 0.0))
            canvas.box(left, left + width, low, high, COLOURS[index % len(COLOURS)])
    canvas.words_below([((position + 0.5) * slot, name) for position, name in enumerate(names)])
    return canvas.finish()


def histogram(labels: Labels, values: npt.ArrayLike, bins: int = 40) -> Image.Image:
    """How many of `values` fall into each of `bins` equal ranges."""
    flat = np.asarray(values, np.float64).reshape(-1)
    if not flat.size or not np.isfinite(flat).all():
        raise ConfigError(f"chart {labels.title!r}: expected finite values, at least one")
    counts, edges = np.histogram(flat, bins)
    x_axis = _Axis.of(labels.title, [float(edges[0]), float(edges[-1])])
    y_axis = _Axis.of(labels.title, [float(counts.max())], zero=True)
    canvas = _Canvas(labels, [])
    canvas.vertical_axis(y_axis)
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        canvas.box(x_axis.place(left), x_axis.place(right), 0.0, y_axis.place(float(count)), COLOURS[0])
    canvas.horizontal_axis(x_axis)
    return canvas.finish()


def grid(labels: Labels, cells: npt.NDArray[np.bool_]) -> Image.Image:
    """Cells [rows, columns], filled where true; row 0 at the bottom, as on an axis."""
    rows, columns = cells.shape
    canvas = _Canvas(labels, [])
    x_axis, y_axis = _Axis.counting(columns), _Axis.counting(rows)
    canvas.vertical_axis(y_axis, rules=False)
    for row, column in zip(*np.nonzero(cells), strict=True):
        canvas.box(column / columns, (column + 1) / columns, row / rows, (row + 1) / rows, COLOURS[0])
    canvas.horizontal_axis(x_axis)
    return canvas.finish()


def save(chart: Image.Image, path: Path) -> None:
    """Writes a PNG file. Raises ConfigError if the place cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        chart.save(path, "PNG")
    except OSError as error:
        raise ConfigError(f"chart {path}: cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class _Axis:
    """A range of values, where each lies in 0..1, and the round numbers in it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    to_line: Callable[[float], float] = float
    number: Callable[[float], str] = field(default_factory=lambda: _number)

    @classmethod
    def of(cls, title: str, values: Sequence[float], *, log: bool = False, zero: bool = False) -> _Axis:
        """An axis that holds all values; zero: and 0, with room above for linear ones."""
        if not all(map(math.isfinite, values)) or (log and min(values) <= 0):
            raise ConfigError(f"chart {title!r}: expected finite values{', above 0' if log else ''}")
        low, high = min(values), max(values)
        if log:
            return cls._logarithmic(low, high)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            low, high = low - 0.5, high + 0.5
        step = _round_step((high - low) / 6)
        if zero:
            low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, tuple(step * i for i in range(first, last + 1)))

    @classmethod
    def _logarithmic(cls, low: float, high: float) -> _Axis:
        if low == high:
            low, high = low / 2, high * 2
        # Within a few doublings powers of two say more: contexts and token counts are such.
        base, number = (2.0, _binary_number) if low >= 1 and high / low <= 4096 else (10.0, _number)
        exponents = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
        inside = tuple(base**i for i in exponents if low * (1 - 1e-9) <= base**i <= high * (1 + 1e-9))
        return cls(low, high, inside or (low, high), math.log, number)

    @classmethod
    def counting(cls, count: int) -> _Axis:
        """Numbers 0..count-1 at the middles of cells."""
        step = max(1, int(_round_step(count / 10)))
        return cls(-0.5, count - 0.5, tuple(float(i) for i in range(0, count, step)))

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = self.to_line(self.low), self.to_line(self.high)
        return (self.to_line(value) - low) / (high - low)


class _Canvas:
    """The paper: margins as wide as the words in them, and drawing in coordinates 0..1 from the lower left."""

    def __init__(self, labels: Labels, legend: Sequence[str]) -> None:
        width, height = SIZE[0] * _SCALE, SIZE[1] * _SCALE
        self._image = Image.new("RGB", (width, height), _PAPER)
        self._draw = ImageDraw.Draw(self._image)
        self._font = ImageFont.load_default(_TEXT * _SCALE)
        title_font = ImageFont.load_default(_TITLE * _SCALE)
        gap, line = _GAP * _SCALE, round(1.3 * _TEXT * _SCALE)
        self._line_height, self._gap = line, gap
        names = [(name, self._width(name)) for name in legend]
        side = max((name_width for _, name_width in names), default=0)
        # Numbers on the left have at most seven characters; see _number.
        self._left = 3 * gap + line + self._width("0.00000")
        self._right = width - (3 * gap if not names else 6 * gap + side)
        self._top, self._bottom = 3 * gap + _TITLE * _SCALE, height - 3 * gap - 2 * line
        middle = (self._left + self._right) / 2
        self._draw.text((middle, gap), labels.title, _INK, title_font, anchor="mt")
        self._draw.text((middle, height - gap), labels.x, _INK, self._font, anchor="mb")
        self._sideways(labels.y, gap, (self._top + self._bottom) / 2)
        for index, (name, _) in enumerate(names):
            y = self._top + (index + 0.5) * line
            self._mark((self._right + 2 * gap, y), index)
            self._draw.text((self._right + 4 * gap, y), name, _INK, self._font, anchor="lm")

    def vertical_axis(self, axis: _Axis, *, rules: bool = True) -> None:
        """Numbers on the left, thinned out until they do not touch, and a faint rule across for each."""
        room = max(2, (self._bottom - self._top) // (_TICK_ROOM * _SCALE))
        for tick in axis.ticks[:: -(-len(axis.ticks) // room)]:
            y = self._y(axis.place(tick))
            if rules:
                self._draw.line([(self._left, y), (self._right, y)], _FAINT, _SCALE)
            self._draw.text((self._left - self._gap, y), axis.number(tick), _INK, self._font, anchor="rm")

    def horizontal_axis(self, axis: _Axis) -> None:
        """Numbers below."""
        self.words_below([(axis.place(tick), axis.number(tick)) for tick in axis.ticks])

    def words_below(self, marks: Sequence[tuple[float, str]]) -> None:
        """The two axes, and words at places 0..1 below, thinned out until they do not touch. Lines come after it,
        for their marks to lie on the axes; bars before it."""
        corner = (self._left, self._bottom)
        self._draw.line([(self._left, self._top), corner, (self._right, self._bottom)], _INK, _SCALE)
        widest = max((self._width(text) for _, text in marks), default=0) + _LABEL_ROOM * _SCALE
        step = max(1, -(-len(marks) * widest // (self._right - self._left)))
        for place, text in marks[::step]:
            x = self._x(place)
            self._draw.line([(x, self._bottom), (x, self._bottom + self._gap // 2)], _INK, _SCALE)
            self._draw.text((x, self._bottom + self._gap), text, _INK, self._font, anchor="mt")

    def line(self, points: Sequence[Point], index: int) -> None:
        """A line through points, each marked."""
        on_paper = [(self._x(x), self._y(y)) for x, y in points]
        self._draw.line(on_paper, COLOURS[index % len(COLOURS)], 2 * _SCALE, joint="curve")
        for point in on_paper:
            self._mark(point, index)

    def box(self, left: float, right: float, low: float, high: float, colour: str) -> None:
        """A filled rectangle with a little paper around it where there is room."""
        x0, x1 = self._x(left), self._x(right)
        inset = _SCALE if x1 - x0 > 6 * _SCALE else 0
        self._draw.rectangle([x0 + inset, self._y(high), max(x1 - inset, x0 + inset), self._y(low)], colour)

    def finish(self) -> Image.Image:
        """The picture in its final size."""
        return self._image.resize(SIZE, Image.Resampling.LANCZOS)

    def _x(self, place: float) -> float:
        return self._left + place * (self._right - self._left)

    def _y(self, place: float) -> float:
        return self._bottom - place * (self._bottom - self._top)

    def _width(self, text: str) -> int:
        return math.ceil(self._font.getlength(text))

    def _mark(self, centre: Point, index: int) -> None:
        """A disc, a square or a triangle, so that lines differ in more than colour."""
        x, y = centre
        r, colour = 4 * _SCALE, COLOURS[index % len(COLOURS)]
        if index % 3 == 0:
            self._draw.ellipse([x - r, y - r, x + r, y + r], colour)
        elif index % 3 == 1:
            self._draw.rectangle([x - r, y - r, x + r, y + r], colour)
        else:
            self._draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], colour)

    def _sideways(self, text: str, x: int, y: float) -> None:
        """Words that run upwards, centred at height y."""
        strip = Image.new("RGB", (max(1, self._width(text)), self._line_height), _PAPER)
        ImageDraw.Draw(strip).text((0, 0), text, _INK, self._font)
        turned = strip.rotate(90, expand=True)
        self._image.paste(turned, (x, round(y - turned.height / 2)))


def _round_step(step: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (and their tenths) that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _binary_number(value: float) -> str:
    """A power of two as people say it: 512, 4k, 128k."""
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _number(value: float) -> str:
    """A number on an axis in at most seven characters: 0.25, 300, 12k, 3.1e-05."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    for unit, factor in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if factor <= abs(value) < 1000 * factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.1e}"
