"""The command lines of this package, as plain typer functions. Exit code 2: the input or a setting is at fault."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from engine.convert import convert as conversion
from engine.errors import FermionError


def convert(
    source: Annotated[Path, typer.Argument(help="Directory of published safetensors, or (first) GGUF file.")],
    destination: Annotated[Path, typer.Argument(help="Checkpoint directory to create.")],
    vision_file: Annotated[Path | None, typer.Option(help="GGUF file of the vision tower (mmproj).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Worker threads; default: every usable CPU.")] = None,
) -> None:
    """Convert a published checkpoint into a fermion checkpoint (4-bit). An interrupted run continues when repeated."""
    try:
        prepared = conversion.prepare(source, vision_file)
        typer.echo(conversion.describe(prepared))
        if not dry_run:
            conversion.run(prepared, destination, threads=threads, progress=ProgressLine("converting"))
            typer.echo(f"wrote {destination}")
    except FermionError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


class ProgressLine:
    """Progress on stderr: one line redrawn on a terminal, one line per tenth elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._first: int | None = None
        self._shown = -1.0
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` bytes; the first call sets what was there before this run."""
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
        amount = f"{done / 1e6:,.0f}/{total / 1e6:,.0f} MB"
        text = f"{self._what} {fraction:6.1%}  {amount}  {elapsed:.0f} s, {remaining:.0f} s left"
        end = "\n" if fraction >= 1.0 or not self._terminal else ""
        sys.stderr.write(("\r\x1b[K" if self._terminal else "") + text + end)
        sys.stderr.flush()
