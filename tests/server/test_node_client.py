"""The official Node client, installed from its lock file into the git-ignored build folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import live_server
import pytest
from live_server import MODEL

SOURCES = Path(__file__).parent / "node"
FOLDER = Path(__file__).parents[2] / "build" / "node-client"
SAID = "hm\n</think>\n\nHello.\n\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def client_script() -> Path:
    """client.mjs beside an installed `openai` package."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    lock = (SOURCES / "package-lock.json").read_bytes()
    stamp = FOLDER / "installed-lock.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not stamp.exists() or stamp.read_bytes() != lock:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SOURCES / name, FOLDER / name)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"npm ci failed: {done.stderr[-300:]}")
        stamp.write_bytes(lock)
    return Path(shutil.copy(SOURCES / "client.mjs", FOLDER / "client.mjs"))


@pytest.fixture(scope="module")
def results(client_script: Path, checkpoint: Path) -> Any:
    live = live_server.start(checkpoint)
    try:
        live.engine.say(SAID)
        command = ["node", str(client_script), f"{live.url}/v1", MODEL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    finally:
        live.stop()


def test_models(results: Any) -> None:
    assert results["models"] == [MODEL]


def test_whole(results: Any) -> None:
    message = results["whole"]["choices"][0]["message"]
    assert message["reasoning_content"] == "hm"
    assert message["content"].startswith("Hello.")


def test_stream_equals_whole(results: Any) -> None:
    completion = results["streamed"]["completion"]
    assert completion["choices"][0]["message"]["role"] == "assistant"
    assert completion["choices"][0]["message"]["content"] == results["whole"]["choices"][0]["message"]["content"]
    assert completion["choices"][0]["finish_reason"] == "stop"
    assert completion["usage"] == results["whole"]["usage"]
    assert results["streamed"]["reasoning"] == "hm"


def test_progress_chunks_do_no_harm(results: Any) -> None:
    assert results["progress"]["completion"]["choices"][0]["message"]["content"].startswith("Hello.")


def test_tool_calls(results: Any) -> None:
    choice = results["tools"]["completion"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Hello."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_time", "arguments": "{}"}
    assert call["type"] == "function"


def test_errors(results: Any) -> None:
    assert results["notFound"] == {"name": "NotFoundError", "status": 404, "code": "model_not_found"}
    assert results["invalid"] == {"name": "BadRequestError", "status": 400, "code": "invalid_value"}
    assert results["tooLong"] == {"name": "BadRequestError", "status": 400, "code": "context_length_exceeded"}


def test_abort(results: Any) -> None:
    assert results["aborted"] is True
