"""Decoder layers of Llama's kind in fewer and larger steps: what makes a token cheap on a CPU.

q, k and v are one matrix, gate and up another, and each of the rest is one call where transformers makes several: between two
matrices, which have just driven all else out of the caches, a call takes some ten microseconds whatever it does. A layer is
replaced only if the new one says of a trial text what the old one says; every other model runs as transformers wrote it. The
arithmetic is the same but for the order of some sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from runtime.backends.transformers import attention
from runtime.backends.transformers.attention import BATCH, RaggedBatch
from runtime.backends.transformers.cuda.network import MODEL_TYPES, fuse
from runtime.backends.transformers.probe import decoder_layers
from runtime.norms import rms_norm

TOLERANCE = 1e-4  # of the trial, relative to the largest number
TRIAL_POSITIONS = [0, 1, 40]


Turns = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [1, T, D] of a forward's positions
Compute = Callable[[torch.Tensor], torch.Tensor]


class Parts(NamedTuple):
    """What a layer computes with: looking that up in modules takes as long as some of the steps."""

    qkv: Compute
    out: Compute
    gate_up: Compute
    down: Compute
    input_gain: torch.Tensor
    mlp_gain: torch.Tensor
    head_norms: tuple[Compute, Compute] | None  # of queries and keys


class FusedLayer(nn.Module):
    """One decoder layer: RMS norms, rotary halves, grouped queries, SwiGLU. Takes the weights of the layer that it replaces."""

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        old, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = old.layer_idx
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = old.head_dim
        self.scale: float = old.scaling
        # Mistral asks its config at each call; where layers differ, each knows its own window.
        self.window: int | None = getattr(
            old, "sliding_window", config.sliding_window if config.model_type == "mistral" else None
        )
        self.eps = torch.tensor(config.rms_norm_eps)
        self.input_norm, self.mlp_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.q_norm: nn.Module | None = getattr(old, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(old, "k_norm", None)
        self.qkv = _fused([old.q_proj, old.k_proj, old.v_proj])
        self.out = old.o_proj
        self.gate_up = _fused([mlp.gate_proj, mlp.up_proj])
        self.down = mlp.down_proj
        self.width: int = mlp.down_proj.in_features

    def parts(self) -> Parts:
        """What it computes with as it is now: packing replaces its linear layers."""
        head_norms = None
        if self.q_norm is not None and self.k_norm is not None:
            head_norms = self.q_norm.forward, self.k_norm.forward
        linears = self.qkv.forward, self.out.forward, self.gate_up.forward, self.down.forward
        return Parts(*linears, self.input_norm.detach(), self.mlp_norm.detach(), head_norms)

    def forward(self, hidden_states: torch.Tensor, *, position_embeddings: Turns, **kwargs: Any) -> torch.Tensor:
        """[1, T, H] -> [1, T, H], as transformers calls it."""
        return self.run(self.parts(), hidden_states, kwargs[BATCH], position_embeddings)

    def run(self, parts: Parts, hidden_states: torch.Tensor, batch: RaggedBatch, turns: Turns) -> torch.Tensor:
        """[1, T, H] -> [1, T, H]"""
        num_turned = self.num_heads + self.num_kv_heads
        qkv = parts.qkv(rms_norm(hidden_states, parts.input_gain, self.eps))
        heads = qkv.view(-1, num_turned + self.num_kv_heads, self.head_dim).transpose(0, 1)  # [heads + 2 kv_heads, T, D]
        turned = heads[:num_turned]
        if parts.head_norms is not None:
            of_q, of_k = parts.head_norms
            turned = torch.cat([of_q(turned[: self.num_heads]), of_k(turned[self.num_heads :])])
        turned = batch.rotate(turned, *turns)
        q, k, v = turned[: self.num_heads], turned[self.num_heads :], heads[num_turned:]
        seen = batch.attention(self.layer_idx, q, k, v, self.scale, self.window, None)  # [1, T, heads, D]
        h = parts.out(seen.flatten(2)).add_(hidden_states)
        both = parts.gate_up(rms_norm(h, parts.mlp_gain, self.eps))
        return parts.down(F.silu(both[..., : self.width]).mul_(both[..., self.width :])).add_(h)


def fuse_layers(model: PreTrainedModel) -> int:
    """Replace the decoder layers of a model of Llama's kind, in place; returns how many. Its attention becomes ours."""
    config: Any = model.config.get_text_config()
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        return 0
    attention.register()
    model.set_attn_implementation(attention.NAME)
    layers, decoder = decoder_layers(model), model.get_decoder()  # type: ignore[no-untyped-call]
    num_fused = 0
    for index, layer in enumerate(layers):
        fused = FusedLayer(layer, config)
        if _agree(layer, fused, decoder.rotary_emb, config.hidden_size):
            layers[index] = fused
            num_fused += 1
    return num_fused


def _fused(linears: list[Any]) -> nn.Linear:
    """One layer of all, whose weights become views of its own."""
    weight = fuse(linears)
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        fused.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return fused


@torch.inference_mode()
def _agree(old: nn.Module, new: FusedLayer, rotary: nn.Module, hidden_size: int) -> bool:
    """Whether both say the same of three tokens, and ask the same of their attention."""
    h = torch.randn(1, 3, hidden_size, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([TRIAL_POSITIONS])
    turns = rotary(h, positions)
    trials = TrialAttention(), TrialAttention()
    said = [
        layer(h, position_embeddings=turns, position_ids=positions, use_cache=False, **{BATCH: RaggedBatch(trial)})
        for layer, trial in zip((old, new), trials, strict=True)
    ]
    said = [one[0] if isinstance(one, tuple) else one for one in said]
    largest = float(said[0].abs().max())
    return trials[0].asked == trials[1].asked and float((said[0] - said[1]).abs().max()) <= TOLERANCE * largest


class TrialAttention:
    """An attention over the new tokens alone that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

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
        self.asked.append((layer, scale, window, softcap))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)
