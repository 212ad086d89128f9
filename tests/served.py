"""A server as users start it: another process on a free loopback port."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def served(
    command: Sequence[str | os.PathLike[str]],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    end: signal.Signals = signal.SIGTERM,
) -> Iterator[str]:
    """Run `command` (with FERMION_PORT=0) until its /health is good; gives http://127.0.0.1:PORT. Ends it by the signal
    `end` and checks that it goes with exit code 0."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {}), "FERMION_PORT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            url = wait_until_ready(process, log.fileno(), time.monotonic() + timeout_s)
            yield url
            process.send_signal(end)
            assert process.wait(30) == 0, _text(log.fileno())
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def chat(url: str, text: str, timeout_s: float = 120.0, **fields: Any) -> dict[str, Any]:
    """One greedy chat completion without thinking."""
    body = {
        "model": "fermion-demo",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
        **fields,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def wait_until_ready(process: subprocess.Popen[bytes], log: int, deadline: float) -> str:
    """Wait for a server whose output goes to the file `log`; its URL. AssertionError if it ends, or at `deadline`."""
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{_text(log)}"
        if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", _text(log)):
            try:
                with urllib.request.urlopen(f"{found[1]}/health", timeout=5):
                    return found[1]
            except (urllib.error.URLError, OSError):
                pass
        time.sleep(0.05)
    raise AssertionError(f"the server was not ready in time:\n{_text(log)}")


def _text(log: int) -> str:
    return os.pread(log, 1 << 20, 0).decode(errors="replace")
