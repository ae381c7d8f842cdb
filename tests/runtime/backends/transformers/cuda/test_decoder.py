"""Whole steps on the device: the drafts are the drafter's own, the tokens the model's own, whatever the depth and the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.backends.base import Segment, TargetInfo
from runtime.backends.transformers.cache import KVShape
from runtime.drafters.base import Draft, DraftRequest
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model
from runtime.speculation import Processor, Uniforms, verify
from runtime.speculation.sampling import Sampled
from runtime.types import SamplingParams

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


def make_target(device: torch.device) -> tuple[LlamaForCausalLM, Any]:
    from runtime.backends.transformers.cuda.target import load_fused

    model = make_model(device)
    info = TargetInfo("test", "f", VOCAB, HIDDEN, 3, LONGEST, (0, 1, 2), (2,), "float32", str(device))
    return model, load_fused(model, info, KVShape(3, 1, 16, 16, torch.float32, device), 16)


def prefilled(target: Any, prompts: Sequence[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Caches, and histories with a pending token."""
    caches, histories = [target.new_cache() for _ in prompts], [list(prompt) for prompt in prompts]
    for cache, history in zip(caches, histories, strict=True):
        [output] = target.forward([Segment(cache, history)])
        target.commit(cache, range(len(history)))
        history.append(int(output.logits[0].argmax()))
    return caches, histories


@pytest.mark.parametrize(("joining", "primed"), [(64, 1024), (2, 8)])  # at once; the latter are less than there are
def test_drafts_tokens_and_swaps(joining: int, primed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    for module in ("step", "decoder"):
        monkeypatch.setattr(f"runtime.backends.transformers.cuda.{module}.MAX_JOINING", joining)
        monkeypatch.setattr(f"runtime.backends.transformers.cuda.{module}.PRIME_ROWS", primed)
    model, target = make_target(device)
    expected = [greedy(model, prompt, device) for prompt in PROMPTS]
    decoder = target.new_decoder(max_depth=3, max_sequences=8)
    networks = [make_drafter(target.embedding, seed) for seed in (1, 2)]
    caches, histories = prefilled(target, PROMPTS)
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
        decoder.launch([caches[index] for index in who], [histories[index] for index in who], [None] * len(who), depth)
        tokens = decoder.collect([True] * len(who)).tokens
        for place, (index, new) in enumerate(zip(who, tokens, strict=True)):
            if depth:  # what was accepted is the beginning of the draft, and the next token is not
                assert new[:-1] == drafts[place][: len(new) - 1]
                assert len(new) > depth or new[-1] != drafts[place][len(new) - 1]
            histories[index] += new
            assert_states(target, caches[index], histories[index][:-1])
        number += 1
    for history, prompt, answer in zip(histories, PROMPTS, expected, strict=True):
        assert history[len(prompt) :][:NUM_TOKENS] == answer
    for cache in caches:
        decoder.leave(cache)
        target.drop(cache)
    assert target.cache_bytes() == 0


def test_sampled_sequences_say_what_the_general_way_says(device: torch.device):
    """One whose drafts are drawn, one whose drafts are certain, a greedy one; drafts and verdicts are made again outside."""
    _, target = make_target(device)
    decoder = target.new_decoder(max_depth=3, max_sequences=8)
    network = make_drafter(target.embedding, 1)
    assert decoder.load_drafter(network)
    drafter = Eagle3Drafter(network, "same")
    kinds = [SamplingParams(temperature=0.9), SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=5)]
    kinds.append(SamplingParams(temperature=0.0))
    sampled = [None if params.is_greedy else Sampled(params, Uniforms(number), 61) for number, params in enumerate(kinds)]
    caches, histories = prefilled(target, PROMPTS)
    num_accepted = 0
    for number in range(5):
        depth = (3, 2, 0)[number % 3]
        drafts = []
        for history, cache, one in zip(histories, caches, sampled, strict=True):
            aux = target.states_of(cache, 0, len(history) - 1).aux
            certain = one is None or one.params.seed is not None
            uniforms = None if one is None else one.uniforms.at(one.place, depth)[:, 0]
            heat = 0.0 if certain else one.params.temperature
            request = DraftRequest(drafter.new_state(), 0, aux, history, depth, temperature=heat, uniforms=uniforms)
            drafts.append(drafter.propose([request])[0] if depth else Draft([]))
        decoder.launch(caches, histories, sampled, depth)
        tokens = decoder.collect([True] * len(caches)).tokens
        for index, (history, draft, params, new) in enumerate(zip(histories, drafts, kinds, tokens, strict=True)):
            cache = target.new_cache()
            [output] = target.forward([Segment(cache, [*history, *draft.token_ids], num_logits=len(draft.token_ids) + 1)])
            target.drop(cache)
            one = sampled[index]
            uniforms = None if one is None else one.uniforms.at(one.place, depth + 1)[:, 1]
            verdict = verify(output.logits.cpu(), draft, Processor(params, history, VOCAB), uniforms)
            assert new == verdict.token_ids, (number, index)
            num_accepted += verdict.num_accepted
            history += new
            if one is not None:
                sampled[index] = replace(one, place=one.place + len(new))
    assert num_accepted > 0


def test_the_next_request_of_a_sequence_brings_its_own_parameters(device: torch.device):
    """Also where the device still has the sequence as it is."""
    _, target = make_target(device)
    decoder = target.new_decoder(max_depth=0, max_sequences=1)
    [cache], [history] = prefilled(target, [PROMPTS[1]])
    found = []
    for number, params in enumerate([SamplingParams(temperature=0.0), SamplingParams(temperature=2.0), SamplingParams(top_k=1)]):
        sampled = None if params.is_greedy else Sampled(params, Uniforms(number), 0)
        decoder.launch([cache], [history], [sampled], 0)
        [new] = decoder.collect([True]).tokens
        found.append(new)
        target.truncate(cache, len(history) - 1)
        decoder._sequences[target.pool[cache]].length = len(history) - 1  # as if nothing had come of the step
        decoder._step.state[target.pool[cache].row, 0] -= 1
        decoder._step.state[target.pool[cache].row, 5] = history[-1]
    verdict = verify(logits_behind(target, history), Draft([]), Processor(SamplingParams(temperature=2.0), history, VOCAB),
                     Uniforms(1).at(0, 1)[:, 1])  # fmt: skip
    assert found == [found[2], verdict.token_ids, found[0]]


def logits_behind(target: Any, history: list[int]) -> torch.Tensor:
    cache = target.new_cache()
    [output] = target.forward([Segment(cache, history)])
    target.drop(cache)
    return output.logits.cpu()


def test_several_plain_steps_in_a_row(device: torch.device):
    model, target = make_target(device)
    expected = [greedy(model, prompt, device) for prompt in PROMPTS]
    decoder = target.new_decoder(max_depth=2, max_sequences=3)
    assert decoder.load_drafter(make_drafter(target.embedding, 1))
    caches, histories = prefilled(target, PROMPTS)
    for depth, num_steps in ((0, 3), (2, 1), (0, 2)):
        decoder.launch(caches, histories, [None] * 3, depth, num_steps)
        tokens = decoder.collect([True] * 3).tokens
        for cache, history, new in zip(caches, histories, tokens, strict=True):
            assert depth or len(new) == num_steps
            history += new
            assert_states(target, cache, history[:-1])
    for history, prompt, answer in zip(histories, PROMPTS, expected, strict=True):
        assert history[len(prompt) :][:NUM_TOKENS] == answer[: len(history) - len(prompt)]


def assert_states(target: Any, cache: int, history: list[int]) -> None:
    """What the pool has of a sequence is what a forward of it leaves behind."""
    other = target.new_cache()
    [output] = target.forward([Segment(other, history)])
    kept = target.states_of(cache, 0, len(history))
    torch.testing.assert_close(kept.aux, output.hidden.aux, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kept.last, output.hidden.last, atol=1e-4, rtol=1e-4)
    target.drop(other)


def test_sequences_join_rows_of_steps(device: torch.device):
    """Each with its prompt's last token pending, as one that was just read; a step is under way while the next one is read."""
    model, target = make_target(device)
    expected = [greedy(model, prompt, device) for prompt in PROMPTS]
    decoder = target.new_decoder(max_depth=0, max_sequences=3)
    caches, histories = [target.new_cache() for _ in PROMPTS], [list(prompt) for prompt in PROMPTS]
    read(target, caches[0], histories[0])
    for num_in, num_steps in ((1, 3), (2, 2), (3, 3), (3, 1), (3, 2)):
        decoder.launch(caches[:num_in], histories[:num_in], [None] * num_in, 0, num_steps)
        if num_in < len(PROMPTS):
            read(target, caches[num_in], histories[num_in])
        tokens = decoder.collect([True] * num_in).tokens
        for history, new in zip(histories, tokens, strict=False):
            assert len(new) == num_steps
            history += new
    for history, prompt, answer in zip(histories, PROMPTS, expected, strict=True):
        assert history[len(prompt) :][:NUM_TOKENS] == answer[: len(history) - len(prompt)]


def read(target: Any, cache: int, history: list[int]) -> None:
    """All but the last token."""
    target.forward([Segment(cache, history[:-1], num_logits=0)])
    target.commit(cache, range(len(history) - 1))


def test_a_decoder_that_drafts_nothing_warms_up_with_a_drafter_loaded(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runtime.backends.transformers.cuda.target.GRAPH_SHAPES", [(1, 1), (1, 16)])  # all of them take long
    _, target = make_target(device)
    decoder = target.new_decoder(max_depth=0, max_sequences=1)
    assert decoder.load_drafter(make_drafter(target.embedding, 1))
    assert decoder.warm_up(1).keys() == {(1, 0)}
    assert target.cache_bytes() == 0


def test_blocks_that_are_taken_ahead_end_where_the_model_does(device: torch.device):
    _, target = make_target(device)
    decoder = target.new_decoder(max_depth=0, max_sequences=1)
    text = torch.randint(0, VOCAB, (LONGEST - 4,), generator=torch.Generator().manual_seed(9)).tolist()
    [cache], [history] = prefilled(target, [text])
    for _ in range(3):
        decoder.launch([cache], [history], [None], 0)
        [new] = decoder.collect([True]).tokens
        history += new
    assert len(history) == LONGEST
    assert target.cache_bytes() == target.cache_bytes(LONGEST)
