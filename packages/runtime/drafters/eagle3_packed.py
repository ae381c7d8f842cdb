"""The draft network in fewer and larger steps, for a CPU that holds its weights packed: q, k and v are one matrix, gate and up
another. A level of a draft is so small that each call counts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from runtime.eagle3.model import Attend, Attention, Eagle3Model, SwiGLU, rotate
from runtime.linear import can_pack, pack_linears


def pack(model: Eagle3Model) -> None:
    """In place, where this machine can: the same function up to rounding, which a guess may have; it has no gradient any more."""
    if not can_pack(model.lm_head.weight):
        return
    layer = model.midlayer
    layer.self_attn, layer.mlp = FusedAttention(layer.self_attn), FusedSwiGLU(layer.mlp)  # type: ignore[assignment]
    pack_linears(model, halve=True)


class FusedAttention(nn.Module):
    """As `Attention`."""

    def __init__(self, old: Attention) -> None:
        super().__init__()
        self.head_dim = old.head_dim
        self.num_heads = old.q_proj.out_features // old.head_dim
        self.num_kv_heads = old.k_proj.out_features // old.head_dim
        self.qkv_proj = _joined(old.q_proj, old.k_proj, old.v_proj)
        self.o_proj = old.o_proj

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        q, k, v = self._project(x, cos, sin)
        return self.o_proj(attend(q, k, v).flatten(-2))  # type: ignore[no-any-return]

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, k, v = self._project(x, cos, sin)
        return k, v

    def _project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., heads + 2 * kv_heads, D]
        turned, v = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=-2)
        q, k = torch.split(rotate(turned, cos, sin), [self.num_heads, self.num_kv_heads], dim=-2)
        return q, k, v


class FusedSwiGLU(nn.Module):
    """As `SwiGLU`."""

    def __init__(self, old: SwiGLU) -> None:
        super().__init__()
        self.gate_up_proj = _joined(old.gate_proj, old.up_proj)
        self.down_proj = old.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One layer that gives what these give, one behind the other."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    return joined
