"""Soft cross-entropy against the target, restricted to the draft vocabulary, fused with both heads.

The teacher of (p, k) is softmax(head_d(last[p+1+k])), head_d the frozen target head's rows of the draft vocabulary. Positions
whose greedy target token lies outside the draft vocabulary carry no loss. What is returned are sums and counts: whoever adds
up micro-batches and ranks knows the number of pairs of each depth beforehand (`carrying`), and hands in what a pair of depth k
weighs, so padding, prompt length, and the cut into rows, micro-batches and ranks change nothing.

Logits of either head exist only for one block of teacher rows at a time: pairs are visited in the order of their teacher, the
gradient is formed in place in the forward, and no [N, Vd] tensor survives. Shapes: the legend of runtime/types.py; N pairs
(p, k) that carry loss, P supervised positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

TEACHER_BLOCK = 64  # teacher rows at a time; times L pairs, it keeps a block of logits in the cache of a core


@dataclass(frozen=True)
class Depth:
    """One depth of the training-time test over a batch."""

    states: torch.Tensor  # [P_k, H] after the final norm
    rows: torch.Tensor  # int64 [P_k] which of the batch's supervised positions, ascending


@dataclass(frozen=True)
class LossResult:
    """Sums over the pairs of one batch. Only `loss` has a gradient."""

    loss: torch.Tensor  # scalar: sum of pair_weights[k] * loss of the pair (p, k)
    sums: torch.Tensor  # [L] sum of the losses of each depth, not weighted
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
    head: torch.Tensor,  # [Vd, H] the drafter's
    teacher_head: torch.Tensor,  # [Vd, Ht] the target's rows of the draft vocabulary
    last: torch.Tensor,  # [P, Ht] teacher states of depth 0; depth k of row i is taught by row i + k
    carries: torch.Tensor,  # bool [P, L] which pairs carry loss
    draft_labels: torch.Tensor,  # int64 [P, L] x[p+2+k] as a draft id, -1 outside or not supervised
    pair_weights: torch.Tensor,  # [L] what the loss of one pair of each depth weighs
) -> LossResult:
    """The loss of a batch over all depths, with per-depth figures."""
    kept = [carries[depth.rows, k].nonzero().flatten() for k, depth in enumerate(depths)]
    counts = torch.tensor([len(keep) for keep in kept], device=carries.device)
    states = torch.cat([depth.states[keep] for depth, keep in zip(depths, kept, strict=True)])  # [N, H]
    rows = torch.cat([depth.rows[keep] for depth, keep in zip(depths, kept, strict=True)])  # [N]
    at_depth = torch.repeat_interleave(torch.arange(len(depths), device=rows.device), counts)
    weights = pair_weights.to(states)[at_depth]
    loss, entropies, drafts = soft_cross_entropy(states, head, teacher_head, last, rows + at_depth, weights)
    sums = states.new_zeros(len(pair_weights)).index_add_(0, at_depth, entropies)
    hits = torch.zeros(draft_labels.shape, dtype=torch.bool, device=rows.device)
    hits[rows, at_depth] = drafts == draft_labels[rows, at_depth]
    return LossResult(loss, sums, hits)


def soft_cross_entropy(
    states: torch.Tensor,  # [N, H]
    head: torch.Tensor,  # [Vd, H]
    teacher_head: torch.Tensor,  # [Vd, Ht]
    last: torch.Tensor,  # [P, Ht]
    teacher: torch.Tensor,  # int64 [N] row of `last` that teaches each pair
    weights: torch.Tensor,  # [N]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum of weights * cross-entropy, cross-entropies [N], greedy draft ids [N]); only the first has a gradient."""
    loss, entropies, drafts = _SoftCrossEntropy.apply(states, head, teacher_head, last, teacher, weights)  # type: ignore[no-untyped-call]
    return loss, entropies, drafts


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        head: torch.Tensor,
        teacher_head: torch.Tensor,
        last: torch.Tensor,
        teacher: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        entropies = states.new_empty(len(states))
        drafts = torch.empty(len(states), dtype=torch.int64, device=states.device)
        d_states, d_head = torch.empty_like(states), torch.zeros_like(head)
        order = torch.argsort(teacher, stable=True)
        starts = torch.arange(0, len(last) + TEACHER_BLOCK, TEACHER_BLOCK, device=teacher.device)
        bounds = torch.searchsorted(teacher[order], starts).tolist()
        largest = max((stop - start for start, stop in pairwise(bounds)), default=0)
        logits_buffer, probs_buffer = states.new_empty(largest, len(head)), states.new_empty(largest, len(head))
        for block, (start, stop) in enumerate(pairwise(bounds)):
            if start == stop:
                continue
            pairs, first = order[start:stop], block * TEACHER_BLOCK
            target = torch.softmax(last[first : first + TEACHER_BLOCK] @ teacher_head.T, -1)[teacher[pairs] - first]  # [n, Vd]
            states_n = states[pairs]
            logits = torch.mm(states_n, head.T, out=logits_buffer[: stop - start])
            best, draft = logits.max(-1)
            probs = torch.softmax(logits, -1, out=probs_buffer[: stop - start])
            log_z = best - probs.gather(1, draft[:, None])[:, 0].log()
            entropies[pairs] = log_z - torch.linalg.vecdot(target, logits)
            drafts[pairs] = draft
            d_logits = probs.sub_(target)  # d CE / d logits = softmax(logits) - target
            weights_n = weights[pairs, None]
            d_states[pairs] = (d_logits @ head).mul_(weights_n)
            d_head.addmm_(d_logits.T, states_n * weights_n)
        ctx.save_for_backward(d_states, d_head)
        ctx.mark_non_differentiable(entropies, drafts)
        return torch.dot(entropies, weights), entropies, drafts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_states, d_head = ctx.saved_tensors
        return d_states * grads[0], d_head * grads[0], None, None, None, None
