"""What an evaluation found: acceptance lengths by category and answer length, with their intervals, from the answers alone.

Whole files are never added up with each other: the same prompts may stand in several. Counts first, division last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from runtime.types import SpeculationStats
from training.judging import bootstrap
from training.judging.answers import Answer, Pass
from training.judging.questions import Question, Suite

ALL = "all"  # categories of a file together


@dataclass(frozen=True)
class Figures:
    """Of one category of one file (or all of it), under one pass, at one answer length."""

    drafter: str
    shape: str
    temperature: float
    suite: str
    category: str
    length: int  # the first so many tokens of each answer
    num_prompts: int
    num_tokens: int
    num_steps: int
    num_accepted: int
    acceptance_length: float
    low: float  # ends of the interval
    high: float
    repeated_8grams: float | None  # share of 8-grams seen before in the answer; null: no answer is that long
    covered: float | None  # share of tokens that the drafter has in its vocabulary; null: it has none of its own


@dataclass(frozen=True)
class DepthFigures:
    """Of a whole file under one pass, of whole answers: how drafts fared by their depth."""

    drafter: str
    shape: str
    temperature: float
    suite: str
    accepted: list[float]  # [k]: share of the steps that drafted so deep in which draft k was accepted
    accepted_if_reached: list[float]  # [k]: the same of the steps in which draft k - 1 was


@dataclass(frozen=True)
class Difference:
    """One drafter's acceptance length minus another's on the same prompts."""

    drafter: str
    against: str
    shape: str
    temperature: float
    suite: str
    category: str
    length: int
    num_prompts: int
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Resampling:
    confidence: float
    resamples: int
    seed: int


class Found:
    """Answers of an evaluation, by the pass that they were given under."""

    def __init__(
        self,
        suites: Sequence[Suite],
        answers: Mapping[tuple[Pass, str, str], Answer],
        vocabularies: Mapping[str, torch.Tensor],  # bool [V] of each drafter that has one: what it can propose
        resampling: Resampling,
    ) -> None:
        self._suites = suites
        self._answers = answers
        self._vocabularies = vocabularies
        self._resampling = resampling

    def figures(self, under: Pass, length: int) -> list[Figures]:
        found = []
        for suite in self._suites:
            for category, questions in _categories(suite).items():
                answers = self._given(under, questions)
                if answers:
                    found.append(self._figures(under, suite.name, category, answers, length))
        return found

    def depths(self, under: Pass) -> list[DepthFigures]:
        found = []
        for suite in self._suites:
            stats = SpeculationStats()
            for answer in self._given(under, suite.questions):
                counts = answer.accepted_per_position, answer.drafted_per_position
                stats.add(SpeculationStats(accepted_per_position=counts[0], drafted_per_position=counts[1]))
            accepted, drafted = stats.accepted_per_position, stats.drafted_per_position
            accepted = accepted + [0] * (len(drafted) - len(accepted))
            reached = [drafted[0], *accepted] if drafted else []
            found.append(
                DepthFigures(
                    **asdict(under),
                    suite=suite.name,
                    accepted=[hits / made for hits, made in zip(accepted, drafted, strict=True)],
                    accepted_if_reached=[hits / max(made, 1) for hits, made in zip(accepted, reached, strict=False)],
                )
            )
        return found

    def differences(self, under: Pass, against: Pass, length: int) -> list[Difference]:
        found = []
        for suite in self._suites:
            for category, questions in _categories(suite).items():
                both = [q for q in questions if all((each, q.suite, q.id) in self._answers for each in (under, against))]
                if both:
                    found.append(self._difference(under, against, suite.name, category, both, length))
        return found

    def _given(self, under: Pass, questions: Sequence[Question]) -> list[Answer]:
        keys = [(under, question.suite, question.id) for question in questions]
        return [self._answers[key] for key in keys if key in self._answers]

    def _figures(self, under: Pass, suite: str, category: str, answers: Sequence[Answer], length: int) -> Figures:
        counted = _counted(answers, length)
        low, high = bootstrap.interval(bootstrap.lengths(counted, **self._draws), self._resampling.confidence)
        repeated, grams = (sum(column) for column in zip(*(answer.loops(length) for answer in answers), strict=True))
        return Figures(
            **asdict(under),
            suite=suite,
            category=category,
            length=length,
            num_prompts=len(answers),
            num_tokens=sum(min(len(answer.token_ids), length) for answer in answers),
            num_steps=int(sum(steps for _, steps in counted)),
            num_accepted=int(sum(accepted for accepted, _ in counted)),
            acceptance_length=bootstrap.length(counted),
            low=low,
            high=high,
            repeated_8grams=repeated / grams if grams else None,
            covered=self._covered(under.drafter, answers, length),
        )

    def _covered(self, drafter: str, answers: Sequence[Answer], length: int) -> float | None:
        """Of the tokens behind each answer's first, which the prompt alone decides."""
        can_draft = self._vocabularies.get(drafter)
        ids = [token_id for answer in answers for token_id in answer.token_ids[1:length]]
        return float(can_draft[torch.tensor(ids)].double().mean()) if can_draft is not None and ids else None

    def _difference(
        self, under: Pass, against: Pass, suite: str, category: str, questions: Sequence[Question], length: int
    ) -> Difference:
        ours, theirs = (_counted(self._given(each, questions), length) for each in (under, against))
        low, high = bootstrap.interval(bootstrap.differences(ours, theirs, **self._draws), self._resampling.confidence)
        return Difference(
            **asdict(under),
            against=against.drafter,
            suite=suite,
            category=category,
            length=length,
            num_prompts=len(questions),
            difference=bootstrap.length(ours) - bootstrap.length(theirs),
            low=low,
            high=high,
        )

    @property
    def _draws(self) -> dict[str, Any]:
        return {"resamples": self._resampling.resamples, "seed": self._resampling.seed}


def _counted(answers: Sequence[Answer], length: int) -> list[tuple[float, float]]:
    """(accepted, steps) of each answer's first `length` tokens."""
    return [(accepted, steps) for steps, accepted in (answer.upto(length) for answer in answers)]


def _categories(suite: Suite) -> dict[str, list[Question]]:
    """All questions first, then each category's, if there are several; in the order of the file."""
    groups: dict[str, list[Question]] = {}
    for question in suite.questions:
        groups.setdefault(question.category, []).append(question)
    return {ALL: list(suite.questions), **(groups if len(groups) > 1 else {})}
