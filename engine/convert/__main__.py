"""`python -m engine.convert SRC DST`: the convert command without the rest of the command line."""

import typer

from engine.convert.cli import convert

typer.run(convert)
