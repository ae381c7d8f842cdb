"""The learner: a drafter's float32 masters, their optimiser and their teacher; one step a call, alone or as one of several ranks.

A step takes any number of micro-batches on each rank, also none, and is the step that one process would make on all their rows
at once: pairs that carry loss are counted over all of them first, and every gradient is divided by that count.

Auxiliary channels differ in size by a factor of thousands, so fc's input is conditioned: each channel is multiplied by a
power of two near 1/rms, and fc holds the counter-factor. A power of two changes no mantissa, so folding it into fc on export
and back out on import is exact, and the checkpoint's form does not know of it. Drafters that normalise before fc need none.
Knows no ledger, no registry, no clock but for its own speed. Shapes: the legend of runtime/types.py.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model, save
from training.config import TrainerConfig
from training.data.batches import Batch, TrainingRow, pack
from training.learning.distributed import ALONE, World, keeping_gradients, spread, whole
from training.learning.loss import Lesson, LossResult, carrying, chain_loss
from training.learning.objective import Aim
from training.learning.optim import Optimizer
from training.learning.precision import Cast, compute_dtype
from training.learning.target_weights import TargetWeights
from training.learning.teacher import Teacher
from training.learning.ttt import unroll

MAX_SCALE_EXPONENT = 20


@dataclass(frozen=True)
class StepResult:
    """Counts and sums of one optimiser step, over all micro-batches of all ranks."""

    step: int
    loss: float
    depth_losses: list[float]  # [L] mean loss of each depth
    num_supervised: int  # positions
    num_drafted: list[int]  # [L] positions supervised at each depth
    num_accepted: list[int]  # [L] of these, positions whose drafts up to this depth were all right
    num_tokens: int  # context included
    grad_norm: float
    learning_rate: float  # of this step
    seconds: float
    depth_acceptance: list[float] = field(default_factory=list)  # [L] expected of drafts sampled at temperature 1, each by itself


@dataclass(frozen=True)
class Taught:
    """A micro-batch and what the target says about it."""

    batch: Batch
    lesson: Lesson
    carries: torch.Tensor  # bool [P, L] which pairs carry loss


class _Chain(nn.Module):
    """The drafter, unrolled, and its loss: one forward, as distributed modules want it."""

    def __init__(self, model: Eagle3Model, aim: Aim) -> None:
        super().__init__()
        self.model = model
        self._cast = Cast(model)
        self._aim = aim

    def forward(self, taught: Taught | None, pair_weights: torch.Tensor) -> LossResult:
        """The sums of a micro-batch. Without one: a loss of 0, and of every parameter a part."""
        if taught is None:
            nothing = torch.stack([parameter[:0].sum() for parameter in self.model.parameters()]).sum()
            zeros = torch.zeros_like(pair_weights)
            return LossResult(nothing, zeros, zeros, zeros.new_zeros((0, len(zeros)), dtype=torch.bool))
        depths = unroll(self._cast(compute_dtype(pair_weights.device)), taught.batch)
        return chain_loss(depths, self.model.lm_head.weight, taught.lesson, taught.carries, pair_weights, self._aim)


class Learner:
    def __init__(
        self,
        model: Eagle3Model,
        scale: torch.Tensor,
        target: TargetWeights,
        config: TrainerConfig,
        learning_rate: float,
        world: World = ALONE,
        teacher: Teacher | None = None,
    ) -> None:
        """model: as it is served, float32; it becomes the learner's own. scale: float32 [3*Ht], powers of two. teacher: of
        another learner with the same vocabulary. All ranks of the world make theirs at once, alike."""
        self._model = _with_factor(model, 1.0 / scale).requires_grad_(True)
        self._scale = scale.to(model.fc.weight.device)
        self._config = config
        self._device = model.fc.weight.device
        self._world = world
        self.teacher = teacher or Teacher(target.lm_head, model.vocabulary, self._device)
        self._chain = spread(_Chain(self._model, Aim(config.objective, config.lk_eta)), world)
        self._optimizer = Optimizer(
            self._model,
            learning_rate=learning_rate,
            warmup_steps=config.warmup_steps,
            clip_norm=config.clip_norm,
            ema_decay=config.ema_decay,
            schedule=config.schedule,
        )
        self._depth_weights = torch.tensor(config.weights_of_depths, device=self._device)  # [L]
        self._elapsed_s = 0.0  # since the run's first step began, up to the last one's beginning
        self._last_step_at: float | None = None

    @property
    def num_heads(self) -> int:
        return 1

    @property
    def num_steps(self) -> int:
        return self._optimizer.num_steps

    @property
    def learning_rate(self) -> float:
        return self._optimizer.learning_rate

    @property
    def vocabulary(self) -> DraftVocabulary:
        return self._model.vocabulary

    def step(self, *batches: Sequence[TrainingRow], meanwhile: Callable[[], None] = lambda: None) -> StepResult:
        """One optimiser step on the rows of these micro-batches and of those of the other ranks, who call at the same time.
        meanwhile: called when all is launched and nothing known yet; what it launches on the device, nobody here waits for."""
        started = time.perf_counter()
        self._tell_time(started)
        counts = torch.zeros(self._config.ttt_steps, dtype=torch.int64, device=self._device)
        for rows in batches:
            taught = self._pack(rows)
            counts += taught.carries.sum(0)
        num_pairs = self._over_ranks(counts).clamp(min=1)  # [L]
        weights = self._depth_weights / num_pairs
        figures = _Figures(self._config.ttt_steps, self._device)
        with self._world.watching():
            if not batches:
                self._backward(None, weights, is_last=True)
            for number, rows in enumerate(batches, 1):
                if len(batches) > 1:  # one at a time in memory
                    taught = self._pack(rows)
                result = self._backward(taught, weights, is_last=number == len(batches))
                figures.add(result, taught.batch, sum(row.num_tokens for row in rows))
            grad_norm = self._optimizer.step(self._elapsed_s)
        figures.send(num_pairs, grad_norm)
        meanwhile()
        return figures.result(self._world, self._optimizer, started)

    def _tell_time(self, now: float) -> None:
        """Time goes on from where a resumed run left off; ranks go by the first one's."""
        self._elapsed_s += 0.0 if self._last_step_at is None else now - self._last_step_at
        self._last_step_at = now
        if self._config.schedule.time_s is not None:
            self._elapsed_s = self._world.share(self._elapsed_s)

    def _over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on the device. Nobody waits for the device where there is one rank."""
        if self._world.size == 1:
            return counts
        host = counts.cpu()
        self._world.add_up(host)
        return host.to(self._device)

    def _pack(self, rows: Sequence[TrainingRow]) -> Taught:
        batch = pack(rows, self._config.ttt_steps, self._device)
        batch = dataclasses.replace(batch, aux=batch.aux * self._scale.to(batch.aux.dtype))  # a power of two: exact in any
        lesson = self.teacher.lesson(batch)
        return Taught(batch, lesson, carrying(batch.depths, lesson.covered, self._config.ttt_steps))

    def _backward(self, taught: Taught | None, weights: torch.Tensor, *, is_last: bool) -> LossResult:
        """What a forward returns; the gradients are there. Ranks average theirs, where the sum is meant."""
        with keeping_gradients(self._chain, is_last):
            result: LossResult = self._chain(taught, weights)
            (result.loss * self._world.size).backward()  # type: ignore[no-untyped-call]
        return dataclasses.replace(result, loss=result.loss.detach())

    def candidate(self, score: Callable[[Eagle3Model], float | None]) -> Eagle3Model:
        """What to judge: there is one head only, and nothing to compare. Every rank calls."""
        return self.served()

    def export(self, directory: Path) -> None:
        """Write the drafter as it is served: the conditioning folded in, bfloat16."""
        save(self.served(), directory)

    def served(self) -> Eagle3Model:
        """A copy of the drafter with the conditioning folded in, float32; of the average, where one is kept. Every rank calls."""
        model = Eagle3Model(self._model.config, self.vocabulary, self._model.embedding)
        model.load_state_dict(self._optimizer.weights())
        return _with_factor(model.to(self._device), self._scale).requires_grad_(False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything of a checkpoint that is a tensor, whole. Every rank calls."""
        return {
            "scale": self._scale,
            "d2t": self.vocabulary.d2t,
            "t2d": self.vocabulary.t2d,
            **{f"model.{name}": whole(tensor) for name, tensor in self._model.state_dict().items()},
            **{f"optimizer.{name}": tensor for name, tensor in self._optimizer.tensors().items()},
        }

    def state(self) -> dict[str, Any]:
        """Everything of a checkpoint that is JSON."""
        return {
            "eagle3": self._model.config.to_dict(),
            "num_steps": self.num_steps,
            "learning_rate": self.learning_rate,
            "elapsed_s": self._elapsed_s,
        }

    @staticmethod
    def restore(
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        target: TargetWeights,
        config: TrainerConfig,
        world: World = ALONE,
        teacher: Teacher | None = None,
        learning_rate: float | None = None,
    ) -> Learner:
        """The inverse of `tensors` and `state`: the same bits, moments included, on any number of ranks. learning_rate: instead
        of the configured one, or the one it had."""
        vocabulary = DraftVocabulary.from_tensors(tensors["d2t"], tensors["t2d"])
        model = Eagle3Model(Eagle3Config.from_dict(state["eagle3"]), vocabulary, target.embedding)
        model.load_state_dict(under("model.", tensors))
        model = _with_factor(model.to(target.device), tensors["scale"])
        rate = learning_rate or config.learning_rate or state["learning_rate"]
        learner = Learner(model, tensors["scale"], target, config, rate, world, teacher)
        learner._optimizer.restore(under("optimizer.", tensors), state["num_steps"])
        learner._elapsed_s = state.get("elapsed_s", 0.0)
        return learner


class _Figures:
    """Sums of a step, to be added up over ranks at its end."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self._counts = torch.zeros(2 + num_depths, dtype=torch.float64)  # positions, tokens, drafted
        self._loss = torch.zeros(1, dtype=torch.float64, device=device)
        self._depths = torch.zeros(3, num_depths, dtype=torch.float64, device=device)  # losses, expected, accepted

    def add(self, result: LossResult, batch: Batch, num_tokens: int) -> None:
        self._counts += torch.tensor([batch.num_supervised, num_tokens, *batch.pairs.num_drafted])
        self._loss += result.loss
        accepted = result.hits.cumprod(1).sum(0)
        self._depths += torch.stack([each.double() for each in (result.sums, result.expected, accepted)])

    def send(self, num_pairs: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """On their way to the host, behind what was launched so far and before what comes."""
        of_all = [grad_norm.double().view(1), num_pairs.double()]
        self._sent = torch.cat([*of_all, self._loss, self._depths.flatten()]).to("cpu", non_blocking=True)
        self._arrival = torch.cuda.current_stream(self._loss.device).record_event() if self._loss.device.type == "cuda" else None

    def result(self, world: World, optimizer: Optimizer, started: float) -> StepResult:
        """Of what was sent. Here, and nowhere before, the host waits for the device. started: by time.perf_counter."""
        if self._arrival is not None:
            self._arrival.synchronize()
        num_depths = self._depths.shape[1]
        total = torch.cat([self._counts, self._sent[1 + num_depths :]])
        world.add_up(total)
        num_supervised, num_tokens = total[:2].tolist()
        drafted, loss, of_depths = total[2 : 2 + num_depths], total[2 + num_depths], total[3 + num_depths :]
        losses, expected, accepted = of_depths.view_as(self._depths)
        return StepResult(
            step=optimizer.num_steps,
            loss=float(loss),
            depth_losses=(losses / self._sent[1 : 1 + num_depths]).tolist(),
            depth_acceptance=(expected / drafted.clamp(min=1)).tolist(),
            num_supervised=round(num_supervised),
            num_drafted=[round(count) for count in drafted.tolist()],
            num_accepted=[round(count) for count in accepted.tolist()],
            num_tokens=round(num_tokens),
            grad_norm=float(self._sent[0]),
            learning_rate=optimizer.rate,
            seconds=time.perf_counter() - started,
        )


def conditioning(model: Eagle3Model, rows: Sequence[TrainingRow], world: World = ALONE) -> torch.Tensor:
    """float32 [3*Ht]: per auxiliary channel the power of two nearest to 1 / its root mean square over these rows of all ranks."""
    width = model.fc.weight.shape[1]
    if model.fc_norm is not None:
        return torch.ones(width)
    sums = torch.zeros(width + 1, dtype=torch.float64)  # of squares, and the number of positions
    for row in rows:
        sums[:-1] += row.features.hidden.aux.double().square().sum(0).cpu()
        sums[-1] += len(row.features.hidden)
    world.add_up(sums)
    exponents = -0.5 * torch.log2(sums[:-1] / sums[-1].clamp(min=1))
    return torch.exp2(exponents.round().clamp(-MAX_SCALE_EXPONENT, MAX_SCALE_EXPONENT)).float()


def _with_factor(model: Eagle3Model, factor: torch.Tensor) -> Eagle3Model:
    """A copy of the model whose fc is multiplied by factor [3*Ht], channel by channel; the embedding is shared."""
    result = copy.deepcopy(model, {id(shared): shared for shared in (model.embedding, model.vocabulary)})
    with torch.no_grad():
        result.fc.weight.mul_(factor.to(result.fc.weight.device))
    return result


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
