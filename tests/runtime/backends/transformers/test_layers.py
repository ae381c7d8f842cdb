"""Fused layers say what transformers' own say, and take the place of no others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from runtime.backends.base import Segment
from runtime.backends.transformers.layers import FusedLayer, fuse_layers
from runtime.backends.transformers.probe import decoder_layers

ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
    "qwen3": {},
}
TEXT = [(7 * index) % 300 + 3 for index in range(24)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_with_fused_layers_gives_the_plain_model_s_logits(architecture, random_model) -> None:
    model = random_model(architecture, **ARCHITECTURES[architecture])
    fused = copy.deepcopy(model.plain)
    assert fuse_layers(fused) == 8
    assert all(isinstance(layer, FusedLayer) for layer in decoder_layers(fused))
    target = model.target()
    cache = target.new_cache()
    target.forward([Segment(cache, TEXT[:16])])
    target.commit(cache, range(16))
    [out] = target.forward([Segment(cache, TEXT[16:], num_logits=8)])
    torch.testing.assert_close(out.logits, model.logits(TEXT)[16:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("architecture", "fields"), [("gemma", {}), ("llama", {"hidden_act": "gelu"})])
def test_layers_of_another_kind_stay(architecture, fields, random_model) -> None:
    model = random_model(architecture, **fields).plain
    assert fuse_layers(model) == 0
    assert not any(isinstance(layer, FusedLayer) for layer in decoder_layers(model))


def test_a_layer_that_computes_something_else_stays_while_the_others_are_replaced(random_model) -> None:
    model = random_model("llama").plain
    decoder_layers(model)[3].mlp.act_fn = nn.ReLU()
    assert fuse_layers(model) == 7
    assert not isinstance(decoder_layers(model)[3], FusedLayer)


def test_biases_of_every_projection_are_kept(random_model) -> None:
    model = random_model("llama", attention_bias=True, mlp_bias=True)
    assert fuse_layers(copy.deepcopy(model.plain)) == 8
    target = model.target()
    [out] = target.forward([Segment(target.new_cache(), TEXT, num_logits=24)])
    torch.testing.assert_close(out.logits, model.logits(TEXT), atol=2e-4, rtol=1e-4)
