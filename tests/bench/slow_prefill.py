"""The longest silence that a client sees behind nginx while a very long prompt is being read.

nginx runs with its default proxy settings in front of servers with default settings; a scripted engine takes its time.
One request is streamed and one is whole, at the same time, each at a server of its own. Costs no processor time.
Usage: python tests/bench/slow_prefill.py [--minutes 10]. The last line is JSON: longest silences in seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

import live_server
from nginx_proxy import TimedAnswer, proxied, timed_chat


def ask(directory: Path, minutes: float, stream: bool) -> TimedAnswer:
    """One chat through a proxy and a server of its own; the engine reports progress only halfway and at the end."""
    live = live_server.start(directory)
    live.engine.layers, live.engine.layer_s = 2, minutes * 30
    live.engine.say("done")
    place = directory / f"nginx-{'streamed' if stream else 'whole'}"
    place.mkdir()
    try:
        with proxied(place, live.port) as port:
            answer = timed_chat(port, live_server.chat_body(stream=stream, enable_thinking=False), 120)
    finally:
        live.stop()
    if answer.status != 200 or b'"finish_reason":"stop"' not in answer.data or answer.seconds < minutes * 60:
        raise RuntimeError(f"no answer after {answer.seconds:.1f} s: {answer.data[-300:]!r}")
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        directory = Path(name)
        live_server.write_checkpoint_texts(directory)
        streamed, whole = pool.map(lambda stream: ask(directory, minutes, stream), (True, False))
    result = {"streamed_s": round(streamed.longest_silence_s, 3), "whole_s": round(whole.longest_silence_s, 3)}
    print(json.dumps({"benchmark": "slow_prefill", "minutes": minutes, **result}))


if __name__ == "__main__":
    main()
