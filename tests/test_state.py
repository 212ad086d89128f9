"""The state of a sequence: sizes, growth by pages, and the view that snapshots take of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_models import VECTORS

from engine.config import ModelConfig, parse_config
from engine.state import SequenceState, page_bytes, recurrent_bytes


@pytest.fixture
def config() -> ModelConfig:
    return parse_config(VECTORS / "a.json", json.loads((VECTORS / "a.json").read_text()))


def test_sizes(config: ModelConfig) -> None:
    assert page_bytes(config, kv_f32=False) == 1 * 2 * 2 * 64 * 32 * 2
    assert page_bytes(config, kv_f32=True) == 2 * page_bytes(config, kv_f32=False)
    assert recurrent_bytes(config) == 3 * (3 * 128 + 4 * 16 * 16) * 4


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (1000, 16)])
def test_pages_are_made_as_needed(config: ModelConfig, tokens: int, pages: int) -> None:
    state = SequenceState(config)
    state.reserve(tokens)
    state.reserve(tokens)
    assert len(state.pages) == pages
    assert state.nbytes == recurrent_bytes(config) + pages * page_bytes(config, kv_f32=False)


def test_arrays_start_on_cache_lines_and_empty(config: ModelConfig) -> None:
    state = SequenceState(config)
    state.reserve(1)
    for array in (state.conv, state.ssm, *state.pages):
        assert array.ctypes.data % 64 == 0
        assert not array.any()


def test_pages_that_share_an_allocation_do_not_overlap(config: ModelConfig) -> None:
    state = SequenceState(config)
    state.reserve(20 * 64)
    for number, page in enumerate(state.pages):
        assert not page.any()
        page[:] = number + 1
    for number, (page, address) in enumerate(zip(state.pages, state.page_addresses, strict=True)):
        assert (page == number + 1).all()
        assert page.ctypes.data == address
        assert len(page) == page_bytes(config, kv_f32=False)


def test_snapshot_view_is_the_state_itself(config: ModelConfig) -> None:
    state = SequenceState(config)
    state.reserve(1)
    parts = state.recurrent()
    assert sum(part.nbytes for part in parts) == recurrent_bytes(config)
    parts[1][:4] = np.frombuffer(np.float32(2.5).tobytes(), np.uint8)
    assert state.ssm.flat[0] == 2.5
    assert state.page(0) is state.pages[0]
    assert set(state.layer_positions()) == {0}


def test_adopted_pages_are_used_in_place_and_the_tail_is_copied(config: ModelConfig) -> None:
    size = page_bytes(config, kv_f32=False)
    full = [np.full(size, number, np.uint8) for number in range(20)]  # more than the addresses first have room for
    tail = np.full(size, 77, np.uint8)
    for page in (*full, tail):
        page.flags.writeable = False
    state = SequenceState(config)
    state.adopt(full, tail)
    state.reserve(20 * 64 + 65)
    assert all(mine is theirs for mine, theirs in zip(state.pages, full, strict=False))
    assert state.page_addresses.tolist() == [page.ctypes.data for page in state.pages]
    assert len(state.pages) == 22
    state.pages[20][0] = 1
    assert (tail[0], state.pages[20][1]) == (77, 77)


def test_pages_without_a_tail(config: ModelConfig) -> None:
    state = SequenceState(config)
    state.adopt([np.zeros(state.page_bytes, np.uint8)], None)
    assert len(state.pages) == 1
