"""The whole chain on a small model, as evidence: what each recipe and each way of pruning loses.

    python -m engine.convert.quality SRC --text HELD_OUT.jsonl --calibration-text OTHER.jsonl

calibrates SRC on lessons of the demo model and on text, converts it by every recipe and by the plain schemes, prunes it
by saliency (REAP), by frequency and at random, and measures each against SRC on what it has not seen. Prints tables
and, last, one JSON line. Meant for models that convert in seconds: every variant is written and measured in full.
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
from engine.convert.evaluate import Score, compare, draft_acceptance
from engine.convert.forward import LONGEST, Forward
from engine.convert.plan import Format, OutputTensor
from engine.convert.prune import Selection, select
from engine.convert.sources import PackedSource, RowSource
from engine.convert.writer import DATA_NAME
from engine.core import Float32Array
from engine.formats import GROUP, Q4_ZERO, quantize_absmax

RANDOM_DRAWS = 8
HEADER = """| variant | MB | text KL | text perplexity | answer KL | answer loss | of known | top-1 | exact |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured variant. stored: bytes; lessons: score on answers; text: on running text, drafts: accepted share of
    those of the multi-token prediction layer, if that was measured."""

    name: str
    stored: int
    lessons: Score
    text: Score | None
    drafts: float | None

    @property
    def exact(self) -> float:
        """Share of lessons answered exactly."""
        skills = self.lessons.skills.values()
        return sum(skill.exact for skill in skills) / sum(skill.samples for skill in skills)


class Reference:
    """Samples with the original's logits on them, kept."""

    def __init__(self, model: Forward, samples: list[Sample]) -> None:
        self.samples = samples
        self._logits = [[row.copy() for row in model.logits(sample)] for sample in samples]

    def score(self, candidate: Forward) -> Score:
        """A variant against the original."""
        return compare(self.samples, self._logits, map(candidate.logits, self.samples))


class Bench:
    """The original's answers, and a place to write variants."""

    def __init__(
        self, source: Path, lessons: list[Sample], text: list[Sample], workspace: Path, threads: int | None
    ) -> None:
        self.source = source
        self._workspace = workspace
        self._threads = threads
        original = Forward(source, threads)
        self._lessons, self._text = Reference(original, lessons), Reference(original, text)
        original.close()

    def measure(self, name: str, prepared: Conversion, *, text: bool, drafts: bool) -> Row:
        """Writes a variant and measures it as it would be served; text: on running text too; drafts: its drafts too."""
        path = self._workspace / name
        convert.run(prepared, path, threads=self._threads, progress=lambda done, total: None)
        candidate = Forward(path, self._threads)
        running = self._text.score(candidate) if text else None
        accepted = draft_acceptance(candidate, self._lessons.samples) if drafts else None
        row = Row(name, (path / DATA_NAME).stat().st_size, self._lessons.score(candidate), running, accepted)
        candidate.close()
        typer.echo(line(row))
        return row

    def path(self, name: str) -> Path:
        """Where a measured variant lies."""
        return self._workspace / name


class AbsmaxSource:
    """Rows moved onto the plain 4-bit grid (Q4_0), where the quantiser then finds them exactly."""

    def __init__(self, source: RowSource) -> None:
        self.path, self.name, self.rows, self.cols = source.path, source.name, source.rows, source.cols
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
        self.path, self.name, self.rows, self.cols = source.path, source.name, source.rows, source.cols
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
    lessons = row.lessons
    text = f"{row.text.kl:9.6f} | {math.exp(row.text.loss):8.4f}" if row.text else f"{'':9} | {'':8}"
    return (
        f"| {row.name:20} | {row.stored / 1e6:6.2f} | {text} | {lessons.kl:9.6f} | {lessons.loss:8.5f} "
        f"| {lessons.known_loss:8.5f} | {lessons.agreement:7.2%} | {row.exact:6.1%} |"
    )


def skills_table(rows: Iterable[Row]) -> str:
    """Exact answers of each skill, one column per variant."""
    rows = list(rows)
    names = sorted(rows[0].lessons.skills)
    lines = ["| skill | samples | original | " + " | ".join(row.name for row in rows) + " |"]
    lines.append("| --- |" + " ---: |" * (len(rows) + 2))
    for name in names:
        skill = rows[0].lessons.skills[name]
        cells = [f"{row.lessons.skills[name].exact / skill.samples:.2f}" for row in rows]
        original = f"{skill.reference_exact / skill.samples:.2f}"
        lines.append(f"| {name} | {skill.samples} | {original} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def quantized(bench: Bench, calibration: Calibration) -> dict[str, Row]:
    """All ways to quantise, by name."""

    def measure(name: str, prepared: Conversion) -> Row:
        return bench.measure(name, prepared, text=True, drafts=name == "size")

    source, plain = bench.source, convert.prepare(bench.source, Options())
    rows = {
        "absmax": measure("absmax Q4_0", with_sources(plain, AbsmaxSource)),
        "ggml": measure("Q4_0 of llama.cpp", with_sources(plain, GgmlSource)),
        "uncalibrated": measure("size, uncalibrated", plain),
    }
    for recipe in ("size", "balanced", "quality"):
        rows[recipe] = measure(recipe, convert.prepare(source, Options(recipe=recipe, calibration=calibration)))
    return rows


def pruned(bench: Bench, calibration: Calibration, size: Row) -> dict[str, float | None]:
    """All ways to prune the calibrated default, which is `size`; answer losses and accepted drafts by name."""
    scores, frequency = calibration.scores("saliency"), calibration.scores("tokens")
    experts = len(next(iter(scores.values())))
    base, half = bench.path(size.name), experts // 2

    def measure(name: str, selection: Selection) -> Row:
        prepared = convert.prepare(base, Options(selection=selection))
        return bench.measure(name, prepared, text=False, drafts=name.startswith("REAP"))

    quarter = measure("REAP 25 %", select(scores, experts - experts // 4))
    reap = measure("REAP 50 %", select(scores, half))
    by_frequency = measure("frequency 50 %", select(frequency, half))
    draws = [measure(f"random 50 %, {i}", random_selection(scores, half, i)) for i in range(RANDOM_DRAWS)]
    middle = sorted(draws, key=lambda row: row.lessons.loss)[RANDOM_DRAWS // 2]
    typer.echo("\n" + skills_table([size, quarter, reap, by_frequency, middle]) + "\n")
    return {
        "size_loss": size.lessons.loss,
        "reap25_loss": quarter.lessons.loss,
        "reap50_loss": reap.lessons.loss,
        "frequency50_loss": by_frequency.lessons.loss,
        "random50_loss_median": statistics.median(row.lessons.loss for row in draws),
        "random50_worse_than_reap50": sum(row.lessons.loss > reap.lessons.loss for row in draws),
        "reap50_known_loss": reap.lessons.known_loss,
        "frequency50_known_loss": by_frequency.lessons.known_loss,
        "random50_known_loss_median": statistics.median(row.lessons.known_loss for row in draws),
        "size_drafts": size.drafts,
        "reap25_drafts": quarter.drafts,
        "reap50_drafts": reap.drafts,
    }


def figures(rows: Mapping[str, Row]) -> dict[str, float]:
    """How the calibrated default compares with plain absmax on running text."""
    size, plain = rows["size"].text, rows["absmax"].text
    assert size is not None
    assert plain is not None
    original = math.exp(size.reference_loss)
    increase, plain_increase = math.exp(size.loss) - original, math.exp(plain.loss) - original
    return {
        "text_tokens": size.tokens,
        "kl_absmax": plain.kl,
        "kl_size": size.kl,
        "kl_ratio_vs_absmax": size.kl / plain.kl,
        "answer_kl_ratio_vs_absmax": rows["size"].lessons.kl / rows["absmax"].lessons.kl,
        "ppl_original": original,
        "ppl_increase_absmax": plain_increase,
        "ppl_increase_size": increase,
        "ppl_increase_ratio": increase / plain_increase if plain_increase > 0 else math.nan,
    }


def _calibrated(model: Forward, samples: list[Sample], path: Path, *, second_order: bool) -> Calibration:
    calibrate(model, samples, path, second_order=second_order, progress=ProgressLine("calibrating", None))
    return Calibration(path)


def quality(
    source: Annotated[Path, typer.Argument(help="The original: a small published checkpoint.")],
    text: Annotated[Path, typer.Option(help="Held-out running text (JSONL).")],
    calibration_text: Annotated[Path, typer.Option(help="Running text to calibrate on beside lessons (JSONL).")],
    calibration_samples: Annotated[int, typer.Option(min=1, help="Lessons to calibrate on.")] = 240,
    samples: Annotated[int, typer.Option(min=1, help="Held-out lessons.")] = 150,
    longest: Annotated[int, typer.Option(min=64, max=LONGEST, help="Leave out lessons of more tokens.")] = 768,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Calibrate, convert, prune and measure; print tables and one JSON line."""
    with tempfile.TemporaryDirectory(prefix="fermion-quality-") as name:
        workspace = Path(name)
        reader = CorpusReader(source, longest)
        training = take(reader, None, calibration_samples, held_out=False, seed=1)
        mixed = training[: calibration_samples // 2] + list(reader.file(calibration_text))
        model = Forward(source, threads)
        # Rounding must hold for all text, pruning for what the model is to be kept for: here, the lessons.
        calibration = _calibrated(model, mixed, workspace / "mixed", second_order=True)
        saliency = _calibrated(model, training, workspace / "lessons", second_order=False)
        model.close()
        lessons = take(reader, None, samples, held_out=True, seed=2)
        bench = Bench(source, lessons, list(reader.file(text)), workspace, threads)
        typer.echo(HEADER)
        rows = quantized(bench, calibration)
        losses = pruned(bench, saliency, rows["size"])
        typer.echo(json.dumps(figures(rows) | losses))


if __name__ == "__main__":
    typer.run(quality)
