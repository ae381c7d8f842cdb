"""Whether greedy answers are the same with a drafter and without one; where not, the first difference and how near a tie it was.

Forwards of different shapes differ in their last bits, so two logits that are nearly equal may swap places. What is not nearly
a tie is a fault. (`backend=invariant` knows no such swaps.)
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.engine.local import LocalEngine
from runtime.types import Done, Event, Failed, SamplingParams, SessionOptions, Switch, TokenLogprob, Tokens
from training.judging.answers import PLAIN, Answer, Pass
from training.judging.questions import Question

NEAR_TIE: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}  # logits: twice the last bit at about 20
TIMEOUT_S = 600.0


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
    gap: float | None  # between the logits of the two; null: one ended, or is not among the target's best
    is_near_tie: bool


def deviations(
    engine: LocalEngine, under: Pass, questions: Iterable[Question], answers: Mapping[tuple[Pass, str, str], Answer]
) -> tuple[int, list[Deviation]]:
    """(answers compared, the first difference of each that differs). The engine runs and is idle; greedy passes only."""
    num_compared = 0
    found = []
    for question in questions:
        keys = [(each, question.suite, question.id) for each in (under, plain(under))]
        if not all(key in answers for key in keys):
            continue
        num_compared += 1
        ours, theirs = (answers[key].token_ids for key in keys)
        if ours != theirs:
            found.append(_deviation(engine, under, question, ours, theirs))
    return num_compared, found


def plain(under: Pass) -> Pass:
    """The pass without a drafter that this one is compared with. One for all drafters and shapes."""
    return Pass("none", PLAIN, under.temperature)


def _deviation(engine: LocalEngine, under: Pass, question: Question, ours: list[int], theirs: list[int]) -> Deviation:
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    drafted, plainly = (ids[place] if place < len(ids) else None for ids in (ours, theirs))
    gap = None
    if drafted is not None and plainly is not None:
        best = dict(_best(engine, [*question.token_ids, *theirs[:place]]).top)
        if drafted in best and plainly in best:
            gap = abs(best[drafted] - best[plainly])
    is_near = gap is not None and gap <= NEAR_TIE[engine.info.dtype]
    return Deviation(under.drafter, under.shape, question.suite, question.id, place, drafted, plainly, gap, is_near)


def _best(engine: LocalEngine, token_ids: list[int]) -> TokenLogprob:
    """The target's best tokens behind these, with log-probabilities, whose differences are those of logits."""
    ended: queue.SimpleQueue[TokenLogprob | Exception] = queue.SimpleQueue()
    seen: list[TokenLogprob] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Tokens):
            seen.extend(event.logprobs)
        elif isinstance(event, Failed):
            ended.put(event.error)
        elif isinstance(event, Done):
            ended.put(seen[0])

    session = engine.create_session(SessionOptions(capture=Switch.OFF)).session_id
    engine.append(session, token_ids)
    params = SamplingParams(max_tokens=1, temperature=0.0, speculate=False, logprobs=True, top_logprobs=20)
    engine.generate(session, params, on_event=on_event)
    answer = ended.get(timeout=TIMEOUT_S)
    engine.close_session(session)
    if isinstance(answer, Exception):
        raise answer
    return answer
