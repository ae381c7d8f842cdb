"""What MLX can run and what it refuses, against transformers' own copy of the same random model."""

from __future__ import annotations

import builtins
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlx import nn as nn_mlx
from mlx_lm.utils import load_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runtime.backends import load_target
from runtime.backends.base import Segment, Target
from runtime.config import BackendConfig, Dtype, ModelConfig, Numerics
from runtime.errors import ConfigError, ModelError
from runtime.models import ResolvedModel

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXT = torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(5)).tolist()

MakeModel = Callable[..., tuple[PreTrainedModel, ResolvedModel]]


@pytest.fixture
def make(tiny: ResolvedModel, tmp_path: Path) -> MakeModel:
    """A random model in memory, and the same on disk with the tiny model's tokenizer."""

    def make(architecture: str, **fields: Any) -> tuple[PreTrainedModel, ResolvedModel]:
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **{**SIZES, **fields})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1, mean=1.0 if parameter.dim() == 1 else 0.0)
        model.save_pretrained(tmp_path)
        for file in tiny.path.iterdir():
            if not (tmp_path / file.name).exists():
                shutil.copy(file, tmp_path)
        return model, ResolvedModel(architecture, tmp_path, "0")

    return make


def load(resolved: ResolvedModel, **model: Any) -> Target:
    return load_target(BackendConfig(name="mlx"), ModelConfig(**model), resolved)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama, all heads their own": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama, rope base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}),
    "llama, rope scaling": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0] * 2}),
    "gemma3": ("gemma3_text", {"sliding_window": 12, "query_pre_attn_scalar": 16}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_run_as_transformers_runs_it(make: MakeModel, family: str) -> None:
    architecture, fields = FAMILIES[family]
    model, resolved = make(architecture, **fields)
    target = load(resolved)
    cache = target.new_cache()
    logits = []
    for start, end in ((0, 50), (50, 51), (51, 85)):
        [output] = target.forward([Segment(cache, TEXT[start:end], num_logits=end - start)])
        target.commit(cache, range(end - start))
        logits.append(output.logits)
    [tree] = target.forward([Segment(cache, [TEXT[85], 9, TEXT[86], 8], [-1, -1, 0, 1], num_logits=4)])
    with torch.no_grad():
        expected = model(torch.tensor([TEXT[:87]])).logits[0]
        other = model(torch.tensor([[*TEXT[:85], 9, 8]])).logits[0]
    for actual, wanted in (
        (torch.cat(logits), expected[:85]),
        (tree.logits[[0, 2]], expected[85:]),
        (tree.logits[[1, 3]], other[85:]),
    ):
        assert (actual - wanted).abs().max() < 1e-4 * expected.abs().max()


def test_the_embedding_is_shared_and_the_head_is_its_own_where_untied(make: MakeModel) -> None:
    model, resolved = make("llama", tie_word_embeddings=False)
    target = load(resolved)
    torch.testing.assert_close(target.embedding, model.get_input_embeddings().weight, atol=0, rtol=0)
    torch.testing.assert_close(target.lm_head, model.get_output_embeddings().weight, atol=0, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_model_is_run_and_its_embedding_and_head_are_plain(make: MakeModel, tied: bool) -> None:
    _, resolved = make("llama", tie_word_embeddings=tied)
    plain = load(resolved)
    model, _ = load_model(resolved.path)
    nn_mlx.quantize(model, group_size=32, bits=8)
    model.save_weights(str(resolved.path / "model.safetensors"))
    _change_config(resolved.path, quantization={"group_size": 32, "bits": 8})
    target = load(resolved)
    [output] = target.forward([Segment(target.new_cache(), TEXT, num_logits=len(TEXT))])
    [expected] = plain.forward([Segment(plain.new_cache(), TEXT, num_logits=len(TEXT))])
    off = (output.logits - expected.logits).abs().max() / expected.logits.abs().max()
    assert 1e-4 < off < 0.1  # 8 bits are not 32
    for mine, theirs in ((target.embedding, plain.embedding), (target.lm_head, plain.lm_head)):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() < 0.01 * theirs.abs().max()
    torch.testing.assert_close(output.hidden.last @ target.lm_head.T, output.logits, rtol=0, atol=1e-3)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no such model of mlx-lm": (
        "gpt_neox_japanese",
        {},
        "mlx-lm cannot load the model in .*: Model type gpt_neox_japanese not supported",
    ),
    "recurrent layers": ("mamba", {"state_size": 4}, "cannot run mamba, a mamba model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused(make: MakeModel, case: str) -> None:
    architecture, fields, message = REFUSED[case]
    _, resolved = make(architecture, **fields)
    with pytest.raises(ModelError, match=message):
        load(resolved)


def _change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_weights_that_are_missing_are_refused(make: MakeModel) -> None:
    _, resolved = make("llama")
    _change_config(resolved.path, num_hidden_layers=9)
    with pytest.raises(ModelError, match=r"mlx-lm cannot load the model in .*: Missing \d+ parameters"):
        load(resolved)


def test_a_model_without_a_context_length_is_refused(make: MakeModel) -> None:
    _, resolved = make("llama")
    _change_config(resolved.path, max_position_embeddings=None)
    with pytest.raises(ModelError, match="does not say max_position_embeddings"):
        load(resolved)


def test_positions_that_come_out_wrong_are_noticed(make: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial at loading: a model of mlx-lm may do something that our taking over misses."""
    from runtime.backends.mlx import model

    monkeypatch.setattr(model, "depths", lambda parents, size: [0] * size)
    _, resolved = make("llama")
    with pytest.raises(ModelError, match=r"its logits differ by .* of the largest from mlx-lm's own"):
        load(resolved)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": Dtype.BFLOAT16}, r"model\.dtype is 'bfloat16'; the mlx backend computes in float32"),
        ({"device": "cuda"}, r"model\.device is 'cuda'; with the mlx backend it must be auto"),
    ],
    ids=["dtype", "device"],
)
def test_a_setting_that_mlx_does_not_know_is_refused(tiny: ResolvedModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tiny, **settings)


def test_invariant_numerics_are_refused(tiny: ResolvedModel) -> None:
    with pytest.raises(ConfigError, match=r"backend\.numerics is 'invariant'; the mlx backend knows only default"):
        load_target(BackendConfig(name="mlx", numerics=Numerics.INVARIANT), ModelConfig(), tiny)


def test_a_program_that_computed_on_several_threads_ends_well() -> None:
    program = """
from threading import Thread
from runtime.backends import load_target
from runtime.backends.base import Segment
from runtime.config import BackendConfig, ModelConfig
from runtime.models import resolve

def compute():
    target.forward([Segment(target.new_cache(), [1, 2, 3])])

target = load_target(BackendConfig(name="mlx"), ModelConfig(name="tiny"), resolve("tiny"))
compute()
other = Thread(target=compute)
other.start()
other.join()
del target
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_without_the_extra_its_name_is_told(tiny: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    really_import = builtins.__import__

    def without_mlx(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] in ("mlx", "mlx_lm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return really_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_mlx)
    for name in [name for name in sys.modules if name.startswith("runtime.backends.mlx")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"backend\.name is 'mlx', but MLX cannot be imported .*; install slipstream\[mlx\]"):
        load(tiny)
