"""The target answers prompts, and the questions behind them: a fixed number of dialogues at a time.

A dialogue is one prompt at one temperature. Its later questions are asked turn by turn, behind the answers that the target gave:

    prompt | answer | <end> next question <assistant> | answer | ...        one row with several spans,

where the chat template continues exactly the tokens of the turn before; where it does not, each turn is a row of its own, and has
a session of its own. What a dialogue says depends on the seed, its prompt's id and its number alone, never on what runs beside it
or drafts for it. Knows no file and no hidden state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from runtime.engine.base import Engine, Generation, OnEvent
from runtime.errors import InvalidRequest
from runtime.features.refs import SLICE_LABEL, unit_hash
from runtime.models import Tokenizer
from runtime.types import Done, SamplingParams, SessionOptions, Switch
from training.asking import Answer, answers
from training.data.conversations import Span
from training.data.encoding import REFUSED_BY_TEMPLATE, TOO_LONG
from training.data.prompts import Prompt
from training.data.tokens import TokenRow, name_of, teaches


class Dialogue:
    def __init__(self, prompt: Prompt, number: int, temperature: float) -> None:
        """number: no other dialogue with this prompt has it."""
        self.prompt = prompt
        self.number = number
        self.temperature = temperature
        self.sessions: dict[str, TokenRow | None] = {}  # that are over, in order, and the row of each; None: it teaches nothing
        self.num_turns = 0  # that are over
        self.session_id = ""  # none: the next turn needs one
        self.history = list(prompt.token_ids)  # of the row in progress
        self.spans: list[Span] = []
        self.messages: list[Mapping[str, Any]] = list(prompt.messages)
        self.later = deque(prompt.later)  # questions

    @property
    def rows(self) -> list[TokenRow]:
        return [row for row in self.sessions.values() if row is not None]

    @property
    def part(self) -> str:
        """Of its next row."""
        num_rows = len(self.rows)
        return f"{self.number}.{num_rows}" if num_rows else str(self.number)

    def take(self, said: Sequence[int]) -> None:
        if said:
            self.spans.append((len(self.history), len(self.history) + len(said)))
        self.history += said
        self.num_turns += 1

    def end_row(self) -> None:
        """The row in progress is whole, and its session over."""
        row = None
        if teaches(self.spans):
            ids, spans, prompt = self.history[: self.spans[-1][1]], tuple(self.spans), self.prompt
            row = TokenRow(prompt.id, self.part, ids, spans, self.temperature, prompt.slice)
        self.sessions[self.session_id] = row
        self.session_id, self.history, self.spans = "", [], []


@dataclass(frozen=True)
class Turn:
    """An answer within a dialogue. is_over: it was the last one, and all rows are there."""

    dialogue: Dialogue
    done: Done
    num_tokens: int
    is_over: bool


@dataclass
class Dialogues:
    engine: Engine  # running, once turns are asked for
    tokenizer: Tokenizer
    seed: int
    concurrency: int
    max_answer_tokens: int
    max_tokens: int  # of a row; a question that would pass it is not asked
    capture: Switch  # whether the engine's tap gets the turns
    left_out: Counter[str] = field(default_factory=Counter)  # questions that were not asked, by reason

    def turns(self, waiting: deque[Dialogue], should_stop: Callable[[], bool]) -> Generator[Turn, None, None]:
        """Turns as they end, until all dialogues are over or it is to stop. What runs when this is closed is given up."""
        with closing(answers(self.engine, waiting, self.concurrency, self._ask, should_stop)) as ended:
            for answer in ended:
                is_over = self._is_over(answer)
                if not is_over:
                    waiting.appendleft(answer.asked)
                yield Turn(answer.asked, answer.done, len(answer.token_ids), is_over)

    def _ask(self, dialogue: Dialogue, on_event: OnEvent) -> tuple[str, Generation]:
        """Have its history, which ends where the assistant is to speak, continued."""
        prompt = dialogue.prompt
        if not dialogue.session_id:
            labels = {SLICE_LABEL: prompt.slice} if prompt.slice else {}
            dialogue.session_id = self.engine.create_session(SessionOptions(capture=self.capture, labels=labels)).session_id
            self.engine.append(dialogue.session_id, dialogue.history)
        key = f"{self.seed}\0{name_of(prompt.id, str(dialogue.number))}\0{dialogue.num_turns}"
        params = SamplingParams(
            max_tokens=self.max_answer_tokens,
            temperature=dialogue.temperature,
            seed=int(unit_hash("capture", key) * 2**62),
            detokenize=False,
        )
        return dialogue.session_id, self.engine.generate(dialogue.session_id, params, on_event=on_event)

    def _is_over(self, answer: Answer[Dialogue]) -> bool:
        """Take in the answer; make ready for the next question, if there is one. Whether the dialogue has ended."""
        dialogue = answer.asked
        dialogue.take(answer.token_ids)
        following = self._following(dialogue, answer.token_ids) if dialogue.later else None
        length = len(dialogue.history)
        if following is not None and following[:length] == dialogue.history:
            self.engine.append(dialogue.session_id, following[length:])
        else:
            self.engine.close_session(dialogue.session_id)
            dialogue.end_row()
        if following is not None:
            dialogue.history = following
        return following is None

    def _following(self, dialogue: Dialogue, said: Sequence[int]) -> list[int] | None:
        """The ids up to where the next answer begins; None, counted, if the question cannot be asked."""
        dialogue.messages.append({"role": "assistant", "content": self.tokenizer.decode(said)})
        dialogue.messages.append({"role": "user", "content": dialogue.later.popleft()})
        try:
            following = self.tokenizer.encode_chat(dialogue.messages, dialogue.prompt.tools)
        except (InvalidRequest, RecursionError):
            self.left_out[REFUSED_BY_TEMPLATE] += 1
            return None
        if len(following) + self.max_answer_tokens > self.max_tokens:
            self.left_out[TOO_LONG] += 1
            return None
        return following


def longest_row(prompt: Prompt, tokenizer: Tokenizer, max_answer_tokens: int) -> int:
    """Tokens of the longest row that a dialogue with it becomes, if all is asked in one, and answers are as many tokens to the
    template as they were to the model."""
    messages = list(prompt.messages)
    for question in prompt.later:
        messages += [{"role": "assistant", "content": "."}, {"role": "user", "content": question}]
    try:
        asked = len(tokenizer.encode_chat(messages, prompt.tools)) if prompt.later else len(prompt.token_ids)
    except (InvalidRequest, RecursionError):
        asked = len(prompt.token_ids)  # no later question is asked
    return asked + (1 + len(prompt.later)) * max_answer_tokens
