"""Processed logits against an oracle in plain Python, row by row; the draw; the statistics along a draft."""

import math
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ModelError
from runtime.speculation import Processor, TokenCounts, Uniforms, new_generator, pick, process_logits, token_logprobs
from runtime.types import SamplingParams

V = 10


def oracle_logits(logits, params, prompt, generated):
    """Steps 1 to 4 in plain Python, for one row."""
    counts, seen = Counter(generated), set(prompt) | set(generated)
    out = []
    for token_id, logit in enumerate(logits):
        if token_id in seen:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.presence_penalty * (counts[token_id] > 0) + params.frequency_penalty * counts[token_id]
        out.append((logit + params.logit_bias.get(token_id, 0.0)) / (params.temperature or 1.0))
    return out


def oracle_softmax(logits):
    best = max(logits)
    weights = [math.exp(logit - best) for logit in logits]
    return [weight / sum(weights) for weight in weights]


logit_rows = st.lists(st.integers(-40, 40).map(lambda x: x / 8), min_size=V, max_size=V)
token_lists = st.lists(st.integers(0, V - 1), max_size=6)
params_of_steps_1_to_4 = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
)


def test_a_bias_for_every_token_costs_little():
    logits, params = torch.zeros(6, 49152), SamplingParams(temperature=0.0, logit_bias={i: -i / 1000 for i in range(49152)})
    seconds = []
    for _ in range(10):  # other programs may take turns with it
        started = time.perf_counter()
        biased = process_logits(logits, params)
        seconds.append(time.perf_counter() - started)
    assert biased[:, 1000].tolist() == [-1.0] * 6
    assert min(seconds) < 0.1  # everybody in the batch waits for it


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(logit_rows, min_size=1, max_size=4), params=params_of_steps_1_to_4, prompt=token_lists, data=st.data())
def test_each_row_is_processed_as_if_its_drafts_had_been_generated(rows, params, prompt, data):
    generated = data.draw(token_lists)
    paths = data.draw(st.lists(token_lists, min_size=len(rows), max_size=len(rows)))
    processor = Processor(params, prompt, V)
    for token_id in generated:
        processor.advance(token_id)
    raw = torch.tensor(rows)
    before = raw.clone()
    actual = processor.logits(raw, paths)
    assert torch.equal(raw, before)
    for i, (row, path) in enumerate(zip(rows, paths, strict=True)):
        expected = torch.tensor(oracle_logits(row, params, prompt, generated + path))
        if not params.is_greedy:
            expected -= expected.max()
        torch.testing.assert_close(actual[i], expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(processor.logits(raw[:1])[0], processor.logits(raw[:1], [[]])[0])  # nothing was kept


@settings(max_examples=300, deadline=None)
@given(
    row=logit_rows,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.integers(0, V + 2),
    min_p=st.sampled_from([0.0, 0.013, 0.31, 1.0]),
    top_p=st.sampled_from([0.01, 0.37, 0.8, 0.999, 1.0]),
)
def test_truncation_keeps_what_its_definition_says(row, temperature, top_k, min_p, top_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, min_p=min_p, top_p=top_p)
    processed = process_logits(torch.tensor(row), params)
    kept = {i for i in range(V) if processed[i] > -math.inf}

    order = sorted(range(V), key=lambda i: (-row[i], i))  # best first, lowest id on ties
    order = order[: top_k or V]
    best = row[order[0]]
    order = [i for i in order if min_p == 0.0 or (row[i] - best) / temperature >= math.log(min_p) - 1e-6]
    probs = oracle_softmax([row[i] / temperature for i in order])
    assert kept == set(order[: len(kept)])
    mass_of_all, mass_of_all_but_last = sum(probs[: len(kept)]), sum(probs[: len(kept) - 1])
    assert mass_of_all >= top_p - 1e-6  # enough
    assert mass_of_all_but_last < top_p + 1e-6 or top_p == 1.0  # and no more than enough
    if top_p == 1.0:
        assert len(kept) == len(order)
    expected = oracle_softmax([row[i] / temperature for i in order[: len(kept)]])
    torch.testing.assert_close(processed.softmax(-1)[order[: len(kept)]], torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_temperature_comes_before_top_p_and_top_k_before_top_p():
    logits = torch.tensor([0.6, 0.25, 0.1, 0.05]).log()
    kept = process_logits(logits, SamplingParams(temperature=1.0, top_p=0.7)).isfinite().tolist()
    assert kept == [True, True, False, False]
    kept = process_logits(logits, SamplingParams(temperature=0.5, top_p=0.7)).isfinite().tolist()
    assert kept == [True, False, False, False]
    kept = process_logits(logits, SamplingParams(top_k=2, top_p=0.7)).isfinite().tolist()  # 0.6 / 0.85 > 0.7
    assert kept == [True, False, False, False]


def test_a_flat_distribution_over_more_than_the_probe_is_cut_exactly():
    flat = torch.zeros(2, 3000)
    flat[1, :4] = 30.0  # one row that the probe settles beside one that it does not
    processed = process_logits(flat, SamplingParams(top_p=0.7501))
    assert processed.isfinite().sum(-1).tolist() == [2251, 4]
    assert bool(processed[0, :2251].isfinite().all())
    assert bool(processed[1, :4].isfinite().all())


def test_greedy_takes_the_lowest_id_on_ties_with_and_without_processing():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 3.0, 3.0]])
    assert Processor(SamplingParams(temperature=0.0), [], 4).argmax(logits) == [1, 0]
    assert Processor(SamplingParams(temperature=0.0, logit_bias={0: -9.0}), [], 4).argmax(logits) == [1, 2]
    penalized = Processor(SamplingParams(temperature=0.0, presence_penalty=1.0), [], 4)
    assert penalized.argmax(logits, [[], [1]]) == [1, 0]
    assert penalized.argmax(torch.zeros(4, 4), [[], [0], [0, 1], [1]]) == [0, 1, 2, 0]


def test_repetition_penalty_sees_the_prompt_and_the_others_do_not():
    logits = torch.tensor([[2.0, 1.0]])
    assert Processor(SamplingParams(temperature=0.0, repetition_penalty=4.0), [0], 2).argmax(logits) == [1]
    assert Processor(SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0), [0], 2).argmax(logits) == [0]


def test_the_smallest_temperatures_stay_finite_and_pick_the_best():
    logits = torch.tensor([[1.0, 1.5, -3.0]])
    for temperature in (1e-3, 1e-20, 1e-300, 5e-324):
        assert Processor(SamplingParams(temperature=temperature), [], 3).probs(logits).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=2, top_p=0.5), SamplingParams(presence_penalty=1.0)])
def test_a_row_that_is_not_finite_is_refused(bad, params):
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    with pytest.raises(ModelError, match="row 1"):
        Processor(params, [0], 4).probs(logits, [[], [3]])
    with pytest.raises(ModelError, match="row 1"):
        Processor(SamplingParams(temperature=0.0), [0], 4).argmax(logits, [[], [3]])


def test_a_row_that_excludes_every_token_is_refused():
    with pytest.raises(ModelError, match="row 0"):
        Processor(SamplingParams(), [0], 4).probs(torch.full((1, 4), -math.inf))


def test_single_excluded_tokens_are_no_error():
    logits = torch.tensor([[-math.inf, 0.0, 0.0]])
    assert Processor(SamplingParams(), [], 3).probs(logits).tolist() == [[0.0, 0.5, 0.5]]


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-8, 0.25, 1.0, 3.0]), min_size=1, max_size=12).filter(any),
    uniform=st.one_of(st.sampled_from([0.0, 1 - 2**-53]), st.floats(0.0, 1.0, exclude_max=True)),
)
def test_pick_inverts_the_cumulative_mass_and_never_picks_what_has_none(weights, uniform):
    index = int(pick(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)))
    weights = torch.tensor(weights).double().tolist()
    assert weights[index] > 0.0
    low, high, draw = sum(weights[:index]), sum(weights[: index + 1]), uniform * sum(weights)
    assert low - 1e-12 <= draw <= high + 1e-12


def test_pick_decides_each_row_alone():
    weights = torch.rand(6, 50, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone = [int(pick(weights[r : r + 1], uniforms[r : r + 1])) for r in range(6)]
    assert pick(weights, uniforms).tolist() == alone
    assert len(set(alone)) > 1


def test_the_numbers_of_a_place_depend_on_the_seed_and_the_place_alone():
    whole = Uniforms(7).at(0, 200)
    assert whole.shape == (200, 2)
    pieces = Uniforms(7)
    for place, num_places in ((3, 2), (150, 9), (0, 70), (63, 2)):
        assert torch.equal(pieces.at(place, num_places), whole[place : place + num_places])
    assert len({*whole.flatten().tolist()}) == 400
    assert not torch.equal(Uniforms(8).at(0, 200), whole)
    assert not torch.equal(Uniforms(None).at(0, 4), Uniforms(None).at(0, 4))


def test_counts_along_a_draft_leave_the_counts_alone():
    counts = TokenCounts.of_prompt([1, 1], 4, "cpu")
    counts.add(2)
    rows = counts.along([[2], [2, 3], [2, 3, 3]])
    assert rows.generated.tolist() == [[0, 0, 2, 0], [0, 0, 2, 1], [0, 0, 2, 2]]
    assert rows.seen.tolist() == [[False, True, True, False], [False, True, True, True], [False, True, True, True]]
    assert counts.generated.tolist() == [0, 0, 1, 0]
    assert counts.seen.tolist() == [False, True, True, False]


def test_seeds_repeat_and_differ():
    def draw(seed):
        return torch.rand(4, generator=new_generator(seed)).tolist()

    assert draw(7) == draw(7)
    assert draw(-(2**63)) == draw(-(2**63))
    assert len({tuple(draw(seed)) for seed in (0, 7, 8, 7 + 2**32, -1, -(2**63), 2**63 - 1, None, None)}) == 9


LOGPROB_ROWS = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]]).log() + 7.0  # any shift: raw logits


def test_the_logprob_of_each_rows_token():
    first, second = token_logprobs(LOGPROB_ROWS, [1, 3])
    assert (first.token_id, second.token_id) == (1, 3)
    assert first.logprob == pytest.approx(math.log(0.25), abs=1e-5)
    assert second.logprob == pytest.approx(math.log(0.4), abs=1e-5)
    assert first.top == second.top == ()


def test_the_alternatives_come_best_first_and_may_lack_the_token_itself():
    [record] = token_logprobs(LOGPROB_ROWS[1:], [0], top=3)
    assert [token_id for token_id, _ in record.top] == [3, 2, 1]
    assert [math.exp(logprob) for _, logprob in record.top] == pytest.approx([0.4, 0.3, 0.2], abs=1e-5)


def test_more_alternatives_than_tokens_are_all_tokens():
    [record] = token_logprobs(LOGPROB_ROWS[:1], [0], top=20)
    assert len(record.top) == 4
