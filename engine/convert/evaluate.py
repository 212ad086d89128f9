"""What a checkpoint lost: perplexity, divergence and agreement against another one, and exact answers by skill."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.convert.corpus import Sample
from engine.convert.forward import Forward
from engine.core import Float32Array

Float64Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class SkillScore:
    """Samples of one skill; `exact`: those whose labels are all the most likely token, which is greedy decoding."""

    samples: int = 0
    exact: int = 0
    reference_exact: int = 0


@dataclass(slots=True)
class Score:
    """Sums over labels. losses in nats; kl: divergence from the reference's distribution to the candidate's. drafts:
    share of drafts that would be accepted, None if that was not asked for or there is no layer that makes them. known:
    samples that the reference gets exactly right, where a loss is one of something that was there."""

    tokens: int = 0
    loss_sum: float = 0.0
    reference_loss_sum: float = 0.0
    kl_sum: float = 0.0
    agreed: int = 0
    skills: dict[str, SkillScore] = field(default_factory=dict)
    known_tokens: int = 0
    known_loss_sum: float = 0.0
    drafts: float | None = None
    reference_drafts: float | None = None

    @property
    def loss(self) -> float:
        """Mean loss of a label."""
        return self.loss_sum / max(self.tokens, 1)

    @property
    def reference_loss(self) -> float:
        """Mean loss of a label under the reference."""
        return self.reference_loss_sum / max(self.tokens, 1)

    @property
    def known_loss(self) -> float:
        """Mean loss of a label in samples that the reference gets exactly right."""
        return self.known_loss_sum / max(self.known_tokens, 1)

    @property
    def kl(self) -> float:
        """Mean divergence of a position."""
        return self.kl_sum / max(self.tokens, 1)

    @property
    def agreement(self) -> float:
        """Share of positions where both find the same token most likely."""
        return self.agreed / max(self.tokens, 1)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "tokens": self.tokens,
            "perplexity": math.exp(self.loss),
            "reference_perplexity": math.exp(self.reference_loss),
            "loss": self.loss,
            "reference_loss": self.reference_loss,
            "known_loss": self.known_loss,
            "kl": self.kl,
            "top1_agreement": self.agreement,
            "draft_acceptance": self.drafts,
            "reference_draft_acceptance": self.reference_drafts,
            "skills": {
                name: {
                    "samples": skill.samples,
                    "exact": skill.exact / skill.samples,
                    "reference_exact": skill.reference_exact / skill.samples,
                }
                for name, skill in sorted(self.skills.items())
            },
        }


def compare(
    samples: Sequence[Sample],
    reference: Iterable[Iterable[Float32Array]],
    candidate: Iterable[Iterable[Float32Array]],
) -> Score:
    """Scores a candidate. reference, candidate: for each sample, the logits [vocab] before each of its labels."""
    score = Score()
    for sample, expected, got in zip(samples, reference, candidate, strict=True):
        exact = reference_exact = True
        before = score.loss_sum
        for label, expected_logits, logits in zip(sample.labels, expected, got, strict=True):
            target, actual = log_softmax(expected_logits), log_softmax(logits)
            score.tokens += 1
            score.loss_sum -= float(actual[label])
            score.reference_loss_sum -= float(target[label])
            score.kl_sum += float(np.exp(target) @ (target - actual))
            best, reference_best = int(logits.argmax()), int(expected_logits.argmax())
            score.agreed += best == reference_best
            exact &= best == label
            reference_exact &= reference_best == label
        skill = score.skills.setdefault(sample.skill, SkillScore())
        skill.samples += 1
        if reference_exact:
            score.known_tokens += len(sample.labels)
            score.known_loss_sum += score.loss_sum - before
        skill.exact += exact
        skill.reference_exact += reference_exact
    return score


def draft_acceptance(model: Forward, samples: Sequence[Sample]) -> float | None:
    """Share of labels where the layer for multi-token prediction, one token early, finds the same token most likely as
    the model itself: how often a greedy decoder would accept its drafts. None without such a layer, or without labels
    that have two tokens before them."""
    mtp = model.mtp()
    if mtp is None:
        return None
    drafts = accepted = 0
    for sample in samples:
        logits = mtp.logits(sample, model.final(sample))
        for label, draft in zip(range(max(sample.first_label, 2), len(sample.token_ids)), logits, strict=True):
            drafts += 1
            accepted += int(draft.argmax()) == int(model.head(label - 1).argmax())
    mtp.close()
    return accepted / drafts if drafts else None


def log_softmax(logits: Float32Array) -> Float64Array:
    """Natural logarithms of the probabilities, float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: Float64Array = shifted - math.log(float(np.exp(shifted).sum()))
    return result


def table(score: Score) -> str:
    """The score as text, one line per number and per skill."""
    lines = [
        f"{score.tokens} tokens",
        f"perplexity      {math.exp(score.loss):10.4f}   reference {math.exp(score.reference_loss):10.4f}",
        f"KL divergence   {score.kl:10.5f} nats",
        f"top-1 agreement {score.agreement:10.2%}",
    ]
    shares = ["-" if share is None else f"{share:.2%}" for share in (score.drafts, score.reference_drafts)]
    if shares != ["-", "-"]:
        lines.append(f"drafts accepted {shares[0]:>10}   reference {shares[1]:>10}")
    if len(score.skills) > 1:
        lines.append(f"{'skill':18} samples  exact  reference")
        lines += [
            f"{name:18} {skill.samples:7}  {skill.exact / skill.samples:5.2f}"
            f"  {skill.reference_exact / skill.samples:9.2f}"
            for name, skill in sorted(score.skills.items())
        ]
    return "\n".join(lines)
