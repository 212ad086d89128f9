"""Long waits behind nginx: neither the proxy nor the client ever sees a silence that looks like a dead server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_server import LiveServer, chat_body
from nginx_proxy import NGINX, proxied, timed_chat

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

# nginx gives up after 60 s of silence and our default sign of life comes every 5 s; here 1 s stands for the 60.
_GIVES_UP = "proxy_read_timeout 1s;"
_KEEP_ALIVE_S = 0.1
_PREFILL_S = 1.2


def test_long_prefill_and_queue(start_server: Callable[..., LiveServer], tmp_path: Path) -> None:
    """One request is read for longer than the proxy waits, two more queue behind it for longer still."""
    live = start_server(keep_alive_s=_KEEP_ALIVE_S)
    live.engine.layers, live.engine.layer_s = 1, _PREFILL_S
    live.engine.say("done")
    bodies = [chat_body(f"question {index}", stream=index % 2 == 0, enable_thinking=False) for index in range(3)]
    with proxied(tmp_path, live.port, more=_GIVES_UP) as port, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda body: timed_chat(port, body, 20), bodies))
    assert [answer.status for answer in answers] == [200] * 3
    assert all(b'"finish_reason":"stop"' in answer.data for answer in answers)
    assert min(answer.seconds for answer in answers) > _PREFILL_S
    assert max(answer.seconds for answer in answers) > 3 * _PREFILL_S
    assert max(answer.longest_silence_s for answer in answers) < 0.9


def test_without_signs_of_life_the_proxy_gives_up(start_server: Callable[..., LiveServer], tmp_path: Path) -> None:
    """What the other test would see if the server kept silent."""
    live = start_server(keep_alive_s=30)
    live.engine.layers, live.engine.layer_s = 1, _PREFILL_S
    with proxied(tmp_path, live.port, more=_GIVES_UP) as port:
        answer = timed_chat(port, chat_body(stream=False), 20)
    assert answer.status == 504
