"""Sources that are damaged or lie, given to the command: exit code 2, one line that names file and tensor, no
traceback, and nothing left behind. One case for each kind; the readers' own tests hold the finer ones."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint as tiny
import typer
from tiny_checkpoint import PREFIX
from typer.testing import CliRunner

from engine.convert import cli
from engine.convert.safetensors import INDEX_NAME

EXPERTS = f"{PREFIX}layers.1.mlp.experts.down_proj"
SECOND = "model-00002-of-00002.safetensors"


def published(directory: Path, weights: tiny.Weights | None = None, dtype: str = "BF16") -> Path:
    weights = tiny.random_weights(vision=False) if weights is None else weights
    return tiny.write_checkpoint(directory, weights, tiny.config(vision=False), dtype=dtype, shards=2)


def shard_of(source: Path, tensor: str) -> str:
    name = json.loads((source / INDEX_NAME).read_text())["weight_map"][tensor]
    assert isinstance(name, str)
    return name


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    fields = json.loads(content[8 : 8 + length])
    change(fields)
    tiny.write_raw(path, fields, content[8 + length :])


def truncated_shard(source: Path) -> list[str]:
    published(source)
    os.truncate(source / SECOND, (source / SECOND).stat().st_size - 1000)
    return [SECOND, "truncated in or before tensor"]


def missing_shard(source: Path) -> list[str]:
    published(source)
    (source / SECOND).unlink()
    return [SECOND]


def wrong_shape(source: Path) -> list[str]:
    weights = tiny.random_weights(vision=False)
    weights[EXPERTS] = weights[EXPERTS].transpose(0, 2, 1)[:, :32].copy()
    published(source, weights)
    return [shard_of(source, EXPERTS), EXPERTS, "expected shape"]


def missing_tensor(source: Path) -> list[str]:
    weights = tiny.random_weights(vision=False)
    del weights[EXPERTS]
    published(source, weights)
    return [str(source), EXPERTS, "missing"]


def unknown_tensor(source: Path) -> list[str]:
    published(source, tiny.random_weights(vision=False) | {"model.surprise": np.zeros(4, np.float32)})
    return [str(source), "model.surprise"]


def not_a_number(source: Path, value: float = np.nan) -> list[str]:
    weights = tiny.random_weights(vision=False)
    weights[EXPERTS][3, 5, 7] = value
    published(source, weights, dtype="F32")
    return [shard_of(source, EXPERTS), EXPERTS, "column 7"]


def infinity(source: Path) -> list[str]:
    return not_a_number(source, -np.inf)


def overlapping_offsets(source: Path) -> list[str]:
    published(source)
    names: list[str] = []

    def overlap(fields: dict[str, Any]) -> None:
        first, second = list(fields)[:2]
        size = fields[second]["data_offsets"][1] - fields[second]["data_offsets"][0]
        start = fields[first]["data_offsets"][0]
        fields[second]["data_offsets"] = [start, start + size]
        names.append(first)

    edit_header(source / SECOND, overlap)
    return [SECOND, names[0]]


def huge_header(source: Path) -> list[str]:
    published(source)
    with (source / SECOND).open("r+b") as file:
        file.write((2**40).to_bytes(8, "little"))
    return [SECOND, "header of 1099511627776 bytes"]


def path_traversal(source: Path) -> list[str]:
    published(source)
    index = json.loads((source / INDEX_NAME).read_text())
    index["weight_map"][EXPERTS] = "../../../etc/passwd.safetensors"
    (source / INDEX_NAME).write_text(json.dumps(index))
    return [INDEX_NAME, EXPERTS, "not the name of a file beside"]


def absurd_configuration(source: Path) -> list[str]:
    published(source)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["num_experts"] = 10**6
    (source / "config.json").write_text(json.dumps(config))
    return [str(source), "hold 8 experts"]


CASES = [
    truncated_shard, missing_shard, wrong_shape, missing_tensor, unknown_tensor, not_a_number, infinity,
    overlapping_offsets, huge_header, path_traversal, absurd_configuration,
]  # fmt: skip


def refused(tmp_path: Path, source: Path, expected: list[str]) -> None:
    """Runs the command and checks everything it must and must not do."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(cli.convert)
    before = sorted(path.name for path in tmp_path.iterdir())
    result = CliRunner().invoke(app, [str(source), str(tmp_path / "dst"), "--threads", "1"])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)  # not some error that happens to end the process
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for part in expected:
        assert part in errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_safetensors(tmp_path: Path, case: Callable[[Path], list[str]]) -> None:
    refused(tmp_path, tmp_path / "src", case(tmp_path / "src"))


def gguf_bytes(tmp_path: Path) -> bytes:
    tiny_gguf = pytest.importorskip("tiny_gguf")
    tensors = tiny_gguf.text_tensors(tiny.random_weights(vision=False), fused=True)
    tiny_gguf.write_text(tmp_path / "whole.gguf", tensors)
    content: bytes = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "whole.gguf").unlink()
    return content


def count_of(which: int, count: int) -> Callable[[bytes], bytes]:
    """Tensor count (0) or key count (1) replaced."""
    at = 8 + 8 * which
    return lambda content: content[:at] + struct.pack("<Q", count) + content[at + 8 :]


def not_finite(content: bytes) -> bytes:
    """A NaN in the last tensor's last weight."""
    end = len(content.rstrip(b"\0"))
    at = (end - 4) // 4 * 4
    return content[:at] + struct.pack("<f", np.nan) + content[at + 4 :]


GGUF_CASES: dict[str, tuple[Callable[[bytes], bytes], list[str]]] = {
    "tensor-count": (count_of(0, 2**60), ["tensor count of 1152921504606846976"]),
    "fewer-tensors": (count_of(0, 100), ["tensor"]),
    "key-count": (count_of(1, 2**40), ["key count of 1099511627776"]),
    "fewer-keys": (count_of(1, 3), []),
    "truncated": (lambda content: content[:-5000], ["ends at byte"]),
    "empty": (lambda content: b"", ["truncated"]),
    "other-file": (lambda content: b"PK\x03\x04" + content[4:], ["not a GGUF file"]),
    "not-a-number": (not_finite, ["not a finite number", "tensor"]),
    "renamed-tensor": (lambda content: content.replace(b"blk.2.ssm_a", b"blk.2.ssm_x"), ["blk.2.ssm_a"]),
    "wrong-sizes": (lambda content: content.replace(b"embedding_length", b"embedding_lengtj"), ["embedding_length"]),
}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf(tmp_path: Path, case: str) -> None:
    change, expected = GGUF_CASES[case]
    source = tmp_path / "bad.gguf"
    content = gguf_bytes(tmp_path)
    damaged = change(content)
    assert damaged != content
    source.write_bytes(damaged)
    refused(tmp_path, source, ["bad.gguf", *expected])
