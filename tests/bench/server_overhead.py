"""What the server adds to each token: HTTP, event stream, text assembly, thread hand-over; no model.

A scripted engine produces tokens at once, the client is a bare socket reader in another process, so the time per token
is the server's. Usage: python tests/bench/server_overhead.py [--tokens 2000] [--repeats 5]. The last line is JSON:
milliseconds per token (median of the repeats), streamed and whole.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

import live_server


def read_answer(port: int, tokens: int, stream: bool) -> float:
    """Milliseconds per token of one answer, from the request to the last byte."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = live_server.chat_body("Hi", max_tokens=tokens, stream=stream, enable_thinking=False)
    started = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    data = response.read()
    seconds = time.perf_counter() - started
    count = data.count(b'"content":') if stream else json.loads(data)["usage"]["completion_tokens"]
    if response.status != 200 or count < tokens:
        raise RuntimeError(f"status {response.status}, {count} of {tokens} tokens")
    return seconds * 1000 / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        live_server.write_checkpoint_texts(Path(name))
        live = live_server.start(Path(name))
        live.engine.say("The quick brown fox. " * options.tokens)
        result = {}
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            for mode, stream in (("streamed", True), ("whole", False)):
                times = [pool.apply(read_answer, (live.port, options.tokens, stream)) for _ in range(options.repeats)]
                print(mode, [f"{t:.3f} ms" for t in times])
                result[f"{mode}_ms_per_token"] = round(statistics.median(times), 4)
        live.stop()
    print(json.dumps({"benchmark": "server_overhead", "tokens": options.tokens, **result}))


if __name__ == "__main__":
    main()
