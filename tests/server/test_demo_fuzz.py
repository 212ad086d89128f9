"""Random sampling parameters against the real engine: refused by name or served, and the server lives on.

The scripted engine of test_fuzz.py never samples, so it cannot see what a parameter does to logits.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core import SAMPLING_RANGES
from server.chat import local_server
from server.config import load_settings


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with local_server(load_settings({"threads": 2, "no_cache": True})) as url:
        yield url


def ends(name: str) -> st.SearchStrategy[Any]:
    """Both ends of what is accepted, what lies just outside and between, and numbers next to zero."""
    least, most = SAMPLING_RANGES[name]
    if name == "top_k":
        return st.sampled_from([-1, 0, 1, int(most), int(most) + 1]) | st.integers(0, 6000)
    near = [least, most, least - 1, most + 1, 5e-324, 1e-300, 1e-38, 1e-9]
    return st.sampled_from(near) | st.floats(least, most)


parameters = st.fixed_dictionaries(
    {},
    optional={
        **{name: ends(name) for name in SAMPLING_RANGES},
        "seed": st.integers(-(2**65), 2**65),
        "logit_bias": st.dictionaries(
            st.integers(-1, 5000).map(str), st.sampled_from([-100.0, 100.0, 101.0]) | st.floats(-100, 100), max_size=3
        ),
        "n": st.integers(1, 3),
        "stream": st.booleans(),
        "logprobs": st.booleans(),
        "stop": st.text(max_size=3),
        "response_format": st.just({"type": "json_object"}),
        "tool_choice": st.just("required"),
        "tools": st.just([{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]),
    },
)


def ask(url: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=parameters)
def test_random_parameters(url: str, fields: dict[str, Any]) -> None:
    body = {"model": "fermion-demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 12}
    status, text = ask(url, {**body, **fields})
    assert status in (200, 400), (status, text)
    assert '"internal_error"' not in text
    assert '"engine_failure"' not in text
    status, text = ask(url, {**body, "temperature": 0, "enable_thinking": False})
    assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, "Hello! How can I help you today?")
