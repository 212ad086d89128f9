"""The requests of `cache_live.py`, asked of llama.cpp: how many prompt tokens it reads again. The last line is JSON.

    python tests/bench/cache_live.py --record requests.json
    python tests/bench/cache_peer.py requests.json --gguf MODEL.gguf            # the Python package llama_cpp
    python tests/bench/cache_peer.py requests.json --command 'llama-server -m MODEL.gguf -c 16384'

What is read again depends on token ids alone, so any weights of this family will do: for the package those that
`engine.gguf` makes up for a checkpoint of ours, for the server a file with a vocabulary (`write_gguf` of
`against_llama_cpp.py`).
Answers are not generated but fed, so that the other engine's state holds what ours was told. The server is told where
messages begin, as its chat endpoint would: it keeps states there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

_READY_S = 120.0
_DELIMITERS = [{"role": role, "delimiter": f"<|im_start|>{role}\n"} for role in ("assistant", "user")]


class Peer(Protocol):
    """An engine that keeps what it can of the prompts it has seen."""

    def ask(self, prompt: Sequence[int]) -> int:
        """Read `prompt`; tokens that had to be computed."""

    def answer(self, sequence: Sequence[int]) -> None:
        """Continue the last prompt to `sequence`, as if the rest had been generated."""

    def cancel(self, prompt: Sequence[int], share: float) -> int | None:
        """Begin to read `prompt` and leave when at least `share` of it is reported as read; tokens reported. None: it
        cannot be left."""

    def restart(self) -> None:
        """End and begin anew."""


class Package:
    """llama_cpp.Llama, which its server runs requests through. n_ctx: tokens of its context."""

    def __init__(self, gguf: Path, context: int) -> None:
        self._gguf, self._context = gguf, context
        self.restart()

    def restart(self) -> None:
        import llama_cpp

        self._model = llama_cpp.Llama(str(self._gguf), n_ctx=self._context, n_threads=1, verbose=False)

    def ask(self, prompt: Sequence[int]) -> int:
        evaluated = 0
        plain = self._model.eval

        def counted(tokens: Sequence[int]) -> None:
            nonlocal evaluated
            evaluated += len(tokens)
            plain(tokens)

        self._model.eval = counted
        try:
            next(self._model.generate(list(prompt), temp=0.0))
        finally:
            self._model.eval = plain
        return evaluated

    def answer(self, sequence: Sequence[int]) -> None:
        self._model.eval(list(sequence[self._model.n_tokens :]))

    def cancel(self, prompt: Sequence[int], share: float) -> int | None:
        return None


class Server:
    """llama-server, started with `command` and a port of ours."""

    def __init__(self, command: str) -> None:
        self._command = shlex.split(command)
        self._process: subprocess.Popen[bytes] | None = None
        self.restart()

    def restart(self) -> None:
        self.close()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [*self._command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{self._command[0]} did not start") from None
                time.sleep(0.1)

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _open(self, prompt: Sequence[int], **more: Any) -> Any:
        body = {"prompt": list(prompt), "n_predict": 1, "cache_prompt": True, "temperature": 0, **more}
        data = json.dumps({**body, "message_delimiters": _DELIMITERS}).encode()
        request = urllib.request.Request(f"{self._url}/completion", data, {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=600)

    def ask(self, prompt: Sequence[int]) -> int:
        with self._open(prompt) as response:
            timings: dict[str, Any] = json.load(response)["timings"]
        return int(timings["prompt_n"])

    def cancel(self, prompt: Sequence[int], share: float) -> int | None:
        read = 0
        with self._open(prompt, stream=True, return_progress=True) as stream:
            for line in stream:
                progress = json.loads(line[6:]).get("prompt_progress") if line.startswith(b"data: {") else None
                read = progress["processed"] if progress else read
                if read >= share * len(prompt):
                    break
        return read

    def answer(self, sequence: Sequence[int]) -> None:
        self.ask(sequence)


def replay(peer: Peer, log: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """(tokens of the prompts, tokens computed) of all requests but the first."""
    total = computed = 0
    first = True
    for event in log:
        if "restart" in event:
            peer.restart()
            continue
        prompt, after = event["prompt"], event.get("after", [])
        if "cancel" in event:
            if (left_at := peer.cancel(prompt, event["cancel"])) is None:
                return 0, 0
            print(f"    left at {left_at} of {len(prompt)}")
            first = False
        read = peer.ask(prompt)
        if not first:
            total, computed = total + len(prompt), computed + read
        first = False
        # The end mark and the line break behind it are the template's.
        if after[: len(prompt)] == prompt:
            peer.answer(after[:-2])
    return total, computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--gguf", type=Path, help="model for the Python package")
    parser.add_argument("--command", help="llama-server and its arguments, without host and port")
    parser.add_argument("--context", type=int, default=8192)
    arguments = parser.parse_args()
    if (arguments.gguf is None) == (arguments.command is None):
        parser.error("one of --gguf and --command is needed")
    result = {}
    print(f"{'workload':28}{'prompt':>11}{'computed':>11}")
    for name, log in json.loads(arguments.requests.read_text()).items():
        if not log:
            continue
        peer: Package | Server
        peer = Package(arguments.gguf, arguments.context) if arguments.gguf else Server(arguments.command)
        try:
            total, computed = replay(peer, log)
        finally:
            if isinstance(peer, Server):
                peer.close()
        result[name] = computed
        print(f"{name:28}{total:11}{computed:11}", flush=True)
    print(json.dumps({"recomputed": result}))


if __name__ == "__main__":
    main()
