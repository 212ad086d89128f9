"""The baselines of the quality table are what they are called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny

from engine.convert import convert
from engine.convert.convert import Options
from engine.convert.plan import Format, pieces
from engine.convert.quality import AbsmaxSource, GgmlSource, random_selection, with_sources
from engine.convert.writer import encode_piece
from engine.formats import dequantize_q4, pack_q4, quantize_absmax


@pytest.mark.parametrize("wrap", [AbsmaxSource, GgmlSource])
def test_baseline_survives_our_quantiser_exactly(tmp_path: Path, wrap: type[AbsmaxSource] | type[GgmlSource]) -> None:
    weights = tiny.random_weights()
    source = tiny.write_checkpoint(tmp_path / "src", weights, tiny.config())
    plan = with_sources(convert.prepare(source, Options()), wrap).plan
    for tensor in plan.tensors:
        if tensor.format is not Format.Q4 or "experts" in tensor.name:
            continue
        blocks = encode_piece(next(pieces(tensor)), None).reshape(tensor.info.shape)
        if wrap is GgmlSource:
            quants = pytest.importorskip("gguf.quants")
            kind = pytest.importorskip("gguf").GGMLQuantizationType.Q4_0
            expected = quants.dequantize(quants.quantize(weights[tensor.name], kind), kind)
        else:
            expected = dequantize_q4(pack_q4(*quantize_absmax(weights[tensor.name])))
        np.testing.assert_array_equal(dequantize_q4(blocks), expected, err_msg=tensor.name)


def test_random_selections_differ_by_seed_and_block() -> None:
    scores = {"a.mlp.": np.zeros(32, np.float32), "b.mlp.": np.zeros(32, np.float32)}
    first, second = random_selection(scores, 16, 0), random_selection(scores, 16, 1)
    assert first == random_selection(scores, 16, 0)
    assert first.blocks != second.blocks
    assert first.blocks["a.mlp."] != first.blocks["b.mlp."]
