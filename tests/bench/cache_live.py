"""What a server with the prefix cache recomputes, workload by workload, over HTTP. The last line of output is JSON.

A served demo model gets conversations of several shapes. `ideal` resumes at any token of anything that was ever in the
model's state; a request's excess is what it recomputes beyond that. A prompt that parts from all earlier ones inside a
message for the first time (`first edit`) and a prefill that was cut off are reported apart. `+shadow` is the same with
time between two requests in which the server reads ahead; there it can do better than the ideal.

    python tests/bench/cache_live.py [--model DIR] [--only WORD] [--record FILE]

--record writes the token ids of every request, for `cache_peer.py` to ask of another engine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from served import served

Message = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{text} for a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
                "required": ["city"],
            },
        },
    }
    for name, text in (("get_weather", "Get the weather"), ("get_time", "Get the local time"))
]
WORDS = (
    "river house train garden letter winter music bridge window paper market doctor village stone morning captain "
    "silver kitchen mountain harbour teacher number island season forest engine picture yellow quiet seven north early"
).split()
ANSWER_TOKENS = 60


class Server:
    """A server process with its cache in `directory`. Can be restarted. shadow: it reads ahead, and is given the time
    for it."""

    def __init__(self, directory: Path, model: str | None, *, shadow: bool) -> None:
        self._command = [sys.executable, "-m", "server", "serve", *([model] if model else [])]
        self._environment = {
            "FERMION_CACHE_DIR": str(directory),
            "FERMION_CACHE_RAM": "512M",
            "FERMION_NO_SHADOW": "0" if shadow else "1",
        }
        self._shadow = shadow
        self._running = ExitStack()
        self.restart()

    def restart(self) -> None:
        self.close()
        self.url = self._running.enter_context(served(self._command, environment=self._environment))
        with urllib.request.urlopen(f"{self.url}/v1/models") as response:
            self.model = json.load(response)["data"][0]["id"]

    def close(self) -> None:
        self._running.close()

    def open(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=600)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self.open(path, body) as response:
            return json.load(response)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            lines = [line for line in response.read().decode().splitlines() if line.startswith(name)]
        return float(lines[0].rpartition(" ")[2])

    def rest(self) -> None:
        """What a user's typing or a tool's work gives the server: time."""
        while self._shadow and self.metric("fermion_num_conversations_ahead"):
            time.sleep(0.005)

    def ids(self, body: dict[str, Any], **more: Any) -> np.ndarray:
        return np.array(self.post("/tokenize", {**body, **more})["tokens"], np.int32)


@dataclass
class Row:
    """Sums over a workload's requests but the first."""

    name: str
    prompt: int = 0
    ideal: int = 0
    recomputed: int = 0
    worst: int = 0
    first_edit: int = 0
    cancel: int = 0
    last: tuple[int, int, int] = (0, 0, 0)
    first_s: float = 0.0
    later_s: list[float] = field(default_factory=list)


class Session:
    """One workload's requests, each compared with the ideal."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.row = Row(name)
        self.fields: dict[str, Any] = {"cache_salt": name}
        self.log: list[dict[str, Any]] = []
        self._seen: list[np.ndarray] = []
        self._count = 0

    def ideal(self, ids: np.ndarray) -> int:
        best = 0
        for other in self._seen:
            n = min(len(ids), len(other))
            differ = np.flatnonzero(ids[:n] != other[:n])
            best = max(best, int(differ[0]) if len(differ) else n)
        return len(ids) - min(best, len(ids) - 1)

    def ask(self, messages: list[Message], *, is_first_edit: bool = False, **more: Any) -> Message:
        """One request; the assistant's message."""
        body = {"messages": messages, "temperature": 0, "max_tokens": ANSWER_TOKENS, **self.fields, **more}
        ids = self.server.ids(body)
        ideal = self.ideal(ids)
        started = time.perf_counter()
        answer = self.server.post("/v1/chat/completions", body)
        seconds = time.perf_counter() - started
        assert answer["usage"]["prompt_tokens"] == len(ids)
        self.count(len(ids), ideal, answer["fermion"]["cache"]["recomputed"], seconds, is_first_edit)
        message: Message = answer["choices"][0]["message"]
        message = {key: value for key, value in message.items() if value is not None}
        after = self.server.ids({**body, "messages": [*messages, message]}, add_generation_prompt=False)
        self._seen += [ids, after]
        self.log.append({"prompt": ids.tolist(), "after": after.tolist()})
        self.server.rest()
        return message

    def restart(self) -> None:
        """Another process serves from here on."""
        self.server.restart()
        self.log.append({"restart": True})

    def count(self, tokens: int, ideal: int, recomputed: int, seconds: float, is_first_edit: bool) -> None:
        self._count += 1
        if self._count == 1:
            self.row.first_s = seconds
            return
        self.row.prompt += tokens
        self.row.ideal += ideal
        self.row.recomputed += recomputed
        self.row.last = (tokens, ideal, recomputed)
        self.row.later_s.append(seconds)
        if is_first_edit:
            self.row.first_edit = max(self.row.first_edit, recomputed - ideal)
        else:
            self.row.worst = max(self.row.worst, recomputed - ideal)

    def cancel(self, messages: list[Message], share: float) -> None:
        """Leave when `share` of the prompt is done, and ask again."""
        body = {"messages": messages, "temperature": 0, "max_tokens": 1, **self.fields}
        ids = self.server.ids(body)
        total, seen = len(ids), 0
        with self.server.open("/v1/chat/completions", {**body, "stream": True, "return_progress": True}) as stream:
            for line in stream:
                if b"prompt_progress" in line:
                    seen = json.loads(line[6:])["prompt_progress"]["processed"]
                    if seen >= share * total:
                        break
        self.server.post("/v1/chat/completions", PING)  # answered when the cancelled request has ended
        self.log.append({"prompt": ids.tolist(), "cancel": share})
        started = time.perf_counter()
        report = self.server.post("/v1/chat/completions", body)["fermion"]["cache"]
        recomputed = report["recomputed"] - report["carried"]
        self.row.prompt, self.row.ideal, self.row.recomputed = total, total - seen, recomputed
        self.row.cancel = recomputed - (total - seen)
        self.row.later_s.append(time.perf_counter() - started)


PING = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "cache": {"read": False, "write": False}}


class Writer:
    """Text that never repeats by chance."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, words: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(words)).capitalize() + "."

    def system(self, words: int) -> Message:
        return {"role": "system", "content": self.text(words)}

    def user(self, words: int) -> Message:
        return {"role": "user", "content": self.text(words)}


def regenerate(session: Session, write: Writer) -> None:
    messages = [write.system(250), write.user(1500)]
    for seed in range(3):
        session.ask(messages, temperature=0.8, seed=seed)


def chat(session: Session, write: Writer, restart_after: int | None = None) -> None:
    for turn, _ in enumerate(turns(session, write, 8)):
        if turn + 1 == restart_after:
            session.restart()


def turns(session: Session, write: Writer, count: int) -> Iterator[None]:
    messages = [write.system(250)]
    for _ in range(count):
        messages.append(write.user(80))
        messages.append(session.ask(messages))
        yield


def preserved_chat(session: Session, write: Writer) -> None:
    session.fields["chat_template_kwargs"] = {"preserve_thinking": True}
    chat(session, write)


def interleaved(session: Session, write: Writer) -> None:
    for _ in zip(turns(session, write, 6), turns(session, write, 6), strict=True):
        pass


def shared_system(session: Session, write: Writer) -> None:
    system = write.system(1000)
    for _ in range(12):
        session.ask([system, write.user(80)])


def agent(session: Session, write: Writer) -> None:
    session.fields |= {"tools": TOOLS}
    messages = [write.system(500), {"role": "user", "content": "What is the weather in Paris, Rome and Oslo?"}]
    for _ in range(10):
        message = session.ask(messages, tool_choice="required", parallel_tool_calls=False)
        calls = message.get("tool_calls", [])
        messages += [message, *({"role": "tool", "tool_call_id": c["id"], "content": write.text(120)} for c in calls)]
    answer = session.ask(messages)
    session.ask([*messages, answer, write.user(40)])


def edit(session: Session, write: Writer) -> None:
    system, document = write.system(100), write.text(2400)
    session.ask([system, {"role": "user", "content": document}])
    for number in range(3):
        changed = document[:-700] + write.text(90)
        session.ask([system, {"role": "user", "content": changed}], is_first_edit=number == 0)


def retrieval(session: Session, write: Writer) -> None:
    system, header = write.system(400), write.text(150)
    for number in range(8):
        session.ask([system, {"role": "user", "content": f"{header}\n\n{write.text(900)}"}], is_first_edit=number == 1)


def document(session: Session, write: Writer) -> None:
    system, text = write.system(100), write.text(2400)
    for _ in range(8):
        session.ask([system, {"role": "user", "content": f"{text}\n\n{write.text(15)}"}])


def cancelled(session: Session, write: Writer) -> None:
    session.cancel([write.system(250), write.user(2600)], 0.7)


AGENT = "agent, then a user turn"
WORKLOADS: dict[str, Callable[[Session, Writer], None]] = {
    "regenerate": regenerate,
    "chat, thinking stripped": chat,
    "chat, thinking preserved": preserved_chat,
    "shared system prompt": shared_system,
    AGENT: agent,
    "edit near the end": edit,
    "two interleaved chats": interleaved,
    "retrieval": retrieval,
    "document, 8 questions": document,
    "chat, restart after turn 4": lambda session, write: chat(session, write, restart_after=4),
    "cancel at 70 %, retry": cancelled,
}


def play(name: str, seed: int, directory: Path, model: str | None, *, shadow: bool) -> Session:
    """One workload, on a server of its own."""
    server = Server(directory, model, shadow=shadow)
    try:
        session = Session(server, name)
        WORKLOADS[name](session, Writer(seed))
    finally:
        server.close()
    return session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the demo model)")
    parser.add_argument("--only", default="", help="workloads whose name holds this")
    parser.add_argument("--record", type=Path, help="file for the requests' token ids")
    arguments = parser.parse_args()
    os.environ.pop("FERMION_CONFIG", None)
    names = [name for name in WORKLOADS if arguments.only in name]
    if not names:
        parser.error(f"--only {arguments.only!r}: there are {', '.join(WORKLOADS)}")
    rows: dict[str, Row] = {}
    ahead: dict[str, Row] = {}
    logs: dict[str, list[dict[str, Any]]] = {}
    heads = ("prompt", "ideal", "ours", "excess", "first edit", "+shadow", "first s", "later s")
    print(f"{'workload':28}" + "".join(f"{head:>11}" for head in heads))
    with tempfile.TemporaryDirectory() as directory:
        for seed, name in enumerate(WORKLOADS):
            if name not in names:
                continue
            session = play(name, seed, Path(directory) / f"{seed}", arguments.model, shadow=False)
            logs[name] = session.log
            row = rows[name] = session.row
            with_shadow = ahead[name] = play(name, seed, Path(directory) / f"{seed}s", arguments.model, shadow=True).row
            later = sorted(row.later_s)[len(row.later_s) // 2]
            print(
                f"{name:28}{row.prompt:11}{row.ideal:11}{row.recomputed:11}{row.worst or row.cancel:11}"
                f"{row.first_edit:11}{with_shadow.recomputed:11}{row.first_s:11.2f}{later:11.2f}",
                flush=True,
            )
            if name == AGENT:
                last, last_ahead = row.last, with_shadow.last
                print(f"{'  the user turn alone':28}{last[0]:11}{last[1]:11}{last[2]:11}{'':22}{last_ahead[2]:11}")
    result = {
        "worst_excess_tokens": max(row.worst for row in rows.values()),
        "first_edit_excess_tokens": max(row.first_edit for row in rows.values()),
        "cancel_excess_tokens": max(row.cancel for row in rows.values()),
        "worst_excess_tokens_shadow": max(row.worst for row in ahead.values()),
        "recomputed": {name: row.recomputed for name, row in rows.items()},
        "recomputed_shadow": {name: row.recomputed for name, row in ahead.items()},
        "ideal": {name: row.ideal for name, row in rows.items()},
    }
    if arguments.record is not None:
        arguments.record.write_text(json.dumps(logs))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
