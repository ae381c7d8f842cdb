"""Answers that differ, judged by the plain model in float32."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
import torch

from runtime.backends.transformers.loading import read_weights
from runtime.models import ResolvedModel
from training.judging import sheet
from training.judging.answers import Answer, Pass
from training.judging.lossless import OWN, SPECULATED, Deviation, deviations, plain
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
        assert found.odd_one == (None if is_near else SPECULATED)
        assert found.gap == pytest.approx(gap, abs=1e-4)
        assert found.largest_gap == pytest.approx(gap, abs=1e-4)


@torch.no_grad()
def test_of_two_answers_it_is_said_which_is_the_odd_one(model) -> None:
    best = continued(model, [], 8)
    logits = model(torch.tensor([[*PROMPT, *best[:3]]])).logits[0, -1]
    odd = continued(model, [*best[:3], int(logits.argmin())], 8)
    for ours, theirs, whose in ((best, odd, OWN), (odd, best, SPECULATED), (best[:5], best, SPECULATED), (best, best[:5], OWN)):
        [found] = judged(model, ours, theirs, 1e-3)
        assert (found.odd_one, found.is_near_tie) == (whose, False)


@pytest.mark.parametrize(
    ("odd_ones", "said"),
    [
        ([OWN], "speculated answer 0 times, which alone would be a fault of speculation, and the target's own, .* 1 times"),
        ([SPECULATED, OWN, OWN, None], "speculated answer 1 times, which .* and the target's own, .* 2 times"),
        ([None], None),
        (["unknown"], None),  # of a file of before
    ],
)
def test_the_sheet_says_whose_answer_is_no_tie(odd_ones: list[str | None], said: str | None) -> None:
    deviation = Deviation("d", "chain-3", "s", "q", 3, 5, 6, 0.43, 0.1, False, None)
    differing = [asdict(deviation) | {"odd_one": whose, "is_near_tie": whose is None} for whose in odd_ones]
    if odd_ones == ["unknown"]:
        del differing[0]["odd_one"]
    text = sheet._losslessness({"lossless": {"num_compared": 9, "deviations": differing}})
    assert f"{9 - len(odd_ones)} of 9 greedy answers equal" in text
    if said is None:
        assert "Where it says" not in text
    else:
        assert re.search(rf"\n\nWhere it says NO TIE, what is off is the {said}\.", text)


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
