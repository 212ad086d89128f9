"""JSON files of a model directory, which may be missing, foreign or hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelFileError


def read_json_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most `most_bytes`. ModelFileError: it is missing, longer, or something else."""
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise ModelFileError(f"{path}: {size} bytes, at most {most_bytes} accepted")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
