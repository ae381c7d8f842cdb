"""Whether greedy answers are the same with a drafter and without one; where not, the first difference and how near a tie it was.

Forwards of different shapes differ in their last bits, so two logits that are nearly equal may swap places, and in half
precision many are. So the plain model in float32 is the judge: of an answer that differs, each token must be nearly its best.
What is not is a fault. (`backend=invariant` knows no such swaps.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from training.judging.answers import PLAIN, Answer, Pass
from training.judging.oracle import Oracle
from training.judging.questions import Question

SPECULATED, OWN = "speculated", "own"


@dataclass(frozen=True)
class Deviation:
    """The first place where the answer of a pass is not the target's own."""

    drafter: str
    shape: str
    suite: str
    question: str
    place: int  # in the answer, from 0
    drafted: int | None  # token ids; null: the answer ended there
    plain: int | None
    gap: float | None  # below the best float32 logit there, of the two that which lies lower; null: one ended
    largest_gap: float  # of any token of the answer with a drafter
    is_near_tie: bool  # neither is beyond the limit
    odd_one: str | None  # SPECULATED or OWN: which answer is beyond it, or ends where the other goes on; null: a near tie


def deviations(
    oracle: Callable[[], Oracle],  # only asked for if an answer differs
    limit: float,  # how far below the best float32 logit a token may lie
    under: Pass,
    questions: Iterable[Question],
    answers: Mapping[tuple[Pass, str, str], Answer],
) -> tuple[int, list[Deviation]]:
    """(answers compared, the first difference of each that differs). Greedy passes only."""
    num_compared = 0
    found = []
    for question in questions:
        keys = [(each, question.suite, question.id) for each in (under, plain(under))]
        if not all(key in answers for key in keys):
            continue
        num_compared += 1
        ours, theirs = (answers[key].token_ids for key in keys)
        if ours != theirs:
            found.append(_deviation(oracle(), limit, under, question, ours, theirs))
    return num_compared, found


def plain(under: Pass) -> Pass:
    """The pass without a drafter that this one is compared with. One for all drafters and shapes."""
    return Pass("none", PLAIN, under.temperature)


def _deviation(oracle: Oracle, limit: float, under: Pass, question: Question, ours: list[int], theirs: list[int]) -> Deviation:
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    drafted, plainly = (ids[place] if place < len(ids) else None for ids in (ours, theirs))
    our_gaps = oracle.gaps(question.token_ids, ours)
    gap = None
    if drafted is not None and plainly is not None:
        gap = max(our_gaps[place], oracle.gaps(question.token_ids, theirs[: place + 1])[place])
    is_near = gap is not None and max(gap, *our_gaps) <= limit
    odd_one = SPECULATED if drafted is None or max(our_gaps) > limit else OWN
    return Deviation(
        drafter=under.drafter,
        shape=under.shape,
        suite=question.suite,
        question=question.id,
        place=place,
        drafted=drafted,
        plain=plainly,
        gap=gap,
        largest_gap=max(our_gaps),
        is_near_tie=is_near,
        odd_one=None if is_near else odd_one,
    )
