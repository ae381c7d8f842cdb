"""The learner: a drafter's float32 masters, their optimiser and their teacher; one step a call.

Auxiliary channels differ in size by a factor of thousands, so fc's input is conditioned: each channel is multiplied by a
power of two near 1/rms, and fc holds the counter-factor. A power of two changes no mantissa, so folding it into fc on export
and back out on import is exact, and the checkpoint's form does not know of it. Drafters that normalise before fc need none.
Knows no ledger, no registry, no clock but for its own speed. Shapes: the legend of runtime/types.py.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model, save
from training.config import TrainerConfig
from training.data.batches import TrainingRow, pack
from training.learning.loss import carrying, chain_loss
from training.learning.optim import Optimizer
from training.learning.target_weights import TargetWeights
from training.learning.teacher import Teacher
from training.learning.ttt import unroll

MAX_SCALE_EXPONENT = 20


@dataclass(frozen=True)
class StepResult:
    """Counts and sums of one optimiser step."""

    step: int
    loss: float
    depth_losses: list[float]  # [L] mean cross-entropy of each depth
    num_supervised: int  # positions
    num_drafted: list[int]  # [L] positions supervised at each depth
    num_accepted: list[int]  # [L] of these, positions whose drafts up to this depth were all right
    num_tokens: int  # context included
    grad_norm: float
    seconds: float


class Learner:
    def __init__(
        self, model: Eagle3Model, scale: torch.Tensor, target: TargetWeights, config: TrainerConfig, learning_rate: float
    ) -> None:
        """model: as it is served, float32; it becomes the learner's own. scale: float32 [3*Ht], powers of two."""
        self._model = _with_factor(model, 1.0 / scale).requires_grad_(True)
        self._scale = scale.to(model.fc.weight.device)
        self._config = config
        self._device = model.fc.weight.device
        self._teacher = Teacher(target.lm_head, model.vocabulary, self._device)
        self._optimizer = Optimizer(
            self._model, learning_rate=learning_rate, warmup_steps=config.warmup_steps, clip_norm=config.clip_norm
        )

    @property
    def num_steps(self) -> int:
        return self._optimizer.num_steps

    @property
    def learning_rate(self) -> float:
        return self._optimizer.learning_rate

    @property
    def vocabulary(self) -> DraftVocabulary:
        return self._model.vocabulary

    def step(self, rows: Sequence[TrainingRow]) -> StepResult:
        """One optimiser step on these rows."""
        started = time.perf_counter()
        batch = pack(rows, self._config.ttt_steps, self._device)
        batch = dataclasses.replace(batch, aux=batch.aux * self._scale)
        carries = carrying(batch.depths, self._teacher.covered(batch), self._config.ttt_steps)
        num_pairs = carries.sum(0).clamp(min=1)  # [L]
        result = chain_loss(
            unroll(self._model, batch),
            self._model.lm_head.weight,
            self._teacher.head,
            batch.last,
            carries,
            self._teacher.draft_labels(batch),
            torch.tensor(self._config.weights_of_depths, device=self._device) / num_pairs,
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = self._optimizer.step()
        return StepResult(
            step=self.num_steps,
            loss=float(result.loss.detach()),
            depth_losses=(result.sums / num_pairs).tolist(),
            num_supervised=batch.num_supervised,
            num_drafted=[int((batch.depths > k).sum()) for k in range(self._config.ttt_steps)],
            num_accepted=result.hits.cumprod(1).sum(0).tolist(),
            num_tokens=sum(row.num_tokens for row in rows),
            grad_norm=grad_norm,
            seconds=time.perf_counter() - started,
        )

    def export(self, directory: Path) -> None:
        """Write the drafter as it is served: the conditioning folded in, bfloat16."""
        save(self.served(), directory)

    def served(self) -> Eagle3Model:
        """A copy of the drafter with the conditioning folded in, float32."""
        return _with_factor(self._model, self._scale).requires_grad_(False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything of a checkpoint that is a tensor."""
        return {
            "scale": self._scale,
            "d2t": self.vocabulary.d2t,
            "t2d": self.vocabulary.t2d,
            **{f"model.{name}": tensor for name, tensor in self._model.state_dict().items()},
            **{f"optimizer.{name}": tensor for name, tensor in self._optimizer.tensors().items()},
        }

    def state(self) -> dict[str, Any]:
        """Everything of a checkpoint that is JSON."""
        return {"eagle3": self._model.config.to_dict(), "num_steps": self.num_steps, "learning_rate": self.learning_rate}

    @staticmethod
    def restore(
        tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], target: TargetWeights, config: TrainerConfig
    ) -> Learner:
        """The inverse of `tensors` and `state`: the same bits, moments included."""
        vocabulary = DraftVocabulary.from_tensors(tensors["d2t"], tensors["t2d"])
        model = Eagle3Model(Eagle3Config.from_dict(state["eagle3"]), vocabulary, target.embedding)
        model.load_state_dict(_under("model.", tensors))
        model = _with_factor(model.to(target.device), tensors["scale"])
        learner = Learner(model, tensors["scale"], target, config, config.learning_rate or state["learning_rate"])
        learner._optimizer.restore(_under("optimizer.", tensors), state["num_steps"])
        return learner


def conditioning(model: Eagle3Model, rows: Sequence[TrainingRow]) -> torch.Tensor:
    """float32 [3*Ht]: per auxiliary channel the power of two nearest to 1 / its root mean square over these rows."""
    width = model.fc.weight.shape[1]
    if model.fc_norm is not None:
        return torch.ones(width)
    squares, count = torch.zeros(width, dtype=torch.float64), 0
    for row in rows:
        squares += row.features.hidden.aux.double().square().sum(0)
        count += len(row.features.hidden)
    exponents = -0.5 * torch.log2(squares / max(count, 1))
    return torch.exp2(exponents.round().clamp(-MAX_SCALE_EXPONENT, MAX_SCALE_EXPONENT)).float()


def _with_factor(model: Eagle3Model, factor: torch.Tensor) -> Eagle3Model:
    """A copy of the model whose fc is multiplied by factor [3*Ht], channel by channel; the embedding is shared."""
    result = copy.deepcopy(model, {id(shared): shared for shared in (model.embedding, model.vocabulary)})
    with torch.no_grad():
        result.fc.weight.mul_(factor.to(result.fc.weight.device))
    return result


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
