"""Questions behind answers: one row where the template goes on from the tokens before, else one for each turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import pytest

from runtime.backends import load_target
from runtime.config import BackendConfig, ModelConfig, SessionsConfig, SpeculationConfig
from runtime.drafters.ngram import NgramDrafter
from runtime.engine.local import LocalEngine
from runtime.features.tap import CapturedTurn
from runtime.models import Tokenizer
from runtime.types import Switch
from training.data.prompts import Prompt
from training.dialogues import Dialogue, Dialogues, longest_row

from .numerals import ANSWERS, ASKS, Numerals

NEVER = bool  # `bool()` is False


class Turns:
    """A tap that lists what it is offered."""

    def __init__(self) -> None:
        self.offered: list[CapturedTurn] = []

    def offer(self, turn: CapturedTurn) -> bool:
        self.offered.append(turn)
        return True

    def close(self) -> None:
        pass


def prompt(*questions: str, name: str = "p") -> Prompt:
    messages = ({"role": "user", "content": questions[0]},)
    return Prompt(name, tuple(Numerals().encode_chat(messages)), "a slice", messages, later=questions[1:])


Make = Callable[..., Dialogues]


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def make(tiny, turns: Turns) -> Iterator[Make]:
    target = load_target(BackendConfig(num_threads=1), ModelConfig(name=str(tiny.path), device="cpu"), tiny)
    sessions = SessionsConfig(max_sessions=8)
    engine = LocalEngine(target, NgramDrafter(), Tokenizer.load(tiny.path), SpeculationConfig(), sessions, turns)
    engine.start()

    def make(goes_on: bool = True, max_tokens: int = 500, concurrency: int = 2) -> Dialogues:
        return Dialogues(engine, Numerals(goes_on), 0, concurrency, 6, max_tokens, Switch.ON)

    yield make
    engine.stop()


def test_where_the_template_goes_on_a_dialogue_is_one_row(make: Make, turns: Turns) -> None:
    dialogue = Dialogue(prompt("20 21", "30", "40 41"), 3, 0.7)
    assert [turn.is_over for turn in make().turns(deque([dialogue]), NEVER)] == [False, False, True]
    [row] = dialogue.rows
    assert (row.name, row.slice, row.temperature) == ("p#3", "a slice", 0.7)
    ids, said = list(row.token_ids), [list(row.token_ids[first:stop]) for first, stop in row.spans]
    assert ids == [*ASKS, 20, 21, *ANSWERS, *said[0], *ASKS, 30, *ANSWERS, *said[1], *ASKS, 40, 41, *ANSWERS, *said[2]]
    assert list(dialogue.sessions) == [turns.offered[-1].session_id]
    assert list(turns.offered[-1].token_ids) == ids
    assert sum(map(len, turns.offered[-1].hidden)) >= len(ids) - 1  # of the whole dialogue
    assert turns.offered[-1].labels == {"slice": "a slice"}


def test_where_it_does_not_each_turn_is_a_row_with_a_session_of_its_own(make: Make, turns: Turns) -> None:
    dialogues = make(goes_on=False)
    dialogue = Dialogue(prompt("20 21", "30"), 0, 0.0)
    assert [turn.is_over for turn in dialogues.turns(deque([dialogue]), NEVER)] == [False, True]
    assert [row.name for row in dialogue.rows] == ["p#0", "p#0.1"]
    assert [len(row.spans) for row in dialogue.rows] == [1, 1]
    assert dialogue.rows[1].token_ids[: dialogue.rows[1].spans[0][0]] == [*ASKS, 20, 21, *ANSWERS, *ASKS, 30, *ANSWERS]
    assert list(dialogue.sessions) == [turn.session_id for turn in turns.offered]
    assert dialogues.engine.list_sessions() == []


def test_a_question_that_cannot_be_asked_ends_the_dialogue_and_is_counted(make: Make) -> None:
    dialogues = make(max_tokens=30)
    long, refused = Dialogue(prompt("20", "30 " * 20, "40"), 0, 0.0), Dialogue(prompt("20", "refused", "40"), 0, 0.0)
    assert len(list(dialogues.turns(deque([long, refused]), NEVER))) == 2
    assert dialogues.left_out == {"too_long": 1, "refused_by_template": 1}
    assert len(long.rows) == len(refused.rows) == 1


def test_what_is_said_depends_on_the_prompt_and_the_number_alone(make: Make) -> None:
    def said(concurrency: int, numbers: Sequence[int]) -> dict[tuple[str, int], list[int]]:
        asked = [Dialogue(prompt("20", "30", name=name), number, 1.0) for number in numbers for name in "ab"]
        list(make(concurrency=concurrency).turns(deque(asked), NEVER))
        return {(each.prompt.id, each.number): list(each.rows[0].token_ids) for each in asked}

    both = said(4, (0, 1))
    assert said(1, (1,)).items() <= both.items()
    assert len({tuple(ids) for ids in both.values()}) == 4


def test_the_longest_row_is_that_of_a_dialogue_in_one(make: Make) -> None:
    dialogue = Dialogue(prompt("20 21", "30", "40 41"), 0, 0.0)
    list(make().turns(deque([dialogue]), NEVER))
    longest = longest_row(dialogue.prompt, Numerals(), 6)
    assert 0 <= longest - len(dialogue.rows[0].token_ids) <= 2 + 3 * 5  # dots, and answers that ended early
    assert longest_row(prompt("20", "refused"), Numerals(), 6) == len(prompt("20").token_ids) + 12
    assert longest_row(prompt("20"), Numerals(), 6) == len(prompt("20").token_ids) + 6
