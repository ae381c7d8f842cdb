"""What a pair (p, k) is trained on: three objectives and their exact gradients with regard to the draft logits.

With t the target's logits over the draft vocabulary, Z the sum of exp over its WHOLE vocabulary, a the drafter's logits:

    p = softmax(t)        the target, cut to the draft vocabulary and renormalised
    r = exp(t - log Z)    its true probabilities of the same tokens; what is missing to one lies outside the draft vocabulary
    q = softmax(a)        the drafter
    alpha = sum_v min(r, q)    the probability that verification accepts a token drawn from q

    cross_entropy    -sum_v p log q                                   gradient  q - p
    lk_alpha         -log alpha                                       gradient  q * (sum_v q m - m) / alpha,  m = [q < r]
    lk_blend         w KL(p || q) + (1 - w) (1 - alpha)               gradient  w (q - p) + (1 - w) q * (sum_v q m - m)
                     w = exp(-eta * alpha), held constant

The last two are the LK losses (Samarin et al., 2026): acceptance itself, with KL's strong gradient where the two distributions
hardly overlap. All gradients are bounded by one in each component, lk_alpha's too. Knows no batch, no depth, no weights.
Shapes: Vd draft vocabulary, n pairs, m teacher rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.config import Objective

STRIP = 8  # pairs at a time


@dataclass(frozen=True)
class Aim:
    """An objective with its number."""

    objective: Objective = Objective.CROSS_ENTROPY
    eta: float = 3.0  # of lk_blend: how fast weight moves from KL to acceptance


@dataclass(frozen=True)
class PairFigures:
    losses: torch.Tensor  # [n]
    alphas: torch.Tensor  # [n] expected acceptance of a draft sampled at temperature 1
    drafts: torch.Tensor  # int64 [n] greedy draft ids

    def __getitem__(self, pairs: slice) -> PairFigures:
        """Views of some."""
        return PairFigures(self.losses[pairs], self.alphas[pairs], self.drafts[pairs])


def pair_gradients(
    logits: torch.Tensor,  # [n, Vd] the drafter's; overwritten
    target_logits: torch.Tensor,  # [m, Vd] the target's; overwritten
    at: torch.Tensor,  # int64 [n] which target row teaches each pair
    log_z: torch.Tensor,  # [m] logsumexp of each target row over the target's whole vocabulary
    aim: Aim,
) -> tuple[torch.Tensor, PairFigures]:
    """(gradient of each pair's loss with regard to its logits [n, Vd], in their place; figures).

    Written for a CPU: some rows at a time, so that what one operation leaves the next finds in the cache of the core.
    """
    target, log_d, _ = _softmax(target_logits)  # [m, Vd] p, [m]
    mass = (log_d - log_z).exp_()[at, None]  # [n, 1] r = mass * p
    parts = [
        _strip(rows, target[at_rows], mass_rows, aim)
        for rows, at_rows, mass_rows in zip(logits.split(STRIP), at.split(STRIP), mass.split(STRIP), strict=True)  # type: ignore[no-untyped-call]
    ]
    return logits, PairFigures(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(softmax [n, Vd] in place of the logits, their logsumexp [n], their argmax [n])."""
    best, at = logits.max(-1)
    probs = torch.softmax(logits, -1, out=logits)
    return probs, best - probs.gather(1, at[:, None])[:, 0].log(), at


def _strip(
    logits: torch.Tensor, target: torch.Tensor, mass: torch.Tensor, aim: Aim
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, alphas, drafts) of some pairs. logits [n, Vd] become their gradient; target [n, Vd] is p, and overwritten."""
    dots = torch.linalg.vecdot(target, logits)
    probs, log_q, drafts = _softmax(logits)  # q
    entropies = log_q - dots
    overlap = torch.mul(target, mass)  # r
    if aim.objective is Objective.CROSS_ENTROPY:
        alphas = torch.minimum(overlap, probs, out=overlap).sum(-1)
        probs.sub_(target)
        return entropies, alphas, drafts
    under = torch.where(probs < overlap, probs, 0.0)  # q m
    alphas = torch.minimum(overlap, probs, out=overlap).sum(-1)
    toward = torch.addcmul(-under, probs, under.sum(-1, keepdim=True))  # q (sum q m - m)
    if aim.objective is Objective.LK_ALPHA:
        bounded = alphas.clamp(min=torch.finfo(alphas.dtype).tiny)
        torch.div(toward, bounded[:, None], out=probs)
        return -bounded.log(), alphas, drafts
    weight = torch.exp(-aim.eta * alphas)  # [n]
    divergence = entropies + torch.special.xlogy(target, target).sum(-1)  # KL(p || q)
    probs.sub_(target).mul_(weight[:, None]).addcmul_(toward, 1 - weight[:, None])
    return weight * divergence + (1 - weight) * (1 - alphas), alphas, drafts
