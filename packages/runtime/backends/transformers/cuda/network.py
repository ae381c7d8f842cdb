"""The weights of a Llama-like Hugging Face model, fused for the kernels: q, k and v in one matrix, gate and up in another.

Llama, Mistral, Qwen2, Qwen3 and the like: RMS norms, rotary halves, grouped queries, SwiGLU, optionally a bias on q, k and v
or a norm on each head of q and k, optionally a sliding window by layer. `read_network` says None of anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from runtime.backends.transformers.probe import decoder_layers

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Geometry:
    """Sizes that the kernels are compiled for."""

    hidden: int  # H
    heads: int
    kv_heads: int
    head_dim: int  # D
    intermediate: int  # I
    eps: float

    @property
    def can_run(self) -> bool:
        """Whether the kernels take these sizes: heads of a power of two, whole groups."""
        d = self.head_dim
        return 16 <= d <= 256 and d & (d - 1) == 0 and self.heads % self.kv_heads == 0


@dataclass(frozen=True)
class Layer:
    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * D, H]; a draft layer's is twice as wide, the embedding's part first
    bias: torch.Tensor | None  # as many as qkv has rows
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None
    out: torch.Tensor  # [H, heads * D]
    mlp_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2I, H], gate first
    down: torch.Tensor  # [H, I]
    window: int = 0  # the layer's own sliding window; 0: none
    embedding_norm: torch.Tensor | None = None  # [H] of a draft layer


@dataclass(frozen=True)
class Network:
    geometry: Geometry
    embedding: torch.Tensor  # [V, H]
    layers: list[Layer]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H]
    cos: torch.Tensor  # float32 [max_positions, D/2]
    sin: torch.Tensor


def read_network(model: PreTrainedModel, max_positions: int) -> Network | None:
    """The network of a model on its device; None if it is not of this kind. The model must not be run afterwards.

    Fused matrices replace the model's own, so that no weight is held twice.
    """
    config: Any = model.config.get_text_config()
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
        return None
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    geometry = Geometry(
        config.hidden_size, heads, config.num_key_value_heads, head_dim, config.intermediate_size, config.rms_norm_eps
    )
    layers: list[Any] = list(decoder_layers(model))
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    if not geometry.can_run or any(layer.self_attn.o_proj.bias is not None for layer in layers):
        return None
    cos, sin = _rotary(decoder.rotary_emb, max_positions, model.device)
    if cos.shape[1] != head_dim // 2:
        return None
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return Network(
        geometry,
        embedding.weight.detach(),
        [_read_layer(layer, config) for layer in layers],
        decoder.norm.weight.detach(),
        head.weight.detach(),
        cos,
        sin,
    )


def _rotary(rotary: nn.Module, max_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as the model itself makes them, in float32; both halves of a head turn alike."""
    positions = torch.arange(max_positions, device=device)[None]
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def _read_layer(layer: Any, config: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    # Mistral asks its config at each call; where layers differ, each knows its own window.
    window = getattr(attention, "sliding_window", config.sliding_window if config.model_type == "mistral" else None)
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [projection.bias for projection in projections]
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=fuse(projections),
        bias=None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
        out=attention.o_proj.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=fuse([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj.weight.detach(),
        window=window or 0,
    )


def fuse(linears: list[Any]) -> torch.Tensor:
    """One matrix of all, of which each becomes a view."""
    fused = torch.cat([linear.weight.detach() for linear in linears])
    rows = torch.split(fused, [linear.out_features for linear in linears])
    for linear, weight in zip(linears, rows, strict=True):
        linear.weight = nn.Parameter(weight, requires_grad=False)
    return fused
