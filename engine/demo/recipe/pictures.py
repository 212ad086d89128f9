"""Picture lessons: coloured shapes on a plain background, with questions that have one answer."""

import io
import json
import math

import numpy as np
from PIL import Image, ImageDraw

from engine.demo.recipe.lessons import Message, Rng, Sample, World, plural

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 220, 50),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
    "purple": (140, 50, 170),
    "orange": (245, 140, 30),
    "pink": (250, 150, 190),
    "brown": (125, 75, 35),
    "grey": (128, 128, 128),
    "cyan": (60, 210, 220),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
BACKGROUNDS = ("white", "black", "grey")
#: Width, height and weight of training pictures: 64 to 256 pixels a side, some wide or tall ones.
SIZES = (
    ((64, 64), 26), ((96, 96), 16), ((128, 128), 16), ((160, 160), 6), ((192, 192), 4), ((256, 256), 6), ((96, 64), 5),
    ((64, 96), 5), ((128, 96), 4), ((96, 128), 4), ((192, 128), 3), ((128, 192), 3), ((256, 192), 2), ((320, 192), 2),
    ((192, 320), 1), ((256, 128), 1),
)  # fmt: skip

Thing = tuple[str, str, int, int, int]


def draw(r: Rng, things: list[Thing], size: tuple[int, int], background: str) -> np.ndarray:
    """Things are (shape, colour, centre x, centre y, half size); colours vary a little. uint8 [H, W, 3].

    Many pictures are drawn smaller or larger and resized, and some are stored as JPEG on the way, so that edges look
    like those of pictures from elsewhere.
    """
    scale = 1.0
    if size[0] * size[1] <= 128 * 128 and r.random() < 0.45:
        scale = r.choice([2.0, 2.0, r.uniform(0.8, 3.0)])
    base = tuple(max(0, min(255, v + r.randint(-6, 6))) for v in COLORS[background])
    picture = Image.new("RGB", (round(size[0] * scale), round(size[1] * scale)), base)
    pen = ImageDraw.Draw(picture)
    for shape, color, *place in things:
        x, y, s = (round(v * scale) for v in place)
        fill = tuple(max(0, min(255, v + r.randint(-18, 18))) for v in COLORS[color])
        if shape == "circle":
            pen.ellipse([x - s, y - s, x + s, y + s], fill=fill)
        elif shape == "square":
            pen.rectangle([x - s, y - s, x + s, y + s], fill=fill)
        elif shape == "triangle":
            pen.polygon([(x, y - s), (x - s, y + s), (x + s, y + s)], fill=fill)
        elif shape == "star":
            radii = [s if i % 2 == 0 else s * 0.42 for i in range(10)]
            pen.polygon([(x + q * math.sin(i * math.pi / 5), y - q * math.cos(i * math.pi / 5)) for i, q in enumerate(radii)],
                        fill=fill)  # fmt: skip
        else:
            t = s // 3
            pen.rectangle([x - t, y - s, x + t, y + s], fill=fill)
            pen.rectangle([x - s, y - t, x + s, y + t], fill=fill)
    if r.random() < 0.1:
        stored = io.BytesIO()
        picture.save(stored, "JPEG", quality=r.randint(60, 95))
        picture = Image.open(stored)
    if picture.size != size:
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(picture)


def placed(r: Rng, size: tuple[int, int]) -> tuple[int, int, int, bool, bool]:
    """Centre x, y and half size of a shape clearly inside one quadrant, and whether it is left and top."""
    width, height = size
    s = r.randint(min(size) // 8, min(size) // 5)
    left, top = r.random() < 0.5, r.random() < 0.5
    x = r.randint(s, width // 2 - s * 2 // 3) if left else r.randint(width // 2 + s * 2 // 3, width - s)
    y = r.randint(s, height // 2 - s * 2 // 3) if top else r.randint(height // 2 + s * 2 // 3, height - s)
    return x, y, s, left, top


def ask(r: Rng, question: str, pictures: int = 1) -> list[Message]:
    """A user message with pictures and a question; the pictures mostly come first. Spelling varies a little."""
    if r.random() < 0.1:
        question = question.replace("color", "colour")
    if r.random() < 0.1:
        question = question.replace("picture", "image")
    if r.random() < 0.12:
        question = question[0].lower() + question[1:]
    if r.random() < 0.1:
        question = question.rstrip("?.")
    parts = [{"type": "image"} for _ in range(pictures)]
    text = {"type": "text", "text": question}
    return [{"role": "user", "content": [*parts, text] if r.random() < 0.8 else [text, *parts]}]


def _questions(r: Rng, shape: str, color: str, background: str, left: bool, top: bool) -> dict[str, tuple[str, str]]:
    place = f"{'top' if top else 'bottom'} {'left' if left else 'right'}"
    thing = article(f"{color} {shape}")
    return {
        "full": (
            r.choice(["Describe the picture fully.", "Describe the picture.", "Describe the image.", "What do you see?",
                      "What is in this picture?", "Describe this image in detail.", "What is in this image?"]),
            f"{thing[0].upper() + thing[1:]} in the {place} on a {background} background.",
        ),
        "color": (
            r.choice(["What color is the shape?", "Which color do you see?", "Name the color of the shape.",
                      f"What color is the {shape}?", "What colour is it?", "What color is it?"]),
            f"The {shape} is {color}.",
        ),
        "shape": (
            r.choice(["What shape is this?", "Which shape do you see?", "Name the shape.", "What shape is it?",
                      "What shape is in the picture?"]),
            f"It is a {shape}.",
        ),
        "place": (
            r.choice(["Where is the shape?", f"Where is the {shape}?", "In which corner is the shape?", "Where is it?"]),
            f"The {shape} is in the {place}.",
        ),
        "short": (r.choice(["Describe the picture in three words.", "Answer briefly: what is this?"]), thing),
        "ground": (
            r.choice(["What color is the background?", "Which color has the background?"]),
            f"The background is {background}.",
        ),
    }  # fmt: skip


def one_thing(r: Rng, w: World, full: bool = False, again: bool = False) -> Sample:
    """One shape: full description, colour, shape, position or background; ``again``: as a second question."""
    color, shape = r.choice(list(COLORS)), r.choice(SHAPES)
    background = r.choice([b for b in BACKGROUNDS if b != color])
    x, y, s, left, top = placed(r, w.size)
    questions = _questions(r, shape, color, background, left, top)
    kind = (
        "full" if full else r.choice(["full", "full", "color", "shape", "shape", "place", "place", "short", "ground"])
    )
    question, answer = questions[kind]
    messages = ask(r, question)
    if again:
        said, reply = questions[r.choice([k for k in questions if k != kind])]
        messages = [*ask(r, said), {"role": "assistant", "content": reply}, {"role": "user", "content": question}]
    core = (shape, color, x, y, s, w.size, background)
    picture = draw(r, [(shape, color, x, y, s)], w.size, background)
    return Sample(
        f"see_{kind}", messages, answer, core, "I look at the picture.", pictures=[picture], may_have_history=not again
    )


def full_thing(r: Rng, w: World) -> Sample:
    """One shape, full description: the lesson that teaches the tower and the trunk together."""
    return one_thing(r, w, full=True)


def second_question(r: Rng, w: World) -> Sample:
    """Another question about a picture that was already talked about."""
    return one_thing(r, w, again=True)


#: What is asked about two shapes, with weights. Only `color`, `shape` and the two `where` need a shape to be found by
#: what it looks like; asked too seldom, they stay at chance while everything else is learnt.
TWO_KINDS = ("describe", "side", "beside", "color", "shape", "where", "where color", "json", "count")
TWO_WEIGHTS = (3, 1, 2, 6, 3, 4, 2, 1.5, 1.5)


def article(noun: str) -> str:
    """``noun`` with the indefinite article before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def two_things(r: Rng, w: World) -> Sample:
    """Two different shapes, beside or above each other."""
    width, height = w.size
    colors, shapes = r.sample(list(COLORS), 2), r.sample(SHAPES, 2)
    background = r.choice([b for b in BACKGROUNDS if b not in colors])
    s = r.randint(min(w.size) // 8, min(w.size) // 6)
    beside = r.random() < 0.6
    # Apart on one axis and nearly level on the other, so that only one relation is true.
    across, along = (width, height) if beside else (height, width)
    level = r.randint(2 * s, along - 2 * s)
    first = (r.randint(s, across // 2 - s - 1), level + r.randint(-s // 2, s // 2))
    second = (r.randint(across // 2 + s + 1, across - s), level + r.randint(-s // 2, s // 2))
    spots = [first, second] if beside else [first[::-1], second[::-1]]
    names = ("left", "right") if beside else ("top", "bottom")
    picture = draw(r, [(shapes[i], colors[i], *spots[i], s) for i in (0, 1)], w.size, background)
    i = r.randrange(2)
    a, b = (article(f"{c} {x}") for c, x in zip(colors, shapes, strict=True))
    relation = ("left of", "right of") if beside else ("above", "below")
    seen = f"{a[0].upper() + a[1:]} {relation[0]} {b}"
    kind = r.choices(TWO_KINDS, TWO_WEIGHTS)[0]
    question, answer = {
        "describe": (
            r.choice(["Describe the picture.", "What do you see?", "Describe the image.", "What is in this picture?"]),
            f"{seen} on a {background} background.",
        ),
        "side": (
            f"Which shape is {'on' if beside else 'at'} the {names[i]}?",
            f"The {colors[i]} {shapes[i]}.",
        ),
        "beside": (f"What is {relation[i]} the {shapes[1 - i]}?", f"The {colors[i]} {shapes[i]}."),
        "color": (
            r.choice([f"What color is the {shapes[i]}?", f"What color is the {shapes[i]}?",
                      f"Which color has the {shapes[i]}?"]),
            f"The {shapes[i]} is {colors[i]}.",
        ),
        "shape": (
            r.choice([f"Which shape is {colors[i]}?", f"What shape is the {colors[i]} one?"]),
            f"The {colors[i]} shape is {article(shapes[i])}.",
        ),
        "where": (f"Where is the {shapes[i]}?", f"The {shapes[i]} is {relation[i]} the {shapes[1 - i]}."),
        "where color": (
            f"Where is the {colors[i]} shape?",
            f"The {colors[i]} {shapes[i]} is {relation[i]} the {shapes[1 - i]}.",
        ),
        "json": (
            "Return JSON with the color of each shape.",
            json.dumps({shapes[0]: colors[0], shapes[1]: colors[1]}),
        ),
        "count": ("How many shapes do you see?", "There are 2 shapes."),
    }[kind]  # fmt: skip
    core = (tuple(shapes), tuple(colors), tuple(spots), s, w.size)
    # The question for the number is also asked of one shape and of equal ones, where nothing is to be told apart.
    thought = "I look at the picture." if kind == "count" else f"{seen}."
    return Sample("see_two", ask(r, question), answer, core, thought, pictures=[picture], facet=kind)


def how_many(r: Rng, w: World) -> Sample:
    """Count one to four equal shapes in separate quadrants."""
    width, height = w.size
    color, shape, n = r.choice(list(COLORS)), r.choice(SHAPES), r.randint(1, 4)
    background = r.choice([b for b in BACKGROUNDS if b != color])
    s = min(w.size) // 7
    spots = r.sample([(q, t) for q in (1, 3) for t in (1, 3)], n)
    jitter = min(w.size) // 16
    centres = [
        (q * width // 4 + r.randint(-jitter, jitter), t * height // 4 + r.randint(-jitter, jitter)) for q, t in spots
    ]
    picture = draw(r, [(shape, color, x, y, s) for x, y in centres], w.size, background)
    question = r.choice(["How many shapes do you see?", f"How many {plural(shape)} are there?", "Count the shapes."])
    noun = question.split()[2] if question.startswith("How many") and shape in question else "shapes"
    answer = f"There are {n} {noun}." if n > 1 else f"There is 1 {shape if noun != 'shapes' else 'shape'}."
    core = (color, shape, tuple(centres), w.size)
    return Sample("see_count", ask(r, question), answer, core, "I look at the picture.", pictures=[picture])


#: What is asked about several pictures, with weights; only the two `which` need a picture to be found by its content.
SEVERAL_KINDS = ("what", "which shape", "which color", "count", "list", "describe")
SEVERAL_WEIGHTS = (2, 5, 4, 0.5, 1.5, 2)


def several(r: Rng, w: World) -> Sample:
    """Two or three pictures with one shape each."""
    n = r.randint(2, 3)
    colors, shapes = r.sample(list(COLORS), n), r.sample(SHAPES, n)
    backgrounds = [r.choice([b for b in BACKGROUNDS if b != c]) for c in colors]
    spots = [placed(r, w.size) for _ in range(n)]
    pictures = [
        draw(r, [(q, c, *p[:3])], w.size, b) for q, c, p, b in zip(shapes, colors, spots, backgrounds, strict=True)
    ]
    i = r.randrange(n)
    ordinals = ("first", "second", "third")
    things = [article(f"{c} {q}") for c, q in zip(colors, shapes, strict=True)]
    seen = ", ".join(f"{o} {thing}" for o, thing in zip(ordinals, things, strict=False))
    kind = r.choices(SEVERAL_KINDS, SEVERAL_WEIGHTS)[0]
    question, answer = {
        "what": (f"What is in the {ordinals[i]} picture?", f"{things[i][0].upper() + things[i][1:]}."),
        "which shape": (
            f"Which picture shows {article(shapes[i])}?",
            f"The {ordinals[i]} picture shows {article(shapes[i])}.",
        ),
        "which color": (f"Which picture shows something {colors[i]}?", f"The {ordinals[i]} picture is {colors[i]}."),
        "count": ("How many pictures are there?", f"There are {n} pictures."),
        "list": ("List the shapes.", ", ".join(shapes)),
        "describe": (r.choice(["Describe the pictures.", "What is in these pictures?"]), f"{seen.capitalize()}."),
    }[kind]
    core = (tuple(colors), tuple(shapes), tuple(spots), w.size)
    return Sample(
        "see_several", ask(r, question, n), answer, core, f"{seen.capitalize()}.", pictures=pictures, facet=kind
    )
