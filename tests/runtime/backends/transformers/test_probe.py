"""Models that we would compute wrongly are refused, each with what stood in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel, PreTrainedModel

from runtime.backends.transformers.loading import build
from runtime.backends.transformers.probe import probe_model
from runtime.errors import ModelError

SMALL = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def model_of(architecture: str, **fields: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **{**SMALL, **fields}))


def test_learns_the_shape_of_keys_and_values() -> None:
    shape = probe_model(model_of("llama"))
    assert (shape.num_layers, shape.num_kv_heads, shape.key_dim, shape.value_dim) == (4, 2, 8, 8)
    assert (shape.dtype, shape.device) == (torch.float32, torch.device("cpu"))
    assert shape.token_bytes == 4 * 2 * (8 + 8) * 4


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

REFUSED = {
    "sinks": ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "attends with s_aux"),
    "recurrent layers": ("mamba", {}, r"MambaForCausalLM has layers of kind \['linear_attention'\]"),
    "chunked attention": ("llama4_text", {"head_dim": 8}, r"has layers of kind \['chunked_attention'\]"),
    "no attention interface": ("bloom", {"n_layer": 4, "n_head": 4}, r"for layers \[\], not once for each of its 4 layers"),
    "keyword arguments dropped": ("stablelm", {}, "StableLmAttention does not hand keyword arguments"),
    "dynamic rotary scaling": ("llama", {"rope_parameters": DYNAMIC}, "scales its rotary positions by 'dynamic'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    architecture, fields, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        probe_model(model_of(architecture, **fields))


def test_refuses_a_model_without_a_head() -> None:
    model = LlamaModel(AutoConfig.for_model("llama", **SMALL))
    with pytest.raises(ModelError, match="LlamaModel has no output head"):
        build(model, name="headless", fingerprint="0", eos_token_ids=())
