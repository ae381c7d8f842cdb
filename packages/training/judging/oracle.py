"""What the plain model says in float32 of answers that were made in any other way: how far from the best each token was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# How far below the best float32 logit a greedy token may lie that was made in this precision. Forwards of different shapes
# differ in their last bits, so two logits that are nearly equal may swap places.
LIMITS: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.4, "float16": 0.05}


class Oracle:
    def __init__(self, model: Any) -> None:
        """A causal language model of transformers, in float32 and in evaluation mode."""
        self._model = model
        self._known: dict[tuple[int, ...], list[float]] = {}

    @torch.inference_mode()
    def gaps(self, prompt: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Of each token of an answer, how far it lies below the best logit behind what stands before it."""
        text = (*prompt, *token_ids)
        if text not in self._known:
            ids = torch.tensor([text], device=self._model.device)
            logits = self._model(ids[:, :-1], logits_to_keep=len(token_ids)).logits[0].float()  # [n, V]
            chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            self._known[text] = (logits.max(dim=1).values - chosen).tolist()
        return self._known[text]
