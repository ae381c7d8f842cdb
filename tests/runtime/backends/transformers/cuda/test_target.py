"""`CudaTarget` and its kernels against the plain Hugging Face model: families, trees, windows, chunks, split keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from runtime.backends.base import Segment, TargetInfo
from runtime.backends.segments import ancestry, depths
from runtime.backends.transformers.cache import KVShape
from runtime.types import CachePolicy

VOCAB, LAYERS, LONGEST = 97, 3, 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "attn_implementation": "eager",
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-scaled-rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    ),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=20)),
    "qwen2-bias": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3-qk-norm": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
}
TEXT = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(3)).tolist()
TREE = [TEXT[70], 5, TEXT[71], 9, TEXT[72], TEXT[73]]
PARENTS = [-1, 0, 0, 1, 2, 4]


def make_model(family: str, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval().requires_grad_(False)
    for parameter in model.parameters():  # so far from zero that every part of the network shows in the logits
        parameter.copy_(4 * parameter if parameter.ndim > 1 else parameter + 0.3 * torch.randn_like(parameter))
    return model.to(device)


def make_target(model: PreTrainedModel, device: torch.device) -> Any:
    from runtime.backends.transformers.cuda.target import load_fused

    info = TargetInfo("test", "f", VOCAB, SIZES["hidden_size"], LAYERS, LONGEST, (0, 1, 2), (2,), "float32", str(device))
    heads = model.config.num_key_value_heads
    dim = getattr(model.config, "head_dim", None) or SIZES["hidden_size"] // SIZES["num_attention_heads"]
    return load_fused(model, info, KVShape(LAYERS, heads, dim, dim, torch.float32, device), 16)


def run(target: Any, cache: int, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> Any:
    [output] = target.forward([Segment(cache, token_ids, parents, num_logits=len(token_ids))])
    return output


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_trees_and_chains_are_the_models_own(family: str, device: torch.device):
    model = make_model(family, device)
    plain = model(torch.tensor([TEXT], device=device), output_hidden_states=True)
    logits = plain.logits[0]
    target = make_target(model, device)
    long, short = target.new_cache(), target.new_cache()
    output = run(target, long, TEXT[:70])
    target.commit(long, range(70))
    assert_close(output.logits, logits[:70])
    aux = torch.cat([plain.hidden_states[layer + 1][0, :70] for layer in range(2)], dim=-1)
    assert_close(output.hidden.aux[:, : aux.shape[1]], aux)  # transformers norms the last layer's
    assert_close(output.hidden.last, plain.hidden_states[-1][0, :70])
    assert_close(target.states_of(long, 3, 20).last, output.hidden.last[3:20])
    tree, other = target.forward([Segment(long, TREE, PARENTS, num_logits=6), Segment(short, TEXT[:3], num_logits=2)])
    assert_close(tree.logits[[0, 2, 4, 5]], logits[70:74])
    assert_close(other.logits, logits[1:3])
    target.commit(long, [0, 2, 4, 5])
    target.commit(short, range(3))
    fork = target.fork(long, 72)
    for cache, at in ((long, 74), (short, 3), (fork, 72)):
        assert_close(run(target, cache, TEXT[at : at + 5]).logits, logits[at : at + 5])


def test_a_tree_and_a_long_chunk_share_a_forward(device: torch.device):
    model = make_model("llama", device)
    logits = model(torch.tensor([TEXT], device=device)).logits[0]
    target = make_target(model, device)
    tree, chunk = target.new_cache(), target.new_cache()
    run(target, tree, TEXT[:70])
    target.commit(tree, range(70))
    first, second = target.forward([Segment(tree, TREE, PARENTS, num_logits=6), Segment(chunk, TEXT, num_logits=90)])
    assert_close(first.logits[[0, 2, 4, 5]], logits[70:74])
    assert_close(second.logits, logits)
    with pytest.raises(ValueError, match="A tree of more than 64 nodes"):
        target.forward([Segment(tree, TEXT[:65], [-1] * 65)])


def test_other_models_are_left_to_the_general_target(device: torch.device):
    from runtime.backends.transformers.cuda.network import read_network

    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2)).eval()
    assert read_network(model.to(device), LONGEST) is None


@pytest.mark.parametrize("policy", [CachePolicy(0, 17), CachePolicy(20, 33), CachePolicy(4, 50)])
@pytest.mark.parametrize("chunk", [70, 9])
def test_a_policy_hides_what_it_says(policy: CachePolicy, chunk: int, device: torch.device):
    model = make_model("llama", device)
    target = make_target(model, device)
    assert policy.window is not None
    cache = target.new_cache(policy)
    for first in range(0, 70, chunk):
        tokens = TEXT[first : min(first + chunk, 70)]
        run(target, cache, tokens)
        target.commit(cache, range(len(tokens)))
    output = run(target, cache, TREE, PARENTS)
    token_ids = TEXT[:70] + TREE
    positions = torch.tensor([*range(70), *(70 + depth for depth in depths(PARENTS, len(TREE)))])
    sees = torch.zeros(len(token_ids), len(token_ids), dtype=torch.bool)
    sees[:70, :70] = ancestry(None, 70)
    sees[70:, :70] = True
    sees[70:, 70:] = ancestry(PARENTS, len(TREE))
    age = positions[:, None] - positions[None, :]
    sees &= (age < policy.window) | (positions < policy.sink)[None, :]
    mask = torch.zeros(1, 1, *sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)
    plain = model(
        torch.tensor([token_ids], device=device), position_ids=positions[None].to(device), attention_mask=mask.to(device)
    )
    assert_close(output.logits, plain.logits[0, 70:])


def test_saved_keys_come_back_and_every_block_is_counted(device: torch.device):
    model = make_model("llama", device)
    logits = model(torch.tensor([TEXT], device=device)).logits[0]
    target = make_target(model, device)
    caches = [target.new_cache()]
    run(target, caches[0], TEXT[:40])
    target.commit(caches[0], range(40))
    saved = target.save(caches[0])
    caches.append(target.restore(saved, 40, CachePolicy()))
    assert target.cache_bytes() == 2 * target.cache_bytes(40)
    for cache in caches:
        assert_close(run(target, cache, TEXT[40:43]).logits, logits[40:43])
    with pytest.raises(ValueError, match=r"float64\).* this target.s are .*float32"):
        target.restore({**saved, "kv": saved["kv"].double()}, 40, CachePolicy())
    for cache in caches:
        target.drop(cache)
    assert target.cache_bytes() == 0


def test_states_that_nobody_wants_stay_with_the_target_and_blocks_are_taken_for_the_steps_behind_a_prompt(device: torch.device):
    from runtime.backends.transformers.cuda.pool import AHEAD_TOKENS

    target = make_target(make_model("llama", device), device)
    left, kept = target.new_cache(), target.new_cache()
    [output] = target.forward([Segment(left, TEXT[:40], num_logits=0, wants_states=False)])
    [expected] = target.forward([Segment(kept, TEXT[:40])])
    assert len(output.hidden) == len(output.logits) == 0
    for cache in (left, kept):
        target.commit(cache, range(40))
    for mine, theirs in zip(target.states_of(left, 0, 40).__dict__.values(), expected.hidden.__dict__.values(), strict=True):
        assert torch.equal(mine, theirs)
    assert target.cache_bytes() == target.cache_bytes(40) + target.cache_bytes(40 + AHEAD_TOKENS)
    _, second = target.forward([Segment(left, TEXT[40:50], num_logits=0, wants_states=False), Segment(kept, TEXT[40:50])])
    assert len(second.hidden) == 10
    target.commit(left, range(10))
    target.commit(kept, range(4))
    assert target.cache_bytes() == target.cache_bytes(44) + target.cache_bytes(40 + AHEAD_TOKENS)
    [mine], [theirs] = target.forward([Segment(left, TEXT[50:51])]), target.forward([Segment(kept, TEXT[44:51])])
    assert torch.allclose(mine.logits[-1], theirs.logits[-1], atol=1e-4)


def test_padded_rows_reach_nobody(device: torch.device):
    """Sequences take a graph of more; what earlier forwards left in the buffers, even NaN, must not matter."""
    model = make_model("llama", device)
    logits = model(torch.tensor([TEXT], device=device)).logits[0]
    target = make_target(model, device)
    caches = [target.new_cache() for _ in range(5)]
    for buffer in (target._buffers.x, target._buffers.q, target._buffers.o, target._buffers.act, target._buffers.hidden):
        buffer.fill_(float("nan"))
    target.pool.states[:16] = float("nan")
    for keys, values in zip(target.pool.keys, target.pool.values, strict=True):
        keys[0] = values[0] = float("nan")  # of the dead block
    for step in range(3):
        live = caches[: 5 - 2 * step]  # the batch shrinks
        outputs = target.forward([Segment(cache, TEXT[5 * step : 5 * step + 5], num_logits=5) for cache in live])
        for cache, output in zip(live, outputs, strict=True):
            assert_close(output.logits, logits[5 * step : 5 * step + 5])
            target.commit(cache, range(5))


def test_what_is_too_much_at_once_is_computed_in_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runtime.backends.transformers.cuda.target.MAX_LONG_ROWS", 12)
    monkeypatch.setattr("runtime.backends.transformers.cuda.target.MAX_LONG_SEGMENTS", 3)
    model = make_model("llama", device)
    logits = model(torch.tensor([TEXT], device=device)).logits[0]
    target = make_target(model, device)
    sizes = [2, 2, 2, 2, 5, 4, 20, 1]
    caches = [target.new_cache() for _ in sizes]
    outputs = target.forward([Segment(cache, TEXT[:n], num_logits=n) for cache, n in zip(caches, sizes, strict=True)])
    for output, n in zip(outputs, sizes, strict=True):
        assert_close(output.logits, logits[:n])
        assert len(output.hidden) == n
    assert target.forward([]) == []
