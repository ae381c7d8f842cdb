"""The kernel against the same in plain PyTorch. Triton's interpreter runs it on any machine: TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from training.config import Objective
from training.data.batches import pack
from training.learning import loss as loss_module
from training.learning.loss import carrying, chain_loss
from training.learning.objective import Aim, PairFigures, pair_gradients
from training.learning.ttt import unroll


def no_figures(count: int, device: torch.device) -> PairFigures:
    losses, alphas = (torch.full((count,), float("nan"), device=device) for _ in range(2))
    return PairFigures(losses, alphas, torch.full((count,), -1, device=device))


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize(("width", "block"), [(24, 4096), (100, 32), (128, 64)])
def test_kernel_agrees_with_plain_pytorch(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, objective: Objective, width: int, block: int
) -> None:
    from training.learning import head_kernel

    monkeypatch.setattr(head_kernel, "BLOCK", block)
    generator = torch.Generator().manual_seed(width)
    logits, targets = (3 * torch.randn(n, width, generator=generator) for n in (9, 5))
    at, log_z = torch.randint(5, (9,), generator=generator), targets.logsumexp(-1) + torch.rand(5, generator=generator)
    aim = Aim(objective, eta=2.0)
    expected, figures = pair_gradients(logits.clone(), targets.clone(), at, log_z, aim)
    arguments = [each.to(kernel_device) for each in (targets, at, log_z)]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        given = logits.clone().to(kernel_device)
        got = no_figures(9, kernel_device)
        gradient = head_kernel.pair_gradients(given, *arguments, aim, dtype, got)
        assert gradient.dtype is dtype
        assert (gradient.data_ptr() == given.data_ptr()) == (dtype is torch.float32)  # in place where it fits
        torch.testing.assert_close(gradient.float().cpu(), expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(got.losses.cpu(), figures.losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.alphas.cpu(), figures.alphas, rtol=1e-5, atol=1e-5)
        assert torch.equal(got.drafts.cpu(), figures.drafts)


def test_a_tie_goes_to_the_lowest_id(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.learning import head_kernel

    monkeypatch.setattr(head_kernel, "BLOCK", 16)
    logits = torch.zeros(3, 40, device=kernel_device)
    logits[1, [20, 35]] = 1.0
    logits[2, [3, 20]] = 1.0
    zeros = torch.zeros(3, dtype=torch.int64, device=kernel_device)
    targets = torch.zeros(1, 40, device=kernel_device)
    figures = no_figures(3, kernel_device)
    head_kernel.pair_gradients(logits, targets, zeros, targets.logsumexp(-1), Aim(), torch.float32, figures)
    assert figures.drafts.tolist() == [0, 20, 3]


@pytest.mark.parametrize("objective", list(Objective))
def test_a_batch_loses_the_same_by_the_kernel(
    make_model: Callable,
    make_row: Callable,
    make_lesson: Callable,
    kernel_device: torch.device,
    monkeypatch,
    objective: Objective,
) -> None:
    """Through the whole loss, as CUDA takes it: pairs without loss are visited too, and weigh nothing."""
    from training.learning import head_kernel

    def there(*arguments: object) -> torch.Tensor:
        *given, figures, n = arguments
        moved = [each.to(kernel_device) if isinstance(each, torch.Tensor) else each for each in given]
        found = no_figures(len(moved[0]), kernel_device)
        gradient = head_kernel.pair_gradients(*moved, found)
        for name in ("losses", "alphas", "drafts"):
            getattr(figures, name)[n] = getattr(found, name).cpu()
        return gradient.cpu()

    rows = [make_row("ppgggggpppgggg", 0), make_row("pggggggg", 1), make_row("ppp", 2)]
    results = []
    for by_kernel in (False, True):
        if by_kernel:
            monkeypatch.setattr(loss_module, "_pair_gradients", there)
            monkeypatch.setattr(loss_module, "visits_all_pairs", lambda states: True)
        model = make_model(dtype=torch.float32)
        batch = pack(rows, 3)
        lesson = make_lesson(model, batch)
        carries = carrying(batch.depths, lesson.covered, 3)
        assert 0 < carries.sum() < len(batch.depths) * 3
        depths = unroll(model, batch)
        result = chain_loss(depths, model.lm_head.weight, lesson, carries, torch.tensor([0.5, 0.3, 0.2]), Aim(objective))
        result.loss.backward()
        results.append((result, model.fc.weight.grad, model.lm_head.weight.grad))
    (expected, *gradients), (got, *other) = results
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.sums, expected.sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.expected, expected.expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.hits, expected.hits)
    torch.testing.assert_close(other, gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "width", "block"), [(9, 24, 4096), (5, 100, 32), (1, 128, 64)])
def test_the_target_s_head_is_read_some_rows_at_a_time(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int, width: int, block: int
) -> None:
    from training.learning import head_kernel, teacher

    monkeypatch.setattr(head_kernel, "BLOCK", block)
    monkeypatch.setattr(teacher, "CUDA_LOGITS", 2 * width)
    generator = torch.Generator().manual_seed(width)
    states, lm_head = (3 * torch.randn(n, 16, generator=generator) for n in (rows, width))
    ids, log_z = teacher.read_at_once(states.to(kernel_device), lm_head.to(kernel_device))
    logits = states @ lm_head.T
    assert torch.equal(ids.cpu(), logits.argmax(-1))
    torch.testing.assert_close(log_z.cpu(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
