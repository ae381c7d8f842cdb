"""The accept test: which drafted tokens the target keeps, and the one token it adds. Lossless for any draft.

Greedy keeps the longest prefix that the target would have picked itself. Sampled follows Leviathan et al. 2023 and Chen et
al. 2023: the tokens that leave here are distributed exactly as if the target had sampled them one by one from the processed
distribution p. Pure mathematics: it moves no cache and no statistics; the caller advances the `Processor` by what it keeps.

A chain of m drafts and its m + 1 rows of logits:

    logits row       0        1       ...   m-1       m
    is before     draft[0] draft[1]  ...  draft[m-1]  bonus
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.drafters.base import Draft, SparseProbs
from runtime.speculation.sampling import Processor, pick


@dataclass(frozen=True)
class Verdict:
    """What one verification emits: the accepted drafts and one more token, the corrected or the bonus one."""

    token_ids: list[int]  # num_accepted + 1
    num_accepted: int


def verify_chain(logits: torch.Tensor, draft: Draft, processor: Processor, generator: torch.Generator | None) -> Verdict:
    """Judge a chain by the target's raw logits [m + 1, V]. An empty draft (m = 0) just picks the next token.

    `generator` is the request's own CPU generator (new_generator); greedy needs none. A sampled call always takes m + 1
    numbers from it. ModelError when logits are not finite; ValueError when a draft has no mass in its own distribution.
    """
    assert logits.shape[0] == len(draft.token_ids) + 1, "one row of logits before each draft and one after the last"
    if processor.params.is_greedy:
        return _verify_greedy(logits, draft, processor)
    assert generator is not None, "sampling needs the request's generator"
    # A CPU pays for every row and so looks at one at a time; an accelerator pays for every look and so takes all at once.
    window = 1 if logits.device.type == "cpu" else logits.shape[0]
    return _verify_sampled(logits, draft, processor, generator, window)


def _verify_greedy(logits: torch.Tensor, draft: Draft, processor: Processor) -> Verdict:
    best = processor.argmax(logits, draft.token_ids)
    num_accepted = 0
    while num_accepted < len(draft.token_ids) and draft.token_ids[num_accepted] == best[num_accepted]:
        num_accepted += 1
    return Verdict(best[: num_accepted + 1], num_accepted)


def _verify_sampled(logits: torch.Tensor, draft: Draft, processor: Processor, generator: torch.Generator, window: int) -> Verdict:
    m = len(draft.token_ids)
    draws = torch.rand(m + 1, generator=generator, dtype=torch.float64)
    uniforms, last_uniform = draws.tolist(), draws[m:]
    for first in range(0, m + 1, window):
        p = processor.probs(logits[first : first + window], draft.token_ids, first)  # [window, V]
        ids = draft.token_ids[first : first + window]
        p_of_drafts = p[torch.arange(len(ids)), torch.tensor(ids, dtype=torch.int64)].tolist()
        for row, token_id in enumerate(ids):
            k = first + row
            q = None if draft.probs is None else draft.probs[k]
            # accept draft k with probability min(1, p / q)
            if uniforms[k] * _mass(q, token_id, k) >= p_of_drafts[row]:
                token = pick(_residual(p[row], q, token_id).unsqueeze(0), last_uniform)
                return Verdict([*draft.token_ids[:k], int(token)], k)
    return Verdict([*draft.token_ids, int(pick(p[-1:], last_uniform))], m)


def _mass(q: SparseProbs | None, token_id: int, k: int) -> float:
    """q(token_id), normalised as `pick` draws from it."""
    if q is None:
        return 1.0
    weights = q.probs.double()
    mass = float(weights[q.token_ids == token_id].sum() / weights.sum())
    if not mass > 0.0:
        raise ValueError(f"Draft {k} is token {token_id}, but its own distribution gives it {mass}; pass the one it came from.")
    return mass


def _residual(p: torch.Tensor, q: SparseProbs | None, token_id: int) -> torch.Tensor:
    """max(p - q, 0) [V] float64, not normalised: what to draw from after token_id was rejected."""
    residual = p.double()
    if q is None:
        residual[token_id] = 0.0
    else:
        weights = q.probs.to(residual)
        residual.index_add_(0, q.token_ids.to(residual.device), weights / weights.sum(), alpha=-1.0)
        residual.clamp_(min=0.0)
    # A rejection means p(token) < q(token), so some mass is left; only rounding, where p == q, can hide it. Then p is the answer.
    return residual if bool(residual.any()) else p.double()
