"""The lessons of the demo model: seeded, split cleanly, rendered and packed as the model will see them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.demo.recipe import data, lessons, pictures, tools
from engine.demo.recipe.data import LESSONS, Document, Encoder, Form, Packer
from engine.demo.recipe.lessons import Sample, World

WORLD = World([], [])
SMALL = Form(rows=2, length=1024, labels=900, image_rows=640)


@pytest.fixture(scope="module")
def encoder(repository: Path) -> Encoder:
    """Encodes with the shipped tokenizer and template."""
    tokenizer = Tokenizer.from_file(str(repository / "engine/demo/checkpoint/tokenizer.json"))
    return Encoder(tokenizer, data.TEMPLATE_PATH.read_text("utf-8"))


@pytest.mark.parametrize("lesson", [lesson for lesson, _ in LESSONS], ids=lambda lesson: lesson.__name__)
def test_same_seed_same_sample(lesson: data.Lesson) -> None:
    first, second = (data.surround(r, WORLD, lesson(r, WORLD)) for r in (random.Random(3), random.Random(3)))
    template = data.TEMPLATE_PATH.read_text("utf-8")
    assert data.render(first, template) == data.render(second, template)
    assert first.answer or first.calls


def test_training_never_shows_held_out_content() -> None:
    r = random.Random(4)
    samples = [data.draw_sample(r, WORLD, 1, test) for test in (False, True) for _ in range(40)]
    assert [data.held_out(sample) for sample in samples] == [False] * 40 + [True] * 40


def test_focus_selects_lessons() -> None:
    only = {lesson.__name__: 0.0 for lesson, _ in LESSONS} | {"where": 1.0}
    assert {data.draw_sample(random.Random(i), WORLD, 1, False, only).skill for i in range(9)} == {"where"}


def test_a_call_is_written_as_the_template_writes_it() -> None:
    template = data.TEMPLATE_PATH.read_text("utf-8")
    for seed in range(30):
        sample = tools.call(random.Random(seed), WORLD)
        turn = {"role": "assistant", "content": "", "tool_calls": []}
        for name, arguments in sample.calls:
            turn["tool_calls"].append({"function": {"name": name, "arguments": arguments}})  # type: ignore[attr-defined]
        text = data.chat_template(template).render(messages=[*sample.messages, turn])
        assert text.endswith("\n".join(data.call_text(*call) for call in sample.calls) + "<|im_end|>\n")


def test_arguments_of_calls_follow_their_schema() -> None:
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    for seed in range(200):
        sample = tools.call(random.Random(seed), WORLD)
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in sample.tools}
        for name, arguments in sample.calls:
            assert set(schemas[name]["required"]) <= set(arguments) <= set(schemas[name]["properties"])
            for key, value in arguments.items():
                schema = schemas[name]["properties"][key]
                assert isinstance(value, kinds[schema["type"]])  # type: ignore[arg-type]
                assert value in schema.get("enum", [value])


def test_positions_around_a_picture(encoder: Encoder) -> None:
    sample = pictures.one_thing(random.Random(1), World([], [], size=(128, 64)))
    document = encoder.sample(sample)
    start = document.image_at[0]
    assert document.image_at == list(range(start, start + 8))
    assert document.positions[:, start : start + 8].tolist() == [
        [start] * 8,
        [start] * 4 + [start + 1] * 4,
        [start, start + 1, start + 2, start + 3] * 2,
    ]
    assert document.positions[:, start + 8].tolist() == [start + 4] * 3
    assert document.positions.shape == (3, len(document.ids))


def test_two_things_stand_in_one_relation_only() -> None:
    for seed in range(50):
        sample = pictures.two_things(random.Random(seed), World([], [], size=(96, 64)))
        _, _, spots, half, _ = sample.core
        gaps = [abs(a - b) for a, b in zip(*spots, strict=True)]
        assert min(gaps) <= half < 2 * half <= max(gaps)


def test_the_thought_about_two_shapes_names_both() -> None:
    for seed in range(50):
        sample = pictures.two_things(random.Random(seed), WORLD)
        shapes, colors, *_ = sample.core
        if sample.facet != "count":
            for shape, color in zip(shapes, colors, strict=True):
                assert f"{color} {shape}" in sample.thought


def test_which_picture_is_the_one_that_shows_it() -> None:
    ordinals = ("first", "second", "third")
    seen = 0
    for seed in range(200):
        sample = pictures.several(random.Random(seed), WORLD)
        colors, shapes, *_ = sample.core
        words = sample.answer.rstrip(".").split()
        if words[2:3] == ["picture"]:
            place = ordinals.index(words[1])
            assert words[-1] in (colors[place], shapes[place])
            seen += 1
    assert seen > 80


def test_sums_are_asked_without_blanks_too() -> None:
    said = [str(lessons.arithmetic(random.Random(seed), WORLD).messages[0]["content"]) for seed in range(400)]
    for sign in "+-*":
        assert sum(f" {sign} " in text for text in said) > 10
        assert sum(sign in text and f" {sign}" not in text for text in said) > 10


def test_batch_holds_whole_documents(encoder: Encoder) -> None:
    batch = Packer(encoder, [], [], seed=1).batch(SMALL, 1)
    ids, documents = batch["ids"].ravel(), batch["documents"].ravel()
    used = int((batch["label_weight"] > 0).sum())
    assert sum(stop - start for _, start, stop in batch["skills"]) == used > 0
    end = encoder.tokenizer.token_to_id("<|im_end|>")
    for _, start, stop in batch["skills"]:
        at = batch["label_at"][start:stop]
        assert (ids[at + 1] == batch["label_id"][start:stop]).all()
        assert ids[at[-1] + 1] == end
        assert len(set(documents[at])) == 1
    image_at = batch["image_at"][batch["image_at"] < SMALL.tokens]
    assert (ids[image_at] == encoder.pad).all()
    assert len(image_at) == (ids == encoder.pad).sum() == np.prod(batch["pictures"].shape[:3]) // 1024
    assert (np.diff(batch["documents"], axis=1) >= 0).all()


def test_special_text_of_pictures_is_not_lost(encoder: Encoder) -> None:
    document: Document = encoder.sample(pictures.several(random.Random(2), WORLD))
    assert len(document.pictures) * 4 == len(document.image_at) == document.ids.count(encoder.pad)


def test_every_intent_has_several_phrasings() -> None:
    phrasings = [said for said, _ in lessons.talk.INTENTS]
    assert all(said.strip() for each in phrasings for said in each.split("|"))
    assert sum(len(each.split("|")) for each in phrasings) > 400
    assert isinstance(lessons.chat(random.Random(0), WORLD), Sample)
