import threading

from cache_fakes import hit, make_cache, make_key, store, tokens

from prefix_cache import Flights

IDS = tokens(1000)


def test_follower_waits_for_the_deepest_snapshot_it_can_use():
    flights = Flights()
    leader = flights.begin(make_key(IDS), [200, 600, 998])
    follower = flights.begin(make_key(IDS[:700] + [5000] * 50), [740])
    done = []
    thread = threading.Thread(target=lambda: done.append(follower.wait_for_leader(0, 10)))
    thread.start()
    leader.publish(200)
    thread.join(0.05)
    assert thread.is_alive()
    leader.publish(600)
    thread.join(10)
    assert done == [True]
    assert not follower.wait_for_leader(600, 10)


def test_nobody_waits_without_a_gain():
    flights = Flights()
    leader = flights.begin(make_key(IDS), [200, 600])
    assert not leader.wait_for_leader(0, 10)
    assert not flights.begin(make_key(tokens(1000, 1)), [500]).wait_for_leader(0, 10)
    assert not flights.begin(make_key(IDS, salt=b"x"), [500]).wait_for_leader(0, 10)
    assert not flights.begin(make_key(IDS), [500]).wait_for_leader(600, 10)
    assert not flights.begin(make_key(IDS[:200]), []).wait_for_leader(0, 10)  # last token must be forwarded


def test_end_of_a_failed_leader_frees_its_followers():
    flights = Flights()
    leader = flights.begin(make_key(IDS), [600])
    follower = flights.begin(make_key(IDS), [600])
    thread = threading.Thread(target=follower.wait_for_leader, args=(0, 30))
    thread.start()
    leader.end()
    leader.end()
    thread.join(10)
    assert not thread.is_alive()
    assert not follower.wait_for_leader(0, 10)
    follower.end()
    assert flights.active == 0


def test_wait_ends_with_its_time():
    flights = Flights()
    flights.begin(make_key(IDS), [600])
    assert not flights.begin(make_key(IDS), [600]).wait_for_leader(0, 0.01)


def test_sixteen_requests_compute_one_prefix_once():
    cache = make_cache()
    computed = []

    def request(seed, entered):
        key = make_key(IDS[:600] + tokens(100, 100 + seed))
        flight = cache.flights.begin(key, [600, 690])
        entered.set()
        have = 0
        while flight.wait_for_leader(have, 10):
            have = hit(cache, key)
        have = hit(cache, key)
        for position in (600, 690):
            if position > have:
                store(cache, key, position)
                flight.publish(position)
        computed.append(700 - have)
        flight.end()

    threads = []
    for seed in range(16):
        entered = threading.Event()
        threads.append(threading.Thread(target=request, args=(seed, entered)))
        threads[-1].start()
        entered.wait(10)
    for thread in threads:
        thread.join(30)
    assert sorted(computed) == [100] * 15 + [700]
