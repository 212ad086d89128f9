"""Log-probabilities in the shapes of the APIs: tokens as text and as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.core import TokenLogprobs
from engine.tokenizer import Tokenizer

# What the API reports for a probability of zero: JSON has no infinity.
_LEAST = -9999.0


class TokenNames:
    """Readable names of one tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._added = {token_id: text for text, token_id in tokenizer.added_tokens.items()}

    def raw(self, token_id: int) -> bytes:
        """The bytes of a token; those of a control token are its name."""
        name = self._added.get(token_id)
        return self._token_bytes(token_id) if name is None else name.encode()

    def text(self, token_id: int) -> str:
        """The text of a token; bytes that are no UTF-8 by themselves show as `bytes:\\xNN`."""
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat_logprobs(self, tokens: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        """The `logprobs` object of a chat choice."""
        return {
            "content": [
                {**self._entry(token_id, given.logprob), "top_logprobs": [self._entry(*pair) for pair in given.top]}
                for token_id, given in tokens
            ],
            "refusal": None,
        }

    def text_logprobs(self, tokens: Sequence[tuple[int, TokenLogprobs]], offset: int) -> dict[str, Any]:
        """The `logprobs` object of a text completion. offset: characters before the first token."""
        names = [self.text(token_id) for token_id, _ in tokens]
        offsets = [offset + sum(map(len, names[:index])) for index in range(len(names))]
        return {
            "tokens": names,
            "token_logprobs": [max(given.logprob, _LEAST) for _, given in tokens],
            "top_logprobs": [
                {self.text(other): max(logprob, _LEAST) for other, logprob in given.top} for _, given in tokens
            ],
            "text_offset": offsets,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.text(token_id),
            "logprob": max(logprob, _LEAST),
            "bytes": list(self.raw(token_id)),
        }
