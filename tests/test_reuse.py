"""The engine with its prefix cache: whatever was asked before, answers have the bits of an engine without one."""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import shutil
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import add_turn_token, packed_checkpoint

from engine.config import CacheSettings, EngineConfig, ModelConfig
from engine.core import CacheOptions, CacheReport, GenerationRequest, Progress, Prompt, SamplingParams, TokenResult
from engine.engine import Engine
from engine.errors import Cancelled, ConfigError, OutOfMemory, RequestError
from engine.memory import report
from engine.reuse import _RULES, cache_bytes, clear_folders, list_folders
from engine.state import SequenceState
from engine.weights import load_weights
from prefix_cache import PrefixCache, policy

TURN, NEWLINE, ASSISTANT = 258, 198, 64  # of the byte-level tokenizer: the added token, "Ċ" and "a"
RAM = 8 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed tiny model, with a token that opens turns."""
    directory = packed_checkpoint(tmp_path_factory.mktemp("reuse") / "packed")
    tokenizer = add_turn_token(directory)
    assert tokenizer.token_to_id("<|im_start|>") == TURN
    assert tokenizer.encode("\na").ids == [NEWLINE, ASSISTANT]
    return directory


def config(**more: Any) -> EngineConfig:
    return EngineConfig(**{"threads": 1, "context_length": 4096, "pass_tokens": 128, **more})


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Engine]:
    with Engine.load(checkpoint, config()) as engine:
        yield engine


Load = Callable[..., Engine]


@pytest.fixture
def load(checkpoint: Path, tmp_path: Path) -> Iterator[Load]:
    """Loads engines with a cache; its disk tier lies in the test's directory."""
    engines: list[Engine] = []

    def make(ram: int = RAM, disk: int = 64 << 20) -> Engine:
        engines.append(Engine.load(checkpoint, config(cache=CacheSettings(ram, disk, tmp_path / "prefix"))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 180, count).tolist()


def turn(seed: int, count: int) -> list[int]:
    return [TURN, 84, NEWLINE, *words(seed, count)]


def request(*turns: list[int], max_tokens: int = 2, **options: Any) -> GenerationRequest:
    """A conversation that ends in the header of the answer."""
    ids: list[int] = []
    boundaries: list[int] = []
    for part in [*turns, [TURN, ASSISTANT, NEWLINE, 9, NEWLINE]]:
        if ids:
            boundaries.append(len(ids))
        ids += part
    prompt = Prompt(np.array(ids, np.int32), tuple(boundaries))
    sampling = SamplingParams(temperature=0.0)
    return GenerationRequest("r", prompt, max_tokens, sampling, top_logprobs=8, cache=CacheOptions(**options))


def run(engine: Engine, wanted: GenerationRequest) -> tuple[list[TokenResult], CacheReport | None]:
    """Tokens with their log-probabilities, and what the cache did."""
    results, report = [], None
    for item in engine.generate(wanted, lambda: False):
        if isinstance(item, Progress):
            report = item.cache
            assert item.cached <= item.processed <= item.total
        else:
            results.append(item)
    return results, report


def position(engine: Engine, wanted: GenerationRequest) -> int:
    report = run(engine, wanted)[1]
    assert report is not None
    return report.position


def cancel_after(engine: Engine, wanted: GenerationRequest, questions: int) -> None:
    """Withdraw `wanted` when the engine has asked `questions` times; nothing happens if it is done before."""
    asked = iter(range(questions))
    try:
        list(engine.generate(wanted, lambda: next(asked, None) is None))
    except Cancelled:
        return


def test_a_repetition_has_the_bits_of_the_first_time(load: Load, plain: Engine) -> None:
    engine = load()
    wanted = request(turn(1, 300), turn(2, 200), max_tokens=4)
    expected, none = run(plain, wanted)
    assert none is None
    first, cold = run(engine, wanted)
    second, warm = run(engine, wanted)
    assert first == second == expected
    assert cold is not None
    assert warm is not None
    assert (cold.position, cold.miss_reason) == (0, "cold")
    assert (warm.recomputed, warm.tier, warm.provenance, warm.miss_reason) == (2, "ram", "prefill", None)


def test_pass_length_is_without_effect(checkpoint: Path, plain: Engine) -> None:
    wanted = request(turn(1, 300), turn(2, 700))
    with Engine.load(checkpoint, config(pass_tokens=512)) as engine:
        assert run(engine, wanted) == run(plain, wanted)


def test_any_history_gives_the_bits_of_an_engine_without_cache(load: Load, plain: Engine) -> None:
    """Branches, edits, cancels at any layer, evictions, disk, decoded turns, shadows and restarts, in random order."""
    rng = random.Random(5)
    expected: dict[bytes, list[TokenResult]] = {}
    histories: list[list[list[int]]] = [[turn(0, 200)]]
    engine = load(ram=3 << 20)
    reused = cancelled = 0
    for number in range(60):
        parts = [list(part) for part in rng.choice(histories[-6:])[: rng.randint(1, 3)]]
        if rng.random() < 0.6:
            parts.append(turn(rng.randint(1, 4), rng.choice([3, 70, 200])))
        elif len(parts[-1]) > 8:
            parts[-1][rng.randint(4, len(parts[-1]) - 1)] = 181
        histories.append(parts)
        wanted = request(*parts, exact=True, keep_reply=lambda: True)
        if rng.random() < 0.3:
            cancel_after(engine, wanted, rng.randint(1, 30))
            cancelled += 1
        if rng.random() < 0.4:
            # Read ahead of another conversation, to its end or not, with an exact mind or not.
            ahead = shadow(*rng.choice(histories[-6:]), exact=rng.random() < 0.5)
            cancel_after(engine, ahead, rng.choice([3, 12, 1000]))
        results, report = run(engine, wanted)
        gauges: Any = engine.cache.gauges() if engine.cache is not None else {}
        assert gauges["ram_bytes_max"] <= 3 << 20
        name = wanted.prompt.token_ids.tobytes()
        if name not in expected:
            expected[name] = run(plain, wanted)[0]
        assert results == expected[name], f"request {number}: {report}"
        assert report is not None
        reused += report.position > 0
        if number % 20 == 19:
            engine.close()
            engine = load(ram=3 << 20)
    assert reused > 30
    assert cancelled > 10


def test_cancelled_work_is_kept_to_the_last_pass(load: Load, plain: Engine) -> None:
    engine = load()
    wanted = request(turn(3, 1000))
    cancel_after(engine, wanted, 4 * 5 + 2)  # five passes of four layers: the header, then 128 tokens each
    results, report = run(engine, wanted)
    assert report is not None
    assert report.position >= 4 * 128
    assert results == run(plain, wanted)[0]


def test_an_interrupted_pass_goes_on_where_it_was(load: Load, plain: Engine) -> None:
    engine = load()
    wanted = request(turn(3, 1000))
    cancel_after(engine, wanted, 2 * 5 + 2)  # two passes, and two layers of the third
    cancel_after(engine, wanted, 1)  # one more
    results, report = run(engine, wanted)
    assert report is not None
    assert (report.position, report.carried) == (256, 128 * 3 // 4)
    assert results == run(plain, wanted)[0]
    assert run(engine, wanted)[1] is not None
    assert integrity(engine) == []


def test_an_interrupted_pass_outlives_a_request_that_ends_before_it_goes_on(load: Load, plain: Engine) -> None:
    engine = load()
    wanted = request(turn(3, 1000))
    cancel_after(engine, wanted, 2 * 5 + 2)
    run(engine, request(turn(4, 40), write=False))  # leaves its own pass in the engine
    cancel_after(engine, wanted, 0)
    results, report = run(engine, wanted)
    assert report is not None
    assert (report.position, report.carried) == (256, 128 * 2 // 4)
    assert results == run(plain, wanted)[0]
    assert integrity(engine) == []


def test_a_pass_that_is_whole_is_kept_as_such(load: Load, plain: Engine) -> None:
    engine = load()
    wanted = request(turn(3, 1000))
    cancel_after(engine, wanted, 2 * 5 + 4)  # the fifth question finds that all layers are done
    results, report = run(engine, wanted)
    assert report is not None
    assert (report.position, report.carried) == (384, 0)
    assert results == run(plain, wanted)[0]


@pytest.mark.parametrize("change", ["token", "salt", "write", "read", "clear"])
def test_an_interrupted_pass_is_nobody_elses(load: Load, plain: Engine, change: str) -> None:
    engine = load()
    first = turn(3, 1000)
    cancel_after(engine, request(first, write=change != "write"), 2 * 5 + 3)
    if change == "token":
        first = [*first[:300], 181, *first[301:]]
    elif change == "clear":
        assert engine.cache is not None
        engine.cache.clear(None)
    options = {"salt": {"salt": b"s"}, "read": {"read": False}}.get(change, {})
    results, report = run(engine, request(first, **options))
    assert report is not None
    assert report.carried == 0
    assert results == run(plain, request(first))[0]
    assert integrity(engine) == []


def test_exact_requests_take_up_exact_passes_only(load: Load, plain: Engine) -> None:
    engine = load()
    begun = request(turn(1, 150), max_tokens=20, keep_reply=lambda: True)
    reply = [result.token_id for result in run(engine, begun)[0]]
    following = [*begun.prompt.token_ids.tolist(), *reply], turn(2, 700)
    cancel_after(engine, request(*following), 2 * 5 + 3)
    exact, report = run(engine, request(*following, exact=True, write=False))
    assert report is not None
    assert report.carried == 0
    assert exact == run(plain, request(*following))[0]


def test_what_is_parked_makes_room_for_snapshots(load: Load, plain: Engine) -> None:
    engine = load(ram=2 << 20)
    cancel_after(engine, request(turn(3, 1000)), 2 * 5 + 3)
    assert engine.cache is not None
    for seed in range(5, 12):
        wanted = request(turn(seed, 300))
        assert run(engine, wanted)[0] == run(plain, wanted)[0]
    assert integrity(engine) == []
    results, report = run(engine, request(turn(3, 1000)))
    assert report is not None
    assert report.carried == 0
    assert results == run(plain, request(turn(3, 1000)))[0]


@pytest.mark.parametrize(("tenant", "carried"), [(b"a", 0), (b"b", 128 * 2 // 4)])
def test_tenants_drop_their_own_interrupted_passes_only(load: Load, plain: Engine, tenant: bytes, carried: int) -> None:
    engine = load()
    wanted = request(turn(3, 1000), scope=b"a")
    cancel_after(engine, wanted, 2 * 5 + 2)
    assert engine.cache is not None
    engine.cache.clear(tenant)
    assert (engine.cache.gauges()["ram_bytes"] == 0) == (carried == 0)
    results, report = run(engine, wanted)
    assert report is not None
    assert report.carried == carried
    assert results == run(plain, wanted)[0]


def integrity(engine: Engine) -> list[str]:
    control: Any = engine.cache
    problems: list[str] = control.prefix.check_integrity()
    return problems


def test_replies_are_kept_on_demand_and_never_serve_exact_requests(load: Load, plain: Engine) -> None:
    engine = load()
    asked = [True]
    wanted = request(turn(1, 150), max_tokens=20, keep_reply=lambda: asked[0])
    reply = [result.token_id for result in run(engine, wanted)[0]]
    ids = wanted.prompt.token_ids.tolist()
    following = [*ids, *reply], turn(2, 60)
    assert position(engine, request(*following)) == len(ids) + 19
    exact, report = run(engine, request(*following, exact=True, write=False))
    assert report is not None
    assert report.provenance == "prefill"
    assert exact == run(plain, request(*following))[0]
    asked[0] = False
    other = request(turn(7, 150), max_tokens=20, keep_reply=lambda: asked[0])
    reply = [result.token_id for result in run(engine, other)[0]]
    assert position(engine, request([*other.prompt.token_ids.tolist(), *reply], turn(2, 60))) < len(ids)


def test_a_reply_cut_short_is_kept_as_far_as_it_went(load: Load) -> None:
    engine = load()
    wanted = request(turn(1, 150), max_tokens=50, keep_reply=lambda: True)
    items = engine.generate(wanted, lambda: False)
    tokens: list[int] = []
    for item in items:
        if isinstance(item, TokenResult):
            tokens.append(item.token_id)
            if len(tokens) == 10:
                break
    items.close()
    ids = wanted.prompt.token_ids.tolist()
    assert position(engine, request([*ids, *tokens], turn(2, 60))) == len(ids) + 9


def test_scopes_salts_and_switches(load: Load) -> None:
    engine = load()
    parts = turn(1, 200), turn(2, 100)
    run(engine, request(*parts, scope=b"a"))
    assert position(engine, request(*parts, scope=b"b", write=False)) == 0
    assert position(engine, request(*parts, scope=b"a", salt=b"s", write=False)) == 0
    assert position(engine, request(*parts, scope=b"a", read=False)) == 0
    assert position(engine, request(*parts, scope=b"b", write=False)) == 0
    assert position(engine, request(*parts, scope=b"a")) > 0


def test_restart_and_other_models(load: Load, checkpoint: Path, tmp_path: Path) -> None:
    wanted = request(turn(1, 200), turn(2, 100))
    engine = load()
    expected = run(engine, wanted)[0]
    engine.close()
    engine = load()
    results, report = run(engine, wanted)
    assert results == expected
    assert report is not None
    assert (report.tier, report.recomputed) == ("disk", 2)
    engine.close()
    other = shutil.copytree(checkpoint, tmp_path / "other")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    with Engine.load(other, config(cache=CacheSettings(RAM, 64 << 20, tmp_path / "prefix"))) as changed:
        assert position(changed, wanted) == 0


def test_a_change_where_nobody_looks_is_another_model(load: Load, checkpoint: Path, tmp_path: Path) -> None:
    """One nibble, in the middle of a tensor that is only sampled."""
    place = shutil.copytree(checkpoint, tmp_path / "edited")
    file = place / "model.safetensors"
    settings = CacheSettings(RAM, 64 << 20, tmp_path / "prefix")
    wanted = request(turn(1, 200), turn(2, 100))
    with Engine.load(place, config(cache=settings)) as engine:
        run(engine, wanted)
    weights = load_weights(place, ModelConfig.load(place))
    name = "model.language_model.embed_tokens.weight"
    digest = weights.file.sampled_digest()
    data = bytearray(file.read_bytes())
    at = data.find(weights.file.tensors[name].data.tobytes()) + 10_000
    data[at] ^= 1
    before = file.stat()
    file.unlink()
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert load_weights(place, ModelConfig.load(place)).file.sampled_digest() == digest
    with Engine.load(place, config(cache=settings)) as engine:
        assert position(engine, wanted) == 0


def test_fingerprints_tell_apart_what_changes_bits(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(**more: Any) -> str:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        with Engine.load(checkpoint, config(cache=CacheSettings(RAM, 64 << 20, place), **more)):
            (name,) = (path.name for path in place.iterdir())
        return name

    same = folder()
    assert folder(threads=2, context_length=1000) == same
    assert len({same, folder(simd_tier="scalar"), folder(compute="f32")}) == 3
    # What a state is, and how it goes to the cache and back: other bytes under the same name would be a wrong hit.
    assert {"engine.model", "engine.state", "engine.reuse"} <= {module.__name__ for module in _RULES}
    edited = types.ModuleType("policy")
    edited.__file__ = str(tmp_path / "policy.py")
    Path(edited.__file__).write_bytes(Path(str(policy.__file__)).read_bytes() + b"# a rule more")
    monkeypatch.setattr("engine.reuse._RULES", (*_RULES[:-1], edited))
    assert _RULES[-1] is policy
    assert folder() != same


def test_administration(load: Load, tmp_path: Path) -> None:
    engine = load()
    assert engine.cache is not None
    run(engine, request(turn(1, 200), turn(2, 100), scope=b"a"))
    run(engine, request(turn(3, 200), scope=b"b"))
    entries = engine.cache.entries(b"a", 100)
    assert [entry.position for entry in entries] == sorted((e.position for e in entries), reverse=True)
    assert len(engine.cache.entries(None, 100)) == len(entries) + len(engine.cache.entries(b"b", 100))
    assert len(engine.cache.entries(None, 1)) == 1
    assert engine.cache.pin(entries[0].id, True, b"a")
    assert not engine.cache.pin(entries[0].id, True, b"b")
    assert engine.cache.entries(b"a", 1)[0].pinned
    assert engine.cache.counters()["lookups"] == 2
    assert engine.cache.gauges()["pinned"] == 1
    assert engine.cache.clear(b"b") > 0
    assert len(engine.cache.entries(None, 100)) == len(entries)
    place, (folder,) = list_folders(tmp_path / "prefix")
    assert place == tmp_path / "prefix"
    assert folder.in_use
    assert clear_folders(place) == (0, [folder.fingerprint])
    engine.close()
    assert clear_folders(place)[0] > 0
    assert list_folders(place) == (place, [])


def test_pins_have_a_limit(load: Load) -> None:
    engine = load(ram=2 << 20)
    assert engine.cache is not None
    run(engine, request(*(turn(seed, 150) for seed in range(4))))
    run(engine, request(*(turn(seed, 150) for seed in range(9, 13))))
    refused: list[RequestError] = []
    for entry in engine.cache.entries(None, 100):
        try:
            engine.cache.pin(entry.id, True, None)
        except RequestError as error:
            refused.append(error)
    assert refused
    assert refused[0].code == "pin_limit"
    assert "pinned snapshots would need" in str(refused[0])


def test_memory_that_cannot_be_had_is_named(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfMemory, match=rf"{1 << 50} of them for the prefix cache \(cache_ram\)"):
        load(ram=1 << 50)
    monkeypatch.setattr("engine.placement.available_bytes", lambda: 1 << 62)
    with pytest.raises(ConfigError, match=rf"cannot work with {1 << 60} bytes of memory: {1 << 60} bytes cannot"):
        load(ram=1 << 60)


def test_the_log_says_where_snapshots_go(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def said(directory: Path, disk: int | None = 1 << 30) -> str:
        caplog.clear()
        with caplog.at_level("INFO"), Engine.load(checkpoint, config(cache=CacheSettings(RAM, disk, directory))):
            pass
        return caplog.messages[-1]

    place = tmp_path / "cache"
    assert said(place).endswith(f", 1.0 GiB in {place}.")
    with Engine.load(checkpoint, config(cache=CacheSettings(RAM, 1 << 30, place))):
        assert said(place).endswith(f", {place} read only (another process writes this directory).")
    (tmp_path / "file").touch()
    assert said(tmp_path / "file").endswith("nothing on disk.")
    monkeypatch.setattr("engine.reuse.default_disk_bytes", lambda directory: 0)
    assert said(place, None).endswith("nothing on disk.")
    assert f"the file system of {place} has no room" in caplog.text


def test_too_little_memory(load: Load, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the prefix cache cannot work with 100000 bytes of memory"):
        load(ram=100_000)
    weights = load_weights(checkpoint, ModelConfig.load(checkpoint))
    wanted = config(cache=CacheSettings())
    assert cache_bytes(weights, dataclasses.replace(wanted, cache=None)) == 0
    assert cache_bytes(weights, config(cache=CacheSettings(ram_bytes=5))) == 5
    assert cache_bytes(weights, wanted) >= 64 << 20
    monkeypatch.setattr("engine.placement.available_bytes", lambda: 2 << 20)
    assert cache_bytes(weights, wanted) == 0


def test_a_user_without_a_home_has_nothing_on_disk(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with Engine.load(checkpoint, config(cache=CacheSettings(RAM))) as engine:
        assert engine.cache is not None
        assert engine.cache.gauges()["disk_readable"] == 0
        run(engine, request(turn(1, 200)))
        assert position(engine, request(turn(1, 200))) > 0
    assert "nothing on disk: this user has no home directory, and XDG_CACHE_HOME is not set" in caplog.text
    for look in (list_folders, clear_folders):
        with pytest.raises(ConfigError, match="this user has no home directory"):
            look(None)


def opened(*turns: list[int]) -> list[int]:
    """A conversation up to the header of its next question."""
    return [*(token for part in turns for token in part), TURN, 84, NEWLINE]


def shadow(*turns: list[int], **options: Any) -> GenerationRequest:
    prompt = Prompt(np.array(opened(*turns), np.int32))
    return GenerationRequest("s", prompt, 0, cache=CacheOptions(shadow=True, **options))


def test_a_shadow_is_met_where_it_ends(load: Load, plain: Engine) -> None:
    engine = load()
    assert engine.cache is not None
    history = turn(1, 300), turn(2, 90)
    ahead = shadow(*history)
    length = len(ahead.prompt.token_ids)
    assert engine.cache.covered(ahead.prompt, ahead.cache) == 0
    last = list(engine.generate(ahead, lambda: False))[-1]
    assert isinstance(last, Progress)
    assert (last.cached, last.processed, last.total) == (0, length, length)
    assert engine.cache.covered(ahead.prompt, ahead.cache) == length
    following = request(*history, turn(3, 50))
    results, report = run(engine, following)
    assert report is not None
    # The header of a short turn is no cut, so the bits are those of another way to divide the prompt.
    assert (report.position, report.provenance) == (length, "decode")
    exact, report = run(engine, request(*history, turn(3, 50), exact=True, write=False))
    assert exact == run(plain, following)[0]
    assert [result.token_id for result in results] == [result.token_id for result in exact]
    counters = engine.cache.counters()
    assert counters["shadow_tokens"] == counters["shadow_used_tokens"] == length
    assert counters["hits_by_kind"] == {"shadow": 1}


def test_an_exact_shadow_gives_the_bits_of_an_engine_without_cache(load: Load, plain: Engine) -> None:
    engine = load()
    history = turn(1, 300), turn(2, 90)
    list(engine.generate(shadow(*history, exact=True), lambda: False))
    following = request(*history, turn(3, 50), exact=True)
    results, report = run(engine, following)
    assert report is not None
    assert report.provenance == "prefill"
    assert 0 <= len(opened(*history)) - report.position < 64
    assert results == run(plain, following)[0]


def test_a_shadow_that_gives_way_keeps_what_it_read(load: Load, plain: Engine) -> None:
    engine = load()
    assert engine.cache is not None
    history = (turn(1, 700),)
    cancel_after(engine, shadow(*history), 2 * 5 + 2)  # two passes of four layers, and a half
    counters = engine.cache.counters()
    assert counters["shadow_tokens"] == 2 * 128
    assert position(engine, request(*history, turn(3, 50))) == counters["shadow_tokens"]
    assert engine.cache.counters()["shadow_used_tokens"] == counters["shadow_tokens"]


def test_shadows_keep_to_their_scope_and_to_what_may_be_written(load: Load) -> None:
    engine = load()
    history = (turn(1, 300),)
    list(engine.generate(shadow(*history, scope=b"a", salt=b"s"), lambda: False))
    following = *history, turn(3, 50)
    assert position(engine, request(*following, scope=b"b", salt=b"s", write=False)) == 0
    assert position(engine, request(*following, scope=b"a", write=False)) == 0
    assert position(engine, request(*following, scope=b"a", salt=b"s", write=False)) == 306


def test_a_running_prefill_stays_inside_the_memory_of_the_cache(load: Load) -> None:
    engine = load(ram=2 << 20)
    assert engine.cache is not None
    run(engine, request(turn(1, 150), turn(2, 150)))
    for _ in engine.generate(request(turn(3, 1500)), lambda: False):
        gauges: Any = engine.cache.gauges()
        assert gauges["ram_bytes"] <= gauges["ram_bytes_max"] <= gauges["ram_capacity_bytes"] <= 2 << 20
    assert all(entry.kind != "cancel" for entry in engine.cache.entries(None, 1000))


def test_memory_for_the_next_snapshot_is_found_before_a_request_needs_it(load: Load) -> None:
    engine = load(64 << 20)
    arena: Any = engine.cache.prefix._index.arena  # type: ignore[union-attr]
    end = time.monotonic() + 30
    while not arena.is_prepared and time.monotonic() < end:
        time.sleep(0.01)
    ready = arena.ahead * arena.block_bytes
    assert 0 < ready < 1 << 20  # a small part of the arena, of which the rest is not there
    assert report(arena._memory.reshape(-1)).resident * (64 << 20) == -(-ready // mmap.PAGESIZE) * mmap.PAGESIZE
    run(engine, request(turn(1, 400)))
    assert integrity(engine) == []


def test_a_prompt_that_cannot_begin_gives_back_what_it_borrowed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    wanted = request(turn(1, 200), turn(2, 100))
    run(engine, wanted)

    def short_of_memory(*arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(SequenceState, "adopt", short_of_memory)
        with pytest.raises(MemoryError):
            run(engine, wanted)
    assert engine.cache is not None
    engine.cache.clear(None)
    assert integrity(engine) == []  # nothing but snapshots held memory
    assert engine.cache.gauges()["ram_bytes"] == 0


def test_work_that_was_taken_up_does_not_count_as_fast(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    counted: list[int] = []
    monkeypatch.setattr(PrefixCache, "observe_prefill", lambda cache, tokens, seconds: counted.append(tokens))
    wanted = request(turn(1, 600))
    layers = engine.model.num_hidden_layers
    cancel_after(engine, wanted, 2 * layers)
    _, report = run(engine, wanted)
    assert report is not None
    assert report.carried > 0
    assert counted == [report.tokens - report.position - report.carried]
