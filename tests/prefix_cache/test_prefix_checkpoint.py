"""Checkpoints of running prefills, and snapshots taken ahead of demand."""

from __future__ import annotations

import numpy as np
from cache_fakes import SMALL, FakeState, disk_config, hit, make_cache, make_key, store, tokens

from prefix_cache import PAGE_TOKENS, Checkpoint, Kind, PrefixCache, Stored

IDS = tokens(1000)
STEP = 2 * PAGE_TOKENS


def advance(cache: PrefixCache, position: int, earlier: Checkpoint | None) -> Checkpoint | None:
    key = make_key(IDS)
    return cache.checkpoint(key, FakeState(key, position), position, position, earlier)


def test_a_checkpoint_moves_on_in_its_own_memory():
    """The arena holds one prompt's pages, one snapshot and one checkpoint, and never a byte more."""
    pages, state = 1000 // PAGE_TOKENS, SMALL.recurrent_blocks
    cache = make_cache(blocks=pages + 2 * state)
    store(cache, make_key(IDS), PAGE_TOKENS)
    checkpoint = None
    for position in range(STEP, 900, STEP):
        checkpoint = advance(cache, position, checkpoint)
        gauges = cache.gauges()
        assert gauges["snapshots"] == 2
        assert gauges["ram_bytes"] == (position // PAGE_TOKENS + 2 * state) * SMALL.page_bytes
        assert hit(cache, make_key(IDS)) == position
        assert cache.check_integrity() == []
    assert cache.gauges()["ram_bytes_max"] <= cache.gauges()["ram_capacity_bytes"]
    assert cache.stats.evicted_ram == {}
    checkpoint.drop()
    assert hit(cache, make_key(IDS)) == PAGE_TOKENS
    assert cache.gauges()["ram_bytes"] == (1 + state) * SMALL.page_bytes
    assert cache.check_integrity() == []


def test_the_next_snapshot_takes_the_place_of_the_checkpoint():
    cache = make_cache()
    key = make_key(IDS)
    checkpoint = advance(cache, STEP, None)
    assert cache.store(key, FakeState(key, 700), Kind.MESSAGE, 700, 700, replaces=checkpoint) is Stored.STORED
    checkpoint.drop()
    assert cache.gauges()["snapshots"] == 1
    again = advance(cache, STEP, None)
    assert cache.store(key, FakeState(key, 700), Kind.MESSAGE, 700, 700, replaces=again) is Stored.EXISTS
    assert [info.position for info in cache.inspect()] == [700]
    assert hit(cache, key) == 700
    assert cache.check_integrity() == []


def test_without_room_the_earlier_checkpoint_stays():
    cache = make_cache(blocks=4 + SMALL.recurrent_blocks)
    first = advance(cache, STEP, None)
    outcome, lease = cache.acquire(make_key(IDS))
    assert lease is not None
    assert advance(cache, 4 * STEP, first) is first
    lease.release()
    assert outcome.position == hit(cache, make_key(IDS)) == STEP
    assert cache.check_integrity() == []


def test_only_a_kept_checkpoint_counts_and_reaches_the_disk(tmp_path):
    cache = make_cache(disk=disk_config(tmp_path))
    checkpoint = advance(cache, STEP, None)
    cache.flush()
    assert cache.gauges()["snapshots_disk"] == 0
    assert cache.stats.stored == {}
    assert checkpoint.keep()
    cache.flush()
    assert cache.gauges()["snapshots_disk"] == 1
    assert cache.stats.stored == {"cancel": 1}
    cache.clear()
    assert not checkpoint.keep()


def test_a_checkpoint_on_top_of_a_snapshot_replaces_it_for_good(tmp_path):
    """What decoding made is pinned; a prefill comes by, and goes on."""
    cache = make_cache(disk=disk_config(tmp_path))
    key = make_key(IDS)
    store(cache, key, STEP, exact=PAGE_TOKENS, kind=Kind.REPLY)
    cache.flush()
    assert cache.pin(cache.inspect()[0].id)
    first = advance(cache, PAGE_TOKENS, None)
    assert advance(cache, STEP, first) is None
    (info,) = cache.inspect()
    assert (info.position, info.kind, info.provenance, info.pinned) == (STEP, "reply", "prefill", True)
    third = advance(cache, 2 * STEP, None)
    third.drop()
    assert [info.position for info in cache.inspect()] == [STEP]
    cache.flush()
    assert cache.gauges()["snapshots_disk"] == 1
    assert hit(cache, key, exact=True) == STEP
    assert cache.check_integrity() == []


def test_what_was_computed_for_a_checkpoint_that_is_gone_is_wasted():
    cache = make_cache()
    checkpoint = advance(cache, STEP, None)
    cache.clear()
    assert not checkpoint.keep(70)
    assert shadow_counts(cache) == (0, 0, 70)


def test_what_is_parked_is_dropped_by_its_owner_and_by_nobody_elses_clear():
    cache = make_cache()
    parked = cache.park([np.arange(70, dtype=np.uint8)])
    cache.clear(scope_tag=make_key(IDS, scope=b"someone").namespace.scope_tag())
    assert cache.gauges()["ram_bytes"] == 2 * SMALL.page_bytes
    parked.drop()
    parked.drop()
    assert cache.gauges()["ram_bytes"] == 0
    assert not parked.restore([np.zeros(70, np.uint8)])


def test_parked_bytes_come_back_once_and_make_room_first():
    cache = make_cache(blocks=20)
    arrays = [np.arange(50, dtype=np.uint8), np.arange(12, dtype=np.float32).reshape(3, 4)]
    parked = cache.park(arrays)
    assert cache.gauges()["ram_bytes"] == 2 * SMALL.page_bytes
    assert cache.check_integrity() == []
    back = [np.zeros_like(array) for array in arrays]
    assert parked.restore(back)
    for array, copy in zip(arrays, back, strict=True):
        assert np.array_equal(array, copy)
    assert not parked.restore(back)
    assert cache.gauges()["ram_bytes"] == 0
    first = cache.park(arrays)
    second = cache.park(arrays)
    assert not first.restore(back)
    store(cache, make_key(IDS), 640)
    store(cache, make_key(tokens(200, seed=3)), 128)
    assert not second.restore(back)
    assert cache.park([np.zeros(21 * SMALL.page_bytes, np.uint8)]) is None
    cache.park(arrays)
    cache.clear()
    assert cache.gauges()["ram_bytes"] == 0
    assert cache.check_integrity() == []


def take(cache: PrefixCache, position: int, shadow_tokens: int, kind: Kind = Kind.SHADOW) -> None:
    key = make_key(IDS)
    cache.shadow_computed(shadow_tokens)
    cache.store(key, FakeState(key, position), kind, position, position, shadow_tokens=shadow_tokens)


def shadow_counts(cache: PrefixCache) -> tuple[int, int, int]:
    return cache.stats.shadow_tokens, cache.stats.shadow_used_tokens, cache.stats.shadow_wasted_tokens


def test_what_was_computed_ahead_is_used_once_or_wasted():
    cache = make_cache()
    take(cache, 300, 300)
    assert shadow_counts(cache) == (300, 0, 0)
    assert hit(cache, make_key(IDS)) == 300
    assert hit(cache, make_key(IDS)) == 300
    assert shadow_counts(cache) == (300, 300, 0)
    take(cache, 500, 200)
    cache.clear()
    assert shadow_counts(cache) == (500, 300, 200)


def test_a_shadow_built_upon_another_stands_for_both():
    cache = make_cache()
    take(cache, 300, 300)
    outcome, lease = cache.acquire(make_key(IDS), shadow=True)
    assert lease is not None
    inherited = lease.inherit_shadow()
    lease.release()
    assert (outcome.position, inherited) == (300, 300)
    cache.shadow_computed(200)
    key = make_key(IDS)
    cache.store(key, FakeState(key, 500), Kind.SHADOW, 500, 500, shadow_tokens=200 + inherited)
    assert hit(cache, key) == 500
    cache.clear()
    assert shadow_counts(cache) == (500, 500, 0)


def test_looking_ahead_counts_and_teaches_nothing():
    cache = make_cache()
    store(cache, make_key(IDS), 300)
    before = cache.stats.as_dict()
    outcome, lease = cache.acquire(make_key(IDS), shadow=True)
    assert outcome.position == 300
    assert lease is not None
    lease.release()
    cache.acquire(make_key(tokens(100, seed=5)), shadow=True)
    after = cache.stats.as_dict()
    assert {name for name in after if after[name] != before[name]} <= {"load_seconds"}
    assert [info.hits for info in cache.inspect()] == [0]
