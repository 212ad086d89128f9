import dataclasses
import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cache_fakes import (
    FINGERPRINT,
    MEBIBYTE,
    SMALL,
    assert_right,
    disk_config,
    hit,
    make_cache,
    make_key,
    store,
    tokens,
)

from prefix_cache import Kind, Stored, clear_directory, fingerprint, list_directory, lookup
from prefix_cache import format as fmt
from prefix_cache import key as key_module
from prefix_cache.files import Files

IDS = tokens(3000)
OTHER_FP = fingerprint({"weights": b"v" * 32})


def folder_of(directory: Path) -> Path:
    return directory / FINGERPRINT.hex()


def files_in(directory: Path) -> list[Path]:
    return sorted(p for p in folder_of(directory).iterdir() if p.suffix in (".kv", ".snap"))


def filled(directory: Path, positions=(200, 1500, 2500), geometry=SMALL) -> None:
    cache = make_cache(2000, geometry, disk=disk_config(directory))
    for position in positions:
        store(cache, make_key(IDS), position)
    cache.close()


def reopened(directory: Path, **extra):
    return make_cache(extra.pop("blocks", 2000), disk=disk_config(directory), **extra)


# ---- round trip ----


def test_restart_finds_everything_and_the_bytes_are_right(tmp_path):
    filled(tmp_path)
    cache = reopened(tmp_path)
    outcome = cache.peek(make_key(IDS))
    assert (outcome.position, outcome.tier) == (2500, "disk")
    assert hit(cache, make_key(IDS)) == 2500
    assert hit(cache, make_key(IDS[:2000])) == 1500
    assert hit(cache, make_key(IDS[:300])) == 200
    assert cache.stats.hits_by_tier == {"disk": 3}
    assert hit(cache, make_key(IDS)) == 2500
    assert cache.stats.hits_by_tier == {"disk": 3, "ram": 1}
    assert cache.check_integrity() == []


def test_payloads_larger_than_a_checksum_unit_round_trip(tmp_path):
    cache = make_cache(80, MEBIBYTE, disk=disk_config(tmp_path))
    store(cache, make_key(IDS), 700)
    cache.close()
    cache = make_cache(80, MEBIBYTE, disk=disk_config(tmp_path))
    assert hit(cache, make_key(IDS)) == 700


def test_kv_pages_are_written_once_for_all_snapshots(tmp_path):
    cache = reopened(tmp_path)
    store(cache, make_key(IDS), 1024)
    cache.flush()
    before = {p for p in files_in(tmp_path) if p.suffix == ".kv"}
    store(cache, make_key(IDS), 700)
    store(cache, make_key(IDS), 1100)
    cache.flush()
    added = {p for p in files_in(tmp_path) if p.suffix == ".kv"} - before
    assert len(before) == 1
    assert len(added) == 1
    assert cache.check_integrity() == []


def test_decoded_snapshots_keep_their_provenance_on_disk(tmp_path):
    cache = reopened(tmp_path)
    store(cache, make_key(IDS), 500, exact=300, kind=Kind.REPLY)
    store(cache, make_key(IDS), 250)
    cache.close()
    cache = reopened(tmp_path)
    assert hit(cache, make_key(IDS), exact=True) == 250
    assert hit(cache, make_key(IDS)) == 500
    assert cache.check_integrity() == []


def test_files_and_folders_are_private(tmp_path):
    old = os.umask(0)
    try:
        filled(tmp_path / "cache")
    finally:
        os.umask(old)
    for path in (tmp_path / "cache").rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_clear_and_eviction_delete_files(tmp_path):
    filled(tmp_path)
    cache = reopened(tmp_path)
    assert cache.clear() == 3
    assert files_in(tmp_path) == []
    assert cache.gauges()["disk_bytes"] == 0
    assert cache.check_integrity() == []


def test_size_cap_holds_and_real_sizes_are_counted(tmp_path):
    cap = 60_000
    cache = make_cache(200, disk=disk_config(tmp_path, capacity_bytes=cap))
    for seed in range(20):
        store(cache, make_key(tokens(700, seed)), 700)
        cache.flush()
        assert sum(p.stat().st_size for p in files_in(tmp_path)) == cache.gauges()["disk_bytes"] <= cap
    assert sum(cache.stats.evicted_disk.values()) > 0
    assert cache.check_integrity() == []


def test_smaller_cap_takes_effect_at_start(tmp_path):
    filled(tmp_path)
    used = sum(p.stat().st_size for p in files_in(tmp_path))
    cache = make_cache(disk=disk_config(tmp_path, capacity_bytes=used * 2 // 3))
    assert 0 < sum(p.stat().st_size for p in files_in(tmp_path)) == cache.gauges()["disk_bytes"] <= used * 2 // 3
    assert hit(cache, make_key(IDS)) > 0


def test_ram_is_a_cache_of_disk(tmp_path):
    cache = make_cache(30, disk=disk_config(tmp_path))
    for seed in range(10):
        store(cache, make_key(tokens(600, seed)), 600)
        cache.flush()
    for seed in range(10):
        assert hit(cache, make_key([*tokens(600, seed), 1])) == 600
    assert cache.gauges()["ram_bytes_max"] <= 30 * 64
    assert cache.check_integrity() == []


def test_snapshots_on_disk_leave_ram_first(tmp_path):
    """Losing one that can be reloaded costs milliseconds, losing the other a prefill."""
    cache = make_cache(60, disk=disk_config(tmp_path))
    cache.observe_prefill(1000, 1e3 / 50)
    store(cache, make_key(tokens(1200, 1)), 1200)  # worth most, were it not on disk
    cache.flush()
    for seed in range(2, 7):
        store(cache, make_key(tokens(300, seed)), 300)
    in_ram = {info.position: info.in_ram for info in cache.inspect()}
    assert in_ram == {1200: False, 300: True}
    assert sum(cache.stats.evicted_ram.values()) == 1


def test_pages_that_memory_lacks_are_counted(tmp_path):
    """What a load would take: all pages behind the deepest one in memory, whatever snapshots lie between."""
    filled(tmp_path, positions=(200, 900, 1500, 2500))
    cache = reopened(tmp_path)

    def lacking():
        return {entry.position: pages for entry, pages in lookup.find(cache._index, make_key(IDS), False).usable}

    assert lacking() == {200: 3, 900: 14, 1500: 23, 2500: 39}
    assert hit(cache, make_key(IDS[:901])) == 900
    assert lacking() == {200: 0, 900: 0, 1500: 23 - 14, 2500: 39 - 14}
    assert hit(cache, make_key(IDS[:1501])) == 1500
    assert lacking() == {200: 0, 900: 0, 1500: 0, 2500: 39 - 23}


def test_background_writer_persists_without_being_asked(tmp_path):
    cache = make_cache(disk=disk_config(tmp_path))
    cache.start()
    store(cache, make_key(IDS), 500)
    deadline = time.monotonic() + 10
    while not cache.gauges()["snapshots_disk"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cache.gauges()["snapshots_disk"] == 1
    cache.close()
    assert hit(reopened(tmp_path), make_key(IDS)) == 500


def test_young_snapshots_are_not_written(tmp_path):
    now = [0.0]
    cache = make_cache(disk=disk_config(tmp_path, write_delay_s=5.0), clock=lambda: now[0])
    store(cache, make_key(IDS), 500)
    assert cache._writer._next_write(now=False) is None
    now[0] = 5.0
    assert cache._writer._next_write(now=False) is not None


def test_write_budget_refills_with_time(tmp_path):
    now = [0.0]
    config = disk_config(tmp_path, write_burst_bytes=20_000, write_bytes_per_day=86400 * 1000)
    cache = make_cache(disk=config, clock=lambda: now[0])
    for seed in (1, 2):
        store(cache, make_key(tokens(600, seed)), 600)
        cache.flush()
    assert cache.gauges()["snapshots_disk"] == 1
    assert cache.stats.disk_skipped_budget == 1
    now[0] = 20.0
    assert hit(cache, make_key([*tokens(600, 2), 1])) == 600  # a hit asks again for what was skipped
    cache.flush()
    assert cache.gauges()["snapshots_disk"] == 2


def test_clock_that_jumps_back_gives_no_budget(tmp_path):
    now = [1000.0]
    config = disk_config(tmp_path, write_burst_bytes=20_000, write_bytes_per_day=86400)
    cache = make_cache(disk=config, clock=lambda: now[0])
    store(cache, make_key(tokens(600, 1)), 600)
    cache.flush()
    now[0] = -1e9
    store(cache, make_key(tokens(600, 2)), 600)
    cache.flush()
    assert cache.stats.disk_skipped_budget == 1


# ---- damage ----


def check_after_damage(directory: Path, geometry=SMALL, blocks=2000) -> None:
    """Whatever happened to the folder: right bytes or a miss with a reason, sound counts, and life goes on."""
    cache = make_cache(blocks, geometry, disk=disk_config(directory))
    for end in (300, 2000, 3000):
        outcome, lease = cache.acquire(make_key(IDS[:end]))
        if lease is None:
            assert outcome.miss_reason is not None
        else:
            lease.release()
    hit(cache, make_key(IDS))
    assert cache.check_integrity() == []
    for position in (200, 1500, 2500):
        store(cache, make_key(IDS), position)
    cache.flush()
    assert hit(cache, make_key(IDS)) == 2500
    cache.close()
    cache = make_cache(blocks, geometry, disk=disk_config(directory))
    assert hit(cache, make_key(IDS)) == 2500
    assert cache.check_integrity() == []
    cache.close()


def header_bytes(path: Path) -> int:
    data = path.read_bytes()
    magic = fmt.PACK_MAGIC if path.suffix == ".kv" else fmt.SNAPSHOT_MAGIC
    return fmt.PREFIX_BYTES + fmt.body_length(data, magic, len(data))


@pytest.mark.parametrize("suffix", [".kv", ".snap"])
def test_no_flipped_header_byte_is_accepted(tmp_path, suffix):
    """Every byte of a header, so every field: the file is rejected, or (alignment padding) nothing changed."""
    filled(tmp_path, positions=(200,))
    path = next(p for p in files_in(tmp_path) if p.suffix == suffix)
    data = path.read_bytes()
    decode = fmt.decode_pack if suffix == ".kv" else fmt.decode_snapshot
    good = decode(data, len(data))
    for at in range(header_bytes(path)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        try:
            assert decode(bytes(bad), len(bad)) == good
            assert 24 <= at < 32
        except fmt.FileRejected:
            pass


@pytest.mark.parametrize("suffix", [".kv", ".snap"])
@pytest.mark.parametrize("where", [0.0, 0.05, 0.3, 0.6, 0.999])
def test_flipped_bit_anywhere_is_a_miss_with_a_reason(tmp_path, suffix, where):
    filled(tmp_path)
    path = [p for p in files_in(tmp_path) if p.suffix == suffix][-1]
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 0x10
    path.write_bytes(data)
    check_after_damage(tmp_path)


@pytest.mark.parametrize("suffix", [".kv", ".snap"])
def test_every_mebibyte_of_payload_is_checked(tmp_path, suffix):
    filled(tmp_path, positions=(1000,), geometry=MEBIBYTE)
    path = next(p for p in files_in(tmp_path) if p.suffix == suffix)
    data = path.read_bytes()
    flips = range(len(data) - 1, fmt.ALIGN, -(1 << 20))
    assert len(flips) >= 2
    for at in flips:
        bad = bytearray(data)
        bad[at] ^= 1
        path.write_bytes(bad)
        cache = make_cache(40, MEBIBYTE, disk=disk_config(tmp_path))
        outcome, lease = cache.acquire(make_key(IDS))
        assert (lease, outcome.miss_reason) == (None, "corrupt")
        assert not path.exists()
        assert cache.stats.disk_corrupt == 1
        assert cache.check_integrity() == []
        cache.close()
        for other in files_in(tmp_path):
            other.unlink()
        filled(tmp_path, positions=(1000,), geometry=MEBIBYTE)
        path = next(p for p in files_in(tmp_path) if p.suffix == suffix)


@pytest.mark.parametrize("suffix", [".kv", ".snap"])
@pytest.mark.parametrize("keep", [0, 10, 60, 500, 4095, 4097, -1])
def test_truncated_file_is_a_miss(tmp_path, suffix, keep):
    filled(tmp_path)
    path = [p for p in files_in(tmp_path) if p.suffix == suffix][-1]
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    check_after_damage(tmp_path)


def test_file_truncated_while_open_is_a_miss(tmp_path):
    filled(tmp_path)
    cache = reopened(tmp_path)
    for path in files_in(tmp_path):
        os.truncate(path, path.stat().st_size - 1)
    outcome, lease = cache.acquire(make_key(IDS))
    assert (lease, outcome.miss_reason) == (None, "corrupt")
    assert cache.check_integrity() == []


def test_missing_pack_is_a_kv_gap_and_strands_nothing(tmp_path):
    filled(tmp_path)
    cache = reopened(tmp_path)
    for path in files_in(tmp_path):
        if path.suffix == ".kv" and path.stat().st_size > 4096:
            path.unlink()
    outcome, lease = cache.acquire(make_key(IDS))
    assert (lease, outcome.miss_reason) == (None, "kv_gap")
    assert cache.inspect() == []  # every snapshot stood on the lost pages
    assert files_in(tmp_path) == []
    assert cache.check_integrity() == []


def test_pack_missing_at_start_takes_its_snapshots_along(tmp_path):
    filled(tmp_path)
    for path in files_in(tmp_path):
        if path.suffix == ".kv":
            path.unlink()
    cache = reopened(tmp_path)
    assert cache.inspect() == []
    assert files_in(tmp_path) == []


def test_packs_without_snapshots_and_temporary_files_are_collected(tmp_path):
    filled(tmp_path)
    for path in files_in(tmp_path):
        if path.suffix == ".snap":
            path.unlink()
    (folder_of(tmp_path) / "tmp-1-abc").write_bytes(b"half")
    reopened(tmp_path)
    assert [p.name for p in folder_of(tmp_path).iterdir()] == ["lock"]


def test_strange_files_are_left_alone(tmp_path):
    filled(tmp_path)
    note = folder_of(tmp_path) / "notes.txt"
    note.write_text("mine")
    cache = reopened(tmp_path)
    cache.clear()
    assert note.read_text() == "mine"


def test_older_format_version_is_removed(tmp_path):
    filled(tmp_path)
    for path in files_in(tmp_path):
        data = bytearray(path.read_bytes())
        data[8] = 0
        path.write_bytes(data)
    count = len(files_in(tmp_path))
    cache = reopened(tmp_path)
    assert cache.stats.disk_old_version_removed == count
    assert hit(cache, make_key(IDS)) == 0
    assert files_in(tmp_path) == []


def test_a_kind_of_snapshot_that_a_later_build_has_is_no_failure(tmp_path, monkeypatch):
    filled(tmp_path, positions=(200,))
    path = next(p for p in files_in(tmp_path) if p.suffix == ".snap")
    data = path.read_bytes()
    header = fmt.decode_snapshot(data, len(data))
    monkeypatch.setattr(fmt, "Kind", lambda value: value)
    later = dataclasses.replace(header, kind=200)
    start = fmt.payload_start(fmt.body_length(data, fmt.SNAPSHOT_MAGIC, len(data)), header.path_bytes)
    stored = make_key(IDS).path(3)
    path.write_bytes(fmt.encode_snapshot(later, stored) + data[start:])
    monkeypatch.undo()
    cache = reopened(tmp_path)
    assert cache.stats.disk_corrupt == 1
    assert hit(cache, make_key(IDS)) == 0


def test_other_payload_sizes_under_the_same_fingerprint_are_refused(tmp_path):
    filled(tmp_path)
    cache = make_cache(80, MEBIBYTE, disk=disk_config(tmp_path))
    assert hit(cache, make_key(IDS)) == 0
    assert files_in(tmp_path) == []


def test_hash_collisions_never_serve_foreign_state(tmp_path, monkeypatch):
    """With a digest of 4 bits nearly everything collides; stored ids are compared, so bytes stay right."""

    def weak(parent, page_key):
        return bytes([key_module.hashlib.blake2b(parent + page_key).digest()[0] & 15]) * 32

    monkeypatch.setattr("prefix_cache.index.page_digest", weak)
    monkeypatch.setattr("prefix_cache.integrity.page_digest", weak)
    cache = reopened(tmp_path)
    for seed in range(12):
        store(cache, make_key(tokens(800, seed)), 700)
    cache.close()
    cache = reopened(tmp_path)
    for seed in range(12):
        assert hit(cache, make_key(tokens(800, seed))) in (0, 700)
    assert cache.check_integrity() == []


# ---- other models ----


def test_change_of_model_is_explained_and_old_folders_are_collected(tmp_path):
    filled(tmp_path)
    cache = make_cache(disk=disk_config(tmp_path), fp=OTHER_FP)
    outcome, _ = cache.acquire(make_key(IDS, fp=OTHER_FP))
    assert outcome.miss_reason == "fp_mismatch"
    assert cache.acquire(make_key(IDS, fp=OTHER_FP, scope=b"stranger"))[0].miss_reason == "cold"
    assert folder_of(tmp_path).exists()
    cache.close()
    cache = make_cache(disk=disk_config(tmp_path, foreign_ttl_s=-1.0), fp=OTHER_FP)
    assert not folder_of(tmp_path).exists()
    assert cache.stats.disk_foreign_removed == 1


def test_foreign_folder_in_use_is_kept(tmp_path):
    filled(tmp_path)
    user = reopened(tmp_path)
    make_cache(disk=disk_config(tmp_path, foreign_ttl_s=-1.0), fp=OTHER_FP)
    assert hit(user, make_key(IDS)) == 2500


def test_lora_namespace_stays_out_of_the_disk(tmp_path):
    cache = reopened(tmp_path)
    key = make_key(IDS, fp=OTHER_FP)
    store(cache, key, 500)
    cache.flush()
    assert files_in(tmp_path) == []
    assert hit(cache, key) == 500


def test_command_line_view_of_a_directory(tmp_path):
    assert list_directory(tmp_path / "none") == []
    filled(tmp_path)
    (info,) = list_directory(tmp_path)
    assert (info.fingerprint, info.snapshots, info.in_use) == (FINGERPRINT.hex(), 3, False)
    assert info.nbytes == sum(p.stat().st_size for p in files_in(tmp_path))
    user = reopened(tmp_path)
    assert list_directory(tmp_path)[0].in_use
    assert clear_directory(tmp_path) == (0, [FINGERPRINT.hex()])
    user.close()
    assert clear_directory(tmp_path) == (info.nbytes, [])
    assert list(tmp_path.iterdir()) == []


def test_what_is_deleted_while_it_is_loaded_takes_nothing_new_along(tmp_path):
    filled(tmp_path, positions=(200,))

    class Deleting(Files):
        """Everything is deleted when the last byte has been read."""

        reads = 0

        def read_into(self, fd, targets, offset):
            done = super().read_into(fd, targets, offset)
            self.reads += 1
            if self.reads == 2:
                cache.clear()
            return done

    cache = reopened(tmp_path, files=Deleting())
    _, lease = cache.acquire(make_key(IDS))
    assert lease.position == 200
    assert_right(lease, make_key(IDS))
    store(cache, make_key(IDS), 300)
    lease.release()
    assert hit(cache, make_key(IDS)) == 300
    assert cache.check_integrity() == []


# ---- failing disks ----


class BrokenFiles(Files):
    """Raises `code` from the named methods once `armed`."""

    def __init__(self, code: int, *methods: str) -> None:
        self.armed = False
        for name in methods:
            setattr(self, name, self._wrap(getattr(self, name), code))

    def _wrap(self, original, code):
        def call(*args):
            if self.armed:
                raise OSError(code, os.strerror(code))
            return original(*args)

        return call


def test_after_a_read_error_memory_takes_what_the_disk_still_claims_to_have(tmp_path):
    filled(tmp_path)
    files = BrokenFiles(errno.EIO, "read_into")
    cache = reopened(tmp_path, files=files)
    files.armed = True
    outcome, lease = cache.acquire(make_key(IDS))
    assert (lease, outcome.miss_reason) == (None, "disk_error")
    for info in cache.inspect():
        assert store(cache, make_key(IDS), info.position) is Stored.STORED
    assert hit(cache, make_key(IDS)) == max(info.position for info in cache.inspect())
    assert cache.check_integrity() == []


def test_what_is_pinned_stays_in_memory_when_the_disk_has_failed(tmp_path):
    files = BrokenFiles(errno.EIO, "read_into")
    cache = make_cache(blocks=40, disk=disk_config(tmp_path), files=files)
    store(cache, make_key(IDS), 300)
    store(cache, make_key(tokens(200, 50)), 200)
    cache.flush()
    assert cache.pin(cache.inspect(make_key(IDS))[0].id)
    for seed in range(1, 5):
        store(cache, make_key(tokens(400, seed)), 400)
    assert not cache.inspect(make_key(IDS))[0].in_ram  # the disk has it
    assert hit(cache, make_key(IDS)) == 300
    files.armed = True
    assert hit(cache, make_key([*tokens(200, 50), 1])) == 0
    assert cache.gauges()["disk_readable"] == 0
    for seed in range(1, 12):
        store(cache, make_key(tokens(400, seed)), 400)
    assert hit(cache, make_key(IDS)) == 300
    assert cache.check_integrity() == []


def test_an_unexpected_error_while_writing_costs_one_snapshot_and_no_memory(tmp_path, caplog, monkeypatch):
    cache = make_cache(disk=disk_config(tmp_path))
    store(cache, make_key(IDS), 300)
    held = cache.gauges()["ram_bytes"]
    with monkeypatch.context() as patch:
        patch.setattr(cache._index.disk, "checksums", lambda payload: (_ for _ in ()).throw(MemoryError))
        cache.flush()
    assert "a snapshot of 300 tokens could not be written" in caplog.text
    assert files_in(tmp_path) == []
    store(cache, make_key(IDS), 700)
    cache.flush()
    assert [info.position for info in cache.inspect() if info.on_disk] == [700]
    assert cache.gauges()["ram_bytes"] > held
    assert cache.check_integrity() == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("method", ["create", "write_all", "rename", "free_bytes"])
def test_write_error_turns_the_tier_off_once_and_requests_go_on(tmp_path, caplog, code, method):
    files = BrokenFiles(code, method)
    cache = reopened(tmp_path, files=files)
    store(cache, make_key(IDS), 500)
    cache.flush()
    files.armed = True
    for position in (1500, 2500):
        store(cache, make_key(IDS), position)
        cache.flush()
    assert hit(cache, make_key(IDS)) == 2500
    gauges = cache.gauges()
    assert gauges["disk_writable"] == 0
    assert os.strerror(code) in gauges["disk_failure"]
    assert cache.stats.disk_errors == 1
    assert len([r for r in caplog.records if "disk tier" in r.message]) == 1
    assert cache.check_integrity() == []
    files.armed = False
    cache.close()
    cache = reopened(tmp_path)
    assert hit(cache, make_key(IDS)) == 500
    assert not list(folder_of(tmp_path).glob("tmp-*"))


def test_full_disk_keeps_serving_what_is_on_it(tmp_path):
    filled(tmp_path)
    files = BrokenFiles(errno.ENOSPC, "write_all")
    cache = reopened(tmp_path, files=files)
    files.armed = True
    store(cache, make_key(tokens(500, 5)), 500)
    cache.flush()
    assert cache.gauges()["disk_readable"] == 1
    assert hit(cache, make_key(IDS)) == 2500


@pytest.mark.parametrize("method", ["read_into", "open_read", "read"])
def test_read_error_is_a_miss_and_turns_the_tier_off(tmp_path, caplog, method):
    filled(tmp_path)
    files = BrokenFiles(errno.EIO, method)
    cache = reopened(tmp_path, files=files)
    files.armed = True
    outcome, lease = cache.acquire(make_key(IDS))
    assert (lease, outcome.miss_reason) == (None, "disk_error")
    outcome, lease = cache.acquire(make_key(IDS))
    assert (lease, outcome.miss_reason) == (None, "disk_error")
    assert cache.gauges()["disk_readable"] == 0
    assert len([r for r in caplog.records if "disk tier" in r.message]) == 1
    assert cache.check_integrity() == []
    store(cache, make_key(IDS), 800)
    assert hit(cache, make_key(IDS)) == 800


def test_free_space_floor_is_kept(tmp_path, caplog):
    class Nearly(Files):
        def free_bytes(self, path):
            return 10_000

    cache = make_cache(disk=disk_config(tmp_path, free_floor_bytes=9_500), files=Nearly())
    for position in (500, 600):
        store(cache, make_key(IDS), position)
        cache.flush()
    assert files_in(tmp_path) == []
    assert cache.stats.disk_skipped_space == 2
    assert cache.gauges()["disk_writable"] == 1
    assert len([r for r in caplog.records if "10000 bytes are free" in r.message]) == 1


@pytest.mark.parametrize("exists", [False, True])
def test_read_only_directory_turns_writing_off(tmp_path, caplog, exists):
    """As root a read-only mode does not stop writes, so the system call's answer is injected."""
    if exists:
        filled(tmp_path)
    files = BrokenFiles(errno.EROFS, "make_directory" if not exists else "try_lock", "create")
    files.armed = True
    cache = reopened(tmp_path, files=files)
    assert cache.gauges()["disk_writable"] == 0
    assert hit(cache, make_key(IDS)) == (2500 if exists else 0)
    store(cache, make_key(IDS), 600)
    cache.flush()
    assert len([r for r in caplog.records if "disk tier" in r.message]) == 1


def test_second_process_reads_but_never_writes_or_deletes(tmp_path):
    filled(tmp_path)
    first = reopened(tmp_path)
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from cache_fakes import *
cache = make_cache(2000, disk=disk_config(Path(sys.argv[1])))
key = make_key(tokens(3000))
print(cache.gauges()["disk_writable"], hit(cache, key), end=" ")
store(cache, make_key(tokens(3000, 9)), 2000)
cache.clear()
cache.close()
"""
    before = files_in(tmp_path)
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), here], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert done.stdout == "0 2500 "
    assert files_in(tmp_path) == before
    assert hit(first, make_key(IDS)) == 2500


def test_reader_survives_the_writer_deleting_files(tmp_path):
    filled(tmp_path)
    writer = reopened(tmp_path)
    reader = reopened(tmp_path)  # same process: flock is per open file, so this one reads only too
    assert reader.gauges()["disk_writable"] == 0
    writer.clear()
    outcome, lease = reader.acquire(make_key(IDS))
    assert (lease, outcome.miss_reason) == (None, "kv_gap")
    assert reader.check_integrity() == []


WRITER = """
import sys, random
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from cache_fakes import *
rng = random.Random(int(sys.argv[3]))
cache = make_cache(200, disk=disk_config(Path(sys.argv[1]), capacity_bytes=300_000))
cache.start()
print("ready", flush=True)
while True:
    key = make_key(tokens(1500, rng.randrange(6)))
    store(cache, key, rng.randrange(1, 1500), exact=rng.choice([None, 500]))
    if rng.random() < 0.3:
        hit(cache, make_key(tokens(1500, rng.randrange(6))))
"""


def kill_once(directory: Path, seed: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), str(Path(__file__).parent), str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(random.Random(seed).uniform(0.0, 0.15))
    assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    cache = make_cache(200, disk=disk_config(directory, capacity_bytes=300_000))
    assert cache.gauges()["disk_writable"] == 1
    for which in range(6):
        hit(cache, make_key(tokens(1500, which)))
    assert cache.stats.disk_corrupt == 0  # rename is the commit: what has a name is whole
    assert cache.check_integrity() == []
    names = {p.name for p in folder_of(directory).iterdir()}
    assert not any(n.startswith("tmp-") for n in names)
    assert sum(p.stat().st_size for p in files_in(directory)) == cache.gauges()["disk_bytes"]
    cache.close(0)


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_leaves_a_sound_directory(tmp_path, seed):
    for step in range(2):
        kill_once(tmp_path, 100 * seed + step)


@pytest.mark.slow
def test_kill_9_two_hundred_times(tmp_path):
    for seed in range(200):
        kill_once(tmp_path, seed)


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


class DyingFiles(Files):
    """Dies instead of making call number `calls` that changes the folder."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def _count(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1

    def create(self, path):
        self._count()
        return super().create(path)

    def write_all(self, fd, buffers):
        for buffer in buffers:
            self._count()
            super().write_all(fd, [buffer])

    def rename(self, source, target):
        self._count()
        super().rename(source, target)

    def unlink(self, path):
        self._count()
        super().unlink(path)


def test_death_before_every_single_system_call(tmp_path):
    """Stop at the n-th file operation, for every n: no state of the folder between two calls is unsound."""
    step = 0
    while True:
        directory = tmp_path / str(step)
        cache = make_cache(2000, disk=disk_config(directory), files=DyingFiles(step))
        finished = False
        try:
            for position in (100, 1100):
                store(cache, make_key(IDS), position)
                cache.flush()
            cache.clear()
            finished = True
        except Killed:
            os.close(cache._index.disk._lock_fd)
        again = make_cache(2000, disk=disk_config(directory))
        assert again.gauges()["disk_writable"] == 1 or finished
        assert hit(again, make_key(IDS)) in (0, 100, 1100)
        assert again.stats.disk_corrupt == 0
        assert again.check_integrity() == []
        again.close(0)
        if finished:
            break
        step += 1
    assert step > 20


def test_entry_deleted_while_it_is_written_leaves_no_file(tmp_path):
    class Slow(Files):
        def __init__(self):
            self.started, self.go = threading.Event(), threading.Event()

        def rename(self, source, target):
            self.started.set()
            assert self.go.wait(10)
            super().rename(source, target)

    files = Slow()
    cache = reopened(tmp_path, files=files)
    store(cache, make_key(IDS), 500)
    writer = threading.Thread(target=cache.flush)
    writer.start()
    assert files.started.wait(10)
    cache.clear()
    files.go.set()
    writer.join()
    assert files_in(tmp_path) == []
    assert cache.gauges()["ram_bytes"] == 0
    assert cache.gauges()["disk_bytes"] == 0
    assert cache.check_integrity() == []


def test_stats_are_plain_numbers(tmp_path):
    filled(tmp_path)
    cache = reopened(tmp_path)
    hit(cache, make_key(IDS))
    text = json.dumps({"stats": cache.stats.as_dict(), "gauges": cache.gauges()})
    assert '"hits": 1' in text


# ---- what is compared with the stored ids, one comparison at a time ----


def tier_with_files(directory: Path):
    """A tier holding one pack (pages 16..18 of IDS) and one snapshot at 1200, and their true names and keys."""
    cache = reopened(directory)
    store(cache, make_key(IDS), 1024)
    store(cache, make_key(IDS), 1200)
    cache.flush()
    tier = cache._index.disk
    (entry,) = (e for e in cache._index.entries if e.position == 1200)
    return tier, entry.disk, make_key(IDS)


def views(count: int) -> list[np.ndarray]:
    return [np.zeros(SMALL.page_bytes, np.uint8) for _ in range(count)]


def test_pages_are_read_only_for_the_stored_path_and_keys(tmp_path):
    tier, disk, key = tier_with_files(tmp_path)
    name = disk.leaf.pack.name
    (view,) = views(1)
    assert tier.read_pages(name, [(1, view)], key.path(16), [key.page_key(17)]) == SMALL.page_bytes
    other = make_key([IDS[0] + 1, *IDS[1:]])
    with pytest.raises(fmt.FileRejected, match="differ from the prompt's"):
        tier.read_pages(name, [(1, view)], other.path(16), [key.page_key(17)])
    with pytest.raises(fmt.FileRejected, match="ids of page 1 differ"):
        tier.read_pages(name, [(1, view)], key.path(16), [key.page_key(16)])
    with pytest.raises(fmt.FileRejected, match="ids of page 9 differ"):
        tier.read_pages(name, [(9, view)], key.path(16), [key.page_key(25)])


def test_snapshot_is_read_only_for_the_stored_path_and_tail(tmp_path):
    tier, disk, key = tier_with_files(tmp_path)
    tail = key.span_key(1152, 1200)
    payload = views(SMALL.recurrent_blocks)
    payload[-1] = payload[-1][: SMALL.recurrent_bytes % SMALL.page_bytes]
    payload += views(1)
    tier.read_snapshot(disk.name, payload, key.path(18), tail)
    with pytest.raises(fmt.FileRejected, match="differ from the prompt's"):
        tier.read_snapshot(disk.name, payload, make_key([5, *IDS[1:]]).path(18), tail)
    with pytest.raises(fmt.FileRejected, match="ids of the tail differ"):
        tier.read_snapshot(disk.name, payload, key.path(18), tail[:-4] + b"\x01\x00\x00\x00")


def test_flipped_stored_ids_fail_their_own_checksum(tmp_path):
    tier, disk, key = tier_with_files(tmp_path)
    path = folder_of(tmp_path) / disk.name
    data = bytearray(path.read_bytes())
    data[header_bytes(path) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(fmt.FileRejected, match="fail their checksum"):
        tier.read_snapshot(disk.name, [], key.path(18), key.span_key(1152, 1200))


def test_damaged_pack_takes_every_snapshot_that_stands_on_it(tmp_path):
    cache = reopened(tmp_path)
    branches = [IDS[:1024] + tokens(300, seed) for seed in (1, 2)]
    for ids in branches:
        store(cache, make_key(ids), 1300)
    cache.close()
    packs = {p: p.read_bytes() for p in files_in(tmp_path) if p.suffix == ".kv"}
    (shared,) = (p for p, data in packs.items() if fmt.decode_pack(data, len(data)).first_depth == 0)
    data = bytearray(packs[shared])
    data[-1] ^= 1
    shared.write_bytes(data)
    cache = reopened(tmp_path)
    assert cache.acquire(make_key(branches[0]))[0].miss_reason == "corrupt"
    assert cache.inspect() == []  # or the next snapshot would be written on top of the damaged pages
    store(cache, make_key(branches[1]), 1300)
    cache.close()
    assert hit(reopened(tmp_path), make_key(branches[1])) == 1300


def test_snapshot_being_loaded_is_not_evicted_from_disk(tmp_path):
    class Slow(Files):
        def __init__(self):
            self.started, self.go = threading.Event(), threading.Event()

        def read_into(self, fd, targets, offset):
            self.started.set()
            assert self.go.wait(10)
            return super().read_into(fd, targets, offset)

    filled(tmp_path, positions=(500,))
    files = Slow()
    cache = make_cache(2000, disk=disk_config(tmp_path, capacity_bytes=30_000), files=files)
    found = []
    reader = threading.Thread(target=lambda: found.append(hit(cache, make_key(IDS))))
    reader.start()
    assert files.started.wait(10)
    for seed in (1, 2, 3):
        store(cache, make_key(tokens(500, seed)), 500)
        cache.flush()
    assert sum(cache.stats.evicted_disk.values()) > 0
    files.go.set()
    reader.join()
    assert found == [500]
    assert cache.check_integrity() == []


@pytest.mark.parametrize(("tokens_per_s", "expected"), [(100.0, 210), (20_000.0, 200)])
def test_cheapest_point_is_taken_not_the_deepest(tmp_path, tokens_per_s, expected):
    """Ten tokens deeper on disk (2 ms away) pay on a slow machine only."""
    filled(tmp_path, positions=(200, 210))
    cache = reopened(tmp_path)
    assert hit(cache, make_key(IDS[:205])) == 200  # now in RAM too
    for _ in range(100):
        cache.observe_prefill(1000, 1000 / tokens_per_s)
    assert cache.gauges()["prefill_tokens_per_s"] == pytest.approx(tokens_per_s, rel=0.01)
    assert hit(cache, make_key(IDS[:2000])) == expected


def test_pages_that_left_and_came_back_survive_a_restart(tmp_path):
    """Their first pack still has them, for the sake of its other pages; the second one goes on behind them."""
    key = make_key(IDS[:800])
    cache = reopened(tmp_path)
    for position in (640, 320):
        store(cache, key, position)
        cache.flush()
    (deep,) = [entry for entry in cache._index.entries if entry.position == 640]
    cache._index.remove(deep, remember=False)
    store(cache, key, 768)
    cache.flush()
    assert len([path for path in files_in(tmp_path) if path.suffix == ".kv"]) == 2
    cache.close()
    cache = reopened(tmp_path)
    assert cache.stats.disk_orphans_removed == 0
    assert cache.check_integrity() == []
    assert hit(cache, key) == 768
    cache.clear()
    assert files_in(tmp_path) == []
    assert cache.check_integrity() == []
    cache.close()


def test_nothing_makes_room_for_what_the_budget_forbids_to_write(tmp_path):
    config = disk_config(tmp_path, write_burst_bytes=20_000, write_bytes_per_day=1, capacity_bytes=20_000)
    cache = make_cache(disk=config)
    for seed in range(4):
        store(cache, make_key(tokens(600, seed)), 600)
        cache.flush()
    assert cache.stats.disk_skipped_budget == 3
    assert cache.stats.evicted_disk == {}
    assert cache.gauges()["snapshots_disk"] == 1
    cache.close()


def test_at_the_floor_of_free_space_what_makes_room_is_replaced(tmp_path):
    files = Files()
    config = disk_config(tmp_path, capacity_bytes=20_000, free_floor_bytes=10_000)
    cache = make_cache(disk=config, files=files)
    store(cache, make_key(tokens(600, 0)), 600)
    cache.flush()
    files.free_bytes = lambda path: 22_000  # with 14,650 more there would be too little, but 3,682 have to go first
    store(cache, make_key(tokens(600, 1)), 600)
    cache.flush()
    assert (cache.gauges()["snapshots_disk"], cache.stats.disk_skipped_space) == (1, 0)
    assert cache.stats.disk_writes == 4
    cache.close()
