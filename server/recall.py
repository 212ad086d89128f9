"""What answers were made of, for as long as memory allows: their tokens, and the thinking that clients leave out.

Text does not tell which tokens it was generated from, and the state behind an answer belongs to its tokens. So the ids
of an answer that encoding its text would not give are kept, and used when the same turn comes back. Nothing here is
ever shared between two scopes (tenant and salt).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

CAPACITY_BYTES = 16 << 20
# What a record takes besides its value: key, list links, objects.
_RECORD_BYTES = 256
_TAG_BYTES = 16

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
ANSWER_START = f"{TURN_START}assistant\n"


class Recall:
    """The records of one server, those unused longest given up first. Threads may share it.

    capacity_bytes: of all records together. Scopes are made by `scope_of`.
    """

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._capacity = capacity_bytes
        self._bytes = 0
        self._records: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all records, at most the capacity."""
        return self._bytes

    def forget(self, tenant: bytes) -> None:
        """Drop all records of one tenant, whatever their salts."""
        tag = _tag(tenant)
        with self._lock:
            for name in [name for name in self._records if name.startswith(tag)]:
                self._bytes -= len(self._records.pop(name)) + _RECORD_BYTES

    def keep_ids(self, scope: bytes, turn: str, token_ids: Sequence[int]) -> None:
        """The answer whose turn reads `turn` (from ANSWER_START to TURN_END) was generated as `token_ids`."""
        self._put(_name(b"ids", scope, turn), np.asarray(token_ids, "<i4").tobytes())

    def encode(self, scope: bytes, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of rendered text: known turns as they were generated, the rest by `encode`. Turns begin and end with
        tokens of their own, so that encoding around one is the same as encoding all."""
        if not self._records:
            return encode(text)
        ids: list[int] = []
        done = 0
        for start, end in _answers(text):
            known = self._get(_name(b"ids", scope, text[start:end]))
            if known is not None:
                if start > done:
                    ids += encode(text[done:start])
                ids += np.frombuffer(known, "<i4").tolist()
                done = end
        return ids + encode(text[done:]) if done < len(text) else ids

    def keep_thinking(self, scope: bytes, messages: Sequence[Mapping[str, Any]]) -> None:
        """Remember the thinking of the last of `messages` as the answer to those before it."""
        *_, name = _names(scope, messages)
        thinking = messages[-1].get("reasoning_content")
        if thinking:
            self._put(name, thinking.encode())

    def restore_thinking(self, scope: bytes, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """`messages`, with the thinking of those answers that came back without theirs."""
        restored: list[dict[str, Any]] = []
        for message, name in zip(messages, _names(scope, messages), strict=True):
            if message["role"] == "assistant" and not message.get("reasoning_content"):
                known = self._get(name)
                if known is not None:
                    message = {**message, "reasoning_content": known.decode()}
            restored.append(message)
        return restored

    def _get(self, name: bytes) -> bytes | None:
        with self._lock:
            value = self._records.get(name)
            if value is not None:
                self._records.move_to_end(name)
            return value

    def _put(self, name: bytes, value: bytes) -> None:
        with self._lock:
            old = self._records.pop(name, None)
            if old is not None:
                self._bytes -= len(old) + _RECORD_BYTES
            self._records[name] = value
            self._bytes += len(value) + _RECORD_BYTES
            while self._bytes > self._capacity:
                _, gone = self._records.popitem(last=False)
                self._bytes -= len(gone) + _RECORD_BYTES


def scope_of(tenant: bytes, salt: bytes) -> bytes:
    """Whose answers may be remembered together: those to requests of one tenant with one salt."""
    return _tag(tenant) + salt


def _tag(tenant: bytes) -> bytes:
    return hashlib.blake2b(tenant, digest_size=_TAG_BYTES, person=b"tenant").digest()


def _name(kind: bytes, scope: bytes, text: str) -> bytes:
    digest = hashlib.blake2b(scope, digest_size=32, person=kind)
    digest.update(b"\0" + text.encode())
    return scope[:_TAG_BYTES] + digest.digest()


def _answers(text: str) -> Iterator[tuple[int, int]]:
    """Where the answers of a rendered conversation stand, from their header to their end mark."""
    start = text.find(ANSWER_START)
    while start >= 0:
        following = text.find(TURN_START, start + len(ANSWER_START))
        end = text.rfind(TURN_END, start, following if following >= 0 else len(text))
        if end >= 0:
            yield start, end + len(TURN_END)
        start = text.find(ANSWER_START, following) if following >= 0 else -1


def _names(scope: bytes, messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """A name for each message: of all that was said up to it, thinking left out."""
    digest = hashlib.blake2b(scope, digest_size=32, person=b"thinking")
    for message in messages:
        content = message.get("content")
        shown = {
            "role": message["role"],
            "content": content.strip() if isinstance(content, str) else content or "",
            "calls": [call["function"] for call in message.get("tool_calls") or ()],
        }
        # Pictures are no JSON; their names need not last.
        digest.update(b"\0" + json.dumps(shown, sort_keys=True, default=repr).encode())
        yield scope[:_TAG_BYTES] + digest.copy().digest()
