"""Answers that differ, judged by the plain model in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runtime.backends.transformers.loading import read_weights
from runtime.models import ResolvedModel
from training.judging.answers import Answer, Pass
from training.judging.lossless import Deviation, deviations, plain
from training.judging.oracle import Oracle
from training.judging.questions import Question

PROMPT = (3, 40, 9, 40, 9, 41)
UNDER = Pass("d", "chain-3", 0.0)


@pytest.fixture(scope="module")
def model(tiny: ResolvedModel):
    return read_weights(tiny, torch.float32, torch.device("cpu")).train(False)


def continued(model, token_ids: list[int], num_tokens: int) -> list[int]:
    ids = [*PROMPT, *token_ids]
    while len(ids) < len(PROMPT) + num_tokens:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def judged(model, ours: list[int], theirs: list[int], limit: float) -> list[Deviation]:
    question = Question("s", "q", "c", PROMPT)
    answer = Answer("d", "chain-3", 0.0, "s", "q", ours, [], [], [], 0.1)
    answers = [answer, replace(answer, drafter=plain(UNDER).drafter, shape=plain(UNDER).shape, token_ids=theirs)]
    num_compared, found = deviations(lambda: Oracle(model), limit, UNDER, [question], {each.key: each for each in answers})
    assert num_compared == 1
    return found


@torch.no_grad()
def test_another_token_is_a_near_tie_within_the_limit_and_a_fault_beyond(model) -> None:
    theirs = continued(model, [], 8)
    logits = model(torch.tensor([[*PROMPT, *theirs[:3]]])).logits[0, -1]
    best, second = logits.topk(2)[1].tolist()
    gap = float(logits[best] - logits[second])
    assert best == theirs[3]
    ours = continued(model, [*theirs[:3], second], 8)
    for limit, is_near in ((gap + 1e-4, True), (gap - 1e-4, False)):
        [found] = judged(model, ours, theirs, limit)
        assert (found.place, found.drafted, found.plain, found.is_near_tie) == (3, second, best, is_near)
        assert found.gap == pytest.approx(gap, abs=1e-4)
        assert found.largest_gap == pytest.approx(gap, abs=1e-4)


@torch.no_grad()
def test_a_fault_behind_a_near_tie_is_found(model) -> None:
    theirs = continued(model, [], 8)
    logits = model(torch.tensor([[*PROMPT, *theirs[:3]]])).logits[0, -1]
    second = logits.topk(2)[1].tolist()[1]
    limit = float(logits.max() - logits[second]) + 1e-4
    ours = continued(model, [*theirs[:3], second], 8)
    worst = int(model(torch.tensor([[*PROMPT, *ours[:6]]])).logits[0, -1].argmin())
    [found] = judged(model, continued(model, [*ours[:6], worst], 8), theirs, limit)
    assert found.place == 3
    assert found.gap is not None
    assert found.gap <= limit < found.largest_gap
    assert not found.is_near_tie


def test_answers_that_are_equal_need_no_judge_and_one_that_ends_early_is_a_fault(model) -> None:
    theirs = continued(model, [], 8)
    assert judged(None, theirs, theirs, 0.0) == []
    [found] = judged(model, theirs[:5], theirs, 1.0)
    assert (found.place, found.drafted, found.plain, found.gap, found.is_near_tie) == (5, None, theirs[5], None, False)
