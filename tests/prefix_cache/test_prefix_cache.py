import threading

import numpy as np
import pytest
from cache_fakes import SMALL, FakeState, assert_right, disk_config, hit, make_cache, make_key, store, tokens

from prefix_cache import CacheError, Kind, Provenance, Stored

IDS = tokens(1000)


def test_deepest_snapshot_on_the_prefix_is_found_and_its_bytes_are_right():
    cache = make_cache()
    for position in (1, 63, 64, 65, 128, 200, 640, 700):
        store(cache, make_key(IDS), position)
    for n, expected in ((1, 0), (2, 1), (64, 63), (65, 64), (66, 65), (300, 200), (700, 640), (701, 700), (1000, 700)):
        assert hit(cache, make_key(IDS[:n])) == expected
    assert cache.check_integrity() == []


def test_never_deeper_than_the_last_but_one_token():
    cache = make_cache()
    store(cache, make_key(IDS[:128]), 128)
    assert hit(cache, make_key(IDS[:128])) == 0
    assert hit(cache, make_key(IDS[:129])) == 128


def test_diverging_prompts_fall_back_to_the_common_snapshot():
    cache = make_cache()
    for position in (100, 300, 500):
        store(cache, make_key(IDS), position)
    for diverge, expected in ((499, 300), (299, 100), (300, 300), (101, 100), (100, 100), (99, 0)):
        other = IDS[:diverge] + [5000] * 300
        assert hit(cache, make_key(other)) == expected


@pytest.mark.parametrize("wrong", [0, 1])
def test_snapshot_of_a_layer_at_another_position_is_refused(wrong):
    """A cancelled or speculated step leaves layers apart: key N over a state of N - 1 must not be stored."""
    cache = make_cache()
    state = FakeState(make_key(IDS), 100)
    state.layers[wrong] = 99
    with pytest.raises(CacheError, match=f"layer {wrong} is at position 99"):
        cache.store(make_key(IDS), state, Kind.CANCEL, 100, 100)
    assert cache.gauges()["ram_bytes"] == 0


@pytest.mark.parametrize("position", [0, -1, 1001])
def test_position_outside_the_prompt_is_refused(position):
    with pytest.raises(CacheError, match="position"):
        make_cache().store(make_key(IDS), FakeState(make_key(IDS), 100), Kind.MESSAGE, position, 0)


def test_payload_of_wrong_size_leaves_nothing_behind():
    cache = make_cache()
    state = FakeState(make_key(IDS), 100)
    state.recurrent = lambda: [np.zeros(199, np.uint8)]
    with pytest.raises(CacheError, match="payload has 199"):
        cache.store(make_key(IDS), state, Kind.MESSAGE, 100, 100)
    assert cache.gauges()["ram_bytes"] == 0
    assert cache.check_integrity() == []
    assert hit(cache, make_key(IDS)) == 0


def test_source_that_fails_half_way_leaves_nothing_behind():
    cache = make_cache()
    store(cache, make_key(IDS), 128)
    before = cache.gauges()["ram_bytes"]
    state = FakeState(make_key(IDS), 300)

    def fail():
        raise RuntimeError("device lost")

    state.recurrent = fail
    with pytest.raises(RuntimeError):
        cache.store(make_key(IDS), state, Kind.MESSAGE, 300, 300)
    assert cache.gauges()["ram_bytes"] == before
    assert cache.check_integrity() == []


def test_kv_is_stored_once_per_prefix():
    cache = make_cache()
    store(cache, make_key(IDS), 640)
    one = cache.gauges()["ram_bytes"]
    store(cache, make_key(IDS), 576)
    assert cache.gauges()["ram_bytes"] - one == SMALL.recurrent_blocks * 64
    assert store(cache, make_key(IDS), 576) is Stored.EXISTS
    assert cache.check_integrity() == []


def test_snapshot_is_immutable_and_read_only():
    cache = make_cache()
    store(cache, make_key(IDS), 100)
    _, lease = cache.acquire(make_key(IDS))
    with pytest.raises(ValueError, match="read-only"):
        lease.pages[0][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        lease.tail[0] = 1
    lease.release()
    lease.release()
    assert cache.check_integrity() == []


def test_leased_memory_survives_clear_and_eviction():
    cache = make_cache(blocks=30)
    store(cache, make_key(IDS), 100)
    _, lease = cache.acquire(make_key(IDS))
    cache.clear()
    for seed in range(1, 20):
        store(cache, make_key(tokens(300, seed)), 300)
    assert_right(lease, make_key(IDS))
    lease.release()
    assert hit(cache, make_key(IDS)) == 0
    assert cache.check_integrity() == []


# ---- provenance ----


def test_exact_requests_get_prefilled_states_only():
    cache = make_cache()
    key = make_key(IDS)
    store(cache, key, 200)
    store(cache, key, 500, exact=300, kind=Kind.REPLY)
    outcome, lease = cache.acquire(key)
    assert (lease.position, lease.provenance, lease.exact_tokens) == (500, Provenance.DECODE, 256)
    lease.release()
    outcome, lease = cache.acquire(key, exact=True)
    assert (lease.position, lease.provenance, lease.exact_tokens) == (200, Provenance.PREFILL, 200)
    assert outcome.miss_reason == "exact_only"
    lease.release()


def test_prefilled_and_decoded_pages_of_the_same_tokens_do_not_mix():
    cache = make_cache()
    key = make_key(IDS)
    store(cache, key, 500, exact=200)
    store(cache, key, 600, exact=600)
    assert hit(cache, make_key(IDS[:550])) == 500
    assert hit(cache, key, exact=True) == 600
    assert hit(cache, key) == 600
    assert cache.check_integrity() == []


def test_prefilled_snapshot_replaces_a_decoded_one_and_not_the_reverse():
    cache = make_cache()
    key = make_key(IDS)
    store(cache, key, 500, exact=200)
    assert store(cache, key, 500, exact=500) is Stored.STORED
    assert store(cache, key, 500, exact=200) is Stored.EXISTS
    assert hit(cache, key, exact=True) == 500
    assert cache.check_integrity() == []
    assert cache.gauges()["ram_bytes"] == (8 + SMALL.recurrent_blocks) * 64 - 64 + 64


def test_replacement_keeps_the_pin():
    cache = make_cache(blocks=40)
    key = make_key(IDS)
    store(cache, key, 300, exact=200)
    cache.pin(cache.inspect()[0].id)
    store(cache, key, 300, exact=300)
    (info,) = cache.inspect()
    assert (info.provenance, info.pinned) == ("prefill", True)


# ---- reasons ----


def test_reasons_for_a_miss():
    cache = make_cache(blocks=28)
    key = make_key(IDS[:700])
    assert cache.acquire(key)[0].miss_reason == "cold"
    store(cache, key, 650)
    outcome, _ = cache.acquire(make_key(IDS[:400]))
    assert (outcome.miss_reason, outcome.matched) == ("no_snapshot", 399)
    assert cache.acquire(key, read=False)[0].miss_reason == "disabled"
    outcome, lease = cache.acquire(key)
    assert outcome.miss_reason is None
    lease.release()
    for seed in (1, 2):
        store(cache, make_key(tokens(900, seed)), 900)
    outcome, lease = cache.acquire(key)
    assert (lease, outcome.miss_reason, outcome.matched) == (None, "evicted", 640)
    assert cache.stats.lost_tokens["evicted"] == 640
    assert cache.stats.ghost_hits == 1


def test_short_recompute_beats_a_slow_load():
    cache = make_cache()
    store(cache, make_key(IDS), 200)
    for _ in range(100):
        cache.observe_prefill(1000, 1e-9)
    outcome, lease = cache.acquire(make_key(IDS))
    assert (lease, outcome.miss_reason) == (None, "recompute_cheaper")


def test_peek_changes_nothing():
    cache = make_cache()
    store(cache, make_key(IDS), 200)
    before = cache.stats.as_dict()
    outcome = cache.peek(make_key(IDS))
    assert (outcome.position, outcome.tier, outcome.recomputed) == (200, "ram", 800)
    assert cache.stats.as_dict() == before


def test_partial_page_match_counts_as_ideal():
    cache = make_cache()
    store(cache, make_key(IDS), 320)
    store(cache, make_key(IDS), 64)
    outcome = cache.peek(make_key(IDS[:150] + [5000] * 100))
    assert (outcome.matched, outcome.position) == (150, 64)


# ---- capacity ----


def test_arena_that_cannot_hold_a_snapshot_is_refused():
    with pytest.raises(CacheError, match="one snapshot needs"):
        make_cache(blocks=4)


def test_snapshot_larger_than_the_arena_is_not_stored_and_evicts_nothing():
    cache = make_cache(blocks=30)
    store(cache, make_key(IDS), 300)
    big = make_key(tokens(5000, 1))
    assert store(cache, big, 5000) is Stored.NO_ROOM
    assert hit(cache, make_key(IDS)) == 300
    assert cache.stats.store_no_room == 1


def test_leases_forbid_eviction_and_the_rest_stays():
    cache = make_cache(blocks=24)
    store(cache, make_key(IDS), 640)
    _, lease = cache.acquire(make_key(IDS))
    store(cache, make_key(tokens(200, 1)), 200)
    assert store(cache, make_key(tokens(900, 2)), 900) is Stored.NO_ROOM
    assert hit(cache, make_key([*tokens(200, 1), 1])) == 200
    lease.release()
    assert store(cache, make_key(tokens(900, 2)), 900) is Stored.STORED
    assert cache.check_integrity() == []


def test_cap_holds_while_a_copy_is_in_flight():
    cache = make_cache(blocks=24)
    cap = 24 * 64
    store(cache, make_key(IDS), 640)
    state = FakeState(make_key(tokens(900, 1)), 900)
    seen = []
    original = state.recurrent

    def during():
        seen.append(cache.gauges()["ram_bytes"])
        return original()

    state.recurrent = during
    cache.store(make_key(tokens(900, 1)), state, Kind.MESSAGE, 900, 900)
    assert seen == [(14 + SMALL.recurrent_blocks + 1) * 64]
    assert cache.gauges()["ram_bytes_max"] <= cap


def test_pins_outlive_pressure_and_are_bounded():
    cache = make_cache(blocks=39)
    store(cache, make_key(IDS), 300)
    (info,) = cache.inspect()
    assert cache.pin(info.id)
    for seed in range(1, 12):
        store(cache, make_key(tokens(400, seed)), 400)
    assert hit(cache, make_key(IDS)) == 300
    biggest = next(i for i in cache.inspect() if i.position == 400)
    for other in cache.inspect():
        if other.id != info.id:
            with pytest.raises(CacheError, match="allowed are"):
                cache.pin(other.id)
    assert cache.pin(info.id, False)
    assert not cache.pin("no such id")
    assert biggest.ram_bytes > 0
    for seed in range(20, 40):
        store(cache, make_key(tokens(400, seed)), 400)
    assert hit(cache, make_key(IDS)) == 0


def test_admin_calls_stay_in_their_scope():
    cache = make_cache()
    mine, yours = make_key(IDS, scope=b"me"), make_key(IDS, scope=b"you")
    store(cache, mine, 200)
    store(cache, yours, 300)
    tag = mine.namespace.scope_tag()
    assert [i.position for i in cache.inspect(scope_tag=tag)] == [200]
    (other,) = cache.inspect(scope_tag=yours.namespace.scope_tag())
    assert not cache.pin(other.id, scope_tag=tag)
    assert cache.clear(scope_tag=tag) == 1
    assert hit(cache, mine) == 0
    assert hit(cache, yours) == 300
    assert [i.position for i in cache.inspect(yours)] == [300]


def test_ghosts_are_bounded_and_forgotten_nodes_are_pruned():
    cache = make_cache(blocks=24, ghosts=3)
    for seed in range(20):
        store(cache, make_key(tokens(500, seed)), 500)
    assert cache.gauges()["ghosts"] == 3
    assert cache.check_integrity() == []
    cache.clear()
    assert cache._index.roots == {}


def test_sampling_and_seed_are_not_in_the_key():
    """Two requests that differ only in how they sample build the same key: there is nowhere to put sampling."""
    assert set(make_key(IDS).namespace.__slots__) == {"fingerprint", "scope", "salt"}


# ---- threads ----


@pytest.mark.parametrize("with_disk", [False, True])
def test_readers_and_writers_from_many_threads(tmp_path, with_disk):
    cache = make_cache(blocks=60, disk=disk_config(tmp_path, capacity_bytes=200_000) if with_disk else None)
    cache.start()
    errors: list[BaseException] = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                ids = tokens(300, int(rng.integers(4)))
                if rng.random() < 0.5:
                    position = int(rng.integers(1, 300))
                    store(cache, make_key(ids), position, exact=position if rng.random() < 0.7 else 64)
                else:
                    hit(cache, make_key(ids), exact=bool(rng.random() < 0.5))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.close()
    assert errors == []
    assert cache.check_integrity() == []
    assert cache.gauges()["ram_bytes_max"] <= 60 * 64
    assert cache.stats.hits > 0
    assert cache.stats.disk_corrupt == 0
    assert (cache.stats.disk_writes > 0) == with_disk
