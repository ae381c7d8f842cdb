"""Cuts: rows within the limit, every generated token taught exactly once, the first drafting position kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.features.cut import Cut, cut_turn


def _marks(num_prompt: int, num_generated: int, num_after: int = 0) -> tuple[bool, ...]:
    return (False,) * num_prompt + (True,) * num_generated + (False,) * num_after


def test_a_turn_within_the_limit_is_one_row() -> None:
    assert cut_turn(_marks(10, 6), 16) == [Cut(0, 16, 10)]


def test_a_long_prompt_loses_its_start() -> None:
    assert cut_turn(_marks(30, 6), 16) == [Cut(20, 36, 30)]


def test_the_last_prompt_token_always_stays() -> None:
    assert cut_turn(_marks(30, 15), 16) == [Cut(29, 45, 30)]
    assert cut_turn(_marks(30, 16), 16)[0] == Cut(29, 45, 30)


def test_a_long_answer_becomes_several_rows_with_context() -> None:
    assert cut_turn(_marks(5, 40), 16) == [Cut(4, 20, 5), Cut(16, 32, 19), Cut(28, 44, 31), Cut(29, 45, 43)]


def test_what_follows_the_answer_is_left_out() -> None:
    assert cut_turn(_marks(4, 6, 5), 16) == [Cut(0, 10, 4)]


def test_nothing_generated_is_no_row() -> None:
    assert cut_turn(_marks(10, 0), 16) == []


@given(st.integers(0, 80), st.integers(1, 200), st.integers(0, 4), st.integers(16, 64))
def test_each_generated_token_is_taught_once(num_prompt: int, num_generated: int, num_after: int, limit: int) -> None:
    marks = _marks(num_prompt, num_generated, num_after)
    taught: list[int] = []
    for cut in cut_turn(marks, limit):
        assert 0 <= cut.start < cut.stop <= num_prompt + num_generated
        assert cut.stop - cut.start <= limit
        marked = [marks[at] and at >= cut.taught_from for at in range(cut.start, cut.stop)]
        # the first drafting step at p needs x[p+1] and x[p+2] generated, and a hidden state at p inside the row
        pairs = range(len(marked) - 2)
        taught += [cut.start + p + 2 for p in pairs if marked[p + 1] and marked[p + 2]]
    first = max(num_prompt + 1, 2)  # the target samples the first generated token itself, and position 0 teaches x[2] first
    assert taught == list(range(first, num_prompt + num_generated))
