"""`Eagle3Model`: the draft network, one definition for training and for serving.

It knows neither batches nor caches: whoever calls it says how a query attends (`Attend`), so that a trainer's unrolled mask
and a server's K/V cache run the same arithmetic. Parameter names are the checkpoint's.

One step at position p, drafting depth k (x the tokens, h the state, h_0 = project(aux[p])):

    x[p+1+k], h_k  ->  layer  ->  h_{k+1}  ->  draft_logits  ->  a guess of x[p+2+k]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from runtime.eagle3.config import Eagle3Config
from runtime.eagle3.reasons import RejectReason, rejected
from runtime.eagle3.vocab import DraftVocabulary

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [..., heads, D], k [..., kv_heads, D], v [..., kv_heads, D] -> [..., heads, D]; q and k are rotated already."""


class Eagle3Model(nn.Module):
    """The embedding is the target's own: shared, frozen, in no state_dict, and not moved by `to`."""

    embedding: torch.Tensor

    def __init__(self, config: Eagle3Config, vocabulary: DraftVocabulary, embedding: torch.Tensor) -> None:
        """embedding: [V, Ht]."""
        super().__init__()
        if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
            raise ValueError(
                f"The embedding has shape {list(embedding.shape)}; the drafter needs [{config.vocab_size}, {config.hidden_size}]."
            )
        if (len(vocabulary), vocabulary.vocab_size) != (config.draft_vocab_size, config.vocab_size):
            raise ValueError(
                f"The vocabulary maps {len(vocabulary)} of {vocabulary.vocab_size} tokens; the config says "
                f"{config.draft_vocab_size} of {config.vocab_size}."
            )
        self.config = config
        self.vocabulary = vocabulary
        self.embedding = embedding.detach()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc_norm = nn.ModuleList(nn.RMSNorm(hidden, eps=eps) for _ in range(3)) if config.fc_norm else None
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = DecoderLayer(config)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """aux [..., 3*Ht] (low, mid, high) -> h_0 [..., H]."""
        aux = aux.to(self.norm.weight.dtype)
        if self.fc_norm is not None:
            thirds = aux.chunk(3, dim=-1)
            aux = torch.cat([norm(third) for norm, third in zip(self.fc_norm, thirds, strict=True)], dim=-1)
        return self.fc(aux)  # type: ignore[no-any-return]

    def layer(self, token_ids: torch.Tensor, h: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """token_ids [...] (target ids, one ahead of h), h [..., H], positions [...] -> the next state [..., H]."""
        embedded = F.embedding(token_ids, self.embedding).to(h.dtype)  # [..., H]
        cos, sin = self.rotary(positions, h.dtype)
        h = self.midlayer(embedded, h, cos, sin, attend)
        return self.norm(h) if self.config.norm_output else h

    def keys_values(self, token_ids: torch.Tensor, h: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The k and v that `layer` would hand to `attend`, where nothing is drafted and only they are needed."""
        embedded = F.embedding(token_ids, self.embedding).to(h.dtype)  # [..., H]
        cos, sin = self.rotary(positions, h.dtype)
        x = self.midlayer.attention_input(embedded, self.midlayer.hidden_norm(h))  # [..., 2H]
        return self.midlayer.self_attn.keys_values(x, cos, sin)

    def draft_logits(self, h: torch.Tensor) -> torch.Tensor:
        """A state out of `layer` [..., H] -> logits over the draft vocabulary [..., Vd]."""
        return self.lm_head(h if self.config.norm_output else self.norm(h))  # type: ignore[no-any-return]

    @torch.no_grad()
    def init_from_target(
        self,
        lm_head: torch.Tensor,
        final_norm: torch.Tensor | None,
        generator: torch.Generator,
        aux_rms: torch.Tensor | None = None,
    ) -> None:
        """Start training here: the target's head rows [V, Ht] and final norm [Ht], the rest N(0, 1/fan_in).

        aux_rms [3*Ht]: root mean square of each auxiliary channel, folded into fc so that a few huge channels do not drown
        the others.
        """
        self.lm_head.weight.copy_(lm_head[self.vocabulary.target_ids.to(lm_head.device)])
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, nn.Linear) and module is not self.lm_head:
                noise = torch.randn(module.weight.shape, generator=generator) / module.in_features**0.5
                module.weight.copy_(noise)
        if final_norm is not None:
            self.norm.weight.copy_(final_norm)
        if aux_rms is not None:
            self.fc.weight.div_(aux_rms.to(self.fc.weight.device).clamp_min(1e-6))


class DecoderLayer(nn.Module):
    """r = h; x = [norm(embedding), norm(h)]; h = r + attention(x); h = h + mlp(norm(h))."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size)

    def forward(
        self, embedded: torch.Tensor, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        normed = self.hidden_norm(h)
        residual = normed if self.norm_before_residual else h
        h = residual + self.self_attn(self.attention_input(embedded, normed), cos, sin, attend)
        return h + self.mlp(self.post_attention_layernorm(h))  # type: ignore[no-any-return]

    def attention_input(self, embedded: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """[..., 2H], embedding first."""
        return torch.cat([self.input_layernorm(embedded), normed], dim=-1)


class Attention(nn.Module):
    """Projections and rotary positions; the attending itself is the caller's."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, q_size = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * hidden, q_size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., heads, D]
        k, v = self.keys_values(x, cos, sin)
        out = attend(rotate(q, cos, sin), k, v)  # [..., heads, D]
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k (rotated) and v, each [..., kv_heads, D]."""
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(k, cos, sin), v


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """Cosines and sines of positions. Frequencies stay in float32 whatever the model is cast to."""

    frequencies: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.frequencies, self.scale = _frequencies(config)  # [D/2]

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [...] -> cos, sin, each [..., 1, D], to be applied to [..., heads, D]."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].float() * self.frequencies  # [..., D/2]
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]  # [..., 1, D]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions in the half-split form of Llama: pairs (i, i + D/2)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def _frequencies(config: Eagle3Config) -> tuple[torch.Tensor, float]:
    rope = dict(config.rope_parameters)
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        like_target = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=rope,
        )
        with torch.device("cpu"):
            embedding = LlamaRotaryEmbedding(like_target)
    except Exception as error:  # settings of any kind and size go into code that is not ours
        raise rejected(RejectReason.ROPE, f"The drafter's rope {rope} cannot be computed ({error}).") from error
    return embedding.inv_freq.float(), float(embedding.attention_scaling)
