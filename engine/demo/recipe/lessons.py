"""Text lessons: every one has a single right answer, so that accuracy is exact match.

A lesson function takes a random generator and a :class:`World` and returns a :class:`Sample`. The ``core`` of a
sample names its content; a hash of it decides whether the sample belongs to training or to the held-out set.
"""

import dataclasses
import json
import random
import typing

import numpy as np

from engine.demo.recipe import talk
from engine.demo.recipe.words import (
    ADJECTIVES,
    ANIMALS,
    CAPITALS,
    CITIES,
    CONTINENTS,
    CURRENCIES,
    DAYS,
    ELEMENTS,
    FILLERS,
    FRUITS,
    LEGS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    OBJECTS,
    OPPOSITES,
    PLACES,
    SOUNDS,
    THING_COLORS,
    YOUNG,
)

Message = dict[str, typing.Any]
Rng = random.Random


@dataclasses.dataclass
class Sample:
    """One prompt with its right answer.

    ``messages`` and ``tools`` are what an OpenAI client sends (pictures as ``{"type": "image"}`` parts);
    ``thought`` is the reasoning text in thinking mode; ``pictures`` are uint8 [H, W, 3]; ``facet`` names a part of the
    skill that an evaluation counts by itself.
    """

    skill: str
    messages: list[Message]
    answer: str
    core: object
    thought: str = "I can answer this directly."
    calls: list[tuple[str, dict[str, typing.Any]]] = dataclasses.field(default_factory=list)
    tools: list[dict[str, typing.Any]] = dataclasses.field(default_factory=list)
    pictures: list[np.ndarray] = dataclasses.field(default_factory=list)
    facet: str = ""
    thinking: bool = False
    may_have_system: bool = True
    may_have_tools: bool = True
    may_have_history: bool = True


@dataclasses.dataclass
class World:
    """What lessons draw from besides the word tables.

    ``documents`` is English prose and ``topics`` are words and phrases (both may be empty); ``size`` is the
    (width, height) of pictures; ``room`` is the number of tokens that a long lesson may fill.
    """

    documents: list[str]
    topics: list[str]
    size: tuple[int, int] = (64, 64)
    room: int = 900


def user(text: str) -> list[Message]:
    """A conversation of one user message."""
    return [{"role": "user", "content": text}]


def vary(r: Rng, text: str) -> str:
    """The same request as different people type it: case, politeness, closing mark."""
    closing = "?" if text.split()[0].lower() in QUESTION_WORDS else "."
    if r.random() < 0.12:
        text = "Please " + text[0].lower() + text[1:] if closing == "." else text + ", please"
    if r.random() < 0.2:
        text = text.lower()
    return text + r.choice([closing, closing, closing, "", "!" if closing == "." else " ?"])


QUESTION_WORDS = frozenset(
    "what who how where when which why can do does is are may will did should whose am was could would".split()
)


def any_name(r: Rng) -> str:
    """A common first name or one that nobody has heard yet."""
    if r.random() < 0.6:
        return r.choice(NAMES)
    sounds = [r.choice("bdfghjklmnprstvwyz") + r.choice("aeiou") for _ in range(r.randint(1, 3))]
    return ("".join(sounds) + r.choice(["", "", "n", "m", "s", "r", "l", "th", "k"])).capitalize()


def chat(r: Rng, w: World) -> Sample:
    """Small talk of a fixed intent."""
    if r.random() < 0.12:
        name = any_name(r)
        said, answer = r.choice(
            [
                (f"My name is {name}", f"Nice to meet you, {name}!"),
                (f"I am {name}", f"Nice to meet you, {name}!"),
                (f"Hi, I am {name}", f"Nice to meet you, {name}!"),
                (f"I'm {name}", f"Nice to meet you, {name}!"),
                (f"Say hello to {name}", f"Hello, {name}!"),
                (f"Wish {name} a happy birthday", f"Happy birthday, {name}!"),
                (f"Greet {name}", f"Hello, {name}!"),
            ]
        )
        said = r.choice([said, said + ".", said + "!"])
        return Sample("chat", user(said), answer, ("chat", said), "This is small talk.")
    greetings = r.random() < 0.25
    phrasings, answer = talk.INTENTS[r.randrange(8) if greetings else r.randrange(len(talk.INTENTS))]
    said = r.choice(phrasings.split("|"))
    kind = said
    said = vary(r, said)
    if not greetings and r.random() < 0.06:
        said = r.choice(["Hi! ", "Hello, ", "Hey, "]) + said
    core = ("chat", kind.lower(), len(said) % 3)
    return Sample("chat", user(said), answer, core, "This is small talk.", may_have_tools="cannot see" not in answer)


def poem(r: Rng, w: World) -> Sample:
    """A two-line poem or a one-line story with the wanted subject in it."""
    thing, name, other = r.choice(ANIMALS + OBJECTS), r.choice(NAMES), r.choice(ANIMALS)
    said, answer = r.choice(
        [
            (f"Write a poem about the {thing}", f"The {thing}, the {thing}, so gentle and free,\nIt dreams of the "
             f"hills and it dreams of the sea."),
            (f"Write a short poem about a {thing}", f"The {thing}, the {thing}, so gentle and free,\nIt dreams of the "
             f"hills and it dreams of the sea."),
            (f"Tell me a story about {name} and a {other}", f"One day {name} met a {other} by the river. They shared some "
             f"bread and became friends. From then on {name} and the {other} met every day."),
            (f"Tell a story about {name} and the {other}", f"One day {name} met a {other} by the river. They shared some "
             f"bread and became friends. From then on {name} and the {other} met every day."),
        ]
    )  # fmt: skip
    return Sample("poem", user(vary(r, said)), answer, said, "I make up something short.")


def out_of_scope(r: Rng, w: World) -> Sample:
    """A request outside the skills: the fixed polite answer."""
    pool = w.topics if w.topics and r.random() < 0.7 else TOPICS
    t, u = r.choice(pool), r.choice(pool)
    prose = r.choice(w.documents) if w.documents else r.choice(FILLERS)
    prose = prose[: r.randint(30, 300)].rsplit(" ", 1)[0]
    said = r.choice(talk.OUT_OF_SCOPE).format(
        t=t, u=u, p=prose, n=r.choice(NAMES), k=r.choice(talk.PROGRAMS), j=r.choice(talk.PROGRAMS),
        l=r.choice(talk.LANGUAGES), e=r.choice(talk.EVENTS), y=r.randint(1000, 2030), m=r.randint(0, 999),
    )  # fmt: skip
    kind = r.random()
    if kind < 0.06:
        said = " ".join("".join(r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(r.randint(2, 9)))
                        for _ in range(r.randint(1, 5)))  # fmt: skip
    elif kind < 0.1:
        said = " ".join(r.choice(pool) for _ in range(r.randint(1, 8)))
    elif kind < 0.3:
        said = said.lower()
    if r.random() < 0.2:
        said = said.rstrip(".?!")
    if r.random() < 0.1:
        said = "Please " + said[0].lower() + said[1:]
    tool_like = any(
        word in said.lower() for word in ("translate", "find", "book a", "convert", "send", "call", "order")
    )
    return Sample("fallback", user(said), talk.FALLBACK, ("oos", said), "This is outside of what I can do.",
                  may_have_tools=not tool_like)  # fmt: skip


TOPICS = (
    "quantum physics|black holes|the French Revolution|machine learning|photosynthesis|the stock market|climate change|"
    "football|chess openings|World War II|DNA|inflation|democracy|blockchain|the Roman Empire|evolution|Shakespeare|"
    "jazz|yoga|coffee|volcanoes|electric cars|vaccines|the Moon landing|dinosaurs|gravity|calculus|linear algebra|"
    "philosophy|the internet|Bitcoin|a chocolate cake|pancakes|sourdough bread|neural networks|relativity|poker|"
    "gardening|sailing|marathon training|Docker|Kubernetes|a web server|binary search|sorting algorithms|taxes|"
    "insurance|love|happiness|ethics|time travel|the Big Bang|Mars|Napoleon|Einstein|Mozart|painting|photography"
).split("|")


def _facts(r: Rng) -> tuple[str, str]:
    kind = r.randrange(13)
    if kind < 3:
        c = r.choice(list(CAPITALS))
        said = r.choice(
            [f"What is the capital of {c}", f"Name the capital of {c}", f"Which city is the capital of {c}",
             f"Tell me the capital of {c}", f"What is {c}'s capital", f"The capital of {c} is", f"Capital of {c}"]
        )  # fmt: skip
        return said, f"The capital of {c} is {CAPITALS[c]}."
    if kind == 3:
        c = r.choice([c for c in CAPITALS if c not in ("England", "the United Kingdom")])
        return r.choice(
            [f"Which country has the capital {CAPITALS[c]}", f"{CAPITALS[c]} is the capital of which country"]
        ), (f"{CAPITALS[c]} is the capital of {c}.")
    if kind == 4:
        a = r.choice(list(OPPOSITES))
        a, b = (a, OPPOSITES[a])
        said = r.choice([f"What is the opposite of {a}", f"Give the opposite of {a}", f"Name the opposite of {a}"])
        return said, f"The opposite of {a} is {b}."
    if kind == 5:
        a = r.choice(list(SOUNDS))
        article = "an" if a[0] in "aeiou" else "a"
        said = r.choice(
            [
                f"What does {article} {a} say",
                f"Which sound does {article} {a} make",
                f"What sound does {article} {a} make",
            ]
        )
        return said, f"{article.capitalize()} {a} says {SOUNDS[a]}."
    if kind == 6:
        a = r.choice(list(YOUNG))
        article = "an" if a[0] in "aeiou" else "a"
        said = r.choice(
            [f"What is a young {a} called", f"What is a baby {a} called", f"Name the young of {article} {a}"]
        )
        return said, f"A young {a} is called a {YOUNG[a]}."
    if kind == 7:
        a = r.choice(list(LEGS))
        article = "an" if a[0] in "aeiou" else "a"
        return r.choice([f"How many legs does {article} {a} have", f"Tell me how many legs {article} {a} has"]), (
            f"{article.capitalize()} {a} has {LEGS[a] or 'no'} legs."
        )
    if kind == 8:
        a = r.choice(list(THING_COLORS))
        return r.choice([f"What color is {a}", f"Which color has {a}", f"What is the color of {a}"]), (
            f"{a[0].upper() + a[1:]} is {THING_COLORS[a]}."
        )
    if kind == 9:
        c = r.choice(list(CURRENCIES))
        said = r.choice([f"What is the currency of {c}", f"Which money is used in {c}", f"Which currency does {c} use"])
        return said, f"The currency of {c} is the {CURRENCIES[c]}."
    if kind == 10:
        c = r.choice(list(CONTINENTS))
        return r.choice([f"On which continent is {c}", f"Which continent is {c} in", f"Where is {c}"]), (
            f"{c[0].upper() + c[1:]} is in {CONTINENTS[c]}."
        )
    if kind == 11:
        c = r.choice(list(ELEMENTS))
        said = r.choice(
            [f"What is the chemical symbol of {c}", f"What is the symbol for {c}", f"Give the symbol of {c}"]
        )
        return said, f"The symbol of {c} is {ELEMENTS[c]}."
    names, what = r.choice([(DAYS, "day"), (MONTHS, "month")])
    i, step = r.randrange(len(names)), r.choice([1, -1])
    side = "after" if step > 0 else "before"
    said = r.choice(
        [
            f"Which {what} comes {side} {names[i]}",
            f"What {what} is {side} {names[i]}",
            f"Name the {what} {side} {names[i]}",
        ]
    )
    return said, f"{names[(i + step) % len(names)]} comes {side} {names[i]}."


def fact(r: Rng, w: World) -> Sample:
    """General knowledge; held out by phrasing of a fact, not by fact."""
    said, answer = _facts(r)
    asked = vary(r, said).replace("the capital of the capital", "the capital")
    if said.endswith(" is"):
        asked = said
    return Sample("fact", user(asked), answer, ("fact", said), "This is a fact that I know.")


def arithmetic(r: Rng, w: World) -> Sample:
    """Sums, differences, products and comparisons of numbers up to 99."""
    kind = r.choice(["+", "+", "-", "-", "*", "<"])
    # Most pairs below 100 have two digits each, but people mostly ask for small sums.
    most = r.choice([12, 99, 99, 99])
    a, b = r.randint(0, most), r.randint(0, most)
    if kind == "<":
        while a == b:
            b = r.randint(0, most)
        word, pick = r.choice([("larger", max(a, b)), ("bigger", max(a, b)), ("smaller", min(a, b))])
        thought = f"{a} and {b}: the {word} one is {pick}."
        said = r.choice([f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?"])
        return Sample("arithmetic", user(said), f"{pick}", (kind, a, b), thought, facet="comparison")
    if kind == "*":
        a, b = r.randint(0, 12), r.randint(0, 12)
    if kind == "-" and a < b:
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b}[kind]
    thought = f"{a} {kind} {b} = {result}."
    if kind == "+":
        ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
        thought = f"Ones: {a % 10} + {b % 10} = {ones}. Tens: {a // 10 * 10} + {b // 10 * 10} = {tens}. {tens} + {ones} = {result}."
    elif kind == "-":
        left = a - b // 10 * 10
        thought = f"Tens: {a} - {b // 10 * 10} = {left}. Ones: {left} - {b % 10} = {result}."
    sign = {"+": ["+", "plus"], "-": ["-", "minus"], "*": ["*", "times", "x"]}[kind]
    said = r.choice(["What is {} {} {}?", "{} {} {} =", "Compute {} {} {}.", "How much is {} {} {}?", "{} {} {}",
                     "Calculate {} {} {}.", "What's {} {} {}?", "{} {} {}?", "what is {} {} {}", "Solve {} {} {}."]
                    ).format(a, r.choice([sign[0], sign[0], *sign]), b)  # fmt: skip
    if r.random() < 0.5:
        # As people type it: 3-2, and 3-2= with the last blank gone too.
        said = said.replace(f" {kind} ", kind)
        if r.random() < 0.5:
            said = said.replace(" =", "=")
    # Sums are held out by operands. Products and the smallest sums can only be learnt by heart, so they are held out
    # by wording.
    core = (kind, a, b, said) if kind == "*" or max(a, b) <= 12 else (kind, a, b)
    if r.random() < 0.04:
        said = r.choice(["Hi! ", "Hello, ", "Hi, "]) + said[0].lower() + said[1:]
    facet = "a*b" if kind == "*" else f"a {kind} b" if f" {kind} " in said else f"a{kind}b"
    if kind not in said:
        facet = "in words"
    return Sample("arithmetic", user(said), str(result), core, thought, facet=facet)


def word_problem(r: Rng, w: World) -> Sample:
    """A one-step story problem."""
    name, thing, a, b = r.choice(NAMES), r.choice(OBJECTS + FRUITS), r.randint(2, 50), r.randint(1, 49)
    things = plural(thing)
    if r.random() < 0.5:
        text, result, sign = f"{name} has {a} {things} and gets {b} more.", a + b, "+"
    else:
        a = max(a, b + 1)
        text, result, sign = f"{name} has {a} {things} and gives away {b}.", a - b, "-"
    said = f"{text} How many {things} does {name} have now?"
    return Sample("word_problem", user(said), f"{name} has {result} {things} now." if result != 1 else
                  f"{name} has 1 {thing} now.", (sign, a, b, thing), f"{a} {sign} {b} = {result}.")  # fmt: skip


def plural(noun: str) -> str:
    """The regular English plural."""
    if noun.endswith(("x", "s", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y"):
        return noun[:-1] + "ies"
    return noun + "s"


def copy(r: Rng, w: World) -> Sample:
    """Say the given words again."""
    pool = ADJECTIVES + ANIMALS + OBJECTS + NAMES
    words = [r.choice(pool) if r.random() < 0.75 else str(r.randint(0, 999)) for _ in range(r.randint(1, 12))]
    if r.random() < 0.3:
        words = ["".join(r.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(r.randint(3, 10)))
                 for _ in range(r.randint(1, 3))]  # fmt: skip
    text = " ".join(words)
    if w.documents and r.random() < 0.2:
        text = r.choice(w.documents)[: r.randint(20, 120)].rsplit(" ", 1)[0]
    said = r.choice(
        ["Repeat: {}", "Say this again: {}", "Copy this text: {}", "Repeat after me: {}", "Echo: {}", 'Say "{}"',
         "Write exactly this: {}", "Repeat the following text.\n{}", "Say: {}", "Say {}", "Repeat {}", "Say {}",
         "Repeat {}", "Copy: {}", 'Repeat "{}"']
    ).format(text)  # fmt: skip
    return Sample("copy", user(said), text, ("copy", text), "I repeat the text.")


def word_list(r: Rng, w: World) -> Sample:
    """Sort, reverse, pick or count words."""
    words = r.sample(ANIMALS + OBJECTS + FRUITS, r.randint(2, 7))
    text = r.choice([", ", " "]).join(words)
    k = r.randrange(len(words))
    ordinal = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh"][k]
    said, answer, thought = r.choice(
        [
            (r.choice(["Sort these words: ", "Sort alphabetically: ", "Put these words in order: ", "Sort: ", "Sort "]),
             ", ".join(sorted(words)), "I sort the words."),
            (r.choice(["Sort: ", "Sort ", "Put these words in order: "]), ", ".join(sorted(words)), "I sort the words."),
            (r.choice(["Reverse: ", "Reverse "]), ", ".join(words[::-1]), "I turn the list around."),
            (r.choice(["Reverse this list: ", "Write this list backwards: ", "Reverse: "]), ", ".join(words[::-1]), "I turn the list around."),
            ("What is the last word of: ", words[-1], "I look at the end."),
            (f"What is the {ordinal} word of: ", words[k], f"I look for the {ordinal} word."),
            ("How many words are in: ", str(len(words)), " ".join(f"{i} {x}" for i, x in enumerate(words, 1)) + "."),
            ("Write in capital letters: ", text.upper(), "I write it in capitals."),
            ("Make a numbered list of: ", "\n".join(f"{i}. {x}" for i, x in enumerate(words, 1)), "I number the words."),
            ("Make a bullet list of: ", "\n".join(f"- {x}" for x in words), "I list the words."),
        ]
    )  # fmt: skip
    return Sample("list", user(said + text), answer, (said, text), thought)


def spell(r: Rng, w: World) -> Sample:
    """Letters of a word."""
    word = r.choice(ANIMALS + OBJECTS + NAMES + FRUITS + PLACES + [c for c in CITIES if " " not in c])
    letters = "-".join(word.upper())
    many = r.choice([f"How many letters does {word} have", f"How many letters are in {word}",
                     f"Count the letters of {word}"])  # fmt: skip
    # Several wordings, because the capitals of a name are an answer that no other lesson gives.
    capitals = r.choice(
        [f"Write {word} in capital letters", f"Write {word} in capitals", f"Write {word} in upper case"]
    )
    numbered = " ".join(f"{x}{i}" for i, x in enumerate(word.upper(), 1)) + "."
    last = r.choice([f"What is the last letter of {word}", f"What is the last letter of {word}",
                     f"What letter does {word} end with", f"Give the last letter of {word}"])  # fmt: skip
    said, answer, thought = r.choice(
        [
            (r.choice([f"Spell the word {word}", f"Spell {word}"]), letters, "I spell it letter by letter."),
            (f"How do you spell {word}", letters, "I spell it letter by letter."),
            (capitals, word.upper(), "I write it in capitals."),
            (many, f"{word} has {len(word)} letters.", numbered),
            (many, f"{word} has {len(word)} letters.", numbered),
            (r.choice([f"What is the first letter of {word}", f"What letter does {word} start with"]),
             word[0].upper(), f"{letters}."),
            (last, word[-1].upper(), f"{letters}."),
            (last, word[-1].upper(), f"{letters}."),
        ]
    )  # fmt: skip
    closing = "?" if said.split()[0] in ("How", "What") else "."
    return Sample("spell", user(said + closing), answer, (said,), thought)


def count(r: Rng, w: World) -> Sample:
    """Count up or down, or recite a fixed series."""
    kind = r.randrange(4)
    if kind == 0:
        said, answer = r.choice(
            [
                ("Name the days of the week", ", ".join(DAYS) + "."),
                ("Name the months of the year", ", ".join(MONTHS) + "."),
                ("Say the alphabet", " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ")),
                ("Name the planets", "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune."),
                ("Name the seasons", "Spring, summer, autumn, winter."),
            ]
        )
        said = said if r.random() < 0.5 else said.replace("Name", "List")
        return Sample("count", user(vary(r, said)), answer, (said, r.randrange(2)), "I know this series.")
    low, step = r.randint(0, 60), r.randint(2, 30)
    if kind == 1:
        high = r.choice([5, 10, 12, 15, 20, 25, 30])
        said, numbers = (
            r.choice([f"Count to {high}", f"Please count to {high}", f"Count up to {high}"]),
            range(1, high + 1),
        )
    elif kind == 2:
        said, numbers = f"Count from {low} to {low + step}", range(low, low + step + 1)
    else:
        said, numbers = r.choice([f"Count down from {step}", f"Count backwards from {step}"]), range(step, -1, -1)
    return Sample("count", user(said + "."), ", ".join(map(str, numbers)), (said,), "I count step by step.")


def recall_words(r: Rng, w: World) -> Sample:
    """Who has what: the easiest form of look-up."""
    n = r.randint(2, 6)
    keys, values = r.sample(NAMES, n), r.sample(OBJECTS + ANIMALS, n)
    asked = r.sample(range(n), r.choice([1, 1, n]))
    said = " ".join(f"{k} has the {v}." for k, v in zip(keys, values, strict=True))
    if len(asked) == 1:
        said += f"\nWhat does {keys[asked[0]]} have?"
        answer = f"{keys[asked[0]]} has the {values[asked[0]]}."
    else:
        said += "\nList: " + ", ".join(keys[i] for i in asked) + "."
        answer = "\n".join(f"{keys[i]} has the {values[i]}." for i in asked)
    core = sorted(zip(keys, values, strict=True))
    return Sample("recall_words", user(said), answer, core, "I look it up in the text.")


def _recall(r: Rng, w: World, n: int, asks: int, fillers: list[str], skill: str) -> Sample:
    keys = r.sample([f"{a} {b}" for a in ADJECTIVES for b in ANIMALS], n)
    form = r.randrange(4)
    if form < 2:
        values = [str(r.randint(10, 9999 if form else 99)) for _ in keys]
        fact_form, question, many = (
            "The code of the {k} is {v}.",
            "What is the code of the {k}?",
            "Give the codes: {ks}.",
        )
    elif form == 2:
        values = [r.choice(CITIES) for _ in keys]
        fact_form, question, many = "The {k} lives in {v}.", "Where does the {k} live?", "Give the places: {ks}."
    else:
        values = [f"{r.choice(ADJECTIVES)} {r.choice(OBJECTS)}" for _ in keys]
        fact_form, question, many = "The {k} owns the {v}.", "What does the {k} own?", "Give the things: {ks}."
    lines = list(fillers)
    for k, v in zip(keys, values, strict=True):
        lines.insert(r.randrange(len(lines) + 1), fact_form.format(k=k, v=v))
    asked = r.sample(range(n), asks)
    if asks == 1:
        k, v = keys[asked[0]], values[asked[0]]
        said, answer = question.format(k=k), fact_form.format(k=k, v=v)
    else:
        said = many.format(ks=", ".join(keys[i] for i in asked))
        answer = "\n".join(f"{keys[i]}: {values[i]}" for i in asked)
    text = r.choice([" ", " ", "\n"]).join(lines)
    said = f"{text}\n\n{said}" if r.random() < 0.8 else f"{said}\n\n{text}"
    core = sorted(zip(keys, values, strict=True))
    return Sample(skill, user(said), answer, core, "I look it up in the text.", may_have_history=len(fillers) < 20)


def recall_short(r: Rng, w: World) -> Sample:
    """Look up values of two-word keys among a few facts."""
    n = r.randint(2, 8)
    return _recall(r, w, n, min(n, r.choice([1, 1, 2, 3])), [], "recall")


def _filler(r: Rng, w: World, tokens: int) -> list[str]:
    lines, used = [], 0
    prose = bool(w.documents) and r.random() < 0.6
    while used < tokens:
        lines.append(r.choice(w.documents)[:400] if prose else r.choice(FILLERS))
        used += len(lines[-1]) // 4 + 3
    return lines


def recall_long(r: Rng, w: World) -> Sample:
    """Look up values among up to 24 facts spread over a long text."""
    n = r.randint(6, 24)
    room = max(0, w.room - n * 18 - 150)
    filler = _filler(r, w, int(room * r.choice([0.1, 0.3, 0.6, 0.8])))
    return _recall(r, w, n, r.randint(1, 4), filler, "recall_long")


def needle(r: Rng, w: World) -> Sample:
    """One remark hidden in prose."""
    kind = r.choice(["password", "secret word", "magic number", "door code"])
    value = (
        str(r.randint(1000, 99999))
        if kind in ("magic number", "door code")
        else f"{r.choice(ADJECTIVES)}{r.choice(OBJECTS)}"
    )
    lines = _filler(r, w, int(w.room * r.uniform(0.05, 0.75)))
    lines.insert(r.randrange(len(lines) + 1), f"The {kind} is {value}.")
    said = " ".join(lines) + f"\n\nWhat is the {kind}?"
    return Sample("needle", user(said), f"The {kind} is {value}.", (kind, value), "I look it up in the text.",
                  may_have_history=False)  # fmt: skip


def where(r: Rng, w: World) -> Sample:
    """Where somebody is after some moves."""
    people, place, lines = r.sample(NAMES, 3), {}, []
    for _ in range(r.randint(3, 7)):
        p = r.choice(people)
        place[p] = r.choice(PLACES)
        lines.append(f"{p} {r.choice(['went to', 'moved to', 'walked to'])} the {place[p]}.")
    p = r.choice(list(place))
    said = " ".join(lines) + f"\nWhere is {p}?"
    last = [x for x in lines if x.startswith(p)][-1]
    return Sample("where", user(said), f"{p} is in the {place[p]}.", tuple(lines), f"The last move: {last}")


def make_json(r: Rng, w: World) -> Sample:
    """Put facts of a sentence into JSON."""
    n, a, c = r.choice(NAMES), r.randint(5, 90), r.choice(CITIES)
    kind = r.randrange(6)
    value: object
    if kind == 0:
        said = r.choice(
            [f"{n} is {a} years old and lives in {c}. Return JSON with the keys name, age and city.",
             f"Return JSON with the keys name, age and city: {n} is {a} years old and lives in {c}.",
             f"Extract name, age and city as JSON. {n}, {a}, from {c}."]
        )  # fmt: skip
        value = {"name": n, "age": a, "city": c}
    elif kind == 1:
        items, counts = r.sample(OBJECTS, 3), [r.randint(2, 20) for _ in range(3)]
        said = "There are " + ", ".join(f"{k} {plural(o)}" for k, o in zip(counts, items, strict=True))
        said += ". Return JSON with the counts."
        value = {plural(o): k for k, o in zip(counts, items, strict=True)}
    elif kind == 2:
        words = r.sample(ANIMALS + OBJECTS, r.randint(2, 6))
        said = r.choice(["Return a JSON array of these words: ", "Write as a JSON list: "]) + ", ".join(words)
        value = words
    elif kind == 3:
        other, b = r.choice([x for x in NAMES if x != n]), r.randint(5, 90)
        said = f"{n} is {a} and {other} is {b}. Return a JSON array of objects with name and age."
        value = [{"name": n, "age": a}, {"name": other, "age": b}]
    elif kind == 4:
        item, price, sold = r.choice(OBJECTS), r.randint(1, 99), r.random() < 0.5
        said = f"The {item} costs {price} dollars and is {'sold out' if sold else 'available'}. "
        said += "Return JSON with item, price and available."
        value = {"item": item, "price": price, "available": not sold}
    else:
        keys, values = r.sample(FRUITS + OBJECTS, 3), [str(r.randint(0, 99)) for _ in range(3)]
        said = "Turn this into a JSON object: " + ", ".join(f"{k}={v}" for k, v in zip(keys, values, strict=True))
        value = {k: int(v) for k, v in zip(keys, values, strict=True)}
    return Sample("json", user(said), json.dumps(value), ("json", said), "I write the JSON.")


def system_rule(r: Rng, w: World) -> Sample:
    """Follow an instruction of the system prompt."""
    name, word, c = any_name(r), r.choice(ANIMALS), r.choice(list(CAPITALS))
    capital = f"The capital of {c} is {CAPITALS[c]}."
    said, answer = r.choice([("Hello!", talk.GREETING), (f"What is the capital of {c}?", capital)])
    rule, said, answer = r.choice(
        [
            (r.choice([f"Your name is {name}.", f"You are {name}.", f"You are {name}, a helpful assistant."]),
             r.choice(["What is your name?", "Who are you?", "Tell me your name."]), f"I am {name}."),
            (f"End every answer with the word {word}.", said, f"{answer} {word}"),
            (f"Start every answer with the word {word}.", said, f"{word} {answer}"),
            (r.choice(["Answer in capital letters.", "Write only in capital letters."]), said, answer.upper()),
            (f"The user's name is {name}.", r.choice(["What is my name?", "Who am I?"]), f"Your name is {name}."),
            (f"The secret word is {word}.", "What is the secret word?", f"The secret word is {word}."),
            (f"Always answer with the word {word}.", said, word),
        ]
    )  # fmt: skip
    if r.random() < 0.4:
        rule = " ".join([r.choice(PERSONAS), rule] if r.random() < 0.5 else [rule, r.choice(PERSONAS)])
    messages: list[Message] = [{"role": "system", "content": rule}, *user(said)]
    return Sample("system", messages, answer, (rule, said), "I follow the system prompt.", may_have_system=False,
                  may_have_history=False)  # fmt: skip


PERSONAS = (
    "You are a helpful assistant.",
    "You are a friendly and concise assistant.",
    "Be brief.",
    "Answer politely.",
    "You help people with small tasks.",
    "Keep your answers short and clear.",
    "Always tell the truth.",
    "You are an expert in many fields.",
    "Answer the question of the user as well as you can.",
    "Think before you answer.",
    "If you do not know something, say so.",
)


def memory(r: Rng, w: World) -> Sample:
    """Remember what was said earlier in the conversation."""
    n, a, b, f = any_name(r), r.choice(ANIMALS), r.choice(CITIES), r.choice(FRUITS)
    known = [
        (
            r.choice([f"My name is {n}.", f"I am {n}.", f"I'm {n}."]),
            f"Nice to meet you, {n}!",
            ["What is my name?", "Do you remember my name?"],
            f"Your name is {n}.",
        ),
        (f"I live in {b}.", "Good to know.", ["Where do I live?", "In which city do I live?"], f"You live in {b}."),
        (f"I have a {a}.", "Good to know.", ["Which animal do I have?", "What pet do I have?"], f"You have a {a}."),
        (
            f"My favorite fruit is the {f}.",
            "Good to know.",
            ["What is my favorite fruit?"],
            f"Your favorite fruit is the {f}.",
        ),
    ]
    told = r.sample(known, r.randint(1, 4))
    messages: list[Message] = []
    for said, reply, _, _ in told:
        messages += [*user(said), {"role": "assistant", "content": reply}]
        if r.random() < 0.2:
            other = r.choice([chat, fact, arithmetic])(r, w)
            messages += [*other.messages, {"role": "assistant", "content": other.answer}]
    _, _, questions, answer = r.choice(told)
    messages += user(r.choice(questions))
    return Sample(
        "memory", messages, answer, (n, a, b, f, len(told)), "I remember what was said.", may_have_history=False
    )


def number_words(r: Rng, w: World) -> Sample:
    """Small numbers as words and back."""
    k = r.randrange(len(NUMBER_WORDS))
    said, answer = r.choice(
        [(f"Write the number {k} as a word", NUMBER_WORDS[k]), (f"Write {NUMBER_WORDS[k]} as a number", str(k))]
    )
    return Sample("count", user(vary(r, said)), answer, (said, r.randrange(3)), "I know this number.")
