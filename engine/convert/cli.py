"""The command lines of this package, as plain typer functions. Exit code 2: the input or a setting is at fault."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.convert import convert as conversion
from engine.convert.calibration import Calibration
from engine.convert.convert import Options
from engine.convert.prune import Selection, select
from engine.errors import ConfigError, FermionError

Source = Annotated[Path, typer.Argument(help="Directory of published safetensors, or (first) GGUF file.")]
AnySource = Annotated[
    Path, typer.Argument(help="Directory of published safetensors, converted checkpoint, or (first) GGUF file.")
]
Destination = Annotated[Path, typer.Argument(help="Checkpoint directory to create.")]
Recipe = Annotated[
    str | None,
    typer.Option(
        help="size: 4 bits; balanced, quality: sensitive matrices in F16; float: all F32. (default: size)",
        show_default=False,
    ),
]
CalibrationFile = Annotated[
    Path | None, typer.Option("--calibration", help="Statistics from the calibrate command: better quantisation.")
]
VisionFile = Annotated[Path | None, typer.Option(help="GGUF file of the vision tower (mmproj).")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write no checkpoint.")]
Plots = Annotated[Path | None, typer.Option(help="Directory for charts (PNG).")]
Threads = Annotated[int | None, typer.Option(min=1, help="Worker threads; default: every usable CPU.")]


def convert(
    source: Source,
    destination: Destination,
    recipe: Recipe = None,
    calibration: CalibrationFile = None,
    vision_file: VisionFile = None,
    dry_run: DryRun = False,
    threads: Threads = None,
) -> None:
    """Convert a published checkpoint into a fermion checkpoint. An interrupted run continues when repeated."""
    with _exit_codes():
        statistics = Calibration(calibration) if calibration else None
        options = Options(recipe=recipe, calibration=statistics, vision_file=vision_file)
        _convert(source, destination, options, dry_run, threads)


def prune(
    source: AnySource,
    destination: Destination,
    keep: Annotated[int | None, typer.Option(min=1, help="Experts to keep in every layer.")] = None,
    ratio: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Or: the share of experts to drop.")] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Statistics from the calibrate command: they choose the experts, and round what is packed."),
    ] = None,
    selection: Annotated[Path | None, typer.Option(help="Reuse a saved choice of experts.")] = None,
    save_selection: Annotated[Path | None, typer.Option(help="Save the choice of experts (JSON).")] = None,
    plots: Plots = None,
    recipe: Recipe = None,
    vision_file: VisionFile = None,
    dry_run: DryRun = False,
    threads: Threads = None,
) -> None:
    """Drop the least salient experts (REAP) of a published or of a converted checkpoint."""
    with _exit_codes():
        statistics = Calibration(calibration) if calibration else None
        chosen = _selection(statistics, keep, ratio, selection)
        if save_selection:
            chosen.save(save_selection)
        if plots:
            _plot_selection(chosen, statistics, plots)
        options = Options(recipe=recipe, selection=chosen, calibration=statistics, vision_file=vision_file)
        _convert(source, destination, options, dry_run, threads)


Model = Annotated[Path, typer.Argument(help="Checkpoint directory, converted or published.")]
Corpus = Annotated[Path | None, typer.Option(help="JSONL of texts or chats; default: lessons of the demo model.")]
Samples = Annotated[int, typer.Option(min=1, help="Sequences of the corpus to use.")]
Seed = Annotated[int, typer.Option(help="Of the demo's lessons.")]
Compute = Literal["w4a8", "f32"]


def calibrate(
    model: Model,
    output: Annotated[Path, typer.Argument(help="Calibration file to write.")],
    corpus: Corpus = None,
    samples: Samples = 512,
    second_order: Annotated[
        bool, typer.Option(help="Also record input correlations, for error feedback (large files).")
    ] = True,
    plots: Plots = None,
    seed: Seed = 1,
    threads: Threads = None,
) -> None:
    """Run a corpus through a model and record what quantisation and pruning need."""
    from engine.convert.calibrate import calibrate as run
    from engine.convert.corpus import CorpusReader, take
    from engine.convert.forward import LONGEST, Forward
    from engine.convert.plots import save_saliency

    with _exit_codes():
        reader = CorpusReader(model, LONGEST)
        chosen = take(reader, corpus, samples, held_out=False, seed=seed)
        loaded = Forward(model, threads)
        try:
            run(loaded, chosen, output, second_order=second_order, progress=ProgressLine("calibrating", None))
        finally:
            loaded.close()
        if plots:
            _wrote(save_saliency(Calibration(output).scores("saliency"), plots))
        typer.echo(f"wrote {output} from {sum(len(sample.token_ids) for sample in chosen)} tokens")


def evaluate(
    model: Model,
    against: Annotated[Path, typer.Option(help="The reference: usually what the model was converted from.")],
    corpus: Corpus = None,
    samples: Samples = 256,
    compute: Annotated[
        Compute, typer.Option(help="w4a8: as served; f32: packed weights unpacked to float32.")
    ] = "w4a8",
    against_compute: Annotated[Compute, typer.Option(help="The same for the reference.")] = "w4a8",
    drafts: Annotated[
        bool, typer.Option("--drafts", help="Also: how often drafts of the multi-token prediction layer are right.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    plots: Plots = None,
    seed: Seed = 2,
    threads: Threads = None,
) -> None:
    """Measure what a checkpoint lost: perplexity, KL divergence, top-1 agreement, exact answers by skill."""
    from engine.convert.corpus import CorpusReader, take
    from engine.convert.evaluate import compare, draft_acceptance, table
    from engine.convert.forward import LONGEST, Forward
    from engine.convert.plots import layer_losses, save_losses

    with _exit_codes():
        chosen = take(CorpusReader(against, LONGEST), corpus, samples, held_out=True, seed=seed)
        reference, candidate = Forward(against, threads, against_compute), Forward(model, threads, compute)
        try:
            if reference.config.vocab_size != candidate.config.vocab_size:
                raise ConfigError(f"{model} and {against} have different vocabularies")
            score = compare(chosen, map(reference.logits, chosen), map(candidate.logits, chosen))
            if drafts:
                score.drafts = draft_acceptance(candidate, chosen)
                score.reference_drafts = draft_acceptance(reference, chosen)
            if plots:
                _wrote(save_losses(layer_losses(reference, candidate, chosen), plots))
        finally:
            candidate.close()
            reference.close()
        typer.echo(json.dumps(score.as_dict()) if as_json else table(score))


def _convert(source: Path, destination: Path, options: Options, dry_run: bool, threads: int | None) -> None:
    prepared = conversion.prepare(source, options)
    typer.echo(conversion.describe(prepared))
    if not dry_run:
        conversion.run(prepared, destination, threads=threads, progress=ProgressLine("converting"))
        typer.echo(f"wrote {destination}")


def _plot_selection(selection: Selection, statistics: Calibration | None, directory: Path) -> None:
    from engine.convert.plots import save_kept, save_saliency

    _wrote(save_kept(selection, directory))
    if statistics is not None:
        _wrote(save_saliency(statistics.scores("saliency"), directory))


def _wrote(path: Path) -> None:
    typer.echo(f"wrote {path}", err=True)  # stdout may be JSON


def _selection(statistics: Calibration | None, keep: int | None, ratio: float | None, saved: Path | None) -> Selection:
    if saved is not None:
        if keep is not None or ratio is not None:
            raise ConfigError("--selection already says how many experts stay: leave out --keep and --ratio")
        return Selection.load(saved)
    if statistics is None:
        raise ConfigError("--calibration or --selection is needed to choose experts")
    if (keep is None) == (ratio is None):
        raise ConfigError("exactly one of --keep and --ratio is needed")
    scores = statistics.scores("saliency")
    experts = len(next(iter(scores.values()), ()))
    return select(scores, keep if keep is not None else experts - int(experts * (ratio or 0.0)))


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Faults of input or settings end the command with code 2 and one line, without a traceback."""
    try:
        yield
    except FermionError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


class ProgressLine:
    """Progress on stderr: one line redrawn on a terminal, one line per tenth elsewhere.

    unit: a factor and a name for what is counted ((1e-6, "MB") for bytes), or None to show no amounts.
    """

    def __init__(self, what: str, unit: tuple[float, str] | None = (1e-6, "MB")) -> None:
        self._what = what
        self._unit = unit
        self._started = time.monotonic()
        self._first: int | None = None
        self._shown = -1.0
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total`; the first call sets what was there before this run."""
        if self._first is None:
            self._first = done
        fraction = done / total if total else 1.0
        if fraction < 1.0 and fraction - self._shown < (0.002 if self._terminal else 0.1):
            return
        if self._shown >= 1.0:
            return
        self._shown = fraction
        elapsed = time.monotonic() - self._started
        fresh = done - self._first
        remaining = elapsed * (total - done) / fresh if fresh else 0.0
        amount = ""
        if self._unit is not None:
            factor, name = self._unit
            amount = f"{done * factor:,.0f}/{total * factor:,.0f} {name}  "
        text = f"{self._what} {fraction:6.1%}  {amount}{elapsed:.0f} s, {remaining:.0f} s left"
        end = "\n" if fraction >= 1.0 or not self._terminal else ""
        sys.stderr.write(("\r\x1b[K" if self._terminal else "") + text + end)
        sys.stderr.flush()
