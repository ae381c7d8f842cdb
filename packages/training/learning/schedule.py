"""The learning rate over a run: a warm-up, then constant, or down along a cosine to the end that the settings name.

An online run has no end that a schedule could know, so constant is the default. A run with an end names it in steps, or in
seconds of wall time since the run's first step, which makes runs of different speed comparable; time counts on over a resume.
Knows no optimiser and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.config import Choice, require


class ScheduleKind(Choice):
    CONSTANT = "constant"
    COSINE = "cosine"


@dataclass
class ScheduleConfig:
    kind: ScheduleKind = ScheduleKind.CONSTANT
    steps: int | None = None  # cosine: where it ends, in steps,
    time_s: float | None = None  # or in seconds since the run's first step
    warmup: float | None = None  # cosine: share of the length; null: trainer.warmup_steps
    final: float = 0.02  # cosine: share of the learning rate that is left at the end, and after it

    def __post_init__(self) -> None:
        ok = self.steps is None or self.steps >= 1
        require(ok, "trainer.schedule.steps", self.steps, "at least 1, or null")
        ok = self.time_s is None or 0.0 < self.time_s < float("inf")
        require(ok, "trainer.schedule.time_s", self.time_s, "more than 0 seconds, or null")
        ok = self.warmup is None or 0.0 <= self.warmup < 1.0
        require(ok, "trainer.schedule.warmup", self.warmup, "at least 0 and below 1, or null")
        require(0.0 <= self.final <= 1.0, "trainer.schedule.final", self.final, "between 0 and 1")
        num_ends = (self.steps is not None) + (self.time_s is not None)
        ok = num_ends == (1 if self.kind is ScheduleKind.COSINE else 0)
        expected = "cosine with one of trainer.schedule.steps and trainer.schedule.time_s, or constant with neither"
        require(ok, "trainer.schedule.kind", self.kind.value, expected)

    def factor(self, step: int, elapsed_s: float, warmup_steps: int) -> float:
        """What the learning rate is multiplied by in a step, counted from 0, so long after the run's first one began."""
        ramp = (step + 1) / max(warmup_steps, 1)
        if self.kind is ScheduleKind.CONSTANT:
            return min(1.0, ramp)
        done = step / self.steps if self.steps else elapsed_s / (self.time_s or 1.0)
        if self.warmup is not None:
            ramp = (done + (1 / self.steps if self.steps else 0.0)) / self.warmup if self.warmup else 1.0
        return min(1.0, ramp) * (self.final + (1 - self.final) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)
