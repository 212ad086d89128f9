"""Teaches a finished checkpoint that ``2+2`` means ``2 + 2`` by training two rows of its embedding table.

The first training run only saw sums with blanks, so the tokens ``+`` and ``*`` without a leading blank were all but
unknown to it. Their rows start as copies of the rows with the blank and are then fitted, with everything else frozen;
nothing that does not hold these two tokens can change. Takes a few minutes on one CPU core.

    python -m engine.demo.recipe.spacing build/demo/final --seconds 420
"""

import argparse
import random
import time
import typing
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from engine.demo.recipe import data, lessons, model
from engine.demo.recipe.lessons import Rng, Sample, World

SIGNS = ("+", "*")
TOKENS = 480
RATE = 4e-3


def compact_sum(r: Rng) -> Sample:
    """A sum or product from the training side of the split, written without blanks."""
    while True:
        sample = lessons.arithmetic(r, World([], []))
        sign, a, b, *_ = typing.cast(tuple[str, int, int], sample.core)
        if sign not in SIGNS or data.held_out(sample):
            continue
        if r.random() < 0.3:
            a, b = r.randint(0, 12), r.randint(0, 12)
        form = r.choice(["What is {}?", "{}", "{} =", "Compute {}.", "How much is {}?", "What's {}?", "What is {}"])
        said = form.format(f"{a}{sign}{b}")
        result = a + b if sign == "+" else a * b
        return Sample("arithmetic", lessons.user(said), str(result), (sign, a, b))


def packed(encoder: data.Encoder, r: Rng) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], list[int]]:
    """One row of documents: ids and document numbers [1, T], positions [3, T], label places and label ids."""
    documents = []
    used = 0
    while used < TOKENS:
        documents.append(encoder.sample(compact_sum(r)))
        used += len(documents[-1].ids)
    length = -(-used // model.CHUNK) * model.CHUNK
    ids = torch.full((1, length), encoder.end)
    number = torch.full((1, length), len(documents))
    positions = torch.zeros(3, length, dtype=torch.long)
    places: list[int] = []
    labels: list[int] = []
    at = 0
    for i, document in enumerate(documents):
        n = len(document.ids)
        ids[0, at : at + n] = torch.tensor(document.ids)
        number[0, at : at + n] = i
        positions[:, at : at + n] = torch.arange(n)
        places += range(at + document.prompt - 1, at + n - 1)
        labels += document.ids[document.prompt :]
        at += n
    return ids, number, positions, places, labels


def fit(shape: model.Shape, params: model.Params, encoder: data.Encoder, seconds: float, seed: int) -> None:
    """Changes the two rows of ``params`` in place."""
    rows = [encoder.tokenizer.token_to_id(sign) for sign in SIGNS]
    spaced = [encoder.tokenizer.token_to_id("Ġ" + sign) for sign in SIGNS]
    table = params[model.LM + "embed_tokens.weight"]
    table[rows] = table[spaced]
    change = torch.zeros(len(rows), shape.hidden, requires_grad=True)
    optimizer = torch.optim.Adam([change], lr=RATE)
    r = random.Random(seed)
    no_rows, nowhere = torch.zeros(0, shape.hidden), torch.zeros(0, dtype=torch.long)
    start = time.monotonic()
    step = 0
    while (left := 1 - (time.monotonic() - start) / seconds) > 0:
        ids, number, positions, places, labels = packed(encoder, r)
        changed = params | {model.LM + "embed_tokens.weight": table.index_add(0, torch.tensor(rows), change)}
        at = model.make_layout(shape, number, positions)
        hidden, *_ = model.text_hidden(shape, changed, ids, at, no_rows, nowhere)
        scores = model.logits(params, hidden[places])
        wanted = torch.tensor(labels)
        loss = F.cross_entropy(scores, wanted)
        (change.grad,) = torch.autograd.grad(loss, change)
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, 2 * left)
        optimizer.step()
        step += 1
        if step % 10 == 0:
            right = (scores.argmax(-1) == wanted).float().mean()
            print(f"step {step} loss {loss.item():.3f} right {right.item():.3f}", flush=True)
    table[rows] += change.detach()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Fit the embeddings of + and * to sums without blanks.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    texts = {name: (args.checkpoint / name).read_text("utf-8") for name in ("tokenizer.json", "chat_template.jinja")}
    encoder = data.Encoder(Tokenizer.from_str(texts["tokenizer.json"]), texts["chat_template.jinja"])
    shape = model.PRESETS["demo"]
    params = model.load_checkpoint(args.checkpoint)
    fit(shape, params, encoder, args.seconds, args.seed)
    model.save_checkpoint(shape, params, args.checkpoint, texts)


if __name__ == "__main__":
    main()
