"""Attention over our own K/V, as transformers calls it: the sequences of a forward lie along one row, each a segment of it.

The model hands over the row's queries, keys and values layer by layer. Each segment's keys and values are written behind its
cache's committed rows, and its queries attend to the committed rows and to their own ancestors among the new ones. Which
segments there are travels through the model call as the keyword argument `BATCH`: nothing here outlives a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from runtime.backends.segments import ancestry
from runtime.backends.transformers.cache import KVCache
from runtime.hidden_states import HiddenStates

NAME = "slipstream"  # of our attention in transformers' table
BATCH = "slipstream_batch"  # keyword argument of the model call


class SegmentPlan:
    """One segment of a forward: its columns of the row, its views of the cache, its masks by sliding window."""

    def __init__(self, cache: KVCache, start: int, parents: Sequence[int] | None, size: int) -> None:
        self.start, self.end = start, start + size
        self.length, self.size = cache.length, size
        self._parents = parents
        self._dtype, self._device = cache.keys.dtype, cache.keys.device
        self._masks: dict[int | None, torch.Tensor | None] = {}
        end = cache.length + size
        # Per layer, [num_kv_heads, length + size, dim] and [num_kv_heads, size, dim]; unbind is one call for all layers.
        self.keys, self.values = cache.keys[:, :, :end].unbind(), cache.values[:, :, :end].unbind()
        self.new_keys = cache.keys[:, :, cache.length : end].unbind()
        self.new_values = cache.values[:, :, cache.length : end].unbind()

    def first_visible(self, window: int | None) -> int:
        """Committed rows before this one are out of every new token's sight."""
        return 0 if window is None else max(0, self.length - window + 1)

    def mask(self, window: int | None, num_groups: int) -> torch.Tensor | None:
        """[num_groups * size, visible committed rows + size], 0 or -inf; None: everything is seen."""
        if self.size == 1:
            return None
        if window not in self._masks:
            self._masks[window] = self._build_mask(window).repeat(num_groups, 1)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> torch.Tensor:
        visible = ancestry(self._parents, self.size).to(self._device)
        first = self.first_visible(window)
        if window is None:
            committed = torch.ones(self.size, self.length, dtype=torch.bool, device=self._device)
        else:
            depths = visible.sum(dim=1) - 1
            oldest = self.length + depths[:, None] - window + 1  # [size, 1] the first position that each node sees
            committed = torch.arange(first, self.length, device=self._device) >= oldest
            visible = visible & (self.length + depths >= oldest)
        mask = torch.zeros(self.size, self.length - first + self.size, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~torch.cat([committed, visible], dim=1), float("-inf"))


class RaggedBatch:
    """One forward: its segments on their way through the layers, and the states that the hooks take out on that way."""

    def __init__(self, plans: Sequence[SegmentPlan]) -> None:
        self.plans = plans
        self.aux: dict[int, torch.Tensor] = {}  # layer id -> [T, Ht]
        self.last: torch.Tensor | None = None  # [T, Ht]

    def hidden(self, layer_ids: Sequence[int]) -> HiddenStates:
        """Of all rows, once the model is done."""
        assert self.last is not None
        return HiddenStates(torch.cat([self.aux[layer_id] for layer_id in layer_ids], dim=-1), self.last)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """q [num_heads, T, D], k and v [num_kv_heads, T, D] of all segments -> [1, T, num_heads, D]."""
        outputs = []
        for plan in self.plans:
            start, end = plan.start, plan.end
            plan.new_keys[layer].copy_(k[:, start:end])
            plan.new_values[layer].copy_(v[:, start:end])
            keys, values = plan.keys[layer], plan.values[layer]
            first = plan.first_visible(window)
            if first:
                keys, values = keys[:, first:], values[:, first:]
            # The heads that share keys become rows of one attention problem: grouped-query attention without a copy of K/V.
            rows = q[:, start:end].reshape(1, k.shape[0], -1, q.shape[2])
            mask = plan.mask(window, q.shape[0] // k.shape[0])
            out = F.scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask, scale=scale)
            outputs.append(out.reshape(q.shape[0], plan.size, v.shape[2]))
        row = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return row.transpose(0, 1)[None]


def ragged_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, T, D]
    key: torch.Tensor,  # [1, num_kv_heads, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function in transformers' table. What else a model may pass was looked at once, when it was loaded."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    return kwargs[BATCH].attend(layer, query[0], key[0], value[0], scaling, sliding_window), None


def register() -> None:
    """Enter our attention in transformers' table. No mask function is entered beside it, so models build no mask."""
    AttentionInterface.register(NAME, ragged_attention)
