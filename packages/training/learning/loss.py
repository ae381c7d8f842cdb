"""The loss of a batch over all depths, against the target and restricted to the draft vocabulary, fused with both heads.

The teacher of (p, k) is head_d(last[p+1+k]), head_d the frozen target head's rows of the draft vocabulary; what is minimised
against it says learning/objective.py. Positions whose greedy target token lies outside the draft vocabulary carry no loss. What
is returned are sums and counts: whoever adds up micro-batches and ranks knows the number of pairs of each depth beforehand
(`carrying`), and hands in what a pair of depth k weighs, so padding, prompt length, and the cut into rows, micro-batches and
ranks change nothing.

Logits of either head exist only for one block of teacher rows at a time: pairs are visited in the order of their teacher, the
gradient is formed in the forward, and no [N, Vd] tensor survives. On CUDA one kernel turns logits into the gradient, all pairs
are visited and those without loss weigh nothing: nothing there asks the device how many they are. Shapes: the legend of
runtime/types.py; N pairs (p, k) that are supervised, P supervised positions, n pairs of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training.learning.objective import Aim, PairFigures, pair_gradients
from training.learning.pairs import Pairs
from training.learning.precision import product

TEACHER_BLOCK = 64  # teacher rows at a time; times L pairs, it keeps a block of logits in the cache of a core
CUDA_TEACHER_BLOCK = (
    1024  # there it bounds memory: 1024 rows, 6 depths and 16384 draft tokens make 0.6 GiB of logits and gradients
)


@dataclass(frozen=True)
class Depth:
    """One depth of the training-time test over a batch."""

    states: torch.Tensor  # [P_k, H] after the final norm
    rows: torch.Tensor  # int64 [P_k] which of the batch's supervised positions, ascending


@dataclass(frozen=True)
class Lesson:
    """What the target says at the supervised positions of a batch. Depth k of position i is taught by position i + k."""

    head: torch.Tensor  # [Vd, Ht] the target's rows of the draft vocabulary
    last: torch.Tensor  # [P, Ht] teacher states of depth 0
    log_z: torch.Tensor  # [P] logsumexp of their logits over the whole vocabulary
    covered: torch.Tensor  # bool [P] the greedy token of that teacher lies in the draft vocabulary
    labels: torch.Tensor  # int64 [P, L] x[p+2+k] as a draft id, -1 outside or not supervised
    pairs: Pairs


@dataclass(frozen=True)
class LossResult:
    """Sums over the pairs of one batch. Only `loss` has a gradient."""

    loss: torch.Tensor  # scalar: sum of pair_weights[k] * loss of the pair (p, k)
    sums: torch.Tensor  # [L] sum of the losses of each depth, not weighted
    expected: torch.Tensor  # [L] sum of the expected acceptance of drafts sampled at temperature 1, where pairs carry loss
    hits: torch.Tensor  # bool [P, L] greedy draft (p, k) equals x[p+2+k]; false where the target's greedy token is out of reach


def carrying(depths: torch.Tensor, covered: torch.Tensor, num_depths: int) -> torch.Tensor:
    """bool [P, L]: which pairs carry loss. Their number per depth, summed over micro-batches and ranks, divides that depth.

    depths: int64 [P] supervised depths of each position. covered: bool [P], the greedy token of the position's own teacher lies
    in the draft vocabulary; depth k of row i is taught by row i + k.
    """
    at = torch.arange(len(depths), device=depths.device)[:, None] + torch.arange(num_depths, device=depths.device)  # [P, L]
    is_supervised = depths[:, None] > torch.arange(num_depths, device=depths.device)
    return is_supervised & covered[at.clamp(max=max(len(covered) - 1, 0))] if len(depths) else is_supervised


def chain_loss(
    depths: Sequence[Depth],
    head: torch.Tensor,  # [Vd, H] the drafter's, in its own precision
    lesson: Lesson,
    carries: torch.Tensor,  # bool [P, L] which pairs carry loss
    pair_weights: torch.Tensor,  # [L] what the loss of one pair of each depth weighs
    aim: Aim,
) -> LossResult:
    """The loss of a batch over all depths, with per-depth figures."""
    pairs = lesson.pairs
    kept = carries[pairs.rows, pairs.depths]  # [N]
    weights = pair_weights.to(head)[pairs.depths].masked_fill(~kept, 0.0)
    loss, losses, alphas, drafts = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        torch.cat([depth.states for depth in depths]), head, lesson, kept, weights, aim
    )
    figures = head.new_zeros(2, *lesson.labels.shape)  # [2, P, L]
    figures[:, pairs.rows, pairs.depths] = torch.stack([losses, alphas])
    sums, expected = figures.sum(1)
    hits = torch.zeros(lesson.labels.shape, dtype=torch.bool, device=head.device)
    hits[pairs.rows, pairs.depths] = (drafts == lesson.labels[pairs.rows, pairs.depths]) & kept
    return LossResult(loss, sums, expected, hits)


class _HeadLoss(torch.autograd.Function):
    """(sum of weights * loss, losses [N], expected acceptances [N], greedy draft ids [N]); only the first has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        unrolled: torch.Tensor,  # [N, H] states, depth by depth; all else goes by teacher
        head: torch.Tensor,  # [Vd, H]
        lesson: Lesson,
        kept: torch.Tensor,  # bool [N]
        weights: torch.Tensor,  # [N] zero where a pair carries no loss
        aim: Aim,
    ) -> tuple[torch.Tensor, ...]:
        pairs = lesson.pairs
        visits_all = visits_all_pairs(unrolled)
        block = CUDA_TEACHER_BLOCK if visits_all else TEACHER_BLOCK
        cast_head = head.to(unrolled.dtype)
        figures = PairFigures(torch.zeros_like(weights), torch.zeros_like(weights), torch.full_like(pairs.at, -1))
        d_unrolled, d_head = torch.zeros_like(unrolled), torch.zeros_like(head)
        taught_by = (pairs.rows + pairs.depths) % block  # [N] row of the teacher's block
        weights_N1 = weights[:, None].to(unrolled.dtype)
        for number, span in enumerate(pairs.blocks(block)):
            rows = slice(number * block, (number + 1) * block)
            n = span if visits_all else kept[span].nonzero().flatten() + span.start
            at_n = pairs.at[n]
            if not len(at_n):
                continue
            states_n = unrolled[at_n]
            logits, targets = product(states_n, cast_head), product(lesson.last[rows], lesson.head)
            gradient = _pair_gradients(logits, targets, taught_by[n], lesson.log_z[rows], aim, unrolled.dtype, figures, n)
            d_unrolled[at_n] = (gradient @ cast_head).mul_(weights_N1[n])
            states_n = states_n.mul_(weights_N1[n])
            if gradient.dtype == d_head.dtype:
                d_head.addmm_(gradient.T, states_n)
            else:
                d_head += product(gradient.T, states_n.T)
        losses, alphas, drafts = figures.losses, figures.alphas, figures.drafts
        if visits_all:
            losses, alphas = losses.masked_fill_(~kept, 0.0), alphas.masked_fill_(~kept, 0.0)
        ctx.save_for_backward(d_unrolled, d_head)
        ctx.mark_non_differentiable(losses, alphas, drafts)
        return torch.dot(losses, weights), losses, alphas, drafts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_unrolled, d_head = ctx.saved_tensors
        return d_unrolled * grads[0].to(d_unrolled.dtype), d_head * grads[0], None, None, None, None


def visits_all_pairs(states: torch.Tensor) -> bool:
    """Whether pairs without loss are visited too: cheaper than asking a device which they are."""
    return states.is_cuda


def _pair_gradients(
    logits: torch.Tensor,
    targets: torch.Tensor,
    at: torch.Tensor,
    log_z: torch.Tensor,
    aim: Aim,
    dtype: torch.dtype,
    figures: PairFigures,
    n: slice | torch.Tensor,
) -> torch.Tensor:
    """The gradient of each pair [n, Vd] in `dtype`, by what is fastest on the device; figures[n] are written."""
    if logits.is_cuda:
        from training.learning.head_kernel import pair_gradients as fused

        assert isinstance(n, slice), "a device visits all pairs"
        return fused(logits, targets, at, log_z, aim, dtype, figures[n])
    gradient, found = pair_gradients(logits, targets, at, log_z, aim)
    figures.losses[n], figures.alphas[n], figures.drafts[n] = found.losses, found.alphas, found.drafts
    return gradient.to(dtype)
