"""The optimiser of an open-ended run: AdamW on float32 masters, warm-up and then a constant rate, the global norm clipped.

No weight decay and no decay of the rate: an online run has no end that a schedule could know. Its state goes to and comes
from named tensors, so that a checkpoint needs no pickle.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

BETAS = (0.9, 0.95)


class Optimizer:
    def __init__(self, model: nn.Module, *, learning_rate: float, warmup_steps: int, clip_norm: float) -> None:
        self.learning_rate = learning_rate
        self.num_steps = 0
        self._warmup_steps = warmup_steps
        self._clip_norm = clip_norm
        self._parameters = dict(model.named_parameters())
        self._adamw = torch.optim.AdamW(self._parameters.values(), lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=True)

    def step(self) -> float:
        """Apply and clear the gradients; returns their global norm before clipping. Gradients that are not finite are dropped."""
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate * min(1.0, (self.num_steps + 1) / max(self._warmup_steps, 1))
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm)
        if torch.isfinite(norm):
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.num_steps += 1
        return float(norm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The moments, by parameter and kind; empty before the first step."""
        return {
            f"{name}.{kind}": value
            for name, parameter in self._parameters.items()
            for kind, value in self._adamw.state.get(parameter, {}).items()
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """The inverse of `tensors`."""
        self.num_steps = num_steps
        for name, parameter in self._parameters.items():
            if kinds := {
                kind: tensors[f"{name}.{kind}"] for kind in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{kind}" in tensors
            }:
                self._adamw.state[parameter] = {kind: value.clone().to(parameter.device) for kind, value in kinds.items()}
