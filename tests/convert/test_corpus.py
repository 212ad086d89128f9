"""Corpora: what counts in a sample, and lines that are refused by number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny

from engine.convert.corpus import CorpusReader, take
from engine.errors import ConfigError, ModelFileError
from engine.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a byte-level tokenizer and a template."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    added = [
        {"id": 256 + i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for i, text in enumerate(("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    definition = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "config.json").write_text(json.dumps(tiny.config(vision=False)))
    return tmp_path


def lines(path: Path, *values: object) -> Path:
    path.write_text("\n".join(value if isinstance(value, str) else json.dumps(value) for value in values))
    return path


def test_text_counts_from_its_second_token_and_holds_no_special_ones(checkpoint: Path) -> None:
    path = lines(checkpoint / "c.jsonl", {"text": "hi<|im_end|>"})
    (sample,) = CorpusReader(checkpoint, 100).file(path)
    assert sample.token_ids.max() < 256
    assert (len(sample.token_ids), sample.first_label) == (12, 1)
    np.testing.assert_array_equal(sample.labels, sample.token_ids[1:])


def test_only_the_answer_of_a_chat_counts(checkpoint: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    (sample,) = CorpusReader(checkpoint, 100).file(lines(checkpoint / "c.jsonl", "", chat))
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.decode(sample.labels) == "assistant\n2\n"
    assert 257 in sample.labels


def test_too_long_chat_loses_its_beginning(checkpoint: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "yes"}]}
    (sample,) = CorpusReader(checkpoint, 64).file(lines(checkpoint / "c.jsonl", chat))
    assert len(sample.token_ids) == 64
    assert Tokenizer.load(checkpoint).decode(sample.labels) == "assistant\nyes\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ({"words": "a"}, "expected"),
        ({"text": "a"}, "1 tokens"),
        ({"messages": []}, "expected"),
        ({"messages": [{"role": "user", "content": "a"}]}, "not the assistant's"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}]},
            "text",
        ),
    ],
)
def test_bad_line_is_refused_by_number(checkpoint: Path, line: object, message: str) -> None:
    path = lines(checkpoint / "c.jsonl", {"text": "fine"}, line)
    with pytest.raises(ModelFileError, match=message) as caught:
        list(CorpusReader(checkpoint, 100).file(path))
    assert f"{path}:2" in str(caught.value)


def test_empty_corpus_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="holds no samples"):
        take(CorpusReader(checkpoint, 100), lines(checkpoint / "c.jsonl"), 5, held_out=False, seed=1)


def test_lessons_are_reproducible_and_split(checkpoint: Path) -> None:
    reader = CorpusReader(checkpoint, 4096)
    first, again = (take(reader, None, 6, held_out=True, seed=3) for _ in range(2))
    training = take(reader, None, 6, held_out=False, seed=3)
    assert [s.token_ids.tolist() for s in first] == [s.token_ids.tolist() for s in again]
    assert [s.token_ids.tolist() for s in first] != [s.token_ids.tolist() for s in training]
    assert all(0 < sample.first_label < len(sample.token_ids) for sample in first)
