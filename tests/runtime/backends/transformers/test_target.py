"""What is particular to this backend: other architectures, sliding windows, a forward that breaks, the real model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.backends import load_target
from runtime.backends.base import Segment
from runtime.backends.transformers import contiguous
from runtime.backends.transformers.contiguous import attend
from runtime.backends.transformers.loading import build
from runtime.config import BackendConfig, ModelConfig
from runtime.models import resolve

WINDOW = 12
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, one K/V head": {"num_key_value_heads": 1},
    "llama, no shared heads": {"num_key_value_heads": 4},
    "llama, llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "qwen2": {},  # biases
    "qwen2, windows": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    "qwen3": {},  # norms on queries and keys
    "gemma": {},  # scaled embeddings, one more than the norm's weight
    "gemma2": {"sliding_window": WINDOW},  # soft caps on attention and logits
    "smollm3": {},  # some layers without positions
    "phi3": {},  # one layer for queries, keys and values
    "olmo2": {},  # norms behind the layers
    "gemma3_text": {"sliding_window": WINDOW},  # windows in some layers, scaled embeddings
    "mistral": {"sliding_window": WINDOW},  # windows in all layers
    "granite": {"logits_scaling": 8.0},  # logits are not just the head's output
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 256},  # learned positions, no linear layers
}
TEXT = torch.randint(0, 320, (50,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_equal_their_plain_model(random_model: Any, architecture: str) -> None:
    model = random_model(architecture.split(",")[0], **ARCHITECTURES[architecture])
    target, plain_logits = model.target(), model.logits
    expected = plain_logits(TEXT)
    scale = expected.abs().max()
    cache = target.new_cache()
    for start, end in ((0, 20), (20, 21), (21, 40)):
        [output] = target.forward([Segment(cache, TEXT[start:end], num_logits=end - start)])
        target.commit(cache, range(end - start))
        assert (output.logits - expected[start:end]).abs().max() < 1e-4 * scale
    # A tree whose path 0, 2, 4 is the text, beside a fork that goes on plainly.
    tree = [TEXT[40], 7, TEXT[41], 8, TEXT[42]]
    one, two = target.forward([Segment(cache, tree, [-1, -1, 0, 1, 2], num_logits=5), Segment(target.fork(cache), TEXT[40:])])
    assert (one.logits[[0, 2, 4]] - expected[40:43]).abs().max() < 1e-4 * scale
    assert (one.logits[[1, 3]] - plain_logits([*TEXT[:40], 7, 8])[40:]).abs().max() < 1e-4 * scale
    assert (two.logits - expected[-1:]).abs().max() < 1e-4 * scale


@pytest.mark.parametrize("num_cached", [0, 5, 30])
def test_a_tree_deeper_than_the_window(random_model: Any, num_cached: int) -> None:
    """Deep nodes no longer see the first of their own ancestors."""
    model = random_model("mistral", sliding_window=WINDOW)
    target, plain_logits = model.target(), model.logits
    cache = target.new_cache()
    if num_cached:
        target.forward([Segment(cache, TEXT[:num_cached])])
        target.commit(cache, range(num_cached))
    chain = TEXT[num_cached : num_cached + 2 * WINDOW - 4]
    # Each node of the chain has a sibling leaf, so the chain's nodes are the even ones.
    tokens = [token for node in chain for token in (node, 9)]
    parents = [parent for depth in range(len(chain)) for parent in (2 * depth - 2 if depth else -1,) * 2]
    [output] = target.forward([Segment(cache, tokens, parents, num_logits=len(tokens))])
    expected = plain_logits(TEXT[: num_cached + len(chain)])[num_cached:]
    torch.testing.assert_close(output.logits[::2], expected, atol=1e-4, rtol=1e-4)


def test_a_forward_that_breaks_changes_nothing(random_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    target, plain_logits = model.target(), model.logits
    cache, other = target.new_cache(), target.new_cache()
    target.forward([Segment(cache, TEXT[:20]), Segment(other, TEXT[:1])])
    target.commit(cache, range(20))
    target.commit(other, [0])

    num_calls = 0

    def breaks(*args: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 11:  # in the layer 5, for the second of two sessions
            raise RuntimeError("out of memory")
        return attend(*args)

    target.forward([Segment(cache, TEXT[20:22])])  # tentative, and not of the forward that breaks
    with monkeypatch.context() as patch:
        patch.setattr(contiguous, "attend", breaks)
        with pytest.raises(RuntimeError, match="out of memory"):
            target.forward([Segment(other, TEXT[1:3]), Segment(cache, [1] * 200)])  # layers 0 to 4 wrote their tentative rows
    assert (target.length(cache), target.length(other)) == (20, 1)
    with pytest.raises(ValueError, match="left 0 tentative rows"):
        target.commit(cache, [0])
    one, two = target.forward([Segment(cache, TEXT[20:], num_logits=30), Segment(other, TEXT[1:], num_logits=49)])
    expected = plain_logits(TEXT)
    torch.testing.assert_close(one.logits, expected[20:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(two.logits, expected[1:], atol=1e-4, rtol=1e-4)


def test_bfloat16_states_and_float32_logits(random_model: Any) -> None:
    plain = copy.deepcopy(random_model("llama").plain).to(torch.bfloat16)
    target = build(copy.deepcopy(plain), name="random", fingerprint="0", eos_token_ids=(2,))
    assert target.info.dtype == "bfloat16"
    cache = target.new_cache()
    [output] = target.forward([Segment(cache, TEXT, num_logits=50)])
    assert output.hidden.aux.dtype is output.hidden.last.dtype is torch.bfloat16
    assert output.logits.dtype is torch.float32
    with torch.no_grad():
        expected = plain(torch.tensor([TEXT]), use_cache=False).logits[0].float()
    assert (output.logits - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.real_model
def test_the_real_model_agrees_with_itself() -> None:
    resolved = resolve("smollm2-135m")
    target = load_target(BackendConfig(), ModelConfig(), resolved)
    info = target.info
    assert (info.vocab_size, info.num_layers, info.aux_layer_ids, info.eos_token_ids) == (49152, 30, (1, 14, 26), (2,))
    text = list(range(1000, 1040))
    plain = AutoModelForCausalLM.from_pretrained(resolved.path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(torch.tensor([text]), output_hidden_states=True, use_cache=False)
    cache = target.new_cache()
    target.forward([Segment(cache, text[:30])])
    target.commit(cache, range(30))
    tree = [text[30], 7, text[31], 8, text[32]]
    [output] = target.forward([Segment(cache, tree, [-1, -1, 0, 1, 2], num_logits=5)])
    torch.testing.assert_close(output.logits[[0, 2, 4]], expected.logits[0, 30:33], atol=5e-4, rtol=0)
    target.commit(cache, [0, 2, 4])
    [output] = target.forward([Segment(cache, text[33:], num_logits=7)])
    torch.testing.assert_close(output.logits, expected.logits[0, 33:], atol=5e-4, rtol=0)
    aux = torch.cat([expected.hidden_states[layer_id + 1][0, 33:] for layer_id in info.aux_layer_ids], dim=-1)
    torch.testing.assert_close(output.hidden.aux, aux, atol=5e-3, rtol=1e-3)
    torch.testing.assert_close(output.hidden.last, expected.hidden_states[-1][0, 33:], atol=5e-3, rtol=1e-3)
