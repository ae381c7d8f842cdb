"""Whole steps on the device: the drafts are the drafter's own, the tokens the model's own, whatever the depth and the batch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.backends.base import Segment, TargetInfo
from runtime.backends.transformers.cache import KVShape
from runtime.drafters.base import DraftRequest
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model

VOCAB, HIDDEN, LONGEST, NUM_TOKENS = 97, 32, 256, 8
SIZES: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
PROMPTS = [torch.randint(0, VOCAB, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (20, 7, 37)]


def make_model(device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=3, max_position_embeddings=LONGEST, attn_implementation="eager",
        **SIZES,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model.to(device)


def make_drafter(embedding: torch.Tensor, seed: int) -> Eagle3Model:
    config = Eagle3Config(
        hidden_size=HIDDEN, head_dim=16, vocab_size=VOCAB, draft_vocab_size=60, max_position_embeddings=LONGEST,
        aux_layer_ids=(0, 1, 2), bos_token_id=3, eos_token_id=4, pad_token_id=5, **SIZES,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    vocabulary = DraftVocabulary.from_token_counts(torch.rand(VOCAB, generator=generator), 60)
    model = Eagle3Model(config, vocabulary, embedding.cpu())
    model.init_from_target(embedding.cpu(), None, generator)
    model.embedding = embedding
    return model.to(embedding.device).eval()


def greedy(model: LlamaForCausalLM, prompt: list[int], device: torch.device) -> list[int]:
    token_ids = list(prompt)
    for _ in range(NUM_TOKENS):
        token_ids.append(int(model(torch.tensor([token_ids], device=device)).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def test_drafts_tokens_and_swaps(device: torch.device):
    from runtime.backends.transformers.cuda.target import load_fused

    model = make_model(device)
    expected = [greedy(model, prompt, device) for prompt in PROMPTS]
    info = TargetInfo("test", "f", VOCAB, HIDDEN, 3, LONGEST, (0, 1, 2), (2,), "float32", str(device))
    target = load_fused(model, info, KVShape(3, 1, 16, 16, torch.float32, device), 16)
    assert target is not None
    decoder = target.new_decoder(max_depth=3)
    networks = [make_drafter(target.embedding, seed) for seed in (1, 2)]
    caches, histories = [target.new_cache() for _ in PROMPTS], [list(prompt) for prompt in PROMPTS]
    for cache, history in zip(caches, histories, strict=True):
        [output] = target.forward([Segment(cache, history)])
        target.commit(cache, range(len(history)))
        history.append(int(output.logits[0].argmax()))
    number, loaded = 0, -1
    while min(len(history) - len(prompt) for history, prompt in zip(histories, PROMPTS, strict=True)) < NUM_TOKENS:
        depth, who = (2, 0, 3, 1)[number % 4], ([0, 1, 2], [2, 0], [1])[number % 3]
        if loaded != number // 2 % 2:  # another drafter every other step: its own drafts from the next one on
            loaded = number // 2 % 2
            assert decoder.load_drafter(networks[loaded])
        drafter, drafts = Eagle3Drafter(networks[loaded], "same"), []
        for index in who if depth else ():
            aux = target.states_of(caches[index], 0, len(histories[index]) - 1).aux
            request = DraftRequest(drafter.new_state(), 0, aux, histories[index], depth)
            drafts.append(drafter.propose([request])[0].token_ids)
        decoder.launch([caches[index] for index in who], [histories[index] for index in who], depth)
        tokens, hidden = decoder.collect([True] * len(who))
        for place, (index, new) in enumerate(zip(who, tokens, strict=True)):
            if depth:  # what was accepted is the beginning of the draft, and the next token is not
                assert new[:-1] == drafts[place][: len(new) - 1]
                assert len(new) > depth or new[-1] != drafts[place][len(new) - 1]
            first = len(histories[index]) - 1
            kept = target.states_of(caches[index], first, first + len(new))
            torch.testing.assert_close(hidden.last[place, : len(new)], kept.last)
            histories[index] += new
        number += 1
    for history, prompt, answer in zip(histories, PROMPTS, expected, strict=True):
        assert history[len(prompt) :][:NUM_TOKENS] == answer
    for cache in caches:
        decoder.leave(cache)
        target.drop(cache)
    assert target.cache_bytes() == 0
