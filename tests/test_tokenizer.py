"""Text and ids: round trips, special tokens only where allowed, bytes of single tokens, damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tokenizer

from engine.errors import ModelFileError, RequestError
from engine.tokenizer import Tokenizer

DEMO = Path(__file__).parents[1] / "engine" / "demo" / "checkpoint"
END, THINK = 256, 257
TEXTS = ["", "plain", " spaces\n\ttabs ", "naïve café", "日本語", "👩‍👩‍👧 emoji", "a\x00b", "e\u0301"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer.load(directory)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("allow_special", [True, False])
def test_round_trip(tokenizer: Tokenizer, text: str, allow_special: bool) -> None:
    assert tokenizer.decode(tokenizer.encode(text, allow_special)) == text


def test_template_text_forms_added_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|><think>b", allow_special=True)
    assert ids[1:3] == [END, THINK]
    assert len(ids) == 4


@pytest.mark.parametrize("text", ["<|im_end|>", "<think>", "x<|im_end|>y<think><|im_end|>", "<|im_<|im_end|>end|>"])
def test_user_text_never_does(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    assert not {END, THINK} & set(ids)
    assert tokenizer.decode(ids) == text


def test_text_that_cannot_be_divided_is_the_clients_fault() -> None:
    """Ten million blanks in a row are more than the package's expressions go back over; it panics."""
    tokenizer = Tokenizer.load(DEMO)
    with pytest.raises(RequestError, match="A text of 10500000 characters cannot be divided into tokens"):
        tokenizer.encode(" " * 10_500_000, allow_special=False)
    assert tokenizer.decode(tokenizer.encode("it goes on", allow_special=False)) == "it goes on"


def test_visible_and_control_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.added_tokens == {"<|im_end|>": END, "<think>": THINK}
    assert tokenizer.special_ids == {END}
    assert tokenizer.token_bytes(END) == b""
    assert tokenizer.token_bytes(THINK) == b"<think>"
    assert tokenizer.token_bytes(9999) == b""
    assert tokenizer.vocab_size == 258


def test_every_byte_has_its_token(tokenizer: Tokenizer) -> None:
    assert sorted(tokenizer.token_bytes(token) for token in range(256)) == [bytes([byte]) for byte in range(256)]


def test_split_character_arrives_in_pieces(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é", allow_special=False)
    assert [tokenizer.token_bytes(token) for token in ids] == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def definition(tmp_path: Path) -> dict[str, Any]:
    write_tokenizer(tmp_path)
    content: dict[str, Any] = json.loads((tmp_path / "tokenizer.json").read_text())
    return content


@pytest.mark.parametrize(
    "edit",
    [
        {"model": {"type": "WordPiece", "vocab": {"a": 0}}},
        {"model": {"type": "BPE", "vocab": {}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"▁a": 0}, "merges": []}},
        {"model": None},
        {"decoder": {"type": "WordPiece"}},
        {"decoder": None},
        {"added_tokens": {}},
        {"added_tokens": [{"content": "x"}]},
        {"pre_tokenizer": {"type": "Nonsense"}},
    ],
)
def test_damaged_definitions_are_refused(tmp_path: Path, edit: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**definition(tmp_path), **edit}))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff"])
def test_unreadable_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
