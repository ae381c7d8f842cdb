"""Acceptance length: the batched simulation against the drafter that really serves, step by step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runtime.drafters.base import Drafter, DraftRequest
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.ngram import NgramDrafter
from runtime.types import SpeculationStats
from training.data.batches import TrainingRow
from training.judging.simulation import Counts, TargetView, depth_acceptance, evaluate, evaluate_ngram, total, walk
from training.learning.start import from_scratch

D = 5


def turns(generated: torch.Tensor) -> list[tuple[int, int]]:
    """First and last index of each run of generated tokens."""
    edges = torch.diff(
        generated.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8), append=torch.zeros(1, dtype=torch.int8)
    )
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return [(int(start), int(stop) - 1) for start, stop in zip(starts, stops, strict=True)]


def as_counts(stats: SpeculationStats) -> Counts:
    return Counts(**vars(stats))


def reaching(reach: list[int]) -> list[list[float]]:
    """Chances of certain drafts of which so many in a row are right."""
    return [[1.0] * hits + [0.0] * (D - hits) for hits in reach]


def served(drafter: Drafter, row: TrainingRow, num_draft_tokens: int) -> Counts:
    """What a server counts on this row: draft, compare with what the target really said, accept, take the bonus token, go on."""
    x = row.features.token_ids.tolist()
    aux = row.features.hidden.aux.float()
    stats = SpeculationStats()
    for first, last in turns(row.features.generated):
        state = drafter.new_state()
        primed, p = 0, first - 1
        while p + 2 <= last:
            depth = min(num_draft_tokens, last - p - 1)
            request = DraftRequest(state, primed, aux[primed : p + 1], x[: p + 2], depth)
            draft = drafter.propose([request])[0].token_ids
            accepted = 0
            while accepted < len(draft) and draft[accepted] == x[p + 2 + accepted]:
                accepted += 1
            stats.record(depth, accepted)
            primed, p = p + 1, p + accepted + 1
        drafter.drop_state(state)
    return as_counts(stats)


@pytest.mark.parametrize("num_draft_tokens", [1, D])
def test_counts_are_those_of_the_serving_drafter(state, num_draft_tokens: int) -> None:
    learner = from_scratch(state.target, state.config(trainer__learning_rate=3e-3).trainer, state.rows(range(12)))
    for _ in range(12):  # half-learned, so that some drafts are right and some are not
        learner.step(state.rows(range(12)))
    rows = state.rows(range(6, 18), num_generated=21)
    model = learner.served()
    counts = evaluate(model, rows, num_draft_tokens, TargetView(state.target.lm_head))
    assert counts == [served(Eagle3Drafter(model, "test"), row, num_draft_tokens) for row in rows]
    everything = total(counts)
    assert 0 < everything.num_accepted < everything.num_drafted


def test_counts_of_rows_with_several_turns(make_model: Callable, make_row: Callable) -> None:
    """Untrained, so nearly nothing is accepted: what counts is which steps there are."""
    model = make_model(dtype=torch.float32)
    rows = [make_row(pattern, seed, low=16) for seed, pattern in enumerate(("ppggggppggg", "pppp", "pgg", "pgpgpggggg"))]
    assert evaluate(model, rows, D, TargetView(model.embedding)) == [served(Eagle3Drafter(model, "test"), row, D) for row in rows]


def test_counts_of_ngram_lookup_are_those_of_serving_it(make_row: Callable) -> None:
    """Rows of few distinct tokens, so that endings come again and some guesses are right."""
    rows = [make_row(pattern, seed, low=2) for seed, pattern in enumerate(("pppp" + "g" * 40, "ppggggppggg", "pgg", "pppp"))]
    for row in rows:
        row.features.token_ids.remainder_(3)
    counts = evaluate_ngram(rows, D)
    assert counts == [served(NgramDrafter(), row, D) for row in rows]
    assert 0 < total(counts).num_accepted < total(counts).num_drafted


def test_walk_accepts_advances_and_stops_at_the_end_of_a_turn() -> None:
    """A turn with 6 positions (7 tokens behind the first): 2 drafts hit and a bonus, a miss, then to the end."""
    stats = walk(reaching([2, 0, 0, 0, 2, 1]), depths=[6, 5, 4, 3, 2, 1], num_draft_tokens=5)
    assert (stats.num_steps, stats.num_accepted, stats.num_drafted) == (3, 4, 5 + 3 + 2)
    assert stats.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert stats.accepted_per_position == [2, 2]
    assert stats.drafted_per_position == [3, 3, 2, 1, 1]
    assert depth_acceptance(stats) == pytest.approx([2 / 3, 2 / 3, 0, 0, 0])


def test_walk_of_a_perfect_drafter_and_of_none() -> None:
    depths = list(range(20, 0, -1))
    assert walk(reaching([min(D, depth) for depth in depths]), depths, D).num_steps == 4  # 6 + 6 + 6 + the last 3 tokens
    assert walk(reaching([0] * 20), depths, D).num_steps == 20
    assert walk([], [], D).num_steps == 0


def test_sums_divide_last() -> None:
    counts = [SpeculationStats(), SpeculationStats(), SpeculationStats()]
    counts[0].record(5, 5)
    counts[1].record(5, 0)
    counts[1].record(2, 1)
    summed = total(map(as_counts, counts))
    assert summed == as_counts(SpeculationStats.total(counts))
    assert summed.mean_acceptance_length == 3.0
    assert summed.accepted_per_position == [2, 1, 1, 1, 1]
    assert summed.drafted_per_position == [3, 3, 2, 2, 2]


def test_walk_of_sampled_drafts_is_the_mean_of_the_courses_it_may_take() -> None:
    """Against dice: each draft of each step is accepted by its chance, and the step moves on."""
    chances = [
        [0.9, 0.5, 0.2],
        [0.3, 0.8, 0.7],
        [0.6, 0.6, 0.0],
        [0.1, 0.9, 0.0],
        [0.5, 0.0, 0.0],
        [0.4, 0.7, 0.0],
        [0.2, 0.0, 0.0],
    ]
    depths = [5, 4, 3, 2, 1, 2, 1]  # two turns
    expected = walk(chances, depths, 3)
    dice, num_courses = torch.Generator().manual_seed(0), 20_000
    seen = SpeculationStats()
    for _ in range(num_courses):
        rolls = torch.rand(len(depths), 3, generator=dice).tolist()
        at = 0
        while at < len(depths):
            length = min(3, depths[at])
            hits = [roll < chance for roll, chance in zip(rolls[at], chances[at], strict=True)][:length]
            accepted = [*hits, False].index(False)
            seen.record(length, accepted)
            at += min(accepted + 1, depths[at])
    for name in ("num_steps", "num_drafted", "num_accepted"):
        assert getattr(expected, name) == pytest.approx(getattr(seen, name) / num_courses, rel=0.01)
    assert expected.accepted_per_position == pytest.approx([n / num_courses for n in seen.accepted_per_position], rel=0.05)
    assert expected.drafted_per_position == pytest.approx([n / num_courses for n in seen.drafted_per_position], rel=0.02)


def test_evaluation_does_not_depend_on_the_company_of_a_row(state, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = from_scratch(state.target, state.config(trainer__learning_rate=3e-3).trainer, state.rows(range(8)))
    for _ in range(12):
        learner.step(state.rows(range(8)))
    rows = state.rows(range(8))
    target = TargetView(state.target.lm_head)
    together = evaluate(learner.served(), rows, D, target)
    monkeypatch.setattr("training.judging.simulation.MAX_BATCH_TOKENS", 25)
    assert evaluate(learner.served(), rows, D, target) == together
