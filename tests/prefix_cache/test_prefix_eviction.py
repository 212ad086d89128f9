import pytest
from cache_fakes import disk_config, hit, make_cache, make_key, store, tokens
from eviction_rules import GreedyDualSizeFrequency, LeastRecentlyUsed, replay
from traffic import Traffic

from prefix_cache import Kind
from prefix_cache.eviction import LearnedHazard


def test_kinds_that_get_hits_are_kept_longer():
    rule = LearnedHazard()
    for _ in range(20):
        rule.born(Kind.SYSTEM)
        rule.born(Kind.CANCEL)
        rule.hit(Kind.SYSTEM, True, 10)
    system, cancel = (rule.score(kind, True, 5, 0, 1000.0, 64) for kind in (Kind.SYSTEM, Kind.CANCEL))
    assert system > 10 * cancel


def test_worth_grows_with_saved_tokens_and_falls_with_bytes_and_age():
    rule = LearnedHazard()
    base = rule.score(Kind.MESSAGE, True, 5, 0, 1000.0, 64)
    assert rule.score(Kind.MESSAGE, True, 5, 0, 2000.0, 64) > base
    assert rule.score(Kind.MESSAGE, True, 5, 1, 1000.0, 64) > base
    assert rule.score(Kind.MESSAGE, True, 5, 0, 1000.0, 128) < base
    assert rule.score(Kind.MESSAGE, True, 50, 0, 1000.0, 64) < base


def test_ages_beyond_all_buckets_are_scored():
    rule = LearnedHazard()
    rule.hit(Kind.MESSAGE, True, 1 << 60)
    assert rule.score(Kind.MESSAGE, True, 1 << 60, 0, 1.0, 1) > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_learned_rule_is_not_worse_than_gdsf_and_lru_on_a_short_stream(seed):
    rates = [
        replay(Traffic(seed).requests(chats=6, agents=1, documents=8), 1.0, rule).rate
        for rule in (None, GreedyDualSizeFrequency(), LeastRecentlyUsed())
    ]
    assert rates[0] >= rates[1] - 0.01
    assert rates[0] > rates[2]


def test_many_small_snapshots_are_evicted_in_batches(tmp_path):
    """Scoring all of thousands of snapshots for each victim would cost more than a small model's prefill."""
    cache = make_cache(3000, disk=disk_config(tmp_path, capacity_bytes=3_000_000))
    calls = []
    score = cache._index.scorer.score
    cache._index.scorer.score = lambda *args: calls.append(0) or score(*args)
    for seed in range(1500):
        assert store(cache, make_key(tokens(70, seed)), 70) == "stored"
        if seed % 100 == 0:
            cache.flush()
        assert cache.gauges()["ram_bytes"] <= 3000 * 64
    assert len(calls) < 1500 * 150  # one by one it would be more than 1500 * 350
    cache.flush()
    assert cache.gauges()["disk_bytes"] <= 3_000_000
    assert hit(cache, make_key([*tokens(70, 1499), 1])) == 70
    assert cache.check_integrity() == []
