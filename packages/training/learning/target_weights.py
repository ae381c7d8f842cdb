"""The frozen parts of the target that training needs: embedding, output head, final norm. No forward pass, no backend.

They are read from the resolved model's safetensors and stay memory-mapped in the stored dtype: pages that are never touched
(embeddings of tokens that never occur) are never loaded. Tied heads are the embedding itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from runtime.errors import ModelError
from runtime.hidden_states import default_aux_layer_ids
from runtime.models import ResolvedModel
from runtime.models.fingerprint import read_header, read_json, weight_files

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True)
class TargetWeights:
    name: str
    fingerprint: str
    config: Mapping[str, Any]  # the target's config.json
    embedding: torch.Tensor  # [V, Ht]
    lm_head: torch.Tensor  # [V, Ht]
    final_norm: torch.Tensor  # [Ht]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def vocab_size(self) -> int:
        return int(self.embedding.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.embedding.shape[1])

    @property
    def aux_layer_ids(self) -> tuple[int, int, int]:
        return default_aux_layer_ids(int(self.config["num_hidden_layers"]))


def load_target_weights(resolved: ResolvedModel, device: torch.device) -> TargetWeights:
    """ModelError when a tensor is missing, or does not fit the others. On the CPU nothing is copied."""
    places = {name: file for file in weight_files(resolved.path) for name in read_header(file)[0]}
    config = read_json(resolved.path / "config.json")
    embedding = _read(places, EMBEDDING, resolved.path)
    is_tied = LM_HEAD not in places and config.get("tie_word_embeddings", False)
    lm_head = embedding if is_tied else _read(places, LM_HEAD, resolved.path)
    final_norm = _read(places, FINAL_NORM, resolved.path)
    if lm_head.shape != embedding.shape or final_norm.shape != embedding.shape[1:]:
        raise ModelError(
            f"{resolved.path} has an embedding of shape {list(embedding.shape)}, a head of {list(lm_head.shape)} and a final "
            f"norm of {list(final_norm.shape)}; a drafter needs a head of the embedding's shape and a norm of its width."
        )
    embedding = embedding.to(device)
    lm_head = embedding if is_tied else lm_head.to(device)
    return TargetWeights(resolved.name, resolved.fingerprint, config, embedding, lm_head, final_norm.to(device))


def _read(places: Mapping[str, Path], name: str, model: Path) -> torch.Tensor:
    if name not in places:
        raise ModelError(f"{model} has no tensor {name!r}; training knows models that name their weights as Llama does.")
    with safe_open(places[name], framework="pt", device="cpu") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor
