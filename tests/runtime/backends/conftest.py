"""A tiny model on disk and a plain Hugging Face copy of it to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.backends.base import FULL
from runtime.models import ResolvedModel, fingerprint, make_tiny
from runtime.types import CachePolicy

NUM_LAYERS = 8  # enough for three auxiliary layers below the last one: 1, 3, 4


@dataclass(frozen=True)
class Plain:
    """What the model itself says of one sequence, without any cache."""

    logits: torch.Tensor  # [S, V]
    aux: torch.Tensor  # [S, 3*Ht]
    last: torch.Tensor  # [S, Ht]


class Oracle:
    """The plain model, run over whole sequences."""

    def __init__(self, path: Path, aux_layer_ids: Sequence[int]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self._aux_layer_ids = aux_layer_ids

    @torch.no_grad()
    def __call__(self, token_ids: Sequence[int], policy: CachePolicy = FULL) -> Plain:
        at = torch.arange(len(token_ids))
        sees = at[:, None] >= at
        if policy.window is not None:
            sees &= (at < policy.sink) | (at > at[:, None] - policy.window)
        mask = torch.where(sees, 0.0, float("-inf"))[None, None]  # [1, 1, S, S]
        ids = torch.tensor([list(token_ids)])
        out = self._model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        aux = torch.cat([out.hidden_states[layer_id + 1][0] for layer_id in self._aux_layer_ids], dim=-1)
        return Plain(out.logits[0], aux, out.hidden_states[-1][0])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    path = make_tiny(tmp_path_factory.mktemp("tiny"), num_layers=NUM_LAYERS, max_position_embeddings=512)
    return ResolvedModel("tiny", path, fingerprint(path))


@pytest.fixture(scope="session")
def oracle(tiny: ResolvedModel) -> Oracle:
    return Oracle(tiny.path, aux_layer_ids=(1, 3, 4))
