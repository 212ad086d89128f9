import threading
import time

from cache_fakes import MEBIBYTE, hit, make_cache, make_key, store, tokens

IDS = tokens(600)
AHEAD = MEBIBYTE.recurrent_blocks + 1 + 16  # one snapshot, its tail, the pages of 1,024 tokens


class Touched:
    """What was touched, in bytes; `more` is set each time."""

    def __init__(self):
        self.nbytes, self.more = 0, threading.Event()

    def __call__(self, memory):
        memory[0] |= 0  # it can be written
        self.nbytes += memory.nbytes
        self.more.set()

    def reaches(self, blocks):
        end = time.monotonic() + 30
        while self.nbytes < blocks * MEBIBYTE.page_bytes and time.monotonic() < end:
            self.more.wait(0.1)
            self.more.clear()
        return self.nbytes == blocks * MEBIBYTE.page_bytes


def test_memory_of_the_next_snapshot_is_always_ready():
    touched = Touched()
    cache = make_cache(100, MEBIBYTE, touch=touched)
    assert touched.nbytes == 0
    cache.start()
    cache.start()
    assert touched.reaches(AHEAD)
    key = make_key(IDS)
    store(cache, key, 300)
    taken = cache.gauges()["ram_bytes"] // MEBIBYTE.page_bytes
    assert taken == 4 + MEBIBYTE.recurrent_blocks + 1
    assert touched.reaches(AHEAD + taken)
    assert hit(cache, key) == 300
    cache.clear()  # what comes free has been written
    store(cache, key, 300)
    cache.close()
    assert touched.nbytes == (AHEAD + taken) * MEBIBYTE.page_bytes
    assert cache.check_integrity() == []


def test_no_more_than_the_arena_is_prepared():
    touched = Touched()
    cache = make_cache(MEBIBYTE.recurrent_blocks + 2, MEBIBYTE, touch=touched)
    cache.start()
    assert touched.reaches(MEBIBYTE.recurrent_blocks + 2)
    cache.close()


def test_closing_does_not_wait_for_all_that_is_wanted():
    first = threading.Event()
    touched = []

    def slow(memory):
        touched.append(memory.nbytes)
        first.set()
        time.sleep(0.2)

    cache = make_cache(1000, MEBIBYTE, touch=slow)
    cache._index.arena.ahead = 1000  # 250 MiB, 16 at once
    cache.start()
    assert first.wait(30)
    cache.close()
    assert len(touched) < 4
    assert not [t for t in threading.enumerate() if t.name == "prefix-cache-memory"]


def test_pieces_go_through_the_given_copy():
    copied = []

    def copy(pieces):
        copied.append(sum(target.nbytes for target, _ in pieces))
        for target, source in pieces:
            target[...] = source

    cache = make_cache(100, MEBIBYTE, copy=copy)
    key = make_key(IDS)
    store(cache, key, 300)
    assert copied == [5 * MEBIBYTE.page_bytes + MEBIBYTE.recurrent_bytes]  # all of a snapshot at once
    assert hit(cache, key) == 300
    assert copied[1:] == [MEBIBYTE.recurrent_bytes]
