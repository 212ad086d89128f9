"""Which processors and how much memory: topology, quotas and limits as Linux tells them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tiny_models import VECTORS

from engine.config import EngineConfig, parse_config
from engine.errors import ConfigError
from engine.placement import (
    PICTURE_ROWS_BYTES,
    available_bytes,
    choose_threads,
    cpu_quota,
    memory_nodes,
    physical_cpus,
    place,
    spare_bytes,
)
from engine.state import recurrent_bytes

MODEL = parse_config(VECTORS / "a.json", json.loads((VECTORS / "a.json").read_text()))


def topology(root: Path, siblings: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        folder = root / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    return root


def test_one_processor_per_core(tmp_path: Path) -> None:
    root = topology(tmp_path, {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"})
    assert physical_cpus(range(8), root) == (0, 1, 2, 3)
    assert physical_cpus({4, 5, 1}, root) == (1, 4)
    assert physical_cpus({3, 7}, root) == (3,)


def test_untold_topology_counts_processors(tmp_path: Path) -> None:
    assert physical_cpus({2, 0}, tmp_path) == (0, 2)


@pytest.mark.parametrize(
    ("has_memory", "allowed", "nodes"),
    [
        ("0\n", "0", (0,)),
        ("0-1\n", "0-1", (0, 1)),
        ("0-3,8\n", "1-2,8-9", (1, 2, 8)),  # a container on some of the nodes
        ("0,70\n", "0-127", (0,)),
        ("\n", "0", ()),
        ("junk\n", "0", ()),
    ],
)
def test_memory_nodes(tmp_path: Path, has_memory: str, allowed: str, nodes: tuple[int, ...]) -> None:
    (tmp_path / "has_memory").write_text(has_memory)
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nMems_allowed:\t1\nMems_allowed_list:\t{allowed}\n")
    assert memory_nodes(tmp_path, status) == nodes
    assert memory_nodes(tmp_path / "nothing", status) == ()


@pytest.mark.parametrize(("text", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("junk", None)])
def test_quota_of_control_groups(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_quota_of_old_control_groups(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == 2.0
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(tmp_path) is None


def test_threads_by_default_and_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.placement._ALLOWED_CPUS", frozenset(range(8)))
    monkeypatch.setattr("engine.placement.physical_cpus", lambda allowed: (0, 2, 4, 6))
    monkeypatch.setattr("engine.placement.cpu_quota", lambda: None)
    assert choose_threads(None) == (4, (0, 2, 4, 6))
    assert choose_threads(2) == (2, (0, 2))
    assert choose_threads(5) == (5, None)
    assert choose_threads(8) == (8, None)
    with pytest.raises(ConfigError, match="threads is 9, this process may use 8 processors"):
        choose_threads(9)
    monkeypatch.setattr("engine.placement.cpu_quota", lambda: 2.5)
    assert choose_threads(None) == (2, None)
    monkeypatch.setattr("engine.placement.cpu_quota", lambda: 0.5)
    assert choose_threads(None) == (1, None)


def test_available_memory_respects_the_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16000 kB\nMemAvailable:    8000 kB\n")
    assert available_bytes(meminfo, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\nfile 100000\n")
    assert available_bytes(meminfo, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    assert available_bytes(meminfo, tmp_path) == 600_000


def test_the_prefix_cache_takes_from_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.placement.available_bytes", lambda: 100 << 20)
    settings = EngineConfig(threads=1)
    model = dataclasses.replace(MODEL, max_position_embeddings=1 << 24, vision=None)
    alone, beside = place(model, settings, 10 << 20), place(model, settings, 10 << 20, 40 << 20)
    per_token = alone.kv_bytes_per_token
    assert (alone.context_length - beside.context_length) * per_token == pytest.approx(40 << 20, rel=0.01)
    spare = spare_bytes(model, settings, 10 << 20)
    assert spare == int((100 << 20) * 0.9) - (10 << 20) - recurrent_bytes(model)
    assert spare_bytes(model, settings, 1 << 30) == 0


def test_room_for_pictures_is_kept_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.placement.available_bytes", lambda: 1 << 30)
    settings = EngineConfig(threads=1)
    blind = dataclasses.replace(MODEL, vision=None)
    assert spare_bytes(blind, settings, 0) - spare_bytes(MODEL, settings, 0) == PICTURE_ROWS_BYTES


def test_a_context_longer_than_the_models_is_refused() -> None:
    longest = MODEL.max_position_embeddings
    assert place(MODEL, EngineConfig(threads=1, context_length=longest), 0).context_length == longest
    with pytest.raises(ConfigError, match=f"context_length is {longest + 1} tokens, this model has at most {longest}"):
        place(MODEL, EngineConfig(threads=1, context_length=longest + 1), 0)
