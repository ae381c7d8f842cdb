"""The moving average of the weights: followed, saved, and what is served where it is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.learning.learner import Learner
from training.learning.optim import Optimizer
from training.learning.start import from_scratch


def make(decay: float | None = 0.5) -> tuple[nn.Linear, Optimizer]:
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3))
    return model, Optimizer(model, learning_rate=0.1, warmup_steps=0, clip_norm=1.0, ema_decay=decay)


def step(model: nn.Linear, optimizer: Optimizer, gradient: float = 1.0) -> None:
    model.weight.grad = torch.full_like(model.weight, gradient)
    optimizer.step()


def test_an_average_follows_the_weights_and_forgets_its_start_soon() -> None:
    model, optimizer = make(decay=0.2)
    expected = model.weight.detach().clone()
    for number in range(5):
        step(model, optimizer)
        decay = min(0.2, (1 + number) / (10 + number))  # 1/10, 2/11, then 0.2
        expected = decay * expected + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(optimizer.weights()["weight"], expected)
    assert not torch.allclose(expected, model.weight)


def test_without_an_average_the_weights_themselves_are_served() -> None:
    model, optimizer = make(decay=None)
    step(model, optimizer)
    assert torch.equal(optimizer.weights()["weight"], model.weight)
    assert sorted(optimizer.tensors()) == ["weight.exp_avg", "weight.exp_avg_sq", "weight.step"]


def test_gradients_that_are_not_finite_leave_the_average_alone() -> None:
    model, optimizer = make()
    step(model, optimizer)
    before = optimizer.weights()["weight"].clone()
    step(model, optimizer, float("nan"))
    assert torch.equal(optimizer.weights()["weight"], before)


def test_an_average_resumes_and_one_that_is_new_begins_with_the_weights() -> None:
    model, optimizer = make()
    for _ in range(3):
        step(model, optimizer)
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    again, resumed = make()
    again.load_state_dict(model.state_dict())
    resumed.restore(saved, 3)
    for each, its in ((model, optimizer), (again, resumed)):
        step(each, its)
    assert all(torch.equal(resumed.tensors()[name], tensor) for name, tensor in optimizer.tensors().items())
    fresh, late = make()
    late.restore({name: tensor for name, tensor in saved.items() if not name.endswith("average")}, 3)
    assert torch.equal(late.weights()["weight"], fresh.weight)


def test_what_is_served_of_a_learner_is_its_average(state) -> None:
    config = state.config(trainer__ema_decay=0.9, trainer__learning_rate=3e-3).trainer
    learner = from_scratch(state.target, config, state.rows(range(4)))
    plain = from_scratch(state.target, state.config(trainer__learning_rate=3e-3).trainer, state.rows(range(4)))
    for _ in range(12):
        assert learner.step(state.rows(range(4))).loss == plain.step(state.rows(range(4))).loss
    served, last = learner.served().lm_head.weight, plain.served().lm_head.weight
    assert float((served - last).abs().max()) > 1e-4
    again = Learner.restore(learner.tensors(), learner.state(), state.target, config)
    assert torch.equal(again.served().lm_head.weight, served)
    assert float((served - last).abs().mean()) == pytest.approx(0.0, abs=3e-2)
