"""Steps read off an answer, the figures of its beginning, and the file that keeps answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.backends import load_target
from runtime.config import BackendConfig, ModelConfig, SessionsConfig
from runtime.drafters.ngram import NgramDrafter
from runtime.engine.local import LocalEngine
from runtime.errors import ConfigError
from runtime.models import Tokenizer
from runtime.types import SpeculationStats
from training.judging.answers import PLAIN, Answer, AnswerLog, Asker, Pass, steps_of
from training.judging.config import speculation_of
from training.judging.questions import Question

Y, N = True, False


@pytest.mark.parametrize(
    ("drafted", "steps"),
    [
        ([N], []),
        ([N, N, N], [0, 0]),
        ([N, Y, Y, N, N, Y], [2, 0, 1]),
        ([N, Y, Y, N], [2]),
        ([], []),
    ],
)
def test_steps_are_read_off_what_was_drafted(drafted: list[bool], steps: list[int]) -> None:
    assert steps_of(drafted) == steps


def test_an_answer_may_begin_with_a_step_and_have_a_prefill_in_its_middle() -> None:
    """d own | own | d d own || the history was read again | own"""
    drafted, prefilled = [Y, N, N, Y, Y, N, N, N], [6]
    steps = steps_of(drafted, prefilled)
    assert steps == [1, 0, 2, 0]
    answer = Answer("d", "chain-3", 0.0, "s", "q", list(range(8)), steps, [], [], 0.1, prefilled)
    assert [answer.upto(length) for length in (1, 2, 3, 5, 6, 7, 8)] == [
        (1, 1), (1, 1), (2, 1), (3, 3), (3, 3), (3, 3), (4, 3)
    ]  # fmt: skip


def make_answer(token_ids: list[int], steps: list[int], question: str = "q") -> Answer:
    return Answer("d", "chain-3", 0.0, "s", question, token_ids, steps, [], [], 0.1)


def test_the_beginning_of_an_answer_is_an_answer() -> None:
    """prompt's own | d d own | own | d d d own | d"""
    answer = make_answer(list(range(10)), [2, 0, 3, 1])
    assert answer.upto(100) == (4, 6)
    assert answer.upto(10) == (4, 6)
    assert answer.upto(9) == (3, 5)  # the third step's own token is token 8
    assert answer.upto(7) == (3, 4)  # two of its drafts fit
    assert answer.upto(5) == (2, 2)
    assert answer.upto(3) == (1, 2)
    assert answer.upto(1) == (0, 0)


def test_repeated_grams_are_counted_within_the_answer() -> None:
    assert make_answer([1, 2] * 8, []).loops(16) == (7, 9)  # two different ones
    assert make_answer([1, 2] * 8, []).loops(9) == (0, 2)
    assert make_answer(list(range(20)), []).loops(20) == (0, 13)
    assert make_answer([1], []).loops(20) == (0, 0)


def test_a_log_goes_on_behind_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    log = AnswerLog(path)
    log.add(make_answer([1, 2], [0], "first"))
    log.add(make_answer([3, 4], [0], "second"))
    with pytest.raises(ConfigError, match="another process is evaluating there"):
        AnswerLog(path)
    log.close()
    path.write_bytes(path.read_bytes()[:-9])
    log = AnswerLog(path)
    assert [answer.question for answer in log.answers.values()] == ["first"]
    log.add(make_answer([3, 4], [0], "second"))
    log.close()
    log = AnswerLog(path)
    assert list(log.answers.values()) == [make_answer([1, 2], [0], "first"), make_answer([3, 4], [0], "second")]
    log.close()


@pytest.mark.parametrize("damage", ["{", '{"drafter": "ngram"}', "[]", "5", "\xff", "[" * 100_000], ids=range(6))
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "answers.jsonl"
    log = AnswerLog(path)
    log.add(make_answer([1, 2], [0], "first"))
    log.close()
    text = path.read_text() + damage + "\n"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"answers\.jsonl:2 is no answer of an evaluation"):
        AnswerLog(path)
    assert path.read_text(encoding="latin-1") == text


QUESTIONS = [Question("s", str(number), "c", (3 + number, 40, 9, 40, 9, 40)) for number in range(6)]


def answers_of(
    state, under: Pass, max_tokens: int, concurrency: int = 4, chunk_tokens: int = 256, questions: Sequence[Question] = QUESTIONS
) -> list[Answer]:
    target = load_target(BackendConfig(num_threads=1), ModelConfig(name=str(state.model.path)), state.model)
    sessions = SessionsConfig(
        max_sessions=concurrency, max_batch_sessions=concurrency, prefix_reuse=False, prefill_chunk_tokens=chunk_tokens
    )
    engine = LocalEngine(target, NgramDrafter(), Tokenizer.load(state.model.path), speculation_of("chain-3"), sessions)
    engine.start()
    try:
        asker = Asker(engine, max_tokens, concurrency, 0, threading.Event())
        return sorted(asker.ask(under, questions), key=lambda answer: answer.question)
    finally:
        engine.stop()


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_figures_of_a_beginning_are_those_of_a_shorter_answer(state, temperature: float) -> None:
    """What an engine counts when it is asked for so many tokens and no more."""
    under = Pass("ngram", "chain-3", temperature)
    long = answers_of(state, under, 40)
    assert sum(sum(answer.steps) for answer in long) > 10, "or nothing is shown"
    for length in (7, 12, 25):
        for whole, short in zip(long, answers_of(state, under, length), strict=True):
            assert short.token_ids == whole.token_ids[:length]
            assert (len(short.steps), sum(short.steps)) == whole.upto(length)


def test_a_prompt_whose_last_piece_is_one_token_is_drafted_behind_at_once(state) -> None:
    """In pieces of 16 its last token is left alone: it is pending like any token of an answer."""
    questions = [Question("s", str(number), "c", (number, *(40, 9) * 8)) for number in range(4)]
    under = Pass("ngram", "chain-3", 0.0)
    pieces, whole = (answers_of(state, under, 24, 1, chunk, questions) for chunk in (16, 256))
    assert [answer.token_ids for answer in pieces] == [answer.token_ids for answer in whole]
    assert [answer.prefilled for answer in pieces] == [[]] * 4
    assert [answer.prefilled for answer in whole] == [[0]] * 4
    for answer in pieces:
        assert answer.upto(100) == (len(answer.steps), sum(answer.steps))


def test_answers_do_not_depend_on_who_is_asked_beside(state) -> None:
    under = Pass("ngram", "chain-3", 1.0)
    one, other = (answers_of(state, under, 20, concurrency) for concurrency in (1, 6))
    assert [answer.token_ids for answer in one] == [answer.token_ids for answer in other]
    assert [answer.steps for answer in one] == [answer.steps for answer in other]


def test_an_answer_without_a_drafter_has_a_step_for_each_token(state) -> None:
    for answer in answers_of(state, Pass("none", PLAIN, 0.0), 10):
        assert answer.steps == [0] * (len(answer.token_ids) - 1)


def test_depth_counts_are_the_engines_own(state) -> None:
    total = SpeculationStats()
    for answer in answers_of(state, Pass("ngram", "chain-3", 0.0), 40):
        total.add(SpeculationStats(accepted_per_position=answer.accepted_per_position))
        assert sum(answer.accepted_per_position) == sum(answer.steps)
    assert total.accepted_per_position == sorted(total.accepted_per_position, reverse=True)
