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

from engine.config import ModelConfig
from engine.convert import convert, writer
from engine.convert.convert import Options
from engine.convert.corpus import Sample
from engine.convert.forward import Forward
from engine.convert.gguf_file import TENSOR_TYPES, read_gguf
from engine.errors import ModelFileError
from engine.weights import ModelFile, load_weights, vision_shapes

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


# Where the half-precision scales lie in a block of the types that the package reads but does not write (bytes; the
# layouts are those of ggml-common.h). IQ1_M spreads the 16 bits of its scale over four words of scales.
SCALES = {
    TYPES.Q2_K: (80, 82),
    TYPES.Q3_K: (108,),
    TYPES.Q4_K: (0, 2),
    TYPES.Q5_K: (0, 2),
    TYPES.Q6_K: (208,),
    TYPES.IQ4_NL: (0,),
    TYPES.IQ4_XS: (0,),
    TYPES.IQ2_XXS: (0,),
    TYPES.IQ2_XS: (0,),
    TYPES.IQ2_S: (0,),
    TYPES.IQ3_XXS: (0,),
    TYPES.IQ3_S: (0,),
    TYPES.IQ1_S: (0,),
    TYPES.IQ1_M: (),
}
WRITABLE = (TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_0, TYPES.Q5_1, TYPES.Q8_0, TYPES.BF16, TYPES.F16)
KEPT_FLOAT = ("norm", "ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta")


def blocks_of(kind: GGMLQuantizationType, value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[..., row bytes]: the package's own quantisation, or else random blocks with scales that a file could have."""
    if kind in WRITABLE:
        return quantize(value, kind)
    per_block, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (value.size // per_block, size), np.uint8)
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = rng.uniform(1e-4, 1e-3, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    if kind is TYPES.IQ1_M:
        scale = rng.uniform(1e-4, 1e-3, len(blocks)).astype(np.float16).view(np.uint16)
        for word in range(4):
            high = blocks[:, 49 + 2 * word]
            blocks[:, 49 + 2 * word] = (high & 15) | ((scale >> (4 * word)) & 15).astype(np.uint8) << 4
    return blocks.reshape(*value.shape[:-1], value.shape[-1] // per_block * size)


@pytest.mark.parametrize("kind", [*WRITABLE, *SCALES], ids=lambda kind: kind.name)
def test_whole_model_in_each_type(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Every large matrix in one type, in two files: converted to floats, they are what the package makes of the blocks,
    in the published order of rows and columns."""
    rng, wide = np.random.default_rng(7), tiny.WIDE_CONFIG
    weights = exact_norms(tiny.random_weights(vision=False, text=wide))
    stored = tiny_gguf.text_tensors(weights, fused=False, text=wide)
    blocks = {
        name: (kind, blocks_of(kind, value, rng))
        for name, value in stored.items()
        if not any(part in name for part in KEPT_FLOAT)
    }
    assert len(blocks) > 40
    tiny_gguf.write_text(tmp_path / "m.gguf", stored, blocks=blocks, split_tensors=50, text=wide)
    first = next(tmp_path.glob("m-00001-of-*.gguf"))
    convert.run(
        convert.prepare(first, Options(recipe="float")), tmp_path / "out", threads=1, progress=lambda done, total: None
    )
    got = ModelFile(tmp_path / "out").tensors
    assert got.keys() == weights.keys()
    floats = {name: dequantize(raw, kind).astype(np.float32) for name, (kind, raw) in blocks.items()}
    for name, original in weights.items():
        if name.endswith("gate_up_proj"):
            down = tiny_gguf.text_name(name)
            halves = [floats[down.replace("gate_up", part)] for part in ("gate", "up")]
            expected = np.concatenate(halves, axis=1)
        elif tiny_gguf.text_name(name) in floats:
            expected = tiny_gguf.reordered(name, floats[tiny_gguf.text_name(name)], 64, tiny_gguf.grouped)
        else:
            expected = original
        values = got[name].data.view(np.float32).reshape(got[name].shape)
        if name.endswith("A_log"):
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(values, expected, err_msg=name)
    if kind in WRITABLE:  # and they are near what was quantised
        name = f"{tiny.PREFIX}layers.0.linear_attn.out_proj.weight"
        error = got[name].data.view(np.float32).reshape(256, 256) - weights[name]
        assert np.sqrt(np.mean(error**2)) < 0.006  # 4 bits of weights of 0.05


def test_mixed_types_become_a_checkpoint_that_runs(tmp_path: Path) -> None:
    """As published files are: Q4_K with Q6_K for what is sensitive, to 4 bits, loaded and run."""
    rng, wide = np.random.default_rng(8), tiny.WIDE_CONFIG
    weights = exact_norms(tiny.random_weights(vision=False, text=wide))
    stored = tiny_gguf.text_tensors(weights, fused=True, text=wide)
    blocks = {}
    for name, value in stored.items():
        if not any(part in name for part in KEPT_FLOAT):
            kind = TYPES.Q6_K if "attn_v" in name or "ffn_down" in name or name == "output.weight" else TYPES.Q4_K
            blocks[name] = (kind, blocks_of(kind, value, rng))
    tiny_gguf.write_text(tmp_path / "m.gguf", stored, blocks=blocks, text=wide)
    convert.run(
        convert.prepare(tmp_path / "m.gguf", Options()), tmp_path / "out", threads=1, progress=lambda done, total: None
    )
    model = Forward(tmp_path / "out", 1)
    sample = Sample(np.arange(40, dtype=np.int32), 5, "noise")
    assert all(np.isfinite(logits).all() for logits in model.logits(sample))
    mtp = model.mtp()
    assert mtp is not None
    assert all(np.isfinite(logits).all() for logits in mtp.logits(sample, model.final(sample)))
    mtp.close()
    model.close()


@pytest.mark.parametrize("kind", [TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0], ids=lambda kind: kind.name)
def test_vision_file_becomes_the_tower_that_the_engine_binds(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Text and picture files to one checkpoint; the engine finds every tensor of the tower in it. Only matrices whose
    rows are whole blocks are quantised in such files."""
    weights = exact_norms(tiny.random_weights())
    tiny_gguf.write_text(tmp_path / "m.gguf", tiny_gguf.text_tensors(weights, fused=True))
    stored = tiny_gguf.vision_tensors(weights)
    block = GGML_QUANT_SIZES[kind][0]
    chosen = {name: kind for name, value in stored.items() if value.ndim == 2 and value.shape[1] % block == 0}
    tiny_gguf.write_vision(tmp_path / "mmproj.gguf", stored, quantized=chosen)
    prepared = convert.prepare(tmp_path / "m.gguf", Options(vision_file=tmp_path / "mmproj.gguf"))
    convert.run(prepared, tmp_path / "out", threads=1, progress=lambda done, total: None)
    loaded = load_weights(tmp_path / "out", ModelConfig.load(tmp_path / "out"))
    assert loaded.config.vision is not None
    for name, shape in vision_shapes(loaded.config.vision):
        tolerance = 0.003 if kind is TYPES.Q8_0 else 4e-3 * np.abs(weights[name]).max()
        np.testing.assert_allclose(loaded.file.floats(name, shape), weights[name], atol=tolerance, err_msg=name)
