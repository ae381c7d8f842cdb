"""The frozen parts of a target, tied and untied, and targets that cannot teach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.models import ResolvedModel, make_tiny
from training.learning.target_weights import load_target_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("tie", [True, False])
def test_weights_are_the_models_own(tmp_path: Path, tie: bool) -> None:
    make_tiny(tmp_path, hidden_size=32, tie=tie)
    stored = load_file(tmp_path / "model.safetensors")
    weights = load_target_weights(ResolvedModel("tiny", tmp_path, "f"), CPU)
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head, stored["model.embed_tokens.weight" if tie else "lm_head.weight"])
    assert (weights.lm_head is weights.embedding) == tie
    assert torch.equal(weights.final_norm, stored["model.norm.weight"])
    assert (weights.vocab_size, weights.hidden_size, weights.aux_layer_ids) == (320, 32, (0, 2, 5))


def test_a_model_with_other_names_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["transformer.ln_f.weight"] = stored.pop("model.norm.weight")
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor 'model.norm.weight'"):
        load_target_weights(ResolvedModel("tiny", tmp_path, "f"), CPU)


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path, tie=False)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["lm_head.weight"][:100].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"a head of \[100, 64\]"):
        load_target_weights(ResolvedModel("tiny", tmp_path, "f"), CPU)
