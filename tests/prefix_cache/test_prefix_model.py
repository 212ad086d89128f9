"""Model-based test: the cache against a dictionary of everything ever stored, under all operations."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from cache_fakes import FakeState, assert_right, disk_config, make_cache, make_key
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefix_cache import CacheError, Kind, Stored

LETTERS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=5)
SALTS = st.sampled_from([b"", b"s"])
CUT = st.integers(1, 320)


def sequence(letters: list[int], extra: int) -> list[int]:
    """Pages of few kinds, so that random sequences share prefixes; `extra` more tokens diverge inside a page."""
    return [letter * 100 + i for letter in letters for i in range(64)] + [7] * extra


class Machine(RuleBasedStateMachine):
    """Small arena: evictions all the time. What is served must be what was stored; how much is up to the cache."""

    with_disk = False
    blocks = 30

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[tuple[bytes, tuple[int, ...]], bool] = {}
        self.leases: list = []
        self.folder = Path(tempfile.mkdtemp()) if self.with_disk else None
        self.cache = self._open()

    def _open(self):
        disk = disk_config(self.folder, capacity_bytes=self.disk_bytes()) if self.folder else None
        return make_cache(self.blocks, disk=disk)

    def disk_bytes(self) -> int:
        return 150_000

    @initialize()
    def begin(self) -> None:
        self.stored.clear()

    @rule(letters=LETTERS, extra=st.integers(0, 70), cut=CUT, taint=st.integers(0, 400), salt=SALTS)
    def store(self, letters, extra, cut, taint, salt) -> None:
        ids = sequence(letters, extra)
        position = min(cut, len(ids))
        key = make_key(ids, salt)
        result = self.cache.store(key, FakeState(key, position, taint), Kind.MESSAGE, position, taint)
        name = (salt, tuple(ids[:position]))
        if result is not Stored.NO_ROOM:
            self.stored[name] = self.stored.get(name, False) or taint >= position

    @rule(letters=LETTERS, extra=st.integers(0, 70), salt=SALTS, exact=st.booleans(), keep=st.booleans())
    def acquire(self, letters, extra, salt, exact, keep) -> None:
        ids = sequence(letters, extra)
        key = make_key(ids, salt)
        outcome, lease = self.cache.acquire(key, exact=exact)
        deepest = max(
            (
                len(prefix)
                for (namespace, prefix), is_exact in self.stored.items()
                if namespace == salt
                and len(prefix) < len(ids)
                and tuple(ids[: len(prefix)]) == prefix
                and (is_exact or not exact)
            ),
            default=0,
        )
        assert outcome.position <= deepest
        if lease is None:
            assert outcome.position == 0
            assert outcome.miss_reason is not None
            return
        assert (salt, tuple(ids[: lease.position])) in self.stored
        assert_right(lease, key)
        if self.complete():
            assert lease.position == deepest
        if keep:
            self.leases.append((lease, key))
        else:
            lease.release()

    def complete(self) -> bool:
        return False

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        lease, key = self.leases.pop(0)
        assert_right(lease, key)
        lease.release()

    @precondition(lambda self: self.cache.inspect())
    @rule(pick=st.integers(0, 100), pinned=st.booleans())
    def pin(self, pick, pinned) -> None:
        infos = self.cache.inspect()
        try:
            assert self.cache.pin(infos[pick % len(infos)].id, pinned)
        except CacheError:
            assert pinned

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.stored.clear()

    @invariant()
    def cap_holds(self) -> None:
        gauges = self.cache.gauges()
        assert gauges["ram_bytes_max"] <= gauges["ram_capacity_bytes"] <= self.blocks * 64
        assert gauges["disk_bytes"] <= gauges["disk_capacity_bytes"]

    @invariant()
    def counts_are_right(self) -> None:
        if not self.leases:
            assert self.cache.check_integrity() == []

    def teardown(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        assert self.cache.check_integrity() == []
        self.cache.close()
        if self.folder:
            shutil.rmtree(self.folder)


class RoomyMachine(Machine):
    """Room for everything: then the deepest stored prefix must be found, always."""

    blocks = 3000

    def complete(self) -> bool:
        return True


class DiskMachine(Machine):
    """Both tiers small: evictions, loads, restarts and vanished or damaged files."""

    with_disk = True

    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @precondition(lambda self: not self.leases)
    @rule()
    def restart(self) -> None:
        self.cache.close()
        self.cache = self._open()

    @precondition(lambda self: any(self._files()))
    @rule(pick=st.integers(0, 1000), at=st.integers(0, 1 << 20), how=st.sampled_from(["flip", "cut", "delete"]))
    def damage(self, pick, at, how) -> None:
        files = self._files()
        path = files[pick % len(files)]
        data = bytearray(path.read_bytes())
        if how == "delete":
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[: at % len(data)])
        else:
            data[at % len(data)] ^= 1 << (pick % 8)
            path.write_bytes(data)

    def _files(self) -> list[Path]:
        return sorted(p for p in self.folder.rglob("*") if p.suffix in (".kv", ".snap"))


COMMON = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}

TestTightArena = Machine.TestCase
TestTightArena.settings = settings(max_examples=60, stateful_step_count=40, **COMMON)
TestRoomyArena = RoomyMachine.TestCase
TestRoomyArena.settings = settings(max_examples=40, stateful_step_count=40, **COMMON)
TestTwoTiers = DiskMachine.TestCase
TestTwoTiers.settings = settings(max_examples=60, stateful_step_count=40, **COMMON)
