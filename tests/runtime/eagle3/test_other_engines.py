"""What is exported, in the draft networks of other projects themselves: they load every tensor, and draft what we draft.

They are no dependency, as they pin what is ours to choose; where they are not installed these tests skip.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from runtime.eagle3 import Eagle3Model, save
from runtime.eagle3.interchange import Dialect, Verifier, read_offered, write_as

pytestmark = pytest.mark.filterwarnings("default")  # of what is imported here

S = 12
VERIFIER = Verifier(None, "0123456789abcdef", ("LlamaForCausalLM",), num_layers=12)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def exported(model: Eagle3Model, directory: Path, dialect: Dialect) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config.json, tensors) as the dialect spells them."""
    save(model, directory / "ours", dtype=torch.float32)
    write_as(directory / dialect, read_offered(directory / "ours", model.embedding, VERIFIER), dialect, VERIFIER)
    config = json.loads((directory / dialect / "config.json").read_text())
    return config, load_file(directory / dialect / "model.safetensors")


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """aux [S, 3*Ht], token_ids [S], positions [S], a causal mask [1, 1, S, S] to add."""
    generator = torch.Generator().manual_seed(3)
    aux = torch.randn(S, 72, generator=generator)
    token_ids = torch.randint(50, (S,), generator=generator)
    mask = torch.full((S, S), torch.finfo(torch.float32).min).triu(1)[None, None]
    return aux, token_ids, torch.arange(S), mask


def drafted(model: Eagle3Model) -> tuple[torch.Tensor, torch.Tensor]:
    """(states [S, H], logits [S, Vd]) of our network."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    aux, token_ids, positions, _ = inputs()
    h = model.layer(token_ids, model.project(aux), positions, attend)
    return h, model.draft_logits(h)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"fc_norm": True}])
def test_specforge_drafts_the_same(make_model: Callable[..., Eagle3Model], tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = pytest.importorskip("specforge.modeling.draft.llama3_eagle", reason="specforge is not installed here")
    from transformers import LlamaConfig

    model = make_model(**changes)
    config, tensors = exported(model, tmp_path, Dialect.SGLANG)
    network = theirs.LlamaForCausalLMEagle3(LlamaConfig.from_dict(config), attention_backend="sdpa")
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], [])
    aux, token_ids, positions, mask = inputs()
    state = network.project_hidden_states(aux[None])
    h = network.backbone(model.embedding[token_ids][None], state, [[], []], mask, positions[None], None, False)
    ours, logits = drafted(model)
    torch.testing.assert_close(h[0], ours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(network.compute_logits(h)[0], logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
        {"rope_parameters": LLAMA3, "draft_vocab_size": 50},
    ],
)
def test_speculators_drafts_the_same(make_model: Callable[..., Eagle3Model], tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = pytest.importorskip("speculators.models.eagle3", reason="speculators is not installed here")
    model = make_model(**changes)
    raw, tensors = exported(model, tmp_path, Dialect.SPECULATORS)
    config = theirs.Eagle3SpeculatorConfig.from_dict(raw)
    config.transformer_layer_config._attn_implementation = "eager"
    network = theirs.Eagle3DraftModel(config)
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    assert unexpected == []
    assert set(missing) == {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert config.eagle_aux_hidden_state_layer_ids == [2, 3, 5]
    aux, token_ids, positions, mask = inputs()
    if network.fc_norm is not None:
        aux = torch.cat([norm(third) for norm, third in zip(network.fc_norm, aux.chunk(3, dim=-1), strict=True)], dim=-1)
    x = torch.cat([model.embedding[token_ids], network.fc(aux)], dim=-1)[None]
    rotary = network.rotary_emb(x, positions[None])
    h = network.layers[0](x, attention_mask=mask, position_ids=positions[None], position_embeddings=rotary)
    normed = network.norm(h)
    ours, logits = drafted(model)
    torch.testing.assert_close((normed if config.norm_output else h)[0], ours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(network.lm_head(normed)[0], logits, rtol=1e-5, atol=1e-5)
