"""Sampling as a step on the device does it, for all sequences at once: the tokens that the general way gives, one by one."""

from __future__ import annotations

import math
import random

import pytest
import torch

from runtime.backends.transformers.cuda.sampling import BLOCK_PLACES, Drawn, Seats, Settings, draw, judge, truncates
from runtime.drafters.base import Draft, SparseProbs
from runtime.errors import ModelError
from runtime.speculation import Processor, Uniforms, verify
from runtime.speculation.sampling import Sampled, pick
from runtime.types import SamplingParams

V, DRAFT_V, DEPTH = 41, 23, 3
IDS_OF = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:DRAFT_V]
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, min_p=0.02),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3),
    SamplingParams(temperature=1.1, top_p=0.6, top_k=9, min_p=0.01),
    SamplingParams(temperature=1e-40),
]
UNSEEDED = [params for params in KINDS if params.seed is None]


def keep_best_by_sorting(rows: torch.Tensor, limits: torch.Tensor, normalizers: torch.Tensor | None) -> None:
    ordered, ids = rows.sort(dim=-1, descending=True, stable=True)
    weights = torch.ones_like(ordered) if normalizers is None else (ordered - normalizers[:, None]).exp()
    before = weights.double().cumsum(-1) - weights.double()
    rows.masked_fill_(torch.empty_like(rows, dtype=torch.bool).scatter_(1, ids, before >= limits[:, None]), -math.inf)


def seated(params: list[SamplingParams], place: int = 0) -> tuple[Seats, torch.Tensor, list[Uniforms]]:
    """Sequence s in row s + 1."""
    seats, uniforms = Seats(len(params) + 1, torch.device("cpu")), [Uniforms(100 + number) for number in range(len(params))]
    sampled = [Sampled(each, numbers, place) for each, numbers in zip(params, uniforms, strict=True)]
    rows = torch.arange(1, len(params) + 1)
    seats.take(rows.tolist(), [None if each.params.is_greedy else each for each in sampled])
    for block in (place // BLOCK_PLACES, place // BLOCK_PLACES + 1):
        seats.fill(rows.tolist(), [block] * len(params), sampled)
    return seats, rows, uniforms


def chains(draft_logits: torch.Tensor, settings: Settings, numbers: torch.Tensor) -> tuple[torch.Tensor, list[Drawn]]:
    """draft_logits [S, D, Vd] -> target ids [S, D]."""
    drawn = [draw(draft_logits[:, level], settings, numbers[:, level, 0]) for level in range(draft_logits.shape[1])]
    return torch.stack([IDS_OF[level.index] for level in drawn], dim=1), drawn


@pytest.mark.parametrize("seed", range(25))
def test_each_sequence_gets_what_the_general_way_gives(seed: int):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    params = [rng.choice(KINDS if seed % 2 else UNSEEDED) for _ in range(9)]
    place = rng.choice([0, 5, 62, 1000])
    seats, rows, uniforms = seated(params, place)
    logits = 3 * torch.randn(len(params), DEPTH + 1, V, generator=generator)
    draft_logits = logits[:, :DEPTH, IDS_OF] + torch.randn(len(params), DEPTH, DRAFT_V, generator=generator)
    if seed % 4 == 0:
        logits = logits.round()  # many ties
    settings = seats.settings(rows)
    numbers = seats.uniforms(rows, torch.full((len(params),), place), DEPTH)
    drafted, drawn = chains(draft_logits, settings, numbers)
    has_certain = any(not each.is_greedy and each.seed is not None for each in params)
    picked = judge(logits.clone(), settings, numbers[:, :, 1], drafted, drawn, IDS_OF, keep_best_by_sorting, has_certain)
    for s, each in enumerate(params):
        general = uniforms[s].at(place, DEPTH + 1)
        is_certain = each.is_greedy or each.seed is not None
        if is_certain:
            assert drafted[s].tolist() == IDS_OF[draft_logits[s].argmax(-1)].tolist()
            probs = None
        else:
            q = (draft_logits[s] / max(each.temperature, 1e-30)).softmax(-1)
            if torch.isfinite(q.sum()):
                assert drafted[s].tolist() == IDS_OF[pick(q, general[:DEPTH, 0])].tolist()
            probs = [SparseProbs(IDS_OF, level.q[s]) for level in drawn]
        draft = Draft(drafted[s].tolist(), probs)
        processor = Processor(each, [0], V)
        verdict = verify(logits[s], draft, processor, None if each.is_greedy else general[:, 1])
        assert picked[s, : len(verdict.token_ids)].tolist() == verdict.token_ids
        assert emitted(picked[s], drafted[s]) == len(verdict.token_ids)


def emitted(picked: torch.Tensor, drafted: torch.Tensor) -> int:
    """By the rule of the device: up to the first place where they part."""
    return int((picked[: len(drafted)] == drafted).long().cumprod(0).sum()) + 1


def test_one_token_at_a_time_is_the_general_ways_too():
    seats, rows, uniforms = seated(KINDS)
    logits = torch.randn(len(KINDS), 1, V, generator=torch.Generator().manual_seed(5))
    numbers = seats.uniforms(rows, torch.zeros(len(KINDS), dtype=torch.int64), 0)
    none = torch.empty(len(KINDS), 0, dtype=torch.int64)
    picked = judge(logits.clone(), seats.settings(rows), numbers[:, :, 1], none, [], None, keep_best_by_sorting)
    for s, each in enumerate(KINDS):
        verdict = verify(logits[s], Draft([]), Processor(each, [0], V), uniforms[s].at(0, 1)[:, 1])
        assert picked[s].tolist() == verdict.token_ids


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Standard deviations above what chance makes of it."""
    enough = expected >= 5
    freedom = int(enough.sum()) - 1
    return (float(((observed - expected)[enough] ** 2 / expected[enough]).sum()) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("lie", [0.0, 1.5], ids=["honest", "with a wrong q"])
def test_two_tokens_are_distributed_as_the_target_says(lie: float):
    """A target whose second token depends on the first, a drafter that is not quite right; what is left of p must make up for
    it. With a q that is not what was drawn from it does not, and the test sees that."""
    num, small, depth = 60_000, 6, 2
    generator = torch.Generator().manual_seed(7)
    table = 1.5 * torch.randn(small + 1, small, generator=generator)  # row: the token before, the last one at the start
    wrong = table + torch.randn(small + 1, small, generator=generator)
    params = [SamplingParams(temperature=0.8)]
    settings = Settings(*(value.expand(num) for value in vars(seated(params)[0].settings(torch.tensor([1]))).values()))
    numbers = torch.rand(num, depth + 1, 2, generator=generator, dtype=torch.float64)
    ids, drawn, tokens = torch.arange(small), [], torch.full((num,), small)
    chain = []
    for level in range(depth):
        drawn.append(draw(wrong[tokens], settings, numbers[:, level, 0]))
        tokens = drawn[-1].index
        chain.append(tokens)
    drafted = torch.stack(chain, dim=1)
    logits = torch.stack([table[small].expand(num, -1), table[drafted[:, 0]], table[drafted[:, 1]]], dim=1)
    claimed = [Drawn(level.index, (level.q.log() * (1 + lie)).softmax(-1)) for level in drawn]
    picked = judge(logits.clone(), settings, numbers[:, :, 1], drafted, claimed, ids, None, has_certain=False)
    p = (table / 0.8).softmax(-1)
    first = torch.bincount(picked[:, 0], minlength=small).double()
    is_accepted = picked[:, 0] == drafted[:, 0]
    second = torch.zeros(small, small, dtype=torch.float64)
    second.index_put_((picked[is_accepted, 0], picked[is_accepted, 1]), torch.ones(1).double(), accumulate=True)
    largest = max(
        chi_square(first, num * p[small].double()),
        *(chi_square(row, row.sum() * p[token].double()) for token, row in enumerate(second) if row.sum() > 500),
    )
    assert 0.3 < float(is_accepted.double().mean()) < 0.95
    assert (largest < 5) == (lie == 0.0), largest


def test_what_is_not_finite_gives_no_token():
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(seed=2), SamplingParams()]
    seats, rows, _ = seated(params)
    logits = torch.randn(4, DEPTH + 1, V)
    logits[:3, 1, 3] = math.nan
    logits[3, 2] = math.inf
    settings, numbers = seats.settings(rows), seats.uniforms(rows, torch.zeros(4, dtype=torch.int64), DEPTH)
    draft_logits = logits[:, :DEPTH, IDS_OF]
    draft_logits[1, 0, 2] = math.nan  # the drafter's may be broken too
    drafted, drawn = chains(draft_logits, settings, numbers)
    picked = judge(logits.clone(), settings, numbers[:, :, 1], drafted, drawn, IDS_OF, None)
    assert picked[[0, 1, 2, 3], [1, 1, 1, 2]].tolist() == [-1] * 4
    assert (picked[:, 0] >= 0).all()
    with pytest.raises(ModelError):
        verify(logits[0], Draft(drafted[0].tolist()), Processor(params[0], [0], V))


def test_numbers_are_those_of_the_place_wherever_the_ring_is():
    seats, rows, uniforms = seated([SamplingParams(), SamplingParams(seed=4)], place=60)
    sampled = Sampled(SamplingParams(), uniforms[0], 60)
    places = torch.tensor([62, 127])
    assert torch.equal(seats.uniforms(rows, places, 0)[0], uniforms[0].at(62, 1))
    assert torch.equal(seats.uniforms(rows, torch.tensor([62, 62]), 5)[1], uniforms[1].at(62, 6))
    seats.fill([1], [2], [sampled])
    assert torch.equal(seats.uniforms(rows, torch.tensor([125, 0]), 7)[0], uniforms[0].at(125, 8))


def test_who_needs_truncating():
    assert [truncates(each) for each in KINDS] == [False, False, False, True, True, True, True, False]
