"""The optimiser: AdamW on float32 masters without weight decay, at the rate of a schedule, the global norm clipped.

A moving average of the weights can be kept beside them. State goes to and comes from named, whole tensors, so that a checkpoint
needs no pickle and does not know how many processes wrote it; each of them steps its own shards, if the parameters lie in
shards. The optimiser of PyTorch is its function, not its class, whose step asks the driver for its devices each time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim.adamw import adamw

from training.learning.distributed import sharded_like, whole
from training.learning.schedule import ScheduleConfig

BETAS = (0.9, 0.95)
EPSILON = 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "average"


class Optimizer:
    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        warmup_steps: int,
        clip_norm: float,
        ema_decay: float | None = None,
        schedule: ScheduleConfig | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.num_steps = 0
        self._warmup_steps = warmup_steps
        self._schedule = schedule or ScheduleConfig()
        self._clip_norm = clip_norm
        self._ema_decay = ema_decay
        self._parameters = dict(model.named_parameters())
        self._moments: dict[str, dict[str, torch.Tensor]] = {}  # by parameter; none before the first step
        self._average = {} if ema_decay is None else {name: each.detach().clone() for name, each in self._parameters.items()}
        self.rate = learning_rate  # of the step made last

    @torch.no_grad()
    def step(self, elapsed_s: float = 0.0) -> torch.Tensor:
        """Apply and clear the gradients; returns their global norm before clipping, over all shards: a scalar on the device,
        which nobody here waits for. Gradients that are not finite are dropped."""
        self.rate = self.learning_rate * self._schedule.factor(self.num_steps, elapsed_s, self._warmup_steps)
        norm = whole(nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm))
        is_dropped = (~torch.isfinite(norm)).float()
        given = {name: parameter for name, parameter in self._parameters.items() if parameter.grad is not None}
        for name, parameter in given.items():
            if name not in self._moments:
                moments = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
                self._moments[name] = {"step": torch.zeros((), device=parameter.device), **moments}
        adamw(
            list(given.values()),
            [parameter.grad for parameter in given.values() if parameter.grad is not None],
            [self._moments[name]["exp_avg"] for name in given],
            [self._moments[name]["exp_avg_sq"] for name in given],
            [],
            [self._moments[name]["step"] for name in given],
            fused=True,
            found_inf=is_dropped,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=self.rate,
            weight_decay=0.0,
            eps=EPSILON,
            maximize=False,
        )
        if self._ema_decay is not None and not is_dropped:
            self._follow(self._ema_decay)
        for parameter in given.values():
            parameter.grad = None
        self.num_steps += 1
        return norm

    def _follow(self, longest: float) -> None:
        """average = d * average + (1 - d) * weights; d is smaller in the first steps, so that the start is soon forgotten."""
        decay = min(longest, (1 + self.num_steps) / (10 + self.num_steps))
        weights = [parameter.detach() for parameter in self._parameters.values()]
        torch._foreach_lerp_(list(self._average.values()), weights, 1 - decay)

    def weights(self) -> dict[str, torch.Tensor]:
        """What to judge and serve, whole: the average where one is kept, else the parameters themselves. Every rank calls."""
        return {name: whole(each.detach()) for name, each in (self._average or self._parameters).items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The moments, by parameter and kind, whole, and the average; no moments before the first step. Every rank calls."""
        moments = {f"{name}.{kind}": whole(value) for name, of in self._moments.items() for kind, value in of.items()}
        return moments | {f"{name}.{AVERAGE}": whole(each) for name, each in self._average.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """The inverse of `tensors`. An average that is kept now and was not before begins with the weights as they are."""
        self.num_steps = num_steps
        for name, parameter in self._parameters.items():
            if f"{name}.step" in tensors:
                moments = {kind: sharded_like(tensors[f"{name}.{kind}"], parameter) for kind in MOMENTS}
                self._moments[name] = {"step": tensors[f"{name}.step"].clone().to(parameter.device), **moments}
            if self._average and f"{name}.{AVERAGE}" in tensors:
                self._average[name] = sharded_like(tensors[f"{name}.{AVERAGE}"], parameter)
