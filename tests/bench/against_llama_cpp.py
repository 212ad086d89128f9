"""What llama.cpp makes of the same checkpoint: its logits beside ours, and what its own 4-bit quantiser loses.

Usage: PYTHONPATH=tests/convert python tests/bench/against_llama_cpp.py [--source tests/data/demo_bf16] [--samples 150]
[--types Q4_0,Q4_K_M]

Needs llama-cpp-python (0.3.36 or newer: the family is new there), which is no dependency of fermion. The checkpoint is
written as a BF16 GGUF by the tests' own writer; llama.cpp computes with it, and quantises it (`llama_model_quantize`).
Its files are read back by `fermion convert` without further rounding and measured by our evaluator, so that all
figures come from one ruler. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import shutil
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import tiny_gguf
from gguf import GGMLQuantizationType

from engine.convert import convert, writer
from engine.convert.convert import Options
from engine.convert.corpus import CorpusReader, Sample
from engine.convert.evaluate import Score, compare, log_softmax
from engine.convert.forward import Forward
from engine.convert.plan import Format

ROOT = Path(__file__).parents[2]
FILE_TYPES = {"Q4_0": 2, "Q4_K_M": 15, "Q8_0": 7}  # enum llama_ftype
LONGEST = 768
COPIED = ("tokenizer.json", "chat_template.jinja", "generation_config.json")
COMPARED = 12  # samples whose logits are compared


def write_gguf(source: Path, path: Path) -> None:
    """The text model of a published checkpoint in BF16; small tensors stay F32, as in published files."""
    plan = convert.prepare(source, Options()).plan
    weights = {
        tensor.name: writer.read_rows(tensor, 0, tensor.rows).reshape(tensor.shape)
        for tensor in plan.tensors
        if "visual" not in tensor.name
    }
    large = {tensor.name for tensor in plan.tensors if tensor.format is Format.Q4}
    text = json.loads((source / "config.json").read_text())["text_config"]
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokens: list[tuple[str, int]] = [(f"[PAD{i}]", 5) for i in range(text["vocab_size"])]
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index] = (token, 1)
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = (added["content"], 3 if added["special"] else 4)
    layers = text["num_hidden_layers"]
    stored = tiny_gguf.text_tensors(weights, fused=False, text=text)
    names = {tiny_gguf.text_name(name, layers) for name in large}
    names |= {name.replace("gate_up", part) for name in names for part in ("gate", "up")}
    tiny_gguf.write_text(
        path,
        stored,
        quantized=dict.fromkeys(names & stored.keys(), GGMLQuantizationType.BF16),
        text=text,
        tokens=tokens,
        merges=[" ".join(merge) for merge in tokenizer["model"]["merges"]],
        end=json.loads((source / "generation_config.json").read_text())["eos_token_id"][0],
    )


def quantise(path: Path, target: Path, file_type: str, *, pure: bool = False) -> None:
    """llama.cpp's own quantiser."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread, parameters.pure = FILE_TYPES[file_type], 1, pure
    failed = llama_cpp.llama_model_quantize(str(path).encode(), str(target).encode(), ctypes.byref(parameters))
    if failed:
        raise SystemExit(f"llama_model_quantize: {failed}")


def their_logits(path: Path, samples: list[Sample]) -> list[npt.NDArray[np.float32]]:
    """For each sample [labels, vocab]: logits before each label, as llama.cpp computes them."""
    model: Any = llama_cpp.Llama(str(path), n_ctx=LONGEST, n_batch=LONGEST, n_threads=1, logits_all=True, verbose=False)
    rows = []
    for sample in samples:
        model.reset()
        model.eval(sample.token_ids.tolist())
        rows.append(np.array(model.scores[sample.first_label - 1 : len(sample.token_ids) - 1], np.float32))
    return rows


def read_back(path: Path, source: Path, target: Path) -> Forward:
    """A GGUF file as a float checkpoint, exactly its values, loaded."""
    convert.run(convert.prepare(path, Options(recipe="float")), target, threads=1, progress=lambda done, total: None)
    for name in COPIED:
        shutil.copy(source / name, target / name)
    return Forward(target, 1)


def divergence(samples: list[Sample], ours: Forward, theirs: list[npt.NDArray[np.float32]]) -> dict[str, float]:
    """Mean KL in nats from our distribution to theirs, and the share of equal best tokens."""
    kl, equal = [], []
    for sample, rows in zip(samples, theirs, strict=True):
        for mine, other in zip(ours.logits(sample), rows, strict=True):
            p, q = log_softmax(mine), log_softmax(other)
            kl.append(float(np.exp(p) @ (p - q)))
            equal.append(mine.argmax() == other.argmax())
    return {"kl": float(np.mean(kl)), "top1": float(np.mean(equal)), "positions": len(kl)}


def row(name: str, size: int, lessons: Score, text: Score) -> str:
    """One line of the table."""
    exact = sum(skill.exact for skill in lessons.skills.values()) / sum(s.samples for s in lessons.skills.values())
    return (
        f"| {name} | {size / 1e6:.2f} | {text.kl:.6f} | {math.exp(text.loss):.4f} | {lessons.kl:.6f} "
        f"| {lessons.loss:.5f} | {exact:.1%} |"
    )


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=ROOT / "tests/data/demo_bf16")
    parser.add_argument("--text", type=Path, default=ROOT / "tests/convert/data/held_out.jsonl")
    parser.add_argument("--samples", type=int, default=150)
    parser.add_argument("--types", default="Q4_0,Q4_K_M")
    options = parser.parse_args()
    reader = CorpusReader(options.source, LONGEST)
    # Its file of the text model does not see.
    drawn = reader.lessons(held_out=True, seed=2)
    lessons = list(islice((sample for sample in drawn if not sample.images), options.samples))
    text = list(reader.file(options.text))
    original = Forward(options.source, 1)
    references = [[[row.copy() for row in original.logits(s)] for s in samples] for samples in (lessons, text)]
    found: dict[str, Any] = {"llama_cpp": llama_cpp.__version__}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        whole = work / "bf16.gguf"
        write_gguf(options.source, whole)
        few = lessons[:COMPARED] + text[:COMPARED]
        found["same_weights"] = divergence(few, original, their_logits(whole, few))
        print(f"the same BF16 weights, llama.cpp beside this engine: {found['same_weights']}")
        print("| variant | MB | text KL | text perplexity | answer KL | answer loss | exact |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        wanted = [
            (kind, pure)
            for kind in options.types.split(",")
            for pure in ((False, True) if kind == "Q4_0" else (False,))
        ]
        for kind, pure in wanted:
            label = f"llama.cpp {kind}{', pure' if pure else ''}"
            path = work / f"{kind}{pure}.gguf"
            quantise(whole, path, kind, pure=pure)
            candidate = read_back(path, options.source, work / f"{kind}{pure}")
            scores = [
                compare(samples, reference, map(candidate.logits, samples))
                for samples, reference in zip((lessons, text), references, strict=True)
            ]
            candidate.close()
            print(row(label, path.stat().st_size, *scores))
            found[label] = {
                "bytes": path.stat().st_size,
                "text_kl": scores[1].kl,
                "text_perplexity": math.exp(scores[1].loss),
                "answer_kl": scores[0].kl,
                "answer_loss": scores[0].loss,
            }
    original.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
