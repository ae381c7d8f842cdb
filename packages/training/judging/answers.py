"""Answers of an evaluation: one by one from an engine, with what each verification step accepted, and kept as they come.

An answer is a line of answers.jsonl, written when it ends: a process that is killed loses those that were running, and the
next one makes these and no others. What the drafter gained is counted by the place in the answer, so that one long answer
tells the figures of its beginning too.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from runtime.engine.local import LocalEngine
from runtime.errors import ConfigError
from runtime.features.refs import unit_hash
from runtime.files import hold
from runtime.types import Done, Event, Failed, SamplingParams, SessionOptions, SpeculationStats, Switch, Tokens
from training.judging.questions import Question

PLAIN = "plain"  # the shape of answers without a drafter
LOOP_GRAM = 8
LOOK_EVERY_S = 0.2  # how often a wait for answers looks whether it is to stop


@dataclass(frozen=True)
class Pass:
    """What all questions are asked under."""

    drafter: str  # its version
    shape: str
    temperature: float

    @property
    def words(self) -> str:
        return f"{self.drafter}, {self.shape}, T={self.temperature:g}"


@dataclass(frozen=True)
class Answer:
    """One question answered. steps: drafts accepted by each verification; the first token is the prompt's own, of no step."""

    drafter: str
    shape: str
    temperature: float
    suite: str
    question: str
    token_ids: list[int]
    steps: list[int]
    accepted_per_position: list[int]
    drafted_per_position: list[int]
    seconds: float  # from asking to the end, beside others

    @property
    def key(self) -> tuple[Pass, str, str]:
        return Pass(self.drafter, self.shape, self.temperature), self.suite, self.question

    def upto(self, length: int) -> tuple[int, int]:
        """(verification steps, accepted drafts) of the first `length` tokens, as if no more had been asked for."""
        place = 1  # of the step's first token
        num_steps = num_accepted = 0
        for accepted in self.steps:
            if place >= length:
                break
            num_steps += 1
            num_accepted += min(accepted, length - place)
            place += accepted + 1
        return num_steps, num_accepted

    def loops(self, length: int) -> tuple[int, int]:
        """(8-grams seen before in this answer, all 8-grams) of the first `length` tokens."""
        ids = self.token_ids[:length]
        grams = [tuple(ids[i : i + LOOP_GRAM]) for i in range(len(ids) - LOOP_GRAM + 1)]
        return len(grams) - len(set(grams)), len(grams)


def steps_of(drafted: Sequence[bool]) -> list[int]:
    """Accepted drafts of each step, from which tokens of an answer were drafted: a step is its accepted drafts and one token
    that was not drafted, which the last step may lack.

        prompt's own | drafted drafted own | own | drafted          steps 2, 0, 1
    """
    steps: list[int] = []
    accepted = 0
    for is_draft in drafted[1:]:
        if is_draft:
            accepted += 1
        else:
            steps.append(accepted)
            accepted = 0
    return [*steps, accepted] if accepted else steps


class AnswerLog:
    """The answers that there are, in a file that is only appended to."""

    def __init__(self, path: Path) -> None:
        """ConfigError if another process writes there, or what lies there is no answer."""
        try:
            self._file = hold(path)
        except BlockingIOError as error:
            raise ConfigError(
                f"evaluate.out is {str(path.parent)!r}, and another process is evaluating there; wait for it, or use another one."
            ) from error
        self.answers: dict[tuple[Pass, str, str], Answer] = {}
        try:
            self._read(path)
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:end].split(b"\n")[:-1], 1):
            try:
                answer = Answer(**json.loads(line))
                self.answers[answer.key] = answer
            except (ValueError, TypeError, RecursionError) as error:
                raise ConfigError(
                    f"{path}:{number} is no answer of an evaluation ({error}); remove the line, and its question is asked "
                    "again, or give another evaluate.out."
                ) from error
        os.truncate(path, end)  # a line that a killed process left half-written

    def add(self, answer: Answer) -> None:
        self._file.write(json.dumps(asdict(answer), separators=(",", ":")) + "\n")
        self._file.flush()
        self.answers[answer.key] = answer

    def close(self) -> None:
        self._file.close()


class Asker:
    """Keeps an engine busy with so many questions at a time. The engine runs, and nobody else uses it."""

    def __init__(self, engine: LocalEngine, max_tokens: int, concurrency: int, seed: int, stop: threading.Event) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self._concurrency = concurrency
        self._seed = seed
        self._stop = stop

    def ask(self, under: Pass, questions: Sequence[Question]) -> Iterator[Answer]:
        """Answers as they end. Ends early when it is to stop; what is running then is given up."""
        ended: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        waiting = deque(questions)
        running = 0
        while not self._stop.is_set():
            while waiting and running < self._concurrency:
                self._start(under, waiting.popleft(), ended.put)
                running += 1
            if not running:
                return
            try:
                answer = ended.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                continue
            if isinstance(answer, Exception):
                raise answer
            running -= 1
            yield answer

    def _start(self, under: Pass, question: Question, put: Callable[[Answer | Exception], None]) -> None:
        engine = self._engine
        session = engine.create_session(SessionOptions(capture=Switch.OFF)).session_id
        engine.append(session, question.token_ids)
        params = SamplingParams(
            max_tokens=self._max_tokens, temperature=under.temperature, speculate=under.shape != PLAIN, detokenize=False
        )
        chance = int(unit_hash("evaluate", f"{self._seed}:{under.temperature:g}:{question.suite}:{question.id}") * 2**32)
        listener = _Listener(under, question, partial(engine.close_session, session), put)
        engine.generate(session, params, on_event=listener, entropy=chance)


class _Listener:
    """Gathers one answer, on the engine's thread."""

    def __init__(
        self, under: Pass, question: Question, close: Callable[[], None], put: Callable[[Answer | Exception], None]
    ) -> None:
        self._under, self._question, self._close, self._put = under, question, close, put
        self._token_ids: list[int] = []
        self._drafted: list[bool] = []
        self._began_at = time.monotonic()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self._token_ids += event.token_ids
            self._drafted += event.drafted
        elif isinstance(event, Failed):
            self._put(event.error)
        elif isinstance(event, Done):
            self._close()
            self._put(self._answer(event.speculation))

    def _answer(self, counted: SpeculationStats) -> Answer | Exception:
        steps = steps_of(self._drafted)
        # Without a drafter there is a step for each token but the first; the engine counts these too.
        if (len(steps), sum(steps)) != (counted.num_steps, counted.num_accepted):
            return AssertionError(f"{len(steps)} steps accepted {sum(steps)} drafts, and the engine counted {counted}")
        return Answer(
            drafter=self._under.drafter,
            shape=self._under.shape,
            temperature=self._under.temperature,
            suite=self._question.suite,
            question=self._question.id,
            token_ids=self._token_ids,
            steps=steps,
            accepted_per_position=counted.accepted_per_position,
            drafted_per_position=counted.drafted_per_position,
            seconds=round(time.monotonic() - self._began_at, 4),
        )
