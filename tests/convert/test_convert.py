"""Whole conversions of tiny checkpoints: every layout gives the same weights, every flaw a named error."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint as tiny
from tiny_checkpoint import PREFIX

from engine.convert import convert, writer
from engine.convert.convert import Options
from engine.convert.plan import Format
from engine.convert.safetensors import INDEX_NAME, read_header
from engine.errors import ConfigError, FermionError, ModelFileError
from engine.formats import dequantize_q4


def quiet(done: int, total: int) -> None:
    """No progress line."""


def planned_weights(source: Path) -> tiny.Weights:
    """What a plan would encode, in float32 and published shapes."""
    plan = convert.prepare(source, Options()).plan
    return {t.name: writer.read_rows(t, 0, t.rows).reshape(t.shape) for t in plan.tensors}


def assert_same(got: tiny.Weights, expected: tiny.Weights) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("form", ["fused", "per-expert"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_layout_gives_the_original_floats(tmp_path: Path, dtype: str, form: str, shards: int) -> None:
    weights = tiny.random_weights()
    stored = weights if form == "fused" else tiny.per_expert(weights)
    source = tiny.write_checkpoint(tmp_path / "src", stored, tiny.config(), dtype=dtype, shards=shards)
    assert_same(planned_weights(source), weights)


def test_text_only_save_gets_nested_names_and_config(tmp_path: Path) -> None:
    weights = tiny.random_weights(vision=False, mtp=False)
    flat = {name.replace(PREFIX, "model."): value for name, value in weights.items()}
    source = tiny.write_checkpoint(tmp_path / "src", flat, {**tiny.TEXT_CONFIG, "tie_word_embeddings": False})
    assert_same(planned_weights(source), weights)
    config = json.loads(convert.prepare(source, Options()).side_files["config.json"])
    assert config["model_type"] == "qwen3_5_moe"
    assert config["text_config"]["hidden_size"] == 64
    assert "vision_config" not in config


def test_small_files_are_found_where_newer_saves_put_them(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    (source / "processor_config.json").write_text('{"image_processor": {"patch_size": 16}}')
    files = convert.prepare(source, Options()).side_files
    assert json.loads(files["preprocessor_config.json"]) == {"patch_size": 16}
    assert files["chat_template.jinja"] == b"{{ messages }}"
    (source / "chat_template.jinja").write_text("its own file")
    (source / "preprocessor_config.json").write_text("{}")
    files = convert.prepare(source, Options()).side_files
    assert (files["chat_template.jinja"], files["preprocessor_config.json"]) == (b"its own file", b"{}")


def test_tied_embedding_is_written_out(tmp_path: Path) -> None:
    weights = tiny.random_weights(vision=False, mtp=False)
    del weights["lm_head.weight"]
    config = {**tiny.config(vision=False, mtp=False), "tie_word_embeddings": True}
    got = planned_weights(tiny.write_checkpoint(tmp_path / "src", weights, config))
    np.testing.assert_array_equal(got["lm_head.weight"], weights[f"{PREFIX}embed_tokens.weight"])


def test_pruned_trunk_with_unpruned_mtp_records_both_counts(tmp_path: Path) -> None:
    trunk = tiny.random_weights(experts=4)
    full = tiny.random_weights(experts=8)
    weights = {name: full[name] if name.startswith("mtp.") else value for name, value in trunk.items()}
    source = tiny.write_checkpoint(tmp_path / "src", tiny.per_expert(weights), tiny.config(experts=4))
    text = json.loads(convert.prepare(source, Options()).side_files["config.json"])["text_config"]
    assert (text["num_experts"], text["mtp_num_experts"]) == (4, 8)


def test_block_fp8_export(tmp_path: Path) -> None:
    """F8_E4M3 codes times the scale of their 128 x 128 block, decoded here from the format's definition."""
    weights = tiny.random_weights(vision=False, mtp=False)
    name = f"{PREFIX}layers.3.self_attn.q_proj.weight"
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 127, (256, 64)).astype(np.uint8) | (rng.integers(0, 2, (256, 64)) << 7).astype(np.uint8)
    scales = np.array([[0.5], [0.001953125]], np.float32)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7))
    expected = np.where(codes & 128, -magnitude, magnitude) * np.repeat(scales, 128, axis=0)
    source = tiny.write_checkpoint(tmp_path / "src", weights, fp8_config())
    chunks, fields, position = [], {}, 0
    for key, value in {**weights, f"{name}_scale_inv": scales}.items():
        chunk = codes.tobytes() if key == name else tiny.encode(value, "F32")
        dtype = "F8_E4M3" if key == name else "F32"
        fields[key] = {"dtype": dtype, "shape": value.shape, "data_offsets": [position, position + len(chunk)]}
        chunks.append(chunk)
        position += len(chunk)
    tiny.write_raw(source / "model.safetensors", fields, b"".join(chunks))
    np.testing.assert_allclose(planned_weights(source)[name], expected, rtol=1e-6)


def fp8_config() -> dict[str, object]:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {**tiny.config(vision=False, mtp=False), "quantization_config": quantization}


def test_written_checkpoint_holds_what_it_says(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    source = tiny.write_checkpoint(tmp_path / "src", weights, tiny.config())
    destination = tmp_path / "dst"
    conversion = convert.prepare(source, Options())
    convert.run(conversion, destination, threads=2, progress=quiet)
    path = destination / "model.safetensors"
    entries, data = read_header(path), path.read_bytes()
    for tensor in conversion.plan.tensors:
        entry = entries[tensor.name]
        assert entry.begin % 64 == 0
        raw = np.frombuffer(data[entry.begin : entry.end], {"U8": "u1", "F16": "<f2", "F32": "<f4"}[entry.dtype])
        stored = raw.reshape(entry.shape)
        expected = weights[tensor.name]
        if tensor.format is Format.Q4:
            assert entry.shape[-1] == 576
            error = np.abs(dequantize_q4(stored) - expected).max()
            assert error < np.abs(expected).max() / 7
        else:
            rounded = expected.astype(np.float16) if tensor.format is Format.F16 else expected
            np.testing.assert_array_equal(stored, rounded)
    config = json.loads((destination / "config.json").read_text())
    assert config["quantization_config"]["layout"] == "q4_16x64"
    assert (destination / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "dst.partial").exists()


def test_official_reader_accepts_the_file(tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("safetensors.numpy")
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    convert.run(convert.prepare(source, Options()), tmp_path / "dst", threads=1, progress=quiet)
    loaded = numpy_reader.load_file(tmp_path / "dst" / "model.safetensors")
    assert loaded["lm_head.weight"].shape == (8, 1, 576)


def edit_config(**changes: object) -> dict[str, object]:
    config = tiny.config()
    text = config["text_config"]
    assert isinstance(text, dict)
    return {**config, "text_config": {**text, **changes}}


BAD_CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "other-model": ({"model_type": "llama"}, "model_type is 'llama'"),
    "no-hidden": (edit_config(hidden_size=None), "text_config.hidden_size is None"),
    "negative": (edit_config(num_experts=-1), "text_config.num_experts is -1"),
    "absurd-depth": (edit_config(num_hidden_layers=10**9), "num_hidden_layers"),
    "layer-kinds": (edit_config(layer_types=["mamba"] * 4), "layer_types is ['mamba'"),
    "swish-gate": (edit_config(output_gate_type="swish"), "output_gate_type is 'swish'"),
    "stale-count": (edit_config(num_experts=6), "hold 8 experts, the configuration says 6"),
    "wrong-width": (edit_config(moe_intermediate_size=32), "expected shape (8, 64, 64), got (8, 128, 64)"),
    "awq": (
        {**tiny.config(), "quantization_config": {"quant_method": "awq"}},
        "{'quant_method': 'awq'} is not supported",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_config_that_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    config, message = BAD_CONFIGS[case]
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), config)
    with pytest.raises(FermionError) as caught:
        convert.prepare(source, Options())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "missing", [f"{PREFIX}layers.2.linear_attn.A_log", "model.visual.merger.linear_fc2.bias", "lm_head.weight"]
)
def test_missing_tensor_is_named(tmp_path: Path, missing: str) -> None:
    weights = tiny.random_weights()
    del weights[missing]
    source = tiny.write_checkpoint(tmp_path / "src", weights, tiny.config())
    with pytest.raises(ModelFileError, match="is missing") as caught:
        convert.prepare(source, Options())
    assert missing in str(caught.value)


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    weights = tiny.random_weights() | {"model.visual.deepstack.0.weight": np.zeros((4, 4), np.float32)}
    with pytest.raises(ModelFileError, match=r"first 'model\.visual\.deepstack\.0\.weight'"):
        convert.prepare(tiny.write_checkpoint(tmp_path / "src", weights, tiny.config()), Options())


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_value_that_does_not_fit_ends_with_nothing_written(tmp_path: Path, value: float) -> None:
    weights = tiny.random_weights()
    name = f"{PREFIX}layers.1.mlp.experts.down_proj"
    weights[name][5, 7, 9] = value
    source = tiny.write_checkpoint(tmp_path / "src", weights, tiny.config(), dtype="F32")
    with pytest.raises(ModelFileError, match="column 9") as caught:
        convert.run(convert.prepare(source, Options()), tmp_path / "dst", threads=2, progress=quiet)
    assert name in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


def test_shard_cut_short_after_planning_is_named(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    conversion = convert.prepare(source, Options())
    os.truncate(source / "model.safetensors", 1 << 20)
    with pytest.raises(ModelFileError, match="file ended"):
        convert.run(conversion, tmp_path / "dst", threads=2, progress=quiet)


def test_existing_destination_is_left_alone(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    with pytest.raises(ConfigError, match="not empty"):
        convert.run(convert.prepare(source, Options()), source, threads=1, progress=quiet)


def test_full_disk_is_found_out_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    monkeypatch.setattr(writer, "SPARE_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match="bytes free"):
        convert.run(convert.prepare(source, Options()), tmp_path / "dst", threads=1, progress=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_destination_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/dst\.partial cannot be made: Not a directory"):
        convert.run(convert.prepare(source, Options()), tmp_path / "file" / "dst", threads=1, progress=quiet)


def test_full_disk_at_the_last_file_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(ConfigError, match=r"No space left on device\); run again to continue"):
            convert.run(convert.prepare(source, Options()), tmp_path / "dst", threads=1, progress=quiet)
    convert.run(convert.prepare(source, Options()), tmp_path / "dst", threads=1, progress=quiet)
    assert (tmp_path / "dst" / "config.json").exists()


def test_small_files_are_checked_before_the_work(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    (source / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(ModelFileError, match=r"generation_config\.json: not JSON"):
        convert.prepare(source, Options())
    (source / "generation_config.json").unlink()
    for name in ("generation_config.json", "preprocessor_config.json"):
        (source / name).unlink(missing_ok=True)
        (note,) = [note for note in convert.prepare(source, Options()).notes if name in note]
        assert "cannot be served until" in note


class StoppedError(Exception):
    """Stands for a kill between two pieces."""


@pytest.mark.parametrize("stop_after", [1, 7, 60, 123])
def test_interrupted_conversion_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    convert.run(convert.prepare(source, Options()), tmp_path / "whole", threads=1, progress=quiet)
    monkeypatch.setattr(writer, "SYNC_BYTES", 4096)
    calls = 0

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls > stop_after:
            raise StoppedError

    with pytest.raises(StoppedError):
        convert.run(convert.prepare(source, Options()), tmp_path / "dst", threads=1, progress=stop)
    first_done: list[int] = []
    convert.run(
        convert.prepare(source, Options()),
        tmp_path / "dst",
        threads=1,
        progress=lambda done, total: first_done.append(done),
    )
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "dst" / path.name).read_bytes() == path.read_bytes()
    assert stop_after < 60 or first_done[0] > 100_000


def test_changed_source_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(seed=1), tiny.config())
    monkeypatch.setattr(writer, "SYNC_BYTES", 1)
    calls: list[int] = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) > 40:
            raise StoppedError

    with pytest.raises(StoppedError):
        convert.run(convert.prepare(source, Options()), tmp_path / "dst", threads=1, progress=stop)
    tiny.write_checkpoint(source, tiny.random_weights(seed=2), tiny.config())
    convert.run(convert.prepare(source, Options()), tmp_path / "dst", threads=1, progress=quiet)
    convert.run(convert.prepare(source, Options()), tmp_path / "fresh", threads=1, progress=quiet)
    name = "model.safetensors"
    assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "engine.convert", *map(str, arguments)]


def test_command_converts_and_killed_command_resumes(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    subprocess.run(command(source, tmp_path / "whole", "--threads", 1), check=True, capture_output=True)
    running = subprocess.Popen(command(source, tmp_path / "dst"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (tmp_path / "dst.partial").exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    if not (tmp_path / "dst").exists():
        subprocess.run(command(source, tmp_path / "dst"), check=True, capture_output=True)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "dst" / path.name).read_bytes() == path.read_bytes()


def test_command_exits_2_and_names_the_fault(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config(), shards=2)
    index: dict[str, Any] = json.loads((source / INDEX_NAME).read_text())
    index["weight_map"]["lm_head.weight"] = "../../etc/passwd.safetensors"
    (source / INDEX_NAME).write_text(json.dumps(index))
    result = subprocess.run(command(source, tmp_path / "dst"), capture_output=True, text=True)
    assert result.returncode == 2
    assert "lm_head.weight" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "dst").exists()
    assert not (tmp_path / "dst.partial").exists()


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", tiny.random_weights(), tiny.config())
    result = subprocess.run(command(source, tmp_path / "dst", "--dry-run"), capture_output=True, text=True, check=True)
    assert "124 tensors" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
