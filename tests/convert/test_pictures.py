"""Pictures in calibration and evaluation: read from a corpus as a server reads them, seen as the engine sees them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_pictures import picture

from engine.config import EngineConfig, ModelConfig
from engine.convert.calibrate import calibrate
from engine.convert.calibration import Calibration
from engine.convert.corpus import CorpusReader, Sample, take
from engine.convert.evaluate import compare, draft_acceptance
from engine.convert.forward import Forward
from engine.errors import ModelFileError
from engine.image import PreprocessorConfig, load_picture
from engine.model import Model
from engine.tokenizer import Tokenizer
from engine.vision import VisionTower, rotary_positions
from engine.weights import load_weights
from server.config import DEMO_CHECKPOINT

LONGEST = 512


def quiet(done: int, total: int) -> None:
    """No progress line."""


def png(height: int, width: int, seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(height, width, seed)).save(buffer, "PNG")
    return buffer.getvalue()


def shown(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def chat(*parts: object, answer: object = "A red circle.") -> str:
    return json.dumps({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})


def read(directory: Path, *lines: str, longest: int = LONGEST) -> list[Sample]:
    path = directory / "corpus.jsonl"
    path.write_text("\n".join(lines))
    return list(CorpusReader(DEMO_CHECKPOINT, longest).file(path))


@pytest.fixture(scope="module")
def model() -> Iterator[Forward]:
    loaded = Forward(DEMO_CHECKPOINT, 1)
    yield loaded
    loaded.close()


def test_data_urls_and_files_are_the_same_pictures(tmp_path: Path) -> None:
    first, second = png(96, 64, 1), png(64, 160, 2)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/second.png").write_bytes(second)
    question = {"type": "text", "text": "What is it?"}
    inline, apart = read(
        tmp_path,
        chat(shown(data_url(first)), shown(data_url(second)), question),
        chat(shown(data_url(first)), shown("pictures/second.png"), question),
    )
    np.testing.assert_array_equal(inline.token_ids, apart.token_ids)
    config = ModelConfig.load(DEMO_CHECKPOINT)
    assert config.vision is not None
    limits = PreprocessorConfig.load(DEMO_CHECKPOINT, config.vision)
    for sample in (inline, apart):
        assert [span.count for span in sample.images] == [6, 10]
        for span, content in zip(sample.images, (first, second), strict=True):
            assert span.digest == load_picture(content, limits).digest
            assert (sample.token_ids[span.start : span.start + span.count] == config.image_token_id).all()
        assert (sample.token_ids == config.image_token_id).sum() == 16
        assert sample.first_label > sample.images[1].start + 10


def test_a_long_chat_keeps_its_picture(tmp_path: Path) -> None:
    long_text = {"type": "text", "text": "word " * 60}
    small = shown(data_url(png(64, 64, 1)))
    (whole,) = read(tmp_path, chat(long_text, small))
    (cut,) = read(tmp_path, chat(long_text, small), longest=len(whole.token_ids) - 40)
    (before,), (after,) = whole.images, cut.images
    assert after.start == before.start - 40
    np.testing.assert_array_equal(cut.token_ids, whole.token_ids[40:])
    with pytest.raises(ModelFileError, match=r"corpus\.jsonl:1: \d+ tokens with pictures, at most 64 fit"):
        read(tmp_path, chat(small, long_text), longest=64)


BAD = {
    "remote": (chat(shown("https://example.org/a.png")), "expected a data: URL or a file below"),
    "absolute": (chat(shown("/etc/passwd")), "expected a data: URL or a file below"),
    "upwards": (chat(shown("a/../../b.png")), "expected a data: URL or a file below"),
    "absent": (chat(shown("nowhere.png")), "nowhere.png: cannot be read"),
    "not-base64": (chat(shown("data:image/png;base64,%%%")), "base64"),
    "not-a-picture": (chat(shown(data_url(b"hello there"))), "not a picture that is read here"),
    "broken": (chat(shown(data_url(png(64, 64, 1)[:200]))), "PNG"),
    "no-url": (chat({"type": "image_url", "image_url": {}}), "the url of a picture is 'None'"),
    "other-part": (chat({"type": "video", "video": "x"}), "expected text or image_url"),
    "answer": (chat({"type": "text", "text": "x"}, answer=[]), "the assistant's content is a list"),
    "fake-place": (chat(shown(data_url(png(64, 64, 1))), {"type": "text", "text": "<|image_pad|>"}), "2 of 1 pictures"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_shown_is_refused_by_line(tmp_path: Path, case: str) -> None:
    line, message = BAD[case]
    with pytest.raises(ModelFileError) as caught:
        read(tmp_path, '{"text": "a good line"}', line)
    assert "corpus.jsonl:2: " in str(caught.value)
    assert message in str(caught.value)


def test_samples_run_as_prompts_do(model: Forward, tmp_path: Path) -> None:
    """The same bits as a prefill with the tower's rows and the picture's positions."""
    (sample,) = read(tmp_path, chat({"type": "text", "text": "Look:"}, shown(data_url(png(96, 128, 3)))))
    config = EngineConfig(threads=1, pass_tokens=2048)
    weights = load_weights(DEMO_CHECKPOINT, ModelConfig.load(DEMO_CHECKPOINT))
    assert weights.vision is not None
    engine = Model(weights, config, threads=1, cpus=None, max_context=2048)
    tower = VisionTower(weights.vision, engine.cpu.tier, engine.cpu.pool)
    (span,) = sample.images
    prompt = sample.token_ids[:-1]
    positions = rotary_positions(len(prompt), sample.images, weights.vision.config)
    rows = [(span.start, tower.encode(span.pixels))]
    expected = engine.prefill(engine.new_state(), prompt, positions, rows)
    tower.close()
    engine.close()
    *_, got = model.logits(sample)
    np.testing.assert_array_equal(got, expected)
    # Layer by layer too, which is how calibration goes.
    hidden = model.embed(sample)
    for layer in range(model.config.num_hidden_layers):
        hidden, _ = model.layer(sample, layer, hidden)
    np.testing.assert_allclose(model.head_input(hidden), model.final(sample), rtol=1e-4, atol=1e-4)


def seen(count: int) -> list[Sample]:
    """Held-out lessons with pictures."""
    lessons = CorpusReader(DEMO_CHECKPOINT, LONGEST).lessons(held_out=True, seed=3)
    return list(islice((sample for sample in lessons if sample.images), count))


def test_the_demo_model_answers_lessons_about_pictures(model: Forward) -> None:
    chosen = seen(12)
    assert all(sample.skill.startswith("see_") for sample in chosen)
    logits = [[row.copy() for row in model.logits(sample)] for sample in chosen]
    score = compare(chosen, logits, logits)
    right = sum(skill.exact for skill in score.skills.values())
    assert right >= 5
    # Other pixels, other answers: the pictures are what is looked at.
    blank = [
        Sample(
            s.token_ids, s.first_label, s.skill, tuple(type(i)(i.start, i.count, 0 * i.pixels, b"") for i in s.images)
        )
        for s in chosen
    ]
    blind = compare(chosen, logits, map(model.logits, blank))
    assert sum(skill.exact for skill in blind.skills.values()) < right / 2
    accepted = draft_acceptance(model, chosen)
    assert accepted is not None
    assert accepted > 0.5


def test_calibration_takes_pictures(model: Forward, tmp_path: Path) -> None:
    chosen = seen(2)
    calibrate(model, chosen, tmp_path / "statistics", second_order=False, progress=quiet)
    tokens = Calibration(tmp_path / "statistics").scores("tokens")
    total = sum(len(sample.token_ids) for sample in chosen)
    top = model.config.num_experts_per_tok
    for prefix, counts in tokens.items():
        assert counts.sum() == (total - len(chosen) * prefix.startswith("mtp.")) * top


def test_lessons_are_whole(model: Forward) -> None:
    """Tool definitions stand at the beginning: a lesson that lost them could not be answered."""
    chosen = take(CorpusReader(DEMO_CHECKPOINT, 256), None, 80, held_out=True, seed=2)
    (start,) = Tokenizer.load(DEMO_CHECKPOINT).encode("<|im_start|>", allow_special=True)
    assert max(len(sample.token_ids) for sample in chosen) <= 256
    assert {int(sample.token_ids[0]) for sample in chosen} == {start}


def test_lessons_have_pictures_only_where_they_can_be_seen() -> None:
    chosen = take(CorpusReader(DEMO_CHECKPOINT, LONGEST), None, 60, held_out=True, seed=1)
    assert any(sample.images for sample in chosen)
