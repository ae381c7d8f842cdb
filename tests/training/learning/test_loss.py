"""The loss of a batch: how much of it ever exists at a time, in which precision, and that nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.eagle3 import DraftVocabulary, Eagle3Model
from training.config import Objective
from training.data.batches import Batch, TrainingRow, pack
from training.learning import flash
from training.learning import loss as loss_module
from training.learning.loss import LossResult, carrying, chain_loss
from training.learning.objective import Aim
from training.learning.optim import Optimizer
from training.learning.precision import Cast
from training.learning.teacher import Teacher
from training.learning.ttt import unroll

L = 4
ASKING = {  # what makes the host wait for a device: values, and shapes that depend on values
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.bincount.default,
    torch.ops.aten._unique2.default,
}


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.elements = max(self.elements, *(each.untyped_storage().nbytes() // each.element_size() for each in made), 0)
        return result


class AsksNothing(TorchDispatchMode):
    """Fails on an operation that would make the host wait, were the tensors on a device."""

    is_on_host = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = function is torch.ops.aten.index.Tensor and any(
            each is not None and each.dtype is torch.bool for each in args[1]
        )
        assert self.is_on_host or not (by_mask or function in ASKING), f"{function} asks the device"
        return function(*args, **(kwargs or {}))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        self.is_on_host = True
        yield
        self.is_on_host = False


def loss_of(
    model: Eagle3Model, batch: Batch, lm_head: torch.Tensor, objective: Objective = Objective.CROSS_ENTROPY
) -> LossResult:
    lesson = Teacher(lm_head, model.vocabulary, torch.device("cpu")).lesson(batch)
    carries = carrying(batch.depths, lesson.covered, L)
    return chain_loss(unroll(model, batch), model.lm_head.weight, lesson, carries, torch.ones(L), Aim(objective))


@pytest.fixture
def large(
    make_model: Callable, make_row: Callable, monkeypatch: pytest.MonkeyPatch
) -> tuple[Eagle3Model, list[TrainingRow], torch.Tensor]:
    """A model with vocabularies far larger than everything else of a batch, and small chunks."""
    for name, value in (("VOCABULARY_CHUNK", 512), ("ROW_CHUNK", 32)):
        monkeypatch.setattr(f"training.learning.teacher.{name}", value)
    monkeypatch.setattr(loss_module, "TEACHER_BLOCK", 8)
    model = make_model(dtype=torch.float32, vocab_size=40, draft_vocab_size=24)
    num_tokens, num_draft = 8192, 2048
    vocabulary = DraftVocabulary(torch.arange(0, num_tokens, num_tokens // num_draft), num_tokens)
    model.vocabulary, model.lm_head = vocabulary, torch.nn.Linear(16, num_draft, bias=False)
    lm_head = torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(1))
    return model, [make_row("pp" + "g" * 120, seed) for seed in range(2)], lm_head


def test_no_tensor_is_as_large_as_positions_times_vocabulary(large) -> None:
    model, rows, lm_head = large
    batch = pack(rows, L)
    with Largest() as largest:
        loss_of(model, batch, lm_head).loss.backward()
    positions, pairs = batch.num_supervised, int(batch.depths.clamp(max=L).sum())
    assert largest.elements < positions * len(lm_head) / 10
    assert largest.elements < pairs * model.lm_head.out_features / 10
    assert largest.elements <= max(lm_head.numel(), 32 * 512, 8 * L * model.lm_head.out_features)


def test_a_step_asks_the_device_nothing(
    make_model: Callable, make_row: Callable, plain_flash: tuple[Callable, Callable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along the branches that CUDA takes, with plain PyTorch where kernels would run, no operation has a shape that depends on
    values, or reads one. What lies on the CPU by itself may be looked at."""
    guard = AsksNothing()

    def unseen(function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            with guard.on_host():
                return function(*arguments)

        return call

    monkeypatch.setattr(flash, "is_usable", lambda q: True)
    for name, function in zip(("varlen_forward", "varlen_backward"), plain_flash, strict=True):
        monkeypatch.setattr(flash, name, unseen(function))
    monkeypatch.setattr(loss_module, "visits_all_pairs", lambda states: True)
    model, fresh = (make_model(dtype=torch.float32) for _ in range(2))
    batch = pack([make_row("ppgggggpppgggg", 0), make_row("ppp", 1), make_row("pgggggg", 2)], L)
    lm_head = torch.randn(40, 16, generator=torch.Generator().manual_seed(7))
    teacher = Teacher(lm_head, model.vocabulary, torch.device("cpu"))
    with guard:
        lesson = teacher.lesson(batch)
        carries = carrying(batch.depths, lesson.covered, L)
        depths = unroll(Cast(model)(torch.bfloat16), batch)
        result = chain_loss(depths, model.lm_head.weight, lesson, carries, torch.ones(L), Aim())
        result.loss.backward()
        norm = Optimizer(model, learning_rate=1e-3, warmup_steps=0, clip_norm=1.0).step()
    assert float(norm) > 0.0
    assert result.hits.shape == (batch.num_supervised, L)
    monkeypatch.undo()
    assert float(result.loss.detach()) == pytest.approx(float(loss_of(fresh, batch, lm_head).loss.detach()), rel=0.02)


@pytest.mark.parametrize("objective", list(Objective))
def test_bfloat16_layers_lead_to_float32_masters(make_model: Callable, make_row: Callable, objective: Objective) -> None:
    rows = [make_row("pp" + "g" * 30, seed) for seed in range(4)]
    lm_head = torch.randn(40, 16, generator=torch.Generator().manual_seed(7))
    model, batch = make_model(dtype=torch.float32), pack(rows, L)
    loss_of(model, batch, lm_head, objective).loss.backward()
    exact = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    lesson = Teacher(lm_head, model.vocabulary, torch.device("cpu")).lesson(batch)
    carries = carrying(batch.depths, lesson.covered, L)
    light = Cast(model)(torch.bfloat16)
    assert light.fc.weight.dtype is torch.bfloat16
    assert light.embedding is model.embedding
    assert light.rotary is model.rotary  # what it moved to a device stays there
    chain_loss(unroll(light, batch), model.lm_head.weight, lesson, carries, torch.ones(L), Aim(objective)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype is torch.float32
        assert (parameter.grad - exact[name]).norm() < 0.1 * exact[name].norm(), name
    assert Cast(model)(torch.float32) is model


def test_expected_acceptance_is_summed_where_pairs_carry_loss(make_model: Callable, make_row: Callable) -> None:
    """Of the target's true distribution: what lies outside the draft vocabulary cannot be accepted."""
    model, batch = make_model(dtype=torch.float32), pack([make_row("pp" + "g" * 30, seed) for seed in range(3)], L)
    lm_head = torch.randn(40, 16, generator=torch.Generator().manual_seed(7))
    result = loss_of(model, batch, lm_head)
    true = (batch.last @ lm_head.T).softmax(-1)[:, model.vocabulary.target_ids]
    can_draft = model.vocabulary.t2d[(batch.last @ lm_head.T).argmax(-1)]
    for k, depth in enumerate(unroll(model, batch)):
        alphas = torch.minimum(true[depth.rows + k], (depth.states @ model.lm_head.weight.T).softmax(-1)).sum(-1)
        expected = alphas[can_draft[depth.rows + k]].sum()
        assert float(result.expected[k].detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_a_model_is_cast_anew_at_each_call(make_model: Callable) -> None:
    model = make_model(dtype=torch.float32)
    cast = Cast(model)
    before = cast(torch.bfloat16).fc.weight
    with torch.no_grad():
        model.fc.weight.mul_(2.0)
    after = cast(torch.bfloat16).fc.weight
    assert torch.equal(after, 2 * before)
    after.sum().backward()
    assert torch.equal(model.fc.weight.grad, torch.ones_like(model.fc.weight))
    assert model.norm.weight.grad is None
