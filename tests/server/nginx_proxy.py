"""nginx with its default proxy settings on a free loopback port, and a client that notices silences."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_client import CHAT

# Debian keeps it out of the search path of ordinary users.
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

# Only places are set, so that no privileges are needed; how it proxies is nginx's own default.
_CONFIGURATION = """
daemon off;
master_process off;
pid {directory}/nginx.pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://127.0.0.1:{upstream};
            {more}
        }}
    }}
}}
"""


@contextmanager
def proxied(directory: Path, upstream: int, *, more: str = "") -> Iterator[int]:
    """The port of an nginx in front of port `upstream` while the block runs. more: directives of its location."""
    assert NGINX is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = directory / "nginx.conf"
    file.write_text(_CONFIGURATION.format(directory=directory, port=port, upstream=upstream, more=more))
    log = directory / "error.log"
    process = subprocess.Popen([NGINX, "-e", str(log), "-p", str(directory), "-c", str(file)])
    try:
        for _ in range(500):
            assert process.poll() is None, log.read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.01)
        yield port
    finally:
        process.terminate()
        process.wait(10)


@dataclass(frozen=True)
class TimedAnswer:
    """A raw HTTP answer. longest_silence_s: from the request to its end, the longest time without a byte."""

    data: bytes
    seconds: float
    longest_silence_s: float

    @property
    def status(self) -> int:
        return int(self.data.split(b" ", 2)[1])


def timed_chat(port: int, body: dict[str, Any], timeout_s: float) -> TimedAnswer:
    """A chat request on a connection of its own, read byte by byte as it comes. TimeoutError after a long silence."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(head.encode() + data)
        started = last = time.monotonic()
        received, longest = b"", 0.0
        while True:
            part = connection.recv(65536)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if not part:
                return TimedAnswer(received, now - started, longest)
            received += part
