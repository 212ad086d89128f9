"""Histories found by hypothesis: whatever was asked of an engine before, its logits are those of one without a cache.

Conversations branch, are edited and get other pictures; requests are withdrawn anywhere, read ahead, and asked by other
tenants under other salts; snapshots are evicted, move between memory and disk, are damaged there and outlive restarts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_models import add_turn_token, packed_checkpoint
from tiny_pictures import picture

from engine.config import CacheSettings, EngineConfig
from engine.core import (
    CacheOptions,
    CacheReport,
    Float32Array,
    GenerationRequest,
    ImageSpan,
    Progress,
    Prompt,
    SamplingParams,
    TokenResult,
)
from engine.engine import Engine
from engine.errors import Cancelled
from engine.tokenizer import Tokenizer
from prefix_cache import Lease
from server.config import DEMO_CHECKPOINT

Part = list[int] | ImageSpan
Turn = tuple[Part, ...]
PASS_TOKENS = 128


@dataclass(frozen=True)
class Subject:
    """A model and how to talk to it. user, answer: headers of turns; words: least and most id of plain text; picture:
    what stands before, in and behind one, None if the model does not see. ram: holds a few snapshots."""

    checkpoint: Path
    user: list[int]
    answer: list[int]
    words: tuple[int, int]
    picture: tuple[int, int, int] | None
    ram: int

    def text(self, seed: int, count: int) -> list[int]:
        ids: list[int] = np.random.default_rng(seed).integers(*self.words, count).tolist()
        return ids

    def turn(self, seed: int, count: int, look: tuple[int, int, int] | None) -> Turn:
        """A question, about a picture (height, width, seed) if the model sees."""
        head = [*self.user, *self.text(seed, count // 2)]
        tail = self.text(seed + 100, count - count // 2)
        if look is None or self.picture is None:
            return ([*head, *tail],)
        before, _, behind = self.picture
        pixels = picture(*look)
        span = ImageSpan(0, look[0] * look[1] // 1024, pixels, hashlib.sha256(repr(look).encode()).digest())
        return ([*head, before], span, [behind, *tail])

    def prompt(self, turns: list[Turn], *, ahead: bool = False) -> Prompt:
        """The conversation to the header of its answer, or of the next question."""
        ids: list[int] = []
        boundaries: list[int] = []
        images: list[ImageSpan] = []
        for turn in turns:
            if ids:
                boundaries.append(len(ids))
            for part in turn:
                if isinstance(part, ImageSpan):
                    assert self.picture is not None
                    images.append(dataclasses.replace(part, start=len(ids)))
                    ids += [self.picture[1]] * part.count
                    boundaries.append(len(ids))
                else:
                    ids += part
        boundaries.append(len(ids))
        ids += self.user if ahead else self.answer
        return Prompt(np.array(ids, np.int32), tuple(boundaries), tuple(images))


@pytest.fixture(scope="module", params=["tiny", "demo"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    if request.param == "tiny":
        directory = packed_checkpoint(tmp_path_factory.mktemp("histories") / "packed")
        add_turn_token(directory)
        return Subject(directory, [258, 84, 198], [258, 64, 198, 9, 198], (0, 180), None, 3 << 20)
    tokenizer = Tokenizer.load(DEMO_CHECKPOINT)
    user, answer = (
        tokenizer.encode(f"<|im_start|>{text}", allow_special=True) for text in ("user\n", "assistant\n<think>\n")
    )
    names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    before, pad, behind = (tokenizer.added_tokens[name] for name in names)
    return Subject(DEMO_CHECKPOINT, user, answer, (300, 3800), (before, pad, behind), 12 << 20)


class Watched:
    """An engine whose logits are written down, as they are before anything is drawn from them."""

    def __init__(self, subject: Subject, cache: CacheSettings | None) -> None:
        config = EngineConfig(threads=1, context_length=4096, pass_tokens=PASS_TOKENS, cache=cache)
        self.engine = Engine.load(subject.checkpoint, config)
        self._seen: list[Float32Array] = []
        model: Any = self.engine._model
        for name in ("logits", "decode"):
            setattr(model, name, self._written_down(getattr(model, name)))

    def _written_down(self, compute: Callable[..., Float32Array]) -> Callable[..., Float32Array]:
        def computed(*arguments: Any) -> Float32Array:
            result = compute(*arguments)
            self._seen.append(result.copy())
            return result

        return computed

    def ask(self, wanted: GenerationRequest, questions: int | None = None) -> tuple[list[Float32Array], list[int], Any]:
        """Logits, tokens and what the cache did; withdrawn when the engine has asked `questions` times."""
        self._seen.clear()
        left = iter(range(10**9 if questions is None else questions))
        tokens: list[int] = []
        report: CacheReport | None = None
        for item in self.engine.generate(wanted, lambda: next(left, None) is None):
            if isinstance(item, Progress):
                report = item.cache
            elif isinstance(item, TokenResult):
                tokens.append(item.token_id)
        return list(self._seen), tokens, report

    def withdraw(self, wanted: GenerationRequest, questions: int) -> bool:
        """Whether the request was withdrawn before it was done."""
        try:
            self.ask(wanted, questions)
        except Cancelled:
            return True
        return False


STEP = st.fixed_dictionaries({
    "base": st.integers(0, 7), "keep": st.integers(1, 3), "seed": st.integers(0, 2),
    "size": st.sampled_from([3, 40, 130, 330]),
    "look": st.sampled_from([None, (64, 96, 0), (64, 96, 1), (96, 64, 0)]),
    "edit": st.sampled_from(["", "", "token", "picture"]), "where": st.integers(0, 400),
    "before": st.sampled_from(["", "", "withdraw", "withdraw", "ahead", "ahead in part", "other tenant"]),
    "questions": st.integers(1, 45), "salt": st.sampled_from([b"", b"", b"", b"s"]),
    "exact": st.sampled_from([True, True, True, False]), "reply": st.booleans(),
    "then": st.sampled_from(["", "", "flush", "flush", "crowd", "restart", "lose a file", "flip a bit", "clear"]),
})  # fmt: skip


class History:
    """One engine's life."""

    def __init__(self, subject: Subject, oracle: Oracle, totals: Counter[str]) -> None:
        self.subject, self.oracle, self.totals = subject, oracle, totals
        self.folder = Path(tempfile.mkdtemp())
        self.known: list[list[Turn]] = [[subject.turn(7, 200, None)]]
        self.watched = self._load()

    def _load(self) -> Watched:
        return Watched(self.subject, CacheSettings(self.subject.ram, 4 * self.subject.ram, self.folder))

    @property
    def control(self) -> Any:
        return self.watched.engine.cache

    def step(self, *, base, keep, seed, size, look, edit, where, before, questions, salt, exact, reply, then) -> None:
        turns = list(self.known[-1 - base % len(self.known)][:keep])
        turns = self.edited(turns, edit, where) if edit else [*turns, self.subject.turn(seed, size, look)]
        self.known.append(turns)
        prompt = self.subject.prompt(turns)
        options = CacheOptions(salt=salt, exact=exact, keep_reply=lambda: reply)
        wanted = GenerationRequest("h", prompt, 3, SamplingParams(temperature=0.0), cache=options)
        self.prepare(wanted, turns, before, questions)
        logits, tokens, report = self.watched.ask(wanted)
        self.totals["carried"] += report.carried > 0
        if exact:
            assert report.provenance != "decode"
        # What is asked next depends on the bits of this answer only if it was exact.
        if report.provenance != "decode" and (exact or not report.carried):
            self.totals["compared"] += report.position > 0
            self.totals["pictures"] += report.position > 0 and bool(prompt.images)
            for got, expected in zip(logits, self.oracle.logits(prompt), strict=True):
                assert np.array_equal(got, expected), report
        if reply:
            self.known.append([(*turns[0],), *turns[1:], ([*self.subject.answer, *tokens],)])
        self.then(then, where)
        self.check()

    def edited(self, turns: list[Turn], edit: str, where: int) -> list[Turn]:
        """One token of the last turn changed, or its picture for another of the same size."""
        *earlier, last = turns
        parts: list[Part] = list(last)
        if edit == "token" and isinstance(parts[-1], list) and len(parts[-1]) > 4:
            text = list(parts[-1])
            text[3 + where % (len(text) - 3)] = self.subject.words[1] + 1
            parts[-1] = text
        elif edit == "picture" and len(parts) > 1 and isinstance(parts[1], ImageSpan):
            pixels = parts[1].pixels.copy()
            pixels[where % 64, where % 60, where % 3] ^= 1
            digest = hashlib.sha256(pixels).digest()
            parts[1] = dataclasses.replace(parts[1], pixels=pixels, digest=digest)
        return [*earlier, tuple(parts)]

    def prepare(self, wanted: GenerationRequest, turns: list[Turn], before: str, questions: int) -> None:
        """What happens between the last answer and this request."""
        if before == "withdraw":
            self.totals["withdrawn"] += self.watched.withdraw(wanted, questions)
        elif before.startswith("ahead"):
            prompt = self.subject.prompt(turns[:-1] or turns, ahead=True)
            options = dataclasses.replace(wanted.cache, shadow=True, exact=questions % 2 == 0)
            self.watched.withdraw(
                GenerationRequest("a", prompt, 0, cache=options), questions if "part" in before else 10**6
            )
        elif before == "other tenant":
            other = dataclasses.replace(wanted.cache, scope=b"another")
            _, _, report = self.watched.ask(dataclasses.replace(wanted, cache=other))
            # Nothing of another tenant's tells that the prompt is known.
            assert self.totals["tenants"] or report.position == 0
            self.totals["tenants"] += 1

    def then(self, what: str, where: int) -> None:
        """What happens to the cache behind the answer."""
        if what == "flush":
            self.control.prefix.flush()
        elif what == "crowd":
            # Other conversations push this one's snapshots out of memory, to the disk if they are there.
            for seed in range(2):
                crowd = self.subject.prompt([self.subject.turn(900 + where + seed, 700, None)])
                self.watched.ask(GenerationRequest("c", crowd, 1, cache=CacheOptions(salt=b"crowd")))
        elif what == "restart":
            self.count()
            self.watched.engine.close()
            self.watched = self._load()
            self.totals["restarts"] += 1
        elif what == "clear":
            self.control.clear(None)
            with self.control.prefix._writer.at_rest():
                assert self.control.gauges()["ram_bytes"] == self.control.gauges()["disk_bytes"] == 0
                assert self.files() == []
        elif what in ("lose a file", "flip a bit"):
            self.control.prefix.flush()
            files = self.files()
            for path in files[where % len(files) :][:1] if files else ():
                if what == "lose a file":
                    path.unlink()
                else:
                    data = bytearray(path.read_bytes())
                    data[where * 7919 % len(data)] ^= 1 << where % 8
                    path.write_bytes(data)
            self.then("crowd", where)  # what is still in memory would be taken from there, and the damage never seen

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.suffix in (".kv", ".snap"))

    def check(self) -> None:
        gauges = self.control.gauges()
        assert gauges["ram_bytes"] <= gauges["ram_bytes_max"] <= gauges["ram_capacity_bytes"] <= self.subject.ram
        assert gauges["disk_bytes"] <= gauges["disk_capacity_bytes"]
        assert self.control.prefix.check_integrity() == []

    def count(self) -> None:
        stats = self.control.prefix.stats
        self.totals.update(stats.hits_by_tier)
        self.totals["evicted"] += sum(stats.evicted_ram.values())
        self.totals["broken"] += stats.disk_corrupt + stats.misses["kv_gap"]

    def close(self) -> None:
        self.count()
        self.watched.engine.close()
        shutil.rmtree(self.folder)


class Oracle:
    """The same model without a cache, asked once for each prompt."""

    def __init__(self, subject: Subject) -> None:
        self._watched = Watched(subject, None)
        self._known: dict[tuple[bytes, ...], list[Float32Array]] = {}

    def logits(self, prompt: Prompt) -> list[Float32Array]:
        name = (prompt.token_ids.tobytes(), *(image.digest for image in prompt.images))
        if name not in self._known:
            wanted = GenerationRequest("o", prompt, 3, SamplingParams(temperature=0.0))
            self._known[name] = self._watched.ask(wanted)[0]
        return self._known[name]

    def close(self) -> None:
        self._watched.engine.close()


@pytest.fixture(scope="module")
def oracle(subject: Subject) -> Iterator[Oracle]:
    made = Oracle(subject)
    yield made
    made.close()


def live(subject: Subject, oracle: Oracle, examples: int) -> Counter[str]:
    totals: Counter[str] = Counter()

    # Shrinking would take minutes; the steps of a failure are told as they are.
    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.lists(STEP, min_size=8, max_size=16))
    def run(steps: list[dict[str, Any]]) -> None:
        history = History(subject, oracle, totals)
        try:
            for step in steps:
                history.step(**step)
        finally:
            history.close()

    run()
    return totals


EVENTS = ("compared", "withdrawn", "carried", "ram", "disk", "evicted", "restarts", "tenants")


def test_any_history_gives_the_logits_of_an_engine_without_cache(subject: Subject, oracle: Oracle) -> None:
    totals = live(subject, oracle, 4)
    for event in (*EVENTS, *(["pictures"] if subject.picture else [])):
        assert totals[event] > 0, f"{event}: it did not happen ({totals})"


@pytest.mark.exhaustive
def test_many_histories_give_the_logits_of_an_engine_without_cache(subject: Subject, oracle: Oracle) -> None:
    examples = 150
    totals = live(subject, oracle, examples)
    for event in (*EVENTS, "broken", *(["pictures"] if subject.picture else [])):
        assert totals[event] >= examples // 10, f"{event}: too rare for the test to mean anything ({totals})"


@pytest.mark.parametrize("part", ["state", "tail"])
def test_a_wrong_byte_in_a_snapshot_is_noticed(
    subject: Subject, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The comparison above can fail."""
    plain = Lease.restore

    def wrong(self: Lease, targets: Any) -> None:
        plain(self, targets)
        if part == "state":
            targets[-1].reshape(-1)[7] += 1.0
        elif self.tail is not None:
            self.tail = np.zeros_like(self.tail)

    monkeypatch.setattr(Lease, "restore", wrong)
    with pytest.raises(AssertionError, match="CacheReport"):
        live(subject, oracle, 4)
