# mypy: ignore-errors
"""What is made of the logits of either head, in Triton: of the drafter's `objective.pair_gradients`, of the target's a summary.

`pair_gradients` is a program a pair: both softmaxes, loss, argmax and gradient in one visit. A row is read three times, from the
cache after the first: for its normalisers and its argmax, for the overlap of the two distributions, for the gradient. Logits come
in float32 or bfloat16; all arithmetic is float32. mypy does not look at this file: Triton compiles it, not Python.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from training.config import Objective
from training.learning.objective import Aim, PairFigures

BLOCK = 4096
NOWHERE = tl.constexpr(-1e30)  # a logit behind the end of a row: finite, so that its share is 0 and so is its product with that
CROSS_ENTROPY, LK_ALPHA, LK_BLEND = (tl.constexpr(number) for number in range(3))
NUMBERS = {Objective.CROSS_ENTROPY: 0, Objective.LK_ALPHA: 1, Objective.LK_BLEND: 2}


@triton.jit
def _pair_gradient(logits, targets, at, log_z, out, losses, alphas, drafts, eta,
                   D: tl.constexpr, BLOCK_D: tl.constexpr, AIM: tl.constexpr):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(at + pair).to(tl.int64)
    a_row, t_row, out_row = logits + pair * D, targets + row * D, out + pair * D
    lane = tl.arange(0, BLOCK_D)

    # 1: running maximum and sum of exp of both rows, and where the drafter's maximum lies
    a_max, t_max = float("-inf"), float("-inf")
    a_sum, t_sum = 0.0, 0.0
    draft = 0
    for first in range(0, D, BLOCK_D):
        ok = first + lane < D
        a = tl.load(a_row + first + lane, mask=ok, other=NOWHERE).to(tl.float32)
        t = tl.load(t_row + first + lane, mask=ok, other=NOWHERE).to(tl.float32)
        a_best, t_best = tl.max(a, 0), tl.max(t, 0)
        lowest = tl.min(tl.where(a == a_best, first + lane, D), 0)
        draft = tl.where(a_best > a_max, lowest, draft)
        a_new, t_new = tl.maximum(a_max, a_best), tl.maximum(t_max, t_best)
        a_sum = a_sum * tl.exp(a_max - a_new) + tl.sum(tl.exp(a - a_new), 0)
        t_sum = t_sum * tl.exp(t_max - t_new) + tl.sum(tl.exp(t - t_new), 0)
        a_max, t_max = a_new, t_new
    log_q, log_d = a_max + tl.log(a_sum), t_max + tl.log(t_sum)
    mass = tl.exp(log_d - tl.load(log_z + row).to(tl.float32))

    # 2: alpha, the drafter's mass where it lies under the target, and both entropies
    alpha, under, dot, negentropy = 0.0, 0.0, 0.0, 0.0
    for first in range(0, D, BLOCK_D):
        ok = first + lane < D
        a = tl.load(a_row + first + lane, mask=ok, other=NOWHERE).to(tl.float32)
        t = tl.load(t_row + first + lane, mask=ok, other=NOWHERE).to(tl.float32)
        q, p = tl.exp(a - log_q), tl.exp(t - log_d)
        alpha += tl.sum(tl.minimum(q, mass * p), 0)
        under += tl.sum(tl.where(q < mass * p, q, 0.0), 0)
        dot += tl.sum(p * a, 0)
        negentropy += tl.sum(p * (t - log_d), 0)
    entropy = log_q - dot
    weight = tl.exp(-eta * alpha)
    bounded = tl.maximum(alpha, 1.1754944e-38)
    if AIM == CROSS_ENTROPY:
        loss = entropy
    elif AIM == LK_ALPHA:
        loss = -tl.log(bounded)
    else:
        loss = weight * (entropy + negentropy) + (1.0 - weight) * (1.0 - alpha)
    tl.store(losses + pair, loss)
    tl.store(alphas + pair, alpha)
    tl.store(drafts + pair, draft)

    # 3: the gradient
    for first in range(0, D, BLOCK_D):
        ok = first + lane < D
        a = tl.load(a_row + first + lane, mask=ok, other=NOWHERE).to(tl.float32)
        t = tl.load(t_row + first + lane, mask=ok, other=NOWHERE).to(tl.float32)
        q, p = tl.exp(a - log_q), tl.exp(t - log_d)
        toward = q * (under - tl.where(q < mass * p, 1.0, 0.0))
        if AIM == CROSS_ENTROPY:
            d = q - p
        elif AIM == LK_ALPHA:
            d = toward / bounded
        else:
            d = weight * (q - p) + (1.0 - weight) * toward
        tl.store(out_row + first + lane, d.to(out.dtype.element_ty), mask=ok)


def pair_gradients(
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    at: torch.Tensor,
    log_z: torch.Tensor,
    aim: Aim,
    dtype: torch.dtype,
    figures: PairFigures,
) -> torch.Tensor:
    """As `objective.pair_gradients`, with the gradient in `dtype`: in place where that is the dtype of the logits. The figures,
    float32 and contiguous, are written."""
    n, width = logits.shape
    out = logits if logits.dtype == dtype else logits.new_empty(n, width, dtype=dtype)
    if n:
        block = min(BLOCK, triton.next_power_of_2(width))
        _pair_gradient[(n,)](
            logits, target_logits, at, log_z, out, figures.losses, figures.alphas, figures.drafts, aim.eta,
            D=width, BLOCK_D=block, AIM=NUMBERS[aim.objective], num_warps=8 if block >= 2048 else 4,
        )  # fmt: skip
    return out


@triton.jit
def _summary(logits, ids, log_z, D: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_D)
    highest, total = float("-inf"), 0.0
    at = 0
    for first in range(0, D, BLOCK_D):
        x = tl.load(logits + row * D + first + lane, mask=first + lane < D, other=NOWHERE).to(tl.float32)
        best = tl.max(x, 0)
        lowest = tl.min(tl.where(x == best, first + lane, D), 0)
        at = tl.where(best > highest, lowest, at)
        higher = tl.maximum(highest, best)
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    tl.store(ids + row, at)
    tl.store(log_z + row, highest + tl.log(total))


def summaries(logits: torch.Tensor, ids: torch.Tensor, log_z: torch.Tensor) -> None:
    """Write each row's argmax, int64 [n], the lowest on ties, and its logsumexp, float32 [n]. logits: [n, V]."""
    n, width = logits.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    _summary[(n,)](logits, ids, log_z, D=width, BLOCK_D=block, num_warps=8 if block >= 2048 else 4)
