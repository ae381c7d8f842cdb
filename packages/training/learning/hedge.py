"""A hedge against a wrong learning rate: several drafters from one start learn from the same batches, each at its own rate.

The one that drafts best on held-out rows leads: it is the one that is told about, judged and published, until another does
better. Steps cost as many times as much as there are heads, and so do memory and checkpoints; rows are read and taught once.
To a trainer a hedge is a learner like any other (`Learning`); `begin` and `restore` make whichever the settings ask for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from runtime.eagle3 import DraftVocabulary, Eagle3Model
from training.config import TrainerConfig
from training.data.batches import TrainingRow
from training.learning.distributed import ALONE, World
from training.learning.learner import Learner, StepResult, under
from training.learning.target_weights import TargetWeights

SHARED = ("scale", "d2t", "t2d")  # tensors that heads have in common

Score = Callable[[Eagle3Model], float | None]
"""Acceptance length on held-out rows; None while there are too few."""


class Hedge:
    def __init__(self, heads: Sequence[Learner], world: World, leading: int) -> None:
        """heads: of one vocabulary. leading: which of them leads until they are compared."""
        self._heads = list(heads)
        self._world = world
        self.leading = leading

    @property
    def num_heads(self) -> int:
        return len(self._heads)

    @property
    def num_steps(self) -> int:
        return self._leader.num_steps

    @property
    def learning_rate(self) -> float:
        return self._leader.learning_rate

    @property
    def vocabulary(self) -> DraftVocabulary:
        return self._leader.vocabulary

    def step(self, *batches: Sequence[TrainingRow], meanwhile: Callable[[], None] = lambda: None) -> StepResult:
        """One step of each head, as of a learner; figures of the one that leads, seconds of all."""
        *others, last = self._heads
        results = [*(head.step(*batches) for head in others), last.step(*batches, meanwhile=meanwhile)]
        return dataclasses.replace(results[self.leading], seconds=sum(result.seconds for result in results))

    def candidate(self, score: Score) -> Eagle3Model:
        """The best head as it is served, which leads from now on; the one that leads stays if none can be compared. Every rank
        calls, and the first one's scores count."""
        models = [head.served() for head in self._heads]
        if self._world.is_first:
            scores = [score(model) for model in models]
            if None not in scores:
                self.leading = max(range(len(models)), key=lambda i: (_or_worst(scores[i]), i == self.leading))
        self.leading = self._world.share(self.leading)
        return models[self.leading]

    def served(self) -> Eagle3Model:
        return self._leader.served()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Each head's under its number; what they share is copied, as one file does not hold a tensor under two names."""
        return {
            f"head{i}.{name}": each.clone() if name in SHARED else each
            for i, head in enumerate(self._heads)
            for name, each in head.tensors().items()
        }

    def state(self) -> dict[str, Any]:
        return {"heads": [head.state() for head in self._heads], "leading": self.leading}

    @property
    def _leader(self) -> Learner:
        return self._heads[self.leading]


Learning = Learner | Hedge


def begin(
    model: Eagle3Model,
    scale: torch.Tensor,
    target: TargetWeights,
    config: TrainerConfig,
    learning_rate: float,
    world: World = ALONE,
) -> Learning:
    """A learner, or a hedge of them, on this drafter; arguments as of `Learner`."""
    if config.hedge is None:
        return Learner(model, scale, target, config, learning_rate, world)
    heads: list[Learner] = []
    for factor in config.hedge:
        teacher = heads[0].teacher if heads else None
        heads.append(Learner(model, scale, target, config, learning_rate * factor, world, teacher))
    return Hedge(heads, world, leading=_nearest_to_one(config.hedge))


def restore(
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    target: TargetWeights,
    config: TrainerConfig,
    world: World = ALONE,
) -> Learning:
    """What a checkpoint's `tensors` and `state` hold, with config.hedge as it was."""
    if "heads" not in state:
        return Learner.restore(tensors, state, target, config, world)
    heads: list[Learner] = []
    for i, of_head in enumerate(state["heads"]):
        own = under(f"head{i}.", tensors)
        rate = None if config.learning_rate is None or config.hedge is None else config.learning_rate * config.hedge[i]
        teacher = heads[0].teacher if heads else None
        heads.append(Learner.restore(own, of_head, target, config, world, teacher=teacher, learning_rate=rate))
    return Hedge(heads, world, state["leading"])


def _nearest_to_one(factors: Sequence[float]) -> int:
    return min(range(len(factors)), key=lambda i: abs(math.log(factors[i])))


def _or_worst(score: float | None) -> float:
    """A head that drafts nonsense may score what is not a number."""
    return -math.inf if score is None or math.isnan(score) else score
