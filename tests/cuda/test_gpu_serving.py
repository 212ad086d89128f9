"""A server whose card breaks: every client gets an error, then the process ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from served import wait_until_ready

SERVER = """
import logging, sys, time
from pathlib import Path
from engine import cuda_driver
from server.app import serve
from server.config import load_settings

logging.basicConfig(level="INFO")
cuda_driver._LIBRARY, flag = sys.argv[1], Path(sys.argv[2])
launch = cuda_driver.CudaCard.launch

def fail(card, *arguments, **keywords):
    while not flag.exists():
        time.sleep(0.01)
    card._lib.fake_fail(b"cuLaunchKernel", 700)
    launch(card, *arguments, **keywords)

cuda_driver.CudaCard.launch = fail
settings = load_settings({"device": "gpu", "gpu_min_tokens": 1, "port": 0, "threads": 1, "no_cache": True})
sys.exit(serve(settings.server_config(), settings.engine_config()))
"""


def ask(url: str) -> tuple[int, str]:
    """Status and error code of a completion."""
    body = json.dumps({"model": "fermion-demo", "prompt": "Hello", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["code"]


def waiting(url: str) -> int:
    """Requests in the queue."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        found = re.search(r"^fermion_num_requests_waiting\S* (\d+)", response.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_a_sticky_error_reaches_every_client_and_ends_the_process(library: Path, tmp_path: Path) -> None:
    flag, deadline = tmp_path / "fail", time.monotonic() + 60
    command = [sys.executable, "-c", SERVER, str(library), str(flag)]
    with tempfile.TemporaryFile("w+") as log, ThreadPoolExecutor(3) as pool:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = wait_until_ready(server, log.fileno(), deadline)
            answers = [pool.submit(ask, url) for _ in range(3)]
            while waiting(url) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            flag.touch()
            assert [answer.result() for answer in answers] == [(500, "engine_failure")] * 3
            assert server.wait(timeout=30) == 1
        finally:
            flag.touch()
            server.kill()
            server.wait()
        log.seek(0)
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in log.read()
