"""Where two outputs part and why, gains with their interval, and the verdict on a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import evaluation
import pytest
import report
from client import Answer, Step
from evaluation import Difference, Evaluation, Pair
from report import Activation, Run
from traffic import Messages

MESSAGES: Messages = [{"role": "user", "content": "hello"}]


def answer(accepted: int, steps: int = 10, seconds: float = 1.0, at: float = 0.0) -> Answer:
    return Answer("text", accepted + steps, steps, accepted, seconds, "abc", at)


def evaluated(accepted: Sequence[int], differences: Sequence[Difference] = ()) -> Evaluation:
    plain = answer(0, steps=20, seconds=2.0)
    return Evaluation([Pair(MESSAGES, answer(count), plain) for count in accepted], list(differences))


class Recorded:
    """Two answers, token by token, as a server would give them when asked again."""

    def __init__(self, speculative: list[Step], plain: list[Step]) -> None:
        self._answers = {True: speculative, False: plain}

    def steps(self, messages: Messages, *, speculate: bool) -> list[Step]:
        return self._answers[speculate]


def step(token: str, second: str = "?", gap: float = 5.0) -> Step:
    return Step(token.encode(), second.encode(), gap)


@pytest.mark.parametrize(
    ("speculative", "plain", "token", "is_near_tie"),
    [
        ([step("a"), step("c", "b", 4e-4)], [step("a"), step("b", "c", 4e-4)], 1, True),
        ([step("a"), step("c", "b", 2e-3)], [step("a"), step("b", "c", 2e-3)], 1, False),
        ([step("a"), step("d", "b", 4e-4)], [step("a"), step("b", "c", 4e-4)], 1, False),  # neither of the best two
        ([step("a")], [step("a"), step("b")], 1, False),  # one ended early
        ([step("a")], [step("a")], 1, False),  # not to be seen again
    ],
)
def test_only_a_swap_of_two_close_tokens_is_a_near_tie(
    speculative: list[Step], plain: list[Step], token: int, is_near_tie: bool
) -> None:
    difference = evaluation.locate(Recorded(speculative, plain), 7, MESSAGES)
    assert (difference.prompt, difference.token, difference.is_near_tie) == (7, token, is_near_tie)


def test_lengths_add_counts_before_they_divide() -> None:
    pairs = [Pair(MESSAGES, answer(30, steps=10), answer(0)), Pair(MESSAGES, answer(0, steps=90), answer(0))]
    assert Evaluation(pairs, []).acceptance_length == pytest.approx(1.3)


def test_the_gain_has_an_interval_around_it() -> None:
    gain, low, high = evaluation.lift(evaluated([10, 12, 8, 11] * 5), evaluated([15, 14, 13, 16] * 5))
    assert gain == pytest.approx(0.425)
    assert 0.2 < low < gain < high < 0.7


def good_run() -> Run:
    run = Run(False, 96, 4, "passages", evaluated([10, 12]), evaluated([15, 14]), [answer(10, at=1.0), answer(15, at=3.0)])
    run.activations = [Activation("0123456789abcdef", 2.0)]
    return run


def test_a_good_run_is_a_success() -> None:
    assert good_run().verdict() == []


def test_each_fault_is_told() -> None:
    run = good_run()
    run.failures = ["500: boom"]
    run.activations = []
    assert run.after is not None
    run.after.differences.append(Difference(0, 3, 0.5, "a", "b"))
    assert [reason.split(",")[0] for reason in run.verdict()] == [
        "1 requests failed",
        "1 outputs differed with speculation",
        "no new drafter version was activated",
    ]


def test_a_drafter_that_is_no_better_is_no_success_but_from_scratch_there_is_no_bar() -> None:
    run = good_run()
    run.after = run.before
    assert run.verdict() == ["the activated drafter is no better on held-out prompts"]
    run.is_from_scratch = True
    assert run.verdict() == []


def test_the_page_has_the_numbers_and_lists_near_ties(tmp_path: Path) -> None:
    run = good_run()
    assert run.before is not None
    run.before.differences.append(Difference(1, 17, 2e-4, " the", " a"))
    page = report.write(run, tmp_path).read_text()
    assert "# The loop, closed" in page
    assert "2.10 before (`abc`), 2.45 after" in page
    assert "`0123456789abcdef`, 1 requests in" in page
    assert "before: 1 of 2 answers byte-equal" in page
    assert "prompt 1, token 17: ' the' against ' a', best two logits 2.0e-04 apart (near-tie, within 0.001)" in page
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
