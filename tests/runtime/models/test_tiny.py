"""The tiny model: the same in every process, readable by transformers, bytes for a vocabulary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from runtime.errors import InvalidRequest
from runtime.models import Tokenizer, fingerprint, make_tiny


def test_the_same_arguments_give_the_same_model_in_every_process(own_home: Path, tiny_path: Path, tmp_path: Path) -> None:
    script = f"from pathlib import Path; from runtime.models import make_tiny; make_tiny(Path({str(tmp_path / 'again')!r}))"
    subprocess.run([sys.executable, "-c", script], check=True)
    for file in tiny_path.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    assert fingerprint(tiny_path) == fingerprint(tmp_path / "again")


def test_another_seed_is_another_model(own_home: Path, tiny_path: Path, tmp_path: Path) -> None:
    assert fingerprint(make_tiny(tmp_path / "other", seed=1)) != fingerprint(tiny_path)


@pytest.mark.parametrize("tie", [True, False])
def test_it_loads_whole_into_transformers(tmp_path: Path, tie: bool) -> None:
    path = make_tiny(tmp_path, tie=tie, vocab_size=300, num_layers=3, hidden_size=48, num_heads=6, num_kv_heads=3)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tie
    assert model.config.vocab_size == 300
    assert model.generation_config.eos_token_id == 257


def test_its_choices_depend_on_the_text(tiny_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_path)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (8, 12), generator=generator)
    with torch.no_grad():
        logits = model(prompts).logits
    assert len(set(logits[:, -1].argmax(-1).tolist())) >= 4
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second).median() > 0.05  # well above the noise of float32, so greedy tests are not about ties


def test_the_tokenizer_is_bytes(tiny_tokenizer: Tokenizer) -> None:
    text = "plain, ünïcode, 漢字 and 👩‍🚀\n"
    assert tiny_tokenizer.encode(text) == list(text.encode())
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text
    assert tiny_tokenizer.encode("<|im_start|>a<|im_end|>") == [256, 97, 257]
    assert tiny_tokenizer.vocab_size == 320
    assert tiny_tokenizer.eos_token_ids == (257,)
    assert tiny_tokenizer.decode([259, 260]) == "aaab"


def test_the_template_takes_three_roles(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [256, *b"user\nhi", 257, 10, 256, *b"assistant\n"]
    with pytest.raises(InvalidRequest, match="not wizard"):
        tiny_tokenizer.encode_chat([{"role": "wizard", "content": "hi"}])


@pytest.mark.parametrize("sizes", [{"vocab_size": 258}, {"vocab_size": 10_000}, {"num_heads": 3}, {"num_kv_heads": 3}])
def test_impossible_sizes_are_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"lies in|evenly"):
        make_tiny(tmp_path, **sizes)  # type: ignore[arg-type]


def test_weights_are_float32_and_named_as_transformers_names_them(tiny_path: Path) -> None:
    tensors = load_file(tiny_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert "lm_head.weight" not in tensors
    assert tensors["model.layers.5.self_attn.k_proj.weight"].shape == (32, 64)
