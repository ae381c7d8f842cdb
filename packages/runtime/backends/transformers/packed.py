"""Hidden states of many whole rows in one forward, nothing cached and no logits: what training on token rows needs.

The rows lie along one axis, each seen by itself alone. On CUDA in half precision that is one fused attention call over all of
them; elsewhere one call a row. The states stay where they are computed. Shapes: T packed positions, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from runtime.backends.transformers import attention
from runtime.backends.transformers.attention import BATCH, RaggedBatch
from runtime.backends.transformers.loading import choose_dtype, read_weights
from runtime.backends.transformers.probe import decoder_layers, probe_model
from runtime.backends.transformers.target import take_aux, take_last
from runtime.config import Dtype
from runtime.hidden_states import HiddenStates, default_aux_layer_ids
from runtime.models import ResolvedModel

HALF = (torch.bfloat16, torch.float16)
MAX_FUSED_DIM = 256  # of a head


def load_packed(resolved: ResolvedModel, device: torch.device) -> PackedForward:
    """The model of a directory, bfloat16 on CUDA and float32 on a CPU. ModelError if it cannot be used."""
    return PackedForward(read_weights(resolved, choose_dtype(Dtype.AUTO, device), device))


class PackedForward:
    """Takes a model in memory for its own: hooks it and gives it our attention. One thread at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        """ModelError for a model that we would compute wrongly."""
        model.train(False)
        model.requires_grad_(False)
        shape = probe_model(model)
        attention.register()
        model.set_attn_implementation(attention.NAME)
        self.device, self.dtype = shape.device, shape.dtype
        self._decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        self.layer_ids = default_aux_layer_ids(shape.num_layers)
        layers = decoder_layers(model)
        for layer_id in self.layer_ids:
            layers[layer_id].register_forward_hook(take_aux(layer_id), with_kwargs=True)
        self._decoder.register_forward_hook(take_last, with_kwargs=True)

    @torch.no_grad()
    def __call__(self, token_ids: torch.Tensor, lengths: Sequence[int]) -> HiddenStates:
        """token_ids: int64 [T] of all rows, one behind the other, on any device; lengths: [R] of each, at least 1.
        States of all T positions, in the model's dtype and on its device."""
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        assert offsets[-1] == len(token_ids), "lengths are those of the rows"
        positions = torch.cat([torch.arange(length) for length in lengths])
        batch = RaggedBatch(PackedRows(offsets, self.device))
        inputs: dict[str, Any] = {"input_ids": _moved(token_ids, self.device)[None], BATCH: batch, "use_cache": False}
        self._decoder(**inputs, position_ids=_moved(positions, self.device)[None])
        return batch.hidden(self.layer_ids)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for what the device does now."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda" and tensor.device.type == "cpu"
        else tensor.to(device)
    )


class PackedRows:
    """Implements `Attention`: causal within each row. offsets: [R+1] where the rows begin and end."""

    def __init__(self, offsets: Sequence[int], device: torch.device) -> None:
        self._offsets = offsets
        self._longest = max(stop - start for start, stop in pairwise(offsets))
        self._on_device = _moved(torch.tensor(offsets, dtype=torch.int32), device)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,  # [num_heads, T, key_dim]
        k: torch.Tensor,  # [num_kv_heads, T, key_dim]
        v: torch.Tensor,  # [num_kv_heads, T, value_dim]
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        if q.is_cuda and q.dtype in HALF and softcap is None and _can_fuse(q.shape[2], v.shape[2]):
            return self.fused(q, k, v, scale, window)
        parts = []
        for start, stop in pairwise(self._offsets):
            row = slice(start, stop)
            parts.append(attend_row(q[:, row], k[:, row], v[:, row], scale, window, softcap))
        return torch.cat(parts, dim=1).transpose(0, 1)[None]

    def fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: int | None) -> torch.Tensor:
        sizes = (self._on_device, self._on_device, self._longest, self._longest)
        sight = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        rows_first = (each.transpose(0, 1).contiguous() for each in (q, k, v))  # [T, heads, dim]
        out: torch.Tensor = torch.ops.aten._flash_attention_forward(*rows_first, *sizes, 0.0, True, False, scale=scale, **sight)[
            0
        ]
        return out[None]


def _can_fuse(key_dim: int, value_dim: int) -> bool:
    return key_dim == value_dim <= MAX_FUSED_DIM and key_dim % 8 == 0


def attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: int | None, softcap: float | None
) -> torch.Tensor:
    """One row by itself: [num_heads, S, value_dim]."""
    length = q.shape[1]
    if softcap is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True)[0]
    at = torch.arange(length, device=q.device)
    back = at[:, None] - at[None, :]
    is_seen = (back >= 0) & (back < (length if window is None else window))
    groups = q.shape[0] // k.shape[0]
    scores = q.float() @ k.float().repeat_interleave(groups, 0).transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return (weights @ v.float().repeat_interleave(groups, 0)).to(v.dtype)
