"""The cache in front of real (tiny, random) models: a warm run has the bits of a cold one, whatever happened before."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from cache_fakes import disk_config
from cached_model import MARKERS, CachedModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model import Model
from prefix_cache import Cuts, canonical_cuts, snap

ROOMY, TIGHT = 2000, 24


def load(name: str, directory: Path, **settings) -> Model:
    make = tiny_models.packed_checkpoint if name == "packed" else lambda d: tiny_models.vector_checkpoint(d, name)
    return tiny_models.load_model(make(directory), pass_tokens=128, **settings)


@pytest.fixture(scope="module", params=["a", "b", "packed"])
def model(request, tmp_path_factory):
    loaded = load(request.param, tmp_path_factory.mktemp(request.param))
    yield loaded
    loaded.close()


def text(seed: int, count: int) -> list[int]:
    """Ordinary tokens: none that the template gives a meaning."""
    return np.random.default_rng(seed).integers(10, 380, count).tolist()


def turn(seed: int, count: int, role: int = 4) -> list[int]:
    return [MARKERS.turn_start, role, MARKERS.newline, *text(seed, count), 5]


def prompt(*parts: list[int]) -> tuple[list[int], list[int]]:
    """Token ids ending in the assistant's header, and the ends of the parts."""
    ids: list[int] = []
    ends = []
    for part in [*parts, [MARKERS.turn_start, MARKERS.assistant, MARKERS.newline]]:
        ids += part
        ends.append(len(ids))
    ids += [6, MARKERS.newline]
    return ids, ends


def cold_logits(model: Model, ids: list[int]) -> np.ndarray:
    oracle = CachedModel(model, None)
    run = oracle.start(ids, exact=True)
    oracle.prefill(run, [])
    return run.logits


def warm(server: CachedModel, ids, ends, *, exact=True):
    run = server.start(ids, exact=exact)
    server.prefill(run, ends)
    logits, position = run.logits, run.outcome.position
    run.close()
    return logits, position


def test_resume_at_every_exact_position_has_the_bits_of_a_cold_run(model):
    ids, ends = prompt(turn(1, 150), turn(2, 333))
    expected = cold_logits(model, ids)
    cuts = canonical_cuts(np.array(ids, np.int32), MARKERS)
    for stop in sorted({snap(p, cuts, Cuts.GRID) for p in range(1, len(ids))} - {0}):
        server = CachedModel(model, ROOMY)
        first = server.start(ids, exact=True)
        server.prefill(first, [], stop)
        first.close()
        logits, position = warm(server, ids, ends)
        assert position == stop
        assert np.array_equal(logits, expected), f"resumed at {stop}"


def test_repeat_recomputes_the_generation_header_only(model):
    ids, ends = prompt(turn(1, 100), turn(2, 200))
    server = CachedModel(model, ROOMY)
    first, position = warm(server, ids, ends)
    assert position == 0
    second, position = warm(server, ids, ends)
    assert position == len(ids) - 2
    assert np.array_equal(first, second)
    assert np.array_equal(first, cold_logits(model, ids))


def test_restart_keeps_the_bits(model, tmp_path):
    ids, ends = prompt(turn(1, 100), turn(2, 200))
    server = CachedModel(model, ROOMY, disk_config(tmp_path))
    first, _ = warm(server, ids, ends)
    server.restart()
    second, position = warm(server, ids, ends)
    assert position == len(ids) - 2
    assert server.cache.stats.hits_by_tier == {"disk": 1}
    assert np.array_equal(first, second)
    server.cache.close()


def test_decoded_snapshot_serves_the_next_turn_but_no_exact_request(model):
    server = CachedModel(model, ROOMY)
    ids, ends = prompt(turn(1, 100), turn(2, 200))
    run = server.start(ids, exact=False)
    server.prefill(run, ends)
    reply = server.decode(run, 20)
    run.close()
    longer, longer_ends = prompt(ids + reply + [5], turn(3, 50))
    approximate, position = warm(server, longer, longer_ends, exact=False)
    assert position == len(ids) + 20
    exact, position = warm(server, longer, longer_ends, exact=True)
    assert position == len(ids) - 2
    expected = cold_logits(model, longer)
    assert np.array_equal(exact, expected)
    assert np.abs(approximate - expected).max() < 0.1 * np.abs(expected).max()


def test_zeroed_recurrent_state_would_be_noticed(model):
    """The comparison above can fail: a hit without its recurrent payload gives other logits."""
    ids, ends = prompt(turn(1, 100), turn(2, 200))
    server = CachedModel(model, ROOMY)
    expected, _ = warm(server, ids, ends)
    run = server.start(ids, exact=True)
    run.state.ssm[:] = 0
    server.prefill(run, ends)
    assert not np.array_equal(run.logits, expected)
    run.close()


REQUEST = st.fixed_dictionaries({
    "base": st.integers(0, 7), "keep": st.integers(1, 3), "seed": st.integers(0, 3),
    "size": st.sampled_from([1, 40, 130, 200]), "edit": st.one_of(st.none(), st.integers(0, 199)),
    "stop": st.one_of(st.none(), st.none(), st.floats(0.1, 1.0)), "reply": st.sampled_from([0, 0, 9]),
    "exact": st.sampled_from([True, True, False]),
    "then": st.sampled_from(["", "flush", "flush", "restart", "lose a file", "clear"]),
})  # fmt: skip


class Conversations:
    """A random tree of messages with edits, branches, cancels, evictions, restarts and tier moves."""

    def __init__(self, model: Model, totals: Counter[str]) -> None:
        self.model, self.totals = model, totals
        self.folder = Path(tempfile.mkdtemp())
        page = CachedModel(model, None).geometry.page_bytes
        self.server = CachedModel(model, TIGHT, disk_config(self.folder, capacity_bytes=4 * TIGHT * page))
        self.known: list[list[list[int]]] = [[turn(0, 200)]]
        self.cold: dict[tuple[int, ...], np.ndarray] = {}

    def expected(self, ids: list[int]) -> np.ndarray:
        name = tuple(ids)
        if name not in self.cold:
            self.cold[name] = cold_logits(self.model, ids)
        return self.cold[name]

    def request(self, *, base, keep, seed, size, edit, stop, reply, exact, then) -> None:
        """Some earlier conversation cut back, one more message, perhaps an edit inside the last, perhaps a cancel."""
        parts = [list(p) for p in self.known[-1 - base % len(self.known)][:keep]]
        if edit is None:
            parts.append(turn(seed, size))
        elif edit < len(parts[-1]) - 4:
            parts[-1][3 + edit] = 9
        self.known.append(parts)
        ids, ends = prompt(*parts)
        run = self.server.start(ids, exact=exact)
        self.totals["resumed"] += run.outcome.position > 0
        self.server.prefill(run, ends, int(len(ids) * stop) if stop is not None else None)
        if run.state.position == len(ids):
            if run.exact_tokens == len(ids):
                self.totals["compared"] += run.outcome.position > 0
                assert np.array_equal(run.logits, self.expected(ids)), f"resumed at {run.outcome}"
            else:
                assert not exact
            if reply:
                generated = self.server.decode(run, reply)
                self.known.append([ids + generated + [5]])
        run.close()
        self.then(then)
        assert self.server.cache.check_integrity() == []

    def then(self, what: str) -> None:
        if what == "flush":
            self.server.cache.flush()
        elif what == "restart":
            self.count()
            self.server.restart()
        elif what == "clear":
            self.server.cache.clear()
        elif what == "lose a file":
            for path in sorted(p for p in self.folder.rglob("*") if p.suffix in (".kv", ".snap"))[:1]:
                path.unlink()

    def count(self) -> None:
        stats = self.server.cache.stats
        self.totals.update(stats.hits_by_tier)
        self.totals["evicted"] += sum(stats.evicted_ram.values()) + sum(stats.evicted_disk.values())

    def close(self) -> None:
        self.count()
        gauges = self.server.cache.gauges()
        assert gauges["ram_bytes_max"] <= gauges["ram_capacity_bytes"]
        self.server.cache.close()
        shutil.rmtree(self.folder)


def run_conversations(model: Model, examples: int) -> None:
    totals: Counter[str] = Counter()

    @settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(REQUEST, min_size=10, max_size=18))
    def run(requests) -> None:
        conversations = Conversations(model, totals)
        try:
            for request in requests:
                conversations.request(**request)
        finally:
            conversations.close()

    run()
    for event in ("ram", "disk", "evicted", "compared"):
        assert totals[event] >= examples // 2, f"{event}: too rare for the test to mean anything ({totals})"


def test_any_history_gives_the_bits_of_a_cold_run(model):
    run_conversations(model, 6)


@pytest.mark.exhaustive
def test_many_histories_give_the_bits_of_a_cold_run(model):
    run_conversations(model, 300)
