"""Hidden states of many whole rows in one forward, nothing cached and no logits: what training on token rows needs.

The rows lie along one axis, each seen by itself alone. On CUDA in half precision that is one fused attention call over all of
them; elsewhere one call a row. A model of Llama's kind is computed from its fused weights, a dozen operations a layer, so that a
host which launches them keeps ahead of its device; any other by its own modules. The states stay where they are computed.
Shapes: T packed positions, R rows, N heads, G key heads, D their width, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from runtime.backends.transformers import attention
from runtime.backends.transformers.attention import BATCH, RaggedBatch
from runtime.backends.transformers.cuda.network import Geometry, Layer, Network, read_network
from runtime.backends.transformers.loading import choose_dtype, read_weights
from runtime.backends.transformers.network import take_aux, take_last
from runtime.backends.transformers.probe import decoder_layers, probe_model
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
        self._network = read_network(model, max_positions=1)  # its rotary module says more of positions than a table
        if self._network is None:
            layers = decoder_layers(model)
            for layer_id in self.layer_ids:
                layers[layer_id].register_forward_hook(take_aux(layer_id), with_kwargs=True)
            self._decoder.register_forward_hook(take_last, with_kwargs=True)

    @torch.no_grad()
    def __call__(self, token_ids: torch.Tensor, lengths: Sequence[int]) -> HiddenStates:
        """token_ids: int64 [T] of all rows, one behind the other, on any device; lengths: [R] of each, at least 1.
        States of all T positions, in the model's dtype and on its device."""
        sizes = np.array(lengths)
        offsets = np.append(0, sizes.cumsum())
        assert offsets[-1] == len(token_ids), "lengths are those of the rows"
        positions = np.arange(offsets[-1]) - offsets[:-1].repeat(sizes)
        places = _moved(torch.from_numpy(np.concatenate([positions, offsets])), self.device)
        ids, at = _moved(token_ids, self.device), places[: len(token_ids)]
        rows = PackedRows(offsets.tolist(), places[len(token_ids) :].int())
        if self._network is not None:
            return run(self._network, self._decoder.rotary_emb, rows, ids, at, self.layer_ids)  # type: ignore[arg-type]
        batch = RaggedBatch(rows)
        inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": at[None], BATCH: batch, "use_cache": False}
        self._decoder(**inputs)
        return batch.hidden(self.layer_ids)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for what the device does now."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda" and tensor.device.type == "cpu"
        else tensor.to(device)
    )


def run(
    network: Network, rotary: nn.Module, rows: PackedRows, ids: torch.Tensor, positions: torch.Tensor, layer_ids: Sequence[int]
) -> HiddenStates:
    """ids, positions: int64 [T]. The states of all positions: aux behind these layers. In place where nobody looks any more."""
    geometry, width = network.geometry, network.geometry.hidden
    h = F.embedding(ids, network.embedding)  # [T, H]
    cos, sin = (each[0, :, None] for each in rotary(h, positions[None]))  # [T, 1, D]
    half = geometry.head_dim // 2
    turns = cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    aux = h.new_empty(len(h), len(layer_ids) * width)
    for number, layer in enumerate(network.layers):
        _add_layer(h, layer, geometry, turns, rows, number)
        for place, layer_id in enumerate(layer_ids):
            if layer_id == number:
                aux[:, place * width : (place + 1) * width] = h
    return HiddenStates(aux, F.rms_norm(h, (width,), network.norm, geometry.eps))


def _add_layer(
    h: torch.Tensor, layer: Layer, geometry: Geometry, turns: tuple[torch.Tensor, torch.Tensor], rows: PackedRows, number: int
) -> None:
    """Add what a decoder layer adds to the residual stream h [T, H], in place. turns: cos and signed sin [T, 1, D]."""
    g, size = geometry, (len(h), -1, geometry.head_dim)
    num_turned = g.heads + g.kv_heads
    x = F.linear(F.rms_norm(h, (g.hidden,), layer.input_norm, g.eps), layer.qkv, layer.bias).view(size)  # [T, N + 2G, D]
    turned, v = x[:, :num_turned], x[:, num_turned:]
    if layer.q_norm is not None and layer.k_norm is not None:
        of_heads = ((turned[:, : g.heads], layer.q_norm), (turned[:, g.heads :], layer.k_norm))
        turned = torch.cat([F.rms_norm(heads, (g.head_dim,), gain, g.eps) for heads, gain in of_heads], dim=1)
    swapped = torch.cat(turned.chunk(2, dim=-1)[::-1], dim=-1)
    turned = turned.mul_(turns[0]).addcmul_(swapped, turns[1])
    seen = rows.attend(turned[:, : g.heads], turned[:, g.heads :], v, None, layer.window or None, None)  # [T, N, D]
    h.addmm_(seen.reshape(len(h), -1), layer.out.T)
    gate, up = F.linear(F.rms_norm(h, (g.hidden,), layer.mlp_norm, g.eps), layer.gate_up).chunk(2, dim=-1)
    h.addmm_(F.silu(gate).mul_(up), layer.down.T)


class PackedRows:
    """Implements `Attention`: causal within each row. offsets: [R+1] where the rows begin and end; on_device: int32 [R+1]."""

    def __init__(self, offsets: Sequence[int], on_device: torch.Tensor) -> None:
        self._offsets = offsets
        self._longest = max(stop - start for start, stop in pairwise(offsets))
        self._on_device = on_device

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
        return self.attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), scale, window, softcap)[None]

    def attend(
        self,
        q: torch.Tensor,  # [T, num_heads, key_dim]
        k: torch.Tensor,  # [T, num_kv_heads, key_dim]
        v: torch.Tensor,  # [T, num_kv_heads, value_dim]
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """[T, num_heads, value_dim]"""
        if q.is_cuda and q.dtype in HALF and softcap is None and _can_fuse(q.shape[2], v.shape[2]):
            return self.fused(q, k, v, scale, window)
        parts = []
        for start, stop in pairwise(self._offsets):
            q_row, k_row, v_row = (each[start:stop].transpose(0, 1) for each in (q, k, v))
            parts.append(attend_row(q_row, k_row, v_row, scale, window, softcap).transpose(0, 1))
        return torch.cat(parts)

    def fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: int | None) -> torch.Tensor:
        """As `attend`, in one call; of the inputs only the last axis must be contiguous."""
        sizes = (self._on_device, self._on_device, self._longest, self._longest)
        sight = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        out: torch.Tensor
        out, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, True, False, scale=scale, **sight)
        return out


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
