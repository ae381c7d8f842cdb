"""The accept test where the answer is certain: greedy walks, statistics, random numbers, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.drafters.base import Draft, SparseProbs
from runtime.errors import ModelError
from runtime.speculation import Processor, Uniforms, new_generator, verify
from runtime.speculation.accept import _Rows, _walk
from runtime.types import SamplingParams

V = 12
GREEDY = SamplingParams(temperature=0.0)
PENALIZED = SamplingParams(
    temperature=0.0, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={2: 0.5}
)
LOGITS = torch.randn(V, V, generator=torch.Generator().manual_seed(2))  # a target: LOGITS[x] follows token x
UNIFORM = SparseProbs(torch.arange(V), torch.full((V,), 1 / V))


def numbers(seed, num_places=16):
    return Uniforms(seed).at(0, num_places)[:, 1]


def plain(params, length, start=0):
    """The target's own greedy continuation, one token at a time."""
    processor, tokens = Processor(params, [start], V), [start]
    while len(tokens) <= length:
        [token_id] = processor.argmax(LOGITS[tokens[-1:]])
        processor.advance(token_id)
        tokens.append(token_id)
    return tokens[1:]


def speculative(params, length, propose, start=0):
    """The same by verified chains; returns the tokens and the number of accepted drafts of each step."""
    processor, tokens, accepted = Processor(params, [start], V), [start], []
    while len(tokens) <= length:
        draft = Draft(propose(tokens[1:]))
        verdict = verify(LOGITS[[tokens[-1], *draft.token_ids]], draft, processor)
        assert verdict.num_accepted == len(verdict.token_ids) - 1
        assert verdict.token_ids[:-1] == draft.token_ids[: verdict.num_accepted]
        for token_id in verdict.token_ids:
            processor.advance(token_id)
        tokens += verdict.token_ids
        accepted.append(verdict.num_accepted)
    return tokens[1 : length + 1], accepted


@pytest.mark.parametrize("params", [GREEDY, PENALIZED], ids=["plain", "penalized"])
def test_greedy_output_is_the_targets_own_for_any_drafter(params):
    length, rng = 60, torch.Generator().manual_seed(1)
    truth = plain(params, length + 5)
    tokens, accepted = speculative(params, length, lambda done: truth[len(done) : len(done) + 4])  # perfect
    assert tokens == truth[:length]
    assert set(accepted) == {4}
    tokens, accepted = speculative(params, length, lambda done: [(truth[len(done)] + 1) % V, *truth[:3]])  # adversarial
    assert tokens == truth[:length]
    assert set(accepted) == {0}
    tokens, _ = speculative(params, length, lambda done: torch.randint(V, (4,), generator=rng).tolist())  # random
    assert tokens == truth[:length]
    tokens, accepted = speculative(
        params,
        length,
        lambda done: [*truth[len(done) : len(done) + 2], (truth[len(done) + 2] + 1) % V, *truth[len(done) + 3 :][:1]],
    )  # right, right, wrong, right again
    assert tokens == truth[:length]
    assert set(accepted) == {2}


def test_penalties_matter_in_that_comparison():
    assert plain(GREEDY, 40) != plain(PENALIZED, 40)


def test_an_empty_draft_picks_one_token():
    logits = torch.zeros(1, V)
    logits[0, 6] = 50.0
    for params, uniforms in ((GREEDY, None), (SamplingParams(), numbers(0))):
        verdict = verify(logits, Draft([]), Processor(params, [0], V), uniforms)
        assert (verdict.token_ids, verdict.num_accepted) == ([6], 0)


def test_penalties_follow_the_draft_token_by_token():
    """All logits equal but slightly falling: a frequency penalty makes the target walk through the ids in order."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    row = -torch.arange(V) * 0.01
    processor = Processor(params, [0], V)
    verdict = verify(row.expand(5, V), Draft([0, 1, 2, 3]), processor)
    assert verdict.token_ids == [0, 1, 2, 3, 4]
    assert verify(row.expand(3, V), Draft([0, 0]), processor).token_ids == [0, 1]  # unmoved by the first call
    processor.advance(0)
    assert verify(row.expand(3, V), Draft([1, 0]), processor).token_ids == [1, 2]


def test_penalties_reach_the_sampled_rows_token_by_token():
    params = SamplingParams(temperature=0.01, frequency_penalty=1.0)
    row = -torch.arange(V) * 0.1
    assert verify(row.expand(5, V), Draft([0, 1, 2, 3]), Processor(params, [0], V), numbers(0)).token_ids == [0, 1, 2, 3, 4]


def sampled_steps(seed, num_steps=20, depth=3):
    """A request's steps, one at a time, so that several can be interleaved."""
    params, uniforms = SamplingParams(seed=seed, frequency_penalty=0.5), Uniforms(seed)
    processor, tokens = Processor(params, [0], V), [0]
    for _ in range(num_steps):
        draft_with, judge_with = uniforms.at(len(tokens) - 1, depth + 1).unbind(-1)
        ids = [int(number * V) for number in draft_with[:depth]]
        verdict = verify(LOGITS[[tokens[-1], *ids]], Draft(ids, [UNIFORM] * depth), processor, judge_with)
        for token_id in verdict.token_ids:
            processor.advance(token_id)
        tokens += verdict.token_ids
        yield tokens


def test_a_seed_repeats_and_does_not_depend_on_the_neighbours():
    [*_, alone] = sampled_steps(1)
    [*_, other] = sampled_steps(2)
    assert alone != other
    greedy = Processor(GREEDY, [0], V)
    for first, second in zip(sampled_steps(1), sampled_steps(2), strict=True):
        verify(LOGITS[[0, 1]], Draft([1]), greedy)  # a greedy row beside the sampled ones
        latest = (first, second)
    assert latest == (alone, other)


def random_tree(seed, num_nodes):
    generator = new_generator(seed)
    parents = [int(torch.randint(-1, node, (1,), generator=generator)) if node else -1 for node in range(num_nodes)]
    return torch.randint(V, (num_nodes,), generator=generator).tolist(), parents


@pytest.mark.parametrize("params", [GREEDY, PENALIZED, SamplingParams(), SamplingParams(top_k=8, frequency_penalty=0.7)])
def test_with_certain_nodes_the_tokens_do_not_depend_on_the_draft(params):
    """Plain decoding with the same numbers, one token at a time, gives what any tree gives, for as far as it reaches."""
    lengths = set()
    for seed in range(80):
        uniforms = numbers(seed)
        plain_processor, tokens = Processor(params, [0], V), [0]
        while len(tokens) < 12:
            verdict = verify(LOGITS[tokens[-1:]], Draft([]), plain_processor, uniforms[len(tokens) - 1 :])
            plain_processor.advance(verdict.token_ids[0])
            tokens += verdict.token_ids
        ids, parents = random_tree(seed, 11)
        draft = Draft(ids, None, parents)
        for node in range(seed % 11, 11, 3):  # some right ones among them
            ids[node] = tokens[1 + draft.depths()[node]]
        verdict = verify(LOGITS[[0, *ids]], draft, Processor(params, [0], V), uniforms)
        assert verdict.token_ids == tokens[1 : 1 + len(verdict.token_ids)]
        assert [ids[node] for node in verdict.path] == verdict.token_ids[:-1]
        assert [parents[node] for node in verdict.path] == [-1, *verdict.path[:-1]][: len(verdict.path)]
        here = verdict.path[-1] if verdict.path else -1
        assert verdict.token_ids[-1] not in [token for token, parent in zip(ids, parents, strict=True) if parent == here]
        lengths.add(verdict.num_accepted)
    assert {0, 1, 2} <= lengths


def test_looking_at_all_rows_at_once_changes_nothing():
    """What an accelerator does; the CPU's way is one row at a time."""
    params, verdicts = SamplingParams(top_k=8, frequency_penalty=0.7), []
    for seed in range(90):
        ids, parents = (
            random_tree(seed, 7) if seed % 3 else (torch.randint(V, (3,), generator=new_generator(seed)).tolist(), None)
        )
        draft = Draft(ids, [UNIFORM] * len(ids) if seed % 2 else None, parents)
        processor, uniforms = Processor(params, [0], V), numbers(seed)
        one = verify(LOGITS[[0, *ids]], draft, processor, uniforms)
        assert _walk(_Rows(LOGITS[[0, *ids]], draft, processor, uniforms, at_once=True), draft) == one
        verdicts.append(one.num_accepted)
    assert {0, 1, 2, 3} <= set(verdicts)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.0, 0.1, 3.0, 80.0]), num_ids=st.integers(1, V), m=st.integers(0, 4))
def test_a_verdict_is_always_a_prefix_of_the_draft_and_one_token_with_mass(seed, scale, num_ids, m):
    generator = new_generator(seed)
    logits = torch.randn(m + 1, V, generator=generator) * scale
    ids = torch.randperm(V, generator=generator)[:num_ids]
    probs = [SparseProbs(ids, (torch.randn(num_ids, generator=generator) * scale).softmax(-1)) for _ in range(m)]
    tokens = [int(ids[int(torch.multinomial(q.probs, 1, generator=generator))]) for q in probs]
    params = SamplingParams(top_k=3)
    verdict = verify(logits, Draft(tokens, probs), Processor(params, [], V), numbers(seed))
    assert verdict.token_ids[:-1] == tokens[: verdict.num_accepted]
    assert len(verdict.token_ids) == verdict.num_accepted + 1
    p = Processor(params, [], V).probs(logits)
    assert all(p[row, token_id] > 0 for row, token_id in enumerate(verdict.token_ids))


def test_a_rejection_that_rounding_leaves_without_residual_draws_from_p():
    """p and q are equal in float64 after normalisation, so max(p - q, 0) is 0 everywhere; the answer still has mass in p."""
    p = torch.tensor([0.5, 0.25, 0.25, 0.0])
    logits = p.log().expand(2, 4)
    q = SparseProbs(torch.tensor([3, 0, 1, 2]), torch.tensor([1e-300, 0.5, 0.25, 0.25], dtype=torch.float64))
    seen = set()
    for seed in range(40):
        verdict = verify(logits, Draft([3], [q]), Processor(SamplingParams(), [], 4), numbers(seed))
        assert verdict.num_accepted == 0
        seen.update(verdict.token_ids)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("params", [GREEDY, PENALIZED, SamplingParams(), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_raise_and_emit_nothing(params, bad):
    logits = torch.zeros(2, V)
    logits[0, 3] = bad
    with pytest.raises(ModelError, match="No token was emitted"):
        verify(logits, Draft([3]), Processor(params, [0], V), numbers(0))
    with pytest.raises(ModelError, match="No token was emitted"):
        verify(logits[:1], Draft([]), Processor(params, [0], V), numbers(0))


def test_a_draft_without_mass_in_its_own_distribution_is_refused():
    q = SparseProbs(torch.tensor([1, 2]), torch.tensor([1.0, 0.0]))
    for token_id in (2, 5):
        with pytest.raises(ValueError, match=f"token {token_id}"):
            verify(LOGITS[[0, 2]], Draft([token_id], [q]), Processor(SamplingParams(), [0], V), numbers(0))


@pytest.mark.cuda
def test_cuda_gives_the_verdicts_of_the_cpu():
    for params in (GREEDY, PENALIZED, SamplingParams(), SamplingParams(top_k=5, top_p=0.8, frequency_penalty=0.5)):
        for seed in range(30):
            ids, parents = random_tree(seed, 6)
            on_device = SparseProbs(UNIFORM.token_ids.cuda(), UNIFORM.probs.cuda())
            for q, device_q in ((None, None), ([UNIFORM] * 6, [on_device] * 6)):
                cpu = verify(LOGITS[[0, *ids]], Draft(ids, q, parents), Processor(params, [0], V), numbers(seed))
                processor = Processor(params, [0], V, "cuda")
                assert verify(LOGITS[[0, *ids]].cuda(), Draft(ids, device_q, parents), processor, numbers(seed)) == cpu
