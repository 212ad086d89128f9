"""Synthetic request streams for eviction rules: chats, agents and one-off documents, interleaved by popularity.

Each request has a prompt, the boundaries the template knows, and what it generates. Chats strip the thinking of
earlier turns, agents keep theirs until the next user message, as the model family's template does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_HEADER = 3
_THINK = 2


@dataclass
class Message:
    role: str
    content: list[int]
    thinking: list[int] = field(default_factory=list)


@dataclass
class Request:
    prompt: npt.NDArray[np.int32]
    boundaries: list[int]
    generated: npt.NDArray[np.int32]


class Traffic:
    """Deterministic from its seed. Text is made of ids that never repeat, markup of ids below 100."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._next = 100

    def _fresh(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def _request(self, messages: list[Message], thinking: list[int], answer: list[int]) -> Request:
        last_user = max(i for i, m in enumerate(messages) if m.role == "user")
        ids: list[int] = []
        boundaries = []
        for index, message in enumerate(messages):
            ids += [1, {"system": 2, "user": 3, "tool": 4, "assistant": 5}[message.role], 6]
            if message.role == "assistant" and index > last_user:
                ids += [7, 6, *message.thinking, 8, 9]
            ids += [*message.content, 10, 6]
            boundaries.append(len(ids))
        ids += [1, 5, 6, 7, 6]
        boundaries.append(len(ids) - _THINK)
        generated = [*thinking, 8, 9, *answer]
        return Request(np.array(ids, np.int32), boundaries, np.array(generated, np.int32))

    def _chat(self, turns: int, system: list[int]) -> list[Request]:
        user, think, answer = (self._random.randint(*r) for r in ((60, 300), (200, 900), (150, 500)))
        messages = [Message("system", system)]
        requests = []
        for _ in range(turns):
            messages.append(Message("user", self._fresh(user)))
            thinking, reply = self._fresh(think), self._fresh(answer)
            requests.append(self._request(messages, thinking, reply))
            messages.append(Message("assistant", reply, thinking))
        return requests

    def _agent(self, rounds: int) -> list[Request]:
        messages = [Message("system", self._fresh(8000)), Message("user", self._fresh(300))]
        requests = []
        for _ in range(rounds):
            thinking, call = self._fresh(150), self._fresh(80)
            requests.append(self._request(messages, thinking, call))
            messages += [Message("assistant", call, thinking), Message("tool", self._fresh(600))]
        messages += [Message("assistant", self._fresh(300), self._fresh(300)), Message("user", self._fresh(100))]
        requests.append(self._request(messages, self._fresh(150), self._fresh(80)))
        return requests

    def requests(self, chats: int = 12, agents: int = 3, documents: int = 20) -> Iterator[Request]:
        """All sessions, one request at a time; a session is likely to be followed by itself."""
        shared = self._fresh(2000)
        sessions = [self._chat(8, shared if i % 2 else self._fresh(500)) for i in range(chats)]
        sessions += [self._agent(15) for _ in range(agents)]
        for _ in range(documents):
            length = self._random.randint(2000, 6000)
            messages = [Message("system", self._fresh(300)), Message("user", self._fresh(length))]
            sessions.append([self._request(messages, self._fresh(300), self._fresh(200))])
        weights = [self._random.paretovariate(1.2) for _ in sessions]
        done = [0] * len(sessions)
        last = -1
        while True:
            live = [i for i, s in enumerate(sessions) if done[i] < len(s)]
            if not live:
                return
            if last not in live or self._random.random() >= 0.55:
                last = self._random.choices(live, [weights[i] for i in live])[0]
            yield sessions[last][done[last]]
            done[last] += 1
