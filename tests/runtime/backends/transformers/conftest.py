"""Random models of several architectures, their plain copies and targets of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runtime.backends.base import Target
from runtime.backends.transformers.loading import build
from runtime.types import CachePolicy

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class RandomModel:
    """A model of an architecture, with weights large enough that every part of it shows in its logits, and its target."""

    def __init__(self, architecture: str, **fields: Any) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **{**COMMON, **fields})
        self.plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in self.plain.parameters():
            nn.init.normal_(parameter, std=0.1, mean=1.0 if parameter.dim() == 1 else 0.0)

    def target(self, **fields: Any) -> Target:
        """Built from a copy: what is built of a model takes it apart."""
        model: PreTrainedModel = copy.deepcopy(self.plain)
        return build(model, name="random", fingerprint="0", eos_token_ids=(2,), **fields)

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], policy: CachePolicy = CachePolicy()) -> torch.Tensor:  # noqa: B008
        """[S, V] of the plain model, densely, under a mask written out from what the policy and the layers say."""
        size = len(token_ids)
        config = self.plain.config
        row = torch.arange(size)
        ago = row[:, None] - row[None, :]
        sees = ago >= 0
        if policy.window is not None:
            sees &= (ago < policy.window) | (row[None, :] < policy.sink)
        window = getattr(config, "sliding_window", None)
        masks = {"full_attention": sees, "sliding_attention": sees & (ago < window) if window else sees}
        floats = {name: torch.where(mask, 0.0, float("-inf"))[None, None] for name, mask in masks.items()}
        kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
        mask = floats[kinds.pop()] if len(kinds) == 1 else floats
        logits: torch.Tensor = self.plain(torch.tensor([list(token_ids)]), attention_mask=mask, use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="session")
def random_model() -> Callable[..., RandomModel]:
    return RandomModel
