"""Synthetic request streams: single workloads, and a mix of chats, agents and one-off documents by popularity.

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

    def fresh(self, count: int) -> list[int]:
        """Ids never used before."""
        self._next += count
        return list(range(self._next - count, self._next))

    def request(
        self, messages: list[Message], thinking: list[int], answer: list[int], preserve: bool = False
    ) -> Request:
        """The prompt of `messages`; preserve keeps the thinking of all turns, not only after the last user's."""
        last_user = -1 if preserve else max(i for i, m in enumerate(messages) if m.role == "user")
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

    def chat(self, turns: int, system: list[int], preserve: bool = False) -> list[Request]:
        """One conversation."""
        user, think, answer = (self._random.randint(*r) for r in ((60, 300), (200, 900), (150, 500)))
        messages = [Message("system", system)]
        requests = []
        for _ in range(turns):
            messages.append(Message("user", self.fresh(user)))
            thinking, reply = self.fresh(think), self.fresh(answer)
            requests.append(self.request(messages, thinking, reply, preserve))
            messages.append(Message("assistant", reply, thinking))
        return requests

    def agent(self, rounds: int) -> list[Request]:
        """Tool rounds, then a new user message, which strips all thinking at once."""
        messages = [Message("system", self.fresh(8000)), Message("user", self.fresh(300))]
        requests = []
        for _ in range(rounds):
            thinking, call = self.fresh(150), self.fresh(80)
            requests.append(self.request(messages, thinking, call))
            messages += [Message("assistant", call, thinking), Message("tool", self.fresh(600))]
        messages += [Message("assistant", self.fresh(300), self.fresh(300)), Message("user", self.fresh(100))]
        requests.append(self.request(messages, self.fresh(150), self.fresh(80)))
        return requests

    def requests(self, chats: int = 12, agents: int = 3, documents: int = 20) -> Iterator[Request]:
        """All sessions, one request at a time; a session is likely to be followed by itself."""
        shared = self.fresh(2000)
        sessions = [self.chat(8, shared if i % 2 else self.fresh(500)) for i in range(chats)]
        sessions += [self.agent(15) for _ in range(agents)]
        for _ in range(documents):
            length = self._random.randint(2000, 6000)
            messages = [Message("system", self.fresh(300)), Message("user", self.fresh(length))]
            sessions.append([self.request(messages, self.fresh(300), self.fresh(200))])
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
