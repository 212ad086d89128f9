"""The whole chain on a small model, as evidence: what each recipe and each way of pruning loses.

    python -m engine.convert.quality SRC

calibrates SRC on lessons of the demo model, converts it by every recipe and by the plain schemes, prunes it by saliency
(REAP), by frequency and at random, and measures each against SRC on held-out lessons. Prints a table and, last, one
JSON line. Meant for models that convert in seconds: every variant is written and measured in full.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from engine.convert import convert
from engine.convert.calibrate import calibrate
from engine.convert.calibration import Calibration
from engine.convert.cli import ProgressLine
from engine.convert.convert import Conversion, Options
from engine.convert.corpus import CorpusReader, Sample, take
from engine.convert.evaluate import Score, compare
from engine.convert.forward import LONGEST, Forward
from engine.convert.plan import Format, OutputTensor
from engine.convert.prune import Selection, select
from engine.convert.sources import PackedSource, RowSource
from engine.convert.writer import DATA_NAME
from engine.core import Float32Array
from engine.formats import GROUP, Q4_ZERO, quantize_absmax

RANDOM_DRAWS = 8
HEADER = """| variant | MB | KL | perplexity | answer loss | top-1 | exact |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured variant; `stored` in bytes."""

    name: str
    stored: int
    score: Score

    @property
    def perplexity(self) -> float:
        """Of the held-out answers."""
        return math.exp(self.score.loss)


class Bench:
    """The reference's answers, kept, and a place to write variants."""

    def __init__(self, source: Path, samples: list[Sample], workplace: Path, threads: int | None) -> None:
        self.source = source
        self._samples = samples
        self._workplace = workplace
        self._threads = threads
        self.rows: list[Row] = []
        reference = Forward(source, threads)
        self._logits = [[row.copy() for row in reference.logits(sample)] for sample in samples]
        reference.close()

    def measure(self, name: str, prepared: Conversion) -> Row:
        """Writes a variant, measures it as it would be served, and keeps it under its name."""
        path = self._workplace / name
        convert.run(prepared, path, threads=self._threads, progress=lambda done, total: None)
        candidate = Forward(path, self._threads)
        score = compare(self._samples, self._logits, map(candidate.logits, self._samples))
        candidate.close()
        row = Row(name, (path / DATA_NAME).stat().st_size, score)
        self.rows.append(row)
        typer.echo(line(row))
        return row

    def path(self, name: str) -> Path:
        """Where a measured variant lies."""
        return self._workplace / name


class AbsmaxSource:
    """Rows moved onto the plain 4-bit grid (Q4_0), where the quantiser then finds them exactly."""

    def __init__(self, source: RowSource) -> None:
        self.name, self.rows, self.cols = source.name, source.rows, source.cols
        self.identity = f"absmax({source.identity})"
        self._source = source

    def read(self, row0: int, row1: int) -> Float32Array:
        """Rows as float32 [row1 - row0, cols]."""
        nibbles, scales = quantize_absmax(self._source.read(row0, row1))
        steps = (nibbles.astype(np.float32) - Q4_ZERO).reshape(*scales.shape, GROUP)
        rows: Float32Array = (steps * scales.astype(np.float32)[..., None]).reshape(nibbles.shape)
        return rows


class GgmlSource:
    """The same by llama.cpp's own Python package (gguf)."""

    def __init__(self, source: RowSource) -> None:
        self.name, self.rows, self.cols = source.name, source.rows, source.cols
        self.identity = f"ggml({source.identity})"
        self._source = source

    def read(self, row0: int, row1: int) -> Float32Array:
        """Rows as float32 [row1 - row0, cols]."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quantize

        kind = GGMLQuantizationType.Q4_0
        rows: Float32Array = dequantize(quantize(self._source.read(row0, row1), kind), kind)
        return rows


def with_sources(prepared: Conversion, wrap: type[AbsmaxSource] | type[GgmlSource]) -> Conversion:
    """The same conversion with another rounding of all 4-bit tensors."""

    def wrapped(tensor: OutputTensor) -> OutputTensor:
        if tensor.format is not Format.Q4:
            return tensor
        segments = tuple(
            segment if isinstance(segment.source, PackedSource) else replace(segment, source=wrap(segment.source))
            for segment in tensor.segments
        )
        return replace(tensor, segments=segments)

    return replace(prepared, plan=replace(prepared.plan, tensors=tuple(map(wrapped, prepared.plan.tensors))))


def random_selection(scores: Mapping[str, npt.NDArray[np.floating]], kept: int, seed: int) -> Selection:
    """Another draw for every block."""
    rng = np.random.default_rng(seed)
    return select({prefix: rng.random(len(score)) for prefix, score in scores.items()}, kept)


def line(row: Row) -> str:
    """One line of the table."""
    score = row.score
    exact = sum(skill.exact for skill in score.skills.values()) / sum(s.samples for s in score.skills.values())
    return (
        f"| {row.name:22} | {row.stored / 1e6:7.2f} | {score.kl:9.6f} | {row.perplexity:8.5f} | {score.loss:8.5f} "
        f"| {score.agreement:7.2%} | {exact:6.1%} |"
    )


def skills_table(rows: Iterable[Row]) -> str:
    """Exact answers of each skill, one column per variant."""
    rows = list(rows)
    names = sorted(rows[0].score.skills)
    lines = ["| skill | samples | original | " + " | ".join(row.name for row in rows) + " |"]
    lines.append("| --- |" + " ---: |" * (len(rows) + 2))
    for name in names:
        skill = rows[0].score.skills[name]
        cells = [f"{row.score.skills[name].exact / skill.samples:.2f}" for row in rows]
        original = f"{skill.reference_exact / skill.samples:.2f}"
        lines.append(f"| {name} | {skill.samples} | {original} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def quantized(bench: Bench, calibration: Calibration) -> tuple[Row, Row]:
    """All ways to quantise; returns the plain scheme and the calibrated default."""
    source = bench.source
    plain = bench.measure("absmax Q4_0", with_sources(convert.prepare(source, Options()), AbsmaxSource))
    bench.measure("Q4_0 of llama.cpp", with_sources(convert.prepare(source, Options()), GgmlSource))
    bench.measure("size, not calibrated", convert.prepare(source, Options()))
    rows = {
        recipe: bench.measure(recipe, convert.prepare(source, Options(recipe=recipe, calibration=calibration)))
        for recipe in ("size", "balanced", "quality")
    }
    return plain, rows["size"]


def pruned(bench: Bench, calibration: Calibration) -> dict[str, float]:
    """All ways to prune the calibrated default; answer losses by name."""
    scores, frequency = calibration.scores("saliency"), calibration.scores("tokens")
    experts = len(next(iter(scores.values())))
    base = bench.path("size")

    def measure(name: str, selection: Selection) -> Row:
        return bench.measure(name, convert.prepare(base, Options(selection=selection)))

    half = experts // 2
    reap = [
        measure("REAP 25 %", select(scores, experts - experts // 4)),
        measure("REAP 50 %", select(scores, half)),
    ]
    by_frequency = measure("frequency 50 %", select(frequency, half))
    draws = [measure(f"random 50 %, {i}", random_selection(scores, half, i)) for i in range(RANDOM_DRAWS)]
    median = statistics.median_low([row.score.loss for row in draws])
    middle = next(row for row in draws if row.score.loss == median)
    size = next(row for row in bench.rows if row.name == "size")
    typer.echo("\n" + skills_table([size, *reap, by_frequency, middle]) + "\n")
    return {
        "reap25_loss": reap[0].score.loss,
        "reap50_loss": reap[1].score.loss,
        "frequency50_loss": by_frequency.score.loss,
        "random50_loss_median": statistics.median(row.score.loss for row in draws),
        "random50_beaten": sum(row.score.loss > reap[1].score.loss for row in draws),
    }


def quality(
    source: Annotated[Path, typer.Argument(help="The original: a small published checkpoint.")],
    calibration_samples: Annotated[int, typer.Option(min=1)] = 1000,
    samples: Annotated[int, typer.Option(min=1)] = 600,
    longest: Annotated[int, typer.Option(min=64, max=LONGEST, help="Leave out lessons of more tokens.")] = 256,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Calibrate, convert, prune and measure; print a table and one JSON line."""
    with tempfile.TemporaryDirectory(prefix="fermion-quality-") as name:
        workplace = Path(name)
        reader = CorpusReader(source, longest)
        training = take(reader, None, calibration_samples, held_out=False, seed=1)
        held_out = take(reader, None, samples, held_out=True, seed=2)
        model = Forward(source, threads)
        progress = ProgressLine("calibrating", None)
        calibrate(model, training, workplace / "calibration", second_order=True, progress=progress)
        model.close()
        calibration = Calibration(workplace / "calibration")
        bench = Bench(source, held_out, workplace, threads)
        typer.echo(
            "| variant | MB | KL | perplexity | answer loss | top-1 | exact |\n|---|---:|---:|---:|---:|---:|---:|"
        )
        plain, size = quantized(bench, calibration)
        losses = pruned(bench, calibration)
        reference = math.exp(size.score.reference_loss)
        figures = {
            "labels": size.score.tokens,
            "calibration_tokens": sum(len(sample.token_ids) for sample in training),
            "kl_absmax": plain.score.kl,
            "kl_size": size.score.kl,
            "kl_ratio_vs_absmax": size.score.kl / plain.score.kl,
            "perplexity": reference,
            "ppl_increase_ratio": (size.perplexity - reference) / (plain.perplexity - reference),
            **losses,
        }
        typer.echo(json.dumps(figures))


if __name__ == "__main__":
    typer.run(quality)
