"""Keeps an engine busy with a fixed number of answers at a time. Who asks says what, under which parameters, and what follows.

    waiting -> start -> engine -> its events, on its thread -> a queue -> answers, as they end

Knows no prompt, no row and no figure.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from runtime.engine.base import Engine, Generation, OnEvent
from runtime.types import Done, Event, Failed, Tokens

LOOK_EVERY_S = 0.1  # how often whoever waits for an answer looks whether to stop

Asked = TypeVar("Asked")
Start = Callable[[Asked, OnEvent], tuple[str, Generation]]
"""Begins an answer with this listener; its session, and the generation there."""


@dataclass
class Answer(Generic[Asked]):
    """One that has ended. Its session is there still: whoever takes the answer closes it, or goes on in it."""

    asked: Asked
    session_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)  # per token: proposed by the drafter, and accepted
    prefilled: list[int] = field(default_factory=list)  # places of tokens that are of no verification step
    done: Done = field(init=False)
    seconds: float = 0.0  # from asking to the end, beside others


def answers(
    engine: Engine, waiting: deque[Asked], concurrency: int, start: Start[Asked], should_stop: Callable[[], bool]
) -> Generator[Answer[Asked], None, None]:
    """Answers as they end, until nothing waits and nothing runs, or it is to stop. Who takes one may have more wait.

    What an answer failed with is raised. What runs when this is closed is given up, so close it where an error may end it.
    """
    running: dict[str, Generation] = {}
    ended: queue.SimpleQueue[Answer[Asked] | Exception] = queue.SimpleQueue()
    try:
        while (waiting or running) and not should_stop():
            while waiting and len(running) < concurrency:
                answer = Answer(waiting.popleft())
                answer.session_id, generation = start(answer.asked, _listener(answer, ended.put))
                running[answer.session_id] = generation
            try:
                next_one = ended.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                continue
            if isinstance(next_one, Exception):
                raise next_one
            del running[next_one.session_id]
            yield next_one
    finally:
        for session_id, generation in running.items():
            generation.cancel()
            if engine.is_running:
                engine.close_session(session_id)


def _listener(answer: Answer[Asked], put: Callable[[Answer[Asked] | Exception], None]) -> OnEvent:
    """Gathers one answer, on the engine's thread."""
    began_at = time.monotonic()

    def on_event(event: Event) -> None:
        if isinstance(event, Tokens):
            if event.is_prefills:
                answer.prefilled.append(len(answer.token_ids))
            answer.token_ids += event.token_ids
            answer.drafted += event.drafted
        elif isinstance(event, Failed):
            put(event.error)
        elif isinstance(event, Done):
            answer.done, answer.seconds = event, time.monotonic() - began_at
            put(answer)

    return on_event
