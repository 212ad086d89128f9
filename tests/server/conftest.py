"""Fixtures of the server tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import live_server
import pytest
from live_server import LiveServer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the text files of a checkpoint."""
    directory = tmp_path_factory.mktemp("checkpoint")
    live_server.write_checkpoint_texts(directory)
    return directory


@pytest.fixture(scope="session")
def _shared(checkpoint: Path) -> Iterator[LiveServer]:
    live = live_server.start(checkpoint)
    yield live
    live.stop()


@pytest.fixture
def live(_shared: LiveServer) -> LiveServer:
    """The shared server, its engine reset to defaults."""
    engine = _shared.engine
    engine.reply, engine.layers, engine.layer_s, engine.token_s = engine.echo, 2, 0.0, 0.0
    engine.cached, engine.error = 0, None
    engine.requests.clear()
    engine.outcomes.clear()
    return _shared


@pytest.fixture
def start_server(checkpoint: Path) -> Iterator[Callable[..., LiveServer]]:
    """Starts servers of one's own; they stop with the test."""
    servers: list[LiveServer] = []

    def start(**settings: Any) -> LiveServer:
        servers.append(live_server.start(checkpoint, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
