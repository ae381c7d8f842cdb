"""The weights of an EAGLE3 draft network in fused form, in buffers that a swap writes into.

Graphs hold the addresses of these buffers, so another drafter of the same sizes takes effect at the next replay and nothing is
captured again. One with other sizes, or of a variant that the kernels do not know, is refused and drafts outside the graphs.
"""

from __future__ import annotations

import dataclasses

import torch

from runtime.backends.transformers.cuda.network import Geometry, Layer
from runtime.eagle3.model import Eagle3Model

VARIANTS = ("fc_norm", "norm_before_residual", "norm_output")


class DraftNetwork:
    def __init__(self, model: Eagle3Model, dtype: torch.dtype, device: torch.device) -> None:
        assert can_fuse(model)
        self.geometry = _geometry(model)
        self.fc, self.layer, self.norm, self.head, self.ids_of, self.cos, self.sin = _read(model, dtype, device)

    def fits(self, model: Eagle3Model) -> bool:
        """Whether `load` can take this one."""
        same_sizes = can_fuse(model) and _geometry(model) == self.geometry
        return same_sizes and model.lm_head.weight.shape == self.head.shape and len(self.cos) == _num_positions(model)

    def load(self, model: Eagle3Model) -> None:
        """Take another network's weights, where these lie."""
        fc, layer, *rest = _read(model, self.fc.dtype, self.fc.device)
        self.fc.copy_(fc)
        for mine, theirs in zip((self.norm, self.head, self.ids_of, self.cos, self.sin), rest, strict=True):
            mine.copy_(theirs)
        for field in dataclasses.fields(Layer):
            mine, theirs = getattr(self.layer, field.name), getattr(layer, field.name)
            if isinstance(mine, torch.Tensor):
                mine.copy_(theirs)


def can_fuse(model: Eagle3Model) -> bool:
    """Whether the kernels know this network: sizes they take, none of the variants."""
    return _geometry(model).can_run and not any(getattr(model.config, variant) for variant in VARIANTS)


def _geometry(model: Eagle3Model) -> Geometry:
    config = model.config
    sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size
    return Geometry(config.hidden_size, *sizes, config.rms_norm_eps)


def _num_positions(model: Eagle3Model) -> int:
    return model.config.max_position_embeddings


def _read(
    model: Eagle3Model, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Layer, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """fc [H, 3H], the layer, norm [H], head [Vd, H], ids [Vd] of the draft vocabulary, cos and sin [positions, D/2]."""

    def take(*weights: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight.detach() for weight in weights]).to(device, dtype)

    mid = model.midlayer
    attention, mlp = mid.self_attn, mid.mlp
    layer = Layer(
        input_norm=take(mid.hidden_norm.weight),
        qkv=take(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        bias=None,
        q_norm=None,
        k_norm=None,
        out=take(attention.o_proj.weight),
        mlp_norm=take(mid.post_attention_layernorm.weight),
        gate_up=take(mlp.gate_proj.weight, mlp.up_proj.weight),
        down=take(mlp.down_proj.weight),
        embedding_norm=take(mid.input_layernorm.weight),
    )
    half = model.config.head_dim // 2
    cos, sin = model.rotary(torch.arange(_num_positions(model), device=device), torch.float32)
    rotary = cos[:, 0, :half].contiguous(), sin[:, 0, :half].contiguous()
    ids = model.vocabulary.target_ids.to(device)
    return take(model.fc.weight), layer, take(model.norm.weight), take(model.lm_head.weight), ids, *rotary
