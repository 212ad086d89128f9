"""One conversion, from a source path to a checkpoint directory: read, plan, say what will happen, write."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from engine.convert import gguf_config, quantize
from engine.convert.gguf_config import GgufKeys
from engine.convert.gguf_file import read_gguf
from engine.convert.gguf_layout import GgufCheckpoint
from engine.convert.hf_layout import HfCheckpoint
from engine.convert.plan import Plan, build_plan
from engine.convert.safetensors import read_checkpoint
from engine.convert.source_config import QUANTIZATION, Json, dump_json, geometry, load_config, load_json
from engine.convert.writer import ProgressReport, plan_bytes, write_checkpoint
from engine.errors import ConfigError, ModelFileError

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
)
MAX_SIDE_FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion ready to run: the plan, the small files that go with it, and remarks for the user."""

    plan: Plan
    side_files: dict[str, bytes]
    notes: tuple[str, ...]


def prepare(source: Path, vision_file: Path | None = None) -> Conversion:
    """Reads headers and configuration only. source: a directory of safetensors, or a GGUF file (of several: the
    first); vision_file: the GGUF file of the vision tower. Raises ModelFileError for anything not understood."""
    notes: list[str] = []
    if source.suffix == ".gguf":
        config, plan, side_files = _read_gguf_model(source, vision_file, notes)
    elif vision_file is not None:
        raise ConfigError(f"--vision-file {vision_file} goes with a GGUF model; {source} holds its own vision tower")
    else:
        config, plan, side_files = _read_directory(source)
    side_files["config.json"] = dump_json(_converted_config(config, plan, notes))
    wanted = ("tokenizer.json", "chat_template.jinja", "generation_config.json")
    notes += [f"the source has no {name}, so the checkpoint has none" for name in wanted if name not in side_files]
    return Conversion(plan, side_files, tuple(notes))


def _read_directory(source: Path) -> tuple[Json, Plan, dict[str, bytes]]:
    if not source.is_dir():
        raise ModelFileError(f"{source}: expected a directory with config.json and safetensors files, or a .gguf file")
    path = source / "config.json"
    config = load_config(path)
    _check_source_quantization(path, config)
    plan = build_plan(HfCheckpoint(source, read_checkpoint(source)), geometry(path, config))
    return config, plan, _side_files(source)


def _read_gguf_model(source: Path, vision_file: Path | None, notes: list[str]) -> tuple[Json, Plan, dict[str, bytes]]:
    metadata, entries = read_gguf(source)
    keys, vision = GgufKeys(source, metadata), None
    if vision_file is not None:
        vision_metadata, vision_entries = read_gguf(vision_file)
        vision = GgufKeys(vision_file, vision_metadata)
        twice = sorted(entries.keys() & vision_entries.keys())
        if twice:
            raise ModelFileError(f"{vision_file}: tensor {twice[0]!r} is also in {source}")
        entries |= vision_entries
    else:
        notes.append("no --vision-file given: the checkpoint will not read pictures")
    config = gguf_config.model_config(keys, entries, vision)
    shapes = geometry(source, config)
    plan = build_plan(GgufCheckpoint(entries, shapes), shapes)
    return config, plan, gguf_config.side_files(keys, vision)


def run(conversion: Conversion, destination: Path, *, threads: int | None, progress: ProgressReport) -> None:
    """Writes the checkpoint; errors as in `writer.write_checkpoint`. threads None: one per usable CPU."""
    write_checkpoint(
        destination,
        conversion.plan,
        conversion.side_files,
        settings=quantize.ALGORITHM,
        threads=threads or len(os.sched_getaffinity(0)),
        progress=progress,
    )


def describe(conversion: Conversion) -> str:
    """The plan as text: bytes and weights of each stored form, and every remark."""
    weights: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for tensor in conversion.plan.tensors:
        weights[tensor.format.value] += prod(tensor.shape)
        stored[tensor.format.value] += tensor.info.nbytes
    lines = [f"{len(conversion.plan.tensors)} tensors, {plan_bytes(conversion.plan):,} bytes"]
    lines += [f"  {name:4} {weights[name]:>16,} weights {stored[name]:>16,} bytes" for name in sorted(stored)]
    return "\n".join([*lines, *(f"note: {note}" for note in conversion.notes)])


def _check_source_quantization(path: Path, config: Json) -> None:
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise ModelFileError(f"{path}: quantization_config.quant_method {method!r} is not supported, only 'fp8' is")
    if quantization.get("weight_block_size") != [128, 128]:
        raise ModelFileError(
            f"{path}: quantization_config.weight_block_size is {quantization.get('weight_block_size')!r}, "
            "expected [128, 128]"
        )


def _converted_config(config: Json, plan: Plan, notes: list[str]) -> Json:
    converted = {**config, "quantization_config": dict(QUANTIZATION), "tie_word_embeddings": False}
    text = {**config["text_config"], "tie_word_embeddings": False}
    if plan.mtp_experts is None:
        if text.get("mtp_num_hidden_layers"):
            notes.append("the source has no mtp.* tensors although its config names a layer: recorded as 0 layers")
        text["mtp_num_hidden_layers"] = 0
    else:
        text["mtp_num_hidden_layers"] = 1
        if plan.mtp_experts != text["num_experts"]:
            notes.append(f"the MTP layer has {plan.mtp_experts} experts, the trunk {text['num_experts']}")
            text["mtp_num_experts"] = plan.mtp_experts
    converted["text_config"] = text
    return converted


def _side_files(source: Path) -> dict[str, bytes]:
    """Tokenizer, template and defaults, byte for byte; two of them may hide inside older or newer files."""
    files: dict[str, bytes] = {}
    for name in COPIED_FILES:
        path = source / name
        if path.is_file():
            if path.stat().st_size > MAX_SIDE_FILE_BYTES:
                raise ModelFileError(f"{path}: {path.stat().st_size} bytes, at most {MAX_SIDE_FILE_BYTES} accepted")
            files[name] = path.read_bytes()
    if "chat_template.jinja" not in files and "tokenizer_config.json" in files:
        template = load_json(source / "tokenizer_config.json").get("chat_template")
        if isinstance(template, str):
            files["chat_template.jinja"] = template.encode()
    if "preprocessor_config.json" not in files and (source / "processor_config.json").is_file():
        processor = load_json(source / "processor_config.json").get("image_processor")
        if isinstance(processor, dict):
            files["preprocessor_config.json"] = dump_json(processor)
    return files
