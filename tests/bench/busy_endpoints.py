"""How fast the light endpoints answer while the engine computes: /health, /metrics and /v1/models.

The server runs as users start it, with the demo model. Two clients keep it decoding and reading prompts without a
break; a third asks the light endpoints in turn, each time on a new connection.
Usage: python tests/bench/busy_endpoints.py [--samples 300] [--threads N]. The last line is JSON: median, 99th
percentile and maximum in milliseconds per endpoint, and the share of samples that found the engine at work.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from served import chat, served

PATHS = ("/health", "/metrics", "/v1/models")
_PAUSE_S = 0.01


def keep_busy(url: str, name: int, is_over: threading.Event) -> None:
    """Answers that are long, and now and then prompts that are; no two prompts are alike."""
    count = 0
    while not is_over.is_set():
        count += 1
        words = " ".join(f"word{name}x{count}x{index}" for index in range(150 if count % 4 == 0 else 5))
        question = f"Copy these words and then tell a long story: {words}"
        chat(url, question, max_tokens=300, temperature=1, chat_template_kwargs={"enable_thinking": True})


def ask(url: str) -> tuple[float, bytes]:
    """Milliseconds to the whole answer, and its body."""
    started = time.perf_counter()
    with urllib.request.urlopen(url, timeout=30) as response:
        body = response.read()
    return (time.perf_counter() - started) * 1000, body


def summary(times: list[float]) -> dict[str, float]:
    median, high = np.percentile(times, [50, 99])
    return {"median_ms": round(float(median), 2), "p99_ms": round(float(high), 2), "max_ms": round(max(times), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--threads", type=int, help="of the engine; default: the server's own")
    options = parser.parse_args()
    more = [] if options.threads is None else ["--threads", str(options.threads)]
    times: dict[str, list[float]] = {path: [] for path in PATHS}
    busy = 0
    with served([sys.executable, "-m", "server", "serve", *more]) as url:
        is_over = threading.Event()
        clients = [threading.Thread(target=keep_busy, args=(url, name, is_over)) for name in range(2)]
        for client in clients:
            client.start()
        time.sleep(1)
        for _ in range(options.samples):
            for path in PATHS:
                milliseconds, body = ask(url + path)
                times[path].append(milliseconds)
                if path == "/health":
                    busy += json.loads(body)["running"]
                time.sleep(_PAUSE_S)
        is_over.set()
        for client in clients:
            client.join()
        tokens = _generated(ask(url + "/metrics")[1].decode())
    result: dict[str, Any] = {path: summary(values) for path, values in times.items()}
    busy_share = round(busy / options.samples, 3)
    report = {"samples": options.samples, "busy_share": busy_share, "generated_tokens": tokens, **result}
    print(json.dumps({"benchmark": "busy_endpoints", **report}))


def _generated(metrics: str) -> int:
    (line,) = [line for line in metrics.splitlines() if line.startswith("fermion_generation_tokens_total")]
    return int(float(line.rpartition(" ")[2]))


if __name__ == "__main__":
    main()
