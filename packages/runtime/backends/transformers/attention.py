"""How transformers comes to call our attention: the sequences of a forward lie along one row, each a segment of it.

The model hands over the row's queries, keys and values layer by layer, and whatever keeps the K/V attends (`pool`). Which
forward it is travels through the model call as the keyword argument `BATCH`: nothing here outlives a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from runtime.hidden_states import HiddenStates

NAME = "slipstream"  # of our attention in transformers' table
BATCH = "slipstream_batch"  # keyword argument of the model call


class Attention(Protocol):
    """The attention of one forward."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,  # [num_heads, T, key_dim] of all segments, side by side
        k: torch.Tensor,  # [num_kv_heads, T, key_dim]
        v: torch.Tensor,  # [num_kv_heads, T, value_dim]
        scale: float | None,  # None: 1 / sqrt(key_dim)
        window: int | None,  # the layer's own; what the cache's policy hides is hidden beside it
        softcap: float | None,
    ) -> torch.Tensor:
        """Write k and v behind each segment's cache, and attend -> [1, T, num_heads, value_dim]."""
        ...


class RaggedBatch:
    """One forward: its attention, and the states that are taken out on the way through the layers."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.aux: dict[int, torch.Tensor] = {}  # layer id -> [T, Ht]
        self.last: torch.Tensor | None = None  # [T, Ht]
        self._turns: tuple[torch.Tensor, torch.Tensor] | None = None

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Heads [..., T, D] turned by rotary halves: x cos + (-x2, x1) sin. cos and sin [1, T, D] are those of the forward."""
        half = x.shape[-1] // 2
        if self._turns is None:
            self._turns = cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        cos, signed_sin = self._turns
        return torch.addcmul(x * cos, x.roll(half, -1), signed_sin)

    def hidden(self, layer_ids: Sequence[int]) -> HiddenStates:
        """Of all rows, once the model is done."""
        assert self.last is not None
        return HiddenStates(torch.cat([self.aux[layer_id] for layer_id in layer_ids], dim=-1), self.last)


def ragged_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, T, D]
    key: torch.Tensor,  # [1, num_kv_heads, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function in transformers' table. What else a model may pass was looked at once, when it was loaded."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    batch: RaggedBatch = kwargs[BATCH]
    return batch.attention(layer, query[0], key[0], value[0], scaling, sliding_window, softcap), None


def register() -> None:
    """Enter our attention in transformers' table. No mask function is entered beside it, so models build no mask."""
    AttentionInterface.register(NAME, ragged_attention)
