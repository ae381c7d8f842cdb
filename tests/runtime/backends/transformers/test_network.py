"""A forward past transformers' own loop says what that loop says, and takes its place nowhere else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from runtime.backends.transformers.attention import RaggedBatch
from runtime.backends.transformers.layers import TrialAttention, fuse_layers
from runtime.backends.transformers.network import FusedNetwork, HookedNetwork, network_of
from runtime.backends.transformers.probe import decoder_layers
from runtime.hidden_states import HiddenStates
from runtime.linear import pack_linears

ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
    "qwen3": {},
}
AUX = (2, 4, 5)
TOKENS, POSITIONS = [5, 9, 200, 7], [0, 1, 2, 30]


def fused_model(plain: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(plain)
    assert fuse_layers(model) == 8
    pack_linears(model)
    return model


@torch.inference_mode()
def run(network: HookedNetwork | FusedNetwork, rows: list[int]) -> tuple[torch.Tensor | None, HiddenStates]:
    batch = RaggedBatch(TrialAttention())
    return network(TOKENS, POSITIONS, rows, batch), batch.hidden(AUX)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3], []], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_states_are_those_of_transformers(architecture: str, rows: list[int], random_model) -> None:
    plain = random_model(architecture, **ARCHITECTURES[architecture]).plain
    network = network_of(fused_model(plain), AUX)
    assert isinstance(network, FusedNetwork)
    logits, hidden = run(network, rows)
    expected, states = run(HookedNetwork(copy.deepcopy(plain), AUX), rows)
    torch.testing.assert_close(hidden.aux, states.aux, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(hidden.last, states.last, atol=2e-4, rtol=1e-4)
    assert (logits is None) == (expected is None) == (not rows)
    if logits is not None:
        assert logits.shape == (len(rows), plain.config.vocab_size)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_a_model_with_a_layer_of_its_own_goes_transformers_way(random_model) -> None:
    model = random_model("llama").plain
    decoder_layers(model)[3].mlp.act_fn = nn.ReLU()
    assert fuse_layers(model) == 7
    assert isinstance(network_of(model, AUX), HookedNetwork)


def test_so_does_one_that_computes_something_else_between_its_layers(random_model) -> None:
    model = fused_model(random_model("llama").plain)
    model.get_decoder().norm.register_forward_hook(lambda _module, _args, output: 2 * output)
    assert isinstance(network_of(model, AUX), HookedNetwork)


def test_where_the_hooks_are_not_needed_none_stay(random_model) -> None:
    model = fused_model(random_model("llama").plain)
    network_of(model, AUX)
    assert not any(module._forward_hooks for module in model.modules())
