"""Answers of an evaluation: one by one from an engine, with what each verification step accepted, and kept as they come.

An answer is a line of answers.jsonl, written when it ends: a process that is killed loses those that were running, and the
next one makes these and no others. What the drafter gained is counted by the place in the answer, so that one long answer
tells the figures of its beginning too.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from runtime.engine.base import Generation, OnEvent
from runtime.engine.local import LocalEngine
from runtime.errors import ConfigError
from runtime.features.refs import unit_hash
from runtime.files import hold
from runtime.types import SamplingParams, SessionOptions, Switch
from training import asking
from training.judging.questions import Question

PLAIN = "plain"  # the shape of answers without a drafter
LOOP_GRAM = 8


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
    """One question answered. steps: drafts accepted by each verification."""

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
    prefilled: list[int] = field(
        default_factory=lambda: [0]
    )  # places of tokens of no step: as a rule the prompt's own, the first

    @property
    def key(self) -> tuple[Pass, str, str]:
        return Pass(self.drafter, self.shape, self.temperature), self.suite, self.question

    def upto(self, length: int) -> tuple[int, int]:
        """(verification steps, accepted drafts) of the first `length` tokens, as if no more had been asked for."""
        place = num_steps = num_accepted = 0  # place: of the step's first token
        for accepted in self.steps:
            while place in self.prefilled:
                place += 1
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


def steps_of(drafted: Sequence[bool], prefilled: Sequence[int] = (0,)) -> list[int]:
    """Accepted drafts of each step, from which tokens of an answer were drafted, and which came with a prefill: a step is its
    accepted drafts and one token that was not drafted, which the last step may lack.

        prompt's own | drafted drafted own | own | drafted          steps 2, 0, 1

    An answer may begin with a step: where a prompt's last token was all that was left to read, it is drafted behind it.
    """
    steps: list[int] = []
    accepted = 0
    for place, is_draft in enumerate(drafted):
        if place in prefilled:
            continue
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
        start = partial(self._start, under)
        with closing(asking.answers(self._engine, deque(questions), self._concurrency, start, self._stop.is_set)) as ended:
            for answer in ended:
                self._engine.close_session(answer.session_id)
                yield _counted(under, answer)

    def _start(self, under: Pass, question: Question, on_event: OnEvent) -> tuple[str, Generation]:
        engine = self._engine
        session = engine.create_session(SessionOptions(capture=Switch.OFF)).session_id
        engine.append(session, question.token_ids)
        params = SamplingParams(
            max_tokens=self._max_tokens, temperature=under.temperature, speculate=under.shape != PLAIN, detokenize=False
        )
        chance = int(unit_hash("evaluate", f"{self._seed}:{under.temperature:g}:{question.suite}:{question.id}") * 2**32)
        return session, engine.generate(session, params, on_event=on_event, entropy=chance)


def _counted(under: Pass, answer: asking.Answer[Question]) -> Answer:
    counted, steps = answer.done.speculation, steps_of(answer.drafted, answer.prefilled)
    # Without a drafter there is a step for each token but what came with a prefill; the engine counts these too.
    is_same = (len(steps), sum(steps)) == (counted.num_steps, counted.num_accepted)
    assert is_same, f"{len(steps)} steps accepted {sum(steps)} drafts, and the engine counted {counted}"
    return Answer(
        drafter=under.drafter,
        shape=under.shape,
        temperature=under.temperature,
        suite=answer.asked.suite,
        question=answer.asked.id,
        token_ids=answer.token_ids,
        steps=steps,
        accepted_per_position=counted.accepted_per_position,
        drafted_per_position=counted.drafted_per_position,
        seconds=round(answer.seconds, 4),
        prefilled=answer.prefilled,
    )
