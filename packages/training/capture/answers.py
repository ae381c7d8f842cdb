"""The target answers prompts: a fixed number of dialogues at a time, each of them one row of tokens in the end.

A dialogue is one prompt at one temperature. Its later questions are asked turn by turn, behind the answers that the target gave:

    prompt | answer | <end> next question <assistant> | answer | ...        one row with several spans,

where the chat template continues exactly the tokens of the turn before; where it does not, each turn is a row of its own. What a
dialogue says depends on the seed, its prompt's id and its number alone, never on what runs beside it or drafts for it. Knows no
file and no hidden state.
"""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.engine.base import Engine
from runtime.errors import InvalidRequest
from runtime.features.refs import unit_hash
from runtime.models import Tokenizer
from runtime.types import Done, Event, Failed, SamplingParams, SessionOptions, Switch, Tokens
from training.capture.config import AnswersConfig
from training.data.conversations import Span
from training.data.encoding import NOTHING_TO_LEARN, REFUSED_BY_TEMPLATE, TOO_LONG
from training.data.prompts import Prompt
from training.data.tokens import TokenRow, name_of, teaches

LOOK_EVERY_S = 0.1  # how often whoever waits for an answer looks whether to stop


@dataclass
class _Dialogue:
    prompt: Prompt
    number: int  # of the answer, from 0
    temperature: float
    messages: list[Mapping[str, Any]]
    later: deque[str]
    history: list[int] = field(default_factory=list)  # of the row in progress
    spans: list[Span] = field(default_factory=list)
    rows: list[TokenRow] = field(default_factory=list)
    num_turns: int = 0
    session_id: str = ""  # none: the next turn needs one
    said: list[int] = field(default_factory=list)  # in the turn that runs

    @property
    def part(self) -> str:
        return f"{self.number}.{len(self.rows)}" if self.rows else str(self.number)

    def end_row(self) -> None:
        """The row in progress is whole."""
        if teaches(self.spans):
            ids, spans, prompt = self.history[: self.spans[-1][1]], tuple(self.spans), self.prompt
            self.rows.append(TokenRow(prompt.id, self.part, ids, spans, self.temperature, prompt.slice))
        self.history, self.spans = [], []


class Answers:
    def __init__(
        self,
        engine: Engine,  # running, once rows are asked for
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        config: AnswersConfig,
        seed: int,
        max_tokens: int,  # of a dialogue; a question that would pass it is not asked
        left_out: Counter[str],  # dialogues without a row, and questions that were not asked, are counted there by reason
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._seed = seed
        self._max_tokens = max_tokens
        self._waiting = deque(
            _Dialogue(prompt, number, temperature, list(prompt.messages), deque(prompt.later), list(prompt.token_ids))
            for prompt in prompts
            for number, temperature in enumerate(config.temperatures)
        )
        self.num_dialogues = len(self._waiting)
        self.num_done = 0
        self.num_generated = 0  # tokens
        self._left_out = left_out
        self._ended: queue.SimpleQueue[tuple[str, Done | Failed]] = queue.SimpleQueue()
        self._running: dict[str, _Dialogue] = {}

    def skip(self, known: Callable[[str], bool]) -> None:
        """Leave out dialogues whose first row has a name that is known already."""
        self._waiting = deque(each for each in self._waiting if not known(name_of(each.prompt.id, each.part)))
        self.num_done = self.num_dialogues - len(self._waiting)

    def rows(self, should_stop: Callable[[], bool]) -> Iterator[list[TokenRow]]:
        """The rows of each dialogue as it ends, in any order, until all have or it is to stop. What runs then is given up."""
        try:
            while (self._waiting or self._running) and not should_stop():
                while self._waiting and len(self._running) < self._config.concurrency:
                    self._ask(self._waiting.popleft())
                ended = self._next_answer(should_stop)
                if ended is not None and self._is_over(ended):
                    self.num_done += 1
                    if ended.rows:
                        yield ended.rows
                    else:
                        self._left_out[NOTHING_TO_LEARN] += 1
        finally:
            for session_id in list(self._running):
                if self._engine.is_running:
                    self._engine.close_session(session_id)
            self._running.clear()

    def _ask(self, dialogue: _Dialogue) -> None:
        """Have its history, which ends where the assistant is to speak, continued."""
        if not dialogue.session_id:
            dialogue.session_id = self._engine.create_session(SessionOptions(capture=Switch.OFF)).session_id
            self._engine.append(dialogue.session_id, dialogue.history)
        session_id, dialogue.said = dialogue.session_id, []
        key = f"{self._seed}\0{name_of(dialogue.prompt.id, str(dialogue.number))}\0{dialogue.num_turns}"
        params = SamplingParams(
            max_tokens=self._config.max_tokens,
            temperature=dialogue.temperature,
            seed=int(unit_hash("capture", key) * 2**62),
            detokenize=False,
        )

        def on_event(event: Event, said: list[int] = dialogue.said) -> None:
            if isinstance(event, Tokens):
                said += event.token_ids
            elif isinstance(event, Done | Failed):
                self._ended.put((session_id, event))

        self._running[session_id] = dialogue
        self._engine.generate(session_id, params, on_event=on_event)

    def _next_answer(self, should_stop: Callable[[], bool]) -> _Dialogue | None:
        while not should_stop():
            try:
                session_id, event = self._ended.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                continue
            if isinstance(event, Failed):
                raise event.error
            return self._running.pop(session_id)
        return None

    def _is_over(self, dialogue: _Dialogue) -> bool:
        """Take in the answer; ask the next question, if there is one. Whether the dialogue has ended."""
        start = len(dialogue.history)
        dialogue.history += dialogue.said
        dialogue.num_turns += 1
        self.num_generated += len(dialogue.said)
        if dialogue.said:
            dialogue.spans.append((start, len(dialogue.history)))
        following = self._following(dialogue) if dialogue.later else None
        if following is None:
            self._engine.close_session(dialogue.session_id)
            dialogue.end_row()
            return True
        if following[: len(dialogue.history)] == dialogue.history:
            self._engine.append(dialogue.session_id, following[len(dialogue.history) :])
        else:
            self._engine.close_session(dialogue.session_id)
            dialogue.session_id = ""
            dialogue.end_row()
        dialogue.history = following
        self._ask(dialogue)
        return False

    def _following(self, dialogue: _Dialogue) -> list[int] | None:
        """The ids up to where the next answer begins; None, counted, if the question cannot be asked."""
        text = self._tokenizer.decode(dialogue.said)
        dialogue.messages.append({"role": "assistant", "content": text})
        dialogue.messages.append({"role": "user", "content": dialogue.later.popleft()})
        try:
            following = self._tokenizer.encode_chat(dialogue.messages, dialogue.prompt.tools)
        except (InvalidRequest, RecursionError):
            self._left_out[REFUSED_BY_TEMPLATE] += 1
            return None
        if len(following) + self._config.max_tokens > self._max_tokens:
            self._left_out[TOO_LONG] += 1
            return None
        return following
