"""The demo model sees, end to end over HTTP: pictures in every shape, and what a second look costs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_files import data_url, encode, save
from PIL import Image
from test_cache_serving import CHAT, Client, cached, chat_body, serving, text

from engine.core import UInt8Array
from engine.demo.recipe import data
from engine.demo.recipe.evaluate import wire_messages
from engine.demo.recipe.lessons import World
from engine.demo.recipe.pictures import SIZES, one_thing
from engine.errors import ModelFileError
from server.app import picture_reader
from server.config import DEMO_CHECKPOINT, load_settings

FILE = Path(__file__).parents[2] / "docs" / "picture.png"
ENCODED = "fermion_pictures_encoded_total"
TOKENS = 12
# What stands behind the last place where prompts are likely to differ: the head of the answer.
HEADER = 8


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(tmp_path_factory.mktemp("prefix")) as client:
        yield client


def pixels() -> UInt8Array:
    return np.asarray(Image.open(FILE).convert("RGB"))


def look(client: Client, question: str, *files: bytes, **fields: Any) -> Any:
    pictures = [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in files]
    body = {**chat_body(), "max_tokens": 60, **fields}
    body["messages"] = [{"role": "user", "content": [*pictures, {"type": "text", "text": question}]}]
    return client.json("POST", CHAT, body)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Describe the picture.", "A red circle left of a blue star on a white background."),
        ("What is left of the star?", "The red circle."),
        ("Which shape is on the left?", "The red circle."),
        ("How many shapes do you see?", "There are 2 shapes."),
    ],
)
def test_the_picture_of_the_readme(client: Client, question: str, answer: str) -> None:
    assert text(look(client, question, FILE.read_bytes())) == answer


def test_held_out_pictures_are_named(client: Client) -> None:
    """A small sample; `engine/demo/recipe/evaluate.py` measures."""
    rng = random.Random(5)
    kinds = ("see_color", "see_shape", "see_place", "see_full")
    right = count = 0
    while count < 24:
        world = World([], [])
        world.size = rng.choice([size for size, _ in SIZES])
        sample = one_thing(rng, world)
        if sample.skill in kinds and data.held_out(sample):
            count += 1
            body = {**chat_body(), "max_tokens": 60, "messages": wire_messages(sample)}
            right += text(client.json("POST", CHAT, body)) == sample.answer
    assert right >= 22


def test_a_second_look_computes_neither_tower_nor_prefix(client: Client) -> None:
    question = "Which shape is at the left, and what stands beside it? Say it briefly."
    first = look(client, question, FILE.read_bytes())
    encoded = client.metric(ENCODED)
    again = look(client, question, FILE.read_bytes())
    assert text(again) == text(first)
    assert cached(again) >= again["usage"]["prompt_tokens"] - HEADER
    # The same pixels in another file are the same picture.
    assert cached(look(client, question, encode(pixels(), "BMP"))) == cached(again)
    assert client.metric(ENCODED) == encoded


def test_another_question_about_the_same_picture(client: Client) -> None:
    look(client, "What color is the circle?", FILE.read_bytes())
    encoded = client.metric(ENCODED)
    usage = look(client, "What color is the star?", FILE.read_bytes())["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= TOKENS
    assert client.metric(ENCODED) == encoded


def test_one_changed_pixel_is_another_picture(client: Client) -> None:
    question = "What color is the background?"
    look(client, question, FILE.read_bytes())
    encoded = client.metric(ENCODED)
    changed = pixels().copy()
    changed[95, 127, 1] ^= 1
    answer = look(client, question, encode(changed))
    assert cached(answer) < TOKENS
    assert client.metric(ENCODED) == encoded + 1
    assert text(answer) == text(look(client, question, FILE.read_bytes()))


def test_pictures_of_a_conversation_are_read_once(client: Client) -> None:
    """Turns with pictures, as clients send them: all of the history each time."""
    client.call("DELETE", "/v1/cache")
    start = client.metric(ENCODED)
    body = chat_body()
    body["messages"] = []
    for shade in (40, 90, 200):
        picture = save(Image.new("RGB", (64, 64), (shade, 30, 30)))
        part = {"type": "image_url", "image_url": {"url": data_url(picture)}}
        body["messages"].append({"role": "user", "content": [part, {"type": "text", "text": "What do you see?"}]})
        answer = client.json("POST", CHAT, body)
        body["messages"].append({"role": "assistant", "content": text(answer)})
    assert client.metric(ENCODED) == start + 3
    assert cached(answer) > 2 * 4


def test_reading_ahead_takes_pictures(client: Client) -> None:
    client.call("DELETE", "/v1/cache")
    body = chat_body()
    picture = {"type": "image_url", "image_url": {"url": data_url(encode(pixels()[:, ::-1].copy()))}}
    body["messages"] = [{"role": "user", "content": [picture, {"type": "text", "text": "Which shape is on the left?"}]}]
    warmed = client.json("POST", "/v1/cache/warm", body)
    encoded = client.metric(ENCODED)
    answer = client.json("POST", CHAT, {**body, "max_tokens": 60})
    assert text(answer) == "The blue star."
    assert cached(answer) >= warmed["usage"]["prompt_tokens"] - HEADER
    assert client.metric(ENCODED) == encoded


def test_several_pictures_keep_their_order(client: Client) -> None:
    red, blue = (save(Image.open(FILE).convert("RGB").crop(box)) for box in ((0, 0, 64, 96), (64, 0, 128, 96)))
    assert text(look(client, "What is in the first picture?", red, blue)) == "A red circle."
    assert text(look(client, "What is in the first picture?", blue, red)) == "A blue star."


def test_a_tower_needs_its_placeholder(tmp_path: Path) -> None:
    """A checkpoint whose files contradict each other is refused when the server is made, not at the first picture."""
    for path in DEMO_CHECKPOINT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = load_settings({"model": tmp_path}).server_config()
    assert picture_reader(tmp_path, config) is not None
    (tmp_path / "config.json").unlink()
    given = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**given, "image_token_id": 5}))
    with pytest.raises(ModelFileError, match="image_token_id is 5"):
        picture_reader(tmp_path, config)
    del given["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert picture_reader(tmp_path, config) is None
