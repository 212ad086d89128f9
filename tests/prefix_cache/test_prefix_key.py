import numpy as np
import pytest
from cache_fakes import FINGERPRINT, hit, make_cache, make_key, store, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_cache import CacheError, MediaSpan, Namespace, PromptKey, fingerprint
from prefix_cache.key import common_tokens

A, B = b"a" * 32, b"b" * 32


def test_fingerprint_changes_with_every_field_value_and_type():
    base = {"weights": b"x", "kv": "f16", "lora_scale": 1.0, "version": 1, "mrope": True}
    seen = {fingerprint(base)}
    for name, value in (("weights", b"y"), ("kv", "f32"), ("lora_scale", 2.0), ("version", 2), ("mrope", False)):
        seen.add(fingerprint(base | {name: value}))
    seen |= {fingerprint(base | {"version": value}) for value in (1.0, True, "1", b"1")}
    seen.add(fingerprint(base | {"vision": "none"}))
    assert len(seen) == 11


def test_fingerprint_does_not_depend_on_the_order_of_fields():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def test_namespace_fields_cannot_run_into_each_other():
    assert Namespace(FINGERPRINT, b"ab", b"c").root() != Namespace(FINGERPRINT, b"a", b"bc").root()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"salt": b"other"}, "salt"), ({"scope": b"tenant"}, "cold"), ({"fp": fingerprint({"quant": 8})}, "fp_mismatch")],
)
def test_nothing_is_shared_across_salt_tenant_or_model(changed, reason):
    cache = make_cache()
    ids = tokens(200)
    store(cache, make_key(ids), 150)
    outcome, lease = cache.acquire(make_key(ids, **changed))
    assert lease is None
    assert outcome.matched == 0
    assert outcome.miss_reason == reason  # "cold" for another tenant: the truth would leak that it was seen


def picture(digest, start=70, count=30):
    return [MediaSpan(start, count, digest)]


def test_other_picture_behind_equal_placeholders_hits_only_before_it():
    cache = make_cache()
    ids = tokens(200)
    key = make_key(ids, media=picture(A))
    for position in (64, 69, 70, 71, 128, 150):
        store(cache, key, position)
    assert hit(cache, make_key(ids, media=picture(A))) == 150
    assert hit(cache, make_key(ids, media=picture(B))) == 70
    assert hit(cache, make_key(ids)) == 70


def test_picture_at_another_offset_is_another_prefix():
    cache = make_cache()
    ids = [7] * 200
    store(cache, make_key(ids, media=picture(A, 70, 30)), 150)
    store(cache, make_key(ids, media=picture(A, 70, 30)), 68)
    assert hit(cache, make_key(ids, media=picture(A, 71, 30))) == 68


def test_picture_over_several_pages_is_in_every_page_key():
    cache = make_cache()
    ids = [7] * 400
    store(cache, make_key(ids, media=picture(A, 10, 300)), 320)
    assert hit(cache, make_key(ids, media=picture(A, 10, 300))) == 320
    assert hit(cache, make_key(ids, media=picture(B, 10, 300))) == 0


def test_picture_without_digest_fails_closed():
    cache = make_cache()
    ids = tokens(200)
    key = make_key(ids, media=picture(None))
    assert key.limit == 70
    assert store(cache, key, 71) == "not_cacheable"
    assert store(cache, key, 70) == "stored"
    outcome, lease = cache.acquire(key)
    assert lease is not None
    lease.release()
    assert (outcome.position, outcome.miss_reason) == (70, "media_nodigest")


def test_media_digest_cut_short_is_refused():
    with pytest.raises(CacheError, match="2 bytes"):
        make_key(tokens(200), media=picture(b"ab"))


@pytest.mark.parametrize("media", [picture(A, 190, 20), picture(A, 10, 0), picture(A, 50) + picture(B, 60)])
def test_media_outside_or_overlapping_is_refused(media):
    with pytest.raises(CacheError, match="media span"):
        make_key(tokens(200), media=media)


@pytest.mark.parametrize("ids", [[-1], [2**31], [0.5], [[1]]])
def test_bad_token_ids_are_refused(ids):
    with pytest.raises(CacheError):
        PromptKey(Namespace(FINGERPRINT), ids)


def test_key_does_not_alias_the_callers_array():
    ids = np.array(tokens(64), dtype=np.int32)
    key = make_key(ids)
    before = key.page_key(0)
    ids[0] += 1
    assert key.page_key(0) == before
    assert key.token_ids[0] != ids[0]


@settings(derandomize=True, max_examples=60)
@given(st.lists(st.integers(0, 2), max_size=150), st.lists(st.integers(0, 2), max_size=150))
def test_common_tokens_is_the_common_prefix(a, b):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(make_key(a), make_key(b)) == expected


def test_common_tokens_ends_at_another_picture():
    ids = [7] * 200
    assert common_tokens(make_key(ids, media=picture(A)), make_key(ids, media=picture(A))) == 200
    assert common_tokens(make_key(ids, media=picture(A)), make_key(ids, media=picture(B))) == 70
    assert common_tokens(make_key(ids, media=picture(A)), make_key(ids)) == 70
    assert common_tokens(make_key(ids), make_key(ids, salt=b"x")) == 0
