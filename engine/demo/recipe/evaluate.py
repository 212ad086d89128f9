"""Held-out accuracy per skill: the bfloat16 original in the official implementation, and a server over HTTP.

Both see the same prompts. A sample counts as right when the whole completion is: reasoning (in thinking mode), answer
text, and every tool call with its arguments. For the original one forward pass is enough, because a completion comes
out of greedy decoding exactly when each of its tokens has the highest score after the tokens before it.

    python -m engine.demo.recipe.evaluate --original tests/data/demo_bf16 --base-url http://127.0.0.1:8000/v1
"""

import argparse
import base64
import collections
import io
import json
import random
import typing
import urllib.request
from pathlib import Path

from PIL import Image

from engine.demo.recipe import data
from engine.demo.recipe.lessons import Message, Sample, World
from engine.demo.recipe.pictures import SIZES


class Judge(typing.Protocol):
    """Says whether a model completes a sample exactly."""

    def __call__(self, sample: Sample) -> bool:
        """True when the completion is exactly the wanted one."""


#: A lesson is given up for a skill that none of this many held-out samples in a row belonged to.
PATIENCE = 400


def held_out_samples(per_skill: int, seed: int, documents: list[str], skills: frozenset[str]) -> list[Sample]:
    """Held-out samples of every lesson, surrounded as in training: up to ``per_skill`` of each skill of a lesson.

    ``skills`` restricts them to some skills; empty means all.
    """
    rng = random.Random(seed)
    topics = data.topics_of(documents)
    samples: list[Sample] = []
    for lesson, _ in data.LESSONS:
        found: collections.Counter[str] = collections.Counter()
        vain = 0
        while vain < PATIENCE:
            size = rng.choices([s for s, _ in SIZES], [n for _, n in SIZES])[0]
            world = World(documents, topics, size, rng.choice([800, 800, 2000]))
            sample = lesson(rng, world)
            if not data.held_out(sample):
                continue
            if found[sample.skill] >= per_skill or (skills and sample.skill not in skills):
                vain += 1
                continue
            samples.append(data.surround(rng, world, sample))
            found[sample.skill] += 1
            vain = 0
    return samples


def original_judge(directory: Path) -> Judge:
    """The checkpoint in transformers, bfloat16 on the CPU."""
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3_5MoeForConditionalGeneration

    from engine.demo.recipe.model import to_patches

    network = Qwen3_5MoeForConditionalGeneration.from_pretrained(directory, dtype=torch.bfloat16).eval()
    template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    encoder = data.Encoder(Tokenizer.from_file(str(directory / "tokenizer.json")), template)

    @torch.no_grad()
    def judge(sample: Sample) -> bool:
        document = encoder.sample(sample)
        ids = torch.tensor([document.ids])
        extra = {}
        if document.pictures:
            patches = [to_patches(torch.tensor(picture)[None])[0] for picture in document.pictures]
            extra = {
                "pixel_values": torch.cat(patches),
                "image_grid_thw": torch.tensor([[1, p.shape[0] // 16, p.shape[1] // 16] for p in document.pictures]),
                "mm_token_type_ids": torch.eq(ids, encoder.pad).int(),
            }
        scores = network(input_ids=ids, use_cache=False, **extra).logits[0, document.prompt - 1 : -1]
        return bool(scores.argmax(-1).tolist() == document.ids[document.prompt :])

    return judge


def data_url(picture: typing.Any) -> str:
    """A uint8 picture [H, W, 3] as a PNG data URL."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def wire_messages(sample: Sample) -> list[Message]:
    """The messages as an OpenAI client sends them: pictures as data URLs, arguments as JSON text."""
    waiting = iter(sample.pictures)
    messages: list[Message] = []
    for message in sample.messages:
        sent = dict(message)
        if isinstance(sent["content"], list):
            sent["content"] = [
                {"type": "image_url", "image_url": {"url": data_url(next(waiting))}}
                if part["type"] == "image"
                else part
                for part in sent["content"]
            ]
        if "tool_calls" in sent:
            sent["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in sent["tool_calls"]
            ]
        messages.append(sent)
    return messages


def server_judge(base_url: str, model: str | None, say: typing.Callable[[str], None]) -> Judge:
    """A server with the OpenAI chat API; wrong completions are described through ``say``."""

    def call(path: str, body: dict[str, typing.Any] | None) -> dict[str, typing.Any]:
        content = None if body is None else json.dumps(body).encode("utf-8")
        request = urllib.request.Request(base_url.rstrip("/") + path, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as response:
            answer: dict[str, typing.Any] = json.load(response)
            return answer

    name = model or call("/models", None)["data"][0]["id"]

    def judge(sample: Sample) -> bool:
        body: dict[str, typing.Any] = {
            "model": name,
            "messages": wire_messages(sample),
            "temperature": 0,
            "max_tokens": 400,
            "chat_template_kwargs": {"enable_thinking": sample.thinking},
        }
        if sample.tools:
            body["tools"] = sample.tools
        message = call("/chat/completions", body)["choices"][0]["message"]
        calls = [
            (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []
        ]
        got = ((message.get("content") or "").strip(), calls)
        wanted = (sample.answer.strip(), sample.calls)
        thought = (message.get("reasoning_content") or "").strip()
        right = got == wanted and (not sample.thinking or thought == sample.thought)
        if not right:
            say(f"{sample.skill}: {sample.messages[-1]['content']!r}: wanted {wanted}, got {got} after {thought!r}")
        return right

    return judge


def table(samples: list[Sample], judges: dict[str, Judge]) -> dict[str, dict[str, float]]:
    """Accuracy by skill, facet ("skill: facet") and judge, with ``n`` and rows ``all text`` and ``all``.

    Printed as it is computed.
    """
    by_skill: dict[str, list[Sample]] = collections.defaultdict(list)
    for sample in samples:
        by_skill[sample.skill].append(sample)
    rows: dict[str, dict[str, float]] = {}
    right: dict[str, list[tuple[Sample, bool]]] = {name: [] for name in judges}

    def row(title: str, judged: dict[str, list[bool]]) -> None:
        n = len(next(iter(judged.values())))
        if n:
            rows[title] = {"n": n} | {name: sum(hits) / n for name, hits in judged.items()}
            shares = "".join(f"{rows[title][name]:12.3f}" for name in judges)
            print(f"{title:26}{n:6}{shares}", flush=True)

    print(f"{'skill':26}{'n':>6}" + "".join(f"{name:>12}" for name in judges))
    for skill, members in sorted(by_skill.items()):
        judged = {name: [(s, judge(s)) for s in members] for name, judge in judges.items()}
        row(skill, {name: [hit for _, hit in pairs] for name, pairs in judged.items()})
        for facet in sorted({s.facet for s in members if s.facet}):
            row(
                f"{skill}: {facet}",
                {name: [hit for s, hit in pairs if s.facet == facet] for name, pairs in judged.items()},
            )
        for name, pairs in judged.items():
            right[name] += pairs
    row("all text", {name: [hit for s, hit in pairs if not s.pictures] for name, pairs in right.items()})
    row("all", {name: [hit for _, hit in pairs] for name, pairs in right.items()})
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Held-out accuracy per skill of the demo model.")
    parser.add_argument("--original", type=Path, help="bfloat16 checkpoint to run in transformers")
    parser.add_argument("--base-url", help="server with the OpenAI API, for example http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="model name to ask the server for; default: its first")
    parser.add_argument("--per-skill", type=int, default=25, help="most samples of each skill of a lesson")
    parser.add_argument("--skills", default="", help="only these skills, separated by commas")
    parser.add_argument("--seed", type=int, default=4242)
    parser.add_argument("--corpus", type=Path, help="corpus file; without it long texts are made of stock sentences")
    parser.add_argument("--text-only", action="store_true", help="leave picture lessons out")
    parser.add_argument("--show", action="store_true", help="print what the server got wrong")
    args = parser.parse_args()
    documents: list[str] = []
    if args.corpus:
        from engine.demo.recipe import corpus

        whole = corpus.load(args.corpus)
        documents = whole[: len(whole) // 50]
    judges: dict[str, Judge] = {}
    if args.original:
        judges["original"] = original_judge(args.original)
    if args.base_url:
        judges["server"] = server_judge(args.base_url, args.model, print if args.show else lambda text: None)
    if not judges:
        parser.error("give --original, --base-url or both")
    skills = frozenset(name for name in args.skills.split(",") if name)
    samples = held_out_samples(args.per_skill, args.seed, documents, skills)
    if args.text_only:
        samples = [sample for sample in samples if not sample.pictures]
    print(json.dumps(table(samples, judges)))


if __name__ == "__main__":
    main()
