"""A learner where kernels compute: on a CUDA device; or on a CPU that takes CUDA's branches, with TRITON_INTERPRET=1, which runs
the Triton kernels, and plain PyTorch for flash attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from training.learning import flash, learner, loss, teacher
from training.learning.learner import Learner
from training.learning.start import from_scratch

STEPS = 2


@pytest.fixture
def take_device_branches(
    kernel_device: torch.device, plain_flash: tuple[Callable, Callable], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """From its call on, in the precision of a device."""
    forward, backward = plain_flash

    def widened(function: Callable) -> Callable:
        def call(*given: object) -> tuple[torch.Tensor, ...]:
            wide = [each.float() if isinstance(each, torch.Tensor) else each for each in given]
            first, *others = function(*wide)
            is_backward = function is backward
            return first.bfloat16(), *(each.bfloat16() if is_backward else each for each in others)

        return call

    def take() -> None:
        if kernel_device.type == "cuda":
            return
        for module in (learner, teacher):
            monkeypatch.setattr(module, "compute_dtype", lambda device: torch.bfloat16)
        for module in (loss, teacher):
            monkeypatch.setattr(module, "product", lambda a, b: a.float() @ b.float().T)
        monkeypatch.setattr(flash, "is_usable", lambda q: True)
        monkeypatch.setattr(flash, "varlen_forward", widened(forward))
        monkeypatch.setattr(flash, "varlen_backward", widened(backward))
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))

    return take


def test_steps_are_those_of_a_cpu_but_for_the_precision(
    state, kernel_device: torch.device, take_device_branches: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CUDA_TEACHER_BLOCK", 8)  # several blocks
    config = state.config(trainer__learning_rate=1e-3).trainer
    rows = state.rows(range(2), num_generated=7)
    plain = from_scratch(state.target, config, rows)
    expected = [plain.step(rows) for _ in range(STEPS)]
    there = {name: getattr(state.target, name).to(kernel_device) for name in ("embedding", "lm_head", "final_norm")}
    other = from_scratch(dataclasses.replace(state.target, **there), config, rows)
    assert isinstance(other, Learner)
    take_device_branches()
    got = [other.step(rows) for _ in range(STEPS)]
    for mine, its in zip(got, expected, strict=True):
        assert mine.depth_losses == pytest.approx(its.depth_losses, rel=0.02)
        assert mine.loss == pytest.approx(its.loss, rel=0.02)
        assert mine.grad_norm == pytest.approx(its.grad_norm, rel=0.05)
        assert mine.num_drafted == its.num_drafted
    assert got[0].depth_acceptance == pytest.approx(expected[0].depth_acceptance, rel=0.3)  # of logits far apart, in bfloat16
    assert got[-1].loss < got[0].loss
    monkeypatch.undo()
    for name, weight in plain.served().state_dict().items():
        error = (other.served().state_dict()[name].cpu() - weight).norm()
        assert error < 0.02 * weight.norm(), name
