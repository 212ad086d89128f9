"""GGUF of the same model gives the same weights as its published form, and hostile files are refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

import tiny_checkpoint as tiny
import tiny_gguf
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from engine.convert import convert, writer
from engine.convert.convert import Options
from engine.convert.gguf_file import TENSOR_TYPES, read_gguf
from engine.errors import ModelFileError

TYPES = GGMLQuantizationType


def planned_weights(source: Path, vision_file: Path | None = None) -> tiny.Weights:
    plan = convert.prepare(source, Options(vision_file=vision_file)).plan
    return {t.name: writer.read_rows(t, 0, t.rows).reshape(t.shape) for t in plan.tensors}


def assert_same(got: tiny.Weights, expected: tiny.Weights) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith("A_log"):  # log(exp(x)) in float32: the last bit may differ
            np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)


def exact_norms(weights: tiny.Weights) -> tiny.Weights:
    """Norm weights that survive +1 and -1 in float32 (BF16 values of at least 2^-16 do)."""
    return {n: np.where(np.abs(v) < 2**-14, 0, v).astype(np.float32) for n, v in weights.items()}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("split_tensors", [0, 30])
def test_text_and_vision_files_give_the_published_floats(tmp_path: Path, fused: bool, split_tensors: int) -> None:
    weights = exact_norms(tiny.random_weights())
    path, vision_path = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    tiny_gguf.write_text(path, tiny_gguf.text_tensors(weights, fused=fused), split_tensors=split_tensors)
    tiny_gguf.write_vision(vision_path, tiny_gguf.vision_tensors(weights))
    first = path if not split_tensors else next(tmp_path.glob("model-00001-of-*.gguf"))
    assert_same(planned_weights(first, vision_path), weights)


def test_text_alone_and_without_mtp(tmp_path: Path) -> None:
    weights = exact_norms(tiny.random_weights(vision=False, mtp=False))
    path = tmp_path / "model.gguf"
    tiny_gguf.write_text(path, tiny_gguf.text_tensors(weights, fused=True), mtp=False)
    assert_same(planned_weights(path), weights)


@pytest.mark.parametrize("kind", [TYPES.Q8_0, TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_0, TYPES.Q5_1, TYPES.BF16, TYPES.F16])
def test_quantised_tensors_are_dequantised(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    weights = tiny.random_weights(vision=False)
    name = "blk.1.ffn_down_exps.weight"
    path = tmp_path / "model.gguf"
    tiny_gguf.write_text(path, tiny_gguf.text_tensors(weights, fused=True), quantized={name: kind})
    published = f"{tiny.PREFIX}layers.1.mlp.experts.down_proj"
    expected = dequantize(quantize(weights[published], kind), kind)
    np.testing.assert_array_equal(planned_weights(path)[published], expected)


def test_type_table_is_the_package_s() -> None:
    for number, (name, block, block_bytes) in TENSOR_TYPES.items():
        assert TYPES(number).name == name
        assert GGML_QUANT_SIZES[TYPES(number)] == (block, block_bytes)


def test_configuration_and_tokenizer_are_rebuilt(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    path, vision_path = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    tiny_gguf.write_text(path, tiny_gguf.text_tensors(weights, fused=True))
    tiny_gguf.write_vision(vision_path, tiny_gguf.vision_tensors(weights))
    files = convert.prepare(path, Options(vision_file=vision_path)).side_files
    config = json.loads(files["config.json"])
    for key, value in tiny.TEXT_CONFIG.items():
        assert config["text_config"][key] == value, key
    for key, value in tiny.VISION_CONFIG.items():
        assert config["vision_config"][key] == value, key
    assert config["image_token_id"] == 6
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [4, 3]}
    assert json.loads(files["preprocessor_config.json"])["image_mean"] == [0.5, 0.5, 0.5]
    tokenizer = json.loads(files["tokenizer.json"])
    assert tokenizer["model"]["vocab"] == {"a": 0, "b": 1, "ab": 2}
    assert [(t["id"], t["special"]) for t in tokenizer["added_tokens"]] == [(3, True), (4, True), (5, False), (6, True)]
    tokenizers = pytest.importorskip("tokenizers")
    encoder = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    assert encoder.encode("ab<think>b<|im_end|>").ids == [2, 5, 1, 4]


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    tensors = tiny_gguf.text_tensors(tiny.random_weights(vision=False), fused=True)
    tiny_gguf.write_text(tmp_path / "extra.gguf", tensors | {"blk.0.extra.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelFileError, match=r"'blk\.0\.extra\.weight'"):
        convert.prepare(tmp_path / "extra.gguf", Options())
    del tensors["blk.2.ssm_a"]
    tiny_gguf.write_text(tmp_path / "less.gguf", tensors)
    with pytest.raises(ModelFileError, match=r"'blk\.2\.ssm_a'"):
        convert.prepare(tmp_path / "less.gguf", Options())


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor_info(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(tensors: int, keys: int, body: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


HOSTILE = {
    "not-gguf": (b"GGML" + bytes(20), "not a GGUF file"),
    "truncated": (b"GGUF\x03\x00", "truncated"),
    "big-endian": (gguf(0, 0, b"", version=3 << 24), "version"),
    "tensor-count": (gguf(2**60, 0, b""), "tensor count of 1152921504606846976 cannot fit"),
    "key-count": (gguf(0, 2**40, b""), "key count of 1099511627776 cannot fit"),
    "string-length": (gguf(0, 1, struct.pack("<Q", 2**50) + bytes(16)), "truncated"),
    "array-length": (gguf(0, 1, string("k") + struct.pack("<IIQ", 9, 4, 2**61)), "array length"),
    "nested-array": (gguf(0, 1, string("k") + struct.pack("<IIQ", 9, 9, 1)), "arrays of type 9"),
    "value-type": (gguf(0, 1, string("k") + struct.pack("<IQ", 77, 0)), "unknown value type 77"),
    "same-key": (gguf(0, 2, (string("k") + struct.pack("<IB", 0, 1)) * 2 + bytes(40)), "'k' appears twice"),
    "alignment": (
        gguf(0, 1, string("general.alignment") + struct.pack("<II", 4, 0)),
        "general.alignment is 0",
    ),
    "rank": (gguf(1, 0, tensor_info("t", [1] * 5, 0, 0)), "'t': 5 dimensions"),
    "type": (gguf(1, 0, tensor_info("t", [32], 99, 0)), "'t': type number 99"),
    "zero-size": (gguf(1, 0, tensor_info("t", [0], 0, 0) + bytes(64)), "'t': shape"),
    "half-block": (gguf(1, 0, tensor_info("t", [33], 8, 0) + bytes(64)), "'t': shape"),
    "outside": (gguf(1, 0, tensor_info("t", [2**40], 0, 0) + bytes(64)), "'t': ends at byte"),
    "misaligned": (gguf(1, 0, tensor_info("t", [1], 0, 4) + bytes(64)), "'t': offset"),
    "overlap": (
        gguf(2, 0, tensor_info("t", [16], 0, 0) + tensor_info("u", [16], 0, 32) + bytes(192)),
        "'u' overlaps 't'",
    ),
    "same-name": (gguf(2, 0, tensor_info("t", [1], 0, 0) * 2 + bytes(64)), "'t' appears twice"),
    "not-utf8": (gguf(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1) + bytes(9)), "not UTF-8"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        read_gguf(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_part_of_a_split_is_named(tmp_path: Path) -> None:
    tensors = tiny_gguf.text_tensors(tiny.random_weights(vision=False), fused=True)
    tiny_gguf.write_text(tmp_path / "m.gguf", tensors, split_tensors=60)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=parts[1].name):
        read_gguf(parts[0])


def test_positive_decay_is_refused(tmp_path: Path) -> None:
    tensors = tiny_gguf.text_tensors(tiny.random_weights(vision=False), fused=True)
    tensors["blk.0.ssm_a"] = -tensors["blk.0.ssm_a"]
    tiny_gguf.write_text(tmp_path / "m.gguf", tensors)
    with pytest.raises(ModelFileError, match="ssm_a"):
        planned_weights(tmp_path / "m.gguf")
