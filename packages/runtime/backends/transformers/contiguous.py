"""Attention of a forward over contiguous caches: what each segment's tokens see, and one attention call a segment.

Each segment's keys and values are written behind its cache's committed rows, and its queries attend to the committed rows and
to their own ancestors among the new ones, as far as the layer's window and the cache's policy let them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from runtime.backends.segments import ancestry
from runtime.backends.transformers.cache import KVCache


class SegmentPlan:
    """One segment of a forward: its columns of the row, its views of the cache, its masks by the layer's window."""

    def __init__(self, cache: KVCache, start: int, parents: Sequence[int] | None, size: int) -> None:
        self.start, self.end = start, start + size
        self.length, self.size, self.num_rows = cache.length, size, cache.num_rows
        self._cache, self.parents = cache, parents
        self._sights: dict[int | None, tuple[int, torch.Tensor | None]] = {}
        end = cache.num_rows + size
        # Per layer, [num_kv_heads, num_rows + size, dim] and [num_kv_heads, size, dim]; unbind is one call for all layers.
        self.keys, self.values = cache.keys[:, :, :end].unbind(), cache.values[:, :, :end].unbind()
        self.new_keys = cache.keys[:, :, cache.num_rows : end].unbind()
        self.new_values = cache.values[:, :, cache.num_rows : end].unbind()

    def first_row(self, window: int | None) -> int:
        """Committed rows before this one are out of every new token's sight."""
        return self.rows_in_sight(self.length, window)[0]

    def rows_in_sight(self, position: int, window: int | None) -> tuple[int, int, int]:
        """Of a token at `position`, not below `length`: it sees the rows from `first` to `end` and those from `second` on.

        end == second where nothing lies hidden between what it sees of the sink and its window.
        """
        policy, row = self._cache.policy, self._cache.row
        first = 0 if window is None else max(0, position - window + 1)
        second = first if policy.window is None else max(first, position - policy.window + 1)
        if first >= policy.sink:
            return row(second), row(second), row(second)
        return first, min(policy.sink, second), row(max(second, policy.sink))

    def sight(self, window: int | None, num_groups: int) -> tuple[int, torch.Tensor | None]:
        """The first row in sight, and the mask of all from there on: see `first_row` and `_mask`. The same for many layers."""
        if window not in self._sights:
            self._sights[window] = self.first_row(window), self._mask(window, num_groups)
        return self._sights[window]

    def _mask(self, window: int | None, num_groups: int) -> torch.Tensor | None:
        """[num_groups * size, rows from first_row on + size], 0 or -inf; None: everything is seen."""
        if self.size == 1 and not self._has_gap(window):
            return None
        sees = self._sees(window)
        if bool(sees.all()):
            return None
        mask = torch.zeros(sees.shape, dtype=self._cache.keys.dtype, device=sees.device)
        return mask.masked_fill_(~sees, float("-inf")).repeat(num_groups, 1)

    def _has_gap(self, window: int | None) -> bool:
        """Whether rows lie between what the next token sees of the sink and its window."""
        _, end, second = self.rows_in_sight(self.length, window)
        return end != second

    def _sees(self, window: int | None) -> torch.Tensor:
        """bool [size, rows from first_row on + size]: what each new token sees."""
        device = self._cache.keys.device
        sink = self._cache.policy.sink
        related = ancestry(self.parents, self.size).to(device)
        own = self.length + related.sum(dim=1) - 1  # [size] positions
        rows = torch.arange(self.first_row(window), self.num_rows, device=device)
        committed = torch.where(rows < sink, rows, rows + self._cache.dropped)
        positions = torch.cat([committed, own])
        sees = torch.cat([torch.ones(self.size, len(rows), dtype=torch.bool, device=device), related], dim=1)
        if window is not None:
            sees &= positions > own[:, None] - window
        if self._cache.policy.window is not None:
            sees &= (positions < sink) | (positions > own[:, None] - self._cache.policy.window)
        return sees


class ContiguousAttention:
    """Implements `attention.Attention`: the segments one after the other, each one call on views of its cache."""

    def __init__(self, plans: Sequence[SegmentPlan]) -> None:
        self._plans = plans

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        outputs = []
        for plan in self._plans:
            parts = q, k, v
            if len(self._plans) > 1:
                parts = q[:, plan.start : plan.end], k[:, plan.start : plan.end], v[:, plan.start : plan.end]
            outputs.append(_attend_segment(plan, layer, *parts, scale, window, softcap))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).transpose(1, 2)


def _attend_segment(
    plan: SegmentPlan,
    layer: int,
    q: torch.Tensor,  # [num_heads, size, key_dim]
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[1, num_heads, size, value_dim]"""
    plan.new_keys[layer].copy_(k)
    plan.new_values[layer].copy_(v)
    keys, values = plan.keys[layer], plan.values[layer]
    first, mask = plan.sight(window, q.shape[0] // k.shape[0])
    if first:
        keys, values = keys[:, first:], values[:, first:]
    # The heads that share keys become rows of one attention problem: grouped-query attention without a copy of K/V.
    rows = q.reshape(1, k.shape[0], -1, q.shape[2])
    return attend(rows, keys[None], values[None], mask, scale, softcap).reshape(1, q.shape[0], plan.size, v.shape[2])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """softmax(cap(scale q k^T) + mask) v over [..., rows, D], where cap(x) = softcap tanh(x / softcap), or x."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
