"""Token ids and text: the checkpoint's byte-level BPE. Special tokens arise only where the caller allows them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from engine.errors import ModelFileError, RequestError
from engine.json_file import read_json_object

FILE_NAME = "tokenizer.json"
_MAX_FILE_BYTES = 256 << 20


class Tokenizer:
    """Encodes and decodes with one checkpoint's vocabulary.

    vocab_size: one more than the largest id. added_tokens: text -> id of the tokens outside BPE (turn marks, thinking
    and tool tags), special ones and others. special_ids: those of them that mark structure and are no text.
    """

    def __init__(self, definition: Mapping[str, Any], path: Path) -> None:
        """definition: the content of tokenizer.json; path: for messages. Use `load`."""
        added = _added_tokens(definition, path)
        # A tokenizer without added tokens: what users write stays text whatever it spells.
        bare = {**definition, "added_tokens": [], "post_processor": None}
        try:
            self._template = tokenizers.Tokenizer.from_str(json.dumps({**definition, "post_processor": None}))
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(bare))
        except Exception as error:  # the package raises plain Exception
            raise ModelFileError(f"{path}: not a tokenizer: {error}") from error
        self.added_tokens: Mapping[str, int] = MappingProxyType({token["content"]: token["id"] for token in added})
        self.special_ids = frozenset(token["id"] for token in added if token.get("special", False))
        self.vocab_size = vocab_size(definition, path)
        texts = {token["id"]: token["content"] for token in added}
        self._bytes = {
            token_id: b"" if token_id in self.special_ids else text.encode() for token_id, text in texts.items()
        }

    @staticmethod
    def load(directory: Path) -> Tokenizer:
        """From `directory`/tokenizer.json. ModelFileError if it is missing or no byte-level BPE."""
        path = directory / FILE_NAME
        return Tokenizer(read_definition(directory), path)

    def encode(self, text: str, allow_special: bool) -> list[int]:
        """Ids of `text`. allow_special: added tokens in the text become their ids; else they are spelt out as text.

        RequestError for a text that the package cannot divide."""
        tokenizer = self._template if allow_special else self._plain
        # A batch of one: unlike `encode`, it leaves the interpreter to other threads, and texts can be megabytes.
        try:
            ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:
            # The package gives up on runs of some ten million blanks, in a way that no `except Exception` sees.
            if type(error).__name__ != "PanicException":
                raise
            raise RequestError(f"A text of {len(text)} characters cannot be divided into tokens: {error}") from None
        return ids

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n / longest_token tokens."""
        longest = max(len(text.encode()) for text in self.added_tokens) if self.added_tokens else 1
        for text in self._plain.get_vocab():
            longest = max(longest, len(text))  # a character of the byte-level alphabet stands for one byte
        return longest

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: none for special tokens and for ids without a token. UTF-8 characters
        may be split between tokens."""
        known = self._bytes.get(token_id)
        if known is None:
            text = self._plain.id_to_token(token_id) or ""
            known = self._bytes[token_id] = bytes(_BYTE_OF_CHARACTER[character] for character in text)
        return known

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")


def read_definition(directory: Path) -> dict[str, Any]:
    """The content of tokenizer.json, a JSON object. ModelFileError if it cannot be had."""
    return read_json_object(directory / FILE_NAME, _MAX_FILE_BYTES)


def vocab_size(definition: Mapping[str, Any], path: Path) -> int:
    """One more than the largest id of a tokenizer.json."""
    model = definition.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict) or not vocabulary or model is None or model.get("type") != "BPE":
        raise ModelFileError(f"{path}: expected a BPE model with a vocabulary")
    if not _is_byte_level(definition.get("decoder")):
        raise ModelFileError(f"{path}: decoder is {definition.get('decoder')!r}, expected ByteLevel")
    if any(character not in _BYTE_OF_CHARACTER for text in vocabulary for character in text):
        raise ModelFileError(f"{path}: a token holds characters that byte-level BPE does not use")
    ids: list[int] = [*vocabulary.values(), *(token["id"] for token in _added_tokens(definition, path))]
    if not all(isinstance(token_id, int) and 0 <= token_id < 1 << 24 for token_id in ids):
        raise ModelFileError(f"{path}: ids must be integers in 0..{(1 << 24) - 1}")
    return max(ids) + 1


def _is_byte_level(decoder: object) -> bool:
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _added_tokens(definition: Mapping[str, Any], path: Path) -> Sequence[Mapping[str, Any]]:
    tokens = definition.get("added_tokens", [])
    if not isinstance(tokens, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and isinstance(token.get("id"), int)
        for token in tokens
    ):
        raise ModelFileError(f"{path}: added_tokens must be a list of objects with content and id")
    return tokens


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE spells bytes as characters: printable Latin-1 as itself, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
