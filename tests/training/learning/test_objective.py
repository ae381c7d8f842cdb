"""The three objectives against their formulas, differentiated by autograd and by finite differences."""

from __future__ import annotations

import pytest
import torch

from training.config import Objective
from training.learning.objective import Aim, pair_gradients

VD, OUTSIDE = 12, 5  # tokens in the draft vocabulary, and others


def case(num_pairs: int = 7, num_rows: int = 4, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(draft logits [n, Vd], target logits over everything [m, Vd + outside], which row teaches each pair [n])."""
    generator = torch.Generator().manual_seed(num_pairs)
    logits, targets = (
        scale * torch.randn(n, width, generator=generator, dtype=torch.float64)
        for n, width in ((num_pairs, VD), (num_rows, VD + OUTSIDE))
    )
    return logits, targets, torch.randint(num_rows, (num_pairs,), generator=generator)


def formula(logits: torch.Tensor, targets: torch.Tensor, at: torch.Tensor, aim: Aim) -> torch.Tensor:
    """The loss of each pair, as the papers write it."""
    p, r = targets[:, :VD].softmax(-1)[at], targets.softmax(-1)[at, :VD]
    q = logits.softmax(-1)
    alpha = torch.minimum(r, q).sum(-1)
    entropy = -(p * q.log()).sum(-1)
    if aim.objective is Objective.CROSS_ENTROPY:
        return entropy
    if aim.objective is Objective.LK_ALPHA:
        return -alpha.log()
    weight = torch.exp(-aim.eta * alpha).detach()
    return weight * (entropy + (p * p.log()).sum(-1)) + (1 - weight) * (1 - alpha)


def ours(
    logits: torch.Tensor, targets: torch.Tensor, at: torch.Tensor, aim: Aim
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    gradient, figures = pair_gradients(logits.clone(), targets[:, :VD].clone(), at, targets.logsumexp(-1), aim)
    return gradient, figures.losses, figures.alphas, figures.drafts


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_losses_and_gradients_are_those_of_the_formula(objective: Objective, scale: float) -> None:
    logits, targets, at = case(scale=scale)
    logits.requires_grad_()
    aim = Aim(objective, eta=1.7)
    expected = formula(logits, targets, at, aim)
    expected.sum().backward()
    gradient, losses, alphas, drafts = ours(logits.detach(), targets, at, aim)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, logits.grad, rtol=0, atol=1e-10)
    assert torch.equal(drafts, logits.argmax(-1))
    accepted = torch.minimum(targets.softmax(-1)[at, :VD], logits.detach().softmax(-1)).sum(-1)
    torch.testing.assert_close(alphas, accepted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", [Objective.CROSS_ENTROPY, Objective.LK_ALPHA])
def test_gradients_are_those_of_finite_differences(objective: Objective) -> None:
    """The third holds its weight constant, so differences of its value are not its gradient."""
    logits, targets, at = case(num_pairs=3)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits: torch.Tensor) -> torch.Tensor:
            gradient, losses, _, _ = ours(logits, targets, at, Aim(objective))
            ctx.save_for_backward(gradient)
            return losses

        @staticmethod
        def backward(ctx, d_losses: torch.Tensor) -> torch.Tensor:
            return ctx.saved_tensors[0] * d_losses[:, None]

    assert torch.autograd.gradcheck(Loss.apply, logits.requires_grad_())


def test_acceptance_is_what_a_lossless_verifier_accepts() -> None:
    """Draw from q, accept with min(1, r/q): the share is alpha, whatever lies outside the draft vocabulary."""
    logits, targets, at = case(num_pairs=1)
    alpha = float(ours(logits, targets, at, Aim())[2])
    q, r = logits[0].softmax(-1), targets.softmax(-1)[at[0], :VD]
    generator = torch.Generator().manual_seed(1)
    drawn = torch.multinomial(q, 1_000_000, replacement=True, generator=generator)
    accepted = torch.rand(len(drawn), generator=generator, dtype=torch.float64) < (r / q)[drawn]
    assert float(accepted.double().mean()) == pytest.approx(alpha, abs=4 * 0.5 / 1000)


def test_a_drafter_equal_to_the_target_is_not_moved_by_divergence_and_accepted_up_to_what_it_can_reach() -> None:
    _, targets, at = case()
    logits = targets[at, :VD]
    reach = targets.softmax(-1)[at, :VD].sum(-1)
    gradient, _, alphas, _ = ours(logits, targets, at, Aim())
    torch.testing.assert_close(alphas, reach, rtol=0, atol=1e-12)
    assert gradient.abs().max() < 1e-12
    assert ours(logits, targets, at, Aim(Objective.LK_BLEND, eta=0.0))[1].abs().max() < 1e-12  # all KL


@pytest.mark.parametrize("objective", list(Objective))
def test_distributions_that_hardly_overlap_have_finite_bounded_gradients(objective: Objective) -> None:
    """Single precision, logits hundreds apart: where -log alpha has no value left, its gradient still points somewhere finite."""
    targets, logits = torch.full((1, VD), -300.0), torch.full((1, VD), -300.0)
    targets[0, 0], logits[0, 1] = 0.0, 0.0
    gradient, figures = pair_gradients(
        logits, targets.clone(), torch.zeros(1, dtype=torch.int64), targets.logsumexp(-1), Aim(objective)
    )
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() <= 1.0 + 1e-6
    assert torch.isfinite(figures.losses).all()
