"""Mixes the lessons into packed training batches, rendered with the shipped chat template.

A batch is a set of rows of equal length filled with whole documents; all of its pictures have one size. Held-out
samples are those whose content hash is 0 modulo 16; training never sees them.

    python -m engine.demo.recipe.data TOKENIZER.json CORPUS.txt.xz     # prints one sample of every lesson
"""

import collections
import dataclasses
import functools
import json
import random
import re
import sys
import typing
import zlib
from pathlib import Path

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine.demo.recipe import corpus, lessons, pictures, tools
from engine.demo.recipe.lessons import Message, Rng, Sample, World
from engine.demo.recipe.words import FILLERS

TEMPLATE_PATH = Path(__file__).resolve().parent.parent / "chat_template.jinja"
Lesson = typing.Callable[[Rng, World], Sample]

#: Each lesson with its weight in the three stages: easy forms first, then everything, then everything and longer.
LESSONS: tuple[tuple[Lesson, tuple[float, float, float]], ...] = (
    (lessons.chat, (6, 8, 8)),
    (lessons.out_of_scope, (2, 12, 12)),
    (lessons.poem, (0.5, 1, 0.5)),
    (lessons.fact, (6, 6, 5)),
    (lessons.arithmetic, (6, 20, 20)),
    (lessons.word_problem, (0, 8, 8)),
    (lessons.copy, (10, 11, 12)),
    (lessons.word_list, (2, 10, 10)),
    (lessons.spell, (2, 12, 12)),
    (lessons.count, (1, 2, 2)),
    (lessons.number_words, (0.3, 0.5, 0.5)),
    (lessons.recall_words, (10, 2, 1)),
    (lessons.recall_short, (8, 6, 5)),
    (lessons.recall_long, (0, 3, 4)),
    (lessons.needle, (0, 1.5, 1.5)),
    (lessons.where, (1, 4, 4)),
    (lessons.make_json, (4, 5, 4.5)),
    (lessons.system_rule, (2, 5, 5)),
    (lessons.memory, (1, 2.5, 2.5)),
    (tools.call, (6, 20, 22)),
    (tools.no_fit, (0.5, 8, 8)),
    (tools.chain, (0, 2, 2)),
    (pictures.full_thing, (25, 7, 5)),
    (pictures.one_thing, (3, 9, 9)),
    (pictures.second_question, (0, 2, 2)),
    (pictures.two_things, (2, 32, 30)),
    (pictures.how_many, (0.5, 6, 7)),
    (pictures.several, (0, 16, 18)),
)
#: Share of prose documents among the samples, by stage.
PROSE = (0.04, 0.04, 0.04)
#: Prose is never learnt by heart: at a higher weight its gradient drowns that of the few answer tokens still missing.
PROSE_WEIGHT = 0.3
#: Weights of answers that hang on one or two tokens; all others weigh 1.
WEIGHTS = {"see_two": 2.0, "see_several": 2.0}
#: Lessons that earlier turns of a conversation are made of.
SMALL: tuple[Lesson, ...] = (lessons.chat, lessons.chat, lessons.fact, lessons.arithmetic, lessons.spell, lessons.copy)


@dataclasses.dataclass(frozen=True)
class Form:
    """Static dimensions of a batch: rows, tokens in a row, labelled positions, picture rows (32 x 32 pixels each)."""

    rows: int
    length: int
    labels: int
    image_rows: int

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return self.rows * self.length


SHORT = Form(32, 1024, 14336, 10240)
LONG = Form(4, 8192, 14336, 10240)


@functools.cache
def chat_template(text: str) -> jinja2.Template:
    """The compiled template, with the filters that servers give it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def raise_exception(message: str) -> typing.NoReturn:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(text)


def render(sample: Sample, template: str) -> tuple[str, str]:
    """The prompt that a server would send to the model, and the completion it should give."""
    prompt = chat_template(template).render(
        messages=sample.messages,
        tools=sample.tools or None,
        add_generation_prompt=True,
        enable_thinking=sample.thinking,
    )
    body = sample.answer + ("\n\n" if sample.answer and sample.calls else "")
    body += "\n".join(call_text(name, arguments) for name, arguments in sample.calls)
    if sample.thinking:
        body = f"{sample.thought}\n</think>\n\n{body}"
    return prompt, body + "<|im_end|>"


def call_text(name: str, arguments: dict[str, typing.Any]) -> str:
    """A tool call in the model's own syntax."""
    lines = [f"<tool_call>\n<function={name}>\n"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"<parameter={key}>\n{text}\n</parameter>\n")
    return "".join(lines) + "</function>\n</tool_call>"


def topics_of(documents: list[str]) -> list[str]:
    """Words and phrases that the dictionary part of the corpus defines."""
    found: list[str] = []
    for document in documents:
        found += re.findall(r"(?:^|[.] )([a-z][a-z' -]{2,24}): [a-z]", document)
    return found


def held_out(sample: Sample) -> bool:
    """Whether the sample's content belongs to the held-out sixteenth."""
    return zlib.crc32(repr(sample.core).encode()) % 16 == 0


def surround(r: Rng, w: World, sample: Sample) -> Sample:
    """What real clients add: thinking mode, a system prompt, tools that are not needed, earlier turns."""
    sample.thinking = r.random() < 0.5
    messages = sample.messages
    if sample.may_have_history and r.random() < 0.15:
        earlier: list[Message] = []
        for _ in range(r.choice([1, 1, 2, 3])):
            turn = r.choice(SMALL)(r, w)
            earlier += [*turn.messages, {"role": "assistant", "content": turn.answer}]
        messages = earlier + messages
    if sample.may_have_system and messages[0]["role"] != "system":
        kind = r.random()
        if kind < 0.2:
            messages = [{"role": "system", "content": r.choice(lessons.PERSONAS)}, *messages]
        elif kind < 0.26:
            messages = [{"role": "system", "content": long_system_prompt(r, w)}, *messages]
    if sample.may_have_tools and not sample.tools and r.random() < (0.04 if sample.pictures else 0.12):
        sample.tools = tools.unused(r, 12 if w.room > 2000 else 5)
    sample.messages = messages
    return sample


def long_system_prompt(r: Rng, w: World) -> str:
    """Instructions, bullet lists and prose without any effect on the answer."""
    lines = [r.choice(lessons.PERSONAS)]
    target = int(w.room * r.uniform(0.05, 0.6)) * 3
    while sum(map(len, lines)) < target:
        kind = r.random()
        if kind < 0.3:
            lines.append(r.choice(lessons.PERSONAS))
        elif kind < 0.5:
            lines.append("- " + r.choice(FILLERS))
        elif kind < 0.6:
            lines.append("\n# " + r.choice(["Rules", "Style", "Context", "Notes", "Tone and style", "Environment"]))
        else:
            lines.append(r.choice(w.documents)[:300] if w.documents else r.choice(FILLERS))
    return "\n".join(lines)


def draw_sample(r: Rng, w: World, stage: int, test: bool, focus: typing.Mapping[str, float] | None = None) -> Sample:
    """One sample of the wanted side of the split; ``focus`` multiplies the weights of lessons by function name."""
    weights = [each[stage] * (focus or {}).get(lesson.__name__, 1.0) for lesson, each in LESSONS]
    while True:
        lesson, _ = r.choices(LESSONS, weights)[0]
        sample = lesson(r, w)
        if held_out(sample) == test:
            return surround(r, w, sample)


@dataclasses.dataclass
class Document:
    """One encoded document: token ids [n], positions [3, n], first supervised token, weight, skill, pictures."""

    ids: list[int]
    positions: np.ndarray
    prompt: int
    weight: float
    skill: str
    pictures: list[np.ndarray]
    image_at: list[int]


class Encoder:
    """Turns samples and prose into :class:`Document`; owns the tokenizer and the template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.pad = typing.cast(int, tokenizer.token_to_id("<|image_pad|>"))
        self.end = typing.cast(int, tokenizer.token_to_id("<|endoftext|>"))

    def ids(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens recognised."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def sample(self, sample: Sample) -> Document:
        """Prompt and completion encoded apart, as a server does; picture pads repeated, three-axis positions."""
        prompt_text, completion_text = render(sample, self.template)
        completion = self.ids(completion_text)
        prompt: list[int] = []
        image_at: list[int] = []
        spans: list[tuple[int, int, int]] = []
        waiting = iter(sample.pictures)
        for token in self.ids(prompt_text):
            if token == self.pad:
                height, width = next(waiting).shape[:2]
                rows, columns = height // 32, width // 32
                spans.append((len(prompt), rows, columns))
                image_at += range(len(prompt), len(prompt) + rows * columns)
                prompt += [self.pad] * (rows * columns)
            else:
                prompt.append(token)
        ids = prompt + completion
        positions = np.zeros((3, len(ids)), np.int32)
        done = at = 0
        for start, rows, columns in spans:
            positions[:, done:start] = np.arange(at, at + start - done)
            at += start - done
            grid = np.arange(rows * columns)
            done = start + rows * columns
            positions[:, start:done] = at + np.stack([0 * grid, grid // columns, grid % columns])
            at += max(rows, columns)
        positions[:, done:] = np.arange(at, at + len(ids) - done)
        weight = WEIGHTS.get(sample.skill, 1.0)
        return Document(ids, positions, len(prompt), weight, sample.skill, sample.pictures, image_at)

    def prose(self, text: str) -> Document:
        """Plain text that ends with the end-of-text token, supervised throughout at a low weight."""
        ids = [*self.ids(text), self.end]
        positions = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
        return Document(ids, positions, 1, PROSE_WEIGHT, "prose", [], [])


Batch = dict[str, typing.Any]


class Packer:
    """Draws documents and packs them into batches.

    Batches depend on ``rng`` alone: whoever sets it before every batch gets the same batch whatever came before.
    """

    def __init__(
        self,
        encoder: Encoder,
        documents: list[str],
        topics: list[str],
        seed: int,
        test: bool = False,
        focus: typing.Mapping[str, float] | None = None,
    ) -> None:
        self.encoder = encoder
        self.rng = random.Random(seed)
        self.documents = documents
        self.topics = topics
        self.test = test
        self.focus = focus

    def batch(self, form: Form, stage: int) -> Batch:
        """A batch of NumPy arrays.

        ids, documents int32 [rows, length]; positions int32 [3, tokens]; label_at, label_id int64 and label_weight
        float32 [labels] (unused: weight 0, places spread out); image_at int64 [image_rows] (unused: ``tokens``);
        pictures uint8 [P, H, W, 3]; skills: (skill, first label, one past the last label) of every document.
        """
        r = self.rng
        size = r.choices([s for s, _ in pictures.SIZES], [n for _, n in pictures.SIZES])[0]
        world = World(self.documents, self.topics, size, form.length * 4 // 5)
        room = form.image_rows
        rows: list[list[Document]] = []
        kept: list[Document] = []
        for _ in range(form.rows):
            row, used, kept = _fitting(kept, form.length)
            tries = 0
            while form.length - used >= 24 and tries < 6:
                document = self._draw(world, stage)
                if len(document.ids) > form.length or len(document.image_at) > room:
                    continue
                if used + len(document.ids) > form.length:
                    tries += 1
                    if len(kept) < 40:
                        kept.append(document)
                        room -= len(document.image_at)
                    continue
                row.append(document)
                used += len(document.ids)
                room -= len(document.image_at)
            rows.append(row)
        return self._assemble(form, rows)

    def _draw(self, world: World, stage: int) -> Document:
        if self.documents and self.rng.random() < PROSE[stage]:
            text = self.rng.choice(self.documents)
            while world.room > 2000 and len(text) < 4000 and self.rng.random() < 0.8:
                text += "\n\n" + self.rng.choice(self.documents)
            return self.encoder.prose(text)
        return self.encoder.sample(draw_sample(self.rng, world, stage, self.test, self.focus))

    def _assemble(self, form: Form, rows: list[list[Document]]) -> Batch:
        ids = np.full((form.rows, form.length), self.encoder.end, np.int32)
        documents = np.zeros((form.rows, form.length), np.int32)
        positions = np.zeros((3, form.rows, form.length), np.int32)
        number = 0
        label_at: list[np.ndarray] = []
        label_id: list[np.ndarray] = []
        label_weight: list[np.ndarray] = []
        image_at: list[np.ndarray] = []
        shown: list[np.ndarray] = []
        skills: list[tuple[str, int, int]] = []
        labels = 0
        for b, row in enumerate(rows):
            at = 0
            for document in row:
                n = len(document.ids)
                start = b * form.length + at
                ids[b, at : at + n] = document.ids
                documents[b, at : at + n] = number
                positions[:, b, at : at + n] = document.positions
                number += 1
                shown += document.pictures
                image_at.append(start + np.asarray(document.image_at, np.int64))
                count = n - document.prompt
                if labels + count <= form.labels:
                    label_at.append(np.arange(start + document.prompt - 1, start + n - 1))
                    label_id.append(np.asarray(document.ids[document.prompt :], np.int64))
                    label_weight.append(np.full(count, document.weight, np.float32))
                    skills.append((document.skill, labels, labels + count))
                    labels += count
                at += n
            documents[b, at:] = number
            number += 1

        def filled(parts: list[np.ndarray], size: int, value: float, kind: type) -> np.ndarray:
            out: np.ndarray = np.full(size, value, kind)
            if parts:
                joined = np.concatenate(parts)
                out[: len(joined)] = joined
            return out

        return {
            "form": form,
            "ids": ids,
            "documents": documents,
            "positions": positions.reshape(3, -1),
            "label_at": filled([*label_at, np.arange(labels, form.labels)], form.labels, 0, np.int64),
            "label_id": filled(label_id, form.labels, 0, np.int64),
            "label_weight": filled(label_weight, form.labels, 0, np.float32),
            "image_at": filled(image_at, form.image_rows, form.tokens, np.int64),
            "pictures": np.stack(shown) if shown else np.zeros((0, 64, 64, 3), np.uint8),
            "skills": skills,
        }


def _fitting(kept: list[Document], length: int) -> tuple[list[Document], int, list[Document]]:
    """Splits documents that did not fit before into those that open a new row and the rest."""
    row: list[Document] = []
    rest: list[Document] = []
    used = 0
    for document in kept:
        if used + len(document.ids) <= length:
            row.append(document)
            used += len(document.ids)
        else:
            rest.append(document)
    return row, used, rest


def warm_up_pictures(r: Rng, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Single shapes for the tower's warm-up: uint8 [count, H, W, 3], int64 [count, 4] (shape, colour, top, left)."""
    size = r.choices([s for s, _ in pictures.SIZES], [n for _, n in pictures.SIZES])[0]
    shown, labels = [], []
    for _ in range(count):
        color, shape = r.choice(list(pictures.COLORS)), r.choice(pictures.SHAPES)
        x, y, s, left, top = pictures.placed(r, size)
        background = r.choice([b for b in pictures.BACKGROUNDS if b != color])
        shown.append(pictures.draw(r, [(shape, color, x, y, s)], size, background))
        labels.append((pictures.SHAPES.index(shape), list(pictures.COLORS).index(color), int(top), int(left)))
    return np.stack(shown), np.array(labels)


def make_packer(
    tokenizer: Path,
    corpus_file: Path,
    seed: int,
    test: bool = False,
    focus: typing.Mapping[str, float] | None = None,
) -> Packer:
    """A packer over a tokenizer file and a corpus file."""
    documents = corpus.load(corpus_file)
    encoder = Encoder(Tokenizer.from_file(str(tokenizer)), TEMPLATE_PATH.read_text(encoding="utf-8"))
    cut = len(documents) // 50
    part = documents[:cut] if test else documents[cut:]
    return Packer(encoder, part, topics_of(part), seed, test, focus)


def plain_texts(count: int, seed: int) -> typing.Iterator[str]:
    """Rendered lessons without special tokens, for training the tokenizer."""
    r = random.Random(seed)
    world = World([], [])
    template = TEMPLATE_PATH.read_text(encoding="utf-8")
    for _ in range(count):
        text = "".join(render(draw_sample(r, world, 1, False), template))
        yield from re.split(r"<\|[a-z_]+\|>|</?tool_call>|</?tool_response>|</?think>", text)


def main() -> None:
    """Print one sample of every lesson and the share of tokens of every skill."""
    packer = make_packer(Path(sys.argv[1]), Path(sys.argv[2]), 1)
    world = World(packer.documents, packer.topics)
    for lesson, _ in LESSONS:
        prompt, completion = render(surround(packer.rng, world, lesson(packer.rng, world)), packer.encoder.template)
        print(f"== {lesson.__name__}\n{prompt[-600:]}[[{completion}]]")
    shares: collections.Counter[str] = collections.Counter()
    for skill, start, stop in packer.batch(SHORT, 1)["skills"]:
        shares[skill] += stop - start
    print(shares.most_common())


if __name__ == "__main__":
    main()
