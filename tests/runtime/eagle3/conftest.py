"""A small drafter whose every size differs from the others, so that a mixed-up axis shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model

CONFIG = Eagle3Config(
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,  # heads * head_dim is not the hidden size, on purpose
    vocab_size=50,
    draft_vocab_size=20,
    max_position_embeddings=128,
    aux_layer_ids=(1, 2, 4),
    bos_token_id=3,
    eos_token_id=4,
    pad_token_id=5,
)


@pytest.fixture
def make_model() -> Callable[..., Eagle3Model]:
    """A drafter with random weights, every norm included; keyword arguments change its config."""

    def make(seed: int = 0, **changes: Any) -> Eagle3Model:
        config = dataclasses.replace(CONFIG, **changes)
        generator = torch.Generator().manual_seed(seed)
        counts = torch.rand(config.vocab_size, generator=generator)
        embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
        model = Eagle3Model(config, DraftVocabulary.from_token_counts(counts, config.draft_vocab_size), embedding)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
                offset = 0.0 if parameter.ndim == 2 else 1.0
                parameter.copy_(offset + scale * torch.randn(parameter.shape, generator=generator))
        return model

    return make
