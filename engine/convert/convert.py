"""One conversion, from a source path to a checkpoint directory: read, plan, say what will happen, write."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from engine.config import QUANTIZATION
from engine.convert import gguf_config
from engine.convert.calibration import Calibration
from engine.convert.gguf_config import GgufKeys
from engine.convert.gguf_file import read_gguf
from engine.convert.gguf_layout import GgufCheckpoint
from engine.convert.hf_layout import HfCheckpoint
from engine.convert.packed_layout import PackedCheckpoint
from engine.convert.plan import Format, FormatChoice, Plan, TensorProvider, build_plan
from engine.convert.prune import PrunedCheckpoint, Selection
from engine.convert.recipes import RECIPES
from engine.convert.safetensors import read_checkpoint
from engine.convert.source_config import Json, dump_json, geometry, is_tied, load_config, load_json, untied
from engine.convert.writer import ProgressReport, plan_bytes, write_checkpoint
from engine.errors import ConfigError, ModelFileError
from engine.json_file import read_json_object
from engine.placement import check_threads

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
    """A conversion ready to run: the plan, the small files that go with it, statistics, and remarks for the user."""

    plan: Plan
    side_files: dict[str, bytes]
    calibration: Calibration | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """What may be asked of a conversion.

    recipe: a name of `recipes.RECIPES`, None: `size`; a fermion checkpoint as source keeps the forms it has, and none
    can be asked for. selection: experts to
    keep. calibration: input statistics for the quantiser. vision_file: the GGUF file of the vision tower.
    """

    recipe: str | None = None
    selection: Selection | None = None
    calibration: Calibration | None = None
    vision_file: Path | None = None


def prepare(source: Path, options: Options) -> Conversion:
    """Reads headers and configuration only. source: a directory of safetensors, or a GGUF file (of several: the
    first). Raises ModelFileError for anything not understood, ConfigError for options that do not fit."""
    if options.recipe is not None and options.recipe not in RECIPES:
        raise ConfigError(f"recipe {options.recipe!r}: expected one of {', '.join(RECIPES)}")
    notes: list[str] = []
    if source.suffix == ".gguf":
        opened = _open_gguf(source, options.vision_file, notes)
    elif options.vision_file is not None:
        raise ConfigError(f"vision file {options.vision_file} goes with a GGUF model; {source} is a directory")
    else:
        opened = _open_directory(source)
    plan = _plan(source, opened, options)
    side_files = dict(opened.side_files)
    side_files["config.json"] = dump_json(_converted_config(opened.config, plan, options, notes))
    wanted = ["tokenizer.json", "chat_template.jinja", "generation_config.json"]
    if any(tensor.name.startswith("model.visual.") for tensor in plan.tensors):
        wanted.append("preprocessor_config.json")
    notes += [
        f"the source has no {name}, so the checkpoint has none: it cannot be served until the file is put there"
        for name in wanted
        if name not in side_files
    ]
    return Conversion(plan, side_files, options.calibration, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Opened:
    """A source whose headers are read: nested config, tensors, their forms if they are fixed, small files."""

    config: Json
    provider: TensorProvider
    fixed_format: FormatChoice | None
    side_files: dict[str, bytes]


def _open_directory(source: Path) -> _Opened:
    if not source.is_dir():
        raise ModelFileError(f"{source}: expected a directory with config.json and safetensors files, or a .gguf file")
    config = load_config(source / "config.json")
    entries = read_checkpoint(source)
    if _source_quantization(source / "config.json", config) == "fermion":
        packed = PackedCheckpoint(source, entries)
        return _Opened(config, packed, packed.stored_format, _side_files(source))
    return _Opened(config, HfCheckpoint(source, entries), None, _side_files(source))


def _open_gguf(source: Path, vision_file: Path | None, notes: list[str]) -> _Opened:
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
        notes.append("no vision file given: the checkpoint will not read pictures")
    config = gguf_config.model_config(keys, entries, vision)
    provider = GgufCheckpoint(source, entries, geometry(source, config))
    return _Opened(config, provider, None, gguf_config.side_files(keys, vision))


def _plan(source: Path, opened: _Opened, options: Options) -> Plan:
    stated_in = source if source.suffix == ".gguf" else source / "config.json"
    shapes, provider = geometry(stated_in, opened.config), opened.provider
    if options.selection is not None:
        used = shapes.num_experts_per_tok
        if options.selection.kept < used:
            raise ConfigError(f"keep {options.selection.kept}: the model routes each token to {used} experts")
        provider = PrunedCheckpoint(provider, options.selection)
        shapes = replace(shapes, num_experts=options.selection.kept)
    elif opened.fixed_format is not None:
        raise ConfigError(f"{source} is a converted checkpoint already: there is nothing to do but to prune it")
    if opened.fixed_format is not None and options.recipe is not None:
        raise ConfigError(f"recipe {options.recipe}: {source} is converted already, and its weights keep their forms")
    forms = opened.fixed_format or RECIPES[options.recipe or "size"]
    return build_plan(provider, shapes, forms, tied=is_tied(opened.config))


def run(conversion: Conversion, destination: Path, *, threads: int | None, progress: ProgressReport) -> None:
    """Writes the checkpoint; errors as in `writer.write_checkpoint`. threads None: one per usable CPU; ConfigError for
    more than that."""
    if threads is not None:
        check_threads(threads)
    write_checkpoint(
        destination,
        conversion.plan,
        conversion.side_files,
        calibration=conversion.calibration,
        threads=threads or len(os.sched_getaffinity(0)),
        progress=progress,
    )


def describe(conversion: Conversion) -> str:
    """The plan as text: bytes and weights of each stored form, what they become in memory, and every remark."""
    weights: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for tensor in conversion.plan.tensors:
        weights[tensor.format.value] += prod(tensor.shape)
        stored[tensor.format.value] += tensor.info.nbytes
    lines = [f"{len(conversion.plan.tensors)} tensors, {plan_bytes(conversion.plan):,} bytes"]
    lines += [f"  {name:4} {weights[name]:>16,} weights {stored[name]:>16,} bytes" for name in sorted(stored)]
    halves = sum(
        tensor.info.nbytes
        for tensor in conversion.plan.tensors
        if tensor.format is Format.F16 and not tensor.name.startswith(("model.visual.", "mtp."))
    )
    if halves:
        lines.append(f"  in memory {plan_bytes(conversion.plan) + halves:,} bytes: F16 matrices are held as float32")
    return "\n".join([*lines, *(f"note: {note}" for note in conversion.notes)])


def _source_quantization(path: Path, config: Json) -> str | None:
    """None, "fp8" or "fermion"; anything else is refused."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict) or quantization.get("quant_method") not in ("fp8", "fermion"):
        raise ModelFileError(f"{path}: quantization_config {quantization!r} is not supported: only fp8 and fermion are")
    method: str = quantization["quant_method"]
    if method == "fermion" and quantization != QUANTIZATION:
        raise ModelFileError(f"{path}: quantization_config is {quantization!r}, expected {QUANTIZATION!r}")
    if method == "fp8" and quantization.get("weight_block_size") != [128, 128]:
        size = quantization.get("weight_block_size")
        raise ModelFileError(f"{path}: quantization_config.weight_block_size is {size!r}, expected [128, 128]")
    return method


def _converted_config(config: Json, plan: Plan, options: Options, notes: list[str]) -> Json:
    converted = {**untied(config), "quantization_config": dict(QUANTIZATION)}
    if all(tensor.format is not Format.Q4 for tensor in plan.tensors):
        del converted["quantization_config"]
    text: Json = converted["text_config"]
    if options.selection is not None:
        text["num_experts"] = options.selection.kept
    text.pop("mtp_num_experts", None)
    if plan.mtp_experts is None:
        if text.get("mtp_num_hidden_layers"):
            notes.append("the source has no mtp.* tensors although its config names a layer: recorded as 0 layers")
        text["mtp_num_hidden_layers"] = 0
    else:
        text["mtp_num_hidden_layers"] = 1
        if plan.mtp_experts != text["num_experts"]:
            notes.append(f"the MTP layer has {plan.mtp_experts} experts, the trunk {text['num_experts']}")
            text["mtp_num_experts"] = plan.mtp_experts
    return converted


def _side_files(source: Path) -> dict[str, bytes]:
    """Tokenizer, template and defaults, byte for byte; two of them may hide inside older or newer files."""
    files: dict[str, bytes] = {}
    for name in COPIED_FILES:
        path = source / name
        if path.is_file():
            if path.stat().st_size > MAX_SIDE_FILE_BYTES:
                raise ModelFileError(f"{path}: {path.stat().st_size} bytes, at most {MAX_SIDE_FILE_BYTES} accepted")
            if path.suffix == ".json":
                read_json_object(path, MAX_SIDE_FILE_BYTES)  # refused now, not by the server after hours of work
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
