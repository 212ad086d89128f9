"""Model-based test: the cache against a dictionary of everything ever stored, under all operations."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from cache_fakes import FakeState, assert_right, disk_config, make_cache, make_key
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefix_cache import CacheError, Kind, Stored

SEQUENCE = {
    "letters": st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4),
    "extra": st.sampled_from([0, 1, 30, 70]),
    "salt": st.sampled_from([b"", b"", b"", b"s"]),
}
STORE = st.fixed_dictionaries({
    "what": st.just("store"), **SEQUENCE, "cut": st.sampled_from([20, 64, 100, 128, 150, 192, 999]),
    "taint": st.sampled_from([0, 70, 128, 999, 999]),
})  # fmt: skip
ACQUIRE = st.fixed_dictionaries({
    "what": st.just("acquire"), **SEQUENCE, "exact": st.booleans(), "keep": st.sampled_from([False, False, True]),
})  # fmt: skip
OTHER = st.fixed_dictionaries({
    "what": st.sampled_from(["release", "release", "pin", "unpin", "clear", *["flush", "restart", "damage"] * 3]),
    "pick": st.integers(0, 1000),
})  # fmt: skip
OPERATIONS = st.lists(st.one_of(STORE, ACQUIRE, ACQUIRE, OTHER), min_size=25, max_size=70)


def sequence(letters: list[int], extra: int) -> list[int]:
    """Pages of few kinds, so that random sequences share prefixes; `extra` more tokens diverge inside a page."""
    return [letter * 100 + i for letter in letters for i in range(64)] + [7] * extra


class Pair:
    """The cache and the dictionary. roomy: nothing is ever evicted, so the deepest stored prefix must be found."""

    def __init__(self, totals: Counter[str], *, blocks: int, with_disk: bool) -> None:
        self.totals, self.blocks = totals, blocks
        self.roomy = blocks > 1000
        self.stored: dict[tuple[bytes, tuple[int, ...]], bool] = {}
        self.leases: list = []
        self.folder = Path(tempfile.mkdtemp()) if with_disk else None
        self.cache = self._open()

    def _open(self):
        return make_cache(self.blocks, disk=disk_config(self.folder, capacity_bytes=28_000) if self.folder else None)

    def store(self, letters, extra, salt, cut, taint) -> None:
        ids = sequence(letters, extra)
        position = min(cut, len(ids))
        key = make_key(ids, salt)
        result = self.cache.store(key, FakeState(key, position, taint), Kind.MESSAGE, position, taint)
        name = (salt, tuple(ids[:position]))
        if result is not Stored.NO_ROOM:
            self.stored[name] = self.stored.get(name, False) or taint >= position

    def deepest(self, ids: list[int], salt: bytes, exact: bool) -> int:
        fitting = (
            len(prefix)
            for (namespace, prefix), is_exact in self.stored.items()
            if namespace == salt
            and len(prefix) < len(ids)
            and tuple(ids[: len(prefix)]) == prefix
            and (is_exact or not exact)
        )
        return max(fitting, default=0)

    def acquire(self, letters, extra, salt, exact, keep) -> None:
        ids = sequence(letters, extra)
        key = make_key(ids, salt)
        outcome, lease = self.cache.acquire(key, exact=exact)
        deepest = self.deepest(ids, salt, exact)
        assert outcome.position <= deepest
        if self.roomy:
            assert outcome.position == deepest
        if lease is None:
            assert outcome.position == 0
            assert outcome.miss_reason is not None
            return
        self.totals[outcome.tier] += 1
        assert (salt, tuple(ids[: lease.position])) in self.stored
        assert_right(lease, key)
        if keep:
            self.leases.append((lease, key))
        else:
            lease.release()

    def other(self, what: str, pick: int) -> None:
        if what == "release" and self.leases:
            lease, key = self.leases.pop(pick % len(self.leases))
            assert_right(lease, key)
            lease.release()
        elif what in ("pin", "unpin"):
            infos = self.cache.inspect()
            try:
                assert not infos or self.cache.pin(infos[pick % len(infos)].id, what == "pin")
            except CacheError:
                assert what == "pin"
        elif what == "clear":
            self.cache.clear()
            self.stored.clear()
        elif what == "flush":
            self.cache.flush()
        elif what == "restart" and self.folder:
            self.count()
            self.release_all()
            self.cache.close()
            self.cache = self._open()
        elif what == "damage" and self.folder:
            self.damage(pick)

    def damage(self, pick: int) -> None:
        assert self.folder is not None
        files = sorted(p for p in self.folder.rglob("*") if p.suffix in (".kv", ".snap"))
        if not files:
            return
        path = files[pick % len(files)]
        data = bytearray(path.read_bytes())
        if pick % 3 == 0:
            path.unlink()
        elif pick % 3 == 1:
            path.write_bytes(data[: pick * 131 % len(data)])
        else:
            data[pick * 7919 % len(data)] ^= 1 << (pick % 8)
            path.write_bytes(data)

    def check(self) -> None:
        gauges = self.cache.gauges()
        assert gauges["ram_bytes_max"] <= gauges["ram_capacity_bytes"] <= self.blocks * 64
        assert gauges["disk_bytes"] <= gauges["disk_capacity_bytes"]
        if not self.leases:
            assert self.cache.check_integrity() == []

    def count(self) -> None:
        stats = self.cache.stats
        self.totals["evicted_ram"] += sum(stats.evicted_ram.values())
        self.totals["evicted_disk"] += sum(stats.evicted_disk.values())
        self.totals["broken"] += stats.disk_corrupt + stats.misses["kv_gap"]
        self.totals["no_room"] += stats.store_no_room

    def release_all(self) -> None:
        for lease, key in self.leases:
            assert_right(lease, key)
            lease.release()
        self.leases.clear()

    def close(self) -> None:
        self.count()
        self.release_all()
        self.check()
        self.cache.close()
        if self.folder:
            shutil.rmtree(self.folder)


@pytest.mark.parametrize(
    ("blocks", "with_disk", "must_happen"),
    [
        (16, False, ["ram", "evicted_ram", "no_room"]),
        (3000, False, ["ram"]),
        (16, True, ["ram", "disk", "evicted_ram", "evicted_disk", "broken"]),
    ],
    ids=["tight", "roomy", "two tiers"],
)
def test_cache_agrees_with_a_dictionary(blocks, with_disk, must_happen):
    """What is served must be what was stored; how much of it stays is up to the cache."""
    totals: Counter[str] = Counter()

    @settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(OPERATIONS)
    def run(operations) -> None:
        pair = Pair(totals, blocks=blocks, with_disk=with_disk)
        try:
            for operation in operations:
                arguments = dict(operation)
                what = arguments.pop("what")
                if what == "store":
                    pair.store(**arguments)
                elif what == "acquire":
                    pair.acquire(**arguments)
                else:
                    pair.other(what, **arguments)
                pair.check()
        finally:
            pair.close()

    run()
    for event in must_happen:
        assert totals[event] >= 3, f"{event}: too rare for the test to mean anything ({totals})"
