"""Held-out prompts, with and without speculation side by side, and whether both gave the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from client import Answer, Client, acceptance_length, tokens_per_second
from traffic import Messages

NEAR_TIE = 1e-3  # float32 forwards of different shapes differ by less; best two logits that close may swap
RESAMPLES = 4000


@dataclass(frozen=True)
class Pair:
    """One prompt answered twice."""

    messages: Messages
    speculative: Answer
    plain: Answer


@dataclass(frozen=True)
class Difference:
    """The first place where the two answers of a prompt differ.

    gap: between the best two logits there; None if the two ways differ in anything but these two, or not when asked again.
    """

    prompt: int
    token: int
    gap: float | None
    speculative: str
    plain: str

    @property
    def is_near_tie(self) -> bool:
        return self.gap is not None and self.gap <= NEAR_TIE


@dataclass(frozen=True)
class Evaluation:
    pairs: list[Pair]
    differences: list[Difference]

    @property
    def speculative(self) -> list[Answer]:
        return [pair.speculative for pair in self.pairs]

    @property
    def plain(self) -> list[Answer]:
        return [pair.plain for pair in self.pairs]

    @property
    def acceptance_length(self) -> float:
        return acceptance_length(self.speculative)

    @property
    def speedup(self) -> float:
        return tokens_per_second(self.speculative) / tokens_per_second(self.plain)


def evaluate(client: Client, prompts: Sequence[Messages], on_pair: Callable[[int], None]) -> Evaluation:
    """One request at a time; the two ways take turns in going first. Nothing of it becomes training data."""
    pairs: list[Pair] = []
    for speculate in (True, False):  # the first forwards of a process are slower
        client.chat(prompts[0], speculate=speculate, store=False)
    for index, messages in enumerate(prompts):
        answers: dict[bool, Answer] = {}
        for speculate in (True, False) if index % 2 == 0 else (False, True):
            answers[speculate] = client.chat(messages, speculate=speculate, store=False)
        pairs.append(Pair(messages, answers[True], answers[False]))
        on_pair(len(pairs))
    different = [index for index, pair in enumerate(pairs) if pair.speculative.text != pair.plain.text]
    return Evaluation(pairs, [locate(client, index, prompts[index]) for index in different])


def locate(client: Client, prompt: int, messages: Messages) -> Difference:
    """Ask both ways again, token by token, and look at the first token that differs."""
    speculative, plain = (client.steps(messages, speculate=speculate) for speculate in (True, False))
    for token, (ours, theirs) in enumerate(zip(speculative, plain, strict=False)):
        if ours.token != theirs.token:
            words = ours.token.decode(errors="replace"), theirs.token.decode(errors="replace")
            return Difference(prompt, token, theirs.gap if ours.token == theirs.second else None, *words)
    return Difference(prompt, min(len(speculative), len(plain)), None, "", "")


def lift(before: Evaluation, after: Evaluation, seed: int = 0) -> tuple[float, float, float]:
    """Gain in acceptance length, with the ends of its 95 % interval by a bootstrap over prompts (pairs kept together)."""
    rng = random.Random(seed)
    gains = []
    for _ in range(RESAMPLES):
        chosen = rng.choices(range(len(before.pairs)), k=len(before.pairs))
        old, new = ([evaluation.speculative[index] for index in chosen] for evaluation in (before, after))
        gains.append(acceptance_length(new) - acceptance_length(old))
    gains.sort()
    return after.acceptance_length - before.acceptance_length, gains[int(0.025 * RESAMPLES)], gains[int(0.975 * RESAMPLES)]
