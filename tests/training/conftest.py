"""Small drafters and rows of random features, the same for a given seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from training.batches import TrainingRow

from runtime.eagle3.config import Eagle3Config
from runtime.eagle3.model import Eagle3Model
from runtime.eagle3.vocab import DraftVocabulary
from runtime.features.row import FeatureRow
from runtime.hidden_states import HiddenStates

V, VD, HT = 40, 24, 16


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_model() -> Callable[..., Eagle3Model]:
    """A drafter with random weights whose vocabulary is every token but the first V - Vd."""

    def make(seed: int = 0, dtype: torch.dtype = torch.float64, **config: object) -> Eagle3Model:
        generator = torch.Generator().manual_seed(seed)
        values = {
            "hidden_size": HT,
            "intermediate_size": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": V,
            "draft_vocab_size": VD,
            "max_position_embeddings": 512,
        }
        embedding = torch.randn(V, HT, generator=generator, dtype=dtype)
        model = Eagle3Model(Eagle3Config(**(values | config)), DraftVocabulary(torch.arange(V - VD, V), V), embedding)
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        return model.to(dtype)

    return make


@pytest.fixture
def make_row() -> Callable[..., TrainingRow]:
    """A row of prompt and generated tokens: make_row("pppggg") or with several turns, "ppggppgg"."""

    def make(pattern: str, seed: int = 0, sample_id: str | None = None, low: int = 0) -> TrainingRow:
        generator = torch.Generator().manual_seed(1000 + seed)
        n = len(pattern) - 1
        features = FeatureRow(
            token_ids=torch.randint(low, V, (n + 1,), generator=generator),
            generated=torch.tensor([letter == "g" for letter in pattern]),
            hidden=HiddenStates(
                torch.randn(n, 3 * HT, generator=generator).bfloat16(), torch.randn(n, HT, generator=generator).bfloat16()
            ),
        )
        return TrainingRow(sample_id or f"row-{seed}", features)

    return make
