"""The drafter's config.json: what is written, the three dialects that are read, and what is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import pytest

from runtime.drafters.embedded import path_for
from runtime.eagle3 import Eagle3Config
from runtime.errors import DrafterRejected, ModelError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LAYER = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
SGLANG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    **LAYER,
    "draft_vocab_size": 100,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True},
}
VLLM: dict[str, Any] = {
    "architectures": ["Eagle3LlamaForCausalLM"],
    **LAYER,
    "draft_vocab_size": 100,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3"},
    "model_type": "speculator_model",
    "draft_vocab_size": 100,
    "norm_before_residual": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
    "transformer_layer_config": LAYER,
}


def test_a_drafter_for_a_target_takes_its_geometry() -> None:
    config = Eagle3Config.for_target(TARGET, 8192)
    assert config.head_dim == 64
    assert config.num_key_value_heads == 3
    assert config.aux_layer_ids == (1, 14, 26)
    assert config.max_position_embeddings == 8192
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config.vocab_size, config.draft_vocab_size, config.eos_token_id) == (49152, 8192, 2)


def test_an_old_targets_config_without_rope_has_llamas_default() -> None:
    target = {key: value for key, value in TARGET.items() if key not in ("rope_theta", "num_key_value_heads")}
    config = Eagle3Config.for_target(target, 8192, aux_layer_ids=(0, 1, 2))
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.num_key_value_heads == 9
    assert config.aux_layer_ids == (0, 1, 2)


def test_a_target_of_another_make_is_named() -> None:
    with pytest.raises(ModelError, match="lacks intermediate_size, num_hidden_layers"):
        Eagle3Config.for_target(TARGET | {"num_hidden_layers": None, "intermediate_size": None}, 8192)


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "norm_output": True}, {"rope_parameters": LLAMA3}])
def test_what_is_written_is_read_back(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(Eagle3Config.for_target(TARGET, 8192), **changes)
    assert Eagle3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_everything_a_server_reads_is_written() -> None:
    written = dataclasses.replace(Eagle3Config.for_target(TARGET, 8192), rope_parameters=LLAMA3).to_dict()
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 576,
        "target_hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "rope_parameters": LLAMA3,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "draft_vocab_size": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26], "use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],  # vLLM counts entrances
    }
    assert {key: written.get(key) for key in wanted} == wanted


def test_default_rope_has_no_scaling_in_the_old_dialect() -> None:
    assert Eagle3Config.for_target(TARGET, 8192).to_dict()["rope_scaling"] is None


def test_three_dialects_say_the_same() -> None:
    ours = Eagle3Config.from_dict(SGLANG)
    assert ours.aux_layer_ids == (1, 2, 4)
    assert Eagle3Config.from_dict(VLLM) == ours
    assert Eagle3Config.from_dict(SPECULATORS) == ours


def test_speculators_normalises_before_the_residual_unless_it_says_otherwise() -> None:
    silent = {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"}
    assert Eagle3Config.from_dict(silent).norm_before_residual
    assert not Eagle3Config.from_dict(SPECULATORS).norm_before_residual
    assert not Eagle3Config.from_dict(SGLANG).norm_before_residual


def test_the_embedded_drafters_config() -> None:
    path = path_for("smollm2-135m")
    assert path is not None
    config = Eagle3Config.from_dict(json.loads((path / "config.json").read_text()))
    assert config.aux_layer_ids == (1, 14, 26)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config.draft_vocab_size, config.max_position_embeddings) == (16384, 8192)
    assert Eagle3Config.from_dict(config.to_dict()) == config
    assert path_for("tiny") is None
    assert path_for("../embedded/smollm2-135m") is None


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 5.0, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5.0}),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0},
        ),
        ({"rope_parameters": {"rope_theta": 5.0}}, {"rope_type": "default", "rope_theta": 5.0}),
        ({"rope_theta": 5, "rope_parameters": {"rope_type": "default"}}, {"rope_type": "default", "rope_theta": 5}),
    ],
)
def test_rope_in_either_dialect(rope: dict[str, Any], expected: dict[str, Any]) -> None:
    raw = {key: value for key, value in SGLANG.items() if key != "rope_theta"} | rope
    assert Eagle3Config.from_dict(raw).rope_parameters == expected


@pytest.mark.parametrize(
    ("changes", "reason", "what"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "CONFIG", "architectures"),
        ({"architectures": None}, "CONFIG", "architectures"),
        ({"model_type": "qwen3"}, "CONFIG", "model_type"),
        ({"hidden_size": None}, "CONFIG", "hidden_size = None"),
        ({"hidden_size": "64"}, "CONFIG", "hidden_size = '64'"),
        ({"hidden_size": True}, "CONFIG", "hidden_size = True"),
        ({"intermediate_size": 0}, "CONFIG", "intermediate_size = 0"),
        ({"num_key_value_heads": 3}, "CONFIG", "num_key_value_heads = 3"),
        ({"head_dim": 15}, "CONFIG", "head_dim = 15"),
        ({"draft_vocab_size": 321}, "CONFIG", "draft_vocab_size = 321"),
        ({"rms_norm_eps": -1}, "CONFIG", "rms_norm_eps = -1"),
        ({"rms_norm_eps": math.inf}, "CONFIG", "rms_norm_eps = inf"),
        ({"rms_norm_eps": 10**400}, "CONFIG", "rms_norm_eps = 1000"),
        ({"max_position_embeddings": 2**31}, "CONFIG", "max_position_embeddings = 2147483648"),
        ({"num_hidden_layers": 2}, "CONFIG", "num_hidden_layers = 2"),
        ({"hidden_act": "gelu"}, "CONFIG", "hidden_act"),
        ({"attention_bias": True}, "CONFIG", "attention_bias"),
        ({"target_hidden_size": 128}, "CONFIG", "target_hidden_size = 128"),
        ({"norm_before_fc": True}, "CONFIG", "norm_before_fc"),
        ({"fc_norm": "yes"}, "CONFIG", "fc_norm = 'yes'"),
        ({"eagle_config": 3}, "CONFIG", "eagle_config = 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "CONFIG", "use_aux_hidden_state"),
        ({"rope_theta": None}, "ROPE", "neither"),
        ({"rope_theta": -1.0}, "ROPE", "rope_theta = -1.0"),
        ({"rope_theta": 10**400}, "ROPE", "rope_theta = 1000"),
        ({"rope_theta": "many"}, "ROPE", "rope_theta = 'many'"),
        ({"rope_scaling": "double"}, "ROPE", "rope_scaling = 'double'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "ROPE", "rope_type = 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "ROPE", "two different ropes"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "LAYER_IDS", "three ascending"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 2, 1]}}, "LAYER_IDS", "three ascending"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "LAYER_IDS", "three ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "LAYER_IDS", "two sets"),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "LAYER_IDS", "three ascending"),
    ],
)
def test_what_is_no_drafter_of_ours_is_refused_by_name(changes: dict[str, Any], reason: str, what: str) -> None:
    with pytest.raises(DrafterRejected, match=what) as caught:
        Eagle3Config.from_dict(copy.deepcopy(SGLANG) | changes)
    assert caught.value.reason == reason
