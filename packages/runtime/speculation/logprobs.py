"""The target's own log-probabilities of emitted tokens, from raw logits: no temperature, penalty or truncation shows here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.types import TokenLogprob


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int = 0) -> list[TokenLogprob]:
    """One record per row of raw logits [R, V] and its token; `top` most likely alternatives each, best first."""
    normalizer = logits.logsumexp(dim=-1, keepdim=True)  # [R, 1]
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(-1)  # [R, 1]
    chosen = (logits.gather(-1, ids) - normalizer).squeeze(-1).tolist()
    best = logits.topk(min(top, logits.shape[-1]), dim=-1)  # [R, top]
    best_ids, best_logprobs = best.indices.tolist(), (best.values - normalizer).tolist()
    return [
        TokenLogprob(token_id, logprob, tuple(zip(row_ids, row_logprobs, strict=True)))
        for token_id, logprob, row_ids, row_logprobs in zip(token_ids, chosen, best_ids, best_logprobs, strict=True)
    ]
