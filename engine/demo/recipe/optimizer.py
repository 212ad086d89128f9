"""Muon for the hidden matrices, AdamW for everything else; no step waits for the device."""

import collections
import typing

import torch

Tensor = torch.Tensor

#: Matrices that stay with AdamW: tables, heads, gates and other thin ones.
THIN = ("embed", "lm_head", "conv1d", "gate.weight", "in_proj_a", "in_proj_b")


def orthogonal(gradient: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz approximation of the nearest semi-orthogonal matrices, batched over the first dimension."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.bfloat16() if gradient.is_cuda else gradient
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = (x.mT if tall else x).float()
    return result


class Optimizer:
    """Steps parameters from gradients that are handed in, in the order of ``params``."""

    def __init__(
        self, params: dict[str, Tensor], muon_rate: float = 0.02, adam_rate: float = 3e-3, decay: float = 0.05
    ) -> None:
        self.muon_rate, self.adam_rate, self.decay = muon_rate, adam_rate, decay
        self.params = params
        grouped: dict[tuple[int, ...], list[str]] = collections.defaultdict(list)
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        for name, value in params.items():
            if value.ndim in (2, 3) and not any(part in name for part in THIN):
                grouped[tuple(value.shape)].append(name)
            else:
                (matrices if value.ndim >= 2 and "embed" not in name else vectors).append(value)
        self.groups = list(grouped.values())
        self.momentum = [torch.zeros_like(self._stacked(params, names)) for names in self.groups]
        self.adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=adam_rate,
            betas=(0.9, 0.98),
            eps=1e-9,
            fused=next(iter(params.values())).is_cuda,
        )

    @staticmethod
    def _stacked(values: typing.Mapping[str, Tensor], names: list[str]) -> Tensor:
        return torch.stack([values[name] for name in names]).flatten(0, -3)

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], scale: float, most: float = 1.0) -> Tensor:
        """One step at ``scale`` times the rates with gradients clipped to norm ``most``; returns their norm."""
        values = list(gradients.values())
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
        torch._foreach_mul_(values, (most / (norm + 1e-6)).clamp(max=1.0))
        for names, momentum in zip(self.groups, self.momentum, strict=True):
            gradient = self._stacked(gradients, names)
            momentum.lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95))
            rate = self.muon_rate * scale
            targets = [self.params[name] for name in names]
            update = update.reshape(len(names), *targets[0].shape)
            torch._foreach_mul_(targets, 1 - rate * self.decay)
            gain = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_add_(targets, list(update.unbind()), alpha=-rate * gain)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        for name, value in self.params.items():
            value.grad = gradients[name]
        self.adam.step()
        for value in self.params.values():
            value.grad = None
        return norm
