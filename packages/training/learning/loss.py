"""Soft cross-entropy against the target, restricted to the draft vocabulary, fused with both heads.

The teacher of (p, k) is softmax(head_d(last[p+1+k])), head_d the frozen target head's rows of the draft vocabulary. Positions
whose greedy target token lies outside the draft vocabulary carry no loss. Depth k is divided by the number of tokens that
carry loss there and weighted by decay ** k; depths are summed, so padding, prompt length and the cut into rows change nothing.

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
    loss: torch.Tensor  # scalar with a gradient: what is minimised
    depth_losses: list[float]  # [L] mean cross-entropy of each depth
    num_pairs: list[int]  # [L] pairs that carry loss
    hits: torch.Tensor  # bool [P, L] greedy draft (p, k) equals x[p+2+k]; false where the target's greedy token is out of reach


def chain_loss(
    depths: Sequence[Depth],
    head: torch.Tensor,  # [Vd, H] the drafter's
    teacher_head: torch.Tensor,  # [Vd, Ht] the target's rows of the draft vocabulary
    last: torch.Tensor,  # [P, Ht] teacher states of depth 0; depth k of row i is taught by row i + k
    covered: torch.Tensor,  # bool [P] the greedy token of that teacher lies in the draft vocabulary
    draft_labels: torch.Tensor,  # int64 [P, L] x[p+2+k] as a draft id, -1 outside or not supervised
    decay: float,
) -> LossResult:
    """The loss of a batch over all depths, with per-depth figures."""
    kept = [covered[depth.rows + k].nonzero().flatten() for k, depth in enumerate(depths)]
    counts = [len(keep) for keep in kept]
    states = torch.cat([depth.states[keep] for depth, keep in zip(depths, kept, strict=True)])  # [N, H]
    rows = torch.cat([depth.rows[keep] for depth, keep in zip(depths, kept, strict=True)])  # [N]
    at_depth = torch.repeat_interleave(torch.arange(len(depths), device=rows.device), torch.tensor(counts, device=rows.device))
    weights = torch.tensor([decay**k / max(count, 1) for k, count in enumerate(counts)], dtype=states.dtype, device=rows.device)
    loss, entropies, drafts = soft_cross_entropy(states, head, teacher_head, last, rows + at_depth, weights[at_depth])
    hits = torch.zeros(draft_labels.shape, dtype=torch.bool, device=rows.device)
    hits[rows, at_depth] = drafts == draft_labels[rows, at_depth]
    means = [float(part.mean()) if len(part) else 0.0 for part in torch.split(entropies, counts)]
    return LossResult(loss, means, counts, hits)


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
