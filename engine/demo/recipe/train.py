"""Trains the demo model on one or several GPUs, in a fixed number of steps.

Phases: the vision tower alone with a linear read-out, then everything on packed lessons (easy forms, all lessons, all
lessons with longer texts under a falling learning rate), then the multi-token-prediction layer on the frozen rest.
Lessons are made by worker processes. A whole forward and backward pass is one CUDA graph for each batch form.

Schedule, learning rates and data follow the step number: what a step sees depends on the arguments alone, not on the
speed of the machine, the number of worker processes or the number of GPUs. A step is the mean over ``--parts`` batches,
which the GPUs share.

    python -m engine.demo.recipe.train --tokenizer tokenizer.json --corpus corpus.txt.xz --out out
    torchrun --nproc-per-node 2 -m engine.demo.recipe.train ...     # the same on two GPUs
"""

import argparse
import collections
import dataclasses
import gc
import json
import os
import random
import sys
import time
import typing
from pathlib import Path

import torch
import torch.distributed
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from engine.demo.recipe import data, model
from engine.demo.recipe.data import Form
from engine.demo.recipe.optimizer import Optimizer
from engine.demo.recipe.pictures import COLORS, SHAPES
from engine.demo.recipe.schedule import LONG_SHARE, Plan, rate_of, stage_of

Tensor = torch.Tensor

BALANCE, ROUTER_Z = 0.01, 1e-4
LOG_STEPS, SAVE_STEPS = 50, 1000


@dataclasses.dataclass
class Lessons(IterableDataset[dict[str, typing.Any]]):
    """The batches of all steps of ``plan`` that GPU number ``rank`` of ``ranks`` computes, in order."""

    tokenizer: Path
    corpus: Path
    forms: tuple[Form, Form]
    plan: Plan
    rank: int = 0
    ranks: int = 1
    focus: dict[str, float] = dataclasses.field(default_factory=dict)

    def __iter__(self) -> typing.Iterator[dict[str, typing.Any]]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        packer = data.make_packer(self.tokenizer, self.corpus, 0, focus=self.focus)
        plan = self.plan
        mine = range(self.rank, plan.parts, self.ranks)
        # The loader takes batches from its workers in turn, so batch n must come from worker n modulo their number.
        for n in range(number, (plan.steps + plan.mtp_steps) * len(mine), workers):
            step, part = n // len(mine), mine[n % len(mine)]
            packer.rng = random.Random(plan.batch_seed(step, part))
            made = packer.batch(self.forms[plan.is_long(step)], stage_of(plan.fraction(step)))
            yield {k: torch.from_numpy(v) if hasattr(v, "dtype") else v for k, v in made.items()}


@dataclasses.dataclass
class Shapes(IterableDataset[tuple[Tensor, Tensor]]):
    """Picture batches for the tower's warm-up."""

    seed: int
    count: int
    steps: int

    def __iter__(self) -> typing.Iterator[tuple[Tensor, Tensor]]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for step in range(number, self.steps, workers):
            pictures, labels = data.warm_up_pictures(random.Random(f"{self.seed} tower {step}"), self.count)
            yield torch.from_numpy(pictures), torch.from_numpy(labels)


def loader(dataset: IterableDataset[typing.Any], workers: int, pinned: bool) -> typing.Iterator[typing.Any]:
    """Batches of ``dataset`` from worker processes in turn, optionally copied to pinned memory by a thread."""
    return iter(
        DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            collate_fn=lambda batch: batch,
            pin_memory=pinned and torch.cuda.is_available(),
            prefetch_factor=3 if workers else None,
            multiprocessing_context="fork" if workers else None,
        )
    )


INPUTS = ("ids", "documents", "positions", "label_at", "label_id", "label_weight", "image_at")
Static = dict[str, Tensor]
LossFunction = typing.Callable[[Static], tuple[Tensor, Tensor]]


class Step:
    """One forward and backward pass over a batch form, as a CUDA graph where there is a GPU.

    After :meth:`run` the gradients lie in ``gradients`` (by name) and ``image_gradient`` [image_rows, hidden].
    """

    def __init__(
        self,
        shape: model.Shape,
        form: Form,
        trained: dict[str, Tensor],
        loss: LossFunction,
        device: torch.device,
        pool: typing.Any,
        eager: bool,
    ) -> None:
        self.trained, self.loss, self.device = trained, loss, device
        n = form.tokens
        self.static: Static = {
            "ids": torch.zeros(form.rows, form.length, dtype=torch.long, device=device),
            "documents": torch.arange(n, device=device).view(form.rows, form.length) // 128,
            "positions": (torch.arange(n, device=device) % 128).expand(3, n).contiguous(),
            "label_at": torch.arange(form.labels, device=device),
            "label_id": torch.zeros(form.labels, dtype=torch.long, device=device),
            "label_weight": torch.ones(form.labels, device=device),
            "image_at": torch.full((form.image_rows,), n, device=device),
            "image_rows": torch.zeros(form.image_rows, shape.hidden, device=device, requires_grad=True),
        }
        self.metrics = torch.zeros(())
        self.gradients: dict[str, Tensor] = {}
        self.image_gradient: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda" and not eager:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._pass()
            torch.cuda.current_stream().wait_stream(side)
            self._forget()
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            # thread_local: the thread that pins batches may allocate meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._pass()
            self.graph = graph

    def _forget(self) -> None:
        self.gradients = {}
        self.image_gradient = None

    def _pass(self) -> None:
        total, self.metrics = self.loss(self.static)
        wanted = [*self.trained.values(), self.static["image_rows"]]
        found = torch.autograd.grad(total, wanted, allow_unused=True)
        self.image_gradient = found[-1]
        self.gradients = {n: g for n, g in zip(self.trained, found, strict=False) if g is not None}

    def run(self, batch: dict[str, typing.Any], image_rows: Tensor | None) -> None:
        """Load ``batch`` and compute gradients; ``image_rows`` [R, hidden] are the pictures' embeddings."""
        for name in INPUTS:
            self.static[name].copy_(batch[name], non_blocking=True)
        if image_rows is not None:
            with torch.no_grad():
                self.static["image_rows"][: image_rows.shape[0]].copy_(image_rows)
        if self.graph:
            self.graph.replay()
        else:
            self._pass()


def nll(p: model.Params, hidden: Tensor, at: Tensor, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean loss over labels and the share of labels outside prose that are predicted."""
    scores = model.logits(p, hidden.index_select(0, at))
    each = F.cross_entropy(scores, ids, reduction="none")
    firm = (weight >= 1).float()
    right = ((scores.argmax(-1) == ids).float() * firm).sum() / firm.sum()
    return (each * weight).sum() / weight.sum(), right


def trunk_loss(shape: model.Shape, p: model.Params) -> LossFunction:
    """Loss of the whole model except the multi-token-prediction layer."""

    def loss(s: Static) -> tuple[Tensor, Tensor]:
        at = model.make_layout(shape, s["documents"], s["positions"])
        hidden, balance, z, share = model.text_hidden(shape, p, s["ids"], at, s["image_rows"], s["image_at"])
        main, right = nll(p, hidden, s["label_at"], s["label_id"], s["label_weight"])
        metrics = torch.stack([main, right, balance, share.max() * shape.experts, share.min() * shape.experts])
        return main + BALANCE * balance + ROUTER_Z * z, metrics.detach()

    return loss


def mtp_loss(shape: model.Shape, p: model.Params) -> LossFunction:
    """Loss of the multi-token-prediction layer on the frozen trunk."""

    def loss(s: Static) -> tuple[Tensor, Tensor]:
        at = model.make_layout(shape, s["documents"], s["positions"])
        with torch.no_grad():
            hidden, *_ = model.text_hidden(shape, p, s["ids"], at, s["image_rows"], s["image_at"])
        following = s["ids"].flatten().roll(-1)
        drafted, balance, z = model.mtp_hidden(shape, p, hidden, following, at)
        slot = (s["label_at"] - 1).clamp(min=0)
        documents = s["documents"].flatten()
        inside = documents.index_select(0, slot) == documents.index_select(0, s["label_at"])
        main, right = nll(p, drafted, slot, s["label_id"], s["label_weight"] * inside)
        metrics = torch.stack([main, right, balance, balance, balance])
        return main + BALANCE * balance + ROUTER_Z * z, metrics.detach()

    return loss


@torch.no_grad()
def exact_match(
    shape: model.Shape, p: model.Params, batches: list[dict[str, typing.Any]], device: torch.device
) -> tuple[float, dict[str, tuple[float, int]]]:
    """Mean answer loss and, by skill, the share of completions that greedy decoding gets right, and their number.

    One pass suffices: a completion is right exactly when every label is the best-scored token after its prefix.
    """
    hits: dict[str, list[bool]] = collections.defaultdict(list)
    total = labels = 0.0
    for batch in batches:
        s = {name: batch[name].to(device).long() for name in INPUTS if name != "label_weight"}
        rows = torch.zeros(len(s["image_at"]), shape.hidden, device=device)
        if len(batch["pictures"]):
            seen = model.vision_tower(shape, p, batch["pictures"].to(device))
            rows[: len(seen)] = seen
        at = model.make_layout(shape, s["documents"], s["positions"])
        hidden, *_ = model.text_hidden(shape, p, s["ids"], at, rows, s["image_at"])
        scores = model.logits(p, hidden.index_select(0, s["label_at"]))
        right = (scores.argmax(-1) == s["label_id"]).cpu()
        each = F.cross_entropy(scores, s["label_id"], reduction="none").cpu()
        for skill, start, stop in batch["skills"]:
            if skill != "prose":
                hits[skill].append(bool(right[start:stop].all()))
                total += float(each[start:stop].sum())
                labels += stop - start
    table = {skill: (sum(h) / len(h), len(h)) for skill, h in sorted(hits.items())}
    return total / max(labels, 1), table


@dataclasses.dataclass
class Run:
    """What the phases share. ``deadline`` is a time of the monotonic clock at which the main phase is cut short."""

    shape: model.Shape
    params: model.Params
    device: torch.device
    out: Path
    texts: dict[str, str]
    eager: bool
    rank: int = 0
    ranks: int = 1
    deadline: float = float("inf")
    cut: str = ""
    started: float = dataclasses.field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print with the seconds since the start; the first GPU speaks for all."""
        if self.rank == 0:
            print(f"[{time.monotonic() - self.started:7.1f}] {text}", flush=True)

    def save(self, name: str) -> None:
        """Write a checkpoint under ``name``, replacing an older one only when complete."""
        if self.rank:
            return
        fresh, final = self.out / f"{name}.new", self.out / name
        model.save_checkpoint(self.shape, self.params, fresh, self.texts)
        if final.exists():
            final.rename(self.out / f"{name}.old")
        fresh.rename(final)
        for path in (self.out / f"{name}.old").glob("*"):
            path.unlink()
        if (self.out / f"{name}.old").exists():
            (self.out / f"{name}.old").rmdir()

    @torch.no_grad()
    def align(self) -> None:
        """Give every GPU the first one's parameters."""
        if self.ranks > 1:
            for value in self.params.values():
                torch.distributed.broadcast(value, 0)

    def too_late(self) -> bool:
        """Whether the deadline has passed, by the first GPU's clock."""
        late = torch.tensor(float(time.monotonic() > self.deadline), device=self.device)
        if self.ranks > 1:
            torch.distributed.broadcast(late, 0)
        return bool(late)


class Mean:
    """Mean of gradients over the batches of a step and over the GPUs that share them."""

    def __init__(self, names: typing.Iterable[str], params: dict[str, Tensor], run: Run, parts: int) -> None:
        self.params = {name: params[name] for name in names}
        self.run, self.parts = run, parts
        self.total: Tensor | None = None

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Take one batch's gradients."""
        flat = torch.cat([gradients[name].reshape(-1).float() for name in self.params])
        self.total = flat if self.total is None else self.total.add_(flat)

    def take(self) -> dict[str, Tensor]:
        """The mean, and start over."""
        total, self.total = typing.cast(Tensor, self.total), None
        if self.run.ranks > 1:
            torch.distributed.all_reduce(total)
        parts = (total / self.parts).split([value.numel() for value in self.params.values()])
        return {name: part.view_as(self.params[name]) for name, part in zip(self.params, parts, strict=True)}


def warm_up_tower(run: Run, batches: typing.Iterator[tuple[Tensor, Tensor]], steps: int) -> None:
    """Teach the vision tower shapes, colours and places through a linear read-out that is then thrown away."""
    sizes = (len(SHAPES), len(COLORS), 2, 2)
    head = torch.zeros(sum(sizes), run.shape.hidden, device=run.device, requires_grad=True)
    trained = {n: v for n, v in run.params.items() if n.startswith(model.VISION)} | {"read_out.gate.weight": head}
    optimizer = Optimizer(trained)
    seen = 0
    for step, (pictures, labels) in enumerate(batches):
        pictures, labels = pictures.to(run.device, non_blocking=True), labels.to(run.device, non_blocking=True)
        rows = model.vision_tower(run.shape, run.params, pictures).unflatten(0, (len(pictures), -1)).mean(1)
        parts = F.linear(rows, head).split(sizes, -1)
        loss = torch.stack([F.cross_entropy(part, labels[:, i]) for i, part in enumerate(parts)]).sum()
        found = torch.autograd.grad(loss, list(trained.values()))
        falling = min(1.0, (1 - step / steps) * 3 + 0.05)
        optimizer.step(dict(zip(trained, found, strict=True)), min(1.0, (step + 1) / 40) * falling)
        seen += len(pictures)
        if step % 100 == 0:
            right = [round(float((part.argmax(-1) == labels[:, i]).float().mean()), 2) for i, part in enumerate(parts)]
            run.say(f"tower {seen} pictures, loss {float(loss.detach()):.3f}, shape/colour/top/left {right}")
    run.say(f"tower done: {seen} pictures")


def make_steps(run: Run, forms: tuple[Form, ...], trained: dict[str, Tensor], loss: LossFunction) -> dict[Form, Step]:
    """One captured step for each form; they share one memory pool because they never run at the same time."""
    gc.collect()
    torch.cuda.empty_cache()
    pool = torch.cuda.graph_pool_handle() if run.device.type == "cuda" else None
    steps = {}
    for form in forms:
        steps[form] = Step(run.shape, form, trained, loss, run.device, pool, run.eager)
        memory = torch.cuda.memory_reserved() / 1e9 if run.device.type == "cuda" else 0.0
        run.say(f"step of {form.rows} x {form.length} ready, {memory:.0f} GB reserved")
    return steps


def train_trunk(
    run: Run,
    batches: typing.Iterator[dict[str, typing.Any]],
    tests: list[dict[str, typing.Any]],
    forms: tuple[Form, Form],
    plan: Plan,
    rate: float,
) -> None:
    """The main phase, from the fraction ``plan.first`` of the schedule to its end, learning rates times ``rate``."""
    trained = {n: v for n, v in run.params.items() if not n.startswith("mtp.")}
    tower = {n: v for n, v in trained.items() if n.startswith(model.VISION)}
    text = {n: v for n, v in trained.items() if n not in tower}
    steps = make_steps(run, forms, text, trunk_loss(run.shape, run.params))
    optimizer = Optimizer(trained)
    mean = Mean(trained, trained, run, plan.parts)
    good = {n: v.detach().clone() for n, v in trained.items()}
    start = last_log = time.monotonic()
    tokens = logged = 0
    waited = 0.0
    for step in range(plan.steps):
        for _ in range(run.rank, plan.parts, run.ranks):
            asked = time.monotonic()
            batch = next(batches)
            waited += time.monotonic() - asked
            form = batch["form"]
            rows = None
            if len(batch["pictures"]):
                shown = batch["pictures"].to(run.device, non_blocking=True)
                rows = model.vision_tower(run.shape, run.params, shown)
            steps[form].run(batch, None if rows is None else rows.detach())
            gradients = dict(steps[form].gradients)
            seen = steps[form].image_gradient
            if rows is not None and seen is not None:
                found: typing.Sequence[Tensor] = torch.autograd.grad(rows, list(tower.values()), seen[: len(rows)])
            else:
                found = [torch.zeros_like(v) for v in tower.values()]
            mean.add(gradients | dict(zip(tower, found, strict=True)))
        norm = optimizer.step(mean.take(), rate * rate_of(step, plan.fraction(step)))
        tokens += form.tokens * plan.parts
        done = step + 1
        if done % LOG_STEPS == 0 or done in (1, 10):
            loss, right, balance, most, least = steps[form].metrics.tolist()
            now = time.monotonic()
            run.say(
                f"step {done} {plan.fraction(step):.3f} loss {loss:.4f} right {right:.4f} norm {float(norm):.2f} "
                f"balance {balance:.2f} load {least:.2f}-{most:.2f} {tokens / 1e6:.1f} Mtok "
                f"{(tokens - logged) / (now - last_log):.0f} tok/s wait {waited / (now - last_log):.2f}"
            )
            last_log, logged, waited = now, tokens, 0.0
            if not all(bool(v.isfinite().all()) for v in trained.values()):
                run.say("parameters are not finite: back to the last checkpoint")
                with torch.no_grad():
                    for name, value in good.items():
                        trained[name].copy_(value)
                optimizer = Optimizer(trained)
            if run.too_late():
                run.cut = f"the main phase was CUT by the clock at step {done} of {plan.steps}"
                run.say(f"!!! {run.cut}: this is not the checkpoint that the command makes !!!")
                break
        if done % SAVE_STEPS == 0 and done < plan.steps:
            run.align()
            if run.rank == 0:
                report(run, tests, done, tokens)
            run.save("latest")
            good = {n: v.detach().clone() for n, v in trained.items()}
            last_log = time.monotonic()
    run.align()
    if run.rank == 0:
        report(run, tests, done, tokens)
    run.save("latest")
    run.say(f"main phase done: {done} steps, {tokens / 1e6:.1f} M tokens in {time.monotonic() - start:.0f} s")


def report(run: Run, tests: list[dict[str, typing.Any]], step: int, tokens: int) -> None:
    """Print held-out accuracy and append it to log.jsonl."""
    loss, table = exact_match(run.shape, run.params, tests, run.device)
    run.say(f"HELD OUT loss {loss:.4f} " + " ".join(f"{k} {v:.2f}/{n}" for k, (v, n) in table.items()))
    with (run.out / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"step": step, "tokens": tokens, "loss": loss, "exact": table}) + "\n")


def train_mtp(run: Run, batches: typing.Iterator[dict[str, typing.Any]], forms: tuple[Form, Form], plan: Plan) -> None:
    """Train the multi-token-prediction layer; everything else stays as it is."""
    trained = {n: v for n, v in run.params.items() if n.startswith("mtp.")}
    steps = make_steps(run, forms, trained, mtp_loss(run.shape, run.params))
    optimizer = Optimizer(trained)
    mean = Mean(trained, trained, run, plan.parts)
    for step in range(plan.mtp_steps):
        for _ in range(run.rank, plan.parts, run.ranks):
            batch = next(batches)
            form = batch["form"]
            rows = None
            if len(batch["pictures"]):
                with torch.no_grad():
                    shown = batch["pictures"].to(run.device, non_blocking=True)
                    rows = model.vision_tower(run.shape, run.params, shown)
            steps[form].run(batch, rows)
            mean.add(steps[form].gradients)
        falling = min(1.0, (1 - step / plan.mtp_steps) * 2 + 0.02)
        optimizer.step(mean.take(), min(1.0, (step + 1) / 40) * falling)
        if (step + 1) % LOG_STEPS == 0 or step + 1 in (1, 10, plan.mtp_steps):
            loss, right, balance, *_ = steps[form].metrics.tolist()
            run.say(f"mtp step {step + 1} loss {loss:.4f} right {right:.4f} balance {balance:.2f}")
    run.align()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="start from this checkpoint instead of fresh weights")
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps of the main phase")
    parser.add_argument("--parts", type=int, default=2, help="batches that a step is the mean of; GPUs share them")
    parser.add_argument("--first", type=float, default=0.0, help="fraction of the schedule to start at, with --init")
    parser.add_argument("--rate", type=float, default=1.0, help="multiplies the learning rates")
    parser.add_argument("--focus", default="", help="multiply lesson weights, e.g. arithmetic=4,two_things=3")
    parser.add_argument("--short-only", action="store_true", help="no rows of 8,192 tokens")
    parser.add_argument("--tower-steps", type=int, default=1350, help="steps of 256 pictures that warm up the tower")
    parser.add_argument("--mtp-steps", type=int, default=600, help="steps of the multi-token-prediction layer")
    parser.add_argument("--workers", type=int, default=14, help="processes that make the data of one GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide the rows of a batch, for trying on a small machine"
    )
    parser.add_argument("--eager", action="store_true", help="launch kernel by kernel instead of as CUDA graphs")
    parser.add_argument("--preset", choices=sorted(model.PRESETS), default="demo", help="size of the model")
    parser.add_argument(
        "--most-minutes",
        type=float,
        default=float("inf"),
        help="a limit for the end of the main phase that cuts the schedule short, says so, and makes the exit status 3",
    )
    args = parser.parse_args()

    def shrunk(form: Form) -> Form:
        k: int = args.shrink
        return Form(max(1, form.rows // k), form.length, form.labels // k, form.image_rows // k)

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if args.parts % ranks:
        parser.error(f"--parts {args.parts} cannot be shared evenly by {ranks} GPUs")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    forms = (shrunk(data.SHORT), shrunk(data.LONG))
    args.out.mkdir(parents=True, exist_ok=True)
    long_share = (0.0, 0.0, 0.0) if args.short_only else LONG_SHARE
    plan = Plan(args.steps, args.mtp_steps, args.parts, args.seed, args.first, long_share)
    focus = {name: float(value) for name, value in (item.split("=") for item in args.focus.split(",") if item)}
    lessons = Lessons(args.tokenizer, args.corpus, forms, plan, rank, ranks, focus)
    shapes = Shapes(args.seed, 256 // args.shrink, args.tower_steps)
    towers = loader(shapes, max(args.workers - 4, 0), pinned=False) if args.tower_steps else None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the thread that pins batches uses it too
        torch.set_float32_matmul_precision("high")
    batches = loader(lessons, args.workers, pinned=True)  # last, because its thread must not exist at a fork
    tester = data.make_packer(args.tokenizer, args.corpus, 99, test=True)
    tests = []
    for form in [forms[0]] * 10 + [forms[1]] * (0 if args.short_only else 1):
        made = tester.batch(form, 1)
        tests.append({k: torch.from_numpy(v) if hasattr(v, "dtype") else v for k, v in made.items()})

    shape = model.PRESETS[args.preset]
    if ranks > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    params = model.initial_weights(shape, args.seed)
    if args.init:
        params |= model.load_checkpoint(args.init)
    params = {name: value.to(device).requires_grad_() for name, value in params.items()}
    texts = {
        "tokenizer.json": args.tokenizer.read_text(encoding="utf-8"),
        "chat_template.jinja": data.TEMPLATE_PATH.read_text(encoding="utf-8"),
    }
    deadline = time.monotonic() + 60 * args.most_minutes
    run = Run(shape, params, device, args.out, texts, args.eager, rank, ranks, deadline)
    size = sum(v.numel() for v in params.values()) / 1e6
    run.say(f"{size:.2f} M parameters on {ranks} x {device}, torch {torch.__version__}")
    run.say(f"{vars(args)}")
    if towers is not None:
        warm_up_tower(run, towers, args.tower_steps)
    del towers
    run.align()
    train_trunk(run, batches, tests, forms, plan, args.rate)
    if args.mtp_steps:
        train_mtp(run, batches, forms, plan)
    run.save("final")
    run.say(f"DONE, but {run.cut}" if run.cut else "DONE")
    if ranks > 1:
        torch.distributed.destroy_process_group()
    sys.exit(3 if run.cut else 0)


if __name__ == "__main__":
    main()
